/* place.c - which device takes which step, and whose memory is where: asks drivers, best
 * alternative first. */
#include "private.h"

void* trvi_take(trvi_room* r, size_t count, size_t size, size_t align) {
  const size_t at = (r->used + align - 1) & ~(align - 1);
  if (at < r->used || count > (SIZE_MAX - at) / size) {
    r->overflow = 1;
    return NULL;
  }
  r->used = at + count * size;
  return r->base ? r->base + at : NULL;
}

trv_view trvi_plan_view(const trvi_plan* p) {
  trv_view v;
  memset(&v, 0, sizeof(v));
  v.size = sizeof(v);
  v.region_count = p->region_count;
  v.value_count = p->value_count;
  v.storage_count = p->storage_count;
  v.dim_count = p->dim_count;
  v.values = p->values;
  v.storages = p->storages;
  _Static_assert(offsetof(trvf_storage, offset) == 0, "offset comes first");
  v.offsets = (const uint8_t*)p->storages;
  v.offset_stride = sizeof(trvf_storage);
  v.dim_table = p->dims;
  v.region_table = p->regions;
  v.input_count = p->input_count;
  v.memories = UINT32_MAX;
  return v;
}

/* Asks a device for part `index` of the entry; *out_part: its description, bytes borrowed from the
 * file. A refusal is UNSUPPORTED or VERSION, with *why. */
static trv_status ask(const trv_session_desc* desc, const trv_bound_device* on, trvi_part* part,
                      const trv_view* view, trv_part_desc* out_part, size_t* out_bytes,
                      trv_diag* why) {
  if (part->segment >= 0) {
    const trv_status bad = trvi_segment(desc->program, (uint32_t)part->segment, &part->data, why);
    if (bad) return bad;
    if ((uintptr_t)part->data.data & 15) return trvi_fail(why, TRVI_PART);
  }
  const trv_part_desc pd = {sizeof(pd),    part->format,      part->data,         part->inputs,
                            part->outputs, part->input_count, part->output_count, view};
#ifndef TRV_ONE_MEMORY
  for (uint32_t i = 0; i < pd.input_count + pd.output_count; i++) {
    const uint32_t id = i < pd.input_count ? pd.inputs[i] : pd.outputs[i - pd.input_count];
    if (!trv_view_readable(view, id)) return trvi_fail_of(why, TRVI_REACH, id);
  }
#endif
  trvi_fail(why, TRVI_REFUSED);
  *out_bytes = 0;
  const trv_status answer = on->driver->part_need(on->device, &pd, out_bytes, why);
  *out_part = pd;
  why->status = answer;
  return answer <= 0 ? answer : TRV_DEVICE;
}

static int refusal(trv_status answer) { return answer == TRV_UNSUPPORTED || answer == TRV_VERSION; }

#ifndef TRV_ONE_MEMORY
static uint32_t flags_of(const trv_bound_device* on) {
  trv_caps caps;
  memset(&caps, 0, sizeof(caps));
  caps.size = sizeof(caps);
  on->driver->caps(on->device, &caps);
  return caps.flags;
}

uint32_t trvi_reach(const trvi_homes* h, const trv_session_desc* desc, uint32_t k) {
  uint32_t own = 0, host = 0;
  for (uint32_t m = 0; m < TRVI_MEMORIES; m++) {
    own |= (uint32_t)(h->home[m] == k) << m;
    host |= (uint32_t)(h->home[m] == TRVI_HOST) << m;
  }
  if (own) return own;
  return flags_of(&desc->devices[k]) & (TRV_CAP_HOST_MEMORY | TRV_CAP_IMPORT) ? host : 0;
}

/* Does the device take all steps that its delegate is the first alternative of, with the memories
 * of h? A refusal is in h->why. */
static trv_status takes_all(const trv_session_desc* desc, trv_fb* fb, const trvi_plan* p,
                            uint32_t k, trvi_homes* h, trv_diag* d) {
  const trv_bound_device* on = &desc->devices[k];
  trv_view view = trvi_plan_view(p);
  view.memories = trvi_reach(h, desc, k);
  for (uint32_t i = 0; i < p->step_count; i++) {
    const trvf_step* st = &p->steps[i];
    trvi_part part;
    trv_part_desc pd;
    size_t bytes;
    trv_diag why;
    if (st->kind != TRV_STEP_KIND_RUN) continue;
    trvi_part_read(fb, p, st->a, &part);
    if (fb->bad) return trvi_fail(d, TRVI_PART);
    if (strcmp(part.delegate, on->driver->name) != 0) continue;
    const trv_status answer = ask(desc, on, &part, &view, &pd, &bytes, &why);
    if (answer == TRV_OK) continue;
    why.step = i;
    if (!refusal(answer)) {
      if (d) *d = why;
    } else if (!h->why.status) {
      h->why = why;
    }
    return answer;
  }
  return TRV_OK;
}

trv_status trvi_find_homes(const trv_session_desc* desc, trv_fb* fb, const trvi_plan* p,
                           trvi_homes* out_homes, trv_diag* d) {
  trvi_homes* h = out_homes;
  memset(h, 0, sizeof(*h));
  memset(h->home, TRVI_HOST, sizeof(h->home));
  if (desc->device_count > 32) return trvi_fail(d, TRVI_DESC);
  const uint32_t n = trvi_memory_count(desc->program, fb);
  for (uint32_t k = 0; k < desc->device_count; k++) {
    const trv_bound_device* on = &desc->devices[k];
    const uint32_t flags = flags_of(on);
    uint32_t seen = 0, owned = 0;
    if (flags & TRV_CAP_HOST_MEMORY) continue;
    h->tables |= (uint32_t)1 << k;
    for (uint32_t i = 0; i < k; i++) /* of two with one name the first has the memory */
      seen |= strcmp(desc->devices[i].driver->name, on->driver->name) == 0;
    for (uint32_t m = 1; !seen && m < n && m < TRVI_MEMORIES; m++) {
      const char* owner = trvi_memory_owner(desc->program, fb, m);
      if (!owner || strcmp(owner, on->driver->name) != 0) continue;
      h->home[m] = (uint8_t)k;
      owned = 1;
    }
    if (!owned) continue;
    const trv_status answer =
        on->driver->copy ? takes_all(desc, fb, p, k, h, d) : trvi_fail(&h->why, TRVI_REFUSED);
    if (answer == TRV_OK) continue;
    if (!refusal(answer)) return answer;
    for (uint32_t m = 0; m < TRVI_MEMORIES; m++)
      if (h->home[m] == k) h->home[m] = TRVI_HOST;
    if (!(flags & TRV_CAP_IMPORT)) h->lost |= (uint32_t)1 << k;
  }
  return TRV_OK;
}
#endif

/* The first alternative of run step `step` that a device accepts. s: or NULL. */
static trv_status choose(const trv_session_desc* desc, trv_fb* fb, const trvi_plan* p,
                         uint32_t step, const trvi_homes* homes, trv_session* s,
                         trv_part_desc* out_part, const trv_bound_device** out_on,
                         size_t* out_bytes, trv_diag* d) {
  const trvf_step* st = &p->steps[step];
  trv_diag why;
  trvi_fail(&why, TRVI_NO_DEVICE);
  trv_view plan = trvi_plan_view(p);
  for (uint32_t i = 0; i < st->count; i++) {
    trvi_part part;
    trvi_part_read(fb, p, st->a + i, &part);
    if (fb->bad) return trvi_fail(d, TRVI_PART);
    for (uint32_t k = 0; k < desc->device_count; k++) {
      const trv_bound_device* on = &desc->devices[k];
      trv_status answer;
      if (strcmp(on->driver->name, part.delegate) != 0) continue;
#ifdef TRV_ONE_MEMORY
      (void)homes;
      answer = ask(desc, on, &part, s ? &s->view : &plan, out_part, out_bytes, &why);
#else
      if (homes->lost >> k & 1) {
        why = homes->why;
        continue;
      }
      plan.memories = trvi_reach(homes, desc, k);
      answer = ask(desc, on, &part, s ? trvi_sees(s, k) : &plan, out_part, out_bytes, &why);
#endif
      if (answer == TRV_OK) {
#ifndef TRV_ONE_MEMORY
        if (s) s->steps[step].alternative = i;
#endif
        *out_on = on;
        return TRV_OK;
      }
      why.step = step;
      if (!refusal(answer)) {
        if (d) *d = why;
        return answer;
      }
    }
#ifndef TRV_ONE_MEMORY
    if (s && i == 0) {
      s->steps[step].why = why.what;
      s->steps[step].why_status = why.status;
    }
#endif
  }
  why.step = step;
  if (why.time == TRV_NONE) why.time = st->time;
  if (d) *d = why;
  return why.status;
}

trv_status trvi_take_parts(trvi_room* r, const trv_session_desc* desc, trv_fb* fb,
                           const trvi_plan* p, const trvi_homes* homes, trv_session* s,
                           trv_diag* d) {
  for (uint32_t i = 0; i < p->step_count; i++) {
    if (p->steps[i].kind != TRV_STEP_KIND_RUN) continue;
    const trv_bound_device* on = NULL;
    trv_part_desc pd;
    size_t bytes;
    trv_status st = choose(desc, fb, p, i, homes, s, &pd, &on, &bytes, d);
    if (st) return st;
    void* mem = trvi_take(r, bytes, 1, 16);
    if (!s) continue;
    st = on->driver->part_open(on->device, &pd, mem, &s->steps[i].part);
    if (st) {
      trvi_fail(d, TRVI_PART_OPEN);
      if (d) d->step = i;
      return TRV_DEVICE;
    }
    s->steps[i].on = on;
  }
  return TRV_OK;
}
