/* main.c - a deployed program: opens it, then does what a host asks for on the serial line
 * (README.md). Keep what you need of it: without serve() it is an application's skeleton. */
#include "model.h"
#include "serve.h"

static trv_program program;
static trv_session* sessions[MODEL_ENTRIES];
static _Alignas(16) uint8_t device_memory[16];
static trv_bound_device device = {&trv_cpu_driver, NULL};

/* Everything is proved here; a run cannot fail but for the data (an index out of range). */
static trv_status open_model(trv_diag* diag) {
  const trv_span file = {MODEL_PROGRAM, MODEL_PROGRAM_BYTES};
  trv_status st = trv_program_open(&program, file, MODEL_OPEN);
  if (st) *diag = program.diag;
  if (!st) st = trv_cpu_driver.open(device_memory, NULL, &device.device);
  for (uint32_t i = 0; !st && i < MODEL_ENTRIES; i++) {
    const model_entry* e = &model_entries[i];
    const trv_session_desc desc = {.size = sizeof desc,
                                   .entry = i,
                                   .program = &program,
                                   .devices = &device,
                                   .device_count = 1,
                                   .flags = i ? TRV_SESSION_KEEP_STATE : 0,
                                   .regions = e->regions};
    st = trv_session_init(&desc, e->session, e->session_bytes, &sessions[i], diag);
  }
  return st;
}

int main(void) {
  trv_diag diag = {0};
  port_start();
  const uint64_t begin = port_ticks();
  const trv_status st = open_model(&diag);
  const uint64_t start = port_ticks() - begin;
  return serve(&program, sessions, st, &diag, start);
}
