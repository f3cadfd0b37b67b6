/* faulty.c - see faulty.h. */
#include "faulty.h"

#include <string.h>

static const trv_driver* inner;
static faulty_counts* counts;

/* Is this call the one that fails? */
static int fails(const char* name) {
  if (++counts->calls != counts->fail_at) return 0;
  counts->failed = name;
  return 1;
}

static trv_status f_open(void* mem, const void* config, trv_device** out_dev) {
  *out_dev = NULL;
  if (fails("open")) return TRV_DEVICE;
  const trv_status st = inner->open(mem, config, out_dev);
  if (!st) counts->devices++;
  return st;
}

static void f_close(trv_device* dev) {
  counts->devices--;
  inner->close(dev);
}

static void f_caps(trv_device* dev, trv_caps* out_caps) { inner->caps(dev, out_caps); }

static trv_status f_alloc(trv_device* dev, size_t size, size_t align, trv_buf* out_buf) {
  if (fails("mem_alloc")) return TRV_MEMORY;
  const trv_status st = inner->mem_alloc(dev, size, align, out_buf);
  if (!st) counts->buffers++;
  return st;
}

static trv_status f_import(trv_device* dev, void* host, size_t size, trv_buf* out_buf) {
  if (fails("mem_import")) return TRV_DEVICE;
  const trv_status st = inner->mem_import(dev, host, size, out_buf);
  if (!st) counts->buffers++;
  return st;
}

static void f_free(trv_device* dev, trv_buf* buf) {
  counts->buffers--;
  inner->mem_free(dev, buf);
}

static trv_status f_need(trv_device* dev, const trv_part_desc* part, size_t* out_bytes,
                         trv_diag* diag) {
  if (fails("part_need")) return TRV_DEVICE;
  return inner->part_need(dev, part, out_bytes, diag);
}

static trv_status f_part_open(trv_device* dev, const trv_part_desc* part, void* mem,
                              trv_part** out_part) {
  if (fails("part_open")) return TRV_DEVICE;
  const trv_status st = inner->part_open(dev, part, mem, out_part);
  if (!st) counts->parts++;
  return st;
}

static void f_part_close(trv_device* dev, trv_part* part) {
  counts->parts--;
  inner->part_close(dev, part);
}

static trv_status f_run(trv_device* dev, trv_part* part, const trv_run* run, uint64_t* out_point) {
  if (fails("run")) return TRV_DEVICE;
  counts->runs++;
  return inner->run(dev, part, run, out_point);
}

static trv_status f_copy(trv_device* dev, const trv_buf* dst, const trv_buf* src, size_t size,
                         uint64_t* out_point) {
  if (fails("copy")) return TRV_DEVICE;
  counts->copies++;
  return inner->copy(dev, dst, src, size, out_point);
}

/* The work itself must be over when the caller gives its memory back: that it is lost comes to
 * light only now. */
static trv_status f_wait(trv_device* dev, uint64_t point, uint64_t timeout_ns) {
  const int lost = fails("wait");
  const trv_status st = inner->wait(dev, point, lost ? UINT64_MAX : timeout_ns);
  return lost ? TRV_DEVICE : st;
}

static trv_status f_join(trv_device* dev, trv_device* other, uint64_t point) {
  if (fails("join")) return TRV_DEVICE;
  return inner->join(dev, other, point);
}

static trv_status f_stamp(trv_device* dev, uint64_t point, uint64_t* out_ns) {
  if (fails("stamp")) return TRV_DEVICE;
  return inner->stamp(dev, point, out_ns);
}

static int32_t f_last_error(trv_device* dev, const char** out_what) {
  const int32_t code = inner->last_error ? inner->last_error(dev, out_what) : 0;
  *out_what = "made to fail";
  return code;
}

void faulty_make(trv_driver* out, const trv_driver* around, faulty_counts* c) {
  inner = around;
  counts = c;
  memset(c, 0, sizeof(*c));
  *out = *around;
  out->open = f_open;
  out->close = f_close;
  out->caps = f_caps;
  if (around->mem_alloc) out->mem_alloc = f_alloc;
  if (around->mem_import) out->mem_import = f_import;
  if (around->mem_free) out->mem_free = f_free;
  out->part_need = f_need;
  out->part_open = f_part_open;
  out->part_close = f_part_close;
  out->run = f_run;
  if (around->copy) out->copy = f_copy;
  if (around->wait) out->wait = f_wait;
  if (around->join) out->join = f_join;
  if (around->stamp) out->stamp = f_stamp;
  out->last_error = f_last_error;
}
