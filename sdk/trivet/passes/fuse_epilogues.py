"""What follows a matmul or convolution goes into it, while its result is hot: y = act(a @ b + bias + residual).

Bias, then residual, then one activation are taken off the front of the map that alone reads the result; what is left of the
map stays. The node moves to where the map is, so that the residual is there.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trivet.fbs.structs import Act, MapOp
from trivet.ir.graph import Const, Module, Node, Value
from trivet.ir.infer import Sizes
from trivet.ir.peel import Peel
from trivet.ir.rewrite import Rewriter, graphs_of, join_locs
from trivet.ir.types import Type, is_float

if TYPE_CHECKING:
    from trivet.pipeline import Context

_UNARY = {
    MapOp.sigmoid: Act.sigmoid, MapOp.tanh: Act.tanh, MapOp.gelu: Act.gelu, MapOp.gelu_tanh: Act.gelu_tanh,
    MapOp.silu: Act.silu, MapOp.hard_swish: Act.hard_swish, MapOp.hard_sigmoid: Act.hard_sigmoid,
}  # fmt: skip
_PRODUCTS = ("matmul", "conv", "qmatmul", "qconv")


def fuse_epilogues(module: Module, context: Context) -> None:
    """The pass."""
    for graph, sizes in graphs_of(module):
        for _ in range(len(graph.nodes)):
            rw = Rewriter(graph)
            changed = fuse_products(rw, list(graph.nodes), sizes)
            rw.finish()
            if not changed:
                break


def fuse_products(rw: Rewriter, nodes: Sequence[Node], sizes: Sizes, residual: bool = True) -> bool:
    """Takes what follows into those of the nodes that are products. residual False: constant biases and activations only."""
    changed = False
    for n in nodes:
        if n.op in _PRODUCTS and is_float(n.outputs[0].dtype):
            changed = _fuse(n, rw, sizes, residual) or changed
    return changed


def _fuse(n: Node, rw: Rewriter, sizes: Sizes, residual: bool) -> bool:
    y = n.outputs[0]
    m = rw.sole(y)
    if m is None or m.op != "map" or n.attrs.packed:
        return False
    e = _Epilogue(n, m, sizes, residual)
    e.walk()
    if not e.found:
        return False
    p, inputs, attrs = e.best
    loc = join_locs(n.loc, m.loc)
    if p.whole and m.outputs[0].shape == y.shape:
        rw.become(m, n.op, list(inputs), attrs, n.loc)
    else:
        made = rw.before(m, n.op, list(inputs), y.type, attrs, loc)
        rw.set_map(m, *p.rest(made))
    return True


def takes_more(n: Node, rw: Rewriter, sizes: Sizes) -> bool:
    """True when the map that alone reads a product would go into it, as a whole or in part."""
    m = rw.sole(n.outputs[0])
    if m is None or m.op != "map":
        return False
    e = _Epilogue(n, m, sizes, True)
    e.walk()
    return e.found


class _Epilogue:
    """How far a map can go into the node that makes its input."""

    def __init__(self, n: Node, m: Node, sizes: Sizes, residual: bool) -> None:
        self.n, self.y, self.sizes, self.residual = n, n.outputs[0], sizes, residual
        self.p = Peel(m, self.y)
        stored = n.op in ("qconv", "qmatmul")  # their biases may be integers, residuals they have not
        self.inputs: list[Value | None] = list(n.inputs) if stored else [*n.inputs, None, None][:4]
        self.attrs: Any = n.attrs
        self.found = False
        self.best: tuple[Peel, list[Value | None], Any] = (self.p, self.inputs, self.attrs)

    def walk(self) -> None:
        while (k := self._step()) is not None:
            if self.p.step(k):
                self.found = True
                self.best = (self.p, list(self.inputs), self.attrs)

    def _step(self) -> int | None:
        """Takes one more instruction in; its register, or None when it does not fit."""
        k = self.p.next()
        if k is None:
            return self._select() if self.p.at >= 0 else None
        i = self.p.code[k]
        if i.op == MapOp.add and self.attrs.act == Act.none:
            return k if self._add(self.p.loaded(self.p.other(k))) else None
        if i.op in (MapOp.max, MapOp.min):
            return k if self._clamp(i.op, self.p.number(self.p.other(k))) else None
        if i.op == MapOp.relu:
            return k if self._clamp(MapOp.max, 0.0) else None
        if self.attrs.act != Act.none:
            return None
        if i.op in _UNARY:
            self.attrs = replace(self.attrs, act=_UNARY[i.op])
            return k
        if i.op == MapOp.elu:
            self.attrs = replace(self.attrs, act=Act.elu, lo=1.0)
            return k
        return None

    def _add(self, z: Value | None) -> bool:
        if z is None or z is self.y or z.dtype != self.y.dtype or self.n.op not in ("matmul", "conv"):
            return False
        if not self.residual and z.const is None:
            return False
        bias_free = self.inputs[2] is None and self.inputs[3] is None
        if bias_free and self.n.op == "matmul" and _is_row(z, self.y):
            self.inputs[2] = z
            return True
        if bias_free and self.n.op == "conv" and self._channels(z):
            return True
        if self.residual and self.inputs[3] is None and self.sizes.same_shape(z.shape, self.y.shape):
            self.inputs[3] = z
            return True
        return False

    def _channels(self, z: Value) -> bool:
        """Takes a constant with one number per channel as the bias of a convolution."""
        channels = self.y.shape[1]
        at = len(z.shape) - (self.y.type.rank - 1)
        if (
            z.const is None
            or z.const.data is None
            or at < 0
            or z.shape[at] != channels
            or z.const.data.numel() != channels
        ):
            return False
        if z.shape != (channels,):
            c = Const(f"{z.const.name}.flat", z.const.data.reshape(-1))
            z = Value(c.name, Type(z.dtype, (channels,)), const=c)
        self.inputs[2] = z
        return True

    def _clamp(self, op: MapOp, c: Any) -> bool:
        """max(y, c) or min(y, c): a clamp, or the other side of the one that is there."""
        a = self.attrs
        if c is None or not _fits(c):
            return False
        lo, hi = (a.lo, a.hi) if a.act == Act.clamp else (-math.inf, math.inf)
        if a.act not in (Act.none, Act.clamp):
            return False
        if op == MapOp.max:
            if c > hi:
                return False
            lo = max(lo, c)
        else:
            if c < lo:
                return False
            hi = min(hi, c)
        self.attrs = replace(a, act=Act.clamp, lo=float(lo), hi=float(hi))
        return True

    def _select(self) -> int | None:
        """leaky: x > 0 ? x : x * slope; elu: x > 0 ? x : expm1(x) * alpha. The register of the select."""
        p, at = self.p, self.p.at
        if self.attrs.act != Act.none or not is_float(p.code[at].dtype):
            return None
        for s in p.readers[at]:
            i = p.code[s]
            if i.op != MapOp.select or i.args[1] != at:
                continue
            test, no = i.args[0], i.args[2]
            if not self._positive(test) or p.readers[test] != [s] or p.readers[no] != [s]:
                continue
            found = self._slope(no, {at, test, s})
            if found is not None and set(p.readers[at]) <= found[2] | {test, s}:
                act, lo, _ = found
                self.attrs = replace(self.attrs, act=act, lo=lo)
                return s
        return None

    def _positive(self, test: int) -> bool:
        i = self.p.code[test]
        return i.op in (MapOp.gt, MapOp.ge) and i.args[0] == self.p.at and self.p.number(i.args[1]) == 0

    def _slope(self, no: int, known: set[int]) -> tuple[Act, float, set[int]] | None:
        """The negative side: activation, its factor and the instructions that it has."""
        p = self.p
        i = p.code[no]
        if i.op == MapOp.expm1 and i.args[0] == p.at:
            return Act.elu, 1.0, {no}
        if i.op != MapOp.mul:
            return None
        for a, b in (i.args, i.args[::-1]):
            c = p.number(b)
            if c is None or not math.isfinite(c) or not _fits(c):
                continue
            if a == p.at:
                return Act.leaky, float(c), {no}
            if p.code[a].op == MapOp.expm1 and p.code[a].args[0] == p.at and p.readers[a] == [no]:
                return Act.elu, float(c), {no, a}
        return None


def _fits(c: float) -> bool:
    """True when the attributes, which hold f32, hold c."""
    return bool(math.isinf(c) or (abs(c) < 3.4e38 and struct.unpack("f", struct.pack("f", c))[0] == c))


def _is_row(z: Value, y: Value) -> bool:
    """True when z has y's last axis and nothing else: a bias of a matmul."""
    return (
        len(z.shape) >= 1
        and z.shape[-1] == y.shape[-1]
        and all(d == 1 for d in z.shape[:-1])
        and z.type.rank <= y.type.rank
    )
