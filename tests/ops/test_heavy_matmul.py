"""matmul on every ISA against torch: dtypes, broadcasting, strides, packed weights, epilogues, tiles."""

from __future__ import annotations

import pytest
import torch
from heavy import FLOATS, check, isa_levels, laid_out, packed, place, run, struct
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet import native
from trivet.error import Error
from trivet.fbs.structs import Act, Op

INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
SIZES = st.sampled_from([0, 1, 2, 3, 7, 12, 13, 16, 17, 31, 33, 64, 97, 130])
LAYOUTS = st.sampled_from(["dense", "dense", "gaps", "flip"])
ACTS = {
    Act.none: lambda x: x,
    Act.clamp: lambda x: x.clamp(-0.5, 6),
    Act.sigmoid: torch.sigmoid,
    Act.tanh: torch.tanh,
    Act.gelu: torch.nn.functional.gelu,
    Act.gelu_tanh: lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    Act.silu: torch.nn.functional.silu,
    Act.hard_swish: torch.nn.functional.hardswish,
    Act.hard_sigmoid: torch.nn.functional.hardsigmoid,
    Act.leaky: lambda x: torch.nn.functional.leaky_relu(x, -0.5),
    Act.elu: lambda x: torch.nn.functional.elu(x, -0.5),
}


def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape).to(dtype)
    return torch.randint(0 if dtype == torch.uint8 else -100, 100, shape).to(dtype)


def reference(a: torch.Tensor, b: torch.Tensor, extra: list[torch.Tensor | None], act: Act) -> torch.Tensor:
    wide = torch.float64 if a.dtype.is_floating_point else torch.int64
    y = a.to(wide) @ b.to(wide)
    for x in extra:
        y = y if x is None else y + x.to(wide)
    return ACTS[act](y).to(a.dtype)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_matmul(data: st.DataObject) -> None:
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 1000)))
    m, n, k = draw(SIZES), draw(SIZES), draw(SIZES | st.sampled_from([800, 1700]))
    dtype = draw(st.sampled_from([*FLOATS, *[torch.float32] * 4, *INTS]))
    batch = draw(st.sampled_from([(), (2,), (3, 1), (2, 3)]))
    b_batch = draw(st.sampled_from([(), batch, (1,) * len(batch)]))
    is_float = dtype.is_floating_point
    act = draw(st.sampled_from(list(ACTS))) if is_float else Act.none
    a = place(numbers((*batch, m, k), dtype), draw(LAYOUTS))
    b = place(numbers((*b_batch, k, n), dtype), draw(LAYOUTS))
    bias = draw(st.sampled_from([None, (n,), (1,), (m, n), (m, 1), (*batch, 1, n)]))
    bias_value = None if bias is None else numbers(bias, dtype)
    residual = place(numbers((*batch, m, n), dtype), draw(LAYOUTS)) if draw(st.booleans()) else None
    use_packed = is_float and dtype != torch.float64 and b_batch == () and k > 0 and n > 0 and draw(st.booleans())
    attrs = struct("MatmulAttrs", packed=use_packed, act=act, lo=-0.5, hi=6.0)
    out = laid_out((*batch, m, n), dtype, draw(LAYOUTS))
    run(Op.matmul, [a, packed(Op.matmul, attrs, b) if use_packed else b, bias_value, residual], out, attrs,
        isa=draw(st.sampled_from(isa_levels(Op.matmul))), tiles=draw(st.sampled_from([0, 1, 3, 7])))  # fmt: skip
    want, scale = reference(a, b, [bias_value, residual], act), None
    if (
        is_float and want.numel()
    ):  # a saturating activation shrinks values, not the rounding errors of the sum before it
        before = reference(a, b, [bias_value, residual], Act.none)
        scale = max(float(before.abs().nan_to_num(0).max()), float(want.abs().nan_to_num(0).max()), 1e-3)
    check(out, want, scale=scale)


@pytest.mark.parametrize("isa", isa_levels(Op.matmul))
def test_vector_left(isa: str) -> None:
    torch.manual_seed(0)
    a, b, bias = torch.randn(40), torch.randn(40, 19), torch.randn(19)
    attrs = struct("MatmulAttrs")
    check(run(Op.matmul, [a, b, bias], torch.empty(19), attrs, isa=isa), a @ b + bias)


@pytest.mark.parametrize("isa", isa_levels(Op.matmul))
def test_residual_in_place(isa: str) -> None:
    """The output may be the residual's memory."""
    torch.manual_seed(0)
    a, b, y = torch.randn(30, 50), torch.randn(50, 64), torch.randn(30, 64)
    attrs = struct("MatmulAttrs", packed=1, act=Act.clamp, lo=0.0, hi=float("inf"))
    want = torch.relu(a @ b + y)
    check(run(Op.matmul, [a, packed(Op.matmul, attrs, b), None, y], y, attrs, isa=isa), want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("isa", isa_levels(Op.matmul))
def test_halves(isa: str, dtype: torch.dtype) -> None:
    """Packed halves of both sides, sums in float32: the only rounding that shows is that of the result."""
    torch.manual_seed(0)
    for m, k, n in [(1, 64, 48), (1, 7, 20), (5, 1, 3), (13, 31, 40), (70, 300, 33), (100, 96, 64), (3, 1700, 16)]:
        a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
        bias, residual = torch.randn(n).to(dtype), torch.randn(m, n).to(dtype)
        attrs = struct("MatmulAttrs", packed=1)
        out = run(
            Op.matmul, [a, packed(Op.matmul, attrs, b), bias, residual], torch.empty(m, n, dtype=dtype), attrs, isa=isa
        )
        want = a.double() @ b.double() + bias.double() + residual.double()
        size = a.double().abs() @ b.double().abs() + bias.double().abs() + residual.double().abs()
        unit = torch.finfo(dtype).eps / 2 * want.abs()
        assert bool(((out.double() - want).abs() <= unit * 1.001 + 2e-6 * size + 1e-7).all())


@pytest.mark.parametrize("isa", isa_levels(Op.matmul))
def test_nan_and_inf(isa: str) -> None:
    a, b = torch.randn(13, 20), torch.randn(20, 33)
    a[3, 4], a[5, 0], b[2, 7] = float("nan"), float("inf"), float("-inf")
    attrs = struct("MatmulAttrs", act=Act.clamp, lo=0.0, hi=float("inf"))
    check(run(Op.matmul, [a, b], torch.empty(13, 33), attrs, isa=isa), torch.relu(a.double() @ b.double()).float())


def test_packing_round_trip() -> None:
    w = torch.arange(5 * 20.0).reshape(5, 20)
    got = packed(Op.matmul, struct("MatmulAttrs"), w).reshape(2, 5, 16)
    assert got[0].tolist() == w[:, :16].tolist()
    assert got[1, :, :4].tolist() == w[:, 16:].tolist()
    assert not got[1, :, 4:].any()
    assert (got == packed(Op.matmul, struct("MatmulAttrs"), w.t().contiguous().t()).reshape(2, 5, 16)).all()


def test_refusals() -> None:
    x, w = torch.randn(4, 6), torch.randn(6, 8)
    attrs, pack = struct("MatmulAttrs"), struct("MatmulAttrs", packed=1)
    blob = packed(Op.matmul, pack, w)
    bad = [
        ([x, torch.randn(5, 8)], torch.empty(4, 8), attrs),
        ([x, w], torch.empty(4, 9), attrs),
        ([x, w], torch.empty(5, 8), attrs),
        ([x, w], torch.empty(2, 4, 8, dtype=torch.float64), attrs),
        ([x, w, torch.randn(7)], torch.empty(4, 8), attrs),
        ([x, w, None, torch.randn(4, 1)], torch.empty(4, 8), attrs),
        ([x, blob[:-1]], torch.empty(4, 8), pack),
        ([x, blob], torch.empty(4, 17), pack),
        ([x.double(), blob], torch.empty(4, 8, dtype=torch.float64), pack),
        ([x, w], torch.empty(4, 8), struct("MatmulAttrs", act=77)),
        ([x, w], torch.empty(1, 8).expand(4, 8), attrs),
        ([x.bool(), w.bool()], torch.empty(4, 8, dtype=torch.bool), attrs),
        ([torch.randn(3, 4, 6), torch.randn(2, 6, 8)], torch.empty(3, 4, 8), attrs),
    ]
    for inputs, out, struct_ in bad:
        with pytest.raises(Error, match="matmul|output"):
            native.run_op(Op.matmul, inputs, [out], struct_)
