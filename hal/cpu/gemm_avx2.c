/* gemm_avx2.c - the tiles of gemm.h for AVX2 with FMA. */
#if defined(__x86_64__) && defined(__GNUC__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#define TRVV_N 8
#define TRVG_NP 1
#define TRVG_MR 6
#include "gemm_tiles.h"

const trvk_gemm trvk_gemm_avx2 = {
    TRVG_MR,  TRVG_NP,   {tiles_1},        stream_row,   dot_rows,      dw_row,
    act_row,  mix_rows,  most_row,         exp2_sum_row, lstm_row,      lstm_step,
    gru_row,  widen_row, narrow_row,       widen_pairs,  stream_halves, wino_in,
    wino_mul, wino_out,  {line_1, line_2}, TRVG_LINE};

void trvk_matmul__avx2(const trvk_call* call, uint32_t tile) {
  trvk_matmul_run(call, tile, &trvk_gemm_avx2, NULL);
}
void trvk_conv__avx2(const trvk_call* call, uint32_t tile) {
  trvk_conv_run(call, tile, &trvk_gemm_avx2, NULL);
}
void trvk_attention__avx2(const trvk_call* call, uint32_t tile) {
  trvk_attention_run(call, tile, &trvk_gemm_avx2);
}
void trvk_rnn__avx2(const trvk_call* call, uint32_t tile) {
  trvk_rnn_run(call, tile, &trvk_gemm_avx2);
}
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int trvk_no_avx2; /* C wants something in a file */
#endif
