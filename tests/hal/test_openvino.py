"""The delegate "openvino" against eager torch: networks whole on OpenVINO's CPU device, split, of changing sizes, without the library."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

import trivet

sys.path.insert(0, str(Path(__file__).parent))
from hal_nets import Chain, Fork, Unet

WHEEL = "openvino==2026.4.1"


@pytest.fixture(scope="module", autouse=True)
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """OpenVINO's C library: the one that TRV_OPENVINO names, of the installed package, or (in CI) of the wheel in a folder of its own."""
    path = os.environ.get("TRV_OPENVINO", "")
    if not path:
        spec = find_spec("openvino")
        root = Path(spec.origin).parent if spec and spec.origin else tmp_path_factory.mktemp("openvino") / "openvino"
        if not root.exists():
            if not os.environ.get("CI"):
                pytest.skip(f"OpenVINO is missing: pip install {WHEEL}, or set TRV_OPENVINO")
            install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(root.parent), WHEEL]
            subprocess.run(install, check=True)
        path = str(next((root / "libs").glob("libopenvino_c.so*")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRV_OPENVINO", path)
        yield path


class Recurrent(nn.Module):
    """Layers of one kind, both directions."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(8, 16, num_layers=2, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)[0]
        return y


class Moves(nn.Module):
    """Rows, indices and rounding."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, index = x.topk(3, -1)
        wide = nn.functional.pad(x[None], (1, 2), mode="reflect")[0]
        return (values, index, torch.gather(x, 1, index), x[:, 1::2].flip(1), wide.cumsum(1), x.log_softmax(0),
                nn.functional.gelu(x) + x.var(1, keepdim=True), torch.where(x > 0, x.round(), x.trunc() * x.sigmoid()))  # fmt: skip


def run(model: nn.Module, x: torch.Tensor, path: Path, device: str = "openvino", **options: object) -> list[str]:
    """Compares with eager torch; which devices the steps got."""
    path = path / "net.trv"
    trivet.export(model.eval(), (x,), target="openvino > cpu", **options).save(path)  # type: ignore[arg-type]
    with torch.no_grad(), trivet.load(path, devices=[device, "cpu"]) as net:
        got, want = net(x), model(x)
        for g, w in zip(
            got if isinstance(got, (tuple, list)) else [got], want if isinstance(want, tuple) else [want], strict=True
        ):
            torch.testing.assert_close(torch.as_tensor(g), w, rtol=1e-5, atol=2e-6)
        return [p.device for p in net.placement()]


NETS = {
    "chain": (Chain, (4, 16)),
    "fork": (Fork, (3, 24)),
    "unet": (Unet, (1, 3, 16, 16)),
    "attention": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (2, 6, 16)),
    "moves": (Moves, (5, 9)),
    "lstm": (lambda: Recurrent(nn.LSTM), (5, 2, 8)),
    "gru": (lambda: Recurrent(nn.GRU), (5, 2, 8)),
    "rnn": (lambda: Recurrent(nn.RNN), (5, 2, 8)),
}


@pytest.mark.parametrize("fallback", [True, False])
@pytest.mark.parametrize("name", NETS)
def test_whole(name: str, fallback: bool, tmp_path: Path) -> None:
    torch.manual_seed(1)
    make, shape = NETS[name]
    devices = run(make(), torch.randn(shape), tmp_path, place={"": "openvino"}, fallback=fallback)
    assert "openvino" in devices


@pytest.mark.parametrize("there", [["a"], ["b"], ["a", "c"]])
def test_split(there: list[str], tmp_path: Path) -> None:
    place = {m: "openvino" if m in there else "cpu" for m in "abc"}
    devices = run(Chain(), torch.randn(4, 16), tmp_path, place=place)
    assert devices.count("openvino") == len(there) and "cpu" in devices


def test_sizes_change(tmp_path: Path) -> None:
    model = Chain().eval()
    shapes = {"x": {0: torch.export.Dim("n", min=1, max=64)}}
    program = trivet.export(
        model, (torch.randn(4, 16),), target="openvino > cpu", place={"": "openvino"}, dynamic_shapes=shapes
    )
    program.save(tmp_path / "net.trv")
    with torch.no_grad(), trivet.load(tmp_path / "net.trv", devices=["openvino", "cpu"]) as net:
        for n in (4, 1, 33, 4):
            x = torch.randn(n, 16)
            torch.testing.assert_close(torch.as_tensor(net(x)), model(x), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(("device", "path"), [("openvino", "/nowhere.so"), ("openvino:NPU", None)])
def test_missing(device: str, path: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if path:
        monkeypatch.setenv("TRV_OPENVINO", path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert set(run(Chain(), torch.randn(4, 16), tmp_path, device, place={"": "openvino"})) == {"cpu"}
