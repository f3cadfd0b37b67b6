"""3x3 convolutions by Winograd's algorithm: on every ISA against torch, on the shapes of real nets, chosen by the exporter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from heavy import check, isa_levels, laid_out, packed, place, run, struct
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim

import trivet
from trivet import native
from trivet.error import Error
from trivet.fbs.structs import Act, Op

LAYOUTS = st.sampled_from(["dense", "last", "last", "gaps", "flip"])
BOUND = 1e-5  # relative to the largest value; what is promised is 1e-4 for a whole net


def wino_attrs(m: int, **fields: Any) -> Any:
    given = {"nd": 2, "packed": m, "groups": 1, "stride": [1, 1], "pad": [1, 1], "dilation": [1, 1], "kernel": [3, 3]}
    return struct("ConvAttrs", **(given | fields))


def scratch(attrs: Any, cin: int, tiles: int = 1 << 40) -> Any:
    return np.full(native.conv_tmp_bytes(attrs, cin, tiles), 255, np.uint8)  # NaN as floats


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_winograd(data: st.DataObject) -> None:
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 1000)))
    m, cin, cout = draw(st.sampled_from([2, 4])), draw(st.sampled_from([1, 3, 8, 16, 20, 48])), draw(st.integers(1, 70))
    batch, h, w = draw(st.integers(0, 3)), draw(st.integers(1, 15)), draw(st.integers(1, 15))
    pad = [draw(st.integers(-1, 5)) for _ in range(2)]
    high = [draw(st.integers(-1, 4)) for _ in range(2)]
    size = [n + a + b - 2 for n, a, b in zip((h, w), pad, high, strict=True)]
    if min(size) < 1:
        return
    x, weight = torch.randn(batch, cin, h, w), torch.randn(cout, cin, 3, 3)
    bias = torch.randn(cout) if draw(st.booleans()) else None
    wide = F.pad(x.double(), (pad[1], high[1], pad[0], high[0]))
    want = F.conv2d(wide, weight.double(), None if bias is None else bias.double())
    residual = place(torch.randn(want.shape), draw(LAYOUTS)) if draw(st.booleans()) else None
    if residual is not None:
        want = want + residual.double()
    act = draw(st.sampled_from([Act.none, Act.clamp, Act.silu]))
    want = {Act.none: lambda v: v, Act.clamp: lambda v: v.clamp(-0.5, 1.5), Act.silu: F.silu}[act](want)
    attrs = wino_attrs(m, pad=pad, act=act, lo=-0.5, hi=1.5)
    few = draw(st.booleans())  # scratch for one thread
    tmp = scratch(attrs, cin, 1 if few else 1 << 40)
    out = (
        residual if residual is not None and draw(st.booleans()) else laid_out(want.shape, torch.float32, draw(LAYOUTS))
    )
    run(Op.conv, [place(x, draw(LAYOUTS)), packed(Op.conv, attrs, place(weight, draw(LAYOUTS))), bias, residual], out, attrs,
        tmp=[tmp], isa=draw(st.sampled_from(isa_levels(Op.conv))), tiles=1 if few else draw(st.integers(0, 4)))  # fmt: skip
    # Neighbours of what an output sums count too: the error follows the tile's largest values.
    scale = max([1e-3, *want.abs().flatten().tolist(), float(weight.abs().sum((1, 2, 3)).max())])
    check(out, want.float(), scale=scale)


# channels in and out, size of the map: of resnet18, resnet50, the U-Net of the benchmarks, resnet8
SHAPES = [(64, 64, 56), (128, 128, 28), (256, 256, 14), (512, 512, 7), (16, 16, 64), (128, 64, 64), (64, 64, 8)]


@pytest.mark.parametrize("m", [2, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_error_of_real_shapes(shape: tuple[int, int, int], m: int) -> None:
    """Rectified inputs, weights of the usual scale; the bound is what a layer may add to a net's error."""
    torch.manual_seed(5)
    cin, cout, size = shape
    x, w = torch.randn(1, cin, size, size).relu(), torch.randn(cout, cin, 3, 3) * (2 / (9 * cin)) ** 0.5
    want = F.conv2d(x.double(), w.double(), None, 1, 1)
    attrs = wino_attrs(m)
    out = laid_out(want.shape, torch.float32, "last")
    run(Op.conv, [place(x, "last"), packed(Op.conv, attrs, w)], out, attrs, tmp=[scratch(attrs, cin)])
    error = float((out.double() - want).abs().max() / want.abs().max())
    assert error < BOUND, f"{error:.1e}"


def test_refusals() -> None:
    x, w, y = torch.randn(1, 8, 9, 9), torch.randn(20, 8, 3, 3), torch.empty(1, 20, 9, 9)
    attrs = wino_attrs(4)
    blob, tmp = packed(Op.conv, attrs, w), scratch(attrs, 8, 1)
    native.run_op(Op.conv, [x, blob], [y], attrs, tmp=[tmp])
    bad: list[tuple[list[Any], list[Any], dict[str, Any]]] = [
        ([x, blob], [], {}),
        ([x, blob], [tmp[:-64]], {}),
        ([x, blob], [tmp.view(np.float32)], {}),
        ([x, blob], [tmp[:0]], {}),
        ([x, blob[:-1]], [tmp], {}),
        ([x, w], [tmp], {}),
        ([x, blob], [tmp], {"kernel": [3, 1]}),
        ([x, blob], [tmp], {"stride": [1, 2]}),
        ([x, blob], [tmp], {"dilation": [2, 1]}),
        ([x, blob], [tmp], {"groups": 4}),
        ([x, blob], [tmp], {"transposed": 1}),
        ([x.double(), blob], [tmp], {}),
    ]
    for inputs, room, fields in bad:
        with pytest.raises(Error, match="conv|scratch"):
            native.run_op(Op.conv, inputs, [y.to(inputs[0].dtype)], wino_attrs(4, **fields), tmp=room)
    for fields, shape in (({"groups": 2}, (20, 4, 3, 3)), ({"transposed": 1}, (8, 20, 3, 3)), ({}, (20, 8, 3, 5))):
        assert native.pack_bytes(Op.conv, wino_attrs(4, **fields), 4, shape) == 0


def chosen(text: str) -> list[str]:
    return [line for line in text.split("\n") if "choose_winograd" in line]


def test_the_exporter_chooses() -> None:
    torch.manual_seed(6)
    net = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 48, 3, 1, 1), nn.SiLU(), nn.Conv2d(48, 32, 3, 1, 1),
                        nn.ReLU6(), nn.Conv2d(32, 32, 3, 1, 1, groups=2), nn.Conv2d(32, 4, 3, 1, 1)).eval()  # fmt: skip
    x = torch.randn(1, 3, 40, 40)
    with torch.no_grad():
        want = net(x)
    program = trivet.export(net, (x,))
    assert "2 convolutions: 2 with 4x4 outputs" in chosen(str(program))[0]
    check(trivet.load(program)(x), want)
    plain = trivet.export(net, (x,), skip="choose_winograd")
    assert not chosen(str(plain)) and len(plain.to_bytes()) < len(program.to_bytes())
    check(trivet.load(plain)(x), want)
    assert not chosen(str(trivet.export(net, (x,), target="cpu.cortex_m")))


def test_dynamic_sizes() -> None:
    torch.manual_seed(7)
    net = nn.Conv2d(16, 24, 3, 1, 1).eval()
    shapes = ({0: Dim("n", min=1, max=4), 2: Dim("h", min=2, max=40)},)
    program = trivet.export(net, (torch.randn(2, 16, 9, 12),), dynamic_shapes=shapes)
    assert chosen(str(program))
    loaded = trivet.load(program, threads=2)
    for n, h in ((1, 2), (3, 40), (4, 17)):
        x = torch.randn(n, 16, h, 12)
        with torch.no_grad():
            check(loaded(x), net(x))
