/* conv_depthwise.c - depthwise convolution with channels innermost and a packed weight. Units: rows
 * of outputs x blocks of channels, so that a block's weights stay in the first cache. Halves are
 * widened: a block's weights once, the input rows of a run of outputs at a time. */
#include "conv.h"

#define BLOCK 128                     /* channels of a unit */
#define HALF_BLOCK 32                 /* of halves */
#define SUMS (TRVK_ROWS * TRVK_STRIP) /* of outputs, on the stack */
#define WEIGHTS (TRVK_GATHER / 4)     /* of a block of halves */

typedef struct span {
  const trvk_conv_geo* g;
  const trvk_epi* epi;
  trvk_dw dw;
  const float* x[TRVK_DW_ROWS]; /* kernel rows at column 0, channel 0 of the block; NULL: outside */
  const uint8_t* halves[TRVK_DW_ROWS]; /* the same of halves */
  trvk_row row;                        /* the row's first output */
  trv_dim channel;
} span;

/* The input of outputs o .. o + count of a row of halves, as floats. */
static void widen(span* s, trv_dim o, trv_dim count, float* to) {
  const trvk_conv_geo* g = s->g;
  trvk_dw* d = &s->dw;
  const trv_dim first = o * g->stride[2] - g->pad[2];
  trv_dim from = first, end = first + (count - 1) * g->stride[2] + (d->kw - 1) * g->dilation[2] + 1;
  if (from < 0) from = 0;
  if (end > g->in[2]) end = g->in[2];
  d->in = end > from ? end - from : 0;
  d->at = first - from;
  d->x_column = d->channels;
  for (trv_dim k = 0; k < d->kh; k++) {
    s->x[k] = s->halves[k] && d->in > 0 ? to : NULL;
    for (trv_dim i = 0; i < (s->x[k] ? d->in : 0); i++, to += d->channels)
      s->epi->g->widen(
          to,
          (const uint16_t*)(const void*)trvk_at(s->halves[k], s->epi->dtype, (from + i) * g->xs[4]),
          s->epi->dtype, d->channels);
  }
}

/* Outputs of a row whose input fits TRVK_GATHER floats; 0: not one does. */
static trv_dim half_outputs(const trvk_conv_geo* g, trv_dim channels) {
  const trv_dim columns = TRVK_GATHER / (g->kernel[0] * g->kernel[1] * channels),
                window = (g->kernel[2] - 1) * g->dilation[2] + 1;
  return columns < window ? 0 : (columns - window) / g->stride[2] + 1;
}

int trvk_conv_dw_halves(const trvk_conv_geo* g) {
  return g->taps <= WEIGHTS / HALF_BLOCK && half_outputs(g, HALF_BLOCK) > 0;
}

/* The row of outputs. */
static void run(span* s) {
  const trvk_conv_geo* g = s->g;
  const trvk_epi* e = s->epi;
  trvk_dw* d = &s->dw;
  const trv_dim n = g->out[2];
  d->at = -g->pad[2];
  if (!e->post && e->res == NULL) {
    d->y = (float*)(void*)e->out + s->row.out + s->channel;
    d->y_step = g->ys[4];
    d->count = n;
    e->g->dw(d);
    if (!trvk_epi_heavy(e)) return;
    if (d->channels == g->ys[4]) /* pixels side by side */
      e->g->act(d->y, n * d->channels, e->act, e->lo, e->hi);
    else
      for (trv_dim i = 0; i < n; i++)
        e->g->act(d->y + i * g->ys[4], d->channels, e->act, e->lo, e->hi);
    return;
  }
  float acc[SUMS], copy[TRVK_GATHER];
  const int half = e->dtype != TRV_DTYPE_F32;
  trv_dim most = SUMS / d->channels;
  if (half && half_outputs(g, d->channels) < most) most = half_outputs(g, d->channels);
  d->y = acc;
  d->y_step = d->channels;
  for (trv_dim o = 0; o < n; o += most) {
    d->count = n - o < most ? n - o : most;
    d->at = o * g->stride[2] - g->pad[2];
    if (half) widen(s, o, d->count, copy);
    e->g->dw(d);
    for (trv_dim i = 0; i < d->count; i++) {
      const trvk_row r = {s->row.out + (o + i) * g->ys[4], s->row.res + (o + i) * g->rs[4], 0};
      trvk_epi_row(e, &r, s->channel, acc + i * d->channels, d->channels);
    }
  }
}

/* Channels of a unit: nearly `most`, so that the last one is no narrower than a vector. */
static trv_dim block_of(trv_dim channels, trv_dim most) {
  for (trv_dim n = most; n > most / 2; n -= TRVK_PANEL)
    if (channels % n == 0 || channels % n >= TRVK_PANEL) return n;
  return most;
}

void trvk_conv_depthwise_run(const trvk_call* call, const trvk_conv_geo* g, uint32_t tile,
                             const trvk_gemm* gemm) {
  const trv_tensor* bias = trvk_opt(call, 2);
  const uint32_t dtype = call->in[0].dtype;
  const int half = dtype != TRV_DTYPE_F32;
  const uint8_t *x = call->in[0].data, *w = call->in[1].data;
  const trv_dim width = block_of(g->cout, half ? HALF_BLOCK : BLOCK),
                blocks = (g->cout + width - 1) / width;
  float weights[WEIGHTS];
  trv_dim widened = -1;
  trvk_epi epi;
  trvk_conv_epi(call, g, &epi, gemm);
  span sp;
  sp.g = g;
  sp.epi = &epi;
  sp.dw.kh = g->kernel[0] * g->kernel[1];
  sp.dw.kw = g->kernel[2];
  const trv_dim wide = trvk_round16(g->cout);
  sp.dw.wc = half ? width : wide;
  sp.dw.w_row = sp.dw.kw * sp.dw.wc;
  sp.dw.in = g->in[2];
  sp.dw.stride = g->stride[2];
  sp.dw.dilation = g->dilation[2];
  sp.dw.x_column = g->xs[4];
  sp.dw.x = sp.x;
  sp.dw.lo = epi.res ? -INFINITY : trvk_epi_lo(&epi);
  sp.dw.hi = epi.res ? INFINITY : trvk_epi_hi(&epi);
  trv_dim begin, end;
  trvk_split(g->n * g->out[0] * g->out[1] * blocks, call->tiles, tile, &begin, &end);
  for (trv_dim u = begin; u < end; u++) {
    const trv_dim block = u % blocks, h = u / blocks % g->out[1],
                  d = u / blocks / g->out[1] % g->out[0];
    const trv_dim n = u / blocks / g->out[1] / g->out[0];
    float buffer[BLOCK];
    sp.channel = block * width;
    sp.dw.channels = g->cout - sp.channel < width ? g->cout - sp.channel : width;
    sp.row.out = n * g->ys[0] + d * g->ys[2] + h * g->ys[3];
    sp.row.res = n * g->rs[0] + d * g->rs[2] + h * g->rs[3];
    sp.row.bias2 = 0;
    for (trv_dim i = 0; i < sp.dw.kh; i++) {
      const trv_dim id = d * g->stride[0] - g->pad[0] + i / g->kernel[1] * g->dilation[0];
      const trv_dim ih = h * g->stride[1] - g->pad[1] + i % g->kernel[1] * g->dilation[1];
      const uint8_t* row =
          id < 0 || id >= g->in[0] || ih < 0 || ih >= g->in[1]
              ? NULL
              : trvk_at(x, dtype, n * g->xs[0] + id * g->xs[2] + ih * g->xs[3] + sp.channel);
      sp.x[i] = (const float*)(const void*)row;
      sp.halves[i] = row;
    }
    sp.dw.bias = NULL;
    if (bias && g->bias_step == 1 && !half) {
      sp.dw.bias = (const float*)(const void*)bias->data + sp.channel;
    } else if (bias) {
      trvk_row_load(buffer, trvk_at(bias->data, dtype, sp.channel * g->bias_step), dtype,
                    g->bias_step, sp.dw.channels);
      sp.dw.bias = buffer;
    }
    sp.dw.w = (const float*)(const void*)w + sp.channel;
    if (half) {
      for (trv_dim t = 0; t < g->taps && block != widened; t++)
        gemm->widen(weights + t * width, (const uint16_t*)(const void*)w + t * wide + sp.channel,
                    dtype, sp.dw.channels);
      widened = block;
      sp.dw.w = weights;
    }
    run(&sp);
  }
}
