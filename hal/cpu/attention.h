/* attention.h - an attention's sizes and strides. */
#ifndef TRVK_ATTENTION_H
#define TRVK_ATTENTION_H

#include "gemm.h"

/* Sizes of blocks on the stack. */
#if TRVK_GATHER < 1024
#define TRVK_QUERIES 4
#define TRVK_KEYS 16 /* a multiple of the panel */
#define TRVK_PACK 512
#else
#define TRVK_QUERIES 48
#define TRVK_KEYS 64
#define TRVK_PACK 4096
#endif

typedef struct trvk_attention_operand {
  const uint8_t* data;
  trv_dim batch[TRV_MAX_RANK], head, row, col; /* strides */
} trvk_attention_operand;

typedef struct trvk_attention {
  trv_dim dim[TRV_MAX_RANK], heads, groups, l, s, d, e;
  uint32_t nb, mask_dtype;
  trvk_attention_operand q, k, v, o, mask; /* mask.data NULL: none */
} trvk_attention;

/* float64 (attention_plain.c) */
void trvk_attention_plain(const trvk_call* call, const trvk_attention* p, uint32_t tile);
#endif
