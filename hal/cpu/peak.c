/* peak.c - what this machine can do at most: loops that do nothing but multiply-adds on registers,
 * or reads of one block of memory. The caller takes the time; tools compare kernels with it.
 *
 * Each loop keeps 12 or more sums of its own, so that it waits for no result (4 cycles, 2
 * instructions per cycle on the widest machines). In assembly, so that no compiler folds or spills
 * them.
 */
#include "peak.h"

/* n rounds of `insn` for 12 sums, twice. */
#define EACH(insn) \
  insn(0) insn(1) insn(2) insn(3) insn(4) insn(5) insn(6) insn(7) insn(8) insn(9) insn(10) insn(11)
#define PER_ROUND 24u

typedef struct loop {
  uint32_t what, isa, ops; /* ops: of one instruction, multiplications and additions apart */
  void (*run)(uint64_t n);
} loop;

#if defined(__x86_64__) && defined(__GNUC__)

#define LOOP(insn) EACH(insn) EACH(insn)
#define MULTIPLY(name, isa, clear, insn, reg)                                                  \
  __attribute__((target(isa))) static void name(uint64_t n) {                                  \
    __asm__ volatile(EACH(clear) clear(12)                                                     \
                         clear(13) ".p2align 5\n1:\n\t" LOOP(insn) "dec %0\n\tjnz 1b\n\t"      \
                     : "+r"(n)                                                                 \
                     :                                                                         \
                     : reg "0", reg "1", reg "2", reg "3", reg "4", reg "5", reg "6", reg "7", \
                       reg "8", reg "9", reg "10", reg "11", reg "12", reg "13", "cc");        \
  }
#define CLEAR_X(i) "xorps %%xmm" #i ", %%xmm" #i "\n\t"
#define CLEAR_Y(i) "vpxor %%ymm" #i ", %%ymm" #i ", %%ymm" #i "\n\t"
#define CLEAR_Z(i) "vpxord %%zmm" #i ", %%zmm" #i ", %%zmm" #i "\n\t"
#define MUL_X(i) "addps %%xmm12, %%xmm" #i "\n\tmulps %%xmm13, %%xmm" #i "\n\t"
#define FMA_Y(i) "vfmadd231ps %%ymm12, %%ymm13, %%ymm" #i "\n\t"
#define FMA_Z(i) "vfmadd231ps %%zmm12, %%zmm13, %%zmm" #i "\n\t"
#define DOT_V(i) "%{vex%} vpdpbusd %%ymm12, %%ymm13, %%ymm" #i "\n\t"
#define DOT_Z(i) "vpdpbusd %%zmm12, %%zmm13, %%zmm" #i "\n\t"
#define BF16_Z(i) "vdpbf16ps %%zmm12, %%zmm13, %%zmm" #i "\n\t"
MULTIPLY(fma_sse, "sse2", CLEAR_X, MUL_X, "xmm")
MULTIPLY(fma_avx2, "avx2,fma", CLEAR_Y, FMA_Y, "ymm")
MULTIPLY(fma_avx512, "avx512f", CLEAR_Z, FMA_Z, "zmm")
MULTIPLY(dot_avxvnni, "avx2", CLEAR_Y, DOT_V, "ymm")
MULTIPLY(dot_vnni, "avx512f", CLEAR_Z, DOT_Z, "zmm")
MULTIPLY(dot_bf16, "avx512f", CLEAR_Z, BF16_Z, "zmm")

/* Weakest first. */
static const loop loops[] = {{TRVK_PEAK_FMA, TRVK_ISA_REF, 8, fma_sse},
                             {TRVK_PEAK_FMA, TRVK_ISA_AVX2, 16, fma_avx2},
                             {TRVK_PEAK_FMA, TRVK_ISA_AVX512, 32, fma_avx512},
                             {TRVK_PEAK_INT8, TRVK_ISA_AVXVNNI, 64, dot_avxvnni},
                             {TRVK_PEAK_INT8, TRVK_ISA_VNNI, 128, dot_vnni},
                             {TRVK_PEAK_BF16, TRVK_ISA_BF16, 64, dot_bf16}};

#elif defined(__aarch64__) && defined(__GNUC__)

#if defined(__clang__)
#define TARGET(arch, feature) __attribute__((target(feature)))
#else
#define TARGET(arch, feature) __attribute__((target("arch=" arch "+" feature)))
#endif
#define MULTIPLY(name, target, insn)                                                              \
  target static void name(uint64_t n) {                                                           \
    __asm__ volatile(                                                                             \
        "movi v12.16b, #0\n\tmovi v13.16b, #0\n\t"                                                \
        "1:\n\t" EACH(insn) EACH(insn) "subs %0, %0, #1\n\tb.ne 1b\n\t"                           \
        : "+r"(n)                                                                                 \
        :                                                                                         \
        : "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", \
          "cc");                                                                                  \
  }
#define FMA_N(i) "fmla v" #i ".4s, v12.4s, v13.4s\n\t"
#define SDOT_N(i) "sdot v" #i ".4s, v12.16b, v13.16b\n\t"
#define SMMLA_N(i) "smmla v" #i ".4s, v12.16b, v13.16b\n\t"
#define BFMMLA_N(i) "bfmmla v" #i ".4s, v12.8h, v13.8h\n\t"
MULTIPLY(fma_neon, , FMA_N)
MULTIPLY(dot_neon, TARGET("armv8.2-a", "dotprod"), SDOT_N)
MULTIPLY(i8mm_neon, TARGET("armv8.6-a", "i8mm"), SMMLA_N)
MULTIPLY(bf16_neon, TARGET("armv8.6-a", "bf16"), BFMMLA_N)

static const loop loops[] = {{TRVK_PEAK_FMA, TRVK_ISA_REF, 8, fma_neon},
                             {TRVK_PEAK_INT8, TRVK_ISA_DOTPROD, 32, dot_neon},
                             {TRVK_PEAK_INT8, TRVK_ISA_I8MM, 64, i8mm_neon},
                             {TRVK_PEAK_BF16, TRVK_ISA_ARMBF16, 32, bf16_neon}};

#else
#define NO_LOOPS
#endif

/* ---- reading
 * ---------------------------------------------------------------------------------------------- */
#if defined(__GNUC__)
typedef uint64_t lanes __attribute__((vector_size(64), aligned(8), may_alias));
#define READ(name, isa)                                           \
  isa static uint64_t name(const uint8_t* p, size_t size) {       \
    lanes a = {0}, b = a, c = a, d = a;                           \
    for (size_t i = 0; i + 256 <= size; i += 256) {               \
      a ^= *(const lanes*)(const void*)(p + i);                   \
      b ^= *(const lanes*)(const void*)(p + i + 64);              \
      c ^= *(const lanes*)(const void*)(p + i + 128);             \
      d ^= *(const lanes*)(const void*)(p + i + 192);             \
    }                                                             \
    a ^= b ^ c ^ d;                                               \
    return a[0] ^ a[1] ^ a[2] ^ a[3] ^ a[4] ^ a[5] ^ a[6] ^ a[7]; \
  }
READ(read_ref, )
#if defined(__x86_64__)
READ(read_avx2, __attribute__((target("avx2"))))
READ(read_avx512, __attribute__((target("avx512f"))))
#endif
#else
static uint64_t read_ref(const uint8_t* p, size_t size) {
  uint64_t sum = 0;
  for (size_t i = 0; i < size; i++) sum ^= p[i];
  return sum;
}
#endif

static uint64_t read_once(const uint8_t* p, size_t size, uint32_t isa) {
#if defined(__x86_64__) && defined(__GNUC__)
  if (isa & TRVK_ISA_AVX512) return read_avx512(p, size);
  if (isa & TRVK_ISA_AVX2) return read_avx2(p, size);
#endif
  (void)isa;
  return read_ref(p, size);
}

double trvk_peak(uint32_t what, void* buf, size_t size, uint64_t rounds) {
  const uint32_t isa = trvk_isa_mask(NULL);
  if (what == TRVK_PEAK_READ) {
    uint64_t sum = 0;
    for (uint64_t i = 0; i < rounds; i++) sum ^= read_once(buf, size, isa);
    if (size >= 8) memcpy(buf, &sum, sizeof(sum)); /* so that no read can be left out */
    return (double)(size / 256 * 256) * (double)rounds;
  }
#if !defined(NO_LOOPS)
  for (size_t i = sizeof(loops) / sizeof(loops[0]); i-- > 0;) {
    if (loops[i].what != what || !(loops[i].isa & isa)) continue;
    if (rounds > 0) loops[i].run(rounds);
    return (double)loops[i].ops * PER_ROUND * (double)rounds;
  }
#endif
  return 0;
}
