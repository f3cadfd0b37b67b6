/* diag.c - errors as data, and one line of text for people. */
#include "private.h"

void trvi_diag_clear(trv_diag* diag) {
  memset(diag, 0, sizeof(*diag));
  diag->step = diag->time = diag->value = diag->axis = TRV_NONE;
}

#define ROW(name, status, text) status text "\0"
#define BARE(name, status, text) status "\0"

/* Text n of texts that lie one after another, each ended by a NUL. */
static const char* text_at(const char* texts, int n) {
  while (n-- > 0)
    while (*texts++) {
    }
  return texts;
}

trv_status trvi_fail_at(trv_diag* diag, int fault, uint32_t value, trv_dim expected, trv_dim got) {
#ifdef TRV_NO_TEXT
  static const char texts[] = TRVI_FAULTS(BARE);
#else
  static const char texts[] = TRVI_FAULTS(ROW);
#endif
  const char* text = text_at(texts, fault - 1);
  const trv_status status = '0' - *text;
  if (diag) {
    trvi_diag_clear(diag);
    diag->status = status;
    diag->value = value;
    diag->expected = expected;
    diag->got = got;
#ifndef TRV_NO_TEXT
    diag->what = text + 1;
#endif
  }
  return status;
}

trv_status trvi_fail_of(trv_diag* diag, int fault, uint32_t value) {
  return trvi_fail_at(diag, fault, value, 0, 0);
}

trv_status trvi_fail(trv_diag* diag, int fault) { return trvi_fail_of(diag, fault, TRV_NONE); }

const char* trv_status_text(trv_status status) {
  static const char names[] =
      "state\0device\0unsupported\0memory\0version\0format\0argument\0ok\0pending\0unknown";
  return text_at(names, status >= TRV_STATE && status <= TRV_PENDING ? status - TRV_STATE : 9);
}

/* A text cut to the size of its buffer that still counts its whole length. */
typedef struct line {
  char* out;
  size_t size, length;
} line;

static void put_text(line* l, const char* text) {
  for (; *text; text++, l->length++)
    if (l->length + 1 < l->size) l->out[l->length] = *text;
}

static void put_number(line* l, int64_t v) {
  char digits[24];
  uint32_t at = sizeof(digits) - 1;
  uint64_t u = v < 0 ? 0 - (uint64_t)v : (uint64_t)v;
  digits[at] = 0;
  do {
    digits[--at] = (char)('0' + (int)(u % 10));
    u /= 10;
  } while (u);
  if (v < 0) digits[--at] = '-';
  put_text(l, digits + at);
}

static void put_field(line* l, const char* name, uint32_t v) {
  if (v == TRV_NONE) return;
  put_text(l, name);
  put_number(l, v);
}

size_t trv_diag_print(const trv_diag* diag, char* out, size_t size) {
  line l = {out, out ? size : 0, 0};
  if (!diag) {
    put_text(&l, "no diag");
  } else {
    put_text(&l, trv_status_text(diag->status));
    if (diag->what) {
      put_text(&l, ": ");
      put_text(&l, diag->what);
    }
    put_field(&l, ", number ", diag->value);
    put_field(&l, ", axis ", diag->axis);
    put_field(&l, ", step ", diag->step);
    put_field(&l, ", time ", diag->time);
    if (diag->expected != diag->got || diag->limit > diag->expected) {
      put_text(&l, ": expected ");
      put_number(&l, diag->expected);
      if (diag->limit > diag->expected) {
        put_text(&l, "..");
        if (diag->limit != INT64_MAX) put_number(&l, diag->limit);
      }
      put_text(&l, ", got ");
      put_number(&l, diag->got);
    }
  }
  if (l.size) l.out[l.length < l.size ? l.length : l.size - 1] = 0;
  return l.length;
}
