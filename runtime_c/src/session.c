/* session.c - an entry in the caller's memory: measures, builds, binds, plans. */
#include "private.h"

/* ---- layout: one walk measures (base NULL) and builds
 * --------------------------------------------------------------- */
typedef struct room {
  uint8_t* base;
  size_t used;
  int overflow;
} room;

static void* take(room* r, size_t count, size_t size, size_t align) {
  const size_t at = (r->used + align - 1) & ~(align - 1);
  if (at < r->used || count > (SIZE_MAX - at) / size) {
    r->overflow = 1;
    return NULL;
  }
  r->used = at + count * size;
  return r->base ? r->base + at : NULL;
}

static trv_session* take_arrays(room* r, const trvi_plan* p, uint32_t flags) {
  trv_session local, *s = take(r, 1, sizeof(*s), 16);
  trv_session* out = s ? s : &local;
  const uint32_t slots = p->input_count + p->output_count;
  const int replan = (flags & TRV_SESSION_REPLAN) != 0;
  int data = 0;
  for (uint32_t i = 0; i < p->dim_count; i++) data |= p->dims[i].op == TRV_DIM_OP_DATA;
  out->regions = take(r, p->region_count, sizeof(trv_buf), 8);
  out->slots = take(r, slots, sizeof(trvi_slot), 8);
  out->tensors = take(r, slots, sizeof(trv_tensor), 8);
  out->dims = take(r, (size_t)p->dim_count << data, sizeof(trv_dim), 8);
  out->steps = take(r, p->step_count, sizeof(trvi_step), 8);
  out->places = take(r, replan ? p->storage_count : 0, sizeof(trvi_place), 8);
  out->needs = take(r, replan ? p->region_count : 0, sizeof(size_t), 8);
  out->order = take(r, replan ? p->storage_count : 0, 2 * sizeof(uint32_t), 4);
  if (!replan) out->places = NULL;
  if (s && data) s->seen = s->dims + p->dim_count;
  return s;
}

/* ---- parts
 * ---------------------------------------------------------------------------------------------------------
 */
/* What drivers may look at before there is a session: the plan alone. */
static trv_view plan_view(const trvi_plan* p) {
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
  return v;
}

/* The first alternative of run step `step` that a device accepts: fills part_desc (its bytes
 * borrowed from the file). */
static trv_status choose(const trv_session_desc* desc, trv_fb* fb, const trvi_plan* p,
                         uint32_t step, const trv_view* view, trv_part_desc* out_part,
                         const trv_bound_device** out_on, size_t* out_bytes, trv_diag* d) {
  const trvf_step* st = &p->steps[step];
  trv_diag why;
  trvi_fail(&why, TRVI_NO_DEVICE);
  for (uint32_t i = 0; i < st->count; i++) {
    trvi_part part;
    trvi_part_read(fb, p, st->a + i, &part);
    if (fb->bad) return trvi_fail(d, TRVI_PART);
    for (uint32_t k = 0; k < desc->device_count; k++) {
      const trv_bound_device* on = &desc->devices[k];
      if (strcmp(on->driver->name, part.delegate) != 0) continue;
      if (part.segment >= 0) {
        const trv_status bad = trvi_segment(desc->program, (uint32_t)part.segment, &part.data, d);
        if (bad) return bad;
        if ((uintptr_t)part.data.data & 15) return trvi_fail(d, TRVI_PART);
      }
      const trv_part_desc pd = {sizeof(pd),   part.format,      part.data,         part.inputs,
                                part.outputs, part.input_count, part.output_count, view};
      trvi_fail(&why, TRVI_REFUSED);
      *out_bytes = 0;
      const trv_status answer = on->driver->part_need(on->device, &pd, out_bytes, &why);
      if (answer == TRV_OK) {
        *out_part = pd;
        *out_on = on;
        return TRV_OK;
      }
      why.status = answer;
      why.step = step;
      if (answer != TRV_UNSUPPORTED && answer != TRV_VERSION) {
        if (d) *d = why;
        return answer < 0 ? answer : TRV_DEVICE;
      }
    }
  }
  why.step = step;
  if (why.time == TRV_NONE) why.time = st->time;
  if (d) *d = why;
  return why.status;
}

/* Measures the parts, or opens them too where the session is given. */
static trv_status take_parts(room* r, const trv_session_desc* desc, trv_fb* fb, const trvi_plan* p,
                             trv_session* s, trv_diag* d) {
  const trv_view measure = plan_view(p);
  for (uint32_t i = 0; i < p->step_count; i++) {
    if (p->steps[i].kind != TRV_STEP_KIND_RUN) continue;
    const trv_bound_device* on = NULL;
    trv_part_desc pd;
    size_t bytes;
    trv_status st = choose(desc, fb, p, i, s ? &s->view : &measure, &pd, &on, &bytes, d);
    if (st) return st;
    void* mem = take(r, bytes, 1, 16);
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
} blueprint;

static trv_status measure(const trv_session_desc* desc, blueprint* b, trv_diag* d) {
  room r = {NULL, 0, 0};
  trv_status st = check_desc(desc, &b->fb, &b->plan, d);
  if (st) return st;
  take_arrays(&r, &b->plan, desc->flags);
  b->arrays = r.used;
  st = take_parts(&r, desc, &b->fb, &b->plan, NULL, d);
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

/* ---- regions
 * -------------------------------------------------------------------------------------------------------
 */
static trv_status check_buffer(uint32_t i, const trvf_region* r, const trv_buf* b, uint64_t need,
                               trv_diag* d) {
  if (need && (b->size < need || (!b->host && !b->dev))) {
    return trvi_fail_at(d, TRVI_REGION_ROOM, i, trvi_clamp(need),
                        b->host || b->dev ? (trv_dim)b->size : 0);
  }
  if (b->host && ((uintptr_t)b->host & (r->align - 1))) {
    return trvi_fail_at(d, TRVI_REGION_ALIGN, i, (trv_dim)r->align,
                        (trv_dim)((uintptr_t)b->host & (r->align - 1)));
  }
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
      if (!own) {
        trv_span bytes = {NULL, 0};
        st = trvi_segment(s->program, (uint32_t)r->segment, &bytes, d);
        b->host = (uint8_t*)(uintptr_t)bytes.data; /* read only: verifier and drivers see to it */
        b->dev = 0;
        b->size = (size_t)need;
      }
    }
    if (!st) st = check_buffer(i, r, b, need, d);
    if (!st && own) st = fill(s, i, d);
    if (st) return st;
    /* nothing is read there, but addresses are formed */
    if (!b->host && !b->dev && need == 0) b->host = (uint8_t*)s;
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

  room r = {mem, 0, 0};
  memset(mem, 0, b.arrays);
  trv_session* s = take_arrays(&r, &b.plan, desc->flags);
  const trvi_plan* p = &s->plan;
  s->plan = b.plan;
  s->program = desc->program;
  s->flags = desc->flags;
  s->max_steps = desc->size >= sizeof(*desc) ? desc->max_steps : 0;
  if (s->places) trvi_replan_init(s);
  s->view = plan_view(p);
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
  st = open_regions(s, desc, out_diag);
  if (!st) st = take_parts(&r, desc, &b.fb, p, s, out_diag);
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
  for (uint32_t i = sess->plan.step_count; i-- > 0;) {
    trvi_step* t = &sess->steps[i];
    if (t->on && t->on->driver->part_close) t->on->driver->part_close(t->on->device, t->part);
    t->on = NULL;
  }
}

trv_status trv_session_reset(trv_session* sess) {
  if (!sess) return TRV_ARGUMENT;
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
/* Points slot i's region at the buffer, or back home. Sizes are good; only addresses change. */
static void point_slot(trv_session* s, uint32_t i, const trv_buf* buf) {
  trvi_slot* t = &s->slots[i];
  if (buf->host) {
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
}

/* Bytes of a slot whose dims are in t->dim or, for outputs, in the table; -1 where not
 * representable. */
static trv_dim slot_bytes(const trvf_value* v, const trv_dim* dim) {
  trv_dim bytes = (trv_dim)trv_dtype_size(v->dtype);
  for (uint32_t k = 0; k < v->rank; k++)
    if (trvi_mul(bytes, dim[k], &bytes)) return -1;
  return bytes;
}

static trv_status check_slot_buffer(trv_session* s, const trvf_value* v, uint32_t i, trv_dim bytes,
                                    const trv_buf* buf) {
  if (bytes < 0) return trvi_fail_of(&s->diag, TRVI_TOO_MUCH, i);
  if (!buf->host) return TRV_OK;
  if (buf->size < (size_t)bytes)
    return trvi_fail_at(&s->diag, TRVI_BUFFER_ROOM, i, bytes, (trv_dim)buf->size);
  const size_t element = trv_dtype_size(v->dtype);
  if ((uintptr_t)buf->host & (element - 1)) {
    return trvi_fail_at(&s->diag, TRVI_BUFFER_ALIGN, i, (trv_dim)element,
                        (trv_dim)((uintptr_t)buf->host & (element - 1)));
  }
  return TRV_OK;
}

trv_status trv_session_bind_input(trv_session* sess, uint32_t i, uint32_t dtype, uint32_t rank,
                                  const int64_t* dims, trv_buf buf) {
  if (!sess) return TRV_ARGUMENT;
  trv_session* s = sess;
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
  const trv_status st = check_slot_buffer(s, v, i, slot_bytes(v, now), &buf);
  if (st) return st;
  if (changed) {
    memcpy(t->dim, now, rank * sizeof(*now));
    t->known = 1;
    s->dirty |= TRVI_DIRTY_SHAPES;
  }
  point_slot(s, i, &buf);
  return TRV_OK;
}

trv_status trv_session_bind_output(trv_session* sess, uint32_t i, trv_buf buf) {
  if (!sess) return TRV_ARGUMENT;
  trv_session* s = sess;
  if (i >= s->plan.output_count) {
    return trvi_fail_at(&s->diag, TRVI_NO_SLOT, i, (trv_dim)s->plan.output_count - 1, (trv_dim)i);
  }
  const uint32_t slot = s->plan.input_count + i;
  const trvf_value* v = &s->plan.values[s->plan.outputs[i]];
  const int fixed = s->slots[slot].known;
  const trv_status st =
      check_slot_buffer(s, v, i, fixed ? slot_bytes(v, s->slots[slot].dim) : 0, &buf);
  if (st) return st;
  if (!fixed) s->dirty |= TRVI_DIRTY_PLACES;
  point_slot(s, slot, &buf);
  return TRV_OK;
}

trv_status trv_session_bind_region(trv_session* sess, uint32_t i, trv_buf buf) {
  if (!sess) return TRV_ARGUMENT;
  trv_session* s = sess;
  const trvf_region* r = i < s->plan.region_count ? &s->plan.regions[i] : NULL;
  if (!r || (r->kind != TRV_REGION_KIND_ARENA && r->kind != TRV_REGION_KIND_STATE))
    return trvi_fail_of(&s->diag, TRVI_NO_REGION, i);
  const uint64_t need = r->kind == TRV_REGION_KIND_ARENA && s->places ? 0 : r->size;
  const trv_status st = check_buffer(i, r, &buf, need, &s->diag);
  if (st) return st;
  s->regions[i] = buf;
  if (!buf.host && !buf.dev) s->regions[i].host = (uint8_t*)s;
  s->dirty |= TRVI_DIRTY_PLACES;
  s->run.epoch++;
  return TRV_OK;
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
  trvi_diag_clear(&s->diag);
  /* with data-dependent sizes the packer needs the bound again whenever it may run */
  if (s->seen && s->places) s->dirty |= TRVI_DIRTY_SHAPES;
  if (s->dirty & TRVI_DIRTY_SHAPES) st = plan_shapes(s);
  if (!st && s->places && !s->seen) st = trvi_replan(s);
  if (st) return st;
  for (uint32_t i = 0; s->places && i < s->plan.region_count; i++) {
    if (s->needs[i] == 0) continue;
    st = check_buffer(i, &s->plan.regions[i], &s->regions[i], s->needs[i], &s->diag);
    if (st) return st;
  }
  for (uint32_t i = 0; i < s->plan.input_count + s->plan.output_count; i++)
    if (!s->slots[i].bound) trvi_slot_home(s, i);
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
