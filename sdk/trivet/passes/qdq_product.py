"""Convolutions, matrix products and tables on stored integers, or with stored weights only."""

from __future__ import annotations

from typing import Any

import numpy as np

from trivet.error import Error
from trivet.fbs.structs import Act, DType, IndexKind, MapOp
from trivet.fixed_point import conv_multipliers
from trivet.ir import ops
from trivet.ir.dim import INF, Dim, bounds
from trivet.ir.expr import Expr
from trivet.ir.graph import Node, Value
from trivet.ir.types import Type
from trivet.passes.qdq import HALVES, LARGEST, RANGES, Array, Fold, Weight, clamped, limits, quant, scale_of, to_half


def product(f: Fold, n: Node) -> bool:
    """conv and matmul."""
    if n.attrs.packed or any(v is not None for v in n.inputs[3:4]):
        return False
    if n.outputs[0].dtype in HALVES and f.weight(n.inputs[1]) is not None:
        return product(f, _widened(f, n, 1))
    if n.outputs[0].dtype != DType.f32:
        return False
    return _conv(f, n) if n.op == "conv" else _matmul(f, n)


def _widened(f: Fold, n: Node, at: int) -> Node:
    """A node of halves with a quantised weight at a position computes in f32 and is rounded behind: a new node, in f32."""
    inputs: list[Value | None] = []
    for i, v in enumerate(n.inputs):
        w = f.weight(v) if i == at else None
        if w is not None:
            block = f.block(w.data, w.name, w.quant)
            real = Type(DType.f32, block.shape)
            inputs.append(f.rw.before(n, "requantize", [block], real, ops.Requantize(), n.loc))
        elif v is None or v.dtype not in HALVES:
            inputs.append(v)
        elif v.const is not None:
            inputs.append(f.const(v.const.data.detach().float(), v.const.name))
        elif v.node is not None and to_half(v.node) and _made_by(v.node.inputs[0], "rowquant"):
            inputs.append(v.node.inputs[0])
        else:
            e = Expr()
            code, used = e.finish(e.load(v).cast(DType.f32))
            inputs.append(f.rw.before(n, "map", list(used), Type(DType.f32, v.shape), ops.Map(code), n.loc))
    y = n.outputs[0]
    made = f.rw.before(n, n.op, inputs, Type(DType.f32, y.shape), n.attrs, n.loc)
    e = Expr()
    code, used = e.finish(e.load(made).cast(y.dtype))
    f.rw.become(n, "map", list(used), ops.Map(code))
    assert made.node is not None
    return made.node


def _made_by(v: Value | None, op: str) -> bool:
    return v is not None and v.node is not None and v.node.op == op


def _bias(n: Node, count: int | Dim) -> Array | str | None:
    """The bias as float64 [count]; None without; a text: why it is none that stored sums can have."""
    v = n.inputs[2] if len(n.inputs) > 2 else None
    if v is None:
        return None
    if v.const is None or v.type.count != count:
        return "its bias is no constant row"
    b: Array = v.const.data.detach().reshape(-1).double().numpy()
    return b


def _units(sx: float, sw: Array, sums: Array, bias: Array | None) -> Array:
    """Real per unit of the sums. Columns of zeros have any scale, even one too small for their bias: one that suits it."""
    unit = sx * sw
    if bias is not None:
        unit = np.where(sums == 0, np.maximum(unit, np.abs(bias) * 2.0**-24), unit)
    return unit


def _stored_bias(bias: Array | None, unit: Array) -> Array | None:
    if bias is None:
        return None
    b = np.rint(bias / unit)
    if not bool((np.abs(b) <= LARGEST).all()):
        raise Error("its bias does not fit in 32 bits")
    return b.astype(np.int32)


def _wide(x: Value, zero: int) -> int:
    """Largest |x - zero|."""
    lo, hi = limits(x.type)
    return max(abs(lo - zero), abs(hi - zero))


def _fits(x: Value, sums: Array, bias: Array | None) -> None:
    """Raises Error when sums of 8-bit activations could pass 32 bits. sums: of |w| per column."""
    if x.dtype == DType.i8:
        most = sums.astype(np.float64) * _wide(x, quant(x).zero)
        if bias is not None:
            most = most + np.abs(bias.astype(np.float64))
        if bool((most > LARGEST).any()):
            raise Error("its sums could pass 32 bits")


def _finish(f: Fold, n: Node, op: str, operands: list[Value | None], attrs: dict[str, Any], make: type, unit: Array,
            bias: Array | None, name: str) -> bool:  # fmt: skip
    """The node on stored x: with a stored result where a quantise node alone reads it, else a real one."""
    y, a = n.outputs[0], n.attrs
    b = None if bias is None else f.const(bias, f"{name}.bias")
    m = f.quantiser(y)
    if m is not None and a.act in (Act.none, Act.clamp):
        yi = m.outputs[0]
        try:
            scale = conv_multipliers(1.0, unit, scale_of(yi))
        except Error as e:
            f.refuse(n, e.reason)
        else:
            lo, hi = clamped(yi.type, a.act, a.lo, a.hi)
            attrs |= {"y_zero": quant(yi).zero, "lo": float(lo), "hi": float(hi)}
            f.rw.become(m, op, [*operands, f.const(scale, f"{name}.scale"), b], make(**attrs), n.loc)
            return True
    scale32 = f.const(unit.astype(np.float32), f"{name}.scale")
    f.rw.become(n, op, [*operands, scale32, b], make(**attrs, act=a.act, lo=a.lo, hi=a.hi))
    return True


# ---- convolution ----------------------------------------------------------------------------------------------------------
def _conv(f: Fold, n: Node) -> bool:
    a: ops.Conv = n.attrs
    x, xi, w = n.inputs[0], f.stored(n.inputs[0]), f.weight(n.inputs[1])
    if w is None:
        return xi is not None and f.refuse(n, "its weights are not quantised")
    form = w.symmetric(1 if a.transposed else 0)
    if isinstance(form, str):
        return f.refuse(n, form)
    data, sw = form
    if a.transposed:
        sw = np.tile(sw, a.groups)
    bias = _bias(n, len(sw))
    if isinstance(bias, str):
        return f.refuse(n, bias)
    wv = f.block(data, w.name)
    fixed: dict[str, Any] = {"nd": a.nd, "stride": a.stride, "pad": a.pad, "dilation": a.dilation, "groups": a.groups,
                             "transposed": a.transposed, "kernel": a.kernel}  # fmt: skip
    if xi is not None:
        sums = _channel_sums(data, a)
        unit = _units(scale_of(xi), sw, sums, bias)
        try:
            stored = _stored_bias(bias, unit)
            _fits(xi, sums, stored)
        except Error as e:
            f.refuse(n, e.reason)
        else:
            return _finish(f, n, "qconv", [xi, wv], fixed | {"x_zero": quant(xi).zero}, ops.Qconv, unit, stored, w.name)
    scale = f.const(sw.astype(np.float32), f"{w.name}.scale")
    b = None if bias is None else n.inputs[2]
    f.rw.become(n, "qconv", [x, wv, scale, b], ops.Qconv(**fixed, act=a.act, lo=a.lo, hi=a.hi))
    return True


def _channel_sums(data: Any, a: ops.Conv) -> Array:
    """Sum of |w| per output channel."""
    w = np.abs(data.numpy().astype(np.int32))
    if not a.transposed:
        out: Array = w.reshape(w.shape[0], -1).sum(1)
        return out
    c, o = w.shape[:2]
    per: Array = w.reshape(a.groups, c // a.groups, o, -1).sum((1, 3)).reshape(-1)
    return per


# ---- matrix product -------------------------------------------------------------------------------------------------------
def _matmul(f: Fold, n: Node) -> bool:
    a, b = n.inputs[0], n.inputs[1]
    assert a is not None and b is not None
    if a.type.rank < 2:
        return False
    ai, rows = f.stored(a), a.node if a.node is not None and a.node.op == "rowquant" else None
    w = f.weight(b) if b.type.rank == 2 else None
    if w is None:
        bi = f.stored(b)
        if ai is not None and bi is not None:
            return _activations(f, n, ai, bi)
        if ai is not None or bi is not None or rows is not None:
            f.refuse(n, "one of its operands is not quantised")
        return False
    bias = _bias(n, b.shape[1])
    if isinstance(bias, str):
        return _unbias(f, n)
    if ai is not None and _static(f, n, ai, w, bias):
        return True
    return _weights_only(f, n, w, rows)


def _static(f: Fold, n: Node, ai: Value, w: Weight, bias: Array | None) -> bool:
    """Stored activations times stored weights."""
    q = w.quant
    if q.per_tensor and q.bits == 8:
        data, sw, zero = w.data, np.broadcast_to(q.scale.astype(np.float64), (w.data.shape[1],)), q.zero
    else:
        form = w.symmetric(1)
        if isinstance(form, str):
            return f.refuse(n, form)
        (data, sw), zero = form, 0
    sums = _column_sums(data, zero)
    unit = _units(scale_of(ai), sw, sums, bias)
    try:
        stored = _stored_bias(bias, unit)
        _fits(ai, sums, stored)
    except Error as e:
        return f.refuse(n, e.reason)
    wv = f.block(data, w.name)
    one = len(unit) > 1 and q.axis is None and bool((unit == unit[0]).all())
    attrs = {"a_zero": quant(ai).zero, "b_zero": zero}
    return _finish(f, n, "qmatmul", [ai, wv], attrs, ops.Qmatmul, unit[:1] if one else unit, stored, w.name)


def _column_sums(data: Any, zero: int) -> Array:
    """Sum of |w - zero| down each column, some rows at a time: weights are large."""
    sums = np.zeros(data.shape[1], np.int64)
    for rows in data.split(1024):
        sums += np.abs(rows.numpy().astype(np.int32) - zero).sum(0)
    return sums


def _weights_only(f: Fold, n: Node, w: Weight, rows: Node | None) -> bool:
    """Real activations, or rows quantised while running, times stored weights."""
    q, x = w.quant, n.inputs[0]
    if q.axis is not None and q.axis != (0 if q.group else 1):
        return f.refuse(n, f"its weights have scales along axis {q.axis}")
    why = _no_kernel(w)
    if why:
        return f.refuse(n, why)
    dynamic = 0
    if rows is not None and _deep(w):
        f.refuse(rows, "sums of its rows could pass 32 bits")
    elif rows is not None:
        x, dynamic = rows.inputs[0], 2 if rows.attrs.affine else 1
    scale, offset = _scales(f, w, lambda s: s)
    wv = f.block(w.data, w.name)
    a = n.attrs
    bias = n.inputs[2] if len(n.inputs) > 2 else None
    if bias is not None and bias.type.rank != 1:
        assert bias.const is not None
        bias = f.const(bias.const.data.detach().reshape(-1), bias.const.name)
    attrs = ops.Qmatmul(bits=q.bits, act=a.act, dynamic=dynamic, group=q.group, b_zero=q.zero, lo=a.lo, hi=a.hi)
    f.rw.become(n, "qmatmul", [x, wv, scale, bias, offset], attrs, *([] if rows is None else [rows.loc]))
    return True


def _no_kernel(w: Weight) -> str:
    """Why there is no kernel for real numbers times these weights, "" when there is one."""
    q = w.quant
    low, high = (0, 15) if q.bits == 4 else RANGES[DType.i8]
    if not low <= q.zero <= high:
        return "the zero point of its weights is none of their numbers"
    return f"its weights are in groups of {q.group}, which is no multiple of 8" if q.group % 8 else ""


def _deep(w: Weight) -> bool:
    """True when sums of 8-bit rows times a group of the weights could pass 32 bits."""
    ends = (int(w.data.min()), int(w.data.max())) if w.data.numel() else (0, 0)
    most = max(abs(e - w.quant.zero) for e in ends)
    return most * 255 * (w.quant.group or int(w.data.shape[0])) > LARGEST


def _scales(f: Fold, w: Weight, turn: Any) -> tuple[Value, Value | None]:
    """scale and offset operands: f32, or f16 where that loses nothing."""
    q = w.quant

    def operand(x: Array | None, name: str) -> Value | None:
        if x is None:
            return None
        x = turn(x).reshape(-1) if x.ndim == 0 else turn(x)
        half = x.astype(np.float16)
        small = x.size > 1 and bool((half.astype(np.float32) == x).all())
        return f.shared((name, x.tobytes(), x.shape), half if small else x, f"{w.name}.{name}")

    scale = operand(q.scale, "scale")
    assert scale is not None
    return scale, operand(q.offset, "offset")


def _activations(f: Fold, n: Node, ai: Value, bi: Value) -> bool:
    """The product of two quantised values."""
    k = ai.shape[-1]
    most = k if isinstance(k, int) else _most(f, k)
    if len(n.inputs) > 2 and n.inputs[2] is not None:
        return _unbias(f, n)
    if bi.dtype != DType.i8:
        return f.refuse(n, "its second operand has 16 bits")
    try:
        _fits(ai, np.array([float(most) * _wide(bi, quant(bi).zero)]), None)
    except Error as e:
        return f.refuse(n, e.reason)
    attrs = {"a_zero": quant(ai).zero, "b_zero": quant(bi).zero}
    unit = np.array([scale_of(ai) * scale_of(bi)])
    return _finish(f, n, "qmatmul", [ai, bi], attrs, ops.Qmatmul, unit, None, "product")


def _most(f: Fold, d: Dim) -> int:
    """Upper bound of a size."""
    try:
        return bounds(d, {s.name: (s.min, s.max) for s in f.sizes.symbols.values()})[1]
    except KeyError:
        return INF


def _unbias(f: Fold, n: Node) -> bool:
    """A bias that is no constant row is added behind the product."""
    y, bias = n.outputs[0], n.inputs[2]
    assert bias is not None
    if n.attrs.act != Act.none:
        return f.refuse(n, "its bias is no constant row")
    made = f.rw.before(n, n.op, [*n.inputs[:2], None, None], y.type, n.attrs, n.loc)
    e = Expr()
    code, inputs = e.finish(e.load(made) + e.load(bias))
    f.rw.become(n, "map", list(inputs), ops.Map(code))
    assert made.node is not None and code[-1].op == MapOp.add
    return product(f, made.node)


# ---- tables ---------------------------------------------------------------------------------------------------------------
def table(f: Fold, n: Node) -> bool:
    """gather of rows of a quantised table."""
    w = f.weight(n.inputs[0])
    if w is not None and n.outputs[0].dtype in HALVES:
        return table(f, _widened(f, n, 0))
    if w is None or n.outputs[0].dtype != DType.f32:
        return False
    q = w.quant
    if n.attrs.kind != IndexKind.take or n.attrs.axis != 0 or w.data.dim() != 2:
        return f.refuse(n, "only rows of a matrix are read as stored integers")
    if q.axis is not None and q.axis != (1 if q.group else 0):
        return f.refuse(n, f"its table has scales along axis {q.axis}")
    why = _no_kernel(w)
    if why:
        return f.refuse(n, why)
    scale, offset = _scales(f, w, lambda s: np.ascontiguousarray(s.T) if s.ndim == 2 else s)
    wv = f.block(w.data, w.name)
    f.rw.become(n, "qgather", [wv, n.inputs[1], scale, offset], ops.Qgather(bits=q.bits, group=q.group, zero=q.zero))
    return True
