/* host_pool.h - a small thread pool behind trv_runner. Only for host.c. */
#ifndef TRV_HOST_POOL_H
#define TRV_HOST_POOL_H

#include "trivet/hal.h"

typedef struct trvi_pool trvi_pool;

/* Starts threads - 1 threads (the one that calls run works too); *out_pool stays NULL for threads <
 * 2. cpus[cpu_count]: processors that they are bound to; none: any. Errors: MEMORY; ARGUMENT (no
 * such processor); UNSUPPORTED (a system that binds no threads). */
trv_status trvi_pool_open(uint32_t threads, const uint32_t* cpus, uint32_t cpu_count,
                          trvi_pool** out_pool);
/* Ends the threads. No run may be under way. NULL is fine. */
void trvi_pool_close(trvi_pool* pool);
/* trv_runner.run: self is the pool. Any thread may call it at any time; while another's job holds
 * the pool, the caller does its work alone instead of waiting. */
void trvi_pool_run(void* self, void (*fn)(void* ctx, uint32_t i), void* ctx, uint32_t count);
uint32_t trvi_pool_workers(const trvi_pool* pool);
/* Processors that this process may use, at least 1; a container's quota counts. */
uint32_t trvi_pool_cores(void);
#endif
