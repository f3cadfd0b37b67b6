/* kernel.h - what a CPU kernel is. Private to hal/cpu.
 *
 * A kernel computes one command. It cannot fail: `check` of its op has proved shapes, dtypes and
 * ranges for the present dimensions (files may be hostile), so kernels index without tests. Only
 * what depends on data is tested while running: an index out of range is clamped and raises the
 * call's fault.
 */
#ifndef TRVK_KERNEL_H
#define TRVK_KERNEL_H

#include <math.h>
#include <string.h>

#include "trivet/hal.h"

#ifndef TRVK_MAX_ARGS
#define TRVK_MAX_ARGS 32 /* inputs + outputs + scratch of one command; fewer need less stack */
#endif

/* Faults: bits set in *call->fault. */
#define TRVK_FAULT_INDEX 1u /* an index value was out of range */
#define TRVK_FAULT_DIM 2u   /* a data-dependent size was out of its range */

typedef struct trvk_call {
  const trv_tensor*
      in; /* n_in inputs; an optional one that is not there has data NULL and dtype none */
  const trv_tensor* out;      /* n_out outputs */
  const trv_tensor* tmp;      /* n_tmp scratch values */
  const void* attrs;          /* the op's struct of ops.fbs */
  const trvf_map_instr* code; /* the part's code vector (map) */
  trv_dim* dims;              /* dimension table's present values; nonzero and item write into it */
  const trvf_dim* dim_table;
  uint32_t* fault;
  uint32_t dim_count, code_count;
  uint32_t tiles; /* how many tiles the work is cut into: run is called for tile 0 .. tiles-1, in
                     any order */
  uint8_t n_in, n_out, n_tmp;
} trvk_call;

typedef void (*trvk_fn)(const trvk_call* call, uint32_t tile);

/* One op: its checks and the choice of its kernel. Functions live in the op's family file, rows in
 * kernels.def. */
typedef struct trvk_op {
  const char* name;
  uint16_t attrs_size;
  uint8_t min_in, max_in, n_out_min, n_out_max, n_tmp_max;
  /* Proves everything that the kernels rely on. Returns NULL, or what is wrong (static text);
   * expected/got may be set. */
  const char* (*check)(const trvk_call* call, int64_t* expected, int64_t* got);
  /* How many tiles are worth it with that many workers (1 .. 4 * workers); must not depend on data.
   */
  uint32_t (*tiles)(const trvk_call* call, uint32_t workers);
} trvk_op;

extern const trvk_op trvk_ops[TRV_OP_COUNT];

/* The kernel for a call's dtypes and this machine, NULL when there is none. isa_mask: allowed
 * TRVK_ISA_ bits. Called once per command, with dims that may not be known yet: chosen by dtypes,
 * ranks and attrs only. */
trvk_fn trvk_select(uint32_t op, const trvk_call* call, uint32_t isa_mask);

/* Instruction sets, as files name them (enum Isa of cpu.fbs says what each stands for). */
#define TRVK_ISA_REF ((uint32_t)TRV_ISA_REF)
#define TRVK_ISA_AVX2 ((uint32_t)TRV_ISA_AVX2)
#define TRVK_ISA_AVX512 ((uint32_t)TRV_ISA_AVX512)
#define TRVK_ISA_AVXVNNI ((uint32_t)TRV_ISA_AVXVNNI)
#define TRVK_ISA_VNNI ((uint32_t)TRV_ISA_VNNI)
#define TRVK_ISA_BF16 ((uint32_t)TRV_ISA_BF16)
#define TRVK_ISA_DOTPROD ((uint32_t)TRV_ISA_DOTPROD)
#define TRVK_ISA_I8MM ((uint32_t)TRV_ISA_I8MM)
#define TRVK_ISA_ARMBF16 ((uint32_t)TRV_ISA_ARMBF16)
#define TRVK_ISA_RVV ((uint32_t)TRV_ISA_RVV)
#define TRVK_ISA_DSP ((uint32_t)TRV_ISA_DSP)
#define TRVK_ISA_MVE ((uint32_t)TRV_ISA_MVE)

/* Does the compiler target a Cortex-M? */
#if defined(__ARM_ARCH_PROFILE) && __ARM_ARCH_PROFILE == 'M'
#define TRVK_M 1
#else
#define TRVK_M 0
#endif
/* And one that has them? dsp: 16-bit pairs (SMLAD); mve: Helium, integers
 * at least. */
#if TRVK_M && defined(__ARM_FEATURE_DSP)
#define TRVK_M_DSP 1
#else
#define TRVK_M_DSP 0
#endif
#if TRVK_M && defined(__ARM_FEATURE_MVE)
#define TRVK_M_MVE 1
#else
#define TRVK_M_MVE 0
#endif
#define TRVK_ISA_M (TRVK_M ? TRVK_ISA_REF : 0x8000u) /* of rows for every Cortex-M */
#if TRVK_M_MVE && (__ARM_FEATURE_MVE & 2)            /* and its floats */
#define TRVK_M_MVE_FLOAT 1
#else
#define TRVK_M_MVE_FLOAT 0
#endif

/* Outputs that averages and poolings compute at once: less of a small stack. */
#if defined(__ARM_ARCH_PROFILE) && __ARM_ARCH_PROFILE == 'M'
#define TRVK_POOL_LANES 16
#else
#define TRVK_POOL_LANES 64
#endif

/* ---- helpers
 * -----------------------------------------------------------------------------------------------------
 */
static inline trv_dim trvk_count(const trv_tensor* t) {
  trv_dim n = 1;
  for (uint32_t i = 0; i < t->rank; i++) n *= t->dim[i];
  return n;
}
/* Dense row-major (dims of size 1 may have any stride). */
static inline int trvk_dense(const trv_tensor* t) {
  trv_dim step = 1;
  for (uint32_t i = t->rank; i-- > 0;) {
    if (t->dim[i] != 1 && t->stride[i] != step) return 0;
    step *= t->dim[i];
  }
  return 1;
}
static inline int trvk_same_shape(const trv_tensor* a, const trv_tensor* b) {
  if (a->rank != b->rank) return 0;
  for (uint32_t i = 0; i < a->rank; i++)
    if (a->dim[i] != b->dim[i]) return 0;
  return 1;
}
/* Part i of n cut into `parts` nearly equal runs: [*begin, *end). */
static inline void trvk_split(trv_dim n, uint32_t parts, uint32_t i, trv_dim* begin, trv_dim* end) {
  const trv_dim q = n / (trv_dim)parts, r = n % (trv_dim)parts, k = (trv_dim)i;
  *begin = q * k + (k < r ? k : r);
  *end = *begin + q + (k < r ? 1 : 0);
}
static inline float trvk_f16_to_f32(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exp = (h >> 10) & 31u, man = h & 1023u;
  union {
    uint32_t u;
    float f;
  } v;
  if (exp == 0) {
    v.f = (float)man * 5.9604644775390625e-8f; /* 2^-24: exact */
    v.u |= sign;
  } else {
    v.u = sign | (exp == 31 ? 0x7F800000u : (exp + 112u) << 23) | man << 13;
  }
  return v.f;
}
/* Round to nearest, ties to even. */
static inline uint16_t trvk_f32_to_f16(float f) {
  union {
    float f;
    uint32_t u;
  } v = {f};
  const uint32_t sign = (v.u >> 16) & 0x8000u, a = v.u & 0x7FFFFFFFu;
  if (a > 0x7F800000u) return (uint16_t)(sign | 0x7E00u | ((a >> 13) & 0x1FFu));
  if (a >= 0x477FF000u) return (uint16_t)(sign | 0x7C00u);
  if (a < 0x38800000u) { /* subnormal half: add 0.5 so that the value's bits land, rounded by the
                            FPU, in the mantissa */
    union {
      uint32_t u;
      float f;
    } s = {a};
    s.f += 0.5f;
    return (uint16_t)(sign | (s.u - 0x3F000000u));
  }
  return (uint16_t)(sign | ((a + 0xC8000FFFu + ((a >> 13) & 1u)) >> 13));
}
static inline float trvk_bf16_to_f32(uint16_t h) {
  union {
    uint32_t u;
    float f;
  } v = {(uint32_t)h << 16};
  return v.f;
}
static inline uint16_t trvk_f32_to_bf16(float f) {
  union {
    float f;
    uint32_t u;
  } v = {f};
  if ((v.u & 0x7FFFFFFFu) > 0x7F800000u) return (uint16_t)((v.u >> 16) | 0x40u);
  return (uint16_t)((v.u + 0x7FFFu + ((v.u >> 16) & 1u)) >> 16);
}

/* ---- packing (hal/cpu/pack.c), called by the exporter through libtrivet
 * ------------------------------------------- */

/* The packed form of a weight for op with attrs: bytes needed, 0 when the op takes the weight as it
 * is. shape: the unpacked weight's (matmul: [K, N]; conv: [out, in/groups, k..]; transposed conv:
 * [in, out/groups, k..]). */
TRV_API size_t trvk_pack_bytes(uint32_t op, const void* attrs, uint32_t dtype, uint32_t rank,
                               const int64_t* shape);
/* Writes it. src strides in elements; dst has trvk_pack_bytes, 64-byte aligned. */
TRV_API void trvk_pack(uint32_t op, const void* attrs, uint32_t dtype, uint32_t rank,
                       const int64_t* shape, const int64_t* strides, const void* src, void* dst);

/* Bytes of scratch of an rnn: x[T, n, in], hidden size, proj: size of the projection or 0. With G =
 * gates
 * * hidden (gates: lstm 4, gru 3, else 1), R = proj or hidden, r16: rounded up to 16, it is
 *   64 + 4 * (packed ? 0 : r16(G) * (in + R) + (proj ? r16(proj) * hidden : 0))
 *      + n * 4 * ((8 + (gru ? 1 : 0)) * r16(G) + r16(R) + 2 * r16(hidden))
 * and for float64 64 + n * 8 * (2 * G + R + 2 * hidden): affine in n, none of T. */
TRV_API size_t trvk_rnn_tmp_bytes(const void* attrs, uint32_t dtype, int64_t n, int64_t in,
                                  int64_t hidden, int64_t proj);

/* Bytes of scratch of a qrnn: x[T, n, in], hidden size. It is n * hidden, hidden rounded up to 8:
 * affine in n, none of T. */
TRV_API size_t trvk_qrnn_tmp_bytes(const void* attrs, int64_t n, int64_t in, int64_t hidden);

/* Bytes of scratch of a conv whose weight is packed for Winograd's algorithm (attrs.packed 2 or 4),
 * 0 for other convs. tiles: n * ceil(h / m) * ceil(w / m) of the output, m = attrs.packed; more
 * than 72 need no more. Less scratch, but not less than for one tile, lets fewer threads take part.
 */
TRV_API size_t trvk_conv_tmp_bytes(const void* attrs, int64_t cin, int64_t tiles);

/* Runs one command on the calling thread with the kernels of isa ("ref", NULL = best): for tests,
 * benchmarks and the exporter's constant folding. args: inputs, outputs, scratch. Errors:
 * UNSUPPORTED, ARGUMENT (check or fault; diag). */
TRV_API trv_status trvk_run(uint32_t op, const char* isa, const trv_tensor* args, uint32_t n_in,
                            uint32_t n_out, uint32_t n_tmp, const void* attrs,
                            const trvf_map_instr* code, uint32_t code_count, trv_dim* dims,
                            const trvf_dim* dim_table, uint32_t dim_count, uint32_t tiles,
                            trv_diag* diag);
#endif
