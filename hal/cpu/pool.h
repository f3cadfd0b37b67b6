/* pool.h - a pooling's geometry as three spatial axes; shared by pool.c and its instances of
 * pool_lanes.inc. */
#ifndef TRVK_POOL_H
#define TRVK_POOL_H

#include "gemm.h"

#define TRVK_LANES 64 /* outputs computed at once */

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
#endif
