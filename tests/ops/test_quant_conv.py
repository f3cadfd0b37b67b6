"""qconv against its definition in exact integers: 1-d to 3-d, strides, pads, dilations, groups, depthwise, transposed, layouts,
packing, dtypes, tiles, every ISA."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from heavy import isa_levels, struct
from hypothesis import given, settings
from hypothesis import strategies as st
from quant_product import ENDS, F32, I8, I16, I32, conv_sums, finish, multipliers, numbers, packed, result, tensor, wrap

from trivet import native
from trivet.error import Error
from trivet.fbs.structs import Act, Op

LAYOUTS = ("last", "last", "dense", "gaps", "flip")


def conv_attrs(**fields: Any) -> Any:
    return struct("QconvAttrs", **fields)


def out_sizes(a: dict[str, Any], space: list[int], kernel: list[int], more: list[int]) -> list[int]:
    """Output sizes; more: cells beyond what the low pad on both sides gives."""
    sizes = []
    for n, k, s, p, d, m in zip(space, kernel, a["stride"], a["pad"], a["dilation"], more, strict=True):
        size = (
            (n - 1) * s - 2 * p + d * (k - 1) + 1 + m if a["transposed"] else (n + 2 * p + m - d * (k - 1) - 1) // s + 1
        )
        sizes.append(max(size, 0))
    return sizes


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.data())
def test_qconv(data: st.DataObject) -> None:
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))

    def pick(*options: Any) -> Any:
        return draw(st.sampled_from(options))

    nd, transposed = pick(1, 2, 2, 2, 3), pick(0, 0, 1)
    x_dtype = pick(I8, I8, I8, I16, F32)
    y_dtype = F32 if x_dtype == F32 else pick(I8, I8, I16, F32)
    if pick(0, 1):
        groups, cg, og = pick(3, 16, 20, 33, 130), 1, pick(1, 1, 1, 2)
    else:
        groups, cg, og = pick(1, 1, 1, 2, 3), pick(1, 3, 4, 8, 17, 32), pick(1, 5, 16, 33, 70)
    kernel, stride, dilation, pad = ([pick(*options) for _ in range(nd)] for options in (
        (1, 1, 2, 3, 3, 5), (1, 1, 2, 3), (1, 1, 2, 3), (0, 0, 1, 2, 4, -1)))  # fmt: skip
    if pick(0, 0, 0, 1):
        kernel, stride, dilation, pad = [1] * nd, [1] * nd, [1] * nd, [0] * nd
    space = [pick(1, 2, 5, 7, 6 if nd == 3 else 13) for _ in range(nd)]
    fields: dict[str, Any] = {
        "nd": nd,
        "transposed": transposed,
        "groups": groups,
        "stride": stride,
        "pad": pad,
        "dilation": dilation,
    }
    batch = pick(0, 1, 1, 2)
    out = [batch, groups * og, *out_sizes(fields, space, kernel, [pick(0, 0, 1, 3) for _ in range(nd)])]
    w = numbers(rng, ((groups * cg, og) if transposed else (groups * og, cg)) + tuple(kernel))
    real = x_dtype == F32
    lo, hi = ENDS.get(x_dtype, (0, 0))
    x_zero = 0 if real else pick(0, lo, hi, int(rng.integers(lo, hi + 1)))
    x = (
        rng.standard_normal((batch, groups * cg, *space))
        if real
        else numbers(rng, (batch, groups * cg, *space), lo, hi)
    )
    bias = None
    if pick(0, 1):
        bias = (
            rng.standard_normal(groups * og)
            if real
            else rng.integers(-(1 << 31), 1 << 31, groups * og) >> pick(0, 12, 20)
        )
    sums = conv_sums(x - x_zero, w, fields, out)
    tail = (-1, *[1] * nd)
    if not real and bias is not None:
        sums = sums + bias.reshape(tail)
    if y_dtype in ENDS:
        scale = multipliers(rng, groups * og, float(np.abs(wrap(sums, x_dtype)).mean()) if sums.size else 1.0)
        ends = ENDS[y_dtype]
        fields["y_zero"] = pick(0, *ends, 3)
        fields["lo"], fields["hi"] = pick(ends, ends, (fields["y_zero"], ends[1]), (5, 5))
    else:
        scale = (rng.random(groups * og) * 1e-3).astype(np.float32)
        fields["act"], fields["lo"], fields["hi"] = pick((Act.none, 0, 0), (Act.clamp, -0.5, 1.0))
    fields["x_zero"] = x_zero
    want = np.moveaxis(sums, 1, -1)
    if real:
        want = want * scale + (0 if bias is None else bias)
    else:
        want = finish(want, x_dtype, y_dtype, scale, fields.get("y_zero", 0), fields["lo"], fields["hi"])
    if fields.get("act"):
        want = np.clip(want, np.float32(-0.5), np.float32(1.0))
    want = np.moveaxis(want, -1, 1)
    xs, ws = tensor(x, x_dtype, pick(*LAYOUTS)), tensor(w, I8, pick("dense", "gaps", "flip"))
    sc = tensor(scale, I32 if y_dtype in ENDS else F32)
    b = None if bias is None else tensor(bias, F32 if real else I32)
    isa, tiles, layout = pick(*isa_levels(Op.qconv)), pick(0, 1, 3, 8), pick(*LAYOUTS)
    for attrs, weight in (
        (conv_attrs(**fields), ws),
        (a := conv_attrs(**fields, packed=1, kernel=kernel), packed(Op.qconv, a, ws)),
    ):
        got = result(Op.qconv, [xs, weight, sc, b], out, y_dtype, attrs, layout, isa=isa, tiles=tiles)
        if real:
            size = np.moveaxis(conv_sums(np.abs(x), np.abs(w), fields, out), 1, -1) * scale + (
                0 if bias is None else np.abs(bias)
            )
            assert np.all(np.abs(got - want) <= np.moveaxis(size, -1, 1) * 1e-6)
        else:
            np.testing.assert_array_equal(got, want)


LARGE = {
    "many passes": (dict(cin=600, cout=40, kernel=3, stride=1, pad=1, groups=1), 9),
    "many strips": (dict(cin=40, cout=300, kernel=1, stride=1, pad=0, groups=1), 7),
    "first layer": (dict(cin=3, cout=48, kernel=7, stride=2, pad=3, groups=1), 40),
    "grouped": (dict(cin=64, cout=64, kernel=3, stride=1, pad=1, groups=8), 20),
    "depthwise": (dict(cin=300, cout=300, kernel=5, stride=2, pad=2, groups=300), 31),
    "depthwise, an odd row": (dict(cin=72, cout=72, kernel=3, stride=1, pad=1, groups=72), 7),
}


@pytest.mark.parametrize("layout", ["dense", "last"])
@pytest.mark.parametrize("dtype", [I8, I16])
@pytest.mark.parametrize("name", LARGE)
def test_large(name: str, dtype: torch.dtype, layout: str) -> None:
    rng = np.random.default_rng(1)
    c, size = LARGE[name]
    k, out = c["kernel"], (size + 2 * c["pad"] - c["kernel"]) // c["stride"] + 1
    fields = dict(nd=2, groups=c["groups"], stride=[c["stride"]] * 2, pad=[c["pad"]] * 2, dilation=[1, 1], x_zero=-7, y_zero=3,
                  lo=ENDS[dtype][0], hi=ENDS[dtype][1])  # fmt: skip
    x = rng.integers(ENDS[dtype][0], ENDS[dtype][1] + 1, (1, c["cin"], size, size))
    w = rng.integers(-128, 128, (c["cout"], c["cin"] // c["groups"], k, k))
    bias = rng.integers(-100000, 100000, c["cout"])
    shape = (1, c["cout"], out, out)
    sums = np.moveaxis(conv_sums(x + 7, w, fields, shape), 1, -1) + bias
    scale = multipliers(rng, c["cout"], float(np.abs(sums).mean()))
    want = np.moveaxis(finish(sums, dtype, dtype, scale, 3, *ENDS[dtype]), -1, 1)
    ws = tensor(w, I8)
    for isa in isa_levels(Op.qconv):
        for tiles, use in ((1, 1), (5, 1), (2, 0)):
            attrs = conv_attrs(**fields, packed=use, kernel=[k, k] if use else [0])
            weight = packed(Op.qconv, attrs, ws) if use else ws
            inputs = [tensor(x, dtype, layout), weight, tensor(scale, I32), tensor(bias, I32)]
            np.testing.assert_array_equal(
                result(Op.qconv, inputs, shape, dtype, attrs, layout, isa=isa, tiles=tiles), want
            )


@pytest.mark.parametrize("use", [0, 1])
def test_sums_of_bytes_wrap_and_sums_of_words_do_not(use: int) -> None:
    n = 70000  # * 255 * 128 passes 2^31
    for dtype, zero in ((I8, 127), (I16, 32767)):
        x, w = np.full((1, n, 2), ENDS[dtype][0]), np.full((17, n, 1), -128)
        attrs = conv_attrs(nd=1, groups=1, stride=[1], pad=[0], dilation=[1], x_zero=zero, y_zero=0, packed=use,
                           kernel=[1] if use else [0], act=Act.none)  # fmt: skip
        sums = conv_sums(x - zero, w, dict(nd=1, groups=1, stride=[1], pad=[0], dilation=[1]), (1, 17, 2))
        assert abs(int(sums.max())) > 1 << 31
        ws = tensor(w, I8)
        got = result(Op.qconv, [tensor(x, dtype), packed(Op.qconv, attrs, ws) if use else ws, tensor(np.ones(17), F32)],
                     (1, 17, 2), F32, attrs)  # fmt: skip
        np.testing.assert_array_equal(got, wrap(sums, dtype).astype(np.float32))


def test_activations_of_real_results() -> None:
    rng = np.random.default_rng(3)
    x, w = rng.integers(-128, 128, (1, 8, 5, 5)), rng.integers(-128, 128, (24, 8, 1, 1))
    fields = dict(nd=2, groups=1, stride=[1, 1], pad=[0, 0], dilation=[1, 1])
    real = torch.from_numpy(conv_sums(x, w, fields, (1, 24, 5, 5)).astype(np.float32)) * np.float32(1e-4)
    for act, fn in ((Act.silu, torch.nn.functional.silu), (Act.sigmoid, torch.sigmoid), (Act.tanh, torch.tanh)):
        got = result(Op.qconv, [tensor(x, I8, "last"), tensor(w, I8), tensor(np.full(24, 1e-4), F32)], (1, 24, 5, 5), F32,
                     conv_attrs(**fields, act=act), "last")  # fmt: skip
        assert float((torch.from_numpy(got) - fn(real)).abs().max()) < 2e-6


def test_packing() -> None:
    w = torch.randint(-128, 128, (20, 6, 2, 2)).to(I8)
    attrs = conv_attrs(nd=2, groups=1, stride=[1, 1], dilation=[1, 1], kernel=[2, 2], packed=1)
    blob = torch.from_numpy(packed(Op.qconv, attrs, w).copy()).reshape(2, -1)
    assert blob.shape[1] == 4 * 2 * 64 + 64  # taps, quads of channels, sums
    for view in (w, w.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)):
        assert np.array_equal(packed(Op.qconv, attrs, view), blob.reshape(-1).numpy())
    back = blob[:, :-64].reshape(2, 4, 2, 16, 4).permute(0, 3, 1, 2, 4).reshape(32, 2, 2, 8)
    assert torch.equal(back[:20, :, :, :6].permute(0, 3, 1, 2), w)
    assert not back[20:].any() and not back[..., 6:].any()
    sums = blob[:, -64:].contiguous().view(torch.int32).reshape(-1)
    assert torch.equal(sums[:20].long(), w.long().sum((1, 2, 3))) and not sums[20:].any()
    w = torch.randint(-128, 128, (20, 1, 5)).to(I8)
    attrs = conv_attrs(nd=1, groups=20, stride=[1], dilation=[1], kernel=[5], packed=1)
    blob = torch.from_numpy(packed(Op.qconv, attrs, w).copy()).reshape(5, 32)
    assert torch.equal(blob[:, :20].t().reshape(20, 1, 5), w) and not blob[:, 20:].any()
    assert native.pack_bytes(Op.qconv, attrs, 2, (20, 1, 5)) == 0  # u8
    assert native.pack_bytes(Op.qconv, attrs, 3, (21, 1, 5)) == 0


def test_refusals() -> None:
    x, w, y = torch.zeros(1, 4, 8, 8, dtype=I8), torch.zeros(6, 4, 3, 3, dtype=I8), torch.zeros(1, 6, 8, 8, dtype=I8)
    scale, bias = torch.ones(2, 6, dtype=I32), torch.zeros(6, dtype=I32)
    ok: dict[str, Any] = {
        "nd": 2,
        "groups": 1,
        "stride": [1, 1],
        "pad": [1, 1],
        "dilation": [1, 1],
        "lo": -128,
        "hi": 127,
    }
    pack = {**ok, "packed": 1, "kernel": [3, 3]}
    blob = packed(Op.qconv, conv_attrs(**pack), w)
    native.run_op(Op.qconv, [x, w, scale, bias], [y], conv_attrs(**ok))
    native.run_op(Op.qconv, [x, blob, scale], [y], conv_attrs(**pack))
    real = torch.ones(6)
    bad: list[tuple[list[Any], torch.Tensor, dict[str, Any]]] = [
        ([x, w, scale], y, {**ok, "nd": 1}),
        ([x, w, scale], y, {**ok, "nd": 4}),
        ([x, w, scale], y, {**ok, "groups": 0}),
        ([x, w, scale], y, {**ok, "groups": 3}),
        ([x, w, scale], y, {**ok, "stride": [0, 1]}),
        ([x, w, scale], y, {**ok, "dilation": [1, 0]}),
        ([x, w, scale], y, {**ok, "x_zero": 128}),
        ([x, w, scale], y, {**ok, "x_zero": -(1 << 31)}),
        ([x, w, scale], y, {**ok, "y_zero": -129}),
        ([x, w, scale], y, {**ok, "lo": -129}),
        ([x, w, scale], y, {**ok, "hi": 128}),
        ([x, w, scale], y, {**ok, "lo": 1, "hi": 0}),
        ([x, w, scale], y, {**ok, "lo": float("nan")}),
        ([x, w, scale], y, {**ok, "act": 200}),
        ([x, w, scale], torch.zeros(2, 6, 8, 8, dtype=I8), ok),
        ([x, w, scale], torch.zeros(1, 7, 8, 8, dtype=I8), ok),
        ([x, w, scale], torch.zeros(1, 6, 8, 8, dtype=I32), ok),
        ([x, w.to(I16), scale], y, ok),
        ([x.to(I32), w, scale], y, ok),
        ([x.float(), w, scale], y, ok),
        ([x, w, real], y, ok),
        ([x, w, scale], y.float(), ok),
        ([x, w, scale[:, :5]], y, ok),
        ([x, w, scale[:, :1]], y, ok),
        ([x, w, torch.ones(3, 6, dtype=I32)], y, ok),
        ([x, w, scale, bias[:5]], y, ok),
        ([x, w, scale, bias.float()], y, ok),
        ([x, w, scale], y.expand(2, 6, 8, 8)[:1].as_strided((1, 6, 8, 8), (0, 1, 1, 1)), ok),
        ([x, blob[:-1], scale], y, pack),
        ([x, np.concatenate([blob, blob]), scale], y, pack),
        ([x, blob, scale], y, {**pack, "kernel": [3, 0]}),
        ([x, blob, scale], y, {**pack, "kernel": [3, 4]}),
        ([x, blob, scale], y, {**pack, "kernel": [65535, 65535]}),
        ([x, blob, scale], y, {**pack, "groups": 0}),
        ([x, blob, scale], y, {**pack, "groups": 1 << 31}),
        ([x, blob, scale], y, {**pack, "nd": 0}),
    ]
    for inputs, out, fields in bad:
        with pytest.raises(Error):
            native.run_op(Op.qconv, inputs, [out], conv_attrs(**fields))


def test_any_scale_is_harmless() -> None:
    """Multipliers and shifts are data: what is outside their ranges gives some number."""
    rng = np.random.default_rng(5)
    x, w = tensor(rng.integers(-128, 128, (1, 16, 9, 9)), I8), tensor(rng.integers(-128, 128, (32, 16, 1, 1)), I8)
    scale = tensor(rng.integers(-(1 << 31), 1 << 31, (2, 32)), I32)
    bias = tensor(rng.integers(-(1 << 31), 1 << 31, 32), I32)
    for dtype in (I8, I16):
        for to in (I8, I16):
            attrs = conv_attrs(nd=2, groups=1, stride=[1, 1], pad=[0, 0], dilation=[1, 1], lo=-5, hi=9)
            got = result(Op.qconv, [x.to(dtype), w, scale, bias], (1, 32, 9, 9), to, attrs)
            assert got.min() >= -5 and got.max() <= 9
