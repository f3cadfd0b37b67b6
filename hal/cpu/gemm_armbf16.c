/* gemm_armbf16.c - the tiles of gemm.h for arm64 with dot products of bfloat16.
 *
 * As gemm_bf16.c: what gemm.h calls floats are pairs of bfloat16. Sums of pairs are rounded as the
 * instruction does (to odd; denormals count as 0).
 */
#if defined(__aarch64__) && defined(__GNUC__) && (!defined(__clang__) || __clang_major__ >= 16)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("bf16"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+bf16")
#pragma GCC optimize("no-schedule-insns") /* see gemm_ref.c */
#endif
#define TRVV_N 4
#define TRVG_NP 1
#define TRVG_MR 6
#define TRVG_TILES_ONLY
#define TRVG_MAC(x, w, sum) \
  ((trvv)vbfdotq_f32((float32x4_t)(sum), (bfloat16x8_t)(w), (bfloat16x8_t)(x)))
#if defined(__clang__) /* its builtin wants the constant before loops are unrolled */
#define TRVG_MAC_LANE(x, lane, w, sum)                      \
  ((trvv)vbfdotq_f32((float32x4_t)(sum), (bfloat16x8_t)(w), \
                     (bfloat16x8_t)vdupq_n_f32(((float32x4_t)(x))[lane])))
#else
#define TRVG_MAC_LANE(x, lane, w, sum) \
  ((trvv)vbfdotq_laneq_f32((float32x4_t)(sum), (bfloat16x8_t)(w), (bfloat16x8_t)(x), lane))
#endif
#include "gemm_tiles.h"

static const trvk_gemm pairs = {
    .mr = TRVG_MR, .np = TRVG_NP, .tile = {tiles_1}, .stream = stream_row};

void trvk_matmul__armbf16(const trvk_call* call, uint32_t tile) {
  trvk_matmul_run(call, tile, &trvk_gemm_ref, &pairs);
}
void trvk_conv__armbf16(const trvk_call* call, uint32_t tile) {
  trvk_conv_run(call, tile, &trvk_gemm_ref, &pairs);
}
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int trvk_no_armbf16; /* C wants something in a file */
#endif
