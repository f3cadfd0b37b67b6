/* qplain_avx512.c - the plain families of stored integers (variant.h) for AVX-512. */
#if defined(__x86_64__) && defined(__GNUC__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif
#define TRVK_VARIANT __avx512
#define TRVV_N 16
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
typedef int trvk_no_qplain_avx512; /* C wants something in a file */
#endif
