/* qplain_avx2.c - the plain families of stored integers (variant.h) for AVX2. */
#if defined(__x86_64__) && defined(__GNUC__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,prefer-vector-width=256")
#endif
#define TRVK_VARIANT __avx2
#define TRVV_N 8
/* clang-format off: the order is that of their macros */
#include "average.c"
#include "binary.c"
#include "lookup.c"
#include "qnorm.c"
#include "qpool.c"
#include "qreduce.c"
#include "qsoftmax.c"
#include "requantize.c"
/* clang-format on */
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int trvk_no_qplain_avx2; /* C wants something in a file */
#endif
