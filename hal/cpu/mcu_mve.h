/* mcu_mve.h - what the kernels of Helium (Cortex-M55, M85) on weights by rows share.
 *
 * Inner loops are assembly. A dot product goes into an even general register (VMLADAVA): with six
 * of them and up to seven pointers at work nothing is left for a compiler to place. And GCC 12
 * makes no loops with tail predication (DLSTP .. LETP), which read exactly as many numbers as there
 * are.
 */
#ifndef TRVK_MCU_MVE_H
#define TRVK_MCU_MVE_H

#include "mcu_geometry.h"

/* Results of two inputs of k numbers to y[0] and y[1]. */
void trvk_mcu_product__mve(const trvk_mcu_rows* r, const int8_t* const* x, int8_t* const* y);

/* A qconv with one input channel in a group. */
void trvk_mcu_depthwise__mve(const trvk_call* call, const geometry* g);

/* Channels whose sums are held at once: of a depthwise pixel, a multiple of 16; of each of two
 * pixels (PAIR * 4 is known to the assembly); of a row of a matrix, a multiple of 6, and as many as
 * 6 more at the end. */
enum { STRIP = 32, PAIR = 24, LONG = 126 };

/* trvk_mcu_make_out, shorter: bounds are whole numbers of i8 by now. */
TRVK_ALWAYS void make_out(const trvk_call* call, int32_t y_zero, float lo, float hi,
                          trvk_mcu_out* out) {
#if TRVK_M_MVE_FLOAT
  const trv_tensor* scale = &call->in[2];
  out->bias = (const int32_t*)(const void*)call->in[3].data;
  out->m = (const int32_t*)(const void*)scale->data;
  out->s = out->m + scale->stride[0];
  out->twice = 2 * y_zero + 1;
  out->lo = (int32_t)lo;
  out->hi = (int32_t)hi;
#else
  trvk_mcu_make_out(call, y_zero, lo, hi, out);
#endif
}

/* Stored results of n sums, y[i] = clamp(zero + rescale(sums[i])). */
TRVK_ALWAYS void results(const trvk_mcu_out* o, trv_dim c, const int32_t* sums, trv_dim n,
                         int8_t* y) {
  const int32_t *m = o->m + c, *s = o->s + c;
  __asm__ volatile(
      "vdup.32 q4, %[lo]\n"
      "vdup.32 q5, %[hi]\n"
      "dlstp.32 lr, %[n]\n"
      "1: vldrw.32 q1, [%[m]], #16\n"
      "vldrw.32 q0, [%[sums]], #16\n"
      "vldrw.32 q2, [%[s]], #16\n"
      "vmulh.s32 q0, q0, q1\n"
      "vmvn q2, q2\n" /* shifts are stored less 33: to the left by minus what is left of them */
      "vrshl.s32 q0, q0, q2\n"
      "vadd.i32 q0, q0, %[zero]\n"
      "vmax.s32 q0, q0, q4\n"
      "vmin.s32 q0, q0, q5\n"
      "vstrb.32 q0, [%[y]], #4\n"
      "letp lr, 1b\n"
      : [m] "+r"(m), [s] "+r"(s), [sums] "+r"(sums), [y] "+l"(y)
      : [n] "r"(n), [zero] "r"(o->twice >> 1), [lo] "r"(o->lo), [hi] "r"(o->hi)
      : "lr", "q0", "q1", "q2", "q4", "q5", "memory");
}
/* The same for two pixels. */
TRVK_ALWAYS void results2(const trvk_mcu_out* o, trv_dim c, const int32_t* sums, trv_dim n,
                          int8_t* y0, int8_t* y1) {
  const int32_t *m = o->m + c, *s = o->s + c;
  __asm__ volatile(
      "vdup.32 q4, %[lo]\n"
      "vdup.32 q5, %[hi]\n"
      "dlstp.32 lr, %[n]\n"
      "1: vldrw.32 q1, [%[m]], #16\n"
      "vldrw.32 q3, [%[sums], #96]\n"
      "vldrw.32 q0, [%[sums]], #16\n"
      "vmulh.s32 q3, q3, q1\n"
      "vldrw.32 q2, [%[s]], #16\n"
      "vmulh.s32 q0, q0, q1\n"
      "vmvn q2, q2\n"
      "vrshl.s32 q3, q3, q2\n"
      "vrshl.s32 q0, q0, q2\n"
      "vadd.i32 q3, q3, %[zero]\n"
      "vadd.i32 q0, q0, %[zero]\n"
      "vmax.s32 q3, q3, q4\n"
      "vmax.s32 q0, q0, q4\n"
      "vmin.s32 q3, q3, q5\n"
      "vmin.s32 q0, q0, q5\n"
      "vstrb.32 q3, [%[y1]], #4\n"
      "vstrb.32 q0, [%[y0]], #4\n"
      "letp lr, 1b\n"
      : [m] "+r"(m), [s] "+r"(s), [sums] "+r"(sums), [y0] "+l"(y0), [y1] "+l"(y1)
      : [n] "r"(n), [zero] "r"(o->twice >> 1), [lo] "r"(o->lo), [hi] "r"(o->hi)
      : "lr", "q0", "q1", "q2", "q3", "q4", "q5", "memory");
}

/* The same for channels that lie apart. */
void trvk_mcu_scatter__mve(const trvk_mcu_out* o, trv_dim c, const int32_t* sums, trv_dim n,
                           int8_t* y, trv_dim step);

/* n bytes; shorter than a call where they are few. */
TRVK_ALWAYS void copy_bytes(void* to, const void* from, trv_dim n) {
  __asm__ volatile(
      "wlstp.8 lr, %2, 2f\n"
      "1: vldrb.8 q0, [%1], #16\n"
      "vstrb.8 q0, [%0], #16\n"
      "letp lr, 1b\n"
      "2:\n"
      : "+r"(to), "+r"(from)
      : "r"(n)
      : "lr", "q0", "memory");
}
TRVK_ALWAYS void fill_bytes(int8_t* to, int32_t v, trv_dim n) {
  __asm__ volatile(
      "vdup.8 q0, %1\n"
      "wlstp.8 lr, %2, 2f\n"
      "1: vstrb.8 q0, [%0], #16\n"
      "letp lr, 1b\n"
      "2:\n"
      : "+r"(to)
      : "r"(v), "r"(n)
      : "lr", "q0", "memory");
}

/* Taps from .. to - 1 of an axis lie inside of the input; none: from == to. */
typedef struct span {
  trv_dim from, to;
} span;

static inline span taps_inside(const geometry* g, int axis, trv_dim at) {
  const trv_dim first = at * g->stride[axis] - g->pad[axis], in = g->in[axis],
                step = g->dilation[axis];
  span s = {0, g->kernel[axis]};
  if (first < 0) s.from = (step - 1 - first) / step;
  if (first >= in)
    s.to = 0;
  else if ((in - 1 - first) / step < s.to)
    s.to = (in - 1 - first) / step + 1;
  if (s.from >= s.to) s.from = s.to = 0;
  return s;
}
#endif
