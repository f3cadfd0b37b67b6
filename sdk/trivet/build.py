"""The C runtime built for another machine: `trivet build --target aarch64-linux-gnu`, and what is there to build with.

CMake does the work, with the toolchain files under cmake/toolchain, which serve without Python too. A platform is built with
its GNU cross compiler where one is on PATH (Debian's gcc-<triple> packages), else with zig, which holds the C libraries of
all of them (pip install 'trivet[cross]').
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trivet.error import Error
from trivet.platforms import PLATFORMS, Platform, find_emulator


@dataclass(frozen=True)
class Built:
    """What `build` wrote: a folder with bin, lib, include; trv_run in it; the compiler that made it; the words in front of its
    programs that run them on this machine, none where nothing here does or needs to.
    """

    platform: str
    folder: Path
    trv_run: Path
    compiler: str
    emulator: tuple[str, ...]


def sources() -> Path:
    """The folder of the C sources: of the source tree, or of the installed package.

    Raises:
        Error: the package was installed without them.
    """
    here = Path(__file__).resolve().parent
    for folder in (here.parent.parent, here / "csrc"):
        if (folder / "CMakeLists.txt").is_file() and (folder / "runtime_c").is_dir():
            return folder
    raise Error("the C sources are not in this installation", remedy="install trivet again, or work in its source tree")


def zig() -> str:
    """The zig executable, of PATH or of the package ziglang; "" when there is none."""
    if found := shutil.which("zig"):
        return found
    try:
        import ziglang  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        return ""
    path = Path(str(ziglang.__file__)).parent / ("zig.exe" if os.name == "nt" else "zig")
    return str(path) if path.is_file() else ""


def build(
    target: str,
    to: str | os.PathLike[str] | None = None,
    *,
    compiler: str = "auto",
    ndk: str | os.PathLike[str] | None = None,
    options: Sequence[str] = (),
) -> Built:
    """Builds the runtime for a platform.

    Args:
        target: a name of PLATFORMS.
        to: folder for bin, lib and include; default: trivet-<target>. Object files stay in its folder .build, so that the
            next build only compiles what has changed.
        compiler: "gnu", "zig", or "auto": gnu where it is on PATH.
        ndk: for android-arm64: the folder of an Android NDK (default: $ANDROID_NDK_HOME).
        options: further arguments of CMake, e.g. -DCMAKE_BUILD_TYPE=MinSizeRel.

    Raises:
        Error: unknown target, a compiler or tool that is not there (the remedy says how to get it), or the compiler's own
            error.
    """
    platform = PLATFORMS.get(target)
    if platform is None:
        raise Error(f"unknown target {target!r}", remedy=f"one of {', '.join(PLATFORMS)}")
    if compiler not in ("auto", "gnu", "zig"):
        raise Error(f"unknown compiler {compiler!r}", remedy="auto, gnu or zig")
    name, arguments = _toolchain(target, platform, compiler, ndk)
    cmake = _cmake()
    folder = Path(to if to is not None else f"trivet-{target}").absolute()
    work = folder / f".build-{name}"
    maker = ["-G", "Ninja"] if shutil.which("ninja") else []
    # the simulated device is for developing on this machine
    flags = ["-DTRIVET_PLUGINS=OFF", f"-DTRIVET_STATIC_RUN={'ON' if platform.static and name == 'gnu' else 'OFF'}"]
    _run([cmake, "-S", sources(), "-B", work, *maker, f"-DCMAKE_INSTALL_PREFIX={folder}", "-DCMAKE_INSTALL_LIBDIR=lib", *flags,
          *arguments, *options], f"cannot configure the build for {target}")  # fmt: skip
    _run([cmake, "--build", work, "--parallel", str(os.cpu_count() or 1)], f"cannot build for {target}")
    _run(
        [cmake, "--install", work, "--strip"] if name == "gnu" else [cmake, "--install", work],
        f"cannot install into {folder}",
    )
    program = folder / "bin" / f"trv_run{platform.suffix}"
    if not program.is_file():
        raise Error(f"the build for {target} made no {program.name}", remedy=f"see {work}")
    try:
        here = tuple(find_emulator(target))
    except Error:
        here = ()
    return Built(target, folder, program, name, here)


def _toolchain(
    target: str, platform: Platform, compiler: str, ndk: str | os.PathLike[str] | None
) -> tuple[str, list[str]]:
    """The compiler's kind and what tells CMake of it."""
    files = sources() / "cmake" / "toolchain"
    if target == "android-arm64":
        root = ndk or os.environ.get("ANDROID_NDK_HOME")
        toolchain = Path(root or "") / "build/cmake/android.toolchain.cmake"
        if not root or not toolchain.is_file():
            raise Error(f"no Android NDK at {root or 'ANDROID_NDK_HOME (not set)'}",
                        remedy="--ndk FOLDER of an NDK; or --target aarch64-linux-musl, whose programs run in a phone's shell")  # fmt: skip
        return "ndk", [
            f"-DCMAKE_TOOLCHAIN_FILE={toolchain}",
            "-DANDROID_ABI=arm64-v8a",
            "-DANDROID_PLATFORM=android-24",
        ]
    gnu = platform.gnu and shutil.which(f"{platform.gnu}-gcc")
    if compiler == "gnu" and not gnu:
        what = f"apt-get install {platform.package}" if platform.package else "--compiler zig"
        raise Error(
            f"no GNU compiler for {target}" + (f": {platform.gnu}-gcc is not on PATH" if platform.gnu else ""),
            remedy=what,
        )
    if gnu and compiler != "zig":
        return "gnu", [f"-DCMAKE_TOOLCHAIN_FILE={files / 'gnu.cmake'}", f"-DTRIVET_TRIPLE={platform.gnu}",
                       f"-DTRIVET_FLAGS={platform.gnu_flags}"]  # fmt: skip
    found = zig()
    if not found:
        also = f", or apt-get install {platform.package}" if platform.package and compiler == "auto" else ""
        raise Error(f"no compiler for {target}: zig is not here", remedy=f"pip install 'trivet[cross]'{also}")
    return "zig", [f"-DCMAKE_TOOLCHAIN_FILE={files / 'zig.cmake'}", f"-DTRIVET_TRIPLE={platform.zig}", f"-DTRIVET_ZIG={found}",
                   f"-DTRIVET_FLAGS={platform.zig_flags}"]  # fmt: skip


def _cmake() -> str:
    beside = Path(sys.executable).parent / "cmake"
    found = shutil.which("cmake") or (str(beside) if beside.is_file() else "")
    if not found:
        raise Error("cmake is not here", remedy="pip install cmake ninja, or apt-get install cmake ninja-build")
    return found


def _run(words: Sequence[object], what: str) -> None:
    done = subprocess.run([str(w) for w in words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        lines = done.stdout.splitlines()
        marks = (i for mark in ("error:", "CMake Error") for i, line in enumerate(lines) if mark in line)
        first = next(marks, max(0, len(lines) - 12))
        raise Error(
            f"{what}:\n  " + "\n  ".join(lines[first : first + 12]), remedy="the lines above are the compiler's"
        )


# ---- doctor ---------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Finding:
    """One thing that some command needs: whether it is there (with its version or place), and how to get it."""

    what: str
    there: str
    remedy: str

    @property
    def ok(self) -> bool:
        return bool(self.there)


def doctor() -> list[Finding]:
    """What is on this machine: the library, cmake, a compiler and an emulator for every platform."""
    found = [_library(), Finding("cmake", shutil.which("cmake") or "", "pip install cmake"),
             Finding("ninja (builds faster)", shutil.which("ninja") or "", "pip install ninja"),
             Finding("zig (compiles for all targets)", zig(), "pip install 'trivet[cross]'")]  # fmt: skip
    for name, p in PLATFORMS.items():
        try:
            kind, _ = _toolchain(name, p, "auto", None)
            found.append(
                Finding(f"build for {name}", {"gnu": f"{p.gnu}-gcc", "zig": "zig", "ndk": "the NDK"}[kind], "")
            )
        except Error as e:
            found.append(Finding(f"build for {name}", "", e.remedy or ""))
    found += [_runs(name) for name, p in PLATFORMS.items() if p.emulator]
    for program, what, remedy in _PROGRAMS:
        found.append(Finding(what, shutil.which(program) or "", remedy))
    return found


def _runs(name: str) -> Finding:
    what = f"run programs for {name} here"
    try:
        words = find_emulator(name)
        if words[0] == sys.executable and importlib.util.find_spec("wasmtime") is None:
            raise Error("wasmtime is not here", remedy=PLATFORMS[name].emulator_from)
    except Error as e:
        return Finding(what, "", e.remedy or "")
    return Finding(what, "wasmtime" if words[0] == sys.executable else " ".join(words), "")


_PROGRAMS = (
    ("qemu-system-arm", "run Cortex-M firmware here", "apt-get install qemu-system-arm"),
    ("arm-none-eabi-gcc", "compile for Cortex-M", "apt-get install gcc-arm-none-eabi picolibc-arm-none-eabi"),
    ("qemu-system-riscv32", "run RISC-V firmware here", "apt-get install qemu-system-misc"),
    (
        "riscv64-unknown-elf-gcc",
        "compile RISC-V firmware",
        "apt-get install gcc-riscv64-unknown-elf picolibc-riscv64-unknown-elf",
    ),
    ("ssh", "bench on a machine by ssh", "apt-get install openssh-client"),
    ("adb", "bench on an Android phone", "apt-get install adb"),
)


def _library() -> Finding:
    from trivet import native

    try:
        return Finding("the C library under Python", str(native.library().path), "")
    except Error as e:
        return Finding("the C library under Python", "", e.remedy or str(e))
