"""Cells of recurrent networks: one step of an `rnn` node. Whole sequences are in trivet.rnn_capture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trivet.aten.common import Handler, table
from trivet.fbs.structs import RnnKind
from trivet.ir import ops
from trivet.ir.builder import Builder
from trivet.ir.graph import Value
from trivet.ir.types import Type


def _step(b: Builder, kind: RnnKind, x: Value, state: Sequence[Value], params: Sequence[Value | None]) -> list[Value]:
    batched = len(x.shape) == 2
    if not batched:
        x, state = b.unsqueeze(x, 0), [b.unsqueeze(s, 0) for s in state]
    h = state[0]
    c = state[1] if len(state) > 1 else None
    types = [Type(x.dtype, (1, *h.shape)), *(Type(x.dtype, s.shape) for s in state)]
    out = b.add("rnn", [b.unsqueeze(x, 0), *params, h, c, None], types, ops.Rnn(kind))
    return out[1:] if batched else [b.squeeze(v, [0]) for v in out[1:]]


def _cell(kind: RnnKind) -> Callable[..., Value]:
    def run(b: Builder, meta: Any, x: Value, h: Value, w_ih: Value, w_hh: Value, b_ih: Value | None = None,
            b_hh: Value | None = None) -> Value:  # fmt: skip
        return _step(b, kind, x, [h], [w_ih, w_hh, b_ih, b_hh])[0]

    return run


def _lstm_cell(b: Builder, meta: Any, x: Value, hx: Sequence[Value], w_ih: Value, w_hh: Value,
               b_ih: Value | None = None, b_hh: Value | None = None) -> tuple[Value, ...]:  # fmt: skip
    return tuple(_step(b, RnnKind.lstm, x, hx, [w_ih, w_hh, b_ih, b_hh]))


HANDLERS: dict[str, Handler] = table({
    "lstm_cell": _lstm_cell,
    "gru_cell": _cell(RnnKind.gru),
    "rnn_tanh_cell": _cell(RnnKind.tanh),
    "rnn_relu_cell": _cell(RnnKind.relu),
})  # fmt: skip
