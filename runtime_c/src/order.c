/* order.c - devices of a session: what each sees of the plan, copies between their memories, and
 * the order of their work.
 *
 * Each device works through what it is given in order. Between devices, a step waits for the steps
 * that the plan names, on the device where it offers join, else on the host. All waiting is here,
 * and none of it changes anything before it is over: a run that may not block stops in front of
 * the wait and is taken up there again. */
#include "private.h"

trv_status trvi_device_failed(trv_session* s, const trv_bound_device* on, trv_status st,
                              uint32_t step) {
  trv_diag* d = &s->diag;
  if (!d->what) {
    trvi_fail(d, TRVI_DEVICE);
    if (on->driver->last_error) d->got = on->driver->last_error(on->device, &d->what);
  }
  if (d->time == TRV_NONE && step < s->plan.step_count) d->time = s->plan.steps[step].time;
  d->step = step;
  d->status = st < 0 ? st : TRV_DEVICE;
  return d->status;
}

static int asynchronous(const trv_bound_device* on) { return on && on->driver->wait; }

#ifdef TRV_ONE_MEMORY
trv_status trvi_settle(trv_session* s, uint32_t step) {
  const trv_bound_device* on = s->flying;
  s->flying = NULL;
  if (!asynchronous(on)) return TRV_OK;
  const trv_status st = on->driver->wait(on->device, s->point, UINT64_MAX);
  return st ? trvi_device_failed(s, on, st, step) : TRV_OK;
}

trv_status trvi_ready(trv_session* s, const trv_bound_device* on, uint32_t step) {
  return s->flying && s->flying->device != on->device ? trvi_settle(s, step) : TRV_OK;
}

void trvi_given(trv_session* s, const trv_bound_device* on, uint32_t step, uint64_t point) {
  (void)step;
  s->flying = on;
  s->point = point;
}
#else

static uint32_t index_of(const trv_session* s, const trv_bound_device* on) {
  return on ? (uint32_t)(on - s->devices) : TRV_NONE;
}

void trvi_tell(trv_session* s, uint32_t state, const trv_bound_device* on, uint32_t step,
               uint64_t point) {
  const trv_hooks* h = s->run.hooks;
  if (!h || h->size < sizeof(*h) || !h->turn) return;
  const trv_turn turn = {sizeof(turn),
                         state,
                         step,
                         step < s->plan.step_count ? s->plan.steps[step].time : TRV_NONE,
                         index_of(s, on),
                         on ? on->driver : NULL,
                         on ? on->device : NULL,
                         point};
  h->turn(h->self, &turn);
}

/* ---- order
 * ---------------------------------------------------------------------------------------------------------
 */
/* Waits on the host until unit k has reached the point. */
static trv_status wait_for(trv_session* s, uint32_t k, uint64_t point, uint32_t step) {
  trvi_unit* u = &s->units[k];
  const trv_bound_device* on = &s->devices[k];
  if (!u->busy || point <= u->done) return TRV_OK;
  const trv_status st = on->driver->wait(on->device, point, s->timeout);
  if (st == TRV_PENDING) return st;
  if (st) {
    u->busy = 0; /* nothing more will come of it */
    return trvi_device_failed(s, on, st, step);
  }
  u->done = point;
  if (point >= u->point) u->busy = 0;
  trvi_tell(s, TRV_TURN_DONE, on, TRV_NONE, point);
  return TRV_OK;
}

/* Work for `on` comes next, and must follow what unit k does up to the point. */
static trv_status follow(trv_session* s, uint32_t k, uint64_t point, const trv_bound_device* on,
                         uint32_t step) {
  const trv_bound_device* other = &s->devices[k];
  if (!s->units[k].busy || point <= s->units[k].done || other == on) return TRV_OK;
  if (on && on->driver == other->driver && on->driver->join) {
    const trv_status st = on->driver->join(on->device, other->device, point);
    if (st == TRV_OK) return st;
    if (st != TRV_UNSUPPORTED) return trvi_device_failed(s, on, st, step);
  }
  return wait_for(s, k, point, step);
}

trv_status trvi_ready(trv_session* s, const trv_bound_device* on, uint32_t step) {
  const trvi_plan* p = &s->plan;
  trv_status st = TRV_OK;
  if (!p->wait_count || (s->flags & TRV_SESSION_IN_ORDER)) {
    for (uint32_t k = 0; !st && k < s->device_count; k++)
      st = follow(s, k, s->units[k].point, on, step);
    return st;
  }
  if (p->steps[step].flags & 1) return trvi_settle(s, step);
  for (uint32_t i = s->steps[step].first_wait; i < p->wait_count && p->waits[i].step == step; i++) {
    const trvi_step* other = &s->steps[p->waits[i].on];
    if (!asynchronous(other->on)) continue;
    st = follow(s, index_of(s, other->on), other->point, on, step);
    if (st) return st;
  }
  return TRV_OK;
}

void trvi_given(trv_session* s, const trv_bound_device* on, uint32_t step, uint64_t point) {
  trvi_unit* u = &s->units[index_of(s, on)];
  const int later = asynchronous(on);
  if (later) {
    u->point = point;
    u->busy = 1;
    if (step < s->plan.step_count) s->steps[step].point = point;
  }
  trvi_tell(s, later ? TRV_TURN_GIVEN : TRV_TURN_DONE, on, step, point);
}

trv_status trvi_settle(trv_session* s, uint32_t step) {
  for (uint32_t k = 0; k < s->device_count; k++) {
    const trv_status st = wait_for(s, k, s->units[k].point, step);
    if (st) return st;
  }
  return TRV_OK;
}

/* ---- views
 * ---------------------------------------------------------------------------------------------------------
 */
static void give_back(trv_session* s, uint32_t k, uint32_t i) {
  trvi_unit* u = &s->units[k];
  const trv_bound_device* on = &s->devices[k];
  if (!u->imported[i]) return;
  u->imported[i] = 0;
  on->driver->mem_free(on->device, &u->regions[i]);
}

trv_status trvi_region_changed(trv_session* s, uint32_t i) {
  const trvf_region* r = &s->plan.regions[i];
  const trv_buf* now = &s->regions[i];
  const uint32_t home = trvi_region_home(s, i);
  for (uint32_t k = 0; k < s->device_count; k++) {
    trvi_unit* u = &s->units[k];
    const trv_bound_device* on = &s->devices[k];
    if (!u->regions) continue;
    trv_buf* mine = &u->regions[i];
    if (u->imported[i] && mine->host == now->host && mine->size == now->size) continue;
    give_back(s, k, i);
    *mine = *now;
    if (home == k) continue;
    if (home != TRVI_HOST || !u->import) {
      mine->host = NULL;
      mine->dev = 0;
    } else if (r->kind == TRV_REGION_KIND_IO && !s->slots[r->slot].bound) {
      const trv_buf* arena = &u->regions[r->home];
      mine->dev = arena->dev ? arena->dev + s->slots[r->slot].home : 0;
    } else if (!now->dev && now->size && now->host != (uint8_t*)s) {
      trv_buf made = {NULL, 0, 0};
      const trv_status st = on->driver->mem_import(on->device, now->host, now->size, &made);
      if (st) return trvi_fail_of(&s->diag, TRVI_IMPORT, i);
      mine->dev = made.dev;
      u->imported[i] = 1;
    }
  }
  return TRV_OK;
}

void trvi_release(trv_session* s) {
  for (uint32_t k = 0; k < s->device_count; k++)
    for (uint32_t i = 0; s->units[k].regions && i < s->plan.region_count; i++) give_back(s, k, i);
}

/* ---- copies
 * --------------------------------------------------------------------------------------------------------
 */
/* size bytes of region i from an offset, as a driver's copy takes them. */
static trv_buf window(const trv_session* s, uint32_t i, size_t offset, size_t size) {
  const trv_buf* b = &s->regions[i];
  trv_buf out = {b->host ? b->host + offset : NULL, 0, size};
  if (trvi_region_home(s, i) != TRVI_HOST) out.dev = b->dev + offset;
  return out;
}

static trv_status give_copy(trv_session* s, const trv_bound_device* on, const trv_buf* dst,
                            const trv_buf* src, uint32_t step) {
  uint64_t point = 0;
  trvi_tell(s, TRV_TURN_BEGIN, on, step, 0);
  const trv_status st = on->driver->copy(on->device, dst, src, dst->size, &point);
  if (st) return trvi_device_failed(s, on, st, step);
  trvi_given(s, on, step, point);
  return TRV_OK;
}

static size_t place_of(const trv_session* s, uint32_t value) {
  return (size_t)trv_view_offset(&s->view, value);
}

trv_status trvi_copy(trv_session* s, uint32_t step, size_t bytes) {
  const trvf_step* t = &s->plan.steps[step];
  const uint32_t a = s->plan.storages[s->plan.values[t->a].storage].region;
  const uint32_t b = s->plan.storages[s->plan.values[t->b].storage].region;
  const trv_buf from = window(s, a, place_of(s, t->a), bytes);
  const trv_buf to = window(s, b, place_of(s, t->b), bytes);
  return give_copy(s, s->steps[step].on, &to, &from, step);
}

/* Errors of a copy beside a run: in d, the run's own diag as it was. */
static trv_status beside(trv_session* s, const trv_bound_device* on, const trv_buf* dst,
                         const trv_buf* src, trv_diag* d) {
  const trv_diag kept = s->diag;
  trvi_diag_clear(&s->diag);
  trv_status st = give_copy(s, on, dst, src, TRV_NONE);
  s->timeout = UINT64_MAX;
  if (!st) st = wait_for(s, index_of(s, on), s->units[index_of(s, on)].point, TRV_NONE);
  if (st && d) *d = s->diag;
  if (!st || d != &s->diag) s->diag = kept;
  return st;
}

trv_status trvi_transfer(trv_session* s, uint32_t i, size_t offset, void* host, size_t size,
                         int write, trv_diag* d) {
  const trv_bound_device* on = &s->devices[trvi_region_home(s, i)];
  const trv_buf here = {host, 0, size}, there = window(s, i, offset, size);
  if (size == 0) return TRV_OK;
  return beside(s, on, write ? &there : &here, write ? &here : &there, d);
}

/* What is zero already doubles with each copy. */
trv_status trvi_clear(trv_session* s, uint32_t i, size_t size, trv_diag* d) {
  const trv_bound_device* on = &s->devices[trvi_region_home(s, i)];
  uint64_t zeros[8] = {0};
  size_t done = size < sizeof(zeros) ? size : sizeof(zeros);
  trv_status st = trvi_transfer(s, i, 0, zeros, done, 1, d);
  while (!st && done < size) {
    const size_t n = size - done < done ? size - done : done;
    const trv_buf from = window(s, i, 0, n), to = window(s, i, done, n);
    st = beside(s, on, &to, &from, d);
    done += n;
  }
  return st;
}
#endif
