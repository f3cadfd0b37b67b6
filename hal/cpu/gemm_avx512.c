/* gemm_avx512.c - the tiles of gemm.h for AVX-512. */
#if defined(__x86_64__) && defined(__GNUC__)
#if defined(__clang__)
#pragma clang attribute push(                                                    \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#endif
#define TRVV_N 16
#define TRVG_NP 2
#define TRVG_MR 12
#include "gemm_tiles.h"

const trvk_gemm trvk_gemm_avx512 = {
    TRVG_MR,  TRVG_NP,   {tiles_1, tiles_2}, stream_row,   dot_rows,      dw_row,
    act_row,  mix_rows,  most_row,           exp2_sum_row, lstm_row,      lstm_step,
    gru_row,  widen_row, narrow_row,         widen_pairs,  stream_halves, wino_in,
    wino_mul, wino_out,  {line_1, line_2},   TRVG_LINE};

void trvk_matmul__avx512(const trvk_call* call, uint32_t tile) {
  trvk_matmul_run(call, tile, &trvk_gemm_avx512, NULL);
}
void trvk_conv__avx512(const trvk_call* call, uint32_t tile) {
  trvk_conv_run(call, tile, &trvk_gemm_avx512, NULL);
}
void trvk_attention__avx512(const trvk_call* call, uint32_t tile) {
  trvk_attention_run(call, tile, &trvk_gemm_avx512);
}
void trvk_rnn__avx512(const trvk_call* call, uint32_t tile) {
  trvk_rnn_run(call, tile, &trvk_gemm_avx512);
}
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int trvk_no_avx512; /* C wants something in a file */
#endif
