"""Conditions on sizes that torch.export found: divisibility, order, products. They become symbols with a range.

torch writes them as Python text over the arguments, e.g. "(L['x'].size()[0] % 2) == 0". A condition turns into a symbol
that nothing reads, computed from the sizes, whose range holds exactly when the condition does; sizes out of range are an
error before anything runs.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trivet.error import Error
from trivet.ir.dim import INF, Call, Dim, Symbol, bounds, ceil_div, dim_max, dim_min, floor_div, symbols
from trivet.ir.graph import Graph, Sym

Size = int | Dim
Range = tuple[Size, int, int]  # this value must lie between these bounds


class Unreadable(Exception):
    """A condition that has no such form."""


def add_guards(graph: Graph, texts: Iterable[str], sources: Mapping[str, tuple[Size, ...] | Size]) -> None:
    """Adds the conditions to the graph's symbols.

    Args:
        graph: with its input symbols.
        texts: the conditions as torch writes them.
        sources: {"L['x']": sizes of that tensor, or the integer itself}.
    """

    def read(text: str) -> list[Range]:
        return _Reader(sources, graph.ranges()).ranges(ast.parse(text, mode="eval").body)

    _add(graph, list(dict.fromkeys(texts)), read)


def add_relations(graph: Graph, relations: Iterable[Any], dim: Callable[[Any], Size]) -> None:
    """The same for sympy relations over the graph's symbols. dim: converts an expression."""

    def read(expr: Any) -> list[Range]:
        return relation(expr, dim, graph.ranges())

    _add(graph, list(dict.fromkeys(relations)), read)


def _add(graph: Graph, conditions: list[Any], read: Callable[[Any], list[Range]]) -> None:
    for last in (False, True):  # first what narrows the range of one symbol: it may prove the others
        for c in list(conditions):
            try:
                ranges = read(c)
            except (Unreadable, Error, SyntaxError):
                warnings.warn(f"a condition of torch.export is not checked at run time: {c}", UserWarning, stacklevel=2)
                conditions.remove(c)
                continue
            if last:
                for value, lo, hi in ranges:
                    add_range(graph, value, lo, hi, str(c))
                continue
            narrowed = [_narrow(graph, *r) for r in ranges]
            if all(narrowed):
                conditions.remove(c)


def multiple_in(expr: Any) -> tuple[Any, int] | None:
    """(size, divisor) of a sympy relation Eq(Mod(size, divisor), 0), None for any other."""
    if type(expr).__name__ != "Equality" or expr.rhs != 0 or type(expr.lhs).__name__ not in ("Mod", "PythonMod"):
        return None
    size, divisor = expr.lhs.args
    return (size, int(divisor)) if divisor.is_Integer and divisor > 1 else None


def multiple_of(text: str, sources: Mapping[str, tuple[Size, ...] | Size]) -> tuple[Size, int] | None:
    """(size, divisor) of a condition "(size % divisor) == 0", None for any other."""
    e = ast.parse(text, mode="eval").body
    if not (isinstance(e, ast.Compare) and isinstance(e.ops[0], ast.Eq) and isinstance(e.left, ast.BinOp)):
        return None
    try:
        reader = _Reader(sources, {})
        divisor = reader.size(e.left.right)
        if (
            isinstance(e.left.op, ast.Mod)
            and isinstance(divisor, int)
            and divisor > 1
            and not reader.size(e.comparators[0])
        ):
            return reader.size(e.left.left), divisor
    except (Unreadable, Error):
        pass
    return None


def add_range(graph: Graph, value: Size, lo: int, hi: int, text: str) -> None:
    """value must lie in lo..hi. Nothing is added where the symbols' ranges say so already."""
    known = graph.ranges()
    if not symbols(value) <= known.keys():
        return
    least, most = bounds(value, known)
    if lo <= least and most <= hi:
        return
    if most < lo or least > hi:
        raise Error(f"no size that the inputs may have fulfils torch.export's condition {text}")
    if _narrow(graph, value, lo, hi) or any(
        s.solved == value and (s.min, s.max) == (lo, hi) for s in graph.symbols.values()
    ):
        return
    name = f"guard{sum(n.startswith('guard') for n in graph.symbols)}"
    graph.symbols[name] = Sym(name, lo, hi, solved=value)


def _narrow(graph: Graph, value: Size, lo: int, hi: int) -> bool:
    """Writes lo <= value <= hi into the range of a symbol s, for a value a * s + b or a * floor_div(s, k) + b."""
    if not isinstance(value, Dim):
        return False
    b = value.terms.get((), 0)
    rest = [(m, a) for m, a in value.terms.items() if m]
    if len(rest) != 1 or len(rest[0][0]) != 1:
        return False
    (atom,), a = rest[0]
    if a < 0:
        a, lo, hi, b = -a, (-hi if hi < INF else -INF), (-lo if lo > -INF else INF), -b
    low = -(-(lo - b) // a) if lo > -INF else -INF
    high = (hi - b) // a if hi < INF else INF
    if isinstance(atom, Call):
        k = atom.b
        if atom.op != "floor_div" or not isinstance(k, int) or not isinstance(atom.a, Dim):
            return False
        inner = atom.a.terms
        if len(inner) != 1 or next(iter(inner.values())) != 1 or len(next(iter(inner))) != 1:
            return False
        (atom,) = next(iter(inner))
        low, high = low * k, (high * k + k - 1 if high < INF else INF)
    sym = graph.symbols.get(atom.name) if isinstance(atom, Symbol) else None
    if sym is None or sym.data:
        return False
    if low > sym.max or high < sym.min:
        return False  # add_range finds that nothing is left
    sym.min, sym.max = max(sym.min, low), min(sym.max, high)
    return True


def relation(expr: Any, dim: Callable[[Any], Size], known: Mapping[str, tuple[int, int]]) -> list[Range]:
    """A sympy relation (or conjunction of them) as ranges."""
    name = type(expr).__name__
    if name == "BooleanTrue":
        return []
    if name == "And":
        return [r for a in expr.args for r in relation(a, dim, known)]
    if name == "Or":
        total: Size = 0
        for a in expr.args:
            total = total + _indicator(relation(a, dim, known))
        return [(total, 1, INF)]
    if name not in _SYMPY:
        raise Unreadable
    return [_compared(_SYMPY[name], dim(expr.lhs), dim(expr.rhs), known)]


_SYMPY = {"Equality": "==", "Unequality": "!=", "GreaterThan": ">=", "StrictGreaterThan": ">", "LessThan": "<=",
          "StrictLessThan": "<"}  # fmt: skip
_AST: dict[type[ast.cmpop], str] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.GtE: ">=",
    ast.Gt: ">",
    ast.LtE: "<=",
    ast.Lt: "<",
}
_OPPOSITE = {"==": "!=", "!=": "==", ">=": "<", "<": ">=", ">": "<=", "<=": ">"}


def _compared(op: str, a: Size, b: Size, known: Mapping[str, tuple[int, int]]) -> Range:
    if op == "==":
        return a - b, 0, 0
    if op == "!=":
        d = a - b
        least, most = bounds(d, known) if symbols(d) <= known.keys() else (-INF, INF)
        if least >= 0 or most <= 0:
            return (d if least >= 0 else -d), 1, INF
        return dim_max(d, -d), 1, INF
    if op in ("<", "<="):
        a, b = b, a
    return a - b, int(op in ("<", ">")), INF


class _Reader:
    """Python text of torch as dimensions."""

    def __init__(self, sources: Mapping[str, tuple[Size, ...] | Size], known: Mapping[str, tuple[int, int]]) -> None:
        self.sources, self.known = sources, known  # known: ranges of the symbols

    def ranges(self, e: ast.expr, positive: bool = True) -> list[Range]:
        """Ranges that hold together exactly when e does (positive) or does not."""
        if isinstance(e, ast.UnaryOp) and isinstance(e.op, ast.Not):
            return self.ranges(e.operand, not positive)
        if isinstance(e, ast.Constant) and isinstance(e.value, bool):
            return [] if e.value == positive else [(0, 1, 1)]
        if isinstance(e, ast.BoolOp):
            if isinstance(e.op, ast.And) == positive:
                return [r for v in e.values for r in self.ranges(v, positive)]
            total: Size = 0
            for v in e.values:
                total = total + _indicator(self.ranges(v, positive))
            return [(total, 1, INF)]
        if isinstance(e, ast.Compare):
            terms = [e.left, *e.comparators]
            if not positive and len(e.ops) > 1:
                raise Unreadable
            out = []
            for op, left, right in zip(e.ops, terms, terms[1:], strict=False):
                name = _AST.get(type(op))
                if name is None:
                    raise Unreadable
                name = name if positive else _OPPOSITE[name]
                out.append(_compared(name, self.size(left), self.size(right), self.known))
            return out
        raise Unreadable

    def size(self, e: ast.expr) -> Size:
        """An integer expression."""
        if isinstance(e, ast.Constant) and isinstance(e.value, int):
            return int(e.value)
        if isinstance(e, ast.UnaryOp) and isinstance(e.op, ast.USub):
            return -self.size(e.operand)
        if isinstance(e, ast.BinOp):
            return self._binary(e)
        if isinstance(e, ast.Call):
            return self._call(e)
        if isinstance(e, ast.Subscript):
            return self._subscript(e)
        raise Unreadable

    def _binary(self, e: ast.BinOp) -> Size:
        a, b = self.size(e.left), self.size(e.right)
        if isinstance(e.op, ast.Pow) and isinstance(b, int) and 0 <= b <= 8:
            out: Size = 1
            for _ in range(b):
                out = out * a
            return out
        table: dict[type[ast.operator], Callable[[Size, Size], Size]] = {
            ast.Add: lambda p, q: p + q, ast.Sub: lambda p, q: p - q, ast.Mult: lambda p, q: p * q,
            ast.FloorDiv: floor_div, ast.Mod: lambda p, q: p - floor_div(p, q) * q}  # fmt: skip
        make = table.get(type(e.op))
        if make is None or (b == 0 and isinstance(e.op, (ast.FloorDiv, ast.Mod))):
            raise Unreadable
        return make(a, b)

    def _call(self, e: ast.Call) -> Size:
        name = ast.unparse(e.func).split(".")[-1]
        if name in ("max", "sym_max", "Max", "min", "sym_min", "Min"):
            pick = dim_max if name.lower().endswith("max") else dim_min
            out = self.size(e.args[0])
            for a in e.args[1:]:
                out = pick(out, self.size(a))
            return out
        quotient = e.args[0] if e.args else None
        if (
            name in ("floor", "ceil", "trunc", "int")
            and isinstance(quotient, ast.BinOp)
            and isinstance(quotient.op, ast.Div)
        ):
            return (ceil_div if name == "ceil" else floor_div)(self.size(quotient.left), self.size(quotient.right))
        raise Unreadable

    def _subscript(self, e: ast.Subscript) -> Size:
        """L['x'].size()[1], or L['n'] for a number."""
        if isinstance(e.value, ast.Call) and isinstance(e.value.func, ast.Attribute) and e.value.func.attr == "size":
            sizes = self.sources.get(ast.unparse(e.value.func.value))
            axis = self.size(e.slice)
            if isinstance(sizes, tuple) and isinstance(axis, int) and axis < len(sizes):
                return sizes[axis]
        found = self.sources.get(ast.unparse(e))
        if found is None or isinstance(found, tuple):
            raise Unreadable
        return found


def _indicator(ranges: list[Range]) -> Size:
    """1 when all hold, else 0."""
    out: Size = 1
    for value, lo, hi in ranges:
        out = out * dim_min(dim_max(value - lo + 1, 0), 1)
        if hi < INF:
            out = out * dim_min(dim_max(hi + 1 - value, 0), 1)
    return out
