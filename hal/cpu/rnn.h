/* rnn.h - sizes of one layer, one direction of a recurrent net. */
#ifndef TRVK_RNN_H
#define TRVK_RNN_H

#include "gemm.h"

#define TRVK_RNN_STEPS 8 /* steps whose inputs are multiplied at once */

typedef struct trvk_rnn {
  trv_dim t, n, in, hidden, out,
      gates; /* out: size of y (hidden, or the projection's); gates: rows of the weights */
  const trv_tensor *x, *w_ih, *w_hh, *b_ih, *b_hh, *h0, *c0, *w_proj, *y, *h,
      *c; /* NULL: not there */
  int lstm, gru, packed;
} trvk_rnn;

/* float64 (rnn_plain.c). scratch: as trvk_rnn_tmp_bytes says. */
void trvk_rnn_plain(const trvk_call* call, const trvk_rnn* p, trv_dim begin, trv_dim end,
                    double* scratch);
#endif
