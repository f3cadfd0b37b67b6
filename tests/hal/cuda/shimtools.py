"""Compiles generated kernels for the CPU (shim.h) and runs launches: what the tests of the CUDA delegate share."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from trivet.cuda.code import Launch
from trivet.cuda.nvrtc import CUBIN, Image
from trivet.ir.dim import evaluate

HERE = Path(__file__).resolve().parent
FLAGS = ["-std=c++17", "-O1", "-shared", "-fPIC", "-DTRV_SHIM", "-w", "-fvisibility=hidden", "-ffp-contract=off"]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g1"]


def cache_folder() -> Path:
    """Where compiled modules stay from one run to the next."""
    folder = Path(os.environ.get("TRIVET_SHIM_CACHE", Path(tempfile.gettempdir()) / f"trivet-shim-{os.getuid()}"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def build(source: str, sanitize: bool = False) -> Path:
    """A shared library of the kernels of a source."""
    flags = FLAGS + (SANITIZE if sanitize else [])
    text = (HERE / "shim.h").read_text() + source + " ".join(flags)
    out = cache_folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.so"
    if not out.exists():
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "part.cpp"
            file.write_text(source)
            made = Path(folder) / "part.so"
            done = subprocess.run(
                ["g++", *flags, f"-I{HERE}", str(file), "-o", str(made)], capture_output=True, text=True
            )
            assert done.returncode == 0, done.stderr[:6000]
            made.replace(out) if made.stat().st_dev == out.parent.stat().st_dev else out.write_bytes(made.read_bytes())
    return out


class Module:
    """The kernels of a source, on the CPU."""

    def __init__(self, source: str, sanitize: bool = False) -> None:
        self.library = ctypes.CDLL(str(build(source, sanitize)))

    def run(self, launch: Launch, address: Callable[[object], int], dims: Mapping[str, int]) -> None:
        """One launch. address: of a value, or of the flag (None)."""
        words = []
        for kind, what in launch.words:
            words.append(evaluate(what, dims) if kind == "dim" else address(what))  # type: ignore[arg-type]
        grid = [evaluate(g, dims) for g in launch.grid]
        if 0 in grid:
            return
        raw = (ctypes.c_longlong * max(len(words), 1))(*words)
        kernel = ctypes.addressof(ctypes.c_char.in_dll(self.library, launch.kernel))
        status = self.library.trv_shim_launch(
            ctypes.c_void_p(kernel), launch.kernel.encode(), (ctypes.c_uint * 3)(*grid), launch.threads, raw
        )
        assert status == 0, f"{launch.kernel} was not launched"


def fake_folder() -> Path:
    """Where libcuda.so.1 of fake.cpp lies."""
    source = HERE / "fake.cpp"
    out = cache_folder() / f"fake-{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}" / "libcuda.so.1"
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        made = out.with_suffix(f".{os.getpid()}")
        done = subprocess.run(["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wl,-soname,libcuda.so.1",
                               str(source), "-o", str(made), "-ldl", "-pthread"], capture_output=True, text=True)  # fmt: skip
        assert done.returncode == 0, done.stderr[:4000]
        made.replace(out)
    return out.parent


def fake_driver() -> ctypes.CDLL:
    """It, loaded so that the driver's dlopen finds it."""
    library = ctypes.CDLL(str(fake_folder() / "libcuda.so.1"), ctypes.RTLD_GLOBAL)
    library.trv_fake_count.restype = ctypes.c_long
    library.trv_fake_fail_at.argtypes = [ctypes.c_long]
    return library


def shim_images(source: str, archs: tuple[int, ...]) -> list[Image]:
    """In the place of trivet.cuda.nvrtc.images: modules that the fake driver runs."""
    data = build(source).read_bytes()
    return [Image(CUBIN, a, data) for a in archs]
