/* test_threads.c - many sessions of one program in parallel threads, and contexts of one host: for
 * ThreadSanitizer. Arguments: the folder that programs.py filled. */
#include <pthread.h>

#include "check.h"

#define THREADS 8
#define ROUNDS 200

typedef struct worker {
  pthread_t thread;
  const trv_program* program;
  const trv_bound_device* on;
  trv_host* host;
  int index, failures;
} worker;

/* z = x0 + w + x1, w = 0..3, on a session in this thread's own memory. */
static void* run_session(void* self) {
  worker* w = self;
  int failures = 0;
  trv_diag d;
  trv_session_desc desc = {
      .size = sizeof(desc), .program = w->program, .devices = w->on, .device_count = 1};
  trv_buf regions[16];
  trv_region region;
  trv_session* s;
  size_t bytes;
  memset(regions, 0, sizeof(regions));
  for (uint32_t i = 0; trv_program_region(w->program, 0, i, &region) == TRV_OK; i++)
    if (region.kind == TRV_REGION_KIND_ARENA) regions[i] = new_buf(region.size, region.align);
  desc.regions = regions;
  CHECK(trv_session_bytes(&desc, &bytes, &d) == TRV_OK);
  trv_buf mem = new_buf(bytes, 16);
  CHECK(trv_session_init(&desc, mem.host, bytes, &s, &d) == TRV_OK);
  for (int k = 0; k < ROUNDS; k++) {
    float x0[4], x1[4], z[4];
    for (int i = 0; i < 4; i++) x0[i] = (float)(w->index * 1000 + k), x1[i] = (float)(i * k);
    CHECK(trv_session_bind_input(s, 0, TRV_DTYPE_F32, 1, NULL, buf_of(x0, 16)) == TRV_OK);
    CHECK(trv_session_bind_input(s, 1, TRV_DTYPE_F32, 1, NULL, buf_of(x1, 16)) == TRV_OK);
    CHECK(trv_session_bind_output(s, 0, buf_of(z, 16)) == TRV_OK);
    CHECK(trv_session_run(s) == TRV_OK);
    for (int i = 0; i < 4; i++) CHECK(z[i] == x0[i] + (float)i + x1[i]);
  }
  trv_session_deinit(s);
  for (int i = 0; i < 16; i++) free(regions[i].host);
  free(mem.host);
  w->failures = failures;
  return NULL;
}

/* y = 3 x with changing sizes, on a context of a shared host with a shared thread pool. */
static void* run_context(void* self) {
  worker* w = self;
  int failures = 0;
  trv_diag d;
  trv_context* c;
  CHECK(trv_context_open(w->host, 0, &c, &d) == TRV_OK);
  trv_session* s = trv_context_session(c, 0);
  float *x = malloc(12 * 5000), *u = malloc(4 * 5000), *y = malloc(12 * 5000);
  for (int k = 0; k < 20; k++) {
    const int64_t n = 1 + (k * 977 + w->index * 313) % 5000, dims[2] = {n, 3};
    int wrong = 0;
    for (int i = 0; i < 3 * (int)n; i++) x[i] = (float)(i + w->index);
    CHECK(trv_session_bind_input(s, 0, TRV_DTYPE_F32, 2, dims, buf_of(x, (size_t)n * 12)) ==
          TRV_OK);
    CHECK(trv_session_bind_input(s, 1, TRV_DTYPE_F32, 1, dims, buf_of(u, (size_t)n * 4)) == TRV_OK);
    CHECK(trv_context_plan(c, 0) == TRV_OK && trv_session_output(s, 0)->dim[0] == n);
    CHECK(trv_session_bind_output(s, 0, buf_of(y, (size_t)n * 12)) == TRV_OK);
    CHECK(trv_context_run(c, 0) == TRV_OK);
    for (int i = 0; i < 3 * (int)n; i++) wrong += y[i] != 3.0f * (float)(i + w->index);
    CHECK(wrong == 0);
  }
  free(x);
  free(u);
  free(y);
  trv_context_close(c);
  w->failures = failures;
  return NULL;
}

static int in_parallel(void* (*run)(void*), const worker* model) {
  worker w[THREADS];
  int failures = 0;
  for (int i = 0; i < THREADS; i++) {
    w[i] = *model;
    w[i].index = i;
    w[i].failures = 1;
    CHECK(pthread_create(&w[i].thread, NULL, run, &w[i]) == 0);
  }
  for (int i = 0; i < THREADS; i++) {
    pthread_join(w[i].thread, NULL);
    failures += w[i].failures;
  }
  return failures;
}

static void count_tile(void* ctx, uint32_t i) { ((uint8_t*)ctx)[i]++; }

/* The pool alone: every tile exactly once, job after job. */
static int test_pool(const trv_runner* runner) {
  int failures = 0;
  static uint8_t seen[1000];
  for (uint32_t round = 0; round < 2000; round++) {
    const uint32_t n = 1 + round % 97;
    memset(seen, 0, n);
    runner->run(runner->self, count_tile, seen, n);
    int wrong = 0;
    for (uint32_t i = 0; i < n; i++) wrong += seen[i] != 1;
    CHECK(wrong == 0);
  }
  return failures;
}

#include "../../runtime_c/src/host_pool.h"

int main(int argc, char** argv) {
  const char* folder = argc > 1 ? argv[1] : ".";
  int failures = 0;
  trv_program program;
  trv_diag d;
  loaded file = load(folder, "cpu_static.trv");
  CHECK(trv_program_open(&program, span_of(&file), 0) == TRV_OK);
  void* mem = new_buf(trv_cpu_driver.device_bytes, 16).host;
  trv_bound_device on = {&trv_cpu_driver, NULL};
  CHECK(trv_cpu_driver.open(mem, NULL, &on.device) == TRV_OK);
  const worker sessions = {.program = &program, .on = &on};
  failures += in_parallel(run_session, &sessions);
  trv_cpu_driver.close(on.device);
  free(mem);
  free(file.memory);

  char path[4096];
  worker contexts = {0};
  snprintf(path, sizeof(path), "%s/cpu_dynamic.trv", folder);
  CHECK(trv_host_open(path, NULL, TRV_OPEN_DEFER_CRC, 4, &contexts.host, &d) == TRV_OK);
  failures += in_parallel(run_context, &contexts);
  trv_host_close(contexts.host);

  trvi_pool* pool = trvi_pool_open(4);
  const trv_runner runner = {trvi_pool_run, pool, trvi_pool_workers(pool)};
  CHECK(runner.workers == 4);
  failures += test_pool(&runner);
  trvi_pool_close(pool);
  printf("%s\n", failures ? "FAILED" : "ok");
  return failures != 0;
}
