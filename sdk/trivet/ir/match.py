"""Looks at the instructions of neighbouring maps as one expression, so that a pattern does not depend on how they are cut."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from trivet.fbs.structs import DType, MapOp
from trivet.ir.dim import INF, Dim, bounds
from trivet.ir.graph import Node, Value
from trivet.ir.infer import Sizes
from trivet.ir.ops import Instr, Map
from trivet.ir.rewrite import Rewriter
from trivet.ir.simplify import finish
from trivet.ir.types import Type, is_float


@dataclass(frozen=True, slots=True)
class Term:
    """The result of instruction k of a map, or (node None) a value that no map makes."""

    node: Node | None
    k: int
    source: Value | None

    @property
    def op(self) -> MapOp | None:
        """The instruction, None for a value."""
        return None if self.node is None else self.instr.op

    @property
    def instr(self) -> Instr:
        assert self.node is not None
        instr: Instr = self.node.attrs.code[self.k]
        return instr

    @property
    def dtype(self) -> DType:
        return self.instr.dtype if self.source is None else self.source.dtype

    @property
    def args(self) -> list[Term]:
        """Operands of the instruction."""
        return [] if self.node is None else [term_at(self.node, a) for a in self.instr.args]

    @property
    def value(self) -> Value | None:
        """The value that holds the term, None for an instruction in the middle of a map."""
        if self.node is None:
            return self.source
        return self.node.outputs[0] if self.k == len(self.node.attrs.code) - 1 else None

    @property
    def number(self) -> float | None:
        """The number that the term always is."""
        if self.op == MapOp.const_:
            return float(self.instr.value)
        c = self.source.const if self.source is not None else None
        return float(c.data.item()) if c is not None and c.data is not None and c.data.numel() == 1 else None

    def made_by(self, op: str) -> Node | None:
        """The node of kind op that makes the value."""
        n = self.source.node if self.source is not None else None
        return n if n is not None and n.op == op else None


def term(v: Value) -> Term:
    """The term of a value."""
    n = v.node
    return Term(None, 0, v) if n is None or n.op != "map" else term_at(n, len(n.attrs.code) - 1)


def term_at(n: Node, k: int) -> Term:
    """The term of an instruction; a load is what it loads."""
    i: Instr = n.attrs.code[k]
    if i.op != MapOp.load:
        return Term(n, k, None)
    v = n.inputs[i.value]
    assert v is not None
    return term(v)


def either(t: Term, op: MapOp) -> Iterator[tuple[Term, Term]]:
    """Both orders of the operands when t is op."""
    if t.op == op:
        a, b = t.args
        yield a, b
        yield b, a


def scaled(t: Term) -> tuple[Term, float]:
    """(x, c) with t = x * c, c a number; c is 1 when t is no such product."""
    c = 1.0
    while True:
        for x, y in either(t, MapOp.mul):
            n = y.number
            if n is not None and math.isfinite(n) and n != 0:
                t, c = x, c * n
                break
        else:
            if t.op == MapOp.div:
                n = t.args[1].number
                if n is not None and math.isfinite(n) and n != 0:
                    t, c = t.args[0], c / n
                    continue
            return t, c


def extract(t: Term, place: Node, rw: Rewriter, sizes: Sizes) -> Value:
    """A value that holds the term: its own, or that of a new map in front of place."""
    if t.value is not None:
        return t.value
    n = t.node
    assert n is not None
    inputs = [v for v in n.inputs if v is not None]
    code, used = finish(n.attrs.code, t.k, inputs)
    shape = sizes.broadcast([v.shape for v in used])
    if any(i.op == MapOp.iota for i in code):
        shape = n.outputs[0].shape
    return rw.before(place, "map", list(used), Type(t.dtype, shape), Map(code), n.loc)


class Ranges:
    """Bounds of terms.

    Attributes:
        first: only for position 0 along the last axis: what every row of a mask is sure to have.
        flags: integers that are not known are taken for 0 or 1 in arithmetic (not in comparisons): numeric masks.
    """

    def __init__(self, sizes: Sizes, first: bool = False, flags: bool = False) -> None:
        self.sizes, self.first, self.flags = sizes, first, flags

    def _unknown(self, dtype: DType) -> tuple[float, float]:
        small = dtype == DType.bool or (self.flags and not is_float(dtype))
        return (0.0, 1.0) if small else (-math.inf, math.inf)

    def of(self, t: Term, depth: int = 40) -> tuple[float, float]:
        """(least, most); (-inf, inf) when nothing is known."""
        if depth == 0:
            return -math.inf, math.inf
        if t.node is None:
            return self._value(t.source, depth)
        i = t.instr
        if i.op == MapOp.const_:
            return float(i.value), float(i.value)
        if i.op == MapOp.iota:
            last = i.value == t.node.outputs[0].type.rank - 1
            return (0.0, 0.0) if self.first and last else (0.0, math.inf)
        if i.op == MapOp.dim:
            return self._dim(i.value)
        known = Ranges(self.sizes, self.first) if i.dtype == DType.bool else self
        return self._instr(i, [known.of(a, depth - 1) for a in t.args], t)

    def _dim(self, d: int | Dim) -> tuple[float, float]:
        limits = {s.name: (s.min, s.max) for s in self.sizes.symbols.values()}
        try:
            lo, hi = bounds(d, limits)
        except KeyError:
            return -math.inf, math.inf
        return (-math.inf if lo <= -INF else float(lo)), (math.inf if hi >= INF else float(hi))

    def _value(self, v: Value | None, depth: int) -> tuple[float, float]:
        if v is None:
            return -math.inf, math.inf
        if v.const is not None and v.const.data is not None:
            x = v.const.data
            x = x[..., 0] if self.first and x.dim() and x.shape[-1] else x
            if not x.numel() or bool(x.isnan().any()):
                return -math.inf, math.inf
            return float(x.min()), float(x.max())
        n = v.node
        x0 = n.inputs[0] if n is not None and n.inputs else None
        if n is None or x0 is None:
            return self._unknown(v.dtype)
        if n.op == "slice" and not (n.attrs.axis == v.type.rank - 1 and n.attrs.start != 0 and self.first):
            return self.of(term(x0), depth - 1)
        if n.op in ("reshape", "expand"):
            same = v.shape[-1:] == x0.shape[-1:] or (n.op == "expand" and x0.shape[-1:] in ((), (1,)))
            inner = self if same else Ranges(self.sizes, flags=self.flags)
            return inner.of(term(x0), depth - 1)
        return self._unknown(v.dtype)

    def _instr(self, i: Instr, args: list[tuple[float, float]], t: Term) -> tuple[float, float]:
        op = i.op
        if op == MapOp.cast:
            (lo, hi), source = args[0], t.args[0].dtype
            if i.dtype == DType.bool:
                return (1.0, 1.0) if lo > 0 or hi < 0 else (0.0, 0.0) if lo == hi == 0 else (0.0, 1.0)
            exact = is_float(i.dtype) or source == DType.bool or (source == DType.i32 and i.dtype == DType.i64)
            return (lo, hi) if exact else (-math.inf, math.inf)
        if op == MapOp.select:
            (never, ever), yes, no = args
            return yes if never > 0 else no if ever == 0 else (min(yes[0], no[0]), max(yes[1], no[1]))
        if op in (MapOp.logical_not, MapOp.not_) and i.dtype == DType.bool:
            lo, hi = args[0]
            return (0.0, 0.0) if lo > 0 else (1.0, 1.0) if hi == 0 else (0.0, 1.0)
        if op == MapOp.neg:
            return -args[0][1], -args[0][0]
        if len(args) != 2:
            return (0.0, 1.0) if i.dtype == DType.bool else (-math.inf, math.inf)
        (a, b), (c, d) = args
        if i.dtype == DType.bool:
            return _truth(op, a, b, c, d)
        if op == MapOp.add:
            return _sum(a, c, -math.inf), _sum(b, d, math.inf)
        if op == MapOp.sub:
            return _sum(a, -d, -math.inf), _sum(b, -c, math.inf)
        if op == MapOp.mul:
            products = [_product(p, q) for p in (a, b) for q in (c, d)]
            return min(products), max(products)
        if op == MapOp.max:
            return max(a, c), max(b, d)
        if op == MapOp.min:
            return min(a, c), min(b, d)
        return -math.inf, math.inf


def _sum(p: float, q: float, unknown: float) -> float:
    s = p + q
    return unknown if math.isnan(s) else s


def _product(p: float, q: float) -> float:
    return 0.0 if p == 0 or q == 0 else p * q


def _truth(op: MapOp, a: float, b: float, c: float, d: float) -> tuple[float, float]:
    """A comparison or connective of [a, b] and [c, d]."""
    yes, no = False, False
    if op == MapOp.lt:
        yes, no = b < c, a >= d
    elif op == MapOp.le:
        yes, no = b <= c, a > d
    elif op == MapOp.gt:
        yes, no = a > d, b <= c
    elif op == MapOp.ge:
        yes, no = a >= d, b < c
    elif op == MapOp.eq:
        yes, no = a == b == c == d, b < c or a > d
    elif op == MapOp.ne:
        yes, no = b < c or a > d, a == b == c == d
    elif op == MapOp.and_:
        yes, no = a > 0 and c > 0, b == 0 or d == 0
    elif op == MapOp.or_:
        yes, no = a > 0 or c > 0, b == 0 and d == 0
    return (1.0, 1.0) if yes else (0.0, 0.0) if no else (0.0, 1.0)
