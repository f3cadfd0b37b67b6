/* host_devices.c - see host_devices.h. */
#include "host_devices.h"

#include <stdlib.h>

#include "host_os.h"
#include "private.h"
#if defined(TRV_CUDA)
#include "cuda.h"
#endif
#if defined(TRV_OPENVINO)
#include "openvino.h"
#endif

/* Drivers that are part of this build. */
static const trv_driver* const built_in[] = {
    &trv_cpu_driver,
#if defined(TRV_CUDA)
    &trv_cuda_driver,
#endif
#if defined(TRV_OPENVINO)
    &trv_openvino_driver,
#endif
};

static trv_status fail(trv_diag* diag, trv_status status, const char* what, uint32_t value) {
  if (diag) {
    trvi_diag_clear(diag);
    diag->status = status;
    diag->what = what;
    diag->value = value;
  }
  return status;
}

static trv_status load_plugin(trvi_devices* d, const char* path, uint32_t i, trv_diag* diag) {
  if (d->plugin_count == TRVI_DEVICES) return fail(diag, TRV_ARGUMENT, "too many plug-ins", i);
  void* library = NULL;
  trv_status st = path ? trvi_library_open(path, &library) : TRV_ARGUMENT;
  if (st) return fail(diag, st, "a plug-in cannot be loaded", i);
  d->libraries[d->plugin_count] = library;
  const trv_plugin_fn fn = (trv_plugin_fn)trvi_library_find(library, "trv_plugin");
  const trv_driver* v = fn ? fn() : NULL;
  d->plugins[d->plugin_count++] = v;
  if (!v) return fail(diag, TRV_ARGUMENT, "this library is no plug-in: it has no trv_plugin", i);
  if (v->abi != TRV_HAL_ABI || v->size < sizeof(*v)) {
    st = fail(diag, TRV_VERSION, "a plug-in has another HAL version", i);
    if (diag) {
      diag->expected = TRV_HAL_ABI;
      diag->got = (int64_t)v->abi;
    }
  }
  return st;
}

static int is_named(const trv_driver* v, const char* name, size_t length) {
  return strlen(v->name) == length && memcmp(v->name, name, length) == 0;
}

static const trv_driver* find(const trvi_devices* d, const char* name, size_t length) {
  for (uint32_t i = 0; i < d->plugin_count; i++)
    if (is_named(d->plugins[i], name, length)) return d->plugins[i];
  for (uint32_t i = 0; i < sizeof(built_in) / sizeof(*built_in); i++)
    if (is_named(built_in[i], name, length)) return built_in[i];
  return NULL;
}

static trv_status open_device(trvi_devices* d, const trv_driver* v, const char* options,
                              trv_diag* diag) {
  const uint32_t i = d->count;
  if (i == TRVI_DEVICES) return fail(diag, TRV_ARGUMENT, "too many devices", i);
  const int cpu = v == &trv_cpu_driver;
  const trv_config config = {sizeof(config), options ? options : cpu ? getenv("TRV_ISA") : NULL};
  void* memory = trvi_new(v->device_bytes, 1);
  if (!memory) return fail(diag, TRV_MEMORY, "out of memory", i);
  const trv_status st = v->open(memory, &config, &d->bound[i].device);
  if (st) {
    trvi_delete(memory);
    return fail(diag, st,
                cpu ? "TRV_ISA or the device's option names no instruction set of this machine"
                    : "a device cannot be opened with these options",
                i);
  }
  d->bound[i].driver = v;
  d->memories[i] = memory;
  d->count++;
  return TRV_OK;
}

/* "name:options,name": one device after another. */
static trv_status open_list(trvi_devices* d, const char* list, trv_diag* diag) {
  for (uint32_t i = 0; *list; i++) {
    const char* end = strchr(list, ',');
    const size_t length = end ? (size_t)(end - list) : strlen(list);
    const char* colon = memchr(list, ':', length);
    const size_t name = colon ? (size_t)(colon - list) : length;
    const trv_driver* v = find(d, list, name);
    char options[256];
    if (!v) return fail(diag, TRV_ARGUMENT, "there is no such driver, built in or of a plug-in", i);
    const size_t n = colon ? length - name - 1 : 0;
    if (n >= sizeof(options)) return fail(diag, TRV_ARGUMENT, "options are too long", i);
    if (n) memcpy(options, colon + 1, n);
    options[n] = 0;
    const trv_status st = open_device(d, v, n ? options : NULL, diag);
    if (st) return st;
    list += length + (end != NULL);
  }
  return TRV_OK;
}

static int have(const trvi_devices* d, const char* name) {
  for (uint32_t i = 0; i < d->count; i++)
    if (strcmp(d->bound[i].driver->name, name) == 0) return 1;
  return 0;
}

/* What the parts ask for, as far as there are drivers and these open; parts that get none have
 * alternatives, or the session says so. */
static trv_status open_named(trvi_devices* d, const trv_program* prog, trv_diag* diag) {
  trv_fb fb = trvi_reader(prog);
  for (uint32_t e = 0; e < prog->entry_count; e++) {
    trvi_plan plan;
    trvi_plan_read(prog, &fb, e, &plan);
    for (uint32_t i = 0; i < plan.part_count; i++) {
      trvi_part part;
      trvi_part_read(&fb, &plan, i, &part);
      if (fb.bad || have(d, part.delegate) || strcmp(part.delegate, "cpu") == 0) continue;
      const trv_driver* v = find(d, part.delegate, strlen(part.delegate));
      const trv_status st = v ? open_device(d, v, NULL, diag) : TRV_OK;
      if (st == TRV_MEMORY || st == TRV_ARGUMENT) return st;
    }
  }
  return have(d, "cpu") ? TRV_OK : open_device(d, &trv_cpu_driver, NULL, diag);
}

trv_status trvi_devices_open(trvi_devices* d, const trv_host_desc* desc, const trv_program* prog,
                             trv_diag* diag) {
  for (uint32_t i = 0; i < desc->plugin_count; i++) {
    const trv_status st = load_plugin(d, desc->plugins[i], i, diag);
    if (st) return st;
  }
  for (uint32_t i = 0; i < desc->bound_count; i++) {
    if (d->count == TRVI_DEVICES) return fail(diag, TRV_ARGUMENT, "too many devices", i);
    d->bound[d->count++] = desc->bound[i];
  }
  if (desc->devices) return open_list(d, desc->devices, diag);
  return desc->bound_count ? TRV_OK : open_named(d, prog, diag);
}

void trvi_devices_close(trvi_devices* d) {
  for (uint32_t i = d->count; i-- > 0;) {
    if (d->memories[i]) d->bound[i].driver->close(d->bound[i].device);
    trvi_delete(d->memories[i]);
  }
  for (uint32_t i = d->plugin_count; i-- > 0;) trvi_library_close(d->libraries[i]);
  memset(d, 0, sizeof(*d));
}
