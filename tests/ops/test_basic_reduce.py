"""reduce, scan, sort, nonzero, item against torch."""

from __future__ import annotations

import ctypes
import itertools
import math

import numpy as np
import pytest
import torch
from basic import ALL, FLOATS, INTS, Case, Op, native, place, struct, values, verify
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.error import Error
from trivet.fbs.structs import STRUCTS, ReduceKind, ScanKind

REAL = ("sum", "mean", "prod", "max", "min", "any", "all", "argmax", "argmin", "var")


def reduced(kind: str, x: torch.Tensor, axes: tuple[int, ...], correction: float = 1.0) -> torch.Tensor:
    """The truth, with the axes kept."""
    shape = [1 if i in axes else n for i, n in enumerate(x.shape)]
    if kind in ("argmax", "argmin"):
        fn = torch.argmax if kind == "argmax" else torch.argmin
        return fn(x).reshape(shape) if len(axes) > 1 or x.ndim == 0 else fn(x, dim=axes[0], keepdim=True)
    if not axes:
        flat = x.unsqueeze(-1)
        return reduced(kind, flat, (x.ndim,), correction).squeeze(-1)
    if kind in ("max", "min"):
        return (torch.amax if kind == "max" else torch.amin)(x, dim=axes, keepdim=True)
    if kind == "var":
        return torch.var(x.double(), dim=axes, keepdim=True, correction=correction).to(x.dtype)
    if kind == "prod" and x.dtype == torch.float32:
        return reduced(kind, x.double(), axes).float()
    if kind == "mean":
        return torch.mean(x.double(), dim=axes, keepdim=True).to(x.dtype)
    if kind == "sum":
        return (
            torch.sum(x.double(), dim=axes, keepdim=True).to(x.dtype)
            if x.is_floating_point()
            else torch.sum(x, axes, True)
        )
    for a in axes:
        x = {"prod": torch.prod, "any": torch.any, "all": torch.all}[kind](x, dim=a, keepdim=True)
    return x if kind == "prod" else x.bool()


def case(kind: str, x: torch.Tensor, axes: tuple[int, ...], correction: float = 1.0, **more: object) -> Case:
    attrs = struct("ReduceAttrs", kind=ReduceKind[kind], axes=sum(1 << a for a in axes), correction=correction)
    want = reduced(kind, x, axes, correction)
    if not x.dtype.is_floating_point or kind in ("any", "all", "max", "min"):
        more.setdefault("relative", 0)
    return Case(Op.reduce, attrs, [x], [want], **more)  # type: ignore[arg-type]


def subsets(rank: int) -> list[tuple[int, ...]]:
    return [s for n in range(rank + 1) for s in itertools.combinations(range(rank), n)]


@pytest.mark.parametrize("kind", REAL)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_float(kind: str, dtype: torch.dtype) -> None:
    x = values((3, 4, 2, 19), dtype, low=0.5 if kind == "prod" else -2, high=1.5 if kind == "prod" else 2)
    relative = {torch.float32: 3e-6, torch.float64: 1e-12, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    for axes in subsets(4):
        if kind.startswith("arg") and len(axes) not in (1, 4):
            continue
        if kind == "prod" and dtype.itemsize == 2:
            want = reduced(kind, x.float(), axes).to(dtype)
            c = case(kind, x, axes, relative=relative)
            verify(Case(c.op, c.attrs, c.inputs, [want], relative=relative))
        else:
            verify(case(kind, x, axes, relative=None if kind in ("any", "all") else relative, absolute=relative))


@pytest.mark.parametrize("kind", ("sum", "prod", "max", "min", "any", "all", "argmax", "argmin"))
@pytest.mark.parametrize("dtype", (torch.bool, *INTS), ids=str)
def test_int(kind: str, dtype: torch.dtype) -> None:
    x = values((3, 5, 21), dtype, low=-100, high=100)
    if dtype == torch.bool and kind.startswith("arg"):
        return  # eager has none
    for axes in subsets(3):
        if not (kind.startswith("arg") and len(axes) not in (1, 3)):
            verify(case(kind, x, axes))
    info = torch.iinfo(dtype if dtype != torch.bool else torch.uint8)
    if dtype != torch.bool:
        verify(case(kind, torch.tensor([info.min, info.max, 0, info.max], dtype=dtype), (0,)))


@pytest.mark.parametrize("kind", REAL)
def test_long(kind: str) -> None:
    """Long axes, both ways round, and errors that stay small."""
    x = values((2, 100_003), torch.float32, low=0.99999 if kind == "prod" else 0, high=1)
    kw = {"relative": 3e-6 if kind != "prod" else 1e-3, "tiles": (0,), "layouts": ("dense", "flip")}
    verify(case(kind, x, (1,), **kw))
    verify(case(kind, x.T.contiguous(), (0,), **kw))
    verify(case(kind, x, (0, 1), **{**kw, "layouts": ("dense",)}))
    y = values((300, 300), torch.float32, low=-1, high=1)
    verify(case(kind, y, (0,), relative=3e-6, absolute=3e-6))


def test_nan_and_ties() -> None:
    nan, inf = math.nan, math.inf
    rows = [
        [1, 5, 5, 2],
        [nan, 5, nan, 1],
        [1, 2, 3, nan],
        [-inf, -inf, -inf, -inf],
        [inf, nan, inf, 0],
        [0.0, -0.0, 0, 0],
    ]
    for dtype in FLOATS:
        x = torch.tensor(rows, dtype=dtype)
        for kind in ("max", "min", "argmax", "argmin", "sum", "any", "all"):
            verify(case(kind, x, (1,)))
            verify(case(kind, x.T.contiguous(), (0,)))
            verify(case(kind, x.repeat(1, 40), (1,), layouts=("dense", "flip")))


def test_variance_with_offset() -> None:
    x = values((6, 4000), torch.float32) + 1e5
    for c in (0.0, 1.0, 2.5):
        verify(case("var", x, (1,), c, relative=2e-5, layouts=("dense", "flip")))
        verify(case("var", x.T.contiguous(), (0,), c, relative=2e-5, layouts=("dense", "flip")))
    one = torch.ones(3, 1)
    verify(case("var", one, (1,), 1.0))
    verify(case("var", one, (1,), 0.0))


def test_nothing() -> None:
    x = torch.zeros(3, 0, 2)
    for kind in ("sum", "mean", "prod", "any", "all", "var"):
        verify(case(kind, x, (1,)))
        verify(case(kind, x, (0, 1, 2)))
    for kind in REAL:
        if kind.startswith("arg"):
            continue
        verify(case(kind, x, (0,)))
    verify(case("sum", torch.zeros(2, 0, dtype=torch.int64), (1,)))
    with pytest.raises(Error, match="no extreme"):
        native.run_op(Op.reduce, [x], [torch.zeros(3, 1, 2)], struct("ReduceAttrs", kind=ReduceKind.max, axes=2))


def test_sum_into_other_integers() -> None:
    x = values((4, 9), torch.int32)
    for out in (torch.int32, torch.int8, torch.int64):
        verify(
            Case(
                Op.reduce, struct("ReduceAttrs", kind=ReduceKind.sum, axes=2), [x], [x.sum(1, True).to(out)], relative=0
            )
        )


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_shape(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6) | st.sampled_from([1, 40, 300]), min_size=1, max_size=5).filter(
        lambda s: math.prod(s) < 50_000))  # fmt: skip
    axes = tuple(sorted(data.draw(st.sets(st.integers(0, len(shape) - 1)))))
    order = data.draw(st.permutations(range(len(shape))))
    kind = data.draw(st.sampled_from(REAL))
    if kind.startswith("arg"):
        axes = tuple(range(len(shape))) if len(axes) != 1 else axes
    x = values(shape, torch.float32, seed=len(shape), low=0.9, high=1.1)
    x = torch.empty([shape[i] for i in order]).permute([order.index(i) for i in range(len(order))]).copy_(x)
    c = case(kind, x, axes)
    out = torch.empty_like(c.want[0])
    native.run_op(Op.reduce, [x], [out], c.attrs, tiles=data.draw(st.sampled_from([1, 3])))
    torch.testing.assert_close(
        out, c.want[0], rtol=1e-4 if kind in ("prod", "var") else 3e-6, atol=1e-6, equal_nan=True
    )


# ---- scan -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ScanKind)
@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_scan(kind: ScanKind, dtype: torch.dtype) -> None:
    x = values((4, 3, 300), dtype, low=0.5 if kind == ScanKind.prod and dtype.is_floating_point else -3)
    if dtype.is_floating_point:
        x[0, 1, 200] = math.nan
        x[1, 0, 3], x[2, 2, 2] = math.inf, -math.inf
    for axis in range(3):
        whole = not dtype.is_floating_point and kind <= ScanKind.prod
        if kind == ScanKind.sum:
            want = torch.cumsum(x.double(), axis).to(dtype) if not whole else torch.cumsum(x, axis)
        elif kind == ScanKind.prod:
            want = torch.cumprod(x.double(), axis).to(dtype) if not whole else torch.cumprod(x, axis)
        else:
            want = (torch.cummax if kind == ScanKind.max else torch.cummin)(x, axis).values
        verify(Case(Op.scan, struct("ScanAttrs", kind=kind, axis=axis), [x], [want], inplace=0, absolute=1e-6))


def test_scan_exclusive() -> None:
    x = values((3, 300), torch.float32)
    want = torch.cat([torch.zeros(3, 1), torch.cumsum(x.double(), 1)[:, :-1].float()], 1)
    verify(Case(Op.scan, struct("ScanAttrs", kind=0, axis=1, exclusive=1), [x], [want], absolute=1e-6))
    verify(Case(Op.scan, struct("ScanAttrs", kind=0, axis=1), [torch.zeros(3, 0)], [torch.zeros(3, 0)]))


# ---- sort ------------------------------------------------------------------------------------------------------------------
def sort_case(x: torch.Tensor, axis: int, descending: bool, k: int | None = None) -> Case:
    v, i = torch.sort(x, dim=axis, descending=descending, stable=True)
    if k is not None:
        v, i = v.narrow(axis, 0, k), i.narrow(axis, 0, k)
    n = x.shape[axis]
    attrs = struct("SortAttrs", axis=axis, descending=descending)
    return Case(
        Op.sort,
        attrs,
        [x],
        [v.contiguous(), i.contiguous()],
        relative=0,
        tmp=0 if n <= 1 else n * (32 if x.dtype.itemsize == 8 else 16),
    )


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("descending", (False, True))
def test_sort(dtype: torch.dtype, descending: bool) -> None:
    for shape in ((5, 7, 3), (2, 200, 3), (1, 3000, 1)):
        x = values(shape, dtype, low=-100, high=100)
        if dtype.is_floating_point:
            x.view(-1)[::9] = torch.tensor(math.nan, dtype=dtype)
            x.view(-1)[1:6] = torch.tensor([math.inf, -math.inf, 0.0, -0.0, 0.0], dtype=dtype)
        elif dtype != torch.bool:
            info = torch.iinfo(dtype)
            x.view(-1)[:3] = torch.tensor([info.max, info.min, 0], dtype=dtype)
        verify(sort_case(x, 1, descending))
    verify(sort_case(values((3, 4, 60), dtype), 2, descending, k=5))
    verify(sort_case(values((3, 1), dtype), 1, descending))
    verify(sort_case(values((3, 5), dtype), 1, descending, k=0))


def test_sort_scratch_is_asked_for() -> None:
    x = values((3, 9), torch.float32)
    c = sort_case(x, 1, False)
    bytes_for = ctypes.CDLL(str(native.library().path)).trvk_sort_tmp_bytes
    bytes_for.argtypes, bytes_for.restype = [ctypes.c_uint32, ctypes.c_int64], ctypes.c_size_t
    assert bytes_for(9, 9) == c.tmp and bytes_for(6, 9) == 2 * c.tmp and bytes_for(9, 1) == 0
    out = [torch.zeros(3, 9), torch.zeros(3, 9, dtype=torch.int64)]
    with pytest.raises(Error, match="scratch"):
        native.run_op(Op.sort, [x], out, c.attrs)
    with pytest.raises(Error, match="scratch"):
        native.run_op(Op.sort, [x], out, c.attrs, tmp=[np.zeros(c.tmp - 1, np.uint8)])


# ---- nonzero, item ------------------------------------------------------------------------------------------------------------
def data_row(low: int = 0, high: int = 1 << 40) -> tuple[np.ndarray, np.ndarray]:
    table = np.zeros(3, STRUCTS["Dim"])
    table["op"] = [0, 0, 10]
    table["min"], table["max"] = [0, 1, low], [0, 1, high]
    return np.array([0, 1, 0], np.intp), table


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (9,), (3, 400), (2, 3, 4), (2, 0)], ids=str)
def test_nonzero(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = values(shape, dtype, low=0, high=1 if not dtype.is_floating_point else 3)
    if dtype.is_floating_point and x.numel() > 6:
        x.view(-1)[:6] = torch.tensor([0.0, -0.0, math.nan, math.inf, 0, 0], dtype=dtype)
    want = torch.nonzero(x)
    for layout in ("dense", "last", "gaps", "flip"):
        dims, table = data_row()
        out = torch.full((x.numel() + 1, x.ndim), -7)
        native.run_op(Op.nonzero, [place(x, layout)], [out], struct("NonzeroAttrs", dim=2), dims=dims, dim_table=table)
        assert dims[2] == len(want)
        assert torch.equal(out[: len(want)], want) and bool((out[len(want) :] == -7).all())


def test_nonzero_out_of_room() -> None:
    dims, table = data_row()
    out = torch.full((4, 1), -7)
    with pytest.raises(Error, match="size"):
        native.run_op(Op.nonzero, [torch.ones(4)], [out[:3]], struct("NonzeroAttrs", dim=2), dims=dims, dim_table=table)
    assert out[3] == -7
    dims, table = data_row(high=3)
    with pytest.raises(Error, match="size"):
        native.run_op(Op.nonzero, [torch.ones(4)], [out], struct("NonzeroAttrs", dim=2), dims=dims, dim_table=table)


def test_item() -> None:
    for dtype in (*INTS, torch.bool):
        dims, table = data_row(0, 100)
        native.run_op(Op.item, [torch.ones(1, 1).to(dtype)], [], struct("ItemAttrs", dim=2), dims=dims, dim_table=table)
        assert dims[2] == 1
    for bad in (101, -1):
        with pytest.raises(Error, match="size"):
            native.run_op(Op.item, [torch.tensor(bad)], [], struct("ItemAttrs", dim=2), dims=dims, dim_table=table)
    assert dims[2] == 1
    for row in (0, 3):
        with pytest.raises(Error, match="dimension"):
            native.run_op(Op.item, [torch.tensor(1)], [], struct("ItemAttrs", dim=row), dims=dims, dim_table=table)
