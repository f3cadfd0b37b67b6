/* qresize.c - linear resampling of i8 and i16. Positions are exact fractions; weights have 11 bits
 * per axis, so that their products and sums are exact too and one rounding is left. */
#include "gemm.h"
#include "quant.h"

enum { BITS = 11, COLUMNS = 32, SIZE_MOST = 1 << 26 }; /* SIZE_MOST: of an axis, in and out */

typedef struct plan { /* axes: depth, height, width; those that are not there have size 1 */
  trv_dim n, c, in[3], out[3], xs[5], ys[5]; /* strides: batch, channel, axes */
  uint32_t nd;
  int align_corners;
} plan;

/* What one output reads along one axis. */
typedef struct pair {
  int count;
  trv_dim at[2]; /* offset: index * stride */
  int32_t weight[2];
} pair;

static const char* make(const trvk_call* call, plan* p, int64_t* expected, int64_t* got) {
  const trvf_qresize_attrs* a = call->attrs;
  const trv_tensor *x = &call->in[0], *y = &call->out[0];
  if (a->nd < 1 || a->nd > 3 || x->rank != a->nd + 2u || y->rank != x->rank)
    return trvk_fail(TRVK_SAY("qresize: rank does not fit"), a->nd + 2, x->rank, expected, got);
  if (x->dim[0] != y->dim[0] || x->dim[1] != y->dim[1])
    return trvk_fail(TRVK_SAY("qresize: batch or channels differ"), x->dim[1], y->dim[1], expected,
                     got);
  memset(p, 0, sizeof *p);
  p->nd = a->nd;
  p->align_corners = a->align_corners != 0;
  p->n = x->dim[0];
  p->c = x->dim[1];
  for (uint32_t i = 0; i < 3; i++) p->in[i] = p->out[i] = 1;
  for (uint32_t j = 0; j < x->rank; j++) {
    const uint32_t i = j < 2 ? j : j + 3 - a->nd;
    p->xs[i] = x->stride[j];
    p->ys[i] = y->stride[j];
    if (j < 2) continue;
    p->in[i - 2] = x->dim[j];
    p->out[i - 2] = y->dim[j];
    if (x->dim[j] > SIZE_MOST || y->dim[j] > SIZE_MOST)
      return trvk_fail(TRVK_SAY("qresize: size of an axis"), SIZE_MOST, y->dim[j], expected, got);
    if (x->dim[j] < 1 && trvk_count(y) > 0)
      return trvk_fail(TRVK_SAY("qresize: an empty input"), 1, x->dim[j], expected, got);
  }
  return NULL;
}

const char* trvk_qresize_check(const trvk_call* call, int64_t* expected, int64_t* got) {
  const uint32_t dtype = call->in[0].dtype;
  plan p;
  if (!trvk_dtype_is_stored(dtype) || call->out[0].dtype != dtype)
    return trvk_fail(TRVK_SAY("qresize: dtype without a kernel, or dtypes differ"), dtype,
                     call->out[0].dtype, expected, got);
  const char* what = trvk_out_check(&call->out[0], expected, got);
  return what ? what : make(call, &p, expected, got);
}

uint32_t trvk_qresize_tiles(const trvk_call* call, uint32_t workers) {
  const trv_tensor* y = &call->out[0];
  const trv_dim count = trvk_count(y);
  return count ? trvk_tiles(count * 4, count / y->dim[1] / y->dim[y->rank - 1], workers) : 1;
}

static void neighbours(const plan* p, uint32_t axis, trv_dim o, pair* t) {
  const int64_t n = p->in[axis], m = p->out[axis];
  const trv_dim stride = p->xs[2 + axis];
  t->count = 1;
  t->at[0] = t->at[1] = 0;
  t->weight[0] = 1;
  t->weight[1] = 0;
  if (axis < 3 - p->nd) return;
  int64_t up, q; /* the position is up / q */
  if (p->align_corners) {
    up = o * (n - 1);
    q = m > 1 ? m - 1 : 1;
  } else {
    up = (2 * (int64_t)o + 1) * n - m;
    q = 2 * m;
  }
  if (up < 0) up = 0;
  const int64_t i = up / q;
  const int32_t f = (int32_t)trvk_divide((up - i * q) << BITS, q);
  t->count = f != 0 ? 2 : 1;
  t->at[0] = (trv_dim)(i < n - 1 ? i : n - 1) * stride;
  t->at[1] = (trv_dim)(i + 1 < n - 1 ? i + 1 : n - 1) * stride;
  t->weight[0] = (1 << BITS) - f;
  t->weight[1] = f;
}

/* All channels of one output. */
static void pixel(const plan* p, uint32_t dtype, const uint8_t* x, uint8_t* y, const pair* td,
                  const pair* th, const pair* tw) {
  trv_dim at[8];
  int64_t weight[8];
  int n = 0;
  for (int i = 0; i < td->count; i++)
    for (int j = 0; j < th->count; j++)
      for (int k = 0; k < tw->count; k++, n++) {
        at[n] = td->at[i] + th->at[j] + tw->at[k];
        weight[n] = (int64_t)td->weight[i] * th->weight[j] * tw->weight[k];
      }
  for (trv_dim c = 0; c < p->c; c++) {
    int64_t sum = 0;
    if (dtype == TRV_DTYPE_I8)
      for (int i = 0; i < n; i++) sum += weight[i] * ((const int8_t*)x)[at[i] + c * p->xs[1]];
    else
      for (int i = 0; i < n; i++)
        sum += weight[i] * ((const int16_t*)(const void*)x)[at[i] + c * p->xs[1]];
    sum = trvk_rescale(sum, 1, BITS * (int32_t)p->nd); /* a mean: no clamp needed */
    if (dtype == TRV_DTYPE_I8)
      ((int8_t*)y)[c * p->ys[1]] = (int8_t)sum;
    else
      ((int16_t*)(void*)y)[c * p->ys[1]] = (int16_t)sum;
  }
}

void trvk_qresize__ref(const trvk_call* call, uint32_t tile) {
  const uint32_t dtype = call->in[0].dtype;
  const trv_dim size = (trv_dim)trv_dtype_size(dtype);
  plan p;
  int64_t e, g;
  if (trvk_count(&call->out[0]) == 0) return;
  (void)make(call, &p, &e, &g);
  trv_dim begin, end;
  trvk_split(p.n * p.out[0] * p.out[1], call->tiles, tile, &begin, &end);
  for (trv_dim w0 = 0; w0 < p.out[2] && begin < end; w0 += COLUMNS) {
    pair td, th, tw[COLUMNS]; /* those along the width are found once for all rows */
    const trv_dim w1 = p.out[2] - w0 < COLUMNS ? p.out[2] : w0 + COLUMNS;
    for (trv_dim w = w0; w < w1; w++) neighbours(&p, 2, w, &tw[w - w0]);
    for (trv_dim u = begin; u < end; u++) {
      const trv_dim h = u % p.out[1], d = u / p.out[1] % p.out[0], n = u / p.out[1] / p.out[0];
      neighbours(&p, 0, d, &td);
      neighbours(&p, 1, h, &th);
      const uint8_t* x = call->in[0].data + n * p.xs[0] * size;
      for (trv_dim w = w0; w < w1; w++)
        pixel(&p, dtype, x,
              call->out[0].data + (n * p.ys[0] + d * p.ys[2] + h * p.ys[3] + w * p.ys[4]) * size,
              &td, &th, &tw[w - w0]);
    }
  }
}
