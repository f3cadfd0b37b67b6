/* config.h - every compile-time switch of the runtime, with its reason. Define them on the
 * compiler's command line. */
#ifndef TRIVET_CONFIG_H
#define TRIVET_CONFIG_H

/* #define TRV_NO_HOST      no malloc, files or threads: host.c is left out (microcontrollers) */
/* #define TRV_NO_TEXT      diag.what is NULL: saves the flash of the messages; codes, steps and
 * numbers stay */
/* #define TRV_NO_REAL      trv_selftest compares integers alone: no real numbers by software */
/* #define TRV_ONE_MEMORY   every memory of a file is host memory, steps run one after another:
 * leaves out memories of devices, copies by devices, order between devices by waits,
 * trv_session_homes, _step, _read, _write (microcontrollers) */

#endif
