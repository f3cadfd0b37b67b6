/* qconv_dw16.c - depthwise convolution of i16. */
#include "qconv.h"
#define T int16_t
#define S int64_t
#define P(x, w) (((x) - z) * (w))
#define ADD(s, p) trvk_add64(s, p)
#define OUT trvk_qout_i64
#define NAME trvk_qconv_depthwise_i16
#include "qconv_depthwise.inc"
