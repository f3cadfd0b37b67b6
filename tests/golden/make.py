"""Writes a golden program with inputs and results for every model below that has none yet. Existing ones are never remade:
a runtime of this major version reads them for ever.

    python tests/golden/make.py
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.export import Dim

import trivet

HERE = Path(__file__).resolve().parent


class Cache(nn.Module):
    """State, a branch, integers, a data-dependent size."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4, 3))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.seen.index_copy_(0, at, x)
        y = torch.cond(self.seen.sum() > 0, lambda t: t * 2, lambda t: t - 1, (self.seen,))
        return y, (y > 0).nonzero()


class Sequence(nn.Module):
    """LSTM and attention over a dynamic length."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 8, batch_first=True, bidirectional=True)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True, activation="gelu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(self.rnn(x)[0]).softmax(-1)


def cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.Hardswish(),
                         nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.MaxPool2d(2), nn.Upsample(scale_factor=2, mode="bilinear"),
                         nn.ConvTranspose2d(8, 4, 2, 2), nn.Flatten(), nn.Linear(1024, 5))  # fmt: skip


MODELS: dict[str, Callable[[], tuple[nn.Module, list[tuple[torch.Tensor, ...]], object]]] = {
    "cnn": lambda: (cnn(), [(torch.randn(1, 3, 16, 16),) for _ in range(2)], None),
    "sequence": lambda: (Sequence(), [(torch.randn(1, t, 6),) for t in (5, 1, 20)], ({1: Dim("t", min=1, max=32)},)),
    "cache": lambda: (Cache(), [(torch.randn(1, 3), torch.tensor([i % 4])) for i in range(5)], None),
}


@torch.no_grad()
def main() -> None:
    for name, make in MODELS.items():
        if (HERE / f"{name}.trv").exists():
            continue
        torch.manual_seed(0)
        model, calls, dynamic = make()
        model.eval()
        trivet.export(model, calls[0], dynamic_shapes=dynamic).save(HERE / f"{name}.trv")
        data = {}
        for i, call in enumerate(calls):
            out = model(*call)
            data |= {f"in{i}_{k}": v.numpy() for k, v in enumerate(call)}
            data |= {f"out{i}_{k}": v.numpy() for k, v in enumerate(out if isinstance(out, tuple) else (out,))}
        np.savez_compressed(HERE / f"{name}.npz", **data)


if __name__ == "__main__":
    main()
