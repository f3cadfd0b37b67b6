/* qgemm.c - the tile and its rows for the instruction set that the whole library is compiled for.
 */
#include "qgemm.h"

#if defined(__aarch64__) && defined(__GNUC__) && !defined(TRVK_PLAIN_C)
#include "qarm.h"
#define words q_words
#elif defined(__SSE2__) && !defined(TRVK_PLAIN_C)
#include <emmintrin.h>

/* 8 numbers of i8, the low or the high ones, as i16. */
static inline __m128i low(__m128i v) { return _mm_srai_epi16(_mm_unpacklo_epi8(v, v), 8); }
static inline __m128i high(__m128i v) { return _mm_srai_epi16(_mm_unpackhi_epi8(v, v), 8); }
/* Four numbers of a row, twice. */
static inline __m128i four(const int16_t* a) {
  return _mm_shuffle_epi32(_mm_loadl_epi64((const __m128i*)(const void*)a), 0x44);
}
static inline __m128i load(const void* p) { return _mm_loadu_si128((const __m128i*)p); }
static inline __m128i madd(__m128i sum, __m128i a, __m128i b) {
  return _mm_add_epi32(sum, _mm_madd_epi16(a, b));
}
/* Each column has two sums that lie together: u has columns 0 and 1, v 2 and 3. */
static inline void finish(int32_t* c, __m128i u, __m128i v) {
  const __m128 x = _mm_castsi128_ps(u), y = _mm_castsi128_ps(v);
  const __m128i even = _mm_castps_si128(_mm_shuffle_ps(x, y, 0x88)),
                odd = _mm_castps_si128(_mm_shuffle_ps(x, y, 0xDD));
  _mm_storeu_si128((__m128i*)(void*)c, _mm_add_epi32(load(c), _mm_add_epi32(even, odd)));
}

/* Two rows, 8 columns: 8 sums, 4 vectors of B and 2 of A in registers. */
static void two(const int16_t* a, const int16_t* a1, const int8_t* b, trv_dim quads, int32_t* c,
                trv_dim c_row) {
  __m128i s[2][4];
  for (int i = 0; i < 4; i++) s[0][i] = s[1][i] = _mm_setzero_si128();
  for (trv_dim q = 0; q < quads; q++, a += 4, a1 += 4, b += 64) {
    const __m128i v = load(b), w = load(b + 16), x = four(a), y = four(a1);
    const __m128i b0 = low(v), b1 = high(v), b2 = low(w), b3 = high(w);
    s[0][0] = madd(s[0][0], x, b0);
    s[0][1] = madd(s[0][1], x, b1);
    s[0][2] = madd(s[0][2], x, b2);
    s[0][3] = madd(s[0][3], x, b3);
    s[1][0] = madd(s[1][0], y, b0);
    s[1][1] = madd(s[1][1], y, b1);
    s[1][2] = madd(s[1][2], y, b2);
    s[1][3] = madd(s[1][3], y, b3);
  }
  for (int m = 0; m < 2; m++, c += c_row) {
    finish(c, s[m][0], s[m][1]);
    finish(c + 4, s[m][2], s[m][3]);
  }
}

/* One row, 16 columns: B is read once, in order. */
static void one(const int16_t* a, const int8_t* b, trv_dim quads, int32_t* c) {
  __m128i s[8];
  for (int i = 0; i < 8; i++) s[i] = _mm_setzero_si128();
  for (trv_dim q = 0; q < quads; q++, a += 4, b += 64) {
    const __m128i x = four(a), v0 = load(b), v1 = load(b + 16), v2 = load(b + 32),
                  v3 = load(b + 48);
    s[0] = madd(s[0], x, low(v0));
    s[1] = madd(s[1], x, high(v0));
    s[2] = madd(s[2], x, low(v1));
    s[3] = madd(s[3], x, high(v1));
    s[4] = madd(s[4], x, low(v2));
    s[5] = madd(s[5], x, high(v2));
    s[6] = madd(s[6], x, low(v3));
    s[7] = madd(s[7], x, high(v3));
  }
  for (int i = 0; i < 4; i++) finish(c + 4 * i, s[2 * i], s[2 * i + 1]);
}

static void pair(const int16_t* a, const int16_t* a1, const int8_t* b, trv_dim quads, int32_t* c,
                 trv_dim c_row) {
  two(a, a1, b, quads, c, c_row);
  two(a, a1, b + 32, quads, c + 8, c_row);
}
#else
static void one(const int16_t* a, const int8_t* b, trv_dim quads, int32_t* c) {
  for (trv_dim q = 0; q < quads; q++, a += 4, b += 64)
    for (int j = 0; j < TRVK_PANEL; j++) {
      const int8_t* w = b + 4 * j;
      c[j] = trvk_add32(c[j], a[0] * w[0] + a[1] * w[1] + a[2] * w[2] + a[3] * w[3]);
    }
}
static void pair(const int16_t* a, const int16_t* a1, const int8_t* b, trv_dim quads, int32_t* c,
                 trv_dim c_row) {
  one(a, b, quads, c);
  one(a1, b, quads, c + c_row);
}
#endif

#if !defined(words)
static void words(const trvk_qtile* t, int rows, int panels) {
  trvk_qtile_start(t, rows, panels);
  for (trv_dim tap = 0; tap < t->taps; tap++)
    for (int p = 0; p < panels; p++) {
      const int8_t* b = t->b[tap] + p * t->b_panel;
      const int16_t* a[2];
      int32_t* c = t->c + p * TRVK_PANEL;
      for (int m = 0, run; m < rows; m += run, c += run * t->c_row) {
        run = rows - m < 2 ? 1 : 2;
        for (int i = 0; i < run; i++)
          a[i] = (const int16_t*)(const void*)((const uint8_t*)t->rows[tap * t->row_step + m + i] +
                                               t->a_off);
        if (run == 2)
          pair(a[0], a[1], b, t->quads, c, t->c_row);
        else
          one(a[0], b, t->quads, c);
      }
    }
}
#endif

#include "qrows.inc"

static void sums(const int8_t* b, trv_dim quads, int32_t* to) {
  for (trv_dim q = 0; q < quads; q++, b += 4 * TRVK_PANEL)
    for (int j = 0; j < TRVK_PANEL; j++)
      to[j] = trvk_add32(to[j], b[4 * j] + b[4 * j + 1] + b[4 * j + 2] + b[4 * j + 3]);
}

static void group_sums(const int8_t* a, trv_dim n, trv_dim group, int32_t* to) {
  for (trv_dim i = 0; i < n; to++) {
    const trv_dim end = n - i < group ? n : i + group;
    int32_t sum = 0;
    for (; i < end; i++) sum += a[i];
    *to = sum;
  }
}

const trvk_qgemm trvk_qgemm_ref = {words,      NULL,  NULL,   NULL,    0,           sums,
                                   group_sums, q_out, q_real, q_range, q_quantise8, q_quantise16};

void trvk_q_row(int16_t* dst, const uint8_t* src, uint32_t dtype, trv_dim step, trv_dim n,
                int32_t zero) {
  if (dtype == TRV_DTYPE_I8) {
    const int8_t* s = (const int8_t*)src;
    const int16_t z = (int16_t)zero;
    if (step == 1)
      for (trv_dim i = 0; i < n; i++) dst[i] = (int16_t)(s[i] - z);
    else
      for (trv_dim i = 0; i < n; i++) dst[i] = (int16_t)(s[i * step] - z);
  } else {
    const int16_t* s = (const int16_t*)(const void*)src;
    for (trv_dim i = 0; i < n; i++) dst[i] = s[i * step];
  }
}
