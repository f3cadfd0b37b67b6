"""Half precision: values, weights and states that may are stored as f16 or bf16. Does nothing unless Options.half is set.

Which ones is decided in quantize/half.py. Maps read halves, compute in float32 and round their result once; other operators do so
by themselves. Where an operator meets a value of another dtype, a map in front of it casts. Casts to halves, and maps that hold
numbers beyond the range of halves (masks of -1e9), saturate: finite numbers stay finite.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trivet.constants import layout
from trivet.fbs.structs import DType, MapOp, PadMode
from trivet.ir import ops
from trivet.ir.graph import Const, Graph, Loc, Module, Node, Value
from trivet.ir.infer import Sizes
from trivet.ir.interop import torch_dtype
from trivet.ir.match import Ranges, term
from trivet.ir.ops import Instr, Map
from trivet.ir.rewrite import Rewriter, graphs_of
from trivet.ir.types import Type
from trivet.quantize.half import FREE, Decision, Plan, floats, is_moment, largest, moves, source

if TYPE_CHECKING:
    from trivet.pipeline import Context
    from trivet.quantize.recipe import Recipe

DEPTH = 12  # instructions that a bound is looked for through


def narrow_floats(module: Module, context: Context) -> None:
    """The pass."""
    if context.options.half is not None:
        for line in narrow(module, context.options.half):
            context.report.note("narrow_floats", line)


def narrow(module: Module, recipe: Recipe) -> list[str]:
    """Stores what may be in 16 bits, in place.

    Args:
        module: after the passes that recognise and fuse operators, which know float32 best, before partition.
        recipe: with half "f16" or "bf16"; its rules keep modules and kinds of operators in float32, quantize_io says that inputs
            and outputs change as well (else they are cast at the border).

    Returns:
        Lines for the report: what stayed float32, and why.
    """
    decision = Decision(recipe)
    graphs = list(graphs_of(module))
    entries = set(module.entries.values())
    decision.choose_states(module, [g for g, _ in graphs])
    plans = [Plan(g, decision, recipe.quantize_io and g in entries) for g, _ in graphs]
    work = _Narrower(decision)
    for (_, sizes), plan in zip(graphs, plans, strict=True):
        work.graph(plan, sizes)
    work.finish_states([g for g, _ in graphs])
    for g, _ in graphs:
        Rewriter(g).finish()
    kept = f", {decision.kept} operations are kept in float32" if decision.kept else ""
    done = f"{work.weights} weights, {work.values} values and {len(decision.states)} states are {recipe.half}"
    return [done + kept, *decision.notes]


class _Narrower:
    """Rewrites graphs as their plans say."""

    def __init__(self, decision: Decision) -> None:
        self.decision, self.dtype = decision, decision.dtype
        self.limit = largest(self.dtype)
        self.weights = self.values = 0
        self.consts: dict[Const, Const] = {}
        self.wide: dict[Const, Value] = {}  # a narrowed constant's first form
        self.bytes: dict[object, Any] = {}  # weights that share memory go on to share it

    # -- a graph
    def graph(self, plan: Plan, sizes: Sizes) -> None:
        """Rewrites one graph; the types of states change with finish_states."""
        self.plan, self.out, self.cast = plan, list[Node](), dict[tuple[Value, DType], Value]()
        self.ranges = Ranges(sizes)
        g = plan.graph
        self.values += len(plan.narrow)
        self.done: set[Value] = set()
        for v in g.inputs:
            self._retype(v)
        for n in g.nodes:
            self._node(n)
        wanted = self.dtype if plan.io else DType.f32
        g.outputs = [self._as(v, wanted, _loc(v)) if self._float(v) else v for v in g.outputs]
        g.writes = [(s, self._as(v, self._state(s), _loc(v)) if self._float(v) else v) for s, v in g.writes]
        g.nodes = self.out

    def _state(self, s: Any) -> DType:
        return self.dtype if s in self.decision.states else DType(s.type.dtype)

    def finish_states(self, graphs: list[Graph]) -> None:
        """Changes type and first content of the states that become narrow."""
        for s in self.decision.states:
            s.type = Type(self.dtype, s.type.shape)
            if s.init is not None:
                s.init = s.init.to(torch_dtype(self.dtype))
        for v in (v for g in graphs for v in g.values()):
            if v.state in self.decision.states:
                v.type = Type(self.dtype, v.shape)

    def _float(self, v: Value | None) -> bool:
        """A value that may be of either dtype: float32, or already narrowed here."""
        return v is not None and (floats(v) or v in self.done or (v.state in self.decision.states))

    def _retype(self, v: Value) -> None:
        if v in self.plan.narrow:
            v.type = Type(self.dtype, v.shape)
            self.done.add(v)

    def _dtype(self, v: Value) -> DType:
        """How v is stored."""
        return self._state(v.state) if v.state is not None else v.dtype

    # -- a node
    def _node(self, n: Node) -> None:
        if n.op == "map":
            self._map(n)
        elif any(self._float(v) for v in n.inputs):
            self._operands(n)
        for v in n.outputs:
            self._retype(v)
        if isinstance(n.attrs, ops.Pad) and n in self.plan.nodes and n.attrs.mode == PadMode.constant:
            n.attrs = replace(n.attrs, value=self._near(n.attrs.value))
        self.out.append(n)

    def _operands(self, n: Node) -> None:
        wanted = self.dtype if n in self.plan.nodes else DType.f32
        first = n.inputs[0]
        if not n.graphs and n.op != "concat" and moves(n) and first is not None and n not in self.plan.kept:
            wanted = self._stored(first)
        for i, v in enumerate(n.inputs):
            if v is None or not self._float(v):
                continue
            if i in FREE.get(n.op, ()):
                n.inputs[i] = self._as(v, self._stored(v), n.loc)
            elif is_moment(n) and n not in self.plan.kept:
                n.inputs[i] = self._as(v, self._dtype(v), n.loc)
            else:
                n.inputs[i] = self._as(v, wanted, n.loc)

    def _stored(self, v: Value) -> DType:
        """The dtype in which a reader that takes any gets v."""
        if v.const is not None:
            return self.dtype if self.plan.stores_narrow(v) else DType.f32
        return self._dtype(v)

    def _map(self, n: Node) -> None:
        inputs = [v for v in n.inputs if v is not None]
        risky = self._risky(n)
        code: list[Instr] = []
        place: list[int] = []
        for i in n.attrs.code:
            if i.op == MapOp.load and self._float(inputs[i.value]):
                v = inputs[i.value] = self._as(inputs[i.value], self._stored(inputs[i.value]), n.loc)
                code.append(Instr(MapOp.load, self._dtype(v), (), i.value))
                if self._dtype(v) != DType.f32:
                    code.append(Instr(MapOp.cast, DType.f32, (len(code) - 1,)))
            else:
                code.append(Instr(i.op, i.dtype, tuple(place[a] for a in i.args), i.value))
            place.append(len(code) - 1)
        if n.outputs[0] in self.plan.narrow:
            code += self._rounded(len(code) - 1, risky)
        n.inputs, n.attrs = list(inputs), Map(tuple(code))

    def _risky(self, n: Node) -> bool:
        """True when the result might leave the range of halves because of a number or of a float32 operand."""
        if n.outputs[0] not in self.plan.narrow:
            return False
        numbers = (i.value for i in n.attrs.code if i.op == MapOp.const_ and i.dtype == DType.f32)
        wide = any(self._float(v) and self._stored(v) == DType.f32 for v in n.inputs if v is not None)
        if not wide and not any(self.limit < abs(x) < math.inf for x in numbers):
            return False
        lo, hi = self.ranges.of(term(n.outputs[0]), DEPTH)
        return not (-self.limit <= lo and hi <= self.limit)

    def _rounded(self, at: int, risky: bool) -> list[Instr]:
        """Instructions behind register `at` (f32) that give it as a half; with risky finite numbers stay finite."""
        f32, end = DType.f32, at + 1
        if not risky:
            return [Instr(MapOp.cast, self.dtype, (at,))]
        return [
            Instr(MapOp.const_, f32, (), self.limit), Instr(MapOp.const_, f32, (), -self.limit),
            Instr(MapOp.min, f32, (at, end)), Instr(MapOp.max, f32, (end + 2, end + 1)),
            Instr(MapOp.is_inf, DType.bool, (at,)), Instr(MapOp.select, f32, (end + 4, at, end + 3)),
            Instr(MapOp.cast, self.dtype, (end + 5,))]  # fmt: skip

    def _near(self, x: float) -> float:
        return x if not math.isfinite(x) else max(-self.limit, min(self.limit, x))

    # -- a value in another dtype
    def _as(self, v: Value, dtype: DType, loc: Loc) -> Value:
        """v, or the same in dtype: another constant, a view of one, or a map in front of the node being made."""
        if self._dtype(v) == dtype:
            return v
        key = (v, dtype)
        if key not in self.cast:
            self.cast[key] = self._made(v, dtype, loc)
        return self.cast[key]

    def _made(self, v: Value, dtype: DType, loc: Loc) -> Value:
        if v.const is not None:
            return self._const(v)
        n = v.node
        if n is not None and source(v).const is not None and n.inputs[0] is not None:
            return self._append(n.op, [self._as(n.inputs[0], dtype, loc)], dtype, v, n.attrs, n.loc)
        if n is not None and n.op == "map" and not n.inputs:
            code = n.attrs.code
            return self._append("map", [], dtype, v, Map((*code, *self._rounded(len(code) - 1, True))), n.loc)
        load = Instr(MapOp.load, self._dtype(v), (), 0)
        if dtype == DType.f32:
            code = (load, Instr(MapOp.cast, dtype, (0,)))
        else:
            code = (load, *self._rounded(0, True))
        return self._append("map", [v], dtype, v, Map(code), loc)

    def _append(self, op: str, inputs: list[Value | None], dtype: DType, like: Value, attrs: Any, loc: Loc) -> Value:
        out = self.plan.graph.value(Type(dtype, like.shape))
        out.node = Node(op, inputs, [out], attrs, loc)
        self.out.append(out.node)
        return out

    def _const(self, v: Value) -> Value:
        """A constant's other form. Narrowed, finite numbers stay finite."""
        c = v.const
        assert c is not None
        if c in self.wide:
            return self.wide[c]
        if c not in self.consts:
            self.weights += 1
            data, strides = layout(c.data)
            key = (data.data_ptr(), tuple(data.shape))
            if key not in self.bytes:
                flat = data.float()
                near = flat.clamp(-self.limit, self.limit).where(flat.isfinite(), flat)
                self.bytes[key] = (near.to(torch_dtype(self.dtype)), data)  # data: so that its address stays its own
            self.consts[c] = Const(f"{c.name}.{self.dtype.name}", self.bytes[key][0].as_strided(c.data.shape, strides))
        made = self.consts[c]
        self.wide[made] = v
        out = Value(made.name, Type(self.dtype, v.shape))
        out.const = made
        return out


def _loc(v: Value) -> Loc:
    return v.node.loc if v.node is not None else Loc()
