/* system.h - what trv_run needs of the system beside C: a clock, memory used, folders. */
#ifndef TRV_RUN_SYSTEM_H
#define TRV_RUN_SYSTEM_H

/* A steady clock, in milliseconds. */
double now_ms(void);
/* The most memory that this process has held, in bytes; -1 where the system does not tell. */
long long peak_bytes(void);
/* Makes a folder. One that is there already is as good; one that cannot be made shows when a file
 * is written. */
void make_folder(const char* path);
#endif
