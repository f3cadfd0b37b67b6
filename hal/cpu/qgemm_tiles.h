/* qgemm_tiles.h - the tile of qgemm.h in vectors of TRVV_N 32-bit numbers. Included by
 * qgemm_<isa>.c, which set the target.
 *
 * B is widened to i16 once for all rows; a pair of products adds up in one 32-bit number, so a
 * column has two sums that lie together until the end. The same numbers as the plain tile: 32-bit
 * sums wrap.
 */
#include <immintrin.h>

#include "qgemm.h"

#if TRVV_N == 16
typedef __m512i qvec;
enum { Q_PARTS = 2, Q_MR = 6 }; /* vectors of a panel, rows at a time */
static inline qvec q_zero(void) { return _mm512_setzero_si512(); }
static inline qvec q_widen(const int8_t* b) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)(const void*)b));
}
static inline qvec q_four(const int16_t* a) {
  long long v;
  memcpy(&v, a, sizeof v);
  return _mm512_set1_epi64(v);
}
static inline qvec q_madd(qvec s, qvec a, qvec b) {
#if defined(TRVQ_DOT)
  return _mm512_dpwssd_epi32(s, a, b);
#else
  return _mm512_add_epi32(s, _mm512_madd_epi16(a, b));
#endif
}
static inline void q_finish(int32_t* c, const qvec* s) {
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0),
                odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  const __m512i sum = _mm512_add_epi32(_mm512_permutex2var_epi32(s[0], even, s[1]),
                                       _mm512_permutex2var_epi32(s[0], odd, s[1]));
  _mm512_storeu_si512(c, _mm512_add_epi32(_mm512_loadu_si512(c), sum));
}
#else
typedef __m256i qvec;
enum { Q_PARTS = 4, Q_MR = 2 };
static inline qvec q_zero(void) { return _mm256_setzero_si256(); }
static inline qvec q_widen(const int8_t* b) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(const void*)b));
}
static inline qvec q_four(const int16_t* a) {
  long long v;
  memcpy(&v, a, sizeof v);
  return _mm256_set1_epi64x(v);
}
static inline qvec q_madd(qvec s, qvec a, qvec b) {
#if defined(TRVQ_EVEX)
  return _mm256_dpwssd_epi32(s, a, b);
#elif defined(TRVQ_DOT)
  return _mm256_dpwssd_avx_epi32(s, a, b);
#else
  return _mm256_add_epi32(s, _mm256_madd_epi16(a, b));
#endif
}
static inline void q_finish(int32_t* c, const qvec* s) {
  for (int i = 0; i < Q_PARTS; i += 2, c += 8) {
    /* hadd works on halves: columns 0 1 4 5 and 2 3 6 7 */
    const __m256i sum = _mm256_permute4x64_epi64(_mm256_hadd_epi32(s[i], s[i + 1]), 0xD8);
    __m256i* to = (__m256i*)(void*)c;
    _mm256_storeu_si256(to, _mm256_add_epi32(_mm256_loadu_si256(to), sum));
  }
}
#endif

/* rows is a constant where this is inlined. */
__attribute__((always_inline)) static inline void q_rows(const void* const* rows_of, trv_dim a_off,
                                                         int rows, const int8_t* b, trv_dim quads,
                                                         int32_t* c, trv_dim c_row) {
  qvec s[Q_MR][Q_PARTS];
  const int16_t* a[Q_MR];
  for (int m = 0; m < rows; m++) {
    a[m] = (const int16_t*)(const void*)((const uint8_t*)rows_of[m] + a_off);
    for (int i = 0; i < Q_PARTS; i++) s[m][i] = q_zero();
  }
  for (trv_dim q = 0; q < quads; q++, b += 64) {
    qvec w[Q_PARTS];
    for (int i = 0; i < Q_PARTS; i++) w[i] = q_widen(b + 64 / Q_PARTS * i);
    for (int m = 0; m < rows; m++) {
      const qvec x = q_four(a[m] + 4 * q);
      for (int i = 0; i < Q_PARTS; i++) s[m][i] = q_madd(s[m][i], x, w[i]);
    }
  }
  for (int m = 0; m < rows; m++) q_finish(c + m * c_row, s[m]);
}

static void q_words(const trvk_qtile* t, int rows, int panels) {
  trvk_qtile_start(t, rows, panels);
  for (trv_dim tap = 0; tap < t->taps; tap++)
    for (int p = 0; p < panels; p++) {
      const void* const* a = t->rows + tap * t->row_step;
      const int8_t* b = t->b[tap] + p * t->b_panel;
      int32_t* c = t->c + p * TRVK_PANEL;
      int m = 0;
      for (; m + Q_MR <= rows; m += Q_MR)
        q_rows(a + m, t->a_off, Q_MR, b, t->quads, c + m * t->c_row, t->c_row);
      for (; m < rows; m++) q_rows(a + m, t->a_off, 1, b, t->quads, c + m * t->c_row, t->c_row);
    }
}

#if !defined(TRVQ_DOT)
static void q_sums(const int8_t* b, trv_dim quads, int32_t* sums) {
  for (trv_dim q = 0; q < quads; q++, b += 4 * TRVK_PANEL)
    for (int j = 0; j < TRVK_PANEL; j++)
      sums[j] = trvk_add32(sums[j], b[4 * j] + b[4 * j + 1] + b[4 * j + 2] + b[4 * j + 3]);
}
static void q_group_sums(const int8_t* a, trv_dim n, trv_dim group, int32_t* to) {
  for (trv_dim i = 0; i < n; to++) {
    const trv_dim end = n - i < group ? n : i + group;
    int32_t sum = 0;
    for (; i < end; i++) sum += a[i];
    *to = sum;
  }
}
#endif
