/* gemm_tiles.h - the inner loops of gemm.h against vec.h. Compiled once per instruction set:
 * gemm_<isa>.c defines TRVV_N (floats of a vector), TRVG_MR (rows), TRVG_NP (panels) of the largest
 * tile, TRVG_ISA (suffix of names) so that TRVG_MR * TRVG_NP * 16 / TRVV_N sums, and a few
 * operands, fit the registers.
 */
#include "convert.h"
#include "gemm.h"
#include "vec.h"
#include "vmath.h"

#define TRVG_VP (TRVK_PANEL / TRVV_N) /* vectors of a panel's row */

/* sum + x * w. gemm_bf16.c: x and w are pairs of bfloat16 that lie in K beside each other. */
#ifndef TRVG_MAC
#define TRVG_MAC(x, w, sum) trvv_fma(x, w, sum)
#if defined(TRVV_FMA_LANE)
#define TRVG_MAC_LANE(x, lane, w, sum) TRVV_FMA_LANE(x, lane, w, sum)
#endif
#endif

TRVV_INLINE void tile_body(const trvk_tile* t, const int mr, const int np) {
  const int nv = np * TRVG_VP;
  trvv sum[TRVG_MR][TRVG_NP * TRVG_VP];
  TRVV_UNROLL for (int j = 0; j < nv; j++) {
    const trvv b = t->bias && t->accumulate != 1 ? trvv_load(t->bias + j * TRVV_N) : trvv_set(0.0f);
    TRVV_UNROLL for (int m = 0; m < mr; m++) sum[m][j] = b;
  }
  const float* const* add = t->accumulate == 1 ? (const float* const*)t->c : t->add;
  const trv_dim add_off = t->accumulate == 1 ? t->c_off : t->add_off;
  if (t->accumulate == TRVK_ADD) { /* far away: fetched in the meantime */
    TRVV_UNROLL for (int m = 0; m < mr; m++) TRVV_UNROLL for (int j = 0; j < np; j++)
        TRVV_AHEAD(add[m] + add_off + j * TRVK_PANEL);
  }
  const trv_dim ak = t->ak, bk = t->bk, bp = t->bp, kc = t->kc;
  for (trv_dim tap = 0; tap < t->taps; tap++) {
    const float* b = t->b[tap] + t->b_off;
    const float* a[TRVG_MR];
    TRVV_UNROLL for (int m = 0; m < mr; m++) a[m] = t->rows[tap * t->row_step + m];
    trv_dim k = 0;
#if defined(TRVG_MAC_LANE)
    if (ak == 1)
      for (; k + TRVV_N <= kc; k += TRVV_N) {
        trvv x[TRVG_MR];
        TRVV_UNROLL for (int m = 0; m < mr; m++) x[m] = trvv_load(a[m] + k);
        TRVV_UNROLL for (int i = 0; i < TRVV_N; i++, b += bk) {
          TRVV_UNROLL for (int j = 0; j < nv; j++) { /* one at a time: registers are short */
            const trvv w = trvv_load(b + j / TRVG_VP * bp + j % TRVG_VP * TRVV_N);
            TRVV_UNROLL for (int m = 0; m < mr; m++) sum[m][j] =
                TRVG_MAC_LANE(x[m], i, w, sum[m][j]);
          }
        }
      }
#endif
    for (trv_dim at = k * ak; k < kc; k++) {
      trvv w[TRVG_NP * TRVG_VP];
      TRVV_UNROLL for (int j = 0; j < nv; j++) w[j] =
          trvv_load(b + j / TRVG_VP * bp + j % TRVG_VP * TRVV_N);
      TRVV_UNROLL for (int m = 0; m < mr; m++) {
        const trvv x = trvv_set(a[m][at]);
        TRVV_UNROLL for (int j = 0; j < nv; j++) sum[m][j] = TRVG_MAC(x, w[j], sum[m][j]);
      }
      b += bk;
      at += ak;
    }
  }
  if (t->accumulate) { /* blocks of k are summed by themselves: rounding errors grow with the block,
                          not with k */
    TRVV_UNROLL for (int m = 0; m < mr; m++) TRVV_UNROLL for (int j = 0; j < nv; j++) sum[m][j] =
        trvv_add(sum[m][j], trvv_load(add[m] + add_off + j * TRVV_N));
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

/* sum += one row times one panel: four sums per vector hide the latency and halve the rounding
 * errors. */
TRVV_INLINE void stream_panel(const float* a, const float* b, trv_dim kc, trv_dim ak, trv_dim bk,
                              trvv* sum) {
  trvv s1[TRVG_VP], s2[TRVG_VP], s3[TRVG_VP];
  TRVV_UNROLL for (int j = 0; j < TRVG_VP; j++) s1[j] = s2[j] = s3[j] = trvv_set(0.0f);
  trv_dim k = 0;
#if defined(TRVG_MAC_LANE)
  if (ak == 1)
    for (; k + 4 <= kc;
         k += 4, b += 4 * bk) { /* loads well ahead, for machines that run in order */
      const trvv x = trvv_load(a + k);
      trvv w[4 * TRVG_VP];
      TRVV_UNROLL for (int j = 0; j < 2 * TRVG_VP; j++) w[j] =
          trvv_load(b + j / TRVG_VP * bk + j % TRVG_VP * TRVV_N);
      TRVV_UNROLL for (int j = 0; j < TRVG_VP; j++) {
        sum[j] = TRVG_MAC_LANE(x, 0, w[j], sum[j]);
        w[2 * TRVG_VP + j] = trvv_load(b + 2 * bk + j * TRVV_N);
      }
      TRVV_UNROLL for (int j = 0; j < TRVG_VP; j++) {
        s1[j] = TRVG_MAC_LANE(x, 1, w[TRVG_VP + j], s1[j]);
        w[3 * TRVG_VP + j] = trvv_load(b + 3 * bk + j * TRVV_N);
      }
      TRVV_UNROLL for (int j = 0; j < TRVG_VP; j++) s2[j] =
          TRVG_MAC_LANE(x, 2, w[2 * TRVG_VP + j], s2[j]);
      TRVV_UNROLL for (int j = 0; j < TRVG_VP; j++) s3[j] =
          TRVG_MAC_LANE(x, 3, w[3 * TRVG_VP + j], s3[j]);
    }
#endif
  for (; k + 4 <= kc; k += 4, b += 4 * bk) {
    const trvv x0 = trvv_set(a[k * ak]), x1 = trvv_set(a[(k + 1) * ak]);
    const trvv x2 = trvv_set(a[(k + 2) * ak]), x3 = trvv_set(a[(k + 3) * ak]);
    TRVV_UNROLL for (int j = 0; j < TRVG_VP; j++) {
      sum[j] = TRVG_MAC(x0, trvv_load(b + j * TRVV_N), sum[j]);
      s1[j] = TRVG_MAC(x1, trvv_load(b + bk + j * TRVV_N), s1[j]);
      s2[j] = TRVG_MAC(x2, trvv_load(b + 2 * bk + j * TRVV_N), s2[j]);
      s3[j] = TRVG_MAC(x3, trvv_load(b + 3 * bk + j * TRVV_N), s3[j]);
    }
  }
  for (; k < kc; k++, b += bk) {
    const trvv x = trvv_set(a[k * ak]);
    TRVV_UNROLL for (int j = 0; j < TRVG_VP; j++) sum[j] =
        TRVG_MAC(x, trvv_load(b + j * TRVV_N), sum[j]);
  }
  TRVV_UNROLL for (int j = 0; j < TRVG_VP; j++) sum[j] =
      trvv_add(trvv_add(sum[j], s1[j]), trvv_add(s2[j], s3[j]));
}

/* One row, panels in the order of memory. */
static void stream_row(const trvk_tile* t, trv_dim panels) {
  const float* a = t->rows[0];
  const trvv lo = trvv_set(t->lo), hi = trvv_set(t->hi);
  for (trv_dim p = 0; p < panels; p++) {
    const float* b = t->b[0] + t->b_off + p * t->bp;
    float* c = t->c[0] + t->c_off + p * TRVK_PANEL;
    trvv s[TRVG_VP];
    const float* add = t->accumulate == TRVK_ADD ? t->add[0] + t->add_off + p * TRVK_PANEL : c;
    TRVV_UNROLL for (int j = 0; j < TRVG_VP; j++) s[j] =
        t->bias && t->accumulate != 1 ? trvv_load(t->bias + p * TRVK_PANEL + j * TRVV_N)
                                      : trvv_set(0.0f);
    if (t->ak == 1 && t->bk == TRVK_PANEL)
      stream_panel(a, b, t->kc, 1, TRVK_PANEL, s);
    else
      stream_panel(a, b, t->kc, t->ak, t->bk, s);
    TRVV_UNROLL for (int j = 0; j < TRVG_VP; j++) {
      if (t->accumulate) s[j] = trvv_add(s[j], trvv_load(add + j * TRVV_N));
      trvv_store(c + j * TRVV_N, trvv_clamp(s[j], lo, hi));
    }
  }
}

#ifndef TRVG_TILES_ONLY
/* Products of one row with rows of B (contiguous along k). Long rows one by one, in the order of
 * memory; short ones four at a time. */
static void dot_rows(const float* a, const float* b, trv_dim b_step, trv_dim n, trv_dim k,
                     float* out) {
  const trv_dim whole = k / TRVV_N * TRVV_N;
  trv_dim i = 0;
  trvv s[4];
  for (; k >= 16 * TRVV_N && i < n; i++) {
    const float* r = b + i * b_step;
    trv_dim x = 0;
    for (int j = 0; j < 4; j++) s[j] = trvv_set(0.0f);
    for (; x + 4 * TRVV_N <= k; x += 4 * TRVV_N) {
      TRVV_UNROLL for (int j = 0; j < 4; j++) s[j] =
          trvv_fma(trvv_load(a + x + j * TRVV_N), trvv_load(r + x + j * TRVV_N), s[j]);
    }
    for (; x < whole; x += TRVV_N) s[0] = trvv_fma(trvv_load(a + x), trvv_load(r + x), s[0]);
    float sum = trvv_sum(trvv_add(trvv_add(s[0], s[1]), trvv_add(s[2], s[3])));
    for (; x < k; x++) sum += a[x] * r[x];
    out[i] = sum;
  }
  for (; i < n; i += 4) {
    const float* r[4];
    float sum[4];
    for (int j = 0; j < 4; j++) {
      r[j] = b + (i + j < n ? i + j : n - 1) * b_step;
      s[j] = trvv_set(0.0f);
    }
    for (trv_dim x = 0; x < whole; x += TRVV_N) {
      const trvv v = trvv_load(a + x);
      TRVV_UNROLL for (int j = 0; j < 4; j++) s[j] = trvv_fma(v, trvv_load(r[j] + x), s[j]);
    }
    trvv_sum4(s, sum);
    for (int j = 0; j < 4 && i + j < n; j++) {
      for (trv_dim y = whole; y < k; y++) sum[j] += a[y] * r[j][y];
      out[i + j] = sum[j];
    }
  }
}

/* Rows of v are read whole, as far as sums for them fit the registers. */
static void mix_rows(const float* w, const float* v, trv_dim step, trv_dim n, trv_dim e,
                     float* out) {
  trv_dim j = 0;
  for (; j + 4 * TRVV_N <= e; j += 4 * TRVV_N) {
    trvv s0[4], s1[4];
    for (int x = 0; x < 4; x++) {
      s0[x] = trvv_load(out + j + x * TRVV_N);
      s1[x] = trvv_set(0.0f);
    }
    trv_dim i = 0;
    for (; i + 2 <= n; i += 2) {
      const float* r = v + i * step + j;
      const trvv w0 = trvv_set(w[i]), w1 = trvv_set(w[i + 1]);
      TRVV_UNROLL for (int x = 0; x < 4; x++) {
        s0[x] = trvv_fma(w0, trvv_load(r + x * TRVV_N), s0[x]);
        s1[x] = trvv_fma(w1, trvv_load(r + step + x * TRVV_N), s1[x]);
      }
    }
    if (i < n) {
      const trvv w0 = trvv_set(w[i]);
      TRVV_UNROLL for (int x = 0; x < 4; x++) s0[x] =
          trvv_fma(w0, trvv_load(v + i * step + j + x * TRVV_N), s0[x]);
    }
    TRVV_UNROLL for (int x = 0; x < 4; x++)
        trvv_store(out + j + x * TRVV_N, trvv_add(s0[x], s1[x]));
  }
  for (; j + TRVV_N <= e; j += TRVV_N) {
    trvv s[4] = {trvv_load(out + j), trvv_set(0.0f), trvv_set(0.0f), trvv_set(0.0f)};
    trv_dim i = 0;
    for (; i + 4 <= n; i += 4) {
      TRVV_UNROLL for (int x = 0; x < 4; x++) s[x] =
          trvv_fma(trvv_set(w[i + x]), trvv_load(v + (i + x) * step + j), s[x]);
    }
    for (; i < n; i++) s[0] = trvv_fma(trvv_set(w[i]), trvv_load(v + i * step + j), s[0]);
    trvv_store(out + j, trvv_add(trvv_add(s[0], s[1]), trvv_add(s[2], s[3])));
  }
  for (; j < e; j++)
    for (trv_dim i = 0; i < n; i++) out[j] += w[i] * v[i * step + j];
}

/* f16 or bf16 to float, and rounded to nearest even back. */
static void widen_row(float* dst, const uint16_t* src, uint32_t dtype, trv_dim n) {
  trv_dim i = 0;
  if (dtype == TRV_DTYPE_BF16) {
    for (; i < n; i++) dst[i] = trvk_bf16_to_f32(src[i]);
    return;
  }
#if defined(__F16C__) && defined(__GNUC__)
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(_mm_loadu_si128((const void*)(src + i))));
#endif
  for (; i < n; i++) dst[i] = trvk_half_to_float(src[i]);
}

static void narrow_row(uint16_t* dst, const float* src, uint32_t dtype, trv_dim n) {
  trv_dim i = 0;
  if (dtype == TRV_DTYPE_BF16) {
#if defined(__GNUC__)
    typedef uint16_t shorts __attribute__((vector_size(2 * TRVV_N)));
    for (; i + TRVV_N <= n; i += TRVV_N) { /* as trvk_float_to_bfloat */
      const trvv_u u = (trvv_u)trvv_load(src + i), high = u >> 16;
      const trvv_u nan = (trvv_u)((trvv_i)(u & 0x7FFFFFFFu) > 0x7F800000);
      const trvv_u r = (nan & (high | 0x40u)) | (~nan & ((u + 0x7FFFu + (high & 1u)) >> 16));
      const shorts h = __builtin_convertvector(r, shorts);
      memcpy(dst + i, &h, sizeof h);
    }
#endif
    for (; i < n; i++) dst[i] = trvk_float_to_bfloat(src[i]);
    return;
  }
#if defined(__F16C__) && defined(__GNUC__)
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128((void*)(dst + i), _mm256_cvtps_ph(_mm256_loadu_ps(src + i), 0));
#endif
  for (; i < n; i++) dst[i] = trvk_float_to_half(src[i]);
}

/* A packed panel of bfloat16 pairs as a float panel. */
static void widen_pairs(float* dst, const uint8_t* src, trv_dim pairs) {
  for (trv_dim k = 0; k < pairs; k++, src += 4 * TRVK_PANEL, dst += 2 * TRVK_PANEL)
    for (int j = 0; j < TRVK_PANEL; j++) {
      uint32_t pair;
      memcpy(&pair, src + 4 * j, 4);
      dst[j] = trvk_from_bits(pair << 16);
      dst[TRVK_PANEL + j] = trvk_from_bits(pair & 0xFFFF0000u);
    }
}

/* TRVV_N values of f16. */
#if TRVV_N == 16 && defined(__AVX512F__) && defined(__GNUC__)
#define TRVG_F16(p) (trvv) _mm512_cvtph_ps(_mm256_loadu_si256((const void*)(p)))
#elif TRVV_N == 8 && defined(__F16C__) && defined(__GNUC__)
#define TRVG_F16(p) (trvv) _mm256_cvtph_ps(_mm_loadu_si128((const void*)(p)))
#endif

/* sum[0 .. n) += a[i] * row i of a packed panel, n (2 or 4) rows. */
TRVV_INLINE void halves_rows(const float* a, const uint16_t* b, const int bf16, const int n,
                             trvv (*sum)[TRVG_VP]) {
  (void)bf16;
  TRVV_UNROLL for (int i = 0; i < n; i += 2) {
    const trvv x0 = trvv_set(a[i]), x1 = trvv_set(a[i + 1]);
    const uint16_t* row = b + i * TRVK_PANEL;
#if defined(TRVG_F16)
    if (!bf16) {
      TRVV_UNROLL for (int j = 0; j < TRVG_VP; j++) {
        sum[i][j] = trvv_fma(x0, TRVG_F16(row + j * TRVV_N), sum[i][j]);
        sum[i + 1][j] = trvv_fma(x1, TRVG_F16(row + TRVK_PANEL + j * TRVV_N), sum[i + 1][j]);
      }
      continue;
    }
#endif
#if defined(__GNUC__)
    TRVV_UNROLL for (int j = 0; j < TRVG_VP; j++) {
      trvv_u v;
      memcpy(&v, row + 2 * j * TRVV_N, sizeof v);
      sum[i][j] = trvv_fma(x0, (trvv)(v << 16), sum[i][j]);
      sum[i + 1][j] = trvv_fma(x1, (trvv)(v & 0xFFFF0000u), sum[i + 1][j]);
    }
#else
    float wide[2 * TRVK_PANEL];
    widen_pairs(wide, (const uint8_t*)row, 1);
    for (int j = 0; j < TRVG_VP; j++) {
      sum[i][j] = trvv_fma(x0, trvv_load(wide + j * TRVV_N), sum[i][j]);
      sum[i + 1][j] = trvv_fma(x1, trvv_load(wide + TRVK_PANEL + j * TRVV_N), sum[i + 1][j]);
    }
#endif
  }
}

TRVV_INLINE void halves_panel(const float* a, const uint16_t* b, const int bf16, trv_dim kc,
                              trvv (*s)[TRVG_VP]) {
  trv_dim k = 0;
#if !defined(TRVG_F16)
  for (trv_dim run; !bf16 && k < kc; k += run) { /* through floats */
    float wide[16 * TRVK_PANEL];
    run = kc - k < 16 ? kc - k : 16;
    widen_row(wide, b + k * TRVK_PANEL, TRV_DTYPE_F16, run * TRVK_PANEL);
    for (trv_dim i = 0; i < run; i++) {
      const trvv x = trvv_set(a[k + i]);
      TRVV_UNROLL for (int j = 0; j < TRVG_VP; j++) s[i & 3][j] =
          trvv_fma(x, trvv_load(wide + i * TRVK_PANEL + j * TRVV_N), s[i & 3][j]);
    }
  }
#endif
  for (; k + 4 <= kc; k += 4) halves_rows(a + k, b + k * TRVK_PANEL, bf16, 4, s);
  for (; k + 2 <= kc; k += 2) halves_rows(a + k, b + k * TRVK_PANEL, bf16, 2, s);
  if (k < kc) {
    const float last[2] = {a[k], 0.0f};
    uint16_t row[2 * TRVK_PANEL] = {0};
    memcpy(row, b + k * TRVK_PANEL, (bf16 ? 4 : 2) * TRVK_PANEL);
    halves_rows(last, row, bf16, 2, s);
  }
}

/* c[16 * panel ..] (+)= a float row times packed panels of halves, step elements apart. */
static void stream_halves(const float* a, const uint16_t* b, uint32_t dtype, trv_dim step,
                          trv_dim kc, trv_dim panels, float* c, int accumulate) {
  for (trv_dim p = 0; p < panels; p++, b += step, c += TRVK_PANEL) {
    trvv s[4][TRVG_VP];
    TRVV_UNROLL for (int j = 0; j < TRVG_VP; j++) {
      s[0][j] = accumulate ? trvv_load(c + j * TRVV_N) : trvv_set(0.0f);
      s[1][j] = s[2][j] = s[3][j] = trvv_set(0.0f);
    }
    if (dtype == TRV_DTYPE_BF16)
      halves_panel(a, b, 1, kc, s);
    else
      halves_panel(a, b, 0, kc, s);
    TRVV_UNROLL for (int j = 0; j < TRVG_VP; j++) trvv_store(
        c + j * TRVV_N, trvv_add(trvv_add(s[0][j], s[1][j]), trvv_add(s[2][j], s[3][j])));
  }
}

#if TRVV_N == 16 && defined(__AVX512F__)
/* 1 / (1 + e^-x), with an estimate of the reciprocal and one step of Newton's instead of a division
 * (3e-7 in all); 0 where e^-x overflows, so that -inf * 0 is NaN as elsewhere. */
TRVV_INLINE trvv sigmoid16(trvv x) {
  const trvv t = trvv_mul(x, trvv_set(-1.44269504f));
  const trvv s =
      trvv_add(trvv_set(1.0f), trvv_exp2(trvv_clamp(t, trvv_set(-126.0f), trvv_set(126.0f))));
  const trvv r = (trvv)_mm512_rcp14_ps((__m512)s);
  const trvv q = trvv_fma(r, trvv_fma(trvv_sub(trvv_set(0.0f), s), r, trvv_set(1.0f)), r);
  return (trvv)_mm512_maskz_mov_ps(
      _mm512_cmp_ps_mask((__m512)t, _mm512_set1_ps(126.0f), _CMP_NGE_UQ), (__m512)q);
}
#endif

static void act_row(float* x, trv_dim n, uint32_t act, float lo, float hi) {
#if TRVV_N == 16 && defined(__AVX512F__)
  if (act == TRV_ACT_SILU || act == TRV_ACT_SIGMOID) {
    const int silu = act == TRV_ACT_SILU;
    trv_dim i = 0;
    for (; i + TRVV_N <= n; i += TRVV_N) {
      const trvv v = trvv_load(x + i), y = sigmoid16(v);
      trvv_store(x + i, silu ? trvv_mul(v, y) : y);
    }
    if (i < n) {
      const __mmask16 live = (__mmask16)((1u << (n - i)) - 1u);
      const trvv v = (trvv)_mm512_maskz_loadu_ps(live, x + i), y = sigmoid16(v);
      _mm512_mask_storeu_ps(x + i, live, (__m512)(silu ? trvv_mul(v, y) : y));
    }
    return;
  }
#endif
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
      TRVG_EACH(v * trvk_clamp(v + 3.0f, 0.0f, 6.0f) * (1.0f / 6.0f)); /* no division */
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

static float most_row(float* x, const float* add, trv_dim n, float scale, float add_scale) {
  trvv most = trvv_set(-INFINITY), more = most;
  const trvv f = trvv_set(scale), g = trvv_set(add_scale);
  trv_dim i = 0;
  if (add) {
    for (; i + TRVV_N <= n; i += TRVV_N) {
      const trvv v = trvv_fma(trvv_load(add + i), g, trvv_mul(trvv_load(x + i), f));
      trvv_store(x + i, v);
      most = trvv_max(v, most);
    }
  } else {
    for (; i + 2 * TRVV_N <= n; i += 2 * TRVV_N) {
      most = trvv_max(trvv_mul(trvv_load(x + i), f), most);
      more = trvv_max(trvv_mul(trvv_load(x + i + TRVV_N), f), more);
    }
  }
  float max = trvv_most(trvv_max(most, more));
  for (; i < n; i++) {
    const float v = x[i] * scale + (add ? add[i] * add_scale : 0.0f);
    if (add) x[i] = v;
    max = v > max ? v : max;
  }
  return max;
}

static float exp2_sum_row(float* x, trv_dim n, float scale, float max) {
  const trvv f = trvv_set(scale), m = trvv_set(-max);
  trvv s0 = trvv_set(0.0f), s1 = s0;
  trv_dim i = 0;
  for (; i + 2 * TRVV_N <= n; i += 2 * TRVV_N) {
    const trvv a = trvv_exp2(trvv_fma(trvv_load(x + i), f, m));
    const trvv b = trvv_exp2(trvv_fma(trvv_load(x + i + TRVV_N), f, m));
    trvv_store(x + i, a);
    trvv_store(x + i + TRVV_N, b);
    s0 = trvv_add(s0, a);
    s1 = trvv_add(s1, b);
  }
  for (; i < n; i += TRVV_N) { /* the rest through a copy with room */
    const trv_dim left = n - i < TRVV_N ? n - i : TRVV_N;
    float rest[TRVV_N];
    for (int j = 0; j < TRVV_N; j++) rest[j] = j < left ? x[i + j] : 0.0f;
    trvv_store(rest, trvv_exp2(trvv_fma(trvv_load(rest), f, m)));
    for (trv_dim j = left; j < TRVV_N; j++) rest[j] = 0.0f;
    memcpy(x + i, rest, (size_t)left * sizeof *x);
    s0 = trvv_add(s0, trvv_load(rest));
  }
  return trvv_sum(trvv_add(s0, s1));
}

static void lstm_row(const float* gates, float* c, float* h, trv_dim n) {
  const float *f = gates + n, *g = f + n, *o = g + n;
  TRVK_IVDEP for (trv_dim i = 0; i < n; i++) {
    const float v = trvk_sigmoid(f[i]) * c[i] + trvk_sigmoid(gates[i]) * trvk_tanh(g[i]);
    c[i] = v;
    h[i] = trvk_sigmoid(o[i]) * trvk_tanh(v);
  }
}

/* Four panels, then their cells, whose arithmetic thus runs while the next weights come. Going back
 * every other time, a step begins with the weights that the last one has left in the nearest cache.
 */
static void lstm_step(const float* h, trv_dim k, const float* w, const float* gates, float* c,
                      float* out, trv_dim n, int back) {
  for (trv_dim at = 0; at < n; at += TRVK_PANEL) {
    const trv_dim j = back ? n - TRVK_PANEL - at : at;
    float sum[4 * TRVK_PANEL];
    for (int i = 0; i < 4; i++) {
      const int q = back ? 3 - i : i;
      const trv_dim col = q * n + j;
      trvv s[TRVG_VP];
      TRVV_UNROLL for (int v = 0; v < TRVG_VP; v++) s[v] = trvv_load(gates + col + v * TRVV_N);
      stream_panel(h, w + col * k, k, 1, TRVK_PANEL, s);
      TRVV_UNROLL for (int v = 0; v < TRVG_VP; v++)
          trvv_store(sum + q * TRVK_PANEL + v * TRVV_N, s[v]);
    }
    lstm_row(sum, c + j, out + j, TRVK_PANEL);
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
#if TRVK_WINO
#include "line_tiles.h"
#include "wino_tiles.h"
#else
#define line_1 NULL
#define line_2 NULL
#define TRVG_LINE 0
#define wino_in NULL
#define wino_mul NULL
#define wino_out NULL
#endif
#endif
