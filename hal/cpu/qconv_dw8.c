/* qconv_dw8.c - depthwise convolution of i8. */
#include "qconv.h"
#define T int8_t
#define S int32_t
#define P(x, w) (int16_t)((int16_t)((x) - (int16_t)z) * (w)) /* 255 * 128 fits 16 bits */
#define ADD(s, p) trvk_add32(s, p)
#define OUT trvk_qout_i32
#define NAME trvk_qconv_depthwise_i8
#include "qconv_depthwise.inc"
