"""Gives every storage of the arenas its offset: activations, scratch of kernels, homes of inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from trivet.error import Error
from trivet.fbs.structs import RegionKind
from trivet.ir.graph import Module
from trivet.pipeline import Context
from trivet.planner import Item, Packing, lower_bound, pack
from trivet.schedule import Plan, Storage
from trivet.targets.base import Memory, Targets, find
from trivet.waits import steps_of, together


def plan_memory(module: Module, ctx: Context) -> None:
    """Sets memory, offset and rank of the storages of every entry's plan, and the sizes of its arenas. Where several devices may work at a time,
    storages live until that is over, if the budgets allow.
    """
    targets = find(ctx.target if ctx.target is not None else "cpu")
    memories = memories_of(targets, ctx.options.memories)
    for name, graph in module.entries.items():
        p = graph.plan
        assert p is not None
        longer = together(steps_of(graph, targets, ctx.fallback), p) if len(targets.all) > 1 else {}
        if not (longer and _roomy(name, p, memories, longer)):
            plan_entry(name, p, memories)
        total = sum(p.arena.values())
        ctx.report.note("plan_memory", f"{name}: {total:,} bytes, lower bound {p.lower_bound:,} ({p.method})")


def _roomy(name: str, plan: Plan, memories: Sequence[Memory], longer: Mapping[Storage, int]) -> bool:
    """Plans an entry with longer lives of some storages; False, with nothing changed in these, when a budget does not allow that."""
    short = {s: s.last for s in longer}
    for s, last in longer.items():
        s.last = last
    try:
        plan_entry(name, plan, memories)
    except Error:
        for s, last in short.items():
            s.last = last
        return False
    return True


def memories_of(targets: Targets, asked: Sequence[Memory]) -> tuple[Memory, ...]:
    """The memories of a program: the host's, fastest first, then one per delegate that has its own. Budgets as asked, by name."""
    names = [t.memory for t in targets.all if t.memory]
    owned = {t.memory if names.count(t.memory) == 1 else t.name: t.name for t in targets.all if t.memory}
    host = [m for m in asked if m.name not in owned] or list(targets.named("cpu").memories())
    budget = {m.name: m.budget for m in asked}
    rows = [*host, *(Memory(n, budget=budget.get(n, 0), delegate=d) for n, d in owned.items())]
    return tuple(replace(m, index=i) for i, m in enumerate(rows))


def plan_entry(name: str, plan: Plan, memories: Sequence[Memory]) -> None:
    """Plans one entry.

    Args:
        name: of the entry.
        plan: its storages; those in the memory of a delegate go there, the others to the host's memories.
        memories: the host's first.

    Raises:
        Error: a memory's budget is exceeded; names the largest storages alive at the peak.
    """
    items = [s for s in plan.storages if s.kind in (RegionKind.arena, RegionKind.io)]
    plan.arena, plan.memories = {}, tuple(memories)
    host = [m for m in memories if not m.delegate]
    of = {m.delegate: [s for s in items if s.owner == m.delegate] for m in memories}
    plan.lower_bound = sum(lower_bound([_item(s) for s in group]) for group in of.values())
    for s in plan.storages:
        s.memory = next((m.index for m in memories if m.delegate and m.delegate == s.owner), 0)
    methods = []
    left = of[""]
    for memory in memories:
        last = memory is host[-1]
        chosen = of[memory.delegate] if memory.delegate else left if last else _fastest(left, memory.budget)
        packing = pack([_item(s) for s in chosen])
        if memory.budget and packing.size > memory.budget:
            raise _too_big(name, memory, chosen, packing)
        for s, offset in zip(chosen, packing.offsets, strict=True):
            s.memory, s.offset = memory.index, offset
        for rank, k in enumerate(packing.order):
            chosen[k].rank = rank
        if chosen or last:
            plan.arena[memory.index] = packing.size
            methods.append(packing.method + (", proven optimal" if packing.optimal else ""))
        taken = set(map(id, chosen))
        left = [s for s in left if id(s) not in taken]
    plan.method = "; ".join(methods)


def _item(s: Storage) -> Item:
    return Item(s.bound, s.first, s.last)


def _fastest(items: list[Storage], budget: int) -> list[Storage]:
    """The storages that gain most from a small fast memory (short-lived and small ones first) and fit into it."""
    out: list[Storage] = []
    for s in sorted(items, key=lambda s: (s.bound * (s.last - s.first + 1), s.first)):
        if lower_bound([*map(_item, out), _item(s)]) <= budget and pack(
            [*map(_item, out), _item(s)], effort=0).size <= budget:  # fmt: skip
            out.append(s)
    chosen = set(map(id, out))
    return [s for s in items if id(s) in chosen]


def _too_big(name: str, memory: Memory, items: list[Storage], packing: Packing) -> Error:
    def alive(t: int) -> list[Storage]:
        return [s for s in items if s.first <= t <= s.last]

    peak = max({s.first for s in items}, key=lambda t: sum(s.bound for s in alive(t)), default=0)
    big = sorted(alive(peak), key=lambda s: -s.bound)[:4]
    what = ", ".join(f"{s.root} {s.root.type} ({s.bound:,} bytes{_where(s)})" for s in big)
    return Error(
        f"memory {memory.name!r} has {memory.budget:,} bytes, entry {name!r} needs {packing.size:,} "
        f"(lower bound {packing.bound:,}); the largest at time {peak}: {what}",
        node=str(big[0].root.node.loc) if big and big[0].root.node is not None else name,
        remedy="give a larger budget, a smaller input, or a second memory",
    )


def _where(s: Storage) -> str:
    node = s.root.node
    return f", {node.loc.module}" if node is not None and node.loc.module else ""
