"""LSTM, GRU and RNN as one operator each, with a dynamic sequence length.

torch.export unrolls torch.lstm and its kin over time. While a model is captured they are replaced by custom operators
`trivet::lstm`, `trivet::gru`, `trivet::rnn` that stay whole; the handlers here turn these into one `rnn` node per layer and
direction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from trivet.fbs.structs import RnnKind
from trivet.ir.ops import Concat, Permute, Reshape, Rnn, Slice
from trivet.ir.types import Type

if TYPE_CHECKING:
    import torch

    from trivet.ir.builder import Builder
    from trivet.ir.graph import Value

_KINDS = {"lstm": RnnKind.lstm, "gru": RnnKind.gru, "rnn_tanh": RnnKind.tanh, "rnn_relu": RnnKind.relu}


@cache
def operators() -> dict[str, Any]:
    """Defines the custom operators once; {torch's name: operator}."""
    import torch

    def shapes(x: torch.Tensor, h: torch.Tensor, directions: int, batch_first: bool) -> tuple[list[Any], list[Any]]:
        n = x.shape[0] if batch_first else x.shape[1]
        y = [x.shape[0], x.shape[1], h.shape[2] * directions]
        return y, [h.shape[0], n, h.shape[2]]

    # Schemas in words: torch cannot resolve annotations of a module that does not import it.
    rest = "Tensor[] params, bool biases, int layers, bool bidirectional, bool batch_first"

    @torch.library.custom_op(
        "trivet::lstm", mutates_args=(), schema=f"(Tensor x, Tensor h0, Tensor c0, {rest}) -> (Tensor, Tensor, Tensor)"
    )
    def lstm(x: torch.Tensor, h0: torch.Tensor, c0: torch.Tensor, params: list[torch.Tensor], biases: bool, layers: int,
             bidirectional: bool, batch_first: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        y, h, c = torch.ops.aten.lstm.input(x, [h0, c0], params, biases, layers, 0.0, False, bidirectional, batch_first)
        return y.clone(), h.clone(), c.clone()

    @lstm.register_fake
    def _(x, h0, c0, params, biases, layers, bidirectional, batch_first):  # type: ignore[no-untyped-def]
        y, h = shapes(x, h0, 1 + bidirectional, batch_first)
        return x.new_empty(y), x.new_empty(h), x.new_empty([h[0], h[1], c0.shape[2]])

    def simple(name: str, run: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Any:
        @torch.library.custom_op(
            f"trivet::{name}", mutates_args=(), schema=f"(Tensor x, Tensor h0, {rest}) -> (Tensor, Tensor)"
        )
        def op(x: torch.Tensor, h0: torch.Tensor, params: list[torch.Tensor], biases: bool, layers: int,
               bidirectional: bool, batch_first: bool) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
            y, h = run(x, h0, params, biases, layers, 0.0, False, bidirectional, batch_first)
            return y.clone(), h.clone()

        @op.register_fake
        def _(x, h0, params, biases, layers, bidirectional, batch_first):  # type: ignore[no-untyped-def]
            y, h = shapes(x, h0, 1 + bidirectional, batch_first)
            return x.new_empty(y), x.new_empty(h)

        return op

    aten = torch.ops.aten
    return {"lstm": lstm, "gru": simple("gru", aten.gru.input), "rnn_tanh": simple("rnn_tanh", aten.rnn_tanh.input),
            "rnn_relu": simple("rnn_relu", aten.rnn_relu.input)}  # fmt: skip


@contextmanager
def whole_rnns() -> Iterator[None]:
    """While active, torch.lstm, gru, rnn_tanh and rnn_relu are the custom operators."""
    import torch

    ops = operators()
    names: Any = torch._VF
    saved = {name: getattr(torch, name) for name in ops}

    def replacement(name: str) -> Callable[..., Any]:
        op, original = ops[name], saved[name]

        def call(x: Any, *args: Any, **kwargs: Any) -> Any:
            whole = not kwargs and len(args) == 8
            if not whole or isinstance(args[0 if name == "lstm" else 1], torch.Tensor) or (args[4] and args[5]):
                return original(x, *args, **kwargs)  # a packed sequence, or dropout in training
            hx, params, biases, layers, _, _, bidirectional, batch_first = args
            state = hx if name == "lstm" else (hx,)
            return op(x, *state, list(params), biases, layers, bidirectional, batch_first)

        return call

    for name in ops:
        f = replacement(name)
        setattr(names, name, f)
        setattr(torch, name, f)
    try:
        yield
    finally:
        for name, f in saved.items():
            delattr(names, name)
            setattr(torch, name, f)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """For programs that torch.export made elsewhere: aten.lstm.input and its kin become the custom operators."""
    import torch

    def entry(kind: str) -> tuple[Any, Callable[..., Any]]:
        op = operators()[kind]

        def decompose(x: Any, hx: Any, params: Any, biases: bool, layers: int, dropout: float, train: bool,
                      bidirectional: bool, batch_first: bool) -> Any:  # fmt: skip
            return op(x, *(hx if kind == "lstm" else (hx,)), list(params), biases, layers, bidirectional, batch_first)

        return getattr(torch.ops.aten, kind).input, decompose

    return dict(entry(kind) for kind in operators())


def _handler(kind: str) -> Callable[[Builder, tuple[Any, ...], dict[str, Any], Any], tuple[Value, ...]]:
    def handle(b: Builder, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> tuple[Value, ...]:
        x, *state = args[: 3 if kind == "lstm" else 2]
        params, biases, layers, bidirectional, batch_first = args[len(state) + 1 :]
        return _lower(b, _KINDS[kind], x, state, params, biases, layers, 1 + int(bidirectional), batch_first)

    return handle


def _lower(b: Builder, kind: RnnKind, x: Value, state: list[Value], params: list[Value], biases: bool, layers: int,
           directions: int, batch_first: bool) -> tuple[Value, ...]:  # fmt: skip
    """A stack of layers as `rnn` nodes."""
    g, loc = b.graph, b.loc
    lstm = kind == RnnKind.lstm
    project = lstm and state[0].shape[2] != state[1].shape[2]
    per_layer = 2 + 2 * int(biases) + int(project)

    def view(op: str, v: Value, shape: tuple[Any, ...], attrs: Any) -> Value:
        return g.node(op, [v], [Type(v.dtype, shape)], attrs, loc)[0]

    def swapped(v: Value) -> Value:
        return view("permute", v, (v.shape[1], v.shape[0], v.shape[2]), Permute((1, 0, 2)))

    def row(v: Value, i: int) -> Value | None:
        if _is_zero(v):
            return None
        if v.shape[0] != 1:
            v = view("slice", v, (1, *v.shape[1:]), Slice(0, i))
        return view("reshape", v, v.shape[1:], Reshape())

    def joined(parts: list[Value], axis: int) -> Value:
        if len(parts) == 1:
            return parts[0]
        shape = list(parts[0].shape)
        shape[axis] = sum((p.shape[axis] for p in parts[1:]), parts[0].shape[axis])
        return g.node("concat", list(parts), [Type(parts[0].dtype, tuple(shape))], Concat(axis), loc)[0]

    y = swapped(x) if batch_first else x
    last: list[list[Value]] = [[], []]
    for layer in range(layers):
        outs = []
        for direction in range(directions):
            i = layer * directions + direction
            p: list[Value | None] = list(params[i * per_layer : (i + 1) * per_layer])
            w_ih, w_hh = p[0], p[1]
            b_ih, b_hh = (p[2], p[3]) if biases else (None, None)
            w_proj = p[-1] if project else None
            h0 = row(state[0], i)
            c0 = row(state[1], i) if lstm else None
            hidden = state[0].shape[2]
            shape_y, shape_h = (y.shape[0], y.shape[1], hidden), (y.shape[1], hidden)
            types = [Type(x.dtype, shape_y), Type(x.dtype, shape_h)]
            if lstm:
                types.append(Type(x.dtype, (y.shape[1], state[1].shape[2])))
            o = g.node("rnn", [y, w_ih, w_hh, b_ih, b_hh, h0, c0, w_proj], types, Rnn(kind, bool(direction)), loc)
            outs.append(o[0])
            for k, v in enumerate(o[1:]):
                last[k].append(view("reshape", v, (1, *v.shape), Reshape()))
        y = joined(outs, 2)
    y = swapped(y) if batch_first else y
    return (y, *(joined(parts, 0) for parts in last if parts))


def _is_zero(v: Value) -> bool:
    """True for a value that is written as zeros: torch.zeros(..) and views of it."""
    while (
        v.node is not None and v.node.op in ("permute", "reshape", "expand", "slice") and v.node.inputs[0] is not None
    ):
        v = v.node.inputs[0]
    if v.node is None or v.node.op != "map" or v.node.inputs:
        return False
    code = v.node.attrs.code
    return all(i.op.name in ("const_", "cast") for i in code) and not code[0].value


HANDLERS: dict[str, Callable[..., Any]] = {f"trivet.{kind}.default": _handler(kind) for kind in _KINDS}
