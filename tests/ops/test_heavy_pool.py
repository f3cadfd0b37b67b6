"""pool against torch: max (with indices), average, adaptive; dimensions, layouts, dtypes, edges."""

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
from trivet.fbs.structs import Op, PoolKind

LAYOUTS = st.sampled_from(["dense", "last", "gaps", "flip"])


@settings(max_examples=250, deadline=None, derandomize=True)
@given(st.data())
def test_pool(data: st.DataObject) -> None:
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 1000)))
    nd = draw(st.sampled_from([1, 2, 2, 3]))
    dtype = draw(st.sampled_from([*FLOATS, *[torch.float32] * 3]))
    kernel = [draw(st.integers(1, 4)) for _ in range(nd)]
    stride = [draw(st.integers(1, 3)) for _ in range(nd)]
    pad = [draw(st.integers(0, k // 2)) for k in kernel]
    space = [draw(st.sampled_from([4, 7, 9, 70 if nd == 1 else 12])) for _ in range(nd)]
    ceil = draw(st.booleans())
    is_max = draw(st.booleans())
    x = torch.randint(-3, 4, (2, draw(st.sampled_from([1, 3, 16, 70])), *space)).to(dtype) + 0.5  # many ties
    if draw(st.booleans()):
        x.view(-1)[torch.randint(0, x.numel(), (3,))] = float("nan")
    wide = x.double() if dtype in (torch.float16, torch.bfloat16) else x
    if is_max:
        dilation = [draw(st.integers(1, 2)) for _ in range(nd)]
        try:
            want, index = getattr(F, f"max_pool{nd}d")(wide, kernel, stride, pad, dilation, ceil, return_indices=True)
        except RuntimeError:  # an empty output
            return
        attrs = struct("PoolAttrs", kind=PoolKind.max, nd=nd, kernel=kernel, stride=stride, pad=pad, dilation=dilation)
    else:
        include, divisor = draw(st.booleans()), draw(st.sampled_from([0, 0, 3])) if nd > 1 else 0
        options = {"divisor_override": divisor or None} if nd > 1 else {}
        want = getattr(F, f"avg_pool{nd}d")(wide, kernel, stride, pad, ceil, include, **options)
        attrs = struct("PoolAttrs", kind=PoolKind.avg, nd=nd, kernel=kernel, stride=stride, pad=pad, divisor=divisor,
                       count_include_pad=include)  # fmt: skip
    layout = draw(LAYOUTS)
    out: Any = [laid_out(want.shape, dtype, layout)]
    if is_max and draw(st.booleans()):
        out.append(laid_out(want.shape, torch.int64, layout))
    run(Op.pool, [place(x, draw(LAYOUTS))], out, attrs, tiles=draw(st.sampled_from([0, 1, 5])))
    check(out[0], want.to(dtype))
    if len(out) > 1:
        assert torch.equal(out[1], index)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_adaptive(data: st.DataObject) -> None:
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 1000)))
    nd, is_max = draw(st.sampled_from([1, 2, 3])), draw(st.booleans())
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16]))
    space = [draw(st.integers(1, 9)) for _ in range(nd)]
    size = [draw(st.integers(1, 12)) for _ in range(nd)]
    x = torch.randn(2, draw(st.sampled_from([1, 5, 70])), *space).to(dtype)
    wide = x.double()
    if is_max:
        want, index = getattr(F, f"adaptive_max_pool{nd}d")(wide, size, return_indices=True)
    else:
        want = getattr(F, f"adaptive_avg_pool{nd}d")(wide, size)
    attrs = struct("PoolAttrs", kind=PoolKind.max if is_max else PoolKind.avg, nd=nd, adaptive=1)
    out: Any = [laid_out(want.shape, dtype, draw(LAYOUTS))]
    if is_max:
        out.append(torch.empty(want.shape, dtype=torch.int64))
    run(Op.pool, [place(x, draw(LAYOUTS))], out, attrs)
    check(out[0], want.to(dtype))
    if is_max:
        assert torch.equal(out[1], index)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_integers(dtype: torch.dtype) -> None:
    x = torch.randint(0, 100, (2, 3, 9, 8)).to(dtype)
    attrs = struct("PoolAttrs", kind=PoolKind.max, nd=2, kernel=[3, 2], stride=[2, 2], pad=[1, 0], dilation=[1, 1])
    want = F.max_pool2d(x.double(), (3, 2), 2, (1, 0)).to(dtype)
    for layout in ("dense", "last"):
        out = run(Op.pool, [place(x, layout)], laid_out(want.shape, dtype, layout), attrs)
        assert torch.equal(out, want)


def test_empty_batch() -> None:
    attrs = struct("PoolAttrs", kind=PoolKind.avg, nd=2, kernel=[2, 2], stride=[2, 2])
    run(Op.pool, [torch.empty(0, 3, 4, 4)], torch.empty(0, 3, 2, 2), attrs)


def test_refusals() -> None:
    x, y = torch.randn(1, 3, 8, 8), torch.empty(1, 3, 4, 4)
    ok: dict[str, Any] = {"kind": 0, "nd": 2, "kernel": [2, 2], "stride": [2, 2]}
    native.run_op(Op.pool, [x], [y], struct("PoolAttrs", **ok))
    bad: list[tuple[torch.Tensor, list[torch.Tensor], dict[str, Any]]] = [
        (x, [y], {**ok, "kernel": [0, 2]}),
        (x, [y], {**ok, "stride": [2, 0]}),
        (x, [y], {**ok, "nd": 3}),
        (x, [y], {**ok, "kind": 9}),
        (x, [torch.empty(1, 4, 4, 4)], ok),
        (x, [y, torch.empty(1, 3, 4, 4)], ok),
        (x, [y, torch.empty(1, 3, 4, 5, dtype=torch.int64)], ok),
        (x.int(), [y.int()], {**ok, "kind": 1}),
        (x.double(), [y], ok),
    ]
    for inputs, out, fields in bad:
        with pytest.raises(Error, match="pool"):
            native.run_op(Op.pool, [inputs], out, struct("PoolAttrs", **fields))
