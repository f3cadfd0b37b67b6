/* mcu_dsp.c - the products of microcontrollers with pairs of 16 bits: Cortex-M4, M7, M33. */
#include "kernel.h"

#if TRVK_M_DSP
#define TRVK_VARIANT __dsp
/* clang-format off: one after the other */
#include "mcu_conv.c"
#include "mcu_matmul.c"
#include "mcu_product.c"
/* clang-format on */
#endif
