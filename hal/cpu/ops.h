/* ops.h - what the families of kernels share: declarations from kernels.def, matches, and helpers
 * for checks. */
#ifndef TRVK_OPS_H
#define TRVK_OPS_H

#include "kernel.h"

/* Texts of checks; left out to save flash. A check must still return non-NULL. */
#ifdef TRV_NO_TEXT
#define TRVK_SAY(text) ""
#else
#define TRVK_SAY(text) (text)
#endif

/* The next loop has no dependence between iterations, although pointers may be equal (an op working
 * in place). */
#if defined(__clang__)
#define TRVK_IVDEP _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define TRVK_IVDEP _Pragma("GCC ivdep")
#else
#define TRVK_IVDEP
#endif

/* ---- the operators
 * -----------------------------------------------------------------------------------------------
 */
#define OP(op, attrs, min_in, max_in, min_out, max_out, max_tmp)                         \
  const char* trvk_##op##_check(const trvk_call* call, int64_t* expected, int64_t* got); \
  uint32_t trvk_##op##_tiles(const trvk_call* call, uint32_t workers);
#define K(op, match, isa, function) void function(const trvk_call* call, uint32_t tile);
#include "kernels.def"

/* Matches of kernels.def. */
static inline int trvk_is_any(const trvk_call* call) {
  (void)call;
  return 1;
}
static inline int trvk_dtype_is_float(uint32_t dtype) {
  return dtype >= TRV_DTYPE_F16 && dtype <= TRV_DTYPE_F64;
}
static inline int trvk_is_float(const trvk_call* call) {
  return trvk_dtype_is_float(call->in[0].dtype);
}
static inline int trvk_is_bf16(const trvk_call* call) {
  return call->in[0].dtype == TRV_DTYPE_BF16;
}
static inline int trvk_is_f32(const trvk_call* call) { return call->in[0].dtype == TRV_DTYPE_F32; }
/* Quantised in and out: no real numbers at all. */
static inline int trvk_is_stored(const trvk_call* call) {
  const uint32_t x = call->in[0].dtype, y = call->out[0].dtype;
  return (x == TRV_DTYPE_I8 || x == TRV_DTYPE_I16) && (y == TRV_DTYPE_I8 || y == TRV_DTYPE_I16);
}
static inline int trvk_is_i8(const trvk_call* call) { return call->in[0].dtype == TRV_DTYPE_I8; }
/* The largest of i8, without indices. */
static inline int trvk_is_max_i8(const trvk_call* call) {
  return trvk_is_i8(call) && call->n_out == 1 &&
         ((const trvf_pool_attrs*)call->attrs)->kind == TRV_POOL_KIND_MAX;
}
/* A sum or difference of i8; a table of bytes; i8 from or to f32. */
static inline int trvk_is_sum_i8(const trvk_call* call) {
  return trvk_is_i8(call) && ((const trvf_binary_attrs*)call->attrs)->kind != TRV_BINARY_KIND_MUL;
}
static inline int trvk_is_bytes(const trvk_call* call) {
  return trv_dtype_size(call->out[0].dtype) == 1;
}
static inline int trvk_is_real_i8(const trvk_call* call) {
  const uint32_t x = call->in[0].dtype, y = call->out[0].dtype;
  return (x == TRV_DTYPE_F32 && y == TRV_DTYPE_I8) || (x == TRV_DTYPE_I8 && y == TRV_DTYPE_F32);
}
/* A qmatmul that quantises rows of real numbers. */
static inline int trvk_is_dynamic(const trvk_call* call) {
  return trvk_is_f32(call) && ((const trvf_qmatmul_attrs*)call->attrs)->dynamic != 0;
}

/* The form of a packed weight that microcontrollers read (README.md): one row per output. */
#define TRVK_PACKED_ROWS 2 /* QconvAttrs.packed, QmatmulAttrs.packed */
/* 1 in an image whose program has no other weights in qconv and qmatmul: leaves the rest out. */
#ifndef TRVK_ONLY_ROWS
#define TRVK_ONLY_ROWS 0
#endif
static inline int trvk_is_conv_rows(const trvk_call* call) {
  return ((const trvf_qconv_attrs*)call->attrs)->packed == TRVK_PACKED_ROWS;
}
static inline int trvk_is_any_matmul_rows(const trvk_call* call) {
  return ((const trvf_qmatmul_attrs*)call->attrs)->packed == TRVK_PACKED_ROWS;
}
static inline int trvk_is_matmul_rows(const trvk_call* call) {
  return trvk_is_any_matmul_rows(call) && call->out[0].dtype != TRV_DTYPE_F32;
}

static inline int trvk_is_matmul_rows_real(const trvk_call* call) {
  return trvk_is_any_matmul_rows(call) && call->out[0].dtype == TRV_DTYPE_F32;
}

/* TRVK_ISA_ bits of a level by its name ("ref" "avx2" "avx512vnni" ...: isa.c), NULL: the best of
 * this machine; 0: unknown name, or a level that this machine lacks. */
TRV_API uint32_t trvk_isa_mask(const char* name);
/* Names of the levels of this machine at which op has other kernels than at the level before,
 * weakest ("ref") first; NULL behind the last. */
TRV_API const char* trvk_isa_name(uint32_t op, uint32_t index);
/* All TRVK_ISA_ bits in op's rows of kernels.def. */
uint32_t trvk_op_isas(uint32_t op);
/* The instruction set and the name of a kernel of op, which trvk_select gave. */
void trvk_describe(uint32_t op, trvk_fn fn, trv_work* out);
/* The name of a mask. */
const char* trvk_isa_level(uint32_t mask);
/* The function that a machine with the instruction sets of isa_mask would run for a command,
 * whether or not this is such a machine; NULL: none. args: inputs, then outputs, of which dtype and
 * rank count. For what is deployed elsewhere. */
TRV_API const char* trvk_select_name(uint32_t op, const trv_tensor* args, uint32_t n_in,
                                     uint32_t n_out, const void* attrs, const trvf_map_instr* code,
                                     uint32_t code_count, uint32_t isa_mask);

/* Map code alone, without dims (they are checked by trvk_map_check): registers, operands, dtypes,
 * positions. out_rank: rank of the output; in_dtypes[n_in]. Returns NULL or what is wrong; *got:
 * the instruction. */
const char* trvk_map_verify(const trvf_map_instr* code, uint32_t code_count,
                            const trvf_map_attrs* attrs, const trv_tensor* in, uint32_t n_in,
                            const trv_tensor* out, uint32_t dim_count, int64_t* got);

/* What can be proved about a command without dims and addresses: counts, optional inputs, map code,
 * rows of dimensions. Tensors of the call have dtype and rank; dims are not read. Returns NULL or
 * what is wrong. */
const char* trvk_verify(uint32_t op, const trvk_call* call, int64_t* expected, int64_t* got);

/* What a command's faults mean. */
const char* trvk_fault_text(uint32_t fault);

/* ---- scratch: asked by the exporter through libtrivet, so that the plan holds it
 * ---------------------------------- */

/* Bytes of scratch that sort needs at least for dtype and n elements along its axis (one lane at a
 * time). More, up to lanes times that, lets lanes run in parallel. Formula: (n <= 1 ? 0 : n * (size
 * of dtype == 8 ? 32 : 16)). */
TRV_API size_t trvk_sort_tmp_bytes(uint32_t dtype, int64_t n);
/* Bytes of scratch that scatter needs for a ScatterReduce and `count` elements of output: 4 * count
 * for mean, else 0. */
TRV_API size_t trvk_scatter_tmp_bytes(uint32_t reduce, int64_t count);

/* ---- helpers
 * --------------------------------------------------------------------------------------------------------
 */
static inline const trv_tensor* trvk_opt(const trvk_call* call, uint32_t i) {
  return i < call->n_in && call->in[i].dtype != TRV_DTYPE_NONE ? &call->in[i] : NULL;
}

/* Raises a fault bit; tiles may do so at the same time. */
static inline void trvk_raise(const trvk_call* call, uint32_t bit) {
#if defined(__GNUC__)
  __atomic_fetch_or(call->fault, bit, __ATOMIC_RELAXED);
#else
  *call->fault |= bit;
#endif
}

/* Reports a check that failed. */
static inline const char* trvk_fail(const char* what, int64_t want, int64_t have, int64_t* expected,
                                    int64_t* got) {
  *expected = want;
  *got = have;
  return what;
}

/* Tiles for `work` (elementary operations, about a nanosecond each) that can be cut into `parts`
 * pieces: one for each 16K of work, at most 4 per worker. */
static inline uint32_t trvk_tiles(trv_dim work, trv_dim parts, uint32_t workers) {
  if (workers <= 1 || work < 32768 || parts <= 1) return 1;
  trv_dim n = work / 16384;
  if (n > (trv_dim)workers * 4) n = (trv_dim)workers * 4;
  if (n > parts) n = parts;
  return (uint32_t)n;
}

/* memcpy that tolerates a hostile plan whose values overlap (then what is copied is anything). */
static inline void trvk_move(void* dst, const void* src, size_t size) {
  const uintptr_t d = (uintptr_t)dst, s = (uintptr_t)src;
  if (size == 0 || d == s) return;
  if (d - s >= size && s - d >= size)
    memcpy(dst, src, size);
  else
    for (size_t i = 0; i < size; i++) ((uint8_t*)dst)[i] = ((const uint8_t*)src)[i];
}

/* One-dimensional offset (elements) of element `index` of a row-major walk over dims. */
static inline trv_dim trvk_offset(uint32_t rank, const trv_dim* dim, const trv_dim* stride,
                                  trv_dim index) {
  trv_dim at = 0;
  for (uint32_t i = rank; i-- > 0;) {
    at += index % dim[i] * stride[i];
    index /= dim[i];
  }
  return at;
}
#endif
