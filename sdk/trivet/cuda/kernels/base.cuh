/* base.cuh - what every kernel shares: launches, element types, the scalar functions of map expressions, warp and block helpers.
 *
 * Plain CUDA C++ without any header of a toolkit, so that NVRTC alone compiles it. With TRV_SHIM defined it is ordinary C++17:
 * shim.h (tests/hal/cuda) then gives threads, barriers, shuffles and tensor cores on the CPU.
 *
 * A kernel has one parameter: 64-bit words, addresses of values and sizes, written by the compiler in the order that the
 * driver fills them in. Sizes that are known when the model is lowered are literals in the code.
 */
#ifdef TRV_SHIM
#include "shim.h"
#define TRV_SPECIAL inline
#else
#define TRV_SPECIAL __device__ __forceinline__
#define TRV_DEVICE static __device__ __forceinline__
#define TRV_METHOD __device__ __forceinline__
#define TRV_SHARED(T, name, n) __shared__ T name[n]
#define TRV_UNROLL _Pragma("unroll")
#define TRV_UNROLL4 _Pragma("unroll 4")
template <int N>
struct trv_words {
  long long w[N];
};
#define TRV_KERNEL(name, words, threads) \
  extern "C" __global__ void __launch_bounds__(threads) name(const __grid_constant__ trv_words<words> trv_args)
#define TRV_ARGS const long long* const w = trv_args.w
#endif

typedef unsigned char u8;
typedef signed char i8;
typedef short i16;
typedef int i32;
typedef long long i64;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef float f32;
typedef double f64;

#define TRV_INF __int_as_float(0x7F800000)
#define TRV_NAN __int_as_float(0x7FC00000)

/* ---- element types: up gives the type that is computed in, down rounds or wraps to the element ---- */
struct alignas(2) f16 {
  unsigned short x;
};
struct alignas(2) bf16 {
  unsigned short x;
};
TRV_DEVICE f32 up(f16 v) {
#ifdef TRV_SHIM
  return trv_shim_half(v.x);
#else
  f32 r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(v.x));
  return r;
#endif
}
TRV_DEVICE f32 up(bf16 v) { return __int_as_float((int)((u32)v.x << 16)); }
TRV_DEVICE f32 up(f32 v) { return v; }
TRV_DEVICE f64 up(f64 v) { return v; }
TRV_DEVICE i32 up(u8 v) { return v; }
TRV_DEVICE i32 up(i8 v) { return v; }
TRV_DEVICE i32 up(i16 v) { return v; }
TRV_DEVICE i32 up(i32 v) { return v; }
TRV_DEVICE i64 up(i64 v) { return v; }

template <class T>
struct num { /* integers: wrap */
  template <class V>
  TRV_METHOD static T down(V v) {
    return (T)v;
  }
};
template <>
struct num<f16> {
  TRV_METHOD static f16 down(f32 v) {
    f16 r;
#ifdef TRV_SHIM
    r.x = trv_shim_to_half(v);
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r.x) : "f"(v));
#endif
    return r;
  }
};
template <>
struct num<bf16> {
  TRV_METHOD static bf16 down(f32 v) {
    const u32 u = (u32)__float_as_int(v);
    bf16 r;
    r.x = (u & 0x7FFFFFFFu) > 0x7F800000u ? (unsigned short)((u >> 16) | 0x40u)
                                          : (unsigned short)((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
    return r;
  }
};
template <class T, class V>
TRV_DEVICE T down(V v) {
  return num<T>::down(v);
}

/* V elements moved at once. */
template <class T, int V>
struct alignas(sizeof(T) * V) pack {
  T v[V];
};

/* 32 bytes, aligned so: what tensor cores read. */
template <class T>
struct alignas(32) pack_32 {
  T v[32 / sizeof(T)];
};

/* Float to integer: truncation; what is out of range saturates. */
TRV_DEVICE i32 to_i32(f32 x) {
  const f32 lo = x > -2147483648.0f ? x : -2147483648.0f;
  return (i32)(lo < 2147483520.0f ? lo : 2147483520.0f);
}
TRV_DEVICE i64 to_i64(f32 x) {
  const f32 lo = x > -9223372036854775808.0f ? x : -9223372036854775808.0f;
  return (i64)(lo < 9223371487098961920.0f ? lo : 9223371487098961920.0f);
}
TRV_DEVICE i32 to_i32(f64 x) {
  const f64 lo = x > -2147483648.0 ? x : -2147483648.0;
  return (i32)(lo < 2147483647.0 ? lo : 2147483647.0);
}
TRV_DEVICE i64 to_i64(f64 x) {
  const f64 lo = x > -9223372036854775808.0 ? x : -9223372036854775808.0;
  return (i64)(lo < 9223372036854774784.0 ? lo : 9223372036854774784.0);
}

/* The type that sums and products of T wrap in without undefined behaviour. */
template <class T>
struct unsigned_of {
  typedef T type;
};
template <>
struct unsigned_of<i32> {
  typedef u32 type;
};
template <>
struct unsigned_of<i64> {
  typedef u64 type;
};

/* ---- integers of map: they wrap; a division by zero gives 0 ---- */
template <class T>
struct twin {
  typedef u32 type;
};
template <>
struct twin<i64> {
  typedef u64 type;
};
#define TRV_INT2(name, e)                        \
  template <class T>                             \
  TRV_DEVICE T name(T x, T y) {                  \
    typedef typename twin<T>::type U;            \
    return (T)(e);                               \
  }
TRV_INT2(int_add, (U)x + (U)y)
TRV_INT2(int_sub, (U)x - (U)y)
TRV_INT2(int_mul, (U)x*(U)y)
TRV_INT2(int_quot, y == 0 ? (T)0 : y == -1 ? (T)((U)0 - (U)x) : x / y)
TRV_INT2(int_rem, y == 0 || y == -1 ? (T)0 : x % y)
TRV_INT2(int_shl, y < 0 || y >= (T)(8 * sizeof(T)) ? (U)0 : (U)x << y)
TRV_INT2(int_shr, x >> (y < 0 || y >= (T)(8 * sizeof(T)) ? (T)(8 * sizeof(U) - 1) : y))
template <class T>
TRV_DEVICE T int_floor_div(T x, T y) {
  const T q = int_quot(x, y), r = int_rem(x, y);
  return r != 0 && (r < 0) != (y < 0) ? q - 1 : q;
}
template <class T>
TRV_DEVICE T int_mod(T x, T y) { /* sign of y */
  const T r = int_rem(x, y);
  return r != 0 && (r < 0) != (y < 0) ? r + y : r;
}
template <class T>
TRV_DEVICE T int_pow(T x, T y) {
  typedef typename twin<T>::type U;
  if (y < 0) return x == 1 ? 1 : x == -1 ? (y & 1 ? -1 : 1) : 0;
  U base = (U)x, out = 1;
  for (; y; y >>= 1, base *= base)
    if (y & 1) out *= base;
  return (T)out;
}

/* ---- floats of map ---- */
TRV_DEVICE f64 erfinv_f64(f64 x) { /* Winitzki's closed form, then three steps of Halley's method */
  const f64 a = fabs(x);
  if (!(a < 1)) return a == 1 ? x * (f64)TRV_INF : (f64)TRV_NAN;
  if (a == 0) return x;
  const f64 l = log1p(-a * a), k = 4.3307467508 + l / 2;
  f64 y = sqrt(sqrt(k * k - l / 0.147) - k);
  for (int i = 0; i < 3; i++) {
    const f64 e = a < 0.5 ? erf(y) - a : (1 - a) - erfc(y);
    const f64 u = e / (1.1283791670955126 * exp(-y * y));
    y -= u / (1 + y * u);
  }
  return copysign(y, x);
}
TRV_DEVICE f64 digamma_f64(f64 x) { /* recurrence up to 10, then the asymptotic series; reflection below 0 */
  f64 shift = 0;
  if (x == 0) return copysign((f64)TRV_INF, -x);
  if (x < 0) {
    if (x == floor(x)) return (f64)TRV_NAN;
    shift = -3.14159265358979323846 / tan(3.14159265358979323846 * (x - rint(x)));
    x = 1 - x;
  }
  while (x < 10) {
    shift -= 1 / x;
    x += 1;
  }
  const f64 z = 1 / (x * x);
  const f64 tail =
      z * (1.0 / 12 - z * (1.0 / 120 - z * (1.0 / 252 - z * (1.0 / 240 - z * (1.0 / 132 - z * (691.0 / 32760 - z / 12))))));
  return shift + log(x) - 0.5 / x - tail;
}

#define TRV_REAL1(name, T, e) \
  TRV_DEVICE T name(T x) { return e; }
#define TRV_REAL2(name, T, e) \
  TRV_DEVICE T name(T x, T y) { return e; }
#define TRV_REALS(T, F)                                                                                                 \
  TRV_REAL2(r_max, T, x != x ? x : (x > y ? x : y))                                                                     \
  TRV_REAL2(r_min, T, x != x ? x : (x < y ? x : y))                                                                     \
  TRV_REAL2(r_fmax, T, y != y ? x : (x > y ? x : y))                                                                    \
  TRV_REAL2(r_fmin, T, y != y ? x : (x < y ? x : y))                                                                    \
  TRV_DEVICE T r_mod(T x, T y) {                                                                                        \
    const T m = F(fmod)(x, y);                                                                                          \
    return m != 0 && (y < 0) != (m < 0) ? m + y : m;                                                                    \
  }                                                                                                                     \
  TRV_DEVICE T r_floor_div(T x, T y) {                                                                                  \
    if (y == 0) return x / y;                                                                                           \
    const T m = F(fmod)(x, y);                                                                                          \
    T q = (x - m) / y;                                                                                                  \
    if (m != 0 && (y < 0) != (m < 0)) q -= 1;                                                                           \
    if (q == 0) return F(copysign)((T)0, x / y);                                                                        \
    const T f = F(floor)(q);                                                                                            \
    return q - f > (T)0.5 ? f + 1 : f;                                                                                  \
  }                                                                                                                     \
  TRV_DEVICE T r_pow(T x, T y) {                                                                                        \
    if (y == (T)2) return x * x;                                                                                        \
    if (y == (T)3) return x * x * x;                                                                                    \
    if (y == (T)0.5) return F(sqrt)(x);                                                                                 \
    if (y == (T)-0.5) return 1 / F(sqrt)(x);                                                                            \
    if (y == (T)-1) return 1 / x;                                                                                       \
    if (y == (T)-2) return 1 / (x * x);                                                                                 \
    return F(pow)(x, y);                                                                                                \
  }                                                                                                                     \
  TRV_REAL1(r_sign, T, (T)((x > 0) - (x < 0)))                                                                          \
  TRV_REAL1(r_rsqrt, T, 1 / F(sqrt)(x))                                                                                 \
  TRV_REAL1(r_relu, T, x < 0 ? (T)0 : x)                                                                                \
  TRV_REAL1(r_sigmoid, T, 1 / (1 + F(exp)(-x)))                                                                         \
  TRV_REAL1(r_silu, T, x / (1 + F(exp)(-x)))                                                                            \
  TRV_REAL1(r_gelu, T, (T)0.5 * x * (1 + F(erf)(x * (T)0.70710678118654752440)))                                        \
  TRV_REAL1(r_gelu_tanh, T,                                                                                             \
            (T)0.5 * x * (1 + F(tanh)((T)0.79788456080286535588 * (x + (T)0.044715 * x * x * x))))                      \
  TRV_REAL1(r_six, T, x < -3 ? (T)0 : (x + 3 > 6 ? (T)6 : x + 3))                                                       \
  TRV_REAL1(r_hard_sigmoid, T, r_six(x) / 6)                                                                            \
  TRV_REAL1(r_hard_swish, T, x * r_six(x) / 6)                                                                          \
  TRV_REAL1(r_softplus, T, x > 20 ? x : F(log1p)(F(exp)(x)))                                                            \
  TRV_REAL1(r_mish, T, x * F(tanh)(r_softplus(x)))                                                                      \
  TRV_REAL1(r_elu, T, x > 0 ? x : F(expm1)(x))                                                                          \
  TRV_REAL1(r_erfinv, T, (T)erfinv_f64(x))                                                                              \
  TRV_REAL1(r_digamma, T, (T)digamma_f64(x))
#define TRV_F32(name) name##f
#define TRV_F64(name) name
TRV_REALS(f32, TRV_F32)
TRV_REALS(f64, TRV_F64)

/* ---- the greatest and least numbers, where maxima and minima begin ---- */
template <class T>
struct lim {
  TRV_METHOD static T lowest() { return (T)1 << (8 * sizeof(T) - 1); }
  TRV_METHOD static T highest() { return ~lowest(); }
};
template <>
struct lim<u8> {
  TRV_METHOD static u8 lowest() { return 0; }
  TRV_METHOD static u8 highest() { return 255; }
};
template <>
struct lim<f32> {
  TRV_METHOD static f32 lowest() { return -TRV_INF; }
  TRV_METHOD static f32 highest() { return TRV_INF; }
};
template <>
struct lim<f64> {
  TRV_METHOD static f64 lowest() { return -(f64)TRV_INF; }
  TRV_METHOD static f64 highest() { return (f64)TRV_INF; }
};

/* ---- one-rounding fixed point, as schema/ops.fbs says ---- */
TRV_DEVICE i64 mul64(i64 a, i64 b) { return (i64)((u64)a * (u64)b); }
TRV_DEVICE i64 add64(i64 a, i64 b) { return (i64)((u64)a + (u64)b); }
TRV_DEVICE i64 rescale(i64 v, i32 m, i32 s) { /* |v| < 2^32 */
  const i64 p = mul64(v, m);
  return s == 0 ? p : add64(p >> ((s - 1) & 63), 1) >> 1;
}
TRV_DEVICE i64 rescale_wide(i64 v, i32 m, i32 s) { /* any v */
  m &= 0x7FFFFFFF;
  const u64 low = (u64)(u32)v * (u32)m;
  const i64 high = (v >> 32) * m + (i64)(low >> 32);
  const i32 k = s == 0 ? 0 : (s - 1) & 63;
  i64 t;
  if (k >= 32) {
    t = high >> (k - 32);
  } else {
    const i64 most = (i64)1 << (30 + k);
    if (high >= most || high < -most) return high < 0 ? -((i64)1 << 62) : (i64)1 << 62;
    t = mul64(high, (i64)1 << (32 - k)) + (i64)((u32)low >> k);
  }
  return s == 0 ? t : (t + 1) >> 1;
}
TRV_DEVICE i64 divide(i64 v, i64 d) { /* floor((2 v + d) / (2 d)) */
  if (d < 1) d = 1;
  i64 q = v / d, r = v % d;
  if (r < 0) {
    q--;
    r += d;
  }
  return q + (r >= d - r);
}
TRV_DEVICE i32 half_even(f32 x) {
  x = x > 4194304.0f ? 4194304.0f : x;
  x = x < -4194304.0f ? -4194304.0f : x;
  x = x == x ? x : 0.0f;
  return (i32)rintf(x);
}
TRV_DEVICE i32 stored(i64 v, i32 zero, i32 lo, i32 hi) {
  const i64 least = (i64)lo - zero, most = (i64)hi - zero;
  v = v < least ? least : v;
  v = v > most ? most : v;
  return (i32)(v + zero);
}

/* ---- activations of epilogues; Act as in schema/ops.fbs ---- */
template <int ACT>
TRV_DEVICE f32 act_f32(f32 x, f32 lo, f32 hi) {
  switch (ACT) {
    case 1: x = x < lo ? lo : x; return x > hi ? hi : x;
    case 2: return r_sigmoid(x);
    case 3: return tanhf(x);
    case 4: return r_gelu(x);
    case 5: return r_gelu_tanh(x);
    case 6: return r_silu(x);
    case 7: return r_hard_swish(x);
    case 8: return r_hard_sigmoid(x);
    case 9: return x > 0 ? x : x * lo;
    case 10: return x > 0 ? x : expm1f(x) * lo;
    default: return x;
  }
}
template <int ACT>
TRV_DEVICE f64 act_f64(f64 x, f32 lo, f32 hi) {
  switch (ACT) {
    case 1: x = x < lo ? (f64)lo : x; return x > hi ? (f64)hi : x;
    case 2: return r_sigmoid(x);
    case 3: return tanh(x);
    case 4: return r_gelu(x);
    case 5: return r_gelu_tanh(x);
    case 6: return r_silu(x);
    case 7: return r_hard_swish(x);
    case 8: return r_hard_sigmoid(x);
    case 9: return x > 0 ? x : x * (f64)lo;
    case 10: return x > 0 ? x : expm1(x) * (f64)lo;
    default: return x;
  }
}
template <int ACT>
TRV_DEVICE f32 act(f32 x, f32 lo, f32 hi) {
  return act_f32<ACT>(x, lo, hi);
}
template <int ACT>
TRV_DEVICE f64 act(f64 x, f32 lo, f32 hi) {
  return act_f64<ACT>(x, lo, hi);
}
template <int ACT>
TRV_DEVICE i32 act(i32 x, f32 lo, f32 hi) { /* integers clamp only */
  return ACT == 1 ? (i32)fmin(fmax((f64)x, (f64)lo), (f64)hi) : x;
}
template <int ACT>
TRV_DEVICE i64 act(i64 x, f32 lo, f32 hi) {
  return ACT != 1 ? x : (f64)x < (f64)lo ? (i64)lo : (f64)x > (f64)hi ? (i64)hi : x;
}

/* ---- an index out of range: the first bad one raises the device's flag, the access is clamped ---- */
template <class I>
TRV_DEVICE I wrap_index(i64 at, I size, i32* flag) {
  if (at < 0) at += size;
  if (at < 0 || at >= (i64)size) {
    *(volatile i32*)flag = 1;
    return 0;
  }
  return (I)at;
}

/* ---- combining over a warp and a block. op(a, b) must not care for order ---- */
template <class T>
union words_of {
  TRV_METHOD words_of() {}
  T v;
  u32 r[(sizeof(T) + 3) / 4];
};
template <class T>
TRV_DEVICE T lane_xor(T v, int s) {
  words_of<T> u;
  u.v = v;
  TRV_UNROLL for (int i = 0; i < (int)sizeof(T) / 4; i++) u.r[i] = __shfl_xor_sync(0xFFFFFFFFu, u.r[i], s);
  return u.v;
}
template <class T>
TRV_DEVICE T shift_up(T v, int s) {
  words_of<T> u;
  u.v = v;
  TRV_UNROLL for (int i = 0; i < (int)sizeof(T) / 4; i++) u.r[i] = __shfl_up_sync(0xFFFFFFFFu, u.r[i], s);
  return u.v;
}
template <class T>
TRV_DEVICE T lane_value(T v, int from) {
  words_of<T> u;
  u.v = v;
  TRV_UNROLL for (int i = 0; i < (int)sizeof(T) / 4; i++) u.r[i] = __shfl_sync(0xFFFFFFFFu, u.r[i], from);
  return u.v;
}
template <class T, class Op>
TRV_DEVICE T warp_all(T v, Op op) {
  TRV_UNROLL for (int s = 16; s > 0; s >>= 1) v = op(v, lane_xor(v, s));
  return v;
}
/* All threads of a block of N get the result; buf: N / 32 of T in shared memory. */
template <int N, class T, class Op>
TRV_DEVICE T block_all(T v, T* buf, Op op) {
  v = warp_all(v, op);
  if (N == 32) return v;
  __syncthreads(); /* buf may still be read from the last time */
  if (threadIdx.x % 32 == 0) buf[threadIdx.x / 32] = v;
  __syncthreads();
  v = buf[0];
  for (int i = 1; i < N / 32; i++) v = op(v, buf[i]);
  return v;
}
struct op_sum {
  template <class T>
  TRV_METHOD T operator()(T a, T b) const {
    return a + b;
  }
};
struct op_max {
  template <class T>
  TRV_METHOD T operator()(T a, T b) const {
    return a > b ? a : b;
  }
};
