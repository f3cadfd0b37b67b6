/* driver.c - a pretend accelerator: memory of its own, which the host cannot address, and a thread
 * that works through what it is given while the host goes on. Parts ("npu_sim.1") are those of the
 * CPU driver, whose kernels run in the device's memory. For tests of everything that a real device
 * of this kind needs. */
#include "driver.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define BIAS ((uint64_t)1 << 62) /* a device address is an address of the process plus this */
#define JOBS 64u                 /* given and not done, at most */
#define STAMPS 4096u             /* points whose time is kept */

typedef struct job {
  trv_part* part; /* NULL: a copy, or a join */
  trv_run run;
  const uint8_t* src;
  uint8_t* dst;
  size_t size;
  trv_device* other;
  uint64_t other_point;
} job;

typedef struct block {
  struct block* next;
  uint8_t* base;
  size_t size;
  int owned;
} block;

struct trv_device {
  pthread_mutex_t lock;
  pthread_cond_t change; /* of given, done, stop */
  pthread_t worker;
  job jobs[JOBS];
  uint64_t stamps[STAMPS];
  uint64_t given, done;
  uint64_t failed, failed_last; /* points of work that was lost; 0: none */
  int noticed, stop;
  const char* what; /* of the failure */
  block* blocks;
  uint64_t delay_ns, fail_at, refuse; /* options */
  int import, refuse_all;
  trv_device* cpu; /* its mem follows */
};

struct trv_part {
  trv_part* inner; /* of the CPU driver */
  trv_buf* regions;
  trv_view view;
  trv_diag diag;
  uint32_t epoch, known;
};

static size_t up(size_t n) { return (n + 15) & ~(size_t)15; }

static uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* ---- device: options, worker ---- */

/* "name=number" at the start of text; *out_next: behind it. */
static int option(const char* text, const char* name, uint64_t* out, const char** out_next) {
  const size_t n = strlen(name);
  char* end;
  if (strncmp(text, name, n) != 0 || text[n] != '=') return 0;
  *out = strtoull(text + n + 1, &end, 10);
  if (end == text + n + 1) return 0;
  *out_next = end;
  return 1;
}

static int read_options(trv_device* dev, const char* text) {
  uint64_t n;
  while (text && *text) {
    if (option(text, "delay", &n, &text)) {
      dev->delay_ns = n * 1000;
    } else if (option(text, "fail", &n, &text)) {
      dev->fail_at = n;
    } else if (option(text, "refuse", &n, &text) && n < 64) {
      dev->refuse |= (uint64_t)1 << n;
    } else if (strncmp(text, "refuse=all", 10) == 0) {
      dev->refuse_all = 1;
      text += 10;
    } else if (strncmp(text, "import", 6) == 0) {
      dev->import = 1;
      text += 6;
    } else {
      return 0;
    }
    if (*text == '+') text++;
  }
  return 1;
}

/* Each returns what went wrong, or NULL. */
static const char* run_part(trv_device* dev, job* j) {
  trv_part* p = j->part;
  if (!p->known || p->epoch != j->run.epoch) {
    const trv_view* v = j->run.view;
    for (uint32_t i = 0; i < v->region_count; i++) {
      const trv_buf* b = &v->regions[i];
      p->regions[i].host = b->dev ? (uint8_t*)(uintptr_t)(b->dev - BIAS) : (uint8_t*)p;
      p->regions[i].dev = 0;
      p->regions[i].size = b->dev ? b->size : 0;
    }
    p->view = *v;
    p->view.regions = p->regions;
    p->epoch = j->run.epoch;
    p->known = 1;
  }
  j->run.view = &p->view;
  j->run.diag = &p->diag;
  memset(&p->diag, 0, sizeof(p->diag));
  if (trv_cpu_driver.run(dev->cpu, p->inner, &j->run, NULL) == TRV_OK) return NULL;
  return p->diag.what ? p->diag.what : "the simulated device failed";
}

static void follow(trv_device* other, uint64_t point) {
  pthread_mutex_lock(&other->lock);
  while (other->done < point && !other->stop) pthread_cond_wait(&other->change, &other->lock);
  pthread_mutex_unlock(&other->lock);
}

static const char* work(trv_device* dev, job* j, uint64_t point) {
  if (dev->delay_ns) {
    const struct timespec t = {(time_t)(dev->delay_ns / 1000000000u),
                               (long)(dev->delay_ns % 1000000000u)};
    nanosleep(&t, NULL);
  }
  if (point == dev->fail_at) return "the simulated device was told to fail";
  if (j->part) return run_part(dev, j);
  if (j->other)
    follow(j->other, j->other_point);
  else
    memcpy(j->dst, j->src, j->size);
  return NULL;
}

static void* worker(void* self) {
  trv_device* dev = self;
  pthread_mutex_lock(&dev->lock);
  for (;;) {
    while (dev->done == dev->given && !dev->stop) pthread_cond_wait(&dev->change, &dev->lock);
    if (dev->done == dev->given) break;
    const uint64_t point = dev->done + 1;
    job j = dev->jobs[point % JOBS];
    pthread_mutex_unlock(&dev->lock);
    const char* what = work(dev, &j, point);
    pthread_mutex_lock(&dev->lock);
    if (what && (!dev->failed || dev->noticed)) {
      dev->what = what;
      dev->failed = point;
      dev->noticed = 0;
    }
    dev->stamps[point % STAMPS] = now_ns();
    dev->done = point;
    pthread_cond_broadcast(&dev->change);
  }
  pthread_mutex_unlock(&dev->lock);
  return NULL;
}

static trv_status npu_open(void* mem, const void* config, trv_device** out_dev) {
  trv_device* dev = mem;
  const trv_config* c = config;
  pthread_condattr_t clock;
  *out_dev = NULL;
  memset(dev, 0, sizeof(*dev));
  if (!read_options(dev, c ? c->options : NULL)) return TRV_UNSUPPORTED;
  if (trv_cpu_driver.open((uint8_t*)mem + up(sizeof(*dev)), NULL, &dev->cpu)) return TRV_DEVICE;
  pthread_condattr_init(&clock);
  pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
  pthread_mutex_init(&dev->lock, NULL);
  pthread_cond_init(&dev->change, &clock);
  pthread_condattr_destroy(&clock);
  if (pthread_create(&dev->worker, NULL, worker, dev)) {
    pthread_cond_destroy(&dev->change);
    pthread_mutex_destroy(&dev->lock);
    return TRV_DEVICE;
  }
  *out_dev = dev;
  return TRV_OK;
}

static void npu_close(trv_device* dev) {
  pthread_mutex_lock(&dev->lock);
  dev->stop = 1;
  pthread_cond_broadcast(&dev->change);
  pthread_mutex_unlock(&dev->lock);
  pthread_join(dev->worker, NULL);
  trv_cpu_driver.close(dev->cpu);
  pthread_cond_destroy(&dev->change);
  pthread_mutex_destroy(&dev->lock);
}

static void npu_caps(trv_device* dev, trv_caps* out_caps) {
  out_caps->flags = TRV_CAP_ASYNC | TRV_CAP_THREADS | (dev->import ? TRV_CAP_IMPORT : 0u);
  out_caps->alignment = 64;
  out_caps->memory_free = 0;
  out_caps->arch = "npu_sim";
}

/* ---- memory ---- */
static trv_status add_block(trv_device* dev, uint8_t* base, size_t size, int owned) {
  block* b = malloc(sizeof(*b));
  if (!b) return TRV_MEMORY;
  b->base = base;
  b->size = size;
  b->owned = owned;
  pthread_mutex_lock(&dev->lock);
  b->next = dev->blocks;
  dev->blocks = b;
  pthread_mutex_unlock(&dev->lock);
  return TRV_OK;
}

static trv_status npu_alloc(trv_device* dev, size_t size, size_t align, trv_buf* out_buf) {
  void* base = NULL;
  memset(out_buf, 0, sizeof(*out_buf));
  if (size > SIZE_MAX / 4 || posix_memalign(&base, align < 64 ? 64 : align, size + !size))
    return TRV_MEMORY;
  if (add_block(dev, base, size, 1)) {
    free(base);
    return TRV_MEMORY;
  }
  out_buf->dev = (uint64_t)(uintptr_t)base + BIAS;
  out_buf->size = size;
  return TRV_OK;
}

static trv_status npu_import(trv_device* dev, void* host, size_t size, trv_buf* out_buf) {
  memset(out_buf, 0, sizeof(*out_buf));
  if (!dev->import) return TRV_UNSUPPORTED;
  if (add_block(dev, host, size, 0)) return TRV_MEMORY;
  out_buf->host = host;
  out_buf->dev = (uint64_t)(uintptr_t)host + BIAS;
  out_buf->size = size;
  return TRV_OK;
}

static void npu_free(trv_device* dev, trv_buf* buf) {
  const uint8_t* base = (const uint8_t*)(uintptr_t)(buf->dev - BIAS);
  pthread_mutex_lock(&dev->lock);
  block** at = &dev->blocks;
  while (*at && (*at)->base != base) at = &(*at)->next;
  block* b = *at;
  if (b) *at = b->next;
  pthread_mutex_unlock(&dev->lock);
  if (b && b->owned) free(b->base);
  free(b);
  memset(buf, 0, sizeof(*buf));
}

/* Under lock. Does [dev, dev + size) lie in one block? */
static int inside(const trv_device* dev, uint64_t address, size_t size) {
  for (const block* b = dev->blocks; b; b = b->next) {
    const uint64_t base = (uint64_t)(uintptr_t)b->base + BIAS;
    if (address >= base && address - base <= b->size && size <= b->size - (address - base))
      return 1;
  }
  return 0;
}

/* ---- parts ---- */
static trv_part_desc as_cpu(const trv_part_desc* part) {
  trv_part_desc d = *part;
  d.format = "cpu.1";
  return d;
}

static trv_status npu_part_need(trv_device* dev, const trv_part_desc* part, size_t* out_bytes,
                                trv_diag* diag) {
  size_t inner = 0;
  if (strcmp(part->format, "npu_sim.1") != 0) {
    diag->what = "the part's format is not npu_sim.1";
    return TRV_VERSION;
  }
  const trv_part_desc d = as_cpu(part);
  const trv_status st = trv_cpu_driver.part_need(dev->cpu, &d, &inner, diag);
  if (st) return st;
  trv_fb fb;
  uint32_t n;
  const uint32_t root = trv_fb_open(&fb, part->data, "TRVC");
  const trvf_command* c = trv_fb_vector(&fb, root, TRVF_CPU_PART_COMMANDS, sizeof(*c), 4, &n);
  for (uint32_t i = 0; i < n || dev->refuse_all; i++) {
    if (!dev->refuse_all && (c[i].op >= 64 || !(dev->refuse >> c[i].op & 1))) continue;
    diag->what = "the simulated device was told to refuse this";
    if (n) diag->time = c[dev->refuse_all ? 0 : i].time;
    return TRV_UNSUPPORTED;
  }
  *out_bytes = up(sizeof(trv_part)) + up(part->view->region_count * sizeof(trv_buf)) + inner;
  return TRV_OK;
}

static trv_status npu_part_open(trv_device* dev, const trv_part_desc* part, void* mem,
                                trv_part** out_part) {
  trv_part* p = mem;
  uint8_t* base = mem;
  const size_t table = up(part->view->region_count * sizeof(trv_buf));
  memset(p, 0, sizeof(*p));
  p->regions = (trv_buf*)(void*)(base + up(sizeof(*p)));
  const trv_part_desc d = as_cpu(part);
  *out_part = NULL;
  const trv_status st =
      trv_cpu_driver.part_open(dev->cpu, &d, base + up(sizeof(*p)) + table, &p->inner);
  if (!st) *out_part = p;
  return st;
}

static void npu_part_close(trv_device* dev, trv_part* part) {
  trv_cpu_driver.part_close(dev->cpu, part->inner);
}

/* ---- work ---- */
/* Under lock. */
static void give(trv_device* dev, const job* j, uint64_t* out_point) {
  while (dev->given - dev->done >= JOBS - 1) pthread_cond_wait(&dev->change, &dev->lock);
  dev->jobs[++dev->given % JOBS] = *j;
  *out_point = dev->given;
  pthread_cond_broadcast(&dev->change);
}

static trv_status npu_run(trv_device* dev, trv_part* part, const trv_run* run,
                          uint64_t* out_point) {
  job j;
  memset(&j, 0, sizeof(j));
  j.part = part;
  j.run = *run;
  j.run.runner = NULL;
  j.run.hooks = NULL;
  pthread_mutex_lock(&dev->lock);
  give(dev, &j, out_point);
  pthread_mutex_unlock(&dev->lock);
  return TRV_OK;
}

static trv_status npu_copy(trv_device* dev, const trv_buf* dst, const trv_buf* src, size_t size,
                           uint64_t* out_point) {
  job j;
  memset(&j, 0, sizeof(j));
  if (size > dst->size || size > src->size) return TRV_ARGUMENT;
  if (!(dst->dev || dst->host) || !(src->dev || src->host)) return TRV_ARGUMENT;
  pthread_mutex_lock(&dev->lock);
  const int ok =
      (!dst->dev || inside(dev, dst->dev, size)) && (!src->dev || inside(dev, src->dev, size));
  j.dst = dst->dev ? (uint8_t*)(uintptr_t)(dst->dev - BIAS) : dst->host;
  j.src = src->dev ? (const uint8_t*)(uintptr_t)(src->dev - BIAS) : src->host;
  j.size = size;
  if (ok) give(dev, &j, out_point);
  pthread_mutex_unlock(&dev->lock);
  return ok ? TRV_OK : TRV_ARGUMENT;
}

static trv_status npu_wait(trv_device* dev, uint64_t point, uint64_t timeout_ns) {
  struct timespec until;
  trv_status st = TRV_OK;
  const uint64_t now = now_ns(), end = timeout_ns > UINT64_MAX / 4 ? 0 : now + timeout_ns;
  until.tv_sec = (time_t)(end / 1000000000u);
  until.tv_nsec = (long)(end % 1000000000u);
  pthread_mutex_lock(&dev->lock);
  if (point > dev->given) st = TRV_ARGUMENT;
  while (!st && dev->done < point) {
    if (timeout_ns == 0)
      st = TRV_PENDING;
    else if (end == 0)
      pthread_cond_wait(&dev->change, &dev->lock);
    else if (pthread_cond_timedwait(&dev->change, &dev->lock, &until) && dev->done < point)
      st = TRV_PENDING;
  }
  if (!st && dev->failed && point >= dev->failed) {
    /* all that was under way when the failure came to light is lost; what comes later is not */
    if (!dev->noticed) {
      dev->noticed = 1;
      dev->failed_last = dev->given;
    }
    if (point <= dev->failed_last) st = TRV_DEVICE;
  }
  pthread_mutex_unlock(&dev->lock);
  return st;
}

static trv_status npu_join(trv_device* dev, trv_device* other, uint64_t point) {
  job j;
  uint64_t mine;
  memset(&j, 0, sizeof(j));
  j.other = other;
  j.other_point = point;
  pthread_mutex_lock(&dev->lock);
  give(dev, &j, &mine);
  pthread_mutex_unlock(&dev->lock);
  return TRV_OK;
}

static trv_status npu_stamp(trv_device* dev, uint64_t point, uint64_t* out_ns) {
  pthread_mutex_lock(&dev->lock);
  const int kept = point && point <= dev->done && dev->done - point < STAMPS;
  *out_ns = kept ? dev->stamps[point % STAMPS] : 0;
  pthread_mutex_unlock(&dev->lock);
  return kept ? TRV_OK : TRV_UNSUPPORTED;
}

static int32_t npu_last_error(trv_device* dev, const char** out_what) {
  pthread_mutex_lock(&dev->lock);
  *out_what = dev->what ? dev->what : "the simulated device failed";
  pthread_mutex_unlock(&dev->lock);
  return 0;
}

const trv_driver trv_npu_sim_driver = {
    .size = sizeof(trv_driver),
    .abi = TRV_HAL_ABI,
    .name = "npu_sim",
    .device_bytes = sizeof(trv_device) + 1024, /* the CPU driver's device lies behind */
    .open = npu_open,
    .close = npu_close,
    .caps = npu_caps,
    .mem_alloc = npu_alloc,
    .mem_import = npu_import,
    .mem_free = npu_free,
    .part_need = npu_part_need,
    .part_open = npu_part_open,
    .part_close = npu_part_close,
    .run = npu_run,
    .copy = npu_copy,
    .wait = npu_wait,
    .join = npu_join,
    .stamp = npu_stamp,
    .last_error = npu_last_error,
};

#ifdef TRV_PLUGIN
TRV_API const trv_driver* trv_plugin(void);
const trv_driver* trv_plugin(void) { return &trv_npu_sim_driver; }
#endif
