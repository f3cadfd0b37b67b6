/* pack.c - weights as kernels want them. Layouts (float32; private to this folder):
 *   matmul [K, N]      panels of 16 columns: [N / 16][K][16], zeros beyond N
 *   conv               per group the same, with K = taps * channels (channels innermost); narrow
 * groups are merged; Winograd: conv.h
 *   conv, depthwise    [taps][round16(channels out)]
 *   rnn [G * H, K]     the matmul layout of its transpose
 * f16: as float32; bf16: pairs along K (conv: along channels), [N / 16][ceil(K / 2)][16][2]; not
 * depthwise ones (both not rnn). Weights in 8 and 4 bits: qpack.c.
 */
#include "conv.h"
#include "matmul.h"
#include "qgemm.h"

typedef struct shape {
  trv_dim groups, cg, og, taps;
  int transposed;
} shape;

static int conv_shape(const trvf_conv_attrs* a, uint32_t rank, const int64_t* dim, shape* s) {
  if (rank != a->nd + 2u || a->nd < 1 || a->nd > 3 || a->groups == 0) return 0;
  for (uint32_t i = 0; i < rank; i++)
    if (dim[i] <= 0 || dim[i] > INT32_MAX) return 0;
  s->transposed = a->transposed != 0;
  s->groups = (trv_dim)a->groups;
  if (dim[0] % (int64_t)a->groups != 0) return 0;
  s->og = (trv_dim)(s->transposed ? dim[1] : dim[0] / (int64_t)a->groups);
  s->cg = (trv_dim)(s->transposed ? dim[0] / (int64_t)a->groups : dim[1]);
  s->taps = 1;
  for (uint32_t i = 2; i < rank; i++) {
    if (s->taps > PTRDIFF_MAX / 64 / (trv_dim)dim[i]) return 0;
    s->taps *= (trv_dim)dim[i];
  }
  return 1;
}

size_t trvk_conv_packed_count(uint32_t dtype, trv_dim groups, trv_dim cg, trv_dim og,
                              trv_dim taps) {
  const trv_dim most = PTRDIFF_MAX / 64;
  if (groups < 1 || cg < 1 || og < 1 || taps < 1) return 0; /* nothing to pack */
  if (groups > most || cg > most || og > most - 16) return 0;
  trv_dim n;
  if (trvk_conv_is_depthwise(groups, cg)) {
    if (og > most / groups) return 0;
    n = trvk_round16(groups * og);
    return taps > most / n ? 0 : (size_t)(n * taps);
  }
  const trv_dim r = trvk_conv_merge(groups, cg, og);
  if (r * og > most - 16 || cg > most / r) return 0;
  if (dtype == TRV_DTYPE_BF16 && r * cg == 1) return 0; /* pairs would double it */
  n = trvk_round16(r * og);
  const trv_dim factor[3] = {groups / r, trvk_packed_k(dtype, r * cg), taps};
  for (int i = 0; i < 3; i++) {
    if (factor[i] <= 0 || n > most / factor[i]) return 0;
    n *= factor[i];
  }
  return (size_t)n;
}

size_t trvk_pack_bytes(uint32_t op, const void* attrs, uint32_t dtype, uint32_t rank,
                       const int64_t* dim) {
  const int half = (op == TRV_OP_MATMUL || op == TRV_OP_CONV) &&
                   (dtype == TRV_DTYPE_F16 || dtype == TRV_DTYPE_BF16);
  if (dtype != TRV_DTYPE_F32 && !half) return trvk_qpack_bytes(op, attrs, dtype, rank, dim);
  if (op == TRV_OP_CONV) {
    shape s;
    if (!conv_shape(attrs, rank, dim, &s)) return 0;
    const trvf_conv_attrs* a = attrs;
    if (trvk_packed_winograd(a))
      return !half && rank == 4 && dim[2] == 3 && dim[3] == 3 && s.groups == 1 && !s.transposed
                 ? 4 * trvk_wino_packed_floats(a->packed, s.cg, s.og)
                 : 0;
    return trv_dtype_size(dtype) * trvk_conv_packed_count(dtype, s.groups, s.cg, s.og, s.taps);
  }
  if ((op != TRV_OP_MATMUL && op != TRV_OP_RNN) || rank != 2) return 0;
  const int64_t k = dim[op == TRV_OP_RNN], n = dim[op == TRV_OP_MATMUL];
  if (k <= 0 || n <= 0 || n > PTRDIFF_MAX / 64 - 16 || k > PTRDIFF_MAX / 64 ||
      trvk_round16((trv_dim)n) > PTRDIFF_MAX / 64 / (k + 1))
    return 0;
  return (size_t)(trvk_round16((trv_dim)n) * trvk_packed_k(dtype, (trv_dim)k)) *
         trv_dtype_size(dtype);
}

static void pack_conv(const shape* s, const trvf_conv_attrs* a, uint32_t dtype, const int64_t* dim,
                      const int64_t* step, const uint8_t* src, uint8_t* dst) {
  trv_dim extent[3] = {1, 1, 1}, move[3] = {0, 0, 0};
  for (uint32_t i = 0; i < a->nd; i++) {
    extent[3 - a->nd + i] = (trv_dim)dim[2 + i];
    move[3 - a->nd + i] = (trv_dim)step[2 + i];
  }
  /* w[group][o][c] = src[o_g * og_step + o * o_step + c * c_step] */
  const trv_dim c_step = (trv_dim)(s->transposed ? step[0] : step[1]);
  const trv_dim o_step = (trv_dim)(s->transposed ? step[1] : step[0]);
  const trv_dim g_step = (trv_dim)step[0] * (s->transposed ? s->cg : s->og);
  const int dw = trvk_conv_is_depthwise(s->groups, s->cg);
  const trv_dim r = trvk_conv_merge(s->groups, s->cg, s->og),
                cg = dw ? 1 : trvk_packed_k(dtype, r * s->cg);
  const trv_dim panels = trvk_panels(r * s->og), wide = trvk_round16(s->groups * s->og);
  const size_t size = trv_dtype_size(dtype);
  for (trv_dim g = 0; g < s->groups; g++)
    for (trv_dim t = 0; t < s->taps; t++) {
      const trv_dim w = t % extent[2], h = t / extent[2] % extent[1], d = t / extent[2] / extent[1];
      const trv_dim from = g * g_step + d * move[0] + h * move[1] + w * move[2];
      for (trv_dim o = 0; o < s->og; o++)
        for (trv_dim c = 0; c < s->cg; c++) {
          const trv_dim col = g % r * s->og + o, row = g % r * s->cg + c; /* in the merged group */
          trv_dim to = t * wide + g * s->og + o;
          if (!dw) {
            to = ((g / r * panels + col / 16) * s->taps + t) * cg * 16;
            to += dtype == TRV_DTYPE_BF16 ? (row / 2 * 16 + col % 16) * 2 + row % 2
                                          : row * 16 + col % 16;
          }
          memcpy(dst + (size_t)to * size, src + (from + o * o_step + c * c_step) * (trv_dim)size,
                 size);
        }
    }
}

static void pack_halves(uint32_t dtype, const int64_t* dim, const int64_t* step,
                        const uint16_t* src, uint16_t* dst) {
  const trv_dim rows = (trv_dim)dim[0], k = trvk_packed_k(dtype, rows), n = (trv_dim)dim[1];
  for (trv_dim i = 0; i < rows; i++)
    for (trv_dim j = 0; j < n; j++) {
      const trv_dim in = j % TRVK_PANEL, panel = j / TRVK_PANEL * k * TRVK_PANEL;
      const trv_dim at =
          dtype == TRV_DTYPE_BF16 ? (i / 2 * TRVK_PANEL + in) * 2 + i % 2 : i * TRVK_PANEL + in;
      dst[panel + at] = src[i * (trv_dim)step[0] + j * (trv_dim)step[1]];
    }
}

void trvk_pack(uint32_t op, const void* attrs, uint32_t dtype, uint32_t rank, const int64_t* dim,
               const int64_t* step, const void* src, void* dst) {
  const size_t bytes = trvk_pack_bytes(op, attrs, dtype, rank, dim);
  if (bytes == 0) return;
  if (op == TRV_OP_MATMUL && (dtype == TRV_DTYPE_F16 || dtype == TRV_DTYPE_BF16)) {
    memset(dst, 0, bytes);
    pack_halves(dtype, dim, step, src, dst);
    return;
  }
  if (dtype != TRV_DTYPE_F32 && op != TRV_OP_CONV) {
    trvk_qpack(op, attrs, dtype, rank, dim, step, src, dst);
    return;
  }
  if (op == TRV_OP_CONV) {
    shape s;
    memset(dst, 0, bytes);
    if (!conv_shape(attrs, rank, dim, &s)) return;
    const trvf_conv_attrs* a = attrs;
    if (trvk_packed_winograd(a))
      trvk_wino_pack(a->packed, s.cg, s.og, step, src, dst);
    else
      pack_conv(&s, attrs, dtype, dim, step, src, dst);
    return;
  }
  const int k = op == TRV_OP_RNN, n = !k;
  trvk_pack_panels(dst, src, dtype, (trv_dim)step[k], (trv_dim)step[n], (trv_dim)dim[k],
                   (trv_dim)dim[n], trvk_panels((trv_dim)dim[n]));
}
