"""Model definitions with seeded weights through file and C runtime, against eager torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import zoo
from torch.utils import _pytree as pytree

import trivet

torch.set_grad_enabled(False)


@pytest.mark.parametrize("name", list(zoo.ZOO))
def test_model(name: str, tmp_path: Path) -> None:
    model, args, dynamic = zoo.make(name)
    path = tmp_path / "net.trv"
    trivet.export(model, args, dynamic_shapes=dynamic).save(path)
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
