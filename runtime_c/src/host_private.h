/* host_private.h - what host.c and host_context.c share. */
#ifndef TRV_HOST_PRIVATE_H
#define TRV_HOST_PRIVATE_H

#include "host_devices.h"
#include "host_os.h"
#include "host_pool.h"

#ifdef TRV_ONE_MEMORY
#error "TRV_ONE_MEMORY is for builds without host*.c"
#endif

/* Bytes of a file, or of the caller. */
typedef struct mapping {
  trv_span span;
  int owned;
} mapping;

/* Who runs tiles. pool: NULL where the app does, or one thread. */
typedef struct crew {
  int made;
  trvi_pool* pool;
  trv_runner runner;
} crew;

/* Constants in a device's memory, shared by all contexts. */
typedef struct shelf {
  trv_buf buf;
  size_t filled;
  uint32_t id;
  trv_bound_device on;
} shelf;

struct trv_host {
  trv_program program;
  mapping file, weights;
  crew crew; /* of contexts that ask for none of their own; made by the first of them */
  uint32_t threads;
  trvi_devices devices;
  shelf* shelves;
  uint32_t shelf_count;
  int unchecked;   /* CRCs were deferred and nobody has needed them yet */
  trvi_lock* lock; /* of unchecked, crew, shelves */
};

trv_status trvi_host_fail(trv_diag* d, trv_status status, const char* what);
trv_status trvi_host_check(trv_host* h, trv_diag* d);
/* threads NULL: the host's own, made when it is first needed. own: where others are made. *out
 * NULL: the calling thread alone. */
trv_status trvi_host_runner(trv_host* h, crew* own, const trv_threads* threads,
                            const trv_runner** out, trv_diag* d);
#endif
