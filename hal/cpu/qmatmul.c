/* qmatmul.c - product with a weight in 8 or 4 bits: checks, and stored numbers to stored results.
 */
#include "qmatmul.h"

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

trvk_qunits trvk_qmatmul_units(const trvk_qmatmul* q) {
  trvk_qunits u;
  const trv_dim most = (q->p.m + TRVK_Q_ROWS - 1) / TRVK_Q_ROWS;
  u.rows = most ? (q->p.m + most - 1) / most : 1;
  u.blocks = (q->p.m + u.rows - 1) / u.rows;
  u.strips = (q->p.n + TRVK_Q_STRIP - 1) / TRVK_Q_STRIP;
  u.count = u.blocks * u.strips;
  for (uint32_t i = 0; i < q->p.nb; i++) u.count *= q->p.dim[i];
  return u;
}

uint32_t trvk_qmatmul_tiles(const trvk_call* call, uint32_t workers) {
  trvk_qmatmul q;
  int64_t e, got;
  const trv_dim count = trvk_count(&call->out[0]);
  if (workers <= 1 || count == 0 || trvk_qmatmul_make(call, &q, &e, &got)) return 1;
  return trvk_q_tiles(count, q.p.k, trvk_qmatmul_units(&q).count, workers);
}

typedef struct state {
  const trvk_qmatmul* q;
  const uint8_t *a, *b; /* of the present block and batch */
  uint32_t dtype;
  int32_t zero;
} state;

static void gather(const trvk_qblock* k, trv_dim k0, trv_dim kc, int16_t* to) {
  const state* s = k->self;
  const trvk_matmul_operand* a = &s->q->p.a;
  const trv_dim wide = trvk_round4(kc);
  for (trv_dim m = 0; m < k->count; m++, to += wide) {
    trvk_q_row(to, trvk_at(s->a, s->dtype, m * a->row + k0 * a->col), s->dtype, a->col, kc,
               s->zero);
    for (trv_dim i = kc; i < wide; i++) to[i] = 0;
  }
}

static const int8_t* panel(trvk_qblock* k, trv_dim k0, trv_dim kc, trv_dim col, trv_dim n) {
  const state* s = k->self;
  return trvk_q_panel(&s->q->w, s->b, k0, kc, col, n, k->b);
}

static void flush(trvk_qblock* k, trv_dim p, trv_dim col, trv_dim n, trv_dim k_end, const int8_t* b,
                  trv_dim quads) {
  (void)col, (void)n, (void)k_end;
  trvk_qblock_widen(k, ((const state*)k->self)->zero, p, b, quads);
}

/* Takes the zero point of b away: that many times the sum of a row of a. */
static void less_b_zero(trvk_qblock* k, trv_dim p, int32_t b_zero, int wide, int64_t a_less) {
  for (trv_dim m = 0; m < k->count; m++) {
    const int64_t less = trvk_mul64(b_zero, trvk_add64(k->sum[m], -a_less));
    for (int j = 0; j < TRVK_PANEL; j++) {
      if (wide)
        k->u.wide[p][m][j] = trvk_add64(k->u.wide[p][m][j], -less);
      else
        k->acc[p][m][j] = (int32_t)((uint32_t)k->acc[p][m][j] - (uint32_t)(uint64_t)less);
    }
  }
}

void trvk_qmatmul_run(const trvk_call* call, uint32_t tile, const trvk_qgemm* gemm,
                      const trvk_gemm* real) {
  const trvf_qmatmul_attrs* a = call->attrs;
  trvk_qmatmul q;
  trvk_qout out;
  state s;
  trvk_qblock k;
  int64_t e, got;
  if (trvk_count(&call->out[0]) == 0) return;
  (void)trvk_qmatmul_make(call, &q, &e, &got);
  trvk_qout_make(&out, &call->out[0], &call->in[2], trvk_opt(call, 3), a->y_zero, a->act, a->lo,
                 a->hi, 0);
  out.act_fn = real ? real->act : NULL;
  const trvk_matmul_plan* p = &q.p;
  s.q = &q;
  s.dtype = call->in[0].dtype;
  s.zero = a->a_zero;
  const int wide = s.dtype == TRV_DTYPE_I16;
  k.g = gemm;
  k.self = &s;
  k.gather = gather;
  k.panel = panel;
  k.flush = wide ? flush : NULL;
  k.k = p->k;
  k.chunk = wide ? TRVK_Q_WIDE : TRVK_Q_A;
  if (k.chunk > TRVK_Q_B && (!q.w.packed || q.w.bits == 4)) k.chunk = TRVK_Q_B;
  k.period = 0;
  k.sums = a->b_zero != 0;
  const trvk_qunits units = trvk_qmatmul_units(&q);
  trv_dim begin, end, last = -1, at = 0;
  trvk_split(units.count, call->tiles, tile, &begin, &end);
  for (trv_dim u = begin; u < end; u++) {
    if (u / units.strips != last) {
      last = u / units.strips;
      const trv_dim m0 = last % units.blocks * units.rows, batch = last / units.blocks;
      k.count = p->m - m0 < units.rows ? p->m - m0 : units.rows;
      k.filled = 0;
      s.a = trvk_at(p->a.t->data, s.dtype,
                    trvk_offset(p->nb, p->dim, p->a.batch, batch) + m0 * p->a.row);
      s.b = p->b.t->data + trvk_offset(p->nb, p->dim, p->b.batch, batch);
      at = trvk_offset(p->nb, p->dim, p->out.batch, batch) + m0 * p->out.row;
    }
    const trv_dim col = u % units.strips * TRVK_Q_STRIP,
                  n = p->n - col < TRVK_Q_STRIP ? p->n - col : TRVK_Q_STRIP;
    trvk_qblock_run(&k, col, n);
    trvk_qout_strip(&out, col, n);
    for (trv_dim i = 0; i < n; i += TRVK_PANEL) {
      const trv_dim run = n - i < TRVK_PANEL ? n - i : TRVK_PANEL;
      if (k.sums)
        less_b_zero(&k, i / TRVK_PANEL, a->b_zero, wide, wide ? trvk_mul64(p->k, s.zero) : 0);
      for (trv_dim m = 0; m < k.count; m++) {
        const trv_dim to = at + m * p->out.row + (col + i) * p->out.col;
        if (wide)
          trvk_qout_i64(&out, i, 1, k.u.wide[i / TRVK_PANEL][m], run, to, p->out.col);
        else
          trvk_qout_i32(&out, i, 1, k.acc[i / TRVK_PANEL][m], run, to, p->out.col);
      }
    }
  }
}

void trvk_qmatmul__ref(const trvk_call* call, uint32_t tile) {
  trvk_qmatmul_run(call, tile, &trvk_qgemm_ref, NULL);
}
