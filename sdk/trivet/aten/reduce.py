"""Reductions, running reductions, order statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from trivet.aten.common import Handler, axes_of, result_type, table, wide
from trivet.aten.shape import MAX_RANK
from trivet.fbs.structs import DType, IndexKind, MapOp, ReduceKind, ScanKind, ScatterReduce
from trivet.ir.builder import Builder
from trivet.ir.dim import Dim, floor_div
from trivet.ir.expr import Expr, Reg
from trivet.ir.graph import Value
from trivet.ir.types import is_float

Dims = int | Sequence[int] | None


# ---- sums, products, extremes -------------------------------------------------------------------------------------------
def _total(kind: ReduceKind) -> Callable[..., Value]:
    """sum, mean, prod: integers are added up in i64, floats in the dtype of the result."""

    def run(b: Builder, meta: Any, x: Value, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Value:
        target = b.dtype(meta)
        axes = axes_of(dim, len(x.shape))
        if is_float(target):
            y = b.reduce(kind, b.cast(x, target), axes, keep=keepdim)
        else:
            source = b.cast(x, DType.i64) if is_float(x.dtype) else x
            y = b.cast(b.reduce(kind, source, axes, keep=keepdim, dtype=DType.i64), target)
        return b.reshape(y, b.shape(meta))

    return run


def extreme(b: Builder, x: Value, axes: Sequence[int], keep: bool, largest: bool) -> Value:
    """Maximum or minimum over axes."""
    if x.dtype == DType.bool:
        return b.reduce(ReduceKind.any if largest else ReduceKind.all, x, axes, keep=keep)
    return b.reduce(ReduceKind.max if largest else ReduceKind.min, x, axes, keep=keep)


def _amax(largest: bool) -> Callable[..., Value]:
    def run(b: Builder, meta: Any, x: Value, dim: Dims = None, keepdim: bool = False) -> Value:
        return extreme(b, x, axes_of(dim, len(x.shape)), keepdim, largest)

    return run


def _max_dim(largest: bool) -> Callable[..., tuple[Value, Value | None]]:
    def run(b: Builder, meta: Any, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value | None]:
        values = extreme(b, x, [dim], keepdim, largest)
        return values, _place(b, x, [dim], keepdim, largest) if b.used(1) else None

    return run


def _place(b: Builder, x: Value, axes: Sequence[int] | None, keep: bool, largest: bool) -> Value:
    kind = ReduceKind.argmax if largest else ReduceKind.argmin
    return b.reduce(kind, b.cast(x, DType.u8) if x.dtype == DType.bool else x, axes, keep=keep)


def _argmax(largest: bool) -> Callable[..., Value]:
    def run(b: Builder, meta: Any, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
        return b.reshape(_place(b, x, None if dim is None else [dim], keepdim, largest), b.shape(meta))

    return run


def _aminmax(b: Builder, meta: Any, x: Value, *, dim: int | None = None, keepdim: bool = False) -> tuple[Value, Value]:
    axes = axes_of(dim, len(x.shape))
    return extreme(b, x, axes, keepdim, False), extreme(b, x, axes, keepdim, True)


def _any(kind: ReduceKind) -> Callable[..., Value]:
    def run(b: Builder, meta: Any, x: Value, dim: Dims = None, keepdim: bool = False) -> Value:
        y = b.reduce(kind, b.cast(x, DType.bool), axes_of(dim, len(x.shape)), keep=keepdim)
        return b.cast(y, b.dtype(meta))  # u8 stays u8

    return run


def _count_nonzero(b: Builder, meta: Any, x: Value, dim: Dims = None) -> Value:
    return b.reduce(ReduceKind.sum, b.cast(x, DType.bool), axes_of(dim, len(x.shape)), dtype=DType.i64)


def _nansum(b: Builder, meta: Any, x: Value, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Value:
    if is_float(x.dtype):
        x = b.map(lambda r: r.do(MapOp.is_nan).select(0, r), [x], x.dtype)
    return _total(ReduceKind.sum)(b, meta, x, dim, keepdim)


# ---- variance, norms ----------------------------------------------------------------------------------------------------
def _variance(root: bool, mean: bool) -> Callable[..., Any]:
    def core(b: Builder, meta: Any, x: Value, dim: Dims, correction: float | None, keepdim: bool) -> Any:
        dtype = x.dtype
        axes = axes_of(dim, len(x.shape))
        x = b.cast(x, wide(dtype))
        v = b.reduce(ReduceKind.var, x, axes, keep=keepdim, correction=1.0 if correction is None else float(correction))
        v = b.map(lambda r: r.do(MapOp.sqrt) if root else r, [v], dtype)
        return (v, b.cast(b.reduce(ReduceKind.mean, x, axes, keep=keepdim), dtype)) if mean else v

    return core


def _var_correction(root: bool, mean: bool = False) -> Callable[..., Any]:
    core = _variance(root, mean)

    def run(b: Builder, meta: Any, x: Value, dim: Dims = None, *, correction: float | None = None,
            keepdim: bool = False) -> Any:  # fmt: skip
        return core(b, meta, x, dim, correction, keepdim)

    return run


def _var_all(root: bool, mean: bool = False) -> Callable[..., Any]:
    core = _variance(root, mean)

    def run(b: Builder, meta: Any, x: Value, unbiased: bool = True) -> Any:
        return core(b, meta, x, None, float(unbiased), False)

    return run


def _var_dim(root: bool, mean: bool = False) -> Callable[..., Any]:
    core = _variance(root, mean)

    def run(b: Builder, meta: Any, x: Value, dim: Dims, unbiased: bool = True, keepdim: bool = False) -> Any:
        return core(b, meta, x, dim, float(unbiased), keepdim)

    return run


def _logsumexp(b: Builder, meta: Any, x: Value, dim: Dims, keepdim: bool = False) -> Value:
    axes = axes_of(dim, len(x.shape))
    dtype = b.dtype(meta)
    x = b.cast(x, wide(dtype))
    top = b.reduce(ReduceKind.max, x, axes, keep=True)
    top = b.map(lambda r: r.do(MapOp.abs).equal(math.inf).select(0, r), [top], top.dtype)
    small = b.map(lambda r, m: (r - m).do(MapOp.exp), [x, top], x.dtype)
    total = b.reduce(ReduceKind.sum, small, axes, keep=True)
    return b.reshape(b.map(lambda r, m: r.do(MapOp.log) + m, [total, top], dtype), b.shape(meta))


def _logcumsumexp(b: Builder, meta: Any, x: Value, dim: int) -> Value:
    """Each place by itself, from all before it: subtracting one maximum for all would lose small ones."""
    if not x.shape:
        return x
    axis, rank = dim % len(x.shape), len(x.shape)
    n, e = x.shape[axis], Expr()
    x = b.cast(x, wide(b.dtype(meta)))
    keep = e.iota(rank) <= e.iota(axis)
    spread = b.unsqueeze(b.move(x, axis, -1), axis)
    shape = (*x.shape, n)
    if rank == MAX_RANK:
        raise b.error(f"logcumsumexp of {rank} axes is not supported", "join axes first")
    return _logsumexp(b, meta, b.expression(e, keep.select(e.load(spread), -math.inf), x.dtype, shape), [rank])


def vector_norm(b: Builder, x: Value, p: float, axes: Sequence[int], keep: bool, dtype: DType) -> Value:
    """The p-norm over axes; computed in f32 for halves."""
    x = b.cast(x, wide(dtype))
    inner, kind, outer = _norm_parts(p)
    y = b.reduce(kind, b.map(inner, [x], x.dtype), axes, keep=keep)
    return b.map(outer, [y], dtype)


def _norm_parts(p: float) -> tuple[Callable[[Reg], Reg], ReduceKind, Callable[[Reg], Reg]]:
    def same(r: Reg) -> Reg:
        return r

    def size(r: Reg) -> Reg:
        return r.do(MapOp.abs)

    if p == math.inf:
        return size, ReduceKind.max, same
    if p == -math.inf:
        return size, ReduceKind.min, same
    if p == 0:
        return lambda r: r.do(MapOp.ne, 0).cast(r.dtype), ReduceKind.sum, same
    if p == 1:
        return size, ReduceKind.sum, same
    if p == 2:
        return lambda r: r * r, ReduceKind.sum, lambda r: r.do(MapOp.sqrt)
    return (lambda r: size(r).do(MapOp.pow, float(p)), ReduceKind.sum, lambda r: r.do(MapOp.pow, 1.0 / p))


def _linalg_vector_norm(b: Builder, meta: Any, x: Value, ord: float = 2, dim: Dims = None, keepdim: bool = False, *,
                        dtype: Any = None) -> Value:  # fmt: skip
    y = vector_norm(b, x, ord, axes_of(dim, len(x.shape)), keepdim, b.dtype(meta))
    return b.reshape(y, b.shape(meta))


def _norm(b: Builder, meta: Any, x: Value, p: float | None = 2, dim: Dims = None, keepdim: bool = False, *,
          dtype: Any = None) -> Value:  # fmt: skip
    return _linalg_vector_norm(b, meta, x, 2 if p is None else p, dim, keepdim)


def _cdist(b: Builder, meta: Any, x: Value, y: Value, p: float = 2.0, compute_mode: int | None = None) -> Value:
    rank = max(len(x.shape), len(y.shape))
    left = b.unsqueeze(x, len(x.shape) - 1)
    right = b.unsqueeze(y, len(y.shape) - 2)
    d = b.map(lambda p, q: p - q, [left, right], x.dtype)
    return vector_norm(b, d, p, [rank], False, b.dtype(meta))


def _dist(b: Builder, meta: Any, x: Value, y: Value, p: float = 2) -> Value:
    d = b.map(lambda p, q: p - q, [x, y], b.dtype(meta), wide(b.dtype(meta)))
    return vector_norm(b, d, p, range(len(d.shape)), False, b.dtype(meta))


# ---- running reductions -------------------------------------------------------------------------------------------------
def _running(kind: ScanKind) -> Callable[..., Value]:
    def run(b: Builder, meta: Any, x: Value, dim: int, *, dtype: Any = None) -> Value:
        return b.scan(kind, b.cast(x, b.dtype(meta)), dim)

    return run


def _running_extreme(kind: ScanKind) -> Callable[..., tuple[Value, Value | None]]:
    """cummax and cummin: the place is that of the latest element that equals the running extreme."""

    def run(b: Builder, meta: Any, x: Value, dim: int) -> tuple[Value, Value | None]:
        if not x.shape:
            return x, b.full((), 0, DType.i64)
        source = b.cast(x, DType.u8) if x.dtype == DType.bool else x
        values = b.scan(kind, source, dim)
        if not b.used(1):
            return b.cast(values, x.dtype), None

        def place(p: Reg, q: Reg) -> Reg:
            hit = p.equal(q)
            if is_float(p.dtype):
                hit = hit | p.do(MapOp.is_nan)
            return hit.select(p.expr.iota(dim % len(x.shape)), 0)

        places = b.map(place, [source, values], DType.i64)
        return b.cast(values, x.dtype), b.scan(ScanKind.max, places, dim)

    return run


def _diff(b: Builder, meta: Any, x: Value, n: int = 1, dim: int = -1, prepend: Value | None = None,
          append: Value | None = None) -> Value:  # fmt: skip
    parts = [p for p in (prepend, x, append) if p is not None]
    x = b.concat([b.cast(p, b.dtype(meta)) for p in parts], dim)
    for _ in range(n):
        size = x.shape[dim] - 1
        high, low = b.slice(x, dim, 1, size), b.slice(x, dim, 0, size)
        x = b.map(lambda p, q: p.do(MapOp.xor_, q) if p.dtype == DType.bool else p - q, [high, low], x.dtype)
    return x


# ---- order --------------------------------------------------------------------------------------------------------------
def _sort(b: Builder, meta: Any, x: Value, dim: int = -1, descending: bool = False) -> tuple[Value, Value]:
    return b.sort(x, dim, descending)


def _sort_stable(b: Builder, meta: Any, x: Value, *, stable: bool | None = None, dim: int = -1,
                 descending: bool = False) -> tuple[Value, Value]:  # fmt: skip
    return b.sort(x, dim, descending)


def _argsort(b: Builder, meta: Any, x: Value, dim: int = -1, descending: bool = False) -> Value:
    return b.sort(x, dim, descending)[1]


def _argsort_stable(b: Builder, meta: Any, x: Value, *, stable: bool, dim: int = -1, descending: bool = False) -> Value:
    return b.sort(x, dim, descending)[1]


def _topk(b: Builder, meta: Any, x: Value, k: int | Dim, dim: int = -1, largest: bool = True,
          sorted: bool = True) -> tuple[Value, Value]:  # fmt: skip
    return b.sort(x, dim, largest, k)


def _kthvalue(b: Builder, meta: Any, x: Value, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Value, Value]:
    if not x.shape:
        return b.sort(x, dim)
    pair = b.sort(x, dim, k=k)
    values, places = (b.slice(v, dim, k - 1, 1) for v in pair)
    return (values, places) if keepdim else (b.squeeze(values, [dim]), b.squeeze(places, [dim]))


def _median_dim(b: Builder, meta: Any, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    """The lower of the middle two. A NaN wins: it is then the first NaN."""
    if not x.shape:
        return b.sort(x, dim)
    middle = floor_div(x.shape[dim] - 1, 2)
    values, places = (b.slice(v, dim, middle, 1) for v in b.sort(x, dim))
    if is_float(x.dtype):
        top = b.reduce(ReduceKind.max, x, [dim], keep=True)
        first = b.reduce(ReduceKind.argmax, x, [dim], keep=True)
        places = b.map(lambda m, f, p: m.do(MapOp.is_nan).select(f, p), [top, first, places], DType.i64)
        values = b.map(lambda m, v: m.do(MapOp.is_nan).select(m, v), [top, values], x.dtype)
    return (values, places) if keepdim else (b.squeeze(values, [dim]), b.squeeze(places, [dim]))


def _median(b: Builder, meta: Any, x: Value) -> Value:
    return _median_dim(b, meta, b.reshape(x, (x.type.count,)), 0)[0]


# ---- search and histograms ----------------------------------------------------------------------------------------------
def _search(b: Builder, meta: Any, edges: Value, x: Value, right: bool) -> Value:
    """How many edges (last axis) lie below x[.., 1]; a NaN lies above all."""
    compute = result_type(edges, x)
    op = MapOp.gt if right else MapOp.ge
    below = b.map(lambda e, v: e.do(op, v).logical_not(), [edges, x], DType.bool, compute)
    count = b.reduce(ReduceKind.sum, below, [-1], dtype=DType.i64)
    return b.cast(count, b.dtype(meta))


def _bucketize(b: Builder, meta: Any, x: Value, edges: Value, *, out_int32: bool = False, right: bool = False) -> Value:
    return _search(b, meta, edges, b.unsqueeze(x, len(x.shape)), right)


def _searchsorted(b: Builder, meta: Any, edges: Value, x: Value, *, out_int32: bool = False, right: bool = False,
                  side: str | None = None, sorter: Value | None = None) -> Value:  # fmt: skip
    if sorter is not None:
        edges = b.gather(IndexKind.elements, edges, -1, sorter)
    wide_x = b.unsqueeze(x, len(x.shape))
    if len(edges.shape) > 1:
        edges = b.unsqueeze(edges, len(edges.shape) - 1)
    return _search(b, meta, edges, wide_x, right or side == "right")


def _histc(b: Builder, meta: Any, x: Value, bins: int = 100, min: float = 0, max: float = 0) -> Value:
    flat = b.reshape(x, (x.type.count,))
    dtype = x.dtype
    lo, hi = b.full((), min, dtype), b.full((), max, dtype)
    if min == max:
        low, high = b.reduce(ReduceKind.min, flat), b.reduce(ReduceKind.max, flat)
        lo = b.map(lambda p, q: p.equal(q).select(p - 1, p), [low, high], dtype)
        hi = b.map(lambda p, q: p.equal(q).select(q + 1, q), [low, high], dtype)

    def place(v: Reg, low: Reg, high: Reg) -> Reg:
        inside = (v >= low) & (v <= high)
        at = ((v - low) / (high - low) * bins).do(MapOp.min, bins - 1)
        return inside.select(at, 0).cast(DType.i64)

    index = b.map(place, [flat, lo, hi], DType.i64, dtype)
    ones = b.map(lambda v, low, high: (v >= low) & (v <= high), [flat, lo, hi], dtype, dtype)
    return b.scatter(IndexKind.elements, b.full((bins,), 0, dtype), 0, index, ones, ScatterReduce.sum)


def _cosine_similarity(b: Builder, meta: Any, x: Value, y: Value, dim: int = 1, eps: float = 1e-8) -> Value:
    """sum(x * y) / (max(|x|, eps) * max(|y|, eps)) as torch computes it: each side normalised first."""
    dtype = b.dtype(meta)
    sides = []
    for v in (x, y):
        v = b.cast(v, wide(dtype))
        n = vector_norm(b, v, 2, [dim], True, v.dtype)
        sides.append(b.map(lambda r, n: r / n.do(MapOp.max, eps), [v, n], v.dtype))
    product = b.map(lambda p, q: p * q, sides, sides[0].dtype)
    return b.cast(b.reduce(ReduceKind.sum, product, [dim]), dtype)


HANDLERS: dict[str, Handler] = table({
    "sum sum.dim_IntList": _total(ReduceKind.sum),
    "mean mean.dim": _total(ReduceKind.mean),
    "prod prod.dim_int": _total(ReduceKind.prod),
    "amax max": _amax(True),
    "amin min": _amax(False),
    "max.dim": _max_dim(True),
    "min.dim": _max_dim(False),
    "argmax": _argmax(True),
    "argmin": _argmax(False),
    "aminmax": _aminmax,
    "any any.dim any.dims": _any(ReduceKind.any),
    "all all.dim all.dims": _any(ReduceKind.all),
    "count_nonzero count_nonzero.dim_IntList": _count_nonzero,
    "nansum": _nansum,
    "var.correction": _var_correction(False),
    "std.correction": _var_correction(True),
    "var_mean.correction": _var_correction(False, True),
    "std_mean.correction": _var_correction(True, True),
    "var": _var_all(False),
    "std": _var_all(True),
    "var_mean": _var_all(False, True),
    "std_mean": _var_all(True, True),
    "var.dim": _var_dim(False),
    "std.dim": _var_dim(True),
    "var_mean.dim": _var_dim(False, True),
    "std_mean.dim": _var_dim(True, True),
    "logsumexp special_logsumexp": _logsumexp,
    "linalg_vector_norm": _linalg_vector_norm,
    "norm.Scalar norm.ScalarOpt_dim norm.ScalarOpt_dtype norm.ScalarOpt_dim_dtype": _norm,
    "cdist _cdist_forward": _cdist,
    "dist": _dist,
    "cosine_similarity": _cosine_similarity,
    "logcumsumexp": _logcumsumexp,
    "cumsum": _running(ScanKind.sum),
    "cumprod": _running(ScanKind.prod),
    "cummax": _running_extreme(ScanKind.max),
    "cummin": _running_extreme(ScanKind.min),
    "diff": _diff,
    "sort": _sort,
    "sort.stable": _sort_stable,
    "argsort": _argsort,
    "argsort.stable": _argsort_stable,
    "topk": _topk,
    "kthvalue": _kthvalue,
    "median.dim": _median_dim,
    "median": _median,
    "bucketize.Tensor": _bucketize,
    "searchsorted.Tensor": _searchsorted,
    "histc": _histc,
})  # fmt: skip
