/* mcu_product.c - rows of i8 times rows of weights, to stored results. */
/* clang-format off: its macros rename what the others declare */
#include "variant.h"
/* clang-format on */
#include "mcu.h"

#ifndef TRVK_VARIANT
int32_t trvk_mcu_whole(float v) {
  uint32_t bits;
  memcpy(&bits, &v, sizeof bits);
  const uint32_t exponent = (bits >> 23) & 255u, mantissa = (bits & 0x7FFFFFu) | 0x800000u;
  if (exponent < 127 || exponent > 127 + 23) return exponent < 127 ? 0 : INT32_MAX;
  const int32_t whole = (int32_t)(mantissa >> (127 + 23 - exponent));
  return bits >> 31 ? -whole : whole;
}

int trvk_mcu_scratch_ok(const trvk_call* call, uint64_t bytes) {
  return bytes == 0 ||
         (call->n_tmp > 0 && (uint64_t)call->tmp[0].dim[0] >= bytes &&
          (call->tmp[0].stride[0] == 1 || bytes == 1) && (uintptr_t)call->tmp[0].data % 8 == 0);
}

const char* trvk_mcu_check_out(const trvk_call* call, trv_dim n, int32_t x_zero, int32_t y_zero,
                               float lo, float hi, int64_t* expected, int64_t* got) {
  const trv_tensor *scale = &call->in[2], *bias = trvk_opt(call, 3);
  const int real = call->out[0].dtype == TRV_DTYPE_F32; /* scale f32[n], else i32[2, n] */
  const trv_dim last = scale->rank == (real ? 1 : 2) ? scale->dim[scale->rank - 1u] : -1;
  if (scale->dtype != (real ? TRV_DTYPE_F32 : TRV_DTYPE_I32) || last != n ||
      (!real && scale->dim[0] != 2) || (n > 1 && scale->stride[scale->rank - 1u] != 1))
    return trvk_fail(TRVK_SAY("weights by rows: dtype or shape of the scale"), n, last, expected,
                     got);
  if (!bias || bias->dtype != TRV_DTYPE_I32 || bias->rank != 1 || bias->dim[0] != n ||
      (n > 1 && bias->stride[0] != 1))
    return trvk_fail(TRVK_SAY("weights by rows: dtype or shape of the bias"), n,
                     bias && bias->rank ? bias->dim[0] : 0, expected, got);
  if (!trvk_fits(TRV_DTYPE_I8, x_zero))
    return trvk_fail(TRVK_SAY("weights by rows: the input's zero point is not of its dtype"), 0,
                     x_zero, expected, got);
  if (real) return NULL;
  const int32_t* s = (const int32_t*)(const void*)scale->data + scale->stride[0];
  for (trv_dim i = 0; i < n; i++)
    if (s[i] < 0 || s[i] > TRVK_SHIFT_MAX - TRVK_MCU_SHIFT)
      return trvk_fail(TRVK_SAY("weights by rows: a shift"), TRVK_SHIFT_MAX - TRVK_MCU_SHIFT, s[i],
                       expected, got);
  return trvk_result_check(&call->out[0], y_zero, trvk_mcu_whole(lo), trvk_mcu_whole(hi), expected,
                           got);
}

void trvk_mcu_make_out(const trvk_call* call, int32_t y_zero, float lo, float hi,
                       trvk_mcu_out* out) {
  const trv_tensor* scale = &call->in[2];
  out->bias = (const int32_t*)(const void*)call->in[3].data;
  out->m = (const int32_t*)(const void*)scale->data;
  out->s = out->m + scale->stride[0];
  out->twice = 2 * y_zero + 1;
  out->lo = trvk_mcu_whole(lo);
  out->hi = trvk_mcu_whole(hi);
}
#endif

#if TRVK_PAIRS

void TRVK_KERNEL(mcu_expand)(const trvk_mcu_rows* r, const int8_t* x, int slot) {
  int32_t* t = (int32_t*)(void*)r->expanded + slot;
  const int8_t* const end = x + (r->k & ~(trv_dim)3);
  for (; x < end; x += 4, t += 4) {
    const int32_t v = trvk_mcu_word(x);
    t[0] = trvk_mcu_even(v);
    t[2] = trvk_mcu_odd(v);
  }
  if (r->k & 3) {
    int32_t v = 0;
    memcpy(&v, x, (size_t)(r->k & 3));
    t[0] = trvk_mcu_even(v);
    t[2] = trvk_mcu_odd(v);
  }
}

/* Four numbers of two inputs and of two rows of the weight. In assembler, as what follows:
 * compilers run out of registers. */
#define QUAD                           \
  "ldr %[p], [%[u]], #4\n"             \
  "ldr %[q], [%[v]], #4\n"             \
  "ldrd %[a], %[b], [%[x]], #8\n"      \
  "sxtb16 %[c], %[p]\n"                \
  "smlad %[s00], %[a], %[c], %[s00]\n" \
  "smlad %[s10], %[b], %[c], %[s10]\n" \
  "sxtb16 %[c], %[q]\n"                \
  "smlad %[s01], %[a], %[c], %[s01]\n" \
  "smlad %[s11], %[b], %[c], %[s11]\n" \
  "ldrd %[a], %[b], [%[x]], #8\n"      \
  "sxtb16 %[p], %[p], ror #8\n"        \
  "smlad %[s00], %[a], %[p], %[s00]\n" \
  "smlad %[s10], %[b], %[p], %[s10]\n" \
  "sxtb16 %[q], %[q], ror #8\n"        \
  "smlad %[s01], %[a], %[q], %[s01]\n" \
  "smlad %[s11], %[b], %[q], %[s11]\n"
#define QUAD_REGISTERS                                                                      \
  [u] "+r"(u), [v] "+r"(v), [x] "+r"(x), [s00] "+r"(s00), [s01] "+r"(s01), [s10] "+r"(s10), \
      [s11] "+r"(s11), [p] "=&r"(p), [q] "=&r"(q), [a] "=&r"(a), [b] "=&r"(b), [c] "=&r"(c)

/* Two inputs, expanded, times all rows of the weight, two at a time. */
static void inputs(const trvk_mcu_rows* r, int8_t* const* y) {
  const trvk_mcu_out* const o = &r->out;
  const int32_t *m = o->m, *s = o->s, *bias = o->bias;
  const int8_t* w = r->w;
  const trv_dim k4 = r->k4, y_step = r->y_step;
  int8_t *y0 = y[0], *y1 = y[1];
  for (trv_dim n = r->n; n > 0; n -= 2, m += 2, s += 2, bias += 2) {
    const int second = n > 1; /* else the last row once more, for nothing */
    const int8_t *u = w, *const end = w + k4, *v = second ? end : w;
    const int16_t* x = r->expanded;
    int32_t s00 = bias[0], s01 = bias[second], s10 = s00, s11 = s01, p, q, a, b, c;
    if (k4 & 4) __asm__ volatile(QUAD : QUAD_REGISTERS : : "memory");
    if (u != end)
      __asm__ volatile("1:\n" QUAD QUAD
                       "cmp %[u], %[end]\n"
                       "bne 1b\n"
                       : QUAD_REGISTERS
                       : [end] "r"(end)
                       : "memory", "cc");
    w = v;
    trvk_mcu_four(o, m, s, 0, second, second, &s00, &s10, &s01, &s11);
    *y0 = (int8_t)s00;
    *y1 = (int8_t)s10;
    if (second) {
      y0[y_step] = (int8_t)s01;
      y1[y_step] = (int8_t)s11;
    }
    y0 += 2 * y_step;
    y1 += 2 * y_step;
  }
}
#undef QUAD
#undef QUAD_REGISTERS

/* Four numbers of an input and of four rows of the weight: a, a + step, b, b + step. */
#define ROW(from, s)                 \
  "ldr %[w], " from                  \
  "\n"                               \
  "sxtb16 %[t], %[w]\n"              \
  "smlad %[" s "], %[e], %[t], %[" s \
  "]\n"                              \
  "sxtb16 %[w], %[w], ror #8\n"      \
  "smlad %[" s "], %[o], %[w], %[" s "]\n"
#define QUAD                                                                         \
  "ldr %[o], [%[x]], #4\n"                                                           \
  "sxtb16 %[e], %[o]\n"                                                              \
  "sxtb16 %[o], %[o], ror #8\n" ROW("[%[a], %[step]]", "s1") ROW("[%[a]], #4", "s0") \
      ROW("[%[b], %[step]]", "s3") ROW("[%[b]], #4", "s2")
#define QUAD_REGISTERS                                                                \
  [x] "+r"(x), [a] "+r"(a), [b] "+r"(b), [s0] "+r"(s0), [s1] "+r"(s1), [s2] "+r"(s2), \
      [s3] "+r"(s3), [e] "=&r"(e), [o] "=&r"(o), [w] "=&r"(w), [t] "=&r"(t)

/* sum[i] += row i * x, x read up to k. */
TRVK_APART static void dot4(const int8_t* a, const int8_t* b, trv_dim step, const int8_t* x,
                            trv_dim k, int32_t* sum) {
  int32_t s0 = sum[0], s1 = sum[1], s2 = sum[2], s3 = sum[3], e, o, w, t;
  const int8_t* const end = x + (k & ~(trv_dim)3);
  if (k & 4) __asm__ volatile(QUAD : QUAD_REGISTERS : [step] "r"(step) : "memory");
  if (x != end)
    __asm__ volatile("1:\n" QUAD QUAD
                     "cmp %[x], %[end]\n"
                     "bne 1b\n"
                     : QUAD_REGISTERS
                     : [step] "r"(step), [end] "r"(end)
                     : "memory", "cc");
  for (k &= 3; k > 0; k--, a++, b++) {
    const int32_t v = *x++;
    s0 = trvk_add32(s0, *a * v);
    s1 = trvk_add32(s1, a[step] * v);
    s2 = trvk_add32(s2, *b * v);
    s3 = trvk_add32(s3, b[step] * v);
  }
  sum[0] = s0;
  sum[1] = s1;
  sum[2] = s2;
  sum[3] = s3;
}
#undef ROW
#undef QUAD
#undef QUAD_REGISTERS

#else

/* sum[i] += a[i] * b for four rows of k. */
#if TRVK_SATURATES
/* Compilers put the sums in another order, and need more registers than there are. */
#define STEP                       \
  "ldrsb %[v], [%[b]], #1\n"       \
  "ldrsb %[t], [%[a0]], #1\n"      \
  "mla %[s0], %[t], %[v], %[s0]\n" \
  "ldrsb %[t], [%[a1]], #1\n"      \
  "mla %[s1], %[t], %[v], %[s1]\n" \
  "ldrsb %[t], [%[a2]], #1\n"      \
  "mla %[s2], %[t], %[v], %[s2]\n" \
  "ldrsb %[t], [%[a3]], #1\n"      \
  "mla %[s3], %[t], %[v], %[s3]\n"
#define LOOP(steps)                                                                             \
  __asm__ volatile(                                                                             \
      "1:\n" steps                                                                              \
      "cmp %[b], %[end]\n"                                                                      \
      "bne 1b\n"                                                                                \
      : [a0] "+r"(a0), [a1] "+r"(a1), [a2] "+r"(a2), [a3] "+r"(a3), [b] "+r"(b), [s0] "+r"(s0), \
        [s1] "+r"(s1), [s2] "+r"(s2), [s3] "+r"(s3), [v] "=&r"(v), [t] "=&r"(t)                 \
      : [end] "r"(end)                                                                          \
      : "memory", "cc")
TRVK_APART static void dot4(const int8_t* const* a, const int8_t* b, trv_dim k, int32_t* sum) {
  const int8_t *a0 = a[0], *a1 = a[1], *a2 = a[2], *a3 = a[3];
  const int8_t* end = b + (k & ~(trv_dim)3);
  int32_t s0 = sum[0], s1 = sum[1], s2 = sum[2], s3 = sum[3], v, t;
  if (b != end) LOOP(STEP STEP STEP STEP);
  end = b + (k & 3);
  if (b != end) LOOP(STEP);
  sum[0] = s0;
  sum[1] = s1;
  sum[2] = s2;
  sum[3] = s3;
}
#undef STEP
#undef LOOP

#elif defined(__ARM_ARCH_6M__) && defined(__GNUC__)
/* Eight registers serve most instructions here: sums belong in the others, which can be added to,
 * but compilers keep them on the stack. r4 and r0 to r3: b and the rows, all past their ends; r5
 * counts up to 0. */
__attribute__((naked)) TRVK_APART static void dot4(const int8_t* const* a, const int8_t* b,
                                                   trv_dim k, int32_t* sum) {
  (void)a, (void)b, (void)k, (void)sum;
  __asm__ volatile(
      ".syntax unified\n"
      "push {r4, r5, r6, r7, lr}\n"
      "mov r4, r8\n"
      "mov r5, r9\n"
      "mov r6, r10\n"
      "mov r7, r11\n"
      "push {r3, r4, r5, r6, r7}\n"
      "ldmia r3!, {r4, r5, r6, r7}\n"
      "mov r8, r4\n"
      "mov r9, r5\n"
      "mov r10, r6\n"
      "mov r11, r7\n"
      "adds r4, r1, r2\n"
      "rsbs r5, r2, #0\n"
      "ldmia r0!, {r1, r3, r6, r7}\n"
      "adds r0, r1, r2\n"
      "adds r1, r3, r2\n"
      "adds r3, r7, r2\n"
      "adds r2, r6, r2\n"
      "cmp r5, #0\n"
      "beq 2f\n"
      "1: ldrsb r7, [r4, r5]\n"
      "ldrsb r6, [r0, r5]\n"
      "muls r6, r7\n"
      "add r8, r6\n"
      "ldrsb r6, [r1, r5]\n"
      "muls r6, r7\n"
      "add r9, r6\n"
      "ldrsb r6, [r2, r5]\n"
      "muls r6, r7\n"
      "add r10, r6\n"
      "ldrsb r6, [r3, r5]\n"
      "muls r6, r7\n"
      "add r11, r6\n"
      "adds r5, #1\n"
      "bne 1b\n"
      "2: ldr r3, [sp]\n"
      "mov r4, r8\n"
      "mov r5, r9\n"
      "mov r6, r10\n"
      "mov r7, r11\n"
      "stmia r3!, {r4, r5, r6, r7}\n"
      "pop {r3, r4, r5, r6, r7}\n"
      "mov r8, r4\n"
      "mov r9, r5\n"
      "mov r10, r6\n"
      "mov r11, r7\n"
      "pop {r4, r5, r6, r7, pc}\n");
}

#else
static void dot4(const int8_t* const* a, const int8_t* b, trv_dim k, int32_t* sum) {
  for (int r = 0; r < 4; r++) {
    uint32_t s = (uint32_t)sum[r]; /* it may wrap */
    for (trv_dim i = 0; i < k; i++) s += (uint32_t)(a[r][i] * b[i]);
    sum[r] = (int32_t)s;
  }
}
#endif

/* Four inputs times all rows of the weight. */
static void inputs(const trvk_mcu_rows* r, const int8_t* const* x, int8_t* const* y) {
  const trvk_mcu_out* const o = &r->out;
  const int8_t* w = r->w;
  trv_dim at = 0;
  for (trv_dim n = 0; n < r->n; n++, w += r->k4, at += r->y_step) {
    const int32_t first = o->bias[n];
    int32_t sum[4] = {first, first, first, first};
    dot4(x, w, r->k, sum);
    trvk_mcu_four(o, o->m + n, o->s + n, 0, 0, 0, &sum[0], &sum[1], &sum[2], &sum[3]);
    y[0][at] = (int8_t)sum[0];
    y[1][at] = (int8_t)sum[1];
    y[2][at] = (int8_t)sum[2];
    y[3][at] = (int8_t)sum[3];
  }
}
#endif

/* One input times all rows of the weight, four at a time. */
static void input(const trvk_mcu_rows* r, const int8_t* x, int8_t* y) {
  const trvk_mcu_out* const o = &r->out;
  const int32_t *m = o->m, *s = o->s, *bias = o->bias;
  const int8_t* w = r->w;
  const trv_dim k = r->k, k4 = r->k4, y_step = r->y_step;
  trv_dim n = r->n;
  for (; n >= 4; n -= 4, w += 4 * k4, bias += 4, m += 4, s += 4) {
    int32_t sum[4] = {bias[0], bias[1], bias[2], bias[3]};
#if TRVK_PAIRS
    dot4(w, w + 2 * k4, k4, x, k, sum);
#else
    const int8_t* const rows[4] = {w, w + k4, w + 2 * k4, w + 3 * k4};
    dot4(rows, x, k, sum);
#endif
    if (r->sums) {
      memcpy(r->sums + 4 * (r->n - n), sum, sizeof sum);
      continue;
    }
    trvk_mcu_four(o, m, s, 1, 2, 3, &sum[0], &sum[1], &sum[2], &sum[3]);
    y[0] = (int8_t)sum[0];
    y += y_step;
    y[0] = (int8_t)sum[1];
    y += y_step;
    y[0] = (int8_t)sum[2];
    y += y_step;
    y[0] = (int8_t)sum[3];
    y += y_step;
  }
  for (; n > 0; n--, w += k4, y += y_step) {
    uint32_t sum = (uint32_t)*bias++; /* it may wrap */
    for (trv_dim i = 0; i < k; i++) sum += (uint32_t)(w[i] * x[i]);
    if (r->sums)
      memcpy(r->sums + 4 * (r->n - n), &sum, sizeof sum);
    else
      *y = (int8_t)trvk_mcu_result(o, (int32_t)sum, *m++, *s++);
  }
}

void TRVK_KERNEL(mcu_product)(const trvk_mcu_rows* r, const int8_t* const* x, int8_t* const* y,
                              trv_dim count) {
  if (count == TRVK_MCU_BLOCK && !r->sums) {
#if TRVK_PAIRS
    inputs(r, y);
#else
    inputs(r, x, y);
#endif
    return;
  }
  for (trv_dim i = 0; i < count; i++) input(r, x[i], y[i]);
}
