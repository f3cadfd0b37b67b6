/* map_int.c - integer and bool operators of map. u8, i8, i16 are computed as int32 and wrapped
 * afterwards. */
#include "map.h"

#define INT int32_t
#define UINT uint32_t
#define BITS 32
#define NAME(name) name##_i32
#include "map_int.inc"
#undef INT
#undef UINT
#undef BITS
#undef NAME

#define INT int64_t
#define UINT uint64_t
#define BITS 64
#define NAME(name) name##_i64
#include "map_int.inc"
#undef INT
#undef UINT
#undef BITS
#undef NAME

void trvk_map_bool(uint32_t op, void* dst, const void* a, const void* b, const void* c, trv_dim n) {
  (void)c;
  switch (op) {
    MAP_CASE2(ADD, uint8_t, uint8_t, x | y)
    MAP_CASE2(MUL, uint8_t, uint8_t, x& y)
    MAP_CASE2(MIN, uint8_t, uint8_t, x& y)
    MAP_CASE2(MAX, uint8_t, uint8_t, x | y)
    MAP_CASE2(FMIN, uint8_t, uint8_t, x& y)
    MAP_CASE2(FMAX, uint8_t, uint8_t, x | y)
    MAP_COMPARES(uint8_t)
    MAP_CASE2(AND, uint8_t, uint8_t, x& y)
    MAP_CASE2(OR, uint8_t, uint8_t, x | y)
    MAP_CASE2(XOR, uint8_t, uint8_t, x ^ y)
    MAP_CASE1(NOT, uint8_t, uint8_t, x == 0)
    MAP_CASE1(SIGN, uint8_t, uint8_t, x)
    case TRV_MAP_OP_IS_NAN:
    case TRV_MAP_OP_IS_INF:
      memset(dst, 0, (size_t)n);
      break;
    default:
      break;
  }
}
