"""Scales and zero points chosen while running: the operators that choose them, and which of them the kernels have.

`follow` looks at the exported graph: rows that are quantised by their own range and made real again become one `rowquant` node,
which a matrix product takes in. What does not fit stays reductions and float maps, as torch computes it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trivet.fbs.structs import DType, MapOp, ReduceKind
from trivet.ir.builder import Builder
from trivet.ir.dim import Dim
from trivet.ir.graph import Value

_BITS8 = ("torch.int8", "torch.uint8")
_SMALLEST = {DType.f16: 2.0**-14, DType.bf16: 2.0**-126, DType.f32: 2.0**-126}


@dataclass(frozen=True, slots=True)
class Rows:
    """How a tensor is quantised by its own range. affine: with zero points; whole: one range for all rows."""

    affine: bool
    whole: bool


def single_row(x: Value) -> bool:
    """True when the last axis holds all elements."""
    return all(d == 1 for d in x.shape[:-1])


# ---- the exported graph ---------------------------------------------------------------------------------------------------
def follow(node: Any) -> Rows | None:
    """How a quantise node's rows are quantised, when its parameters come from its own input and only dequantise nodes with the
    same parameters read it; else None.
    """
    source, scale, zero = _operands(node)
    choose = _picked(scale, 0)
    if choose is None or _picked(zero, 1) is not choose or choose.args[0] is not source:
        return None
    for user in node.users:
        if "dequantize" not in str(user.target) or _operands(user)[1:] != (scale, zero):
            return None
    name = str(choose.target)
    kind = _TABLE.get(name)
    return kind(choose) if kind is not None and str(node.meta["val"].dtype) in _BITS8 else None


def _operands(node: Any) -> tuple[Any, Any, Any]:
    a = list(node.args)
    at = 2 if "affine" in str(node.target) else 1
    a += [None] * (at + 2 - len(a))
    return a[0], a[at], a[at + 1]


def _picked(node: Any, i: int) -> Any:
    """The node with several results that node takes result i of."""
    return node.args[0] if getattr(node, "target", None) is operator.getitem and node.args[1] == i else None


def _affine(choose: Any) -> Rows | None:
    _, mapping, block, dtype, lo, hi = (*choose.args, None, None)[:6]
    shape = choose.args[0].meta["val"].shape
    sizes = [b.meta["val"] if hasattr(b, "meta") else b for b in block]
    span = _span(dtype, lo, hi)
    if not sizes or sizes[-1] != shape[-1]:
        return None
    row = all(k == 1 for k in sizes[:-1])
    whole = not row and all(k == d for k, d in zip(sizes, shape, strict=True))
    spans = {"ASYMMETRIC": (255,), "SYMMETRIC": (254, 255)}.get(str(mapping), ())
    return Rows(mapping == "ASYMMETRIC", whole) if (row or whole) and span in spans else None


def _span(dtype: Any, lo: Any, hi: Any) -> int:
    low, high = (-128, 127) if str(dtype) == "torch.int8" else (0, 255)
    return int((high if hi is None else hi) - (low if lo is None else lo))


def _tensor(choose: Any) -> Rows | None:
    affine = "symmetric" not in str(choose.target)
    span = int(choose.args[2] - choose.args[1])
    return Rows(affine, True) if span == 255 or (span == 254 and not affine) else None


def _token(choose: Any) -> Rows | None:
    return Rows("asymmetric" in str(choose.target), False)


_QD = "quantized_decomposed"
_TABLE = {
    "torchao.choose_qparams_affine.default": _affine,
    f"{_QD}.choose_qparams.tensor": _tensor,
    f"{_QD}.choose_qparams_symmetric.tensor": _tensor,
    f"{_QD}.choose_qparams_per_token.default": _token,
    f"{_QD}.choose_qparams_per_token_asymmetric.default": _token,
    f"{_QD}._choose_qparams_per_token_asymmetric_impl.default": _token,
}


# ---- as torch computes them -----------------------------------------------------------------------------------------------
def _range(b: Builder, x: Value, axes: Sequence[int]) -> tuple[Value, Value]:
    """Least and most over axes, 0 included; the axes stay with size 1."""
    low, high = (b.reduce(kind, x, axes, keep=True) if axes else x for kind in (ReduceKind.min, ReduceKind.max))
    return tuple(b.map(lambda v, op=op: v.do(op, 0.0), [t], x.dtype) for t, op in ((low, MapOp.min), (high, MapOp.max)))  # type: ignore[return-value]


def _chosen(b: Builder, low: Value, high: Value, mapping: str, lo: int, hi: int, eps: float,
            zero: int | None = None) -> tuple[Value, Value]:  # fmt: skip
    """(scale, zero) in f32 for a range. zero: of symmetric ones, None: the middle."""
    span = float(hi - lo)

    def scale(a: Any, c: Any) -> Any:
        if mapping == "SYMMETRIC":
            s = (-a).do(MapOp.max, c) / (span / 2)
        elif mapping == "ASYMMETRIC":
            s = (c - a) / span
        else:
            p, q = a / float(lo), c / float(hi)
            s = (p > q).select(p, q)
        return s.do(MapOp.max, eps)

    s = b.map(scale, [low, high], DType.f32, DType.f32)
    if mapping != "ASYMMETRIC":
        return s, b.full(s.shape, float((lo + hi + 1) // 2 if zero is None else zero), DType.f32)

    def point(a: Any, r: Any) -> Any:
        z = r.expr.const(float(lo), DType.f32) - (a / r).do(MapOp.round)
        return z.do(MapOp.fmax, float(lo)).do(MapOp.fmin, float(hi))

    return s, b.map(point, [low, s], DType.f32, DType.f32)


def choose_affine(b: Builder, meta: Any, x: Value, mapping: str, block: Sequence[int | Dim], dtype: Any, lo: Any = None,
                  hi: Any = None, eps: float | None = None, scale_dtype: Any = None, zero_dtype: Any = None,
                  keepdim: bool = False) -> tuple[Value, Value]:  # fmt: skip
    """torchao::choose_qparams_affine. block: elements along each axis that share a scale."""
    low, high = (-128, 127) if str(dtype) == "torch.int8" else (0, 255)
    low, high = low if lo is None else int(lo), high if hi is None else int(hi)
    shape: list[int | Dim] = []
    axes = []
    for d, k in zip(x.shape, block, strict=True):
        if d == k:
            axes.append(len(shape))
            shape.append(d)
        elif k == 1:
            shape.append(d)
        elif isinstance(d, int) and isinstance(k, int):
            shape += [d // k, k]
            axes.append(len(shape) - 1)
        else:
            raise b.error("blocks of quantisation parameters need fixed sizes", "give this dimension a fixed size")
    least = eps if eps is not None else _SMALLEST.get(x.dtype, 2.0**-126)
    wide = b.reshape(b.cast(x, DType.f32), shape)
    s, z = _chosen(b, *_range(b, wide, axes), mapping, low, high, least)
    return _result(b, s, meta[0]), _result(b, z, meta[1])


def choose_tensor(b: Builder, meta: Any, x: Value, lo: int, hi: int, eps: float, dtype: Any) -> tuple[Value, Value]:
    """quantized_decomposed::choose_qparams.tensor and its symmetric form: one range for all elements."""
    wide = b.cast(x, DType.f32)
    symmetric = "symmetric" in str(b.node.target)
    zero = 128 if str(dtype) == "torch.uint8" else 0
    low, high = _range(b, wide, range(wide.type.rank))
    s, z = _chosen(b, low, high, "SYMMETRIC" if symmetric else "ASYMMETRIC", lo, hi, eps, zero)
    return _result(b, s, meta[0]), _result(b, z, meta[1])


def choose_token(b: Builder, meta: Any, x: Value, dtype: Any) -> tuple[Value, Value]:
    """quantized_decomposed::choose_qparams_per_token: a range per row, symmetric or with zero points."""
    wide = b.cast(x, DType.f32)
    if "asymmetric" not in str(b.node.target):
        most = b.reduce(ReduceKind.max, b.map1(MapOp.abs, wide), [-1], keep=True)
        s = b.map(lambda v: v.do(MapOp.max, 1e-5) / 127.0, [most], DType.f32)
        return _result(b, s, meta[0]), _result(b, b.full(s.shape, 0.0, DType.f32), meta[1])
    low, high = _range(b, wide, [-1])
    s = b.map(lambda a, c: ((c - a) / 255.0).do(MapOp.max, 2.0**-23), [low, high], DType.f32)

    def point(a: Any, c: Any, r: Any) -> Any:
        p, q = a / r, c / r
        z = ((p - 128.0) + (q + 127.0) > 0.0).select(-128.0 - p, 127.0 - q)
        return z.do(MapOp.fmax, -128.0).do(MapOp.fmin, 127.0).do(MapOp.round)

    return _result(b, s, meta[0]), _result(b, b.map(point, [low, high, s], DType.f32), meta[1])


def _result(b: Builder, v: Value, meta: Any) -> Value:
    return b.reshape(b.cast(v, b.dtype(meta)), b.shape(meta))
