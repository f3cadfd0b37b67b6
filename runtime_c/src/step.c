/* step.c - runs a session: the list of steps, their order between devices, events. */
#include "private.h"

/* What is under way: the last device that was given work, and its point. */
typedef struct flight {
  const trv_bound_device* on;
  uint64_t point;
} flight;

static int asynchronous(const trv_bound_device* on) { return on && on->driver->wait; }

static trv_status device_failed(trv_session* s, const trv_bound_device* on, trv_status st,
                                uint32_t step) {
  trv_diag* d = &s->diag;
  if (!d->what) {
    trvi_fail(d, TRVI_DEVICE);
    if (on->driver->last_error) d->got = on->driver->last_error(on->device, &d->what);
  }
  if (d->time == TRV_NONE) d->time = s->plan.steps[step].time;
  d->step = step;
  d->status = st < 0 ? st : TRV_DEVICE;
  return d->status;
}

/* Waits on the host until all work given so far is done. */
static trv_status settle(trv_session* s, flight* f, uint32_t step) {
  if (!asynchronous(f->on)) return TRV_OK;
  const trv_status st = f->on->driver->wait(f->on->device, f->point, UINT64_MAX);
  const trv_bound_device* on = f->on;
  f->on = NULL;
  return st ? device_failed(s, on, st, step) : TRV_OK;
}

/* Work for `on` comes next: it must follow what another device is doing. */
static trv_status follow(trv_session* s, flight* f, const trv_bound_device* on, uint32_t step) {
  if (!asynchronous(f->on) || f->on->device == on->device) return TRV_OK;
  if (!on->driver->join || on->driver != f->on->driver) return settle(s, f, step);
  const trv_status st = on->driver->join(on->device, f->on->device, f->point);
  return st == TRV_UNSUPPORTED ? settle(s, f, step) : st ? device_failed(s, on, st, step) : TRV_OK;
}

/* Sizes that a part has written: derived rows, extents, outputs. */
static trv_status data_sizes(trv_session* s) {
  const size_t bytes = s->plan.dim_count * sizeof(*s->dims);
  if (memcmp(s->seen, s->dims, bytes) == 0) return TRV_OK;
  trv_status too_short = TRV_OK, st = trvi_dims_evaluate(s, 0);
  if (!st) st = trvi_extents_check(s, &too_short);
  if (!st) st = too_short;
  if (st) return st;
  memcpy(s->seen, s->dims, bytes);
  trvi_tensors_refresh(s);
  s->run.epoch++;
  s->run.shape_epoch++;
  return TRV_OK;
}

static trv_status run_step(trv_session* s, flight* f, uint32_t step) {
  const trvi_step* t = &s->steps[step];
  uint64_t point = 0;
  trv_status st = follow(s, f, t->on, step);
  if (st) return st;
  st = t->on->driver->run(t->on->device, t->part, &s->run, &point);
  if (st) return device_failed(s, t->on, st, step);
  f->on = t->on;
  f->point = point;
  if (!s->seen) return TRV_OK;
  st = settle(s, f, step);
  if (!st) st = data_sizes(s);
  if (st) {
    s->diag.step = step;
    s->dirty |= TRVI_DIRTY_SHAPES; /* the table holds sizes that were refused */
  }
  return st;
}

static trv_status copy_step(trv_session* s, flight* f, uint32_t step) {
  const trvf_step* t = &s->plan.steps[step];
  trv_tensor from, to;
  trv_dim count = 0, room = 0;
  trv_status st = settle(s, f, step);
  if (st) return st;
  if (s->run.hooks && s->run.hooks->begin) s->run.hooks->begin(s->run.hooks->self, t->time);
  trvi_tensor(s, t->a, &from);
  trvi_tensor(s, t->b, &to);
  const uint32_t source = s->plan.storages[s->plan.values[t->a].storage].region;
  const uint32_t target = s->plan.storages[s->plan.values[t->b].storage].region;
  int same = s->regions[source].host && s->regions[target].host;
  for (uint32_t i = 0; i < from.rank; i++) same = same && from.dim[i] == to.dim[i];
  if (!same || !trvi_dense(s, t->a, &count) || !trvi_dense(s, t->b, &room)) {
    st = trvi_fail_at(&s->diag, TRVI_COPY, t->a, count, room);
    s->diag.step = step;
    return st;
  }
  if (count > 0) memmove(to.data, from.data, (size_t)count * trv_dtype_size(from.dtype));
  if (s->run.hooks && s->run.hooks->end) s->run.hooks->end(s->run.hooks->self, t->time);
  return TRV_OK;
}

/* *out_taken: the predicate is false. */
static trv_status branch_step(trv_session* s, flight* f, uint32_t step, int* out_taken) {
  const uint32_t id = s->plan.steps[step].a;
  const trvf_value* v = &s->plan.values[id];
  trv_tensor t;
  trv_status st = settle(s, f, step);
  if (st) return st;
  trvi_tensor(s, id, &t);
  int one = s->regions[s->plan.storages[v->storage].region].host != NULL;
  for (uint32_t i = 0; i < v->rank; i++) one = one && s->dims[v->dim[i]] == 1;
  if (!one) {
    st = trvi_fail_at(&s->diag, TRVI_PREDICATE, id, 1, 0);
    s->diag.step = step;
    return st;
  }
  *out_taken = *t.data == 0;
  return TRV_OK;
}

static trv_status run_steps(trv_session* s, flight* f) {
  const trvf_step* steps = s->plan.steps;
  const uint32_t n = s->plan.step_count;
  uint32_t left = s->max_steps;
  for (uint32_t pc = 0; pc < n;) {
    int taken = 0;
    trv_status st = TRV_OK;
    if (s->max_steps && left-- == 0) {
      st = trvi_fail_at(&s->diag, TRVI_STEPS, TRV_NONE, (trv_dim)s->max_steps,
                        (trv_dim)s->max_steps + 1);
      s->diag.step = pc;
      return st;
    }
    switch (steps[pc].kind) {
      case TRV_STEP_KIND_RUN:
        st = run_step(s, f, pc);
        break;
      case TRV_STEP_KIND_COPY:
        st = copy_step(s, f, pc);
        break;
      case TRV_STEP_KIND_BRANCH:
        st = branch_step(s, f, pc, &taken);
        break;
      default:
        taken = 1;
        break;
    }
    if (st) return st;
    pc = taken ? steps[pc].b : pc + 1;
  }
  return TRV_OK;
}

static trv_status start(trv_session* s, flight* f) {
  if (s->dirty) {
    const trv_status st = trv_session_plan(s);
    if (st) return st;
    if (s->dirty) return s->diag.status; /* an output's buffer is too small */
  }
  if (s->diag.status) trvi_diag_clear(&s->diag);
  return run_steps(s, f);
}

trv_status trv_session_run(trv_session* sess) {
  flight f = {NULL, 0};
  if (!sess) return TRV_ARGUMENT;
  const trv_status st = start(sess, &f);
  if (!asynchronous(f.on)) return st;
  const trv_status end = f.on->driver->wait(f.on->device, f.point, UINT64_MAX);
  if (st || !end) return st;
  return device_failed(sess, f.on, end, sess->plan.step_count - 1);
}

trv_status trv_session_submit(trv_session* sess, trv_event* out_done) {
  flight f = {NULL, 0};
  if (!sess || !out_done) return TRV_ARGUMENT;
  const trv_status st = start(sess, &f);
  memset(out_done, 0, sizeof(*out_done));
  if (!asynchronous(f.on)) return st;
  out_done->driver = f.on->driver;
  out_done->device = f.on->device;
  out_done->point = f.point;
  return st;
}

trv_status trv_event_wait(const trv_event* event, uint64_t timeout_ns) {
  if (!event) return TRV_ARGUMENT;
  if (!event->driver || !event->driver->wait) return TRV_OK;
  return event->driver->wait(event->device, event->point, timeout_ns);
}
