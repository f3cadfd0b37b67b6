/* faulty.h - a driver around another one: counts what is open, and makes one call fail. One at a
 * time in a process. */
#ifndef TRV_TEST_FAULTY_H
#define TRV_TEST_FAULTY_H

#include "trivet/hal.h"

typedef struct faulty_counts {
  uint32_t calls;     /* that may fail: all but close, caps, free, part_close, last_error */
  uint32_t fail_at;   /* the number of the call that fails; 0: none */
  const char* failed; /* the function that did */
  int32_t devices, parts, buffers; /* open at present */
  uint32_t runs, copies;
} faulty_counts;

/* The driver around inner; what inner leaves out is left out. Both are the caller's, counts is
 * zeroed. */
void faulty_make(trv_driver* out, const trv_driver* inner, faulty_counts* counts);
#endif
