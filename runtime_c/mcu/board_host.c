/* board_host.c - a system with standard input and output: the serial line is these two. */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "port.h"

void port_start(void) {}

int port_get(void) {
  const int c = getchar();
  return c == EOF ? PORT_END : c;
}

void port_put(uint8_t byte) {
  putchar(byte);
  if (byte == '\n') fflush(stdout);
}

uint64_t port_ticks(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

uint32_t port_rate(void) { return 1000000000u; }
const char* port_unit(void) { return "ns"; }
size_t port_stack(void) { return 0; }
void port_exit(int status) { exit(status); }
