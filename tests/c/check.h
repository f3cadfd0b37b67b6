/* check.h - a test is a function that returns the number of failed checks; loading files and
 * sessions in static memory. */
#ifndef TRV_TEST_CHECK_H
#define TRV_TEST_CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "toy.h"
#include "trivet/trivet.h"

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      printf("%s:%d: %s: %s\n", __FILE__, __LINE__, __func__, #condition); \
      failures++;                                                          \
    }                                                                      \
  } while (0)

/* A file in memory of its own size, so that a read beyond it is found; aligned to 64. */
typedef struct loaded {
  uint8_t *memory, *data;
  size_t size;
} loaded;

static inline loaded load(const char* folder, const char* name) {
  loaded l = {NULL, NULL, 0};
  char path[4096];
  snprintf(path, sizeof(path), "%s%s%s", folder, *folder ? "/" : "", name);
  FILE* f = fopen(path, "rb");
  if (!f) {
    printf("%s cannot be opened\n", path);
    exit(1);
  }
  fseek(f, 0, SEEK_END);
  l.size = (size_t)ftell(f);
  fseek(f, 0, SEEK_SET);
  if (posix_memalign((void**)&l.memory, 64, l.size)) exit(1);
  l.data = l.memory;
  if (fread(l.data, 1, l.size, f) != l.size) exit(1);
  fclose(f);
  return l;
}

static inline trv_span span_of(const loaded* l) {
  const trv_span s = {l->data, l->size};
  return s;
}

/* A session of one entry with its memory and buffers. */
typedef struct rig {
  loaded file;
  trv_program program;
  trv_device device;
  trv_bound_device on;
  trv_buf regions[16];
  trv_session_desc desc;
  void* memory;
  trv_session* session;
} rig;

static inline trv_buf new_buf(uint64_t size, size_t align) {
  trv_buf b = {NULL, 0, (size_t)size};
  void* p = NULL;
  if (posix_memalign(&p, align < 16 ? 16 : align, (size_t)size + !size)) exit(1);
  memset(p, 0xFF, (size_t)size); /* nothing may depend on what memory held before */
  b.host = p;
  return b;
}

/* Opens the program and describes a session; buffers for every ARENA and STATE region. */
static inline trv_status rig_open(rig* r, const char* folder, const char* name, uint32_t entry,
                                  uint32_t flags) {
  memset(r, 0, sizeof(*r));
  r->file = load(folder, name);
  const trv_status st = trv_program_open(&r->program, span_of(&r->file), 0);
  if (st) return st;
  r->on.driver = &toy_driver;
  r->on.device = &r->device;
  r->desc.size = sizeof(r->desc);
  r->desc.entry = entry;
  r->desc.program = &r->program;
  r->desc.devices = &r->on;
  r->desc.device_count = 1;
  r->desc.flags = flags;
  r->desc.regions = r->regions;
  trv_region region;
  for (uint32_t i = 0; i < 16 && trv_program_region(&r->program, entry, i, &region) == TRV_OK;
       i++) {
    if (region.kind == TRV_REGION_KIND_STATE ||
        (region.kind == TRV_REGION_KIND_ARENA && !(flags & TRV_SESSION_REPLAN)))
      r->regions[i] = new_buf(region.size, region.align);
  }
  return TRV_OK;
}

static inline trv_status rig_init(rig* r, trv_diag* diag) {
  size_t bytes = 0;
  const trv_status st = trv_session_bytes(&r->desc, &bytes, diag);
  if (st) return st;
  r->memory = new_buf(bytes, 16).host;
  return trv_session_init(&r->desc, r->memory, bytes, &r->session, diag);
}

static inline void rig_close(rig* r) {
  trv_session_deinit(r->session);
  free(r->memory);
  for (uint32_t i = 0; i < 16; i++) free(r->regions[i].host);
  free(r->file.memory);
}

static inline trv_buf buf_of(void* data, size_t size) {
  const trv_buf b = {data, 0, size};
  return b;
}
#endif
