/* fb.h - reads hostile flatbuffers in place: tables, vectors, strings, every access checked.
 *
 * Header-only, for the runtime and for drivers whose parts are flatbuffers. A position is a byte
 * offset from the buffer's start; 0 means "not there" (0 is never a valid table, vector or string).
 * A malformed buffer sets fb->bad and reads as if the field were absent, so a caller may read on
 * and test fb->bad once at the end. Slots are the TRVF_ constants of trv_schema.h. Nothing is
 * cached: checking and reading are one step, so nothing can be read unchecked.
 *
 *   trv_fb fb;
 *   uint32_t root = trv_fb_open(&fb, data, "TRVC"), n;
 *   const trvf_command *c = trv_fb_vector(&fb, root, TRVF_CPU_PART_COMMANDS, sizeof(*c), 4, &n);
 *   if (fb.bad) return TRV_FORMAT;
 *
 * A struct pointer into the buffer is good for as long as the bytes are; alignment has been
 * checked.
 */
#ifndef TRIVET_FB_H
#define TRIVET_FB_H

#include <string.h>

#include "trivet/base.h"

typedef struct trv_fb {
  const uint8_t* base;
  uint32_t size; /* below 2^31 */
  uint32_t bad;  /* 1 once something malformed was met */
} trv_fb;

/* Little-endian machines only (trv_program_open refuses the others), so a load is a memcpy. */
static inline uint32_t trv_fb_load16(const trv_fb* fb, uint32_t pos) {
  uint16_t v;
  memcpy(&v, fb->base + pos, 2);
  return v;
}
static inline uint32_t trv_fb_load32(const trv_fb* fb, uint32_t pos) {
  uint32_t v;
  memcpy(&v, fb->base + pos, 4);
  return v;
}

/* Are size bytes at pos inside the buffer and is pos a multiple of align (a power of two)? Sets bad
 * if not. */
static inline int trv_fb_fits(trv_fb* fb, uint32_t pos, uint32_t size, uint32_t align) {
  if (pos <= fb->size && size <= fb->size - pos && (pos & (align - 1)) == 0) return 1;
  fb->bad = 1;
  return 0;
}

/* Follows the offset stored at pos to what lies there (at least 4 bytes, aligned to 4). */
static inline uint32_t trv_fb_follow(trv_fb* fb, uint32_t pos) {
  if (!trv_fb_fits(fb, pos, 4, 4)) return 0;
  const uint32_t off = trv_fb_load32(fb, pos);
  if (off == 0 || off > fb->size || !trv_fb_fits(fb, pos + off, 4, 4)) {
    fb->bad = 1;
    return 0;
  }
  return pos + off;
}

/* Checks the table at pos and its field table; returns pos or 0. */
static inline uint32_t trv_fb_check_table(trv_fb* fb, uint32_t pos) {
  if (pos == 0 || !trv_fb_fits(fb, pos, 4, 4)) return 0;
  const uint32_t vt = pos - trv_fb_load32(fb, pos); /* signed distance: wraps as intended */
  if (!trv_fb_fits(fb, vt, 4, 2)) return 0;
  const uint32_t vt_size = trv_fb_load16(fb, vt), size = trv_fb_load16(fb, vt + 2);
  if (vt_size < 4 || (vt_size & 1) || size < 4) {
    fb->bad = 1;
    return 0;
  }
  return trv_fb_fits(fb, vt, vt_size, 2) && trv_fb_fits(fb, pos, size, 4) ? pos : 0;
}

/* Starts reading data (aligned to 16 by the caller's contract). ident: the file identifier's 4
 * characters. Returns the root table, or 0 with fb->bad set. */
static inline uint32_t trv_fb_open(trv_fb* fb, trv_span data, const char* ident) {
  fb->base = data.data;
  fb->size = data.size < 0x7FFFFFFFu ? (uint32_t)data.size : 0x7FFFFFFFu;
  fb->bad = fb->size < 8 || memcmp(data.data + 4, ident, 4) != 0;
  return fb->bad ? 0 : trv_fb_check_table(fb, trv_fb_follow(fb, 0));
}

/* Position of a field of size bytes in a table that one of these functions returned, 0 when it is
 * absent. */
static inline uint32_t trv_fb_field(trv_fb* fb, uint32_t table, uint32_t slot, uint32_t size,
                                    uint32_t align) {
  if (table == 0) return 0;
  const uint32_t vt = table - trv_fb_load32(fb, table);
  if (slot + 2 > trv_fb_load16(fb, vt)) return 0;
  const uint32_t off = trv_fb_load16(fb, vt + slot), end = trv_fb_load16(fb, vt + 2);
  if (off == 0) return 0;
  if (off < 4 || off + size > end || !trv_fb_fits(fb, table + off, size, align)) {
    fb->bad = 1;
    return 0;
  }
  return table + off;
}

/* A scalar field, or its default. */
static inline uint32_t trv_fb_u16(trv_fb* fb, uint32_t table, uint32_t slot, uint32_t absent) {
  const uint32_t pos = trv_fb_field(fb, table, slot, 2, 2);
  return pos ? trv_fb_load16(fb, pos) : absent;
}
static inline uint32_t trv_fb_u32(trv_fb* fb, uint32_t table, uint32_t slot, uint32_t absent) {
  const uint32_t pos = trv_fb_field(fb, table, slot, 4, 4);
  return pos ? trv_fb_load32(fb, pos) : absent;
}
static inline uint64_t trv_fb_u64(trv_fb* fb, uint32_t table, uint32_t slot, uint64_t absent) {
  const uint32_t pos = trv_fb_field(fb, table, slot, 8, 8);
  if (pos) memcpy(&absent, fb->base + pos, 8);
  return absent;
}

/* An inline struct field, or NULL. */
static inline const void* trv_fb_struct(trv_fb* fb, uint32_t table, uint32_t slot, uint32_t size,
                                        uint32_t align) {
  const uint32_t pos = trv_fb_field(fb, table, slot, size, align);
  return pos ? fb->base + pos : NULL;
}

/* A field that is a table; 0 when absent. */
static inline uint32_t trv_fb_table(trv_fb* fb, uint32_t table, uint32_t slot) {
  const uint32_t pos = trv_fb_field(fb, table, slot, 4, 4);
  return pos ? trv_fb_check_table(fb, trv_fb_follow(fb, pos)) : 0;
}

/* A field that is a vector of elements of elem_size bytes aligned to elem_align; NULL and count 0
 * when absent. */
static inline const void* trv_fb_vector(trv_fb* fb, uint32_t table, uint32_t slot,
                                        uint32_t elem_size, uint32_t elem_align,
                                        uint32_t* out_count) {
  *out_count = 0;
  const uint32_t field = trv_fb_field(fb, table, slot, 4, 4);
  const uint32_t pos = field ? trv_fb_follow(fb, field) : 0;
  if (pos == 0) return NULL;
  const uint32_t count = trv_fb_load32(fb, pos);
  if (count > (fb->size - pos - 4) / elem_size ||
      (count && !trv_fb_fits(fb, pos + 4, 0, elem_align))) {
    fb->bad = 1;
    return NULL;
  }
  *out_count = count;
  return fb->base + pos + 4;
}

/* Element i < count of a vector of tables (elem_size 4, elem_align 4). */
static inline uint32_t trv_fb_table_at(trv_fb* fb, const void* vector, uint32_t i) {
  const uint32_t pos = (uint32_t)((const uint8_t*)vector - fb->base) + i * 4;
  return trv_fb_check_table(fb, trv_fb_follow(fb, pos));
}

/* The string whose offset is stored at pos: NUL-terminated text in the buffer, or NULL. */
static inline const char* trv_fb_text(trv_fb* fb, uint32_t pos) {
  const uint32_t at = trv_fb_follow(fb, pos);
  if (at == 0) return NULL;
  const uint32_t length = trv_fb_load32(fb, at);
  if (length >= fb->size - at - 4 || fb->base[at + 4 + length] != 0) {
    fb->bad = 1;
    return NULL;
  }
  return (const char*)fb->base + at + 4;
}

/* A string field, NULL when absent. */
static inline const char* trv_fb_string(trv_fb* fb, uint32_t table, uint32_t slot) {
  const uint32_t pos = trv_fb_field(fb, table, slot, 4, 4);
  return pos ? trv_fb_text(fb, pos) : NULL;
}

/* Element i < count of a vector of strings (elem_size 4, elem_align 4). */
static inline const char* trv_fb_string_at(trv_fb* fb, const void* vector, uint32_t i) {
  return trv_fb_text(fb, (uint32_t)((const uint8_t*)vector - fb->base) + i * 4);
}
#endif
