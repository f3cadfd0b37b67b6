/* gemm_bf16.c - the tiles of gemm.h for AVX-512 with dot products of bfloat16.
 *
 * What gemm.h calls floats are pairs of bfloat16 here, two elements along K side by side: A is read
 * as it lies in memory, B is packed in pairs (pack.c). Products are exact, sums are float32;
 * denormal operands count as 0.
 */
#if defined(__x86_64__) && defined(__GNUC__)
#if defined(__clang__)
#pragma clang attribute push(                                                          \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma"))), \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,prefer-vector-width=512")
#endif
#define TRVV_N 16
#define TRVG_NP 2
#define TRVG_MR 12
#define TRVG_TILES_ONLY
#define TRVG_MAC(x, w, sum) (trvv) _mm512_dpbf16_ps((__m512)(sum), (__m512bh)(x), (__m512bh)(w))
#include "gemm_tiles.h"

const trvk_gemm trvk_gemm_bf16 = {
    .mr = TRVG_MR, .np = TRVG_NP, .tile = {tiles_1, tiles_2}, .stream = stream_row};

void trvk_matmul__avx512bf16(const trvk_call* call, uint32_t tile) {
  trvk_matmul_run(call, tile, &trvk_gemm_avx512, &trvk_gemm_bf16);
}
void trvk_conv__avx512bf16(const trvk_call* call, uint32_t tile) {
  trvk_conv_run(call, tile, &trvk_gemm_avx512, &trvk_gemm_bf16);
}
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int trvk_no_bf16; /* C wants something in a file */
#endif
