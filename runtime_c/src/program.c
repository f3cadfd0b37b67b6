/* program.c - opens a file in place: head, segments, entries; answers what is in it. */
#include "private.h"

/* ---- head
 * ----------------------------------------------------------------------------------------------------------
 */
static int little_endian(void) {
  const uint16_t one = 1;
  uint8_t low;
  memcpy(&low, &one, 1);
  return low == 1;
}

/* CRC of the head with its own field taken as 0. */
static uint32_t head_crc(const trv_fb* fb, uint32_t field) {
  static const uint8_t zeros[4];
  uint32_t crc = trvi_crc32c(0, fb->base, field);
  crc = trvi_crc32c(crc, zeros, 4);
  return trvi_crc32c(crc, fb->base + field + 4, fb->size - field - 4);
}

/* Segments ascend and do not overlap, so that checking them all is linear in the file's size. */
static trv_status verify_segments(trv_program* prog, uint64_t head_size, uint64_t file_size,
                                  uint64_t external_size) {
  const uint64_t size[2] = {file_size, external_size};
  uint64_t end[2] = {head_size, 0};
  trv_diag* d = &prog->diag;
  for (uint32_t i = 0; i < prog->segment_count; i++) {
    const trvf_segment* g = &prog->segments[i];
    if (g->file > 1 || !trvi_power_of_two(g->align) || (g->offset & (g->align - 1)) ||
        g->offset < end[g->file] || g->size > INT64_MAX || g->offset > INT64_MAX)
      return trvi_fail_of(d, TRVI_SEGMENT, i);
    if (g->size > size[g->file] || g->offset > size[g->file] - g->size) {
      return trvi_fail_at(d, TRVI_TRUNCATED, i, trvi_clamp(g->offset + g->size),
                          trvi_clamp(size[g->file]));
    }
    end[g->file] = g->offset + g->size;
  }
  return TRV_OK;
}

/* file_size: what there is; prog->file: what of it is in memory, the head at least. */
static trv_status open_head(trv_program* prog, uint64_t file_size) {
  trv_diag* d = &prog->diag;
  trv_fb fb;
  if (prog->file.size < 16 || memcmp(prog->file.data + 4, "TRV", 3) != 0)
    return trvi_fail(d, TRVI_FOREIGN);
  if (prog->file.data[7] != '1') {
    return trvi_fail_at(d, TRVI_MAJOR, TRV_NONE, 1, prog->file.data[7] - '0');
  }
  const uint32_t root = trv_fb_open(&fb, prog->file, "TRV1");
  const uint32_t head_at = trv_fb_field(&fb, root, TRVF_PROGRAM_HEAD, sizeof(trvf_head), 8);
  if (fb.bad || head_at == 0) return trvi_fail(d, TRVI_HEAD);
  const trvf_head* head = (const void*)(fb.base + head_at);
  if (head->size > 0x7FFFFFFFu || head->size < head_at + sizeof(*head))
    return trvi_fail(d, TRVI_HEAD);
  if (head->size > file_size) {
    return trvi_fail_at(d, TRVI_TRUNCATED, TRV_NONE, (trv_dim)head->size, trvi_clamp(file_size));
  }
  if (head->size > prog->file.size) {
    return trvi_fail_at(d, TRVI_HEAD_ROOM, TRV_NONE, (trv_dim)head->size, (trv_dim)prog->file.size);
  }
  fb.size = (uint32_t)head->size; /* nothing of the head may lie among the segments */
  if (prog->reader) prog->file.size = fb.size;
  if (!trv_fb_check_table(&fb, root)) return trvi_fail(d, TRVI_HEAD);
  const uint32_t field = head_at + (uint32_t)offsetof(trvf_head, crc);
  const uint32_t crc = prog->flags & TRV_OPEN_NO_CRC ? head->crc : head_crc(&fb, field);
  if (crc != head->crc)
    return trvi_fail_at(d, TRVI_HEAD_CRC, TRV_NONE, (trv_dim)head->crc, (trv_dim)crc);

  const uint32_t min_abi = trv_fb_u16(&fb, root, TRVF_PROGRAM_MIN_ABI, 0);
  if (min_abi > TRV_FILE_ABI) {
    return trvi_fail_at(d, TRVI_NEWER, TRV_NONE, (trv_dim)min_abi, TRV_FILE_ABI);
  }
  const uint64_t features =
      trv_fb_u64(&fb, root, TRVF_PROGRAM_FEATURES, 0) & ~(uint64_t)TRVI_FEATURES;
  if (features) return trvi_fail_at(d, TRVI_FEATURES, TRV_NONE, 0, trvi_clamp(features));

  const trvf_external* external =
      trv_fb_struct(&fb, root, TRVF_PROGRAM_EXTERNAL, sizeof(*external), 8);
  prog->segments = trv_fb_vector(&fb, root, TRVF_PROGRAM_SEGMENTS, sizeof(trvf_segment), 8,
                                 &prog->segment_count);
  const void* entries = trv_fb_vector(&fb, root, TRVF_PROGRAM_ENTRIES, 4, 4, &prog->entry_count);
  prog->root = root;
  if (fb.bad || !entries) return trvi_fail(d, TRVI_HEAD);
  const trv_status st = verify_segments(prog, fb.size, file_size, external ? external->size : 0);
  if (st) return st;

#ifndef TRV_ONE_MEMORY
  const uint32_t memories = trvi_memory_count(prog, &fb);
  for (uint32_t m = 0; m < memories && m < TRVI_MEMORIES; m++)
    if (*trvi_memory_owner(prog, &fb, m) && m == 0) fb.bad = 1;
  if (fb.bad || memories > TRVI_MEMORIES) return trvi_fail(d, TRVI_HEAD);
#endif
  uint32_t work =
      (uint32_t)1 << 28; /* below a second; honest programs stay under a thousandth of it */
  for (uint32_t i = 0; i < prog->entry_count; i++) {
    trvi_plan plan;
    trvi_plan_read(prog, &fb, i, &plan);
    uint32_t at = i;
    const int fault = trvi_verify_entry(prog, &fb, &plan, &work, &at);
    if (fault) return trvi_fail_of(d, fault, at);
  }
  return TRV_OK;
}

/* ---- segments
 * ------------------------------------------------------------------------------------------------------
 */
static trv_status check_crc(const trv_program* prog, uint32_t index, trv_span bytes, trv_diag* d) {
  const uint32_t want = prog->segments[index].crc, crc = trvi_crc32c(0, bytes.data, bytes.size);
  if (crc == want) return TRV_OK;
  return trvi_fail_at(d, TRVI_SEGMENT_CRC, index, (trv_dim)want, (trv_dim)crc);
}

static trv_span segment_span(const trv_program* prog, const trvf_segment* g) {
  const trv_span* from = g->file ? &prog->external : &prog->file;
  trv_span out = {from->data + (size_t)g->offset, (size_t)g->size};
  return out;
}

/* CRC of a segment that only the reader has, in pieces. */
static trv_status check_through_reader(trv_program* prog, uint32_t index) {
  const trvf_segment* g = &prog->segments[index];
  uint8_t piece[256];
  uint32_t crc = 0;
  for (uint64_t at = 0; at < g->size;) {
    const size_t n = g->size - at < sizeof(piece) ? (size_t)(g->size - at) : sizeof(piece);
    if (prog->reader->read(prog->reader->self, g->offset + at, piece, n))
      return trvi_fail_of(&prog->diag, TRVI_READER, index);
    crc = trvi_crc32c(crc, piece, n);
    at += n;
  }
  if (crc == g->crc) return TRV_OK;
  return trvi_fail_at(&prog->diag, TRVI_SEGMENT_CRC, index, (trv_dim)g->crc, (trv_dim)crc);
}

/* files: 1 this one, 2 the external one, 3 both. */
static trv_status check_segments(trv_program* prog, uint32_t files) {
  for (uint32_t i = 0; i < prog->segment_count; i++) {
    const uint32_t file = prog->segments[i].file;
    if (!(files >> file & 1)) continue;
    const trv_status st =
        prog->reader && file == 0
            ? check_through_reader(prog, i)
            : check_crc(prog, i, segment_span(prog, &prog->segments[i]), &prog->diag);
    if (st) return st;
  }
  prog->flags |= files * TRVI_CHECKED;
  return TRV_OK;
}

trv_status trvi_segment(const trv_program* prog, uint32_t index, trv_span* out_span,
                        trv_diag* diag) {
  const trvf_segment* g = &prog->segments[index];
  if (g->file == 0 && prog->reader) return trvi_fail_of(diag, TRVI_UNMAPPED, index);
  if (g->file && !prog->external.data) return trvi_fail_of(diag, TRVI_DETACHED, index);
  *out_span = segment_span(prog, g);
  if (prog->flags & (TRV_OPEN_NO_CRC | TRVI_CHECKED << g->file)) return TRV_OK;
  return check_crc(prog, index, *out_span, diag);
}

trv_status trvi_segment_read(const trv_program* prog, uint32_t index, void* dst, size_t size,
                             trv_diag* diag) {
  const trvf_segment* g = &prog->segments[index];
  if (prog->reader->read(prog->reader->self, g->offset, dst, size))
    return trvi_fail_of(diag, TRVI_READER, index);
  if ((prog->flags & (TRV_OPEN_NO_CRC | TRVI_CHECKED)) || size != g->size) return TRV_OK;
  const trv_span bytes = {dst, size};
  return check_crc(prog, index, bytes, diag);
}

/* ---- open
 * ----------------------------------------------------------------------------------------------------------
 */
static trv_status open_checks(trv_program* out_prog, const void* data) {
  trvi_diag_clear(&out_prog->diag);
  if (!little_endian()) return trvi_fail(&out_prog->diag, TRVI_BYTE_ORDER);
  if (!data || ((uintptr_t)data & 15))
    return trvi_fail_at(&out_prog->diag, TRVI_BYTES, TRV_NONE, 16, (trv_dim)((uintptr_t)data & 15));
  return TRV_OK;
}

trv_status trv_program_open(trv_program* out_prog, trv_span file, uint32_t flags) {
  if (!out_prog) return TRV_ARGUMENT;
  memset(out_prog, 0, sizeof(*out_prog));
  trv_status st = open_checks(out_prog, file.data);
  if (st) return st;
  out_prog->file = file;
  out_prog->flags = flags & 0xFFu;
  st = open_head(out_prog, file.size);
  if (!st && !(flags & (TRV_OPEN_DEFER_CRC | TRV_OPEN_NO_CRC))) st = check_segments(out_prog, 1);
  if (st) out_prog->entry_count = out_prog->segment_count = 0;
  return st;
}

trv_status trv_program_open_reader(trv_program* out_prog, const trv_reader* reader, void* head,
                                   size_t head_size, uint32_t flags) {
  if (!out_prog) return TRV_ARGUMENT;
  memset(out_prog, 0, sizeof(*out_prog));
  trv_status st = open_checks(out_prog, head);
  if (st) return st;
  if (!reader || !reader->read) return trvi_fail(&out_prog->diag, TRVI_NO_READER);
  const size_t n = reader->size < head_size ? (size_t)reader->size : head_size;
  if (reader->read(reader->self, 0, head, n)) return trvi_fail(&out_prog->diag, TRVI_READER);
  out_prog->file.data = head;
  out_prog->file.size = n;
  out_prog->reader = reader;
  out_prog->flags = flags & 0xFFu;
  if (head_size < 256 && reader->size > head_size)
    st = trvi_fail_at(&out_prog->diag, TRVI_HEAD_ROOM, TRV_NONE, 256, (trv_dim)head_size);
  else
    st = open_head(out_prog, reader->size);
  if (st) out_prog->entry_count = out_prog->segment_count = 0;
  return st;
}

trv_status trv_program_attach(trv_program* prog, trv_span weights, uint32_t flags) {
  if (!prog || !prog->entry_count) return TRV_ARGUMENT;
  trv_fb fb = trvi_reader(prog);
  const trvf_external* x = trv_fb_struct(&fb, prog->root, TRVF_PROGRAM_EXTERNAL, sizeof(*x), 8);
  trvi_diag_clear(&prog->diag);
  if (!x) return trvi_fail(&prog->diag, TRVI_NO_EXTERNAL);
  if (!weights.data || ((uintptr_t)weights.data & 15)) return trvi_fail(&prog->diag, TRVI_BYTES);
  if (weights.size != x->size) {
    return trvi_fail_at(&prog->diag, TRVI_OTHER_WEIGHTS, TRV_NONE, trvi_clamp(x->size),
                        (trv_dim)weights.size);
  }
  prog->external = weights;
  prog->flags &= ~(TRVI_CHECKED << 1);
  if (flags & TRV_OPEN_NO_CRC) prog->flags |= TRVI_CHECKED << 1;
  if (flags & (TRV_OPEN_DEFER_CRC | TRV_OPEN_NO_CRC)) return TRV_OK;
  const trv_status st = check_segments(prog, 2);
  if (st) memset(&prog->external, 0, sizeof(prog->external));
  return st;
}

trv_status trv_program_check(trv_program* prog) {
  if (!prog || !prog->entry_count) return TRV_ARGUMENT;
  trvi_diag_clear(&prog->diag);
  return check_segments(prog, prog->external.data ? 3 : 1);
}

/* ---- what is in it
 * -------------------------------------------------------------------------------------------------
 */
void trvi_plan_read(const trv_program* prog, trv_fb* fb, uint32_t index, trvi_plan* out_plan) {
  static const struct {
    uint8_t slot, size, align;
  } list[TRVI_VECTORS] = {
      {TRVF_ENTRY_DIMS, sizeof(trvf_dim), 8},
      {TRVF_ENTRY_REGIONS, sizeof(trvf_region), 8},
      {TRVF_ENTRY_STORAGES, sizeof(trvf_storage), 8},
      {TRVF_ENTRY_VALUES, sizeof(trvf_value), 8},
      {TRVF_ENTRY_INPUTS, 4, 4},
      {TRVF_ENTRY_OUTPUTS, 4, 4},
      {TRVF_ENTRY_STEPS, sizeof(trvf_step), 4},
      {TRVF_ENTRY_PARTS, 4, 4},
#ifndef TRV_ONE_MEMORY
      {TRVF_ENTRY_WAITS, sizeof(trvf_wait), 4},
#endif
  };
  uint32_t n;
  const void* entries = trv_fb_vector(fb, prog->root, TRVF_PROGRAM_ENTRIES, 4, 4, &n);
  trvi_plan* p = out_plan;
  memset(p, 0, sizeof(*p));
  if (index >= n) {
    fb->bad = 1;
    return;
  }
  const uint32_t t = p->table = trv_fb_table_at(fb, entries, index);
  for (uint32_t i = 0; i < TRVI_VECTORS; i++)
    p->vectors[i] = trv_fb_vector(fb, t, list[i].slot, list[i].size, list[i].align, &p->counts[i]);
  p->times = trv_fb_u32(fb, t, TRVF_ENTRY_TIMES, 0);
}

void trvi_part_read(trv_fb* fb, const trvi_plan* plan, uint32_t index, trvi_part* out_part) {
  const uint32_t t = trv_fb_table_at(fb, plan->parts, index);
  uint32_t n;
  out_part->delegate = trv_fb_string(fb, t, TRVF_PART_DELEGATE);
  out_part->format = trv_fb_string(fb, t, TRVF_PART_FORMAT);
  out_part->data.data = trv_fb_vector(fb, t, TRVF_PART_DATA, 1, 1, &n);
  out_part->data.size = n;
  out_part->segment = (int32_t)trv_fb_u32(fb, t, TRVF_PART_SEGMENT, TRV_NONE);
  out_part->inputs = trv_fb_vector(fb, t, TRVF_PART_INPUTS, 4, 4, &out_part->input_count);
  out_part->outputs = trv_fb_vector(fb, t, TRVF_PART_OUTPUTS, 4, 4, &out_part->output_count);
}

#ifndef TRV_ONE_MEMORY
uint32_t trvi_memory_count(const trv_program* prog, trv_fb* fb) {
  uint32_t n;
  trv_fb_vector(fb, prog->root, TRVF_PROGRAM_MEMORIES, 4, 4, &n);
  return n;
}

const char* trvi_memory_owner(const trv_program* prog, trv_fb* fb, uint32_t m) {
  uint32_t n;
  const void* rows = trv_fb_vector(fb, prog->root, TRVF_PROGRAM_MEMORIES, 4, 4, &n);
  const char* owner =
      m < n ? trv_fb_string(fb, trv_fb_table_at(fb, rows, m), TRVF_MEMORY_DELEGATE) : NULL;
  return owner ? owner : "";
}
#endif

uint32_t trvi_names_check(trv_fb* fb, const trvi_plan* plan) {
  uint32_t n, rows = 0;
  if (!trv_fb_string(fb, plan->table, TRVF_ENTRY_NAME)) fb->bad = 1;
  trv_fb_string(fb, plan->table, TRVF_ENTRY_SIGNATURE);
  for (uint32_t slot = TRVF_ENTRY_INPUT_NAMES; slot <= TRVF_ENTRY_OUTPUT_NAMES; slot += 2) {
    const void* names = trv_fb_vector(fb, plan->table, slot, 4, 4, &n);
    for (uint32_t i = 0; i < n; i++) trv_fb_string_at(fb, names, i);
    rows += n;
  }
  return rows;
}

static trv_status find_plan(const trv_program* prog, uint32_t entry, trv_fb* fb, trvi_plan* plan) {
  if (!prog || entry >= prog->entry_count) return TRV_ARGUMENT;
  *fb = trvi_reader(prog);
  trvi_plan_read(prog, fb, entry, plan);
  return fb->bad ? TRV_FORMAT : TRV_OK;
}

trv_status trv_program_entry(const trv_program* prog, uint32_t index, trv_entry* out_entry) {
  trv_fb fb;
  trvi_plan p;
  const trv_status st = find_plan(prog, index, &fb, &p);
  if (st || !out_entry) return st ? st : TRV_ARGUMENT;
  trv_entry* e = out_entry;
  e->name = trv_fb_string(&fb, p.table, TRVF_ENTRY_NAME);
  e->index = index;
  e->input_count = p.input_count;
  e->output_count = p.output_count;
  e->region_count = p.region_count;
  e->step_count = p.step_count;
  e->value_count = p.value_count;
  e->storage_count = p.storage_count;
  e->dim_count = p.dim_count;
  e->part_count = p.part_count;
  e->table = p.table;
  e->times = p.times;
  e->lower_bound = trv_fb_u64(&fb, p.table, TRVF_ENTRY_LOWER_BOUND, 0);
  e->signature = trv_fb_string(&fb, p.table, TRVF_ENTRY_SIGNATURE);
  return TRV_OK;
}

trv_status trv_program_find(const trv_program* prog, const char* name, trv_entry* out_entry) {
  if (!prog || !name || !out_entry) return TRV_ARGUMENT;
  for (uint32_t i = 0; i < prog->entry_count; i++) {
    const trv_status st = trv_program_entry(prog, i, out_entry);
    if (st) return st;
    if (strcmp(out_entry->name, name) == 0) return TRV_OK;
  }
  return TRV_ARGUMENT;
}

trv_status trv_program_region(const trv_program* prog, uint32_t entry, uint32_t i,
                              trv_region* out_region) {
  trv_fb fb;
  trvi_plan p;
  const trv_status st = find_plan(prog, entry, &fb, &p);
  if (st || i >= p.region_count || !out_region) return st ? st : TRV_ARGUMENT;
  const trvf_region* r = &p.regions[i];
  out_region->kind = r->kind;
  out_region->memory = r->memory;
  out_region->id = r->id;
  out_region->align = r->align;
  out_region->size = r->size;
  out_region->flags = 0;
  for (uint32_t k = 0; k < p.storage_count; k++) {
    const trvf_storage* s = &p.storages[k];
    const trvf_region* in = &p.regions[s->region];
    const uint32_t at =
        in->kind == TRV_REGION_KIND_IO && r->kind == TRV_REGION_KIND_ARENA ? in->home : s->region;
    if (at == i && ((s->size_dim && !trvi_row_const(&p, s->size_dim)) || (s->flags & 1)))
      out_region->flags = 1;
  }
  return TRV_OK;
}

static trv_status find_slot(const trv_program* prog, uint32_t entry, uint32_t i, trv_slot* out,
                            int output) {
  trv_fb fb;
  trvi_plan p;
  const trv_status st = find_plan(prog, entry, &fb, &p);
  if (st || i >= (output ? p.output_count : p.input_count) || !out) return st ? st : TRV_ARGUMENT;
  uint32_t n;
  const void* names = trv_fb_vector(
      &fb, p.table, output ? TRVF_ENTRY_OUTPUT_NAMES : TRVF_ENTRY_INPUT_NAMES, 4, 4, &n);
  const uint32_t id = output ? p.outputs[i] : p.inputs[i];
  const trvf_value* v = &p.values[id];
  memset(out, 0, sizeof(*out));
  out->name = i < n ? trv_fb_string_at(&fb, names, i) : NULL;
  if (!out->name) out->name = "";
  out->value = id;
  out->dtype = v->dtype;
  out->rank = v->rank;
  for (uint32_t k = 0; k < v->rank; k++) {
    const trvf_dim* row = &p.dims[v->dim[k]];
    out->dim[k] = row->op == TRV_DIM_OP_CONST ? row->min : -1;
    out->min[k] = row->min;
    out->max[k] = row->max;
  }
  return TRV_OK;
}

trv_status trv_program_input(const trv_program* prog, uint32_t entry, uint32_t i,
                             trv_slot* out_slot) {
  return find_slot(prog, entry, i, out_slot, 0);
}

trv_status trv_program_output(const trv_program* prog, uint32_t entry, uint32_t i,
                              trv_slot* out_slot) {
  return find_slot(prog, entry, i, out_slot, 1);
}

const char* trv_program_debug(const trv_program* prog, uint32_t entry, uint32_t time,
                              uint32_t field) {
  if (!prog || entry >= prog->entry_count || prog->reader || field > 3) return "";
  trv_fb fb = trvi_reader(prog);
  const uint32_t index = trv_fb_u32(&fb, prog->root, TRVF_PROGRAM_DEBUG_SEGMENT, TRV_NONE);
  if (index >= prog->segment_count || prog->segments[index].file) return "";
  const trv_span bytes = segment_span(prog, &prog->segments[index]);
  uint32_t n;
  if ((uintptr_t)bytes.data & 3) return "";
  const uint32_t root = trv_fb_open(&fb, bytes, "TRVD");
  const void* entries = trv_fb_vector(&fb, root, TRVF_DEBUG_ENTRIES, 4, 4, &n);
  const uint32_t e = entry < n ? trv_fb_table_at(&fb, entries, entry) : 0;
  const void* times = trv_fb_vector(&fb, e, TRVF_DEBUG_ENTRY_TIMES, 4, 4, &n);
  const uint32_t t = time < n ? trv_fb_table_at(&fb, times, time) : 0;
  const char* text = trv_fb_string(&fb, t, TRVF_DEBUG_TIME_OP + 2 * field);
  return text ? text : "";
}
