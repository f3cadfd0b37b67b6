/* isa.c - instruction sets of this machine.
 *
 * A level is a set of instruction sets that machines have together. Kernels name the one set that
 * they need (kernels.def); a level allows all of its sets, so that an operator without a kernel of
 * its own falls back.
 */
#include "ops.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#elif (defined(__aarch64__) || defined(__riscv)) && defined(__linux__)
#include <sys/auxv.h>
#endif

#define X86_2 (TRVK_ISA_REF | TRVK_ISA_AVX2)
#define X86_512 (X86_2 | TRVK_ISA_AVX512)
#define ARM_DOT (TRVK_ISA_REF | TRVK_ISA_DOTPROD)
#define ARM_DSP (TRVK_ISA_REF | TRVK_ISA_DSP)

/* Best first. */
static const struct {
  const char* name;
  uint32_t mask;
} levels[] = {{"avx512bf16", X86_512 | TRVK_ISA_VNNI | TRVK_ISA_BF16},
              {"avx512vnni", X86_512 | TRVK_ISA_VNNI},
              {"avx512", X86_512},
              {"avxvnni", X86_2 | TRVK_ISA_AVXVNNI},
              {"avx2", X86_2},
              {"armbf16", ARM_DOT | TRVK_ISA_I8MM | TRVK_ISA_ARMBF16},
              {"i8mm", ARM_DOT | TRVK_ISA_I8MM},
              {"dotprod", ARM_DOT},
              {"rvv", TRVK_ISA_REF | TRVK_ISA_RVV},
              {"mve", ARM_DSP | TRVK_ISA_MVE},
              {"dsp", ARM_DSP},
              {"ref", TRVK_ISA_REF}};
#define LEVELS (sizeof levels / sizeof levels[0])

static uint32_t machine(void) {
  uint32_t have = TRVK_ISA_REF;
#if defined(__x86_64__) && defined(__GNUC__)
  unsigned a, b, c, d;
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    have |= TRVK_ISA_AVX2;
    if (__get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1)) have |= TRVK_ISA_AVXVNNI;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      have |= TRVK_ISA_AVX512;
      if (__builtin_cpu_supports("avx512vnni")) have |= TRVK_ISA_VNNI;
      if (__get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1)) have |= TRVK_ISA_BF16;
    }
  }
#elif defined(__aarch64__) && defined(__linux__)
  const unsigned long caps = getauxval(AT_HWCAP), caps2 = getauxval(AT_HWCAP2);
  if (caps >> 20 & 1) have |= TRVK_ISA_DOTPROD;  /* HWCAP_ASIMDDP */
  if (caps2 >> 13 & 1) have |= TRVK_ISA_I8MM;    /* HWCAP2_I8MM */
  if (caps2 >> 14 & 1) have |= TRVK_ISA_ARMBF16; /* HWCAP2_BF16 */
#elif defined(__aarch64__) && defined(__APPLE__)
  have |= TRVK_ISA_DOTPROD; /* every Apple silicon Mac */
#elif defined(__riscv) && defined(__linux__)
  if (getauxval(AT_HWCAP) >> ('v' - 'a') & 1) have |= TRVK_ISA_RVV;
#endif
  /* Cortex-M tells nothing while running: what the library is compiled for. */
#if TRVK_M_DSP
  have |= TRVK_ISA_DSP;
#endif
#if TRVK_M_MVE
  have |= TRVK_ISA_MVE;
#endif
  return have;
}

uint32_t trvk_isa_mask(const char* name) {
  const uint32_t have = machine();
  for (size_t i = 0; i < LEVELS; i++)
    if (name == NULL ? (levels[i].mask & have) == levels[i].mask
                     : strcmp(name, levels[i].name) == 0)
      return (levels[i].mask & have) == levels[i].mask ? levels[i].mask : 0;
  return 0;
}

const char* trvk_isa_name(uint32_t op, uint32_t index) {
  const uint32_t have = machine(), sets = TRVK_ISA_REF | trvk_op_isas(op);
  uint32_t weaker = 0; /* what the op uses of the level before */
  for (size_t i = LEVELS; i-- > 0;) {
    if ((levels[i].mask & have) != levels[i].mask || (levels[i].mask & sets) == weaker) continue;
    weaker = levels[i].mask & sets;
    if (index-- == 0) return levels[i].name;
  }
  return NULL;
}

const char* trvk_isa_level(uint32_t mask) {
  for (size_t i = 0; i < LEVELS; i++)
    if (levels[i].mask == mask) return levels[i].name;
  return "";
}
