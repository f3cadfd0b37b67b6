"""The machines that the C runtime is built for, how it is compiled for them, and what runs their programs here."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass

from trivet.error import Error


@dataclass(frozen=True)
class Platform:
    """A machine that the runtime can be built for.

    zig: its name for `zig -target`. gnu: the triple of its GNU toolchain, "" without. zig_flags, gnu_flags: further compiler
    flags. package: Debian's name of the GNU toolchain. emulator: what runs its programs on this machine; the first word may
    have several names, the best first, with | between. emulator_from: the command that gets it. static: trv_run needs no
    library of the system. suffix: of executables.
    """

    zig: str = ""
    gnu: str = ""
    zig_flags: str = ""
    gnu_flags: str = ""
    package: str = ""
    emulator: tuple[str, ...] = ()
    emulator_from: str = "apt-get install qemu-user-static"
    static: bool = True
    suffix: str = ""


_RVV = ("qemu-riscv64-static", "-cpu", "rv64,v=true,vext_spec=v1.0,vlen=256")
PLATFORMS: dict[str, Platform] = {
    "x86_64-linux": Platform("x86_64-linux-gnu.2.31", gnu="x86_64-linux-gnu", package="gcc"),
    "aarch64-linux-gnu": Platform(
        "aarch64-linux-gnu.2.31", gnu="aarch64-linux-gnu", package="gcc-aarch64-linux-gnu libc6-dev-arm64-cross",
        emulator=("qemu-aarch64-static", "-cpu", "max")),
    "aarch64-linux-musl": Platform("aarch64-linux-musl", emulator=("qemu-aarch64-static", "-cpu", "max")),
    "armv7-linux-musleabihf": Platform("arm-linux-musleabihf", zig_flags="-mcpu=generic+v7a+neon+vfp4", emulator=("qemu-arm-static",)),
    "riscv64-linux-musl": Platform("riscv64-linux-musl", emulator=("qemu-riscv64-static",)),
    "armv7-linux-gnueabihf": Platform(
        "arm-linux-gnueabihf.2.31", zig_flags="-mcpu=generic+v7a+neon+vfp4", gnu="arm-linux-gnueabihf",
        gnu_flags="-march=armv7-a+neon-vfpv4", package="gcc-arm-linux-gnueabihf libc6-dev-armhf-cross",
        emulator=("qemu-arm-static",)),
    "riscv64-linux-gnu": Platform(
        "riscv64-linux-gnu.2.31", gnu="riscv64-linux-gnu", package="gcc-riscv64-linux-gnu libc6-dev-riscv64-cross",
        emulator=("qemu-riscv64-static",)),
    "riscv64-linux-gnu+v": Platform("riscv64-linux-gnu.2.31", zig_flags="-mcpu=baseline_rv64+v", emulator=_RVV),
    "x86_64-windows-gnu": Platform(
        "x86_64-windows-gnu", gnu="x86_64-w64-mingw32", package="gcc-mingw-w64-x86-64-win32",
        emulator=("wine64|wine|/usr/lib/wine/wine64",), emulator_from="apt-get install wine64", suffix=".exe"),
    "aarch64-macos": Platform("aarch64-macos", static=False),
    "wasm32-wasi": Platform(
        "wasm32-wasi", zig_flags="-mcpu=generic+simd128", emulator=(sys.executable, "-m", "trivet.wasm"),
        emulator_from="pip install 'trivet[cross]'", suffix=".wasm"),
    "android-arm64": Platform(static=False),
}  # fmt: skip


def find_emulator(name: str) -> list[str]:
    """The words in front of a program of the platform that run it on this machine; none where it runs as it is.

    Raises:
        Error: nothing here runs such programs; the remedy says how to get it.
    """
    platform = PLATFORMS[name]
    if not platform.emulator:
        return []
    first, *rest = platform.emulator
    for word in first.split("|"):
        if found := shutil.which(word):
            if "wine" in os.path.basename(word):
                return ["env", "WINEDEBUG=-all", found, *rest]
            # zig links glibc's programs dynamically; Debian's cross packages have the libraries
            root = f"/usr/{name.split('+')[0].replace('armv7', 'arm')}"
            return [found, *rest, *(("-L", root) if "-gnu" in name and os.path.isdir(root) else ())]
    raise Error(f"nothing here runs programs for {name}: no {first.split('|')[0]}", remedy=platform.emulator_from)
