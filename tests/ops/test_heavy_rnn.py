"""rnn on every ISA against torch.nn: kinds, direction, states, projection, strides, packed weights, scratch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from heavy import FLOATS, check, isa_levels, packed, place, run, struct
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet import native
from trivet.error import Error
from trivet.fbs.structs import Op, RnnKind

GATES = {RnnKind.lstm: 4, RnnKind.gru: 3, RnnKind.tanh: 1, RnnKind.relu: 1}


def scratch(attrs: Any, dtype: torch.dtype, n: int, size: int, hidden: int, proj: int) -> Any:
    def r16(x: int) -> int:
        return -(-x // 16) * 16

    out, gates = proj or hidden, GATES[RnnKind(int(attrs["kind"]))] * hidden
    if dtype == torch.float64:
        need = 64 + n * 8 * (2 * gates + out + 2 * hidden)
    else:
        steps = 9 if attrs["kind"] == RnnKind.gru else 8
        weights = 0 if attrs["packed"] else r16(gates) * (size + out) + (r16(proj) * hidden if proj else 0)
        need = 64 + 4 * weights + n * 4 * (steps * r16(gates) + r16(out) + 2 * r16(hidden))
    return np.empty(need, np.uint8)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.data())
def test_rnn(data: st.DataObject) -> None:
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 1000)))
    kind = draw(st.sampled_from(list(GATES)))
    dtype = draw(st.sampled_from([*FLOATS, *[torch.float32] * 4]))
    steps, n = draw(st.sampled_from([1, 2, 8, 9, 20])), draw(st.sampled_from([1, 2, 5, 13]))
    size, hidden = draw(st.sampled_from([1, 7, 16, 40])), draw(st.sampled_from([1, 5, 16, 33, 64]))
    proj = draw(st.sampled_from([0, 3])) if kind == RnnKind.lstm and hidden > 3 else 0
    reverse, bias, start = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    options: dict[str, Any] = {"proj_size": proj} if kind == RnnKind.lstm else {}
    if kind in (RnnKind.tanh, RnnKind.relu):
        options["nonlinearity"] = kind.name
    net = {RnnKind.lstm: torch.nn.LSTM, RnnKind.gru: torch.nn.GRU}.get(kind, torch.nn.RNN)(
        size, hidden, bias=bias, **options).to(dtype)  # fmt: skip
    out_size = proj or hidden
    x = torch.randn(steps, n, size).to(dtype)
    h0, c0 = torch.randn(1, n, out_size).to(dtype), torch.randn(1, n, hidden).to(dtype)
    state: Any = ((h0, c0) if kind == RnnKind.lstm else h0) if start else None
    wide = net.double()
    with torch.no_grad():
        double = None if state is None else tuple(s.double() for s in state) if kind == RnnKind.lstm else state.double()
        want, last = wide((x.flip(0) if reverse else x).double(), double)
    want = want.flip(0) if reverse else want
    weights = {k: v.detach().to(dtype) for k, v in net.state_dict().items()}
    use_packed = dtype == torch.float32 and draw(st.booleans())
    attrs = struct("RnnAttrs", kind=kind, reverse=reverse, packed=use_packed)

    def weight(name: str) -> Any:
        w = weights.get(name)
        return packed(Op.rnn, attrs, w) if use_packed and w is not None else w

    inputs = [place(x, draw(st.sampled_from(["dense", "gaps", "flip"]))), weight("weight_ih_l0"), weight("weight_hh_l0"),
              weights.get("bias_ih_l0"), weights.get("bias_hh_l0"), h0[0] if start else None,
              c0[0] if start and kind == RnnKind.lstm else None, weight("weight_hr_l0")]  # fmt: skip
    y = torch.full((n, steps, 2 * out_size), float("nan"), dtype=dtype)  # batch first, one half of two directions
    outputs = [y.transpose(0, 1)[..., out_size:], torch.empty(n, out_size, dtype=dtype)]
    if kind == RnnKind.lstm:
        outputs.append(torch.empty(n, hidden, dtype=dtype))
    run(Op.rnn, inputs, outputs, attrs, isa=draw(st.sampled_from(isa_levels(Op.rnn))),
        tiles=draw(st.sampled_from([0, 1, 3])) if use_packed else 1,
        tmp=[scratch(attrs, dtype, n, size, hidden, proj)])  # fmt: skip
    finals = [last[0][0], last[1][0]] if kind == RnnKind.lstm else [last[0]]
    for got, value in zip(outputs, [want, *finals], strict=True):
        check(got, value.to(dtype), factor=5.0)
    assert bool(y[..., :out_size].isnan().all())


@pytest.mark.parametrize("isa", isa_levels(Op.rnn))
def test_long_batch(isa: str) -> None:
    """More rows than one block."""
    torch.manual_seed(0)
    net = torch.nn.LSTM(20, 24)
    x = torch.randn(11, 130, 20)
    with torch.no_grad():
        want, _ = net(x)
    attrs = struct("RnnAttrs", kind=RnnKind.lstm)
    w = [p.detach() for p in net.parameters()]
    out = [torch.empty(11, 130, 24), torch.empty(130, 24), torch.empty(130, 24)]
    run(Op.rnn, [x, *w], out, attrs, isa=isa, tmp=[scratch(attrs, torch.float32, 130, 20, 24, 0)])
    check(out[0], want)


def test_refusals() -> None:
    x, w, u = torch.randn(4, 2, 6), torch.randn(20, 6), torch.randn(20, 5)
    y, h, c = torch.empty(4, 2, 5), torch.empty(2, 5), torch.empty(2, 5)
    attrs = struct("RnnAttrs", kind=RnnKind.lstm)
    tmp = [scratch(attrs, torch.float32, 2, 6, 5, 0)]
    native.run_op(Op.rnn, [x, w, u], [y, h, c], attrs, tmp=tmp)
    bad: list[tuple[list[Any], list[Any], list[Any]]] = [
        ([x, w, u], [y, h, c], []),
        ([x, w, u], [y, h, c], [tmp[0][:-1]]),
        ([x, w, u], [y, h], tmp),
        ([x, w[:19], u], [y, h, c], tmp),
        ([x, w, u[:, :4]], [y, h, c], tmp),
        ([x, w, u, torch.randn(19)], [y, h, c], tmp),
        ([x, w, u, None, None, torch.randn(3, 5)], [y, h, c], tmp),
        ([x, w, u], [torch.empty(4, 2, 6), h, c], tmp),
        ([x, w, u], [torch.empty(5, 2, 5), h, c], tmp),
    ]
    for inputs, out, room in bad:
        with pytest.raises(Error, match="rnn"):
            native.run_op(Op.rnn, inputs, out, attrs, tmp=room)
