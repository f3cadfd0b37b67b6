/* qconv_gemm.c - convolution of stored numbers as a product: blocks of output pixels of one phase
 * times strips of channels of one group. K runs over the phase's taps and, inside, the channels
 * rounded up to 4, as in a packed weight.
 *
 * The tile takes a pointer for each pixel and tap, so where channels lie together and are a
 * multiple of 4 the input is read where it is. Otherwise the input rows that one row of outputs
 * meets are copied first, with their borders, channels together: each number once for all taps of
 * its row.
 */
#include "qconv.h"
#include "walk.h"

#if TRVK_Q_ROWS < 16
enum { PIXELS = 4, WIDE = 4, POINTERS = 64, TAPS = 32, ROOM = 512, EDGE = 64, PLAIN = 32 };
#else
enum {
  PIXELS = 96,     /* of a block */
  WIDE = 48,       /* of one whose sums have 64 bits */
  POINTERS = 1024, /* pixels times taps of a chunk */
  TAPS = 128,
  ROOM = 32768, /* bytes of copied rows */
  EDGE = 2048,  /* channels of a row outside */
  PLAIN = 512   /* K of a chunk of a weight that is not packed */
};
#endif
#if TRVK_Q_ROWS < 16
#define ALIGNED
#else
#define ALIGNED _Alignas(64) /* vectors that cross lines of a cache take twice as long */
#endif
_Static_assert(TRVK_Q_STRIP % TRVK_QT_STRIP == 0, "results are prepared for whole strips");

typedef struct state {
  const trvk_qconv* q;
  const trvk_qgemm* g;
  const uint8_t *x, *w; /* w: of the present group */
  int32_t zero;
  int wide, words, in_place; /* sums of 64 bits; the tile reads i16; rows are read where they lie */
  trv_dim size;              /* bytes of a number that the tile reads */
  trvk_phase phase;
  trv_dim group, taps, count;       /* of the phase; pixels of the block */
  trv_dim some_taps, some_k;        /* of a chunk: taps, and channels of each */
  int held;                         /* pointers are those of the block's only chunk */
  trv_dim from[PIXELS], at[PIXELS]; /* a window's origin in x (it may be outside), the pixel in y */
  trv_dim pos[PIXELS][3];           /* the origin as d, h, w */
  uint8_t inside[PIXELS];           /* all of the window is */
  int all_inside;                   /* all pixels' */
  /* the present chunk */
  trv_dim pieces, quads; /* rows of numbers per pixel, and their length */
  const void* rows[POINTERS];
  const int8_t* b[TAPS];
  ALIGNED int32_t c[PIXELS][TRVK_QT_STRIP];
  int32_t first[TRVK_QT_STRIP], sums[TRVK_QT_STRIP];
  int64_t total[WIDE][TRVK_QT_STRIP];
  union {
    int16_t words[EDGE];
    int8_t bytes[EDGE];
  } edge; /* a row of the zero point */
  union {
    uint8_t bytes[ROOM];
    int16_t words[ROOM / 2];
  } a;                                           /* copied rows */
  int8_t panels[TRVK_QT_NP][PLAIN * TRVK_PANEL]; /* of a plain weight */
} state;

/* ---- blocks ---- */

/* Columns of copied input that `count` outputs of one row meet by taps of a kernel row. */
static trv_dim width(const state* s, trv_dim count, trv_dim taps) {
  return (count - 1) * s->phase.move[2] + (taps - 1) * trvk_magnitude(s->phase.reach[2]) + 1;
}

/* Most channels of a chunk, and most of K (0: any). */
static trv_dim most_channels(const state* s) {
  const trvk_qconv* q = s->q;
  trv_dim most = q->c4;
  if (s->wide && most > TRVK_Q_WIDE) most = TRVK_Q_WIDE;
  if (!q->w.packed && most > PLAIN) most = PLAIN;
  return s->in_place && most > EDGE ? EDGE : most;
}
static trv_dim most_k(const state* s) {
  return s->wide ? TRVK_Q_WIDE : s->q->w.packed ? PTRDIFF_MAX : PLAIN;
}

/* How many pixels a block has, at most; 0: no need to try. */
static trv_dim block_pixels(const state* s) {
  const trv_dim taps = s->taps ? s->taps : 1, least = PIXELS < TRVK_QT_MR ? PIXELS : TRVK_QT_MR;
  trv_dim n = s->wide ? WIDE : PIXELS;
  if (n > POINTERS / taps) n = POINTERS / taps / least * least;
  if (n < least) n = least;
  if (s->in_place) return n;
  const trv_dim line = s->phase.taps[2] ? s->phase.taps[2] : 1, each = most_channels(s) * s->size;
  while (n > least && taps / line * width(s, n, line) > ROOM / each) n = (n + 1) / 2;
  while (n > 1 && width(s, n, 1) > ROOM / (4 * s->size)) n = n / 2;
  return n;
}

/* Cuts K into chunks. */
static void set_chunks(state* s) {
  const trv_dim line = s->phase.taps[2];
  s->some_k = most_channels(s);
  trv_dim n = most_k(s) / (s->some_k ? s->some_k : 1);
  if (n > POINTERS / s->count) n = POINTERS / s->count;
  if (n > TAPS) n = TAPS;
  if (s->some_k < s->q->c4) n = 1; /* channels by parts, of one tap at a time */
  if (!s->in_place && s->taps) {
    const trv_dim all = width(s, s->count, line), room = ROOM / (s->some_k * s->size);
    const trv_dim lines = n / line < room / all ? n / line : room / all;
    if (lines > 0 && n > 1) { /* whole rows of taps */
      n = lines * line;
    } else {
      const trv_dim one = ROOM / s->size / width(s, s->count, 1) / 4 * 4;
      if (s->some_k > one) s->some_k = one;
      n = 1;
    }
  }
  s->some_taps = n;
  s->held = 0;
}

/* The block's pixels, from number `first` of the phase on. */
static void set_pixels(state* s, trv_dim first, trv_dim count) {
  const trvk_conv_geo* g = &s->q->g;
  const trvk_phase* p = &s->phase;
  trv_dim j[3], n = first, m = 0, near[3], far[3];
  s->count = count;
  s->all_inside = 1;
  for (int i = 2; i >= 0; i--) {
    const trv_dim reach = p->taps[i] ? (p->taps[i] - 1) * p->reach[i] : 0;
    near[i] = reach < 0 ? reach : 0;
    far[i] = reach > 0 ? reach : 0;
    j[i] = n % p->count[i];
    n /= p->count[i];
  }
  while (m < count) { /* a row of outputs, or a part of one */
    const trv_dim run = p->count[2] - j[2] < count - m ? p->count[2] - j[2] : count - m;
    const trv_dim d = j[0] * p->move[0] + p->base[0], h = j[1] * p->move[1] + p->base[1];
    trv_dim w = j[2] * p->move[2] + p->base[2];
    trv_dim from =
        n * g->xs[0] + s->group * g->cg * g->xs[1] + d * g->xs[2] + h * g->xs[3] + w * g->xs[4];
    trv_dim at = n * g->ys[0] + (p->first[0] + j[0] * p->step[0]) * g->ys[2] +
                 (p->first[1] + j[1] * p->step[1]) * g->ys[3] +
                 (p->first[2] + j[2] * p->step[2]) * g->ys[4];
    const int inside =
        d + near[0] >= 0 && d + far[0] < g->in[0] && h + near[1] >= 0 && h + far[1] < g->in[1];
    for (const trv_dim end = m + run; m < end; m++) {
      s->from[m] = from;
      s->at[m] = at;
      s->pos[m][0] = d;
      s->pos[m][1] = h;
      s->pos[m][2] = w;
      s->inside[m] = (uint8_t)(inside && w + near[2] >= 0 && w + far[2] < g->in[2]);
      s->all_inside &= s->inside[m];
      w += p->move[2];
      from += p->move[2] * g->xs[4];
      at += p->step[2] * g->ys[4];
    }
    j[2] = 0;
    if (++j[1] == p->count[1]) {
      j[1] = 0;
      if (++j[0] == p->count[0]) {
        j[0] = 0;
        n++;
      }
    }
  }
}

/* ---- rows of A ---- */

/* A tap of the phase: its place there, steps from a window's origin. */
typedef struct tap {
  trv_dim i[3], by[3];
} tap;

static tap tap_at(const state* s, trv_dim t) {
  const trvk_phase* p = &s->phase;
  tap v;
  v.i[2] = t % p->taps[2];
  v.i[1] = t / p->taps[2] % p->taps[1];
  v.i[0] = t / p->taps[2] / p->taps[1];
  for (int i = 0; i < 3; i++) v.by[i] = v.i[i] * p->reach[i];
  return v;
}
static void tap_next(const state* s, tap* v) {
  for (int i = 2; i >= 0; i--) {
    v->by[i] += s->phase.reach[i];
    if (++v->i[i] < s->phase.taps[i] || i == 0) return;
    v->i[i] = v->by[i] = 0;
  }
}
/* Its place in the kernel. */
static trv_dim tap_place(const state* s, const tap* v, int axis) {
  return s->phase.t0[axis] + v->i[axis] * s->phase.t_step[axis];
}

/* Rows where they lie, from channel k0 on. */
static void point(state* s, trv_dim t0, trv_dim taps, trv_dim k0) {
  const trvk_conv_geo* g = &s->q->g;
  const void** to = s->rows;
  tap v = tap_at(s, t0);
  for (trv_dim t = 0; t < taps; t++, to += s->count, tap_next(s, &v)) {
    const trv_dim* by = v.by;
    const trv_dim off = by[0] * g->xs[2] + by[1] * g->xs[3] + by[2] * g->xs[4] + k0;
    if (s->all_inside) {
      for (trv_dim m = 0; m < s->count; m++) to[m] = s->x + (s->from[m] + off) * s->size;
      continue;
    }
    for (trv_dim m = 0; m < s->count; m++) {
      const trv_dim d = s->pos[m][0] + by[0], h = s->pos[m][1] + by[1], w = s->pos[m][2] + by[2];
      if (s->inside[m] ||
          (d >= 0 && d < g->in[0] && h >= 0 && h < g->in[1] && w >= 0 && w < g->in[2]))
        to[m] = s->x + (s->from[m] + off) * s->size;
      else
        to[m] = &s->edge;
    }
  }
}

/* n numbers of x, `step` apart, as the tile reads them. */
static void convert(const state* s, void* to, trv_dim from, trv_dim step, trv_dim n) {
  if (s->words) {
    const uint32_t dtype = s->q->in[0].dtype;
    trvk_q_row(to, s->x + from * (dtype == TRV_DTYPE_I8 ? 1 : 2), dtype, step, n, s->zero);
  } else if (step == 1 && n >= 16) {
    memcpy(to, s->x + from, (size_t)n);
  } else {
    for (trv_dim i = 0; i < n; i++) ((uint8_t*)to)[i] = s->x[from + i * step];
  }
}

/* A cell of the first layer's input: up to 3 numbers, kept by a mask, and zeros. */
static inline void put_cell(uint8_t* to, uint32_t v, uint32_t keep) {
  v &= keep;
  to[0] = (uint8_t)v;
  to[1] = (uint8_t)(v >> 8);
  to[2] = (uint8_t)(v >> 16);
  to[3] = 0;
}

/* count cells of n < 4 channels to 4 bytes each. */
static void weave(uint8_t* a, const uint8_t* x, trv_dim step, trv_dim c_step, trv_dim n,
                  trv_dim count) {
  const uint8_t *y = n > 1 ? x + c_step : x, *z = n > 2 ? x + 2 * c_step : x;
  const uint32_t keep = n > 2 ? 0xFFFFFFu : n > 1 ? 0xFFFFu : 0xFFu;
  trv_dim i = 0;
  if (c_step == 1 && step == 3) /* with what follows a cell, which the last may not have */
    for (; i + 1 < count; i++) {
      const uint8_t* v = x + 3 * i;
      put_cell(a + 4 * i, v[0] | (uint32_t)v[1] << 8 | (uint32_t)v[2] << 16 | (uint32_t)v[3] << 24,
               keep);
    }
  else if (step == 1)
    for (; i < count; i++)
      put_cell(a + 4 * i, x[i] | (uint32_t)y[i] << 8 | (uint32_t)z[i] << 16, keep);
  for (; i < count; i++)
    put_cell(a + 4 * i, x[i * step] | (uint32_t)y[i * step] << 8 | (uint32_t)z[i * step] << 16,
             keep);
}

/* Copies one input row for taps t .. t+taps of one kernel row, channels k0 .. k0+kc, and points:
 * for each tap, or for the first of taps that lie together. */
static uint8_t* copy_line(state* s, uint8_t* a, const void** to, trv_dim t, trv_dim taps,
                          trv_dim k0, trv_dim kc, int together) {
  const trvk_conv_geo* g = &s->q->g;
  const trvk_phase* p = &s->phase;
  const trv_dim reach = p->reach[2], cols = width(s, s->count, taps), cell = kc * s->size;
  const trv_dim n = g->cg - k0 < kc ? g->cg - k0 : kc; /* the rest pads */
  const tap v = tap_at(s, t);
  const trv_dim* by = v.by;
  const trv_dim back = reach < 0 ? (taps - 1) * -reach : 0; /* from the first column to tap t's */
  const trv_dim d = s->pos[0][0] + by[0], h = s->pos[0][1] + by[1], w = s->pos[0][2] + by[2] - back;
  trv_dim lo = w < 0 ? -w : 0, hi = w + cols > g->in[2] ? g->in[2] - w : cols;
  if (d < 0 || d >= g->in[0] || h < 0 || h >= g->in[1] || hi < lo) lo = hi = 0;
  if (lo > cols) lo = hi = cols;
  const int outside = s->words && !s->wide ? 0 : s->zero;
  if (lo > 0 || hi < cols) {
    if (s->words)
      for (trv_dim i = 0; i < cols * kc; i++) ((int16_t*)(void*)a)[i] = (int16_t)outside;
    else
      memset(a, outside, (size_t)(cols * kc));
  } else if (n < kc) {
    memset(a, 0, (size_t)(cols * cell));
  }
  const trv_dim from =
      s->from[0] + by[0] * g->xs[2] + by[1] * g->xs[3] + (by[2] - back) * g->xs[4] + k0 * g->xs[1];
  if (n < 4 && kc == 4 && !s->words) {
    weave(a + 4 * lo, s->x + from + lo * g->xs[4], g->xs[4], g->xs[1], n, hi - lo);
  } else if (n == kc && g->xs[1] == 1 && g->xs[4] == n) {
    convert(s, a + lo * cell, from + lo * n, 1, (hi - lo) * n);
  } else {
    for (trv_dim i = lo; i < hi; i++) convert(s, a + i * cell, from + i * g->xs[4], g->xs[1], n);
  }
  for (trv_dim k = 0; k < (together ? 1 : taps); k++, to += s->count)
    for (trv_dim m = 0; m < s->count; m++) to[m] = a + (back + m * p->move[2] + k * reach) * cell;
  return a + cols * cell;
}

static void copy(state* s, trv_dim t0, trv_dim taps, trv_dim k0, trv_dim kc, int together) {
  const trv_dim line = s->phase.taps[2];
  const void** to = s->rows;
  uint8_t* a = s->a.bytes;
  for (trv_dim t = t0, n; t < t0 + taps; t += n) {
    n = line - t % line < t0 + taps - t ? line - t % line : t0 + taps - t;
    a = copy_line(s, a, to, t, n, k0, kc, together);
    to += (together ? 1 : n) * s->count;
  }
}

/* ---- B ---- */

/* Numbers k0 .. k0+kc of one tap for columns from col on. */
static const int8_t* panel(state* s, const tap* v, trv_dim k0, trv_dim kc, trv_dim col, trv_dim n,
                           int8_t* to) {
  const trvk_qconv* q = s->q;
  const trvk_conv_geo* g = &q->g;
  const trv_dim d = tap_place(s, v, 0), h = tap_place(s, v, 1), w = tap_place(s, v, 2);
  if (q->w.packed) {
    const trv_dim number = (d * g->kernel[1] + h) * g->kernel[2] + w;
    return trvk_q_panel(&q->w, s->w, number * q->c4 + k0, kc, col, n, to);
  }
  return trvk_q_panel(&q->w, s->w + d * g->ws[2] + h * g->ws[3] + w * g->ws[4], k0,
                      g->cg - k0 < kc ? g->cg - k0 : kc, col, n, to);
}

/* The chunk's panels of columns col .. col+n; returns how far the second lies from the first. Of
 * taps that lie together in A and B (line of them, else 1) only the first counts. */
static trv_dim set_b(state* s, trv_dim t0, trv_dim taps, trv_dim line, trv_dim k0, trv_dim kc,
                     trv_dim col, trv_dim n) {
  const int packed = s->q->w.packed;
  const int8_t** b = s->b;
  tap v = tap_at(s, t0);
  for (trv_dim t = 0; t < taps; t++, tap_next(s, &v)) {
    const int counts = t % line == 0;
    if (packed && !counts) continue;
    const trv_dim used = packed ? 0 : t * kc * TRVK_PANEL;
    const int8_t* at =
        panel(s, &v, k0, kc, col, n < TRVK_PANEL ? n : TRVK_PANEL, s->panels[0] + used);
    if (counts) *b++ = at;
    if (n > TRVK_PANEL && !packed)
      (void)panel(s, &v, k0, kc, col + TRVK_PANEL, n - TRVK_PANEL, s->panels[1] + used);
  }
  return packed ? s->q->w.panel : (trv_dim)sizeof s->panels[0];
}

/* Sums of the strip's columns over the phase's taps. */
static void set_sums(state* s, trv_dim col, trv_dim n) {
  const trvk_qconv* q = s->q;
  memset(s->sums, 0, sizeof s->sums);
  if (q->w.packed && s->taps == q->g.taps) { /* packed with them */
    for (trv_dim p = 0; p < n; p += TRVK_PANEL)
      memcpy(s->sums + p, s->w + ((col + p) / TRVK_PANEL + 1) * q->w.panel - 64, 64);
    return;
  }
  for (trv_dim p = 0; p < n && s->taps; p += TRVK_PANEL) {
    tap v = tap_at(s, 0);
    for (trv_dim t = 0; t < s->taps; t++, tap_next(s, &v))
      for (trv_dim k = 0, kc; k < q->c4; k += kc) {
        kc = q->c4 - k < PLAIN ? q->c4 - k : PLAIN;
        const trv_dim left = n - p < TRVK_PANEL ? n - p : TRVK_PANEL;
        s->g->sums(panel(s, &v, k, kc, col + p, left, s->panels[0]), kc / 4, s->sums + p);
      }
  }
}

/* ---- the product ---- */

/* Rows m .. m+rows of the present chunk. */
static void multiply(state* s, trv_dim m, trv_dim rows, trv_dim n, trv_dim apart,
                     const int32_t* first) {
  const trvk_qtile t = {.rows = s->rows + m,
                        .b = s->b,
                        .first = first,
                        .c = s->c[m],
                        .row_step = s->count,
                        .taps = s->pieces,
                        .quads = s->quads,
                        .b_panel = apart,
                        .c_row = TRVK_QT_STRIP};
  (s->words ? s->g->words : s->g->bytes)(&t, (int)rows, (int)trvk_panels(n));
}

/* Makes the chunk of taps t0 .. and channels k0 .. present, for a strip; returns as set_b. */
static trv_dim set_chunk(state* s, trv_dim t0, trv_dim taps, trv_dim k0, trv_dim kc, trv_dim col,
                         trv_dim n) {
  const int together = !s->in_place && taps > 1 && s->phase.reach[2] == 1 &&
                       s->phase.t_step[2] == 1; /* the taps of a row, in A and in B */
  const trv_dim line = together ? s->phase.taps[2] : 1;
  if (!s->held) {
    if (s->in_place)
      point(s, t0, taps, k0);
    else
      copy(s, t0, taps, k0, kc, together);
  }
  s->pieces = taps / line;
  s->quads = line * kc / 4;
  s->held = taps == s->taps && kc == s->q->c4;
  return set_b(s, t0, taps, line, k0, kc, col, n);
}

/* Results of rows m .. m+rows; c: the strip's first column in what `out` has prepared, offset: in
 * y. */
static void finish(state* s, const trvk_qout* out, trv_dim m, trv_dim rows, trv_dim c, trv_dim n,
                   trv_dim offset) {
  const trv_dim step = s->q->g.ys[1];
  trv_dim at[TRVK_QT_MR];
  for (trv_dim i = 0; i < rows; i++) at[i] = s->at[m + i] + offset;
  if (!s->wide) {
    s->g->out(out, c, s->c[m], TRVK_QT_STRIP, rows, n, at, step);
    return;
  }
  for (trv_dim i = 0; i < rows; i++) {
    int64_t* total = s->total[m + i];
    for (trv_dim j = 0; j < n; j++)
      total[j] = trvk_add64(total[j], -trvk_mul64(s->zero, s->sums[j]));
    trvk_qout_i64(out, c, 1, total, n, at[i], step);
  }
}

/* A strip of n columns from col on. */
static void strip(state* s, const trvk_qout* out, trv_dim c, trv_dim col, trv_dim n) {
  const trv_dim c4 = s->q->c4, all = s->taps * c4, tiles = (s->count + TRVK_QT_MR - 1) / TRVK_QT_MR,
                offset = (s->group * s->q->g.og + col) * s->q->g.ys[1];
  trv_dim t = 0, k = 0, taps, kc;
  int last;
  memset(s->first, 0, sizeof s->first);
  if (!s->words || s->wide) set_sums(s, col, n);
  if (!s->words)
    for (trv_dim j = 0; j < TRVK_QT_STRIP; j++)
      s->first[j] = (int32_t)(0u - (uint32_t)(s->zero + s->g->bias) * (uint32_t)s->sums[j]);
  if (s->wide) memset(s->total, 0, (size_t)s->count * sizeof s->total[0]);
  do { /* chunks; one without taps where there are none */
    taps = s->taps - t < s->some_taps ? s->taps - t : s->some_taps;
    kc = c4 - k < s->some_k ? c4 - k : s->some_k;
    const int begins = t == 0 && k == 0;
    trv_dim apart = 0;
    if (all > 0)
      apart = set_chunk(s, t, taps, k, kc, col, n);
    else
      s->pieces = s->quads = 0;
    k += kc;
    if (k >= c4) {
      k = 0;
      t += taps;
    }
    last = all == 0 || t >= s->taps;
    for (trv_dim i = 0; i < tiles; i++) {
      trv_dim m, end;
      trvk_split(s->count, (uint32_t)tiles, (uint32_t)i, &m, &end);
      multiply(s, m, end - m, n, apart, s->wide || begins ? s->first : NULL);
      for (trv_dim r = m; r < end && s->wide; r++)
        for (trv_dim j = 0; j < n; j++) s->total[r][j] = trvk_add64(s->total[r][j], s->c[r][j]);
      if (last) finish(s, out, m, end - m, c, n, offset);
    }
  } while (!last);
}

void trvk_qconv_gemm_run(const trvk_qconv* q, trvk_qout* out, int32_t x_zero, uint32_t tile,
                         const trvk_qgemm* gemm) {
  const trvk_conv_geo* g = &q->g;
  const uint8_t* w = q->in[1].data;
  state s;
  s.q = q;
  s.g = gemm;
  s.x = q->in[0].data;
  s.zero = x_zero;
  s.wide = q->in[0].dtype == TRV_DTYPE_I16;
  s.words = s.wide || gemm->bytes == NULL;
  s.size = s.words ? 2 : 1;
  s.in_place = g->xs[1] == 1 && g->cg == q->c4 && s.words == s.wide;
  if (s.wide)
    for (int i = 0; i < EDGE; i++) s.edge.words[i] = (int16_t)x_zero;
  else
    memset(s.edge.bytes, x_zero, sizeof s.edge.bytes);
  /* Units: phases x groups x blocks x strips. Phase 0 has most pixels; the others' blocks are a
   * little smaller. */
  const trv_dim strips = (g->og + TRVK_QT_STRIP - 1) / TRVK_QT_STRIP, phases = trvk_phase_count(g);
  trvk_phase_make(g, 0, &s.phase);
  s.taps = s.phase.taps[0] * s.phase.taps[1] * s.phase.taps[2];
  const trv_dim lines = g->n * s.phase.count[0] * s.phase.count[1], line = s.phase.count[2],
                most = block_pixels(&s);
  const trv_dim parts = s.in_place ? 1 : (line + most - 1) / most, /* of a row */
      blocks = s.in_place ? (lines * line + most - 1) / most : lines * parts;
  trv_dim begin, end, last = -1, ready = -1;
  s.count = 0;
  trvk_split(phases * g->groups * blocks * strips, q->call.tiles, tile, &begin, &end);
  for (trv_dim u = begin; u < end; u++) {
    const trv_dim col = u % strips * TRVK_QT_STRIP, block = u / strips % blocks;
    if (u / strips != last) {
      last = u / strips;
      s.group = last / blocks % g->groups;
      trvk_phase_make(g, last / blocks / g->groups, &s.phase);
      s.taps = s.phase.taps[0] * s.phase.taps[1] * s.phase.taps[2];
      const trv_dim rows = g->n * s.phase.count[0] * s.phase.count[1], run = s.phase.count[2];
      const trv_dim all = s.in_place ? rows * run : run, cuts = s.in_place ? blocks : parts;
      const trv_dim each = (all + cuts - 1) / cuts, p0 = block % cuts * each;
      s.count = p0 >= all || block / cuts >= rows ? 0 : all - p0 < each ? all - p0 : each;
      s.w = w + s.group * (q->w.packed     ? trvk_panels(g->og) * q->w.panel
                           : g->transposed ? g->cg * g->ws[1]
                                           : g->og * g->ws[0]);
      if (s.count > 0) {
        set_pixels(&s, block / cuts * run + p0, s.count);
        set_chunks(&s);
      }
    }
    if (s.count == 0) continue;
    const trv_dim from = s.group * g->og + col,
                  n = g->og - col < TRVK_QT_STRIP ? g->og - col : TRVK_QT_STRIP;
    const trv_dim c = col % TRVK_Q_STRIP;
    if (from - c != ready) {
      ready = from - c;
      trvk_qout_strip(out, ready,
                      g->og - (col - c) < TRVK_Q_STRIP ? g->og - (col - c) : TRVK_Q_STRIP);
    }
    strip(&s, out, c, col, n);
  }
}
