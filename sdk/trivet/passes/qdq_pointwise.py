"""Elementwise expressions on stored integers: tables of one 8-bit value, sums and products of two; what is left computes in float
and converts in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trivet.error import Error
from trivet.fbs.structs import BinaryKind, DType, MapOp
from trivet.fixed_point import binary_multipliers
from trivet.ir import ops
from trivet.ir.graph import Node, Value
from trivet.ir.ops import Instr
from trivet.ir.reference_map import run_map
from trivet.ir.rewrite import join_locs
from trivet.ir.simplify import Code, Simplifier, cost, finish, live_registers, load
from trivet.ir.types import Quant, Type
from trivet.passes.fuse_elementwise import MAX_CODE, MAX_INPUTS, MAX_LIVE
from trivet.passes.qdq import (
    RANGES,
    STORED,
    Fold,
    change_attrs,
    is_dequantise,
    is_quantise,
    limits,
    quant,
    real_attrs,
    scale_of,
    stored_attrs,
    to_stored,
)

CHEAP = 4  # work of an expression of real result that is not worth a table
_KINDS = {MapOp.add: BinaryKind.add, MapOp.sub: BinaryKind.sub, MapOp.mul: BinaryKind.mul}
_BOUNDED = frozenset(("requantize", "binary", "qconv", "qmatmul", "qpool", "qreduce", "qsoftmax", "qnorm"))
_NEAR = 0.25  # of a step of the result: what storing a constant in 8 bits may cost


def elementwise(f: Fold, n: Node) -> bool:
    """A map of dequantised values."""
    stored = {v: xi for v in n.inputs if v is not None and (xi := f.stored(v)) is not None}
    if not stored:
        return False
    if len(n.inputs) == 1:
        (xi,) = stored.values()
        return _single(f, n, xi)
    return len(n.inputs) == 2 and _pair(f, n)


# ---- of one value ---------------------------------------------------------------------------------------------------------
def _single(f: Fold, n: Node, xi: Value) -> bool:
    y, code = n.outputs[0], n.attrs.code
    if xi.shape != y.shape or any(i.op in (MapOp.iota, MapOp.dim) for i in code):
        return False
    bounds = clamp_of(code)
    readers = [m for m in f.rw.users(y) if is_quantise(m)]
    done = False
    for m in readers:
        if (bounds is not None and _clamp(f, n, m, xi, bounds)) or (xi.dtype == DType.i8 and _table(f, n, m, xi)):
            done = True
    if f.rw.dead(y) or xi.dtype != DType.i8 or y.dtype != DType.f32 or cost(code) <= CHEAP:
        return done
    table = f.shared(("lookup", repr(code), quant(xi)), run_map(code, [real_numbers(xi)], (256,), {}), "table")
    f.rw.become(n, "lookup", [xi, table], ops.Lookup())
    return True


def real_numbers(xi: Value) -> Any:
    """The real number of every stored one, f32[256]."""
    q = quant(xi)
    low, high = RANGES[xi.dtype]
    import torch

    return (torch.arange(low, high + 1, dtype=torch.int32) - q.zero).float() * torch.from_numpy(q.scale.reshape(1))


def clamp_of(code: Code) -> tuple[float, float] | None:
    """(least, most) when an expression only bounds its input."""
    lo, hi = -np.inf, np.inf
    at = -1
    for k, i in enumerate(code):
        if i.op == MapOp.load:
            if k and at >= 0:
                return None
            at = k
        elif i.op == MapOp.const_:
            continue
        elif i.op == MapOp.relu and i.args == (at,):
            lo, hi, at = max(lo, 0.0), max(hi, 0.0), k
        elif i.op in (MapOp.max, MapOp.min, MapOp.fmax, MapOp.fmin) and at in i.args:
            other = code[i.args[0] if i.args[1] == at else i.args[1]]
            if other.op != MapOp.const_:
                return None
            c = float(other.value)
            lo, hi = (max(lo, c), max(hi, c)) if i.op in (MapOp.max, MapOp.fmax) else (min(lo, c), min(hi, c))
            at = k
        else:
            return None
    return (float(lo), float(hi)) if at == len(code) - 1 else None


def _clamp(f: Fold, n: Node, m: Node, xi: Value, bounds: tuple[float, float]) -> bool:
    """The quantise node behind a clamp: a change of scale with bounds; with the same scale bounds of what makes xi."""
    yi = m.outputs[0]
    lo, hi = (to_stored(b, yi.type) for b in bounds)
    p = _maker(f, n, m, xi)
    if p is not None and (xi.dtype, quant(xi).scale, quant(xi).zero) == (yi.dtype, quant(yi).scale, quant(yi).zero):
        number = float if isinstance(p.attrs, ops.Qconv | ops.Qmatmul) else int
        a = stored_attrs(xi) if is_quantise(p) else p.attrs
        p.attrs = replace(a, lo=number(max(lo, a.lo)), hi=number(max(lo, a.lo, min(hi, a.hi))))
        p.loc = join_locs(p.loc, n.loc)
        xi.type = yi.type
        f.rw.replace(yi, xi)
        return True
    try:
        attrs = change_attrs(xi, yi, (lo, max(lo, hi)))
    except Error as e:
        return f.refuse(m, e.reason)
    f.rw.become(m, "requantize", [xi], attrs, n.loc)
    return True


def _maker(f: Fold, n: Node, m: Node, xi: Value) -> Node | None:
    """The node that makes xi, when that is bounded and reaches nothing but m, through a dequantise node and n."""
    p, real = xi.node, f.rw.sole(xi)
    if p is None or p.op not in _BOUNDED or real is None or not is_dequantise(real):
        return None
    return p if f.rw.sole(real.outputs[0]) is n and f.rw.sole(n.outputs[0]) is m else None


def _table(f: Fold, n: Node, m: Node, xi: Value) -> bool:
    """The quantise node behind an expression: a table of stored numbers."""
    yi = m.outputs[0]
    code = n.attrs.code
    real = run_map(code, [real_numbers(xi)], (256,), {})
    data = store_numbers(real, yi.type)
    table = f.shared(("lookup", repr(code), quant(xi), yi.dtype, yi.type.quant), data, "table")
    f.rw.become(m, "lookup", [xi, table], ops.Lookup(), n.loc)
    return True


def store_numbers(real: Any, t: Type) -> Any:
    """Real numbers as a type stores them, as the kernel quantises them."""
    from trivet.ir.reference_quant import quantize

    assert t.quant is not None
    return quantize(real, t.quant, t.dtype)


# ---- of two values --------------------------------------------------------------------------------------------------------
def _pair(f: Fold, n: Node) -> bool:
    """act(a + b), act(a - b), act(a * b) with a stored result."""
    m = f.quantiser(n.outputs[0])
    found = _operation(n.attrs.code)
    if m is None or found is None:
        return False
    kind, spots, bounds = found
    yi = m.outputs[0]
    operands = [_operand(f, n.inputs[i], yi.dtype) for i in spots]
    if any(v is None for v in operands):
        return False
    a, b = (_stored_constant(f, n, v, other, kind, yi) if v is not None and v.dtype == DType.f32 else v
            for v, other in zip(operands, reversed(operands), strict=True))  # fmt: skip
    if a is None or b is None:
        return False
    try:
        ma, mb, shift = binary_multipliers(kind, scale_of(a), scale_of(b), scale_of(yi))
    except Error as e:
        return f.refuse(n, e.reason)
    if max(ma, mb) >= 1 << 31:
        return f.refuse(n, "the scales of its operands are too far apart")
    lo, hi = limits(yi.type)
    if bounds is not None:
        least, most = (to_stored(c, yi.type) for c in bounds)
        lo, hi = max(lo, least), min(hi, max(most, least))
    attrs = ops.Binary(kind, quant(a).zero, quant(b).zero, quant(yi).zero, ma, mb, shift, lo, hi)
    f.rw.become(m, "binary", [a, b], attrs, n.loc)
    return True


def _operation(code: Code) -> tuple[BinaryKind, tuple[int, int], tuple[float, float] | None] | None:
    """(kind, input positions, bounds) of one operation of two loads that may be bounded."""
    at = next((k for k, i in enumerate(code) if i.op in _KINDS), None)
    if at is None or code[at].dtype != DType.f32 or any(code[r].op != MapOp.load for r in code[at].args):
        return None
    p, q = (code[r].value for r in code[at].args)
    if p == q or sum(i.op == MapOp.load for i in code) != 2:
        return None
    kept = [k for k, i in enumerate(code) if i.op != MapOp.load]
    result = Instr(MapOp.load, DType.f32, (), 0)  # the operation's, for what follows
    place = {k: j for j, k in enumerate(kept)}
    try:
        rest = tuple(result if k == at else replace(code[k], args=tuple(place[r] for r in code[k].args)) for k in kept)
    except KeyError:
        return None
    bounds = clamp_of(rest)
    if bounds is None:
        return None
    return _KINDS[code[at].op], (p, q), None if bounds == (-np.inf, np.inf) else bounds


def _operand(f: Fold, v: Value | None, dtype: DType) -> Value | None:
    """Stored integers of the dtype, or a real constant."""
    xi = f.stored(v)
    if xi is not None:
        return xi if xi.dtype == dtype else None
    return v if v is not None and v.const is not None and v.dtype == DType.f32 else None


def _stored_constant(f: Fold, n: Node, v: Value, other: Value | None, kind: BinaryKind, yi: Value) -> Value | None:
    """A real constant as stored integers, where that costs next to nothing."""
    assert v.const is not None
    data = v.const.data.detach()
    if other is None or other.dtype not in STORED or not data.numel() or not bool(data.isfinite().all()):
        return None
    low, high = min(0.0, float(data.min())), max(0.0, float(data.max()))
    least, most = RANGES[yi.dtype]
    scale = np.float32((high - low) / (most - least) or 1.0)
    exact = float(np.abs(data.numpy() - np.rint(data.numpy() / scale) * scale).max())
    lo, hi = limits(other.type)
    reach = scale_of(other) * max(abs(lo - quant(other).zero), abs(hi - quant(other).zero))
    reach = reach if kind == BinaryKind.mul else 1.0
    if exact * reach > _NEAR * scale_of(yi):
        f.refuse(n, "its constant needs more than 8 bits")
        return None
    q = Quant(scale.reshape(()), int(min(max(np.rint(least - low / scale), least), most)))
    t = Type(yi.dtype, v.shape, q)
    return f.const(store_numbers(data, t), v.const.name, q)


# ---- in float -------------------------------------------------------------------------------------------------------------
def merge(f: Fold) -> None:
    """Maps read stored integers and write them where nothing else is between."""
    for n in f.graph.nodes:
        if n.op == "map" and not f.rw.gone(n):
            _take_in(f, n)
    f.restart()
    for n in list(f.graph.nodes):
        if is_quantise(n):
            _take_out(f, n)
    f.restart()


def _rebuild(code: Code, inputs: Sequence[Value | None],
             stored: dict[Value, Value]) -> tuple[Simplifier, list[Value], int]:  # fmt: skip
    """The expression with dequantised values read as they are stored; (code, what it loads, result)."""
    s = Simplifier()
    values: list[Value] = []
    regs: list[int] = []
    for i in code:
        if i.op != MapOp.load:
            regs.append(s.add(i.op, i.dtype, tuple(regs[r] for r in i.args), i.value))
            continue
        v = inputs[i.value]
        assert v is not None
        xi = stored.get(v)
        if xi is None:
            regs.append(load(s, values, v))
            continue
        a = real_attrs(xi)
        r = s.add(MapOp.cast, DType.f32, (load(s, values, xi),))
        if a.x_zero:
            r = s.add(MapOp.sub, DType.f32, (r, s.const(a.x_zero, DType.f32)))
        regs.append(s.add(MapOp.mul, DType.f32, (r, s.const(a.scale, DType.f32))))
    return s, values, regs[-1]


def _small(code: Code, inputs: Sequence[Value]) -> bool:
    return len(inputs) <= MAX_INPUTS and len(code) <= MAX_CODE and live_registers(code) <= MAX_LIVE


def _take_in(f: Fold, n: Node) -> None:
    """Dequantised inputs of a map are read as they are stored."""
    stored = {v: xi for v in n.inputs if v is not None and (xi := f.stored(v)) is not None}
    if not stored:
        return
    s, values, result = _rebuild(n.attrs.code, n.inputs, stored)
    code, inputs = finish(s.code, result, values)
    if _small(code, inputs):
        locs = [v.node.loc for v in stored if v.node is not None]
        f.rw.become(n, "map", list(inputs), ops.Map(code), *locs)


def _take_out(f: Fold, m: Node) -> None:
    """A quantise node behind a map that it alone reads goes into it."""
    x, y = m.inputs[0], m.outputs[0]
    p = x.node if x is not None else None
    if x is None or p is None or p.op != "map" or f.rw.sole(x) is not m or x.shape != y.shape:
        return
    a = stored_attrs(y)
    s, values, r = _rebuild(p.attrs.code, p.inputs, {})
    r = s.add(MapOp.round, DType.f32, (s.add(MapOp.mul, DType.f32, (r, s.const(a.scale, DType.f32))),))
    if a.y_zero:
        r = s.add(MapOp.add, DType.f32, (r, s.const(a.y_zero, DType.f32)))
    r = s.add(MapOp.fmax, DType.f32, (r, s.const(a.lo, DType.f32)))
    r = s.add(MapOp.fmin, DType.f32, (r, s.const(a.hi, DType.f32)))
    code, inputs = finish(s.code, s.add(MapOp.cast, y.dtype, (r,)), values)
    if _small(code, inputs):
        f.rw.become(m, "map", list(inputs), ops.Map(code), p.loc)
