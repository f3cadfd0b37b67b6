/* toy.h - a driver for tests of the runtime core: its parts are one byte, its kernels a few lines.
 *
 * Delegate "toy", format "toy.1" (any other format is refused with UNSUPPORTED). data[0] says what
 * a part does with the values of its inputs and outputs:
 *   '+'  f32: out[0] = sum of the inputs, elementwise       'n'  nothing
 *   '<'  bool out[0] = (i32 in[0] < i32 in[1])              'i'  i32: out[0] = in[0] + 1
 *   'd'  writes dimension data[1] (a row) from i32 in[0]    'f'  u8 out[0] filled with data[1]
 *   'e'  fails with TRV_DEVICE
 */
#ifndef TRV_TEST_TOY_H
#define TRV_TEST_TOY_H

#include "trivet/hal.h"

extern const trv_driver toy_driver;
/* The same with runs that end only in wait. */
extern const trv_driver toy_async_driver;

struct trv_device {
  uint64_t given, done;          /* points of the asynchronous one */
  uint32_t runs, opened, joined; /* counters for tests */
};
#endif
