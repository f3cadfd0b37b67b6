/* vec.h - TRVV_N floats at once, for kernels that are written once and compiled per instruction
 * set.
 *
 * Define TRVV_N (4, 8 or 16) before including it; a file for AVX2 or AVX-512 selects its target
 * first. Loads and stores take any alignment of floats. fma rounds once where the instruction set
 * has it.
 */
#ifndef TRVK_VEC_H
#define TRVK_VEC_H

#include <stdint.h>

#ifndef TRVV_N
#define TRVV_N 4
#endif

#if defined(__GNUC__)
#define TRVV_INLINE static inline __attribute__((always_inline))
#define TRVV_UNROLL _Pragma("GCC unroll 32")

typedef float trvv __attribute__((vector_size(4 * TRVV_N)));
typedef int32_t trvv_i __attribute__((vector_size(4 * TRVV_N)));
typedef float trvv_any __attribute__((vector_size(4 * TRVV_N), aligned(4), may_alias));

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

TRVV_INLINE trvv trvv_load(const float* p) { return *(const trvv_any*)(const void*)p; }
TRVV_INLINE void trvv_store(float* p, trvv v) { *(trvv_any*)(void*)p = v; }
#if TRVV_N == 16
TRVV_INLINE trvv trvv_set(float x) {
  return (trvv){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
}
#elif TRVV_N == 8
TRVV_INLINE trvv trvv_set(float x) { return (trvv){x, x, x, x, x, x, x, x}; }
#else
TRVV_INLINE trvv trvv_set(float x) { return (trvv){x, x, x, x}; }
#endif
TRVV_INLINE trvv trvv_add(trvv a, trvv b) { return a + b; }
TRVV_INLINE trvv trvv_mul(trvv a, trvv b) { return a * b; }

#if TRVV_N == 16 && defined(__AVX512F__)
TRVV_INLINE trvv trvv_fma(trvv a, trvv b, trvv c) {
  return (trvv)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
TRVV_INLINE trvv trvv_clamp(trvv x, trvv lo, trvv hi) {
  return (trvv)_mm512_min_ps((__m512)hi, _mm512_max_ps((__m512)lo, (__m512)x));
}
#define TRVV_MAX(a, b) (trvv) _mm512_max_ps((__m512)a, (__m512)b)
#elif TRVV_N == 8 && defined(__FMA__)
TRVV_INLINE trvv trvv_fma(trvv a, trvv b, trvv c) {
  return (trvv)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
TRVV_INLINE trvv trvv_clamp(trvv x, trvv lo, trvv hi) {
  return (trvv)_mm256_min_ps((__m256)hi, _mm256_max_ps((__m256)lo, (__m256)x));
}
#define TRVV_MAX(a, b) (trvv) _mm256_max_ps((__m256)a, (__m256)b)
#elif TRVV_N == 4 && defined(__SSE__)
TRVV_INLINE trvv trvv_fma(trvv a, trvv b, trvv c) { return a * b + c; }
TRVV_INLINE trvv trvv_clamp(trvv x, trvv lo, trvv hi) {
  return (trvv)_mm_min_ps((__m128)hi, _mm_max_ps((__m128)lo, (__m128)x));
}
#define TRVV_MAX(a, b) (trvv) _mm_max_ps((__m128)a, (__m128)b)
#else
#if TRVV_N == 4 && defined(__aarch64__)
TRVV_INLINE trvv trvv_fma(trvv a, trvv b, trvv c) {
  return (trvv)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
#else
TRVV_INLINE trvv trvv_fma(trvv a, trvv b, trvv c) { return a * b + c; }
#endif
/* Comparisons are false for NaN, which thus stays. */
TRVV_INLINE trvv trvv_clamp(trvv x, trvv lo, trvv hi) {
  const trvv_i below = (trvv_i)(x < lo);
  x = (trvv)(((trvv_i)lo & below) | ((trvv_i)x & ~below));
  const trvv_i above = (trvv_i)(x > hi);
  return (trvv)(((trvv_i)hi & above) | ((trvv_i)x & ~above));
}
TRVV_INLINE trvv trvv_pick(trvv_i mask, trvv a, trvv b) {
  return (trvv)(((trvv_i)a & mask) | ((trvv_i)b & ~mask));
}
#define TRVV_MAX(a, b) trvv_pick((trvv_i)(a > b), a, b)
#endif

#else /* any C11 compiler: its vectoriser is on its own */
#define TRVV_INLINE static inline
#define TRVV_UNROLL
typedef struct trvv {
  float f[TRVV_N];
} trvv;
#define TRVV_EACH(expr)                              \
  trvv r_;                                           \
  for (int i = 0; i < TRVV_N; i++) r_.f[i] = (expr); \
  return r_
TRVV_INLINE trvv trvv_load(const float* p) { TRVV_EACH(p[i]); }
TRVV_INLINE void trvv_store(float* p, trvv v) {
  for (int i = 0; i < TRVV_N; i++) p[i] = v.f[i];
}
TRVV_INLINE trvv trvv_set(float x) { TRVV_EACH(x); }
TRVV_INLINE trvv trvv_add(trvv a, trvv b) { TRVV_EACH(a.f[i] + b.f[i]); }
TRVV_INLINE trvv trvv_mul(trvv a, trvv b) { TRVV_EACH(a.f[i] * b.f[i]); }
TRVV_INLINE trvv trvv_fma(trvv a, trvv b, trvv c) { TRVV_EACH(a.f[i] * b.f[i] + c.f[i]); }
TRVV_INLINE trvv trvv_clamp(trvv x, trvv lo, trvv hi) {
  TRVV_EACH(x.f[i] < lo.f[i] ? lo.f[i] : x.f[i] > hi.f[i] ? hi.f[i] : x.f[i]);
}
TRVV_INLINE trvv trvv_larger(trvv a, trvv b) { TRVV_EACH(a.f[i] > b.f[i] ? a.f[i] : b.f[i]); }
#define TRVV_MAX(a, b) trvv_larger(a, b)
#endif

/* The larger; where a is NaN, b. */
TRVV_INLINE trvv trvv_max(trvv a, trvv b) { return TRVV_MAX(a, b); }

/* Sum of the lanes, in a tree. */
TRVV_INLINE float trvv_sum(trvv v) {
#if defined(__GNUC__) && defined(__SSE3__) && TRVV_N >= 8
#if TRVV_N == 16
  const __m256 y =
      _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
#else
  const __m256 y = (__m256)v;
#endif
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
#else
  float s[TRVV_N];
  trvv_store(s, v);
  TRVV_UNROLL for (int w = TRVV_N / 2; w > 0; w /= 2) TRVV_UNROLL for (int i = 0; i < w; i++)
      s[i] += s[i + w];
  return s[0];
#endif
}
#endif
