"""Weights rounded to calibration data: what it does to results, against brute force."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from trivet.quantize import rounding
from trivet.quantize.recipe import Recipe, Spec, recipe
from trivet.quantize.stage import quantize

PLAIN = replace(recipe("w8a8"), bias_correction=False, data_rounding=False)


def correlated(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Neighbours along axis 1 go together, as channels of a net do."""
    x = torch.randn(shape, generator=generator)
    return x + 2 * x.mean(1, keepdim=True) + 1


@pytest.mark.parametrize("layer", [
    nn.Linear(24, 16), nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(4, 6, 3, stride=2, dilation=2, groups=2), nn.Conv2d(8, 16, 3, groups=8),
    nn.Conv1d(4, 3, 5, padding="same"), nn.Conv3d(3, 8, 2, stride=(1, 2, 1)), nn.Conv2d(4, 4, (1, 3), padding=(0, 1), bias=False),
])  # fmt: skip
def test_nearer_to_float_than_nearest_numbers(layer: nn.Module) -> None:
    g = torch.Generator().manual_seed(1)
    cells = {nn.Linear: 0, nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}[type(layer)]
    wide = layer.in_channels if cells else 24
    data = [(correlated(g, 16, wide, *[9] * cells),) for _ in range(8)]
    test = correlated(g, 64, wide, *[9] * cells)
    example = (data[0][0],)
    coarse = replace(PLAIN, activation=Spec("i16"))  # so that only weights matter
    torch.manual_seed(0)
    layer.reset_parameters()
    layer.eval()

    def noise(r: Recipe) -> float:
        q = quantize(layer, example, recipe=r, calibrate=data)
        return float(sum((q.module(t) - layer(t)).square().sum() for t in test.split(16)))

    with torch.no_grad():
        nearest, rounded = noise(coarse), noise(replace(coarse, data_rounding=True))
    assert rounded < 0.97 * nearest, (nearest, rounded)


def test_best_of_all_roundings_nearly() -> None:
    """Three weights, every choice of rounding up or down.

    The method is Babai's nearest plane: with the upper factor U of the inverse of h (damped), the loss is the sum over weights of
    (r / U[i, i]) ** 2 with |r| <= scale / 2. That bounds each loss; r is about uniform, so that a third of the bound is expected, and
    the mean of 40 losses (deviation of r ** 2: 0.9 of its mean, one of the three dominates) is off by 3 * 0.9 / sqrt(40) of that.
    """
    g = torch.Generator().manual_seed(3)
    parts, sums = [], [0.0, 0.0, 0.0]
    for _ in range(40):
        x = correlated(g, 64, 3).double()
        w = torch.randn(1, 1, 3, generator=g, dtype=torch.float64)
        scale = torch.full((1, 1), 0.11, dtype=torch.float64)
        h = x.T @ x
        got = rounding._round(w, h[None], scale, -127, 127)[0, 0]
        damped = h + rounding.DAMPING * h.diagonal().mean() * torch.eye(3)
        factor = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
        bound = (0.11 / 2) ** 2 * float((1 / factor.diagonal() ** 2).sum())
        down = (w[0, 0] / 0.11).floor()

        def loss(q: torch.Tensor, x: torch.Tensor = x, w: torch.Tensor = w) -> float:
            return float((x @ (q * 0.11 - w[0, 0])).square().sum())

        best = min(loss(down + torch.tensor(c)) for c in itertools.product((0, 1), repeat=3))
        nearest = loss((w[0, 0] / 0.11).round())
        assert best - 1e-9 <= loss(got) <= bound + 1e-9
        parts.append(loss(got) / bound)
        sums = [a + b for a, b in zip(sums, (best, loss(got), nearest), strict=True)]
    assert sum(parts) / len(parts) < 1 / 3 * (1 + 3 * 0.9 / 40**0.5)
    assert sums[0] <= sums[1] < sums[2]


def test_blocks_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(0)
    x, w = correlated(g, 500, 150).double(), torch.randn(2, 7, 150, generator=g, dtype=torch.float64)
    h = torch.stack([x.T @ x, x.T @ x])
    scale = torch.full((2, 7), 0.02, dtype=torch.float64)
    blocks = rounding._round(w, h, scale, -127, 127)
    monkeypatch.setattr(rounding, "BLOCK", 1000)
    assert torch.equal(blocks, rounding._round(w, h, scale, -127, 127))
    assert float(blocks.abs().max()) <= 127


def test_rows_are_what_a_convolution_multiplies() -> None:
    conv = nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2, bias=False)
    x = torch.randn(3, 4, 8, 9)
    node: Any = next(n for n in torch.export.export(conv, (x,)).module().graph.nodes if "conv2d" in n.name)
    with torch.no_grad():
        want = conv(x)
        rows = rounding._rows(node, x, conv.weight.shape, 9999)  # [groups, places, K]
        got = rows @ conv.weight.double().reshape(2, 3, -1).transpose(1, 2)
        assert torch.allclose(got.movedim(0, 1).reshape(3, *want.shape[2:], 6).movedim(3, 1).float(), want, atol=1e-5)
        assert rounding._rows(node, x, conv.weight.shape, 20).shape[1] <= 40
        assert rounding._rows(node, x[:0], conv.weight.shape, 20).shape == (2, 0, 12)


@pytest.mark.parametrize("rows", [2, 8, 64])
def test_few_data_do_no_harm(rows: int) -> None:
    """With hardly any data the nearest numbers are best; products of inputs seen by chance must not lead away from them."""
    g = torch.Generator().manual_seed(rows)
    layer = nn.Linear(32, 64).eval()
    with torch.no_grad():
        layer.weight.copy_(torch.randn(64, 32, generator=g))
    data, test = [(correlated(g, rows, 32),)], correlated(g, 512, 32)

    def noise(r: Recipe) -> float:
        q = quantize(layer, data[0], recipe=r, calibrate=data, dynamic_shapes=({0: torch.export.Dim("n", min=1)},))
        assert not r.data_rounding or "weights of 1 layers rounded to data" in q.notes
        return float((q.module(test) - layer(test)).square().sum())

    coarse = replace(PLAIN, activation=Spec("i16"))
    with torch.no_grad():
        assert noise(replace(coarse, data_rounding=True)) < 1.05 * noise(coarse)


def test_layers_that_keep_the_nearest_numbers_are_counted() -> None:
    shared = nn.Linear(8, 8)
    net = nn.Sequential(shared, nn.ReLU(), shared, nn.ReLU(), nn.Linear(8, 4)).eval()
    data = [(torch.randn(64, 8),)]
    q = quantize(net, data[0], recipe=replace(PLAIN, data_rounding=True), calibrate=data)
    (note,) = (n for n in q.notes if "rounded" in n)
    assert (
        note
        == f"weights of 1 layers rounded to data, of 2 to the nearest number: shared, or more than {rounding.WIDEST} inputs"
    )
