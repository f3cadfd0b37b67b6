/* gemm_ref.c - the tiles of gemm.h for the instruction set that the whole library is compiled for.
 */
#if defined(__aarch64__) && defined(__GNUC__) && !defined(__clang__)
/* Ordered for latency before registers are given out, 24 sums and their operands would spill. */
#pragma GCC optimize("no-schedule-insns")
#endif
#define TRVV_N 4
#define TRVG_NP 1
#if defined(__aarch64__)
#define TRVG_MR 6
#else
#define TRVG_MR 2
#endif
#include "gemm_tiles.h"

const trvk_gemm trvk_gemm_ref = {
    TRVG_MR,  TRVG_NP,   {tiles_1},        stream_row,   dot_rows,      dw_row,
    act_row,  mix_rows,  most_row,         exp2_sum_row, lstm_row,      lstm_step,
    gru_row,  widen_row, narrow_row,       widen_pairs,  stream_halves, wino_in,
    wino_mul, wino_out,  {line_1, line_2}, TRVG_LINE};

void trvk_matmul__ref(const trvk_call* call, uint32_t tile) {
  trvk_matmul_run(call, tile, &trvk_gemm_ref, NULL);
}
void trvk_conv__ref(const trvk_call* call, uint32_t tile) {
  trvk_conv_run(call, tile, &trvk_gemm_ref, NULL);
}
void trvk_attention__ref(const trvk_call* call, uint32_t tile) {
  trvk_attention_run(call, tile, &trvk_gemm_ref);
}
void trvk_rnn__ref(const trvk_call* call, uint32_t tile) {
  trvk_rnn_run(call, tile, &trvk_gemm_ref);
}
