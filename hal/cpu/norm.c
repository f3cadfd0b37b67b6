/* norm.c - layer, RMS and group normalisation. Computed in float (f16, bf16, f32) or double (f64).
 *
 * All three are one thing: groups of elements, each normalised by its own moments, then scaled and
 * shifted by a weight and a bias that walk along. Moments are taken around the mean in a second
 * pass, so that an offset much larger than the spread does no harm.
 */
#include "convert.h"
#include "walk.h"

enum { ON_Y = 0, ON_X = 1, ON_W = 2, ON_B = 3 };

typedef struct norm_plan { /* the axes of one group; streams ON_Y to ON_B */
  uint32_t rank, dtype, w_dtype, b_dtype, centred;
  trv_dim dim[TRV_MAX_RANK], stride[4][TRV_MAX_RANK];
  trv_dim count, size, w_size, b_size;
  trv_dim channels, side[4]; /* columns: channels of a group, strides to the next channel; the axes
                                leave it out */
  double eps;
} norm_plan;

#define T float
#define NAME(name) name##_f32
#define NATIVE TRV_DTYPE_F32
#define LOAD trvk_load_f32
#define STORE trvk_store_f32
#include "norm.inc"
#undef T
#undef NAME
#undef NATIVE
#undef LOAD
#undef STORE

#define T double
#define NAME(name) name##_f64
#define NATIVE TRV_DTYPE_F64
#define LOAD trvk_load_f64
#define STORE trvk_store_f64
#include "norm.inc"
#undef T
#undef NAME
#undef NATIVE
#undef LOAD
#undef STORE

#ifndef TRVK_VARIANT
const char* trvk_norm_check(const trvk_call* call, int64_t* expected, int64_t* got) {
  const trv_tensor *x = call->in, *y = call->out;
  const trvf_norm_attrs* a = call->attrs;
  if (a->kind >= TRV_NORM_KIND_COUNT)
    return trvk_fail(TRVK_SAY("unknown normalisation"), TRV_NORM_KIND_COUNT - 1, a->kind, expected,
                     got);
  if (x->dtype != y->dtype)
    return trvk_fail(TRVK_SAY("dtypes differ"), x->dtype, y->dtype, expected, got);
  if (!trvk_same_shape(x, y))
    return trvk_fail(TRVK_SAY("shapes differ"), (int64_t)trvk_count(x), (int64_t)trvk_count(y),
                     expected, got);
  const int group = a->kind == TRV_NORM_KIND_GROUP;
  if (group) {
    if (x->rank < 2 || a->groups == 0 || x->dim[1] % (trv_dim)a->groups != 0)
      return trvk_fail(TRVK_SAY("channels do not divide into groups"), a->groups,
                       x->rank < 2 ? 0 : x->dim[1], expected, got);
  } else if (a->axes == 0 || a->axes > x->rank) {
    return trvk_fail(TRVK_SAY("axes of a normalisation"), x->rank, a->axes, expected, got);
  }
  for (uint32_t k = 1; k < 3; k++) {
    const trv_tensor* w = trvk_opt(call, k);
    if (w == NULL) continue;
    if (!trvk_dtype_is_float(w->dtype) ||
        (w->dtype == TRV_DTYPE_F64) != (x->dtype == TRV_DTYPE_F64))
      return trvk_fail(TRVK_SAY("dtype of a weight or bias"), x->dtype, w->dtype, expected, got);
    const uint32_t rank = group ? 1 : a->axes, lead = group ? 1 : (uint32_t)x->rank - a->axes;
    if (w->rank != rank)
      return trvk_fail(TRVK_SAY("rank of a weight or bias"), rank, w->rank, expected, got);
    for (uint32_t i = 0; i < rank; i++)
      if (w->dim[i] != x->dim[lead + i])
        return trvk_fail(TRVK_SAY("size of a weight or bias"), x->dim[lead + i], w->dim[i],
                         expected, got);
  }
  return NULL;
}

uint32_t trvk_norm_tiles(const trvk_call* call, uint32_t workers) {
  const trv_tensor* x = call->in;
  const trvf_norm_attrs* a = call->attrs;
  trv_dim groups = 1;
  if (a->kind == TRV_NORM_KIND_GROUP)
    groups = x->dim[0] * (trv_dim)a->groups;
  else
    for (uint32_t i = 0; i + a->axes < x->rank; i++) groups *= x->dim[i];
  return trvk_tiles(trvk_count(x) * 2, groups, workers);
}
#endif

void TRVK_KERNEL(norm)(const trvk_call* call, uint32_t tile) {
  const trv_tensor *x = call->in, *y = call->out, *w = trvk_opt(call, 1), *b = trvk_opt(call, 2);
  const trvf_norm_attrs* a = call->attrs;
  if (trvk_count(y) == 0) return;
  norm_plan p = {
      .dtype = x->dtype, .eps = a->eps, .centred = a->kind != TRV_NORM_KIND_RMS, .count = 1};
  p.size = (trv_dim)trv_dtype_size(x->dtype);
  trv_dim outer[TRV_MAX_RANK], outer_x[TRV_MAX_RANK], outer_y[TRV_MAX_RANK],
      outer_w[TRV_MAX_RANK] = {0};
  uint32_t outer_rank = 0;
  const int group = a->kind == TRV_NORM_KIND_GROUP;
  const uint32_t lead = group ? 1 : (uint32_t)x->rank - a->axes;
  const trv_dim channels = group ? x->dim[1] / (trv_dim)a->groups : 1;
  for (uint32_t i = 0; i < lead; i++) {
    outer[outer_rank] = x->dim[i];
    outer_x[outer_rank] = x->stride[i];
    outer_y[outer_rank++] = y->stride[i];
  }
  if (group) {
    outer[outer_rank] = (trv_dim)a->groups;
    outer_x[outer_rank] = x->stride[1] * channels;
    outer_w[outer_rank] = channels;
    outer_y[outer_rank++] = y->stride[1] * channels;
  }
  /* Channels innermost in memory (channels-last) and few in a group: several groups at a time,
   * channels in columns. */
  int columns = group && channels <= TRVK_COLS && (a->groups > 1 || channels > 1);
  for (uint32_t i = 2; i < x->rank; i++)
    if (x->dim[i] > 1 && trvk_magnitude(x->stride[i]) < trvk_magnitude(x->stride[1])) columns = 0;
  for (uint32_t i = lead; i < x->rank; i++) { /* the group's axes */
    const uint32_t k = p.rank++;
    p.dim[k] = group && k == 0 ? channels : x->dim[i];
    p.stride[ON_Y][k] = y->stride[i];
    p.stride[ON_X][k] = x->stride[i];
    p.stride[ON_W][k] = w && k < w->rank ? w->stride[k] : 0;
    p.stride[ON_B][k] = b && k < b->rank ? b->stride[k] : 0;
    p.count *= p.dim[k];
  }
  if (columns) {
    p.channels = channels;
    for (uint32_t s = 0; s < 4; s++) p.side[s] = p.stride[s][0];
    p.dim[0] = 1;
  }
  if (w) p.w_dtype = w->dtype, p.w_size = (trv_dim)trv_dtype_size(w->dtype);
  if (b) p.b_dtype = b->dtype, p.b_size = (trv_dim)trv_dtype_size(b->dtype);
  p.rank = trvk_walk_plan(p.rank, p.dim, p.stride, 4);
  trv_dim groups = 1, at, end, index[TRV_MAX_RANK];
  for (uint32_t i = 0; i < outer_rank; i++) groups *= outer[i];
  trvk_split(groups, call->tiles, tile, &at, &end);
  for (trv_dim n = 1; at < end; at += n) {
    trvk_walk_seek(outer_rank, outer, at, index);
    const trv_dim c = trvk_walk_at(outer_rank, index, outer_w);
    const uint8_t* gx = x->data + trvk_walk_at(outer_rank, index, outer_x) * p.size;
    uint8_t* gy = y->data + trvk_walk_at(outer_rank, index, outer_y) * p.size;
    const uint8_t* gw = w ? w->data + (group ? c * w->stride[0] * p.w_size : 0) : NULL;
    const uint8_t* gb = b ? b->data + (group ? c * b->stride[0] * p.b_size : 0) : NULL;
    if (columns) {
      n = TRVK_COLS / channels;
      if (n > end - at) n = end - at;
      if (n > outer[outer_rank - 1] - index[outer_rank - 1])
        n = outer[outer_rank - 1] - index[outer_rank - 1];
      (x->dtype == TRV_DTYPE_F64 ? norm_columns_f64 : norm_columns_f32)(&p, gx, gy, gw, gb,
                                                                        n * channels);
      continue;
    }
    (x->dtype == TRV_DTYPE_F64 ? norm_group_f64 : norm_group_f32)(&p, gx, gy, gw, gb);
  }
}
