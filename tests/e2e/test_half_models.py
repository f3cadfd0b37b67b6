"""Pretrained models stored in f16 and bf16: errors against eager float32, decisions, sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pretrained as P
import pytest
import torch
from test_pretrained import error, frames
from torch.export import Dim

import trivet

HALVES = ("f16", "bf16")


def halves(tmp_path: Path, model: Any, args: Any, half: str, **more: Any) -> Any:
    """The net, after a look at its size: 2 bytes per weight, and the plan's tables."""
    path = tmp_path / "net.trv"
    trivet.export(model, args, quantize=half, **more).save(path)
    floats = 4 * sum(t.numel() for t in model.state_dict().values() if t.is_floating_point())
    assert path.stat().st_size < 0.52 * floats
    return trivet.load(path)


@pytest.mark.parametrize("half", HALVES)
def test_minilm(half: str, tmp_path: Path) -> None:
    model = P.minilm()
    ids, mask = P.minilm_tokens(["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."])
    b, t = Dim("b", min=1, max=16), Dim("t", min=2, max=512)
    net = halves(tmp_path, model, (ids, mask), half, dynamic_shapes=({0: b, 1: t}, {0: b, 1: t}))
    v, want = net(ids, mask), model(ids, mask)
    assert error(v, want) < {"f16": 2e-3, "bf16": 1.5e-2}[half]
    cosines = [float(v[i] @ v[j]) for i, j in ((0, 1), (0, 2), (1, 2))]
    assert cosines == pytest.approx([0.6660, 0.1046, 0.1411], abs={"f16": 1e-3, "bf16": 6e-3}[half])


@pytest.mark.parametrize("half", HALVES)
def test_efficientnet_lite0(half: str, tmp_path: Path) -> None:
    model = P.efficientnet_lite0()
    x = P.imagenet_input(P.picture("coffee.png"))
    net = halves(tmp_path, model, (x,), half)
    for name, label in (("chelsea.png", 285), ("coffee.png", 967), ("rocket.jpg", 657)):
        x = P.imagenet_input(P.picture(name))
        got = net(x)
        assert error(got, model(x)) < {"f16": 4e-3, "bf16": 3e-2}[half] and int(got.argmax()) == label


@pytest.mark.parametrize("half", HALVES)
def test_crepe_tiny(half: str, tmp_path: Path) -> None:
    model = P.crepe_tiny()
    x = torch.cat([P.tone(110.0 * (k + 1)) for k in range(3)])
    net = halves(tmp_path, model, (x,), half)
    got, want = net(x), model(x)
    assert error(got, want) < {"f16": 1e-3, "bf16": 8e-3}[half]
    assert got.argmax(1).tolist() == want.argmax(1).tolist()


@pytest.mark.parametrize("half", HALVES)
def test_silero_vad(half: str, tmp_path: Path) -> None:
    """The LSTM state is stored in 16 bits between frames."""
    model, _ = P.silero_vad()
    sound = frames(P.speech())
    net = halves(tmp_path, model, (sound[0],), half)
    want = torch.cat([model(f) for f in sound])
    got = torch.cat([net(f) for f in sound])
    assert float((got - want).abs().max()) < {"f16": 2e-2, "bf16": 8e-2}[half]
    assert float((got - want).abs().mean()) < {"f16": 2e-3, "bf16": 1.5e-2}[half]
