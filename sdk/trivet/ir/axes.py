"""Axes of reshaped tensors: which parts of the axes before a reshape make up the axes after it."""

from __future__ import annotations

from trivet.ir.dim import Dim, Shape, floor_div

Parts = list[list[int | Dim]]  # per axis the sizes it is the product of, outermost first; axes of size 1 have none


def _divides(a: int | Dim, b: int | Dim) -> int | Dim | None:
    """b / a when that comes out whole for all sizes."""
    if b == 0 or a == 0:
        return None
    q = floor_div(b, a)
    return q if q * a == b else None


def refine(s: Shape, t: Shape) -> tuple[Parts, Parts] | None:
    """Axes of s and t, two shapes of the same elements in row-major order, as products of common parts. None when the axes
    do not cut each other cleanly.
    """
    left: Parts = [[] for _ in s]
    right: Parts = [[] for _ in t]
    i = j = 0
    p: int | Dim = 1
    q: int | Dim = 1
    a = b = -1
    while True:
        while p == 1 and i < len(s):
            p, a, i = s[i], i, i + 1
        while q == 1 and j < len(t):
            q, b, j = t[j], j, j + 1
        if p == 1 and q == 1:
            return left, right
        if p == 1 or q == 1:
            return None
        if (rest := _divides(q, p)) is not None:
            part, p, q = q, rest, 1
        elif (rest := _divides(p, q)) is not None:
            part, q, p = p, rest, 1
        else:
            return None
        left[a].append(part)
        right[b].append(part)


def through_permute(x: Shape, a: Shape, axes: tuple[int, ...], y: Shape) -> tuple[Shape, tuple[int, ...], bool] | None:
    """For x reshaped to a, permuted by axes, reshaped to y: (shape, order, merges), a split of x's axes and an order of them
    after which only merging (and axes of size 1) lead to y. merges: the first reshape joined axes of x.
    """
    b = tuple(a[i] for i in axes)
    first, last = refine(x, a), refine(b, y)
    if first is None or last is None:
        return None
    merges = any(len(parts) > 1 for parts in first[1])
    atoms: Parts = []
    for i in range(len(a)):
        fine = refine(tuple(first[1][i]), tuple(last[0][axes.index(i)]))
        if fine is None:
            return None
        atoms.append([part for parts in fine[0] for part in parts])
    start, n = [], 0
    for parts in atoms:
        start.append(n)
        n += len(parts)
    order = tuple(start[i] + k for i in axes for k in range(len(atoms[i])))
    return tuple(part for parts in atoms for part in parts), order, merges
