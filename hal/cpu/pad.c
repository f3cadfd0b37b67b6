/* pad.c - a border of constants, or of mirrored, repeated or wrapped input. Negative borders crop.
 */
#include "convert.h"
#include "walk.h"

const char* trvk_pad_check(const trvk_call* call, int64_t* expected, int64_t* got) {
  const trv_tensor *x = call->in, *y = call->out;
  const trvf_pad_attrs* a = call->attrs;
  if (a->mode >= TRV_PAD_MODE_COUNT)
    return trvk_fail(TRVK_SAY("unknown padding"), TRV_PAD_MODE_COUNT - 1, a->mode, expected, got);
  if (x->dtype != y->dtype)
    return trvk_fail(TRVK_SAY("dtypes differ"), x->dtype, y->dtype, expected, got);
  if (x->rank != y->rank)
    return trvk_fail(TRVK_SAY("ranks differ"), x->rank, y->rank, expected, got);
  if (a->mode == TRV_PAD_MODE_CONSTANT || trvk_count(y) == 0) return NULL;
  for (uint32_t i = 0; i < x->rank; i++) { /* what may be read is within one turn of the input */
    const int64_t n = x->dim[i], lo = a->lo[i], hi = (int64_t)y->dim[i] - n - lo;
    const int64_t most = a->mode == TRV_PAD_MODE_REFLECT    ? n - 1
                         : a->mode == TRV_PAD_MODE_CIRCULAR ? n
                                                            : INT64_MAX;
    if (n < 1 || lo > most || hi > most)
      return trvk_fail(TRVK_SAY("a border is larger than its input"), most, lo > hi ? lo : hi,
                       expected, got);
  }
  return NULL;
}

uint32_t trvk_pad_tiles(const trvk_call* call, uint32_t workers) {
  const trv_dim n = trvk_count(call->out);
  trv_dim longest = 1;
  for (uint32_t i = 0; i < call->out->rank; i++)
    if (call->out->dim[i] > longest) longest = call->out->dim[i];
  return trvk_tiles(n, n / longest, workers);
}

/* The input's coordinate for the output's; -1: none (constant). */
static inline trv_dim source(uint32_t mode, trv_dim i, trv_dim lo, trv_dim n) {
  trv_dim k = i - lo;
  if (k >= 0 && k < n) return k;
  switch (mode) {
    case TRV_PAD_MODE_REFLECT:
      k = k < 0 ? -k : 2 * (n - 1) - k;
      break;
    case TRV_PAD_MODE_REPLICATE:
      k = k < 0 ? 0 : n - 1;
      break;
    case TRV_PAD_MODE_CIRCULAR:
      k = k < 0 ? k + n : k - n;
      break;
    default:
      return -1;
  }
  return k;
}

typedef struct row_plan {
  uint32_t mode;
  trv_dim lo, n, count;   /* of the row: low border, input's size, output's size */
  trv_dim x_step, y_step; /* elements */
  const void* value;      /* one element */
} row_plan;

/* One output row; x: the input's row, NULL where all of it is border. */
#define ROW(T)                                                                                     \
  static void row_##T(const row_plan* p, const void* x, void* y) {                                 \
    const T fill = *(const T*)p->value, *s = x;                                                    \
    T* d = y;                                                                                      \
    trv_dim begin = p->lo < 0 ? 0 : p->lo, end = p->lo + p->n;                                     \
    if (end > p->count) end = p->count;                                                            \
    if (x == NULL || end < begin) begin = end = p->count;                                          \
    for (trv_dim i = 0; i < p->count; i++) {                                                       \
      if (i == begin && end > begin) { /* the inner part */                                        \
        s = (const T*)x + (begin - p->lo) * p->x_step;                                             \
        if (p->x_step == 1 && p->y_step == 1)                                                      \
          trvk_move(d + begin, s, (size_t)(end - begin) * sizeof(T));                              \
        else                                                                                       \
          for (trv_dim k = 0; k < end - begin; k++) d[(begin + k) * p->y_step] = s[k * p->x_step]; \
        i = end - 1;                                                                               \
        continue;                                                                                  \
      }                                                                                            \
      const trv_dim k = x ? source(p->mode, i, p->lo, p->n) : -1;                                  \
      d[i * p->y_step] = k < 0 ? fill : ((const T*)x)[k * p->x_step];                              \
    }                                                                                              \
  }
ROW(uint8_t)
ROW(uint16_t)
ROW(uint32_t)
ROW(uint64_t)

void trvk_pad__ref(const trvk_call* call, uint32_t tile) {
  const trv_tensor *x = call->in, *y = call->out;
  const trvf_pad_attrs* a = call->attrs;
  const trv_dim total = trvk_count(y), width = (trv_dim)trv_dtype_size(y->dtype);
  if (total == 0) return;
  uint64_t value = 0;
  union {
    double d;
    float f;
    int64_t i;
    uint8_t b[8];
  } work;
  trvk_cast(&work, y->dtype, &a->value, TRV_DTYPE_F64, 1);
  trvk_store((uint8_t*)&value, &work, y->dtype, 1, 0, 1, 1);
  /* The row is the axis along which the output is densest; axes of size 1 that stay so are out of
   * the way. */
  trv_dim dim[TRV_MAX_RANK], from[TRV_MAX_RANK], lo[TRV_MAX_RANK], xs[TRV_MAX_RANK],
      ys[TRV_MAX_RANK];
  uint32_t rank = 0;
  for (uint32_t i = 0; i < y->rank; i++) {
    if (y->dim[i] == 1 && x->dim[i] == 1 && a->lo[i] == 0) continue;
    uint32_t at = rank++;
    const trv_dim key = y->stride[i] < 0 ? -y->stride[i] : y->stride[i];
    for (; at > 0 && (ys[at - 1] < 0 ? -ys[at - 1] : ys[at - 1]) < key; at--) {
      dim[at] = dim[at - 1];
      from[at] = from[at - 1];
      lo[at] = lo[at - 1];
      xs[at] = xs[at - 1];
      ys[at] = ys[at - 1];
    }
    dim[at] = y->dim[i];
    from[at] = x->dim[i];
    lo[at] = a->lo[i];
    xs[at] = x->stride[i];
    ys[at] = y->stride[i];
  }
  if (rank == 0) {
    rank = 1;
    dim[0] = from[0] = xs[0] = ys[0] = 1;
    lo[0] = 0;
  }
  const uint32_t last = rank - 1;
  const row_plan p = {a->mode, lo[last], from[last], dim[last], xs[last], ys[last], &value};
  trv_dim index[TRV_MAX_RANK], at, end;
  trvk_split(total / dim[last], call->tiles, tile, &at, &end);
  for (; at < end; at++) {
    trv_dim src = 0, dst = 0;
    int border = 0;
    trvk_walk_seek(last, dim, at, index);
    for (uint32_t i = 0; i < last; i++) {
      const trv_dim k = source(a->mode, index[i], lo[i], from[i]);
      if (k < 0) border = 1;
      src += k * xs[i];
      dst += index[i] * ys[i];
    }
    const uint8_t* row = border ? NULL : x->data + src * width;
    switch (width) {
      case 1:
        row_uint8_t(&p, row, y->data + dst);
        break;
      case 2:
        row_uint16_t(&p, row, y->data + dst * 2);
        break;
      case 4:
        row_uint32_t(&p, row, y->data + dst * 4);
        break;
      default:
        row_uint64_t(&p, row, y->data + dst * 8);
        break;
    }
  }
}
