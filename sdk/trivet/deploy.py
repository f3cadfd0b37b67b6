"""A program as a C project for a machine without files or heap: `trivet deploy net.trv --target cortex-m4 --to DIR`.

The project holds the runtime's core, the kernels that the program's commands run on that machine and nothing else of hal/cpu
(a kernels.def with their rows alone), the program as constant data, all memory as static arrays of exactly the planned sizes,
and a main that answers a host on a serial line (runtime_c/mcu/README.md).
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trivet import deploy_budget as budget
from trivet import deploy_project as project
from trivet import deploy_select as select
from trivet.build import sources
from trivet.crc import crc32c
from trivet.deploy_targets import Machine, machine
from trivet.error import Error
from trivet.fbs import Program as Table
from trivet.fbs.structs import DType
from trivet.program import Program
from trivet.reader import FileView

STACK, MORE_STACK = (
    4096,
    10240,
)  # bytes that a project reserves unless told otherwise; where kernels other than those by rows run
SMALL_OPS = {"qconv", "qmatmul", "qreduce", "qpool", "qsoftmax", "binary", "requantize", "lookup", "copy", "softmax"}
REAL = {int(DType.f16), int(DType.bf16), int(DType.f32), int(DType.f64)}


@dataclass(frozen=True)
class Deployed:
    """What `deploy` wrote. usage: bytes, of which code is an estimate; kernels: functions, in the order of their names."""

    folder: Path
    machine: Machine
    usage: budget.Usage
    kernels: tuple[str, ...]


def deploy(
    program: Any,
    target: str,
    to: str | os.PathLike[str],
    *,
    stack: int | None = None,
    flash: int | None = None,
    ram: int | None = None,
    weights_at: int | None = None,
    debug: bool = False,
) -> Deployed:
    """Writes the project.

    Args:
        program: a path of a .trv file, its bytes, or what export returned.
        target: a name of trivet.deploy_targets.MACHINES.
        to: folder; files there of the same names are overwritten.
        stack: bytes of stack that the linker script reserves; None: what the program's kernels may need (hal/cpu/README.md).
        flash, ram: budgets in bytes; they are also the sizes that the linker holds the image to.
        weights_at: address of another flash, where program.bin is put by other means; None: the program is part of the image.
        debug: keep names and source lines in the program.

    Raises:
        Error: unknown target, a program for another delegate, or more memory needed than there is: then nothing is written.
    """
    m = machine(target)
    p = program if isinstance(program, Program) else Program.read(program)
    data = bytes(p.to_bytes()) if debug else stripped(bytes(p.to_bytes()))
    if any(int(s["file"]) for s in p.view.segments):
        raise Error("the weights lie in a file of their own", remedy="save the program with its weights in it")
    view = FileView(data)
    need = select.needs(view, m.isa)
    memory = project.memories(view, m)
    if stack is None:
        stack = STACK if need.only_rows and set(need.ops) <= SMALL_OPS else MORE_STACK
    used = budget.usage(view, need, memory, stack)
    budget.check(p.view, used, flash, ram, weights_at is not None)
    root, folder = sources(), Path(to)
    if weights_at is not None and weights_at % 64:
        raise Error(f"the program must lie at a multiple of 64 bytes, not at {weights_at:#x}")
    shutil.rmtree(folder / "trivet", ignore_errors=True)
    copies = _copies(root, m, need, pairs=_golden(view))
    for name, source in copies.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, folder / name)
    (folder / "trivet/cpu/kernels.def").write_text(select.filtered((root / "hal/cpu/kernels.def").read_text(), need))
    (folder / "model.h").write_text(project.model_h(view, memory, m, crc32c(data), weights_at))
    (folder / "model.c").write_text(project.model_c(view, memory, data if weights_at is None else None, m))
    if weights_at is not None:
        (folder / "program.bin").write_bytes(data)
    units = sorted([n for n in copies if n.endswith(".c")] + ["model.c"])
    fast = [u for u in units if _hot(u)]
    floats = _floats(view)
    defines = ["TRV_NO_HOST", "TRV_NO_TEXT", "TRV_ONE_MEMORY", f"TRV_MAX_RANK={project.rank_of(view)}", f"TRVK_MAX_ARGS={need.args}",
               *(["TRVK_ONLY_ROWS=1"] if need.only_rows else []), *([] if floats else ["TRV_NO_REAL"]),
               *(["MODEL_GOLDEN"] if _golden(view) else [])]  # fmt: skip
    build = project.Build(m, fast, [u for u in units if u not in fast], defines, floats, stack, flash, ram)
    (folder / "Makefile").write_text(project.makefile(build))
    (folder / "CMakeLists.txt").write_text(project.cmake(build))
    return Deployed(folder, m, used, need.kernels)


def stripped(data: bytes) -> bytes:
    """The file without its debug segment, which is the last one. Its row stays, with no bytes."""
    view = FileView(data)
    at = view.program.DebugSegment()
    if at < 0:
        return data
    row, table = view.segments[at], view.program._tab
    if int(row["offset"]) + int(row["size"]) != len(data) or int(row["file"]):
        return data
    out = bytearray(data[: int(row["offset"])])
    slot = table.Pos + table.Offset(_slot("DebugSegment"))
    out[slot : slot + 4] = (-1).to_bytes(4, "little", signed=True)
    start = Table.Program.GetRootAs(out, 0).Segments(at)._tab.Pos
    out[start + 8 : start + 16] = bytes(8)
    out[start + 16 : start + 20] = crc32c(b"").to_bytes(4, "little")
    head = Table.Program.GetRootAs(out, 0).Head()
    size, place = head.Size(), head._tab.Pos
    out[place + 8 : place + 12] = bytes(4)
    out[place + 8 : place + 12] = crc32c(bytes(out[:size])).to_bytes(4, "little")
    return bytes(out)


def _slot(name: str) -> int:
    """Offset in the vtable of a field of the table Program."""
    fields = (
        "Abi",
        "MinAbi",
        "Features",
        "Head",
        "Name",
        "Producer",
        "Entries",
        "Segments",
        "External",
        "DebugSegment",
    )
    return 4 + 2 * fields.index(name)


def _golden(view: FileView) -> bool:
    return int(view.program.GoldenSegment()) >= 0


def _copies(root: Path, m: Machine, need: select.Needs, pairs: bool) -> dict[str, Path]:
    """Files of the project that are files of trivet."""
    out = {f"trivet/cpu/{f}": root / "hal/cpu" / f for f in select.sources(root / "hal/cpu", need, m.foreign)}
    core = [f for f in sorted((root / "runtime_c/src").iterdir()) if not f.name.startswith("host")]
    out |= {f"trivet/src/{f.name}": f for f in core}
    if pairs:
        out["trivet/check/selftest.c"] = root / "runtime_c/check/selftest.c"
    for d in ("hal", "runtime_c"):
        out |= {f"trivet/include/trivet/{f.name}": f for f in sorted((root / d / "include/trivet").glob("*.h"))}
    out["trivet/include/trv_schema.h"] = root / "schema/gen/trv_schema.h"
    port = [*m.files, "port.h", "serve.c", "serve.h", *([m.linker] if m.linker else [])]
    out |= {f"port/{f}": root / "runtime_c/mcu" / f for f in port}
    out["main.c"] = root / "runtime_c/mcu/main.c"
    return out


def _hot(unit: str) -> bool:
    """Is a file worth speed more than space? Kernels, and what proves a program at the start."""
    name = unit.rpartition("/")[2]
    return unit in ("trivet/src/verify.c", "trivet/src/shape.c", "trivet/src/place.c", "trivet/src/program.c") or (
        unit.startswith("trivet/cpu/") and name not in ("ops.c", "isa.c")
    )


def _floats(view: FileView) -> bool:
    """Does any command compute with real numbers?"""
    return any(
        int(e.values[i]["dtype"]) in REAL
        for e in view.entries
        for c in e.commands
        for i in (*c.inputs, *c.outputs)
        if i is not None
    )
