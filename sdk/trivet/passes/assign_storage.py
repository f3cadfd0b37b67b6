"""Decides which values share memory: everything that is not certain starts as a copy, then copies are merged away.

1. copies are put in for operands of concat, results of control flow, written states and outputs, and before views that can
   be no window of their input;
2. trees of values (trivet.storage) are grown by removing those copies where that is safe;
3. kernels that may overwrite an input do so.
What stays is the true cost; placements and storages (Graph.plan) are the result.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trivet.constants import layout
from trivet.error import Error
from trivet.fbs.structs import RegionKind
from trivet.ir import ops
from trivet.ir.dim import INF, Dim, Symbol, bounds, evaluate, substitute, symbols
from trivet.ir.graph import Graph, Loc, Module, Node, Placement, State, Value
from trivet.pieces import Borders, base_of
from trivet.pipeline import Context
from trivet.schedule import Event, Plan, Storage, all_graphs, runs, schedule
from trivet.storage import ALIAS, SAME, Cell, Forest, Tree, injective
from trivet.targets.base import Targets, find
from trivet.views import count, dense


def assign_storage(module: Module, ctx: Context) -> None:
    """Sets the placement of every value and Graph.plan of every entry (storages with times, no offsets yet)."""
    targets = find(ctx.target if ctx.target is not None else "cpu")
    for name, graph in module.entries.items():
        work = _Assigner(graph, targets, ctx.fallback)
        work.run()
        assert graph.plan is not None
        ctx.report.note("assign_storage", f"{name}: {len(graph.plan.storages)} storages, {work.merged} copies avoided, "
                                          f"{graph.plan.copies} copies left, {work.overwritten} results in place")  # fmt: skip


@dataclass(slots=True)
class _Copies:
    """Copy nodes that may go, by why they are there."""

    views: list[tuple[Graph, Node]] = field(default_factory=list)
    outputs: list[tuple[Graph, Node]] = field(default_factory=list)
    writes: list[tuple[Graph, Node]] = field(default_factory=list)
    flow: list[tuple[Graph, Node]] = field(default_factory=list)
    concats: list[list[tuple[Graph, Node]]] = field(default_factory=list)


class _Assigner:
    def __init__(self, graph: Graph, targets: Targets, fallback: bool = True) -> None:
        self.graph, self.targets, self.fallback = graph, targets, fallback
        self.copies = _Copies()
        self.merged = self.overwritten = 0
        self.ranges = graph.ranges()
        self.hints = hints(graph)
        self.limits: dict[str, int | Dim] = {}  # of sizes that nonzero finds, by sizes of inputs
        self.forest = Forest(lambda n: targets.inplace(n, fallback), lambda v: self._bytes(v)[0])
        self.delegates = {n.piece: n.delegate for g in all_graphs(graph) for n in g.nodes if n.piece and n.delegate}
        self.states: dict[State, Cell] = {}
        self.carried: dict[Value, Node] = {}  # body's result that is the carried value unchanged: its while
        self.removed: dict[Value, Value] = {}
        self.stay: set[Node] = set()  # copies that do not go
        self.written = {s for s, _ in graph.writes}

    def _bytes(self, v: Value) -> tuple[int, bool]:
        """Bytes planned for, and whether that is only the example's size."""
        return planned_bytes(v, self.ranges, self.hints)

    def _room(self, v: Value, limits: dict[str, int | Dim]) -> int | Dim:
        """Bytes that hold v: where nothing bounds a size that the data gives but the sizes of inputs, with these in its place."""
        size = v.type.nbytes
        for _ in limits:
            if isinstance(size, Dim) and all(
                c >= 0 and all(isinstance(a, Symbol) for a in m) for m, c in size.terms.items()
            ):
                size = substitute(size, limits)
        return size

    def _refuse_unbounded(self, v: Value, size: int | Dim) -> None:
        """A run cannot make room for what it finds itself."""
        known = self.graph.symbols
        todo = [s for s in symbols(size) if s in known]
        for name in todo:
            s = known[name]
            todo += [t for t in symbols(s.solved) if t not in todo] if s.solved is not None else []
            if s.data and s.max >= INF >> 16:
                raise Error(f"the size of {v.type} depends on the data and has no upper bound", node=str(_loc(v)),
                            remedy="state one: n = x.item(); torch._check(n <= 100); or give output_size=")  # fmt: skip

    def run(self) -> None:
        self.limits = {n.attrs.symbol: n.inputs[0].type.count for g in all_graphs(self.graph) for n in g.nodes
                       if n.op == "nonzero" and n.inputs[0] is not None
                       and self.graph.symbols[n.attrs.symbol].max >= INF >> 16}  # fmt: skip
        self._insert(self.graph, top=True)
        for i, v in enumerate(self.graph.inputs):
            self.forest.root(v, dense(v.shape), "input", i)
        self._place(self.graph)
        for slot, v in enumerate(self.graph.outputs):
            assert self.forest.cell[v].tree.kind == "output"
            self.forest.cell[v].tree.tag = len(self.graph.inputs) + slot
        self._times()
        self._coalesce()
        self._overwrite()
        self._finish()

    # -- 1. copies ------------------------------------------------------------------------------------------------------------
    def _copy(self, graph: Graph, at: int, v: Value, node: Node | None = None) -> Node:
        """A copy of v before position `at`; its result is laid out as v is where nothing else is asked."""
        (out,) = graph.node("copy", [v], [v.type], ops.Copy(), node.loc if node is not None else _loc(v), before=at)
        out.order = v.order
        out.memory = v.state.memory if v.state is not None else v.memory
        assert out.node is not None
        home = out.memory or "cpu"
        if node is not None and node.piece and not node.graphs:
            near = self.delegates.get(node.piece, home)
            if self.targets.named(near).owns == out.memory:
                home, out.node.piece = near, node.piece
        out.node.delegate, out.node.reason = home, "copy"
        return out.node

    def _insert(self, graph: Graph, top: bool = False) -> None:
        new: list[Node] = []
        nodes, graph.nodes = graph.nodes, new
        for node in nodes:
            if node.op == "concat":
                group = []
                for i, v in enumerate(node.inputs):
                    assert v is not None
                    if count(v.shape) == 0:
                        continue
                    copy = self._copy(graph, len(new), v, node)
                    node.inputs[i] = copy.outputs[0]
                    group.append((graph, copy))
                self.copies.concats.append(group)
            elif node.op == "while":
                for i in range(node.attrs.carried):
                    v = node.inputs[i]
                    assert v is not None
                    copy = self._copy(graph, len(new), v, node)
                    node.inputs[i] = copy.outputs[0]
                    self.copies.flow.append((graph, copy))
                for g in node.graphs:
                    self._insert(g)
                self._insert_carried(node)
            elif node.op == "if":
                for g in node.graphs:
                    self._insert(g)
                    for i, v in enumerate(g.outputs):
                        copy = self._copy(g, len(g.nodes), v, node)
                        copy.outputs[0].order = node.outputs[i].order
                        g.outputs[i] = copy.outputs[0]
                        self.copies.flow.append((g, copy))
            new.append(node)
        if top:
            self._insert_ends(graph)

    def _insert_carried(self, node: Node) -> None:
        """Copies at the end of a loop's body. They happen at once in meaning: what they read of carried values is saved
        before the first one writes.
        """
        body = node.graphs[1]
        n = node.attrs.carried
        inputs = body.inputs[:n]
        for i, v in enumerate(body.outputs):
            if v is not inputs[i] and base_of(v) in inputs:
                save = self._copy(body, len(body.nodes), v, node)
                self.copies.flow.append((body, save))
                body.outputs[i] = save.outputs[0]
        for i, v in enumerate(body.outputs):
            if v is inputs[i]:
                self.carried[v] = node
                continue
            copy = self._copy(body, len(body.nodes), v, node)
            copy.outputs[0].order = node.outputs[i].order
            self.copies.flow.append((body, copy))
            body.outputs[i] = copy.outputs[0]

    def _insert_ends(self, graph: Graph) -> None:
        for i, v in enumerate(graph.outputs):
            copy = self._copy(graph, len(graph.nodes), v)
            copy.outputs[0].order = None
            graph.outputs[i] = copy.outputs[0]
            self.copies.outputs.append((graph, copy))
        writes = []
        for state, v in graph.writes:
            if v.state is state:
                self.written.discard(state)
                continue
            base = base_of(v)
            if base.state is not None and base.state in self.written:
                save = self._copy(graph, len(graph.nodes), v)
                self.copies.views.append((graph, save))
                v = save.outputs[0]
            writes.append((state, v))
        graph.writes = []
        for state, v in writes:
            copy = self._copy(graph, len(graph.nodes), v)
            copy.outputs[0].order = None
            graph.writes.append((state, copy.outputs[0]))
            self.copies.writes.append((graph, copy))

    # -- 2. trees -------------------------------------------------------------------------------------------------------------
    def _leaf(self, v: Value) -> Cell:
        """The cell of a value that is read, made when it is a constant or a state."""
        if v in self.forest.cell:
            return self.forest.cell[v]
        if v.state is not None:
            if v.state in self.states:
                return self._child(v, self.states[v.state], SAME)
            cell = self.states[v.state] = self.forest.root(v, dense(v.shape), "state", v.state)
            return cell
        assert v.const is not None, f"{v} is read before it is written"
        return self.forest.root(v, layout(v.const.data)[1], "const", v.const)

    def _child(self, v: Value, parent: Cell, edge: tuple[object, ...]) -> Cell:
        cell = self.forest.child(v, parent, edge)
        assert cell is not None
        return cell

    def _state(self, state: State) -> Cell:
        if state not in self.states:
            v = Value(state.name, state.type, state=state, memory=state.memory)
            self.states[state] = self.forest.root(v, dense(v.shape), "state", state)
        return self.states[state]

    def _place(self, graph: Graph) -> None:
        """Cells for everything in a graph; puts copies before impossible views."""
        forest = self.forest
        outputs = set(graph.outputs) if graph is self.graph else set()
        written = {v: s for s, v in graph.writes}
        windows: dict[Value, tuple[Value, int, int | Dim]] = {}
        for node in graph.nodes:
            if node.op == "concat":
                start: int | Dim = 0
                for v in node.inputs:
                    assert v is not None
                    windows[v] = (node.outputs[0], node.attrs.axis, start)
                    start = start + v.shape[node.attrs.axis]
        saved: dict[Value, Value] = {}
        for node in list(graph.nodes):
            for x in node.inputs:
                if x is not None:
                    self._leaf(x)
            if ops.OPS[node.op].view:
                self._place_view(graph, node, saved)
            elif node.op == "concat":
                self._ensure_concat(node.outputs[0])
            elif node.op in ("if", "while"):
                self._place_flow(node)
            else:
                for v in node.outputs:
                    if v in windows:
                        whole, axis, start = windows[v]
                        self._child(v, self._ensure_concat(whole), ("window", axis, start))
                    elif v in written:
                        self._child(v, self._state(written[v]), ALIAS)
                    elif v in forest.cell:
                        continue  # a result of control flow, placed with its node
                    else:
                        forest.root(v, dense(v.shape, v.order), "output" if v in outputs else "arena")
                for v in (*node.tmp, *node.spare):
                    forest.root(v, dense(v.shape))
        for v in [*graph.outputs, *(v for _, v in graph.writes)]:
            self._leaf(v)

    def _ensure_concat(self, v: Value) -> Cell:
        if v not in self.forest.cell:
            self.forest.root(v, dense(v.shape, v.order))
        return self.forest.cell[v]

    def _place_view(self, graph: Graph, node: Node, saved: dict[Value, Value]) -> None:
        x = node.inputs[0]
        assert x is not None
        if self.forest.child(node.outputs[0], self.forest.cell[x], ("view", node)) is not None:
            return
        if x not in saved:
            copy = self._copy(graph, graph.nodes.index(node), x, node)
            copy.outputs[0].order = None
            saved[x] = copy.outputs[0]
            self.forest.root(saved[x], dense(x.shape))
            self.copies.views.append((graph, copy))
        node.inputs[0] = saved[x]
        self._child(node.outputs[0], self.forest.cell[saved[x]], ("view", node))

    def _place_flow(self, node: Node) -> None:
        forest = self.forest
        roots = [forest.root(v, dense(v.shape, v.order)) for v in node.outputs]
        if node.op == "if":
            for g in node.graphs:
                for v, outer in zip(g.inputs, node.inputs[1:], strict=True):
                    assert outer is not None
                    self._child(v, forest.cell[outer], SAME)
                for v, root in zip(g.outputs, roots, strict=True):
                    self._child(v, root, ALIAS)
                self._place(g)
            return
        cond, body = node.graphs
        n = node.attrs.carried
        for i, root in enumerate(roots):
            start = node.inputs[i]
            assert start is not None
            self._recast(start, root)
            head = self._child(body.inputs[i], root, ALIAS)
            self._child(cond.inputs[i], head, SAME)
            if body.outputs[i] is not body.inputs[i]:
                self._child(body.outputs[i], root, ALIAS)
        for k in range(n, len(node.inputs)):
            outer = node.inputs[k]
            assert outer is not None
            for g in (cond, body):
                self._child(g.inputs[k], forest.cell[outer], SAME)
        self._place(cond)
        self._place(body)

    def _recast(self, v: Value, root: Cell) -> None:
        """The copy before a loop was given a storage of its own when it was met; it is the loop's."""
        cell = self.forest.cell.pop(v)
        tree = cell.tree
        self.forest.trees.remove(tree)
        for i, t in enumerate(self.forest.trees):
            t.index = i
        self._child(v, root, ALIAS)

    # -- 3. times -------------------------------------------------------------------------------------------------------------
    def _times(self) -> None:
        plan = schedule(self.graph)
        cell = self.forest.cell
        end = 2 * len(plan.events)
        for t, event in enumerate(plan.events):
            if event.kind == "branch":
                assert event.value is not None
                cell[event.value].reads.append(2 * t)
            elif event.kind in ("kernel", "transfer"):
                for v in event.node.inputs:
                    if v is not None:
                        cell[v].reads.append(2 * t)
                for v in event.node.outputs:
                    cell[v].births.append(2 * t)
                for v in (*event.node.tmp, *event.node.spare):
                    cell[v].births.append(2 * t)
                    cell[v].reads.append(2 * t)
        for loop in plan.loops:
            body = loop.node.graphs[1]
            for i, v in enumerate(loop.node.outputs):
                start = loop.node.inputs[i]
                assert start is not None
                cell[start].reads.append(2 * loop.first - 2)
                cell[body.inputs[i]].births.append(2 * loop.first - 1)
                cell[body.outputs[i]].reads.append(2 * loop.last)
                cell[v].births.append(2 * loop.last + 1)
        for choice in plan.choices:
            then, other = choice.node.graphs
            for g, last in ((then, choice.jump), (other, choice.last)):
                for v in g.outputs:
                    cell[v].reads.append(2 * last)
            for v in choice.node.outputs:
                cell[v].births.append(2 * choice.last + 1)
        for v in self.graph.inputs:
            cell[v].births.append(-1)
        for v in self.graph.outputs:
            cell[v].reads.append(end)
        for state, c in self.states.items():
            c.births.append(-1)
            if state not in self.written:
                c.reads.append(end)
        for _, v in self.graph.writes:
            cell[v].reads.append(end)
        for tree in self.forest.trees:
            if tree.kind == "const":
                tree.root.births.append(-1)
                tree.root.reads.append(end)
        self._fix(plan.events)
        self.forest.mark_strict(e.node for e in plan.events if e.kind == "kernel")
        self.forest.timed(plan)

    def _fix(self, events: list[Event]) -> None:
        """What moves as one block keeps its strides. An opaque part reads its inputs until its end and writes its outputs from its
        beginning on, all of them: none may share bytes with another value that crosses its border.
        """
        cell = self.forest.cell
        for e in events:
            if e.kind == "transfer":
                for v in (*e.node.inputs, *e.node.outputs):
                    assert v is not None
                    cell[v].fixed = True
        opaque = [r for r in runs(events) if self.targets.named(r.delegate).opaque]
        if not opaque:
            return
        borders = Borders(self.graph)
        for run in opaque:
            border = borders.of(run)
            for v in border.inputs:
                cell[v].fixed = True
                cell[v].reads.append(2 * run.last)
            for v in border.outputs:
                cell[v].fixed = True
                cell[v].births.append(2 * run.first - 1)
            inner, crossing = set(border.inner), set(border.outputs)
            for n in run.nodes:
                if n.op == "copy" and (x := n.inputs[0]) is not None:
                    base = base_of(x)
                    if base not in inner or (base is not x and n.outputs[0] in crossing):
                        self.stay.add(n)

    def _hidden(self, events: list[Event]) -> set[Value]:
        """What opaque parts without an alternative keep to themselves."""
        opaque = [r for r in runs(events) if self.targets.named(r.delegate).opaque]
        if self.fallback or not opaque:
            return set()
        borders = Borders(self.graph)
        hidden: set[Value] = set()
        constants: set[Value] = set()
        for run in opaque:
            border = borders.of(run)
            hidden |= {*border.inner, *(v for n in run.nodes for v in n.tmp)}
            if self.targets.named(run.delegate).embeds:
                constants |= set(border.constants)
        members = {n for r in opaque if self.targets.named(r.delegate).embeds for n in r.nodes}
        return hidden | {v for v in constants if all(n in members for n in borders.readers[v])}

    # -- 4. merging -----------------------------------------------------------------------------------------------------------
    def _coalesce(self) -> None:
        c = self.copies
        for graph, node in [*c.outputs, *c.writes, *c.views, *c.flow]:
            self._drop(graph, node)
        for group in reversed(c.concats):
            self._drop_concat(group)
        for graph in all_graphs(self.graph):
            for node in list(graph.nodes):
                if node.op == "copy" and node.outputs[0] not in self.removed:
                    self._drop(graph, node)

    def _drop_concat(self, group: list[tuple[Graph, Node]]) -> None:
        """Operands are written in place where that does not raise the peak: all of them, else the latest ones."""
        forest = self.forest

        def ends(node: Node) -> tuple[Tree, Tree]:
            x = node.inputs[0]
            assert x is not None
            return forest.cell[x].tree, forest.cell[node.outputs[0]].tree

        group = [t for t in group if t[1] not in self.stay]
        now = forest.peak()
        if forest.peak_if([ends(n) for _, n in group]) <= now:
            for graph, node in group:
                self._drop(graph, node)
            return
        for graph, node in sorted(group, key=lambda t: -forest.hull(ends(t[1])[0])[0]):
            if forest.peak_if([ends(node)]) <= forest.peak():
                self._drop(graph, node)

    def _drop(self, graph: Graph, node: Node, grow: bool = True) -> bool:
        """Tries to remove a copy. The value read takes the place of the one written."""
        x, y = node.inputs[0], node.outputs[0]
        assert x is not None
        if y in self.removed:
            return True
        if node in self.stay:
            return False
        src, dst = self.forest.cell[x], self.forest.cell[y]
        births, reads = list(dst.births), list(src.reads)
        (t,) = (b for b in dst.births if b % 2 == 0)
        dst.births = [b for b in dst.births if b != t]
        src.reads.remove(t)
        ok = self.forest.merge(src, dst, SAME, grow=grow, loose=x.node is not None and x.node.op == "map")
        ok = ok or (src.tree is not dst.tree and self.forest.merge(dst, src, SAME, grow=grow))
        if not ok:
            dst.births, src.reads = births, reads
            self.forest.refresh(src, dst)
            return False
        src.reads += dst.reads
        src.births += dst.births
        dst.reads, dst.births, src.strict, src.fixed = [], [], src.strict or dst.strict, src.fixed or dst.fixed
        graph.nodes.remove(node)
        graph.replace(y, x)
        self.removed[y] = x
        self.merged += 1
        return True

    def _overwrite(self) -> None:
        for event in self.forest.schedule.events:
            node = event.node
            if event.kind != "kernel" or (node.op == "copy" and node.outputs[0] in self.removed):
                continue
            for i, j in self.forest.inplace(node):
                v = node.inputs[i]
                assert v is not None
                x, o = self.forest.cell[v], self.forest.cell[node.outputs[j]]
                if x.tree is o.tree or not injective(v.shape, x.window[1]):
                    continue
                if self.forest.merge(o, x, ALIAS, grow=False) or self.forest.merge(x, o, ALIAS, grow=False):
                    self.overwritten += 1
                    break

    # -- 5. result ------------------------------------------------------------------------------------------------------------
    def _survivor(self, v: Value) -> Value:
        while v in self.removed:
            v = self.removed[v]
        return v

    def _finish(self) -> None:
        old = self.forest.schedule.events
        kept = [not (e.kind == "kernel" and e.node.op == "copy" and e.node.outputs[0] in self.removed) for e in old]
        before = [0]
        for k in kept:
            before.append(before[-1] + k)
        times = before[-1]
        plan = Plan(times=max(1, times))
        plan.copies = sum(e.kind == "kernel" and e.node.op == "copy" for e, k in zip(old, kept, strict=True) if k)
        used = {v for g in all_graphs(self.graph) for v in g.values()}
        hidden = self._hidden([e for e, k in zip(old, kept, strict=True) if k])
        roots: dict[Tree, Value] = {}
        for tree in self.forest.trees:
            if tree.root.tree is not tree:
                continue
            if hidden and all(c.value in hidden or c.value not in used for c in tree.cells):
                continue
            root = self._survivor(tree.root.value)
            roots[tree] = root
            first, last = self.forest.hull(tree)
            size = self._room(tree.root.value, self.limits)
            kind = {"arena": RegionKind.arena, "input": RegionKind.io, "output": RegionKind.io,
                    "state": RegionKind.state, "const": RegionKind.const_}[tree.kind]  # fmt: skip
            planned = self._bytes(tree.root.value)
            if planned[1] and tree.kind != "const":
                self._refuse_unbounded(root, size)
            if tree.kind == "const":  # an expanded constant is stored once along the axis
                bytes_ = layout(tree.tag.data)[0]
                size = bytes_.numel() * bytes_.element_size()
                planned = (size, False)
            s = Storage(root, kind, size, *planned, owner=tree.owner)
            s.first = before[min(-(-first // 2), len(old))]
            s.last = max(s.first, before[min(last // 2 + 1, len(old))] - 1)
            if tree.kind in ("const", "state"):
                s.first, s.last = 0, plan.times - 1
            s.last = min(s.last, plan.times - 1)
            s.first = min(s.first, s.last)
            s.const = tree.tag if tree.kind == "const" else None
            s.state = tree.tag if tree.kind == "state" else None
            s.slot = tree.tag if tree.kind in ("input", "output") else -1
            if tree.kind == "output":
                s.last = plan.times - 1
            plan.storages.append(s)
        used |= set(roots.values())
        for v, cell in self.forest.cell.items():
            if v in used and cell.tree in roots:
                v.placement = Placement(roots[cell.tree], *cell.window)
        self.graph.plan = plan


def planned_bytes(v: Value, ranges: dict[str, tuple[int, int]], hints: dict[str, int]) -> tuple[int, bool]:
    """Bytes that are planned for a dense value, and whether they are only those of the example call."""
    n = v.type.nbytes
    top = bounds(n, ranges)[1]
    if top < INF >> 16:
        return max(top, 0), False
    return max(0, evaluate(substitute(n, hints), {})), True


def hints(graph: Graph) -> dict[str, int]:
    """Sizes of the example call for every symbol."""
    out: dict[str, int] = {}
    for s in graph.symbols.values():
        if s.solved is None:
            out[s.name] = s.hint if s.hint is not None else max(1, s.min)
    for s in graph.symbols.values():
        if s.solved is not None:
            value = substitute(s.solved, out)
            out[s.name] = value if isinstance(value, int) else s.hint or max(1, s.min)
    return out


def _loc(v: Value) -> Loc:
    return v.node.loc if v.node is not None else Loc()
