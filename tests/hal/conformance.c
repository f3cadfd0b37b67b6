/* conformance.c - what every driver must do.
 *
 *   conformance [PLUGIN] [--options TEXT] [--tolerance T] [--memory] [PROGRAM ...]
 *
 * PLUGIN: a shared library; without it the driver that the test was compiled with
 * (-DDRIVER=symbol). PROGRAM: files with parts for the driver and an alternative for the CPU, whose
 * results count as right within T times the largest one. --memory: the programs' values are to lie
 * in the device's memory. Prints what fails, then "ok" or "FAILED". */
#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "faulty.h"
#include "trivet/trivet.h"

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      printf("%s:%d: %s: %s\n", __FILE__, __LINE__, __func__, #condition); \
      failures++;                                                          \
    }                                                                      \
  } while (0)

#if defined(DRIVER)
extern const trv_driver DRIVER;
static const trv_driver* driver = &DRIVER;
#elif defined(CONFORMANCE_LINKED)
const trv_driver* trv_plugin(void);
static const trv_driver* driver;
#else
static const trv_driver* driver;
#endif
static trv_config config = {sizeof(trv_config), NULL};
static double tolerance = 1e-5;
static int in_memory, failures;

/* Devices and their memory. */
static void* opened[16][2];
static int opened_count;

static trv_device* open_device(const trv_driver* v) {
  trv_device* dev = NULL;
  void* memory = NULL;
  if (posix_memalign(&memory, 64, v->device_bytes + 64)) exit(1);
  memset(memory, 0xA5, v->device_bytes + 64);
  if (v->open(memory, &config, &dev)) {
    free(memory);
    return NULL;
  }
  for (int i = 0; i < 64; i++) CHECK(((uint8_t*)memory)[v->device_bytes + (size_t)i] == 0xA5);
  opened[opened_count][0] = dev;
  opened[opened_count++][1] = memory;
  return dev;
}

static void close_device(const trv_driver* v, trv_device* dev) {
  v->close(dev);
  for (int i = 0; i < opened_count; i++) {
    if (opened[i][0] != dev) continue;
    free(opened[i][1]);
    opened[i][0] = opened[--opened_count][0];
    opened[i][1] = opened[opened_count][1];
    return;
  }
}

/* ---- the struct ---- */
static void test_struct(void) {
  const trv_driver* v = driver;
  CHECK(v->size >= sizeof(trv_driver) && v->abi == TRV_HAL_ABI);
  CHECK(v->name && *v->name && strlen(v->name) < 64 && !strpbrk(v->name, " :,>."));
  CHECK(v->open && v->close && v->caps && v->part_need && v->part_open && v->part_close && v->run);
  CHECK(!v->mem_alloc == !v->mem_free || v->mem_import);
  CHECK(!v->mem_alloc || v->copy); /* memory that nobody can fill is of no use */
  trv_device *a = open_device(v), *b = open_device(v);
  CHECK(a && b); /* two at once */
  if (!a || !b) exit(1);
  trv_caps caps;
  memset(&caps, 0, sizeof(caps));
  caps.size = sizeof(caps);
  v->caps(a, &caps);
  CHECK(caps.alignment && (caps.alignment & (caps.alignment - 1)) == 0 && caps.arch && *caps.arch);
  CHECK(caps.flags & (TRV_CAP_HOST_MEMORY | TRV_CAP_IMPORT) || v->mem_alloc);
  CHECK(!(caps.flags & TRV_CAP_IMPORT) || (v->mem_import && v->mem_free));
  CHECK(!(caps.flags & TRV_CAP_ASYNC) || v->wait);
  close_device(v, a);
  close_device(v, b);
}

/* ---- memory, copies, points ---- */
static trv_buf host_buf(void* p, size_t size) {
  const trv_buf b = {p, 0, size};
  return b;
}

static trv_buf part_of(const trv_buf* b, size_t offset, size_t size) {
  const trv_buf out = {b->host ? b->host + offset : NULL, b->dev ? b->dev + offset : 0, size};
  return out;
}

static void finish(trv_device* dev, uint64_t point) {
  if (!driver->wait) return;
  CHECK(driver->wait(dev, point, UINT64_MAX) == TRV_OK);
  CHECK(driver->wait(dev, point, 0) == TRV_OK);
}

static void test_memory(void) {
  trv_device* dev = open_device(driver);
  uint8_t from[4096], to[4096];
  uint64_t point = 0, last = 0;
  trv_buf a, b;
  if (!driver->mem_alloc) goto done;
  for (size_t size = 1; size <= 4096; size *= 4) {
    for (size_t align = 1; align <= 256; align *= 4) {
      CHECK(driver->mem_alloc(dev, size, align, &a) == TRV_OK);
      CHECK(a.dev && a.size >= size && a.dev % align == 0);
      driver->mem_free(dev, &a);
    }
  }
  memset(&a, 0, sizeof(a));
  CHECK(driver->mem_alloc(dev, SIZE_MAX / 2, 64, &a) == TRV_MEMORY); /* an answer, not an end */
  CHECK(driver->mem_alloc(dev, 4096, 64, &a) == TRV_OK &&
        driver->mem_alloc(dev, 4096, 64, &b) == TRV_OK);
  CHECK(a.dev != b.dev);
  for (int i = 0; i < 4096; i++) from[i] = (uint8_t)(i * 7 + 3);
  const trv_buf h = host_buf(from, 4096), g = host_buf(to, 4096);
  /* in order: host, a, shifted within a device, b, host; only the last is waited for */
  CHECK(driver->copy(dev, &a, &h, 4096, &point) == TRV_OK && point >= last);
  last = point;
  const trv_buf a0 = part_of(&a, 0, 100), b9 = part_of(&b, 1000, 100);
  CHECK(driver->copy(dev, &b, &a, 4096, &point) == TRV_OK && point >= last);
  last = point;
  CHECK(driver->copy(dev, &b9, &a0, 100, &point) == TRV_OK && point >= last);
  last = point;
  CHECK(driver->copy(dev, &g, &b, 4096, &point) == TRV_OK && point >= last);
  finish(dev, point);
  CHECK(memcmp(to, from, 1000) == 0 && memcmp(to + 1000, from, 100) == 0 &&
        memcmp(to + 1100, from + 1100, 4096 - 1100) == 0);
  if (driver->stamp) {
    uint64_t ns = 0;
    struct timespec now;
    const trv_status st = driver->stamp(dev, point, &ns);
    clock_gettime(CLOCK_MONOTONIC, &now);
    const uint64_t t = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    CHECK(st == TRV_UNSUPPORTED || (st == TRV_OK && ns <= t + 1000000 && t - ns < 60000000000u));
  }
  /* a piece of work after another, each point reached, none before it was given */
  for (int i = 0; i < 300; i++) {
    CHECK(driver->copy(dev, &a, &h, 4096, &point) == TRV_OK && point >= last);
    last = point;
    if (!driver->wait) continue;
    const trv_status st = driver->wait(dev, point, i % 3 ? 0 : 1000);
    CHECK(st == TRV_OK || st == TRV_PENDING);
  }
  finish(dev, point);
  CHECK(driver->copy(dev, &a, &h, 5000, &point) != TRV_OK); /* beyond the buffers */
  driver->mem_free(dev, &a);
  driver->mem_free(dev, &b);
done:
  close_device(driver, dev);
}

static void test_import(void) {
  trv_device* dev = open_device(driver);
  trv_caps caps;
  memset(&caps, 0, sizeof(caps));
  caps.size = sizeof(caps);
  driver->caps(dev, &caps);
  if (caps.flags & TRV_CAP_IMPORT) {
    void *p = NULL, *q = NULL;
    trv_buf a, b;
    uint64_t point;
    if (posix_memalign(&p, 4096, 8192) || posix_memalign(&q, 4096, 8192)) exit(1);
    memset(p, 0x11, 8192);
    CHECK(driver->mem_import(dev, p, 8192, &a) == TRV_OK && a.dev && a.host == p && a.size == 8192);
    CHECK(driver->mem_import(dev, q, 8192, &b) == TRV_OK);
    if (driver->copy) {
      CHECK(driver->copy(dev, &b, &a, 8192, &point) == TRV_OK);
      finish(dev, point);
      CHECK(memcmp(p, q, 8192) == 0); /* not a copy of it */
    }
    driver->mem_free(dev, &a);
    driver->mem_free(dev, &b);
    memset(p, 0, 8192); /* still the caller's */
    free(p);
    free(q);
  }
  close_device(driver, dev);
}

/* Two devices, one after the other by join. */
static void test_join(void) {
  trv_device *x = open_device(driver), *y = open_device(driver);
  if (driver->join && driver->mem_alloc) {
    static uint8_t first[65536], middle[65536], end[65536];
    trv_buf a, b;
    uint64_t point;
    CHECK(driver->mem_alloc(x, sizeof(first), 64, &a) == TRV_OK);
    CHECK(driver->mem_alloc(y, sizeof(first), 64, &b) == TRV_OK);
    for (int round = 1; round < 20; round++) {
      memset(first, round, sizeof(first));
      const trv_buf f = host_buf(first, sizeof(first)), m = host_buf(middle, sizeof(first)),
                    e = host_buf(end, sizeof(first));
      CHECK(driver->copy(x, &a, &f, sizeof(first), &point) == TRV_OK);
      CHECK(driver->copy(x, &m, &a, sizeof(first), &point) == TRV_OK);
      const trv_status st = driver->join(y, x, point);
      CHECK(st == TRV_OK || st == TRV_UNSUPPORTED);
      if (st) finish(x, point);
      CHECK(driver->copy(y, &b, &m, sizeof(first), &point) == TRV_OK);
      CHECK(driver->copy(y, &e, &b, sizeof(first), &point) == TRV_OK);
      finish(y, point);
      CHECK(memcmp(first, end, sizeof(first)) == 0);
    }
    driver->mem_free(x, &a);
    driver->mem_free(y, &b);
  }
  close_device(driver, x);
  close_device(driver, y);
}

/* ---- programs ---- */
#define SLOTS 16
typedef struct sample { /* what goes in and comes out */
  uint8_t *in[SLOTS], *out[SLOTS];
  size_t in_size[SLOTS], out_size[SLOTS];
  trv_slot slots[2 * SLOTS];
  uint32_t inputs, outputs;
} sample;

static uint8_t* room(size_t size) {
  void* p = NULL;
  if (posix_memalign(&p, 64, size + !size)) exit(1);
  memset(p, 0, size + !size);
  return p;
}

static size_t slot_size(const trv_slot* s, int64_t* dims) {
  size_t n = trv_dtype_size(s->dtype);
  for (uint32_t i = 0; i < s->rank; i++) {
    dims[i] = s->dim[i] >= 0 ? s->dim[i] : s->min[i] > 0 ? s->min[i] : 1;
    n *= (size_t)dims[i];
  }
  return n;
}

static void make_sample(const trv_program* prog, sample* s, uint32_t seed) {
  trv_entry e;
  int64_t dims[TRV_MAX_RANK];
  memset(s, 0, sizeof(*s));
  if (trv_program_entry(prog, 0, &e) || e.input_count > SLOTS || e.output_count > SLOTS) exit(1);
  s->inputs = e.input_count;
  s->outputs = e.output_count;
  for (uint32_t i = 0; i < s->inputs; i++) {
    if (trv_program_input(prog, 0, i, &s->slots[i])) exit(1);
    s->in_size[i] = slot_size(&s->slots[i], dims);
    s->in[i] = room(s->in_size[i]);
    for (size_t k = 0; k < s->in_size[i] / trv_dtype_size(s->slots[i].dtype); k++) {
      seed = seed * 1664525u + 1013904223u;
      const float f = (float)(seed >> 8) / 8388608.0f - 1.0f;
      if (s->slots[i].dtype == TRV_DTYPE_F32) memcpy(s->in[i] + 4 * k, &f, 4);
    }
  }
  for (uint32_t i = 0; i < s->outputs; i++) {
    trv_slot* slot = &s->slots[SLOTS + i];
    if (trv_program_output(prog, 0, i, slot)) exit(1);
    s->out_size[i] = slot_size(slot, dims);
    s->out[i] = room(s->out_size[i]);
  }
}

static void free_sample(sample* s) {
  for (uint32_t i = 0; i < SLOTS; i++) free(s->in[i]), free(s->out[i]);
}

static trv_status bind(trv_session* session, const sample* s) {
  trv_status st = TRV_OK;
  int64_t dims[TRV_MAX_RANK];
  for (uint32_t i = 0; !st && i < s->inputs; i++) {
    slot_size(&s->slots[i], dims);
    st = trv_session_bind_input(session, i, s->slots[i].dtype, s->slots[i].rank, dims,
                                host_buf(s->in[i], s->in_size[i]));
  }
  for (uint32_t i = 0; !st && i < s->outputs; i++)
    st = trv_session_bind_output(session, i, host_buf(s->out[i], s->out_size[i]));
  return st;
}

static int near(const sample* a, const sample* b) {
  for (uint32_t i = 0; i < a->outputs; i++) {
    if (a->slots[SLOTS + i].dtype != TRV_DTYPE_F32) {
      if (memcmp(a->out[i], b->out[i], a->out_size[i]) != 0) return 0;
      continue;
    }
    const float *x = (const float*)(void*)a->out[i], *y = (const float*)(void*)b->out[i];
    double most = 0, off = 0;
    for (size_t k = 0; k < a->out_size[i] / 4; k++) {
      most = fmax(most, fabs((double)x[k]));
      off = fmax(off, fabs((double)x[k] - (double)y[k]));
    }
    if (!(off <= tolerance * most)) return 0;
  }
  return 1;
}

static trv_host* open_host(const char* path, const trv_bound_device* bound, uint32_t count,
                           trv_diag* d) {
  trv_host_desc desc;
  trv_host* host = NULL;
  memset(&desc, 0, sizeof(desc));
  desc.size = sizeof(desc);
  desc.path = path;
  desc.threads = 1;
  desc.bound = bound;
  desc.bound_count = count;
  desc.devices = "cpu";
  const trv_status st = trv_host_open_with(&desc, &host, d);
  if (st) d->status = st;
  return host;
}

/* Steps of the entry that the driver does. */
static uint32_t steps_of(trv_session* s, uint32_t* copies) {
  trv_step step = {sizeof(step), 0, 0, 0, 0, 0, NULL, 0, NULL};
  uint32_t n = 0;
  *copies = 0;
  for (uint32_t i = 0; trv_session_step(s, i, &step) == TRV_OK; i++) {
    n += step.kind == TRV_STEP_KIND_RUN && step.device == 0;
    *copies += step.kind == TRV_STEP_KIND_COPY && step.device == 0;
  }
  return n;
}

/* What the CPU makes of it. */
static void right(const char* path, sample* out, uint32_t seed) {
  trv_diag d;
  trv_context* c = NULL;
  trv_host* host = open_host(path, NULL, 0, &d);
  if (!host || trv_context_open(host, 0, &c, &d)) {
    printf("%s cannot run on the CPU alone: %s\n", path, d.what ? d.what : "");
    exit(1);
  }
  make_sample(trv_host_program(host), out, seed);
  CHECK(bind(trv_context_session(c, 0), out) == TRV_OK && trv_context_run(c, 0) == TRV_OK);
  trv_context_close(c);
  trv_host_close(host);
}

typedef struct caller {
  trv_host* host;
  const sample* want;
  uint32_t seed;
  int wrong;
} caller;

static void* call_often(void* self) {
  caller* t = self;
  trv_diag d;
  trv_context* c = NULL;
  sample mine;
  make_sample(trv_host_program(t->host), &mine, t->seed);
  t->wrong = trv_context_open(t->host, 0, &c, &d) != TRV_OK;
  for (int i = 0; !t->wrong && i < 10; i++) {
    for (uint32_t k = 0; k < mine.outputs; k++) memset(mine.out[k], 0xEE, mine.out_size[k]);
    t->wrong =
        bind(trv_context_session(c, 0), &mine) || trv_context_run(c, 0) || !near(t->want, &mine);
  }
  trv_context_close(c);
  free_sample(&mine);
  return NULL;
}

/* Results, other buffers and sizes again (epoch), several sessions, two devices, threads. */
static void test_program(const char* path) {
  trv_diag d;
  sample want, other, mine, second;
  trv_context *a = NULL, *b = NULL;
  trv_event first, last;
  uint32_t copies;
  right(path, &want, 1);
  right(path, &other, 2);
  trv_device *x = open_device(driver), *y = open_device(driver);
  const trv_bound_device bound[2] = {{driver, x}, {driver, y}};
  trv_host *host = open_host(path, bound, 1, &d), *pair = open_host(path, bound, 2, &d);
  CHECK(host && pair);
  if (!host || !pair) exit(1);
  make_sample(trv_host_program(host), &mine, 1);
  make_sample(trv_host_program(host), &second, 2);
  CHECK(trv_context_open(host, 0, &a, &d) == TRV_OK);
  if (!a) {
    printf("%s: %s\n", path, d.what ? d.what : "");
    exit(1);
  }
  trv_session* s = trv_context_session(a, 0);
  const uint32_t steps = steps_of(s, &copies);
  CHECK(steps > 0); /* else nothing is tested */
  CHECK(!in_memory || copies > 0);
  for (int i = 0; i < 3; i++) {
    CHECK(bind(s, &mine) == TRV_OK && trv_context_run(a, 0) == TRV_OK && near(&want, &mine));
    CHECK(bind(s, &second) == TRV_OK && trv_context_run(a, 0) == TRV_OK && near(&other, &second));
  }
  /* two runs at a time, waited for in the other order */
  CHECK(trv_context_open(host, 0, &b, &d) == TRV_OK);
  for (int i = 0; i < 5; i++) {
    memset(mine.out[0], 0xEE, mine.out_size[0]);
    CHECK(bind(s, &mine) == TRV_OK && bind(trv_context_session(b, 0), &second) == TRV_OK);
    CHECK(trv_context_submit(a, 0, &first) == TRV_OK && trv_context_submit(b, 0, &last) == TRV_OK);
    CHECK(trv_event_wait(&last, UINT64_MAX) == TRV_OK && near(&other, &second));
    trv_status st = TRV_PENDING;
    while (st == TRV_PENDING) st = trv_event_wait(&first, 0);
    CHECK(st == TRV_OK && near(&want, &mine));
  }
  CHECK(trv_context_submit(a, 0, &first) == TRV_OK); /* and left alone */
  trv_context_close(b);
  trv_context_close(a);
  a = NULL;
  CHECK(trv_context_open(pair, 0, &a, &d) == TRV_OK);
  CHECK(bind(trv_context_session(a, 0), &mine) == TRV_OK && trv_context_run(a, 0) == TRV_OK &&
        near(&want, &mine));
  trv_context_close(a);
  trv_caps caps;
  memset(&caps, 0, sizeof(caps));
  caps.size = sizeof(caps);
  driver->caps(x, &caps);
  if (caps.flags & TRV_CAP_THREADS) {
    pthread_t threads[3];
    caller calls[3];
    for (int i = 0; i < 3; i++) {
      calls[i] = (caller){host, &want, 1, 0};
      if (pthread_create(&threads[i], NULL, call_often, &calls[i])) exit(1);
    }
    for (int i = 0; i < 3; i++) {
      pthread_join(threads[i], NULL);
      CHECK(!calls[i].wrong);
    }
  }
  trv_host_close(host);
  trv_host_close(pair);
  close_device(driver, x);
  close_device(driver, y);
  free_sample(&want);
  free_sample(&other);
  free_sample(&mine);
  free_sample(&second);
}

/* ---- refusals ---- */
/* The plan of an entry as part_need sees it; parts of the driver one by one. */
typedef struct asking {
  trv_device* dev;
  trv_view view;
  uint32_t seen;
} asking;

static trv_status ask_about(asking* q, const trv_part_desc* part) {
  size_t bytes = 0;
  trv_diag d;
  trv_part* open = NULL;
  memset(&d, 0, sizeof(d));
  d.step = d.time = d.value = d.axis = TRV_NONE;
  const trv_status st = driver->part_need(q->dev, part, &bytes, &d);
  CHECK(st <= 0);
  CHECK(st == TRV_OK || d.what); /* says why not */
  if (st) return st;
  CHECK(bytes < (size_t)1 << 40);
  uint8_t* memory = room(bytes);
  if (driver->part_open(q->dev, part, memory, &open) == TRV_OK) driver->part_close(q->dev, open);
  free(memory);
  return st;
}

/* A driver that hands every part to the test and accepts none. */
static asking* question;

static trv_status spy_need(trv_device* dev, const trv_part_desc* part, size_t* out_bytes,
                           trv_diag* diag) {
  asking* q = question;
  trv_part_desc p = *part;
  (void)dev;
  (void)out_bytes;
  q->seen++;
  CHECK(ask_about(q, part) == TRV_OK);
  p.format = "unknown.99";
  const trv_status st = ask_about(q, &p);
  CHECK(st == TRV_UNSUPPORTED || st == TRV_VERSION);
  p.format = part->format;
  for (size_t size = 0; size < part->data.size;
       size = size * 2 + 1) { /* cut, in memory of its size */
    uint8_t* cut = room(size);
    memcpy(cut, part->data.data, size);
    p.data.data = cut;
    p.data.size = size;
    (void)ask_about(q, &p);
    free(cut);
  }
  uint8_t* bent = room(part->data.size);
  uint32_t seed = 7;
  p.data.size = part->data.size;
  p.data.data = bent;
  for (int round = 0; round < 400; round++) {
    memcpy(bent, part->data.data, part->data.size);
    for (int i = 0; i <= round % 3 && part->data.size; i++) {
      seed = seed * 1664525u + 1013904223u;
      bent[(seed >> 4) % part->data.size] ^= (uint8_t)(1u << (seed >> 29));
    }
    (void)ask_about(q, &p);
  }
  free(bent);
  diag->what = "that is enough";
  return TRV_UNSUPPORTED;
}

static void test_refusals(const char* path) {
  trv_diag d;
  asking q;
  trv_context* c = NULL;
  memset(&q, 0, sizeof(q));
  question = &q;
  q.dev = open_device(driver);
  trv_driver spy = *driver;
  spy.part_need = spy_need;
  const trv_bound_device bound = {&spy, q.dev};
  trv_host* host = open_host(path, &bound, 1, &d);
  CHECK(host && trv_context_open(host, 0, &c, &d) == TRV_OK && q.seen > 0); /* alternatives run */
  trv_context_close(c);
  trv_host_close(host);
  close_device(driver, q.dev);
}

/* ---- every call failing, once ---- */
/* Opens, runs, submits, closes. The status of what failed; *out_again: that of a run after it. */
static trv_status one_life(const char* path, const trv_driver* v, faulty_counts* n,
                           const sample* want, sample* mine) {
  trv_diag d;
  trv_event done;
  memset(&d, 0, sizeof(d));
  trv_device* dev = open_device(v);
  if (!dev) return TRV_DEVICE;
  const trv_bound_device bound = {v, dev};
  trv_host* host = open_host(path, &bound, 1, &d);
  trv_context* c = NULL;
  trv_status st = host ? trv_context_open(host, 0, &c, &d) : d.status;
  CHECK(st == TRV_OK || (st == d.status && d.what));
  if (!st) {
    trv_session* s = trv_context_session(c, 0);
    st = bind(s, mine);
    if (!st) st = trv_context_run(c, 0);
    if (!st) st = trv_context_submit(c, 0, &done);
    if (!st) st = trv_event_wait(&done, UINT64_MAX);
    if (!st) {
      CHECK(near(want, mine));
    } else {
      CHECK(trv_session_diag(s)->status == st && trv_session_diag(s)->what);
      if (n->fail_at && n->calls >= n->fail_at) { /* and the session goes on */
        for (uint32_t i = 0; i < mine->outputs; i++) memset(mine->out[i], 0xEE, mine->out_size[i]);
        CHECK(bind(s, mine) == TRV_OK && trv_context_run(c, 0) == TRV_OK && near(want, mine));
      }
    }
  }
  trv_context_close(c);
  trv_host_close(host);
  close_device(v, dev);
  return st;
}

static void test_faults(const char* path) {
  trv_driver v;
  faulty_counts n;
  sample want, mine;
  right(path, &want, 1);
  right(path, &mine, 1);
  faulty_make(&v, driver, &n);
  CHECK(one_life(path, &v, &n, &want, &mine) == TRV_OK && n.calls > 0);
  const uint32_t all = n.calls;
  uint32_t hit = 0;
  for (uint32_t k = 1; k <= all; k++) {
    memset(&n, 0, sizeof(n));
    n.fail_at = k;
    const trv_status st = one_life(path, &v, &n, &want, &mine);
    if (!n.failed) continue; /* how often one waits differs from life to life */
    hit++;
    if (n.devices || n.parts || n.buffers || st >= 0) {
      printf("call %u, %s: status %d, open: %d devices, %d parts, %d buffers\n", (unsigned)k,
             n.failed, (int)st, (int)n.devices, (int)n.parts, (int)n.buffers);
      failures++;
    }
  }
  CHECK(hit > all / 2);
  printf("%s: %u of %u calls have failed once each\n", path, (unsigned)hit, (unsigned)all);
  free_sample(&want);
  free_sample(&mine);
}

int main(int argc, char** argv) {
  const char* programs[64];
  int count = 0;
  setvbuf(stdout, NULL, _IOLBF, 0);
  for (int i = 1; i < argc; i++) {
    if (strcmp(argv[i], "--options") == 0 && i + 1 < argc) {
      config.options = argv[++i];
    } else if (strcmp(argv[i], "--tolerance") == 0 && i + 1 < argc) {
      tolerance = atof(argv[++i]);
    } else if (strcmp(argv[i], "--memory") == 0) {
      in_memory = 1;
#ifndef CONFORMANCE_LINKED
    } else if (!driver && !strstr(argv[i], ".trv")) {
      void* library = dlopen(argv[i], RTLD_NOW | RTLD_LOCAL);
      void* symbol = library ? dlsym(library, "trv_plugin") : NULL;
      trv_plugin_fn fn;
      memcpy(&fn, &symbol, sizeof(fn));
      driver = symbol ? fn() : NULL;
      if (!driver) printf("%s is no plug-in: %s\n", argv[i], library ? "no trv_plugin" : dlerror());
#endif
    } else if (count < 64) {
      programs[count++] = argv[i];
    }
  }
#ifdef CONFORMANCE_LINKED
  driver = trv_plugin();
#endif
  if (!driver) return 2;
  test_struct();
  test_memory();
  test_import();
  test_join();
  for (int i = 0; i < count; i++) {
    test_program(programs[i]);
    test_refusals(programs[i]);
    test_faults(programs[i]);
  }
  printf("%s\n", failures ? "FAILED" : "ok");
  return failures != 0;
}
