/* cortex_m.h - what boards with a Cortex-M share. */
#ifndef TRIVET_CORTEX_M_H
#define TRIVET_CORTEX_M_H

#include "port.h"

/* SysTick, and the turns that it has made: it counts down from 2^24 - 1. */
void port_systick_start(void);
uint64_t port_systick(void);

#endif
