"""Whole models that delegates run by themselves and split with the CPU: how each is made, with arguments and dynamic shapes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "e2e"))
import pretrained
import zoo

Made = tuple[torch.nn.Module, tuple[Any, ...], Any]


def _minilm() -> Made:
    ids, mask = pretrained.minilm_tokens(["a pot on three legs", "the third leg carries nothing at all", "no"])
    b, t = torch.export.Dim("b", min=1, max=8), torch.export.Dim("t", min=2, max=128)
    return pretrained.minilm(), (ids, mask), ({0: b, 1: t}, {0: b, 1: t})


MODELS: dict[str, Callable[[], Made]] = {
    "minilm": _minilm,
    "efficientnet_lite0": lambda: (pretrained.efficientnet_lite0(), (torch.randn(1, 3, 64, 64),), None),
    "resnet18": lambda: (zoo.make("resnet18")[0], (torch.randn(1, 3, 64, 64),), None),
    "unet": lambda: (zoo.make("unet")[0], (torch.randn(1, 3, 32, 32),), None),
    "lstm": lambda: zoo.make("lstm"),
}


@cache
def made(name: str) -> tuple[Made, Any]:
    """A model with arguments and dynamic shapes, and what it gives."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model, args, shapes = MODELS[name]()
        return (model, args, shapes), model(*args)


def close(got: Any, want: torch.Tensor) -> None:
    """Within 1e-4, relative to each number, and 2e-5 of the largest."""
    torch.testing.assert_close(torch.as_tensor(got), want, rtol=1e-4, atol=2e-5 * max(1.0, float(want.abs().max())))
