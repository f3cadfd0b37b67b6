"""The programs that every platform runs: integers that must agree bit for bit, real numbers that must agree within 1e-5."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

import trivet


class Convolutions(nn.Module):
    """Convolutions of every kind, residual sums, pools, tables, resizing; a classifier behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU6())
        self.wide = nn.Sequential(
            nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Hardswish(), nn.Conv2d(16, 32, 1), nn.ReLU()
        )
        self.full = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.SiLU())
        self.groups = nn.Conv2d(32, 32, 3, padding=1, groups=4)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = nn.functional.max_pool2d(self.wide(self.stem(x)), 2)
        y = x + self.groups(self.full(x))
        z = nn.functional.interpolate(nn.functional.avg_pool2d(y, 2), scale_factor=2.0, mode="bilinear")
        return self.head((y * z.sigmoid()).mean((2, 3))), z


class Tokens(nn.Module):
    """Attention, norms, feed-forward layers, an LSTM; sorting and sums of other types."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, activation="gelu", batch_first=True, dropout=0.0)
        self.rnn = nn.LSTM(32, 16, batch_first=True)
        self.head = nn.Linear(16, 12)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = self.head(torch.tanh(self.rnn(self.layer(self.embed(ids)))[0]))
        top, at = out.sort(-1)
        return out.softmax(-1), top, at, out.double().cumsum(1), out.abs().sqrt().exp().log1p(), out.half()


class Steps(nn.Module):
    """What is computed in integers from end to end: products of tokens, softmax, norm, gelu, an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.q, self.k, self.v = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.norm, self.mid = nn.LayerNorm(32), nn.Linear(32, 64)
        self.rnn = nn.LSTM(64, 16, batch_first=True)
        self.head = nn.Linear(16, 12)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        weights = torch.softmax(torch.relu(self.q(x)) @ self.k(x).transpose(1, 2), -1)
        y = nn.functional.gelu(self.mid(self.norm(x + weights @ self.v(x))))
        return self.head(torch.tanh(self.rnn(y)[0]))


def make(folder: Path) -> dict[str, bool]:
    """Exports into folder: NAME.trv, NAME.in0.npy, and NAME.want0.npy ... of eager PyTorch (real numbers) or nothing (integers).

    Returns, by name, whether its results are the same bits everywhere.
    """
    torch.manual_seed(0)
    convs, tokens, steps = Convolutions().eval(), Tokens().eval(), Steps().eval()
    x, ids = torch.randn(1, 3, 224, 224), torch.randint(0, 50, (2, 11))
    pictures = [(torch.randn(1, 3, 224, 224),) for _ in range(2)]
    texts = [(torch.randint(0, 50, (2, 11)),) for _ in range(4)]
    jobs = {
        "convs": (convs, x, {}),
        "tokens": (tokens, ids, {}),
        "convs_w8a8": (convs, x, {"quantize": "w8a8", "calibrate": pictures}),
        "steps_w8a8": (steps, ids, {"quantize": "w8a8", "calibrate": texts}),
        "rows_w8a8_dynamic": (
            nn.Sequential(nn.Linear(3, 48), nn.ReLU(), nn.Linear(48, 16)).eval(),
            x[0, :, :8].reshape(-1, 3),
            {"quantize": "w8a8-dynamic"},
        ),
        "tokens_w4": (tokens, ids, {"quantize": "w4g32"}),
    }
    for name, (net, inputs, options) in jobs.items():
        trivet.export(net, (inputs,), **options).save(folder / f"{name}.trv")
        np.save(folder / f"{name}.in0.npy", inputs.numpy())
        if not options:
            with torch.no_grad():
                for i, y in enumerate(net(inputs)):
                    np.save(folder / f"{name}.want{i}.npy", y.numpy())
    return {name: "w8a8" in name for name in jobs}
