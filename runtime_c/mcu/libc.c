/* libc.c - the functions of the C library that the runtime and integer kernels need: an image
 * without real numbers links no other library. Words at a time where both sides are aligned. */
#include <stdint.h>
#include <string.h>

#define WORD(p) (*(uint32_t*)(void*)(p))

void* memcpy(void* restrict to, const void* restrict from, size_t n) {
  uint8_t* d = to;
  const uint8_t* s = from;
  if ((((uintptr_t)d | (uintptr_t)s) & 3) == 0)
    for (; n >= 4; n -= 4, d += 4, s += 4) WORD(d) = *(const uint32_t*)(const void*)s;
  for (; n; n--) *d++ = *s++;
  return to;
}

void* memmove(void* to, const void* from, size_t n) {
  uint8_t* d = to;
  const uint8_t* s = from;
  if ((uintptr_t)d - (uintptr_t)s >= n) return memcpy(to, from, n);
  while (n--) d[n] = s[n];
  return to;
}

void* memset(void* to, int value, size_t n) {
  uint8_t* d = to;
  const uint32_t word = (uint8_t)value * 0x01010101u;
  for (; n && ((uintptr_t)d & 3); n--) *d++ = (uint8_t)value;
  for (; n >= 4; n -= 4, d += 4) WORD(d) = word;
  for (; n; n--) *d++ = (uint8_t)value;
  return to;
}

int memcmp(const void* a, const void* b, size_t n) {
  const uint8_t *x = a, *y = b;
  for (; n; n--, x++, y++)
    if (*x != *y) return *x - *y;
  return 0;
}

int strcmp(const char* a, const char* b) {
  for (; *a && *a == *b; a++, b++) {
  }
  return (uint8_t)*a - (uint8_t)*b;
}

size_t strlen(const char* s) {
  size_t n = 0;
  while (s[n]) n++;
  return n;
}
