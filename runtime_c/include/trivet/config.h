/* config.h - every compile-time switch of the runtime, with its reason. Define them on the
 * compiler's command line. */
#ifndef TRIVET_CONFIG_H
#define TRIVET_CONFIG_H

/* #define TRV_NO_HOST      no malloc, files or threads: host.c is left out (microcontrollers) */
/* #define TRV_NO_TEXT      diag.what is NULL: saves the flash of the messages; codes, steps and
 * numbers stay */

#endif
