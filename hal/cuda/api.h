/* api.h - the part of the CUDA driver API that is used, with types of our own: nothing of CUDA is
 * needed to build. Private to hal/cuda.
 *
 * Names, numbers and layouts are those of the driver's binary interface (CUDA 11.4 and newer).
 */
#ifndef TRVU_API_H
#define TRVU_API_H

#include <stddef.h>
#include <stdint.h>

typedef int trvu_result; /* 0: success */
typedef uint64_t trvu_address;
typedef struct trvu_handle
    trvu_handle; /* contexts, streams, events, modules, functions, graphs, their nodes */

#define TRVU_NOT_READY 600
#define TRVU_ATTR_MAJOR 75
#define TRVU_ATTR_MINOR 76
#define TRVU_ATTR_INTEGRATED 18
#define TRVU_ATTR_PAGEABLE 88 /* the GPU reads any memory of the host */
#define TRVU_ATTR_REGISTER 99 /* memory of the host can be registered */
#define TRVU_STREAM_NON_BLOCKING 1u
#define TRVU_HOST_PORTABLE_MAPPED 3u
#define TRVU_REGISTER_READ_ONLY 8u

typedef struct trvu_kernel_node { /* CUDA_KERNEL_NODE_PARAMS, first version */
  trvu_handle* function;
  unsigned grid[3], block[3], shared;
  void** parameters;
  void** extra;
} trvu_kernel_node;

/* X(name in the library, arguments); the second list may be missing in old drivers */
#define TRVU_NEEDED(X)                                                                         \
  X(cuInit, (unsigned))                                                                        \
  X(cuDeviceGet, (int*, int))                                                                  \
  X(cuDeviceGetAttribute, (int*, int, int))                                                    \
  X(cuDevicePrimaryCtxRetain, (trvu_handle**, int))                                            \
  X(cuDevicePrimaryCtxRelease_v2, (int))                                                       \
  X(cuCtxPushCurrent_v2, (trvu_handle*))                                                       \
  X(cuCtxPopCurrent_v2, (trvu_handle**))                                                       \
  X(cuStreamCreate, (trvu_handle**, unsigned))                                                 \
  X(cuStreamDestroy_v2, (trvu_handle*))                                                        \
  X(cuStreamSynchronize, (trvu_handle*))                                                       \
  X(cuStreamWaitEvent, (trvu_handle*, trvu_handle*, unsigned))                                 \
  X(cuEventCreate, (trvu_handle**, unsigned))                                                  \
  X(cuEventDestroy_v2, (trvu_handle*))                                                         \
  X(cuEventRecord, (trvu_handle*, trvu_handle*))                                               \
  X(cuEventQuery, (trvu_handle*))                                                              \
  X(cuEventSynchronize, (trvu_handle*))                                                        \
  X(cuEventElapsedTime, (float*, trvu_handle*, trvu_handle*))                                  \
  X(cuMemGetInfo_v2, (size_t*, size_t*))                                                       \
  X(cuMemAlloc_v2, (trvu_address*, size_t))                                                    \
  X(cuMemFree_v2, (trvu_address))                                                              \
  X(cuMemHostAlloc, (void**, size_t, unsigned))                                                \
  X(cuMemFreeHost, (void*))                                                                    \
  X(cuMemHostGetDevicePointer_v2, (trvu_address*, void*, unsigned))                            \
  X(cuMemHostRegister_v2, (void*, size_t, unsigned))                                           \
  X(cuMemHostUnregister, (void*))                                                              \
  X(cuMemcpyHtoDAsync_v2, (trvu_address, const void*, size_t, trvu_handle*))                   \
  X(cuMemcpyDtoHAsync_v2, (void*, trvu_address, size_t, trvu_handle*))                         \
  X(cuMemcpyDtoDAsync_v2, (trvu_address, trvu_address, size_t, trvu_handle*))                  \
  X(cuModuleLoadData, (trvu_handle**, const void*))                                            \
  X(cuModuleUnload, (trvu_handle*))                                                            \
  X(cuModuleGetFunction, (trvu_handle**, trvu_handle*, const char*))                           \
  X(cuLaunchKernel, (trvu_handle*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, \
                     unsigned, trvu_handle*, void**, void**))                                  \
  X(cuGetErrorString, (trvu_result, const char**))
#define TRVU_GRAPHS(X)                                                                     \
  X(cuGraphCreate, (trvu_handle**, unsigned))                                              \
  X(cuGraphDestroy, (trvu_handle*))                                                        \
  X(cuGraphAddKernelNode,                                                                  \
    (trvu_handle**, trvu_handle*, trvu_handle* const*, size_t, const trvu_kernel_node*))   \
  X(cuGraphInstantiateWithFlags, (trvu_handle**, trvu_handle*, unsigned long long))        \
  X(cuGraphExecDestroy, (trvu_handle*))                                                    \
  X(cuGraphExecKernelNodeSetParams, (trvu_handle*, trvu_handle*, const trvu_kernel_node*)) \
  X(cuGraphNodeSetEnabled, (trvu_handle*, trvu_handle*, unsigned))                         \
  X(cuGraphUpload, (trvu_handle*, trvu_handle*))                                           \
  X(cuGraphLaunch, (trvu_handle*, trvu_handle*))

typedef struct trvu_api {
  void* library;
#define TRVU_FIELD(name, args) trvu_result(*name) args;
  TRVU_NEEDED(TRVU_FIELD)
  TRVU_GRAPHS(TRVU_FIELD)
#undef TRVU_FIELD
  int graphs; /* are all functions of the second list there */
} trvu_api;

/* Loads the driver's library. NULL, or what is missing (static text). trvu_unload may be called
 * either way. */
const char* trvu_load(trvu_api* api);
void trvu_unload(trvu_api* api);
#endif
