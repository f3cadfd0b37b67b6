"""Model definitions with seeded weights through file and C runtime, against eager torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import zoo
from torch.utils import _pytree as pytree

import trivet

# Bytes that ExecuTorch 1.5.1 plans for the same shapes (float32, portable operators, greedy).
GREEDY = {
    "resnet18": 6_422_528,
    "mobilenet_v2": 9_936_896,
    "vit_tiny": 2_141_488,
    "dscnn": 64_000,
    "autoencoder": 330_752,
}


@pytest.mark.parametrize("name", list(zoo.ZOO))
def test_model(name: str, tmp_path: Path) -> None:
    model, args, dynamic = zoo.make(name)
    path = tmp_path / "net.trv"
    program = trivet.export(model, args, dynamic_shapes=dynamic)
    plan = program.summary()["entries"][0]
    assert plan["memory"]["arena"] <= 1.02 * plan["lower_bound"]
    assert plan["memory"]["arena"] <= GREEDY.get(name, 1 << 62)
    program.save(path)
    net = trivet.load(path)
    calls = [args]
    if name in ("lstm", "gru"):
        calls += [(torch.randn(2, 1, 40),), (torch.randn(2, 333, 40),)]
    if name == "bert":
        calls += [(torch.randint(0, 1000, (5, 128)), torch.ones(5, 128, dtype=torch.int64))]
    for call in calls:
        for got, want in zip(pytree.tree_leaves(net(*call)), pytree.tree_leaves(model(*call)), strict=True):
            assert got.dtype == want.dtype and got.shape == want.shape
            assert float((got - want).abs().max() / want.abs().max()) < 1e-4
