/* mcu_softmax.c - softmax of i8 on Cortex-M without the library's division of 64 bits. */
#include "mcu.h"

#if TRVK_M
#if defined(__GNUC__)
#define TRVK_UNROLLED _Pragma("GCC unroll 4")
#else
#define TRVK_UNROLLED
#endif

/* floor(256 * v / sum + 1/2) for v <= sum, bit by bit; some number for others. */
static int32_t share(uint32_t v, uint64_t sum) {
  uint64_t rest = v;
  int32_t q = 0;
  for (int i = 0; i < 10; i++) { /* one bit before the point, eight of the result, one to round */
    q <<= 1;
    if (rest >= sum) {
      rest -= sum;
      q |= 1;
    }
    rest <<= 1;
  }
  return (q + 1) >> 1;
}

TRVK_ALWAYS int8_t bounded(int32_t v, int32_t lo, int32_t hi) {
#if TRVK_SATURATES
  if (lo == INT8_MIN && hi == INT8_MAX) {
    __asm__("ssat %0, #8, %0" : "+r"(v));
    return (int8_t)v;
  }
#endif
  return (int8_t)trvk_clamp32(v, lo, hi);
}

void trvk_qsoftmax_m__ref(const trvk_call* call, uint32_t tile) {
  const trv_tensor *x = call->in, *y = call->out;
  const trvf_qsoftmax_attrs* a = call->attrs;
  const int32_t* table = (const int32_t*)(const void*)call->in[1].data;
  const int32_t zero = a->y_zero, lo = a->lo, hi = a->hi;
  const trv_dim n = y->dim[a->axis], x_step = x->stride[a->axis], y_step = y->stride[a->axis],
                total = trvk_count(y);
  trv_dim row, end;
  if (total == 0) return;
  trvk_split(total / n, call->tiles, tile, &row, &end);
  for (; row < end; row++) {
    const int8_t *from = (const int8_t*)x->data, *at;
    int8_t* to = (int8_t*)y->data;
    trv_dim rest = row;
    for (uint32_t i = y->rank; i-- > 0 && rest > 0;) {
      if (i == a->axis) continue;
      from += rest % y->dim[i] * x->stride[i];
      to += rest % y->dim[i] * y->stride[i];
      rest /= y->dim[i];
    }
    int32_t most = INT8_MIN;
    at = from;
    TRVK_UNROLLED for (trv_dim i = n; i > 0; i--, at += x_step) most = *at > most ? *at : most;
    /* & 255: inside the table even when a hostile plan writes over x meanwhile */
    if (n <= UINT8_MAX) { /* entries are at most 2^23: 32 bits do */
      uint32_t sum = 0;
      at = from;
      TRVK_UNROLLED for (trv_dim i = n; i > 0; i--, at += x_step) sum +=
          (uint32_t)table[(most - *at) & 255];
      if (sum == 0) sum = 1;
      for (trv_dim i = n; i > 0; i--, from += x_step, to += y_step) {
        const uint32_t q = (((uint32_t)table[(most - *from) & 255] << 8) + sum / 2) / sum;
        *to = bounded(trvk_add32((int32_t)q, zero), lo, hi);
      }
    } else {
      uint64_t sum = 0;
      at = from;
      for (trv_dim i = n; i > 0; i--, at += x_step) sum += (uint32_t)table[(most - *at) & 255];
      if (sum == 0) sum = 1;
      for (trv_dim i = n; i > 0; i--, from += x_step, to += y_step)
        *to = bounded(share((uint32_t)table[(most - *from) & 255], sum) + zero, lo, hi);
    }
  }
}
#endif
