/* qreduce.c - mean and sum of stored values over any set of axes, walked as reduce.c walks them. */
/* clang-format off: its macros rename what the others declare */
#include "variant.h"
/* clang-format on */
#include "average.h"
#include "reduce.h"
#include "walk.h"

#ifndef TRVK_VARIANT
const char* trvk_qreduce_check(const trvk_call* call, int64_t* expected, int64_t* got) {
  const trv_tensor *x = call->in, *y = call->out;
  const trvf_qreduce_attrs* a = call->attrs;
  if (a->kind != TRV_REDUCE_KIND_MEAN && a->kind != TRV_REDUCE_KIND_SUM)
    return trvk_fail(TRVK_SAY("qreduce: only mean and sum"), TRV_REDUCE_KIND_MEAN, a->kind,
                     expected, got);
  const char* what = trvk_average_check(x, y, a->x_zero, a->y_zero, a->multiplier, a->shift, a->lo,
                                        a->hi, expected, got);
  if (what) return what;
  if (x->rank != y->rank || a->axes >> x->rank)
    return trvk_fail(TRVK_SAY("rank of a reduction"), x->rank, y->rank, expected, got);
  int64_t reduced = 1;
  trv_dim all = 1;
  for (uint32_t i = 0; i < x->rank; i++) {
    const int gone = (a->axes >> i) & 1;
    const trv_dim n = x->dim[i];
    if (y->dim[i] != (gone ? 1 : n))
      return trvk_fail(TRVK_SAY("size of a reduction's output"), gone ? 1 : n, y->dim[i], expected,
                       got);
    if (n == 0) continue;
    if (all > PTRDIFF_MAX / n || (gone && reduced > TRVK_CELLS_MAX / n))
      return trvk_fail(TRVK_SAY("a reduction of too many elements"), TRVK_CELLS_MAX, n, expected,
                       got);
    all *= n;
    if (gone) reduced *= n;
  }
  return NULL;
}

uint32_t trvk_qreduce_tiles(const trvk_call* call, uint32_t workers) {
  return trvk_reduce_tiles_of(call, ((const trvf_qreduce_attrs*)call->attrs)->axes, workers);
}
#endif

/* Sum of n elements of one row; n < 2^16, so that 32 bits hold it. */
#define ROW(NAME, T)                                               \
  static int32_t NAME(const uint8_t* x, trv_dim step, trv_dim n) { \
    const T* v = (const T*)(const void*)x;                         \
    int32_t sum = 0;                                               \
    if (step == 1)                                                 \
      for (trv_dim i = 0; i < n; i++) sum += v[i];                 \
    else                                                           \
      for (trv_dim i = 0; i < n; i++) sum += v[i * step];          \
    return sum;                                                    \
  }
ROW(qreduce_row_i8, int8_t)
ROW(qreduce_row_i16, int16_t)
enum { ROW_MAX = 65535 };

/* Walks the first `rank` reduced axes; 0: all were visited. */
static int qreduce_next(const trvk_reduce_plan* p, uint32_t rank, trv_dim* index, trv_dim* at) {
  for (uint32_t i = rank; i-- > 0;) {
    *at += p->reduced_in[i];
    if (++index[i] < p->reduced[i]) return 1;
    *at -= p->reduced_in[i] * p->reduced[i];
    index[i] = 0;
  }
  return 0;
}

/* The sum of one output, whose input begins at x. */
static int64_t qreduce_sum(const trvk_reduce_plan* p, const uint8_t* x, int32_t zero) {
  const trv_dim size = (trv_dim)trv_dtype_size(p->dtype), n = p->reduced[p->r - 1],
                step = p->reduced_in[p->r - 1];
  trv_dim index[TRV_MAX_RANK] = {0}, at = 0;
  int64_t sum = 0;
  do {
    for (trv_dim i = 0; i < n; i += ROW_MAX) {
      const trv_dim m = n - i < ROW_MAX ? n - i : ROW_MAX;
      sum += (p->dtype == TRV_DTYPE_I8 ? qreduce_row_i8 : qreduce_row_i16)(
          x + (at + i * step) * size, step, m);
    }
  } while (qreduce_next(p, p->r - 1, index, &at));
  return sum - (int64_t)p->count * zero;
}

/* The sums of neighbouring outputs along the innermost kept axis. */
static void qreduce_sums(const trvk_reduce_plan* p, const uint8_t* x, trvk_sums* sums) {
  const trv_dim size = (trv_dim)trv_dtype_size(p->dtype), step = p->kept_in[p->k - 1];
  trv_dim index[TRV_MAX_RANK] = {0}, at = 0;
  do trvk_sums_add(sums, 0, x + at * size, step, sums->n);
  while (qreduce_next(p, p->r, index, &at));
}

void TRVK_KERNEL(qreduce)(const trvk_call* call, uint32_t tile) {
  const trvf_qreduce_attrs* a = call->attrs;
  trvk_reduce_plan p;
  trvk_reduce_plan_axes(&p, call, a->axes, 0);
  if (p.outputs == 0) return;
  const trvk_average average = trvk_average_of_reduce(a, p.dtype, (int64_t)p.count);
  const trv_dim size = (trv_dim)trv_dtype_size(p.dtype);
  const uint32_t last = p.k - 1;
  /* Many outputs at once where the kept axis is the denser one: then a row of the input feeds them
   * all. */
  const int columns = p.count > 0 && p.kept[last] > 1 &&
                      trvk_magnitude(p.kept_in[last]) < trvk_magnitude(p.reduced_in[p.r - 1]);
  trv_dim index[TRV_MAX_RANK], at, end;
  trvk_sums sums;
  trvk_split(p.outputs, call->tiles, tile, &at, &end);
  trvk_walk_seek(p.k, p.kept, at, index);
  while (at < end) {
    const uint8_t* x = call->in[0].data + trvk_walk_at(p.k, index, p.kept_in) * size;
    uint8_t* y = call->out[0].data + trvk_walk_at(p.k, index, p.kept_out) * size;
    trv_dim n = 1;
    if (columns) {
      n = p.kept[last] - index[last];
      if (n > TRVK_SUMS) n = TRVK_SUMS;
      if (n > end - at) n = end - at;
      trvk_sums_begin(&sums, p.dtype, a->x_zero, (uint32_t)n);
      qreduce_sums(&p, x, &sums);
      trvk_average_store(&average, &sums, 0, (uint32_t)n, y, p.kept_out[last]);
    } else {
      const int32_t v = trvk_average_of(&average, p.count > 0 ? qreduce_sum(&p, x, a->x_zero) : 0);
      if (p.dtype == TRV_DTYPE_I8)
        *(int8_t*)y = (int8_t)v;
      else
        *(int16_t*)(void*)y = (int16_t)v;
    }
    trvk_walk_step(last, p.kept, index, n);
    at += n;
  }
}
#undef ROW
