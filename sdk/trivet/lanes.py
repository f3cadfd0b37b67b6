"""Work of several devices side by side: which nodes make a part together, and in which order the parts are given to their devices.

Nodes are scheduled on one in-order lane per delegate by estimated times, the longest way to the end first (H. Topcuoglu et al., HEFT, 2002, with
delegates already chosen). Neighbours in a lane become one piece while that holds nobody up: a piece begins when everything that it reads is
there, and its results are there when all of it is done.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

HOST = "cpu"


@dataclass(slots=True)
class Task:
    """A node. lane: of its device, "" for what takes no time and has no device (views). alone: never in one piece with others. handover: seconds
    that a further piece costs.
    """

    lane: str
    seconds: float = 0.0
    alone: bool = False
    handover: float = 0.0


@dataclass(slots=True)
class _Piece:
    begin: float
    open: bool = True
    deadline: float = field(default=float("inf"))  # when the first other lane goes on with a result


def pieces(tasks: Sequence[Task], before: Sequence[set[int]]) -> list[int]:
    """The piece of every node, numbered in an order in which they can run: everything that a piece needs is in pieces before it, or in itself.

    Args:
        tasks: the nodes.
        before: for each node the ones that it needs.
    """
    start, finish, order = _simulate(tasks, before)
    after = _turned(before)
    used = _consumers(tasks, after)
    made: list[_Piece] = []
    of = [-1] * len(tasks)
    current: dict[str, int] = {}
    for i in order:
        t = tasks[i]
        needs = _sources(i, tasks, before)
        if t.lane == "":
            continue
        p = current.get(t.lane, -1)
        fits = p >= 0 and made[p].open and not t.alone and finish[i] <= made[p].deadline + t.handover
        for k in needs:
            fits = fits and (of[k] == p or (of[k] < p and finish[k] <= made[p].begin + t.handover))
        if not fits:
            p = current[t.lane] = len(made)
            made.append(_Piece(start[i], not t.alone))
        of[i] = p
        others = [start[k] for k in used[i] if tasks[k].lane != t.lane or tasks[k].alone]
        made[p].deadline = min([made[p].deadline, *others])
    lanes = [""] * len(made)
    needs_of: list[set[int]] = [set() for _ in made]
    for i in order:
        if of[i] >= 0:
            lanes[of[i]] = tasks[i].lane
            needs_of[of[i]] |= {of[k] for k in _sources(i, tasks, before)} - {of[i]}
    number = _given(lanes, needs_of)
    return _views(tasks, before, after, [number[p] if p >= 0 else p for p in of])


def _given(lanes: Sequence[str], needs: Sequence[set[int]]) -> list[int]:
    """The place of every piece in the order in which they are given to their devices. The host works on its own pieces itself, so others come
    first where they can; within a lane the order stays.
    """
    queues: dict[str, list[int]] = {}
    for p in reversed(range(len(lanes))):
        queues.setdefault(lanes[p], []).append(p)
    number = [-1] * len(lanes)
    for n in range(len(lanes)):
        heads = [q[-1] for q in queues.values() if q and all(number[k] >= 0 for k in needs[q[-1]])]
        p = min(heads, key=lambda p: (lanes[p] == HOST, p))
        queues[lanes[p]].pop()
        number[p] = n
    return number


def _turned(before: Sequence[set[int]]) -> list[list[int]]:
    after: list[list[int]] = [[] for _ in before]
    for i, need in enumerate(before):
        for k in need:
            after[k].append(i)
    return after


def _simulate(tasks: Sequence[Task], before: Sequence[set[int]]) -> tuple[list[float], list[float], list[int]]:
    """Begin and end of every task, and the order of beginning; a topological one."""
    after = _turned(before)
    n = len(tasks)
    waiting = [len(b) for b in before]
    rank = [0.0] * n  # seconds from its begin to the end of everything behind it
    for i in reversed(_topological(before, after)):
        rank[i] = tasks[i].seconds + max((rank[k] for k in after[i]), default=0.0)
    start, finish = [0.0] * n, [0.0] * n
    order: list[int] = []
    free: dict[str, float] = {}
    ready: dict[str, list[tuple[float, int]]] = {}  # per lane what waits for its inputs' time, and may begin
    able: dict[str, list[tuple[bool, float, int]]] = {}
    entering = [
        t.alone and all(tasks[k].lane != t.lane for k in _sources(i, tasks, before)) for i, t in enumerate(tasks)
    ]

    def release(i: int) -> None:
        at = max((finish[k] for k in before[i]), default=0.0)
        heapq.heappush(ready.setdefault(tasks[i].lane, []), (at, i))

    for i in range(n):
        if waiting[i] == 0:
            release(i)
    while len(order) < n:
        best: tuple[float, str] | None = None
        for lane in sorted({*ready, *able}):
            if able.get(lane):
                at = free.get(lane, 0.0)
            elif ready.get(lane):
                at = max(free.get(lane, 0.0), ready[lane][0][0])
            else:
                continue
            if lane == "":  # views are done as soon as what they look at is
                best = (at, lane)
                break
            if best is None or at < best[0]:
                best = (at, lane)
        assert best is not None, "the graph has a cycle"
        now, lane = best
        waits, can = ready.setdefault(lane, []), able.setdefault(lane, [])
        while waits and waits[0][0] <= now:
            _, i = heapq.heappop(waits)
            heapq.heappush(can, (not entering[i], -rank[i], i))  # what comes in first: one piece reads it, not two
        _, _, i = heapq.heappop(can)
        at = max((finish[k] for k in before[i]), default=0.0)
        start[i] = at if lane == "" else max(now, at)
        finish[i] = start[i] + tasks[i].seconds
        if lane:
            free[lane] = finish[i]
        order.append(i)
        for k in after[i]:
            waiting[k] -= 1
            if waiting[k] == 0:
                release(k)
    return start, finish, order


def _topological(before: Sequence[set[int]], after: Sequence[list[int]]) -> list[int]:
    waiting = [len(b) for b in before]
    todo = [i for i, w in enumerate(waiting) if w == 0]
    out = []
    while todo:
        i = todo.pop()
        out.append(i)
        for k in after[i]:
            waiting[k] -= 1
            if waiting[k] == 0:
                todo.append(k)
    return out


def _sources(i: int, tasks: Sequence[Task], before: Sequence[set[int]]) -> list[int]:
    """What a node needs, views looked through."""
    out, todo, seen = [], list(before[i]), set(before[i])
    while todo:
        k = todo.pop()
        if tasks[k].lane:
            out.append(k)
            continue
        fresh = before[k] - seen
        seen |= fresh
        todo += fresh
    return out


def _consumers(tasks: Sequence[Task], after: Sequence[list[int]]) -> list[list[int]]:
    """What reads a node, views looked through."""
    turned = [set(a) for a in after]
    return [_sources(i, tasks, turned) for i in range(len(tasks))]


def _views(tasks: Sequence[Task], before: Sequence[set[int]], after: Sequence[list[int]], of: list[int]) -> list[int]:
    """Views go with what they look at; those of inputs, constants and states with their first reader."""
    order = _topological(before, after)
    for i in order:
        if tasks[i].lane == "":
            of[i] = max((of[k] for k in before[i]), default=-1)
    for i in reversed(order):
        if of[i] < 0:
            of[i] = min((of[k] for k in after[i]), default=0)
    for i in order:  # an order stays one that can run
        of[i] = max([of[i], *(of[k] for k in before[i])]) if tasks[i].lane == "" else of[i]
    return of
