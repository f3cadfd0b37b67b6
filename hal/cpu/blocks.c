/* blocks.c - see blocks.h. */
#include "blocks.h"

enum { LONG_ROW = 64 }; /* from here on a row is a block of its own */

void trvk_blocks_begin(trvk_blocks* b, const trvk_call* call, uint32_t inputs, uint32_t tile) {
  const trv_tensor* y = call->out;
  memset(b, 0, sizeof(*b));
  const trv_dim total = trvk_count(y);
  if (total == 0) return;
  memcpy(b->dim, y->dim, sizeof(trv_dim) * y->rank);
  for (uint32_t s = 0; s <= inputs; s++) {
    const trv_tensor* t = s ? &call->in[s - 1] : y;
    trvk_walk_broadcast(t, y, b->stride[s]);
    b->data[s] = t->data;
    b->size[s] = (uint32_t)trv_dtype_size(t->dtype);
  }
  b->rank = trvk_walk_plan(y->rank, b->dim, b->stride, inputs + 1);
  b->dense = b->rank == 1 || b->dim[b->rank - 1] >= LONG_ROW;
  for (uint32_t s = 0; s <= inputs; s++)
    if (b->stride[s][b->rank - 1] != 1) b->dense = 0;
  trvk_split(total, call->tiles, tile, &b->at, &b->end);
  trvk_walk_seek(b->rank, b->dim, b->at, b->index);
}

int trvk_blocks_next(trvk_blocks* b) {
  const uint32_t last = b->rank - 1;
  if (b->n) { /* past the present block */
    if (b->rows > 1)
      trvk_walk_step(last - 1, b->dim, b->index, b->rows);
    else
      trvk_walk_step(last, b->dim, b->index, b->cols);
    b->at += b->n;
  }
  const trv_dim left = b->end - b->at;
  if (left <= 0) return 0;
  const trv_dim most = b->dense || left < TRVK_BLOCK ? left : TRVK_BLOCK;
  b->rows = 1;
  b->cols = b->dim[last] - b->index[last];
  if (b->cols > most) b->cols = most;
  if (last > 0 && !b->dense && b->cols == b->dim[last]) {
    b->rows = most / b->cols;
    if (b->rows > b->dim[last - 1] - b->index[last - 1])
      b->rows = b->dim[last - 1] - b->index[last - 1];
  }
  b->n = b->rows * b->cols;
  return 1;
}

static uint8_t* place(const trvk_blocks* b, uint32_t stream) {
  return b->data[stream] +
         trvk_walk_at(b->rank, b->index, b->stride[stream]) * (trv_dim)b->size[stream];
}

/* Strides of the block's rows and columns in a stream; 1: its elements lie dense. */
static int steps(const trvk_blocks* b, uint32_t stream, trv_dim* row, trv_dim* col) {
  *col = b->stride[stream][b->rank - 1];
  *row = b->rows > 1 ? b->stride[stream][b->rank - 2] : 0;
  return (*col == 1 || b->cols == 1) && (b->rows == 1 || *row == b->cols);
}

#define GATHER(T)                                           \
  for (trv_dim r = 0; r < rows; r++) {                      \
    const T* s = (const T*)(const void*)src + r * row;      \
    T* d = (T*)dst + r * cols;                              \
    if (col == 0)                                           \
      for (trv_dim c = 0; c < cols; c++) d[c] = s[0];       \
    else                                                    \
      for (trv_dim c = 0; c < cols; c++) d[c] = s[c * col]; \
  }
static void gather(void* dst, const uint8_t* src, uint32_t size, trv_dim rows, trv_dim row,
                   trv_dim cols, trv_dim col) {
  if (size == 1) {
    GATHER(uint8_t)
  } else if (size == 2) {
    GATHER(uint16_t)
  } else {
    GATHER(uint32_t)
  }
}

#define SCATTER(T)                                        \
  for (trv_dim r = 0; r < rows; r++) {                    \
    const T* s = (const T*)src + r * cols;                \
    T* d = (T*)(void*)dst + r * row;                      \
    for (trv_dim c = 0; c < cols; c++) d[c * col] = s[c]; \
  }
static void scatter(uint8_t* dst, const void* src, uint32_t size, trv_dim rows, trv_dim row,
                    trv_dim cols, trv_dim col) {
  if (size == 1) {
    SCATTER(uint8_t)
  } else if (size == 2) {
    SCATTER(uint16_t)
  } else {
    SCATTER(uint32_t)
  }
}

const void* trvk_blocks_read(trvk_blocks* b, uint32_t stream, trvk_buffer* buffer) {
  trv_dim row, col;
  const uint8_t* src = place(b, stream);
  if (steps(b, stream, &row, &col)) return src;
  if (row == 0 && b->held[stream] == src && b->held_cols[stream] == b->cols &&
      b->held_rows[stream] >= b->rows)
    return buffer; /* the same row as before, as when a bias is added to each */
  gather(buffer, src, b->size[stream], b->rows, row, b->cols, col);
  b->held[stream] = row == 0 ? src : NULL;
  b->held_rows[stream] = b->rows;
  b->held_cols[stream] = b->cols;
  return buffer;
}

void* trvk_blocks_target(const trvk_blocks* b, trvk_buffer* buffer) {
  trv_dim row, col;
  return steps(b, 0, &row, &col) ? (void*)place(b, 0) : (void*)buffer;
}

void trvk_blocks_write(const trvk_blocks* b, const trvk_buffer* buffer) {
  trv_dim row, col;
  if (!steps(b, 0, &row, &col))
    scatter(place(b, 0), buffer, b->size[0], b->rows, row, b->cols, col);
}
