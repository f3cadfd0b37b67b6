"""Stride algebra: what a view does to a strided window, with sizes and strides that may be symbolic."""

from __future__ import annotations

from collections.abc import Sequence

from trivet.ir.dim import Dim, Shape, floor_div
from trivet.ir.graph import Node

Window = tuple[int | Dim, Shape]  # offset, strides: in elements


def dense(shape: Shape, order: Sequence[int] | None = None) -> Shape:
    """Strides of a dense tensor whose axes lie in memory in this order, outermost first (None: row-major). An axis of size
    0 counts as 1, so no stride is 0.
    """
    out: list[int | Dim] = [1] * len(shape)
    step: int | Dim = 1
    for axis in reversed(order if order is not None else range(len(shape))):
        out[axis] = step
        step = step * (shape[axis] if shape[axis] != 0 else 1)
    return tuple(out)


def count(shape: Shape) -> int | Dim:
    """Number of elements."""
    n: int | Dim = 1
    for d in shape:
        n = n * d
    return n


def same_strides(shape: Shape, a: Shape, b: Shape) -> bool:
    """True if the windows address the same elements: strides agree along axes longer than 1."""
    return all(d == 1 or x == y for d, x, y in zip(shape, a, b, strict=True))


def is_dense(shape: Shape, strides: Shape) -> bool:
    """True for row-major without gaps."""
    return count(shape) == 0 or same_strides(shape, strides, dense(shape))


def memory_order(shape: Shape, strides: Shape) -> tuple[int, ...] | None:
    """The order in which the axes lie in memory if the window has no gaps and no overlap, else None."""
    left = [i for i, d in enumerate(shape) if d != 1]
    order: list[int] = []
    step: int | Dim = 1
    while left:
        axis = next((i for i in reversed(left) if strides[i] == step), None)
        if axis is None:
            return None
        left.remove(axis)
        order.insert(0, axis)
        step = step * shape[axis]
    ones = [i for i, d in enumerate(shape) if d == 1]
    return tuple(ones + order)


def unit_axis(shape: Shape, strides: Shape) -> int:
    """The axis along which neighbours lie side by side (stride 1), -1 if there is none; axes of size 1 do not count."""
    return next((i for i in reversed(range(len(shape))) if shape[i] != 1 and strides[i] in (1, -1)), -1)


def _divides(a: int | Dim, b: int | Dim) -> bool:
    """True if b is known to be a multiple of a."""
    if isinstance(a, int):
        if a == 0:
            return b == 0
        terms = b.terms.values() if isinstance(b, Dim) else (b,)
        return all(c % a == 0 for c in terms)
    return isinstance(b, Dim) and floor_div(b, a) * a == b


def reshape_strides(shape: Shape, strides: Shape, new: Shape) -> Shape | None:
    """Strides of the window seen with another shape (row-major meaning), None if no strides do."""
    if count(new) == 0 or count(shape) == 0 or is_dense(shape, strides):
        return dense(new)
    old = [(d, s) for d, s in zip(shape, strides, strict=True) if d != 1]
    out: list[int | Dim] = [1] * len(new)
    wanted = [i for i, d in enumerate(new) if d != 1]
    i = j = 0
    while i < len(old) and j < len(wanted):
        i0, j0 = i, j
        p, q = old[i][0], new[wanted[j]]
        while p != q:
            grow_old = _divides(p, q) if not (isinstance(p, int) and isinstance(q, int)) else p < q
            if not grow_old and not (isinstance(p, int) and isinstance(q, int)) and not _divides(q, p):
                return None
            if grow_old:
                i += 1
                if i == len(old):
                    return None
                p = p * old[i][0]
            else:
                j += 1
                if j == len(wanted):
                    return None
                q = q * new[wanted[j]]
        for k in range(i0, i):  # the group must be one run
            if old[k][1] != old[k + 1][1] * old[k + 1][0]:
                return None
        step = old[i][1]
        for k in reversed(range(j0, j + 1)):
            out[wanted[k]] = step
            step = step * new[wanted[k]]
        i += 1
        j += 1
    if i < len(old) or j < len(wanted):
        return None
    return tuple(out)


def apply(node: Node, window: Window) -> Window | None:
    """The window of a view's output, given that of its input. None: it cannot be a window."""
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    offset, strides = window
    a = node.attrs
    if node.op == "permute":
        return offset, tuple(strides[i] for i in a.axes)
    if node.op == "reshape":
        new = reshape_strides(x.shape, strides, y.shape)
        return None if new is None else (offset, new)
    if node.op == "expand":
        lead = len(y.shape) - len(x.shape)
        return offset, tuple(
            0 if i < lead or x.shape[i - lead] != d else strides[i - lead] for i, d in enumerate(y.shape)
        )
    if node.op == "slice":
        moved = tuple(s * a.step if i == a.axis else s for i, s in enumerate(strides))
        return offset + strides[a.axis] * a.start, moved
    if node.op == "window":
        moved = tuple(s * a.step if i == a.axis else s for i, s in enumerate(strides))
        return offset, (*moved, strides[a.axis])
    if node.op == "diagonal":
        lo, hi = (a.a, a.b)
        start = strides[hi] * a.offset if a.offset >= 0 else strides[lo] * -a.offset
        rest = tuple(s for i, s in enumerate(strides) if i not in (lo, hi))
        return offset + start, (*rest, strides[lo] + strides[hi])
    if node.op == "bitcast":
        return window
    raise AssertionError(f"{node.op} is no view")


def invert(node: Node, window: Window) -> Window | None:
    """The window that a view's input must have for the output to have this one. None: impossible, or the view drops or
    repeats elements.
    """
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    offset, strides = window
    if node.op == "permute":
        back: list[int | Dim] = [1] * len(strides)
        for i, axis in enumerate(node.attrs.axes):
            back[axis] = strides[i]
        return offset, tuple(back)
    if node.op == "reshape":
        new = reshape_strides(y.shape, strides, x.shape)
        return None if new is None else (offset, new)
    if node.op == "bitcast":
        return window
    if node.op == "expand" and count(x.shape) == count(y.shape):
        lead = len(y.shape) - len(x.shape)
        return offset, strides[lead:]
    return None


def _split(shape: Shape, window: Window, step: int) -> tuple[int, int] | None:
    """Range of positions modulo step that the window touches, None when it wraps or is not known."""
    offset, strides = window
    if isinstance(offset, Dim):
        fixed = offset.terms.get((), 0)
        if not _divides(step, offset - fixed):
            return None
        offset = fixed
    extent = 0
    for d, s in zip(shape, strides, strict=True):
        if d == 1 or _divides(step, s):
            continue
        if isinstance(d, Dim) or isinstance(s, Dim) or s < 0:
            return None
        extent += (d - 1) * s
    lo = offset % step
    return (lo, lo + extent + 1) if lo + extent < step else None


def span(shape: Shape, window: Window) -> tuple[int | Dim, int | Dim] | None:
    """First and one past the last element the window touches; None for an empty one. Strides must have known signs."""
    offset, strides = window
    lo: int | Dim = offset
    hi: int | Dim = offset
    for d, s in zip(shape, strides, strict=True):
        if d == 0:
            return None
        if isinstance(s, int) and s < 0:
            lo = lo + (d - 1) * s
        else:
            hi = hi + (d - 1) * s
    return lo, hi + 1


def disjoint(shape_a: Shape, a: Window, shape_b: Shape, b: Window) -> bool:
    """True if two windows of one storage are known to touch no common element."""
    sa, sb = span(shape_a, a), span(shape_b, b)
    if sa is None or sb is None:
        return True
    for first, second in ((sa, sb), (sb, sa)):
        gap = second[0] - first[1]
        if isinstance(gap, int):
            if gap >= 0:
                return True
        elif all(c >= 0 for c in gap.terms.values()):  # sizes are not negative
            return True
    steps = {s for s in (*a[1], *b[1]) if isinstance(s, int) and s > 1}
    for step in steps:
        ra, rb = _split(shape_a, a, step), _split(shape_b, b, step)
        if ra is not None and rb is not None and (ra[1] <= rb[0] or rb[1] <= ra[0]):
            return True
    return False
