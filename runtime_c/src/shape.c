/* shape.c - sizes at run time: evaluates the dimension table and proves that values stay inside
 * their storages. */
#include "private.h"

#if defined(__GNUC__)
int trvi_add(trv_dim a, trv_dim b, trv_dim* out) { return __builtin_add_overflow(a, b, out); }
int trvi_mul(trv_dim a, trv_dim b, trv_dim* out) { return __builtin_mul_overflow(a, b, out); }
#else
int trvi_add(trv_dim a, trv_dim b, trv_dim* out) {
  if (b > 0 ? a > PTRDIFF_MAX - b : a < PTRDIFF_MIN - b) return 1;
  *out = a + b;
  return 0;
}
int trvi_mul(trv_dim a, trv_dim b, trv_dim* out) {
  if (a != 0 && b != 0) {
    if (a == -1 || b == -1) {
      if (a == PTRDIFF_MIN || b == PTRDIFF_MIN) return 1;
    } else if (a > 0 ? (b > 0 ? a > PTRDIFF_MAX / b : b < PTRDIFF_MIN / a)
                     : (b > 0 ? a < PTRDIFF_MIN / b : a < PTRDIFF_MAX / b)) {
      return 1;
    }
  }
  *out = a * b;
  return 0;
}
#endif

trv_dim trvi_clamp(uint64_t v) { return v > PTRDIFF_MAX ? PTRDIFF_MAX : (trv_dim)v; }

/* Floor division and its remainder; 1 where there is no result. */
static int divide(trv_dim a, trv_dim b, trv_dim* quotient, trv_dim* rest) {
  if (b == 0 || (a == PTRDIFF_MIN && b == -1)) return 1;
  *quotient = a / b;
  *rest = a % b;
  if (*rest != 0 && (*rest < 0) != (b < 0)) {
    *rest += b;
    *quotient -= 1;
  }
  return 0;
}

/* The row's value from earlier rows; 1 on overflow or division by 0. */
static int evaluate_row(const trvf_dim* r, trv_dim a, trv_dim b, trv_dim* out) {
  trv_dim rest;
  switch (r->op) {
    case TRV_DIM_OP_ADD:
      return trvi_add(a, b, out);
    case TRV_DIM_OP_SUB:
      return b == PTRDIFF_MIN || trvi_add(a, -b, out);
    case TRV_DIM_OP_MUL:
      return trvi_mul(a, b, out);
    case TRV_DIM_OP_FLOOR_DIV:
      return divide(a, b, out, &rest);
    case TRV_DIM_OP_MOD:
      return divide(a, b, &rest, out);
    case TRV_DIM_OP_CEIL_DIV:
      if (divide(a, b, out, &rest)) return 1;
      *out += rest != 0;
      return 0;
    case TRV_DIM_OP_MIN:
      *out = a < b ? a : b;
      return 0;
    default:
      *out = a > b ? a : b;
      return 0; /* max */
  }
}

/* The most that the row can be while data rows are at most what s->dims says: what is subtracted or
 * divided by counts with the least that it can be. */
static trv_dim bound_row(const trv_session* s, const trvf_dim* r) {
  const trvf_dim* second = &s->plan.dims[r->b];
  const int falls =
      r->op == TRV_DIM_OP_SUB || r->op == TRV_DIM_OP_FLOOR_DIV || r->op == TRV_DIM_OP_CEIL_DIV;
  trv_dim b = s->dims[r->b], v;
  if (falls && second->min < b && (r->op == TRV_DIM_OP_SUB || second->min > 0))
    b = second->min < -PTRDIFF_MAX ? -PTRDIFF_MAX : (trv_dim)second->min;
  if (evaluate_row(r, s->dims[r->a], b, &v)) v = PTRDIFF_MAX;
  return v > r->max && r->max >= 0 ? (trv_dim)r->max : v;
}

static trv_status out_of_range(trv_session* s, uint32_t row, trv_dim got) {
  const trvf_dim* r = &s->plan.dims[row];
  const int fault = r->op == TRV_DIM_OP_INPUT  ? TRVI_INPUT_SIZE
                    : r->op == TRV_DIM_OP_DATA ? TRVI_DATA_SIZE
                                               : TRVI_TOGETHER;
  trv_diag* d = &s->diag;
  trvi_fail_at(d, fault, TRV_NONE, 0, got);
  d->expected = r->min;
  d->limit = r->max;
  if (r->op == TRV_DIM_OP_INPUT) {
    d->value = r->a;
    d->axis = r->b;
  }
  return TRV_ARGUMENT;
}

trv_status trvi_dims_evaluate(trv_session* s, int saturate) {
  const trvi_plan* p = &s->plan;
  for (uint32_t i = 0; i < p->dim_count; i++) {
    const trvf_dim* r = &p->dims[i];
    trv_dim v = s->dims[i]; /* a data row keeps what a kernel has written */
    if (r->op == TRV_DIM_OP_CONST) {
      v = (trv_dim)r->min;
    } else if (r->op == TRV_DIM_OP_INPUT) {
      v = s->slots[r->a].dim[r->b];
    } else if (r->op == TRV_DIM_OP_DATA) {
      if (saturate) v = r->max > PTRDIFF_MAX ? PTRDIFF_MAX : (trv_dim)r->max;
    } else if (saturate) {
      v = bound_row(s, r);
    } else if (evaluate_row(r, s->dims[r->a], s->dims[r->b], &v)) {
      return out_of_range(s, i, 0);
    }
    if (!saturate && (v < r->min || v > r->max)) return out_of_range(s, i, v);
    s->dims[i] = v;
  }
  if (saturate) return TRV_OK;
  /* one symbol may be the size of several axes: all must have come with it */
  for (uint32_t i = 0; i < p->input_count; i++) {
    const trvf_value* v = &p->values[p->inputs[i]];
    for (uint32_t k = 0; k < v->rank; k++) {
      if (s->slots[i].dim[k] == s->dims[v->dim[k]]) continue;
      trvi_fail_at(&s->diag, TRVI_OTHERS, i, s->dims[v->dim[k]], s->slots[i].dim[k]);
      s->diag.axis = k;
      return TRV_ARGUMENT;
    }
  }
  return TRV_OK;
}

/* Bytes that storage k has at present. */
static trv_dim capacity(const trv_session* s, uint32_t k) {
  const trvf_storage* g = &s->plan.storages[k];
  const trvf_region* r = &s->plan.regions[g->region];
  if (r->kind == TRV_REGION_KIND_IO && s->slots[r->slot].bound)
    return trvi_clamp(s->regions[g->region].size);
  const int placed =
      s->places && (r->kind == TRV_REGION_KIND_ARENA || r->kind == TRV_REGION_KIND_IO);
  return trvi_clamp(placed ? s->places[k].size : g->size);
}

/* Why value id does not fit, as an error. */
static trv_status does_not_fit(trv_session* s, uint32_t id, trv_dim bytes, trv_dim room) {
  const trvf_storage* g = &s->plan.storages[s->plan.values[id].storage];
  const trvf_region* r = &s->plan.regions[g->region];
  int fault = TRVI_OUTSIDE;
  if (r->kind == TRV_REGION_KIND_IO && s->slots[r->slot].bound) {
    const int input = r->slot < s->plan.input_count;
    fault =
        input ? TRVI_INPUT_ROOM : TRVI_OUTPUT_ROOM; /* the latter MEMORY, for trvi_extents_check */
    id = input ? r->slot : r->slot - s->plan.input_count;
  } else if ((g->flags & 1) && !s->places) {
    fault = TRVI_NEED_REPLAN;
  }
  return trvi_fail_at(&s->diag, fault, id, bytes, room);
}

/* Lowest and highest byte (exclusive) of the value from its storage's start; *empty: it has no
 * element. 1: overflow or a negative size. */
static int extent(const trv_session* s, const trvf_value* v, trv_dim* low, trv_dim* high,
                  int* empty) {
  const trv_dim element = (trv_dim)trv_dtype_size(v->dtype);
  trv_dim reach;
  *empty = 0;
  if (trvi_mul(s->dims[v->shift], element, low) || trvi_add(*low, trvi_clamp(v->offset), low))
    return 1;
  *high = *low;
  for (uint32_t i = 0; i < v->rank; i++) {
    const trv_dim n = s->dims[v->dim[i]];
    if (n < 0) return 1;
    if (n == 0) *empty = 1;
  }
  if (*empty) return 0;
  for (uint32_t i = 0; i < v->rank; i++) {
    if (trvi_mul(s->dims[v->dim[i]] - 1, s->dims[v->stride[i]], &reach) ||
        trvi_mul(reach, element, &reach))
      return 1;
    if (reach < 0 ? trvi_add(*low, reach, low) : trvi_add(*high, reach, high)) return 1;
  }
  return trvi_add(*high, element, high);
}

int trvi_dense(const trv_session* s, uint32_t value, trv_dim* out_count) {
  const trvf_value* v = &s->plan.values[value];
  int ok = 1;
  *out_count = 1;
  for (uint32_t i = v->rank; i-- > 0;) {
    const trv_dim n = s->dims[v->dim[i]];
    if (n == 0) {
      *out_count = 0;
      return 1;
    }
    ok = ok && (n == 1 || s->dims[v->stride[i]] == *out_count) &&
         !trvi_mul(*out_count, n, out_count);
  }
  return ok;
}

trv_dim trvi_same_bytes(const trv_session* s, uint32_t a, uint32_t b) {
  const trvf_value *v = &s->plan.values[a], *w = &s->plan.values[b];
  trv_dim count = 1, span = 1; /* extents have been proved: neither overflows */
  int same = 1, empty = 0;
  for (uint32_t i = 0; i < v->rank; i++) {
    const trv_dim n = s->dims[v->dim[i]], stride = s->dims[v->stride[i]];
    same = same && n == s->dims[w->dim[i]] &&
           (n == 1 || (stride >= 0 && stride == s->dims[w->stride[i]]));
    empty |= n == 0;
  }
  if (empty) return same ? 0 : -1;
  for (uint32_t i = 0; same && i < v->rank; i++) {
    const trv_dim n = s->dims[v->dim[i]];
    if (n > 1) span += (n - 1) * s->dims[v->stride[i]];
    if (trvi_mul(count, n, &count)) return -1;
  }
  return same && span == count ? count * (trv_dim)trv_dtype_size(v->dtype) : -1;
}

trv_status trvi_extents_check(trv_session* s, trv_status* out_short) {
  const trvi_plan* p = &s->plan;
  *out_short = TRV_OK;
  for (uint32_t i = 0; i < p->value_count; i++) {
    const trvf_value* v = &p->values[i];
    trv_dim low, high;
    int empty;
    if (extent(s, v, &low, &high, &empty)) return trvi_fail_of(&s->diag, TRVI_HUGE_VALUE, i);
    /* an empty value is never read, but its address is formed */
    const trv_dim room = capacity(s, v->storage), slack = PTRDIFF_MAX / 4;
    if (empty ? low >= -slack && low <= slack : low >= 0 && high <= room) continue;
    const trv_status st = does_not_fit(s, i, high, room);
    if (st != TRV_MEMORY) return st;
    *out_short = s->diag.status = TRV_ARGUMENT;
  }
  for (uint32_t i = 0; i < p->input_count + p->output_count; i++) {
    const uint32_t id = trvi_slot_value(p, i);
    trv_dim count; /* a caller's data is dense */
    if (!trvi_dense(s, id, &count)) return trvi_fail_of(&s->diag, TRVI_DENSE, id);
  }
  return TRV_OK;
}

void trvi_slot_home(trv_session* s, uint32_t slot) {
  const trvi_slot* t = &s->slots[slot];
  const trvf_region* r = &s->plan.regions[t->region];
  const trv_buf* arena = &s->regions[r->home];
  trv_buf* out = &s->regions[t->region];
  out->host = arena->host ? arena->host + t->home : NULL;
  out->dev = arena->dev ? arena->dev + t->home : 0;
  out->size = (size_t)(s->places ? s->places[t->storage].size : r->size);
}

uint32_t trvi_slot_value(const trvi_plan* p, uint32_t slot) {
  return slot < p->input_count ? p->inputs[slot] : p->outputs[slot - p->input_count];
}

void trvi_tensor(const trv_session* s, uint32_t value, trv_tensor* out) {
#ifndef TRV_ONE_MEMORY
  if (!s->regions[s->plan.storages[s->plan.values[value].storage].region].host) {
    trv_view_shape(&s->view, value, out);
    out->data = NULL;
    return;
  }
#endif
  trv_view_tensor(&s->view, value, out);
}

void trvi_tensors_refresh(trv_session* s) {
  const trvi_plan* p = &s->plan;
  for (uint32_t i = 0; i < p->input_count + p->output_count; i++)
    trvi_tensor(s, trvi_slot_value(p, i), &s->tensors[i]);
}
