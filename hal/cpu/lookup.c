/* lookup.c - any function of one 8-bit value: a table of 256 results. */
#include "blocks.h"

const char* trvk_lookup_check(const trvk_call* call, int64_t* expected, int64_t* got) {
  const trv_tensor *x = call->in, *table = call->in + 1, *y = call->out;
  if (x->dtype != TRV_DTYPE_I8 && x->dtype != TRV_DTYPE_U8)
    return trvk_fail(TRVK_SAY("lookup: the input must be i8 or u8"), TRV_DTYPE_I8, x->dtype,
                     expected, got);
  if (table->dtype != y->dtype)
    return trvk_fail(TRVK_SAY("lookup: dtypes of table and output differ"), table->dtype, y->dtype,
                     expected, got);
  if (trv_dtype_size(y->dtype) > 4)
    return trvk_fail(TRVK_SAY("lookup: dtype without a kernel"), TRV_DTYPE_F32, y->dtype, expected,
                     got);
  if (table->rank != 1 || table->dim[0] != 256 || table->stride[0] != 1)
    return trvk_fail(TRVK_SAY("lookup: the table must be one dense row of 256"), 256,
                     (int64_t)trvk_count(table), expected, got);
  if (!trvk_same_shape(x, y))
    return trvk_fail(TRVK_SAY("lookup: shapes differ"), (int64_t)trvk_count(x),
                     (int64_t)trvk_count(y), expected, got);
  return NULL;
}

uint32_t trvk_lookup_tiles(const trvk_call* call, uint32_t workers) {
  const trv_dim n = trvk_count(call->out);
  return trvk_tiles(n, n / 1024, workers);
}

/* Eight at a time, all read before the first is written. */
#define LOOK(T, X)                                                                    \
  {                                                                                   \
    const X* s = x;                                                                   \
    trv_dim i = 0;                                                                    \
    for (; i + 8 <= n; i += 8) {                                                      \
      const T r0 = t[s[i]], r1 = t[s[i + 1]], r2 = t[s[i + 2]], r3 = t[s[i + 3]];     \
      const T r4 = t[s[i + 4]], r5 = t[s[i + 5]], r6 = t[s[i + 6]], r7 = t[s[i + 7]]; \
      d[i] = r0, d[i + 1] = r1, d[i + 2] = r2, d[i + 3] = r3;                         \
      d[i + 4] = r4, d[i + 5] = r5, d[i + 6] = r6, d[i + 7] = r7;                     \
    }                                                                                 \
    for (; i < n; i++) d[i] = t[s[i]];                                                \
  }
#define ROW(T)                     \
  {                                \
    const T* t = table;            \
    T* d = y;                      \
    if (x_dtype == TRV_DTYPE_I8) { \
      t += 128;                    \
      LOOK(T, int8_t)              \
    } else {                       \
      LOOK(T, uint8_t)             \
    }                              \
  }
void trvk_lookup_row(void* y, const void* x, uint32_t x_dtype, const void* table, uint32_t size,
                     trv_dim n) {
  if (size == 1)
    ROW(uint8_t)
  else if (size == 2)
    ROW(uint16_t)
  else
    ROW(uint32_t)
}

void trvk_lookup__ref(const trvk_call* call, uint32_t tile) {
  const trv_tensor* table = &call->in[1];
  trvk_buffer x, y;
  trvk_blocks b;
  for (trvk_blocks_begin(&b, call, 1, tile); trvk_blocks_next(&b); trvk_blocks_write(&b, &y))
    trvk_lookup_row(trvk_blocks_target(&b, &y), trvk_blocks_read(&b, 1, &x), call->in[0].dtype,
                    table->data, b.size[0], b.n);
}
