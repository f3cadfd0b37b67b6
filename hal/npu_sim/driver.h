/* driver.h - a pretend accelerator with an address space and a thread of its own (README.md). */
#ifndef TRIVET_NPU_SIM_DRIVER_H
#define TRIVET_NPU_SIM_DRIVER_H

#include "trivet/fb.h"
#include "trivet/hal.h"

extern TRV_API const trv_driver trv_npu_sim_driver;
#endif
