/* test_threads.c - many sessions of one program in parallel threads, and contexts of one host, with
 * its threads, their own or the app's: for ThreadSanitizer. Arguments: the folder that programs.py
 * filled. */
#include <pthread.h>

#include "check.h"

#define THREADS 8
#define ROUNDS 200
#define LARGE 15000 /* rows that are worth more than one thread */

typedef struct worker {
  pthread_t thread;
  const trv_program* program;
  const trv_bound_device* on;
  trv_host* host;
  const trv_threads* threads; /* of a context */
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
  CHECK(trv_context_open_on(w->host, 0, w->threads, &c, &d) == TRV_OK);
  trv_session* s = trv_context_session(c, 0);
  float *x = malloc(12 * LARGE), *u = malloc(4 * LARGE), *y = malloc(12 * LARGE);
  for (int k = 0; k < 20; k++) {
    const int64_t n = k % 5 == 4 ? LARGE : 1 + (k * 977 + w->index * 313) % 5000, dims[2] = {n, 3};
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

/* An app's own threads: two for each call, and how many calls there were. */
typedef struct share {
  pthread_t thread;
  void (*fn)(void* ctx, uint32_t i);
  void* ctx;
  uint32_t begin, end;
} share;

static void* run_share(void* self) {
  const share* s = self;
  for (uint32_t i = s->begin; i < s->end; i++) s->fn(s->ctx, i);
  return NULL;
}

static void app_run(void* self, void (*fn)(void* ctx, uint32_t i), void* ctx, uint32_t count) {
  share s[2] = {{.fn = fn, .ctx = ctx, .end = count / 2},
                {.fn = fn, .ctx = ctx, .begin = count / 2, .end = count}};
  __atomic_fetch_add((uint32_t*)self, 1, __ATOMIC_RELAXED);
  for (int i = 0; i < 2; i++)
    if (pthread_create(&s[i].thread, NULL, run_share, &s[i])) abort();
  for (int i = 0; i < 2; i++) pthread_join(s[i].thread, NULL);
}

/* Contexts of one host with threads of their own kind each. */
static int test_threads_of_contexts(trv_host* host) {
  int failures = 0;
  uint32_t calls = 0;
  static const uint32_t cpu = 0;
  const trv_runner runner = {app_run, &calls, 2}, empty = {app_run, &calls, 0};
  const trv_threads kinds[] = {
      {.size = sizeof(trv_threads)},
      {.size = sizeof(trv_threads), .count = 3},
      {.size = sizeof(trv_threads), .count = 1},
      {.size = sizeof(trv_threads), .count = 2, .cpus = &cpu, .cpu_count = 1},
      {.size = sizeof(trv_threads), .runner = &runner}};
  for (uint32_t i = 0; i < sizeof(kinds) / sizeof(*kinds); i++) {
    worker w = {.host = host, .threads = &kinds[i], .index = (int)i, .failures = 1};
    run_context(&w);
    failures += w.failures;
    CHECK((calls != 0) == (kinds[i].runner != NULL));
  }
  trv_diag d;
  trv_context* c;
  const trv_threads wrong[] = {{.size = 4},
                               {.size = sizeof(trv_threads), .runner = &empty},
                               {.size = sizeof(trv_threads), .cpu_count = 1}};
  for (int i = 0; i < 3; i++)
    CHECK(trv_context_open_on(host, 0, &wrong[i], &c, &d) == TRV_ARGUMENT && c == NULL && d.what);
  return failures;
}

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
  const trv_threads own = {.size = sizeof(own), .count = 2};
  contexts.threads = &own;
  failures += in_parallel(run_context, &contexts);
  failures += test_threads_of_contexts(contexts.host);
  trv_host_close(contexts.host);
  printf("%s\n", failures ? "FAILED" : "ok");
  return failures != 0;
}
