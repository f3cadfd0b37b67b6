/* map.c - a fused elementwise expression, interpreted over blocks that stay in the first-level
 * cache.
 *
 * The output's index space is cut into blocks: pieces of a row, or several whole rows when rows are
 * short. For a block each instruction runs once, over vectors of the block's size ("registers").
 * Dense inputs of a working type are read in place; others are gathered into the register first.
 * What is the same for all blocks (constants, broadcast rows) stays in its register. The last
 * instruction writes straight into a dense output.
 */
#include "map.h"

#include "walk.h"

#define MAP_REGS 32

#if defined(__ARM_ARCH_PROFILE) && __ARM_ARCH_PROFILE == 'M'
#define MAP_BYTES 2304 /* of stack: 8 elements of 33 registers at least */
#else
#define MAP_BYTES 16384
#endif

/* ---- verification
 * ----------------------------------------------------------------------------------------------------
 */
enum { F = 1, I = 2, B = 4, FI = 3, IB = 6, ALL = 7, SAME = 0, BOOL = 8 };
typedef struct op_info {
  uint8_t arity; /* register operands */
  uint8_t takes; /* working types of the operands, | BOOL: the result is bool */
} op_info;
static const op_info infos[TRV_MAP_OP_COUNT] = {
    [TRV_MAP_OP_LOAD] = {0, ALL},
    [TRV_MAP_OP_CONST] = {0, ALL},
    [TRV_MAP_OP_DIM] = {0, ALL},
    [TRV_MAP_OP_IOTA] = {0, ALL},
    [TRV_MAP_OP_CAST] = {1, ALL},
    [TRV_MAP_OP_ADD] = {2, ALL},
    [TRV_MAP_OP_SUB] = {2, FI},
    [TRV_MAP_OP_MUL] = {2, ALL},
    [TRV_MAP_OP_DIV] = {2, F},
    [TRV_MAP_OP_FLOOR_DIV] = {2, FI},
    [TRV_MAP_OP_TRUNC_DIV] = {2, FI},
    [TRV_MAP_OP_MOD] = {2, FI},
    [TRV_MAP_OP_FMOD] = {2, FI},
    [TRV_MAP_OP_POW] = {2, FI},
    [TRV_MAP_OP_ATAN2] = {2, F},
    [TRV_MAP_OP_MIN] = {2, ALL},
    [TRV_MAP_OP_MAX] = {2, ALL},
    [TRV_MAP_OP_FMIN] = {2, ALL},
    [TRV_MAP_OP_FMAX] = {2, ALL},
    [TRV_MAP_OP_EQ] = {2, ALL | BOOL},
    [TRV_MAP_OP_NE] = {2, ALL | BOOL},
    [TRV_MAP_OP_LT] = {2, ALL | BOOL},
    [TRV_MAP_OP_LE] = {2, ALL | BOOL},
    [TRV_MAP_OP_GT] = {2, ALL | BOOL},
    [TRV_MAP_OP_GE] = {2, ALL | BOOL},
    [TRV_MAP_OP_AND] = {2, IB},
    [TRV_MAP_OP_OR] = {2, IB},
    [TRV_MAP_OP_XOR] = {2, IB},
    [TRV_MAP_OP_SHL] = {2, I},
    [TRV_MAP_OP_SHR] = {2, I},
    [TRV_MAP_OP_NOT] = {1, IB},
    [TRV_MAP_OP_NEG] = {1, FI},
    [TRV_MAP_OP_ABS] = {1, FI},
    [TRV_MAP_OP_SIGN] = {1, ALL},
    [TRV_MAP_OP_FLOOR] = {1, FI},
    [TRV_MAP_OP_CEIL] = {1, FI},
    [TRV_MAP_OP_ROUND] = {1, FI},
    [TRV_MAP_OP_TRUNC] = {1, FI},
    [TRV_MAP_OP_EXP] = {1, F},
    [TRV_MAP_OP_EXPM1] = {1, F},
    [TRV_MAP_OP_EXP2] = {1, F},
    [TRV_MAP_OP_LOG] = {1, F},
    [TRV_MAP_OP_LOG2] = {1, F},
    [TRV_MAP_OP_LOG10] = {1, F},
    [TRV_MAP_OP_LOG1P] = {1, F},
    [TRV_MAP_OP_SQRT] = {1, F},
    [TRV_MAP_OP_RSQRT] = {1, F},
    [TRV_MAP_OP_RECIP] = {1, F},
    [TRV_MAP_OP_SIN] = {1, F},
    [TRV_MAP_OP_COS] = {1, F},
    [TRV_MAP_OP_TAN] = {1, F},
    [TRV_MAP_OP_ASIN] = {1, F},
    [TRV_MAP_OP_ACOS] = {1, F},
    [TRV_MAP_OP_ATAN] = {1, F},
    [TRV_MAP_OP_SINH] = {1, F},
    [TRV_MAP_OP_COSH] = {1, F},
    [TRV_MAP_OP_TANH] = {1, F},
    [TRV_MAP_OP_ASINH] = {1, F},
    [TRV_MAP_OP_ACOSH] = {1, F},
    [TRV_MAP_OP_ATANH] = {1, F},
    [TRV_MAP_OP_ERF] = {1, F},
    [TRV_MAP_OP_ERFC] = {1, F},
    [TRV_MAP_OP_SIGMOID] = {1, F},
    [TRV_MAP_OP_RELU] = {1, FI},
    [TRV_MAP_OP_GELU] = {1, F},
    [TRV_MAP_OP_GELU_TANH] = {1, F},
    [TRV_MAP_OP_SILU] = {1, F},
    [TRV_MAP_OP_HARD_SWISH] = {1, F},
    [TRV_MAP_OP_HARD_SIGMOID] = {1, F},
    [TRV_MAP_OP_SOFTPLUS] = {1, F},
    [TRV_MAP_OP_ELU] = {1, F},
    [TRV_MAP_OP_SELECT] = {3, ALL},
    [TRV_MAP_OP_IS_NAN] = {1, ALL | BOOL},
    [TRV_MAP_OP_IS_INF] = {1, ALL | BOOL},
    [TRV_MAP_OP_LGAMMA] = {1, F},
    [TRV_MAP_OP_COPYSIGN] = {2, F},
    [TRV_MAP_OP_MISH] = {1, F},
    [TRV_MAP_OP_LOGICAL_NOT] = {1, ALL | BOOL},
    [TRV_MAP_OP_ERFINV] = {1, F},
    [TRV_MAP_OP_DIGAMMA] = {1, F},
    [TRV_MAP_OP_HYPOT] = {2, F},
};

#ifndef TRVK_VARIANT
static uint32_t family(uint32_t dtype) {
  const uint32_t work = trvk_work(dtype);
  return work == TRVK_WORK_BOOL ? B : work == TRVK_WORK_I32 || work == TRVK_WORK_I64 ? I : F;
}

/* One instruction against the dtypes that registers hold (0: nothing yet). */
static const char* verify_instr(const trvf_map_instr* s, const uint8_t* held, uint32_t regs,
                                const trv_tensor* in, uint32_t n_in, const trv_tensor* out,
                                uint32_t dim_count) {
  if (s->op >= TRV_MAP_OP_COUNT) return TRVK_SAY("unknown map instruction");
  if (s->dst >= regs || trv_dtype_size(s->dtype) == 0)
    return TRVK_SAY("bad register or dtype in a map");
  const op_info info = infos[s->op];
  const uint8_t operand[3] = {s->a, s->b, s->c};
  for (uint32_t k = 0; k < info.arity; k++)
    if (operand[k] >= regs || held[operand[k]] == 0)
      return TRVK_SAY("a map reads a register before it is written");
  switch (s->op) {
    case TRV_MAP_OP_LOAD:
      if (s->a >= n_in || in[s->a].dtype == TRV_DTYPE_NONE)
        return TRVK_SAY("a map reads an input that is not there");
      if (in[s->a].dtype != s->dtype)
        return TRVK_SAY("a map's load has another dtype than its input");
      return in[s->a].rank > out->rank ? TRVK_SAY("a map's input has a higher rank than its output")
                                       : NULL;
    case TRV_MAP_OP_DIM:
      return s->value < dim_count ? NULL : TRVK_SAY("no such dimension");
    case TRV_MAP_OP_IOTA:
      return s->value < out->rank ? NULL : TRVK_SAY("no such axis");
    case TRV_MAP_OP_CONST:
    case TRV_MAP_OP_CAST:
      return NULL;
    case TRV_MAP_OP_SELECT:
      return held[s->a] == TRV_DTYPE_BOOL && held[s->b] == s->dtype && held[s->c] == s->dtype
                 ? NULL
                 : TRVK_SAY("operands of a select do not agree");
    default:
      break;
  }
  const uint32_t type = held[s->a], result = info.takes & BOOL ? TRV_DTYPE_BOOL : type;
  if ((info.takes & family(type)) == 0)
    return TRVK_SAY("a map instruction does not take this dtype");
  if ((info.arity == 2 && held[s->b] != type) || s->dtype != result)
    return TRVK_SAY("operands of a map instruction do not agree");
  return NULL;
}

const char* trvk_map_verify(const trvf_map_instr* code, uint32_t code_count,
                            const trvf_map_attrs* attrs, const trv_tensor* in, uint32_t n_in,
                            const trv_tensor* out, uint32_t dim_count, int64_t* got) {
  uint8_t held[MAP_REGS] = {0};
  *got = 0;
  if (attrs->count == 0 || attrs->code > code_count || attrs->count > code_count - attrs->code)
    return TRVK_SAY("map code outside the part");
  if (attrs->regs > MAP_REGS) return TRVK_SAY("a map has too many registers");
  for (uint32_t i = 0; i < attrs->count; i++) {
    const trvf_map_instr* s = &code[attrs->code + i];
    const char* what = verify_instr(s, held, attrs->regs, in, n_in, out, dim_count);
    *got = (int64_t)i;
    if (what) return what;
    held[s->dst] = s->dtype;
  }
  return code[attrs->code + attrs->count - 1].dtype == out->dtype
             ? NULL
             : TRVK_SAY("a map's result has another dtype than its output");
}

const char* trvk_map_check(const trvk_call* call, int64_t* expected, int64_t* got) {
  for (uint32_t i = 0; i < call->n_in; i++)
    if (call->in[i].dtype != TRV_DTYPE_NONE && !trvk_walk_broadcasts(&call->in[i], call->out))
      return trvk_fail(TRVK_SAY("an input does not broadcast to the output"),
                       (int64_t)trvk_count(call->out), (int64_t)trvk_count(&call->in[i]), expected,
                       got);
  return NULL;
}

uint32_t trvk_map_tiles(const trvk_call* call, uint32_t workers) {
  const trvf_map_attrs* attrs = call->attrs;
  const trv_dim n = trvk_count(call->out);
  return trvk_tiles(n * (trv_dim)(1 + attrs->count / 2), n / 256, workers);
}
#endif

/* ---- execution
 * -----------------------------------------------------------------------------------------------------------
 */
enum { MAX_STREAMS = 1 + TRVK_MAX_ARGS + TRV_MAX_RANK };

typedef struct map_state {
  uint32_t rank;
  trv_dim dim[TRV_MAX_RANK], index[TRV_MAX_RANK]; /* index: of the block's first element */
  trv_dim stride[MAX_STREAMS][TRV_MAX_RANK];      /* 0: output, 1 + i: input i, then iotas */
  uint8_t linear[MAX_STREAMS];                    /* walked densely across rows */
  uint8_t rows_same[MAX_STREAMS];                 /* every row is the same memory */
  uint8_t iota[TRV_MAX_RANK];                     /* stream of an axis's iota */
  trv_dim rows, cols, n;                          /* of the block; n = rows * cols */
  /* registers */
  uint8_t* space[MAP_REGS];  /* own memory */
  uint8_t* spare;            /* for results that must not overwrite an operand of another width */
  const void* at[MAP_REGS];  /* where the value is now: own memory or an input */
  uint8_t held[MAP_REGS];    /* its dtype */
  uint32_t owner[MAP_REGS];  /* 1 + the instruction whose lasting value own memory has; 0: none */
  const void* key[MAP_REGS]; /* ... read from here */
  trv_dim filled[MAP_REGS];  /* ... for so many elements */
} map_state;

/* Streams, axes merged; the iotas are streams whose offset is the value. */
static void plan_streams(map_state* m, const trvk_call* call, const trvf_map_instr* code,
                         uint32_t count) {
  const trv_tensor* out = call->out;
  uint32_t streams = 1 + (uint32_t)call->n_in;
  memcpy(m->dim, out->dim, sizeof(trv_dim) * out->rank);
  memcpy(m->stride[0], out->stride, sizeof(trv_dim) * out->rank);
  for (uint32_t i = 0; i < call->n_in; i++) {
    if (call->in[i].dtype == TRV_DTYPE_NONE)
      memset(m->stride[1 + i], 0, sizeof(m->stride[0]));
    else
      trvk_walk_broadcast(&call->in[i], out, m->stride[1 + i]);
  }
  memset(m->iota, 0, sizeof(m->iota));
  for (uint32_t i = 0; i < count; i++) {
    if (code[i].op != TRV_MAP_OP_IOTA || m->iota[code[i].value]) continue;
    memset(m->stride[streams], 0, sizeof(m->stride[0]));
    m->stride[streams][code[i].value] = 1;
    m->iota[code[i].value] = (uint8_t)streams++;
  }
  m->rank = trvk_walk_plan(out->rank, m->dim, m->stride, streams);
  for (uint32_t s = 0; s < streams; s++) {
    trv_dim step = 1;
    m->linear[s] = m->rows_same[s] = 1;
    for (uint32_t i = m->rank; i-- > 0;) {
      if (m->stride[s][i] != step) m->linear[s] = 0;
      if (i + 1 < m->rank && m->stride[s][i] != 0) m->rows_same[s] = 0;
      step *= m->dim[i];
    }
  }
}

static uint8_t width_of(uint32_t dtype) { return (uint8_t)trvk_work_size(trvk_work(dtype)); }

/* Does an instruction write over an operand whose elements have another size than the result's? */
static int overwrites(const map_state* m, const trvf_map_instr* s) {
  const uint8_t operand[3] = {s->a, s->b, s->c};
  for (uint32_t k = 0; k < infos[s->op].arity; k++)
    if (operand[k] == s->dst && width_of(m->held[s->dst]) != width_of(s->dtype)) return 1;
  return 0;
}

/* Register memory out of MAP_BYTES at base; returns the largest block. */
static trv_dim plan_registers(map_state* m, const trvf_map_instr* code, uint32_t count,
                              uint8_t* base) {
  uint8_t width[MAP_REGS + 1] = {0};
  size_t sum = 0, at = 0;
  int clash = 0;
  for (uint32_t i = 0; i < count; i++) {
    const uint8_t w = width_of(code[i].dtype);
    if (w > width[code[i].dst]) width[code[i].dst] = w;
    clash |= overwrites(m, &code[i]);
    m->held[code[i].dst] = code[i].dtype;
  }
  if (clash) { /* registers trade places with the spare one: all of them are wide */
    for (uint32_t r = 0; r < MAP_REGS; r++) width[r] = width[r] ? 8 : 0;
    width[MAP_REGS] = 8;
  }
  for (uint32_t r = 0; r <= MAP_REGS; r++) sum += width[r];
  const size_t block = (MAP_BYTES / sum) & ~(size_t)7;
  for (uint32_t r = 0; r < MAP_REGS; r++) {
    m->space[r] = base + at;
    m->owner[r] = 0;
    at += width[r] * block;
  }
  m->spare = base + at;
  return (trv_dim)block;
}

/* One number into n elements of the working type of dtype, wrapped or rounded to it. */
static void fill(void* dst, uint32_t dtype, double real, int64_t whole, trv_dim n) {
  switch (trvk_work(dtype)) {
    case TRVK_WORK_BOOL:
      memset(dst, whole != 0, (size_t)n);
      break;
    case TRVK_WORK_I32:
      for (trv_dim i = 0; i < n; i++) ((int32_t*)dst)[i] = (int32_t)whole;
      break;
    case TRVK_WORK_I64:
      for (trv_dim i = 0; i < n; i++) ((int64_t*)dst)[i] = whole;
      break;
    case TRVK_WORK_F32:
      for (trv_dim i = 0; i < n; i++) ((float*)dst)[i] = (float)real;
      break;
    default:
      for (trv_dim i = 0; i < n; i++) ((double*)dst)[i] = real;
      break;
  }
  trvk_narrow(dst, dtype, n);
}

static void number(void* dst, const trvf_map_instr* s, const trvk_call* call, trv_dim n) {
  double real;
  int64_t whole;
  if (s->op == TRV_MAP_OP_DIM) {
    whole = (int64_t)call->dims[s->value];
    real = (double)whole;
  } else {
    memcpy(&real, &s->value, sizeof(real));
    memcpy(&whole, &s->value, sizeof(whole));
  }
  fill(dst, s->dtype, real, whole, n);
}

/* dst = first + r * rs + c * cs, as the working type of dtype. */
#define IOTA(T)                      \
  for (trv_dim r = 0; r < rows; r++) \
    for (trv_dim c = 0; c < cols; c++) ((T*)dst)[r * cols + c] = (T)(first + r * rs + c * cs);
static void iota(void* dst, uint32_t dtype, trv_dim first, trv_dim rows, trv_dim rs, trv_dim cols,
                 trv_dim cs) {
  switch (trvk_work(dtype)) {
    case TRVK_WORK_BOOL:
      for (trv_dim r = 0; r < rows; r++)
        for (trv_dim c = 0; c < cols; c++)
          ((uint8_t*)dst)[r * cols + c] = first + r * rs + c * cs != 0;
      break;
    case TRVK_WORK_I32:
      IOTA(int32_t) break;
    case TRVK_WORK_I64:
      IOTA(int64_t) break;
    case TRVK_WORK_F32:
      IOTA(float) break;
    default:
      IOTA(double) break;
  }
}

/* Calls for each run of rows that differ in one axis only: rows [r, r + m), first element at offset
 * `at`, rows rs apart. */
typedef struct row_run {
  trv_dim index[TRV_MAX_RANK];
  trv_dim r, m, at, rs;
} row_run;
static void runs_begin(const map_state* m, row_run* run) {
  memcpy(run->index, m->index, sizeof(run->index));
  run->r = run->m = 0;
}
static int runs_next(const map_state* m, uint32_t stream, row_run* run) {
  run->r += run->m;
  if (run->r >= m->rows) return 0;
  if (run->m) trvk_walk_step(m->rank - 2, m->dim, run->index, run->m);
  run->at = trvk_walk_at(m->rank, run->index, m->stride[stream]);
  run->m = 1;
  run->rs = 0;
  if (m->rank >= 2) {
    const trv_dim left = m->dim[m->rank - 2] - run->index[m->rank - 2];
    run->m = m->rows - run->r < left ? m->rows - run->r : left;
    run->rs = m->stride[stream][m->rank - 2];
  }
  return 1;
}

/* Load or iota: makes at[dst] point to the block's values. */
static void gather(map_state* m, const trvk_call* call, const trvf_map_instr* s, uint32_t pc) {
  const int is_load = s->op == TRV_MAP_OP_LOAD;
  const uint32_t stream = is_load ? 1u + s->a : m->iota[s->value], r = s->dst;
  const trv_dim cs = m->stride[stream][m->rank - 1];
  const trv_dim first = trvk_walk_at(m->rank, m->index, m->stride[stream]);
  const trv_dim size = is_load ? (trv_dim)trv_dtype_size(s->dtype) : 0;
  const uint8_t* data = is_load ? call->in[s->a].data : NULL;
  const void* key = (const void*)((uintptr_t)data + (uintptr_t)(is_load ? first * size : first));
  if (is_load && trvk_native(s->dtype) &&
      (m->rows == 1 ? cs == 1 || m->n == 1 : m->linear[stream])) {
    m->at[r] = data + first * size;
    return;
  }
  m->at[r] = m->space[r];
  if (m->owner[r] == pc + 1 && m->key[r] == key && m->filled[r] >= m->n) return;
  const size_t width = trvk_work_size(trvk_work(s->dtype));
  row_run run;
  if (m->linear[stream] && is_load) {
    trvk_load(m->space[r], data + first * size, s->dtype, 1, 0, m->n, 1);
  } else {
    for (runs_begin(m, &run); runs_next(m, stream, &run);) {
      uint8_t* dst = m->space[r] + (size_t)(run.r * m->cols) * width;
      if (is_load)
        trvk_load(dst, data + run.at * size, s->dtype, run.m, run.rs, m->cols, cs);
      else
        iota(dst, s->dtype, run.at, run.m, run.rs, m->cols, cs);
    }
  }
  const int lasting = m->rows == 1 ? cs == 0 : m->rows_same[stream];
  m->owner[r] = lasting ? pc + 1 : 0;
  m->key[r] = key;
  m->filled[r] = m->n;
}

#define SELECT(T)                                \
  {                                              \
    T* d = dst;                                  \
    const T *x = b, *y = c;                      \
    TRVK_IVDEP for (trv_dim i = 0; i < n; i++) { \
      const T p = x[i], q = y[i];                \
      d[i] = cond[i] ? p : q;                    \
    }                                            \
    break;                                       \
  }
static void select_values(void* dst, const uint8_t* cond, const void* b, const void* c,
                          size_t width, trv_dim n) {
  switch (width) {
    case 1:
      SELECT(uint8_t)
    case 4:
      SELECT(uint32_t)
    default:
      SELECT(uint64_t)
  }
}

static void compute(map_state* m, const trvf_map_instr* s, void* dst) {
  const void *a = m->at[s->a], *b = NULL, *c = NULL;
  const uint32_t arity = infos[s->op].arity, type = m->held[s->a];
  if (arity > 1) b = m->at[s->b];
  if (arity > 2) c = m->at[s->c];
  if (s->op == TRV_MAP_OP_CAST) {
    trvk_cast(dst, s->dtype, a, type, m->n);
    return;
  }
  if (s->op == TRV_MAP_OP_SELECT) {
    select_values(dst, a, b, c, trvk_work_size(trvk_work(s->dtype)), m->n);
    return;
  }
  switch (trvk_work(type)) {
    case TRVK_WORK_BOOL:
      trvk_map_bool(s->op, dst, a, b, c, m->n);
      break;
    case TRVK_WORK_I32:
      trvk_map_i32(s->op, dst, a, b, c, m->n);
      break;
    case TRVK_WORK_I64:
      trvk_map_i64(s->op, dst, a, b, c, m->n);
      break;
    case TRVK_WORK_F32:
      trvk_map_f32(s->op, dst, a, b, c, m->n);
      break;
    default:
      trvk_map_f64(s->op, dst, a, b, c, m->n);
      break;
  }
  if (!trvk_native(s->dtype)) trvk_narrow(dst, s->dtype, m->n);
}

static void run_block(map_state* m, const trvk_call* call, const trvf_map_instr* code,
                      uint32_t count) {
  const trv_tensor* out = call->out;
  const trv_dim size = (trv_dim)trv_dtype_size(out->dtype), cs = m->stride[0][m->rank - 1];
  uint8_t* first = out->data + trvk_walk_at(m->rank, m->index, m->stride[0]) * size;
  const int dense = m->rows == 1 ? cs == 1 || m->n == 1 : m->linear[0];
  for (uint32_t pc = 0; pc < count; pc++) {
    const trvf_map_instr* s = &code[pc];
    if (s->op == TRV_MAP_OP_LOAD || s->op == TRV_MAP_OP_IOTA) {
      gather(m, call, s, pc);
    } else if (s->op == TRV_MAP_OP_CONST || s->op == TRV_MAP_OP_DIM) {
      if (m->owner[s->dst] != pc + 1 || m->filled[s->dst] < m->n) {
        number(m->space[s->dst], s, call, m->n);
        m->owner[s->dst] = pc + 1;
        m->filled[s->dst] = m->n;
      }
      m->at[s->dst] = m->space[s->dst];
    } else {
      uint8_t* dst = m->space[s->dst];
      if (pc + 1 == count && dense && trvk_native(out->dtype)) {
        dst = first;
      } else {
        if (overwrites(m, s)) {
          m->space[s->dst] = m->spare;
          m->spare = dst;
          dst = m->space[s->dst];
        }
        m->owner[s->dst] = 0;
      }
      compute(m, s, dst);
      m->at[s->dst] = dst;
    }
    m->held[s->dst] = s->dtype;
  }
  const void* result = m->at[code[count - 1].dst];
  if (result == first && trvk_native(out->dtype) && dense) return;
  if (dense) {
    trvk_store(first, result, out->dtype, 1, 0, m->n, 1);
    return;
  }
  row_run run;
  const size_t width = trvk_work_size(trvk_work(out->dtype));
  for (runs_begin(m, &run); runs_next(m, 0, &run);)
    trvk_store(out->data + run.at * size,
               (const uint8_t*)result + (size_t)(run.r * m->cols) * width, out->dtype, run.m,
               run.rs, m->cols, cs);
}

void TRVK_KERNEL(map)(const trvk_call* call, uint32_t tile) {
  const trvf_map_attrs* attrs = call->attrs;
  const trvf_map_instr* code = call->code + attrs->code;
  const trv_dim total = trvk_count(call->out);
  if (total == 0) return;
  _Alignas(64) uint8_t memory[MAP_BYTES];
  map_state m;
  plan_streams(&m, call, code, attrs->count);
  const trv_dim block = plan_registers(&m, code, attrs->count, memory), inner = m.dim[m.rank - 1];
  trv_dim at, end;
  if (inner * 2 <= block && m.rank > 1) { /* several rows at a time; tiles are cut between rows */
    const trv_dim most = block / inner;
    trvk_split(total / inner, call->tiles, tile, &at, &end);
    trvk_walk_seek(m.rank, m.dim, at * inner, m.index);
    m.cols = inner;
    for (; at < end; at += m.rows) {
      m.rows = end - at < most ? end - at : most;
      m.n = m.rows * inner;
      run_block(&m, call, code, attrs->count);
      trvk_walk_seek(m.rank, m.dim, (at + m.rows) * inner % total, m.index);
    }
  } else {
    trvk_split(total, call->tiles, tile, &at, &end);
    trvk_walk_seek(m.rank, m.dim, at, m.index);
    m.rows = 1;
    for (; at < end; at += m.n) {
      m.n = inner - m.index[m.rank - 1];
      if (m.n > block) m.n = block;
      if (m.n > end - at) m.n = end - at;
      m.cols = m.n;
      run_block(&m, call, code, attrs->count);
      trvk_walk_step(m.rank - 1, m.dim, m.index, m.n);
    }
  }
}
