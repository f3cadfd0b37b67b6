/* host_posix.c - the system under host*.c: Linux with any C library, Android, macOS, BSD. */
#if !defined(_WIN32) && !defined(__wasi__)
#define _GNU_SOURCE /* processors of a thread, syscall, madvise */
#define _DARWIN_C_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__) && !defined(TRVI_NO_FUTEX)
#define FUTEX 1
#include <linux/futex.h>
#include <sys/syscall.h>
#else
#define FUTEX 0
#endif

#include "host_os.h"

#define BASE_ALIGN 64u
#define HUGE_PAGE ((size_t)1 << 21)

/* ---- memory and files ---- */
void* trvi_new(size_t size, size_t align) {
  void* p = NULL;
  if (align < BASE_ALIGN) align = BASE_ALIGN;
  if (size > SIZE_MAX - align) return NULL;
#if defined(MADV_HUGEPAGE)
  /* what is large comes in large pages: fewer faults in the first run, fewer misses in all */
  const int large = size >= 2 * HUGE_PAGE && size <= SIZE_MAX - HUGE_PAGE;
  if (large && align < HUGE_PAGE) align = HUGE_PAGE;
#endif
  if (posix_memalign(&p, align, size + !size)) return NULL;
#if defined(MADV_HUGEPAGE)
  if (large) (void)madvise(p, size & ~(HUGE_PAGE - 1), MADV_HUGEPAGE);
#endif
  return p;
}

void trvi_delete(void* memory) { free(memory); }

trv_status trvi_map(const char* path, trv_span* out_file, const char** out_what) {
  struct stat info;
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    *out_what = "the file cannot be opened";
    return TRV_DEVICE;
  }
  if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode) || info.st_size < 0 ||
      (uint64_t)info.st_size > SIZE_MAX) {
    close(fd);
    *out_what = "this is not a file that can be mapped";
    return TRV_DEVICE;
  }
  if (info.st_size == 0) {
    close(fd);
    *out_what = "the file is empty";
    return TRV_FORMAT;
  }
  void* p = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
  close(fd);
  if (p == MAP_FAILED) {
    *out_what = "the file cannot be mapped";
    return TRV_DEVICE;
  }
  out_file->data = p;
  out_file->size = (size_t)info.st_size;
  return TRV_OK;
}

void trvi_unmap(trv_span file) { munmap((void*)(uintptr_t)file.data, file.size); }

void trvi_map_pages(const void* data, size_t size) {
#if defined(__linux__)
  const int populate_read = 22; /* MADV_POPULATE_READ of Linux 5.14, not in older headers */
  const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = (uintptr_t)data & ~(page - 1);
  (void)madvise((void*)begin, (uintptr_t)data + size - begin, populate_read);
#else
  (void)data;
  (void)size;
#endif
}

trv_status trvi_library_open(const char* path, void** out_library) {
  *out_library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  return *out_library ? TRV_OK : TRV_DEVICE;
}

void trvi_library_close(void* library) {
  if (library) (void)dlclose(library);
}

void (*trvi_library_find(void* library, const char* name))(void) {
  void (*out)(void) = NULL;
  void* found = dlsym(library, name);
  _Static_assert(sizeof(out) == sizeof(found), "POSIX: functions have the size of pointers");
  memcpy(&out, &found, sizeof(out)); /* ISO C has no cast between them */
  return out;
}

uint64_t trvi_now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* ---- locks and sleep ---- */
struct trvi_lock {
  pthread_mutex_t mutex;
  pthread_cond_t changed; /* of words, where there is no futex */
};

trvi_lock* trvi_lock_open(void) {
  trvi_lock* l = malloc(sizeof(*l));
  if (l) {
    pthread_mutex_init(&l->mutex, NULL);
    pthread_cond_init(&l->changed, NULL);
  }
  return l;
}

void trvi_lock_close(trvi_lock* lock) {
  if (!lock) return;
  pthread_cond_destroy(&lock->changed);
  pthread_mutex_destroy(&lock->mutex);
  free(lock);
}

void trvi_lock_take(trvi_lock* lock) { pthread_mutex_lock(&lock->mutex); }

void trvi_lock_give(trvi_lock* lock) { pthread_mutex_unlock(&lock->mutex); }

void trvi_sleep_while(trvi_lock* lock, _Atomic uint32_t* word, uint32_t value) {
#if FUTEX
  (void)lock;
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
#else
  pthread_mutex_lock(&lock->mutex);
  while (atomic_load(word) == value) pthread_cond_wait(&lock->changed, &lock->mutex);
  pthread_mutex_unlock(&lock->mutex);
#endif
}

void trvi_wake(trvi_lock* lock, _Atomic uint32_t* word, uint32_t count) {
#if FUTEX
  (void)lock;
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
#else
  (void)word;
  (void)count;
  pthread_mutex_lock(&lock->mutex);
  pthread_cond_broadcast(&lock->changed);
  pthread_mutex_unlock(&lock->mutex);
#endif
}

/* ---- threads ---- */
static void* begin(void* self) {
  const trvi_thread* t = self;
  t->fn(t->self);
  return NULL;
}

static trv_status start(trvi_thread* t) {
  pthread_t id;
  _Static_assert(sizeof(id) <= sizeof(t->handle), "a thread's id is a word");
  if (pthread_create(&id, NULL, begin, t)) return TRV_DEVICE;
  memcpy(&t->handle, &id, sizeof(id));
  return TRV_OK;
}

trv_status trvi_thread_start(trvi_thread* thread, const uint32_t* cpus, uint32_t count) {
  thread->handle = 0;
  if (count == 0) return start(thread);
#if defined(__linux__)
  /* a thread inherits where it may run: every C library can do that, Android's too */
  cpu_set_t own, set;
  CPU_ZERO(&set);
  for (uint32_t i = 0; i < count; i++) {
    if (cpus[i] >= CPU_SETSIZE) return TRV_ARGUMENT;
    CPU_SET(cpus[i], &set);
  }
  if (sched_getaffinity(0, sizeof(own), &own) || sched_setaffinity(0, sizeof(set), &set))
    return TRV_ARGUMENT;
  const trv_status st = start(thread);
  (void)sched_setaffinity(0, sizeof(own), &own);
  return st;
#else
  (void)cpus;
  return TRV_UNSUPPORTED;
#endif
}

void trvi_thread_join(trvi_thread* thread) {
  pthread_t id;
  memcpy(&id, &thread->handle, sizeof(id));
  pthread_join(id, NULL);
}

/* Processors that a container's quota is worth, rounded up; 0: no quota. */
static uint32_t quota(void) {
  long long most, period;
  FILE* f = fopen("/sys/fs/cgroup/cpu.max", "re");
  if (!f) return 0;
  const int n = fscanf(f, "%lld %lld", &most, &period);
  fclose(f);
  if (n != 2 || most <= 0 || period <= 0) return 0;
  const long long cpus = most / period + (most % period != 0);
  return cpus < 1 << 16 ? (uint32_t)cpus : 1u << 16;
}

uint32_t trvi_processors(void) {
  long n = 0;
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) n = CPU_COUNT(&set);
#endif
  if (n <= 0) n = sysconf(_SC_NPROCESSORS_ONLN);
  const uint32_t cores = n > 0 ? (uint32_t)n : 1, most = quota();
  return most && most < cores ? most : cores;
}
#else
typedef int trvi_not_posix; /* a file without a declaration is not C */
#endif
