"""qsoftmax and qnorm: bit for bit against plain integers, and near the float operators."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from heavy import struct
from hypothesis import given, settings
from hypothesis import strategies as st
from quant_plain import LAYOUTS, clamp, command, divide, quantise, rescale, sqnr, stored

from trivet import native
from trivet.error import Error
from trivet.fbs.structs import NormKind, Op
from trivet.fixed_point import norm_operands, softmax_table
from trivet.ir.types import per_tensor

I8_BOUNDS = st.tuples(st.integers(-128, 127), st.integers(-128, 127)).map(sorted)
SHAPES = st.lists(st.integers(0, 6), min_size=1, max_size=4) | st.sampled_from(
    [[1], [300], [3, 40], [1, 1, 1], [2, 129, 3]]
)


# ---- softmax ------------------------------------------------------------------------------------------------------------------
def plain_softmax(x: np.ndarray, table: np.ndarray, axis: int, y_zero: int, lo: int, hi: int) -> np.ndarray:
    rows = np.moveaxis(x, axis, -1)
    out = np.empty(rows.shape, np.int8)
    for i in np.ndindex(rows.shape[:-1]):
        row = [int(v) for v in rows[i]]
        most = max(row, default=0)
        e = [int(table[most - v]) for v in row]
        total = max(1, sum(e))
        out[i] = [clamp(y_zero + divide(v * 256, total), lo, hi) for v in e]
    return np.moveaxis(out, -1, axis)


@settings(max_examples=700, deadline=None, derandomize=True)
@given(st.data())
def test_softmax_bit_exact(data: st.DataObject) -> None:
    draw = data.draw
    shape = draw(SHAPES)
    axis = draw(st.integers(0, len(shape) - 1))
    seed, ends = draw(st.integers(0, 10**6)), draw(st.sampled_from([0.0, 0.1, 0.9]))
    y_zero, (lo, hi) = draw(st.sampled_from([-128, 127, 0, 3])), draw(st.just([-128, 127]) | I8_BOUNDS)
    least, most = draw(st.sampled_from([0, -(2**31)])), draw(st.sampled_from([1, 2**10, 2**31]))
    layout, other, tiles = (
        draw(st.sampled_from(LAYOUTS)),
        draw(st.sampled_from(LAYOUTS)),
        draw(st.sampled_from([0, 1, 3])),
    )
    scale = draw(st.floats(1e-9, 30))
    attrs = struct("QsoftmaxAttrs", axis=axis, y_zero=y_zero, lo=lo, hi=hi)
    rng = np.random.default_rng(seed)
    for table in (
        softmax_table(scale),
        softmax_table(10.0 ** rng.uniform(-4, 0)),
        rng.integers(least, most, 256).astype(np.int32),
    ):
        x = stored(rng, shape, ends=ends)
        want = plain_softmax(x, table, axis, y_zero, lo, hi)
        (got,) = command(Op.qsoftmax, [x, table], [want], attrs, layout=layout, other=other, tiles=tiles)
        np.testing.assert_array_equal(got, want)
        native.run_op(Op.qsoftmax, [x, table], [x], attrs, isa="ref")  # in place
        np.testing.assert_array_equal(x, want)


@pytest.mark.parametrize(("shape", "spread"), [((64, 10), 3.0), ((8, 4, 33), 6.0), ((200, 2), 1.0)])
def test_softmax_near_float(shape: tuple[int, ...], spread: float) -> None:
    torch.manual_seed(0)
    x, quant, real = quantise(torch.randn(shape) * spread)
    attrs = struct("QsoftmaxAttrs", axis=len(shape) - 1, y_zero=-128, lo=-128, hi=127)
    (y,) = command(Op.qsoftmax, [x, softmax_table(float(quant.scale))], [x], attrs)
    want = real.softmax(-1)
    got = (torch.from_numpy(y).double() + 128) / 256
    assert sqnr(want, got) > 35
    assert (
        float((got - want).abs().max()) <= 1 / 256 + 1e-6
    )  # half a step; a whole one for a 1, which is stored as 255 / 256


def test_softmax_refusals() -> None:
    x, table = np.zeros((2, 3), np.int8), np.zeros(256, np.int32)
    good = {"axis": 1, "y_zero": -128, "lo": -128, "hi": 127}
    command(Op.qsoftmax, [x, table], [x], struct("QsoftmaxAttrs", **good))
    for bad in ({"axis": 2}, {"axis": 255}, {"y_zero": 128}, {"lo": -129}, {"lo": 1, "hi": 0}, {"hi": 2**31 - 1}):
        with pytest.raises(Error, match="qsoftmax"):
            command(Op.qsoftmax, [x, table], [x], struct("QsoftmaxAttrs", **{**good, **bad}))
    for inputs, y in (([x, table[:255]], x), ([x, table[::2]], x), ([x, table.astype(np.int64)], x), ([x, table], x[:1]),
                      ([x.astype(np.int16), table], x), ([x, table], x.astype(np.int16))):  # fmt: skip
        with pytest.raises(Error, match="qsoftmax"):
            native.run_op(Op.qsoftmax, inputs, [y], struct("QsoftmaxAttrs", **good))


# ---- norm ---------------------------------------------------------------------------------------------------------------------
def plain_norm(x: np.ndarray, weight: Any, bias: Any, a: dict[str, int]) -> np.ndarray:
    axes, out = a["axes"], np.empty(x.shape, np.int8)
    n = math.prod(x.shape[x.ndim - axes :])
    w = None if weight is None else [int(v) for v in weight.reshape(-1)]
    b = None if bias is None else [int(v) for v in bias.reshape(-1)]
    for i in np.ndindex(x.shape[: x.ndim - axes]):
        row = [int(v) for v in x[i].reshape(-1)]
        if a["kind"] == NormKind.layer:
            total = sum(row)
            d = [n * v - total for v in row]
            var = n * sum(v * v for v in row) - total**2
        else:
            d = [n * (v - a["x_zero"]) for v in row]
            var = n * sum((v - a["x_zero"]) ** 2 for v in row)
        var = max(1, var + ((n * n * a["eps"]) >> 16))
        j = max(k for k in range(64) if var * 4**k < 2**62)
        r = math.isqrt(var * 4**j)
        y = []
        for k, v in enumerate(d):
            t = divide(v * 2 ** (j + 12), r)
            assert abs(t) < 2**20
            t = t * (w[k] if w else 1) + (b[k] if b else 0)
            y.append(clamp(a["y_zero"] + rescale(t, a["multiplier"], a["shift"]), a["lo"], a["hi"]))
        out[i] = np.array(y, np.int8).reshape(x[i].shape)
    return out


@settings(max_examples=700, deadline=None, derandomize=True)
@given(st.data())
def test_norm_bit_exact(data: st.DataObject) -> None:
    draw = data.draw
    shape = draw(SHAPES)
    axes = draw(st.integers(1, len(shape)))
    tail = tuple(shape[len(shape) - axes :])
    seed, ends = draw(st.integers(0, 10**6)), draw(st.sampled_from([0.0, 0.1, 0.9]))
    most, much = draw(st.sampled_from([1, 100, 2**15])), draw(st.sampled_from([1, 2**20, 2**31 - 1]))
    scaled, shifted, flat = draw(st.booleans()), draw(st.booleans()), draw(st.integers(0, 5)) == 0
    lo, hi = draw(st.just([-128, 127]) | I8_BOUNDS)
    layout, other, tiles = (
        draw(st.sampled_from(LAYOUTS)),
        draw(st.sampled_from(LAYOUTS)),
        draw(st.sampled_from([0, 1, 3])),
    )
    rng = np.random.default_rng(seed)
    for _ in range(3):
        x = stored(rng, shape, ends=ends)
        if flat and x.size:
            x[...] = x.reshape(-1)[0]  # no variance
        weight = rng.integers(-most, most + 1, tail).astype(np.int32) if scaled else None
        bias = rng.integers(-much, much + 1, tail).astype(np.int32) if shifted else None
        a = {"kind": rng.choice([NormKind.layer, NormKind.rms]), "axes": axes, "x_zero": int(rng.choice([-128, 127, 0, 5])),
             "y_zero": int(rng.choice([-128, 127, 0, -7])), "lo": lo, "hi": hi,
             "multiplier": int(rng.choice([0, 1, 2**22, 2**23 - 1, 5_000_003])), "shift": int(rng.integers(0, 63)),
             "eps": int(rng.choice([0, 1, 70_000, 2**32 - 1]))}  # fmt: skip
        want = plain_norm(x, weight, bias, a)
        attrs = struct("QnormAttrs", **a)
        (got,) = command(Op.qnorm, [x, weight, bias], [want], attrs, layout=layout, other=other, tiles=tiles)
        np.testing.assert_array_equal(got, want)
        native.run_op(Op.qnorm, [x, weight, bias], [x], attrs, isa="ref")  # in place
        np.testing.assert_array_equal(x, want)


@pytest.mark.parametrize("kind", [NormKind.layer, NormKind.rms])
@pytest.mark.parametrize("row", ["ends", "one", "low", "zero"])
def test_norm_longest_row(kind: NormKind, row: str) -> None:
    """The largest numbers that the kernel meets."""
    x = np.full((1, 32768), -128, np.int8)
    if row == "ends":
        x[0, ::2] = 127
    elif row == "one":
        x[0, 77] = 127
    elif row == "zero":
        x[:] = 0
    w, b = np.full(32768, -(2**15), np.int32), np.full(32768, 2**31 - 1, np.int32)
    a = {"kind": kind, "axes": 1, "x_zero": 127, "y_zero": 0, "multiplier": 2**23 - 1, "shift": 50, "lo": -128, "hi": 127,
         "eps": 2**32 - 1 if row == "zero" else 0}  # fmt: skip
    (got,) = command(Op.qnorm, [x, w, b], [x], struct("QnormAttrs", **a))
    np.testing.assert_array_equal(got, plain_norm(x, w, b, a))


@pytest.mark.parametrize("kind", [NormKind.layer, NormKind.rms])
@pytest.mark.parametrize(("shape", "tail"), [((40, 64), 1), ((6, 5, 12, 8), 2), ((3, 4096), 1)])
@pytest.mark.parametrize("affine", ["both", "weight", "none", "offset", "bias"])
def test_norm_near_float(kind: NormKind, shape: tuple[int, ...], tail: int, affine: str) -> None:
    torch.manual_seed(0)
    x, qx, real = quantise(torch.randn(shape) * 2.3 + 0.7)
    size = shape[len(shape) - tail :]
    w = torch.randn(size).double() + 1 if affine in ("both", "weight", "offset") else None
    b = torch.randn(size).double() if affine in ("both", "bias") else None
    if affine == "offset":
        b = torch.full(size, 300.0, dtype=torch.float64)  # a bias that dwarfs the weights
    eps = 1e-5
    if kind == NormKind.layer:
        want = torch.nn.functional.layer_norm(real, size, w, b, eps)
    else:
        want = torch.nn.functional.rms_norm(real, size, w, eps)
        want = want if b is None else want + b
    # The range is cut where few values lie, as calibration does; the truth is cut alike.
    cut = float(want.abs().quantile(0.999))
    _, qy, _ = quantise(want, -cut, cut)
    np_w, np_b = None if w is None else w.numpy(), None if b is None else b.numpy()
    weight, bias, numbers = norm_operands(qx, qy, np_w, np_b, eps, math.prod(size))
    attrs = struct("QnormAttrs", kind=kind, axes=tail, **numbers)
    (y,) = command(Op.qnorm, [x, weight, bias], [x], attrs)
    scale = float(qy.scale)
    got = (torch.from_numpy(y).double() - qy.zero) * scale
    want = want.clamp((-128 - qy.zero) * scale, (127 - qy.zero) * scale)
    assert sqnr(want, got) > 35
    assert float((got - want).abs().max()) < 0.55 * scale


def test_norm_operands_at_the_ends() -> None:
    q = per_tensor(0.1, 3)
    w, b, numbers = norm_operands(q, per_tensor(0.02, -5, lo=-100, hi=90), np.zeros(4), np.zeros(4), 0.0, 4)
    assert w is not None and b is not None and not w.any() and not b.any()
    assert (numbers["x_zero"], numbers["y_zero"], numbers["lo"], numbers["hi"], numbers["eps"]) == (3, -5, -100, 90, 0)
    w, b, _ = norm_operands(q, q, None, np.full(4, 1e6), 1e-5, 4)  # a bias that does not fit beside a weight of 1
    assert w is not None and b is not None and w.tolist() == [1] * 4 and b.tolist() == [2**31 - 2] * 4
    w, _, _ = norm_operands(q, q, np.array([1e-30, -1e-30]), None, 1e-5, 2)
    assert w is not None and w.tolist() == [2**15, -(2**15)]
    for bad in ((1e4, 4), (1e-5, 0), (1e-5, 32769), (-1e-5, 4), (math.nan, 4)):
        with pytest.raises(Error):
            norm_operands(q, q, None, None, *bad)
    with pytest.raises(Error, match="finite"):
        norm_operands(q, q, np.array([1.0, math.inf]), None, 1e-5, 2)
    with pytest.raises(Error, match="too large"):
        norm_operands(q, per_tensor(1e-9), np.array([1e8]), None, 1e-5, 1)


def test_norm_refusals() -> None:
    x, w = np.zeros((2, 6), np.int8), np.ones(6, np.int32)
    good = {"kind": 0, "axes": 1, "multiplier": 1, "lo": -128, "hi": 127}
    command(Op.qnorm, [x, w, w], [x], struct("QnormAttrs", **good))
    for bad in ({"kind": 2}, {"kind": 9}, {"axes": 0}, {"axes": 3}, {"multiplier": -1}, {"multiplier": 2**23}, {"shift": 63},
                {"shift": -1}, {"eps": 2**32}, {"lo": 5, "hi": 4}, {"hi": 128}, {"x_zero": 128}, {"y_zero": -129}):  # fmt: skip
        with pytest.raises(Error, match="qnorm"):
            command(Op.qnorm, [x, w, w], [x], struct("QnormAttrs", **{**good, **bad}))
    long = np.zeros((1, 32769), np.int8)
    for inputs, y in (([long], long), ([np.zeros((200, 200), np.int8)], np.zeros((200, 200), np.int8)), ([x, w[:5]], x),
                      ([x, np.ones(12, np.int32)[::2]], x), ([x, w.astype(np.int64)], x), ([x, w.reshape(1, 6)], x),
                      ([x, None, w[:5]], x), ([x], x[:1]), ([x.astype(np.int16)], x)):  # fmt: skip
        more = {"axes": 2} if inputs[0].shape == (200, 200) else {}
        with pytest.raises(Error, match="qnorm"):
            native.run_op(Op.qnorm, inputs, [y], struct("QnormAttrs", **{**good, **more}))


def test_norm_of_hostile_operands_does_no_harm() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        x = stored(rng, (3, 7))
        w, b = (rng.integers(-(2**31), 2**31, 7).astype(np.int32) for _ in range(2))
        attrs = struct("QnormAttrs", kind=1, axes=1, multiplier=2**23 - 1, shift=int(rng.integers(63)), lo=-100, hi=100)
        (y,) = command(Op.qnorm, [x, w, b], [x], attrs)
        assert y.min() >= -100 and y.max() <= 100


def test_overlap_does_no_harm() -> None:
    """A hostile plan may let an output grow into its input: any result, but inside the memory (run under AddressSanitizer)."""
    table = softmax_table(0.1)
    for shift in (1, 3, 40):
        for flip in (1, -1):
            memory = stored(np.random.default_rng(shift), (20 * 40 + shift,))
            x, y = memory[: 20 * 40].reshape(20, 40), memory[shift:].reshape(20, 40)[::flip, ::flip]
            softmax = struct("QsoftmaxAttrs", axis=1, y_zero=-128, lo=-128, hi=127)
            norm = struct("QnormAttrs", axes=1, multiplier=2**22, shift=28, lo=-128, hi=127)
            native.run_op(Op.qsoftmax, [x, table], [y], softmax)
            native.run_op(Op.qnorm, [x], [y], norm)
            native.run_op(Op.qsoftmax, [x.T, table], [y.T], softmax)
            native.run_op(Op.qnorm, [y], [x], norm)
