/* hal.h - what a driver is, and all that a driver may know of the rest of trivet.
 *
 * A driver is one const struct of functions. Devices are opened by the caller and handed to
 * sessions: there is no registry. A driver includes this header and nothing else of trivet.
 * hal/README.md shows how to write one.
 */
#ifndef TRIVET_HAL_H
#define TRIVET_HAL_H

#include "trivet/base.h"
#include "trv_schema.h"

#ifdef __cplusplus
extern "C" {
#endif

#define TRV_HAL_ABI 1

typedef struct trv_device trv_device; /* the driver's own struct; the driver defines it */
typedef struct trv_part trv_part;     /* likewise: a part opened on a device */

/* ---- how a part sees the plan ---- */

/* The plan of one entry with the bases and sizes of one session. Arrays are owned by the session
 * and stay in place for its life; what they hold changes only together with epoch. value, storage:
 * file structs, read in place. */
typedef struct trv_view {
  uint32_t size; /* sizeof(trv_view) of the session */
  uint32_t region_count, value_count, storage_count, dim_count;
  const trv_buf* regions;       /* by region: its base in this device's address space */
  const trvf_value* values;     /* by value id */
  const trvf_storage* storages; /* by storage id */
  const uint8_t*
      offsets; /* storage s begins at *(uint64_t *)(offsets + s * offset_stride) of its region */
  size_t offset_stride; /* sizeof(trvf_storage) for the file's own plan, sizeof(uint64_t) when
                           replanned */
  trv_dim* dims; /* by row of the dimension table; a kernel may write rows whose op is data */
  const trvf_dim* dim_table;
  const trvf_region* region_table; /* by region: what the file says of it */
  uint32_t input_count;            /* IO regions with a slot below it are inputs */
  uint32_t memories; /* bit m: this device reaches memory m of the file; known in part_need */
} trv_view;

/* Does this device reach the memory that value id (in range) lies in? A driver's part_need must
 * refuse parts that read others, with TRV_UNSUPPORTED: there may be an alternative. */
static inline int trv_view_readable(const trv_view* v, uint32_t id) {
  const uint32_t m = v->region_table[v->storages[v->values[id].storage].region].memory;
  return m < 32 && (v->memories >> m & 1);
}

/* May a part write value id? Not into constants (maybe flash or a read-only mapping), not into the
 * caller's inputs. A driver's part_need must refuse parts that do. */
static inline int trv_view_writable(const trv_view* v, uint32_t id) {
  const trvf_region* r = &v->region_table[v->storages[v->values[id].storage].region];
  return r->kind != TRV_REGION_KIND_CONST &&
         (r->kind != TRV_REGION_KIND_IO || r->slot >= v->input_count);
}

/* A value resolved to an address. data is the element at index 0,..,0; strides in elements, maybe 0
 * or negative. */
typedef struct trv_tensor {
  uint8_t* data;
  uint8_t dtype, rank;
  uint16_t flags;
  trv_dim dim[TRV_MAX_RANK], stride[TRV_MAX_RANK];
} trv_tensor;

/* Bytes of one element of dtype, 0 for an unknown one. */
static inline size_t trv_dtype_size(uint32_t dtype) {
  static const uint8_t sizes[TRV_DTYPE_COUNT] = {0, 1, 1, 1, 2, 4, 8, 2, 2, 4, 8};
  return dtype < TRV_DTYPE_COUNT ? sizes[dtype] : 0;
}

/* Bytes from the start of its region to element 0,..,0 of value id. */
static inline ptrdiff_t trv_view_offset(const trv_view* v, uint32_t id) {
  const trvf_value* f = &v->values[id];
  const uint64_t offset =
      *(const uint64_t*)(const void*)(v->offsets + (size_t)f->storage * v->offset_stride);
  return (ptrdiff_t)((size_t)offset + (size_t)f->offset) +
         v->dims[f->shift] * (trv_dim)trv_dtype_size(f->dtype);
}

/* Address of element 0,..,0 of value id in the device's own address space (trv_buf.dev). */
static inline uint64_t trv_view_address(const trv_view* v, uint32_t id) {
  return v->regions[v->storages[v->values[id].storage].region].dev +
         (uint64_t)trv_view_offset(v, id);
}

/* What value id (in range, checked by the runtime's verifier) is like, without its address: data is
 * left alone. */
static inline void trv_view_shape(const trv_view* v, uint32_t id, trv_tensor* out) {
  const trvf_value* f = &v->values[id];
  out->dtype = f->dtype;
  out->rank = f->rank;
  out->flags = f->flags;
  for (uint32_t i = 0; i < f->rank; i++) {
    out->dim[i] = v->dims[f->dim[i]];
    out->stride[i] = v->dims[f->stride[i]];
  }
}

/* Resolves value id against the view; data is the host's address, for values in host memory. */
static inline void trv_view_tensor(const trv_view* v, uint32_t id, trv_tensor* out) {
  trv_view_shape(v, id, out);
  out->data = v->regions[v->storages[v->values[id].storage].region].host + trv_view_offset(v, id);
}

/* A part of the program, as a driver is asked about it. Everything is borrowed and lives as long as
 * the program. */
typedef struct trv_part_desc {
  uint32_t size;          /* sizeof(trv_part_desc) of the caller */
  const char* format;     /* e.g. "cpu.1"; NUL-terminated */
  trv_span data;          /* 16-byte aligned */
  const uint32_t* inputs; /* value ids, for drivers that bind tensors */
  const uint32_t* outputs;
  uint32_t input_count, output_count;
  const trv_view*
      view; /* the plan; bases and dims are not set yet when part_need and part_open are called */
} trv_part_desc;

/* ---- devices ---- */
#define TRV_CAP_HOST_MEMORY 1u /* works on host memory: buf.host of any region is good */
#define TRV_CAP_ASYNC 2u       /* run returns before the work is done */
#define TRV_CAP_IMPORT 4u      /* mem_import works */
#define TRV_CAP_THREADS 8u     /* several threads may use the device at once */

typedef struct trv_caps {
  uint32_t size;
  uint32_t flags;
  size_t alignment;     /* of region bases, bytes */
  uint64_t memory_free; /* bytes, 0 = unknown */
  const char* arch;     /* e.g. "x86-64 avx2", static text */
} trv_caps;

/* Runs fn(ctx, i) for all i in [0, count), in any order, on any threads, and returns when all are
 * done. */
typedef struct trv_runner {
  void (*run)(void* self, void (*fn)(void* ctx, uint32_t i), void* ctx, uint32_t count);
  void* self;
  uint32_t workers; /* how many at once, >= 1 */
} trv_runner;

/* How a driver does one command. */
typedef struct trv_work {
  uint32_t size, time;
  uint32_t tiles;     /* pieces that threads may take */
  uint32_t isa;       /* CPU: the kernel's instruction set, a value of enum Isa; 0: not known */
  const char* kernel; /* its name, static text; "" where it is not known or texts are left out */
} trv_work;

/* A step that a device does, as the runtime tells it: TRV_TURN_BEGIN before the device is asked;
 * TRV_TURN_GIVEN when it has taken the step and goes on by itself, till it reaches point;
 * TRV_TURN_DONE when the host knows that everything up to point is done (step: of an asynchronous
 * device, TRV_NONE), and after each step that was done at once. */
#define TRV_TURN_BEGIN 0u
#define TRV_TURN_GIVEN 1u
#define TRV_TURN_DONE 2u
struct trv_driver;
typedef struct trv_turn {
  uint32_t size, state;
  uint32_t step, time; /* of the plan */
  uint32_t index; /* of the device in the session's list; TRV_NONE: the runtime itself (moves) */
  const struct trv_driver* driver; /* NULL with the runtime itself */
  trv_device* device;
  uint64_t point;
} trv_turn;

/* What a driver tells about one piece of work inside a part. May be NULL as a whole. Called on the
 * thread that runs. */
typedef struct trv_hooks {
  uint32_t size;
  void (*begin)(void* self, uint32_t time); /* before the command with that time */
  void (*end)(void* self, uint32_t time);   /* after it; outputs of the command may be read */
  void* self;
  /* (optional) Before begin. Only where size says that the field is there. */
  void (*work)(void* self, const trv_work* work);
  /* (optional) From the runtime, about steps. Likewise. */
  void (*turn)(void* self, const trv_turn* turn);
} trv_hooks;

/* One run of a part. The struct is borrowed for the call. What view holds stays as it is until the
 * work is done; hooks are for the calling thread. */
typedef struct trv_run {
  uint32_t size;
  uint32_t epoch; /* changes only when a base or a dimension of the view changed */
  const trv_view* view;
  const trv_runner* runner; /* NULL: this thread alone */
  const trv_hooks* hooks;   /* NULL: none */
  trv_diag* diag;           /* filled by the driver on error: time, what, expected, got */
  uint32_t shape_epoch; /* changes only when a dimension changed: what depends on sizes alone keeps
                           till then */
} trv_run;

/* How a device is opened where options are a text ("name:options"). A driver's own config struct
 * may begin like this one. */
typedef struct trv_config {
  uint32_t size;
  const char* options; /* NULL: none */
} trv_config;

/* Memory rule: open and part_open get `mem` from the caller (device_bytes, part_need bytes; 16-byte
 * aligned) and keep everything there; a driver that must own more (a vendor's context) frees it in
 * close / part_close. Threads: a device is used by one thread at a time, unless it has
 * TRV_CAP_THREADS; a part always is. Points of one device rise in the order in which work is given
 * to it, and are reached in that order. A driver whose library is missing opens all the same, and
 * part_need says what is missing. After a failure the device still waits, frees and closes. No
 * function aborts. Optional functions may be NULL. */
typedef struct trv_driver {
  uint32_t size, abi; /* sizeof(trv_driver), TRV_HAL_ABI */
  const char* name;   /* the delegate's name: parts with this name are offered to it */
  size_t device_bytes;
  /* config: NULL, or a struct that begins as trv_config. UNSUPPORTED: options that mean nothing. */
  trv_status (*open)(void* mem, const void* config, trv_device** out_dev);
  void (*close)(trv_device*);
  void (*caps)(trv_device*, trv_caps* out_caps);
  /* (optional: all NULL = host memory) out_buf->dev is not 0; host only where the CPU may use it.
   * MEMORY: there is not that much. */
  trv_status (*mem_alloc)(trv_device*, size_t size, size_t align, trv_buf* out_buf);
  /* Wraps host memory, does not copy; until mem_free. out_buf has host and dev. */
  trv_status (*mem_import)(trv_device*, void* host, size_t size, trv_buf* out_buf);
  void (*mem_free)(trv_device*, trv_buf*);
  /* Bytes part_open needs; also the acceptance test: UNSUPPORTED or VERSION means "try the next
   * alternative". Must check data fully: it may be hostile. May block. diag: why not;
   * view->memories and the tables of the file are there, bases and dims are not. */
  trv_status (*part_need)(trv_device*, const trv_part_desc*, size_t* out_bytes, trv_diag* diag);
  /* Bases of CONST regions are set by now, and their bytes are on the way: work given now comes
   * after them. */
  trv_status (*part_open)(trv_device*, const trv_part_desc*, void* mem, trv_part** out_part);
  void (*part_close)(trv_device*, trv_part*);
  /* Enqueues (or does) the part's work in order; out_point: number on the device's timeline that is
   * reached when done. */
  trv_status (*run)(trv_device*, trv_part*, const trv_run*, uint64_t* out_point);
  /* (optional; needed with memory of its own) Copies size bytes between buffers, in order with
   * runs. A buffer with dev is the device's, one without the host's; host memory stays in place
   * until the point is reached. Both may be the device's, without overlap. */
  trv_status (*copy)(trv_device*, const trv_buf* dst, const trv_buf* src, size_t size,
                     uint64_t* out_point);
  /* (optional: NULL = run is synchronous) timeout_ns 0: poll; TRV_PENDING when not reached. */
  trv_status (*wait)(trv_device*, uint64_t point, uint64_t timeout_ns);
  trv_status (*join)(trv_device*, trv_device* other,
                     uint64_t point); /* (optional) order on the device */
  /* (optional) When the point was reached, in ns of the host's steady clock (that of trv_record);
   * asked once it is. UNSUPPORTED: not kept (any more). */
  trv_status (*stamp)(trv_device*, uint64_t point, uint64_t* out_ns);
  int32_t (*last_error)(trv_device*,
                        const char** out_what); /* (optional) the vendor's code and text */
} trv_driver;

/* What a plug-in, a shared library, exports as "trv_plugin": its driver. Checked by size and abi
 * before anything else is looked at. */
typedef const trv_driver* (*trv_plugin_fn)(void);

/* The CPU driver (hal/cpu). config: NULL, or a trv_cpu_config (as trv_config). */
typedef struct trv_cpu_config {
  uint32_t size;
  const char* isa; /* NULL: the best level that the machine has; "ref": portable kernels only;
                      others: isa.c */
} trv_cpu_config;
extern TRV_API const trv_driver trv_cpu_driver;

#ifdef __cplusplus
}
#endif
#endif
