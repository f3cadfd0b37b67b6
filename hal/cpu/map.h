/* map.h - inside of the map operator: map.c walks, map_float.c and map_int.c compute. */
#ifndef TRVK_MAP_H
#define TRVK_MAP_H

#include "convert.h"

/* dst[i] = op(a[i], b[i], c[i]) for n dense values. Operands have the working type of the
 * function's name; results too, but for comparisons and tests (bool). dst may be an operand. No op
 * here yields what is not representable but by wrapping; results of narrow dtypes are rounded or
 * wrapped by the caller. */
void trvk_map_f32(uint32_t op, void* dst, const void* a, const void* b, const void* c, trv_dim n);
void trvk_map_f64(uint32_t op, void* dst, const void* a, const void* b, const void* c, trv_dim n);
void trvk_map_i32(uint32_t op, void* dst, const void* a, const void* b, const void* c, trv_dim n);
void trvk_map_i64(uint32_t op, void* dst, const void* a, const void* b, const void* c, trv_dim n);
void trvk_map_bool(uint32_t op, void* dst, const void* a, const void* b, const void* c, trv_dim n);

/* One case of the switch over op: y = e(x), y = e(x, y), comparison. */
#define MAP_CASE1(OP, T, R, e)                   \
  case TRV_MAP_OP_##OP: {                        \
    R* d = dst;                                  \
    const T* pa = a;                             \
    TRVK_IVDEP for (trv_dim i = 0; i < n; i++) { \
      const T x = pa[i];                         \
      d[i] = (R)(e);                             \
    }                                            \
    break;                                       \
  }
#define MAP_CASE2(OP, T, R, e)                   \
  case TRV_MAP_OP_##OP: {                        \
    R* d = dst;                                  \
    const T *pa = a, *pb = b;                    \
    TRVK_IVDEP for (trv_dim i = 0; i < n; i++) { \
      const T x = pa[i], y = pb[i];              \
      d[i] = (R)(e);                             \
    }                                            \
    break;                                       \
  }
#define MAP_COMPARES(T)             \
  MAP_CASE2(EQ, T, uint8_t, x == y) \
  MAP_CASE2(NE, T, uint8_t, x != y) \
  MAP_CASE2(LT, T, uint8_t, x < y)  \
  MAP_CASE2(LE, T, uint8_t, x <= y) \
  MAP_CASE2(GT, T, uint8_t, x > y)  \
  MAP_CASE2(GE, T, uint8_t, x >= y) \
  MAP_CASE1(LOGICAL_NOT, T, uint8_t, x == 0)
#endif
