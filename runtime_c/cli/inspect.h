/* inspect.h - printing for trv_run. */
#ifndef TRV_CLI_INSPECT_H
#define TRV_CLI_INSPECT_H

#include "trivet/trivet.h"

/* Prints what is in a program; the exit status. */
int inspect(const trv_program* prog, const char* path, int json);
const char* dtype_name(uint32_t dtype);
#endif
