/* average.c - see average.h. */
/* clang-format off: its macros rename what the others declare */
#include "variant.h"
/* clang-format on */
#include "average.h"
#include "walk.h"

#ifndef TRVK_VARIANT
const char* trvk_average_check(const trv_tensor* x, const trv_tensor* y, int32_t x_zero,
                               int32_t y_zero, int32_t multiplier, int32_t shift, int32_t lo,
                               int32_t hi, int64_t* expected, int64_t* got) {
  if (!trvk_dtype_is_stored(x->dtype) || x->dtype != y->dtype)
    return trvk_fail(TRVK_SAY("average: dtypes must be i8 or i16 and the same"), x->dtype, y->dtype,
                     expected, got);
  if (!trvk_fits(x->dtype, x_zero))
    return trvk_fail(TRVK_SAY("average: zero point of the input"), 0, x_zero, expected, got);
  if (multiplier < 0 || multiplier >= TRVK_AVERAGE_MULTIPLIER)
    return trvk_fail(TRVK_SAY("average: multiplier"), TRVK_AVERAGE_MULTIPLIER - 1, multiplier,
                     expected, got);
  if (shift < 0 || shift > TRVK_AVERAGE_SHIFT)
    return trvk_fail(TRVK_SAY("average: shift"), TRVK_AVERAGE_SHIFT, shift, expected, got);
  return trvk_result_check(y, y_zero, lo, hi, expected, got);
}
#endif

/* ---- sums */

/* Elements that a part holds: 128 * 255 < 2^15, 16384 * 65535 < 2^31. */
enum { PARTS_I8 = 128, PARTS_I16 = 16384 };

void trvk_sums_begin(trvk_sums* s, uint32_t dtype, int32_t zero, uint32_t n) {
  memset(&s->part, 0, sizeof(s->part));
  s->zero = zero;
  s->dtype = dtype;
  s->n = n;
  s->parts = 0;
  s->flushed = 0;
}

static void sums_flush(trvk_sums* s) {
  if (!s->flushed) memset(s->total, 0, sizeof(s->total));
  for (uint32_t i = 0; i < s->n; i++)
    s->total[i] += s->dtype == TRV_DTYPE_I8 ? s->part.of_int8_t[i] : s->part.of_int16_t[i];
  memset(&s->part, 0, sizeof(s->part));
  s->flushed = 1;
  s->parts = 0;
}

#define ADD(PART, X)                                                                       \
  {                                                                                        \
    const X* v = (const X*)(const void*)x;                                                 \
    PART* const sum = s->part.of_##X + first;                                              \
    const PART zero = (PART)s->zero;                                                       \
    if (stride == 1) {                                                                     \
      TRVK_IVDEP for (uint32_t i = 0; i < n; i++) sum[i] = (PART)(sum[i] + (v[i] - zero)); \
    } else {                                                                               \
      for (uint32_t i = 0; i < n; i++, v += stride) sum[i] = (PART)(sum[i] + (*v - zero)); \
    }                                                                                      \
  }
void trvk_sums_add(trvk_sums* s, uint32_t first, const uint8_t* x, trv_dim stride, uint32_t n) {
  if (s->parts == (s->dtype == TRV_DTYPE_I8 ? PARTS_I8 : PARTS_I16)) sums_flush(s);
  s->parts++;
  if (s->dtype == TRV_DTYPE_I8)
    ADD(int16_t, int8_t)
  else
    ADD(int32_t, int16_t)
}

/* ---- averages
 * With r = multiplier / (count * 2^shift) the result is floor(sum * r + 1/2). r is taken as factor
 * / 2^k, rounded down, and half = 2^(k-1) + most makes t = sum * factor + half too large, by less
 * than 2 * most + 1: t / 2^k has the right floor unless the low k bits of t are at most 2 * most,
 * which is where the slow way decides. When 1 / (count * 2^(shift + 1)), the distance between the
 * values that sum * r + 1/2 can have, is more than that error, there are no such cases. */
static int average_bits(int64_t v) {
  int n = 0;
  for (; v > 0; v >>= 1) n++;
  return n;
}

void trvk_average_count(trvk_average* a, int64_t count) {
  a->count = count < 1 ? 1 : count;
  for (; a->shift > 0 && a->multiplier % 2 == 0; a->shift--)
    a->multiplier /= 2; /* the same, more often sure */
  /* factor = multiplier * 2^j / count, k = j + shift; |t| < 2^62 */
  int j = 61 - average_bits(a->multiplier) - average_bits(a->most) + average_bits(a->count) - 1;
  const int sure = average_bits(a->most) + average_bits(a->count) + 2;
  if (j > sure) j = sure;
  if (j > 40) j = 40;
  if (j > 61 - a->shift) j = 61 - a->shift;
  if (j < 0) { /* sums so large that the factor would vanish: always the slow way */
    a->factor = a->half = 0;
    a->quick_shift = 0;
    a->unsure = 0;
    a->narrow = 0;
    return;
  }
  a->quick_shift = j + a->shift;
  a->factor = ((int64_t)a->multiplier << j) / a->count;
  a->half = (a->quick_shift ? (int64_t)1 << (a->quick_shift - 1) : 0) + a->most;
  a->unsure = j == sure ? -1 : 2 * a->most;
  a->narrow = j == sure && a->most * a->factor + a->half <= INT32_MAX;
}

static int64_t average_slow(const trvk_average* a, int64_t sum) {
  /* floor((2 * sum * m + c * 2^s) / (c * 2^(s+1))) = floor((floor(2 * sum * m / c) + 2^s) /
   * 2^(s+1)), sum = q * c + r */
  int64_t q = sum / a->count, r = sum % a->count;
  if (r < 0) {
    q--;
    r += a->count;
  }
  const int64_t m = a->multiplier,
                limit = ((int64_t)1 << 61) / (m + 1); /* beyond it the result is past every dtype */
  q = q > limit ? limit : q;
  q = q < -limit ? -limit : q;
  return (2 * q * m + 2 * r * m / a->count + ((int64_t)1 << a->shift)) >> (a->shift + 1);
}

int32_t trvk_average_of(const trvk_average* a, int64_t sum) {
  const int64_t t = sum * a->factor + a->half, fraction = t & (((int64_t)1 << a->quick_shift) - 1);
  return trvk_stored(fraction <= a->unsure ? average_slow(a, sum) : t >> a->quick_shift, a->zero,
                     a->lo, a->hi);
}

#define STORE(X)                                                                              \
  {                                                                                           \
    X* d = (X*)(void*)y;                                                                      \
    if (s->flushed || p.unsure >= 0) {                                                        \
      for (uint32_t i = first; i < first + n; i++, d += step)                                 \
        *d = (X)trvk_average_of(&p, s->part.of_##X[i] + (s->flushed ? s->total[i] : 0));      \
    } else {                                                                                  \
      for (uint32_t i = first; i < first + n; i++, d += step)                                 \
        *d = (X)trvk_stored((s->part.of_##X[i] * p.factor + p.half) >> p.quick_shift, p.zero, \
                            p.lo, p.hi);                                                      \
    }                                                                                         \
  }
void trvk_average_store(const trvk_average* a, const trvk_sums* s, uint32_t first, uint32_t n,
                        uint8_t* y, trv_dim step) {
  const trvk_average p = *a;
  if (s->dtype == TRV_DTYPE_I8 && step == 1 && p.narrow &&
      !s->flushed) { /* as when both sides have one scale; vectorises */
    const int16_t* sum = s->part.of_int8_t + first;
    int8_t* d = (int8_t*)y;
    const int32_t factor = (int32_t)p.factor, half = (int32_t)p.half;
    TRVK_IVDEP for (uint32_t i = 0; i < n; i++) d[i] =
        (int8_t)(trvk_clamp32((sum[i] * factor + half) >> p.quick_shift, p.lo - p.zero,
                              p.hi - p.zero) +
                 p.zero);
  } else if (s->dtype == TRV_DTYPE_I8)
    STORE(int8_t)
  else
    STORE(int16_t)
}
#undef ADD
#undef STORE
