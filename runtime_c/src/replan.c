/* replan.c - packs arenas again for the sizes of a run: in the planner's order, each storage at the
 * lowest place that is free for its whole life. */
#include "private.h"

/* The arena that storage k lies in, TRV_NONE: none, or the caller's buffer has taken its place. */
static uint32_t arena_of(const trv_session* s, uint32_t k) {
  const uint32_t region = s->plan.storages[k].region;
  const trvf_region* r = &s->plan.regions[region];
  if (r->kind == TRV_REGION_KIND_ARENA) return region;
  if (r->kind == TRV_REGION_KIND_IO && !s->slots[r->slot].bound) return r->home;
  return TRV_NONE;
}

/* Bytes storage k needs for the present dims. Where the bound is not finite, the file's size stands
 * in: too little is found by the extents. */
static size_t bytes_of(const trv_session* s, uint32_t k) {
  const trvf_storage* g = &s->plan.storages[k];
  if (g->size_dim == 0) return (size_t)trvi_clamp(g->size);
  const trv_dim v = s->dims[g->size_dim];
  if (v < 0) return 0;
  return v > PTRDIFF_MAX / 4 ? (size_t)trvi_clamp(g->size) : (size_t)v;
}

static int before(const trv_session* s, uint32_t a, uint32_t b) {
  const uint32_t ra = s->plan.storages[a].rank, rb = s->plan.storages[b].rank;
  return ra != rb ? ra < rb : a < b;
}

/* Shell sort by (rank, id): no recursion, no memory, close to n log n at these sizes. */
void trvi_replan_init(trv_session* s) {
  const uint32_t n = s->plan.storage_count;
  s->placed = s->order + n;
  uint32_t gap = 1;
  for (uint32_t i = 0; i < n; i++) {
    s->order[i] = i;
    s->places[i].offset = s->plan.storages[i].offset;
  }
  while (gap < n / 3) gap = 3 * gap + 1;
  for (; gap > 0; gap /= 3) {
    for (uint32_t i = gap; i < n; i++) {
      const uint32_t item = s->order[i];
      uint32_t j = i;
      for (; j >= gap && before(s, item, s->order[j - gap]); j -= gap)
        s->order[j] = s->order[j - gap];
      s->order[j] = item;
    }
  }
}

/* Is every storage still large enough? Then the last plan serves. */
static int still_fits(const trv_session* s) {
  for (uint32_t k = 0; k < s->plan.storage_count; k++)
    if (arena_of(s, k) != TRV_NONE && bytes_of(s, k) > s->places[k].size) return 0;
  return 1;
}

static size_t align_up(size_t v, size_t align) { return (v + align - 1) & ~(align - 1); }

trv_status trvi_replan(trv_session* s) {
  const trvi_plan* p = &s->plan;
  uint32_t placed = 0;
  if (still_fits(s)) return TRV_OK;
  memset(s->needs, 0, p->region_count * sizeof(*s->needs));
  for (uint32_t i = 0; i < p->storage_count; i++) {
    const uint32_t k = s->order[i], arena = arena_of(s, k);
    const trvf_storage* g = &p->storages[k];
    trvi_place* mine = &s->places[k];
    const size_t size = arena == TRV_NONE ? 0 : bytes_of(s, k);
    size_t align = (size_t)1 << g->align_log2, at = 0;
    mine->size = size;
    if (arena == TRV_NONE) continue;
    mine->offset = 0;
    if (size == 0) continue;
    if (align < p->regions[g->region].align && g->region != arena)
      align = p->regions[g->region].align;
    /* placed[] is sorted by offset: the first gap below the next conflict is the lowest place */
    for (uint32_t j = 0; j < placed; j++) {
      const trvf_storage* o = &p->storages[s->placed[j]];
      const trvi_place* other = &s->places[s->placed[j]];
      if (o->last < g->first || o->first > g->last || arena_of(s, s->placed[j]) != arena) continue;
      if ((size_t)other->offset >= at + size) break;
      const size_t end = align_up((size_t)(other->offset + other->size), align);
      if (end > at) at = end;
    }
    if (at > SIZE_MAX / 4 || size > SIZE_MAX / 4) /* sums of two of these cannot overflow */
      return trvi_fail_of(&s->diag, TRVI_TOO_MUCH, arena);
    mine->offset = at;
    if (at + size > s->needs[arena]) s->needs[arena] = at + size;
    uint32_t j = placed++;
    for (; j > 0 && s->places[s->placed[j - 1]].offset > at; j--) s->placed[j] = s->placed[j - 1];
    s->placed[j] = k;
  }
  /* the region of a slot begins where its storage was placed */
  for (uint32_t i = 0; i < p->input_count + p->output_count; i++) {
    if (s->slots[i].bound) continue;
    s->slots[i].home = (size_t)s->places[s->slots[i].storage].offset;
    s->places[s->slots[i].storage].offset = 0;
  }
  return TRV_OK;
}
