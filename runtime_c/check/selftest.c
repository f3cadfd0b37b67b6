/* selftest.c - runs the golden pairs of a program and compares. No memory of its own; inputs are
 * read where they lie in the file. Not part of the core: linked where it is called. */
#include "../src/private.h"

/* The golden segment's tables, all offsets proved. 0: there are none, or they are malformed. */
static const trvf_golden* golden(const trv_program* prog, trv_span* bytes, trv_diag* d) {
  trv_fb fb = trvi_reader(prog);
  const uint32_t at = trv_fb_field(&fb, prog->root, TRVF_PROGRAM_GOLDEN_SEGMENT, 4, 4);
  const int32_t segment = at ? (int32_t)trv_fb_load32(&fb, at) : -1;
  if (fb.bad || segment < 0 || (uint32_t)segment >= prog->segment_count) return NULL;
  if (trvi_segment(prog, (uint32_t)segment, bytes, d)) return NULL;
  const trvf_golden* g = (const void*)bytes->data;
  if (bytes->size < sizeof *g || ((uintptr_t)g & 7)) return NULL;
  if (g->tensors > (bytes->size - sizeof *g) / sizeof(trvf_golden_tensor)) return NULL;
  const trvf_golden_tensor* t = (const void*)(g + 1);
  for (uint32_t i = 0; i < g->tensors; i++)
    if (t[i].rank > TRV_MAX_RANK || t[i].offset > bytes->size ||
        t[i].size > bytes->size - t[i].offset)
      return NULL;
  return g;
}

#ifndef TRV_NO_REAL
static double number(const uint8_t* p, uint32_t dtype) {
  uint64_t bits = 0;
  const uint32_t size = (uint32_t)trv_dtype_size(dtype);
  memcpy(&bits, p, size);
  const uint32_t exponent = (uint32_t)bits >> 10 & 31, fraction = (uint32_t)bits & 1023;
  uint32_t word = (uint32_t)bits;
  float f;
  double v;
  switch (dtype) {
    case TRV_DTYPE_F64:
      memcpy(&v, &bits, sizeof v);
      return v;
    case TRV_DTYPE_F16: /* normal numbers alone: others are near enough to 0, or nothing to compare
                         */
      word = exponent ? (word & 0x8000u) << 16 | (exponent + 112) << 23 | fraction << 13 : 0;
      break;
    case TRV_DTYPE_BF16:
      word <<= 16;
      break;
    default:
      break;
  }
  memcpy(&f, &word, sizeof f);
  return (double)f;
}

static int near(const trvf_golden_tensor* t, const uint8_t* want, const uint8_t* got) {
  const double a = number(want, t->dtype), b = number(got, t->dtype), most = (double)t->tolerance;
  return t->dtype >= TRV_DTYPE_F16 && t->dtype <= TRV_DTYPE_F64 &&
         ((a - b <= most && b - a <= most) || (a != a && b != b));
}
#else
static int near(const trvf_golden_tensor* t, const uint8_t* want, const uint8_t* got) {
  (void)t, (void)want, (void)got;
  return 0;
}
#endif

/* The first element that differs; -1: none. */
static int64_t compare(const trvf_golden_tensor* t, const uint8_t* want, const uint8_t* got) {
  const size_t size = trv_dtype_size(t->dtype);
  for (uint64_t i = 0; size && i + size <= t->size; i += size) {
    if (memcmp(want + i, got + i, size) != 0 && !near(t, want + i, got + i))
      return (int64_t)((uint32_t)i / (uint32_t)size);
  }
  return -1;
}

static trv_status bind(trv_session* s, const trvf_golden_tensor* t, const uint8_t* data) {
  int64_t dims[TRV_MAX_RANK];
  for (uint32_t i = 0; i < t->rank; i++) dims[i] = t->dim[i];
  const trv_buf buf = {(uint8_t*)(uintptr_t)data, 0, (size_t)t->size}; /* only read */
  return trv_session_bind_input(s, t->slot, t->dtype, t->rank, dims, buf);
}

static trv_status check(trv_session* s, const trvf_golden_tensor* t, const uint8_t* want,
                        trv_diag* d) {
  const trv_tensor* y = trv_session_output(s, t->slot);
  size_t bytes = y ? trv_dtype_size(y->dtype) : 0;
  for (uint32_t i = 0; y && i < y->rank; i++) bytes *= (size_t)y->dim[i];
  trvi_diag_clear(d);
  d->status = TRV_FORMAT;
  d->value = t->slot;
  d->expected = (int64_t)t->size;
  d->got = (int64_t)bytes;
  if (!y || y->dtype != t->dtype || bytes != t->size) return TRV_FORMAT;
  const int64_t at = compare(t, want, y->data);
  if (at < 0) return TRV_OK;
  d->status = TRV_DEVICE;
  d->axis = (uint32_t)at;
  d->expected = d->got = 0;
  memcpy(&d->expected, want + (size_t)at * trv_dtype_size(t->dtype), trv_dtype_size(t->dtype));
  memcpy(&d->got, y->data + (size_t)at * trv_dtype_size(t->dtype), trv_dtype_size(t->dtype));
  return TRV_DEVICE;
}

uint32_t trv_selftest_cases(const trv_program* prog) {
  trv_span bytes;
  const trvf_golden* g = golden(prog, &bytes, NULL);
  return g ? g->cases : 0;
}

trv_status trv_selftest(trv_session* const* sessions, const trv_program* prog, uint32_t index,
                        trv_diag* out_diag) {
  trv_span bytes;
  trv_diag local, *d = out_diag ? out_diag : &local;
  trvi_diag_clear(d);
  d->status = TRV_ARGUMENT;
  const trvf_golden* g = golden(prog, &bytes, d);
  if (!g || index >= g->cases) return TRV_ARGUMENT;
  const trvf_golden_tensor* t = (const void*)(g + 1);
  trv_status st = TRV_OK;
  int ran = 0;
  for (uint32_t i = 0; !st && i < g->tensors; i++) {
    if (t[i].case_ != index || t[i].entry >= prog->entry_count || !sessions[t[i].entry]) continue;
    trv_session* s = sessions[t[i].entry];
    const uint8_t* data = bytes.data + t[i].offset;
    if (!t[i].output) {
      st = bind(s, &t[i], data);
    } else {
      if (!ran) st = trv_session_reset(s);
      if (!st && !ran) st = trv_session_run(s);
      ran = 1;
    }
    if (st)
      *d = *trv_session_diag(s);
    else if (t[i].output)
      st = check(s, &t[i], data, d);
  }
  for (uint32_t i = 0; i < g->tensors; i++) { /* inputs go back to their own places */
    if (t[i].case_ != index || t[i].output || t[i].entry >= prog->entry_count) continue;
    const trv_status home = bind(sessions[t[i].entry], &t[i], NULL);
    if (!st) st = home;
  }
  if (!st && !ran) st = TRV_ARGUMENT;
  if (!st) trvi_diag_clear(d);
  return st;
}
