/* qproduct.c - blocks of rows times strips of columns.
 *
 * Rows are read where they lie if the tile takes them so, else copied once for all strips. A strip
 * of a packed weight in 8 bits is read where it lies; another is copied in chunks along K, once for
 * all blocks where it fits and rows need no copy. K is cut only by that, by groups of scales and,
 * for i16, where sums of 32 bits could wrap.
 */
#include "qproduct.h"

/* Copies numbers k0 .. k0+kc of stored rows. */
static void copy_rows(trvk_qwork* w, trv_dim k0, trv_dim kc) {
  const trvk_matmul_operand* p = &w->q->p.a;
  const uint32_t dtype = p->t->dtype;
  const int32_t zero = ((const trvf_qmatmul_attrs*)w->call->attrs)->a_zero;
  const trv_dim wide = trvk_round4(kc);
  for (trv_dim m = 0; m < w->count; m++) {
    const uint8_t* from = trvk_at(w->a_data, dtype, m * p->row + k0 * p->col);
    if (w->size == 1) {
      int8_t* to = w->a.bytes + m * w->row_bytes;
      if (p->col == 1)
        memcpy(to, from, (size_t)kc);
      else
        for (trv_dim i = 0; i < kc; i++) to[i] = (int8_t)from[i * p->col];
      for (trv_dim i = kc; i < wide; i++) to[i] = 0;
    } else {
      int16_t* to = w->a.words + m * (w->row_bytes / 2);
      trvk_q_row(to, from, dtype, p->col, kc, zero);
      for (trv_dim i = kc; i < wide; i++) to[i] = 0;
    }
  }
}

/* Numbers k0 .. k0+kc of the block's rows come to lie where row says. */
static void fill(trvk_qwork* w, trv_dim k0, trv_dim kc) {
  if (w->filled) return;
  w->filled = kc == w->q->p.k;
  if (w->in_place) {
    for (trv_dim m = 0; m < w->count; m++) w->row[m] = w->a_data + m * w->q->p.a.row * w->size;
    return;
  }
  for (trv_dim m = 0; m < w->count; m++) w->row[m] = w->a.bytes + m * w->row_bytes;
  if (w->dynamic)
    w->dynamic->rows(w, k0, kc);
  else
    copy_rows(w, k0, kc);
}

/* Adds up numbers at .. at+kc of the rows as they lie. */
static void add_sums(trvk_qwork* w, trv_dim at, trv_dim kc) {
  const int raw = w->dynamic ? w->size == 1 : w->in_place || w->size == 1 || w->wide;
  for (trv_dim m = 0; m < w->count; m++) {
    int64_t sum = 0;
    if (w->size == 1) {
      const int8_t* a = (const int8_t*)w->row[m] + at;
      for (trv_dim i = 0; i < kc;) { /* in 32 bits as far as they go */
        const trv_dim end = kc - i < 65536 ? kc : i + 65536;
        int32_t part = 0;
        for (; i < end; i++) part += a[i];
        sum += part;
      }
    } else {
      const int16_t* a = (const int16_t*)w->row[m] + at;
      for (trv_dim i = 0; i < kc; i++) sum += a[i];
    }
    const int32_t zero =
        w->dynamic ? w->zero[m] : ((const trvf_qmatmul_attrs*)w->call->attrs)->a_zero;
    w->sum[m] = trvk_add64(w->sum[m], sum - (raw ? (int64_t)kc * zero : 0));
  }
}

/* Sums of i16 rows go over to 64 bits, less their zero point times the columns' sums. */
static void widen(trvk_qwork* w, trv_dim m0, trv_dim rows, trv_dim n, int fresh) {
  const int32_t zero = ((const trvf_qmatmul_attrs*)w->call->attrs)->a_zero;
  for (trv_dim m = m0; m < m0 + rows; m++) {
    const int32_t* c = w->c + m * TRVK_QT_STRIP;
    int64_t* t = w->u.wide + m * TRVK_QT_STRIP;
    for (trv_dim j = 0; j < n; j++)
      t[j] = (fresh ? 0 : t[j]) + c[j] - (zero ? (int64_t)zero * w->cols[j] : 0);
  }
}

/* Results of stored rows m0 .. m0+rows. */
static void finish(trvk_qwork* w, trv_dim m0, trv_dim rows, trv_dim n) {
  const int32_t b_zero = ((const trvf_qmatmul_attrs*)w->call->attrs)->b_zero;
  const trvk_matmul_plan* p = &w->q->p;
  trv_dim at[TRVK_QT_MR];
  for (trv_dim i = 0; i < rows; i++) {
    const trv_dim m = m0 + i;
    at[i] = m * p->out.row + w->col * p->out.col;
    if (b_zero) {
      const int64_t less = trvk_mul64(b_zero, w->sum[m]);
      for (trv_dim j = m * TRVK_QT_STRIP; j < m * TRVK_QT_STRIP + n; j++)
        if (w->wide)
          w->u.wide[j] = trvk_add64(w->u.wide[j], -less);
        else
          w->c[j] = (int32_t)((uint32_t)w->c[j] - (uint32_t)(uint64_t)less);
    }
    if (w->wide) trvk_qout_i64(&w->out, 0, 1, w->u.wide + m * TRVK_QT_STRIP, n, at[i], p->out.col);
  }
  if (!w->wide)
    w->g->out(&w->out, 0, w->c + m0 * TRVK_QT_STRIP, TRVK_QT_STRIP, rows, n, at, p->out.col);
}

/* B's numbers k0 .. k0+kc of the strip, and where wanted the sums of its columns since `fresh`:
 * those of all of K at once where the packed weight has them. first: what the chunk's sums begin
 * with, or what they miss. Returns whether they miss it. */
static int columns(trvk_qwork* w, trv_dim k0, trv_dim kc, trv_dim n, int fresh, trvk_qtile* t,
                   const int8_t** b) {
  const trvk_qweight* q = &w->q->w;
  const trv_dim panels = trvk_panels(n), k = w->q->p.k;
  t->quads = (kc + 3) / 4;
  if (!w->copied) {
    *b = (const int8_t*)w->b_data + w->col / TRVK_PANEL * q->panel + k0 * TRVK_PANEL;
    t->b_panel = q->panel;
  } else {
    *b = w->b_copy;
    t->b_panel = t->quads * 64;
    if (w->b_col == w->col) return 0; /* the same strip for the next block */
    for (trv_dim p = 0; p < panels; p++)
      (void)trvk_q_panel(q, w->b_data, k0, kc, w->col + p * TRVK_PANEL,
                         n - p * TRVK_PANEL < TRVK_PANEL ? n - p * TRVK_PANEL : TRVK_PANEL,
                         w->b_copy + p * t->b_panel);
    w->b_col = kc == k ? w->col : -1;
  }
  if (!w->colsums) return 0;
  const int stored = !w->copied && (q->group == 0 || q->group >= k) && !w->wide;
  if (stored && k0) return 0;
  for (trv_dim p = 0; p < panels; p++) {
    int32_t part[TRVK_PANEL] = {0}, *to = w->cols + p * TRVK_PANEL;
    if (stored)
      memcpy(part, *b + p * t->b_panel + q->panel - 64, sizeof part);
    else
      w->g->sums(*b + p * t->b_panel, t->quads, part);
    for (int j = 0; j < TRVK_PANEL; j++) {
      to[j] = fresh ? part[j] : trvk_add32(to[j], part[j]);
      w->first[p * TRVK_PANEL + j] = (int32_t)(0u - (uint32_t)w->common * (uint32_t)part[j]);
    }
  }
  return !fresh && w->common != 0;
}

static void strip(trvk_qwork* w, trv_dim n) {
  const trv_dim k = w->q->p.k, group = w->q->w.group, panels = trvk_panels(n);
  const int8_t* b;
  trvk_qtile t;
  int fresh = 1; /* sums begin anew */
  t.b = &b;
  t.row_step = 0;
  t.taps = 1;
  t.c_row = TRVK_QT_STRIP;
  for (trv_dim k0 = 0, run, pass = 0, from = 0;; k0 += run) {
    if (k0 == from + pass) { /* rows are there as far as this */
      from = k0;
      pass = k - k0 < w->most ? k - k0 : w->most;
      fill(w, from, pass);
    }
    run = from + pass - k0;
    if (w->wide && run > TRVK_Q_WIDE) run = TRVK_Q_WIDE;
    if (w->copied && run > TRVK_QP_K) run = TRVK_QP_K;
    if (group && run > group - k0 % group) run = group - k0 % group;
    const trv_dim k_end = k0 + run, at = w->in_place ? k0 : k0 - from;
    const int group_end = k_end == k || (group && k_end % group == 0);
    const int missing = columns(w, k0, run, n, fresh || w->wide, &t, &b);
    if (w->sums && !w->summed) {
      if (k0 == 0 || (group && k0 % group == 0)) memset(w->sum, 0, sizeof w->sum);
      add_sums(w, at, run);
      w->summed = run == k;
    }
    if (missing)
      for (trv_dim m = 0; m < w->count; m++)
        for (trv_dim j = 0; j < n; j++)
          w->c[m * TRVK_QT_STRIP + j] = trvk_add32(w->c[m * TRVK_QT_STRIP + j], w->first[j]);
    t.first = fresh || w->wide ? w->first : NULL;
    t.a_off = at * w->size;
    for (trv_dim m = 0; m < w->count; m += TRVK_QT_MR) {
      const trv_dim rows = w->count - m < TRVK_QT_MR ? w->count - m : TRVK_QT_MR;
      t.rows = w->row + m;
      t.c = w->c + m * TRVK_QT_STRIP;
      (w->size == 1 ? w->g->bytes : w->g->words)(&t, (int)rows, (int)panels);
      if (w->wide) widen(w, m, rows, n, fresh);
      if (w->dynamic && group_end)
        w->dynamic->take(w, m, rows, k_end, n);
      else if (!w->dynamic && k_end == k)
        finish(w, m, rows, n);
    }
    fresh = group_end && !w->wide;
    if (k_end == k) return;
  }
}

/* How one call of the kernel goes about it. */
static void choose(trvk_qwork* w) {
  const trvf_qmatmul_attrs* a = w->call->attrs;
  const trvk_matmul_plan* p = &w->q->p;
  const uint32_t dtype = p->a.t->dtype;
  w->wide = dtype == TRV_DTYPE_I16;
  w->size = w->g->bytes && !w->wide ? 1 : 2;
  w->in_place = !w->dynamic && p->a.col == 1 && p->k % 4 == 0 &&
                w->size == (dtype == TRV_DTYPE_I16  ? 2
                            : dtype == TRV_DTYPE_I8 ? 1
                                                    : 0);
  w->copied = !w->q->w.packed || w->q->w.bits == 4;
  w->nibbles = 0;
  w->sums = a->b_zero != 0 || w->q->w.offset != NULL;
  w->common = w->size == 1 ? trvk_add32(w->g->bias, w->dynamic ? 0 : a->a_zero) : 0;
  w->colsums = w->common != 0 || (w->wide && a->a_zero != 0) ||
               (w->dynamic && w->size == 1 && a->dynamic == 2);
  memset(w->first, 0, sizeof w->first);
  w->row_bytes = (p->k / 16 + 1) * 16 * w->size;
  if (w->dynamic) w->dynamic->prepare(w);
  w->rows = TRVK_Q_ROWS;
  w->most = p->k;
  if (!w->in_place) {
    if (w->row_bytes > TRVK_QP_A / 4) { /* by passes, unless there are few rows */
      trv_dim rows = TRVK_QP_A / w->row_bytes;
      if (rows < 1 || (rows < p->m && rows < 4)) {
        rows = p->m < 4 ? p->m : 4;
        w->nibbles = 0;
        w->most = TRVK_QP_A / rows / 16 / w->size * 16;
        if (w->most > p->k) w->most = p->k;
        w->row_bytes = (w->most + 15) / 16 * 16 * w->size;
      }
      w->rows = rows;
    } else {
      const trv_dim rows = TRVK_QP_A / w->row_bytes;
      if (rows < w->rows) w->rows = rows;
    }
  }
  /* Even blocks of whole tiles. */
  const trv_dim blocks = (p->m + w->rows - 1) / w->rows, even = (p->m + blocks - 1) / blocks;
  const trv_dim tiles = (even + TRVK_QT_MR - 1) / TRVK_QT_MR * TRVK_QT_MR;
  w->rows = tiles <= w->rows ? tiles : w->rows;
}

void trvk_qproduct_run(const trvk_call* call, uint32_t tile, const trvk_qgemm* g,
                       const trvk_gemm* real, const trvk_qdynamic* dynamic) {
  const trvf_qmatmul_attrs* a = call->attrs;
  trvk_qmatmul q;
  trvk_qwork w;
  int64_t e, got;
  if (trvk_count(&call->out[0]) == 0) return;
  (void)trvk_qmatmul_make(call, &q, &e, &got);
  w.call = call;
  w.q = &q;
  w.g = g;
  w.real = real;
  w.dynamic = dynamic;
  choose(&w);
  const trvk_matmul_plan* p = &q.p;
  const size_t y_size = trv_dtype_size(call->out[0].dtype);
  if (!dynamic) {
    trvk_qout_make(&w.out, &call->out[0], &call->in[2], trvk_opt(call, 3), a->y_zero, a->act, a->lo,
                   a->hi, 0);
    w.out.act_fn = real ? real->act : NULL;
    w.out.no_halves = g->out != trvk_qgemm_ref.out;
  }
  const trv_dim blocks = (p->m + w.rows - 1) / w.rows;
  const trv_dim strips = (p->n + TRVK_QT_STRIP - 1) / TRVK_QT_STRIP;
  const int by_strips = w.copied && w.in_place && p->k <= TRVK_QP_K; /* B's copy lasts longer */
  trv_dim units = blocks * strips, begin, end, last_block = -1, last_batch = -1;
  for (uint32_t i = 0; i < p->nb; i++) units *= p->dim[i];
  trvk_split(units, call->tiles, tile, &begin, &end);
  for (trv_dim u = begin; u < end; u++) {
    const trv_dim batch = u / strips / blocks, in_batch = u - batch * strips * blocks;
    const trv_dim block = by_strips ? in_batch % blocks : in_batch / strips;
    const trv_dim col = (by_strips ? in_batch / blocks : in_batch % strips) * TRVK_QT_STRIP;
    if (batch != last_batch || block != last_block) {
      const trv_dim m0 = block * w.rows;
      w.count = p->m - m0 < w.rows ? p->m - m0 : w.rows;
      w.filled = w.summed = 0;
      w.a_data = trvk_at(p->a.t->data, p->a.t->dtype,
                         trvk_offset(p->nb, p->dim, p->a.batch, batch) + m0 * p->a.row);
      w.y = call->out[0].data +
            (trvk_offset(p->nb, p->dim, p->out.batch, batch) + m0 * p->out.row) * (trv_dim)y_size;
      w.out.y = w.y;
      last_block = block;
    }
    if (batch != last_batch) {
      w.b_data = p->b.t->data + trvk_offset(p->nb, p->dim, p->b.batch, batch);
      w.b_col = -1;
      last_batch = batch;
    }
    const trv_dim n = p->n - col < TRVK_QT_STRIP ? p->n - col : TRVK_QT_STRIP;
    w.col = col;
    if (!dynamic) trvk_qout_strip(&w.out, col, n);
    if (w.nibbles)
      dynamic->strip(&w, n);
    else
      strip(&w, n);
  }
}
