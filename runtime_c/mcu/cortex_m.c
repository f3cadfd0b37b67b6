/* cortex_m.c - start of a Cortex-M image: vector table, memory, FPU and Helium, SysTick, stack. */
#include "cortex_m.h"

#include <string.h>

extern uint32_t port_data_from[], port_data[], port_data_end[], port_bss[], port_bss_end[];
extern uint32_t port_stack_low[], port_stack_top[];
int main(void);

#define STACK_PAINT 0xA5A5A5A5u
#define CPACR (*(volatile uint32_t*)0xE000ED88u) /* access to coprocessors: the FPU and Helium */
#define CCR (*(volatile uint32_t*)0xE000ED14u)   /* bit 19: low-overhead loops keep their cache */
#define SYST_CSR (*(volatile uint32_t*)0xE000E010u)
#define SYST_RVR (*(volatile uint32_t*)0xE000E014u)
#define SYST_CVR (*(volatile uint32_t*)0xE000E018u)
#define ICSR (*(volatile uint32_t*)0xE000ED04u)
#define SYSTICK_PENDING (1u << 26)
#define SYSTICK_MOST 0xFFFFFFu

static volatile uint32_t turns; /* of SysTick */

void port_reset(void) __attribute__((noreturn, used));
static void port_tick(void) { turns++; }
/* A fault ends the program: with status 2 under an emulator. */
static void port_fault(void) { port_exit(2); }

/* The image begins with it: stack, reset, faults, and SysTick, the only interrupt that is on. */
__attribute__((section(".vectors"), used)) static void (*const vectors[16])(void) = {
    (void (*)(void))port_stack_top,
    port_reset,
    port_fault,
    port_fault,
    port_fault,
    port_fault,
    port_fault,
    port_fault,
    NULL,
    NULL,
    NULL,
    port_fault,
    port_fault,
    NULL,
    port_fault,
    port_tick};

void port_reset(void) {
#if defined(__ARM_FP) || defined(__ARM_FEATURE_MVE)
  CPACR |= 0xFu << 20;
  __asm__ volatile("dsb\n\tisb" ::: "memory");
#endif
#if defined(__ARM_FEATURE_MVE)
  CCR |= 1u << 19;
#endif
  uint32_t here;
  for (volatile uint32_t* p = port_stack_low; p + 16 < &here; p++) *p = STACK_PAINT;
  memcpy(port_data, port_data_from, (size_t)((uint8_t*)port_data_end - (uint8_t*)port_data));
  memset(port_bss, 0, (size_t)((uint8_t*)port_bss_end - (uint8_t*)port_bss));
  port_exit(main());
  for (;;) {
  }
}

size_t port_stack(void) {
  const uint32_t* p = port_stack_low;
  while (p < port_stack_top && *p == STACK_PAINT) p++;
  return (size_t)((const uint8_t*)port_stack_top - (const uint8_t*)p);
}

void port_systick_start(void) {
  SYST_RVR = SYSTICK_MOST;
  SYST_CVR = 0;
  SYST_CSR = 7;           /* on, with an interrupt at each turn, by the processor's clock */
  while (SYST_CVR == 0) { /* until the first reload */
  }
}

uint64_t port_systick(void) {
  uint32_t high, low;
  do {
    high = turns;
    low = SYST_CVR;
  } while (high != turns);
  /* a turn whose interrupt has not come yet */
  if ((ICSR & SYSTICK_PENDING) && low > SYSTICK_MOST / 2) high++;
  return (uint64_t)high * (SYSTICK_MOST + 1u) + (SYSTICK_MOST - low);
}
