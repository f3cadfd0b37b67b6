/* lookup.c - any function of one 8-bit value: a table of 256 results. */
/* clang-format off: its macros rename what the others declare */
#include "variant.h"
/* clang-format on */
#include "blocks.h"
#if defined(TRVV_N)
#include <immintrin.h>
#endif

#ifndef TRVK_VARIANT
const char* trvk_lookup_check(const trvk_call* call, int64_t* expected, int64_t* got) {
  const trv_tensor *x = call->in, *table = call->in + 1, *y = call->out;
  if (x->dtype != TRV_DTYPE_I8 && x->dtype != TRV_DTYPE_U8)
    return trvk_fail(TRVK_SAY("lookup: the input must be i8 or u8"), TRV_DTYPE_I8, x->dtype,
                     expected, got);
  if (table->dtype != y->dtype)
    return trvk_fail(TRVK_SAY("lookup: dtypes of table and output differ"), table->dtype, y->dtype,
                     expected, got);
  if (trv_dtype_size(y->dtype) > 4)
    return trvk_fail(TRVK_SAY("lookup: dtype without a kernel"), TRV_DTYPE_F32, y->dtype, expected,
                     got);
  if (table->rank != 1 || table->dim[0] != 256 || table->stride[0] != 1)
    return trvk_fail(TRVK_SAY("lookup: the table must be one dense row of 256"), 256,
                     (int64_t)trvk_count(table), expected, got);
  if (!trvk_same_shape(x, y))
    return trvk_fail(TRVK_SAY("lookup: shapes differ"), (int64_t)trvk_count(x),
                     (int64_t)trvk_count(y), expected, got);
  return NULL;
}

uint32_t trvk_lookup_tiles(const trvk_call* call, uint32_t workers) {
  const trv_dim n = trvk_count(call->out);
  return trvk_tiles(n, n / 1024, workers);
}
#endif

/* Eight at a time, all read before the first is written. */
#define LOOK(T, X)                                                                    \
  {                                                                                   \
    const X* s = x;                                                                   \
    trv_dim i = 0;                                                                    \
    for (; i + 8 <= n; i += 8) {                                                      \
      const T r0 = t[s[i]], r1 = t[s[i + 1]], r2 = t[s[i + 2]], r3 = t[s[i + 3]];     \
      const T r4 = t[s[i + 4]], r5 = t[s[i + 5]], r6 = t[s[i + 6]], r7 = t[s[i + 7]]; \
      d[i] = r0, d[i + 1] = r1, d[i + 2] = r2, d[i + 3] = r3;                         \
      d[i + 4] = r4, d[i + 5] = r5, d[i + 6] = r6, d[i + 7] = r7;                     \
    }                                                                                 \
    for (; i < n; i++) d[i] = t[s[i]];                                                \
  }
#define ROW(T)                     \
  {                                \
    const T* t = table;            \
    T* d = y;                      \
    if (x_dtype == TRV_DTYPE_I8) { \
      t += 128;                    \
      LOOK(T, int8_t)              \
    } else {                       \
      LOOK(T, uint8_t)             \
    }                              \
  }
#if defined(TRVV_N) && TRVV_N == 16
/* 64 results of 8 bits at a time: the table as 128 words in four vectors, of which two permutations
 * and a choice by the number's top bit take one for each even and each odd byte; its low bit says
 * which half. Returns how many are done. */
static inline __m512i lookup_words(__m512i v, const __m512i* t) {
  const __mmask32 upper = _mm512_test_epi16_mask(v, _mm512_set1_epi16(0x80));
  const __m512i at = _mm512_srli_epi16(v, 1); /* only 6 bits count */
  const __m512i low = _mm512_permutex2var_epi16(t[0], at, t[1]),
                high = _mm512_permutex2var_epi16(t[2], at, t[3]);
  const __m512i half = _mm512_slli_epi16(_mm512_and_si512(v, _mm512_set1_epi16(1)), 3);
  return _mm512_srlv_epi16(_mm512_mask_blend_epi16(upper, low, high), half);
}
static trv_dim lookup_bytes(uint8_t* y, const uint8_t* x, const uint8_t* table, int is_signed,
                            trv_dim n) {
  __m512i t[4]; /* the entries of 0 .. 255, taken as unsigned */
  for (int i = 0; i < 4; i++) t[i] = _mm512_loadu_si512(table + (is_signed ? i ^ 2 : i) * 64);
  const __m512i even = _mm512_set1_epi16(0xFF);
  trv_dim i = 0;
  for (; i + 64 <= n; i += 64) {
    const __m512i v = _mm512_loadu_si512(x + i);
    const __m512i a = _mm512_and_si512(lookup_words(v, t), even),
                  b = lookup_words(_mm512_srli_epi16(v, 8), t);
    _mm512_storeu_si512(y + i, _mm512_or_si512(a, _mm512_slli_epi16(b, 8)));
  }
  return i;
}
#endif

void trvk_lookup_row(void* y, const void* x, uint32_t x_dtype, const void* table, uint32_t size,
                     trv_dim n) {
#if defined(TRVV_N) && TRVV_N == 16
  if (size == 1) {
    const trv_dim done = lookup_bytes(y, x, table, x_dtype == TRV_DTYPE_I8, n);
    x = (const uint8_t*)x + done;
    y = (uint8_t*)y + done;
    n -= done;
  }
#endif
  if (size == 1)
    ROW(uint8_t)
  else if (size == 2)
    ROW(uint16_t)
  else
    ROW(uint32_t)
}

void TRVK_KERNEL(lookup)(const trvk_call* call, uint32_t tile) {
  const trv_tensor* table = &call->in[1];
  trvk_buffer x, y;
  trvk_blocks b;
  for (trvk_blocks_begin(&b, call, 1, tile); trvk_blocks_next(&b); trvk_blocks_write(&b, &y))
    trvk_lookup_row(trvk_blocks_target(&b, &y), trvk_blocks_read(&b, 1, &x), call->in[0].dtype,
                    table->data, b.size[0], b.n);
}
#undef LOOK
#undef ROW
