/* session.c - an entry in the caller's memory: measures, builds, binds, plans. */
#include "private.h"

/* ---- layout: one walk measures (base NULL) and builds
 * --------------------------------------------------------------- */
static trv_session* take_arrays(trvi_room* r, const trvi_plan* p, const trv_session_desc* desc,
                                const trvi_homes* homes) {
  trv_session local, *s = trvi_take(r, 1, sizeof(*s), 16);
  trv_session* out = s ? s : &local;
  const uint32_t slots = p->input_count + p->output_count;
  const int replan = (desc->flags & TRV_SESSION_REPLAN) != 0;
  int data = 0;
  for (uint32_t i = 0; i < p->dim_count; i++) data |= p->dims[i].op == TRV_DIM_OP_DATA;
  out->regions = trvi_take(r, p->region_count, sizeof(trv_buf), 8);
  out->slots = trvi_take(r, slots, sizeof(trvi_slot), 8);
  out->tensors = trvi_take(r, slots, sizeof(trv_tensor), 8);
  out->dims = trvi_take(r, (size_t)p->dim_count << data, sizeof(trv_dim), 8);
  out->steps = trvi_take(r, p->step_count, sizeof(trvi_step), 8);
  out->places = trvi_take(r, replan ? p->storage_count : 0, sizeof(trvi_place), 8);
  out->needs = trvi_take(r, replan ? p->region_count : 0, sizeof(size_t), 8);
  out->order = trvi_take(r, replan ? p->storage_count : 0, 2 * sizeof(uint32_t), 4);
  if (!replan) out->places = NULL;
#ifdef TRV_ONE_MEMORY
  (void)homes;
#else
  out->units = trvi_take(r, desc->device_count, sizeof(trvi_unit), 8);
  for (uint32_t k = 0; k < desc->device_count; k++) {
    if (!(homes->tables >> k & 1)) continue;
    trv_buf* table = trvi_take(r, p->region_count, sizeof(trv_buf), 8);
    uint8_t* imported = trvi_take(r, p->region_count, 1, 1);
    if (!s) continue;
    s->units[k].regions = table;
    s->units[k].imported = imported;
  }
#endif
  if (s && data) s->seen = s->dims + p->dim_count;
  return s;
}

/* ---- desc
 * ----------------------------------------------------------------------------------------------------------
 */
/* Reads the entry's plan; desc->size may be that of an older header. */
static trv_status check_desc(const trv_session_desc* desc, trv_fb* fb, trvi_plan* p, trv_diag* d) {
  if (d) trvi_diag_clear(d);
  if (!desc || desc->size < offsetof(trv_session_desc, max_steps) || !desc->program)
    return trvi_fail(d, TRVI_DESC);
  if (desc->entry >= desc->program->entry_count) {
    return trvi_fail_at(d, TRVI_NO_ENTRY, desc->entry, (trv_dim)desc->program->entry_count - 1,
                        (trv_dim)desc->entry);
  }
  if (desc->device_count && !desc->devices) return trvi_fail(d, TRVI_DESC);
  for (uint32_t i = 0; i < desc->device_count; i++) {
    const trv_driver* v = desc->devices[i].driver;
    if (!v || v->abi != TRV_HAL_ABI || v->size < sizeof(trv_driver)) {
      return trvi_fail_at(d, v ? TRVI_HAL : TRVI_DESC, i, TRV_HAL_ABI, v ? (trv_dim)v->abi : 0);
    }
  }
  *fb = trvi_reader(desc->program);
  trvi_plan_read(desc->program, fb, desc->entry, p);
  if (fb->bad) return trvi_fail(d, TRVI_ENTRY);
  if ((desc->flags & TRV_SESSION_REPLAN) && p->storage_count > 0xFFFF)
    return trvi_fail_at(d, TRVI_MANY, TRV_NONE, 0xFFFF, (trv_dim)p->storage_count);
  return TRV_OK;
}

/* What build needs to know. */
typedef struct blueprint {
  trv_fb fb;
  trvi_plan plan;
  size_t arrays, bytes;
  trvi_homes homes;
} blueprint;

static trv_status measure(const trv_session_desc* desc, blueprint* b, trv_diag* d) {
  trvi_room r = {NULL, 0, 0};
  trv_status st = check_desc(desc, &b->fb, &b->plan, d);
#ifndef TRV_ONE_MEMORY
  if (!st) st = trvi_find_homes(desc, &b->fb, &b->plan, &b->homes, d);
#endif
  if (st) return st;
  take_arrays(&r, &b->plan, desc, &b->homes);
  b->arrays = r.used;
  st = trvi_take_parts(&r, desc, &b->fb, &b->plan, &b->homes, NULL, d);
  b->bytes = r.used;
  return st || !r.overflow ? st : trvi_fail(d, TRVI_SESSION_ROOM);
}

trv_status trv_session_bytes(const trv_session_desc* desc, size_t* out_bytes, trv_diag* out_diag) {
  blueprint b;
  if (!out_bytes) return trvi_fail(out_diag, TRVI_NULL_ARGUMENT);
  const trv_status st = measure(desc, &b, out_diag);
  *out_bytes = st ? 0 : b.bytes;
  return st;
}

#ifndef TRV_ONE_MEMORY
trv_status trv_session_homes(const trv_session_desc* desc, uint32_t* out_devices,
                             trv_diag* out_diag) {
  blueprint b;
  if (!out_devices) return trvi_fail(out_diag, TRVI_NULL_ARGUMENT);
  const trv_status st = measure(desc, &b, out_diag);
  for (uint32_t i = 0; !st && i < b.plan.region_count; i++) {
    const uint32_t home = b.homes.home[b.plan.regions[i].memory & (TRVI_MEMORIES - 1)];
    out_devices[i] = home == TRVI_HOST ? TRV_NONE : home;
  }
  return st;
}
#endif

/* ---- regions
 * -------------------------------------------------------------------------------------------------------
 */
static trv_status check_buffer(const trv_session* s, uint32_t i, const trv_buf* b, uint64_t need,
                               trv_diag* d) {
  const trvf_region* r = &s->plan.regions[i];
  if (need && (b->size < need || (!b->host && !b->dev))) {
    return trvi_fail_at(d, TRVI_REGION_ROOM, i, trvi_clamp(need),
                        b->host || b->dev ? (trv_dim)b->size : 0);
  }
  if (b->host && ((uintptr_t)b->host & (r->align - 1))) {
    return trvi_fail_at(d, TRVI_REGION_ALIGN, i, (trv_dim)r->align,
                        (trv_dim)((uintptr_t)b->host & (r->align - 1)));
  }
#ifndef TRV_ONE_MEMORY
  const int host = trvi_region_home(s, i) == TRVI_HOST;
  if (need && !(host ? b->host != NULL : b->dev != 0))
    return trvi_fail_of(d, host ? TRVI_REGION_HOST : TRVI_REGION_DEV, i);
#endif
  return TRV_OK;
}

/* Does only a reader have the bytes of the region's segment? */
static int through_reader(const trv_session* s, const trvf_region* r) {
  return s->program->reader && s->program->segments[r->segment].file == 0;
}

/* Writes the bytes that region i begins with into its buffer. */
static trv_status fill(trv_session* s, uint32_t i, trv_diag* d) {
  const trvf_region* r = &s->plan.regions[i];
  uint8_t* dst = s->regions[i].host;
  const size_t size = (size_t)r->size;
  if (size == 0) return TRV_OK;
#ifndef TRV_ONE_MEMORY
  if (trvi_region_home(s, i) != TRVI_HOST) {
    if (r->segment == -1) return trvi_clear(s, i, size, d);
    trv_span from;
    const trv_status bad = trvi_segment(s->program, (uint32_t)r->segment, &from, d);
    return bad ? bad : trvi_transfer(s, i, 0, (void*)(uintptr_t)from.data, size, 1, d);
  }
#endif
  if (!dst) return trvi_fail_of(d, TRVI_REGION_HOST, i);
  if (r->segment == -1) {
    memset(dst, 0, size);
    return TRV_OK;
  }
  if (through_reader(s, r))
    return trvi_segment_read(s->program, (uint32_t)r->segment, dst, size, d);
  trv_span bytes;
  const trv_status st = trvi_segment(s->program, (uint32_t)r->segment, &bytes, d);
  if (!st) memcpy(dst, bytes.data, size);
  return st;
}

static trv_status open_regions(trv_session* s, const trv_session_desc* desc, trv_diag* d) {
  const trvi_plan* p = &s->plan;
  for (uint32_t i = 0; i < p->region_count; i++) {
    const trvf_region* r = &p->regions[i];
    trv_buf* b = &s->regions[i];
    trv_status st = TRV_OK;
    uint64_t need = r->size;
    int own = r->kind == TRV_REGION_KIND_STATE && !(s->flags & TRV_SESSION_KEEP_STATE);
    if (r->kind == TRV_REGION_KIND_IO) continue;
    if (desc->regions) *b = desc->regions[i];
    if (r->kind == TRV_REGION_KIND_ARENA && s->places) need = 0;
    if (r->kind == TRV_REGION_KIND_CONST) {
      own = through_reader(s, r);
      const int away = trvi_region_home(s, i) != TRVI_HOST;
      if (away) {
        own = 1;
      } else if (!own) {
        trv_span bytes = {NULL, 0};
        st = trvi_segment(s->program, (uint32_t)r->segment, &bytes, d);
        b->host = (uint8_t*)(uintptr_t)bytes.data; /* read only: verifier and drivers see to it */
        b->dev = 0;
        b->size = (size_t)need;
      }
    }
    if (!st) st = check_buffer(s, i, b, need, d);
#ifndef TRV_ONE_MEMORY
    if (s->keep && s->keep[i]) own = 0;
#endif
    if (!st && own) st = fill(s, i, d);
    if (st) return st;
    /* nothing is read there, but addresses are formed */
    if (!b->host && !b->dev && need == 0) b->host = (uint8_t*)s;
    st = trvi_region_changed(s, i);
    if (st) {
      if (d) *d = s->diag;
      return st;
    }
  }
  return TRV_OK;
}

/* ---- init
 * ----------------------------------------------------------------------------------------------------------
 */
static void init_slots(trv_session* s) {
  const trvi_plan* p = &s->plan;
  for (uint32_t i = 0; i < p->input_count + p->output_count; i++) {
    const trvf_value* v = &p->values[trvi_slot_value(p, i)];
    trvi_slot* t = &s->slots[i];
    t->storage = v->storage;
    t->region = p->storages[v->storage].region;
    t->home = s->places ? 0 : (size_t)p->regions[t->region].home_offset;
    t->known = 1;
    for (uint32_t k = 0; k < v->rank; k++) {
      if (trvi_row_const(p, v->dim[k]))
        t->dim[k] = (trv_dim)p->dims[v->dim[k]].min;
      else
        t->known = 0;
    }
    s->tensors[i].dtype = v->dtype;
    s->tensors[i].rank = v->rank;
  }
}

static int inputs_known(const trv_session* s, uint32_t* missing) {
  for (uint32_t i = 0; i < s->plan.input_count; i++) {
    if (s->slots[i].known) continue;
    *missing = i;
    return 0;
  }
  return 1;
}

#ifndef TRV_ONE_MEMORY
static void init_units(trv_session* s, const trv_session_desc* desc, const trvi_homes* homes) {
  s->devices = desc->devices;
  s->device_count = desc->device_count;
  s->homes = *homes;
  s->keep = desc->size >= sizeof(*desc) ? desc->keep : NULL;
  for (uint32_t m = 0; m < TRVI_MEMORIES; m++)
    if (homes->home[m] != TRVI_HOST) s->view.memories &= ~((uint32_t)1 << m);
  for (uint32_t k = 0; k < s->device_count; k++) {
    trvi_unit* u = &s->units[k];
    if (!u->regions) continue;
    u->view = s->view;
    u->view.regions = u->regions;
    u->view.memories = trvi_reach(homes, desc, k);
    u->import = (u->view.memories & 1) != 0; /* it works in host memory */
  }
}

/* Who copies, and where each step's waits begin. */
static trv_status init_steps(trv_session* s, trv_diag* d) {
  const trvi_plan* p = &s->plan;
  uint32_t wait = 0;
  for (uint32_t i = 0; i < p->step_count; i++) {
    const trvf_step* t = &p->steps[i];
    while (wait < p->wait_count && p->waits[wait].step < i) wait++;
    s->steps[i].first_wait = wait;
    if (t->kind != TRV_STEP_KIND_COPY) continue;
    const uint32_t from = trvi_region_home(s, p->storages[p->values[t->a].storage].region);
    const uint32_t to = trvi_region_home(s, p->storages[p->values[t->b].storage].region);
    if (from != to && from != TRVI_HOST && to != TRVI_HOST) {
      const trv_status st = trvi_fail_of(d, TRVI_REACH, t->a);
      if (d) d->step = i;
      return st;
    }
    const uint32_t by = from == TRVI_HOST ? to : from;
    if (by != TRVI_HOST) s->steps[i].on = &s->devices[by];
  }
  return TRV_OK;
}
#endif

trv_status trv_session_init(const trv_session_desc* desc, void* mem, size_t size,
                            trv_session** out_sess, trv_diag* out_diag) {
  blueprint b;
  uint32_t missing;
  if (!out_sess || !mem) return trvi_fail(out_diag, TRVI_NULL_ARGUMENT);
  *out_sess = NULL;
  trv_status st = measure(desc, &b, out_diag);
  if (st) return st;
  if ((uintptr_t)mem & 15) return trvi_fail(out_diag, TRVI_SESSION_ALIGN);
  if (size < b.bytes)
    return trvi_fail_at(out_diag, TRVI_SESSION_ROOM, TRV_NONE, (trv_dim)b.bytes, (trv_dim)size);

  trvi_room r = {mem, 0, 0};
  memset(mem, 0, b.arrays);
  trv_session* s = take_arrays(&r, &b.plan, desc, &b.homes);
  const trvi_plan* p = &s->plan;
  s->plan = b.plan;
  s->program = desc->program;
  s->flags = desc->flags;
  s->max_steps = desc->size >= offsetof(trv_session_desc, keep) ? desc->max_steps : 0;
  if (s->places) trvi_replan_init(s);
  s->view = trvi_plan_view(p);
  s->view.regions = s->regions;
  s->view.dims = s->dims;
  if (s->places) {
    s->view.offsets = (const uint8_t*)s->places;
    s->view.offset_stride = sizeof(trvi_place);
  }
  s->run.size = sizeof(s->run);
  s->run.view = &s->view;
  s->run.runner = desc->runner;
  s->run.hooks = desc->hooks;
  s->run.diag = &s->diag;
  s->dirty = TRVI_DIRTY_SHAPES | TRVI_DIRTY_PLACES;
  trvi_diag_clear(&s->diag);
  init_slots(s);
#ifndef TRV_ONE_MEMORY
  init_units(s, desc, &b.homes);
  st = init_steps(s, out_diag);
  if (!st)
#endif
    st = open_regions(s, desc, out_diag);
  if (!st) st = trvi_take_parts(&r, desc, &b.fb, p, &b.homes, s, out_diag);
  /* where all sizes are known, so are all errors; a missing arena is told by the first run */
  if (!st && inputs_known(s, &missing)) {
    st = trv_session_plan(s);
    if (st == TRV_MEMORY && s->places) st = TRV_OK;
    if (st && out_diag) *out_diag = s->diag;
  }
  if (st) {
    trv_session_deinit(s);
    return st;
  }
  *out_sess = s;
  return TRV_OK;
}

void trv_session_deinit(trv_session* sess) {
  if (!sess) return;
  trvi_rest(sess);
  for (uint32_t i = sess->plan.step_count; i-- > 0;) {
    trvi_step* t = &sess->steps[i];
    if (t->part && t->on->driver->part_close) t->on->driver->part_close(t->on->device, t->part);
    t->on = NULL;
    t->part = NULL;
  }
#ifndef TRV_ONE_MEMORY
  trvi_release(sess);
#endif
}

trv_status trv_session_reset(trv_session* sess) {
  if (!sess) return TRV_ARGUMENT;
  trvi_rest(sess);
  for (uint32_t i = 0; i < sess->plan.region_count; i++) {
    if (sess->plan.regions[i].kind != TRV_REGION_KIND_STATE) continue;
    const trv_status st = fill(sess, i, &sess->diag);
    if (st) return st;
  }
  return TRV_OK;
}

/* ---- bind
 * ----------------------------------------------------------------------------------------------------------
 */
/* Did the caller give memory? */
static int given(const trv_session* s, uint32_t slot, const trv_buf* buf) {
#ifdef TRV_ONE_MEMORY
  (void)s;
  (void)slot;
  return buf->host != NULL;
#else
  return trvi_region_home(s, s->slots[slot].region) == TRVI_HOST ? buf->host != NULL
                                                                 : buf->dev != 0;
#endif
}

/* Points slot i's region at the buffer, or back home. Sizes are good; only addresses change. */
static trv_status point_slot(trv_session* s, uint32_t i, const trv_buf* buf) {
  trvi_slot* t = &s->slots[i];
  if (given(s, i, buf)) {
    t->bound = 1;
    s->regions[t->region] = *buf;
  } else {
    if (t->bound) s->dirty |= TRVI_DIRTY_PLACES;
    t->bound = 0;
    trvi_slot_home(s, i);
  }
  if (s->regions[t->region].size < t->checked) s->dirty |= TRVI_DIRTY_PLACES;
  s->tensors[i].data = s->regions[t->region].host;
  s->run.epoch++;
  return trvi_region_changed(s, t->region);
}

/* Bytes of a slot whose dims are in t->dim or, for outputs, in the table; -1 where not
 * representable. */
static trv_dim slot_bytes(const trvf_value* v, const trv_dim* dim) {
  trv_dim bytes = (trv_dim)trv_dtype_size(v->dtype);
  for (uint32_t k = 0; k < v->rank; k++)
    if (trvi_mul(bytes, dim[k], &bytes)) return -1;
  return bytes;
}

/* i: of all slots; number: among inputs or outputs, for messages. */
static trv_status check_slot_buffer(trv_session* s, const trvf_value* v, uint32_t i,
                                    uint32_t number, trv_dim bytes, const trv_buf* buf) {
  if (bytes < 0) return trvi_fail_of(&s->diag, TRVI_TOO_MUCH, number);
#ifndef TRV_ONE_MEMORY
  if (!given(s, i, buf) && (buf->host || buf->dev)) {
    const uint32_t region = s->slots[i].region;
    const int host = trvi_region_home(s, region) == TRVI_HOST;
    return trvi_fail_of(&s->diag, host ? TRVI_REGION_HOST : TRVI_REGION_DEV, region);
  }
#endif
  if (!given(s, i, buf)) return TRV_OK;
  if (buf->size < (size_t)bytes)
    return trvi_fail_at(&s->diag, TRVI_BUFFER_ROOM, number, bytes, (trv_dim)buf->size);
  const size_t element = trv_dtype_size(v->dtype);
  if ((uintptr_t)buf->host & (element - 1)) {
    return trvi_fail_at(&s->diag, TRVI_BUFFER_ALIGN, number, (trv_dim)element,
                        (trv_dim)((uintptr_t)buf->host & (element - 1)));
  }
  return TRV_OK;
}

trv_status trv_session_bind_input(trv_session* sess, uint32_t i, uint32_t dtype, uint32_t rank,
                                  const int64_t* dims, trv_buf buf) {
  if (!sess) return TRV_ARGUMENT;
  trv_session* s = sess;
  trvi_rest(s);
  trv_diag* d = &s->diag;
  if (i >= s->plan.input_count) {
    return trvi_fail_at(d, TRVI_NO_SLOT, i, (trv_dim)s->plan.input_count - 1, (trv_dim)i);
  }
  const trvf_value* v = &s->plan.values[s->plan.inputs[i]];
  trvi_slot* t = &s->slots[i];
  if (dtype != v->dtype) return trvi_fail_at(d, TRVI_DTYPE, i, v->dtype, (trv_dim)dtype);
  if (rank != v->rank) return trvi_fail_at(d, TRVI_RANK, i, v->rank, (trv_dim)rank);
  if (!dims && !t->known) return trvi_fail_of(d, TRVI_SIZES, i);
  trv_dim now[TRV_MAX_RANK];
  int changed = !t->known;
  for (uint32_t k = 0; k < rank; k++) {
    const trvf_dim* row = &s->plan.dims[v->dim[k]];
    const int64_t n = dims ? dims[k] : t->dim[k];
    if (n < row->min || n > row->max || n < 0 || n > PTRDIFF_MAX) {
      trvi_fail_of(d, TRVI_INPUT_SIZE, i);
      d->axis = k;
      d->expected = row->min;
      d->limit = row->max;
      d->got = n;
      return TRV_ARGUMENT;
    }
    now[k] = (trv_dim)n;
    changed |= now[k] != t->dim[k];
  }
  const trv_status st = check_slot_buffer(s, v, i, i, slot_bytes(v, now), &buf);
  if (st) return st;
  if (changed) {
    memcpy(t->dim, now, rank * sizeof(*now));
    t->known = 1;
    s->dirty |= TRVI_DIRTY_SHAPES;
  }
  return point_slot(s, i, &buf);
}

trv_status trv_session_bind_output(trv_session* sess, uint32_t i, trv_buf buf) {
  if (!sess) return TRV_ARGUMENT;
  trv_session* s = sess;
  trvi_rest(s);
  if (i >= s->plan.output_count) {
    return trvi_fail_at(&s->diag, TRVI_NO_SLOT, i, (trv_dim)s->plan.output_count - 1, (trv_dim)i);
  }
  const uint32_t slot = s->plan.input_count + i;
  const trvf_value* v = &s->plan.values[s->plan.outputs[i]];
  const int fixed = s->slots[slot].known;
  const trv_status st =
      check_slot_buffer(s, v, slot, i, fixed ? slot_bytes(v, s->slots[slot].dim) : 0, &buf);
  if (st) return st;
  if (!fixed) s->dirty |= TRVI_DIRTY_PLACES;
  return point_slot(s, slot, &buf);
}

trv_status trv_session_bind_region(trv_session* sess, uint32_t i, trv_buf buf) {
  if (!sess) return TRV_ARGUMENT;
  trv_session* s = sess;
  trvi_rest(s);
  const trvf_region* r = i < s->plan.region_count ? &s->plan.regions[i] : NULL;
  if (!r || (r->kind != TRV_REGION_KIND_ARENA && r->kind != TRV_REGION_KIND_STATE))
    return trvi_fail_of(&s->diag, TRVI_NO_REGION, i);
  const uint64_t need = r->kind == TRV_REGION_KIND_ARENA && s->places ? 0 : r->size;
  const trv_status st = check_buffer(s, i, &buf, need, &s->diag);
  if (st) return st;
  s->regions[i] = buf;
  if (!buf.host && !buf.dev) s->regions[i].host = (uint8_t*)s;
  s->dirty |= TRVI_DIRTY_PLACES;
  s->run.epoch++;
  return trvi_region_changed(s, i);
}

/* ---- plan
 * ----------------------------------------------------------------------------------------------------------
 */
static trv_status plan_shapes(trv_session* s) {
  uint32_t missing = 0;
  trv_status st = TRV_OK;
  if (!inputs_known(s, &missing)) return trvi_fail_of(&s->diag, TRVI_UNBOUND, missing);
  if (s->seen) {
    /* sizes for the packer come first: data rows at their bound, then back to the least */
    if (s->places) st = trvi_dims_evaluate(s, 1);
    if (!st && s->places) st = trvi_replan(s);
    for (uint32_t i = 0; i < s->plan.dim_count; i++)
      if (s->plan.dims[i].op == TRV_DIM_OP_DATA) s->dims[i] = (trv_dim)s->plan.dims[i].min;
  }
  return st ? st : trvi_dims_evaluate(s, 0);
}

trv_status trv_session_plan(trv_session* sess) {
  if (!sess) return TRV_ARGUMENT;
  trv_session* s = sess;
  trv_status st = TRV_OK;
  if (!s->dirty) return TRV_OK;
  trvi_rest(s);
  trvi_diag_clear(&s->diag);
  /* with data-dependent sizes the packer needs the bound again whenever it may run */
  if (s->seen && s->places) s->dirty |= TRVI_DIRTY_SHAPES;
  if (s->dirty & TRVI_DIRTY_SHAPES) st = plan_shapes(s);
  if (!st && s->places && !s->seen) st = trvi_replan(s);
  if (st) return st;
  for (uint32_t i = 0; s->places && i < s->plan.region_count; i++) {
    if (s->needs[i] == 0) continue;
    st = check_buffer(s, i, &s->regions[i], s->needs[i], &s->diag);
    if (st) return st;
  }
  for (uint32_t i = 0; i < s->plan.input_count + s->plan.output_count; i++) {
    if (s->slots[i].bound) continue;
    trvi_slot_home(s, i);
    st = trvi_region_changed(s, s->slots[i].region);
    if (st) return st;
  }
  trv_status too_short;
  st = trvi_extents_check(s, &too_short);
  if (st) return st;
  if (s->seen) memcpy(s->seen, s->dims, s->plan.dim_count * sizeof(*s->dims));
  trvi_tensors_refresh(s);
  if (s->dirty & TRVI_DIRTY_SHAPES) s->run.shape_epoch++;
  s->run.epoch++;
  for (uint32_t i = 0; i < s->plan.input_count + s->plan.output_count; i++)
    s->slots[i].checked = s->regions[s->slots[i].region].size;
  s->dirty = too_short ? TRVI_DIRTY_PLACES : 0;
  return TRV_OK;
}

/* ---- look
 * ----------------------------------------------------------------------------------------------------------
 */
const trv_tensor* trv_session_input(trv_session* sess, uint32_t i) {
  return sess && i < sess->plan.input_count ? &sess->tensors[i] : NULL;
}

const trv_tensor* trv_session_output(trv_session* sess, uint32_t i) {
  return sess && i < sess->plan.output_count ? &sess->tensors[sess->plan.input_count + i] : NULL;
}

const trv_diag* trv_session_diag(const trv_session* sess) {
  static const trv_diag none = {TRV_ARGUMENT, TRV_NONE, TRV_NONE, TRV_NONE, TRV_NONE,
                                NULL,         0,        0,        0};
  return sess ? &sess->diag : &none;
}

const trv_view* trv_session_view(const trv_session* sess) { return &sess->view; }

void trv_session_hooks(trv_session* sess, const trv_hooks* hooks) {
  if (sess) sess->run.hooks = hooks;
}

#ifndef TRV_ONE_MEMORY
/* ---- devices
 * -------------------------------------------------------------------------------------------------------
 */
trv_status trv_session_step(const trv_session* sess, uint32_t i, trv_step* out_step) {
  if (!sess || !out_step || out_step->size < sizeof(*out_step) || i >= sess->plan.step_count)
    return TRV_ARGUMENT;
  const trvf_step* t = &sess->plan.steps[i];
  const trvi_step* step = &sess->steps[i];
  trv_step* o = out_step;
  memset((uint8_t*)o + sizeof(o->size), 0, sizeof(*o) - sizeof(o->size));
  o->kind = t->kind;
  o->time = t->time;
  o->device = step->on ? (uint32_t)(step->on - sess->devices) : TRV_NONE;
  if (t->kind != TRV_STEP_KIND_RUN) return TRV_OK;
  trv_fb fb = trvi_reader(sess->program);
  trvi_part part;
  trvi_part_read(&fb, &sess->plan, t->a, &part);
  o->wanted = part.delegate;
  o->alternative = step->alternative;
  o->alternatives = t->count;
  if (!step->alternative) return TRV_OK;
  o->status = step->why_status;
  o->why = step->why;
  return TRV_OK;
}

static trv_status move_region(trv_session* s, uint32_t i, void* host, size_t size, int write) {
  trvi_rest(s);
  if (i >= s->plan.region_count || (size && !host))
    return trvi_fail_of(&s->diag, TRVI_NO_REGION, i);
  const trv_buf* b = &s->regions[i];
  if (size > b->size)
    return trvi_fail_at(&s->diag, TRVI_REGION_ROOM, i, (trv_dim)size, (trv_dim)b->size);
  if (write && s->plan.regions[i].kind == TRV_REGION_KIND_CONST)
    return trvi_fail_of(&s->diag, TRVI_NO_REGION, i);
  if (trvi_region_home(s, i) != TRVI_HOST)
    return trvi_transfer(s, i, 0, host, size, write, &s->diag);
  if (size) memmove(write ? (void*)b->host : host, write ? host : (void*)b->host, size);
  return TRV_OK;
}

trv_status trv_session_read(trv_session* sess, uint32_t region, void* dst, size_t size) {
  return sess ? move_region(sess, region, dst, size, 0) : TRV_ARGUMENT;
}

trv_status trv_session_write(trv_session* sess, uint32_t region, const void* src, size_t size) {
  return sess ? move_region(sess, region, (void*)(uintptr_t)src, size, 1) : TRV_ARGUMENT;
}
#endif
