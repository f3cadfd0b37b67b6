/* quant.h - the arithmetic of stored integers: one-rounding fixed point (schema/ops.fbs).
 *
 * Operands may come from hostile files: nothing here has undefined behaviour for any operand, what
 * is out of the range named gives some number. Right shifts of negative numbers must be arithmetic,
 * as on every compiler that the library is built with.
 */
#ifndef TRVK_QUANT_H
#define TRVK_QUANT_H

#include "ops.h"

_Static_assert((-3 >> 1) == -2, "right shifts of negative numbers must be arithmetic");

#define TRVK_SHIFT_MAX 62

static inline int64_t trvk_mul64(int64_t a, int64_t b) {
  return (int64_t)((uint64_t)a * (uint64_t)b);
}
static inline int64_t trvk_add64(int64_t a, int64_t b) {
  return (int64_t)((uint64_t)a + (uint64_t)b);
}
static inline int32_t trvk_add32(int32_t a, int32_t b) {
  return (int32_t)((uint32_t)a + (uint32_t)b);
}

/* floor((v * m + 2^(s-1)) / 2^s), s = 0: v * m. Exact for |v| < 2^32, 0 <= m < 2^31, 0 <= s <= 62.
 */
static inline int64_t trvk_rescale(int64_t v, int32_t m, int32_t s) {
  const int64_t p = trvk_mul64(v, m);
  /* half of 2^s is not added to p, which could overflow, but to p / 2^(s-1): the same floor */
  return s == 0 ? p : trvk_add64(p >> ((s - 1) & 63), 1) >> 1;
}

/* The same for any v of 64 bits, by two partial products; results beyond +-2^61 become some number
 * beyond them, of the same sign. */
static inline int64_t trvk_rescale_wide(int64_t v, int32_t m, int32_t s) {
  const uint64_t low = (uint64_t)(uint32_t)v * (uint32_t)(m & INT32_MAX);
  const int64_t high = (v >> 32) * (m & INT32_MAX) + (int64_t)(low >> 32); /* product >> 32 */
  const int32_t k = s == 0 ? 0 : (s - 1) & 63;
  int64_t t; /* product >> k */
  if (k >= 32) {
    t = high >> (k - 32);
  } else {
    const int64_t most = (int64_t)1 << (30 + k);
    if (high >= most || high < -most) return high < 0 ? -((int64_t)1 << 62) : (int64_t)1 << 62;
    t = trvk_mul64(high, (int64_t)1 << (32 - k)) + (int64_t)((uint32_t)low >> k);
  }
  return s == 0 ? t : (t + 1) >> 1;
}

/* floor((2 * v + d) / (2 * d)) for any v and d > 0 (less counts as 1). */
static inline int64_t trvk_divide(int64_t v, int64_t d) {
  if (d < 1) d = 1;
  int64_t q = v / d, r = v % d;
  if (r < 0) { /* C rounds to zero */
    q--;
    r += d;
  }
  return q + (r >= d - r);
}

/* x to the nearest integer, ties to even; NaN gives 0; saturates at +-2^22, which is past every
 * stored dtype. Free of branches, so that loops vectorise. Needs the default rounding mode. */
static inline int32_t trvk_half_even(float x) {
  const float most = 4194304.0f;
  union {
    float f;
    int32_t i;
  } v;
  x = x > most ? most : x;
  x = x < -most ? -most : x;
  x = x == x ? x : 0.0f;
  v.f = x + 12582912.0f; /* 1.5 * 2^23: the sum's last mantissa bit weighs 1 */
  return v.i - 0x4B400000;
}

static inline int32_t trvk_clamp32(int32_t v, int32_t lo, int32_t hi) {
  v = v < lo ? lo : v;
  return v > hi ? hi : v;
}
/* clamp(zero + v, lo, hi) for any v. */
static inline int32_t trvk_stored(int64_t v, int32_t zero, int32_t lo, int32_t hi) {
  const int64_t least = (int64_t)lo - zero, most = (int64_t)hi - zero;
  v = v < least ? least : v;
  v = v > most ? most : v;
  return (int32_t)(v + zero);
}

/* ---- checks ---- */

/* Activations are stored as i8 or i16. */
static inline int trvk_dtype_is_stored(uint32_t dtype) {
  return dtype == TRV_DTYPE_I8 || dtype == TRV_DTYPE_I16;
}
/* Does v fit in a stored dtype? */
static inline int trvk_fits(uint32_t dtype, int64_t v) {
  const int64_t most = dtype == TRV_DTYPE_I8 ? INT8_MAX : INT16_MAX;
  return v >= -most - 1 && v <= most;
}
/* Are lo and hi in order and both of that dtype? */
static inline int trvk_bounds_ok(uint32_t dtype, int64_t lo, int64_t hi) {
  return lo <= hi && trvk_fits(dtype, lo) && trvk_fits(dtype, hi);
}
static inline int trvk_shift_ok(int64_t shift) { return shift >= 0 && shift <= TRVK_SHIFT_MAX; }
/* Are zero point and bounds numbers of y's dtype? NULL, or what is wrong. */
static inline const char* trvk_result_check(const trv_tensor* y, int64_t zero, int64_t lo,
                                            int64_t hi, int64_t* expected, int64_t* got) {
  if (!trvk_fits(y->dtype, zero))
    return trvk_fail(TRVK_SAY("the output's zero point does not fit its dtype"), 0, zero, expected,
                     got);
  if (!trvk_bounds_ok(y->dtype, lo, hi))
    return trvk_fail(TRVK_SAY("the output's bounds do not fit its dtype"), lo, hi, expected, got);
  return NULL;
}
#endif
