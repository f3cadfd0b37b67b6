/* isa.c - instruction sets of this machine. */
#include "ops.h"

uint32_t trvk_isa_mask(const char* name) {
  static const struct {
    const char* name;
    uint32_t mask;
  } levels[] = {{"avx512", TRVK_ISA_REF | TRVK_ISA_AVX2 | TRVK_ISA_AVX512},
                {"avx2", TRVK_ISA_REF | TRVK_ISA_AVX2},
                {"ref", TRVK_ISA_REF}};
  uint32_t have = TRVK_ISA_REF;
#if defined(__x86_64__) && defined(__GNUC__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    have |= TRVK_ISA_AVX2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
      have |= TRVK_ISA_AVX512;
  }
#endif
  for (size_t i = 0; i < sizeof levels / sizeof levels[0]; i++)
    if (name == NULL ? (levels[i].mask & have) == levels[i].mask
                     : strcmp(name, levels[i].name) == 0)
      return (levels[i].mask & have) == levels[i].mask ? levels[i].mask : 0;
  return 0;
}
