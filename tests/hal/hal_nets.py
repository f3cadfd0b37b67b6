"""Small networks for tests of delegates, and files of them split over two devices."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import trivet


class Chain(nn.Module):
    """Three stages that can be pinned one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.b(torch.relu(self.a(x)))))


class Fork(nn.Module):
    """Two branches that do not need each other."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        self.right = nn.Sequential(nn.Linear(width, width), nn.Sigmoid(), nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = self.left(x), self.right(x)
        return a * b, a - b


class Unet(nn.Module):
    """A U-Net of one level, with a skip connection over the border."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.mid = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.out = nn.Conv2d(16, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = torch.relu(self.down(x))
        y = self.up(torch.relu(self.mid(self.pool(skip))))
        return self.out(torch.cat([skip, y], 1))


class Memory(nn.Module):
    """Adds what comes to a buffer that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.arange(6, dtype=torch.float32).reshape(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x)
        return self.total * 2


def split(
    module: nn.Module, args: tuple[torch.Tensor, ...], path: Path, place: dict[str, str] | None, **options: object
) -> Path:
    """Exports for npu_sim and the CPU, with pins, and saves."""
    target = options.pop("target", "npu_sim > cpu")
    trivet.export(module.eval(), args, target=target, place=place or {}, **options).save(path)
    return path
