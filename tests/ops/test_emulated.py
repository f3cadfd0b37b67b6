"""Kernels on other processors, emulated: commands that tests of this folder ran here are run again there, at every level that the
processor has, and give the same integers, and floats within the tolerance of the tests. And how the inner loops for arm64 come off
in static analysis.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import shutil
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import arm_loops
import pytest
import torch
from heavy import check

from trivet.build import PLATFORMS, build
from trivet.fbs.structs import DType, Op

HERE = Path(__file__).resolve().parent
RECORDED = ("test_heavy_conv.py", "test_heavy_matmul.py", "test_heavy_winograd.py", "test_heavy_rnn.py", "test_quant_exact.py",
            "test_quant_matmul.py", "test_basic_norm.py", "test_basic_map.py")  # fmt: skip
TORCH = {DType.bool: torch.bool, DType.u8: torch.uint8, DType.i8: torch.int8, DType.i16: torch.int16, DType.i32: torch.int32,
         DType.i64: torch.int64, DType.f16: torch.float16, DType.bf16: torch.bfloat16, DType.f32: torch.float32, DType.f64: torch.float64}  # fmt: skip
# platform, processor, levels that must have been met
MACHINES = (
    ("aarch64-linux-gnu", "max", {"ref", "dotprod", "i8mm", "armbf16"}),
    ("aarch64-linux-gnu", "cortex-a53", {"ref"}),
    ("armv7-linux-gnueabihf", "max", {"ref"}),
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that workers share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="module")
def cases(shared: Path) -> Path:
    """Commands, with what they gave beside."""
    path = shared / "cases.bin"
    with (shared / "cases.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.is_file():
            env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
            env["TRIVET_RECORD_CASES"] = str(shared / "cases.tmp")
            done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(HERE / f) for f in RECORDED)],
                                  env=env, capture_output=True, text=True, cwd=HERE.parents[1])  # fmt: skip
            assert done.returncode == 0, done.stdout[-3000:]
            (shared / "cases.tmp.want").rename(f"{path}.want")
            (shared / "cases.tmp").rename(path)
    return path


def runner(platform: str, shared: Path) -> list[str]:
    """run_cases.c for a platform, and the emulator in front of it."""
    p = PLATFORMS[platform]
    for program in (f"{p.gnu}-gcc", p.emulator[0]):
        if not shutil.which(program):
            pytest.skip(f"{program} is not installed")
    folder = shared / f"kernels-{platform}"
    with (shared / f"{platform}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "run_cases").is_file():
            built = build(platform, folder, compiler="gnu")
            root = HERE.parents[1]
            include = [f"-I{root / d}" for d in ("hal/include", "schema/gen", "hal/cpu")]
            subprocess.run([f"{p.gnu}-gcc", "-std=c11", "-O1", "-static", *include, str(HERE / "emulated/run_cases.c"),
                            str(built.folder / "lib/libtrivet.a"), "-lm", "-lpthread", "-o", str(folder / "run_cases.tmp")], check=True)  # fmt: skip
            (folder / "run_cases.tmp").rename(folder / "run_cases")
    return [p.emulator[0], str(folder / "run_cases")]


@pytest.mark.parametrize(("platform", "cpu", "levels"), MACHINES)
def test_kernels(platform: str, cpu: str, levels: set[str], cases: Path, shared: Path, tmp_path: Path) -> None:
    emulator, program = runner(platform, shared)
    subprocess.run([emulator, "-cpu", cpu, program, str(cases), str(tmp_path / "got")], check=True)
    got, at = (tmp_path / "got").read_bytes(), 0
    met: Counter[str] = Counter()
    for i, case in enumerate(pickle.loads(Path(f"{cases}.want").read_bytes())):
        (count,) = struct.unpack_from("<I", got, at)
        at += 4
        for _ in range(count):
            name, status = struct.unpack_from("<16si", got, at)
            at += 20
            level = name.rstrip(b"\0").decode()
            what = f"case {i}, {Op(case['op']).name} at {level}"
            assert status == 0, what
            met[level] += 1
            for w in case["outputs"]:
                if w is not None:
                    data = got[at : at + len(w["bytes"])]
                    at += len(data)
                    same(data, w, what)
    assert at == len(got)
    assert set(met) == levels
    assert met["ref"] > 4000


def same(data: bytes, w: dict[str, Any], what: str) -> None:
    """Compares an output's bytes with those that it had here."""
    dtype = TORCH[DType(w["dtype"])]
    if data == w["bytes"]:
        return
    a, b = (torch.frombuffer(bytearray(x), dtype=dtype) for x in (data, w["bytes"]))
    if all(s >= 0 for s in w["stride"]):
        a, b = (x.as_strided(w["dim"], w["stride"], w["offset"] // w["size"]) for x in (a, b))
    try:
        check(a, b)
    except AssertionError as e:
        raise AssertionError(f"{what}: {e}") from e


@pytest.mark.parametrize(("name", "function", "instruction"), [loop[1:] for loop in arm_loops.LOOPS])
def test_loops_reach_the_limit(name: str, function: str, instruction: str) -> None:
    """Products of tiles and depthwise windows reach 85 % of the pipes of a core that runs out of order; what waits for memory or for
    itself is told in hal/cpu/README.md."""
    for program in (arm_loops.GCC, "llvm-mca-19"):
        if not shutil.which(program):
            pytest.skip(f"{program} is not installed")
    shares = {core: arm_loops.share(name, function, instruction, core) for core in ("cortex-a76", "neoverse-v1")}
    least = {"stream_row": 0.65, "q_nibbles": 0.6}.get(function, 0.85)
    assert shares["cortex-a76"] >= least
    assert shares["neoverse-v1"] >= (0.45 if function.startswith("dw_") else least)
