/* qbytes_tiles.h - the tile of bytes of qgemm.h, by dot products of unsigned with signed bytes
 * (vpdpbusd) in vectors of TRVV_N sums. Included by files that set the target.
 *
 * A is broadcast four numbers at a time from where it lies and made unsigned by flipping its top
 * bit, which adds 128; B is signed as it is. The instruction does not saturate: sums wrap.
 */
#include <immintrin.h>

#include "qgemm.h"
#include "vec.h"

#if TRVV_N == 16
typedef __m512i bvec;
enum { B_PARTS = 1, B_MR = 12, B_NP = 2 }; /* vectors of a panel, rows and panels at a time */
static inline bvec b_zero(void) { return _mm512_setzero_si512(); }
static inline bvec b_load(const void* p) { return _mm512_loadu_si512(p); }
static inline void b_store(void* p, bvec v) { _mm512_storeu_si512(p, v); }
static inline bvec b_set(int32_t v) { return _mm512_set1_epi32(v); }
static inline bvec b_xor(bvec a, bvec b) { return _mm512_xor_si512(a, b); }
static inline bvec b_add(bvec a, bvec b) { return _mm512_add_epi32(a, b); }
static inline bvec b_dot(bvec s, bvec a, bvec b) { return _mm512_dpbusd_epi32(s, a, b); }
#else
typedef __m256i bvec;
enum { B_PARTS = 2, B_MR = 6, B_NP = 1 };
static inline bvec b_zero(void) { return _mm256_setzero_si256(); }
static inline bvec b_load(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
static inline void b_store(void* p, bvec v) { _mm256_storeu_si256((__m256i*)p, v); }
static inline bvec b_set(int32_t v) { return _mm256_set1_epi32(v); }
static inline bvec b_xor(bvec a, bvec b) { return _mm256_xor_si256(a, b); }
static inline bvec b_add(bvec a, bvec b) { return _mm256_add_epi32(a, b); }
#if !defined(TRVQ_EVEX) /* the encoding; the same numbers */
static inline bvec b_dot(bvec s, bvec a, bvec b) { return _mm256_dpbusd_avx_epi32(s, a, b); }
#else
static inline bvec b_dot(bvec s, bvec a, bvec b) { return _mm256_dpbusd_epi32(s, a, b); }
#endif
#endif
#define B_INLINE __attribute__((always_inline)) static inline

static inline int32_t b_word(const uint8_t* p) {
  int32_t v;
  memcpy(&v, p, sizeof v);
  return v;
}

/* rows and panels are constants where this is inlined; chains: sums of one row and vector that run
 * side by side, where there are too few to hide the instruction's latency. */
B_INLINE void b_block(const trvk_qtile* t, int m0, int rows, int p0, int panels, int chains) {
  const int parts = panels * B_PARTS;
  const bvec top = b_set((int32_t)0x80808080u);
  bvec s[B_MR][B_NP * B_PARTS], more[3][B_NP * B_PARTS];
  int32_t* c = t->c + m0 * t->c_row + p0 * TRVK_PANEL;
  for (int m = 0; m < rows; m++)
    for (int i = 0; i < parts; i++)
      s[m][i] = t->first ? b_load(t->first + p0 * TRVK_PANEL + i * TRVV_N)
                         : b_load(c + m * t->c_row + i * TRVV_N);
  for (int x = 0; x < chains - 1; x++)
    for (int i = 0; i < parts; i++) more[x][i] = b_zero();
  for (trv_dim tap = 0; tap < t->taps; tap++) {
    const uint8_t* a[B_MR];
    const int8_t* b[B_NP];
    for (int m = 0; m < rows; m++)
      a[m] = (const uint8_t*)t->rows[tap * t->row_step + m0 + m] + t->a_off;
    for (int p = 0; p < panels; p++) b[p] = t->b[tap] + (p0 + p) * t->b_panel;
    trv_dim q = 0;
    if (chains > 1)
      for (; q + chains <= t->quads; q += chains)
        for (int x = 0; x < chains; x++) {
          const bvec v = b_xor(b_set(b_word(a[0] + 4 * (q + x))), top);
          for (int i = 0; i < parts; i++) {
            const bvec w = b_load(b[i / B_PARTS] + 64 * (q + x) + i % B_PARTS * 32);
            if (x == 0)
              s[0][i] = b_dot(s[0][i], v, w);
            else
              more[x - 1][i] = b_dot(more[x - 1][i], v, w);
          }
        }
    for (; q < t->quads; q++) {
      bvec w[B_NP * B_PARTS];
      for (int i = 0; i < parts; i++) w[i] = b_load(b[i / B_PARTS] + 64 * q + i % B_PARTS * 32);
      for (int m = 0; m < rows; m++) {
        const bvec v = b_xor(b_set(b_word(a[m] + 4 * q)), top);
        for (int i = 0; i < parts; i++) s[m][i] = b_dot(s[m][i], v, w[i]);
      }
    }
  }
  for (int x = 0; x < chains - 1; x++)
    for (int i = 0; i < parts; i++) s[0][i] = b_add(s[0][i], more[x][i]);
  for (int m = 0; m < rows; m++)
    for (int i = 0; i < parts; i++) b_store(c + m * t->c_row + i * TRVV_N, s[m][i]);
}

#define B_CASE(n)                                     \
  case n:                                             \
    b_block(t, m, n, p, B_NP, n == 1 ? 4 / B_NP : 1); \
    break;
#define B_CASE1(n)                          \
  case n:                                   \
    b_block(t, m, n, p, 1, n == 1 ? 4 : 1); \
    break;
#if TRVV_N == 16
#define B_EACH(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12)
#else
#define B_EACH(X) X(1) X(2) X(3) X(4) X(5) X(6)
#endif

static void q_bytes(const trvk_qtile* t, int rows, int panels) {
  for (int p = 0; p < panels; p += B_NP)
    for (int m = 0; m < rows; m += B_MR) {
      const int run = rows - m < B_MR ? rows - m : B_MR;
#if TRVV_N == 16
      if (panels - p >= B_NP) {
        switch (run) { B_EACH(B_CASE) }
        continue;
      }
#endif
      switch (run) { B_EACH(B_CASE1) }
    }
}

/* The sums of 16 columns of [quads][16][4]. */
static void q_sums(const int8_t* b, trv_dim quads, int32_t* sums) {
  const bvec ones = b_set(0x01010101);
  for (int i = 0; i < B_PARTS; i++, b += 32, sums += TRVV_N) {
    bvec s = b_load(sums);
    for (trv_dim q = 0; q < quads; q++) s = b_dot(s, ones, b_load(b + 64 * q));
    b_store(sums, s);
  }
}

/* Eight sums of four numbers of 32. */
static inline __m256i b_fours(const int8_t* a) {
  const __m256i v = _mm256_loadu_si256((const __m256i*)(const void*)a);
#if TRVV_N == 16 || defined(TRVQ_EVEX)
  return _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), v);
#else
  return _mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), v);
#endif
}
static void q_group_sums(const int8_t* a, trv_dim n, trv_dim group, int32_t* to) {
  for (trv_dim i = 0; i < n; to++) {
    const trv_dim end = n - i < group ? n : i + group;
    __m256i s = _mm256_setzero_si256();
    for (; i + 32 <= end; i += 32) s = _mm256_add_epi32(s, b_fours(a + i));
    __m128i t = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
    t = _mm_add_epi32(t, _mm_shuffle_epi32(t, 0x4E));
    int32_t sum = _mm_cvtsi128_si32(_mm_add_epi32(t, _mm_shuffle_epi32(t, 0xB1)));
    for (; i < end; i++) sum += a[i];
    *to = sum;
  }
}

/* ---- 4 bits: nibbles are the unsigned side, rows the signed one ---- */
#if TRVV_N == 16
enum { N_MR = 3, N_NP = 2 };
typedef __m512 bfloat;
static inline bfloat b_floats(const uint8_t* p, trv_dim at, int half, trv_dim n) {
  const __mmask16 in = n >= 16 ? (__mmask16)0xFFFF : (__mmask16)((1u << n) - 1u);
  return half ? _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(in, p + 2 * at))
              : _mm512_maskz_loadu_ps(in, p + 4 * at);
}
static inline bfloat b_real(bvec v) { return _mm512_cvtepi32_ps(v); }
static inline bfloat b_fset(float v) { return _mm512_set1_ps(v); }
static inline bfloat b_fmul(bfloat a, bfloat b) { return _mm512_mul_ps(a, b); }
static inline bfloat b_fadd(bfloat a, bfloat b) { return _mm512_add_ps(a, b); }
static inline void b_fstore(float* p, bfloat v) { _mm512_storeu_ps(p, v); }
static inline bvec b_and(bvec a, bvec b) { return _mm512_and_si512(a, b); }
static inline bvec b_down(bvec a) { return _mm512_srli_epi16(a, 4); }
static inline bvec b_bytes(bvec a, bvec b) { return _mm512_add_epi8(a, b); }
static inline bvec b_less(bvec a, bvec b, bvec c) {
  return _mm512_sub_epi32(a, _mm512_mullo_epi32(b, c));
}
#else
enum { N_MR = 2, N_NP = 1 };
typedef __m256 bfloat;
static inline bfloat b_floats(const uint8_t* p, trv_dim at, int half, trv_dim n) {
  float all[8];
  if (n < 8) { /* one by one: what follows may be the end of memory */
    for (trv_dim i = 0; i < 8; i++) {
      uint16_t h = 0;
      all[i] = 0;
      if (i < n && half) {
        memcpy(&h, p + 2 * (at + i), sizeof h);
        all[i] = trvk_f16_to_f32(h);
      } else if (i < n) {
        memcpy(&all[i], p + 4 * (at + i), sizeof all[i]);
      }
    }
    return _mm256_loadu_ps(all);
  }
  return half ? _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(const void*)(p + 2 * at)))
              : _mm256_loadu_ps((const float*)(const void*)(p + 4 * at));
}
static inline bfloat b_real(bvec v) { return _mm256_cvtepi32_ps(v); }
static inline bfloat b_fset(float v) { return _mm256_set1_ps(v); }
static inline bfloat b_fmul(bfloat a, bfloat b) { return _mm256_mul_ps(a, b); }
static inline bfloat b_fadd(bfloat a, bfloat b) { return _mm256_add_ps(a, b); }
static inline void b_fstore(float* p, bfloat v) { _mm256_storeu_ps(p, v); }
static inline bvec b_and(bvec a, bvec b) { return _mm256_and_si256(a, b); }
static inline bvec b_down(bvec a) { return _mm256_srli_epi16(a, 4); }
static inline bvec b_bytes(bvec a, bvec b) { return _mm256_add_epi8(a, b); }
static inline bvec b_less(bvec a, bvec b, bvec c) {
  return _mm256_sub_epi32(a, _mm256_mullo_epi32(b, c));
}
#endif

/* One row alone waits for memory: what is asked for in front, in bytes. */
#ifndef B_AHEAD
#define B_AHEAD 8192
#endif

static inline int32_t b_at(const int8_t* row, trv_dim at, trv_dim i) {
  return b_word((const uint8_t*)row + at + 4 * i);
}

B_INLINE void b_nibbles(const trvk_qnibbles* t, int m0, int rows, int p0, int panels) {
  const int parts = panels * B_PARTS;
  const bvec low = b_set(0x0F0F0F0F), ones = b_set(0x01010101);
  const int8_t* a[N_MR];
  const uint8_t* b[N_NP * B_PARTS];
  trv_dim left[N_NP * B_PARTS];
  bfloat total[N_MR][N_NP * B_PARTS];
  TRVV_UNROLL for (int i = 0; i < parts; i++) {
    b[i] = t->b + (p0 + i / B_PARTS) * t->b_panel + i % B_PARTS * 32;
    left[i] = t->n - p0 * TRVK_PANEL - i * TRVV_N;
    if (left[i] < 0) left[i] = 0;
  }
  TRVV_UNROLL for (int m = 0; m < rows; m++) {
    a[m] = t->rows[m0 + m];
    TRVV_UNROLL for (int i = 0; i < parts; i++) total[m][i] = b_fset(0.0f);
  }
  for (trv_dim o = 0, g = 0; o < t->octets; g++) {
    const trv_dim from = o, end = t->octets - o < t->group ? t->octets : o + t->group;
    bvec s[N_MR][N_NP * B_PARTS];
    TRVV_UNROLL for (int m = 0; m < rows; m++) {
      const bvec start = b_set(b_at(a[m], t->start_at, g));
      TRVV_UNROLL for (int i = 0; i < parts; i++) s[m][i] = start;
    }
    for (; o < end; o++) {
      bvec lo[N_NP * B_PARTS], hi[N_NP * B_PARTS];
      TRVV_UNROLL for (int i = 0; i < parts; i++) {
        const bvec w = b_load(b[i] + 64 * o);
        if (rows == 1) _mm_prefetch((const char*)b[i] + 64 * o + B_AHEAD, _MM_HINT_T0);
        lo[i] = b_and(w, low);
        hi[i] = b_and(b_down(w), low);
      }
      TRVV_UNROLL for (int m = 0; m < rows; m++) {
        const bvec v = b_set(b_word((const uint8_t*)a[m] + 8 * o)),
                   w = b_set(b_word((const uint8_t*)a[m] + 8 * o + 4));
        TRVV_UNROLL for (int i = 0; i < parts; i++) s[m][i] =
            b_dot(b_dot(s[m][i], lo[i], v), hi[i], w);
      }
    }
    TRVV_UNROLL for (int i = 0; i < parts; i++) {
      const trv_dim col = p0 * TRVK_PANEL + i * TRVV_N;
      if (rows == 1 &&
          i % B_PARTS == 0) /* of the next strip: too far apart for the machine to guess */
        _mm_prefetch((const char*)t->scale + g * t->scale_row +
                         (col + TRVK_QT_STRIP) * (t->scale_half ? 2 : 4),
                     _MM_HINT_T0);
      const bfloat scale = b_floats(t->scale + g * t->scale_row, col, t->scale_half, left[i]);
      if (t->zero) {
        bvec sum = b_zero();
        for (trv_dim x = from; x < end; x++) {
          const bvec w = b_load(b[i] + 64 * x);
          sum = b_dot(sum, b_bytes(b_and(w, low), b_and(b_down(w), low)), ones);
        }
        TRVV_UNROLL for (int m = 0; m < rows; m++) s[m][i] =
            b_less(s[m][i], sum, b_set(t->zero[m0 + m]));
      }
      TRVV_UNROLL for (int m = 0; m < rows; m++) total[m][i] =
          b_fadd(total[m][i], b_fmul(b_real(s[m][i]), scale));
      if (t->offset) {
        const bfloat more = b_floats(t->offset + g * t->offset_row, col, t->offset_half, left[i]);
        TRVV_UNROLL for (int m = 0; m < rows; m++) total[m][i] =
            b_fadd(total[m][i], b_fmul(b_fset((float)b_at(a[m], t->sum_at, g)), more));
      }
    }
  }
  TRVV_UNROLL for (int m = 0; m < rows; m++) TRVV_UNROLL for (int i = 0; i < parts; i++)
      b_fstore(t->t + (m0 + m) * t->t_row + p0 * TRVK_PANEL + i * TRVV_N, total[m][i]);
}

#define N_CASE(n)                \
  case n:                        \
    b_nibbles(t, m, n, p, N_NP); \
    break;
#define N_CASE1(n)            \
  case n:                     \
    b_nibbles(t, m, n, p, 1); \
    break;
#if TRVV_N == 16
#define N_EACH(X) X(1) X(2) X(3)
#else
#define N_EACH(X) X(1) X(2)
#endif

static void q_nibbles(const trvk_qnibbles* t, int rows, int panels) {
  for (int p = 0; p < panels; p += N_NP)
    for (int m = 0; m < rows; m += N_MR) {
      const int run = rows - m < N_MR ? rows - m : N_MR;
#if TRVV_N == 16
      if (panels - p >= N_NP) {
        switch (run) { N_EACH(N_CASE) }
        continue;
      }
#endif
      switch (run) { N_EACH(N_CASE1) }
    }
}
