"""From torch's symbolic sizes (SymInt, sympy) to dimensions of the IR, and the table of symbols of a graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import cache
from math import gcd
from typing import Any

from trivet.error import Error
from trivet.guards import add_range, add_relations
from trivet.ir.dim import INF, Dim, bounds, ceil_div, dim_max, dim_min, evaluate, floor_div, substitute, symbols
from trivet.ir.graph import Graph, Sym

Expr = Any  # a sympy expression: sympy has no types, and comes with torch


def dim_of(x: Any) -> int | Dim:
    """int, torch.SymInt or a sympy expression of integers as a dimension of the IR."""
    if isinstance(x, Dim):
        return x
    if isinstance(x, int):
        return int(x)
    node = getattr(x, "node", None)
    if node is not None:
        return dim_of_expr(node.expr)
    return dim_of_expr(x)


def dim_of_expr(expr: Expr) -> int | Dim:
    """A sympy expression of integers as a dimension."""
    num, den = _ratio(expr)
    if den == 1:
        return num
    if isinstance(num, int) and num % den:
        raise Error(f"the size {expr} is not an integer")
    return floor_div(num, den)  # the caller's expression is an integer, so the division is exact


def _ratio(e: Expr) -> tuple[int | Dim, int]:
    """(numerator, denominator): e as a dimension over a positive integer."""
    if e.is_Integer:
        return int(e), 1
    if e.is_Symbol:
        return Dim.symbol(e.name), 1
    if e.is_Rational:
        return int(e.p), int(e.q)
    if e.is_Float:
        f = _fraction(float(e))
        return f.numerator, f.denominator
    if e.is_Add:
        num: int | Dim = 0
        den = 1
        for a in e.args:
            n, d = _ratio(a)
            num, den = num * d + n * den, den * d
        return _cancel(num, den)
    if e.is_Mul:
        num, den = 1, 1
        for a in e.args:
            n, d = _ratio(a)
            num, den = num * n, den * d
        return _cancel(num, den)
    if e.is_Pow:
        n, d = _ratio(e.args[0])
        power = int(e.args[1])
        if power == -1 and isinstance(n, int) and n:
            return (d, n) if n > 0 else (-d, -n)
        if power >= 0:
            return _power(n, power), d**power
    name = type(e).__name__
    if name in ("Max", "Min"):
        out = dim_of_expr(e.args[0])
        for a in e.args[1:]:
            out = (dim_max if name == "Max" else dim_min)(out, dim_of_expr(a))
        return out, 1
    if name in ("PowByNatural", "FloatPow"):
        n, d = _ratio(e.args[0])
        return _power(n, int(e.args[1])), d ** int(e.args[1])
    if name in ("ToFloat", "Identity"):
        return _ratio(e.args[0])
    if name in ("FloorDiv", "CleanDiv"):
        return _floor_of_quotient(e.args[0], e.args[1]), 1
    if name == "CeilDiv":
        a, b = dim_of_expr(e.args[0]), dim_of_expr(e.args[1])
        return ceil_div(a, b), 1
    if name in ("Mod", "PythonMod"):
        a, b = dim_of_expr(e.args[0]), dim_of_expr(e.args[1])
        return a - floor_div(a, b) * b, 1
    if name == "ModularIndexing":
        a = floor_div(dim_of_expr(e.args[0]), dim_of_expr(e.args[1]))
        m = dim_of_expr(e.args[2])
        return a - floor_div(a, m) * m, 1
    if name in ("IntTrueDiv", "FloatTrueDiv"):
        n, d = _ratio(e.args[0])
        p, q = _ratio(e.args[1])
        if isinstance(p, int) and p > 0:
            return _cancel(n * q, d * p)
        return floor_div(n * q, p * d), 1
    if name in ("FloorToInt", "TruncToInt", "floor", "TruncToFloat"):
        return _rounded(e.args[0], up=False), 1
    if name in ("CeilToInt", "ceiling"):
        return _rounded(e.args[0], up=True), 1
    raise Error(f"the size {e} needs {name}, which sizes of trivet cannot express",
                remedy="give this dimension a fixed size, or compute the size in another way")  # fmt: skip


def _rounded(e: Expr, *, up: bool) -> int | Dim:
    """floor or ceil of an expression that need not be an integer."""
    divide = ceil_div if up else floor_div
    if type(e).__name__ in ("IntTrueDiv", "FloatTrueDiv"):
        n, d = _ratio(e.args[0])
        p, q = _ratio(e.args[1])
        return divide(n * q, p * d)
    num, den = _ratio(e)
    return num if den == 1 else divide(num, den)


def _floor_of_quotient(a: Expr, b: Expr) -> int | Dim:
    n, d = _ratio(a)
    p, q = _ratio(b)
    return floor_div(n * q, p * d)


def _power(x: int | Dim, n: int) -> int | Dim:
    out: int | Dim = 1
    for _ in range(n):
        out = out * x
    return out


def _cancel(num: int | Dim, den: int) -> tuple[int | Dim, int]:
    """The fraction with small terms where the numerator allows it."""
    terms = num.terms.values() if isinstance(num, Dim) else (num,)
    g = den
    for c in terms:
        g = gcd(g, c)
    return (floor_div(num, g) if g > 1 else num), den // g


@cache
def _fraction(x: float) -> Fraction:
    """The simple fraction that a scale factor stands for, if int(n * x) in floating point is floor(n * fraction) for all n.

    2.3 has none: 10 * 2.3 is 23.0 in floating point, but 50 * 2.3 is 114.99999999999999.
    """
    import numpy as np

    n = np.arange(1 << 16, dtype=np.int64)
    product = n.astype(np.float64) * x
    for limit in (1000, 1 << 16, 1 << 24):
        f = Fraction(x).limit_denominator(limit)
        if float(f) == x:
            quotient, rest = np.divmod(n * f.numerator, f.denominator)
            if (np.floor(product) == quotient).all() and (np.ceil(product) == quotient + (rest > 0)).all():
                return f
    raise Error(f"the scale {x!r} of a dynamic size rounds irregularly in floating point",
                remedy="use a scale such as 1.5 or 2, give the size in place of the scale, or fix the dimension")  # fmt: skip


class SymbolTable:
    """Fills Graph.symbols while a graph is imported."""

    def __init__(self, graph: Graph, ranges: Mapping[Any, Any]) -> None:
        """ranges: {sympy expression: ValueRanges} of the exported program."""
        self.graph = graph
        self.ranges = {str(k): v for k, v in ranges.items()}
        self.integers: dict[int, int | Dim] = {}  # input position: the integer that the caller passes there
        self.numbers: set[str] = set()  # symbols that are no sizes: 0-d values have their numbers
        self.replaced: dict[str, int | Dim] = {}  # symbols that are written through others

    def dim(self, x: Any) -> int | Dim:
        """A size (int, SymInt, sympy expression) in the symbols of the graph."""
        return self.renew(dim_of(x))

    def renew(self, d: int | Dim) -> int | Dim:
        """A dimension with the symbols that divide() replaced."""
        return substitute(d, self.replaced) if self.replaced else d

    def divide(self, size: int | Dim, divisor: int) -> bool:
        """Takes up that size is a multiple of divisor: a symbol s of it becomes an expression in t = size / divisor.

        Shapes then say by their form that they divide; an input that does not is found when its size is compared with
        the expression. False when no symbol can be replaced.
        """
        if not isinstance(size, Dim):
            return False
        for s in sorted(symbols(size)):
            atom = next(iter(Dim.symbol(s).terms))
            c = size.terms.get(atom, 0)
            rest = size - c * Dim.symbol(s)
            sym = self.graph.symbols.get(s)
            if sym is None or sym.data or not c or s in symbols(rest):
                continue
            if rest == 0:
                divisor //= gcd(c, divisor)
                if divisor == 1:
                    return True
                size, c = Dim.symbol(s), 1
            if abs(c) != 1:
                continue
            t = f"{s}_{divisor}"
            value = floor_div(size, divisor)
            lo, hi = bounds(value, self.graph.ranges())
            hint = _evaluated(value, self._hints())
            self.graph.symbols[t] = Sym(t, max(0, lo), hi, solved=value, hint=hint)
            new = c * (divisor * Dim.symbol(t) - rest)
            self.replaced = {k: substitute(v, {s: new}) for k, v in self.replaced.items()} | {s: new}
            return True
        return False

    def _hints(self) -> dict[str, int]:
        return {s.name: s.hint for s in self.graph.symbols.values() if s.hint is not None}

    def add(self, x: Any) -> None:
        """Registers the symbols of a size (SymInt; anything else is ignored)."""
        node = getattr(x, "node", None)
        if node is None or not hasattr(node, "expr"):
            return
        for s in sorted(node.expr.free_symbols, key=str):
            if s.is_integer and s.name not in self.graph.symbols and s.name not in self.numbers:
                lo, hi = self._range(s, node.shape_env)
                self.graph.symbols[s.name] = Sym(s.name, lo, hi, data=s.name.startswith("u"), hint=_hint(s, node))

    def least(self, x: Any) -> int:
        """The lower bound of a symbol as torch knows it; -INF: none."""
        r = self._torch_range(x.node.expr, x.node.shape_env)
        return -INF if r is None else _bound(r.lower, -INF)

    def _torch_range(self, s: Expr, env: Any) -> Any:
        r = self.ranges.get(s.name)
        return env.var_to_range.get(s) if r is None and env is not None else r

    def _range(self, s: Expr, env: Any) -> tuple[int, int]:
        r = self._torch_range(s, env)
        if r is None:
            return 0, INF
        return max(0, _bound(r.lower, 0)), _bound(r.upper, INF)

    def inputs(self, sizes: Iterable[tuple[int, int, Any]]) -> None:
        """Gives symbols their source. sizes: (input position, axis, size) of every axis of every tensor input."""
        derived: list[tuple[int, int, int | Dim]] = []
        for i, axis, size in sizes:
            self.add(size)
            d = self.dim(size)
            if not isinstance(d, Dim):
                continue
            name = str(d)
            sym = self.graph.symbols.get(name)
            if sym is None:
                derived.append((i, axis, d))
            elif sym.source is None:
                sym.source = (i, axis)
        for i, axis, d in derived:
            self._solve(i, axis, d)

    def _solve(self, i: int, axis: int, d: int | Dim) -> None:
        """Size i.axis is a * s + b: a raw symbol takes the size, and s is solved from it."""
        if not isinstance(d, Dim):
            return
        open_ = [n for n in sorted(symbols(d)) if self.graph.symbols[n].source is None
                 and self.graph.symbols[n].solved is None]  # fmt: skip
        if len(open_) != 1:
            return
        s = Dim.symbol(open_[0])
        atom = next(iter(s.terms))
        a = d.terms.get(atom)
        if a is None or any(atom[0] in m and m != atom for m in d.terms):
            return
        rest = d - a * s
        if open_[0] in symbols(rest):
            return
        lo, hi = bounds(d, self.graph.ranges())
        raw = Sym(f"in{i}_{axis}", max(0, lo), hi, source=(i, axis), hint=_evaluated(d, self._hints()))
        self.graph.symbols[raw.name] = raw
        self.graph.symbols[open_[0]].solved = floor_div(Dim.symbol(raw.name) - rest, a)

    def assertion(self, x: Any) -> None:
        """A condition on sizes that the program asserts (SymBool); one on data-dependent sizes is left to the kernels."""
        expr = getattr(getattr(x, "node", None), "expr", None)
        if expr is None:
            return
        known = self.graph.symbols
        if not all(s.name in known and not known[s.name].data for s in expr.free_symbols):
            return
        add_relations(self.graph, [expr], self.dim)

    def not_one(self, d: int | Dim) -> None:
        """Leaves 1 out of the range of a size (0 too, where the range would fall apart)."""
        if isinstance(d, Dim) and not any(self.graph.symbols[s].data for s in symbols(d)):
            lo = bounds(d, self.graph.ranges())[0]
            if 0 <= lo <= 1:
                add_range(self.graph, d, 2, INF, f"{d} != 1")

    def limit(self, symbol: str, size: int | Dim) -> None:
        """A data-dependent size is at most another size."""
        sym = self.graph.symbols[symbol]
        sym.max = min(sym.max, max(sym.min, bounds(size, self.graph.ranges())[1]))

    def check(self) -> None:
        """Raises for a symbol that nothing defines."""
        for s in self.graph.symbols.values():
            if s.source is None and s.solved is None and not s.data:
                raise Error(f"the dynamic size {s.name} cannot be read from any input of entry {self.graph.name!r}",
                            remedy="make a dimension of an input exactly this size, or make it static")  # fmt: skip


def _hint(s: Expr, node: Any) -> int | None:
    env = node.shape_env
    known = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val  # before torch 2.12
    v = known.get(s)
    return None if v is None else int(v)


def _evaluated(d: int | Dim, sizes: dict[str, int]) -> int | None:
    try:
        return evaluate(d, sizes)
    except KeyError:
        return None


def _bound(x: Any, default: int) -> int:
    try:
        return min(INF, int(x))
    except (TypeError, ValueError, OverflowError, AttributeError):
        return default
