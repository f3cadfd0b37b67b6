/* ops.c - the table of operators and the choice of a kernel, both from kernels.def. */
#include "ops.h"

const trvk_op trvk_ops[TRV_OP_COUNT] = {
#define OP(op, attrs, min_in, max_in, min_out, max_out, max_tmp) \
  {#op,                                                          \
   sizeof(trvf_##attrs##_attrs),                                 \
   min_in,                                                       \
   max_in,                                                       \
   min_out,                                                      \
   max_out,                                                      \
   max_tmp,                                                      \
   trvk_##op##_check,                                            \
   trvk_##op##_tiles},
#define WITHOUT(op) {"", 0, 0, 0, 0, 0, 0, NULL, NULL},
#include "kernels.def"
};

enum {
#define WITHOUT(op) OP_##op,
#define OP(op, attrs, min_in, max_in, min_out, max_out, max_tmp) OP_##op,
#include "kernels.def"
  OP_COUNT
};
_Static_assert(OP_COUNT == TRV_OP_COUNT, "one OP row per operator, in the order of enum Op");

typedef struct kernel_row {
  uint16_t op;
  uint16_t isa;
  int (*match)(const trvk_call*);
  trvk_fn fn;
#ifndef TRV_NO_TEXT
  const char* name;
#endif
} kernel_row;

static const kernel_row rows[] = {
#ifdef TRV_NO_TEXT
#define ROW_NAME(function)
#else
#define ROW_NAME(function) , #function
#endif
#define K(op, match, isa, function) \
  {OP_##op, TRVK_ISA_##isa, trvk_is_##match, function ROW_NAME(function)},
#include "kernels.def"
};

static const kernel_row* find(const kernel_row* from, size_t count, uint32_t op,
                              const trvk_call* call, uint32_t isa_mask) {
  /* no other kernel may read weights by rows, whatever it matches */
  const int by_rows = (op == TRV_OP_QCONV && trvk_is_conv_rows(call)) ||
                      (op == TRV_OP_QMATMUL && trvk_is_any_matmul_rows(call));
  for (size_t i = count; i-- > 0;)
    if (from[i].op == op && (from[i].isa & isa_mask) == from[i].isa &&
        (!by_rows || from[i].match == trvk_is_conv_rows || from[i].match == trvk_is_matmul_rows ||
         from[i].match == trvk_is_matmul_rows_real) &&
        from[i].match(call))
      return &from[i];
  return NULL;
}

trvk_fn trvk_select(uint32_t op, const trvk_call* call, uint32_t isa_mask) {
  const kernel_row* row = find(rows, sizeof(rows) / sizeof(rows[0]), op, call, isa_mask);
  return row ? row->fn : NULL;
}

#ifndef TRV_NO_TEXT
const char* trvk_select_name(uint32_t op, const trv_tensor* args, uint32_t n_in, uint32_t n_out,
                             const void* attrs, const trvf_map_instr* code, uint32_t code_count,
                             uint32_t isa_mask) {
  static const kernel_row every[] = {
#define TRVK_EVERY_ROW
#define K(op, match, isa, function) {OP_##op, TRVK_ISA_##isa, trvk_is_##match, NULL, #function},
#include "kernels.def"
#undef TRVK_EVERY_ROW
  };
  const trvk_call call = {.in = args,
                          .out = args + n_in,
                          .attrs = attrs,
                          .code = code,
                          .code_count = code_count,
                          .tiles = 1,
                          .n_in = (uint8_t)n_in,
                          .n_out = (uint8_t)n_out};
  const kernel_row* row = find(every, sizeof(every) / sizeof(every[0]), op, &call, isa_mask);
  return row ? row->name : NULL;
}
#endif

void trvk_describe(uint32_t op, trvk_fn fn, trv_work* out) {
  for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
    if (rows[i].op != op || rows[i].fn != fn) continue;
    out->isa = rows[i].isa;
#ifndef TRV_NO_TEXT
    out->kernel = rows[i].name;
#endif
  }
}

uint32_t trvk_op_isas(uint32_t op) {
  uint32_t sets = 0;
  for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
    if (rows[i].op == op) sets |= rows[i].isa;
  return sets;
}

const char* trvk_verify(uint32_t op, const trvk_call* call, int64_t* expected, int64_t* got) {
  const trvk_op* info = &trvk_ops[op];
  if (call->n_in < info->min_in || call->n_in > info->max_in)
    return trvk_fail(TRVK_SAY("wrong number of inputs"), info->min_in, call->n_in, expected, got);
  if (call->n_out < info->n_out_min || call->n_out > info->n_out_max)
    return trvk_fail(TRVK_SAY("wrong number of outputs"), info->n_out_min, call->n_out, expected,
                     got);
  if (call->n_tmp > info->n_tmp_max)
    return trvk_fail(TRVK_SAY("too many scratch values"), info->n_tmp_max, call->n_tmp, expected,
                     got);
  for (uint32_t i = 0; i < info->min_in; i++)
    if (!trvk_opt(call, i))
      return trvk_fail(TRVK_SAY("a required input is missing"), 0, i, expected, got);
  for (uint32_t i = 0; i < call->n_tmp; i++)
    if (call->tmp[i].dtype != TRV_DTYPE_U8 || call->tmp[i].rank != 1)
      return trvk_fail(TRVK_SAY("scratch must be one row of u8"), 1, call->tmp[i].rank, expected,
                       got);
  if (op == TRV_OP_MAP &&
      trvk_ops[TRV_OP_MAP].check) { /* a constant: no code where it is left out */
    *expected = 0;
    return trvk_map_verify(call->code, call->code_count, call->attrs, call->in, call->n_in,
                           call->out, call->dim_count, got);
  }
  if (op == TRV_OP_NONZERO || op == TRV_OP_ITEM) {
    uint32_t row;
    memcpy(&row, call->attrs, sizeof(row)); /* the first field of both */
    if (row >= call->dim_count || call->dim_table[row].op != TRV_DIM_OP_DATA)
      return trvk_fail(TRVK_SAY("the dimension is not one that kernels write"), call->dim_count,
                       row, expected, got);
  }
  return NULL;
}

const char* trvk_fault_text(uint32_t fault) {
  return fault & TRVK_FAULT_INDEX ? TRVK_SAY("an index is out of range")
                                  : TRVK_SAY("a size is out of its range");
}

static trv_status refuse(trv_diag* diag, trv_status status, const char* what, int64_t expected,
                         int64_t got) {
  if (diag)
    *diag = (trv_diag){.status = status,
                       .step = TRV_NONE,
                       .time = TRV_NONE,
                       .value = TRV_NONE,
                       .axis = TRV_NONE,
                       .what = what,
                       .expected = expected,
                       .got = got};
  return status;
}

trv_status trvk_run(uint32_t op, const char* isa, const trv_tensor* args, uint32_t n_in,
                    uint32_t n_out, uint32_t n_tmp, const void* attrs, const trvf_map_instr* code,
                    uint32_t code_count, trv_dim* dims, const trvf_dim* dim_table,
                    uint32_t dim_count, uint32_t tiles, trv_diag* diag) {
  uint32_t fault = 0;
  int64_t expected = 0, got = 0;
  const uint32_t mask = trvk_isa_mask(isa);
  if (op >= TRV_OP_COUNT || mask == 0 || attrs == NULL || n_in > TRVK_MAX_ARGS ||
      n_out > TRVK_MAX_ARGS || n_tmp > TRVK_MAX_ARGS || n_in + n_out + n_tmp > TRVK_MAX_ARGS)
    return refuse(diag, TRV_ARGUMENT, TRVK_SAY("unknown operator or ISA, or too many arguments"),
                  TRV_OP_COUNT, op);
  trvk_call call = {.in = args,
                    .out = args + n_in,
                    .tmp = args + n_in + n_out,
                    .attrs = attrs,
                    .code = code,
                    .dims = dims,
                    .dim_table = dim_table,
                    .fault = &fault,
                    .dim_count = dim_count,
                    .code_count = code_count,
                    .n_in = (uint8_t)n_in,
                    .n_out = (uint8_t)n_out,
                    .n_tmp = (uint8_t)n_tmp};
  const char* what = trvk_verify(op, &call, &expected, &got);
  if (what) return refuse(diag, TRV_ARGUMENT, what, expected, got);
  const trvk_fn fn = trvk_select(op, &call, mask);
  if (fn == NULL)
    return refuse(diag, TRV_UNSUPPORTED, TRVK_SAY("no kernel for these dtypes"), 0, 0);
  what = trvk_ops[op].check(&call, &expected, &got);
  if (what) return refuse(diag, TRV_ARGUMENT, what, expected, got);
  call.tiles = tiles ? tiles : trvk_ops[op].tiles(&call, 1);
  for (uint32_t i = 0; i < call.tiles; i++) fn(&call, i);
  if (fault == 0) return TRV_OK;
  return refuse(diag, TRV_ARGUMENT, trvk_fault_text(fault), 0, 0);
}
