/* sort.c - sorts along one axis: values and positions, or the first k of them. Stable; NaN is the
 * largest.
 *
 * Elements become unsigned keys whose order is the wanted one, and a radix sort moves (key,
 * position) pairs between two buffers in scratch: linear time, stable by nature, the same for all
 * dtypes. Short lanes use insertion.
 */
#include "convert.h"
#include "ops.h"
#include "walk.h"

typedef struct wide_pair {
  uint64_t key, at;
} wide_pair;

TRV_API size_t trvk_sort_tmp_bytes(uint32_t dtype, int64_t n) {
  return n <= 1 ? 0 : (size_t)n * (trv_dtype_size(dtype) == 8 ? 32 : 16);
}

const char* trvk_sort_check(const trvk_call* call, int64_t* expected, int64_t* got) {
  const trv_tensor *x = call->in, *v = call->out, *index = call->out + 1;
  const trvf_sort_attrs* a = call->attrs;
  if (x->dtype != v->dtype)
    return trvk_fail(TRVK_SAY("dtypes differ"), x->dtype, v->dtype, expected, got);
  if (index->dtype != TRV_DTYPE_I64)
    return trvk_fail(TRVK_SAY("positions must be i64"), TRV_DTYPE_I64, index->dtype, expected, got);
  if (a->axis >= x->rank)
    return trvk_fail(TRVK_SAY("no such axis"), (int64_t)x->rank - 1, a->axis, expected, got);
  if (!trvk_same_shape(v, index) || v->rank != x->rank)
    return trvk_fail(TRVK_SAY("shapes differ"), (int64_t)trvk_count(v), (int64_t)trvk_count(index),
                     expected, got);
  for (uint32_t i = 0; i < x->rank; i++)
    if (i == a->axis ? v->dim[i] > x->dim[i] : v->dim[i] != x->dim[i])
      return trvk_fail(TRVK_SAY("size of a sort's output"), x->dim[i], v->dim[i], expected, got);
  const trv_dim n = x->dim[a->axis];
  if ((uint64_t)n > UINT32_MAX)
    return trvk_fail(TRVK_SAY("axis too long to sort"), UINT32_MAX, n, expected, got);
  const size_t need = trvk_count(v) ? trvk_sort_tmp_bytes(x->dtype, n) : 0;
  const size_t have = call->n_tmp ? (size_t)call->tmp[0].dim[0] : 0;
  if (have < need)
    return trvk_fail(TRVK_SAY("scratch too small"), (int64_t)need, (int64_t)have, expected, got);
  if (need && (((uintptr_t)call->tmp[0].data & 7) || call->tmp[0].stride[0] != 1))
    return trvk_fail(TRVK_SAY("scratch must be dense and aligned"), 1,
                     (int64_t)call->tmp[0].stride[0], expected, got);
  return NULL;
}

/* Tiles that scratch has room for: each takes its own piece. */
static uint32_t rooms(const trvk_call* call) {
  const trvf_sort_attrs* a = call->attrs;
  const size_t need = trvk_sort_tmp_bytes(call->in->dtype, call->in->dim[a->axis]);
  if (need == 0 || call->n_tmp == 0) return UINT32_MAX;
  const size_t n = (size_t)call->tmp[0].dim[0] / need;
  return n < UINT32_MAX ? (uint32_t)n : UINT32_MAX;
}

uint32_t trvk_sort_tiles(const trvk_call* call, uint32_t workers) {
  const trvf_sort_attrs* a = call->attrs;
  const trv_dim n = trvk_count(call->in), length = call->in->dim[a->axis];
  const uint32_t tiles = trvk_tiles(n * 8, length ? n / length : 0, workers), room = rooms(call);
  return tiles < room ? tiles : room;
}

/* Keys of a float: all bits of a negative one turned over, the sign of the others; both zeros are
 * one. */
static inline uint64_t key_f32(float x) {
  union {
    float f;
    uint32_t u;
  } v = {x == 0.0f ? 0.0f : x};
  if (x != x) return UINT32_MAX;
  return v.u & 0x80000000u ? (uint32_t)~v.u : v.u | 0x80000000u;
}
static inline uint64_t key_f64(double x) {
  union {
    double f;
    uint64_t u;
  } v = {x == 0.0 ? 0.0 : x};
  if (x != x) return UINT64_MAX;
  return v.u >> 63 ? ~v.u : v.u | (uint64_t)1 << 63;
}
static uint64_t key_at(const uint8_t* x, uint32_t dtype) {
  uint16_t h;
  float f;
  double d;
  int16_t s;
  int32_t i;
  int64_t l;
  switch (dtype) {
    case TRV_DTYPE_F16:
      memcpy(&h, x, 2);
      return key_f32(trvk_half_to_float(h));
    case TRV_DTYPE_BF16:
      memcpy(&h, x, 2);
      return key_f32(trvk_bf16_to_f32(h));
    case TRV_DTYPE_F32:
      memcpy(&f, x, 4);
      return key_f32(f);
    case TRV_DTYPE_F64:
      memcpy(&d, x, 8);
      return key_f64(d);
    case TRV_DTYPE_I8:
      return (uint64_t)((int)(int8_t)*x + 128);
    case TRV_DTYPE_I16:
      memcpy(&s, x, 2);
      return (uint64_t)((int32_t)s + 32768);
    case TRV_DTYPE_I32:
      memcpy(&i, x, 4);
      return (uint32_t)i ^ 0x80000000u;
    case TRV_DTYPE_I64:
      memcpy(&l, x, 8);
      return (uint64_t)l ^ (uint64_t)1 << 63;
    default:
      return *x;
  }
}

/* Radix sort by the bytes of the key from bit `low` on; KEY(p) reads it. The result is in *from. */
#define RADIX(T, NAME, KEY)                                                                  \
  static T* NAME(T* from, T* to, size_t n, unsigned low) {                                   \
    if (n <= 48) {                                                                           \
      for (size_t i = 1; i < n; i++) {                                                       \
        const T v = from[i];                                                                 \
        size_t k = i;                                                                        \
        for (; k > 0 && KEY(from[k - 1]) >> low > KEY(v) >> low; k--) from[k] = from[k - 1]; \
        from[k] = v;                                                                         \
      }                                                                                      \
      return from;                                                                           \
    }                                                                                        \
    for (unsigned shift = low; shift < 64; shift += 8) {                                     \
      uint32_t count[256] = {0};                                                             \
      for (size_t i = 0; i < n; i++) count[(KEY(from[i]) >> shift) & 255]++;                 \
      if (count[(KEY(from[0]) >> shift) & 255] == n) continue;                               \
      uint32_t sum = 0;                                                                      \
      for (int b = 0; b < 256; b++) {                                                        \
        const uint32_t c = count[b];                                                         \
        count[b] = sum;                                                                      \
        sum += c;                                                                            \
      }                                                                                      \
      for (size_t i = 0; i < n; i++) to[count[(KEY(from[i]) >> shift) & 255]++] = from[i];   \
      T* swap = from;                                                                        \
      from = to;                                                                             \
      to = swap;                                                                             \
    }                                                                                        \
    return from;                                                                             \
  }
#define NARROW_KEY(p) (p)
#define WIDE_KEY(p) ((p).key)
RADIX(uint64_t, radix_narrow, NARROW_KEY) /* key in the upper half, position in the lower one */
RADIX(wide_pair, radix_wide, WIDE_KEY)

/* The k least of n keys, k small: kept in order, a newcomer goes in behind its equals. They land in
 * keys[0 .. k). */
#define FEW 32
#define LEAST(T, NAME, KEY)                                                                     \
  static void NAME(T* keys, size_t n, size_t k, unsigned low) {                                 \
    T best[FEW];                                                                                \
    size_t have = 0;                                                                            \
    for (size_t i = 0; i < n; i++) {                                                            \
      const T v = keys[i];                                                                      \
      if (have == k && KEY(v) >> low >= KEY(best[k - 1]) >> low) continue;                      \
      size_t at = have < k ? have++ : k - 1;                                                    \
      for (; at > 0 && KEY(best[at - 1]) >> low > KEY(v) >> low; at--) best[at] = best[at - 1]; \
      best[at] = v;                                                                             \
    }                                                                                           \
    memcpy(keys, best, k * sizeof(T));                                                          \
  }
LEAST(uint64_t, least_narrow, NARROW_KEY)
LEAST(wide_pair, least_wide, WIDE_KEY)

typedef struct lane {
  const uint8_t* x;
  uint8_t* value;
  int64_t* at;
  trv_dim n, k, x_step, value_step, at_step;
} lane;

static void sort_lane(const lane* l, uint32_t dtype, int descending, uint8_t* scratch) {
  const trv_dim size = (trv_dim)trv_dtype_size(dtype);
  uint64_t *narrow = (uint64_t*)(void*)scratch, one[1];
  wide_pair *wide = (wide_pair*)(void*)scratch, one_wide[1];
  const int few = l->k > 0 && l->k <= FEW && l->k * 4 <= l->n;
  if (l->n == 1) { /* no scratch then */
    narrow = one;
    wide = one_wide;
  }
  if (size == 8) {
    for (trv_dim i = 0; i < l->n; i++) {
      const uint64_t key = key_at(l->x + i * l->x_step * size, dtype);
      wide[i].key = descending ? ~key : key;
      wide[i].at = (uint64_t)i;
    }
    if (few)
      least_wide(wide, (size_t)l->n, (size_t)l->k, 0);
    else
      wide = radix_wide(wide, wide + l->n, (size_t)l->n, 0);
  } else {
    for (trv_dim i = 0; i < l->n; i++) {
      const uint32_t key = (uint32_t)key_at(l->x + i * l->x_step * size, dtype);
      narrow[i] = (uint64_t)(descending ? ~key : key) << 32 | (uint64_t)i;
    }
    if (few)
      least_narrow(narrow, (size_t)l->n, (size_t)l->k, 32);
    else
      narrow = radix_narrow(narrow, narrow + l->n, (size_t)l->n, 32);
  }
  for (trv_dim i = 0; i < l->k; i++) {
    trv_dim at = size == 8 ? (trv_dim)wide[i].at : (trv_dim)(narrow[i] & UINT32_MAX);
    if (at < 0 || at >= l->n) at = 0; /* a hostile plan let scratch overlap the outputs */
    l->at[i * l->at_step] = (int64_t)at;
    memcpy(l->value + i * l->value_step * size, l->x + at * l->x_step * size, (size_t)size);
  }
}

void trvk_sort__ref(const trvk_call* call, uint32_t tile) {
  const trv_tensor *x = call->in, *v = call->out, *p = call->out + 1;
  const trvf_sort_attrs* a = call->attrs;
  if (trvk_count(v) == 0) return;
  const trv_dim size = (trv_dim)trv_dtype_size(x->dtype), n = x->dim[a->axis];
  const size_t need = trvk_sort_tmp_bytes(x->dtype, n);
  uint8_t* scratch = need ? call->tmp[0].data + tile % rooms(call) * need : NULL;
  trv_dim dim[TRV_MAX_RANK], stride[3][TRV_MAX_RANK], index[TRV_MAX_RANK], at, end, lanes = 1;
  uint32_t rank = 0;
  for (uint32_t i = 0; i < x->rank; i++) {
    if (i == a->axis) continue;
    lanes *= x->dim[i];
    dim[rank] = x->dim[i];
    stride[0][rank] = v->stride[i];
    stride[1][rank] = p->stride[i];
    stride[2][rank++] = x->stride[i];
  }
  rank = trvk_walk_plan(rank, dim, stride, 3);
  trvk_split(lanes, call->tiles, tile, &at, &end);
  for (; at < end; at++) {
    trvk_walk_seek(rank, dim, at, index);
    const lane l = {.x = x->data + trvk_walk_at(rank, index, stride[2]) * size,
                    .value = v->data + trvk_walk_at(rank, index, stride[0]) * size,
                    .at = (int64_t*)(void*)p->data + trvk_walk_at(rank, index, stride[1]),
                    .n = n,
                    .k = v->dim[a->axis],
                    .x_step = x->stride[a->axis],
                    .value_step = v->stride[a->axis],
                    .at_step = p->stride[a->axis]};
    sort_lane(&l, x->dtype, a->descending, scratch);
  }
}
