/* gemm_tiles.h - the inner loops of gemm.h against vec.h. Compiled once per instruction set:
 * gemm_<isa>.c defines TRVV_N (floats of a vector), TRVG_MR (rows), TRVG_NP (panels) of the largest
 * tile, TRVG_ISA (suffix of names) so that TRVG_MR * TRVG_NP * 16 / TRVV_N sums, and a few
 * operands, fit the registers.
 */
#include "gemm.h"
#include "vec.h"
#include "vmath.h"

#define TRVG_VP (TRVK_PANEL / TRVV_N) /* vectors of a panel's row */

TRVV_INLINE void tile_body(const trvk_tile* t, const int mr, const int np) {
  const int nv = np * TRVG_VP;
  trvv sum[TRVG_MR][TRVG_NP * TRVG_VP];
  TRVV_UNROLL for (int j = 0; j < nv; j++) {
    const trvv b = t->bias && !t->accumulate ? trvv_load(t->bias + j * TRVV_N) : trvv_set(0.0f);
    TRVV_UNROLL for (int m = 0; m < mr; m++) sum[m][j] = b;
  }
  const trv_dim ak = t->ak, bk = t->bk, bp = t->bp, kc = t->kc;
  for (trv_dim tap = 0; tap < t->taps; tap++) {
    const float* b = t->b[tap] + t->b_off;
    const float* a[TRVG_MR];
    TRVV_UNROLL for (int m = 0; m < mr; m++) a[m] = t->rows[tap * t->row_step + m];
    trv_dim at = 0;
    for (trv_dim k = 0; k < kc; k++) {
      trvv w[TRVG_NP * TRVG_VP];
      TRVV_UNROLL for (int j = 0; j < nv; j++) w[j] =
          trvv_load(b + j / TRVG_VP * bp + j % TRVG_VP * TRVV_N);
      TRVV_UNROLL for (int m = 0; m < mr; m++) {
        const trvv x = trvv_set(a[m][at]);
        TRVV_UNROLL for (int j = 0; j < nv; j++) sum[m][j] = trvv_fma(x, w[j], sum[m][j]);
      }
      b += bk;
      at += ak;
    }
  }
  if (t->accumulate) { /* blocks of k are summed by themselves: rounding errors grow with the block,
                          not with k */
    TRVV_UNROLL for (int m = 0; m < mr; m++) TRVV_UNROLL for (int j = 0; j < nv; j++) sum[m][j] =
        trvv_add(sum[m][j], trvv_load(t->c[m] + t->c_off + j * TRVV_N));
  }
  const trvv lo = trvv_set(t->lo), hi = trvv_set(t->hi);
  TRVV_UNROLL for (int m = 0; m < mr; m++) TRVV_UNROLL for (int j = 0; j < nv; j++)
      trvv_store(t->c[m] + t->c_off + j * TRVV_N, trvv_clamp(sum[m][j], lo, hi));
}

#define TRVG_TILE(mr, np) \
  static void tile_##mr##_##np(const trvk_tile* t) { tile_body(t, mr, np); }
TRVG_TILE(1, 1)
TRVG_TILE(2, 1)
#if TRVG_MR >= 6
TRVG_TILE(3, 1)
TRVG_TILE(4, 1)
TRVG_TILE(5, 1)
TRVG_TILE(6, 1)
#endif
#if TRVG_MR >= 12
TRVG_TILE(7, 1)
TRVG_TILE(8, 1)
TRVG_TILE(9, 1)
TRVG_TILE(10, 1)
TRVG_TILE(11, 1)
TRVG_TILE(12, 1)
#endif
#if TRVG_NP >= 2
TRVG_TILE(1, 2)
TRVG_TILE(2, 2)
TRVG_TILE(3, 2)
TRVG_TILE(4, 2)
TRVG_TILE(5, 2)
TRVG_TILE(6, 2)
TRVG_TILE(7, 2)
TRVG_TILE(8, 2)
TRVG_TILE(9, 2)
TRVG_TILE(10, 2)
TRVG_TILE(11, 2)
TRVG_TILE(12, 2)
#endif

static void (*const tiles_1[TRVG_MR])(const trvk_tile*) = {
    tile_1_1, tile_2_1,
#if TRVG_MR >= 6
    tile_3_1, tile_4_1, tile_5_1, tile_6_1,
#endif
#if TRVG_MR >= 12
    tile_7_1, tile_8_1, tile_9_1, tile_10_1, tile_11_1, tile_12_1,
#endif
};
#if TRVG_NP >= 2
static void (*const tiles_2[TRVG_MR])(const trvk_tile*) = {
    tile_1_2, tile_2_2, tile_3_2, tile_4_2,  tile_5_2,  tile_6_2,
    tile_7_2, tile_8_2, tile_9_2, tile_10_2, tile_11_2, tile_12_2};
#endif

/* One row, panels in the order of memory: four sums per vector hide the latency and halve the
 * rounding errors. */
static void stream_row(const trvk_tile* t, trv_dim panels) {
  const float* a = t->rows[0];
  const trvv lo = trvv_set(t->lo), hi = trvv_set(t->hi);
  for (trv_dim p = 0; p < panels; p++) {
    const float* b = t->b[0] + t->b_off + p * t->bp;
    float* c = t->c[0] + t->c_off + p * TRVK_PANEL;
    trvv s0[TRVG_VP], s1[TRVG_VP], s2[TRVG_VP], s3[TRVG_VP];
    TRVV_UNROLL for (int j = 0; j < TRVG_VP; j++) {
      s0[j] = t->bias && !t->accumulate ? trvv_load(t->bias + p * TRVK_PANEL + j * TRVV_N)
                                        : trvv_set(0.0f);
      s1[j] = s2[j] = s3[j] = trvv_set(0.0f);
    }
    trv_dim k = 0;
    for (; k + 4 <= t->kc; k += 4, b += 4 * t->bk) {
      const trvv x0 = trvv_set(a[k * t->ak]), x1 = trvv_set(a[(k + 1) * t->ak]);
      const trvv x2 = trvv_set(a[(k + 2) * t->ak]), x3 = trvv_set(a[(k + 3) * t->ak]);
      TRVV_UNROLL for (int j = 0; j < TRVG_VP; j++) {
        s0[j] = trvv_fma(x0, trvv_load(b + j * TRVV_N), s0[j]);
        s1[j] = trvv_fma(x1, trvv_load(b + t->bk + j * TRVV_N), s1[j]);
        s2[j] = trvv_fma(x2, trvv_load(b + 2 * t->bk + j * TRVV_N), s2[j]);
        s3[j] = trvv_fma(x3, trvv_load(b + 3 * t->bk + j * TRVV_N), s3[j]);
      }
    }
    for (; k < t->kc; k++, b += t->bk) {
      const trvv x = trvv_set(a[k * t->ak]);
      TRVV_UNROLL for (int j = 0; j < TRVG_VP; j++) s0[j] =
          trvv_fma(x, trvv_load(b + j * TRVV_N), s0[j]);
    }
    TRVV_UNROLL for (int j = 0; j < TRVG_VP; j++) {
      trvv s = trvv_add(trvv_add(s0[j], s1[j]), trvv_add(s2[j], s3[j]));
      if (t->accumulate) s = trvv_add(s, trvv_load(c + j * TRVV_N));
      trvv_store(c + j * TRVV_N, trvv_clamp(s, lo, hi));
    }
  }
}

/* Products of one row with rows of B (contiguous along k), four at a time. */
static void dot_rows(const float* a, const float* b, trv_dim b_step, trv_dim n, trv_dim k,
                     float* out) {
  for (trv_dim i = 0; i < n; i += 4) {
    const float* r[4];
    trvv s[4];
    for (int j = 0; j < 4; j++) {
      r[j] = b + (i + j < n ? i + j : n - 1) * b_step;
      s[j] = trvv_set(0.0f);
    }
    trv_dim x = 0;
    for (; x + TRVV_N <= k; x += TRVV_N) {
      const trvv v = trvv_load(a + x);
      TRVV_UNROLL for (int j = 0; j < 4; j++) s[j] = trvv_fma(v, trvv_load(r[j] + x), s[j]);
    }
    for (int j = 0; j < 4 && i + j < n; j++) {
      float sum = trvv_sum(s[j]);
      for (trv_dim y = x; y < k; y++) sum += a[y] * r[j][y];
      out[i + j] = sum;
    }
  }
}

static void act_row(float* x, trv_dim n, uint32_t act, float lo, float hi) {
#define TRVG_EACH(expr)             \
  for (trv_dim i = 0; i < n; i++) { \
    const float v = x[i];           \
    x[i] = (expr);                  \
  }                                 \
  break
  switch (act) {
    case TRV_ACT_CLAMP:
      TRVG_EACH(trvk_clamp(v, lo, hi));
    case TRV_ACT_SIGMOID:
      TRVG_EACH(trvk_sigmoid(v));
    case TRV_ACT_TANH:
      TRVG_EACH(trvk_tanh(v));
    case TRV_ACT_GELU:
      TRVG_EACH(trvk_gelu(v));
    case TRV_ACT_GELU_TANH:
      TRVG_EACH(trvk_gelu_tanh(v));
    case TRV_ACT_SILU:
      TRVG_EACH(trvk_silu(v));
    case TRV_ACT_HARD_SWISH:
      TRVG_EACH(trvk_hard_swish(v));
    case TRV_ACT_HARD_SIGMOID:
      TRVG_EACH(trvk_hard_sigmoid(v));
    case TRV_ACT_LEAKY:
      TRVG_EACH(v > 0.0f ? v : v * lo);
    case TRV_ACT_ELU:
      TRVG_EACH(v > 0.0f ? v : lo * trvk_expm1(v));
    default:
      break;
  }
#undef TRVG_EACH
}

static float scale_max_row(float* x, trv_dim n, float scale) {
  trvv most = trvv_set(-INFINITY);
  const trvv f = trvv_set(scale);
  trv_dim i = 0;
  for (; i + TRVV_N <= n; i += TRVV_N) {
    const trvv v = trvv_mul(trvv_load(x + i), f);
    trvv_store(x + i, v);
    most = trvv_max(v, most);
  }
  float lanes[TRVV_N], max = -INFINITY;
  trvv_store(lanes, most);
  for (int j = 0; j < TRVV_N; j++) max = lanes[j] > max ? lanes[j] : max;
  for (; i < n; i++) {
    x[i] *= scale;
    max = x[i] > max ? x[i] : max;
  }
  return max;
}

static float exp_sum_row(float* x, trv_dim n, float max) {
  trvv sum = trvv_set(0.0f);
  for (trv_dim i = 0; i < n; i++) x[i] = trvk_exp(x[i] - max);
  trv_dim i = 0;
  for (; i + TRVV_N <= n; i += TRVV_N) sum = trvv_add(sum, trvv_load(x + i));
  float total = trvv_sum(sum);
  for (; i < n; i++) total += x[i];
  return total;
}

static void lstm_row(const float* gates, float* c, float* h, trv_dim n) {
  const float *f = gates + n, *g = f + n, *o = g + n;
  TRVK_IVDEP for (trv_dim i = 0; i < n; i++) {
    const float v = trvk_sigmoid(f[i]) * c[i] + trvk_sigmoid(gates[i]) * trvk_tanh(g[i]);
    c[i] = v;
    h[i] = trvk_sigmoid(o[i]) * trvk_tanh(v);
  }
}

static void gru_row(const float* x, const float* gates, float* h, trv_dim n) {
  TRVK_IVDEP for (trv_dim i = 0; i < n; i++) {
    const float r = trvk_sigmoid(x[i] + gates[i]), z = trvk_sigmoid(x[n + i] + gates[n + i]);
    const float v = trvk_tanh(x[2 * n + i] + r * gates[2 * n + i]);
    h[i] = v + z * (h[i] - v);
  }
}

#include "dw_tiles.h"
