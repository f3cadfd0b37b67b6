/* conv_winograd.c - 3x3 convolution with stride 1 by minimal filtering: S. Winograd, "Arithmetic
 * Complexity of Computations" (1980), in the form of A. Lavin and S. Gray, "Fast Algorithms for
 * Convolutional Neural Networks" (2015). m x m outputs of a channel cost (m + 2)^2 products instead
 * of 9 m^2: m = 2 2.25 times fewer, m = 4 four times.
 *
 * A block of TRVK_WINO_ROWS tiles at a time: their inputs are transformed, which gives (m + 2)^2
 * matrices [tiles, channels]; each is multiplied with its part of the weight, a strip of 32 output
 * channels at a time; the sums are transformed back and leave with bias, residual and activation.
 * The weight is transformed when it is packed (trvk_wino_pack). wino_tiles.h tells the points.
 */
#include "conv.h"

#define ROWS TRVK_WINO_ROWS
#define PAD 16 /* floats between matrices, so that they do not share sets of the cache */

static trv_dim points_of(int m) { return (trv_dim)(m + 2) * (m + 2); }

/* Floats of one matrix of inputs; of sums. */
static trv_dim in_floats(trv_dim cg) { return ROWS * trvk_round16(cg) + PAD; }
static trv_dim sum_floats(void) { return ROWS * TRVK_STRIP + PAD; }

static trv_dim slot_floats(int m, trv_dim cg) {
  return points_of(m) * (in_floats(cg) + sum_floats());
}

size_t trvk_wino_packed_floats(int m, trv_dim cg, trv_dim og) {
  const trv_dim most = PTRDIFF_MAX / 64;
  if (cg < 1 || og < 1 || cg > most / 64 || og > most - TRVK_STRIP) return 0;
  const trv_dim n = trvk_round16(og);
  return n > most / (points_of(m) * cg) ? 0 : (size_t)(n * points_of(m) * cg);
}

size_t trvk_conv_tmp_bytes(const void* attrs, int64_t cin, int64_t tiles) {
  const trvf_conv_attrs* a = attrs;
  const int64_t slots =
      tiles > (TRVK_WINO_SLOTS - 1) * ROWS ? TRVK_WINO_SLOTS : (tiles + ROWS - 1) / ROWS;
  if (!TRVK_WINO || (a->packed != TRVK_PACKED_WINO2 && a->packed != TRVK_PACKED_WINO4) || cin < 1 ||
      cin > INT32_MAX / 64 || tiles < 1)
    return 0;
  return 64 + (size_t)slots * sizeof(float) * (size_t)slot_floats(a->packed, (trv_dim)cin);
}

/* ---- packing
 * -------------------------------------------------------------------------------------------------------
 */
/* u = G g: the kernel's values along one axis at the points, scaled. */
static void kernel_points(const double* g, double* u, int m) {
  if (m == 2) {
    u[0] = g[0];
    u[1] = 0.5 * (g[0] + g[1] + g[2]);
    u[2] = 0.5 * (g[0] - g[1] + g[2]);
    u[3] = g[2];
    return;
  }
  const double a = (double)TRVK_WINO_A, b = (double)TRVK_WINO_B;
  const double na = 2.0 * a * a * (a * a - b * b), nb = 2.0 * b * b * (b * b - a * a);
  u[0] = g[0] / (a * a * b * b);
  u[1] = (g[0] + a * g[1] + a * a * g[2]) / na;
  u[2] = (g[0] - a * g[1] + a * a * g[2]) / na;
  u[3] = (g[0] + b * g[1] + b * b * g[2]) / nb;
  u[4] = (g[0] - b * g[1] + b * b * g[2]) / nb;
  u[5] = g[2];
}

void trvk_wino_pack(int m, trv_dim cg, trv_dim og, const int64_t* step, const float* src,
                    float* dst) {
  const int n = m + 2;
  for (trv_dim o = 0; o < og; o++) {
    const trv_dim first = o / TRVK_STRIP * TRVK_STRIP;
    const trv_dim width = og - first > TRVK_PANEL ? TRVK_STRIP : TRVK_PANEL;
    float* const strip = dst + first * points_of(m) * cg;
    for (trv_dim c = 0; c < cg; c++) {
      const float* g = src + o * (trv_dim)step[0] + c * (trv_dim)step[1];
      double half[6][3], u[6];
      for (int j = 0; j < 3; j++) { /* along the kernel's columns */
        double column[3];
        for (int i = 0; i < 3; i++)
          column[i] = (double)g[i * (trv_dim)step[2] + j * (trv_dim)step[3]];
        kernel_points(column, u, m);
        for (int i = 0; i < n; i++) half[i][j] = u[i];
      }
      for (int i = 0; i < n; i++) {
        kernel_points(half[i], u, m);
        for (int j = 0; j < n; j++) strip[((i * n + j) * cg + c) * width + o - first] = (float)u[j];
      }
    }
  }
}

/* ---- running
 * -------------------------------------------------------------------------------------------------------
 */
const char* trvk_wino_check(const trvk_call* call, const trvk_conv_geo* g, int64_t* expected,
                            int64_t* got) {
  const trvf_conv_attrs* a = call->attrs;
  const trv_tensor* w = &call->in[1];
  if (!TRVK_WINO) return TRVK_SAY("conv: a weight transformed for larger machines");
  for (int i = 0; i < 3; i++)
    if (g->kernel[i] != (i ? 3 : 1) || g->stride[i] != 1 || g->dilation[i] != 1 ||
        (i == 0 && g->pad[i] != 0))
      return trvk_fail(TRVK_SAY("conv: a transformed weight is of a 3x3 kernel with stride 1"), 3,
                       g->kernel[i], expected, got);
  if (a->nd != 2 || g->transposed || g->groups != 1 || call->in[0].dtype != TRV_DTYPE_F32)
    return TRVK_SAY("conv: a transformed weight is of a plain convolution of float32");
  const size_t need = trvk_wino_packed_floats(a->packed, g->cg, g->og);
  if (need == 0 || !trvk_packed_ok(w, need * sizeof(float)))
    return trvk_fail(TRVK_SAY("conv: the packed weight is too small"), (int64_t)need,
                     w->rank ? w->dim[0] : 1, expected, got);
  const size_t tmp = trvk_conv_tmp_bytes(a, g->cg, 1);
  if (tmp == 0 || call->n_tmp < 1 || call->tmp[0].dtype != TRV_DTYPE_U8 ||
      (size_t)trvk_count(&call->tmp[0]) < tmp || !trvk_dense(&call->tmp[0]))
    return trvk_fail(TRVK_SAY("conv: the scratch is too small"), (int64_t)tmp,
                     call->n_tmp ? (int64_t)trvk_count(&call->tmp[0]) : 0, expected, got);
  return NULL;
}

uint32_t trvk_wino_slots(const trvk_call* call, const trvk_conv_geo* g) {
  const trvf_conv_attrs* a = call->attrs;
  const trv_dim room = (trvk_count(&call->tmp[0]) - 64) / (trv_dim)sizeof(float),
                slots = room / slot_floats(a->packed, g->cg);
  return slots > TRVK_WINO_SLOTS ? TRVK_WINO_SLOTS : (uint32_t)slots;
}

#if TRVK_WINO
typedef struct state {
  const trvk_conv_geo* g;
  const trvk_gemm* gemm;
  const trvk_epi* epi;
  int m;
  trv_dim down, across; /* tiles of an image along h and w */
  trv_dim first, count; /* the block's tiles */
  const float* x;
  float *in, *sum; /* the slot's matrices */
} state;

/* Number of the tile's image, and its first output. */
static void tile_at(const state* s, trv_dim index, trv_dim* n, trv_dim* h, trv_dim* w) {
  *w = index % s->across * s->m;
  *h = index / s->across % s->down * s->m;
  *n = index / s->across / s->down;
}

static int clip(trv_dim v, int most) { return v < 0 ? 0 : v > most ? most : (int)v; }

/* Transforms the inputs of the block's tiles. */
static void transform_in(const state* s) {
  const trvk_conv_geo* g = s->g;
  const int size = s->m + 2;
  const trv_dim vectors = g->xs[1] == 1 || g->cg == 1 ? g->cg / TRVK_PANEL * TRVK_PANEL : 0;
  trvk_wino_in t;
  t.m = s->m;
  t.v_step = in_floats(g->cg);
  for (trv_dim k = 0; k < s->count; k++) {
    trv_dim n, h, w;
    tile_at(s, s->first + k, &n, &h, &w);
    h -= g->pad[1];
    w -= g->pad[2];
    const int i0 = clip(-h, size), i1 = clip(g->in[1] - h, size), j0 = clip(-w, size),
              j1 = clip(g->in[2] - w, size);
    const trv_dim at = n * g->xs[0] + w * g->xs[4];
    t.i0 = i0, t.i1 = i1, t.j0 = j0, t.j1 = j1;
    t.x = s->x;
    t.col = g->xs[4];
    for (int i = 0; i < size; i++) t.row[i] = at + (h + i) * g->xs[3];
    t.v = s->in + k * TRVK_PANEL;
    t.channels = vectors;
    if (vectors > 0) s->gemm->wino_in(&t);
    for (trv_dim c = vectors; c < g->cg; c += TRVK_PANEL) { /* by way of a copy */
      float copy[36 * TRVK_PANEL];
      const trv_dim live = g->cg - c < TRVK_PANEL ? g->cg - c : TRVK_PANEL;
      memset(copy, 0, sizeof copy);
      for (int i = i0; i < i1; i++)
        for (int j = j0; j < j1; j++) {
          const float* from = s->x + at + (h + i) * g->xs[3] + j * g->xs[4] + c * g->xs[1];
          for (trv_dim l = 0; l < live; l++)
            copy[(i * size + j) * TRVK_PANEL + l] = from[l * g->xs[1]];
        }
      t.i0 = t.j0 = 0;
      t.i1 = t.j1 = size;
      t.x = copy;
      t.col = TRVK_PANEL;
      for (int i = 0; i < size; i++) t.row[i] = i * size * TRVK_PANEL;
      t.v = s->in + k * TRVK_PANEL + c * ROWS;
      t.channels = TRVK_PANEL;
      s->gemm->wino_in(&t);
    }
  }
}

/* The strip's outputs of the block's tiles: columns col .. col + n. */
static void transform_out(const state* s, trv_dim col, trv_dim n, const float* bias) {
  const trvk_conv_geo* g = s->g;
  const trvk_epi* e = s->epi;
  const int m = s->m, heavy = trvk_epi_heavy(e), whole = n % TRVK_PANEL == 0;
  const int rowwise = e->post || (!whole && e->res), direct = !rowwise && !heavy && whole;
  const float* const res = rowwise ? NULL : (const float*)(const void*)e->res;
  float* const y = (float*)(void*)e->out;
  float copy[16 * TRVK_STRIP];
  if (!direct) memset(copy, 0, sizeof copy); /* an activation reads what tiles at the edge lack */
  trvk_wino_out t;
  t.m = m;
  t.s_step = sum_floats();
  t.channels = trvk_round16(n);
  t.bias = bias;
  t.res = NULL;
  t.lo = rowwise ? -INFINITY : trvk_epi_lo(e);
  t.hi = rowwise ? INFINITY : trvk_epi_hi(e);
  t.res_row = g->rs[3];
  t.res_col = g->rs[4];
  for (trv_dim k = 0; k < s->count; k++) {
    trv_dim image, h, w;
    tile_at(s, s->first + k, &image, &h, &w);
    const trv_dim out = image * g->ys[0] + h * g->ys[3] + w * g->ys[4];
    t.rows = clip(g->out[1] - h, m);
    t.cols = clip(g->out[2] - w, m);
    t.s = s->sum + k * TRVK_STRIP;
    t.y = direct ? y + out + col : copy;
    t.y_row = direct ? g->ys[3] : m * TRVK_STRIP;
    t.y_col = direct ? g->ys[4] : TRVK_STRIP;
    if (res) t.res = res + image * g->rs[0] + h * g->rs[3] + w * g->rs[4] + col;
    s->gemm->wino_out(&t);
    if (direct) continue;
    if (heavy && !rowwise) e->g->act(copy, (trv_dim)m * m * TRVK_STRIP, e->act, e->lo, e->hi);
    for (int i = 0; i < t.rows; i++)
      for (int j = 0; j < t.cols; j++) {
        const trvk_row r = {out + i * g->ys[3] + j * g->ys[4],
                            image * g->rs[0] + (h + i) * g->rs[3] + (w + j) * g->rs[4], 0};
        float* const sum = copy + (i * m + j) * TRVK_STRIP;
        if (rowwise)
          trvk_epi_row(e, &r, col, sum, n);
        else
          trvk_floats_copy(y + r.out + col, sum, n);
      }
  }
}

void trvk_conv_winograd_run(const trvk_call* call, const trvk_conv_geo* g, uint32_t tile,
                            const trvk_gemm* gemm) {
  const trvf_conv_attrs* a = call->attrs;
  const trv_tensor* bias = trvk_opt(call, 2);
  const float* weight = (const float*)(const void*)call->in[1].data;
  const trv_dim strips = (g->og + TRVK_STRIP - 1) / TRVK_STRIP;
  trvk_epi epi;
  state s;
  trvk_conv_epi(call, g, &epi, gemm);
  s.g = g;
  s.gemm = gemm;
  s.epi = &epi;
  s.m = a->packed;
  s.first = s.count = 0;
  s.x = (const float*)(const void*)call->in[0].data;
  s.down = (g->out[1] + s.m - 1) / s.m;
  s.across = (g->out[2] + s.m - 1) / s.m;
  float* const room = (float*)(((uintptr_t)call->tmp[0].data + 63) & ~(uintptr_t)63);
  s.in = room + (trv_dim)tile * slot_floats(s.m, g->cg);
  s.sum = s.in + points_of(s.m) * in_floats(g->cg);
  trvk_wino_mul mul;
  mul.v = s.in;
  mul.s = s.sum;
  mul.v_step = in_floats(g->cg);
  mul.s_step = sum_floats();
  mul.points = points_of(s.m);
  mul.cg = g->cg;
  const trv_dim tiles = g->n * s.down * s.across;
  trv_dim blocks = (tiles + ROWS - 1) / ROWS;
  /* Enough blocks for the threads, if these are not too small; beyond that strips are shared. */
  if (blocks < (trv_dim)call->tiles && tiles >= (trv_dim)call->tiles * TRVK_MR_MAX)
    blocks = (trv_dim)call->tiles;
  const trv_dim each = (tiles + blocks - 1) / blocks;
  trv_dim begin, end, last = -1;
  trvk_split(blocks * strips, call->tiles, tile, &begin, &end);
  for (trv_dim u = begin; u < end; u++) {
    const trv_dim col = u % strips * TRVK_STRIP, block = u / strips;
    if (block != last) {
      last = block;
      s.first = block * each;
      s.count = tiles - s.first < each ? tiles - s.first : each;
      if (s.count > 0) transform_in(&s);
    }
    if (s.count <= 0) continue;
    const trv_dim n = g->og - col < TRVK_STRIP ? g->og - col : TRVK_STRIP;
    float buffer[TRVK_STRIP] = {0};
    const float* b = NULL;
    if (bias) {
      trvk_row_load(buffer, trvk_at(bias->data, TRV_DTYPE_F32, col * g->bias_step), TRV_DTYPE_F32,
                    g->bias_step, n);
      b = buffer;
    }
    mul.w = weight + col * mul.points * g->cg;
    mul.panels = trvk_panels(n);
    mul.count = s.count;
    gemm->wino_mul(&mul);
    transform_out(&s, col, n, b);
  }
}
#endif
