/* private.h - what the runtime's own files share. Functions with the prefix trvi_ are not exported.
 */
#ifndef TRV_PRIVATE_H
#define TRV_PRIVATE_H

#include <string.h>

#include "faults.h"
#include "trivet/fb.h"
#include "trivet/trivet.h"

/* trv_program.flags beyond TRV_OPEN_*: the CRCs of file 0 have been checked; those of the external
 * file: << 1. */
#define TRVI_CHECKED 0x100u

/* Feature bits of files that this runtime knows: memories of devices. */
#define TRVI_FEATURES 1u

/* ---- checked arithmetic: 1 on overflow (shape.c)
 * --------------------------------------------------------------------- */
int trvi_add(trv_dim a, trv_dim b, trv_dim* out);
int trvi_mul(trv_dim a, trv_dim b, trv_dim* out);
/* v as a trv_dim, the largest one where it is not representable. */
trv_dim trvi_clamp(uint64_t v);

static inline int trvi_power_of_two(uint64_t v) { return v != 0 && (v & (v - 1)) == 0; }

/* ---- diag
 * ----------------------------------------------------------------------------------------------------------
 */
void trvi_diag_clear(trv_diag* diag);
/* Fill diag (may be NULL) and return the fault's status. Numbers are as wide as sizes: less code on
 * small machines. */
trv_status trvi_fail(trv_diag* diag, int fault);
trv_status trvi_fail_of(trv_diag* diag, int fault, uint32_t value);
trv_status trvi_fail_at(trv_diag* diag, int fault, uint32_t value, trv_dim expected, trv_dim got);

/* ---- program
 * -------------------------------------------------------------------------------------------------------
 */
/* The arrays of one entry, in the file. Both halves are in the order of trvi_plan_read's list. */
#ifdef TRV_ONE_MEMORY
#define TRVI_VECTORS 8
#else
#define TRVI_VECTORS 9
#endif
#define TRVI_MEMORIES 32 /* most that a file may have: bits of trv_view.memories */
typedef struct trvi_plan {
  union {
    const void* vectors[TRVI_VECTORS];
    struct {
      const trvf_dim* dims;
      const trvf_region* regions;
      const trvf_storage* storages;
      const trvf_value* values;
      const uint32_t *inputs, *outputs;
      const trvf_step* steps;
      const void* parts; /* vector of tables */
#ifndef TRV_ONE_MEMORY
      const trvf_wait* waits;
#endif
    };
  };
  union {
    uint32_t counts[TRVI_VECTORS];
    struct {
      uint32_t dim_count, region_count, storage_count, value_count, input_count, output_count,
          step_count, part_count;
#ifndef TRV_ONE_MEMORY
      uint32_t wait_count;
#endif
    };
  };
  uint32_t times, table;
} trvi_plan;

/* One part's description. */
typedef struct trvi_part {
  const char *delegate, *format;
  trv_span data;
  const uint32_t *inputs, *outputs;
  uint32_t input_count, output_count;
  int32_t segment;
} trvi_part;

/* Starts reading the head of an open program. */
static inline trv_fb trvi_reader(const trv_program* prog) {
  trv_fb fb = {prog->file.data,
               prog->file.size < 0x7FFFFFFFu ? (uint32_t)prog->file.size : 0x7FFFFFFFu, 0};
  return fb;
}
/* Reads the table of entry `index`; fb->bad when malformed. */
void trvi_plan_read(const trv_program* prog, trv_fb* fb, uint32_t index, trvi_plan* out_plan);
/* Reads every text of the entry once, so that later reads cannot fail; fb->bad when malformed. How
 * many names it has. */
uint32_t trvi_names_check(trv_fb* fb, const trvi_plan* plan);
void trvi_part_read(trv_fb* fb, const trvi_plan* plan, uint32_t index, trvi_part* out_part);
#ifndef TRV_ONE_MEMORY
/* How many memories the file names; 0: all are the host's. */
uint32_t trvi_memory_count(const trv_program* prog, trv_fb* fb);
/* The delegate that owns memory m < count; "": the host. */
const char* trvi_memory_owner(const trv_program* prog, trv_fb* fb, uint32_t m);
#endif

/* Proves everything about an entry that does not depend on run-time sizes. work: steps of effort
 * left, counted down over all entries, so that no file takes long to refuse. Returns a fault, and
 * in *at the row that has it. */
int trvi_verify_entry(const trv_program* prog, trv_fb* fb, const trvi_plan* plan, uint32_t* work,
                      uint32_t* at);
int trvi_writable(const trvi_plan* plan, uint32_t value);

/* Where segment `index` lies in memory, CRC checked if it was deferred. STATE: weights not
 * attached. UNSUPPORTED: only a reader has the bytes. */
trv_status trvi_segment(const trv_program* prog, uint32_t index, trv_span* out_span,
                        trv_diag* diag);
/* Reads size bytes from the start of segment `index` into dst, through the reader; checks the CRC.
 */
trv_status trvi_segment_read(const trv_program* prog, uint32_t index, void* dst, size_t size,
                             trv_diag* diag);

uint32_t trvi_crc32c(uint32_t crc, const void* data, size_t size);
/* a * b as polynomials over two elements modulo CRC-32C's, the highest bit the lowest power. */
static inline uint32_t trvi_crc_multiply(uint32_t a, uint32_t b) {
  uint32_t out = 0;
  for (int i = 0; i < 32; i++, a <<= 1) {
    out ^= (0u - (a >> 31)) & b;
    b = b >> 1 ^ ((0u - (b & 1)) & 0x82F63B78u);
  }
  return out;
}

static inline int trvi_row_const(const trvi_plan* plan, uint32_t row) {
  return plan->dims[row].op == TRV_DIM_OP_CONST;
}

/* ---- session
 * -------------------------------------------------------------------------------------------------------
 */
/* A storage's place in a plan made at run time. offset comes first: trv_view.offsets points at it.
 */
typedef struct trvi_place {
  uint64_t offset, size;
} trvi_place;

/* An input or output slot. */
typedef struct trvi_slot {
  uint32_t region, storage;
  size_t home;    /* offset in its home region when the caller binds nothing */
  size_t checked; /* bytes of the region when extents were last proved: less must be proved anew */
  uint8_t bound;  /* the caller's buffer is the region */
  uint8_t known;  /* inputs: dim holds the sizes */
  trv_dim dim[TRV_MAX_RANK];
} trvi_slot;

typedef struct trvi_step {
  const trv_bound_device* on; /* who does it; NULL: the runtime itself */
  trv_part* part;
#ifndef TRV_ONE_MEMORY
  uint64_t point; /* on its device, of the last time */
  uint32_t first_wait, alternative;
  const char* why; /* the first alternative was refused */
  trv_status why_status;
#endif
} trvi_step;

#define TRVI_DIRTY_SHAPES 1u /* an input's size changed: evaluate the table */
#define TRVI_DIRTY_PLACES 2u /* a buffer changed: check extents and arenas again */

#define TRVI_HOST 0xFFu /* a memory's home: the host's */

#ifndef TRV_ONE_MEMORY
/* Where memories are and which devices take part: found once, before a session is built. */
typedef struct trvi_homes {
  uint8_t home[TRVI_MEMORIES]; /* by memory: position of the device that has it, or TRVI_HOST */
  uint32_t tables;             /* devices with a table of regions of their own, by bit */
  uint32_t lost; /* devices that refuse a part and cannot work in host memory: they take none */
  trv_diag why;  /* the first refusal of those */
} trvi_homes;

/* A device of a session: how it sees the plan, and how far it is. */
typedef struct trvi_unit {
  trv_view view;
  trv_buf* regions;      /* NULL: it sees the session's */
  uint8_t* imported;     /* by region: mem_free is due */
  uint64_t point, done;  /* of what it was given last; reached for sure */
  uint32_t busy, import; /* 1: done < point; host memory is imported */
} trvi_unit;
#endif

struct trv_session {
  trv_view view;
  trv_run run;
  trvi_plan plan;
  const trv_program* program;
  trv_buf* regions;
  trv_dim* dims;
  trv_dim* seen;       /* where sizes depend on data: dims as they were proved last, else NULL */
  trvi_slot* slots;    /* inputs, then outputs */
  trv_tensor* tensors; /* of the slots */
  trvi_step* steps;
  trvi_place* places; /* with TRV_SESSION_REPLAN: by storage */
  size_t* needs;      /* with TRV_SESSION_REPLAN: bytes by region */
  uint32_t* order;    /* with TRV_SESSION_REPLAN: storages by rank */
  uint32_t* placed;   /* with TRV_SESSION_REPLAN: room for the packer */
  uint32_t flags, dirty, max_steps;
#ifdef TRV_ONE_MEMORY
  const trv_bound_device* flying; /* the last device that was given work, and its point */
  uint64_t point;
#else
  const trv_bound_device* devices;
  trvi_unit* units;    /* by device */
  const uint8_t* keep; /* during init */
  uint32_t device_count;
  uint32_t pc, left; /* of the run under way: the next step, steps that it may take yet */
  uint32_t under_way;
  trv_status result; /* of the last run */
  uint64_t timeout;  /* of waits, at present */
  trvi_homes homes;
#endif
  trv_diag diag;
};

/* place.c: which device takes which step. */
/* What drivers may look at before there is a session: the plan alone. */
trv_view trvi_plan_view(const trvi_plan* p);
#ifdef TRV_ONE_MEMORY
typedef uint32_t trvi_homes;
#else
/* Finds homes. */
trv_status trvi_find_homes(const trv_session_desc* desc, trv_fb* fb, const trvi_plan* p,
                           trvi_homes* out_homes, trv_diag* d);
/* Memories that device k reaches, by bit. */
uint32_t trvi_reach(const trvi_homes* h, const trv_session_desc* desc, uint32_t k);
static inline const trv_view* trvi_sees(const trv_session* s, uint32_t k) {
  return s->units[k].regions ? &s->units[k].view : &s->view;
}
/* Position of the device in whose memory region i lies, or TRVI_HOST. */
static inline uint32_t trvi_region_home(const trv_session* s, uint32_t i) {
  const uint32_t m = s->plan.regions[i].memory;
  return m < TRVI_MEMORIES ? s->homes.home[m] : TRVI_HOST;
}
#endif
/* Measures the parts (s NULL), or opens them too. take: room for bytes in the session. */
typedef struct trvi_room {
  uint8_t* base;
  size_t used;
  int overflow;
} trvi_room;
void* trvi_take(trvi_room* r, size_t count, size_t size, size_t align);
trv_status trvi_take_parts(trvi_room* r, const trv_session_desc* desc, trv_fb* fb,
                           const trvi_plan* p, const trvi_homes* homes, trv_session* s,
                           trv_diag* d);

/* order.c: order between devices, their views and copies. */
trv_status trvi_device_failed(trv_session* s, const trv_bound_device* on, trv_status st,
                              uint32_t step);
/* Waits until step may begin on `on` (NULL: on the host). PENDING: not within the timeout. */
trv_status trvi_ready(trv_session* s, const trv_bound_device* on, uint32_t step);
/* The step has been given to its device, which reaches the point when it is done. */
void trvi_given(trv_session* s, const trv_bound_device* on, uint32_t step, uint64_t point);
/* Waits on the host until all work given so far is done. PENDING likewise. */
trv_status trvi_settle(trv_session* s, uint32_t step);
#ifdef TRV_ONE_MEMORY
#define trvi_rest(s) ((void)0)
#define trvi_region_changed(s, i) TRV_OK
#define trvi_region_home(s, i) TRVI_HOST
#else
/* Ends a run that is under way, whatever comes of it: something that it uses is about to change. */
void trvi_rest(trv_session* s);
/* Region i of the session's table has changed: so do the devices' tables. Errors: of mem_import. */
trv_status trvi_region_changed(trv_session* s, uint32_t i);
/* Gives back what was imported. */
void trvi_release(trv_session* s);
/* Copies between host memory and region i of a device, in order with its work. */
trv_status trvi_transfer(trv_session* s, uint32_t i, size_t offset, void* host, size_t size,
                         int write, trv_diag* d);
/* Zeros region i of a device. */
trv_status trvi_clear(trv_session* s, uint32_t i, size_t size, trv_diag* d);
/* Step `step` copies between memories, by its device. bytes: dense in both. */
trv_status trvi_copy(trv_session* s, uint32_t step, size_t bytes);
/* Tells hooks of a turn. */
void trvi_tell(trv_session* s, uint32_t state, const trv_bound_device* on, uint32_t step,
               uint64_t point);
#endif

/* shape.c: evaluates the dimension table. saturate: for sizes at the bound (data rows at their
 * maximum, no range checks). */
trv_status trvi_dims_evaluate(trv_session* s, int saturate);
/* Proves that every value lies in its storage, and slots are dense, for the present sizes.
 * *out_short: ARGUMENT where a buffer that the caller bound to an output is too small, which is no
 * hindrance before the run. */
trv_status trvi_extents_check(trv_session* s, trv_status* out_short);
/* Is the value dense and row-major? How many elements it has then. */
int trvi_dense(const trv_session* s, uint32_t value, trv_dim* out_count);
/* Bytes of value a, where it and b have one shape and one layout without gaps; else -1. */
trv_dim trvi_same_bytes(const trv_session* s, uint32_t a, uint32_t b);
/* trv_view_tensor, once in the code. */
void trvi_tensor(const trv_session* s, uint32_t value, trv_tensor* out);
/* Value id of a slot: inputs, then outputs. */
uint32_t trvi_slot_value(const trvi_plan* plan, uint32_t slot);
/* Fills the slots' tensors. */
void trvi_tensors_refresh(trv_session* s);
/* Base of an IO region that the caller did not bind. */
void trvi_slot_home(trv_session* s, uint32_t slot);

/* replan.c: packs the arenas again for the present sizes; needs[] says what each takes. */
void trvi_replan_init(trv_session* s);
trv_status trvi_replan(trv_session* s);
#endif
