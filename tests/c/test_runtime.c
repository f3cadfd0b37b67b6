/* test_runtime.c - the runtime core with the toy driver. Argument: the folder that programs.py
 * filled. */
#include "check.h"

uint32_t trvi_crc32c(uint32_t crc, const void* data, size_t size);

static const char* folder;

static int test_static(void) {
  int failures = 0;
  rig r;
  trv_diag d;
  trv_entry e;
  trv_slot slot;
  CHECK(rig_open(&r, folder, "static.trv", 0, 0) == TRV_OK);
  CHECK(trv_program_entry(&r.program, 0, &e) == TRV_OK && strcmp(e.name, "forward") == 0 &&
        e.input_count == 2);
  CHECK(trv_program_find(&r.program, "forward", &e) == TRV_OK && e.index == 0);
  CHECK(trv_program_find(&r.program, "backward", &e) == TRV_ARGUMENT);
  CHECK(trv_program_input(&r.program, 0, 1, &slot) == TRV_OK && slot.rank == 1 && slot.dim[0] == 4);
  CHECK(trv_program_output(&r.program, 0, 1, &slot) == TRV_ARGUMENT);
  CHECK(strcmp(trv_program_debug(&r.program, 0, 1, 1), "net.second") == 0);
  CHECK(strcmp(trv_program_debug(&r.program, 0, 9, 1), "") == 0);
  CHECK(rig_init(&r, &d) == TRV_OK);

  /* planned places */
  float* x0 = (float*)(void*)trv_session_input(r.session, 0)->data;
  float* x1 = (float*)(void*)trv_session_input(r.session, 1)->data;
  for (int i = 0; i < 4; i++) x0[i] = (float)i, x1[i] = 100.0f;
  CHECK(trv_session_run(r.session) == TRV_OK);
  const float* y = (const float*)(const void*)trv_session_output(r.session, 0)->data;
  for (int i = 0; i < 4; i++) CHECK(y[i] == 100.0f + 2.0f * (float)i);

  /* the caller's buffers */
  float a[4] = {1, 1, 1, 1}, b[4] = {2, 2, 2, 2}, out[4];
  const uint32_t epoch = 0;
  (void)epoch;
  CHECK(trv_session_bind_input(r.session, 0, TRV_DTYPE_F32, 1, NULL, buf_of(a, 16)) == TRV_OK);
  CHECK(trv_session_bind_input(r.session, 1, TRV_DTYPE_F32, 1, NULL, buf_of(b, 16)) == TRV_OK);
  CHECK(trv_session_bind_output(r.session, 0, buf_of(out, 16)) == TRV_OK);
  CHECK(trv_session_run(r.session) == TRV_OK);
  for (int i = 0; i < 4; i++) CHECK(out[i] == 3.0f + (float)i);
  CHECK(trv_session_output(r.session, 0)->data == (uint8_t*)out);

  /* back to the arena */
  CHECK(trv_session_bind_output(r.session, 0, buf_of(NULL, 0)) == TRV_OK);
  memset(out, 0, sizeof(out));
  CHECK(trv_session_run(r.session) == TRV_OK);
  y = (const float*)(const void*)trv_session_output(r.session, 0)->data;
  for (int i = 0; i < 4; i++) CHECK(y[i] == 3.0f + (float)i && out[i] == 0);

  /* errors name what was wrong, and the session goes on afterwards */
  const int64_t five = 5;
  const trv_diag* g = trv_session_diag(r.session);
  CHECK(trv_session_bind_input(r.session, 2, TRV_DTYPE_F32, 1, NULL, buf_of(a, 16)) ==
        TRV_ARGUMENT);
  CHECK(g->expected == 1 && g->got == 2);
  CHECK(trv_session_bind_input(r.session, 0, TRV_DTYPE_F64, 1, NULL, buf_of(a, 16)) ==
        TRV_ARGUMENT);
  CHECK(g->expected == TRV_DTYPE_F32 && g->got == TRV_DTYPE_F64 && g->value == 0);
  CHECK(trv_session_bind_input(r.session, 0, TRV_DTYPE_F32, 2, NULL, buf_of(a, 16)) ==
        TRV_ARGUMENT);
  CHECK(g->expected == 1 && g->got == 2);
  CHECK(trv_session_bind_input(r.session, 0, TRV_DTYPE_F32, 1, &five, buf_of(a, 20)) ==
        TRV_ARGUMENT);
  CHECK(g->axis == 0 && g->expected == 4 && g->limit == 4 && g->got == 5);
  CHECK(trv_session_bind_input(r.session, 0, TRV_DTYPE_F32, 1, NULL, buf_of(a, 12)) == TRV_MEMORY);
  CHECK(g->expected == 16 && g->got == 12);
  CHECK(trv_session_bind_input(r.session, 0, TRV_DTYPE_F32, 1, NULL, buf_of((uint8_t*)a + 1, 16)) ==
        TRV_ARGUMENT);
  CHECK(trv_session_bind_output(r.session, 0, buf_of(out, 15)) == TRV_MEMORY);
  CHECK(trv_session_bind_output(r.session, 1, buf_of(out, 16)) == TRV_ARGUMENT);
  CHECK(trv_session_bind_region(r.session, 99, buf_of(out, 16)) == TRV_ARGUMENT);
  CHECK(trv_session_input(r.session, 2) == NULL && trv_session_output(r.session, 1) == NULL);
  CHECK(trv_session_run(r.session) == TRV_OK);
  CHECK(g->status == TRV_OK);

  trv_session_deinit(r.session);
  r.session = NULL;
  CHECK(r.device.opened == 0);
  rig_close(&r);
  return failures;
}

/* Bit by bit, against the instruction and its three stretches. */
static int test_crc(void) {
  int failures = 0;
  static uint8_t bytes[250000];
  static const size_t sizes[] = {0, 1, 7, 8, 9, 4099, 98303, 98304, 98311, 249990};
  uint32_t seed = 1;
  for (size_t i = 0; i < sizeof(bytes); i++)
    bytes[i] = (uint8_t)((seed = seed * 1664525u + 1013904223u) >> 24);
  for (size_t k = 0; k < sizeof(sizes) / sizeof(*sizes); k++) {
    const uint8_t* p = bytes + k;
    uint32_t crc = ~(uint32_t)k;
    for (size_t i = 0; i < sizes[k]; i++) {
      crc ^= p[i];
      for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0x82F63B78u : 0);
    }
    CHECK(trvi_crc32c((uint32_t)k, p, sizes[k]) == ~crc);
  }
  return failures;
}

static int test_desc(void) {
  int failures = 0;
  rig r;
  trv_diag d;
  size_t bytes = 0;
  trv_session* s;
  CHECK(rig_open(&r, folder, "static.trv", 0, 0) == TRV_OK);
  CHECK(trv_session_bytes(&r.desc, &bytes, NULL) == TRV_OK && bytes > 0);
  trv_session_desc desc = r.desc;
  desc.size = 3;
  CHECK(trv_session_bytes(&desc, &bytes, &d) == TRV_ARGUMENT);
  desc = r.desc;
  desc.entry = 5;
  CHECK(trv_session_bytes(&desc, &bytes, &d) == TRV_ARGUMENT && d.got == 5);
  desc = r.desc;
  desc.device_count = 0;
  CHECK(trv_session_bytes(&desc, &bytes, &d) == TRV_UNSUPPORTED && d.step == 0);
  desc = r.desc;
  trv_driver old = toy_driver;
  old.abi = 99;
  const trv_bound_device on = {&old, &r.device};
  desc.devices = &on;
  CHECK(trv_session_bytes(&desc, &bytes, &d) == TRV_VERSION && d.got == 99);
  CHECK(trv_session_bytes(NULL, &bytes, &d) == TRV_ARGUMENT);
  CHECK(trv_session_bytes(&r.desc, NULL, &d) == TRV_ARGUMENT);

  CHECK(trv_session_bytes(&r.desc, &bytes, NULL) == TRV_OK);
  trv_buf mem = new_buf(bytes + 16, 16);
  CHECK(trv_session_init(&r.desc, mem.host, bytes - 1, &s, &d) == TRV_MEMORY);
  CHECK(d.expected == (int64_t)bytes && d.got == (int64_t)bytes - 1 && s == NULL);
  CHECK(trv_session_init(&r.desc, mem.host + 1, bytes, &s, &d) == TRV_ARGUMENT);
  CHECK(trv_session_init(&r.desc, NULL, bytes, &s, &d) == TRV_ARGUMENT);
  const size_t arena = r.regions[0].size;
  r.regions[0].size = arena - 1;
  CHECK(trv_session_init(&r.desc, mem.host, bytes, &s, &d) == TRV_MEMORY);
  CHECK(d.value == 0 && d.expected == (int64_t)arena && d.got == (int64_t)arena - 1);
  r.regions[0].size = arena;
  r.regions[0].host += 8;
  CHECK(trv_session_init(&r.desc, mem.host, bytes, &s, &d) == TRV_ARGUMENT);
  r.regions[0].host -= 8;
  r.desc.regions = NULL;
  CHECK(trv_session_init(&r.desc, mem.host, bytes, &s, &d) == TRV_MEMORY);
  r.desc.regions = r.regions;
  memset(mem.host + bytes, 0x5A, 16);
  CHECK(trv_session_init(&r.desc, mem.host, bytes, &s, &d) == TRV_OK);
  CHECK(trv_session_run(s) == TRV_OK);
  for (int i = 0; i < 16; i++) CHECK(mem.host[bytes + (size_t)i] == 0x5A);
  trv_session_deinit(s);
  trv_session_deinit(NULL);
  CHECK(r.device.opened == 0);
  free(mem.host);

  CHECK(trv_session_run(NULL) == TRV_ARGUMENT && trv_session_plan(NULL) == TRV_ARGUMENT);
  CHECK(trv_session_reset(NULL) == TRV_ARGUMENT && trv_session_input(NULL, 0) == NULL);
  CHECK(trv_session_diag(NULL)->status == TRV_ARGUMENT);
  rig_close(&r);
  return failures;
}

static int run_dynamic(rig* r, int64_t n) {
  int failures = 0;
  float x[60 * 3], u[60], y[60 * 3];
  const int64_t dims[2] = {n, 3};
  for (int i = 0; i < (int)n * 3; i++) x[i] = (float)i;
  CHECK(trv_session_bind_input(r->session, 0, TRV_DTYPE_F32, 2, dims, buf_of(x, (size_t)n * 12)) ==
        TRV_OK);
  CHECK(trv_session_bind_input(r->session, 1, TRV_DTYPE_F32, 1, dims, buf_of(u, (size_t)n * 4)) ==
        TRV_OK);
  trv_status st = trv_session_plan(r->session);
  while (st == TRV_MEMORY) { /* what a host does: a larger arena */
    const trv_diag* d = trv_session_diag(r->session);
    const uint32_t region = d->value;
    free(r->regions[region].host);
    r->regions[region] = new_buf((uint64_t)d->expected, 64);
    CHECK(trv_session_bind_region(r->session, region, r->regions[region]) == TRV_OK);
    st = trv_session_plan(r->session);
  }
  if (st) {
    char line[200];
    trv_diag_print(trv_session_diag(r->session), line, sizeof(line));
    printf("%s\n", line);
    return 1;
  }
  const trv_tensor* out = trv_session_output(r->session, 0);
  CHECK(out->dim[0] == n && out->dim[1] == 3);
  CHECK(trv_session_run(r->session) == TRV_OK);
  int wrong = 0;
  for (int i = 0; i < (int)n * 3; i++)
    wrong += ((const float*)(const void*)out->data)[i] != 3.0f * (float)i;
  CHECK(trv_session_bind_output(r->session, 0, buf_of(y, (size_t)n * 12)) == TRV_OK);
  CHECK(trv_session_run(r->session) == TRV_OK);
  for (int i = 0; i < (int)n * 3; i++) wrong += y[i] != 3.0f * (float)i;
  CHECK(wrong == 0);
  CHECK(trv_session_bind_output(r->session, 0, buf_of(y, (size_t)n * 12 - 1)) == TRV_OK);
  CHECK(trv_session_plan(r->session) == TRV_OK && trv_session_output(r->session, 0)->dim[0] == n);
  CHECK(trv_session_run(r->session) == TRV_ARGUMENT);
  CHECK(trv_session_diag(r->session)->value == 0 &&
        trv_session_diag(r->session)->expected == n * 12);
  CHECK(trv_session_bind_output(r->session, 0, buf_of(NULL, 0)) == TRV_OK);
  return failures;
}

static int test_dynamic(void) {
  int failures = 0;
  rig r;
  trv_diag d;
  char line[200];
  static const char* const files[] = {"dynamic.trv", "dynamic.trv", "unbounded.trv"};
  for (uint32_t k = 0; k < 3; k++) {
    const uint32_t flags = k ? TRV_SESSION_REPLAN : 0;
    CHECK(rig_open(&r, folder, files[k], 0, flags) == TRV_OK);
    CHECK(rig_init(&r, &d) == TRV_OK);
    CHECK(trv_session_run(r.session) == TRV_STATE && trv_session_diag(r.session)->value == 0);
    failures += run_dynamic(&r, 5);
    failures += run_dynamic(&r, 60);
    failures += run_dynamic(&r, 1);
    failures += run_dynamic(&r, 33);
    if (flags) CHECK(r.regions[0].size < 4000);

    const int64_t big[2] = {600, 3}, zero[2] = {0, 3}, four[2] = {4, 3};
    const trv_diag* g = trv_session_diag(r.session);
    if (k < 2) {
      CHECK(trv_session_bind_input(r.session, 0, TRV_DTYPE_F32, 2, big, buf_of(line, 1 << 20)) ==
            TRV_ARGUMENT);
      trv_diag_print(g, line, sizeof(line));
      CHECK(strstr(line, "number 0, axis 0: expected 1..512, got 600") != NULL);
    }
    CHECK(trv_session_bind_input(r.session, 0, TRV_DTYPE_F32, 2, zero, buf_of(line, 1 << 20)) ==
          TRV_ARGUMENT);
    CHECK(g->axis == 0 && g->got == 0);
    /* one symbol, two sizes: x has 33 rows, u 4 */
    static float u[4];
    CHECK(trv_session_bind_input(r.session, 1, TRV_DTYPE_F32, 1, four, buf_of(u, 16)) == TRV_OK);
    CHECK(trv_session_run(r.session) == TRV_ARGUMENT);
    CHECK(g->value == 1 && g->axis == 0 && g->expected == 33 && g->got == 4);
    failures += run_dynamic(&r, 2);
    rig_close(&r);
  }
  /* beyond the file's plan without leave to plan again */
  CHECK(rig_open(&r, folder, "unbounded.trv", 0, 0) == TRV_OK);
  CHECK(rig_init(&r, &d) == TRV_OK);
  const int64_t big[2] = {1000, 3};
  static float x[3000];
  CHECK(trv_session_bind_input(r.session, 0, TRV_DTYPE_F32, 2, big, buf_of(x, sizeof(x))) ==
        TRV_OK);
  CHECK(trv_session_bind_input(r.session, 1, TRV_DTYPE_F32, 1, big, buf_of(x, sizeof(x))) ==
        TRV_OK);
  CHECK(trv_session_run(r.session) == TRV_ARGUMENT);
  CHECK(strstr(trv_session_diag(r.session)->what, "TRV_SESSION_REPLAN") != NULL);
  /* more than any memory: refused at once where sizes have 32 bits, else when it is planned */
  const int64_t huge[2] = {(int64_t)1 << 40, 3};
  const trv_status wide = sizeof(size_t) > 4 ? TRV_OK : TRV_ARGUMENT;
  CHECK(trv_session_bind_input(r.session, 0, TRV_DTYPE_F32, 2, huge, buf_of(NULL, 0)) == wide);
  CHECK(trv_session_bind_input(r.session, 1, TRV_DTYPE_F32, 1, huge, buf_of(NULL, 0)) == wide);
  CHECK(trv_session_run(r.session) == TRV_ARGUMENT);
  rig_close(&r);
  return failures;
}

static int test_state(void) {
  int failures = 0;
  rig step, peek;
  trv_diag d;
  float x[2] = {1, 2}, y[2], z[2];
  CHECK(rig_open(&step, folder, "state.trv", 0, 0) == TRV_OK &&
        rig_open(&peek, folder, "state.trv", 1, 0) == TRV_OK);
  free(peek.regions[2].host);
  peek.regions[2] = step.regions[2]; /* the same id, so the same bytes */
  peek.desc.flags = TRV_SESSION_KEEP_STATE;
  CHECK(rig_init(&step, &d) == TRV_OK && rig_init(&peek, &d) == TRV_OK);
  CHECK(trv_session_bind_input(step.session, 0, TRV_DTYPE_F32, 1, NULL, buf_of(x, 8)) == TRV_OK);
  CHECK(trv_session_bind_output(step.session, 0, buf_of(y, 8)) == TRV_OK);
  CHECK(trv_session_bind_input(peek.session, 0, TRV_DTYPE_F32, 1, NULL, buf_of(x, 8)) == TRV_OK);
  CHECK(trv_session_bind_output(peek.session, 0, buf_of(z, 8)) == TRV_OK);
  CHECK(trv_session_run(step.session) == TRV_OK && trv_session_run(step.session) == TRV_OK);
  CHECK(y[0] == 12 && y[1] == 24);
  CHECK(trv_session_run(peek.session) == TRV_OK && z[0] == 12 && z[1] == 24);
  CHECK(trv_session_reset(step.session) == TRV_OK);
  CHECK(trv_session_run(peek.session) == TRV_OK && z[0] == 10 && z[1] == 20);
  peek.regions[2].host = NULL;
  rig_close(&step);
  rig_close(&peek);
  return failures;
}

static int test_loop(void) {
  int failures = 0;
  rig r;
  trv_diag d;
  int32_t x = 5, y = -1;
  for (int k = 0; k < 2; k++) {
    CHECK(rig_open(&r, folder, "loop.trv", 0, 0) == TRV_OK);
    if (k) r.on.driver = &toy_async_driver;
    r.desc.max_steps = 100;
    CHECK(rig_init(&r, &d) == TRV_OK);
    CHECK(trv_session_bind_input(r.session, 0, TRV_DTYPE_I32, 0, NULL, buf_of(&x, 4)) == TRV_OK);
    CHECK(trv_session_bind_output(r.session, 0, buf_of(&y, 4)) == TRV_OK);
    x = 5;
    CHECK(trv_session_run(r.session) == TRV_OK && y == 5);
    CHECK(r.device.runs == 11);
    CHECK(trv_session_run(r.session) == TRV_OK && y == 5 && r.device.runs == 12);
    x = 0;
    CHECK(trv_session_reset(r.session) == TRV_OK && trv_session_run(r.session) == TRV_OK && y == 0);
    x = 1 << 30;
    CHECK(trv_session_run(r.session) == TRV_STATE);
    CHECK(trv_session_diag(r.session)->expected == 100);
    rig_close(&r);
  }
  return failures;
}

static int test_data(void) {
  int failures = 0;
  rig r;
  trv_diag d;
  int32_t x = 7;
  uint8_t y[100];
  char line[200];
  for (uint32_t flags = 0; flags < 2; flags++) {
    CHECK(rig_open(&r, folder, "data.trv", 0, flags ? TRV_SESSION_REPLAN : 0) == TRV_OK);
    if (flags) r.regions[0] = new_buf(4096, 64);
    CHECK(rig_init(&r, &d) == TRV_OK);
    CHECK(trv_session_bind_input(r.session, 0, TRV_DTYPE_I32, 0, NULL, buf_of(&x, 4)) == TRV_OK);
    for (x = 7; x <= 100; x += 31) {
      CHECK(trv_session_run(r.session) == TRV_OK);
      const trv_tensor* out = trv_session_output(r.session, 0);
      CHECK(out->dim[0] == x);
      for (int i = 0; i < x; i++) CHECK(out->data[i] == 9);
    }
    x = 101;
    CHECK(trv_session_run(r.session) == TRV_ARGUMENT);
    CHECK(trv_session_diag(r.session)->got == 101 && trv_session_diag(r.session)->step == 0);
    x = 30;
    CHECK(trv_session_bind_output(r.session, 0, buf_of(y, 29)) == TRV_OK);
    CHECK(trv_session_run(r.session) == TRV_ARGUMENT);
    trv_diag_print(trv_session_diag(r.session), line, sizeof(line));
    if (trv_session_diag(r.session)->expected != 30) printf("%s\n", line);
    CHECK(trv_session_diag(r.session)->expected == 30 && trv_session_diag(r.session)->got == 29);
    CHECK(trv_session_bind_output(r.session, 0, buf_of(y, 100)) == TRV_OK);
    CHECK(trv_session_run(r.session) == TRV_OK && trv_session_output(r.session, 0)->dim[0] == 30);
    rig_close(&r);
  }
  return failures;
}

static int test_alternatives(void) {
  int failures = 0;
  rig r;
  trv_diag d;
  char line[200];
  float x[2] = {1, 2};
  CHECK(rig_open(&r, folder, "alternatives.trv", 0, 0) == TRV_OK);
  CHECK(rig_init(&r, &d) == TRV_OK);
  CHECK(trv_session_bind_input(r.session, 0, TRV_DTYPE_F32, 1, NULL, buf_of(x, 8)) == TRV_OK);
  CHECK(trv_session_run(r.session) == TRV_OK);
  CHECK(((const float*)(const void*)trv_session_output(r.session, 0)->data)[1] == 4);
  rig_close(&r);
  CHECK(rig_open(&r, folder, "alternatives.trv", 1, 0) == TRV_OK);
  CHECK(rig_init(&r, &d) == TRV_UNSUPPORTED && d.step == 0);
  trv_diag_print(&d, line, sizeof(line));
  CHECK(strstr(line, "unsupported: the toy wants toy.1, step 0") != NULL);
  rig_close(&r);
  CHECK(rig_open(&r, folder, "failing.trv", 0, 0) == TRV_OK);
  CHECK(rig_init(&r, &d) == TRV_OK);
  CHECK(trv_session_run(r.session) == TRV_DEVICE && trv_session_diag(r.session)->step == 1);
  CHECK(strcmp(trv_session_diag(r.session)->what, "the toy fails on demand") == 0);
  rig_close(&r);
  return failures;
}

static int test_async(void) {
  int failures = 0;
  rig r;
  trv_diag d;
  trv_event done;
  float x[16] = {1};
  CHECK(rig_open(&r, folder, "long.trv", 0, 0) == TRV_OK);
  r.on.driver = &toy_async_driver;
  CHECK(rig_init(&r, &d) == TRV_OK);
  CHECK(trv_session_bind_input(r.session, 0, TRV_DTYPE_F32, 1, NULL, buf_of(x, 64)) == TRV_OK);
  CHECK(trv_session_submit(r.session, &done) == TRV_OK && done.point == 1000);
  CHECK(trv_event_wait(&done, 0) == TRV_PENDING);
  CHECK(trv_event_wait(&done, 1000) == TRV_OK && trv_event_wait(&done, 0) == TRV_OK);
  CHECK(((const float*)(const void*)trv_session_output(r.session, 0)->data)[0] == 1001.0f);
  CHECK(trv_session_run(r.session) == TRV_OK && r.device.done == 2000);
  r.desc.devices = NULL;
  rig_close(&r);
  CHECK(rig_open(&r, folder, "static.trv", 0, 0) == TRV_OK && rig_init(&r, &d) == TRV_OK);
  CHECK(trv_session_submit(r.session, &done) == TRV_OK && trv_event_wait(&done, 0) == TRV_OK);
  rig_close(&r);
  return failures;
}

/* The file's bytes through a callback. */
static trv_status read_bytes(void* self, uint64_t offset, void* dst, size_t size) {
  const loaded* l = self;
  if (offset > l->size || size > l->size - offset) return TRV_DEVICE;
  memcpy(dst, l->data + offset, size);
  return TRV_OK;
}

static int test_reader(void) {
  int failures = 0;
  rig r;
  trv_diag d;
  float x[4] = {1, 1, 1, 1};
  CHECK(rig_open(&r, folder, "static.trv", 0, 0) == TRV_OK);
  loaded* file = &r.file;
  const trv_reader reader = {read_bytes, file, file->size};
  trv_buf head = new_buf(file->size, 16);
  trv_program p;
  CHECK(trv_program_open_reader(&p, &reader, head.host, 64, 0) == TRV_MEMORY &&
        p.diag.expected > 64);
  CHECK(trv_program_open_reader(&p, &reader, head.host, 512, 0) == TRV_MEMORY &&
        p.diag.expected > 512);
  const size_t need = (size_t)p.diag.expected;
  CHECK(trv_program_open_reader(&p, &reader, head.host, need - 1, 0) == TRV_MEMORY);
  CHECK(trv_program_open_reader(&p, NULL, head.host, need, 0) == TRV_ARGUMENT);
  CHECK(trv_program_open_reader(&p, &reader, head.host, need, 0) == TRV_OK);
  r.desc.program = &p;
  CHECK(rig_init(&r, &d) == TRV_MEMORY && d.expected == 16);
  free(r.memory);
  r.regions[3] = new_buf(16, 64);
  CHECK(rig_init(&r, &d) == TRV_OK);
  CHECK(trv_session_bind_input(r.session, 0, TRV_DTYPE_F32, 1, NULL, buf_of(x, 16)) == TRV_OK);
  CHECK(trv_session_bind_input(r.session, 1, TRV_DTYPE_F32, 1, NULL, buf_of(x, 16)) == TRV_OK);
  CHECK(trv_session_run(r.session) == TRV_OK);
  CHECK(((const float*)(const void*)trv_session_output(r.session, 0)->data)[3] == 5);
  trv_session_deinit(r.session);
  r.session = NULL;
  free(r.memory);
  CHECK(trv_program_check(&p) == TRV_OK);
  const size_t weights = (size_t)p.segments[0].offset;
  r.file.data[weights + 5] ^= 1;
  CHECK(trv_program_check(&p) == TRV_FORMAT);
  CHECK(trv_program_open_reader(&p, &reader, head.host, need, 0) == TRV_OK);
  CHECK(rig_init(&r, &d) == TRV_FORMAT);
  free(head.host);
  rig_close(&r);
  return failures;
}

static int test_damage(void) {
  int failures = 0;
  trv_program p;
  loaded l = load(folder, "static.trv");
  CHECK(trv_program_open(NULL, span_of(&l), 0) == TRV_ARGUMENT);
  trv_span s = {NULL, 100};
  CHECK(trv_program_open(&p, s, 0) == TRV_ARGUMENT);
  s.data = l.data + 4;
  CHECK(trv_program_open(&p, s, 0) == TRV_ARGUMENT && p.diag.expected == 16);
  s = span_of(&l);
  uint32_t named = 0;
  for (s.size = 0; s.size < l.size; s.size++) { /* every truncation, each in memory of that size */
    loaded cut = {NULL, NULL, s.size};
    if (posix_memalign((void**)&cut.memory, 64, s.size + 1)) exit(1);
    uint8_t* end = realloc(cut.memory, s.size ? s.size : 1);
    if (((uintptr_t)end & 15) == 0) {
      memcpy(end, l.data, s.size);
      const trv_span t = {end, s.size};
      CHECK(trv_program_open(&p, t, 0) == TRV_FORMAT);
      CHECK(p.diag.what != NULL && p.entry_count == 0);
      named += p.diag.what && strstr(p.diag.what, "truncated") != NULL;
    }
    free(end);
  }
  CHECK(named > l.size / 2);
  for (size_t i = 0; i < l.size;
       i++) { /* every bit of every byte that counts is covered by a CRC */
    l.data[i] ^= (uint8_t)(1 << (i % 8));
    const trv_status st = trv_program_open(&p, span_of(&l), 0);
    const int padding = st == TRV_OK;
    if (padding) {
      int inside = i < (size_t)((const trvf_segment*)p.segments)[0].offset && i < 1000;
      for (uint32_t k = 0; k < p.segment_count; k++)
        inside |= i >= p.segments[k].offset && i < p.segments[k].offset + p.segments[k].size;
      CHECK(!inside || i >= 900);
    }
    l.data[i] ^= (uint8_t)(1 << (i % 8));
  }
  l.data[7] = '2';
  CHECK(trv_program_open(&p, span_of(&l), 0) == TRV_VERSION && p.diag.expected == 1 &&
        p.diag.got == 2);
  l.data[7] = '1';
  l.data[5] = 'x';
  CHECK(trv_program_open(&p, span_of(&l), 0) == TRV_FORMAT &&
        strstr(p.diag.what, "not a trivet program") != NULL);
  l.data[5] = 'R';
  CHECK(trv_program_open(&p, span_of(&l), 0) == TRV_OK);

  /* deferred: open is glad, check and session are not */
  l.data[p.segments[0].offset] ^= 1;
  CHECK(trv_program_open(&p, span_of(&l), 0) == TRV_FORMAT && p.diag.value == 0);
  CHECK(trv_program_open(&p, span_of(&l), TRV_OPEN_DEFER_CRC) == TRV_OK);
  rig r;
  trv_diag d;
  CHECK(rig_open(&r, folder, "static.trv", 0, 0) == TRV_OK);
  r.desc.program = &p;
  CHECK(rig_init(&r, &d) == TRV_FORMAT && d.expected != d.got);
  CHECK(trv_program_check(&p) == TRV_FORMAT);
  CHECK(trv_program_open(&p, span_of(&l), TRV_OPEN_NO_CRC) == TRV_OK);
  free(r.memory);
  CHECK(rig_init(&r, &d) == TRV_OK);
  rig_close(&r);
  free(l.memory);
  return failures;
}

static int test_external(void) {
  int failures = 0;
  rig r;
  trv_diag d;
  loaded w = load(folder, "external.bin");
  float x[4] = {1, 1, 1, 1};
  CHECK(rig_open(&r, folder, "static.trv", 0, 0) == TRV_OK);
  CHECK(trv_program_attach(&r.program, span_of(&w), 0) == TRV_STATE);
  rig_close(&r);
  CHECK(rig_open(&r, folder, "external.trv", 0, 0) == TRV_OK);
  CHECK(rig_init(&r, &d) == TRV_STATE && strstr(d.what, "not attached") != NULL);
  free(r.memory);
  trv_span s = span_of(&w);
  s.size--;
  CHECK(trv_program_attach(&r.program, s, 0) == TRV_FORMAT && r.program.diag.got == 15);
  w.data[3] ^= 4;
  CHECK(trv_program_attach(&r.program, span_of(&w), 0) == TRV_FORMAT);
  CHECK(trv_program_attach(&r.program, span_of(&w), TRV_OPEN_DEFER_CRC) == TRV_OK);
  CHECK(rig_init(&r, &d) == TRV_FORMAT);
  free(r.memory);
  w.data[3] ^= 4;
  CHECK(trv_program_attach(&r.program, span_of(&w), 0) == TRV_OK);
  CHECK(rig_init(&r, &d) == TRV_OK);
  CHECK(trv_session_bind_input(r.session, 0, TRV_DTYPE_F32, 1, NULL, buf_of(x, 16)) == TRV_OK);
  CHECK(trv_session_bind_input(r.session, 1, TRV_DTYPE_F32, 1, NULL, buf_of(x, 16)) == TRV_OK);
  CHECK(trv_session_run(r.session) == TRV_OK);
  CHECK(((const float*)(const void*)trv_session_output(r.session, 0)->data)[3] == 5);
  rig_close(&r);
  free(w.memory);
  return failures;
}

/* Packed again: no two storages that live together share a byte, and the arena is as small as can
 * be. */
static int test_replan(void) {
  int failures = 0;
  rig r;
  trv_diag d;
  float x[16] = {1};
  CHECK(rig_open(&r, folder, "long.trv", 0, TRV_SESSION_REPLAN) == TRV_OK);
  CHECK(rig_init(&r, &d) == TRV_OK);
  CHECK(trv_session_bind_input(r.session, 0, TRV_DTYPE_F32, 1, NULL, buf_of(x, 64)) == TRV_OK);
  CHECK(trv_session_plan(r.session) == TRV_MEMORY);
  const int64_t need = trv_session_diag(r.session)->expected;
  CHECK(need == 64 * 5); /* three live at any time, the input's place and the output's */
  r.regions[0] = new_buf((uint64_t)need, 64);
  CHECK(trv_session_bind_region(r.session, 0, r.regions[0]) == TRV_OK);
  CHECK(trv_session_run(r.session) == TRV_OK);
  CHECK(((const float*)(const void*)trv_session_output(r.session, 0)->data)[0] == 1001.0f);
  const trv_view* v = trv_session_view(r.session);
  uint32_t overlaps = 0;
  for (uint32_t i = 0; i < v->storage_count; i++) {
    for (uint32_t j = 0; j < i; j++) {
      const trvf_storage *a = &v->storages[i], *b = &v->storages[j];
      const uint8_t* at = v->regions[a->region].host +
                          *(const uint64_t*)(const void*)(v->offsets + i * v->offset_stride);
      const uint8_t* bt = v->regions[b->region].host +
                          *(const uint64_t*)(const void*)(v->offsets + j * v->offset_stride);
      if (a->first > b->last || b->first > a->last) continue;
      overlaps += at < bt + b->size && bt < at + a->size;
    }
  }
  CHECK(overlaps == 0);
  rig_close(&r);
  return failures;
}

static int test_print(void) {
  int failures = 0;
  char line[16];
  trv_diag d = {TRV_MEMORY, TRV_NONE, TRV_NONE, 3, TRV_NONE, "small", INT64_MAX, 0, INT64_MIN};
  const size_t length = trv_diag_print(&d, NULL, 0);
  CHECK(length ==
        strlen("memory: small, number 3: expected 9223372036854775807, got -9223372036854775808"));
  CHECK(trv_diag_print(&d, line, sizeof(line)) == length && strcmp(line, "memory: small, ") == 0);
  CHECK(strcmp(trv_status_text(TRV_STATE), "state") == 0 &&
        strcmp(trv_status_text(-8), "unknown") == 0);
  CHECK(strcmp(trv_status_text(TRV_PENDING), "pending") == 0 &&
        strcmp(trv_status_text(TRV_ARGUMENT), "argument") == 0);
  CHECK(trv_diag_print(NULL, line, sizeof(line)) > 0);
  return failures;
}

int main(int argc, char** argv) {
  static const struct {
    const char* name;
    int (*run)(void);
  } tests[] = {{"static", test_static},
               {"desc", test_desc},
               {"dynamic", test_dynamic},
               {"state", test_state},
               {"loop", test_loop},
               {"data", test_data},
               {"alternatives", test_alternatives},
               {"async", test_async},
               {"reader", test_reader},
               {"damage", test_damage},
               {"external", test_external},
               {"replan", test_replan},
               {"print", test_print},
               {"crc", test_crc}};
  int failed = 0;
  folder = argc > 1 ? argv[1] : ".";
  for (size_t i = 0; i < sizeof(tests) / sizeof(*tests); i++) {
    if (argc > 2 && strcmp(argv[2], tests[i].name) != 0) continue;
    const int n = tests[i].run();
    printf("%s %s\n", n ? "FAILED" : "ok", tests[i].name);
    failed += n != 0;
  }
  return failed != 0;
}
