/* test_poison.c - with malloc poisoned, a program opens, is measured, built, bound, run and reset.
 * Argument: a folder. */
#include <unistd.h>

#include "check.h"

static int poisoned;

static void poison_hit(void) {
  static const char text[] = "malloc was called\n";
  (void)!write(2, text, sizeof(text) - 1);
  _exit(9);
}

extern void* __libc_malloc(size_t size);
extern void* __libc_calloc(size_t count, size_t size);
extern void* __libc_realloc(void* p, size_t size);
extern void __libc_free(void* p);

void* malloc(size_t size) {
  if (poisoned) poison_hit();
  return __libc_malloc(size);
}
void* calloc(size_t count, size_t size) {
  if (poisoned) poison_hit();
  return __libc_calloc(count, size);
}
void* realloc(void* p, size_t size) {
  if (poisoned) poison_hit();
  return __libc_realloc(p, size);
}
void free(void* p) {
  if (poisoned) poison_hit();
  __libc_free(p);
}

static _Alignas(64) uint8_t session_memory[1 << 16], arena[1 << 16], state[64], device_memory[4096];

static int run(trv_span file, uint32_t flags) {
  int failures = 0;
  trv_program p;
  trv_diag d;
  trv_session* s;
  trv_region region;
  trv_buf regions[16];
  trv_bound_device on = {&trv_cpu_driver, NULL};
  float x[8 * 3];
  const int64_t dims[2] = {8, 3};
  size_t bytes;
  memset(regions, 0, sizeof(regions));
  CHECK(trv_cpu_driver.device_bytes <= sizeof(device_memory));
  CHECK(trv_cpu_driver.open(device_memory, NULL, &on.device) == TRV_OK);
  CHECK(trv_program_open(&p, file, 0) == TRV_OK);
  for (uint32_t i = 0; trv_program_region(&p, 0, i, &region) == TRV_OK; i++) {
    if (region.kind == TRV_REGION_KIND_ARENA) regions[i] = buf_of(arena, sizeof(arena));
    if (region.kind == TRV_REGION_KIND_STATE) regions[i] = buf_of(state, sizeof(state));
  }
  trv_session_desc desc = {.size = sizeof(desc),
                           .program = &p,
                           .devices = &on,
                           .device_count = 1,
                           .flags = flags,
                           .regions = regions};
  CHECK(trv_session_bytes(&desc, &bytes, &d) == TRV_OK && bytes <= sizeof(session_memory));
  CHECK(trv_session_init(&desc, session_memory, bytes, &s, &d) == TRV_OK);
  if (flags) {
    CHECK(trv_session_bind_input(s, 0, TRV_DTYPE_F32, 2, dims, buf_of(x, sizeof(x))) == TRV_OK);
    CHECK(trv_session_bind_input(s, 1, TRV_DTYPE_F32, 1, dims, buf_of(x, sizeof(x))) == TRV_OK);
  }
  CHECK(trv_session_run(s) == TRV_OK);
  CHECK(trv_session_reset(s) == TRV_OK);
  trv_session_deinit(s);
  trv_cpu_driver.close(on.device);
  return failures;
}

int main(int argc, char** argv) {
  static const char* const names[] = {"cpu_static.trv", "cpu_state.trv", "cpu_dynamic.trv"};
  int failures = 0;
  for (uint32_t i = 0; i < 3; i++) {
    const loaded file = load(argc > 1 ? argv[1] : ".", names[i]);
    poisoned = 1;
    failures += run(span_of(&file), i == 2 ? TRV_SESSION_REPLAN : 0);
    poisoned = 0;
  }
  printf("%s\n", failures ? "FAILED" : "ok");
  return failures != 0;
}
