/* host_pool.c - a thread pool whose workers spin briefly and then sleep.
 *
 * All of a job's state that decides who does what is one 64-bit word: the job's number above, the
 * tiles that nobody has taken yet below. Taking a tile is one compare-and-swap on it, so a worker
 * that comes late to a finished job finds either no tile or another number, and can never touch a
 * job that is gone. fn and ctx are read only after a tile was taken, while the job cannot end.
 */
#if !defined(_WIN32)
#define _GNU_SOURCE /* sched_getaffinity */
#include <pthread.h>
#include <sched.h>
#include <unistd.h>
#endif
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "host_pool.h"

#if defined(_WIN32)
/* One thread: apps bring their own trv_runner. */
trvi_pool* trvi_pool_open(uint32_t threads) {
  (void)threads;
  return NULL;
}
void trvi_pool_close(trvi_pool* pool) { (void)pool; }
void trvi_pool_run(void* self, void (*fn)(void* ctx, uint32_t i), void* ctx, uint32_t count) {
  (void)self;
  for (uint32_t i = 0; i < count; i++) fn(ctx, i);
}
uint32_t trvi_pool_workers(const trvi_pool* pool) {
  (void)pool;
  return 1;
}
uint32_t trvi_pool_cores(void) { return 1; }
#else

#define SPINS 2000 /* about 50 us: longer than the gap between two commands of one run */
#define MAX_THREADS 256

struct trvi_pool {
  _Alignas(64) _Atomic uint64_t word; /* job number << 32 | tiles left */
  _Alignas(64) _Atomic uint32_t done; /* tiles finished of the present job */
  _Alignas(64) _Atomic uint32_t sleepers;
  _Atomic uint32_t stop;
  atomic_flag busy;
  void (*fn)(void* ctx, uint32_t i);
  void* ctx;
  pthread_mutex_t lock;
  pthread_cond_t wake;
  uint32_t threads; /* started */
  pthread_t thread[MAX_THREADS];
};

static inline void pause_cpu(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__) || defined(__arm__)
  __asm__ volatile("yield");
#endif
}

/* Does tiles of whatever job is there until none is left. */
static void help(trvi_pool* p) {
  uint64_t w = atomic_load_explicit(&p->word, memory_order_acquire);
  while ((uint32_t)w != 0) {
    if (!atomic_compare_exchange_weak_explicit(&p->word, &w, w - 1, memory_order_acq_rel,
                                               memory_order_acquire))
      continue;
    p->fn(p->ctx, (uint32_t)w - 1);
    atomic_fetch_add_explicit(&p->done, 1, memory_order_release);
    w = atomic_load_explicit(&p->word, memory_order_acquire);
  }
}

static int idle(trvi_pool* p) {
  return (uint32_t)atomic_load(&p->word) == 0 && !atomic_load(&p->stop);
}

static void* work(void* self) {
  trvi_pool* p = self;
  while (!atomic_load_explicit(&p->stop, memory_order_relaxed)) {
    for (uint32_t i = 0; i < SPINS && idle(p); i++) pause_cpu();
    if (idle(p)) {
      pthread_mutex_lock(&p->lock);
      atomic_fetch_add(&p->sleepers, 1);
      while (idle(p)) pthread_cond_wait(&p->wake, &p->lock);
      atomic_fetch_sub(&p->sleepers, 1);
      pthread_mutex_unlock(&p->lock);
    }
    help(p);
  }
  return NULL;
}

static void wake_all(trvi_pool* p) {
  if (atomic_load(&p->sleepers) == 0) return;
  pthread_mutex_lock(&p->lock);
  pthread_cond_broadcast(&p->wake);
  pthread_mutex_unlock(&p->lock);
}

void trvi_pool_run(void* self, void (*fn)(void* ctx, uint32_t i), void* ctx, uint32_t count) {
  trvi_pool* p = self;
  if (count < 2 || atomic_flag_test_and_set_explicit(&p->busy, memory_order_acquire)) {
    for (uint32_t i = 0; i < count; i++) fn(ctx, i);
    return;
  }
  p->fn = fn;
  p->ctx = ctx;
  atomic_store_explicit(&p->done, 0, memory_order_relaxed);
  const uint64_t job = (atomic_load_explicit(&p->word, memory_order_relaxed) >> 32) + 1;
  atomic_store(&p->word, job << 32 | count);
  wake_all(p);
  help(p);
  for (uint32_t spins = 0; atomic_load_explicit(&p->done, memory_order_acquire) != count; spins++) {
    if (spins < SPINS)
      pause_cpu();
    else
      sched_yield(); /* a worker that holds a tile may have lost its processor */
  }
  atomic_flag_clear_explicit(&p->busy, memory_order_release);
}

trvi_pool* trvi_pool_open(uint32_t threads) {
  void* mem;
  if (threads < 2 || posix_memalign(&mem, 64, sizeof(trvi_pool))) return NULL;
  trvi_pool* p = mem;
  memset(p, 0, sizeof(*p));
  atomic_flag_clear(&p->busy);
  pthread_mutex_init(&p->lock, NULL);
  pthread_cond_init(&p->wake, NULL);
  if (threads > MAX_THREADS) threads = MAX_THREADS;
  while (p->threads < threads - 1 && pthread_create(&p->thread[p->threads], NULL, work, p) == 0)
    p->threads++;
  return p;
}

void trvi_pool_close(trvi_pool* p) {
  if (!p) return;
  pthread_mutex_lock(&p->lock);
  atomic_store(&p->stop, 1);
  pthread_cond_broadcast(&p->wake);
  pthread_mutex_unlock(&p->lock);
  for (uint32_t i = 0; i < p->threads; i++) pthread_join(p->thread[i], NULL);
  pthread_cond_destroy(&p->wake);
  pthread_mutex_destroy(&p->lock);
  free(p);
}

uint32_t trvi_pool_workers(const trvi_pool* p) { return p ? p->threads + 1 : 1; }

uint32_t trvi_pool_cores(void) {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0 && CPU_COUNT(&set) > 0)
    return (uint32_t)CPU_COUNT(&set);
#endif
  const long n = sysconf(_SC_NPROCESSORS_ONLN);
  return n > 0 ? (uint32_t)n : 1;
}
#endif
