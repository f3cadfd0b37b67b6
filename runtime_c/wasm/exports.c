/* exports.c - trivet as a WebAssembly module for JavaScript (trivet.mjs): the host API in numbers
 * and addresses, with texts and shapes in structs of fixed layout.
 *
 * A net is a program with one context. Every function that can fail returns a trv_status; the text
 * is at trvw_error. Addresses are offsets into the module's memory, which may move when it grows:
 * make views of it anew after each call.
 */
#if defined(__wasm__)
#include <stdlib.h>
#include <string.h>

#include "trivet/trivet.h"

#define EXPORT(name) __attribute__((export_name(#name), used)) name

typedef struct net {
  trv_host* host;
  trv_context* context;
  char error[512];
} net;

/* What JavaScript reads, at these offsets. An extent is -1 where it is dynamic: least..most. */
typedef struct slot {
  uint32_t name, name_length;  /* 0, 4 */
  uint32_t dtype, rank;        /* 8, 12 */
  uint32_t data, size;         /* 16, 20: of a tensor, in bytes */
  double extent[TRV_MAX_RANK]; /* 24 */
  double least[TRV_MAX_RANK];  /* 88 */
  double most[TRV_MAX_RANK];   /* 152 */
} slot;
_Static_assert(offsetof(slot, extent) == 24 && sizeof(slot) == 216, "trivet.mjs reads this");

static trv_status failed(net* n, const trv_diag* d) {
  trv_diag_print(d, n->error, sizeof(n->error));
  return d->status;
}

static trv_status wrong(net* n, trv_status status) {
  const trv_diag d = {.status = status,
                      .step = TRV_NONE,
                      .time = TRV_NONE,
                      .value = TRV_NONE,
                      .axis = TRV_NONE,
                      .what = trv_status_text(status)};
  return failed(n, &d);
}

static trv_session* session(net* n, uint32_t entry) {
  return trv_context_session(n->context, entry);
}

/* Memory for files, aligned to 64 bytes; NULL: there is none. */
void* EXPORT(trvw_new)(size_t size) {
  return size > SIZE_MAX - 64 ? NULL : aligned_alloc(64, size / 64 * 64 + 64);
}

void EXPORT(trvw_delete)(void* memory) { free(memory); }

/* A program from memory, which stays the caller's until trvw_close; weights: of a second file, or
 * NULL. NULL: out of memory; else look at trvw_error. */
net* EXPORT(trvw_open)(const uint8_t* file, size_t size, const uint8_t* weights,
                       size_t weights_size) {
  net* n = calloc(1, sizeof(*n));
  trv_diag d;
  if (!n) return NULL;
  const trv_span program = {file, size}, second = {weights, weights_size};
  if (trv_host_open_span(program, second, 0, 1, &n->host, &d) ||
      trv_context_open(n->host, 0, &n->context, &d))
    (void)failed(n, &d);
  return n;
}

void EXPORT(trvw_close)(net* n) {
  if (!n) return;
  trv_context_close(n->context);
  trv_host_close(n->host);
  free(n);
}

/* What failed last, NUL-terminated; empty: nothing. */
const char* EXPORT(trvw_error)(net* n) { return n->error; }

uint32_t EXPORT(trvw_entries)(net* n) { return trv_host_program(n->host)->entry_count; }

/* An entry's name, the number of its inputs and outputs in out->data and out->size. */
trv_status EXPORT(trvw_entry)(net* n, uint32_t entry, slot* out) {
  trv_entry e;
  const trv_status st = trv_program_entry(trv_host_program(n->host), entry, &e);
  memset(out, 0, sizeof(*out));
  if (st) return wrong(n, st);
  out->name = (uint32_t)(uintptr_t)e.name;
  out->name_length = (uint32_t)strlen(e.name);
  out->data = e.input_count;
  out->size = e.output_count;
  return TRV_OK;
}

/* Name, dtype and allowed extents of input or output i. */
trv_status EXPORT(trvw_slot)(net* n, uint32_t entry, uint32_t output, uint32_t i, slot* out) {
  const trv_program* program = trv_host_program(n->host);
  trv_slot s;
  const trv_status st =
      output ? trv_program_output(program, entry, i, &s) : trv_program_input(program, entry, i, &s);
  memset(out, 0, sizeof(*out));
  if (st) return wrong(n, st);
  out->name = (uint32_t)(uintptr_t)s.name;
  out->name_length = (uint32_t)strlen(s.name);
  out->dtype = s.dtype;
  out->rank = s.rank;
  for (uint32_t k = 0; k < s.rank; k++) {
    out->extent[k] = (double)s.dim[k];
    out->least[k] = (double)s.min[k];
    out->most[k] = (double)s.max[k];
  }
  return TRV_OK;
}

/* The extents that input i has in the next runs: shape->extent[shape->rank], shape->dtype. */
trv_status EXPORT(trvw_shape)(net* n, uint32_t entry, uint32_t i, const slot* shape) {
  trv_session* s = session(n, entry);
  int64_t dims[TRV_MAX_RANK];
  const trv_buf planned = {NULL, 0, 0};
  if (!s || shape->rank > TRV_MAX_RANK) return wrong(n, TRV_ARGUMENT);
  for (uint32_t k = 0; k < shape->rank; k++) dims[k] = (int64_t)shape->extent[k];
  const trv_status st = trv_session_bind_input(s, i, shape->dtype, shape->rank, dims, planned);
  return st ? failed(n, trv_session_diag(s)) : TRV_OK;
}

/* Finds places for the shapes given, so that inputs can be written. */
trv_status EXPORT(trvw_plan)(net* n, uint32_t entry) {
  trv_session* s = session(n, entry);
  if (!s) return wrong(n, TRV_ARGUMENT);
  return trv_context_plan(n->context, entry) ? failed(n, trv_session_diag(s)) : TRV_OK;
}

/* Where input or output i lies, after trvw_plan or trvw_run: out->data and size, dtype, extent. An
 * input is to be written before each run, an output to be read before the next. */
trv_status EXPORT(trvw_tensor)(net* n, uint32_t entry, uint32_t output, uint32_t i, slot* out) {
  trv_session* s = session(n, entry);
  const trv_tensor* t = !s ? NULL : output ? trv_session_output(s, i) : trv_session_input(s, i);
  memset(out, 0, sizeof(*out));
  if (!t) return wrong(n, TRV_ARGUMENT);
  out->dtype = t->dtype;
  out->rank = t->rank;
  out->data = (uint32_t)(uintptr_t)t->data;
  out->size = (uint32_t)trv_dtype_size(t->dtype);
  for (uint32_t k = 0; k < t->rank; k++) {
    out->extent[k] = (double)t->dim[k];
    out->size *= (uint32_t)t->dim[k];
  }
  return TRV_OK;
}

trv_status EXPORT(trvw_run)(net* n, uint32_t entry) {
  trv_session* s = session(n, entry);
  if (!s) return wrong(n, TRV_ARGUMENT);
  return trv_context_run(n->context, entry) ? failed(n, trv_session_diag(s)) : TRV_OK;
}

/* State back to its first values. */
trv_status EXPORT(trvw_reset)(net* n) {
  const trv_status st = trv_context_reset(n->context);
  return st ? wrong(n, st) : TRV_OK;
}
#endif
