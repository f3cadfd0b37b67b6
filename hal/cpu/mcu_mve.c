/* mcu_mve.c - products of stored i8 with Helium. */
#include "kernel.h"

#if TRVK_M_MVE
#include "mcu_mve.h"

#pragma GCC diagnostic ignored \
    "-Wunused-parameter" /* of naked functions, where Clang wants assembly alone */

/* sums[p][c] = bias[c] + x[p] * w[c] for two pixels p and n channels c, three channels at a time.
 * past: from the end of a row of w, as the loop leaves it, to the next; end3, end: of bias, after
 * the last three and after the last. */
__attribute__((naked)) TRVK_APART static void two(const int8_t* x0, const int8_t* x1,
                                                  const int8_t* w, const int32_t* bias, int32_t k,
                                                  int32_t k4, int32_t past, int32_t* sums,
                                                  const int32_t* end3, const int32_t* end) {
  __asm__ volatile(
      "push {r0-r11, lr}\n"
      "mov r11, r3\n"
      "ldrd lr, r12, [sp, #60]\n"
      "sub r9, r2, lr\n"
      "b 3f\n"
      "1: ldr lr, [sp, #60]\n"
      "ldm r11!, {r0, r2, r4}\n"
      "add r5, r9, lr\n"
      "ldr lr, [sp, #56]\n"
      "ldrd r1, r3, [sp]\n"
      "add r7, r5, lr\n"
      "add r9, r7, lr\n"
      "ldr lr, [sp, #52]\n"
      "mov r6, r0\n"
      "mov r8, r2\n"
      "mov r10, r4\n"
      "dlstp.8 lr, lr\n"
      "2: vldrb.8 q0, [r1], #16\n"
      "vldrb.8 q2, [r5], #16\n"
      "vmladava.s8 r0, q0, q2\n"
      "vldrb.8 q1, [r3], #16\n"
      "vmladava.s8 r6, q1, q2\n"
      "vldrb.8 q3, [r7], #16\n"
      "vmladava.s8 r2, q0, q3\n"
      "vldrb.8 q2, [r9], #16\n"
      "vmladava.s8 r8, q1, q3\n"
      "vmladava.s8 r4, q0, q2\n"
      "vmladava.s8 r10, q1, q2\n"
      "letp lr, 2b\n"
      "strd r6, r8, [r12, #96]\n"
      "str r10, [r12, #104]\n"
      "stm r12!, {r0, r2, r4}\n"
      "3: ldr lr, [sp, #68]\n"
      "cmp r11, lr\n"
      "bne 1b\n"
      "b 6f\n"
      "4: ldr lr, [sp, #60]\n"
      "ldrd r1, r3, [sp]\n"
      "ldr r0, [r11], #4\n"
      "add r9, r9, lr\n"
      "ldr lr, [sp, #52]\n"
      "mov r6, r0\n"
      "dlstp.8 lr, lr\n"
      "5: vldrb.8 q0, [r1], #16\n"
      "vldrb.8 q2, [r9], #16\n"
      "vmladava.s8 r0, q0, q2\n"
      "vldrb.8 q1, [r3], #16\n"
      "vmladava.s8 r6, q1, q2\n"
      "letp lr, 5b\n"
      "str r6, [r12, #96]\n"
      "str r0, [r12], #4\n"
      "6: ldr lr, [sp, #72]\n"
      "cmp r11, lr\n"
      "bne 4b\n"
      "add sp, #16\n"
      "pop {r4-r11, pc}\n");
}

/* The same for one pixel, six channels at a time, then two, then one. A loop of 16 numbers (or 64,
 * by which k is a multiple) runs `steps` times. end6, end: of sums, after the last six and the
 * last. */
#define SIX                  \
  "vldrb.8 q0, [r12], #16\n" \
  "vldrb.8 q1, [r1], #16\n"  \
  "vldrb.8 q2, [r3], #16\n"  \
  "vmladava.s8 r0, q0, q1\n" \
  "vldrb.8 q3, [r5], #16\n"  \
  "vmladava.s8 r2, q0, q2\n" \
  "vldrb.8 q1, [r7], #16\n"  \
  "vmladava.s8 r4, q0, q3\n" \
  "vldrb.8 q2, [r9], #16\n"  \
  "vmladava.s8 r6, q0, q1\n" \
  "vldrb.8 q3, [r11], #16\n" \
  "vmladava.s8 r8, q0, q2\n" \
  "vmladava.s8 r10, q0, q3\n"
#define PAIR                 \
  "vldrb.8 q0, [r12], #16\n" \
  "vldrb.8 q1, [r1], #16\n"  \
  "vldrb.8 q2, [r3], #16\n"  \
  "vmladava.s8 r0, q0, q1\n" \
  "vmladava.s8 r2, q0, q2\n"
#define TAIL(BODY) "dlstp.8 lr, lr\n8: " BODY "letp lr, 8b\n"
#define BY64(BODY) "dls lr, lr\n8: " BODY BODY BODY BODY "le lr, 8b\n"
#define ONE(NAME, LOOP)                                                                           \
  __attribute__((naked)) TRVK_APART static void NAME(                                             \
      const int8_t* x, const int32_t* bias, const int8_t* w, const int32_t* end, int32_t k,       \
      int32_t k4, int32_t past, int32_t* sums, const int32_t* end6, int32_t steps) {              \
    __asm__ volatile(                                                                           \
        "push {r0-r11, lr}\n"                                                                   \
        "ldr lr, [sp, #60]\n"                                                                   \
        "sub r11, r2, lr\n"                                                                     \
        "ldrd lr, r12, [sp, #64]\n"                                                             \
        "b 2f\n"                                                                                \
        "1: ldrd r12, lr, [sp, #56]\n"                                                          \
        "add r1, r11, lr\n"                                                                     \
        "add r3, r1, r12\n"                                                                     \
        "add r5, r3, r12\n"                                                                     \
        "add r7, r5, r12\n"                                                                     \
        "add r9, r7, r12\n"                                                                     \
        "add r11, r9, r12\n"                                                                    \
        "ldrd r12, lr, [sp]\n"                                                                  \
        "ldm lr!, {r0, r2, r4, r6, r8, r10}\n"                                                  \
        "str lr, [sp, #4]\n"                                                                    \
        "ldr lr, [sp, #72]\n"                                                                   \
        LOOP(SIX)                                                                               \
        "ldrd lr, r12, [sp, #64]\n"                                                             \
        "stm lr!, {r0, r2, r4, r6, r8, r10}\n"                                                  \
        "str lr, [sp, #64]\n"                                                                   \
        "2: cmp lr, r12\n"                                                                      \
        "bne 1b\n"                                                                              \
        "b 4f\n"                                                                                \
        "3: ldrd r3, lr, [sp, #56]\n"                                                           \
        "add r1, r11, lr\n"                                                                     \
        "add r3, r3, r1\n"                                                                      \
        "ldrd r12, lr, [sp]\n"                                                                  \
        "ldrd r0, r2, [lr], #8\n"                                                               \
        "str lr, [sp, #4]\n"                                                                    \
        "ldr lr, [sp, #72]\n"                                                                   \
        LOOP(PAIR)                                                                              \
        "mov r11, r3\n"                                                                         \
        "ldr lr, [sp, #64]\n"                                                                   \
        "strd r0, r2, [lr], #8\n"                                                               \
        "str lr, [sp, #64]\n"                                                                   \
        "4: ldr r12, [sp, #12]\n"                                                               \
        "sub r12, r12, lr\n"                                                                    \
        "cmp r12, #8\n"                                                                         \
        "bge 3b\n"                                                                              \
        "cmp r12, #0\n"                                                                         \
        "beq 6f\n"                                                                              \
        "mov r3, lr\n"                                                                          \
        "ldrd r12, r2, [sp]\n"                                                                  \
        "ldr r0, [r2]\n"                                                                        \
        "ldr lr, [sp, #60]\n"                                                                   \
        "add r11, r11, lr\n"                                                                    \
        "ldr lr, [sp, #52]\n"                                                                   \
        "dlstp.8 lr, lr\n"                                                                      \
        "5: vldrb.8 q0, [r12], #16\n"                                                           \
        "vldrb.8 q1, [r11], #16\n"                                                              \
        "vmladava.s8 r0, q0, q1\n"                                                              \
        "letp lr, 5b\n"                                                                         \
        "str r0, [r3]\n"                                                                        \
        "6: add sp, #16\n"                                                                      \
        "pop {r4-r11, pc}\n"); \
  }
ONE(one, TAIL)
ONE(one64, BY64)
#undef SIX
#undef PAIR
#undef TAIL
#undef BY64
#undef ONE

void trvk_mcu_scatter__mve(const trvk_mcu_out* o, trv_dim c, const int32_t* sums, trv_dim n,
                           int8_t* y, trv_dim step) {
  int8_t dense[STRIP];
  for (trv_dim i = 0; i < n; i += STRIP) {
    const trv_dim some = n - i < STRIP ? n - i : STRIP;
    results(o, c + i, sums + i, some, dense);
    for (trv_dim j = 0; j < some; j++, y += step) *y = dense[j];
  }
}

/* One row of inputs, in a frame of its own. */
TRVK_APART static void product1(const trvk_mcu_rows* r, const int8_t* x, int8_t* y) {
  int32_t sums[LONG + 6];
  const trv_dim k = r->k, k4 = r->k4, past = k4 - (k + 15) / 16 * 16;
  const int by64 = (k & 63) == 0;
  const int8_t* w = r->w;
  for (trv_dim c = 0, n; c < r->n; c += n, w += n * k4) {
    n = r->n - c;
    if (n > LONG + 6) n = LONG;
    const int32_t *const bias = r->out.bias + c, *const end = sums + n;
    (by64 ? one64 : one)(x, bias, w, end, k, k4, past, sums, end - n % 6, by64 ? k >> 6 : k);
    if (r->y_step == 1)
      results(&r->out, c, sums, n, y + c);
    else
      trvk_mcu_scatter__mve(&r->out, c, sums, n, y + c * r->y_step, r->y_step);
  }
}

void trvk_mcu_product__mve(const trvk_mcu_rows* r, const int8_t* const* x, int8_t* const* y) {
  int32_t sums[2 * PAIR];
  const trv_dim k = r->k, k4 = r->k4, past = k4 - (k + 15) / 16 * 16;
  const int8_t *w = r->w, *const x0 = x[0], *const x1 = x[1];
  int8_t *const y0 = y[0], *const y1 = y[1];
  for (trv_dim c = 0, n; c < r->n; c += n, w += n * k4) {
    n = r->n - c < PAIR ? r->n - c : PAIR;
    const int32_t* const bias = r->out.bias + c;
    const int32_t* const end = bias + n;
    two(x0, x1, w, bias, k, k4, past, sums, end - n % 3, end);
    if (r->y_step == 1) {
      results2(&r->out, c, sums, n, y0 + c, y1 + c);
    } else {
      trvk_mcu_scatter__mve(&r->out, c, sums, n, y0 + c * r->y_step, r->y_step);
      trvk_mcu_scatter__mve(&r->out, c, sums + PAIR, n, y1 + c * r->y_step, r->y_step);
    }
  }
}

void trvk_qmatmul_rows__mve(const trvk_call* call, uint32_t tile) {
  const trvf_qmatmul_attrs* a = call->attrs;
  const trv_tensor *x = &call->in[0], *y = &call->out[0];
  const uint32_t last = x->rank - 1u;
  const trv_dim all = trvk_count(y);
  if (tile > 0 || all == 0) return;
  trvk_mcu_rows r;
  r.w = (const int8_t*)call->in[1].data;
  r.k = x->dim[last];
  r.k4 = (r.k + 3) & ~(trv_dim)3;
  r.n = y->dim[last];
  r.y_step = y->stride[last];
  make_out(call, a->y_zero, a->lo, a->hi, &r.out);
  if (all == r.n) {
    product1(&r, (const int8_t*)x->data, (int8_t*)y->data);
    return;
  }
  const int8_t* from[2];
  int8_t* to[2];
  for (trv_dim row = 0, rows = all / r.n; row < rows; row += 2) {
    for (trv_dim i = 0; i < 2; i++) {
      const trv_dim at = row + i < rows ? row + i : row; /* a last one twice, at the same place */
      from[i] = (const int8_t*)x->data + trvk_offset(last, y->dim, x->stride, at);
      to[i] = (int8_t*)y->data + trvk_offset(last, y->dim, y->stride, at);
    }
    trvk_mcu_product__mve(&r, from, to);
  }
}
#endif
