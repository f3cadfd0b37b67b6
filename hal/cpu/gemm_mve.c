/* gemm_mve.c - tiles of gemm.h with Helium.
 *
 * Eight vector registers are few: three rows by eight columns take six for sums and two for
 * weights. Inner loops are assembly, as GCC 12 spills what it is given as vectors at this size;
 * numbers of x are the scalar operand of VFMA, which rounds once.
 */
#include "kernel.h"

#if TRVK_M_MVE_FLOAT
#include "gemm.h"

enum { ROWS = 3, COLS = 8 };

/* A row of x meets two vectors of weights. */
#define ROW(a, s0, s1) \
  "ldr %[x], [%[" a    \
  "]], #4\n"           \
  "vfma.f32 " s0       \
  ", q6, %[x]\n"       \
  "vfma.f32 " s1 ", q7, %[x]\n"
#define LOAD(i, at) "vldrw.32 q" i ", [%[sum], #" at "]\n"
#define STORE(i, at) "vstrw.32 q" i ", [%[sum], #" at "]\n"
#define WEIGHTS                \
  "vldrw.32 q6, [%[b]]\n"      \
  "vldrw.32 q7, [%[b], #16]\n" \
  "add %[b], %[b], %[bk]\n"

/* sum[m] += row m of x times eight columns of b, which are bk bytes apart along k. */
static void three(const float* const* a, const float* b, trv_dim bk, trv_dim k, float* sum) {
  const float *a0 = a[0], *a1 = a[1], *a2 = a[2];
  float x;
  __asm__ volatile(LOAD("0", "0") LOAD("1", "16") LOAD("2", "32") LOAD("3", "48") LOAD("4", "64")
                       LOAD("5", "80") "dls lr, %[k]\n1:" WEIGHTS ROW("a0", "q0", "q1")
                           ROW("a1", "q2", "q3") ROW("a2", "q4", "q5") "le lr, 1b\n" STORE("0", "0")
                               STORE("1", "16") STORE("2", "32") STORE("3", "48") STORE("4", "64")
                                   STORE("5", "80")
                   : [a0] "+r"(a0), [a1] "+r"(a1), [a2] "+r"(a2), [b] "+r"(b), [x] "=&r"(x)
                   : [bk] "r"(bk), [k] "r"(k), [sum] "r"(sum)
                   : "lr", "q0", "q1", "q2", "q3", "q4", "q5", "q6", "q7", "memory");
}
static void both(const float* const* a, const float* b, trv_dim bk, trv_dim k, float* sum) {
  const float *a0 = a[0], *a1 = a[1];
  float x;
  __asm__ volatile(LOAD("0", "0") LOAD("1", "16") LOAD("2", "32")
                       LOAD("3", "48") "dls lr, %[k]\n1:" WEIGHTS ROW("a0", "q0", "q1")
                           ROW("a1", "q2", "q3") "le lr, 1b\n" STORE("0", "0") STORE("1", "16")
                               STORE("2", "32") STORE("3", "48")
                   : [a0] "+r"(a0), [a1] "+r"(a1), [b] "+r"(b), [x] "=&r"(x)
                   : [bk] "r"(bk), [k] "r"(k), [sum] "r"(sum)
                   : "lr", "q0", "q1", "q2", "q3", "q6", "q7", "memory");
}
/* One row times sixteen columns. */
static void single(const float* a, trv_dim ak, const float* b, trv_dim bk, trv_dim k, float* sum) {
  float x;
  __asm__ volatile(LOAD("0", "0") LOAD("1", "16") LOAD("2", "32") LOAD("3", "48")
                   "dls lr, %[k]\n"
                   "1: ldr %[x], [%[a]]\n"
                   "vldrw.32 q4, [%[b]]\n"
                   "vldrw.32 q5, [%[b], #16]\n"
                   "vfma.f32 q0, q4, %[x]\n"
                   "vldrw.32 q6, [%[b], #32]\n"
                   "vfma.f32 q1, q5, %[x]\n"
                   "vldrw.32 q7, [%[b], #48]\n"
                   "vfma.f32 q2, q6, %[x]\n"
                   "add %[a], %[a], %[ak]\n"
                   "vfma.f32 q3, q7, %[x]\n"
                   "add %[b], %[b], %[bk]\n"
                   "le lr, 1b\n" STORE("0", "0") STORE("1", "16") STORE("2", "32") STORE("3", "48")
                   : [a] "+r"(a), [b] "+r"(b), [x] "=&r"(x)
                   : [ak] "r"(ak * 4), [bk] "r"(bk * 4), [k] "r"(k), [sum] "r"(sum)
                   : "lr", "q0", "q1", "q2", "q3", "q4", "q5", "q6", "q7", "memory");
}
#undef ROW
#undef LOAD
#undef STORE
#undef WEIGHTS

/* c[0..n] = clamp(sum + add), n a multiple of 4; add NULL: none. NaN stays. */
static void finish(float* c, const float* sum, const float* add, trv_dim n, float lo, float hi) {
  __asm__ volatile(
      "dls lr, %[n]\n"
      "1: vldrw.32 q0, [%[sum]], #16\n"
      "cbz %[add], 2f\n"
      "vldrw.32 q1, [%[add]], #16\n"
      "vadd.f32 q0, q0, q1\n"
      "2: vpt.f32 lt, q0, %[lo]\n"
      "vdupt.32 q0, %[lo]\n"
      "vpt.f32 gt, q0, %[hi]\n"
      "vdupt.32 q0, %[hi]\n"
      "vstrw.32 q0, [%[c]], #16\n"
      "le lr, 1b\n"
      : [c] "+r"(c), [sum] "+r"(sum), [add] "+l"(add)
      : [n] "r"(n / 4), [lo] "r"(lo), [hi] "r"(hi)
      : "lr", "q0", "q1", "memory");
}

static void begin(float* sum, const float* bias, trv_dim n) {
  for (trv_dim i = 0; i < n; i++) sum[i] = bias ? bias[i] : 0.0f;
}

static const float* added(const trvk_tile* t, trv_dim row) {
  if (t->accumulate == 0) return NULL;
  return t->accumulate == 1 ? t->c[row] + t->c_off : t->add[row] + t->add_off;
}

static void stream(const trvk_tile* t, trv_dim panels) {
  const float* const bias = t->accumulate == 1 ? NULL : t->bias;
  const float* add = added(t, 0);
  for (trv_dim p = 0; p < panels; p++) {
    float sum[TRVK_PANEL];
    begin(sum, bias ? bias + p * TRVK_PANEL : NULL, TRVK_PANEL);
    for (trv_dim tap = 0; tap < t->taps; tap++)
      if (t->kc > 0)
        single(t->rows[tap * t->row_step], t->ak, t->b[tap] + t->b_off + p * t->bp, t->bk, t->kc,
               sum);
    finish(t->c[0] + t->c_off + p * TRVK_PANEL, sum, add ? add + p * TRVK_PANEL : NULL, TRVK_PANEL,
           t->lo, t->hi);
  }
}

static void tile_1(const trvk_tile* t) { stream(t, 1); }

static void rows(const trvk_tile* t, trv_dim count) {
  const float* const bias = t->accumulate == 1 ? NULL : t->bias;
  if (t->ak != 1) { /* x by columns: rare */
    trvk_tile one = *t;
    for (trv_dim m = 0; m < count; m++, one.rows++, one.c++, one.add++) stream(&one, 1);
    return;
  }
  for (trv_dim col = 0; col < TRVK_PANEL; col += COLS) {
    float sum[ROWS * COLS];
    for (trv_dim m = 0; m < count; m++) begin(sum + m * COLS, bias ? bias + col : NULL, COLS);
    for (trv_dim tap = 0; tap < t->taps; tap++)
      if (t->kc > 0)
        (count == 3 ? three : both)(t->rows + tap * t->row_step, t->b[tap] + t->b_off + col,
                                    t->bk * 4, t->kc, sum);
    for (trv_dim m = 0; m < count; m++) {
      const float* add = added(t, m);
      finish(t->c[m] + t->c_off + col, sum + m * COLS, add ? add + col : NULL, COLS, t->lo, t->hi);
    }
  }
}

static void tile_2(const trvk_tile* t) { rows(t, 2); }
static void tile_3(const trvk_tile* t) { rows(t, 3); }
static void (*const tiles[ROWS])(const trvk_tile*) = {tile_1, tile_2, tile_3};

static trvk_gemm gemm_of(void) {
  trvk_gemm g = trvk_gemm_ref;
  g.mr = ROWS;
  g.np = 1;
  g.tile[0] = tiles;
  g.stream = stream;
  return g;
}

void trvk_matmul__mve(const trvk_call* call, uint32_t tile) {
  const trvk_gemm g = gemm_of();
  trvk_matmul_run(call, tile, &g, NULL);
}
void trvk_conv__mve(const trvk_call* call, uint32_t tile) {
  const trvk_gemm g = gemm_of();
  trvk_conv_run(call, tile, &g, NULL);
}
#endif
