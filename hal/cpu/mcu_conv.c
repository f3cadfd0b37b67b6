/* mcu_conv.c - convolution of stored i8 with weights by rows (mcu.h). */
/* clang-format off: its macros rename what the others declare */
#include "variant.h"
/* clang-format on */
#include "mcu_geometry.h"

#ifndef TRVK_VARIANT
/* Bytes of scratch: four inputs (or two with 16 bits a number), and one to gather; or a row of
 * zeros of a depthwise one. */
static uint64_t scratch(uint64_t taps, uint64_t cg, uint64_t groups, uint64_t channels) {
  if (groups > 1 && cg == 1) return (channels + 3) / 4 * 4;
  return (taps * cg + 3) / 4 * 4 * 5;
}

size_t trvk_mcu_conv_tmp_bytes(const void* attrs, int64_t channels) {
  const trvf_qconv_attrs* a = attrs;
  uint64_t taps = 1;
  for (int i = 0; i < 3 && i < a->nd; i++) taps *= a->kernel[i];
  if (channels < 1 || channels > INT32_MAX / 8 || a->groups < 1 || taps > INT32_MAX) return 0;
  const uint64_t cg = (uint64_t)channels / a->groups;
  return cg > INT32_MAX / 8 / (taps + 1) ? 0
                                         : (size_t)scratch(taps, cg, a->groups, (uint64_t)channels);
}

const char* trvk_mcu_conv_check(const trvk_call* call, int64_t* expected, int64_t* got) {
  const trvf_qconv_attrs* a = call->attrs;
  const trv_tensor *x = &call->in[0], *w = &call->in[1], *y = &call->out[0];
  const trv_dim most = PTRDIFF_MAX / 64;
  geometry g;
  if (x->dtype != TRV_DTYPE_I8 || y->dtype != TRV_DTYPE_I8 || a->nd < 1 || a->nd > 3 ||
      x->rank != a->nd + 2u || y->rank != a->nd + 2u || a->transposed)
    return trvk_fail(TRVK_SAY("qconv: weights by rows need i8 of matching ranks"), a->nd + 2,
                     x->rank, expected, got);
  const char* what = trvk_out_check(y, expected, got); /* first: what follows multiplies its dims */
  if (what) return what;
  if (a->groups < 1 || a->groups > (uint32_t)INT32_MAX || x->dim[0] != y->dim[0] || x->dim[1] < 1 ||
      x->dim[1] % (trv_dim)a->groups != 0 || y->dim[1] < 1 || y->dim[1] % (trv_dim)a->groups != 0 ||
      x->dim[1] > most || y->dim[1] > most)
    return trvk_fail(TRVK_SAY("qconv: channels are not a multiple of groups"), a->groups, x->dim[1],
                     expected, got);
  trv_dim k = x->dim[1] / (trv_dim)a->groups, taps = 1;
  for (int i = 0; i < a->nd; i++) {
    const trv_dim in = x->dim[2 + i], out = y->dim[2 + i];
    if (a->kernel[i] < 1 || a->stride[i] < 1 || a->dilation[i] < 1)
      return trvk_fail(TRVK_SAY("qconv: kernel, stride and dilation start at 1"), 1, 0, expected,
                       got);
    if (in > most || out > most / a->stride[i] || (trv_dim)a->kernel[i] > most / a->dilation[i] ||
        taps > most / a->kernel[i])
      return TRVK_SAY("qconv: sizes overflow");
    taps *= a->kernel[i];
  }
  if (taps > most / 8 / (k + 4)) return TRVK_SAY("qconv: sizes overflow");
  make_axes(call, &g);
  const int dw = depthwise(&g);
  if (dw && (taps > TRVK_MCU_TAPS || (g.xs[1] != 1 && g.cin > 1)))
    return trvk_fail(TRVK_SAY("qconv: a depthwise weight by rows: taps, or channels apart"),
                     TRVK_MCU_TAPS, taps, expected, got);
  const trv_dim rows = dw ? taps : g.cout, row = dw ? (g.cout + 3) / 4 * 4 : g.k4;
  if (rows > most / row || (w->dtype != TRV_DTYPE_I8 && w->dtype != TRV_DTYPE_U8) || w->rank != 1 ||
      w->dim[0] != rows * row || (w->stride[0] != 1 && w->dim[0] > 1))
    return trvk_fail(TRVK_SAY("qconv: size of the weight by rows"), row, w->rank ? w->dim[0] : 1,
                     expected, got);
  const uint64_t bytes =
      scratch((uint64_t)taps, (uint64_t)g.cg, (uint64_t)g.groups, (uint64_t)g.cin);
  if (!trvk_mcu_scratch_ok(call, bytes))
    return trvk_fail(TRVK_SAY("qconv: the scratch is too small"), (int64_t)bytes,
                     call->n_tmp ? call->tmp[0].dim[0] : 0, expected, got);
  return trvk_mcu_check_out(call, g.cout, a->x_zero, a->y_zero, a->lo, a->hi, expected, got);
}
#endif

/* A place in the output, pixel by pixel. */
typedef struct place {
  trv_dim n, d, h, w;
} place;

static void step(const geometry* g, place* p) {
  if (++p->w < g->out[2]) return;
  p->w = 0;
  if (++p->h < g->out[1]) return;
  p->h = 0;
  if (++p->d < g->out[0]) return;
  p->d = 0;
  p->n++;
}

/* Copies the inputs of one pixel and group to k numbers in a row. x: the group's first channel. */
static void gather(const geometry* g, const place* p, const int8_t* x, int32_t zero, int8_t* to) {
  const trv_dim cg = g->cg, line = g->kernel[2] * cg, dw = g->dilation[2];
  const int dense = g->xs[1] == 1 || cg == 1;
  const trv_dim w0 = p->w * g->stride[2] - g->pad[2];
  trv_dim lo = 0, hi = 0; /* taps inside of a line that lies together */
  const int together = dense && dw == 1 && g->xs[4] == cg;
  if (together) {
    lo = w0 < 0 ? -w0 : 0;
    hi = w0 + g->kernel[2] > g->in[2] ? g->in[2] - w0 : g->kernel[2];
    if (hi < lo || lo > g->kernel[2]) lo = hi = 0;
  }
  for (trv_dim i = 0; i < g->kernel[0]; i++)
    for (trv_dim j = 0; j < g->kernel[1]; j++, to += line) {
      const trv_dim d = p->d * g->stride[0] - g->pad[0] + i * g->dilation[0],
                    h = p->h * g->stride[1] - g->pad[1] + j * g->dilation[1];
      if (!inside(d, g->in[0]) || !inside(h, g->in[1])) {
        memset(to, zero, (size_t)line);
        continue;
      }
      const int8_t* from = x + d * g->xs[2] + h * g->xs[3] + w0 * g->xs[4];
      if (together) {
        if (hi - lo < g->kernel[2]) memset(to, zero, (size_t)line);
        memcpy(to + lo * cg, from + lo * cg, (size_t)((hi - lo) * cg));
        continue;
      }
      int8_t* at = to;
      for (trv_dim t = 0; t < g->kernel[2]; t++, at += cg, from += dw * g->xs[4]) {
        if (!inside(w0 + t * dw, g->in[2]))
          memset(at, zero, (size_t)cg);
        else if (dense)
          memcpy(at, from, (size_t)cg);
        else
          for (trv_dim c = 0; c < cg; c++) at[c] = from[c * g->xs[1]];
      }
    }
}

/* All pixels of one group. */
static void product(const trvk_call* call, const geometry* g, trv_dim group) {
  const trvf_qconv_attrs* a = call->attrs;
  const int8_t* x = (const int8_t*)call->in[0].data + group * g->cg * g->xs[1];
  int8_t* y = (int8_t*)call->out[0].data + group * g->og * g->ys[1];
  int8_t* const room = (int8_t*)call->tmp[0].data;
  const int direct =
      g->taps == 1 && g->pad[0] + g->pad[1] + g->pad[2] == 0 && (g->xs[1] == 1 || g->cg == 1);
  const trv_dim first = group * g->og;
  trvk_mcu_rows r = {.w = (const int8_t*)call->in[1].data + first * g->k4,
                     .k = g->k,
                     .k4 = g->k4,
                     .n = g->og,
                     .y_step = g->ys[1],
                     .expanded = (int16_t*)(void*)room};
  trvk_mcu_make_out(call, a->y_zero, a->lo, a->hi, &r.out);
  r.out.bias += first;
  r.out.m += first;
  r.out.s += first;
  const int8_t* from[TRVK_MCU_BLOCK];
  int8_t* to[TRVK_MCU_BLOCK];
  place p = {0, 0, 0, 0};
  trv_dim left = g->n * g->out[0] * g->out[1] * g->out[2];
  int8_t* const gathered = TRVK_PAIRS ? room + 4 * g->k4 : room;
  while (left > 0) {
    const trv_dim count = left < TRVK_MCU_BLOCK ? left : TRVK_MCU_BLOCK;
    for (trv_dim i = 0; i < count; i++, step(g, &p)) {
      const int8_t* image = x + p.n * g->xs[0];
      to[i] = y + p.n * g->ys[0] + p.d * g->ys[2] + p.h * g->ys[3] + p.w * g->ys[4];
      if (direct) {
        from[i] = image + p.d * g->stride[0] * g->xs[2] + p.h * g->stride[1] * g->xs[3] +
                  p.w * g->stride[2] * g->xs[4];
      } else {
        int8_t* row = TRVK_PAIRS ? gathered : gathered + i * g->k4;
        gather(g, &p, image, a->x_zero, row);
        from[i] = row;
      }
#if TRVK_PAIRS
      if (count == 2) TRVK_KERNEL(mcu_expand)(&r, from[i], (int)i);
#endif
    }
    TRVK_KERNEL(mcu_product)(&r, from, to, count);
    left -= count;
  }
}

/* ---- depthwise: a multiple of channels in, each with og results ---- */

/* One pixel, all channels; og is 1. */
static void channels(const geometry* g, const trvk_mcu_out* o, const int8_t* w,
                     const int8_t* const* x, int8_t* y) {
  const trv_dim row = (g->cout + 3) / 4 * 4, y_step = g->ys[1], taps = g->taps, cout = g->cout;
  const int32_t *m = o->m, *s = o->s, *bias = o->bias;
  trv_dim c = 0;
  for (; c + 4 <= cout; c += 4, w += 4, bias += 4, m += 4, s += 4) {
    int32_t s0 = bias[0], s1 = bias[1], s2 = bias[2], s3 = bias[3];
    const int8_t* const* tap = x;
    const int8_t* u = w;
    trv_dim t = taps;
    do {
      const int8_t* const v = *tap++ + c;
#if TRVK_PAIRS
      const int32_t p = trvk_mcu_word(v), q = trvk_mcu_word(u);
      const int32_t pe = trvk_mcu_even(p), po = trvk_mcu_odd(p), qe = trvk_mcu_even(q),
                    qo = trvk_mcu_odd(q);
      s0 = __smlabb(pe, qe, s0);
      s1 = __smlabb(po, qo, s1);
      s2 = __smlatt(pe, qe, s2);
      s3 = __smlatt(po, qo, s3);
#else
      s0 = trvk_add32(s0, v[0] * u[0]);
      s1 = trvk_add32(s1, v[1] * u[1]);
      s2 = trvk_add32(s2, v[2] * u[2]);
      s3 = trvk_add32(s3, v[3] * u[3]);
#endif
      u += row;
    } while (--t != 0);
    trvk_mcu_four(o, m, s, 1, 2, 3, &s0, &s1, &s2, &s3);
    y[0] = (int8_t)s0;
    y += y_step;
    y[0] = (int8_t)s1;
    y += y_step;
    y[0] = (int8_t)s2;
    y += y_step;
    y[0] = (int8_t)s3;
    y += y_step;
  }
  for (; c < cout; c++, w++, y += y_step) {
    int32_t sum = o->bias[c];
    for (trv_dim t = 0; t < taps; t++) sum = trvk_add32(sum, x[t][c] * w[t * row]);
    *y = (int8_t)trvk_mcu_result(o, sum, o->m[c], o->s[c]);
  }
}

/* One pixel where channels have several results each. */
static void multiplied(const geometry* g, const trvk_mcu_out* o, const int8_t* w,
                       const int8_t* const* x, int8_t* y) {
  const trv_dim row = (g->cout + 3) / 4 * 4;
  for (trv_dim c = 0, j = 0; c < g->cin; c++)
    for (trv_dim i = 0; i < g->og; i++, j++) {
      int32_t sum = o->bias[j];
      for (trv_dim t = 0; t < g->taps; t++) sum = trvk_add32(sum, x[t][c] * w[t * row + j]);
      y[j * g->ys[1]] = (int8_t)trvk_mcu_result(o, sum, o->m[j], o->s[j]);
    }
}

/* Where the taps of one pixel read; those outside read the border. */
static void point(const geometry* g, const place* p, const int8_t* x, const int8_t* border,
                  const int8_t** tap) {
  const trv_dim w0 = p->w * g->stride[2] - g->pad[2];
  x += p->n * g->xs[0];
  for (trv_dim i = 0; i < g->kernel[0]; i++)
    for (trv_dim j = 0; j < g->kernel[1]; j++) {
      const trv_dim d = p->d * g->stride[0] - g->pad[0] + i * g->dilation[0],
                    h = p->h * g->stride[1] - g->pad[1] + j * g->dilation[1];
      const int row = inside(d, g->in[0]) && inside(h, g->in[1]);
      const trv_dim line = d * g->xs[2] + h * g->xs[3];
      for (trv_dim t = 0, v = w0; t < g->kernel[2]; t++, v += g->dilation[2])
        *tap++ = row && inside(v, g->in[2]) ? x + line + v * g->xs[4] : border;
    }
}

static void depthwise_pixels(const trvk_call* call, const geometry* g) {
  const trvf_qconv_attrs* a = call->attrs;
  const int8_t *x = (const int8_t*)call->in[0].data, *w = (const int8_t*)call->in[1].data;
  int8_t* const border = (int8_t*)call->tmp[0].data;
  int8_t* y = (int8_t*)call->out[0].data;
  const int8_t* taps[TRVK_MCU_TAPS];
  trvk_mcu_out out;
  trvk_mcu_make_out(call, a->y_zero, a->lo, a->hi, &out);
  memset(border, a->x_zero, (size_t)g->cin);
  place p = {0, 0, 0, 0};
  const trv_dim move = g->stride[2] * g->xs[4];
  /* pixels of a row whose taps along w are all inside: only there taps move together */
  const trv_dim first = (g->pad[2] + g->stride[2] - 1) / g->stride[2],
                reach = g->in[2] + g->pad[2] - (g->kernel[2] - 1) * g->dilation[2];
  for (trv_dim left = g->n * g->out[0] * g->out[1] * g->out[2]; left > 0; left--) {
    if (p.w > first && p.w * g->stride[2] < reach) {
      for (trv_dim t = 0; t < g->taps; t++)
        if (taps[t] != border) taps[t] += move;
    } else {
      point(g, &p, x, border, taps);
    }
    int8_t* to = y + p.n * g->ys[0] + p.d * g->ys[2] + p.h * g->ys[3] + p.w * g->ys[4];
    (g->og == 1 ? channels : multiplied)(g, &out, w, taps, to);
    step(g, &p);
  }
}

void TRVK_KERNEL(qconv_rows)(const trvk_call* call, uint32_t tile) {
  geometry g;
  if (tile > 0 || trvk_count(&call->out[0]) == 0) return; /* one tile: the scratch is shared */
  make_axes(call, &g);
  if (depthwise(&g)) {
    depthwise_pixels(call, &g);
  } else {
    for (trv_dim i = 0; i < g.groups; i++) product(call, &g, i);
  }
}
