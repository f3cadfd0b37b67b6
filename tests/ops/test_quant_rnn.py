"""qrnn: bit for bit against plain integers, and near torch's LSTM, GRU and RNN with the dequantised weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from heavy import struct
from hypothesis import given, settings
from hypothesis import strategies as st
from quant_plain import LAYOUTS, clamp, command, quantise, rescale, sqnr, stored

from trivet import native
from trivet.error import Error
from trivet.fbs.structs import DType, Op, RnnKind
from trivet.fixed_point import RNN_CELL, RNN_OUT, RNN_STATE, rnn_operands, rnn_tables
from trivet.ir.dim import Dim, evaluate
from trivet.ir.graph import Node, Value
from trivet.ir.ops import Qrnn
from trivet.ir.types import Quant, Type, per_tensor
from trivet.targets.cpu import Cpu

GATES = {RnnKind.lstm: 4, RnnKind.gru: 3, RnnKind.tanh: 1}
Arrays = list[Any]


def sat(v: int) -> int:
    return clamp(v, -32768, 32767)


def out8(h: int) -> int:
    return clamp(rescale(h, 1, 8), -128, 127)


def curve(row: np.ndarray, v: int) -> int:
    k = (sat(v) + 32768) >> 7
    return int(row[k]) + rescale((int(row[k + 1]) - int(row[k])) * (sat(v) & 127), 1, 7)


def plain(inputs: Arrays, kind: RnnKind, reverse: bool, x_zero: int) -> Arrays:
    x, w_ih, w_hh, scale, table, b_ih, b_hh, h0, c0 = inputs
    steps, batch, hidden = x.shape[0], x.shape[1], w_hh.shape[1]
    scale = [[int(v) for v in row] for row in scale]
    sums = w_ih.astype(np.int64), w_hh.astype(np.int64)
    y = np.zeros((steps, batch, hidden), np.int8)
    hs, cs = np.zeros((batch, hidden), np.int16), np.zeros((batch, hidden), np.int16)

    def side(acc: np.ndarray, bias: Any, m: list[int], s: list[int]) -> list[int]:
        b = np.zeros(len(acc), np.int64) if bias is None else bias.astype(np.int64)
        return [clamp(rescale(int(v), m[k], s[k]), -(2**24), 2**24) for k, v in enumerate(acc + b)]

    for n in range(batch):
        h = [0] * hidden if h0 is None else [int(v) for v in h0[n]]
        c = [0] * hidden if c0 is None else [int(v) for v in c0[n]]
        for t in range(steps)[:: -1 if reverse else 1]:
            h8 = np.array([out8(v) for v in h], np.int64)
            px = side(sums[0] @ (x[t, n].astype(np.int64) - x_zero), b_ih, scale[0], scale[1])
            ph = side(sums[1] @ h8, b_hh, scale[2], scale[3])
            for j in range(hidden):
                p, q = px[j::hidden], ph[j::hidden]
                if kind == RnnKind.lstm:
                    i, f, o = (curve(table[0], sat(p[k] + q[k])) for k in (0, 1, 3))
                    g = curve(table[1], sat(p[2] + q[2]))
                    c[j] = sat(rescale(f * c[j], 1, 15) + rescale(i * g, 1, 19))
                    h[j] = sat(rescale(o * curve(table[1], sat(2 * c[j])), 1, 15))
                elif kind == RnnKind.gru:
                    r, z = (curve(table[0], sat(p[k] + q[k])) for k in (0, 1))
                    new = curve(table[1], sat(p[2] + rescale(r * q[2], 1, 15)))
                    h[j] = sat(rescale((32768 - z) * new + z * h[j], 1, 15))
                else:
                    h[j] = curve(table[1], sat(p[0] + q[0]))
            y[t, n] = [out8(v) for v in h]
        hs[n], cs[n] = h, c
    return [y, hs, cs] if kind == RnnKind.lstm else [y, hs]


def room(attrs: Any, n: int, size: int, hidden: int) -> int:
    need = n * (-(-hidden // 8) * 8)
    assert native.qrnn_tmp_bytes(attrs, n, size, hidden) == need
    return need


@settings(max_examples=700, deadline=None, derandomize=True)
@given(st.data())
def test_bit_exact(data: st.DataObject) -> None:
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    kind, reverse = draw(st.sampled_from(list(GATES))), draw(st.booleans())
    steps, n = draw(st.integers(0, 4)), draw(st.integers(0, 3))
    size, hidden = draw(st.integers(0, 9)), draw(st.integers(0, 6))
    rows, x_zero = GATES[kind] * hidden, draw(st.sampled_from([-128, 127, 0, 9]))
    biases, states, hostile = draw(st.booleans()), draw(st.booleans()), draw(st.integers(0, 3)) == 0
    layout, other, tiles = (
        draw(st.sampled_from(LAYOUTS)),
        draw(st.sampled_from(LAYOUTS)),
        draw(st.sampled_from([0, 1, 3])),
    )
    attrs = struct("QrnnAttrs", kind=kind, reverse=reverse, x_zero=x_zero)
    for _ in range(3):
        x, w_ih, w_hh = (stored(rng, s) for s in ((steps, n, size), (rows, size), (rows, hidden)))
        # multipliers that make gates of a few thousand, or anything
        m = rng.integers(0, 2**31, (2, rows))
        s = rng.integers(0, 63, (2, rows)) if hostile else rng.integers(29, 38, (2, rows))
        scale = np.stack([m[0], s[0], m[1], s[1]]).astype(np.int32)
        table = stored(rng, (2, 513), np.int16) if hostile else rnn_tables()
        b_ih, b_hh = (
            rng.integers(-(2**31), 2**31, rows).astype(np.int32) >> int(rng.integers(0, 25)) for _ in range(2)
        )
        h0, c0 = (stored(rng, (n, hidden), np.int16) for _ in range(2))
        inputs = [x, w_ih, w_hh, scale, table, *((b_ih, b_hh) if biases else (None, None)),
                  *((h0, c0 if kind == RnnKind.lstm else None) if states else (None, None))]  # fmt: skip
        want = plain(inputs, kind, reverse, x_zero)
        got = command(Op.qrnn, inputs, want, attrs, layout=layout, other=other, strided=(0, 7, 8), tiles=tiles,
                      tmp=room(attrs, n, size, hidden))  # fmt: skip
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)


def test_largest_sums() -> None:
    """The most inputs, all at the ends."""
    size = 32768
    x, w = np.full((2, 1, size), -128, np.int8), np.full((1, size), -128, np.int8)
    for bias in (-(2**31), 2**31 - 1):
        for shift in (31, 62):
            scale = np.array([[2**31 - 1], [shift], [1], [0]], np.int32)
            inputs = [x, w, np.ones((1, 1), np.int8), scale, rnn_tables(), np.array([bias], np.int32), None, None, None]
            want = plain(inputs, RnnKind.tanh, False, 127)
            got = command(Op.qrnn, inputs, want, struct("QrnnAttrs", kind=RnnKind.tanh, x_zero=127), tmp=8)
            for a, b in zip(got, want, strict=True):
                np.testing.assert_array_equal(a, b)


def rows8(w: torch.Tensor) -> tuple[np.ndarray, Quant, torch.Tensor]:
    """Symmetric i8 per row."""
    scale = (w.abs().amax(1) / 127).float()
    q = torch.clamp(torch.round(w / scale[:, None]), -127, 127)
    return q.to(torch.int8).numpy(), Quant(scale.numpy(), axis=0), q.double() * scale.double()[:, None]


@pytest.mark.parametrize("kind", list(GATES))
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("size", "hidden", "gain"), [(16, 24, 1.0), (40, 64, 2.0), (3, 8, 4.0)])
def test_near_float(kind: RnnKind, bias: bool, reverse: bool, size: int, hidden: int, gain: float) -> None:
    torch.manual_seed(1)
    net = {RnnKind.lstm: torch.nn.LSTM, RnnKind.gru: torch.nn.GRU, RnnKind.tanh: torch.nn.RNN}[kind](
        size, hidden, bias=bias
    )
    net = net.double()
    x, qx, real = quantise(torch.randn(20, 3, size))
    weights = dict(net.named_parameters())
    w = {}
    with torch.no_grad():
        for name in ("weight_ih_l0", "weight_hh_l0"):
            factor = gain if name == "weight_ih_l0" or kind != RnnKind.tanh else 1.0  # (a tanh net may be chaotic)
            w[name] = rows8(weights[name] * factor)
            weights[name].copy_(w[name][2])
        h0 = torch.randint(-32000, 32000, (3, hidden)).short()
        c0 = torch.randint(-8000, 8000, (3, hidden)).short()
        start = (h0.double() * RNN_STATE)[None]
        state: Any = (start, (c0.double() * RNN_CELL)[None]) if kind == RnnKind.lstm else start
        want, _ = net(real.flip(0) if reverse else real, state)
        want = want.flip(0) if reverse else want
    b = [weights[f"bias_{k}_l0"].detach().numpy() if bias else None for k in ("ih", "hh")]
    (w_ih, q_ih, _), (w_hh, q_hh, _) = w["weight_ih_l0"], w["weight_hh_l0"]
    scale, b_ih, b_hh, numbers = rnn_operands(qx, w_ih, q_ih, w_hh, q_hh, *b)
    attrs = struct("QrnnAttrs", kind=kind, reverse=reverse, **numbers)
    state_out = np.empty((3, hidden), np.int16)
    outs = [np.empty((20, 3, hidden), np.int8), state_out, *([state_out] if kind == RnnKind.lstm else [])]
    inputs = [x, w_ih, w_hh, scale, rnn_tables(), b_ih, b_hh, h0.numpy(), c0.numpy() if kind == RnnKind.lstm else None]
    y, h, *_ = command(Op.qrnn, inputs, outs, attrs, tmp=room(attrs, 3, size, hidden))
    assert sqnr(want, torch.from_numpy(y).double() * RNN_OUT) > 30
    assert sqnr(want[0 if reverse else -1], torch.from_numpy(h).double() * RNN_STATE) > 30


def test_operands() -> None:
    q, w = Quant(np.array([1e-12, 0.5], np.float32), axis=0), np.array([[0, 0], [1, 2]], np.int8)
    b = np.array([2.0, -1.0])
    scale, b_ih, b_hh, numbers = rnn_operands(
        per_tensor(0.25, -3), w, q, w, q, b, None
    )  # a row of zeros with a silly scale
    assert b_hh is None and b_ih is not None and numbers == {"x_zero": -3}
    assert b_ih.tolist() == [2 * 2**20, -8] and scale.shape == (4, 2) and scale.dtype == np.int32
    for row, side in ((0, 0), (0, 1), (2, 1)):
        real = scale[row, side] / 2.0 ** scale[row + 1, side]
        assert real == [[2.0**-8, 0.125 * 4096], [0, 0], [0, 0.5 / 128 * 4096]][row][side]
    with pytest.raises(Error, match="32 bits"):
        rnn_operands(per_tensor(1e-6), w, q, w, q, np.array([0.0, 5e3]), None)
    with pytest.raises(Error, match="32768"):
        rnn_operands(per_tensor(0.1), np.zeros((2, 32769), np.int8), q, w, q, None, None)
    for bad in (Quant(q.scale, 1, axis=0), Quant(q.scale, axis=1), Quant(q.scale, axis=0, offset=q.scale)):
        with pytest.raises(Error, match="symmetric"):
            rnn_operands(per_tensor(0.1), w, bad, w, q, None, None)


def test_scratch_is_planned() -> None:
    """What the exporter plans is what the kernel asks for, whatever the batch."""

    def value(name: str, dtype: DType, *shape: Any) -> Value:
        return Value(name, Type(dtype, shape))

    n = Dim.symbol("n")
    node = Node("qrnn", [value("x", DType.i8, 7, n, 5), *[None] * 8],
                [value("y", DType.i8, 7, n, 11), value("h", DType.i16, n, 11)], Qrnn(RnnKind.gru))  # fmt: skip
    (size,) = Cpu().scratch(node)
    attrs = struct("QrnnAttrs", kind=RnnKind.gru)
    assert [evaluate(size, {"n": k}) for k in (1, 4)] == [room(attrs, k, 5, 11) for k in (1, 4)]


def test_refusals() -> None:
    kind, n, size, hidden = RnnKind.lstm, 2, 5, 3
    x, w, u = np.zeros((4, n, size), np.int8), np.zeros((12, size), np.int8), np.zeros((12, hidden), np.int8)
    scale, table, b = np.zeros((4, 12), np.int32), rnn_tables(), np.zeros(12, np.int32)
    h, y = np.zeros((n, hidden), np.int16), np.zeros((4, n, hidden), np.int8)
    good, outs = [x, w, u, scale, table, b, b, h, h], [y, h.copy(), h.copy()]
    attrs = {"kind": kind}
    native.run_op(Op.qrnn, good, outs, struct("QrnnAttrs", **attrs), tmp=[np.zeros(16, np.uint8)])
    for more in (
        {"kind": RnnKind.gru},
        {"kind": RnnKind.relu},
        {"kind": 9},
        {"packed": 1},
        {"x_zero": 128},
        {"x_zero": -129},
    ):
        with pytest.raises(Error, match="qrnn"):
            native.run_op(Op.qrnn, good, outs, struct("QrnnAttrs", **{**attrs, **more}), tmp=[np.zeros(16, np.uint8)])
    changes: list[tuple[int, np.ndarray]] = [
        (0, x.astype(np.int16)), (0, x[0]), (1, w[:11]), (1, w[:, :4]), (1, np.zeros((24, size), np.int8)[::2]), (2, u[:, :2]),
        (2, u.astype(np.int16)), (3, scale[:2]), (3, scale[:, :11]), (3, scale.astype(np.int64)), (4, table[:, :512]),
        (4, table.astype(np.int32)), (5, b[:11]), (6, b.astype(np.int64)), (6, np.zeros(24, np.int32)[::2]), (7, h[:1]),
        (7, h.astype(np.int8)), (8, h[:, :2]),
    ]  # fmt: skip
    for i, value in changes:
        with pytest.raises(Error, match="qrnn"):
            native.run_op(
                Op.qrnn,
                [*good[:i], value, *good[i + 1 :]],
                outs,
                struct("QrnnAttrs", **attrs),
                tmp=[np.zeros(16, np.uint8)],
            )
    for out in ([y, h], [y[:3], *outs[1:]], [y.astype(np.int16), *outs[1:]], [y, h[:1], h], [y, h, h.astype(np.int32)]):
        with pytest.raises(Error, match="qrnn"):
            native.run_op(Op.qrnn, good, out, struct("QrnnAttrs", **attrs), tmp=[np.zeros(16, np.uint8)])
    for tmp in ([], [np.zeros(15, np.uint8)], [np.zeros(32, np.uint8)[::2]]):
        with pytest.raises(Error, match="qrnn"):
            native.run_op(Op.qrnn, good, outs, struct("QrnnAttrs", **attrs), tmp=tmp)
