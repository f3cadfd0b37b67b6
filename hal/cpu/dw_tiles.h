/* dw_tiles.h - depthwise convolution along one row of outputs, channels innermost. Part of
 * gemm_tiles.h.
 *
 * Neighbouring outputs share inputs and weights: a tile of outputs times one vector of channels
 * keeps its sums in registers over the whole window. x rows point at the first output's window;
 * taps of a row are x_tap floats apart, outputs x_step. All taps of a row are inside the input (the
 * caller treats outputs at the border one by one, with fewer taps).
 */
#if TRVV_N == 16
#define TRVG_DW 8 /* outputs of a tile */
#else
#define TRVG_DW 4
#endif

/* kw taps, outputs `step` taps apart (0: as d says): each input is loaded once and goes to all
 * outputs that it meets. */
TRVV_INLINE void dw_body(const trvk_dw* d, trv_dim first, const int outs, trv_dim ch, const int kw,
                         const int step) {
  trvv sum[TRVG_DW];
  const trvv b = d->bias ? trvv_load(d->bias + ch) : trvv_set(0.0f);
  TRVV_UNROLL for (int i = 0; i < outs; i++) sum[i] = b;
  const float* w = d->w + ch;
  for (trv_dim y = 0; y < d->kh; y++, w += d->w_row) {
    if (d->x[y] == NULL) continue;
    const float* x = d->x[y] + first * d->x_step + ch;
    if (step > 0) {
      trvv tap[5];
      TRVV_UNROLL for (int k = 0; k < kw; k++) tap[k] = trvv_load(w + k * d->wc);
      TRVV_UNROLL for (int j = 0; j < (outs - 1) * step + kw; j++) {
        const trvv v = trvv_load(x + j * d->x_tap);
        TRVV_UNROLL for (int k = 0; k < kw;
                         k++) if (j >= k && (j - k) % step == 0 && (j - k) / step < outs)
            sum[(j - k) / step] = trvv_fma(tap[k], v, sum[(j - k) / step]);
      }
    } else {
      for (trv_dim k = 0; k < d->kw; k++) {
        const trvv v = trvv_load(w + k * d->wc);
        TRVV_UNROLL for (int i = 0; i < outs; i++) sum[i] =
            trvv_fma(v, trvv_load(x + k * d->x_tap + i * d->x_step), sum[i]);
      }
    }
  }
  const trvv lo = trvv_set(d->lo), hi = trvv_set(d->hi);
  TRVV_UNROLL for (int i = 0; i < outs; i++)
      trvv_store(d->y + (first + i) * d->y_step + ch, trvv_clamp(sum[i], lo, hi));
}

/* The channels that do not fill a vector. */
static void dw_rest(const trvk_dw* d, trv_dim ch) {
  for (trv_dim i = 0; i < d->count; i++)
    for (trv_dim c = ch; c < d->channels; c++) {
      float sum = d->bias ? d->bias[c] : 0.0f;
      for (trv_dim y = 0; y < d->kh; y++)
        if (d->x[y])
          for (trv_dim k = 0; k < d->kw; k++)
            sum += d->x[y][i * d->x_step + k * d->x_tap + c] * d->w[y * d->w_row + k * d->wc + c];
      d->y[i * d->y_step + c] = trvk_clamp(sum, d->lo, d->hi);
    }
}

#define TRVG_TILES(outs, kw, step) \
  for (trv_dim c = 0; c < whole; c += TRVV_N) dw_body(d, i, outs, c, kw, step)
static void dw_row(const trvk_dw* d) {
  const trv_dim whole = d->channels / TRVV_N * TRVV_N;
  const int step = d->x_step == d->x_tap ? 1 : d->x_step == 2 * d->x_tap ? 2 : 0;
  for (trv_dim i = 0; i < d->count;) {
    if (i + TRVG_DW <= d->count) {
      if (d->kw == 3 && step == 1)
        TRVG_TILES(TRVG_DW, 3, 1);
      else if (d->kw == 3 && step == 2)
        TRVG_TILES(TRVG_DW, 3, 2);
      else if (d->kw == 5 && step == 1)
        TRVG_TILES(TRVG_DW, 5, 1);
      else if (d->kw == 5 && step == 2)
        TRVG_TILES(TRVG_DW, 5, 2);
      else
        TRVG_TILES(TRVG_DW, 0, 0);
      i += TRVG_DW;
    } else if (i + 2 <= d->count) {
      if (d->kw == 3 && step == 1)
        TRVG_TILES(2, 3, 1);
      else
        TRVG_TILES(2, 0, 0);
      i += 2;
    } else {
      TRVG_TILES(1, 0, 0);
      i++;
    }
  }
  if (whole < d->channels) dw_rest(d, whole);
}
