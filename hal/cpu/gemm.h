/* gemm.h - the float32 matrix product that matmul, conv, attention and rnn are made of.
 *
 * B is read in panels of 16 columns: row k of a panel is 16 floats, k steps of bk floats apart (16
 * when packed). A is read through row pointers, one row per output row and tap, so that a
 * convolution needs no copy of its input. A table of functions per instruction set (trvk_gemm)
 * holds the tiles; the loops around them are shared.
 */
#ifndef TRVK_GEMM_H
#define TRVK_GEMM_H

#include "ops.h"

#define TRVK_PANEL 16
#define TRVK_MR_MAX 12 /* most rows of a tile of any instruction set */
#define TRVK_NP_MAX 2  /* most panels of a tile */
#define TRVK_STRIP (TRVK_PANEL * TRVK_NP_MAX)

/* Sizes of blocks, all on the stack. Small machines have small stacks. */
#if defined(__arm__) && !defined(__ARM_ARCH_7A__) && !defined(__linux__)
#define TRVK_ROWS 8     /* rows of A that share one pass over B */
#define TRVK_KC 32      /* elements along K of one pass */
#define TRVK_TAPS 9     /* taps of one pass */
#define TRVK_GATHER 256 /* floats of gathered A */
#define TRVK_WINO 0     /* no convolution by Winograd's algorithm */
#else
#define TRVK_ROWS 96
#define TRVK_KC 768
#define TRVK_TAPS 16
#define TRVK_GATHER 8192
#define TRVK_WINO 1
#endif

/* C[m][0 .. 16*np) = clamp(bias + added rows + sum over taps and k of rows[tap][m][k * ak] *
 * b[tap][k * bk]). */
typedef struct trvk_tile {
  const float* const* rows; /* row m of tap t: rows[t * row_step + m] */
  const float* const* b;    /* per tap; b_off is added */
  float* const* c;          /* per row; c_off is added */
  const float* bias;        /* 16 * np values, or NULL */
  trv_dim row_step, b_off, c_off;
  trv_dim taps, kc, ak, bk, bp; /* bp: from one panel to the next */
  float lo, hi;
  int accumulate;          /* 0: nothing is added; 1: C is, and no bias; TRVK_ADD: rows of `add` */
  const float* const* add; /* per row; add_off is added */
  trv_dim add_off;
} trvk_tile;
#define TRVK_ADD 2

/* Depthwise convolution of one output row of pixels, channels innermost: see dw_tiles.h. */
typedef struct trvk_dw {
  const float* const* x; /* per kernel row: the input's row at channel 0, column 0, or NULL: none */
  const float* w;        /* kh rows, w_row apart, of kw taps, wc apart */
  float* y;
  const float* bias; /* per channel, or NULL */
  trv_dim kh, kw, wc, w_row, channels, count;
  trv_dim at, in;           /* column of the first output's first tap; columns of the input */
  trv_dim stride, dilation; /* columns from output to output, from tap to tap */
  trv_dim x_column, y_step; /* floats from column to column, from output to output */
  float lo, hi;
} trvk_dw;

/* The parts of conv_winograd.c. One tile: m x m outputs from (m + 2) x (m + 2) inputs; see
 * wino_tiles.h. */
#define TRVK_WINO_A 0.625f /* the points of m = 4: 0, +-A, +-B, infinity */
#define TRVK_WINO_B 1.6f
#define TRVK_WINO_ROWS 24 /* tiles of a block */
typedef struct trvk_wino_in {
  const float* x;
  trv_dim row[6], col;   /* where row i of the window lies from x, and the step between columns */
  int m, i0, i1, j0, j1; /* rows i0 .. i1 and columns j0 .. j1 lie inside the input; else zero */
  float* v;              /* matrices of points, v_step apart: [channels / 16][TRVK_WINO_ROWS][16] */
  trv_dim v_step, channels; /* a multiple of the vector */
} trvk_wino_in;
typedef struct trvk_wino_mul { /* sums = matrices * weight, per point */
  const float *v, *w;          /* v as above; w [points][cg][panels * 16] */
  float* s;                    /* points s_step apart: [TRVK_WINO_ROWS][TRVK_STRIP] */
  trv_dim v_step, s_step, points, panels, cg, count; /* count: rows; a few more may be computed */
} trvk_wino_mul;
typedef struct trvk_wino_out {
  const float* s; /* point p of channel c is s[p * s_step + c] */
  trv_dim s_step, channels;
  const float *bias, *res; /* NULL: none */
  trv_dim res_row, res_col;
  float* y;
  trv_dim y_row, y_col;
  int m, rows, cols; /* how much of the tile is wanted */
  float lo, hi;
} trvk_wino_out;

/* A tile of conv_line.c: line_pixels neighbouring pixels, columns 0 .. 16 * np; see line_tiles.h.
 */
#define TRVK_LINE_MAX 14
typedef struct trvk_line {
  const float* x;        /* the first pixel's first number; pieces are x_piece apart */
  const float* const* b; /* per piece; b_off is added */
  float* y;
  const float* bias;             /* 16 * np values, or NULL */
  trv_dim x_piece, y_step, step; /* step: from pixel to pixel of x: 1, 2, 3 or 6 */
  trv_dim pieces, kc, b_off, bk, bp;
  float lo, hi;
} trvk_line;

typedef struct trvk_gemm {
  int mr, np;                                           /* largest tile */
  void (*const* tile[TRVK_NP_MAX])(const trvk_tile* t); /* [np - 1][mr - 1] */
  void (*stream)(const trvk_tile* t,
                 trv_dim panels); /* one row, many panels: B is read once, in order */
  void (*dot)(const float* a, const float* b, trv_dim b_step, trv_dim n, trv_dim k,
              float* out); /* out[i] = a . b_i */
  void (*dw)(const trvk_dw* d);
  void (*act)(float* x, trv_dim n, uint32_t act, float lo, float hi);
  void (*mix)(const float* w, const float* v, trv_dim step, trv_dim n, trv_dim e,
              float* out); /* out[j] += sum over i < n of w[i] * v[i * step + j] */
  float (*most)(float* x, const float* add, trv_dim n, float scale,
                float f); /* the largest x * scale (add: of x = x * scale + add * f, which is
                             written) that is not NaN, or -infinity */
  float (*exp2_sum)(float* x, trv_dim n, float scale,
                    float max); /* x = 2^(x * scale - max), max not below x * scale; their sum */
  void (*lstm)(const float* gates, float* c, float* h,
               trv_dim n); /* gates i f g o, n each; c and h are written */
  void (*lstm_step)(const float* h, trv_dim k, const float* w, const float* gates, float* c,
                    float* out, trv_dim n, int back); /* the same of gates + h x w: w packed,
                                 n % 16 == 0; out is not h; back: from the end of w on */
  void (*gru)(const float* x, const float* gates, float* h,
              trv_dim n); /* r z n of the input and of the hidden state */
  void (*widen)(float* dst, const uint16_t* src, uint32_t dtype, trv_dim n); /* of f16 or bf16 */
  void (*narrow)(uint16_t* dst, const float* src, uint32_t dtype, trv_dim n);
  void (*widen_pairs)(float* dst, const uint8_t* src,
                      trv_dim pairs); /* a panel [pairs][16][2] of bf16 */
  void (*stream_halves)(const float* a, const uint16_t* b, uint32_t dtype, trv_dim step, trv_dim kc,
                        trv_dim panels, float* c,
                        int accumulate);  /* one float row times panels of f16 or bf16 pairs */
  void (*wino_in)(const trvk_wino_in* t); /* NULL where TRVK_WINO is 0 */
  void (*wino_mul)(const trvk_wino_mul* t);
  void (*wino_out)(const trvk_wino_out* t);
  void (*line[TRVK_NP_MAX])(const trvk_line* t); /* [np - 1] */
  int line_pixels;
} trvk_gemm;

extern const trvk_gemm trvk_gemm_ref;
#if defined(__x86_64__) && defined(__GNUC__)
extern const trvk_gemm trvk_gemm_avx2, trvk_gemm_avx512;
extern const trvk_gemm trvk_gemm_bf16; /* only tiles and stream, of pairs of bf16 */
#endif

/* ---- rows of any dtype to and from float (rows.c)
 * ----------------------------------------------------------------- */
void trvk_row_load(float* dst, const uint8_t* src, uint32_t dtype, trv_dim stride, trv_dim n);
void trvk_row_store(uint8_t* dst, uint32_t dtype, trv_dim stride, const float* src, trv_dim n);
/* The same, through g where that is quicker. */
static inline void trvk_row_floats(const trvk_gemm* g, float* dst, const uint8_t* src,
                                   uint32_t dtype, trv_dim stride, trv_dim n) {
  if (stride == 1 && (dtype == TRV_DTYPE_F16 || dtype == TRV_DTYPE_BF16))
    g->widen(dst, (const uint16_t*)(const void*)src, dtype, n);
  else
    trvk_row_load(dst, src, dtype, stride, n);
}
void trvk_row_load64(double* dst, const uint8_t* src, uint32_t dtype, trv_dim stride, trv_dim n);
void trvk_row_store64(uint8_t* dst, uint32_t dtype, trv_dim stride, const double* src, trv_dim n);
double trvk_act64(double x, uint32_t act, double lo, double hi);

/* Address of an element, `at` elements from data. */
static inline uint8_t* trvk_at(const uint8_t* data, uint32_t dtype, trv_dim at) {
  return (uint8_t*)(uintptr_t)data + at * (trv_dim)trv_dtype_size(dtype);
}

/* For short runs, where a call of memcpy costs as much as the copy. */
static inline void trvk_floats_copy(float* dst, const float* src, trv_dim n) {
  trv_dim i = 0;
  for (; i + 8 <= n; i += 8) memcpy(dst + i, src + i, 32);
  for (; i < n; i++) dst[i] = src[i];
}

/* ---- epilogue: what happens to sums on their way out
 * --------------------------------------------------------------- */
typedef struct trvk_epi {
  const trvk_gemm* g;
  const uint8_t *bias2, *res; /* NULL: none; dtype is the output's */
  uint8_t* out;
  trv_dim bias2_col, res_col, out_col; /* strides along N, elements */
  uint32_t dtype;
  uint32_t act;
  float lo, hi;
  int post; /* rows go through trvk_epi_row: out or res are not floats side by side, or bias2 */
} trvk_epi;

/* Offsets (elements) of one output row in out, residual and two-dimensional bias. */
typedef struct trvk_row {
  trv_dim out, res, bias2;
} trvk_row;

/* sum: n values of row r from column col. Adds, activates, converts, stores. */
void trvk_epi_row(const trvk_epi* e, const trvk_row* r, trv_dim col, float* sum, trv_dim n);

/* An activation that a tile does not apply itself. */
static inline int trvk_epi_heavy(const trvk_epi* e) {
  return e->act != TRV_ACT_NONE && e->act != TRV_ACT_CLAMP;
}
/* The bounds that a tile applies itself. */
static inline float trvk_epi_lo(const trvk_epi* e) {
  return !e->post && e->act == TRV_ACT_CLAMP ? e->lo : -INFINITY;
}
static inline float trvk_epi_hi(const trvk_epi* e) {
  return !e->post && e->act == TRV_ACT_CLAMP ? e->hi : INFINITY;
}

/* ---- a block of rows times a strip of columns (gemm.c)
 * --------------------------------------------------------------- Rows of A in a table of pointers
 * [tile][tap][row of tile], as trvk_rows_of tells; one pass over taps x kc. */
typedef struct trvk_block {
  const trvk_gemm* g;
  const trvk_epi* epi;
  const trvk_row* row;      /* per row of the block */
  const float* const* rows; /* [rows_in_block / mr_used][taps][mr_used] */
  trv_dim count, mr; /* rows of the block; rows per tile (last tile: the rest, same row_step) */
  trv_dim taps, kc, ak;
  const float* const* b; /* per tap */
  trv_dim bk, bp;
  const float* bias; /* for columns from 0 of the strip on (strip_bias gives it), or NULL */
  float* acc;        /* [TRVK_ROWS][TRVK_STRIP], for passes and post */
  int first, last;   /* this pass is the first / the last along K */
} trvk_block;

/* Columns col .. col+n (n <= 16 * np of g) of the block. b_off: where the strip's first panel lies
 * from b[tap]. */
void trvk_block_run(const trvk_block* k, trv_dim col, trv_dim n, trv_dim b_off);

/* Rows per tile for `count` rows: even tiles instead of a small last one. */
static inline trv_dim trvk_even_rows(const trvk_gemm* g, trv_dim count) {
  const trv_dim tiles = (count + g->mr - 1) / g->mr;
  return tiles ? (count + tiles - 1) / tiles : 1;
}

/* ---- scratch-free packing of a block of B on the stack: dst[k][16] per panel, zeros beyond n
 * ------------------------- */
void trvk_pack_panels(float* dst, const uint8_t* src, uint32_t dtype, trv_dim k_stride,
                      trv_dim n_stride, trv_dim k, trv_dim n, trv_dim panels);

/* Sizes of packed weights in floats (pack.c). */
static inline trv_dim trvk_panels(trv_dim n) { return n / TRVK_PANEL + (n % TRVK_PANEL != 0); }
static inline trv_dim trvk_round16(trv_dim n) { return trvk_panels(n) * TRVK_PANEL; }

/* Rows of a packed weight of f16 ([N / 16][K][16], as of floats) or bf16 (pairs along K: [N /
 * 16][ceil(K / 2)][16][2]). */
static inline trv_dim trvk_packed_k(uint32_t dtype, trv_dim k) {
  return dtype == TRV_DTYPE_BF16 ? k + (k & 1) : k;
}

/* ---- for checks
 * ----------------------------------------------------------------------------------------------------
 */
/* An output must not name an element twice: NULL, or what is wrong. Its count of elements then fits
 * trv_dim. */
const char* trvk_out_check(const trv_tensor* t, int64_t* expected, int64_t* got);
int trvk_packed_ok(const trv_tensor* t, size_t need);

/* ---- per instruction set
 * ------------------------------------------------------------------------------------------- */
/* pairs: tiles and stream that take pairs of bf16 for floats, or NULL. */
void trvk_matmul_run(const trvk_call* call, uint32_t tile, const trvk_gemm* g,
                     const trvk_gemm* pairs);
void trvk_conv_run(const trvk_call* call, uint32_t tile, const trvk_gemm* g,
                   const trvk_gemm* pairs);
void trvk_attention_run(const trvk_call* call, uint32_t tile, const trvk_gemm* g);
void trvk_rnn_run(const trvk_call* call, uint32_t tile, const trvk_gemm* g);
#endif
