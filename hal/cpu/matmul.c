/* matmul.c - batched matrix product with epilogue: checks, and the float32, float16 and bfloat16
 * paths over gemm.h. */
#include "matmul.h"

#include "qgemm.h"

/* Strides of an operand along the output's axes but the last `skip`, where it broadcasts: 0. */
static int batch_strides(const trv_tensor* t, uint32_t own, const trvk_matmul_plan* p,
                         trv_dim* stride) {
  const uint32_t have = t->rank - own;
  if (have > p->nb) return 0;
  for (uint32_t i = 0; i < p->nb; i++) {
    const uint32_t from = p->nb - have;
    stride[i] = 0;
    if (i < from) continue;
    const trv_dim d = t->dim[i - from];
    if (d != 1 && d != p->dim[i]) return 0;
    if (d != 1) stride[i] = t->stride[i - from];
  }
  return 1;
}

/* Joins the innermost batch axis with M where that makes no difference: fewer, larger products. */
static void join_rows(trvk_matmul_plan* p) {
  while (p->nb > 0) {
    const uint32_t i = p->nb - 1;
    if (p->dim[i] != 1) {
      if (p->b.batch[i] != 0) return;
      if (p->m != 1) {
        if (p->a.batch[i] != p->m * p->a.row || p->out.batch[i] != p->m * p->out.row ||
            p->bias.batch[i] != p->m * p->bias.row || p->res.batch[i] != p->m * p->res.row)
          return;
      } else {
        p->a.row = p->a.batch[i];
        p->out.row = p->out.batch[i];
        p->bias.row = p->bias.batch[i];
        p->res.row = p->res.batch[i];
      }
      p->m *= p->dim[i];
    }
    p->nb--;
  }
}

static int operand(const trv_tensor* t, const trvk_matmul_plan* p, trvk_matmul_operand* o) {
  o->t = t;
  memset(o->batch, 0, sizeof o->batch);
  o->row = o->col = 0;
  if (t == NULL) return 1;
  uint32_t own = t->rank < 2 ? t->rank : 2;
  if (own >= 1) {
    const trv_dim d = t->dim[t->rank - 1];
    if (d != 1 && d != p->n) return 0;
    if (d != 1) o->col = t->stride[t->rank - 1];
  }
  if (own >= 2 && p->vector) own = 1;
  if (own >= 2) {
    const trv_dim d = t->dim[t->rank - 2];
    if (d != 1 && d != p->m) return 0;
    if (d != 1) o->row = t->stride[t->rank - 2];
  }
  return batch_strides(t, own, p, o->batch);
}

const char* trvk_matmul_plan_make(const trvk_call* call, trvk_matmul_plan* p, int64_t* expected,
                                  int64_t* got) {
  const trvf_matmul_attrs* attrs = call->attrs;
  const trv_tensor *a = &call->in[0], *b = &call->in[1], *out = &call->out[0];
  *expected = *got = 0;
  p->q = NULL;
  if (a->rank < 1)
    return trvk_fail(TRVK_SAY("matmul: the left side is a scalar"), 1, 0, expected, got);
  p->vector = a->rank == 1;
  if (out->rank + (uint32_t)p->vector < 2)
    return trvk_fail(TRVK_SAY("matmul: the output's rank is too low"), 2, out->rank, expected, got);
  p->k = a->dim[a->rank - 1];
  p->n = out->dim[out->rank - 1];
  p->m = p->vector ? 1 : out->dim[out->rank - 2];
  p->nb = out->rank + (uint32_t)p->vector - 2u;
  for (uint32_t i = 0; i < p->nb; i++) p->dim[i] = out->dim[i];
  memset(&p->a, 0, sizeof p->a);
  memset(&p->b, 0, sizeof p->b);
  p->a.t = a;
  p->b.t = b;
  p->a.col = a->stride[a->rank - 1];
  if (!p->vector) {
    if (a->dim[a->rank - 2] != p->m)
      return trvk_fail(TRVK_SAY("matmul: rows of the left side and of the output differ"), p->m,
                       a->dim[a->rank - 2], expected, got);
    p->a.row = a->stride[a->rank - 2];
  }
  if (!batch_strides(a, p->vector ? 1 : 2, p, p->a.batch))
    return TRVK_SAY("matmul: batch sizes of the left side do not fit");
  if (attrs->packed) {
    if (p->k == PTRDIFF_MAX || p->n > PTRDIFF_MAX / 8 - 16 ||
        (p->k != 0 && trvk_round16(p->n) > (PTRDIFF_MAX / 8) / (p->k + 1)))
      return TRVK_SAY("matmul: sizes overflow");
    const trv_dim need = trvk_round16(p->n) * trvk_packed_k(b->dtype, p->k);
    if (b->rank != 1 || (b->stride[0] != 1 && b->dim[0] > 1) || b->dim[0] < need)
      return trvk_fail(TRVK_SAY("matmul: the packed weight is too small"), need,
                       b->rank ? b->dim[0] : 1, expected, got);
  } else {
    if (b->rank < 2)
      return trvk_fail(TRVK_SAY("matmul: the right side needs two axes"), 2, b->rank, expected,
                       got);
    p->b.row = b->stride[b->rank - 2];
    p->b.col = b->stride[b->rank - 1];
    if (b->dim[b->rank - 2] != p->k)
      return trvk_fail(TRVK_SAY("matmul: the inner sizes differ"), p->k, b->dim[b->rank - 2],
                       expected, got);
    if (b->dim[b->rank - 1] != p->n)
      return trvk_fail(TRVK_SAY("matmul: columns of the right side and of the output differ"), p->n,
                       b->dim[b->rank - 1], expected, got);
    if (!batch_strides(b, 2, p, p->b.batch))
      return TRVK_SAY("matmul: batch sizes of the right side do not fit");
  }
  if (!operand(out, p, &p->out)) return TRVK_SAY("matmul: the output's shape does not fit");
  if (!operand(trvk_opt(call, 2), p, &p->bias))
    return TRVK_SAY("matmul: the bias does not broadcast to the output");
  if (trvk_opt(call, 3) && !trvk_same_shape(trvk_opt(call, 3), out))
    return TRVK_SAY("matmul: the residual has another shape than the output");
  operand(trvk_opt(call, 3), p, &p->res);
  if (trvk_count(out) > 0) join_rows(p);
  return NULL;
}

const char* trvk_matmul_check(const trvk_call* call, int64_t* expected, int64_t* got) {
  const trvf_matmul_attrs* attrs = call->attrs;
  const trv_tensor* out = &call->out[0];
  const uint32_t dtype = call->in[0].dtype;
  trvk_matmul_plan p;
  if (dtype < TRV_DTYPE_U8 || dtype > TRV_DTYPE_F64)
    return trvk_fail(TRVK_SAY("matmul: dtype without a kernel"), TRV_DTYPE_F32, dtype, expected,
                     got);
  if (attrs->act >= TRV_ACT_COUNT || (attrs->act != TRV_ACT_NONE && !trvk_dtype_is_float(dtype)))
    return trvk_fail(TRVK_SAY("matmul: unknown activation"), TRV_ACT_COUNT, attrs->act, expected,
                     got);
  if (attrs->packed && (!trvk_dtype_is_float(dtype) || dtype == TRV_DTYPE_F64))
    return trvk_fail(TRVK_SAY("matmul: packed weights are f32, f16 or bf16"), TRV_DTYPE_F32, dtype,
                     expected, got);
  for (uint32_t i = 0; i < call->n_in + 1u; i++) {
    const trv_tensor* t = i < call->n_in ? trvk_opt(call, i) : out;
    if (t && t->dtype != dtype)
      return trvk_fail(TRVK_SAY("matmul: dtypes differ"), dtype, t->dtype, expected, got);
  }
  const char* what = trvk_out_check(out, expected, got); /* first: the plan multiplies its dims */
  return what ? what : trvk_matmul_plan_make(call, &p, expected, got);
}

/* Rows per unit of work: a multiple of the largest tile, even over the blocks. */
static trv_dim block_rows(trv_dim m, trv_dim most) {
  const trv_dim blocks = (m + most - 1) / most;
  trv_dim rows = blocks ? (m + blocks - 1) / blocks : 1;
  rows = (rows + TRVK_MR_MAX - 1) / TRVK_MR_MAX * TRVK_MR_MAX;
  return rows < most ? rows : most;
}

static trv_dim unit_count(const trvk_matmul_plan* p, trv_dim rows, trv_dim width) {
  trv_dim units = ((p->m + rows - 1) / rows) * ((p->n + width - 1) / width);
  for (uint32_t i = 0; i < p->nb; i++) units *= p->dim[i];
  return units;
}

uint32_t trvk_matmul_tiles(const trvk_call* call, uint32_t workers) {
  trvk_matmul_plan p;
  int64_t e, g;
  if (trvk_count(&call->out[0]) == 0 || trvk_matmul_plan_make(call, &p, &e, &g)) return 1;
  const double work = (double)trvk_count(&call->out[0]) * (double)p.k / 16.0;
  return trvk_tiles(work > 1e9 ? (trv_dim)1000000000 : (trv_dim)work,
                    unit_count(&p, block_rows(p.m, TRVK_ROWS), TRVK_PANEL * TRVK_NP_MAX), workers);
}

/* What one call of a tile works on. */
typedef struct state {
  const trvk_matmul_plan* p;
  const trvk_gemm *g, *pairs; /* pairs: or NULL */
  trvk_epi epi;
  uint32_t dtype;
  int packed, b_direct, a_direct, dot, halves, gathered; /* gathered: A of the block, all of K */
  trv_dim kc, rows, width;
  trvk_row row[TRVK_ROWS];
  const float* a[TRVK_ROWS];
  float acc[TRVK_ROWS * TRVK_STRIP];
  float gather[TRVK_GATHER];
  float b_pack[TRVK_GATHER];
} state;

static void set_bias(const state* s, const uint8_t* bias, trv_dim col, trv_dim n, float* buffer,
                     const float** out) {
  *out = NULL;
  if (bias == NULL) return;
  const trv_dim step = s->p->bias.col;
  const uint8_t* src = trvk_at(bias, s->dtype, col * step);
  *out = buffer;
  if (s->dtype == TRV_DTYPE_F32 && step == 1 && n % TRVK_PANEL == 0) {
    *out = (const float*)(const void*)src;
    return;
  }
  memset(buffer, 0, TRVK_STRIP * sizeof *buffer);
  trvk_row_floats(s->g, buffer, src, s->dtype, step, n);
}

/* Rows times one strip when B lies along K: dot products, no packing. */
static void unit_dot(state* s, const uint8_t* b, const float* bias, trv_dim count, trv_dim col,
                     trv_dim n) {
  const trvk_matmul_plan* p = s->p;
  const float* src = (const float*)(const void*)b + col * p->b.col;
  for (trv_dim m = 0; m < count; m++) {
    float* sum = s->acc;
    s->g->dot(s->a[m], src, p->b.col, n, p->k, sum);
    if (bias)
      for (trv_dim j = 0; j < n; j++) sum[j] += bias[j];
    trvk_epi_row(&s->epi, &s->row[m], col, sum, n);
  }
}

/* A strip of a packed weight of halves, kc rows from k0 (even) on, as float panels. */
static void widen_strip(state* s, const uint8_t* b, trv_dim k0, trv_dim kc, trv_dim col,
                        trv_dim panels) {
  const trv_dim k = trvk_packed_k(s->dtype, s->p->k);
  for (trv_dim i = 0; i < panels; i++) {
    const uint8_t* src = b + (col * k + (i * k + k0) * TRVK_PANEL) * 2;
    float* dst = s->b_pack + i * trvk_packed_k(s->dtype, kc) * TRVK_PANEL;
    if (s->dtype == TRV_DTYPE_BF16)
      s->g->widen_pairs(dst, src, (kc + 1) / 2);
    else
      s->g->widen(dst, (const uint16_t*)(const void*)src, s->dtype, kc * TRVK_PANEL);
  }
}

static void unit_gemm(state* s, const uint8_t* a, const uint8_t* b, const float* bias,
                      trv_dim count, trv_dim col, trv_dim n) {
  const trvk_matmul_plan* p = s->p;
  const trv_dim panels = trvk_panels(n);
  const float *b_rows, *ptr[TRVK_ROWS];
  trvk_block k;
  k.g = s->pairs ? s->pairs : s->g;
  k.epi = &s->epi;
  k.row = s->row;
  k.rows = ptr;
  k.count = count;
  k.mr = trvk_even_rows(s->g, count);
  k.taps = 1;
  k.b = &b_rows;
  k.bias = bias;
  k.acc = s->acc;
  k.first = 1;
  const int direct = s->b_direct && n % TRVK_PANEL == 0;
  for (trv_dim k0 = 0; k.first || k0 < p->k; k0 += s->kc) {
    k.kc = p->k - k0 < s->kc ? p->k - k0 : s->kc;
    k.last = k0 + k.kc >= p->k;
    if (s->pairs) { /* in units of pairs */
      k.ak = 1;
      k.bk = TRVK_PANEL;
      k.bp = p->k / 2 * TRVK_PANEL;
      for (trv_dim i = 0; i < count; i++)
        ptr[i] = (const float*)(const void*)trvk_at(a, s->dtype, i * p->a.row + k0);
      b_rows = (const float*)(const void*)b + (col * p->k + k0 * TRVK_PANEL) / 2;
      k.kc /= 2;
      trvk_block_run(&k, col, n, 0);
      k.first = 0;
      continue;
    }
    if (s->a_direct) {
      k.ak = p->a.col;
      for (trv_dim i = 0; i < count; i++) ptr[i] = s->a[i] + k0 * p->a.col;
    } else {
      k.ak = 1;
      for (trv_dim i = 0; i < count; i++) {
        float* dst = s->gather + i * k.kc;
        if (!s->gathered)
          trvk_row_floats(s->g, dst, trvk_at(a, s->dtype, i * p->a.row + k0 * p->a.col), s->dtype,
                          p->a.col, k.kc);
        ptr[i] = dst;
      }
      s->gathered = k.kc == p->k;
    }
    if (s->halves) {
      const trv_dim step = trvk_packed_k(s->dtype, p->k) * TRVK_PANEL;
      const uint16_t* w = (const uint16_t*)(const void*)b + col / TRVK_PANEL * step;
      s->g->stream_halves(ptr[0], w + k0 * TRVK_PANEL, s->dtype, step, k.kc, panels, s->acc,
                          !k.first);
      if (bias && k.first)
        for (trv_dim j = 0; j < n; j++) s->acc[j] += bias[j];
      if (k.last) trvk_epi_row(&s->epi, &s->row[0], col, s->acc, n);
      k.first = 0;
      continue;
    }
    if (s->packed && s->dtype != TRV_DTYPE_F32) {
      widen_strip(s, b, k0, k.kc, col, panels);
      b_rows = s->b_pack;
      k.bk = TRVK_PANEL;
      k.bp = trvk_packed_k(s->dtype, k.kc) * TRVK_PANEL;
    } else if (s->packed) {
      b_rows = (const float*)(const void*)b + col * p->k + k0 * TRVK_PANEL;
      k.bk = TRVK_PANEL;
      k.bp = p->k * TRVK_PANEL;
    } else if (direct) {
      b_rows = (const float*)(const void*)b + k0 * p->b.row + col;
      k.bk = p->b.row;
      k.bp = TRVK_PANEL;
    } else {
      if (p->q)
        p->q->floats(p->q, b, k0, k.kc, col, n, 0, s->b_pack);
      else
        trvk_pack_panels(s->b_pack, trvk_at(b, s->dtype, k0 * p->b.row + col * p->b.col), s->dtype,
                         p->b.row, p->b.col, k.kc, n, panels);
      b_rows = s->b_pack;
      k.bk = TRVK_PANEL;
      k.bp = k.kc * TRVK_PANEL;
    }
    trvk_block_run(&k, col, n, 0);
    k.first = 0;
  }
}

static void choose(state* s) {
  const trvk_matmul_plan* p = s->p;
  const int f32 = s->dtype == TRV_DTYPE_F32;
  s->a_direct = f32;
  s->dot = f32 && !s->packed && !p->q && p->b.row == 1 && p->b.col != 1 && p->a.col == 1 &&
           p->m <= 8 && p->k >= 16;
  s->b_direct = f32 && !s->packed && !p->q && p->b.col == 1 && p->m <= 2 * TRVK_MR_MAX;
  s->halves = !f32 && s->packed && !s->pairs && p->m == 1;
  s->kc = s->halves ? TRVK_GATHER : TRVK_KC;
  trv_dim most = TRVK_ROWS;
  const int copies = !s->pairs && !s->halves && (!s->packed || !f32) &&
                     !(s->b_direct && p->n % TRVK_PANEL == 0); /* of strips of B */
  if (copies && s->kc > TRVK_GATHER / TRVK_STRIP) s->kc = TRVK_GATHER / TRVK_STRIP;
  if (!s->a_direct && !s->pairs) {
    if (most > 64) most = 64;
    if (most > p->m) most = p->m;
    if (s->kc > TRVK_GATHER / most) s->kc = TRVK_GATHER / most / 2 * 2;
  }
  if (s->kc < p->k) { /* even passes */
    const trv_dim passes = (p->k + s->kc - 1) / s->kc;
    s->kc = (p->k + passes - 1) / passes;
    s->kc += s->kc & 1; /* pairs stay together */
  }
  s->rows = block_rows(p->m, most);
  s->width = (trv_dim)s->g->np * TRVK_PANEL;
}

void trvk_matmul_run(const trvk_call* call, uint32_t tile, const trvk_gemm* g,
                     const trvk_gemm* pairs) {
  trvk_matmul_plan p;
  int64_t e, got;
  if (trvk_count(&call->out[0]) == 0) return;
  (void)trvk_matmul_plan_make(call, &p, &e, &got);
  const uint32_t dtype = call->in[0].dtype;
  if (dtype == TRV_DTYPE_F64 || dtype <= TRV_DTYPE_I64)
    trvk_matmul_plain(call, &p, tile);
  else
    trvk_matmul_floats(call, &p, tile, g, pairs);
}

/* May A and B be read as pairs? Both are in units of 4 bytes then. */
static int in_pairs(const trvk_matmul_plan* p) {
  uintptr_t odd = (uintptr_t)p->a.t->data / 2 | (uintptr_t)p->b.t->data / 2;
  odd |= (uintptr_t)p->k | (uintptr_t)p->a.row;
  for (uint32_t i = 0; i < p->nb; i++) odd |= (uintptr_t)p->a.batch[i];
  return !(odd & 1) && p->a.col == 1;
}

void trvk_matmul_floats(const trvk_call* call, const trvk_matmul_plan* p, uint32_t tile,
                        const trvk_gemm* g, const trvk_gemm* pairs) {
  const trvf_matmul_attrs* attrs = call->attrs;
  const uint32_t dtype = call->in[0].dtype;
  state s;
  s.p = p;
  s.g = g;
  s.dtype = dtype;
  s.packed = attrs->packed != 0;
  s.pairs = pairs && s.packed && dtype == TRV_DTYPE_BF16 && in_pairs(p) ? pairs : NULL;
  s.gathered = 0;
  s.epi.g = g;
  s.epi.dtype = dtype;
  s.epi.act = attrs->act;
  s.epi.lo = attrs->lo;
  s.epi.hi = attrs->hi;
  s.epi.out_col = p->out.col;
  s.epi.res_col = p->res.col;
  s.epi.bias2_col = p->bias.col;
  const int two = p->bias.t && p->bias.row != 0; /* the bias differs between rows */
  s.epi.post = two || dtype != TRV_DTYPE_F32 ||
               (p->n > 1 && (p->out.col != 1 || (p->res.t && p->res.col != 1)));
  choose(&s);
  const trv_dim strips = (p->n + s.width - 1) / s.width, blocks = (p->m + s.rows - 1) / s.rows;
  trv_dim begin, end, last = -1;
  trvk_split(unit_count(p, s.rows, s.width), call->tiles, tile, &begin, &end);
  const uint8_t *a = NULL, *b = NULL, *bias = NULL;
  trv_dim count = 0;
  for (trv_dim u = begin; u < end; u++) {
    const trv_dim strip = u % strips, block = u / strips % blocks, batch = u / strips / blocks;
    if (u / strips != last) {
      last = u / strips;
      s.gathered = 0;
      const trv_dim m0 = block * s.rows;
      count = p->m - m0 < s.rows ? p->m - m0 : s.rows;
#define AT(o)    \
  ((o).t == NULL \
       ? NULL    \
       : trvk_at((o).t->data, dtype, trvk_offset(p->nb, p->dim, (o).batch, batch) + m0 * (o).row))
      a = AT(p->a);
      b = trvk_at(p->b.t->data, p->b.t->dtype, trvk_offset(p->nb, p->dim, p->b.batch, batch));
      bias = two ? NULL : AT(p->bias);
      s.epi.bias2 = two ? AT(p->bias) : NULL;
      s.epi.res = AT(p->res);
      s.epi.out = AT(p->out);
#undef AT
      for (trv_dim i = 0; i < count; i++) {
        s.row[i].out = i * p->out.row;
        s.row[i].res = i * p->res.row;
        s.row[i].bias2 = i * p->bias.row;
        if (s.a_direct) s.a[i] = (const float*)(const void*)a + i * p->a.row;
      }
    }
    const trv_dim col = strip * s.width, n = p->n - col < s.width ? p->n - col : s.width;
    float buffer[TRVK_STRIP];
    const float* strip_bias;
    set_bias(&s, bias, col, n, buffer, &strip_bias);
    if (s.dot)
      unit_dot(&s, b, strip_bias, count, col, n);
    else
      unit_gemm(&s, a, b, strip_bias, count, col, n);
  }
}
