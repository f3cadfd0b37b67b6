/* mcu_mve_conv.c - convolution of stored i8 with weights by rows, with Helium. */
#include "kernel.h"

#if TRVK_M_MVE
#include "mcu_geometry.h"
#include "mcu_mve.h"

/* rows copies of n bytes. */
static void copy_rows(int8_t* to, trv_dim to_step, const int8_t* from, trv_dim from_step, trv_dim n,
                      trv_dim rows) {
  if (n <= 16)
    __asm__ volatile(
        "vctp.8 %[n]\n"
        "wls lr, %[rows], 2f\n"
        "1: vpstt\n"
        "vldrbt.8 q0, [%[from]]\n"
        "vstrbt.8 q0, [%[to]]\n"
        "add %[from], %[from], %[from_step]\n"
        "add %[to], %[to], %[to_step]\n"
        "le lr, 1b\n"
        "2:\n"
        : [to] "+r"(to), [from] "+r"(from)
        : [n] "r"(n), [rows] "r"(rows), [to_step] "r"(to_step), [from_step] "r"(from_step)
        : "lr", "q0", "memory");
  else
    for (; rows > 0; rows--, to += to_step, from += from_step) copy_bytes(to, from, n);
}

/* Where the numbers of a line of taps lie, from its first, for channels that lie apart. */
enum { LINE = 32 };
typedef struct line_offsets {
  int usable;
  uint16_t at[LINE];
} line_offsets;

static void find_offsets(const geometry* g, line_offsets* o) {
  const trv_dim next = g->dilation[2] * g->xs[4], apart = g->xs[1], n = g->kernel[2] * g->cg;
  o->usable = n <= LINE && next >= 0 && apart >= 0 && next <= UINT16_MAX && apart <= UINT16_MAX &&
              (g->kernel[2] - 1) * next + (g->cg - 1) * apart <= UINT16_MAX;
  if (!o->usable) return;
  for (trv_dim t = 0; t < g->kernel[2]; t++)
    for (trv_dim c = 0; c < g->cg; c++) o->at[t * g->cg + c] = (uint16_t)(t * next + c * apart);
}

/* to[i] = from[at[i]] */
TRVK_ALWAYS void pick_bytes(int8_t* to, const int8_t* from, const uint16_t* at, trv_dim n) {
  __asm__ volatile(
      "wlstp.16 lr, %[n], 2f\n"
      "1: vldrh.16 q0, [%[at]], #16\n"
      "vldrb.u16 q1, [%[from], q0]\n"
      "vstrb.16 q1, [%[to]], #8\n"
      "letp lr, 1b\n"
      "2:\n"
      : [to] "+l"(to), [at] "+r"(at)
      : [from] "r"(from), [n] "r"(n)
      : "lr", "q0", "q1", "memory");
}

/* Copies what a pixel's taps read to `to`, [taps][cg]; cells that are outside keep theirs. x: the
 * cell of the first tap of d and h that is inside, at the w of tap 0. */
static void gather(const geometry* g, const line_offsets* offsets, const int8_t* x, span d, span h,
                   span w, int8_t* to) {
  const trv_dim cg = g->cg, line = g->kernel[2] * cg, next = g->dilation[2] * g->xs[4];
  const trv_dim rows = h.to - h.from, down = g->dilation[1] * g->xs[3];
  const int dense = g->xs[1] == 1 || cg == 1;
  const int together = dense && next == cg;
  const trv_dim n = together ? (w.to - w.from) * cg : cg;
  to += (d.from * g->kernel[1] + h.from) * line + w.from * cg;
  for (trv_dim i = d.from; i < d.to; i++) {
    if (offsets->usable) { /* offsets count from tap 0 */
      for (trv_dim j = 0; j < rows; j++)
        pick_bytes(to + j * line, x + j * down, offsets->at + w.from * cg, (w.to - w.from) * cg);
    } else if (dense) {
      for (trv_dim t = w.from; t < w.to; t++) {
        copy_rows(to + (t - w.from) * cg, line, x + t * next, down, n, rows);
        if (together) break;
      }
    } else {
      for (trv_dim t = w.from; t < w.to; t++)
        for (trv_dim j = 0; j < rows; j++)
          for (trv_dim c = 0; c < cg; c++)
            to[j * line + (t - w.from) * cg + c] = x[j * down + t * next + c * g->xs[1]];
    }
    to += g->kernel[1] * line;
    x += g->dilation[0] * g->xs[2];
  }
}

/* A kernel of one tap in steps of one reads the pixels in a row, across lines that lie together. */
static void flatten(geometry* g) {
  if (g->taps != 1) return;
  for (int i = 0; i < 3; i++)
    if (g->pad[i] != 0 || g->stride[i] != 1 || g->in[i] != g->out[i]) return;
  for (int i = 1; i >= 0; i--) {
    if (g->out[i] == 1) continue;
    if (g->xs[2 + i] != g->in[2] * g->xs[4] || g->ys[2 + i] != g->out[2] * g->ys[4]) return;
    g->in[2] *= g->in[i];
    g->out[2] *= g->out[i];
    g->in[i] = g->out[i] = 1;
  }
}

/* All pixels of one group, two at a time. */
TRVK_APART static void product(const trvk_call* call, const geometry* g, trv_dim group) {
  const trvf_qconv_attrs* a = call->attrs;
  const int8_t* x = (const int8_t*)call->in[0].data + group * g->cg * g->xs[1];
  int8_t* const y = (int8_t*)call->out[0].data + group * g->og * g->ys[1];
  int8_t* const room = (int8_t*)call->tmp[0].data;
  const int direct =
      g->taps == 1 && g->pad[0] + g->pad[1] + g->pad[2] == 0 && (g->xs[1] == 1 || g->cg == 1);
  const trv_dim first = group * g->og;
  trvk_mcu_rows r = {.w = (const int8_t*)call->in[1].data + first * g->k4,
                     .k = g->k,
                     .k4 = g->k4,
                     .n = g->og,
                     .y_step = g->ys[1]};
  make_out(call, a->y_zero, a->lo, a->hi, &r.out);
  r.out.bias += first;
  r.out.m += first;
  r.out.s += first;
  line_offsets offsets = {.usable = 0};
  if (g->xs[1] != 1 && g->cg > 1) find_offsets(g, &offsets);
  const int8_t* from[2] = {room, room + g->k4};
  int8_t* to[2];
  trv_dim count = 0;
  for (trv_dim n = 0; n < g->n; n++)
    for (trv_dim i = 0; i < g->out[0]; i++)
      for (trv_dim j = 0; j < g->out[1]; j++) {
        const span d = taps_inside(g, 0, i), h = taps_inside(g, 1, j);
        const int whole = d.to - d.from == g->kernel[0] && h.to - h.from == g->kernel[1];
        const int8_t* line = x + n * g->xs[0] +
                             (i * g->stride[0] - g->pad[0] + d.from * g->dilation[0]) * g->xs[2] +
                             (j * g->stride[1] - g->pad[1] + h.from * g->dilation[1]) * g->xs[3] -
                             g->pad[2] * g->xs[4];
        int8_t* at = y + n * g->ys[0] + i * g->ys[2] + j * g->ys[3];
        const trv_dim move = g->stride[2] * g->xs[4];
        int clean = 0; /* buffers whose cells outside of d and h hold the zero point */
        for (trv_dim k = 0; k < g->out[2]; k++, line += move, at += g->ys[4]) {
          to[count] = at;
          if (direct) {
            from[count] = line;
          } else {
            int8_t* const buffer = room + count * g->k4;
            const trv_dim w0 = k * g->stride[2] - g->pad[2];
            span w = {0, g->kernel[2]};
            if (w0 < 0 || w0 + (w.to - 1) * g->dilation[2] >= g->in[2]) {
              w = taps_inside(g, 2, k);
              fill_bytes(buffer, a->x_zero, g->k);
            } else if (!whole && !(clean >> count & 1)) {
              fill_bytes(buffer, a->x_zero, g->k);
              clean |= 1 << count;
            }
            gather(g, &offsets, line, d, h, w, buffer);
          }
          if (++count == 2) {
            trvk_mcu_product__mve(&r, from, to);
            count = 0;
          }
        }
      }
  if (count > 0) { /* the last one twice, at the same place */
    from[1] = from[0];
    to[1] = to[0];
    trvk_mcu_product__mve(&r, from, to);
  }
}

void trvk_qconv_rows__mve(const trvk_call* call, uint32_t tile) {
  geometry g;
  if (tile > 0 || trvk_count(&call->out[0]) == 0) return; /* one tile: the scratch is shared */
  make_axes(call, &g);
  if (depthwise(&g)) {
    trvk_mcu_depthwise__mve(call, &g);
    return;
  }
  flatten(&g);
  for (trv_dim i = 0; i < g.groups; i++) product(call, &g, i);
}
#endif
