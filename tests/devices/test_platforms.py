"""`trivet build` for every platform, and that the same program gives the same results on all of them.

Integers agree bit for bit with x86-64, real numbers within 1e-5 (and with eager PyTorch). Other processors run under qemu,
WebAssembly in wasmtime and node, Windows programs under Wine.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from trivet import native
from trivet.build import build, zig
from trivet.cli import main
from trivet.devices import bench_on, open_device
from trivet.error import Error
from trivet.platforms import PLATFORMS, find_emulator

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "c")]

import networks
from ctools import sh, tool

GNU = (
    "aarch64-linux-gnu",
    "armv7-linux-gnueabihf",
    "x86_64-windows-gnu",
)  # by Debian's compilers here, all else by zig
# Where what the optimiser does has been seen on the same processor, or cannot be: a build in less time
QUICK = ("aarch64-linux-musl", "aarch64-macos", "riscv64-linux-gnu", "x86_64-windows-gnu")
LIGHT = ["-DCMAKE_C_FLAGS_RELEASE=-O1 -DNDEBUG"]


@dataclass
class Lab:
    """Programs in `folder`, with inputs and results of this machine; builds beside them, each made once."""

    folder: Path
    exact: dict[str, bool]

    def runner(self, target: str) -> Path:
        """trv_run for a platform, built when first asked for."""
        if target == "host":
            beside = native.library().path.parent
            return next(p for p in (beside / "trv_run", beside.parent / "bin" / "trv_run") if p.is_file())
        path = self.folder / f"trivet-{target}" / "bin" / f"trv_run{PLATFORMS[target].suffix}"
        if not path.is_file():
            if target in GNU:
                tool(f"{PLATFORMS[target].gnu}-gcc")
            elif not zig():
                pytest.skip("zig is not installed")
            built = build(target, path.parent.parent, compiler="gnu" if target in GNU else "zig",
                          options=LIGHT if target in QUICK else [])  # fmt: skip
            assert built.trv_run == path and (path.parent.parent / "include/trivet/trivet.h").is_file()
            assert (path.parent.parent / "lib/libtrivet.a").is_file()
        return path

    def run(self, words: list[str], name: str, to: str, isa: str = "") -> list[np.ndarray]:
        """Outputs of a program by a command line that ends in trv_run; they go to the folder's folder `to`."""
        env = {**os.environ, **({"TRV_ISA": isa} if isa else {})}
        place = self.folder / to / name
        place.mkdir(parents=True)
        sh(*words, "run", f"{name}.trv", f"{name}.in0.npy", "-o", f"{to}/{name}", cwd=self.folder, env=env)
        return self.results(to, name)

    def results(self, to: str, name: str) -> list[np.ndarray]:
        """What a run has left in `to`; "host": of this machine."""
        return [np.load(p) for p in sorted((self.folder / to / name).glob("output_*.npy"))]

    def check(self, words: list[str], to: str, isa: str = "") -> None:
        """All programs, by a command line that ends in trv_run."""
        for name, exact in self.exact.items():
            got, want = self.run(words, name, to, isa), self.results("host", name)
            assert len(got) == len(want)
            for g, w in zip(got, want):
                assert g.dtype == w.dtype and g.shape == w.shape, name
                if exact or w.dtype.kind in "iub":
                    np.testing.assert_array_equal(g, w, err_msg=name)
                else:
                    tolerance = 1e-3 if w.dtype == np.float16 else 1e-5
                    np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance, err_msg=name)


def emulator(target: str) -> list[str]:
    """The words in front of trv_run; skips the test where nothing runs such programs."""
    try:
        return find_emulator(target)
    except Error as e:
        pytest.skip(str(e))


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    folder = tmp_path_factory.mktemp("lab")
    lab = Lab(folder, networks.make(folder))
    for name in lab.exact:
        lab.run([str(lab.runner("host"))], name, "host")
    return lab


def test_this_machine(lab: Lab) -> None:
    """What others are compared with is right: eager PyTorch's results, and those of the plainest kernels; and they are not void."""
    lab.check([str(lab.runner("host"))], "ref", "ref")
    for name, exact in lab.exact.items():
        got = lab.results("host", name)
        assert got and all(len(np.unique(g)) >= 8 for g in got), name
        for i, path in enumerate(sorted(lab.folder.glob(f"{name}.want*.npy"))):
            assert not exact
            want = np.load(path)
            tolerance = 1e-3 if want.dtype == np.float16 else 1e-5
            np.testing.assert_allclose(got[i], want, rtol=tolerance, atol=tolerance)


def test_two_commands_from_a_fresh_machine(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`trivet build`, `trivet bench --device qemu:aarch64`: the second finds what the first has built."""
    tool("aarch64-linux-gnu-gcc"), tool("qemu-aarch64-static")
    monkeypatch.chdir(lab.folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(lab.folder / "cache"))
    assert main(["build", "--target", "aarch64-linux-gnu", "--compiler", "gnu"]) == 0
    capsys.readouterr()
    assert main(["bench", "convs_w8a8.trv", "--device", "qemu:aarch64", "--runs", "3", "--warmup", "0", "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert (
        row["platform"] == "aarch64-linux-gnu"
        and row["runs"] == 3
        and 0 < row["min_ms"] <= row["p50_ms"] <= row["max_ms"]
    )
    assert row["peak_bytes"] > 100_000 and not (lab.folder / "cache").exists()


RVV = "rv64,v=true,vext_spec=v1.0,vlen="
PROCESSORS = [
    ("aarch64-linux-gnu", "qemu-aarch64-static", "max"),  # dotprod, i8mm, bf16, SVE
    ("aarch64-linux-gnu", "qemu-aarch64-static", "max,sve=off"),
    ("aarch64-linux-gnu", "qemu-aarch64-static", "neoverse-n1"),  # dotprod alone
    ("aarch64-linux-gnu", "qemu-aarch64-static", "a64fx"),  # SVE of 512 bits, neither dotprod nor i8mm
    ("aarch64-linux-gnu", "qemu-aarch64-static", "cortex-a53"),  # none of them
    ("armv7-linux-gnueabihf", "qemu-arm-static", "cortex-a7"),
    ("riscv64-linux-gnu", "qemu-riscv64-static", "rv64,v=false"),
    ("riscv64-linux-gnu", "qemu-riscv64-static", RVV + "128"),
    ("riscv64-linux-gnu+v", "qemu-riscv64-static", RVV + "128"),
    ("riscv64-linux-gnu+v", "qemu-riscv64-static", RVV + "256"),
    ("riscv64-linux-gnu+v", "qemu-riscv64-static", RVV + "512"),
]


@pytest.mark.parametrize("target, emulator, cpu", PROCESSORS, ids=[f"{t}-{c}" for t, _, c in PROCESSORS])
def test_other_processors(target: str, emulator: str, cpu: str, lab: Lab) -> None:
    """The same results on every kind of processor."""
    runner = lab.runner(target)
    words = [tool(emulator), "-cpu", cpu]
    if target.startswith("riscv64"):  # by zig, which links glibc's programs dynamically
        words += ["-L", "/usr/riscv64-linux-gnu"]
    lab.check([*words, str(runner)], f"{target}-{cpu}")


@pytest.mark.parametrize("isa", ["ref", "dotprod", "i8mm", "armbf16"])
def test_instruction_sets_of_arm(isa: str, lab: Lab) -> None:
    """The runtime's own choice of kernels, one level after the other, on one processor."""
    lab.check([tool("qemu-aarch64-static"), "-cpu", "max", str(lab.runner("aarch64-linux-gnu"))], f"arm-{isa}", isa)


def test_webassembly(lab: Lab) -> None:
    """The same results in wasmtime and in node, for the command and for the module with its JavaScript interface."""
    pytest.importorskip("wasmtime")
    runner = lab.runner("wasm32-wasi")
    lab.check([*emulator("wasm32-wasi"), str(runner)], "wasmtime")
    lab.check([tool("node"), "--no-warnings", str(HERE / "wasi.mjs"), str(runner)], "node")
    for name in lab.exact:  # through trivet.mjs, several runs of one net: raw bytes of all outputs
        said = json.loads(sh(tool("node"), HERE / "module.mjs", runner.parent.parent / "lib/trivet.mjs", lab.folder / f"{name}.trv",
                             lab.folder / f"{name}.in0.npy"))  # fmt: skip
        want = lab.results("node", name)
        assert [(o["shape"], bytes.fromhex(o["bytes"])) for o in said] == [
            (list(w.shape), w.tobytes()) for w in want
        ], name


def test_javascript_errors(lab: Lab) -> None:
    """What is wrong is said, in the runtime's words or the interface's."""
    said = json.loads(sh(tool("node"), HERE / "wrong.mjs", lab.runner("wasm32-wasi").parent.parent / "lib/trivet.mjs",
                         lab.folder / "convs.trv"))  # fmt: skip
    for text, part in zip(said, ["takes 1 inputs, got 0", "takes a Float32Array, got Int8Array", "takes 150528 numbers, got 3",
                                 "not a trivet program", "ENOENT", "dynamic|got|expected"], strict=True):  # fmt: skip
        assert any(p in text for p in part.split("|")), text


def test_windows(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same results under Wine, from one thread and several, at the weakest and the best instruction set; files are mapped."""
    monkeypatch.setenv("WINEPREFIX", str(tmp_path / "wine"))
    monkeypatch.setenv("WINEDLLOVERRIDES", "mscoree,mshtml=")
    words = [*emulator("x86_64-windows-gnu"), str(lab.runner("x86_64-windows-gnu"))]
    lab.check(words, "wine-best")
    lab.check(words, "wine-ref", "ref")
    for bad, text in (("nowhere.trv", "cannot be opened"), ("empty.trv", "is empty"), (".", "cannot be opened")):
        (lab.folder / "empty.trv").write_bytes(b"")
        done = subprocess.run([*words, "inspect", bad], cwd=lab.folder, capture_output=True, text=True)
        assert done.returncode == 1 and text in done.stderr, done.stderr
    shutil.copy(lab.folder / "convs.trv", lab.folder / "naïve.trv")
    done = subprocess.run(
        [*words, "inspect", "naïve.trv"], cwd=lab.folder, capture_output=True
    )  # its text is not UTF-8
    assert done.returncode == 0 and b"entry 0" in done.stdout, done.stderr
    with open_device("wine") as device:
        m = bench_on(device, lab.folder / "convs.trv", trv_run=lab.runner("x86_64-windows-gnu"), threads=4, runs=200)
    assert m.runs == 200 and m.p50_ms > 0 and m.peak_bytes > 100_000 and m.load_ms > 0


@pytest.mark.parametrize("name", ["qemu:armv7", "wasm"])
def test_bench_on_emulated_devices(name: str, lab: Lab) -> None:
    """bench --device brings figures back and leaves nothing behind."""
    with open_device(name) as device:
        m = bench_on(device, lab.folder / "convs.trv", trv_run=lab.runner(device.platform), runs=3, warmup=0,
                     inputs=[lab.folder / "convs.in0.npy"])  # fmt: skip
        folder = Path(device.folder)
        assert folder.is_dir()
    assert m.runs == 3 and 0 < m.min_ms <= m.p50_ms <= m.p99_ms <= m.max_ms and m.platform == device.platform
    assert m.peak_bytes > 100_000 and not folder.exists()


def test_macos_links(lab: Lab) -> None:
    """There is no macOS to run it on: trv_run and the library are arm64 Mach-O, and need the system's library alone."""
    runner = lab.runner("aarch64-macos")
    library = runner.parent.parent / "lib/libtrivet.dylib"
    for path, kind in ((runner, 2), (library, 6)):  # MH_EXECUTE, MH_DYLIB
        data = path.read_bytes()
        magic, cpu, _, what, commands = struct.unpack_from("<5I", data)
        assert (magic, cpu, what) == (0xFEEDFACF, 0x0100000C, kind)
        at, needs = 32, []
        for _ in range(commands):
            command, size = struct.unpack_from("<2I", data, at)
            if command == 0xC:  # LC_LOAD_DYLIB
                needs.append(data[at + struct.unpack_from("<I", data, at + 8)[0] : at + size].rstrip(b"\0").decode())
            at += size
        assert needs == ["/usr/lib/libSystem.B.dylib"]


def test_android_by_a_named_ndk(lab: Lab, tmp_path: Path) -> None:
    """No NDK can be had here. A folder laid out like one compiles every file for Android's ABI by clang, with glibc's headers
    (so bionic's are not seen), and what comes out runs."""
    clang, gcc = tool("clang-14"), tool("aarch64-linux-gnu-gcc")
    toolchain = tmp_path / "ndk/build/cmake/android.toolchain.cmake"
    toolchain.parent.mkdir(parents=True)
    toolchain.write_text(
        f"set(CMAKE_SYSTEM_NAME Linux)\nset(CMAKE_SYSTEM_PROCESSOR aarch64)\nset(ANDROID TRUE)\nset(CMAKE_C_COMPILER {clang})\n"
        "set(CMAKE_C_COMPILER_WORKS TRUE)\nset(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES ANDROID_ABI)\nif(NOT ANDROID_ABI STREQUAL arm64-v8a)\n  message(FATAL_ERROR abi)\nendif()\n"
        'set(CMAKE_C_FLAGS_INIT "--target=aarch64-linux-android30 -isystem /usr/aarch64-linux-gnu/include")\n'
        f'set(CMAKE_C_LINK_EXECUTABLE "{gcc} -static <OBJECTS> -o <TARGET> <LINK_LIBRARIES>")\n'
    )
    built = build("android-arm64", tmp_path / "out", ndk=tmp_path / "ndk", options=["-DTRIVET_SHARED=OFF", *LIGHT])
    assert built.compiler == "ndk"
    lab.check([tool("qemu-aarch64-static"), "-cpu", "max", str(built.trv_run)], "android")
    with pytest.raises(Error, match="NDK"):
        build("android-arm64", ndk=tmp_path)
