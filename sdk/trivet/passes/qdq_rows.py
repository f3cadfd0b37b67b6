"""Averages, sums, softmax, normalisation, linear resampling and recurrent layers on stored integers; rows that no product took."""

from __future__ import annotations

from typing import Any

import numpy as np

from trivet import fixed_point as fp
from trivet.error import Error
from trivet.fbs.structs import DType, MapOp, NormKind, PoolKind, ReduceKind, ResizeMode, RnnKind
from trivet.ir import ops
from trivet.ir.expr import Expr, Reg
from trivet.ir.graph import Node, Value
from trivet.ir.types import Quant, Type, per_tensor
from trivet.passes.qdq import Array, Fold, change_attrs, limits, quant, same_meaning, scale_of, stored_attrs


def rows(f: Fold, n: Node) -> bool:
    """One node of these operators."""
    if n.op == "rnn":
        return _rnn(f, n)
    xi = f.stored(n.inputs[0])
    if xi is None:
        return False
    m = f.quantiser(n.outputs[0])
    if m is None:
        return n.op in ("softmax", "norm") and f.refuse(n, "its result is not quantised")
    try:
        return _RULES[n.op](f, n, xi, m)
    except Error as e:
        return f.refuse(n, e.reason)


def _average(f: Fold, n: Node, xi: Value, m: Node) -> bool:
    """pool and reduce."""
    a, yi = n.attrs, m.outputs[0]
    kinds = (PoolKind.avg,) if n.op == "pool" else (ReduceKind.mean, ReduceKind.sum)
    if a.kind not in kinds or yi.dtype != xi.dtype:
        return False
    multiplier, shift = fp.pool_multiplier(scale_of(xi), scale_of(yi))
    lo, hi = limits(yi.type)
    numbers: dict[str, Any] = {"x_zero": quant(xi).zero, "y_zero": quant(yi).zero, "multiplier": multiplier, "shift": shift,
                               "lo": lo, "hi": hi}  # fmt: skip
    if n.op == "reduce":
        f.rw.become(m, "qreduce", [xi], ops.Qreduce(a.kind, a.axes, **numbers), n.loc)
        return True
    attrs = ops.Qpool(a.nd, a.kernel, a.stride, a.pad, a.dilation, a.count_include_pad, a.divisor, a.adaptive, a.ceil_mode,
                      **numbers)  # fmt: skip
    f.rw.become(m, "qpool", [xi], attrs, n.loc)
    return True


def _softmax(f: Fold, n: Node, xi: Value, m: Node) -> bool:
    yi = m.outputs[0]
    if n.attrs.log:
        return f.refuse(n, "the logarithm of a softmax has no integer form")
    if xi.dtype != DType.i8 or yi.dtype != DType.i8 or float(quant(yi).scale) != 1 / 256 or quant(yi).zero != -128:
        return f.refuse(n, "an integer softmax goes from 8 bits to 8 bits of scale 1/256, zero point -128")
    key = ("softmax", scale_of(xi))
    table = f.shared(key, fp.softmax_table(scale_of(xi)), "exp")
    lo, hi = limits(yi.type)
    f.rw.become(m, "qsoftmax", [xi, table], ops.Qsoftmax(n.attrs.axis, -128, lo, hi), n.loc)
    return True


def _norm(f: Fold, n: Node, xi: Value, m: Node) -> bool:
    a, yi = n.attrs, m.outputs[0]
    if a.kind == NormKind.group:
        return f.refuse(n, "a group normalisation has no integer form")
    if xi.dtype != DType.i8 or yi.dtype != DType.i8:
        return f.refuse(n, "an integer normalisation goes from 8 bits to 8 bits")
    weight, bias = (_real(n.inputs[i]) if i < len(n.inputs) and n.inputs[i] is not None else None for i in (1, 2))
    if isinstance(weight, str) or isinstance(bias, str):
        return f.refuse(n, "its weight or bias is not constant")
    count = 1
    for d in xi.shape[xi.type.rank - a.axes :]:
        if not isinstance(d, int):
            return f.refuse(n, "its rows have no fixed size")
        count *= d
    w, b, numbers = fp.norm_operands(quant(xi), quant(yi), weight, bias, a.eps, count)
    operands = [None if t is None else f.const(t, "norm") for t in (w, b)]
    f.rw.become(m, "qnorm", [xi, *operands], ops.Qnorm(a.kind, a.axes, **numbers), n.loc)
    return True


def _real(v: Value | None) -> Array | str:
    if v is None or v.const is None:
        return "not constant"
    out: Array = v.const.data.detach().float().numpy()
    return out


def _resize(f: Fold, n: Node, xi: Value, m: Node) -> bool:
    a, x, y, yi = n.attrs, n.inputs[0], n.outputs[0], m.outputs[0]
    assert x is not None
    if a.mode != ResizeMode.linear:
        return f.refuse(n, "cubic resampling has no integer form")
    for s, d, o in zip(a.scale or (0.0,) * a.nd, x.shape[2:], y.shape[2:], strict=True):
        whole = isinstance(d, int) and isinstance(o, int) and s * d == o
        if s and not a.align_corners and not whole:
            return f.refuse(n, "a scale that does not give whole sizes has no integer form")
    attrs = ops.Qresize(a.nd, a.align_corners)
    same = same_meaning(xi, yi) and quant(xi) == quant(yi)
    if yi.dtype != xi.dtype or (not same and scale_of(yi) < 2 * scale_of(xi)):
        return f.refuse(n, "its result has another scale than its input, so that it would be rounded twice")
    if same:
        f.rw.become(m, "qresize", [xi], attrs, n.loc)
        return True
    made = f.rw.before(m, "qresize", [xi], Type(xi.dtype, y.shape, xi.type.quant), attrs, n.loc)
    f.rw.become(m, "requantize", [made], change_attrs(made, yi), n.loc)
    return True


# ---- recurrent layers -----------------------------------------------------------------------------------------------------
_OUTPUTS = ((DType.i8, per_tensor(fp.RNN_OUT)), (DType.i16, per_tensor(fp.RNN_STATE, bits=16)),
            (DType.i16, per_tensor(fp.RNN_CELL, bits=16)))  # fmt: skip


def _rnn(f: Fold, n: Node) -> bool:
    x, *rest = [*n.inputs, *([None] * 8)][:8]
    w_ih, w_hh, b_ih, b_hh, h0, c0, w_proj = rest
    xi, ih, hh = f.stored(x), f.weight(w_ih), f.weight(w_hh)
    if xi is None and ih is None and hh is None:
        return False
    if xi is None or ih is None or hh is None or xi.dtype != DType.i8:
        return f.refuse(n, "its input and both weights must be quantised to 8 bits")
    if w_proj is not None or n.attrs.kind == RnnKind.relu or n.outputs[0].dtype != DType.f32:
        return f.refuse(n, "a projection or relu has no integer form")
    forms = []
    for w in (ih, hh):
        form = w.symmetric(0)
        if isinstance(form, str):
            return f.refuse(n, form)
        forms.append(form)
    biases = [None if v is None else _real(v) for v in (b_ih, b_hh)]
    if any(isinstance(b, str) for b in biases):
        return f.refuse(n, "its bias is not constant")
    quants = [Quant(s.astype(np.float32), 0, 0) for _, s in forms]
    data = [d.contiguous() for d, _ in forms]
    try:
        scale, b0, b1, numbers = fp.rnn_operands(quant(xi), data[0].numpy(), quants[0], data[1].numpy(), quants[1],
                                                 *biases)  # type: ignore[arg-type]  # fmt: skip
    except Error as e:
        return f.refuse(n, e.reason)
    weights = [f.block(d, w.name) for d, w in zip(data, (ih, hh), strict=True)]
    table = f.shared(("rnn tables",), fp.rnn_tables(), "sigmoid_tanh")
    consts = [None if b is None else f.const(b, f"{ih.name}.bias") for b in (b0, b1)]
    states = [None if v is None else _state(f, n, v, q) for v, (_, q) in zip((h0, c0), _OUTPUTS[1:], strict=True)]
    inputs = [xi, *weights, f.const(scale, f"{ih.name}.scale"), table, *consts, *states]
    attrs = ops.Qrnn(n.attrs.kind, n.attrs.reverse, x_zero=numbers["x_zero"])
    made = f.rw.before(n, "qrnn", list(inputs), Type(DType.i8, n.outputs[0].shape, _OUTPUTS[0][1]), attrs, n.loc)
    assert made.node is not None
    for i, old in enumerate(n.outputs):
        dtype, q = _OUTPUTS[i]
        v = made
        if i:
            v = f.graph.value(Type(dtype, old.shape, q))
            v.node, v.index = made.node, i
            made.node.outputs.append(v)
    for old, v in zip(n.outputs, made.node.outputs, strict=True):
        if not f.rw.dead(old):
            f.rw.replace(old, f.dequantised(n, v, n.loc))
    return True


def _state(f: Fold, n: Node, v: Value, q: Quant) -> Value:
    """An initial state as stored integers."""
    t = Type(DType.i16, v.shape, q)
    return f.rw.before(n, "requantize", [v], t, stored_attrs(Value("", t)), n.loc)


# ---- rows quantised while running -------------------------------------------------------------------------------------------
def expand_rows(f: Fold) -> None:
    """rowquant nodes that no product took in: reductions and a map."""
    for n in list(f.graph.nodes):
        if n.op != "rowquant" or f.rw.dead(n.outputs[0]):
            continue
        x = n.inputs[0]
        assert x is not None
        ends = []
        for kind in (ReduceKind.min, ReduceKind.max):
            attrs = ops.Reduce(kind, (x.type.rank - 1,))
            ends.append(f.rw.before(n, "reduce", [x], Type(x.dtype, (*x.shape[:-1], 1)), attrs, n.loc))
        e = Expr()
        v, lo, hi = (e.load(t) for t in (x, *ends))
        code, inputs = e.finish(_affine(v, lo, hi) if n.attrs.affine else _symmetric(v, lo, hi))
        f.refuse(n, "rows are quantised while running only in front of a matrix product")
        f.rw.become(n, "map", list(inputs), ops.Map(code))


def _symmetric(v: Reg, lo: Reg, hi: Reg) -> Reg:
    most = (-lo).do(MapOp.max, hi).do(MapOp.min, 3.4028234663852886e38)
    q = (v * (most.expr.const(127.0, most.dtype) / most)).do(MapOp.round).do(MapOp.fmax, -127.0).do(MapOp.fmin, 127.0)
    return most.equal(0.0).select(0.0, q * (most / 127.0))


def _affine(v: Reg, lo: Reg, hi: Reg) -> Reg:
    lo, hi = lo.do(MapOp.min, 0.0), hi.do(MapOp.max, 0.0)
    r = ((hi - lo) / 255.0).do(MapOp.max, 2.0**-23)
    z = (-128.0 - (lo / r).do(MapOp.round)).do(MapOp.fmax, -128.0).do(MapOp.fmin, 127.0)
    q = ((v * r.do(MapOp.recip)).do(MapOp.round) + z).do(MapOp.fmax, -128.0).do(MapOp.fmin, 127.0)
    return (q - z) * r


_RULES = {"pool": _average, "reduce": _average, "softmax": _softmax, "norm": _norm, "resize": _resize}
