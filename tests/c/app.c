/* app.c - an application of the installed library: doubles its argument through a program. */
#include <stdio.h>
#include <trivet/trivet.h>

int main(int argc, char** argv) {
  trv_host* host;
  trv_context* context;
  trv_diag diag;
  float x[4] = {1, 2, 3, 4}, y[4];
  const trv_buf in = {(uint8_t*)x, 0, sizeof(x)}, out = {(uint8_t*)y, 0, sizeof(y)};
  if (argc < 2 || trv_host_open(argv[1], NULL, 0, 1, &host, &diag)) return 1;
  if (trv_context_open(host, 0, &context, &diag)) return 2;
  trv_session* s = trv_context_session(context, 0);
  if (trv_session_bind_input(s, 0, TRV_DTYPE_F32, 1, NULL, in)) return 3;
  if (trv_session_bind_input(s, 1, TRV_DTYPE_F32, 1, NULL, in)) return 4;
  if (trv_session_bind_output(s, 0, out) || trv_context_run(context, 0)) return 5;
  printf("%g %g %g %g\n", (double)y[0], (double)y[1], (double)y[2], (double)y[3]);
  trv_context_close(context);
  trv_host_close(host);
  return 0;
}
