/* conv_gemm.c - convolution as a matrix product that reads its input through row pointers.
 *
 * A block of output pixels (all of one phase) times a strip of channels; K runs over taps and input
 * channels, in passes. A pass reads A in place where channels are contiguous floats (rows beyond
 * the border: a row of zeros), else from a gathered copy of just this block and pass. B is the
 * packed weight, or a copy of this strip and pass. Where the machine multiplies pairs of bfloat16,
 * a pair of channels is taken for a float of half as many channels.
 */
#include "conv.h"
#include "qgemm.h"

static const float zeros[TRVK_KC];

#define TRVK_PIECES 32 /* pieces of a row of A */

typedef struct pixel {
  trv_dim at, i[3]; /* offset of the image in x; the window's origin along d, h, w */
  trv_dim run;      /* how many pixels from this one on lie in one row */
} pixel;

typedef struct state {
  const trvk_conv_geo* g;
  const trvk_gemm *gemm, *floats; /* floats: for conversions and results */
  const uint8_t *x, *w;
  uint32_t dtype;               /* of x and w; of pairs: F32 */
  int packed, in_place, merged; /* packed: B is read where it lies */
  int halves;                   /* B is packed in 16 bits, and copied to floats */
  trv_dim cg;                   /* rows of B of a tap: channels, even for halves of bf16 */
  trvk_phase phase;
  trv_dim group, count, mr; /* of the present block */
  trv_dim tap0, taps, c0, kc,
      filled;     /* the present pass; filled: pass number that rows hold, -1 none */
  trv_dim pieces; /* of a row of A, 0: not in pieces */
  int planes;     /* a piece is of one channel */
  trv_dim rows, taps_most, kc_most;
  trvk_epi epi;
  trvk_row row[TRVK_ROWS];
  pixel px[TRVK_ROWS];
  const float* ptr[TRVK_ROWS * TRVK_TAPS];
  const float* b[TRVK_PIECES > TRVK_TAPS ? TRVK_PIECES : TRVK_TAPS];
  float acc[TRVK_ROWS * TRVK_STRIP];
  float gather[TRVK_GATHER];
  float b_pack[TRVK_GATHER];
} state;

static inline int inside(const trvk_conv_geo* g, const pixel* p, const trv_dim* delta,
                         trv_dim* at) {
  const trv_dim d = p->i[0] + delta[0], h = p->i[1] + delta[1], w = p->i[2] + delta[2];
  *at = p->at + d * g->xs[2] + h * g->xs[3] + w * g->xs[4];
  return d >= 0 && d < g->in[0] && h >= 0 && h < g->in[1] && w >= 0 && w < g->in[2];
}

/* The block's pixels, from number `from` of the phase on. */
static void set_pixels(state* s, trv_dim from) {
  const trvk_conv_geo* g = s->g;
  const trvk_phase* p = &s->phase;
  const trv_dim out = p->step[2] * g->ys[4], res = p->step[2] * g->rs[4];
  trv_dim j[3], n = from, m = 0;
  for (int i = 2; i >= 0; i--) {
    j[i] = n % p->count[i];
    n /= p->count[i];
  }
  while (m < s->count) { /* one row of outputs, or what the block has of it */
    trv_dim o[3], run = p->count[2] - j[2];
    pixel px;
    trvk_row row;
    for (int i = 0; i < 3; i++) {
      o[i] = p->first[i] + j[i] * p->step[i];
      px.i[i] = j[i] * p->move[i] + p->base[i];
    }
    px.at = n * g->xs[0] + s->group * g->cg * g->xs[1];
    row.out = n * g->ys[0] + o[0] * g->ys[2] + o[1] * g->ys[3] + o[2] * g->ys[4];
    row.res = n * g->rs[0] + o[0] * g->rs[2] + o[1] * g->rs[3] + o[2] * g->rs[4];
    row.bias2 = 0;
    if (run > s->count - m) run = s->count - m;
    for (px.run = run; px.run > 0; px.run--, m++) {
      s->px[m] = px;
      s->row[m] = row;
      px.i[2] += p->move[2];
      row.out += out;
      row.res += res;
    }
    j[2] = 0;
    if (++j[1] < p->count[1]) continue;
    j[1] = 0;
    if (++j[0] < p->count[0]) continue;
    j[0] = 0;
    n++;
  }
}

/* Pointers [tile][tap][row] into the input. */
static void rows_in_place(state* s) {
  const trvk_conv_geo* g = s->g;
  const float* x = (const float*)(const void*)s->x + s->c0;
  const trv_dim move = s->phase.move[2] * g->xs[4];
  for (trv_dim t = 0; t < s->taps; t++) {
    const float** to = s->ptr + t * s->mr;
    trv_dim delta[3], at, in_tile = 0;
    trvk_tap_at(s->g, &s->phase, s->tap0 + t, delta);
    for (trv_dim m = 0; m < s->count;) {
      const pixel* px = &s->px[m];
      const trv_dim d = px->i[0] + delta[0], h = px->i[1] + delta[1], end = m + px->run;
      const int outside = d < 0 || d >= g->in[0] || h < 0 || h >= g->in[1];
      trv_dim w = px->i[2] + delta[2];
      at = px->at + d * g->xs[2] + h * g->xs[3] + w * g->xs[4];
      for (; m < end; m++, w += s->phase.move[2], at += move) {
        *to++ = outside || w < 0 || w >= g->in[2] ? zeros : x + at;
        if (++in_tile == s->mr) {
          in_tile = 0;
          to += (s->taps - 1) * s->mr;
        }
      }
    }
  }
}

/* Few channels: A in pieces, rows of the kernel that lie in one piece of the input (all channels of
 * a row, or a row of one channel's plane). A piece across the border is copied, with zeros; others
 * are read in place. */
static void rows_in_pieces(state* s) {
  const trvk_conv_geo* g = s->g;
  const trvk_phase* p = &s->phase;
  const trv_dim kw = g->kernel[2], cg = g->cg, per_row = s->planes ? cg : 1,
                kc = s->planes ? kw : kw * cg;
  const trv_dim rows = g->kernel[0] * g->kernel[1], k_all = rows * kw * cg,
                last = g->in[2] - 1 - (kw - 1) * p->reach[2];
  const trv_dim move = p->move[2] * g->xs[4];
  trv_dim kd = 0, kh = 0;
  for (trv_dim k = 0; k < rows; k++) {
    for (trv_dim c = 0; c < per_row; c++) {
      const trv_dim piece = k * per_row + c;
      const float** to = s->ptr + piece * s->mr;
      trv_dim in_tile = 0;
      for (trv_dim m = 0; m < s->count;) {
        const pixel* px = &s->px[m];
        const trv_dim d = px->i[0] + kd * p->reach[0], h = px->i[1] + kh * p->reach[1];
        const int outside = d < 0 || d >= g->in[0] || h < 0 || h >= g->in[1];
        const trv_dim end = m + px->run;
        const float* x = (const float*)(const void*)s->x;
        trv_dim w0 = px->i[2],
                at = px->at + d * g->xs[2] + h * g->xs[3] + w0 * g->xs[4] + c * g->xs[1];
        for (; m < end; m++, w0 += p->move[2], at += move) {
          if (outside) {
            *to = zeros;
          } else if (w0 >= 0 && w0 <= last) {
            *to = x + at;
          } else {
            float* copy = s->gather + m * k_all + piece * kc;
            for (trv_dim i = 0; i < kc; i++) {
              const trv_dim w = w0 + (s->planes ? i : i / cg) * p->reach[2];
              copy[i] = w >= 0 && w < g->in[2] ? x[at + i] : 0.0f;
            }
            *to = copy;
          }
          to++;
          if (++in_tile == s->mr) {
            in_tile = 0;
            to += (s->pieces - 1) * s->mr;
          }
        }
      }
    }
    if (++kh == g->kernel[1]) {
      kh = 0;
      kd++;
    }
  }
}

/* The same copy as below when the pass holds whole kernels of float32. */
static void gather_kernels(state* s) {
  const trvk_conv_geo* g = s->g;
  const trvk_phase* p = &s->phase;
  const trv_dim kw = g->kernel[2], cg = g->cg, reach = p->reach[2], c_step = g->xs[1],
                w_step = g->xs[4];
  const trv_dim rows = g->kernel[0] * g->kernel[1];
  float* to = s->gather;
  for (trv_dim m = 0; m < s->count; m++) {
    const pixel* px = &s->px[m];
    const trv_dim w0 = px->i[2], w1 = w0 + (kw - 1) * reach;
    const int inner = (w0 < w1 ? w0 : w1) >= 0 && (w0 < w1 ? w1 : w0) < g->in[2];
    trv_dim d = px->i[0], h = px->i[1], kh = 0;
    for (trv_dim k = 0; k < rows; k++, to += kw * cg, h += p->reach[1], kh++) {
      if (kh == g->kernel[1]) {
        kh = 0;
        h = px->i[1];
        d += p->reach[0];
      }
      if (d < 0 || d >= g->in[0] || h < 0 || h >= g->in[1]) {
        for (trv_dim i = 0; i < kw * cg; i++) to[i] = 0.0f;
        continue;
      }
      const trv_dim at = px->at + d * g->xs[2] + h * g->xs[3];
      const float* x = (const float*)(const void*)s->x;
      for (trv_dim c = 0; c < cg; c++)
        for (trv_dim i = 0; i < kw; i++) {
          const trv_dim w = w0 + i * reach;
          to[i * cg + c] =
              inner || (w >= 0 && w < g->in[2]) ? x[at + w * w_step + c * c_step] : 0.0f;
        }
    }
  }
}

/* Copies what the pass reads, as [row][tap][channel]. */
static void rows_gather(state* s) {
  const trvk_conv_geo* g = s->g;
  const trv_dim run = s->taps * s->kc, c_step = g->xs[1];
  const size_t size = trv_dtype_size(s->dtype);
  const int kernels =
      s->merged && s->dtype == TRV_DTYPE_F32 && s->taps == g->taps && s->kc == g->cg;
  if (kernels) gather_kernels(s);
  for (trv_dim t = 0; t < (kernels ? 0 : s->taps); t++) {
    trv_dim delta[3], at;
    trvk_tap_at(s->g, &s->phase, s->tap0 + t, delta);
    for (trv_dim m = 0; m < s->count; m++) {
      float* to = s->gather + m * run + t * s->kc;
      if (!inside(g, &s->px[m], delta, &at)) {
        for (trv_dim c = 0; c < s->kc; c++) to[c] = 0.0f;
        continue;
      }
      const uint8_t* from = s->x + (at + s->c0 * c_step) * (trv_dim)size;
      if (s->dtype == TRV_DTYPE_F32 && s->kc <= 8) {
        const float* v = (const float*)(const void*)from;
        for (trv_dim c = 0; c < s->kc; c++) to[c] = v[c * c_step];
      } else {
        trvk_row_floats(s->floats, to, from, s->dtype, c_step, s->kc);
      }
    }
  }
  for (trv_dim m = 0; m < s->count; m += s->mr)
    for (trv_dim t = 0; t < (s->merged ? 1 : s->taps); t++)
      for (trv_dim i = 0; i < s->mr && m + i < s->count; i++)
        s->ptr[m * (s->merged ? 1 : s->taps) + t * s->mr + i] =
            s->gather + (m + i) * run + t * s->kc;
}

/* A piece of one panel of B, from a weight in 8 bits: one tap, and the pass's channels. */
static void floats(const state* s, trv_dim tap, trv_dim col, trv_dim n, trv_dim at, float* dst) {
  const trvk_qweight* q = s->g->q;
  const trv_dim first = s->group * s->g->og; /* column of the scales */
  if (q->packed)
    q->floats(q, s->w + s->group * trvk_panels(s->g->og) * q->panel,
              tap * trvk_round4(s->g->cg) + s->c0, s->kc, col, n, first, dst);
  else /* at: of the piece's first number */
    q->floats(q, s->w + at - col * q->n_step, 0, s->kc, col, n, first, dst);
}

/* B of the pass for a strip: packed panels in place, or copied from the weight. */
static void set_b(state* s, trv_dim col, trv_dim n, trvk_block* k) {
  const trvk_conv_geo* g = s->g;
  const trv_dim panels = trvk_panels(n), per_panel = g->taps * g->cg * TRVK_PANEL;
  trv_dim delta[3];
  k->bk = TRVK_PANEL;
  if (s->packed) {
    const float* w = (const float*)(const void*)s->w +
                     (s->group * trvk_panels(g->og) + col / TRVK_PANEL) * per_panel +
                     s->c0 * TRVK_PANEL;
    for (trv_dim t = 0; t < (s->merged ? 1 : s->taps); t++)
      s->b[t] = w + trvk_tap_at(s->g, &s->phase, s->tap0 + t, delta) * g->cg * TRVK_PANEL;
    for (trv_dim t = 0; t < s->pieces; t++) {
      const trv_dim row =
          s->planes ? t / g->cg * g->kernel[2] * g->cg + t % g->cg : t * g->kernel[2] * g->cg;
      s->b[t] = w + row * TRVK_PANEL;
    }
    if (s->pieces && s->planes) k->bk = g->cg * TRVK_PANEL;
    k->bp = per_panel;
    return;
  }
  if (s->halves) {
    const trv_dim kc = trvk_packed_k(s->dtype, s->kc), each = g->taps * s->cg * TRVK_PANEL;
    const trv_dim panel = s->group * trvk_panels(g->og) + col / TRVK_PANEL;
    for (trv_dim p = 0; p < panels; p++)
      for (trv_dim t = 0; t < s->taps; t++) {
        const trv_dim tap = trvk_tap_at(s->g, &s->phase, s->tap0 + t, delta);
        const uint8_t* w =
            trvk_at(s->w, s->dtype, (panel + p) * each + (tap * s->cg + s->c0) * TRVK_PANEL);
        float* dst = s->b_pack + (p * s->taps + t) * kc * TRVK_PANEL;
        if (s->dtype == TRV_DTYPE_BF16)
          s->floats->widen_pairs(dst, w, kc / 2);
        else
          s->floats->widen(dst, (const uint16_t*)(const void*)w, s->dtype, kc * TRVK_PANEL);
      }
    for (trv_dim t = 0; t < (s->merged ? 1 : s->taps); t++)
      s->b[t] = s->b_pack + t * kc * TRVK_PANEL;
    k->bp = s->taps * kc * TRVK_PANEL;
    return;
  }
  for (trv_dim p = 0; p < panels; p++)
    for (trv_dim t = 0; t < s->taps; t++) {
      const trv_dim tap = trvk_tap_at(s->g, &s->phase, s->tap0 + t, delta),
                    left = n - p * TRVK_PANEL;
      const trv_dim at =
          (s->group * (g->transposed ? 0 : g->og) + col + p * TRVK_PANEL) * g->ws[0] +
          ((g->transposed ? s->group * g->cg : 0) + s->c0) * g->ws[1] +
          tap / (g->kernel[1] * g->kernel[2]) * g->ws[2] +
          tap / g->kernel[2] % g->kernel[1] * g->ws[3] + tap % g->kernel[2] * g->ws[4];
      float* dst = s->b_pack + (p * s->taps + t) * s->kc * TRVK_PANEL;
      const trv_dim cols = left < TRVK_PANEL ? left : TRVK_PANEL;
      if (g->q)
        floats(s, tap, col + p * TRVK_PANEL, cols, at, dst);
      else
        trvk_pack_panels(dst, trvk_at(s->w, s->dtype, at), s->dtype, g->ws[1], g->ws[0], s->kc,
                         cols, 1);
    }
  for (trv_dim t = 0; t < (s->merged ? 1 : s->taps); t++)
    s->b[t] = s->b_pack + t * s->kc * TRVK_PANEL;
  k->bp = s->taps * s->kc * TRVK_PANEL;
}

/* Rows of a block: for gathered input so many that the whole of K fits in one pass, if these are
 * not too few. */
static trv_dim block_rows(const trvk_conv_geo* g, int in_place) {
  trv_dim k = g->cg;
  if (in_place) return TRVK_ROWS;
  for (int i = 0; i < 3; i++) {
    const trv_dim step =
        g->transposed ? g->stride[i] : 1; /* a phase has about that part of the taps */
    const trv_dim taps = (g->kernel[i] + step - 1) / step;
    k = k > TRVK_GATHER / taps ? TRVK_GATHER : k * taps;
  }
  trv_dim rows = TRVK_GATHER / (k > 0 ? k : 1);
  const trv_dim pieces = g->cg * g->kernel[0] * g->kernel[1]; /* at most */
  if (pieces <= TRVK_PIECES && rows > TRVK_ROWS * TRVK_TAPS / pieces)
    rows = TRVK_ROWS * TRVK_TAPS / pieces;
  const trv_dim least = (g->og > 256 ? 1 : 4) * TRVK_MR_MAX;
  if (rows < least) rows = least;
  if (rows > TRVK_ROWS) rows = TRVK_ROWS;
  return rows < TRVK_MR_MAX ? rows : rows / TRVK_MR_MAX * TRVK_MR_MAX;
}

/* How the phase's passes look. */
static void choose(state* s) {
  const trvk_conv_geo* g = s->g;
  const trvk_phase* p = &s->phase;
  const trv_dim taps = p->taps[0] * p->taps[1] * p->taps[2], b_most = TRVK_GATHER / TRVK_STRIP;
  const int whole = p->t_step[0] == 1 && p->t_step[1] == 1 && p->t_step[2] == 1 && taps == g->taps;
  s->merged = !s->in_place && (whole || !s->packed) && s->cg == g->cg;
  s->kc_most = s->in_place ? TRVK_KC : TRVK_GATHER / s->rows;
  if (!s->packed && s->kc_most > b_most) s->kc_most = b_most;
  if (s->halves) s->kc_most -= s->kc_most & 1; /* pairs stay together */
  s->taps_most = s->merged ? s->kc_most : TRVK_TAPS;
  /* Pieces: where the pass has all of K. */
  const trv_dim rows = g->kernel[0] * g->kernel[1];
  const int last = g->cg == 1 || (g->xs[1] == 1 && p->reach[2] * g->xs[4] == g->cg);
  s->pieces = 0;
  s->planes = !last || g->cg == 1;
  if (s->merged && s->packed && s->dtype == TRV_DTYPE_F32 && taps * g->cg <= s->kc_most &&
      p->reach[2] > 0 && (s->planes ? p->reach[2] * g->xs[4] == 1 : last)) {
    s->pieces = s->planes ? rows * g->cg : rows;
    if (s->pieces > TRVK_PIECES || s->pieces * s->rows > TRVK_ROWS * TRVK_TAPS) s->pieces = 0;
  }
}

static void unit(state* s, trv_dim col, trv_dim n, const float* bias) {
  const trvk_conv_geo* g = s->g;
  const trv_dim taps = s->phase.taps[0] * s->phase.taps[1] * s->phase.taps[2];
  trvk_block k;
  trv_dim pass = 0;
  k.g = s->gemm;
  k.epi = &s->epi;
  k.row = s->row;
  k.rows = s->ptr;
  k.count = s->count;
  k.mr = s->mr;
  k.ak = 1;
  k.b = s->b;
  k.bias = bias;
  k.acc = s->acc;
  s->tap0 = s->c0 = 0;
  do {
    const trv_dim fit = s->kc_most / (s->cg ? s->cg : 1);
    s->kc = g->cg - s->c0;
    s->taps = 1;
    if (fit < 1) {
      if (s->kc > s->kc_most) s->kc = s->kc_most;
    } else {
      s->taps = taps - s->tap0 < fit ? taps - s->tap0 : fit;
      if (s->taps > s->taps_most) s->taps = s->taps_most;
    }
    if (taps == 0 || g->cg == 0) s->taps = 0;
    k.first = pass == 0;
    k.last = s->taps == 0 || (s->tap0 + s->taps >= taps && s->c0 + s->kc >= g->cg);
    if (s->filled != pass && s->taps > 0) {
      if (s->in_place)
        rows_in_place(s);
      else if (s->pieces)
        rows_in_pieces(s);
      else
        rows_gather(s);
      s->filled = pass;
    }
    if (s->taps > 0) set_b(s, col, n, &k);
    k.taps = s->merged && s->taps > 0 ? 1 : s->taps;
    k.kc = s->merged ? s->taps * s->kc : s->kc;
    if (s->pieces && s->taps > 0) {
      k.taps = s->pieces;
      k.kc = s->planes ? g->kernel[2] : g->kernel[2] * g->cg;
    }
    trvk_block_run(&k, col, n, 0);
    s->c0 += s->kc;
    if (s->c0 >= g->cg) {
      s->c0 = 0;
      s->tap0 += s->taps;
    }
    pass++;
  } while (!k.last);
}

/* May channels be taken by twos? Then *out is the geometry in units of pairs. */
static int by_pairs(const trvk_call* call, const trvk_conv_geo* g, trvk_conv_geo* out) {
  trv_dim odd = g->cg | (g->n > 1 ? g->xs[0] : 0);
  for (int i = 0; i < 3; i++) odd |= g->in[i] > 1 ? g->xs[2 + i] : 0;
  if (call->in[0].dtype != TRV_DTYPE_BF16 || g->xs[1] != 1) return 0;
  if ((odd & 1) || ((uintptr_t)call->in[0].data & 3)) return 0;
  *out = *g;
  out->cg /= 2;
  out->cin /= 2;
  out->xs[0] /= 2;
  for (int i = 2; i < 5; i++) out->xs[i] /= 2;
  return 1;
}

void trvk_conv_gemm_run(const trvk_call* call, const trvk_conv_geo* g, uint32_t tile,
                        const trvk_gemm* gemm, const trvk_gemm* pairs) {
  const trvf_conv_attrs* attrs = call->attrs;
  const trv_tensor* bias = trvk_opt(call, 2);
  const trv_dim width = (trv_dim)gemm->np * TRVK_PANEL, strips = (g->og + width - 1) / width;
  const trv_dim phases = trvk_phase_count(g);
  const uint32_t dtype = call->in[0].dtype;
  trvk_conv_geo halved;
  state s;
  const int paired = pairs && attrs->packed && by_pairs(call, g, &halved);
  s.x = call->in[0].data;
  s.w = call->in[1].data;
  s.dtype = paired ? TRV_DTYPE_F32 : dtype;
  s.packed = attrs->packed != 0;
  s.halves = s.packed && s.dtype != TRV_DTYPE_F32;
  if (s.halves) s.packed = 0;
  trvk_conv_epi(call, g, &s.epi, gemm);
  if (paired) g = &halved;
  s.g = g;
  s.gemm = paired ? pairs : gemm;
  s.floats = gemm;
  s.cg = s.halves ? trvk_packed_k(dtype, g->cg) : g->cg;
  uint8_t* const out = s.epi.out;
  const uint8_t* const res = s.epi.res;
  s.in_place =
      s.dtype == TRV_DTYPE_F32 && (g->xs[1] == 1 || g->cg == 1) && (g->cg >= 8 || g->taps == 1);
  s.rows = block_rows(g, s.in_place);
  /* Units: phases x groups x blocks x strips. Phase 0 has most pixels; the others' blocks are a
   * little smaller. */
  trvk_phase_make(g, 0, &s.phase);
  const trv_dim pixels0 = g->n * s.phase.count[0] * s.phase.count[1] * s.phase.count[2];
  const trv_dim blocks = (pixels0 + s.rows - 1) / s.rows;
  trv_dim begin, end, last = -1;
  trvk_split(phases * g->groups * blocks * strips, call->tiles, tile, &begin, &end);
  for (trv_dim u = begin; u < end; u++) {
    const trv_dim strip = u % strips, block = u / strips % blocks,
                  group = u / strips / blocks % g->groups;
    if (u / strips != last) {
      last = u / strips;
      trvk_phase_make(g, u / strips / blocks / g->groups, &s.phase);
      choose(&s);
      const trv_dim pixels = g->n * s.phase.count[0] * s.phase.count[1] * s.phase.count[2];
      const trv_dim each = (pixels + blocks - 1) / blocks, p0 = block * each;
      s.group = group;
      s.count = p0 >= pixels ? 0 : pixels - p0 < each ? pixels - p0 : each;
      s.filled = -1;
      s.mr = trvk_even_rows(gemm, s.count);
      if (s.count > 0) set_pixels(&s, p0);
      s.epi.out = trvk_at(out, dtype, group * g->og * g->ys[1]);
      s.epi.res = res ? trvk_at(res, dtype, group * g->og * g->rs[1]) : NULL;
    }
    if (s.count == 0) continue;
    const trv_dim col = strip * width, n = g->og - col < width ? g->og - col : width;
    float buffer[TRVK_STRIP];
    const float* b = NULL;
    if (bias) {
      const uint8_t* src = trvk_at(bias->data, dtype, (group * g->og + col) * g->bias_step);
      b = buffer;
      if (dtype == TRV_DTYPE_F32 && g->bias_step == 1 && n % TRVK_PANEL == 0) {
        b = (const float*)(const void*)src;
      } else {
        memset(buffer, 0, sizeof buffer);
        trvk_row_load(buffer, src, dtype, g->bias_step, n);
      }
    }
    unit(&s, col, n, b);
  }
}
