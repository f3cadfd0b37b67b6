/* average.h - sums and means of stored values: exact sums of up to 64 outputs at once, and the one
 * rounding that turns a sum into a stored value. Shared by qpool and qreduce.
 */
#ifndef TRVK_AVERAGE_H
#define TRVK_AVERAGE_H

#include "quant.h"

#define TRVK_SUMS TRVK_POOL_LANES         /* outputs at once */
#define TRVK_CELLS_MAX ((int64_t)1 << 38) /* most elements of a sum, and the largest divisor */
#define TRVK_AVERAGE_MULTIPLIER (1 << 23) /* multipliers are below it */
#define TRVK_AVERAGE_SHIFT 40             /* largest shift */

/* Sums of (x - zero). */
typedef struct trvk_sums {
  union {
    int16_t of_int8_t[TRVK_SUMS];
    int32_t of_int16_t[TRVK_SUMS];
  } part; /* of the last few elements, in the narrowest type that holds them */
  int64_t total[TRVK_SUMS];
  int32_t zero;
  uint32_t dtype, n, parts; /* outputs; elements in part */
  int flushed;              /* total is in use */
} trvk_sums;

void trvk_sums_begin(trvk_sums* s, uint32_t dtype, int32_t zero, uint32_t n);
/* Adds x[i * stride] to output first + i, i < n. */
void trvk_sums_add(trvk_sums* s, uint32_t first, const uint8_t* x, trv_dim stride, uint32_t n);

/* Turns sums into stored values: clamp(zero + divide(sum * multiplier, count * 2^shift)). */
typedef struct trvk_average {
  int64_t count, most; /* divisor; bound of |sum| */
  int32_t multiplier, shift, zero, lo, hi;
  /* what follows from them */
  int64_t factor, half, unsure; /* see average.c */
  int quick_shift, narrow;
} trvk_average;

/* Sets the divisor (less than 1 counts as 1; at most TRVK_CELLS_MAX) and what follows from it. The
 * numbers are set before. */
void trvk_average_count(trvk_average* a, int64_t count);
/* The stored value of one sum. */
int32_t trvk_average_of(const trvk_average* a, int64_t sum);
/* Stores the averages of sums first .. first + n - 1 at y, `step` elements apart. */
void trvk_average_store(const trvk_average* a, const trvk_sums* s, uint32_t first, uint32_t n,
                        uint8_t* y, trv_dim step);

/* Those of a pool, whose divisor is not set yet, and of a reduction. dtype: of x. */
static inline trvk_average trvk_average_of_pool(const trvf_qpool_attrs* a, uint32_t dtype,
                                                int64_t cells) {
  return (trvk_average){.count = -1,
                        .most = cells * (dtype == TRV_DTYPE_I8 ? UINT8_MAX : UINT16_MAX),
                        .multiplier = a->multiplier,
                        .shift = a->shift,
                        .zero = a->y_zero,
                        .lo = a->lo,
                        .hi = a->hi};
}
static inline trvk_average trvk_average_of_reduce(const trvf_qreduce_attrs* a, uint32_t dtype,
                                                  int64_t cells) {
  trvk_average v = {.most = cells * (dtype == TRV_DTYPE_I8 ? UINT8_MAX : UINT16_MAX),
                    .multiplier = a->multiplier,
                    .shift = a->shift,
                    .zero = a->y_zero,
                    .lo = a->lo,
                    .hi = a->hi};
  trvk_average_count(&v, a->kind == TRV_REDUCE_KIND_MEAN ? cells : 1);
  return v;
}

/* The numbers of an average: NULL, or what is wrong. */
const char* trvk_average_check(const trv_tensor* x, const trv_tensor* y, int32_t x_zero,
                               int32_t y_zero, int32_t multiplier, int32_t shift, int32_t lo,
                               int32_t hi, int64_t* expected, int64_t* got);
#endif
