"""softmax and normalisation against torch."""

from __future__ import annotations

import math

import pytest
import torch
from basic import FLOATS, Case, Op, native, struct, values, verify

from trivet.error import Error
from trivet.fbs.structs import NormKind

F = torch.nn.functional


def soft(x: torch.Tensor, axis: int, log: bool) -> Case:
    fn = F.log_softmax if log else F.softmax
    want = fn(x.double(), axis).to(x.dtype)
    return Case(Op.softmax, struct("SoftmaxAttrs", axis=axis, log=log), [x], [want], inplace=0,
                absolute=1e-6 if log and x.dtype == torch.float32 else {2: 1e-3, 4: 1e-12, 8: 1e-14}[x.dtype.itemsize])  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("log", (False, True))
def test_softmax(dtype: torch.dtype, log: bool) -> None:
    x = values((3, 70, 11), dtype, low=-9, high=9)
    for axis in range(3):
        verify(soft(x, axis, log))
    verify(soft(values((2, 1000), dtype, low=-30, high=30), 1, log))
    verify(soft(values((1,), dtype), 0, log))
    verify(soft(values((3, 0), dtype), 1, log))
    verify(soft(values((0, 3), dtype), 1, log))


@pytest.mark.parametrize("log", (False, True))
def test_softmax_corners(log: bool) -> None:
    inf, nan = math.inf, math.nan
    x = torch.tensor(
        [[1e5, 1e5 - 1, -1e5], [-inf, 0, 1], [-inf, -inf, -inf], [inf, 0, 1], [nan, 1, 2], [-1e38, -3e38, -1e38]]
    )
    want = (F.log_softmax if log else F.softmax)(x, 1)
    for axis, a, b in ((1, x, want), (0, x.T.contiguous(), want.T.contiguous())):
        verify(Case(Op.softmax, struct("SoftmaxAttrs", axis=axis, log=log), [a], [b], absolute=1e-12))


def layer(
    x: torch.Tensor, axes: int, w: torch.Tensor | None, b: torch.Tensor | None, eps: float = 1e-5, **more: float
) -> Case:
    y = F.layer_norm(
        x.double(), x.shape[-axes:], None if w is None else w.double(), None if b is None else b.double(), eps
    )
    return Case(Op.norm, struct("NormAttrs", kind=NormKind.layer, axes=axes, eps=eps), [x, w, b], [y.to(x.dtype)],
                **{"absolute": {2: 2e-2 if x.dtype == torch.bfloat16 else 2e-3, 4: 2e-6, 8: 1e-12}[x.dtype.itemsize], **more})  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_layer(dtype: torch.dtype) -> None:
    x = values((3, 5, 4, 37), dtype)
    for axes in (1, 2, 3, 4):
        w, b = values(x.shape[-axes:], dtype, 1), values(x.shape[-axes:], dtype, 2)
        for k in range(4):
            verify(layer(x, axes, w if k & 1 else None, b if k & 2 else None))
    verify(layer(values((2, 1000), dtype), 1, None, None))
    verify(layer(values((3, 1), dtype), 1, None, None))


def test_offset_does_no_harm() -> None:
    x = values((4, 3000), torch.float32) + 1e5
    verify(layer(x, 1, None, None, absolute=1e-4))
    y = values((2, 8, 300), torch.float32) + 1e5
    want = F.group_norm(y.double(), 4).float()
    verify(
        Case(
            Op.norm,
            struct("NormAttrs", kind=NormKind.group, groups=4, eps=1e-5),
            [y, None, None],
            [want],
            absolute=1e-4,
        )
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rms(dtype: torch.dtype) -> None:
    x = values((3, 5, 300), dtype)
    for axes in (1, 2):
        w = values(x.shape[-axes:], dtype, 1)
        for weight in (None, w):
            want = F.rms_norm(x.double(), x.shape[-axes:], None if weight is None else weight.double(), 1e-6).to(dtype)
            verify(Case(Op.norm, struct("NormAttrs", kind=NormKind.rms, axes=axes, eps=1e-6), [x, weight], [want],
                        absolute={2: 2e-2, 4: 2e-6, 8: 1e-12}[dtype.itemsize]))  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(2, 6), (2, 6, 9), (2, 6, 5, 7), (1, 6, 2, 3, 4)], ids=str)
def test_group(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, w, b = values(shape, dtype), values((6,), dtype, 1), values((6,), dtype, 2)
    for groups in (1, 2, 3, 6):
        if shape == (2, 6) and groups == 6:
            continue
        for weight, bias in ((w, b), (None, b), (w, None), (None, None)):
            d = [None if t is None else t.double() for t in (weight, bias)]
            want = F.group_norm(x.double(), groups, *d, 1e-5).to(dtype)
            verify(Case(Op.norm, struct("NormAttrs", kind=NormKind.group, groups=groups, eps=1e-5), [x, weight, bias], [want],
                        absolute={2: 3e-2, 4: 1e-5, 8: 1e-12}[dtype.itemsize], inplace=0))  # fmt: skip


def test_half_input_with_float_weight() -> None:
    x, w = values((3, 40), torch.bfloat16), values((40,), torch.float32, 1)
    want = F.layer_norm(x.double(), (40,), w.double()).to(torch.bfloat16)
    verify(Case(Op.norm, struct("NormAttrs", kind=NormKind.layer, axes=1, eps=1e-5), [x, w], [want], absolute=1e-2))


def test_refused() -> None:
    x = torch.zeros(2, 6)
    for attrs, inputs, match in (
        (struct("NormAttrs", kind=3, axes=1), [x], "unknown"),
        (struct("NormAttrs", kind=0, axes=0), [x], "axes"),
        (struct("NormAttrs", kind=0, axes=3), [x], "axes"),
        (struct("NormAttrs", kind=2, groups=4), [x], "groups"),
        (struct("NormAttrs", kind=2, groups=0), [x], "groups"),
        (struct("NormAttrs", kind=0, axes=1), [x, torch.zeros(5)], "size"),
        (struct("NormAttrs", kind=0, axes=1), [x, torch.zeros(6, 1)], "rank"),
        (struct("NormAttrs", kind=0, axes=1), [x, torch.zeros(6, dtype=torch.float64)], "dtype"),
    ):
        with pytest.raises(Error, match=match):
            native.run_op(Op.norm, inputs, [torch.zeros(2, 6)], attrs)
    with pytest.raises(Error, match="axis"):
        native.run_op(Op.softmax, [x], [torch.zeros(2, 6)], struct("SoftmaxAttrs", axis=2))
    with pytest.raises(Error, match="no kernel"):
        native.run_op(Op.softmax, [x.int()], [torch.zeros(2, 6).int()], struct("SoftmaxAttrs", axis=1))
