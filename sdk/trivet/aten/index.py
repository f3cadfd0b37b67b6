"""Reading and writing of elements named by tensors: indexing, gather, scatter, embedding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trivet.aten.common import Handler, table, wide
from trivet.fbs.structs import DType, IndexKind, MapOp, ReduceKind, ScanKind, ScatterReduce
from trivet.ir import ops
from trivet.ir.builder import Builder, Operand, broadcast
from trivet.ir.dim import INF, Dim, Shape, bounds
from trivet.ir.expr import Expr, Reg
from trivet.ir.graph import Sym, Value
from trivet.ir.types import Type

_MASKS = (DType.bool, DType.u8)
_REDUCES = {"sum": ScatterReduce.sum, "add": ScatterReduce.sum, "prod": ScatterReduce.prod,
            "multiply": ScatterReduce.prod, "mean": ScatterReduce.mean, "amax": ScatterReduce.max,
            "amin": ScatterReduce.min}  # fmt: skip


# ---- positions of true elements -----------------------------------------------------------------------------------------
def positions(b: Builder, mask: Value, size: int | Dim | None = None) -> Value:
    """i64 [count, rank] of the non-zero elements. size: the symbol that stands for the count elsewhere, if there is one."""
    symbols = b.graph.symbols
    if mask.const is not None:
        found = mask.const.data.nonzero()
        if isinstance(size, Dim):
            b.define(size, found.shape[0])
        return b.const(found)
    mask = b.cast(mask, DType.bool)
    most = bounds(mask.type.count, b.graph.ranges())[1] if isinstance(mask.type.count, Dim) else mask.type.count
    if isinstance(size, Dim) and str(size) in size.symbols():
        name = str(size)
        sym = symbols.setdefault(name, Sym(name, 0, most, data=True))
    else:
        name = next(n for i in range(len(symbols) + 1) if (n := f"nz{i}") not in symbols)
        sym = symbols[name] = Sym(name, 0, INF, data=True)
    sym.data = True
    sym.max = min(sym.max, int(most))
    shape = (Dim.symbol(name), len(mask.shape))
    if not mask.shape:
        mask = b.reshape(mask, (1,))
        return b.slice(b.one("nonzero", [mask], DType.i64, (shape[0], 1), ops.Nonzero(name)), 1, 0, 0)
    return b.one("nonzero", [mask], DType.i64, shape, ops.Nonzero(name))


def _nonzero(b: Builder, meta: Any, x: Value) -> Value:
    return positions(b, x, b.shape(meta)[0])


def _masked_select(b: Builder, meta: Any, x: Value, mask: Value) -> Value:
    shape = broadcast(x.shape, mask.shape)
    flat_mask = b.reshape(b.expand(mask, shape), (Type(DType.bool, shape).count,))
    flat = b.reshape(b.expand(x, shape), flat_mask.shape)
    size = b.shape(meta)[0]
    if isinstance(size, Dim) and str(size) in b.graph.symbols:
        b.graph.symbols[str(size)].max = INF  # torch takes x's size for the bound, which broadcasting may pass
    at = b.reshape(found := positions(b, flat_mask, size), (found.shape[0],))
    return b.gather(IndexKind.take, flat, 0, at)


# ---- x[i, :, j] ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Picked:
    """Index tensors made ready: x with the indexed axes brought together into one axis, and places in it."""

    order: tuple[int, ...]  # permutation that brings the indexed axes together
    axis: int  # where the joined axis is
    count: int  # how many axes were joined
    index: Value


def _picked(b: Builder, x: Value, indices: Sequence[Value | None], size: int | Dim | None) -> Picked:
    """Masks become positions. Several index tensors become one index into the joined axis."""
    axes: list[int] = []
    tensors: list[Value] = []
    axis = 0
    for i in indices:
        if i is None:
            axis += 1
        elif i.dtype in _MASKS:
            found = positions(b, i, size)
            for k in range(len(i.shape)):
                axes.append(axis)
                tensors.append(b.squeeze(b.slice(found, 1, k, 1), [1]))
                axis += 1
        else:
            axes.append(axis)
            tensors.append(b.cast(i, DType.i64))
            axis += 1
    together = axes == list(range(axes[0], axes[-1] + 1))
    at = axes[0] if together else 0
    rest = [i for i in range(len(x.shape)) if i not in axes]
    order = (*rest[:at], *axes, *rest[at:])
    if len(axes) == 1:
        return Picked(order, at, 1, tensors[0])
    sizes = [x.shape[a] for a in axes]

    def joined(*regs: Reg) -> Reg:
        total: Reg | None = None
        for r, n in zip(regs, sizes, strict=True):
            size = r.expr.dim(n)
            r = (r < 0).select(r + size, r)
            total = r if total is None else total * size + r
        assert total is not None
        return total

    return Picked(order, at, len(axes), b.map(joined, tensors, DType.i64))


def _join(b: Builder, x: Value, p: Picked) -> Value:
    x = b.permute(x, p.order)
    n: int | Dim = 1
    for d in x.shape[p.axis : p.axis + p.count]:
        n = n * d
    return b.reshape(x, (*x.shape[: p.axis], n, *x.shape[p.axis + p.count :]))


def _index(b: Builder, meta: Any, x: Value, indices: Sequence[Value | None]) -> Value:
    if all(i is None for i in indices):
        return x
    shape = b.shape(meta)
    p = _picked(b, x, indices, next((d for d in shape if b.fresh(d)), None))
    return b.reshape(b.gather(IndexKind.take, _join(b, x, p), p.axis, p.index), b.shape(meta))


def _index_put(b: Builder, meta: Any, x: Value, indices: Sequence[Value | None], values: Value,
               accumulate: bool = False, unsafe: bool = False) -> Value:  # fmt: skip
    values = b.cast(values, x.dtype)
    given = [i for i in indices if i is not None]
    if not given:
        new = b.expand(values, x.shape)
        return b.map(lambda p, q: p + q, [x, new], x.dtype) if accumulate else new
    if len(given) == 1 and given[0].dtype in _MASKS:
        return _masked_put(b, x, indices, given[0], values, accumulate)
    p = _picked(b, x, indices, None)
    together = _join(b, x, p)
    shape: Shape = (*together.shape[: p.axis], *p.index.shape, *together.shape[p.axis + 1 :])
    reduce = ScatterReduce.sum if accumulate else ScatterReduce.none
    y = b.scatter(IndexKind.take, together, p.axis, p.index, b.expand(values, shape), reduce)
    y = b.reshape(y, [x.shape[a] for a in p.order])
    return b.permute(y, [p.order.index(i) for i in range(len(x.shape))])


def _masked_put(b: Builder, x: Value, indices: Sequence[Value | None], mask: Value, values: Value,
                accumulate: bool) -> Value:  # fmt: skip
    """x[.., mask, ..] = values without a size that depends on data: each place looks its value up by its rank."""
    at = next(i for i, v in enumerate(indices) if v is not None)
    n = len(mask.shape)
    wide_mask = b.reshape(b.cast(mask, DType.bool), (*mask.shape, *(1 for _ in x.shape[at + n :])))
    tail = len(x.shape) - at - n
    rows = values.shape[-tail - 1] if len(values.shape) > tail else 1
    if rows == 1:
        if len(values.shape) > tail:  # the axis of the true elements becomes the mask's axes
            axis = len(values.shape) - tail - 1
            values = b.reshape(values, (*values.shape[:axis], *(1 for _ in range(n)), *values.shape[axis + 1 :]))
        new = values
    else:
        axis = len(values.shape) - tail - 1
        new = _ranked(b, mask, values, axis)
    if accumulate:
        return b.map(lambda m, p, q: m.select(p + q, p), [wide_mask, x, new], x.dtype, None, x.shape)
    return b.where(wide_mask, new, x, x.dtype, x.shape)


def _ranked(b: Builder, mask: Value, values: Value, axis: int) -> Value:
    """values with axis replaced by the mask's axes: the k-th true element gets row k, the others row 0 of a spare."""
    flat = b.cast(b.reshape(mask, (mask.type.count,)), DType.bool)
    rank = b.scan(ScanKind.sum, b.cast(flat, DType.i64), 0)
    at = b.map(lambda m, r: m.select(r - 1, 0), [flat, rank], DType.i64)
    spare = b.full((*values.shape[:axis], 1, *values.shape[axis + 1 :]), 0, values.dtype)
    rows = b.concat([values, spare], axis)
    return b.gather(IndexKind.take, rows, axis, b.reshape(at, mask.shape))


def _masked_scatter(b: Builder, meta: Any, x: Value, mask: Value, source: Value) -> Value:
    shape = b.shape(meta)
    mask = b.expand(mask, shape)
    new = _ranked(b, mask, b.reshape(b.cast(source, x.dtype), (source.type.count,)), 0)
    return b.where(mask, new, b.expand(x, shape), x.dtype)


# ---- one axis -----------------------------------------------------------------------------------------------------------
def _index_select(b: Builder, meta: Any, x: Value, dim: int, index: Value) -> Value:
    if not x.shape:
        return b.reshape(x, b.shape(meta))
    index = b.reshape(index, (1,)) if not index.shape else index
    return b.gather(IndexKind.take, x, dim, b.cast(index, DType.i64))


def _gather(b: Builder, meta: Any, x: Value, dim: int, index: Value, *, sparse_grad: bool = False) -> Value:
    if not x.shape:
        return b.expand(x, index.shape)
    return b.gather(IndexKind.elements, x, dim, b.cast(index, DType.i64))


def _take(b: Builder, meta: Any, x: Value, index: Value) -> Value:
    return b.gather(IndexKind.take, b.reshape(x, (x.type.count,)), 0, b.cast(index, DType.i64))


def _rows(b: Builder, x: Value, dim: int, index: Value, source: Value, reduce: ScatterReduce = ScatterReduce.none,
          include_self: bool = True) -> Value:  # fmt: skip
    """x with rows named by a vector written or combined."""
    if not x.shape:
        flat = [b.reshape(v, (1,)) for v in (x, index, source)]
        return b.reshape(_rows(b, flat[0], 0, flat[1], flat[2], reduce, include_self), ())
    index = b.reshape(b.cast(index, DType.i64), (index.type.count,))
    dim %= len(x.shape)
    shape = (*x.shape[:dim], index.shape[0], *x.shape[dim + 1 :])
    source = b.expand(b.cast(source, x.dtype), shape)
    return b.scatter(IndexKind.take, x, dim, index, source, reduce, include_self)


def _index_add(b: Builder, meta: Any, x: Value, dim: int, index: Value, source: Value, *, alpha: Operand = 1) -> Value:
    if isinstance(alpha, Value) or alpha != 1:
        source = b.map(lambda r, a: r * a, [source, alpha], x.dtype, wide(x.dtype), source.shape)
    return _rows(b, x, dim, index, source, ScatterReduce.sum)


def _index_copy(b: Builder, meta: Any, x: Value, dim: int, index: Value, source: Value) -> Value:
    return _rows(b, x, dim, index, source)


def _index_fill(b: Builder, meta: Any, x: Value, dim: int, index: Value, value: Operand) -> Value:
    return _rows(b, x, dim, index, b.scalar(value, x.dtype))


def _index_reduce(b: Builder, meta: Any, x: Value, dim: int, index: Value, source: Value, reduce: str, *,
                  include_self: bool = True) -> Value:  # fmt: skip
    return _rows(b, x, dim, index, source, _REDUCES[reduce], include_self)


def _elements(b: Builder, x: Value, dim: int, index: Value, source: Operand, reduce: ScatterReduce = ScatterReduce.none,
              include_self: bool = True) -> Value:  # fmt: skip
    """torch.scatter; of the source only the part that the index covers is read."""
    if not x.shape:
        flat = [b.reshape(x, (1,)), b.reshape(index, (1,))]
        source = b.reshape(source, (1,)) if isinstance(source, Value) and source.shape else source
        return b.reshape(_elements(b, flat[0], 0, flat[1], source, reduce, include_self), ())
    if not index.shape:
        index = b.reshape(index, (1,))
    if isinstance(source, Value) and source.shape:
        for axis, d in enumerate(index.shape):
            source = b.slice(source, axis, 0, d)
        updates = b.cast(source, x.dtype)
    else:
        updates = b.full(index.shape, source, x.dtype)
    return b.scatter(IndexKind.elements, x, dim, b.cast(index, DType.i64), updates, reduce, include_self)


def _scatter(b: Builder, meta: Any, x: Value, dim: int, index: Value, source: Operand, *, reduce: str = "") -> Value:
    return _elements(b, x, dim, index, source, _REDUCES[reduce] if reduce else ScatterReduce.none)


def _scatter_add(b: Builder, meta: Any, x: Value, dim: int, index: Value, source: Value) -> Value:
    return _elements(b, x, dim, index, source, ScatterReduce.sum)


def _scatter_reduce(b: Builder, meta: Any, x: Value, dim: int, index: Value, source: Value, reduce: str, *,
                    include_self: bool = True) -> Value:  # fmt: skip
    return _elements(b, x, dim, index, source, _REDUCES[reduce], include_self)


# ---- embedding ----------------------------------------------------------------------------------------------------------
def _embedding(b: Builder, meta: Any, weight: Value, index: Value, *options: Any) -> Value:
    return b.gather(IndexKind.take, weight, 0, b.cast(index, DType.i64))


def _embedding_bag(b: Builder, meta: Any, weight: Value, index: Value, offsets: Value, scale_grad: bool = False,
                   mode: int = 0, sparse: bool = False, per_sample_weights: Value | None = None,
                   include_last_offset: bool = False, padding_idx: int = -1) -> tuple[Value | None, ...]:  # fmt: skip
    """Rows of each bag added, averaged or maximised; bag of an index = how many offsets lie at or below its place."""
    n = index.shape[0]
    bags = b.shape(meta[0])[0]
    starts = b.slice(b.cast(offsets, DType.i64), 0, 0, bags)
    e = Expr()
    reached = (e.iota(0) >= e.load(starts)).cast(DType.i64)
    bag = b.reduce(ReduceKind.sum, b.expression(e, reached, DType.i64, (n, bags)), [1])
    bag = b.map(lambda r: r - 1, [bag], DType.i64)
    dtype = weight.dtype
    rows = b.cast(b.gather(IndexKind.take, weight, 0, b.cast(index, DType.i64)), wide(dtype))
    counts: Value | None = None
    if padding_idx >= 0:
        counts = b.map(lambda r: r.do(MapOp.ne, padding_idx), [index], rows.dtype, DType.i64)
    if mode == 2:
        if padding_idx >= 0:
            raise b.error("embedding_bag of maxima with padding_idx is not supported", "use mode sum or mean")
        zeros = b.full((bags, weight.shape[1]), 0, rows.dtype)
        y = b.scatter(IndexKind.take, zeros, 0, bag, rows, ScatterReduce.max, False)
        return b.cast(y, dtype), None, None, None
    for factor in (counts, None if per_sample_weights is None else b.cast(per_sample_weights, rows.dtype)):
        if factor is not None:
            rows = b.map(lambda r, f: r * f, [rows, b.unsqueeze(factor, 1)], rows.dtype)
    zeros = b.full((bags, weight.shape[1]), 0, rows.dtype)
    y = b.scatter(IndexKind.take, zeros, 0, bag, rows, ScatterReduce.sum)
    if mode == 1:
        ones = counts if counts is not None else b.full((n,), 1, rows.dtype)
        size = b.scatter(IndexKind.take, b.full((bags,), 0, rows.dtype), 0, bag, ones, ScatterReduce.sum)
        y = b.map(lambda r, s: r / s.do(MapOp.max, 1), [y, b.unsqueeze(size, 1)], rows.dtype)
    return b.cast(y, dtype), None, None, None


HANDLERS: dict[str, Handler] = table({
    "nonzero argwhere": _nonzero,
    "masked_select": _masked_select,
    "index.Tensor _unsafe_index.Tensor": _index,
    "index_put _unsafe_index_put _index_put_impl": _index_put,
    "masked_scatter": _masked_scatter,
    "index_select": _index_select,
    "gather": _gather,
    "take": _take,
    "index_add": _index_add,
    "index_copy": _index_copy,
    "index_fill.int_Scalar index_fill.int_Tensor": _index_fill,
    "index_reduce": _index_reduce,
    "scatter.src scatter.value scatter.reduce scatter.value_reduce": _scatter,
    "scatter_add": _scatter_add,
    "scatter_reduce.two": _scatter_reduce,
    "embedding": _embedding,
    "_embedding_bag _embedding_bag_forward_only": _embedding_bag,
})  # fmt: skip
