/* mcu_pool.c - pooling, means and sums of i8 on Cortex-M: four results at a time, sums of 32 bits.
 */
#include "average.h"
#include "pool.h"
#include "reduce.h"
#include "walk.h"

#if TRVK_M
typedef struct window {
  trvk_span d, h, w;
} window;

static window window_of(const trvk_pool* p, trv_dim d, trv_dim h, trv_dim w) {
  return (window){trvk_pool_span(p, 0, d), trvk_pool_span(p, 1, h), trvk_pool_span(p, 2, w)};
}

static trv_dim cells(const window* v) { return v->d.n * v->h.n * v->w.n; }

static const int8_t* row_of(const trvk_pool* p, const window* v, const int8_t* x, trv_dim i,
                            trv_dim j) {
  return x + (v->d.first + i * v->d.step) * p->xs[2] + (v->h.first + j * v->h.step) * p->xs[3] +
         v->w.first * p->xs[4];
}

/* Adds n cells, `step` apart, to sums of four results that lie `next` apart. Sums of more than 2^24
 * cells may wrap. */
static void cells4(const int8_t* x, trv_dim step, trv_dim n, trv_dim next, uint32_t* sum) {
  uint32_t s0 = sum[0], s1 = sum[1], s2 = sum[2], s3 = sum[3];
  for (; n > 0; n--, x += step) {
    s0 += (uint32_t)x[0];
    s1 += (uint32_t)x[next];
    s2 += (uint32_t)x[2 * next];
    s3 += (uint32_t)x[3 * next];
  }
  sum[0] = s0;
  sum[1] = s1;
  sum[2] = s2;
  sum[3] = s3;
}

/* Sums over a window's cells of four channels, or of one (next 0: four times the same). */
static void add4(const trvk_pool* p, const window* v, const int8_t* x, trv_dim next, int32_t* sum) {
  uint32_t all[4] = {0, 0, 0, 0};
  for (trv_dim i = 0; i < v->d.n; i++)
    for (trv_dim j = 0; j < v->h.n; j++)
      cells4(row_of(p, v, x, i, j), v->w.step * p->xs[4], v->w.n, next, all);
  memcpy(sum, all, sizeof all);
}

static void max4(const trvk_pool* p, const window* v, const int8_t* x, trv_dim next, int32_t* max) {
  int32_t m0 = INT8_MIN, m1 = INT8_MIN, m2 = INT8_MIN, m3 = INT8_MIN;
  const trv_dim step = v->w.step * p->xs[4];
  for (trv_dim i = 0; i < v->d.n; i++)
    for (trv_dim j = 0; j < v->h.n; j++) {
      const int8_t* at = row_of(p, v, x, i, j);
      for (trv_dim k = v->w.n; k > 0; k--, at += step) {
        m0 = at[0] > m0 ? at[0] : m0;
        m1 = at[next] > m1 ? at[next] : m1;
        m2 = at[2 * next] > m2 ? at[2 * next] : m2;
        m3 = at[3 * next] > m3 ? at[3 * next] : m3;
      }
    }
  max[0] = m0;
  max[1] = m1;
  max[2] = m2;
  max[3] = m3;
}

/* The pixels of a tile; average NULL: the largest. */
static void pixels(const trvk_call* call, uint32_t tile, const trvk_pool* p, trvk_average* average,
                   int32_t zero) {
  trv_dim u, end;
  trvk_split(p->n * p->out[0] * p->out[1] * p->out[2], call->tiles, tile, &u, &end);
  for (; u < end; u++) {
    const trv_dim w = u % p->out[2], h = u / p->out[2] % p->out[1],
                  d = u / p->out[2] / p->out[1] % p->out[0],
                  n = u / p->out[2] / p->out[1] / p->out[0];
    const window v = window_of(p, d, h, w);
    const int8_t* x = (const int8_t*)p->x + n * p->xs[0];
    int8_t* y =
        (int8_t*)call->out[0].data + n * p->ys[0] + d * p->ys[2] + h * p->ys[3] + w * p->ys[4];
    const trv_dim all = cells(&v);
    if (average) {
      const int64_t count = trvk_pool_divisor(p, &v.d, &v.h, &v.w);
      if (count != average->count) trvk_average_count(average, count);
    }
    for (trv_dim c = 0, some; c < p->c; c += some, x += some * p->xs[1]) {
      int32_t result[4];
      some = p->c - c >= 4 ? 4 : 1;
      const trv_dim next = some == 4 ? p->xs[1] : 0;
      (average ? add4 : max4)(p, &v, x, next, result);
      for (trv_dim i = 0; i < some; i++, y += p->ys[1])
        *y = (int8_t)(average ? trvk_average_of(average, result[i] - (int64_t)zero * all)
                      : all   ? result[i]
                              : 0);
    }
  }
}

void trvk_qpool_i8__ref(const trvk_call* call, uint32_t tile) {
  const trvf_qpool_attrs* a = call->attrs;
  trvk_pool p = {0};
  int64_t most, e, g;
  if (trvk_count(&call->out[0]) == 0) return;
  (void)trvk_qpool_make(call, &p, &most, &e, &g);
  trvk_average average = trvk_average_of_pool(a, TRV_DTYPE_I8, most);
  pixels(call, tile, &p, &average, a->x_zero);
}

void trvk_pool_i8__ref(const trvk_call* call, uint32_t tile) {
  trvk_pool p = {0};
  int64_t e, g;
  if (trvk_count(&call->out[0]) == 0) return;
  (void)trvk_pool_make(call, call->attrs, &p, &e, &g);
  pixels(call, tile, &p, NULL, 0);
}

/* Sums of four results that lie `next` apart over all reduced axes. */
static void reduced(const trvk_reduce_plan* p, const int8_t* x, trv_dim next, uint32_t* sum) {
  const uint32_t last = p->r - 1;
  trv_dim index[TRV_MAX_RANK] = {0};
  memset(sum, 0, 4 * sizeof *sum);
  for (uint32_t i;;) {
    cells4(x, p->reduced_in[last], p->reduced[last], next, sum);
    for (i = last; i > 0; i--) { /* the next row */
      x += p->reduced_in[i - 1];
      if (++index[i - 1] < p->reduced[i - 1]) break;
      x -= p->reduced_in[i - 1] * p->reduced[i - 1];
      index[i - 1] = 0;
    }
    if (i == 0) return;
  }
}

void trvk_qreduce_i8__ref(const trvk_call* call, uint32_t tile) {
  const trvf_qreduce_attrs* a = call->attrs;
  trvk_reduce_plan p;
  trvk_reduce_plan_axes(&p, call, a->axes, 0);
  if (p.outputs == 0) return;
  const trvk_average average = trvk_average_of_reduce(a, TRV_DTYPE_I8, (int64_t)p.count);
  const uint32_t last = p.k - 1;
  trv_dim index[TRV_MAX_RANK], at, end;
  trvk_split(p.outputs, call->tiles, tile, &at, &end);
  trvk_walk_seek(p.k, p.kept, at, index);
  for (trv_dim n; at < end; at += n) {
    n = p.kept[last] - index[last] >= 4 && end - at >= 4 ? 4 : 1;
    const int8_t* x = (const int8_t*)call->in[0].data + trvk_walk_at(p.k, index, p.kept_in);
    int8_t* y = (int8_t*)call->out[0].data + trvk_walk_at(p.k, index, p.kept_out);
    uint32_t sum[4] = {0, 0, 0, 0};
    if (p.count > 0) reduced(&p, x, n == 4 ? p.kept_in[last] : 0, sum);
    for (trv_dim i = 0; i < n; i++, y += p.kept_out[last])
      *y = (int8_t)trvk_average_of(&average, (int32_t)sum[i] - (int64_t)p.count * a->x_zero);
    trvk_walk_step(last, p.kept, index, n);
  }
}
#endif
