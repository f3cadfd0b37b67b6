/* layers.c - runs commands one by one on a microcontroller, compares their results with those that
 * came with them, and counts instructions.
 *
 * layers.py makes the file of cases (little-endian words, data 16-byte aligned). Time is SysTick
 * under QEMU's -icount shift=0: what a tick is worth is measured by a loop of known length. The
 * checks of each command run too, uncounted.
 */
#include <stdio.h>

#include "mcu.h"

#if TRVK_M_MVE
#define LEVEL(op) trvk_##op##__mve
#define BEST(match, ref, mve) (trvk_is_##match(call) ? mve : ref)
#elif TRVK_M_DSP
#define LEVEL(op) trvk_##op##__dsp
#else
#define LEVEL(op) trvk_##op##__ref
#endif
#ifndef BEST
#define BEST(match, ref, mve) ref
#endif

#if TRVK_M_DSP
#define REAL trvk_qmatmul_rows_real__dsp
#else
#define REAL trvk_qmatmul_rows_real__ref
#endif

extern const uint32_t cases[];

#define SYST ((volatile uint32_t*)0xE000E010u)
static uint32_t ticks(void) { return 0xFFFFFFu - SYST[2]; }

__attribute__((naked, noinline)) static void loop(uint32_t n) { /* 2 n instructions and a few */
  (void)n;
  __asm__ volatile(".syntax unified\n1: subs r0, #1\n bne 1b\n bx lr\n");
}

typedef struct kernel {
  const char* (*check)(const trvk_call*, int64_t*, int64_t*);
  trvk_fn run;
} kernel;

static kernel kernel_of(uint32_t op, const trvk_call* call) {
  (void)call;
  switch (op) {
    case TRV_OP_QCONV:
      return (kernel){trvk_mcu_conv_check, LEVEL(qconv_rows)};
    case TRV_OP_QMATMUL:
      return (kernel){trvk_mcu_matmul_check,
                      trvk_is_matmul_rows_real(call) ? REAL : LEVEL(qmatmul_rows)};
    case TRV_OP_BINARY:
      return (kernel){trvk_binary_check, BEST(sum_i8, trvk_binary__ref, trvk_sum_i8__mve)};
    case TRV_OP_QPOOL:
      return (kernel){trvk_qpool_check, BEST(any, trvk_qpool_i8__ref, trvk_qpool_i8__mve)};
    case TRV_OP_QREDUCE:
      return (kernel){trvk_qreduce_check, BEST(i8, trvk_qreduce_i8__ref, trvk_qreduce_i8__mve)};
    case TRV_OP_POOL:
      return (kernel){trvk_pool_check, BEST(any, trvk_pool_i8__ref, trvk_pool_i8__mve)};
    case TRV_OP_QSOFTMAX:
      return (kernel){trvk_qsoftmax_check, trvk_qsoftmax_m__ref};
    case TRV_OP_LOOKUP:
      return (kernel){trvk_lookup_check, BEST(bytes, trvk_lookup__ref, trvk_lookup_i8__mve)};
    case TRV_OP_REQUANTIZE:
      return (kernel){trvk_requantize_check,
                      BEST(real_i8, trvk_requantize__ref, trvk_requantize_real__mve)};
#if defined(LAYERS_FLOAT)
    case TRV_OP_MATMUL:
      return (kernel){trvk_matmul_check, BEST(any, trvk_matmul__ref, trvk_matmul__mve)};
    case TRV_OP_CONV:
      return (kernel){trvk_conv_check, BEST(any, trvk_conv__ref, trvk_conv__mve)};
#endif
    default:
      return (kernel){NULL, NULL};
  }
}

/* Floats may differ by rounding. */
static int equal(uint32_t dtype, const uint8_t* got, const uint8_t* want, size_t bytes) {
  if (dtype != TRV_DTYPE_F32) return memcmp(got, want, bytes) == 0;
  for (size_t i = 0; i < bytes; i += 4) {
    float a, b;
    memcpy(&a, got + i, 4);
    memcpy(&b, want + i, 4);
    if (!(fabsf(a - b) <= 1e-5f * (1.0f + fabsf(b))) && !(isnan(a) && isnan(b))) return 0;
  }
  return 1;
}

static uint8_t memory[1 << 18] __attribute__((aligned(16)));

/* dtype, rank, dims[5], strides[5] (elements), bytes of its storage, offset of its data in the file
 * or 0. */
enum { TENSOR = 14 };

static const uint32_t* tensor_of(const uint32_t* at, trv_tensor* t, size_t* used) {
  memset(t, 0, sizeof *t);
  t->dtype = (uint8_t)at[0];
  t->rank = (uint8_t)at[1];
  for (uint32_t i = 0; i < at[1]; i++) {
    t->dim[i] = (trv_dim)(int32_t)at[2 + i];
    t->stride[i] = (trv_dim)(int32_t)at[7 + i];
  }
  if (at[13]) {
    t->data = (uint8_t*)(uintptr_t)((const uint8_t*)cases + at[13]);
  } else if (at[0]) {
    t->data = memory + *used;
    *used += (at[12] + 15) / 16 * 16;
  }
  return at + TENSOR;
}

/* Bytes of the stack below `top` that were written since they were painted. */
enum { STACK = 6144 };
static void paint(volatile uint8_t* top) {
  for (uint32_t i = 1; i <= STACK; i++) top[-(int32_t)i] = 0xA5;
}
static uint32_t painted(const volatile uint8_t* top) {
  uint32_t most = STACK;
  while (most > 0 && top[-(int32_t)most] == 0xA5) most--;
  return most;
}

int main(void) {
  int bad = 0;
  SYST[1] = 0xFFFFFF;
  SYST[2] = 0;
  SYST[0] = 5; /* the core's clock, no interrupt */
  loop(1000);  /* the counter takes its first value */
  uint32_t begin = ticks();
  loop(2000000);
  const uint32_t span = ticks() - begin;
  printf("tick %lu\n", (unsigned long)(4000000u * 100u / span)); /* hundredths of an instruction */
  const uint32_t* at = cases + 1;
  for (uint32_t i = 0; i < cases[0]; i++) {
    /* op, inputs, outputs, scratch, offset of attributes, of the name, of the result, its bytes */
    const uint32_t* head = at;
    trv_tensor args[8];
    uint32_t fault = 0;
    size_t used = 0;
    at += 8;
    for (uint32_t k = 0; k < head[1] + head[2] + head[3]; k++) at = tensor_of(at, &args[k], &used);
    const uint8_t* file = (const uint8_t*)cases;
    const char* name = (const char*)file + head[5];
    const trvk_call call = {.in = args,
                            .out = args + head[1],
                            .tmp = args + head[1] + head[2],
                            .attrs = file + head[4],
                            .fault = &fault,
                            .tiles = 1,
                            .n_in = (uint8_t)head[1],
                            .n_out = (uint8_t)head[2],
                            .n_tmp = (uint8_t)head[3]};
    const kernel k = kernel_of(head[0], &call);
    int64_t expected = 0, got = 0;
    const char* what = k.run == NULL || used > sizeof memory ? "no kernel, or too large"
                                                             : k.check(&call, &expected, &got);
    if (what) {
      printf("%s refused %s (%ld, %ld)\n", name, what, (long)expected, (long)got);
      bad = 1;
      continue;
    }
    memset(memory, 0x55, sizeof memory);
    uint32_t sp;
    __asm__ volatile("mov %0, sp" : "=r"(sp));
    volatile uint8_t* const top = (volatile uint8_t*)(uintptr_t)sp;
    paint(top - 128); /* room for paint itself */
    begin = ticks();
    k.run(&call, 0);
    uint32_t took = (ticks() - begin) * 32;
    const uint32_t stack = painted(top - 128) + 128;
    const int same = equal(call.out[0].dtype, call.out[0].data, file + head[6], head[7]);
    if (!same) bad = 1;
    if (took < 32 * 256) { /* too few ticks for a figure: the mean of many */
      begin = ticks();
      for (int n = 0; n < 32; n++) k.run(&call, 0);
      took = ticks() - begin;
    }
    printf("%s %lu %lu %s\n", name, (unsigned long)took, (unsigned long)stack,
           same ? "ok" : "WRONG");
    if (!same)
      for (uint32_t b = 0, n = 0; b < head[7] && n < 8; b++)
        if (call.out[0].data[b] != file[head[6] + b]) {
          printf("  %lu: %d, not %d\n", (unsigned long)b, (int8_t)call.out[0].data[b],
                 (int8_t)file[head[6] + b]);
          n++;
        }
  }
  return bad;
}
