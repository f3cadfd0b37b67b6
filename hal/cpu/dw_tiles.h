/* dw_tiles.h - depthwise convolution along one row of outputs, channels innermost. Part of gemm_<isa>.c.
 *
 * Neighbouring outputs share inputs and weights: a tile of outputs times one vector of channels keeps its sums in
 * registers over the whole window. x rows point at the first output's window; taps of a row are x_tap floats apart, outputs
 * x_step. All taps of a row are inside the input (the caller treats outputs at the border one by one, with fewer taps).
 */
#define TRVG_DW 4 /* outputs of a tile */

TRVV_INLINE void dw_body(const trvk_dw *d, trv_dim first, const int outs, trv_dim ch, const trv_dim kw) {
  trvv sum[TRVG_DW];
  const trvv b = d->bias ? trvv_load(d->bias + ch) : trvv_set(0.0f);
  TRVV_UNROLL for (int i = 0; i < outs; i++) sum[i] = b;
  const float *w = d->w + ch;
  for (trv_dim y = 0; y < d->kh; y++) {
    if (d->x[y]) {
      const float *x = d->x[y] + first * d->x_step + ch;
      for (trv_dim k = 0; k < kw; k++) {
        const trvv v = trvv_load(w + k * d->wc);
        TRVV_UNROLL for (int i = 0; i < outs; i++)
          sum[i] = trvv_fma(v, trvv_load(x + k * d->x_tap + i * d->x_step), sum[i]);
      }
    }
    w += d->w_row;
  }
  const trvv lo = trvv_set(d->lo), hi = trvv_set(d->hi);
  TRVV_UNROLL for (int i = 0; i < outs; i++)
    trvv_store(d->y + (first + i) * d->y_step + ch, trvv_clamp(sum[i], lo, hi));
}

/* The channels that do not fill a vector. */
static void dw_rest(const trvk_dw *d, trv_dim ch) {
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

static void dw_row(const trvk_dw *d) {
  const trv_dim whole = d->channels / TRVV_N * TRVV_N;
  for (trv_dim i = 0; i < d->count;) {
    if (i + TRVG_DW <= d->count) {
      if (d->kw == 3) for (trv_dim c = 0; c < whole; c += TRVV_N) dw_body(d, i, TRVG_DW, c, 3);
      else if (d->kw == 5) for (trv_dim c = 0; c < whole; c += TRVV_N) dw_body(d, i, TRVG_DW, c, 5);
      else for (trv_dim c = 0; c < whole; c += TRVV_N) dw_body(d, i, TRVG_DW, c, d->kw);
      i += TRVG_DW;
    } else {
      for (trv_dim c = 0; c < whole; c += TRVV_N) dw_body(d, i, 1, c, d->kw);
      i++;
    }
  }
  if (whole < d->channels) dw_rest(d, whole);
}
