"""Elementwise operators against eager torch."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from eager import check
from hypothesis import given, settings
from hypothesis import strategies as st

SPECIAL = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 1.5, 2.5, 1e30, -1e-30, math.inf, -math.inf, math.nan, 3.7])
UNIT = torch.tensor([0.0, -0.99, 0.99, 0.25, -0.5, 1.0, -1.0, math.nan])
INTS = torch.tensor([-7, 7, -7, 7, 0, -1, 100, -128])
OTHER = torch.tensor([2, -2, -2, 2, 5, 9, 7, 3])

UNARY = ("exp expm1 exp2 log log2 log10 log1p sqrt rsqrt reciprocal sin cos tan atan sinh cosh tanh asinh acosh erf erfc "
         "sigmoid neg abs sign sgn floor ceil trunc frac square deg2rad rad2deg isnan isinf isfinite isposinf isneginf "
         "nan_to_num signbit lgamma sinc logical_not round positive angle").split()  # fmt: skip


def test_unary() -> None:
    check(lambda x: [getattr(torch, n)(x) for n in UNARY], SPECIAL)
    check(lambda x: [getattr(torch, n)(x) for n in ("asin", "acos", "atanh", "erfinv", "logit")], UNIT)
    check(lambda x: [torch.digamma(x), torch.special.entr(x), torch.logit(x, 0.1)], torch.rand(9))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64])
def test_unary_of_integers(dtype: torch.dtype) -> None:
    names = [n for n in UNARY if n not in ("frac", "nan_to_num", "logit", "round")]
    if dtype == torch.uint8:
        names = [n for n in names if n != "neg"]
    check(lambda x: [getattr(torch, n)(x) for n in names], torch.tensor([0, 1, 2, 3, 7, 100]).to(dtype))
    check(lambda x: [torch.nan_to_num(x), torch.bitwise_not(x), F.relu(x), x.clamp(1, 5), F.relu6(x)],
          torch.tensor([0, 1, 2, 3, 7, 100]).to(dtype))  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_unary_of_other_floats(dtype: torch.dtype) -> None:
    names = [n for n in UNARY if n not in ("lgamma", "sinc", "deg2rad", "exp2")]
    check(lambda x: [getattr(torch, n)(x) for n in names], SPECIAL.to(dtype))


def test_activations() -> None:
    def f(x: torch.Tensor) -> list[torch.Tensor]:
        return [F.relu(x), F.relu6(x), F.gelu(x), F.gelu(x, approximate="tanh"), F.silu(x), F.mish(x), F.hardswish(x),
                F.hardsigmoid(x), F.hardtanh(x), F.hardtanh(x, -2, 3), F.leaky_relu(x), F.leaky_relu(x, 0.3), F.elu(x),
                F.elu(x, 0.7), F.selu(x), F.celu(x, 1.3), F.softplus(x), F.softplus(x, 2, 10), F.logsigmoid(x),
                F.hardshrink(x, 0.6), F.softshrink(x, 0.6), F.tanhshrink(x), F.softsign(x), F.threshold(x, 0.1, 7),
                F.rrelu(x), x.clamp_min(0.1), x.clamp_max(0.1), x.clamp(-1, 1), torch.clamp(x, min=1, max=-1)]  # fmt: skip

    check(f, torch.cat([SPECIAL, torch.randn(18) * 20]))
    check(f, torch.randn(33).half())


def test_glu_and_prelu() -> None:
    check(lambda x, w: [F.glu(x), F.glu(x, 1), F.prelu(x, w), F.prelu(x, w[:1]), F.prelu(x[0, :, 0], w[:1])],
          torch.randn(2, 4, 6), torch.randn(4))  # fmt: skip
    check(lambda x, w: [F.prelu(x, w)], torch.randn(3, 4), torch.randn(4))


def test_binary() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [x + y, x - y, x * y, x / y, torch.add(x, y, alpha=2), torch.sub(x, y, alpha=0.5), torch.rsub(x, y),
                2 - x, 3 / x, torch.div(x, y, rounding_mode="floor"), torch.div(x, y, rounding_mode="trunc"), x // y,
                x % y, torch.fmod(x, y), torch.fmod(x, 2), x % 3, 3 % x, torch.remainder(x, -2), x.abs() ** y, x**2, x**3,
                x**0.5, x**-0.5, x**-1, x**-2, x**0, x**1, x**5, 2**x, 3.5**x, torch.atan2(x, y), torch.hypot(x, y),
                torch.copysign(x, y), torch.maximum(x, y), torch.minimum(x, y), torch.fmax(x, y), torch.fmin(x, y),
                x.clamp(y), torch.clamp(x, y, y + 1), torch.lerp(x, y, 0.3), torch.lerp(x, y, 0.7), torch.lerp(x, y, y),
                torch.addcmul(x, y, y), torch.addcmul(x, y, y, value=0.3), torch.addcdiv(x, y, x, value=2),
                torch.logaddexp(x, y), torch.logaddexp2(x, y), torch.xlogy(x, y), torch.heaviside(x, y),
                torch.float_power(x, 2), x == y, x != y, x < y, x <= y, x > y, x >= y, x == 1, x > 0.5, x.eq(0), x.ge(1),
                torch.logical_and(x, y), torch.logical_or(x, y), torch.logical_xor(x, y), torch.ldexp(x, y),
                torch.max(x, y), torch.min(x, y), torch.where(x > y, x, 2.5), torch.where(x > y, 1.0, y)]  # fmt: skip

    check(f, SPECIAL, torch.randn(14))
    check(f, SPECIAL[:7].unsqueeze(1), SPECIAL[7:])


def test_binary_of_integers() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [x + y, x - y, x * y, x / y, torch.add(x, y, alpha=3), x // y, x % y, torch.fmod(x, y), x // 3, x % -3,
                torch.div(x, y, rounding_mode="floor"), torch.div(x, y, rounding_mode="trunc"), x**2, x**5,
                torch.maximum(x, y), x & y, x | y, x ^ y, x & 3, x << 2, x >> 1, x.clamp(-3, 3), x + 1.5, x * 0.5, x / 2,
                x == 1.5, x > -0.5, x == y, torch.bitwise_left_shift(x, 1), torch.where(x > y, x, 0), torch.where(x > y, x, 0.5),
                x.masked_fill(x > 0, 9), torch.addcmul(x, y, y), x.abs() ** y.abs(), torch.gt(x, 3), x * True]  # fmt: skip

    check(f, INTS, OTHER)
    check(f, INTS.int(), OTHER.int())
    check(f, INTS.to(torch.int8), OTHER.to(torch.int8))
    check(f, INTS.int(), OTHER)


def test_bool() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [x & y, x | y, x ^ y, ~x, x + y, x * y, x == y, x < y, torch.maximum(x, y), torch.minimum(x, y), x + 1,
                x * 2.5, x.logical_not(), torch.where(x, y, False), x.masked_fill(y, True), x.float(), x.int() - 1]  # fmt: skip

    check(f, torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False]))


def test_half_rounds_once() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [x + y, x * y, x + 0.1, x * 0.1, x / 3, torch.addcmul(x, x, y), x - 1000.3,
                x > 0.1, torch.lerp(x, y, 0.1), x * torch.tensor(0.1), x + 500.0]  # fmt: skip

    graph = check(f, (torch.randn(200) * 3).half(), torch.randn(200).half(), rtol=0, atol=0)
    assert graph
    x, y = (torch.randn(500) * 3).half(), torch.randn(500).half()
    from eager import capture, evaluate

    for want, got in zip(f(x, y), evaluate(capture(f, x, y), (x, y)), strict=True):
        assert torch.equal(want, got)


def test_conversions() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [x.to(torch.float64), x.half(), x.to(torch.bfloat16), x.int(), x.bool(), x.to(torch.int64), x.type_as(y), x.to(y),
                x.clone(), x.contiguous(), x.detach(), torch.zeros_like(x).copy_(y), torch.full_like(x, 3).fill_(2),
                x.to("cpu"), F.dropout(x, 0.5, False), y.float() + x, y.bool(), x.masked_fill(y > 0, -1),
                x.masked_fill(y > 0, torch.tensor(4))]  # fmt: skip

    check(f, torch.tensor([1.7, -2.6, 0.0, 300.25]), torch.tensor([1, 0, -3, 4]))


DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
          torch.float64]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.sampled_from([(3,), (), (2, 1), (1, 3)]),
       st.sampled_from([(3,), (), (2, 3)]), st.sampled_from([2, 1.5, True]))  # fmt: skip
def test_promotion(p: torch.dtype, q: torch.dtype, s: tuple[int, ...], t: tuple[int, ...], number: float) -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        out = [x + y, x * y, x / y, x + number, x * number, x / number, x == y, x < y, x > number, torch.maximum(x, y),
               torch.where(x > y, x, y), torch.where(x > y, x, number)]  # fmt: skip
        if torch.bool not in (p, q):
            out += [x - y, number - x if number is not True else x, x // y, x % y]
        return out

    x = (torch.arange(math.prod(s)).reshape(s) + 1).to(p)
    y = (torch.arange(math.prod(t)).reshape(t) * 2 + 1).to(q)
    check(f, x, y)
