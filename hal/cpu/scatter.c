/* scatter.c - writes, or combines, rows (take) or elements (elements) named by an index value.
 *
 * Updates are applied one after the other in row-major order of the index, so that of several
 * writes to one place the last one wins, always. The output starts as a copy of x, or is x's
 * storage.
 */
#include "convert.h"
#include "map.h"
#include "walk.h"

enum { CHUNK = 128 };

TRV_API size_t trvk_scatter_tmp_bytes(uint32_t reduce, int64_t count) {
  return reduce == TRV_SCATTER_REDUCE_MEAN && count > 0 ? (size_t)count * 4 : 0;
}

const char* trvk_scatter_check(const trvk_call* call, int64_t* expected, int64_t* got) {
  const trv_tensor *x = call->in, *index = call->in + 1, *u = call->in + 2, *y = call->out;
  const trvf_scatter_attrs* a = call->attrs;
  if (a->kind >= TRV_INDEX_KIND_COUNT || a->reduce >= TRV_SCATTER_REDUCE_COUNT)
    return trvk_fail(TRVK_SAY("unknown scatter"), TRV_SCATTER_REDUCE_COUNT - 1, a->reduce, expected,
                     got);
  if (x->dtype != y->dtype || u->dtype != y->dtype)
    return trvk_fail(TRVK_SAY("dtypes differ"), x->dtype,
                     x->dtype != y->dtype ? y->dtype : u->dtype, expected, got);
  if (index->dtype < TRV_DTYPE_U8 || index->dtype > TRV_DTYPE_I64)
    return trvk_fail(TRVK_SAY("an index must be an integer"), TRV_DTYPE_I64, index->dtype, expected,
                     got);
  if (a->axis >= x->rank)
    return trvk_fail(TRVK_SAY("no such axis"), (int64_t)x->rank - 1, a->axis, expected, got);
  if (!trvk_same_shape(x, y))
    return trvk_fail(TRVK_SAY("shapes differ"), (int64_t)trvk_count(x), (int64_t)trvk_count(y),
                     expected, got);
  if (a->kind == TRV_INDEX_KIND_TAKE) {
    if (x->rank - 1u + index->rank != u->rank)
      return trvk_fail(TRVK_SAY("rank of a scatter's updates"), x->rank - 1 + index->rank, u->rank,
                       expected, got);
    for (uint32_t i = 0; i < u->rank; i++) {
      const trv_dim want = i < a->axis                           ? x->dim[i]
                           : i < a->axis + (uint32_t)index->rank ? index->dim[i - a->axis]
                                                                 : x->dim[i - index->rank + 1];
      if (u->dim[i] != want)
        return trvk_fail(TRVK_SAY("size of a scatter's updates"), want, u->dim[i], expected, got);
    }
  } else {
    if (x->rank != index->rank || x->rank != u->rank)
      return trvk_fail(TRVK_SAY("rank of an index"), x->rank, index->rank, expected, got);
    for (uint32_t i = 0; i < x->rank; i++)
      if (index->dim[i] > u->dim[i] || (i != a->axis && index->dim[i] > x->dim[i]))
        return trvk_fail(TRVK_SAY("an index is larger than its updates or input"), x->dim[i],
                         index->dim[i], expected, got);
  }
  if (x->dim[a->axis] == 0 && trvk_count(index) > 0 && trvk_count(u) > 0)
    return trvk_fail(TRVK_SAY("an index into nothing"), 1, 0, expected, got);
  const size_t need = trvk_scatter_tmp_bytes(a->reduce, (int64_t)trvk_count(y));
  const size_t have = call->n_tmp ? (size_t)call->tmp[0].dim[0] : 0;
  if (have < need)
    return trvk_fail(TRVK_SAY("scratch too small"), (int64_t)need, (int64_t)have, expected, got);
  if (need && (((uintptr_t)call->tmp[0].data & 3) || call->tmp[0].stride[0] != 1))
    return trvk_fail(TRVK_SAY("scratch must be dense and aligned"), 1,
                     (int64_t)call->tmp[0].stride[0], expected, got);
  return NULL;
}

uint32_t trvk_scatter_tiles(const trvk_call* call, uint32_t workers) {
  (void)call;
  (void)workers;
  return 1; /* updates may meet */
}

typedef struct scatter_plan {
  const trvk_call* call;
  uint32_t rank, dtype, op;
  trv_dim dim[TRV_MAX_RANK],
      stride[5][TRV_MAX_RANK]; /* order, index, updates, output, counts (dense output) */
  trv_dim axis_step, count_step;
  int64_t size;
} scatter_plan;

/* Combines n outputs with n updates. */
static void combine(const scatter_plan* p, uint8_t* dst, trv_dim dst_step, const uint8_t* src,
                    trv_dim src_step, trv_dim n) {
  union {
    double d;
    float f;
    int64_t i;
    uint8_t b[CHUNK * 8];
  } old, new;
  const trv_dim width = (trv_dim)trv_dtype_size(p->dtype);
  for (trv_dim i = 0; i < n; i += CHUNK) {
    const trv_dim m = n - i < CHUNK ? n - i : CHUNK;
    uint8_t* d = dst + i * dst_step * width;
    const uint8_t* s = src + i * src_step * width;
    if (p->op == TRV_MAP_OP_LOAD) { /* plain write */
      trvk_load(&new, s, p->dtype, 1, 0, m, src_step);
      trvk_store(d, &new, p->dtype, 1, 0, m, dst_step);
      continue;
    }
    trvk_load(&old, d, p->dtype, 1, 0, m, dst_step);
    trvk_load(&new, s, p->dtype, 1, 0, m, src_step);
    switch (trvk_work(p->dtype)) {
      case TRVK_WORK_BOOL:
        trvk_map_bool(p->op, &old, &old, &new, NULL, m);
        break;
      case TRVK_WORK_I32:
        trvk_map_i32(p->op, &old, &old, &new, NULL, m);
        break;
      case TRVK_WORK_I64:
        trvk_map_i64(p->op, &old, &old, &new, NULL, m);
        break;
      case TRVK_WORK_F32:
        trvk_map_f32(p->op, &old, &old, &new, NULL, m);
        break;
      default:
        trvk_map_f64(p->op, &old, &old, &new, NULL, m);
        break;
    }
    trvk_store(d, &old, p->dtype, 1, 0, m, dst_step);
  }
}

/* The value that a reduction starts from where the old element takes no part, n times. */
static void neutral(const scatter_plan* p, uint8_t* dst, trv_dim dst_step, trv_dim n) {
  static const int64_t least[TRV_DTYPE_COUNT] = {0,         0, 0, INT8_MIN, INT16_MIN, INT32_MIN,
                                                 INT64_MIN, 0, 0, 0,        0};
  static const int64_t most[TRV_DTYPE_COUNT] = {0,         1, 255, INT8_MAX, INT16_MAX, INT32_MAX,
                                                INT64_MAX, 0, 0,   0,        0};
  const trvf_scatter_attrs* a = p->call->attrs;
  const int up = a->reduce == TRV_SCATTER_REDUCE_MIN, down = a->reduce == TRV_SCATTER_REDUCE_MAX;
  const double real = a->reduce == TRV_SCATTER_REDUCE_PROD ? 1
                      : up                                 ? (double)INFINITY
                      : down                               ? -(double)INFINITY
                                                           : 0;
  const int64_t whole = a->reduce == TRV_SCATTER_REDUCE_PROD ? 1
                        : up                                 ? most[p->dtype]
                        : down                               ? least[p->dtype]
                                                             : 0;
  union {
    double d;
    float f;
    int64_t i;
    uint8_t b[8];
  } one;
  if (trvk_dtype_is_float(p->dtype))
    trvk_cast(&one, p->dtype, &real, TRV_DTYPE_F64, 1);
  else
    trvk_cast(&one, p->dtype, &whole, TRV_DTYPE_I64, 1);
  for (trv_dim i = 0; i < n; i++)
    trvk_store(dst + i * dst_step * (trv_dim)trv_dtype_size(p->dtype), &one, p->dtype, 1, 0, 1, 1);
}

enum { APPLY, START, COUNT };

/* n elements with an index each, in order: writes, and sums of the common dtypes. Returns 0 for the
 * rest. */
#define EACH(T, assign)                                                       \
  {                                                                           \
    T* d = (T*)(void*)dst;                                                    \
    const T* s = (const T*)(const void*)src;                                  \
    for (trv_dim i = 0; i < n; i++)                                           \
      d[i * dst_step + (trv_dim)at[i] * p->axis_step] assign s[i * src_step]; \
    return 1;                                                                 \
  }
static int apply_each(const scatter_plan* p, uint8_t* dst, trv_dim dst_step, const uint8_t* src,
                      trv_dim src_step, const int64_t* at, trv_dim n) {
  if (p->op == TRV_MAP_OP_ADD) {
    switch (p->dtype) {
      case TRV_DTYPE_F32:
        EACH(float, +=)
      case TRV_DTYPE_F64:
        EACH(double, +=)
      case TRV_DTYPE_I32:
        EACH(uint32_t, +=)
      case TRV_DTYPE_I64:
        EACH(uint64_t, +=)
      default:
        return 0;
    }
  }
  if (p->op != TRV_MAP_OP_LOAD) return 0;
  switch (trv_dtype_size(p->dtype)) {
    case 1:
      EACH(uint8_t, =)
    case 2:
      EACH(uint16_t, =)
    case 4:
      EACH(uint32_t, =)
    default:
      EACH(uint64_t, =)
  }
}

/* One pass over the index. APPLY: the updates; START: neutral values where updates will come;
 * COUNT: how many come. */
static void scatter_pass(const scatter_plan* p, int what) {
  const trv_tensor *index = p->call->in + 1, *u = p->call->in + 2, *y = p->call->out;
  const trv_dim width = (trv_dim)trv_dtype_size(p->dtype);
  const uint32_t last = p->rank - 1;
  uint32_t* counts = p->call->n_tmp ? (uint32_t*)(void*)p->call->tmp[0].data : NULL;
  trv_dim where[TRV_MAX_RANK] = {0}, total = 1;
  for (uint32_t i = 0; i < p->rank; i++) total *= p->dim[i];
  for (trv_dim done = 0; done < total;) {
    const int row = p->stride[1][last] == 0; /* its elements share an index */
    const trv_dim left = p->dim[last] - where[last], n = row || left < CHUNK ? left : CHUNK;
    int64_t at[CHUNK];
    const int bad = trvk_load_indices(at, index, trvk_walk_at(p->rank, where, p->stride[1]),
                                      p->stride[1][last], row ? 1 : n, p->size);
    const trv_dim to = trvk_walk_at(p->rank, where, p->stride[3]), dst_step = p->stride[3][last];
    const uint8_t* src = u->data + trvk_walk_at(p->rank, where, p->stride[2]) * width;
    const trv_dim src_step = p->stride[2][last], c = trvk_walk_at(p->rank, where, p->stride[4]);
    if (bad) { /* nothing of a block with a bad index is applied: the run fails anyhow */
      trvk_raise(p->call, TRVK_FAULT_INDEX);
    } else if (row || what != APPLY ||
               !apply_each(p, y->data + to * width, dst_step, src, src_step, at, n)) {
      const trv_dim count = row ? n : 1; /* elements at a time */
      for (trv_dim i = 0; i < n; i += count) {
        const trv_dim v = (trv_dim)at[row ? 0 : i];
        uint8_t* d = y->data + (to + i * dst_step + v * p->axis_step) * width;
        if (what == APPLY)
          combine(p, d, dst_step, src + i * src_step * width, src_step, count);
        else if (what == START)
          neutral(p, d, dst_step, count);
        else
          for (trv_dim k = i; k < i + count; k++)
            counts[c + k * p->stride[4][last] + v * p->count_step]++;
      }
    }
    trvk_walk_step(last, p->dim, where, n);
    done += n;
  }
}

/* Sums over counts; integers round down, as torch's scatter_reduce. */
static void divide(const scatter_plan* p, int64_t base) {
  const trv_tensor* y = p->call->out;
  const uint32_t* counts = (const uint32_t*)(const void*)p->call->tmp[0].data;
  const trv_dim n = trvk_count(y), width = (trv_dim)trv_dtype_size(p->dtype);
  for (trv_dim i = 0; i < n; i++) {
    const int64_t count = (int64_t)counts[i] + base;
    uint8_t* d = y->data + trvk_offset(y->rank, y->dim, y->stride, i) * width;
    if (counts[i] == 0) continue;
    if (trvk_dtype_is_float(p->dtype)) {
      double v;
      float f;
      trvk_load_f64(&v, d, p->dtype, 1, 1);
      v /= (double)count;
      f = (float)v;
      if (p->dtype == TRV_DTYPE_F64)
        trvk_store(d, &v, p->dtype, 1, 0, 1, 1);
      else
        trvk_store_f32(d, &f, p->dtype, 1, 1);
    } else {
      int64_t v;
      trvk_load_i64(&v, d, p->dtype, 1, 1);
      const int64_t q = v / count;
      v = v % count < 0 ? q - 1 : q;
      trvk_store_i64(d, &v, p->dtype, 1, 1);
    }
  }
}

void trvk_scatter__ref(const trvk_call* call, uint32_t tile) {
  const trv_tensor *x = call->in, *index = call->in + 1, *u = call->in + 2, *y = call->out;
  const trvf_scatter_attrs* a = call->attrs;
  static const uint8_t ops[TRV_SCATTER_REDUCE_COUNT] = {TRV_MAP_OP_LOAD, TRV_MAP_OP_ADD,
                                                        TRV_MAP_OP_MUL,  TRV_MAP_OP_MAX,
                                                        TRV_MAP_OP_MIN,  TRV_MAP_OP_ADD};
  if (tile != 0 || trvk_count(y) == 0) return;
  if (x->data != y->data || memcmp(x->stride, y->stride, sizeof(trv_dim) * x->rank) != 0) {
    trvk_call copy = *call;
    copy.n_in = 1;
    copy.tiles = 1;
    trvk_copy__ref(&copy, 0);
  }
  const int take = a->kind == TRV_INDEX_KIND_TAKE;
  scatter_plan p = {
      .call = call, .dtype = y->dtype, .op = ops[a->reduce], .size = (int64_t)x->dim[a->axis]};
  trv_dim dense[TRV_MAX_RANK], step = 1;
  for (uint32_t i = y->rank; i-- > 0; step *= y->dim[i]) dense[i] = step;
  p.axis_step = y->stride[a->axis];
  p.count_step = dense[a->axis];
  const uint32_t rank = take ? u->rank : index->rank;
  trv_dim order = 1;
  for (uint32_t i = rank; i-- > 0;) {
    const uint32_t k = i - a->axis;
    p.dim[i] = take ? u->dim[i] : index->dim[i];
    if (p.dim[i] == 0) return;
    p.stride[0][i] = order; /* the order that must be kept */
    order *= p.dim[i];
    p.stride[2][i] = u->stride[i];
    if (!take) {
      p.stride[1][i] = index->stride[i];
      p.stride[3][i] = i == a->axis ? 0 : y->stride[i];
      p.stride[4][i] = i == a->axis ? 0 : dense[i];
    } else if (i >= a->axis && k < index->rank) {
      p.stride[1][i] = index->stride[k];
    } else {
      const uint32_t axis = i < a->axis ? i : i - index->rank + 1;
      p.stride[3][i] = y->stride[axis];
      p.stride[4][i] = dense[axis];
    }
  }
  p.rank = trvk_walk_plan(rank, p.dim, p.stride, 5);
  if (p.dim[p.rank - 1] == 1) p.stride[1][p.rank - 1] = 0;
  if (a->reduce != TRV_SCATTER_REDUCE_NONE && !a->include_self) scatter_pass(&p, START);
  scatter_pass(&p, APPLY);
  if (a->reduce == TRV_SCATTER_REDUCE_MEAN) {
    memset(call->tmp[0].data, 0, trvk_scatter_tmp_bytes(a->reduce, (int64_t)trvk_count(y)));
    scatter_pass(&p, COUNT);
    divide(&p, a->include_self ? 1 : 0);
  }
}
