/* gemm.c - a block of rows times a strip of columns, pass by pass along K. */
#include "gemm.h"

void trvk_pack_panels(float* dst, const uint8_t* src, uint32_t dtype, trv_dim k_stride,
                      trv_dim n_stride, trv_dim k, trv_dim n, trv_dim panels) {
  for (trv_dim p = 0; p < panels; p++, dst += k * TRVK_PANEL) {
    const trv_dim c0 = p * TRVK_PANEL, left = n - c0, cols = left < TRVK_PANEL ? left : TRVK_PANEL;
    if (cols < TRVK_PANEL) memset(dst, 0, (size_t)k * TRVK_PANEL * sizeof *dst);
    if (k_stride == 1 && n_stride != 1 &&
        dtype == TRV_DTYPE_F32) { /* transposes, four rows of B at once */
      const float* from = (const float*)(const void*)src + c0 * n_stride;
      trv_dim c = 0;
      for (; c + 4 <= cols; c += 4) {
        const float *r0 = from + c * n_stride, *r1 = r0 + n_stride, *r2 = r1 + n_stride,
                    *r3 = r2 + n_stride;
        float* to = dst + c;
        for (trv_dim i = 0; i < k; i++, to += TRVK_PANEL) {
          to[0] = r0[i];
          to[1] = r1[i];
          to[2] = r2[i];
          to[3] = r3[i];
        }
      }
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
  const int direct = !e->post && n == width;
  float *c[TRVK_MR_MAX], *out = (float*)(void*)e->out;
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
  t.accumulate = !k->first;
  t.c = c;
  t.lo = k->last ? trvk_epi_lo(e) : -INFINITY;
  t.hi = k->last ? trvk_epi_hi(e) : INFINITY;
  t.rows = k->rows;
  for (trv_dim m = 0; m < k->count; m += k->mr, t.rows += k->taps * k->mr) {
    const trv_dim mr = k->count - m < k->mr ? k->count - m : k->mr;
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
    if (!direct && k->last)
      for (trv_dim i = 0; i < mr; i++) trvk_epi_row(e, &k->row[m + i], col, c[i], n);
  }
}

int trvk_packed_ok(const trv_tensor* t, size_t need) {
  return t->dtype == TRV_DTYPE_F32 && t->rank == 1 && t->dim[0] >= 0 &&
         (t->stride[0] == 1 || t->dim[0] <= 1) && (size_t)t->dim[0] >= need / sizeof(float);
}

const char* trvk_out_check(const trv_tensor* t, int64_t* expected, int64_t* got) {
  uint64_t count = 1, extent = 1;
  for (uint32_t i = 0; i < t->rank; i++)
    if (t->dim[i] == 0) return NULL;
  for (uint32_t i = 0; i < t->rank; i++) {
    const uint64_t d = (uint64_t)t->dim[i],
                   step = (uint64_t)(t->stride[i] < 0 ? -t->stride[i] : t->stride[i]);
    if (d > 1 && (step == 0 || count > (uint64_t)PTRDIFF_MAX / d ||
                  extent > (uint64_t)PTRDIFF_MAX / d / 8 / step))
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
