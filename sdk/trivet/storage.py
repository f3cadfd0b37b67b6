"""Which values share memory: trees of values, each a strided window of its tree's root, grown by merging under proof.

A tree is one storage. Its cells are values; an edge says how a cell's window follows from its parent's. Cells with the same
content (views, pieces of a concatenation, removed copies) form one version; in-place results are another version of the
same bytes. A merge is kept only if every view can still be a window and no version is overwritten while it is still read.

Times here are doubled: event t is 2t, so that "between two events" has a number. -1: before the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trivet.ir.dim import Dim, Shape
from trivet.ir.graph import Node, Value
from trivet.schedule import Schedule
from trivet.views import Window, apply, disjoint, invert, memory_order, same_strides, unit_axis

Edge = tuple[Any, ...]  # ("view", node) ("unview", node) ("window", axis, start) ("same",) ("alias",)
SAME: Edge = ("same",)
ALIAS: Edge = ("alias",)
FEW = 16  # channels that a convolution writes apart as fast as side by side
ANY_LAYOUT = ("map", "copy")  # ops that are as fast with one memory order as with another


@dataclass(slots=True, eq=False)
class Version:
    """Cells with one content. birth, death: first write and last read, loops taken into account."""

    cells: list[Cell] = field(default_factory=list)
    birth: int = 0
    death: int = -1


@dataclass(slots=True, eq=False)
class Cell:
    value: Value
    window: Window
    tree: Tree
    version: Version
    parent: Cell | None = None
    edge: Edge = SAME
    births: list[int] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    strict: bool = False  # read or written by a kernel that cares for the memory order
    fixed: bool = False  # the window's strides stay as they are: it is moved as one block of bytes


@dataclass(slots=True, eq=False)
class Tree:
    """kind: arena, input, output, state, const. free: may be put into another tree. size: bytes planned for."""

    root: Cell
    kind: str
    size: int
    index: int
    cells: list[Cell] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)
    tag: Any = None  # slot, State or Const

    @property
    def owner(self) -> str:
        """As Value.memory, of the whole storage."""
        return self.tag.memory if self.kind == "state" else self.root.value.memory

    @property
    def free(self) -> bool:
        return self.kind == "arena"


def injective(shape: Shape, strides: Shape) -> bool:
    """True if no two elements of the window are known to share a place."""
    axes = [i for i, d in enumerate(shape) if d != 1]
    if any(isinstance(shape[i], Dim) or isinstance(strides[i], Dim) for i in axes):
        return memory_order(shape, strides) is not None
    pairs = sorted((abs(int(str(strides[i]))), int(str(shape[i]))) for i in axes)
    reach = 0
    for s, d in pairs:
        if s <= reach:
            return False
        reach += s * (d - 1)
    return True


class Forest:
    """All trees of an entry."""

    def __init__(self, inplace: Callable[[Node], list[tuple[int, int]]], nbytes: Callable[[Value], int]) -> None:
        self.inplace, self.nbytes = inplace, nbytes
        self.trees: list[Tree] = []
        self.cell: dict[Value, Cell] = {}
        self.schedule = Schedule()
        self.length = 0
        self._first = self._last = self._size = np.zeros(0, np.int64)

    # -- building
    def root(self, value: Value, strides: Shape, kind: str = "arena", tag: Any = None) -> Cell:
        """A new tree."""
        tree: Tree = Tree(None, kind, self.nbytes(value), len(self.trees), tag=tag)  # type: ignore[arg-type]
        version = Version()
        cell = Cell(value, (0, strides), tree, version)
        version.cells.append(cell)
        tree.root = cell
        tree.cells.append(cell)
        tree.versions.append(version)
        self.trees.append(tree)
        self.cell[value] = cell
        return cell

    def child(self, value: Value, parent: Cell, edge: Edge) -> Cell | None:
        """A new cell in parent's tree. None: its window is impossible."""
        window = self._follow(edge, parent, parent.window, value)
        if window is None:
            return None
        if edge[0] == "alias":
            version = Version()
            parent.tree.versions.append(version)
        else:
            version = parent.version
        cell = Cell(value, window, parent.tree, version, parent, edge)
        version.cells.append(cell)
        parent.tree.cells.append(cell)
        self.cell[value] = cell
        return cell

    def timed(self, schedule: Schedule) -> None:
        """To be called when births and reads are set: prepares the checks and the estimate of the peak."""
        self.schedule, self.length = schedule, len(schedule.events)
        n = len(self.trees)
        self._first, self._last, self._size = (np.zeros(n, np.int64) for _ in range(3))
        for tree in self.trees:
            for v in tree.versions:
                self._interval(v)
            self._measure(tree)

    def refresh(self, *cells: Cell) -> None:
        """To be called when births or reads of cells have changed outside of a merge."""
        for c in cells:
            self._interval(c.version)
        for c in cells:
            self._measure(c.tree)

    # -- times
    def death(self, version: Version, read: int) -> int:
        """The time until which a content born when it was must stay, for a read at `read`."""
        for loop in self.schedule.loops:
            inside = 2 * loop.first - 1 <= version.birth <= 2 * loop.last
            if 2 * loop.first <= read <= 2 * loop.last and not inside:
                read = 2 * loop.last
        return read

    def _interval(self, v: Version) -> None:
        v.birth = min((t for c in v.cells for t in c.births), default=-1)
        v.death = max((self.death(v, t) for c in v.cells for t in c.reads), default=-1)

    def hull(self, tree: Tree) -> tuple[int, int]:
        """First and last doubled time at which the storage is in use."""
        first = min((v.birth for v in tree.versions), default=0)
        births = max((t for c in tree.cells for t in c.births), default=0)
        last = max(max((v.death for v in tree.versions), default=0), births)
        return max(0, first), max(0, last)

    def _measure(self, tree: Tree) -> None:
        first, last = self.hull(tree)
        self._first[tree.index] = min(-(-first // 2), self.length)
        self._last[tree.index] = min(last // 2, self.length)
        self._size[tree.index] = tree.size if tree.kind in ("arena", "input", "output") else 0

    def peak(self) -> int:
        """Largest sum of live bytes."""
        line = np.zeros(self.length + 2, np.int64)
        np.add.at(line, self._first, self._size)
        np.subtract.at(line, self._last + 1, self._size)
        return int(np.cumsum(line).max(initial=0))

    def peak_if(self, pairs: list[tuple[Tree, Tree]]) -> int:
        """What the peak would be with the first tree of each pair inside the second."""
        saved = self._first.copy(), self._last.copy(), self._size.copy()
        for a, b in pairs:
            if a is not b and a.free:
                i, k = a.index, b.index
                self._first[k] = min(self._first[k], self._first[i])
                self._last[k] = max(self._last[k], self._last[i])
                self._size[i] = 0
        most = self.peak()
        self._first, self._last, self._size = saved
        return most

    # -- merging
    @staticmethod
    def _follow(edge: Edge, parent: Cell, window: Window, value: Value) -> Window | None:
        kind = edge[0]
        if kind == "view":
            return apply(edge[1], window)
        if kind == "unview":
            return invert(edge[1], window)
        if kind == "window":
            return window[0] + window[1][edge[1]] * edge[2], window[1]
        return window

    def merge(self, cell: Cell, onto: Cell, edge: Edge, *, grow: bool = True, loose: bool = False) -> bool:
        """Puts the tree of `cell` into the tree of `onto`, cell following from onto by edge (same, alias or window).

        Args:
            cell: becomes a child of onto; its tree must be free.
            onto: stays where it is.
            edge: same: equal contents, one of them a copy that goes; alias: cell overwrites onto.
            grow: accept a higher peak.
            loose: accept that a kernel sees another memory order.

        Returns:
            False: impossible or unwanted; nothing has changed.
        """
        if cell.tree is onto.tree:
            return edge == SAME and self._join(cell, onto)
        tree, into = cell.tree, onto.tree
        if not tree.free or into.kind in ("input", "const") or tree.owner != into.owner:
            return False
        path = self._reversed_path(cell)
        if path is None:
            return False
        windows = self._windows(cell, onto, edge, path)
        if windows is None:
            return False
        for c in tree.cells:
            if c.fixed and not same_strides(c.value.shape, c.window[1], windows[c][1]):
                return False
            if not loose and c.strict and unit_axis(c.value.shape, c.window[1]) not in (
                -1, unit_axis(c.value.shape, windows[c][1])):  # fmt: skip
                return False
        before = 0 if grow else self.peak()
        undo = self._link(cell, onto, edge, path, windows)
        changed = [v for v in into.versions if v is onto.version or v in undo.moved]
        if self._sound(into, changed) and (grow or self.peak() <= before):
            return True
        self._unlink(undo)
        return False

    def _join(self, cell: Cell, onto: Cell) -> bool:
        """Same tree: two cells in one place get one content."""
        if cell.version is onto.version:
            return self.at_same_place(cell, onto)
        if not self.at_same_place(cell, onto):
            return False
        tree, gone, kept = cell.tree, cell.version, onto.version
        n = len(kept.cells)
        for c in gone.cells:
            c.version = kept
        kept.cells += gone.cells
        tree.versions.remove(gone)
        self._interval(kept)
        if self._sound(tree, [kept]):
            self._measure(tree)
            return True
        kept.cells = kept.cells[:n]
        for c in gone.cells:
            c.version = gone
        tree.versions.append(gone)
        self._interval(kept)
        return False

    @staticmethod
    def at_same_place(a: Cell, b: Cell) -> bool:
        return a.tree is b.tree and a.window[0] == b.window[0] and a.value.shape == b.value.shape and same_strides(
            a.value.shape, a.window[1], b.window[1])  # fmt: skip

    @staticmethod
    def _reversed_path(cell: Cell) -> list[tuple[Cell, Cell, Edge]] | None:
        """(cell, new parent, new edge) from cell's parent up to the root, turned round."""
        out: list[tuple[Cell, Cell, Edge]] = []
        while cell.parent is not None:
            kind = cell.edge[0]
            if kind == "window":
                return None
            turned = {"view": "unview", "unview": "view"}.get(kind, kind)
            out.append((cell.parent, cell, (turned, *cell.edge[1:])))
            cell = cell.parent
        return out

    def _windows(self, cell: Cell, onto: Cell, edge: Edge, path: list[tuple[Cell, Cell, Edge]]
                 ) -> dict[Cell, Window] | None:  # fmt: skip
        up = {c: (p, e) for c, p, e in path}
        up[cell] = (onto, edge)
        children: dict[Cell, list[Cell]] = {}
        for c in cell.tree.cells:
            p = up[c][0] if c in up else c.parent
            assert p is not None
            children.setdefault(p, []).append(c)
        windows: dict[Cell, Window] = {onto: onto.window}
        stack = [onto]
        while stack:
            p = stack.pop()
            for c in children.get(p, ()):
                e = up[c][1] if c in up else c.edge
                w = self._follow(e, p, windows[p], c.value)
                if w is None:
                    return None
                windows[c] = w
                stack.append(c)
        return windows

    @dataclass(slots=True)
    class _Undo:
        tree: Tree
        into: Tree
        links: list[tuple[Cell, Cell | None, Edge]]
        windows: list[tuple[Cell, Window]]
        moved: list[Version]
        joined: tuple[Version, Version, int] | None

    def _link(self, cell: Cell, onto: Cell, edge: Edge, path: list[tuple[Cell, Cell, Edge]],
              windows: dict[Cell, Window]) -> _Undo:  # fmt: skip
        tree, into = cell.tree, onto.tree
        undo = self._Undo(tree, into, [(c, c.parent, c.edge) for c, _, _ in path] + [(cell, cell.parent, cell.edge)],
                          [(c, c.window) for c in tree.cells], list(tree.versions), None)  # fmt: skip
        for c, p, e in path:
            c.parent, c.edge = p, e
        cell.parent, cell.edge = onto, edge
        for c in tree.cells:
            c.window, c.tree = windows[c], into
        into.cells += tree.cells
        into.versions += tree.versions
        if edge[0] != "alias":
            gone, kept = cell.version, onto.version
            undo.joined = (gone, kept, len(kept.cells))
            for c in gone.cells:
                c.version = kept
            kept.cells += gone.cells
            into.versions.remove(gone)
            undo.moved.remove(gone)
            self._interval(kept)
        self._size[tree.index] = 0
        self._measure(into)
        return undo

    def _unlink(self, undo: _Undo) -> None:
        tree, into = undo.tree, undo.into
        n = len(into.cells) - len(tree.cells)
        into.cells = into.cells[:n]
        if undo.joined is not None:
            gone, kept, k = undo.joined
            kept.cells = kept.cells[:k]
            for c in gone.cells:
                c.version = gone
            self._interval(kept)
        drop = set(map(id, tree.versions))
        into.versions = [v for v in into.versions if id(v) not in drop]
        for c, p, e in undo.links:
            c.parent, c.edge = p, e
        for c, w in undo.windows:
            c.window, c.tree = w, tree
        self._measure(tree)
        self._measure(into)

    # -- proof
    def _sound(self, tree: Tree, changed: list[Version]) -> bool:
        fresh = set(map(id, changed))
        for b in changed:
            for a in tree.versions:
                if a is b or (id(a) in fresh and id(a) < id(b)):
                    continue
                if self._clobbers(b, a) or self._clobbers(a, b):
                    return False
        return True

    def _clobbers(self, writer: Version, victim: Version) -> bool:
        """True if a write of one content destroys the other while it is still read."""
        for w in writer.cells:
            for t in w.births:
                if t < victim.birth or t > victim.death:
                    continue
                reads = [(c, d) for c in victim.cells for r in c.reads if (d := self.death(victim, r)) >= t]
                if not reads:
                    continue
                born = [u for u in victim.cells if any(x <= t for x in u.births)]
                for c, d in reads:
                    if not self._overlap(w, c) or not any(self._overlap(w, u) for u in born):
                        continue
                    if d > t or not self._in_place(w, c, t):
                        return True
                if any(t in u.births and self._overlap(w, u) for u in born):
                    return True
        return False

    @staticmethod
    def _overlap(a: Cell, b: Cell) -> bool:
        return not disjoint(a.value.shape, a.window, b.value.shape, b.window)

    def _in_place(self, w: Cell, c: Cell, t: int) -> bool:
        """True if the kernel at t may read c and write w over it."""
        if t % 2 or w.value.node is None or t // 2 >= self.length:
            return False
        node = self.schedule.events[t // 2].node
        if w.value.node is not node or not self.at_same_place(w, c):
            return False
        allowed = self.inplace(node)
        spots = [i for i, v in enumerate(node.inputs) if v is c.value]
        return bool(spots) and all((i, w.value.index) in allowed for i in spots)

    def mark_strict(self, nodes: Iterable[Node]) -> None:
        """Marks cells whose memory order matters to a kernel."""
        for n in nodes:
            if n.op in ANY_LAYOUT:
                continue
            few = n.op == "conv" and isinstance(n.outputs[0].shape[1], int) and n.outputs[0].shape[1] <= FEW
            for v in [*n.inputs, *(() if few else n.outputs)]:
                if v is not None:
                    self.cell[v].strict = True
