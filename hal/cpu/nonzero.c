/* nonzero.c - the two kernels whose results are dimensions: positions of non-zero elements, and a
 * scalar as a size. */
#include "convert.h"
#include "walk.h"

enum { CHUNK = 128 };

/* ---- nonzero
 * ---------------------------------------------------------------------------------------------------------
 */

/* The output's first size is how many rows it has room for (the driver sets it: the dimension is
 * not known yet). */
const char* trvk_nonzero_check(const trvk_call* call, int64_t* expected, int64_t* got) {
  const trv_tensor *x = call->in, *y = call->out;
  if (y->dtype != TRV_DTYPE_I64)
    return trvk_fail(TRVK_SAY("positions must be i64"), TRV_DTYPE_I64, y->dtype, expected, got);
  if (y->rank != 2 || y->dim[1] != (trv_dim)x->rank)
    return trvk_fail(TRVK_SAY("shape of nonzero's output"), x->rank,
                     y->rank == 2 ? y->dim[1] : y->rank, expected, got);
  if (y->dim[1] > 0 && (y->stride[1] < 1 || y->stride[0] < (y->dim[1] - 1) * y->stride[1] + 1))
    return trvk_fail(TRVK_SAY("nonzero's output must be in row order"), y->dim[1], y->stride[0],
                     expected, got);
  return NULL;
}

uint32_t trvk_nonzero_tiles(const trvk_call* call, uint32_t workers) {
  (void)call;
  (void)workers;
  return 1;
}

static int is_set(const void* work, uint32_t dtype, trv_dim i) {
  switch (trvk_work(dtype)) {
    case TRVK_WORK_BOOL:
      return ((const uint8_t*)work)[i] != 0;
    case TRVK_WORK_I32:
      return ((const int32_t*)work)[i] != 0;
    case TRVK_WORK_I64:
      return ((const int64_t*)work)[i] != 0;
    case TRVK_WORK_F32:
      return ((const float*)work)[i] != 0.0f;
    default:
      return ((const double*)work)[i] != 0.0;
  }
}

/* Writes a data-dependent dimension if it is in its range; raises the fault if not. */
static void set_dim(const trvk_call* call, uint32_t row, int64_t value) {
  const trvf_dim* d = &call->dim_table[row];
  const int64_t most = (int64_t)(PTRDIFF_MAX < d->max ? (int64_t)PTRDIFF_MAX : d->max);
  if (value < d->min || value > most || value < 0) {
    trvk_raise(call, TRVK_FAULT_DIM);
    return;
  }
  call->dims[row] = (trv_dim)value;
}

void trvk_nonzero__ref(const trvk_call* call, uint32_t tile) {
  const trv_tensor *x = call->in, *y = call->out;
  const trvf_nonzero_attrs* a = call->attrs;
  const trv_dim total = trvk_count(x), size = (trv_dim)trv_dtype_size(x->dtype);
  const trv_dim room = y->dim[0];
  trv_dim found = 0, index[TRV_MAX_RANK] = {0}, one[1] = {1}, none[1] = {0};
  if (tile != 0) return;
  const uint32_t rank = x->rank ? x->rank : 1, last = rank - 1;
  const trv_dim *dim = x->rank ? x->dim : one, *stride = x->rank ? x->stride : none;
  union {
    double d;
    float f;
    int64_t i;
    uint8_t b[CHUNK * 8];
  } work;
  for (trv_dim done = 0; done < total;) {
    const trv_dim left = dim[last] - index[last], n = left < CHUNK ? left : CHUNK;
    trvk_load(&work, x->data + trvk_walk_at(rank, index, stride) * size, x->dtype, 1, 0, n,
              stride[last]);
    for (trv_dim i = 0; i < n; i++) {
      if (!is_set(&work, x->dtype, i)) continue;
      if (found < room) {
        int64_t* row = (int64_t*)(void*)y->data + found * y->stride[0];
        for (uint32_t k = 0; k < x->rank; k++)
          row[(trv_dim)k * y->stride[1]] = (int64_t)(index[k] + (k == last ? i : 0));
      }
      found++;
    }
    trvk_walk_step(last, dim, index, n);
    done += n;
  }
  if (found > room)
    trvk_raise(call, TRVK_FAULT_DIM);
  else
    set_dim(call, a->dim, (int64_t)found);
}

/* ---- item
 * -------------------------------------------------------------------------------------------------------------
 */
const char* trvk_item_check(const trvk_call* call, int64_t* expected, int64_t* got) {
  const trv_tensor* x = call->in;
  if (trvk_dtype_is_float(x->dtype))
    return trvk_fail(TRVK_SAY("a size must be an integer"), TRV_DTYPE_I64, x->dtype, expected, got);
  if (trvk_count(x) != 1)
    return trvk_fail(TRVK_SAY("a size must be one element"), 1, trvk_count(x), expected, got);
  return NULL;
}

uint32_t trvk_item_tiles(const trvk_call* call, uint32_t workers) {
  (void)call;
  (void)workers;
  return 1;
}

void trvk_item__ref(const trvk_call* call, uint32_t tile) {
  const trvf_item_attrs* a = call->attrs;
  int64_t value;
  if (tile != 0) return;
  trvk_load_i64(&value, call->in->data, call->in->dtype, 1, 1);
  set_dim(call, a->dim, value);
}
