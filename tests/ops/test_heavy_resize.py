"""resize and grid_sample against torch: modes, scales, corners, layouts, dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from heavy import FLOATS, check, laid_out, place, run, struct
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet import native
from trivet.error import Error
from trivet.fbs.structs import GridPad, Op, ResizeMode

LAYOUTS = st.sampled_from(["dense", "last", "gaps", "flip"])
LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}


@settings(max_examples=250, deadline=None, derandomize=True)
@given(st.data())
def test_resize(data: st.DataObject) -> None:
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 1000)))
    mode = draw(st.sampled_from(list(ResizeMode)))
    nd = 2 if mode == ResizeMode.cubic else draw(st.sampled_from([1, 2, 2, 3]))
    dtype = draw(st.sampled_from([*FLOATS, *[torch.float32] * 4]))
    if mode in (ResizeMode.nearest, ResizeMode.nearest_exact) and draw(st.booleans()):
        dtype = torch.uint8
    space = [draw(st.integers(1, 9)) for _ in range(nd)]
    x = torch.randint(0, 200, (2, draw(st.sampled_from([1, 3, 70])), *space)).to(dtype)
    x = x + torch.randn(x.shape).to(dtype) if dtype.is_floating_point else x
    name = {ResizeMode.nearest: "nearest", ResizeMode.nearest_exact: "nearest-exact", ResizeMode.linear: LINEAR[nd],
            ResizeMode.cubic: "bicubic"}[mode]  # fmt: skip
    align = mode in (ResizeMode.linear, ResizeMode.cubic) and draw(st.booleans())
    options: dict[str, Any] = {} if name.startswith("nearest") else {"align_corners": align}
    given_scale = draw(st.booleans())
    if given_scale:
        scale = [draw(st.sampled_from([0.5, 1.0, 1.5, 2.0, 2.75, 3.3])) for _ in range(nd)]
        if min(int(s * n) for s, n in zip(scale, space, strict=True)) < 1:
            return
        options["scale_factor"] = scale
    else:
        scale = [0.0]
        options["size"] = [draw(st.integers(1, 20)) for _ in range(nd)]
    half = dtype in (torch.float16, torch.bfloat16)
    want = F.interpolate(x.float() if half else x, mode=name, **options).to(dtype)
    attrs = struct("ResizeAttrs", mode=mode, nd=nd, align_corners=align, scale=scale, cubic_a=-0.75)
    out = laid_out(want.shape, dtype, draw(LAYOUTS))
    run(Op.resize, [place(x, draw(LAYOUTS))], out, attrs, tiles=draw(st.sampled_from([0, 1, 4])))
    if mode == ResizeMode.cubic and dtype == torch.float64:
        check(out, want, factor=10.0)
    else:
        check(out, want)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_grid_sample(data: st.DataObject) -> None:
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 1000)))
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.float64]))
    mode = draw(st.sampled_from([ResizeMode.nearest, ResizeMode.linear, ResizeMode.cubic]))
    pad, align = draw(st.sampled_from(list(GridPad))), draw(st.booleans())
    x = torch.randn(2, draw(st.sampled_from([1, 3, 70])), draw(st.integers(1, 8)), draw(st.integers(1, 8))).to(dtype)
    grid = (torch.rand(2, 5, 7, 2).to(dtype) - 0.5) * draw(st.sampled_from([2.0, 3.0, 9.0]))
    name = {ResizeMode.nearest: "nearest", ResizeMode.linear: "bilinear", ResizeMode.cubic: "bicubic"}[mode]
    want = F.grid_sample(x, grid, name, pad.name, align)
    attrs = struct("GridSampleAttrs", mode=mode, pad=pad, align_corners=align)
    out = laid_out(want.shape, dtype, draw(LAYOUTS))
    run(
        Op.grid_sample,
        [place(x, draw(LAYOUTS)), place(grid, draw(LAYOUTS))],
        out,
        attrs,
        tiles=draw(st.sampled_from([0, 3])),
    )
    check(out, want, factor=10.0)


def test_grid_of_anything() -> None:
    """Positions that are no numbers read nothing outside."""
    x, grid = torch.randn(1, 2, 5, 5), torch.zeros(1, 1, 4, 2)
    grid[0, 0, :, 0] = torch.tensor([float("nan"), float("inf"), -1e30, 3e38])
    for mode in (ResizeMode.nearest, ResizeMode.linear, ResizeMode.cubic):
        for pad in GridPad:
            run(Op.grid_sample, [x, grid], torch.empty(1, 2, 1, 4), struct("GridSampleAttrs", mode=mode, pad=pad))


def test_refusals() -> None:
    x, y = torch.randn(1, 2, 4, 4), torch.empty(1, 2, 8, 8)
    bad: list[tuple[torch.Tensor, torch.Tensor, dict[str, Any]]] = [
        (x, y, {"mode": 9, "nd": 2}),
        (x, y, {"mode": 0, "nd": 1}),
        (x, torch.empty(1, 3, 8, 8), {"mode": 0, "nd": 2}),
        (x[:, :, :0], y, {"mode": 0, "nd": 2}),
        (x.int(), y.int(), {"mode": 2, "nd": 2}),
        (x, y.double(), {"mode": 2, "nd": 2}),
    ]
    for inputs, out, fields in bad:
        with pytest.raises(Error, match="resize"):
            native.run_op(Op.resize, [inputs], [out], struct("ResizeAttrs", **fields))
    grid, small = torch.zeros(1, 3, 3, 2), torch.empty(1, 2, 3, 3)
    attrs = struct("GridSampleAttrs", mode=ResizeMode.linear)
    run(Op.grid_sample, [x, grid], small, attrs)
    for args in [
        ([x, grid[..., :1]], small),
        ([x, grid], y),
        ([x, grid.double()], small),
        ([x[:, :, :0], grid], small),
    ]:
        with pytest.raises(Error, match="grid_sample"):
            native.run_op(Op.grid_sample, args[0], [args[1]], attrs)
