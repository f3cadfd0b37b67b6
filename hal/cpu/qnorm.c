/* qnorm.c - layer and RMS normalisation of i8, without floating point. One square root per row: the
 * variance is scaled by a power of 4 so that the root has 31 bits (schema/ops.fbs). */
/* clang-format off: its macros rename what the others declare */
#include "variant.h"
/* clang-format on */
#include "gemm.h"
#include "quant.h"
#include "walk.h"

enum { Y = 0, X = 1, P = 2, STREAMS = 3, MOST = 32768 }; /* P: position in weight and bias */

typedef struct qnorm_plan { /* the axes of one row */
  uint32_t rank;
  trv_dim n, dim[TRV_MAX_RANK], stride[STREAMS][TRV_MAX_RANK];
  const trvf_qnorm_attrs* a;
  const int32_t *weight, *bias; /* NULL: 1, 0 */
} qnorm_plan;

static trv_dim qnorm_rows(const trvk_call* call) {
  const trvf_qnorm_attrs* a = call->attrs;
  trv_dim rows = 1;
  for (uint32_t i = 0; i + a->axes < call->out->rank; i++) rows *= call->out->dim[i];
  return rows;
}

#ifndef TRVK_VARIANT
const char* trvk_qnorm_check(const trvk_call* call, int64_t* expected, int64_t* got) {
  const trv_tensor *x = call->in, *y = call->out;
  const trvf_qnorm_attrs* a = call->attrs;
  if (a->kind != TRV_NORM_KIND_LAYER && a->kind != TRV_NORM_KIND_RMS)
    return trvk_fail(TRVK_SAY("qnorm: unknown normalisation"), TRV_NORM_KIND_RMS, a->kind, expected,
                     got);
  if (x->dtype != TRV_DTYPE_I8 || y->dtype != TRV_DTYPE_I8)
    return trvk_fail(TRVK_SAY("qnorm: dtype without a kernel"), TRV_DTYPE_I8,
                     x->dtype != TRV_DTYPE_I8 ? x->dtype : y->dtype, expected, got);
  if (!trvk_same_shape(x, y))
    return trvk_fail(TRVK_SAY("qnorm: shapes differ"), x->rank, y->rank, expected, got);
  if (a->axes == 0 || a->axes > x->rank)
    return trvk_fail(TRVK_SAY("qnorm: axes"), x->rank, a->axes, expected, got);
  const uint32_t lead = (uint32_t)x->rank - a->axes;
  trv_dim n = 1;
  for (uint32_t i = lead; i < x->rank; i++) {
    if (x->dim[i] > MOST || (n *= x->dim[i]) > MOST)
      return trvk_fail(TRVK_SAY("qnorm: too many values in a row"), MOST, x->dim[i], expected, got);
  }
  for (uint32_t k = 1; k < 3; k++) {
    const trv_tensor* w = trvk_opt(call, k);
    if (w == NULL) continue;
    if (w->dtype != TRV_DTYPE_I32 || w->rank != a->axes)
      return trvk_fail(TRVK_SAY("qnorm: dtype or rank of a weight or bias"), a->axes, w->rank,
                       expected, got);
    for (uint32_t i = 0; i < a->axes; i++)
      if (w->dim[i] != x->dim[lead + i])
        return trvk_fail(TRVK_SAY("qnorm: size of a weight or bias"), x->dim[lead + i], w->dim[i],
                         expected, got);
    if (n > 0 && !trvk_dense(w)) return TRVK_SAY("qnorm: a weight or bias with gaps");
  }
  if (!trvk_fits(TRV_DTYPE_I8, a->x_zero) || !trvk_fits(TRV_DTYPE_I8, a->y_zero) ||
      !trvk_bounds_ok(TRV_DTYPE_I8, a->lo, a->hi))
    return trvk_fail(TRVK_SAY("qnorm: zero points or bounds"), INT8_MAX, a->hi, expected, got);
  if (a->multiplier < 0 || a->multiplier >> 23 != 0 || !trvk_shift_ok(a->shift) ||
      a->eps > UINT32_MAX)
    return trvk_fail(TRVK_SAY("qnorm: multiplier, shift or eps"), 1 << 23, a->multiplier, expected,
                     got);
  return trvk_out_check(y, expected, got);
}

uint32_t trvk_qnorm_tiles(const trvk_call* call, uint32_t workers) {
  const trv_dim n = trvk_count(call->out);
  return n ? trvk_tiles(n * 8, qnorm_rows(call), workers) : 1;
}
#endif

/* floor(sqrt(v)), digit by digit; v below 2^62. */
static int64_t qnorm_root(uint64_t v) {
  uint64_t r = 0;
  for (uint64_t bit = (uint64_t)1 << 60; bit != 0; bit >>= 2) {
    const int more = v >= r + bit;
    if (more) v -= r + bit;
    r = (r >> 1) + (more ? bit : 0);
  }
  return (int64_t)r;
}

/* Sum and sum of squares of x - zero; 32 bits hold them for MOST values. */
static void qnorm_moments(const qnorm_plan* p, const int8_t* x, int32_t zero, int32_t* sum,
                          uint32_t* squares) {
  const uint32_t last = p->rank - 1;
  const trv_dim n = p->dim[last], step = p->stride[X][last];
  trv_dim index[TRV_MAX_RANK] = {0};
  *sum = 0;
  *squares = 0;
  for (trv_dim at = 0; at < p->n; at += n) {
    const int8_t* v = x + trvk_walk_at(p->rank, index, p->stride[X]);
    for (trv_dim i = 0; i < n; i++) {
      const int32_t d = v[i * step] - zero;
      *sum += d;
      *squares += (uint32_t)(d * d);
    }
    trvk_walk_step(last, p->dim, index, n);
  }
}

/* One row; y may be x. The two kinds differ in what is taken off: the mean, or the zero point. */
static void qnorm_row(const qnorm_plan* p, const int8_t* x, int8_t* y) {
  const trvf_qnorm_attrs* a = p->a;
  const int rms = a->kind == TRV_NORM_KIND_RMS;
  const int32_t zero = rms ? a->x_zero : 0, n = (int32_t)p->n;
  int32_t sum;
  uint32_t squares, j = 0;
  qnorm_moments(p, x, zero, &sum, &squares);
  if (rms) sum = 0;
  uint64_t w = (uint64_t)n * squares - (uint64_t)((int64_t)sum * sum) +
               (((uint64_t)n * (uint64_t)n * a->eps) >> 16);
  if (w == 0) w = 1;
  for (; w >> 60 == 0; j++) w <<= 2;
  const int64_t r = qnorm_root(w), up = (int64_t)1 << (j + 12);
  const uint32_t last = p->rank - 1;
  const trv_dim count = p->dim[last], x_step = p->stride[X][last], y_step = p->stride[Y][last],
                p_step = p->stride[P][last];
  trv_dim index[TRV_MAX_RANK] = {0};
  for (trv_dim at = 0; at < p->n; at += count) {
    const int8_t* from = x + trvk_walk_at(p->rank, index, p->stride[X]);
    int8_t* to = y + trvk_walk_at(p->rank, index, p->stride[Y]);
    const trv_dim k = trvk_walk_at(p->rank, index, p->stride[P]);
    for (trv_dim i = 0; i < count; i++) {
      const int64_t d = (int64_t)n * (from[i * x_step] - zero) - sum;
      int64_t t = trvk_divide(trvk_mul64(d, up), r);
      if (p->weight) t = trvk_mul64(t, p->weight[k + i * p_step]);
      if (p->bias) t = trvk_add64(t, p->bias[k + i * p_step]);
      to[i * y_step] =
          (int8_t)trvk_stored(trvk_rescale(t, a->multiplier, a->shift), a->y_zero, a->lo, a->hi);
    }
    trvk_walk_step(last, p->dim, index, count);
  }
}

void TRVK_KERNEL(qnorm)(const trvk_call* call, uint32_t tile) {
  const trv_tensor *x = call->in, *y = call->out, *w = trvk_opt(call, 1), *b = trvk_opt(call, 2);
  const trvf_qnorm_attrs* a = call->attrs;
  if (trvk_count(y) == 0) return;
  const uint32_t lead = (uint32_t)x->rank - a->axes;
  qnorm_plan p = {.rank = a->axes,
                  .n = 1,
                  .a = a,
                  .weight = w ? (const int32_t*)(const void*)w->data : NULL,
                  .bias = b ? (const int32_t*)(const void*)b->data : NULL};
  for (uint32_t k = a->axes; k-- > 0;) {
    p.dim[k] = x->dim[lead + k];
    p.stride[Y][k] = y->stride[lead + k];
    p.stride[X][k] = x->stride[lead + k];
    p.stride[P][k] = p.n;
    p.n *= p.dim[k];
  }
  p.rank = trvk_walk_plan(p.rank, p.dim, p.stride, STREAMS);
  trv_dim at, end;
  trvk_split(qnorm_rows(call), call->tiles, tile, &at, &end);
  for (; at < end; at++)
    qnorm_row(&p, (const int8_t*)x->data + trvk_offset(lead, x->dim, x->stride, at),
              (int8_t*)y->data + trvk_offset(lead, y->dim, y->stride, at));
}
