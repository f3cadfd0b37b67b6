/* binary.c - sum, difference and product of stored values. */
/* clang-format off: its macros rename what the others declare */
#include "variant.h"
/* clang-format on */
#include "blocks.h"
#include "quant.h"
#if defined(TRVV_N)
#include "qsimd.h"
#endif

#ifndef TRVK_VARIANT
const char* trvk_binary_check(const trvk_call* call, int64_t* expected, int64_t* got) {
  const trv_tensor* y = call->out;
  const trvf_binary_attrs* a = call->attrs;
  if (a->kind >= TRV_BINARY_KIND_COUNT)
    return trvk_fail(TRVK_SAY("binary: unknown kind"), TRV_BINARY_KIND_COUNT - 1, a->kind, expected,
                     got);
  if (!trvk_dtype_is_stored(y->dtype))
    return trvk_fail(TRVK_SAY("binary: dtype without a kernel"), TRV_DTYPE_I8, y->dtype, expected,
                     got);
  for (uint32_t i = 0; i < 2; i++) {
    const trv_tensor* x = &call->in[i];
    const int32_t zero = i ? a->b_zero : a->a_zero;
    if (x->dtype != y->dtype)
      return trvk_fail(TRVK_SAY("binary: dtypes differ"), y->dtype, x->dtype, expected, got);
    if (!trvk_walk_broadcasts(x, y))
      return trvk_fail(TRVK_SAY("binary: an input does not broadcast to the output"),
                       (int64_t)trvk_count(y), (int64_t)trvk_count(x), expected, got);
    if (!trvk_fits(x->dtype, zero))
      return trvk_fail(TRVK_SAY("binary: zero point of an input"), 0, zero, expected, got);
  }
  if (a->a_multiplier < 0 || a->b_multiplier < 0 || !trvk_shift_ok(a->shift))
    return trvk_fail(TRVK_SAY("binary: multiplier or shift"), TRVK_SHIFT_MAX, a->shift, expected,
                     got);
  return trvk_result_check(y, a->y_zero, a->lo, a->hi, expected, got);
}

uint32_t trvk_binary_tiles(const trvk_call* call, uint32_t workers) {
  const trv_dim n = trvk_count(call->out);
  return trvk_tiles(n, n / 1024, workers);
}
#endif

/* The attributes, as rows of elements need them. b_multiplier is negative for a difference. */
typedef struct binary_plan {
  int64_t a_multiplier, b_multiplier;
  int32_t a_zero, b_zero, y_zero, lo, hi, shift;
  trvk_parts a, b,
      offset; /* of the multipliers, of -(a_zero * a_multiplier + b_zero * b_multiplier) */
} binary_plan;
typedef void (*binary_fn)(const binary_plan*, const void*, const void*, void*, trv_dim);

#define ROW(NAME, T, f)                                                                         \
  static void NAME(const binary_plan* plan, const void* a, const void* b, void* y, trv_dim n) { \
    const binary_plan p = *plan;                                                                \
    const T *s = a, *t = b;                                                                     \
    T* d = y;                                                                                   \
    TRVK_IVDEP for (trv_dim i = 0; i < n; i++) d[i] = (T)f(s[i] - p.a_zero, t[i] - p.b_zero);   \
  }
/* |sum| < 2^49, |u * v| < 2^32 */
#define SUM(u, v)                                                                              \
  trvk_stored(trvk_rescale((u) * p.a_multiplier + (v) * p.b_multiplier, 1, p.shift), p.y_zero, \
              p.lo, p.hi)
#define PRODUCT(u, v)                                                                             \
  trvk_stored(trvk_rescale((int64_t)(u) * (v), (int32_t)p.a_multiplier, p.shift), p.y_zero, p.lo, \
              p.hi)
ROW(sum_i8, int8_t, SUM)
ROW(sum_i16, int16_t, SUM)
ROW(product_i8, int8_t, PRODUCT)
ROW(product_i16, int16_t, PRODUCT)

/* The same in 32 bits (trvk_parts), so that it vectorises; `splits` tells when. R holds any result
 * before it is clamped. */
#define SPLIT_SUM(NAME, T, R)                                                                   \
  static void NAME(const binary_plan* plan, const void* a, const void* b, void* y, trv_dim n) { \
    const binary_plan p = *plan;                                                                \
    const int16_t ah = (int16_t)p.a.high, al = (int16_t)p.a.low;                                \
    const int16_t bh = (int16_t)p.b.high, bl = (int16_t)p.b.low;                                \
    const R lo = (R)p.lo, hi = (R)p.hi, zero = (R)p.y_zero;                                     \
    const T *s = a, *t = b;                                                                     \
    T* d = y;                                                                                   \
    TRVK_IVDEP for (trv_dim i = 0; i < n; i++) {                                                \
      const int16_t u = s[i], v = t[i];                                                         \
      const int32_t high = trvk_add32(trvk_add32(u * ah, v * bh), p.offset.high);               \
      const int32_t low = trvk_add32(trvk_add32(u * al, v * bl), p.offset.low);                 \
      R r = (R)(trvk_join(high, low, p.shift) + zero);                                          \
      r = r < lo ? lo : r;                                                                      \
      d[i] = (T)(r > hi ? hi : r);                                                              \
    }                                                                                           \
  }
#if defined(TRVV_N)
/* Both products of a part by one instruction (pmaddwd), 32 or 64 results at a time. half = 2^(s-17)
 * is added in front of one shift by s - 16, where the sum stays inside 32 bits. Returns how many
 * are done. */
#if TRVV_N == 16
#define VEC __m512i
#define V(name) _mm512_##name
#define LOAD(p) _mm512_loadu_si512(p)
#define STORE(p, v) _mm512_storeu_si512(p, v)
#define BYTES qs_bytes_16
#else
#define VEC __m256i
#define V(name) _mm256_##name
#define LOAD(p) _mm256_loadu_si256((const __m256i*)(const void*)(p))
#define STORE(p, v) _mm256_storeu_si256((__m256i*)(void*)(p), v)
#define BYTES qs_bytes_8
#endif
static inline int32_t sum_pair(int32_t a, int32_t b) {
  return (int32_t)(((uint32_t)a & 0xFFFFu) | (uint32_t)b << 16);
}
static trv_dim sum_bytes(const binary_plan* p, const int8_t* a, const int8_t* b, int8_t* y,
                         trv_dim n) {
  enum { STEP = 4 * TRVV_N };
  const int shift = p->shift - TRVK_SPLIT_SHIFT;
  const VEC high = V(set1_epi32)(sum_pair(p->a.high, p->b.high)),
            low = V(set1_epi32)(sum_pair(p->a.low, p->b.low)),
            more_low = V(set1_epi32)(p->offset.low),
            more = V(set1_epi32)(trvk_add32(p->offset.high, (int32_t)1 << shift)),
            zero = V(set1_epi16)((short)p->y_zero), lo = V(set1_epi8)((char)p->lo),
            hi = V(set1_epi8)((char)p->hi);
  const __m128i down = _mm_cvtsi32_si128(shift + 1);
  trv_dim i = 0;
  for (; i + STEP <= n; i += STEP) {
    const VEC u = LOAD(a + i), v = LOAD(b + i);
    const VEC pairs[2] = {V(unpacklo_epi8)(u, v), V(unpackhi_epi8)(u, v)};
    VEC r[4];
    for (int k = 0; k < 4; k++) {
      const VEC q = pairs[k / 2];
      const VEC w = V(srai_epi16)(k % 2 ? V(unpackhi_epi8)(q, q) : V(unpacklo_epi8)(q, q), 8);
      const VEC l = V(srai_epi32)(V(add_epi32)(V(madd_epi16)(w, low), more_low), 16);
      const VEC h = V(add_epi32)(V(add_epi32)(V(madd_epi16)(w, high), more), l);
      r[k] = V(sra_epi32)(h, down);
    }
    STORE(y + i, BYTES(r[0], r[1], r[2], r[3], zero, lo, hi));
  }
  return i;
}
#undef VEC
#undef V
#undef LOAD
#undef STORE
#undef BYTES

SPLIT_SUM(split_sum_rest, int8_t, int16_t)
static void split_sum_i8(const binary_plan* p, const void* a, const void* b, void* y, trv_dim n) {
  const int64_t most =
      256 * (p->a_multiplier + (p->b_multiplier < 0 ? -p->b_multiplier : p->b_multiplier));
  trv_dim done = 0;
  if ((most >> 16) + ((int64_t)1 << (p->shift - TRVK_SPLIT_SHIFT)) < INT32_MAX / 2)
    done = sum_bytes(p, a, b, y, n);
  split_sum_rest(p, (const int8_t*)a + done, (const int8_t*)b + done, (int8_t*)y + done, n - done);
}
#else
SPLIT_SUM(split_sum_i8, int8_t, int16_t)
#endif
SPLIT_SUM(split_sum_i16, int16_t, int32_t)

static void split_product_i8(const binary_plan* plan, const void* a, const void* b, void* y,
                             trv_dim n) {
  const binary_plan p = *plan;
  const int16_t ah = (int16_t)p.a.high, al = (int16_t)p.a.low;
  const int16_t az = (int16_t)p.a_zero, bz = (int16_t)p.b_zero;
  const int16_t lo = (int16_t)p.lo, hi = (int16_t)p.hi, zero = (int16_t)p.y_zero;
  const int8_t *s = a, *t = b;
  int8_t* d = y;
  TRVK_IVDEP for (trv_dim i = 0; i < n; i++) {
    const int16_t u = (int16_t)(s[i] - az), v = (int16_t)(t[i] - bz);
    const int32_t uv = u * v;
    int16_t r = (int16_t)(trvk_join(uv * ah, uv * al, p.shift) + zero);
    r = r < lo ? lo : r;
    d[i] = (int8_t)(r > hi ? hi : r);
  }
}

/* Can the sum or product be computed in 32 bits? */
static int binary_splits(const binary_plan* p, int small, int mul) {
  if (p->shift < TRVK_SPLIT_SHIFT || p->shift > TRVK_SPLIT_SHIFT_MAX) return 0;
  const int64_t b = p->b_multiplier < 0 ? -p->b_multiplier : p->b_multiplier;
  if (!trvk_splits((int32_t)p->a_multiplier) || !trvk_splits((int32_t)b)) return 0;
  if (mul && !small) return 0;
  const int64_t half = small ? 128 : 32768; /* most: the largest distances from the zero points */
  const int64_t far_a = half + (p->a_zero < 0 ? -(int64_t)p->a_zero : p->a_zero);
  const int64_t far_b = half + (p->b_zero < 0 ? -(int64_t)p->b_zero : p->b_zero);
  const int64_t most = mul ? far_a * far_b * p->a_multiplier : far_a * p->a_multiplier + far_b * b;
  if (most > ((int64_t)1 << 47) - ((int64_t)1 << 33)) return 0; /* the high part needs 32 bits */
  return !small || most >> p->shift < INT16_MAX - INT8_MAX - 2; /* the result needs R */
}

void TRVK_KERNEL(binary)(const trvk_call* call, uint32_t tile) {
  const trvf_binary_attrs* a = call->attrs;
  const int small = call->out[0].dtype == TRV_DTYPE_I8, mul = a->kind == TRV_BINARY_KIND_MUL;
  const int64_t sign = mul ? 0 : a->kind == TRV_BINARY_KIND_SUB ? -1 : 1;
  binary_plan p = {.a_multiplier = a->a_multiplier,
                   .b_multiplier = sign * a->b_multiplier,
                   .a_zero = a->a_zero,
                   .b_zero = a->b_zero,
                   .y_zero = a->y_zero,
                   .lo = a->lo,
                   .hi = a->hi,
                   .shift = a->shift};
  p.a = trvk_split_factor(p.a_multiplier);
  p.b = trvk_split_factor(p.b_multiplier);
  p.offset = trvk_split_factor(-(p.a_zero * p.a_multiplier + p.b_zero * p.b_multiplier));
  const binary_fn row = binary_splits(&p, small, mul) ? (mul     ? split_product_i8
                                                         : small ? split_sum_i8
                                                                 : split_sum_i16)
                        : mul                         ? (small ? product_i8 : product_i16)
                                                      : (small ? sum_i8 : sum_i16);
  trvk_buffer x[2], y;
  trvk_blocks b;
  for (trvk_blocks_begin(&b, call, 2, tile); trvk_blocks_next(&b); trvk_blocks_write(&b, &y)) {
    const void *u = trvk_blocks_read(&b, 1, &x[0]), *v = trvk_blocks_read(&b, 2, &x[1]);
    row(&p, u, v, trvk_blocks_target(&b, &y), b.n);
  }
}
#undef ROW
#undef SUM
#undef PRODUCT
#undef SPLIT_SUM
