"""The verifier of the IR, run after every pass. It finds the first broken node and names it and the pass that broke it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trivet.error import Error
from trivet.fbs.structs import DType, MapOp, PadMode
from trivet.ir import ops
from trivet.ir.carry import Mismatch
from trivet.ir.dim import Dim, symbols
from trivet.ir.graph import Const, Graph, Module, Node, State, Value
from trivet.ir.infer import Sizes, infer
from trivet.ir.infer_quant import QUANTISED, attrs_wrong, quant_wrong
from trivet.ir.interop import dtype_of
from trivet.ir.reference_map import COMPARES, LEAVES, TESTS, arity
from trivet.ir.types import Type, is_float

MAX_RANK = 8
_BITS = (MapOp.and_, MapOp.or_, MapOp.xor_, MapOp.not_)
_INTS = (MapOp.shl, MapOp.shr)
_FLOAT_ONLY = frozenset(MapOp(i) for i in range(MapOp.exp, MapOp.elu + 1)) - {MapOp.relu} | {
    MapOp.lgamma, MapOp.copysign, MapOp.mish, MapOp.erfinv, MapOp.digamma, MapOp.hypot, MapOp.div, MapOp.atan2}  # fmt: skip


def verify(module: Module, after: str = "") -> None:
    """Checks a module.

    Args:
        module: all entries.
        after: name of the pass that has just run, for the message.

    Raises:
        Error: what is wrong, with the node's place in the user's model.
    """
    names: dict[str, object] = {}
    for graph in module.entries.values():
        _Checker(after, names).entry(graph)


class _Checker:
    def __init__(self, after: str, names: dict[str, object]) -> None:
        self.after, self.names = after, names  # names: of constants and states, common to the module
        self.sizes = Sizes({})
        self.known: set[str] = set()
        self.types: dict[Const, Type] = {}  # with which constants are read

    def fail(self, why: str, graph: Graph, node: Node | None = None) -> Error:
        what = f"{why}, in {node}" if node is not None else why
        place = (str(node.loc) if node is not None else "") or f"entry {graph.name}"
        return Error(f"invalid graph after {self.after}: {what}" if self.after else f"invalid graph: {what}", node=place,
                     remedy="this is a bug of trivet: report it with the model")  # fmt: skip

    def entry(self, graph: Graph) -> None:
        self.sizes = Sizes(graph.symbols)
        self.known = {s.name for s in graph.symbols.values() if not s.data}
        for s in graph.symbols.values():
            if s.source is not None:
                i, axis = s.source
                if i >= len(graph.inputs) or axis >= graph.inputs[i].type.rank:
                    raise self.fail(f"symbol {s.name} is the size of input {i} axis {axis}, which is not there", graph)
            elif s.solved is not None and not symbols(s.solved) <= graph.symbols.keys():
                raise self.fail(f"symbol {s.name} is computed from unknown symbols: {s.solved}", graph)
        self.graph(graph)
        seen: set[State] = set()
        for state, v in graph.writes:
            if state in seen:
                raise self.fail(f"state {state.name} is written twice", graph)
            seen.add(state)
            self._own(state.name, state, graph)
            if not self._same(v.type, state.type):
                raise self.fail(f"state {state.name} is {state.type}, written with {v.type}", graph)

    def _same(self, a: Type, b: Type) -> bool:
        return a.dtype == b.dtype and a.quant == b.quant and self.sizes.same_shape(a.shape, b.shape)

    def graph(self, graph: Graph) -> None:
        defined: set[Value] = set()
        names: set[str] = set()

        def define(v: Value, node: Node | None) -> None:
            if v in defined:
                raise self.fail(f"{v} is defined twice", graph, node)
            if v.name in names:
                raise self.fail(f"two values are called {v}", graph, node)
            if v.const is not None or v.state is not None:
                raise self.fail(f"{v} is a constant or state and defined too", graph, node)
            self._shape(v, graph, node)
            defined.add(v)
            names.add(v.name)

        for v in graph.inputs:
            if v.node is not None:
                raise self.fail(f"input {v} belongs to a node", graph)
            define(v, None)
        for n in graph.nodes:
            for operand in n.inputs:
                if operand is not None:
                    self._read(operand, defined, graph, n)
            self._node(n, graph)
            for i, v in enumerate(n.outputs):
                if v.node is not n or v.index != i:
                    raise self.fail(f"{v} does not point back to its node", graph, n)
                define(v, n)
        for v in [*graph.outputs, *(v for _, v in graph.writes)]:
            self._read(v, defined, graph, None)

    def _own(self, name: str, what: object, graph: Graph) -> None:
        if self.names.setdefault(name, what) is not what:
            raise self.fail(f"two constants or states are called @{name}", graph)

    def _read(self, v: Value, defined: set[Value], graph: Graph, node: Node | None) -> None:
        if v.const is not None:
            self._const(v, v.const, graph, node)
        elif v.state is not None:
            self._own(v.state.name, v.state, graph)
            if v.type != v.state.type:
                raise self.fail(f"{v} is {v.type}, its state {v.state.type}", graph, node)
        elif v not in defined:
            raise self.fail(f"{v} is read before it is defined", graph, node)

    def _const(self, v: Value, c: Const, graph: Graph, node: Node | None) -> None:
        self._own(c.name, c, graph)
        if c.data is not None and (dtype_of(c.data) != v.dtype or tuple(c.data.shape) != v.shape):
            raise self.fail(f"{v} is {v.type}, its data {dtype_of(c.data).name}{list(c.data.shape)}", graph, node)
        if self.types.setdefault(c, v.type) != v.type:
            raise self.fail(f"{v} is read as {v.type} and as {self.types[c]}", graph, node)
        self._quant(v, graph, node)

    def _quant(self, v: Value, graph: Graph, node: Node | None) -> None:
        why = quant_wrong(v.type)
        if why:
            raise self.fail(f"{v} is {v.type}: {why}", graph, node)

    def _shape(self, v: Value, graph: Graph, node: Node | None) -> None:
        if v.type.rank > MAX_RANK:
            raise self.fail(f"{v} has {v.type.rank} axes, at most {MAX_RANK} are possible", graph, node)
        for d in v.shape:
            if isinstance(d, int) and d < 0:
                raise self.fail(f"{v} has a negative size: {v.type}", graph, node)
            self._dim(d, graph, node)
        self._quant(v, graph, node)

    def _dim(self, d: int | Dim | None, graph: Graph, node: Node | None) -> None:
        unknown = symbols(d) - self.known if isinstance(d, Dim) else set()
        if unknown:
            raise self.fail(f"size {d} uses {', '.join(sorted(unknown))}, not defined here", graph, node)

    # -- nodes
    def _node(self, n: Node, graph: Graph) -> None:
        info = ops.OPS.get(n.op)
        if info is None:
            raise self.fail(f"there is no op {n.op}", graph, n)
        if type(n.attrs) is not info.attrs:
            raise self.fail(f"attributes are {type(n.attrs).__name__}, {n.op} has {info.attrs.__name__}", graph, n)
        attrs: Any = n.attrs
        if not info.outputs[0] <= len(n.outputs) <= info.outputs[1]:
            raise self.fail(f"{len(n.outputs)} outputs, {n.op} has {info.outputs[0]}..{info.outputs[1]}", graph, n)
        self._operands(n, info, graph)
        if n.op in ("nonzero", "item"):
            s = graph.symbols.get(attrs.symbol) or self.sizes.symbols.get(attrs.symbol)
            if s is None or not s.data:
                raise self.fail(f"symbol {attrs.symbol} is not declared as data-dependent", graph, n)
            self.known.add(attrs.symbol)
        if n.op in ("if", "while"):
            self._control(n, graph)
        why = _attrs(n)
        if why:
            raise self.fail(why, graph, n)
        if n.op == "map":
            self._map(n, graph)
        if n.op == "slice":
            self._dim(attrs.start, graph, n)
        try:
            types = infer(n, [None if v is None else v.type for v in n.inputs], self.sizes)
        except Mismatch as e:
            raise self.fail(str(e), graph, n) from None
        except (IndexError, ValueError, TypeError) as e:
            raise self.fail(f"its type cannot be worked out ({e})", graph, n) from None
        for v, t in zip(n.outputs, types, strict=True):
            if not self._same(v.type, t):
                raise self.fail(f"{v} is declared {v.type}, inputs give {t}", graph, n)

    def _operands(self, n: Node, info: ops.OpInfo, graph: Graph) -> None:
        if info.inputs == ("*",):
            if None in n.inputs:
                raise self.fail("an input is missing", graph, n)
            return
        if len(n.inputs) > len(info.inputs):
            raise self.fail(f"{len(n.inputs)} inputs, {n.op} has {len(info.inputs)}", graph, n)
        for i, name in enumerate(info.inputs):
            if not name.endswith("?") and (i >= len(n.inputs) or n.inputs[i] is None):
                raise self.fail(f"input {name} is missing", graph, n)

    def _control(self, n: Node, graph: Graph) -> None:
        values = [v for v in n.inputs if v is not None]
        carried = len(values) if n.op == "if" else n.attrs.carried
        if len(n.graphs) != 2 or (n.op == "while" and not 0 <= carried <= len(values)):
            raise self.fail(f"{n.op} needs two graphs and its inputs", graph, n)
        fed = values[1:] if n.op == "if" else values
        for i, sub in enumerate(n.graphs):
            if sub.writes:
                raise self.fail(f"graph {sub.name} writes states", graph, n)
            if len(sub.inputs) != len(fed) or not all(
                self._same(a.type, b.type) for a, b in zip(sub.inputs, fed, strict=True)
            ):
                raise self.fail(f"graph {sub.name} takes {[str(v.type) for v in sub.inputs]}, "
                                f"gets {[str(v.type) for v in fed]}", graph, n)  # fmt: skip
            before = set(self.known)
            self.graph(sub)
            self.known = before
            want = [DType.bool] if n.op == "while" and i == 0 else [v.dtype for v in n.outputs]
            if [v.dtype for v in sub.outputs] != want:
                raise self.fail(f"graph {sub.name} gives {[v.dtype.name for v in sub.outputs]}", graph, n)
            if not (n.op == "while" and i == 0) and not all(
                self._same(a.type, b.type) for a, b in zip(sub.outputs, n.outputs, strict=True)
            ):
                raise self.fail(f"graph {sub.name} gives {[str(v.type) for v in sub.outputs]}", graph, n)
        if n.op == "if" and (values[0].dtype != DType.bool or values[0].type.count != 1):
            raise self.fail(f"the condition is {values[0].type}, not one bool", graph, n)

    # -- map
    def _map(self, n: Node, graph: Graph) -> None:
        code: tuple[ops.Instr, ...] = n.attrs.code
        if not code:
            raise self.fail("a map without instructions", graph, n)
        for k, i in enumerate(code):
            why = _instr(k, i, code, n)
            if why:
                raise self.fail(f"instruction {k} ({i.op.name}): {why}", graph, n)
            if i.op == MapOp.dim:
                self._dim(i.value, graph, n)


def _instr(k: int, i: ops.Instr, code: tuple[ops.Instr, ...], n: Node) -> str:
    if i.op == MapOp.load:
        if not 0 <= i.value < len(n.inputs):
            return f"there is no input {i.value}"
        source: Any = n.inputs[i.value]
        return "" if source.dtype == i.dtype else f"loads {source.dtype.name} as {i.dtype.name}"
    if i.op == MapOp.iota:
        return "" if 0 <= i.value < n.outputs[0].type.rank else f"there is no axis {i.value}"
    if i.op in LEAVES:
        return "" if i.value is not None else "no value"
    if len(i.args) != arity(i.op):
        return f"{len(i.args)} operands, not {arity(i.op)}"
    if not all(0 <= a < k for a in i.args):
        return "reads a later register"
    types = [code[a].dtype for a in i.args]
    if i.op == MapOp.cast:
        return ""
    if i.op == MapOp.select:
        return "" if types[0] == DType.bool and types[1] == types[2] == i.dtype else f"of {_text(types)}"
    if len(set(types)) != 1:
        return f"operands are {_text(types)}"
    if i.op in COMPARES or i.op in TESTS:
        return "" if i.dtype == DType.bool else f"gives {i.dtype.name}, not bool"
    if types[0] != i.dtype:
        return f"of {_text(types)} gives {i.dtype.name}"
    if i.op in _FLOAT_ONLY and not is_float(i.dtype):
        return f"not for {i.dtype.name}"
    if (i.op in _BITS and is_float(i.dtype)) or (i.op in _INTS and (is_float(i.dtype) or i.dtype == DType.bool)):
        return f"not for {i.dtype.name}"
    return ""


def _text(types: Iterable[DType]) -> str:
    return " and ".join(t.name for t in types)


def _attrs(n: Node) -> str:
    """What is wrong with the attributes, "" for nothing."""
    a = n.attrs
    rank = n.inputs[0].type.rank if n.inputs and n.inputs[0] is not None else 0
    axes: tuple[int, ...] = ()
    if isinstance(a, ops.Reduce):
        axes = a.axes
    elif isinstance(
        a, ops.Scan | ops.Softmax | ops.Gather | ops.Scatter | ops.Sort | ops.Slice | ops.Window | ops.Concat
    ):
        axes = (a.axis,)
    elif isinstance(a, ops.Diagonal):
        axes = (a.a, a.b)
    elif isinstance(a, ops.Permute):
        axes = a.axes
        if sorted(axes) != list(range(rank)):
            return f"axes {axes} are no order of {rank} axes"
    if len(set(axes)) != len(axes) or not all(0 <= x < rank for x in axes):
        return f"axes {axes} of {rank}"
    if isinstance(a, ops.Slice) and a.step == 0:
        return "step 0"
    if isinstance(a, ops.Conv | ops.Qconv):
        if not 1 <= a.nd <= 3 or any(len(t) != a.nd for t in (a.stride, a.pad, a.dilation)):
            return f"stride {a.stride}, pad {a.pad} and dilation {a.dilation} need {a.nd} numbers"
        if min(a.stride) < 1 or min(a.dilation) < 1 or a.groups < 1:
            return "stride, dilation and groups start at 1"
    if isinstance(a, ops.Pool | ops.Qpool) and not a.adaptive:
        if len(a.kernel) != a.nd or any(len(t) not in (0, a.nd) for t in (a.stride, a.pad, a.dilation)):
            return f"kernel {a.kernel} and stride {a.stride} need {a.nd} numbers"
        if min(a.kernel) < 1 or min(a.stride or (1,)) < 1:
            return "kernel and stride start at 1"
    if isinstance(a, ops.Pad):
        if len(a.lo) != rank or len(a.hi) != rank:
            return f"{len(a.lo)} amounts for {rank} axes"
        if a.mode != PadMode.constant and min((*a.lo, *a.hi), default=0) < 0:
            return "negative amounts are for constant padding only"
    if isinstance(a, ops.Norm):
        channels = n.inputs[0].shape[1] if a.kind == a.kind.group and n.inputs[0] is not None else 0
        if a.groups < 1 or (isinstance(channels, int) and channels % a.groups):
            return f"{channels} channels in {a.groups} groups"
        if a.kind != a.kind.group and not 0 <= a.axes <= rank:
            return f"{a.axes} of {rank} axes"
    return attrs_wrong(n) if n.op in QUANTISED else ""
