/* walk.h - the loop nest over strided tensors: several streams walk one index space in step.
 *
 * Stream 0 is the one whose memory order counts (the output). Axes are sorted so that it is walked
 * in order, axes of size 1 are dropped, and neighbours that all streams walk as one are merged.
 */
#ifndef TRVK_WALK_H
#define TRVK_WALK_H

#include "ops.h"

static inline trv_dim trvk_magnitude(trv_dim x) { return x < 0 ? -x : x; }

/* dim, stride[s]: `rank` axes of each of `streams`. Returns the new rank, at least 1. No dim may be
 * 0. */
static inline uint32_t trvk_walk_plan(uint32_t rank, trv_dim* dim, trv_dim (*stride)[TRV_MAX_RANK],
                                      uint32_t streams) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < rank;
       i++) { /* drop 1s and sort by |stride[0]|, largest first, by insertion */
    if (dim[i] == 1) continue;
    const trv_dim d = dim[i], key = stride[0][i] < 0 ? -stride[0][i] : stride[0][i];
    uint32_t at = n++;
    trv_dim row[TRVK_MAX_ARGS + TRV_MAX_RANK];
    for (uint32_t s = 0; s < streams; s++) row[s] = stride[s][i];
    while (at > 0 && (stride[0][at - 1] < 0 ? -stride[0][at - 1] : stride[0][at - 1]) < key) {
      dim[at] = dim[at - 1];
      for (uint32_t s = 0; s < streams; s++) stride[s][at] = stride[s][at - 1];
      at--;
    }
    dim[at] = d;
    for (uint32_t s = 0; s < streams; s++) stride[s][at] = row[s];
  }
  if (n == 0) {
    dim[0] = 1;
    for (uint32_t s = 0; s < streams; s++) stride[s][0] = 1;
    return 1;
  }
  uint32_t last = 0;
  for (uint32_t i = 1; i < n; i++) {
    int merge = 1;
    for (uint32_t s = 0; s < streams && merge; s++)
      merge = stride[s][last] == stride[s][i] * dim[i];
    if (merge) {
      dim[last] *= dim[i];
    } else {
      dim[++last] = dim[i];
    }
    for (uint32_t s = 0; s < streams; s++) stride[s][last] = stride[s][i];
  }
  return last + 1;
}

/* Coordinates of position `at` of a row-major walk. */
static inline void trvk_walk_seek(uint32_t rank, const trv_dim* dim, trv_dim at, trv_dim* index) {
  for (uint32_t i = rank; i-- > 0;) {
    index[i] = at % dim[i];
    at /= dim[i];
  }
}
static inline trv_dim trvk_walk_at(uint32_t rank, const trv_dim* index, const trv_dim* stride) {
  trv_dim at = 0;
  for (uint32_t i = 0; i < rank; i++) at += index[i] * stride[i];
  return at;
}
/* Moves on by `by` along axis (less than dim[axis] + 1 in all) and carries into the outer ones. */
static inline void trvk_walk_step(uint32_t axis, const trv_dim* dim, trv_dim* index, trv_dim by) {
  index[axis] += by;
  while (axis > 0 && index[axis] >= dim[axis]) {
    index[axis] = 0;
    index[--axis]++;
  }
}

/* Strides of t broadcast to the axes of out (numpy rules; shapes are checked). */
static inline void trvk_walk_broadcast(const trv_tensor* t, const trv_tensor* out,
                                       trv_dim* stride) {
  const uint32_t lead = (uint32_t)out->rank - t->rank;
  for (uint32_t i = 0; i < out->rank; i++)
    stride[i] = i < lead || (t->dim[i - lead] == 1 && out->dim[i] != 1) ? 0 : t->stride[i - lead];
}
/* Can t be broadcast to out's shape? */
static inline int trvk_walk_broadcasts(const trv_tensor* t, const trv_tensor* out) {
  if (t->rank > out->rank) return 0;
  const uint32_t lead = (uint32_t)out->rank - t->rank;
  for (uint32_t i = 0; i < t->rank; i++)
    if (t->dim[i] != out->dim[i + lead] && t->dim[i] != 1) return 0;
  return 1;
}
#endif
