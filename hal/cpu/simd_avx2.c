/* simd_avx2.c - the plain families of variant.h for AVX2. */
#if defined(__x86_64__) && defined(__GNUC__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,prefer-vector-width=256")
#endif
#define TRVK_VARIANT __avx2
/* clang-format off: the order is that of their macros */
#include "convert.c"
#include "map.c"
#include "map_float.c"
#include "map_int.c"
#include "norm.c"
#include "softmax.c"
/* clang-format on */
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int trvk_no_simd_avx2; /* C wants something in a file */
#endif
