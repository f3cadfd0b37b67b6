/* wino_tiles.h - the transforms of conv_winograd.c, vectors of channels at a time. Part of
 * gemm_tiles.h.
 *
 * F(2x2, 3x3) at the points 0, 1, -1 and infinity, F(4x4, 3x3) at 0, +-5/8, +-8/5 and infinity.
 * Among points +-a, +-b these have about the smallest error (twice that of the direct sum; +-1, +-2
 * five times), and a * b = 1 saves products.
 */
#define WINO_A TRVK_WINO_A
#define WINO_B TRVK_WINO_B

/* r = B' d: m + 2 values at the points. */
TRVV_INLINE void wino_points(const trvv* d, trvv* r, const int m) {
  if (m == 2) {
    r[0] = trvv_sub(d[0], d[2]);
    r[1] = trvv_add(d[1], d[2]);
    r[2] = trvv_sub(d[2], d[1]);
    r[3] = trvv_sub(d[1], d[3]);
    return;
  }
  const trvv a = trvv_set(WINO_A), b = trvv_set(WINO_B),
             sum = trvv_set(-WINO_A * WINO_A - WINO_B * WINO_B);
  const trvv a2 = trvv_set(-WINO_A * WINO_A), b2 = trvv_set(-WINO_B * WINO_B);
  const trvv even_a = trvv_fma(b2, d[2], d[4]), even_b = trvv_fma(a2, d[2], d[4]);
  const trvv odd_a = trvv_mul(a, trvv_fma(b2, d[1], d[3]));
  const trvv odd_b = trvv_mul(b, trvv_fma(a2, d[1], d[3]));
  r[0] = trvv_fma(sum, d[2], trvv_add(d[0], d[4]));
  r[1] = trvv_add(even_a, odd_a);
  r[2] = trvv_sub(even_a, odd_a);
  r[3] = trvv_add(even_b, odd_b);
  r[4] = trvv_sub(even_b, odd_b);
  r[5] = trvv_fma(sum, d[3], trvv_add(d[1], d[5]));
}

/* y = A' s: m outputs. */
TRVV_INLINE void wino_outputs(const trvv* s, trvv* y, const int m) {
  if (m == 2) {
    y[0] = trvv_add(s[0], trvv_add(s[1], s[2]));
    y[1] = trvv_sub(s[1], trvv_add(s[2], s[3]));
    return;
  }
  const trvv pa = trvv_add(s[1], s[2]), ma = trvv_sub(s[1], s[2]);
  const trvv pb = trvv_add(s[3], s[4]), mb = trvv_sub(s[3], s[4]);
  const trvv a = trvv_set(WINO_A), b = trvv_set(WINO_B);
  const trvv a2 = trvv_set(WINO_A * WINO_A), b2 = trvv_set(WINO_B * WINO_B);
  const trvv a3 = trvv_set(WINO_A * WINO_A * WINO_A), b3 = trvv_set(WINO_B * WINO_B * WINO_B);
  y[0] = trvv_add(s[0], trvv_add(pa, pb));
  y[1] = trvv_fma(a, ma, trvv_mul(b, mb));
  y[2] = trvv_fma(a2, pa, trvv_mul(b2, pb));
  y[3] = trvv_fma(a3, ma, trvv_fma(b3, mb, s[5]));
}

TRVV_INLINE void wino_in_body(const trvk_wino_in* t, const int m, const int whole) {
  const int n = m + 2;
  for (trv_dim c = 0; c < t->channels; c += TRVV_N) {
    trvv d[6][6], column[6], r[6];
    TRVV_UNROLL for (int j = 0; j < n; j++) {
      const int live = whole || (j >= t->j0 && j < t->j1);
      TRVV_UNROLL for (int i = 0; i < n; i++) column[i] =
          whole || (live && i >= t->i0 && i < t->i1)
              ? trvv_load(t->x + (t->row[i] + j * t->col + c))
              : trvv_set(0.0f);
      wino_points(column, r, m);
      TRVV_UNROLL for (int i = 0; i < n; i++) d[i][j] = r[i];
    }
    float* v = t->v + c / TRVK_PANEL * (TRVK_WINO_ROWS * TRVK_PANEL) + c % TRVK_PANEL;
    TRVV_UNROLL for (int i = 0; i < n; i++) {
      wino_points(d[i], r, m);
      TRVV_UNROLL for (int j = 0; j < n; j++, v += t->v_step) trvv_store(v, r[j]);
    }
  }
}

TRVV_INLINE void wino_out_body(const trvk_wino_out* t, const int m, const int whole) {
  const int n = m + 2;
  const trvv lo = trvv_set(t->lo), hi = trvv_set(t->hi);
  for (trv_dim c = 0; c < t->channels; c += TRVV_N) {
    trvv d[6][6], column[6], r[6];
    const float* s = t->s + c;
    TRVV_UNROLL for (int j = 0; j < n; j++) {
      TRVV_UNROLL for (int i = 0; i < n; i++) column[i] = trvv_load(s + (i * n + j) * t->s_step);
      wino_outputs(column, r, m);
      TRVV_UNROLL for (int i = 0; i < m; i++) d[i][j] = r[i];
    }
    const trvv bias = t->bias ? trvv_load(t->bias + c) : trvv_set(0.0f);
    TRVV_UNROLL for (int i = 0; i < m; i++) {
      if (!whole && i >= t->rows) break;
      wino_outputs(d[i], r, m);
      float* y = t->y + i * t->y_row + c;
      const float* res = t->res ? t->res + i * t->res_row + c : NULL;
      TRVV_UNROLL for (int j = 0; j < m; j++) {
        if (!whole && j >= t->cols) break;
        trvv v = trvv_add(r[j], bias);
        if (res) v = trvv_add(v, trvv_load(res + j * t->res_col));
        trvv_store(y + j * t->y_col, trvv_clamp(v, lo, hi));
      }
    }
  }
}

/* mr rows of one matrix times np panels of its part of the weight. A row is in pieces of 16
 * channels, TRVK_WINO_ROWS rows apart, so that one address serves all rows. */
TRVV_INLINE void wino_tile(const float* v, const float* w, float* s, trv_dim cg, trv_dim width,
                           const char* next, const int mr, const int np) {
  const int nv = np * TRVG_VP;
  trvv sum[TRVG_MR * TRVG_NP * TRVG_VP];
  TRVV_UNROLL for (int i = 0; i < mr * nv; i++) sum[i] = trvv_set(0.0f);
  for (trv_dim c = 0; c < cg; c += TRVK_PANEL, v += TRVK_WINO_ROWS * TRVK_PANEL) {
    const trv_dim live = cg - c < TRVK_PANEL ? cg - c : TRVK_PANEL;
    trv_dim k = 0;
#if defined(TRVG_MAC_LANE)
    for (; k + TRVV_N <= live; k += TRVV_N) {
      trvv x[TRVG_MR * TRVG_NP];
      TRVV_UNROLL for (int m = 0; m < mr; m++) x[m] = trvv_load(v + m * TRVK_PANEL + k);
      TRVV_UNROLL for (int i = 0; i < TRVV_N; i++, w += width, next += 64) {
        TRVV_AHEAD(next);
        TRVV_UNROLL for (int j = 0; j < nv; j++) {
          const trvv b = trvv_load(w + j * TRVV_N);
          TRVV_UNROLL for (int m = 0; m < mr; m++) sum[m * nv + j] =
              TRVG_MAC_LANE(x[m], i, b, sum[m * nv + j]);
        }
      }
    }
#endif
    for (; k < live; k++, w += width, next += 64) {
      trvv b[TRVG_NP * TRVG_VP];
      TRVV_AHEAD(next);
      TRVV_UNROLL for (int j = 0; j < nv; j++) b[j] = trvv_load(w + j * TRVV_N);
      TRVV_UNROLL for (int m = 0; m < mr; m++) {
        const trvv x = trvv_set(v[m * TRVK_PANEL + k]);
        TRVV_UNROLL for (int j = 0; j < nv; j++) sum[m * nv + j] =
            trvv_fma(x, b[j], sum[m * nv + j]);
      }
    }
  }
  TRVV_UNROLL for (int m = 0; m < mr; m++) TRVV_UNROLL for (int j = 0; j < nv; j++)
      trvv_store(s + m * TRVK_STRIP + j * TRVV_N, sum[m * nv + j]);
}

#define WINO_TILE(mr, np)                                                                 \
  static void wino_tile_##mr##_##np(const float* v, const float* w, float* s, trv_dim cg, \
                                    trv_dim width, const char* next) {                    \
    wino_tile(v, w, s, cg, width, next, mr, np);                                          \
  }
typedef void (*wino_tile_fn)(const float*, const float*, float*, trv_dim, trv_dim, const char*);
/* By rows: [n] is for n + 1 rows or, where there is none, for a few more. */
#if TRVG_MR >= 12
WINO_TILE(2, 2)
WINO_TILE(4, 2)
WINO_TILE(6, 2)
WINO_TILE(8, 2)
WINO_TILE(9, 2)
WINO_TILE(10, 2)
WINO_TILE(12, 2)
WINO_TILE(4, 1)
WINO_TILE(8, 1)
WINO_TILE(12, 1)
WINO_TILE(16, 1)
WINO_TILE(20, 1)
WINO_TILE(24, 1)
static const wino_tile_fn wino_tiles_2[12] = {
    wino_tile_2_2, wino_tile_2_2, wino_tile_4_2, wino_tile_4_2,  wino_tile_6_2,  wino_tile_6_2,
    wino_tile_8_2, wino_tile_8_2, wino_tile_9_2, wino_tile_10_2, wino_tile_12_2, wino_tile_12_2};
static const wino_tile_fn wino_tiles_1[6] = {wino_tile_4_1,  wino_tile_8_1,  wino_tile_12_1,
                                             wino_tile_16_1, wino_tile_20_1, wino_tile_24_1};
#define WINO_STEP_1 4 /* rows from one tile of a single panel to the next larger */
#elif TRVG_MR >= 6
WINO_TILE(2, 1)
WINO_TILE(4, 1)
WINO_TILE(6, 1)
static const wino_tile_fn wino_tiles_1[3] = {wino_tile_2_1, wino_tile_4_1, wino_tile_6_1};
#define WINO_STEP_1 2
#else
WINO_TILE(2, 1)
static const wino_tile_fn wino_tiles_1[1] = {wino_tile_2_1};
#define WINO_STEP_1 2
#endif

/* Every matrix of a block times its part of a strip's weight. */
static void wino_mul(const trvk_wino_mul* t) {
  const trv_dim width = t->panels * TRVK_PANEL, part = t->cg * width;
  for (trv_dim p = 0; p < t->points; p++) {
    const float* v = t->v + p * t->v_step;
    const float* w = t->w + p * part;
    float* s = t->s + p * t->s_step;
    for (trv_dim panel = 0; panel < t->panels;) {
      const int np = TRVG_NP > 1 && t->panels - panel > 1 ? 2 : 1;
      const trv_dim most = np == 2 ? TRVG_MR : TRVG_MR * TRVG_NP;
      const trv_dim tiles = (t->count + most - 1) / most, mr = (t->count + tiles - 1) / tiles;
      trv_dim each = (mr + WINO_STEP_1 - 1) / WINO_STEP_1 * WINO_STEP_1;
      wino_tile_fn fn = wino_tiles_1[each / WINO_STEP_1 - 1];
#if TRVG_NP > 1
      if (np == 2) {
        fn = wino_tiles_2[mr - 1];
        each = mr;
      }
#endif
      /* The tiles fetch the next matrix's part of the weight in turn, so that memory has time. */
      const char* next = (const char*)(const void*)(w + part);
      for (trv_dim r = 0; r < t->count; r += each, next += t->cg * 64)
        fn(v + r * TRVK_PANEL, w + panel * TRVK_PANEL, s + r * TRVK_STRIP + panel * TRVK_PANEL,
           t->cg, width, next);
      panel += np;
    }
  }
}

static void wino_in(const trvk_wino_in* t) {
  const int whole = t->i0 == 0 && t->j0 == 0 && t->i1 == t->m + 2 && t->j1 == t->m + 2;
  if (t->m == 4) {
    if (whole)
      wino_in_body(t, 4, 1);
    else
      wino_in_body(t, 4, 0);
  } else if (whole) {
    wino_in_body(t, 2, 1);
  } else {
    wino_in_body(t, 2, 0);
  }
}

static void wino_out(const trvk_wino_out* t) {
  const int whole = t->rows == t->m && t->cols == t->m;
  if (t->m == 4) {
    if (whole)
      wino_out_body(t, 4, 1);
    else
      wino_out_body(t, 4, 0);
  } else if (whole) {
    wino_out_body(t, 2, 1);
  } else {
    wino_out_body(t, 2, 0);
  }
}
#undef WINO_A
#undef WINO_B
