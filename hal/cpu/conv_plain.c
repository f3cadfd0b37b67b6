/* conv_plain.c - convolution by definition, along rows of outputs: float64, and depthwise weights
 * in any layout and dtype. */
#include "conv.h"

#define COLS 64

/* One row of one output channel in double; the float version goes through trvk_epi_row. */
static void finish64(const trvk_call* call, const trvk_conv_geo* g, trv_dim o, trv_dim at_y,
                     trv_dim step, trv_dim at_r, trv_dim r_step, const double* sum, trv_dim n) {
  const trvf_conv_attrs* a = call->attrs;
  const trv_tensor* res = trvk_opt(call, 3);
  double* y = (double*)(void*)call->out[0].data + at_y + o * g->ys[1];
  const double* r = res ? (const double*)(const void*)res->data + at_r + o * g->rs[1] : NULL;
  for (trv_dim i = 0; i < n; i++)
    y[i * step] =
        trvk_act64(sum[i] + (r ? r[i * r_step] : 0.0), a->act, (double)a->lo, (double)a->hi);
}

/* Where one row of outputs lies: phase, image, output row; and what it sums. */
typedef struct place {
  trvk_phase p;
  trv_dim n, o, j[2];
} place;

#define SUMS(name, T, LOAD, OWN)                                                                 \
  static void name(const trvk_call* call, const trvk_conv_geo* g, const place* pl, trv_dim from, \
                   trv_dim n, T* sum) {                                                          \
    const trvk_phase* p = &pl->p;                                                                \
    const uint8_t *x = call->in[0].data, *w = call->in[1].data;                                  \
    const uint32_t dtype = call->in[0].dtype;                                                    \
    const trv_dim group = pl->o / g->og, c0 = group * g->cg;                                     \
    const int per_group =                                                                        \
        g->transposed && !((const trvf_conv_attrs*)call->attrs)                                  \
                              ->packed; /* a packed weight is [taps][channels out] */            \
    const trv_dim wo = per_group ? pl->o % g->og * g->ws[0] + c0 * g->ws[1] : pl->o * g->ws[0];  \
    for (trv_dim kd = 0; kd < p->taps[0]; kd++)                                                  \
      for (trv_dim kh = 0; kh < p->taps[1]; kh++) {                                              \
        const trv_dim d = pl->j[0] * p->move[0] + p->base[0] + kd * p->reach[0];                 \
        const trv_dim h = pl->j[1] * p->move[1] + p->base[1] + kh * p->reach[1];                 \
        if (d < 0 || d >= g->in[0] || h < 0 || h >= g->in[1]) continue;                          \
        for (trv_dim kw = 0; kw < p->taps[2]; kw++) {                                            \
          /* outputs j of [from, from + n) with 0 <= j * move + b < in */                        \
          const trv_dim b = p->base[2] + kw * p->reach[2], m = p->move[2];                       \
          trv_dim lo = b < 0 ? (-b + m - 1) / m : 0,                                             \
                  hi = b >= g->in[2] ? 0 : (g->in[2] - 1 - b) / m + 1;                           \
          if (lo < from) lo = from;                                                              \
          if (hi > from + n) hi = from + n;                                                      \
          if (lo >= hi) continue;                                                                \
          const trv_dim tw = wo + (p->t0[0] + kd * p->t_step[0]) * g->ws[2] +                    \
                             (p->t0[1] + kh * p->t_step[1]) * g->ws[3] +                         \
                             (p->t0[2] + kw * p->t_step[2]) * g->ws[4];                          \
          const trv_dim tx =                                                                     \
              pl->n * g->xs[0] + d * g->xs[2] + h * g->xs[3] + (lo * m + b) * g->xs[4];          \
          for (trv_dim c = 0; c < g->cg; c++) {                                                  \
            T copy[COLS], f;                                                                     \
            const uint8_t* from_x = trvk_at(x, dtype, tx + (c0 + c) * g->xs[1]);                 \
            const T* v = copy;                                                                   \
            if (dtype == OWN)                                                                    \
              f = ((const T*)(const void*)w)[tw + c * g->ws[1]];                                 \
            else                                                                                 \
              LOAD(&f, trvk_at(w, dtype, tw + c * g->ws[1]), dtype, 1, 1);                       \
            if (dtype == OWN && m * g->xs[4] == 1)                                               \
              v = (const T*)(const void*)from_x;                                                 \
            else                                                                                 \
              LOAD(copy, from_x, dtype, m * g->xs[4], hi - lo);                                  \
            T* to = sum + (lo - from);                                                           \
            for (trv_dim i = 0; i < hi - lo; i++) to[i] += f * v[i];                             \
          }                                                                                      \
        }                                                                                        \
      }                                                                                          \
  }
SUMS(sums32, float, trvk_row_load, TRV_DTYPE_F32)
SUMS(sums64, double, trvk_row_load64, TRV_DTYPE_F64)

void trvk_conv_plain_run(const trvk_call* call, const trvk_conv_geo* g, uint32_t tile,
                         const trvk_gemm* gemm) {
  const trv_tensor* bias = trvk_opt(call, 2);
  const uint32_t dtype = call->in[0].dtype;
  const int wide = dtype == TRV_DTYPE_F64;
  trvk_epi epi;
  trvk_conv_epi(call, g, &epi, gemm);
  uint8_t* const out = epi.out;
  const uint8_t* const res = epi.res;
  const trv_dim phases = trvk_phase_count(g);
  place pl;
  trvk_phase_make(g, 0, &pl.p);
  const trv_dim d0 = pl.p.count[0], h0 = pl.p.count[1]; /* phase 0 has most rows */
  trv_dim begin, end;
  trvk_split(phases * g->n * g->cout * d0 * h0, call->tiles, tile, &begin, &end);
  for (trv_dim u = begin; u < end; u++) {
    pl.j[1] = u % h0;
    pl.j[0] = u / h0 % d0;
    pl.o = u / h0 / d0 % g->cout;
    pl.n = u / h0 / d0 / g->cout % g->n;
    const trvk_phase* p = &pl.p;
    trvk_phase_make(g, u / h0 / d0 / g->cout / g->n, &pl.p);
    if (pl.j[0] >= p->count[0] || pl.j[1] >= p->count[1]) continue;
    const trv_dim d = p->first[0] + pl.j[0] * p->step[0], h = p->first[1] + pl.j[1] * p->step[1];
    for (trv_dim from = 0; from < p->count[2]; from += COLS) {
      const trv_dim n = p->count[2] - from < COLS ? p->count[2] - from : COLS,
                    w = p->first[2] + from * p->step[2];
      const trv_dim at_y = pl.n * g->ys[0] + d * g->ys[2] + h * g->ys[3] + w * g->ys[4];
      const trv_dim at_r = pl.n * g->rs[0] + d * g->rs[2] + h * g->rs[3] + w * g->rs[4];
      if (wide) {
        double sum[COLS], b = 0.0;
        if (bias) b = ((const double*)(const void*)bias->data)[pl.o * g->bias_step];
        for (trv_dim i = 0; i < n; i++) sum[i] = b;
        sums64(call, g, &pl, from, n, sum);
        finish64(call, g, pl.o, at_y, p->step[2] * g->ys[4], at_r, p->step[2] * g->rs[4], sum, n);
      } else {
        float sum[COLS], b = 0.0f;
        const trvk_row r = {at_y, at_r, 0};
        if (bias) trvk_row_load(&b, trvk_at(bias->data, dtype, pl.o * g->bias_step), dtype, 1, 1);
        for (trv_dim i = 0; i < n; i++) sum[i] = b;
        sums32(call, g, &pl, from, n, sum);
        epi.out = trvk_at(out, dtype, pl.o * g->ys[1]);
        epi.res = res ? trvk_at(res, dtype, pl.o * g->rs[1]) : NULL;
        epi.out_col = p->step[2] * g->ys[4];
        epi.res_col = p->step[2] * g->rs[4];
        trvk_epi_row(&epi, &r, 0, sum, n);
      }
    }
  }
}
