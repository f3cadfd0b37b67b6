"""The dimension table of an entry: symbolic sizes become rows of integer operations over sizes of inputs."""

from __future__ import annotations

from trivet.error import Error
from trivet.fbs.structs import DimOp
from trivet.ir.dim import INF, Call, Dim, Monomial, Symbol
from trivet.ir.graph import Graph
from trivet.writer import Records, records

Range = tuple[int, int]
INT64 = (1 << 63) - 1
_OPS = {"floor_div": DimOp.floor_div, "min": DimOp.min, "max": DimOp.max}


def _clip(x: int) -> int:
    return max(-INF, min(INF, x))


def _range(op: DimOp, a: Range, b: Range) -> Range:
    if op == DimOp.add:
        return _clip(a[0] + b[0]), _clip(a[1] + b[1])
    if op == DimOp.sub:
        return _clip(a[0] - b[1]), _clip(a[1] - b[0])
    if op == DimOp.min:
        return min(a[0], b[0]), min(a[1], b[1])
    if op == DimOp.max:
        return max(a[0], b[0]), max(a[1], b[1])
    if op == DimOp.mul:
        ends = [_clip(x * y) for x in a for y in b]
        return min(ends), max(ends)
    if b[0] <= 0:
        return -INF, INF
    ends = [(INF if x >= INF else -INF if x <= -INF else x // y) for x in a for y in b]
    return min(ends), max(ends)


class DimTable:
    """Rows for one entry; equal expressions share a row."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.rows: list[dict[str, int]] = []
        self.ranges: list[Range] = []
        self._have: dict[tuple[int, int, int, int], int] = {}
        self._symbols: dict[str, int] = {}
        self._of: dict[int | Dim, int] = {}
        self.row(0)
        self.row(1)
        for s in graph.symbols.values():
            if s.source is not None:
                self._symbol(s.name)
        for s in graph.symbols.values():
            if s.solved is not None:
                at = self._symbol(s.name)
                lo, hi = self.ranges[at]
                if not s.data and self.rows[at]["op"] not in (DimOp.const_, DimOp.data):
                    self.ranges[at] = max(lo, s.min), min(hi, s.max)

    def row(self, x: int | Dim) -> int:
        """The row that holds a dimension."""
        if not isinstance(x, Dim):
            x = int(x)
        if x not in self._of:
            self._of[x] = self._make(x)
        return self._of[x]

    def records(self) -> Records:
        """The table as it goes into the file."""
        rows = []
        for row, (lo, hi) in zip(self.rows, self.ranges, strict=True):
            rows.append({**row, "min": lo if lo > -INF else -INT64, "max": hi if hi < INF else INT64})
        return records("Dim", rows)

    def _new(self, op: DimOp, a: int, b: int, span: Range) -> int:
        key = (int(op), a, b, span[0] if op in (DimOp.const_, DimOp.data) else 0)
        if key not in self._have or op == DimOp.data:
            if len(self.rows) > 0xFFFF:
                raise Error(f"entry {self.graph.name!r} has more than 65536 different sizes and strides",
                            remedy="export it in pieces, or with fewer different shapes")  # fmt: skip
            self._have[key] = len(self.rows)
            self.rows.append({"op": int(op), "a": a, "b": b})
            self.ranges.append(span)
        return self._have[key]

    def _op(self, op: DimOp, a: int, b: int) -> int:
        return self._new(op, a, b, _range(op, self.ranges[a], self.ranges[b]))

    def _symbol(self, name: str) -> int:
        if name in self._symbols:
            return self._symbols[name]
        s = self.graph.symbols[name]
        if s.source is not None:
            at = self._new(DimOp.input, *s.source, (max(0, s.min), s.max))
        elif s.solved is not None:
            at = self.row(s.solved)
        elif s.data:
            at = self._new(DimOp.data, 0, 0, (max(0, s.min), s.max))
        else:
            raise Error(f"the size {name} of entry {self.graph.name!r} comes from nowhere",
                        remedy="this is a bug of trivet: report it with the model")  # fmt: skip
        self._symbols[name] = at
        return at

    def data(self, name: str) -> int:
        """The row that a kernel writes for a symbol."""
        return self._symbol(name)

    def _make(self, x: int | Dim) -> int:
        if not isinstance(x, Dim):
            return self._new(DimOp.const_, 0, 0, (x, x))
        plus = sorted(((m, c) for m, c in x.terms.items() if m and c > 0), key=_key)
        minus = sorted(((m, -c) for m, c in x.terms.items() if m and c < 0), key=_key)
        fixed = x.terms.get((), 0)
        at = -1
        for m, c in plus:
            t = self._product(m, c)
            at = t if at < 0 else self._op(DimOp.add, at, t)
        if fixed > 0 or at < 0:
            at = self.row(fixed) if at < 0 else self._op(DimOp.add, at, self.row(fixed))
            fixed = 0
        for m, c in minus:
            at = self._op(DimOp.sub, at, self._product(m, c))
        return self._op(DimOp.sub, at, self.row(-fixed)) if fixed < 0 else at

    def _product(self, m: Monomial, c: int) -> int:
        at = -1
        for atom in m:
            if isinstance(atom, Symbol):
                t = self._symbol(atom.name)
            else:
                assert isinstance(atom, Call)
                t = self._op(_OPS[atom.op], self.row(atom.a), self.row(atom.b))
            at = t if at < 0 else self._op(DimOp.mul, at, t)
        return at if c == 1 else self._op(DimOp.mul, at, self.row(c))


def _key(term: tuple[Monomial, int]) -> tuple[int, list[str]]:
    return -len(term[0]), [str(a) for a in term[0]]
