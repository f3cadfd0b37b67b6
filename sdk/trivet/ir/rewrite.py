"""What passes change graphs with: uses kept up to date, nodes put in and taken out, dead ones removed at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from trivet.fbs.structs import MapOp
from trivet.ir.dim import Dim, symbols
from trivet.ir.graph import Graph, Loc, Module, Node, Sym, Value
from trivet.ir.infer import Sizes, settle
from trivet.ir.ops import Expand, Instr, Map
from trivet.ir.types import Type


def graphs_of(module: Module) -> Iterator[tuple[Graph, Sizes]]:
    """Every graph of the module, inner ones first, with the sizes of its entry."""
    for entry in module.entries.values():
        yield from _nested(entry, dict(entry.symbols))


def _nested(graph: Graph, known: dict[str, Sym]) -> Iterator[tuple[Graph, Sizes]]:
    known = {**known, **graph.symbols}
    for n in graph.nodes:
        for sub in n.graphs:
            yield from _nested(sub, known)
    yield graph, Sizes(known)


def join_locs(*locs: Loc) -> Loc:
    """The place of a node made from several: each different part once, in order."""
    return Loc(*(_join(getattr(loc, part) for loc in locs) for part in ("module", "source", "origin")))


def _join(texts: Iterator[str]) -> str:
    parts = dict.fromkeys(p for t in texts for p in t.split(" + ") if p)
    return " + ".join(parts)


class Rewriter:
    """One graph being changed. Nodes keep their position; new ones go in front of a given node. finish() removes what
    nothing reads. Uses are those by nodes; outputs and state writes count as uses by the graph itself.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._users: dict[Value, list[Node]] = {}  # once per operand
        self._before: dict[Node, list[Node]] = {}
        self._kept: dict[Value, int] = {}
        self._gone: set[Node] = set()
        for n in graph.nodes:
            self._enter(n)
        for v in [*graph.outputs, *(v for _, v in graph.writes)]:
            self._kept[v] = self._kept.get(v, 0) + 1

    def _enter(self, n: Node) -> None:
        for v in n.inputs:
            if v is not None:
                self._users.setdefault(v, []).append(n)

    def _leave(self, n: Node) -> None:
        for v in n.inputs:
            if v is not None:
                self._users[v].remove(n)

    # -- reading
    def users(self, v: Value) -> list[Node]:
        """Nodes that read v, each once."""
        return list(dict.fromkeys(self._users.get(v, ())))

    def kept(self, v: Value) -> bool:
        """True when v is an output or written to a state."""
        return self._kept.get(v, 0) > 0

    def dead(self, v: Value) -> bool:
        """True when nothing reads v."""
        return not self._users.get(v) and not self.kept(v)

    def gone(self, n: Node) -> bool:
        """True when nothing is left for n to do."""
        return n in self._gone

    def sole(self, v: Value) -> Node | None:
        """The only node that reads v; None when others, or the graph itself, do too."""
        users = self.users(v)
        return users[0] if len(users) == 1 and not self.kept(v) else None

    # -- changing
    def become(self, n: Node, op: str, inputs: list[Value | None], attrs: Any, *also: Loc) -> None:
        """n computes something else from now on; its outputs stay. also: places of the nodes that went into it."""
        self._leave(n)
        n.op, n.inputs, n.attrs, n.graphs = op, inputs, attrs, []
        if also:
            n.loc = join_locs(*also, n.loc)
        self._enter(n)

    def set_map(self, n: Node, code: tuple[Instr, ...], inputs: Sequence[Value], *also: Loc) -> None:
        """n computes an expression; one that only loads is a broadcast, or nothing at all."""
        if len(code) > 1 or code[0].op != MapOp.load:
            self.become(n, "map", list(inputs), Map(code), *also)
        elif inputs[0].type.quant != n.outputs[0].type.quant:
            self.become(n, "map", list(inputs), Map(code), *also)  # the stored numbers by themselves
        elif inputs[0].shape != n.outputs[0].shape:
            self.become(n, "expand", [inputs[0]], Expand(), *also)
        else:
            self.replace(n.outputs[0], inputs[0])
            self._leave(n)
            self._gone.add(n)

    def before(self, place: Node, op: str, inputs: list[Value | None], type: Type, attrs: Any, loc: Loc) -> Value:
        """A new node with one output in front of place. If it only moves elements of a quantised value, the quantisation
        follows from that.
        """
        v = self.graph.value(type)
        v.node = Node(op, inputs, [v], attrs, loc)
        settle(v.node)
        self._before.setdefault(place, []).append(v.node)
        self._enter(v.node)
        return v

    def replace(self, old: Value, new: Value) -> None:
        """Every reader of old reads new instead. new must be defined before them."""
        for n in self.users(old):
            self._leave(n)
            n.inputs = [new if v is old else v for v in n.inputs]
            self._enter(n)
        if self._kept.get(old):
            self.graph.outputs = [new if v is old else v for v in self.graph.outputs]
            self.graph.writes = [(s, new if v is old else v) for s, v in self.graph.writes]
            self._kept[new] = self._kept.get(new, 0) + self._kept.pop(old)

    def prune(self, v: Value) -> None:
        """Takes out the node that makes v if nothing reads it any more, and so on upwards; they no longer count as readers."""
        todo = [v]
        while todo:
            n = todo.pop().node
            if n is None or n in self._gone or n.op in ("nonzero", "item") or not all(self.dead(o) for o in n.outputs):
                continue
            self._leave(n)
            self._gone.add(n)
            todo += [x for x in n.inputs if x is not None]

    def finish(self) -> bool:
        """Puts the new nodes in and takes the dead ones out; True when any node went."""
        nodes: list[Node] = []
        for n in self.graph.nodes:
            self._place(n, nodes)
        self.graph.nodes = nodes
        self._before = {}
        return self.remove_dead()

    def _place(self, n: Node, nodes: list[Node]) -> None:
        stack = [(n, False)]
        while stack:
            at, ready = stack.pop()
            if ready or at not in self._before:
                nodes.append(at)
            else:
                stack.append((at, True))
                stack += [(m, False) for m in reversed(self._before[at])]

    def remove_dead(self) -> bool:
        """Takes out the nodes whose results nothing needs (as values or as sizes)."""
        sizes = used_symbols(self.graph)
        alive: list[Node] = []
        for n in reversed(self.graph.nodes):
            if n in self._gone:
                continue
            named = n.op in ("nonzero", "item") and n.attrs.symbol in sizes
            if named or any(not self.dead(v) for v in n.outputs):
                alive.append(n)
            else:
                self._leave(n)
        gone = len(alive) != len(self.graph.nodes)
        self.graph.nodes = alive[::-1]
        return gone


def used_symbols(graph: Graph) -> set[str]:
    """Symbols that occur in types and attributes, other than in the result of the nonzero that writes them."""
    out: set[str] = set()
    for n in graph.nodes:
        for v in n.outputs if n.op != "nonzero" else ():
            out |= _in_shape(v)
        out |= attr_symbols(n)
        for sub in n.graphs:
            out |= used_symbols(sub)
    for v in graph.outputs:
        out |= _in_shape(v)
    for s in graph.symbols.values():
        if s.solved is not None:
            out |= symbols(s.solved)
    return out


def _in_shape(v: Value) -> set[str]:
    return {s for d in v.shape if isinstance(d, Dim) for s in symbols(d)}


def attr_symbols(n: Node) -> set[str]:
    """Symbols in the attributes of a node."""
    dims = (
        [i.value for i in n.attrs.code]
        if isinstance(n.attrs, Map)
        else [getattr(n.attrs, f.name) for f in fields(n.attrs)]
    )
    return {s for d in dims if isinstance(d, Dim) for s in symbols(d)}
