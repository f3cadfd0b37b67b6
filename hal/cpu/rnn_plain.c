/* rnn_plain.c - recurrent nets in float64, one row of the batch after another. */
#include "rnn.h"

static double dot(const trv_tensor* w, trv_dim row, const double* a, trv_dim a_step, trv_dim k) {
  const double* b = (const double*)(const void*)w->data + row * w->stride[0];
  double sum = 0.0;
  for (trv_dim i = 0; i < k; i++) sum += a[i * a_step] * b[i * w->stride[1]];
  return sum;
}
static double at(const trv_tensor* t, trv_dim i) {
  return t ? ((const double*)(const void*)t->data)[i * t->stride[0]] : 0.0;
}
static double sigmoid(double x) { return 1.0 / (1.0 + exp(-x)); }

static void step(const trvk_rnn* p, uint32_t kind, const double* gx, const double* gh, double* h,
                 double* c, double* raw) {
  const trv_dim n = p->hidden;
  for (trv_dim i = 0; i < n; i++) {
    if (kind == TRV_RNN_KIND_LSTM) {
      c[i] = sigmoid(gx[n + i] + gh[n + i]) * c[i] +
             sigmoid(gx[i] + gh[i]) * tanh(gx[2 * n + i] + gh[2 * n + i]);
      raw[i] = sigmoid(gx[3 * n + i] + gh[3 * n + i]) * tanh(c[i]);
    } else if (kind == TRV_RNN_KIND_GRU) {
      const double r = sigmoid(gx[i] + gh[i]), z = sigmoid(gx[n + i] + gh[n + i]);
      const double v = tanh(gx[2 * n + i] + r * gh[2 * n + i]);
      raw[i] = v + z * (h[i] - v);
    } else {
      const double v = gx[i] + gh[i];
      raw[i] = kind == TRV_RNN_KIND_TANH ? tanh(v) : v < 0.0 ? 0.0 : v;
    }
  }
  for (trv_dim i = 0; i < p->out; i++) h[i] = p->w_proj ? dot(p->w_proj, i, raw, 1, n) : raw[i];
}

void trvk_rnn_plain(const trvk_call* call, const trvk_rnn* p, trv_dim begin, trv_dim end,
                    double* scratch) {
  const trvf_rnn_attrs* a = call->attrs;
  double *gx = scratch, *gh = gx + p->gates, *h = gh + p->gates, *c = h + p->out,
         *raw = c + p->hidden;
  for (trv_dim n = begin; n < end; n++) {
    for (trv_dim i = 0; i < p->out; i++)
      h[i] = p->h0 ? ((const double*)(const void*)
                          p->h0->data)[n * p->h0->stride[0] + i * p->h0->stride[1]]
                   : 0.0;
    for (trv_dim i = 0; i < p->hidden; i++)
      c[i] = p->c0 ? ((const double*)(const void*)
                          p->c0->data)[n * p->c0->stride[0] + i * p->c0->stride[1]]
                   : 0.0;
    for (trv_dim k = 0; k < p->t; k++) {
      const trv_dim t = a->reverse ? p->t - 1 - k : k;
      const double* x =
          (const double*)(const void*)p->x->data + t * p->x->stride[0] + n * p->x->stride[1];
      for (trv_dim i = 0; i < p->gates; i++) {
        gx[i] = dot(p->w_ih, i, x, p->x->stride[2], p->in) + at(p->b_ih, i);
        gh[i] = dot(p->w_hh, i, h, 1, p->out) + at(p->b_hh, i);
      }
      step(p, a->kind, gx, gh, h, c, raw);
      double* y = (double*)(void*)p->y->data + t * p->y->stride[0] + n * p->y->stride[1];
      for (trv_dim i = 0; i < p->out; i++) y[i * p->y->stride[2]] = h[i];
    }
    for (trv_dim i = 0; i < p->out; i++)
      ((double*)(void*)p->h->data)[n * p->h->stride[0] + i * p->h->stride[1]] = h[i];
    for (trv_dim i = 0; p->c && i < p->hidden; i++)
      ((double*)(void*)p->c->data)[n * p->c->stride[0] + i * p->c->stride[1]] = c[i];
  }
}
