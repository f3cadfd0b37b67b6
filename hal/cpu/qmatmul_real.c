/* qmatmul_real.c - product of real numbers with a weight in 8 or 4 bits, through the float32
 * product; real results of a stored left side. */
#include "qmatmul.h"

enum { STREAM_ROWS = 3 }; /* more are worth floats of a strip */

static int can_stream(const trvk_qmatmul* q, const trvk_qgemm* g) {
  return g->stream && q->w.packed && q->p.m <= STREAM_ROWS && q->p.k > 0 && q->p.k % 8 == 0 &&
         q->p.a.col == 1 && trvk_q_by_columns(q->w.scale) && trvk_q_by_columns(q->w.offset);
}

/* Rows one by one over weights that are read as they lie. */
static void stream(const trvk_call* call, const trvk_qmatmul* q, uint32_t tile, const trvk_qgemm* g,
                   const trvk_gemm* real) {
  const trvf_qmatmul_attrs* a = call->attrs;
  const trvk_matmul_plan* p = &q->p;
  const trv_tensor* bias = trvk_opt(call, 3);
  const trv_dim strips = (p->n + TRVK_QT_STRIP - 1) / TRVK_QT_STRIP;
  float t[TRVK_QT_STRIP], scale[TRVK_QT_STRIP], offset[TRVK_QT_STRIP];
  trvk_qstream s;
  s.k = p->k;
  s.group = q->w.group ? q->w.group : p->k;
  s.b_panel = q->w.panel;
  s.bits = q->w.bits;
  s.zero = q->w.zero;
  s.t = t;
  s.offset = NULL;
  s.offset_row = s.offset_half = 0;
  trv_dim units = strips, begin, end;
  for (uint32_t i = 0; i < p->nb; i++) units *= p->dim[i];
  trvk_split(units, call->tiles, tile, &begin, &end);
  for (trv_dim u = begin; u < end; u++) {
    const trv_dim batch = u / strips, col = u % strips * TRVK_QT_STRIP;
    s.n = p->n - col < TRVK_QT_STRIP ? p->n - col : TRVK_QT_STRIP;
    s.b = p->b.t->data + trvk_offset(p->nb, p->dim, p->b.batch, batch) +
          col / TRVK_PANEL * q->w.panel;
    s.scale = trvk_q_columns(q->w.scale, col, s.n, scale, &s.scale_row, &s.scale_half);
    if (q->w.offset)
      s.offset = trvk_q_columns(q->w.offset, col, s.n, offset, &s.offset_row, &s.offset_half);
    for (trv_dim m = 0; m < p->m; m++) {
      float* y = (float*)(void*)call->out[0].data +
                 trvk_offset(p->nb, p->dim, p->out.batch, batch) + m * p->out.row +
                 col * p->out.col;
      s.a = (const float*)(const void*)p->a.t->data +
            trvk_offset(p->nb, p->dim, p->a.batch, batch) + m * p->a.row;
      g->stream(&s, trvk_panels(s.n));
      if (bias)
        for (trv_dim j = 0; j < s.n; j++)
          t[j] += ((const float*)(const void*)bias->data)[(col + j) * bias->stride[0]];
      if (a->act != TRV_ACT_NONE) real->act(t, s.n, a->act, a->lo, a->hi);
      for (trv_dim j = 0; j < s.n; j++) y[j * p->out.col] = t[j];
    }
  }
}

void trvk_qmatmul_real_run(const trvk_call* call, uint32_t tile, const trvk_qgemm* gemm,
                           const trvk_gemm* real, trvk_q_floats_fn floats) {
  trvk_qmatmul q;
  int64_t e, got;
  if (call->in[0].dtype != TRV_DTYPE_F32) {
    trvk_qmatmul_run(call, tile, gemm, real);
    return;
  }
  if (trvk_count(&call->out[0]) == 0) return;
  (void)trvk_qmatmul_make(call, &q, &e, &got);
  if (can_stream(&q, gemm)) {
    stream(call, &q, tile, gemm, real);
    return;
  }
  q.w.floats = floats;
  q.p.q = &q.w;
  trvk_matmul_floats(&q.call, &q.p, tile, real, NULL);
}

void trvk_qmatmul_real__ref(const trvk_call* call, uint32_t tile) {
  trvk_qmatmul_real_run(call, tile, &trvk_qgemm_ref, &trvk_gemm_ref, trvk_q_floats);
}
