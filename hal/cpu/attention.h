/* attention.h - an attention's sizes and strides. */
#ifndef TRVK_ATTENTION_H
#define TRVK_ATTENTION_H

#include "gemm.h"

/* Sizes of blocks on the stack. */
#if TRVK_GATHER < 1024
#define TRVK_QUERIES 4
#define TRVK_KEYS 16 /* at least, of a full block; a multiple of the panel */
#define TRVK_PACK 512
#define TRVK_KEYS_MOST 64
#else
#define TRVK_QUERIES 64
#define TRVK_KEYS 128
#define TRVK_PACK 4096
#define TRVK_KEYS_MOST 1024 /* of a block of few queries */
#endif

typedef struct trvk_attention_operand {
  const uint8_t* data;
  trv_dim batch[TRV_MAX_RANK], head, row, col; /* strides */
} trvk_attention_operand;

/* Keys and values may lie in two pieces: s keys in all, the first `first` of them in k[0], v[0]. */
typedef struct trvk_attention {
  trv_dim dim[TRV_MAX_RANK], heads, groups, l, s, first, d, e;
  uint32_t nb, mask_dtype;
  trvk_attention_operand q, k[2], v[2], o, mask; /* mask.data NULL: none */
  float empty; /* what a row is that nothing takes part in: 0 or NaN */
} trvk_attention;

/* float64 (attention_plain.c) */
void trvk_attention_plain(const trvk_call* call, const trvk_attention* p, uint32_t tile);
#endif
