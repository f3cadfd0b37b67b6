/* qdw_tiles.h - the vectors of qdw.h. Included by files that set a target, with TRVV_N (4, 8 or 16)
 * and TRVQ_DOT (qbytes_tiles.h, included before: u8 times i8, four at a time; on arm64 i8 times i8)
 * where there is one; without, numbers are widened to i16 and taken by pairs of rows. */
#include "qdw.h"
#if !defined(__aarch64__)
#include "qsimd.h"
#endif

#if defined(__aarch64__)
typedef int32x4_t dw_vec;
typedef int8x16_t dw_bytes;
enum { DW_HALVES = 4 };
#define dw_load(p) vld1q_s32((const int32_t*)(const void*)(p))
#define dw_store(p, v) vst1q_s32(p, v)
#define dw_set1_16(v) vreinterpretq_s32_s16(vdupq_n_s16(v))
#define dw_set1_8(v) vreinterpretq_s32_s8(vdupq_n_s8((int8_t)(v)))
#define dw_set8(v) vdupq_n_s8(v)
#define dw_xor(a, b) veorq_s8(a, b)
static inline dw_bytes dw_load16(const void* p) { return vld1q_s8(p); }
static inline void dw_store16(void* p, dw_bytes v) { vst1q_s8(p, v); }
static inline dw_bytes dw_load8(const void* p) { return vcombine_s8(vld1_s8(p), vdup_n_s8(0)); }
static inline dw_vec dw_rescale(dw_vec v, dw_vec m, dw_vec odd, dw_vec half, dw_vec down) {
  const int64x2_t even = vmull_s32(vget_low_s32(v), vget_low_s32(m)), high = vmull_high_s32(v, m);
  (void)odd, (void)half; /* the shift rounds by itself */
  return vrshlq_s32(vuzp2q_s32(vreinterpretq_s32_s64(even), vreinterpretq_s32_s64(high)),
                    vnegq_s32(down));
}
#else
typedef __m128i dw_bytes;
#define dw_set8(v) _mm_set1_epi8(v)
#define dw_xor(a, b) _mm_xor_si128(a, b)
static inline dw_bytes dw_load16(const void* p) { return _mm_loadu_si128((const __m128i*)p); }
static inline void dw_store16(void* p, dw_bytes v) { _mm_storeu_si128((__m128i*)p, v); }
static inline dw_bytes dw_load8(const void* p) { return _mm_loadl_epi64((const __m128i*)p); }
#if TRVV_N == 16
typedef __m512i dw_vec;
enum { DW_HALVES = 1 }; /* vectors of 16 sums */
#define dw_load qs_load_16
#define dw_store qs_store_16
#define dw_rescale qs_rescale_16
#define dw_set1_16 _mm512_set1_epi16
#define dw_set1_8 _mm512_set1_epi8
#else
typedef __m256i dw_vec;
enum { DW_HALVES = 2 };
#define dw_load qs_load_8
#define dw_store qs_store_8
#define dw_rescale qs_rescale_8
#define dw_set1_16 _mm256_set1_epi16
#define dw_set1_8 _mm256_set1_epi8
#endif
#endif

#if defined(__aarch64__)
enum { DW_PARTS = 1, DW_OFFSET = 0 };
static inline dw_vec dw_dot(dw_vec s, dw_vec v, dw_vec w) {
  return vdotq_s32(s, vreinterpretq_s8_s32(v), vreinterpretq_s8_s32(w));
}
#elif defined(TRVQ_DOT)
enum { DW_PARTS = 1, DW_OFFSET = 128 };
static inline dw_vec dw_dot(dw_vec s, dw_vec v, dw_vec w) { return b_dot(s, v, w); }
#else
enum { DW_PARTS = 2, DW_OFFSET = 0 };
static inline dw_vec dw_dot(dw_vec s, dw_vec v, dw_vec w) {
#if TRVV_N == 16
  return _mm512_add_epi32(s, _mm512_madd_epi16(v, w));
#else
  return _mm256_add_epi32(s, _mm256_madd_epi16(v, w));
#endif
}
#endif
enum { DW_SET = DW_HALVES * DW_PARTS, DW_BYTES = DW_SET * TRVV_N * 4 }; /* four taps, 16 channels */

/* [16 channels][4] of four rows of 16. */
static inline void dw_weave(dw_bytes a, dw_bytes b, dw_bytes c, dw_bytes d, uint8_t* to) {
#if defined(__aarch64__)
  const int8x16x4_t rows = {{a, b, c, d}};
  vst4q_s8((int8_t*)to, rows);
#else
  const __m128i ab = _mm_unpacklo_epi8(a, b), ab2 = _mm_unpackhi_epi8(a, b),
                cd = _mm_unpacklo_epi8(c, d), cd2 = _mm_unpackhi_epi8(c, d);
#ifdef TRVQ_DOT
  dw_store16(to, _mm_unpacklo_epi16(ab, cd));
  dw_store16(to + 16, _mm_unpackhi_epi16(ab, cd));
  dw_store16(to + 32, _mm_unpacklo_epi16(ab2, cd2));
  dw_store16(to + 48, _mm_unpackhi_epi16(ab2, cd2));
#elif TRVV_N == 16
  qs_store_16(to, _mm512_cvtepi8_epi16(_mm256_set_m128i(ab2, ab)));
  qs_store_16(to + 64, _mm512_cvtepi8_epi16(_mm256_set_m128i(cd2, cd)));
#else
  qs_store_8(to, _mm256_cvtepi8_epi16(ab));
  qs_store_8(to + 32, _mm256_cvtepi8_epi16(cd));
  qs_store_8(to + 64, _mm256_cvtepi8_epi16(ab2));
  qs_store_8(to + 96, _mm256_cvtepi8_epi16(cd2));
#endif
#endif
}

static void dw_weights(const int8_t (*taps)[TRVK_QDW_LANES], uint8_t* to) {
  dw_weave(dw_load16(taps[0]), dw_load16(taps[1]), dw_load16(taps[2]), dw_load16(taps[3]), to);
}

/* n < 16 numbers. */
static inline dw_bytes dw_load_some(const int8_t* p, trv_dim n) {
  int8_t part[16] = {0};
  if (n == 8) return dw_load8(p);
  for (trv_dim i = 0; i < n; i++) part[i] = p[i];
  return dw_load16(part);
}
static inline void dw_store_some(int8_t* p, dw_bytes v, trv_dim n) {
  int8_t part[16];
  dw_store16(part, v);
  for (trv_dim i = 0; i < n; i++) p[i] = part[i];
}

/* Four times 16 rescaled sums to bytes. */
static inline void dw_results(dw_vec (*s)[DW_HALVES], dw_vec zero, dw_vec lo, dw_vec hi,
                              dw_bytes* y) {
#if defined(__aarch64__)
  const int16x8_t z = vreinterpretq_s16_s32(zero);
  for (int i = 0; i < 4; i++) {
    const int16x8_t a = vqaddq_s16(vqmovn_high_s32(vqmovn_s32(s[i][0]), s[i][1]), z),
                    b = vqaddq_s16(vqmovn_high_s32(vqmovn_s32(s[i][2]), s[i][3]), z);
    y[i] = vminq_s8(vmaxq_s8(vqmovn_high_s16(vqmovn_s16(a), b), vreinterpretq_s8_s32(lo)),
                    vreinterpretq_s8_s32(hi));
  }
#elif TRVV_N == 16
  const __m512i v = qs_order_16(qs_bytes_16(s[0][0], s[1][0], s[2][0], s[3][0], zero, lo, hi));
  y[0] = _mm512_castsi512_si128(v);
  y[1] = _mm512_extracti32x4_epi32(v, 1);
  y[2] = _mm512_extracti32x4_epi32(v, 2);
  y[3] = _mm512_extracti32x4_epi32(v, 3);
#else
  for (int i = 0; i < 4; i += 2) {
    const __m256i v =
        qs_order_8(qs_bytes_8(s[i][0], s[i][1], s[i + 1][0], s[i + 1][1], zero, lo, hi));
    y[i] = _mm256_castsi256_si128(v);
    y[i + 1] = _mm256_extracti128_si256(v, 1);
  }
#endif
}

static void dw_columns(const trvk_qdw_job* job) {
  const trv_dim all = job->quads * DW_BYTES, n = job->channels, lo = job->lo, hi = job->hi,
                cols = job->cols;
  const dw_bytes flip = dw_set8(DW_OFFSET == 128 ? INT8_MIN : 0);
  const dw_bytes zero = dw_xor(dw_set8((int8_t)job->x_zero), flip);
  for (int q = 0; q < job->quads; q++) {
    uint8_t* v = job->v + q * DW_BYTES;
    const int8_t *a = job->row[4 * q], *b = job->row[4 * q + 1], *c = job->row[4 * q + 2],
                 *d = job->row[4 * q + 3];
    const trv_dim sa = job->step[4 * q], sb = job->step[4 * q + 1], sc = job->step[4 * q + 2],
                  sd = job->step[4 * q + 3];
    for (trv_dim i = 0; i < lo; i++) dw_weave(zero, zero, zero, zero, v + i * all);
    for (trv_dim i = hi; i < cols; i++) dw_weave(zero, zero, zero, zero, v + i * all);
    if (n == TRVK_QDW_LANES)
      for (trv_dim i = lo; i < hi; i++, a += sa, b += sb, c += sc, d += sd)
        dw_weave(dw_xor(dw_load16(a), flip), dw_xor(dw_load16(b), flip), dw_xor(dw_load16(c), flip),
                 dw_xor(dw_load16(d), flip), v + i * all);
    else
      for (trv_dim i = lo; i < hi; i++, a += sa, b += sb, c += sc, d += sd)
        dw_weave(dw_xor(dw_load_some(a, n), flip), dw_xor(dw_load_some(b, n), flip),
                 dw_xor(dw_load_some(c, n), flip), dw_xor(dw_load_some(d, n), flip), v + i * all);
  }
}

/* Stores n of 16 results. */
static inline void dw_put(int8_t* to, dw_bytes bytes, trv_dim n) {
  if (n == TRVK_QDW_LANES)
    dw_store16(to, bytes);
  else
    dw_store_some(to, bytes, n);
}

/* Four vectors of sums at a time: two rows of two outputs, or one of four. quads, kernel, rows and
 * n (channels) are constants where this is inlined and it pays. The job's numbers are read before
 * the loop, since a store of bytes could change them. */
__attribute__((always_inline)) static inline void dw_outputs(const trvk_qdw_job* job, int quads,
                                                             int kernel, int rows, trv_dim n) {
  enum { MOST = 4 };
  const int across = MOST / rows;
  const trv_dim all = (trv_dim)quads * DW_BYTES, tap = job->dilation * all,
                move = job->stride * all, count = job->count, y_step = job->y_step;
  dw_vec bias[DW_HALVES], m[DW_HALVES], odd[DW_HALVES], half[DW_HALVES], down[DW_HALVES];
  for (int h = 0; h < DW_HALVES; h++) {
    bias[h] = dw_load(job->bias + h * TRVV_N);
    m[h] = dw_load(job->m + h * TRVV_N);
    odd[h] = dw_load(job->m + h * TRVV_N + 1);
    half[h] = dw_load(job->half + h * TRVV_N);
    down[h] = dw_load(job->down + h * TRVV_N);
  }
  const dw_vec zero = dw_set1_16((short)job->y_zero), lo = dw_set1_8((char)job->y_lo),
               hi = dw_set1_8((char)job->y_hi);
  const uint8_t *const weights = job->w, *const columns = job->v;
  int32_t* const sums = job->sums;
  int8_t *const y0 = job->y[0], *const y1 = job->y[1];
  const int two = rows > 1 && job->out_rows > 1;
  for (trv_dim o = 0; o < count; o += across) {
    dw_vec s[MOST][DW_HALVES]; /* [row][output] */
    trv_dim at[MOST];          /* outputs; beyond the end the last one again */
    for (int i = 0; i < across; i++) at[i] = o + i < count ? o + i : count - 1;
    for (int i = 0; i < MOST; i++)
      for (int h = 0; h < DW_HALVES; h++) s[i][h] = bias[h];
    const uint8_t* w = weights;
    for (int q = 0; q < quads; q++)
      for (int k = 0; k < kernel; k++, w += rows * DW_BYTES)
        for (int i = 0; i < across; i++)
          for (int e = 0; e < DW_SET; e++) {
            const dw_vec x =
                dw_load(columns + at[i] * move + q * DW_BYTES + k * tap + e * TRVV_N * 4);
            for (int r = 0; r < rows; r++)
              s[r * across + i][e / DW_PARTS] = dw_dot(s[r * across + i][e / DW_PARTS], x,
                                                       dw_load(w + r * DW_BYTES + e * TRVV_N * 4));
          }
    if (sums) {
      for (int r = 0; r < rows; r++)
        for (int i = 0; i < across; i++)
          for (int h = 0; h < DW_HALVES; h++)
            dw_store(sums + (r * count + at[i]) * TRVK_QDW_LANES + h * TRVV_N,
                     s[r * across + i][h]);
      continue;
    }
    for (int i = 0; i < MOST; i++)
      for (int h = 0; h < DW_HALVES; h++)
        s[i][h] = dw_rescale(s[i][h], m[h], odd[h], half[h], down[h]);
    dw_bytes y[MOST];
    dw_results(s, zero, lo, hi, y);
    for (int i = 0; i < across; i++) dw_put(y0 + at[i] * y_step, y[i], n);
    if (two)
      for (int i = 0; i < across; i++) dw_put(y1 + at[i] * y_step, y[across + i], n);
  }
}

static void dw_run(const trvk_qdw_job* job) {
  dw_columns(job);
  const int quads = job->quads, kernel = job->kernel, rows = job->rows;
  if (job->channels < TRVK_QDW_LANES)
    dw_outputs(job, quads, kernel, rows, job->channels);
  else if (quads == 1 && kernel == 3 && rows == 2)
    dw_outputs(job, 1, 3, 2, TRVK_QDW_LANES);
  else if (quads == 1 && kernel == 3)
    dw_outputs(job, 1, 3, 1, TRVK_QDW_LANES);
  else if (quads == 2 && kernel == 5 && rows == 2)
    dw_outputs(job, 2, 5, 2, TRVK_QDW_LANES);
  else if (quads == 2 && kernel == 5)
    dw_outputs(job, 2, 5, 1, TRVK_QDW_LANES);
  else if (rows == 2)
    dw_outputs(job, quads, kernel, 2, TRVK_QDW_LANES);
  else
    dw_outputs(job, quads, kernel, 1, TRVK_QDW_LANES);
}

static const trvk_qdw qdw = {DW_BYTES, DW_OFFSET, dw_weights, dw_run};
static void q_depthwise(const trvk_qconv* q, trvk_qout* out, int32_t x_zero, uint32_t tile) {
  trvk_qdw_run(q, out, x_zero, tile, &qdw);
}
