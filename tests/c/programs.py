"""The programs that the C tests open, by name. `make(folder)` writes them all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from maker import Maker

from trivet.fbs.structs import DimOp, DType, MapOp, Op, RegionKind, StepKind
from trivet.writer import (
    CpuPartSpec,
    DebugSpec,
    DebugTimeSpec,
    EntrySpec,
    PartSpec,
    ProgramSpec,
    SegmentSpec,
    cpu_part,
    records,
    write_file,
)

F32, I32, U8, BOOL = DType.f32, DType.i32, DType.u8, DType.bool
WEIGHTS = np.arange(4, dtype=np.float32)


def static() -> ProgramSpec:
    """y = x0 + w, w constant; then z = y + x1 through an intermediate."""
    m = Maker(times=2)
    x0, x1 = m.slot(F32, [4]), m.slot(F32, [4])
    const = m.region(RegionKind.const_, 16, segment=0)
    w = m.tensor(F32, [4], const)
    y = m.tensor(F32, [4])
    z = m.slot(F32, [4], output=True)
    m.run(b"+", [x0, w], [y], time=0)
    m.run(b"+", [y, x1], [z], time=1)
    debug = DebugSpec(["x0", "x1", "w", "y", "z"], [DebugTimeSpec("add", "net.first", "net.py:3", "toy"),
                                                   DebugTimeSpec("add", "net.second", "net.py:4", "toy")])  # fmt: skip
    return ProgramSpec("static", [m.entry()], [SegmentSpec([WEIGHTS])], [debug])


def external(p: ProgramSpec) -> ProgramSpec:
    p.segments[0].external = True
    return p


def dynamic(high: int = 512) -> ProgramSpec:
    """y = (x + x) + x, x [n, 3] with n in 1..high; the middle value is planned again; u [n] has the same n."""
    m = Maker(times=2)
    n = m.dim(DimOp.input, 0, 0, 1, high)
    three = m.const(3)
    elements = m.dim(DimOp.mul, n, three)
    size = m.dim(DimOp.mul, elements, m.const(4))
    size_u = m.dim(DimOp.mul, n, m.const(4))
    bound = 512 if high > 1 << 20 else high
    flags = int(high > 1 << 20)
    more = {"size_dim": size, "flags": flags}
    x = m.slot(F32, [bound, 3], rows=[n, three], **more)
    m.slot(F32, [bound], rows=[n], size_dim=size_u, flags=flags)
    t = m.tensor(F32, [bound, 3], rows=[n, three], **more)
    y = m.slot(F32, [bound, 3], output=True, rows=[n, three], **more)
    m.run(b"+", [x, x], [t], time=0)
    m.run(b"+", [t, x], [y], time=1)
    return ProgramSpec("dynamic", [m.entry()])


def _stateful(name: str, code: bytes) -> EntrySpec:
    """state += x (or an entry that only reads it); y = state."""
    m = Maker(name)
    x = m.slot(F32, [2])
    state = m.region(RegionKind.state, 8, segment=0)
    m.regions[state]["id"] = 7
    s = m.tensor(F32, [2], state)
    y = m.slot(F32, [2], output=True)
    if code == b"+":
        m.run(b"+", [s, x], [s])
    m.run(b"+", [s], [y])
    return m.entry()


def state() -> ProgramSpec:
    first = np.array([10, 20], np.float32)
    return ProgramSpec("state", [_stateful("step", b"+"), _stateful("peek", b"")], [SegmentSpec([first])])


def loop() -> ProgramSpec:
    """i = 0 (a state that begins at 0); while i < x: i = i + 1; y = i."""
    m = Maker()
    x = m.slot(I32, [])
    state = m.region(RegionKind.state, 4)
    i = m.tensor(I32, [], state)
    go = m.tensor(BOOL, [])
    y = m.slot(I32, [], output=True)
    m.run(b"<", [i, x], [go])
    m.step(StepKind.branch, go, 4)
    m.run(b"i", [i], [i])
    m.step(StepKind.jump, b=0)
    m.step(StepKind.copy, i, y)
    return ProgramSpec("loop", [m.entry()])


def data() -> ProgramSpec:
    """n = x (0..100), as nonzero would find it; y = n bytes of 9."""
    m = Maker(times=2)
    n = m.dim(DimOp.data, high=100)
    x = m.slot(I32, [])
    y = m.slot(U8, [100], output=True, rows=[n])
    m.run(bytes([ord("d"), n]), [x], time=0)
    m.run(b"f\x09", [], [y], time=1)
    return ProgramSpec("data", [m.entry()])


def alternatives() -> ProgramSpec:
    """An unknown delegate, a format that the toy refuses, then one that it takes; and a step that nobody takes."""
    m = Maker()
    x = m.slot(F32, [2])
    y = m.slot(F32, [2], output=True)
    m.run(b"+", [x, x], [y], alternatives=3)
    m.parts[0] = PartSpec("npu", "npu.3", b"?", inputs=[x], outputs=[y])
    m.parts[1] = PartSpec("toy", "toy.9", b"?", inputs=[x], outputs=[y])
    good = m.entry()
    m = Maker("nobody")
    x = m.slot(F32, [2])
    y = m.slot(F32, [2], output=True)
    m.run(b"+", [x, x], [y], form="toy.2")
    return ProgramSpec("alternatives", [good, m.entry()])


def failing() -> ProgramSpec:
    m = Maker()
    x = m.slot(F32, [2])
    y = m.slot(F32, [2], output=True)
    m.run(b"n")
    m.run(b"e", [x], [y])
    return ProgramSpec("failing", [m.entry()])


def long(count: int = 1000) -> ProgramSpec:
    """count steps, each with a storage of its own that lives for three steps: for timing and the packer."""
    m = Maker(times=count)
    x = m.slot(F32, [16])
    before = x
    for t in range(count - 1):
        now = m.tensor(F32, [16], first=t, last=min(t + 2, count - 1))
        m.run(b"+", [before, x], [now], time=t)
        before = now
    y = m.slot(F32, [16], output=True)
    m.run(b"+", [before, x], [y], time=count - 1)
    return ProgramSpec("long", [m.entry()])


def nothing() -> ProgramSpec:
    """One step that does nothing: what the runtime itself costs."""
    m = Maker()
    m.slot(F32, [2])
    m.slot(F32, [2], output=True)
    m.run(b"n")
    return ProgramSpec("nothing", [m.entry()])


# ---- programs of the delegate "cpu"
def _maps(commands: list[tuple[list[int], int]], dtype: DType = F32) -> bytes:
    """A part of commands that each add up their inputs into an output."""
    code: list[dict[str, int]] = []
    rows, attrs, args = [], [], []
    for time, (inputs, out) in enumerate(commands):
        start = len(code)
        code += [{"op": MapOp.load, "dtype": dtype, "dst": k, "a": k} for k in range(len(inputs))]
        code += [{"op": MapOp.add, "dtype": dtype, "dst": 0, "a": 0, "b": k} for k in range(1, len(inputs))]
        attrs.append({"code": start, "count": len(code) - start, "regs": len(inputs)})
        rows.append({"op": Op.map, "n_in": len(inputs), "n_out": 1, "args": len(args), "attrs": time, "time": time})
        args += [*inputs, out]
    return cpu_part(CpuPartSpec(records("Command", rows), args, records("MapInstr", code),
                                {Op.map: records("MapAttrs", attrs)}))  # fmt: skip


def cpu_static() -> ProgramSpec:
    """As static, with CPU kernels: z = (x0 + w) + x1."""
    p = static()
    e = p.entries[0]
    e.parts = [PartSpec("cpu", "cpu.1", _maps([([0, 2], 3), ([3, 1], 4)]))]
    e.steps = records("Step", [{"kind": StepKind.run, "count": 1}])
    return p


def cpu_dynamic() -> ProgramSpec:
    """As unbounded: y = (x + x) + x."""
    p = dynamic(1 << 40)
    e = p.entries[0]
    e.parts = [PartSpec("cpu", "cpu.1", _maps([([0, 0], 2), ([2, 0], 3)]))]
    e.steps = records("Step", [{"kind": StepKind.run, "count": 1}])
    return p


def cpu_state() -> ProgramSpec:
    """As state: two entries that share a state."""
    p = state()
    for e, commands in zip(p.entries, ([([1, 0], 1), ([1], 2)], [([1], 2)]), strict=True):
        e.parts = [PartSpec("cpu", "cpu.1", _maps(commands))]
        e.steps = records("Step", [{"kind": StepKind.run, "count": 1}])
        e.times = len(commands)
        e.storages["last"] = e.times - 1
    return p


def cpu_empty(count: int = 10000) -> ProgramSpec:
    """count commands that copy nothing."""
    m = Maker()
    x = m.slot(F32, [0])
    y = m.slot(F32, [0], output=True)
    rows = [{"op": Op.copy, "n_in": 1, "n_out": 1, "args": 0, "attrs": 0}] * count
    part = cpu_part(CpuPartSpec(records("Command", rows), [x, y], attrs={Op.copy: records("CopyAttrs", [{}])}))
    m.run(part, delegate="cpu", form="cpu.1")
    return ProgramSpec("empty", [m.entry()])


def null() -> ProgramSpec:
    """Two steps of the delegate "null"."""
    m = Maker()
    x, y = m.slot(F32, [2]), m.slot(F32, [2], output=True)
    m.run(b"", [x], [y], delegate="null", form="null.1")
    m.run(b"", [x], [y], delegate="null", form="null.1")
    return ProgramSpec("null", [m.entry()])


ALL = {f.__name__: f for f in (static, dynamic, state, loop, data, alternatives, failing, long, nothing, null,
                               cpu_static, cpu_dynamic, cpu_state, cpu_empty)}  # fmt: skip


def make(folder: Path) -> None:
    for name, f in ALL.items():
        write_file(f(), folder / f"{name}.trv")
    write_file(external(static()), folder / "external.trv", folder / "external.bin")
    write_file(external(cpu_static()), folder / "cpu_external.trv", folder / "cpu_external.bin")
    write_file(dynamic(1 << 40), folder / "unbounded.trv")
