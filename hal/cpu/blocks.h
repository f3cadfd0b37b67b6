/* blocks.h - elementwise work over strided tensors, for kernels that are written for dense rows
 * only.
 *
 * The output's index space is cut into blocks: long pieces of a row where every tensor is dense
 * along it, else at most TRVK_BLOCK elements (pieces of a row, or several short rows), which are
 * gathered into a buffer or scattered out of one where they do not lie dense in memory. Elements
 * are moved as they are, whatever their dtype.
 */
#ifndef TRVK_BLOCKS_H
#define TRVK_BLOCKS_H

#include "walk.h"

#if TRVK_M
#define TRVK_BLOCK 32
#else
#define TRVK_BLOCK 512 /* elements */
#endif

enum { TRVK_BLOCK_STREAMS = 3 }; /* output, then up to two inputs */

/* Room for the elements of one stream. */
typedef union trvk_buffer {
  uint8_t bytes[TRVK_BLOCK * 4];
  uint32_t align;
} trvk_buffer;

typedef struct trvk_blocks {
  uint32_t rank;
  int dense; /* rows are long and dense in every stream: never gathered */
  trv_dim dim[TRV_MAX_RANK], stride[TRVK_BLOCK_STREAMS][TRV_MAX_RANK];
  uint8_t* data[TRVK_BLOCK_STREAMS];
  uint32_t size[TRVK_BLOCK_STREAMS];       /* of an element: 1, 2 or 4 */
  trv_dim at, end;                         /* position of the next block, end of the tile */
  trv_dim rows, cols, n;                   /* of the present block; n = rows * cols */
  trv_dim index[TRV_MAX_RANK];             /* of its first element */
  const uint8_t* held[TRVK_BLOCK_STREAMS]; /* what a stream's buffer was gathered from */
  trv_dim held_rows[TRVK_BLOCK_STREAMS], held_cols[TRVK_BLOCK_STREAMS];
} trvk_blocks;

/* The tile's part of call->out[0] (stream 0) and of the first `inputs` inputs, broadcast to it
 * (streams 1..). */
void trvk_blocks_begin(trvk_blocks* b, const trvk_call* call, uint32_t inputs, uint32_t tile);
/* Moves to the next block; 0: there is none. */
int trvk_blocks_next(trvk_blocks* b);
/* The block's n elements of an input, in memory or in the buffer. A stream keeps to one buffer. */
const void* trvk_blocks_read(trvk_blocks* b, uint32_t stream, trvk_buffer* buffer);
/* Where n elements of output are to be written, and then their way to memory. */
void* trvk_blocks_target(const trvk_blocks* b, trvk_buffer* buffer);
void trvk_blocks_write(const trvk_blocks* b, const trvk_buffer* buffer);

/* y[i] = table[x[i]] with elements of 1, 2 or 4 bytes; the first of 256 entries is that of the
 * least x. y may be x. */
void trvk_lookup_row(void* y, const void* x, uint32_t x_dtype, const void* table, uint32_t size,
                     trv_dim n);

/* A factor in two parts, so that products with 16-bit numbers need 32 bits only and loops
 * vectorise: m = high * 2^16 + low. With H and L, sums of products with the high and the low parts,
 *   floor((H * 2^16 + L + 2^(s-1)) / 2^s) = (((H + (L >> 16)) >> (s - 17)) + 1) >> 1   for s >= 17.
 */
typedef struct trvk_parts {
  int32_t high, low; /* low in -2^15 .. 2^15 - 1 */
} trvk_parts;
static inline trvk_parts trvk_split_factor(int64_t m) {
  trvk_parts p;
  p.low = (int16_t)(m & 0xFFFF);
  p.high = (int32_t)((m - p.low) >> 16);
  return p;
}
/* Are both parts of +-m within +-(2^15 - 1)? */
static inline int trvk_splits(int32_t m) {
  return m <= 0x7FFF7FFF && (int16_t)(m & 0xFFFF) != INT16_MIN;
}
enum { TRVK_SPLIT_SHIFT = 17, TRVK_SPLIT_SHIFT_MAX = 47 };
static inline int32_t trvk_join(int32_t high, int32_t low, int shift) {
  return (((high + (low >> 16)) >> (shift - TRVK_SPLIT_SHIFT)) + 1) >> 1;
}
#endif
