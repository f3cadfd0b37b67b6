/* qpack.c - packing of weights in 8 and 4 bits; qweight.c has the layouts. */
#include "qconv.h"

/* One number to its place in a panel. */
static void put(uint8_t* panel, trv_dim k, trv_dim col, uint8_t v, int bits) {
  if (bits == 4) {
    uint8_t* at = panel + k / 8 * 64 + col * 4 + k % 4;
    *at = (uint8_t)(k & 4 ? (*at & 0x0F) | v << 4 : (*at & 0xF0) | (v & 0x0F));
  } else {
    panel[k / 4 * 64 + col * 4 + k % 4] = v;
  }
}

void trvk_q_pack(uint8_t* dst, const uint8_t* src, trv_dim k_step, trv_dim n_step, trv_dim k,
                 trv_dim n, int bits, int32_t zero) {
  const trv_dim bytes = trvk_q_panel_bytes(k, bits);
  for (trv_dim col = 0; col < n; col += TRVK_PANEL, dst += bytes) {
    memset(dst, bits == 4 ? (zero & 15) * 17 : 0, (size_t)bytes);
    for (trv_dim j = 0; j < TRVK_PANEL && col + j < n; j++) {
      const uint8_t* from = src + (col + j) * n_step;
      int32_t sum = 0;
      for (trv_dim i = 0; i < k; i++) {
        const uint8_t v = from[i * k_step];
        put(dst, i, j, v, bits);
        sum = trvk_add32(sum, (int8_t)v);
      }
      if (bits != 4) memcpy(dst + bytes - 64 + j * 4, &sum, sizeof sum);
    }
  }
}

/* A conv's weight as dims say it. */
typedef struct shape {
  trv_dim groups, cg, og, taps;
} shape;

static int conv_shape(const trvf_qconv_attrs* a, uint32_t rank, const int64_t* dim, shape* s) {
  if (rank != a->nd + 2u || a->nd < 1 || a->nd > 3 || a->groups == 0 ||
      a->groups > (uint32_t)INT32_MAX)
    return 0;
  for (uint32_t i = 0; i < rank; i++)
    if (dim[i] <= 0 || dim[i] > INT32_MAX) return 0;
  s->groups = (trv_dim)a->groups;
  if (dim[0] % s->groups != 0) return 0;
  s->og = a->transposed ? (trv_dim)dim[1] : (trv_dim)dim[0] / s->groups;
  s->cg = a->transposed ? (trv_dim)dim[0] / s->groups : (trv_dim)dim[1];
  s->taps = 1;
  for (uint32_t i = 2; i < rank; i++) {
    if (s->taps > TRVK_Q_MOST / (trv_dim)dim[i]) return 0;
    s->taps *= (trv_dim)dim[i];
  }
  return 1;
}

static void pack_conv(const trvf_qconv_attrs* a, const shape* s, const int64_t* dim,
                      const int64_t* step, const uint8_t* src, uint8_t* dst) {
  const trv_dim o_step = (trv_dim)step[a->transposed ? 1 : 0],
                c_step = (trv_dim)step[a->transposed ? 0 : 1];
  const trv_dim g_step = (trv_dim)step[0] * (a->transposed ? s->cg : s->og);
  const trv_dim c4 = trvk_round4(s->cg), panel = trvk_q_panel_bytes(s->taps * c4, 8);
  const trv_dim panels = trvk_panels(s->og), wide = trvk_round16(s->groups * s->og);
  for (trv_dim t = 0; t < s->taps; t++) {
    trv_dim left = t, at = 0;
    for (uint32_t i = a->nd; i-- > 0;) {
      at += left % (trv_dim)dim[2 + i] * (trv_dim)step[2 + i];
      left /= (trv_dim)dim[2 + i];
    }
    for (trv_dim g = 0; g < s->groups; g++)
      for (trv_dim o = 0; o < s->og; o++)
        for (trv_dim c = 0; c < s->cg; c++) {
          const uint8_t v = src[g * g_step + at + o * o_step + c * c_step];
          if (trvk_conv_is_depthwise(s->groups, s->cg)) {
            dst[t * wide + g * s->og + o] = v;
          } else {
            uint8_t *to = dst + (g * panels + o / TRVK_PANEL) * panel,
                    *sum = to + panel - 64 + o % TRVK_PANEL * 4;
            int32_t n;
            put(to, t * c4 + c, o % TRVK_PANEL, v, 8);
            memcpy(&n, sum, sizeof n);
            n = trvk_add32(n, (int8_t)v);
            memcpy(sum, &n, sizeof n);
          }
        }
  }
}

/* What qmatmul and qgather have in common. */
typedef struct matrix {
  uint32_t k, n; /* axes */
  int bits;
  int32_t zero;
} matrix;

static int as_matrix(uint32_t op, const void* attrs, uint32_t dtype, uint32_t rank,
                     const int64_t* dim, matrix* m) {
  if (op == TRV_OP_QMATMUL) {
    const trvf_qmatmul_attrs* a = attrs;
    m->bits = a->bits;
    m->zero = a->b_zero;
    m->k = 0;
  } else if (op == TRV_OP_QGATHER) {
    const trvf_qgather_attrs* a = attrs;
    m->bits = a->bits;
    m->zero = a->zero;
    m->k = 1;
  } else {
    return 0;
  }
  m->n = 1 - m->k;
  return rank == 2 && dtype == (m->bits == 4 ? TRV_DTYPE_U8 : TRV_DTYPE_I8) &&
         (m->bits == 4 || m->bits == 8) && dim[0] > 0 && dim[1] > 0 && dim[0] <= TRVK_Q_MOST &&
         dim[1] <= TRVK_Q_MOST;
}

size_t trvk_qpack_bytes(uint32_t op, const void* attrs, uint32_t dtype, uint32_t rank,
                        const int64_t* dim) {
  matrix m;
  shape s;
  if (op == TRV_OP_QCONV)
    return dtype == TRV_DTYPE_I8 && conv_shape(attrs, rank, dim, &s)
               ? trvk_qconv_packed_bytes(s.groups, s.cg, s.og, s.taps)
               : 0;
  return as_matrix(op, attrs, dtype, rank, dim, &m)
             ? trvk_q_packed_bytes((trv_dim)dim[m.k], (trv_dim)dim[m.n], m.bits)
             : 0;
}

void trvk_qpack(uint32_t op, const void* attrs, uint32_t dtype, uint32_t rank, const int64_t* dim,
                const int64_t* step, const void* src, void* dst) {
  matrix m;
  shape s;
  const size_t bytes = trvk_qpack_bytes(op, attrs, dtype, rank, dim);
  if (bytes == 0) return;
  if (op == TRV_OP_QCONV) {
    memset(dst, 0, bytes);
    if (conv_shape(attrs, rank, dim, &s)) pack_conv(attrs, &s, dim, step, src, dst);
  } else if (as_matrix(op, attrs, dtype, rank, dim, &m)) {
    trvk_q_pack(dst, src, (trv_dim)step[m.k], (trv_dim)step[m.n], (trv_dim)dim[m.k],
                (trv_dim)dim[m.n], m.bits, m.zero);
  }
}
