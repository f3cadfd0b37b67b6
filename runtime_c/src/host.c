/* host.c - trivet on a machine with files, malloc and threads. The only file of the runtime that
 * uses them, together with host_pool.c; built on the public API alone. */
#if !defined(_WIN32)
#define _GNU_SOURCE /* madvise */
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "host_check.h"
#include "host_pool.h"
#include "trivet/trivet.h"

#define BASE_ALIGN 64u
#define HUGE_PAGE ((size_t)1 << 21)

/* A file's bytes: mapped, or read where there is no mmap. */
typedef struct mapping {
  trv_span span;
  int owned;
} mapping;

/* Who runs tiles. pool: NULL where the app does, or one thread. */
typedef struct crew {
  int made;
  trvi_pool* pool;
  trv_runner runner;
} crew;

struct trv_host {
  trv_program program;
  mapping file, weights;
  crew crew; /* of contexts that ask for none of their own; made by the first of them */
  uint32_t threads;
  trv_bound_device device;
  void* device_memory;
  int unchecked; /* CRCs were deferred and nobody has needed them yet */
#if !defined(_WIN32)
  pthread_mutex_t lock; /* of unchecked, crew */
#endif
};

/* A buffer shared by regions of several entries. */
typedef struct block {
  trv_buf buf;
  uint32_t id; /* STATE: the region's id; ARENA: its position among the entry's arenas */
  uint32_t kind;
  size_t align;
} block;

struct trv_context {
  trv_host* host;
  crew own; /* where it does not share the host's */
  uint32_t entry_count, block_count;
  trv_session** sessions;
  void** memories;   /* of the sessions */
  size_t* sizes;     /* of memories */
  uint32_t** blocks; /* by entry and region: index into block, or TRV_NONE */
  uint32_t* regions; /* by entry: how many */
  block* block;
};

static trv_status fail(trv_diag* d, trv_status status, const char* what) {
  if (d) {
    memset(d, 0, sizeof(*d));
    d->status = status;
    d->step = d->time = d->value = d->axis = TRV_NONE;
    d->what = what;
  }
  return status;
}

static void lock(trv_host* h) {
#if !defined(_WIN32)
  pthread_mutex_lock(&h->lock);
#else
  (void)h;
#endif
}

static void unlock(trv_host* h) {
#if !defined(_WIN32)
  pthread_mutex_unlock(&h->lock);
#else
  (void)h;
#endif
}

/* ---- memory and files
 * ---------------------------------------------------------------------------------------------- */
static void* aligned_new(size_t size, size_t align) {
  if (align < BASE_ALIGN) align = BASE_ALIGN;
  if (size > SIZE_MAX - align) return NULL;
#if defined(_WIN32)
  return _aligned_malloc(size + !size, align);
#else
  void* p = NULL;
#if defined(MADV_HUGEPAGE)
  /* what is large comes in large pages: fewer faults in the first run, fewer misses in all */
  const int large = size >= 2 * HUGE_PAGE && size <= SIZE_MAX - HUGE_PAGE;
  if (large && align < HUGE_PAGE) align = HUGE_PAGE;
#endif
  if (posix_memalign(&p, align, size + !size)) return NULL;
#if defined(MADV_HUGEPAGE)
  if (large) (void)madvise(p, size & ~(HUGE_PAGE - 1), MADV_HUGEPAGE);
#endif
  return p;
#endif
}

static void aligned_delete(void* p) {
#if defined(_WIN32)
  _aligned_free(p);
#else
  free(p);
#endif
}

#if defined(_WIN32)
static trv_status map_file(const char* path, mapping* out, trv_diag* d) {
  FILE* f = fopen(path, "rb");
  uint8_t* p = NULL;
  long long size = -1;
  if (!f) return fail(d, TRV_DEVICE, "the file cannot be opened");
  if (_fseeki64(f, 0, SEEK_END) == 0) size = _ftelli64(f);
  if (size >= 0 && (unsigned long long)size < SIZE_MAX) p = aligned_new((size_t)size, BASE_ALIGN);
  const int ok =
      p && _fseeki64(f, 0, SEEK_SET) == 0 && fread(p, 1, (size_t)size, f) == (size_t)size;
  fclose(f);
  if (!ok) {
    aligned_delete(p);
    return fail(d, TRV_DEVICE, "the file cannot be read");
  }
  out->span.data = p;
  out->span.size = (size_t)size;
  out->owned = 1;
  return TRV_OK;
}
static void unmap_file(mapping* m) {
  if (m->owned) aligned_delete((void*)(uintptr_t)m->span.data);
}
#else
static trv_status map_file(const char* path, mapping* out, trv_diag* d) {
  struct stat info;
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return fail(d, TRV_DEVICE, "the file cannot be opened");
  if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode) || info.st_size < 0 ||
      (uint64_t)info.st_size > SIZE_MAX) {
    close(fd);
    return fail(d, TRV_DEVICE, "this is not a file that can be mapped");
  }
  if (info.st_size == 0) {
    close(fd);
    return fail(d, TRV_FORMAT, "the file is empty");
  }
  void* p = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
  close(fd);
  if (p == MAP_FAILED) return fail(d, TRV_DEVICE, "the file cannot be mapped");
  out->span.data = p;
  out->span.size = (size_t)info.st_size;
  out->owned = 1;
  return TRV_OK;
}
static void unmap_file(mapping* m) {
  if (m->owned) munmap((void*)(uintptr_t)m->span.data, m->span.size);
}
#endif

/* ---- threads ---- */
static trv_status make_crew(crew* c, const trv_threads* t, trv_diag* d) {
  uint32_t count = t->count;
  if (t->runner) {
    if (!t->runner->run || t->runner->workers == 0)
      return fail(d, TRV_ARGUMENT, "a runner needs run and workers");
    c->runner = *t->runner;
  } else {
    if (t->cpu_count && !t->cpus) return fail(d, TRV_ARGUMENT, "cpus is NULL");
    if (count == 0) count = t->cpu_count ? t->cpu_count : trvi_pool_cores();
    const trv_status st = trvi_pool_open(count, t->cpus, t->cpu_count, &c->pool);
    if (st == TRV_MEMORY) return fail(d, st, "out of memory");
    if (st == TRV_ARGUMENT)
      return fail(d, st, "no such processor, or none that this process may use");
    if (st) return fail(d, st, "this system does not bind threads to processors");
    c->runner.run = trvi_pool_run;
    c->runner.self = c->pool;
    c->runner.workers = trvi_pool_workers(c->pool);
  }
  c->made = 1;
  return TRV_OK;
}

/* The host's own, made when it is first needed. Under lock, or before anybody else knows h. */
static trv_status host_crew(trv_host* h, const trv_runner** out, trv_diag* d) {
  const trv_threads shared = {sizeof(shared), h->threads, NULL, 0, NULL};
  const trv_status st = h->crew.made ? TRV_OK : make_crew(&h->crew, &shared, d);
  *out = !st && h->crew.runner.workers > 1 ? &h->crew.runner : NULL;
  return st;
}

static trv_status check_now(trv_host* h, trv_diag* d) {
  const trv_runner* runner = NULL;
  trv_status st = TRV_OK;
  if (h->file.span.size > TRVI_CHECK_THREADS || h->weights.span.size > TRVI_CHECK_THREADS)
    st = host_crew(h, &runner, d);
  if (st) return st;
  st = trvi_check_files(&h->program, runner);
  if (st && d) *d = h->program.diag;
  return st;
}

/* ---- host
 * ----------------------------------------------------------------------------------------------------------
 */
static trv_status open_host(trv_host* h, uint32_t flags, uint32_t threads, trv_diag* d) {
  const uint32_t later = flags | TRV_OPEN_DEFER_CRC;
  trv_status st = trv_program_open(&h->program, h->file.span, later);
  if (!st && h->weights.span.data) st = trv_program_attach(&h->program, h->weights.span, later);
  if (st) {
    if (d) *d = h->program.diag;
    return st;
  }
  h->threads = threads;
  h->unchecked = (flags & (TRV_OPEN_DEFER_CRC | TRV_OPEN_NO_CRC)) == TRV_OPEN_DEFER_CRC;
  if (!(flags & (TRV_OPEN_DEFER_CRC | TRV_OPEN_NO_CRC))) {
    st = check_now(h, d);
    if (st) return st;
  }
  h->device.driver = &trv_cpu_driver;
  h->device_memory = aligned_new(trv_cpu_driver.device_bytes, BASE_ALIGN);
  if (!h->device_memory) return fail(d, TRV_MEMORY, "out of memory");
  const trv_cpu_config cpu = {sizeof cpu, getenv("TRV_ISA")};
  st = trv_cpu_driver.open(h->device_memory, &cpu, &h->device.device);
  if (st) {
    h->device.device = NULL;
    return fail(d, st, "TRV_ISA names no instruction set of this machine");
  }
  return TRV_OK;
}

static trv_status finish_host(trv_host* h, trv_status st, uint32_t flags, uint32_t threads,
                              trv_host** out, trv_diag* d) {
  if (!st) st = open_host(h, flags, threads, d);
  if (st) {
    trv_host_close(h);
    return st;
  }
  *out = h;
  return TRV_OK;
}

static trv_host* new_host(void) {
  trv_host* h = calloc(1, sizeof(*h));
#if !defined(_WIN32)
  if (h) pthread_mutex_init(&h->lock, NULL);
#endif
  return h;
}

trv_status trv_host_open(const char* path, const char* weights, uint32_t flags, uint32_t threads,
                         trv_host** out_host, trv_diag* out_diag) {
  if (out_host) *out_host = NULL;
  if (!path || !out_host) return fail(out_diag, TRV_ARGUMENT, "path or out_host is NULL");
  trv_host* h = new_host();
  if (!h) return fail(out_diag, TRV_MEMORY, "out of memory");
  trv_status st = map_file(path, &h->file, out_diag);
  if (!st && weights) st = map_file(weights, &h->weights, out_diag);
  return finish_host(h, st, flags, threads, out_host, out_diag);
}

trv_status trv_host_open_span(trv_span file, trv_span weights, uint32_t flags, uint32_t threads,
                              trv_host** out_host, trv_diag* out_diag) {
  if (out_host) *out_host = NULL;
  if (!out_host) return fail(out_diag, TRV_ARGUMENT, "out_host is NULL");
  trv_host* h = new_host();
  if (!h) return fail(out_diag, TRV_MEMORY, "out of memory");
  h->file.span = file;
  h->weights.span = weights;
  return finish_host(h, TRV_OK, flags, threads, out_host, out_diag);
}

void trv_host_close(trv_host* host) {
  if (!host) return;
  trvi_pool_close(host->crew.pool);
  if (host->device.device) trv_cpu_driver.close(host->device.device);
  aligned_delete(host->device_memory);
  unmap_file(&host->file);
  unmap_file(&host->weights);
#if !defined(_WIN32)
  pthread_mutex_destroy(&host->lock);
#endif
  free(host);
}

const trv_program* trv_host_program(const trv_host* host) { return &host->program; }

/* Deferred CRCs are checked once, by the first context. */
static trv_status check_once(trv_host* h, trv_diag* d) {
  trv_status st = TRV_OK;
  lock(h);
  if (h->unchecked) st = check_now(h, d);
  if (!st) h->unchecked = 0;
  unlock(h);
  return st;
}

/* The runner of a context's sessions; *out NULL: their thread alone. */
static trv_status find_runner(trv_context* c, const trv_threads* t, const trv_runner** out,
                              trv_diag* d) {
  trv_host* h = c->host;
  trv_status st;
  if (t && t->size < sizeof(*t)) return fail(d, TRV_ARGUMENT, "threads: its size is wrong");
  if (t && (t->count || t->cpu_count || t->runner)) {
    st = make_crew(&c->own, t, d);
    *out = c->own.runner.workers > 1 ? &c->own.runner : NULL;
  } else {
    lock(h);
    st = host_crew(h, out, d);
    unlock(h);
  }
  return st;
}

/* ---- context
 * -------------------------------------------------------------------------------------------------------
 */
/* The block that region i of an entry shares with the other entries; made when new. arena: its
 * position. */
static uint32_t find_block(trv_context* c, const trv_region* r, uint32_t arena) {
  const uint32_t id = r->kind == TRV_REGION_KIND_STATE ? r->id : arena;
  uint32_t i = 0;
  while (i < c->block_count && (c->block[i].kind != r->kind || c->block[i].id != id)) i++;
  if (i == c->block_count) {
    memset(&c->block[i], 0, sizeof(c->block[i]));
    c->block[i].kind = r->kind;
    c->block[i].id = id;
    c->block_count++;
  }
  if (r->align > c->block[i].align) c->block[i].align = r->align;
  return i;
}

static int grow_block(block* b, uint64_t size) {
  if (size <= b->buf.size && b->buf.host) return 1;
  if (size > SIZE_MAX / 2) return 0;
  void* p = aligned_new((size_t)size, b->align);
  if (!p) return 0;
  aligned_delete(b->buf.host);
  b->buf.host = p;
  b->buf.size = (size_t)size;
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
    if (st) return fail(d, st, "a region cannot be read");
    c->blocks[e][i] = TRV_NONE;
    if (r.kind != TRV_REGION_KIND_ARENA && r.kind != TRV_REGION_KIND_STATE) continue;
    const uint32_t k = c->blocks[e][i] = find_block(c, &r, arena);
    if (r.kind == TRV_REGION_KIND_ARENA) arena++;
    if (r.kind == TRV_REGION_KIND_ARENA && replan) continue;
    if (!grow_block(&c->block[k], r.size)) return fail(d, TRV_MEMORY, "out of memory for a region");
  }
  return TRV_OK;
}

static trv_status open_session(trv_context* c, uint32_t e, uint32_t flags, const trv_runner* runner,
                               trv_diag* d) {
  trv_host* h = c->host;
  trv_session_desc desc;
  memset(&desc, 0, sizeof(desc));
  desc.size = sizeof(desc);
  desc.entry = e;
  desc.program = &h->program;
  desc.devices = &h->device;
  desc.device_count = 1;
  desc.flags = flags | (dynamic(&h->program, e, c->regions[e]) ? TRV_SESSION_REPLAN : 0);
  desc.runner = runner;
  trv_buf* regions = calloc((size_t)c->regions[e] + 1, sizeof(*regions));
  if (!regions) return fail(d, TRV_MEMORY, "out of memory");
  for (uint32_t i = 0; i < c->regions[e]; i++)
    if (c->blocks[e][i] != TRV_NONE) regions[i] = c->block[c->blocks[e][i]].buf;
  desc.regions = regions;
  trv_status st = trv_session_bytes(&desc, &c->sizes[e], d);
  if (!st) {
    c->memories[e] = aligned_new(c->sizes[e], BASE_ALIGN);
    st = c->memories[e] ? trv_session_init(&desc, c->memories[e], c->sizes[e], &c->sessions[e], d)
                        : fail(d, TRV_MEMORY, "out of memory");
  }
  free(regions);
  return st;
}

trv_status trv_context_open(trv_host* host, uint32_t flags, trv_context** out_ctx,
                            trv_diag* out_diag) {
  return trv_context_open_on(host, flags, NULL, out_ctx, out_diag);
}

trv_status trv_context_open_on(trv_host* host, uint32_t flags, const trv_threads* threads,
                               trv_context** out_ctx, trv_diag* out_diag) {
  if (out_ctx) *out_ctx = NULL;
  if (!host || !out_ctx) return fail(out_diag, TRV_ARGUMENT, "host or out_ctx is NULL");
  trv_status st = check_once(host, out_diag);
  if (st) return st;
  const trv_program* prog = &host->program;
  const uint32_t n = prog->entry_count;
  uint32_t total = 0;
  trv_entry info;
  trv_context* c = calloc(1, sizeof(*c));
  if (!c) return fail(out_diag, TRV_MEMORY, "out of memory");
  const trv_runner* runner = NULL;
  c->host = host;
  c->entry_count = n;
  c->sessions = calloc((size_t)n + 1, sizeof(*c->sessions));
  c->memories = calloc((size_t)n + 1, sizeof(*c->memories));
  c->sizes = calloc((size_t)n + 1, sizeof(*c->sizes));
  c->blocks = calloc((size_t)n + 1, sizeof(*c->blocks));
  c->regions = calloc((size_t)n + 1, sizeof(*c->regions));
  int ok = c->sessions && c->memories && c->sizes && c->blocks && c->regions;
  for (uint32_t e = 0; ok && e < n; e++) {
    if (trv_program_entry(prog, e, &info)) info.region_count = 0;
    c->regions[e] = info.region_count;
    total += info.region_count;
    c->blocks[e] = calloc((size_t)info.region_count + 1, sizeof(**c->blocks));
    ok = c->blocks[e] != NULL;
  }
  c->block = calloc((size_t)total + 1, sizeof(*c->block));
  if (!ok || !c->block) st = fail(out_diag, TRV_MEMORY, "out of memory");
  if (!st) st = find_runner(c, threads, &runner, out_diag);
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
    if (ctx->memories) aligned_delete(ctx->memories[e]);
    if (ctx->blocks) free(ctx->blocks[e]);
  }
  for (uint32_t i = 0; i < ctx->block_count; i++) aligned_delete(ctx->block[i].buf.host);
  trvi_pool_close(ctx->own.pool);
  free(ctx->sessions);
  free(ctx->memories);
  free(ctx->sizes);
  free(ctx->blocks);
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

trv_status trv_context_plan(trv_context* ctx, uint32_t entry) {
  if (!ctx || entry >= ctx->entry_count) return TRV_ARGUMENT;
  trv_session* s = ctx->sessions[entry];
  trv_status st = trv_session_plan(s);
  /* each round makes one arena large enough */
  for (uint32_t round = 0; st == TRV_MEMORY && round <= ctx->regions[entry]; round++) {
    const trv_diag* d = trv_session_diag(s);
    const uint32_t k = d->value < ctx->regions[entry] ? ctx->blocks[entry][d->value] : TRV_NONE;
    if (k == TRV_NONE || d->expected < 0) return st;
    const uint64_t need = (uint64_t)d->expected, half = ctx->block[k].buf.size / 2;
    /* half as much again at least, so that slowly growing sizes do not allocate each time */
    if (!grow_block(&ctx->block[k],
                    ctx->block[k].buf.size + half > need ? ctx->block[k].buf.size + half : need) &&
        !grow_block(&ctx->block[k], need))
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
