/* verify.c - proves, before anything runs, all that can be proved of an entry without knowing
 * sizes.
 *
 * After it, indices of rows, regions, storages, values, parts and steps are in range everywhere,
 * storages lie in their regions and regions in their segments, and storages that live at the same
 * time do not overlap. What depends on sizes (values inside their storages) is proved by shape.c
 * whenever sizes change; what is inside parts, by their drivers.
 *
 * Each function returns a fault (faults.h) or TRVI_NO_FAULT, with the row that is wrong in *at.
 */
#include "private.h"

static int row_ok(const trvi_plan* p, uint32_t i) {
  const trvf_dim* r = &p->dims[i];
  if (r->op >= TRV_DIM_OP_COUNT || r->min > r->max) return 0;
  if (r->op == TRV_DIM_OP_CONST)
    return r->min == r->max && r->min >= -PTRDIFF_MAX && r->max <= PTRDIFF_MAX;
  if (r->op == TRV_DIM_OP_DATA) return r->min >= 0 && r->min <= PTRDIFF_MAX;
  if (r->op != TRV_DIM_OP_INPUT) return r->a < i && r->b < i;
  return r->min >= 0 && r->a < p->input_count && p->inputs[r->a] < p->value_count &&
         r->b < p->values[p->inputs[r->a]].rank;
}

static int verify_dims(const trvi_plan* p, uint32_t* at) {
  for (*at = 0; *at < p->dim_count; ++*at)
    if (!row_ok(p, *at)) return TRVI_ROW;
  for (*at = 0; *at < 2; ++*at) {
    if (*at >= p->dim_count || p->dims[*at].op != TRV_DIM_OP_CONST ||
        p->dims[*at].min != (int64_t)*at)
      return TRVI_ROW;
  }
  return TRVI_NO_FAULT;
}

static int region_ok(const trv_program* prog, const trvi_plan* p, const trvf_region* r) {
  if (r->kind >= TRV_REGION_KIND_COUNT || !trvi_power_of_two(r->align) || r->size > INT64_MAX)
    return 0;
  if (r->kind == TRV_REGION_KIND_CONST || (r->kind == TRV_REGION_KIND_STATE && r->segment != -1))
    return (uint32_t)r->segment < prog->segment_count && r->size <= prog->segments[r->segment].size;
  if (r->kind != TRV_REGION_KIND_IO) return 1;
  if (r->slot >= p->input_count + p->output_count || r->home >= p->region_count) return 0;
  const trvf_region* home = &p->regions[r->home];
  return home->kind == TRV_REGION_KIND_ARENA && home->align >= r->align &&
         r->home_offset <= home->size && r->size <= home->size - r->home_offset &&
         (r->home_offset & (r->align - 1)) == 0;
}

static int verify_regions(const trv_program* prog, trv_fb* fb, const trvi_plan* p, uint32_t* at) {
#ifndef TRV_ONE_MEMORY
  const uint32_t memories = trvi_memory_count(prog, fb);
#else
  (void)fb;
#endif
  for (*at = 0; *at < p->region_count; ++*at) {
    const trvf_region* r = &p->regions[*at];
    if (*at > 0xFFFE || !region_ok(prog, p, r)) return TRVI_REGION;
#ifndef TRV_ONE_MEMORY
    if (r->memory >= (memories ? memories : TRVI_MEMORIES) ||
        (r->kind == TRV_REGION_KIND_IO && memories && p->regions[r->home].memory != r->memory))
      return TRVI_REGION;
#endif
  }
  return TRVI_NO_FAULT;
}

static int storage_ok(const trvi_plan* p, const trvf_storage* s) {
  if (s->region >= p->region_count || s->first > s->last || s->last >= p->times ||
      s->size_dim >= p->dim_count || s->align_log2 > 30)
    return 0;
  const trvf_region* r = &p->regions[s->region];
  const uint32_t align = (uint32_t)1 << s->align_log2;
  if (align > r->align || ((uint32_t)s->offset & (align - 1)) || s->offset > r->size ||
      s->size > r->size - s->offset)
    return 0;
  if (r->kind == TRV_REGION_KIND_ARENA) return 1;
  if (r->kind == TRV_REGION_KIND_IO) return s->offset == 0;
  return s->first == 0 && s->last == p->times - 1;
}

/* Also that rows are sorted by first. */
static int verify_storages(const trvi_plan* p, uint32_t* at) {
  uint32_t before = 0;
  for (*at = 0; *at < p->storage_count; ++*at) {
    const trvf_storage* s = &p->storages[*at];
    if (s->first < before || !storage_ok(p, s)) return TRVI_STORAGE;
    before = s->first;
  }
  return TRVI_NO_FAULT;
}

/* Where a storage's bytes are while the caller binds nothing. Returns the arena or state region,
 * TRV_NONE for CONST. */
static uint32_t resting_place(const trvi_plan* p, const trvf_storage* s, uint64_t* begin) {
  const trvf_region* r = &p->regions[s->region];
  *begin = s->offset;
  if (r->kind == TRV_REGION_KIND_CONST || s->size == 0) return TRV_NONE;
  if (r->kind != TRV_REGION_KIND_IO) return s->region;
  *begin += r->home_offset;
  return r->home;
}

/* Storages are sorted by first, so those that may meet storage i begin within its life and follow
 * it. */
static int verify_overlap(const trvi_plan* p, uint32_t* work, uint32_t* at) {
  for (*at = 0; *at < p->storage_count; ++*at) {
    const trvf_storage* a = &p->storages[*at];
    uint64_t begin, other;
    const uint32_t place = resting_place(p, a, &begin);
    const uint64_t end = begin + a->size;
    if (place == TRV_NONE) continue;
    for (uint32_t j = *at + 1; j < p->storage_count && p->storages[j].first <= a->last; j++) {
      const trvf_storage* b = &p->storages[j];
      if (resting_place(p, b, &other) == place && other < end && begin < other + b->size)
        return TRVI_OVERLAP;
      if (--*work == 0) return TRVI_CROWD;
    }
  }
  return TRVI_NO_FAULT;
}

static int value_ok(const trvi_plan* p, const trvf_value* v) {
  const size_t element = trv_dtype_size(v->dtype);
  if (v->storage >= p->storage_count || element == 0 || v->rank > TRV_MAX_RANK ||
      v->shift >= p->dim_count)
    return 0;
  const trvf_storage* s = &p->storages[v->storage];
  for (uint32_t k = 0; k < v->rank; k++)
    if (v->dim[k] >= p->dim_count || v->stride[k] >= p->dim_count) return 0;
  return v->offset <= s->size && ((uint32_t)v->offset & (element - 1)) == 0 &&
         (element >> s->align_log2) <= 1;
}

static int verify_values(const trvi_plan* p, uint32_t* at) {
  for (*at = 0; *at < p->value_count; ++*at)
    if (!value_ok(p, &p->values[*at])) return TRVI_VALUE;
  return TRVI_NO_FAULT;
}

/* Each slot's value is the whole of the only storage of a region of its own: each slot in a region
 * that names it, and as many IO storages as slots. */
static int verify_slots(const trvi_plan* p, uint32_t* at) {
  const uint32_t slots = p->input_count + p->output_count;
  uint32_t storages = 0;
  for (*at = 0; *at < slots; ++*at) {
    const uint32_t id = trvi_slot_value(p, *at);
    if (id >= p->value_count) return TRVI_SLOT;
    const trvf_value* v = &p->values[id];
    const trvf_storage* s = &p->storages[v->storage];
    const trvf_region* r = &p->regions[s->region];
    if (r->kind != TRV_REGION_KIND_IO || r->slot != *at || v->offset != 0 || v->shift != 0 ||
        (*at < p->input_count ? s->first != 0 : s->last != p->times - 1))
      return TRVI_SLOT;
  }
  for (uint32_t i = 0; i < p->storage_count; i++)
    storages += p->regions[p->storages[i].region].kind == TRV_REGION_KIND_IO;
  return storages == slots ? TRVI_NO_FAULT : TRVI_SLOT;
}

int trvi_writable(const trvi_plan* p, uint32_t id) {
  const trvf_region* r = &p->regions[p->storages[p->values[id].storage].region];
  return r->kind != TRV_REGION_KIND_CONST &&
         (r->kind != TRV_REGION_KIND_IO || r->slot >= p->input_count);
}

static int verify_steps(const trvi_plan* p, uint32_t* at) {
  uint32_t next_part = 0, worked = TRV_NONE, before = 0;
  for (*at = 0; *at < p->step_count; ++*at) {
    const trvf_step* s = &p->steps[*at];
    int ok = s->time < p->times && s->time >= before && s->kind < TRV_STEP_KIND_COUNT;
    before = s->time;
    if (s->kind == TRV_STEP_KIND_COPY || s->kind == TRV_STEP_KIND_BRANCH)
      ok = ok && s->a < p->value_count;
    if (s->kind == TRV_STEP_KIND_BRANCH) ok = ok && p->values[s->a].dtype == TRV_DTYPE_BOOL;
    if (s->kind == TRV_STEP_KIND_COPY) {
      ok = ok && s->b < p->value_count && p->values[s->a].dtype == p->values[s->b].dtype &&
           p->values[s->a].rank == p->values[s->b].rank && trvi_writable(p, s->b);
    } else if (s->kind == TRV_STEP_KIND_RUN) { /* each part belongs to one step: opening all of them
                                                  is linear */
      ok = ok && s->count > 0 && s->a >= next_part && s->a < p->part_count &&
           s->count <= p->part_count - s->a;
      next_part = s->a + s->count;
    } else { /* going back: over some work at least */
      ok = ok && s->b <= p->step_count && (s->b > *at || (worked != TRV_NONE && worked >= s->b));
    }
    if (s->kind <= TRV_STEP_KIND_COPY) worked = *at;
    if (!ok) return TRVI_STEP;
  }
  return TRVI_NO_FAULT;
}

#ifndef TRV_ONE_MEMORY
/* Sorted, and each for an earlier step. */
static int verify_waits(const trvi_plan* p, uint32_t* at) {
  for (*at = 0; *at < p->wait_count; ++*at) {
    const trvf_wait* w = &p->waits[*at];
    if (w->step >= p->step_count || w->on >= w->step) return TRVI_STEP;
    if (*at && (w->step < w[-1].step || (w->step == w[-1].step && w->on <= w[-1].on)))
      return TRVI_STEP;
  }
  return TRVI_NO_FAULT;
}
#endif

static int verify_parts(const trv_program* prog, trv_fb* fb, const trvi_plan* p, uint32_t* work,
                        uint32_t* at) {
  for (*at = 0; *at < p->part_count; ++*at) {
    trvi_part part;
    trvi_part_read(fb, p, *at, &part);
    int ok = !fb->bad && part.delegate && part.format && ((uintptr_t)part.data.data & 15) == 0 &&
             (part.segment == -1 || (uint32_t)part.segment < prog->segment_count);
    const uint32_t bytes = (uint32_t)part.data.size + part.input_count +
                           part.output_count; /* of one head: below 2^31 */
    ok = ok && bytes < *work;
    for (uint32_t k = 0; ok && k < part.input_count; k++) ok = part.inputs[k] < p->value_count;
    for (uint32_t k = 0; ok && k < part.output_count; k++)
      ok = part.outputs[k] < p->value_count && trvi_writable(p, part.outputs[k]);
    if (!ok) return TRVI_PART;
    *work -= bytes;
  }
  return TRVI_NO_FAULT;
}

int trvi_verify_entry(const trv_program* prog, trv_fb* fb, const trvi_plan* p, uint32_t* work,
                      uint32_t* at) {
  uint32_t rows = trvi_names_check(fb, p);
  for (uint32_t i = 0; i < TRVI_VECTORS; i++)
    rows += p->counts[i]; /* each is at most 2^31 / 4: no overflow */
  if (fb->bad || rows >= *work || p->times == 0) return TRVI_ENTRY;
  *work -= rows;
  int fault = verify_dims(p, at);
  if (!fault) fault = verify_regions(prog, fb, p, at);
  if (!fault) fault = verify_storages(p, at);
  if (!fault) fault = verify_values(p, at);
  if (!fault) fault = verify_slots(p, at);
  if (!fault) fault = verify_steps(p, at);
#ifndef TRV_ONE_MEMORY
  if (!fault) fault = verify_waits(p, at);
#endif
  if (!fault) fault = verify_parts(prog, fb, p, work, at);
  if (!fault) fault = verify_overlap(p, work, at);
  return fault;
}
