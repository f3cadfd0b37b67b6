/* line_tiles.h - neighbouring pixels of one row of outputs, for conv_line.c. Part of gemm_tiles.h.
 *
 * Pixels lie a constant step apart in their input rows, so that one address serves all of them and
 * nothing is looked up per pixel.
 */
#if TRVG_MR >= 12
#define TRVG_LINE 14 /* with two panels 28 sums, two vectors of weights, an input */
#elif TRVG_MR >= 6
#define TRVG_LINE 6
#else
#define TRVG_LINE 2
#endif

TRVV_INLINE void line_body(const trvk_line* t, const int step, const int np) {
  const int nv = np * TRVG_VP;
  trvv sum[TRVG_LINE][TRVG_NP * TRVG_VP];
  TRVV_UNROLL for (int j = 0; j < nv; j++) {
    const trvv b = t->bias ? trvv_load(t->bias + j * TRVV_N) : trvv_set(0.0f);
    TRVV_UNROLL for (int m = 0; m < TRVG_LINE; m++) sum[m][j] = b;
  }
  for (trv_dim p = 0; p < t->pieces; p++) {
    const float *x = t->x + p * t->x_piece, *b = t->b[p] + t->b_off;
    for (trv_dim k = 0; k < t->kc; k++, b += t->bk) {
      trvv w[TRVG_NP * TRVG_VP];
      TRVV_UNROLL for (int j = 0; j < nv; j++) w[j] =
          trvv_load(b + j / TRVG_VP * t->bp + j % TRVG_VP * TRVV_N);
      TRVV_UNROLL for (int m = 0; m < TRVG_LINE; m++) {
        const trvv v = trvv_set(x[k + m * step]);
        TRVV_UNROLL for (int j = 0; j < nv; j++) sum[m][j] = trvv_fma(v, w[j], sum[m][j]);
      }
    }
  }
  const trvv lo = trvv_set(t->lo), hi = trvv_set(t->hi);
  TRVV_UNROLL for (int m = 0; m < TRVG_LINE; m++) TRVV_UNROLL for (int j = 0; j < nv; j++)
      trvv_store(t->y + m * t->y_step + j * TRVV_N, trvv_clamp(sum[m][j], lo, hi));
}

#define LINE_STEPS(np)     \
  switch (t->step) {       \
    case 1:                \
      line_body(t, 1, np); \
      break;               \
    case 2:                \
      line_body(t, 2, np); \
      break;               \
    case 3:                \
      line_body(t, 3, np); \
      break;               \
    default:               \
      line_body(t, 6, np); \
      break;               \
  }
static void line_1(const trvk_line* t) { LINE_STEPS(1) }
#if TRVG_NP > 1
static void line_2(const trvk_line* t){LINE_STEPS(2)}
#else
#define line_2 NULL
#endif
