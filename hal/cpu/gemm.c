/* gemm.c - a block of rows times a strip of columns, pass by pass along K. */
#include "gemm.h"

#if (defined(__clang__) || __GNUC__ >= 12) && (defined(__SSE__) || defined(__aarch64__))
typedef float four __attribute__((vector_size(16)));
typedef float four_any __attribute__((vector_size(16), aligned(4), may_alias));
static inline four load4(const float* p) { return *(const four_any*)(const void*)p; }
static inline void store4(float* p, four v) { *(four_any*)(void*)p = v; }
#define MIX __builtin_shufflevector
#endif

/* dst[i][0 .. 4) = element i of four rows, step apart. */
static void transpose4(float* dst, const float* r0, trv_dim step, trv_dim k) {
  const float *r1 = r0 + step, *r2 = r1 + step, *r3 = r2 + step;
  trv_dim i = 0;
#ifdef MIX
  for (; i + 4 <= k; i += 4, dst += 4 * TRVK_PANEL) {
    const four a = load4(r0 + i), b = load4(r1 + i), c = load4(r2 + i), d = load4(r3 + i);
    const four ab = MIX(a, b, 0, 4, 1, 5), cd = MIX(c, d, 0, 4, 1, 5);
    const four e = MIX(a, b, 2, 6, 3, 7), f = MIX(c, d, 2, 6, 3, 7);
    store4(dst, MIX(ab, cd, 0, 1, 4, 5));
    store4(dst + TRVK_PANEL, MIX(ab, cd, 2, 3, 6, 7));
    store4(dst + 2 * TRVK_PANEL, MIX(e, f, 0, 1, 4, 5));
    store4(dst + 3 * TRVK_PANEL, MIX(e, f, 2, 3, 6, 7));
  }
#endif
  for (; i < k; i++, dst += TRVK_PANEL) {
    dst[0] = r0[i];
    dst[1] = r1[i];
    dst[2] = r2[i];
    dst[3] = r3[i];
  }
}

void trvk_pack_panels(float* dst, const uint8_t* src, uint32_t dtype, trv_dim k_stride,
                      trv_dim n_stride, trv_dim k, trv_dim n, trv_dim panels) {
  for (trv_dim p = 0; p < panels; p++, dst += k * TRVK_PANEL) {
    const trv_dim c0 = p * TRVK_PANEL, left = n - c0, cols = left < TRVK_PANEL ? left : TRVK_PANEL;
    if (cols < TRVK_PANEL) memset(dst, 0, (size_t)k * TRVK_PANEL * sizeof *dst);
    if (k_stride == 1 && n_stride != 1 &&
        dtype == TRV_DTYPE_F32) { /* transposes, four rows of B at once */
      const float* from = (const float*)(const void*)src + c0 * n_stride;
      trv_dim c = 0;
      for (; c + 4 <= cols; c += 4) transpose4(dst + c, from + c * n_stride, n_stride, k);
      for (; c < cols; c++)
        for (trv_dim i = 0; i < k; i++) dst[i * TRVK_PANEL + c] = from[c * n_stride + i];
    } else if (k_stride == 1 && n_stride != 1) {
      float row[64];
      for (trv_dim c = 0; c < cols; c++)
        for (trv_dim k0 = 0; k0 < k; k0 += 64) {
          const trv_dim run = k - k0 < 64 ? k - k0 : 64;
          trvk_row_load(row, trvk_at(src, dtype, (c0 + c) * n_stride + k0), dtype, 1, run);
          for (trv_dim i = 0; i < run; i++) dst[(k0 + i) * TRVK_PANEL + c] = row[i];
        }
    } else if (cols > 0) {
      for (trv_dim i = 0; i < k; i++)
        trvk_row_load(dst + i * TRVK_PANEL, trvk_at(src, dtype, c0 * n_stride + i * k_stride),
                      dtype, n_stride, cols);
    }
  }
}

void trvk_block_run(const trvk_block* k, trv_dim col, trv_dim n, trv_dim b_off) {
  const trvk_epi* e = k->epi;
  const int np = n > TRVK_PANEL ? 2 : 1;
  const trv_dim width = (trv_dim)np * TRVK_PANEL;
  const int heavy = trvk_epi_heavy(e), whole = n == width;
  /* In the tile: the residual, none or clamp, and the store; else on sums in acc. */
  const int rowwise = e->post || (!whole && e->res), direct = !rowwise && !heavy && whole;
  float *c[TRVK_MR_MAX], *out = (float*)(void*)e->out;
  const float *add[TRVK_MR_MAX], *res = (const float*)(const void*)e->res;
  trvk_tile t;
  t.b = k->b;
  t.b_off = b_off;
  t.bias = k->bias;
  t.taps = k->taps;
  t.kc = k->kc;
  t.ak = k->ak;
  t.bk = k->bk;
  t.bp = k->bp;
  t.row_step = k->mr;
  t.accumulate = !k->first ? 1 : res && !rowwise ? TRVK_ADD : 0;
  t.c = c;
  t.add = add;
  t.add_off = col;
  t.lo = k->last && !rowwise ? trvk_epi_lo(e) : -INFINITY;
  t.hi = k->last && !rowwise ? trvk_epi_hi(e) : INFINITY;
  t.rows = k->rows;
  for (trv_dim m = 0; m < k->count; m += k->mr, t.rows += k->taps * k->mr) {
    const trv_dim mr = k->count - m < k->mr ? k->count - m : k->mr;
    if (t.accumulate == TRVK_ADD)
      for (trv_dim i = 0; i < mr; i++) add[i] = res + k->row[m + i].res;
    if (direct) {
      for (trv_dim i = 0; i < mr; i++) c[i] = out + k->row[m + i].out;
      t.c_off = col;
    } else {
      for (trv_dim i = 0; i < mr; i++) c[i] = k->acc + (m + i) * TRVK_STRIP;
      t.c_off = 0;
    }
    if (mr == 1 && t.taps == 1)
      k->g->stream(&t, np);
    else
      k->g->tile[np - 1][mr - 1](&t);
    if (direct || !k->last) continue;
    if (rowwise) {
      for (trv_dim i = 0; i < mr; i++) trvk_epi_row(e, &k->row[m + i], col, c[i], n);
      continue;
    }
    if (heavy && width == TRVK_STRIP) /* rows of acc lie side by side */
      e->g->act(c[0], mr * TRVK_STRIP, e->act, e->lo, e->hi);
    for (trv_dim i = 0; i < mr; i++) {
      if (heavy && width != TRVK_STRIP) e->g->act(c[i], n, e->act, e->lo, e->hi);
      trvk_floats_copy(out + k->row[m + i].out + col * e->out_col, c[i], n);
    }
  }
}

int trvk_packed_ok(const trv_tensor* t, size_t need) {
  return t->dtype == TRV_DTYPE_F32 && t->rank == 1 && t->dim[0] >= 0 &&
         (t->stride[0] == 1 || t->dim[0] <= 1) && (size_t)t->dim[0] >= need / sizeof(float);
}

const char* trvk_out_check(const trv_tensor* t, int64_t* expected, int64_t* got) {
  const uint64_t most = PTRDIFF_MAX / 8; /* elements, of up to 8 bytes */
  uint64_t count = 1, extent = 1;
  for (uint32_t i = 0; i < t->rank; i++)
    if (t->dim[i] == 0) return NULL;
  for (uint32_t i = 0; i < t->rank; i++) {
    const uint64_t d = (uint64_t)t->dim[i],
                   step = (uint64_t)(t->stride[i] < 0 ? -t->stride[i] : t->stride[i]);
    if (d > 1 && (step == 0 || count > most / d || d - 1 > (most - extent) / step))
      return trvk_fail(TRVK_SAY("the output's axis overlaps itself or overflows"), 1, t->stride[i],
                       expected, got);
    count *= d;
    extent += (d - 1) * step;
  }
  if (count > extent)
    return trvk_fail(TRVK_SAY("the output's elements overlap"), (int64_t)count, (int64_t)extent,
                     expected, got);
  return NULL;
}
