"""copy, gather, scatter, pad against torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from basic import ALL, Case, Op, native, struct, values, verify
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.error import Error
from trivet.fbs.structs import IndexKind, PadMode, ScatterReduce

F = torch.nn.functional


# ---- copy ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_copy(dtype: torch.dtype) -> None:
    for shape in ((), (1,), (0, 3), (5,), (3, 70, 41), (2, 3, 4, 5, 6), (200, 3), (3, 200)):
        x = values(shape, dtype)
        verify(Case(Op.copy, struct("CopyAttrs"), [x], [x], relative=0, tiles=(0, 3, 7)))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_copy_any_strides(data: st.DataObject) -> None:
    """Both sides permuted, sliced with steps of either sign, the source also expanded."""
    shape = data.draw(st.lists(st.integers(1, 5) | st.sampled_from([1, 33, 70]), max_size=5).filter(
        lambda s: math.prod(s) < 20_000))  # fmt: skip
    arrays = []
    for side in range(2):
        order = data.draw(st.permutations(range(len(shape))))
        step = [data.draw(st.sampled_from([1, 1, 2, -1, -3])) for _ in shape]
        base = np.arange(math.prod([shape[i] * abs(step[i]) for i in order]), dtype=np.int16)
        view = base.reshape([shape[i] * abs(step[i]) for i in order])[
            (*(slice(None, None, step[i]) for i in order), ...)
        ]
        view = view.transpose([order.index(i) for i in range(len(shape))])
        if side == 0:
            for axis in range(len(shape)):
                if data.draw(st.integers(0, 4)) == 0:
                    view = np.broadcast_to(np.take(view, [0], axis), shape)
        arrays.append(view)
    x, y = arrays
    y[...] = -7
    native.run_op(Op.copy, [x], [y], struct("CopyAttrs"), tiles=data.draw(st.sampled_from([1, 2, 5])))
    np.testing.assert_array_equal(x, y)


def test_copy_refuses() -> None:
    with pytest.raises(Error, match="dtypes"):
        native.run_op(Op.copy, [torch.zeros(3)], [torch.zeros(3, dtype=torch.int32)], struct("CopyAttrs"))
    with pytest.raises(Error, match="shapes"):
        native.run_op(Op.copy, [torch.zeros(3)], [torch.zeros(4)], struct("CopyAttrs"))
    with pytest.raises(Error, match="inputs"):
        native.run_op(Op.copy, [], [torch.zeros(4)], struct("CopyAttrs"))


# ---- gather ----------------------------------------------------------------------------------------------------------------
def index(shape: tuple[int, ...], n: int, dtype: torch.dtype = torch.int64, seed: int = 5) -> torch.Tensor:
    return values(shape, dtype, seed, low=-n, high=n - 1)


def take(x: torch.Tensor, axis: int, i: torch.Tensor) -> torch.Tensor:
    i = torch.where(i < 0, i + x.shape[axis], i).long()
    flat = torch.index_select(x, axis, i.reshape(-1))
    return flat.reshape(*x.shape[:axis], *i.shape, *x.shape[axis + 1 :])


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_take(dtype: torch.dtype) -> None:
    x = values((4, 6, 21), dtype)
    for axis in range(3):
        for shape in ((), (1,), (3,), (2, 5), (2, 0), (2, 1, 3)):
            for kind in (torch.int64, torch.int32, torch.int8):
                i = index(shape, x.shape[axis], kind)
                attrs = struct("GatherAttrs", kind=IndexKind.take, axis=axis)
                verify(Case(Op.gather, attrs, [x, i], [take(x, axis, i)], relative=0))


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_gather_elements(dtype: torch.dtype) -> None:
    x = values((4, 6, 21), dtype)
    for axis in range(3):
        for shape in ((4, 6, 21), (2, 3, 5), (4, 6, 1), (1, 6, 0)):
            size = tuple(9 if i == axis and n else n for i, n in enumerate(shape))
            i = index(size, x.shape[axis])
            want = torch.gather(x, axis, torch.where(i < 0, i + x.shape[axis], i))
            verify(
                Case(Op.gather, struct("GatherAttrs", kind=IndexKind.elements, axis=axis), [x, i], [want], relative=0)
            )


def test_gather_bad_index() -> None:
    x, y = torch.arange(4.0), torch.zeros(3)
    for bad in (4, -5, 2**40, -(2**63)):
        for kind in IndexKind:
            with pytest.raises(Error, match="index"):
                native.run_op(Op.gather, [x, torch.tensor([1, bad, 0])], [y], struct("GatherAttrs", kind=kind, axis=0))
    attrs = struct("GatherAttrs", kind=0, axis=0)
    with pytest.raises(Error, match="nothing"):
        native.run_op(Op.gather, [torch.zeros(0), torch.tensor([0])], [torch.zeros(1)], attrs)
    with pytest.raises(Error, match="integer"):
        native.run_op(Op.gather, [x, torch.zeros(3)], [y], attrs)
    with pytest.raises(Error, match="size"):
        native.run_op(Op.gather, [x, torch.tensor([0])], [y], attrs)
    with pytest.raises(Error, match="axis"):
        native.run_op(Op.gather, [x, torch.tensor([0])], [y], struct("GatherAttrs", kind=0, axis=1))


# ---- scatter ---------------------------------------------------------------------------------------------------------------
def scattered(
    x: torch.Tensor, axis: int, i: torch.Tensor, u: torch.Tensor, reduce: ScatterReduce, include: bool
) -> torch.Tensor:
    """Elements, in row-major order of the index, one by one."""
    i = torch.where(i < 0, i + x.shape[axis], i)
    if reduce != ScatterReduce.none:
        names = {1: "sum", 2: "prod", 3: "amax", 4: "amin", 5: "mean"}
        u = u[tuple(slice(n) for n in i.shape)].contiguous()
        if x.dtype == torch.bool:
            return torch.scatter_reduce(x.int(), axis, i, u.int(), names[int(reduce)], include_self=include).bool()
        return torch.scatter_reduce(x, axis, i, u, names[int(reduce)], include_self=include)
    y = x.clone()
    for at in np.ndindex(*i.shape):
        to = list(at)
        to[axis] = int(i[at])
        y[tuple(to)] = u[at]
    return y


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("reduce", ScatterReduce)
def test_scatter_elements(dtype: torch.dtype, reduce: ScatterReduce) -> None:
    if dtype == torch.bool and reduce in (ScatterReduce.mean, ScatterReduce.sum, ScatterReduce.prod):
        return
    x = values((4, 6, 5), dtype, low=1, high=4)
    for axis in range(3):
        for shape in ((4, 6, 5), (2, 3, 4), (4, 6, 0)):
            i = index(shape, x.shape[axis])
            u = values((4, 6, 5), dtype, 3, low=1, high=4)
            for include in (True, False):
                attrs = struct("ScatterAttrs", kind=IndexKind.elements, axis=axis, reduce=reduce, include_self=include)
                relative = (
                    0
                    if reduce in (0, 3, 4) or not dtype.is_floating_point
                    else {2: 2e-2, 4: 1e-5, 8: 1e-12}[dtype.itemsize]
                )
                if dtype == torch.bfloat16 and relative:
                    relative = 6e-2
                verify(Case(Op.scatter, attrs, [x, i, u], [scattered(x, axis, i, u, reduce, include)], relative=relative,
                            tmp=x.numel() * 4 if reduce == 5 else 0, inplace=0, tiles=(0,), layouts=("dense", "flip")))  # fmt: skip


@pytest.mark.parametrize("dtype", (torch.float32, torch.int64, torch.bfloat16, torch.bool), ids=str)
@pytest.mark.parametrize("reduce", (ScatterReduce.none, ScatterReduce.sum, ScatterReduce.max))
def test_scatter_take(dtype: torch.dtype, reduce: ScatterReduce) -> None:
    if dtype == torch.bool and reduce == ScatterReduce.sum:
        return
    x = values((4, 6, 5), dtype, low=1, high=4)
    for axis in range(3):
        for shape in ((), (3,), (2, 4)):
            i = index(shape, x.shape[axis], torch.int32)
            u = values((*x.shape[:axis], *shape, *x.shape[axis + 1 :]), dtype, 3, low=1, high=4)
            want = x.clone()
            for at in np.ndindex(*shape):
                to = want.select(axis, int(i[at]) % x.shape[axis])
                new = u[(slice(None),) * axis + at]
                to.copy_(new if reduce == 0 else to + new if reduce == 1 else torch.maximum(to, new))
            attrs = struct("ScatterAttrs", kind=IndexKind.take, axis=axis, reduce=reduce, include_self=1)
            verify(Case(Op.scatter, attrs, [x, i, u], [want], inplace=0, relative=0))


def test_scatter_last_write_wins() -> None:
    i = torch.zeros(50, dtype=torch.int64)
    u = torch.arange(50.0)
    for kind in IndexKind:
        out = torch.zeros(3)
        native.run_op(Op.scatter, [out, i, u], [out], struct("ScatterAttrs", kind=kind, axis=0), tiles=4)
        assert out.tolist() == [49, 0, 0]


def test_scatter_bad_index() -> None:
    x, u = torch.arange(4.0), torch.ones(3)
    for bad in (4, -5, 2**40):
        y = torch.zeros(4)
        with pytest.raises(Error, match="index"):
            native.run_op(Op.scatter, [x, torch.tensor([1, bad, 0]), u], [y], struct("ScatterAttrs", axis=0))
    with pytest.raises(Error, match="scratch"):
        native.run_op(
            Op.scatter, [x, torch.tensor([1]), u[:1]], [torch.zeros(4)], struct("ScatterAttrs", axis=0, reduce=5)
        )
    with pytest.raises(Error, match="updates"):
        native.run_op(Op.scatter, [x, torch.tensor([1]), u], [torch.zeros(4)], struct("ScatterAttrs", axis=0))


# ---- pad -------------------------------------------------------------------------------------------------------------------
MODES = {PadMode.constant: "constant", PadMode.reflect: "reflect", PadMode.replicate: "edge", PadMode.circular: "wrap"}


def pad_case(x: torch.Tensor, lo: tuple[int, ...], hi: tuple[int, ...], mode: PadMode, value: float = 0.0) -> Case:
    crop = tuple(slice(max(0, -a), n - max(0, -b)) for a, b, n in zip(lo, hi, x.shape))
    width = [(max(0, a), max(0, b)) for a, b in zip(lo, hi)]
    raw = x.view(torch.int16) if x.dtype == torch.bfloat16 else x
    options = {"constant_values": torch.tensor([value]).to(x.dtype).view(raw.dtype).numpy()[0]} if mode == 0 else {}
    want = torch.from_numpy(np.pad(raw[crop].numpy(), width, MODES[mode], **options)).view(x.dtype)
    return Case(Op.pad, struct("PadAttrs", mode=mode, lo=lo, value=value), [x], [want], relative=0, tiles=(0, 3))


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("mode", PadMode)
def test_pad(dtype: torch.dtype, mode: PadMode) -> None:
    x = values((3, 4, 9), dtype)
    for lo, hi in (
        ((0, 0, 0), (0, 0, 0)),
        ((0, 1, 2), (0, 2, 1)),
        ((2, 3, 8), (1, 0, 8)),
        ((0, 0, 5), (0, 0, 0)),
        ((1, 0, 0), (0, 1, 0)),
    ):
        verify(pad_case(x, lo, hi, mode, 1.0))
    if mode == PadMode.constant:
        for lo, hi in (
            ((-1, -2, 3), (1, -2, -5)),
            ((0, 0, -9), (0, 0, 4)),
            ((-3, 0, 0), (5, 0, 0)),
            ((9, 0, 0), (-3, 0, 0)),
        ):
            verify(pad_case(x, lo, hi, mode, 1.0))


def test_pad_against_torch() -> None:
    x = values((2, 3, 5, 7), torch.float32)
    for mode, name in ((1, "reflect"), (2, "replicate"), (3, "circular")):
        want = F.pad(x, (3, 2, 1, 4), name)
        verify(Case(Op.pad, struct("PadAttrs", mode=mode, lo=(0, 0, 1, 3)), [x], [want], relative=0))
    verify(pad_case(torch.zeros(2, 0), (1, 2), (0, 3), PadMode.constant, -math.inf))


def test_pad_refuses() -> None:
    for mode, out in ((1, 12), (3, 13)):
        with pytest.raises(Error, match="border"):
            native.run_op(
                Op.pad, [torch.zeros(4)], [torch.zeros(out)], struct("PadAttrs", mode=mode, lo=(4 if mode == 1 else 5,))
            )
    for mode in (1, 2, 3):
        with pytest.raises(Error, match="border"):
            native.run_op(Op.pad, [torch.zeros(0)], [torch.zeros(1)], struct("PadAttrs", mode=mode))
