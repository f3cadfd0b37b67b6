"""The metric's gate: a program may lose at most max_drop; the most harmful layers are kept in higher precision until that holds.

The metric runs on the program itself, through the C runtime, so that what is judged is what is shipped.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any

from trivet.error import Error
from trivet.quantize.report import Report, Step, decibel_text
from trivet.tracing import first_line

if TYPE_CHECKING:
    from trivet.program import Program

SHARE = 0.25  # of the layers may be kept: beyond it the recipe or its data are wrong, not single layers
NAMED = 5  # layers that an error names
Metric = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A quantised layer that could be kept in higher precision. name: what build() takes; db: the lower, the more harmful."""

    name: str
    text: str
    db: float


@dataclass(slots=True)
class Built:
    """One quantised model, lowered."""

    program: Program
    report: Report
    layers: Callable[[], list[Candidate]]  # asked for only when the program loses too much


Build = Callable[[Sequence[str], str], Built]  # (names of layers to keep, their precision)


# ---- the float model as the metric sees it ------------------------------------------------------------------------------
@dataclass(slots=True)
class Ranges:
    """Least and largest value of every floating-point input: {(entry, input): (least, largest)}."""

    seen: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)

    def add(self, entry: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        import torch
        from torch.utils import _pytree as pytree

        for path, t in pytree.tree_leaves_with_path((tuple(args), dict(kwargs))):
            t = torch.as_tensor(t) if hasattr(t, "__array__") else t
            if isinstance(t, torch.Tensor) and t.is_floating_point() and t.numel():
                key = (entry, pytree.keystr(path[1:]))
                lo, hi = self.seen.get(key, (math.inf, -math.inf))
                self.seen[key] = (min(lo, float(t.min())), max(hi, float(t.max())))

    def note(self, entry: str, batches: Iterable[Any]) -> Iterator[Any]:
        """The calibration batches as they are, their ranges noted on the way. A batch: args, (args, kwargs), or one tensor."""
        for batch in batches:
            args, kwargs = split_batch(batch)
            self.add(entry, args, kwargs)
            yield batch

    def unlike(self, other: Ranges, narrow: float = 2.0) -> list[str]:
        """Inputs whose span here is far from that of other: less than 1 / narrow of it, or more than eight times as wide."""
        out = []
        for key, (lo, hi) in self.seen.items():
            a, b = other.seen.get(key, (lo, hi))
            here, there = max(abs(lo), abs(hi)), max(abs(a), abs(b))
            if there > narrow * here or here > 8 * there:
                out.append(f"input {key[1]} of {key[0]} goes from {lo:.3g} to {hi:.3g} in the calibration data, from {a:.3g} to {b:.3g} "
                           "where the metric runs")  # fmt: skip
        return out


def split_batch(batch: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """(args, kwargs) of a calibration batch: a tuple of arguments, (args, kwargs), or a single tensor."""
    if isinstance(batch, (tuple, list)):
        if len(batch) == 2 and isinstance(batch[0], (tuple, list)) and isinstance(batch[1], Mapping):
            return tuple(batch[0]), batch[1]
        return tuple(batch), {}
    return (batch,), {}


class Reference:
    """The float model with the calls of a loaded Net: entries as attributes, reset(). Notes the ranges of its inputs.

    Args:
        entries: module by entry. They are copied together, so that shared buffers stay shared and the caller's keep their content.
    """

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self._modules = copy.deepcopy(dict(entries))
        for m in self._modules.values():
            m.eval()
        self._state = [(b, b.detach().clone()) for m in self._modules.values() for b in m.buffers()]
        self.ranges = Ranges()

    def entry(self, name: str) -> Callable[..., Any]:
        """The call of one entry."""
        module = self._modules[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            import torch

            self.ranges.add(name, args, kwargs)
            with torch.no_grad():
                return module(*args, **kwargs)

        return call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.entry("forward" if "forward" in self._modules else next(iter(self._modules)))(*args, **kwargs)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in self.__dict__.get("_modules", {}):
            return self.entry(name)
        raise AttributeError(f"the model has no entry {name!r}")

    def reset(self) -> None:
        """Buffers back to their first values."""
        for now, first in self._state:
            now.detach().copy_(first)


# ---- the search ---------------------------------------------------------------------------------------------------------
def score(metric: Metric, net: Any, what: str) -> float:
    """metric(net) as a finite number.

    Raises:
        Error: it is none.
    """
    import torch

    try:
        with torch.no_grad():
            value = metric(net)
    except Error:
        raise
    except Exception as e:
        raise Error(f"the metric fails on {what}: {first_line(e)}",
                    remedy="it is called with a net, which it calls as the model is called") from e  # fmt: skip
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise Error(f"the metric of {what} is {type(value).__name__}; a number is expected, higher is better") from None
    if not math.isfinite(number):
        raise Error(f"the metric of {what} is {number}", remedy="the metric must be a finite number for any net")
    return number


def search(
    build: Build,
    reference: Reference,
    metric: Metric,
    max_drop: float,
    *,
    precisions: Sequence[str] = ("float",),
    calibration: Ranges | None = None,
) -> Built:
    """Builds until metric(float model) - metric(program) <= max_drop.

    First as the recipe says. Then the most harmful layers are kept in growing numbers (1, 2, 4, .. at most SHARE of them), in each of
    the precisions in turn, and when that holds, as few of them as still do (by bisection).

    Args:
        build: makes a program; its layers are those that are quantised without exceptions.
        reference: the float model.
        metric: gets something that is called as the model is (entries as attributes, reset()); higher is better.
        max_drop: absolute, in the metric's units.
        precisions: of kept layers, the cheapest first; the last one is the most precise.
        calibration: ranges of the calibration data, for the message.

    Raises:
        Error: naming the worst layers, when max_drop does not hold; a metric that is no number.
    """
    from trivet.runtime import load

    if not isinstance(max_drop, Real) or not max_drop >= 0:
        raise Error(f"max_drop must be a number from 0 on, got {max_drop!r}")
    wanted = score(metric, reference, "the float model")
    steps: list[Step] = []

    def attempt(kept: Sequence[Candidate], precision: str) -> tuple[Built, bool]:
        built = build([c.name for c in kept], precision)
        with load(built.program) as net:
            got = score(metric, net, "the quantised program")
        steps.append(Step([c.text for c in kept], precision if kept else "", got, bool(wanted - got <= max_drop)))
        built.report.search, built.report.score, built.report.reference = steps, got, wanted
        return built, steps[-1].holds

    first, holds = attempt((), "")
    if holds:
        return first
    ranked = sorted(first.layers(), key=lambda c: c.db)
    most = max(1, int(SHARE * len(ranked))) if ranked else 0
    if calibration is not None and calibration.unlike(reference.ranges, narrow=8.0):
        most = 0  # the data are wrong, not single layers: keeping some of them would hide it
    # The most that may be done: when that is not enough, nothing in between is.
    best, holds = attempt(ranked[:most], precisions[-1]) if most else (first, False)
    if not holds:
        raise _refusal(steps, ranked, most, precisions[-1], max_drop, wanted, calibration, reference)
    for precision in precisions:
        last = precision == precisions[-1]
        low, high = 0, most if last else 0
        n = 1
        while n < most or (n == most and not last):
            built, holds = attempt(ranked[:n], precision)
            if holds:
                best, high = built, n
                break
            low, n = n, min(2 * n, most) if n < most else most + 1
        if not high:
            continue
        while high - low > 1:
            middle = (low + high) // 2
            built, holds = attempt(ranked[:middle], precision)
            if holds:
                best, high = built, middle
            else:
                low = middle
        break
    return best


def _refusal(steps: Sequence[Step], ranked: Sequence[Candidate], most: int, precision: str, max_drop: float, wanted: float,
             calibration: Ranges | None, reference: Reference) -> Error:  # fmt: skip
    kept = (
        f"; with the {most} most harmful of {len(ranked)} layers in {precision} it is {steps[-1].score:.6g}"
        if most
        else ""
    )
    worst = ", ".join(f"{c.text} ({decibel_text(c.db)} dB)" for c in ranked[:NAMED]) or "no layer is quantised"
    unlike = calibration.unlike(reference.ranges) if calibration is not None else []
    strange = "".join(f"; {line}" for line in unlike)
    remedy = "calibrate with data like those that the metric uses" if unlike else "calibrate with more or other data"
    return Error(
        f"quantised, the metric falls from {wanted:.6g} to {steps[0].score:.6g}, max_drop allows {max_drop:g}{kept}. "
        f"Worst layers: {worst}{strange}",
        remedy=f"{remedy}; try quantize='w8a16', or train on with trivet.quantize.prepare_qat",
    )
