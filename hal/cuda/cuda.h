/* cuda.h - the CUDA driver: what an application may choose when it opens the device. */
#ifndef TRIVET_CUDA_H
#define TRIVET_CUDA_H

#include "trivet/hal.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Begins as trv_config. options: words with spaces between, or NULL:
 *   ordinal=N   the GPU's number, as the CUDA driver counts; 0 where it is not given
 *   plain       kernels one by one, no graph: for debuggers and profilers
 *   copies      memory of its own also where the GPU shares the host's
 * stream: the caller's CUstream, of the GPU's primary context; work is put there in order, and it
 * stays the caller's. NULL: a stream of its own. Only where size says that the field is there.
 *
 * Where there is no CUDA driver or no GPU, the device opens all the same and takes no part. */
typedef struct trv_cuda_config {
  uint32_t size;
  const char* options;
  void* stream;
} trv_cuda_config;

extern TRV_API const trv_driver trv_cuda_driver;

#ifdef __cplusplus
}
#endif
#endif
