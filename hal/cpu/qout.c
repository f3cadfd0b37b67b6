/* qout.c - from sums to results: bias, rescaling with one rounding, clamping; or scale and
 * activation. And the checks of what that reads. */
#include "qgemm.h"

void trvk_qout_make(trvk_qout* o, const trv_tensor* y, const trv_tensor* scale,
                    const trv_tensor* bias, int32_t zero, uint32_t act, float lo, float hi,
                    int real_in) {
  o->y = y->data;
  o->dtype = y->dtype;
  o->scale = scale;
  o->bias = bias;
  o->act = act;
  o->zero = zero;
  o->lo = o->hi = 0;
  o->flo = lo;
  o->fhi = hi;
  if (trvk_dtype_is_stored(y->dtype)) { /* else they may be too large for an integer */
    o->lo = (int32_t)lo;
    o->hi = (int32_t)hi;
  }
  o->real_in = real_in;
  o->act_fn = NULL;
  o->no_halves = 0;
}

void trvk_qout_strip(trvk_qout* o, trv_dim col, trv_dim n) {
  const trv_tensor *scale = o->scale, *bias = o->bias;
  const int stored = trvk_dtype_is_stored(o->dtype);
  const uint32_t last = scale->rank - 1u;
  const trv_dim step = scale->dim[last] == 1 ? 0 : scale->stride[last];
  if (stored) {
    const int32_t *m = (const int32_t*)(const void*)scale->data + col * step,
                  *s = m + scale->stride[0];
    int32_t least = TRVK_SHIFT_MAX, most = 0, negative = 0;
    if (step == 1) memcpy(o->k.i, m, (size_t)n * sizeof *m);
    if (step != 1)
      for (trv_dim i = 0; i < n; i++) o->k.i[i] = m[i * step];
    for (trv_dim i = 0; i < n; i++) {
      const int32_t shift = s[i * step] & 63;
      o->shift[i] = (uint8_t)shift;
      least = shift < least ? shift : least;
      most = shift > most ? shift : most;
      negative |= o->k.i[i];
    }
    o->wide_ok = least >= 32 && most <= TRVK_SHIFT_MAX;
    o->bytes_ok = o->wide_ok && least > 32 && o->dtype == TRV_DTYPE_I8;
    o->quick = least >= 34 && most <= TRVK_SHIFT_MAX && negative >= 0 && !o->no_halves;
    if (o->quick)
      for (trv_dim i = 0; i < n; i++) {
        o->half[i] = (int32_t)1 << (o->shift[i] - 33);
        o->power[i] = (int32_t)1 << (64 - o->shift[i]);
      }
  } else {
    for (trv_dim i = 0; i < n; i += TRVK_PANEL) {
      float f[TRVK_PANEL];
      const trv_dim run = n - i < TRVK_PANEL ? n - i : TRVK_PANEL;
      trvk_q_scales(scale, 0, col + i, run, f);
      memcpy(o->k.f + i, f, (size_t)run * sizeof *f);
    }
  }
  if (bias == NULL) {
    memset(&o->b, 0, sizeof o->b); /* 0 and 0.0 alike */
  } else if (o->real_in) {
    const float* b = (const float*)(const void*)bias->data + col * bias->stride[0];
    for (trv_dim i = 0; i < n; i++) o->b.f[i] = b[i * bias->stride[0]];
  } else {
    const int32_t* b = (const int32_t*)(const void*)bias->data + col * bias->stride[0];
    if (bias->stride[0] == 1) memcpy(o->b.i, b, (size_t)n * sizeof *b);
    if (bias->stride[0] != 1)
      for (trv_dim i = 0; i < n; i++) o->b.i[i] = b[i * bias->stride[0]];
  }
}

static void store(const trvk_qout* o, const int32_t* q, trv_dim n, trv_dim at, trv_dim step) {
  if (o->dtype == TRV_DTYPE_I8) {
    int8_t* y = (int8_t*)o->y + at;
    if (step == 1)
      for (trv_dim i = 0; i < n; i++) y[i] = (int8_t)q[i];
    else
      for (trv_dim i = 0; i < n; i++) y[i * step] = (int8_t)q[i];
  } else {
    int16_t* y = (int16_t*)(void*)o->y + at;
    for (trv_dim i = 0; i < n; i++) y[i * step] = (int16_t)q[i];
  }
}

static void store_real(const trvk_qout* o, float* f, trv_dim n, trv_dim at, trv_dim step) {
  float* y = (float*)(void*)o->y + at;
  if (o->act != TRV_ACT_NONE && o->act_fn) o->act_fn(f, n, o->act, o->flo, o->fhi);
  for (trv_dim i = 0; i < n; i++) y[i * step] = f[i];
}

/* floor(a * b / 2^32) for b >= 0. By the unsigned product, which more machines have as vectors. */
static inline int32_t high(int32_t a, int32_t b) {
  const uint32_t h = (uint32_t)((uint64_t)(uint32_t)a * (uint32_t)b >> 32);
  return (int32_t)(h - ((uint32_t)(a >> 31) & (uint32_t)b));
}

/* The same rescaling for shifts from 34 on in 32 bits, which vectorises: h = floor(v * m / 2^32) is
 * below 2^30, and floor((v * m + 2^(s-1)) / 2^s) = floor((h + 2^(s-33)) / 2^(s-32)), that is the
 * high half of (h + 2^(s-33)) * 2^(64-s). */
static void rescale_run(const trvk_qout* o, trv_dim c, int c_step, const int32_t* sum, trv_dim n,
                        int32_t* q) {
  const int32_t lo = o->lo, hi = o->hi, zero = o->zero;
  const int32_t *m = o->k.i + c, *b = o->b.i + c, *half = o->half + c, *power = o->power + c;
  if (c_step) {
    for (trv_dim i = 0; i < n; i++)
      q[i] = trvk_clamp32(high(high(trvk_add32(sum[i], b[i]), m[i]) + half[i], power[i]) + zero, lo,
                          hi);
  } else {
    const int32_t m0 = *m, b0 = *b, half0 = *half, power0 = *power;
    for (trv_dim i = 0; i < n; i++)
      q[i] = trvk_clamp32(high(high(trvk_add32(sum[i], b0), m0) + half0, power0) + zero, lo, hi);
  }
}

/* Results go out in runs of a panel, short enough for any stack. Functions of their own, since
 * compilers that see both prepare at each call for what rarely comes. */
#if defined(__GNUC__)
#define APART __attribute__((noinline))
#else
#define APART
#endif
#define RUNS(T, expr, put)                                               \
  for (trv_dim i = 0; i < n; i += TRVK_PANEL, at += TRVK_PANEL * step) { \
    const trv_dim run = n - i < TRVK_PANEL ? n - i : TRVK_PANEL;         \
    T v[TRVK_PANEL];                                                     \
    for (trv_dim r = 0; r < run; r++) {                                  \
      const trv_dim j = c + (i + r) * c_step;                            \
      v[r] = (expr);                                                     \
    }                                                                    \
    put(o, v, run, at, step);                                            \
  }
#define SUM32 trvk_add32(sum[i + r], o->b.i[j])
#define SUM64 trvk_add64(sum[i + r], o->b.i[j])
#define ARGS(S) \
  const trvk_qout *o, trv_dim c, int c_step, const S *sum, trv_dim n, trv_dim at, trv_dim step

static APART void real_i32(ARGS(int32_t)) { RUNS(float, (float)SUM32 * o->k.f[j], store_real) }
static APART void real_i64(ARGS(int64_t)) { RUNS(float, (float)SUM64 * o->k.f[j], store_real) }
static APART void stored_i32(ARGS(int32_t)) {
  RUNS(int32_t, trvk_stored(trvk_rescale(SUM32, o->k.i[j], o->shift[j]), o->zero, o->lo, o->hi),
       store)
}
static APART void stored_i64(ARGS(int64_t)) {
  RUNS(int32_t,
       trvk_stored(trvk_rescale_wide(SUM64, o->k.i[j], o->shift[j]), o->zero, o->lo, o->hi), store)
}

void trvk_qout_i32(ARGS(int32_t)) {
  if (!trvk_dtype_is_stored(o->dtype)) {
    real_i32(o, c, c_step, sum, n, at, step);
  } else if (!o->quick) {
    stored_i32(o, c, c_step, sum, n, at, step);
  } else {
    for (trv_dim i = 0; i < n; i += TRVK_PANEL) {
      const trv_dim run = n - i < TRVK_PANEL ? n - i : TRVK_PANEL;
      int32_t q[TRVK_PANEL];
      rescale_run(o, c + i * c_step, c_step, sum + i, run, q);
      store(o, q, run, at + i * step, step);
    }
  }
}
void trvk_qout_i64(ARGS(int64_t)) {
  if (trvk_dtype_is_stored(o->dtype))
    stored_i64(o, c, c_step, sum, n, at, step);
  else
    real_i64(o, c, c_step, sum, n, at, step);
}

void trvk_qout_f32(const trvk_qout* o, trv_dim c, int c_step, const float* sum, trv_dim n,
                   trv_dim at, trv_dim step) {
  float f[TRVK_PANEL];
  for (trv_dim i = 0; i < n; i += TRVK_PANEL) {
    const trv_dim run = n - i < TRVK_PANEL ? n - i : TRVK_PANEL;
    for (trv_dim r = 0; r < run; r++) {
      const trv_dim j = c + (i + r) * c_step;
      f[r] = sum[i + r] * o->k.f[j] + o->b.f[j];
    }
    store_real(o, f, run, at + i * step, step);
  }
}

/* ---- checks ---- */
const char* trvk_q_check_out(const trv_tensor* x, const trv_tensor* y, const trv_tensor* scale,
                             const trv_tensor* bias, trv_dim n, int one, int32_t x_zero,
                             int32_t y_zero, uint32_t act, float lo, float hi, int64_t* expected,
                             int64_t* got) {
  const int stored_in = trvk_dtype_is_stored(x->dtype), stored = trvk_dtype_is_stored(y->dtype);
  if ((!stored_in && x->dtype != TRV_DTYPE_F32) || (!stored && y->dtype != TRV_DTYPE_F32) ||
      (stored && !stored_in))
    return trvk_fail(TRVK_SAY("dtypes of the input and of the output do not go together"), x->dtype,
                     y->dtype, expected, got);
  if (act >= TRV_ACT_COUNT)
    return trvk_fail(TRVK_SAY("unknown activation"), TRV_ACT_COUNT, act, expected, got);
  if (stored_in && !trvk_fits(x->dtype, x_zero))
    return trvk_fail(TRVK_SAY("the input's zero point is not of its dtype"), 0, x_zero, expected,
                     got);
  if (stored) {
    const float most = y->dtype == TRV_DTYPE_I8 ? 127.0f : 32767.0f;
    if (!trvk_fits(y->dtype, y_zero))
      return trvk_fail(TRVK_SAY("the output's zero point is not of its dtype"), 0, y_zero, expected,
                       got);
    if (!(lo <= hi && lo >= -most - 1.0f && hi <= most)) /* NaN too */
      return TRVK_SAY("the output's bounds are not of its dtype");
  }
  const uint32_t rank = stored ? 2 : 1;
  const trv_dim last = scale->rank == rank ? scale->dim[rank - 1u] : -1;
  if (scale->dtype != (stored ? TRV_DTYPE_I32 : TRV_DTYPE_F32) &&
      !(scale->dtype == TRV_DTYPE_F16 && !stored))
    return trvk_fail(TRVK_SAY("dtype of the scale"), stored ? TRV_DTYPE_I32 : TRV_DTYPE_F32,
                     scale->dtype, expected, got);
  if ((last != n && !(one && last == 1)) || (stored && scale->dim[0] != 2))
    return trvk_fail(TRVK_SAY("shape of the scale"), n, last, expected, got);
  if (bias && bias->dtype != (stored_in ? TRV_DTYPE_I32 : TRV_DTYPE_F32))
    return trvk_fail(TRVK_SAY("dtype of the bias"), stored_in ? TRV_DTYPE_I32 : TRV_DTYPE_F32,
                     bias->dtype, expected, got);
  if (bias && (bias->rank != 1 || bias->dim[0] != n))
    return trvk_fail(TRVK_SAY("size of the bias"), n, bias->rank ? bias->dim[0] : 0, expected, got);
  return NULL;
}
