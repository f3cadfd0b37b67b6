/* convert.c - see convert.h. */
#include "convert.h"

#define NO_OP(x) (x)
#define IS_SET(x) ((uint8_t)((x) != 0))

/* dst[r][c] = f(src[r * rs + c * cs]), the common unit stride apart so that it vectorises. */
#define LOAD(D, S, f)                                                   \
  {                                                                     \
    D* d = dst;                                                         \
    const S* s = (const S*)(const void*)src;                            \
    for (trv_dim r = 0; r < rows; r++, d += cols, s += row_stride) {    \
      if (col_stride == 1)                                              \
        for (trv_dim c = 0; c < cols; c++) d[c] = f(s[c]);              \
      else if (col_stride == 0)                                         \
        for (trv_dim c = 0; c < cols; c++) d[c] = f(s[0]);              \
      else                                                              \
        for (trv_dim c = 0; c < cols; c++) d[c] = f(s[c * col_stride]); \
    }                                                                   \
    break;                                                              \
  }

void trvk_load(void* dst, const uint8_t* src, uint32_t dtype, trv_dim rows, trv_dim row_stride,
               trv_dim cols, trv_dim col_stride) {
  switch (dtype) {
    case TRV_DTYPE_BOOL:
      LOAD(uint8_t, uint8_t, NO_OP)
    case TRV_DTYPE_U8:
      LOAD(int32_t, uint8_t, NO_OP)
    case TRV_DTYPE_I8:
      LOAD(int32_t, int8_t, NO_OP)
    case TRV_DTYPE_I16:
      LOAD(int32_t, int16_t, NO_OP)
    case TRV_DTYPE_I32:
      LOAD(int32_t, int32_t, NO_OP)
    case TRV_DTYPE_I64:
      LOAD(int64_t, int64_t, NO_OP)
    case TRV_DTYPE_F16:
      LOAD(float, uint16_t, trvk_half_to_float)
    case TRV_DTYPE_BF16:
      LOAD(float, uint16_t, trvk_bf16_to_f32)
    case TRV_DTYPE_F32:
      LOAD(float, float, NO_OP)
    case TRV_DTYPE_F64:
      LOAD(double, double, NO_OP)
    default:
      break;
  }
}

#define STORE(D, S, f)                                                     \
  {                                                                        \
    D* d = (D*)(void*)dst;                                                 \
    const S* s = src;                                                      \
    for (trv_dim r = 0; r < rows; r++, d += row_stride, s += cols) {       \
      if (col_stride == 1) {                                               \
        TRVK_IVDEP for (trv_dim c = 0; c < cols; c++) d[c] = (D)f(s[c]);   \
      } else {                                                             \
        for (trv_dim c = 0; c < cols; c++) d[c * col_stride] = (D)f(s[c]); \
      }                                                                    \
    }                                                                      \
    break;                                                                 \
  }

void trvk_store(uint8_t* dst, const void* src, uint32_t dtype, trv_dim rows, trv_dim row_stride,
                trv_dim cols, trv_dim col_stride) {
  switch (dtype) {
    case TRV_DTYPE_BOOL:
      STORE(uint8_t, uint8_t, NO_OP)
    case TRV_DTYPE_U8:
      STORE(uint8_t, int32_t, NO_OP)
    case TRV_DTYPE_I8:
      STORE(int8_t, int32_t, NO_OP)
    case TRV_DTYPE_I16:
      STORE(int16_t, int32_t, NO_OP)
    case TRV_DTYPE_I32:
      STORE(int32_t, int32_t, NO_OP)
    case TRV_DTYPE_I64:
      STORE(int64_t, int64_t, NO_OP)
    case TRV_DTYPE_F16:
      STORE(uint16_t, float, trvk_float_to_half)
    case TRV_DTYPE_BF16:
      STORE(uint16_t, float, trvk_float_to_bfloat)
    case TRV_DTYPE_F32:
      STORE(float, float, NO_OP)
    case TRV_DTYPE_F64:
      STORE(double, double, NO_OP)
    default:
      break;
  }
}

#define NARROW(T, f)                                \
  {                                                 \
    T* v = values;                                  \
    for (trv_dim i = 0; i < n; i++) v[i] = f(v[i]); \
    break;                                          \
  }
#define TO_U8(x) (int32_t)(uint8_t)(x)
#define TO_I8(x) (int32_t)(int8_t)(x)
#define TO_I16(x) (int32_t)(int16_t)(x)
#define TO_F16(x) trvk_half_to_float(trvk_float_to_half(x))
#define TO_BF16(x) trvk_bf16_to_f32(trvk_float_to_bfloat(x))

void trvk_narrow(void* values, uint32_t dtype, trv_dim n) {
  switch (dtype) {
    case TRV_DTYPE_U8:
      NARROW(int32_t, TO_U8)
    case TRV_DTYPE_I8:
      NARROW(int32_t, TO_I8)
    case TRV_DTYPE_I16:
      NARROW(int32_t, TO_I16)
    case TRV_DTYPE_F16:
      NARROW(float, TO_F16)
    case TRV_DTYPE_BF16:
      NARROW(float, TO_BF16)
    default:
      break;
  }
}

#define CAST(D, S, f)                                             \
  {                                                               \
    D* d = dst;                                                   \
    const S* s = src;                                             \
    TRVK_IVDEP for (trv_dim i = 0; i < n; i++) d[i] = (D)f(s[i]); \
    break;                                                        \
  }
#define CAST_FROM(D, BOOL, I32, I64, F32, F64) \
  switch (trvk_work(from)) {                   \
    case TRVK_WORK_BOOL:                       \
      CAST(D, uint8_t, BOOL)                   \
    case TRVK_WORK_I32:                        \
      CAST(D, int32_t, I32)                    \
    case TRVK_WORK_I64:                        \
      CAST(D, int64_t, I64)                    \
    case TRVK_WORK_F32:                        \
      CAST(D, float, F32)                      \
    default:                                   \
      CAST(D, double, F64)                     \
  }

void trvk_cast(void* dst, uint32_t to, const void* src, uint32_t from, trv_dim n) {
  switch (trvk_work(to)) {
    case TRVK_WORK_BOOL:
      CAST_FROM(uint8_t, IS_SET, IS_SET, IS_SET, IS_SET, IS_SET) break;
    case TRVK_WORK_I32:
      CAST_FROM(int32_t, NO_OP, NO_OP, NO_OP, trvk_f32_to_i32, trvk_f64_to_i32) break;
    case TRVK_WORK_I64:
      CAST_FROM(int64_t, NO_OP, NO_OP, NO_OP, trvk_f32_to_i64, trvk_f64_to_i64) break;
    case TRVK_WORK_F32:
      CAST_FROM(float, NO_OP, NO_OP, NO_OP, NO_OP, NO_OP) break;
    default:
      CAST_FROM(double, NO_OP, NO_OP, NO_OP, NO_OP, NO_OP) break;
  }
  trvk_narrow(dst, to, n);
}

#define ROW(D, S, f)                                                \
  {                                                                 \
    const S* s = (const S*)(const void*)src;                        \
    if (stride == 1)                                                \
      for (trv_dim i = 0; i < n; i++) dst[i] = (D)f(s[i]);          \
    else                                                            \
      for (trv_dim i = 0; i < n; i++) dst[i] = (D)f(s[i * stride]); \
    break;                                                          \
  }

void trvk_load_f32(float* dst, const uint8_t* src, uint32_t dtype, trv_dim stride, trv_dim n) {
  switch (dtype) {
    case TRV_DTYPE_BOOL:
      ROW(float, uint8_t, IS_SET)
    case TRV_DTYPE_U8:
      ROW(float, uint8_t, NO_OP)
    case TRV_DTYPE_I8:
      ROW(float, int8_t, NO_OP)
    case TRV_DTYPE_I16:
      ROW(float, int16_t, NO_OP)
    case TRV_DTYPE_I32:
      ROW(float, int32_t, NO_OP)
    case TRV_DTYPE_F16:
      ROW(float, uint16_t, trvk_half_to_float)
    case TRV_DTYPE_BF16:
      ROW(float, uint16_t, trvk_bf16_to_f32)
    case TRV_DTYPE_F32:
      ROW(float, float, NO_OP)
    default:
      break;
  }
}

void trvk_load_f64(double* dst, const uint8_t* src, uint32_t dtype, trv_dim stride, trv_dim n) {
  switch (dtype) {
    case TRV_DTYPE_BOOL:
      ROW(double, uint8_t, IS_SET)
    case TRV_DTYPE_U8:
      ROW(double, uint8_t, NO_OP)
    case TRV_DTYPE_I8:
      ROW(double, int8_t, NO_OP)
    case TRV_DTYPE_I16:
      ROW(double, int16_t, NO_OP)
    case TRV_DTYPE_I32:
      ROW(double, int32_t, NO_OP)
    case TRV_DTYPE_I64:
      ROW(double, int64_t, NO_OP)
    case TRV_DTYPE_F16:
      ROW(double, uint16_t, trvk_half_to_float)
    case TRV_DTYPE_BF16:
      ROW(double, uint16_t, trvk_bf16_to_f32)
    case TRV_DTYPE_F32:
      ROW(double, float, NO_OP)
    case TRV_DTYPE_F64:
      ROW(double, double, NO_OP)
    default:
      break;
  }
}

void trvk_load_i64(int64_t* dst, const uint8_t* src, uint32_t dtype, trv_dim stride, trv_dim n) {
  switch (dtype) {
    case TRV_DTYPE_BOOL:
      ROW(int64_t, uint8_t, IS_SET)
    case TRV_DTYPE_U8:
      ROW(int64_t, uint8_t, NO_OP)
    case TRV_DTYPE_I8:
      ROW(int64_t, int8_t, NO_OP)
    case TRV_DTYPE_I16:
      ROW(int64_t, int16_t, NO_OP)
    case TRV_DTYPE_I32:
      ROW(int64_t, int32_t, NO_OP)
    case TRV_DTYPE_I64:
      ROW(int64_t, int64_t, NO_OP)
    default:
      break;
  }
}

void trvk_store_f32(uint8_t* dst, const float* src, uint32_t dtype, trv_dim stride, trv_dim n) {
  trvk_store(dst, src, dtype, 1, 0, n, stride);
}

#define ROW_OUT(D, f)                                             \
  {                                                               \
    D* d = (D*)(void*)dst;                                        \
    for (trv_dim i = 0; i < n; i++) d[i * stride] = (D)f(src[i]); \
    break;                                                        \
  }

void trvk_store_i64(uint8_t* dst, const int64_t* src, uint32_t dtype, trv_dim stride, trv_dim n) {
  switch (dtype) {
    case TRV_DTYPE_BOOL:
      ROW_OUT(uint8_t, IS_SET)
    case TRV_DTYPE_U8:
      ROW_OUT(uint8_t, NO_OP)
    case TRV_DTYPE_I8:
      ROW_OUT(int8_t, NO_OP)
    case TRV_DTYPE_I16:
      ROW_OUT(int16_t, NO_OP)
    case TRV_DTYPE_I32:
      ROW_OUT(int32_t, NO_OP)
    case TRV_DTYPE_I64:
      ROW_OUT(int64_t, NO_OP)
    default:
      break;
  }
}
#undef LOAD
#undef STORE
