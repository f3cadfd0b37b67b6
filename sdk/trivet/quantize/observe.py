"""Observers: modules that look at values while the model runs on calibration data, and choose scales and zero points.

Minimum and maximum, and the histogram search, are torchao's. Ours are percentile and mean squared error (one histogram whose bins
double in width as the range grows, so that nothing is resampled), the inputs of softmax, weights in groups, and rows.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from trivet.quantize import blocks  # noqa: F401  # trivet::dequantize
from trivet.quantize.fold import constant_of
from trivet.quantize.fxgraph import assign, vacant
from trivet.quantize.library import torchao
from trivet.quantize.recipe import Spec

torchao()
from torchao.quantization import PerAxis  # noqa: E402
from torchao.quantization.pt2e import MappingType  # noqa: E402
from torchao.quantization.pt2e._affine_quantization import AffineQuantizedPlaceholderObserver  # noqa: E402
from torchao.quantization.pt2e.fake_quantize import FakeQuantize  # noqa: E402
from torchao.quantization.pt2e.observer import (  # noqa: E402
    HistogramObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    ObserverBase,
    PerChannelMinMaxObserver,
    UniformQuantizationObserverBase,
)
from torchao.quantization.pt2e.quantizer import (  # noqa: E402
    FixedQParamsQuantizationSpec,
    QuantizationSpec,
    QuantizationSpecBase,
)

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import GraphModule, Node

BINS = 4096  # of a running histogram
ENOUGH = 1 << 17  # values of a tensor that go into it; minimum and maximum are of all
SPAN = 16.0  # softmax: exp(-16) is a ten-millionth
LEAST = 2.0**-40  # scale of an activation
LEAST_WEIGHT = 2.0**-60
SHRINK = 0.4  # of a range, at most, by the search for the least squared error
CACHED = 1 << 16  # values that are worked on together, so that they stay in the cache
_DTYPES = {"i8": torch.int8, "i16": torch.int16, "i4": torch.int8}


# ---- what annotations say -----------------------------------------------------------------------------------------------
@cache
def activation(spec: Spec, *, qat: bool = False) -> QuantizationSpec:
    """A stored value with one scale."""
    lo, hi = spec.limits
    scheme = torch.per_tensor_symmetric if spec.symmetric else torch.per_tensor_affine
    if qat:
        ctr = FakeQuantize.with_args(observer=MovingAverageMinMaxObserver, averaging_constant=0.05, eps=LEAST)
    elif spec.observer in ("percentile", "mse"):
        ctr = RangeObserver.with_args(percentile=spec.percentile if spec.observer == "percentile" else 0.0, eps=LEAST)
    elif spec.observer == "histogram":
        ctr = HistogramObserver.with_args(bins=spec.bins, eps=LEAST)
    else:
        ctr = MinMaxObserver.with_args(eps=LEAST)
    return QuantizationSpec(_DTYPES[spec.dtype], ctr, lo, hi, scheme)


@cache
def logits(spec: Spec, axis: int, *, qat: bool = False) -> QuantizationSpec:
    """The input of a softmax along axis: values far below the largest do not count."""
    lo, hi = spec.limits
    scheme = torch.per_tensor_symmetric if spec.symmetric else torch.per_tensor_affine
    ctr = LogitsObserver.with_args(axis=axis, eps=LEAST)
    if qat:
        ctr = FakeQuantize.with_args(observer=LogitsObserver, axis=axis, eps=LEAST)
    return QuantizationSpec(_DTYPES[spec.dtype], ctr, lo, hi, scheme)


@cache
def constant(spec: Spec) -> QuantizationSpec:
    """A constant operand of an operator of two activations."""
    lo, hi = spec.limits
    scheme = torch.per_tensor_symmetric if spec.symmetric else torch.per_tensor_affine
    return QuantizationSpec(_DTYPES[spec.dtype], MinMaxObserver.with_args(eps=LEAST), lo, hi, scheme)


@cache
def row(spec: Spec) -> QuantizationSpec:
    """A value whose rows are quantised while the program runs."""
    lo, hi = spec.limits
    return QuantizationSpec(torch.int8, RowObserver.with_args(symmetric=spec.symmetric), lo, hi, is_dynamic=True)


@cache
def weight(spec: Spec, channel: int, axis: int, *, qat: bool = False) -> QuantizationSpec:
    """A constant weight. channel: its axis of output channels; axis: that of inputs, along which groups lie."""
    lo, hi = spec.limits
    dtype = _DTYPES[spec.dtype]
    if spec.granularity == "tensor":
        scheme: Any = torch.per_tensor_symmetric
        plain = {"observer": MinMaxObserver}
    else:
        scheme = torch.per_channel_symmetric
        plain = {"observer": PerChannelMinMaxObserver, "ch_axis": channel}
    if qat:
        ctr = FakeQuantize.with_args(**plain, eps=LEAST_WEIGHT)
        return QuantizationSpec(dtype, ctr, lo, hi, scheme)
    if spec.dtype == "i8" and spec.observer == "minmax" and not spec.group:
        observer = plain["observer"].with_args(eps=LEAST_WEIGHT)
        axes = {"ch_axis": channel} if "ch_axis" in plain else {}
        return QuantizationSpec(dtype, observer, lo, hi, scheme, **axes)
    ctr = WeightObserver.with_args(spec=spec, channel=channel, axis=axis)
    return QuantizationSpec(dtype, ctr, lo, hi, scheme)


@cache
def fixed(scale: float, zero: int) -> FixedQParamsQuantizationSpec:
    """An i8 value whose scale the operator itself says."""
    return FixedQParamsQuantizationSpec(torch.int8, scale, zero, -128, 127, torch.per_tensor_affine)


SOFTMAX = fixed(1 / 256, -128)
HIDDEN = fixed(1 / 128, 0)  # what a recurrent layer gives


def width(spec: QuantizationSpecBase) -> int:
    """Bytes of a stored value."""
    return int(getattr(spec, "dtype", torch.int8).itemsize)


# ---- ranges from a running histogram ------------------------------------------------------------------------------------
class RangeObserver(UniformQuantizationObserverBase):  # type: ignore[misc]
    """Percentile, or least mean squared error (percentile 0).

    Bins have a width of a power of two and lie at its multiples; when the range outgrows BINS of them, neighbours are joined.
    """

    min_val: Tensor
    max_val: Tensor
    counts: Tensor

    def __init__(self, percentile: float = 0.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.percentile = percentile
        self.register_buffer("min_val", torch.tensor(math.inf))
        self.register_buffer("max_val", torch.tensor(-math.inf))
        self.register_buffer("counts", torch.zeros(BINS, dtype=torch.float64))
        self.first = 0  # index of the first bin: it begins at first * width
        self.width = 0.0

    def forward(self, x: Tensor) -> Tensor:
        if x.numel():
            self._add(x.detach().float())
        return x

    def _add(self, x: Tensor) -> None:
        low, high = (float(t) for t in torch.aminmax(x))
        self.min_val.fill_(min(low, float(self.min_val)))
        self.max_val.fill_(max(high, float(self.max_val)))
        self._fit(float(self.min_val), float(self.max_val))
        if self.width:
            begin = self.first * self.width
            x = x.reshape(-1)
            if len(x) > ENOUGH:
                x = x[:: (len(x) // ENOUGH) | 1]
            counts = torch.histc(x, BINS, begin, begin + BINS * self.width)
            self.counts += counts.double()

    def _fit(self, low: float, high: float) -> None:
        """Widens the bins until low and high, which all values seen lie between, fit in; then moves them there."""
        if not self.width:
            if high == low:
                return
            self.width = 2.0 ** math.ceil(math.log2((high - low) / (0.75 * BINS)))  # room to grow
            self.first = math.floor(low / self.width)
        while math.floor(high / self.width) - math.floor(low / self.width) >= BINS:
            odd = self.first % 2
            joined = torch.nn.functional.pad(self.counts, (odd, odd)).view(-1, 2).sum(1)
            self.counts.zero_()
            self.counts[: len(joined)] = joined
            self.first, self.width = (self.first - odd) // 2, 2 * self.width
        first, last = math.floor(low / self.width), math.floor(high / self.width)
        if first < self.first or last >= self.first + BINS:
            start = first - (BINS - 1 - (last - first)) // 2
            self.counts = torch.roll(self.counts, self.first - start)  # what goes around is empty
            self.first = start

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        low, high = float(self.min_val), float(self.max_val)
        if self.width and float(self.counts.sum()) > 0:
            low, high = self._percentile(low, high) if self.percentile else self._least_error(low, high)
        scale, zero = self._calculate_qparams(torch.tensor(low), torch.tensor(high))
        return scale, zero

    def _percentile(self, low: float, high: float) -> tuple[float, float]:
        share = self.counts.cumsum(0) / self.counts.sum()
        cut = (1 - self.percentile / 100) / 2
        a, b = (int(torch.searchsorted(share, q)) for q in (cut, 1 - cut))
        return max(low, (self.first + a) * self.width), min(high, (self.first + b + 1) * self.width)

    def _least_error(self, low: float, high: float) -> tuple[float, float]:
        """Shrinks both ends together, then each alone, as long as the squared error falls."""
        middles = (self.first + torch.arange(BINS, dtype=torch.float64) + 0.5) * self.width
        used = self.counts > 0
        x, n = middles[used].clamp(low, high), self.counts[used]
        low, high = min(low, 0.0), max(high, 0.0)
        a = b = 1.0
        for grid, which in ((0.02, "ab"), (0.02, "b"), (0.02, "a"), (0.005, "b"), (0.005, "a")):
            around = 1.0 if which == "ab" else a if which == "a" else b
            wide = SHRINK if which == "ab" else 8 * grid
            tries = torch.arange(
                around - wide, min(1.0, around + (0 if which == "ab" else wide)) + 1e-9, grid, dtype=torch.float64
            )
            lows = low * (tries if "a" in which else torch.full_like(tries, a))
            highs = high * (tries if "b" in which else torch.full_like(tries, b))
            at = float(tries[int(self._errors(x, n, lows, highs).argmin())])
            a, b = (at if "a" in which else a), (at if "b" in which else b)
        return low * a, high * b

    def _errors(self, x: Tensor, n: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """Sum of squared errors of values x, n of each, for every range."""
        least, most = self.quant_min, self.quant_max
        if self.qscheme == torch.per_tensor_symmetric:
            scale, zero = torch.maximum(-low, high) * 2 / (most - least), torch.zeros_like(low)
        else:
            scale = (high - low) / (most - least)
            zero = (least - torch.round(low / scale)).clamp(least, most)
        scale, zero = scale.clamp_min(float(self.eps))[:, None], zero[:, None]
        q = torch.clamp(torch.round(x / scale) + zero, least, most)
        return ((((q - zero) * scale - x) ** 2) * n).sum(1)  # type: ignore[no-any-return]


class LogitsObserver(MinMaxObserver):  # type: ignore[misc]
    """Minimum and maximum of what softmax sees: values more than SPAN below the largest of their row count as that far below."""

    def __init__(self, axis: int = -1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        if x.numel():
            top = x.detach().amax(self.axis, keepdim=True)
            top = torch.where(torch.isfinite(top), top, 0.0)
            super().forward(torch.maximum(x.detach(), top - SPAN))
        return x


# ---- rows, quantised while the program runs -----------------------------------------------------------------------------
class RowObserver(AffineQuantizedPlaceholderObserver):  # type: ignore[misc]
    """Stands where a row's scale is computed; see schema/ops.fbs, qmatmul, dynamic."""

    def __init__(self, symmetric: bool = True, **kwargs: Any) -> None:
        kind = MappingType.SYMMETRIC if symmetric else MappingType.ASYMMETRIC
        super().__init__(kind, torch.int8, PerAxis(0), kwargs["quant_min"], kwargs["quant_max"],
                         torch.finfo(torch.float32).eps, True, torch.float32, torch.int8)  # fmt: skip
        self.dtype = torch.int8
        self.original_dtype = torch.float32

    def forward(self, x: Tensor) -> Tensor:
        return x

    def convert(self, model: GraphModule, node: Node) -> None:
        shape = node.args[0].meta["val"].shape  # type: ignore[union-attr]
        self.block_size = (*(1 for _ in shape[:-1]), int(shape[-1]))
        super().convert(model, node)


# ---- weights ------------------------------------------------------------------------------------------------------------
class WeightObserver(ObserverBase):  # type: ignore[misc]
    """Weights in 8 or 4 bits, per tensor, channel or group, by their range or by the least squared error.

    convert() leaves the stored integers and trivet::dequantize in the graph. Integers of 4 bits are stored as 0..15.
    """

    def __init__(self, spec: Spec, channel: int, axis: int, **kwargs: Any) -> None:
        super().__init__(dtype=kwargs["dtype"], is_dynamic=False)
        self.spec, self.channel, self.axis = spec, channel, axis
        self.qscheme = torch.per_tensor_symmetric
        self.quant_min, self.quant_max = spec.limits

    def forward(self, x: Tensor) -> Tensor:
        return x

    def calculate_qparams(self) -> Any:
        raise AssertionError("weights are quantised by convert()")

    def quantize(self, w: Tensor) -> tuple[Tensor, Tensor, Tensor | None, int, int, int, int]:
        """q, scale, offset, zero, axis, group, bits: the arguments of trivet::dequantize."""
        s, bits = self.spec, 4 if self.spec.dtype == "i4" else 8
        axis, group = (self.axis, min(s.group, w.shape[self.axis])) if s.group else (self.channel, 0)
        pieces, back = _blocks(w.detach().float(), s, self.channel, axis, group)
        lo, hi = s.limits
        scale, zero = _choose(pieces, lo, hi, s.symmetric, s.observer == "mse")
        q = (torch.round(pieces / scale) + zero).clamp(lo, hi)
        shift = 8 if bits == 4 else 0
        middle = 0
        offset = None
        if not s.symmetric:
            offset = _shape(((middle - zero) * scale).float(), w, s, axis, group)
        q = (back(q) + shift).to(torch.uint8 if bits == 4 else torch.int8)
        scales = _shape(scale.float(), w, s, axis, group)
        return q.contiguous(), scales, offset, middle + shift, axis, group, bits

    def convert(self, model: GraphModule, node: Node) -> None:
        """Called by torchao's convert in place of its own."""
        source = node.args[0]
        w, name = constant_of(model, source)
        q, scale, offset, *rest = self.quantize(w)
        graph = model.graph
        with graph.inserting_before(node):
            parts: list[Any] = []
            for part, t in (("q", q), ("scale", scale), ("offset", offset)):
                if t is None:
                    parts.append(None)
                    continue
                path = vacant(model, f"{name}_{part}")
                assign(model, path, t)
                parts.append(graph.get_attr(path))
                parts[-1].meta.update(_meta_like(source, t))
            new = graph.call_function(torch.ops.trivet.dequantize.default, (*parts, *rest))
            new.meta.update(source.meta)  # type: ignore[union-attr]
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _meta_like(node: Any, t: Tensor) -> dict[str, Any]:
    mode = node.meta["val"].fake_mode if hasattr(node.meta.get("val"), "fake_mode") else None
    return {"val": mode.from_tensor(t, static_shapes=True)} if mode is not None else {}


def _blocks(w: Tensor, s: Spec, channel: int, axis: int, group: int) -> tuple[Tensor, Any]:
    """w as [blocks, values of a block] and the way back. The last group of a channel is filled up with zeros."""
    if s.granularity == "tensor":
        return w.reshape(1, -1), lambda q: q.reshape(w.shape)
    if not group:
        moved = w.movedim(channel, 0)
        return moved.reshape(moved.shape[0], -1), lambda q: q.reshape(moved.shape).movedim(0, channel)
    moved = w.movedim(axis, -1)
    n = moved.shape[-1]
    filled = torch.nn.functional.pad(moved, (0, -n % group))
    return filled.reshape(-1, group), lambda q: q.reshape(filled.shape)[..., :n].movedim(-1, axis)


def _shape(t: Tensor, w: Tensor, s: Spec, axis: int, group: int) -> Tensor:
    """Scales or offsets, one per block, as trivet::dequantize takes them."""
    if not group:
        return t.reshape(-1)
    shape = [d for i, d in enumerate(w.shape) if i != axis]
    return t.reshape(*shape, -(-w.shape[axis] // group)).movedim(-1, axis).contiguous()


def _choose(x: Tensor, lo: int, hi: int, symmetric: bool, search: bool) -> tuple[Tensor, Tensor]:
    """Scale and zero point of each row of x, [rows, 1]; with search, of the least squared error."""
    few, threads = max(1, CACHED // max(1, x.shape[1])), torch.get_num_threads()
    torch.set_num_threads(1)  # pieces this small are slower on several
    try:
        parts = [_best(rows, lo, hi, symmetric, search) for rows in x.split(few)]  # type: ignore[no-untyped-call]
    finally:
        torch.set_num_threads(threads)
    return torch.cat([s for s, _ in parts]), torch.cat([z for _, z in parts])


def _best(x: Tensor, lo: int, hi: int, symmetric: bool, search: bool) -> tuple[Tensor, Tensor]:
    low, high = x.amin(1, keepdim=True).clamp_max(0), x.amax(1, keepdim=True).clamp_min(0)
    best: list[Tensor] = []
    for shrink in torch.arange(1.0, 1 - SHRINK - 1e-6, -0.025 if search else -1.0).tolist():
        if symmetric:
            # -8 is one more number on the negative side: the larger side may use it.
            scales = [torch.maximum(high, -low) * shrink / hi]
            if search and -lo > hi:
                scales.append(torch.maximum(high / hi, low / lo) * shrink)
            pairs = [(s.clamp_min(LEAST_WEIGHT), torch.zeros_like(s)) for s in scales]
        else:
            s = ((high - low) * shrink / (hi - lo)).clamp_min(LEAST_WEIGHT)
            pairs = [(s, (lo - torch.round(low * shrink / s)).clamp(lo, hi))]
        for s, z in pairs:
            error = ((((torch.round(x / s) + z).clamp(lo, hi) - z) * s - x) ** 2).sum(1, keepdim=True)
            if not best:
                best = [error, s, z]
            else:
                better = error < best[0]
                best = [torch.where(better, a, b) for a, b in zip((error, s, z), best, strict=True)]
    return best[1], best[2]
