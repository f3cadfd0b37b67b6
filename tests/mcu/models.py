"""Models of MLPerf-Tiny shape, int8 with integer inputs and outputs, for cpu.cortex_m."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

import trivet
from trivet.quantize.recipe import recipe


def _unit(i: int, o: int, k: Any, s: int = 1, p: Any = 0, g: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(i, o, k, s, p, groups=g, bias=False), nn.BatchNorm2d(o), nn.ReLU()]


class Pooled(nn.Module):
    """Convolutions, mean, linear, softmax."""

    def __init__(self, layers: list[nn.Module], c: int, classes: int) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(*layers), nn.Linear(c, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3))).softmax(-1)


class Residual(nn.Module):
    def __init__(self, i: int, o: int, s: int) -> None:
        super().__init__()
        self.a = nn.Sequential(*_unit(i, o, 3, s, 1), nn.Conv2d(o, o, 3, 1, 1, bias=False), nn.BatchNorm2d(o))
        self.b = nn.Conv2d(i, o, 1, s) if s != 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.a(x) + self.b(x))


def _dscnn() -> tuple[nn.Module, tuple[int, ...]]:
    layers = _unit(1, 64, (10, 4), 2, (5, 1))
    for _ in range(4):
        layers += _unit(64, 64, 3, 1, 1, 64) + _unit(64, 64, 1)
    return Pooled(layers, 64, 12), (1, 1, 49, 10)


def _resnet8() -> tuple[nn.Module, tuple[int, ...]]:
    return Pooled([*_unit(3, 16, 3, 1, 1), Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 64, 2)], 64, 10), (
        1,
        3,
        32,
        32,
    )


def _mobilenet() -> tuple[nn.Module, tuple[int, ...]]:
    layers, c = _unit(3, 8, 3, 2, 1), 8
    for o, s in [(16, 1), (32, 2), (32, 1), (64, 2), (64, 1), (128, 2), *[(128, 1)] * 5, (256, 2), (256, 1)]:
        layers += _unit(c, c, 3, s, 1, c) + _unit(c, o, 1)
        c = o
    return Pooled(layers, c, 2), (1, 3, 96, 96)


def _autoencoder() -> tuple[nn.Module, tuple[int, ...]]:
    sizes = [640, 128, 128, 128, 128, 8, 128, 128, 128, 128]
    layers: list[nn.Module] = []
    for a, b in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(128, 640)), (1, 640)


MODELS = {"dscnn": _dscnn, "resnet8": _resnet8, "mobilenet": _mobilenet, "autoencoder": _autoencoder}


def program(name: str, golden: int = 0) -> Any:
    """The program of a model with seeded weights, whose batch norms know their inputs."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, shape = MODELS[name]()
        for m in model.modules():
            if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d)):
                m.momentum = None  # type: ignore[assignment]
        with torch.no_grad():
            for _ in range(2):
                model.train()(torch.randn(4, *shape[1:]))
        batches = [(torch.randn(shape),) for _ in range(2)]
        rules = replace(recipe("w8a8"), quantize_io=True, data_rounding=False, bias_correction=False)
        return trivet.export(model.eval(), batches[0], quantize=rules, calibrate=batches, target="cpu.cortex_m", name=name,
                             golden=golden, debug=False)  # fmt: skip
