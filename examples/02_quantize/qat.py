"""Quantisation-aware training: a small net for handwritten digits, trained in float, then trained on with rounding in place.

python examples/02_quantize/qat.py             (needs the files of scikit-learn, whose digits it learns)
"""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path

import numpy as np
import torch
from torch import nn

import trivet


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """scikit-learn's digits: float32 [1797, 1, 8, 8] in 0..1, and their numbers, int64 [1797]."""
    spec = importlib.util.find_spec("sklearn")
    assert spec is not None and spec.submodule_search_locations, "package scikit-learn is not installed"
    path = Path(next(iter(spec.submodule_search_locations))) / "datasets" / "data" / "digits.csv.gz"
    with gzip.open(path) as f:
        rows = torch.from_numpy(np.loadtxt(f, delimiter=",", dtype=np.float32))
    return rows[:, :64].reshape(-1, 1, 8, 8) / 16, rows[:, 64].long()


def separable(wide: int, out: int, stride: int) -> nn.Sequential:
    """A depthwise convolution and one across channels."""
    return nn.Sequential(
        nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(),
        nn.Conv2d(wide, out, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU6(),
    )  # fmt: skip


def make_net() -> nn.Sequential:
    """[N, 1, 8, 8] -> [N, 10], 10 layers, 9 thousand weights."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6(),
        separable(16, 32, 1), separable(32, 32, 2), separable(32, 64, 1), separable(64, 64, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def train(net: nn.Module, x: torch.Tensor, y: torch.Tensor, epochs: int, rate: float) -> None:
    """An ordinary loop: batches of 64, Adam, the rate falling to nothing."""
    optimiser = torch.optim.Adam(net.parameters(), rate)
    order = torch.Generator().manual_seed(0)
    steps = epochs * -(-len(x) // 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps)
    for _ in range(epochs):
        for i in torch.randperm(len(x), generator=order).split(64):
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(x[i]), y[i]).backward()
            optimiser.step()
            schedule.step()


def accuracy(net: object, x: torch.Tensor, y: torch.Tensor) -> float:
    """Share of right answers."""
    assert callable(net)
    return float((net(x).argmax(1) == y).float().mean())


def main() -> None:
    torch.manual_seed(0)
    x, y = digits()
    test = torch.arange(len(x)) % 4 == 0  # every fourth digit is for the test
    net = make_net()
    train(net, x[~test], y[~test], epochs=16, rate=1e-2)
    with torch.no_grad():
        floating = accuracy(net.eval(), x[test], y[test])

    batch = {0: torch.export.Dim("n", min=1, max=512)}
    ready = trivet.quantize.prepare_qat(net, (x[:64],), "w8a8", dynamic_shapes=(batch,))
    train(ready, x[~test], y[~test], epochs=2, rate=1e-3)
    program = trivet.export(ready, (x[:64],), dynamic_shapes=(batch,))
    quantised = accuracy(trivet.load(program), x[test], y[test])

    print(program.quantization)
    print(f"accuracy: {floating:.2%} in float, {quantised:.2%} in 8 bits, {len(bytes(program))} bytes")
    assert floating > 0.97 and floating - quantised <= 0.005


if __name__ == "__main__":
    main()
