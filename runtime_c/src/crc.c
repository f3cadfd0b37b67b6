/* crc.c - CRC-32C (Castagnoli), with the processor's own instruction where there is one. */
#include "private.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#include <nmmintrin.h>
#if defined(__clang__) && \
    __clang_major__ >= 14 /* a feature of its own, which -mcpu can take away */
#define HARDWARE __attribute__((target("sse4.2,crc32")))
#else
#define HARDWARE __attribute__((target("sse4.2")))
#endif

static int has_hardware(void) {
  unsigned a, b, c = 0, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_SSE4_2);
}

HARDWARE static inline uint32_t add_word(uint32_t crc, uint64_t v) {
  return (uint32_t)_mm_crc32_u64(crc, v);
}
HARDWARE static inline uint32_t add_byte(uint32_t crc, uint8_t v) { return _mm_crc32_u8(crc, v); }
#elif defined(__aarch64__) && (defined(__ARM_FEATURE_CRC32) || defined(__linux__))
#define HARDWARE
#if defined(__ARM_FEATURE_CRC32)
static int has_hardware(void) { return 1; }
#else
#include <sys/auxv.h>
static int has_hardware(void) { return getauxval(AT_HWCAP) >> 7 & 1; } /* HWCAP_CRC32 */
#endif

/* in assembler, since the compiler may be told of machines without */
static inline uint32_t add_word(uint32_t crc, uint64_t v) {
  __asm__(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(crc) : "r"(v));
  return crc;
}
static inline uint32_t add_byte(uint32_t crc, uint8_t v) {
  __asm__(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(crc) : "r"((uint32_t)v));
  return crc;
}
#endif

#if defined(HARDWARE)
HARDWARE static inline uint64_t word_at(const uint8_t* p) {
  uint64_t v;
  memcpy(&v, p, 8);
  return v;
}

/* The instruction takes three cycles and can begin anew in each: three stretches at once, put
 * together by what LANE and 2 * LANE bytes of zeros behind one do to its CRC: times x^(8 LANE). */
#define LANE 32768u
#define X_LANE 0xE2EA32DCu
#define X_2LANE 0xFE7740E6u

HARDWARE static uint32_t crc_hardware(uint32_t crc, const uint8_t* p, size_t size) {
  for (; size >= 3 * LANE; p += 3 * LANE, size -= 3 * LANE) {
    uint32_t b = 0, c = 0;
    for (uint32_t i = 0; i < LANE; i += 8) {
      crc = add_word(crc, word_at(p + i));
      b = add_word(b, word_at(p + LANE + i));
      c = add_word(c, word_at(p + 2 * LANE + i));
    }
    crc = trvi_crc_multiply(crc, X_2LANE) ^ trvi_crc_multiply(b, X_LANE) ^ c;
  }
  for (; size >= 8; p += 8, size -= 8) crc = add_word(crc, word_at(p));
  for (; size; size--) crc = add_byte(crc, *p++);
  return crc;
}
#endif

/* A nibble at a time: 64 bytes of table instead of 1 KB, since flash is what small machines lack.
 */
static uint32_t crc_portable(uint32_t crc, const uint8_t* p, size_t size) {
  static const uint32_t table[16] = {0x00000000, 0x105EC76F, 0x20BD8EDE, 0x30E349B1,
                                     0x417B1DBC, 0x5125DAD3, 0x61C69362, 0x7198540D,
                                     0x82F63B78, 0x92A8FC17, 0xA24BB5A6, 0xB21572C9,
                                     0xC38D26C4, 0xD3D3E1AB, 0xE330A81A, 0xF36E6F75};
  for (; size; size--) {
    crc ^= *p++;
    crc = table[crc & 15] ^ (crc >> 4);
    crc = table[crc & 15] ^ (crc >> 4);
  }
  return crc;
}

uint32_t trvi_crc32c(uint32_t crc, const void* data, size_t size) {
#if defined(HARDWARE)
  if (has_hardware()) return ~crc_hardware(~crc, data, size);
#endif
  return ~crc_portable(~crc, data, size);
}
