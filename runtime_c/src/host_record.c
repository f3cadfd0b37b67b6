/* host_record.c - hooks that write down when each command ran, for profiles. Commands tell the CPU
 * driver's begin and end; what a device does as one piece is known by its turns. */
#include <string.h>

#include "host_os.h"
#include "trivet/trivet.h"

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
  trv_recorder* r = self;
  trv_record* at = record_at(r);
  if (!at) return;
  at->time = time;
  at->track = r->track;
  at->point = 0;
  at->begin_ns = trvi_now_ns();
}

static void on_end(void* self, uint32_t time) {
  trv_recorder* r = self;
  trv_record* at = record_at(r);
  if (at && at->time == time) at->end_ns = trvi_now_ns();
  r->count++;
}

static void add(trv_recorder* r, const trv_turn* turn, uint64_t end_ns) {
  trv_record* at = record_at(r);
  if (at) {
    memset(at, 0, sizeof(*at));
    at->begin_ns = r->began_ns;
    at->end_ns = end_ns;
    at->kernel = "";
    at->time = turn->time;
    at->tiles = 1;
    at->track = turn->index;
    at->point = end_ns ? 0 : turn->point;
  }
  r->count++;
}

/* Everything of a device up to the point is over. It works in order, so a piece began when the one
 * before it ended, or when it was given. */
static void finish(const trv_recorder* r, const trv_turn* turn) {
  const uint64_t now = trvi_now_ns();
  uint64_t before = 0;
  const uint32_t n = r->count < r->capacity ? r->count : r->capacity;
  for (uint32_t i = 0; i < n; i++) {
    trv_record* at = &r->records[i];
    if (at->track != turn->index || !at->point || at->point > turn->point) continue;
    if (!at->end_ns) {
      uint64_t end = 0;
      const int told =
          turn->driver->stamp && turn->driver->stamp(turn->device, at->point, &end) == TRV_OK;
      at->end_ns = told ? end : now;
      if (at->begin_ns < before) at->begin_ns = before;
      if (at->end_ns < at->begin_ns) at->begin_ns = at->end_ns;
    }
    before = at->end_ns;
  }
}

static void on_turn(void* self, const trv_turn* turn) {
  trv_recorder* r = self;
  if (turn->state == TRV_TURN_DONE && turn->time == TRV_NONE) {
    finish(r, turn);
  } else if (turn->time == TRV_NONE) {
    return; /* a copy beside the run */
  } else if (turn->state == TRV_TURN_BEGIN) {
    r->track = turn->index;
    r->mark = r->count;
    r->began_ns = trvi_now_ns();
  } else if (turn->state == TRV_TURN_GIVEN) {
    add(r, turn, 0);
  } else if (r->mark == r->count) { /* done at once, and told nothing of its commands */
    add(r, turn, trvi_now_ns());
  }
}

void trv_recorder_init(trv_recorder* out_rec, trv_record* records, uint32_t capacity) {
  memset(out_rec, 0, sizeof(*out_rec));
  memset(records, 0, capacity * sizeof(*records));
  for (uint32_t i = 0; i < capacity; i++) records[i].kernel = "";
  out_rec->records = records;
  out_rec->capacity = capacity;
  out_rec->hooks = (trv_hooks){sizeof(trv_hooks), on_begin, on_end, out_rec, on_work, on_turn};
}
