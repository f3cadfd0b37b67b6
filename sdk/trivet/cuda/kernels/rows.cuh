/* rows.cuh - reductions: one block, one warp or one thread combines the N values of a row.
 *
 * T threads share a row (1, 32 or more: then the whole block). P, which the compiler writes: n values, x(i) the i-th in the working type
 * A. What all threads of a row get is the same.
 */
template <int T>
struct row_threads {
  template <class V, class Op>
  TRV_METHOD static V all(V v, V* buf, Op op) {
    return block_all<T>(v, buf, op);
  }
  TRV_METHOD static int first() { return (int)threadIdx.x; }
};
template <>
struct row_threads<1> {
  template <class V, class Op>
  TRV_METHOD static V all(V v, V*, Op) {
    return v;
  }
  TRV_METHOD static int first() { return 0; }
};

struct op_prod {
  template <class A>
  TRV_METHOD A operator()(A a, A b) const {
    return (A)((typename unsigned_of<A>::type)a * (typename unsigned_of<A>::type)b);
  }
};
struct op_add { /* integers wrap */
  template <class A>
  TRV_METHOD A operator()(A a, A b) const {
    return (A)((typename unsigned_of<A>::type)a + (typename unsigned_of<A>::type)b);
  }
};
struct op_most { /* NaN wins */
  template <class A>
  TRV_METHOD A operator()(A a, A b) const {
    return a > b || a != a ? a : b;
  }
};
struct op_least {
  template <class A>
  TRV_METHOD A operator()(A a, A b) const {
    return a < b || a != a ? a : b;
  }
};
struct op_any {
  TRV_METHOD i32 operator()(i32 a, i32 b) const { return a | b; }
};
struct op_every {
  TRV_METHOD i32 operator()(i32 a, i32 b) const { return a & b; }
};

/* A value and where it was first met. */
template <class A>
struct found {
  A v;
  i32 nan;
  i64 at;
};
template <bool MOST>
struct op_found { /* NaN wins, then the greater (or less) value, then the earlier place; at < 0: nothing yet */
  template <class A>
  TRV_METHOD found<A> operator()(found<A> a, found<A> b) const {
    if (b.at < 0) return a;
    if (a.at < 0) return b;
    if (a.nan != b.nan) return a.nan ? a : b;
    if (a.nan || a.v == b.v) return a.at < b.at ? a : b;
    return (MOST ? a.v > b.v : a.v < b.v) ? a : b;
  }
};

template <int T, class A, class P, class Op>
TRV_DEVICE A row_fold(const P& p, A start, A* buf, Op op) {
  A acc = start;
  for (auto i = row_threads<T>::first() + 0 * p.n; i < p.n; i += T) acc = op(acc, (A)p.x(i));
  return row_threads<T>::all(acc, buf, op);
}
template <int T, bool MOST, class P>
TRV_DEVICE i64 row_find(const P& p) {
  typedef decltype(p.x(p.n)) A;
  TRV_SHARED(found<A>, buf, T / 32 + 1);
  found<A> acc;
  acc.v = 0;
  acc.nan = 0;
  acc.at = -1;
  for (auto i = row_threads<T>::first() + 0 * p.n; i < p.n; i += T) {
    found<A> one;
    one.v = p.x(i);
    one.nan = one.v != one.v;
    one.at = (i64)i;
    acc = op_found<MOST>()(acc, one);
  }
  return row_threads<T>::all(acc, buf, op_found<MOST>()).at;
}
template <int T, class P>
TRV_DEVICE auto row_var(const P& p, double correction, i64 count) -> decltype(p.x(p.n)) {
  typedef decltype(p.x(p.n)) A;
  TRV_SHARED(A, buf, T / 32 + 1);
  const A mean = row_fold<T, A>(p, (A)0, buf, op_sum()) / (A)count;
  A acc = 0;
  for (auto i = row_threads<T>::first() + 0 * p.n; i < p.n; i += T) {
    const A d = p.x(i) - mean;
    acc += d * d;
  }
  const A rest = (A)((f64)count - correction);
  return row_threads<T>::all(acc, buf, op_sum()) / (rest > 0 ? rest : (A)0);
}

/* y(i, v) takes results. */
template <int T, bool LOG, class P>
TRV_DEVICE void row_softmax(const P& p) {
  typedef decltype(p.x(p.n)) A;
  TRV_SHARED(A, buf, T / 32 + 1);
  const A top = row_fold<T, A>(p, (A)-TRV_INF, buf, op_most());
  A acc = 0;
  for (auto i = row_threads<T>::first() + 0 * p.n; i < p.n; i += T) acc += exp(p.x(i) - top);
  const A sum = row_threads<T>::all(acc, buf, op_sum());
  const A rest = LOG ? log(sum) : 1 / sum;
  for (auto i = row_threads<T>::first() + 0 * p.n; i < p.n; i += T) {
    const A d = p.x(i) - top;
    p.y(i, LOG ? d - rest : exp(d) * rest);
  }
}
/* y(i, v) scales and shifts. */
template <int T, bool RMS, class P>
TRV_DEVICE void row_norm(const P& p, double eps) {
  typedef decltype(p.x(p.n)) A;
  TRV_SHARED(A, buf, T / 32 + 1);
  A mean = 0;
  if (!RMS) mean = row_fold<T, A>(p, (A)0, buf, op_sum()) / (A)p.n;
  A acc = 0;
  for (auto i = row_threads<T>::first() + 0 * p.n; i < p.n; i += T) {
    const A d = p.x(i) - mean;
    acc += d * d;
  }
  const A r = 1 / sqrt(row_threads<T>::all(acc, buf, op_sum()) / (A)p.n + (A)eps);
  for (auto i = row_threads<T>::first() + 0 * p.n; i < p.n; i += T) p.y(i, (p.x(i) - mean) * r);
}

/* Running results along a row of a warp; keep(i, before, after). */
template <class A, class P, class Op>
TRV_DEVICE void row_scan(const P& p, A start, Op op) {
  A carry = start;
  const int lane = (int)threadIdx.x % 32;
  for (auto first = 0 * p.n; first < p.n; first += 32) {
    const auto i = first + lane;
    A v = i < p.n ? (A)p.x(i) : start;
    TRV_UNROLL for (int s = 1; s < 32; s <<= 1) {
      const A other = shift_up(v, s);
      if (lane >= s) v = op(other, v);
    }
    A before = shift_up(v, 1);
    before = lane == 0 ? carry : op(carry, before);
    if (i < p.n) p.keep(i, before, op(carry, v));
    carry = op(carry, lane_value(v, 31));
  }
}
