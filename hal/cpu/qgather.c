/* qgather.c - rows of a table in 8 or 4 bits as real numbers: embeddings. */
#include "convert.h"
#include "qgemm.h"

/* Rows of the table. A packed one tells only panels: there is a scale for each of its rows. */
static trv_dim rows_of(const trvk_call* call) {
  const trvf_qgather_attrs* a = call->attrs;
  const trv_tensor* t = &call->in[a->packed ? 2 : 0];
  return t->rank == 0 ? 0 : t->dim[a->packed ? t->rank - 1u : 0];
}

const char* trvk_qgather_check(const trvk_call* call, int64_t* expected, int64_t* got) {
  const trvf_qgather_attrs* a = call->attrs;
  const trv_tensor *table = &call->in[0], *index = &call->in[1], *scale = &call->in[2];
  const trv_tensor *offset = trvk_opt(call, 3), *y = &call->out[0];
  const int four = a->bits == 4;
  if (a->bits != 8 && a->bits != 4)
    return trvk_fail(TRVK_SAY("qgather: tables have 8 bits or 4"), 8, a->bits, expected, got);
  if (!a->packed && table->dtype != (four ? TRV_DTYPE_U8 : TRV_DTYPE_I8))
    return trvk_fail(TRVK_SAY("qgather: dtype of the table"), four ? TRV_DTYPE_U8 : TRV_DTYPE_I8,
                     table->dtype, expected, got);
  if (a->zero < (four ? 0 : INT8_MIN) || a->zero > (four ? 15 : INT8_MAX))
    return trvk_fail(TRVK_SAY("qgather: the zero point is not one of the table's numbers"), 0,
                     a->zero, expected, got);
  if (!trvk_q_group_ok(a->group))
    return trvk_fail(TRVK_SAY("qgather: a group is not a multiple of 8"), 8, a->group, expected,
                     got);
  if (index->dtype < TRV_DTYPE_U8 || index->dtype > TRV_DTYPE_I64 || y->dtype != TRV_DTYPE_F32)
    return trvk_fail(TRVK_SAY("qgather: dtype of the index or the output"), TRV_DTYPE_I64,
                     index->dtype, expected, got);
  const char* what = trvk_out_check(y, expected, got);
  if (what) return what;
  if (y->rank != index->rank + 1u)
    return trvk_fail(TRVK_SAY("qgather: rank of the output"), index->rank + 1, y->rank, expected,
                     got);
  for (uint32_t i = 0; i < index->rank; i++)
    if (index->dim[i] != y->dim[i])
      return trvk_fail(TRVK_SAY("qgather: size of the output"), index->dim[i], y->dim[i], expected,
                       got);
  const trv_dim d = y->dim[y->rank - 1], group = (trv_dim)a->group;
  const trv_dim rows = rows_of(call);
  if (d > TRVK_Q_MOST || rows > TRVK_Q_MOST) return TRVK_SAY("qgather: sizes overflow");
  if (a->packed) {
    const size_t bytes = trvk_q_packed_bytes(d, rows, a->bits);
    if (!trvk_q_packed_ok(table, bytes))
      return trvk_fail(TRVK_SAY("qgather: size of the packed table"), (int64_t)bytes,
                       table->rank ? table->dim[0] : 1, expected, got);
  } else if (table->rank != 2 || table->dim[1] != d) {
    return trvk_fail(TRVK_SAY("qgather: shape of the table"), d,
                     table->rank == 2 ? table->dim[1] : table->rank, expected, got);
  }
  if (!trvk_q_scale_ok(scale, d, rows, group) ||
      (offset && !trvk_q_scale_ok(offset, d, rows, group)))
    return trvk_fail(TRVK_SAY("qgather: dtype or shape of the scale or offset"), rows,
                     scale->rank ? scale->dim[scale->rank - 1u] : 1, expected, got);
  if (rows == 0 && trvk_count(y) > 0)
    return trvk_fail(TRVK_SAY("qgather: an index into nothing"), 1, 0, expected, got);
  return NULL;
}

uint32_t trvk_qgather_tiles(const trvk_call* call, uint32_t workers) {
  const trv_dim n = trvk_count(call->out);
  return trvk_tiles(n, n / 256, workers);
}

/* Numbers k .. k+n of one row, less zero. */
static void numbers(const trvk_call* call, trv_dim row, trv_dim k, trv_dim n, int32_t* v) {
  const trvf_qgather_attrs* a = call->attrs;
  const trv_tensor* t = &call->in[0];
  if (!a->packed) {
    const uint8_t* s = t->data + row * t->stride[0] + k * t->stride[1];
    for (trv_dim i = 0; i < n; i++, s += t->stride[1])
      v[i] = (a->bits == 4 ? *s & 15 : (int8_t)*s) - a->zero;
    return;
  }
  const trv_dim panel = trvk_q_panel_bytes(call->out[0].dim[call->out[0].rank - 1], a->bits);
  const uint8_t* s = t->data + row / TRVK_PANEL * panel + row % TRVK_PANEL * 4;
  for (trv_dim i = 0; i < n; i++, k++)
    v[i] = (a->bits == 4 ? s[k / 8 * 64 + k % 4] >> (k & 4) & 15 : (int8_t)s[k / 4 * 64 + k % 4]) -
           a->zero;
}

static float at(const trv_tensor* t, trv_dim row, trv_dim g) {
  float f[TRVK_PANEL];
  trvk_q_scales(t, g, row, 1, f);
  return f[0];
}

void trvk_qgather__ref(const trvk_call* call, uint32_t tile) {
  const trvf_qgather_attrs* a = call->attrs;
  const trv_tensor *index = &call->in[1], *scale = &call->in[2], *y = &call->out[0];
  const trv_tensor* offset = trvk_opt(call, 3);
  const uint32_t rank = index->rank;
  const trv_dim d = y->dim[rank], step = y->stride[rank], group = a->group ? (trv_dim)a->group : d;
  const int64_t rows = (int64_t)rows_of(call);
  trv_dim begin, end;
  int bad = 0;
  if (trvk_count(y) == 0) return;
  trvk_split(trvk_count(index), call->tiles, tile, &begin, &end);
  for (trv_dim u = begin; u < end; u++) {
    int64_t row;
    bad |=
        trvk_load_indices(&row, index, trvk_offset(rank, index->dim, index->stride, u), 1, 1, rows);
    float* to = (float*)(void*)y->data + trvk_offset(rank, index->dim, y->stride, u);
    for (trv_dim g = 0, k = 0; k < d; g++) { /* runs that share a scale */
      const trv_dim last = d - k < group ? d : k + group;
      const float f = at(scale, (trv_dim)row, g);
      const float b = offset ? at(offset, (trv_dim)row, g) : 0.0f;
      while (k < last) {
        int32_t v[32];
        const trv_dim n = last - k < 32 ? last - k : 32;
        numbers(call, (trv_dim)row, k, n, v);
        for (trv_dim i = 0; i < n; i++) {
          const float x = (float)v[i] * f;
          to[(k + i) * step] = offset ? x + b : x;
        }
        k += n;
      }
    }
  }
  if (bad) trvk_raise(call, TRVK_FAULT_INDEX);
}
