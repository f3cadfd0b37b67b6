/* driver.c - the CPU driver: verifies a part, keeps what was chosen for it, runs its commands.
 *
 * Everything of a part is read in place from the program; an open part holds one kernel and one
 * tile count per command and one set of resolved arguments. Arguments are resolved anew for each
 * command (about 10 ns each), which keeps parts small and needs no invalidation. Checks of shapes
 * run when a dimension has changed (shape_epoch), never otherwise.
 */
#include "ops.h"
#include "trivet/fb.h"

struct trv_device {
  uint32_t isa;
};

typedef struct part_data { /* a part's vectors, verified by read_part */
  const trvf_command* commands;
  const uint32_t* args;
  const trvf_map_instr* code;
  uint32_t command_count, arg_count, code_count;
} part_data;

typedef struct chosen { /* what accept found for a command */
  trvk_fn fn;
  const void* attrs;
  uint32_t tiles; /* for `workers` of the part */
} chosen;

struct trv_part {
  part_data data;
  chosen* chosen;                         /* by command */
  uint32_t shape_epoch, workers, checked; /* of the last check */
};

static const uint8_t attrs_align[TRV_OP_COUNT] = {
#define OP(op, attrs, min_in, max_in, min_out, max_out, max_tmp) _Alignof(trvf_##attrs##_attrs),
#define WITHOUT(op) 1,
#include "kernels.def"
};

static trv_status refuse(trv_diag* diag, trv_status status, uint32_t time, const char* what,
                         int64_t expected, int64_t got) {
  if (diag) {
    memset(diag, 0, sizeof(*diag));
    diag->status = status;
    diag->step = TRV_NONE;
    diag->time = time;
    diag->value = TRV_NONE;
    diag->axis = TRV_NONE;
    diag->what = what;
    diag->expected = expected;
    diag->got = got;
  }
  return status;
}

/* ---- device
 * ---------------------------------------------------------------------------------------------------------
 */
static trv_status cpu_open(void* mem, const void* config, trv_device** out_dev) {
  const trv_cpu_config* c = config;
  trv_device* dev = mem;
  *out_dev = NULL;
  dev->isa = trvk_isa_mask(c ? c->isa : NULL);
  if (dev->isa == 0) return TRV_UNSUPPORTED;
  *out_dev = dev;
  return TRV_OK;
}

static void cpu_close(trv_device* dev) { (void)dev; }

static void cpu_caps(trv_device* dev, trv_caps* out_caps) {
  out_caps->flags = TRV_CAP_HOST_MEMORY | TRV_CAP_THREADS;
  out_caps->alignment = 16;
  out_caps->memory_free = 0;
  out_caps->arch = trvk_isa_level(dev->isa);
}

/* ---- acceptance
 * -------------------------------------------------------------------------------------------------------
 */

typedef struct part_reader {
  trv_fb fb;
  uint32_t root;
  uint32_t op, count; /* the attributes read last: of which op, how many */
  const uint8_t* attrs;
} part_reader;

/* Reads the vectors of the flatbuffer; every pointer is good for its count. */
static int read_part(part_data* p, part_reader* r, trv_span data) {
  trv_fb* fb = &r->fb;
  const uint32_t root = trv_fb_open(fb, data, "TRVC");
  r->root = root;
  r->op = TRV_OP_COUNT;
  p->commands =
      trv_fb_vector(fb, root, TRVF_CPU_PART_COMMANDS, sizeof(trvf_command), 4, &p->command_count);
  p->args = trv_fb_vector(fb, root, TRVF_CPU_PART_ARGS, 4, 4, &p->arg_count);
  p->code = trv_fb_vector(fb, root, TRVF_CPU_PART_CODE, sizeof(trvf_map_instr), 8, &p->code_count);
  return root != 0 && !fb->bad;
}

/* The attributes of a command whose op is known; NULL where there are none. */
static const void* read_attrs(part_reader* r, const trvf_command* c) {
  const uint32_t size = trvk_ops[c->op].attrs_size;
  if (c->op != r->op)
    r->attrs = trv_fb_vector(&r->fb, r->root, TRVF_CPU_PART_MAP + 2u * c->op, size,
                             attrs_align[c->op], &r->count);
  r->op = c->op;
  return c->attrs < r->count ? r->attrs + (size_t)c->attrs * size : NULL;
}

/* The call of a command, tensors apart. */
static void fill_call(trvk_call* call, const part_data* p, const trvf_command* c, const void* attrs,
                      const trv_view* view, trv_tensor* tensors, uint32_t* fault) {
  call->in = tensors;
  call->out = tensors + c->n_in;
  call->tmp = tensors + c->n_in + c->n_out;
  call->attrs = attrs;
  call->code = p->code;
  call->dims = view->dims;
  call->dim_table = view->dim_table;
  call->fault = fault;
  call->dim_count = view->dim_count;
  call->code_count = p->code_count;
  call->tiles = 1;
  call->n_in = c->n_in;
  call->n_out = c->n_out;
  call->n_tmp = c->n_tmp;
}

/* Proves command i as far as that is possible without dims; *found: its kernel and attributes. */
static trv_status accept(const part_data* p, part_reader* reader, uint32_t i, const trv_view* view,
                         uint32_t isa, chosen* found, trv_diag* diag) {
  const trvf_command* c = &p->commands[i];
  const uint32_t n = (uint32_t)c->n_in + c->n_out + c->n_tmp;
  if (c->op >= TRV_OP_COUNT)
    return refuse(diag, TRV_VERSION, c->time, TRVK_SAY("unknown operator"), TRV_OP_COUNT - 1,
                  c->op);
  if (trvk_ops[c->op].check == NULL)
    return refuse(diag, TRV_UNSUPPORTED, c->time, TRVK_SAY("this build is without the operator"), 0,
                  c->op);
  if (n > TRVK_MAX_ARGS || c->args > p->arg_count || n > p->arg_count - c->args)
    return refuse(diag, TRV_FORMAT, c->time, TRVK_SAY("arguments outside the part"), p->arg_count,
                  c->args);
  found->attrs = read_attrs(reader, c);
  if (found->attrs == NULL)
    return refuse(diag, TRV_FORMAT, c->time, TRVK_SAY("attributes outside the part"), reader->count,
                  c->attrs);
  trv_tensor tensors[TRVK_MAX_ARGS];
  for (uint32_t k = 0; k < n; k++) {
    const uint32_t id = p->args[c->args + k];
    tensors[k].dtype = TRV_DTYPE_NONE; /* nothing but dtype and rank is looked at */
    tensors[k].rank = 0;
    if (id == TRV_NONE && k < c->n_in) continue; /* trvk_verify knows which may be missing */
    if (id >= view->value_count)
      return refuse(diag, TRV_FORMAT, c->time, TRVK_SAY("no such value"), view->value_count, id);
    tensors[k].dtype = view->values[id].dtype;
    tensors[k].rank = view->values[id].rank;
    if (trv_dtype_size(tensors[k].dtype) == 0 || tensors[k].rank > TRV_MAX_RANK)
      return refuse(diag, TRV_FORMAT, c->time, TRVK_SAY("bad dtype or rank"), TRV_DTYPE_COUNT,
                    tensors[k].dtype);
    if (!trv_view_readable(view, id))
      return refuse(diag, TRV_UNSUPPORTED, c->time, TRVK_SAY("a value is not in host memory"), 0,
                    id);
    if (k >= c->n_in && !trv_view_writable(view, id))
      return refuse(diag, TRV_FORMAT, c->time, TRVK_SAY("a command writes a constant or an input"),
                    0, id);
  }
  trvk_call call;
  uint32_t fault = 0;
  int64_t expected = 0, got = 0;
  fill_call(&call, p, c, found->attrs, view, tensors, &fault);
  const char* what = trvk_verify(c->op, &call, &expected, &got);
  const int sizes = c->op == TRV_OP_NONZERO || c->op == TRV_OP_ITEM;
  if (what == NULL && sizes &&
      i + 1 != p->command_count) /* extents must be proved anew before anything else runs */
    what = trvk_fail(TRVK_SAY("a command that writes a dimension must be the last"),
                     p->command_count - 1, i, &expected, &got);
  if (what == NULL &&
      c->op == TRV_OP_NONZERO) { /* its output's rows are the dimension that it writes */
    const trvf_nonzero_attrs* a = call.attrs;
    const trvf_value* out = &view->values[p->args[c->args + 1]];
    if (out->rank != 2 || out->dim[0] != a->dim)
      what = trvk_fail(TRVK_SAY("the output's first dimension is not the one written"), a->dim,
                       out->dim[0], &expected, &got);
  }
  if (what) return refuse(diag, TRV_FORMAT, c->time, what, expected, got);
  found->fn = c->isa ? trvk_select(c->op, &call, isa & c->isa) : NULL; /* what tuning chose */
  if (found->fn == NULL) found->fn = trvk_select(c->op, &call, isa);
  if (found->fn == NULL)
    return refuse(diag, TRV_UNSUPPORTED, c->time, TRVK_SAY("no kernel for these dtypes"), 0,
                  tensors[0].dtype);
  return TRV_OK;
}

/* Where a part's `chosen` lie, and all that it takes. Counts are below 2^31 / 16 (they come out of
 * a flatbuffer). */
#define PART_ROOM ((sizeof(trv_part) + 15) & ~(size_t)15)
static int lay_out(const part_data* p, size_t* out_bytes) {
  const uint64_t bytes = PART_ROOM + (uint64_t)p->command_count * sizeof(chosen);
  *out_bytes = (size_t)bytes;
  return bytes <= SIZE_MAX / 2;
}

static trv_status cpu_part_need(trv_device* dev, const trv_part_desc* desc, size_t* out_bytes,
                                trv_diag* diag) {
  part_data p;
  part_reader reader;
  size_t bytes;
  *out_bytes = 0;
  if (strcmp(desc->format, "cpu.1") != 0)
    return refuse(diag, TRV_VERSION, TRV_NONE, TRVK_SAY("the part's format is not cpu.1"), 0, 0);
  if (!read_part(&p, &reader, desc->data))
    return refuse(diag, TRV_FORMAT, TRV_NONE, TRVK_SAY("damaged part"), 0, 0);
  for (uint32_t i = 0; i < p.command_count; i++) {
    chosen found;
    const trv_status status = accept(&p, &reader, i, desc->view, dev->isa, &found, diag);
    if (status != TRV_OK) return status;
  }
  if (!lay_out(&p, &bytes))
    return refuse(diag, TRV_MEMORY, TRV_NONE, TRVK_SAY("part too large for this machine"), 0, 0);
  *out_bytes = bytes;
  return TRV_OK;
}

static trv_status cpu_part_open(trv_device* dev, const trv_part_desc* desc, void* mem,
                                trv_part** out_part) {
  trv_part* part = mem;
  part_reader reader;
  size_t bytes;
  *out_part = NULL;
  if (!read_part(&part->data, &reader, desc->data) || !lay_out(&part->data, &bytes))
    return TRV_FORMAT;
  part->chosen = (chosen*)(void*)((uint8_t*)mem + PART_ROOM);
  part->checked = 0;
  part->shape_epoch = 0;
  part->workers = 0;
  for (uint32_t i = 0; i < part->data.command_count; i++) {
    const trv_status status =
        accept(&part->data, &reader, i, desc->view, dev->isa, &part->chosen[i], NULL);
    if (status != TRV_OK) return status;
  }
  *out_part = part;
  return TRV_OK;
}

static void cpu_part_close(trv_device* dev, trv_part* part) {
  (void)dev;
  (void)part;
}

/* ---- running
 * ----------------------------------------------------------------------------------------------------------
 */
static inline void resolve(const trv_part* part, const trvf_command* c, const trv_view* view,
                           trv_tensor* tensors) {
  const uint32_t n = (uint32_t)c->n_in + c->n_out + c->n_tmp, *ids = part->data.args + c->args;
  for (uint32_t k = 0; k < n; k++) {
    if (ids[k] == TRV_NONE)
      memset(&tensors[k], 0, sizeof(tensors[k]));
    else
      trv_view_tensor(view, ids[k], &tensors[k]);
  }
}

/* Rows that nonzero may write: its dimension has no value yet, so the bound counts, as far as
 * memory goes. */
static void set_room(const trv_part* part, const trvf_command* c, const trv_view* view,
                     trv_tensor* out) {
  const uint32_t id = part->data.args[c->args + 1];
  const trvf_value* f = &view->values[id];
  const trv_buf* region = &view->regions[view->storages[f->storage].region];
  const size_t element = trv_dtype_size(f->dtype), at = (size_t)(out->data - region->host);
  const int64_t bound = view->dim_table[f->dim[0]].max;
  size_t rows = (uint64_t)bound > PTRDIFF_MAX ? PTRDIFF_MAX : (size_t)bound;
  if (out->dim[1] > 0) {
    size_t room = region->size > at ? (region->size - at) / element : 0;
    const trv_dim row = (out->dim[1] - 1) * out->stride[1] + 1; /* elements that one row spans */
    room = out->stride[0] < row || room < (size_t)row
               ? 0
               : (room - (size_t)row) / (size_t)out->stride[0] + 1;
    if (rows > room) rows = room;
  }
  out->dim[0] = (trv_dim)rows;
}

/* Sizes whose product no address computation can overflow, and outputs that are not larger than
 * their memory: strides of 0 may claim any number of elements without leaving a storage. */
static const char* check_counts(const trv_part* part, const trvf_command* c, const trv_view* view,
                                const trv_tensor* tensors, int64_t* expected, int64_t* got) {
  const uint32_t n = (uint32_t)c->n_in + c->n_out + c->n_tmp, *ids = part->data.args + c->args;
  for (uint32_t k = 0; k < n; k++) {
    const trv_tensor* t = &tensors[k];
    uint64_t most = PTRDIFF_MAX / 16, count = 1;
    int empty = 0;
    for (uint32_t i = 0; i < t->rank; i++) empty |= t->dim[i] == 0;
    if (k >= c->n_in && !empty)
      most = view->regions[view->storages[view->values[ids[k]].storage].region].size /
             trv_dtype_size(t->dtype);
    for (uint32_t i = 0; i < t->rank; i++) {
      const uint64_t d = (uint64_t)t->dim[i];
      if (d != 0 && count > most / d)
        return trvk_fail(TRVK_SAY("too many elements"), (int64_t)most, t->dim[i], expected, got);
      count *= d;
    }
  }
  return NULL;
}

/* Every op's check with the present dims, and the tile counts. */
static trv_status check_part(trv_part* part, const trv_run* run, uint32_t workers) {
  const trv_view* view = run->view;
  uint32_t fault = 0;
  trv_tensor tensors[TRVK_MAX_ARGS];
  trvk_call call;
  part->checked = 0;
  for (uint32_t i = 0; i < part->data.command_count; i++) {
    const trvf_command* c = &part->data.commands[i];
    int64_t expected = 0, got = 0;
    resolve(part, c, view, tensors);
    fill_call(&call, &part->data, c, part->chosen[i].attrs, view, tensors, &fault);
    const char* what = check_counts(part, c, view, tensors, &expected, &got);
    if (what == NULL) what = trvk_ops[c->op].check(&call, &expected, &got);
    if (what) return refuse(run->diag, TRV_ARGUMENT, c->time, what, expected, got);
    part->chosen[i].tiles =
        trvk_ops[c->op].tiles(&call, c->workers && c->workers < workers ? c->workers : workers);
  }
  part->workers = workers;
  part->shape_epoch = run->shape_epoch;
  part->checked = 1;
  return TRV_OK;
}

typedef struct tile_job {
  trvk_fn fn;
  const trvk_call* call;
} tile_job;

static void run_tile(void* ctx, uint32_t i) {
  const tile_job* job = ctx;
  job->fn(job->call, i);
}

/* A command is about to run. */
static void tell(const trv_hooks* hooks, const trv_part* part, uint32_t i) {
  const trvf_command* c = &part->data.commands[i];
  if (hooks->size >= sizeof(*hooks) && hooks->work) {
    trv_work work = {sizeof(work), c->time, part->chosen[i].tiles, 0, ""};
    trvk_describe(c->op, part->chosen[i].fn, &work);
    hooks->work(hooks->self, &work);
  }
  if (hooks->begin) hooks->begin(hooks->self, c->time);
}

static trv_status cpu_run(trv_device* dev, trv_part* part, const trv_run* run,
                          uint64_t* out_point) {
  const trv_view* view = run->view;
  const trv_hooks* hooks = run->hooks;
  const uint32_t workers = run->runner ? run->runner->workers : 1;
  (void)dev;
  if (out_point) *out_point = 0;
  if (!part->checked || workers != part->workers || run->shape_epoch != part->shape_epoch) {
    const trv_status status = check_part(part, run, workers);
    if (status != TRV_OK) return status;
  }
  uint32_t fault = 0;
  trv_tensor tensors[TRVK_MAX_ARGS];
  trvk_call call;
  for (uint32_t i = 0; i < part->data.command_count; i++) {
    const trvf_command* c = &part->data.commands[i];
    resolve(part, c, view, tensors);
    fill_call(&call, &part->data, c, part->chosen[i].attrs, view, tensors, &fault);
    call.tiles = part->chosen[i].tiles;
    if (c->op == TRV_OP_NONZERO) set_room(part, c, view, &tensors[1]);
    if (hooks) tell(hooks, part, i);
    if (call.tiles <= 1) {
      call.tiles = 1;
      part->chosen[i].fn(&call, 0);
    } else {
      tile_job job = {part->chosen[i].fn, &call};
      run->runner->run(run->runner->self, run_tile, &job, call.tiles);
    }
    if (hooks && hooks->end) hooks->end(hooks->self, c->time);
    if (fault) return refuse(run->diag, TRV_ARGUMENT, c->time, trvk_fault_text(fault), 0, 0);
  }
  return TRV_OK;
}

const trv_driver trv_cpu_driver = {
    .size = sizeof(trv_driver),
    .abi = TRV_HAL_ABI,
    .name = "cpu",
    .device_bytes = sizeof(trv_device),
    .open = cpu_open,
    .close = cpu_close,
    .caps = cpu_caps,
    .part_need = cpu_part_need,
    .part_open = cpu_part_open,
    .part_close = cpu_part_close,
    .run = cpu_run,
};
