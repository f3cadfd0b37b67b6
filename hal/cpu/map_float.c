/* map_float.c - float32 and float64 operators of map. */
#include "map.h"
#include "vmath.h"

/* ---- functions that libm lacks, in double for both types
 * -------------------------------------------------------------- */

/* Winitzki's closed form, then two steps of Halley's method on erf (on erfc near the ends, where 1
 * - |x| is exact). */
static double erfinv(double x) {
  const double a = fabs(x);
  if (!(a < 1)) return a == 1 ? x * INFINITY : NAN;
  if (a == 0) return x;
  const double l = log1p(-a * a), k = 4.3307467508 + l / 2;
  double y = sqrt(sqrt(k * k - l / 0.147) - k);
  for (int i = 0; i < 3; i++) {
    const double e = a < 0.5 ? erf(y) - a : (1 - a) - erfc(y);
    const double u = e / (1.1283791670955126 * exp(-y * y));
    y -= u / (1 + y * u);
  }
  return copysign(y, x);
}

/* Recurrence up to 10, then the asymptotic series; reflection for negative x. */
static double digamma(double x) {
  double shift = 0;
  if (x == 0) return copysign(INFINITY, -x);
  if (x < 0) {
    if (x == floor(x)) return NAN;
    shift = -3.14159265358979323846 / tan(3.14159265358979323846 * (x - rint(x)));
    x = 1 - x;
  }
  while (x < 10) {
    shift -= 1 / x;
    x += 1;
  }
  const double z = 1 / (x * x);
  const double tail =
      z * (1.0 / 12 - z * (1.0 / 120 -
                           z * (1.0 / 252 -
                                z * (1.0 / 240 - z * (1.0 / 132 - z * (691.0 / 32760 - z / 12))))));
  return shift + log(x) - 0.5 / x - tail;
}

/* ---- float32: vmath.h
 * ----------------------------------------------------------------------------------------------------
 */
static int small_angles(const float* x, trv_dim n) {
  int small = 1;
  for (trv_dim i = 0; i < n; i++) small &= fabsf(x[i]) <= TRVK_TRIG_MAX;
  return small;
}
static void sin_row_f32(float* d, const float* x, trv_dim n) {
  if (small_angles(x, n)) {
    TRVK_IVDEP for (trv_dim i = 0; i < n; i++) d[i] = trvk_sin(x[i]);
  } else {
    for (trv_dim i = 0; i < n; i++) d[i] = sinf(x[i]);
  }
}
static void cos_row_f32(float* d, const float* x, trv_dim n) {
  if (small_angles(x, n)) {
    TRVK_IVDEP for (trv_dim i = 0; i < n; i++) d[i] = trvk_cos(x[i]);
  } else {
    for (trv_dim i = 0; i < n; i++) d[i] = cosf(x[i]);
  }
}

#define REAL float
#define WHOLE 8388608.0f
#define NAME(name) name##_f32
#define V(name) trvk_##name
#define L(name) name##f
#include "map_float.inc"
#undef REAL
#undef WHOLE
#undef NAME
#undef V
#undef L

/* ---- float64: libm
 * ---------------------------------------------------------------------------------------------------------
 */
static void sin_row_f64(double* d, const double* x, trv_dim n) {
  for (trv_dim i = 0; i < n; i++) d[i] = sin(x[i]);
}
static void cos_row_f64(double* d, const double* x, trv_dim n) {
  for (trv_dim i = 0; i < n; i++) d[i] = cos(x[i]);
}
#define f64_exp exp
#define f64_expm1 expm1
#define f64_exp2 exp2
#define f64_log log
#define f64_log2 log2
#define f64_log10 log10
#define f64_log1p log1p
#define f64_tanh tanh
#define f64_erf erf
static inline double f64_relu(double x) { return x < 0 ? 0 : x; }
static inline double f64_sigmoid(double x) { return 1 / (1 + exp(-x)); }
static inline double f64_silu(double x) { return x / (1 + exp(-x)); }
static inline double f64_gelu(double x) { return 0.5 * x * (1 + erf(x * 0.70710678118654752440)); }
static inline double f64_gelu_tanh(double x) {
  return 0.5 * x * (1 + tanh(0.79788456080286535588 * (x + 0.044715 * x * x * x)));
}
static inline double f64_six(double x) {
  const double y = x < -3 ? 0 : x + 3;
  return y > 6 ? 6 : y;
}
static inline double f64_hard_sigmoid(double x) { return f64_six(x) / 6; }
static inline double f64_hard_swish(double x) { return x * f64_six(x) / 6; }
static inline double f64_softplus(double x) { return x > 20 ? x : log1p(exp(x)); }
static inline double f64_mish(double x) { return x * tanh(f64_softplus(x)); }
static inline double f64_elu(double x) { return x > 0 ? x : expm1(x); }

#define REAL double
#define WHOLE 4503599627370496.0
#define NAME(name) name##_f64
#define V(name) f64_##name
#define L(name) name
#include "map_float.inc"
#undef REAL
#undef WHOLE
#undef NAME
#undef V
#undef L
