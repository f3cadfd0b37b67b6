"""The planner: no two live items share bytes, whatever the graph; results are close to the bound, and proofs are true."""

from __future__ import annotations

from itertools import permutations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.error import Error
from trivet.fbs.structs import DType, RegionKind
from trivet.ir.graph import Value
from trivet.ir.types import Type
from trivet.passes.plan_memory import plan_entry
from trivet.planner import ALIGN, Item, lower_bound, overlaps, pack
from trivet.schedule import Plan, Storage
from trivet.targets.base import Memory


def check(items: list[Item], offsets: tuple[int, ...], size: int) -> None:
    """Byte by byte and time by time, knowing nothing of how the planner works: who owns each block of 64 bytes?"""
    for t in range(max((it.last for it in items), default=-1) + 1):
        owner: dict[int, int] = {}
        for i, (it, at) in enumerate(zip(items, offsets, strict=True)):
            if not it.size or not it.first <= t <= it.last:
                continue
            assert at % it.align == 0 and at >= 0 and at + it.size <= size
            for block in range(at // ALIGN, (at + it.size - 1) // ALIGN + 1):
                assert owner.setdefault(block, i) == i, f"items {owner[block]} and {i} share block {block} at time {t}"


def random_items(rng: Random) -> list[Item]:
    """Like a network: chains with skips, branches, items that live long, scratch that lives for one time."""
    times = rng.randint(1, 40)
    sizes = [rng.randrange(1, 6000) for _ in range(rng.randint(1, 6))]
    out = []
    for _ in range(rng.randint(1, 60)):
        first = rng.randrange(times)
        length = 0 if rng.random() < 0.2 else min(times - 1 - first, int(rng.expovariate(rng.choice([1.0, 0.3, 0.05]))))
        size = rng.choice([0, 1, 64, rng.choice(sizes), rng.choice(sizes), rng.randrange(1, 6000)])
        out.append(Item(size, first, first + length))
    return out


def test_thousands_of_random_graphs() -> None:
    total, near = 0, 0
    for seed in range(3000):
        items = random_items(Random(seed))
        p = pack(items, effort=0.05)
        check(items, p.offsets, p.size)
        assert not overlaps(items, p.offsets)
        assert p.bound == lower_bound(items) <= p.size
        total += 1
        near += p.size <= p.bound * 1.07
    assert near / total > 0.97


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 700), st.integers(0, 12), st.integers(0, 6)), max_size=14))
def test_any_items(rows: list[tuple[int, int, int]]) -> None:
    items = [Item(size, first, first + length) for size, first, length in rows]
    p = pack(items, effort=0.05)
    check(items, p.offsets, p.size)


def brute(items: list[Item]) -> int:
    """The smallest packing: first fit in every order reaches it."""
    best = 1 << 60
    for order in permutations(range(len(items))):
        placed: list[tuple[int, int]] = []
        top = 0
        for i in order:
            size = -(-items[i].size // ALIGN) * ALIGN
            at = 0
            for k, lo in sorted(placed, key=lambda t: t[1]):
                o = items[k]
                if o.first <= items[i].last and items[i].first <= o.last:
                    if lo - at >= size:
                        break
                    at = max(at, lo + -(-o.size // ALIGN) * ALIGN)
            placed.append((i, at))
            top = max(top, at + size)
        best = min(best, top)
    return best


def test_proofs_are_true() -> None:
    proved = 0
    for seed in range(400):
        rng = Random(seed)
        items = []
        for _ in range(rng.randint(3, 6)):
            first = rng.randrange(5)
            items.append(Item(64 * rng.randint(1, 6), first, first + rng.randint(0, 3)))
        p = pack(items)
        best = brute(items)
        assert p.size == best
        proved += p.optimal
    assert proved > 380


def test_bound_can_be_out_of_reach() -> None:
    rows = [(3, 0, 1), (2, 0, 2), (2, 2, 5), (1, 3, 5), (1, 2, 6), (1, 3, 6), (3, 6, 7), (2, 7, 7)]
    p = pack([Item(64 * size, first, last) for size, first, last in rows])
    assert (p.size, p.bound, p.exact) == (6 * 64, 5 * 64, True)
    assert "proven" not in p.method and p.optimal


def test_deterministic() -> None:
    items = random_items(Random(7))
    assert pack(items) == pack(items)


def test_fixed_items_stay() -> None:
    items = [Item(100, 0, 3, fixed=128), Item(128, 1, 2), Item(300, 2, 3), Item(64, 0, 0)]
    p = pack(items)
    assert p.offsets[0] == 128
    assert not overlaps(items, p.offsets)


def storage(name: str, size: int, first: int, last: int) -> Storage:
    return Storage(Value(name, Type(DType.u8, (size,))), RegionKind.arena, size, size, first=first, last=last)


def test_budget_names_the_largest() -> None:
    plan = Plan([storage("small", 100, 0, 3), storage("big", 5000, 1, 2), storage("late", 9000, 3, 3)], 4)
    with pytest.raises(Error, match=r"(?s)'sram' has 8,000 bytes.*%late u8\[9000\]"):
        plan_entry("forward", plan, [Memory("sram", budget=8000)])
    plan_entry("forward", plan, [Memory("sram", budget=10000)])
    assert plan.arena == {0: 9152}


def test_two_memories() -> None:
    plan = Plan(
        [storage("a", 1000, 0, 1), storage("b", 60000, 1, 2), storage("c", 500, 2, 3), storage("d", 400, 0, 3)], 4
    )
    plan_entry("forward", plan, [Memory("dtcm", 0, 2048), Memory("sram", 1)])
    where = {s.root.name: s.memory for s in plan.storages}
    assert where == {"a": 0, "b": 1, "c": 0, "d": 0}
    assert plan.arena[0] <= 2048 and plan.arena[1] == 60032
    assert plan.lower_bound > 60000
