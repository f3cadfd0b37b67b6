/* qgemm.h - the integer matrix product that qconv and qmatmul are made of.
 *
 * A tile of up to 12 rows times 2 panels of 16 columns. Rows of A are read through pointers, a row
 * for each output row and tap: i8 where they lie, on sets with dot products of bytes; i16 (copied
 * i8 less their zero point, or i16 as they are) on all. B is read in panels, [K / 4][16][4] i8: in
 * place when it is packed in 8 bits, else from a copy. Sums are 32 bits wide and wrap; who
 * multiplies i16 takes them over to 64 bits before they could. A table of functions per instruction
 * set (trvk_qgemm) holds tiles, results and rows; the loops around them are shared (qproduct.c,
 * qconv_gemm.c).
 */
#ifndef TRVK_QGEMM_H
#define TRVK_QGEMM_H

#include "gemm.h"
#include "quant.h"

/* Sizes of blocks, all on the stack. */
#if defined(__arm__) && !defined(__ARM_ARCH_7A__) && !defined(__linux__)
#define TRVK_Q_ROWS 4 /* of a block */
#define TRVK_Q_PANELS 2
#else
#define TRVK_Q_ROWS 48
#define TRVK_Q_PANELS 4
#endif
#define TRVK_Q_WIDE 256 /* K of a chunk whose sums of i16 * i8 fit 32 bits */
#define TRVK_Q_STRIP (TRVK_Q_PANELS * TRVK_PANEL)

/* c[m][j] = first[j] + sum over taps t and k of (a + bias) * b, j < 16 * panels, in 32 bits that
 * wrap, where a is number k of the row that rows[t * row_step + m] names. */
typedef struct trvk_qtile {
  const void* const* rows; /* `size` bytes a number; 4 * quads numbers from a_off (bytes) on */
  const int8_t* const* b;  /* per tap: [quads][16][4] of the first panel; others b_panel bytes on */
  const int32_t* first;    /* NULL: c goes on */
  int32_t* c;              /* rows c_row numbers apart */
  trv_dim row_step, taps, quads, a_off, b_panel, c_row;
} trvk_qtile;

/* What sums begin with: first, or what c holds. */
static inline void trvk_qtile_start(const trvk_qtile* t, int rows, int panels) {
  if (t->first)
    for (int m = 0; m < rows; m++)
      memcpy(t->c + m * t->c_row, t->first, (size_t)(panels * TRVK_PANEL) * sizeof *t->c);
}

#define TRVK_QT_MR 12 /* most rows of a tile of any instruction set */
#define TRVK_QT_NP 2  /* most panels */
#define TRVK_QT_STRIP (TRVK_QT_NP * TRVK_PANEL)

/* Sums of 4-bit weights by groups of K, in floats:
 * t[m][j] = sum over groups g, in order, of f32(start[m][g] + sum_g((a - zero[m]) * b)) *
 * scale[g][j] (then + f32(sum[m][g]) * offset[g][j]). */
typedef struct trvk_qnibbles {
  const int8_t* const* rows; /* 8 * octets numbers of i8 each */
  trv_dim start_at, sum_at;  /* bytes from a row to its start and sum, i32 each */
  const int32_t* zero;       /* NULL: all 0 */
  const uint8_t* b;          /* [octets][16][4] packed */
  trv_dim b_panel, octets;
  trv_dim group; /* octets that share a scale */
  const uint8_t *scale,
      *offset; /* of the first column, columns next to each other; offset NULL: none */
  trv_dim scale_row, offset_row; /* bytes from group to group */
  int scale_half, offset_half;   /* f16, else f32 */
  float* t;                      /* rows t_row apart */
  trv_dim t_row, n;              /* columns that have scales; the others are 0 */
} trvk_qnibbles;

/* One row of reals times packed weights: t[j] = sum over groups of scale[g][j] * sum_g(a * (b -
 * zero)) + offset[g][j] * sum_g(a). */
typedef struct trvk_qstream {
  const float* a;
  trv_dim k, group; /* multiples of 8 */
  const uint8_t* b; /* 8 or 4 bits, packed */
  trv_dim b_panel;
  int bits;
  int32_t zero;
  const uint8_t *scale, *offset; /* as of trvk_qnibbles */
  trv_dim scale_row, offset_row, n;
  int scale_half, offset_half;
  float* t; /* 16 * panels */
} trvk_qstream;

/* Real results of rows that were quantised: v = sum - less * cols - base, t = (first ? 0 : t) +
 * f32(v)
 * * scale, + f32(sums) * offset; then, with last, y = act(t * step + bias). Every operation rounds
 * once. */
typedef struct trvk_qreal {
  const int32_t* sum; /* NULL: t is complete */
  float* t;
  trv_dim sum_row, t_row;
  const int32_t *less, *base, *sums; /* per row; NULL: 0, none */
  const int32_t* cols;               /* per column, of b */
  const float *scale, *offset;       /* per column; offset NULL: none */
  const float *step, *bias;          /* per row; per column, or NULL */
  float* y;
  trv_dim y_row, y_step;
  void (*act_fn)(float* x, trv_dim n, uint32_t act, float lo, float hi);
  uint32_t act;
  float lo, hi;
  int first, last;
} trvk_qreal;

/* How rows of real numbers are quantised: real = step * (number - zero). */
typedef struct trvk_qrow {
  float step, inverse;
  int32_t zero, lo, hi;
} trvk_qrow;

typedef struct trvk_qout trvk_qout;

/* What an instruction set offers. */
typedef struct trvk_qgemm {
  /* Up to TRVK_QT_MR rows and TRVK_QT_NP panels. Rows of i16; bias is 0. */
  void (*words)(const trvk_qtile* t, int rows, int panels);
  /* Rows of i8, read where they lie; NULL: this set has no dot products of bytes. The caller takes
   * `bias` times the column's sum of b away (in first). */
  void (*bytes)(const trvk_qtile* t, int rows, int panels);
  void (*nibbles)(const trvk_qnibbles* t, int rows, int panels); /* NULL: none, as bytes */
  void (*stream)(const trvk_qstream* s, trv_dim panels);         /* NULL: none */
  int32_t bias;
  /* sums[16] += the column sums of [quads][16][4]. */
  void (*sums)(const int8_t* b, trv_dim quads, int32_t* sums);
  /* Sums of n numbers by groups, a multiple of 8 each but for the last. */
  void (*group_sums)(const int8_t* a, trv_dim n, trv_dim group, int32_t* to);
  /* Results from sums: rows x n of columns c (a multiple of 16) .. c + n of the strip, row m to
   * y[at[m] + i * step]. The same as trvk_qout_i32 row by row. */
  void (*out)(const trvk_qout* o, trv_dim c, const int32_t* sum, trv_dim sum_row, trv_dim rows,
              trv_dim n, const trv_dim* at, trv_dim step);
  /* rows x n real results. */
  void (*real)(const trvk_qreal* r, trv_dim rows, trv_dim n);
  /* The least and largest of n numbers and 0, passing over NaN; n numbers (step 1) as number, i8,
   * or as number - zero, i16. */
  void (*range)(const float* a, trv_dim n, float* least, float* most);
  void (*quantise8)(const float* a, trv_dim n, const trvk_qrow* r, int8_t* to);
  void (*quantise16)(const float* a, trv_dim n, const trvk_qrow* r, int16_t* to);
} trvk_qgemm;
extern const trvk_qgemm trvk_qgemm_ref;

/* ---- weights ---- */

/* A weight [K, N] of one group, and how its numbers count. */
typedef struct trvk_qweight trvk_qweight;
typedef void (*trvk_q_floats_fn)(const trvk_qweight* w, const uint8_t* b, trv_dim k0, trv_dim kc,
                                 trv_dim col, trv_dim n, trv_dim first, float* dst);
struct trvk_qweight {
  /* For the float32 product: through a pointer, so that programs without such weights need not link
   * it. */
  trvk_q_floats_fn floats;
  const trv_tensor *scale, *offset; /* of real forms; offset NULL: none */
  trv_dim k_step, n_step;           /* of a plain one, in elements */
  trv_dim group;                    /* values along K that share a scale, 0: all */
  trv_dim panel;                    /* bytes from one packed panel to the next */
  int32_t zero;
  int packed, bits;
};

/* Bytes of a packed [K, N] in 8 bits (with the sums) or 4; 0: nothing to pack, or too big. */
size_t trvk_q_packed_bytes(trv_dim k, trv_dim n, int bits);
/* Bytes of one panel of it. */
static inline trv_dim trvk_q_panel_bytes(trv_dim k, int bits) {
  return bits == 4 ? (k + 7) / 8 * 64 : (k + 3) / 4 * 64 + 64;
}
/* Writes it. src: i8, or u8 with 0..15; zero: what pads 4 bits. dst is filled completely. */
void trvk_q_pack(uint8_t* dst, const uint8_t* src, trv_dim k_step, trv_dim n_step, trv_dim k,
                 trv_dim n, int bits, int32_t zero);
/* trvk_pack_bytes and trvk_pack for qconv, qmatmul, qgather. */
size_t trvk_qpack_bytes(uint32_t op, const void* attrs, uint32_t dtype, uint32_t rank,
                        const int64_t* dim);
void trvk_qpack(uint32_t op, const void* attrs, uint32_t dtype, uint32_t rank, const int64_t* dim,
                const int64_t* step, const void* src, void* dst);
/* Is t a packed weight, one row of exactly that many bytes (i8 or u8)? */
int trvk_q_packed_ok(const trv_tensor* t, size_t bytes);

/* Numbers k0 .. k0+kc of the panel of columns col .. col+n (n <= 16; col is a multiple of 16, k0 of
 * 4, of 8 for 4 bits) as [quads][16][4], zeros beyond. b: the weight's first element or panel.
 * buffer: room for 16 * round4(kc), used where the numbers do not lie so already. */
const int8_t* trvk_q_panel(const trvk_qweight* w, const uint8_t* b, trv_dim k0, trv_dim kc,
                           trv_dim col, trv_dim n, int8_t* buffer);
/* Numbers as they count, (b - zero) * scale + offset: dst[panel][kc][16], zeros beyond n. Any k0;
 * col counts columns of scale from `first` on. */
void trvk_q_floats(const trvk_qweight* w, const uint8_t* b, trv_dim k0, trv_dim kc, trv_dim col,
                   trv_dim n, trv_dim first, float* dst);
/* n <= 16 scales or offsets of group g from column col on. */
void trvk_q_scales(const trv_tensor* t, trv_dim g, trv_dim col, trv_dim n, float* dst);

/* Are columns of a scale or offset (NULL: none) next to each other, or is one for all? */
int trvk_q_by_columns(const trv_tensor* t);
/* Its columns col .. col+n (n <= TRVK_QT_STRIP) of every group: the address of the first, bytes
 * from group to group, whether they are f16. One for all is spread over the buffer. */
const uint8_t* trvk_q_columns(const trv_tensor* t, trv_dim col, trv_dim n, float* buffer,
                              trv_dim* row, int* half);

/* ---- activations: one row to i16 ---- */
void trvk_q_row(int16_t* dst, const uint8_t* src, uint32_t dtype, trv_dim step, trv_dim n,
                int32_t zero);

/* ---- results ---- */
struct trvk_qout {
  uint8_t* y;
  const trv_tensor *scale, *bias; /* bias NULL: none */
  uint32_t dtype, act;
  int32_t zero, lo, hi; /* of a stored result */
  float flo, fhi;       /* of a real one */
  int real_in;          /* sums are real: y = act(sum * scale + bias) */
  void (*act_fn)(float* x, trv_dim n, uint32_t act, float lo, float hi); /* of a real result */
  /* The present strip of columns. */
  union {
    int32_t i[TRVK_Q_STRIP]; /* multipliers */
    float f[TRVK_Q_STRIP];
  } k, b;
  int no_halves;                                   /* quick is not wanted */
  int wide_ok;                                     /* shifts are 32 .. 62: see qrows.inc */
  int bytes_ok;                                    /* shifts are 33 .. 62, results i8: as well */
  int quick;                                       /* 32 bits do: see qout.c */
  int32_t half[TRVK_Q_STRIP], power[TRVK_Q_STRIP]; /* for that */
  uint8_t shift[TRVK_Q_STRIP];
};
/* Everything but y; lo, hi are those of attrs. */
void trvk_qout_make(trvk_qout* o, const trv_tensor* y, const trv_tensor* scale,
                    const trv_tensor* bias, int32_t zero, uint32_t act, float lo, float hi,
                    int real_in);
/* Reads scale and bias of columns col .. col+n, n <= TRVK_Q_STRIP. */
void trvk_qout_strip(trvk_qout* o, trv_dim col, trv_dim n);
/* n results to y[at + i * step], from sums of column c + i * c_step of the strip. c_step: 1 or 0.
 */
void trvk_qout_i32(const trvk_qout* o, trv_dim c, int c_step, const int32_t* sum, trv_dim n,
                   trv_dim at, trv_dim step);
void trvk_qout_i64(const trvk_qout* o, trv_dim c, int c_step, const int64_t* sum, trv_dim n,
                   trv_dim at, trv_dim step);
void trvk_qout_f32(const trvk_qout* o, trv_dim c, int c_step, const float* sum, trv_dim n,
                   trv_dim at, trv_dim step);

/* ---- checks: NULL, or what is wrong ---- */

/* scale (and bias) of n columns for stored numbers or reals in and out; zero, lo, hi, act. */
const char* trvk_q_check_out(const trv_tensor* x, const trv_tensor* y, const trv_tensor* scale,
                             const trv_tensor* bias, trv_dim n, int one, int32_t x_zero,
                             int32_t y_zero, uint32_t act, float lo, float hi, int64_t* expected,
                             int64_t* got);
/* scale or offset of real forms: f32 or f16, [G, N], or [N] or [1] where group is 0. */
int trvk_q_scale_ok(const trv_tensor* t, trv_dim k, trv_dim n, trv_dim group);
/* group: 0, or a multiple of 8. */
static inline int trvk_q_group_ok(uint32_t group) {
  return group % 8 == 0 && group <= (uint32_t)INT32_MAX;
}
#define TRVK_Q_MOST                                                            \
  (PTRDIFF_MAX / 1024) /* sizes of K and N beyond which offsets could overflow \
                        */

static inline trv_dim trvk_round4(trv_dim n) { return (n + 3) / 4 * 4; }

/* Tiles for count results that cost k products each. */
static inline uint32_t trvk_q_tiles(trv_dim count, trv_dim k, trv_dim parts, uint32_t workers) {
  if (workers <= 1) return 1;
  const float work = (float)count * (float)k / 8.0f;
  return trvk_tiles(work > 1e9f ? (trv_dim)1000000000 : (trv_dim)work, parts, workers);
}
#endif
