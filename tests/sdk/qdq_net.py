"""Models with quantise and dequantise operators written by hand, and their way through the passes and the C runtime."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.ao.quantization.fx import _decomposed  # noqa: F401  defines the operators

from trivet.emit import emit
from trivet.frontend import capture
from trivet.ir.evaluate import evaluate
from trivet.ir.graph import Graph, Module
from trivet.pipeline import PASSES, Context, Options, run_passes
from trivet.quantize.report import sqnr as decibels
from trivet.runtime import load

QD = torch.ops.quantized_decomposed
BEFORE = PASSES[: PASSES.index("partition")]
AFTER = PASSES[PASSES.index("partition") :]


def fq(x: torch.Tensor, scale: float, zero: int = 0, lo: int = -128, hi: int = 127,
       dtype: torch.dtype = torch.int8) -> torch.Tensor:  # fmt: skip
    """Quantised and made real again."""
    q = QD.quantize_per_tensor.default(x, scale, zero, lo, hi, dtype)
    return QD.dequantize_per_tensor.default(q, scale, zero, lo, hi, dtype)


def fq16(x: torch.Tensor, scale: float) -> torch.Tensor:
    """The same in 16 bits."""
    return fq(x, scale, 0, -32768, 32767, torch.int16)


class Weight(torch.nn.Module):
    """A weight stored in 8 bits with a scale per element of an axis (None: one for all)."""

    def __init__(self, w: torch.Tensor, axis: int | None = 0) -> None:
        super().__init__()
        self.axis = axis
        most = w.abs().amax() if axis is None else w.abs().transpose(0, axis).flatten(1).amax(1)
        scale = (most / 127).clamp(min=1e-9)
        spread = scale if axis is None else scale.reshape([-1 if i == axis else 1 for i in range(w.dim())])
        self.register_buffer("q", (w / spread).round().clamp(-127, 127).to(torch.int8))
        self.register_buffer("s", scale)
        self.register_buffer("z", torch.zeros_like(scale, dtype=torch.int64))

    def forward(self) -> torch.Tensor:
        if self.axis is None:
            return QD.dequantize_per_tensor.tensor(self.q, self.s, self.z, -127, 127, torch.int8)
        return QD.dequantize_per_channel.default(self.q, self.s, self.z, self.axis, -127, 127, torch.int8)


class Net(torch.nn.Module):
    """A function of inputs and submodules or buffers, as a module."""

    def __init__(self, fn: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.fn = fn
        for name, part in parts.items():
            if isinstance(part, torch.nn.Module):
                self.add_module(name, part)
            else:
                self.register_buffer(name, part)

    def forward(self, *xs: torch.Tensor) -> Any:
        return self.fn(self, *xs)


@dataclass
class Lowered:
    """ops: kernels and views after fold_qdq, in order; db: SQNR of each result against the torch model."""

    module: Module
    context: Context
    ops: list[str]
    db: list[float]
    results: list[torch.Tensor]
    program: Any

    @property
    def graph(self) -> Graph:
        return self.module.entries["forward"]

    def kernels(self) -> list[str]:
        """Without views."""
        return [o for o in self.ops if o not in ("permute", "reshape", "expand", "slice", "bitcast", "concat")]


def sqnr(want: torch.Tensor, got: torch.Tensor) -> float:
    """dB; infinite when equal."""
    return math.inf if torch.equal(want.double(), got.double()) else decibels(want, got)


def lower(net: torch.nn.Module, *xs: torch.Tensor, db: float = 40.0, exact: bool = True, target: str = "cpu",
          dynamic_shapes: Any = None, quantize_io: bool = False, other: tuple[torch.Tensor, ...] = ()) -> Lowered:  # fmt: skip
    """Through all passes and the runtime. The evaluator and the runtime must agree (exact: bit for bit), the evaluator and torch to
    db. other: arguments of other sizes to run too.
    """
    if not isinstance(net, torch.fx.GraphModule):  # those that pt2e made refuse
        net.eval()
    module = capture({"forward": (net, xs)}, None if dynamic_shapes is None else {"forward": dynamic_shapes})
    context = Context(target, Options(quantize_io=quantize_io))
    run_passes(module, context, BEFORE)
    graph = module.entries["forward"]
    ops = [n.op for n in graph.nodes]
    texts = [a for a in (xs, other) if a]
    expected = [evaluate(graph, list(a)) for a in texts] if not quantize_io else []
    run_passes(module, context, AFTER)
    program = emit(module, context)
    runtime = load(program)
    measured = []
    for args, wanted in zip(texts, expected, strict=False):
        with torch.no_grad():
            model = net(*args)
        got = runtime(*args)
        model, got = ([t] if isinstance(t, torch.Tensor) else list(t) for t in (model, got))
        for m, w, g in zip(model, wanted, got, strict=True):
            assert w.dtype == g.dtype and w.shape == g.shape == m.shape
            if exact:
                assert torch.equal(w, g), f"evaluator and runtime differ by {(w.double() - g.double()).abs().max()}"
            else:
                assert torch.allclose(w, g, 1e-4, 1e-5)
            measured.append(sqnr(m, w))
        assert min(measured) >= db, f"{measured} dB\n{module}"
    return Lowered(module, context, ops, measured, expected[0] if expected else [], program)


def span(x: torch.Tensor, low: int = -128, high: int = 127) -> tuple[float, int]:
    """(scale, zero) for the range of x, 0 included."""
    lo, hi = min(0.0, float(x.min())), max(0.0, float(x.max()))
    scale = max((hi - lo) / (high - low), 1e-8)
    return scale, int(max(low, min(high, round(low - lo / scale))))
