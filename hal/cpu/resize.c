/* resize.c - resampling on a regular grid. Source positions are computed as torch does: in float32,
 * for float64 inputs in float64. */
#include "sample.h"

typedef struct plan {
  trv_dim n, c, in[3], out[3], xs[5], ys[5];
  double scale[3]; /* input / output, already rounded to float32 but for float64 */
  uint32_t dtype;
  int wide; /* float64 */
} plan;

/* Neighbours of one output along one axis. */
typedef struct axis_taps {
  int count;
  trv_dim at[4];
  double weight[4];
} axis_taps;

static const char* make(const trvk_call* call, plan* p, int64_t* expected, int64_t* got) {
  const trvf_resize_attrs* a = call->attrs;
  const trv_tensor *x = &call->in[0], *y = &call->out[0];
  *expected = *got = 0;
  if (a->nd < 1 || a->nd > 3 || x->rank != a->nd + 2u || y->rank != x->rank)
    return trvk_fail(TRVK_SAY("resize: rank does not fit"), a->nd + 2, x->rank, expected, got);
  if (x->dim[0] != y->dim[0] || x->dim[1] != y->dim[1])
    return trvk_fail(TRVK_SAY("resize: batch or channels differ"), x->dim[1], y->dim[1], expected,
                     got);
  p->n = x->dim[0];
  p->c = x->dim[1];
  p->dtype = x->dtype;
  p->wide = x->dtype == TRV_DTYPE_F64;
  for (int i = 0; i < 5; i++) p->xs[i] = p->ys[i] = 0;
  p->xs[0] = x->stride[0], p->xs[1] = x->stride[1];
  p->ys[0] = y->stride[0], p->ys[1] = y->stride[1];
  for (int i = 0; i < 3; i++) {
    const int j = i - (3 - a->nd);
    p->in[i] = p->out[i] = 1;
    p->scale[i] = 1.0;
    if (j < 0) continue;
    p->in[i] = x->dim[2 + j];
    p->out[i] = y->dim[2 + j];
    p->xs[2 + i] = x->stride[2 + j];
    p->ys[2 + i] = y->stride[2 + j];
    if (p->in[i] < 1 && trvk_count(y) > 0)
      return trvk_fail(TRVK_SAY("resize: an empty input"), 1, p->in[i], expected, got);
    const int exact =
        a->mode == TRV_RESIZE_MODE_NEAREST || a->mode == TRV_RESIZE_MODE_NEAREST_EXACT;
    double s;
    if (a->align_corners && !exact)
      s = p->out[i] > 1 ? (double)(p->in[i] - 1) / (double)(p->out[i] - 1) : 0.0;
    else if (a->scale[j] > 0.0f)
      s = 1.0 / (double)a->scale[j];
    else
      s = p->out[i] > 0 ? (double)p->in[i] / (double)p->out[i] : 1.0;
    p->scale[i] = p->wide ? s : (double)(float)s;
  }
  return NULL;
}

const char* trvk_resize_check(const trvk_call* call, int64_t* expected, int64_t* got) {
  const trvf_resize_attrs* a = call->attrs;
  const uint32_t dtype = call->in[0].dtype;
  plan p;
  if (a->mode >= TRV_RESIZE_MODE_COUNT)
    return trvk_fail(TRVK_SAY("resize: unknown mode"), TRV_RESIZE_MODE_COUNT, a->mode, expected,
                     got);
  if (call->out[0].dtype != dtype)
    return trvk_fail(TRVK_SAY("resize: dtypes differ"), dtype, call->out[0].dtype, expected, got);
  if (a->mode >= TRV_RESIZE_MODE_LINEAR && !trvk_dtype_is_float(dtype))
    return trvk_fail(TRVK_SAY("resize: dtype without a kernel"), TRV_DTYPE_F32, dtype, expected,
                     got);
  const char* what = trvk_out_check(&call->out[0], expected, got);
  return what ? what : make(call, &p, expected, got);
}

uint32_t trvk_resize_tiles(const trvk_call* call, uint32_t workers) {
  const trvf_resize_attrs* a = call->attrs;
  const trv_tensor* y = &call->out[0];
  const trv_dim count = trvk_count(y), each = a->mode < TRV_RESIZE_MODE_LINEAR ? 1 : 4;
  return trvk_tiles(count > PTRDIFF_MAX / 4 ? count : count * each,
                    count / (y->dim[y->rank - 1] * y->dim[1] + 1) + 1, workers);
}

/* float or double products, as torch rounds them */
static double position(const plan* p, double scale, double dst, double shift) {
  if (p->wide) return scale * (dst + shift) - shift;
  const float product = (float)scale * ((float)dst + (float)shift);
  return (double)(product - (float)shift);
}

static void neighbours(const plan* p, const trvf_resize_attrs* a, int axis, trv_dim o,
                       axis_taps* t) {
  const trv_dim in = p->in[axis];
  const double s = p->scale[axis];
  t->count = 1;
  t->weight[0] = 1.0;
  if (a->mode == TRV_RESIZE_MODE_NEAREST) {
    t->at[0] = trvk_index((double)floorf((float)((double)(float)o * s)), in);
    if (!p->wide) t->at[0] = trvk_index((double)floorf((float)o * (float)s), in);
    return;
  }
  if (a->mode == TRV_RESIZE_MODE_NEAREST_EXACT) {
    t->at[0] = p->wide ? trvk_index((double)floorf((float)(((double)o + 0.5) * s)), in)
                       : trvk_index((double)floorf(((float)o + 0.5f) * (float)s), in);
    return;
  }
  if (a->mode == TRV_RESIZE_MODE_LINEAR && p->out[axis] == in) {
    t->at[0] = o;
    return;
  }
  double at = position(p, s, (double)o, a->align_corners ? 0.0 : 0.5);
  if (!(at >= 0.0 || at < 0.0)) at = 0.0; /* NaN: a hostile scale */
  if (a->mode == TRV_RESIZE_MODE_LINEAR) {
    const trv_dim i = trvk_index(at, in);
    double f = at - (double)i;
    f = f < 0.0 ? 0.0 : f > 1.0 ? 1.0 : f;
    t->count = 2;
    t->at[0] = i;
    t->at[1] = i + 1 < in ? i + 1 : i;
    t->weight[0] = p->wide ? 1.0 - f : (double)(1.0f - (float)f);
    t->weight[1] = f;
    return;
  }
  double base = floor(at);
  if (base < -2.0) base = -2.0; /* (only by a hostile scale) */
  if (base > (double)in) base = (double)in;
  double f = at - base;
  f = f < 0.0 ? 0.0 : f > 1.0 ? 1.0 : f;
  t->count = 4;
  trvk_cubic64(f, (double)a->cubic_a, t->weight);
  for (int k = 0; k < 4; k++) t->at[k] = trvk_index(base + (double)(k - 1), in);
}

#define COLUMNS 32 /* outputs along w whose neighbours are found once for all rows */

static void pixel(const plan* p, const trvf_resize_attrs* a, const uint8_t* x, uint8_t* y,
                  const axis_taps* td, const axis_taps* th, const axis_taps* tw) {
  if (a->mode < TRV_RESIZE_MODE_LINEAR) {
    const trv_dim at = td->at[0] * p->xs[2] + th->at[0] * p->xs[3] + tw->at[0] * p->xs[4];
    trvk_sample_copy(trvk_at(x, p->dtype, at), p->xs[1], y, p->ys[1], p->c,
                     trv_dtype_size(p->dtype));
    return;
  }
  trvk_taps64 t;
  trvk_taps32 f;
  trv_dim n = 0;
  for (int i = 0; i < td->count; i++)
    for (int j = 0; j < th->count; j++) {
      const double weight = td->weight[i] * th->weight[j];
      const trv_dim at = td->at[i] * p->xs[2] + th->at[j] * p->xs[3];
      for (int k = 0; k < tw->count; k++, n++) {
        t.at[n] = f.at[n] = at + tw->at[k] * p->xs[4];
        t.weight[n] = weight * tw->weight[k];
        f.weight[n] = (float)t.weight[n];
      }
    }
  t.count = f.count = n;
  if (p->wide)
    trvk_sample64(&t, x, p->xs[1], y, p->ys[1], p->c);
  else
    trvk_sample32(&f, x, p->xs[1], y, p->ys[1], p->c, p->dtype);
}

void trvk_resize__ref(const trvk_call* call, uint32_t tile) {
  const trvf_resize_attrs* a = call->attrs;
  plan p;
  int64_t e, g;
  if (trvk_count(&call->out[0]) == 0) return;
  (void)make(call, &p, &e, &g);
  trv_dim begin, end;
  trvk_split(p.n * p.out[0] * p.out[1], call->tiles, tile, &begin, &end);
  for (trv_dim w0 = 0; w0 < p.out[2]; w0 += COLUMNS) {
    axis_taps td, th, tw[COLUMNS];
    const trv_dim w1 = p.out[2] - w0 < COLUMNS ? p.out[2] : w0 + COLUMNS;
    for (trv_dim w = w0; w < w1; w++) neighbours(&p, a, 2, w, &tw[w - w0]);
    for (trv_dim u = begin; u < end; u++) {
      const trv_dim h = u % p.out[1], d = u / p.out[1] % p.out[0], n = u / p.out[1] / p.out[0];
      neighbours(&p, a, 0, d, &td);
      neighbours(&p, a, 1, h, &th);
      const uint8_t* x = trvk_at(call->in[0].data, p.dtype, n * p.xs[0]);
      for (trv_dim w = w0; w < w1; w++) {
        const trv_dim to = n * p.ys[0] + d * p.ys[2] + h * p.ys[3] + w * p.ys[4];
        pixel(&p, a, x, trvk_at(call->out[0].data, p.dtype, to), &td, &th, &tw[w - w0]);
      }
    }
  }
}
