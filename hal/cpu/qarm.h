/* qarm.h - the tiles of qgemm.h for arm64: words by NEON, which every machine has, bytes and
 * nibbles by dot products (TRVQ_DOT) or by products of 2 x 8 with 8 x 2 matrices (TRVQ_MATRIX) of
 * signed bytes. Included by files that set the target. Sums wrap; the same numbers as the plain
 * tile.
 */
#ifndef TRVK_QARM_H
#define TRVK_QARM_H
#include <arm_neon.h>

#include "qgemm.h"

#define A_INLINE __attribute__((always_inline)) static inline
enum { A_MR = 6 }; /* rows at a time: with 16 columns 24 vectors of sums */

/* ---- words: 4 columns by the number of the row, a column of numbers of B at a time ---- */
enum { A_WORD_MR = 4 };
A_INLINE void a_words(const int16_t* const* a, trv_dim a_off, const int8_t* b, trv_dim quads,
                      int32_t* c, trv_dim c_row, const int rows) {
  int32x4_t s[A_WORD_MR][4];
  for (int m = 0; m < rows; m++)
    for (int j = 0; j < 4; j++) s[m][j] = vld1q_s32(c + m * c_row + 4 * j);
  for (trv_dim q = 0; q < quads; q++, b += 64, a_off += 4) {
    const int8x16x4_t w = vld4q_s8(b); /* number i of 16 columns */
    int16x4_t x[A_WORD_MR];
    for (int m = 0; m < rows; m++) x[m] = vld1_s16(a[m] + a_off);
#define A_STEP(i)                                                                       \
  {                                                                                     \
    const int16x8_t lo = vmovl_s8(vget_low_s8(w.val[i])), hi = vmovl_high_s8(w.val[i]); \
    for (int m = 0; m < rows; m++) {                                                    \
      s[m][0] = vmlal_lane_s16(s[m][0], vget_low_s16(lo), x[m], i);                     \
      s[m][1] = vmlal_high_lane_s16(s[m][1], lo, x[m], i);                              \
      s[m][2] = vmlal_lane_s16(s[m][2], vget_low_s16(hi), x[m], i);                     \
      s[m][3] = vmlal_high_lane_s16(s[m][3], hi, x[m], i);                              \
    }                                                                                   \
  }
    A_STEP(0) A_STEP(1) A_STEP(2) A_STEP(3)
#undef A_STEP
  }
  for (int m = 0; m < rows; m++)
    for (int j = 0; j < 4; j++) vst1q_s32(c + m * c_row + 4 * j, s[m][j]);
}

static void q_words(const trvk_qtile* t, int rows, int panels) {
  trvk_qtile_start(t, rows, panels);
  for (trv_dim tap = 0; tap < t->taps; tap++)
    for (int p = 0; p < panels; p++) {
      const int8_t* b = t->b[tap] + p * t->b_panel;
      for (int m = 0; m < rows; m += A_WORD_MR) {
        const int16_t* a[A_WORD_MR];
        const int run = rows - m < A_WORD_MR ? rows - m : A_WORD_MR;
        int32_t* c = t->c + m * t->c_row + p * TRVK_PANEL;
        for (int i = 0; i < run; i++)
          a[i] = (const int16_t*)(const void*)((const uint8_t*)t->rows[tap * t->row_step + m + i] +
                                               t->a_off);
        switch (run) {
          case 4:
            a_words(a, 0, b, t->quads, c, t->c_row, 4);
            break;
          case 3:
            a_words(a, 0, b, t->quads, c, t->c_row, 3);
            break;
          case 2:
            a_words(a, 0, b, t->quads, c, t->c_row, 2);
            break;
          default:
            a_words(a, 0, b, t->quads, c, t->c_row, 1);
        }
      }
    }
}

#if defined(TRVQ_DOT)
/* ---- bytes by dot products: four numbers of a row times four of each column ---- */
A_INLINE int8x16_t a_four(const int8_t* a) {
  int32_t v;
  memcpy(&v, a, sizeof v);
  return vreinterpretq_s8_s32(vdupq_n_s32(v));
}

/* One panel. Rows alone keep four sums of each column side by side, since one waits for another. */
A_INLINE void a_dots(const trvk_qtile* t, int m0, int p, const int rows) {
  const int chains = rows == 1 ? 4 : rows == 2 ? 2 : 1;
  int32x4_t s[A_MR][4], more[6][4];
  int32_t* c = t->c + m0 * t->c_row + p * TRVK_PANEL;
  for (int m = 0; m < rows; m++)
    for (int j = 0; j < 4; j++)
      s[m][j] = vld1q_s32(t->first ? t->first + p * TRVK_PANEL + 4 * j : c + m * t->c_row + 4 * j);
  for (int i = 0; i < rows * (chains - 1); i++)
    for (int j = 0; j < 4; j++) more[i][j] = vdupq_n_s32(0);
  for (trv_dim tap = 0; tap < t->taps; tap++) {
    const int8_t* b = t->b[tap] + p * t->b_panel;
    const int8_t* a[A_MR];
    for (int m = 0; m < rows; m++)
      a[m] = (const int8_t*)t->rows[tap * t->row_step + m0 + m] + t->a_off;
    trv_dim q = 0;
    for (; q + 4 <= t->quads; q += 4, b += 256) {
      int8x16_t x[A_MR];
      for (int m = 0; m < rows; m++) x[m] = vld1q_s8(a[m] + 4 * q);
      int8x16_t w = vld1q_s8(b), next; /* one ahead, for machines that run in order */
#define A_STEP(i)                                                                               \
  for (int j = 0; j < 4; j++) {                                                                 \
    next = i == 3 && j == 3 ? w : vld1q_s8(b + 64 * i + 16 * j + 16);                           \
    for (int m = 0; m < rows; m++) {                                                            \
      int32x4_t* to = i % chains == 0 ? &s[m][j] : &more[m * (chains - 1) + i % chains - 1][j]; \
      *to = vdotq_laneq_s32(*to, w, x[m], i);                                                   \
    }                                                                                           \
    w = next;                                                                                   \
  }
      A_STEP(0) A_STEP(1) A_STEP(2) A_STEP(3)
#undef A_STEP
    }
    for (; q < t->quads; q++, b += 64)
      for (int j = 0; j < 4; j++) {
        const int8x16_t w = vld1q_s8(b + 16 * j);
        for (int m = 0; m < rows; m++) s[m][j] = vdotq_s32(s[m][j], w, a_four(a[m] + 4 * q));
      }
  }
  for (int m = 0; m < rows; m++)
    for (int j = 0; j < 4; j++) {
      for (int i = 0; i < chains - 1; i++)
        s[m][j] = vaddq_s32(s[m][j], more[m * (chains - 1) + i][j]);
      vst1q_s32(c + m * t->c_row + 4 * j, s[m][j]);
    }
}

static void a_dot_rows(const trvk_qtile* t, int m, int rows, int p) {
  switch (rows) {
    case 1:
      a_dots(t, m, p, 1);
      break;
    case 2:
      a_dots(t, m, p, 2);
      break;
    case 3:
      a_dots(t, m, p, 3);
      break;
    case 4:
      a_dots(t, m, p, 4);
      break;
    case 5:
      a_dots(t, m, p, 5);
      break;
    default:
      a_dots(t, m, p, 6);
  }
}

/* ---- 4 bits: numbers 0 .. 15 are signed bytes as well ---- */
enum { A_NIBBLE_MR = 2 };
A_INLINE float32x4_t a_floats(const uint8_t* p, trv_dim at, int half, trv_dim n) {
  float all[4] = {0};
  if (n >= 4 && half) return vcvt_f32_f16(vld1_f16((const float16_t*)(const void*)(p + 2 * at)));
  if (n >= 4) return vld1q_f32((const float*)(const void*)(p + 4 * at));
  for (trv_dim i = 0; i < n; i++) { /* what follows may be the end of memory */
    uint16_t h = 0;
    if (half) {
      memcpy(&h, p + 2 * (at + i), sizeof h);
      all[i] = trvk_f16_to_f32(h);
    } else {
      memcpy(&all[i], p + 4 * (at + i), sizeof all[i]);
    }
  }
  return vld1q_f32(all);
}
A_INLINE int32_t a_word(const int8_t* row, trv_dim at, trv_dim i) {
  int32_t v;
  memcpy(&v, row + at + 4 * i, sizeof v);
  return v;
}

A_INLINE void a_nibbles(const trvk_qnibbles* t, int m0, int p, const int rows) {
  const uint8x16_t low = vdupq_n_u8(15);
  const int8x16_t ones = vdupq_n_s8(1);
  const uint8_t* b = t->b + p * t->b_panel;
  const int8_t* a[A_NIBBLE_MR];
  float32x4_t total[A_NIBBLE_MR][4];
  for (int m = 0; m < rows; m++) {
    a[m] = t->rows[m0 + m];
    for (int j = 0; j < 4; j++) total[m][j] = vdupq_n_f32(0.0f);
  }
  for (trv_dim o = 0, g = 0; o < t->octets; g++) {
    const trv_dim end = t->octets - o < t->group ? t->octets : o + t->group;
    int32x4_t s[A_NIBBLE_MR][4], sum[4];
    for (int j = 0; j < 4; j++) {
      sum[j] = vdupq_n_s32(0);
      for (int m = 0; m < rows; m++) s[m][j] = vdupq_n_s32(a_word(a[m], t->start_at, g));
    }
    for (; o < end; o++) {
      int8x16_t x[A_NIBBLE_MR];
      for (int m = 0; m < rows; m++) x[m] = vcombine_s8(vld1_s8(a[m] + 8 * o), vdup_n_s8(0));
      for (int j = 0; j < 4; j++) {
        const uint8x16_t w = vld1q_u8(b + 64 * o + 16 * j);
        const int8x16_t lo = vreinterpretq_s8_u8(vandq_u8(w, low)),
                        hi = vreinterpretq_s8_u8(vshrq_n_u8(w, 4));
        for (int m = 0; m < rows; m++)
          s[m][j] = vdotq_laneq_s32(vdotq_laneq_s32(s[m][j], lo, x[m], 0), hi, x[m], 1);
        if (t->zero) sum[j] = vdotq_s32(sum[j], vaddq_s8(lo, hi), ones);
      }
    }
    for (int j = 0; j < 4; j++) {
      const trv_dim col = p * TRVK_PANEL + 4 * j, left = t->n - col < 0 ? 0 : t->n - col;
      const float32x4_t scale = a_floats(t->scale + g * t->scale_row, col, t->scale_half, left);
      for (int m = 0; m < rows; m++) {
        if (t->zero) s[m][j] = vmlsq_n_s32(s[m][j], sum[j], t->zero[m0 + m]);
        total[m][j] = vaddq_f32(total[m][j], vmulq_f32(vcvtq_f32_s32(s[m][j]), scale));
      }
      if (t->offset) {
        const float32x4_t more = a_floats(t->offset + g * t->offset_row, col, t->offset_half, left);
        for (int m = 0; m < rows; m++)
          total[m][j] =
              vaddq_f32(total[m][j], vmulq_n_f32(more, (float)a_word(a[m], t->sum_at, g)));
      }
    }
  }
  for (int m = 0; m < rows; m++)
    for (int j = 0; j < 4; j++)
      vst1q_f32(t->t + (m0 + m) * t->t_row + p * TRVK_PANEL + 4 * j, total[m][j]);
}

static void q_nibbles(const trvk_qnibbles* t, int rows, int panels) {
  for (int p = 0; p < panels; p++) {
    int m = 0;
    for (; m + 2 <= rows; m += 2) a_nibbles(t, m, p, 2);
    if (m < rows) a_nibbles(t, m, p, 1);
  }
}

static void q_sums(const int8_t* b, trv_dim quads, int32_t* sums) {
  const int8x16_t ones = vdupq_n_s8(1);
  for (int j = 0; j < 4; j++) {
    int32x4_t s = vld1q_s32(sums + 4 * j);
    for (trv_dim q = 0; q < quads; q++) s = vdotq_s32(s, vld1q_s8(b + 64 * q + 16 * j), ones);
    vst1q_s32(sums + 4 * j, s);
  }
}

static void q_group_sums(const int8_t* a, trv_dim n, trv_dim group, int32_t* to) {
  const int8x16_t ones = vdupq_n_s8(1);
  for (trv_dim i = 0; i < n; to++) {
    const trv_dim end = n - i < group ? n : i + group;
    int32x4_t s = vdupq_n_s32(0);
    for (; i + 16 <= end; i += 16) s = vdotq_s32(s, vld1q_s8(a + i), ones);
    int32_t sum = vaddvq_s32(s);
    for (; i < end; i++) sum += a[i];
    *to = sum;
  }
}

#if defined(TRVQ_MATRIX)
/* ---- bytes by matrices: eight numbers of two rows times eight of two columns ---- */
enum { A_PAIRS = 3, A_OCTETS = 32 }; /* pairs of rows at a time; octets of a chunk */

/* Rows of a chunk in pairs, [pair][octets][2][8]. n: numbers that exist, a multiple of 4; what
 * would follow counts as 0. An odd last row is there twice. */
static void a_pair_rows(const trvk_qtile* t, trv_dim tap, int rows, trv_dim from, trv_dim n,
                        int8_t* to) {
  const trv_dim octets = (n + 7) / 8;
  for (int m = 0; m < rows; m += 2) {
    const void* const* row = t->rows + tap * t->row_step + m;
    const int8_t* a = (const int8_t*)row[0] + t->a_off + from;
    const int8_t* b = (const int8_t*)row[m + 1 < rows ? 1 : 0] + t->a_off + from;
    trv_dim o = 0;
    for (; 8 * o + 8 <= n; o++, to += 16)
      vst1q_s8(to, vcombine_s8(vld1_s8(a + 8 * o), vld1_s8(b + 8 * o)));
    if (o < octets) {
      memset(to, 0, 16);
      memcpy(to, a + 8 * o, 4);
      memcpy(to + 8, b + 8 * o, 4);
      to += 16;
    }
  }
}

/* A chunk of a panel, [octets][16][8] from [quads][16][4]. */
static void a_pair_columns(const int8_t* b, trv_dim quads, int8_t* to) {
  for (trv_dim q = 0; q < quads; q += 2, b += 128)
    for (int j = 0; j < 4; j++, to += 32) {
      const int32x4_t u = vreinterpretq_s32_s8(vld1q_s8(b + 16 * j));
      const int32x4_t v =
          q + 1 < quads ? vreinterpretq_s32_s8(vld1q_s8(b + 64 + 16 * j)) : vdupq_n_s32(0);
      vst1q_s8(to, vreinterpretq_s8_s32(vzip1q_s32(u, v)));
      vst1q_s8(to + 16, vreinterpretq_s8_s32(vzip2q_s32(u, v)));
    }
}

/* Sums of a pair of rows and of columns lie together: [2][2]. */
A_INLINE void a_matrices(const int8_t* a, const int8_t* b, trv_dim octets, int32_t* c,
                         trv_dim c_row, int rows, const int pairs) {
  int32x4_t s[A_PAIRS][8];
  for (int m = 0; m < pairs; m++) {
    const int32_t *c0 = c + 2 * m * c_row, *c1 = 2 * m + 1 < rows ? c0 + c_row : c0;
    for (int j = 0; j < 8; j++) s[m][j] = vcombine_s32(vld1_s32(c0 + 2 * j), vld1_s32(c1 + 2 * j));
  }
  for (trv_dim o = 0; o < octets; o++, a += 16, b += 128) {
    int8x16_t x[A_PAIRS];
    for (int m = 0; m < pairs; m++) x[m] = vld1q_s8(a + m * octets * 16);
    for (int j = 0; j < 8; j++) {
      const int8x16_t w = vld1q_s8(b + 16 * j);
      for (int m = 0; m < pairs; m++) s[m][j] = vmmlaq_s32(s[m][j], x[m], w);
    }
  }
  for (int m = 0; m < pairs; m++)
    for (int j = 0; j < 8; j++) {
      vst1_s32(c + 2 * m * c_row + 2 * j, vget_low_s32(s[m][j]));
      if (2 * m + 1 < rows) vst1_s32(c + (2 * m + 1) * c_row + 2 * j, vget_high_s32(s[m][j]));
    }
}

static void q_bytes(const trvk_qtile* t, int rows, int panels) {
  int8_t a[TRVK_QT_MR * A_OCTETS * 8], b[A_OCTETS * 8 * TRVK_PANEL];
  if (rows < 4) { /* rearranging would cost more than it saves */
    for (int p = 0; p < panels; p++) a_dot_rows(t, 0, rows, p);
    return;
  }
  trvk_qtile_start(t, rows, panels);
  for (trv_dim tap = 0; tap < t->taps; tap++)
    for (trv_dim q = 0, run; q < t->quads; q += run) {
      run = t->quads - q < 2 * A_OCTETS ? t->quads - q : 2 * A_OCTETS;
      const trv_dim octets = (run + 1) / 2;
      a_pair_rows(t, tap, rows, 4 * q, 4 * run, a);
      for (int p = 0; p < panels; p++) {
        a_pair_columns(t->b[tap] + p * t->b_panel + 64 * q, run, b);
        for (int m = 0; m < rows; m += 2 * A_PAIRS) {
          const int left = rows - m;
          const int8_t* pair = a + m * 8 * octets;
          int32_t* c = t->c + m * t->c_row + p * TRVK_PANEL;
          if (left > 4)
            a_matrices(pair, b, octets, c, t->c_row, left, 3);
          else if (left > 2)
            a_matrices(pair, b, octets, c, t->c_row, left, 2);
          else
            a_matrices(pair, b, octets, c, t->c_row, left, 1);
        }
      }
    }
}
#else
static void q_bytes(const trvk_qtile* t, int rows, int panels) {
  for (int p = 0; p < panels; p++)
    for (int m = 0; m < rows; m += A_MR) a_dot_rows(t, m, rows - m < A_MR ? rows - m : A_MR, p);
}
#endif
#endif
#endif
