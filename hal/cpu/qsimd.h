/* qsimd.h - the fixed point of quant.h in x86 vectors: one-rounding rescaling of 32-bit sums, and
 * packing of results to i8. For files that set a target of AVX2 (TRVV_N 8) or AVX-512 (TRVV_N 16)
 * and say so before; with TRVV_N 16 both widths are there. Names end in the number of 32-bit lanes.
 *
 * Rescaling, for shifts from TRVK_QS_SHIFT to 62, any 32-bit v and 0 <= m < 2^31 (schema/ops.fbs):
 *   floor((v * m + 2^(s-1)) / 2^s) = (floor(v * m / 2^32) + half) >> down,
 *   half = 2^(s-33), down = s - 32.
 * The sum stays inside 32 bits for all of those. Vector multiplications of 32 x 32 to 64 bits take
 * even lanes only: `m_odd` is m moved down by one lane, which a load from the address of m[1]
 * gives, so that arrays of multipliers have one number more than lanes are used.
 */
#ifndef TRVK_QSIMD_H
#define TRVK_QSIMD_H

#include <immintrin.h>

#include "quant.h"

#define TRVK_QS_SHIFT 33

static inline __m256i qs_load_8(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
static inline void qs_store_8(void* p, __m256i v) { _mm256_storeu_si256((__m256i*)p, v); }

/* floor(v * m / 2^32), signed. */
static inline __m256i qs_high_8(__m256i v, __m256i m, __m256i m_odd) {
  const __m256i even = _mm256_mul_epi32(v, m),
                odd = _mm256_mul_epi32(_mm256_srli_epi64(v, 32), m_odd);
  return _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
}
static inline __m256i qs_rescale_8(__m256i v, __m256i m, __m256i m_odd, __m256i half,
                                   __m256i down) {
  return _mm256_srav_epi32(_mm256_add_epi32(qs_high_8(v, m, m_odd), half), down);
}
/* clamp(zero + v, lo, hi) of four vectors of 32 bits as bytes; zero has lanes of 16 bits, lo and hi
 * of 8. In each 16 bytes of the result there are four of a, then of b, c, d: those of the same 16
 * bytes of these. */
static inline __m256i qs_bytes_8(__m256i a, __m256i b, __m256i c, __m256i d, __m256i zero,
                                 __m256i lo, __m256i hi) {
  const __m256i u = _mm256_adds_epi16(_mm256_packs_epi32(a, b), zero),
                v = _mm256_adds_epi16(_mm256_packs_epi32(c, d), zero);
  return _mm256_min_epi8(_mm256_max_epi8(_mm256_packs_epi16(u, v), lo), hi);
}
/* The bytes of qs_bytes in the order of a, b, c, d. */
static inline __m256i qs_order_8(__m256i bytes) {
  return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

#if TRVV_N == 16
static inline __m512i qs_load_16(const void* p) { return _mm512_loadu_si512(p); }
static inline void qs_store_16(void* p, __m512i v) { _mm512_storeu_si512(p, v); }
static inline __m512i qs_high_16(__m512i v, __m512i m, __m512i m_odd) {
  const __m512i even = _mm512_mul_epi32(v, m),
                odd = _mm512_mul_epi32(_mm512_srli_epi64(v, 32), m_odd);
  /* the high halves of even to where odd has its low halves */
  return _mm512_mask_shuffle_epi32(odd, 0x5555, even, _MM_PERM_DDBB);
}
static inline __m512i qs_rescale_16(__m512i v, __m512i m, __m512i m_odd, __m512i half,
                                    __m512i down) {
  return _mm512_srav_epi32(_mm512_add_epi32(qs_high_16(v, m, m_odd), half), down);
}
static inline __m512i qs_bytes_16(__m512i a, __m512i b, __m512i c, __m512i d, __m512i zero,
                                  __m512i lo, __m512i hi) {
  const __m512i u = _mm512_adds_epi16(_mm512_packs_epi32(a, b), zero),
                v = _mm512_adds_epi16(_mm512_packs_epi32(c, d), zero);
  return _mm512_min_epi8(_mm512_max_epi8(_mm512_packs_epi16(u, v), lo), hi);
}
static inline __m512i qs_order_16(__m512i bytes) {
  return _mm512_permutexvar_epi32(
      _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), bytes);
}
#endif
#endif
