"""The cffi declarations say what the headers say; the library is found, or its absence explained."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import cffi
import numpy as np
import pytest

from trivet import native
from trivet.error import Error
from trivet.fbs.structs import STRUCTS, DType, Op

ROOT = Path(__file__).resolve().parents[2]
INCLUDES = ["hal/include", "runtime_c/include", "schema/gen", "hal/cpu"]
CC = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def compile_c(tmp_path: Path, text: str) -> None:
    source = tmp_path / "same.c"
    source.write_text(text)
    flags = [f"-I{ROOT / i}" for i in INCLUDES]
    done = subprocess.run(
        [CC, "-std=c11", "-fsyntax-only", "-Werror", *flags, str(source)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def header_text() -> str:
    files = [
        "hal/include/trivet/base.h",
        "hal/include/trivet/hal.h",
        "runtime_c/include/trivet/trivet.h",
        "hal/cpu/kernel.h",
        "hal/cpu/ops.h",
        "hal/cpu/mcu.h",
        "hal/cpu/peak.h",
    ]
    text = "\n".join((ROOT / f).read_text() for f in files)
    return re.sub(r"/\*.*?\*/", "", text, flags=re.S)


@pytest.mark.skipif(CC is None, reason="no C compiler")
def test_declarations_match_headers(tmp_path):
    ffi = cffi.FFI()
    ffi.cdef(native.cdef())
    lines = ["#include <stddef.h>", '#include "trivet/trivet.h"', '#include "peak.h"']
    structs, _, _ = ffi.list_types()
    for name in structs:
        if ffi.typeof(name).kind != "struct" or ffi.typeof(name).fields is None:
            continue
        lines.append(f'_Static_assert(sizeof({name}) == {ffi.sizeof(name)}, "{name}");')
        for field, info in ffi.typeof(name).fields:
            lines.append(f'_Static_assert(offsetof({name}, {field}) == {info.offset}, "{name}.{field}");')
            lines.append(
                f'_Static_assert(sizeof((({name} *)0)->{field}) == {ffi.sizeof(info.type)}, "{name}.{field}");'
            )
            if info.type.kind == "primitive":  # the same type, not only the same size
                c = ffi.getctype(info.type, f"x_{name}_{field}")
                lines.append(f"static {name} s_{name}_{field}; static {c};")
                same = f"_Generic(&s_{name}_{field}.{field}, __typeof__(&x_{name}_{field}): 1)"
                lines.append(f'_Static_assert({same}, "{name}.{field}");')
    # a function may be declared twice, if both agree
    functions = re.sub(r"typedef struct (\w+) \{.*?\} \1;", "", native.RUNTIME + native.KERNELS, flags=re.S)
    lines.append(re.sub(r"typedef struct (\w+) \1;", "", functions))
    compile_c(tmp_path, "\n".join(lines) + "\n")


def test_every_public_function_is_declared():
    wanted = set(re.findall(r"TRV_API[^;{]*?\b(trvk?_\w+)\s*\(", header_text()))
    have = set(re.findall(r"\b(trvk?_\w+)\(", native.RUNTIME + native.KERNELS))
    callbacks_only = {"trv_program_open_reader"}  # for callers without files; Python has files
    formulas = {"trvk_sort_tmp_bytes", "trvk_scatter_tmp_bytes"}  # that the exporter knows
    assert wanted - have == callbacks_only | formulas
    assert have <= wanted


def test_constants():
    text = (ROOT / "hal/include/trivet/base.h").read_text() + (ROOT / "runtime_c/include/trivet/trivet.h").read_text()
    text += (ROOT / "hal/include/trivet/hal.h").read_text()
    for name in ("OK", "PENDING", "ARGUMENT", "FORMAT", "VERSION", "MEMORY", "UNSUPPORTED", "DEVICE", "STATE", "MAX_RANK",
                 "OPEN_DEFER_CRC", "OPEN_NO_CRC", "SESSION_REPLAN", "SESSION_KEEP_STATE", "HAL_ABI"):  # fmt: skip
        value = re.search(rf"#define TRV_{name} \(?(-?\d+)", text)
        assert value and int(value[1]) == getattr(native, name), name


def test_missing_library_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "_loaded", None)
    monkeypatch.setenv("TRIVET_LIBRARY", str(tmp_path / "nowhere.so"))
    with pytest.raises(Error, match="looked for .*nowhere.so") as e:
        native.library()
    assert "cmake" in e.value.remedy


def test_foreign_library_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "_loaded", None)
    junk = tmp_path / "junk.so"
    junk.write_bytes(b"not a library")
    monkeypatch.setenv("TRIVET_LIBRARY", str(junk))
    with pytest.raises(Error, match="cannot load the C library"):
        native.library()


def test_import_is_cheap():
    code = ("import sys, time; t = time.perf_counter(); import trivet; dt = time.perf_counter() - t\n"
            "assert 'torch' not in sys.modules and 'cffi' not in sys.modules and 'numpy' not in sys.modules\n"
            "print(dt)")  # fmt: skip
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "sdk", capture_output=True, text=True, check=True)
    assert float(out.stdout) < 0.3


def test_run_op_copy_strided():
    src = np.arange(12, dtype=np.float32).reshape(3, 4)[::-1, ::2]
    dst = np.zeros((3, 2), np.float32)
    native.run_op(int(Op.copy), [src], [dst], np.zeros((), STRUCTS["CopyAttrs"]))
    assert np.array_equal(src, dst)


def test_run_op_refuses_bad_shapes():
    with pytest.raises(Error):
        native.run_op(
            int(Op.copy), [np.zeros(3, np.float32)], [np.zeros(4, np.float32)], np.zeros((), STRUCTS["CopyAttrs"])
        )


def test_pack_matmul():
    attrs = np.zeros((), STRUCTS["MatmulAttrs"])
    attrs["packed"] = 1
    size = native.pack_bytes(int(Op.matmul), attrs, int(DType.f32), (5, 7))
    w = np.arange(35, dtype=np.float32).reshape(5, 7)
    packed = native.pack(int(Op.matmul), attrs, w)
    assert packed.nbytes == size >= w.nbytes and packed.ctypes.data % 64 == 0
    same = native.pack(int(Op.matmul), attrs, np.asfortranarray(w))
    assert np.array_equal(packed, same)
