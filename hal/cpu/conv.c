/* conv.c - convolution: checks, geometry, choice of the path. */
#include "conv.h"

/* Strides as n, c, d, h, w. */
static void strides5(const trv_tensor* t, trv_dim* out) {
  memset(out, 0, 5 * sizeof *out);
  if (t == NULL) return;
  out[0] = t->stride[0];
  out[1] = t->stride[1];
  for (uint32_t i = 2; i < t->rank; i++) out[5 - t->rank + i] = t->stride[i];
}

static void sizes3(const trv_tensor* t, trv_dim* out) {
  out[0] = out[1] = out[2] = 1;
  for (uint32_t i = 2; i < t->rank; i++) out[3 - t->rank + i] = t->dim[i];
}

/* A pointwise convolution over pixels that lie evenly: one long axis. */
static void join_pixels(trvk_conv_geo* g) {
  for (int i = 0; i < 3; i++)
    if (g->kernel[i] != 1 || g->stride[i] != 1 || g->pad[i] != 0 || g->in[i] < g->out[i]) return;
  for (int i = 1; i >= -1; i--) { /* h, d, n join w */
    trv_dim* const size = i < 0 ? &g->n : &g->out[i];
    const int s = i < 0 ? 0 : 2 + i;
    if (*size == 1) continue;
    if (g->out[2] == 1) {
      g->xs[4] = g->xs[s];
      g->ys[4] = g->ys[s];
      g->rs[4] = g->rs[s];
    } else if (g->xs[s] != g->out[2] * g->xs[4] || g->ys[s] != g->out[2] * g->ys[4] ||
               g->rs[s] != g->out[2] * g->rs[4]) {
      return;
    }
    g->out[2] *= *size;
    g->in[2] = g->out[2];
    *size = 1;
  }
}

/* A last axis of size 1 that does nothing goes first: rows then run along an axis with work. */
static void drop_trivial(trvk_conv_geo* g) {
  for (int n = 0; n < 2 && g->in[2] == 1 && g->out[2] == 1 && g->kernel[2] == 1 && g->pad[2] == 0;
       n++) {
    trv_dim* const sizes[6] = {g->in, g->out, g->kernel, g->stride, g->pad, g->dilation};
    trv_dim* const steps[4] = {g->xs + 2, g->ys + 2, g->rs + 2, g->ws + 2};
    for (int i = 0; i < 10; i++) {
      trv_dim* v = i < 6 ? sizes[i] : steps[i - 6];
      const trv_dim last = v[2];
      v[2] = v[1];
      v[1] = v[0];
      v[0] = last;
    }
  }
}

const char* trvk_conv_geo_make(const trvk_call* call, trvk_conv_geo* g, int64_t* expected,
                               int64_t* got) {
  const trvf_conv_attrs* a = call->attrs;
  const trv_tensor *x = &call->in[0], *w = &call->in[1], *y = &call->out[0];
  const trv_tensor *bias = trvk_opt(call, 2), *res = trvk_opt(call, 3);
  const trv_dim most = PTRDIFF_MAX / 4;
  *expected = *got = 0;
  if (a->nd < 1 || a->nd > 3 || x->rank != a->nd + 2u || y->rank != a->nd + 2u)
    return trvk_fail(TRVK_SAY("conv: rank does not fit"), a->nd + 2, x->rank, expected, got);
  memset(g, 0, sizeof *g);
  g->n = x->dim[0];
  g->cin = x->dim[1];
  g->cout = y->dim[1];
  g->groups = (trv_dim)a->groups;
  g->transposed = a->transposed != 0;
  if (y->dim[0] != g->n)
    return trvk_fail(TRVK_SAY("conv: batch sizes differ"), g->n, y->dim[0], expected, got);
  if (g->groups < 1 || g->cin % g->groups != 0 || g->cout % g->groups != 0)
    return trvk_fail(TRVK_SAY("conv: channels are not a multiple of groups"), g->groups, g->cin,
                     expected, got);
  g->cg = g->cin / g->groups;
  g->og = g->cout / g->groups;
  sizes3(x, g->in);
  sizes3(y, g->out);
  g->taps = 1;
  for (int i = 0; i < 3; i++) {
    g->kernel[i] = g->stride[i] = g->dilation[i] = 1;
    const int j = i - (3 - a->nd);
    if (j < 0) continue;
    g->stride[i] = a->stride[j];
    g->dilation[i] = a->dilation[j];
    g->pad[i] = a->pad[j];
    if (!a->packed && w->rank != a->nd + 2u)
      return trvk_fail(TRVK_SAY("conv: rank of the weight"), a->nd + 2, w->rank, expected, got);
    g->kernel[i] = a->packed ? (trv_dim)a->kernel[j] : w->dim[2 + j];
    if (g->kernel[i] < 1 || g->stride[i] < 1 || g->dilation[i] < 1)
      return trvk_fail(TRVK_SAY("conv: kernel, stride and dilation start at 1"), 1, 0, expected,
                       got);
    if (g->out[i] > (most - 65536) / g->stride[i] ||
        g->kernel[i] > (most - 65536) / g->dilation[i] ||
        g->in[i] > (most - 65536) / g->stride[i] || g->taps > most / g->kernel[i])
      return TRVK_SAY("conv: sizes overflow");
    g->taps *= g->kernel[i];
  }
  g->depthwise = trvk_conv_is_depthwise(g->groups, g->cg);
  const int winograd = trvk_packed_winograd(a);
  if (winograd) {
    const char* what = trvk_wino_check(call, g, expected, got);
    if (what) return what;
  } else if (a->packed) {
    const size_t need = trvk_conv_packed_count(w->dtype, g->groups, g->cg, g->og, g->taps);
    if (g->cg < 1 || g->og < 1 || need == 0 || w->dtype == TRV_DTYPE_F64 || w->rank != 1 ||
        w->dim[0] < 0 || (w->stride[0] != 1 && w->dim[0] > 1) || (size_t)w->dim[0] < need)
      return trvk_fail(TRVK_SAY("conv: the packed weight is too small"), (int64_t)need,
                       w->rank ? w->dim[0] : 1, expected, got);
    if (g->depthwise) {
      const trv_dim wide = trvk_round16(g->cout);
      g->ws[0] = 1;
      g->ws[4] = wide;
      g->ws[3] = wide * g->kernel[2];
      g->ws[2] = g->ws[3] * g->kernel[1];
    }
  } else {
    const trv_dim o = g->transposed ? g->og : g->cout, c = g->transposed ? g->cin : g->cg;
    if (w->dim[g->transposed ? 1 : 0] != o || w->dim[g->transposed ? 0 : 1] != c)
      return trvk_fail(TRVK_SAY("conv: channels of the weight do not fit"), o,
                       w->dim[g->transposed ? 1 : 0], expected, got);
    strides5(w, g->ws);
    if (g->transposed) {
      const trv_dim t = g->ws[0];
      g->ws[0] = g->ws[1];
      g->ws[1] = t;
    }
  }
  if (bias && (bias->rank != 1 || bias->dim[0] != g->cout))
    return trvk_fail(TRVK_SAY("conv: size of the bias"), g->cout, bias->rank ? bias->dim[0] : 0,
                     expected, got);
  if (res && !trvk_same_shape(res, y))
    return TRVK_SAY("conv: the residual has another shape than the output");
  strides5(x, g->xs);
  strides5(y, g->ys);
  strides5(res, g->rs);
  g->bias_step = bias ? bias->stride[0] : 0;
  drop_trivial(g);
  if (a->packed && !winograd) {
    const trv_dim r = trvk_conv_merge(g->groups, g->cg, g->og);
    g->groups /= r;
    g->cg *= r;
    g->og *= r;
  }
  if (trvk_count(y) > 0) join_pixels(g);
  return NULL;
}

const char* trvk_conv_check(const trvk_call* call, int64_t* expected, int64_t* got) {
  const trvf_conv_attrs* a = call->attrs;
  const uint32_t dtype = call->in[0].dtype;
  trvk_conv_geo g;
  if (!trvk_dtype_is_float(dtype))
    return trvk_fail(TRVK_SAY("conv: dtype without a kernel"), TRV_DTYPE_F32, dtype, expected, got);
  if (a->act >= TRV_ACT_COUNT)
    return trvk_fail(TRVK_SAY("conv: unknown activation"), TRV_ACT_COUNT, a->act, expected, got);
  for (uint32_t i = 0; i < call->n_in + 1u; i++) {
    const trv_tensor* t = i < call->n_in ? trvk_opt(call, i) : &call->out[0];
    if (t && t->dtype != dtype)
      return trvk_fail(TRVK_SAY("conv: dtypes differ"), dtype, t->dtype, expected, got);
  }
  const char* what = trvk_out_check(&call->out[0], expected, got);
  return what ? what : trvk_conv_geo_make(call, &g, expected, got);
}

/* ---- phases
 * --------------------------------------------------------------------------------------------------------
 */
static trv_dim gcd(trv_dim a, trv_dim b) {
  while (b) {
    const trv_dim t = a % b;
    a = b;
    b = t;
  }
  return a;
}

static trv_dim classes(const trvk_conv_geo* g, int i) {
  if (!g->transposed) return 1;
  return g->stride[i] < g->out[i] ? g->stride[i] : g->out[i];
}

trv_dim trvk_phase_count(const trvk_conv_geo* g) {
  return classes(g, 0) * classes(g, 1) * classes(g, 2);
}

void trvk_phase_make(const trvk_conv_geo* g, trv_dim index, trvk_phase* p) {
  for (int i = 2; i >= 0; i--) {
    const trv_dim n = classes(g, i), s = g->stride[i], dil = g->dilation[i], k = g->kernel[i];
    p->t0[i] = 0;
    if (!g->transposed) {
      p->first[i] = 0;
      p->step[i] = p->t_step[i] = 1;
      p->count[i] = g->out[i];
      p->move[i] = s;
      p->base[i] = -g->pad[i];
      p->reach[i] = dil;
      p->taps[i] = k;
      continue;
    }
    const trv_dim first = index % n, d = gcd(s, dil), from = first + g->pad[i];
    index /= n;
    p->first[i] = first;
    p->step[i] = s;
    p->count[i] = (g->out[i] - first + s - 1) / s;
    p->move[i] = 1;
    p->t_step[i] = s / d;
    p->reach[i] = -(dil / d);
    /* The first tap whose position is a multiple of the stride; past t_step they repeat. */
    trv_dim t = 0;
    while (t < p->t_step[i] && t < k && (from - t * dil) % s != 0) t++;
    p->t0[i] = t;
    p->taps[i] = t < p->t_step[i] && t < k ? (k - t + p->t_step[i] - 1) / p->t_step[i] : 0;
    p->base[i] = p->taps[i] ? (from - t * dil) / s : 0;
  }
}

/* ---- paths
 * ---------------------------------------------------------------------------------------------------------
 */
void trvk_conv_epi(const trvk_call* call, const trvk_conv_geo* g, trvk_epi* e,
                   const trvk_gemm* gemm) {
  const trvf_conv_attrs* a = call->attrs;
  const trv_tensor* res = trvk_opt(call, 3);
  e->g = gemm;
  e->bias2 = NULL;
  e->bias2_col = 0;
  e->res = res ? res->data : NULL;
  e->res_col = g->rs[1];
  e->out = call->out[0].data;
  e->out_col = g->ys[1];
  e->dtype = call->out[0].dtype;
  e->act = a->act;
  e->lo = a->lo;
  e->hi = a->hi;
  e->post = e->dtype != TRV_DTYPE_F32 ||
            (g->cout > 1 && (g->ys[1] != 1 || (res != NULL && g->rs[1] != 1)));
}

typedef enum path { PATH_GEMM, PATH_DEPTHWISE, PATH_PLAIN, PATH_WINOGRAD, PATH_LINE } path;

static path choose(const trvk_call* call, const trvk_conv_geo* g, const trvk_gemm* gemm) {
  (void)gemm;
  const trvf_conv_attrs* a = call->attrs;
  if (TRVK_WINO && trvk_packed_winograd(a)) return PATH_WINOGRAD;
  if (call->in[0].dtype == TRV_DTYPE_F64) return PATH_PLAIN;
#if TRVK_WINO
  if (trvk_conv_line_fits(call, g, gemm)) return PATH_LINE;
#endif
  if (!g->depthwise) return PATH_GEMM;
  return a->packed && g->og == 1 && !g->transposed && g->xs[1] == 1 && g->ys[1] == 1 &&
                 g->kernel[0] * g->kernel[1] <= TRVK_DW_ROWS &&
                 (call->in[0].dtype == TRV_DTYPE_F32 || trvk_conv_dw_halves(g))
             ? PATH_DEPTHWISE
             : PATH_PLAIN;
}

uint32_t trvk_conv_tiles(const trvk_call* call, uint32_t workers) {
  trvk_conv_geo g;
  int64_t e, got;
  if (trvk_count(&call->out[0]) == 0 || trvk_conv_geo_make(call, &g, &e, &got)) return 1;
  const double work = (double)trvk_count(&call->out[0]) * (double)g.cg * (double)g.taps /
                      (g.depthwise ? 4.0 : 16.0);
  const uint32_t tiles = trvk_tiles(work > 1e9 ? (trv_dim)1000000000 : (trv_dim)work,
                                    trvk_count(&call->out[0]) / 16 + 1, workers);
  if (!trvk_packed_winograd(call->attrs)) return tiles;
  const uint32_t slots = trvk_wino_slots(call, &g);
  return tiles < slots ? tiles : slots;
}

void trvk_conv_run(const trvk_call* call, uint32_t tile, const trvk_gemm* gemm,
                   const trvk_gemm* pairs) {
  trvk_conv_geo g;
  int64_t e, got;
  if (trvk_count(&call->out[0]) == 0) return;
  (void)trvk_conv_geo_make(call, &g, &e, &got);
  switch (choose(call, &g, gemm)) {
    case PATH_GEMM:
      trvk_conv_gemm_run(call, &g, tile, gemm, pairs);
      break;
    case PATH_DEPTHWISE:
      trvk_conv_depthwise_run(call, &g, tile, gemm);
      break;
#if TRVK_WINO
    case PATH_WINOGRAD:
      trvk_conv_winograd_run(call, &g, tile, gemm);
      break;
    case PATH_LINE:
      trvk_conv_line_run(call, &g, tile, gemm);
      break;
#endif
    default:
      trvk_conv_plain_run(call, &g, tile, gemm);
      break;
  }
}
