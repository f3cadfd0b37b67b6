/* step.c - runs a session: the list of steps, and events. */
#include "private.h"

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

static trv_status run_step(trv_session* s, uint32_t step) {
  const trvi_step* t = &s->steps[step];
  uint64_t point = 0;
  trv_status st = trvi_ready(s, t->on, step);
  if (st) return st;
#ifndef TRV_ONE_MEMORY
  s->run.view = trvi_sees(s, (uint32_t)(t->on - s->devices));
  if (s->run.hooks) trvi_tell(s, TRV_TURN_BEGIN, t->on, step, 0);
#endif
  st = t->on->driver->run(t->on->device, t->part, &s->run, &point);
  if (st) return trvi_device_failed(s, t->on, st, step);
  trvi_given(s, t->on, step, point);
  if (!s->seen) return TRV_OK;
#ifndef TRV_ONE_MEMORY
  s->timeout = UINT64_MAX; /* the part has begun: there is no way back in front of it */
#endif
  st = trvi_settle(s, step);
  if (!st) st = data_sizes(s);
  if (st) {
    s->diag.step = step;
    s->dirty |= TRVI_DIRTY_SHAPES; /* the table holds sizes that were refused */
  }
  return st;
}

static trv_status copy_step(trv_session* s, uint32_t step) {
  const trvf_step* t = &s->plan.steps[step];
#ifdef TRV_ONE_MEMORY
  trv_status st = trvi_settle(s, step);
#else
  trv_status st = trvi_ready(s, s->steps[step].on, step);
#endif
  if (st) return st;
  const trv_dim bytes = trvi_same_bytes(s, t->a, t->b);
  if (bytes < 0) {
    st = trvi_fail_of(&s->diag, TRVI_COPY, t->a);
    s->diag.step = step;
    return st;
  }
#ifndef TRV_ONE_MEMORY
  if (s->steps[step].on) return bytes ? trvi_copy(s, step, (size_t)bytes) : TRV_OK;
  trvi_tell(s, TRV_TURN_BEGIN, NULL, step, 0);
#endif
  if (s->run.hooks && s->run.hooks->begin) s->run.hooks->begin(s->run.hooks->self, t->time);
  trv_tensor from, to;
  trvi_tensor(s, t->a, &from);
  trvi_tensor(s, t->b, &to);
  if (bytes > 0) memmove(to.data, from.data, (size_t)bytes);
  if (s->run.hooks && s->run.hooks->end) s->run.hooks->end(s->run.hooks->self, t->time);
  return TRV_OK;
}

/* *out_taken: the predicate is false. */
static trv_status branch_step(trv_session* s, uint32_t step, int* out_taken) {
  const uint32_t id = s->plan.steps[step].a;
  const trvf_value* v = &s->plan.values[id];
  trv_tensor t;
  trv_status st = trvi_settle(s, step);
  if (st) return st;
  int one = s->regions[s->plan.storages[v->storage].region].host != NULL;
  for (uint32_t i = 0; i < v->rank; i++) one = one && s->dims[v->dim[i]] == 1;
  if (!one) {
    st = trvi_fail_at(&s->diag, TRVI_PREDICATE, id, 1, 0);
    s->diag.step = step;
    return st;
  }
  trvi_tensor(s, id, &t);
  *out_taken = *t.data == 0;
  return TRV_OK;
}

/* On from step *at; PENDING: *at must wait. */
static trv_status run_steps(trv_session* s, uint32_t* at, uint32_t* left) {
  const trvf_step* steps = s->plan.steps;
  const uint32_t n = s->plan.step_count;
  for (uint32_t pc = *at; pc < n;) {
    int taken = 0;
    trv_status st = TRV_OK;
    *at = pc;
    if (s->max_steps && *left == 0) {
      st = trvi_fail_at(&s->diag, TRVI_STEPS, TRV_NONE, (trv_dim)s->max_steps,
                        (trv_dim)s->max_steps + 1);
      s->diag.step = pc;
      return st;
    }
    switch (steps[pc].kind) {
      case TRV_STEP_KIND_RUN:
        st = run_step(s, pc);
        break;
      case TRV_STEP_KIND_COPY:
        st = copy_step(s, pc);
        break;
      case TRV_STEP_KIND_BRANCH:
        st = branch_step(s, pc, &taken);
        break;
      default:
#ifndef TRV_ONE_MEMORY
        st = trvi_settle(s, pc);
#endif
        taken = 1;
        break;
    }
    if (st) return st;
    --*left;
    pc = taken ? steps[pc].b : pc + 1;
  }
  *at = n;
  return TRV_OK;
}

static trv_status start(trv_session* s) {
  if (s->dirty) {
    const trv_status st = trv_session_plan(s);
    if (st) return st;
    if (s->dirty) return s->diag.status; /* an output's buffer is too small */
  }
  if (s->diag.status) trvi_diag_clear(&s->diag);
  return TRV_OK;
}

#ifdef TRV_ONE_MEMORY
static trv_status go(trv_session* s) {
  uint32_t at = 0, left = s->max_steps;
  s->flying = NULL;
  const trv_status st = start(s);
  return st ? st : run_steps(s, &at, &left);
}

trv_status trv_session_run(trv_session* sess) {
  if (!sess) return TRV_ARGUMENT;
  const trv_status st = go(sess), end = trvi_settle(sess, sess->plan.step_count - 1);
  return st ? st : end;
}

trv_status trv_session_submit(trv_session* sess, trv_event* out_done) {
  if (!sess || !out_done) return TRV_ARGUMENT;
  const trv_status st = go(sess);
  memset(out_done, 0, sizeof(*out_done));
  if (!sess->flying || !sess->flying->driver->wait) return st;
  out_done->driver = sess->flying->driver;
  out_done->device = sess->flying->device;
  out_done->point = sess->point;
  return st;
}

trv_status trv_event_wait(const trv_event* event, uint64_t timeout_ns) {
  if (!event) return TRV_ARGUMENT;
  if (!event->driver || !event->driver->wait) return TRV_OK;
  return event->driver->wait(event->device, event->point, timeout_ns);
}

#else
/* Takes the run under way as far as it goes within the timeout. */
static trv_status go_on(trv_session* s, uint64_t timeout) {
  s->timeout = timeout;
  trv_status st = run_steps(s, &s->pc, &s->left);
  if (!st) st = trvi_settle(s, s->plan.step_count - 1);
  if (st == TRV_PENDING) return st;
  if (st) { /* what else is at work must end before its memory may go */
    const trv_diag first = s->diag;
    s->timeout = UINT64_MAX;
    while (trvi_settle(s, TRV_NONE)) continue; /* each failure makes one device idle */
    s->diag = first;
  }
  s->under_way = 0;
  s->result = st;
  return st;
}

void trvi_rest(trv_session* s) {
  if (s->under_way) (void)!go_on(s, UINT64_MAX);
}

static trv_status begin(trv_session* s, uint64_t timeout) {
  trvi_rest(s);
  const trv_status st = start(s);
  if (st) return st;
  s->pc = 0;
  s->left = s->max_steps;
  s->under_way = 1;
  return go_on(s, timeout);
}

trv_status trv_session_run(trv_session* sess) {
  return sess ? begin(sess, UINT64_MAX) : TRV_ARGUMENT;
}

trv_status trv_session_submit(trv_session* sess, trv_event* out_done) {
  if (!sess || !out_done) return TRV_ARGUMENT;
  const trv_status st = begin(sess, 0);
  memset(out_done, 0, sizeof(*out_done));
  if (st != TRV_PENDING) return st;
  out_done->session = sess;
  uint32_t busy = 0, last = 0;
  for (uint32_t k = 0; k < sess->device_count; k++)
    if (sess->units[k].busy) busy++, last = k;
  if (busy == 1 && sess->pc == sess->plan.step_count) {
    out_done->driver = sess->devices[last].driver;
    out_done->device = sess->devices[last].device;
    out_done->point = sess->units[last].point;
  }
  return TRV_OK;
}

trv_status trv_event_wait(const trv_event* event, uint64_t timeout_ns) {
  if (!event) return TRV_ARGUMENT;
  trv_session* s = event->session;
  if (!s) return TRV_OK;
  return s->under_way ? go_on(s, timeout_ns) : s->result;
}
#endif
