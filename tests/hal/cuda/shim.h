/* shim.h - CUDA kernels of trivet as ordinary C++: the threads of a block are fibers that take turns on one host thread.
 *
 * A module is one source of generated kernels compiled with TRV_SHIM defined. trv_shim_launch runs one kernel. Checked while it runs:
 * every thread of a block arrives at the same __syncthreads, every lane of the mask at the same warp operation; nobody waits for a
 * thread that has ended. Lanes run in an order that changes from launch to launch, shared memory is new and full of 0xFF for every
 * block and as large as declared, so AddressSanitizer sees what is out of its bounds and a missing barrier shows.
 */
#ifndef TRV_SHIM_H
#define TRV_SHIM_H
#include <setjmp.h>
#include <sys/mman.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#define TRV_DEVICE static inline __attribute__((unused))
#define TRV_METHOD inline
#define TRV_UNROLL
#define TRV_UNROLL4
#define TRV_SHARED(T, name, n)                                      \
  static const char trv_key_##name = 0;                             \
  T* const name = (T*)trv_shim::shared(&trv_key_##name, sizeof(T) * (size_t)(n))
template <int N>
struct trv_words {
  long long w[N];
};
#define TRV_KERNEL(name, words, threads)                                                   \
  static void name##_body(const trv_words<words>& trv_args);                               \
  static void name##_run(const long long* w) { name##_body(*(const trv_words<words>*)w); } \
  extern "C" __attribute__((visibility("default"))) const trv_shim::kernel name;                                                 \
  const trv_shim::kernel name = {name##_run, words, threads};                              \
  static void name##_body(const trv_words<words>& trv_args)
#define TRV_ARGS const long long* const w = trv_args.w

struct dim3 {
  unsigned x, y, z;
};

namespace trv_shim {
struct kernel {
  void (*run)(const long long*);
  int words, threads;
};

enum { READY, BLOCK, WARP, DONE };
struct fiber {
  void* sp;
  char* stack;
  int state, parity;
  const void* site;
  unsigned mask;
  void* fake; /* AddressSanitizer's */
  unsigned char slot[2][16];
  const void* pointer[2][3];
};
constexpr size_t STACK = 256 << 10;
constexpr int MOST = 1024;

struct world {
  fiber fibers[MOST];
  void* main_sp;
  int count, current;
  unsigned random;
  dim3 grid, block, at;
  const long long* words;
  void (*run)(const long long*);
  const char* name;
  std::map<const void*, void*> memory;
  void* main_fake;
  const void* main_stack;
  size_t main_size;
};
static thread_local world* me;

[[noreturn]] inline void fail(const char* what) {
  fprintf(stderr, "cuda shim: kernel %s, block %u %u %u, thread %d: %s\n", me->name, me->at.x, me->at.y, me->at.z, me->current, what);
  fflush(stderr);
  abort();
}

#if defined(__x86_64__)
extern "C" void trv_shim_swap(void** save, void* to);
asm(".text\n.p2align 4\n.weak trv_shim_swap\n.type trv_shim_swap,@function\ntrv_shim_swap:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp, (%rdi)\nmovq %rsi, %rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nretq\n.size trv_shim_swap,.-trv_shim_swap\n");
#elif defined(__aarch64__)
extern "C" void trv_shim_swap(void** save, void* to);
asm(".text\n.p2align 4\n.weak trv_shim_swap\n.type trv_shim_swap,%function\ntrv_shim_swap:\n"
    "sub sp, sp, #160\nstp x19, x20, [sp]\nstp x21, x22, [sp, #16]\nstp x23, x24, [sp, #32]\nstp x25, x26, [sp, #48]\n"
    "stp x27, x28, [sp, #64]\nstp x29, x30, [sp, #80]\nstp d8, d9, [sp, #96]\nstp d10, d11, [sp, #112]\nstp d12, d13, [sp, #128]\n"
    "stp d14, d15, [sp, #144]\nmov x9, sp\nstr x9, [x0]\nmov sp, x1\n"
    "ldp x19, x20, [sp]\nldp x21, x22, [sp, #16]\nldp x23, x24, [sp, #32]\nldp x25, x26, [sp, #48]\n"
    "ldp x27, x28, [sp, #64]\nldp x29, x30, [sp, #80]\nldp d8, d9, [sp, #96]\nldp d10, d11, [sp, #112]\nldp d12, d13, [sp, #128]\n"
    "ldp d14, d15, [sp, #144]\nadd sp, sp, #160\nret\n.size trv_shim_swap,.-trv_shim_swap\n");
#else
#error "the shim switches fibers on x86-64 and arm64"
#endif

inline void to_main() {
  fiber& f = me->fibers[me->current];
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(f.state == DONE ? nullptr : &f.fake, me->main_stack, me->main_size);
#endif
  trv_shim_swap(&f.sp, me->main_sp);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(f.fake, nullptr, nullptr);
#endif
}

inline void enter() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &me->main_stack, &me->main_size);
#endif
  me->run(me->words);
  me->fibers[me->current].state = DONE;
  to_main();
  abort();
}

inline void resume(int i) {
  me->current = i;
  fiber& f = me->fibers[i];
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&me->main_fake, f.stack, STACK);
#endif
  trv_shim_swap(&me->main_sp, f.sp);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(me->main_fake, nullptr, nullptr);
#endif
}

inline void begin(fiber& f) {
  if (!f.stack) {
    f.stack = (char*)mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (f.stack == MAP_FAILED) abort();
  }
  void** top = (void**)(f.stack + STACK);
#if defined(__x86_64__)
  top -= 1; /* as after a call: 16-byte aligned + 8 */
  *--top = (void*)enter;
  top -= 6;
#else
  top -= 20;
  top[11] = (void*)enter;
#endif
  f.sp = top;
  f.state = READY;
  f.parity = 0;
}

inline unsigned next_random() { return me->random = me->random * 1664525u + 1013904223u; }

inline void release_warps(bool& some) {
  for (int w = 0; w < me->count; w += 32) {
    const int lanes = me->count - w < 32 ? me->count - w : 32;
    for (int l = 0; l < lanes; l++) {
      fiber& f = me->fibers[w + l];
      if (f.state != WARP) continue;
      bool all = true;
      for (int k = 0; k < lanes && all; k++) {
        fiber& g = me->fibers[w + k];
        if (f.mask >> k & 1) all = g.state == WARP && g.site == f.site && g.mask == f.mask;
      }
      if (!all) continue;
      const unsigned mask = f.mask;
      for (int k = 0; k < lanes; k++)
        if (mask >> k & 1) me->fibers[w + k].state = READY;
      some = true;
    }
  }
}

inline void run_block() {
  int order[MOST];
  for (int i = 0; i < me->count; i++) {
    begin(me->fibers[i]);
    order[i] = i;
  }
  for (int i = me->count - 1; i > 0; i--) {
    const int j = (int)((next_random() >> 8) % (unsigned)(i + 1)), t = order[i];
    order[i] = order[j];
    order[j] = t;
  }
  for (;;) {
    int done = 0, waiting = 0;
    for (int k = 0; k < me->count; k++) {
      fiber& f = me->fibers[order[k]];
      if (f.state == READY) resume(order[k]);
    }
    for (int i = 0; i < me->count; i++) {
      done += me->fibers[i].state == DONE;
      waiting += me->fibers[i].state == BLOCK;
    }
    if (done == me->count) break;
    bool some = false;
    release_warps(some);
    if (some) continue;
    if (waiting == me->count) {
      for (int i = 1; i < me->count; i++)
        if (me->fibers[i].site != me->fibers[0].site) fail("threads wait at different barriers");
      for (int i = 0; i < me->count; i++) me->fibers[i].state = READY;
      continue;
    }
    fail(waiting ? "a barrier that not all threads reach" : "a warp operation that not all lanes of its mask reach");
  }
}

inline void* shared(const void* key, size_t size) {
  void*& p = me->memory[key];
  if (!p) {
    p = aligned_alloc(64, (size + 63) / 64 * 64);
    if (!p) abort();
    memset(p, 0xFF, size);
  }
  return p;
}

inline void wait_block(const void* site) {
  fiber& f = me->fibers[me->current];
  f.state = BLOCK;
  f.site = site;
  to_main();
}
inline void wait_warp(unsigned mask, const void* site) {
  fiber& f = me->fibers[me->current];
  if (!(mask >> (me->current & 31) & 1)) fail("a lane takes part that its mask does not name");
  const unsigned live = me->count - (me->current & ~31) >= 32 ? 0xFFFFFFFFu : (1u << (me->count & 31)) - 1;
  if (mask & ~live) fail("a mask names lanes that do not exist");
  f.state = WARP;
  f.site = site;
  f.mask = mask;
  f.parity ^= 1;
  to_main();
}

template <class T>
inline T exchange(unsigned mask, T v, int from, const void* site) {
  static_assert(sizeof(T) <= 16, "a shuffle moves at most 16 bytes");
  fiber& f = me->fibers[me->current];
  memcpy(f.slot[f.parity ^ 1], &v, sizeof v);
  wait_warp(mask, site);
  const int base = me->current & ~31;
  if (from < 0 || from > 31 || !(mask >> from & 1)) fail("a shuffle reads a lane that its mask does not name");
  T out;
  memcpy(&out, me->fibers[base + from].slot[f.parity], sizeof out);
  return out;
}
template <class T>
inline T shuffle(unsigned mask, T v, int from, int fallback, const void* site) {
  const int lane = me->current & 31;
  (void)fallback;
  return exchange(mask, v, from < 0 || from > 31 ? lane : from, site);
}
inline unsigned ballot(unsigned mask, bool v, const void* site) {
  fiber& f = me->fibers[me->current];
  f.slot[f.parity ^ 1][0] = v;
  wait_warp(mask, site);
  unsigned out = 0;
  for (int l = 0; l < 32; l++)
    if (mask >> l & 1) out |= (unsigned)me->fibers[(me->current & ~31) + l].slot[f.parity][0] << l;
  return out;
}

struct here { /* threadIdx and its like: read from the running fiber */
  static dim3 thread() {
    const unsigned t = (unsigned)me->current;
    return {t % me->block.x, t / me->block.x % me->block.y, t / me->block.x / me->block.y};
  }
};
}  // namespace trv_shim

#define threadIdx (trv_shim::here::thread())
#define blockIdx (trv_shim::me->at)
#define blockDim (trv_shim::me->block)
#define gridDim (trv_shim::me->grid)
#define TRV_SITE                      \
  ([]() -> const void* {              \
    static const char site = 0;       \
    return &site;                     \
  }())
#define __syncthreads() trv_shim::wait_block(TRV_SITE)
#define __syncwarp() trv_shim::wait_warp(0xFFFFFFFFu, TRV_SITE)
#define __shfl_sync(m, v, l) trv_shim::exchange(m, v, (l)&31, TRV_SITE)
#define __shfl_xor_sync(m, v, s) trv_shim::shuffle(m, v, (trv_shim::me->current & 31) ^ (s), 0, TRV_SITE)
#define __shfl_up_sync(m, v, s) trv_shim::shuffle(m, v, (trv_shim::me->current & 31) - (int)(s), 0, TRV_SITE)
#define __shfl_down_sync(m, v, s) trv_shim::shuffle(m, v, (trv_shim::me->current & 31) + (int)(s), 0, TRV_SITE)
#define __ballot_sync(m, v) trv_shim::ballot(m, v, TRV_SITE)

static inline float __int_as_float(int x) {
  float f;
  memcpy(&f, &x, 4);
  return f;
}
static inline int __float_as_int(float x) {
  int i;
  memcpy(&i, &x, 4);
  return i;
}
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 32; i += 8) c += (int)(signed char)(a >> i) * (signed char)(b >> i);
  return c;
}
static inline float trv_shim_half(unsigned short h) {
  const uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exp = (h >> 10) & 31u, man = h & 1023u;
  if (exp == 0) {
    const float f = (float)man * 5.9604644775390625e-8f;
    return sign ? -f : f;
  }
  return __int_as_float((int)(sign | (exp == 31 ? 0x7F800000u : (exp + 112u) << 23) | man << 13));
}
static inline unsigned short trv_shim_to_half(float f) {
  const uint32_t u = (uint32_t)__float_as_int(f), sign = (u >> 16) & 0x8000u, a = u & 0x7FFFFFFFu;
  if (a > 0x7F800000u) return (unsigned short)(sign | 0x7E00u);
  if (a >= 0x477FF000u) return (unsigned short)(sign | 0x7C00u);
  if (a < 0x38800000u) return (unsigned short)(sign | (uint32_t)rint((double)__int_as_float((int)a) * 16777216.0));
  return (unsigned short)(sign | ((a + 0xC8000FFFu + ((a >> 13) & 1u)) >> 13));
}

/* ---- tensor cores: a fragment is spread over the lanes, element i in lane i / 8 (or / 4) ---- */
namespace trv_shim {
template <class E, int COUNT>
struct frag {
  E x[COUNT / 32];
};
template <class E, int COUNT>
inline void spread(frag<E, COUNT>& f, const E* p, int ld, int cols, bool transposed, const void* site) {
  const int lane = me->current & 31, n = COUNT / 32;
  wait_warp(0xFFFFFFFFu, site);
  for (int i = 0; i < n; i++) {
    const int e = lane * n + i, r = e / cols, c = e % cols;
    f.x[i] = transposed ? p[c * ld + r] : p[r * ld + c];
  }
}
template <class C, class A, class B, int KA, class F>
inline void mma(C& c, const A& a, const B& b, F product, const void* site) {
  fiber& f = me->fibers[me->current];
  f.pointer[f.parity ^ 1][0] = &a;
  f.pointer[f.parity ^ 1][1] = &b;
  wait_warp(0xFFFFFFFFu, site);
  const int base = me->current & ~31, lane = me->current & 31, p = f.parity, per = 16 * KA / 32;
  C out = c;
  for (int i = 0; i < 8; i++) {
    const int row = (lane * 8 + i) / 16, col = (lane * 8 + i) % 16;
    for (int k = 0; k < KA; k++) {
      const int ea = row * KA + k, eb = k * 16 + col;
      out.x[i] += product(((const A*)me->fibers[base + ea / per].pointer[p][0])->x[ea % per],
                          ((const B*)me->fibers[base + eb / per].pointer[p][1])->x[eb % per]);
    }
  }
  wait_warp(0xFFFFFFFFu, site);
  c = out;
}
}  // namespace trv_shim

extern "C" __attribute__((visibility("default"))) int trv_shim_launch(const trv_shim::kernel* k, const char* name, const unsigned* grid,
                                                                       unsigned threads, const long long* words) {
  using namespace trv_shim;
  static thread_local world* mine = nullptr;
  if ((int)threads != k->threads || threads > (unsigned)MOST || threads % 32) return 1;
  if (!mine) {
    mine = new world();
    mine->random = 12345;
  }
  me = mine;
  me->name = name;
  me->words = words;
  me->run = k->run;
  me->count = (int)threads;
  me->block = {threads, 1, 1};
  me->grid = {grid[0], grid[1], grid[2]};
  for (unsigned z = 0; z < grid[2]; z++)
    for (unsigned y = 0; y < grid[1]; y++)
      for (unsigned x = 0; x < grid[0]; x++) {
        me->at = {x, y, z};
        run_block();
        for (auto& m : me->memory) free(m.second);
        me->memory.clear();
      }
  return 0;
}
#endif
