/* mcu_geometry.h - a convolution's sizes as its kernels on microcontrollers walk them. */
#ifndef TRVK_MCU_GEOMETRY_H
#define TRVK_MCU_GEOMETRY_H

#include "mcu.h"

/* A convolution as three spatial axes; missing ones come first with size 1. */
typedef struct geometry {
  trv_dim n, cin, cout, groups, cg, og, taps, k, k4;
  trv_dim in[3], out[3], kernel[3], stride[3], pad[3], dilation[3];
  trv_dim xs[5], ys[5]; /* strides of x and y as n, c, d, h, w */
} geometry;

TRVK_ALWAYS int depthwise(const geometry* g) { return g->groups > 1 && g->cg == 1; }

static inline void make_axes(const trvk_call* call, geometry* g) {
  const trvf_qconv_attrs* a = call->attrs;
  const trv_tensor *x = &call->in[0], *y = &call->out[0];
  memset(g, 0, sizeof *g);
  g->n = x->dim[0];
  g->cin = x->dim[1];
  g->cout = y->dim[1];
  g->groups = (trv_dim)a->groups;
  g->cg = g->cin / g->groups;
  g->og = g->cout / g->groups;
  g->taps = 1;
  for (int i = 0; i < 2; i++) {
    g->xs[i] = x->stride[i];
    g->ys[i] = y->stride[i];
  }
  for (int i = 0; i < 3; i++) {
    const int j = i - (3 - a->nd);
    g->in[i] = g->out[i] = g->kernel[i] = g->stride[i] = g->dilation[i] = 1;
    if (j < 0) continue;
    g->in[i] = x->dim[2 + j];
    g->out[i] = y->dim[2 + j];
    g->kernel[i] = a->kernel[j];
    g->stride[i] = a->stride[j];
    g->pad[i] = a->pad[j];
    g->dilation[i] = a->dilation[j];
    g->xs[2 + i] = x->stride[2 + j];
    g->ys[2 + i] = y->stride[2 + j];
    g->taps *= g->kernel[i];
  }
  g->k = g->taps * g->cg;
  g->k4 = (g->k + 3) / 4 * 4;
}

TRVK_ALWAYS int inside(trv_dim at, trv_dim size) { return at >= 0 && at < size; }
#endif
