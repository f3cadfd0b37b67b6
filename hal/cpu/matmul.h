/* matmul.h - a matmul's sizes and strides, batch axes joined where possible. */
#ifndef TRVK_MATMUL_H
#define TRVK_MATMUL_H

#include "gemm.h"

typedef struct trvk_matmul_operand {
  const trv_tensor* t; /* NULL: not there */
  trv_dim batch[TRV_MAX_RANK], row,
      col; /* strides along the output's batch axes, rows, columns (a: col = K; b: row = K) */
} trvk_matmul_operand;

typedef struct trvk_matmul_plan {
  trv_dim m, n, k, dim[TRV_MAX_RANK];
  uint32_t nb;
  int vector; /* a is a vector: no M axis */
  trvk_matmul_operand a, b, out, bias, res;
  const struct trvk_qweight* q; /* of a weight in 8 or 4 bits (qgemm.h), else NULL */
} trvk_matmul_plan;

/* NULL, or what does not fit. */
const char* trvk_matmul_plan_make(const trvk_call* call, trvk_matmul_plan* p, int64_t* expected,
                                  int64_t* got);

/* Floats but float64, by the plan. attrs of the call: trvf_matmul_attrs. */
void trvk_matmul_floats(const trvk_call* call, const trvk_matmul_plan* p, uint32_t tile,
                        const trvk_gemm* g, const trvk_gemm* pairs);
/* float64 and integers (matmul_plain.c). */
void trvk_matmul_plain(const trvk_call* call, const trvk_matmul_plan* p, uint32_t tile);
#endif
