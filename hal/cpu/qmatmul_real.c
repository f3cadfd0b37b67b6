/* qmatmul_real.c - product of real numbers with a weight in 8 or 4 bits, through the float32
 * product; real results of a stored left side. */
#include "qmatmul.h"

void trvk_qmatmul_real_run(const trvk_call* call, uint32_t tile, const trvk_qgemm* gemm,
                           const trvk_gemm* real, trvk_q_floats_fn floats) {
  trvk_qmatmul q;
  int64_t e, got;
  if (call->in[0].dtype != TRV_DTYPE_F32) {
    trvk_qmatmul_run(call, tile, gemm, real);
    return;
  }
  if (trvk_count(&call->out[0]) == 0) return;
  (void)trvk_qmatmul_make(call, &q, &e, &got);
  q.w.floats = floats;
  q.p.q = &q.w;
  trvk_matmul_floats(&q.call, &q.p, tile, real);
}

void trvk_qmatmul_real__ref(const trvk_call* call, uint32_t tile) {
  trvk_qmatmul_real_run(call, tile, &trvk_qgemm_ref, &trvk_gemm_ref, trvk_q_floats);
}
