"""What the tests of quantised kernels share: exact arithmetic as schema/ops.fbs defines it, choices of numbers, runs in any layout.

The arithmetic is that of Python's integers (or int64, where that is exact).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from basic import Op, native
from hypothesis import strategies as st

LIMITS = {torch.int8: (-128, 127), torch.int16: (-32768, 32767)}
STORED = tuple(LIMITS)
TILES = (0, 1, 3, 7)
MULTIPLIERS = (0, 1, 3, 0x8000, 0xFFFF, 0x7FFF7FFF, 0x7FFF8000, 2**30, 2**31 - 1)
SHIFTS = (0, 1, 16, 17, 31, 40, 41, 47, 62)


# ---- the arithmetic of schema/ops.fbs --------------------------------------------------------------------------------------
def rescale(v: Any, m: int, s: int) -> Any:
    """Of Python integers: int, or arrays with dtype object."""
    return (v * m + (1 << (s - 1))) >> s if s else v * m


def divide(v: Any, d: Any) -> Any:
    return (2 * v + d) // (2 * d)


def big(x: torch.Tensor) -> Any:
    """An array of Python integers."""
    return x.numpy().astype(object)


def stored(v: Any, y_zero: int, lo: int, hi: int, dtype: torch.dtype) -> torch.Tensor:
    bounded = np.minimum(np.maximum(np.asarray(v, object) + y_zero, lo), hi)
    return torch.from_numpy(np.asarray(bounded, object).astype(np.int64)).to(dtype)


def half_even(x: torch.Tensor, scale: float) -> Any:
    """x * scale in float32, then to the nearest integer; NaN is 0, infinities are large."""
    p = (x * torch.tensor(scale, dtype=torch.float32)).double().nan_to_num(0.0, 1e9, -1e9)
    return np.clip(np.rint(p.numpy()), -1e9, 1e9).astype(np.int64)


def integers(shape: Sequence[int], dtype: torch.dtype, seed: int = 0, spread: float = 1.0) -> torch.Tensor:
    """Values from the whole range (or a part of it around the middle), with the ends among them."""
    lo, hi = (int(v * spread) for v in LIMITS[dtype])
    x = torch.randint(lo, hi + 1, tuple(shape), generator=torch.Generator().manual_seed(seed)).to(dtype)
    flat = x.view(-1)
    flat[: min(2, x.numel())] = torch.tensor([lo, hi], dtype=dtype)[: min(2, x.numel())]
    return x


# ---- choices of numbers ----------------------------------------------------------------------------------------------------
def zeros(dtype: torch.dtype) -> st.SearchStrategy[int]:
    lo, hi = LIMITS[dtype]
    return st.sampled_from([0, 0, lo, hi, lo + 1, hi - 1]) | st.integers(lo, hi)


def bounds(draw: Any, dtype: torch.dtype) -> tuple[int, int]:
    if draw(st.integers(0, 2)):
        return LIMITS[dtype]
    lo, hi = sorted((draw(zeros(dtype)), draw(zeros(dtype))))
    return lo, hi


multipliers = st.sampled_from(MULTIPLIERS) | st.integers(0, 2**31 - 1) | st.integers(0, 2**16)
shifts = st.sampled_from(SHIFTS) | st.integers(0, 62) | st.integers(24, 40)
shapes = st.lists(st.integers(1, 4) | st.sampled_from([0, 1, 17, 70]), max_size=4).filter(lambda s: math.prod(s) < 4000)


def layout(draw: Any, shape: Sequence[int], dtype: torch.dtype, broadcast: bool = False) -> torch.Tensor:
    """A tensor in memory of any order, with steps of either sign (none negative, torch has none) and gaps."""
    order = draw(st.permutations(range(len(shape))))
    step = [draw(st.sampled_from([1, 1, 1, 2, 3])) for _ in shape]
    base = torch.zeros([shape[i] * step[i] for i in order], dtype=dtype)
    view = base[tuple(slice(None, None, step[i]) for i in order)] if shape else base
    view = view.permute([order.index(i) for i in range(len(shape))])
    if broadcast:
        for axis in range(len(shape)):
            if shape[axis] > 1 and draw(st.integers(0, 4)) == 0:
                view = view.narrow(axis, 0, 1).expand(*shape)
    return view


def placed(draw: Any, x: torch.Tensor) -> torch.Tensor:
    view = layout(draw, x.shape, x.dtype)
    view.copy_(x)
    return view


def run(op: Op, inputs: Sequence[torch.Tensor], attrs: Any, want: torch.Tensor, draw: Any) -> None:
    """Once, in memory layouts and with tiles that are drawn."""
    out = layout(draw, want.shape, want.dtype)
    native.run_op(op, [placed(draw, x) for x in inputs], [out], attrs, tiles=draw(st.sampled_from([0, 1, 2, 5, 13])))
    assert torch.equal(out, want)
