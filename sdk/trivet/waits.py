"""What steps of several devices wait for: whoever reads waits for who wrote, who writes over bytes waits for who used them before."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from trivet.fbs.structs import RegionKind
from trivet.ir.graph import Graph, Node, Value
from trivet.pieces import Borders
from trivet.schedule import DATA_OPS, Plan, Storage, runs, schedule
from trivet.targets.base import Targets
from trivet.views import disjoint


@dataclass(slots=True)
class Done:
    """What a step does, at times first..last. device: that it is meant for; lane: the one device that it can run on, "" where alternatives may
    run on several; barrier: everything before it is done when it begins, and it is when anything behind it does.
    """

    first: int
    last: int
    device: str = ""
    lane: str = ""
    barrier: bool = False
    reads: dict[Value, None] = field(default_factory=dict)
    writes: dict[Value, None] = field(default_factory=dict)

    def add(self, nodes: Iterable[Node]) -> None:
        """The values of kernels."""
        for n in nodes:
            self.touch((v for v in n.inputs if v is not None), (*n.outputs, *n.tmp, *n.spare))

    def touch(self, reads: Iterable[Value], writes: Iterable[Value]) -> None:
        self.reads.update(dict.fromkeys(v for v in reads if v.const is None))
        self.writes.update(dict.fromkeys(writes))


def steps_of(graph: Graph, targets: Targets, fallback: bool) -> list[Done]:
    """The steps of an entry whose storage is assigned, in order."""
    events = schedule(graph).events
    begins = {r.first: r for r in runs(events)}
    borders = Borders(graph) if any(targets.named(r.delegate).opaque for r in begins.values()) else None
    out: list[Done] = []
    for t, event in enumerate(events):
        if event.kind in ("branch", "jump"):
            out.append(Done(t, t, barrier=True))
        elif event.kind == "transfer":
            x, y = event.node.inputs[0], event.node.outputs[0]
            assert x is not None
            device = (x.state.memory if x.state is not None else x.memory) or y.memory
            out.append(Done(t, t, device, device))
            out[-1].touch([x], [y])
        elif t in begins:
            run = begins[t]
            target = targets.named(run.delegate)
            alone = run.delegate == "cpu" or target.memory or not fallback
            step = Done(run.first, run.last, run.delegate, run.delegate if alone else "", run.nodes[-1].op in DATA_OPS)
            if borders is not None and target.opaque:
                border = borders.of(run)
                step.touch(border.inputs, border.outputs)
            if not target.opaque or fallback:
                step.add(run.nodes)
            out.append(step)
    return out


@dataclass(slots=True)
class _Use:
    step: int
    value: Value
    write: bool


def waits(steps: list[Done], plan: Plan) -> list[tuple[int, int]]:
    """(step, on) in order: the least that keeps every result. Leaves out what follows from other waits, from the order of steps that can run on
    one device only, and from barriers.

    Args:
        steps: in order.
        plan: where their values lie.
    """
    needs = _needs(steps, plan)
    return _reduced(steps, needs)[0]


def together(steps: list[Done], plan: Plan) -> dict[Storage, int]:
    """Until when storages would have to live so that none gives its bytes to a step that its users' results do not lead to: steps of two devices
    that need nothing from each other stay free to run side by side. Only storages that would have to live longer.
    """
    if len({s.device for s in steps if not s.barrier}) < 2:
        return {}
    uses = _uses(steps, plan)
    needs: list[set[int]] = [set() for _ in steps]
    for group in uses.values():
        _within(group, needs)
    before = _reduced([replace(s, lane=s.device) for s in steps], needs)[1]
    movable = {s: {u.step for u in group} for s, group in uses.items() if s.kind in (RegionKind.arena, RegionKind.io)}
    touching: dict[str, list[int]] = {}
    for owner in {s.owner for s in movable}:
        touching[owner] = sorted({i for s, group in movable.items() if s.owner == owner for i in group})
    out: dict[Storage, int] = {}
    for s, mine in movable.items():
        apart = [steps[t].last for i in mine for t in touching[s.owner] if t > i and not before[t] >> i & 1]
        if max(apart, default=0) > s.last:
            out[s] = max(apart)
    return out


def _reduced(steps: list[Done], needs: list[set[int]]) -> tuple[list[tuple[int, int]], list[int]]:
    """The waits that are left, and for each step the ones that are done when it begins, as bits."""
    out: list[tuple[int, int]] = []
    before: list[int] = []  # bits of the steps that are done when a step begins
    last: dict[str, int] = {}
    settled = 0  # bits of the steps up to the last barrier, with it
    for i, step in enumerate(steps):
        have = settled
        if step.lane and step.lane in last:
            k = last[step.lane]
            have |= before[k] | 1 << k
        if step.barrier:
            have = (1 << i) - 1
            settled = have | 1 << i
        for k in sorted(needs[i], reverse=True):
            if not have >> k & 1:
                out.append((i, k))
                have |= before[k] | 1 << k
        before.append(have)
        if step.lane:
            last[step.lane] = i
    return sorted(out), before


def _needs(steps: list[Done], plan: Plan) -> list[set[int]]:
    """For every step the earlier ones that must be done, each pair that shares bytes of which one of the two writes."""
    uses = _uses(steps, plan)
    out: list[set[int]] = [set() for _ in steps]
    for group in uses.values():
        _within(group, out)
    movable = (RegionKind.arena, RegionKind.io)
    replanned = {s.memory for s in plan.storages if s.unbounded}
    mine = sorted((s for s in uses if s.kind in movable and s.bound), key=lambda s: (s.memory, s.offset))
    for n, a in enumerate(mine):
        for b in mine[n + 1 :]:
            if b.memory != a.memory or (b.offset >= a.offset + a.bound and a.memory not in replanned):
                break
            if a.last < b.first or b.last < a.first:
                _between(uses[a], uses[b], out)
    return out


def _uses(steps: list[Done], plan: Plan) -> dict[Storage, list[_Use]]:
    storage = {s.root: s for s in plan.storages}
    uses: dict[Storage, list[_Use]] = {}
    for i, step in enumerate(steps):
        for values, write in ((step.reads, False), (step.writes, True)):
            for v in values:
                if v.placement is not None and v.placement.root in storage:
                    uses.setdefault(storage[v.placement.root], []).append(_Use(i, v, write))
    return uses


def _within(group: list[_Use], out: list[set[int]]) -> None:
    """Uses of one storage: windows that share no byte do not meet."""
    for n, b in enumerate(group):
        for a in group[:n]:
            meet = a.step < b.step and (a.write or b.write) and a.step not in out[b.step]
            if meet and _meet(a.value, b.value):
                out[b.step].add(a.step)


def _meet(a: Value, b: Value) -> bool:
    if a is b:
        return True
    p, q = a.placement, b.placement
    assert p is not None and q is not None
    return a.type.dtype != b.type.dtype or not disjoint(a.shape, (p.offset, p.strides), b.shape, (q.offset, q.strides))


def _between(a: list[_Use], b: list[_Use], out: list[set[int]]) -> None:
    """Storages that share bytes at different times: all uses of the earlier one come before those of the later one."""
    first, second = (a, b) if a[0].step <= b[0].step else (b, a)
    early, late = {u.step for u in first}, {u.step for u in second}
    for k in late:
        out[k] |= {i for i in early if i < k}
