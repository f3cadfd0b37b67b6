/* gemm_avx2.c - the tiles of gemm.h for AVX2 with FMA. */
#if defined(__x86_64__) && defined(__GNUC__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
#define TRVV_N 8
#define TRVG_NP 1
#define TRVG_MR 6
#include "gemm_tiles.h"
#include "qconv.h"
#include "qmatmul.h"
#define TRVK_Q_FLOATS static void q_floats
#include "qfloats.inc"
#include "qgemm_tiles.h"

static const trvk_gemm gemm = {TRVG_MR, TRVG_NP,       {tiles_1},   stream_row, dot_rows, dw_row,
                               act_row, scale_max_row, exp_sum_row, lstm_row,   gru_row};

void trvk_matmul__avx2(const trvk_call* call, uint32_t tile) { trvk_matmul_run(call, tile, &gemm); }
void trvk_conv__avx2(const trvk_call* call, uint32_t tile) { trvk_conv_run(call, tile, &gemm); }
void trvk_attention__avx2(const trvk_call* call, uint32_t tile) {
  trvk_attention_run(call, tile, &gemm);
}
void trvk_rnn__avx2(const trvk_call* call, uint32_t tile) { trvk_rnn_run(call, tile, &gemm); }
void trvk_qmatmul__avx2(const trvk_call* call, uint32_t tile) {
  trvk_qmatmul_run(call, tile, &qgemm, NULL);
}
void trvk_qmatmul_dynamic__avx2(const trvk_call* call, uint32_t tile) {
  trvk_qmatmul_dynamic_run(call, tile, &qgemm, &gemm);
}
void trvk_qmatmul_real__avx2(const trvk_call* call, uint32_t tile) {
  trvk_qmatmul_real_run(call, tile, &qgemm, &gemm, q_floats);
}
void trvk_qconv__avx2(const trvk_call* call, uint32_t tile) {
  trvk_qconv_run(call, tile, &qgemm, NULL);
}
void trvk_qconv_real__avx2(const trvk_call* call, uint32_t tile) {
  trvk_qconv_real_run(call, tile, &qgemm, &gemm, q_floats);
}
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int trvk_no_avx2; /* C wants something in a file */
#endif
