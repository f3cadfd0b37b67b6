/* host_check.c - the CRCs of whole files, by all threads.
 *
 * The segments' bytes are cut into pieces. A piece is mapped by one call, instead of a fault for
 * each of its pages, and its CRC taken; those of a segment are then put together: what n bytes
 * behind a text do to its CRC is a multiplication by x^(8 n).
 */
#include "host_check.h"

#include <stdlib.h>

#include "host_os.h"
#include "private.h"

#define PIECE ((uint64_t)1 << 21)

typedef struct piece {
  const uint8_t* data;
  size_t size;
  uint32_t segment, crc;
} piece;

static void check_piece(void* ctx, uint32_t i) {
  piece* p = (piece*)ctx + i;
  trvi_map_pages(p->data, p->size);
  p->crc = trvi_crc32c(0, p->data, p->size);
}

/* x^(8 n) modulo the CRC's polynomial. */
static uint32_t power(uint64_t n) {
  uint32_t out = 1u << 31, square = 1u << 23; /* 1, x^8 */
  for (; n; n >>= 1) {
    if (n & 1) out = trvi_crc_multiply(out, square);
    square = trvi_crc_multiply(square, square);
  }
  return out;
}

/* The pieces of all segments that are in memory, and how many; out may be NULL. */
static uint64_t cut(const trv_program* prog, piece* out) {
  uint64_t n = 0;
  for (uint32_t i = 0; i < prog->segment_count; i++) {
    const trvf_segment* g = &prog->segments[i];
    const uint8_t* data = (g->file ? &prog->external : &prog->file)->data;
    if (!data) continue;
    for (uint64_t at = 0; at < g->size; at += PIECE, n++) {
      if (!out) continue;
      piece* p = &out[n];
      p->data = data + (size_t)(g->offset + at);
      p->size = (size_t)(g->size - at < PIECE ? g->size - at : PIECE);
      p->segment = i;
    }
  }
  return n;
}

trv_status trvi_check_files(trv_program* prog, const trv_runner* runner) {
  const uint64_t n = cut(prog, NULL);
  piece* pieces = n < UINT32_MAX / 2 ? calloc((size_t)n + 1, sizeof(*pieces)) : NULL;
  int good = pieces != NULL;
  if (!good) return trv_program_check(prog);
  cut(prog, pieces);
  if (runner)
    runner->run(runner->self, check_piece, pieces, (uint32_t)n);
  else
    for (uint32_t i = 0; i < n; i++) check_piece(pieces, i);
  const uint32_t whole = power(PIECE);
  const piece *p = pieces, *end = pieces + n;
  for (uint32_t i = 0; i < prog->segment_count; i++) {
    const trvf_segment* g = &prog->segments[i];
    uint32_t crc = 0;
    for (; p < end && p->segment == i; p++)
      crc = trvi_crc_multiply(crc, p->size == PIECE ? whole : power(p->size)) ^ p->crc;
    if (g->file == 0 || prog->external.data) good = good && crc == g->crc;
  }
  free(pieces);
  if (!good) return trv_program_check(prog); /* says which */
  prog->flags |= (prog->external.data ? 3u : 1u) * TRVI_CHECKED;
  return TRV_OK;
}
