/* pool.h - a pooling's geometry as three spatial axes; shared by pool.c, its instances of
 * pool_lanes.inc, and qpool.c. */
#ifndef TRVK_POOL_H
#define TRVK_POOL_H

#include "gemm.h"

typedef struct trvk_pool {
  trv_dim n, c, in[3], out[3], kernel[3], stride[3], pad[3], dilation[3];
  trv_dim xs[5], ys[5], is[5]; /* strides of x, y, indices as n, c, d, h, w */
  const uint8_t* x;
  uint32_t dtype;
  int max, adaptive, include_pad, wide; /* wide: lanes lie along w, not along channels */
  trv_dim divisor;
} trvk_pool;

/* The cells of one output along one axis: first + i * step, i < n, all inside; full: cells that
 * count with padding. */
typedef struct trvk_span {
  trv_dim first, n, step, full;
} trvk_span;

/* Lanes of one row of outputs: image n, channel c (first of the lanes), output d, h, w (first of
 * the lanes). */
typedef struct trvk_pool_at {
  trv_dim n, c, d, h, w, lanes;
} trvk_pool_at;

/* The cells of output o along one spatial axis. */
static inline trvk_span trvk_pool_span(const trvk_pool* p, int axis, trv_dim o) {
  trvk_span s;
  const trv_dim in = p->in[axis];
  if (p->adaptive) {
    s.first = o * in / p->out[axis];
    s.n = ((o + 1) * in + p->out[axis] - 1) / p->out[axis] - s.first;
    s.step = 1;
    s.full = s.n;
    return s;
  }
  const trv_dim start = o * p->stride[axis] - p->pad[axis], dil = p->dilation[axis],
                k = p->kernel[axis];
  const trv_dim k0 = start >= 0 ? 0 : dil == 1 ? -start : (-start + dil - 1) / dil;
  trv_dim k1 = start >= in ? 0 : dil == 1 ? in - start : (in - 1 - start) / dil + 1;
  if (k1 > k) k1 = k;
  s.first = start + k0 * dil;
  s.n = k1 > k0 ? k1 - k0 : 0;
  s.step = dil;
  const trv_dim edge =
      in + p->pad[axis] - start; /* ceil_mode: cells beyond the padding never count */
  s.full = k < edge ? k : edge;
  return s;
}

/* Strides as n, c, d, h, w. */
static inline void trvk_pool_strides(const trv_tensor* t, trv_dim* out) {
  memset(out, 0, 5 * sizeof *out);
  out[0] = t->stride[0];
  out[1] = t->stride[1];
  for (uint32_t i = 2; i < t->rank; i++) out[5 - t->rank + i] = t->stride[i];
}

/* The geometry of a command with attributes a (zeroed before). NULL, or what is wrong. */
static inline const char* trvk_pool_make(const trvk_call* call, const trvf_pool_attrs* a,
                                         trvk_pool* p, int64_t* expected, int64_t* got) {
  const trv_tensor *x = &call->in[0], *y = &call->out[0];
  const trv_dim most = PTRDIFF_MAX / 4;
  *expected = *got = 0;
  if (a->nd < 1 || a->nd > 3 || x->rank != a->nd + 2u || y->rank != a->nd + 2u)
    return trvk_fail(TRVK_SAY("pool: rank does not fit"), a->nd + 2, x->rank, expected, got);
  if (x->dim[0] != y->dim[0] || x->dim[1] != y->dim[1])
    return trvk_fail(TRVK_SAY("pool: batch or channels differ"), x->dim[1], y->dim[1], expected,
                     got);
  p->n = x->dim[0];
  p->c = x->dim[1];
  p->x = x->data;
  p->dtype = x->dtype;
  p->max = a->kind == TRV_POOL_KIND_MAX;
  p->adaptive = a->adaptive != 0;
  p->include_pad = a->count_include_pad != 0;
  p->divisor = a->divisor;
  for (int i = 0; i < 3; i++) {
    const int j = i - (3 - a->nd);
    p->in[i] = p->out[i] = p->kernel[i] = p->stride[i] = p->dilation[i] = 1;
    p->pad[i] = 0;
    if (j < 0) continue;
    p->in[i] = x->dim[2 + j];
    p->out[i] = y->dim[2 + j];
    if (p->adaptive) {
      if (p->out[i] > 0 && p->in[i] >= most / p->out[i]) return TRVK_SAY("pool: sizes overflow");
      continue;
    }
    p->kernel[i] = a->kernel[j];
    p->stride[i] = a->stride[j];
    p->pad[i] = a->pad[j];
    p->dilation[i] = a->dilation[j] ? a->dilation[j] : 1;
    if (p->kernel[i] < 1 || p->stride[i] < 1)
      return trvk_fail(TRVK_SAY("pool: kernel and stride start at 1"), 1, 0, expected, got);
    if (p->out[i] > most / 65536 || p->in[i] > most / 2) return TRVK_SAY("pool: sizes overflow");
  }
  trvk_pool_strides(x, p->xs);
  trvk_pool_strides(y, p->ys);
  p->wide = (p->xs[1] != 1 || p->c == 1) && !p->adaptive && p->out[2] > 1;
  return NULL;
}

/* The divisor of an average over d, h, w. */
static inline int64_t trvk_pool_divisor(const trvk_pool* p, const trvk_span* d, const trvk_span* h,
                                        const trvk_span* w) {
  if (p->divisor) return p->divisor;
  if (!p->include_pad || p->adaptive) return (int64_t)d->n * h->n * w->n;
  return d->full > 0 && h->full > 0 && w->full > 0 ? (int64_t)d->full * h->full * w->full : 0;
}

/* The geometry of a qpool, and the largest number of cells of a window. NULL, or what is wrong. */
const char* trvk_qpool_make(const trvk_call* call, trvk_pool* p, int64_t* cells, int64_t* expected,
                            int64_t* got);
#endif
