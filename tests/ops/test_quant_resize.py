"""qresize: bit for bit against plain fractions, and near torch's interpolation."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from heavy import struct
from hypothesis import given, settings
from hypothesis import strategies as st
from quant_plain import LAYOUTS, command, quantise, stored

from trivet import native
from trivet.error import Error
from trivet.fbs.structs import Op


def half_up(v: Fraction) -> int:
    return math.floor(v + Fraction(1, 2))


def taps(n: int, m: int, align_corners: bool) -> list[list[tuple[int, int]]]:
    """For each of m outputs the (cell, weight of 2048) that it reads of n cells."""
    out = []
    for o in range(m):
        if align_corners:
            at = Fraction(o * (n - 1), m - 1) if m > 1 else Fraction(0)
        else:
            at = (o + Fraction(1, 2)) * Fraction(n, m) - Fraction(1, 2)
        at = max(at, Fraction(0))
        i = math.floor(at)
        f = half_up((at - i) * 2048)
        out.append([(min(i, n - 1), 2048 - f), (min(i + 1, n - 1), f)])
    return out


def plain(x: np.ndarray, sizes: list[int], align_corners: bool) -> np.ndarray:
    nd, y = x.ndim - 2, np.empty((*x.shape[:2], *sizes), x.dtype)
    axes = [taps(n, m, align_corners) for n, m in zip(x.shape[2:], sizes)]
    for cell in np.ndindex(*sizes):
        total = np.zeros(x.shape[:2], object)
        for corner in itertools.product(*(axes[k][o] for k, o in enumerate(cell))):
            at, weights = zip(*corner)
            total = total + math.prod(weights) * x[(..., *at)].astype(object)
        for i in np.ndindex(*x.shape[:2]):
            y[(*i, *cell)] = half_up(Fraction(int(total[i]), 2048**nd))
    return y


@settings(max_examples=700, deadline=None, derandomize=True)
@given(st.data())
def test_bit_exact(data: st.DataObject) -> None:
    draw = data.draw
    nd = draw(st.integers(1, 3))
    size = {1: 40, 2: 7, 3: 4}[nd]
    lead = [draw(st.integers(0, 3)), draw(st.integers(0, 3))]
    ins = [draw(st.integers(1, size)) for _ in range(nd)]
    outs = [draw(st.integers(0, size) | st.just(n)) for n in ins]
    align, dtype = draw(st.booleans()), draw(st.sampled_from([np.int8, np.int16]))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    layout, other, tiles = (
        draw(st.sampled_from(LAYOUTS)),
        draw(st.sampled_from(LAYOUTS)),
        draw(st.sampled_from([0, 1, 3])),
    )
    for ends in (0.1, 0.9, 1.0):
        x = stored(rng, [*lead, *ins], dtype, ends)
        want = plain(x, outs, align)
        attrs = struct("QresizeAttrs", nd=nd, align_corners=align)
        (got,) = command(Op.qresize, [x], [want], attrs, layout=layout, other=other, tiles=tiles)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", [np.int8, np.int16])
@pytest.mark.parametrize(("n", "m"), [(3, 1000), (1000, 3), (77, 200), (1, 65), (65, 1), (4096, 4095)])
@pytest.mark.parametrize("align", [False, True])
def test_long_axis(n: int, m: int, align: bool, dtype: type) -> None:
    x = stored(np.random.default_rng(0), [1, 1, n], dtype, 0.5)
    want = plain(x, [m], align)
    (got,) = command(Op.qresize, [x], [want], struct("QresizeAttrs", nd=1, align_corners=align), tiles=2)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize(
    ("shape", "sizes", "mode"),
    [((2, 3, 40), [77], "linear"), ((2, 5, 12, 9), [24, 18], "bilinear"), ((1, 4, 30, 31), [13, 50], "bilinear"),
     ((1, 2, 6, 5, 7), [9, 10, 4], "trilinear")],
)  # fmt: skip
def test_near_float(shape: tuple[int, ...], sizes: list[int], mode: str, align: bool) -> None:
    torch.manual_seed(0)
    x, quant, real = quantise(torch.randn(shape) * 3)
    want = torch.nn.functional.interpolate(real, size=sizes, mode=mode, align_corners=align)
    attrs = struct("QresizeAttrs", nd=len(sizes), align_corners=align)
    (y,) = command(Op.qresize, [x], [np.empty(want.shape, np.int8)], attrs)
    got = (torch.from_numpy(y).double() - quant.zero) * float(quant.scale)
    assert float((got - want).abs().max()) < 0.7 * float(quant.scale)  # half a step, and weights of 11 bits


def test_near_float_16() -> None:
    """16 bits: within a step and the share of a difference of neighbours that weights of 11 bits leave."""
    torch.manual_seed(0)
    x = torch.randint(-32768, 32768, (1, 2, 9, 13), dtype=torch.int16)
    want = torch.nn.functional.interpolate(x.double(), size=[20, 31], mode="bilinear")
    (y,) = command(Op.qresize, [x.numpy()], [np.empty(want.shape, np.int16)], struct("QresizeAttrs", nd=2))
    assert float((torch.from_numpy(y).double() - want).abs().max()) <= 0.5 + 2 * 65535 / 4096


def test_refusals() -> None:
    x, y = np.zeros((1, 2, 3, 4), np.int8), np.zeros((1, 2, 5, 5), np.int8)
    command(Op.qresize, [x], [y], struct("QresizeAttrs", nd=2))
    huge = np.broadcast_to(np.zeros((1, 1, 1), np.int8), (1, 1, 2**26 + 1))
    for a, b, nd in ((x, y, 1), (x, y, 0), (x, y, 4), (x, y[:, :1], 2), (x, y.astype(np.int16), 2), (huge, y[:, :1, 0], 1),
                     (x.astype(np.float32), y.astype(np.float32), 2), (x[:, :, :0], y, 2), (x, y[0], 2),
                     (x, np.broadcast_to(y[:, :, :1], y.shape), 2)):  # fmt: skip
        with pytest.raises(Error):
            native.run_op(Op.qresize, [a], [b], struct("QresizeAttrs", nd=nd))
