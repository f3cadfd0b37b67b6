/* mcu_matmul.c - matrix products of stored i8 with weights by rows (mcu.h). */
/* clang-format off: its macros rename what the others declare */
#include "variant.h"
/* clang-format on */
#include "mcu.h"

#ifndef TRVK_VARIANT
/* Inputs of two rows with 16 bits a number; rows beyond one gain from it. */
static uint64_t scratch(uint64_t rows, uint64_t k) { return rows < 2 ? 0 : (k + 3) / 4 * 4 * 4; }

size_t trvk_mcu_matmul_tmp_bytes(int64_t rows, int64_t k) {
  return k < 0 || k > INT32_MAX / 8 ? 0 : (size_t)scratch(rows > 1 ? 2 : 1, (uint64_t)k);
}

const char* trvk_mcu_matmul_check(const trvk_call* call, int64_t* expected, int64_t* got) {
  const trvf_qmatmul_attrs* a = call->attrs;
  const trv_tensor *x = &call->in[0], *b = &call->in[1], *y = &call->out[0];
  const trv_dim most = PTRDIFF_MAX / 64;
  const int real = y->dtype == TRV_DTYPE_F32;
  if (x->dtype != TRV_DTYPE_I8 || !(y->dtype == TRV_DTYPE_I8 || (real && a->act == TRV_ACT_NONE)) ||
      x->rank < 1 || x->rank != y->rank || a->bits != 8 || a->b_zero != 0 || a->dynamic != 0 ||
      a->group != 0 || trvk_opt(call, 4))
    return trvk_fail(TRVK_SAY("qmatmul: weights by rows need i8 and a right side of 8 bits without "
                              "a zero point"),
                     8, a->bits, expected, got);
  const char* what = trvk_out_check(y, expected, got); /* first: what follows multiplies its dims */
  if (what) return what;
  const uint32_t last = x->rank - 1u;
  trv_dim rows = 1;
  for (uint32_t i = 0; i < last; i++) {
    if (x->dim[i] != y->dim[i])
      return trvk_fail(TRVK_SAY("qmatmul: rows differ"), x->dim[i], y->dim[i], expected, got);
    rows *= y->dim[i];
  }
  const trv_dim k = x->dim[last], n = y->dim[last];
  if (k < 1 || k > most || n > most / (k + 4) || (x->stride[last] != 1 && k > 1) ||
      (real && y->stride[last] != 1 && n > 1))
    return trvk_fail(TRVK_SAY("qmatmul: weights by rows: sizes, or a row whose numbers lie apart"),
                     1, x->stride[last], expected, got);
  const trv_dim bytes = n * ((k + 3) / 4 * 4);
  if ((b->dtype != TRV_DTYPE_I8 && b->dtype != TRV_DTYPE_U8) || b->rank != 1 ||
      b->dim[0] != bytes || (b->stride[0] != 1 && bytes > 1))
    return trvk_fail(TRVK_SAY("qmatmul: size of the weight by rows"), bytes,
                     b->rank ? b->dim[0] : 1, expected, got);
  const uint64_t need = real ? 0 : scratch((uint64_t)rows, (uint64_t)k);
  if (!trvk_mcu_scratch_ok(call, need))
    return trvk_fail(TRVK_SAY("qmatmul: the scratch is too small"), (int64_t)need,
                     call->n_tmp ? call->tmp[0].dim[0] : 0, expected, got);
  return trvk_mcu_check_out(call, n, a->a_zero, a->y_zero, a->lo, a->hi, expected, got);
}
#endif

/* Stored results, or real ones: f32(sum) * scale. */
TRVK_ALWAYS void rows(const trvk_call* call, int real) {
  const trvf_qmatmul_attrs* a = call->attrs;
  const trv_tensor *x = &call->in[0], *y = &call->out[0];
  const uint32_t last = x->rank - 1u;
  const trv_dim all = trvk_count(y);
  if (all == 0) return;
  trvk_mcu_rows r = {.w = (const int8_t*)call->in[1].data,
                     .k = x->dim[last],
                     .k4 = (x->dim[last] + 3) / 4 * 4,
                     .n = y->dim[last],
                     .y_step = y->stride[last]};
  if (real) {
    r.out.bias = (const int32_t*)(const void*)call->in[3].data;
  } else {
    trvk_mcu_make_out(call, a->y_zero, a->lo, a->hi, &r.out);
#if TRVK_PAIRS
    if (call->n_tmp > 0) r.expanded = (int16_t*)(void*)call->tmp[0].data;
#endif
  }
  const trv_dim block = real ? 1 : TRVK_MCU_BLOCK;
  const int8_t* from[TRVK_MCU_BLOCK];
  int8_t* to[TRVK_MCU_BLOCK];
  trv_dim index = 0;
  for (trv_dim left = all / r.n, count; left > 0; left -= count) {
    count = left < block ? left : block;
    for (trv_dim i = 0; i < count; i++, index++) {
      from[i] = (const int8_t*)x->data + trvk_offset(last, y->dim, x->stride, index);
      to[i] = (int8_t*)y->data +
              trvk_offset(last, y->dim, y->stride, index) * (real ? (trv_dim)sizeof(float) : 1);
#if TRVK_PAIRS
      if (count == 2) TRVK_KERNEL(mcu_expand)(&r, from[i], (int)i);
#endif
    }
    if (real) r.sums = to[0];
    TRVK_KERNEL(mcu_product)(&r, from, to, count);
    if (real) { /* in place */
      const float* scale = (const float*)(const void*)call->in[2].data;
      for (trv_dim i = 0; i < r.n; i++) {
        int32_t sum;
        memcpy(&sum, to[0] + 4 * i, sizeof sum);
        const float f = (float)sum * scale[i];
        memcpy(to[0] + 4 * i, &f, sizeof f);
      }
    }
  }
}

/* Functions of their own, so that firmware without real numbers needs no library for them. */
void TRVK_KERNEL(qmatmul_rows)(const trvk_call* call, uint32_t tile) {
  if (tile == 0) rows(call, 0); /* one tile: the scratch is shared */
}
void TRVK_KERNEL(qmatmul_rows_real)(const trvk_call* call, uint32_t tile) {
  if (tile == 0) rows(call, 1);
}
