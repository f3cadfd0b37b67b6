/* device.h - the open device. Private to hal/cuda. */
#ifndef TRVU_DEVICE_H
#define TRVU_DEVICE_H

#include "api.h"
#include "cuda.h"

#define TRVU_EVENTS \
  64 /* points whose events are kept; for an older one its successor is waited for */

struct trv_device {
  trvu_api api;
  trvu_handle *context, *stream;
  trvu_handle* events[TRVU_EVENTS]; /* of point p at p % TRVU_EVENTS */
  trvu_handle* first;               /* when the device was opened, for stamp */
  int32_t*
      flag; /* raised by kernels: an index out of range; memory of the host that the GPU sees */
  trvu_address flag_address;
  uint64_t point;      /* last one enqueued */
  uint64_t opened;     /* host's steady clock at first, ns */
  const char* missing; /* why no part is taken; NULL: the GPU is there */
  int32_t ordinal, arch, integrated, pageable, own_stream;
  uint32_t plain;
  trvu_result error; /* of the last call that failed */
  const char* what;  /* its text, static */
  char name[32];
};

/* Makes the device's context current for the calling thread, and back. enter: TRV_OK or TRV_DEVICE.
 */
trv_status trvu_enter(trv_device* dev);
void trvu_leave(trv_device* dev);
/* A result as a status; failures are kept for last_error. */
trv_status trvu_check(trv_device* dev, trvu_result result, const char* what);
/* Ends work that was put on the stream: *out_point is reached after it. */
trv_status trvu_mark(trv_device* dev, uint64_t* out_point);

/* part.c */
trv_status trvu_part_need(trv_device*, const trv_part_desc*, size_t* out_bytes, trv_diag* diag);
trv_status trvu_part_open(trv_device*, const trv_part_desc*, void* mem, trv_part** out_part);
void trvu_part_close(trv_device*, trv_part*);
trv_status trvu_run(trv_device*, trv_part*, const trv_run*, uint64_t* out_point);
#endif
