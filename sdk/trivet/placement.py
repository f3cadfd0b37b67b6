"""The cost of placements: what a node has to do, and islands that cost more than they save.

An island is a connected group of nodes of one delegate. Its cost is the time of its nodes, of the copies at its border, and of the step
that hands work over. Estimates are coarse (targets.Target has the rates); they only have to tell a convolution from a cast between two
copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from trivet import cost
from trivet.fbs.structs import DType
from trivet.ir import ops
from trivet.ir.dim import evaluate, substitute
from trivet.ir.graph import Graph, Node, State, Value
from trivet.ir.types import SIZES
from trivet.targets.base import Target, Targets, Work


def sizes(v: Value, env: Mapping[str, int]) -> tuple[int, ...]:
    """The shape for the sizes of the example call; sizes that the data gives count as 1."""
    out = []
    for d in v.shape:
        d = substitute(d, env)
        out.append(d if isinstance(d, int) else max(1, evaluate(d, dict.fromkeys(d.symbols(), 1))))
    return tuple(out)


def nbytes(v: Value, env: Mapping[str, int]) -> int:
    """Bytes of a dense value for the sizes of the example call."""
    return prod(sizes(v, env)) * SIZES[v.dtype]


def work_of(node: Node, env: Mapping[str, int]) -> Work:
    """What a kernel has to do."""
    shapes = [None if v is None else sizes(v, env) for v in node.inputs]
    outs = [sizes(v, env) for v in node.outputs]
    macs = cost.macs(node.op, node.attrs, shapes, outs)
    x = node.inputs[0].dtype if node.inputs and node.inputs[0] is not None else DType.f32
    unit = "i8" if x in (DType.i8, DType.i16) else "bf16" if x == DType.bf16 else "f16" if x == DType.f16 else "f32"
    moved = sum(nbytes(v, env) for v in node.outputs) + sum(nbytes(v, env) for v in node.inputs if v is not None)
    if node.op in ("gather", "qgather"):
        moved = 2 * sum(nbytes(v, env) for v in node.outputs)
    return Work(macs, unit if macs else "", moved)


@dataclass(slots=True, eq=False)
class Unit:
    """A node to be placed. takes: targets that may have it, in order of preference; refusals: of those before the first of them."""

    node: Node
    work: Work
    takes: list[Target]
    refusals: list[str]
    target: Target
    reason: str = ""
    pinned: bool = False


@dataclass(slots=True, eq=False)
class _Flow:
    """A value: who makes it (None: it comes from host memory, or from a state), who reads it, whether the host reads it."""

    nbytes: int
    maker: Unit | None = None
    readers: list[Unit] = field(default_factory=list)
    host: bool = False


class Islands:
    """Moves islands of a graph to where they cost least. What pinned nodes and control flow are does not change."""

    def __init__(self, graph: Graph, units: list[Unit], targets: Targets, env: Mapping[str, int]) -> None:
        self.units, self.targets = units, targets
        self.flows: list[_Flow] = []
        self.touch: dict[Unit, list[_Flow]] = {u: [] for u in units}
        unit = {u.node: u for u in units}
        flow: dict[Value | State, _Flow] = {}

        def of(v: Value) -> _Flow | None:
            while v.node is not None and ops.OPS[v.node.op].view:
                x = v.node.inputs[0]
                assert x is not None
                v = x
            if v.const is not None:
                return None
            key: Value | State = v if v.state is None else v.state
            if key not in flow:
                maker = unit.get(v.node) if v.node is not None else None
                flow[key] = _Flow(nbytes(v, env), maker)
                self.flows.append(flow[key])
                if maker is not None:
                    self.touch[maker].append(flow[key])
            return flow[key]

        for state, v in graph.writes:  # a state lies where it is written
            f = of(v)
            if f is not None:
                flow.setdefault(state, f)
        for node in graph.nodes:
            for x in node.inputs:
                f = None if x is None else of(x)
                if f is None or ops.OPS[node.op].view:
                    continue
                if node in unit:
                    f.readers.append(unit[node])
                    if f not in self.touch[unit[node]]:
                        self.touch[unit[node]].append(f)
                else:
                    f.host = True
        for v in graph.outputs:
            f = of(v)
            if f is not None:
                f.host = True

    # -- cost
    def _copies(self, f: _Flow) -> float:
        """Time of the copies of one value as it is placed now."""
        home = f.maker.target if f.maker is not None else None
        owner = home.owns if home is not None else ""
        away = {u.target.owns: u.target for u in f.readers}
        if f.host:
            away.setdefault("", self.targets.named("cpu"))
        out = 0.0
        if home is not None and owner and any(o != owner for o in away):
            out += home.copy_seconds(f.nbytes)
        return out + sum(t.copy_seconds(f.nbytes) for o, t in away.items() if o not in ("", owner))

    def _seams(self, island: list[Unit]) -> float:
        """Time of handing work over at an island's border: one step of its own, and one for each group that goes on behind it."""
        inside = set(island)
        behind = {r.target.name: r.target for u in island for f in self.touch[u] if f.maker is u
                  for r in f.readers if r not in inside and r.target is not u.target}  # fmt: skip
        ahead = any(f.maker is not None and f.maker not in inside and f.maker.target is not u.target
                    for u in island for f in self.touch[u])  # fmt: skip
        own = island[0].target
        alone = own.handover if own.name != "cpu" or (ahead and behind) else 0.0
        return alone + sum(t.handover for t in behind.values())

    def _cost(self, island: list[Unit]) -> float:
        flows = dict.fromkeys(f for u in island for f in self.touch[u])
        nodes = sum(u.target.seconds(u.node, u.work) for u in island)
        return nodes + sum(map(self._copies, flows)) + self._seams(island)

    # -- islands
    def _islands(self) -> list[list[Unit]]:
        """Connected groups of one delegate, smallest first."""
        seen: set[Unit] = set()
        out: list[list[Unit]] = []
        for u in self.units:
            if u in seen:
                continue
            group, todo = [], [u]
            seen.add(u)
            while todo:
                at = todo.pop()
                group.append(at)
                for f in self.touch[at]:
                    for other in (*([f.maker] if f.maker is not None else []), *f.readers):
                        if other not in seen and other.target is u.target:
                            seen.add(other)
                            todo.append(other)
            out.append(group)
        place = {u: i for i, u in enumerate(self.units)}
        return [sorted(g, key=place.__getitem__) for g in sorted(out, key=len)]

    def _candidates(self, island: list[Unit]) -> list[Target]:
        """Delegates of the neighbours that take the whole island, and the CPU, where its values may come from."""
        inside, own = set(island), island[0].target
        near = {"cpu": self.targets.named("cpu")}
        for u in island:
            for f in self.touch[u]:
                for other in (*([f.maker] if f.maker is not None else []), *f.readers):
                    if other not in inside:
                        near[other.target.name] = other.target
        return [t for t in near.values() if t is not own and all(t in u.takes for u in island)]

    def settle(self) -> None:
        """Moves islands while that lowers the cost."""
        for _ in range(2 * len(self.units) + 1):
            if not any(self._move(island) for island in self._islands()):
                return

    def _move(self, island: list[Unit]) -> bool:
        if any(u.pinned for u in island):
            return False
        own = island[0].target
        now = self._cost(island)
        best, least = own, now * (1 - 1e-9)
        for t in self._candidates(island):
            for u in island:
                u.target = t
            there = self._cost(island)
            if there < least:
                best, least = t, there
        for u in island:
            u.target = best
            if best is not own:
                n = f"{len(island)} node{'s' if len(island) > 1 else ''}"
                u.reason = (f"an island of {n} would take {now * 1e6:.0f} us on {own} with copies and handovers, "
                            f"{least * 1e6:.0f} us here")  # fmt: skip
        return best is not own
