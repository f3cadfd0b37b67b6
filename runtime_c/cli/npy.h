/* npy.h - reads and writes numpy's .npy files for trv_run. */
#ifndef TRV_CLI_NPY_H
#define TRV_CLI_NPY_H

#include "trivet/trivet.h"

typedef struct npy_array {
  uint8_t* data; /* malloc; aligned for every dtype */
  size_t size;
  uint32_t dtype, rank;
  int64_t dim[TRV_MAX_RANK];
} npy_array;

/* NULL, or what is wrong with the file. Free out->data. */
const char* npy_read(const char* path, npy_array* out);
/* A file of raw bytes; dtype and dims are the caller's. */
const char* npy_read_raw(const char* path, npy_array* out);
/* Writes a dense tensor. 0 on failure. */
int npy_write(const char* path, const trv_tensor* t);
#endif
