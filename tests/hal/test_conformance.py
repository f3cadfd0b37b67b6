"""Every driver of this repository that runs here passes the conformance test, under sanitizers; what it tests, it finds."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hal_nets import Chain, Fork, Memory, Unet, split

from trivet import native

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
INCLUDES = [f"-I{ROOT / d}" for d in ("hal/include", "runtime_c/include", "schema/gen", "tests/hal")]
ASAN = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
TSAN = ["-fsanitize=thread"]


def sh(*args: object) -> str:
    done = subprocess.run([str(a) for a in args], capture_output=True, text=True)
    assert done.returncode == 0, f"{args}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


class Builder:
    """Links drivers with the test and the runtime, both compiled once per sanitizer; the CPU's kernels are those of the library."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.made = folder, 0
        self.objects: dict[tuple[str, ...], list[Path]] = {}
        self.cc = shutil.which("gcc")
        assert self.cc, "gcc is not installed"

    def compile(self, source: Path, flags: list[str], name: str) -> Path:
        out = self.folder / f"{name}.o"
        sh(self.cc, "-std=gnu11", "-g", "-O1", *flags, *INCLUDES, f"-I{ROOT / 'hal/npu_sim'}", "-c", source, "-o", out)
        return out

    def __call__(self, driver: Path, flags: list[str]) -> Path:
        key = tuple(flags)
        if key not in self.objects:
            sources = [HERE / "conformance.c", HERE / "faulty.c", *sorted((ROOT / "runtime_c/src").glob("*.c"))]
            self.objects[key] = [
                self.compile(s, [*flags, "-DCONFORMANCE_LINKED"], f"{len(self.objects)}_{s.stem}") for s in sources
            ]
        self.made += 1
        exe, library = self.folder / f"conformance{self.made}", native.library().path.resolve()
        one = self.compile(driver, [*flags, "-DTRV_PLUGIN"], f"driver{self.made}")
        sh(
            self.cc,
            *flags,
            one,
            *self.objects[key],
            library,
            f"-Wl,-rpath,{library.parent}",
            "-lm",
            "-ldl",
            "-pthread",
            "-o",
            exe,
        )
        return exe


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    return Builder(tmp_path_factory.mktemp("conformance"))


@pytest.fixture(scope="session")
def npu_asan(build: Builder) -> Path:
    return build(ROOT / "hal/npu_sim/driver.c", ASAN)


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Programs cut at several places, whole, and with two branches at a time."""
    torch.manual_seed(0)
    to = tmp_path_factory.mktemp("files")
    x, image = torch.randn(4, 16), torch.randn(1, 3, 8, 8)
    return {
        "first": split(Chain(), (x,), to / "first.trv", {"a": "npu_sim", "b": "cpu", "c": "cpu"}),
        "middle": split(Chain(), (x,), to / "middle.trv", {"a": "cpu", "b": "npu_sim", "c": "cpu"}),
        "ends": split(Chain(), (x,), to / "ends.trv", {"a": "npu_sim", "b": "cpu", "c": "npu_sim"}),
        "whole": split(Chain(), (x,), to / "whole.trv", {"": "npu_sim"}),
        "fork": split(Fork(), (torch.randn(3, 24),), to / "fork.trv", {"left": "npu_sim", "right": "cpu"}),
        "unet": split(Unet(), (image,), to / "unet.trv", {"down": "npu_sim", "pool": "npu_sim", "mid": "cpu", "up": "cpu",
                                                          "out": "npu_sim"}),
    }  # fmt: skip


def test_npu_sim(npu_asan: Path, files: dict[str, Path]) -> None:
    """Memory, order, threads, refusals; each call to the driver fails once, over programs split in several ways."""
    out = sh(npu_asan, "--memory", *files.values())
    assert out.endswith("ok\n"), out
    assert out.count("have failed once each") == len(files)


def test_npu_sim_that_imports(npu_asan: Path, tmp_path: Path) -> None:
    """Host memory that the device takes as it is: no copies, the same results, the same care when calls fail."""
    path = split(Chain(), (torch.randn(4, 16),), tmp_path / "unified.trv", {"a": "npu_sim", "b": "cpu", "c": "npu_sim"},
                 target="npu_sim.unified > cpu")  # fmt: skip
    assert sh(npu_asan, "--options", "import", path).endswith("ok\n")


def test_npu_sim_without_races(build: Builder, files: dict[str, Path]) -> None:
    exe = build(ROOT / "hal/npu_sim/driver.c", TSAN)
    assert sh(exe, "--memory", files["fork"], files["ends"]).endswith("ok\n")


def test_null(build: Builder) -> None:
    """The skeleton passes too."""
    assert sh(build(ROOT / "hal/null/driver.c", ASAN)).endswith("ok\n")


BROKEN = {
    "point not reached": ("while (!st && dev->done < point) {", "while (0) {"),
    "format": ('if (strcmp(part->format, "npu_sim.1") != 0) {', "if (0) {"),
    "no reason": ('diag->what = "the part\'s format is not npu_sim.1";', ""),
    "leak": ("if (b && b->owned) free(b->base);", ""),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_broken_is_found(what: str, build: Builder, tmp_path: Path, files: dict[str, Path]) -> None:
    """The test itself: a driver with one fault does not pass."""
    source = (ROOT / "hal/npu_sim/driver.c").read_text()
    good, bad = BROKEN[what]
    assert source.count(good) == 1, good
    broken = tmp_path / "driver.c"
    broken.write_text(source.replace(good, bad))
    exe = build(broken, ASAN)
    done = subprocess.run([exe, "--memory", files["middle"]], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0, done.stdout


def test_state_and_failures(npu_asan: Path, tmp_path: Path) -> None:
    """State in the device's memory is filled and zeroed by copies, which fail in turn too (results after many runs differ, so only
    the calls are looked at)."""
    path = split(Memory(), (torch.ones(2, 3),), tmp_path / "state.trv", {"": "npu_sim"})
    done = subprocess.run([npu_asan, path], capture_output=True, text=True)
    assert "open:" not in done.stdout and "ERROR" not in done.stderr, done.stdout + done.stderr
