/* conv_line.c - convolution of few channels into many: the first layers of nets for images.
 *
 * A row of outputs (or a part of it) at a time: the input rows that it meets are copied side by
 * side, with zeros for the border, and then read by tiles of neighbouring pixels. K is the whole
 * window, so that sums stay in registers. Inputs lie in planes, or with all channels innermost.
 * Halves become floats as rows are copied and as a strip of weights comes up.
 */
#include "conv.h"

#if TRVK_WINO
#define FLOATS TRVK_GATHER
#define PIECES 32

typedef struct state {
  const trvk_conv_geo* g;
  const trvk_epi* epi;
  const trvk_gemm* gemm;
  const uint8_t *x, *w;
  uint32_t dtype;
  int planes;
  trv_dim pieces, kc, step; /* rows of the kernel (of each channel, in planes); their floats; from
                               pixel to pixel */
  trv_dim length;           /* floats of a copied row */
  const float* b[PIECES];
  float copy[FLOATS], wide[FLOATS + TRVK_PANEL];
} state;

/* Copies the input rows of outputs w0 .. of row d, h of image n. */
static void copy_rows(state* s, trv_dim n, trv_dim d, trv_dim h, trv_dim w0, trv_dim count) {
  const trvk_conv_geo* g = s->g;
  const trv_dim unit = s->planes ? 1 : g->cg, first = w0 * g->stride[2] - g->pad[2];
  const trv_dim columns = (count - 1) * g->stride[2] + g->kernel[2];
  /* Columns c0 .. c1 of the copy lie inside. */
  trv_dim c0 = first < 0 ? -first : 0, c1 = g->in[2] - first;
  if (c0 > columns) c0 = columns;
  if (c1 > columns) c1 = columns;
  if (c1 < c0) c1 = c0;
  for (trv_dim p = 0; p < s->pieces; p++) {
    const trv_dim k = s->planes ? p / g->cg : p, c = s->planes ? p % g->cg : 0;
    const trv_dim id = d * g->stride[0] - g->pad[0] + k / g->kernel[1] * g->dilation[0];
    const trv_dim ih = h * g->stride[1] - g->pad[1] + k % g->kernel[1] * g->dilation[1];
    float* to = s->copy + p * s->length;
    if (id < 0 || id >= g->in[0] || ih < 0 || ih >= g->in[1] || c0 == c1) {
      memset(to, 0, (size_t)s->length * sizeof *to);
      continue;
    }
    const uint8_t* from = trvk_at(
        s->x, s->dtype,
        n * g->xs[0] + c * g->xs[1] + id * g->xs[2] + ih * g->xs[3] + (first + c0) * g->xs[4]);
    for (trv_dim i = 0; i < c0 * unit; i++) to[i] = 0.0f;
    if (s->dtype == TRV_DTYPE_F32)
      memcpy(to + c0 * unit, from, (size_t)((c1 - c0) * unit) * sizeof *to);
    else
      s->gemm->widen(to + c0 * unit, (const uint16_t*)(const void*)from, s->dtype,
                     (c1 - c0) * unit);
    for (trv_dim i = c1 * unit; i < s->length; i++) to[i] = 0.0f;
  }
}

/* The weights of a strip. */
static void set_weights(state* s, trv_dim col, trv_dim panels) {
  const trvk_conv_geo* g = s->g;
  const trv_dim cg = trvk_packed_k(s->dtype, g->cg), each = g->taps * g->cg * TRVK_PANEL;
  const float* w = s->wide;
  if (s->dtype == TRV_DTYPE_F32) {
    w = (const float*)(const void*)s->w + col * g->taps * g->cg;
  } else if (s->dtype == TRV_DTYPE_F16) {
    for (trv_dim p = 0; p < panels; p++)
      s->gemm->widen(s->wide + p * each,
                     (const uint16_t*)(const void*)s->w + col * g->taps * g->cg + p * each,
                     s->dtype, each);
  } else { /* a channel of zeros behind an odd number is overwritten by the next tap */
    for (trv_dim t = 0; t < panels * g->taps; t++)
      s->gemm->widen_pairs(s->wide + t * g->cg * TRVK_PANEL,
                           trvk_at(s->w, s->dtype, (col * g->taps + t * TRVK_PANEL) * cg), cg / 2);
  }
  for (trv_dim p = 0; p < s->pieces; p++) {
    const trv_dim row = s->planes ? p / g->cg * g->kernel[2] * g->cg + p % g->cg : p * s->kc;
    s->b[p] = w + row * TRVK_PANEL;
  }
}

/* One strip of channels of the row's outputs; y: offset of the first. */
static void strip(const state* s, trv_dim col, trv_dim n, trv_dim count, const float* bias,
                  trv_dim y_at) {
  const trvk_conv_geo* g = s->g;
  const trvk_epi* e = s->epi;
  const int half = s->dtype != TRV_DTYPE_F32;
  const int np = n > TRVK_PANEL ? 2 : 1, direct = n == np * TRVK_PANEL && !half;
  float* const y = (float*)(void*)e->out + (half ? 0 : y_at);
  const trv_dim wide = s->gemm->line_pixels;
  float acc[TRVK_LINE_MAX * TRVK_STRIP];
  trvk_line t;
  t.b = s->b;
  t.b_off = 0;
  t.x_piece = s->length;
  t.pieces = s->pieces;
  t.kc = s->kc;
  t.step = s->step;
  t.bk = TRVK_PANEL * (s->planes ? g->cg : 1);
  t.bp = g->taps * g->cg * TRVK_PANEL;
  t.bias = bias;
  t.lo = trvk_epi_lo(e);
  t.hi = trvk_epi_hi(e);
  for (trv_dim from = 0; from < count; from += wide) {
    if (from + wide > count) from = count - wide; /* some outputs once more */
    t.x = s->copy + from * s->step;
    t.y = direct ? y + from * g->ys[4] + col : acc;
    t.y_step = direct ? g->ys[4] : np * TRVK_PANEL;
    s->gemm->line[np - 1](&t);
    if (direct) continue;
    for (trv_dim i = 0; i < (half ? wide : 0); i++) {
      const trvk_row row = {y_at + (from + i) * g->ys[4], 0, 0};
      trvk_epi_row(e, &row, col, acc + i * np * TRVK_PANEL, n);
    }
    for (trv_dim i = 0; i < (half ? 0 : wide); i++)
      trvk_floats_copy(y + (from + i) * g->ys[4] + col, acc + i * np * TRVK_PANEL, n);
  }
}

/* Steps from pixel to pixel that there are tiles for. */
static trv_dim step_of(const trvk_conv_geo* g, int* planes) {
  const int last = g->xs[1] == 1 && g->xs[4] == g->cg;
  *planes = !last || g->cg == 1;
  if (!last && g->xs[4] != 1) return 0;
  return g->stride[2] * (last ? g->cg : 1);
}

static trv_dim pieces_of(const trvk_conv_geo* g, int planes) {
  return g->kernel[0] * g->kernel[1] * (planes ? g->cg : 1);
}

/* Parts of a row of outputs that fit the copy, of nearly equal size; 0: parts would be smaller than
 * a tile. */
static trv_dim parts_of(const trvk_conv_geo* g, trv_dim pieces, trv_dim kc, trv_dim step,
                        trv_dim tile) {
  const trv_dim room = FLOATS / pieces - kc;
  if (room < 0) return 0;
  const trv_dim most = room / step + 1, parts = (g->out[2] + most - 1) / most;
  return g->out[2] / parts < tile ? 0 : parts;
}

int trvk_conv_line_fits(const trvk_call* call, const trvk_conv_geo* g, const trvk_gemm* gemm) {
  const trvf_conv_attrs* a = call->attrs;
  int planes;
  const trv_dim step = step_of(g, &planes);
  if (!a->packed || g->groups != 1 || g->transposed || call->in[0].dtype == TRV_DTYPE_F64 ||
      trvk_opt(call, 3) || (g->cout > 1 && g->ys[1] != 1) || g->dilation[2] != 1 ||
      (step != 1 && step != 2 && step != 3 && step != 6))
    return 0;
  if (call->in[0].dtype != TRV_DTYPE_F32 && g->taps * g->cg * gemm->np * TRVK_PANEL > FLOATS)
    return 0;
  return g->taps > 1 && g->cg <= 8 && g->kernel[0] <= PIECES && g->kernel[1] <= PIECES &&
         g->kernel[2] <= 64 && pieces_of(g, planes) <= PIECES &&
         parts_of(g, pieces_of(g, planes), g->kernel[2] * (planes ? 1 : g->cg), step,
                  gemm->line_pixels) > 0;
}

void trvk_conv_line_run(const trvk_call* call, const trvk_conv_geo* g, uint32_t tile,
                        const trvk_gemm* gemm) {
  const trv_tensor* bias = trvk_opt(call, 2);
  trvk_epi epi;
  state s;
  trvk_conv_epi(call, g, &epi, gemm);
  s.g = g;
  s.epi = &epi;
  s.gemm = gemm;
  s.x = call->in[0].data;
  s.w = call->in[1].data;
  s.dtype = call->in[0].dtype;
  s.step = step_of(g, &s.planes);
  s.pieces = pieces_of(g, s.planes);
  s.kc = g->kernel[2] * (s.planes ? 1 : g->cg);
  const trv_dim parts = parts_of(g, s.pieces, s.kc, s.step, gemm->line_pixels);
  trv_dim begin, end;
  trvk_split(g->n * g->out[0] * g->out[1] * parts, call->tiles, tile, &begin, &end);
  for (trv_dim u = begin; u < end; u++) {
    const trv_dim h = u / parts % g->out[1], d = u / parts / g->out[1] % g->out[0],
                  n = u / parts / g->out[1] / g->out[0];
    trv_dim w0, w1;
    trvk_split(g->out[2], (uint32_t)parts, (uint32_t)(u % parts), &w0, &w1);
    s.length = (w1 - w0 - 1) * s.step + s.kc;
    copy_rows(&s, n, d, h, w0, w1 - w0);
    const trv_dim at = n * g->ys[0] + d * g->ys[2] + h * g->ys[3] + w0 * g->ys[4];
    for (trv_dim col = 0; col < g->og; col += (trv_dim)gemm->np * TRVK_PANEL) {
      const trv_dim width = (trv_dim)gemm->np * TRVK_PANEL,
                    m = g->og - col < width ? g->og - col : width;
      float buffer[TRVK_STRIP] = {0};
      if (bias)
        trvk_row_load(buffer, trvk_at(bias->data, s.dtype, col * g->bias_step), s.dtype,
                      g->bias_step, m);
      set_weights(&s, col, trvk_panels(m));
      strip(&s, col, m, w1 - w0, bias ? buffer : NULL, at);
    }
    if (!trvk_epi_heavy(&epi) || s.dtype != TRV_DTYPE_F32) continue;
    float* const y = (float*)(void*)epi.out + at;
    const trv_dim pixels = g->ys[4] == g->og ? 1 : w1 - w0; /* side by side: all at once */
    for (trv_dim i = 0; i < pixels; i++)
      gemm->act(y + i * g->ys[4], pixels == 1 ? (w1 - w0) * g->og : g->og, epi.act, epi.lo, epi.hi);
  }
}
#endif
