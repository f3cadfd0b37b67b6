/* sort.cuh - a stable sort of one lane by one block: Batcher's bitonic network in the form whose comparisons all point the same way, so
 * that any length will do; equal keys are told apart by their place. P: n; x(i) the i-th key; at[i]: scratch for positions.
 */
template <bool DOWN, class A>
TRV_DEVICE bool goes_first(A a, i32 i, A b, i32 j) { /* NaN is the greatest */
  const bool na = a != a, nb = b != b;
  const bool equal = na ? nb : (!nb && a == b);
  if (equal) return i < j;
  const bool less = na ? false : nb ? true : a < b;
  return DOWN ? !less : less;
}
template <int T, bool DOWN, class P>
TRV_DEVICE void sort_lane(const P& p) {
  typedef typename P::I I;
  for (I i = (I)threadIdx.x; i < p.n; i += T) p.at[i] = (i32)i;
  __syncthreads();
  for (i64 size = 2; size < 2 * (i64)p.n; size <<= 1) {
    for (i64 half = size >> 1; half > 0; half >>= 1) {
      const bool flip = half == size >> 1;
      for (i64 e = (i64)threadIdx.x; e < (i64)p.n; e += T) { /* e: the lower place of a pair */
        const i64 base = e & ~(2 * half - 1), low = e & (2 * half - 1);
        if (low >= half) continue;
        const i64 f = flip ? base + 2 * half - 1 - low : e + half;
        if (f >= (i64)p.n) continue;
        const i32 i = p.at[e], j = p.at[f];
        if (goes_first<DOWN>(p.x((I)j), j, p.x((I)i), i)) {
          p.at[e] = j;
          p.at[f] = i;
        }
      }
      __syncthreads();
    }
  }
}
