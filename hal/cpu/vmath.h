/* vmath.h - float32 functions that vectorise: straight-line code without tables, branches or libm
 * calls.
 *
 * A loop over them with -O3 -fno-trapping-math becomes SIMD on any target. Errors are at most about
 * 2 units in the last place unless a comment says more. NaN goes through, infinities and denormals
 * are right. They need the default rounding mode and a compiler that keeps the order of float
 * operations (no -ffast-math). Coefficients are our own fits (Chebyshev nodes).
 */
#ifndef TRVK_VMATH_H
#define TRVK_VMATH_H

#include <math.h>
#include <stdint.h>

/* Always inline: a loop over a call does not vectorise, and big switches use up the compiler's own
 * budget. */
#if defined(__GNUC__)
#define TRVK_INLINE static inline __attribute__((always_inline))
#else
#define TRVK_INLINE static inline
#endif

typedef union trvk_bits {
  float f;
  uint32_t u;
  int32_t i;
} trvk_bits;

TRVK_INLINE float trvk_from_bits(uint32_t u) {
  trvk_bits v;
  v.u = u;
  return v.f;
}
TRVK_INLINE uint32_t trvk_to_bits(float f) {
  trvk_bits v;
  v.f = f;
  return v.u;
}

#define TRVK_ROUNDER \
  12582912.0f /* 1.5 * 2^23: x + it rounds x to an integer, whose value is then in the low bits */

/* 2^n for n in [-252, 254] in two factors, so that results may be denormal or overflow. */
TRVK_INLINE float trvk_scale(float x, uint32_t n) {
  const uint32_t half = (uint32_t)((int32_t)n >> 1);
  return x * trvk_from_bits((half + 127u) << 23) * trvk_from_bits((n - half + 127u) << 23);
}

/* e^r - 1 - r for |r| <= ln(2) / 2. Two short chains instead of a long one: a loop waits less. */
TRVK_INLINE float trvk_exp_tail(float r) {
  const float z = r * r;
  const float even = (0.00139261761199f * z + 0.0416665546621f) * z + 0.5f;
  const float odd = 0.00836317307451f * z + 0.166665770256f;
  return z * (even + r * odd);
}

TRVK_INLINE float trvk_exp(float x) {
  const float lo = x < -104.0f ? -104.0f : x;
  const float c = lo > 89.0f ? 89.0f : lo;
  const float t = c * 1.44269504f + TRVK_ROUNDER, n = t - TRVK_ROUNDER;
  const float r = (c - n * 0.693115234375f) - n * 3.1946183298714459e-05f;
  const float y = 1.0f + (r + trvk_exp_tail(r));
  return trvk_scale(y, trvk_to_bits(t) - trvk_to_bits(TRVK_ROUNDER));
}

/* The same for functions that add 1 to it, and for softmax: results below 2^-126 are 0, and above
 * 2^127.5 infinite. A factor 2^n with n = -127 or 128 has just these bits. */
TRVK_INLINE float trvk_exp_flush(float x) {
  const float lo = x < -88.0f ? -88.0f : x;
  const float c = lo > 88.75f ? 88.75f : lo;
  const float t = c * 1.44269504f + TRVK_ROUNDER, n = t - TRVK_ROUNDER;
  const float r = (c - n * 0.693115234375f) - n * 3.1946183298714459e-05f;
  const float y = 1.0f + (r + trvk_exp_tail(r));
  return y * trvk_from_bits((trvk_to_bits(t) + 127u) << 23);
}
/* The same for x <= 0 only. */
TRVK_INLINE float trvk_exp_negative(float x) {
  const float c = x < -88.0f ? -88.0f : x;
  const float t = c * 1.44269504f + TRVK_ROUNDER, n = t - TRVK_ROUNDER;
  const float r = (c - n * 0.693115234375f) - n * 3.1946183298714459e-05f;
  const float y = 1.0f + (r + trvk_exp_tail(r));
  return y * trvk_from_bits((trvk_to_bits(t) + 127u) << 23);
}

TRVK_INLINE float trvk_exp2(float x) {
  const float lo = x < -151.0f ? -151.0f : x;
  const float c = lo > 129.0f ? 129.0f : lo;
  const float t = c + TRVK_ROUNDER, n = t - TRVK_ROUNDER;
  const float r = (c - n) * 0.693147181f;
  const float y = 1.0f + (r + trvk_exp_tail(r));
  return trvk_scale(y, trvk_to_bits(t) - trvk_to_bits(TRVK_ROUNDER));
}

TRVK_INLINE float trvk_expm1(float x) {
  const float lo = x < -18.0f ? -18.0f : x;
  const float c = lo > 89.0f ? 89.0f : lo;
  const float t = c * 1.44269504f + TRVK_ROUNDER, n = t - TRVK_ROUNDER;
  const float r = (c - n * 0.693115234375f) - n * 3.1946183298714459e-05f;
  const float p = r + trvk_exp_tail(r);
  const uint32_t k = trvk_to_bits(t) - trvk_to_bits(TRVK_ROUNDER);
  /* 2^k * p + (2^k - 1); k is in [-26, 128], so half of it is a normal number's exponent: 2^127 * 2
   * would overflow. */
  const float s = trvk_from_bits((k + 126u) << 23);
  const float y = (s * p + (s - 0.5f)) * 2.0f;
  return c == 0.0f ? x : y;
}

/* Splits a positive normal x into 2^*e * m with m in [sqrt(1/2), sqrt(2)); returns m - 1. */
TRVK_INLINE float trvk_log_split(float x, float* e) {
  const uint32_t u = trvk_to_bits(x) - 0x3F3504F3u;
  *e = (float)((int32_t)u >> 23);
  return trvk_from_bits((u & 0x7FFFFFu) + 0x3F3504F3u) - 1.0f;
}

/* log(1 + f) for f in [sqrt(1/2) - 1, sqrt(2) - 1], as f - *minus */
TRVK_INLINE float trvk_log_tail(float f) {
  const float s = f / (2.0f + f), z = s * s, half = 0.5f * f * f;
  float p = 0.233304672163f;
  p = p * z + 0.28550820816f;
  p = p * z + 0.400001218398f;
  p = p * z + 0.666666665545f;
  return half - s * (half + z * p);
}

TRVK_INLINE float trvk_log_ends(float x, float y) {
  const float a = x == 0.0f ? -INFINITY : y;
  const float b = x < 0.0f ? NAN : a;
  return x < INFINITY ? b : x; /* infinity and NaN stay */
}

TRVK_INLINE float trvk_log(float x) {
  const float tiny = x < 1.17549435e-38f ? 1.0f : 0.0f;
  float e;
  const float f = trvk_log_split(x * (1.0f + tiny * 8388607.0f), &e);
  e -= tiny * 23.0f;
  const float y = e * 0.693115234375f + (f - (trvk_log_tail(f) - e * 3.1946183298714459e-05f));
  return trvk_log_ends(x, y);
}

TRVK_INLINE float trvk_log2(float x) {
  const float tiny = x < 1.17549435e-38f ? 1.0f : 0.0f;
  float e;
  const float f = trvk_log_split(x * (1.0f + tiny * 8388607.0f), &e);
  e -= tiny * 23.0f;
  /* 1/ln 2 = 1.4375 + 0.0051950408889634; f * 1.4375 is nearly exact when f has its low 12 bits cut
   * off. */
  const float hi = trvk_from_bits(trvk_to_bits(f) & 0xFFFFF000u), lo = (f - hi) - trvk_log_tail(f);
  const float y = hi * 1.4375f + (lo * 1.44269504f + hi * 0.0051950408889634f);
  return trvk_log_ends(x, e + y);
}

TRVK_INLINE float trvk_log10(float x) {
  const float tiny = x < 1.17549435e-38f ? 1.0f : 0.0f;
  float e;
  const float f = trvk_log_split(x * (1.0f + tiny * 8388607.0f), &e);
  e -= tiny * 23.0f;
  /* log10(2) = 0.301025390625 + 4.6050389811952e-6; 1/ln 10 = 0.43359375 + 0.00070073190325183 */
  const float hi = trvk_from_bits(trvk_to_bits(f) & 0xFFFFF000u), lo = (f - hi) - trvk_log_tail(f);
  const float y = hi * 0.43359375f +
                  (lo * 0.434294482f + (hi * 0.00070073190325183f + e * 4.6050389811952e-06f));
  return trvk_log_ends(x, e * 0.301025390625f + y);
}

TRVK_INLINE float trvk_log1p(float x) {
  const float u = 1.0f + x, v = u - 1.0f;
  const float y = trvk_log(u) + (x - v) / u;
  const float a = u == 0.0f ? -INFINITY : y;
  return u < INFINITY ? (v == 0.0f ? x : a) : u;
}

/* 3 units: e^2a - 1 over itself + 2; 2a stays so small that 2^n needs no care */
TRVK_INLINE float trvk_tanh(float x) {
  const float a = fabsf(x), c = a > 10.0f ? 20.0f : 2.0f * a;
  const float t = c * 1.44269504f + TRVK_ROUNDER, n = t - TRVK_ROUNDER;
  const float r = (c - n * 0.693115234375f) - n * 3.1946183298714459e-05f;
  const float p = r + trvk_exp_tail(r);
  const float s = trvk_from_bits((trvk_to_bits(t) + 127u) << 23);
  const float e = s * p + (s - 1.0f);
  return copysignf(e / (e + 2.0f), x);
}

TRVK_INLINE float trvk_sigmoid(float x) { return 1.0f / (1.0f + trvk_exp_flush(-x)); }

/* erf(x) for |x| < 0.9 */
TRVK_INLINE float trvk_erf_near(float x) {
  const float z = x * x;
  float p = 8.52940132284e-05f;
  p = p * z - 0.000817963218089f;
  p = p * z + 0.00520422669375f;
  p = p * z - 0.0268606647911f;
  p = p * z + 0.112837180496f;
  p = p * z - 0.37612635194f;
  p = p * z + 1.12837916679f;
  return x * p;
}
/* erfc(a) for a in [0.85, 3.95], 0 above */
TRVK_INLINE float trvk_erfc_far(float a) {
  const float t = a > 3.95f ? 3.95f : a;
  float q = -3.68385081224e-07f; /* -log(erfc(t)) / t */
  q = q * t + 6.30692678385e-06f;
  q = q * t - 2.81273920862e-05f;
  q = q * t - 0.000203849725064f;
  q = q * t + 0.00346116984967f;
  q = q * t - 0.023651294761f;
  q = q * t + 0.106272475203f;
  q = q * t + 0.635073598112f;
  q = q * t + 1.12867556658f;
  const float y = trvk_exp_negative(-(q * t));
  return a > 3.95f ? 0.0f : y;
}

TRVK_INLINE float trvk_erf(float x) {
  const float a = fabsf(x), near = trvk_erf_near(x), far = copysignf(1.0f - trvk_erfc_far(a), x);
  return a < 0.875f ? near : (a == a ? far : x);
}

/* ---- sin and cos: |x| <= TRVK_TRIG_MAX only; beyond it use libm
 * ----------------------------------------------------- */
#define TRVK_TRIG_MAX 20000.0f

/* sin(x + quarter * pi / 2) */
TRVK_INLINE float trvk_sin_quarter(float x, uint32_t quarter) {
  const float t = x * 0.636619772f + TRVK_ROUNDER, n = t - TRVK_ROUNDER;
  const float r = ((x - n * 1.5703125f) - n * 0.00048351287841796875f) - n * 3.1391647326e-07f;
  const uint32_t k = trvk_to_bits(t) + quarter;
  const float z = r * r;
  float s = 2.72499258031e-06f;
  s = s * z - 0.000198400867354f;
  s = s * z + 0.00833333187471f;
  s = s * z - 0.166666666639f;
  s = r + r * z * s;
  float c = 2.45479420851e-05f;
  c = c * z - 0.00138883030359f;
  c = c * z + 0.0416666646595f;
  c = (1.0f - 0.5f * z) + z * z * c;
  const float y = (k & 1u) ? c : s;
  return trvk_from_bits(trvk_to_bits(x == 0.0f && quarter == 0 ? x : y) ^ ((k & 2u) << 30));
}
TRVK_INLINE float trvk_sin(float x) { return trvk_sin_quarter(x, 0); }
TRVK_INLINE float trvk_cos(float x) { return trvk_sin_quarter(x, 1); }

/* ---- activations, computed as torch does
 * ------------------------------------------------------------------------------ */
TRVK_INLINE float trvk_relu(float x) { return x < 0.0f ? 0.0f : x; } /* NaN stays */
TRVK_INLINE float trvk_clamp(float x, float lo, float hi) {          /* NaN stays */
  const float y = x < lo ? lo : x;
  return y > hi ? hi : y;
}
/* x times the normal distribution, exact in the lower tail too */
TRVK_INLINE float trvk_gelu(float x) {
  const float a = fabsf(x);
  const float z = a * a; /* q: -log(erfc(a / sqrt(2))) / a for a in [0, 5.6], in two chains */
  float even = -1.82561499e-09f;
  even = even * z - 1.10514645e-06f;
  even = even * z - 6.2716761e-05f;
  even = even * z - 1.64774483e-05f;
  even = even * z + 0.0363567621f;
  even = even * z + 0.797885239f;
  float odd = 6.73366856e-08f;
  odd = odd * z + 1.05412819e-05f;
  odd = odd * z + 0.000211969891f;
  odd = odd * z - 0.00481309602f;
  odd = odd * z + 0.318303287f;
  const float q = even + a * odd;
  const float y = 0.5f * trvk_exp_negative(-(q * a)), tail = a > 5.6f ? 0.0f : y;
  return x * (x > 0.0f ? 1.0f - tail : tail);
}
/* 0.5 * (1 + tanh(u)) is the sigmoid of 2 * u */
TRVK_INLINE float trvk_gelu_tanh(float x) {
  return x / (1.0f + trvk_exp_flush(-1.59576912f * (x + 0.044715f * x * x * x)));
}
TRVK_INLINE float trvk_silu(float x) { return x / (1.0f + trvk_exp_flush(-x)); }
TRVK_INLINE float trvk_hard_sigmoid(float x) { return trvk_clamp(x + 3.0f, 0.0f, 6.0f) / 6.0f; }
TRVK_INLINE float trvk_hard_swish(float x) { return x * trvk_clamp(x + 3.0f, 0.0f, 6.0f) / 6.0f; }
TRVK_INLINE float trvk_softplus(float x) {
  const float y = trvk_log1p(trvk_exp(x));
  return x > 20.0f ? x : y;
}
/* tanh(log(1 + e)) = (e^2 + 2e) / (e^2 + 2e + 2) */
TRVK_INLINE float trvk_mish(float x) {
  const float e = trvk_exp(x > 20.0f ? 20.0f : x), n = e * (e + 2.0f);
  return x * (n / (n + 2.0f));
}
TRVK_INLINE float trvk_elu(float x) {
  const float y = trvk_expm1(x);
  return x > 0.0f ? x : y;
}
#endif
