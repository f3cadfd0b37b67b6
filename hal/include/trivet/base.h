/* base.h - types that every part of trivet shares: status, spans, buffers, diagnostics.
 *
 * Plain C11, no dependency but <stddef.h> and <stdint.h>. Fixed-width integers and constants
 * instead of enums, since an enum's size differs between ABIs.
 */
#ifndef TRIVET_BASE_H
#define TRIVET_BASE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#define TRV_API __declspec(dllexport)
#elif defined(__GNUC__)
#define TRV_API __attribute__((visibility("default")))
#else
#define TRV_API
#endif

#if defined(__GNUC__)
#define TRV_NODISCARD __attribute__((warn_unused_result))
#else
#define TRV_NODISCARD
#endif

/* ---- status: 0 is success, negative an error; the code says who must act ---- */
typedef int32_t trv_status;
#define TRV_OK 0
#define TRV_PENDING 1     /* not an error: a poll found the work not done yet */
#define TRV_ARGUMENT (-1) /* the caller passed something wrong: fix the call */
#define TRV_FORMAT (-2)   /* the file is damaged or not a trivet program: get a good copy */
#define TRV_VERSION (-3)  /* the file needs a newer runtime, or the part a newer driver: update */
#define TRV_MEMORY (-4)   /* a buffer is too small: give the size that the diag tells */
#define TRV_UNSUPPORTED (-5) /* build or device lacks what is needed: take another */
#define TRV_DEVICE (-6)      /* the device or its driver failed: see the diag's text */
#define TRV_STATE (-7) /* the call does not fit the object's state: see the function's contract */

/* What went wrong, as data. Texts are static, never to be freed. Fields that do not apply are 0
 * (step, time, value, axis: UINT32_MAX). */
typedef struct trv_diag {
  trv_status status;
  uint32_t step; /* step of the plan, or UINT32_MAX */
  uint32_t time; /* time in the plan (a CPU command has one of its own), or UINT32_MAX; key into the
                    debug table */
  uint32_t value;   /* value id, input or output position, region: what says which */
  uint32_t axis;    /* axis of that value, or UINT32_MAX */
  const char* what; /* static text: the fault in one sentence */
  int64_t expected; /* size, count, dtype code or dimension that was wanted */
  int64_t limit;    /* above expected: anything in expected..limit was wanted */
  int64_t got;      /* ... and what came */
} trv_diag;

/* Bytes that somebody else owns. */
typedef struct trv_span {
  const uint8_t* data;
  size_t size;
} trv_span;

/* Memory of a device. host: address the CPU may use, or NULL; dev: the device's own handle or
 * address, or 0. Both set: unified memory. size in bytes. */
typedef struct trv_buf {
  uint8_t* host;
  uint64_t dev;
  size_t size;
} trv_buf;

/* A dimension or stride at run time, in elements. */
typedef ptrdiff_t trv_dim;

#ifndef TRV_MAX_RANK
#define TRV_MAX_RANK 8 /* less for an image whose program needs less: smaller tensors */
#endif
#define TRV_NONE UINT32_MAX

#ifdef __cplusplus
}
#endif
#endif
