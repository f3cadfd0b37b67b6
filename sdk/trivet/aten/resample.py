"""Resizing and sampling of images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trivet.aten.common import Handler, table, wide
from trivet.fbs.structs import GridPad, ResizeMode
from trivet.ir import ops
from trivet.ir.builder import Builder
from trivet.ir.graph import Value

Scales = Sequence[float | None]


def _resize(b: Builder, meta: Any, x: Value, mode: ResizeMode, nd: int, scales: Scales, align_corners: bool) -> Value:
    given = tuple(0.0 if s is None else float(s) for s in scales)
    scale = given if any(given) else ()
    shape = b.shape(meta)
    return b.one("resize", [x], x.dtype, shape, ops.Resize(mode, nd, align_corners, scale))


def _nearest(mode: ResizeMode, nd: int) -> Callable[..., Value]:
    def run(b: Builder, meta: Any, x: Value, output_size: Any, *scales: float | None) -> Value:
        return _resize(b, meta, x, mode, nd, scales, False)

    return run


def _nearest_vec(mode: ResizeMode, nd: int) -> Callable[..., Value]:
    def run(b: Builder, meta: Any, x: Value, output_size: Any, scale_factors: Scales | None) -> Value:
        return _resize(b, meta, x, mode, nd, scale_factors or (), False)

    return run


def _smooth(mode: ResizeMode, nd: int) -> Callable[..., Value]:
    def run(b: Builder, meta: Any, x: Value, output_size: Any, align_corners: bool, *scales: float | None) -> Value:
        return _resize(b, meta, x, mode, nd, scales, align_corners)

    return run


def _smooth_vec(mode: ResizeMode, nd: int) -> Callable[..., Value]:
    def run(
        b: Builder, meta: Any, x: Value, output_size: Any, align_corners: bool, scale_factors: Scales | None
    ) -> Value:
        return _resize(b, meta, x, mode, nd, scale_factors or (), align_corners)

    return run


def _antialiased(mode: str) -> Callable[..., Value]:
    """Per axis a product with a fixed matrix, which is what torch makes of the unit matrix."""

    def run(b: Builder, meta: Any, x: Value, output_size: Any, align_corners: bool, *scales: Any) -> Value:
        import torch

        from trivet.ir.interop import torch_dtype

        given: Any = scales if len(scales) == 2 else scales[0] if scales and scales[0] else (None, None)
        op = getattr(torch.ops.aten, f"_upsample_{mode}2d_aa").default
        compute, shape = wide(x.dtype), b.shape(meta)
        y = b.cast(x, compute)
        for axis, scale in zip((3, 2), reversed(given), strict=True):
            n, size = x.shape[axis], shape[axis]
            if not isinstance(n, int) or not isinstance(size, int):
                raise b.error("antialiased resizing of a dynamic size", "make height and width static")
            unit = torch.eye(n, dtype=torch.float64)[None, None]
            matrix = op(unit, [n, size], align_corners, None, scale)[0, 0].to(torch_dtype(compute))
            y = b.move(b.matmul(b.move(y, axis, -1), b.const(matrix)), -1, axis)
        return b.cast(y, x.dtype)

    return run


_GRID_MODES = (ResizeMode.linear, ResizeMode.nearest, ResizeMode.cubic)
_GRID_PADS = (GridPad.zeros, GridPad.border, GridPad.reflection)


def _grid_sampler(b: Builder, meta: Any, x: Value, grid: Value, mode: int, padding: int, align_corners: bool) -> Value:
    if len(x.shape) != 4:
        raise b.error("grid_sample of volumes is not supported", "sample slices of four axes")
    attrs = ops.GridSample(_GRID_MODES[mode], _GRID_PADS[padding], align_corners)
    return b.one("grid_sample", [x, grid], x.dtype, b.shape(meta), attrs)


_LINEAR = ("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d")

HANDLERS: dict[str, Handler] = table({
    **{f"upsample_nearest{n}d": _nearest(ResizeMode.nearest, n) for n in (1, 2, 3)},
    **{f"upsample_nearest{n}d.vec": _nearest_vec(ResizeMode.nearest, n) for n in (1, 2, 3)},
    **{f"_upsample_nearest_exact{n}d": _nearest(ResizeMode.nearest_exact, n) for n in (1, 2, 3)},
    **{f"_upsample_nearest_exact{n}d.vec": _nearest_vec(ResizeMode.nearest_exact, n) for n in (1, 2, 3)},
    **{name: _smooth(ResizeMode.linear, n) for n, name in enumerate(_LINEAR, 1)},
    **{f"{name}.vec": _smooth_vec(ResizeMode.linear, n) for n, name in enumerate(_LINEAR, 1)},
    "upsample_bicubic2d": _smooth(ResizeMode.cubic, 2),
    "upsample_bicubic2d.vec": _smooth_vec(ResizeMode.cubic, 2),
    **{f"_upsample_{mode}2d_aa{vec}": _antialiased(mode) for mode in ("bilinear", "bicubic") for vec in ("", ".vec")},
    "grid_sampler grid_sampler_2d": _grid_sampler,
})  # fmt: skip
