/* test_open.c - opens files and prints the diag of each; fails if one does not open. Also runs on a
 * big-endian machine. */
#include "check.h"

int main(int argc, char** argv) {
  char line[300];
  trv_program p;
  int failed = 0;
  for (int i = 1; i < argc; i++) {
    const loaded file = load("", argv[i]);
    const trv_status st = trv_program_open(&p, span_of(&file), 0);
    trv_diag_print(&p.diag, line, sizeof(line));
    printf("%d %s\n", (int)st, st ? line : "ok");
    failed += st != TRV_OK;
    free(file.memory);
  }
  return failed != 0;
}
