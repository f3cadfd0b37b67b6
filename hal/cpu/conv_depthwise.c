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

/* Outputs o .. o+n of the row, whose windows meet taps k0 .. k1 only. */
static void run(span* s, trv_dim o, trv_dim n, trv_dim k0, trv_dim k1, const float* w) {
  const trvk_conv_geo* g = s->g;
  const trv_dim column = o * g->stride[2] - g->pad[2] + k0 * g->dilation[2];
  const float* rows[TRVK_DW_ROWS];
  trvk_dw* d = &s->dw;
  float acc[POST_OUTS * BLOCK];
  for (trv_dim i = 0; i < d->kh; i++) rows[i] = s->x[i] ? s->x[i] + column * g->xs[4] : NULL;
  d->x = rows;
  d->w = w + k0 * d->wc;
  d->kw = k1 - k0;
  if (!s->epi->post) {
    d->y = (float*)(void*)s->epi->out + s->row.out + o * g->ys[4] + s->channel;
    d->y_step = g->ys[4];
    d->count = n;
    s->epi->g->dw(d);
    return;
  }
  while (n > 0) {
    const trv_dim outs = n < POST_OUTS ? n : POST_OUTS;
    d->y = acc;
    d->y_step = d->channels;
    d->count = outs;
    s->epi->g->dw(d);
    for (trv_dim i = 0; i < outs; i++) {
      const trvk_row r = {s->row.out + (o + i) * g->ys[4], s->row.res + (o + i) * g->rs[4], 0};
      trvk_epi_row(s->epi, &r, s->channel, acc + i * d->channels, d->channels);
    }
    for (trv_dim i = 0; i < d->kh; i++)
      if (rows[i]) rows[i] += outs * g->stride[2] * g->xs[4];
    o += outs;
    n -= outs;
  }
}

void trvk_conv_depthwise_run(const trvk_call* call, const trvk_conv_geo* g, uint32_t tile,
                             const trvk_gemm* gemm) {
  const trv_tensor* bias = trvk_opt(call, 2);
  const float* x = (const float*)(const void*)call->in[0].data;
  const float* w = (const float*)(const void*)call->in[1].data;
  const trv_dim blocks = (g->cout + BLOCK - 1) / BLOCK, kw = g->kernel[2], s = g->stride[2],
                dil = g->dilation[2];
  trvk_epi epi;
  trvk_conv_epi(call, g, &epi, gemm);
  span sp;
  sp.g = g;
  sp.epi = &epi;
  sp.dw.kh = g->kernel[0] * g->kernel[1];
  sp.dw.wc = trvk_round16(g->cout);
  sp.dw.w_row = kw * sp.dw.wc;
  sp.dw.x_tap = dil * g->xs[4];
  sp.dw.x_step = s * g->xs[4];
  sp.dw.lo = trvk_epi_lo(&epi);
  sp.dw.hi = trvk_epi_hi(&epi);
  /* Outputs whose whole window is inside: inner0 .. inner1. */
  const trv_dim room = g->in[2] - 1 - (kw - 1) * dil + g->pad[2];
  trv_dim inner0 = g->pad[2] > 0 ? (g->pad[2] + s - 1) / s : 0,
          inner1 = room < 0 ? 0 : room / s + 1;
  if (inner0 > g->out[2]) inner0 = g->out[2];
  if (inner1 > g->out[2]) inner1 = g->out[2];
  if (inner1 < inner0) inner1 = inner0;
  trv_dim begin, end;
  trvk_split(g->n * g->out[0] * g->out[1] * blocks, call->tiles, tile, &begin, &end);
  for (trv_dim u = begin; u < end; u++) {
    const trv_dim block = u % blocks, h = u / blocks % g->out[1],
                  d = u / blocks / g->out[1] % g->out[0];
    const trv_dim n = u / blocks / g->out[1] / g->out[0];
    float buffer[BLOCK];
    sp.channel = block * BLOCK;
    sp.dw.channels = g->cout - sp.channel < BLOCK ? g->cout - sp.channel : BLOCK;
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
    if (bias) {
      trvk_row_load(buffer, trvk_at(bias->data, TRV_DTYPE_F32, sp.channel * g->bias_step),
                    TRV_DTYPE_F32, g->bias_step, sp.dw.channels);
      sp.dw.bias = buffer;
    }
    const float* const weight = w + sp.channel;
    for (trv_dim o = 0; o < g->out[2];) {
      if (o == inner0 && inner1 > inner0) {
        run(&sp, o, inner1 - inner0, 0, kw, weight);
        o = inner1;
        continue;
      }
      const trv_dim at = o * s - g->pad[2]; /* taps k with 0 <= at + k * dil < in */
      trv_dim k0 = at < 0 ? (-at + dil - 1) / dil : 0,
              k1 = at >= g->in[2] ? 0 : (g->in[2] - 1 - at) / dil + 1;
      if (k1 > kw) k1 = kw;
      if (k1 < k0 || k0 > kw) k0 = k1 = 0;
      run(&sp, o, 1, k0, k1, weight);
      o++;
    }
  }
}
