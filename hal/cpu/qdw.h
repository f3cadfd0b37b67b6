/* qdw.h - depthwise convolution of i8 in vectors: 16 channels that lie together, one or two rows of
 * outputs at a time.
 *
 * Kernel rows (of all depths) are taken in fours: the same column of four input rows is interleaved
 * to [16 channels][4], once for all outputs that meet it, so that a dot-product instruction takes
 * four taps. Two rows of outputs share the interleaved columns where the stride is 1. Cells outside
 * are filled with the zero point; what it and the offset of unsigned numbers add to a sum is known
 * ahead, and comes off the bias. A table of functions per instruction set (qdw_tiles.h) holds the
 * vectors; all else is shared (qdw.c). Packed weights are as the plain path reads them.
 */
#ifndef TRVK_QDW_H
#define TRVK_QDW_H

#include "qconv.h"

enum {
  TRVK_QDW_LANES = 16, /* channels at a time */
  TRVK_QDW_SLOTS = 16, /* kernel rows, and one for the second row of outputs per depth */
  TRVK_QDW_V = 16384,  /* bytes of interleaved columns */
  TRVK_QDW_W = 4096    /* bytes of interleaved weights of 16 channels */
};

/* One or two rows of outputs, a run of columns, up to 16 channels. */
typedef struct trvk_qdw_job {
  const int8_t* row[TRVK_QDW_SLOTS];  /* column lo of 4 * quads input rows */
  trv_dim step[TRVK_QDW_SLOTS];       /* from one column to the next; 0: a row outside */
  trv_dim cols, lo, hi;               /* columns to interleave; those in lo .. hi exist */
  trv_dim count, stride, dilation;    /* outputs of a row; steps in columns */
  trv_dim channels, y_step, out_rows; /* out_rows: of y that are stored, at most rows */
  int quads, kernel, rows;
  int32_t x_zero, y_zero, y_lo, y_hi;
  int8_t* y[2];
  const uint8_t* w;                      /* [quads][kernel][rows] of what `weights` writes */
  const int32_t *bias, *m, *half, *down; /* of 16 channels (qsimd.h; m: 17 numbers) */
  int32_t* sums; /* not NULL: sums + bias go here, [rows][count][16], instead of results to y */
  uint8_t* v;    /* room for cols * quads of the size of four taps */
} trvk_qdw_job;

typedef struct trvk_qdw {
  trv_dim bytes;  /* of four taps of 16 channels */
  int32_t offset; /* what is added to x before it meets weights */
  void (*weights)(const int8_t (*taps)[TRVK_QDW_LANES], uint8_t* to); /* four rows of numbers */
  void (*run)(const trvk_qdw_job* job);
} trvk_qdw;

void trvk_qdw_run(const trvk_qconv* q, trvk_qout* out, int32_t x_zero, uint32_t tile,
                  const trvk_qdw* dw);
#endif
