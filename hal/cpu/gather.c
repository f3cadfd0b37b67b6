/* gather.c - reads rows (take) or elements (elements) named by an index value.
 *
 * Both kinds are one walk over the output with three streams: the output, the index, and the input
 * with the gathered axis left out, which the index value then adds. Where the index does not change
 * along the innermost axis, whole rows move.
 */
#include "convert.h"
#include "walk.h"

static int is_index(uint32_t dtype) { return dtype >= TRV_DTYPE_U8 && dtype <= TRV_DTYPE_I64; }

const char* trvk_gather_check(const trvk_call* call, int64_t* expected, int64_t* got) {
  const trv_tensor *x = call->in, *index = call->in + 1, *y = call->out;
  const trvf_gather_attrs* a = call->attrs;
  if (a->kind >= TRV_INDEX_KIND_COUNT)
    return trvk_fail(TRVK_SAY("unknown gather"), TRV_INDEX_KIND_COUNT - 1, a->kind, expected, got);
  if (x->dtype != y->dtype)
    return trvk_fail(TRVK_SAY("dtypes differ"), x->dtype, y->dtype, expected, got);
  if (!is_index(index->dtype))
    return trvk_fail(TRVK_SAY("an index must be an integer"), TRV_DTYPE_I64, index->dtype, expected,
                     got);
  if (a->axis >= x->rank)
    return trvk_fail(TRVK_SAY("no such axis"), (int64_t)x->rank - 1, a->axis, expected, got);
  if (a->kind == TRV_INDEX_KIND_TAKE) {
    if (x->rank - 1u + index->rank != y->rank)
      return trvk_fail(TRVK_SAY("rank of a gather's output"), x->rank - 1 + index->rank, y->rank,
                       expected, got);
    for (uint32_t i = 0; i < y->rank; i++) {
      const trv_dim want = i < a->axis                           ? x->dim[i]
                           : i < a->axis + (uint32_t)index->rank ? index->dim[i - a->axis]
                                                                 : x->dim[i - index->rank + 1];
      if (y->dim[i] != want)
        return trvk_fail(TRVK_SAY("size of a gather's output"), want, y->dim[i], expected, got);
    }
  } else {
    if (x->rank != index->rank)
      return trvk_fail(TRVK_SAY("rank of an index"), x->rank, index->rank, expected, got);
    if (!trvk_same_shape(index, y))
      return trvk_fail(TRVK_SAY("shape of a gather's output"), (int64_t)trvk_count(index),
                       (int64_t)trvk_count(y), expected, got);
    for (uint32_t i = 0; i < x->rank; i++)
      if (i != a->axis && index->dim[i] > x->dim[i])
        return trvk_fail(TRVK_SAY("an index is larger than its input"), x->dim[i], index->dim[i],
                         expected, got);
  }
  if (x->dim[a->axis] == 0 && trvk_count(y) > 0)
    return trvk_fail(TRVK_SAY("an index into nothing"), 1, 0, expected, got);
  return NULL;
}

uint32_t trvk_gather_tiles(const trvk_call* call, uint32_t workers) {
  const trv_dim n = trvk_count(call->out);
  return trvk_tiles(n, n / 256, workers);
}

enum { CHUNK = 128 };

/* dst[i] = src[i][at[i]] */
#define ELEMENTS(T)                                                   \
  {                                                                   \
    T* d = (T*)(void*)dst;                                            \
    const T* s = (const T*)(const void*)src;                          \
    for (trv_dim i = 0; i < n; i++)                                   \
      d[i * steps[0]] = s[i * steps[2] + (trv_dim)at[i] * axis_step]; \
    break;                                                            \
  }

void trvk_gather__ref(const trvk_call* call, uint32_t tile) {
  const trv_tensor *x = call->in, *index = call->in + 1, *y = call->out;
  const trvf_gather_attrs* a = call->attrs;
  const trv_dim total = trvk_count(y), width = (trv_dim)trv_dtype_size(y->dtype),
                axis_step = x->stride[a->axis];
  const int64_t size = (int64_t)x->dim[a->axis];
  if (total == 0) return;
  trv_dim dim[TRV_MAX_RANK], stride[3][TRV_MAX_RANK] = {{0}}, where[TRV_MAX_RANK], begin, end;
  for (uint32_t i = 0; i < y->rank; i++) { /* streams: output, index, input */
    const uint32_t k = i - a->axis;
    dim[i] = y->dim[i];
    stride[0][i] = y->stride[i];
    if (a->kind == TRV_INDEX_KIND_ELEMENTS) {
      stride[1][i] = index->stride[i];
      stride[2][i] = i == a->axis ? 0 : x->stride[i];
    } else if (i >= a->axis && k < index->rank) {
      stride[1][i] = index->stride[k];
    } else {
      stride[2][i] = x->stride[i < a->axis ? i : i - index->rank + 1];
    }
  }
  const uint32_t rank = trvk_walk_plan(y->rank, dim, stride, 3), last = rank - 1;
  const trv_dim steps[3] = {stride[0][last], stride[1][last], stride[2][last]};
  int bad = 0;
  trvk_split(total, call->tiles, tile, &begin, &end);
  trvk_walk_seek(rank, dim, begin, where);
  while (begin < end) {
    const int row = steps[1] == 0 && steps[0] == 1 && steps[2] == 1;
    int64_t at[CHUNK];
    trv_dim n = dim[last] - where[last];
    if (n > end - begin) n = end - begin;
    if (!row && n > CHUNK) n = CHUNK;
    bad |= trvk_load_indices(at, index, trvk_walk_at(rank, where, stride[1]), steps[1], row ? 1 : n,
                             size);
    uint8_t* dst = y->data + trvk_walk_at(rank, where, stride[0]) * width;
    const uint8_t* src = x->data + trvk_walk_at(rank, where, stride[2]) * width;
    if (row) {
      trvk_move(dst, src + (trv_dim)at[0] * axis_step * width, (size_t)(n * width));
    } else {
      switch (width) {
        case 1:
          ELEMENTS(uint8_t)
        case 2:
          ELEMENTS(uint16_t)
        case 4:
          ELEMENTS(uint32_t)
        default:
          ELEMENTS(uint64_t)
      }
    }
    trvk_walk_step(last, dim, where, n);
    begin += n;
  }
  if (bad) trvk_raise(call, TRVK_FAULT_INDEX);
}
