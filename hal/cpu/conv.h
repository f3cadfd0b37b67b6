/* conv.h - a convolution's geometry, as three spatial axes, and the layout of its packed weight. */
#ifndef TRVK_CONV_H
#define TRVK_CONV_H

#include "gemm.h"

/* Axes d, h, w; missing ones come first with size 1. */
typedef struct trvk_conv_geo {
  trv_dim n, cin, cout, groups, cg, og; /* cg, og: channels of a group */
  trv_dim in[3], out[3], kernel[3], stride[3], pad[3], dilation[3];
  trv_dim xs[5], ys[5], rs[5],
      ws[5]; /* strides of x, y, residual as n, c, d, h, w; of w as o, c, kd, kh, kw */
  trv_dim bias_step, taps;
  int transposed, depthwise;
  const struct trvk_qweight* q; /* of a weight in 8 bits (qgemm.h), else NULL */
} trvk_conv_geo;

/* One channel per group, in and out alike or with a multiplier: packed as [taps][channels], not in
 * panels. */
static inline int trvk_conv_is_depthwise(trv_dim groups, trv_dim cg) {
  return groups > 1 && cg == 1;
}

/* How many narrow groups share a panel of a packed weight, as one group with zeros between what
 * does not belong together. */
static inline trv_dim trvk_conv_merge(trv_dim groups, trv_dim cg, trv_dim og) {
  trv_dim best = 1;
  if (trvk_conv_is_depthwise(groups, cg)) return 1;
  for (trv_dim r = 2; r * og <= TRVK_PANEL && r <= groups; r++)
    if (groups % r == 0) best = r;
  return best;
}

/* ConvAttrs.packed: how the weight is stored. */
#define TRVK_PACKED_WINO2                                                                         \
  2                         /* transformed for 2x2 outputs at a time; other numbers but 0: panels \
                             */
#define TRVK_PACKED_WINO4 4 /* for 4x4 */
static inline int trvk_packed_winograd(const trvf_conv_attrs* a) {
  return a->packed == TRVK_PACKED_WINO2 || a->packed == TRVK_PACKED_WINO4;
}

/* Elements of the packed weight, 0 when that overflows. Panels of one (merged) group: [og /
 * 16][taps][cg][16]; bf16: [og / 16][taps][ceil(cg / 2)][16][2]. */
size_t trvk_conv_packed_count(uint32_t dtype, trv_dim groups, trv_dim cg, trv_dim og, trv_dim taps);

/* Weights for conv_winograd.c: [og / 32][points][cg][32], the last strip 16 wide when that is
 * enough. m: outputs of a tile along an axis, as in ConvAttrs.packed. */
#define TRVK_WINO_SLOTS 4 /* blocks at once, at most */
size_t trvk_wino_packed_floats(int m, trv_dim cg, trv_dim og);
void trvk_wino_pack(int m, trv_dim cg, trv_dim og, const int64_t* step, const float* src,
                    float* dst);

/* NULL, or what does not fit. */
const char* trvk_conv_geo_make(const trvk_call* call, trvk_conv_geo* g, int64_t* expected,
                               int64_t* got);

/* One class of outputs along each axis: those whose windows meet the same taps at the same
 * distances. A plain convolution has one class; a transposed one has one per residue of the
 * output's position modulo the stride. Output j of the class is at first + j * step; its tap i (the
 * kernel's tap t0 + i * t_step) reads input j * move + base + i * reach. */
typedef struct trvk_phase {
  trv_dim first[3], step[3], count[3], move[3], base[3], reach[3], t0[3], t_step[3], taps[3];
} trvk_phase;
trv_dim trvk_phase_count(const trvk_conv_geo* g);
void trvk_phase_make(const trvk_conv_geo* g, trv_dim index, trvk_phase* p);

void trvk_conv_epi(const trvk_call* call, const trvk_conv_geo* g, trvk_epi* e,
                   const trvk_gemm* gemm);

/* Paths. */
#define TRVK_DW_ROWS 32 /* kernel rows (depth * height) that the depthwise path takes */
int trvk_conv_dw_halves(const trvk_conv_geo* g); /* does it take halves? */
void trvk_conv_gemm_run(const trvk_call* call, const trvk_conv_geo* g, uint32_t tile,
                        const trvk_gemm* gemm, const trvk_gemm* pairs);
int trvk_conv_line_fits(const trvk_call* call, const trvk_conv_geo* g, const trvk_gemm* gemm);
void trvk_conv_line_run(const trvk_call* call, const trvk_conv_geo* g, uint32_t tile,
                        const trvk_gemm* gemm);
const char* trvk_wino_check(const trvk_call* call, const trvk_conv_geo* g, int64_t* expected,
                            int64_t* got);
uint32_t trvk_wino_slots(const trvk_call* call, const trvk_conv_geo* g); /* blocks at once */
void trvk_conv_winograd_run(const trvk_call* call, const trvk_conv_geo* g, uint32_t tile,
                            const trvk_gemm* gemm);
void trvk_conv_depthwise_run(const trvk_call* call, const trvk_conv_geo* g, uint32_t tile,
                             const trvk_gemm* gemm);
void trvk_conv_plain_run(const trvk_call* call, const trvk_conv_geo* g, uint32_t tile,
                         const trvk_gemm* gemm);
/* Tap `index` of the phase: steps from a window's origin, and its number in the kernel. */
static inline trv_dim trvk_tap_at(const trvk_conv_geo* g, const trvk_phase* p, trv_dim index,
                                  trv_dim* delta) {
  trv_dim t[3];
  t[2] = index % p->taps[2];
  t[1] = index / p->taps[2] % p->taps[1];
  t[0] = index / p->taps[2] / p->taps[1];
  for (int i = 0; i < 3; i++) {
    delta[i] = t[i] * p->reach[i];
    t[i] = p->t0[i] + t[i] * p->t_step[i];
  }
  return (t[0] * g->kernel[1] + t[1]) * g->kernel[2] + t[2];
}
#endif
