/* mcu_mve_plain.c - elementwise operators of i8 with Helium: sums, tables, to and from real
 * numbers. */
#include "kernel.h"

#if TRVK_M_MVE
#include "blocks.h"
#include "mcu_mve.h"

#pragma GCC diagnostic ignored \
    "-Wunused-parameter" /* of naked functions, where Clang wants assembly alone */

/* ---- a + b, a - b */

/* Multipliers, and what the zero points add, in two parts of 16 bits (blocks.h). */
typedef struct sum_plan {
  int32_t lo[4], hi[4], high[4], low[4]; /* bounds and parts of what is added, in all lanes */
  trvk_parts a, b;
  int32_t down, zero; /* down: 16 - shift */
} sum_plan;

/* y[i] = a[i] * p->a + b[i] * p->b + .., as binary.c has it; n is not 0. */
__attribute__((naked)) TRVK_APART static void sum_row(const sum_plan* p, const int8_t* a,
                                                      const int8_t* b, int8_t* y, trv_dim n) {
  __asm__ volatile(
      "push {r4-r9, lr}\n"
      "vpush {d8-d15}\n"
      "ldr lr, [sp, #92]\n"
      "vldrw.32 q4, [r0]\n"
      "vldrw.32 q5, [r0, #16]\n"
      "vldrw.32 q6, [r0, #32]\n"
      "vldrw.32 q7, [r0, #48]\n"
      "ldrd r4, r5, [r0, #64]\n"
      "ldrd r6, r7, [r0, #72]\n"
      "ldrd r8, r9, [r0, #80]\n"
      "dlstp.32 lr, lr\n"
      "1: vldrb.s32 q0, [r1], #4\n"
      "vmov q3, q7\n"
      "vldrb.s32 q1, [r2], #4\n"
      "vmla.s32 q3, q0, r5\n"
      "vmov q2, q6\n"
      "vmla.s32 q3, q1, r7\n"
      "vmla.s32 q2, q0, r4\n"
      "vshr.s32 q3, q3, #16\n"
      "vmla.s32 q2, q1, r6\n"
      "vadd.i32 q2, q2, q3\n"
      "vrshl.s32 q2, r8\n"
      "vadd.i32 q2, q2, r9\n"
      "vmax.s32 q2, q2, q4\n"
      "vmin.s32 q2, q2, q5\n"
      "vstrb.32 q2, [r3], #4\n"
      "letp lr, 1b\n"
      "vpop {d8-d15}\n"
      "pop {r4-r9, pc}\n");
}

/* Do sums fit in 32 bits by parts? As in binary.c; results beyond +-2^31 would not be clamped. */
static int sums_split(const trvf_binary_attrs* a, int64_t far_a, int64_t far_b) {
  const int64_t most = far_a * a->a_multiplier + far_b * a->b_multiplier;
  return a->shift >= TRVK_SPLIT_SHIFT && a->shift <= TRVK_SPLIT_SHIFT_MAX &&
         trvk_splits(a->a_multiplier) && trvk_splits(a->b_multiplier) &&
         most <= ((int64_t)1 << 47) - ((int64_t)1 << 33) && most >> a->shift < INT32_MAX / 2;
}

void trvk_sum_i8__mve(const trvk_call* call, uint32_t tile) {
  const trvf_binary_attrs* a = call->attrs;
  const int64_t am = a->a_multiplier,
                bm = a->kind == TRV_BINARY_KIND_SUB ? -(int64_t)a->b_multiplier : a->b_multiplier;
  const trvk_parts offset = trvk_split_factor(-(a->a_zero * am + a->b_zero * bm));
  const sum_plan p = {.lo = {a->lo, a->lo, a->lo, a->lo},
                      .hi = {a->hi, a->hi, a->hi, a->hi},
                      .high = {offset.high, offset.high, offset.high, offset.high},
                      .low = {offset.low, offset.low, offset.low, offset.low},
                      .a = trvk_split_factor(am),
                      .b = trvk_split_factor(bm),
                      .down = 16 - a->shift,
                      .zero = a->y_zero};
  const int quick = sums_split(a, 128 + (a->a_zero < 0 ? -a->a_zero : a->a_zero),
                               128 + (a->b_zero < 0 ? -a->b_zero : a->b_zero));
  trvk_buffer x[2], y;
  trvk_blocks b;
  for (trvk_blocks_begin(&b, call, 2, tile); trvk_blocks_next(&b); trvk_blocks_write(&b, &y)) {
    const int8_t *u = trvk_blocks_read(&b, 1, &x[0]), *v = trvk_blocks_read(&b, 2, &x[1]);
    int8_t* to = trvk_blocks_target(&b, &y);
    if (quick)
      sum_row(&p, u, v, to, b.n);
    else
      for (trv_dim i = 0; i < b.n; i++)
        to[i] = (int8_t)trvk_stored(
            trvk_rescale((u[i] - a->a_zero) * am + (v[i] - a->b_zero) * bm, 1, a->shift), a->y_zero,
            a->lo, a->hi);
  }
}

/* ---- a table */

void trvk_lookup_i8__mve(const trvk_call* call, uint32_t tile) {
  /* the entry of the least number comes first: signed ones count from -128 */
  const uint32_t flip = call->in[0].dtype == TRV_DTYPE_I8 ? 0x80 : 0;
  trvk_buffer xs, ys;
  trvk_blocks b;
  for (trvk_blocks_begin(&b, call, 1, tile); trvk_blocks_next(&b); trvk_blocks_write(&b, &ys)) {
    const uint8_t* x = trvk_blocks_read(&b, 1, &xs);
    uint8_t* y = trvk_blocks_target(&b, &ys);
    __asm__ volatile(
        "vdup.8 q2, %[flip]\n"
        "dlstp.8 lr, %[n]\n"
        "1: vldrb.8 q0, [%[x]], #16\n"
        "veor q0, q0, q2\n"
        "vldrb.u8 q1, [%[table], q0]\n"
        "vstrb.8 q1, [%[y]], #16\n"
        "letp lr, 1b\n"
        : [x] "+r"(x), [y] "+r"(y)
        : [n] "r"(b.n), [table] "r"(call->in[1].data), [flip] "r"(flip)
        : "lr", "q0", "q1", "q2", "memory");
  }
}

#if TRVK_M_MVE_FLOAT
/* ---- real to stored, stored to real */

static void quantize_row(const trvf_requantize_attrs* a, const float* x, int8_t* y, trv_dim n) {
  __asm__ volatile(
      "vdup.32 q4, %[least]\n"
      "vdup.32 q5, %[most]\n"
      "dlstp.32 lr, %[n]\n"
      "1: vldrw.32 q0, [%[x]], #16\n"
      "vmul.f32 q0, q0, %[scale]\n"
      "vcvtn.s32.f32 q0, q0\n" /* ties to even; NaN becomes 0, what is too large the bounds */
      "vmax.s32 q0, q0, q4\n"
      "vmin.s32 q0, q0, q5\n"
      "vadd.i32 q0, q0, %[zero]\n"
      "vstrb.32 q0, [%[y]], #4\n"
      "letp lr, 1b\n"
      : [x] "+r"(x), [y] "+l"(y)
      : [n] "r"(n), [scale] "r"(a->scale), [least] "r"(a->lo - a->y_zero),
        [most] "r"(a->hi - a->y_zero), [zero] "r"(a->y_zero)
      : "lr", "q0", "q4", "q5", "memory");
}

static void dequantize_row(const trvf_requantize_attrs* a, const int8_t* x, float* y, trv_dim n) {
  __asm__ volatile(
      "dlstp.32 lr, %[n]\n"
      "1: vldrb.s32 q0, [%[x]], #4\n"
      "vsub.i32 q0, q0, %[zero]\n"
      "vcvt.f32.s32 q0, q0\n"
      "vmul.f32 q0, q0, %[scale]\n"
      "vstrw.32 q0, [%[y]], #16\n"
      "letp lr, 1b\n"
      : [x] "+l"(x), [y] "+r"(y)
      : [n] "r"(n), [scale] "r"(a->scale), [zero] "r"(a->x_zero)
      : "lr", "q0", "memory");
}

void trvk_requantize_real__mve(const trvk_call* call, uint32_t tile) {
  const trvf_requantize_attrs* a = call->attrs;
  trvk_buffer xs, ys;
  trvk_blocks b;
  for (trvk_blocks_begin(&b, call, 1, tile); trvk_blocks_next(&b); trvk_blocks_write(&b, &ys)) {
    const void* x = trvk_blocks_read(&b, 1, &xs);
    void* y = trvk_blocks_target(&b, &ys);
    if (call->in[0].dtype == TRV_DTYPE_F32)
      quantize_row(a, x, y, b.n);
    else
      dequantize_row(a, x, y, b.n);
  }
}
#endif
#endif
