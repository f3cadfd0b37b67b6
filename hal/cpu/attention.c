/* attention.c - scaled dot-product attention with online softmax: blocks of queries pass over
 * blocks of keys once, and no matrix of scores is ever whole. The query heads of one key head go
 * together, so that a decoding step reads its keys and values once. */
#include "attention.h"

#include "vmath.h"

#define LOG2E 1.44269504f

static int leading(const trv_tensor* t, const trvk_attention* p, trv_dim* stride, trv_dim* head) {
  /* Leading axes but the last (heads), numpy rules. */
  const uint32_t have = t->rank - 2u, want = p->nb + 1;
  *head = 0;
  memset(stride, 0, TRV_MAX_RANK * sizeof *stride);
  if (have > want) return 0;
  for (uint32_t i = 0; i < have; i++) {
    const uint32_t axis = want - have + i;
    const trv_dim d = t->dim[i];
    if (axis == p->nb) {
      *head = d != 1 ? t->stride[i] : 0;
      continue; /* the caller knows how many heads there may be */
    }
    if (d != 1 && d != p->dim[axis]) return 0;
    stride[axis] = d != 1 ? t->stride[i] : 0;
  }
  return 1;
}

static trv_dim heads_of(const trv_tensor* t) { return t->rank > 2 ? t->dim[t->rank - 3] : 1; }

static const char* make(const trvk_call* call, trvk_attention* p, int64_t* expected, int64_t* got) {
  const trv_tensor *q = &call->in[0], *k = &call->in[1], *v = &call->in[2], *o = &call->out[0];
  const trv_tensor *mask = trvk_opt(call, 3), *k2 = trvk_opt(call, 4), *v2 = trvk_opt(call, 5);
  *expected = *got = 0;
  if (q->rank < 2 || k->rank < 2 || v->rank < 2 || o->rank != q->rank)
    return trvk_fail(TRVK_SAY("attention: rank does not fit"), 2, q->rank, expected, got);
  memset(p, 0, sizeof *p);
  p->nb = q->rank > 2 ? q->rank - 3u : 0;
  for (uint32_t i = 0; i < p->nb; i++) p->dim[i] = q->dim[i];
  p->heads = heads_of(q);
  p->groups = heads_of(k);
  p->l = q->dim[q->rank - 2];
  p->d = q->dim[q->rank - 1];
  p->s = p->first = k->dim[k->rank - 2];
  p->e = v->dim[v->rank - 1];
  p->empty = ((const trvf_attention_attrs*)call->attrs)->nan_rows ? NAN : 0.0f;
  if (k->dim[k->rank - 1] != p->d)
    return trvk_fail(TRVK_SAY("attention: queries and keys differ in size"), p->d,
                     k->dim[k->rank - 1], expected, got);
  if (v->dim[v->rank - 2] != p->s)
    return trvk_fail(TRVK_SAY("attention: keys and values differ in length"), p->s,
                     v->dim[v->rank - 2], expected, got);
  if (!k2 != !v2) return TRVK_SAY("attention: more keys, or more values, only");
  if (k2) {
    if (k2->rank < 2 || v2->rank < 2 || k2->dim[k2->rank - 1] != p->d ||
        v2->dim[v2->rank - 1] != p->e || heads_of(k2) != p->groups || heads_of(v2) != heads_of(v))
      return TRVK_SAY("attention: the second keys and values are unlike the first");
    if (v2->dim[v2->rank - 2] != k2->dim[k2->rank - 2])
      return trvk_fail(TRVK_SAY("attention: keys and values differ in length"),
                       k2->dim[k2->rank - 2], v2->dim[v2->rank - 2], expected, got);
    p->s += k2->dim[k2->rank - 2];
  }
  if (p->groups < 1 || p->heads % p->groups != 0 || (heads_of(v) != p->groups && heads_of(v) != 1))
    return trvk_fail(TRVK_SAY("attention: query heads are not a multiple of key heads"), p->groups,
                     p->heads, expected, got);
  for (uint32_t i = 0; i + 2 < o->rank; i++)
    if (o->dim[i] != q->dim[i]) return TRVK_SAY("attention: the output's shape does not fit");
  if (o->dim[o->rank - 2] != p->l || o->dim[o->rank - 1] != p->e)
    return trvk_fail(TRVK_SAY("attention: the output's shape does not fit"), p->e,
                     o->dim[o->rank - 1], expected, got);
  trvk_attention_operand* const all[6] = {&p->q, &p->o, &p->k[0], &p->v[0], &p->k[1], &p->v[1]};
  const trv_tensor* const tensors[6] = {q, o, k, v, k2, v2};
  for (int i = 0; i < 6; i++) {
    const trv_tensor* t = tensors[i];
    if (!t) continue;
    if (!leading(t, p, all[i]->batch, &all[i]->head))
      return TRVK_SAY("attention: batch sizes do not fit");
    all[i]->data = t->data;
    all[i]->row = t->stride[t->rank - 2];
    all[i]->col = t->stride[t->rank - 1];
  }
  if (mask) {
    trvk_attention_operand* m = &p->mask;
    trv_tensor full = *mask; /* with at least two axes */
    if (full.rank < 2) {
      if (full.rank == 0) full.dim[0] = 1, full.stride[0] = 0;
      full.dim[1] = full.dim[0];
      full.stride[1] = full.stride[0];
      full.dim[0] = 1;
      full.rank = 2;
    }
    const trv_dim ml = full.dim[full.rank - 2], ms = full.dim[full.rank - 1], mh = heads_of(&full);
    if ((ml != 1 && ml != p->l) || (ms != 1 && ms != p->s) || (mh != 1 && mh != p->heads) ||
        !leading(&full, p, m->batch, &m->head))
      return trvk_fail(TRVK_SAY("attention: the mask does not broadcast to the scores"), p->s, ms,
                       expected, got);
    m->data = mask->data;
    m->row = ml != 1 ? full.stride[full.rank - 2] : 0;
    m->col = ms != 1 ? full.stride[full.rank - 1] : 0;
    p->mask_dtype = mask->dtype;
  }
  return NULL;
}

const char* trvk_attention_check(const trvk_call* call, int64_t* expected, int64_t* got) {
  const trv_tensor* mask = trvk_opt(call, 3);
  const uint32_t dtype = call->in[0].dtype;
  trvk_attention p;
  if (!trvk_dtype_is_float(dtype))
    return trvk_fail(TRVK_SAY("attention: dtype without a kernel"), TRV_DTYPE_F32, dtype, expected,
                     got);
  for (uint32_t i = 1; i < 6; i++) {
    const trv_tensor* t = i < 3 ? &call->in[i] : i > 3 ? trvk_opt(call, i) : &call->out[0];
    if (t && t->dtype != dtype)
      return trvk_fail(TRVK_SAY("attention: dtypes differ"), dtype, t->dtype, expected, got);
  }
  if (mask && mask->dtype != TRV_DTYPE_BOOL && !trvk_dtype_is_float(mask->dtype))
    return trvk_fail(TRVK_SAY("attention: the mask is neither bool nor float"), TRV_DTYPE_BOOL,
                     mask->dtype, expected, got);
  const char* what = trvk_out_check(&call->out[0], expected, got);
  return what ? what : make(call, &p, expected, got);
}

/* Rows of one key head: its query heads times queries. */
static trv_dim rows_of(const trvk_attention* p) { return p->heads / p->groups * p->l; }

static trv_dim block_columns(const trvk_attention* p) {
  const trv_dim most = TRVK_GATHER / TRVK_MR_MAX / TRVK_STRIP * TRVK_STRIP,
                e = (p->e + TRVK_STRIP - 1) / TRVK_STRIP * TRVK_STRIP;
  const trv_dim cap = most < TRVK_STRIP ? TRVK_STRIP : most;
  return e < cap ? (e > 0 ? e : TRVK_STRIP) : cap;
}
static trv_dim block_rows(const trvk_attention* p) {
  const trv_dim rows = TRVK_GATHER / block_columns(p);
  return rows < TRVK_QUERIES ? rows : TRVK_QUERIES;
}

static trv_dim unit_count(const trvk_attention* p, trv_dim rows) {
  trv_dim n = p->groups * ((rows_of(p) + rows - 1) / rows);
  for (uint32_t i = 0; i < p->nb; i++) n *= p->dim[i];
  return n;
}

uint32_t trvk_attention_tiles(const trvk_call* call, uint32_t workers) {
  trvk_attention p;
  int64_t e, g;
  if (trvk_count(&call->out[0]) == 0 || make(call, &p, &e, &g)) return 1;
  const double work = (double)trvk_count(&call->out[0]) / (double)p.e * (double)p.s *
                      (double)(p.d + p.e + 16) / 12.0;
  return trvk_tiles(work > 1e9 ? (trv_dim)1000000000 : (trv_dim)work,
                    unit_count(&p, block_rows(&p)), workers);
}

/* ---- float32 sums
 * --------------------------------------------------------------------------------------------------
 */
typedef struct row_state {
  trv_dim q, o, mask, l; /* offsets of the row in queries, output, mask; its query */
  float max, sum;
} row_state;

typedef struct state {
  const trvk_attention* p;
  const trvk_gemm* g;
  uint32_t dtype;
  int causal;
  float scale; /* times log2(e): scores become powers of 2 */
  const uint8_t *k[2], *v[2];
  trv_dim count, keys;     /* of a block; keys: also from row to row of score */
  trv_dim columns, e0, en; /* of the sums; this pass' values e0 .. e0 + en */
  row_state row[TRVK_QUERIES];
  trv_dim reach[TRVK_QUERIES]; /* per tile of rows: the last key that any of them may see */
  float score[TRVK_QUERIES * TRVK_KEYS];
  float sum[TRVK_GATHER];
  float pack[TRVK_PACK];
  float gather[TRVK_PACK];
} state;

/* Products of all rows. from: the first of the keys that B's columns are, or with `along`, that K
 * runs over. Tiles none of whose rows may see it are left out. */
static void tiles(const state* s, trvk_tile* t, float* c, trv_dim c_step, const float* const* rows,
                  int np, trv_dim from, int along) {
  const trv_dim mr = trvk_even_rows(s->g, s->count), kc = t->kc;
  float* to[TRVK_MR_MAX];
  t->taps = 1;
  t->bias = NULL;
  t->b_off = 0;
  t->add = NULL;
  t->add_off = 0;
  t->ak = 1;
  t->row_step = mr;
  t->c = to;
  t->c_off = 0;
  t->lo = -INFINITY;
  t->hi = INFINITY;
  for (trv_dim m = 0, i = 0; m < s->count; m += mr, i++) {
    const trv_dim n = s->count - m < mr ? s->count - m : mr, left = s->reach[i] - from + 1;
    if (left <= 0) continue;
    if (along) t->kc = left < kc ? left : kc;
    for (trv_dim j = 0; j < n; j++) to[j] = c + (m + j) * c_step;
    t->rows = rows + m;
    if (n == 1)
      s->g->stream(t, np);
    else
      s->g->tile[np - 1][n - 1](t);
  }
  t->kc = kc;
}

/* score[row][0 .. n) = q . k of keys from `first` on, all in one piece. */
static void scores(state* s, int piece, trv_dim first, trv_dim n) {
  const trvk_attention* p = s->p;
  const trvk_attention_operand* ko = &p->k[piece];
  const trv_dim k0 = first - (piece ? p->first : 0);
  const uint8_t* keys = trvk_at(s->k[piece], s->dtype, k0 * ko->row);
  const int f32 = s->dtype == TRV_DTYPE_F32, q_plain = f32 && p->q.col == 1;
  const float *rows[TRVK_QUERIES], *b = s->pack;
  if (q_plain && ko->col == 1 && s->count <= 8) {
    for (trv_dim i = 0; i < s->count; i++)
      s->g->dot((const float*)(const void*)p->q.data + s->row[i].q, (const float*)(const void*)keys,
                ko->row, n, p->d, s->score + i * s->keys);
    return;
  }
  const trv_dim most = TRVK_PACK / (!q_plain && s->count > TRVK_STRIP ? s->count : TRVK_STRIP);
  trvk_tile t;
  t.b = &b;
  t.bk = TRVK_PANEL;
  t.accumulate = 0;
  if (p->d == 0)
    for (trv_dim i = 0; i < s->count * s->keys; i++) s->score[i] = 0.0f;
  for (trv_dim d0 = 0; d0 < p->d; d0 += most) {
    t.kc = p->d - d0 < most ? p->d - d0 : most;
    for (trv_dim i = 0; i < s->count; i++) {
      if (q_plain) {
        rows[i] = (const float*)(const void*)p->q.data + s->row[i].q + d0;
        continue;
      }
      trvk_row_load(s->gather + i * t.kc, trvk_at(p->q.data, s->dtype, s->row[i].q + d0 * p->q.col),
                    s->dtype, p->q.col, t.kc);
      rows[i] = s->gather + i * t.kc;
    }
    for (trv_dim j = 0; j < n; j += (trv_dim)s->g->np * TRVK_PANEL) {
      const trv_dim width = (trv_dim)s->g->np * TRVK_PANEL, cols = n - j < width ? n - j : width;
      const int np = cols > TRVK_PANEL ? 2 : 1;
      trvk_pack_panels(s->pack, trvk_at(keys, s->dtype, j * ko->row + d0 * ko->col), s->dtype,
                       ko->col, ko->row, t.kc, cols, np);
      t.bp = t.kc * TRVK_PANEL;
      tiles(s, &t, s->score + j, s->keys, rows, np, first + j, 0);
    }
    t.accumulate = 1;
  }
}

/* Scores become weights; the sums so far are scaled to the new maximum. Maxima are of the powers of
 * 2. */
static void soften(state* s, trv_dim k0, trv_dim n) {
  const trvk_attention* p = s->p;
  for (trv_dim i = 0; i < s->count; i++) {
    row_state* r = &s->row[i];
    float *x = s->score + i * s->keys, scale = s->scale;
    const float* add = NULL;
    trv_dim take = n;
    if (s->causal && r->l - k0 + 1 < n) take = r->l - k0 + 1 > 0 ? r->l - k0 + 1 : 0;
    if (p->mask.data) {
      const trv_dim at = r->mask + k0 * p->mask.col;
      if (p->mask_dtype == TRV_DTYPE_BOOL) {
        const uint8_t* m = p->mask.data + at;
        for (trv_dim j = 0; j < take; j++) x[j] = m[j * p->mask.col] ? x[j] * scale : -INFINITY;
      } else if (p->mask_dtype == TRV_DTYPE_F32 && p->mask.col == 1) {
        add = (const float*)(const void*)p->mask.data + at;
      } else {
        float some[64];
        for (trv_dim j0 = 0; j0 < take; j0 += 64) {
          const trv_dim run = take - j0 < 64 ? take - j0 : 64;
          trvk_row_load(some, trvk_at(p->mask.data, p->mask_dtype, at + j0 * p->mask.col),
                        p->mask_dtype, p->mask.col, run);
          s->g->most(x + j0, some, run, scale, LOG2E);
        }
      }
      if (!add) scale = 1.0f;
    }
    float max = s->g->most(x, add, take, scale, LOG2E);
    if (add) scale = 1.0f;
    if (r->max > max) max = r->max;
    const float base = max == -INFINITY ? 0.0f : max;
    const float sum = s->g->exp2_sum(x, take, scale, base);
    for (trv_dim j = take; j < n; j++) x[j] = 0.0f;
    if (max != r->max) {
      const float f = r->max == -INFINITY ? 0.0f : trvk_exp2(r->max - base);
      float* o = s->sum + i * s->columns;
      if (r->max != -INFINITY)
        for (trv_dim j = 0; j < s->columns; j++) o[j] *= f;
      r->sum *= f;
      r->max = max;
    }
    r->sum += sum;
  }
}

/* sum += weights x values of keys from `first` on. */
static void values(state* s, int piece, trv_dim first, trv_dim n) {
  const trvk_attention_operand* vo = &s->p->v[piece];
  const trv_dim k0 = first - (piece ? s->p->first : 0);
  const uint8_t* v = trvk_at(s->v[piece], s->dtype, k0 * vo->row + s->e0 * vo->col);
  const float *rows[TRVK_QUERIES], *b;
  const int plain = s->dtype == TRV_DTYPE_F32 && vo->col == 1;
  const trv_dim width = (trv_dim)s->g->np * TRVK_PANEL;
  if (plain && s->count == 1) {
    s->g->mix(s->score, (const float*)(const void*)v, vo->row, n, s->en, s->sum);
    return;
  }
  const trv_dim most = plain && s->en % TRVK_PANEL == 0 ? n : TRVK_PACK / TRVK_STRIP;
  trvk_tile t;
  t.b = &b;
  t.accumulate = 1;
  for (trv_dim n0 = 0; n0 < n; n0 += most, v = trvk_at(v, s->dtype, most * vo->row)) {
    t.kc = n - n0 < most ? n - n0 : most;
    for (trv_dim i = 0; i < s->count; i++) rows[i] = s->score + i * s->keys + n0;
    for (trv_dim j = 0; j < s->en; j += width) {
      const trv_dim cols = s->en - j < width ? s->en - j : width;
      const int np = cols > TRVK_PANEL ? 2 : 1;
      const uint8_t* src = trvk_at(v, s->dtype, j * vo->col);
      if (plain && cols % TRVK_PANEL == 0) {
        b = (const float*)(const void*)src;
        t.bk = vo->row;
        t.bp = TRVK_PANEL;
      } else {
        trvk_pack_panels(s->pack, src, s->dtype, vo->row, vo->col, t.kc, cols, np);
        b = s->pack;
        t.bk = TRVK_PANEL;
        t.bp = t.kc * TRVK_PANEL;
      }
      tiles(s, &t, s->sum + j, s->columns, rows, np, first + n0, 1);
    }
  }
}

static void block(state* s) {
  const trvk_attention* p = s->p;
  const trv_dim mr = trvk_even_rows(s->g, s->count);
  trv_dim keys = p->s, last = 0;
  for (trv_dim i = 0; i < s->count; i++) {
    s->row[i].max = -INFINITY;
    s->row[i].sum = 0.0f;
    if (s->row[i].l > last) last = s->row[i].l;
  }
  for (trv_dim m = 0, i = 0; m < s->count; m += mr, i++) {
    s->reach[i] = s->causal ? s->row[m].l : keys - 1;
    for (trv_dim j = m + 1; s->causal && j < m + mr && j < s->count; j++)
      if (s->row[j].l > s->reach[i]) s->reach[i] = s->row[j].l;
  }
  if (s->causal && last + 1 < keys) keys = last + 1;
  memset(s->sum, 0, (size_t)(s->count * s->columns) * sizeof(float));
  for (trv_dim k0 = 0, n; k0 < keys; k0 += n) {
    const int piece = k0 >= p->first;
    const trv_dim to = !piece && p->first < keys ? p->first : keys;
    n = to - k0 < s->keys ? to - k0 : s->keys;
    scores(s, piece, k0, n);
    soften(s, k0, n);
    values(s, piece, k0, n);
  }
  for (trv_dim i = 0; i < s->count; i++) {
    float* o = s->sum + i * s->columns;
    const float f = s->row[i].sum == 0.0f ? p->empty : 1.0f / s->row[i].sum;
    if (s->dtype == TRV_DTYPE_F32 && p->o.col == 1) {
      float* to = (float*)(void*)p->o.data + s->row[i].o + s->e0;
      for (trv_dim j = 0; j < s->en; j++) to[j] = o[j] * f;
      continue;
    }
    for (trv_dim j = 0; j < s->en; j++) o[j] *= f;
    trvk_row_store(trvk_at(p->o.data, s->dtype, s->row[i].o + s->e0 * p->o.col), s->dtype, p->o.col,
                   o, s->en);
  }
}

void trvk_attention_run(const trvk_call* call, uint32_t tile, const trvk_gemm* g) {
  const trvf_attention_attrs* attrs = call->attrs;
  trvk_attention p;
  int64_t e, got;
  if (trvk_count(&call->out[0]) == 0) return;
  (void)make(call, &p, &e, &got);
  if (call->in[0].dtype == TRV_DTYPE_F64) {
    trvk_attention_plain(call, &p, tile);
    return;
  }
  state s;
  s.p = &p;
  s.g = g;
  s.dtype = call->in[0].dtype;
  s.causal = attrs->causal != 0;
  s.scale = attrs->scale * LOG2E;
  s.columns = block_columns(&p);
  const trv_dim rows = block_rows(&p), all = rows_of(&p), blocks = (all + rows - 1) / rows;
  trv_dim begin, end;
  trvk_split(unit_count(&p, rows), call->tiles, tile, &begin, &end);
  for (trv_dim u = begin; u < end; u++) {
    const trv_dim group = u / blocks % p.groups, batch = u / blocks / p.groups;
    const trv_dim each = (all + blocks - 1) / blocks, r0 = u % blocks * each;
#define AT(o) trvk_offset(p.nb, p.dim, (o).batch, batch)
    const trv_dim aq = AT(p.q), ao = AT(p.o), am = p.mask.data ? AT(p.mask) : 0;
    for (int i = 0; i < (p.first < p.s ? 2 : 1); i++) {
      s.k[i] = trvk_at(p.k[i].data, s.dtype, AT(p.k[i]) + group * p.k[i].head);
      s.v[i] = trvk_at(p.v[i].data, s.dtype, AT(p.v[i]) + group * p.v[i].head);
    }
#undef AT
    s.count = r0 >= all ? 0 : all - r0 < each ? all - r0 : each;
    s.keys = TRVK_QUERIES * TRVK_KEYS / (s.count > 0 ? s.count : 1) / TRVK_PANEL * TRVK_PANEL;
    if (s.keys > TRVK_KEYS_MOST) s.keys = TRVK_KEYS_MOST;
    trv_dim h = group * (p.heads / p.groups) + r0 / p.l, l = r0 % p.l;
    for (trv_dim i = 0; i < s.count; i++) {
      s.row[i].q = aq + h * p.q.head + l * p.q.row;
      s.row[i].o = ao + h * p.o.head + l * p.o.row;
      s.row[i].mask = am + h * p.mask.head + l * p.mask.row;
      s.row[i].l = l;
      if (++l < p.l) continue;
      l = 0;
      h++;
    }
    for (s.e0 = 0; s.count > 0 && s.e0 < p.e; s.e0 += s.columns) {
      s.en = p.e - s.e0 < s.columns ? p.e - s.e0 : s.columns;
      block(&s);
    }
  }
}
