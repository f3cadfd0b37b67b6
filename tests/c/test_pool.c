/* test_pool.c - the thread pool alone, for ThreadSanitizer: every tile exactly once, whoever calls
 * and however often, workers awake or asleep. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "../../runtime_c/src/host_pool.h"

#define CHECK(ok)                                     \
  do {                                                \
    if (!(ok)) {                                      \
      printf("%s:%d: %s\n", __FILE__, __LINE__, #ok); \
      failures++;                                     \
    }                                                 \
  } while (0)

typedef struct job {
  uint8_t seen[1000];
  int slow; /* the tile that takes a while, -1: none */
} job;

static void pause_us(long us) {
  const struct timespec t = {0, us * 1000};
  nanosleep(&t, NULL);
}

static void count_tile(void* ctx, uint32_t i) {
  job* j = ctx;
  if ((int)i == j->slow) pause_us(200);
  j->seen[i]++;
}

static int run_jobs(trvi_pool* pool, uint32_t rounds, uint32_t salt) {
  int failures = 0;
  job j;
  for (uint32_t round = 0; round < rounds; round++) {
    const uint32_t n = round % 3 ? 1 + (round + salt) % 97 : 2 + round % 2;
    memset(&j, 0, sizeof(j));
    /* the last tile is taken first: its owner is still at work when the others are done */
    j.slow = round % 64 == 5 ? (int)n - 1 : round % 64 == 6 ? 0 : -1;
    if (round % 100 == 7) pause_us(100); /* workers fall asleep */
    trvi_pool_run(pool, count_tile, &j, n);
    int wrong = 0;
    for (uint32_t i = 0; i < sizeof(j.seen); i++) wrong += j.seen[i] != (i < n);
    CHECK(wrong == 0);
  }
  return failures;
}

typedef struct caller {
  pthread_t thread;
  trvi_pool* pool;
  uint32_t salt;
  int failures;
} caller;

static void* call(void* self) {
  caller* c = self;
  c->failures = run_jobs(c->pool, 1000, c->salt);
  return NULL;
}

static int test_many_callers(trvi_pool* pool) {
  int failures = 0;
  caller c[6];
  for (uint32_t i = 0; i < 6; i++) {
    c[i] = (caller){.pool = pool, .salt = 7 * i, .failures = 1};
    CHECK(pthread_create(&c[i].thread, NULL, call, &c[i]) == 0);
  }
  for (int i = 0; i < 6; i++) {
    pthread_join(c[i].thread, NULL);
    failures += c[i].failures;
  }
  return failures;
}

static int test_life(void) {
  int failures = 0;
  static const uint32_t first = 0, none = 1u << 20;
  for (uint32_t i = 0; i < 40; i++) {
    trvi_pool* pool;
    CHECK(trvi_pool_open(1 + i % 5, &first, i % 2, &pool) == TRV_OK);
    CHECK(trvi_pool_workers(pool) == 1 + i % 5 && (pool == NULL) == (i % 5 == 0));
    if (pool && i % 3 == 1) failures += run_jobs(pool, 3, i);
    if (i % 4 == 2) pause_us(150); /* closed while its workers sleep */
    trvi_pool_close(pool);
  }
  trvi_pool* pool;
  CHECK(trvi_pool_open(3, &none, 1, &pool) == TRV_ARGUMENT && pool == NULL);
  CHECK(trvi_pool_cores() >= 1);
  trvi_pool_close(NULL);
  return failures;
}

int main(void) {
  int failures = test_life();
  trvi_pool* pool;
  for (uint32_t threads = 2; threads <= 4;
       threads += 2) { /* one that spins, one for two processors */
    CHECK(trvi_pool_open(threads, NULL, 0, &pool) == TRV_OK);
    failures += run_jobs(pool, 5000, 0) + test_many_callers(pool);
    trvi_pool_close(pool);
  }
  printf("%s\n", failures ? "FAILED" : "ok");
  return failures != 0;
}
