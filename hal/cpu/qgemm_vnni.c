/* qgemm_vnni.c - the integer products of qgemm.h for AVX-512 with VNNI. */
#if defined(__x86_64__) && defined(__GNUC__)
#if defined(__clang__)
#pragma clang attribute push(                                                               \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC target( \
    "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,prefer-vector-width=512")
#endif
#define TRVV_N 16
#define TRVQ_DOT 1
#include "qconv.h"
#include "qmatmul.h"
#define TRVK_Q_FLOATS static void q_floats
/* clang-format off */
#include "qfloats.inc"
#include "qgemm_tiles.h"
#include "qbytes_tiles.h"
#include "qrows.inc"
#include "qstream.inc"
#include "qdw_tiles.h"
/* clang-format on */

static const trvk_qgemm qgemm = {q_words, q_bytes, q_nibbles,    q_stream,
                                 128,     q_sums,  q_group_sums, q_out,
                                 q_real,  q_range, q_quantise8,  q_quantise16};

void trvk_qmatmul__avx512vnni(const trvk_call* call, uint32_t tile) {
  trvk_qmatmul_run(call, tile, &qgemm, NULL);
}
void trvk_qmatmul_dynamic__avx512vnni(const trvk_call* call, uint32_t tile) {
  trvk_qmatmul_dynamic_run(call, tile, &qgemm, &trvk_gemm_avx512);
}
void trvk_qmatmul_real__avx512vnni(const trvk_call* call, uint32_t tile) {
  trvk_qmatmul_real_run(call, tile, &qgemm, &trvk_gemm_avx512, q_floats);
}
void trvk_qconv__avx512vnni(const trvk_call* call, uint32_t tile) {
  trvk_qconv_run(call, tile, &qgemm, q_depthwise, NULL);
}
void trvk_qconv_real__avx512vnni(const trvk_call* call, uint32_t tile) {
  trvk_qconv_real_run(call, tile, &qgemm, q_depthwise, &trvk_gemm_avx512, q_floats);
}
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int trvk_no_vnni; /* C wants something in a file */
#endif
