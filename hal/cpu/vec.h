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
#define TRVV_AHEAD(p) __builtin_prefetch(p, 0, 2) /* brings a line nearer; p may be anything */

typedef float trvv __attribute__((vector_size(4 * TRVV_N)));
typedef int32_t trvv_i __attribute__((vector_size(4 * TRVV_N)));
typedef uint32_t trvv_u __attribute__((vector_size(4 * TRVV_N)));
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
TRVV_INLINE trvv trvv_sub(trvv a, trvv b) { return a - b; }
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
/* Lane `lane` (a constant, once loops are unrolled, which Clang's builtin does not wait for) of a
 * times b, plus c, in one instruction. */
#if defined(__clang__)
#define TRVV_FMA_LANE(a, lane, b, c) \
  ((trvv)vfmaq_n_f32((float32x4_t)(c), (float32x4_t)(b), (a)[lane]))
#else
#define TRVV_FMA_LANE(a, lane, b, c) \
  ((trvv)vfmaq_laneq_f32((float32x4_t)(c), (float32x4_t)(b), (float32x4_t)(a), lane))
#endif
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

/* x * 2^n, n in [-127, 127] in the low bits of u; n = -127 gives 0. */
TRVV_INLINE trvv trvv_scale(trvv x, trvv u) { return x * (trvv)(((trvv_u)u + 127u) << 23); }

#else /* any C11 compiler: its vectoriser is on its own */
#define TRVV_INLINE static inline
#define TRVV_UNROLL
#define TRVV_AHEAD(p) ((void)(p))
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
TRVV_INLINE trvv trvv_sub(trvv a, trvv b) { TRVV_EACH(a.f[i] - b.f[i]); }
TRVV_INLINE trvv trvv_mul(trvv a, trvv b) { TRVV_EACH(a.f[i] * b.f[i]); }
TRVV_INLINE trvv trvv_fma(trvv a, trvv b, trvv c) { TRVV_EACH(a.f[i] * b.f[i] + c.f[i]); }
TRVV_INLINE trvv trvv_clamp(trvv x, trvv lo, trvv hi) {
  TRVV_EACH(x.f[i] < lo.f[i] ? lo.f[i] : x.f[i] > hi.f[i] ? hi.f[i] : x.f[i]);
}
TRVV_INLINE trvv trvv_larger(trvv a, trvv b) { TRVV_EACH(a.f[i] > b.f[i] ? a.f[i] : b.f[i]); }
#define TRVV_MAX(a, b) trvv_larger(a, b)
TRVV_INLINE trvv trvv_scale(trvv x, trvv u) {
  union {
    float f;
    uint32_t u;
  } v;
  for (int i = 0; i < TRVV_N; i++) {
    v.f = u.f[i];
    v.u = (v.u + 127u) << 23;
    x.f[i] *= v.f;
  }
  return x;
}
#endif

/* The larger; where a is NaN, b. */
TRVV_INLINE trvv trvv_max(trvv a, trvv b) { return TRVV_MAX(a, b); }

/* 2^t for t below 127, 0 below -127; NaN stays. 2^r is our own fit for |r| <= 1/2 (1e-7). */
TRVV_INLINE trvv trvv_exp2(trvv t) {
  t = trvv_max(trvv_set(-127.0f), t);
  const trvv u = trvv_add(t, trvv_set(12582912.0f)); /* rounds: 1.5 * 2^23 */
  const trvv r = trvv_sub(t, trvv_sub(u, trvv_set(12582912.0f)));
  trvv p = trvv_fma(trvv_set(0.00132647261f), r, trvv_set(0.00967151299f));
  p = trvv_fma(p, r, trvv_set(0.0555073358f));
  p = trvv_fma(p, r, trvv_set(0.240222424f));
  p = trvv_fma(p, r, trvv_set(0.693147004f));
  return trvv_scale(trvv_fma(p, r, trvv_set(1.0f)), u);
}

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

/* The sums of four vectors. */
TRVV_INLINE void trvv_sum4(const trvv* v, float* out) {
#if defined(__GNUC__) && defined(__SSE3__) && TRVV_N >= 8
  __m128 x[4];
  TRVV_UNROLL for (int i = 0; i < 4; i++) {
#if TRVV_N == 16
    const __m256 y = _mm256_add_ps(_mm512_castps512_ps256((__m512)v[i]),
                                   _mm512_extractf32x8_ps((__m512)v[i], 1));
#else
    const __m256 y = (__m256)v[i];
#endif
    x[i] = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  }
  const __m128 a = _mm_add_ps(_mm_unpacklo_ps(x[0], x[1]), _mm_unpackhi_ps(x[0], x[1]));
  const __m128 b = _mm_add_ps(_mm_unpacklo_ps(x[2], x[3]), _mm_unpackhi_ps(x[2], x[3]));
  _mm_storeu_ps(out, _mm_add_ps(_mm_movelh_ps(a, b), _mm_movehl_ps(b, a)));
#else
  for (int i = 0; i < 4; i++) out[i] = trvv_sum(v[i]);
#endif
}

/* The largest lane. */
TRVV_INLINE float trvv_most(trvv v) {
  float s[TRVV_N];
#if defined(__GNUC__) && defined(__SSE3__) && TRVV_N >= 8
#if TRVV_N == 16
  const __m256 y =
      _mm256_max_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
#else
  const __m256 y = (__m256)v;
#endif
  _mm_storeu_ps(s, _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1)));
  const int n = 4;
#else
  trvv_store(s, v);
  const int n = TRVV_N;
#endif
  for (int w = n / 2; w > 0; w /= 2)
    for (int i = 0; i < w; i++) s[i] = s[i] > s[i + w] ? s[i] : s[i + w];
  return s[0];
}
#endif
