/* qgemm.c - a block of rows times a strip of columns, chunk by chunk along K; the tile for the
 * instruction set that the whole library is compiled for. */
#include "qgemm.h"

#if defined(__SSE2__) && !defined(TRVK_PLAIN_C)
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
static void two(const int16_t* a, trv_dim a_row, const int8_t* b, trv_dim quads, int32_t* c) {
  const int16_t* a1 = a + a_row;
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
  for (int m = 0; m < 2; m++, c += TRVK_PANEL) {
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

static void tile(const int16_t* a, trv_dim a_row, trv_dim rows, const int8_t* b, trv_dim quads,
                 int32_t* c) {
  for (; rows >= 2; rows -= 2, a += 2 * a_row, c += 2 * TRVK_PANEL) {
    two(a, a_row, b, quads, c);
    two(a, a_row, b + 32, quads, c + 8);
  }
  if (rows) one(a, b, quads, c);
}
#else
static void tile(const int16_t* a, trv_dim a_row, trv_dim rows, const int8_t* b, trv_dim quads,
                 int32_t* c) {
  for (; rows > 0; rows--, a += a_row, c += TRVK_PANEL) {
    const int8_t* w = b;
    for (trv_dim q = 0; q < quads; q++, w += 64) {
      const int32_t a0 = a[4 * q], a1 = a[4 * q + 1], a2 = a[4 * q + 2], a3 = a[4 * q + 3];
      for (int j = 0; j < TRVK_PANEL; j++)
        c[j] = trvk_add32(
            c[j], a0 * w[4 * j] + a1 * w[4 * j + 1] + a2 * w[4 * j + 2] + a3 * w[4 * j + 3]);
    }
  }
}
#endif

const trvk_qgemm trvk_qgemm_ref = {tile};

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

/* Adds up kc numbers of each row; TRVK_Q_A of 16 bits fit 32. */
static void add_rows(trvk_qblock* s, const int16_t* a, trv_dim a_row, trv_dim kc) {
  for (trv_dim m = 0; m < s->count; m++, a += a_row) {
    int32_t sum = 0;
    for (trv_dim i = 0; i < kc; i++) sum += a[i];
    s->sum[m] = trvk_add64(s->sum[m], sum);
  }
}

void trvk_qblock_run(trvk_qblock* s, trv_dim col, trv_dim n) {
  const trv_dim panels = trvk_panels(n), most = TRVK_Q_A / s->count / 16 * 16;
  for (trv_dim p = 0; p < panels; p++) {
    memset(s->acc[p], 0, (size_t)s->count * sizeof s->acc[p][0]);
    if (s->flush) memset(s->u.wide[p], 0, (size_t)s->count * sizeof s->u.wide[p][0]);
    if (s->flush) memset(s->u.real[p], 0, (size_t)s->count * sizeof s->u.real[p][0]);
  }
  memset(s->sum, 0, sizeof s->sum);
  for (trv_dim k0 = 0; k0 < s->k; k0 += most) {
    const trv_dim kc = s->k - k0 < most ? s->k - k0 : most, a_row = trvk_round4(kc);
    if (!s->filled) s->gather(s, k0, kc, s->a);
    s->filled = kc == s->k;
    for (trv_dim at = 0, run; at < kc; at += run) {
      run = kc - at < s->chunk ? kc - at : s->chunk;
      if (s->period) {
        const trv_dim into = (k0 + at) % s->period;
        if (run > s->period - into) run = s->period - into;
        if (into == 0) memset(s->sum, 0, sizeof s->sum);
      }
      const trv_dim quads = (run + 3) / 4;
      if (s->sums) add_rows(s, s->a + at, a_row, run);
      for (trv_dim p = 0; p < panels; p++) {
        const trv_dim c = col + p * TRVK_PANEL, left = n - p * TRVK_PANEL;
        const int8_t* b = s->panel(s, k0 + at, run, c, left < TRVK_PANEL ? left : TRVK_PANEL);
        s->g->tile(s->a + at, a_row, s->count, b, quads, s->acc[p][0]);
        if (s->flush)
          s->flush(s, p, c, left < TRVK_PANEL ? left : TRVK_PANEL, k0 + at + run, b, quads);
      }
    }
  }
}

void trvk_qblock_widen(trvk_qblock* s, int32_t a_zero, trv_dim p, const int8_t* b, trv_dim quads) {
  int64_t less[TRVK_PANEL] = {0};
  if (a_zero != 0)
    for (trv_dim q = 0; q < quads; q++, b += 64)
      for (int j = 0; j < TRVK_PANEL; j++)
        less[j] += a_zero * (b[4 * j] + b[4 * j + 1] + b[4 * j + 2] + b[4 * j + 3]);
  for (trv_dim m = 0; m < s->count; m++)
    for (int j = 0; j < TRVK_PANEL; j++) {
      s->u.wide[p][m][j] = trvk_add64(s->u.wide[p][m][j], s->acc[p][m][j] - less[j]);
      s->acc[p][m][j] = 0;
    }
}
