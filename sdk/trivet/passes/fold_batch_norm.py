"""Scales and shifts per channel go into the weights beside them, computed in f64 and rounded once.

Behind a convolution, a transposed one or a matmul always; in front of a convolution or matmul too, but a shift in front of a
padded convolution stays: the padding is not shifted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trivet.fbs.structs import Act, MapOp
from trivet.ir.dim import floor_div
from trivet.ir.graph import Const, Graph, Module, Node, Value
from trivet.ir.infer import Sizes
from trivet.ir.interop import torch_dtype
from trivet.ir.peel import HALVES, Peel
from trivet.ir.rewrite import Rewriter, graphs_of, join_locs
from trivet.ir.types import Type, is_float

if TYPE_CHECKING:
    from trivet.pipeline import Context

_AFFINE = (MapOp.add, MapOp.sub, MapOp.mul, MapOp.div, MapOp.neg)


def fold_batch_norm(module: Module, context: Context) -> None:
    """The pass."""
    made: dict[object, Const] = {}
    for graph, sizes in graphs_of(module):
        rw = Rewriter(graph)
        for n in list(graph.nodes):
            if n.op in ("conv", "matmul"):
                _behind(n, rw, graph, made)
        rw.finish()
        rw = Rewriter(graph)
        for n in list(graph.nodes):
            if n.op in ("conv", "matmul"):
                _in_front(n, rw, sizes, made)
        rw.finish()


@dataclass(slots=True)
class _Affine:
    """x * scale + shift, f64 tensors of one element or one per channel."""

    scale: Any
    shift: Any

    def step(self, op: MapOp, c: Any, left: bool) -> None:
        """Followed by `op c` (left) or `c op`."""
        if op == MapOp.neg:
            self.scale, self.shift = -self.scale, -self.shift
        elif op == MapOp.add:
            self.shift = self.shift + c
        elif op == MapOp.sub:
            self.scale, self.shift = (self.scale, self.shift - c) if left else (-self.scale, c - self.shift)
        elif op == MapOp.mul:
            self.scale, self.shift = self.scale * c, self.shift * c
        else:
            self.scale, self.shift = self.scale / c, self.shift / c


def _walk(p: Peel, channels: int, axis: int, scaling: bool) -> tuple[_Affine | None, int]:
    """The affine function at the front of a map and how many instructions it has. axis: of the channels, from the right."""
    import torch

    total, steps = _Affine(torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)), 0
    good: tuple[_Affine | None, int] = (None, 0)
    while (k := p.next()) is not None:
        i = p.code[k]
        if i.op not in _AFFINE or not is_float(i.dtype):
            break
        c: Any = None
        if i.op != MapOp.neg:
            c = _constant(p, p.other(k), channels, axis)
            if c is None or (i.op == MapOp.div and not p.first(k)):
                break
        if not scaling and i.op != MapOp.add and not (i.op == MapOp.sub and p.first(k)):
            break
        total.step(i.op, c, p.first(k))
        steps += 1
        if p.step(k):
            good = (_Affine(total.scale, total.shift), steps)
    return good


def _constant(p: Peel, r: int, channels: int, axis: int) -> Any:
    """A constant operand as f64 with one element, or one per channel; None when it is neither."""
    import torch

    x = p.number(r)
    if x is not None:
        return torch.tensor(float(x), dtype=torch.float64)
    v = p.loaded(r)
    if v is None or v.const is None or v.const.data is None:
        return None
    shape = v.shape
    if len(shape) >= axis and shape[-axis] == channels and v.const.data.numel() == channels:
        return v.const.data.detach().double().reshape(-1)
    return v.const.data.detach().double().reshape(()) if v.const.data.numel() == 1 else None


def _weights(n: Node) -> tuple[Any, Any] | None:
    """Weight and bias (or None) of a node that can take a scale; None when they are not constant or the node is complete."""
    a = n.attrs
    if a.packed or a.act != Act.none or (len(n.inputs) > 3 and n.inputs[3] is not None):
        return None
    w, b = n.inputs[1], n.inputs[2] if len(n.inputs) > 2 else None
    if w is None or w.const is None or w.const.data is None or not is_float(w.dtype):
        return None
    if n.op == "matmul" and w.type.rank != 2:
        return None
    if b is not None and (b.const is None or b.const.data is None):
        return None
    if b is not None and n.op == "matmul" and b.const is not None and any(d != 1 for d in b.shape[:-1]):
        return None
    return w.const.data.detach(), None if b is None or b.const is None else b.const.data.detach()


def _outputs(n: Node, w: Any) -> int:
    """Output channels."""
    if n.op == "matmul":
        return int(w.shape[1])
    return int(w.shape[1] * n.attrs.groups if n.attrs.transposed else w.shape[0])


def _out_scale(n: Node, s: Any, w: Any) -> Any:
    """A scale per output channel in a shape that multiplies the weight."""
    if s.numel() == 1 or n.op == "matmul":
        return s
    if not n.attrs.transposed:
        return s.reshape(-1, *[1] * (w.dim() - 1))
    # [C, O/groups, k..]: rows of group g make the outputs of group g
    g = n.attrs.groups
    return s.reshape(g, 1, -1).expand(g, w.shape[0] // g, -1).reshape(w.shape[0], -1, *[1] * (w.dim() - 2))


def _scaled(w: Any, scale: Any) -> Any:
    """w * scale in f64, rounded once to w's dtype; a few rows at a time, since a whole f64 copy would be the export's peak."""
    import torch

    out = torch.empty(w.shape, dtype=w.dtype)
    scale = scale.expand(w.shape)
    rows = max(1, (1 << 18) // max(1, w[:1].numel()))
    for at in range(0, w.shape[0], rows):
        out[at : at + rows] = torch.mul(w[at : at + rows], scale[at : at + rows])  # the scale is f64, so is the product
    return out


def _finite(*tensors: Any) -> bool:
    return all(t.numel() == 0 or all(math.isfinite(x.item()) for x in t.aminmax()) for t in tensors)


def _behind(n: Node, rw: Rewriter, graph: Graph, made: dict[object, Const]) -> None:
    found = _weights(n)
    m = rw.sole(n.outputs[0])
    if found is None or m is None or m.op != "map":
        return
    w, b = found
    channels = _outputs(n, w)
    p = Peel(m, n.outputs[0])
    f, _ = _walk(p, channels, 1 if n.op == "matmul" else n.attrs.nd + 1, n.outputs[0].dtype not in HALVES)
    if f is None:
        return
    shift = f.shift.expand(channels)
    bias = shift if b is None else _flat(b, channels) * f.scale + shift
    weight = _scaled(w, _out_scale(n, f.scale, w)) if bool((f.scale != 1).any()) else None
    if not _finite(bias, *([] if weight is None else [weight])):
        return
    _set(n, rw, made, weight, bias, "bn")
    y = n.outputs[0]
    n.loc = join_locs(n.loc, m.loc)
    rw.set_map(m, *p.rest(y))


def _flat(b: Any, channels: int) -> Any:
    return b.double().reshape(-1).expand(channels)


def _in_front(n: Node, rw: Rewriter, sizes: Sizes, made: dict[object, Const]) -> None:
    found = _weights(n)
    x = n.inputs[0]
    m = x.node if x is not None else None
    if found is None or x is None or m is None or m.op != "map" or rw.sole(x) is not n or n.inputs.count(x) != 1:
        return
    if n.outputs[0].dtype in HALVES or (n.op == "conv" and n.attrs.transposed):
        return
    w, b = found
    channels = int(w.shape[0] if n.op == "matmul" else w.shape[1] * n.attrs.groups)
    sources = [v for v in m.inputs if v is not None and v.const is None]
    if len(sources) != 1 or sources[0].shape != x.shape:
        return
    p = Peel(m, sources[0])
    f, _ = _walk(p, channels, 1 if n.op == "matmul" else n.attrs.nd + 1, True)
    if f is None or not p.whole:
        return
    shifted = bool((f.shift != 0).any())
    if shifted and n.op == "conv" and not _unpadded(n, w, sizes):
        return
    scale, shift = f.scale.expand(channels), f.shift.expand(channels)
    wide = w.double()
    if n.op == "matmul":
        weight, extra = wide * scale[:, None], shift @ wide
    else:
        g = n.attrs.groups
        split = wide.reshape(g, w.shape[0] // g, w.shape[1], -1)
        weight = (split * scale.reshape(g, 1, -1, 1)).reshape(w.shape)
        extra = (split * shift.reshape(g, 1, -1, 1)).sum((2, 3)).reshape(-1)
    bias = extra if b is None else _flat(b, _outputs(n, w)) + extra
    if not _finite(weight, bias):
        return
    _set(n, rw, made, weight, bias if shifted or b is not None else None, "affine")
    rw.become(n, n.op, [sources[0], *n.inputs[1:]], n.attrs, m.loc)


def _unpadded(n: Node, w: Any, sizes: Sizes) -> bool:
    """True when every cell that the convolution reads lies in its input."""
    x, y, a = n.inputs[0], n.outputs[0], n.attrs
    if x is None or any(a.pad):
        return False
    for d, o, k, s, e in zip(x.shape[2:], y.shape[2:], w.shape[2:], a.stride, a.dilation, strict=True):
        if not sizes.same(floor_div(d - e * (int(k) - 1) - 1, s) + 1, o):
            return False
    return True


def _set(n: Node, rw: Rewriter, made: dict[object, Const], weight: Any, bias: Any, tag: str) -> None:
    """New weight and bias constants; entries that share the old ones share the new ones."""
    w, b = n.inputs[1], n.inputs[2] if len(n.inputs) > 2 else None
    assert w is not None and w.const is not None
    dtype = torch_dtype(w.dtype)
    key = (w.const, b and b.const, n.op, getattr(n.attrs, "groups", 1))
    new_w, new_b = w, b
    if weight is not None:
        new_w = _const(made, (key, "weight"), f"{w.const.name}.{tag}", weight.to(dtype))
    if bias is not None:
        new_b = _const(
            made, (key, "bias"), f"{b.const.name if b and b.const else w.const.name}.{tag}_shift", bias.to(dtype)
        )
    rw.become(n, n.op, [n.inputs[0], new_w, new_b, *n.inputs[3:]], n.attrs)


def _const(made: dict[object, Const], key: object, name: str, data: Any) -> Value:
    import torch

    c = made.get(key)
    if c is None or not torch.equal(c.data, data):
        c = made[key] = Const(name, data.contiguous())
    from trivet.ir.interop import dtype_of

    return Value(c.name, Type(dtype_of(c.data), tuple(c.data.shape)), const=c)
