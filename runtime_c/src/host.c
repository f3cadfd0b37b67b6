/* host.c - trivet on a machine with files, malloc and threads; built on the public API alone. The
 * system itself is behind host_os.h. */
#include <stdlib.h>
#include <string.h>

#include "host_check.h"
#include "host_private.h"

trv_status trvi_host_fail(trv_diag* d, trv_status status, const char* what) {
  if (d) {
    memset(d, 0, sizeof(*d));
    d->status = status;
    d->step = d->time = d->value = d->axis = TRV_NONE;
    d->what = what;
  }
  return status;
}

static trv_status map_file(const char* path, mapping* out, trv_diag* d) {
  const char* what = "";
  const trv_status st = trvi_map(path, &out->span, &what);
  if (st) return trvi_host_fail(d, st, what);
  out->owned = 1;
  return TRV_OK;
}

/* ---- threads ---- */
static trv_status make_crew(crew* c, const trv_threads* t, trv_diag* d) {
  uint32_t count = t->count;
  if (t->runner) {
    if (!t->runner->run || t->runner->workers == 0)
      return trvi_host_fail(d, TRV_ARGUMENT, "a runner needs run and workers");
    c->runner = *t->runner;
  } else {
    if (t->cpu_count && !t->cpus) return trvi_host_fail(d, TRV_ARGUMENT, "cpus is NULL");
    if (count == 0) count = t->cpu_count ? t->cpu_count : trvi_pool_cores();
    const trv_status st = trvi_pool_open(count, t->cpus, t->cpu_count, &c->pool);
    if (st == TRV_MEMORY) return trvi_host_fail(d, st, "out of memory");
    if (st == TRV_ARGUMENT)
      return trvi_host_fail(d, st, "no such processor, or none that this process may use");
    if (st) return trvi_host_fail(d, st, "this system does not bind threads to processors");
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

/* Deferred CRCs are checked once, by the first context. */
trv_status trvi_host_check(trv_host* h, trv_diag* d) {
  trv_status st = TRV_OK;
  trvi_lock_take(h->lock);
  if (h->unchecked) st = check_now(h, d);
  if (!st) h->unchecked = 0;
  trvi_lock_give(h->lock);
  return st;
}

trv_status trvi_host_runner(trv_host* h, crew* own, const trv_threads* t, const trv_runner** out,
                            trv_diag* d) {
  trv_status st;
  if (t && t->size < sizeof(*t))
    return trvi_host_fail(d, TRV_ARGUMENT, "threads: its size is wrong");
  if (t && (t->count || t->cpu_count || t->runner)) {
    st = make_crew(own, t, d);
    *out = own->runner.workers > 1 ? &own->runner : NULL;
  } else {
    trvi_lock_take(h->lock);
    st = host_crew(h, out, d);
    trvi_lock_give(h->lock);
  }
  return st;
}

/* ---- host
 * ----------------------------------------------------------------------------------------------------------
 */
static trv_status open_host(trv_host* h, const trv_host_desc* desc, trv_diag* d) {
  const uint32_t flags = desc->flags, later = flags | TRV_OPEN_DEFER_CRC;
  trv_status st = trv_program_open(&h->program, h->file.span, later);
  if (!st && h->weights.span.data) st = trv_program_attach(&h->program, h->weights.span, later);
  if (st) {
    if (d) *d = h->program.diag;
    return st;
  }
  h->threads = desc->threads;
  h->unchecked = (flags & (TRV_OPEN_DEFER_CRC | TRV_OPEN_NO_CRC)) == TRV_OPEN_DEFER_CRC;
  if (!(flags & (TRV_OPEN_DEFER_CRC | TRV_OPEN_NO_CRC))) {
    st = check_now(h, d);
    if (st) return st;
  }
  return trvi_devices_open(&h->devices, desc, &h->program, d);
}

trv_status trv_host_open_with(const trv_host_desc* desc, trv_host** out_host, trv_diag* out_diag) {
  if (out_host) *out_host = NULL;
  if (!desc || !out_host || desc->size < sizeof(*desc))
    return trvi_host_fail(out_diag, TRV_ARGUMENT,
                          "desc or out_host is NULL, or desc's size is wrong");
  trv_host* h = calloc(1, sizeof(*h));
  if (h) h->lock = trvi_lock_open();
  if (!h || !h->lock) {
    free(h);
    return trvi_host_fail(out_diag, TRV_MEMORY, "out of memory");
  }
  trv_status st = TRV_OK;
  h->file.span = desc->file;
  h->weights.span = desc->weights;
  if (desc->path) st = map_file(desc->path, &h->file, out_diag);
  if (!st && desc->weights_path) st = map_file(desc->weights_path, &h->weights, out_diag);
  if (!st) st = open_host(h, desc, out_diag);
  if (st) {
    trv_host_close(h);
    return st;
  }
  *out_host = h;
  return TRV_OK;
}

trv_status trv_host_open(const char* path, const char* weights, uint32_t flags, uint32_t threads,
                         trv_host** out_host, trv_diag* out_diag) {
  trv_host_desc desc;
  memset(&desc, 0, sizeof(desc));
  desc.size = sizeof(desc);
  desc.flags = flags;
  desc.threads = threads;
  desc.path = path;
  desc.weights_path = weights;
  if (out_host) *out_host = NULL;
  if (!path) return trvi_host_fail(out_diag, TRV_ARGUMENT, "path is NULL");
  return trv_host_open_with(&desc, out_host, out_diag);
}

trv_status trv_host_open_span(trv_span file, trv_span weights, uint32_t flags, uint32_t threads,
                              trv_host** out_host, trv_diag* out_diag) {
  trv_host_desc desc;
  memset(&desc, 0, sizeof(desc));
  desc.size = sizeof(desc);
  desc.flags = flags;
  desc.threads = threads;
  desc.file = file;
  desc.weights = weights;
  return trv_host_open_with(&desc, out_host, out_diag);
}

void trv_host_close(trv_host* host) {
  if (!host) return;
  trvi_pool_close(host->crew.pool);
  for (uint32_t i = 0; i < host->shelf_count; i++) {
    const trv_bound_device* on = &host->shelves[i].on;
    on->driver->mem_free(on->device, &host->shelves[i].buf);
  }
  free(host->shelves);
  trvi_devices_close(&host->devices);
  if (host->file.owned) trvi_unmap(host->file.span);
  if (host->weights.owned) trvi_unmap(host->weights.span);
  trvi_lock_close(host->lock);
  free(host);
}

const trv_program* trv_host_program(const trv_host* host) { return &host->program; }

trv_status trv_host_device(const trv_host* host, uint32_t i, trv_bound_device* out_device) {
  if (!host || !out_device || i >= host->devices.count) return TRV_ARGUMENT;
  *out_device = host->devices.bound[i];
  return TRV_OK;
}
