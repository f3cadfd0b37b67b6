"""What the parts of fold_qdq share: finding stored integers and quantised weights behind values, and making operands."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from trivet.fbs.structs import Act, DType, MapOp
from trivet.ir.carry import Mismatch, carried
from trivet.ir.evaluate import evaluate_node
from trivet.ir.graph import Graph, Loc, Node, Value
from trivet.ir.infer import Sizes
from trivet.ir.interop import dtype_of
from trivet.ir.ops import OPS, Requantize
from trivet.ir.rewrite import Rewriter
from trivet.ir.types import Quant, Type

STORED = (DType.i8, DType.i16)  # dtypes of quantised activations
VIEWS = ("permute", "reshape", "expand", "slice")
HALVES = (DType.f16, DType.bf16)
RANGES = {DType.i8: (-128, 127), DType.i16: (-32768, 32767)}
LARGEST = 2**31 - 1
Array = np.ndarray[Any, Any]


@dataclass(slots=True)
class Weight:
    """A quantised constant as its reader sees it: views between are done. data: torch tensor of stored integers."""

    data: Any
    quant: Quant
    name: str

    def symmetric(self, axis: int) -> tuple[Any, Array] | str:
        """(int8 data that 0 means 0, float64 scale per element of axis), or why there is no such form."""
        import torch

        q, n = self.quant, int(self.data.shape[axis])
        if q.group or q.axis not in (None, axis):
            return "its weights have scales in groups" if q.group else f"its weights have scales along axis {q.axis}"
        scale = np.broadcast_to(q.scale.astype(np.float64), (n,)).copy()
        zero = np.full(n, q.zero, np.float64)
        if q.offset is not None:
            zero -= np.broadcast_to(q.offset.astype(np.float64), (n,)) / scale
        if q.offset is None and q.zero == 0 and self.data.dtype == torch.int8:
            return self.data, scale
        whole = np.rint(zero)
        if not bool((np.abs(zero - whole) < 1e-3).all()):
            return "its weights have an offset"
        shape = [n if i == axis else 1 for i in range(self.data.dim())]
        moved = self.data.to(torch.int32) - torch.from_numpy(whole.astype(np.int32)).reshape(shape)
        if moved.numel() and (int(moved.min()) < -128 or int(moved.max()) > 127):
            return "its weights have zero points"
        return moved.to(torch.int8), scale


@dataclass(slots=True)
class Fold:
    """One graph while it is folded.

    Attributes:
        weights: constants made so far, so that the same form of a weight is one constant: key to Value.
        why: nodes that stay in float although they meet quantised values, with the reason.
    """

    graph: Graph
    sizes: Sizes
    rw: Rewriter
    weights: dict[object, Any] = field(default_factory=dict)
    why: dict[Node, str] = field(default_factory=dict)

    def restart(self) -> None:
        """Puts new nodes in their places and takes dead ones out."""
        self.rw.finish()
        self.rw = Rewriter(self.graph)

    def refuse(self, n: Node, why: str) -> bool:
        """Notes why a node is not folded; False."""
        self.why.setdefault(n, why)
        return False

    # -- reading
    def stored(self, v: Value | None) -> Value | None:
        """The stored integers of a dequantised activation (or constant) with one scale."""
        n = v.node if v is not None else None
        if n is None or n.op != "requantize" or n.outputs[0].dtype != DType.f32:
            return None
        x = n.inputs[0]
        ok = x is not None and x.dtype in STORED and x.type.quant is not None and x.type.quant.per_tensor
        return x if ok else None

    def weight(self, v: Value | None) -> Weight | None:
        """The quantised constant behind a dequantised value and views of it, rounded to half precision or not."""
        views: list[Node] = []
        while v is not None and v.node is not None and (v.node.op in VIEWS or to_half(v.node)):
            if v.node.op in VIEWS:
                views.append(v.node)
            v = v.node.inputs[0]
        n = v.node if v is not None else None
        c = n.inputs[0] if n is not None and n.op == "requantize" else None
        if c is None or c.const is None or c.type.quant is None or not all(w.outputs[0].type.static for w in views):
            return None
        key = (c.const, c.type.quant, *((w.op, repr(w.attrs), w.outputs[0].shape) for w in views))
        if key not in self.weights:
            self.weights[key] = self._through(c, views)
        found: Weight | None = self.weights[key]
        return found

    def _through(self, c: Value, views: list[Node]) -> Weight | None:
        assert c.const is not None
        data, type_ = c.const.data.detach(), c.type
        for w in reversed(views):
            shape = w.outputs[0].shape
            try:
                quant = carried(w.op, w.attrs, [type_], shape)
            except Mismatch:
                return None
            data = evaluate_node(replace_output(w, Type(type_.dtype, shape)), [data], {})[0]
            type_ = Type(type_.dtype, shape, quant)
        assert type_.quant is not None
        return Weight(data, _one_group(type_.quant, tuple(data.shape)), c.const.name)

    def quantiser(self, y: Value) -> Node | None:
        """The quantise node that alone reads y."""
        m = self.rw.sole(y)
        return m if m is not None and is_quantise(m) else None

    # -- making
    def const(self, data: Any, name: str, quant: Quant | None = None) -> Value:
        """A constant of the graph from a torch tensor or numpy array."""
        import torch

        if isinstance(data, np.ndarray):
            data = torch.from_numpy(np.ascontiguousarray(data))
        return self.graph.const(data, name, quant)

    def shared(self, key: object, data: Any, name: str) -> Value:
        """A constant made once per key (in this graph's module): weights in the form that a kernel takes."""
        if key not in self.weights:
            self.weights[key] = self.const(data, name).const
        c = self.weights[key]
        return Value(c.name, Type(dtype_of(c.data), tuple(int(d) for d in c.data.shape)), const=c)

    def block(self, data: Any, name: str, quant: Quant | None = None) -> Value:
        """A weight's stored integers as a constant; the same memory read in the same way is one."""
        key = ("block", data.data_ptr(), tuple(data.shape), data.stride(), data.dtype)
        v = self.shared(key, data, name)
        v.type = with_quant(v.type, quant)
        return v

    def dequantised(self, place: Node, x: Value, loc: Loc) -> Value:
        """A real value of stored integers in front of place."""
        return self.rw.before(place, "requantize", [x], Type(DType.f32, x.shape), real_attrs(x), loc)


def _one_group(q: Quant, shape: tuple[int, ...]) -> Quant:
    """Groups as long as the rows of a matrix are no groups."""
    if not q.group or q.axis is None or len(shape) != 2 or q.group < shape[q.axis]:
        return q
    offset = None if q.offset is None else q.offset.reshape(-1)
    return replace(q, scale=q.scale.reshape(-1), offset=offset, axis=1 - q.axis, group=0)


def replace_output(n: Node, type_: Type) -> Node:
    """The node alone, with an output of another type: for evaluation."""
    m = Node(n.op, n.inputs, [], n.attrs, n.loc)
    m.outputs = [Value("y", type_, m)]
    return m


def quant(v: Value) -> Quant:
    """The quantisation of a stored value."""
    assert v.type.quant is not None
    return v.type.quant


def scale_of(v: Value) -> float:
    """Real per stored number, of a value with one scale."""
    return float(quant(v).scale)


def is_quantise(n: Node) -> bool:
    """From real to stored."""
    x = n.inputs[0] if n.op == "requantize" else None
    return x is not None and x.dtype == DType.f32 and n.outputs[0].dtype in STORED


def is_dequantise(n: Node) -> bool:
    """From stored to real."""
    return n.op == "requantize" and n.outputs[0].dtype == DType.f32


def to_half(n: Node) -> bool:
    """A map that only rounds f32 to half precision."""
    x, y = n.inputs[0] if n.inputs else None, n.outputs[0] if n.outputs else None
    if n.op != "map" or x is None or y is None or x.dtype != DType.f32 or y.dtype not in HALVES or x.shape != y.shape:
        return False
    return [i.op for i in n.attrs.code] == [MapOp.load, MapOp.cast]


def limits(t: Type) -> tuple[int, int]:
    """What the stored numbers of a type are clamped to."""
    assert t.quant is not None
    low, high = RANGES[t.dtype]
    return low if t.quant.lo is None else max(low, t.quant.lo), high if t.quant.hi is None else min(high, t.quant.hi)


def to_stored(x: float, t: Type) -> int:
    """A real number as the type stores it, clamped."""
    assert t.quant is not None
    lo, hi = limits(t)
    if not np.isfinite(x):
        return hi if x > 0 else lo
    with np.errstate(over="ignore"):
        q = np.rint(np.float32(x) * (np.float32(1.0) / t.quant.scale[()])) + t.quant.zero
    return int(min(max(q, lo), hi))


def clamped(t: Type, act: Act, lo: float, hi: float) -> tuple[int, int]:
    """Bounds of a stored result behind an activation that is none or clamp."""
    low, high = limits(t)
    if act == Act.none:
        return low, high
    return max(low, to_stored(lo, t)), min(high, max(to_stored(hi, t), to_stored(lo, t)))


def stored_attrs(y: Value) -> Requantize:
    """Attributes of real to stored."""
    assert y.type.quant is not None
    lo, hi = limits(y.type)
    return Requantize(y_zero=y.type.quant.zero, scale=float(np.float32(1.0) / y.type.quant.scale[()]), lo=lo, hi=hi)


def real_attrs(x: Value) -> Requantize:
    """Attributes of stored to real."""
    assert x.type.quant is not None
    return Requantize(x_zero=x.type.quant.zero, scale=float(x.type.quant.scale))


def change_attrs(x: Value, y: Value, bounds: tuple[int, int] | None = None) -> Requantize:
    """Attributes of stored to stored. Raises Error for scales that are too far apart."""
    from trivet.fixed_point import fixed_point

    lo, hi = limits(y.type) if bounds is None else bounds
    m, s = fixed_point(float(quant(x).scale.astype(np.float64) / quant(y).scale.astype(np.float64)))
    return Requantize(x_zero=quant(x).zero, y_zero=quant(y).zero, multiplier=m, shift=s, lo=lo, hi=hi)


def same_meaning(x: Value, y: Value) -> bool:
    """True when the stored numbers of x mean the same in y, and all of them are allowed there."""
    a, b = quant(x), quant(y)
    if x.dtype != y.dtype or not (a.per_tensor and b.per_tensor) or a.scale != b.scale or a.zero != b.zero:
        return False
    (lo, hi), (low, high) = limits(x.type), limits(y.type)
    return low <= lo and hi <= high


def with_quant(t: Type, q: Quant | None) -> Type:
    """The type with another quantisation."""
    return replace(t, quant=q)


def moves_rows(n: Node) -> bool:
    """True for a view that leaves the last axis as it is."""
    x, y = n.inputs[0], n.outputs[0]
    if x is None or not OPS[n.op].view or x.type.rank == 0 or y.type.rank == 0:
        return False
    if n.op == "reshape":
        return x.shape[-1] == y.shape[-1] and x.shape[-1] != 0
    if n.op == "permute":
        return bool(n.attrs.axes[-1] == x.type.rank - 1)
    return n.op == "slice" and n.attrs.axis != x.type.rank - 1
