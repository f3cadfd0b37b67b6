/* qproduct.h - products with stored or quantised rows: blocks of rows times strips of columns. */
#ifndef TRVK_QPRODUCT_H
#define TRVK_QPRODUCT_H

#include "qmatmul.h"

/* Sizes of blocks, all on the stack. */
#if defined(__arm__) && !defined(__ARM_ARCH_7A__) && !defined(__linux__)
#define TRVK_QP_A 512 /* bytes of rows that are copied */
#define TRVK_QP_K 16  /* K of a chunk of B that is copied */
#else
#define TRVK_QP_A 40960
#define TRVK_QP_K 768
#endif

typedef struct trvk_qwork trvk_qwork;

/* What rows of real numbers add. */
typedef struct trvk_qdynamic {
  /* What does not depend on the block: may set nibbles and row_bytes. */
  void (*prepare)(trvk_qwork* w);
  /* Quantises numbers k0 .. k0+kc of the block's rows into a; looks for their ranges first where k0
   * is 0. */
  void (*rows)(trvk_qwork* w, trv_dim k0, trv_dim kc);
  /* Sums of rows m0 .. m0+rows that end at k_end, where a group ends; results at the end of K. */
  void (*take)(trvk_qwork* w, trv_dim m0, trv_dim rows, trv_dim k_end, trv_dim n);
  /* The whole strip from packed nibbles, where prepare set `nibbles`. */
  void (*strip)(trvk_qwork* w, trv_dim n);
} trvk_qdynamic;

struct trvk_qwork {
  const trvk_call* call;
  const trvk_qmatmul* q;
  const trvk_qgemm* g;
  const trvk_gemm* real;
  const trvk_qdynamic* dynamic;  /* NULL: rows are stored */
  trvk_qout out;                 /* of stored rows */
  int size;                      /* bytes of a number of A as the tile reads it */
  int in_place, copied;          /* A is read where it lies; B is copied chunk by chunk */
  int nibbles, wide;             /* 4-bit groups by strips; sums of 64 bits */
  int sums, colsums;             /* of rows of A, of columns of B are wanted */
  int32_t common;                /* what each number of A counts too much, in all rows */
  trv_dim rows, most, row_bytes; /* rows of a block; K of one pass; bytes of a copied row */
  /* The present block and strip. */
  trv_dim count, col;
  int filled, summed; /* a holds all of K; sum is that of all K */
  trv_dim b_col;      /* b_copy holds all of K of this strip; -1: no */
  const uint8_t *a_data, *b_data;
  uint8_t* y;
  const void* row[TRVK_Q_ROWS];
  trvk_qrow quant[TRVK_Q_ROWS];
  float step[TRVK_Q_ROWS];
  int32_t zero[TRVK_Q_ROWS]; /* of quantised rows */
  int64_t sum[TRVK_Q_ROWS];  /* of A's numbers, less their zero point */
  int32_t cols[TRVK_QT_STRIP], first[TRVK_QT_STRIP];
  int32_t c[TRVK_Q_ROWS * TRVK_QT_STRIP];
  union {
    int64_t wide[TRVK_Q_ROWS * TRVK_QT_STRIP];
    float real[TRVK_Q_ROWS * TRVK_QT_STRIP];
  } u;
  union {
    int8_t bytes[TRVK_QP_A];
    int16_t words[TRVK_QP_A / 2];
    int32_t align;
  } a;
  int8_t b_copy[TRVK_QP_K * TRVK_QT_STRIP];
};

void trvk_qproduct_run(const trvk_call* call, uint32_t tile, const trvk_qgemm* g,
                       const trvk_gemm* real, const trvk_qdynamic* dynamic);
#endif
