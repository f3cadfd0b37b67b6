"""Offset planning: intervals of time with sizes are packed into one address range as small as possible.

Pure functions on plain items, deterministic. Several greedy orders first; when none reaches the lower bound (the largest sum
of what lives at one time), an iterated search over orders, then a bounded exact search.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

ALIGN = 64


@dataclass(frozen=True, slots=True)
class Item:
    """size bytes at a multiple of align, in use from time first to time last (inclusive). fixed: offset that is given."""

    size: int
    first: int
    last: int
    align: int = ALIGN
    fixed: int = -1


@dataclass(frozen=True, slots=True)
class Packing:
    """offsets: by item. size: bytes in all. bound: no packing is smaller. order: item indices as placed.
    method: what found it. exact: the search proved that no smaller one exists.
    """

    offsets: tuple[int, ...]
    size: int
    bound: int
    order: tuple[int, ...]
    method: str
    exact: bool

    @property
    def optimal(self) -> bool:
        return self.exact or self.size == self.bound


def lower_bound(items: Sequence[Item]) -> int:
    """The largest sum of sizes (rounded up to the alignment) of items that live at one time."""
    events: list[tuple[int, int]] = []
    for it in items:
        if it.size > 0:
            size = it.size if it.fixed >= 0 else _up(it.size, it.align)
            events += [(2 * it.first, size), (2 * it.last + 1, -size)]
    most = now = 0
    for _, change in sorted(events):
        now += change
        most = max(most, now)
    return max(most, max((it.fixed + it.size for it in items if it.fixed >= 0), default=0))


def pack(items: Sequence[Item], *, effort: float = 1.0) -> Packing:
    """Chooses offsets.

    Args:
        items: what to place. Items of size 0 get offset 0.
        effort: scales the work of the searches (0: greedy orders only).

    Returns:
        The smallest packing found.
    """
    p = _Problem(items)
    best: tuple[int, list[int], list[int], str] | None = None
    for name, order in p.orders():
        for fit in ("first", "best"):
            offsets, size = p.place(order, fit)
            if best is None or size < best[0]:
                best = size, offsets, order, f"{name}, {fit} fit"
        if best is not None and best[0] == p.bound:
            break
    assert best is not None
    exact = False
    if best[0] > p.bound and effort > 0 and p.live:
        size, offsets, order, name = p.search(best, int(effort * 1_500_000))
        best = size, offsets, order, name
        if best[0] > p.bound:
            done, found = p.exact(best[0], int(effort * 60_000))
            if found is not None:
                best = found[0], found[1], sorted(p.live, key=lambda i: (found[1][i], i)), "exact search"
            exact = done
    size, offsets, _, name = best
    order = sorted(range(len(items)), key=lambda i: (offsets[i], items[i].first, i))
    return Packing(tuple(offsets), size, p.bound, tuple(order), name, exact)


def overlaps(items: Sequence[Item], offsets: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs of items that live at one time and share bytes: must be empty. Slow and plain on purpose: it is the check."""
    out = []
    for i, a in enumerate(items):
        for j in range(i):
            b = items[j]
            if a.size and b.size and a.first <= b.last and b.first <= a.last and (
                offsets[i] < offsets[j] + b.size and offsets[j] < offsets[i] + a.size):  # fmt: skip
                out.append((j, i))
    return out


def _up(n: int, align: int) -> int:
    return -(-n // align) * align


class _Problem:
    def __init__(self, items: Sequence[Item]) -> None:
        self.items = items
        self.bound = lower_bound(items)
        self.live = [i for i, it in enumerate(items) if it.size > 0 and it.fixed < 0]
        self.fixed = [i for i, it in enumerate(items) if it.size > 0 and it.fixed >= 0]
        self.size = [_up(it.size, it.align) if it.fixed < 0 else it.size for it in items]
        self.near: list[list[int]] = [[] for _ in items]  # others alive at the same time
        active: list[int] = []
        for i in sorted((*self.live, *self.fixed), key=lambda k: (items[k].first, k)):
            active = [k for k in active if items[k].last >= items[i].first]
            for k in active:
                self.near[i].append(k)
                self.near[k].append(i)
            active.append(i)
        self.plain = all(it.align == ALIGN for it in items) and not self.fixed

    # -- greedy
    def orders(self) -> list[tuple[str, list[int]]]:
        it, size = self.items, self.size
        span = [x.last - x.first + 1 for x in it]
        weight = [size[i] + sum(size[k] for k in self.near[i]) for i in range(len(it))]
        keys = [
            ("largest first", lambda i: (-size[i], it[i].first, i)),
            ("largest and longest first", lambda i: (-size[i] * span[i], it[i].first, i)),
            ("largest, latest first", lambda i: (-size[i], -it[i].first, i)),
            ("by time", lambda i: (it[i].first, -size[i], i)),
            ("longest first", lambda i: (-span[i], -size[i], i)),
            ("most crowded first", lambda i: (-weight[i], -size[i], i)),
            ("by time, backwards", lambda i: (-it[i].last, -size[i], i)),
            ("size by crowd", lambda i: (-size[i] * weight[i], it[i].first, i)),
        ]
        return [(name, sorted(self.live, key=key)) for name, key in keys]

    def place(self, order: Sequence[int], fit: str, limit: int = 1 << 62) -> tuple[list[int], int]:
        """Places items one by one: first fit takes the lowest gap, best fit the smallest gap that is big enough."""
        size, near, items = self.size, self.near, self.items
        offsets = [-1] * len(items)
        for i in self.fixed:
            offsets[i] = items[i].fixed
        most = max((offsets[i] + size[i] for i in self.fixed), default=0)
        first = fit == "first"
        for i in order:
            taken = sorted((offsets[k], offsets[k] + size[k]) for k in near[i] if offsets[k] >= 0)
            need, align = size[i], items[i].align
            at, choice, room = 0, -1, 1 << 62
            for lo, hi in taken:
                gap = lo - at
                if gap >= need:
                    if first:
                        choice = at
                        break
                    if gap < room:
                        choice, room = at, gap
                if hi > at:
                    at = hi if self.plain else _up(hi, align)
            if choice < 0:
                choice = at
            offsets[i] = choice
            if choice + need > most:
                most = choice + need
                if most >= limit:
                    return offsets, most
        for i in range(len(items)):
            offsets[i] = max(offsets[i], 0)
        return offsets, most

    # -- search over orders
    def search(self, best: tuple[int, list[int], list[int], str], budget: int
               ) -> tuple[int, list[int], list[int], str]:  # fmt: skip
        """Moves items that stick out to the front, with random swaps to leave local minima. budget: neighbour visits."""
        rng = random.Random(20240229)
        cost = max(1, sum(len(self.near[i]) + 4 for i in self.live))
        rounds = max(20, min(4000, budget // cost))
        top_size, top_offsets, top_order, name = best
        orders = [(self.place(o, "first"), o, n) for n, o in self.orders()]
        orders.sort(key=lambda t: t[0][1])
        starts = [(top_size, top_offsets, top_order), *((p[1], p[0], o) for p, o, _ in orders[:3])]
        for size, offsets, order in starts:
            now, at, cur = size, offsets, list(order)
            limit = now
            for step in range(rounds // len(starts)):
                if top_size == self.bound:
                    return top_size, top_offsets, top_order, name
                trial = list(cur)
                kind = rng.random()
                peak = [i for i in trial if at[i] + self.size[i] >= now]
                if kind < 0.5 and peak:
                    i = rng.choice(peak)
                    trial.remove(i)
                    trial.insert(rng.randrange(max(1, len(trial) // (1 + rng.randrange(4)))), i)
                elif kind < 0.8 and peak:
                    i = rng.choice(peak)
                    mates = [k for k in self.near[i] if k in trial] or [i]
                    j = rng.choice(mates)
                    a, b = trial.index(i), trial.index(j)
                    trial[a], trial[b] = trial[b], trial[a]
                else:
                    a, b = rng.randrange(len(trial)), rng.randrange(len(trial))
                    trial[a], trial[b] = trial[b], trial[a]
                fit = "first" if rng.random() < 0.7 else "best"
                got, size2 = self.place(trial, fit, limit=int(now * 1.02) + 1)
                slack = 1.0 + 0.01 * (1.0 - step / max(1, rounds // len(starts)))
                if size2 <= now or size2 < int(limit * slack):
                    if min(got) < 0:
                        got, size2 = self.place(trial, fit)
                    cur, at, now = trial, got, size2
                    if now < limit:
                        limit = now
                    if now < top_size:
                        top_size, top_offsets, top_order, name = now, got, trial, "search over orders"
        return top_size, top_offsets, top_order, name

    # -- exact
    def exact(self, size: int, nodes: int) -> tuple[bool, tuple[int, list[int]] | None]:
        """Depth-first search for a packing smaller than size. Any packing can be pushed down until each item lies on the
        floor or on another; taken by rising offset, each then lies on the highest of its neighbours so far.

        Returns:
            (the search was complete, the best packing found or None).
        """
        if len(self.live) > 80 or not self.plain:
            return False, None
        starts = sorted({self.items[i].first for i in self.live})
        when = {
            i: [k for k, t in enumerate(starts) if self.items[i].first <= t <= self.items[i].last] for i in self.live
        }
        waiting = [0] * len(starts)  # bytes still to be placed, by time
        for i in self.live:
            for k in when[i]:
                waiting[k] += self.size[i]
        top = [0] * len(starts)  # highest end of what is placed, by time
        offsets = [-1] * len(self.items)
        best: tuple[int, list[int]] | None = None
        placed: list[tuple[int, list[int]]] = []  # item, top before it

        def undo() -> None:
            nonlocal top
            i, top = placed.pop()
            offsets[i] = -1
            for k in when[i]:
                waiting[k] += self.size[i]

        choices = [self._next(offsets, 0, size)]
        while choices:
            if nodes <= 0:
                return False, best
            if not choices[-1]:
                choices.pop()
                if placed:
                    undo()
                continue
            at, i = choices[-1].pop()
            nodes -= 1
            placed.append((i, top))
            top = list(top)
            offsets[i] = at
            for k in when[i]:
                top[k] = at + self.size[i]
                waiting[k] -= self.size[i]
            # what is still to come lies above this offset, and above what is placed at its time
            if max(max(at, h) + w for h, w in zip(top, waiting, strict=True)) >= size:
                undo()
            elif len(placed) < len(self.live):
                choices.append(self._next(offsets, at, size))
            else:
                size = max(top)
                best = size, [max(o, 0) for o in offsets]
                if size == self.bound:
                    return True, best
                undo()
        return True, best

    def _next(self, offsets: list[int], floor: int, limit: int) -> list[tuple[int, int]]:
        """(offset, item) that may come next at or above floor, the best last; empty when some item no longer fits."""
        out = []
        for i in self.live:
            if offsets[i] >= 0:
                continue
            at = max((offsets[k] + self.size[k] for k in self.near[i] if offsets[k] >= 0), default=0)
            if at + self.size[i] >= limit:
                return []
            if at >= floor:
                out.append((at, i))
        out.sort(key=lambda t: (-t[0], self.size[t[1]], -t[1]))
        return out
