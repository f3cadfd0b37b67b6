"""conv on every ISA against torch: 1-d to 3-d, strides, pads, dilations, groups, depthwise, transposed, layouts, packing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from heavy import FLOATS, check, isa_levels, laid_out, packed, place, run, struct
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet import native
from trivet.error import Error
from trivet.fbs.structs import Act, Op

LAYOUTS = st.sampled_from(["dense", "last", "last", "gaps", "flip"])


def conv_attrs(**fields: Any) -> Any:
    return struct("ConvAttrs", **fields)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data())
def test_conv(data: st.DataObject) -> None:
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 1000)))
    nd = draw(st.sampled_from([1, 2, 2, 2, 3]))
    transposed = draw(st.sampled_from([False, False, True]))
    dtype = draw(st.sampled_from([*FLOATS, *[torch.float32] * 5]))
    if draw(st.integers(0, 2)) == 0:
        groups, cg, og = draw(st.sampled_from([3, 16, 20, 33, 130])), 1, draw(st.sampled_from([1, 1, 1, 2]))
    else:
        groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
        cg, og = draw(st.sampled_from([1, 3, 4, 8, 17, 32])), draw(st.sampled_from([1, 5, 16, 20, 40]))

    def per_axis(*values: int) -> list[int]:
        return [draw(st.sampled_from(values)) for _ in range(nd)]

    kernel, stride, dilation = per_axis(1, 1, 2, 3, 3, 5), per_axis(1, 1, 2, 3), per_axis(1, 1, 2, 3)
    pad, space = per_axis(0, 0, 1, 2, 4), per_axis(1, 2, 5, 7, 6 if nd == 3 else 13)
    if draw(st.integers(0, 4)) == 0:
        kernel, stride, dilation, pad = [1] * nd, [1] * nd, [1] * nd, [0] * nd
    batch = draw(st.sampled_from([0, 1, 1, 2, 2]))
    x = torch.randn(batch, groups * cg, *space).to(dtype)
    w = torch.randn(*((groups * cg, og) if transposed else (groups * og, cg)), *kernel).to(dtype)
    bias = torch.randn(groups * og).to(dtype) if draw(st.booleans()) else None
    options: dict[str, Any] = {"stride": stride, "padding": pad, "dilation": dilation, "groups": groups}
    if transposed:
        limit = [max(s, d) for s, d in zip(stride, dilation, strict=True)]
        options["output_padding"] = [draw(st.integers(0, n - 1)) for n in limit]
    fn = getattr(F, f"conv{'_transpose' if transposed else ''}{nd}d")
    try:
        want = fn(x.double(), w.double(), None if bias is None else bias.double(), **options)
    except RuntimeError:  # an empty output, which torch refuses
        return
    residual = place(torch.randn(want.shape).to(dtype), draw(LAYOUTS)) if draw(st.booleans()) else None
    act = draw(st.sampled_from([Act.none, Act.clamp, Act.silu]))
    want = want if residual is None else want + residual.double()
    want = {Act.none: lambda v: v, Act.clamp: lambda v: v.clamp(-0.5, 1.5), Act.silu: F.silu}[act](want)
    alone = dtype == torch.bfloat16 and cg == groups == 1  # one channel has no pairs
    use_packed = dtype != torch.float64 and not alone and draw(st.sampled_from([True, True, False]))
    attrs = conv_attrs(nd=nd, transposed=transposed, packed=use_packed, act=act, groups=groups, stride=stride, pad=pad,
                       dilation=dilation, kernel=kernel if use_packed else [0], lo=-0.5, hi=1.5)  # fmt: skip
    x, w, out = place(x, draw(LAYOUTS)), place(w, draw(LAYOUTS)), laid_out(want.shape, dtype, draw(LAYOUTS))
    run(Op.conv, [x, packed(Op.conv, attrs, w) if use_packed else w, bias, residual], out, attrs,
        isa=draw(st.sampled_from(isa_levels(Op.conv))), tiles=draw(st.sampled_from([0, 1, 3, 8])))  # fmt: skip
    check(out, want.to(dtype))


LARGE = {
    "many passes": (dict(cin=600, cout=40, kernel=3, stride=1, pad=1, groups=1), 9),
    "long kernel": (dict(cin=1, cout=300, kernel=33, stride=2, pad=16, groups=1), 40),
    "first layer": (dict(cin=3, cout=48, kernel=7, stride=2, pad=3, groups=1), 40),
    "wide pointwise": (dict(cin=1000, cout=70, kernel=1, stride=1, pad=0, groups=1), 7),
    "grouped": (dict(cin=64, cout=64, kernel=3, stride=1, pad=1, groups=8), 20),
    "depthwise": (dict(cin=300, cout=300, kernel=5, stride=2, pad=2, groups=300), 31),
}


@pytest.mark.parametrize("isa", isa_levels(Op.conv))
@pytest.mark.parametrize(("layout", "dtype"), [("dense", torch.float32), ("last", torch.float32), ("last", torch.bfloat16),
                                               ("last", torch.float16)])  # fmt: skip
@pytest.mark.parametrize("name", LARGE)
def test_large(name: str, layout: str, dtype: torch.dtype, isa: str) -> None:
    torch.manual_seed(1)
    c, size = LARGE[name]
    x, w = (
        torch.randn(1, c["cin"], size, size),
        torch.randn(c["cout"], c["cin"] // c["groups"], c["kernel"], c["kernel"]),
    )
    x, w, bias = x.to(dtype), w.to(dtype), torch.randn(c["cout"]).to(dtype)
    want = F.conv2d(x.double(), w.double(), bias.double(), c["stride"], c["pad"], 1, c["groups"]).relu().to(dtype)
    attrs = conv_attrs(nd=2, packed=1, act=Act.clamp, groups=c["groups"], stride=[c["stride"]] * 2, pad=[c["pad"]] * 2,
                       dilation=[1, 1], kernel=[c["kernel"]] * 2, lo=0.0, hi=float("inf"))  # fmt: skip
    alone = dtype == torch.bfloat16 and c["cin"] == 1  # one channel has no pairs: as it is
    if alone:
        attrs["packed"] = 0
    weight = w if alone else packed(Op.conv, attrs, w)
    for tiles in (1, 5):
        out = laid_out(want.shape, dtype, layout)
        check(run(Op.conv, [place(x, layout), weight, bias], out, attrs, isa=isa, tiles=tiles), want)


@pytest.mark.parametrize("isa", isa_levels(Op.conv))
def test_negative_pad_crops(isa: str) -> None:
    torch.manual_seed(2)
    x, w = torch.randn(1, 16, 9, 9), torch.randn(24, 16, 3, 3)
    want = F.conv2d(x[:, :, 2:, 1:-3].double(), w.double()).float()
    attrs = conv_attrs(nd=2, groups=1, stride=[1, 1], pad=[-2, -1], dilation=[1, 1])
    check(run(Op.conv, [place(x, "last"), w], laid_out(want.shape, torch.float32, "last"), attrs, isa=isa), want)


def test_high_pad_from_the_output() -> None:
    torch.manual_seed(3)
    x, w = torch.randn(2, 8, 10), torch.randn(5, 8, 4)
    want = F.conv1d(F.pad(x, (1, 6)).double(), w.double(), None, 3).float()
    attrs = conv_attrs(nd=1, groups=1, stride=[3], pad=[1], dilation=[1])
    check(run(Op.conv, [x, w], torch.empty(want.shape), attrs), want)


@pytest.mark.parametrize("isa", isa_levels(Op.conv))
def test_residual_in_place(isa: str) -> None:
    torch.manual_seed(4)
    for groups in (1, 64):
        x, w = torch.randn(1, 64, 8, 8), torch.randn(64, 64 // groups, 3, 3)
        y = place(torch.randn(1, 64, 8, 8), "last")
        want = F.relu(F.conv2d(x.double(), w.double(), None, 1, 1, 1, groups) + y.double()).float()
        attrs = conv_attrs(nd=2, packed=1, act=Act.clamp, groups=groups, stride=[1, 1], pad=[1, 1], dilation=[1, 1],
                           kernel=[3, 3], lo=0.0, hi=float("inf"))  # fmt: skip
        check(run(Op.conv, [place(x, "last"), packed(Op.conv, attrs, w), None, y], y, attrs, isa=isa), want)


def test_packing_round_trip() -> None:
    """Panels of 16 outputs, channels innermost; bf16 in pairs of channels; depthwise by taps."""
    w = torch.randn(20, 3, 2, 2)
    attrs = conv_attrs(nd=2, groups=1, stride=[1, 1], dilation=[1, 1], kernel=[2, 2], packed=1)
    got = torch.from_numpy(packed(Op.conv, attrs, w).copy()).reshape(2, 4, 3, 16)
    back = got.permute(0, 3, 2, 1).reshape(32, 3, 2, 2)[:20]
    assert torch.equal(back, w)
    pairs = packed(Op.conv, attrs, w.bfloat16()).reshape(2, 4, 2, 16, 2).permute(0, 3, 2, 4, 1).reshape(32, 4, 2, 2)
    assert torch.equal(pairs[:20, :3], w.bfloat16()) and not pairs[20:].any() and not pairs[:, 3].any()
    attrs = conv_attrs(nd=1, groups=20, stride=[1], dilation=[1], kernel=[5], packed=1)
    w = torch.randn(20, 1, 5)
    got = torch.from_numpy(packed(Op.conv, attrs, w).copy()).reshape(5, 32)
    assert torch.equal(got[:, :20].t().reshape(20, 1, 5), w)


def test_refusals() -> None:
    x, w, y = torch.randn(1, 4, 8, 8), torch.randn(6, 4, 3, 3), torch.empty(1, 6, 8, 8)
    ok: dict[str, Any] = {"nd": 2, "groups": 1, "stride": [1, 1], "pad": [1, 1], "dilation": [1, 1]}
    pack = {**ok, "packed": 1, "kernel": [3, 3]}
    blob = packed(Op.conv, conv_attrs(**pack), w)
    native.run_op(Op.conv, [x, w], [y], conv_attrs(**ok))
    native.run_op(Op.conv, [x, blob], [y], conv_attrs(**pack))
    bad: list[tuple[list[Any], torch.Tensor, dict[str, Any]]] = [
        ([x, w], y, {**ok, "nd": 1}),
        ([x, w], y, {**ok, "nd": 4}),
        ([x, w], y, {**ok, "groups": 0}),
        ([x, w], y, {**ok, "groups": 3}),
        ([x, w], y, {**ok, "stride": [0, 1]}),
        ([x, w], y, {**ok, "dilation": [1, 0]}),
        ([x, w], torch.empty(2, 6, 8, 8), ok),
        ([x, w], torch.empty(1, 7, 8, 8), ok),
        ([x, w, torch.randn(5)], y, ok),
        ([x, w, None, torch.randn(1, 6, 8, 7)], y, ok),
        ([x, blob[:-1]], y, pack),
        ([x, blob], y, {**pack, "kernel": [3, 0]}),
        ([x, blob], y, {**pack, "kernel": [3, 4]}),
        ([x, blob], y, {**pack, "kernel": [65535, 65535]}),
        ([x, w], y, {**ok, "act": 200}),
        ([x.int(), w.int()], y.int(), ok),
    ]
    for inputs, out, fields in bad:
        with pytest.raises(Error, match="conv|output"):
            native.run_op(Op.conv, inputs, [out], conv_attrs(**fields))
