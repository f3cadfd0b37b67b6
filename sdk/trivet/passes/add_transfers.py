"""Decides in which memory every value lies and puts transfers where a reader is on another one: one per value and memory."""

from __future__ import annotations

from trivet.error import Error
from trivet.ir import ops
from trivet.ir.graph import Graph, Loc, Module, Node, State, Value
from trivet.passes.assign_storage import hints
from trivet.passes.partition import refusal
from trivet.pieces import base_of
from trivet.pipeline import Context
from trivet.placement import nbytes
from trivet.schedule import all_graphs, is_kernel
from trivet.targets.base import Target, Targets, find

SAME_SIZE = ("permute", "reshape", "bitcast")  # views of all elements
LARGER = 2  # a view is made again behind the transfer where what it is of has at most so many times its bytes


def add_transfers(module: Module, ctx: Context) -> None:
    """Sets Value.memory and State.memory, and inserts `transfer` nodes. Values lie where the node that writes them puts them, states where
    they are written, inputs, outputs and what control flow reads in host memory; a transfer brings them elsewhere. Views that an opaque
    delegate refuses are made by the CPU.
    """
    targets = find(ctx.target if ctx.target is not None else "cpu")
    if len(targets.all) == 1 and not targets.all[0].memory:
        return
    device_io = _slots(module, ctx.options.device_io)
    for state, owner in _state_memories(module, targets).items():
        state.memory = owner
    total = 0
    for name, graph in module.entries.items():
        work = _Adder(graph, targets, device_io[name])
        work.graph(graph, {})
        total += work.transfers
    if total:
        ctx.report.note("add_transfers", f"{total} copies between memories")


def _slots(module: Module, asked: tuple[str, ...] | bool) -> dict[str, set[int]]:
    """Per entry the slots (inputs, then outputs) that may lie on a device."""
    from trivet.emit import slot_names

    out: dict[str, set[int]] = {}
    left = set() if isinstance(asked, bool) else set(asked)
    for name, graph in module.entries.items():
        names = [n for side in slot_names(graph) for n in side]
        chosen = {i for i, n in enumerate(names) if asked is True or (not isinstance(asked, bool) and n in asked)}
        out[name] = chosen
        left -= {names[i] for i in chosen}
    if left:
        known = sorted({n for g in module.entries.values() for side in slot_names(g) for n in side})
        raise Error(f"device_io names {', '.join(sorted(map(repr, left)))}, which is no input or output",
                    remedy=f"the names are {', '.join(known)}")  # fmt: skip
    return out


def _owner(node: Node | None, targets: Targets) -> str:
    """The memory that a node writes to."""
    return targets.named(node.delegate).owns if node is not None and node.delegate else ""


def _state_memories(module: Module, targets: Targets) -> dict[State, str]:
    """Where states lie: where all entries write them, or, where none does, read them; in host memory if they do not agree."""
    writers: dict[State, set[str]] = {}
    readers: dict[State, set[str]] = {}
    for entry in module.entries.values():
        for state, v in entry.writes:
            base = base_of(v)
            if base.state is not state:
                writers.setdefault(state, set()).add(_owner(base.node, targets))
        for graph in all_graphs(entry):
            for node in graph.nodes:
                for x in node.inputs:
                    if x is not None and not ops.OPS[node.op].view and (s := base_of(x).state) is not None:
                        readers.setdefault(s, set()).add(_owner(node, targets))
    out = {}
    for state in dict.fromkeys([*writers, *readers]):
        have = writers.get(state) or readers[state]
        out[state] = next(iter(have)) if len(have) == 1 else ""
    return out


class _Adder:
    def __init__(self, entry: Graph, targets: Targets, device_io: set[int]) -> None:
        self.entry, self.targets, self.device_io = entry, targets, device_io
        self.env = hints(entry)
        self.transfers = 0

    def graph(self, graph: Graph, cache: dict[tuple[Value, str], Value]) -> None:
        top = graph is self.entry
        if top:
            self._inputs(graph)
        self.cache: dict[tuple[Value, str], Value] = {}
        nodes, graph.nodes = graph.nodes, []
        self.out = graph
        for node in nodes:
            if ops.OPS[node.op].view:
                x = node.inputs[0]
                assert x is not None
                node.outputs[0].memory = self._memory(x)
            elif is_kernel(node) or node.op == "concat":
                target = self.targets.named(node.delegate)
                for i, v in enumerate(node.inputs):
                    if v is not None:
                        node.inputs[i] = self._plain(target, self._bring(v, target.owns))
                for v in node.outputs:
                    v.memory = target.owns
            else:  # control flow
                node.inputs = [None if v is None else self._bring(v, "") for v in node.inputs]
                if any(n.delegate not in ("", "cpu") for g in node.graphs for h in all_graphs(g) for n in h.nodes):
                    node.inputs = [None if v is None else self._row_major(v) for v in node.inputs]
                for sub in node.graphs:
                    saved = self.cache, self.out
                    self.graph(sub, {})
                    self.cache, self.out = saved
            graph.nodes.append(node)
        n = len(graph.inputs)
        graph.outputs = list(graph.outputs)
        for i, v in enumerate(graph.outputs):
            home = self._memory(v) if top and n + i in self.device_io else ""
            y = graph.outputs[i] = self._bring(v, home)
            if y is not v and v.const is None and v.state is None:  # callers know it by the name in the model
                v.name, y.name = y.name, v.name
        graph.writes = [(s, self._bring(v, s.memory)) for s, v in graph.writes]

    def _inputs(self, graph: Graph) -> None:
        """Inputs asked for on the device lie where their first reader is."""
        for i, v in enumerate(graph.inputs):
            if i in self.device_io:
                readers = [n for n in graph.nodes for x in n.inputs
                           if x is not None and not ops.OPS[n.op].view and base_of(x) is v]  # fmt: skip
                v.memory = _owner(readers[0], self.targets) if readers else ""

    @staticmethod
    def _memory(v: Value) -> str:
        return v.state.memory if v.state is not None else v.memory

    def _bring(self, v: Value, to: str) -> Value:
        """The value in another memory."""
        if v.const is not None:
            return self._const(v, to)
        have = self._memory(v)
        if v.state is not None:
            v.memory = have
        if have == to:
            return v
        if have and to:  # between two devices by way of the host
            return self._bring(self._bring(v, ""), to)
        if (v, to) not in self.cache:
            self.cache[v, to] = self._moved(v, to)
        return self.cache[v, to]

    def _const(self, v: Value, to: str) -> Value:
        """Each memory has its own value of a constant."""
        if to == v.memory:
            return v
        if (v, to) not in self.cache:
            twin = Value(v.name, v.type, const=v.const, order=v.order, memory=to)
            self.cache[v, to] = twin
        return self.cache[v, to]

    def _moved(self, v: Value, to: str) -> Value:
        node = v.node
        if node is not None and ops.OPS[node.op].view:
            x = node.inputs[0]
            assert x is not None
            base = base_of(v)
            whole = node.op in SAME_SIZE or nbytes(base, self.env) <= LARGER * nbytes(v, self.env)
            if base.const is not None or whole:  # the same view of what is transferred
                (y,) = self.out.node(node.op, [self._bring(x, to)], [v.type], node.attrs, node.loc)
                y.memory = to
                return y
            v = self._dense(v)
        (y,) = self.out.node("transfer", [v], [v.type], ops.Transfer(to), self._loc(v))
        y.memory = to
        self.transfers += 1
        return y

    @staticmethod
    def _loc(v: Value) -> Loc:
        return v.node.loc if v.node is not None else Loc()

    def _dense(self, v: Value, delegate: str = "", why: str = "only this view goes to another memory") -> Value:
        """A copy of a view, in its own memory."""
        (y,) = self.out.node("copy", [v], [v.type], ops.Copy(), self._loc(v))
        assert y.node is not None
        y.memory = self._memory(v)
        y.node.delegate, y.node.reason = delegate or y.memory or "cpu", why
        return y

    def _row_major(self, v: Value) -> Value:
        """A copy of what does not lie as its shape says."""
        if base_of(v) is v and (v.const is None or v.const.data.is_contiguous()):
            return v
        return self._dense(v, "cpu", "row-major for another delegate")

    def _plain(self, target: Target, v: Value) -> Value:
        """For an opaque delegate: the value without views that it refuses."""
        if not target.opaque or v.const is not None:
            return v
        node = v.node
        if node is None or not ops.OPS[node.op].view:
            return v
        if (v, "plain") in self.cache:
            return self.cache[v, "plain"]
        why = refusal(target, node)
        x = node.inputs[0]
        assert x is not None
        if why:
            out = self._dense(v, "cpu", f"{target}: {why}")
        else:
            y = self._plain(target, x)
            out = v
            if y is not x:
                (out,) = self.out.node(node.op, [y], [v.type], node.attrs, node.loc)
        self.cache[v, "plain"] = out
        return out
