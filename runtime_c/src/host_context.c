/* host_context.c - contexts: a session per entry, over buffers that they share, on the devices of a
 * host. Built on the public API alone. */
#include <stdlib.h>
#include <string.h>

#include "host_private.h"

/* A buffer shared by regions of several entries. */
typedef struct block {
  trv_buf buf;
  uint32_t id; /* STATE: the region's id; ARENA: its position among the entry's arenas */
  uint32_t kind;
  uint32_t device; /* whose memory, or TRV_NONE */
  size_t align;
} block;

struct trv_context {
  trv_host* host;
  crew own; /* where it does not share the host's */
  uint32_t entry_count, block_count, device_count;
  trv_bound_device devices[TRVI_DEVICES];
  trv_session** sessions;
  void** memories;   /* of the sessions */
  size_t* sizes;     /* of memories */
  uint32_t** blocks; /* by entry and region: index into block, or TRV_NONE */
  uint32_t** homes;  /* by entry and region: position of the device, or TRV_NONE */
  uint32_t* regions; /* by entry: how many */
  block* block;
};

/* ---- buffers ---- */
static size_t device_align(const trv_bound_device* on, size_t align) {
  trv_caps caps;
  memset(&caps, 0, sizeof(caps));
  caps.size = sizeof(caps);
  on->driver->caps(on->device, &caps);
  return caps.alignment > align ? caps.alignment : align;
}

static int make_buffer(const trv_context* c, uint32_t device, size_t size, size_t align,
                       trv_buf* out) {
  memset(out, 0, sizeof(*out));
  if (device == TRV_NONE) {
    out->host = trvi_new(size, align);
    out->size = size;
    return out->host != NULL;
  }
  const trv_bound_device* on = &c->devices[device];
  return on->driver->mem_alloc && on->driver->mem_free &&
         on->driver->mem_alloc(on->device, size + !size, device_align(on, align), out) == TRV_OK;
}

static void free_buffer(const trv_context* c, uint32_t device, trv_buf* buf) {
  if (device == TRV_NONE)
    trvi_delete(buf->host);
  else if (buf->dev)
    c->devices[device].driver->mem_free(c->devices[device].device, buf);
  memset(buf, 0, sizeof(*buf));
}

/* The block that region i of an entry shares with the other entries; made when new. arena: its
 * position. */
static uint32_t find_block(trv_context* c, const trv_region* r, uint32_t arena, uint32_t device) {
  const uint32_t id = r->kind == TRV_REGION_KIND_STATE ? r->id : arena;
  uint32_t i = 0;
  while (i < c->block_count &&
         (c->block[i].kind != r->kind || c->block[i].id != id || c->block[i].device != device))
    i++;
  if (i == c->block_count) {
    memset(&c->block[i], 0, sizeof(c->block[i]));
    c->block[i].kind = r->kind;
    c->block[i].id = id;
    c->block[i].device = device;
    c->block_count++;
  }
  if (r->align > c->block[i].align) c->block[i].align = r->align;
  return i;
}

static int grow_block(trv_context* c, block* b, uint64_t size) {
  trv_buf made;
  if (size <= b->buf.size && (b->buf.host || b->buf.dev)) return 1;
  if (size > SIZE_MAX / 2 || !make_buffer(c, b->device, (size_t)size, b->align, &made)) return 0;
  free_buffer(c, b->device, &b->buf);
  b->buf = made;
  return 1;
}

static int dynamic(const trv_program* prog, uint32_t entry, uint32_t regions) {
  trv_region r;
  for (uint32_t i = 0; i < regions; i++)
    if (trv_program_region(prog, entry, i, &r) == TRV_OK && (r.flags & 1)) return 1;
  return 0;
}

/* Which block each region of the entry is, and room in it for what is not planned again. */
static trv_status share_regions(trv_context* c, uint32_t e, int replan, trv_diag* d) {
  const trv_program* prog = &c->host->program;
  uint32_t arena = 0;
  for (uint32_t i = 0; i < c->regions[e]; i++) {
    trv_region r;
    const trv_status st = trv_program_region(prog, e, i, &r);
    if (st) return trvi_host_fail(d, st, "a region cannot be read");
    c->blocks[e][i] = TRV_NONE;
    if (r.kind != TRV_REGION_KIND_ARENA && r.kind != TRV_REGION_KIND_STATE) continue;
    const uint32_t k = c->blocks[e][i] = find_block(c, &r, arena, c->homes[e][i]);
    if (r.kind == TRV_REGION_KIND_ARENA) arena++;
    if (r.kind == TRV_REGION_KIND_ARENA && replan) continue;
    if (!grow_block(c, &c->block[k], r.size))
      return trvi_host_fail(d, TRV_MEMORY, "out of memory for a region");
  }
  return TRV_OK;
}

/* Constants `id` in the memory of a device; made when new, large enough for every entry. Under
 * lock. */
static shelf* find_shelf(trv_context* c, uint32_t id, uint32_t device) {
  trv_host* h = c->host;
  for (uint32_t i = 0; i < h->shelf_count; i++)
    if (h->shelves[i].id == id && h->shelves[i].on.device == c->devices[device].device)
      return &h->shelves[i];
  uint64_t size = 0;
  size_t align = 1;
  for (uint32_t e = 0; e < c->entry_count; e++) {
    trv_region r;
    for (uint32_t i = 0; i < c->regions[e]; i++) {
      if (trv_program_region(&h->program, e, i, &r) || r.id != id ||
          r.kind != TRV_REGION_KIND_CONST)
        continue;
      if (r.size > size) size = r.size;
      if (r.align > align) align = r.align;
    }
  }
  shelf* grown = realloc(h->shelves, (h->shelf_count + 1) * sizeof(*grown));
  if (!grown) return NULL;
  h->shelves = grown;
  shelf* out = &grown[h->shelf_count];
  memset(out, 0, sizeof(*out));
  out->id = id;
  out->on = c->devices[device];
  if (size > SIZE_MAX / 2 || !make_buffer(c, device, (size_t)size, align, &out->buf)) return NULL;
  h->shelf_count++;
  return out;
}

/* ---- sessions ---- */
static void describe(trv_context* c, uint32_t e, uint32_t flags, trv_session_desc* out) {
  memset(out, 0, sizeof(*out));
  out->size = sizeof(*out);
  out->entry = e;
  out->program = &c->host->program;
  out->devices = c->devices;
  out->device_count = c->device_count;
  out->flags = flags | (dynamic(out->program, e, c->regions[e]) ? TRV_SESSION_REPLAN : 0);
}

/* A device that may have a STATE in one entry and not in another has none of the memories: entries
 * share one state. *out_bad: such a device, or TRV_NONE. */
static trv_status find_homes(trv_context* c, uint32_t flags, uint32_t* out_bad, trv_diag* d) {
  *out_bad = TRV_NONE;
  c->block_count = 0;
  for (uint32_t e = 0; e < c->entry_count; e++) {
    trv_session_desc desc;
    trv_region r;
    describe(c, e, flags, &desc);
    const trv_status st = trv_session_homes(&desc, c->homes[e], d);
    if (st) return st;
    for (uint32_t i = 0; i < c->regions[e]; i++) {
      if (trv_program_region(desc.program, e, i, &r) || r.kind != TRV_REGION_KIND_STATE) continue;
      const uint32_t k = find_block(c, &r, 0, c->homes[e][i]);
      for (uint32_t j = 0; j < c->block_count; j++) {
        const block *a = &c->block[k], *b = &c->block[j];
        if (b->kind == a->kind && b->id == a->id && b->device != a->device)
          *out_bad = a->device == TRV_NONE ? b->device : a->device;
      }
    }
  }
  return TRV_OK;
}

static trv_status place(trv_context* c, uint32_t flags, trv_diag* d) {
  for (;;) {
    uint32_t bad;
    const trv_status st = find_homes(c, flags, &bad, d);
    c->block_count = 0;
    if (st || bad == TRV_NONE) return st;
    c->device_count--;
    memmove(&c->devices[bad], &c->devices[bad + 1], (c->device_count - bad) * sizeof(*c->devices));
  }
}

static trv_status init_session(trv_context* c, uint32_t e, trv_session_desc* desc, trv_buf* regions,
                               uint8_t* keep, trv_diag* d) {
  trv_status st = TRV_OK;
  int shelved = 0;
  desc->regions = regions;
  desc->keep = keep;
  for (uint32_t i = 0; i < c->regions[e]; i++) {
    if (c->blocks[e][i] != TRV_NONE) regions[i] = c->block[c->blocks[e][i]].buf;
    shelved |= c->homes[e][i] != TRV_NONE;
  }
  if (shelved) trvi_lock_take(c->host->lock); /* who comes first fills the constants */
  for (uint32_t i = 0; !st && shelved && i < c->regions[e]; i++) {
    trv_region r;
    if (c->homes[e][i] == TRV_NONE || trv_program_region(desc->program, e, i, &r) ||
        r.kind != TRV_REGION_KIND_CONST)
      continue;
    const shelf* s = find_shelf(c, r.id, c->homes[e][i]);
    if (!s) st = trvi_host_fail(d, TRV_MEMORY, "out of device memory for constants");
    if (!s) break;
    regions[i] = s->buf;
    keep[i] = s->filled >= r.size;
  }
  if (!st) st = trv_session_bytes(desc, &c->sizes[e], d);
  if (!st) {
    c->memories[e] = trvi_new(c->sizes[e], 1);
    st = c->memories[e] ? trv_session_init(desc, c->memories[e], c->sizes[e], &c->sessions[e], d)
                        : trvi_host_fail(d, TRV_MEMORY, "out of memory");
  }
  for (uint32_t i = 0; !st && shelved && i < c->regions[e]; i++) {
    trv_region r;
    if (c->homes[e][i] == TRV_NONE || trv_program_region(desc->program, e, i, &r) ||
        r.kind != TRV_REGION_KIND_CONST)
      continue;
    shelf* s = find_shelf(c, r.id, c->homes[e][i]);
    if (s && s->filled < r.size) s->filled = (size_t)r.size;
  }
  if (shelved) trvi_lock_give(c->host->lock);
  return st;
}

static trv_status open_session(trv_context* c, uint32_t e, uint32_t flags, const trv_runner* runner,
                               trv_diag* d) {
  trv_session_desc desc;
  describe(c, e, flags, &desc);
  desc.runner = runner;
  trv_buf* regions = calloc((size_t)c->regions[e] + 1, sizeof(*regions));
  uint8_t* keep = calloc((size_t)c->regions[e] + 1, 1);
  const trv_status st = regions && keep ? init_session(c, e, &desc, regions, keep, d)
                                        : trvi_host_fail(d, TRV_MEMORY, "out of memory");
  free(regions);
  free(keep);
  return st;
}

trv_status trv_context_open(trv_host* host, uint32_t flags, trv_context** out_ctx,
                            trv_diag* out_diag) {
  return trv_context_open_on(host, flags, NULL, out_ctx, out_diag);
}

trv_status trv_context_open_on(trv_host* host, uint32_t flags, const trv_threads* threads,
                               trv_context** out_ctx, trv_diag* out_diag) {
  if (out_ctx) *out_ctx = NULL;
  if (!host || !out_ctx) return trvi_host_fail(out_diag, TRV_ARGUMENT, "host or out_ctx is NULL");
  trv_status st = trvi_host_check(host, out_diag);
  if (st) return st;
  const trv_program* prog = &host->program;
  const uint32_t n = prog->entry_count;
  uint32_t total = 0;
  trv_entry info;
  trv_context* c = calloc(1, sizeof(*c));
  if (!c) return trvi_host_fail(out_diag, TRV_MEMORY, "out of memory");
  const trv_runner* runner = NULL;
  c->host = host;
  c->entry_count = n;
  c->device_count = host->devices.count;
  memcpy(c->devices, host->devices.bound, sizeof(c->devices));
  c->sessions = calloc((size_t)n + 1, sizeof(*c->sessions));
  c->memories = calloc((size_t)n + 1, sizeof(*c->memories));
  c->sizes = calloc((size_t)n + 1, sizeof(*c->sizes));
  c->blocks = calloc((size_t)n + 1, sizeof(*c->blocks));
  c->homes = calloc((size_t)n + 1, sizeof(*c->homes));
  c->regions = calloc((size_t)n + 1, sizeof(*c->regions));
  int ok = c->sessions && c->memories && c->sizes && c->blocks && c->homes && c->regions;
  for (uint32_t e = 0; ok && e < n; e++) {
    if (trv_program_entry(prog, e, &info)) info.region_count = 0;
    c->regions[e] = info.region_count;
    total += info.region_count;
    c->blocks[e] = calloc((size_t)info.region_count + 1, sizeof(**c->blocks));
    c->homes[e] = calloc((size_t)info.region_count + 1, sizeof(**c->homes));
    ok = c->blocks[e] && c->homes[e];
  }
  c->block = calloc((size_t)total + 1, sizeof(*c->block));
  if (!ok || !c->block) st = trvi_host_fail(out_diag, TRV_MEMORY, "out of memory");
  if (!st) st = trvi_host_runner(host, &c->own, threads, &runner, out_diag);
  if (!st) st = place(c, flags, out_diag);
  /* all regions first: buffers that entries share grow to the largest */
  for (uint32_t e = 0; !st && e < n; e++) {
    const int replan = (flags & TRV_SESSION_REPLAN) || dynamic(prog, e, c->regions[e]);
    st = share_regions(c, e, replan, out_diag);
  }
  for (uint32_t e = 0; !st && e < n; e++) st = open_session(c, e, flags, runner, out_diag);
  if (st) {
    trv_context_close(c);
    return st;
  }
  *out_ctx = c;
  return TRV_OK;
}

void trv_context_close(trv_context* ctx) {
  if (!ctx) return;
  for (uint32_t e = 0; e < ctx->entry_count; e++) {
    if (ctx->sessions) trv_session_deinit(ctx->sessions[e]);
    if (ctx->memories) trvi_delete(ctx->memories[e]);
    if (ctx->blocks) free(ctx->blocks[e]);
    if (ctx->homes) free(ctx->homes[e]);
  }
  for (uint32_t i = 0; i < ctx->block_count; i++)
    free_buffer(ctx, ctx->block[i].device, &ctx->block[i].buf);
  trvi_pool_close(ctx->own.pool);
  free(ctx->sessions);
  free(ctx->memories);
  free(ctx->sizes);
  free(ctx->blocks);
  free(ctx->homes);
  free(ctx->regions);
  free(ctx->block);
  free(ctx);
}

trv_session* trv_context_session(trv_context* ctx, uint32_t entry) {
  return ctx && entry < ctx->entry_count ? ctx->sessions[entry] : NULL;
}

/* Gives block k its new buffer in every session that uses it. */
static trv_status rebind(trv_context* c, uint32_t k) {
  for (uint32_t e = 0; e < c->entry_count; e++) {
    for (uint32_t i = 0; i < c->regions[e]; i++) {
      if (c->blocks[e][i] != k) continue;
      const trv_status st = trv_session_bind_region(c->sessions[e], i, c->block[k].buf);
      if (st) return st;
    }
  }
  return TRV_OK;
}

/* Entries share memory: what another one does must be over. */
static void end_others(trv_context* c, uint32_t entry) {
  for (uint32_t e = 0; e < c->entry_count; e++) {
    const trv_event run = {NULL, NULL, 0, c->sessions[e]};
    if (e != entry && trv_event_wait(&run, UINT64_MAX)) continue; /* its own affair */
  }
}

trv_status trv_context_plan(trv_context* ctx, uint32_t entry) {
  if (!ctx || entry >= ctx->entry_count) return TRV_ARGUMENT;
  trv_session* s = ctx->sessions[entry];
  end_others(ctx, entry);
  trv_status st = trv_session_plan(s);
  /* each round makes one arena large enough */
  for (uint32_t round = 0; st == TRV_MEMORY && round <= ctx->regions[entry]; round++) {
    const trv_diag* d = trv_session_diag(s);
    const uint32_t k = d->value < ctx->regions[entry] ? ctx->blocks[entry][d->value] : TRV_NONE;
    if (k == TRV_NONE || d->expected < 0) return st;
    const uint64_t need = (uint64_t)d->expected, half = ctx->block[k].buf.size / 2;
    /* half as much again at least, so that slowly growing sizes do not allocate each time */
    if (!grow_block(ctx, &ctx->block[k],
                    ctx->block[k].buf.size + half > need ? ctx->block[k].buf.size + half : need) &&
        !grow_block(ctx, &ctx->block[k], need))
      return st;
    st = rebind(ctx, k);
    if (!st) st = trv_session_plan(s);
  }
  return st;
}

trv_status trv_context_run(trv_context* ctx, uint32_t entry) {
  const trv_status st = trv_context_plan(ctx, entry);
  return st ? st : trv_session_run(ctx->sessions[entry]);
}

trv_status trv_context_submit(trv_context* ctx, uint32_t entry, trv_event* out_done) {
  const trv_status st = trv_context_plan(ctx, entry);
  return st ? st : trv_session_submit(ctx->sessions[entry], out_done);
}

trv_status trv_context_call(trv_context* ctx, uint32_t entry, const trv_buf* inputs,
                            uint32_t input_count, const trv_buf* outputs, uint32_t output_count) {
  if (!ctx || entry >= ctx->entry_count) return TRV_ARGUMENT;
  trv_session* s = ctx->sessions[entry];
  trv_status st = TRV_OK;
  for (uint32_t i = 0; !st && i < input_count; i++) {
    const trv_tensor* t = trv_session_input(s, i);
    st = t ? trv_session_bind_input(s, i, t->dtype, t->rank, NULL, inputs[i]) : TRV_ARGUMENT;
  }
  if (trv_session_input(s, input_count)) return TRV_ARGUMENT;
  for (uint32_t i = 0; !st && i < output_count; i++) st = trv_session_bind_output(s, i, outputs[i]);
  return st ? st : trv_context_run(ctx, entry);
}

trv_status trv_context_reset(trv_context* ctx) {
  if (!ctx) return TRV_ARGUMENT;
  end_others(ctx, TRV_NONE);
  for (uint32_t e = 0; e < ctx->entry_count; e++) {
    const trv_status st = trv_session_reset(ctx->sessions[e]);
    if (st) return st;
  }
  return TRV_OK;
}

size_t trv_context_bytes(const trv_context* ctx) {
  size_t n = sizeof(*ctx);
  for (uint32_t e = 0; e < ctx->entry_count; e++) n += ctx->sizes[e];
  for (uint32_t i = 0; i < ctx->block_count; i++) n += ctx->block[i].buf.size;
  return n;
}
