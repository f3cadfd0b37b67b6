"""The runtime core in C: behaviour under sanitizers, threads, byte order, malloc, size, speed."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from ctools import CORE, CPU, HERE, HOST, INCLUDES, ROOT, sh, tool

TOY = HERE / "toy.c"
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Wstrict-prototypes", "-Wvla", "-Werror"]
ONE = "-DTRV_ONE_MEMORY"
ARM = ["arm-none-eabi-gcc", "-mcpu=cortex-m4", "-mthumb"]
SMALL = ["-std=c11", "-Os", "-fno-asynchronous-unwind-tables"]


def test_runtime_under_sanitizers(programs: Path, compile_c: Callable[..., Path]) -> None:
    exe = compile_c("test_runtime", [HERE / "test_runtime.c", TOY, *CORE],
                    ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"])  # fmt: skip
    assert "FAILED" not in sh(exe, programs)


def test_runtime_with_32_bit_sizes(programs: Path, compile_c: Callable[..., Path]) -> None:
    emulator = tool("qemu-arm-static")
    exe = compile_c(
        "test_runtime", [HERE / "test_runtime.c", TOY, *CORE], ["-O1", "-static"], "arm-linux-gnueabihf-gcc"
    )
    assert "FAILED" not in sh(emulator, exe, programs)


def test_runtime_without_texts(programs: Path, compile_c: Callable[..., Path], tmp_path: Path) -> None:
    """TRV_NO_TEXT leaves codes and numbers as they are."""
    exe = compile_c("test_open", [HERE / "test_open.c", *CORE], ["-O1", "-DTRV_NO_TEXT", "-g"])
    damaged = tmp_path / "short.trv"
    damaged.write_bytes((programs / "static.trv").read_bytes()[:1000])
    done = subprocess.run([exe, programs / "static.trv", damaged], capture_output=True, text=True)
    assert re.fullmatch(r"0 ok\n-2 format: expected \d+, got 1000\n", done.stdout), done.stdout


def test_threads_under_tsan(programs: Path, compile_c: Callable[..., Path]) -> None:
    """Eight threads with sessions of one program, eight with contexts of one host: its pool, one each, the app's threads."""
    sources = [HERE / "test_threads.c", *CORE, *HOST, *CPU]
    exe = compile_c("test_threads", sources, ["-O0", "-fsanitize=thread", "-pthread", "-lm"])
    assert sh(exe, programs).strip() == "ok"


@pytest.mark.parametrize("flags", [[], ["-DTRVI_NO_FUTEX"]], ids=["futex", "condition"])
def test_pool_under_tsan(flags: list[str], compile_c: Callable[..., Path]) -> None:
    """Thousands of small jobs, many callers, pools closed while they sleep; with the system's futex and without."""
    name = f"test_pool{len(flags)}"
    pool = [ROOT / "runtime_c/src" / f for f in ("host_pool.c", "host_posix.c")]
    exe = compile_c(name, [HERE / "test_pool.c", *pool], ["-O1", "-fsanitize=thread", "-pthread", *flags])
    assert sh(exe).strip() == "ok"


def test_host(programs: Path, compile_c: Callable[..., Path]) -> None:
    """Hosts and contexts under AddressSanitizer and LeakSanitizer; the null driver."""
    sources = [HERE / "test_host.c", TOY, ROOT / "hal/null/driver.c", *CORE, *HOST, *CPU]
    exe = compile_c(
        "test_host", sources, ["-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-pthread", "-lm"]
    )
    assert sh(exe, programs).strip() == "ok"


def test_null_driver_is_clean(tmp_path: Path) -> None:
    """The skeleton compiles anywhere without a warning."""
    for compiler in (["gcc"], ARM):
        tool(compiler[0])
        sh(
            *compiler,
            "-std=c11",
            "-O2",
            *WARNINGS,
            *INCLUDES,
            "-c",
            ROOT / "hal/null/driver.c",
            "-o",
            tmp_path / "null.o",
        )


def test_malloc_poisoned(programs: Path, compile_c: Callable[..., Path], libdir: Path) -> None:
    exe = compile_c("test_poison", [HERE / "test_poison.c", libdir / "libtrivet.a"], ["-O2", "-pthread", "-lm"])
    assert sh(exe, programs).strip() == "ok"


def test_core_needs_little(tmp_path: Path) -> None:
    """Nothing undefined but what every freestanding compiler offers: no malloc, no files, no threads."""
    for source in CORE:
        sh("gcc", *SMALL, *INCLUDES, "-c", source, "-o", tmp_path / f"{source.stem}.o")
    symbols = sh("nm", "-g", *tmp_path.glob("*.o"))
    defined = set(re.findall(r" [TRD] (\w+)", symbols))
    needed = set(re.findall(r" U (\w+)", symbols)) - defined
    assert needed <= {"memcpy", "memmove", "memset", "memcmp", "strcmp", "_GLOBAL_OFFSET_TABLE_", "__stack_chk_fail"}


@pytest.mark.parametrize(
    ("compiler", "limit"),
    [(["gcc"], 30 * 1024), (["gcc", ONE], 24 * 1024), ([*ARM, ONE], 16 * 1024)],
    ids=["devices", "one memory", "cortex-m4"],
)
def test_core_size(compiler: list[str], limit: int, tmp_path: Path) -> None:
    """Stripped text and data of the core, with several devices and as microcontrollers take it; no .bss at all."""
    tool(compiler[0])
    objects = []
    for source in CORE:
        objects.append(tmp_path / f"{source.stem}.o")
        sh(*compiler, *SMALL, *WARNINGS, *INCLUDES, "-c", source, "-o", objects[-1])
    rows = [line.split() for line in sh("size", *objects).splitlines()[1:]]
    text, data, bss = (sum(int(r[i]) for r in rows) for i in range(3))
    print(f"core: {text + data} bytes of {limit}")
    assert bss == 0
    assert data == 0
    assert text + data <= limit


def test_headers_stand_alone(tmp_path: Path) -> None:
    """Each public header compiles by itself, as C11 and as C++."""
    for header in [*(ROOT / "hal/include/trivet").glob("*.h"), *(ROOT / "runtime_c/include/trivet").glob("*.h")]:
        for language, std in (("c", "c11"), ("c++", "c++11")):
            if language == "c++" and header.name == "fb.h":
                continue
            unit = tmp_path / f"unit.{'c' if language == 'c' else 'cc'}"
            guard = "" if language == "c" else "#define _Static_assert static_assert\n"
            unit.write_text(f'{guard}#include "trivet/{header.name}"\n')
            if subprocess.run(["gcc", "-x", language, "-E", "/dev/null"], capture_output=True).returncode:
                continue  # no C++ compiler here
            sh("gcc", "-x", language, f"-std={std}", "-Wall", "-Wextra", "-fsyntax-only", *INCLUDES, unit)


def test_big_endian_refused(programs: Path, compile_c: Callable[..., Path]) -> None:
    emulator = tool("qemu-s390x-static")
    exe = compile_c("test_open", [HERE / "test_open.c", *CORE], ["-O1", "-static"], "s390x-linux-gnu-gcc")
    done = subprocess.run([emulator, exe, programs / "static.trv"], capture_output=True, text=True)
    assert done.stdout.strip() == "-5 unsupported: this machine is not little-endian"
