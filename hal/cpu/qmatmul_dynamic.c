/* qmatmul_dynamic.c - rows of real numbers are quantised as they are gathered: exact 32-bit sums
 * per group of K, then floats in a fixed order (schema/ops.fbs). Nothing is kept between units of
 * work: the range of a row is looked for anew by each, which costs little against a strip's
 * products. */
#include <float.h>

#include "qmatmul.h"

typedef struct row {
  float step, inverse; /* real = step * (number - zero) */
  int32_t zero, lo, hi;
} row;

typedef struct state {
  const trvk_qmatmul* q;
  const float* a;   /* of the present block */
  const uint8_t* b; /* of the present batch */
  row rows[TRVK_Q_ROWS];
} state;

/* The least and largest of n numbers and 0; NaN is passed over. */
static void range(const float* a, trv_dim step, trv_dim n, float* least, float* most) {
  float lo[8] = {0}, hi[8] = {0};
  trv_dim i = 0;
  if (step == 1)
    for (; i + 8 <= n; i += 8)
      for (int j = 0; j < 8; j++) { /* lanes of their own, for vectors */
        const float v = a[i + j];
        lo[j] = v < lo[j] ? v : lo[j];
        hi[j] = v > hi[j] ? v : hi[j];
      }
  for (; i < n; i++) {
    const float v = a[i * step];
    lo[0] = v < lo[0] ? v : lo[0];
    hi[0] = v > hi[0] ? v : hi[0];
  }
  for (int j = 1; j < 8; j++) {
    lo[0] = lo[j] < lo[0] ? lo[j] : lo[0];
    hi[0] = hi[j] > hi[0] ? hi[j] : hi[0];
  }
  *least = lo[0];
  *most = hi[0];
}

static void choose(row* r, uint32_t dynamic, float lo, float hi) {
  if (dynamic == 1) {
    float most = -lo > hi ? -lo : hi;
    if (most > FLT_MAX) most = FLT_MAX;
    r->step = most / 127.0f;
    r->inverse = most > 0.0f ? 127.0f / most : 0.0f;
    r->zero = 0;
    r->lo = -127;
    r->hi = 127;
  } else {
    const float span = (hi - lo) / 255.0f, tiny = 1.1920928955078125e-7f; /* 2^-23 */
    r->step = span > tiny ? span : tiny;
    r->inverse = 1.0f / r->step;
    r->zero = trvk_clamp32(-128 - trvk_half_even(lo / r->step), -128, 127);
    r->lo = -128;
    r->hi = 127;
  }
}

static void gather(const trvk_qblock* k, trv_dim k0, trv_dim kc, int16_t* to) {
  const state* s = k->self;
  const trvk_matmul_operand* p = &s->q->p.a;
  const trv_dim wide = trvk_round4(kc), step = p->col;
  for (trv_dim m = 0; m < k->count; m++, to += wide) {
    const float* a = s->a + m * p->row + k0 * step;
    const row r = s->rows[m];
    const int32_t lo = r.lo - r.zero, hi = r.hi - r.zero; /* clamp(v + zero) - zero */
    if (step == 1)
      for (trv_dim i = 0; i < kc; i++)
        to[i] = (int16_t)trvk_clamp32(trvk_half_even(a[i] * r.inverse), lo, hi);
    else
      for (trv_dim i = 0; i < kc; i++)
        to[i] = (int16_t)trvk_clamp32(trvk_half_even(a[i * step] * r.inverse), lo, hi);
    for (trv_dim i = kc; i < wide; i++) to[i] = 0;
  }
}

static const int8_t* panel(trvk_qblock* k, trv_dim k0, trv_dim kc, trv_dim col, trv_dim n) {
  const state* s = k->self;
  return trvk_q_panel(&s->q->w, s->b, k0, kc, col, n, k->b);
}

/* At the end of a group: sums as floats, times its scales. */
static void flush(trvk_qblock* k, trv_dim p, trv_dim col, trv_dim n, trv_dim k_end, const int8_t* b,
                  trv_dim quads) {
  const state* s = k->self;
  const trvk_qweight* w = &s->q->w;
  const trv_dim group = w->group;
  float scale[TRVK_PANEL], offset[TRVK_PANEL];
  (void)b, (void)quads;
  if (k_end != k->k && (group == 0 || k_end % group != 0)) return;
  const trv_dim g = group ? (k_end - 1) / group : 0;
  trvk_q_scales(w->scale, g, col, n, scale);
  if (w->offset) trvk_q_scales(w->offset, g, col, n, offset);
  for (trv_dim m = 0; m < k->count; m++) {
    const int32_t sum = (int32_t)k->sum[m]; /* 0 where nobody needs it */
    const int32_t less = (int32_t)((uint32_t)w->zero * (uint32_t)sum);
    int32_t* c = k->acc[p][m];
    float* t = k->u.real[p][m];
    for (int j = 0; j < TRVK_PANEL; j++) {
      t[j] += (float)(int32_t)((uint32_t)c[j] - (uint32_t)less) * scale[j];
      c[j] = 0;
    }
    if (w->offset)
      for (int j = 0; j < TRVK_PANEL; j++) t[j] += (float)sum * offset[j];
  }
}

void trvk_qmatmul_dynamic_run(const trvk_call* call, uint32_t tile, const trvk_qgemm* gemm,
                              const trvk_gemm* real) {
  const trvf_qmatmul_attrs* a = call->attrs;
  const trv_tensor* bias = trvk_opt(call, 3);
  trvk_qmatmul q;
  state s;
  trvk_qblock k;
  int64_t e, got;
  if (trvk_count(&call->out[0]) == 0) return;
  (void)trvk_qmatmul_make(call, &q, &e, &got);
  const trvk_matmul_plan* p = &q.p;
  s.q = &q;
  k.g = gemm;
  k.self = &s;
  k.gather = gather;
  k.panel = panel;
  k.flush = flush;
  k.k = p->k;
  k.chunk = q.w.packed && q.w.bits == 8 ? TRVK_Q_A : TRVK_Q_B;
  k.period = q.w.group;
  k.sums = a->b_zero != 0 || q.w.offset != NULL;
  const trvk_qunits units = trvk_qmatmul_units(&q);
  trv_dim begin, end, last = -1;
  float* out = NULL;
  trvk_split(units.count, call->tiles, tile, &begin, &end);
  for (trv_dim u = begin; u < end; u++) {
    if (u / units.strips != last) {
      last = u / units.strips;
      const trv_dim m0 = last % units.blocks * units.rows, batch = last / units.blocks;
      k.count = p->m - m0 < units.rows ? p->m - m0 : units.rows;
      k.filled = 0;
      s.a = (const float*)(const void*)p->a.t->data +
            trvk_offset(p->nb, p->dim, p->a.batch, batch) + m0 * p->a.row;
      s.b = p->b.t->data + trvk_offset(p->nb, p->dim, p->b.batch, batch);
      out = (float*)(void*)p->out.t->data + trvk_offset(p->nb, p->dim, p->out.batch, batch) +
            m0 * p->out.row;
      for (trv_dim m = 0; m < k.count; m++) {
        float lo, hi;
        range(s.a + m * p->a.row, p->a.col, p->k, &lo, &hi);
        choose(&s.rows[m], a->dynamic, lo, hi);
      }
    }
    const trv_dim col = u % units.strips * TRVK_Q_STRIP,
                  n = p->n - col < TRVK_Q_STRIP ? p->n - col : TRVK_Q_STRIP;
    float add[TRVK_Q_STRIP] = {0};
    if (bias)
      for (trv_dim j = 0; j < n; j++)
        add[j] = ((const float*)(const void*)bias->data)[(col + j) * bias->stride[0]];
    trvk_qblock_run(&k, col, n);
    for (trv_dim i = 0; i < n; i += TRVK_PANEL) {
      const trv_dim run = n - i < TRVK_PANEL ? n - i : TRVK_PANEL;
      for (trv_dim m = 0; m < k.count; m++) {
        float* t = k.u.real[i / TRVK_PANEL][m];
        float* to = out + m * p->out.row + (col + i) * p->out.col;
        if (bias) /* a sum with 0 would turn -0 into 0 */
          for (trv_dim j = 0; j < run; j++) t[j] = t[j] * s.rows[m].step + add[i + j];
        else
          for (trv_dim j = 0; j < run; j++) t[j] = t[j] * s.rows[m].step;
        if (a->act != TRV_ACT_NONE) real->act(t, run, a->act, a->lo, a->hi);
        for (trv_dim j = 0; j < run; j++) to[j * p->out.col] = t[j];
      }
    }
  }
}

void trvk_qmatmul_dynamic__ref(const trvk_call* call, uint32_t tile) {
  trvk_qmatmul_dynamic_run(call, tile, &trvk_qgemm_ref, &trvk_gemm_ref);
}
