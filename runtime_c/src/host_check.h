/* host_check.h - trv_program_check with threads. Only for host.c. */
#ifndef TRV_HOST_CHECK_H
#define TRV_HOST_CHECK_H

#include "trivet/trivet.h"

/* Bytes from which on threads pay. */
#define TRVI_CHECK_THREADS ((uint64_t)1 << 23)

/* As trv_program_check, for files in memory. runner NULL: this thread alone. */
trv_status trvi_check_files(trv_program* prog, const trv_runner* runner);
#endif
