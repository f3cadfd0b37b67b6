/* driver.c - see driver.h. Every function of a driver in its shortest true form. */
#include "driver.h"

#include <string.h>

/* ---- device: what was opened once, used by any number of sessions
 * ---------------------------------------------------- */
struct trv_device {
  uint64_t point; /* the timeline: how much work has been enqueued, and here also done */
};

static trv_status null_open(void* mem, const void* config, trv_device** out_dev) {
  trv_device* dev = mem; /* device_bytes of it, from the caller */
  (void)config;
  dev->point = 0;
  *out_dev = dev;
  return TRV_OK;
}

/* Frees what open took beyond its memory: here nothing. */
static void null_close(trv_device* dev) { (void)dev; }

static void null_caps(trv_device* dev, trv_caps* out_caps) {
  (void)dev;
  out_caps->flags = TRV_CAP_HOST_MEMORY;
  out_caps->alignment = 16;
  out_caps->memory_free = 0;
  out_caps->arch = "null";
}

/* ---- part: a piece of a program, opened once per session
 * ------------------------------------------------------------- */
struct trv_part {
  const uint32_t* outputs; /* value ids, in the file */
  uint32_t output_count;
};

/* Accepts or refuses; data may be hostile, so all that run relies on is proved here. "I cannot do
 * this one" is UNSUPPORTED (the next alternative is tried); a damaged part is FORMAT. */
static trv_status null_part_need(trv_device* dev, const trv_part_desc* part, size_t* out_bytes,
                                 trv_diag* diag) {
  (void)dev;
  if (strcmp(part->format, "null.1") != 0) {
    diag->what = "the null driver takes parts of the format null.1";
    return TRV_UNSUPPORTED;
  }
  for (uint32_t i = 0; i < part->output_count; i++) {
    if (part->outputs[i] < part->view->value_count &&
        trv_view_writable(part->view, part->outputs[i]))
      continue;
    diag->what = "a part writes what it may not";
    diag->value = part->outputs[i];
    return TRV_FORMAT;
  }
  *out_bytes = sizeof(trv_part);
  return TRV_OK;
}

static trv_status null_part_open(trv_device* dev, const trv_part_desc* part, void* mem,
                                 trv_part** out_part) {
  trv_part* p = mem; /* part_need's bytes */
  (void)dev;
  p->outputs = part->outputs;
  p->output_count = part->output_count;
  *out_part = p;
  return TRV_OK;
}

static void null_part_close(trv_device* dev, trv_part* part) {
  (void)dev;
  (void)part;
}

/* ---- work
 * --------------------------------------------------------------------------------------------------------------
 */

/* Enqueues the part's work after all earlier work of the device. A driver resolves its values with
 * trv_view_tensor, and may keep what it made of them until run->epoch changes. */
static trv_status null_run(trv_device* dev, trv_part* part, const trv_run* run,
                           uint64_t* out_point) {
  for (uint32_t i = 0; i < part->output_count; i++) {
    trv_tensor t;
    trv_view_tensor(run->view, part->outputs[i], &t);
    (void)t; /* where a real driver's kernel would write */
  }
  *out_point = ++dev->point;
  return TRV_OK;
}

static trv_status null_copy(trv_device* dev, const trv_buf* dst, const trv_buf* src, size_t size,
                            uint64_t* out_point) {
  if (!dst->host || !src->host || dst->size < size || src->size < size) return TRV_ARGUMENT;
  memcpy(dst->host, src->host, size);
  *out_point = ++dev->point;
  return TRV_OK;
}

/* All work is done as soon as it is enqueued; a real driver polls or sleeps, and answers
 * TRV_PENDING after timeout_ns. */
static trv_status null_wait(trv_device* dev, uint64_t point, uint64_t timeout_ns) {
  (void)timeout_ns;
  return point <= dev->point ? TRV_OK : TRV_ARGUMENT;
}

/* Makes later work of dev follow other's work up to point, without the host waiting. */
static trv_status null_join(trv_device* dev, trv_device* other, uint64_t point) {
  (void)dev;
  return point <= other->point ? TRV_OK : TRV_ARGUMENT;
}

const trv_driver trv_null_driver = {
    .size = sizeof(trv_driver),
    .abi = TRV_HAL_ABI,
    .name = "null",
    .device_bytes = sizeof(trv_device),
    .open = null_open,
    .close = null_close,
    .caps = null_caps,
    .part_need = null_part_need,
    .part_open = null_part_open,
    .part_close = null_part_close,
    .run = null_run,
    .copy = null_copy,
    .wait = null_wait,
    .join = null_join,
};

/* Built with this the file is a plug-in, a shared library that applications load by its path. */
#ifdef TRV_PLUGIN
TRV_API const trv_driver* trv_plugin(void);
const trv_driver* trv_plugin(void) { return &trv_null_driver; }
#endif
