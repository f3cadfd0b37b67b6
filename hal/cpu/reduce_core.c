/* reduce_core.c - reductions in float (f16, bf16, f32), double (f64) and int64 (integers and bool;
 * sums wrap). */
#include "reduce.h"

static void store_f64(uint8_t* dst, const double* src, uint32_t dtype, trv_dim stride, trv_dim n) {
  trvk_store(dst, src, dtype, 1, 0, n, stride);
}

#define T float
#define SUM_T float
#define NAME(name) name##_f32
#define NATIVE TRV_DTYPE_F32
#define LOAD trvk_load_f32
#define STORE trvk_store_f32
#define IS_NAN(x) ((x) != (x))
#define IS_FLOAT 1
#include "reduce.inc"
#undef T
#undef SUM_T
#undef NAME
#undef NATIVE
#undef LOAD
#undef STORE

#define T double
#define SUM_T double
#define NAME(name) name##_f64
#define NATIVE TRV_DTYPE_F64
#define LOAD trvk_load_f64
#define STORE store_f64
#include "reduce.inc"
#undef T
#undef SUM_T
#undef NAME
#undef NATIVE
#undef LOAD
#undef STORE
#undef IS_NAN
#undef IS_FLOAT

#define T int64_t
#define SUM_T uint64_t
#define NAME(name) name##_i64
#define NATIVE TRV_DTYPE_I64
#define LOAD trvk_load_i64
#define STORE trvk_store_i64
#define IS_NAN(x) 0
#define IS_FLOAT 0
#include "reduce.inc"
