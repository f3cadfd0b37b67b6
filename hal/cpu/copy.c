/* copy.c - a strided move. Long rows that are dense on both sides are copied whole; everything else
 * goes in square blocks of the two axes along which output and input are densest, so that
 * transposing touches each cache line a few times. */
#include "ops.h"
#include "walk.h"

#define BLOCK 32

const char* trvk_copy_check(const trvk_call* call, int64_t* expected, int64_t* got) {
  const trv_tensor *x = call->in, *y = call->out;
  if (x->dtype != y->dtype)
    return trvk_fail(TRVK_SAY("dtypes differ"), x->dtype, y->dtype, expected, got);
  if (!trvk_same_shape(x, y))
    return trvk_fail(TRVK_SAY("shapes differ"), (int64_t)trvk_count(x), (int64_t)trvk_count(y),
                     expected, got);
  return NULL;
}

uint32_t trvk_copy_tiles(const trvk_call* call, uint32_t workers) {
  const trv_dim n = trvk_count(call->out);
  return trvk_tiles(n, n / 1024, workers);
}

/* out[j][i] = in[j][i] for a plane, in blocks. */
#define PLANE(T)                                                                    \
  static void plane_##T(T* out, const T* in, const trv_dim* dim, const trv_dim* os, \
                        const trv_dim* is) {                                        \
    for (trv_dim i0 = 0; i0 < dim[1]; i0 += BLOCK) {                                \
      const trv_dim m = dim[1] - i0 < BLOCK ? dim[1] - i0 : BLOCK;                  \
      for (trv_dim j = 0; j < dim[0]; j++) {                                        \
        T* d = out + j * os[0] + i0 * os[1];                                        \
        const T* s = in + j * is[0] + i0 * is[1];                                   \
        if (os[1] == 1 && is[1] == 1)                                               \
          for (trv_dim i = 0; i < m; i++) d[i] = s[i];                              \
        else if (os[1] == 1)                                                        \
          for (trv_dim i = 0; i < m; i++) d[i] = s[i * is[1]];                      \
        else                                                                        \
          for (trv_dim i = 0; i < m; i++) d[i * os[1]] = s[i * is[1]];              \
      }                                                                             \
    }                                                                               \
  }
PLANE(uint8_t)
PLANE(uint16_t)
PLANE(uint32_t)
PLANE(uint64_t)

static void copy_plane(uint8_t* out, const uint8_t* in, size_t size, const trv_dim* dim,
                       const trv_dim* os, const trv_dim* is) {
  void* d = out;
  const void* s = in;
  switch (size) {
    case 1:
      plane_uint8_t(d, s, dim, os, is);
      break;
    case 2:
      plane_uint16_t(d, s, dim, os, is);
      break;
    case 4:
      plane_uint32_t(d, s, dim, os, is);
      break;
    default:
      plane_uint64_t(d, s, dim, os, is);
      break;
  }
}

static trv_dim magnitude(trv_dim x) { return x < 0 ? -x : x; }

void trvk_copy__ref(const trvk_call* call, uint32_t tile) {
  const trv_tensor *x = call->in, *y = call->out;
  const trv_dim total = trvk_count(y), size = (trv_dim)trv_dtype_size(y->dtype);
  if (total == 0) return;
  trv_dim dim[TRV_MAX_RANK], stride[2][TRV_MAX_RANK] = {{0}}, index[TRV_MAX_RANK], at, end;
  memcpy(dim, y->dim, sizeof(dim));
  memcpy(stride[0], y->stride, sizeof(dim));
  memcpy(stride[1], x->stride, sizeof(dim));
  uint32_t rank = trvk_walk_plan(y->rank, dim, stride, 2);
  const trv_dim inner = dim[rank - 1];
  if (stride[0][rank - 1] == 1 && stride[1][rank - 1] == 1 &&
      (rank == 1 || inner * size >= 64)) { /* whole rows */
    trvk_split(total, call->tiles, tile, &at, &end);
    trvk_walk_seek(rank, dim, at, index);
    while (at < end) {
      trv_dim n = inner - index[rank - 1];
      if (n > end - at) n = end - at;
      trvk_move(y->data + trvk_walk_at(rank, index, stride[0]) * size,
                x->data + trvk_walk_at(rank, index, stride[1]) * size, (size_t)(n * size));
      trvk_walk_step(rank - 1, dim, index, n);
      at += n;
    }
    return;
  }
  if (rank == 1) { /* a strided row is a plane of one row */
    dim[1] = dim[0];
    stride[0][1] = stride[0][0];
    stride[1][1] = stride[1][0];
    dim[0] = 1;
    rank = 2;
  }
  /* The other axis of the plane: where the input is denser than along the innermost one, else the
   * next outer. */
  uint32_t other = rank - 2;
  trv_dim least = magnitude(stride[1][rank - 1]);
  for (uint32_t i = 0; i + 1 < rank; i++)
    if (stride[1][i] != 0 && magnitude(stride[1][i]) < least) {
      least = magnitude(stride[1][i]);
      other = i;
    }
  const trv_dim pd[2] = {dim[other], inner}, os[2] = {stride[0][other], stride[0][rank - 1]},
                is[2] = {stride[1][other], stride[1][rank - 1]};
  uint32_t outer = 0;
  for (uint32_t i = 0; i + 1 < rank; i++) {
    if (i == other) continue;
    dim[outer] = dim[i];
    stride[0][outer] = stride[0][i];
    stride[1][outer++] = stride[1][i];
  }
  const trv_dim strips = (pd[0] + BLOCK - 1) / BLOCK;
  trvk_split(total / (pd[0] * pd[1]) * strips, call->tiles, tile, &at, &end);
  for (; at < end; at++) {
    const trv_dim j = at % strips * BLOCK, part[2] = {pd[0] - j < BLOCK ? pd[0] - j : BLOCK, pd[1]};
    trvk_walk_seek(outer, dim, at / strips, index);
    copy_plane(y->data + (trvk_walk_at(outer, index, stride[0]) + j * os[0]) * size,
               x->data + (trvk_walk_at(outer, index, stride[1]) + j * is[0]) * size, (size_t)size,
               part, os, is);
  }
}
