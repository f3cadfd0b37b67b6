/* attention.cuh - scaled dot-product attention without the score matrix (online softmax, Milakov and Gimelshein 2018; tiles as
 * FlashAttention's).
 *
 * A block of 4 warps takes 16 rows of queries of one head, a warp 4 of them; keys come in tiles of 32, one per lane. P: A, the working
 * type; L, S, D, E; q(l, d), k(s, d), v(s, e), score(l, s, x) (mask applied; -inf: takes no part), y(l, e, x); last(l): keys from there on take
 * no part in the rows up to l.
 */
template <class A>
TRV_DEVICE A nan_max(A a, A b) {
  return a > b || a != a ? a : b;
}
struct op_nan_max {
  template <class A>
  TRV_METHOD A operator()(A a, A b) const {
    return nan_max(a, b);
  }
};

/* DP, EP: D, E as they are staged. EJ: values of E per lane. STAGE: keys and values are copied to shared memory. */
template <class P, int DP, int EJ, bool STAGE, bool NAN_ROWS>
TRV_DEVICE void attend(const P& p) {
  typedef typename P::A A;
  typedef typename P::I I;
  constexpr int Q = 4, WARPS = 4, ROWS = Q * WARPS, LD = DP + 1, EP = EJ * 32;
  TRV_SHARED(A, sq, STAGE ? ROWS * LD : 1);
  TRV_SHARED(A, sk, STAGE ? 32 * LD : 1);
  TRV_SHARED(A, sv, STAGE ? 32 * EP : 1);
  const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
  const I l0 = (I)blockIdx.x * ROWS;
  if (STAGE) {
    __syncthreads();
    for (int e = (int)threadIdx.x; e < ROWS * DP; e += 128) {
      const I l = l0 + e / DP, d = e % DP;
      sq[e / DP * LD + e % DP] = l < p.L && d < p.D ? p.q(l, d) : (A)0;
    }
  }
  A top[Q], sum[Q], out[Q][EJ];
  TRV_UNROLL for (int r = 0; r < Q; r++) {
    top[r] = (A)-TRV_INF;
    sum[r] = 0;
    TRV_UNROLL for (int j = 0; j < EJ; j++) out[r][j] = 0;
  }
  const I end = p.last(l0 + ROWS - 1);
  for (I s0 = 0; s0 < end; s0 += 32) {
    if (STAGE) {
      __syncthreads();
      for (int e = (int)threadIdx.x; e < 32 * DP; e += 128) {
        const I s = s0 + e / DP, d = e % DP;
        sk[e / DP * LD + e % DP] = s < p.S && d < p.D ? p.k(s, d) : (A)0;
      }
      for (int e = (int)threadIdx.x; e < 32 * EP; e += 128) {
        const I s = s0 + e / EP, c = e % EP;
        sv[e] = s < p.S && c < p.E ? p.v(s, c) : (A)0;
      }
      __syncthreads();
    }
    const I s = s0 + lane;
    TRV_UNROLL for (int r = 0; r < Q; r++) {
      const I l = l0 + warp * Q + r;
      A x = 0;
      if (STAGE) {
        TRV_UNROLL4 for (int d = 0; d < DP; d++) x += sq[(warp * Q + r) * LD + d] * sk[lane * LD + d];
      } else if (l < p.L && s < p.S) {
        for (I d = 0; d < p.D; d++) x += p.q(l, d) * p.k(s, d);
      }
      x = l < p.L && s < p.S ? p.score(l, s, x) : (A)-TRV_INF;
      const A best = nan_max(top[r], warp_all(x, op_nan_max()));
      const A w = best == (A)-TRV_INF ? (A)0 : exp(x - best);
      const A shrink = best == (A)-TRV_INF ? (A)1 : exp(top[r] - best);
      top[r] = best;
      sum[r] = sum[r] * shrink + warp_all(w, op_sum());
      TRV_UNROLL for (int j = 0; j < EJ; j++) out[r][j] *= shrink;
      TRV_UNROLL4 for (int t = 0; t < 32; t++) {
        const A wt = lane_value(w, t);
        TRV_UNROLL for (int j = 0; j < EJ; j++) {
          const int c = lane + 32 * j;
          A val = 0;
          if (STAGE)
            val = sv[t * EP + c];
          else if (s0 + t < p.S && c < p.E)
            val = p.v(s0 + t, c);
          if (STAGE || s0 + t < p.S) out[r][j] += wt * val;
        }
      }
    }
  }
  TRV_UNROLL for (int r = 0; r < Q; r++) {
    const I l = l0 + warp * Q + r;
    if (l >= p.L) continue;
    TRV_UNROLL for (int j = 0; j < EJ; j++) {
      const I c = lane + 32 * j;
      const A none = NAN_ROWS ? (A)TRV_NAN : (A)0;
      if (c < p.E) p.y(l, c, top[r] == (A)-TRV_INF ? none : out[r][j] / sum[r]);
    }
  }
}
