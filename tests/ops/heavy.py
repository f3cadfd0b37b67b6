"""What the tests of the heavy kernels share: attribute structs, layouts, runs on every ISA, comparison with torch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from trivet import native
from trivet.fbs.structs import STRUCTS, Op

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@functools.cache
def isa_levels(op: int) -> tuple[str, ...]:
    """The levels of this machine at which the operator has other kernels, "ref" first."""
    return tuple(native.isa_levels(op))


def struct(name: str, **fields: Any) -> Any:
    """An op's attributes; what is not given is 0."""
    s = np.zeros((), STRUCTS[name])
    for key, value in fields.items():
        if np.ndim(value) == 1:
            s[key][: len(value)] = value
        else:
            s[key] = value
    return s


def laid_out(shape: Sequence[int], dtype: torch.dtype, layout: str) -> torch.Tensor:
    """An uninitialised-looking (NaN or 77) tensor: "dense", "last" (axis 1 innermost), "gaps" (a window of a larger one),
    "flip" (axes of memory reversed)."""
    value = float("nan") if dtype.is_floating_point else 77
    rank = len(shape)
    if layout == "dense" or rank < 2:
        return torch.full(tuple(shape), value, dtype=dtype)
    if layout == "last":
        order = [0, *range(2, rank), 1]
    elif layout == "flip":
        order = list(range(rank))[::-1]
    else:
        big = torch.full([n + 2 for n in shape], value, dtype=dtype)
        return big[tuple(slice(1, 1 + n) for n in shape)]
    back = [order.index(i) for i in range(rank)]
    return torch.full([shape[i] for i in order], value, dtype=dtype).permute(back)


def place(x: torch.Tensor, layout: str) -> torch.Tensor:
    """x's values in another memory layout."""
    out = laid_out(x.shape, x.dtype, layout)
    out.copy_(x)
    return out


def packed(op: int, attrs: Any, weight: torch.Tensor) -> Any:
    """A packed weight: float32 in numpy, halves in torch."""
    blob = native.pack(op, attrs, weight)
    return blob.view(np.float32) if weight.dtype == torch.float32 else torch.from_numpy(blob).view(weight.dtype)


def tolerance(dtype: torch.dtype) -> float:
    return {torch.float32: 2e-5, torch.float64: 1e-12, torch.float16: 4e-3, torch.bfloat16: 3e-2}.get(dtype, 0.0)


def check(got: torch.Tensor, want: torch.Tensor, *, scale: float | None = None, factor: float = 1.0) -> None:
    """Largest difference relative to the largest value (or to `scale`), NaN and infinities alike."""
    assert got.shape == want.shape
    if want.numel() == 0:
        return
    if not want.dtype.is_floating_point:
        assert torch.equal(got, want)
        return
    a, b = got.double(), want.double()
    assert torch.equal(a.isnan(), b.isnan()), "NaN in other places"
    inf = b.isinf()
    assert torch.equal(a[inf], b[inf])
    ok = ~(inf | b.isnan())
    if not bool(ok.any()):
        return
    size = max(float(b[ok].abs().max()), 1e-3) if scale is None else scale
    error = float((a[ok] - b[ok]).abs().max()) / size
    assert error <= tolerance(want.dtype) * factor, f"error {error:.2e}"


def run(op: Op, inputs: Sequence[Any], out: Any, attrs: Any, **options: Any) -> Any:
    """Runs the op into `out` (a tensor or a list of them) and returns it."""
    native.run_op(int(op), inputs, out if isinstance(out, list) else [out], attrs, **options)
    return out
