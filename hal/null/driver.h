/* driver.h - the null driver: takes parts and computes nothing. Measures what the runtime costs,
 * and is the skeleton of a new driver (README.md). */
#ifndef TRIVET_NULL_DRIVER_H
#define TRIVET_NULL_DRIVER_H

#include "trivet/hal.h"

extern TRV_API const trv_driver trv_null_driver;
#endif
