"""Which values of a captured model may be kept in 16 bits (f16 or bf16), and which need float32.

Kernels compute halves in float32 and round once, so the question is only what is stored. Float32 stay: inputs and outputs
(unless asked otherwise), what is computed from positions, integers and small constants alone (masks, ranges, rotary angles),
what feeds a sine or cosine without a matrix product between, sums and moments (the statistics of normalisations), running sums,
states that a map of themselves updates (counters, averages), sampling grids, small constants whose reader takes any dtype, and
constants that 16 bits cannot hold.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trivet.fbs.structs import DType, MapOp, PoolKind, ReduceKind, ScatterReduce
from trivet.ir import ops
from trivet.ir.interop import torch_dtype
from trivet.ir.ops import OPS

if TYPE_CHECKING:
    from trivet.ir.graph import Const, Graph, Module, Node, State, Value
    from trivet.quantize.recipe import Recipe

SMALL = 4096  # elements: constants up to this size cost nothing in float32
LOSS = {DType.f16: 1e-3, DType.bf16: 1e-2}  # root mean square error of a constant, relative: beyond it stays float32
ANGLES = frozenset({MapOp.sin, MapOp.cos, MapOp.tan})
MOMENTS = frozenset({ReduceKind.sum, ReduceKind.prod, ReduceKind.mean, ReduceKind.var})
MATRIX = frozenset({"matmul", "conv", "attention", "rnn"})
# operands that may have another float dtype than the first one
FREE = {"norm": (1, 2), "attention": (3,)}


def kinds(n: Node) -> set[str]:
    """What rules ("op:...") of a recipe call a node: its op in the IR, and the kind of quantize/kinds.py."""
    constant = len(n.inputs) > 1 and (v := n.inputs[1]) is not None and source(v).const is not None
    table = bool(n.inputs) and (v := n.inputs[0]) is not None and source(v).const is not None
    more = {"matmul": "linear" if constant else "matmul", "gather": "embedding" if table else "move"}.get(n.op, n.op)
    if isinstance(n.attrs, ops.Conv) and n.attrs.transposed:
        more = "conv_transpose"
    elif isinstance(n.attrs, ops.Reduce):
        more = n.attrs.kind.name
    elif isinstance(n.attrs, ops.Pool):
        more = "max" if n.attrs.kind == PoolKind.max else "average"
    elif OPS[n.op].view or n.op in ("copy", "pad"):
        more = "move"
    return {n.op, more}


def largest(dtype: DType) -> float:
    """The largest finite number."""
    import torch

    return float(torch.finfo(torch_dtype(dtype)).max)


def moves(n: Node) -> bool:
    """True for operators whose float output holds elements of the first input: it has that one's dtype."""
    if OPS[n.op].view:
        return n.op != "bitcast"
    if isinstance(n.attrs, ops.Reduce):
        return n.attrs.kind not in MOMENTS
    if isinstance(n.attrs, ops.Pool):
        return n.attrs.kind == PoolKind.max
    if isinstance(n.attrs, ops.Scatter):
        return n.attrs.reduce == ScatterReduce.none
    return n.op in ("copy", "pad", "gather", "sort", "concat")


def computes(n: Node) -> bool:
    """True for operators that compute a result of their operands' dtype, with sums in float32."""
    return n.op in MATRIX or n.op in ("norm", "softmax", "resize") or (n.op == "pool" and not moves(n))


def is_moment(n: Node) -> bool:
    """True for reductions that take halves and give float32."""
    return isinstance(n.attrs, ops.Reduce) and n.attrs.kind in MOMENTS


@dataclass(slots=True)
class Decision:
    """What is stored how, for a module.

    Attributes:
        recipe: with half set; its rules say what stays float.
        states: those that become narrow.
        notes: lines for the report.
        kept: number of operations that its rules keep in float32.
    """

    recipe: Recipe
    states: set[State] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    kept: int = 0
    _fits: dict[Const, bool] = field(default_factory=dict)

    @property
    def dtype(self) -> DType:
        """f16 or bf16."""
        return DType[self.recipe.half]

    def keeps(self, n: Node) -> bool:
        """True for an operation that a rule keeps in float32; one made of several, when a rule keeps one of them."""
        if not self.recipe.rules:
            return False
        paths = n.loc.module.split(" + ")
        return any(self.recipe.at(path, kind) is not self.recipe for path in paths for kind in kinds(n))

    def fits(self, c: Const) -> bool:
        """True when 16 bits hold a constant: nothing finite becomes infinite, and little is lost. One that does not is noted."""
        if c not in self._fits:
            why = _misfit(c.data, self.dtype)
            self._fits[c] = not why
            if why:
                self.notes.append(f"@{c.name} stays float32: {why}")
        return self._fits[c]

    def choose_states(self, module: Module, graphs: list[Graph]) -> None:
        """Which states become narrow: those that only ever take moved or matrix results, such as caches of keys."""
        written: dict[State, bool] = {}
        for g in graphs:
            for state, v in g.writes:
                written[state] = written.get(state, True) and self._state_may(state, v)
        self.states = {s for s, ok in written.items() if ok}

    def _state_may(self, state: State, v: Value) -> bool:
        if state.type.dtype != DType.f32 or state.type.quant is not None:
            return False
        n = source(v).node
        if n is None or self.keeps(n):
            return False
        if n.op == "map" and not all(i.op in (MapOp.load, MapOp.select) for i in n.attrs.code if i.dtype == DType.f32):
            return False
        if n.op != "map" and not moves(n) and not computes(n):
            return False
        return state.init is None or not _misfit(state.init, self.dtype)


def source(v: Value) -> Value:
    """The value that a chain of views looks at."""
    while v.node is not None and OPS[v.node.op].view and v.node.op != "concat" and v.node.inputs[0] is not None:
        v = v.node.inputs[0]
    return v


def _misfit(data: Any, dtype: DType) -> str:
    """Why a constant should not be stored as dtype; "" when it may be."""
    import torch

    if data is None or not data.numel():
        return ""
    total = lost = 0.0
    for part in data.detach().reshape(-1).split(1 << 22):
        finite = part[torch.isfinite(part)].float()
        narrow = finite.to(torch_dtype(dtype)).float()
        if not bool(torch.isfinite(narrow).all()):
            return f"{float(finite.abs().max()):.3g} is beyond {dtype.name}"
        total += float(finite.double().square().sum())
        lost += float((narrow.double() - finite.double()).square().sum())
    error = (lost / total) ** 0.5 if total else 0.0
    return f"it would lose {error:.1e} of its values, most are too small" if error > LOSS[dtype] else ""


class Plan:
    """What is stored how in one graph. Inputs and outputs are those of the graph; a graph of `if` or `while` takes and gives
    float32.

    Attributes:
        narrow: float32 values that become narrow. Constants are decided at each reader.
        nodes: nodes that compute on narrow operands.
    """

    def __init__(self, graph: Graph, decision: Decision, io: bool) -> None:
        self.graph, self.decision, self.io = graph, decision, io
        self.uses = graph.uses()
        self.exact: set[Value] = set()
        self.angles: set[Value] = set()
        self.narrow: set[Value] = set()
        self.nodes: set[Node] = set()
        self.kept = {n for n in graph.nodes if decision.keeps(n)}
        decision.kept += len(self.kept)
        for n in graph.nodes:
            self._mark_exact(n)
        for n in reversed(graph.nodes):
            self._mark_angles(n)
        self.wide_readers: set[Value] = self._wide_readers()
        if io:
            self.narrow |= {v for v in graph.inputs if floats(v)}
        for n in graph.nodes:
            self._decide(n)

    # -- what a value is made from
    def is_exact(self, v: Value) -> bool:
        """Made from integers, positions and small constants only."""
        if not floats(v):
            return v.dtype < DType.f16
        if v.const is not None:
            return v.const.data is not None and v.const.data.numel() <= SMALL
        return v in self.exact

    def _mark_exact(self, n: Node) -> None:
        if not n.graphs and all(self.is_exact(v) for v in n.inputs if v is not None):
            self.exact |= {v for v in n.outputs if floats(v)}

    def _mark_angles(self, n: Node) -> None:
        if n.op == "map":
            spots = _reaches_angle(n.attrs.code, n.outputs[0] in self.angles)
            self.angles |= {v for i, v in enumerate(n.inputs) if i in spots and v is not None}
        elif moves(n) and n.outputs and n.outputs[0] in self.angles:
            self.angles |= {v for v in n.inputs if v is not None}

    # -- who reads a value
    def _wide_readers(self) -> set[Value]:
        """Values of which every reader would rather have float32."""
        readers: dict[Value, list[bool]] = {}

        def read(v: Value | None, wide: bool) -> None:
            if v is not None:
                readers.setdefault(v, []).append(wide)

        for result in self.graph.outputs:
            read(result, not self.io)
        for state, content in self.graph.writes:
            read(content, state not in self.decision.states)
        out: set[Value] = set()
        for n in reversed(self.graph.nodes):
            out |= {v for v in n.outputs if all(readers.get(v, ()))}
            wide = not n.outputs or n.outputs[0] in out
            for i, v in enumerate(n.inputs):
                read(v, self._reads_wide(n, i, wide))
        return out

    def _reads_wide(self, n: Node, i: int, result_wide: bool) -> bool:
        if n in self.kept or is_moment(n):
            return True
        if n.op == "map" or i in FREE.get(n.op, ()):
            return False
        if moves(n) or n.op in ("softmax", "norm", "resize", "pool"):
            return result_wide
        return n.op not in MATRIX

    # -- decisions, in order of execution
    def stores_narrow(self, v: Value) -> bool:
        """True when v, as it is made, is narrow. A constant: when it is worth it."""
        if v.const is not None:
            data = v.const.data
            return floats(v) and data is not None and data.numel() > SMALL and self.decision.fits(v.const)
        if v.state is not None:
            return v.state in self.decision.states
        return v in self.narrow

    def _decide(self, n: Node) -> None:
        result = n.outputs[0] if n.outputs else None
        if result is None or not any(floats(v) for v in [*n.outputs, *n.inputs] if v is not None):
            return
        if n in self.kept or n.graphs or result in self.exact:
            return
        if n.op == "map":
            narrow = floats(result) and result not in self.angles and result not in self.wide_readers
        elif n.op == "concat":
            narrow = any(self.stores_narrow(v) for v in n.inputs if v is not None) and result not in self.wide_readers
        elif moves(n):
            x = n.inputs[0]
            narrow = x is not None and self.stores_narrow(x)
        elif is_moment(n):
            x = n.inputs[0]
            if x is not None and self.stores_narrow(x):
                self.nodes.add(n)
            narrow = n in self.nodes and n.attrs.kind == ReduceKind.mean and self._feeds_matrix(result)
        elif computes(n):
            narrow = (n.op in MATRIX or result not in self.wide_readers) and self._weights_fit(n)
        else:
            narrow = False
        if narrow:
            self.nodes.add(n)
            self.narrow |= {v for v in n.outputs if floats(v)}

    def _feeds_matrix(self, v: Value) -> bool:
        """A mean that a product takes (pooling), through views; others are statistics."""
        todo, found = [v], False
        while todo:
            for n, _ in self.uses.get(todo.pop(), ()):
                if n.op in MATRIX:
                    found = True
                elif OPS[n.op].view:
                    todo += n.outputs
                else:
                    return False
        return found

    def _weights_fit(self, n: Node) -> bool:
        """Every constant operand that must have the node's dtype can have it."""
        spots = FREE.get(n.op, ())
        consts = [source(v).const for i, v in enumerate(n.inputs) if v is not None and i not in spots and floats(v)]
        return all(self.decision.fits(c) for c in consts if c is not None)


def floats(v: Value) -> bool:
    """A value that this is about: plain float32."""
    return v.dtype == DType.f32 and v.type.quant is None


def _reaches_angle(code: tuple[ops.Instr, ...], all_of_it: bool) -> set[int]:
    """Input positions that a map's sines and cosines (or, asked so, its result) are computed from."""
    needed = {a for i in code if i.op in ANGLES for a in i.args}
    if all_of_it:
        needed.add(len(code) - 1)
    for k in range(len(code) - 1, -1, -1):
        if k in needed:
            needed.update(code[k].args)
    return {code[k].value for k in needed if code[k].op == MapOp.load and code[k].dtype == DType.f32}
