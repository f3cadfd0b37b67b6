"""Chooses an order of nodes with a low peak of live bytes: several ways are tried, the best is kept.

Values are counted dense, views and pieces of a concatenation as no memory of their own; what assign_storage and the planner
do later is only estimated, so an order must win by the estimate to replace the model's own.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from random import Random
from typing import Any

from trivet.ir import ops
from trivet.ir.dim import Dim, symbols
from trivet.ir.graph import Graph, Module, Node, Value
from trivet.lanes import Task, pieces
from trivet.passes.assign_storage import hints, planned_bytes
from trivet.pipeline import Context
from trivet.placement import nbytes, work_of
from trivet.targets.base import Targets, find

TRIES = 24  # random variations of the best order
BUDGET = 400_000  # node visits of all tries together


def order_nodes(module: Module, ctx: Context) -> None:
    """Reorders the nodes of every graph, nested ones on their own; sets Node.piece where several delegates work (trivet.lanes)."""
    targets = find(ctx.target if ctx.target is not None else "cpu")
    for name, graph in module.entries.items():
        sizes = _Sizes(graph, ctx.fallback)
        before, after, how = _order(graph, graph, targets, sizes)
        if after < before:
            ctx.report.note("order_nodes", f"{name}: estimated peak {before:,} -> {after:,} bytes ({how})")


class _Sizes:
    def __init__(self, entry: Graph, fallback: bool) -> None:
        self.fallback = fallback
        self.ranges, self.hints = entry.ranges(), hints(entry)
        self._known: dict[Value, int] = {}
        self.pieces = 0  # in the graphs so far

    def of(self, v: Value) -> int:
        if v not in self._known:
            fixed = v.const is not None or v.state is not None
            self._known[v] = 0 if fixed else planned_bytes(v, self.ranges, self.hints)[0]
        return self._known[v]


def _order(graph: Graph, entry: Graph, targets: Targets, sizes: _Sizes) -> tuple[int, int, str]:
    inner: dict[Node, int] = {}
    for node in graph.nodes:
        for sub in node.graphs:
            inner[node] = max(inner.get(node, 0), _order(sub, entry, targets, sizes)[1])
    problem = _Problem(graph, targets, sizes, inner)
    original = list(range(len(graph.nodes)))
    if any(n.delegate not in ("", "cpu") for n in graph.nodes):
        problem.rank = _pieces(problem, targets, sizes)
        original = problem.greedy(float)
    best, peak, how = original, problem.peak(original), "as the model"
    first = peak
    if len(original) < 3:
        graph.nodes = [graph.nodes[i] for i in best]
        return first, peak, how
    ways: list[tuple[str, list[int]]] = [
        ("smallest growth first", problem.greedy(lambda i: problem.growth(i))),
        ("smallest peak first", problem.greedy(lambda i: problem.height(i))),
        *([("depth first", problem.depth_first())] if problem.rank is None else []),
    ]
    rng = Random(1)
    for k in range(min(TRIES, BUDGET // (8 * len(original)))):
        noise = [rng.random() * (0.05 if k % 2 else 0.5) for _ in original]
        ways.append(("search", problem.greedy(lambda i, noise=noise: problem.growth(i) * (1 - noise[i]))))  # type: ignore[misc]
    for name, order in ways:
        p = problem.peak(order)
        if p < peak:
            best, peak, how = order, p, name
    nodes = graph.nodes
    graph.nodes = [nodes[i] for i in best]
    return first, peak, how


def _pieces(problem: _Problem, targets: Targets, sizes: _Sizes) -> list[int]:
    """Gives nodes to pieces; the piece of each, which come one after another."""
    tasks = [_task(n, targets, sizes) for n in problem.graph.nodes]
    rank = pieces(tasks, problem.before)
    for n, r in zip(problem.graph.nodes, rank, strict=True):
        n.piece = sizes.pieces + 1 + r
    sizes.pieces += 1 + max(rank, default=0)
    return rank


def _task(node: Node, targets: Targets, sizes: _Sizes) -> Task:
    if ops.OPS[node.op].view:
        return Task("")
    if node.op == "transfer":
        (x, y) = node.inputs[0], node.outputs[0]
        assert x is not None
        target = targets.named(y.memory or x.memory)
        return Task(target.name, target.copy_seconds(nbytes(y, sizes.hints)), alone=True)
    if node.op in ("if", "while"):
        inner = sum(_task(n, targets, sizes).seconds for g in node.graphs for n in g.nodes)
        return Task("cpu", inner, alone=True)
    target = targets.named(node.delegate or "cpu")
    return Task(target.name, target.seconds(node, work_of(node, sizes.hints)), handover=target.handover)


@dataclass(slots=True)
class _Unit:
    """What a node means for memory. roots: values it reads, by position; made: values it makes."""

    roots: list[Value] = field(default_factory=list)
    made: list[Value] = field(default_factory=list)
    extra: int = 0  # scratch, or the peak of nested graphs
    over: list[tuple[Value, Value]] = field(default_factory=list)  # (input, output) that may be the same bytes


class _Problem:
    def __init__(self, graph: Graph, targets: Targets, sizes: _Sizes, inner: dict[Node, int]) -> None:
        self.graph, self.size = graph, sizes.of
        self.rank: list[int] | None = None  # pieces that come one after another
        nodes = graph.nodes
        base: dict[Value, Value] = {}

        def root(v: Value) -> Value:
            return base.get(v, v)

        self.units: list[_Unit] = []
        maker: dict[Value, int] = {}
        self.before: list[set[int]] = [set() for _ in nodes]
        for i, n in enumerate(nodes):
            for v in n.inputs:
                if v is not None and v.node is not None and v in maker:
                    self.before[i].add(maker[v])
            for v in n.outputs:
                maker[v] = i
            unit = _Unit(extra=inner.get(n, 0) + sum(sizes.of(v) for v in n.tmp))
            if ops.OPS[n.op].view:
                x = n.inputs[0]
                assert x is not None
                base[n.outputs[0]] = root(x)
            else:
                unit.made = list(n.outputs)
                unit.over = [(root(x), n.outputs[j]) for k, j in targets.inplace(n, sizes.fallback)
                             if (x := n.inputs[k]) is not None] if ops.OPS[n.op].kernel else []  # fmt: skip
                if n.op == "concat":  # mostly the operands' own bytes
                    unit.over = [(root(x), n.outputs[0]) for x in n.inputs if x is not None]
            unit.roots = list(dict.fromkeys(root(x) for x in n.inputs if x is not None))
            self.units.append(unit)
        self._state_edges(nodes, root, maker)
        self._symbol_edges(nodes)
        self.after: list[list[int]] = [[] for _ in nodes]
        for i, need in enumerate(self.before):
            for k in need:
                self.after[k].append(i)
        self.readers: dict[Value, int] = {}
        for u in self.units:
            for v in u.roots:
                self.readers[v] = self.readers.get(v, 0) + 1
        self.kept = {root(v) for v in [*graph.outputs, *(v for _, v in graph.writes)]}
        for v in self.kept:
            self.readers[v] = self.readers.get(v, 0) + 1
        self.left = dict(self.readers)

    def _state_edges(self, nodes: list[Node], root: Callable[[Value], Value], maker: dict[Value, int]) -> None:
        """Who reads the old content of a state stays before who makes the new one, so that it can be made in place."""
        for state, v in self.graph.writes:
            at = maker.get(root(v))
            if at is None:
                continue
            for i in range(at):
                if any(x is not None and root(x).state is state for x in nodes[i].inputs):
                    self.before[at].add(i)

    def _symbol_edges(self, nodes: list[Node]) -> None:
        """Who uses a size comes after the kernel that finds it."""
        makers = {n.attrs.symbol: i for i, n in enumerate(nodes) if n.op in ("nonzero", "item")}
        if not makers:
            return
        for i, n in enumerate(nodes):
            for name in _mentioned(n):
                if name in makers and makers[name] < i:
                    self.before[i].add(makers[name])

    # -- the estimate
    def _reused(self, unit: _Unit, left: dict[Value, int]) -> int:
        """Bytes of outputs that take the place of inputs that die here."""
        done: set[Value] = set()
        total = 0
        for x, y in unit.over:
            if left.get(x, 0) == 1 and x not in done and self.size(x) <= self.size(y):
                done.add(x)
                total += self.size(x)
        return min(total, sum(self.size(v) for v in unit.made))

    def peak(self, order: list[int]) -> int:
        """Largest sum of live bytes in this order."""
        left = dict(self.readers)
        live = most = sum(self.size(v) for v in self.graph.inputs)
        for i in order:
            u = self.units[i]
            made = sum(self.size(v) for v in u.made)
            most = max(most, live + made + u.extra - self._reused(u, left))
            live += made
            live -= self._release(u, left)
        return most

    def _release(self, u: _Unit, left: dict[Value, int]) -> int:
        freed = 0
        for v in u.roots:
            left[v] -= 1
            if left[v] == 0:
                freed += self.size(v)
        return freed + sum(self.size(v) for v in u.made if not self.readers.get(v))

    # -- orders
    def growth(self, i: int) -> float:
        """Bytes more that live after the node than before it."""
        u = self.units[i]
        made = sum(self.size(v) for v in u.made if self.readers.get(v))
        return made - sum(self.size(v) for v in u.roots if self.left[v] == 1)

    def height(self, i: int) -> float:
        """Bytes more that live while the node runs."""
        u = self.units[i]
        return sum(self.size(v) for v in u.made) + u.extra - self._reused(u, self.left)

    def greedy(self, cost: Callable[[int], float]) -> list[int]:
        """Always the cheapest of the nodes that can run."""
        self.left = dict(self.readers)
        waiting = [len(b) for b in self.before]
        ready = [i for i, n in enumerate(waiting) if n == 0]
        out = []
        rank = self.rank or [0] * len(waiting)
        while ready:
            i = min(ready, key=lambda k: (rank[k], 0 if not self.units[k].made else 1, cost(k), k))
            ready.remove(i)
            out.append(i)
            self._release(self.units[i], self.left)
            for k in self.after[i]:
                waiting[k] -= 1
                if waiting[k] == 0:
                    ready.append(k)
        return out

    def depth_first(self) -> list[int]:
        """Follows each result to its readers before it starts another branch."""
        waiting = [len(b) for b in self.before]
        heap = [(0, i) for i, n in enumerate(waiting) if n == 0]
        heapq.heapify(heap)
        out: list[int] = []
        while heap:
            _, i = heapq.heappop(heap)
            out.append(i)
            for k in self.after[i]:
                waiting[k] -= 1
                if waiting[k] == 0:
                    heapq.heappush(heap, (-len(out), k))
        return out


def _mentioned(node: Node) -> set[str]:
    """Symbols in the types and attributes of a node."""
    out: set[str] = set()
    for v in [*node.inputs, *node.outputs, *node.tmp]:
        if v is not None:
            for d in v.shape:
                out |= symbols(d)

    def look(x: Any) -> None:
        nonlocal out
        if isinstance(x, Dim):
            out |= symbols(x)
        elif is_dataclass(x):
            for f in fields(x):
                look(getattr(x, f.name))
        elif isinstance(x, tuple):
            for y in x:
                look(y)

    if node.op not in ("nonzero", "item"):
        look(node.attrs)
    for g in node.graphs:
        for n in g.nodes:
            out |= _mentioned(n)
    return out
