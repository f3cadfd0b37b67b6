/* host_wasi.c - the system under host*.c: WebAssembly with WASI preview 1. One thread; files are
 * read. */
#if defined(__wasi__)
#define _POSIX_C_SOURCE 200809L /* posix_memalign, clock_gettime */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "host_os.h"

#define BASE_ALIGN 64u

/* ---- memory and files ---- */
void* trvi_new(size_t size, size_t align) {
  void* p = NULL;
  if (align < BASE_ALIGN) align = BASE_ALIGN;
  if (size > SIZE_MAX - align) return NULL;
  return posix_memalign(&p, align, size + !size) ? NULL : p;
}

void trvi_delete(void* memory) { free(memory); }

trv_status trvi_map(const char* path, trv_span* out_file, const char** out_what) {
  FILE* f = fopen(path, "rb");
  *out_what = "the file cannot be opened";
  if (!f) return TRV_DEVICE;
  const long size = fseek(f, 0, SEEK_END) == 0 ? ftell(f) : -1;
  uint8_t* p = size > 0 ? trvi_new((size_t)size, BASE_ALIGN) : NULL;
  const int good = p && fseek(f, 0, SEEK_SET) == 0 && fread(p, 1, (size_t)size, f) == (size_t)size;
  fclose(f);
  if (!good) {
    trvi_delete(p);
    *out_what = size == 0        ? "the file is empty"
                : size > 0 && !p ? "the file does not fit in memory"
                                 : "the file cannot be read";
    return size == 0 ? TRV_FORMAT : size > 0 && !p ? TRV_MEMORY : TRV_DEVICE;
  }
  out_file->data = p;
  out_file->size = (size_t)size;
  return TRV_OK;
}

void trvi_unmap(trv_span file) { trvi_delete((void*)(uintptr_t)file.data); }

void trvi_map_pages(const void* data, size_t size) {
  (void)data;
  (void)size;
}

trv_status trvi_library_open(const char* path, void** out_library) {
  (void)path;
  *out_library = NULL;
  return TRV_UNSUPPORTED;
}

void trvi_library_close(void* library) { (void)library; }

void (*trvi_library_find(void* library, const char* name))(void) {
  (void)library;
  (void)name;
  return NULL;
}

uint64_t trvi_now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* ---- there is one thread, and nobody to wait for ---- */
struct trvi_lock {
  int unused;
};

trvi_lock* trvi_lock_open(void) { return calloc(1, sizeof(trvi_lock)); }

void trvi_lock_close(trvi_lock* lock) { free(lock); }

void trvi_lock_take(trvi_lock* lock) { (void)lock; }

void trvi_lock_give(trvi_lock* lock) { (void)lock; }

void trvi_sleep_while(trvi_lock* lock, _Atomic uint32_t* word, uint32_t value) {
  (void)lock;
  (void)word;
  (void)value;
}

void trvi_wake(trvi_lock* lock, _Atomic uint32_t* word, uint32_t count) {
  (void)lock;
  (void)word;
  (void)count;
}

trv_status trvi_thread_start(trvi_thread* thread, const uint32_t* cpus, uint32_t count) {
  (void)thread;
  (void)cpus;
  return count ? TRV_UNSUPPORTED : TRV_DEVICE;
}

void trvi_thread_join(trvi_thread* thread) { (void)thread; }

uint32_t trvi_processors(void) { return 1; }
#else
typedef int trvi_not_wasi; /* a file without a declaration is not C */
#endif
