/* driver.c - the device: context, stream, memory, copies, points on the timeline. part.c has the
 * parts. */
#if !defined(_WIN32)
#define _POSIX_C_SOURCE 200809L
#endif
#include <string.h>
#include <time.h>

#include "device.h"

#define POLL_NS 20000

trv_status trvu_check(trv_device* dev, trvu_result result, const char* what) {
  if (result == 0) return TRV_OK;
  dev->error = result;
  dev->what = what;
  return TRV_DEVICE;
}

trv_status trvu_enter(trv_device* dev) {
  if (!dev->context) return TRV_DEVICE;
  return trvu_check(dev, dev->api.cuCtxPushCurrent_v2(dev->context),
                    "the CUDA context cannot be made current");
}

void trvu_leave(trv_device* dev) {
  trvu_handle* old;
  (void)dev->api.cuCtxPopCurrent_v2(&old);
}

/* ---- device ---- */
static void cuda_close(trv_device* dev) {
  const trvu_api* cu = &dev->api;
  if (dev->context) { /* goes on where the context cannot be made current */
    const int held = trvu_enter(dev) == TRV_OK;
    if (dev->stream) (void)cu->cuStreamSynchronize(dev->stream);
    for (uint32_t i = 0; i < TRVU_EVENTS; i++)
      if (dev->events[i]) (void)cu->cuEventDestroy_v2(dev->events[i]);
    if (dev->first) (void)cu->cuEventDestroy_v2(dev->first);
    if (dev->flag) (void)cu->cuMemFreeHost(dev->flag);
    if (dev->stream && dev->own_stream) (void)cu->cuStreamDestroy_v2(dev->stream);
    if (held) trvu_leave(dev);
  }
  if (dev->context) (void)cu->cuDevicePrimaryCtxRelease_v2(dev->ordinal);
  dev->context = NULL;
  trvu_unload(&dev->api);
}

static int attribute(trv_device* dev, int which) {
  int value = 0;
  return dev->api.cuDeviceGetAttribute(&value, which, dev->ordinal) == 0 ? value : 0;
}

static uint64_t now(void) {
#if defined(_WIN32)
  return 0;
#else
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
#endif
}

typedef struct options {
  uint32_t ordinal;
  int plain, copies;
} options;

static trv_status read_options(options* o, const char* text) {
  memset(o, 0, sizeof(*o));
  while (text && *text) {
    const size_t n = strcspn(text, " ");
    if (n == 5 && memcmp(text, "plain", n) == 0) {
      o->plain = 1;
    } else if (n == 6 && memcmp(text, "copies", n) == 0) {
      o->copies = 1;
    } else if (n > 8 && n < 12 && memcmp(text, "ordinal=", 8) == 0) {
      for (size_t i = 8; i < n; i++) {
        if (text[i] < '0' || text[i] > '9') return TRV_UNSUPPORTED;
        o->ordinal = o->ordinal * 10 + (uint32_t)(text[i] - '0');
      }
    } else if (n) {
      return TRV_UNSUPPORTED;
    }
    text += n;
    text += *text == ' ';
  }
  return TRV_OK;
}

/* What needs the context. */
static trv_status set_up(trv_device* dev, void* stream) {
  const trvu_api* cu = &dev->api;
  void* flag = NULL;
  trv_status s;
  dev->stream = stream;
  dev->own_stream = dev->stream == NULL;
  if (dev->own_stream) {
    s = trvu_check(dev, cu->cuStreamCreate(&dev->stream, TRVU_STREAM_NON_BLOCKING),
                   "no CUDA stream can be made");
    if (s) {
      dev->stream = NULL;
      return s;
    }
  }
  for (uint32_t i = 0; i < TRVU_EVENTS; i++) {
    s = trvu_check(dev, cu->cuEventCreate(&dev->events[i], 0), "no CUDA event can be made");
    if (s) {
      dev->events[i] = NULL;
      return s;
    }
  }
  s = trvu_check(dev, cu->cuEventCreate(&dev->first, 0), "no CUDA event can be made");
  if (s) {
    dev->first = NULL;
    return s;
  }
  s = trvu_check(dev, cu->cuMemHostAlloc(&flag, 64, TRVU_HOST_PORTABLE_MAPPED),
                 "no memory of the host can be shared with the GPU");
  if (s) return s;
  memset(flag, 0, 64);
  dev->flag = flag;
  s = trvu_check(dev, cu->cuMemHostGetDevicePointer_v2(&dev->flag_address, flag, 0),
                 "the GPU does not see shared memory");
  if (s) return s;
  s = trvu_check(dev, cu->cuEventRecord(dev->first, dev->stream), "no event can be recorded");
  if (s == TRV_OK)
    s = trvu_check(dev, cu->cuEventSynchronize(dev->first), "no event can be waited for");
  dev->opened = now();
  return s;
}

/* NULL, or why the GPU cannot be used. */
static const char* reach(trv_device* dev, const options* o, void* stream) {
  const char* missing = trvu_load(&dev->api);
  const trvu_api* cu = &dev->api;
  int id = 0;
  if (missing) return missing;
  if (cu->cuInit(0)) return "the CUDA driver finds no GPU";
  if (cu->cuDeviceGet(&id, (int)o->ordinal)) return "there is no GPU of this number";
  dev->ordinal = id;
  dev->arch = attribute(dev, TRVU_ATTR_MAJOR) * 10 + attribute(dev, TRVU_ATTR_MINOR);
  dev->integrated = !o->copies && attribute(dev, TRVU_ATTR_INTEGRATED);
  dev->pageable = !o->copies && attribute(dev, TRVU_ATTR_PAGEABLE);
  dev->plain = (uint32_t)(!cu->graphs || o->plain);
  uint32_t n = 7;
  memcpy(dev->name, "cuda sm", n);
  if (dev->arch >= 100) dev->name[n++] = (char)('0' + dev->arch / 100 % 10);
  dev->name[n++] = (char)('0' + dev->arch / 10 % 10);
  dev->name[n] = (char)('0' + dev->arch % 10);
  if (trvu_check(dev, cu->cuDevicePrimaryCtxRetain(&dev->context, id),
                 "the GPU's context cannot be had")) {
    dev->context = NULL;
    return dev->what;
  }
  if (trvu_enter(dev)) return dev->what;
  const trv_status s = set_up(dev, stream);
  trvu_leave(dev);
  return s ? dev->what : NULL;
}

static trv_status cuda_open(void* mem, const void* config, trv_device** out_dev) {
  const trv_cuda_config* c = config;
  const int has_stream = c && c->size >= offsetof(trv_cuda_config, stream) + sizeof(c->stream);
  trv_device* dev = mem;
  options o;
  *out_dev = NULL;
  if (read_options(&o, c ? c->options : NULL)) return TRV_UNSUPPORTED;
  memset(dev, 0, sizeof(*dev));
  const char* missing = reach(dev, &o, has_stream ? c->stream : NULL);
  if (missing) { /* opened, but of no use */
    cuda_close(dev);
    memset(dev, 0, sizeof(*dev));
    memcpy(dev->name, "cuda", 5);
    dev->missing = dev->what = missing;
  }
  *out_dev = dev;
  return TRV_OK;
}

static void cuda_caps(trv_device* dev, trv_caps* out_caps) {
  size_t left = 0, total = 0;
  out_caps->flags = dev->missing ? 0 : TRV_CAP_ASYNC;
  if (dev->integrated) out_caps->flags |= TRV_CAP_IMPORT;
  if (dev->pageable) out_caps->flags |= TRV_CAP_HOST_MEMORY;
  if (trvu_enter(dev) == TRV_OK) {
    if (dev->api.cuMemGetInfo_v2(&left, &total)) left = 0;
    trvu_leave(dev);
  }
  out_caps->alignment = 64;
  out_caps->memory_free = left;
  out_caps->arch = dev->name;
}

/* ---- memory ---- */
static trv_status cuda_mem_alloc(trv_device* dev, size_t size, size_t align, trv_buf* out_buf) {
  const trvu_api* cu = &dev->api;
  const size_t bytes = size ? size : 1;
  trv_status s = align <= 256 ? trvu_enter(dev) : TRV_ARGUMENT; /* the driver aligns to 256 */
  memset(out_buf, 0, sizeof(*out_buf));
  if (s) return s;
  if (dev->integrated) {
    void* host = NULL;
    s = trvu_check(dev, cu->cuMemHostAlloc(&host, bytes, TRVU_HOST_PORTABLE_MAPPED),
                   "no memory is left that CPU and GPU share");
    if (s == TRV_OK) {
      out_buf->host = host;
      s = trvu_check(dev, cu->cuMemHostGetDevicePointer_v2(&out_buf->dev, host, 0),
                     "the GPU does not see shared memory");
      if (s) {
        (void)cu->cuMemFreeHost(host);
        out_buf->host = NULL;
      }
    }
  } else {
    s = trvu_check(dev, cu->cuMemAlloc_v2(&out_buf->dev, bytes), "no memory is left on the GPU");
    if (s) out_buf->dev = 0;
  }
  trvu_leave(dev);
  if (s == TRV_OK) out_buf->size = size;
  return s == TRV_DEVICE ? TRV_MEMORY : s;
}

static trv_status cuda_mem_import(trv_device* dev, void* host, size_t size, trv_buf* out_buf) {
  const trvu_api* cu = &dev->api;
  memset(out_buf, 0, sizeof(*out_buf));
  if (!host || !size) return TRV_ARGUMENT;
  trv_status s = trvu_enter(dev);
  if (s) return s;
  trvu_result r = cu->cuMemHostRegister_v2(host, size, TRVU_HOST_PORTABLE_MAPPED);
  if (r)
    r = cu->cuMemHostRegister_v2(
        host, size, TRVU_HOST_PORTABLE_MAPPED | TRVU_REGISTER_READ_ONLY); /* mapped files */
  s = trvu_check(dev, r, "memory of the host cannot be shared with the GPU");
  if (s == TRV_OK) {
    s = trvu_check(dev, cu->cuMemHostGetDevicePointer_v2(&out_buf->dev, host, 0),
                   "the GPU does not see shared memory");
    if (s) (void)cu->cuMemHostUnregister(host);
  }
  trvu_leave(dev);
  if (s) {
    out_buf->dev = 0;
    return TRV_UNSUPPORTED;
  }
  out_buf->host = host;
  out_buf->size = size;
  return TRV_OK;
}

static void cuda_mem_free(trv_device* dev, trv_buf* buf) {
  const trvu_api* cu = &dev->api;
  if (!buf->host && !buf->dev) return;
  if (dev->context) {
    const int held = trvu_enter(dev) == TRV_OK;
    (void)cu->cuStreamSynchronize(dev->stream);
    if (!buf->host)
      (void)cu->cuMemFree_v2(buf->dev);
    else if (cu->cuMemHostUnregister(buf->host)) /* not registered: then it was allocated */
      (void)cu->cuMemFreeHost(buf->host);
    if (held) trvu_leave(dev);
  }
  memset(buf, 0, sizeof(*buf));
}

/* ---- timeline ---- */
trv_status trvu_mark(trv_device* dev, uint64_t* out_point) {
  const uint64_t point = dev->point + 1;
  const trv_status s =
      trvu_check(dev, dev->api.cuEventRecord(dev->events[point % TRVU_EVENTS], dev->stream),
                 "no event can be recorded");
  if (s) return s;
  dev->point = point;
  *out_point = point;
  return TRV_OK;
}

static trv_status cuda_copy(trv_device* dev, const trv_buf* dst, const trv_buf* src, size_t size,
                            uint64_t* out_point) {
  const trvu_api* cu = &dev->api;
  if (dst->size < size || src->size < size || !(dst->dev || dst->host) || !(src->dev || src->host))
    return TRV_ARGUMENT;
  trv_status s = trvu_enter(dev);
  if (s) return s;
  trvu_result r = 0;
  if (size == 0) {
  } else if (dst->dev && src->dev) {
    r = cu->cuMemcpyDtoDAsync_v2(dst->dev, src->dev, size, dev->stream);
  } else if (dst->dev) {
    r = cu->cuMemcpyHtoDAsync_v2(dst->dev, src->host, size, dev->stream);
  } else if (src->dev) {
    r = cu->cuMemcpyDtoHAsync_v2(dst->host, src->dev, size, dev->stream);
  } else { /* both the host's: after what the stream still does */
    r = cu->cuStreamSynchronize(dev->stream);
    if (r == 0) memcpy(dst->host, src->host, size);
  }
  s = trvu_check(dev, r, "a copy fails");
  if (s == TRV_OK) s = trvu_mark(dev, out_point);
  trvu_leave(dev);
  return s;
}

static trv_status cuda_wait(trv_device* dev, uint64_t point, uint64_t timeout_ns) {
  const trvu_api* cu = &dev->api;
  if (point > dev->point) return TRV_ARGUMENT;
  if (point == 0) return TRV_OK;
  trv_status s = trvu_enter(dev);
  if (s) return s;
  trvu_handle* event = dev->events[point % TRVU_EVENTS];
  trvu_result r;
  if (timeout_ns == UINT64_MAX) {
    r = cu->cuEventSynchronize(event);
  } else {
    const uint64_t begin = timeout_ns ? now() : 0;
    while ((r = cu->cuEventQuery(event)) == TRVU_NOT_READY && timeout_ns &&
           now() - begin < timeout_ns) {
#if !defined(_WIN32)
      const struct timespec pause = {0, POLL_NS};
      nanosleep(&pause, NULL);
#endif
    }
  }
  trvu_leave(dev);
  if (r == TRVU_NOT_READY) return TRV_PENDING;
  s = trvu_check(dev, r, "the GPU's work fails");
  if (s == TRV_OK && *(volatile int32_t*)dev->flag) {
    *(volatile int32_t*)dev->flag = 0;
    dev->error = 0;
    dev->what = "an index is out of range";
    return TRV_ARGUMENT;
  }
  return s;
}

/* other: a device of this driver. */
static trv_status cuda_join(trv_device* dev, trv_device* other, uint64_t point) {
  if (point > other->point) return TRV_ARGUMENT;
  if (point == 0 || dev == other) return TRV_OK;
  trv_status s = trvu_enter(dev);
  if (s) return s;
  s = trvu_check(dev,
                 dev->api.cuStreamWaitEvent(dev->stream, other->events[point % TRVU_EVENTS], 0),
                 "a stream cannot wait");
  trvu_leave(dev);
  return s;
}

/* Only for the last TRVU_EVENTS points. */
static trv_status cuda_stamp(trv_device* dev, uint64_t point, uint64_t* out_ns) {
  float ms = 0;
  if (point == 0 || point > dev->point) return TRV_ARGUMENT;
  if (dev->point - point >= TRVU_EVENTS) return TRV_UNSUPPORTED;
  trv_status s = trvu_enter(dev);
  if (s) return s;
  const trvu_result r =
      dev->api.cuEventElapsedTime(&ms, dev->first, dev->events[point % TRVU_EVENTS]);
  trvu_leave(dev);
  if (r == TRVU_NOT_READY) return TRV_PENDING;
  s = trvu_check(dev, r, "no time can be had");
  if (s == TRV_OK) *out_ns = dev->opened + (ms > 0 ? (uint64_t)((double)ms * 1e6) : 0);
  return s;
}

static int32_t cuda_last_error(trv_device* dev, const char** out_what) {
  const char* text = NULL;
  *out_what = dev->what ? dev->what : "";
  if (dev->error && dev->api.library && dev->api.cuGetErrorString(dev->error, &text) == 0 && text)
    *out_what = text;
  return dev->error;
}

const trv_driver trv_cuda_driver = {
    .size = sizeof(trv_driver),
    .abi = TRV_HAL_ABI,
    .name = "cuda",
    .device_bytes = sizeof(trv_device),
    .open = cuda_open,
    .close = cuda_close,
    .caps = cuda_caps,
    .mem_alloc = cuda_mem_alloc,
    .mem_import = cuda_mem_import,
    .mem_free = cuda_mem_free,
    .part_need = trvu_part_need,
    .part_open = trvu_part_open,
    .part_close = trvu_part_close,
    .run = trvu_run,
    .copy = cuda_copy,
    .wait = cuda_wait,
    .join = cuda_join,
    .stamp = cuda_stamp,
    .last_error = cuda_last_error,
};
