"""Tensors from nothing: fills, ranges, identity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trivet.aten.common import Handler, table
from trivet.fbs.structs import DType, MapOp
from trivet.ir.builder import Builder, Operand
from trivet.ir.expr import Expr
from trivet.ir.graph import Value
from trivet.ir.types import is_float


def _filled(x: float) -> Callable[..., Value]:
    def run(b: Builder, meta: Any, *args: Any, **kwargs: Any) -> Value:
        return b.full(b.shape(meta), x, b.dtype(meta))

    return run


def _full(b: Builder, meta: Any, source: Any, value: Operand, **kwargs: Any) -> Value:
    """full(size, value) and full_like(x, value)."""
    return b.full(b.shape(meta), value, b.dtype(meta))


def _new_full(b: Builder, meta: Any, x: Value, size: Sequence[Any], value: Operand, **kwargs: Any) -> Value:
    return b.full(b.shape(meta), value, b.dtype(meta))


def _scalar_tensor(b: Builder, meta: Any, value: Operand, **kwargs: Any) -> Value:
    return b.full((), value, b.dtype(meta))


def _arange(b: Builder, meta: Any, *bounds: Operand, dtype: Any = None) -> Value:
    """arange(end), (start, end), (start, end, step)."""
    start: Operand = bounds[0] if len(bounds) > 1 else 0
    step: Operand = bounds[2] if len(bounds) > 2 else 1
    target = b.dtype(meta)
    compute = DType.f64 if is_float(target) or any(isinstance(v, float) for v in (start, step)) else DType.i64
    e = Expr()
    at = e.iota(0, compute)
    if isinstance(step, Value) or step != 1:
        at = at * e.take(step, compute)
    if isinstance(start, Value) or start != 0:
        at = at + e.take(start, compute)
    return b.expression(e, at, target, b.shape(meta))


def _linspace(b: Builder, meta: Any, start: Operand, end: Operand, steps: int, *, dtype: Any = None) -> Value:
    """From both ends, so that the last element is exactly the end."""
    target = b.dtype(meta)
    compute = DType.f32 if target != DType.f64 and is_float(target) else DType.f64
    e = Expr()
    first, last = e.take(start, compute), e.take(end, compute)
    if steps == 1:
        return b.expression(e, first, target, (1,))
    i = e.iota(0)
    step = (last - first) / float(steps - 1)
    low = first + step * i.cast(compute)
    high = last - step * (e.dim(steps - 1) - i).cast(compute)
    return b.expression(e, (i < steps // 2).select(low, high), target, b.shape(meta))


def _logspace(b: Builder, meta: Any, start: Operand, end: Operand, steps: int, base: float = 10.0, *,
              dtype: Any = None) -> Value:  # fmt: skip
    import torch

    exponent = _linspace(b, torch.empty(steps, dtype=torch.float64, device="meta"), start, end, steps)
    return b.map(lambda r: r.expr.const(base, DType.f64).do(MapOp.pow, r), [exponent], b.dtype(meta))


def _eye(b: Builder, meta: Any, *sizes: Any, **kwargs: Any) -> Value:
    e = Expr()
    return b.expression(e, e.iota(0).equal(e.iota(1)), b.dtype(meta), b.shape(meta))


def _one_hot(b: Builder, meta: Any, x: Value, num_classes: int = -1) -> Value:
    if num_classes < 0:
        raise b.error("one_hot without the number of classes has a size that depends on data", "pass num_classes=")
    e = Expr()
    wide = b.unsqueeze(x, len(x.shape))
    shape = (*x.shape, num_classes)
    return b.expression(e, e.load(wide).cast(DType.i64).equal(e.iota(len(x.shape))), DType.i64, shape)


def _indices(lower: bool) -> Callable[..., Value]:
    def run(b: Builder, meta: Any, rows: int, columns: int, offset: int = 0, **kwargs: Any) -> Value:
        import torch

        from trivet.ir.interop import torch_dtype

        make = torch.tril_indices if lower else torch.triu_indices
        return b.const(make(rows, columns, offset, dtype=torch_dtype(b.dtype(meta))))

    return run


HANDLERS: dict[str, Handler] = table({
    "zeros zeros_like new_zeros empty.memory_format empty_like new_empty empty_permuted empty_strided new_empty_strided "
    "zero _efficientzerotensor": _filled(0),
    "ones ones_like new_ones": _filled(1),
    "full full_like": _full,
    "new_full": _new_full,
    "scalar_tensor": _scalar_tensor,
    "arange arange.start arange.start_step": _arange,
    "linspace": _linspace,
    "logspace": _logspace,
    "eye eye.m": _eye,
    "one_hot": _one_hot,
    "tril_indices": _indices(True),
    "triu_indices": _indices(False),
})  # fmt: skip
