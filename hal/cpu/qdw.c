/* qdw.c - depthwise convolution of i8 where channels lie together: geometry, weights and rows for
 * the vectors of qdw.h. Other layouts, multipliers and transposed ones take the plain path. */
#include "qdw.h"

enum { SUBS = TRVK_Q_STRIP / TRVK_QDW_LANES, SUMS = 32 }; /* SUMS: outputs whose sums are kept */

/* The channels of a strip, ready for vectors. */
typedef struct strip {
  _Alignas(
      64) uint8_t w[SUBS][TRVK_QDW_W]; /* vectors that cross lines of a cache take twice as long */
  int32_t bias[TRVK_Q_STRIP], m[TRVK_Q_STRIP + 1], half[TRVK_Q_STRIP], down[TRVK_Q_STRIP];
  int quick; /* results by the vectors' rescaling */
} strip;

typedef struct plan {
  const trvk_qconv* q;
  const trvk_qdw* dw;
  trv_dim slots, span, tile; /* span: columns of a window; tile: outputs of a run */
  int rows, quads;
} plan;

/* Does it fit? */
static int make(plan* p) {
  const trvk_conv_geo* g = &p->q->g;
  if (g->transposed || g->og != 1 || g->xs[1] != 1 || g->ys[1] != 1) return 0;
  if (g->kernel[0] > TRVK_QDW_SLOTS || g->kernel[1] > TRVK_QDW_SLOTS || g->kernel[2] > 64) return 0;
  for (p->rows = g->stride[1] == 1 && g->dilation[1] == 1 && g->out[1] > 1 ? 2 : 1; p->rows > 0;
       p->rows--) {
    p->slots = g->kernel[0] * (g->kernel[1] + p->rows - 1);
    p->quads = (int)((p->slots + 3) / 4);
    if (p->slots <= TRVK_QDW_SLOTS &&
        p->quads * p->rows * g->kernel[2] * p->dw->bytes <= TRVK_QDW_W)
      break;
  }
  const trv_dim most = p->rows ? TRVK_QDW_V / (p->quads * p->dw->bytes) : 0;
  if (p->rows == 0 || g->dilation[2] > most || g->stride[2] > most) return 0;
  p->span = (g->kernel[2] - 1) * g->dilation[2] + 1;
  if (p->span > most) return 0;
  p->tile = (most - p->span) / g->stride[2] + 1;
  return 1;
}

/* Weights of up to 16 channels from c on, and what their sums take off the bias. */
static void weights(const plan* p, int32_t x_zero, trv_dim c, trv_dim n, int32_t* less,
                    uint8_t* to) {
  const trvk_conv_geo* g = &p->q->g;
  const int8_t* w = (const int8_t*)p->q->in[1].data + c * g->ws[0];
  const trv_dim kh = g->kernel[1], per = kh + p->rows - 1;
  for (trv_dim slot = 0; slot < 4 * p->quads; slot += 4)
    for (trv_dim k = 0; k < g->kernel[2]; k++)
      for (trv_dim r = 0; r < p->rows; r++, to += p->dw->bytes) {
        int8_t taps[4][TRVK_QDW_LANES];
        memset(taps, 0, sizeof taps);
        for (trv_dim i = 0; i < 4 && slot + i < p->slots; i++) {
          const trv_dim d = (slot + i) / per, h = (slot + i) % per - r;
          if (h < 0 || h >= kh) continue;
          const int8_t* from = w + d * g->ws[2] + h * g->ws[3] + k * g->ws[4];
          if (g->ws[0] == 1 && n == TRVK_QDW_LANES)
            memcpy(taps[i], from, TRVK_QDW_LANES);
          else
            for (trv_dim j = 0; j < n; j++) taps[i][j] = from[j * g->ws[0]];
          if (r == 0)
            for (int j = 0; j < TRVK_QDW_LANES; j++) less[j] += taps[i][j];
        }
        p->dw->weights((const int8_t (*)[TRVK_QDW_LANES])taps, to);
      }
  for (int j = 0; j < TRVK_QDW_LANES; j++)
    less[j] = (int32_t)((uint32_t)less[j] * (uint32_t)(p->dw->offset + x_zero));
}

static void make_strip(const plan* p, const trvk_qout* out, int32_t x_zero, trv_dim c, trv_dim n,
                       strip* s) {
  memset(s->m, 0, sizeof s->m);
  memset(s->half, 0, sizeof s->half);
  memset(s->down, 0, sizeof s->down);
  memset(s->bias, 0, sizeof s->bias);
  s->quick = out->dtype == TRV_DTYPE_I8;
  for (trv_dim i = 0; i < n && s->quick; i++) {
    const int32_t shift = out->shift[i];
    if (shift < 33 || shift > TRVK_SHIFT_MAX || out->k.i[i] < 0) {
      s->quick = 0;
      break;
    }
    s->m[i] = out->k.i[i];
    s->half[i] = (int32_t)1 << (shift - 33);
    s->down[i] = shift - 32;
  }
  for (trv_dim i = 0; i < n; i += TRVK_QDW_LANES) {
    int32_t less[TRVK_QDW_LANES] = {0};
    const trv_dim here = n - i < TRVK_QDW_LANES ? n - i : TRVK_QDW_LANES;
    weights(p, x_zero, c + i, here, less, s->w[i / TRVK_QDW_LANES]);
    for (trv_dim j = 0; j < here; j++)
      s->bias[i + j] = (int32_t)((s->quick ? (uint32_t)out->b.i[i + j] : 0) - (uint32_t)less[j]);
  }
}

/* Input rows of outputs d, h (and h + 1): offsets in an image, and whether they are inside. */
static void set_rows(const plan* p, trv_dim d, trv_dim h, trv_dim* rows) {
  const trvk_conv_geo* g = &p->q->g;
  const trv_dim per = g->kernel[1] + p->rows - 1;
  trv_dim kd = 0, kh = 0;
  for (trv_dim i = 0; i < 4 * p->quads; i++) {
    const trv_dim at_d = d * g->stride[0] - g->pad[0] + kd * g->dilation[0],
                  at_h = h * g->stride[1] - g->pad[1] + kh * g->dilation[1];
    const int inside = i < p->slots && at_d >= 0 && at_d < g->in[0] && at_h >= 0 && at_h < g->in[1];
    rows[2 * i] = inside ? at_d * g->xs[2] + at_h * g->xs[3] : 0;
    rows[2 * i + 1] = inside;
    if (++kh == per) kh = 0, kd++;
  }
}

/* Sums to results where the vectors' rescaling does not do. */
static void finish(const trvk_qout* out, const trvk_qdw_job* job, trv_dim c, trv_dim at,
                   trv_dim row_step) {
  for (trv_dim r = 0; r < job->out_rows; r++)
    for (trv_dim i = 0; i < job->count; i++)
      trvk_qout_i32(out, c, 1, job->sums + (r * job->count + i) * TRVK_QDW_LANES, job->channels,
                    at + r * row_step + i * job->y_step, 1);
}

void trvk_qdw_run(const trvk_qconv* q, trvk_qout* out, int32_t x_zero, uint32_t tile,
                  const trvk_qdw* dw) {
  const trvk_conv_geo* g = &q->g;
  plan p = {.q = q, .dw = dw};
  if (!make(&p)) {
    trvk_qconv_depthwise_i8(q, out, x_zero, tile);
    return;
  }
  int8_t outside[TRVK_QDW_LANES];
  _Alignas(64) uint8_t v[TRVK_QDW_V];
  int32_t sums[2 * SUMS * TRVK_QDW_LANES];
  strip s;
  memset(outside, x_zero, sizeof outside);
  trvk_qdw_job job = {.stride = g->stride[2],
                      .dilation = g->dilation[2],
                      .y_step = g->ys[4],
                      .quads = p.quads,
                      .kernel = (int)g->kernel[2],
                      .rows = p.rows,
                      .x_zero = x_zero,
                      .y_zero = out->zero,
                      .y_lo = out->lo,
                      .y_hi = out->hi,
                      .v = v};
  const trv_dim groups = (g->out[1] + p.rows - 1) / p.rows,
                strips = (g->cout + TRVK_Q_STRIP - 1) / TRVK_Q_STRIP;
  trv_dim begin, end, last = -1;
  trvk_split(strips * g->n * g->out[0] * groups, q->call.tiles, tile, &begin, &end);
  for (trv_dim u = begin; u < end; u++) {
    const trv_dim h = u % groups * p.rows, d = u / groups % g->out[0],
                  n = u / groups / g->out[0] % g->n,
                  c = u / groups / g->out[0] / g->n * TRVK_Q_STRIP;
    const trv_dim width = g->cout - c < TRVK_Q_STRIP ? g->cout - c : TRVK_Q_STRIP;
    if (c != last) {
      last = c;
      trvk_qout_strip(out, c, width);
      make_strip(&p, out, x_zero, c, width, &s);
    }
    job.sums = s.quick ? NULL : sums;
    job.out_rows = g->out[1] - h < p.rows ? g->out[1] - h : p.rows;
    const trv_dim run = s.quick || p.tile < SUMS ? p.tile : SUMS;
    trv_dim rows[2 * TRVK_QDW_SLOTS];
    set_rows(&p, d, h, rows);
    for (trv_dim i = 0; i < width; i += TRVK_QDW_LANES) {
      job.channels = width - i < TRVK_QDW_LANES ? width - i : TRVK_QDW_LANES;
      job.w = s.w[i / TRVK_QDW_LANES];
      job.bias = s.bias + i;
      job.m = s.m + i;
      job.half = s.half + i;
      job.down = s.down + i;
      const int8_t* x = (const int8_t*)q->in[0].data + n * g->xs[0] + c + i;
      for (trv_dim o = 0; o < g->out[2]; o += run) {
        const trv_dim w = o * g->stride[2] - g->pad[2]; /* the first column */
        const trv_dim at = n * g->ys[0] + c + i + d * g->ys[2] + h * g->ys[3] + o * g->ys[4];
        job.count = g->out[2] - o < run ? g->out[2] - o : run;
        job.cols = (job.count - 1) * g->stride[2] + p.span;
        job.lo = w < 0 ? (-w < job.cols ? -w : job.cols) : 0;
        job.hi = w + job.cols > g->in[2] ? g->in[2] - w : job.cols;
        if (job.hi < job.lo) job.hi = job.lo;
        for (int r = 0; r < 4 * p.quads; r++) {
          const int inside = rows[2 * r + 1] && job.lo < job.hi;
          job.row[r] = inside ? x + rows[2 * r] + (w + job.lo) * g->xs[4] : outside;
          job.step[r] = inside ? g->xs[4] : 0;
        }
        job.y[0] = (int8_t*)out->y + at;
        job.y[1] = job.out_rows > 1 ? job.y[0] + g->ys[3] : job.y[0];
        dw->run(&job);
        if (!s.quick) finish(out, &job, i, at, g->ys[3]);
      }
    }
  }
}
