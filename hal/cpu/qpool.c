/* qpool.c - average pooling of stored values, windowed and adaptive. Lanes as in pool.c. */
/* clang-format off: its macros rename what the others declare */
#include "variant.h"
/* clang-format on */
#include "average.h"
#include "pool.h"

#ifndef TRVK_VARIANT
const char* trvk_qpool_make(const trvk_call* call, trvk_pool* p, int64_t* cells, int64_t* expected,
                            int64_t* got) {
  const trvf_qpool_attrs* a = call->attrs;
  trvf_pool_attrs pool = {.kind = TRV_POOL_KIND_AVG,
                          .nd = a->nd,
                          .count_include_pad = a->count_include_pad,
                          .adaptive = a->adaptive,
                          .divisor = a->divisor};
  memcpy(pool.kernel, a->kernel, sizeof(pool.kernel));
  memcpy(pool.stride, a->stride, sizeof(pool.stride));
  memcpy(pool.pad, a->pad, sizeof(pool.pad));
  memcpy(pool.dilation, a->dilation, sizeof(pool.dilation));
  const char* what = trvk_pool_make(call, &pool, p, expected, got);
  if (what) return what;
  *cells = 1;
  for (int i = 0; i < 3; i++) {
    const int64_t n = !p->adaptive ? p->kernel[i] : p->out[i] > 0 ? p->in[i] / p->out[i] + 2 : 1;
    if (n > TRVK_CELLS_MAX / *cells)
      return trvk_fail(TRVK_SAY("pool: window too large"), TRVK_CELLS_MAX, n, expected, got);
    *cells *= n;
  }
  return NULL;
}

const char* trvk_qpool_check(const trvk_call* call, int64_t* expected, int64_t* got) {
  const trvf_qpool_attrs* a = call->attrs;
  const trv_tensor *x = &call->in[0], *y = &call->out[0];
  trvk_pool p = {0};
  int64_t cells;
  const char* what = trvk_average_check(x, y, a->x_zero, a->y_zero, a->multiplier, a->shift, a->lo,
                                        a->hi, expected, got);
  if (what == NULL) what = trvk_out_check(y, expected, got);
  if (what == NULL) what = trvk_qpool_make(call, &p, &cells, expected, got);
  if (what == NULL && a->divisor < 0)
    what = trvk_fail(TRVK_SAY("pool: the divisor is negative"), 0, a->divisor, expected, got);
  return what;
}

uint32_t trvk_qpool_tiles(const trvk_call* call, uint32_t workers) {
  trvk_pool p = {0};
  int64_t cells, e, g;
  const trv_dim n = trvk_count(&call->out[0]);
  if (trvk_qpool_make(call, &p, &cells, &e, &g)) return 1;
  const double work = (double)n * (double)(cells + 4) / 4;
  return trvk_tiles(work > 1e9 ? (trv_dim)1000000000 : (trv_dim)work, n, workers);
}
#endif

/* Lanes along channels: all outputs have one window. */
static void qpool_channels(const trvk_pool* p, const trvk_pool_at* at, trvk_sums* sums) {
  const trvk_span d = trvk_pool_span(p, 0, at->d), h = trvk_pool_span(p, 1, at->h),
                  w = trvk_pool_span(p, 2, at->w);
  const trv_dim first = at->n * p->xs[0] + at->c * p->xs[1];
  for (trv_dim i = 0; i < d.n; i++)
    for (trv_dim j = 0; j < h.n; j++)
      for (trv_dim k = 0; k < w.n; k++) {
        const trv_dim x = first + (d.first + i * d.step) * p->xs[2] +
                          (h.first + j * h.step) * p->xs[3] + (w.first + k * w.step) * p->xs[4];
        trvk_sums_add(sums, 0, trvk_at(p->x, p->dtype, x), p->xs[1], (uint32_t)at->lanes);
      }
}

/* Lanes along w: cells beyond the borders are left out of each tap. */
static void qpool_row(const trvk_pool* p, const trvk_pool_at* at, trvk_sums* sums) {
  const trvk_span d = trvk_pool_span(p, 0, at->d), h = trvk_pool_span(p, 1, at->h);
  const trv_dim first = at->n * p->xs[0] + at->c * p->xs[1], s = p->stride[2];
  for (trv_dim i = 0; i < d.n; i++)
    for (trv_dim j = 0; j < h.n; j++)
      for (trv_dim k = 0; k < p->kernel[2]; k++) {
        const trv_dim w = at->w * s - p->pad[2] + k * p->dilation[2];
        const trv_dim lo = w < 0 ? (-w + s - 1) / s : 0;
        trv_dim hi = w >= p->in[2] ? 0 : (p->in[2] - 1 - w) / s + 1;
        if (hi > at->lanes) hi = at->lanes;
        if (lo >= hi) continue;
        const trv_dim x = first + (d.first + i * d.step) * p->xs[2] +
                          (h.first + j * h.step) * p->xs[3] + (w + lo * s) * p->xs[4];
        trvk_sums_add(sums, (uint32_t)lo, trvk_at(p->x, p->dtype, x), s * p->xs[4],
                      (uint32_t)(hi - lo));
      }
}

/* Stores the averages of all lanes, by runs that have one divisor. */
static void qpool_store(const trvk_pool* p, const trvk_pool_at* at, const trvk_sums* sums,
                        trvk_average* average, uint8_t* y, trv_dim step) {
  const trvk_span d = trvk_pool_span(p, 0, at->d), h = trvk_pool_span(p, 1, at->h);
  const trv_dim size = (trv_dim)trv_dtype_size(p->dtype);
  for (trv_dim i = 0, end; i < at->lanes; i = end) {
    const trvk_span w = trvk_pool_span(p, 2, at->w + i);
    end = at->lanes;
    if (p->wide && w.n < p->kernel[2]) {
      end = i + 1;        /* at a border */
    } else if (p->wide) { /* up to the last window that is inside */
      const trv_dim last =
          (p->in[2] - 1 - (p->kernel[2] - 1) * p->dilation[2] + p->pad[2]) / p->stride[2];
      if (end > last + 1 - at->w) end = last + 1 - at->w;
    }
    const int64_t count = trvk_pool_divisor(p, &d, &h, &w);
    if (count != average->count) trvk_average_count(average, count);
    trvk_average_store(average, sums, (uint32_t)i, (uint32_t)(end - i), y + i * step * size, step);
  }
}

void TRVK_KERNEL(qpool)(const trvk_call* call, uint32_t tile) {
  const trvf_qpool_attrs* a = call->attrs;
  trvk_pool p = {0};
  int64_t cells = 1, e, g;
  if (trvk_count(&call->out[0]) == 0) return;
  (void)trvk_qpool_make(call, &p, &cells, &e, &g);
  trvk_average average = trvk_average_of_pool(a, p.dtype, cells);
  trvk_sums sums;
  /* Units as in pool.c: along channels a pixel with all its channels, along w a row of one channel.
   */
  const trv_dim inner = p.wide ? p.c : p.out[2], all = p.wide ? p.out[2] : p.c,
                step = p.wide ? p.ys[4] : p.ys[1];
  trv_dim u, end;
  trvk_split(p.n * p.out[0] * p.out[1] * inner, call->tiles, tile, &u, &end);
  for (; u < end; u++) {
    const trv_dim line = u / inner;
    trvk_pool_at at = {
        .n = line / p.out[1] / p.out[0], .d = line / p.out[1] % p.out[0], .h = line % p.out[1]};
    for (trv_dim from = 0; from < all; from += TRVK_SUMS) {
      at.lanes = all - from < TRVK_SUMS ? all - from : TRVK_SUMS;
      at.c = p.wide ? u % inner : from;
      at.w = p.wide ? from : u % inner;
      trvk_sums_begin(&sums, p.dtype, a->x_zero, (uint32_t)at.lanes);
      (p.wide ? qpool_row : qpool_channels)(&p, &at, &sums);
      const trv_dim to =
          at.n * p.ys[0] + at.c * p.ys[1] + at.d * p.ys[2] + at.h * p.ys[3] + at.w * p.ys[4];
      qpool_store(&p, &at, &sums, &average, trvk_at(call->out[0].data, p.dtype, to), step);
    }
  }
}
