/* qmatmul.h - a product with a weight in 8 or 4 bits, or of two quantised values, in terms of
 * matmul.h. */
#ifndef TRVK_QMATMUL_H
#define TRVK_QMATMUL_H

#include "matmul.h"
#include "qgemm.h"

typedef struct trvk_qmatmul {
  trvf_matmul_attrs attrs;
  trv_tensor in[3]; /* a, b (as if plain where it is packed), bias of a real a */
  trvk_call call;   /* a matmul command of these; matmul.c works out its plan */
  trvk_matmul_plan p;
  trvk_qweight w;
  size_t bytes; /* of the packed weight */
} trvk_qmatmul;

/* Fills q, which must stay in place; NULL, or what does not fit. */
const char* trvk_qmatmul_make(const trvk_call* call, trvk_qmatmul* q, int64_t* expected,
                              int64_t* got);

/* Stored a. real: for real results. */
void trvk_qmatmul_run(const trvk_call* call, uint32_t tile, const trvk_qgemm* gemm,
                      const trvk_gemm* real);
/* Real a that is quantised by rows. */
void trvk_qmatmul_dynamic_run(const trvk_call* call, uint32_t tile, const trvk_qgemm* gemm,
                              const trvk_gemm* real);
/* Real a otherwise, or real results of a stored one. */
void trvk_qmatmul_real_run(const trvk_call* call, uint32_t tile, const trvk_qgemm* gemm,
                           const trvk_gemm* real, trvk_q_floats_fn floats);
#endif
