"""Views, joins and splits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trivet.aten.common import Handler, table
from trivet.fbs.structs import DType, IndexKind, ReduceKind, ScanKind
from trivet.ir import ops
from trivet.ir.builder import Builder
from trivet.ir.dim import Dim, ceil_div, dim_max, dim_min
from trivet.ir.expr import Expr
from trivet.ir.graph import Sym, Value
from trivet.ir.types import SIZES

Size = int | Dim
MAX_RANK = 8


# ---- views --------------------------------------------------------------------------------------------------------------
def _reshape(b: Builder, meta: Any, x: Value, *args: Any, **kwargs: Any) -> Value:
    """view, flatten, squeeze, ...: row-major meaning, and the result's shape is known."""
    return b.reshape(x, b.shape(meta))


def _view_dtype(b: Builder, meta: Any, x: Value, dtype: Any) -> Value:
    target = b.dtype(meta)
    if SIZES[target] != SIZES[x.dtype]:
        raise b.error(f"a view of {x.dtype.name} as {target.name} changes the element size", "convert with .to()")
    return x if target == x.dtype else b.one("bitcast", [x], target, x.shape, ops.Bitcast())


def _expand(b: Builder, meta: Any, x: Value, *args: Any, implicit: bool = False) -> Value:
    return b.expand(x, b.shape(meta))


def _permute(b: Builder, meta: Any, x: Value, dims: Sequence[int]) -> Value:
    return b.permute(x, dims)


def _transpose(b: Builder, meta: Any, x: Value, p: int, q: int) -> Value:
    return b.transpose(x, p, q)


def _t(b: Builder, meta: Any, x: Value) -> Value:
    return b.transpose(x, 0, 1) if len(x.shape) == 2 else x


def _numpy_t(b: Builder, meta: Any, x: Value) -> Value:
    return b.permute(x, range(len(x.shape) - 1, -1, -1))


def _matrix_t(b: Builder, meta: Any, x: Value) -> Value:
    return b.transpose(x, -1, -2)


def _movedim(b: Builder, meta: Any, x: Value, source: int | Sequence[int], target: int | Sequence[int]) -> Value:
    rank = len(x.shape)
    sources = [s % rank for s in ([source] if isinstance(source, int) else source)]
    targets = [t % rank for t in ([target] if isinstance(target, int) else target)]
    rest = iter(i for i in range(rank) if i not in sources)
    return b.permute(x, [sources[targets.index(i)] if i in targets else next(rest) for i in range(rank)])


def bounded(b: Builder, i: Size | None, size: Size, default: Size) -> Size:
    """A slice's end point as Python sees it: None, negative and too large ones put right."""
    if i is None:
        return default
    if isinstance(i, int) and isinstance(size, int):
        return max(0, min(size, i + size if i < 0 else i))
    if isinstance(i, int) and i < 0:
        i = i + size
        return i if b.least(i) >= 0 else dim_max(i, 0)
    return i if b.least(size - i) >= 0 else dim_min(i, size)


def _slice(b: Builder, meta: Any, x: Value, dim: int = 0, start: Size | None = None, end: Size | None = None,
           step: int = 1) -> Value:  # fmt: skip
    size, n = b.shape(meta)[dim], x.shape[dim]
    at = 0 if size == 0 else bounded(b, start, n, 0)
    if b.fresh(size):
        b.define(size, count := dim_max(ceil_div(bounded(b, end, n, n) - at, step), 0))
        size = count
    return b.slice(x, dim, at, size, step)


def _narrow(b: Builder, meta: Any, x: Value, dim: int, start: Size, length: Size) -> Value:
    return b.slice(x, dim, start + x.shape[dim] if isinstance(start, int) and start < 0 else start, length)


def _select(b: Builder, meta: Any, x: Value, dim: int, index: Size) -> Value:
    return b.select(x, dim, index)


def _split(b: Builder, meta: Any, x: Value, sizes: Any, dim: int = 0) -> list[Value]:
    """split, chunk, split_with_sizes, tensor_split: the sizes are those of the results."""
    out, at = [], 0
    for m in meta:
        size = b.shape(m)[dim]
        out.append(b.slice(x, dim, at, size))
        at = at + size  # type: ignore[assignment]
    return out


def _unbind(b: Builder, meta: Any, x: Value, dim: int = 0) -> list[Value]:
    return [b.select(x, dim, i) for i in range(len(meta))]


def _diagonal(b: Builder, meta: Any, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    return b.diagonal(x, offset, dim1, dim2)


def _linalg_diagonal(b: Builder, meta: Any, x: Value, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Value:
    return b.diagonal(x, offset, dim1, dim2)


def _unfold(b: Builder, meta: Any, x: Value, dim: int, size: int, step: int) -> Value:
    if not x.shape:
        return b.reshape(x, b.shape(meta))
    return b.window(x, dim, size, step)


def _flip(b: Builder, meta: Any, x: Value, dims: Sequence[int]) -> Value:
    return b.flip(x, [d % len(x.shape) for d in dims])


def _as_strided(b: Builder, meta: Any, x: Value, size: Sequence[Size], stride: Sequence[Size],
                storage_offset: Size | None = None) -> Value:  # fmt: skip
    """Elements by their place in x's memory, x being dense there in some order of its axes."""
    rank = len(x.shape)
    order = list(range(rank))
    first: Size = 0
    if b.node is not None:
        source = b.node.args[0].meta["val"]
        first = b.dim(source.storage_offset())
        strides = [b.dim(s) for s in source.stride()]
        order.sort(key=lambda i: (-strides[i] if isinstance(strides[i], int) else -math.inf, i))
        step: Size = 1
        for i in reversed(order):
            if x.shape[i] != 1 and strides[i] != step:
                raise b.error("as_strided of a tensor with gaps in its memory", "call .contiguous() first")
            step = step * x.shape[i]
    flat = b.reshape(b.permute(x, order), (x.type.count,))
    offset: Size = 0 if storage_offset is None else storage_offset - first
    shape = b.shape(meta)
    dense, step = True, 1
    for d, s in zip(reversed(shape), reversed(list(stride)), strict=True):
        dense = dense and (d == 1 or s == step)
        step = step * d
    if dense:
        return b.reshape(b.slice(flat, 0, offset, step), shape)
    e = Expr()
    at = e.dim(offset)
    for axis, s in enumerate(stride):
        if shape[axis] != 1 and s != 0:
            at = at + e.iota(axis) * e.dim(s)
    index = b.expression(e, at, DType.i64, shape)
    return b.gather(IndexKind.take, flat, 0, index)


# ---- joins --------------------------------------------------------------------------------------------------------------
def _cat(b: Builder, meta: Any, xs: Sequence[Value], dim: int = 0) -> Value:
    shape = b.shape(meta)
    parts = [x for x in xs if not (x.shape == (0,) and len(shape) != 1)]
    parts = [x for x in parts if x.shape[dim] != 0] or parts[:1]
    return b.concat([b.cast(x, b.dtype(meta)) for x in parts], dim)


def _stack(b: Builder, meta: Any, xs: Sequence[Value], dim: int = 0) -> Value:
    return b.stack([b.cast(x, b.dtype(meta)) for x in xs], dim)


def _repeat(b: Builder, meta: Any, x: Value, repeats: Sequence[Size]) -> Value:
    """repeat and tile."""
    rank = max(len(x.shape), len(repeats))
    times = [1] * (rank - len(repeats)) + list(repeats)
    x = b.reshape(x, (1,) * (rank - len(x.shape)) + x.shape)
    if 0 in times:
        return b.full(b.shape(meta), 0, x.dtype)
    new = [i for i in range(rank) if times[i] != 1 and x.shape[i] != 1]
    groups = [new] if rank + len(new) <= MAX_RANK else [[i] for i in new]
    for group in groups:
        split: list[Size] = []
        wide: list[Size] = []
        for i in range(rank):
            if i in group:
                split.append(1)
                wide.append(times[i])
            split.append(x.shape[i])
            wide.append(x.shape[i])
        joined = [d * times[i] if i in group else d for i, d in enumerate(x.shape)]
        x = b.reshape(b.expand(b.reshape(x, split), wide), joined)
    return b.expand(x, [d * times[i] if d == 1 else d for i, d in enumerate(x.shape)])


def _repeat_interleave(b: Builder, meta: Any, x: Value, repeats: Size | Value, dim: int | None = None, *,
                       output_size: Any = None) -> Value:  # fmt: skip
    if dim is None:
        x, dim = b.reshape(x, (x.type.count,)), 0
    dim %= len(x.shape)
    if isinstance(repeats, Value):
        return b.gather(IndexKind.take, x, dim, _interleaved(b, repeats, x.shape[dim], b.shape(meta)[dim]))
    shape = list(x.shape)
    wide = b.expand(b.unsqueeze(x, dim + 1), [*shape[: dim + 1], repeats, *shape[dim + 1 :]])
    shape[dim] = shape[dim] * repeats
    return b.reshape(wide, shape)


def _interleaved(b: Builder, repeats: Value, size: Size, total: Size) -> Value:
    """Position i once per count of repeats[i]: how many running totals lie at or below each place."""
    if repeats.const is not None and isinstance(size, int):
        import torch

        data = torch.repeat_interleave(torch.arange(size), repeats.const.data.expand(size))
        if b.fresh(total):
            b.define(total, data.shape[0])
        return b.const(data)
    counts = b.expand(b.cast(repeats, DType.i64), (size,))
    if isinstance(total, Dim) and b.fresh(total):
        symbol = b.graph.symbols.setdefault(str(total), Sym(str(total), data=True))
        b.add("item", [b.reduce(ReduceKind.sum, counts, dtype=DType.i64)], [], ops.Item(symbol.name))
    e = Expr()
    passed = (e.load(b.scan(ScanKind.sum, counts, 0)) <= e.iota(0)).cast(DType.i64)
    return b.reduce(ReduceKind.sum, b.expression(e, passed, DType.i64, (total, size)), [1])


def _repeat_interleave_indices(b: Builder, meta: Any, repeats: Value, *, output_size: Any = None) -> Value:
    return _interleaved(b, repeats, repeats.shape[0], b.shape(meta)[0])


def _roll(b: Builder, meta: Any, x: Value, shifts: int | Sequence[int], dims: int | Sequence[int] = ()) -> Value:
    shifts = [shifts] if isinstance(shifts, int) else list(shifts)
    dims = [dims] if isinstance(dims, int) else list(dims)
    if not dims:
        flat = b.reshape(x, (x.type.count,))
        return b.reshape(_roll(b, meta, flat, shifts, [0]), x.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        n = x.shape[dim]
        if isinstance(n, int):
            if n == 0 or shift % n == 0:
                continue
            at: Size = n - shift % n
        elif b.least(n) >= abs(shift):
            at = n - shift if shift > 0 else -shift
        else:
            raise b.error(f"roll by {shift} of a dimension {n} that may be shorter", "raise the dimension's minimum")
        x = b.concat([b.slice(x, dim, at, n - at), b.slice(x, dim, 0, at)], dim)
    return x


def _meshgrid(b: Builder, meta: Any, xs: Sequence[Value], *, indexing: str = "ij") -> list[Value]:
    rank = len(xs)
    out = []
    for i, x in enumerate(xs):
        axis = 1 - i if indexing == "xy" and i < 2 and rank > 1 else i
        line = b.reshape(x, [x.type.count if k == axis else 1 for k in range(rank)])
        out.append(b.expand(line, b.shape(meta[i])))
    return out


_RESHAPES = (
    "view reshape _unsafe_view view_copy _reshape_alias _reshape_copy flatten.using_ints unflatten.int view_as reshape_as "
    "squeeze squeeze.dim squeeze.dims unsqueeze squeeze_copy squeeze_copy.dim squeeze_copy.dims unsqueeze_copy ravel"
)

HANDLERS: dict[str, Handler] = table({
    _RESHAPES: _reshape,
    "view.dtype": _view_dtype,
    "expand expand_as broadcast_to expand_copy": _expand,
    "permute permute_copy": _permute,
    "transpose.int transpose_copy.int swapaxes swapdims": _transpose,
    "t t_copy": _t,
    "numpy_T": _numpy_t,
    "mT mH adjoint matrix_H": _matrix_t,
    "movedim.int movedim.intlist moveaxis.int moveaxis.intlist": _movedim,
    "slice.Tensor slice_copy.Tensor": _slice,
    "narrow narrow_copy": _narrow,
    "select.int select_copy.int": _select,
    "split.Tensor split.sizes split_with_sizes split_with_sizes_copy split_copy.Tensor chunk unsafe_chunk unsafe_split.Tensor "
    "unsafe_split_with_sizes tensor_split.sections tensor_split.indices": _split,
    "unbind.int unbind_copy.int": _unbind,
    "diagonal diagonal_copy": _diagonal,
    "linalg_diagonal": _linalg_diagonal,
    "unfold unfold_copy": _unfold,
    "flip": _flip,
    "as_strided as_strided_copy": _as_strided,
    "cat concat concatenate": _cat,
    "stack": _stack,
    "repeat tile": _repeat,
    "repeat_interleave.self_int repeat_interleave.self_Tensor": _repeat_interleave,
    "repeat_interleave.Tensor": _repeat_interleave_indices,
    "roll": _roll,
    "meshgrid meshgrid.indexing": _meshgrid,
})  # fmt: skip
