/* qgemm_i8mm.c - the integer products of qgemm.h for arm64 with dot products and matrix products of
 * bytes. */
#if defined(__aarch64__) && defined(__GNUC__) && (!defined(__clang__) || __clang_major__ >= 16)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod,i8mm"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod+i8mm")
#pragma GCC optimize("no-schedule-insns") /* see gemm_ref.c */
#endif
#define TRVV_N 4
#define TRVQ_DOT 1
#define TRVQ_MATRIX 1
#include "qconv.h"
#include "qmatmul.h"
#define TRVK_Q_FLOATS static void q_floats
/* clang-format off */
#include "qarm.h"
#include "qfloats.inc"
#include "qrows.inc"
#include "qdw_tiles.h"
/* clang-format on */

static const trvk_qgemm qgemm = {q_words, q_bytes, q_nibbles,    NULL,
                                 0,       q_sums,  q_group_sums, q_out,
                                 q_real,  q_range, q_quantise8,  q_quantise16};

void trvk_qmatmul__i8mm(const trvk_call* call, uint32_t tile) {
  trvk_qmatmul_run(call, tile, &qgemm, NULL);
}
void trvk_qmatmul_dynamic__i8mm(const trvk_call* call, uint32_t tile) {
  trvk_qmatmul_dynamic_run(call, tile, &qgemm, &trvk_gemm_ref);
}
void trvk_qmatmul_real__i8mm(const trvk_call* call, uint32_t tile) {
  trvk_qmatmul_real_run(call, tile, &qgemm, &trvk_gemm_ref, q_floats);
}
void trvk_qconv__i8mm(const trvk_call* call, uint32_t tile) {
  trvk_qconv_run(call, tile, &qgemm, q_depthwise, NULL);
}
void trvk_qconv_real__i8mm(const trvk_call* call, uint32_t tile) {
  trvk_qconv_real_run(call, tile, &qgemm, q_depthwise, &trvk_gemm_ref, q_floats);
}
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int trvk_no_i8mm; /* C wants something in a file */
#endif
