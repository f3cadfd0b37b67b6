/* host_os.h - what host*.c need of a system: memory, files, locks, threads, time. Implemented once
 * for each kind of system: host_posix.c (Linux, Android, macOS, BSD), host_windows.c, host_wasi.c
 * (WebAssembly: no threads, files are read). */
#ifndef TRV_HOST_OS_H
#define TRV_HOST_OS_H

#include <stdatomic.h>

#include "trivet/hal.h"

/* Memory of at least size bytes (0 is fine) at a multiple of align, a power of 2, and of 64; NULL:
 * there is none. Free with trvi_delete, which takes NULL. */
void* trvi_new(size_t size, size_t align);
void trvi_delete(void* memory);

/* A file's bytes, read only, until trvi_unmap. path: UTF-8, or the system's own encoding. Errors:
 * DEVICE, FORMAT (it is empty), MEMORY; *out_what: static text. */
trv_status trvi_map(const char* path, trv_span* out_file, const char** out_what);
void trvi_unmap(trv_span file);
/* Asks the system for the pages of a piece of a file at once, where it can; reading does it else.
 */
void trvi_map_pages(const void* data, size_t size);

/* A shared library and one of its functions, NULL: it has none of that name. Errors of open:
 * DEVICE, UNSUPPORTED (a system without them). */
trv_status trvi_library_open(const char* path, void** out_library);
void trvi_library_close(void* library);
void (*trvi_library_find(void* library, const char* name))(void);

/* A steady clock. */
uint64_t trvi_now_ns(void);

/* A lock, and the bed of threads that wait for a word. NULL: out of memory. */
typedef struct trvi_lock trvi_lock;
trvi_lock* trvi_lock_open(void);
void trvi_lock_close(trvi_lock* lock);
void trvi_lock_take(trvi_lock* lock);
void trvi_lock_give(trvi_lock* lock);
/* Sleeps until *word is no longer value, or for no reason. */
void trvi_sleep_while(trvi_lock* lock, _Atomic uint32_t* word, uint32_t value);
/* Wakes at least one of those who sleep on word, which has changed; about count of them. */
void trvi_wake(trvi_lock* lock, _Atomic uint32_t* word, uint32_t count);

/* A thread; the caller fills in fn and self, and keeps the struct in place until the join. */
typedef struct trvi_thread {
  void (*fn)(void* self);
  void* self;
  uintptr_t handle;
} trvi_thread;
/* cpus[count]: processors that it is bound to; none: any. Errors: DEVICE (no more threads),
 * ARGUMENT (no such processor), UNSUPPORTED (a system that binds no threads). */
trv_status trvi_thread_start(trvi_thread* thread, const uint32_t* cpus, uint32_t count);
void trvi_thread_join(trvi_thread* thread);
/* Processors that this process may use, at least 1; a container's quota counts. */
uint32_t trvi_processors(void);
#endif
