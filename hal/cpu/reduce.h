/* reduce.h - inside of the reductions: reduce.c plans, reduce.inc computes for one working type. */
#ifndef TRVK_REDUCE_H
#define TRVK_REDUCE_H

#include "convert.h"

enum {
  LANES = 32, /* partial results; more than the compiler unrolls, so that it makes a vector loop of
                 them */
  TRVK_REDUCE_CHUNK = 256, /* elements of a row at a time */
  TRVK_REDUCE_COLS = 128   /* outputs at a time when the dense axis is kept */
};

/* The axes that are kept (rank k, at least 1) and those that are reduced (rank r, at least 1),
 * outermost first. */
typedef struct trvk_reduce_plan {
  uint32_t k, r;
  trv_dim kept[TRV_MAX_RANK], kept_in[TRV_MAX_RANK],
      kept_out[TRV_MAX_RANK]; /* sizes; strides of input and output */
  trv_dim reduced[TRV_MAX_RANK], reduced_in[TRV_MAX_RANK];
  trv_dim outputs, count; /* products of kept and reduced */
  uint32_t kind, dtype, out_dtype;
  float correction;
} trvk_reduce_plan;

/* The walk of a reduction over the set `axes`; kind and correction are the caller's. keep_order:
 * reduced axes are not sorted by stride. Reads call->in[0] and out[0] only, as does
 * trvk_reduce_tiles_of. */
void trvk_reduce_plan_axes(trvk_reduce_plan* p, const trvk_call* call, uint32_t axes,
                           int keep_order);
uint32_t trvk_reduce_tiles_of(const trvk_call* call, uint32_t axes, uint32_t workers);

/* One output from the input that begins at x: rows along the innermost reduced axis. */
void trvk_reduce_row_f32(const trvk_reduce_plan* p, const uint8_t* x, uint8_t* out);
void trvk_reduce_row_f64(const trvk_reduce_plan* p, const uint8_t* x, uint8_t* out);
void trvk_reduce_row_i64(const trvk_reduce_plan* p, const uint8_t* x, uint8_t* out);
/* cols <= TRVK_REDUCE_COLS outputs along the innermost kept axis. */
void trvk_reduce_cols_f32(const trvk_reduce_plan* p, const uint8_t* x, uint8_t* out, trv_dim cols);
void trvk_reduce_cols_f64(const trvk_reduce_plan* p, const uint8_t* x, uint8_t* out, trv_dim cols);
void trvk_reduce_cols_i64(const trvk_reduce_plan* p, const uint8_t* x, uint8_t* out, trv_dim cols);
#endif
