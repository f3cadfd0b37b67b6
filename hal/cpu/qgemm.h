/* qgemm.h - the integer matrix product that qconv and qmatmul are made of.
 *
 * A block of rows times a strip of columns. Rows of A are gathered as i16 (i8 activations minus
 * their zero point, i16 activations as they are), so that padding and strides cost nothing inside.
 * B is read in panels of 16 columns, [K / 4][16][4] i8: in place when it is packed in 8 bits, else
 * from a copy of one chunk. Sums are 32 bits wide and wrap; `flush` takes them over to 64 bits
 * (i16 activations) or to floats (dynamic quantisation) before they could. A table of functions per
 * instruction set (trvk_qgemm) holds the tile; all else is shared.
 */
#ifndef TRVK_QGEMM_H
#define TRVK_QGEMM_H

#include "gemm.h"
#include "quant.h"

/* Sizes of blocks, all on the stack. */
#if defined(__arm__) && !defined(__ARM_ARCH_7A__) && !defined(__linux__)
#define TRVK_Q_ROWS 4
#define TRVK_Q_PANELS 2
#define TRVK_Q_A 256 /* numbers of gathered A */
#define TRVK_Q_B 64  /* K of a chunk of B */
#else
#define TRVK_Q_ROWS 32
#define TRVK_Q_PANELS 4
#define TRVK_Q_A 16384
#define TRVK_Q_B 512
#endif
#define TRVK_Q_WIDE 256 /* K of a chunk whose sums of i16 * i8 fit 32 bits */
#define TRVK_Q_STRIP (TRVK_Q_PANELS * TRVK_PANEL)

typedef struct trvk_qgemm {
  /* c[rows][16] += a[rows][4 * quads] * b[quads][16][4]; rows of a are a_row apart. */
  void (*tile)(const int16_t* a, trv_dim a_row, trv_dim rows, const int8_t* b, trv_dim quads,
               int32_t* c);
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

/* ---- activations: one row to i16 ---- */
void trvk_q_row(int16_t* dst, const uint8_t* src, uint32_t dtype, trv_dim step, trv_dim n,
                int32_t zero);

/* ---- the product ---- */
typedef struct trvk_qblock trvk_qblock;
struct trvk_qblock {
  const trvk_qgemm* g;
  const void* self; /* what the three functions below know */
  /* Writes rows of A, k0 .. k0+kc, round4(kc) apart, zeros to the end of each. */
  void (*gather)(const trvk_qblock* s, trv_dim k0, trv_dim kc, int16_t* a);
  const int8_t* (*panel)(trvk_qblock* s, trv_dim k0, trv_dim kc, trv_dim col, trv_dim n);
  /* After a chunk of panel p that ends at k_end; may be NULL. */
  void (*flush)(trvk_qblock* s, trv_dim p, trv_dim col, trv_dim n, trv_dim k_end, const int8_t* b,
                trv_dim quads);
  trv_dim k, count; /* rows of the block */
  trv_dim chunk,
      period; /* of K: most of one chunk; none goes across a multiple of period (0: may) */
  int sums;   /* keep sums of rows of A, of all of K or of the present period */
  int filled; /* a holds these rows already, with all of K */
  int64_t sum[TRVK_Q_ROWS];
  int32_t acc[TRVK_Q_PANELS][TRVK_Q_ROWS][TRVK_PANEL];
  union {
    int64_t wide[TRVK_Q_PANELS][TRVK_Q_ROWS][TRVK_PANEL];
    float real[TRVK_Q_PANELS][TRVK_Q_ROWS][TRVK_PANEL];
  } u;
  int16_t a[TRVK_Q_A];
  int8_t b[TRVK_Q_B * TRVK_PANEL];
};
/* acc (and what flush keeps) of columns col .. col+n, n <= TRVK_Q_STRIP. u is cleared where there
 * is a flush. */
void trvk_qblock_run(trvk_qblock* s, trv_dim col, trv_dim n);
/* flush for i16 activations: u.wide takes over, minus zero of A times the column's sum. */
void trvk_qblock_widen(trvk_qblock* s, int32_t a_zero, trv_dim p, const int8_t* b, trv_dim quads);

/* ---- results ---- */
typedef struct trvk_qout {
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
  int quick;                                       /* 32 bits do: see qout.c */
  int32_t half[TRVK_Q_STRIP], power[TRVK_Q_STRIP]; /* for that */
  uint8_t shift[TRVK_Q_STRIP];
} trvk_qout;
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
