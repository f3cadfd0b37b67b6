"""What commands cost: multiply-adds, bytes, and the least time that a machine of known limits needs for them.

The one place that knows how much work an operator is. It looks at sizes, dtypes and attributes only, so the IR's nodes (reports,
choices at export) and the commands of a file (profiles, tuning) are counted alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from trivet.arrays import ITEMSIZE
from trivet.fbs.structs import DType, RegionKind, RnnKind

if TYPE_CHECKING:
    from trivet.machine import Machine
    from trivet.reader import Command, EntryView

Shape = tuple[int, ...]
PRODUCTS = ("matmul", "conv", "qmatmul", "qconv", "attention", "rnn", "qrnn")
MOVES = ("copy", "gather", "qgather", "scatter", "pad", "sort", "resize", "grid_sample", "nonzero", "item", "lookup")
_GATES = {RnnKind.lstm: 4, RnnKind.gru: 3}


def macs(op: str, attrs: Any, inputs: Sequence[Shape | None], outputs: Sequence[Shape]) -> int:
    """Multiply-adds of an operator, as its definition has them (a convolution's taps in the border included); 0 for what has no
    products over an axis.

    Args:
        op: name.
        attrs: the attributes, by name: of the IR or a record of the file.
        inputs: shapes; weights may be packed where the attributes tell their sizes. None: not there.
        outputs: shapes.
    """
    if op not in PRODUCTS:
        return 0
    x, y = inputs[0], outputs[0]
    assert x is not None
    if op in ("conv", "qconv"):
        kernel = [int(k) for k in _get(attrs, "kernel")][: int(_get(attrs, "nd"))]
        if not kernel or not kernel[0]:
            kernel = list(inputs[1][2:])  # type: ignore[index]
        cells = (*x, *kernel, y[1]) if _get(attrs, "transposed") else (*y, *kernel, x[1])
        return prod(cells) // int(_get(attrs, "groups"))
    if op in ("matmul", "qmatmul"):
        return prod(y) * x[-1]
    if op == "attention":
        more = inputs[4] if len(inputs) > 4 else None
        keys = inputs[1][-2] + (more[-2] if more is not None else 0)  # type: ignore[index]
        pairs = sum(min(i + 1, keys) for i in range(x[-2])) if _get(attrs, "causal") else x[-2] * keys
        return prod(x[:-2]) * pairs * (x[-1] + y[-1])
    hidden = outputs[2][-1] if len(outputs) > 2 else y[-1]
    gates = _GATES.get(RnnKind(int(_get(attrs, "kind"))), 1)
    projected = hidden * y[-1] if len(inputs) > 7 and inputs[7] is not None else 0
    return prod(y[:-1]) * (gates * hidden * (x[-1] + y[-1]) + projected)


def _get(attrs: Any, name: str) -> Any:
    return attrs[name] if isinstance(attrs, np.void) else getattr(attrs, name)


@dataclass(frozen=True, slots=True)
class Cost:
    """Work of one command, once.

    Attributes:
        macs: multiply-adds.
        unit: whose rate bounds them: "f32", "bf16", "i8"; "" without any.
        weights, read, written: bytes of constants, of other inputs, of outputs. What several elements share counts once.
    """

    macs: int
    unit: str
    weights: int
    read: int
    written: int

    @property
    def bytes(self) -> int:
        return self.weights + self.read + self.written


def cost(entry: EntryView, command: Command, dims: Sequence[int]) -> Cost:
    """The work of a command.

    Args:
        entry: that it is of.
        command: one of entry.commands.
        dims: present values of the entry's dimension table.
    """
    shapes = [None if v is None else _shape(entry, v, dims) for v in command.inputs]
    outs = [_shape(entry, v, dims) for v in command.outputs]
    written = sum(_bytes(entry, v, dims) for v in command.outputs)
    weights = read = 0
    for i, v in enumerate(command.inputs):
        if v is None or v in command.inputs[:i]:
            continue
        size = _bytes(entry, v, dims)
        if i == 0 and command.op == "gather":  # the rows that are taken
            size = min(size, written)
        elif i == 0 and command.op == "qgather":
            size = min(size, prod(outs[0]) * command.bits // 8)
        if entry.regions[int(entry.storages[int(entry.values[v]["storage"])]["region"])]["kind"] == RegionKind.const_:
            weights += size
        else:
            read += size
    n = macs(command.op, command.attrs, shapes, outs) if command.attrs is not None else 0
    return Cost(n, _unit(entry, command) if n else "", weights, read, written)


def _unit(entry: EntryView, command: Command) -> str:
    x = DType(int(entry.values[command.inputs[0]]["dtype"]))
    if x in (DType.i8, DType.i16) or (command.op == "qmatmul" and command.attrs["dynamic"]):
        return "i8"
    return "bf16" if x == DType.bf16 else "f32"


def _shape(entry: EntryView, value: int, dims: Sequence[int]) -> Shape:
    row = entry.values[value]
    return tuple(int(dims[int(d)]) for d in row["dim"][: int(row["rank"])])


def _bytes(entry: EntryView, value: int, dims: Sequence[int]) -> int:
    """Bytes of the elements that differ in place."""
    row = entry.values[value]
    n = ITEMSIZE[DType(int(row["dtype"]))]
    for d, s in zip(row["dim"][: int(row["rank"])], row["stride"], strict=False):
        size = int(dims[int(d)])
        n *= size if size == 0 or int(dims[int(s)]) != 0 else 1
    return n


def static_dims(entry: EntryView) -> list[int]:
    """The dimension table where all sizes are fixed; the least values elsewhere."""
    return [int(r["min"]) for r in entry.dims]


@dataclass(frozen=True, slots=True)
class Limit:
    """The least time that a machine needs for a command. seconds: of what takes longest; by: "f32", "bf16", "i8" or "memory"."""

    seconds: float
    by: str


def limit(work: Cost, machine: Machine, weights: int) -> Limit:
    """Multiply-adds at the machine's rate and bytes at the bandwidth of the memory that they lie in, whichever takes longer.

    Args:
        work: of one command.
        machine: measured limits.
        weights: bytes of all constants that a run reads; where they do not fit in a cache, it holds none of them till the next run.
    """
    inner = work.read + work.written
    moved = work.weights / machine.bandwidth(max(weights, work.weights)) + inner / machine.bandwidth(inner)
    rate = machine.rate(work.unit) if work.macs else 0.0
    computed = 2 * work.macs / rate if rate else 0.0
    return Limit(computed, work.unit) if computed >= moved and work.macs else Limit(moved, "memory")
