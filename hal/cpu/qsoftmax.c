/* qsoftmax.c - softmax of i8 along one axis, exponentials from a table. */
/* clang-format off: its macros rename what the others declare */
#include "variant.h"
/* clang-format on */
#include "gemm.h"
#include "quant.h"
#include "walk.h"

#ifndef TRVK_VARIANT
const char* trvk_qsoftmax_check(const trvk_call* call, int64_t* expected, int64_t* got) {
  const trv_tensor *x = call->in, *table = &call->in[1], *y = call->out;
  const trvf_qsoftmax_attrs* a = call->attrs;
  if (x->dtype != TRV_DTYPE_I8 || y->dtype != TRV_DTYPE_I8)
    return trvk_fail(TRVK_SAY("qsoftmax: dtype without a kernel"), TRV_DTYPE_I8,
                     x->dtype != TRV_DTYPE_I8 ? x->dtype : y->dtype, expected, got);
  if (!trvk_same_shape(x, y))
    return trvk_fail(TRVK_SAY("qsoftmax: shapes differ"), x->rank, y->rank, expected, got);
  if (a->axis >= x->rank)
    return trvk_fail(TRVK_SAY("qsoftmax: no such axis"), (int64_t)x->rank - 1, a->axis, expected,
                     got);
  if (table->dtype != TRV_DTYPE_I32 || table->rank != 1 || table->dim[0] != 256 ||
      table->stride[0] != 1)
    return trvk_fail(TRVK_SAY("qsoftmax: the table is 256 int32 in a row"), 256,
                     table->rank ? table->dim[0] : 0, expected, got);
  if (!trvk_fits(TRV_DTYPE_I8, a->y_zero) || !trvk_bounds_ok(TRV_DTYPE_I8, a->lo, a->hi))
    return trvk_fail(TRVK_SAY("qsoftmax: zero point or bounds"), INT8_MAX, a->hi, expected, got);
  return trvk_out_check(y, expected, got);
}

uint32_t trvk_qsoftmax_tiles(const trvk_call* call, uint32_t workers) {
  const trvf_qsoftmax_attrs* a = call->attrs;
  const trv_dim n = trvk_count(call->out);
  return trvk_tiles(n * 8, n ? n / call->out->dim[a->axis] : 0, workers);
}
#endif

/* y may be x: every element is read for the last time just before it is written. */
static void qsoftmax_row(const trvf_qsoftmax_attrs* a, const int32_t* table, trv_dim n,
                         const int8_t* x, trv_dim x_step, int8_t* y, trv_dim y_step) {
  int32_t most = INT8_MIN;
  int64_t sum = 0;
  for (trv_dim i = 0; i < n; i++) most = x[i * x_step] > most ? x[i * x_step] : most;
  /* & 255: inside the table even when a hostile plan writes over x meanwhile */
  for (trv_dim i = 0; i < n; i++) sum = trvk_add64(sum, table[(most - x[i * x_step]) & 255]);
  for (trv_dim i = 0; i < n; i++)
    y[i * y_step] =
        (int8_t)trvk_stored(trvk_divide((int64_t)table[(most - x[i * x_step]) & 255] * 256, sum),
                            a->y_zero, a->lo, a->hi);
}

void TRVK_KERNEL(qsoftmax)(const trvk_call* call, uint32_t tile) {
  const trv_tensor *x = call->in, *y = call->out;
  const trvf_qsoftmax_attrs* a = call->attrs;
  const int32_t* table = (const int32_t*)(const void*)call->in[1].data;
  const trv_dim total = trvk_count(y);
  if (total == 0) return;
  trv_dim dim[TRV_MAX_RANK], stride[2][TRV_MAX_RANK], index[TRV_MAX_RANK], at, end;
  uint32_t rank = 0;
  for (uint32_t i = 0; i < y->rank; i++) {
    if (i == a->axis) continue;
    dim[rank] = y->dim[i];
    stride[0][rank] = y->stride[i];
    stride[1][rank++] = x->stride[i];
  }
  rank = trvk_walk_plan(rank, dim, stride, 2);
  trvk_split(total / y->dim[a->axis], call->tiles, tile, &at, &end);
  trvk_walk_seek(rank, dim, at, index);
  for (; at < end; at++) {
    qsoftmax_row(a, table, y->dim[a->axis],
                 (const int8_t*)x->data + trvk_walk_at(rank, index, stride[1]), x->stride[a->axis],
                 (int8_t*)y->data + trvk_walk_at(rank, index, stride[0]), y->stride[a->axis]);
    trvk_walk_step(rank - 1, dim, index, 1);
  }
}
