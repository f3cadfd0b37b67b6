/* serve.h - the line protocol of README.md: a host measures and checks a deployed program. */
#ifndef TRIVET_SERVE_H
#define TRIVET_SERVE_H

#include "port.h"
#include "trivet/trivet.h"

/* Answers requests until there are no more; returns the status of the last self-test, 0 for none.
 * st, diag: how opening the program ended; where badly, every request is answered with that.
 * start: ticks that opening took. */
int serve(trv_program* program, trv_session* const* sessions, trv_status st, const trv_diag* diag,
          uint64_t start);

#endif
