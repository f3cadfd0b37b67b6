/* grid_sample.c - resampling an image at positions given by a value, in [-1, 1] from border to
 * border. */
#include "sample.h"

const char* trvk_grid_sample_check(const trvk_call* call, int64_t* expected, int64_t* got) {
  const trvf_grid_sample_attrs* a = call->attrs;
  const trv_tensor *x = &call->in[0], *grid = &call->in[1], *y = &call->out[0];
  *expected = *got = 0;
  if (a->mode >= TRV_RESIZE_MODE_COUNT || a->mode == TRV_RESIZE_MODE_NEAREST_EXACT ||
      a->pad >= TRV_GRID_PAD_COUNT)
    return trvk_fail(TRVK_SAY("grid_sample: unknown mode"), TRV_RESIZE_MODE_COUNT, a->mode,
                     expected, got);
  if (!trvk_dtype_is_float(x->dtype) || grid->dtype != x->dtype || y->dtype != x->dtype)
    return trvk_fail(TRVK_SAY("grid_sample: dtypes differ or have no kernel"), TRV_DTYPE_F32,
                     x->dtype, expected, got);
  if (x->rank != 4 || grid->rank != 4 || y->rank != 4)
    return trvk_fail(TRVK_SAY("grid_sample: rank does not fit"), 4, x->rank, expected, got);
  if (grid->dim[3] != 2)
    return trvk_fail(TRVK_SAY("grid_sample: positions have two numbers"), 2, grid->dim[3], expected,
                     got);
  if (y->dim[0] != x->dim[0] || y->dim[1] != x->dim[1] || grid->dim[0] != x->dim[0] ||
      y->dim[2] != grid->dim[1] || y->dim[3] != grid->dim[2])
    return trvk_fail(TRVK_SAY("grid_sample: the output's shape does not fit"), grid->dim[1],
                     y->dim[2], expected, got);
  if ((x->dim[2] < 1 || x->dim[3] < 1) && trvk_count(y) > 0)
    return trvk_fail(TRVK_SAY("grid_sample: an empty image"), 1, 0, expected, got);
  return trvk_out_check(y, expected, got);
}

uint32_t trvk_grid_sample_tiles(const trvk_call* call, uint32_t workers) {
  const trvf_grid_sample_attrs* a = call->attrs;
  const trv_tensor* y = &call->out[0];
  const trv_dim count = trvk_count(y), each = a->mode == TRV_RESIZE_MODE_CUBIC ? 16 : 4;
  return trvk_tiles(count > PTRDIFF_MAX / 16 ? count : count * each, y->dim[0] * y->dim[2],
                    workers);
}

/* A number like float32 would have it, where that is what torch computes in. */
static double rounded(double x, int wide) { return wide ? x : (double)(float)x; }

/* [-1, 1] to pixels */
static double pixels(double at, trv_dim size, int align, int wide) {
  if (align) return rounded(rounded((at + 1.0) / 2.0, wide) * (double)(size - 1), wide);
  return rounded((rounded(rounded(at + 1.0, wide) * (double)size, wide) - 1.0) / 2.0, wide);
}

static double clip(double at, trv_dim size) {
  const double last = (double)(size - 1);
  return at > 0.0 ? (at < last ? at : last) : 0.0;
}

/* Folds positions beyond lo / 2 .. hi / 2 back inside. */
static double reflect(double at, double lo, double hi, int wide) {
  if (lo == hi) return 0.0;
  const double min = lo / 2.0, span = (hi - lo) / 2.0, x = fabs(at - min);
  if (!(x < 1e18)) return 0.0;
  const double extra = rounded(fmod(x, span), wide), flips = floor(x / span);
  return fmod(flips, 2.0) == 0.0 ? extra + min : span - extra + min;
}

static double padded(const trvf_grid_sample_attrs* a, double at, trv_dim size, int wide) {
  if (a->pad == TRV_GRID_PAD_BORDER) return clip(at, size);
  if (a->pad != TRV_GRID_PAD_REFLECTION) return at;
  return clip(a->align_corners ? reflect(at, 0.0, 2.0 * (double)(size - 1), wide)
                               : reflect(at, -1.0, 2.0 * (double)size - 1.0, wide),
              size);
}

/* Taps of one axis: up to four pixels (index -1: outside, counts as zero) and weights. */
static int axis_taps(const trvf_grid_sample_attrs* a, double at, trv_dim size, int wide,
                     trv_dim* index, double* weight) {
  int n = 1;
  double base, f;
  at = pixels(at, size, a->align_corners, wide);
  if (a->mode != TRV_RESIZE_MODE_CUBIC) at = padded(a, at, size, wide);
  switch (a->mode) {
    case TRV_RESIZE_MODE_NEAREST:
      base = nearbyint(at);
      weight[0] = 1.0;
      break;
    case TRV_RESIZE_MODE_LINEAR:
      n = 2;
      base = floor(at);
      f = at - base;
      weight[0] = 1.0 - f;
      weight[1] = f;
      break;
    default:
      n = 4;
      base = floor(at);
      trvk_cubic64(at - base, -0.75, weight);
      base -= 1.0;
  }
  for (int i = 0; i < n; i++) {
    double x = base + (double)i;
    if (a->mode == TRV_RESIZE_MODE_CUBIC) x = padded(a, x, size, wide);
    index[i] = x >= 0.0 && x <= (double)(size - 1) ? (trv_dim)x : -1; /* false for NaN */
  }
  return n;
}

void trvk_grid_sample__ref(const trvk_call* call, uint32_t tile) {
  const trvf_grid_sample_attrs* a = call->attrs;
  const trv_tensor *x = &call->in[0], *grid = &call->in[1], *y = &call->out[0];
  const uint32_t dtype = x->dtype;
  const int wide = dtype == TRV_DTYPE_F64;
  trv_dim begin, end;
  if (trvk_count(y) == 0) return;
  trvk_split(y->dim[0] * y->dim[2], call->tiles, tile, &begin, &end);
  for (trv_dim u = begin; u < end; u++) {
    const trv_dim n = u / y->dim[2], h = u % y->dim[2];
    for (trv_dim w = 0; w < y->dim[3]; w++) {
      double at[2], wx[4], wy[4];
      trv_dim ix[4], iy[4];
      trvk_row_load64(at,
                      trvk_at(grid->data, dtype,
                              n * grid->stride[0] + h * grid->stride[1] + w * grid->stride[2]),
                      dtype, grid->stride[3], 2);
      const int nx = axis_taps(a, at[0], x->dim[3], wide, ix, wx),
                ny = axis_taps(a, at[1], x->dim[2], wide, iy, wy);
      trvk_taps64 t;
      trvk_taps32 f;
      t.count = 0;
      for (int i = 0; i < ny; i++)
        for (int j = 0; j < nx; j++) {
          if (ix[j] < 0 || iy[i] < 0) continue;
          t.at[t.count] = iy[i] * x->stride[2] + ix[j] * x->stride[3];
          t.weight[t.count++] = wy[i] * wx[j];
        }
      const uint8_t* from = trvk_at(x->data, dtype, n * x->stride[0]);
      uint8_t* to = trvk_at(y->data, dtype, n * y->stride[0] + h * y->stride[2] + w * y->stride[3]);
      if (wide) {
        trvk_sample64(&t, from, x->stride[1], to, y->stride[1], x->dim[1]);
        continue;
      }
      f.count = t.count;
      for (trv_dim i = 0; i < t.count; i++) {
        f.at[i] = t.at[i];
        f.weight[i] = (float)t.weight[i];
      }
      trvk_sample32(&f, from, x->stride[1], to, y->stride[1], x->dim[1], dtype);
    }
  }
}
