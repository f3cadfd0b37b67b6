"""qpool and qreduce against exact integer arithmetic; and the kernels of all dtypes on stored integers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from basic import Case, Op, native, struct, verify
from exact import LIMITS, STORED, TILES, big, bounds, divide, integers, run, shapes, stored, zeros
from heavy import laid_out
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.fbs.structs import PadMode, PoolKind, ReduceKind, ResizeMode


# ---- average pooling -------------------------------------------------------------------------------------------------------
def average(v: Any, count: Any, f: dict[str, int]) -> Any:
    """Of Python integers; a count below 1 counts as 1."""
    count = max(count, 1) if isinstance(count, int) else np.maximum(count, 1)
    return divide(v * f["multiplier"], count * (1 << f["shift"]))


def pooled(
    x: torch.Tensor, size: Sequence[int], a: dict[str, Any], f: dict[str, int], lo: int, hi: int
) -> torch.Tensor:
    """Axis by axis: a window's sum is a sum of sums, its number of cells a product. size: of the output's spatial axes."""
    total = x.numpy().astype(np.int64) - f["x_zero"]
    count = np.ones((), object)
    for k, (n, m) in enumerate(zip(x.shape[2:], size, strict=True)):
        spots, cells = [], []
        for o in range(m):
            if a["adaptive"]:
                spots.append(list(range(o * n // m, -(-(o + 1) * n // m))))
                cells.append(len(spots[-1]))
                continue
            first = o * a["stride"][k] - a["pad"][k]
            taps = [first + i * max(a["dilation"][k], 1) for i in range(a["kernel"][k])]
            spots.append([i for i in taps if 0 <= i < n])
            whole = max(0, min(a["kernel"][k], n + a["pad"][k] - first))
            cells.append(whole if a["count_include_pad"] else len(spots[-1]))
        total = np.stack([total.take(s, 2 + k).sum(2 + k) for s in spots], 2 + k)
        count = count[..., None] * np.array(cells, object)
    count = np.full_like(count, a["divisor"]) if a["divisor"] else count
    return stored(average(total.astype(object), count, f), f["y_zero"], lo, hi, x.dtype)


average_numbers = st.sampled_from(
    [(1 << 22, 22), ((1 << 23) - 1, 40), ((1 << 23) - 1, 0), (0, 7), (1, 0), (3, 1), (6000000, 24)]
) | (st.tuples(st.integers(0, 2**23 - 1), st.integers(18, 28)))


def numbers(draw: Any, dtype: torch.dtype) -> dict[str, int]:
    m, s = draw(average_numbers)
    return {"x_zero": draw(zeros(dtype)), "y_zero": draw(zeros(dtype)), "multiplier": m, "shift": s}


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(st.data())
def test_average_pool(data: st.DataObject) -> None:
    draw = data.draw
    dtype, nd = draw(st.sampled_from(STORED)), draw(st.sampled_from([1, 2, 2, 3]))
    lo, hi = bounds(draw, dtype)
    space = [draw(st.sampled_from([1, 4, 5, 7, 70 if nd == 1 else 6])) for _ in range(nd)]
    x = integers(
        (draw(st.sampled_from([0, 1, 2])), draw(st.sampled_from([1, 3, 16, 70])), *space),
        dtype,
        draw(st.integers(0, 99)),
    )
    a: dict[str, Any] = {"nd": nd, "adaptive": int(draw(st.integers(0, 3)) == 0), "count_include_pad": int(draw(st.booleans())),
                         "divisor": draw(st.sampled_from([0, 0, 0, 1, 3, 2**31 - 1]))}  # fmt: skip
    if a["adaptive"]:
        size = [draw(st.integers(1, 5)) for _ in range(nd)]
    else:
        a["kernel"] = [draw(st.integers(1, 4)) for _ in range(nd)]
        a["stride"] = [draw(st.integers(1, 3)) for _ in range(nd)]
        a["pad"] = [draw(st.integers(0, 3)) for _ in range(nd)]
        a["dilation"] = [draw(st.sampled_from([0, 1, 1, 2])) for _ in range(nd)]
        size = []
        for k in range(nd):
            reach = (a["kernel"][k] - 1) * max(a["dilation"][k], 1) + 1
            size.append(
                max(1, (space[k] + 2 * a["pad"][k] - reach) // a["stride"][k] + 1 + draw(st.integers(0, 1)))
            )  # ceil mode
    f = numbers(draw, dtype)
    want = pooled(x, size, a, f, lo, hi)
    run(Op.qpool, [x], struct("QpoolAttrs", lo=lo, hi=hi, **a, **f), want, draw)


@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_average_pool_layouts(dtype: torch.dtype) -> None:
    lo, hi = LIMITS[dtype]
    f = {"x_zero": 11, "y_zero": -7, "multiplier": 5123456, "shift": 22}
    x = integers((2, 70, 9, 8), dtype)
    window = {
        "nd": 2,
        "adaptive": 0,
        "divisor": 0,
        "kernel": [3, 3],
        "stride": [2, 1],
        "pad": [1, 1],
        "dilation": [1, 1],
    }
    for include in (0, 1):
        a = {**window, "count_include_pad": include}
        verify(
            Case(
                Op.qpool,
                struct("QpoolAttrs", lo=lo, hi=hi, **a, **f),
                [x],
                [pooled(x, (5, 8), a, f, lo, hi)],
                tiles=TILES,
            )
        )
    a = {"nd": 2, "adaptive": 1, "divisor": 0, "count_include_pad": 1}
    for size in ((1, 1), (4, 3), (9, 8), (11, 1)):
        verify(
            Case(
                Op.qpool,
                struct("QpoolAttrs", lo=lo, hi=hi, **a, **f),
                [x],
                [pooled(x, size, a, f, lo, hi)],
                tiles=TILES,
            )
        )


# ---- mean and sum ----------------------------------------------------------------------------------------------------------
def reduced(
    x: torch.Tensor, kind: ReduceKind, axes: Sequence[int], f: dict[str, int], lo: int, hi: int
) -> torch.Tensor:
    total = np.sum(x.numpy().astype(np.int64) - f["x_zero"], axis=tuple(axes), keepdims=True)
    count = math.prod(x.shape[i] for i in axes) if kind == ReduceKind.mean else 1
    return stored(average(total.astype(object), count, f), f["y_zero"], lo, hi, x.dtype)


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(st.data())
def test_reduce(data: st.DataObject) -> None:
    draw = data.draw
    dtype, kind = draw(st.sampled_from(STORED)), draw(st.sampled_from([ReduceKind.mean, ReduceKind.sum]))
    lo, hi = bounds(draw, dtype)
    shape = draw(shapes | st.sampled_from([[300, 3], [3, 700], [129, 70], [256, 2, 2], [2, 5, 70, 3]]))
    axes = [i for i in range(len(shape)) if draw(st.booleans())]
    x = integers(shape, dtype, draw(st.integers(0, 99)), draw(st.sampled_from([1, 1, 0.02])))
    f = numbers(draw, dtype)
    attrs = struct("QreduceAttrs", kind=kind, axes=sum(1 << i for i in axes), lo=lo, hi=hi, **f)
    run(Op.qreduce, [x], attrs, reduced(x, kind, axes, f, lo, hi), draw)


@pytest.mark.parametrize("dtype", STORED, ids=str)
@pytest.mark.parametrize("kind", [ReduceKind.mean, ReduceKind.sum])
def test_reduce_layouts(kind: ReduceKind, dtype: torch.dtype) -> None:
    lo, hi = LIMITS[dtype]
    f = {"x_zero": -5, "y_zero": 4, "multiplier": 5000000, "shift": 22 if kind == ReduceKind.mean else 30}
    for shape, sets in (((2, 70, 7, 7), ((2, 3), (1,), (0, 2, 3), (0, 1, 2, 3), ())), ((3, 0, 5), ((1,), (0,), (2,))),
                        ((), ((),)), ((40000,), ((0,),)), ((1, 1), ((0,), (0, 1)))):  # fmt: skip
        x = integers(shape, dtype)
        for axes in sets:
            attrs = struct("QreduceAttrs", kind=kind, axes=sum(1 << i for i in axes), lo=lo, hi=hi, **f)
            verify(Case(Op.qreduce, attrs, [x], [reduced(x, kind, axes, f, lo, hi)], tiles=TILES))


@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_long_sums(dtype: torch.dtype) -> None:
    """All elements at the far end: sums of 2^22 elements, along the row and across rows; more elements than 32 bits sum."""
    lo, hi = LIMITS[dtype]
    for end, zero in ((lo, hi), (hi, lo)):
        x = torch.full((1, 1), end, dtype=dtype).expand(1 << 22, 2)
        for axes in ((0,), (0, 1)):
            f = {"x_zero": zero, "y_zero": 0, "multiplier": (1 << 23) - 1, "shift": 24 if dtype == torch.int8 else 25}
            v = average((end - zero) * (1 << 22) * (2 if 1 in axes else 1), (1 << 22) * (2 if 1 in axes else 1), f)
            out = torch.zeros(1, 1 if 1 in axes else 2, dtype=dtype)
            attrs = struct("QreduceAttrs", kind=ReduceKind.mean, axes=sum(1 << i for i in axes), lo=lo, hi=hi, **f)
            native.run_op(Op.qreduce, [x], [out], attrs)
            assert out.flatten().tolist() == [min(max(v, lo), hi)] * out.numel()
            attrs = struct(
                "QreduceAttrs", kind=ReduceKind.sum, axes=sum(1 << i for i in axes), lo=lo, hi=hi, **f | {"shift": 0}
            )
            native.run_op(Op.qreduce, [x], [out], attrs)
            assert out.flatten().tolist() == [hi if end > zero else lo] * out.numel()


@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_long_columns(dtype: torch.dtype) -> None:
    """Sums across rows go through the narrowest integers that hold some of them."""
    lo, hi = LIMITS[dtype]
    for end, zero in ((lo, hi), (hi, lo)):
        for n in (127, 128, 129, 257, 16384, 40000):
            x = torch.full((n, 3), end, dtype=dtype)
            f = {"x_zero": zero, "y_zero": 0, "multiplier": (1 << 23) - 1, "shift": 24}
            attrs = struct("QreduceAttrs", kind=ReduceKind.mean, axes=1, lo=lo, hi=hi, **f)
            verify(Case(Op.qreduce, attrs, [x], [reduced(x, ReduceKind.mean, [0], f, lo, hi)], layouts=("dense",)))


def test_ties() -> None:
    """Halves go up, also below zero, for every divisor up to 70."""
    for n in range(1, 71):
        sums = torch.arange(-150, 150).clamp(-127 * n, 127 * n).reshape(300, 1)
        x = (sums.div(n, rounding_mode="floor") + (torch.arange(n) < sums % n)).to(torch.int8)
        total = big(x.long().sum(1, keepdim=True))
        for m, s in ((1, 0), (1, 1), (3, 2), (1 << 22, 22), (4194305, 22), (8388607, 25)):
            f = {"x_zero": 0, "y_zero": 0, "multiplier": m, "shift": s}
            want = stored(average(total, n, f), 0, -128, 127, torch.int8)
            for y in (x, x.t().contiguous().t()):
                out = torch.zeros(300, 1, dtype=torch.int8)
                attrs = struct("QreduceAttrs", kind=ReduceKind.mean, axes=2, lo=-128, hi=127, **f)
                native.run_op(Op.qreduce, [y], [out], attrs)
                assert torch.equal(out, want)


# ---- kernels that move stored integers -------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_moves(dtype: torch.dtype) -> None:
    """What the integer graph leaves to the kernels of all dtypes, with values of the whole range."""
    F = torch.nn.functional
    x = integers((2, 70, 9, 8), dtype)
    low = torch.full_like(x, LIMITS[dtype][0])
    pool = struct("PoolAttrs", kind=PoolKind.max, nd=2, kernel=[3, 2], stride=[2, 2], pad=[1, 1], dilation=[1, 1])
    for v in (x, low, (x // 2 - x.abs() // 2 - 1).to(dtype)):  # any, the lowest, negative: padding never wins
        want, index = F.max_pool2d(v.double(), (3, 2), 2, (1, 1), return_indices=True)
        verify(Case(Op.pool, pool, [v], [want.to(dtype)]))
        if v is x:
            verify(Case(Op.pool, pool, [v], [want.to(dtype), index]))
    adaptive = struct("PoolAttrs", kind=PoolKind.max, nd=2, adaptive=1)
    verify(Case(Op.pool, adaptive, [low], [low[:, :, :2, :3]]))
    for value in LIMITS[dtype]:
        attrs = struct("PadAttrs", mode=PadMode.constant, lo=[0, 0, 1, 2], value=value)
        verify(Case(Op.pad, attrs, [x], [F.pad(x, (2, 1, 1, 0), value=value)]))
    for kind, name in ((ReduceKind.max, "amax"), (ReduceKind.min, "amin")):
        for axes in ((2, 3), (1,), (0, 1, 2, 3)):
            attrs = struct("ReduceAttrs", kind=kind, axes=sum(1 << i for i in axes))
            verify(Case(Op.reduce, attrs, [x], [getattr(torch, name)(x, dim=axes, keepdim=True)]))
            verify(Case(Op.reduce, attrs, [low], [getattr(torch, name)(low, dim=axes, keepdim=True)]))
    attrs = struct("ReduceAttrs", kind=ReduceKind.argmax, axes=2)
    flat = torch.stack([torch.randperm(256, generator=torch.Generator().manual_seed(i)) - 128 for i in range(70)], 1)[
        None
    ].to(dtype)
    verify(Case(Op.reduce, attrs, [flat], [flat.argmax(1, keepdim=True)]))
    for mode, how in ((ResizeMode.nearest, "nearest"), (ResizeMode.nearest_exact, "nearest-exact")):
        want = F.interpolate(x.double(), (13, 5), mode=how).to(dtype)
        verify(Case(Op.resize, struct("ResizeAttrs", mode=mode, nd=2), [x], [want]))
    out = laid_out((2, 140, 9, 8), dtype, "last")
    native.run_op(Op.copy, [x], [out[:, 70:]], struct("CopyAttrs"))
    assert torch.equal(out[:, 70:], x)
