/* port.h - what a deployed program needs of its board: bytes to and from a host, and a clock.
 *
 * One file implements it: board_mps2.c, board_virt.c, board_host.c, or yours. Nothing here is part
 * of trivet's API; the runtime itself needs no port.
 */
#ifndef TRIVET_PORT_H
#define TRIVET_PORT_H

#include <stddef.h>
#include <stdint.h>

#define PORT_END (-1)

/* Makes the serial line and the clock ready. Called once, first. */
void port_start(void);
/* The next byte from the host, 0..255; waits for it. PORT_END: there will be none. */
int port_get(void);
/* Sends one byte; waits until there is room. */
void port_put(uint8_t byte);
/* A clock that goes on from port_start: cycles of the processor where it can count them, else
 * whatever port_rate tells. */
uint64_t port_ticks(void);
/* Ticks in a second; 0: not known. */
uint32_t port_rate(void);
/* What a tick is: "cycles", "ns". In an emulator that counts instructions: "instructions". */
const char* port_unit(void);
/* The most bytes of stack in use since the start, 0 where that is not known. */
size_t port_stack(void);
/* Ends the program where there is something to go back to (an emulator, a system); else stands
 * still. */
void port_exit(int status);

#endif
