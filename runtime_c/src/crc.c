/* crc.c - CRC-32C (Castagnoli), with the processor's own instruction where there is one. */
#include "private.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#include <nmmintrin.h>

__attribute__((target("sse4.2"))) static uint32_t crc_hardware(uint32_t crc, const uint8_t* p,
                                                               size_t size) {
  uint64_t c = crc;
  for (; size >= 8; p += 8, size -= 8) {
    uint64_t v;
    memcpy(&v, p, 8);
    c = _mm_crc32_u64(c, v);
  }
  crc = (uint32_t)c;
  for (; size; size--) crc = _mm_crc32_u8(crc, *p++);
  return crc;
}

static int has_hardware(void) {
  unsigned a, b, c = 0, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_SSE4_2);
}
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>

static uint32_t crc_hardware(uint32_t crc, const uint8_t* p, size_t size) {
  for (; size >= 4; p += 4, size -= 4) {
    uint32_t v;
    memcpy(&v, p, 4);
    crc = __crc32cw(crc, v);
  }
  for (; size; size--) crc = __crc32cb(crc, *p++);
  return crc;
}
static int has_hardware(void) { return 1; }
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
#if (defined(__x86_64__) && defined(__GNUC__)) || defined(__ARM_FEATURE_CRC32)
  if (has_hardware()) return ~crc_hardware(~crc, data, size);
#endif
  return ~crc_portable(~crc, data, size);
}
