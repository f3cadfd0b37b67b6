/* qmatmul_dynamic.c - rows of real numbers are quantised as they are copied, once for all strips of
 * a block: exact 32-bit sums per group of K, then floats in a fixed order (schema/ops.fbs). */
#include <float.h>

#include "qproduct.h"

/* The range of numbers of any step. */
static void range(const float* a, trv_dim step, trv_dim n, float* least, float* most) {
  float lo = 0, hi = 0;
  for (trv_dim i = 0; i < n; i++, a += step) {
    lo = *a < lo ? *a : lo;
    hi = *a > hi ? *a : hi;
  }
  *least = lo;
  *most = hi;
}

static void choose(trvk_qwork* w, trv_dim m, uint32_t dynamic, float lo, float hi) {
  trvk_qrow* r = &w->quant[m];
  if (dynamic == 1) {
    float most = -lo > hi ? -lo : hi;
    if (most > FLT_MAX) most = FLT_MAX;
    w->step[m] = most / 127.0f;
    r->inverse = most > 0.0f ? 127.0f / most : 0.0f;
    r->zero = 0;
    r->lo = -127;
    r->hi = 127;
  } else {
    const float span = (hi - lo) / 255.0f, tiny = 1.1920928955078125e-7f; /* 2^-23 */
    w->step[m] = span > tiny ? span : tiny;
    r->inverse = 1.0f / w->step[m];
    r->zero = trvk_clamp32(-128 - trvk_half_even(lo / w->step[m]), -128, 127);
    r->lo = -128;
    r->hi = 127;
  }
  w->zero[m] = r->zero;
}

static trv_dim octets_of(const trvk_qwork* w) { return (w->q->p.k + 7) / 8; }
/* Values along K that share a scale. */
static trv_dim group_of(const trvk_qwork* w) {
  const trv_dim group = w->q->w.group, all = octets_of(w) * 8;
  return group && group < all ? group : all;
}

/* Behind a row of nibbles' numbers: what each group's sum begins with, and its own sum. */
static void prepare(trvk_qwork* w) {
  const trvk_qweight* q = &w->q->w;
  w->nibbles = w->size == 1 && w->g->nibbles && q->packed && q->bits == 4 && w->q->p.k > 0 &&
               trvk_q_by_columns(q->scale) && trvk_q_by_columns(q->offset);
  if (w->nibbles) {
    const trv_dim n = octets_of(w) * 8, groups = (n + group_of(w) - 1) / group_of(w);
    w->row_bytes = n + groups * 8;
  }
}

static void rows(trvk_qwork* w, trv_dim k0, trv_dim kc) {
  const trvk_matmul_operand* p = &w->q->p.a;
  const trvf_qmatmul_attrs* a = w->call->attrs;
  const trv_dim wide = w->nibbles ? octets_of(w) * 8 : trvk_round4(kc), step = p->col;
  for (trv_dim m = 0; m < w->count; m++) {
    const float* from = (const float*)(const void*)w->a_data + m * p->row;
    int8_t* bytes = w->a.bytes + m * w->row_bytes;
    int16_t* words = w->a.words + m * (w->row_bytes / 2);
    const trvk_qrow* r = &w->quant[m];
    float lo, hi, part[64];
    if (k0 == 0) {
      if (step == 1)
        w->g->range(from, w->q->p.k, &lo, &hi);
      else
        range(from, step, w->q->p.k, &lo, &hi);
      choose(w, m, a->dynamic, lo, hi);
    }
    from += k0 * step;
    for (trv_dim i = 0, run; i < kc; i += run) {
      const float* some = from + i;
      run = step == 1 || kc - i < 64 ? kc - i : 64;
      if (step != 1) {
        for (trv_dim j = 0; j < run; j++) part[j] = from[(i + j) * step];
        some = part;
      }
      if (w->size == 1)
        w->g->quantise8(some, run, r, bytes + i);
      else
        w->g->quantise16(some, run, r, words + i);
    }
    for (trv_dim i = kc; i < wide; i++) { /* what counts as 0 */
      if (w->size == 1)
        bytes[i] = (int8_t)r->zero;
      else
        words[i] = 0;
    }
    if (!w->nibbles) continue;
    const trv_dim group = group_of(w), groups = (wide + group - 1) / group;
    int32_t *start = (int32_t*)(void*)(bytes + wide), *sum = start + groups;
    w->g->group_sums(bytes, wide, group, sum);
    for (trv_dim g = 0; g < groups; g++) {
      sum[g] -= (int32_t)(wide - g * group < group ? wide - g * group : group) * r->zero;
      start[g] = (int32_t)(0u - (uint32_t)a->b_zero * (uint32_t)sum[g]);
    }
  }
}

/* What goes out, whatever the way in. */
static void results(const trvk_qwork* w, trv_dim m0, trv_dim n, trvk_qreal* r, float* bias) {
  const trvf_qmatmul_attrs* a = w->call->attrs;
  const trvk_matmul_plan* p = &w->q->p;
  const trv_tensor* b = trvk_opt(w->call, 3);
  r->t = (float*)(uintptr_t)w->u.real + m0 * TRVK_QT_STRIP;
  r->t_row = TRVK_QT_STRIP;
  r->step = w->step + m0;
  r->bias = NULL;
  if (b && b->stride[0] == 1) {
    r->bias = (const float*)(const void*)b->data + w->col;
  } else if (b) {
    for (trv_dim j = 0; j < n; j++)
      bias[j] = ((const float*)(const void*)b->data)[(w->col + j) * b->stride[0]];
    r->bias = bias;
  }
  r->y = (float*)(void*)w->y + m0 * p->out.row + w->col * p->out.col;
  r->y_row = p->out.row;
  r->y_step = p->out.col;
  r->act_fn = w->real->act;
  r->act = a->act;
  r->lo = a->lo;
  r->hi = a->hi;
}

static void take(trvk_qwork* w, trv_dim m0, trv_dim count, trv_dim k_end, trv_dim n) {
  const trvf_qmatmul_attrs* a = w->call->attrs;
  const trvk_qweight* q = &w->q->w;
  const trv_dim k = w->q->p.k, g = q->group && k ? (k_end - 1) / q->group : 0;
  float scale[TRVK_QT_STRIP], offset[TRVK_QT_STRIP], bias[TRVK_QT_STRIP];
  int32_t base[TRVK_QT_MR], sums[TRVK_QT_MR];
  trvk_qreal r;
  results(w, m0, n, &r, bias);
  for (trv_dim p = 0; p < n; p += TRVK_PANEL) {
    const trv_dim run = n - p < TRVK_PANEL ? n - p : TRVK_PANEL;
    if (k) trvk_q_scales(q->scale, g, w->col + p, run, scale + p);
    if (k && q->offset) trvk_q_scales(q->offset, g, w->col + p, run, offset + p);
  }
  for (trv_dim m = 0; m < count; m++) {
    sums[m] = w->sums ? (int32_t)w->sum[m0 + m] : 0;
    base[m] = (int32_t)((uint32_t)q->zero * (uint32_t)sums[m]);
  }
  r.sum = k ? w->c + m0 * TRVK_QT_STRIP : NULL;
  if (k == 0) memset(r.t, 0, (size_t)count * TRVK_QT_STRIP * sizeof *r.t);
  r.sum_row = TRVK_QT_STRIP;
  r.less = w->size == 1 && a->dynamic == 2 ? w->zero + m0 : NULL;
  r.base = w->sums ? base : NULL;
  r.sums = sums;
  r.cols = w->cols;
  r.scale = scale;
  r.offset = q->offset ? offset : NULL;
  r.first = g == 0;
  r.last = k_end == k;
  w->g->real(&r, count, n);
}

static void strip(trvk_qwork* w, trv_dim n) {
  const trvf_qmatmul_attrs* a = w->call->attrs;
  const trvk_qweight* q = &w->q->w;
  float scale[TRVK_QT_STRIP], offset[TRVK_QT_STRIP], bias[TRVK_QT_STRIP];
  const int8_t* at[TRVK_Q_ROWS];
  trvk_qnibbles t;
  trvk_qreal r;
  if (!w->filled) rows(w, 0, w->q->p.k);
  w->filled = 1;
  for (trv_dim m = 0; m < w->count; m++) at[m] = w->a.bytes + m * w->row_bytes;
  t.rows = at;
  t.octets = octets_of(w);
  t.group = group_of(w) / 8;
  t.start_at = t.octets * 8;
  t.sum_at = t.start_at + (t.octets + t.group - 1) / t.group * 4;
  t.zero = a->dynamic == 2 ? w->zero : NULL;
  t.b = w->b_data + w->col / TRVK_PANEL * q->panel;
  t.b_panel = q->panel;
  t.scale = trvk_q_columns(q->scale, w->col, n, scale, &t.scale_row, &t.scale_half);
  t.offset = NULL;
  t.offset_row = t.offset_half = 0;
  if (q->offset)
    t.offset = trvk_q_columns(q->offset, w->col, n, offset, &t.offset_row, &t.offset_half);
  t.t = w->u.real;
  t.t_row = TRVK_QT_STRIP;
  t.n = n;
  w->g->nibbles(&t, (int)w->count, (int)trvk_panels(n));
  results(w, 0, n, &r, bias);
  r.sum = NULL;
  w->g->real(&r, w->count, n);
}

static const trvk_qdynamic dynamic_rows = {prepare, rows, take, strip};

void trvk_qmatmul_dynamic_run(const trvk_call* call, uint32_t tile, const trvk_qgemm* gemm,
                              const trvk_gemm* real) {
  trvk_qproduct_run(call, tile, gemm, real, &dynamic_rows);
}

void trvk_qmatmul_dynamic__ref(const trvk_call* call, uint32_t tile) {
  trvk_qmatmul_dynamic_run(call, tile, &trvk_qgemm_ref, &trvk_gemm_ref);
}
