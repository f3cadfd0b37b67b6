/* conv_depthwise.c - depthwise convolution with channels innermost and a packed weight. Units: rows
 * of outputs x blocks of channels, so that a block's weights stay in the first cache. */
#include "conv.h"

#define BLOCK 128                                  /* channels of a unit */
#define POST_OUTS (TRVK_ROWS * TRVK_STRIP / BLOCK) /* outputs whose sums fit on the stack */

typedef struct span {
  const trvk_conv_geo* g;
  const trvk_epi* epi;
  trvk_dw dw;
  const float* x[TRVK_DW_ROWS]; /* kernel rows at column 0, channel 0 of the block; NULL: outside */
  trvk_row row;                 /* the row's first output */
  trv_dim channel;
} span;

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
  float acc[POST_OUTS * BLOCK];
  d->y = acc;
  d->y_step = d->channels;
  for (trv_dim o = 0; o < n; o += POST_OUTS, d->at += POST_OUTS * g->stride[2]) {
    d->count = n - o < POST_OUTS ? n - o : POST_OUTS;
    e->g->dw(d);
    for (trv_dim i = 0; i < d->count; i++) {
      const trvk_row r = {s->row.out + (o + i) * g->ys[4], s->row.res + (o + i) * g->rs[4], 0};
      trvk_epi_row(e, &r, s->channel, acc + i * d->channels, d->channels);
    }
  }
}

/* Channels of a unit: nearly BLOCK, so that the last one is no narrower than a vector. */
static trv_dim block_of(trv_dim channels) {
  for (trv_dim n = BLOCK; n > BLOCK / 2; n -= TRVK_PANEL)
    if (channels % n == 0 || channels % n >= TRVK_PANEL) return n;
  return BLOCK;
}

void trvk_conv_depthwise_run(const trvk_call* call, const trvk_conv_geo* g, uint32_t tile,
                             const trvk_gemm* gemm) {
  const trv_tensor* bias = trvk_opt(call, 2);
  const float* x = (const float*)(const void*)call->in[0].data;
  const float* w = (const float*)(const void*)call->in[1].data;
  const trv_dim width = block_of(g->cout), blocks = (g->cout + width - 1) / width;
  trvk_epi epi;
  trvk_conv_epi(call, g, &epi, gemm);
  span sp;
  sp.g = g;
  sp.epi = &epi;
  sp.dw.kh = g->kernel[0] * g->kernel[1];
  sp.dw.kw = g->kernel[2];
  sp.dw.wc = trvk_round16(g->cout);
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
      sp.x[i] = id < 0 || id >= g->in[0] || ih < 0 || ih >= g->in[1]
                    ? NULL
                    : x + n * g->xs[0] + id * g->xs[2] + ih * g->xs[3] + sp.channel;
    }
    sp.dw.bias = NULL;
    if (bias && g->bias_step == 1) {
      sp.dw.bias = (const float*)(const void*)bias->data + sp.channel;
    } else if (bias) {
      trvk_row_load(buffer, trvk_at(bias->data, TRV_DTYPE_F32, sp.channel * g->bias_step),
                    TRV_DTYPE_F32, g->bias_step, sp.dw.channels);
      sp.dw.bias = buffer;
    }
    sp.dw.w = w + sp.channel;
    run(&sp);
  }
}
