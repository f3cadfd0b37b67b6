/* qconv.h - a convolution with 8-bit weights, in terms of conv.h. */
#ifndef TRVK_QCONV_H
#define TRVK_QCONV_H

#include "conv.h"
#include "qgemm.h"

typedef struct trvk_qconv {
  trvf_conv_attrs attrs;
  trv_tensor in[3]; /* x, w (as if plain where it is packed), no bias */
  trvk_call call;   /* a conv command of these; conv.c works out its geometry */
  trvk_conv_geo g;
  trvk_qweight w;
  trv_dim c4;   /* channels of a group in a packed weight */
  size_t bytes; /* of the packed weight */
  int packed;
} trvk_qconv;

/* Fills q, which must stay in place; NULL, or what does not fit. */
const char* trvk_qconv_make(const trvk_call* call, trvk_qconv* q, int64_t* expected, int64_t* got);
/* Bytes of the packed weight; 0: nothing to pack, or too big. */
size_t trvk_qconv_packed_bytes(trv_dim groups, trv_dim cg, trv_dim og, trv_dim taps);

/* A path: results of the tile. */
typedef void (*trvk_qconv_path)(const trvk_qconv* q, trvk_qout* out, int32_t x_zero, uint32_t tile);

/* Stored activations. depthwise: the path for those of i8; real: for real results. */
void trvk_qconv_run(const trvk_call* call, uint32_t tile, const trvk_qgemm* gemm,
                    trvk_qconv_path depthwise, const trvk_gemm* real);
/* Real activations, or real results of stored ones. */
void trvk_qconv_real_run(const trvk_call* call, uint32_t tile, const trvk_qgemm* gemm,
                         trvk_qconv_path depthwise, const trvk_gemm* real, trvk_q_floats_fn floats);

/* Paths. */
void trvk_qconv_gemm_run(const trvk_qconv* q, trvk_qout* out, int32_t x_zero, uint32_t tile,
                         const trvk_qgemm* gemm);
void trvk_qconv_depthwise_i8(const trvk_qconv* q, trvk_qout* out, int32_t x_zero, uint32_t tile);
void trvk_qconv_depthwise_i16(const trvk_qconv* q, trvk_qout* out, int32_t x_zero, uint32_t tile);
void trvk_qconv_depthwise_f32(const trvk_qconv* q, trvk_qout* out, int32_t x_zero, uint32_t tile);
#endif
