/* host_record.c - hooks that write down when each command ran, for profiles. */
#if !defined(_WIN32)
#define _POSIX_C_SOURCE 200809L
#endif
#include <string.h>
#include <time.h>

#include "trivet/trivet.h"

static uint64_t now_ns(void) {
  struct timespec t;
#if defined(_WIN32)
  timespec_get(&t, TIME_UTC);
#else
  clock_gettime(CLOCK_MONOTONIC, &t);
#endif
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static trv_record* record_at(const trv_recorder* r) {
  return r->count < r->capacity ? &r->records[r->count] : NULL;
}

static void on_work(void* self, const trv_work* work) {
  trv_record* at = record_at(self);
  if (!at) return;
  at->kernel = work->kernel;
  at->isa = work->isa;
  at->tiles = work->tiles;
}

static void on_begin(void* self, uint32_t time) {
  trv_record* at = record_at(self);
  if (!at) return;
  at->time = time;
  at->begin_ns = now_ns();
}

static void on_end(void* self, uint32_t time) {
  trv_recorder* r = self;
  trv_record* at = record_at(r);
  if (at && at->time == time) at->end_ns = now_ns();
  r->count++;
}

void trv_recorder_init(trv_recorder* out_rec, trv_record* records, uint32_t capacity) {
  memset(out_rec, 0, sizeof(*out_rec));
  memset(records, 0, capacity * sizeof(*records));
  for (uint32_t i = 0; i < capacity; i++) records[i].kernel = "";
  out_rec->records = records;
  out_rec->capacity = capacity;
  out_rec->hooks = (trv_hooks){sizeof(trv_hooks), on_begin, on_end, out_rec, on_work};
}
