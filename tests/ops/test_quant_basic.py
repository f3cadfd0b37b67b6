"""requantize, binary, lookup against exact integer arithmetic; and what they, qpool and qreduce refuse."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np
import pytest
import torch
from basic import Case, Op, native, place, struct, verify
from exact import (
    LIMITS,
    MULTIPLIERS,
    SHIFTS,
    STORED,
    TILES,
    big,
    bounds,
    half_even,
    integers,
    layout,
    multipliers,
    placed,
    rescale,
    run,
    shapes,
    shifts,
    stored,
    zeros,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.error import Error
from trivet.fbs.structs import BinaryKind, ReduceKind


# ---- requantize ------------------------------------------------------------------------------------------------------------
@settings(max_examples=1000, deadline=None, derandomize=True)
@given(st.data())
def test_requantize(data: st.DataObject) -> None:
    draw = data.draw
    src, dst = draw(st.sampled_from(STORED)), draw(st.sampled_from(STORED))
    lo, hi = bounds(draw, dst)
    fields = {"x_zero": draw(zeros(src)), "y_zero": draw(zeros(dst)), "multiplier": draw(multipliers), "shift": draw(shifts),
              "lo": lo, "hi": hi}  # fmt: skip
    x = integers(draw(shapes), src, draw(st.integers(0, 99)), draw(st.sampled_from([1, 0.05])))
    v = rescale(big(x) - fields["x_zero"], fields["multiplier"], fields["shift"])
    run(Op.requantize, [x], struct("RequantizeAttrs", **fields), stored(v, fields["y_zero"], lo, hi, dst), draw)


@pytest.mark.parametrize("src", STORED, ids=str)
@pytest.mark.parametrize("dst", STORED, ids=str)
def test_requantize_every_value(src: torch.dtype, dst: torch.dtype) -> None:
    least, most = LIMITS[src]
    lo, hi = LIMITS[dst]
    x = torch.arange(least, most + 1, dtype=torch.int32).to(src)
    for k, m in enumerate(MULTIPLIERS):
        for i, s in enumerate(SHIFTS):
            x_zero, y_zero = (0, least, most)[k % 3], (0, hi, lo)[i % 3]
            v = rescale(x.numpy().astype(np.int64) - x_zero, m, s) if s else (x.numpy().astype(np.int64) - x_zero) * m
            want = torch.from_numpy(np.clip(v + y_zero, lo, hi)).to(dst)
            out = torch.zeros_like(want)
            attrs = struct("RequantizeAttrs", x_zero=x_zero, y_zero=y_zero, multiplier=m, shift=s, lo=lo, hi=hi)
            native.run_op(Op.requantize, [x], [out], attrs, tiles=3)
            assert torch.equal(out, want), (m, s)


REALS = (0.0, -0.0, 0.5, 1.5, 2.5, -0.5, -1.5, 0.49999997, 127.4999, 127.5, -128.5, -129.5, 4194303.5, 8388609.0, 1e9, -1e9, 1e30,
         -1e30, math.inf, -math.inf, math.nan, 1e-40, 32767.5, -32768.5)  # fmt: skip


@settings(max_examples=600, deadline=None, derandomize=True)
@given(st.data())
def test_quantize(data: st.DataObject) -> None:
    draw = data.draw
    dst = draw(st.sampled_from(STORED))
    (lo, hi), y_zero = bounds(draw, dst), draw(zeros(dst))
    scale = float(np.float32(draw(st.sampled_from([1.0, 0.5, 2.0, 1e-30, 1e30, 1 / 3]) | st.floats(1e-3, 1e3))))
    g = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    x = torch.randn(draw(shapes), generator=g) * draw(st.sampled_from([1.0, 100.0, 1e5])) / scale
    some = torch.tensor(REALS)[: x.numel()]
    x.view(-1)[: some.numel()] = some
    attrs = struct("RequantizeAttrs", y_zero=y_zero, scale=scale, lo=lo, hi=hi)
    run(Op.requantize, [x], attrs, stored(half_even(x, scale), y_zero, lo, hi, dst), draw)


@pytest.mark.parametrize("dst", STORED, ids=str)
def test_quantize_as_torch(dst: torch.dtype) -> None:
    """torch rounds x * (1 / scale) and does not say what NaN becomes; here it is the zero point."""
    import torch.ao.quantization.fx._decomposed  # noqa: F401  (registers the operator)

    lo, hi = LIMITS[dst]
    g = torch.Generator().manual_seed(1)
    x = torch.cat([torch.randn(4000, generator=g) * 50, torch.arange(-300, 300) / 2, torch.tensor(REALS)])
    for scale, zero in ((0.25, 3), (0.1, -128), (1 / 256, 127), (1.0, 0), (3.7e-3, lo), (0.02, hi)):
        reciprocal = 1.0 / np.float32(scale)
        want = torch.ops.quantized_decomposed.quantize_per_tensor(x.nan_to_num(0.0, math.inf, -math.inf), float(np.float32(scale)),
                                                                  zero, lo, hi, dst)  # fmt: skip
        attrs = struct("RequantizeAttrs", y_zero=zero, scale=reciprocal, lo=lo, hi=hi)
        finite = x.abs() * float(reciprocal) < 2**30  # torch's integers overflow beyond
        want = torch.where(finite | x.isnan(), want, torch.where(x > 0, hi, lo).to(dst))
        verify(Case(Op.requantize, attrs, [x], [want], tiles=TILES))


@pytest.mark.parametrize("src", STORED, ids=str)
def test_dequantize(src: torch.dtype) -> None:
    least, most = LIMITS[src]
    x = torch.arange(least, most + 1, dtype=torch.int32).to(src)
    for zero in (0, least, most, 5):
        for scale in (1.0, 0.1, 1e-30, 3e37, 2**-20):
            want = (x.int() - zero).float() * torch.tensor(scale)
            out = torch.zeros_like(want)
            native.run_op(Op.requantize, [x], [out], struct("RequantizeAttrs", x_zero=zero, scale=scale), tiles=5)
            assert torch.equal(out, want)
    for shape in ((), (0, 3), (1,), (2, 3, 70), (3, 5, 7, 2)):
        x = integers(shape, src)
        want = (x.int() - 3).float() * torch.tensor(0.3)
        verify(
            Case(Op.requantize, struct("RequantizeAttrs", x_zero=3, scale=0.3), [x], [want], relative=0, tiles=TILES)
        )


@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_requantize_in_place(dtype: torch.dtype) -> None:
    lo, hi = LIMITS[dtype]
    for shape in ((1,), (700,), (3, 5, 70), (40, 3)):
        x = integers(shape, dtype)
        want = stored(rescale(big(x) - 2, 3 << 28, 30), -1, lo, hi, dtype)
        attrs = struct("RequantizeAttrs", x_zero=2, y_zero=-1, multiplier=3 << 28, shift=30, lo=lo, hi=hi)
        verify(Case(Op.requantize, attrs, [x], [want], inplace=0, tiles=TILES))
        for arrange in ("gaps", "flip"):
            y = place(x, arrange)
            native.run_op(Op.requantize, [y], [y], attrs, tiles=2)
            assert torch.equal(y, want)


# ---- binary ----------------------------------------------------------------------------------------------------------------
def binary(kind: BinaryKind, a: Any, b: Any, f: dict[str, int]) -> Any:
    a, b = a - f["a_zero"], b - f["b_zero"]
    if kind == BinaryKind.mul:
        return rescale(a * b, f["a_multiplier"], f["shift"])
    p, q = a * f["a_multiplier"], b * f["b_multiplier"]
    return rescale(p + q if kind == BinaryKind.add else p - q, 1, f["shift"])


@settings(max_examples=1200, deadline=None, derandomize=True)
@given(st.data())
def test_binary(data: st.DataObject) -> None:
    draw = data.draw
    dtype, kind = draw(st.sampled_from(STORED)), draw(st.sampled_from(BinaryKind))
    lo, hi = bounds(draw, dtype)
    f = {"a_zero": draw(zeros(dtype)), "b_zero": draw(zeros(dtype)), "y_zero": draw(zeros(dtype)),
         "a_multiplier": draw(multipliers), "b_multiplier": draw(multipliers), "shift": draw(shifts)}  # fmt: skip
    shape = draw(shapes)
    sides = []
    for k in range(2):
        part = [1 if draw(st.integers(0, 3)) == 0 else n for n in shape][
            draw(st.integers(0, len(shape))) if shape else 0 :
        ]
        sides.append(integers(part if draw(st.booleans()) else shape, dtype, k + draw(st.integers(0, 50))))
    if draw(st.booleans()):
        sides.reverse()
    wide = [np.broadcast_to(big(x), shape) for x in sides]
    want = stored(binary(kind, *wide, f), f["y_zero"], lo, hi, dtype)
    run(Op.binary, sides, struct("BinaryAttrs", kind=kind, lo=lo, hi=hi, **f), want, draw)


@pytest.mark.parametrize("kind", BinaryKind)
def test_binary_every_pair(kind: BinaryKind) -> None:
    """All pairs of i8, where the kernel has a quick way and on both sides of its borders."""
    every = torch.arange(-128, 128, dtype=torch.int32).to(torch.int8)
    a, b = every.reshape(256, 1).expand(256, 256).contiguous(), every.expand(256, 256).contiguous()
    x, y = a.numpy().astype(np.int64), b.numpy().astype(np.int64)
    for i, m in enumerate(MULTIPLIERS):
        for k, s in enumerate(SHIFTS):
            f = {"a_zero": (0, -128, 127)[i % 3], "b_zero": (127, 0, -128)[k % 3], "y_zero": (0, 9, -128)[(i + k) % 3],
                 "a_multiplier": m, "b_multiplier": MULTIPLIERS[(i * 5 + k) % len(MULTIPLIERS)], "shift": s}  # fmt: skip
            want = torch.from_numpy(np.clip(binary(kind, x, y, f) + f["y_zero"], -128, 127)).to(torch.int8)
            out = torch.zeros_like(want)
            native.run_op(Op.binary, [a, b], [out], struct("BinaryAttrs", kind=kind, lo=-128, hi=127, **f), tiles=2)
            assert torch.equal(out, want), f


@pytest.mark.parametrize("dtype", STORED, ids=str)
@pytest.mark.parametrize("kind", BinaryKind)
def test_binary_layouts(kind: BinaryKind, dtype: torch.dtype) -> None:
    lo, hi = LIMITS[dtype]
    f = {"a_zero": 3, "b_zero": lo, "y_zero": hi - 60, "a_multiplier": 1 << 22, "b_multiplier": 5 << 19,
         "shift": 31 if kind == BinaryKind.mul else 23}  # fmt: skip
    for left, right in (((), ()), ((1,), (1,)), ((0, 3), (3,)), ((2, 3, 70), (2, 3, 70)), ((2, 70, 3), (3,)), ((5, 1, 7), (4, 1)),
                        ((2, 8, 5, 5), (8, 1, 1)), ((1,), (3, 9)), ((40, 3), (1,)), ((5, 700), (1,)), ((3, 700), (3, 1)), ((300, 3), (3,))):  # fmt: skip
        a, b = integers(left, dtype, 1), integers(right, dtype, 2)
        shape = np.broadcast_shapes(left, right)
        want = stored(
            binary(kind, np.broadcast_to(big(a), shape), np.broadcast_to(big(b), shape), f), f["y_zero"], lo, hi, dtype
        )
        attrs = struct("BinaryAttrs", kind=kind, lo=lo, hi=hi, **f)
        for side, x in enumerate((a, b)):
            verify(Case(Op.binary, attrs, [a, b], [want], inplace=side if x.shape == want.shape else None, tiles=TILES))


# ---- lookup ----------------------------------------------------------------------------------------------------------------
TABLES = (torch.int8, torch.uint8, torch.bool, torch.int16, torch.float16, torch.bfloat16, torch.int32, torch.float32)


@pytest.mark.parametrize("source", (torch.int8, torch.uint8), ids=str)
@pytest.mark.parametrize("dtype", TABLES, ids=str)
def test_lookup(dtype: torch.dtype, source: torch.dtype) -> None:
    g = torch.Generator().manual_seed(3)
    table = (torch.randn(256, generator=g) * 100).to(dtype)
    least = torch.iinfo(source).min
    every = torch.arange(least, least + 256).to(source)
    for shape in ((), (0, 4), (1,), (256,), (3, 7, 70), (5, 3, 4, 2), (2000,)):
        x = every[torch.randint(0, 256, shape, generator=g)] if shape != (256,) else every
        want = table[(x.int() - least).long()]
        case = Case(Op.lookup, struct("LookupAttrs"), [x, table], [want], relative=0, inplace=0, tiles=TILES,
                    layouts=("dense", "last", "gaps", "flip"))  # fmt: skip
        verify(case)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.data())
def test_lookup_strides(data: st.DataObject) -> None:
    draw = data.draw
    dtype = draw(st.sampled_from([torch.int8, torch.int16, torch.float32]))
    table = torch.randint(-100, 100, (256,), generator=torch.Generator().manual_seed(draw(st.integers(0, 50)))).to(
        dtype
    )
    x = integers(draw(shapes), torch.int8, draw(st.integers(0, 50)))
    x = placed(draw, x)
    if x.ndim and draw(st.booleans()) and x.shape[0]:
        x = x[:1].expand(x.shape)
    want = table[x.long() + 128]
    out = layout(draw, want.shape, dtype)
    native.run_op(Op.lookup, [x, table], [out], struct("LookupAttrs"), tiles=draw(st.sampled_from([0, 1, 2, 5])))
    assert torch.equal(out, want)


# ---- what is refused -------------------------------------------------------------------------------------------------------
def test_refusals() -> None:
    i8, i16, f32 = (torch.zeros(1, 2, 4, 4, dtype=t) for t in (torch.int8, torch.int16, torch.float32))
    requantize: dict[str, Any] = {"multiplier": 1, "shift": 0, "scale": 1.0, "lo": -128, "hi": 127}
    two: dict[str, Any] = {"kind": 0, "a_multiplier": 1, "b_multiplier": 1, "lo": -128, "hi": 127}
    mean: dict[str, Any] = {"kind": ReduceKind.mean, "axes": 12, "multiplier": 1, "lo": -128, "hi": 127}
    pool: dict[str, Any] = {"nd": 2, "kernel": [2, 2], "stride": [2, 2], "multiplier": 1, "lo": -128, "hi": 127}
    one, half = torch.zeros(1, 2, 1, 1, dtype=torch.int8), torch.zeros(1, 2, 2, 2, dtype=torch.int8)
    row = torch.zeros(256, dtype=torch.int8)
    good: list[tuple[Op, list[torch.Tensor], torch.Tensor, str, dict[str, Any]]] = [
        (Op.requantize, [i8], i8.clone(), "RequantizeAttrs", requantize),
        (Op.requantize, [f32], i8.clone(), "RequantizeAttrs", requantize),
        (Op.requantize, [i8], f32.clone(), "RequantizeAttrs", requantize),
        (Op.binary, [i8, i8], i8.clone(), "BinaryAttrs", two),
        (Op.lookup, [i8, row], i8.clone(), "LookupAttrs", {}),
        (Op.qreduce, [i8], one, "QreduceAttrs", mean),
        (Op.qpool, [i8], half, "QpoolAttrs", pool),
    ]
    for op, inputs, out, name, fields in good:
        native.run_op(op, inputs, [out], struct(name, **fields))
        if op == Op.lookup:
            continue
        for change in ({"lo": 1, "hi": 0}, {"lo": -129}, {"hi": 128}, {"y_zero": 200}, {"x_zero": -129}, {"shift": -1}, {"shift": 63},
                       {"multiplier": -1}, {"a_zero": 128}, {"b_zero": -300}, {"a_multiplier": -1}, {"b_multiplier": -(2**31)},
                       {"scale": math.nan}, {"scale": math.inf}, {"scale": 0.0}, {"kind": 77}):  # fmt: skip
            key = next(iter(change))
            if key not in struct(name).dtype.names:
                continue
            if out.dtype == torch.float32 and key in ("lo", "hi", "y_zero", "shift", "multiplier"):
                continue  # not read
            if inputs[0].dtype == torch.float32 and key in ("x_zero", "shift", "multiplier"):
                continue
            if key == "scale" and torch.float32 not in (out.dtype, inputs[0].dtype):
                continue
            with pytest.raises(Error):
                native.run_op(op, inputs, [out], struct(name, **{**fields, **change}))
    bad: list[tuple[Op, list[torch.Tensor], torch.Tensor, str, dict[str, Any]]] = [
        (Op.requantize, [f32], f32.clone(), "RequantizeAttrs", requantize),
        (Op.requantize, [i8.to(torch.uint8)], i8.clone(), "RequantizeAttrs", requantize),
        (Op.requantize, [i8], i8.to(torch.int32), "RequantizeAttrs", requantize),
        (Op.requantize, [i8], one, "RequantizeAttrs", requantize),
        (Op.binary, [i8, i16], i8.clone(), "BinaryAttrs", two),
        (Op.binary, [i8, i8], i16.clone(), "BinaryAttrs", two),
        (Op.binary, [f32, f32], f32.clone(), "BinaryAttrs", two),
        (Op.binary, [i8, i8[..., :3]], i8.clone(), "BinaryAttrs", two),
        (Op.lookup, [i16, row], i8.clone(), "LookupAttrs", {}),
        (Op.lookup, [i8, row[:255]], i8.clone(), "LookupAttrs", {}),
        (Op.lookup, [i8, row.double()], i8.double(), "LookupAttrs", {}),
        (Op.lookup, [i8, row.float()], i8.clone(), "LookupAttrs", {}),
        (Op.lookup, [i8, torch.zeros(512, dtype=torch.int8)[::2]], i8.clone(), "LookupAttrs", {}),
        (Op.lookup, [i8, row], one, "LookupAttrs", {}),
        (Op.qreduce, [i8], i8.clone(), "QreduceAttrs", mean),
        (Op.qreduce, [i8], one, "QreduceAttrs", {**mean, "axes": 16}),
        (Op.qreduce, [i8], one, "QreduceAttrs", {**mean, "kind": ReduceKind.max}),
        (Op.qreduce, [i8], one, "QreduceAttrs", {**mean, "multiplier": 1 << 23}),
        (Op.qreduce, [i8], one, "QreduceAttrs", {**mean, "shift": 41}),
        (Op.qreduce, [f32], one.float(), "QreduceAttrs", mean),
        (Op.qreduce, [torch.zeros(1, dtype=torch.int8).expand(1 << 20, 1 << 20)], one[0, 0], "QreduceAttrs", {**mean, "axes": 3}),
        (Op.qpool, [i8], half.to(torch.int16), "QpoolAttrs", pool),
        (Op.qpool, [i8], half, "QpoolAttrs", {**pool, "divisor": -1}),
        (Op.qpool, [i8], half, "QpoolAttrs", {**pool, "multiplier": 1 << 23}),
        (Op.qpool, [i8], half, "QpoolAttrs", {**pool, "stride": [0, 1]}),
        (Op.qpool, [i8], half, "QpoolAttrs", {**pool, "nd": 3}),
        (Op.qpool, [i8[..., None]], half[..., None], "QpoolAttrs",
         {**pool, "nd": 3, "kernel": [65535] * 3, "stride": [1] * 3}),
        (Op.qpool, [f32], half.float(), "QpoolAttrs", pool),
    ]  # fmt: skip
    for op, inputs, out, name, fields in bad:
        with pytest.raises(Error):
            native.run_op(op, inputs, [out], struct(name, **fields))


EXTREMES = (
    0,
    1,
    -1,
    2,
    3,
    17,
    40,
    62,
    63,
    127,
    -128,
    128,
    255,
    32767,
    -32768,
    65535,
    2**22,
    2**23,
    2**30,
    2**31 - 1,
    -(2**31),
)


@settings(max_examples=3000, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1))
def test_anything(seed: int) -> None:
    """Attributes, dtypes, shapes and strides of any kind are refused or give some result; a sanitizer would tell of more."""
    rng = np.random.default_rng(seed)
    base = torch.from_numpy(rng.integers(0, 256, 1 << 15, dtype=np.uint8))

    def tensor(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        if rng.integers(8) == 0:
            shape = [int(rng.choice([0, 1, 2, 5, 9])) for _ in range(rng.integers(0, 6))]
        dense = base.view(dtype)[int(rng.integers(0, 64)) :]
        if rng.integers(3) and math.prod(shape) <= 4000:
            return dense[: math.prod(shape)].reshape(shape)
        strides = [int(rng.choice([0, 1, 2, 9, 70])) for _ in shape]
        return (
            dense.as_strided(shape, strides)
            if sum(n * k for n, k in zip(shape, strides, strict=True)) < 4000
            else dense[:1]
        )

    dtypes = (torch.int8, torch.int16, torch.float32)
    op = (Op.requantize, Op.binary, Op.lookup, Op.qpool, Op.qreduce)[rng.integers(5)]
    name = f"{op.name.capitalize()}Attrs"
    kind, other = dtypes[rng.integers(2)], dtypes[rng.integers(3)]
    x = [2, int(rng.choice([1, 3, 70])), 5, 6]
    y = {Op.qreduce: [2, 1, 1, 6], Op.qpool: [*x[:2], 3, 4]}.get(op, x)
    fields: dict[str, Any] = {"multiplier": 4000000, "a_multiplier": 1 << 30, "b_multiplier": 1 << 29, "shift": 23, "lo": -128, "hi": 127,
                              "scale": 0.1, "nd": 2, "kernel": [3, 3], "stride": [2, 2], "pad": [1, 2], "axes": 6,
                              "kind": ReduceKind.mean if op == Op.qreduce else 0}  # fmt: skip
    attrs = struct(name, **{k: v for k, v in fields.items() if k in struct(name).dtype.names})
    for _ in range(rng.integers(0, 3)):
        field = attrs[rng.choice(list(attrs.dtype.names))].reshape(-1)
        at = int(rng.integers(field.size))
        value = np.array(rng.choice(EXTREMES) if rng.integers(2) else rng.integers(-(2**31), 2**31))
        field[at : at + 1] = value.astype(field.dtype)
    inputs = [tensor(x, kind if op != Op.requantize else other)]
    if op in (Op.binary, Op.lookup):
        inputs.append(tensor(x if op == Op.binary else [256], kind))
    out = torch.zeros(y, dtype=kind)
    if rng.integers(4) == 0:
        out = torch.zeros(y[::-1], dtype=kind).permute(3, 2, 1, 0)
    with contextlib.suppress(Error):
        native.run_op(op, inputs, [out], attrs, tiles=int(rng.choice([0, 1, 3])))
