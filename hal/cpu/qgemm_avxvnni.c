/* qgemm_avxvnni.c - the integer products of qgemm.h for AVX2 with AVX-VNNI. */
#if defined(__x86_64__) && defined(__GNUC__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avxvnni"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avxvnni")
#endif
#define TRVV_N 8
#define TRVQ_DOT 1
#include "qconv.h"
#include "qmatmul.h"
#define TRVK_Q_FLOATS static void q_floats
/* clang-format off */
#include "qfloats.inc"
#include "qgemm_tiles.h"
#include "qbytes_tiles.h"
#include "qrows.inc"
#include "qstream.inc"
#include "qdw_tiles.h"
/* clang-format on */

static const trvk_qgemm qgemm = {q_words, q_bytes, q_nibbles,    q_stream,
                                 128,     q_sums,  q_group_sums, q_out,
                                 q_real,  q_range, q_quantise8,  q_quantise16};

void trvk_qmatmul__avxvnni(const trvk_call* call, uint32_t tile) {
  trvk_qmatmul_run(call, tile, &qgemm, NULL);
}
void trvk_qmatmul_dynamic__avxvnni(const trvk_call* call, uint32_t tile) {
  trvk_qmatmul_dynamic_run(call, tile, &qgemm, &trvk_gemm_avx2);
}
void trvk_qmatmul_real__avxvnni(const trvk_call* call, uint32_t tile) {
  trvk_qmatmul_real_run(call, tile, &qgemm, &trvk_gemm_avx2, q_floats);
}
void trvk_qconv__avxvnni(const trvk_call* call, uint32_t tile) {
  trvk_qconv_run(call, tile, &qgemm, q_depthwise, NULL);
}
void trvk_qconv_real__avxvnni(const trvk_call* call, uint32_t tile) {
  trvk_qconv_real_run(call, tile, &qgemm, q_depthwise, &trvk_gemm_avx2, q_floats);
}
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int trvk_no_avxvnni; /* C wants something in a file */
#endif
