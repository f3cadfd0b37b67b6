/* qrnn.c - LSTM, GRU and plain RNN on stored integers: 8-bit weights, inputs and outputs, 16-bit
 * states. States live in the outputs h and c; scratch holds what the recurrent product reads, the
 * state before the step in 8 bits. Sequences of the batch are independent and may run as tiles. */
#include "gemm.h"
#include "quant.h"

enum {
  SIZE_MOST = 32768,   /* of inputs and of the hidden state: products sum up below 2^31 */
  GATE_MOST = 1 << 24, /* one side of a gate, in 2^-12 */
  KNOTS = 513,         /* of sigmoid and of tanh in the table */
  WORK_MOST = 1 << 30,
};

typedef struct plan {
  trv_dim t, n, in, hidden, rows; /* rows of the weights: gates * hidden */
  const trv_tensor *x, *h0, *c0, *y, *h, *c;
  const int8_t *w_ih, *w_hh;
  const int32_t *scale, *b_ih, *b_hh;
  const int16_t* table;
  int32_t x_zero;
} plan;

size_t trvk_qrnn_tmp_bytes(const void* attrs, int64_t n, int64_t in, int64_t hidden) {
  (void)attrs, (void)in;
  return (size_t)n * (((size_t)hidden + 7) & ~(size_t)7);
}

static int shaped(const trv_tensor* t, uint32_t dtype, uint32_t rank, trv_dim a, trv_dim b,
                  trv_dim c) {
  const trv_dim want[3] = {a, b, c};
  if (t->dtype != dtype || t->rank != rank) return 0;
  for (uint32_t i = 0; i < rank; i++)
    if (t->dim[i] != want[i]) return 0;
  return 1;
}

/* The same for an operand that is read as one run of memory. */
static int dense(const trv_tensor* t, uint32_t dtype, uint32_t rank, trv_dim a, trv_dim b) {
  return shaped(t, dtype, rank, a, b, 0) && (a == 0 || (rank > 1 && b == 0) || trvk_dense(t));
}

static const char* make(const trvk_call* call, plan* p, int64_t* expected, int64_t* got) {
  const trvf_qrnn_attrs* a = call->attrs;
  const trv_tensor* in = call->in;
  const int lstm = a->kind == TRV_RNN_KIND_LSTM;
  if (!lstm && a->kind != TRV_RNN_KIND_GRU && a->kind != TRV_RNN_KIND_TANH)
    return trvk_fail(TRVK_SAY("qrnn: unknown kind"), TRV_RNN_KIND_TANH, a->kind, expected, got);
  if (a->packed) return TRVK_SAY("qrnn: packed weights have no kernel");
  if (lstm != (call->n_out == 3))
    return trvk_fail(TRVK_SAY("qrnn: an LSTM has three outputs, others two"), lstm ? 3 : 2,
                     call->n_out, expected, got);
  memset(p, 0, sizeof *p);
  p->x = in;
  p->h0 = trvk_opt(call, 7);
  p->c0 = trvk_opt(call, 8);
  p->y = call->out;
  p->h = &call->out[1];
  p->c = lstm ? &call->out[2] : NULL;
  p->x_zero = a->x_zero;
  if (p->x->rank != 3 || p->y->rank != 3)
    return trvk_fail(TRVK_SAY("qrnn: rank does not fit"), 3, p->x->rank, expected, got);
  p->t = p->x->dim[0];
  p->n = p->x->dim[1];
  p->in = p->x->dim[2];
  p->hidden = p->y->dim[2];
  if (p->in > SIZE_MOST || p->hidden > SIZE_MOST)
    return trvk_fail(TRVK_SAY("qrnn: too many inputs or hidden values"), SIZE_MOST, p->in, expected,
                     got);
  p->rows = p->hidden * (lstm ? 4 : a->kind == TRV_RNN_KIND_GRU ? 3 : 1);
  if (p->x->dtype != TRV_DTYPE_I8 || !trvk_fits(TRV_DTYPE_I8, a->x_zero) ||
      !shaped(p->y, TRV_DTYPE_I8, 3, p->t, p->n, p->hidden))
    return trvk_fail(TRVK_SAY("qrnn: input or output"), TRV_DTYPE_I8, p->x->dtype, expected, got);
  const trv_tensor* const state[4] = {p->h, p->c, p->h0, p->c0};
  for (int i = 0; i < 4; i++)
    if (state[i] &&
        (!shaped(state[i], TRV_DTYPE_I16, 2, p->n, p->hidden, 0) || (i == 3 && p->c == NULL)))
      return trvk_fail(TRVK_SAY("qrnn: a state"), p->hidden,
                       state[i]->rank == 2 ? state[i]->dim[1] : 0, expected, got);
  const trv_tensor *b_ih = trvk_opt(call, 5), *b_hh = trvk_opt(call, 6);
  if (!dense(&in[1], TRV_DTYPE_I8, 2, p->rows, p->in) ||
      !dense(&in[2], TRV_DTYPE_I8, 2, p->rows, p->hidden))
    return trvk_fail(TRVK_SAY("qrnn: a weight"), p->rows, in[1].rank ? in[1].dim[0] : 0, expected,
                     got);
  if (!dense(&in[3], TRV_DTYPE_I32, 2, 4, p->rows) || !dense(&in[4], TRV_DTYPE_I16, 2, 2, KNOTS))
    return trvk_fail(TRVK_SAY("qrnn: scales or table"), p->rows, in[3].rank == 2 ? in[3].dim[1] : 0,
                     expected, got);
  if ((b_ih && !dense(b_ih, TRV_DTYPE_I32, 1, p->rows, 0)) ||
      (b_hh && !dense(b_hh, TRV_DTYPE_I32, 1, p->rows, 0)))
    return trvk_fail(TRVK_SAY("qrnn: a bias"), p->rows, 0, expected, got);
  p->w_ih = (const int8_t*)in[1].data;
  p->w_hh = (const int8_t*)in[2].data;
  p->scale = (const int32_t*)(const void*)in[3].data;
  p->table = (const int16_t*)(const void*)in[4].data;
  if (b_ih) p->b_ih = (const int32_t*)(const void*)b_ih->data;
  if (b_hh) p->b_hh = (const int32_t*)(const void*)b_hh->data;
  return NULL;
}

const char* trvk_qrnn_check(const trvk_call* call, int64_t* expected, int64_t* got) {
  plan p;
  for (uint32_t i = 0; i < call->n_out; i++) {
    const char* what = trvk_out_check(&call->out[i], expected, got);
    if (what) return what;
  }
  const char* what = make(call, &p, expected, got);
  if (what) return what;
  /* n * hidden is a count of elements in memory (output h): no overflow */
  const size_t need = trvk_qrnn_tmp_bytes(call->attrs, p.n, p.in, p.hidden);
  if (need > 0 && (call->n_tmp < 1 || (size_t)call->tmp[0].dim[0] < need ||
                   (call->tmp[0].stride[0] != 1 && need > 1)))
    return trvk_fail(TRVK_SAY("qrnn: too little scratch"), (int64_t)need,
                     call->n_tmp ? call->tmp[0].dim[0] : 0, expected, got);
  return NULL;
}

uint32_t trvk_qrnn_tiles(const trvk_call* call, uint32_t workers) {
  plan p;
  int64_t e, g;
  if (make(call, &p, &e, &g)) return 1;
  const trv_dim factor[3] = {p.n, p.rows, p.in + p.hidden};
  trv_dim work = p.t < WORK_MOST ? p.t : WORK_MOST;
  for (int i = 0; i < 3; i++)
    work = factor[i] > 0 && work > WORK_MOST / factor[i] ? WORK_MOST : work * factor[i];
  return trvk_tiles(work, p.n, workers);
}

/* ---- one step ---- */

static int32_t sat16(int64_t v) { return trvk_stored(v, 0, INT16_MIN, INT16_MAX); }
static int8_t out8(int32_t h) {
  return (int8_t)trvk_stored(trvk_rescale(h, 1, 8), 0, INT8_MIN, INT8_MAX);
}

/* sigmoid (table) or tanh (table + KNOTS) of v in 2^-12, as 2^-15. */
static int32_t curve(const int16_t* table, int64_t v) {
  const int32_t at = sat16(v) + 32768;
  const int16_t* knot = table + (at >> 7);
  return knot[0] + (int32_t)trvk_rescale((int32_t)(knot[1] - knot[0]) * (at & 127), 1, 7);
}

static int32_t dot(const int8_t* w, const int8_t* v, trv_dim step, int32_t zero, trv_dim n) {
  int32_t sum = 0;
  for (trv_dim i = 0; i < n; i++) sum += w[i] * (v[i * step] - zero);
  return sum;
}

/* One side of a gate in 2^-12: row of the weights, times v. scale: the side's two rows. */
static int32_t side(const plan* p, trv_dim row, int32_t sum, const int32_t* bias,
                    const int32_t* scale) {
  const int64_t v = (int64_t)sum + (bias ? bias[row] : 0);
  return trvk_stored(trvk_rescale(v, scale[row], scale[p->rows + row]), 0, -GATE_MOST, GATE_MOST);
}

/* The new state of hidden value j. x: the step's inputs; h8: the whole state before the step. */
static int32_t step(const plan* p, uint32_t kind, trv_dim j, const int8_t* x, const int8_t* h8,
                    int32_t h, int16_t* c) {
  const int16_t *sigmoid = p->table, *tanh_ = p->table + KNOTS;
  int32_t px[4], ph[4];
  const int gates = kind == TRV_RNN_KIND_LSTM ? 4 : kind == TRV_RNN_KIND_GRU ? 3 : 1;
  for (int g = 0; g < gates; g++) {
    const trv_dim row = g * p->hidden + j;
    px[g] = side(p, row, dot(p->w_ih + row * p->in, x, p->x->stride[2], p->x_zero, p->in), p->b_ih,
                 p->scale);
    ph[g] = side(p, row, dot(p->w_hh + row * p->hidden, h8, 1, 0, p->hidden), p->b_hh,
                 p->scale + 2 * p->rows);
  }
  if (kind == TRV_RNN_KIND_LSTM) {
    const int32_t in = curve(sigmoid, px[0] + ph[0]), forget = curve(sigmoid, px[1] + ph[1]),
                  cell = curve(tanh_, px[2] + ph[2]), out = curve(sigmoid, px[3] + ph[3]);
    *c = (int16_t)sat16(trvk_rescale((int64_t)forget * *c, 1, 15) +
                        trvk_rescale((int64_t)in * cell, 1, 19));
    return sat16(trvk_rescale((int64_t)out * curve(tanh_, 2 * *c), 1, 15));
  }
  if (kind == TRV_RNN_KIND_GRU) {
    const int32_t reset = curve(sigmoid, px[0] + ph[0]), keep = curve(sigmoid, px[1] + ph[1]),
                  fresh = curve(tanh_, px[2] + trvk_rescale((int64_t)reset * ph[2], 1, 15));
    return sat16(trvk_rescale((int64_t)(32768 - keep) * fresh + (int64_t)keep * h, 1, 15));
  }
  return sat16(curve(tanh_, px[0] + ph[0]));
}

static int16_t* state(const trv_tensor* t, trv_dim n) {
  return (int16_t*)(void*)t->data + n * t->stride[0];
}

static void sequence(const plan* p, const trvf_qrnn_attrs* a, trv_dim n, int8_t* h8) {
  const trv_dim h_step = p->h->stride[1], c_step = p->c ? p->c->stride[1] : 0;
  int16_t *h = state(p->h, n), *c = p->c ? state(p->c, n) : NULL, unused = 0;
  for (trv_dim j = 0; j < p->hidden; j++) {
    h[j * h_step] = p->h0 ? state(p->h0, n)[j * p->h0->stride[1]] : 0;
    if (c) c[j * c_step] = p->c0 ? state(p->c0, n)[j * p->c0->stride[1]] : 0;
    h8[j] = out8(h[j * h_step]);
  }
  for (trv_dim k = 0; k < p->t; k++) {
    const trv_dim t = a->reverse ? p->t - 1 - k : k;
    const int8_t* x = (const int8_t*)p->x->data + t * p->x->stride[0] + n * p->x->stride[1];
    int8_t* y = (int8_t*)p->y->data + t * p->y->stride[0] + n * p->y->stride[1];
    for (trv_dim j = 0; j < p->hidden; j++) {
      int16_t* s = h + j * h_step;
      *s = (int16_t)step(p, a->kind, j, x, h8, *s, c ? c + j * c_step : &unused);
    }
    for (trv_dim j = 0; j < p->hidden; j++) y[j * p->y->stride[2]] = h8[j] = out8(h[j * h_step]);
  }
}

void trvk_qrnn__ref(const trvk_call* call, uint32_t tile) {
  plan p;
  int64_t e, g;
  (void)make(call, &p, &e, &g);
  if (p.hidden == 0) return;
  const trv_dim room = (trv_dim)trvk_qrnn_tmp_bytes(call->attrs, 1, p.in, p.hidden);
  trv_dim n, end;
  for (trvk_split(p.n, call->tiles, tile, &n, &end); n < end; n++)
    sequence(&p, call->attrs, n, (int8_t*)call->tmp[0].data + n * room);
}
