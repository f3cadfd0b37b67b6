"""The reference evaluator of the operators on quantised values against numbers worked out by hand, and against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.error import Error
from trivet.fbs.structs import Act, BinaryKind, DType, NormKind, ReduceKind, RnnKind
from trivet.ir import ops
from trivet.ir.evaluate import evaluate_node
from trivet.ir.graph import Node, Value
from trivet.ir.interop import dtype_of
from trivet.ir.reference_quant import divide, quantize, rescale
from trivet.ir.types import Quant, Type, per_tensor


def run(op: str, attrs: Any, inputs: list[torch.Tensor | None], quants: list[Quant | None] = [],  # noqa: B006
        out: list[tuple[torch.dtype, tuple[int, ...]]] = [], y: Quant | None = None) -> list[torch.Tensor]:  # noqa: B006  # fmt: skip
    """One node in the evaluator."""
    kinds = [*quants, *[None] * len(inputs)]
    ins = [None if x is None else Value(f"x{i}", Type(dtype_of(x), tuple(x.shape), q))
           for i, (x, q) in enumerate(zip(inputs, kinds, strict=False))]  # fmt: skip
    outs = [Value(f"y{i}", Type(dtype_of(d), s, y if i == 0 else None)) for i, (d, s) in enumerate(out)]
    return evaluate_node(Node(op, list(ins), outs, attrs), list(inputs), {})


def t8(*x: int) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.int8)


def t32(*x: int) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.int32)


def one(
    op: str, attrs: Any, inputs: list[torch.Tensor | None], dtype: torch.dtype, shape: tuple[int, ...] | None = None
) -> list[Any]:
    first = inputs[0]
    assert first is not None
    return run(op, attrs, inputs, [], [(dtype, tuple(first.shape) if shape is None else shape)])[0].tolist()  # type: ignore[no-any-return]


@settings(max_examples=500, deadline=None)
@given(st.integers(-(2**62), 2**62), st.integers(0, 2**31 - 1), st.integers(0, 62), st.integers(1, 2**62))
def test_fixed_point(v: int, m: int, s: int, d: int) -> None:
    limit = 1 << 62
    want = v * m if s == 0 else (2 * v * m + 2**s) // 2 ** (s + 1)
    assert int(rescale(torch.tensor([v]), m, s)[0]) == max(-limit, min(limit, want))
    assert int(divide(torch.tensor([v]), d)[0]) == (2 * v + d) // (2 * d)


def test_requantize_by_hand() -> None:
    x = torch.tensor([0.0, 0.25, 0.75, -0.75, 1.25, 100.0, -100.0, float("nan"), float("inf"), float("-inf")])
    assert one("requantize", ops.Requantize(y_zero=-5, scale=2.0), [x], torch.int8) == [
        -5,
        -5,
        -3,
        -7,
        -3,
        127,
        -128,
        -5,
        127,
        -128,
    ]
    assert one("requantize", ops.Requantize(x_zero=-128, scale=0.5), [t8(-128, -127, 127)], torch.float32) == [
        0,
        0.5,
        127.5,
    ]
    halves = ops.Requantize(x_zero=1, y_zero=3, multiplier=1, shift=1, lo=-2, hi=60)  # halves go up
    assert one("requantize", halves, [t8(1, 2, 0, 4, 127, -128)], torch.int8) == [3, 4, 3, 5, 60, -2]
    big = ops.Requantize(multiplier=2**31 - 1, shift=0, lo=-32768, hi=32767)
    assert one("requantize", big, [t8(1, -1, 0)], torch.int16) == [32767, -32768, 0]


def test_requantize_by_types() -> None:
    q = Quant(
        np.array([[0.5, 2.0]], np.float32), 8, axis=1, group=2, bits=4, offset=np.array([[1.0, -1.0]], np.float32)
    )
    x = torch.tensor([[0, 8, 15]], dtype=torch.uint8)
    got = run("requantize", ops.Requantize(), [x], [q], [(torch.float32, (1, 3))])[0]
    assert got.tolist() == [[-3.0, 1.0, 13.0]]
    back = run("requantize", ops.Requantize(), [got], [], [(torch.uint8, (1, 3))], q)[0]
    assert torch.equal(back, x)
    q = per_tensor(0.1, 4, lo=-127, hi=127)
    torch.testing.assert_close(quantize(torch.tensor([-99.0, 0.05, 0.15]), q, DType.i8), t8(-127, 4, 6))
    y = torch.randn(1000)
    want = torch.ops.quantized_decomposed.quantize_per_tensor(y, 0.1, 4, -127, 127, torch.int8) if hasattr(
        torch.ops.quantized_decomposed, "quantize_per_tensor") else quantize(y, q, DType.i8)  # fmt: skip
    assert torch.equal(quantize(y, q, DType.i8), want)


def test_elementwise_by_hand() -> None:
    add = ops.Binary(BinaryKind.add, 1, -1, 2, 3, 1, 1)
    assert one("binary", add, [t8(1, 3, 127), t8(-1, 0, 127)], torch.int8) == [2, 6, 127]  # (6 + 1) / 2 = 3.5
    sub = ops.Binary(BinaryKind.sub, 0, 0, 0, 1, 1, 1)
    assert one("binary", sub, [t8(1, -1), t8(0, 0)], torch.int8) == [1, 0]
    mul = ops.Binary(BinaryKind.mul, 1, 0, 0, 1, 0, 2, -100, 100)
    assert one("binary", mul, [t8(3, 4, 127), t8(3, -3, 127)], torch.int8) == [2, -2, 100]  # 1.5, -2.25
    table = torch.arange(256, dtype=torch.int16) * 3
    assert one("lookup", ops.Lookup(), [t8(-128, 0, 127), table], torch.int16) == [0, 384, 765]
    assert one("lookup", ops.Lookup(), [torch.tensor([0, 255], dtype=torch.uint8), table], torch.int16) == [0, 765]


def test_products_by_hand() -> None:
    x, w = t8(1, 2, 3).reshape(1, 1, 3), t8(1, -1).reshape(1, 1, 2)
    conv = ops.Qconv(1, (1,), (1,), (1,), x_zero=2, y_zero=1, lo=-128.0, hi=127.0)  # cells outside count as real zeros
    scale = t32(1, 1).reshape(2, 1)
    assert one("qconv", conv, [x, w, scale, t32(4)], torch.int8, (1, 1, 4)) == [[[4, 3, 3, 4]]]  # 5 3 3 5 halved, + 1
    real_ = ops.Qconv(1, (1,), (0,), (1,), x_zero=2, act=Act.clamp, lo=-0.25, hi=9.0)
    assert one("qconv", real_, [x, w, torch.tensor([0.5])], torch.float32, (1, 1, 2)) == [[[-0.25, -0.25]]]
    a, b = t8(1, 2).reshape(1, 2), t8(3, -4, 5, 6).reshape(2, 2)
    stored = ops.Qmatmul(a_zero=-1, b_zero=1, y_zero=0, lo=-128.0, hi=10.0)  # [2 3] @ [[2 -5] [4 5]] = [16 5]
    assert one("qmatmul", stored, [a, b, t32(1, 1).reshape(2, 1), t32(0, 2)], torch.int8, (1, 2)) == [[8, 4]]
    nibbles = torch.tensor([[0, 15], [8, 9], [1, 2]], dtype=torch.uint8)  # - 8: [-8 7] [0 1] [-7 -6]
    scales, offsets = torch.tensor([[1.0, 2.0], [0.5, 4.0]]), torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    real_a = torch.tensor([[1.0, 2.0, 4.0]])
    only = ops.Qmatmul(bits=4, group=2, b_zero=8)
    assert one("qmatmul", only, [real_a, nibbles, scales, None, offsets], torch.float32, (1, 2)) == [[-22.0, -75.0]]
    dynamic = ops.Qmatmul(dynamic=1)
    got = one(
        "qmatmul",
        dynamic,
        [torch.tensor([[1.27, -0.5, 0.0]]), t8(1, 2, 3).reshape(3, 1), torch.tensor([2.0])],
        torch.float32,
        (1, 1),
    )
    assert got == [[float(np.float32(2 * (127 - 100)) * (np.float32(1.27) / np.float32(127)))]]
    affine = ops.Qmatmul(dynamic=2)  # -1 .. 1.55 in steps of 0.01: zero point -28
    got = one(
        "qmatmul",
        affine,
        [torch.tensor([[1.55, -1.0]]), t8(1, 0, 0, 1).reshape(2, 2), torch.tensor([1.0])],
        torch.float32,
        (1, 2),
    )
    np.testing.assert_allclose(got, [[1.55, -1.0]], rtol=1e-6)
    table, index = torch.tensor([[1, 2], [3, 4]], dtype=torch.int8), torch.tensor([-1, 0])
    assert one("qgather", ops.Qgather(zero=1), [table, index, torch.tensor([0.5, 2.0])], torch.float32, (2, 2)) == [
        [4.0, 6.0],
        [0.0, 0.5],
    ]
    with pytest.raises(Error, match="index out of range of 2"):
        one("qgather", ops.Qgather(), [table, torch.tensor([2]), torch.tensor([1.0])], torch.float32, (1, 2))


def test_sums_by_hand() -> None:
    x = t8(1, 2, 3, 6).reshape(1, 1, 4)
    pool = ops.Qpool(1, (3,), (2,), (1,), (1,), False, x_zero=1, y_zero=10, multiplier=1, shift=0)
    assert one("qpool", pool, [x], torch.int8, (1, 1, 2)) == [[[11, 13]]]  # 1 / 2 and 8 / 3
    counted = ops.Qpool(1, (3,), (2,), (1,), (1,), True, x_zero=1, y_zero=10, multiplier=3, shift=1)
    assert one("qpool", counted, [x], torch.int8, (1, 1, 2)) == [[[11, 14]]]  # 3 / 6 and 24 / 6
    mean = ops.Qreduce(ReduceKind.mean, (2,), 0, 0, 1, 0)
    assert one("qreduce", mean, [x], torch.int8, (1, 1, 1)) == [[[3]]]
    total = ops.Qreduce(ReduceKind.sum, (0, 2), 1, -1, 1, 1, -3, 2)
    assert one("qreduce", total, [x], torch.int8, (1, 1, 1)) == [[[2]]]


def test_softmax_norm_resize_rnn_by_hand() -> None:
    table = torch.tensor([4, 2, 1, *[0] * 253], dtype=torch.int32)
    assert one("qsoftmax", ops.Qsoftmax(0), [t8(5, 4, 3, -100), table], torch.int8) == [
        18,
        -55,
        -91,
        -128,
    ]  # 146.3 73.1 36.6 0
    norm = ops.Qnorm(NormKind.layer, 1, 0, 0, 1, 12)  # of -1 1: -1 1
    assert one("qnorm", norm, [t8(-7, 7), t32(20, 20), None], torch.int8) == [-20, 20]
    rms = ops.Qnorm(NormKind.rms, 1, 1, 5, 1, 12)
    assert one("qnorm", rms, [t8(4, 4), t32(7, 7), t32(4096, 0)], torch.int8) == [13, 12]
    assert one("qnorm", norm, [t8(9, 9)], torch.int8) == [0, 0]
    grow = ops.Qresize(1)
    assert one("qresize", grow, [t8(0, 8).reshape(1, 1, 2)], torch.int8, (1, 1, 4)) == [[[0, 2, 6, 8]]]
    corners = ops.Qresize(1, align_corners=True)
    assert one("qresize", corners, [t8(0, 9).reshape(1, 1, 2)], torch.int8, (1, 1, 3)) == [[[0, 5, 9]]]
    ramp = torch.arange(-32768, 32769 + 127, 128).clamp(max=32767).to(torch.int16)[:513]  # T(v) = v
    kind = ops.Qrnn(RnnKind.tanh, x_zero=1)
    x, scale = t8(1, 2).reshape(2, 1, 1), t32(512, 0, 256, 0).reshape(4, 1)
    out = run("qrnn", kind, [x, t8(2).reshape(1, 1), t8(1).reshape(1, 1), scale, torch.stack([ramp, ramp]), t32(1)], [],
              [(torch.int8, (2, 1, 1)), (torch.int16, (1, 1))])  # fmt: skip
    # 512 -> 2; then (2 + 1) * 512 + 2 * 256 = 2048 -> 8
    assert [t.reshape(-1).tolist() for t in out] == [[2, 8], [2048]]


def test_real_products_follow_the_formula() -> None:
    """dynamic 0 and real convolutions, against float64."""
    torch.manual_seed(0)
    a, b, scale = torch.randn(3, 70), torch.randint(-128, 128, (70, 9), dtype=torch.int8), torch.rand(3, 9)
    y = run("qmatmul", ops.Qmatmul(group=32), [a, b, scale], [], [(torch.float32, (3, 9))])[0]
    want = a.double() @ (b.double() * scale.double().repeat_interleave(32, 0)[:70])
    torch.testing.assert_close(y.double(), want, rtol=1e-6, atol=1e-4)
    x, w = torch.randn(1, 4, 6, 6), torch.randint(-128, 128, (4, 2, 3, 3), dtype=torch.int8)
    attrs = ops.Qconv(2, (1, 1), (1, 1), (1, 1), 2)
    y = run("qconv", attrs, [x, w, torch.arange(4.0)], [], [(torch.float32, (1, 4, 6, 6))])[0]
    real_w = w.double() * torch.arange(4.0).reshape(4, 1, 1, 1)
    torch.testing.assert_close(y.double(), torch.conv2d(x.double(), real_w, None, 1, 1, 1, 2), rtol=1e-6, atol=1e-3)


def test_rows() -> None:
    x = torch.tensor([[1.27, -0.5, 0.0], [0.0, 0.0, 0.0], [float("nan"), float("inf"), 1.0]])
    y = run("rowquant", ops.Rowquant(), [x], [], [(torch.float32, (3, 3))])[0]
    torch.testing.assert_close(y[0], x[0], rtol=1e-6, atol=0)
    assert y[1].tolist() == [0, 0, 0] and y[2, 0] == 0 and y[2, 1] > 3.4e38 and y[2, 2] == 0
