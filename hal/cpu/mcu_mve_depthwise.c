/* mcu_mve_depthwise.c - depthwise convolution of stored i8 with weights by rows, with Helium. */
#include "kernel.h"

#if TRVK_M_MVE
#include "mcu_mve.h"

#pragma GCC diagnostic ignored \
    "-Wunused-parameter" /* of naked functions, where Clang wants assembly alone */

/* sums[c] = first[c] + the products of channels c .. summed over the taps, 16 channels at a time.
 * Products of two taps are added in 16 bits, which hold them as no packed weight is -128, and then
 * in 32: channels 0, 4 .. in the first vector, 1, 5 .. in the second, as VLD4 and VST4 lay them
 * out. n: channels, at most 16, or a multiple of 16, by which of the two it is. */
#define TAPS(NAME, PREDICATE, T)                                                             \
  __attribute__((naked)) TRVK_APART static void NAME(                                        \
      const int8_t* const* x, trv_dim c, const int8_t* w, trv_dim row, trv_dim taps,         \
      const int32_t* first, int32_t* sums, trv_dim n) {                                      \
    __asm__ volatile(                                                                      \
        "push {r4-r11, lr}\n"                                                              \
        "vpush {d8-d15}\n"                                                                 \
        "ldrd r10, r4, [sp, #100]\n"                                                       \
        "ldrd r5, r11, [sp, #108]\n"                                                       \
        "mov r8, r0\n"                                                                     \
        "mov r9, r2\n"                                                                     \
        "lsr r12, r10, #1\n"                                                               \
        PREDICATE("vctp.8 r11\n")                                                          \
        "0: vld40.32 {q4, q5, q6, q7}, [r4]\n"                                             \
        "vld41.32 {q4, q5, q6, q7}, [r4]\n"                                                \
        "vld42.32 {q4, q5, q6, q7}, [r4]\n"                                                \
        "vld43.32 {q4, q5, q6, q7}, [r4]!\n"                                               \
        "mov r0, r8\n"                                                                     \
        "mov r2, r9\n"                                                                     \
        "wls lr, r12, 2f\n"                                                                \
        "1: ldrd r6, r7, [r0], #8\n"                                                       \
        "add r6, r6, r1\n"                                                                 \
        "add r7, r7, r1\n"                                                                 \
        PREDICATE("vpstt\n")                                                               \
        "vldrb" T ".8 q0, [r6]\n"                                                          \
        "vldrb" T ".8 q1, [r2]\n"                                                          \
        "add r2, r2, r3\n"                                                                 \
        "vmullb.s8 q2, q0, q1\n"                                                           \
        "vmullt.s8 q3, q0, q1\n"                                                           \
        PREDICATE("vpstt\n")                                                               \
        "vldrb" T ".8 q0, [r7]\n"                                                          \
        "vldrb" T ".8 q1, [r2]\n"                                                          \
        "vmullb.s8 q1, q0, q1\n"                                                           \
        "vadd.i16 q2, q2, q1\n"                                                            \
        PREDICATE("vpst\n")                                                                \
        "vldrb" T ".8 q1, [r2]\n"                                                          \
        "add r2, r2, r3\n"                                                                 \
        "vmullt.s8 q1, q0, q1\n"                                                           \
        "vadd.i16 q3, q3, q1\n"                                                            \
        SUM                                                                                \
        "le lr, 1b\n"                                                                      \
        "2: tst r10, #1\n"                                                                 \
        "beq 3f\n"                                                                         \
        "ldr r6, [r0]\n"                                                                   \
        "add r6, r6, r1\n"                                                                 \
        PREDICATE("vpstt\n")                                                               \
        "vldrb" T ".8 q0, [r6]\n"                                                          \
        "vldrb" T ".8 q1, [r2]\n"                                                          \
        "vmullb.s8 q2, q0, q1\n"                                                           \
        "vmullt.s8 q3, q0, q1\n"                                                           \
        SUM                                                                                \
        "3: vst40.32 {q4, q5, q6, q7}, [r5]\n"                                             \
        "vst41.32 {q4, q5, q6, q7}, [r5]\n"                                                \
        "vst42.32 {q4, q5, q6, q7}, [r5]\n"                                                \
        "vst43.32 {q4, q5, q6, q7}, [r5]!\n"                                               \
        "subs r11, #16\n"                                                                  \
        "add r1, #16\n"                                                                    \
        "add r9, #16\n"                                                                    \
        "bgt 0b\n"                                                                         \
        "vpop {d8-d15}\n"                                                                  \
        "pop {r4-r11, pc}\n"); \
  }
#define SUM               \
  "vmovlb.s16 q0, q2\n"   \
  "vmovlb.s16 q1, q3\n"   \
  "vadd.i32 q4, q4, q0\n" \
  "vmovlt.s16 q2, q2\n"   \
  "vadd.i32 q5, q5, q1\n" \
  "vmovlt.s16 q3, q3\n"   \
  "vadd.i32 q6, q6, q2\n" \
  "vadd.i32 q7, q7, q3\n"
#define ALL(text)
#define SOME(text) text
TAPS(taps16, ALL, "")
TAPS(taps_some, SOME, "t")
#undef ALL
#undef SOME
#undef SUM
#undef TAPS

/* A depthwise convolution as its pixels need it. */
typedef struct pixels {
  trvk_mcu_out out;
  const int8_t* w;      /* [taps][row] */
  trv_dim row, taps, n; /* n: channels */
  trv_dim y_step;
} pixels;

/* One pixel, all channels. x: of each tap, at channel 0. */
static void pixel(const pixels* p, const int8_t* const* x, int8_t* y) {
  int32_t sums[STRIP];
  for (trv_dim c = 0, n; c < p->n; c += n) {
    n = p->n - c < STRIP ? p->n - c : STRIP;
    if (n >= 16) {
      n &= ~(trv_dim)15;
    } else if (c > 0) { /* the last 16: some a second time */
      c = p->n - 16;
      n = 16;
    }
    if (n >= 16) {
      taps16(x, c, p->w + c, p->row, p->taps, p->out.bias + c, sums, n);
    } else {
      copy_bytes(sums, p->out.bias, n * 4);
      taps_some(x, 0, p->w, p->row, p->taps, sums, sums, n);
    }
    if (p->y_step == 1)
      results(&p->out, c, sums, n, y + c);
    else
      trvk_mcu_scatter__mve(&p->out, c, sums, n, y + c * p->y_step, p->y_step);
  }
}

/* Where channels are few and pixels lie together, 16 / channels of them count as one with 16: its
 * weight. */
enum { FEW_TAPS = 9 };
typedef struct wide {
  int8_t w[FEW_TAPS][16];
} wide;

static void widen(const pixels* p, wide* q) {
  for (trv_dim t = 0; t < p->taps; t++)
    for (trv_dim i = 0; i < 16; i += p->n) copy_bytes(q->w[t] + i, p->w + t * p->row, p->n);
}

static void neighbours(const pixels* p, const wide* q, const int8_t* const* x, int8_t* y) {
  int32_t sums[16];
  for (trv_dim i = 0; i < 16; i += p->n) copy_bytes(sums + i, p->out.bias, p->n * 4);
  taps16(x, 0, q->w[0], 16, p->taps, sums, sums, 16);
  for (trv_dim i = 0; i < 16; i += p->n) results(&p->out, 0, sums + i, p->n, y + i);
}

/* One pixel where channels have several results each. */
static void multiplied(const pixels* p, trv_dim og, const int8_t* const* x, int8_t* y) {
  for (trv_dim j = 0; j < p->n; j++) {
    int32_t sum = p->out.bias[j];
    for (trv_dim t = 0; t < p->taps; t++)
      sum = trvk_add32(sum, x[t][j / og] * p->w[t * p->row + j]);
    y[j * p->y_step] = (int8_t)trvk_mcu_result(&p->out, sum, p->out.m[j], p->out.s[j]);
  }
}

/* Where the taps of a pixel read, and how far that is from one pixel to the next: 0 for those in
 * lines that are outside, which read the border. */
typedef struct reads {
  const int8_t** at;
  trv_dim* move;
  const int8_t** outer; /* of a pixel at a border */
} reads;

/* The first pixel of a line, as if all of its taps were inside along w. x: as for gather. */
static void aim(const geometry* g, const int8_t* x, span d, span h, const int8_t* border,
                reads* r) {
  const trv_dim next = g->dilation[2] * g->xs[4], move = g->stride[2] * g->xs[4];
  trv_dim t = 0;
  for (trv_dim i = 0; i < g->kernel[0]; i++)
    for (trv_dim j = 0; j < g->kernel[1]; j++) {
      const int in = i >= d.from && i < d.to && j >= h.from && j < h.to;
      const int8_t* at = border;
      if (in)
        at =
            x + (i - d.from) * g->dilation[0] * g->xs[2] + (j - h.from) * g->dilation[1] * g->xs[3];
      for (trv_dim k = 0; k < g->kernel[2]; k++, t++) {
        r->at[t] = at;
        r->move[t] = in ? move : 0;
        if (in) at += next;
      }
    }
}

/* To the pixel `by` further. */
TRVK_ALWAYS void advance(reads* r, trv_dim taps, trv_dim by) {
  const int8_t** at = r->at;
  const trv_dim* move = r->move;
  __asm__ volatile(
      "dlstp.32 lr, %[taps]\n"
      "1: vldrw.32 q0, [%[at]]\n"
      "vldrw.32 q1, [%[move]], #16\n"
      "vmla.s32 q0, q1, %[by]\n"
      "vstrw.32 q0, [%[at]], #16\n"
      "letp lr, 1b\n"
      : [at] "+r"(at), [move] "+r"(move)
      : [taps] "r"(taps), [by] "r"(by)
      : "lr", "q0", "q1", "memory");
}

/* The taps of a pixel some of which are outside along w. */
static void at_border(const geometry* g, const reads* r, span w, const int8_t* border) {
  const int8_t** at = r->outer;
  copy_bytes(at, r->at, g->taps * (trv_dim)sizeof *at);
  for (trv_dim i = g->kernel[0] * g->kernel[1]; i > 0; i--, at += g->kernel[2]) {
    for (trv_dim k = 0; k < w.from; k++) at[k] = border;
    for (trv_dim k = w.to; k < g->kernel[2]; k++) at[k] = border;
  }
}

TRVK_APART static void depthwise_lines(const trvk_call* call, const geometry* g, const pixels* p,
                                       const wide* q, reads* r) {
  const trvf_qconv_attrs* a = call->attrs;
  const int8_t* const x = (const int8_t*)call->in[0].data;
  int8_t* const y = (int8_t*)call->out[0].data;
  int8_t few[16]; /* a border for q */
  int8_t* const border = q ? few : (int8_t*)call->tmp[0].data;
  const trv_dim all = g->out[2], together = q ? 16 / p->n : 1;
  /* pixels whose taps along w are all inside: begin .. end - 1 */
  const trv_dim last = g->in[2] + g->pad[2] - (g->kernel[2] - 1) * g->dilation[2] - 1;
  trv_dim begin = g->pad[2] <= 0 ? 0 : (g->pad[2] - 1) / g->stride[2] + 1;
  trv_dim end = last < 0 ? 0 : last / g->stride[2] + 1;
  if (end > all) end = all;
  if (begin > end) begin = end;
  fill_bytes(border, a->x_zero, q ? 16 : g->cin);
  for (trv_dim n = 0; n < g->n; n++)
    for (trv_dim i = 0; i < g->out[0]; i++)
      for (trv_dim j = 0; j < g->out[1]; j++) {
        const span d = taps_inside(g, 0, i), h = taps_inside(g, 1, j);
        int8_t* to = y + n * g->ys[0] + i * g->ys[2] + j * g->ys[3];
        aim(g,
            x + n * g->xs[0] + (i * g->stride[0] - g->pad[0] + d.from * g->dilation[0]) * g->xs[2] +
                (j * g->stride[1] - g->pad[1] + h.from * g->dilation[1]) * g->xs[3] -
                g->pad[2] * g->xs[4],
            d, h, border, r);
        for (trv_dim k = 0, by; k < all; k += by, to += by * g->ys[4]) {
          const int8_t* const* at = r->at;
          by = 1;
          if (k < begin || k >= end) {
            at_border(g, r, taps_inside(g, 2, k), border);
            at = r->outer;
          } else if (q && end - k >= together) {
            by = together;
          }
          if (by > 1)
            neighbours(p, q, at, to);
          else if (g->og == 1)
            pixel(p, at, to);
          else
            multiplied(p, g->og, at, to);
          advance(r, p->taps, by);
        }
      }
}

/* Frames for few taps, for many, and for channels that are few. */
#define FRAME(taps)             \
  const int8_t* at[2 * (taps)]; \
  trv_dim move[taps];           \
  reads r = {at, move, at + (taps)}
TRVK_APART static void depthwise_few(const trvk_call* call, const geometry* g, const pixels* p) {
  FRAME(FEW_TAPS);
  depthwise_lines(call, g, p, NULL, &r);
}
TRVK_APART static void depthwise_many(const trvk_call* call, const geometry* g, const pixels* p) {
  FRAME(TRVK_MCU_TAPS);
  depthwise_lines(call, g, p, NULL, &r);
}
TRVK_APART static void depthwise_wide(const trvk_call* call, const geometry* g, const pixels* p) {
  wide q;
  FRAME(FEW_TAPS);
  widen(p, &q);
  depthwise_lines(call, g, p, &q, &r);
}
#undef FRAME

void trvk_mcu_depthwise__mve(const trvk_call* call, const geometry* g) {
  const trvf_qconv_attrs* a = call->attrs;
  pixels p = {.w = (const int8_t*)call->in[1].data,
              .row = (g->cout + 3) / 4 * 4,
              .taps = g->taps,
              .n = g->cout,
              .y_step = g->ys[1]};
  make_out(call, a->y_zero, a->lo, a->hi, &p.out);
  if (g->og == 1 && (g->cout == 4 || g->cout == 8) && g->stride[2] == 1 && g->xs[4] == g->cout &&
      g->ys[4] == g->cout && g->ys[1] == 1 && g->out[2] * g->cout >= 32 && g->taps <= FEW_TAPS)
    depthwise_wide(call, g, &p);
  else
    (g->taps <= FEW_TAPS ? depthwise_few : depthwise_many)(call, g, &p);
}
#endif
