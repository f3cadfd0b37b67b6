/* board_virt.c - RISC-V without a system: start, and QEMU's board "virt" (a 16550 UART, counters of
 * the processor, the test device that ends the emulation). */
#include <string.h>

#include "port.h"

extern uint32_t port_data_from[], port_data[], port_data_end[], port_bss[], port_bss_end[];
extern uint32_t port_stack_low[], port_stack_top[];
int main(void);
void port_begin(void);

/* An instruction on control registers, which newer assemblers want to be told of. */
#define CSR(text) ".option push\n\t.option arch, +zicsr\n\t" text "\n\t.option pop"
#define STACK_PAINT 0xA5A5A5A5u
#define UART ((volatile uint8_t*)0x10000000u)
#define UART_STATE 5
#define UART_READY 1u
#define UART_EMPTY 32u
#define FINISHER (*(volatile uint32_t*)0x100000u)

/* The first instruction of the image. */
__asm__(
    ".section .vectors, \"ax\"\n"
    ".globl port_reset\n"
    "port_reset:\n"
    ".option push\n.option norelax\n"
    "  la gp, __global_pointer$\n"
    ".option pop\n"
    "  la sp, port_stack_top\n"
    "  j port_begin\n"
    ".text\n");

void port_begin(void) {
#if defined(__riscv_flen)
  __asm__ volatile(CSR("csrs mstatus, %0")::"r"(0x2000)); /* the FPU is on */
#endif
  uint32_t here;
  for (volatile uint32_t* p = port_stack_low; p + 32 < &here; p++) *p = STACK_PAINT;
  if (port_data != port_data_from)
    memcpy(port_data, port_data_from, (size_t)((uint8_t*)port_data_end - (uint8_t*)port_data));
  memset(port_bss, 0, (size_t)((uint8_t*)port_bss_end - (uint8_t*)port_bss));
  port_exit(main());
}

size_t port_stack(void) {
  const uint32_t* p = port_stack_low;
  while (p < port_stack_top && *p == STACK_PAINT) p++;
  return (size_t)((const uint8_t*)port_stack_top - (const uint8_t*)p);
}

void port_start(void) {}

int port_get(void) {
  while (!(UART[UART_STATE] & UART_READY)) {
  }
  return UART[0];
}

void port_put(uint8_t byte) {
  while (!(UART[UART_STATE] & UART_EMPTY)) {
  }
  UART[0] = byte;
}

uint64_t port_ticks(void) {
#if __riscv_xlen == 32
  uint32_t high, low, again;
  do {
    __asm__ volatile(CSR("csrr %0, minstreth") : "=r"(high));
    __asm__ volatile(CSR("csrr %0, minstret") : "=r"(low));
    __asm__ volatile(CSR("csrr %0, minstreth") : "=r"(again));
  } while (high != again);
  return (uint64_t)high << 32 | low;
#else
  uint64_t n;
  __asm__ volatile(CSR("csrr %0, minstret") : "=r"(n));
  return n;
#endif
}

uint32_t port_rate(void) { return 0; }
const char* port_unit(void) { return "instructions"; }

void port_exit(int status) {
  FINISHER = status ? (uint32_t)status << 16 | 0x3333u : 0x5555u;
  for (;;) {
  }
}
