/* host_pool.c - a thread pool whose workers spin briefly and then sleep.
 *
 * All of a job's state that decides who does what is one 64-bit word: the job's number above, the
 * tiles that nobody has taken yet below. Taking a tile is one compare-and-swap on it, so a worker
 * that comes late to a finished job finds either no tile or another number, and can never touch a
 * job that is gone. fn and ctx are read only after a tile was taken, while the job cannot end.
 *
 * Nobody waits for a worker that holds no tile: one that the system has put aside costs its share
 * of the work and no more. Where tiles are still out at the end, the caller sleeps after a short
 * spin, which leaves the processor to whoever holds them.
 */
#if !defined(_WIN32)
#define _GNU_SOURCE /* processors of a thread, syscall */
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>
#endif
#if defined(__linux__) && !defined(TRVI_NO_FUTEX)
#define FUTEX 1
#include <linux/futex.h>
#include <sys/syscall.h>
#else
#define FUTEX 0
#endif
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "host_pool.h"

#if defined(_WIN32)
/* One thread: apps bring their own trv_runner. */
trv_status trvi_pool_open(uint32_t threads, const uint32_t* cpus, uint32_t cpu_count,
                          trvi_pool** out_pool) {
  (void)threads;
  (void)cpus;
  *out_pool = NULL;
  return cpu_count ? TRV_UNSUPPORTED : TRV_OK;
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

#define SPIN_NS 30000u /* longer than the gap between two commands of one run */
#define MAX_THREADS 256
#define WAITING 0x80000000u /* in pending: the caller sleeps until no tile is out */
#define LARGE_TILES 4u      /* by worker: a step that is cut so often has work for everybody */

struct trvi_pool {
  _Alignas(64) _Atomic uint64_t word;    /* job number << 32 | tiles that nobody has taken */
  _Alignas(64) _Atomic uint32_t pending; /* tiles of the present job that are not done */
  _Alignas(64) _Atomic uint32_t turn;    /* changes when sleeping workers are called */
  _Atomic uint32_t sleepers, stop;
  _Atomic uint64_t called;  /* when workers were called last, until one has come */
  _Atomic uint32_t wake_ns; /* what they take to come: a running mean */
  atomic_flag busy;
  void (*fn)(void* ctx, uint32_t i);
  void* ctx;
  uint32_t spin_ns;
  pthread_mutex_t lock; /* of sleep and wake where there is no futex */
  pthread_cond_t changed;
  uint32_t threads; /* started */
  pthread_t thread[MAX_THREADS];
};

static uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static inline void pause_cpu(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__) || defined(__arm__)
  __asm__ volatile("yield");
#endif
}

/* ---- sleeping: until *word is no longer value, or for no reason ---- */
static void sleep_while(trvi_pool* p, _Atomic uint32_t* word, uint32_t value) {
#if FUTEX
  (void)p;
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
#else
  pthread_mutex_lock(&p->lock);
  while (atomic_load(word) == value) pthread_cond_wait(&p->changed, &p->lock);
  pthread_mutex_unlock(&p->lock);
#endif
}

/* At most count of those who sleep on word, which has changed. */
static void wake(trvi_pool* p, _Atomic uint32_t* word, uint32_t count) {
#if FUTEX
  (void)p;
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
#else
  (void)word;
  (void)count;
  pthread_mutex_lock(&p->lock);
  pthread_cond_broadcast(&p->changed);
  pthread_mutex_unlock(&p->lock);
#endif
}

/* ---- tiles ---- */
/* Does a tile of whatever job is there; 0: none is left. */
static int help(trvi_pool* p) {
  uint64_t w = atomic_load_explicit(&p->word, memory_order_acquire);
  do {
    if ((uint32_t)w == 0) return 0;
  } while (!atomic_compare_exchange_weak_explicit(&p->word, &w, w - 1, memory_order_acq_rel,
                                                  memory_order_acquire));
  p->fn(p->ctx, (uint32_t)w - 1);
  if (atomic_fetch_sub_explicit(&p->pending, 1, memory_order_acq_rel) == (WAITING | 1))
    wake(p, &p->pending, 1);
  return 1;
}

static int idle(trvi_pool* p) {
  return (uint32_t)atomic_load(&p->word) == 0 && !atomic_load(&p->stop);
}

static int unfinished(trvi_pool* p) {
  return atomic_load_explicit(&p->pending, memory_order_acquire) != 0;
}

static void spin_while(trvi_pool* p, int (*condition)(trvi_pool*)) {
  if (p->spin_ns == 0 || !condition(p)) return;
  const uint64_t until = now_ns() + p->spin_ns;
  do {
    for (int i = 0; i < 16; i++) {
      if (!condition(p)) return;
      pause_cpu();
    }
  } while (now_ns() < until);
}

static void* work(void* self) {
  trvi_pool* p = self;
  while (!atomic_load_explicit(&p->stop, memory_order_relaxed)) {
    spin_while(p, idle);
    const uint32_t turn = atomic_load(&p->turn);
    atomic_fetch_add(&p->sleepers, 1);
    if (idle(p)) sleep_while(p, &p->turn, turn);
    atomic_fetch_sub(&p->sleepers, 1);
    const uint64_t called = atomic_exchange(&p->called, 0);
    if (called) {
      const uint64_t took = now_ns() - called;
      const uint32_t mean = atomic_load(&p->wake_ns);
      atomic_store(&p->wake_ns, mean - mean / 8 + (uint32_t)(took < 100000 ? took : 100000) / 8);
    }
    while (help(p)) {
    }
  }
  return NULL;
}

/* For a job that may use count of them. */
static void call_workers(trvi_pool* p, uint32_t count) {
  if (atomic_load(&p->sleepers) == 0) return;
  atomic_store(&p->called, now_ns());
  atomic_fetch_add(&p->turn, 1);
  wake(p, &p->turn, count < MAX_THREADS ? count : MAX_THREADS);
}

void trvi_pool_run(void* self, void (*fn)(void* ctx, uint32_t i), void* ctx, uint32_t count) {
  trvi_pool* p = self;
  if (count < 2 || count >= WAITING ||
      atomic_flag_test_and_set_explicit(&p->busy, memory_order_acquire)) {
    for (uint32_t i = 0; i < count; i++) fn(ctx, i);
    return;
  }
  p->fn = fn;
  p->ctx = ctx;
  atomic_store_explicit(&p->pending, count, memory_order_relaxed);
  const uint64_t job = (atomic_load_explicit(&p->word, memory_order_relaxed) >> 32) + 1;
  atomic_store(&p->word, job << 32 | count);
  /* workers that spin are here at once; for those that sleep, little work must first show that it
   * takes longer than they do to come */
  if (count >= LARGE_TILES * (p->threads + 1)) {
    call_workers(p, count - 1);
  } else if (atomic_load(&p->sleepers) != 0) {
    const uint64_t began = now_ns();
    help(p);
    const uint64_t left = (uint32_t)atomic_load(&p->word);
    if (left && (now_ns() - began) * left > 2 * (uint64_t)atomic_load(&p->wake_ns))
      call_workers(p, (uint32_t)left);
  }
  while (help(p)) {
  }
  spin_while(p, unfinished);
  if (unfinished(p)) {
    uint32_t v = atomic_fetch_or(&p->pending, WAITING) | WAITING;
    for (; v != WAITING; v = atomic_load(&p->pending)) sleep_while(p, &p->pending, v);
  }
  atomic_flag_clear_explicit(&p->busy, memory_order_release);
}

/* ---- life ---- */
static trv_status bind_thread(pthread_t thread, const uint32_t* cpus, uint32_t cpu_count) {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  for (uint32_t i = 0; i < cpu_count; i++) {
    if (cpus[i] >= CPU_SETSIZE) return TRV_ARGUMENT;
    CPU_SET(cpus[i], &set);
  }
  return pthread_setaffinity_np(thread, sizeof(set), &set) ? TRV_ARGUMENT : TRV_OK;
#else
  (void)thread;
  (void)cpus;
  (void)cpu_count;
  return TRV_UNSUPPORTED;
#endif
}

trv_status trvi_pool_open(uint32_t threads, const uint32_t* cpus, uint32_t cpu_count,
                          trvi_pool** out_pool) {
  void* mem;
  trv_status st = TRV_OK;
  *out_pool = NULL;
  if (threads < 2) return TRV_OK;
  if (posix_memalign(&mem, 64, sizeof(trvi_pool))) return TRV_MEMORY;
  trvi_pool* p = mem;
  memset(p, 0, sizeof(*p));
  atomic_flag_clear(&p->busy);
  atomic_store(&p->wake_ns, 10000);
  pthread_mutex_init(&p->lock, NULL);
  pthread_cond_init(&p->changed, NULL);
  if (threads > MAX_THREADS) threads = MAX_THREADS;
  /* who spins on a processor that others need keeps them from ending */
  const uint32_t cores = cpu_count ? cpu_count : trvi_pool_cores();
  p->spin_ns = threads <= cores ? SPIN_NS : 0;
  while (!st && p->threads < threads - 1) {
    if (pthread_create(&p->thread[p->threads], NULL, work, p)) break; /* fewer serve as well */
    if (cpu_count) st = bind_thread(p->thread[p->threads], cpus, cpu_count);
    p->threads++;
  }
  if (st) {
    trvi_pool_close(p);
    return st;
  }
  *out_pool = p;
  return TRV_OK;
}

void trvi_pool_close(trvi_pool* p) {
  if (!p) return;
  atomic_store(&p->stop, 1);
  atomic_fetch_add(&p->turn, 1);
  wake(p, &p->turn, MAX_THREADS);
  for (uint32_t i = 0; i < p->threads; i++) pthread_join(p->thread[i], NULL);
  pthread_cond_destroy(&p->changed);
  pthread_mutex_destroy(&p->lock);
  free(p);
}

uint32_t trvi_pool_workers(const trvi_pool* p) { return p ? p->threads + 1 : 1; }

/* Processors that a container's quota is worth, rounded up; 0: no quota. */
static uint32_t quota(void) {
  long long most, period;
  FILE* f = fopen("/sys/fs/cgroup/cpu.max", "re");
  if (!f) return 0;
  const int n = fscanf(f, "%lld %lld", &most, &period);
  fclose(f);
  if (n != 2 || most <= 0 || period <= 0) return 0;
  const long long cpus = most / period + (most % period != 0);
  return cpus < MAX_THREADS ? (uint32_t)cpus : MAX_THREADS;
}

uint32_t trvi_pool_cores(void) {
  long n = 0;
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) n = CPU_COUNT(&set);
#endif
  if (n <= 0) n = sysconf(_SC_NPROCESSORS_ONLN);
  const uint32_t cores = n > 0 ? (uint32_t)n : 1, most = quota();
  return most && most < cores ? most : cores;
}
#endif
