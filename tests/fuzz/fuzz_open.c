/* fuzz_open.c - libFuzzer target: a mutated file is opened, verified, described, built into
 * sessions and run on the CPU.
 *
 * The head's CRC is put right after each mutation, as an attacker would. Inputs lie in memory of
 * exactly their size, so that the sanitizers see every step beyond. Sizes are kept small: a hostile
 * file may well ask for a long computation, and time is bounded by sizes, not by the runtime.
 *
 *   clang -fsanitize=fuzzer,address,undefined ... && ./fuzz_open seeds/
 */
#include <stdlib.h>
#include <string.h>

#include "trivet/fb.h"
#include "trivet/trivet.h"

#define LIMIT ((uint64_t)1 << 22) /* bytes of a region or session */
#define ELEMENTS 4096             /* of a value */

uint32_t trvi_crc32c(uint32_t crc, const void* data, size_t size);
size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);
size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned seed);
int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

/* Where the head struct lies, and the head's size; 0 when it cannot be found. */
static uint32_t find_head(const uint8_t* data, size_t size, uint32_t* out_size) {
  trv_fb fb;
  const trv_span file = {data, size};
  const uint32_t root = trv_fb_open(&fb, file, "TRV1");
  const uint32_t at = trv_fb_field(&fb, root, TRVF_PROGRAM_HEAD, sizeof(trvf_head), 8);
  trvf_head head;
  if (fb.bad || !at) return 0;
  memcpy(&head, data + at, sizeof(head));
  if (head.size > size || head.size < at + sizeof(head)) return 0;
  *out_size = (uint32_t)head.size;
  return at;
}

static void mend_crc(uint8_t* data, size_t size) {
  uint32_t head_size, crc = 0;
  const uint32_t at = find_head(data, size, &head_size);
  if (!at) return;
  memcpy(data + at + offsetof(trvf_head, crc), &crc, 4);
  crc = trvi_crc32c(0, data, head_size);
  memcpy(data + at + offsetof(trvf_head, crc), &crc, 4);
}

static uint32_t next(unsigned* seed) {
  *seed = *seed * 1664525u + 1013904223u;
  return *seed >> 8;
}

/* Mostly fields: a number of 1 to 8 bytes becomes a special one, or one from elsewhere in the file.
 */
size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned seed) {
  static const int64_t special[] = {
      0,     1,  2,  3,   7,         8,         9,          10,        15,
      16,    63, 64, 255, 256,       4095,      4096,       32767,     65535,
      65536, -1, -2, -8,  INT32_MAX, INT32_MIN, UINT32_MAX, INT64_MAX, INT64_MIN};
  if (size < 16 || next(&seed) % 4 == 0) {
    size = LLVMFuzzerMutate(data, size, max_size);
  } else {
    for (uint32_t n = 1 + next(&seed) % 3; n > 0; n--) {
      const size_t width = (size_t)1 << next(&seed) % 4, at = next(&seed) % (size / width) * width;
      int64_t v = special[next(&seed) % (sizeof(special) / sizeof(*special))];
      const uint32_t how = next(&seed) % 4;
      if (how == 1) memcpy(&v, data + next(&seed) % (size / width) * width, width);
      if (how == 2) {
        memcpy(&v, data + at, width);
        v = (int64_t)((uint64_t)v + next(&seed) % 9 - 4);
      }
      memcpy(data + at, &v, width);
    }
  }
  mend_crc(data, size);
  return size;
}

static trv_buf exact(uint64_t size) {
  trv_buf b = {NULL, 0, (size_t)size};
  if (size && posix_memalign((void**)&b.host, 64, (size_t)size)) abort();
  if (size) memset(b.host, 0x3C, (size_t)size);
  return b;
}

/* Sizes as small as allowed, but not all the same. 0: the input is too large to try. */
static int bind_inputs(trv_session* s, const trv_program* p, uint32_t entry, trv_buf* bufs,
                       uint32_t count, uint32_t salt) {
  for (uint32_t i = 0; i < count; i++) {
    trv_slot slot;
    int64_t dims[TRV_MAX_RANK];
    uint64_t bytes;
    if (trv_program_input(p, entry, i, &slot)) return 0;
    bytes = trv_dtype_size(slot.dtype);
    for (uint32_t k = 0; k < slot.rank; k++) {
      dims[k] = slot.min[k] + (int64_t)((salt >> (i + k) % 16) & 3);
      if (dims[k] > slot.max[k]) dims[k] = slot.max[k];
      if (dims[k] < 0 || (dims[k] && bytes > LIMIT / (uint64_t)dims[k])) return 0;
      bytes *= (uint64_t)dims[k];
    }
    if (bytes > LIMIT) return 0;
    bufs[i] = exact(bytes);
    /* every third input stays at its planned place */
    const trv_buf nothing = {NULL, 0, 0};
    if (trv_session_bind_input(s, i, slot.dtype, slot.rank, dims,
                               (salt + i) % 3 ? bufs[i] : nothing))
      return 0;
  }
  return 1;
}

static int small_values(const trv_view* v) {
  for (uint32_t i = 0; i < v->value_count; i++) {
    uint64_t count = 1;
    for (uint32_t k = 0; k < v->values[i].rank; k++) {
      const trv_dim n = v->dims[v->values[i].dim[k]];
      if (n > ELEMENTS) return 0;
      count *= (uint64_t)n;
      if (count > ELEMENTS) return 0;
    }
  }
  return 1;
}

static void run(trv_session* s, const trv_program* p, const trv_entry* e, trv_buf* regions,
                uint32_t salt) {
  trv_buf bufs[8];
  memset(bufs, 0, sizeof(bufs));
  if (e->input_count <= 8 && bind_inputs(s, p, e->index, bufs, e->input_count, salt)) {
    trv_status st = trv_session_plan(s);
    for (int round = 0; st == TRV_MEMORY && round < 4; round++) {
      const trv_diag* d = trv_session_diag(s);
      const uint32_t k = d->value;
      if (k >= 16 || (uint64_t)d->expected > LIMIT) break;
      free(regions[k].host);
      regions[k] = exact((uint64_t)d->expected);
      if (trv_session_bind_region(s, k, regions[k])) break;
      st = trv_session_plan(s);
    }
    for (int round = 0; st == TRV_OK && small_values(trv_session_view(s)) && round < 2; round++) {
      if (trv_session_run(s)) break;
      for (uint32_t i = 0; i < e->output_count; i++) { /* outputs must be readable */
        const trv_tensor* t = trv_session_output(s, i);
        size_t bytes = trv_dtype_size(t->dtype);
        volatile uint8_t sink = 0;
        for (uint32_t k = 0; k < t->rank; k++) bytes *= (size_t)t->dim[k];
        for (size_t k = 0; k < bytes; k++) sink ^= t->data[k];
      }
      if (trv_session_reset(s)) break;
    }
  }
  for (int i = 0; i < 8; i++) free(bufs[i].host);
}

static void try_entry(const trv_program* p, uint32_t entry, const trv_bound_device* on,
                      uint32_t flags, uint32_t salt) {
  trv_entry e;
  trv_region region;
  trv_slot slot;
  trv_diag d;
  char line[64];
  trv_session* s;
  size_t bytes = 0;
  trv_buf regions[16];
  memset(regions, 0, sizeof(regions));
  if (trv_program_entry(p, entry, &e)) abort(); /* a verified entry can be read */
  for (uint32_t i = 0; i < e.output_count && i < 8; i++)
    if (trv_program_output(p, entry, i, &slot)) abort();
  for (uint32_t t = 0; t < 4; t++)
    for (uint32_t f = 0; f < 4; f++) (void)strlen(trv_program_debug(p, entry, t, f));
  int ok = e.region_count <= 16;
  for (uint32_t i = 0; ok && i < e.region_count; i++) {
    if (trv_program_region(p, entry, i, &region)) abort();
    if (region.kind == TRV_REGION_KIND_STATE || (region.kind == TRV_REGION_KIND_ARENA && !flags)) {
      ok = region.size <= LIMIT && region.align <= 4096;
      if (ok) regions[i] = exact(region.size);
    }
  }
  trv_session_desc desc = {.size = sizeof(desc),
                           .entry = entry,
                           .program = p,
                           .devices = on,
                           .device_count = 1,
                           .flags = flags,
                           .regions = regions,
                           .max_steps = 64};
  if (ok && trv_session_bytes(&desc, &bytes, &d) == TRV_OK && bytes <= LIMIT) {
    trv_buf mem = exact(bytes);
    if (trv_session_init(&desc, mem.host, mem.size, &s, &d) == TRV_OK) {
      run(s, p, &e, regions, salt);
      trv_session_deinit(s);
    } else {
      trv_diag_print(&d, line, sizeof(line));
    }
    free(mem.host);
  }
  for (int i = 0; i < 16; i++) free(regions[i].host);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static _Alignas(64) uint8_t device_memory[1024];
  trv_bound_device on = {&trv_cpu_driver, NULL};
  trv_program p;
  uint8_t* copy = NULL;
  if (trv_cpu_driver.device_bytes > sizeof(device_memory) ||
      trv_cpu_driver.open(device_memory, NULL, &on.device))
    abort();
  if (size == 0 || posix_memalign((void**)&copy, 64, size)) return 0;
  memcpy(copy, data, size);
  mend_crc(copy, size);
  const trv_span file = {copy, size};
  if (trv_program_open(&p, file, TRV_OPEN_NO_CRC) == TRV_OK) {
    const uint32_t salt = trvi_crc32c(0, copy, size);
    for (uint32_t i = 0; i < p.entry_count && i < 4; i++) {
      try_entry(&p, i, &on, 0, salt);
      try_entry(&p, i, &on, TRV_SESSION_REPLAN, salt * 7);
    }
  }
  free(copy);
  trv_cpu_driver.close(on.device);
  return 0;
}
