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
#include "host_pool.h"

#include <string.h>

#include "host_os.h"

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
  trvi_lock* lock;  /* of sleep and wake */
  uint32_t threads; /* started */
  trvi_thread thread[MAX_THREADS];
};

static inline void pause_cpu(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__) || defined(__arm__)
  __asm__ volatile("yield");
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
    trvi_wake(p->lock, &p->pending, 1);
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
  const uint64_t until = trvi_now_ns() + p->spin_ns;
  do {
    for (int i = 0; i < 16; i++) {
      if (!condition(p)) return;
      pause_cpu();
    }
  } while (trvi_now_ns() < until);
}

static void work(void* self) {
  trvi_pool* p = self;
  while (!atomic_load_explicit(&p->stop, memory_order_relaxed)) {
    spin_while(p, idle);
    const uint32_t turn = atomic_load(&p->turn);
    atomic_fetch_add(&p->sleepers, 1);
    if (idle(p)) trvi_sleep_while(p->lock, &p->turn, turn);
    atomic_fetch_sub(&p->sleepers, 1);
    const uint64_t called = atomic_exchange(&p->called, 0);
    if (called) {
      const uint64_t took = trvi_now_ns() - called;
      const uint32_t mean = atomic_load(&p->wake_ns);
      atomic_store(&p->wake_ns, mean - mean / 8 + (uint32_t)(took < 100000 ? took : 100000) / 8);
    }
    while (help(p)) {
    }
  }
}

/* For a job that may use count of them. */
static void call_workers(trvi_pool* p, uint32_t count) {
  if (atomic_load(&p->sleepers) == 0) return;
  atomic_store(&p->called, trvi_now_ns());
  atomic_fetch_add(&p->turn, 1);
  trvi_wake(p->lock, &p->turn, count < MAX_THREADS ? count : MAX_THREADS);
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
    const uint64_t began = trvi_now_ns();
    help(p);
    const uint64_t left = (uint32_t)atomic_load(&p->word);
    if (left && (trvi_now_ns() - began) * left > 2 * (uint64_t)atomic_load(&p->wake_ns))
      call_workers(p, (uint32_t)left);
  }
  while (help(p)) {
  }
  spin_while(p, unfinished);
  if (unfinished(p)) {
    uint32_t v = atomic_fetch_or(&p->pending, WAITING) | WAITING;
    for (; v != WAITING; v = atomic_load(&p->pending)) trvi_sleep_while(p->lock, &p->pending, v);
  }
  atomic_flag_clear_explicit(&p->busy, memory_order_release);
}

/* ---- life ---- */
trv_status trvi_pool_open(uint32_t threads, const uint32_t* cpus, uint32_t cpu_count,
                          trvi_pool** out_pool) {
  *out_pool = NULL;
  if (threads < 2) return TRV_OK;
  trvi_pool* p = trvi_new(sizeof(*p), _Alignof(trvi_pool));
  if (!p) return TRV_MEMORY;
  memset(p, 0, sizeof(*p));
  p->lock = trvi_lock_open();
  trv_status st = p->lock ? TRV_OK : TRV_MEMORY;
  atomic_flag_clear(&p->busy);
  atomic_store(&p->wake_ns, 10000);
  if (threads > MAX_THREADS) threads = MAX_THREADS;
  /* who spins on a processor that others need keeps them from ending */
  const uint32_t cores = cpu_count ? cpu_count : trvi_pool_cores();
  p->spin_ns = threads <= cores ? SPIN_NS : 0;
  while (!st && p->threads < threads - 1) {
    trvi_thread* t = &p->thread[p->threads];
    t->fn = work;
    t->self = p;
    st = trvi_thread_start(t, cpus, cpu_count);
    if (!st) p->threads++;
  }
  if (st == TRV_DEVICE) st = TRV_OK; /* fewer serve as well */
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
  if (p->threads) trvi_wake(p->lock, &p->turn, MAX_THREADS);
  for (uint32_t i = 0; i < p->threads; i++) trvi_thread_join(&p->thread[i]);
  trvi_lock_close(p->lock);
  trvi_delete(p);
}

uint32_t trvi_pool_workers(const trvi_pool* p) { return p ? p->threads + 1 : 1; }

uint32_t trvi_pool_cores(void) {
  const uint32_t n = trvi_processors();
  return n < MAX_THREADS ? n : MAX_THREADS;
}
