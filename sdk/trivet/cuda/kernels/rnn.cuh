/* rnn.cuh - the steps of an LSTM, GRU or plain RNN over a sequence, one block per sample. What the inputs add to the gates has been
 * computed for all steps before.
 *
 * P: A, the working type; T, reversed; x(t, j): input side of gate j with its bias; w_(j, k), b(j): of the hidden side; proj(r, k); h0(k),
 * c0(k); y(t, k, v), h(k, v), c(k, v) take results.
 */
template <class A>
TRV_DEVICE A r_tanh(A x) {
  return tanh(x);
}
template <class P, int KIND, int H, int R, bool PROJ, int THREADS>
TRV_DEVICE void recur(const P& p) {
  typedef typename P::A A;
  typedef typename P::I I;
  constexpr int GATES = KIND == 0 ? 4 : KIND == 1 ? 3 : 1, G = GATES * H;
  TRV_SHARED(A, gate, G);
  TRV_SHARED(A, hidden, R);
  TRV_SHARED(A, cell, H);
  TRV_SHARED(A, wide, PROJ ? H : 1);
  const int tid = (int)threadIdx.x, lane = tid % 32, warp = tid / 32;
  for (int k = tid; k < R; k += THREADS) hidden[k] = p.h0(k);
  if (KIND == 0)
    for (int k = tid; k < H; k += THREADS) cell[k] = p.c0(k);
  __syncthreads();
  for (I step = 0; step < p.T; step++) {
    const I t = p.reversed ? p.T - 1 - step : step;
    for (int j = warp; j < G; j += THREADS / 32) {
      A acc = 0;
      for (int k = lane; k < R; k += 32) acc += p.w_(j, k) * hidden[k];
      acc = warp_all(acc, op_sum());
      if (lane == 0) gate[j] = acc + p.b(j);
    }
    __syncthreads();
    for (int k = tid; k < H; k += THREADS) {
      A v;
      if (KIND == 0) {
        const A i = r_sigmoid(p.x(t, k) + gate[k]), f = r_sigmoid(p.x(t, H + k) + gate[H + k]);
        const A g = r_tanh(p.x(t, 2 * H + k) + gate[2 * H + k]), o = r_sigmoid(p.x(t, 3 * H + k) + gate[3 * H + k]);
        cell[k] = f * cell[k] + i * g;
        v = o * r_tanh(cell[k]);
      } else if (KIND == 1) {
        const A r = r_sigmoid(p.x(t, k) + gate[k]), z = r_sigmoid(p.x(t, H + k) + gate[H + k]);
        v = (1 - z) * r_tanh(p.x(t, 2 * H + k) + r * gate[2 * H + k]) + z * hidden[k];
      } else {
        v = p.x(t, k) + gate[k];
        v = KIND == 2 ? r_tanh(v) : (v < 0 ? (A)0 : v);
      }
      if (PROJ) {
        wide[k] = v;
      } else {
        hidden[k] = v;
        p.y(t, k, v);
      }
    }
    __syncthreads();
    if (PROJ) {
      for (int r = warp; r < R; r += THREADS / 32) {
        A acc = 0;
        for (int k = lane; k < H; k += 32) acc += p.proj(r, k) * wide[k];
        acc = warp_all(acc, op_sum());
        if (lane == 0) {
          hidden[r] = acc;
          p.y(t, r, acc);
        }
      }
      __syncthreads();
    }
  }
  for (int k = tid; k < R; k += THREADS) p.h(k, hidden[k]);
  if (KIND == 0)
    for (int k = tid; k < H; k += THREADS) p.c(k, cell[k]);
}
