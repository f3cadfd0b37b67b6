/* dw_tiles.h - depthwise convolution along one row of outputs, channels innermost. Part of
 * gemm_tiles.h.
 *
 * Neighbouring outputs share inputs and weights: a tile of outputs times one vector of channels
 * keeps its sums in registers over the whole window. Tiles at the border skip columns beyond it.
 */
#if TRVV_N == 16 || defined(__aarch64__)
#define TRVG_DW 8 /* outputs of a tile */
#else
#define TRVG_DW 4
#endif

/* kw taps, outputs `step` taps apart (0: as d says): each input is loaded once and goes to all
 * outputs that it meets. edge: some columns may lie outside. */
TRVV_INLINE void dw_body(const trvk_dw* d, trv_dim first, const int outs, trv_dim ch, const int kw,
                         const int step, const int edge) {
  trvv sum[TRVG_DW];
  const trvv b = d->bias ? trvv_load(d->bias + ch) : trvv_set(0.0f);
  TRVV_UNROLL for (int i = 0; i < outs; i++) sum[i] = b;
  const float* w = d->w + ch;
  const float* const* rows = d->x;
  const trv_dim at = d->at + first * d->stride, kh = d->kh, wc = d->wc, w_row = d->w_row,
                in = d->in;
  const trv_dim dilation = d->dilation, x_column = d->x_column, tap_step = dilation * x_column;
  const trv_dim from = at * x_column + ch;
  for (trv_dim y = 0; y < kh; y++, w += w_row) {
    if (rows[y] == NULL) continue;
    const float* x = rows[y];
    if (step > 0) {
      const int columns = (outs - 1) * step + kw;
      trvv tap[5], ahead = trvv_set(0.0f); /* loads come early, for machines that run in order */
      if (!edge) ahead = trvv_load(x + from);
      TRVV_UNROLL for (int k = 0; k < kw; k++) tap[k] = trvv_load(w + k * wc);
      trv_dim column = at, x_at = from;
      TRVV_UNROLL for (int j = 0; j < columns; j++) {
        const int out = edge && (column < 0 || column >= in);
        const trvv v = edge && !out ? trvv_load(x + x_at) : ahead;
        column += dilation;
        x_at += tap_step;
        if (out) continue;
        if (!edge && j + 1 < columns) ahead = trvv_load(x + x_at);
        TRVV_UNROLL for (int k = 0; k < kw;
                         k++) if (j >= k && (j - k) % step == 0 && (j - k) / step < outs)
            sum[(j - k) / step] = trvv_fma(tap[k], v, sum[(j - k) / step]);
      }
    } else {
      for (trv_dim k = 0; k < d->kw; k++) {
        const trvv v = trvv_load(w + k * wc);
        TRVV_UNROLL for (int i = 0; i < outs; i++) {
          const trv_dim column = at + k * dilation + i * d->stride;
          if (edge && (column < 0 || column >= in)) continue;
          sum[i] = trvv_fma(v, trvv_load(x + ch + column * x_column), sum[i]);
        }
      }
    }
  }
  const trvv lo = trvv_set(d->lo), hi = trvv_set(d->hi);
  TRVV_UNROLL for (int i = 0; i < outs; i++)
      trvv_store(d->y + (first + i) * d->y_step + ch, trvv_clamp(sum[i], lo, hi));
}

/* Fewer channels than a vector has. */
static void dw_rest(const trvk_dw* d) {
  for (trv_dim i = 0; i < d->count; i++)
    for (trv_dim c = 0; c < d->channels; c++) {
      float sum = d->bias ? d->bias[c] : 0.0f;
      for (trv_dim y = 0; y < d->kh; y++)
        for (trv_dim k = 0; k < (d->x[y] ? d->kw : 0); k++) {
          const trv_dim column = d->at + i * d->stride + k * d->dilation;
          if (column >= 0 && column < d->in)
            sum += d->x[y][column * d->x_column + c] * d->w[y * d->w_row + k * d->wc + c];
        }
      d->y[i * d->y_step + c] = trvk_clamp(sum, d->lo, d->hi);
    }
}

/* A tile of outputs, all channels; the last vector overlaps the one before it. */
#define TRVG_DW_TILE(outs, kw, step, edge)                                                    \
  static void dw_tile_##outs##_##kw##_##step##_##edge(const trvk_dw* d, trv_dim first) {      \
    for (trv_dim c = 0; c < d->channels; c += TRVV_N)                                         \
      dw_body(d, first, outs, c + TRVV_N <= d->channels ? c : d->channels - TRVV_N, kw, step, \
              edge);                                                                          \
  }
#define TRVG_DW_TILES(outs)   \
  TRVG_DW_TILE(outs, 3, 1, 0) \
  TRVG_DW_TILE(outs, 3, 1, 1) \
  TRVG_DW_TILE(outs, 3, 2, 0) \
  TRVG_DW_TILE(outs, 3, 2, 1) \
  TRVG_DW_TILE(outs, 5, 1, 0) \
  TRVG_DW_TILE(outs, 5, 1, 1) \
  TRVG_DW_TILE(outs, 5, 2, 0) \
  TRVG_DW_TILE(outs, 5, 2, 1) \
  TRVG_DW_TILE(outs, 0, 0, 0) \
  TRVG_DW_TILE(outs, 0, 0, 1)
typedef void (*dw_tile_fn)(const trvk_dw*, trv_dim);
/* [2 * kind + edge], kind: 3 taps, outputs 1 and 2 apart; 5 taps; any. */
#define TRVG_DW_TABLE(outs)                                                                        \
  {dw_tile_##outs##_3_1_0, dw_tile_##outs##_3_1_1, dw_tile_##outs##_3_2_0, dw_tile_##outs##_3_2_1, \
   dw_tile_##outs##_5_1_0, dw_tile_##outs##_5_1_1, dw_tile_##outs##_5_2_0, dw_tile_##outs##_5_2_1, \
   dw_tile_##outs##_0_0_0, dw_tile_##outs##_0_0_1}
TRVG_DW_TILES(4)
TRVG_DW_TILES(1)
#if TRVG_DW == 8
TRVG_DW_TILES(8)
TRVG_DW_TILES(7)
static const int dw_sizes[4] = {8, 7, 4, 1};
static const dw_tile_fn dw_tiles[4][10] = {TRVG_DW_TABLE(8), TRVG_DW_TABLE(7), TRVG_DW_TABLE(4),
                                           TRVG_DW_TABLE(1)};
#else
static const int dw_sizes[2] = {4, 1};
static const dw_tile_fn dw_tiles[2][10] = {TRVG_DW_TABLE(4), TRVG_DW_TABLE(1)};
#endif

static void dw_row(const trvk_dw* d) {
  if (d->channels < TRVV_N) {
    dw_rest(d);
    return;
  }
  const trv_dim step = d->stride == d->dilation ? 1 : d->stride == 2 * d->dilation ? 2 : 0;
  const int kind = step && (d->kw == 3 || d->kw == 5) ? (int)(d->kw - 3 + step - 1) : 4;
  for (trv_dim i = 0; i < d->count;) {
    const trv_dim left = d->count - i;
    int size = 0;
#if TRVG_DW == 8
    if (left % 8 && left % 7 == 0) size = 1;
#endif
    while (dw_sizes[size] > left) size++;
    trv_dim outs = dw_sizes[size], from = i;
    if (left < TRVG_DW && outs < left && d->count >= TRVG_DW) { /* the last: some once more */
      size = 0;
      outs = TRVG_DW;
      from = d->count - outs;
    }
    const trv_dim c0 = d->at + from * d->stride,
                  c1 = c0 + (outs - 1) * d->stride + (d->kw - 1) * d->dilation;
    dw_tiles[size][2 * kind + (c0 < 0 || c1 >= d->in)](d, from);
    i = from + outs;
  }
}
