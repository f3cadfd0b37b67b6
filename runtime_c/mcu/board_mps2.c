/* board_mps2.c - Arm's MPS2 and MPS3 boards, and QEMU's models of them: UART 0 of the CMSDK,
 * SysTick.
 *
 * QEMU, started with -icount shift=0, lets an instruction take one nanosecond, while the board's
 * clock has the rate of the real one: instructions in a tick are measured by a loop of known
 * length.
 */
#include "cortex_m.h"

#ifndef BOARD_UART
#error "BOARD_UART: address of the CMSDK UART"
#endif
#ifndef BOARD_HZ
#define BOARD_HZ 25000000u
#endif

typedef struct uart {
  uint32_t data, state, control, interrupt, divisor;
} uart;
#define UART ((volatile uart*)BOARD_UART)
#define UART_FULL 1u /* state: what is sent has not left yet */
#define UART_READY 2u

static uint32_t per_tick256; /* instructions in a tick, times 256; 0 on a real board */

#define CALIBRATION 1000000u /* turns of three instructions */
static void loop(uint32_t turns) {
  __asm__ volatile(
      ".syntax unified\n\t.balign 4\n1:\tadds %0, %0, #0\n\tsubs %0, %0, #1\n\tbne 1b" /* three in
                                                                                          each turn
                                                                                        */
      : "+l"(turns)
      :
      : "cc");
}

#if defined(BOARD_EMULATED)
static void calibrate(void) {
  const uint64_t begin = port_systick();
  loop(CALIBRATION);
  const uint64_t once = port_systick() - begin;
  per_tick256 = once ? (uint32_t)((uint64_t)CALIBRATION * 3u * 256u / once) : 0;
}
#endif

void port_start(void) {
  UART->divisor = BOARD_HZ / 115200u;
  UART->control = 3; /* send and receive */
  port_systick_start();
#if defined(BOARD_EMULATED)
  calibrate();
#else
  (void)loop;
#endif
}

int port_get(void) {
  while (!(UART->state & UART_READY)) {
  }
  return (int)(UART->data & 255u);
}

void port_put(uint8_t byte) {
  while (UART->state & UART_FULL) {
  }
  UART->data = byte;
}

uint64_t port_ticks(void) {
  const uint64_t t = port_systick();
  return per_tick256 ? t * per_tick256 >> 8 : t;
}

uint32_t port_rate(void) { return per_tick256 ? 0 : BOARD_HZ; }
const char* port_unit(void) { return per_tick256 ? "instructions" : "cycles"; }

void port_exit(int status) {
#if defined(BOARD_EMULATED)
  /* semihosting's SYS_EXIT_EXTENDED: the reason (the program ended), and its status */
  const uint32_t block[2] = {0x20026u, (uint32_t)status};
  register uint32_t call __asm__("r0") = 0x20u;
  register const uint32_t* what __asm__("r1") = block;
  __asm__ volatile("bkpt 0xAB" ::"r"(call), "r"(what) : "memory");
#else
  (void)status;
#endif
  for (;;) {
  }
}
