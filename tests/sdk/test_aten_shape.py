"""Views, joins, borders, creation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from eager import check
from torch.export import Dim


def test_views() -> None:
    def f(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.view(6, 20), x.reshape(-1), x.flatten(1), x.unflatten(2, (2, 2)), x.permute(2, 0, 1, 3), x.transpose(1, -1),
                x.unsqueeze(0), x.unsqueeze(-1), x[:, :1].squeeze(1), x[:1, :1].squeeze(), x.movedim(0, -1),
                torch.movedim(x, (0, 1), (2, 0)), x[1], x[:, -1], x[..., 1:4], x[:, :, ::2], x[..., -3:-1], x[:, 5:], x[:, 2:100],
                x.select(1, -2), x.narrow(3, 1, 2), x.expand(2, 2, 3, 4, 5), x[:, :, :1].expand(-1, -1, 7, -1), x.mT, x[0, 0].T,
                x[0, 0].t(), x.diagonal(0, 1, 2), x.diagonal(1, -2, -1), x.diagonal(-1, -1, -2), x.unfold(3, 2, 1),
                x.unfold(2, 3, 1), x.flip(0), x.flip(1, 3), x.swapaxes(0, 1), torch.fliplr(x), x.view(torch.int32),
                x.contiguous().view(-1).view(2, 60), x.reshape_as(x.permute(1, 0, 2, 3)), torch.atleast_3d(x[0, 0])]  # fmt: skip

    check(f, torch.randn(2, 3, 4, 5))


def test_splits() -> None:
    def f(x: torch.Tensor) -> list[torch.Tensor]:
        return [*x.split(2, 1), *x.split([1, 4], 1), *x.chunk(3, 1), *x.unbind(0), *torch.tensor_split(x, 3, 1),
                *torch.tensor_split(x, (1, 2), 1), *torch.hsplit(x, (1,))]  # fmt: skip

    check(f, torch.randn(2, 5, 3))


def test_joins() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [torch.cat([x, y], 0), torch.cat([x, x, y[:1].expand(2, 3)], -1), torch.stack([x, y[:2]], 1), torch.stack([x, x], -1),
                torch.cat([torch.empty(0), x]), torch.cat([x, y.to(torch.float64)]), torch.cat([x.int(), x]), x.repeat(2, 3),
                x.repeat(2, 1, 2), x.tile(2), torch.hstack([x, x]), torch.vstack([x, y]), torch.column_stack([x, x]),
                x.repeat_interleave(3), x.repeat_interleave(2, 1), x.repeat_interleave(torch.tensor([1, 2]), 0), x.roll(1, 0),
                x.roll(-1, 1), x.roll((1, -2), (0, 1)), x.roll(2), *torch.meshgrid(x[0], y[:, 0], indexing="ij"),
                *torch.meshgrid(x[0], x[:, 0], indexing="xy"), torch.cat([x, x[:0]], 0), x.rot90(), torch.block_diag(x, y)]  # fmt: skip

    check(f, torch.randn(2, 3), torch.randn(4, 3))


def test_triangles_and_diagonals() -> None:
    def f(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.tril(), x.triu(1), x.tril(-1), x.triu(-2), torch.diag_embed(x[0]), torch.diag_embed(x, 1, 0, 2),
                torch.diag_embed(x[0], -2), torch.diagflat(x, 2), torch.diag(x[0]), torch.diag(x, 1), x.trace(),
                torch.tril_indices(3, 4), torch.triu_indices(3, 3, 1), torch.eye(3), torch.eye(2, 4, dtype=torch.int64)]  # fmt: skip

    check(f, torch.randn(3, 4))


def test_scatters_of_slices() -> None:
    def f(x: torch.Tensor) -> list[torch.Tensor]:
        out = []
        for where in (slice(1, 3), slice(None, None, 2), slice(0, 5), slice(-2, None), slice(4, 100)):
            y = x.clone()
            y[:, where] = 7.0
            out.append(y)
        y = x.clone()
        y[1] = x[0]
        y[:, -1] += 1
        z = x.clone()
        z[:, 1:4:2] = x[:, 2:4]
        return [*out, y, z, torch.slice_scatter(x, x[:, :2], 1, 3, 5), torch.select_scatter(x, x[0], 0, -1)]

    check(f, torch.randn(3, 5))


def test_padding() -> None:
    def f(x: torch.Tensor) -> list[torch.Tensor]:
        y = x[0]
        return [F.pad(x, (1, 2)), F.pad(x, (1, 2, 3, 4), value=1.5), F.pad(x, (-1, 2, 0, -2)), F.pad(x, (0, 0, 0, 0, 1, 1)),
                F.pad(x, (2, 1, 3, 1), mode="reflect"), F.pad(x, (2, 1, 3, 1), mode="replicate"), F.pad(y, (1, 1), mode="reflect"),
                F.pad(x, (2, 1, 3, 1), mode="circular"), F.pad(x, (-1, 2, 1, -1), mode="replicate"),
                F.pad(x.int(), (1, 1), value=3), F.pad(x > 0, (1, 0), value=True)]  # fmt: skip

    check(f, torch.randn(2, 3, 5, 6))


def test_blocks() -> None:
    def f(x: torch.Tensor) -> list[torch.Tensor]:
        a = F.unfold(x, (2, 3), dilation=(2, 1), padding=(1, 2), stride=(1, 2))
        return [F.pixel_shuffle(x, 2), F.pixel_unshuffle(x, 2), F.channel_shuffle(x, 2), a, F.unfold(x[0], 2),
                F.fold(a, (6, 8), (2, 3), dilation=(2, 1), padding=(1, 2), stride=(1, 2)),
                F.fold(F.unfold(x[0], 2), (6, 8), 2)]  # fmt: skip

    check(f, torch.randn(2, 4, 6, 8))


def test_as_strided() -> None:
    def f(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.as_strided((2, 3), (3, 1)), x.as_strided((3, 4, 2), (4, 2, 1)), x.as_strided((2, 2), (5, 2), 3),
                x.as_strided((4,), (1,), 2), x.t().as_strided((3, 2), (2, 1)), x.as_strided((3, 2), (0, 1))]  # fmt: skip

    check(f, torch.randn(4, 6))


def test_repeats_that_depend_on_data() -> None:
    def f(x: torch.Tensor, n: torch.Tensor) -> list[torch.Tensor]:
        return [
            x.repeat_interleave(n, 0),
            x.unfold(0, 2, 1),
            x[0, 0].unfold(0, 1, 1),
            torch.tensor_split(x, torch.tensor([1, 3]))[1],
        ]

    check(f, torch.randn(4, 2), torch.tensor([2, 0, 1, 3]), more=[(torch.randn(4, 2), torch.tensor([0, 0, 0, 1]))])


def test_creation() -> None:
    def f(x: torch.Tensor) -> list[torch.Tensor]:
        return [x + 0, torch.arange(5), torch.arange(2, 9, 2), torch.arange(0.5, 3, 0.3), torch.arange(5, dtype=torch.float32),
                torch.arange(5, 0, -1), torch.linspace(-1, 2, 7), torch.linspace(0, 1, 1), torch.linspace(3, 10, 5, dtype=torch.float64),
                torch.logspace(0, 2, 5), torch.full((2, 3), 2.5), torch.full((2,), 3), torch.full((), True), torch.zeros(2, 3),
                torch.ones(2, dtype=torch.bool), x.new_zeros(3), x.new_ones(2, 2), x.new_full((2,), 4), torch.zeros_like(x),
                torch.ones_like(x, dtype=torch.int64), torch.full_like(x, 7), torch.scalar_tensor(2.5), torch.tensor([1, 2, 3]),
                torch.tensor(1.5), F.one_hot(torch.tensor([0, 2, 1]), 4), x.new_tensor([1.0, 2.0]),
                torch.full((2, 2), float("-inf")).triu(1)]  # fmt: skip

    check(f, torch.randn(2, 3))


def test_zero_sizes() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [torch.cat([x, y], 1), x.mean(), x.sum(), x.reshape(0, 5), x + 1, x.permute(1, 0, 2), x.sum(1), x.prod(),
                F.linear(x, torch.ones(3, 4)), x.flip(1), x.any(), x.all()]  # fmt: skip

    check(f, torch.randn(2, 0, 4), torch.randn(2, 2, 4))


def test_dynamic() -> None:
    def f(x: torch.Tensor) -> list[torch.Tensor]:
        a, b = x.shape[0], x.shape[1]
        return [x[2:], x[:, -1], x[:, :-1], x[:, -2:], x.reshape(-1), x.repeat(1, 2), x.flip(1), torch.arange(b) + a, x.t(),
                torch.zeros(a, b).tril(), x.roll(1, 1), x.roll(-1, 1), F.pad(x, (1, 2)), x.unfold(1, 2, 1),
                torch.cat([x, x[:1]], 0), x.expand(3, a, b), x.view(a, b, 1).sum(1) / a, torch.full((b,), 2.0), x[:, a:b], x.mean() * b, torch.eye(b), torch.stack([x, x]), x.diagonal(), torch.linspace(0, 1, 4) * b]  # fmt: skip

    check(
        f,
        torch.randn(4, 6),
        more=[(torch.randn(5, 7),), (torch.randn(6, 9),)],
        dynamic_shapes=({0: Dim.AUTO, 1: Dim.AUTO},),
    )
