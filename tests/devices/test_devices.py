"""`trivet build`, and benchmarks on other machines: a real sshd on the loopback interface, a scripted adb, qemu's emulation."""

from __future__ import annotations

import getpass
import json
import os
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import trivet
from trivet import build as builder
from trivet import native
from trivet.build import PLATFORMS, build, doctor
from trivet.cli import main
from trivet.devices import bench_on, open_device
from trivet.error import Error

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "c"))

from ctools import sh, tool


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


@pytest.mark.parametrize("target", ["aarch64-linux-gnu", "armv7-linux-gnueabihf"])
def test_build_and_run_elsewhere(target: str, program: Path, tmp_path: Path) -> None:
    """The runtime and all kernels, built by `trivet build`, give eager PyTorch's results under emulation; bench --device
    brings figures back."""
    platform = PLATFORMS[target]
    tool(f"{platform.gnu}-gcc"), tool(platform.emulator[0])
    built = build(target, tmp_path / "out", compiler="gnu")
    assert (built.folder / "include/trivet/trivet.h").is_file() and (built.folder / "lib/libtrivet.a").is_file()
    sh(*built.emulator, built.trv_run, "run", program / "net.trv", program / "x.npy", "-o", tmp_path)
    got = [np.load(p) for p in sorted(tmp_path.glob("output*.npy"))]
    want = [np.load(p) for p in sorted(program.glob("want*.npy"))]
    assert len(got) == len(want) == 3
    for g, w in zip(got, want):
        assert g.dtype == w.dtype and g.shape == w.shape
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)
    with open_device("qemu:" + target.split("-")[0]) as device:
        m = bench_on(device, program / "net.trv", trv_run=built.trv_run, runs=3, warmup=0, inputs=[program / "x.npy"])
        folder = Path(device.folder)
        assert folder.is_dir()
    assert m.runs == 3 and 0 < m.min_ms <= m.p50_ms <= m.p99_ms <= m.max_ms and m.platform == target
    assert m.peak_bytes > 100_000 and not folder.exists()


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
    assert "apt-get install qemu-user-static" in missing["run arm, aarch64, riscv64 programs here"]
    assert all(missing.values())


# ---- ssh ------------------------------------------------------------------------------------------------------------------
@pytest.fixture
def sshd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A real sshd on a free port of the loopback interface, with keys of its own; the device's text."""
    daemon = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    tool("ssh"), daemon or tool("sshd")
    for name in ("host", "user"):
        sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    (tmp_path / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {tmp_path}/host\nAuthorizedKeysFile {tmp_path}/user.pub\nStrictModes no\n"
        f"PasswordAuthentication no\nUsePAM no\nPidFile {tmp_path}/pid\nPermitRootLogin prohibit-password\n"
    )
    os.makedirs("/run/sshd", exist_ok=True)
    process = subprocess.Popen([str(daemon), "-D", "-e", "-f", str(tmp_path / "config")], stderr=subprocess.PIPE)
    monkeypatch.setenv("TRIVET_SSH", shlex.join(["ssh", "-F", "none", "-i", str(tmp_path / "user"), "-o", "StrictHostKeyChecking=no",
                                                 "-o", f"UserKnownHostsFile={tmp_path}/known", "-o", "LogLevel=ERROR"]))  # fmt: skip
    for _ in range(100):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        except OSError:
            assert process.poll() is None, process.stderr.read()  # type: ignore[union-attr]
            time.sleep(0.1)
    yield f"ssh://{getpass.getuser()}@127.0.0.1:{port}"
    process.terminate()
    process.wait()


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
    assert m.platform == "aarch64-linux-musl" and m.runs == 4 and m.p50_ms > 0
    log = (phone / "log").read_text()
    assert "-s R58M push" in log and "--threads 1" in log and "rm -rf" in log
    assert [p.name for p in phone.iterdir()] == ["log"]  # the phone is as it was
    with pytest.raises(Error, match="device 'OTHER' not found"):
        bench_on(open_device("adb:OTHER"), program / "net.trv", trv_run=host_run)
