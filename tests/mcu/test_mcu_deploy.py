"""Projects of deploy: what is in them, sizes, budgets, CMake, the serial line, floats."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import program

import trivet
from trivet.cli import main
from trivet.deploy import deploy, stripped
from trivet.deploy_project import emulator
from trivet.error import Error
from trivet.firmware import emulated, make, open_port
from trivet.program import Program


@pytest.fixture(scope="module")
def small() -> Any:
    return program("autoencoder", golden=1)


@pytest.fixture(scope="module")
def project(small: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("project")
    d = deploy(small, "cortex-m4", folder)
    make(folder)
    return d


def test_only_what_is_used(project: Any) -> None:
    rows = (project.folder / "trivet/cpu/kernels.def").read_text()
    assert re.findall(r"^OP\((\w+)", rows, re.M) == ["qmatmul"]
    assert re.findall(r"^K\(.*, (\w+)\)", rows, re.M) == ["trvk_qmatmul_rows__dsp"]
    names = {p.name for p in (project.folder / "trivet/cpu").iterdir()}
    assert not names & {"map.c", "attention.c", "rnn.c", "sort.c", "gemm_avx2.c"}
    symbols = subprocess.run(
        ["arm-none-eabi-nm", project.folder / "build/model.elf"], capture_output=True, text=True
    ).stdout
    assert not re.search(r" (malloc|free|__aeabi_dadd|__aeabi_fadd)$", symbols, re.M)


def test_sizes_are_exact(project: Any, small: Any) -> None:
    """The firmware asks the runtime for the session's bytes when it starts, which must be what is reserved: one less is an error."""
    header = project.folder / "model.c"
    text = header.read_text()
    size = int(re.search(r"session_0\[(\d+)\]", text)[1])  # type: ignore[index]
    other = project.folder.parent / "less"
    shutil.copytree(project.folder, other, ignore=shutil.ignore_patterns("build"))
    shutil.copytree(project.folder / "build", other / "build")
    (other / "model.c").write_text(text.replace(f"session_0[{size}]", f"session_0[{size - 4}]"))
    subprocess.run(["make", "-C", other], check=True, capture_output=True)
    said = subprocess.run(f"printf 'about\\nquit\\n' | {emulator(project.machine, str(other / 'build/model.elf'))}", shell=True, capture_output=True,
                          text=True, timeout=60).stdout  # fmt: skip
    words = said.split("*")[0].split()
    assert words[:2] == ["error", "4"]
    assert (int(words[6], 16), int(words[7], 16)) == (size, size - 4)


def test_budgets(small: Any, tmp_path: Path) -> None:
    with pytest.raises(Error, match="of flash needed.*the largest: .*KiB") as e:
        deploy(small, "cortex-m4", tmp_path / "a", flash=128 << 10)
    assert "--weights-at" in str(e.value.remedy)
    with pytest.raises(Error, match="of RAM needed.*at the worst moment"):
        deploy(small, "cortex-m4", tmp_path / "b", ram=4 << 10)
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()
    deploy(small, "cortex-m4", tmp_path / "c", flash=128 << 10, weights_at=0x60000000)
    assert (tmp_path / "c/program.bin").stat().st_size == small.view.size
    with pytest.raises(Error, match="unknown target"):
        deploy(small, "cortex-m99", tmp_path / "d")


def test_cmake_builds_it_too(project: Any, tmp_path: Path) -> None:
    subprocess.run(["cmake", "-S", project.folder, "-B", tmp_path], check=True, capture_output=True)
    subprocess.run(["cmake", "--build", tmp_path, "-j2"], check=True, capture_output=True)
    assert (tmp_path / "model.elf").is_file()


def test_serial_port(project: Any, small: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """QEMU's serial line as a pseudo terminal, which is a port like any other."""
    words = (
        emulator(project.machine, str(project.folder / "build/model.elf"))
        .replace("-serial stdio", "-serial pty")
        .split()
    )
    p = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True)
    try:
        assert p.stdout is not None
        port = re.search(r"/dev/\S+", p.stdout.readline())[0]  # type: ignore[index]
        x = np.random.default_rng(0).integers(-128, 128, (1, 640)).astype(np.int8)
        with open_port(port) as firmware:
            firmware.write(0, 0, x.tobytes())
            firmware.run()
            got = firmware.read(0, 0)
        want = trivet.load(bytes(small.to_bytes())).entry("forward").run([x])[0]
        assert got == want.tobytes()
        file = small.save(tmp_path / "net.trv")
        assert main(["bench", str(file), "--device", f"serial:{port}", "--runs", "1"]) == 0
        assert "1 ok" in capsys.readouterr().out
    finally:
        p.kill()
        p.wait()
    with pytest.raises(Error, match="serial:/nowhere"):
        open_port("/nowhere")


def test_floats(tmp_path: Path) -> None:
    """Real numbers within 1e-5 of this machine's, with the FPU's instructions and without an FPU."""
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 24), torch.nn.GELU(), torch.nn.Linear(24, 6), torch.nn.Softmax(-1)
    ).eval()
    p = trivet.export(model, (torch.randn(1, 16),), golden=2, debug=True)
    for target in ("cortex-m4", "cortex-m3"):
        with emulated(p, target) as firmware:
            assert firmware.selftest() == (2, [])


def test_stripped_runs_the_same(tmp_path: Path) -> None:
    p = trivet.export(torch.nn.Linear(4, 3).eval(), (torch.randn(1, 4),), debug=True)
    short = stripped(bytes(p))
    assert len(short) < len(bytes(p)) and Program.read(short).view.entries[0].debug is None
    x = torch.randn(1, 4)
    assert torch.equal(trivet.load(short)(x), trivet.load(bytes(p))(x))


def test_trv_run_checks_golden_pairs(small: Any, tmp_path: Path) -> None:
    from trivet import native

    trv_run = Path(os.environ.get("TRIVET_RUN", native.library().path.parent / "trv_run"))
    if not trv_run.is_file():
        trv_run = native.library().path.parent.parent / "bin" / "trv_run"
    file = small.save(tmp_path / "net.trv")
    assert (
        "1 golden pairs, 0 failed"
        in subprocess.run([trv_run, "selftest", file], capture_output=True, text=True, check=True).stdout
    )
    data = bytearray(file.read_bytes())
    data[-1] ^= 1  # of the last golden output
    file.write_bytes(data)
    done = subprocess.run([trv_run, "selftest", file, "--defer-crc"], capture_output=True, text=True)
    assert done.returncode == 1


def test_example() -> None:
    """examples/03_cortex_m runs as it stands: the same golden results on both cores."""
    example = Path(__file__).resolve().parents[2] / "examples/03_cortex_m/keywords.py"
    import sys

    done = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("golden pairs 2 of 2") == 2, done.stdout
