/* requantize.c - real to stored, stored to real, stored to stored. */
/* clang-format off: its macros rename what the others declare */
#include "variant.h"
/* clang-format on */
#include "blocks.h"
#include "quant.h"

#ifndef TRVK_VARIANT
const char* trvk_requantize_check(const trvk_call* call, int64_t* expected, int64_t* got) {
  const trv_tensor *x = call->in, *y = call->out;
  const trvf_requantize_attrs* a = call->attrs;
  const int from_real = x->dtype == TRV_DTYPE_F32, to_real = y->dtype == TRV_DTYPE_F32;
  if (from_real ? to_real : !trvk_dtype_is_stored(x->dtype))
    return trvk_fail(TRVK_SAY("requantize: dtype of the input"), TRV_DTYPE_I8, x->dtype, expected,
                     got);
  if (!to_real && !trvk_dtype_is_stored(y->dtype))
    return trvk_fail(TRVK_SAY("requantize: dtype of the output"), TRV_DTYPE_I8, y->dtype, expected,
                     got);
  if (!trvk_same_shape(x, y))
    return trvk_fail(TRVK_SAY("requantize: shapes differ"), (int64_t)trvk_count(x),
                     (int64_t)trvk_count(y), expected, got);
  if (!from_real && !trvk_fits(x->dtype, a->x_zero))
    return trvk_fail(TRVK_SAY("requantize: zero point of the input"), 0, a->x_zero, expected, got);
  if ((from_real || to_real) && !(a->scale > 0.0f && a->scale <= 3.402823466e38f))
    return trvk_fail(TRVK_SAY("requantize: the scale must be positive and finite"), 1, 0, expected,
                     got);
  if (!from_real && !to_real && (a->multiplier < 0 || !trvk_shift_ok(a->shift)))
    return trvk_fail(TRVK_SAY("requantize: multiplier or shift"), TRVK_SHIFT_MAX, a->shift,
                     expected, got);
  return to_real ? NULL : trvk_result_check(y, a->y_zero, a->lo, a->hi, expected, got);
}

uint32_t trvk_requantize_tiles(const trvk_call* call, uint32_t workers) {
  const trv_dim n = trvk_count(call->out);
  return trvk_tiles(n, n / 1024, workers);
}
#endif

/* The attributes, as rows of elements need them. */
typedef struct requantize_plan {
  trvf_requantize_attrs a;
  trvk_parts m, offset; /* of the multiplier, of -x_zero * multiplier */
} requantize_plan;
typedef void (*requantize_fn)(const requantize_plan*, const void*, void*, trv_dim);

/* y[i] = f(x[i]) for dense rows; y may be x. The plan is copied, since a store of int8_t could
 * change it. */
#define ROW(NAME, S, D, f)                                                           \
  static void NAME(const requantize_plan* plan, const void* x, void* y, trv_dim n) { \
    const requantize_plan p = *plan;                                                 \
    const trvf_requantize_attrs a = p.a;                                             \
    const S* s = x;                                                                  \
    D* d = y;                                                                        \
    TRVK_IVDEP for (trv_dim i = 0; i < n; i++) d[i] = (D)f(s[i]);                    \
  }
#define QUANTIZE(v) \
  quantize(v, a.scale, (float)(a.lo - a.y_zero), (float)(a.hi - a.y_zero), a.y_zero)
#define DEQUANTIZE(v) ((float)((v) - a.x_zero) * a.scale)
#define RESCALE(v) \
  trvk_stored(trvk_rescale((v) - a.x_zero, a.multiplier, a.shift), a.y_zero, a.lo, a.hi)
#define SPLIT(v)                                                           \
  (trvk_clamp32(trvk_join((v) * (int16_t)p.m.high + p.offset.high,         \
                          (v) * (int16_t)p.m.low + p.offset.low, a.shift), \
                a.lo - a.y_zero, a.hi - a.y_zero) +                        \
   a.y_zero)

/* As trvk_half_even, with the bounds first: rounding keeps to them, they are whole numbers. */
static inline int32_t quantize(float x, float scale, float least, float most, int32_t zero) {
  union {
    float f;
    int32_t i;
  } v;
  float t = x * scale;
  t = t == t ? t : 0.0f;
  t = t > least ? t : least;
  t = t < most ? t : most;
  v.f = t + 12582912.0f;
  return v.i - (0x4B400000 - zero);
}

ROW(real_to_i8, float, int8_t, QUANTIZE)
ROW(real_to_i16, float, int16_t, QUANTIZE)
ROW(i8_to_real, int8_t, float, DEQUANTIZE)
ROW(i16_to_real, int16_t, float, DEQUANTIZE)
ROW(i8_to_i8, int8_t, int8_t, RESCALE)
ROW(i8_to_i16, int8_t, int16_t, RESCALE)
ROW(i16_to_i8, int16_t, int8_t, RESCALE)
ROW(i16_to_i16, int16_t, int16_t, RESCALE)
ROW(split_to_i8, int16_t, int8_t, SPLIT)
ROW(split_to_i16, int16_t, int16_t, SPLIT)

static requantize_fn requantize_row(const requantize_plan* p, uint32_t from, uint32_t to) {
  const int small = to == TRV_DTYPE_I8;
  if (from == TRV_DTYPE_F32) return small ? real_to_i8 : real_to_i16;
  if (to == TRV_DTYPE_F32) return from == TRV_DTYPE_I8 ? i8_to_real : i16_to_real;
  if (from == TRV_DTYPE_I8) return small ? i8_to_i8 : i8_to_i16;
  /* |x - x_zero| < 2^16 and a high part below 2^15 keep the sum of products below 2^31 */
  if (trvk_splits(p->a.multiplier) && p->a.shift >= TRVK_SPLIT_SHIFT &&
      p->a.shift <= TRVK_SPLIT_SHIFT_MAX)
    return small ? split_to_i8 : split_to_i16;
  return small ? i16_to_i8 : i16_to_i16;
}

void TRVK_KERNEL(requantize)(const trvk_call* call, uint32_t tile) {
  const uint32_t from = call->in[0].dtype, to = call->out[0].dtype;
  requantize_plan p;
  memcpy(&p.a, call->attrs, sizeof(p.a));
  p.m = trvk_split_factor(p.a.multiplier);
  p.offset = trvk_split_factor(-(int64_t)p.a.x_zero * p.a.multiplier);
  const requantize_fn row = requantize_row(&p, from, to);
  trvk_buffer x, y;
  trvk_blocks b;
  trvk_blocks_begin(&b, call, 1, tile);
  if (from == TRV_DTYPE_I8 && to != TRV_DTYPE_F32 && b.end - b.at > 512) {
    int8_t every[256]; /* a table of all results is cheaper */
    int16_t table[256];
    for (int i = 0; i < 256; i++) every[i] = (int8_t)(i - 128);
    row(&p, every, table, 256);
    for (; trvk_blocks_next(&b); trvk_blocks_write(&b, &y))
      trvk_lookup_row(trvk_blocks_target(&b, &y), trvk_blocks_read(&b, 1, &x), from, table,
                      b.size[0], b.n);
    return;
  }
  for (; trvk_blocks_next(&b); trvk_blocks_write(&b, &y))
    row(&p, trvk_blocks_read(&b, 1, &x), trvk_blocks_target(&b, &y), b.n);
}
#undef ROW
#undef QUANTIZE
#undef DEQUANTIZE
#undef RESCALE
#undef SPLIT
