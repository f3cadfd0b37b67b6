"""Calibration data: batches as the user gives them become leaves of calls that fit the captured graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from trivet.error import Error
from trivet.tracing import first_line

if TYPE_CHECKING:
    from trivet.quantize.fxgraph import Capture

REMEDY = "calibrate is an iterable of argument tuples, (args, kwargs) pairs, or tensors for a model of one argument"


def batches(capture: Capture, given: Any, entry: str) -> Iterator[tuple[int, list[Any]]]:
    """(number of the batch from 1, leaves of a call).

    A batch with k times the rows of a fixed batch size becomes k calls.

    Raises:
        Error: data that the model does not take.
    """
    if isinstance(given, (str, bytes, torch.Tensor, Mapping)) or not isinstance(given, Iterable):
        raise Error(f"calibrate for entry {entry!r} is a {type(given).__name__}", remedy=REMEDY)
    for number, batch in enumerate(_taken(given, entry), 1):
        where = f"calibration batch {number}" + ("" if entry == "forward" else f" of entry {entry!r}")
        for leaves in _split(capture, _leaves(capture, batch, where), where):
            yield number, leaves


def _taken(given: Iterable[Any], entry: str) -> Iterator[Any]:
    """The batches; what the user's own iterator raises says where it was."""
    number = 0
    try:
        for batch in given:
            number += 1
            yield batch
    except Error:
        raise
    except Exception as e:
        raise Error(f"calibrate for entry {entry!r} fails behind batch {number}: {first_line(e)}",
                    remedy="see what list(calibrate) does") from e  # fmt: skip


def _leaves(capture: Capture, batch: Any, where: str) -> list[Any]:
    """The leaves of a batch, in whichever way it is written."""
    if not isinstance(batch, (tuple, list)):
        batch = (batch,)
    ways: list[tuple[Any, Mapping[str, Any]]] = [(tuple(batch), {})]
    if len(batch) == 2 and isinstance(batch[0], (tuple, list)) and isinstance(batch[1], Mapping):
        ways.append((tuple(batch[0]), batch[1]))
    first = None
    for args, kwargs in ways:
        try:
            return [torch.as_tensor(t) if type(t).__module__ == "numpy" else t for t in capture.flatten(args, kwargs)]
        except Error as e:
            first = first or e
    assert first is not None
    count = len(pytree.tree_leaves(batch))
    raise Error(f"{where} does not fit the model: {first.reason} ({count} values given)", remedy=REMEDY) from None


def _split(capture: Capture, leaves: list[Any], where: str) -> list[list[Any]]:
    """Checks dtypes and sizes; takes a larger batch apart where the model has a fixed one."""
    wants = [n.meta.get("val") for n in capture.module.graph.nodes if n.op == "placeholder"]
    names = [n.name for n in capture.module.graph.nodes if n.op == "placeholder"]
    times = set()
    for name, want, got in zip(names, wants, leaves, strict=True):
        if not isinstance(want, torch.Tensor):
            continue
        text = (
            f"{str(want.dtype).removeprefix('torch.')} {[str(d) if not isinstance(d, int) else d for d in want.shape]}"
        )
        if not isinstance(got, torch.Tensor):
            raise Error(f"{where}: input {name!r} is {type(got).__name__}, {text} expected", remedy=REMEDY)
        fits = (
            got.dtype == want.dtype
            and got.dim() == want.dim()
            and got.layout == want.layout
            and got.device == want.device
        )
        for axis, (d, size) in enumerate(zip(want.shape, got.shape, strict=False)):
            if not isinstance(d, int) or d == size:
                continue
            if axis or not d or size % d:
                fits = False
            else:
                times.add(size // d)
        if not fits:
            kind = "" if got.layout == want.layout else f"{str(got.layout).removeprefix('torch.')} "
            on = "" if got.device == want.device else f" on {got.device}"
            have = f"{kind}{str(got.dtype).removeprefix('torch.')} {list(got.shape)}{on}"
            raise Error(f"{where}: input {name!r} is {have}, the model was captured with {text}",
                        remedy="give data like the example arguments, or export with dynamic_shapes")  # fmt: skip
    if not times:
        return [leaves]
    if len(times) > 1 or not _all_scaled(wants, leaves, next(iter(times))):
        raise Error(f"{where}: its inputs have different batch sizes", remedy="give data like the example arguments")
    k = times.pop()
    parts = [list(t.chunk(k)) if isinstance(w, torch.Tensor) else [t] * k for w, t in zip(wants, leaves, strict=True)]
    return [list(row) for row in zip(*parts, strict=True)]


def _all_scaled(wants: list[Any], leaves: list[Any], k: int) -> bool:
    pairs = [(w, t) for w, t in zip(wants, leaves, strict=True) if isinstance(w, torch.Tensor)]
    return all(t.dim() and isinstance(w.shape[0], int) and t.shape[0] == k * w.shape[0] for w, t in pairs)
