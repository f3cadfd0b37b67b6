/* test_host.c - hosts and contexts: mapping, shared state and arenas, growth, the null driver.
 * Argument: a folder. */
#include "../../hal/null/driver.h"
#include "check.h"

static const char* folder;

static trv_host* open_host(const char* name, uint32_t flags, uint32_t threads) {
  char path[4096], line[300];
  trv_host* host = NULL;
  trv_diag d;
  snprintf(path, sizeof(path), "%s/%s", folder, name);
  if (trv_host_open(path, NULL, flags, threads, &host, &d)) {
    trv_diag_print(&d, line, sizeof(line));
    printf("%s: %s\n", path, line);
  }
  return host;
}

/* Two entries share one state; two contexts do not. */
static int test_state(void) {
  int failures = 0;
  trv_diag d;
  trv_context *a, *b;
  trv_host* host = open_host("cpu_state.trv", 0, 1);
  float x[2] = {1, 2}, y[2];
  CHECK(trv_context_open(host, 0, &a, &d) == TRV_OK && trv_context_open(host, 0, &b, &d) == TRV_OK);
  trv_session *step = trv_context_session(a, 0), *peek = trv_context_session(a, 1);
  CHECK(trv_session_bind_input(step, 0, TRV_DTYPE_F32, 1, NULL, buf_of(x, 8)) == TRV_OK);
  for (int i = 0; i < 3; i++) CHECK(trv_context_run(a, 0) == TRV_OK);
  CHECK(trv_session_bind_output(peek, 0, buf_of(y, 8)) == TRV_OK);
  CHECK(trv_context_run(a, 1) == TRV_OK && y[0] == 13 && y[1] == 26);
  CHECK(trv_session_bind_output(trv_context_session(b, 1), 0, buf_of(y, 8)) == TRV_OK);
  CHECK(trv_context_run(b, 1) == TRV_OK && y[0] == 10 && y[1] == 20);
  CHECK(trv_context_reset(a) == TRV_OK && trv_session_bind_output(peek, 0, buf_of(y, 8)) == TRV_OK);
  CHECK(trv_context_run(a, 1) == TRV_OK && y[0] == 10);
  CHECK(trv_context_run(a, 2) == TRV_ARGUMENT && trv_context_session(a, 2) == NULL);
  CHECK(trv_context_bytes(a) > 0 && trv_host_program(host)->entry_count == 2);
  trv_context_close(a);
  trv_context_close(b);
  trv_context_close(NULL);
  trv_host_close(host);
  trv_host_close(NULL);
  return failures;
}

/* The arena grows with the sizes, inputs may be written in place. */
static int test_growth(void) {
  int failures = 0;
  trv_diag d;
  trv_context* c;
  trv_host* host = open_host("cpu_dynamic.trv", TRV_OPEN_DEFER_CRC, 2);
  CHECK(trv_context_open(host, 0, &c, &d) == TRV_OK);
  trv_session* s = trv_context_session(c, 0);
  CHECK(trv_context_run(c, 0) == TRV_STATE);
  size_t before = trv_context_bytes(c);
  for (int64_t n = 1; n < 100000; n = n * 3 + 1) {
    const int64_t dims[2] = {n, 3};
    const trv_buf home = {NULL, 0, 0};
    CHECK(trv_session_bind_input(s, 0, TRV_DTYPE_F32, 2, dims, home) == TRV_OK);
    CHECK(trv_session_bind_input(s, 1, TRV_DTYPE_F32, 1, dims, home) == TRV_OK);
    CHECK(trv_context_plan(c, 0) == TRV_OK);
    float* x = (float*)(void*)trv_session_input(s, 0)->data;
    for (int64_t i = 0; i < 3 * n; i++) x[i] = (float)(i % 1000);
    CHECK(trv_context_run(c, 0) == TRV_OK);
    const trv_tensor* y = trv_session_output(s, 0);
    int wrong = y->dim[0] != n;
    for (int64_t i = 0; i < 3 * n; i++)
      wrong += ((const float*)(const void*)y->data)[i] != 3.0f * (float)(i % 1000);
    CHECK(wrong == 0);
    CHECK(trv_context_bytes(c) >= before && trv_context_bytes(c) >= (size_t)n * 24);
    before = trv_context_bytes(c);
  }
  CHECK(before < 100000 * 12 * 5);
  trv_context_close(c);
  trv_host_close(host);
  return failures;
}

static int test_errors(void) {
  int failures = 0;
  trv_host* host;
  trv_context* c;
  trv_diag d;
  const trv_span nothing = {NULL, 0};
  CHECK(trv_host_open(NULL, NULL, 0, 1, &host, &d) == TRV_ARGUMENT && host == NULL);
  CHECK(trv_host_open("/", NULL, 0, 1, &host, &d) == TRV_DEVICE);
  CHECK(trv_host_open("no such file", NULL, 0, 1, &host, NULL) == TRV_DEVICE);
  CHECK(trv_host_open_span(nothing, nothing, 0, 1, &host, &d) == TRV_ARGUMENT);
  CHECK(trv_host_open_span(nothing, nothing, 0, 1, NULL, &d) == TRV_ARGUMENT);
  CHECK(trv_context_open(NULL, 0, &c, &d) == TRV_ARGUMENT && c == NULL);
  loaded l = load(folder, "cpu_static.trv");
  CHECK(trv_host_open_span(span_of(&l), nothing, 0, 1, &host, &d) == TRV_OK);
  CHECK(trv_context_open(host, 0, &c, &d) == TRV_OK && trv_context_run(c, 0) == TRV_OK);
  trv_context_close(c);
  trv_host_close(host);
  /* deferred: the first context finds the damage */
  trv_program p;
  CHECK(trv_program_open(&p, span_of(&l), 0) == TRV_OK);
  l.data[p.segments[0].offset] ^= 1;
  CHECK(trv_host_open_span(span_of(&l), nothing, 0, 1, &host, &d) == TRV_FORMAT);
  CHECK(trv_host_open_span(span_of(&l), nothing, TRV_OPEN_DEFER_CRC, 1, &host, &d) == TRV_OK);
  CHECK(trv_context_open(host, 0, &c, &d) == TRV_FORMAT &&
        trv_context_open(host, 0, &c, &d) == TRV_FORMAT);
  trv_host_close(host);
  free(l.memory);
  return failures;
}

/* A thousand rounds: nothing may be left behind (LeakSanitizer), nothing may differ. */
static int test_rounds(void) {
  int failures = 0;
  trv_diag d;
  float first[2] = {0, 0};
  for (int i = 0; i < 1000; i++) {
    trv_context* c;
    trv_host* host = open_host("cpu_state.trv", 0, i % 100 ? 1 : 3);
    CHECK(trv_context_open(host, 0, &c, &d) == TRV_OK);
    float x[2] = {0.1f, 0.7f};
    CHECK(trv_session_bind_input(trv_context_session(c, 0), 0, TRV_DTYPE_F32, 1, NULL,
                                 buf_of(x, 8)) == TRV_OK);
    CHECK(trv_context_run(c, 0) == TRV_OK);
    const uint8_t* y = trv_session_output(trv_context_session(c, 0), 0)->data;
    if (i == 0) memcpy(first, y, 8);
    CHECK(memcmp(first, y, 8) == 0);
    trv_context_close(c);
    trv_host_close(host);
  }
  return failures;
}

static int test_null(void) {
  int failures = 0;
  rig r;
  trv_diag d;
  trv_event done;
  static _Alignas(16) uint8_t memory[64];
  CHECK(trv_null_driver.device_bytes <= sizeof(memory));
  CHECK(rig_open(&r, folder, "null.trv", 0, 0) == TRV_OK);
  CHECK(rig_init(&r, &d) == TRV_UNSUPPORTED); /* the toy is not its delegate */
  r.on.driver = &trv_null_driver;
  CHECK(trv_null_driver.open(memory, NULL, &r.on.device) == TRV_OK);
  CHECK(rig_init(&r, &d) == TRV_OK);
  CHECK(trv_session_submit(r.session, &done) == TRV_OK && done.session == NULL &&
        trv_event_wait(&done, 0) == TRV_OK);
  CHECK(trv_session_run(r.session) == TRV_OK);
  trv_session_deinit(r.session);
  r.session = NULL;
  trv_null_driver.close(r.on.device);
  rig_close(&r);
  return failures;
}

int main(int argc, char** argv) {
  folder = argc > 1 ? argv[1] : ".";
  const int failures = test_state() + test_growth() + test_errors() + test_rounds() + test_null();
  printf("%s\n", failures ? "FAILED" : "ok");
  return failures != 0;
}
