/* part.c - parts: machine code and launches. All launches of a part are one graph, made when the
 * part is opened; when an address or a size changes, the graph's kernels get new parameters. A few
 * graphs are kept per part, so that sizes that take turns do not cost that.
 *
 * A part may be hostile: the host checks every number that it uses. The machine code itself cannot
 * be checked; who must not trust a file verifies its signature.
 */
#include <stddef.h>
#include <string.h>

#include "device.h"
#include "trivet/fb.h"

#define GRAPHS 4        /* sets of addresses and sizes that are kept */
#define MOST_WORDS 512u /* 4096 bytes of parameters */
#define MOST_GRID_X 0x7FFFFFFF
#define MOST_GRID_YZ 65535

enum { WORD_VALUE = 0, WORD_DIM = 1, WORD_FLAG = 2, IMAGE_CUBIN = 0, IMAGE_PTX = 1 };

typedef struct part_data {
  const trvf_cuda_image* image; /* the best one for this device */
  const trvf_cuda_launch* launches;
  const trvf_cuda_word* words;
  const uint8_t* code;
  uint32_t launch_count, word_count, kernel_count;
} part_data;

typedef struct bound { /* a part with addresses and sizes */
  trvu_handle* exec;
  uint64_t used; /* when, counted in runs; 0: never */
  uint64_t* words;
  uint32_t* grids; /* three per launch */
} bound;

struct trv_part {
  part_data data;
  trvu_handle *module, *graph;
  trvu_handle** functions; /* by kernel */
  trvu_handle** nodes;     /* by launch */
  bound sets[GRAPHS];
  uint64_t runs;
  uint64_t* words; /* of the present epoch */
  uint32_t* grids;
  uint32_t epoch, current, known;
};

static trv_status refuse(trv_diag* diag, trv_status status, const char* what, int64_t expected,
                         int64_t got) {
  if (diag) {
    memset(diag, 0, sizeof(*diag));
    diag->status = status;
    diag->step = diag->time = diag->value = diag->axis = TRV_NONE;
    diag->what = what;
    diag->expected = diag->limit = expected;
    diag->got = got;
  }
  return status;
}

/* ---- acceptance ---- */
static const trvf_cuda_image* best_image(const trvf_cuda_image* images, uint32_t count,
                                         uint32_t arch) {
  const trvf_cuda_image* best = NULL;
  for (uint32_t i = 0; i < count; i++) {
    const trvf_cuda_image* m = &images[i];
    const int fits = m->kind == IMAGE_CUBIN ? m->arch / 10 == arch / 10 && m->arch <= arch
                                            : m->kind == IMAGE_PTX && m->arch <= arch;
    if (!fits) continue;
    if (!best || m->kind < best->kind || (m->kind == best->kind && m->arch > best->arch)) best = m;
  }
  return best;
}

/* Is it an image that the driver will read within its bytes? Cubins are ELF files, whose tables
 * must lie inside; PTX is text that ends. */
static int image_ok(const uint8_t* p, uint32_t size, uint32_t kind) {
  if (kind == IMAGE_PTX) return size > 0 && p[size - 1] == 0;
  if (size < 64 || memcmp(p, "\177ELF\2\1", 6) != 0) return 0;
  uint64_t phoff, shoff;
  uint16_t phsize, phnum, shsize, shnum;
  memcpy(&phoff, p + 32, 8);
  memcpy(&shoff, p + 40, 8);
  memcpy(&phsize, p + 54, 2);
  memcpy(&phnum, p + 56, 2);
  memcpy(&shsize, p + 58, 2);
  memcpy(&shnum, p + 60, 2);
  if (phoff > size || shoff > size || (uint32_t)phsize * phnum > size - phoff ||
      (uint32_t)shsize * shnum > size - shoff)
    return 0;
  if (shsize < 64 && shnum > 0) return 0;
  for (uint32_t i = 0; i < shnum; i++) { /* sections */
    const uint8_t* s = p + shoff + (size_t)i * shsize;
    uint32_t type;
    uint64_t at, bytes;
    memcpy(&type, s + 4, 4);
    memcpy(&at, s + 24, 8);
    memcpy(&bytes, s + 32, 8);
    if (type != 8 && (at > size || bytes > size - at)) return 0; /* 8: has no bytes in the file */
  }
  return 1;
}

/* CRC-32C (Castagnoli), four bits at a time. */
static uint32_t crc32c(uint32_t crc, const void* data, size_t size) {
  static const uint32_t steps[16] = {0x00000000, 0x105EC76F, 0x20BD8EDE, 0x30E349B1,
                                     0x417B1DBC, 0x5125DAD3, 0x61C69362, 0x7198540D,
                                     0x82F63B78, 0x92A8FC17, 0xA24BB5A6, 0xB21572C9,
                                     0xC38D26C4, 0xD3D3E1AB, 0xE330A81A, 0xF36E6F75};
  const uint8_t* p = data;
  crc = ~crc;
  for (size_t i = 0; i < size; i++) {
    crc ^= p[i];
    crc = (crc >> 4) ^ steps[crc & 15];
    crc = (crc >> 4) ^ steps[crc & 15];
  }
  return ~crc;
}

static const char* read_part(part_data* p, const trv_device* dev, const trv_part_desc* part,
                             trv_status* status) {
  trv_fb fb;
  const uint32_t root = trv_fb_open(&fb, part->data, "TRVU");
  uint32_t image_count = 0, code_size = 0;
  *status = TRV_FORMAT;
  const trvf_cuda_image* images =
      trv_fb_vector(&fb, root, TRVF_CUDA_PART_IMAGES, sizeof(*images), 4, &image_count);
  p->launches =
      trv_fb_vector(&fb, root, TRVF_CUDA_PART_LAUNCHES, sizeof(*p->launches), 4, &p->launch_count);
  p->words = trv_fb_vector(&fb, root, TRVF_CUDA_PART_WORDS, sizeof(*p->words), 4, &p->word_count);
  p->code = trv_fb_vector(&fb, root, TRVF_CUDA_PART_CODE, 1, 16, &code_size);
  p->kernel_count = trv_fb_u32(&fb, root, TRVF_CUDA_PART_KERNELS, 0);
  if (fb.bad) return "a damaged CUDA part";
  uint32_t crc = crc32c(0, images, image_count * sizeof(*images));
  crc = crc32c(crc, p->launches, p->launch_count * sizeof(*p->launches));
  crc = crc32c(crc, p->words, p->word_count * sizeof(*p->words));
  if (crc32c(crc, p->code, code_size) != trv_fb_u32(&fb, root, TRVF_CUDA_PART_CRC, 0))
    return "a damaged CUDA part: its checksum differs";
  if (p->kernel_count > p->launch_count) return "a CUDA part with more kernels than launches";
  for (uint32_t i = 0; i < image_count; i++)
    if (images[i].offset > code_size || images[i].size > code_size - images[i].offset ||
        images[i].offset % 16)
      return "an image that does not lie in the part";
  for (uint32_t i = 0; i < p->launch_count; i++) {
    const trvf_cuda_launch* l = &p->launches[i];
    if (l->kernel >= p->kernel_count || l->count > MOST_WORDS || l->words > p->word_count ||
        l->count > p->word_count - l->words)
      return "a launch of what is not in the part";
    if (l->threads == 0 || l->threads > 1024) return "a launch with too many threads";
    for (int g = 0; g < 3; g++)
      if (l->grid[g] >= part->view->dim_count) return "a launch whose size is not in the plan";
  }
  for (uint32_t i = 0; i < p->word_count; i++) {
    const uint32_t limit = p->words[i].kind == WORD_VALUE ? part->view->value_count
                           : p->words[i].kind == WORD_DIM ? part->view->dim_count
                                                          : 1;
    if (p->words[i].kind > WORD_FLAG || p->words[i].index >= limit)
      return "a word that names what is not in the plan";
    if (p->words[i].kind == WORD_VALUE && !trv_view_readable(part->view, p->words[i].index)) {
      *status = TRV_UNSUPPORTED;
      return "the part works in memory that this GPU does not reach";
    }
  }
  for (uint32_t i = 0; i < part->output_count; i++)
    if (part->outputs[i] >= part->view->value_count ||
        !trv_view_writable(part->view, part->outputs[i]))
      return "a part writes what it may not";
  p->image = best_image(images, image_count, (uint32_t)dev->arch);
  if (!p->image) {
    *status = TRV_UNSUPPORTED;
    return "the part has no machine code for this GPU";
  }
  if (!image_ok(p->code + p->image->offset, p->image->size, p->image->kind))
    return "a damaged image of machine code";
  *status = TRV_OK;
  return NULL;
}

/* Where everything lies in the part's memory; the whole size. base NULL: only the size. */
static size_t lay_out(trv_part* part, const part_data* d, uint8_t* base) {
  size_t at = (sizeof(trv_part) + 15) & ~(size_t)15;
  const size_t words = ((size_t)d->word_count + 1) * sizeof(uint64_t),
               grids = (size_t)d->launch_count * 3 * sizeof(uint32_t);
  const size_t step_words = (words + 15) & ~(size_t)15, step_grids = (grids + 15) & ~(size_t)15;
#define PLACE(field, type, bytes)                  \
  do {                                             \
    if (base) (field) = (type*)(void*)(base + at); \
    at += ((bytes) + 15) & ~(size_t)15;            \
  } while (0)
  PLACE(part->functions, trvu_handle*, ((size_t)d->kernel_count + 1) * sizeof(void*));
  PLACE(part->nodes, trvu_handle*, ((size_t)d->launch_count + 1) * sizeof(void*));
  PLACE(part->words, uint64_t, step_words);
  PLACE(part->grids, uint32_t, step_grids);
  for (int i = 0; i < GRAPHS; i++) {
    PLACE(part->sets[i].words, uint64_t, step_words);
    PLACE(part->sets[i].grids, uint32_t, step_grids);
  }
#undef PLACE
  return at;
}

trv_status trvu_part_need(trv_device* dev, const trv_part_desc* part, size_t* out_bytes,
                          trv_diag* diag) {
  part_data d;
  trv_status status = TRV_OK;
  if (strncmp(part->format, "cuda.", 5) != 0)
    return refuse(diag, TRV_UNSUPPORTED, "not a part of the cuda driver", 0, 0);
  if (strcmp(part->format, "cuda.1") != 0)
    return refuse(diag, TRV_VERSION, "a part of a newer cuda driver", 0, 0);
  if (dev->missing) return refuse(diag, TRV_UNSUPPORTED, dev->missing, 0, 0);
  memset(&d, 0, sizeof d);
  const char* what = read_part(&d, dev, part, &status);
  if (what) return refuse(diag, status, what, status == TRV_UNSUPPORTED ? dev->arch : 0, 0);
  trv_part none;
  *out_bytes = lay_out(&none, &d, NULL);
  return TRV_OK;
}

/* ---- opening ---- */
static void node_params(const trv_part* part, uint32_t i, const uint64_t* words,
                        const uint32_t* grids, void** slot, trvu_kernel_node* out) {
  const trvf_cuda_launch* l = &part->data.launches[i];
  union {
    const uint64_t* from;
    void* to;
  } u = {words + l->words}; /* the driver only reads it */
  memset(out, 0, sizeof(*out));
  out->function = part->functions[l->kernel];
  for (int g = 0; g < 3; g++) {
    out->grid[g] = grids && grids[3 * i] && grids[3 * i + 1] && grids[3 * i + 2]
                       ? grids[3 * i + (uint32_t)g]
                       : 1;
    out->block[g] = g == 0 ? l->threads : 1;
  }
  *slot = u.to;
  out->parameters = slot;
}

static trv_status open_graph(trv_device* dev, trv_part* part) {
  const trvu_api* cu = &dev->api;
  trv_status s = trvu_check(dev, cu->cuGraphCreate(&part->graph, 0), "no CUDA graph can be made");
  if (s) part->graph = NULL;
  for (uint32_t i = 0; s == TRV_OK && i < part->data.launch_count; i++) {
    trvu_kernel_node p;
    void* slot;
    node_params(part, i, part->words, NULL, &slot, &p);
    s = trvu_check(dev,
                   cu->cuGraphAddKernelNode(&part->nodes[i], part->graph,
                                            i ? &part->nodes[i - 1] : NULL, i ? 1 : 0, &p),
                   "a kernel cannot be put into a graph");
  }
  for (uint32_t i = 0; s == TRV_OK && i < GRAPHS; i++) {
    s = trvu_check(dev, cu->cuGraphInstantiateWithFlags(&part->sets[i].exec, part->graph, 0),
                   "a CUDA graph cannot be made ready");
    if (s) part->sets[i].exec = NULL;
    for (uint32_t g = 0; g < 3 * part->data.launch_count; g++)
      part->sets[i].grids[g] = 1; /* as in the nodes just made */
  }
  return s;
}

static void release(trv_device* dev, trv_part* part) {
  const trvu_api* cu = &dev->api;
  for (uint32_t i = 0; i < GRAPHS; i++)
    if (part->sets[i].exec) (void)cu->cuGraphExecDestroy(part->sets[i].exec);
  if (part->graph) (void)cu->cuGraphDestroy(part->graph);
  if (part->module) (void)cu->cuModuleUnload(part->module);
}

trv_status trvu_part_open(trv_device* dev, const trv_part_desc* desc, void* mem,
                          trv_part** out_part) {
  const trvu_api* cu = &dev->api;
  trv_part* part = mem;
  part_data d;
  trv_status s = TRV_OK;
  memset(&d, 0, sizeof d);
  if (read_part(&d, dev, desc, &s)) return s;
  memset(mem, 0, lay_out(part, &d, NULL));
  part->data = d;
  (void)lay_out(part, &d, mem);
  s = trvu_enter(dev);
  if (s) return s;
  s = trvu_check(dev, cu->cuModuleLoadData(&part->module, d.code + d.image->offset),
                 "the GPU's driver does not take the machine code");
  if (s) part->module = NULL;
  for (uint32_t i = 0; s == TRV_OK && i < d.kernel_count; i++) {
    char name[12] = "k", digits[11];
    uint32_t n = 0, v = i;
    do digits[n++] = (char)('0' + v % 10);
    while (v /= 10);
    for (uint32_t j = 0; j < n; j++) name[1 + j] = digits[n - 1 - j];
    s = trvu_check(dev, cu->cuModuleGetFunction(&part->functions[i], part->module, name),
                   "a kernel is missing in the machine code");
  }
  if (s == TRV_OK && !dev->plain && d.launch_count) s = open_graph(dev, part);
  if (s) release(dev, part);
  trvu_leave(dev);
  if (s == TRV_OK) *out_part = part;
  return s;
}

void trvu_part_close(trv_device* dev, trv_part* part) {
  const int held = trvu_enter(dev) == TRV_OK;
  (void)dev->api.cuStreamSynchronize(dev->stream);
  release(dev, part);
  if (held) trvu_leave(dev);
}

/* ---- running ---- */

/* Addresses and sizes of the present epoch. */
static trv_status resolve(trv_device* dev, trv_part* part, const trv_run* run) {
  const part_data* d = &part->data;
  const trv_view* v = run->view;
  for (uint32_t i = 0; i < d->word_count; i++) {
    const trvf_cuda_word* word = &d->words[i];
    if (word->kind == WORD_FLAG) {
      part->words[i] = dev->flag_address;
      continue;
    }
    if (word->kind == WORD_DIM) {
      part->words[i] = (uint64_t)(int64_t)v->dims[word->index];
      continue;
    }
    const uint32_t region = v->storages[v->values[word->index].storage].region;
    uint64_t address = v->regions[region].dev;
    if (!address && dev->pageable) address = (uint64_t)(uintptr_t)v->regions[region].host;
    if (!address) {
      refuse(run->diag, TRV_ARGUMENT, "a region that the GPU cannot address", 0, 0);
      if (run->diag) run->diag->value = region;
      return TRV_ARGUMENT;
    }
    part->words[i] = address + (uint64_t)trv_view_offset(v, word->index);
  }
  for (uint32_t i = 0; i < d->launch_count; i++) {
    for (uint32_t g = 0; g < 3; g++) {
      const trv_dim n = v->dims[d->launches[i].grid[g]], most = g == 0 ? MOST_GRID_X : MOST_GRID_YZ;
      if (n < 0 || n > most) {
        refuse(run->diag, TRV_ARGUMENT, "a size that is too large for the GPU", most, n);
        if (run->diag) run->diag->time = d->launches[i].time;
        return TRV_ARGUMENT;
      }
      part->grids[3 * i + g] = (uint32_t)n;
    }
  }
  return TRV_OK;
}

static int empty(const uint32_t* grid) { return !grid[0] || !grid[1] || !grid[2]; }

/* The graph with these parameters: a kept one, or the one longest not used, given new ones. */
static trv_status choose(trv_device* dev, trv_part* part) {
  const trvu_api* cu = &dev->api;
  const part_data* d = &part->data;
  const size_t words = (size_t)d->word_count * sizeof(uint64_t),
               grids = (size_t)d->launch_count * 3 * sizeof(uint32_t);
  uint32_t oldest = 0;
  for (uint32_t i = 0; i < GRAPHS; i++) {
    const bound* b = &part->sets[i];
    if (b->used && memcmp(b->words, part->words, words) == 0 &&
        memcmp(b->grids, part->grids, grids) == 0) {
      part->current = i;
      return TRV_OK;
    }
    if (b->used < part->sets[oldest].used) oldest = i;
  }
  bound* b = &part->sets[oldest];
  b->used = 0; /* until all is set */
  for (uint32_t i = 0; i < d->launch_count; i++) {
    const trvf_cuda_launch* l = &d->launches[i];
    const uint32_t* grid = &part->grids[3 * i];
    trvu_kernel_node p;
    void* slot;
    if (memcmp(b->words + l->words, part->words + l->words, l->count * sizeof(uint64_t)) == 0 &&
        memcmp(b->grids + 3 * i, grid, 12) == 0)
      continue;
    node_params(part, i, part->words, part->grids, &slot, &p);
    trv_status s = trvu_check(dev, cu->cuGraphExecKernelNodeSetParams(b->exec, part->nodes[i], &p),
                              "a CUDA graph cannot be changed");
    if (s == TRV_OK && (empty(grid) || empty(b->grids + 3 * i)))
      s = trvu_check(dev, cu->cuGraphNodeSetEnabled(b->exec, part->nodes[i], !empty(grid)),
                     "a CUDA graph cannot be changed");
    if (s) {
      memset(b->words, 0xFF, words); /* what it holds now is not known */
      memset(b->grids, 0, grids);
      return s;
    }
  }
  memcpy(b->words, part->words, words);
  memcpy(b->grids, part->grids, grids);
  part->current = oldest;
  return trvu_check(dev, cu->cuGraphUpload(b->exec, dev->stream),
                    "a CUDA graph cannot be made ready");
}

/* One kernel after the other; with hooks each node is waited for, so that its outputs may be read.
 */
static trv_status run_plain(trv_device* dev, trv_part* part, const trv_run* run) {
  const trvu_api* cu = &dev->api;
  const part_data* d = &part->data;
  const trv_hooks* hooks = run->hooks;
  for (uint32_t i = 0; i < d->launch_count; i++) {
    const trvf_cuda_launch* l = &d->launches[i];
    const int first = i == 0 || d->launches[i - 1].time != l->time;
    const int last = i + 1 == d->launch_count || d->launches[i + 1].time != l->time;
    trv_status s = TRV_OK;
    if (hooks && first) {
      if (hooks->size >= offsetof(trv_hooks, work) + sizeof(hooks->work) && hooks->work) {
        const trv_work work = {
            .size = sizeof(work), .time = l->time, .tiles = 1, .isa = 0, .kernel = "cuda"};
        hooks->work(hooks->self, &work);
      }
      if (hooks->begin) hooks->begin(hooks->self, l->time);
    }
    if (!empty(&part->grids[3 * i])) {
      trvu_kernel_node p;
      void* slot;
      node_params(part, i, part->words, part->grids, &slot, &p);
      s = trvu_check(dev,
                     cu->cuLaunchKernel(p.function, p.grid[0], p.grid[1], p.grid[2], p.block[0], 1,
                                        1, 0, dev->stream, p.parameters, NULL),
                     "a kernel cannot be launched");
    }
    if (s == TRV_OK && hooks && last) {
      s = trvu_check(dev, cu->cuStreamSynchronize(dev->stream), "the GPU's work fails");
      if (s == TRV_OK && hooks->end) hooks->end(hooks->self, l->time);
    }
    if (s) {
      refuse(run->diag, s, dev->what, 0, dev->error);
      if (run->diag) run->diag->time = l->time;
      return s;
    }
  }
  return TRV_OK;
}

trv_status trvu_run(trv_device* dev, trv_part* part, const trv_run* run, uint64_t* out_point) {
  trv_status s = TRV_OK;
  const int changed = !part->known || part->epoch != run->epoch;
  if (changed) {
    part->known = 0;
    s = resolve(dev, part, run);
    if (s) return s;
  }
  s = trvu_enter(dev);
  if (s) return refuse(run->diag, s, dev->what, 0, dev->error);
  if (dev->plain || run->hooks || part->data.launch_count == 0) {
    s = run_plain(dev, part, run);
    if (s) {
      trvu_leave(dev);
      return s;
    }
    part->known = 0; /* the graph may still have old parameters */
  } else {
    if (changed) s = choose(dev, part);
    if (s == TRV_OK) {
      bound* b = &part->sets[part->current];
      s = trvu_check(dev, dev->api.cuGraphLaunch(b->exec, dev->stream),
                     "a CUDA graph cannot be launched");
      if (s == TRV_OK) b->used = ++part->runs;
    }
    if (s == TRV_OK) {
      part->epoch = run->epoch;
      part->known = 1;
    }
  }
  if (s == TRV_OK) s = trvu_mark(dev, out_point);
  trvu_leave(dev);
  return s ? refuse(run->diag, s, dev->what, 0, dev->error) : TRV_OK;
}
