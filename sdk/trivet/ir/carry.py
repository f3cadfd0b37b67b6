"""How the quantisation of a value passes through operators that only move its elements (or choose among them)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trivet.fbs.structs import IndexKind, PoolKind, ReduceKind, ResizeMode, ScanKind, ScatterReduce
from trivet.ir.dim import Dim, Shape
from trivet.ir.types import Quant, Type

_ALWAYS = frozenset({"copy", "transfer", "permute", "reshape", "expand", "slice", "window", "diagonal", "concat", "gather",
                     "pad", "sort"})  # fmt: skip


class Mismatch(Exception):
    """The inputs of a node do not go together; the text says why."""


def moves(op: str, attrs: Any) -> bool:
    """True when output 0 of the operator holds elements of its inputs and nothing else."""
    if op in _ALWAYS:
        return True
    if op == "reduce":
        return attrs.kind in (ReduceKind.max, ReduceKind.min)
    if op == "scatter":
        return attrs.reduce in (ScatterReduce.none, ScatterReduce.max, ScatterReduce.min)
    if op == "scan":
        return attrs.kind in (ScanKind.max, ScanKind.min)
    if op == "pool":
        return bool(attrs.kind == PoolKind.max)
    return op == "resize" and attrs.mode in (ResizeMode.nearest, ResizeMode.nearest_exact)


def carried(op: str, attrs: Any, inputs: Sequence[Type | None], shape: Shape) -> Quant | None:
    """Quantisation of output 0 of an operator that moves elements. shape: the output's.

    One scale for all elements stays as it is. Scales along an axis or of groups (weights) pass through copies, views and
    concat where the result can be described in the same way.

    Raises:
        Mismatch: inputs of different quantisation, or scales that the operator would tear apart.
    """
    types = [t for t in (inputs if op == "concat" else (*inputs[:1], *inputs[2:3])) if t is not None]
    x = types[0]
    quants = [t.quant for t in types]
    if all(q is None for q in quants):
        return None
    if op == "concat" and all(q is not None and q.axis is not None for q in quants):
        return _concat(attrs.axis, types, [q for q in quants if q is not None])
    for i, q in enumerate(quants):
        if q != x.quant:
            raise Mismatch(f"inputs 0 and {i if op == 'concat' else 2} hold numbers of different quantisation: "
                           f"{_text(x.quant)} and {_text(q)}")  # fmt: skip
    quant = x.quant
    if quant is None or quant.axis is None or op in ("copy", "transfer"):
        return quant
    rule = _VIEWS.get(op)
    out = rule(quant, quant.axis, attrs, x.shape, shape) if rule is not None else None
    if out is None:
        raise Mismatch(f"{op} cannot keep the quantisation along axis {quant.axis} of {x}")
    return out


def _text(q: Quant | None) -> str:
    return "none" if q is None else str(q)


def scale_shape(quant: Quant, shape: Shape) -> Shape:
    """Shape of scale and offset for a value of this shape."""
    if quant.axis is None:
        return ()
    if not quant.group:
        return (shape[quant.axis],)
    n = shape[quant.axis]
    return (
        *shape[: quant.axis],
        (n + quant.group - 1) // quant.group if isinstance(n, int) else n,
        *shape[quant.axis + 1 :],
    )


def _both(quant: Quant, change: Callable[[Any], Any], axis: int) -> Quant:
    """Scale and offset changed alike."""
    offset = None if quant.offset is None else np.ascontiguousarray(change(quant.offset))
    return replace(quant, scale=np.ascontiguousarray(change(quant.scale)), offset=offset, axis=axis)


def _permute(q: Quant, axis: int, attrs: Any, x: Shape, y: Shape) -> Quant:
    at = attrs.axes.index(axis)
    return _both(q, lambda s: s.transpose(attrs.axes), at) if q.group else replace(q, axis=at)


def _reshape(q: Quant, axis: int, attrs: Any, x: Shape, y: Shape) -> Quant | None:
    if q.group:
        if [d for d in x if d != 1] != [d for d in y if d != 1] or x[axis] == 1:
            return None
        at = [i for i, d in enumerate(y) if d != 1][sum(d != 1 for d in x[:axis])]
        shape = list(y)
        shape[at] = -1
        return _both(q, lambda s: s.reshape(shape), at)
    before, n = _product(x[:axis]), x[axis]
    for at, d in enumerate(y):
        if d == n and _product(y[:at]) == before:
            return replace(q, axis=at)
    return None


def _product(shape: Shape) -> int | Dim:
    n: int | Dim = 1
    for d in shape:
        n = n * d
    return n


def _expand(q: Quant, axis: int, attrs: Any, x: Shape, y: Shape) -> Quant | None:
    at = axis + len(y) - len(x)
    same = x[axis] == y[at] if not q.group else x == y[len(y) - len(x) :] and len(x) == len(y)
    return replace(q, axis=at) if same else None


def _slice(q: Quant, axis: int, attrs: Any, x: Shape, y: Shape) -> Quant | None:
    start, size, step = attrs.start, y[attrs.axis], attrs.step
    if attrs.axis != axis and not q.group:
        return q
    if not isinstance(start, int) or not isinstance(size, int) or not isinstance(x[axis], int):
        return None
    if attrs.axis == axis and q.group:
        ends = start + size
        if step != 1 or start % q.group or (ends % q.group and ends != x[axis]):
            return None
        start, size = start // q.group, -(-size // q.group)
    at = np.arange(size) * step + start
    return _both(q, lambda s: s.take(at, axis=attrs.axis if q.group else 0), axis)


def _gather(q: Quant, axis: int, attrs: Any, x: Shape, y: Shape) -> Quant | None:
    if q.group or attrs.kind != IndexKind.take or attrs.axis == axis:
        return None
    return replace(q, axis=axis + (len(y) - len(x) if attrs.axis < axis else 0))


def _concat(axis: int, types: Sequence[Type], quants: Sequence[Quant]) -> Quant:
    """Weights joined: their scales are joined along the channels, or are the same."""
    q = quants[0]
    rest = [(p.axis, p.group, p.zero, p.bits, p.offset is None, p.lo, p.hi) for p in quants]
    if any(r != rest[0] for r in rest):
        raise Mismatch(f"inputs have quantisation of different kinds: {', '.join(str(p) for p in quants)}")
    at = axis if q.group else 0
    if axis != q.axis and not q.group:
        if any(p != q for p in quants):
            raise Mismatch("inputs joined beside the quantised axis have different scales")
        return q
    if (
        axis == q.axis
        and q.group
        and any(not isinstance(t.shape[axis], int) or t.shape[axis] % q.group for t in types[:-1])
    ):
        raise Mismatch(f"inputs joined along axis {axis} would break groups of {q.group}")
    offset = None if q.offset is None else np.concatenate([p.offset for p in quants if p.offset is not None], at)
    return replace(q, scale=np.concatenate([p.scale for p in quants], at), offset=offset)


_VIEWS: dict[str, Callable[[Quant, int, Any, Shape, Shape], Quant | None]] = {
    "permute": _permute, "reshape": _reshape, "expand": _expand, "slice": _slice, "gather": _gather}  # fmt: skip
