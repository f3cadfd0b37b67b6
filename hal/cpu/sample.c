/* sample.c - weighted sums of a few input positions, channels as lanes. */
#include "sample.h"

#define LANES 64

void trvk_sample32(const trvk_taps32* t, const uint8_t* x, trv_dim x_step, uint8_t* y,
                   trv_dim y_step, trv_dim channels, uint32_t dtype) {
  float sum[LANES], buffer[LANES];
  if (dtype == TRV_DTYPE_F32 && x_step == 1 && y_step == 1 &&
      t->count == 4) { /* bilinear, channels innermost */
    const float* const from = (const float*)(const void*)x;
    const float *const a = from + t->at[0], *const b = from + t->at[1], *const c = from + t->at[2],
                       *const d = from + t->at[3];
    const float wa = t->weight[0], wb = t->weight[1], wc = t->weight[2], wd = t->weight[3];
    float* const to = (float*)(void*)y;
    TRVK_IVDEP for (trv_dim i = 0; i < channels; i++) to[i] =
        (wa * a[i] + wb * b[i]) + (wc * c[i] + wd * d[i]);
    return;
  }
  for (trv_dim c = 0; c < channels; c += LANES) {
    const trv_dim n = channels - c < LANES ? channels - c : LANES;
    for (trv_dim i = 0; i < n; i++) sum[i] = 0.0f;
    for (trv_dim k = 0; k < t->count; k++) {
      const uint8_t* src = trvk_at(x, dtype, t->at[k] + c * x_step);
      const float *v = buffer, w = t->weight[k];
      if (dtype == TRV_DTYPE_F32 && x_step == 1)
        v = (const float*)(const void*)src;
      else
        trvk_row_load(buffer, src, dtype, x_step, n);
      for (trv_dim i = 0; i < n; i++) sum[i] += w * v[i];
    }
    trvk_row_store(trvk_at(y, dtype, c * y_step), dtype, y_step, sum, n);
  }
}

void trvk_sample64(const trvk_taps64* t, const uint8_t* x, trv_dim x_step, uint8_t* y,
                   trv_dim y_step, trv_dim channels) {
  const double* from = (const double*)(const void*)x;
  double* to = (double*)(void*)y;
  for (trv_dim c = 0; c < channels; c++) {
    double sum = 0.0;
    for (trv_dim k = 0; k < t->count; k++) sum += t->weight[k] * from[t->at[k] + c * x_step];
    to[c * y_step] = sum;
  }
}

#define COPY(type)                                                            \
  {                                                                           \
    const type* from = (const type*)(const void*)x;                           \
    type* to = (type*)(void*)y;                                               \
    for (trv_dim c = 0; c < channels; c++) to[c * y_step] = from[c * x_step]; \
    break;                                                                    \
  }
void trvk_sample_copy(const uint8_t* x, trv_dim x_step, uint8_t* y, trv_dim y_step,
                      trv_dim channels, size_t size) {
  if (x_step == 1 && y_step == 1) {
    memcpy(y, x, (size_t)channels * size);
    return;
  }
  switch (size) {
    case 1:
      COPY(uint8_t)
    case 2:
      COPY(uint16_t)
    case 4:
      COPY(uint32_t)
    default:
      COPY(uint64_t)
  }
}
