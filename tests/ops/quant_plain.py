"""The arithmetic of quantised operators in plain Python integers, written from the comments of schema/ops.fbs, and what tests of
their kernels share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from exact import divide, rescale
from heavy import isa_levels, laid_out, place

from trivet import native
from trivet.ir.types import Quant, per_tensor
from trivet.quantize.report import sqnr

__all__ = ["LAYOUTS", "clamp", "command", "divide", "quantise", "rescale", "sqnr", "stored"]

LAYOUTS = ("dense", "last", "gaps", "flip")


def clamp(v: int, lo: int, hi: int) -> int:
    return min(max(v, lo), hi)


def stored(rng: np.random.Generator, shape: Sequence[int], dtype: Any = np.int8, ends: float = 0.1) -> np.ndarray:
    """Random stored numbers; a share `ends` of them are the dtype's ends."""
    info = np.iinfo(dtype)
    x = rng.integers(info.min, info.max + 1, size=tuple(shape))
    pick = rng.random(tuple(shape))
    return np.where(pick < ends / 2, info.min, np.where(pick < ends, info.max, x)).astype(dtype)


def command(
    op: int,
    inputs: Sequence[Any],
    wants: Sequence[np.ndarray],
    attrs: Any,
    *,
    layout: str = "dense",
    other: str = "dense",
    strided: Sequence[int] = (0,),
    tiles: int = 0,
    tmp: int = 0,
) -> list[np.ndarray]:
    """Runs the command on every instruction set of the machine; all must agree. Returns the outputs.

    inputs in `strided` get the layout, outputs (shaped as wants) the other one. tmp: bytes of scratch.
    """
    ins = [
        None if x is None else place(torch.from_numpy(x), layout if i in strided else "dense")
        for i, x in enumerate(inputs)
    ]
    found: list[list[np.ndarray]] = []
    for isa in isa_levels(int(op)):
        outs = [laid_out(w.shape, torch.from_numpy(w).dtype, other) for w in wants]
        room = [np.full(tmp, 0xAA, np.uint8)] if tmp else []
        native.run_op(int(op), ins, outs, attrs, tmp=room, tiles=tiles, isa=isa)
        found.append([y.numpy() for y in outs])
    for more in found[1:]:
        for x, y in zip(found[0], more):
            np.testing.assert_array_equal(x, y)
    return found[0]


def quantise(
    x: torch.Tensor, low: float | None = None, high: float | None = None
) -> tuple[np.ndarray, Quant, torch.Tensor]:
    """x as affine i8 over its range (or the one given): stored numbers, their Quant, the real numbers that they stand for."""
    low = min(0.0, float(x.min()) if low is None else low)
    high = max(0.0, float(x.max()) if high is None else high)
    scale = float(np.float32(max((high - low) / 255, 1e-9)))
    zero = round(-128 - low / scale)
    q = torch.clamp(torch.round(x.double() / scale) + zero, -128, 127)
    return q.to(torch.int8).numpy(), per_tensor(scale, zero), (q - zero) * scale
