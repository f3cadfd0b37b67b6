"""Brings quantise and dequantise nodes together: quantising moves up, dequantising down, over everything that only moves elements
or chooses among them. What meets vanishes, or becomes a change of scale.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trivet.error import Error
from trivet.fbs.structs import DType, IndexKind, PadMode, ReduceKind, ScatterReduce
from trivet.ir import ops
from trivet.ir.carry import moves
from trivet.ir.evaluate import evaluate_node
from trivet.ir.graph import Node, Value
from trivet.ir.ops import OPS
from trivet.ir.types import Type
from trivet.passes.canonicalize import merge_equal
from trivet.passes.qdq import (
    Fold,
    change_attrs,
    is_quantise,
    moves_rows,
    quant,
    real_attrs,
    same_meaning,
    stored_attrs,
    to_stored,
)

ROUNDS = 64


def bring_together(f: Fold) -> None:
    """Until nothing moves any more."""
    for _ in range(ROUNDS):
        changed = False
        for n in list(f.graph.nodes):
            if f.rw.gone(n) or (n.outputs and all(f.rw.dead(v) for v in n.outputs)):
                continue
            if is_quantise(n):
                changed = _up(f, n) or changed
            elif n.op == "slice":
                changed = _piece(f, n) or _down(f, n) or changed
            else:
                changed = _down(f, n) or changed
        merge_equal(f.graph, f.rw)
        f.restart()
        if not changed:
            return


# ---- quantise moves up ----------------------------------------------------------------------------------------------------
def _up(f: Fold, n: Node) -> bool:
    """One step; n is real to stored."""
    x, y = n.inputs[0], n.outputs[0]
    assert x is not None
    if x.const is not None:
        return _constant(f, n)
    xi = f.stored(x)
    if xi is not None:
        return _meet(f, n, xi)
    p = x.node
    if p is not None and p.op == "requantize" and p.inputs[0] is not None and p.inputs[0].const is not None:
        return _meet(f, n, p.inputs[0])  # a weight or table, whose scales may be many
    if p is None or p.outputs[0] is not x or f.rw.sole(x) is not n or not _lets_up(f, p):
        return False
    attrs = p.attrs
    if p.op == "pad" and attrs.mode == PadMode.constant:
        attrs = replace(attrs, value=float(to_stored(attrs.value, y.type)))
    sources = [v if _is_index(p, i) else f.rw.before(n, "requantize", [v], _stored_like(v, y), n.attrs, n.loc)
               for i, v in enumerate(p.inputs)]  # fmt: skip
    f.rw.become(n, p.op, list(sources), attrs, p.loc)
    return True


def _stored_like(v: Value | None, y: Value) -> Type:
    assert v is not None
    return Type(y.dtype, v.shape, y.type.quant)


def _is_index(p: Node, i: int) -> bool:
    """gather and scatter read positions, which are no data."""
    return p.op in ("gather", "scatter") and i == 1


def _lets_up(f: Fold, p: Node) -> bool:
    """True when quantising may go in front of p: it chooses elements, and quantising keeps their order."""
    if not moves(p.op, p.attrs) or p.op in ("scan", "sort") or any(not f.rw.dead(v) for v in p.outputs[1:]):
        return False
    data = [v for i, v in enumerate(p.inputs) if not _is_index(p, i)]
    if p.op == "scatter" and (p.attrs.reduce != ScatterReduce.none or any(f.stored(v) is None for v in data)):
        return False
    if p.op == "gather" and f.weight(data[0]) is not None and len(f.rw.users(source(data[0]))) > 1:
        return False  # a table that others read too: qgather reads it as it is
    return all(v is not None and v.dtype == DType.f32 for v in data)


def source(v: Value | None) -> Value:
    """What views show."""
    assert v is not None
    while v.node is not None and OPS[v.node.op].view and v.node.inputs[0] is not None:
        v = v.node.inputs[0]
    return v


def _constant(f: Fold, n: Node) -> bool:
    """A real constant is stored now."""
    x, y = n.inputs[0], n.outputs[0]
    assert x is not None and x.const is not None
    (data,) = evaluate_node(n, [x.const.data.detach()], {})
    f.rw.replace(y, f.const(data, f"{x.const.name}.stored", y.type.quant))
    return True


def _meet(f: Fold, n: Node, xi: Value) -> bool:
    """Stored numbers xi made real and stored again."""
    y = n.outputs[0]
    if quant(xi).per_tensor and same_meaning(xi, y):  # y may allow more numbers: its readers see the same ones
        f.rw.replace(y, xi if xi.type.quant == y.type.quant else _renamed(f, n, xi, y))
        return True
    if xi.const is not None:
        (real,) = evaluate_node(xi_reader(n), [xi.const.data.detach()], {})
        (data,) = evaluate_node(n, [real], {})
        f.rw.replace(y, f.const(data, xi.const.name, y.type.quant))
        return True
    try:
        attrs = change_attrs(xi, y)
    except Error as e:
        return f.refuse(n, e.reason)
    f.rw.become(n, "requantize", [xi], attrs)
    return True


def xi_reader(n: Node) -> Node:
    """The dequantise node in front of a quantise node."""
    assert n.inputs[0] is not None and n.inputs[0].node is not None
    return n.inputs[0].node


def _renamed(f: Fold, n: Node, xi: Value, y: Value) -> Value:
    """xi under y's type, without work."""
    return f.rw.before(n, "bitcast", [xi], y.type, ops.Bitcast(), n.loc)


# ---- dequantise moves down ------------------------------------------------------------------------------------------------
def _down(f: Fold, n: Node) -> bool:
    """n moves elements of dequantised values: it moves the stored ones, which are made real behind it."""
    if n.op in ("expand", "window", "requantize") or not n.outputs:
        return False
    if OPS[n.op].view and n.op != "bitcast" and _under_rows(f, n):
        return True
    arg = n.op == "reduce" and n.attrs.kind in (ReduceKind.argmax, ReduceKind.argmin)
    if not arg and (not moves(n.op, n.attrs) or n.outputs[0].dtype != DType.f32):
        return False
    spots = [i for i, v in enumerate(n.inputs) if v is not None and not _is_index(n, i)]
    if n.op == "gather" and n.attrs.kind == IndexKind.take and f.weight(n.inputs[0]) is not None:
        return False  # a table: qgather
    stored = [f.stored(n.inputs[i]) for i in spots]
    first = stored[0] if stored else None
    if first is None or any(s is None or s.dtype != first.dtype or quant(s) != quant(first) for s in stored):
        return False
    if all(s is not None and s.const is not None for s in stored) and OPS[n.op].view:
        return False  # a weight, read through a view
    attrs = _pad_attrs(n, first)
    if attrs is None:
        return False
    inputs = list(n.inputs)
    for i, s in zip(spots, stored, strict=True):
        inputs[i] = s
    if arg:
        f.rw.become(n, n.op, inputs, attrs)
        return True
    y = n.outputs[0]
    moved = f.rw.before(n, n.op, inputs, Type(first.dtype, y.shape, first.type.quant), attrs, n.loc)
    assert moved.node is not None
    for old in n.outputs[1:]:
        v = f.graph.value(old.type)
        v.node, v.index = moved.node, len(moved.node.outputs)
        moved.node.outputs.append(v)
        f.rw.replace(old, v)
    real = f.rw.before(n, "requantize", [moved], Type(DType.f32, y.shape), real_attrs(moved), n.loc)
    f.rw.replace(y, real)
    return True


def _pad_attrs(n: Node, x: Value) -> object | None:
    """Attributes on stored numbers; None where a border's number has no stored form."""
    if n.op != "pad" or n.attrs.mode != PadMode.constant:
        return n.attrs  # type: ignore[no-any-return]
    q = quant(x)
    stored = to_stored(n.attrs.value, x.type)
    real = np.float32(stored - q.zero) * q.scale
    return replace(n.attrs, value=float(stored)) if float(real) == np.float32(n.attrs.value) else None


def _under_rows(f: Fold, n: Node) -> bool:
    """A view behind a rowquant goes in front of it where rows stay rows."""
    x = n.inputs[0]
    p = x.node if x is not None else None
    if p is None or p.op != "rowquant" or not moves_rows(n):
        return False
    view = f.rw.before(n, n.op, [p.inputs[0]], n.outputs[0].type, n.attrs, n.loc)
    f.rw.become(n, "rowquant", [view], p.attrs, p.loc)
    return True


def _piece(f: Fold, n: Node) -> bool:
    """A slice of a concat that lies in one of its operands is a slice of that: each piece keeps its own scale."""
    x, y, a = n.inputs[0], n.outputs[0], n.attrs
    p = x.node if x is not None else None
    if p is None or p.op != "concat" or p.attrs.axis != a.axis or a.step != 1 or not isinstance(a.start, int):
        return False
    if not any(f.stored(v) is not None for v in p.inputs):
        return False
    start: int = a.start
    size = y.shape[a.axis]
    for v in p.inputs:
        assert v is not None
        n_v = v.shape[a.axis]
        if not isinstance(n_v, int) or not isinstance(size, int):
            return False
        if start < n_v:
            if start + size > n_v:
                return False
            if start == 0 and size == n_v:
                f.rw.replace(y, v)
            else:
                f.rw.become(n, "slice", [v], replace(a, start=start), p.loc)
            return True
        start -= n_v
    return False


def fill(f: Fold) -> None:
    """Numbers for the quantise and dequantise nodes that are left as they were imported."""
    from trivet.ir.infer_quant import plain

    for n in f.graph.nodes:
        if n.op == "requantize" and plain(n.attrs):
            x, y = n.inputs[0], n.outputs[0]
            assert x is not None
            if is_quantise(n):
                n.attrs = stored_attrs(y)
            elif x.type.quant is not None and x.type.quant.per_tensor and x.const is None:
                n.attrs = real_attrs(x)
