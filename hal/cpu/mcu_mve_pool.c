/* mcu_mve_pool.c - pooling, means and sums of i8 with Helium, 16 channels at a time. */
#include "kernel.h"

#if TRVK_M_MVE
#include "average.h"
#include "mcu_mve.h"
#include "pool.h"
#include "reduce.h"
#include "walk.h"

enum { WIDTH = 16, CELLS = 256 }; /* 256 numbers of 8 bits make one of 16 */

/* sums[0..16] += `cells` <= CELLS cells of n <= 16 channels. Even and odd channels are summed in 16
 * bits each, then in 32 as VLD4 lays them out. */
static void add_cells(const int8_t* x, trv_dim step, trv_dim cells, trv_dim n, int32_t* sums) {
  __asm__ volatile(
      "vctp.8 %[n]\n"
      "vmov.i32 q0, #0\n"
      "vmov.i32 q1, #0\n"
      "dls lr, %[cells]\n"
      "1: vpst\n"
      "vldrbt.8 q2, [%[x]]\n"
      "add %[x], %[x], %[step]\n"
      "vmovlb.s8 q3, q2\n"
      "vmovlt.s8 q2, q2\n"
      "vadd.i16 q0, q0, q3\n"
      "vadd.i16 q1, q1, q2\n"
      "le lr, 1b\n"
      "vld40.32 {q4, q5, q6, q7}, [%[sums]]\n"
      "vld41.32 {q4, q5, q6, q7}, [%[sums]]\n"
      "vld42.32 {q4, q5, q6, q7}, [%[sums]]\n"
      "vld43.32 {q4, q5, q6, q7}, [%[sums]]\n"
      "vmovlb.s16 q2, q0\n"
      "vmovlb.s16 q3, q1\n"
      "vadd.i32 q4, q4, q2\n"
      "vmovlt.s16 q0, q0\n"
      "vadd.i32 q5, q5, q3\n"
      "vmovlt.s16 q1, q1\n"
      "vadd.i32 q6, q6, q0\n"
      "vadd.i32 q7, q7, q1\n"
      "vst40.32 {q4, q5, q6, q7}, [%[sums]]\n"
      "vst41.32 {q4, q5, q6, q7}, [%[sums]]\n"
      "vst42.32 {q4, q5, q6, q7}, [%[sums]]\n"
      "vst43.32 {q4, q5, q6, q7}, [%[sums]]\n"
      : [x] "+r"(x)
      : [step] "r"(step), [cells] "r"(cells), [n] "r"(n), [sums] "r"(sums)
      : "lr", "q0", "q1", "q2", "q3", "q4", "q5", "q6", "q7", "memory");
}

/* most[0..16] = the larger of it and of the cells. */
static void most_cells(const int8_t* x, trv_dim step, trv_dim cells, trv_dim n, int8_t* most) {
  __asm__ volatile(
      "vctp.8 %[n]\n"
      "vldrb.8 q0, [%[most]]\n"
      "dls lr, %[cells]\n"
      "1: vpst\n"
      "vldrbt.8 q1, [%[x]]\n"
      "add %[x], %[x], %[step]\n"
      "vmax.s8 q0, q0, q1\n"
      "le lr, 1b\n"
      "vstrb.8 q0, [%[most]]\n"
      : [x] "+r"(x)
      : [step] "r"(step), [cells] "r"(cells), [n] "r"(n), [most] "r"(most)
      : "lr", "q0", "q1", "memory");
}

/* What a window has in one chunk of channels. */
typedef struct chunk {
  int32_t sums[WIDTH];
  int8_t most[WIDTH];
} chunk;

typedef struct window {
  trvk_span d, h, w;
} window;

/* All cells of a window, by runs that lie one step apart; channels that lie apart come one by one.
 */
static void visit(const trvk_pool* p, const window* v, const int8_t* x, trv_dim n, chunk* to) {
  const trv_dim step = v->w.step * p->xs[4];
  trv_dim lines = v->h.n, cells = v->w.n;
  if (v->h.step * p->xs[3] == cells * step) { /* lines continue each other */
    cells *= lines;
    lines = lines > 0;
  }
  if (p->max)
    fill_bytes(to->most, INT8_MIN, WIDTH);
  else
    fill_bytes((int8_t*)to->sums, 0, sizeof to->sums);
  for (trv_dim i = 0; i < v->d.n; i++)
    for (trv_dim j = 0; j < lines; j++) {
      const int8_t* at = x + (v->d.first + i * v->d.step) * p->xs[2] +
                         (v->h.first + j * v->h.step) * p->xs[3] + v->w.first * p->xs[4];
      for (trv_dim left = cells, some; left > 0; left -= some, at += some * step) {
        some = left < CELLS ? left : CELLS;
        if (p->max)
          most_cells(at, step, some, n, to->most);
        else
          add_cells(at, step, some, n, to->sums);
      }
    }
}

/* trvk_average_of, shorter where its quick way is sure and only high words count. */
static void averages(const trvk_average* a, const int32_t* sums, trv_dim n, int64_t less, int8_t* y,
                     trv_dim step) {
  const int quick = a->unsure < 0 && a->quick_shift >= 32 && a->most <= INT32_MAX;
  const int64_t factor = a->factor, half = a->half - less * factor;
  const int32_t zero = a->zero, lo = a->lo, hi = a->hi, shift = (a->quick_shift - 32) & 31;
  if (quick)
    for (trv_dim i = 0; i < n; i++, y += step)
      *y = (int8_t)trvk_clamp32(((int32_t)((sums[i] * factor + half) >> 32) >> shift) + zero, lo,
                                hi);
  else
    for (trv_dim i = 0; i < n; i++, y += step) *y = (int8_t)trvk_average_of(a, sums[i] - less);
}

static void pixels(const trvk_call* call, uint32_t tile, const trvk_pool* p, trvk_average* average,
                   int32_t zero) {
  chunk result;
  trv_dim u, end;
  trvk_split(p->n * p->out[0] * p->out[1] * p->out[2], call->tiles, tile, &u, &end);
  const trv_dim lanes = p->xs[1] == 1 || p->c == 1 ? WIDTH : 1;
  for (; u < end; u++) {
    const trv_dim w = u % p->out[2], h = u / p->out[2] % p->out[1],
                  d = u / p->out[2] / p->out[1] % p->out[0],
                  n = u / p->out[2] / p->out[1] / p->out[0];
    const window v = {trvk_pool_span(p, 0, d), trvk_pool_span(p, 1, h), trvk_pool_span(p, 2, w)};
    const int8_t* x = (const int8_t*)p->x + n * p->xs[0];
    int8_t* y =
        (int8_t*)call->out[0].data + n * p->ys[0] + d * p->ys[2] + h * p->ys[3] + w * p->ys[4];
    const trv_dim all = v.d.n * v.h.n * v.w.n;
    if (average) {
      const int64_t count = trvk_pool_divisor(p, &v.d, &v.h, &v.w);
      if (count != average->count) trvk_average_count(average, count);
    }
    for (trv_dim c = 0, some; c < p->c; c += some, x += some * p->xs[1], y += some * p->ys[1]) {
      some = p->c - c < lanes ? p->c - c : lanes;
      visit(p, &v, x, some, &result);
      if (average)
        averages(average, result.sums, some, (int64_t)zero * all, y, p->ys[1]);
      else if (all == 0)
        for (trv_dim i = 0; i < some; i++) y[i * p->ys[1]] = 0;
      else if (p->ys[1] == 1)
        copy_bytes(y, result.most, some);
      else
        for (trv_dim i = 0; i < some; i++) y[i * p->ys[1]] = result.most[i];
    }
  }
}

void trvk_qpool_i8__mve(const trvk_call* call, uint32_t tile) {
  const trvf_qpool_attrs* a = call->attrs;
  trvk_pool p = {0};
  int64_t most, e, g;
  if (trvk_count(&call->out[0]) == 0) return;
  (void)trvk_qpool_make(call, &p, &most, &e, &g);
  p.max = 0;
  trvk_average average = trvk_average_of_pool(a, TRV_DTYPE_I8, most);
  pixels(call, tile, &p, &average, a->x_zero);
}

void trvk_pool_i8__mve(const trvk_call* call, uint32_t tile) {
  trvk_pool p = {0};
  int64_t e, g;
  if (trvk_count(&call->out[0]) == 0) return;
  (void)trvk_pool_make(call, call->attrs, &p, &e, &g);
  p.max = 1;
  pixels(call, tile, &p, NULL, 0);
}

/* The sum of n numbers in a row. */
static int32_t add_row(const int8_t* x, trv_dim n) {
  int32_t sum = 0;
  __asm__ volatile(
      "dlstp.8 lr, %[n]\n"
      "1: vldrb.8 q0, [%[x]], #16\n"
      "vaddva.s8 %[sum], q0\n"
      "letp lr, 1b\n"
      : [x] "+r"(x), [sum] "+Te"(sum)
      : [n] "r"(n)
      : "lr", "q0", "memory");
  return sum;
}

/* Sums of n <= 16 neighbouring outputs over all reduced axes. */
static void reduced(const trvk_reduce_plan* p, const int8_t* x, trv_dim n, int32_t* sums) {
  const uint32_t last = p->r - 1;
  const trv_dim count = p->reduced[last], step = p->reduced_in[last];
  trv_dim index[TRV_MAX_RANK] = {0};
  fill_bytes((int8_t*)sums, 0, WIDTH * (trv_dim)sizeof *sums);
  for (;;) {
    if (n == 1 && step == 1)
      sums[0] += add_row(x, count);
    else
      for (trv_dim i = 0, some; i < count; i += some) {
        some = count - i < CELLS ? count - i : CELLS;
        add_cells(x + i * step, step, some, n, sums);
      }
    uint32_t i = last; /* the next row */
    for (; i > 0; i--) {
      x += p->reduced_in[i - 1];
      if (++index[i - 1] < p->reduced[i - 1]) break;
      x -= p->reduced_in[i - 1] * p->reduced[i - 1];
      index[i - 1] = 0;
    }
    if (i == 0) return;
  }
}

void trvk_qreduce_i8__mve(const trvk_call* call, uint32_t tile) {
  const trvf_qreduce_attrs* a = call->attrs;
  trvk_reduce_plan p;
  trvk_reduce_plan_axes(&p, call, a->axes, 0);
  if (p.outputs == 0) return;
  const trvk_average average = trvk_average_of_reduce(a, TRV_DTYPE_I8, (int64_t)p.count);
  const uint32_t last = p.k - 1;
  const trv_dim lanes = p.kept_in[last] == 1 ? WIDTH : 1;
  int32_t sums[WIDTH];
  trv_dim index[TRV_MAX_RANK], at, end;
  trvk_split(p.outputs, call->tiles, tile, &at, &end);
  trvk_walk_seek(p.k, p.kept, at, index);
  for (trv_dim n; at < end; at += n) {
    n = p.kept[last] - index[last];
    if (n > lanes) n = lanes;
    if (n > end - at) n = end - at;
    if (p.count > 0)
      reduced(&p, (const int8_t*)call->in[0].data + trvk_walk_at(p.k, index, p.kept_in), n, sums);
    else
      fill_bytes((int8_t*)sums, 0, sizeof sums);
    averages(&average, sums, n, (int64_t)p.count * a->x_zero,
             (int8_t*)call->out[0].data + trvk_walk_at(p.k, index, p.kept_out), p.kept_out[last]);
    trvk_walk_step(last, p.kept, index, n);
  }
}
#endif
