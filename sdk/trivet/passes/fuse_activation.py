"""Activations written out become one instruction: GELU (both forms), SiLU, Mish, hard swish, hard sigmoid, sigmoid.

They are found inside maps, so this runs after fuse_elementwise; as one instruction they can then go into a matmul.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from trivet.fbs.structs import DType, MapOp
from trivet.ir.graph import Module, Value
from trivet.ir.rewrite import Rewriter, graphs_of
from trivet.ir.simplify import Code, Simplifier, finish, load, simplify

if TYPE_CHECKING:
    from trivet.pipeline import Context

_FOUND = (MapOp.gelu, MapOp.gelu_tanh, MapOp.silu, MapOp.mish, MapOp.hard_swish)
FLOATS = (DType.f32, DType.f64)


def fuse_activation(module: Module, context: Context) -> None:
    """The pass."""
    for graph, _ in graphs_of(module):
        rw = Rewriter(graph)
        for n in graph.nodes:
            if n.op == "map" and len(n.attrs.code) > 2:
                code, used = find_activations(n.attrs.code, [v for v in n.inputs if v is not None])
                if repr(code) != repr(n.attrs.code):
                    rw.set_map(n, code, used)
        rw.finish()


def find_activations(code: Code, inputs: list[Value]) -> tuple[Code, list[Value]]:
    """The expression with written-out activations replaced, and its inputs."""
    s = _Finder()
    regs: list[int] = []
    values: list[Value] = []
    for i in code:
        if i.op == MapOp.load:
            regs.append(load(s, values, inputs[i.value]))
        else:
            regs.append(s.add(i.op, i.dtype, tuple(regs[a] for a in i.args), i.value))
    return simplify(*finish(s.code, regs[-1], values))


def _near(x: Any, y: float) -> bool:
    return x is not None and math.isclose(x, y, rel_tol=2e-6)


class _Finder(Simplifier):
    """A simplifier that knows activations."""

    def _simple(self, op: MapOp, dtype: DType, args: tuple[int, ...]) -> int | None:
        found = super()._simple(op, dtype, args)
        if found is None and dtype in FLOATS:
            if op in (MapOp.mul, MapOp.div):
                found = self._product(op, dtype, args)
            elif op == MapOp.recip:
                found = self._sigmoid(args[0], dtype)
            elif op in (MapOp.min, MapOp.max):
                found = self._hard_sigmoid_of_unit(op, dtype, args)
        return found

    # -- reading
    def _is(self, r: int, op: MapOp) -> bool:
        return self.code[r].op == op

    def _with_number(self, r: int, op: MapOp) -> tuple[int, float] | None:
        """(x, c) when r is x op c."""
        i = self.code[r]
        if i.op != op:
            return None
        for x, y in (i.args, i.args[::-1]):
            c = self.number(y)
            if c is not None:
                return x, c
        return None

    def _factors(self, op: MapOp, args: tuple[int, ...]) -> tuple[list[int], float]:
        """Factors that are not numbers, and the product of the numbers."""
        if op == MapOp.div and self.number(args[1]) is None:
            return [], 0.0
        todo, c = [args[0]], 1.0
        factors: list[int] = []
        if op == MapOp.mul:
            todo.append(args[1])
        else:
            c = 1 / self.number(args[1]) if self.number(args[1]) else 0.0
        while todo and len(factors) < 5:
            r = todo.pop()
            i, n = self.code[r], self.number(r)
            if n is not None:
                c *= n
            elif i.op == MapOp.mul:
                todo += i.args
            elif i.op == MapOp.div and self.number(i.args[1]):
                c /= self.number(i.args[1])
                todo.append(i.args[0])
            else:
                factors.append(r)
        return factors, c if math.isfinite(c) else 0.0

    # -- patterns
    def _product(self, op: MapOp, dtype: DType, args: tuple[int, ...]) -> int | None:
        if op == MapOp.div and self.number(args[0]) == 1 and self._sigmoid(args[1], dtype) is not None:
            return self._sigmoid(args[1], dtype)
        factors, c = self._factors(op, args)
        if c == 0:
            return None
        if len(factors) == 1 and _near(c, 1 / 6):
            x = self._relu6_of_shifted(factors[0])
            return None if x is None else self.add(MapOp.hard_sigmoid, dtype, (x,))
        if len(factors) == 1 and self.code[factors[0]].op in _FOUND:  # what was found inside, and its factors outside
            direct = factors[0] in args and any(self.number(a) is not None for a in args)
            return None if direct and not _near(c, 1) else self._times(factors[0], c, dtype)
        if len(factors) != 2:
            return None
        for x, g in (factors, factors[::-1]):
            for gate, act in ((MapOp.sigmoid, MapOp.silu), (MapOp.hard_sigmoid, MapOp.hard_swish)):
                if self._is(g, gate) and self.code[g].args[0] == x:
                    return self._times(self.add(act, dtype, (x,)), c, dtype)
            if self._relu6_of_shifted(g) == x:
                return self._times(self.add(MapOp.hard_swish, dtype, (x,)), c * 6, dtype)
            if self._is(g, MapOp.tanh) and self._softplus(self.code[g].args[0], x):
                return self._times(self.add(MapOp.mish, dtype, (x,)), c, dtype)
            one = self._with_number(g, MapOp.add)
            if one is not None and one[1] == 1:
                gelu = self._gelu(one[0], x)
                if gelu is not None:
                    return self._times(self.add(gelu, dtype, (x,)), c * 2, dtype)
        return None

    def _times(self, r: int, c: float, dtype: DType) -> int:
        c = 1.0 if _near(c, 1.0) else c
        return self.add(MapOp.mul, dtype, (r, self.const(c, dtype)))

    def _softplus(self, r: int, x: int) -> bool:
        return self._is(r, MapOp.softplus) and self.code[r].args[0] == x

    def _gelu(self, r: int, x: int) -> MapOp | None:
        """gelu when r = erf(x / sqrt 2), gelu_tanh when r = tanh(sqrt(2 / pi) * (x + 0.044715 x^3))."""
        i = self.code[r]
        if i.op not in (MapOp.erf, MapOp.tanh):
            return None
        inner = self.code[i.args[0]]
        if inner.op not in (MapOp.mul, MapOp.div):
            return None
        factors, c = self._factors(inner.op, inner.args)
        if i.op == MapOp.erf:
            return MapOp.gelu if factors == [x] and _near(c, math.sqrt(0.5)) else None
        if not _near(c, math.sqrt(2 / math.pi)):
            return None
        if len(factors) == 1:
            total = self.code[factors[0]]
            if total.op == MapOp.add and x in total.args:
                other = total.args[0] if total.args[1] == x else total.args[1]
                if self._power(other, x, 3):
                    return MapOp.gelu_tanh
        elif len(factors) == 2 and x in factors:
            rest = factors[0] if factors[1] == x else factors[1]
            one = self._with_number(rest, MapOp.add)
            if one is not None and one[1] == 1 and self._power(one[0], x, 2):
                return MapOp.gelu_tanh
        return None

    def _power(self, r: int, x: int, n: int) -> bool:
        """r = 0.044715 * x^n."""
        i = self.code[r]
        if i.op != MapOp.mul:
            return False
        factors, c = self._factors(i.op, i.args)
        if not _near(c, 0.044715):
            return False
        if len(factors) == 1 and self._is(factors[0], MapOp.pow):
            p = self.code[factors[0]].args
            return p[0] == x and self.number(p[1]) == n
        return factors == [x] * n

    def _sigmoid(self, r: int, dtype: DType) -> int | None:
        """sigmoid(x) when r = 1 + exp(-x)."""
        one = self._with_number(r, MapOp.add)
        if one is None or one[1] != 1 or not self._is(one[0], MapOp.exp):
            return None
        inner = self.code[one[0]].args[0]
        return self.add(MapOp.sigmoid, dtype, self.code[inner].args) if self._is(inner, MapOp.neg) else None

    def _clamped(self, r: int, lo: float, hi: float) -> int | None:
        """x when r = clamp(x, lo, hi)."""
        for outer, limit, inner, other in ((MapOp.min, hi, MapOp.max, lo), (MapOp.max, lo, MapOp.min, hi)):
            a = self._with_number(r, outer)
            if a is None or a[1] != limit:
                continue
            b = self._with_number(a[0], inner)
            if b is not None and b[1] == other:
                return b[0]
            if inner == MapOp.max and other == 0 and self._is(a[0], MapOp.relu):
                return self.code[a[0]].args[0]
        if lo == 0 and self._is(r, MapOp.relu):
            b = self._with_number(self.code[r].args[0], MapOp.min)
            return b[0] if b is not None and b[1] == hi else None
        return None

    def _relu6_of_shifted(self, r: int) -> int | None:
        """x when r = clamp(x + 3, 0, 6)."""
        t = self._clamped(r, 0, 6)
        three = self._with_number(t, MapOp.add) if t is not None else None
        return three[0] if three is not None and three[1] == 3 else None

    def _hard_sigmoid_of_unit(self, op: MapOp, dtype: DType, args: tuple[int, ...]) -> int | None:
        """clamp(x / 6 + 0.5, 0, 1)."""
        a = next(((x, self.number(y)) for x, y in (args, args[::-1]) if self.number(y) is not None), None)
        if a is None:
            return None
        limit, inner, other = (1, MapOp.max, 0) if op == MapOp.min else (0, MapOp.min, 1)
        b = self._with_number(a[0], inner)
        if a[1] != limit or b is None or b[1] != other:
            return None
        half = self._with_number(b[0], MapOp.add)
        if half is None or half[1] != 0.5 or self.code[half[0]].op not in (MapOp.mul, MapOp.div):
            return None
        i = self.code[half[0]]
        factors, c = self._factors(i.op, i.args)
        return self.add(MapOp.hard_sigmoid, dtype, (factors[0],)) if len(factors) == 1 and _near(c, 1 / 6) else None
