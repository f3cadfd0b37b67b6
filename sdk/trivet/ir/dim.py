"""Symbolic integers for shapes, strides and offsets, in a normal form so that equal expressions compare equal.

A dimension is a Python int or a Dim. A Dim is a sum of products of atoms with integer coefficients; an atom is a symbol or
one of floor_div, mod, min, max applied to two dimensions. Arithmetic that comes out constant returns an int.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

INF = 1 << 62


@dataclass(frozen=True, slots=True)
class Symbol:
    """An atom: a size that is known only at run time. Its range lives in Graph.symbols."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Call:
    """An atom: op in (floor_div, mod, min, max) of two dimensions."""

    op: str
    a: int | Dim
    b: int | Dim

    def __str__(self) -> str:
        return f"{self.op}({self.a}, {self.b})"


Atom = Symbol | Call
Monomial = tuple[Atom, ...]


class Dim:
    """Immutable. terms: {product of atoms, sorted by text: coefficient}, never just a constant."""

    __slots__ = ("_hash", "terms")
    terms: dict[Monomial, int]

    def __init__(self, terms: Mapping[Monomial, int]) -> None:
        self.terms = dict(terms)
        self._hash = hash(frozenset(self.terms.items()))

    # -- construction
    @staticmethod
    def symbol(name: str) -> Dim:
        return Dim({(Symbol(name),): 1})

    @staticmethod
    def _of(x: int | Dim) -> dict[Monomial, int]:
        if isinstance(x, Dim):
            return x.terms
        return {(): int(x)} if x else {}

    @staticmethod
    def _make(terms: dict[Monomial, int]) -> int | Dim:
        terms = {m: c for m, c in terms.items() if c}
        if not terms:
            return 0
        if len(terms) == 1 and () in terms:
            return terms[()]
        return Dim(terms)

    # -- arithmetic
    def __add__(self, other: int | Dim) -> int | Dim:
        out = dict(self.terms)
        for m, c in Dim._of(other).items():
            out[m] = out.get(m, 0) + c
        return Dim._make(out)

    __radd__ = __add__

    def __neg__(self) -> int | Dim:
        return Dim._make({m: -c for m, c in self.terms.items()})

    def __sub__(self, other: int | Dim) -> int | Dim:
        return self + -other

    def __rsub__(self, other: int | Dim) -> int | Dim:
        return -self + other

    def __mul__(self, other: int | Dim) -> int | Dim:
        out: dict[Monomial, int] = {}
        for m, c in self.terms.items():
            for n, d in Dim._of(other).items():
                k = tuple(sorted(m + n, key=str))
                out[k] = out.get(k, 0) + c * d
        return Dim._make(out)

    __rmul__ = __mul__

    def __floordiv__(self, other: int | Dim) -> int | Dim:
        return floor_div(self, other)

    def __rfloordiv__(self, other: int) -> int | Dim:
        return floor_div(other, self)

    def __mod__(self, other: int | Dim) -> int | Dim:
        return self - floor_div(self, other) * other

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dim) and self.terms == other.terms

    def __hash__(self) -> int:
        return self._hash

    # -- reading
    def symbols(self) -> set[str]:
        """Names of all symbols in it."""
        out: set[str] = set()
        for m in self.terms:
            for a in m:
                if isinstance(a, Symbol):
                    out.add(a.name)
                else:
                    out |= symbols(a.a) | symbols(a.b)
        return out

    def __str__(self) -> str:
        parts: list[str] = []
        for m, c in sorted(self.terms.items(), key=lambda t: (-len(t[0]), [str(a) for a in t[0]])):
            atoms = "*".join(str(a) for a in m)
            if not m:
                text = str(abs(c))
            elif abs(c) == 1:
                text = atoms
            else:
                text = f"{abs(c)}*{atoms}"
            if parts:
                parts.append(f" - {text}" if c < 0 else f" + {text}")
            else:
                parts.append(f"-{text}" if c < 0 else text)
        return "".join(parts)

    __repr__ = __str__


Shape = tuple[int | Dim, ...]


def _call(op: str, a: int | Dim, b: int | Dim) -> Dim:
    return Dim({(Call(op, a, b),): 1})


def floor_div(a: int | Dim, b: int | Dim) -> int | Dim:
    """Quotient rounded down. Terms that the divisor divides are taken out; a common factor is cancelled."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    if b == 1:
        return a
    if isinstance(b, int):
        whole = {m: c // b for m, c in Dim._of(a).items() if c % b == 0}
        rest = Dim._make({m: c for m, c in Dim._of(a).items() if c % b})
        q = rest // b if isinstance(rest, int) else _nested(rest, b)
        return Dim._make(whole) + q
    if a == b:
        return 1
    quotient = _exact(a, b)
    return quotient if quotient is not None else _call("floor_div", a, b)


def _nested(a: Dim, b: int) -> int | Dim:
    """floor(floor(x / c) / b) == floor(x / (b * c))."""
    if len(a.terms) == 1:
        ((m, c),) = a.terms.items()
        if c == 1 and len(m) == 1 and isinstance(m[0], Call) and m[0].op == "floor_div" and isinstance(m[0].b, int):
            return floor_div(m[0].a, m[0].b * b)
    return _call("floor_div", a, b)


def _exact(a: int | Dim, b: Dim) -> int | Dim | None:
    """a / b where b is one product and divides every term of a."""
    if len(b.terms) != 1 or isinstance(a, int):
        return 0 if a == 0 else None
    ((bm, bc),) = b.terms.items()
    out: dict[Monomial, int] = {}
    for m, c in a.terms.items():
        left = list(m)
        for atom in bm:
            if atom not in left:
                return None
            left.remove(atom)
        if c % bc:
            return None
        out[tuple(left)] = c // bc
    return Dim._make(out)


def ceil_div(a: int | Dim, b: int | Dim) -> int | Dim:
    """Quotient rounded up (b > 0)."""
    return floor_div(a + (b - 1), b)


def dim_min(a: int | Dim, b: int | Dim) -> int | Dim:
    if a == b:
        return a
    d = a - b
    if isinstance(d, int):
        return a if d < 0 else b
    return _call("min", *sorted((a, b), key=str))


def dim_max(a: int | Dim, b: int | Dim) -> int | Dim:
    if a == b:
        return a
    d = a - b
    if isinstance(d, int):
        return a if d > 0 else b
    return _call("max", *sorted((a, b), key=str))


_OPS: dict[str, Callable[[int | Dim, int | Dim], int | Dim]] = {
    "floor_div": floor_div, "min": dim_min, "max": dim_max}  # fmt: skip


def symbols(x: int | Dim) -> set[str]:
    """Names of the symbols in a dimension."""
    return x.symbols() if isinstance(x, Dim) else set()


def substitute(x: int | Dim, env: Mapping[str, int | Dim]) -> int | Dim:
    """x with the symbols of env replaced."""
    if not isinstance(x, Dim):
        return x
    total: int | Dim = 0
    for m, c in x.terms.items():
        p: int | Dim = c
        for a in m:
            if isinstance(a, Symbol):
                p = p * env.get(a.name, Dim({(a,): 1}))
            else:
                p = p * _OPS[a.op](substitute(a.a, env), substitute(a.b, env))
        total = total + p
    return total


def evaluate(x: int | Dim, env: Mapping[str, int]) -> int:
    """The number that x has when every symbol has the value of env."""
    out = substitute(x, env)
    if isinstance(out, Dim):
        raise KeyError(f"no value for {', '.join(sorted(out.symbols()))} in {x}")
    return out


def bounds(x: int | Dim, ranges: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    """Interval that holds x when every symbol lies in its range (INF: no upper bound)."""

    def mul(p: tuple[int, int], q: tuple[int, int]) -> tuple[int, int]:
        c = [max(-INF, min(INF, a * b)) for a in p for b in q]
        return min(c), max(c)

    if not isinstance(x, Dim):
        return x, x
    lo = hi = 0
    for m, c in x.terms.items():
        t = (c, c)
        for a in m:
            if isinstance(a, Symbol):
                t = mul(t, ranges[a.name])
                continue
            p, q = bounds(a.a, ranges), bounds(a.b, ranges)
            if a.op == "min":
                r = (min(p[0], q[0]), min(p[1], q[1]))
            elif a.op == "max":
                r = (max(p[0], q[0]), max(p[1], q[1]))
            else:
                qs = [max(1, q[0]), max(1, q[1])]
                cs = [INF if v >= INF else v // d for v in p for d in qs]
                r = (min(cs), max(cs))
            t = mul(t, r)
        lo, hi = max(-INF, lo + t[0]), min(INF, hi + t[1])
    return lo, hi


def parse_dim(text: str) -> int | Dim:
    """The inverse of str()."""
    tokens: list[str] = re.findall(r"\d+|\w+|[-+*(),]", text)
    at = 0

    def peek() -> str:
        return tokens[at] if at < len(tokens) else ""

    def take() -> str:
        nonlocal at
        at += 1
        return tokens[at - 1]

    def atom() -> int | Dim:
        t = take()
        if t == "(":
            v = total()
            take()
            return v
        if t == "-":
            return -product()
        if t.isdigit():
            return int(t)
        if peek() == "(":
            take()
            a = total()
            take()
            b = total()
            take()
            return _OPS[t](a, b)
        return Dim.symbol(t)

    def product() -> int | Dim:
        v = atom()
        while peek() == "*":
            take()
            v = v * atom()
        return v

    def total() -> int | Dim:
        v = product()
        while peek() in ("+", "-") and peek():
            v = v + product() if take() == "+" else v - product()
        return v

    out = total()
    if at != len(tokens):
        raise ValueError(f"cannot read the dimension {text!r}")
    return out
