/* pool_avx2.c - pooling for AVX2. */
#if defined(__x86_64__) && defined(__GNUC__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
#define TRVK_POOL trvk_pool__avx2
#include "pool.c"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int trvk_no_pool_avx2; /* C wants something in a file */
#endif
