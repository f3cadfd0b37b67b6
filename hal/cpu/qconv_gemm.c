/* qconv_gemm.c - convolution of stored numbers as a product: blocks of output pixels of one phase
 * times strips of channels of one group. K runs over the phase's taps and, inside, the channels
 * rounded up to 4, as in a packed weight. */
#include "qconv.h"

typedef struct pixel {
  trv_dim at, i[3], out; /* offset of the image and group in x; the window's origin; offset in y */
} pixel;

typedef struct state {
  const trvk_qconv* q;
  const uint8_t *x, *w; /* w: of the present group */
  uint32_t dtype;
  int32_t zero;
  trvk_phase phase;
  pixel px[TRVK_Q_ROWS];
} state;

/* The block's pixels, from number `from` of the phase on. */
static void set_pixels(state* s, trv_dim group, trv_dim from, trv_dim count) {
  const trvk_conv_geo* g = &s->q->g;
  const trvk_phase* p = &s->phase;
  trv_dim j[3], n = from;
  for (int i = 2; i >= 0; i--) {
    j[i] = n % p->count[i];
    n /= p->count[i];
  }
  for (trv_dim m = 0; m < count; m++) {
    pixel* px = &s->px[m];
    px->at = n * g->xs[0] + group * g->cg * g->xs[1];
    px->out = n * g->ys[0];
    for (int i = 0; i < 3; i++) {
      px->i[i] = j[i] * p->move[i] + p->base[i];
      px->out += (p->first[i] + j[i] * p->step[i]) * g->ys[2 + i];
    }
    for (int i = 2; i >= 0; i--) {
      if (++j[i] < p->count[i]) break;
      j[i] = 0;
      if (i == 0) n++;
    }
  }
}

static void gather(const trvk_qblock* b, trv_dim k0, trv_dim kc, int16_t* a) {
  const state* s = b->self;
  const trvk_conv_geo* g = &s->q->g;
  const trv_dim size = (trv_dim)trv_dtype_size(s->dtype), c_step = g->xs[1];
  const int16_t outside = (int16_t)(s->dtype == TRV_DTYPE_I8 ? 0 : s->zero);
  for (trv_dim k = k0, run; k < k0 + kc; k += run) {
    const trv_dim c = k % s->q->c4;
    trv_dim delta[3];
    trvk_tap_at(&s->q->g, &s->phase, k / s->q->c4, delta);
    run = s->q->c4 - c < k0 + kc - k ? s->q->c4 - c : k0 + kc - k;
    const trv_dim n = g->cg - c < run ? g->cg - c : run; /* the rest pads */
    int16_t* to = a + (k - k0);
    for (trv_dim m = 0; m < b->count; m++, to += kc) {
      const pixel* px = &s->px[m];
      const trv_dim d = px->i[0] + delta[0], h = px->i[1] + delta[1], w = px->i[2] + delta[2];
      for (trv_dim i = n; i < run; i++) to[i] = 0;
      if (d < 0 || d >= g->in[0] || h < 0 || h >= g->in[1] || w < 0 || w >= g->in[2]) {
        for (trv_dim i = 0; i < n; i++) to[i] = outside;
        continue;
      }
      const trv_dim at = px->at + d * g->xs[2] + h * g->xs[3] + w * g->xs[4] + c * c_step;
      trvk_q_row(to, s->x + at * size, s->dtype, c_step, n, s->zero);
    }
  }
}

static const int8_t* panel(trvk_qblock* b, trv_dim k0, trv_dim kc, trv_dim col, trv_dim n) {
  const state* s = b->self;
  const trvk_qconv* q = s->q;
  trv_dim delta[3];
  if (q->w.packed) /* a chunk is of one tap where the phase leaves taps out */
    return trvk_q_panel(
        &q->w, s->w,
        b->period ? trvk_tap_at(&s->q->g, &s->phase, k0 / q->c4, delta) * q->c4 + k0 % q->c4 : k0,
        kc, col, n, b->b);
  int8_t* to = b->b;
  for (trv_dim k = k0, run; k < k0 + kc; k += run, to += run * TRVK_PANEL) {
    const trv_dim c = k % q->c4, tap = trvk_tap_at(&s->q->g, &s->phase, k / q->c4, delta);
    const trv_dim at = tap / q->g.kernel[2] / q->g.kernel[1] * q->g.ws[2] +
                       tap / q->g.kernel[2] % q->g.kernel[1] * q->g.ws[3] +
                       tap % q->g.kernel[2] * q->g.ws[4];
    run = q->c4 - c < k0 + kc - k ? q->c4 - c : k0 + kc - k;
    trvk_q_panel(&q->w, s->w + at, c, q->g.cg - c < run ? q->g.cg - c : run, col, n, to);
  }
  return b->b;
}

static void flush(trvk_qblock* b, trv_dim p, trv_dim col, trv_dim n, trv_dim k_end, const int8_t* w,
                  trv_dim quads) {
  (void)col, (void)n, (void)k_end;
  trvk_qblock_widen(b, ((const state*)b->self)->zero, p, w, quads);
}

void trvk_qconv_gemm_run(const trvk_qconv* q, trvk_qout* out, int32_t x_zero, uint32_t tile,
                         const trvk_qgemm* gemm) {
  const trvk_conv_geo* g = &q->g;
  const trvk_call* call = &q->call;
  const uint8_t* w = q->in[1].data;
  const int wide = q->in[0].dtype == TRV_DTYPE_I16;
  state s;
  trvk_qblock b;
  s.q = q;
  s.x = q->in[0].data;
  s.dtype = q->in[0].dtype;
  s.zero = x_zero;
  b.g = gemm;
  b.self = &s;
  b.gather = gather;
  b.panel = panel;
  b.flush = wide ? flush : NULL;
  b.sums = 0;
  b.chunk = wide ? TRVK_Q_WIDE : TRVK_Q_A;
  if (!q->w.packed && b.chunk > TRVK_Q_B) b.chunk = TRVK_Q_B;
  b.period = q->w.packed && g->transposed ? q->c4 : 0;
  /* Units: phases x groups x blocks x strips. Phase 0 has most pixels; the others' blocks are a
   * little smaller. */
  const trv_dim strips = (g->og + TRVK_Q_STRIP - 1) / TRVK_Q_STRIP, phases = trvk_phase_count(g);
  trvk_phase_make(g, 0, &s.phase);
  const trv_dim most = g->n * s.phase.count[0] * s.phase.count[1] * s.phase.count[2];
  const trv_dim blocks = (most + TRVK_Q_ROWS - 1) / TRVK_Q_ROWS;
  trv_dim begin, end, last = -1;
  b.count = 0;
  trvk_split(phases * g->groups * blocks * strips, call->tiles, tile, &begin, &end);
  for (trv_dim u = begin; u < end; u++) {
    const trv_dim strip = u % strips, block = u / strips % blocks,
                  group = u / strips / blocks % g->groups;
    if (u / strips != last) {
      last = u / strips;
      trvk_phase_make(g, u / strips / blocks / g->groups, &s.phase);
      const trv_dim pixels = g->n * s.phase.count[0] * s.phase.count[1] * s.phase.count[2];
      const trv_dim each = (pixels + blocks - 1) / blocks, p0 = block * each;
      b.count = p0 >= pixels ? 0 : pixels - p0 < each ? pixels - p0 : each;
      b.filled = 0;
      b.k = s.phase.taps[0] * s.phase.taps[1] * s.phase.taps[2] * q->c4;
      if (b.count > 0) set_pixels(&s, group, p0, b.count);
      s.w = w + group * (q->w.packed     ? trvk_panels(g->og) * q->w.panel
                         : g->transposed ? g->cg * g->ws[1]
                                         : g->og * g->ws[0]);
    }
    if (b.count == 0) continue;
    const trv_dim col = strip * TRVK_Q_STRIP,
                  n = g->og - col < TRVK_Q_STRIP ? g->og - col : TRVK_Q_STRIP;
    trvk_qblock_run(&b, col, n);
    trvk_qout_strip(out, group * g->og + col, n);
    for (trv_dim p = 0; p < n; p += TRVK_PANEL)
      for (trv_dim m = 0; m < b.count; m++) {
        const trv_dim run = n - p < TRVK_PANEL ? n - p : TRVK_PANEL;
        const trv_dim at = s.px[m].out + (group * g->og + col + p) * g->ys[1];
        if (wide)
          trvk_qout_i64(out, p, 1, b.u.wide[p / TRVK_PANEL][m], run, at, g->ys[1]);
        else
          trvk_qout_i32(out, p, 1, b.acc[p / TRVK_PANEL][m], run, at, g->ys[1]);
      }
  }
}
