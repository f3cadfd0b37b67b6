/* qconv.c - convolution with 8-bit weights: checks, and stored activations to stored results. */
#include "qconv.h"

#include "mcu.h"

const char* trvk_qconv_make(const trvk_call* call, trvk_qconv* q, int64_t* expected, int64_t* got) {
  const trvf_qconv_attrs* a = call->attrs;
  const trv_tensor *x = &call->in[0], *w = &call->in[1], *y = &call->out[0];
  memset(&q->attrs, 0, sizeof q->attrs);
  q->attrs.nd = a->nd;
  q->attrs.transposed = a->transposed;
  q->attrs.act = a->act;
  q->attrs.groups = a->groups;
  q->attrs.lo = a->lo;
  q->attrs.hi = a->hi;
  memcpy(q->attrs.stride, a->stride, sizeof a->stride);
  memcpy(q->attrs.pad, a->pad, sizeof a->pad);
  memcpy(q->attrs.dilation, a->dilation, sizeof a->dilation);
  memcpy(q->attrs.kernel, a->kernel, sizeof a->kernel);
  q->call = *call;
  q->call.attrs = &q->attrs;
  q->call.in = q->in;
  q->call.n_in = 3;
  q->in[0] = *x;
  q->in[1] = *w;
  memset(&q->in[2], 0, sizeof q->in[2]);
  if (a->packed) { /* stands for a plain weight, which conv.c knows how to check */
    if (a->nd < 1 || a->nd > 3 || x->rank != a->nd + 2u || y->rank != a->nd + 2u || a->groups < 1 ||
        a->groups > (uint32_t)INT32_MAX || y->dim[1] > TRVK_Q_MOST)
      return trvk_fail(TRVK_SAY("qconv: rank or groups do not fit"), a->nd + 2, x->rank, expected,
                       got);
    const trv_dim groups = (trv_dim)a->groups;
    trv_tensor* t = &q->in[1];
    trv_dim step = trvk_round16(y->dim[1]);
    t->rank = x->rank;
    t->dim[0] = a->transposed ? x->dim[1] : y->dim[1];
    t->dim[1] = a->transposed ? y->dim[1] / groups : x->dim[1] / groups;
    memset(t->stride, 0, sizeof t->stride);
    if (trvk_conv_is_depthwise(groups, x->dim[1] / groups)) {
      t->stride[a->transposed ? 1 : 0] = 1;
      for (uint32_t i = a->nd; i-- > 0;) {
        t->stride[2 + i] = step;
        if (a->kernel[i] && step > PTRDIFF_MAX / 64 / a->kernel[i])
          return TRVK_SAY("qconv: sizes overflow");
        step *= a->kernel[i];
      }
    }
    for (uint32_t i = 0; i < a->nd; i++) t->dim[2 + i] = a->kernel[i];
  }
  const char* what = trvk_conv_geo_make(&q->call, &q->g, expected, got);
  if (what) return what;
  const trvk_conv_geo* g = &q->g;
  if (g->cin > TRVK_Q_MOST || g->cout > TRVK_Q_MOST || g->taps > TRVK_Q_MOST / (g->cin + 4))
    return TRVK_SAY("qconv: sizes overflow");
  q->c4 = trvk_round4(g->cg);
  memset(&q->w, 0, sizeof q->w);
  q->w.scale = &call->in[2];
  q->w.k_step = g->ws[1];
  q->w.n_step = g->ws[0];
  q->packed = a->packed != 0;
  q->w.packed = q->packed && !g->depthwise;
  q->w.bits = 8;
  q->w.panel = trvk_q_panel_bytes(g->taps * q->c4, 8);
  q->bytes = trvk_qconv_packed_bytes(g->groups, g->cg, g->og, g->taps);
  return NULL;
}

size_t trvk_qconv_packed_bytes(trv_dim groups, trv_dim cg, trv_dim og, trv_dim taps) {
  if (groups < 1 || cg < 1 || og < 1 || taps < 1 || groups > TRVK_Q_MOST || cg > TRVK_Q_MOST ||
      og > TRVK_Q_MOST / groups || taps > TRVK_Q_MOST / (cg + 4))
    return 0;
  if (trvk_conv_is_depthwise(groups, cg)) {
    const trv_dim wide = trvk_round16(groups * og);
    return taps > PTRDIFF_MAX / 64 / wide ? 0 : (size_t)(taps * wide);
  }
  const size_t one = trvk_q_packed_bytes(taps * trvk_round4(cg), og, 8);
  return one > (size_t)(PTRDIFF_MAX / 64) / (size_t)groups ? 0 : one * (size_t)groups;
}

const char* trvk_qconv_check(const trvk_call* call, int64_t* expected, int64_t* got) {
  const trvf_qconv_attrs* a = call->attrs;
  const trv_tensor *x = &call->in[0], *w = &call->in[1], *y = &call->out[0];
  trvk_qconv q;
  if (TRVK_ONLY_ROWS || a->packed == TRVK_PACKED_ROWS)
    return trvk_mcu_conv_check(call, expected, got);
  if (!a->packed && w->dtype != TRV_DTYPE_I8)
    return trvk_fail(TRVK_SAY("qconv: the weight is not i8"), TRV_DTYPE_I8, w->dtype, expected,
                     got);
  const char* what = trvk_out_check(y, expected, got); /* first: what follows multiplies its dims */
  if (what == NULL) what = trvk_qconv_make(call, &q, expected, got);
  if (what) return what;
  if (a->packed && (q.bytes == 0 || !trvk_q_packed_ok(w, q.bytes)))
    return trvk_fail(TRVK_SAY("qconv: size of the packed weight"), (int64_t)q.bytes,
                     w->rank ? w->dim[0] : 1, expected, got);
  return trvk_q_check_out(x, y, &call->in[2], trvk_opt(call, 3), y->dim[1], 0, a->x_zero, a->y_zero,
                          a->act, a->lo, a->hi, expected, got);
}

uint32_t trvk_qconv_tiles(const trvk_call* call, uint32_t workers) {
  trvk_qconv q;
  int64_t e, got;
  const trv_dim count = trvk_count(&call->out[0]);
  if (TRVK_ONLY_ROWS || workers <= 1 || count == 0 || trvk_is_conv_rows(call) ||
      trvk_qconv_make(call, &q, &e, &got))
    return 1;
  return trvk_q_tiles(count, q.g.cg * q.g.taps, count / 16 + 1, workers);
}

void trvk_qconv_run(const trvk_call* call, uint32_t tile, const trvk_qgemm* gemm,
                    trvk_qconv_path depthwise, const trvk_gemm* real) {
  const trvf_qconv_attrs* a = call->attrs;
  trvk_qconv q;
  trvk_qout out;
  int64_t e, got;
  if (trvk_count(&call->out[0]) == 0) return;
  (void)trvk_qconv_make(call, &q, &e, &got);
  trvk_qout_make(&out, &call->out[0], &call->in[2], trvk_opt(call, 3), a->y_zero, a->act, a->lo,
                 a->hi, 0);
  out.act_fn = real ? real->act : NULL;
  if (!q.g.depthwise)
    trvk_qconv_gemm_run(&q, &out, a->x_zero, tile, gemm);
  else if (call->in[0].dtype == TRV_DTYPE_I8)
    depthwise(&q, &out, a->x_zero, tile);
  else
    trvk_qconv_depthwise_i16(&q, &out, a->x_zero, tile);
}

void trvk_qconv__ref(const trvk_call* call, uint32_t tile) {
  trvk_qconv_run(call, tile, &trvk_qgemm_ref, trvk_qconv_depthwise_i8, NULL);
}
