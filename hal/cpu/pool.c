/* pool.c - max and average pooling, windowed and adaptive, in 1 to 3 dimensions. Lanes run along
 * channels when these are innermost, along w when many outputs lie there, else one output at a
 * time. Compiled once more per instruction set with TRVK_POOL, the kernel's name, by pool_<isa>.c.
 */
#include "pool.h"

static void load_int(int64_t* dst, const uint8_t* src, uint32_t dtype, trv_dim stride, trv_dim n) {
  for (trv_dim i = 0; i < n; i++) {
    const uint8_t* p = trvk_at(src, dtype, i * stride);
    switch (dtype) {
      case TRV_DTYPE_U8:
        dst[i] = *p;
        break;
      case TRV_DTYPE_I8:
        dst[i] = *(const int8_t*)p;
        break;
      case TRV_DTYPE_I16:
        dst[i] = *(const int16_t*)(const void*)p;
        break;
      case TRV_DTYPE_I32:
        dst[i] = *(const int32_t*)(const void*)p;
        break;
      default:
        dst[i] = *(const int64_t*)(const void*)p;
        break;
    }
  }
}

static void store_int(uint8_t* dst, uint32_t dtype, trv_dim stride, const int64_t* src, trv_dim n) {
  for (trv_dim i = 0; i < n; i++) {
    uint8_t* p = trvk_at(dst, dtype, i * stride);
    switch (dtype) {
      case TRV_DTYPE_U8:
      case TRV_DTYPE_I8:
        *p = (uint8_t)src[i];
        break;
      case TRV_DTYPE_I16:
        *(int16_t*)(void*)p = (int16_t)src[i];
        break;
      case TRV_DTYPE_I32:
        *(int32_t*)(void*)p = (int32_t)src[i];
        break;
      default:
        *(int64_t*)(void*)p = src[i];
        break;
    }
  }
}

#define T float
#define LANES lanes_f32
#define LOAD trvk_row_load
#define LOWEST (-INFINITY)
#define DIRECT TRV_DTYPE_F32
#include "pool_lanes.inc"
#define T double
#define LANES lanes_f64
#define LOAD trvk_row_load64
#define LOWEST ((double)-INFINITY)
#define DIRECT TRV_DTYPE_F64
#include "pool_lanes.inc"
#define T int64_t
#define LANES lanes_int
#define LOAD load_int
#define LOWEST INT64_MIN
#define DIRECT TRV_DTYPE_I64
#include "pool_lanes.inc"

#ifndef TRVK_POOL
#define TRVK_POOL trvk_pool__ref
const char* trvk_pool_check(const trvk_call* call, int64_t* expected, int64_t* got) {
  const trvf_pool_attrs* a = call->attrs;
  const trv_tensor *x = &call->in[0], *y = &call->out[0];
  trvk_pool p = {0};
  if (a->kind >= TRV_POOL_KIND_COUNT)
    return trvk_fail(TRVK_SAY("pool: unknown kind"), TRV_POOL_KIND_COUNT, a->kind, expected, got);
  if (x->dtype != y->dtype)
    return trvk_fail(TRVK_SAY("pool: dtypes differ"), x->dtype, y->dtype, expected, got);
  if (x->dtype < TRV_DTYPE_U8 || (a->kind == TRV_POOL_KIND_AVG && !trvk_dtype_is_float(x->dtype)))
    return trvk_fail(TRVK_SAY("pool: dtype without a kernel"), TRV_DTYPE_F32, x->dtype, expected,
                     got);
  if (call->n_out > 1) {
    const trv_tensor* index = &call->out[1];
    if (a->kind != TRV_POOL_KIND_MAX || index->dtype != TRV_DTYPE_I64 || !trvk_same_shape(index, y))
      return trvk_fail(TRVK_SAY("pool: indices do not fit the output"), TRV_DTYPE_I64, index->dtype,
                       expected, got);
  }
  for (uint32_t i = 0; i < call->n_out; i++) {
    const char* what = trvk_out_check(&call->out[i], expected, got);
    if (what) return what;
  }
  return trvk_pool_make(call, a, &p, expected, got);
}

uint32_t trvk_pool_tiles(const trvk_call* call, uint32_t workers) {
  trvk_pool p = {0};
  int64_t e, g;
  if (trvk_pool_make(call, call->attrs, &p, &e, &g)) return 1;
  double work = (double)trvk_count(&call->out[0]);
  for (int i = 0; i < 3; i++)
    work *= p.adaptive ? 1.0 + (double)p.in[i] / (double)(p.out[i] ? p.out[i] : 1)
                       : (double)p.kernel[i];
  return trvk_tiles(work > 1e9 ? (trv_dim)1000000000 : (trv_dim)work, trvk_count(&call->out[0]),
                    workers);
}

#endif

/* Divides the sums by the number of cells that torch counts. */
static double cells(const trvk_pool* p, const trvk_pool_at* at, trv_dim lane) {
  const trvk_span d = trvk_pool_span(p, 0, at->d), h = trvk_pool_span(p, 1, at->h);
  const trvk_span w = trvk_pool_span(p, 2, at->w + (p->wide ? lane : 0));
  if (p->divisor != 0) return (double)p->divisor;
  return p->include_pad || p->adaptive ? (double)d.full * (double)h.full * (double)w.full
                                       : (double)d.n * (double)h.n * (double)w.n;
}

static void lanes(const trvk_call* call, const trvk_pool* p, const trvk_pool_at* at) {
  union {
    float f[TRVK_POOL_LANES];
    double d[TRVK_POOL_LANES];
    int64_t i[TRVK_POOL_LANES];
  } sum;
  trv_dim index[TRVK_POOL_LANES];
  const trv_dim n = at->lanes, step = p->wide ? p->ys[4] : p->ys[1];
  const trv_dim to =
      at->n * p->ys[0] + at->c * p->ys[1] + at->d * p->ys[2] + at->h * p->ys[3] + at->w * p->ys[4];
  const int indices = call->n_out > 1;
  if (indices)
    for (trv_dim i = 0; i < n; i++) index[i] = -1;
  uint8_t* y = trvk_at(call->out[0].data, p->dtype, to);
  if (p->dtype == TRV_DTYPE_F64) {
    lanes_f64(p, at, sum.d, indices ? index : NULL);
    if (!p->max)
      for (trv_dim i = 0; i < n; i++) sum.d[i] = sum.d[i] == 0.0 ? 0.0 : sum.d[i] / cells(p, at, i);
    trvk_row_store64(y, p->dtype, step, sum.d, n);
  } else if (trvk_dtype_is_float(p->dtype)) {
    lanes_f32(p, at, sum.f, indices ? index : NULL);
    if (!p->max) {
      float count = (float)cells(p, at, 0);
      for (trv_dim i = 0; i < n; i++) {
        if (p->wide) count = (float)cells(p, at, i);
        sum.f[i] = sum.f[i] == 0.0f ? 0.0f : sum.f[i] / count;
      }
    }
    trvk_row_store(y, p->dtype, step, sum.f, n);
  } else {
    lanes_int(p, at, sum.i, indices ? index : NULL);
    store_int(y, p->dtype, step, sum.i, n);
  }
  if (indices) {
    const trv_tensor* t = &call->out[1];
    trv_dim is[5];
    trvk_pool_strides(t, is);
    int64_t* d = (int64_t*)(void*)t->data + at->n * is[0] + at->c * is[1] + at->d * is[2] +
                 at->h * is[3] + at->w * is[4];
    for (trv_dim i = 0; i < n; i++) d[i * (p->wide ? is[4] : is[1])] = index[i] < 0 ? 0 : index[i];
  }
}

void TRVK_POOL(const trvk_call* call, uint32_t tile) {
  trvk_pool p = {0};
  int64_t e, g;
  if (trvk_count(&call->out[0]) == 0) return;
  (void)trvk_pool_make(call, call->attrs, &p, &e, &g);
  /* Units: rows of outputs; along channels the row's pixels, each with all channels, along w each
   * channel's row. */
  const trv_dim inner = p.wide ? p.c : p.out[2];
  trv_dim begin, end;
  trvk_split(p.n * p.out[0] * p.out[1] * inner, call->tiles, tile, &begin, &end);
  for (trv_dim u = begin; u < end; u++) {
    trvk_pool_at at;
    const trv_dim row = u / inner;
    at.n = row / p.out[1] / p.out[0];
    at.d = row / p.out[1] % p.out[0];
    at.h = row % p.out[1];
    const trv_dim all = p.wide ? p.out[2] : p.c;
    for (trv_dim from = 0; from < all; from += TRVK_POOL_LANES) {
      at.lanes = all - from < TRVK_POOL_LANES ? all - from : TRVK_POOL_LANES;
      at.c = p.wide ? u % inner : from;
      at.w = p.wide ? from : u % inner;
      lanes(call, &p, &at);
    }
  }
}
