"""Operators on quantised values: the reference evaluator and the C kernels agree bit for bit, on thousands of cases per operator.

Each example of hypothesis is a seed from which a batch of cases is drawn (quant_cases.py has the pieces).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quant_cases import (
    RNN_GATES,
    Case,
    Rng,
    bounds_of,
    broadcasts,
    chance,
    compare,
    floats,
    ints,
    multiplier,
    multipliers,
    ops,
    pick,
    scale_of,
    shape_of,
    size,
    stored,
    zero_of,
)

from trivet import fixed_point
from trivet.fbs.structs import Act, BinaryKind, NormKind, ReduceKind, RnnKind

F32, I8, I16, I32 = torch.float32, torch.int8, torch.int16, torch.int32
LARGE = 0.04  # share of cases larger than what kernels do at a time
ACTS = (Act.none, Act.none, Act.clamp)


# ---- elementwise --------------------------------------------------------------------------------------------------------
def requantize(rng: Rng) -> Case:
    shape, source, target = shape_of(rng), pick(rng, (F32, F32, I8, I16)), stored(rng)
    m, s = multiplier(rng, fits=100.0 if source == I8 else 20000.0)
    if source == F32:
        x, scale = floats(rng, shape), scale_of(rng)
        if chance(rng, 0.4):  # into the range of the stored numbers, and onto ties
            x, scale = torch.round(x * 40) / 2, 1.0
    else:
        x, scale = ints(rng, shape, source), scale_of(rng)
        target = pick(rng, (F32, target))
    attrs = ops.Requantize(0 if source == F32 else zero_of(rng, source), 0 if target == F32 else zero_of(rng, target), m, s, scale,
                           **bounds_of(rng, I8 if target == F32 else target))  # fmt: skip
    return Case("requantize", attrs, [x], [(target, shape)])


def binary(rng: Rng) -> Case:
    shape, dtype, kind = shape_of(rng), stored(rng), pick(rng, list(BinaryKind))
    a, b = broadcasts(rng, shape), broadcasts(rng, shape)
    m, s = multiplier(rng, fits=100.0 ** (2 if kind == BinaryKind.mul else 1))
    zeros = [zero_of(rng, dtype) for _ in range(3)]
    other = pick(rng, (m, int(rng.integers(1 << 31)), 0))
    attrs = ops.Binary(kind, *zeros, m, 0 if kind == BinaryKind.mul else other, s, **bounds_of(rng, dtype))
    made = torch.broadcast_shapes(a, b)
    return Case("binary", attrs, [ints(rng, a, dtype), ints(rng, b, dtype)], [(dtype, tuple(made))])


def lookup(rng: Rng) -> Case:
    shape, dtype = shape_of(rng), pick(rng, (I8, I8, torch.uint8))
    to = pick(rng, (I8, I16, torch.uint8, F32))
    table = floats(rng, (256,)) if to == F32 else ints(rng, (256,), to)
    return Case("lookup", ops.Lookup(), [ints(rng, shape, dtype), table], [(to, shape)])


# ---- products -----------------------------------------------------------------------------------------------------------
def act_of(rng: Rng, exact: bool) -> dict[str, object]:
    """An activation; those that are no clamp only where the sum in front of them is exact."""
    act = pick(rng, list(Act)) if exact and chance(rng, 0.15) else pick(rng, ACTS)
    return {"act": act, "lo": -0.75, "hi": float(pick(rng, (6.0, np.inf)))}


def finish(rng: Rng, x: torch.dtype, n: int, k: int) -> tuple[torch.Tensor, torch.dtype, dict[str, object]]:
    """scale, dtype and attributes of the result of qconv and qmatmul, whose sums have k products."""
    if x == F32 or chance(rng, 0.3):
        extreme = x != F32 and chance(rng, 0.3)  # a real product may take the scale into the weights
        scale = torch.tensor([scale_of(rng) if extreme else rng.random() * 0.1 for _ in range(n)], dtype=F32)
        return scale, F32, act_of(rng, x != F32 and not extreme)
    to = pick(rng, (x, x, stored(rng)))
    fits = 5000.0 * max(k, 1) ** 0.5 * (256 if x == I16 and to == I8 else 1)
    return (
        multipliers(rng, n, fits),
        to,
        {"y_zero": zero_of(rng, to), **{k: float(v) for k, v in bounds_of(rng, to).items()}},
    )


def wide(rng: Rng) -> tuple[int, int]:
    """Bounds of a bias: of any size (sums of 32 bits wrap), or small."""
    most = pick(rng, ((1 << 31) - 1, 1 << 24, 1 << 12, 1 << 12, 1 << 12))
    return -most, most


def qconv(rng: Rng) -> Case:
    nd, groups, transposed = pick(rng, (1, 2, 2, 3)), pick(rng, (1, 1, 2, 3)), chance(rng, 0.3)
    per_in, per_out = size(rng, 1, 1, 2, 3, 5), size(rng, 1, 1, 2, 4, 17)
    if chance(rng, 0.2):
        groups, per_in, per_out = size(rng, 4, 8, 17, 40), 1, size(rng, 1, 1, 2)  # depthwise
    large = chance(rng, LARGE) and nd == 2
    if large:
        groups, per_in, per_out = pick(rng, (1, 1, 2)), size(rng, 40, 70), size(rng, 5, 16, 70)
    k, n = [size(rng, 1, 1, 2, 3, 4)] * nd, [7 if large else size(rng, 1, 2, 4, 5, 7) for _ in range(nd)]
    k[-1] = size(rng, 1, 2, 3)
    stride, dilation = ([size(rng, 1, 1, 2, 3) for _ in range(nd)] for _ in range(2))
    span = [d * (e - 1) + 1 for d, e in zip(dilation, k, strict=True)]
    pad = [int(rng.integers(0, e)) for e in span]
    if transposed:
        more = [int(rng.integers(0, s)) for s in stride]
        m = [(i - 1) * s + e - 2 * p + o for i, s, e, p, o in zip(n, stride, span, pad, more, strict=True)]
    else:
        more = [int(rng.integers(0, e)) for e in span]
        m = [(i + p + o - e) // s + 1 for i, p, o, e, s in zip(n, pad, more, span, stride, strict=True)]
    m = [max(i, 0) for i in m]
    batch, channels = size(rng, 1, 1, 2, 0) if chance(rng, 0.2) else 1, groups * per_out
    dtype = pick(rng, (I8, I8, I8, I16, F32))
    x = (
        floats(rng, (batch, groups * per_in, *n), 0.0)
        if dtype == F32
        else ints(rng, (batch, groups * per_in, *n), dtype)
    )
    w = ints(rng, (groups * per_in, per_out, *k) if transposed else (channels, per_in, *k), I8)
    scale, to, more_attrs = finish(rng, dtype, channels, int(np.prod(k)) * per_in)
    bias = None
    if chance(rng, 0.6):
        bias = floats(rng, (channels,), 0.0) if dtype == F32 else ints(rng, (channels,), I32, *wide(rng))
    attrs = ops.Qconv(nd, tuple(stride), tuple(pad), tuple(dilation), groups, transposed,
                      x_zero=0 if dtype == F32 else zero_of(rng, dtype), **more_attrs)  # type: ignore[arg-type]  # fmt: skip
    shape = (batch, channels, *m)
    near = None
    if dtype == F32:
        from trivet.ir.reference_ops import conv_sum

        tail = (-1, *[1] * nd)
        near = conv_sum(x.double().abs(), w.double().abs(), attrs, shape) * scale.double().reshape(tail)
        near = near if bias is None else near + bias.double().abs().reshape(tail)
    return Case("qconv", attrs, [x, w, scale, bias], [(to, shape)], near, dense=(2, 3), pack=(1,))


def qmatmul(rng: Rng) -> Case:
    """A stored left operand."""
    m, n, k = size(rng), size(rng, 0, 1, 2, 7, 16, 17, 33), size(rng, 0, 1, 2, 3, 4, 5, 16, 31, 64, 130)
    if chance(rng, LARGE):
        m, n, k = size(rng, 1, 31, 33, 65), size(rng, 17, 65, 80), size(rng, 255, 257, 511, 513, 1100)
    batch = pick(rng, ((), (), (2,), (2, 3)))
    bits, dtype = pick(rng, (8, 8, 4)), stored(rng)
    shared = chance(rng, 0.6)
    a = ints(rng, (*broadcasts(rng, batch), m, k) if chance(rng, 0.9) else (k,), dtype)
    b = ints(
        rng,
        (() if shared or a.dim() == 1 else batch) + (k, n),
        I8 if bits == 8 else torch.uint8,
        *((0, 15) if bits == 4 else ()),
    )
    shape = tuple((a.double() @ b.double()).shape)
    scale, to, more = finish(rng, dtype, 1 if chance(rng, 0.3) else n, k)
    bias = ints(rng, (n,), I32, *wide(rng)) if chance(rng, 0.6) else None
    attrs = ops.Qmatmul(bits=bits, a_zero=zero_of(rng, dtype), b_zero=int(rng.integers(16)) if bits == 4 else zero_of(rng, I8),
                        **more)  # type: ignore[arg-type]  # fmt: skip
    return Case("qmatmul", attrs, [a, b, scale, bias], [(to, shape)], dense=(2, 3), pack=(1,) if b.dim() == 2 else ())


def grouped(rng: Rng, group: int, k: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Scales or offsets of a weight [k, n]."""
    shape = (-(-k // group), n) if group else pick(rng, ((n,), (1,)))
    x = rng.random(shape) * 0.1 if chance(rng, 0.8) else rng.standard_normal(shape) * 10.0 ** rng.integers(-5, 3)
    return torch.from_numpy(np.asarray(x)).to(dtype)


def weight_only(rng: Rng) -> Case:
    """A real left operand, as it is or quantised by rows."""
    m, n, k = size(rng, 0, 1, 1, 2, 5), size(rng, 1, 2, 7, 16, 17, 33), size(rng, 1, 2, 4, 7, 16, 31, 32, 64, 96, 130)
    if chance(rng, LARGE):
        m, n, k = size(rng, 1, 31, 33), size(rng, 17, 65, 80), size(rng, 255, 257, 513, 700)
    dynamic, bits = pick(rng, (0, 1, 1, 2, 2)), pick(rng, (8, 4, 4))
    group = pick(rng, (0, 8, 16, 24, 32, 64, 256, 520))
    a = floats(rng, pick(rng, ((m, k), (2, m, k), (k,))), 0.3 if dynamic else 0.0)
    b = ints(rng, (k, n), I8 if bits == 8 else torch.uint8, *((0, 15) if bits == 4 else ()))
    kind = pick(rng, (F32, F32, torch.float16))
    scale = grouped(rng, group, k, n, kind)
    offset = grouped(rng, group, k, n, kind) if chance(rng, 0.4) else None
    bias = floats(rng, (n,), 0.0) if chance(rng, 0.5) else None
    zero = pick(rng, (0, 8, int(rng.integers(16)))) if bits == 4 else pick(rng, (0, 0, int(rng.integers(-128, 128))))
    attrs = ops.Qmatmul(
        bits=bits, dynamic=dynamic, group=group, b_zero=zero, act=pick(rng, ACTS), lo=-0.75, hi=float("inf")
    )
    near = None
    if dynamic == 0:
        s, o = (None if t is None else t.double().abs() for t in (scale, offset))
        wide = (lambda t: t.repeat_interleave(group, 0)[:k]) if group else (lambda t: t)
        near = a.double().abs() @ ((b.double() - zero).abs() * wide(s) + (0 if o is None else wide(o)))
        near = near if bias is None else near + bias.double().abs()
    inputs = [a, b, scale, bias, offset]
    return Case("qmatmul", attrs, inputs, [(F32, (*a.shape[:-1], n))], near, dense=(2, 3, 4), pack=(1,))


def qgather(rng: Rng) -> Case:
    v, d, bits, group = (
        size(rng, 1, 2, 9, 17, 40),
        size(rng, 1, 2, 7, 16, 31, 64),
        pick(rng, (8, 4)),
        pick(rng, (0, 8, 16, 32)),
    )
    table = ints(rng, (v, d), I8 if bits == 8 else torch.uint8, *((0, 15) if bits == 4 else ()))
    shape = shape_of(rng, 3)
    index = torch.from_numpy(rng.integers(-v, v, shape)).to(pick(rng, (torch.int64, I32)))
    kind = pick(rng, (F32, torch.float16))
    scale, offset = grouped(rng, group, d, v, kind), grouped(rng, group, d, v, kind) if chance(rng, 0.4) else None
    attrs = ops.Qgather(
        bits=bits, group=group, zero=int(rng.integers(16)) if bits == 4 else int(rng.integers(-128, 128))
    )
    pack = (0,) if scale.shape[-1] == v else ()  # a packed table has as many rows as scales
    return Case("qgather", attrs, [table, index, scale, offset], [(F32, (*shape, d))], dense=(2, 3), pack=pack)


# ---- sums over windows and axes -----------------------------------------------------------------------------------------
def averages(rng: Rng, dtype: torch.dtype) -> dict[str, int]:
    m, s = multiplier(rng, 23, 40, 100.0 if dtype == I8 else 20000.0)
    return {
        "x_zero": zero_of(rng, dtype),
        "y_zero": zero_of(rng, dtype),
        "multiplier": m,
        "shift": s,
        **bounds_of(rng, dtype),
    }


def qpool(rng: Rng) -> Case:
    nd, dtype = pick(rng, (1, 2, 2, 3)), stored(rng)
    lead = (size(rng, 1, 1, 2, 0) if chance(rng, 0.2) else 1, size(rng, 1, 2, 17))
    n = [size(rng, 1, 2, 4, 7, 9) for _ in range(nd)]
    more = averages(rng, dtype)
    if chance(rng, 0.3):
        m = [size(rng, 1, 1, 2, 3, 5) for _ in range(nd)]
        attrs = ops.Qpool(nd, adaptive=True, **more)
    else:
        k, stride, dilation = ([size(rng, 1, 2, 3) for _ in range(nd)] for _ in range(3))
        pad = [int(rng.integers(0, e // 2 + 1)) for e in k]
        m = [
            max((i + 2 * p - d * (e - 1) - 1) // s + 1, 0)
            for i, p, d, e, s in zip(n, pad, dilation, k, stride, strict=True)
        ]
        divisor = pick(rng, (0, 0, 1, 5))
        attrs = ops.Qpool(nd, tuple(k), tuple(stride), tuple(pad), tuple(dilation), chance(rng, 0.5), divisor, **more)
    return Case("qpool", attrs, [ints(rng, (*lead, *n), dtype)], [(dtype, (*lead, *m))])


def qreduce(rng: Rng) -> Case:
    shape, dtype, kind = shape_of(rng), stored(rng), pick(rng, (ReduceKind.mean, ReduceKind.sum))
    axes = tuple(i for i in range(len(shape)) if chance(rng, 0.6))
    out = tuple(1 if i in axes else d for i, d in enumerate(shape))
    return Case("qreduce", ops.Qreduce(kind, axes, **averages(rng, dtype)), [ints(rng, shape, dtype)], [(dtype, out)])


def qsoftmax(rng: Rng) -> Case:
    shape = shape_of(rng) or (3,)
    axis = int(rng.integers(len(shape)))
    table = torch.from_numpy(fixed_point.softmax_table(10.0 ** rng.uniform(-4, 1)))
    if chance(rng, 0.2):
        table = ints(rng, (256,), I32, 0, pick(rng, (1, 5, 1 << 23, (1 << 31) - 1)))
    bounds = bounds_of(rng, I8)
    zero = -128 if chance(rng, 0.7) else zero_of(rng, I8)
    return Case(
        "qsoftmax", ops.Qsoftmax(axis, zero, **bounds), [ints(rng, shape, I8), table], [(I8, shape)], dense=(1,)
    )


def qnorm(rng: Rng) -> Case:
    shape = shape_of(rng) or (3,)
    axes = int(rng.integers(1, len(shape) + 1))
    tail = shape[len(shape) - axes :]
    most = pick(rng, (1 << 15, 1 << 15, 100))
    weight = ints(rng, tail, I32, -most, most) if chance(rng, 0.6) else None
    bias = ints(rng, tail, I32, *pick(rng, ((None, None), (-(1 << 20), 1 << 20)))) if chance(rng, 0.5) else None
    m, s = multiplier(rng, 23, fits=4096.0 * (1 if weight is None else most / 2))
    eps = pick(rng, (0, 1, 7, 65536, (1 << 32) - 1, int(rng.integers(1 << 20))))
    attrs = ops.Qnorm(pick(rng, (NormKind.layer, NormKind.rms)), axes, zero_of(rng, I8), zero_of(rng, I8), m, s,
                      **bounds_of(rng, I8), eps=eps)  # fmt: skip
    return Case("qnorm", attrs, [ints(rng, shape, I8), weight, bias], [(I8, shape)], dense=(1, 2))


def qresize(rng: Rng) -> Case:
    nd, dtype = pick(rng, (1, 2, 2, 3)), stored(rng)
    lead = (size(rng, 1, 1, 2, 0) if chance(rng, 0.2) else 1, size(rng, 1, 3))
    n, m = ([size(rng, 1, 2, 3, 5, 8) for _ in range(nd)] for _ in range(2))
    m[0] = 0 if chance(rng, 0.05) else m[0]
    return Case("qresize", ops.Qresize(nd, chance(rng, 0.5)), [ints(rng, (*lead, *n), dtype)], [(dtype, (*lead, *m))])


# ---- recurrent ----------------------------------------------------------------------------------------------------------
def qrnn(rng: Rng) -> Case:
    kind = pick(rng, (RnnKind.lstm, RnnKind.gru, RnnKind.tanh))
    steps, n, inner, hidden = (
        size(rng, 0, 1, 2, 4),
        size(rng, 0, 1, 2, 3),
        size(rng, 1, 2, 7, 16),
        size(rng, 1, 2, 5, 8, 17),
    )
    rows = RNN_GATES[kind] * hidden
    scale = multipliers(rng, 2 * rows) if chance(rng, 0.3) else None
    if scale is None:  # gates of a usual size
        real = 10.0 ** rng.uniform(-3, 1, 2 * rows)
        scale = torch.tensor([fixed_point.fixed_point(float(r)) for r in real], dtype=I32).t()
    scale = torch.cat([scale[:, :rows], scale[:, rows:]]).contiguous()
    table = torch.from_numpy(fixed_point.rnn_tables())
    if chance(rng, 0.1):
        table = ints(rng, (2, 513), I16)
    bias = [ints(rng, (rows,), I32, -(1 << 20), 1 << 20) if chance(rng, 0.6) else None for _ in range(2)]
    h0 = ints(rng, (n, hidden), I16) if chance(rng, 0.5) else None
    c0 = ints(rng, (n, hidden), I16) if kind == RnnKind.lstm and chance(rng, 0.5) else None
    inputs = [
        ints(rng, (steps, n, inner), I8),
        ints(rng, (rows, inner), I8),
        ints(rng, (rows, hidden), I8),
        scale,
        table,
        *bias,
        h0,
        c0,
    ]
    outs = [(I8, (steps, n, hidden)), (I16, (n, hidden)), (I16, (n, hidden))]
    attrs = ops.Qrnn(kind, chance(rng, 0.3), x_zero=zero_of(rng, I8))
    return Case("qrnn", attrs, inputs, outs[: 3 if kind == RnnKind.lstm else 2], dense=(1, 2, 3, 4, 5, 6))


# ---- the tests ------------------------------------------------------------------------------------------------------------
GENERATORS: dict[Callable[[Rng], Case], int] = {requantize: 80, binary: 80, lookup: 40, qconv: 100, qmatmul: 80, weight_only: 100, qgather: 60,
              qpool: 80, qreduce: 80, qsoftmax: 60, qnorm: 80, qresize: 80, qrnn: 60}  # fmt: skip
BATCH = 25  # cases of one example


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads cost more than they bring: cases are small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("make", GENERATORS, ids=lambda f: f.__name__)
def test_exact(make: Callable[[Rng], Case]) -> None:
    @settings(max_examples=GENERATORS[make], deadline=None, derandomize=True, database=None)
    @given(st.integers(0, 2**32 - 1))
    def run(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(BATCH):
            compare(make(rng), rng)

    run()
