"""Rotary position embedding is one map; matrix products of the same rows are one product. Results are those of eager torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from test_passes_attention import kernels, lower
from torch import Tensor, nn

import trivet

S, D = 5, 8


def table(x: Tensor, full: bool) -> tuple[Tensor, Tensor]:
    a = torch.outer(torch.arange(S).float(), 1.0 / 100.0 ** (torch.arange(0, D, 2) / D))
    a = torch.cat([a, a], -1) if full else a
    return a.cos(), a.sin()


def rotate_half(x: Tensor) -> Tensor:
    return torch.cat((-x[..., D // 2 :], x[..., : D // 2]), dim=-1)


class Rotary(nn.Module):
    def __init__(self, form: str, full: bool) -> None:
        super().__init__()
        self.form, self.full = form, full
        cos, sin = table(torch.empty(0), full)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        cos, sin = self.cos, self.sin
        if self.form == "positions":
            cos, sin = F.embedding(at, cos), F.embedding(at, sin)
        if self.full:
            return x * cos + rotate_half(x) * sin
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("form", ["table", "positions"])
def test_rotary(form: str, full: bool) -> None:
    args = (torch.randn(2, 3, S, D), torch.tensor([3, 1, 4, 1, 0]))
    net = Rotary(form, full).eval()
    assert kernels(lower(net, *args)) == (["map"] if form == "table" else ["gather", "gather", "map"])
    got = trivet.load(trivet.export(net, args))(*args)
    torch.testing.assert_close(got, net(*args), rtol=1e-6, atol=1e-6)


def test_rotary_of_what_is_overwritten() -> None:
    """The map reads every element of its input twice: the result cannot take its place."""
    net = Rotary("table", True)
    step = nn.Sequential(nn.Linear(D, D), nn.ReLU())

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step, self.net = step, net

        def forward(self, x: Tensor, at: Tensor) -> Tensor:
            return self.step(self.net(self.step(x), at))

    both, args = Both().eval(), (torch.randn(2, 3, S, D), torch.zeros(S, dtype=torch.int64))
    with torch.no_grad():
        torch.testing.assert_close(trivet.load(trivet.export(both, args))(*args), both(*args), rtol=1e-5, atol=1e-6)


class Gated(nn.Module):
    """Queries, keys and values with and without bias; a gate; weights that two layers share."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(32, 32), nn.Linear(32, 16, bias=False)
        self.gate, self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(32, 64, bias=False), nn.Linear(64, 32)
        self.tied = tied

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.down(F.silu(self.gate(x)) * self.up(x))
        q, k = self.q(x).view(2, 3, 4, 8).sum(1), self.k(x).view(2, 3, 2, 8).sum(1)
        return (y + F.silu(self.gate(y)) @ self.down.weight.T if self.tied else y), torch.cat([q, k], 1)


def test_products_of_the_same_rows_are_one() -> None:
    x = torch.randn(2, 3, 32)
    found = kernels(lower(Gated(), x))
    assert found.count("matmul") == 2 and found.count("map") == 1, "the gate's activation and product are one map"
    assert kernels(lower(Gated(tied=True), x)).count("matmul") == 5, "a weight that others read is not stored twice"


@pytest.mark.parametrize("recipe", ["w8a8-dynamic", "w4g32a8", "w8", "f16"])
def test_products_of_stored_weights_are_one(recipe: str) -> None:
    torch.manual_seed(0)
    net, x = Gated().eval(), torch.randn(2, 3, 32)
    apart = trivet.load(trivet.export(net, (x,), quantize=recipe, skip=["merge_products"]))(x)
    prog = trivet.export(net, (x,), quantize=recipe)
    for got, want in zip(trivet.load(prog)(x), apart, strict=True):
        near = 2e-3 if recipe == "f16" else 1e-5  # one rounding less
        torch.testing.assert_close(got, want, rtol=near, atol=near)


def test_an_activation_of_its_own_stays_with_its_product() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 8), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(self.a(x)).sum(-1) + torch.tanh(self.b(x)).amax(-1)

    assert kernels(lower(Heads(), torch.randn(3, 16))).count("matmul") == 2
