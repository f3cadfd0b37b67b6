/* driver.c - the delegate "blas": matrix products by OpenBLAS, float32, in host memory.
 *
 * OpenBLAS is loaded when the first part comes; where it is not there the part is refused, and the program
 * takes its alternative. Option: path of the library ("blas:/usr/lib/libopenblas.so.0").
 *
 * A part ("blas.1") is a row of five numbers for each product: ids of a [.., M, K], b [K, N], bias [N] (or
 * 0xFFFFFFFF) and the output [.., M, N], and the time in the plan. */
#include <dlfcn.h>
#include <string.h>

#include "trivet/hal.h"

typedef struct command {
  uint32_t a, b, bias, out, time;
} command;

/* The two ways in which builds of OpenBLAS name and count. */
typedef void (*gemm32)(int, int, int, int, int, int, float, const float*, int, const float*, int, float,
                       float*, int);
typedef void (*gemm64)(int, int, int, int64_t, int64_t, int64_t, float, const float*, int64_t, const float*,
                       int64_t, float, float*, int64_t);

struct trv_device {
  uint64_t point;
  void* library;
  gemm32 narrow;
  gemm64 wide;
  char path[512];
};

static trv_status open_device(void* mem, const void* config, trv_device** out_dev) {
  const trv_config* c = config;
  trv_device* dev = mem;
  *out_dev = NULL;
  memset(dev, 0, sizeof(*dev));
  const char* path = c && c->options ? c->options : "libopenblas.so.0";
  if (strlen(path) >= sizeof(dev->path)) return TRV_UNSUPPORTED;
  memcpy(dev->path, path, strlen(path) + 1);
  *out_dev = dev;
  return TRV_OK;
}

static void close_device(trv_device* dev) {
  if (dev->library) dlclose(dev->library);
}

static void caps(trv_device* dev, trv_caps* out_caps) {
  (void)dev;
  out_caps->flags = TRV_CAP_HOST_MEMORY;
  out_caps->alignment = 16;
  out_caps->memory_free = 0;
  out_caps->arch = "openblas";
}

static int find(trv_device* dev, const char* name, void* out) {
  void* symbol = dlsym(dev->library, name);
  memcpy(out, &symbol, sizeof(symbol)); /* ISO C has no cast from data to functions */
  return symbol != NULL;
}

static const char* load(trv_device* dev) {
  if (!dev->library) dev->library = dlopen(dev->path, RTLD_NOW | RTLD_LOCAL);
  if (!dev->library) return "OpenBLAS is not there: give its path as the option, blas:PATH";
  if (find(dev, "scipy_cblas_sgemm64_", &dev->wide) || find(dev, "cblas_sgemm64_", &dev->wide) ||
      find(dev, "scipy_cblas_sgemm", &dev->narrow) || find(dev, "cblas_sgemm", &dev->narrow))
    return NULL;
  return "the library has no sgemm";
}

struct trv_part {
  const command* commands;
  uint32_t count, shape_epoch;
};

static trv_status refuse(trv_diag* d, trv_status status, const command* c, const char* what) {
  d->what = what;
  if (c) d->time = c->time;
  return status;
}

static trv_status part_need(trv_device* dev, const trv_part_desc* part, size_t* out_bytes, trv_diag* d) {
  const trv_view* v = part->view;
  if (strcmp(part->format, "blas.1") != 0)
    return refuse(d, TRV_VERSION, NULL, "the part's format is not blas.1");
  if (part->data.size == 0 || part->data.size % sizeof(command))
    return refuse(d, TRV_FORMAT, NULL, "damaged part");
  const command* c = (const void*)part->data.data;
  for (size_t i = 0; i < part->data.size / sizeof(*c); i++) {
    const uint32_t ids[4] = {c[i].a, c[i].b, c[i].out, c[i].bias == TRV_NONE ? c[i].out : c[i].bias};
    for (uint32_t k = 0; k < 4; k++) {
      if (ids[k] >= v->value_count) return refuse(d, TRV_FORMAT, &c[i], "there is no such value");
      if (v->values[ids[k]].dtype != TRV_DTYPE_F32) return refuse(d, TRV_FORMAT, &c[i], "not float32");
      if (!trv_view_readable(v, ids[k]))
        return refuse(d, TRV_UNSUPPORTED, &c[i], "a value is not in host memory");
    }
    const uint32_t rank = v->values[c[i].a].rank;
    if (rank < 2 || v->values[c[i].out].rank != rank || v->values[c[i].b].rank != 2 ||
        (c[i].bias != TRV_NONE && v->values[c[i].bias].rank != 1))
      return refuse(d, TRV_FORMAT, &c[i], "ranks that do not fit a product");
    if (!trv_view_writable(v, c[i].out))
      return refuse(d, TRV_FORMAT, &c[i], "a command writes a constant or an input");
  }
  const char* missing = load(dev);
  if (missing) return refuse(d, TRV_UNSUPPORTED, NULL, missing);
  *out_bytes = sizeof(trv_part);
  return TRV_OK;
}

static trv_status part_open(trv_device* dev, const trv_part_desc* part, void* mem, trv_part** out_part) {
  trv_part* p = mem;
  (void)dev;
  p->commands = (const void*)part->data.data;
  p->count = (uint32_t)(part->data.size / sizeof(command));
  p->shape_epoch = 0;
  *out_part = p;
  return TRV_OK;
}

static void part_close(trv_device* dev, trv_part* part) {
  (void)dev;
  (void)part;
}

typedef struct product {
  trv_tensor a, b, bias, out;
  trv_dim m, k, n;
} product;

/* Sizes, and strides that a product of OpenBLAS can be told. NULL: all is well. */
static const char* check(const product* p, int has_bias) {
  const uint32_t r = p->a.rank;
  for (uint32_t i = 0; i + 1 < r; i++)
    if (p->a.dim[i] != p->out.dim[i]) return "a product's output has other rows";
  if (p->b.dim[0] != p->k || p->out.dim[r - 1] != p->n || (has_bias && p->bias.dim[0] != p->n))
    return "a product's sizes do not fit";
  for (uint32_t i = 0; i + 2 < r; i++)
    if (p->a.stride[i] != p->a.dim[i + 1] * p->a.stride[i + 1] ||
        p->out.stride[i] != p->out.dim[i + 1] * p->out.stride[i + 1])
      return "rows with gaps";
  if (p->a.stride[r - 1] != 1 || p->out.stride[r - 1] != 1 || (has_bias && p->bias.stride[0] != 1) ||
      p->a.stride[r - 2] < p->k || p->out.stride[r - 2] < p->n ||
      !((p->b.stride[1] == 1 && p->b.stride[0] >= p->n) || (p->b.stride[0] == 1 && p->b.stride[1] >= p->k)))
    return "strides that OpenBLAS cannot be told";
  return p->m > INT32_MAX || p->n > INT32_MAX || p->k > INT32_MAX ? "too large" : NULL;
}

static void multiply(const trv_device* dev, const product* p, int has_bias) {
  enum { ROWS = 101, PLAIN = 111, TRANSPOSED = 112 };
  const uint32_t r = p->a.rank;
  const float *a = (const void*)p->a.data, *b = (const void*)p->b.data, *bias = (const void*)p->bias.data;
  float* y = (void*)p->out.data;
  const trv_dim lda = p->a.stride[r - 2], ldy = p->out.stride[r - 2];
  const int turned = p->b.stride[1] != 1;
  const trv_dim ldb = p->b.stride[turned];
  for (trv_dim i = 0; has_bias && i < p->m; i++) memcpy(y + i * ldy, bias, (size_t)p->n * 4);
  if (p->m == 0 || p->n == 0) return;
  const float beta = has_bias ? 1.0f : 0.0f;
  if (dev->wide)
    dev->wide(ROWS, PLAIN, turned ? TRANSPOSED : PLAIN, p->m, p->n, p->k, 1.0f, a, lda, b, ldb, beta, y, ldy);
  else
    dev->narrow(ROWS, PLAIN, turned ? TRANSPOSED : PLAIN, (int)p->m, (int)p->n, (int)p->k, 1.0f, a, (int)lda,
                b, (int)ldb, beta, y, (int)ldy);
}

static trv_status run(trv_device* dev, trv_part* part, const trv_run* r, uint64_t* out_point) {
  for (uint32_t i = 0; i < part->count; i++) {
    const command* c = &part->commands[i];
    product p;
    memset(&p, 0, sizeof(p));
    trv_view_tensor(r->view, c->a, &p.a);
    trv_view_tensor(r->view, c->b, &p.b);
    trv_view_tensor(r->view, c->out, &p.out);
    if (c->bias != TRV_NONE) trv_view_tensor(r->view, c->bias, &p.bias);
    p.m = 1;
    for (uint32_t k = 0; k + 1 < p.a.rank; k++) p.m *= p.a.dim[k];
    p.k = p.a.dim[p.a.rank - 1];
    p.n = p.b.dim[1];
    const char* what = part->shape_epoch == r->shape_epoch ? NULL : check(&p, c->bias != TRV_NONE);
    if (what) return refuse(r->diag, TRV_ARGUMENT, c, what);
    if (r->hooks && r->hooks->begin) r->hooks->begin(r->hooks->self, c->time);
    multiply(dev, &p, c->bias != TRV_NONE);
    if (r->hooks && r->hooks->end) r->hooks->end(r->hooks->self, c->time);
  }
  part->shape_epoch = r->shape_epoch;
  *out_point = ++dev->point;
  return TRV_OK;
}

static const trv_driver driver = {
    .size = sizeof(trv_driver),
    .abi = TRV_HAL_ABI,
    .name = "blas",
    .device_bytes = sizeof(trv_device),
    .open = open_device,
    .close = close_device,
    .caps = caps,
    .part_need = part_need,
    .part_open = part_open,
    .part_close = part_close,
    .run = run,
};

TRV_API const trv_driver* trv_plugin(void);
const trv_driver* trv_plugin(void) { return &driver; }
