"""qconv and qmatmul by definition, in exact integers (schema/ops.fbs), and what their tests share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import exact
import numpy as np
import torch
from heavy import laid_out, place, run

from trivet import native
from trivet.fbs.structs import Op

I8, I16, I32, F32, F16 = torch.int8, torch.int16, torch.int32, torch.float32, torch.float16
ENDS = {I8: (-128, 127), I16: (-32768, 32767)}
Rng = np.random.Generator


def numbers(rng: Rng, shape: Sequence[int], lo: int = -128, hi: int = 127) -> np.ndarray:
    """Random integers, now and then all at one end."""
    kind = rng.integers(8)
    if kind == 0:
        return np.full(shape, lo, np.int64)
    if kind == 1:
        return np.full(shape, hi, np.int64)
    return rng.integers(lo, hi + 1, shape)


def multipliers(rng: Rng, n: int, near: float) -> np.ndarray:
    """[2, n]: multipliers and shifts that bring sums of size `near` to that of a stored number; or some of them extreme; or any
    that kernels may take in 32 bits.
    """
    m = rng.integers(1 << 30, 1 << 31, n)
    s = np.clip(np.round(30 + np.log2(max(near, 1.0)) - 6 + rng.integers(-2, 3, n)), 0, 62).astype(np.int64)
    kind, odd = rng.integers(3), rng.integers(0, 12, n)
    if kind > 0:
        m = np.where(odd == 0, 0, np.where(odd == 1, (1 << 31) - 1, np.where(odd == 2, 1, m)))
    if kind == 1:
        s = np.where(odd == 3, 0, np.where(odd == 4, 62, np.where(odd == 5, 1, s)))
    if kind == 2:
        s = rng.integers(int(rng.choice([33, 34, 60])), 63, n)
    return np.stack([m, s])


def wrap(acc: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Sums of i8 products have 32 bits."""
    return (acc + (1 << 31)) % (1 << 32) - (1 << 31) if dtype == I8 else acc


def rescale(v: np.ndarray, m: np.ndarray, s: np.ndarray) -> np.ndarray:
    """Exact: Python integers."""
    return np.frompyfunc(lambda a, b, c: exact.rescale(int(a), int(b), int(c)), 3, 1)(v, m, s)


def finish(
    acc: np.ndarray, x: torch.dtype, y: torch.dtype, scale: np.ndarray, zero: int, lo: float, hi: float
) -> np.ndarray:
    """Sums (with the bias) [.., N] to stored numbers, or to f32 without an activation."""
    acc = wrap(acc, x)
    if y == F32:
        return acc.astype(np.float32) * scale.astype(np.float32)
    q = rescale(acc, scale[0], scale[1]) + zero
    return np.clip(q, int(lo), int(hi)).astype(np.int64) if q.size else q.astype(np.int64)


def tensor(x: np.ndarray, dtype: torch.dtype, layout: str = "dense") -> torch.Tensor:
    return place(torch.from_numpy(np.ascontiguousarray(x)).to(dtype), layout)


def packed(op: Op, attrs: Any, w: torch.Tensor) -> np.ndarray:
    """The packed weight as the exporter stores it."""
    blob = native.pack(int(op), attrs, w)
    return blob.view(np.int8) if w.dtype == I8 else blob


def result(op: Op, inputs: Sequence[Any], shape: Sequence[int], dtype: torch.dtype, attrs: Any, layout: str = "dense",
           **options: Any) -> np.ndarray:  # fmt: skip
    out = laid_out(shape, dtype, layout)
    run(op, inputs, out, attrs, **options)
    return out.contiguous().numpy()


# ---- convolution --------------------------------------------------------------------------------------------------------
def conv_sums(x: np.ndarray, w: np.ndarray, a: dict[str, Any], out: Sequence[int]) -> np.ndarray:
    """x[N, C, ..] less its zero point, w as of conv; the sums [N, O, ..] for the output's shape, tap by tap."""
    nd, groups = a["nd"], a["groups"]
    kernel = w.shape[2:]
    acc = np.zeros(out, x.dtype)
    n = x.shape[0]
    for tap in np.ndindex(*kernel):
        v = w[(slice(None), slice(None), *tap)]
        if a.get("transposed"):  # [C, O / groups]: cell i goes to i * stride - pad + tap * dilation
            at, ok = [], []
            for d in range(nd):
                i = np.arange(x.shape[2 + d]) * a["stride"][d] - a["pad"][d] + tap[d] * a["dilation"][d]
                good = (i >= 0) & (i < out[2 + d])
                at.append(i[good])
                ok.append(np.nonzero(good)[0])
            part = x[np.ix_(range(n), range(x.shape[1]), *ok)].reshape(n, groups, x.shape[1] // groups, *map(len, ok))
            made = np.einsum("ngc...,gco->ngo...", part, v.reshape(groups, -1, v.shape[1]))
            acc[np.ix_(range(n), range(out[1]), *at)] += made.reshape(n, out[1], *map(len, ok))
        else:
            part = x
            for d in range(nd):
                i = np.arange(out[2 + d]) * a["stride"][d] - a["pad"][d] + tap[d] * a["dilation"][d]
                good = (i >= 0) & (i < x.shape[2 + d])
                size = [1] * (nd + 2)
                size[2 + d] = -1
                part = part.take(np.clip(i, 0, x.shape[2 + d] - 1), axis=2 + d) * good.reshape(size)
            part = part.reshape(n, groups, x.shape[1] // groups, *out[2:])
            acc += np.einsum("ngc...,goc->ngo...", part, v.reshape(groups, -1, v.shape[1])).reshape(out)
    return acc
