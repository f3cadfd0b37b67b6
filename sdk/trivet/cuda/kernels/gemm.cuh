/* gemm.cuh - matrix products, and convolutions as implicit ones, over a problem that the compiler writes out as a struct P:
 *
 *   TA, TB     elements of A[M, K] and B[K, N] as they are staged; Acc: of the sum
 *   A_K        A is read along K (else along M); B_N: B is read along N (else along K)
 *   VA, VB     elements read at once along that axis, of which its size and every place are a multiple
 *   M, N, K    sizes; kb, ke: the range of K that this block sums up
 *   a(m, k, TA *), b(k, n, TB *)   read VA, VB elements that lie inside
 *   store(m, n, Acc)               takes a result
 *
 * Tiles of A and B are staged in shared memory; the next tile is read into registers while this one is multiplied. Blocks: x over N,
 * y over M.
 */
TRV_DEVICE f32 madd(f32 a, f32 b, f32 c) { return a * b + c; }
TRV_DEVICE f64 madd(f64 a, f64 b, f64 c) { return a * b + c; }
TRV_DEVICE i32 madd(i32 a, i32 b, i32 c) { return (i32)((u32)a * (u32)b + (u32)c); }
TRV_DEVICE i64 madd(i64 a, i64 b, i64 c) { return (i64)((u64)a * (u64)b + (u64)c); }

template <class T>
TRV_DEVICE T nothing() {
  return (T)0;
}
template <>
TRV_SPECIAL f16 nothing<f16>() {
  f16 r;
  r.x = 0;
  return r;
}
template <>
TRV_SPECIAL bf16 nothing<bf16>() {
  bf16 r;
  r.x = 0;
  return r;
}

/* Reads one thread's share of a tile into registers. ROWS x COLS, FAST along COLS. get(r, c, out) */
template <int ROWS, int COLS, int V, int THREADS, class T, class I, class Get>
TRV_DEVICE void tile_read(T* reg, I r0, I c0, I rows, I cols, Get get) {
  TRV_UNROLL for (int j = 0; j < ROWS * COLS / V / THREADS; j++) {
    const int e = ((int)threadIdx.x + j * THREADS) * V, r = e / COLS, c = e % COLS;
    if (r0 + r < rows && c0 + c < cols) {
      get(r0 + r, c0 + c, reg + j * V);
    } else {
      TRV_UNROLL for (int v = 0; v < V; v++) reg[j * V + v] = nothing<T>();
    }
  }
}
template <int ROWS, int COLS, int V, int THREADS, class T, class Put>
TRV_DEVICE void tile_write(const T* reg, Put put) {
  TRV_UNROLL for (int j = 0; j < ROWS * COLS / V / THREADS; j++) {
    const int e = ((int)threadIdx.x + j * THREADS) * V, r = e / COLS, c = e % COLS;
    TRV_UNROLL for (int v = 0; v < V; v++) put(r, c + v, reg[j * V + v]);
  }
}

/* The problem's operands as tiles: rows, columns in the order that they are read. */
template <class P, int BM, int BN, int BK, int THREADS>
struct tiles {
  typename P::TA ra[BM * BK / THREADS];
  typename P::TB rb[BN * BK / THREADS];
  template <class I>
  TRV_METHOD void read(const P& p, I m0, I n0, I k0) {
    typedef typename P::TA TA;
    typedef typename P::TB TB;
    if (P::A_K)
      tile_read<BM, BK, P::VA, THREADS>(ra, m0, k0, p.M, p.ke, [&](I m, I k, TA* out) { p.a(m, k, out); });
    else
      tile_read<BK, BM, P::VA, THREADS>(ra, k0, m0, p.ke, p.M, [&](I k, I m, TA* out) { p.a(m, k, out); });
    if (P::B_N)
      tile_read<BK, BN, P::VB, THREADS>(rb, k0, n0, p.ke, p.N, [&](I k, I n, TB* out) { p.b(k, n, out); });
    else
      tile_read<BN, BK, P::VB, THREADS>(rb, n0, k0, p.N, p.ke, [&](I n, I k, TB* out) { p.b(k, n, out); });
  }
  template <class PutA, class PutB>
  TRV_METHOD void write(PutA put_a, PutB put_b) const {
    typedef typename P::TA TA;
    typedef typename P::TB TB;
    if (P::A_K)
      tile_write<BM, BK, P::VA, THREADS>(ra, [&](int m, int k, TA v) { put_a(m, k, v); });
    else
      tile_write<BK, BM, P::VA, THREADS>(ra, [&](int k, int m, TA v) { put_a(m, k, v); });
    if (P::B_N)
      tile_write<BK, BN, P::VB, THREADS>(rb, [&](int k, int n, TB v) { put_b(k, n, v); });
    else
      tile_write<BN, BK, P::VB, THREADS>(rb, [&](int n, int k, TB v) { put_b(k, n, v); });
  }
};

/* Plain arithmetic: every thread has TM x TN results. */
template <class P, int BM, int BN, int BK, int TM, int TN>
TRV_DEVICE void gemm_plain(const P& p) {
  typedef typename P::Acc S;
  typedef typename P::I I;
  constexpr int THREADS = (BM / TM) * (BN / TN), LA = BM + 4, LB = BN + 4;
  TRV_SHARED(S, sa, BK * LA);
  TRV_SHARED(S, sb, BK * LB);
  const I m0 = (I)blockIdx.y * BM, n0 = (I)blockIdx.x * BN;
  const int tn = (int)threadIdx.x % (BN / TN), tm = (int)threadIdx.x / (BN / TN);
  S acc[TM][TN];
  TRV_UNROLL for (int i = 0; i < TM; i++) TRV_UNROLL for (int j = 0; j < TN; j++) acc[i][j] = 0;
  tiles<P, BM, BN, BK, THREADS> t;
  t.read(p, m0, n0, p.kb);
  for (I k0 = p.kb; k0 < p.ke; k0 += BK) {
    __syncthreads();
    t.write([&](int m, int k, typename P::TA v) { sa[k * LA + m] = (S)up(v); },
            [&](int k, int n, typename P::TB v) { sb[k * LB + n] = (S)up(v); });
    __syncthreads();
    if (k0 + BK < p.ke) t.read(p, m0, n0, k0 + BK);
    TRV_UNROLL for (int k = 0; k < BK; k++) {
      S a[TM], b[TN];
      TRV_UNROLL for (int i = 0; i < TM; i++) a[i] = sa[k * LA + tm * TM + i];
      TRV_UNROLL for (int j = 0; j < TN; j++) b[j] = sb[k * LB + tn + j * (BN / TN)];
      TRV_UNROLL for (int i = 0; i < TM; i++) TRV_UNROLL for (int j = 0; j < TN; j++) acc[i][j] = madd(a[i], b[j], acc[i][j]);
    }
  }
  __syncthreads();
  TRV_UNROLL for (int i = 0; i < TM; i++) TRV_UNROLL for (int j = 0; j < TN; j++) {
    const I m = m0 + tm * TM + i, n = n0 + tn + j * (BN / TN);
    if (m < p.M && n < p.N) p.store(m, n, acc[i][j]);
  }
}

/* ---- tensor cores: 16 x 16 results of a warp; TC names the kind of number ---- */
struct tc_f16 {
  typedef f16 E;
  typedef f32 C;
  enum { KA = 16, PAD = 8 };
};
struct tc_bf16 {
  typedef bf16 E;
  typedef f32 C;
  enum { KA = 16, PAD = 8 };
};
struct tc_tf32 {
  typedef f32 E;
  typedef f32 C;
  enum { KA = 8, PAD = 4 };
};
struct tc_i8 {
  typedef i8 E;
  typedef i32 C;
  enum { KA = 16, PAD = 16 };
};

/* What a number becomes on its way to the cores: tf32 keeps 10 bits after the leading one. */
template <class TC>
TRV_DEVICE typename TC::E staged(typename TC::E v) {
  return v;
}
TRV_DEVICE f32 to_tf32(f32 v) {
#ifdef TRV_SHIM
  const u32 u = (u32)__float_as_int(v);
  return (u & 0x7F800000u) == 0x7F800000u ? v : __int_as_float((int)((u + 0x1000u) & ~0x1FFFu));
#else
  u32 r;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(v));
  return __int_as_float((int)r);
#endif
}
template <>
TRV_SPECIAL f32 staged<tc_tf32>(f32 v) {
  return to_tf32(v);
}

#ifdef TRV_SHIM
template <class TC, bool COL>
struct frags {
  typedef typename TC::E E;
  typedef trv_shim::frag<E, 16 * TC::KA> A;
  typedef trv_shim::frag<E, 16 * TC::KA> B;
  typedef trv_shim::frag<typename TC::C, 256> C;
  static void load_a(A& f, const E* p, int ld) { trv_shim::spread(f, p, ld, TC::KA, false, TRV_SITE); }
  static void load_b(B& f, const E* p, int ld) { trv_shim::spread(f, p, ld, 16, COL, TRV_SITE); }
  static void mma(C& c, const A& a, const B& b) {
    trv_shim::mma<C, A, B, TC::KA>(c, a, b, [](E x, E y) { return (typename TC::C)up(x) * (typename TC::C)up(y); }, TRV_SITE);
  }
  static void store(typename TC::C* p, const C& c) { /* 16 x 16, dense */
    for (int i = 0; i < 8; i++) p[((int)threadIdx.x & 31) * 8 + i] = c.x[i];
    __syncwarp();
  }
};
#else
TRV_DEVICE u32 shared_address(const void* p) {
  u32 r;
  asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(r) : "l"(p));
  return r;
}
template <class TC, bool COL>
struct frags;
#define TRV_R2(f) "r"(f.r[0]), "r"(f.r[1])
#define TRV_R4(f) TRV_R2(f), "r"(f.r[2]), "r"(f.r[3])
#define TRV_R8(f) TRV_R4(f), "r"(f.r[4]), "r"(f.r[5]), "r"(f.r[6]), "r"(f.r[7])
#define TRV_O2(f) "=r"(f.r[0]), "=r"(f.r[1])
#define TRV_O4(f) TRV_O2(f), "=r"(f.r[2]), "=r"(f.r[3])
#define TRV_O8(f) TRV_O4(f), "=r"(f.r[4]), "=r"(f.r[5]), "=r"(f.r[6]), "=r"(f.r[7])
#define TRV_T2 "{%0, %1}, [%2], %3;"
#define TRV_T4 "{%0, %1, %2, %3}, [%4], %5;"
#define TRV_T8 "{%0, %1, %2, %3, %4, %5, %6, %7}, [%8], %9;"
#define TRV_M2 "{%8, %9}, {%10, %11}, "
#define TRV_M4 "{%8, %9, %10, %11}, {%12, %13, %14, %15}, "
#define TRV_M8 "{%8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19, %20, %21, %22, %23}, "
#define TRV_D8 "{%0, %1, %2, %3, %4, %5, %6, %7}"
#define TRV_IO8(k, c) k(c.x[0]), k(c.x[1]), k(c.x[2]), k(c.x[3]), k(c.x[4]), k(c.x[5]), k(c.x[6]), k(c.x[7])
/* tc: kind; n: registers of A and of B; shape, in: of the loads; types: of mma; out, IN, INOUT: ptx type and constraints of results */
#define TRV_FRAGS(tc, col, layout, n, shape, in, types, out, IN, INOUT)                                                      \
  template <>                                                                                                                \
  struct frags<tc, col> {                                                                                                    \
    typedef tc::E E;                                                                                                         \
    struct A {                                                                                                               \
      u32 r[n];                                                                                                              \
    };                                                                                                                       \
    typedef A B;                                                                                                             \
    struct C {                                                                                                               \
      tc::C x[8];                                                                                                            \
    };                                                                                                                       \
    TRV_METHOD static void load_a(A& f, const E* p, int ld) {                                                                \
      asm volatile("wmma.load.a.sync.aligned.row." shape ".shared." in " " TRV_T##n                                          \
                   : TRV_O##n(f)                                                                                             \
                   : "r"(shared_address(p)), "r"(ld)                                                                         \
                   : "memory");                                                                                              \
    }                                                                                                                        \
    TRV_METHOD static void load_b(B& f, const E* p, int ld) {                                                                \
      asm volatile("wmma.load.b.sync.aligned." layout "." shape ".shared." in " " TRV_T##n                                   \
                   : TRV_O##n(f)                                                                                             \
                   : "r"(shared_address(p)), "r"(ld)                                                                         \
                   : "memory");                                                                                              \
    }                                                                                                                        \
    TRV_METHOD static void mma(C& c, const A& a, const B& b) {                                                               \
      asm volatile("wmma.mma.sync.aligned.row." layout "." shape "." types " " TRV_D8 ", " TRV_M##n TRV_D8 ";"               \
                   : TRV_IO8(INOUT, c)                                                                                       \
                   : TRV_R##n(a), TRV_R##n(b));                                                                              \
    }                                                                                                                        \
    TRV_METHOD static void store(tc::C* p, const C& c) {                                                                     \
      asm volatile("wmma.store.d.sync.aligned.row." shape ".shared." out " [%8], " TRV_D8 ", %9;"                            \
                   :                                                                                                         \
                   : TRV_IO8(IN, c), "r"(shared_address(p)), "r"(16)                                                         \
                   : "memory");                                                                                              \
      __syncwarp();                                                                                                          \
    }                                                                                                                        \
  };
#define TRV_F_IN(x) "f"(x)
#define TRV_F_IO(x) "+f"(x)
#define TRV_R_IN(x) "r"(x)
#define TRV_R_IO(x) "+r"(x)
#define TRV_FRAGS2(tc, n, shape, in, types, out, IN, INOUT)             \
  TRV_FRAGS(tc, false, "row", n, shape, in, types, out, IN, INOUT)      \
  TRV_FRAGS(tc, true, "col", n, shape, in, types, out, IN, INOUT)
TRV_FRAGS2(tc_f16, 8, "m16n16k16", "f16", "f32.f32", "f32", TRV_F_IN, TRV_F_IO)
TRV_FRAGS2(tc_i8, 2, "m16n16k16", "s8", "s32.s8.s8.s32", "s32", TRV_R_IN, TRV_R_IO)
#if __CUDA_ARCH__ >= 800
TRV_FRAGS2(tc_bf16, 4, "m16n16k16", "bf16", "f32.bf16.bf16.f32", "f32", TRV_F_IN, TRV_F_IO)
TRV_FRAGS2(tc_tf32, 4, "m16n16k8", "tf32", "f32.tf32.tf32.f32", "f32", TRV_F_IN, TRV_F_IO)
#endif
#endif

/* On tensor cores: a warp has WM x WN results. On a machine whose cores do not take the kind of number, plain arithmetic does it. */
template <class P, class TC, int BM, int BN, int BK, int WM, int WN>
TRV_DEVICE void gemm_tensor(const P& p) {
  typedef typename P::I I;
  typedef typename TC::E E;
  constexpr bool COL = !P::B_N;
  constexpr int THREADS = (BM / WM) * (BN / WN) * 32, LA = BK + TC::PAD, LB = (COL ? BK : BN) + TC::PAD;
  typedef frags<TC, COL> F;
  TRV_SHARED(pack_32<E>, raw_a, (BM * LA * sizeof(E) + 31) / 32);
  TRV_SHARED(pack_32<E>, raw_b, ((COL ? BN : BK) * LB * sizeof(E) + 31) / 32);
  TRV_SHARED(pack_32<typename TC::C>, raw_c, THREADS / 32 * 256 * 4 / 32);
  E* const sa = (E*)raw_a;
  E* const sb = (E*)raw_b;
  const I m0 = (I)blockIdx.y * BM, n0 = (I)blockIdx.x * BN;
  const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
  const int wm = warp / (BN / WN) * WM, wn = warp % (BN / WN) * WN;
  typename TC::C* const sc = (typename TC::C*)raw_c + warp * 256;
  typename F::C acc[WM / 16][WN / 16];
  TRV_UNROLL for (int i = 0; i < WM / 16; i++) TRV_UNROLL for (int j = 0; j < WN / 16; j++) TRV_UNROLL for (int e = 0; e < 8; e++)
      acc[i][j].x[e] = 0;
  tiles<P, BM, BN, BK, THREADS> t;
  t.read(p, m0, n0, p.kb);
  for (I k0 = p.kb; k0 < p.ke; k0 += BK) {
    __syncthreads();
    t.write([&](int m, int k, E v) { sa[m * LA + k] = staged<TC>(v); },
            [&](int k, int n, E v) { sb[COL ? n * LB + k : k * LB + n] = staged<TC>(v); });
    __syncthreads();
    if (k0 + BK < p.ke) t.read(p, m0, n0, k0 + BK);
    TRV_UNROLL for (int k = 0; k < BK; k += TC::KA) {
      typename F::A a[WM / 16];
      TRV_UNROLL for (int i = 0; i < WM / 16; i++) F::load_a(a[i], sa + (wm + i * 16) * LA + k, LA);
      TRV_UNROLL for (int j = 0; j < WN / 16; j++) {
        typename F::B b;
        F::load_b(b, sb + (COL ? (wn + j * 16) * LB + k : k * LB + wn + j * 16), LB);
        TRV_UNROLL for (int i = 0; i < WM / 16; i++) F::mma(acc[i][j], a[i], b);
      }
    }
  }
  __syncthreads();
  TRV_UNROLL for (int i = 0; i < WM / 16; i++) TRV_UNROLL for (int j = 0; j < WN / 16; j++) {
    F::store(sc, acc[i][j]);
    TRV_UNROLL for (int e = 0; e < 8; e++) {
      const int at = e * 32 + lane;
      const I m = m0 + wm + i * 16 + at / 16, n = n0 + wn + j * 16 + at % 16;
      if (m < p.M && n < p.N) p.store(m, n, sc[at]);
    }
    __syncwarp();
  }
}

/* Few rows: a warp sums up one column of B for all ROWS rows of A. Blocks: x over N / WARPS. */
template <class P, int ROWS, int WARPS>
TRV_DEVICE void gemm_few(const P& p) {
  typedef typename P::I I;
  typedef typename P::Acc S;
  const I n = (I)blockIdx.x * WARPS + (I)threadIdx.x / 32;
  const int lane = (int)threadIdx.x % 32;
  if (n >= p.N) return; /* a whole warp */
  S acc[ROWS];
  TRV_UNROLL for (int m = 0; m < ROWS; m++) acc[m] = 0;
  for (I k = p.kb + lane * P::VB; k < p.ke; k += 32 * P::VB) {
    typename P::TB b[P::VB];
    p.b(k, n, b);
    TRV_UNROLL for (int m = 0; m < ROWS; m++) {
      if (m >= p.M) break;
      typename P::TA a[P::VB];
      TRV_UNROLL for (int v = 0; v < P::VB; v += P::VA) p.a(m, k + v, a + v);
      TRV_UNROLL for (int v = 0; v < P::VB; v++) acc[m] = madd((S)up(a[v]), (S)up(b[v]), acc[m]);
    }
  }
  TRV_UNROLL for (int m = 0; m < ROWS; m++) {
    const S total = warp_all(acc[m], op_sum());
    if (lane == 0 && m < p.M) p.store(m, n, total);
  }
}
