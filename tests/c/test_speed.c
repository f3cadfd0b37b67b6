/* test_speed.c - prints JSON: what open, verification, deferred checking and dispatch cost.
 * Argument: a folder. */
#include <time.h>

#include "check.h"

static double now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

/* The least of several, in nanoseconds: what the machine's other work adds is not ours. */
#define BEST(out, repeats, statement)               \
  do {                                              \
    out = 1e18;                                     \
    for (int best_ = 0; best_ < repeats; best_++) { \
      const double start_ = now_ns();               \
      statement;                                    \
      const double took_ = now_ns() - start_;       \
      if (took_ < out) out = took_;                 \
    }                                               \
  } while (0)

int main(int argc, char** argv) {
  const char* folder = argc > 1 ? argv[1] : ".";
  int failures = 0;
  double open_ns, run_ns, empty_ns, host_ns = 0, check_ns = 0;
  trv_program p;
  trv_diag d;
  rig r;
  const loaded file = load(folder, "long.trv");
  BEST(open_ns, 20, CHECK(trv_program_open(&p, span_of(&file), 0) == TRV_OK));

  CHECK(rig_open(&r, folder, "nothing.trv", 0, 0) == TRV_OK && rig_init(&r, &d) == TRV_OK);
  BEST(run_ns, 100, for (int i = 0; i < 1000; i++) CHECK(trv_session_run(r.session) == TRV_OK));
  rig_close(&r);

  trv_host* host;
  trv_context* context;
  char path[4096];
  snprintf(path, sizeof(path), "%s/cpu_empty.trv", folder);
  CHECK(trv_host_open(path, NULL, 0, 1, &host, &d) == TRV_OK);
  if (trv_context_open(host, 0, &context, &d) == TRV_OK) {
    BEST(empty_ns, 50, CHECK(trv_context_run(context, 0) == TRV_OK));
    trv_context_close(context);
  } else {
    char line[300];
    trv_diag_print(&d, line, sizeof(line));
    fprintf(stderr, "%s\n", line);
    empty_ns = 1e18;
    failures++;
  }
  trv_host_close(host);

  snprintf(path, sizeof(path), "%s/huge.trv", folder);
  FILE* f = fopen(path, "rb");
  if (f) {
    fclose(f);
    BEST(host_ns, 5, {
      CHECK(trv_host_open(path, NULL, TRV_OPEN_DEFER_CRC, 2, &host, &d) == TRV_OK);
      trv_host_close(host);
    });
    CHECK(trv_host_open(path, NULL, TRV_OPEN_DEFER_CRC, 1, &host, &d) == TRV_OK);
    trv_program copy = *trv_host_program(host);
    BEST(check_ns, 3, CHECK(trv_program_check(&copy) == TRV_OK));
    trv_host_close(host);
  }
  printf(
      "{\"verify_1000_steps_ms\": %.4f, \"run_ns\": %.1f, \"empty_command_ns\": %.1f, "
      "\"open_100mb_ms\": %.3f, "
      "\"check_100mb_ms\": %.3f}\n",
      open_ns * 1e-6, run_ns / 1000, empty_ns / 10000, host_ns * 1e-6, check_ns * 1e-6);
  free(file.memory);
  return failures != 0;
}
