/* toy.c - see toy.h. */
#include "toy.h"

#include <string.h>

struct trv_part {
  const uint8_t* data;
  const uint32_t *inputs, *outputs;
  uint32_t input_count, output_count;
};

static trv_status toy_open(void* mem, const void* config, trv_device** out_dev) {
  (void)config;
  memset(mem, 0, sizeof(trv_device));
  *out_dev = mem;
  return TRV_OK;
}

static void toy_close(trv_device* dev) { (void)dev; }

static void toy_caps(trv_device* dev, trv_caps* out_caps) {
  (void)dev;
  out_caps->flags = TRV_CAP_HOST_MEMORY;
  out_caps->alignment = 16;
  out_caps->memory_free = 0;
  out_caps->arch = "toy";
}

static trv_status toy_need(trv_device* dev, const trv_part_desc* part, size_t* out_bytes,
                           trv_diag* diag) {
  (void)dev;
  *out_bytes = sizeof(trv_part);
  if (strcmp(part->format, "toy.1") != 0) {
    diag->what = "the toy wants toy.1";
    return TRV_UNSUPPORTED;
  }
  return part->data.size >= 1 ? TRV_OK : TRV_FORMAT;
}

static trv_status toy_part_open(trv_device* dev, const trv_part_desc* part, void* mem,
                                trv_part** out_part) {
  trv_part* p = mem;
  p->data = part->data.data;
  p->inputs = part->inputs;
  p->outputs = part->outputs;
  p->input_count = part->input_count;
  p->output_count = part->output_count;
  *out_part = p;
  if (dev) dev->opened++;
  return TRV_OK;
}

static void toy_part_close(trv_device* dev, trv_part* part) {
  (void)part;
  if (dev) dev->opened--;
}

/* Element `flat` of a tensor in row-major order. */
static uint8_t* at(const trv_tensor* t, trv_dim flat) {
  trv_dim offset = 0;
  for (uint32_t i = t->rank; i-- > 0;) {
    offset += flat % t->dim[i] * t->stride[i];
    flat /= t->dim[i];
  }
  return t->data + offset * (trv_dim)trv_dtype_size(t->dtype);
}

static void add(const trv_part* p, const trv_run* run, const trv_tensor* out) {
  trv_dim count = 1;
  for (uint32_t i = 0; i < out->rank; i++) count *= out->dim[i];
  for (trv_dim k = 0; k < count; k++) {
    float sum = 0;
    for (uint32_t i = 0; i < p->input_count; i++) {
      trv_tensor in;
      float v;
      trv_view_tensor(run->view, p->inputs[i], &in);
      memcpy(&v, at(&in, k), 4);
      sum += v;
    }
    memcpy(at(out, k), &sum, 4);
  }
}

static trv_status toy_run(trv_device* dev, trv_part* p, const trv_run* run, uint64_t* out_point) {
  trv_tensor in[2], out;
  int32_t a = 0, b = 0;
  *out_point = 0;
  if (dev) dev->runs++;
  for (uint32_t i = 0; i < p->input_count && i < 2; i++)
    trv_view_tensor(run->view, p->inputs[i], &in[i]);
  if (p->output_count) trv_view_tensor(run->view, p->outputs[0], &out);
  if (p->input_count > 0 && in[0].dtype == TRV_DTYPE_I32) memcpy(&a, in[0].data, 4);
  if (p->input_count > 1 && in[1].dtype == TRV_DTYPE_I32) memcpy(&b, in[1].data, 4);
  switch (p->data[0]) {
    case 'n':
      break;
    case '+':
      add(p, run, &out);
      break;
    case '<':
      *out.data = a < b;
      break;
    case 'i':
      a++;
      memcpy(out.data, &a, 4);
      break;
    case 'd':
      run->view->dims[p->data[1]] = a;
      break;
    case 'f': {
      size_t bytes = 1;
      for (uint32_t i = 0; i < out.rank; i++) bytes *= (size_t)out.dim[i];
      memset(out.data, p->data[1], bytes);
      break;
    }
    default:
      run->diag->what = "the toy fails on demand";
      run->diag->time = 0;
      return TRV_DEVICE;
  }
  return TRV_OK;
}

static trv_status async_run(trv_device* dev, trv_part* p, const trv_run* run, uint64_t* out_point) {
  const trv_status st = toy_run(dev, p, run, out_point);
  *out_point = ++dev->given;
  return st;
}

static trv_status async_wait(trv_device* dev, uint64_t point, uint64_t timeout_ns) {
  if (point <= dev->done) return TRV_OK;
  if (timeout_ns == 0) {
    dev->done++; /* each poll lets one more piece of work end */
    return TRV_PENDING;
  }
  dev->done = point;
  return TRV_OK;
}

static trv_status async_join(trv_device* dev, trv_device* other, uint64_t point) {
  if (point > other->done) other->done = point;
  dev->joined++;
  return TRV_OK;
}

#define TOY(name, run, wait, join) \
  {sizeof(trv_driver),             \
   TRV_HAL_ABI,                    \
   name,                           \
   sizeof(trv_device),             \
   toy_open,                       \
   toy_close,                      \
   toy_caps,                       \
   NULL,                           \
   NULL,                           \
   NULL,                           \
   toy_need,                       \
   toy_part_open,                  \
   toy_part_close,                 \
   run,                            \
   NULL,                           \
   wait,                           \
   join,                           \
   NULL,                           \
   NULL}
const trv_driver toy_driver = TOY("toy", toy_run, NULL, NULL);
const trv_driver toy_async_driver = TOY("toy", async_run, async_wait, async_join);
