/* attention_plain.c - attention in float64, one query at a time. */
#include "attention.h"

#define KEYS 32
#define COLS 64

typedef struct query {
  const double *q, *k[2], *v[2];
  double* o;
  const uint8_t* mask;
  trv_dim keys;
} query;

/* Weights of keys k0 .. k0+n relative to the running maximum; returns the factor for what was
 * summed before. */
static double weigh(const trvk_attention* p, const query* t, double scale, trv_dim k0, trv_dim n,
                    double* w, double* max, double* sum) {
  double most = *max;
  for (trv_dim j = 0; j < n; j++) {
    const int piece = k0 + j >= p->first;
    const trvk_attention_operand* ko = &p->k[piece];
    const double* k = t->k[piece] + (k0 + j - (piece ? p->first : 0)) * ko->row;
    double s = 0.0;
    for (trv_dim i = 0; i < p->d; i++) s += t->q[i * p->q.col] * k[i * ko->col];
    s *= scale;
    if (t->mask) {
      const uint8_t* m = trvk_at(t->mask, p->mask_dtype, (k0 + j) * p->mask.col);
      double add = 0.0;
      if (p->mask_dtype != TRV_DTYPE_BOOL)
        trvk_row_load64(&add, m, p->mask_dtype, 1, 1);
      else if (*m == 0)
        s = -INFINITY;
      s += add;
    }
    w[j] = s;
    if (s > most) most = s;
  }
  const double base = most == -INFINITY ? 0.0 : most,
               f = *max == -INFINITY ? 0.0 : exp(*max - base);
  *sum *= f;
  for (trv_dim j = 0; j < n; j++) {
    w[j] = exp(w[j] - base);
    *sum += w[j];
  }
  *max = most;
  return f;
}

static void row(const trvk_attention* p, const query* t, double scale) {
  for (trv_dim e0 = 0; e0 < p->e; e0 += COLS) {
    const trv_dim en = p->e - e0 < COLS ? p->e - e0 : COLS;
    double acc[COLS] = {0.0}, w[KEYS], max = -INFINITY, sum = 0.0;
    for (trv_dim k0 = 0; k0 < t->keys; k0 += KEYS) {
      const trv_dim n = t->keys - k0 < KEYS ? t->keys - k0 : KEYS;
      const double f = weigh(p, t, scale, k0, n, w, &max, &sum);
      for (trv_dim i = 0; i < en; i++) acc[i] *= f;
      for (trv_dim j = 0; j < n; j++) {
        const int piece = k0 + j >= p->first;
        const trvk_attention_operand* vo = &p->v[piece];
        const double* v = t->v[piece] + (k0 + j - (piece ? p->first : 0)) * vo->row + e0 * vo->col;
        for (trv_dim i = 0; i < en; i++) acc[i] += w[j] * v[i * vo->col];
      }
    }
    for (trv_dim i = 0; i < en; i++)
      t->o[(e0 + i) * p->o.col] = sum == 0.0 ? (double)p->empty : acc[i] / sum;
  }
}

void trvk_attention_plain(const trvk_call* call, const trvk_attention* p, uint32_t tile) {
  const trvf_attention_attrs* attrs = call->attrs;
  trv_dim rows = p->heads * p->l, begin, end;
  const double usual =
      1.0 / sqrt((double)(p->d > 0 ? p->d : 1)); /* not as rounded to the attribute */
  const double scale = (float)usual == attrs->scale ? usual : (double)attrs->scale;
  for (uint32_t i = 0; i < p->nb; i++) rows *= p->dim[i];
  trvk_split(rows, call->tiles, tile, &begin, &end);
  for (trv_dim u = begin; u < end; u++) {
    const trv_dim l = u % p->l, h = u / p->l % p->heads, batch = u / p->l / p->heads;
    const trv_dim group = h / (p->heads / p->groups);
    query t;
#define AT(o, head_, row_) \
  (trvk_offset(p->nb, p->dim, (o).batch, batch) + (head_) * (o).head + (row_) * (o).row)
    t.q = (const double*)(const void*)p->q.data + AT(p->q, h, l);
    for (int i = 0; i < (p->first < p->s ? 2 : 1); i++) {
      t.k[i] = (const double*)(const void*)p->k[i].data + AT(p->k[i], group, 0);
      t.v[i] = (const double*)(const void*)p->v[i].data + AT(p->v[i], group, 0);
    }
    t.o = (double*)(void*)call->out[0].data + AT(p->o, h, l);
    t.mask = p->mask.data ? trvk_at(p->mask.data, p->mask_dtype, AT(p->mask, h, l)) : NULL;
#undef AT
    t.keys = attrs->causal && l + 1 < p->s ? l + 1 : p->s;
    row(p, &t, scale);
  }
}
