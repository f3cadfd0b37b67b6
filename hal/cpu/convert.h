/* convert.h - rows of elements of any dtype to and from the few types that kernels compute in.
 *
 * The five working types: bool as uint8_t 0/1; u8 i8 i16 i32 as int32_t; i64 as int64_t; f16 bf16
 * f32 as float; f64 as double. Strides are in elements. A block is rows * cols elements, written or
 * read densely on the working side.
 */
#ifndef TRVK_CONVERT_H
#define TRVK_CONVERT_H

#include "ops.h"
#include "variant.h"

/* Partial results side by side (one vector loop over them), elements and columns at a time. */
enum { TRVK_LANES = 32, TRVK_CHUNK = 256, TRVK_COLS = 64 };
enum { TRVK_WORK_BOOL, TRVK_WORK_I32, TRVK_WORK_I64, TRVK_WORK_F32, TRVK_WORK_F64 };

static inline uint32_t trvk_work(uint32_t dtype) {
  static const uint8_t work[TRV_DTYPE_COUNT] = {
      TRVK_WORK_BOOL, TRVK_WORK_BOOL, TRVK_WORK_I32, TRVK_WORK_I32, TRVK_WORK_I32, TRVK_WORK_I32,
      TRVK_WORK_I64,  TRVK_WORK_F32,  TRVK_WORK_F32, TRVK_WORK_F32, TRVK_WORK_F64};
  return work[dtype];
}
static inline size_t trvk_work_size(uint32_t work) {
  return work == TRVK_WORK_BOOL ? 1 : work == TRVK_WORK_I32 || work == TRVK_WORK_F32 ? 4 : 8;
}
/* Is an element in memory already in its working type? */
static inline int trvk_native(uint32_t dtype) {
  return dtype == TRV_DTYPE_BOOL || dtype == TRV_DTYPE_I32 || dtype == TRV_DTYPE_I64 ||
         dtype == TRV_DTYPE_F32 || dtype == TRV_DTYPE_F64;
}

/* Memory to working type of dtype. */
void trvk_load(void* dst, const uint8_t* src, uint32_t dtype, trv_dim rows, trv_dim row_stride,
               trv_dim cols, trv_dim col_stride);
/* Working type of dtype to memory (integers wrap, f16 and bf16 are rounded to nearest even). */
void trvk_store(uint8_t* dst, const void* src, uint32_t dtype, trv_dim rows, trv_dim row_stride,
                trv_dim cols, trv_dim col_stride);
/* Between working types, dense: from the working type of dtype `from` to that of dtype `to`,
 * wrapped or rounded to it. */
void trvk_cast(void* dst, uint32_t to, const void* src, uint32_t from, trv_dim n);
/* Wraps or rounds dense working values to dtype, in place. */
void trvk_narrow(void* values, uint32_t dtype, trv_dim n);

/* Any dtype but f64 and i64 to float, as torch converts; any dtype to double; integers and bool to
 * int64. One row. */
void trvk_load_f32(float* dst, const uint8_t* src, uint32_t dtype, trv_dim stride, trv_dim n);
void trvk_load_f64(double* dst, const uint8_t* src, uint32_t dtype, trv_dim stride, trv_dim n);
void trvk_load_i64(int64_t* dst, const uint8_t* src, uint32_t dtype, trv_dim stride, trv_dim n);
/* One row of floats to f16, bf16 or f32; of int64 to any integer dtype or bool. */
void trvk_store_f32(uint8_t* dst, const float* src, uint32_t dtype, trv_dim stride, trv_dim n);
void trvk_store_i64(uint8_t* dst, const int64_t* src, uint32_t dtype, trv_dim stride, trv_dim n);
static inline void trvk_store_f64(uint8_t* dst, const double* src, uint32_t dtype, trv_dim stride,
                                  trv_dim n) {
  trvk_store(dst, src, dtype, 1, 0, n, stride);
}

/* n indices from position p (elements) on: negative ones counted from the end, bad ones replaced by
 * 0. Returns 1 if there were any bad ones. */
static inline int trvk_load_indices(int64_t* at, const trv_tensor* index, trv_dim p, trv_dim step,
                                    trv_dim n, int64_t size) {
  int bad = 0;
  trvk_load_i64(at, index->data + p * (trv_dim)trv_dtype_size(index->dtype), index->dtype, step, n);
  for (trv_dim i = 0; i < n; i++) {
    const int64_t v = at[i] < 0 ? at[i] + size : at[i];
    const int outside = v < 0 || v >= size;
    at[i] = outside ? 0 : v;
    bad |= outside;
  }
  return bad;
}

/* Conversions without branches, for loops that vectorise. */
static inline float trvk_half_to_float(uint16_t h) {
  union {
    uint32_t u;
    float f;
  } a, v;
  a.u = (uint32_t)(h & 0x7FFFu) << 13;
  v.f = a.f * 5.192296858534828e33f; /* 2^112: the difference of the exponents' offsets */
  v.u = a.u >= 0x0F800000u ? a.u | 0x7F800000u : v.u;
  v.u |= (uint32_t)(h & 0x8000u) << 16;
  return v.f;
}
static inline uint16_t trvk_float_to_half(float f) {
  union {
    float f;
    uint32_t u;
  } v = {f}, s;
  const uint32_t sign = (v.u >> 16) & 0x8000u, a = v.u & 0x7FFFFFFFu;
  s.u = a < 0x38800000u ? a : 0u;
  s.f += 0.5f;
  const uint32_t small = s.u - 0x3F000000u, normal = (a + 0xC8000FFFu + ((a >> 13) & 1u)) >> 13;
  const uint32_t nan = 0x7E00u | ((a >> 13) & 0x1FFu);
  const uint32_t big = a > 0x7F800000u ? nan : 0x7C00u;
  const uint32_t finite = a < 0x38800000u ? small : normal;
  return (uint16_t)(sign | (a >= 0x477FF000u ? big : finite));
}
static inline uint16_t trvk_float_to_bfloat(float f) {
  union {
    float f;
    uint32_t u;
  } v = {f};
  const uint32_t nan = (v.u >> 16) | 0x40u, round = (v.u + 0x7FFFu + ((v.u >> 16) & 1u)) >> 16;
  return (uint16_t)((v.u & 0x7FFFFFFFu) > 0x7F800000u ? nan : round);
}
static inline float trvk_same_f32(float x) { return x; }
static inline double trvk_same_f64(double x) { return x; }

/* Float to integer without undefined behaviour: truncation; out of range saturates, NaN gives the
 * least value or 0. */
static inline int32_t trvk_f32_to_i32(float x) {
  const float lo = x > -2147483648.0f ? x : -2147483648.0f;
  return (int32_t)(lo < 2147483520.0f ? lo : 2147483520.0f);
}
static inline int64_t trvk_f32_to_i64(float x) {
  const float lo = x > -9223372036854775808.0f ? x : -9223372036854775808.0f;
  return (int64_t)(lo < 9223371487098961920.0f ? lo : 9223371487098961920.0f);
}
static inline int32_t trvk_f64_to_i32(double x) {
  const double lo = x > -2147483648.0 ? x : -2147483648.0;
  return (int32_t)(lo < 2147483647.0 ? lo : 2147483647.0);
}
static inline int64_t trvk_f64_to_i64(double x) {
  const double lo = x > -9223372036854775808.0 ? x : -9223372036854775808.0;
  return (int64_t)(lo < 9223372036854774784.0 ? lo : 9223372036854774784.0);
}
#endif
