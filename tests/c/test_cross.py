"""The runtime and all kernels built for other processors; a program run there under emulation gives the host's results."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from ctools import CORE, CPU, HOST, INCLUDES, ROOT, sh, tool

CLI = sorted((ROOT / "runtime_c/cli").glob("*.c"))


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small net (conv, depthwise, pool, norm, attention, LSTM), an input and the host's result."""
    folder = tmp_path_factory.mktemp("cross")
    code = f"""
import numpy as np, torch, trivet
from torch import nn
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU6(),
                               nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Hardswish(), nn.MaxPool2d(2))
        self.t = nn.TransformerEncoderLayer(16, 2, 32, activation="gelu", batch_first=True)
        self.r = nn.LSTM(16, 8, batch_first=True)
    def forward(self, x):
        y = self.t(self.c(x).flatten(2).transpose(1, 2))
        return self.r(y)[0][:, -1].softmax(-1), y.argmax(-1), y.double().sum(1)
net, x = Net().eval(), torch.randn(2, 3, 12, 12)
trivet.export(net, (x,)).save({str(folder / "net.trv")!r})
np.save({str(folder / "x.npy")!r}, x.numpy())
with torch.no_grad():
    for i, y in enumerate(net(x)):
        np.save({str(folder)!r} + f"/want{{i}}.npy", y.numpy())
"""
    sh(sys.executable, "-c", code)
    return folder


@pytest.mark.parametrize(("compiler", "emulator"), [
    ("aarch64-linux-gnu-gcc", "qemu-aarch64-static"),
    ("arm-linux-gnueabihf-gcc", "qemu-arm-static"),
])  # fmt: skip
def test_runs_elsewhere(compiler: str, emulator: str, digits: Path, tmp_path: Path) -> None:
    exe = tmp_path / "trv_run"
    sh(tool(compiler), "-std=gnu11", "-O2", "-ffp-contract=off", "-static", *INCLUDES, *CORE, *HOST, *CPU, *CLI, "-pthread", "-lm",
       "-o", exe)  # fmt: skip
    sh(tool(emulator), exe, "run", digits / "net.trv", digits / "x.npy", "-o", tmp_path)
    got = [np.load(p) for p in sorted(tmp_path.glob("*.npy"))]
    want = [np.load(p) for p in sorted(digits.glob("want*.npy"))]
    assert len(got) == len(want) == 3
    for g, w in zip(got, want):
        assert g.dtype == w.dtype and g.shape == w.shape
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cpu", ["cortex-m0", "cortex-m4", "cortex-m55"])
def test_compiles_for_bare_metal(cpu: str, tmp_path: Path) -> None:
    """Core and kernels compile without a warning and need no more than a freestanding C library with libm."""
    for source in [*CORE, *CPU]:
        sh(tool("arm-none-eabi-gcc"), f"-mcpu={cpu}", "-mthumb", "-std=c11", "-Os", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion",
           "-Wshadow", "-Wstrict-prototypes", "-Wvla", "-Werror", "-DTRV_NO_HOST", *INCLUDES, "-c", source, "-o",
           tmp_path / f"{source.stem}.o")  # fmt: skip
    symbols = sh("arm-none-eabi-nm", "-u", *tmp_path.glob("*.o"))
    assert not {"malloc", "calloc", "realloc", "free", "abort", "printf", "fopen"} & set(symbols.split())
