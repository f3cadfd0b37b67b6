"""`trivet build`, and benchmarks on other machines: a real sshd on the loopback interface, a scripted adb, qemu's emulation."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import trivet
from trivet import build as builder
from trivet import native
from trivet.build import build, doctor
from trivet.cli import main
from trivet.devices import bench_on, open_device, run_on
from trivet.error import Error


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small net (conv, depthwise, pool, norm, attention, LSTM), an input and eager PyTorch's results."""
    folder = tmp_path_factory.mktemp("net")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU6(),
                                   nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Hardswish(), nn.MaxPool2d(2))  # fmt: skip
            self.t = nn.TransformerEncoderLayer(16, 2, 32, activation="gelu", batch_first=True)
            self.r = nn.LSTM(16, 8, batch_first=True)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = self.t(self.c(x).flatten(2).transpose(1, 2))
            return self.r(y)[0][:, -1].softmax(-1), y.argmax(-1), y.double().sum(1)

    torch.manual_seed(0)
    net, x = Net().eval(), torch.randn(2, 3, 12, 12)
    trivet.export(net, (x,)).save(folder / "net.trv")
    np.save(folder / "x.npy", x.numpy())
    with torch.no_grad():
        for i, y in enumerate(net(x)):
            np.save(folder / f"want{i}.npy", y.numpy())
    return folder


@pytest.fixture(scope="module")
def host_run() -> Path:
    """trv_run of this machine, as the package's own build has it."""
    beside = native.library().path.parent
    for path in (beside / "trv_run", beside.parent / "bin" / "trv_run"):
        if path.is_file():
            return path
    return build("x86_64-linux", Path(os.environ.get("TMPDIR", "/tmp")) / "trivet-host-run").trv_run


def same(got: list[np.ndarray], folder: Path) -> None:
    """Outputs are eager PyTorch's."""
    want = [np.load(p) for p in sorted(folder.glob("want*.npy"))]
    assert len(got) == len(want) == 3
    for g, w in zip(got, want):
        assert g.dtype == w.dtype and g.shape == w.shape
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)


def test_a_broken_source_is_the_compilers_error(tmp_path: Path) -> None:
    with pytest.raises(Error, match="nothing.h: No such file"):
        build("x86_64-linux", tmp_path, compiler="gnu", options=["-DCMAKE_C_FLAGS=-include nothing.h"])


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(Error, match="unknown target 'toaster'"):
        build("toaster")
    with pytest.raises(Error, match="NDK"):
        build("android-arm64", ndk=tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(builder, "zig", lambda: "")
    for target, remedy in [("aarch64-linux-gnu", "gcc-aarch64-linux-gnu"), ("aarch64-linux-musl", r"trivet\[cross\]")]:
        with pytest.raises(Error, match=remedy):
            build(target)
    missing = {f.what: f.remedy for f in doctor() if not f.ok}
    assert missing["run programs for aarch64-linux-gnu here"] == "apt-get install qemu-user-static"
    assert all(missing.values())


# ---- ssh ------------------------------------------------------------------------------------------------------------------
def test_ssh(sshd: str, program: Path, host_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "bench",
        str(program / "net.trv"),
        "--device",
        sshd,
        "--trv-run",
        str(host_run),
        "--runs",
        "5",
        "--data",
        str(program / "x.npy"),
    ]
    assert main([*words, "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert row["device"] == sshd and row["platform"] == "x86_64-linux" and row["runs"] == 5
    assert 0 < row["min_ms"] <= row["p50_ms"] <= row["p90_ms"] <= row["max_ms"] and row["peak_bytes"] > 0
    assert main([*words, "--device", "local"]) == 0
    table = capsys.readouterr().out
    assert "127.0.0.1" in table and "local" in table
    with open_device(sshd) as device:
        same(run_on(device, program / "net.trv", trv_run=host_run, inputs=[program / "x.npy"]), program)
    with open_device(sshd) as device:  # a program that is no program: trv_run's own words come back
        with pytest.raises(Error, match="not a trivet program|no trivet|magic|identifier"):
            bench_on(device, program / "x.npy", trv_run=host_run)
    assert not list(Path("/tmp").glob(Path(device.folder).name))


def test_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIVET_SSH", "ssh -F none -o ConnectTimeout=2")
    with pytest.raises(Error, match="127.0.0.1"):
        open_device("ssh://nobody@127.0.0.1:1")
    for text in ("ssh://", "ssh://a b", "ssh://host:port", "qemu:z80", "usb:0", ""):
        with pytest.raises(Error, match="device"):
            open_device(text)


# ---- adb ------------------------------------------------------------------------------------------------------------------
ADB = """#!/bin/sh
# adb's command line: -s SERIAL, push FROM TO, shell COMMAND; the phone is a folder, named in FAKE_PHONE.
echo "$@" >> "$FAKE_PHONE/log"
if [ "$1" = -s ]; then
  [ "$2" = R58M ] || { echo "error: device '$2' not found" >&2; exit 1; }
  shift 2
fi
case $1 in
  push) cp "$2" "$FAKE_PHONE/$(echo "$3" | sed s,/data/local/tmp/,,)" && echo "1 file pushed" ;;
  pull) cp "$FAKE_PHONE/$(echo "$2" | sed s,/data/local/tmp/,,)" "$3" && echo "1 file pulled" ;;
  shell) sh -c "$(echo "$2" | sed "s,/data/local/tmp,$FAKE_PHONE,g")" ;;
  *) echo "unknown command $1" >&2; exit 1 ;;
esac
"""


def test_adb(program: Path, host_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adb, phone = tmp_path / "adb", tmp_path / "phone"
    phone.mkdir()
    adb.write_text(ADB)
    adb.chmod(adb.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("TRIVET_ADB", str(adb))
    monkeypatch.setenv("FAKE_PHONE", str(phone))
    with open_device("adb:R58M") as device:
        m = bench_on(device, program / "net.trv", trv_run=host_run, runs=4, threads=1)
        same(run_on(device, program / "net.trv", trv_run=host_run, inputs=[program / "x.npy"]), program)
    assert m.platform == "aarch64-linux-musl" and m.runs == 4 and m.p50_ms > 0
    log = (phone / "log").read_text()
    assert "-s R58M push" in log and "--threads 1" in log and "rm -rf" in log
    assert [p.name for p in phone.iterdir()] == ["log"]  # the phone is as it was
    with pytest.raises(Error, match="device 'OTHER' not found"):
        bench_on(open_device("adb:OTHER"), program / "net.trv", trv_run=host_run)
