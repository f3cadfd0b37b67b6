/* scan.c - running sum, product, maximum, minimum along one axis. Floats are accumulated in double,
 * as torch does; integers wrap; NaN, once met, stays. */
#include "convert.h"
#include "walk.h"

enum { CHUNK = 256 };

const char* trvk_scan_check(const trvk_call* call, int64_t* expected, int64_t* got) {
  const trv_tensor *x = call->in, *y = call->out;
  const trvf_scan_attrs* a = call->attrs;
  if (a->kind >= TRV_SCAN_KIND_COUNT)
    return trvk_fail(TRVK_SAY("unknown scan"), TRV_SCAN_KIND_COUNT - 1, a->kind, expected, got);
  if (!trvk_same_shape(x, y))
    return trvk_fail(TRVK_SAY("shapes differ"), (int64_t)trvk_count(x), (int64_t)trvk_count(y),
                     expected, got);
  if (a->axis >= x->rank)
    return trvk_fail(TRVK_SAY("no such axis"), (int64_t)x->rank - 1, a->axis, expected, got);
  const int whole = !trvk_dtype_is_float(x->dtype) && !trvk_dtype_is_float(y->dtype);
  if (x->dtype != y->dtype && !(whole && a->kind <= TRV_SCAN_KIND_PROD))
    return trvk_fail(TRVK_SAY("dtypes differ"), x->dtype, y->dtype, expected, got);
  return NULL;
}

uint32_t trvk_scan_tiles(const trvk_call* call, uint32_t workers) {
  const trvf_scan_attrs* a = call->attrs;
  const trv_dim n = trvk_count(call->out);
  return trvk_tiles(n * 2, n ? n / call->out->dim[a->axis] : 0, workers);
}

/* v[i] = the scan up to i, from acc on; exclusive: up to i - 1. */
#define SCAN(expression)              \
  for (trv_dim i = 0; i < n; i++) {   \
    const double x = v[i];            \
    const double next = (expression); \
    v[i] = exclusive ? acc : next;    \
    acc = next;                       \
  }                                   \
  break;
static double scan_f64(double* v, trv_dim n, uint32_t kind, int exclusive, double acc) {
  switch (kind) {
    case TRV_SCAN_KIND_SUM:
      SCAN(acc + x)
    case TRV_SCAN_KIND_PROD:
      SCAN(acc * x)
    case TRV_SCAN_KIND_MAX:
      SCAN(acc != acc ? acc : (x <= acc ? acc : x))
    default:
      SCAN(acc != acc ? acc : (x >= acc ? acc : x))
  }
  return acc;
}
#undef SCAN
#define SCAN(expression)                        \
  for (trv_dim i = 0; i < n; i++) {             \
    const int64_t x = v[i];                     \
    const int64_t next = (int64_t)(expression); \
    v[i] = exclusive ? acc : next;              \
    acc = next;                                 \
  }                                             \
  break;
static int64_t scan_i64(int64_t* v, trv_dim n, uint32_t kind, int exclusive, int64_t acc) {
  switch (kind) {
    case TRV_SCAN_KIND_SUM:
      SCAN((uint64_t)acc + (uint64_t)x)
    case TRV_SCAN_KIND_PROD:
      SCAN((uint64_t)acc * (uint64_t)x)
    case TRV_SCAN_KIND_MAX:
      SCAN(x > acc ? x : acc)
    default:
      SCAN(x < acc ? x : acc)
  }
  return acc;
}

/* One lane of n elements. */
static void scan_lane(const trvf_scan_attrs* a, const uint8_t* src, uint32_t from, trv_dim src_step,
                      uint8_t* dst, uint32_t to, trv_dim dst_step, trv_dim n) {
  const trv_dim src_size = (trv_dim)trv_dtype_size(from), dst_size = (trv_dim)trv_dtype_size(to);
  union {
    double real[CHUNK];
    int64_t whole[CHUNK];
  } v;
  float single[CHUNK];
  static const double first_real[] = {0, 1, -INFINITY, INFINITY};
  static const int64_t first_whole[] = {0, 1, INT64_MIN, INT64_MAX};
  double real = first_real[a->kind];
  int64_t whole = first_whole[a->kind];
  for (trv_dim i = 0; i < n; i += CHUNK) {
    const trv_dim m = n - i < CHUNK ? n - i : CHUNK;
    const uint8_t* s = src + i * src_step * src_size;
    uint8_t* d = dst + i * dst_step * dst_size;
    if (!trvk_dtype_is_float(from)) {
      trvk_load_i64(v.whole, s, from, src_step, m);
      whole = scan_i64(v.whole, m, a->kind, a->exclusive, whole);
      trvk_store_i64(d, v.whole, to, dst_step, m);
      continue;
    }
    trvk_load_f64(v.real, s, from, src_step, m);
    real = scan_f64(v.real, m, a->kind, a->exclusive, real);
    if (to == TRV_DTYPE_F64) {
      trvk_store(d, v.real, to, 1, 0, m, dst_step);
    } else {
      for (trv_dim k = 0; k < m; k++) single[k] = (float)v.real[k];
      trvk_store_f32(d, single, to, dst_step, m);
    }
  }
}

void trvk_scan__ref(const trvk_call* call, uint32_t tile) {
  const trv_tensor *x = call->in, *y = call->out;
  const trvf_scan_attrs* a = call->attrs;
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
  const trv_dim n = y->dim[a->axis];
  trvk_split(total / n, call->tiles, tile, &at, &end);
  for (; at < end; at++) {
    trvk_walk_seek(rank, dim, at, index);
    scan_lane(a, x->data + trvk_walk_at(rank, index, stride[1]) * (trv_dim)trv_dtype_size(x->dtype),
              x->dtype, x->stride[a->axis],
              y->data + trvk_walk_at(rank, index, stride[0]) * (trv_dim)trv_dtype_size(y->dtype),
              y->dtype, y->stride[a->axis], n);
  }
}
