/* run_cases.c - runs recorded commands (tests/ops/record.py) at every level of instruction sets
 * that this machine has, and writes what they gave. For machines without Python: built for another
 * processor, run under an emulator.
 *
 * run_cases CASES RESULTS: RESULTS is, per case, the count of levels, then per level its name (16
 * bytes), the status, and the bytes of all outputs.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ops.h"

typedef struct blob {
  uint64_t offset, size,
      place; /* of the first element in the bytes; of the bytes to the next multiple of 64 */
  uint8_t *memory, *bytes, *first;
} blob;

static FILE *in, *out;

static void get(void* to, size_t size) {
  if (size && fread(to, size, 1, in) != 1) {
    fprintf(stderr, "the file of cases ends early\n");
    exit(2);
  }
}

static void put(const void* from, size_t size) {
  if (size && fwrite(from, size, 1, out) != 1) exit(3);
}

static void* room(size_t size) {
  void* p = calloc(size + 64, 1);
  if (!p) exit(4);
  return p;
}

static void get_tensor(trv_tensor* t, blob* b) {
  uint32_t head[4];
  int64_t dim[TRV_MAX_RANK], stride[TRV_MAX_RANK];
  memset(t, 0, sizeof *t);
  memset(b, 0, sizeof *b);
  get(head, sizeof head); /* is it there, dtype, rank, flags */
  if (!head[0]) return;
  get(dim, sizeof dim);
  get(stride, sizeof stride);
  get(&b->offset, sizeof b->offset);
  get(&b->size, sizeof b->size);
  get(&b->place, sizeof b->place);
  b->memory = room((size_t)b->size + 64);
  b->bytes = (uint8_t*)(((uintptr_t)b->memory + 63) & ~(uintptr_t)63) + b->place;
  b->first = room((size_t)b->size);
  get(b->first, (size_t)b->size);
  t->data = b->bytes + b->offset;
  t->dtype = (uint8_t)head[1];
  t->rank = (uint8_t)head[2];
  t->flags = (uint16_t)head[3];
  for (int i = 0; i < TRV_MAX_RANK; i++) {
    t->dim[i] = (trv_dim)dim[i];
    t->stride[i] = (trv_dim)stride[i];
  }
}

int main(int argc, char** argv) {
  uint32_t head[8];
  in = argc == 3 ? fopen(argv[1], "rb") : NULL;
  out = argc == 3 ? fopen(argv[2], "wb") : NULL;
  if (!in || !out) return 1;
  while (fread(head, sizeof head, 1, in) ==
         1) { /* op, inputs, outputs, scratch, attrs, code, dims, tiles */
    trv_tensor args[TRVK_MAX_ARGS];
    blob blobs[TRVK_MAX_ARGS];
    const uint32_t op = head[0], n = head[1] + head[2] + head[3];
    void *attrs = room(head[4]), *code = room(head[5] * sizeof(trvf_map_instr));
    int64_t* wide = room(head[6] * sizeof *wide);
    trv_dim* dims = room(head[6] * sizeof *dims);
    void* table = room(head[6] * sizeof(trvf_dim));
    if (n > TRVK_MAX_ARGS) return 5;
    get(attrs, head[4]);
    get(code, head[5] * sizeof(trvf_map_instr));
    get(wide, head[6] * sizeof *wide);
    get(table, head[6] * sizeof(trvf_dim));
    for (uint32_t i = 0; i < n; i++) get_tensor(&args[i], &blobs[i]);
    uint32_t levels = 0;
    while (trvk_isa_name(op, levels)) levels++;
    put(&levels, sizeof levels);
    for (uint32_t level = 0; level < levels; level++) {
      char name[16] = {0};
      trv_diag diag;
      memset(&diag, 0, sizeof diag);
      strncpy(name, trvk_isa_name(op, level), sizeof name - 1);
      for (uint32_t i = 0; i < head[6]; i++) dims[i] = (trv_dim)wide[i];
      for (uint32_t i = 0; i < n; i++)
        if (blobs[i].memory) memcpy(blobs[i].bytes, blobs[i].first, (size_t)blobs[i].size);
      const int32_t status =
          trvk_run(op, name, args, head[1], head[2], head[3], attrs, code, head[5],
                   head[6] ? dims : NULL, head[6] ? table : NULL, head[6], head[7], &diag);
      put(name, sizeof name);
      put(&status, sizeof status);
      for (uint32_t i = 0; i < head[2]; i++)
        if (blobs[head[1] + i].memory)
          put(blobs[head[1] + i].bytes, (size_t)blobs[head[1] + i].size);
    }
    for (uint32_t i = 0; i < n; i++) {
      free(blobs[i].memory);
      free(blobs[i].first);
    }
    free(attrs);
    free(code);
    free(wide);
    free(dims);
    free(table);
  }
  return fclose(out) == 0 ? 0 : 6;
}
