"""Indexing, gather, scatter, embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from eager import check


def test_index() -> None:
    def f(x: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> list[torch.Tensor]:
        return [x[i], x[:, i], x[i, j], x[:, i, j], x[i, :, j], x[..., j], x[i.view(3, 1), j.view(1, 3)], x[0, i], x[i, 0],
                x[:, :, i], x[torch.arange(3), :, j - 1], x[[0, -1]], x[:, [1, 2]], x[..., torch.tensor([-1, 0])], x[i][:, j],
                x[i, :, 1:], x[None, i], x[i.view(3, 1)], x[torch.tensor(1)], x[:, torch.tensor(-1)]]  # fmt: skip

    check(f, torch.randn(4, 5, 6), torch.tensor([0, -1, 2]), torch.tensor([3, 1, -2]))


def test_masks() -> None:
    def f(x: torch.Tensor, m: torch.Tensor) -> list[torch.Tensor]:
        a, b, c, d = x.clone(), x.clone(), x.clone(), x.clone()
        a[m] = 1.0
        b[m] = x[:, :1].expand(3, 4)[m] * 2
        c[:, torch.tensor([True, False, True, False])] = 5.0
        d[m] += 1
        return [x[m], x[m].sum(), m.nonzero(), torch.masked_select(x, m), torch.masked_select(x, m[0]), a, b, c, d,
                x[torch.tensor([True, False, True])], x.masked_scatter(m, torch.arange(12.0)), x[x > 0.3] * 2, torch.argwhere(x > 0),
                x[:, m[0]]]  # fmt: skip

    m = torch.tensor([[True, False, True, True], [False, False, False, False], [True, True, False, False]])
    check(f, torch.randn(3, 4), m)
    check(f, torch.randn(3, 4), torch.zeros(3, 4, dtype=torch.bool))


def test_index_put() -> None:
    def f(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        a, b, c, d = x.clone(), x.clone(), x.clone(), x.clone()
        a[:, i] = v
        b[i, :, torch.tensor([0, 1])] = 3.0
        c[i, i] = v[0, 0]
        d[..., i] = 1
        return [a, b, c, d, x.index_put((i,), v[0, 0], accumulate=True), x.index_put((torch.tensor([1, 1, -1]),), torch.ones(6), accumulate=True),
                x.int().index_put((torch.tensor([1, 1]), torch.tensor([0, 0])), torch.tensor(3, dtype=torch.int32), accumulate=True)]  # fmt: skip

    check(f, torch.randn(4, 5, 6), torch.tensor([2, -1]), torch.randn(4, 2, 6))


def test_one_axis() -> None:
    def f(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        e = torch.tensor([[0, 1, 1], [3, 2, 0]])
        return [x.index_select(0, i), x.index_select(1, torch.tensor([2, 0])), x.gather(1, e), x.gather(0, e), x.take(e),
                torch.take_along_dim(x, torch.tensor([[0, 3, 1, 1]]), 0), x.index_add(0, i, v), x.index_add(0, i, v, alpha=2), x.index_copy(0, i, v),
                x.index_fill(0, i, 7.0), x.index_fill(1, i, torch.tensor(2.0)), x.index_reduce(0, i, v, "amax"), x.index_reduce(0, torch.tensor([1, 1]), v, "mean", include_self=False),
                x.index_reduce(0, i, v, "prod"), x.scatter(1, e, v), x.scatter(1, e, 9.0), x.scatter_add(1, e, v),
                x.scatter(1, e, v, reduce="multiply"), x.scatter(0, e, 2.0, reduce="add"),
                *[x.scatter_reduce(1, e, v, r, include_self=s) for r in ("sum", "prod", "mean", "amax", "amin") for s in (True, False)],
                torch.zeros(4).index_add(0, torch.tensor([0, 0, 3]), v[0, :3]), x[0, 0].index_select(0, torch.tensor([0]))]  # fmt: skip

    check(f, torch.randn(4, 4), torch.tensor([1, 3]), torch.randn(2, 4))


def test_embedding() -> None:
    class M(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e = torch.nn.Embedding(10, 4, padding_idx=0)
            self.bags = torch.nn.ModuleList([torch.nn.EmbeddingBag(10, 4, mode=m) for m in ("sum", "mean", "max")])
            self.last = torch.nn.EmbeddingBag(10, 4, mode="mean", include_last_offset=True, padding_idx=3)

        def forward(
            self, i: torch.Tensor, flat: torch.Tensor, offsets: torch.Tensor, w: torch.Tensor
        ) -> list[torch.Tensor]:
            out = [self.e(i), F.embedding(i.int(), self.e.weight)]
            for bag in self.bags:
                out += [bag(i), bag(flat, offsets)]
            return [*out, self.bags[0](flat, offsets, w), self.last(flat, torch.cat([offsets, torch.tensor([7])]))]

    check(
        M(),
        torch.tensor([[1, 2, 3], [0, 9, 9]]),
        torch.tensor([1, 3, 3, 2, 9, 0, 5]),
        torch.tensor([0, 2, 2, 5]),
        torch.randn(7),
    )
