"""Writes into a part of a tensor, triangles and diagonals, borders, and moves between blocks and channels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trivet.aten.common import Handler, result_type, table
from trivet.aten.shape import bounded
from trivet.fbs.structs import DType, IndexKind, PadMode, ReduceKind
from trivet.ir import ops
from trivet.ir.builder import Builder
from trivet.ir.dim import Dim
from trivet.ir.expr import Expr
from trivet.ir.graph import Value

Size = int | Dim


# ---- writes into a part -------------------------------------------------------------------------------------------------
def _put(b: Builder, x: Value, src: Value, dim: int, start: Size, size: Size, step: int) -> Value:
    """x with size elements along dim replaced."""
    dim %= len(x.shape)
    src = b.expand(b.cast(src, x.dtype), (*x.shape[:dim], size, *x.shape[dim + 1 :]))
    if size == 0:
        return x
    if start == 0 and step == 1 and size == x.shape[dim]:
        return src
    if step == 1 and isinstance(start, int) and x.state is None:
        rest = x.shape[dim] - start - size
        parts = [b.slice(x, dim, 0, start), src, b.slice(x, dim, start + size, rest)]
        return b.concat([p for p in parts if p.shape[dim] != 0], dim)
    e = Expr()
    index = b.expression(e, e.iota(0) * step + start, DType.i64, (size,))
    return b.scatter(IndexKind.take, x, dim, index, src)


def _slice_scatter(b: Builder, meta: Any, x: Value, src: Value, dim: int = 0, start: Size | None = None,
                   end: Size | None = None, step: int = 1) -> Value:  # fmt: skip
    n = x.shape[dim]
    first, last = bounded(b, start, n, 0), bounded(b, end, n, n)
    size = src.shape[dim]
    if size == 1:  # may stand for more
        count = last - first
        size = max(0, -(-count // step)) if isinstance(count, int) else size
    return _put(b, x, src, dim, first, size, step)


def _select_scatter(b: Builder, meta: Any, x: Value, src: Value, dim: int, index: Size) -> Value:
    at = index + x.shape[dim] if isinstance(index, int) and index < 0 else index
    return _put(b, x, b.unsqueeze(src, dim), dim, at, 1, 1)


def _diagonal_scatter(b: Builder, meta: Any, x: Value, src: Value, offset: int = 0, dim1: int = 0,
                      dim2: int = 1) -> Value:  # fmt: skip
    rank = len(x.shape)
    row, column = dim1 % rank, dim2 % rank
    along, across = (row, column) if offset >= 0 else (column, row)  # the axis on which src has its place
    rest = x.shape[along] - src.shape[-1]
    if not isinstance(rest, int):
        raise b.error("a diagonal of a dynamic size", "make the sizes of both axes static")
    wide = b.pad(b.cast(src, x.dtype), (0,) * (rank - 1), (*(0 for _ in range(rank - 2)), rest))
    order = [i for i in range(rank) if i not in (row, column)]  # the axes of src but its last
    wide = b.unsqueeze(wide, rank - 1)
    wide = b.permute(wide, [[*order, along, across].index(i) for i in range(rank)])
    e = Expr()
    hit = (e.iota(column) - e.iota(row)).equal(offset)
    return b.expression(e, hit.select(e.load(wide), e.load(x)), x.dtype, x.shape)


def _as_strided_scatter(b: Builder, meta: Any, x: Value, src: Value, size: Sequence[Size], stride: Sequence[Size],
                        storage_offset: Size | None = None) -> Value:  # fmt: skip
    import torch

    numbers = [*size, *stride, storage_offset or 0, x.type.count]
    if not all(isinstance(n, int) for n in numbers) or not meta.is_contiguous():
        raise b.error("as_strided_scatter of this tensor", "write with slices, select() or diagonal()")
    places = torch.as_strided(torch.arange(x.type.count), list(size), list(stride), storage_offset or 0)  # type: ignore[arg-type]
    flat, index = b.reshape(x, (x.type.count,)), b.const(places.reshape(-1).clone())
    updates = b.reshape(b.cast(src, x.dtype), index.shape)
    return b.reshape(b.scatter(IndexKind.elements, flat, 0, index, updates), x.shape)


# ---- triangles and diagonals --------------------------------------------------------------------------------------------
def _triangle(lower: bool) -> Callable[..., Value]:
    def run(b: Builder, meta: Any, x: Value, diagonal: int = 0) -> Value:
        e = Expr()
        rank = len(x.shape)
        d = e.iota(rank - 1) - e.iota(rank - 2)
        keep = d <= diagonal if lower else d >= diagonal
        return b.expression(e, keep.select(e.load(x), 0), x.dtype, x.shape)

    return run


def _diag_embed(b: Builder, meta: Any, x: Value, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Value:
    rank = len(x.shape) + 1
    size = x.shape[-1] + abs(offset)
    wide = b.pad(x, (0,) * (rank - 1), (*(0 for _ in range(rank - 2)), abs(offset)))
    wide = b.unsqueeze(wide, rank - 1 if offset >= 0 else rank - 2)
    e = Expr()
    hit = (e.iota(rank - 1) - e.iota(rank - 2)).equal(offset)
    y = b.expression(e, hit.select(e.load(wide), 0), x.dtype, (*x.shape[:-1], size, size))
    row, column = dim1 % rank, dim2 % rank
    rest = iter(range(rank - 2))
    return b.permute(y, [rank - 2 if i == row else rank - 1 if i == column else next(rest) for i in range(rank)])


def _diagflat(b: Builder, meta: Any, x: Value, offset: int = 0) -> Value:
    return _diag_embed(b, meta, b.reshape(x, (x.type.count,)), offset)


def _trace(b: Builder, meta: Any, x: Value) -> Value:
    return b.reduce(ReduceKind.sum, b.diagonal(x, 0, 0, 1), [0], dtype=b.dtype(meta))


# ---- borders ------------------------------------------------------------------------------------------------------------
_MODES = {"constant": PadMode.constant, "reflect": PadMode.reflect, "replicate": PadMode.replicate,
          "circular": PadMode.circular}  # fmt: skip


def pad(b: Builder, x: Value, amounts: Sequence[Size], mode: PadMode, value: float = 0.0) -> Value:
    """amounts: (low, high) of the last axis, then of the one before, ..."""
    rank = len(x.shape)
    lo, hi = [0] * rank, [0] * rank
    for i in range(len(amounts) // 2):
        axis = rank - 1 - i
        for side, amount in ((lo, amounts[2 * i]), (hi, amounts[2 * i + 1])):
            if isinstance(amount, Dim):
                x = _symbolic_border(b, x, axis, amount, side is lo, mode, value)
            else:
                side[axis] = int(amount)
    if mode == PadMode.constant:
        return b.pad(x, lo, hi, mode, value)
    if mode == PadMode.circular:  # wraps what is left; the other modes look at the whole input
        x = _cropped(b, x, lo, hi)
    x = b.pad(x, [max(n, 0) for n in lo], [max(n, 0) for n in hi], mode)
    return x if mode == PadMode.circular else _cropped(b, x, lo, hi)


def _cropped(b: Builder, x: Value, lo: Sequence[int], hi: Sequence[int]) -> Value:
    """Negative amounts taken off."""
    for axis, (first, last) in enumerate(zip(lo, hi, strict=True)):
        x = b.slice(x, axis, max(-first, 0), x.shape[axis] - max(-first, 0) - max(-last, 0))
    return x


def _symbolic_border(b: Builder, x: Value, axis: int, amount: Dim, low: bool, mode: PadMode, value: float) -> Value:
    if mode != PadMode.constant or b.least(amount) < 0:
        raise b.error(f"a border of {amount} elements", "pad by a fixed amount, or by a size that cannot be negative")
    border = b.full((*x.shape[:axis], amount, *x.shape[axis + 1 :]), value, x.dtype)
    return b.concat([border, x] if low else [x, border], axis)


def _constant_pad(b: Builder, meta: Any, x: Value, amounts: Sequence[Size], value: float = 0) -> Value:
    return pad(b, x, amounts, PadMode.constant, value)


def _pad(b: Builder, meta: Any, x: Value, amounts: Sequence[Size], mode: str = "constant",
         value: float | None = None) -> Value:  # fmt: skip
    return pad(b, x, amounts, _MODES[mode], 0.0 if value is None else value)


def _pad_mode(mode: PadMode) -> Callable[..., Value]:
    def run(b: Builder, meta: Any, x: Value, amounts: Sequence[Size]) -> Value:
        return pad(b, x, amounts, mode)

    return run


def _pair(x: int | Sequence[int]) -> tuple[int, int]:
    return (x, x) if isinstance(x, int) else (x[0], x[-1])


def _im2col(b: Builder, meta: Any, x: Value, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Value:
    """Windows of the padded input; a dilated one is every dilation-th of a longer window."""
    shape = b.shape(meta)
    kernel, dilation, padding, stride = (_pair(t) for t in (kernel, dilation, padding, stride))
    x = pad(b, x, (padding[1], padding[1], padding[0], padding[0]), PadMode.constant)
    rank = len(x.shape)
    for i in (0, 1):
        x = b.window(x, rank - 2 + i, (kernel[i] - 1) * dilation[i] + 1, stride[i])
        x = b.slice(x, -1, 0, kernel[i], dilation[i])
    lead = list(range(rank - 2))
    x = b.permute(x, [*lead, rank, rank + 1, rank - 2, rank - 1])
    return b.reshape(x, shape)


def _col2im(b: Builder, meta: Any, x: Value, output_size: Any, kernel: Any, dilation: Any, padding: Any,
            stride: Any) -> Value:  # fmt: skip
    """The sum of overlapping blocks is a transposed convolution with weights that are one at one place each."""
    import torch

    from trivet.ir.interop import torch_dtype

    shape = b.shape(meta)
    batched = len(x.shape) == 3
    if not batched:
        x, shape = b.unsqueeze(x, 0), (1, *shape)
    kernel, dilation, padding, stride = (_pair(t) for t in (kernel, dilation, padding, stride))
    channels, cells = shape[1], kernel[0] * kernel[1]
    if not isinstance(channels, int):
        raise b.error(f"fold needs a fixed number of channels, got {channels}", "make that dimension static")
    size = [(shape[2 + i] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i in (0, 1)]
    x = b.reshape(x, (shape[0], channels * cells, *size))
    eye = torch.eye(cells, dtype=torch_dtype(x.dtype)).reshape(cells, 1, *kernel).repeat(channels, 1, 1, 1)
    attrs = ops.Conv(2, stride, padding, dilation, channels, True, kernel=kernel)
    y = b.one("conv", [x, b.const(eye), None, None], x.dtype, shape, attrs)
    return y if batched else b.squeeze(y, [0])


def _pixel_shuffle(b: Builder, meta: Any, x: Value, r: int) -> Value:
    *lead, c, h, w = x.shape
    n = len(lead)
    y = b.reshape(x, (*lead, c // (r * r), r, r, h, w))
    y = b.permute(y, [*range(n), n, n + 3, n + 1, n + 4, n + 2])
    return b.reshape(y, b.shape(meta))


def _pixel_unshuffle(b: Builder, meta: Any, x: Value, r: int) -> Value:
    *lead, c, h, w = x.shape
    n = len(lead)
    y = b.reshape(x, (*lead, c, h // r, r, w // r, r))
    y = b.permute(y, [*range(n), n, n + 2, n + 4, n + 1, n + 3])
    return b.reshape(y, b.shape(meta))


def _channel_shuffle(b: Builder, meta: Any, x: Value, groups: int) -> Value:
    n, c, *rest = x.shape
    y = b.reshape(x, (n, groups, c // groups, *rest))
    return b.reshape(b.transpose(y, 1, 2), x.shape)


def _isin(b: Builder, meta: Any, x: Value, tests: Value, *, assume_unique: bool = False, invert: bool = False) -> Value:
    compute = result_type(x, tests)
    wide = b.unsqueeze(x, len(x.shape))
    flat = b.reshape(tests, (tests.type.count,))
    hits = b.map(lambda p, q: p.equal(q), [wide, flat], DType.bool, compute)
    found = b.reduce(ReduceKind.any, hits, [-1])
    return b.map(lambda r: r.logical_not(), [found], DType.bool) if invert else found


HANDLERS: dict[str, Handler] = table({
    "slice_scatter": _slice_scatter,
    "select_scatter": _select_scatter,
    "diagonal_scatter": _diagonal_scatter,
    "as_strided_scatter": _as_strided_scatter,
    "tril": _triangle(True),
    "triu": _triangle(False),
    "diag_embed": _diag_embed,
    "diagflat": _diagflat,
    "trace": _trace,
    "constant_pad_nd": _constant_pad,
    "pad": _pad,
    **{f"reflection_pad{n}d": _pad_mode(PadMode.reflect) for n in (1, 2, 3)},
    **{f"replication_pad{n}d": _pad_mode(PadMode.replicate) for n in (1, 2, 3)},
    "_pad_circular": _pad_mode(PadMode.circular),
    "im2col": _im2col,
    "col2im": _col2im,
    "pixel_shuffle": _pixel_shuffle,
    "pixel_unshuffle": _pixel_unshuffle,
    "channel_shuffle native_channel_shuffle": _channel_shuffle,
    "isin.Tensor_Tensor": _isin,
})  # fmt: skip
