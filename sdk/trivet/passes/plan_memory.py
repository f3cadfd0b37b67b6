"""Gives every storage of the arenas its offset: activations, scratch of kernels, homes of inputs and outputs."""

from __future__ import annotations

from collections.abc import Sequence

from trivet.error import Error
from trivet.fbs.structs import RegionKind
from trivet.ir.graph import Module
from trivet.pipeline import Context
from trivet.planner import Item, Packing, lower_bound, pack
from trivet.schedule import Plan, Storage
from trivet.targets.base import Memory, find


def plan_memory(module: Module, ctx: Context) -> None:
    """Sets memory, offset and rank of the storages of every entry's plan, and the sizes of its arenas."""
    memories = ctx.options.memories or find(ctx.target if ctx.target is not None else "cpu").all[-1].memories()
    for name, graph in module.entries.items():
        assert graph.plan is not None
        plan_entry(name, graph.plan, memories)
        p = graph.plan
        total = sum(p.arena.values())
        ctx.report.note("plan_memory", f"{name}: {total:,} bytes, lower bound {p.lower_bound:,} ({p.method})")


def plan_entry(name: str, plan: Plan, memories: Sequence[Memory]) -> None:
    """Plans one entry.

    Raises:
        Error: a memory's budget is exceeded; names the largest storages alive at the peak.
    """
    items = [s for s in plan.storages if s.kind in (RegionKind.arena, RegionKind.io)]
    plan.lower_bound = lower_bound([_item(s) for s in items])
    plan.arena = {}
    methods = []
    left = items
    for i, memory in enumerate(memories):
        last = i + 1 == len(memories)
        chosen = left if last else _fastest(left, memory.budget)
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
