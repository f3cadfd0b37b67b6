/* softmax.c - softmax and log-softmax along one axis. Computed in float (f16, bf16, f32) or double
 * (f64). */
#include "convert.h"
#include "vmath.h"
#include "walk.h"

typedef struct softmax_plan {
  trv_dim n, x_step, out_step; /* along the axis */
  trv_dim x_side, out_side;    /* to the neighbour softmax (columns) */
  uint32_t dtype, log;
} softmax_plan;

#define T float
#define NAME(name) name##_f32
#define NATIVE TRV_DTYPE_F32
#define LOAD trvk_load_f32
#define STORE trvk_store_f32
#define EXP trvk_exp_negative
#define LOG trvk_log
#include "softmax.inc"
#undef T
#undef NAME
#undef NATIVE
#undef LOAD
#undef STORE
#undef EXP
#undef LOG

#define T double
#define NAME(name) name##_f64
#define NATIVE TRV_DTYPE_F64
#define LOAD trvk_load_f64
#define STORE trvk_store_f64
#define EXP exp
#define LOG log
#include "softmax.inc"
#undef T
#undef NAME
#undef NATIVE
#undef LOAD
#undef STORE
#undef EXP
#undef LOG

#ifndef TRVK_VARIANT
const char* trvk_softmax_check(const trvk_call* call, int64_t* expected, int64_t* got) {
  const trv_tensor *x = call->in, *y = call->out;
  const trvf_softmax_attrs* a = call->attrs;
  if (x->dtype != y->dtype)
    return trvk_fail(TRVK_SAY("dtypes differ"), x->dtype, y->dtype, expected, got);
  if (!trvk_same_shape(x, y))
    return trvk_fail(TRVK_SAY("shapes differ"), (int64_t)trvk_count(x), (int64_t)trvk_count(y),
                     expected, got);
  if (a->axis >= x->rank)
    return trvk_fail(TRVK_SAY("no such axis"), (int64_t)x->rank - 1, a->axis, expected, got);
  return NULL;
}

uint32_t trvk_softmax_tiles(const trvk_call* call, uint32_t workers) {
  const trvf_softmax_attrs* a = call->attrs;
  const trv_dim n = trvk_count(call->out);
  return trvk_tiles(n * 4, n ? n / call->out->dim[a->axis] : 0, workers);
}
#endif

void TRVK_KERNEL(softmax)(const trvk_call* call, uint32_t tile) {
  const trv_tensor *x = call->in, *y = call->out;
  const trvf_softmax_attrs* a = call->attrs;
  const trv_dim total = trvk_count(y), size = (trv_dim)trv_dtype_size(y->dtype);
  if (total == 0) return;
  softmax_plan p = {.n = y->dim[a->axis],
                    .x_step = x->stride[a->axis],
                    .out_step = y->stride[a->axis],
                    .dtype = x->dtype,
                    .log = a->log};
  trv_dim dim[TRV_MAX_RANK], stride[2][TRV_MAX_RANK], index[TRV_MAX_RANK], at, end;
  uint32_t rank = 0;
  for (uint32_t i = 0; i < y->rank; i++) {
    if (i == a->axis) continue;
    dim[rank] = y->dim[i];
    stride[0][rank] = y->stride[i];
    stride[1][rank++] = x->stride[i];
  }
  rank = trvk_walk_plan(rank, dim, stride, 2);
  p.out_side = stride[0][rank - 1];
  p.x_side = stride[1][rank - 1];
  const int columns =
      p.n > 1 && dim[rank - 1] > 1 && trvk_magnitude(p.out_side) < trvk_magnitude(p.out_step);
  const int wide = x->dtype == TRV_DTYPE_F64;
  trvk_split(total / p.n, call->tiles, tile, &at, &end);
  trvk_walk_seek(rank, dim, at, index);
  while (at < end) {
    const uint8_t* src = x->data + trvk_walk_at(rank, index, stride[1]) * size;
    uint8_t* dst = y->data + trvk_walk_at(rank, index, stride[0]) * size;
    trv_dim n = 1;
    if (columns) {
      n = dim[rank - 1] - index[rank - 1];
      if (n > TRVK_COLS) n = TRVK_COLS;
      if (n > end - at) n = end - at;
      (wide ? softmax_columns_f64 : softmax_columns_f32)(&p, src, dst, n);
    } else {
      (wide ? softmax_row_f64 : softmax_row_f32)(&p, src, dst);
    }
    trvk_walk_step(rank - 1, dim, index, n);
    at += n;
  }
}
