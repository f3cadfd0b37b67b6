/* reduce.c - reductions over any set of axes: checks, and the order in which elements are visited.
 */
#include "reduce.h"

#include "walk.h"

static int is_arg(uint32_t kind) {
  return kind == TRV_REDUCE_KIND_ARGMAX || kind == TRV_REDUCE_KIND_ARGMIN;
}
static int is_test(uint32_t kind) {
  return kind == TRV_REDUCE_KIND_ANY || kind == TRV_REDUCE_KIND_ALL;
}
static int needs_elements(uint32_t kind) {
  return is_arg(kind) || kind == TRV_REDUCE_KIND_MAX || kind == TRV_REDUCE_KIND_MIN;
}

const char* trvk_reduce_check(const trvk_call* call, int64_t* expected, int64_t* got) {
  const trv_tensor *x = call->in, *y = call->out;
  const trvf_reduce_attrs* a = call->attrs;
  const int real = trvk_dtype_is_float(x->dtype);
  if (a->kind >= TRV_REDUCE_KIND_COUNT)
    return trvk_fail(TRVK_SAY("unknown reduction"), TRV_REDUCE_KIND_COUNT - 1, a->kind, expected,
                     got);
  if (x->rank != y->rank || a->axes >> x->rank)
    return trvk_fail(TRVK_SAY("rank of a reduction"), x->rank, y->rank, expected, got);
  trv_dim reduced = 1;
  for (uint32_t i = 0; i < x->rank; i++) {
    const int gone = (a->axes >> i) & 1;
    if (gone) reduced *= x->dim[i];
    if (y->dim[i] != (gone ? 1 : x->dim[i]))
      return trvk_fail(TRVK_SAY("size of a reduction's output"), gone ? 1 : x->dim[i], y->dim[i],
                       expected, got);
  }
  uint32_t want = x->dtype;
  if (is_arg(a->kind)) want = TRV_DTYPE_I64;
  if (is_test(a->kind)) want = TRV_DTYPE_BOOL;
  const int sums = a->kind == TRV_REDUCE_KIND_SUM || a->kind == TRV_REDUCE_KIND_PROD;
  const int whole = y->dtype >= TRV_DTYPE_BOOL && y->dtype <= TRV_DTYPE_I64;
  const int moments = sums || a->kind == TRV_REDUCE_KIND_MEAN || a->kind == TRV_REDUCE_KIND_VAR;
  const int half = x->dtype == TRV_DTYPE_F16 || x->dtype == TRV_DTYPE_BF16;
  if (y->dtype != want && !(sums && !real && whole) &&
      !(moments && half && y->dtype == TRV_DTYPE_F32))
    return trvk_fail(TRVK_SAY("dtype of a reduction's output"), want, y->dtype, expected, got);
  if ((a->kind == TRV_REDUCE_KIND_MEAN || a->kind == TRV_REDUCE_KIND_VAR) && !real)
    return trvk_fail(TRVK_SAY("mean and var are for floats"), TRV_DTYPE_F32, x->dtype, expected,
                     got);
  if (reduced == 0 && needs_elements(a->kind) && trvk_count(y) > 0)
    return trvk_fail(TRVK_SAY("a reduction of nothing has no extreme"), 1, 0, expected, got);
  return NULL;
}

static trv_dim magnitude(trv_dim x) { return x < 0 ? -x : x; }

uint32_t trvk_reduce_tiles_of(const trvk_call* call, uint32_t axes, uint32_t workers) {
  const trv_tensor* x = call->in;
  trv_dim least = 0;
  int kept =
      0; /* is the densest axis kept? Then outputs are made in columns, which should stay wide. */
  for (uint32_t i = 0; i < x->rank; i++)
    if (x->dim[i] > 1 && (least == 0 || magnitude(x->stride[i]) < least)) {
      least = magnitude(x->stride[i]);
      kept = !((axes >> i) & 1);
    }
  return trvk_tiles(trvk_count(x), trvk_count(call->out) / (kept ? 16 : 1), workers);
}

uint32_t trvk_reduce_tiles(const trvk_call* call, uint32_t workers) {
  return trvk_reduce_tiles_of(call, ((const trvf_reduce_attrs*)call->attrs)->axes, workers);
}

/* Sorts (by the input's stride, largest first; not for argmax, whose positions count) and merges
 * axes. */
static uint32_t merge_axes(uint32_t n, trv_dim* dim, trv_dim* a, trv_dim* b, int keep_order) {
  for (uint32_t i = 1; i < n && !keep_order; i++)
    for (uint32_t k = i; k > 0 && magnitude(a[k]) > magnitude(a[k - 1]); k--) {
      trv_dim t = dim[k];
      dim[k] = dim[k - 1];
      dim[k - 1] = t;
      t = a[k];
      a[k] = a[k - 1];
      a[k - 1] = t;
      t = b[k];
      b[k] = b[k - 1];
      b[k - 1] = t;
    }
  if (n == 0) {
    dim[0] = 1;
    a[0] = b[0] = 1;
    return 1;
  }
  uint32_t last = 0;
  for (uint32_t i = 1; i < n; i++) {
    if (a[last] == a[i] * dim[i] && b[last] == b[i] * dim[i])
      dim[last] *= dim[i];
    else
      dim[++last] = dim[i];
    a[last] = a[i];
    b[last] = b[i];
  }
  return last + 1;
}

void trvk_reduce_plan_axes(trvk_reduce_plan* p, const trvk_call* call, uint32_t axes,
                           int keep_order) {
  const trv_tensor *x = call->in, *y = call->out;
  trv_dim none[TRV_MAX_RANK] = {0};
  uint32_t k = 0, r = 0;
  p->outputs = p->count = 1;
  for (uint32_t i = 0; i < x->rank; i++) {
    const int gone = (axes >> i) & 1;
    *(gone ? &p->count : &p->outputs) *= x->dim[i];
    if (x->dim[i] == 1) continue;
    if (gone) {
      p->reduced[r] = x->dim[i];
      p->reduced_in[r++] = x->stride[i];
    } else {
      p->kept[k] = x->dim[i];
      p->kept_in[k] = x->stride[i];
      p->kept_out[k++] = y->stride[i];
    }
  }
  p->k = merge_axes(k, p->kept, p->kept_in, p->kept_out, 0);
  p->r = merge_axes(r, p->reduced, p->reduced_in, none, keep_order);
  p->dtype = x->dtype;
  p->out_dtype = y->dtype;
}

void trvk_reduce__ref(const trvk_call* call, uint32_t tile) {
  const trv_tensor *x = call->in, *y = call->out;
  const trvf_reduce_attrs* a = call->attrs;
  trvk_reduce_plan p;
  trvk_reduce_plan_axes(&p, call, a->axes, is_arg(a->kind));
  p.kind = a->kind;
  p.correction = a->correction;
  if (p.outputs == 0) return;
  const trv_dim in_size = (trv_dim)trv_dtype_size(x->dtype),
                out_size = (trv_dim)trv_dtype_size(y->dtype);
  const int real = trvk_dtype_is_float(x->dtype), wide = x->dtype == TRV_DTYPE_F64;
  trv_dim index[TRV_MAX_RANK], at, end;
  const uint32_t last = p.k - 1;
  /* Columns where the kept axis is the denser one: then a row of the input feeds many outputs. */
  const int columns = p.count > 0 && p.kept[last] > 1 &&
                      magnitude(p.kept_in[last]) < magnitude(p.reduced_in[p.r - 1]);
  trvk_split(p.outputs, call->tiles, tile, &at, &end);
  trvk_walk_seek(p.k, p.kept, at, index);
  while (at < end) {
    const uint8_t* src = x->data + trvk_walk_at(p.k, index, p.kept_in) * in_size;
    uint8_t* dst = y->data + trvk_walk_at(p.k, index, p.kept_out) * out_size;
    trv_dim n = 1;
    if (columns) {
      n = p.kept[last] - index[last];
      if (n > TRVK_REDUCE_COLS) n = TRVK_REDUCE_COLS;
      if (n > end - at) n = end - at;
      (wide   ? trvk_reduce_cols_f64
       : real ? trvk_reduce_cols_f32
              : trvk_reduce_cols_i64)(&p, src, dst, n);
    } else {
      (wide ? trvk_reduce_row_f64 : real ? trvk_reduce_row_f32 : trvk_reduce_row_i64)(&p, src, dst);
    }
    trvk_walk_step(last, p.kept, index, n);
    at += n;
  }
}
