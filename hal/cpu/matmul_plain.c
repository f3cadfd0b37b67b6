/* matmul_plain.c - matrix product of float64 and of integers (which wrap): rows times blocks of
 * columns. */
#include "matmul.h"

#define COLS 32

static double add64(const trv_tensor* t, trv_dim at) {
  return t ? ((const double*)(const void*)t->data)[at] : 0.0;
}

/* sum[j] for COLS columns; T: element, S: type of the sum. */
#define SUMS(name, T, S)                                                                     \
  static void name(const uint8_t* a_, trv_dim ak, const uint8_t* b_, trv_dim bk, trv_dim bn, \
                   trv_dim k, trv_dim n, S* sum) {                                           \
    const T *a = (const T*)(const void*)a_, *b = (const T*)(const void*)b_;                  \
    for (trv_dim j = 0; j < COLS; j++) sum[j] = 0;                                           \
    if (bn == 1) {                                                                           \
      for (trv_dim i = 0; i < k; i++) {                                                      \
        const S x = (S)a[i * ak];                                                            \
        const T* row = b + i * bk;                                                           \
        for (trv_dim j = 0; j < n; j++) sum[j] += x * (S)row[j];                             \
      }                                                                                      \
    } else {                                                                                 \
      for (trv_dim j = 0; j < n; j++) {                                                      \
        S s = 0;                                                                             \
        for (trv_dim i = 0; i < k; i++) s += (S)a[i * ak] * (S)b[i * bk + j * bn];           \
        sum[j] = s;                                                                          \
      }                                                                                      \
    }                                                                                        \
  }
SUMS(sums_f64, double, double)
SUMS(sums_u8, uint8_t, uint32_t)
SUMS(sums_i16, uint16_t, uint32_t)
SUMS(sums_i32, uint32_t, uint32_t)
SUMS(sums_i64, uint64_t, uint64_t)

#define STORE(T, S, sums)                                                                         \
  {                                                                                               \
    S sum[COLS];                                                                                  \
    sums(a, p->a.col, b + col * p->b.col * (trv_dim)sizeof(T), p->b.row, p->b.col, p->k, n, sum); \
    T* y = (T*)(void*)trvk_at(p->out.t->data, dtype, at_out + col * p->out.col);                  \
    const T* c = p->bias.t ? (const T*)(const void*)trvk_at(p->bias.t->data, dtype,               \
                                                            at_bias + col * p->bias.col)          \
                           : NULL;                                                                \
    const T* r = p->res.t ? (const T*)(const void*)trvk_at(p->res.t->data, dtype,                 \
                                                           at_res + col * p->res.col)             \
                          : NULL;                                                                 \
    for (trv_dim j = 0; j < n; j++)                                                               \
      y[j * p->out.col] =                                                                         \
          (T)(sum[j] + (c ? (S)c[j * p->bias.col] : 0) + (r ? (S)r[j * p->res.col] : 0));         \
    break;                                                                                        \
  }

void trvk_matmul_plain(const trvk_call* call, const trvk_matmul_plan* p, uint32_t tile) {
  const trvf_matmul_attrs* attrs = call->attrs;
  const uint32_t dtype = call->in[0].dtype;
  trv_dim rows = p->m, begin, end;
  for (uint32_t i = 0; i < p->nb; i++) rows *= p->dim[i];
  trvk_split(p->n > 0 ? rows : 0, call->tiles, tile, &begin, &end);
  for (trv_dim u = begin; u < end; u++) {
    const trv_dim batch = u / p->m, m = u % p->m;
#define AT(o) (trvk_offset(p->nb, p->dim, (o).batch, batch) + m * (o).row)
    const uint8_t* a = trvk_at(p->a.t->data, dtype, AT(p->a));
    const uint8_t* b = trvk_at(p->b.t->data, dtype, trvk_offset(p->nb, p->dim, p->b.batch, batch));
    const trv_dim at_out = AT(p->out), at_bias = AT(p->bias), at_res = AT(p->res);
#undef AT
    for (trv_dim col = 0; col < p->n; col += COLS) {
      const trv_dim n = p->n - col < COLS ? p->n - col : COLS;
      switch (dtype) {
        case TRV_DTYPE_U8:
        case TRV_DTYPE_I8:
          STORE(uint8_t, uint32_t, sums_u8)
        case TRV_DTYPE_I16:
          STORE(uint16_t, uint32_t, sums_i16)
        case TRV_DTYPE_I32:
          STORE(uint32_t, uint32_t, sums_i32)
        case TRV_DTYPE_I64:
          STORE(uint64_t, uint64_t, sums_i64)
        default: {
          double sum[COLS], *y = (double*)(void*)p->out.t->data + at_out;
          sums_f64(a, p->a.col, b + col * p->b.col * 8, p->b.row, p->b.col, p->k, n, sum);
          for (trv_dim j = 0; j < n; j++) {
            const double v = sum[j] + add64(p->bias.t, at_bias + (col + j) * p->bias.col) +
                             add64(p->res.t, at_res + (col + j) * p->res.col);
            y[(col + j) * p->out.col] =
                trvk_act64(v, attrs->act, (double)attrs->lo, (double)attrs->hi);
          }
        }
      }
    }
  }
}
