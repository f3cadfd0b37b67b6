/* driver.c - see openvino.h. The format is described in sdk/trivet/openvino/part.py. */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "openvino.h"

#define MAGIC 0x314E564Fu
#define OPTIONS 256

typedef struct {
  int64_t rank;
  int64_t* dims;
} ov_shape;

typedef struct { /* available devices, as in ov_core.h */
  char** devices;
  size_t size;
} ov_devices;

/* What is used of the C API of OpenVINO 2024 and later; every function gives 0 or an error. */
typedef struct {
  int (*core_create)(void** core);
  void (*core_free)(void* core);
  int (*core_get_available_devices)(const void* core, ov_devices* out);
  void (*available_devices_free)(ov_devices* devices);
  int (*core_read_model_from_memory_buffer)(const void* core, const char* text, size_t size,
                                            const void* weights, void** model);
  int (*core_compile_model)(const void* core, const void* model, const char* device, size_t count,
                            void** compiled, ...); /* count: of texts, keys and values */
  void (*model_free)(void* model);
  void (*compiled_model_free)(void* compiled);
  int (*compiled_model_create_infer_request)(const void* compiled, void** request);
  void (*infer_request_free)(void* request);
  int (*infer_request_set_input_tensor_by_index)(void* request, size_t i, const void* tensor);
  int (*infer_request_set_output_tensor_by_index)(void* request, size_t i, const void* tensor);
  int (*infer_request_start_async)(void* request);
  int (*infer_request_wait)(void* request);
  int (*infer_request_wait_for)(void* request, int64_t ms);
  int (*tensor_create_from_host_ptr)(int type, ov_shape shape, void* data, void** tensor);
  void (*tensor_free)(void* tensor);
} ov_api;

static const char* const names[] = {
    "core_create",
    "core_free",
    "core_get_available_devices",
    "available_devices_free",
    "core_read_model_from_memory_buffer",
    "core_compile_model",
    "model_free",
    "compiled_model_free",
    "compiled_model_create_infer_request",
    "infer_request_free",
    "infer_request_set_input_tensor_by_index",
    "infer_request_set_output_tensor_by_index",
    "infer_request_start_async",
    "infer_request_wait",
    "infer_request_wait_for",
    "tensor_create_from_host_ptr",
    "tensor_free",
};

struct trv_device {
  ov_api api;
  void *library, *core;
  void* busy;     /* the request under way, or NULL */
  uint64_t point; /* of the last run */
  char options[OPTIONS];
  const char *name, *precision, *cache; /* in options, or static */
  int error;
};

struct trv_part {
  const trv_part_desc* desc;
  const uint32_t *inputs, *outputs;
  uint32_t input_count, output_count, dim_count, epoch;
  int bound;
  const uint8_t* rows;
  int64_t* dims;
  uint8_t* weights;
  void *model, *compiled, *request;
};

typedef struct {
  uint32_t magic, sources, own, dims;
  uint64_t weights, xml;
} head;
typedef struct {
  uint64_t at, offset, size;
  uint32_t region, spare;
} source;
typedef struct {
  uint64_t at, size;
} own;

static trv_status ov_open(void* mem, const void* config, trv_device** out_dev) {
  trv_device* dev = mem;
  memset(dev, 0, sizeof(*dev));
  const char* options = config ? ((const trv_config*)config)->options : NULL;
  const size_t n = options ? strlen(options) : 0;
  if (n >= OPTIONS) return TRV_UNSUPPORTED;
  if (n) memcpy(dev->options, options, n);
  dev->name = n && *options != '+' ? dev->options : "CPU";
  dev->precision = "f32";
  for (char* p = strchr(dev->options, '+'); p; p = strchr(p, '+')) {
    *p++ = 0;
    const size_t length = strcspn(p, "+");
    if (length == 3 && memcmp(p, "f16", 3) == 0)
      dev->precision = "f16";
    else if (length == 4 && memcmp(p, "bf16", 4) == 0)
      dev->precision = "bf16";
    else if (length > 6 && memcmp(p, "cache=", 6) == 0)
      dev->cache = p + 6;
    else
      return TRV_UNSUPPORTED;
  }
  *out_dev = dev;
  return TRV_OK;
}

static void ov_close(trv_device* dev) {
  if (dev->core) dev->api.core_free(dev->core);
  dev->core = NULL; /* the library stays: its threads may outlive the core */
}

static void ov_caps(trv_device* dev, trv_caps* out_caps) {
  (void)dev;
  out_caps->flags = TRV_CAP_HOST_MEMORY | TRV_CAP_ASYNC;
  out_caps->alignment = 64;
  out_caps->memory_free = 0;
  out_caps->arch = "openvino";
}

static trv_status refuse(trv_diag* diag, trv_status status, const char* what) {
  if (diag) diag->what = what;
  return status;
}

static trv_status load(trv_device* dev, trv_diag* diag) {
  if (dev->core) return TRV_OK;
  if (!dev->library) {
    const char* path = getenv("TRV_OPENVINO");
    dev->library = dlopen(path ? path : "libopenvino_c.so", RTLD_NOW | RTLD_LOCAL);
  }
  if (!dev->library)
    return refuse(diag, TRV_UNSUPPORTED,
                  "OpenVINO is missing: install it and set TRV_OPENVINO to its libopenvino_c.so");
  for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++) {
    char symbol[64] = "ov_";
    memcpy(symbol + 3, names[i], strlen(names[i]) + 1);
    void* f = dlsym(dev->library, symbol);
    if (!f)
      return refuse(diag, TRV_UNSUPPORTED, "this OpenVINO is too old: 2024 or later is needed");
    memcpy((uint8_t*)&dev->api + i * sizeof(f), &f, sizeof(f));
  }
  if (dev->api.core_create(&dev->core)) {
    dev->core = NULL;
    return refuse(diag, TRV_UNSUPPORTED, "OpenVINO does not start");
  }
  return TRV_OK;
}

/* Is there a device of that name? "GPU" is there where "GPU.0" is; AUTO and HETERO always. */
static int present(trv_device* dev) {
  ov_devices all = {0};
  const size_t n = strcspn(dev->name, ".:");
  if (strncmp(dev->name, "AUTO", 4) == 0 || strncmp(dev->name, "HETERO", 6) == 0) return 1;
  if (dev->api.core_get_available_devices(dev->core, &all)) return 0;
  int found = 0;
  for (size_t i = 0; i < all.size; i++)
    found |= strncmp(all.devices[i], dev->name, n) == 0 &&
             (all.devices[i][n] == 0 || all.devices[i][n] == '.');
  dev->api.available_devices_free(&all);
  return found;
}

static int inside(uint64_t at, uint64_t size, uint64_t end) {
  return at <= end && size <= end - at;
}

/* Everything in the part that is not the network itself. */
static int sound(const trv_part_desc* part, const head* h) {
  const trv_view* v = part->view;
  uint64_t at = sizeof(*h);
  if (h->magic != MAGIC || h->sources > 1u << 24 || h->own > 1u << 24 || h->dims > 1u << 16 ||
      h->weights > PTRDIFF_MAX / 2)
    return 0;
  const uint64_t tables =
      h->sources * sizeof(source) + h->own * sizeof(own) + h->dims * sizeof(uint32_t);
  if (!inside(at, tables, part->data.size)) return 0;
  uint64_t bytes = at + tables;
  if (!inside(bytes, h->xml, part->data.size)) return 0;
  bytes += h->xml;
  for (uint32_t i = 0; i < h->sources; i++, at += sizeof(source)) {
    source s;
    memcpy(&s, part->data.data + at, sizeof(s));
    if (s.region >= v->region_count || v->region_table[s.region].kind != TRV_REGION_KIND_CONST ||
        v->region_table[s.region].memory >= 32 ||
        !(v->memories >> v->region_table[s.region].memory & 1) ||
        !inside(s.offset, s.size, v->region_table[s.region].size) ||
        !inside(s.at, s.size, h->weights))
      return 0;
  }
  for (uint32_t i = 0; i < h->own; i++, at += sizeof(own)) {
    own o;
    memcpy(&o, part->data.data + at, sizeof(o));
    if (!inside(o.at, o.size, h->weights) || !inside(bytes, o.size, part->data.size)) return 0;
    bytes += o.size;
  }
  for (uint32_t i = 0; i < h->dims; i++, at += sizeof(uint32_t)) {
    uint32_t row;
    memcpy(&row, part->data.data + at, sizeof(row));
    if (row >= v->dim_count) return 0;
  }
  return 1;
}

static trv_status ov_part_need(trv_device* dev, const trv_part_desc* part, size_t* out_bytes,
                               trv_diag* diag) {
  head h;
  if (strcmp(part->format, "openvino.1") != 0)
    return refuse(diag, TRV_UNSUPPORTED,
                  "the openvino driver takes parts of the format openvino.1");
  if (part->data.size < sizeof(h)) return refuse(diag, TRV_FORMAT, "an openvino part is damaged");
  memcpy(&h, part->data.data, sizeof(h));
  if (!sound(part, &h)) return refuse(diag, TRV_FORMAT, "an openvino part is damaged");
  for (uint32_t i = 0; i < part->input_count; i++)
    if (part->inputs[i] >= part->view->value_count ||
        !trv_view_readable(part->view, part->inputs[i]))
      return refuse(diag, TRV_UNSUPPORTED, "OpenVINO works in host memory");
  for (uint32_t i = 0; i < part->output_count; i++)
    if (part->outputs[i] >= part->view->value_count ||
        !trv_view_readable(part->view, part->outputs[i]) ||
        !trv_view_writable(part->view, part->outputs[i]))
      return refuse(diag, TRV_UNSUPPORTED, "a part writes what it may not");
  const trv_status st = load(dev, diag);
  if (st) return st;
  if (!present(dev))
    return refuse(diag, TRV_UNSUPPORTED, "OpenVINO finds no such device on this machine");
  *out_bytes = sizeof(trv_part) + (size_t)h.dims * sizeof(int64_t);
  return TRV_OK;
}

static void ov_part_close(trv_device* dev, trv_part* p) {
  if (p->request && dev->busy == p->request) {
    dev->api.infer_request_wait(p->request);
    dev->busy = NULL;
  }
  if (p->request) dev->api.infer_request_free(p->request);
  if (p->compiled) dev->api.compiled_model_free(p->compiled);
  if (p->model) dev->api.model_free(p->model);
  free(p->weights);
}

static int compile(trv_device* dev, trv_part* p, const uint8_t* xml, const head* h) {
  const ov_api* a = &dev->api;
  int64_t size = (int64_t)h->weights;
  void* tensor = NULL;
  int e = a->tensor_create_from_host_ptr(16, (ov_shape){1, &size}, p->weights, &tensor);
  if (e) return e;
  e = a->core_read_model_from_memory_buffer(dev->core, (const char*)xml, (size_t)h->xml, tensor,
                                            &p->model);
  a->tensor_free(tensor);
  if (e) return e;
  e = dev->cache ? a->core_compile_model(dev->core, p->model, dev->name, 6, &p->compiled,
                                         "INFERENCE_PRECISION_HINT", dev->precision,
                                         "PERFORMANCE_HINT", "LATENCY", "CACHE_DIR", dev->cache)
                 : a->core_compile_model(dev->core, p->model, dev->name, 4, &p->compiled,
                                         "INFERENCE_PRECISION_HINT", dev->precision,
                                         "PERFORMANCE_HINT", "LATENCY");
  return e ? e : a->compiled_model_create_infer_request(p->compiled, &p->request);
}

static trv_status ov_part_open(trv_device* dev, const trv_part_desc* part, void* mem,
                               trv_part** out_part) {
  trv_part* p = mem;
  head h;
  memset(p, 0, sizeof(*p));
  memcpy(&h, part->data.data, sizeof(h));
  const uint8_t* at = part->data.data + sizeof(h);
  const uint8_t* const tables = at + h.sources * sizeof(source);
  p->inputs = part->inputs;
  p->outputs = part->outputs;
  p->input_count = part->input_count;
  p->output_count = part->output_count;
  p->dim_count = h.dims;
  p->rows = tables + h.own * sizeof(own);
  p->dims = (int64_t*)(void*)(p + 1);
  const uint8_t* xml = p->rows + h.dims * sizeof(uint32_t);
  const uint8_t* bytes = xml + h.xml;
  p->weights = aligned_alloc(64, ((size_t)h.weights + 64) & ~(size_t)63);
  if (!p->weights) return TRV_MEMORY;
  for (uint32_t i = 0; i < h.sources; i++, at += sizeof(source)) {
    source s;
    memcpy(&s, at, sizeof(s));
    memcpy(p->weights + s.at, part->view->regions[s.region].host + s.offset, (size_t)s.size);
  }
  for (uint32_t i = 0; i < h.own; i++) {
    own o;
    memcpy(&o, tables + i * sizeof(o), sizeof(o));
    memcpy(p->weights + o.at, bytes, (size_t)o.size);
    bytes += o.size;
  }
  dev->error = compile(dev, p, xml, &h);
  if (dev->error) {
    ov_part_close(dev, p);
    return TRV_UNSUPPORTED;
  }
  *out_part = p;
  return TRV_OK;
}

/* Type numbers of ov_element_type_e, by DType. */
static const int types[TRV_DTYPE_COUNT] = {0, 1, 16, 7, 8, 9, 10, 3, 2, 4, 5};

static int bind(trv_device* dev, trv_part* p, const trv_view* v, uint32_t id, size_t i,
                int output) {
  const ov_api* a = &dev->api;
  trv_tensor t;
  int64_t dims[TRV_MAX_RANK];
  void* tensor = NULL;
  trv_view_tensor(v, id, &t);
  for (uint32_t k = 0; k < t.rank; k++) dims[k] = t.dim[k];
  int e = a->tensor_create_from_host_ptr(types[t.dtype], (ov_shape){t.rank, dims}, t.data, &tensor);
  if (e) return e;
  e = output ? a->infer_request_set_output_tensor_by_index(p->request, i, tensor)
             : a->infer_request_set_input_tensor_by_index(p->request, i, tensor);
  a->tensor_free(tensor); /* the request keeps it */
  return e;
}

static int bind_dims(trv_device* dev, trv_part* p, const trv_view* v) {
  int64_t n = p->dim_count;
  void* tensor = NULL;
  for (uint32_t i = 0; i < p->dim_count; i++) {
    uint32_t row;
    memcpy(&row, p->rows + i * sizeof(row), sizeof(row));
    p->dims[i] = v->dims[row];
  }
  int e = dev->api.tensor_create_from_host_ptr(10, (ov_shape){1, &n}, p->dims, &tensor);
  if (e) return e;
  e = dev->api.infer_request_set_input_tensor_by_index(p->request, p->input_count, tensor);
  dev->api.tensor_free(tensor);
  return e;
}

static trv_status failed(trv_device* dev, const trv_run* run, int error, const char* what) {
  dev->error = error;
  if (run->diag) run->diag->what = what;
  return TRV_DEVICE;
}

static trv_status ov_run(trv_device* dev, trv_part* p, const trv_run* run, uint64_t* out_point) {
  int e = 0;
  if (dev->busy) { /* one device is in order */
    e = dev->api.infer_request_wait(dev->busy);
    dev->busy = NULL;
    if (e) return failed(dev, run, e, "OpenVINO failed in an earlier step");
  }
  if (!p->bound || p->epoch != run->epoch) {
    p->bound = 0;
    for (uint32_t i = 0; i < p->input_count && !e; i++)
      e = bind(dev, p, run->view, p->inputs[i], i, 0);
    for (uint32_t i = 0; i < p->output_count && !e; i++)
      e = bind(dev, p, run->view, p->outputs[i], i, 1);
    if (!e && p->dim_count) e = bind_dims(dev, p, run->view);
    if (e) return failed(dev, run, e, "OpenVINO does not take a tensor of this shape");
    p->bound = 1;
    p->epoch = run->epoch;
  }
  e = dev->api.infer_request_start_async(p->request);
  if (e) return failed(dev, run, e, "OpenVINO does not start a part");
  dev->busy = p->request;
  *out_point = ++dev->point;
  return TRV_OK;
}

static trv_status ov_wait(trv_device* dev, uint64_t point, uint64_t timeout_ns) {
  if (point > dev->point) return TRV_ARGUMENT;
  if (point < dev->point || !dev->busy) return TRV_OK;
  const uint64_t ms = timeout_ns / 1000000;
  if (ms < 1000000) { /* 9: RESULT_NOT_READY is -9 in ov_status_e */
    const int e = dev->api.infer_request_wait_for(dev->busy, (int64_t)ms);
    if (e == -9) return TRV_PENDING;
    if (!e) {
      dev->busy = NULL;
      return TRV_OK;
    }
    dev->error = e;
    dev->busy = NULL;
    return TRV_DEVICE;
  }
  dev->error = dev->api.infer_request_wait(dev->busy);
  dev->busy = NULL;
  return dev->error ? TRV_DEVICE : TRV_OK;
}

static int32_t ov_last_error(trv_device* dev, const char** out_what) {
  *out_what = "a status of OpenVINO's C API (ov_status_e)";
  return dev->error;
}

const trv_driver trv_openvino_driver = {
    .size = sizeof(trv_driver),
    .abi = TRV_HAL_ABI,
    .name = "openvino",
    .device_bytes = sizeof(trv_device),
    .open = ov_open,
    .close = ov_close,
    .caps = ov_caps,
    .part_need = ov_part_need,
    .part_open = ov_part_open,
    .part_close = ov_part_close,
    .run = ov_run,
    .wait = ov_wait,
    .last_error = ov_last_error,
};
#ifdef TRV_PLUGIN
TRV_API const trv_driver* trv_plugin(void);
const trv_driver* trv_plugin(void) { return &trv_openvino_driver; }
#endif
