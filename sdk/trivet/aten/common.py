"""What the handlers share: their type, the tables' form, and torch's type promotion."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trivet.fbs.structs import DType
from trivet.ir.builder import Builder, Operand
from trivet.ir.dim import Dim
from trivet.ir.expr import Formula
from trivet.ir.graph import Value
from trivet.ir.types import is_float

Handler = Callable[[Builder, Sequence[Any], Mapping[str, Any], Any], Any]
"""handler(builder, args, kwargs, meta): args as in the fx node with IR values in place of nodes; meta: node.meta["val"]."""

_NO_MEANING = frozenset(("layout", "device", "pin_memory", "non_blocking", "memory_format", "copy", "generator"))


def table(rows: Mapping[str, Callable[..., Any]]) -> dict[str, Handler]:
    """{"add.Tensor add.Scalar": function(b, meta, *args)} as handlers; a name without a dot has the overload default."""
    out: dict[str, Handler] = {}
    for names, function in rows.items():
        for name in names.split():
            out[f"aten.{name}" if "." in name else f"aten.{name}.default"] = handler(function)
    return out


def handler(function: Callable[..., Any]) -> Handler:
    """A function (builder, meta, *args) as a handler; arguments that mean nothing here are dropped."""

    def run(b: Builder, args: Sequence[Any], kwargs: Mapping[str, Any], meta: Any) -> Any:
        return function(b, meta, *args, **{k: v for k, v in kwargs.items() if k not in _NO_MEANING})

    return run


# ---- type promotion -----------------------------------------------------------------------------------------------------
def _promote(a: DType, b: DType) -> DType:
    import torch

    from trivet.ir.interop import dtype_of, torch_dtype

    return dtype_of(torch.promote_types(torch_dtype(a), torch_dtype(b)))


def _category(dtype: DType) -> int:
    return 0 if dtype == DType.bool else 2 if is_float(dtype) else 1


def scalar_dtype(x: Any) -> DType:
    """The dtype of a Python number in promotion."""
    return DType.bool if isinstance(x, bool) else DType.f32 if isinstance(x, float) else DType.i64


def result_type(*operands: Operand | None) -> DType:
    """torch.result_type: tensors over 0-d tensors over numbers, unless a later one is of a higher kind."""
    ranks: list[DType | None] = [None, None, None]
    for x in operands:
        if x is None:
            continue
        own = x.dtype if isinstance(x, Value) else scalar_dtype(x)
        i = 2 if not isinstance(x, Value) else 0 if x.shape else 1
        present = ranks[i]
        ranks[i] = own if present is None else _promote(present, own)
    out: DType | None = None
    for dtype in reversed(ranks):
        if dtype is not None and (out is None or _category(dtype) >= _category(out)):
            out = dtype
    assert out is not None
    return out


def wide(dtype: DType) -> DType:
    """The dtype that torch computes in: f32 for f16 and bf16."""
    return DType.f32 if dtype in (DType.f16, DType.bf16) else dtype


def _exact(x: Operand, dtype: DType) -> bool:
    """True when converting x to dtype loses nothing that torch would have kept."""
    from trivet.ir.expr import Expr

    if isinstance(x, Value):
        return x.dtype == dtype
    return not isinstance(x, Dim) and Expr().const(x, dtype).expr.code[0].value == x


def pointwise(b: Builder, meta: Any, formula: Formula, *operands: Operand, steps: int = 2) -> Value:
    """An arithmetic formula as torch computes it: operands promoted; halves are computed in f32 and rounded once.

    steps: 1 when the formula is a single instruction, which rounds once by itself.
    """
    dtype = b.dtype(meta)
    compute = wide(dtype)
    if compute != dtype and steps == 1 and all(_exact(x, dtype) for x in operands):
        compute = dtype
    return b.map(formula, operands, dtype, compute, b.shape(meta))


def axes_of(dim: Any, rank: int) -> list[int]:
    """torch's dim argument (None, [] or a number or list) as axes, sorted."""
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return list(range(rank))
    dims = [dim] if isinstance(dim, int) else dim
    return sorted({int(d) % rank for d in dims}) if rank else []
