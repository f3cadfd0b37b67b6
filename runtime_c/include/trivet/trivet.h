/* trivet.h - opens a program in place, says what memory it needs, runs it.
 *
 * Order of use:  trv_program_open -> trv_session_bytes -> trv_session_init -> trv_session_bind /
 * trv_session_input
 *                -> trv_session_run.  On a host with malloc and files, trv_host_open does all of it
 * (host section). Nothing here allocates, locks, or has global state. A program is immutable and
 * may serve any number of sessions in parallel; a session belongs to one thread at a time. Every
 * function returns a status (base.h).
 */
#ifndef TRIVET_TRIVET_H
#define TRIVET_TRIVET_H

#include "trivet/base.h"
#include "trivet/config.h"
#include "trivet/hal.h"

#ifdef __cplusplus
extern "C" {
#endif

#define TRV_VERSION_TEXT "0.1.0"
#define TRV_FILE_ABI 1

/* ---- program: a verified view of a file ---- */

/* Where a caller's bytes come from when they cannot be mapped. read: 0, or a negative status. */
typedef struct trv_reader {
  trv_status (*read)(void* self, uint64_t offset, void* dst, size_t size);
  void* self;
  uint64_t size;
} trv_reader;

/* Borrowed bytes of a whole file (flash, mmap, memory). Fields are for the runtime. Copyable,
 * nothing to close. */
typedef struct trv_program {
  trv_span file;     /* head at least; with the segments unless a reader is used */
  trv_span external; /* weights file, or empty */
  uint32_t root, entry_count, segment_count, flags;
  const trvf_segment* segments;
  const trv_reader* reader; /* or NULL */
  trv_diag diag;            /* of the last failed trv_program_ call on this struct */
} trv_program;

/* Check weight segments not at open but in trv_program_check or at the first session. */
#define TRV_OPEN_DEFER_CRC 1u
/* Check no CRC: for bytes that something else vouches for (an image in flash). What they say is
 * verified all the same. */
#define TRV_OPEN_NO_CRC 2u

/* Opens a program in place and verifies it: structure, ranges, overlap of live values, CRCs. file
 * must be 16-byte aligned and stay valid and unchanged while the program or a session of it is
 * used. O(file) time because of the CRCs; O(head) with TRV_OPEN_DEFER_CRC. Does not block. Errors:
 * FORMAT, VERSION, ARGUMENT, UNSUPPORTED (a big-endian machine); out_prog->diag says what. */
TRV_API TRV_NODISCARD trv_status trv_program_open(trv_program* out_prog, trv_span file,
                                                  uint32_t flags);

/* Attaches the external weights file that the program names. Errors: FORMAT when it is another
 * file, STATE. */
TRV_API TRV_NODISCARD trv_status trv_program_attach(trv_program* prog, trv_span weights,
                                                    uint32_t flags);

/* As trv_program_open, through a callback: the head is read into `head` (head_size bytes, 16-byte
 * aligned; MEMORY with diag.expected when too small). Weight regions must then be given to the
 * session as buffers; trv_session_init reads into them. */
TRV_API TRV_NODISCARD trv_status trv_program_open_reader(trv_program* out_prog,
                                                         const trv_reader* reader, void* head,
                                                         size_t head_size, uint32_t flags);

/* Checks the CRC of every segment now (for TRV_OPEN_DEFER_CRC). Errors: FORMAT. */
TRV_API TRV_NODISCARD trv_status trv_program_check(trv_program* prog);

/* An entry's description; texts and arrays point into the file. */
typedef struct trv_entry {
  const char* name;
  uint32_t index, input_count, output_count, region_count, step_count, value_count, storage_count,
      dim_count, part_count;
  uint32_t table; /* for the runtime */
  uint32_t times;
  uint64_t lower_bound;
  const char* signature; /* JSON of the SDK, or NULL */
} trv_entry;

typedef struct trv_region {
  uint8_t kind, memory; /* TRV_REGION_KIND_*; which memory of the file */
  uint16_t id;          /* entries that name the same id mean the same bytes */
  uint32_t align;
  uint64_t size;  /* bytes that the caller gives (CONST: that lie in the file) */
  uint32_t flags; /* bit 0: depends on dimensions; size is then the bound, or that of the example */
} trv_region;

/* An input or output slot. dims: sizes, -1 where dynamic (then min..max). */
typedef struct trv_slot {
  const char* name;
  uint32_t value;
  uint8_t dtype, rank;
  int64_t dim[TRV_MAX_RANK], min[TRV_MAX_RANK], max[TRV_MAX_RANK];
} trv_slot;

TRV_API TRV_NODISCARD trv_status trv_program_entry(const trv_program* prog, uint32_t index,
                                                   trv_entry* out_entry);
TRV_API TRV_NODISCARD trv_status trv_program_find(const trv_program* prog, const char* name,
                                                  trv_entry* out_entry);
TRV_API TRV_NODISCARD trv_status trv_program_region(const trv_program* prog, uint32_t entry,
                                                    uint32_t i, trv_region* out_region);
TRV_API TRV_NODISCARD trv_status trv_program_input(const trv_program* prog, uint32_t entry,
                                                   uint32_t i, trv_slot* out_slot);
TRV_API TRV_NODISCARD trv_status trv_program_output(const trv_program* prog, uint32_t entry,
                                                    uint32_t i, trv_slot* out_slot);
/* Text of the debug table for a time of an entry ("" where stripped): field 0 op, 1 module path, 2
 * source, 3 placement. */
TRV_API const char* trv_program_debug(const trv_program* prog, uint32_t entry, uint32_t time,
                                      uint32_t field);

/* ---- session: an entry in the caller's memory ---- */
typedef struct trv_session trv_session;

typedef struct trv_bound_device {
  const trv_driver* driver;
  trv_device* device;
} trv_bound_device;

typedef struct trv_session_desc {
  uint32_t size; /* sizeof(trv_session_desc) */
  uint32_t entry;
  const trv_program* program; /* must outlive the session */
  const trv_bound_device*
      devices; /* in order of preference; borrowed until the session is deinit */
  uint32_t device_count;
  uint32_t flags;         /* TRV_SESSION_* */
  const trv_buf* regions; /* by region of the entry; ARENA and STATE buffers (CONST: with a reader,
                             or in a device's memory; IO: ignored). host is set in host memory, dev
                             in a device's. May be NULL for trv_session_bytes. Copied. */
  const trv_runner* runner; /* NULL: one thread */
  const trv_hooks* hooks;   /* NULL: none */
  uint32_t max_steps;  /* steps that one run may take before it stops with STATE; 0: no limit. For
                          files of unknown origin, whose loops need not end */
  const uint8_t* keep; /* by region: not 0: its buffer in a device's memory, or of a STATE, has been
                          filled by another session, and init leaves it. NULL: none. Not with
                          TRV_ONE_MEMORY */
} trv_session_desc;

/* Plan arenas again for the sizes of each run (dynamic entries, hosts). */
#define TRV_SESSION_REPLAN 1u
/* Init leaves STATE as it is: another session of the program filled it. */
#define TRV_SESSION_KEEP_STATE 2u
/* Steps run one after another, whatever order between devices the file allows: to see what overlap
 * gains, and for files of unknown origin, whose waits need not keep devices apart. */
#define TRV_SESSION_IN_ORDER 4u

/* Bytes of caller memory that trv_session_init needs (16-byte aligned), parts of drivers included.
 * Errors as init. */
TRV_API TRV_NODISCARD trv_status trv_session_bytes(const trv_session_desc* desc, size_t* out_bytes,
                                                   trv_diag* out_diag);

#ifndef TRV_ONE_MEMORY
/* Where each region of the entry (out_devices: one number per region) has to be: position of the
 * device whose memory it is, or TRV_NONE: in host memory. A device that refuses one of its parts
 * has no region. Errors as init. */
TRV_API TRV_NODISCARD trv_status trv_session_homes(const trv_session_desc* desc,
                                                   uint32_t* out_devices, trv_diag* out_diag);
#endif

/* Builds the session in mem, fills regions in devices' memories, and resets STATE. Errors:
 * ARGUMENT; MEMORY (a region or mem too small: diag.expected/got); UNSUPPORTED (no device takes a
 * step; diag.step); FORMAT (deferred CRC or hostile part). out_diag may be NULL. */
TRV_API TRV_NODISCARD trv_status trv_session_init(const trv_session_desc* desc, void* mem,
                                                  size_t size, trv_session** out_sess,
                                                  trv_diag* out_diag);
/* Closes the parts. The memory is the caller's. NULL is fine. */
TRV_API void trv_session_deinit(trv_session* sess);

#ifndef TRV_ONE_MEMORY
/* How a step is done. size is the caller's; texts are static or of the file. */
typedef struct trv_step {
  uint32_t size;
  uint32_t kind, time; /* TRV_STEP_KIND_*; of the plan */
  uint32_t device;     /* position in the session's devices; TRV_NONE: the runtime itself */
  uint32_t alternative, alternatives; /* RUN: which of how many */
  const char* wanted;                 /* RUN: delegate of the first alternative */
  trv_status status;                  /* why that one does not run, TRV_OK where it does ... */
  const char* why;                    /* ... in words, or NULL */
} trv_step;
TRV_API TRV_NODISCARD trv_status trv_session_step(const trv_session* sess, uint32_t i,
                                                  trv_step* out_step);

/* Copies between host memory and the first size bytes of a region, wherever it is: snapshots of
 * STATE, inputs and outputs at their planned place in a device's memory (region of a slot: by
 * trv_session_view). Blocks. Errors: ARGUMENT (no such region, write into CONST), MEMORY (beyond
 * its end), of the device. */
TRV_API TRV_NODISCARD trv_status trv_session_read(trv_session* sess, uint32_t region, void* dst,
                                                  size_t size);
TRV_API TRV_NODISCARD trv_status trv_session_write(trv_session* sess, uint32_t region,
                                                   const void* src, size_t size);
#endif

/* STATE back to its first values. Does not block on anything but running work. */
TRV_API TRV_NODISCARD trv_status trv_session_reset(trv_session* sess);

/* The slot's tensor at its present binding; valid until the next bind or plan. NULL when i is out
 * of range. */
TRV_API const trv_tensor* trv_session_input(trv_session* sess, uint32_t i);
TRV_API const trv_tensor* trv_session_output(trv_session* sess, uint32_t i);

/* Binds an input: dense row-major data of the slot's dtype in buf (host set; dev where the slot is
 * in a device's memory, which must have the data by then), sizes dims[rank]. Borrowed until the
 * next bind of the slot; only read. dims NULL: the slot's static sizes, or those bound last. Input
 * memory must be aligned to its element. buf.host NULL: sizes only; the data go to the planned
 * place, which trv_session_input tells after trv_session_plan, and must be written again before
 * each run. Errors: ARGUMENT with expected/got (slot, dtype, rank, size out of range), MEMORY
 * (buf.size too small). */
TRV_API TRV_NODISCARD trv_status trv_session_bind_input(trv_session* sess, uint32_t i,
                                                        uint32_t dtype, uint32_t rank,
                                                        const int64_t* dims, trv_buf buf);
/* Binds an output buffer (dense row-major). size is checked when it is known: here if static
 * (MEMORY), else in run (ARGUMENT; value = output; a plan goes through, so that it tells the size).
 * buf.host NULL: back to the planned place in the arena, where the data stay until the next run of
 * any session with the same arena. */
TRV_API TRV_NODISCARD trv_status trv_session_bind_output(trv_session* sess, uint32_t i,
                                                         trv_buf buf);
/* Gives ARENA or STATE region i another buffer (e.g. a bigger arena after TRV_MEMORY from plan).
 * What the old one held is not copied; unbound inputs and outputs have new places once
 * trv_session_plan has run. */
TRV_API TRV_NODISCARD trv_status trv_session_bind_region(trv_session* sess, uint32_t i,
                                                         trv_buf buf);

/* Evaluates dimensions for the inputs bound, checks their ranges, plans arenas again if asked to,
 * and so makes output sizes known. run does it when needed. Errors: ARGUMENT (expected/got, value =
 * input), MEMORY (value = region, expected = bytes: bind a bigger one and call again). */
TRV_API TRV_NODISCARD trv_status trv_session_plan(trv_session* sess);

/* Runs the entry to the end. May block on devices. After an error the session can be bound and run
 * again. */
TRV_API TRV_NODISCARD trv_status trv_session_run(trv_session* sess);

/* Golden pairs that export put into the file (runtime_c/check/selftest.c; images that do not call
 * it are without). How many: 0 for none. */
TRV_API uint32_t trv_selftest_cases(const trv_program* prog);
/* Runs pair `index` from a reset state and compares: integers must be equal, real numbers within
 * the tolerance that the file gives. sessions: one for each entry, NULL where pairs of an entry are
 * not wanted; their inputs are unbound and STATE is changed. Errors: ARGUMENT (no such pair);
 * DEVICE (an output differs: diag.value is the output, axis the element, expected and got the bits
 * of it); those of bind and run. */
TRV_API TRV_NODISCARD trv_status trv_selftest(trv_session* const* sessions, const trv_program* prog,
                                              uint32_t index, trv_diag* out_diag);

/* The end of a run. driver, device, point: set where one device will have done everything when it
 * is at the point; whoever gives it more work may rely on that without waiting. */
typedef struct trv_event {
  const trv_driver* driver;
  trv_device* device;
  uint64_t point;
  trv_session* session; /* NULL: it was over at once */
} trv_event;
/* Starts the entry and returns as soon as the host would have to wait for a device; out_done is
 * reached when the run is complete. Functions that change what the run uses (bind, plan, reset,
 * run, submit, deinit) end it first. Errors of what was done so far, as run. */
TRV_API TRV_NODISCARD trv_status trv_session_submit(trv_session* sess, trv_event* out_done);
/* Goes on with the run, on the calling thread, and waits for devices: each time for timeout_ns at
 * most (0: poll), then TRV_PENDING. Else what trv_session_run would have returned. The event is
 * good until the session runs again. */
TRV_API TRV_NODISCARD trv_status trv_event_wait(const trv_event* event, uint64_t timeout_ns);

/* The last error of this session. Never NULL. */
TRV_API const trv_diag* trv_session_diag(const trv_session* sess);
/* The session's plan, for inspection and taps: resolve a value with trv_view_tensor inside a hook.
 * Never NULL. */
TRV_API const trv_view* trv_session_view(const trv_session* sess);
/* Hooks may be changed between runs. NULL: none. */
TRV_API void trv_session_hooks(trv_session* sess, const trv_hooks* hooks);

/* Short English name of a status, static. */
TRV_API const char* trv_status_text(trv_status status);
/* Writes one line for a diag into out (NUL-terminated, cut to size); returns the length it has. */
TRV_API size_t trv_diag_print(const trv_diag* diag, char* out, size_t size);

/* ---- host: files, malloc, threads. Only host.c; absent with TRV_NO_HOST ---- */
#ifndef TRV_NO_HOST
typedef struct trv_host trv_host; /* a mapped program, its devices, a thread pool and regions; all
                                     in one allocation set */

/* Maps a file (weights: external weights file or NULL) and opens it. threads: of contexts that do
 * not ask for others, the calling one among them; 0: as many as the processors that this process
 * may use (a container's quota counts). Errors as trv_program_open, and DEVICE when the file cannot
 * be read. out_diag may be NULL. Free with trv_host_close. */
TRV_API TRV_NODISCARD trv_status trv_host_open(const char* path, const char* weights,
                                               uint32_t flags, uint32_t threads,
                                               trv_host** out_host, trv_diag* out_diag);
/* The same for bytes that the caller owns and keeps. */
TRV_API TRV_NODISCARD trv_status trv_host_open_span(trv_span file, trv_span weights, uint32_t flags,
                                                    uint32_t threads, trv_host** out_host,
                                                    trv_diag* out_diag);
/* Both in one, and who runs the parts. size is the caller's; everything is borrowed for the call
 * but spans and bound devices, which the caller keeps. */
typedef struct trv_host_desc {
  uint32_t size, flags, threads;   /* TRV_OPEN_* */
  const char *path, *weights_path; /* or: */
  trv_span file, weights;
  const char*
      devices; /* in order of preference: "name:options,name", e.g. "npu:fast=1,cpu"; NULL: those
                  that the file's parts ask for, as far as they are there, then the CPU */
  const char* const* plugins; /* paths of shared libraries with more drivers (trv_plugin_fn) */
  uint32_t plugin_count;
  uint32_t bound_count; /* devices that the application has opened: they come first */
  const trv_bound_device* bound;
} trv_host_desc;
/* Errors also: ARGUMENT (no such driver; a library that is no plug-in), VERSION (a plug-in of
 * another HAL), UNSUPPORTED (a device refuses its options); value is the position in the list. */
TRV_API TRV_NODISCARD trv_status trv_host_open_with(const trv_host_desc* desc, trv_host** out_host,
                                                    trv_diag* out_diag);
/* Device i of the host, in order of preference; ARGUMENT beyond the last. */
TRV_API TRV_NODISCARD trv_status trv_host_device(const trv_host* host, uint32_t i,
                                                 trv_bound_device* out_device);
TRV_API void trv_host_close(trv_host* host);
TRV_API const trv_program* trv_host_program(const trv_host* host);

/* A context: one session per entry, sharing STATE and arena. Contexts of one host are independent
 * of each other and may run on different threads. */
typedef struct trv_context trv_context;
TRV_API TRV_NODISCARD trv_status trv_context_open(trv_host* host, uint32_t flags,
                                                  trv_context** out_ctx, trv_diag* out_diag);

/* Who runs the tiles of a context's sessions; 0 in every field but size: the pool of the host. */
typedef struct trv_threads {
  uint32_t size;  /* sizeof(trv_threads) */
  uint32_t count; /* threads, the calling one among them; 1: it alone; 0: one for each of cpus */
  const uint32_t* cpus; /* the system's numbers of the processors that the context's own threads
                           keep to; NULL: any. The calling thread stays where it is */
  uint32_t cpu_count;
  const trv_runner* runner; /* the app's threads instead; copied, what it points at must live as
                               long as the context. NULL: a pool of the context's own */
} trv_threads;
/* The same with threads of its own, which no other context can keep busy; threads (borrowed for the
 * call) NULL: as trv_context_open. Contexts that share the host's pool do not wait for each other:
 * while one's step has it, the others work alone. Errors also: ARGUMENT (a processor that this
 * process may not use, a runner without workers), UNSUPPORTED (cpus on a system that binds no
 * threads). */
TRV_API TRV_NODISCARD trv_status trv_context_open_on(trv_host* host, uint32_t flags,
                                                     const trv_threads* threads,
                                                     trv_context** out_ctx, trv_diag* out_diag);
TRV_API void trv_context_close(trv_context* ctx);
TRV_API trv_session* trv_context_session(trv_context* ctx, uint32_t entry);
/* As trv_session_plan, growing arenas as needed (malloc). */
TRV_API TRV_NODISCARD trv_status trv_context_plan(trv_context* ctx, uint32_t entry);
/* As trv_session_run after trv_context_plan. */
TRV_API TRV_NODISCARD trv_status trv_context_run(trv_context* ctx, uint32_t entry);
/* As trv_session_submit after trv_context_plan. Entries of one context share memory: a run of
 * another one is ended first. For several runs at a time take several contexts. */
TRV_API TRV_NODISCARD trv_status trv_context_submit(trv_context* ctx, uint32_t entry,
                                                    trv_event* out_done);
/* Binds all inputs (their sizes as bound last, so bind each by itself once; static sizes need no
 * bind) and the first output_count outputs, and runs: one call for languages to which each is dear.
 * Errors: of trv_session_bind_input, trv_session_bind_output, trv_context_run; ARGUMENT where
 * input_count is not the entry's. */
TRV_API TRV_NODISCARD trv_status trv_context_call(trv_context* ctx, uint32_t entry,
                                                  const trv_buf* inputs, uint32_t input_count,
                                                  const trv_buf* outputs, uint32_t output_count);
TRV_API TRV_NODISCARD trv_status trv_context_reset(trv_context* ctx);
/* Bytes that this context holds: arenas, state, sessions. */
TRV_API size_t trv_context_bytes(const trv_context* ctx);

/* What one command took: the clock (monotonic, ns) when it began and ended, the other fields as of
 * trv_work. */
typedef struct trv_record {
  uint64_t begin_ns, end_ns; /* of a device that works by itself: as far as it tells, and end 0
                                while the work is not known to be done */
  const char* kernel;
  uint32_t time, tiles, isa;
  uint32_t track; /* position of the device; TRV_NONE: the runtime itself (moves) */
  uint64_t point; /* on the timeline of a device that works by itself, else 0 */
} trv_record;
/* Hooks that fill records in the order of execution. Set count to 0 to begin anew; it goes on
 * beyond capacity, so that one sees how many there would have been. */
typedef struct trv_recorder {
  trv_hooks hooks;
  trv_record* records;
  uint32_t capacity, count;
  uint32_t track, mark; /* of the step under way; records there were before it */
  uint64_t began_ns;
} trv_recorder;
/* Makes a recorder over the caller's array; both stay in place while trv_session_hooks(s,
 * &rec->hooks) holds. One session at a time. */
TRV_API void trv_recorder_init(trv_recorder* out_rec, trv_record* records, uint32_t capacity);
#endif

#ifdef __cplusplus
}
#endif
#endif
