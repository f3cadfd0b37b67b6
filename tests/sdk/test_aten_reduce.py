"""Reductions, running reductions and order statistics."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from eager import check


def test_sums() -> None:
    def f(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.sum(), x.sum(1), x.sum((0, 2)), x.sum(-1, keepdim=True), torch.ops.aten.sum.dim_IntList(x, []), x.mean(),
                x.mean((1, 2), keepdim=True), x.mean(0), x.prod(), x.prod(1), x.prod(2, keepdim=True), x.sum(dtype=torch.float64),
                x.sum(1, dtype=torch.float16), x.mean(1, dtype=torch.float64), x.nansum(1), torch.count_nonzero(x > 0, 1),
                x.int().sum(1), (x > 0).sum(), (x > 0).sum(0, dtype=torch.int32), x.int().prod(1), x.int().sum(1, dtype=torch.float32),
                x.int().float().mean(), x.var(), x.var(1), x.std((0, 2)), x.std(1, unbiased=False), torch.var(x, 1, correction=2),
                *torch.var_mean(x, 1), *torch.std_mean(x), x.var(1, keepdim=True), x.logsumexp(1), x.logsumexp((0, 2), True),
                (x * math.inf).logsumexp(0)]  # fmt: skip

    check(f, torch.randn(3, 4, 5) + 0.3)


def test_norms() -> None:
    def f(x: torch.Tensor) -> list[torch.Tensor]:
        return [*[torch.linalg.vector_norm(x, p, d, keepdim=k) for p in (0, 1, 2, 3.5, math.inf, -math.inf)
                  for d, k in ((1, False), ((0, 2), True), (None, False))],
                x.norm(), x.norm(1, 1), x.norm(dim=-1, keepdim=True), x.norm("fro"), torch.linalg.norm(x[0]),
                F.normalize(x, dim=1), F.cosine_similarity(x, x.flip(1), dim=1), torch.cdist(x, x.flip(1)),
                torch.cdist(x[0], x[1, :2], p=1.0), torch.dist(x, x + 1), F.pairwise_distance(x[0], x[1])]  # fmt: skip

    check(f, torch.randn(3, 4, 5))
    check(lambda x: [torch.linalg.vector_norm(x, dim=1), x.var(1), x.std(1)], (torch.randn(3, 64) * 100).half())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.int8])
def test_extremes(dtype: torch.dtype) -> None:
    def f(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.max(), x.min(), *x.max(1), *x.min(0, keepdim=True), x.amax(1), x.amin((0, 1)), x.amax(()), x.argmax(), x.argmin(),
                x.argmax(1), x.argmin(-1, keepdim=True), x.argmax(keepdim=True), *x.aminmax(), *x.aminmax(dim=1, keepdim=True), x.any(), x.all(1), x.any(0, keepdim=True),
                x.max(1).values, x.min(-1).indices]  # fmt: skip

    check(f, torch.tensor([[3, 1, 3, 2], [5, 5, 0, 5], [-1, -7, -1, -7]]).to(dtype))


def test_bool_and_nan() -> None:
    x = torch.tensor([[1.0, math.nan, 3.0, math.nan], [2.0, 5.0, -1.0, 5.0], [math.inf, 0.0, -math.inf, 1.0]])
    check(lambda x: [x.max(), x.amin(1), *x.max(1), *x.min(1), x.argmax(), x.argmax(1), x.argmin(0), *x.median(1), x.median(), x.sum(1),
                     *x.cummax(1), *x.cummin(1), *x.sort(1), *x.topk(2, 1)], x)  # fmt: skip
    b = torch.tensor([[True, False, True], [False, False, False]])
    check(lambda b: [b.any(), b.all(), b.any(1), b.all(0), b.amax(1), b.max(), *b.max(1), b.sum(), b.cumsum(1), b.any(1, keepdim=True),
                     torch.ops.aten.any.dims(b, [0, 1]), b.to(torch.uint8).any(1), b.float().any(0)], b)  # fmt: skip


def test_running() -> None:
    def f(x: torch.Tensor, i: torch.Tensor) -> list[torch.Tensor]:
        return [x.cumsum(1), x.cumsum(-2), x.cumprod(1), *x.cummax(1), *x.cummin(0), i.cumsum(1), i.to(torch.int8).cumsum(0),
                (i > 2).cumsum(1), i.cumsum(1, dtype=torch.float32), i.cumprod(1), *i.cummax(1), x.flip(1).cumsum(1).flip(1),
                torch.diff(x), torch.diff(x, 2, 0), torch.diff(x, prepend=x[:, :1]), torch.diff(i > 2, dim=0), torch.diff(i, append=i[:, :2])]  # fmt: skip

    check(f, torch.randn(3, 5), torch.tensor([[3, 1, 3, 2, 3], [5, 5, 0, 5, 5], [-1, -7, -1, 0, -7]]))


def test_order() -> None:
    def f(x: torch.Tensor) -> list[torch.Tensor]:
        return [*torch.sort(x, stable=True), *torch.sort(x, dim=0, descending=True, stable=True), torch.argsort(x, stable=True), x.topk(2)[0],
                x.topk(2, 0, largest=False)[0], x.topk(3, sorted=False)[0].sort()[0], x.kthvalue(2, 1)[0], x.median(), x.median(1)[0],
                x.msort(), x.sort(1)[0]]  # fmt: skip

    check(f, torch.tensor([[1.0, 5, 5, 2, 5, 1], [0, 0, 0, 0, 0, 0], [-1, 3, -1, 3, 7, 7]]))


def test_search() -> None:
    def f(x: torch.Tensor, e: torch.Tensor) -> list[torch.Tensor]:
        rows = torch.stack([e, e + 1, e * 2])
        return [torch.bucketize(x, e), torch.bucketize(x, e, right=True), torch.bucketize(x, e, out_int32=True),
                torch.searchsorted(e, x), torch.searchsorted(rows, x), torch.searchsorted(rows, x, side="right"),
                torch.isin(x, e), torch.histc(x[:, 1:], 4), torch.histc(x, 5, -1, 3)]  # fmt: skip

    x = torch.tensor([[math.nan, 1.0, 2.0, 2.5], [-3.0, 0.0, 9.0, 1.0], [1.5, 0.2, 3.0, 2.0]])
    check(f, x, torch.tensor([0.0, 1.0, 2.0, 3.0]))


def test_zero_dim() -> None:
    def f(s: torch.Tensor) -> list[torch.Tensor]:
        return [s.sum(), s.sum(0), s.max(), *s.max(0), s.argmax(), s.cumsum(0), *s.sort(0), s.mean(), s.var(unbiased=False), s.softmax(0), s.softmax(0).log_softmax(-1),
                s.expand(2, 3), (s + 1).reshape(1, 1), s.any(), s.unsqueeze(0), s.squeeze(), *s.topk(1), s.norm(), s.prod(0), s.amax(-1), s.median()]  # fmt: skip

    check(f, torch.tensor(2.5))
