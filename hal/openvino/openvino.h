/* openvino.h - the driver "openvino": parts of the format openvino.1 run by Intel's OpenVINO.
 *
 * The library is loaded when the first part is offered: the file that TRV_OPENVINO names, else
 * libopenvino_c as the system finds it. Options: "DEVICE+WORD+..", DEVICE being OpenVINO's name of
 * a device (CPU, GPU, NPU, AUTO; CPU if left out), words f16 or bf16 (computes in that; else in
 * float32) and cache=FOLDER (compiled networks are kept there).
 */
#ifndef TRV_OPENVINO_H
#define TRV_OPENVINO_H

#include "trivet/hal.h"

extern const trv_driver trv_openvino_driver;

#endif
