"""The operators on quantised values: types of their results, and what their operands and attributes must be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np

from trivet.fbs.structs import BinaryKind, DType, NormKind, ReduceKind, RnnKind
from trivet.fixed_point import NORM_MOST
from trivet.ir import ops
from trivet.ir.carry import scale_shape
from trivet.ir.dim import Dim, Shape, floor_div
from trivet.ir.graph import Node
from trivet.ir.infer import Inputs, Sizes, declared, first, need, opt, req
from trivet.ir.types import Quant, Type

STORED = (DType.i8, DType.i16)  # activations
_LIMITS = {DType.i8: (-128, 127), DType.i16: (-(1 << 15), (1 << 15) - 1)}


def infer_quant(node: Node, inputs: Inputs, sizes: Sizes) -> list[Type]:
    """As ir.infer.infer."""
    return _RULES[node.op](node, inputs, sizes)


def _dtype(t: Type, name: str, *wanted: DType) -> None:
    need(t.dtype in wanted, "{} is {}, not {}", name, t.dtype.name, " or ".join(d.name for d in wanted))


def _zero(t: Type, name: str, zero: int) -> None:
    """The attribute for a zero point must be what the type says, and a number of the dtype."""
    need(t.quant is None or t.quant.per_tensor, "{} {} needs one scale and no offset", name, t)
    need(t.quant is None or t.quant.zero == zero, "{} is {}, the attribute says zero point {}", name, t, zero)
    if t.dtype in _LIMITS:
        lo, hi = _LIMITS[t.dtype]
        need(lo <= zero <= hi, "zero point {} of {} is no {}", zero, name, t.dtype.name)


def _shape(t: Type | None, name: str, shape: Shape, sizes: Sizes, *dtypes: DType) -> None:
    """An operand that may be missing."""
    if t is not None:
        _dtype(t, name, *dtypes)
        need(sizes.same_shape(t.shape, shape), "{} {} has not the shape [{}]", name, t, ",".join(map(str, shape)))


def _weight(w: Type, name: str, zero: int, bits: int = 8) -> None:
    q = w.quant
    if q is not None:
        need(q.bits == bits, "{} {} has {} bits, the attribute says {}", name, w, q.bits, bits)
        need(q.zero == zero, "{} is {}, the attribute says zero point {}", name, w, zero)


def plain(a: ops.Requantize) -> bool:
    """True when the attributes say nothing: the types' quantisation says it all."""
    return all(getattr(a, f.name) == f.default for f in fields(a))


def _requantize(node: Node, inputs: Inputs, sizes: Sizes) -> list[Type]:
    a: ops.Requantize = node.attrs
    x, y = first(inputs), declared(node)
    real = x.dtype == DType.f32
    need(real or y.dtype == DType.f32 or (x.dtype in STORED and y.dtype in STORED), "from {} to {}", x.dtype.name, y)
    need(not (real and y.dtype == DType.f32), "from f32 to f32")
    if plain(a) and (real or y.dtype == DType.f32):
        need((y if real else x).quant is not None, "{} says nothing of scale and zero point", y if real else x)
        return [Type(y.dtype, x.shape, y.quant if real else None)]
    _dtype(x, "x", DType.f32, *STORED)
    _dtype(y, "y", DType.f32, *STORED)
    if not real:
        _zero(x, "x", a.x_zero)
    if y.dtype != DType.f32:
        _zero(y, "y", a.y_zero)
    _multiplier(x.quant, y.quant, 1.0, a)
    return [Type(y.dtype, x.shape, None if y.dtype == DType.f32 else y.quant)]


def _multiplier(x: Quant | None, y: Quant | None, factor: float, a: ops.Requantize) -> None:
    """scale, or multiplier and shift, against the types that are known."""
    if x is not None and y is not None:
        want, got = float(x.scale) / float(y.scale), a.multiplier / 2.0**a.shift
    elif x is not None:
        want, got = float(x.scale), a.scale
    elif y is not None:
        want, got = 1.0 / float(y.scale), a.scale
    else:
        return
    close = abs(want - got) <= 1e-3 * abs(want) + 1e-9
    need(close, "the types say a factor of {:.6g}, the attributes {:.6g}", want, got)


def _rowquant(node: Node, inputs: Inputs, sizes: Sizes) -> list[Type]:
    x = first(inputs)
    _dtype(x, "x", DType.f32)
    need(x.rank >= 1, "x {} needs rows", x)
    return [x]


def _binary(node: Node, inputs: Inputs, sizes: Sizes) -> list[Type]:
    a: ops.Binary = node.attrs
    x, z, y = first(inputs), req(inputs, 1), declared(node)
    for t, name, zero in ((x, "a", a.a_zero), (z, "b", a.b_zero), (y, "y", a.y_zero)):
        _dtype(t, name, *STORED)
        need(t.dtype == x.dtype, "a is {}, {} is {}", x.dtype.name, name, t.dtype.name)
        _zero(t, name, zero)
    return [Type(x.dtype, sizes.broadcast([x.shape, z.shape]), y.quant)]


def _lookup(node: Node, inputs: Inputs, sizes: Sizes) -> list[Type]:
    x, table = first(inputs), req(inputs, 1)
    _dtype(x, "x", DType.i8, DType.u8)
    need(table.shape == (256,), "the table is {}, it needs 256 elements", table)
    y = declared(node)
    need(table.quant is None or table.quant == y.quant, "the table is {}, y {}", table, y)
    return [Type(table.dtype, x.shape, y.quant if table.dtype != DType.f32 else None)]


def _product(node: Node, inputs: Inputs, sizes: Sizes, x: Type, made: int | Dim, shape: Shape) -> Type:
    """scale, bias and result of qconv, and of qmatmul with a stored first operand."""
    a, scale, y = node.attrs, req(inputs, 2), declared(node)
    stored = y.dtype in STORED
    _dtype(y, "y", DType.f32, *(STORED if x.dtype in STORED else ()))
    one = node.op == "qmatmul" and scale.shape[-1:] == (1,)
    full: Shape = (*((2,) if stored else ()), 1 if one else made)
    _shape(scale, "scale", full, sizes, DType.i32 if stored else DType.f32)
    _shape(opt(inputs, 3), "bias", (made,), sizes, DType.i32 if x.dtype in STORED else DType.f32)
    if stored:
        _zero(y, "y", a.y_zero)
        lo, hi = _LIMITS[y.dtype]
        need(lo <= a.lo <= a.hi <= hi, "bounds {}..{} of a result of {}", a.lo, a.hi, y.dtype.name)
    return Type(y.dtype, shape, y.quant if stored else None)


def _qconv(node: Node, inputs: Inputs, sizes: Sizes) -> list[Type]:
    a: ops.Qconv = node.attrs
    x, w, want = first(inputs), req(inputs, 1), declared(node)
    _dtype(x, "x", DType.f32, *STORED)
    need(x.rank == a.nd + 2 and want.rank == x.rank, "x {} and y {} need {} axes", x, want, a.nd + 2)
    if x.dtype in STORED:
        _zero(x, "x", a.x_zero)
    if a.packed:
        return [Type(want.dtype, (x.shape[0], *want.shape[1:]), want.quant)]
    _dtype(w, "w", DType.i8)
    _weight(w, "w", 0)
    need(w.rank == a.nd + 2, "weight {} needs {} axes", w, a.nd + 2)
    taken = w.shape[0] if a.transposed else w.shape[1] * a.groups
    need(sizes.same(x.shape[1], taken), "x has {} channels, the weight takes {}", x.shape[1], taken)
    made = w.shape[1] * a.groups if a.transposed else w.shape[0]
    return [_product(node, inputs, sizes, x, made, (x.shape[0], made, *want.shape[2:]))]


def _qmatmul(node: Node, inputs: Inputs, sizes: Sizes) -> list[Type]:
    n: ops.Qmatmul = node.attrs
    a, b, want = first(inputs), req(inputs, 1), declared(node)
    stored = a.dtype in STORED
    _dtype(a, "a", DType.f32, *STORED)
    if stored:
        _zero(a, "a", n.a_zero)
        need(n.dynamic == 0 and n.group == 0, "a is stored: dynamic and group are for real ones")
        need(opt(inputs, 4) is None, "a is stored: an offset is for real ones")
    if n.packed:
        return [want]
    _dtype(b, "b", DType.u8 if n.bits == 4 else DType.i8)
    _weight(b, "b", n.b_zero, n.bits)
    need(a.rank >= 1 and b.rank >= 2, "operands {} and {} have too few axes", a, b)
    need(sizes.same(a.shape[-1], b.shape[-2]), "inner sizes of {} and {} differ", a, b)
    batch = sizes.broadcast([a.shape[:-2], b.shape[:-2]])
    shape = (*batch, a.shape[-2], b.shape[-1]) if a.rank > 1 else (*batch, b.shape[-1])
    if stored:
        return [_product(node, inputs, sizes, a, b.shape[-1], shape)]
    _groups(n.group, inputs, 4, b.shape[-2], b.shape[-1], sizes)
    _shape(opt(inputs, 3), "bias", b.shape[-1:], sizes, DType.f32)
    return [Type(DType.f32, shape)]


def _groups(group: int, inputs: Inputs, offset: int, k: int | Dim, n: int | Dim, sizes: Sizes) -> None:
    """scale and offset: [G, N] with groups, else [N] or [1]."""
    for i, name in ((2, "scale"), (offset, "offset")):
        t = opt(inputs, i)
        shape: Shape = (floor_div(k + group - 1, group), n) if group else (n,)
        _shape(t, name, (1,) if not group and t is not None and t.shape == (1,) else shape, sizes, DType.f32, DType.f16)


def _qgather(node: Node, inputs: Inputs, sizes: Sizes) -> list[Type]:
    a: ops.Qgather = node.attrs
    table, index = first(inputs), req(inputs, 1)
    _dtype(index, "the index", DType.i64, DType.i32)
    if a.packed:
        return [Type(DType.f32, (*index.shape, declared(node).shape[-1]))]
    _dtype(table, "the table", DType.u8 if a.bits == 4 else DType.i8)
    _weight(table, "the table", a.zero, a.bits)
    need(table.rank == 2, "the table {} needs two axes", table)
    _groups(a.group, inputs, 3, table.shape[1], table.shape[0], sizes)
    return [Type(DType.f32, (*index.shape, table.shape[1]))]


def _ends(node: Node, inputs: Inputs, *wanted: DType) -> tuple[Type, Type]:
    """x and declared y of an operator from a stored dtype to the same."""
    x, y = first(inputs), declared(node)
    _dtype(x, "x", *wanted)
    _zero(x, "x", getattr(node.attrs, "x_zero", 0 if x.quant is None else x.quant.zero))
    _zero(y, "y", node.attrs.y_zero)
    return x, y


def _qpool(node: Node, inputs: Inputs, sizes: Sizes) -> list[Type]:
    a: ops.Qpool = node.attrs
    x, y = _ends(node, inputs, *STORED)
    need(x.rank == a.nd + 2 and y.rank == x.rank, "x {} and y {} need {} axes", x, y, a.nd + 2)
    return [Type(x.dtype, (*x.shape[:2], *y.shape[2:]), y.quant)]


def _qreduce(node: Node, inputs: Inputs, sizes: Sizes) -> list[Type]:
    x, y = _ends(node, inputs, *STORED)
    return [Type(x.dtype, tuple(1 if i in node.attrs.axes else d for i, d in enumerate(x.shape)), y.quant)]


def _qsoftmax(node: Node, inputs: Inputs, sizes: Sizes) -> list[Type]:
    x, y = _ends(node, inputs, DType.i8)
    _shape(req(inputs, 1), "the table", (256,), sizes, DType.i32)
    return [Type(DType.i8, x.shape, y.quant)]


def _qnorm(node: Node, inputs: Inputs, sizes: Sizes) -> list[Type]:
    x, y = _ends(node, inputs, DType.i8)
    row = replace(x, shape=x.shape[x.rank - node.attrs.axes :]).count
    need(not isinstance(row, int) or row <= NORM_MOST, "rows of {} values, at most {} are possible", row, NORM_MOST)
    for i, name in ((1, "weight"), (2, "bias")):
        _shape(opt(inputs, i), name, x.shape[x.rank - node.attrs.axes :], sizes, DType.i32)
    return [Type(DType.i8, x.shape, y.quant)]


def _qresize(node: Node, inputs: Inputs, sizes: Sizes) -> list[Type]:
    x, y = first(inputs), declared(node)
    _dtype(x, "x", *STORED)
    need(x.rank == node.attrs.nd + 2 and y.rank == x.rank, "x {} and y {} need {} axes", x, y, node.attrs.nd + 2)
    return [Type(x.dtype, (*x.shape[:2], *y.shape[2:]), x.quant)]


def _qrnn(node: Node, inputs: Inputs, sizes: Sizes) -> list[Type]:
    a: ops.Qrnn = node.attrs
    x, w_ih, w_hh = first(inputs), req(inputs, 1), req(inputs, 2)
    _dtype(x, "x", DType.i8)
    _zero(x, "x", a.x_zero)
    need(x.rank == 3, "x {} needs 3 axes", x)
    gates = {RnnKind.lstm: 4, RnnKind.gru: 3}.get(a.kind, 1)
    hidden = declared(node, 1).shape[-1] if a.packed else floor_div(w_ih.shape[0], gates)
    if not a.packed:
        _shape(w_ih, "w_ih", (gates * hidden, x.shape[2]), sizes, DType.i8)
        _shape(w_hh, "w_hh", (gates * hidden, hidden), sizes, DType.i8)
        _weight(w_ih, "w_ih", 0)
        _weight(w_hh, "w_hh", 0)
        for i, name in ((5, "b_ih"), (6, "b_hh")):
            _shape(opt(inputs, i), name, (gates * hidden,), sizes, DType.i32)
    _shape(req(inputs, 3), "scale", (4, gates * hidden), sizes, DType.i32)
    _shape(req(inputs, 4), "the table", (2, 513), sizes, DType.i16)
    state: Shape = (x.shape[1], hidden)
    for i, name in ((7, "h0"), (8, "c0")):
        _shape(opt(inputs, i), name, state, sizes, DType.i16)
    made = [Type(DType.i8, (*x.shape[:2], hidden)), Type(DType.i16, state), Type(DType.i16, state)]
    return [replace(t, quant=declared(node, i).quant) for i, t in enumerate(made[: len(node.outputs)])]


_RULES: dict[str, Callable[[Node, Inputs, Sizes], list[Type]]] = {
    "requantize": _requantize, "rowquant": _rowquant, "binary": _binary, "lookup": _lookup, "qconv": _qconv, "qmatmul": _qmatmul,
    "qgather": _qgather, "qpool": _qpool, "qreduce": _qreduce, "qsoftmax": _qsoftmax, "qnorm": _qnorm,
    "qresize": _qresize, "qrnn": _qrnn,
}  # fmt: skip
QUANTISED = frozenset(_RULES)


# ---- attributes and types by themselves ------------------------------------------------------------------------------
def attrs_wrong(node: Node) -> str:
    """What is wrong with the attributes of an operator on quantised values, "" for nothing."""
    a: Any = node.attrs
    x, y = node.inputs[0], node.outputs[0]
    rank = x.type.rank if x is not None else 0
    if isinstance(a, ops.Requantize) and plain(a):
        return ""
    if hasattr(a, "shift") and not 0 <= a.shift <= (40 if isinstance(a, ops.Qpool | ops.Qreduce) else 62):
        return f"shift {a.shift}"
    narrow = isinstance(a, ops.Qpool | ops.Qreduce | ops.Qnorm)
    for name in ("multiplier", "a_multiplier", "b_multiplier"):
        if not 0 <= getattr(a, name, 0) < 1 << (23 if narrow else 31):
            return f"{name} {getattr(a, name)}"
    if hasattr(a, "hi") and not isinstance(a, ops.Qconv | ops.Qmatmul) and y.dtype in _LIMITS:
        lo, hi = _LIMITS[y.dtype]
        if not lo <= a.lo <= a.hi <= hi:
            return f"bounds {a.lo}..{a.hi} of a result of {y.dtype.name}"
    if isinstance(a, ops.Qsoftmax) and not 0 <= a.axis < rank:
        return f"axis {a.axis} of {rank}"
    if isinstance(a, ops.Qreduce):
        if len(set(a.axes)) != len(a.axes) or not all(0 <= i < rank for i in a.axes):
            return f"axes {a.axes} of {rank}"
        if a.kind not in (ReduceKind.sum, ReduceKind.mean):
            return f"kind {a.kind.name}"
    if isinstance(a, ops.Qnorm) and (a.kind == NormKind.group or not 0 <= a.axes <= rank or not 0 <= a.eps < 1 << 32):
        return f"kind {a.kind.name}, {a.axes} of {rank} axes, eps {a.eps}"
    if isinstance(a, ops.Qmatmul | ops.Qgather) and (a.bits not in (4, 8) or a.group < 0 or a.group % 8):
        return f"{a.bits} bits in groups of {a.group}"
    if isinstance(a, ops.Qmatmul) and not 0 <= a.dynamic <= 2:
        return f"dynamic {a.dynamic}"
    if isinstance(a, ops.Qrnn) and a.kind == RnnKind.relu:
        return "kind relu"
    return "kind" if isinstance(a, ops.Binary) and a.kind not in BinaryKind else ""


def quant_wrong(t: Type) -> str:
    """What is wrong with the quantisation of a type, "" for nothing."""
    q = t.quant
    if q is None:
        return ""
    if t.dtype not in (DType.i8, DType.u8, DType.i16):
        return f"{t.dtype.name} is no dtype of quantised values"
    if q.axis is not None and not 0 <= q.axis < t.rank:
        return f"quantised along axis {q.axis} of {t.rank}"
    if q.group < 0 or (q.group and q.axis is None) or q.bits not in (4, 8, 16):
        return f"groups of {q.group} along axis {q.axis}, {q.bits} bits"
    want = scale_shape(q, t.shape)
    for name, s in (("scale", q.scale), ("offset", q.offset)):
        if s is not None and (s.dtype != np.float32 or tuple(s.shape) != want):
            return f"{name} is {s.dtype}[{','.join(map(str, s.shape))}], not float32[{','.join(map(str, want))}]"
        if s is not None and not bool(np.isfinite(s).all()):
            return f"{name} is not finite"
    return "" if q.axis is not None or float(q.scale) > 0 else f"scale {q.scale} is not positive"
