/* qweight.c - weights of 8 and 4 bits: packing, panels for the integer product, floats for the
 * other.
 *
 * Packed layouts (private to this folder), panels of 16 columns, padded with what counts as 0:
 *   8 bits       [N / 16] of { [ceil(K / 4)][16][4] i8, then [16] i32: each column's sum over K }
 *   4 bits       [N / 16] of [ceil(K / 8)][16][4] bytes: byte j of a column holds k = j in its low
 *                nibble and k = j + 4 in its high one
 *   qconv        per group the first, K = taps * channels (rounded up to 4, innermost)
 *   depthwise    [taps][channels out, rounded up to 16] i8
 * Sums are little-endian, as the file and every machine that opens it. Four numbers of a column lie
 * together for the sake of dot-product instructions; the sums let those take A unsigned or with its
 * zero point.
 */
#include "convert.h"
#include "qgemm.h"
#if defined(__SSE2__) && !defined(TRVK_PLAIN_C)
#include <emmintrin.h>
#endif

/* ---- sizes ---- */
size_t trvk_q_packed_bytes(trv_dim k, trv_dim n, int bits) {
  if (k < 1 || n < 1 || k > TRVK_Q_MOST || n > TRVK_Q_MOST) return 0;
  const trv_dim panel = trvk_q_panel_bytes(k, bits), panels = trvk_panels(n);
  return panels > PTRDIFF_MAX / 64 / panel ? 0 : (size_t)(panels * panel);
}

int trvk_q_packed_ok(const trv_tensor* t, size_t bytes) {
  return (t->dtype == TRV_DTYPE_U8 || t->dtype == TRV_DTYPE_I8) && t->rank == 1 && t->dim[0] >= 0 &&
         (t->stride[0] == 1 || t->dim[0] <= 1) && (size_t)t->dim[0] == bytes;
}

/* ---- panels ---- */
static void unpack4(int8_t* dst, const uint8_t* src, trv_dim octets) {
  for (; octets > 0; octets--, src += 64, dst += 128)
    for (int i = 0; i < 64; i++) {
      dst[i] = (int8_t)(src[i] & 15);
      dst[64 + i] = (int8_t)(src[i] >> 4);
    }
}

/* Whole quads of 16 columns, by vectors where the machine has them. */
#if defined(__SSE2__) && !defined(TRVK_PLAIN_C)
static inline __m128i load16(const uint8_t* p) { return _mm_loadu_si128((const __m128i*)p); }
static inline void store16(int8_t* p, __m128i v) { _mm_storeu_si128((__m128i*)p, v); }

/* Columns along K: 4 quads at a time, words of 4 columns turned. Returns how many. */
static trv_dim turn_words(int8_t* dst, const uint8_t* src, trv_dim n_step, trv_dim quads) {
  trv_dim q = 0;
  for (; q + 4 <= quads; q += 4, dst += 256, src += 16)
    for (int j = 0; j < TRVK_PANEL; j += 4) {
      const uint8_t* s = src + j * n_step;
      const __m128i a = load16(s), b = load16(s + n_step), c = load16(s + 2 * n_step),
                    d = load16(s + 3 * n_step);
      const __m128i ab = _mm_unpacklo_epi32(a, b), ab2 = _mm_unpackhi_epi32(a, b),
                    cd = _mm_unpacklo_epi32(c, d), cd2 = _mm_unpackhi_epi32(c, d);
      store16(dst + 4 * j, _mm_unpacklo_epi64(ab, cd));
      store16(dst + 64 + 4 * j, _mm_unpackhi_epi64(ab, cd));
      store16(dst + 128 + 4 * j, _mm_unpacklo_epi64(ab2, cd2));
      store16(dst + 192 + 4 * j, _mm_unpackhi_epi64(ab2, cd2));
    }
  return q;
}
/* Rows along N: the numbers of 4 rows by turns. */
static trv_dim weave_rows(int8_t* dst, const uint8_t* src, trv_dim k_step, trv_dim quads) {
  for (trv_dim q = 0; q < quads; q++, dst += 64, src += 4 * k_step) {
    const __m128i a = load16(src), b = load16(src + k_step), c = load16(src + 2 * k_step),
                  d = load16(src + 3 * k_step);
    const __m128i ab = _mm_unpacklo_epi8(a, b), ab2 = _mm_unpackhi_epi8(a, b),
                  cd = _mm_unpacklo_epi8(c, d), cd2 = _mm_unpackhi_epi8(c, d);
    store16(dst, _mm_unpacklo_epi16(ab, cd));
    store16(dst + 16, _mm_unpackhi_epi16(ab, cd));
    store16(dst + 32, _mm_unpacklo_epi16(ab2, cd2));
    store16(dst + 48, _mm_unpackhi_epi16(ab2, cd2));
  }
  return quads;
}
#else
static trv_dim turn_words(int8_t* dst, const uint8_t* src, trv_dim n_step, trv_dim quads) {
  for (trv_dim q = 0; q < quads; q++, dst += 64, src += 4)
    for (trv_dim j = 0; j < TRVK_PANEL; j++) memcpy(dst + 4 * j, src + j * n_step, 4);
  return quads;
}
static trv_dim weave_rows(int8_t* dst, const uint8_t* src, trv_dim k_step, trv_dim quads) {
  for (trv_dim q = 0; q < quads; q++, dst += 64, src += 4 * k_step)
    for (int j = 0; j < TRVK_PANEL; j++)
      for (int t = 0; t < 4; t++) dst[4 * j + t] = (int8_t)src[j + t * k_step];
  return quads;
}
#endif

/* A plain weight's numbers, 4 bits masked so that both forms agree about bytes that break the rule.
 */
static void copy_plain(int8_t* dst, const uint8_t* src, trv_dim k_step, trv_dim n_step, trv_dim k,
                       trv_dim n, uint8_t mask) {
  const trv_dim quads = trvk_round4(k) / 4;
  int8_t* const all = dst;
  trv_dim q = 0;
  if (n < TRVK_PANEL || k % 4) memset(dst, 0, (size_t)quads * 64);
  if (n == TRVK_PANEL && k_step == 1)
    q = turn_words(dst, src, n_step, k / 4);
  else if (n == TRVK_PANEL && n_step == 1)
    q = weave_rows(dst, src, k_step, k / 4);
  for (dst += 64 * q, src += 4 * q * k_step; q < quads; q++, dst += 64, src += 4 * k_step) {
    const trv_dim left = k - 4 * q < 4 ? k - 4 * q : 4;
    for (trv_dim j = 0; j < n; j++)
      for (trv_dim t = 0; t < left; t++) dst[4 * j + t] = (int8_t)src[j * n_step + t * k_step];
  }
  if (mask != 0xFF)
    for (trv_dim i = 0; i < quads * 64; i++) all[i] = (int8_t)(all[i] & mask);
}

const int8_t* trvk_q_panel(const trvk_qweight* w, const uint8_t* b, trv_dim k0, trv_dim kc,
                           trv_dim col, trv_dim n, int8_t* buffer) {
  if (!w->packed) {
    copy_plain(buffer, b + k0 * w->k_step + col * w->n_step, w->k_step, w->n_step, kc, n,
               w->bits == 4 ? 15 : 0xFF);
    return buffer;
  }
  b += col / TRVK_PANEL * w->panel;
  if (w->bits != 4) return (const int8_t*)b + k0 * TRVK_PANEL;
  unpack4(buffer, b + k0 * (TRVK_PANEL / 2),
          (kc + 7) / 8);           /* chunks but the last have whole ones */
  for (trv_dim k = kc; k % 4; k++) /* it ends with numbers that count as 0, but are not 0 */
    for (int j = 0; j < TRVK_PANEL; j++) buffer[k / 4 * 64 + j * 4 + k % 4] = 0;
  return buffer;
}

void trvk_q_scales(const trv_tensor* t, trv_dim g, trv_dim col, trv_dim n, float* dst) {
  const trv_dim step = t->dim[t->rank - 1] == 1 ? 0 : t->stride[t->rank - 1];
  const trv_dim at = (t->rank == 2 ? g * t->stride[0] : 0) + col * step;
  if (t->dtype == TRV_DTYPE_F32) {
    const float* s = (const float*)(const void*)t->data + at;
    if (step == 1)
      memcpy(dst, s, (size_t)n * sizeof *s);
    else
      for (trv_dim i = 0; i < n; i++) dst[i] = s[i * step];
  } else {
    const uint16_t* s = (const uint16_t*)(const void*)t->data + at;
    for (trv_dim i = 0; i < n; i++) dst[i] = trvk_half_to_float(s[i * step]);
  }
  for (trv_dim i = n; i < TRVK_PANEL; i++) dst[i] = 0.0f;
}

int trvk_q_by_columns(const trv_tensor* t) {
  return t == NULL || t->dim[t->rank - 1] == 1 || t->stride[t->rank - 1] == 1;
}

const uint8_t* trvk_q_columns(const trv_tensor* t, trv_dim col, trv_dim n, float* buffer,
                              trv_dim* row, int* half) {
  const trv_dim size = (trv_dim)trv_dtype_size(t->dtype);
  *half = 0;
  *row = 0;
  if (t->rank == 1 && t->dim[0] == 1) {
    trvk_q_scales(t, 0, 0, 1, buffer);
    for (trv_dim j = 1; j < n; j++) buffer[j] = buffer[0];
    return (const uint8_t*)buffer;
  }
  *half = t->dtype == TRV_DTYPE_F16;
  if (t->rank == 2) *row = t->stride[0] * size;
  return t->data + col * size;
}

int trvk_q_scale_ok(const trv_tensor* t, trv_dim k, trv_dim n, trv_dim group) {
  if (t->dtype != TRV_DTYPE_F32 && t->dtype != TRV_DTYPE_F16) return 0;
  if (group == 0) return t->rank == 1 && (t->dim[0] == n || t->dim[0] == 1);
  return t->rank == 2 && t->dim[1] == n && t->dim[0] == k / group + (k % group != 0);
}

#define TRVK_Q_FLOATS void trvk_q_floats
#include "qfloats.inc"
