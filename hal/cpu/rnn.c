/* rnn.c - LSTM (with projection), GRU and plain RNN over a whole sequence. The inputs of some steps
 * are multiplied at once; then each step adds its hidden product. Weights are read in panels:
 * packed in the file, or copied to scratch once per call. Rows of the batch are independent and may
 * run as tiles. */
#include "rnn.h"

static const char* make(const trvk_call* call, trvk_rnn* p, int64_t* expected, int64_t* got) {
  const trvf_rnn_attrs* a = call->attrs;
  *expected = *got = 0;
  memset(p, 0, sizeof *p);
  p->x = &call->in[0];
  p->w_ih = &call->in[1];
  p->w_hh = &call->in[2];
  p->b_ih = trvk_opt(call, 3);
  p->b_hh = trvk_opt(call, 4);
  p->h0 = trvk_opt(call, 5);
  p->c0 = trvk_opt(call, 6);
  p->w_proj = trvk_opt(call, 7);
  p->y = &call->out[0];
  p->h = &call->out[1];
  p->lstm = a->kind == TRV_RNN_KIND_LSTM;
  p->gru = a->kind == TRV_RNN_KIND_GRU;
  p->packed = a->packed != 0;
  if (p->lstm != (call->n_out == 3))
    return trvk_fail(TRVK_SAY("rnn: an LSTM has three outputs, others two"), p->lstm ? 3 : 2,
                     call->n_out, expected, got);
  p->c = p->lstm ? &call->out[2] : NULL;
  if (p->x->rank != 3 || p->y->rank != 3 || p->h->rank != 2 || (p->c && p->c->rank != 2))
    return trvk_fail(TRVK_SAY("rnn: rank does not fit"), 3, p->x->rank, expected, got);
  p->t = p->x->dim[0];
  p->n = p->x->dim[1];
  p->in = p->x->dim[2];
  p->out = p->y->dim[2];
  p->hidden = p->c ? p->c->dim[1] : p->out;
  if (p->hidden > PTRDIFF_MAX / 1024 || p->in > PTRDIFF_MAX / 64 || p->out > PTRDIFF_MAX / 1024)
    return TRVK_SAY("rnn: sizes overflow");
  p->gates = p->hidden * (p->lstm ? 4 : p->gru ? 3 : 1);
  if (p->in + p->out + p->hidden > 0 &&
      trvk_round16(p->gates) > PTRDIFF_MAX / 256 / (p->in + p->out + p->hidden))
    return TRVK_SAY("rnn: sizes overflow");
  const trv_tensor* const pair[4] = {p->h, p->h0, p->c, p->c0};
  for (int i = 0; i < 4; i++)
    if (pair[i] && (pair[i]->rank != 2 || pair[i]->dim[0] != p->n ||
                    pair[i]->dim[1] != (i < 2 ? p->out : p->hidden)))
      return trvk_fail(TRVK_SAY("rnn: shape of a state"), p->out, pair[i]->dim[1], expected, got);
  if (p->y->dim[0] != p->t || p->y->dim[1] != p->n)
    return trvk_fail(TRVK_SAY("rnn: steps or batch of the output"), p->t, p->y->dim[0], expected,
                     got);
  if ((p->c0 || p->w_proj) && !p->lstm)
    return TRVK_SAY("rnn: cell state and projection are an LSTM's");
  if (!p->w_proj && p->out != p->hidden)
    return trvk_fail(TRVK_SAY("rnn: hidden size of the output"), p->hidden, p->out, expected, got);
  const trv_tensor* const w[3] = {p->w_ih, p->w_hh, p->w_proj};
  const trv_dim rows[3] = {p->gates, p->gates, p->out}, cols[3] = {p->in, p->out, p->hidden};
  for (int i = 0; i < 3; i++) {
    if (w[i] == NULL) continue;
    if (p->packed ? !trvk_packed_ok(w[i], (size_t)(trvk_round16(rows[i]) * cols[i]) * sizeof(float))
                  : w[i]->rank != 2 || w[i]->dim[0] != rows[i] || w[i]->dim[1] != cols[i])
      return trvk_fail(TRVK_SAY("rnn: shape of a weight"), rows[i], w[i]->rank ? w[i]->dim[0] : 0,
                       expected, got);
  }
  for (int i = 0; i < 2; i++) {
    const trv_tensor* b = i ? p->b_hh : p->b_ih;
    if (b && (b->rank != 1 || b->dim[0] != p->gates))
      return trvk_fail(TRVK_SAY("rnn: size of a bias"), p->gates, b->rank ? b->dim[0] : 0, expected,
                       got);
  }
  return NULL;
}

/* ---- scratch, in floats (doubles)
 * ----------------------------------------------------------------------------------- */
static trv_dim row_floats(const trvk_rnn* p, uint32_t dtype) {
  const trv_dim g16 = trvk_round16(p->gates);
  if (dtype == TRV_DTYPE_F64) return 2 * p->gates + p->out + 2 * p->hidden;
  return (TRVK_RNN_STEPS + (p->gru ? 1 : 0)) * g16 + trvk_round16(p->out) +
         2 * trvk_round16(p->hidden);
}
static trv_dim weight_floats(const trvk_rnn* p, uint32_t dtype, int proj) {
  if (p->packed || dtype == TRV_DTYPE_F64) return 0;
  return trvk_round16(p->gates) * (p->in + p->out) + (proj ? trvk_round16(p->out) * p->hidden : 0);
}

size_t trvk_rnn_tmp_bytes(const void* attrs, uint32_t dtype, int64_t n, int64_t in, int64_t hidden,
                          int64_t proj) {
  const trvf_rnn_attrs* a = attrs;
  trvk_rnn p;
  memset(&p, 0, sizeof p);
  p.lstm = a->kind == TRV_RNN_KIND_LSTM;
  p.gru = a->kind == TRV_RNN_KIND_GRU;
  p.packed = a->packed != 0;
  p.in = (trv_dim)in;
  p.hidden = (trv_dim)hidden;
  p.out = (trv_dim)(proj > 0 ? proj : hidden);
  p.gates = p.hidden * (p.lstm ? 4 : p.gru ? 3 : 1);
  const size_t size = dtype == TRV_DTYPE_F64 ? 8 : 4;
  return 64 + size * ((size_t)weight_floats(&p, dtype, proj > 0) +
                      (size_t)n * (size_t)row_floats(&p, dtype));
}

const char* trvk_rnn_check(const trvk_call* call, int64_t* expected, int64_t* got) {
  const trvf_rnn_attrs* a = call->attrs;
  const uint32_t dtype = call->in[0].dtype;
  trvk_rnn p;
  if (!trvk_dtype_is_float(dtype))
    return trvk_fail(TRVK_SAY("rnn: dtype without a kernel"), TRV_DTYPE_F32, dtype, expected, got);
  if (a->kind >= TRV_RNN_KIND_COUNT || (a->packed && dtype != TRV_DTYPE_F32))
    return trvk_fail(TRVK_SAY("rnn: unknown kind, or packed weights of another dtype than float32"),
                     TRV_RNN_KIND_COUNT, a->kind, expected, got);
  for (uint32_t i = 0; i < (uint32_t)call->n_in + call->n_out; i++) {
    const trv_tensor* t = i < call->n_in ? trvk_opt(call, i) : &call->out[i - call->n_in];
    if (t && t->dtype != dtype)
      return trvk_fail(TRVK_SAY("rnn: dtypes differ"), dtype, t->dtype, expected, got);
  }
  for (uint32_t i = 0; i < call->n_out; i++) {
    const char* what = trvk_out_check(&call->out[i], expected, got);
    if (what) return what;
  }
  const char* what = make(call, &p, expected, got);
  if (what) return what;
  if (row_floats(&p, dtype) > 0 && p.n > PTRDIFF_MAX / 64 / row_floats(&p, dtype))
    return TRVK_SAY("rnn: sizes overflow");
  const size_t need = trvk_rnn_tmp_bytes(a, dtype, p.n, p.in, p.hidden, p.w_proj ? p.out : 0);
  if (call->n_tmp < 1 || (size_t)call->tmp[0].dim[0] < need ||
      (call->tmp[0].stride[0] != 1 && need > 1))
    return trvk_fail(TRVK_SAY("rnn: too little scratch"), (int64_t)need,
                     call->n_tmp ? call->tmp[0].dim[0] : 0, expected, got);
  return NULL;
}

uint32_t trvk_rnn_tiles(const trvk_call* call, uint32_t workers) {
  const trvf_rnn_attrs* a = call->attrs;
  trvk_rnn p;
  int64_t e, g;
  if (make(call, &p, &e, &g) || !(a->packed || call->in[0].dtype == TRV_DTYPE_F64))
    return 1; /* packing is not shared */
  const double work = (double)p.t * (double)p.n * (double)p.gates * (double)(p.in + p.out) / 8.0;
  return trvk_tiles(work > 1e9 ? (trv_dim)1000000000 : (trv_dim)work, p.n / 4, workers);
}

/* ---- float32
 * ----------------------------------------------------------------------------------------------------------
 */
typedef struct state {
  const trvk_rnn* p;
  const trvk_gemm* g;
  uint32_t dtype;
  const float *w_ih, *w_hh, *w_proj;
  trv_dim n0, rows;              /* rows of the batch that this tile has */
  float *gx, *gh, *h, *c, *cell; /* gx[step * rows + row][g16], gh[row][g16], h[row][out16], c and
                                    cell [row][hidden16] */
  trv_dim g16, out16, hidden16;
  float gather[TRVK_GATHER];
} state;

/* dst[row][0 .. n16) = bias + a . B, or += a . B. a: count rows of k elements; biases are summed,
 * of dtype. */
static void product(state* s, const uint8_t* const* a, uint32_t dtype, trv_dim a_col, trv_dim count,
                    trv_dim k, const float* b, float* dst, trv_dim n, trv_dim n16,
                    const trv_tensor* b0, const trv_tensor* b1, int add) {
  const int direct = dtype == TRV_DTYPE_F32 && a_col == 1;
  const float *rows[TRVK_ROWS], *panel = b;
  trvk_row row[TRVK_ROWS];
  trvk_epi epi;
  trvk_block blk;
  memset(&epi, 0, sizeof epi);
  epi.g = s->g;
  epi.out = (uint8_t*)(void*)dst;
  epi.out_col = 1;
  epi.dtype = TRV_DTYPE_F32;
  for (trv_dim i = 0; i < count; i++) row[i].out = i * n16;
  blk.g = s->g;
  blk.epi = &epi;
  blk.row = row;
  blk.rows = rows;
  blk.count = count;
  blk.mr = trvk_even_rows(s->g, count);
  blk.taps = 1;
  blk.ak = 1;
  blk.b = &panel;
  blk.bk = TRVK_PANEL;
  blk.bp = k * TRVK_PANEL;
  blk.acc = NULL; /* rows are whole panels: sums go straight to dst */
  const trv_dim most = direct ? TRVK_KC : TRVK_GATHER / count,
                width = (trv_dim)s->g->np * TRVK_PANEL;
  for (trv_dim k0 = 0; k0 == 0 || k0 < k; k0 += most) {
    blk.kc = k - k0 < most ? k - k0 : most;
    blk.first = k0 == 0 && !add;
    blk.last = k0 + blk.kc >= k;
    for (trv_dim i = 0; i < count; i++) {
      if (direct) {
        rows[i] = (const float*)(const void*)a[i] + k0;
      } else {
        trvk_row_load(s->gather + i * blk.kc, trvk_at(a[i], dtype, k0 * a_col), dtype, a_col,
                      blk.kc);
        rows[i] = s->gather + i * blk.kc;
      }
    }
    if (count == 1 && !(blk.first && (b0 || b1))) { /* all panels in one go */
      panel = b + k0 * TRVK_PANEL;
      const trvk_tile t = {.rows = rows,
                           .b = &panel,
                           .c = &dst,
                           .taps = 1,
                           .kc = blk.kc,
                           .ak = 1,
                           .bk = TRVK_PANEL,
                           .bp = blk.bp,
                           .lo = -INFINITY,
                           .hi = INFINITY,
                           .accumulate = !blk.first};
      s->g->stream(&t, n16 / TRVK_PANEL);
      continue;
    }
    for (trv_dim col = 0; col < n16; col += width) {
      float bias[TRVK_STRIP] = {0.0f}, more[TRVK_STRIP];
      const trv_dim cols = n16 - col < width ? n16 - col : width,
                    real = n - col < cols ? n - col : cols;
      blk.bias = NULL;
      if (blk.first && (b0 || b1)) {
        blk.bias = bias;
        if (b0)
          trvk_row_load(bias, trvk_at(b0->data, s->dtype, col * b0->stride[0]), s->dtype,
                        b0->stride[0], real);
        if (b1) {
          trvk_row_load(more, trvk_at(b1->data, s->dtype, col * b1->stride[0]), s->dtype,
                        b1->stride[0], real);
          for (trv_dim i = 0; i < real; i++) bias[i] += more[i];
        }
      }
      panel = b + col * k + k0 * TRVK_PANEL;
      trvk_block_run(&blk, col, cols, 0);
    }
  }
}

/* a row of a [T, N, size] or [N, size] tensor */
static uint8_t* row_at(const trv_tensor* t, trv_dim step, trv_dim n) {
  return trvk_at(t->data, t->dtype,
                 t->rank == 3 ? step * t->stride[0] + n * t->stride[1] : n * t->stride[0]);
}

/* Products of float rows [count][step] in blocks. */
static void product_rows(state* s, const float* a, trv_dim step, trv_dim k, const float* b,
                         float* dst, trv_dim n, trv_dim n16, const trv_tensor* bias, int add) {
  const uint8_t* rows[TRVK_ROWS];
  for (trv_dim r = 0; r < s->rows; r += TRVK_ROWS) {
    const trv_dim count = s->rows - r < TRVK_ROWS ? s->rows - r : TRVK_ROWS;
    for (trv_dim i = 0; i < count; i++) rows[i] = (const uint8_t*)(const void*)(a + (r + i) * step);
    product(s, rows, TRV_DTYPE_F32, 1, count, k, b, dst + r * n16, n, n16, bias, NULL, add);
  }
}

static void input_product(state* s, trv_dim step, int reverse, trv_dim steps) {
  const trvk_rnn* p = s->p;
  const uint8_t* rows[TRVK_ROWS];
  const trv_dim all = steps * s->rows;
  for (trv_dim r = 0; r < all; r += TRVK_ROWS) {
    const trv_dim count = all - r < TRVK_ROWS ? all - r : TRVK_ROWS;
    for (trv_dim i = 0; i < count; i++) {
      const trv_dim t = step + (r + i) / s->rows;
      rows[i] = row_at(p->x, reverse ? p->t - 1 - t : t, s->n0 + (r + i) % s->rows);
    }
    product(s, rows, s->dtype, p->x->stride[2], count, p->in, s->w_ih, s->gx + r * s->g16, p->gates,
            s->g16, p->b_ih, p->gru ? NULL : p->b_hh, 0);
  }
}

static void cell(state* s, uint32_t kind, float* gates, const float* hidden_gates, float* h,
                 float* c, float* raw) {
  const trvk_rnn* p = s->p;
  switch (kind) {
    case TRV_RNN_KIND_LSTM:
      s->g->lstm(gates, c, p->w_proj ? raw : h, p->hidden);
      break;
    case TRV_RNN_KIND_GRU:
      s->g->gru(gates, hidden_gates, h, p->hidden);
      break;
    default:
      if (kind == TRV_RNN_KIND_TANH)
        s->g->act(gates, p->hidden, TRV_ACT_TANH, 0.0f, 0.0f);
      else
        s->g->act(gates, p->hidden, TRV_ACT_CLAMP, 0.0f, INFINITY);
      memcpy(h, gates, (size_t)p->hidden * sizeof *h);
  }
}

static void sequence(state* s, const trvf_rnn_attrs* a) {
  const trvk_rnn* p = s->p;
  for (trv_dim i = 0; i < s->rows; i++) {
    float *h = s->h + i * s->out16, *c = s->c + i * s->hidden16;
    memset(h, 0, (size_t)s->out16 * sizeof *h);
    memset(c, 0, (size_t)s->hidden16 * sizeof *c);
    if (p->h0) trvk_row_load(h, row_at(p->h0, 0, s->n0 + i), s->dtype, p->h0->stride[1], p->out);
    if (p->c0) trvk_row_load(c, row_at(p->c0, 0, s->n0 + i), s->dtype, p->c0->stride[1], p->hidden);
  }
  for (trv_dim t = 0; t < p->t; t++) {
    const trv_dim in_chunk = t % TRVK_RNN_STEPS;
    if (in_chunk == 0)
      input_product(s, t, a->reverse, p->t - t < TRVK_RNN_STEPS ? p->t - t : TRVK_RNN_STEPS);
    float* gates = s->gx + in_chunk * s->rows * s->g16;
    const int fused = p->lstm && s->rows == 1 && p->hidden % TRVK_PANEL == 0;
    if (fused) {
      s->g->lstm_step(s->h, p->out, s->w_hh, gates, s->c, s->cell, p->hidden, (int)(t & 1));
      if (!p->w_proj) memcpy(s->h, s->cell, (size_t)p->hidden * sizeof(float));
    } else {
      product_rows(s, s->h, s->out16, p->out, s->w_hh, p->gru ? s->gh : gates, p->gates, s->g16,
                   p->gru ? p->b_hh : NULL, !p->gru);
    }
    for (trv_dim i = 0; i < (fused ? 0 : s->rows); i++)
      cell(s, a->kind, gates + i * s->g16, s->gh + i * s->g16, s->h + i * s->out16,
           s->c + i * s->hidden16, s->cell + i * s->hidden16);
    if (p->w_proj)
      product_rows(s, s->cell, s->hidden16, p->hidden, s->w_proj, s->h, p->out, s->out16, NULL, 0);
    for (trv_dim i = 0; i < s->rows; i++)
      trvk_row_store(row_at(p->y, a->reverse ? p->t - 1 - t : t, s->n0 + i), s->dtype,
                     p->y->stride[2], s->h + i * s->out16, p->out);
  }
  for (trv_dim i = 0; i < s->rows; i++) {
    trvk_row_store(row_at(p->h, 0, s->n0 + i), s->dtype, p->h->stride[1], s->h + i * s->out16,
                   p->out);
    if (p->c)
      trvk_row_store(row_at(p->c, 0, s->n0 + i), s->dtype, p->c->stride[1], s->c + i * s->hidden16,
                     p->hidden);
  }
}

static const float* weight(const trvk_rnn* p, const trv_tensor* w, trv_dim rows, trv_dim cols,
                           float** scratch) {
  if (w == NULL) return NULL;
  if (p->packed) return (const float*)(const void*)w->data;
  float* dst = *scratch;
  *scratch += trvk_round16(rows) * cols;
  trvk_pack_panels(dst, w->data, w->dtype, w->stride[1], w->stride[0], cols, rows,
                   trvk_panels(rows));
  return dst;
}

void trvk_rnn_run(const trvk_call* call, uint32_t tile, const trvk_gemm* g) {
  trvk_rnn p;
  int64_t e, got;
  (void)make(call, &p, &e, &got);
  const uint32_t dtype = call->in[0].dtype;
  uint8_t* raw = call->tmp[0].data;
  raw += (64 - ((uintptr_t)raw & 63u)) & 63u;
  trv_dim begin, end;
  /* Without packed weights tile 0 does all: the others could not wait for its packing. */
  const int shared = p.packed || dtype == TRV_DTYPE_F64;
  trvk_split(p.n, shared ? call->tiles : 1, shared ? tile : 0, &begin, &end);
  if (end <= begin || (!shared && tile > 0)) return;
  if (dtype == TRV_DTYPE_F64) {
    trvk_rnn_plain(call, &p, begin, end, (double*)(void*)raw + begin * row_floats(&p, dtype));
    return;
  }
  state s;
  float* scratch = (float*)(void*)raw;
  s.p = &p;
  s.g = g;
  s.dtype = dtype;
  s.w_ih = weight(&p, p.w_ih, p.gates, p.in, &scratch);
  s.w_hh = weight(&p, p.w_hh, p.gates, p.out, &scratch);
  s.w_proj = weight(&p, p.w_proj, p.out, p.hidden, &scratch);
  scratch += begin * row_floats(&p, dtype);
  s.n0 = begin;
  s.rows = end - begin;
  s.g16 = trvk_round16(p.gates);
  s.out16 = trvk_round16(p.out);
  s.hidden16 = trvk_round16(p.hidden);
  s.gx = scratch;
  s.gh = s.gx + TRVK_RNN_STEPS * s.rows * s.g16;
  s.h = s.gh + (p.gru ? s.rows * s.g16 : 0);
  s.c = s.h + s.rows * s.out16;
  s.cell = s.c + s.rows * s.hidden16;
  sequence(&s, call->attrs);
}
