"""map: every instruction and dtype against torch, fused code, broadcasting, layouts, and code that must be refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from basic import ALL, FLOATS, INTS, Case, Code, MapOp, Op, map_case, native, struct, values, verify
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.error import Error
from trivet.fbs.structs import STRUCTS

F = torch.nn.functional
CORNERS = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, -3.0, 1e-30, -1e-30, 1e-5, 88.0, -88.0, 100.0, -104.0, 6.0,
           20.5, math.inf, -math.inf, math.nan]  # fmt: skip

# instruction: (torch function, domain, relative error allowed in float32)
UNARY: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[float, float], float]] = {
    "neg": (torch.neg, (-9, 9), 0), "abs": (torch.abs, (-9, 9), 0), "sign": (torch.sign, (-9, 9), 0),
    "floor": (torch.floor, (-9, 9), 0), "ceil": (torch.ceil, (-9, 9), 0), "round": (torch.round, (-9, 9), 0),
    "trunc": (torch.trunc, (-9, 9), 0), "exp": (torch.exp, (-80, 80), 4e-7), "expm1": (torch.expm1, (-9, 9), 4e-7),
    "exp2": (torch.exp2, (-80, 80), 4e-7), "log": (torch.log, (1e-9, 90), 4e-7), "log2": (torch.log2, (1e-9, 90), 4e-7),
    "log10": (torch.log10, (1e-9, 90), 4e-7), "log1p": (torch.log1p, (-0.99, 9), 4e-7),
    "sqrt": (torch.sqrt, (0, 90), 2e-7), "rsqrt": (torch.rsqrt, (1e-9, 90), 3e-7),
    "recip": (torch.reciprocal, (-9, 9), 2e-7), "sin": (torch.sin, (-90, 90), 1e-6), "cos": (torch.cos, (-90, 90), 1e-6),
    "tan": (torch.tan, (-1.5, 1.5), 1e-6), "asin": (torch.asin, (-1, 1), 1e-6), "acos": (torch.acos, (-1, 1), 1e-6),
    "atan": (torch.atan, (-9, 9), 1e-6), "sinh": (torch.sinh, (-9, 9), 1e-6), "cosh": (torch.cosh, (-9, 9), 1e-6),
    "tanh": (torch.tanh, (-9, 9), 4e-7), "asinh": (torch.asinh, (-9, 9), 1e-6), "acosh": (torch.acosh, (1, 9), 1e-6),
    "atanh": (torch.atanh, (-0.99, 0.99), 1e-6), "erf": (torch.erf, (-4, 4), 4e-7), "erfc": (torch.erfc, (-4, 4), 1e-6),
    "erfinv": (torch.erfinv, (-0.999, 0.999), 1e-6), "lgamma": (torch.lgamma, (0.1, 20), 2e-6),
    "digamma": (torch.digamma, (-3.3, 20), 2e-5), "sigmoid": (torch.sigmoid, (-20, 20), 4e-7),
    "relu": (torch.relu, (-9, 9), 0), "gelu": (F.gelu, (-4, 9), 2e-6),
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), (-3, 9), 4e-6), "silu": (F.silu, (-20, 20), 6e-7),
    "hard_swish": (F.hardswish, (-9, 9), 3e-7), "hard_sigmoid": (F.hardsigmoid, (-9, 9), 3e-7),
    "softplus": (F.softplus, (-20, 30), 6e-7), "elu": (F.elu, (-9, 9), 4e-7), "mish": (F.mish, (-9, 9), 2e-6),
}  # fmt: skip
INT_UNARY = ("neg", "abs", "sign", "floor", "ceil", "round", "trunc", "relu")


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_unary(name: str, dtype: torch.dtype) -> None:
    fn, (low, high), relative = UNARY[name]
    x = values((5, 7, 33), dtype, low=low, high=high)
    x.view(-1)[: len(CORNERS)] = torch.tensor(CORNERS).to(dtype)
    op = MapOp[name]
    if dtype == torch.float32:
        want, r, a = (
            fn(x.double()).float(),
            relative,
            1e-7 if name in ("sin", "cos", "gelu", "gelu_tanh", "mish", "acos") else 1.2e-38,
        )
        if name in ("softplus", "mish", "hard_swish", "hard_sigmoid", "silu", "gelu_tanh", "sigmoid"):
            want = fn(x)  # what eager float32 does at infinities and where it underflows
            a = max(a, 1e-7)
        if name == "gelu":
            want[x == math.inf] = math.inf  # NaN in eager
        if name == "digamma":
            a = 2e-7
        verify(map_case(op, [x], want, relative=r, absolute=a, inplace=0))
    else:
        want = fn(x)
        if name == "gelu":
            want[x == math.inf] = math.inf
        a = {torch.float64: 1e-14, torch.float16: 1e-3, torch.bfloat16: 1e-2}[dtype]
        r = {torch.float64: 1e-9 if name == "digamma" else 1e-12, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
        verify(
            map_case(op, [x], want, relative=0 if relative == 0 and name != "hard_swish" else r, absolute=a, inplace=0)
        )


@pytest.mark.parametrize("name", INT_UNARY)
@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_unary_int(name: str, dtype: torch.dtype) -> None:
    x = values((4, 50), dtype, low=-200, high=200)
    info = torch.iinfo(dtype)
    x[0, :3] = torch.tensor([info.min, info.max, 0], dtype=dtype)
    want = x if name in ("floor", "ceil", "round", "trunc") else UNARY[name][0](x)
    verify(map_case(MapOp[name], [x], want, inplace=0))


def mod_zero(fn: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """fn of integers, but 0 where the divisor is 0 (eager raises)."""
    return lambda x, y: torch.where(y == 0, torch.zeros_like(x), fn(x, torch.where(y == 0, torch.ones_like(y), y)))


BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div,
    "floor_div": torch.floor_divide, "trunc_div": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "mod": torch.remainder, "fmod": torch.fmod, "pow": torch.pow, "atan2": torch.atan2,
    "min": torch.minimum, "max": torch.maximum, "fmin": torch.fmin, "fmax": torch.fmax,
    "eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge,
    "and_": torch.bitwise_and, "or_": torch.bitwise_or, "xor_": torch.bitwise_xor,
    "shl": torch.bitwise_left_shift, "shr": torch.bitwise_right_shift,
    "copysign": torch.copysign, "hypot": torch.hypot,
}  # fmt: skip
FLOAT_ONLY = ("div", "atan2", "copysign", "hypot")
INT_ONLY = ("and_", "or_", "xor_", "shl", "shr")
BOOL_TOO = ("add", "mul", "min", "max", "fmin", "fmax", "eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "xor_")


@pytest.mark.parametrize("name", [n for n in BINARY if n not in INT_ONLY])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_binary_float(name: str, dtype: torch.dtype) -> None:
    n = len(CORNERS)
    corners = torch.tensor(CORNERS).to(dtype)
    x, y = values((n + 2, n + 5), dtype, low=-9, high=9), values((n + 2, n + 5), dtype, 1, low=-9, high=9)
    x[:n, :n], y[:n, :n] = corners[:, None], corners[None, :]
    exact = name not in ("pow", "atan2", "hypot", "mod", "fmod", "floor_div")
    want = BINARY[name](x, y)
    if name == "pow":
        want = torch.pow(x.double(), y.double()).to(dtype)
    verify(map_case(MapOp[name], [x, y], want, relative=0 if exact else None, absolute=0 if exact else 1e-9, inplace=1))


@pytest.mark.parametrize("name", [n for n in BINARY if n not in FLOAT_ONLY])
@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_binary_int(name: str, dtype: torch.dtype) -> None:
    fn = BINARY[name]
    x, y = values((40, 41), dtype, low=-130, high=260), values((40, 41), dtype, 1, low=-6, high=9)
    info = torch.iinfo(dtype)
    if name not in ("shl", "shr"):
        x[0, :4] = torch.tensor([info.min, info.max, info.min, 0], dtype=dtype)
        y[0, :4] = torch.tensor([info.max, info.max, -1 if info.min else 1, info.min], dtype=dtype)
    else:
        y = values((40, 41), dtype, 1, low=0, high=dtype.itemsize * 8 - 1)
    if name in ("floor_div", "trunc_div", "mod", "fmod"):
        x[0, 2] = 5  # eager divides the least value by -1 in ways of its own
        fn = mod_zero(fn)
    verify(map_case(MapOp[name], [x, y], fn(x, y), inplace=0))


@pytest.mark.parametrize("name", BOOL_TOO)
def test_binary_bool(name: str) -> None:
    x, y = values((5, 70), torch.bool), values((5, 70), torch.bool, 1)
    fn = {"fmin": torch.logical_and, "min": torch.logical_and, "fmax": torch.logical_or, "max": torch.logical_or}
    verify(map_case(MapOp[name], [x, y], fn.get(name, BINARY[name])(x, y), inplace=0))


def test_wrapping_corners() -> None:
    for dtype in (torch.int32, torch.int64):
        least = torch.iinfo(dtype).min
        x, m = torch.tensor([least, least], dtype=dtype), torch.tensor([-1, 0], dtype=dtype)
        zero = torch.zeros(2, dtype=dtype)
        for name, want in (("trunc_div", torch.tensor([least, 0], dtype=dtype)), ("mod", zero), ("fmod", zero)):
            verify(map_case(MapOp[name], [x, m], want))
        shift = torch.tensor([-1, dtype.itemsize * 8], dtype=dtype)
        verify(map_case(MapOp.shl, [x, shift], zero))
        verify(map_case(MapOp.shr, [x, shift], zero - 1))


@pytest.mark.parametrize("source", ALL, ids=str)
@pytest.mark.parametrize("target", ALL, ids=str)
def test_cast(source: torch.dtype, target: torch.dtype) -> None:
    x = values((3, 5, 37), source, low=-100 if source != torch.uint8 else 0, high=250)
    if source.is_floating_point:
        x.view(-1)[:4] = torch.tensor([0.0, -0.0, 0.25, 120.9], dtype=source)
        if target.is_floating_point or target == torch.bool:
            x.view(-1)[4:7] = torch.tensor([math.nan, math.inf, -math.inf], dtype=source)
        if target == torch.uint8:
            x = x.abs()
    verify(map_case(MapOp.cast, [x], x.to(target), relative=0))


@pytest.mark.parametrize("source", FLOATS, ids=str)
@pytest.mark.parametrize("target", INTS, ids=str)
def test_cast_out_of_range_is_harmless(source: torch.dtype, target: torch.dtype) -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf, 3e38, -3e38, 2**31, -(2**31) - 1, 2**63], dtype=torch.float64).to(
        source
    )
    c = Code()
    c.emit(MapOp.cast, target, c.load(0, source))
    attrs, code = c.build()
    native.run_op(Op.map, [x], [torch.zeros(8, dtype=target)], attrs, code=code)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_every_half(dtype: torch.dtype) -> None:
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    finite = x[~torch.isnan(x)]
    verify(map_case(MapOp.cast, [finite], finite.float(), relative=0, layouts=("dense",)))
    verify(map_case(MapOp.neg, [x], -x, relative=0, layouts=("dense",)))
    g = np.random.default_rng(0)
    bits = torch.from_numpy(g.integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32))
    near = (finite.float()[:-1] + finite.float()[1:]) / 2  # ties
    y = torch.cat([bits, near, finite.float()])
    verify(map_case(MapOp.cast, [y], y.to(dtype), relative=0, layouts=("dense",)))


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_select_and_tests(dtype: torch.dtype) -> None:
    cond, x, y = values((6, 45), torch.bool, 2), values((6, 45), dtype), values((6, 45), dtype, 1)
    verify(map_case(MapOp.select, [cond, x, y], torch.where(cond, x, y)))
    if dtype.is_floating_point:
        x[0, :3] = torch.tensor([math.nan, math.inf, -math.inf], dtype=dtype)
    for op, fn in ((MapOp.is_nan, torch.isnan), (MapOp.is_inf, torch.isinf), (MapOp.logical_not, torch.logical_not)):
        verify(map_case(op, [x], fn(x)))
    if not dtype.is_floating_point:
        verify(map_case(MapOp.not_, [x], torch.bitwise_not(x)))


def test_uniform_powers() -> None:
    x = values((200,), torch.float32, low=0.1, high=9)
    for e in (2.0, 3.0, 0.5, -0.5, -1.0, -2.0, 1.0, 0.0, 2.5):
        c = Code()
        c.emit(MapOp.pow, torch.float32, c.load(0, torch.float32), c.const(e, torch.float32))
        attrs, code = c.build()
        verify(Case(Op.map, attrs, [x], [x**e], code=code, relative=3e-7))


def test_large_angles() -> None:
    x = torch.tensor([1e5, -3e6, 1e10, 0.3, math.inf])
    verify(map_case(MapOp.sin, [x], torch.sin(x)))
    verify(map_case(MapOp.cos, [x], torch.cos(x)))


# ---- fused code -------------------------------------------------------------------------------------------------------------
def test_fused_reuses_registers() -> None:
    """(x > 0) ? cast(x * 2 + y) : y, every register written more than once and over operands of other widths."""
    x, y = values((9, 13, 30), torch.float32), values((13, 1), torch.float64, 1)
    c = Code()
    f, d = torch.float32, torch.float64
    c.load(0, f, dst=0)
    c.const(2.0, f, dst=1)
    c.emit(MapOp.mul, f, 0, 1, dst=1)
    c.load(1, d, dst=2)
    c.emit(MapOp.cast, d, 1, dst=1)  # widens over its operand
    c.emit(MapOp.add, d, 1, 2, dst=1)
    c.const(0.0, f, dst=3)
    c.emit(MapOp.gt, torch.bool, 0, 3, dst=0)  # narrows over its operand
    c.emit(MapOp.select, d, 0, 1, 2, dst=0)  # widens over the condition
    c.emit(MapOp.neg, d, 0, dst=0)
    attrs, code = c.build()
    want = -torch.where(x > 0, (x * 2).double() + y, y.expand(9, 13, 30))
    verify(Case(Op.map, attrs, [x, y], [want], code=code, relative=0))


def test_many_registers() -> None:
    x = values((3000,), torch.float64)
    c = Code()
    r = [c.load(0, torch.float64)]
    for i in range(31):
        r.append(c.emit(MapOp.add, torch.float64, r[-1], r[max(0, i - 3)]))
    attrs, code = c.build()
    v = [x]
    for i in range(31):
        v.append(v[-1] + v[max(0, i - 3)])
    verify(Case(Op.map, attrs, [x], [v[-1]], code=code, relative=1e-12))


@pytest.mark.parametrize(
    "dtype", (torch.int64, torch.int32, torch.float32, torch.float64, torch.bfloat16, torch.uint8), ids=str
)
@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 40), (300, 4), (2, 2, 3000)], ids=str)
def test_iota_and_dim(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """sum over axes of (k + 2) * iota_k, plus a dimension: no inputs."""
    c = Code()
    total = c.emit(MapOp.dim, dtype, value=2)
    want = torch.full(shape, 17, dtype=torch.int64)
    for k, n in enumerate(shape):
        i = c.emit(MapOp.iota, dtype, value=k)
        total = c.emit(MapOp.add, dtype, total, c.emit(MapOp.mul, dtype, i, c.const(k + 2, dtype)))
        want = want + (k + 2) * torch.arange(n).reshape([-1 if a == k else 1 for a in range(len(shape))])
    if dtype == torch.bfloat16 and max(shape) > 16:
        return  # rounding of each step
    attrs, code = c.build()
    table = np.zeros(3, STRUCTS["Dim"])
    verify(Case(Op.map, attrs, [], [want.to(dtype)], code=code, dims=np.array([0, 1, 17], np.intp), dim_table=table))


def test_constant_fill() -> None:
    for dtype, value in ((torch.float32, -math.inf), (torch.bool, True), (torch.int64, -(2**63)), (torch.float16, 0.1),
                         (torch.uint8, 255), (torch.float32, math.nan)):  # fmt: skip
        c = Code()
        c.const(value, dtype)
        attrs, code = c.build()
        verify(Case(Op.map, attrs, [], [torch.full((3, 50), value, dtype=dtype)], code=code))


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_load_alone_expands(dtype: torch.dtype) -> None:
    x = values((3, 1, 5), dtype)
    c = Code()
    c.load(0, dtype)
    attrs, code = c.build()
    verify(Case(Op.map, attrs, [x], [x.expand(2, 3, 40, 5).contiguous()], code=code, relative=0))


shapes = st.lists(st.integers(0, 5) | st.sampled_from([1, 17, 70]), max_size=5).filter(lambda s: math.prod(s) <= 20_000)


@st.composite
def broadcast_inputs(draw: st.DrawFn) -> tuple[list[int], list[torch.Tensor]]:
    """An output shape and inputs that broadcast to it, of any strides: sliced, permuted, flipped by stride 0 and gaps."""
    shape = draw(shapes)
    inputs = []
    for k in range(draw(st.integers(1, 4))):
        lead = draw(st.integers(0, len(shape)))
        own = [1 if draw(st.booleans()) and draw(st.booleans()) else n for n in shape[lead:]]
        order = draw(st.permutations(range(len(own))))
        gap = draw(st.integers(1, 3))
        base = values([own[i] * gap for i in order], torch.float32, seed=k)
        x = base[tuple(slice(None, None, gap) for _ in order)].permute([order.index(i) for i in range(len(own))])
        for axis, n in enumerate(own):
            if n > 1 and draw(st.integers(0, 5)) == 0:
                x = x.narrow(axis, 0, 1).expand([n if a == axis else -1 for a in range(x.ndim)])
        inputs.append(x)
    return shape, inputs


@settings(max_examples=300, deadline=None)
@given(broadcast_inputs(), st.sampled_from([1, 2, 5]), st.randoms(use_true_random=False))
def test_broadcasting(case: tuple[list[int], list[torch.Tensor]], tiles: int, random: object) -> None:
    shape, inputs = case
    c = Code()
    total = c.load(0, torch.float32)
    want = inputs[0]
    for i in range(1, len(inputs)):
        total = c.emit(MapOp.add, torch.float32, c.load(i, torch.float32), total)
        want = inputs[i] + want
    total = c.emit(MapOp.mul, torch.float32, total, c.const(0.5, torch.float32))
    want = (want * 0.5).expand(shape)
    attrs, code = c.build()
    order = list(range(len(shape)))
    random.shuffle(order)  # type: ignore[attr-defined]
    out = torch.full([shape[i] for i in order], math.nan).permute([order.index(i) for i in range(len(shape))])
    native.run_op(Op.map, inputs, [out], attrs, code=code, tiles=tiles)
    torch.testing.assert_close(out, want, rtol=0, atol=0)


# ---- refused ------------------------------------------------------------------------------------------------------------------
def refused(rows: list[tuple[int, ...]], match: str, regs: int = 4, count: int | None = None, code: int = 0) -> None:
    x, y = torch.zeros(4), torch.zeros(4)
    attrs = struct("MapAttrs", code=code, count=len(rows) if count is None else count, regs=regs)
    with pytest.raises(Error, match=match):
        native.run_op(Op.map, [x], [y], attrs, code=np.array(rows, STRUCTS["MapInstr"]))


def test_bad_code_is_refused() -> None:
    f32, i64, boolean = 9, 6, 1
    load = (MapOp.load, f32, 0, 0, 0, 0, 0, 0)
    refused([load], "outside the part", count=2)
    refused([load], "outside the part", count=0)
    refused([load], "outside the part", code=1)
    refused([load], "too many registers", regs=33)
    refused([(MapOp.load, f32, 4, 0, 0, 0, 0, 0)], "register")
    refused([(81, f32, 0, 0, 0, 0, 0, 0)], "unknown map instruction")
    refused([(MapOp.load, 11, 0, 0, 0, 0, 0, 0)], "dtype")
    refused([(MapOp.load, f32, 0, 1, 0, 0, 0, 0)], "not there")
    refused([(MapOp.load, i64, 0, 0, 0, 0, 0, 0)], "another dtype")
    refused([(MapOp.add, f32, 0, 0, 1, 0, 0, 0)], "before it is written")
    refused([load, (MapOp.add, f32, 1, 0, 2, 0, 0, 0)], "before it is written")
    refused([load, (MapOp.cast, i64, 1, 0, 0, 0, 0, 0), (MapOp.add, f32, 2, 0, 1, 0, 0, 0)], "do not agree")
    refused([load, (MapOp.eq, f32, 1, 0, 0, 0, 0, 0)], "do not agree")
    refused([load, (MapOp.select, f32, 1, 0, 0, 0, 0, 0)], "select")
    refused([load, (MapOp.and_, f32, 1, 0, 0, 0, 0, 0)], "does not take")
    refused([load, (MapOp.cast, i64, 1, 0, 0, 0, 0, 0), (MapOp.exp, i64, 1, 1, 0, 0, 0, 0)], "does not take")
    refused([(MapOp.iota, f32, 0, 0, 0, 0, 0, 1)], "no such axis")
    refused([(MapOp.dim, f32, 0, 0, 0, 0, 0, 0)], "no such dimension")
    refused([load, (MapOp.is_nan, boolean, 1, 0, 0, 0, 0, 0)], "another dtype than its output")
    attrs, code = Code([load], 1).build()
    with pytest.raises(Error, match="broadcast"):
        native.run_op(Op.map, [torch.zeros(3)], [torch.zeros(4)], attrs, code=code)
    with pytest.raises(Error, match="higher rank"):
        native.run_op(Op.map, [torch.zeros(1, 4)], [torch.zeros(4)], attrs, code=code)
