"""Compiles CUDA C to cubins and PTX with NVIDIA's run-time compiler, from its packages on PyPI: no toolkit, no GPU.

Version 12 knows sm_50 to sm_90 (drivers of JetPack 5 and 6 take no newer cubin or PTX), version 13 sm_75 to sm_121.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from trivet.error import Error

CUBIN, PTX = 0, 1
OLD = frozenset({70, 72, 75, 80, 86, 87, 89, 90})  # architectures that version 12 compiles for
NEW = frozenset({75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121})
LEAST = 70  # tensor cores begin here
REMEDY = "pip install trivet[cuda]"
PACKAGES = {12: ("nvidia/cuda_nvrtc/lib", "nvidia-cuda-nvrtc-cu12"), 13: ("nvidia/cu13/lib", "nvidia-cuda-nvrtc")}


@dataclass(frozen=True, slots=True)
class Image:
    """Machine code for one architecture (kind CUBIN), or PTX that newer drivers compile when they load it."""

    kind: int
    arch: int
    data: bytes


def folders(major: int) -> list[Path]:
    """Where the compiler of a version may lie: TRIVET_NVRTC (a list of folders), its package, the loader's own path ("")."""
    out = [Path(p) for p in os.environ.get("TRIVET_NVRTC", "").split(os.pathsep) if p]
    spec = find_spec("nvidia")
    if spec is not None:
        for root in spec.submodule_search_locations or ():
            out.append(Path(root) / Path(PACKAGES[major][0]).relative_to("nvidia"))
    return out


@cache
def library(major: int) -> ctypes.CDLL | None:
    """The compiler of version 12 or 13, None where it is not installed."""
    name = f"libnvrtc.so.{major}"
    for folder in folders(major):
        if (folder / name).is_file():
            for builtins in sorted(folder.glob(f"libnvrtc-builtins.so.{major}.*")):
                ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)  # it looks for them by name only
            return _declared(ctypes.CDLL(str(folder / name)))
    try:
        return _declared(ctypes.CDLL(name))
    except OSError:
        return None


def _declared(lib: ctypes.CDLL) -> ctypes.CDLL:
    lib.nvrtcGetErrorString.restype = ctypes.c_char_p
    return lib


def version_for(arch: int) -> int:
    """The version that compiles for an architecture: the older one where both can, since older drivers take what it makes.

    Raises:
        Error: an architecture that none knows.
    """
    if arch in OLD and (arch not in NEW or library(12) is not None):
        return 12
    if arch in NEW:
        return 13
    raise Error(
        f"cuda: there is no compiler for sm_{arch}", remedy=f"known: {', '.join(f'sm{a}' for a in sorted(OLD | NEW))}"
    )


def compile(source: str, arch: int, kind: int) -> Image:
    """One image of a source.

    Raises:
        Error: no compiler installed, or one that refuses the source.
    """
    major = version_for(arch)
    lib = library(major)
    if lib is None:
        raise Error(f"cuda: compiling for sm_{arch} needs NVRTC {major}, which is not installed",
                    remedy=f"{REMEDY} (or {PACKAGES[major][1]} alone), or name its folder in TRIVET_NVRTC")  # fmt: skip
    text = source.encode()
    target = f"sm_{arch}" if kind == CUBIN else f"compute_{arch}"
    options = [f"--gpu-architecture={target}", "--std=c++17", "-w"]
    program = ctypes.c_void_p()
    _check(lib, lib.nvrtcCreateProgram(ctypes.byref(program), text, b"part.cu", 0, None, None), "create")
    try:
        raw = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        if lib.nvrtcCompileProgram(program, len(options), raw):
            size = ctypes.c_size_t()
            lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            lib.nvrtcGetProgramLog(program, log)
            raise Error(f"cuda: NVRTC {major} refuses a generated kernel for sm_{arch}: {log.value.decode()[:2000]}",
                        remedy="this is a bug of trivet: report it with the model")  # fmt: skip
        return Image(kind, arch, _result(lib, program, "CUBIN" if kind == CUBIN else "PTX"))
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def _result(lib: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(lib, getattr(lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), what)
    out = ctypes.create_string_buffer(size.value)
    _check(lib, getattr(lib, f"nvrtcGet{what}")(program, out), what)
    return out.raw


def _check(lib: ctypes.CDLL, status: int, what: str) -> None:
    if status:
        raise Error(f"cuda: NVRTC fails ({what}): {lib.nvrtcGetErrorString(status).decode()}", remedy=REMEDY)


def images(source: str, archs: tuple[int, ...]) -> list[Image]:
    """A cubin per architecture, and PTX of the least one for those that come later."""
    out = [compile(source, a, CUBIN) for a in archs]
    return [*out, compile(source, max(75 if min(archs) >= 75 else min(archs), LEAST), PTX)]
