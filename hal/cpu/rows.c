/* rows.c - rows of elements of any dtype to and from float and double, and the epilogue of a row.
 */
#include "convert.h"
#include "gemm.h"
#include "vmath.h"

#define LOAD(type, expr)                           \
  {                                                \
    const type* s = (const type*)(const void*)src; \
    if (stride == 1) {                             \
      for (trv_dim i = 0; i < n; i++) {            \
        const type v = s[i];                       \
        dst[i] = (expr);                           \
      }                                            \
    } else {                                       \
      for (trv_dim i = 0; i < n; i++) {            \
        const type v = s[i * stride];              \
        dst[i] = (expr);                           \
      }                                            \
    }                                              \
    break;                                         \
  }

void trvk_row_load(float* dst, const uint8_t* src, uint32_t dtype, trv_dim stride, trv_dim n) {
  switch (dtype) {
    case TRV_DTYPE_F32:
      LOAD(float, v)
    case TRV_DTYPE_F16:
      LOAD(uint16_t, trvk_half_to_float(v))
    case TRV_DTYPE_BF16:
      LOAD(uint16_t, trvk_bf16_to_f32(v))
    case TRV_DTYPE_F64:
      LOAD(double, (float)v)
    case TRV_DTYPE_BOOL:
    case TRV_DTYPE_U8:
      LOAD(uint8_t, (float)v)
    case TRV_DTYPE_I8:
      LOAD(int8_t, (float)v)
    default:
      break;
  }
}
void trvk_row_load64(double* dst, const uint8_t* src, uint32_t dtype, trv_dim stride, trv_dim n) {
  switch (dtype) {
    case TRV_DTYPE_F64:
      LOAD(double, v)
    case TRV_DTYPE_F32:
      LOAD(float, (double)v)
    case TRV_DTYPE_F16:
      LOAD(uint16_t, (double)trvk_half_to_float(v))
    case TRV_DTYPE_BF16:
      LOAD(uint16_t, (double)trvk_bf16_to_f32(v))
    case TRV_DTYPE_BOOL:
    case TRV_DTYPE_U8:
      LOAD(uint8_t, (double)v)
    default:
      break;
  }
}
#undef LOAD

#define STORE(type, expr)                                     \
  {                                                           \
    type* d = (type*)(void*)dst;                              \
    if (stride == 1) {                                        \
      for (trv_dim i = 0; i < n; i++) d[i] = (expr);          \
    } else {                                                  \
      for (trv_dim i = 0; i < n; i++) d[i * stride] = (expr); \
    }                                                         \
    break;                                                    \
  }
void trvk_row_store(uint8_t* dst, uint32_t dtype, trv_dim stride, const float* src, trv_dim n) {
  switch (dtype) {
    case TRV_DTYPE_F32:
      STORE(float, src[i])
    case TRV_DTYPE_F16:
      STORE(uint16_t, trvk_float_to_half(src[i]))
    case TRV_DTYPE_BF16:
      STORE(uint16_t, trvk_float_to_bfloat(src[i]))
    case TRV_DTYPE_F64:
      STORE(double, (double)src[i])
    default:
      break;
  }
}
void trvk_row_store64(uint8_t* dst, uint32_t dtype, trv_dim stride, const double* src, trv_dim n) {
  switch (dtype) {
    case TRV_DTYPE_F64:
      STORE(double, src[i])
    case TRV_DTYPE_F32:
      STORE(float, (float)src[i])
    default:
      break;
  }
}
#undef STORE

double trvk_act64(double x, uint32_t act, double lo, double hi) {
  const double three = x + 3.0, six = three < 0.0 ? 0.0 : three > 6.0 ? 6.0 : three;
  switch (act) {
    case TRV_ACT_CLAMP:
      return x < lo ? lo : x > hi ? hi : x;
    case TRV_ACT_SIGMOID:
      return 1.0 / (1.0 + exp(-x));
    case TRV_ACT_TANH:
      return tanh(x);
    case TRV_ACT_GELU:
      return 0.5 * x * (1.0 + erf(x * 0.70710678118654752440));
    case TRV_ACT_GELU_TANH:
      return 0.5 * x * (1.0 + tanh(0.79788456080286535588 * (x + 0.044715 * x * x * x)));
    case TRV_ACT_SILU:
      return x / (1.0 + exp(-x));
    case TRV_ACT_HARD_SWISH:
      return x * six / 6.0;
    case TRV_ACT_HARD_SIGMOID:
      return six / 6.0;
    case TRV_ACT_LEAKY:
      return x > 0.0 ? x : x * lo;
    case TRV_ACT_ELU:
      return x > 0.0 ? x : lo * expm1(x);
    default:
      return x;
  }
}

static void add_row(const trvk_gemm* g, float* sum, const uint8_t* src, uint32_t dtype,
                    trv_dim step, trv_dim n) {
  if (dtype == TRV_DTYPE_F32 && step == 1) {
    const float* v = (const float*)(const void*)src;
    for (trv_dim i = 0; i < n; i++) sum[i] += v[i];
    return;
  }
  float v[32];
  for (trv_dim i = 0; i < n; i += 32) {
    const trv_dim m = n - i < 32 ? n - i : 32;
    trvk_row_floats(g, v, trvk_at(src, dtype, i * step), dtype, step, m);
    for (trv_dim j = 0; j < m; j++) sum[i + j] += v[j];
  }
}

void trvk_epi_row(const trvk_epi* e, const trvk_row* r, trv_dim col, float* sum, trv_dim n) {
  if (e->bias2)
    add_row(e->g, sum, trvk_at(e->bias2, e->dtype, r->bias2 + col * e->bias2_col), e->dtype,
            e->bias2_col, n);
  if (e->res)
    add_row(e->g, sum, trvk_at(e->res, e->dtype, r->res + col * e->res_col), e->dtype, e->res_col,
            n);
  if (e->act != TRV_ACT_NONE) e->g->act(sum, n, e->act, e->lo, e->hi);
  uint8_t* to = trvk_at(e->out, e->dtype, r->out + col * e->out_col);
  if (e->out_col == 1 && (e->dtype == TRV_DTYPE_F16 || e->dtype == TRV_DTYPE_BF16))
    e->g->narrow((uint16_t*)(void*)to, sum, e->dtype, n);
  else
    trvk_row_store(to, e->dtype, e->out_col, sum, n);
}
