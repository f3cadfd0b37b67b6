/* mcu.h - products of stored i8 with weights by rows, for microcontrollers (README.md says how
 * weights lie).
 *
 * One product is what convolutions and matrix products come down to: rows of inputs, one for each
 * pixel, times the weight's rows, one for each output channel. The sources are compiled as they are
 * ("ref": 16 bits or bytes at a time, no product wider than 32 bits where the core has none) and
 * once more by mcu_dsp.c, with pairs of 16 bits.
 */
#ifndef TRVK_MCU_H
#define TRVK_MCU_H

#include "gemm.h"
#include "quant.h"
#include "variant.h"

#if defined(TRVK_VARIANT)
#define TRVK_PAIRS 1 /* SMLAD and SXTB16 */
#include <arm_acle.h>
#else
#define TRVK_PAIRS 0
#endif
/* 32-bit Thumb: SSAT, MLA, and products of 64 bits. */
#if TRVK_M && defined(__thumb2__) && defined(__GNUC__)
#define TRVK_SATURATES 1
#else
#define TRVK_SATURATES 0
#endif
#if defined(__GNUC__)
#define TRVK_ALWAYS static inline __attribute__((always_inline))
#define TRVK_APART __attribute__((noinline))
#else
#define TRVK_ALWAYS static inline
#define TRVK_APART
#endif

#define TRVK_MCU_TAPS 32  /* most taps of a depthwise convolution by rows */
#define TRVK_MCU_SHIFT 33 /* least shift of a result; stored shifts are less that */

/* How sums become stored results: clamp(zero + rescale(sum + bias, m, s + 33)). */
typedef struct trvk_mcu_out {
  const int32_t *bias, *m, *s; /* by channel */
  int32_t twice;               /* 2 * zero + 1 */
  int32_t lo, hi;
} trvk_mcu_out;

/* Rows of inputs times rows of weights. */
typedef struct trvk_mcu_rows {
  trvk_mcu_out out;
  const int8_t* w;   /* [n][k4] */
  trv_dim k, k4, n;  /* k4: k rounded up to 4 */
  trv_dim y_step;    /* from one channel of a result to the next */
  int8_t* sums;      /* not NULL: sums of an input go here, i32[n], instead of results to y */
  int16_t* expanded; /* with pairs: [k4 / 4][even 0, even 1, odd 0, odd 1] of inputs 0 and 1 */
} trvk_mcu_rows;

enum { TRVK_MCU_BLOCK = TRVK_PAIRS ? 2 : 4 }; /* inputs at once */

/* floor(a * b / 2^32). */
TRVK_ALWAYS int32_t trvk_mcu_high(int32_t a, int32_t b) {
#if defined(__ARM_ARCH_6M__) || defined(__ARM_ARCH_8M_BASE__)
  /* no product of 64 bits: four of 16 by 16 */
  const int32_t a1 = a >> 16, b1 = b >> 16;
  const uint32_t a0 = (uint16_t)a, b0 = (uint16_t)b;
  const uint32_t low = a0 * b0 >> 16;
  const int32_t mid = (int32_t)((uint32_t)a1 * b0 + low); /* below 2^31: |a1 * b0| < 2^31 - 2^16 */
  const int32_t other = (int32_t)((uint32_t)b1 * a0 + (uint16_t)mid);
  return a1 * b1 + (mid >> 16) + (other >> 16);
#else
  return (int32_t)(((int64_t)a * b) >> 32);
#endif
}

/* v >> s for any s: a hostile file may change what a check has seen. */
TRVK_ALWAYS int32_t trvk_mcu_down(int32_t v, int32_t s) {
#if defined(__ARM_ARCH_6M__) && defined(__GNUC__)
  __asm__(".syntax unified\n\tasrs %0, %0, %1" : "+l"(v) : "l"(s) : "cc");
  return v;
#elif TRVK_SATURATES
  int32_t r;
  __asm__("asr %0, %1, %2" : "=r"(r) : "r"(v), "r"(s));
  return r;
#else
  return v >> (s & 31);
#endif
}

/* Twice the result before it is clamped: ((high half >> s) + 1) >> 1 is rescale by s + 33 (qout.c).
 */
TRVK_ALWAYS int32_t trvk_mcu_twice(int32_t sum, int32_t m, int32_t s, int32_t twice) {
  return trvk_mcu_down(trvk_mcu_high(sum, m), s) + twice;
}
TRVK_ALWAYS int32_t trvk_mcu_result(const trvk_mcu_out* o, int32_t sum, int32_t m, int32_t s) {
  return trvk_clamp32(trvk_mcu_twice(sum, m, s, o->twice) >> 1, o->lo, o->hi);
}
/* Four at a time, in place: of channels 0, j, k, l. */
TRVK_ALWAYS void trvk_mcu_four(const trvk_mcu_out* o, const int32_t* m, const int32_t* s, int j,
                               int k, int l, int32_t* a, int32_t* b, int32_t* c, int32_t* d) {
  const int32_t twice = o->twice, lo = o->lo, hi = o->hi;
  *a = trvk_mcu_twice(*a, m[0], s[0], twice);
  *b = trvk_mcu_twice(*b, m[j], s[j], twice);
  *c = trvk_mcu_twice(*c, m[k], s[k], twice);
  *d = trvk_mcu_twice(*d, m[l], s[l], twice);
#if TRVK_SATURATES
  __asm__("ssat %0, #8, %0, asr #1" : "+r"(*a));
  __asm__("ssat %0, #8, %0, asr #1" : "+r"(*b));
  __asm__("ssat %0, #8, %0, asr #1" : "+r"(*c));
  __asm__("ssat %0, #8, %0, asr #1" : "+r"(*d));
  if (lo == INT8_MIN && hi == INT8_MAX) return;
#else
  *a >>= 1;
  *b >>= 1;
  *c >>= 1;
  *d >>= 1;
#endif
  *a = trvk_clamp32(*a, lo, hi);
  *b = trvk_clamp32(*b, lo, hi);
  *c = trvk_clamp32(*c, lo, hi);
  *d = trvk_clamp32(*d, lo, hi);
}

#if TRVK_PAIRS
/* Bytes 0 and 2, 1 and 3, as two numbers of 16 bits. */
TRVK_ALWAYS int32_t trvk_mcu_even(int32_t v) { return __sxtb16(v); }
TRVK_ALWAYS int32_t trvk_mcu_odd(int32_t v) {
  int32_t r;
  __asm__("sxtb16 %0, %1, ror #8" : "=r"(r) : "r"(v));
  return r;
}
TRVK_ALWAYS int32_t trvk_mcu_word(const int8_t* p) {
  int32_t v;
  memcpy(&v, p, sizeof v);
  return v;
}
#endif

/* Results of `count` <= TRVK_MCU_BLOCK inputs of k numbers to y[i]. With pairs two inputs are taken
 * from r->expanded, where mcu_expand has put them (slot 0 or 1), else from x. */
void TRVK_KERNEL(mcu_product)(const trvk_mcu_rows* r, const int8_t* const* x, int8_t* const* y,
                              trv_dim count);
#if TRVK_PAIRS
void TRVK_KERNEL(mcu_expand)(const trvk_mcu_rows* r, const int8_t* x, int slot);
#endif

/* scale and bias of a result; NULL, or what is wrong. */
const char* trvk_mcu_check_out(const trvk_call* call, trv_dim n, int32_t x_zero, int32_t y_zero,
                               float lo, float hi, int64_t* expected, int64_t* got);
/* What check has proved: fills out. */
void trvk_mcu_make_out(const trvk_call* call, int32_t y_zero, float lo, float hi,
                       trvk_mcu_out* out);
/* Is tmp[0] a row of at least that many bytes, if any are needed? */
int trvk_mcu_scratch_ok(const trvk_call* call, uint64_t bytes);
/* A whole number as an integer, without the library for real numbers; others give some integer. */
int32_t trvk_mcu_whole(float v);

/* qconv and qmatmul with weights by rows. */
const char* trvk_mcu_conv_check(const trvk_call* call, int64_t* expected, int64_t* got);
const char* trvk_mcu_matmul_check(const trvk_call* call, int64_t* expected, int64_t* got);

/* Scratch: bytes that a qconv or qmatmul with weights by rows needs. */
TRV_API size_t trvk_mcu_conv_tmp_bytes(const void* attrs, int64_t channels);
TRV_API size_t trvk_mcu_matmul_tmp_bytes(int64_t rows, int64_t k);
#endif
