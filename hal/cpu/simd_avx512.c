/* simd_avx512.c - the plain families of variant.h for AVX-512. */
#if defined(__x86_64__) && defined(__GNUC__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif
#define TRVK_VARIANT __avx512
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
typedef int trvk_no_simd_avx512; /* C wants something in a file */
#endif
