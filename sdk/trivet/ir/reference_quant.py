"""What the operators on quantised values mean, in torch: one function per op, as reference_ops.py.

Integers are exact, of any width: where a product could pass 64 bits, Python's integers take over. Steps in f32 come in the order
of schema/ops.fbs and round once each. Sums of products of real numbers are made in f64 and rounded, so that a kernel, whose order
of adding is free, may differ there; all the rest is bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trivet.error import Error
from trivet.fbs.structs import BinaryKind, DType, NormKind, ReduceKind, RnnKind
from trivet.ir import ops
from trivet.ir.infer_quant import plain
from trivet.ir.interop import torch_dtype
from trivet.ir.reference_ops import activate, conv_sum
from trivet.ir.types import Quant

if TYPE_CHECKING:
    from torch import Tensor

    from trivet.ir.graph import Node

Shapes = Sequence[tuple[int, ...]]
BIG = float(np.finfo(np.float32).max)
LIMIT = 1 << 62


# ---- fixed point ------------------------------------------------------------------------------------------------------
def rescale(v: Tensor, m: Any, s: Any) -> Tensor:
    """floor((v * m + 2^(s-1)) / 2^s), s = 0: v * m, for i64 v of any size; results beyond +-2^62 saturate."""
    import torch

    m, s = torch.as_tensor(m, dtype=torch.int64), torch.as_tensor(s, dtype=torch.int64)
    half = torch.where(s > 0, torch.ones_like(s) << (s - 1).clamp(min=0), torch.zeros_like(s))
    if _most(v) * _most(m) + _most(half) < 1 << 63:
        short: Tensor = (v * m + half) >> s
        return short.clamp(-LIMIT, LIMIT)
    wide = [t.numpy().astype(object) for t in (v, m, half, s)]
    return _narrow((wide[0] * wide[1] + wide[2]) >> wide[3])


def divide(v: Tensor, d: Any) -> Tensor:
    """floor((2 * v + d) / (2 * d)) for i64 v of any size and d > 0; results beyond +-2^62 saturate."""
    import torch

    d = torch.as_tensor(d)
    if 2 * _most(v) + _most(d) < 1 << 63 and _most(d) < 1 << 62:
        q: Tensor = torch.div(2 * v + d, 2 * d, rounding_mode="floor")
        return q
    a, b = v.numpy().astype(object), d.numpy().astype(object)
    return _narrow((2 * a + b) // (2 * b))


def _most(t: Tensor) -> int:
    return max(int(t.max()), -int(t.min())) if t.numel() else 0


def _narrow(x: Any) -> Tensor:
    import torch

    return torch.from_numpy(np.clip(x, -LIMIT, LIMIT).astype(np.int64))


def clamp(zero: int, v: Tensor, lo: float, hi: float) -> Tensor:
    """zero + v between lo and hi."""
    return (v + zero).clamp(int(lo), int(hi))


def rounded(x: Tensor, most: float = 2.0**24) -> Tensor:
    """Half to even, as i64; NaN gives 0, what is larger than most counts as that."""
    import torch

    return torch.round(x.nan_to_num(0.0, most, -most).clamp(-most, most)).long()


# ---- real and stored ----------------------------------------------------------------------------------------------------
def spread(array: Any, quant: Quant, shape: Sequence[int]) -> Tensor:
    """A scale or offset as f32 that broadcasts to a value of this shape."""
    import torch

    x = torch.from_numpy(np.ascontiguousarray(array))
    if quant.axis is None:
        return x
    if quant.group:
        return x.repeat_interleave(quant.group, quant.axis).narrow(quant.axis, 0, shape[quant.axis])
    return x.reshape([-1 if i == quant.axis else 1 for i in range(len(shape))])


def dequantize(x: Tensor, quant: Quant) -> Tensor:
    """The real numbers (f32) that stored ones stand for: scale * (stored - zero) + offset, each operation rounded to f32."""
    y = (x.int() - quant.zero).float() * spread(quant.scale, quant, x.shape)
    return y if quant.offset is None else y + spread(quant.offset, quant, x.shape)


def quantize(x: Tensor, quant: Quant, dtype: DType) -> Tensor:
    """Real numbers (f32) stored as quant says: clamp(zero + half_even((x - offset) * (1 / scale))). NaN gives zero."""
    import torch

    inverse = spread(quant.scale, quant, x.shape).reciprocal().nan_to_num(0.0, 0.0, 0.0)  # scale 0: all give zero
    x = x if quant.offset is None else x - spread(quant.offset, quant, x.shape)
    info = torch.iinfo(torch_dtype(dtype))
    lo, hi = (0, 15) if quant.bits == 4 and dtype == DType.u8 else (info.min, info.max)
    lo, hi = lo if quant.lo is None else quant.lo, hi if quant.hi is None else quant.hi
    return clamp(quant.zero, rounded(x * inverse), lo, hi).to(torch_dtype(dtype))


def _requantize(node: Node, inputs: list[Any], shapes: Shapes) -> list[Tensor]:
    a: ops.Requantize = node.attrs
    source, target = node.inputs[0], node.outputs[0]
    x: Tensor = inputs[0]
    assert source is not None
    if plain(a):
        if target.dtype == DType.f32 and source.type.quant is not None:
            return [dequantize(x, source.type.quant)]
        if source.dtype == DType.f32 and target.type.quant is not None:
            return [quantize(x, target.type.quant, target.dtype)]
    if target.dtype == DType.f32:
        return [(x.int() - a.x_zero).float() * np.float32(a.scale).item()]
    if source.dtype == DType.f32:
        v = rounded(x * np.float32(a.scale).item())
    else:
        v = rescale(x.long() - a.x_zero, a.multiplier, a.shift)
    return [clamp(a.y_zero, v, a.lo, a.hi).to(torch_dtype(target.dtype))]


def rows(x: Tensor, affine: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(q - z, r, z) of rows of f32 that are quantised while running: i64 [.., K], f32 [.., 1], i64 [.., 1]."""
    import torch

    x = x.nan_to_num(0.0, float("inf"), float("-inf"))
    ends = x if x.shape[-1] else x.new_zeros(*x.shape[:-1], 1)
    if not affine:
        most = ends.abs().amax(-1, keepdim=True).clamp(max=BIG)
        full = torch.full_like(most, 127.0)  # a number over a tensor would be rounded twice
        q = rounded(x * (full / most)).clamp(-127, 127)
        return torch.where(most == 0, 0, q), most / full, torch.zeros_like(most).long()
    lo, hi = ends.amin(-1, keepdim=True).clamp(max=0.0), ends.amax(-1, keepdim=True).clamp(min=0.0)
    r = ((hi - lo) / torch.full_like(lo, 255.0)).clamp(min=2.0**-23)
    z = (-128 - rounded(lo / r)).clamp(-128, 127)
    return (rounded(x * r.reciprocal()) + z).clamp(-128, 127) - z, r, z


def _rowquant(node: Node, inputs: list[Any], shapes: Shapes) -> list[Tensor]:
    q, r, _ = rows(inputs[0], node.attrs.affine)
    return [q.float() * r]


# ---- elementwise --------------------------------------------------------------------------------------------------------
def _binary(node: Node, inputs: list[Any], shapes: Shapes) -> list[Tensor]:
    n: ops.Binary = node.attrs
    a, b = inputs[0].long() - n.a_zero, inputs[1].long() - n.b_zero
    if n.kind == BinaryKind.mul:
        v = rescale(a * b, n.a_multiplier, n.shift)
    else:
        b = b * n.b_multiplier
        v = rescale(a * n.a_multiplier + (b if n.kind == BinaryKind.add else -b), 1, n.shift)
    return [clamp(n.y_zero, v, n.lo, n.hi).to(inputs[0].dtype).expand(shapes[0])]


def _lookup(node: Node, inputs: list[Any], shapes: Shapes) -> list[Tensor]:
    x, table = inputs
    return [table[x.long() + (128 if x.dtype.is_signed else 0)]]


# ---- products -----------------------------------------------------------------------------------------------------------
def _unpacked(node: Node) -> None:
    if node.attrs.packed:
        raise Error("packed weights have no reference: evaluate before pack_weights", node=str(node.loc))


def _finish(node: Node, acc: Tensor, narrow: bool, scale: Tensor, bias: Any, tail: tuple[int, ...]) -> list[Tensor]:
    """Sums of stored products to a result; tail: shape in which numbers per output broadcast."""
    import torch

    a = node.attrs
    if bias is not None:
        acc = acc + bias.long().reshape(tail)
    if narrow:
        acc = acc.to(torch.int32).long()
    if node.outputs[0].dtype == DType.f32:
        real = torch.from_numpy(acc.numpy().astype(np.float32))
        return [activate(real * scale.reshape(tail), a)]
    v = rescale(acc, scale[0].reshape(tail), scale[1].reshape(tail))
    return [clamp(a.y_zero, v, a.lo, a.hi).to(torch_dtype(node.outputs[0].dtype))]


def _qconv(node: Node, inputs: list[Any], shapes: Shapes) -> list[Tensor]:
    import torch

    a: ops.Qconv = node.attrs
    x, w, scale, bias = (*inputs, None)[:4]
    _unpacked(node)
    tail = (-1, *(1 for _ in range(a.nd)))
    if x.is_floating_point():
        y = conv_sum(x.double(), w.double(), a, shapes[0]).float() * scale.reshape(tail)
        return [activate(y if bias is None else y + bias.reshape(tail), a)]
    # sums below 2^53 are exact in f64
    acc = conv_sum((x.int() - a.x_zero).double(), w.double(), a, shapes[0]).long()
    return _finish(node, acc, x.dtype == torch.int8, scale, bias, tail)


def _qmatmul(node: Node, inputs: list[Any], shapes: Shapes) -> list[Tensor]:
    import torch

    n: ops.Qmatmul = node.attrs
    a, b, scale, bias, offset = (*inputs, None, None)[:5]
    _unpacked(node)
    b = (b.int() - n.b_zero).double()
    if not a.is_floating_point():
        acc = ((a.int() - n.a_zero).double() @ b).long()
        return _finish(node, acc, a.dtype == torch.int8, scale, bias, (-1,))
    scale, offset = (None if t is None else t.float() for t in (scale, offset))
    q, r = (a.double(), torch.ones(())) if n.dynamic == 0 else (t.double() for t in rows(a, n.dynamic == 2)[:2])
    k, total = a.shape[-1], torch.zeros(shapes[0], dtype=torch.float64 if n.dynamic == 0 else torch.float32)
    for g, at in enumerate(range(0, k, n.group)) if n.group else [(0, 0)]:
        size = min(n.group, k - at) if n.group else k
        part, s, o = q.narrow(-1, at, size), *(t if t is None or not n.group else t[g] for t in (scale, offset))
        dot, own = part @ b.narrow(-2, at, size), part.sum(-1, keepdim=a.dim() > 1)
        if n.dynamic:
            dot, own = dot.float(), own.float()
        total = total + dot * s
        total = total if o is None else total + own * o
    y = total.float() if n.dynamic == 0 else total * r.float().reshape(r.shape if a.dim() > 1 else ())
    return [activate(y if bias is None else y + bias, n)]


def _qgather(node: Node, inputs: list[Any], shapes: Shapes) -> list[Tensor]:
    a: ops.Qgather = node.attrs
    table, index, scale, offset = (*inputs, None)[:4]
    _unpacked(node)
    at = index.long().reshape(-1)
    at = at + (at < 0) * table.shape[0]
    if at.numel() and not 0 <= int(at.min()) <= int(at.max()) < table.shape[0]:
        raise Error(f"index out of range of {table.shape[0]}", node=str(node.loc))

    def of(t: Tensor) -> Tensor:
        """Scales of the rows that are read, per element."""
        if not a.group:
            return (t if t.numel() == 1 and table.shape[0] != 1 else t[at][:, None]).float()
        return t[:, at].float().t().repeat_interleave(a.group, 1)[:, : table.shape[1]]

    y = (table[at].int() - a.zero).float() * of(scale)
    return [(y if offset is None else y + of(offset)).reshape(shapes[0])]


# ---- sums over windows and axes -------------------------------------------------------------------------------------------
def _cells(a: ops.Qpool, i: int, n: int, m: int) -> tuple[Tensor, Tensor, Tensor]:
    """Along spatial axis i of n cells: the cells of each of the m windows [m, k], which lie in the input, which count."""
    import torch

    o = torch.arange(m)[:, None]
    if a.adaptive:
        start, end = o * n // max(m, 1), -(-(o + 1) * n // max(m, 1))
        cells = start + torch.arange(int((end - start).max()) if m else 0)
        return cells.clamp(max=max(n - 1, 0)), cells < end, cells < end
    stride, pad, dilation = ((t[i] if t else d) for t, d in ((a.stride, a.kernel[i]), (a.pad, 0), (a.dilation, 1)))
    cells = o * stride - pad + torch.arange(a.kernel[i]) * dilation
    inside = (cells >= 0) & (cells < n)
    return cells.clamp(0, max(n - 1, 0)), inside, cells < n + pad if a.count_include_pad else inside


def _qpool(node: Node, inputs: list[Any], shapes: Shapes) -> list[Tensor]:
    import torch

    a: ops.Qpool = node.attrs
    total: Tensor = inputs[0].long() - a.x_zero
    count = torch.ones([1] * total.dim(), dtype=torch.int64)
    for i in range(a.nd):
        axis = 2 + i
        cells, inside, counted = _cells(a, i, total.shape[axis], shapes[0][axis])
        after = [1] * (a.nd - i - 1)
        window = total.index_select(axis, cells.reshape(-1))
        window = window.reshape(*window.shape[:axis], *cells.shape, *window.shape[axis + 1 :])
        total = torch.where(inside.reshape(*cells.shape, *after), window, 0).sum(axis + 1)
        count = count * counted.sum(1).reshape(-1, *after)
    d = (count if not a.divisor else torch.full_like(count, a.divisor)).clamp(min=1) << a.shift
    return [clamp(a.y_zero, divide(total * a.multiplier, d), a.lo, a.hi).to(inputs[0].dtype)]


def _qreduce(node: Node, inputs: list[Any], shapes: Shapes) -> list[Tensor]:
    a: ops.Qreduce = node.attrs
    x: Tensor = inputs[0].long() - a.x_zero
    count = int(np.prod([x.shape[i] for i in a.axes])) if a.kind == ReduceKind.mean else 1
    total = x.sum(a.axes, keepdim=True) if a.axes else x
    return [clamp(a.y_zero, divide(total * a.multiplier, max(count, 1) << a.shift), a.lo, a.hi).to(inputs[0].dtype)]


def _qsoftmax(node: Node, inputs: list[Any], shapes: Shapes) -> list[Tensor]:
    a: ops.Qsoftmax = node.attrs
    x, table = inputs[0].long(), inputs[1].long()
    if not x.numel():
        return [inputs[0].clone()]
    e = table[x.amax(a.axis, keepdim=True) - x]
    y = divide(e * 256, e.sum(a.axis, keepdim=True).clamp(min=1))
    return [clamp(a.y_zero, y, a.lo, a.hi).to(inputs[0].dtype)]


def _qnorm(node: Node, inputs: list[Any], shapes: Shapes) -> list[Tensor]:
    import torch

    a: ops.Qnorm = node.attrs
    x, weight, bias = (*inputs, None, None)[:3]
    lead = x.dim() - a.axes
    n = int(np.prod(x.shape[lead:]))
    flat = x.long().reshape(*x.shape[:lead], n)
    if a.kind == NormKind.layer:
        total = flat.sum(-1, keepdim=True)
        d, v = n * flat - total, n * (flat * flat).sum(-1, keepdim=True) - total * total
    else:
        flat = flat - a.x_zero
        d, v = n * flat, n * (flat * flat).sum(-1, keepdim=True)
    w = (v + ((n * n * a.eps) >> 16)).clamp(min=1)
    j = torch.zeros_like(w)
    for step in (16, 8, 4, 2, 1):
        j = torch.where((w << (2 * j)) < (1 << (62 - 2 * step)), j + step, j)
    r = _root(w << (2 * j))
    t = divide(d << (j + 12), r)
    t = t if weight is None else t * weight.long().reshape(-1)
    t = t if bias is None else t + bias.long().reshape(-1)
    return [clamp(a.y_zero, rescale(t, a.multiplier, a.shift), a.lo, a.hi).to(x.dtype).reshape(shapes[0])]


def _root(v: Tensor) -> Tensor:
    """floor(sqrt(v)) of i64 below 2^62."""
    r = v.double().sqrt().long()
    r = r - (r * r > v).long()
    return r + ((r + 1) * (r + 1) <= v).long()


def _qresize(node: Node, inputs: list[Any], shapes: Shapes) -> list[Tensor]:
    import torch

    a: ops.Qresize = node.attrs
    x: Tensor = inputs[0].long()
    for axis in range(2, 2 + a.nd):
        n, m = x.shape[axis], shapes[0][axis]
        o = torch.arange(m)
        if a.align_corners:
            p, q = (o * (n - 1), m - 1) if m > 1 else (o * 0, 1)
        else:
            p, q = ((2 * o + 1) * n - m).clamp(min=0), 2 * m
        i = torch.div(p, q, rounding_mode="floor")
        f = divide((p - i * q) * 2048, q).reshape([-1 if k == axis else 1 for k in range(x.dim())])
        low, high = (x.index_select(axis, (i + k).clamp(0, max(n - 1, 0))) for k in (0, 1))
        x = low * (2048 - f) + high * f
    return [rescale(x, 1, 11 * a.nd).to(inputs[0].dtype)]


# ---- recurrent ----------------------------------------------------------------------------------------------------------
def _sat(v: Tensor) -> Tensor:
    return v.clamp(-(1 << 15), (1 << 15) - 1)


def _curve(row: Tensor, v: Tensor) -> Tensor:
    """A table of 513 entries at an i16 in 2^-12, between them on straight lines."""
    k = (v + 32768) >> 7
    return row[k] + rescale((row[k + 1] - row[k]) * (v & 127), 1, 7)


def _qrnn(node: Node, inputs: list[Any], shapes: Shapes) -> list[Tensor]:
    a: ops.Qrnn = node.attrs
    _unpacked(node)
    given: list[Any] = [None if t is None else t.long() for t in (*inputs, *[None] * 4)[:9]]
    x, w_ih, w_hh, scale, table, b_ih, b_hh, h, c = given
    steps, n = x.shape[:2]
    gates = w_ih.shape[0]
    hidden = gates // {RnnKind.lstm: 4, RnnKind.gru: 3}.get(a.kind, 1)
    state = x.new_zeros(n, hidden)
    h, c = state if h is None else h, state if c is None else c
    y = x.new_zeros(steps, n, hidden)

    def side(values: Tensor, w: Tensor, bias: Tensor | None, at: int) -> Tensor:
        acc = (values.double() @ w.double().t()).long() + (0 if bias is None else bias)
        return rescale(acc, scale[at], scale[at + 1]).clamp(-(1 << 24), 1 << 24)

    def byte(v: Tensor) -> Tensor:
        return rescale(v, 1, 8).clamp(-128, 127)

    def s(v: Tensor) -> Tensor:
        return _curve(table[0], _sat(v))

    def t(v: Tensor) -> Tensor:
        return _curve(table[1], _sat(v))

    for step in reversed(range(steps)) if a.reverse else range(steps):
        p, q = side(x[step] - a.x_zero, w_ih, b_ih, 0), side(byte(h), w_hh, b_hh, 2)
        if a.kind == RnnKind.lstm:
            i, f, g, o = (p + q).chunk(4, 1)
            c = _sat(rescale(s(f) * c, 1, 15) + rescale(s(i) * t(g), 1, 19))
            h = _sat(rescale(s(o) * t(2 * c), 1, 15))
        elif a.kind == RnnKind.gru:
            (pr, pz, pn), (qr, qz, qn) = p.chunk(3, 1), q.chunk(3, 1)
            z = s(pz + qz)
            h = _sat(rescale((32768 - z) * t(pn + rescale(s(pr + qr) * qn, 1, 15)) + z * h, 1, 15))
        else:
            h = t(p + q)
        y[step] = byte(h)
    return [v.to(torch_dtype(o.dtype)) for v, o in zip((y, h, c), node.outputs, strict=False)]


KERNELS_QUANT: Mapping[str, Callable[[Node, list[Any], Shapes], list[Tensor]]] = {
    "requantize": _requantize, "rowquant": _rowquant, "binary": _binary, "lookup": _lookup, "qconv": _qconv,
    "qmatmul": _qmatmul, "qgather": _qgather, "qpool": _qpool, "qreduce": _qreduce, "qsoftmax": _qsoftmax,
    "qnorm": _qnorm, "qresize": _qresize, "qrnn": _qrnn,
}  # fmt: skip
