/* sample.h - weighted sums of a few input positions, channels as lanes: what resize and grid_sample
 * end in. */
#ifndef TRVK_SAMPLE_H
#define TRVK_SAMPLE_H

#include "gemm.h"

#define TRVK_TAPS_MAX 64 /* 4 x 4 x 4 */

typedef struct trvk_taps32 {
  trv_dim count, at[TRVK_TAPS_MAX]; /* offsets (elements) from the image's first channel */
  float weight[TRVK_TAPS_MAX];
} trvk_taps32;
typedef struct trvk_taps64 {
  trv_dim count, at[TRVK_TAPS_MAX];
  double weight[TRVK_TAPS_MAX];
} trvk_taps64;

/* y[c] = sum of weight * x[at + c], c < channels. */
void trvk_sample32(const trvk_taps32* t, const uint8_t* x, trv_dim x_step, uint8_t* y,
                   trv_dim y_step, trv_dim channels, uint32_t dtype);
void trvk_sample64(const trvk_taps64* t, const uint8_t* x, trv_dim x_step, uint8_t* y,
                   trv_dim y_step, trv_dim channels);

/* y[c] = x[c] of any dtype with elements of `size` bytes. */
void trvk_sample_copy(const uint8_t* x, trv_dim x_step, uint8_t* y, trv_dim y_step,
                      trv_dim channels, size_t size);

/* A position as an index of 0 .. n-1, whatever the number is. n >= 1. */
static inline trv_dim trvk_index(double at, trv_dim n) {
  if (!(at > 0.0)) return 0;
  return at >= (double)(n - 1) ? n - 1 : (trv_dim)at;
}

/* Weights of four neighbours at distance t in [0, 1] behind the second. */
static inline void trvk_cubic64(double t, double a, double* w) {
  const double u = 1.0 - t, t1 = t + 1.0, u1 = u + 1.0;
  w[0] = ((a * t1 - 5.0 * a) * t1 + 8.0 * a) * t1 - 4.0 * a;
  w[1] = ((a + 2.0) * t - (a + 3.0)) * t * t + 1.0;
  w[2] = ((a + 2.0) * u - (a + 3.0)) * u * u + 1.0;
  w[3] = ((a * u1 - 5.0 * a) * u1 + 8.0 * a) * u1 - 4.0 * a;
}
#endif
