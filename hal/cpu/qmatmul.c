/* qmatmul.c - product with a weight in 8 or 4 bits: checks, and stored numbers to stored results.
 */
#include "mcu.h"
#include "qproduct.h"

const char* trvk_qmatmul_make(const trvk_call* call, trvk_qmatmul* q, int64_t* expected,
                              int64_t* got) {
  const trvf_qmatmul_attrs* a = call->attrs;
  const trv_tensor *x = &call->in[0], *y = &call->out[0];
  memset(&q->attrs, 0, sizeof q->attrs);
  q->attrs.act = a->act;
  q->attrs.lo = a->lo;
  q->attrs.hi = a->hi;
  q->call = *call;
  q->call.attrs = &q->attrs;
  q->call.in = q->in;
  q->call.n_in = 3;
  q->in[0] = *x;
  q->in[1] = call->in[1];
  memset(&q->in[2], 0, sizeof q->in[2]);
  if (x->dtype == TRV_DTYPE_F32 && trvk_opt(call, 3)) q->in[2] = call->in[3];
  const trv_dim k = x->rank ? x->dim[x->rank - 1] : 0, n = y->rank ? y->dim[y->rank - 1] : 0;
  if (k > TRVK_Q_MOST || n > TRVK_Q_MOST) return TRVK_SAY("qmatmul: sizes overflow");
  if (a->packed) { /* stands for a plain weight, which matmul.c knows how to check */
    trv_tensor* t = &q->in[1];
    t->rank = 2;
    t->dim[0] = k;
    t->dim[1] = n;
    t->stride[0] = t->stride[1] = 0;
  }
  const char* what = trvk_matmul_plan_make(&q->call, &q->p, expected, got);
  if (what) return what;
  memset(&q->w, 0, sizeof q->w);
  q->w.scale = &call->in[2];
  q->w.offset = trvk_opt(call, 4);
  q->w.k_step = q->p.b.row;
  q->w.n_step = q->p.b.col;
  q->w.group = (trv_dim)(a->group & (uint32_t)INT32_MAX);
  q->w.zero = a->b_zero;
  q->w.packed = a->packed != 0;
  q->w.bits = a->bits == 4 ? 4 : 8;
  q->w.panel = trvk_q_panel_bytes(k, q->w.bits);
  q->bytes = trvk_q_packed_bytes(k, n, q->w.bits);
  return NULL;
}

const char* trvk_qmatmul_check(const trvk_call* call, int64_t* expected, int64_t* got) {
  const trvf_qmatmul_attrs* a = call->attrs;
  const trv_tensor *x = &call->in[0], *b = &call->in[1], *scale = &call->in[2], *y = &call->out[0];
  const trv_tensor *bias = trvk_opt(call, 3), *offset = trvk_opt(call, 4);
  const int stored = trvk_dtype_is_stored(x->dtype), four = a->bits == 4;
  trvk_qmatmul q;
  if (TRVK_ONLY_ROWS || a->packed == TRVK_PACKED_ROWS)
    return trvk_mcu_matmul_check(call, expected, got);
  if (a->bits != 8 && a->bits != 4)
    return trvk_fail(TRVK_SAY("qmatmul: weights have 8 bits or 4"), 8, a->bits, expected, got);
  if (!a->packed && b->dtype != (four ? TRV_DTYPE_U8 : TRV_DTYPE_I8))
    return trvk_fail(TRVK_SAY("qmatmul: dtype of the right side"),
                     four ? TRV_DTYPE_U8 : TRV_DTYPE_I8, b->dtype, expected, got);
  if (a->b_zero < (four ? 0 : INT8_MIN) || a->b_zero > (four ? 15 : INT8_MAX))
    return trvk_fail(TRVK_SAY("qmatmul: the right side's zero point is not one of its numbers"), 0,
                     a->b_zero, expected, got);
  if (a->dynamic > 2 || (stored && a->dynamic != 0))
    return trvk_fail(TRVK_SAY("qmatmul: unknown way to quantise rows"), stored ? 0 : 2, a->dynamic,
                     expected, got);
  if (!trvk_q_group_ok(a->group) || (stored && a->group != 0))
    return trvk_fail(TRVK_SAY("qmatmul: a group is not a multiple of 8, or not of a real product"),
                     8, a->group, expected, got);
  if (stored && offset) return TRVK_SAY("qmatmul: an offset is for real products");
  const char* what = trvk_out_check(y, expected, got); /* first: the plan multiplies its dims */
  if (what == NULL) what = trvk_qmatmul_make(call, &q, expected, got);
  if (what) return what;
  if (a->packed && !trvk_q_packed_ok(b, q.bytes))
    return trvk_fail(TRVK_SAY("qmatmul: size of the packed weight"), (int64_t)q.bytes,
                     b->rank ? b->dim[0] : 1, expected, got);
  if (!stored) {
    trv_tensor any = *scale; /* checked here, with groups; the rest below */
    if (!trvk_q_scale_ok(scale, q.p.k, q.p.n, q.w.group) ||
        (offset && !trvk_q_scale_ok(offset, q.p.k, q.p.n, q.w.group)))
      return trvk_fail(TRVK_SAY("qmatmul: dtype or shape of the scale or offset"),
                       q.w.group ? (int64_t)(q.p.k / q.w.group) : q.p.n,
                       scale->rank ? scale->dim[0] : 1, expected, got);
    any.dtype = TRV_DTYPE_F32;
    any.rank = 1;
    any.dim[0] = q.p.n;
    return trvk_q_check_out(x, y, &any, bias, q.p.n, 1, 0, 0, a->act, a->lo, a->hi, expected, got);
  }
  return trvk_q_check_out(x, y, scale, bias, q.p.n, 1, a->a_zero, a->y_zero, a->act, a->lo, a->hi,
                          expected, got);
}

uint32_t trvk_qmatmul_tiles(const trvk_call* call, uint32_t workers) {
  trvk_qmatmul q;
  int64_t e, got;
  const trv_dim count = trvk_count(&call->out[0]);
  if (TRVK_ONLY_ROWS || workers <= 1 || count == 0 || trvk_is_any_matmul_rows(call) ||
      trvk_qmatmul_make(call, &q, &e, &got))
    return 1;
  const trv_dim blocks = (q.p.m + TRVK_Q_ROWS - 1) / TRVK_Q_ROWS;
  return trvk_q_tiles(count, q.p.k, count / q.p.m / q.p.n * blocks * trvk_panels(q.p.n), workers);
}

void trvk_qmatmul_run(const trvk_call* call, uint32_t tile, const trvk_qgemm* gemm,
                      const trvk_gemm* real) {
  trvk_qproduct_run(call, tile, gemm, real, NULL);
}

void trvk_qmatmul__ref(const trvk_call* call, uint32_t tile) {
  trvk_qmatmul_run(call, tile, &trvk_qgemm_ref, NULL);
}
