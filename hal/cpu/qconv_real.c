/* qconv_real.c - convolution with 8-bit weights whose input or result is real. */
#include "qconv.h"
#define T float
#define S float
#define P(x, w) ((x) * (float)(w))
#define ADD(s, p) ((s) + (p))
#define OUT trvk_qout_f32
#define NAME trvk_qconv_depthwise_f32
#include "qconv_depthwise.inc"

void trvk_qconv_real_run(const trvk_call* call, uint32_t tile, const trvk_qgemm* gemm,
                         trvk_qconv_path depthwise, const trvk_gemm* real,
                         trvk_q_floats_fn floats) {
  const trvf_qconv_attrs* a = call->attrs;
  trvk_qconv q;
  int64_t e, got;
  if (call->in[0].dtype != TRV_DTYPE_F32) {
    trvk_qconv_run(call, tile, gemm, depthwise, real);
    return;
  }
  if (trvk_count(&call->out[0]) == 0) return;
  (void)trvk_qconv_make(call, &q, &e, &got);
  if (q.g.depthwise) {
    trvk_qout out;
    trvk_qout_make(&out, &call->out[0], &call->in[2], trvk_opt(call, 3), 0, a->act, a->lo, a->hi,
                   1);
    out.act_fn = real->act;
    trvk_qconv_depthwise_f32(&q, &out, 0, tile);
    return;
  }
  q.w.floats = floats;
  q.g.q = &q.w;
  if (call->n_in > 3) q.in[2] = call->in[3];
  q.g.bias_step = trvk_opt(call, 3) ? call->in[3].stride[0] : 0;
  trvk_conv_gemm_run(&q.call, &q.g, tile, real, NULL);
}

void trvk_qconv_real__ref(const trvk_call* call, uint32_t tile) {
  trvk_qconv_real_run(call, tile, &trvk_qgemm_ref, trvk_qconv_depthwise_i8, &trvk_gemm_ref,
                      trvk_q_floats);
}
