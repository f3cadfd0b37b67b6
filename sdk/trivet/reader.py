"""What a program file says, for tools: structs as numpy records over the file's bytes, parts taken apart.

The C runtime is what verifies and runs files; here a file is trusted to have been opened by it.
"""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from trivet.error import Error
from trivet.fbs import CpuPart, Debug, Program
from trivet.fbs.structs import STRUCTS, DType, Op, RegionKind, StepKind

Records = np.ndarray[Any, np.dtype[np.void]]
NONE = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Place:
    """Debug texts of one time."""

    op: str = ""
    module: str = ""
    source: str = ""
    placement: str = ""

    @property
    def brief(self) -> str:
        """The operator without namespaces and overloads: conv <- conv2d + relu."""
        return re.sub(r"\b(?:aten|prims|trivet|quantized_decomposed|torchao)\.(\w+)\.\w+", r"\1", self.op)

    @property
    def where(self) -> str:
        return " ".join(t for t in (self.module, f"({self.source})" if self.source else "") if t)


@dataclass(frozen=True, slots=True)
class Command:
    """One command of a CPU part, one node of another part, or a step that is neither (transfer, branch, jump). inputs, outputs, tmp: value ids (None: not there). bits: of its weights,
    where they are narrower than their dtype, else 0. attrs: its attributes, a record of the op's struct; None for other steps. count:
    instructions of a map, else 0.
    """

    time: int
    op: str
    delegate: str
    inputs: tuple[int | None, ...] = ()
    outputs: tuple[int, ...] = ()
    tmp: tuple[int, ...] = ()
    bits: int = 0
    attrs: Any = None
    count: int = 0


@dataclass(frozen=True, slots=True)
class Stored:
    """How a value's integers stand for real numbers: real = scale * (stored - zero). bits: width that they need."""

    scale: float
    zero: int
    bits: int

    def real(self, stored: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Dequantised, f32."""
        real: np.ndarray[Any, np.dtype[np.float32]] = (stored.astype(np.int32) - self.zero).astype(np.float32)
        real *= np.float32(self.scale)
        return real


@dataclass(frozen=True, slots=True)
class Live:
    """Memory in use in one region over time. sums: bytes by time; size: of the region; bound: largest sum."""

    region: int
    kind: str
    size: int
    sums: list[int]

    @property
    def bound(self) -> int:
        return max(self.sums, default=0)


@dataclass
class EntryView:
    """One entry. table: the flatbuffer's reader; the vectors are records of the file's structs."""

    table: Any
    debug: Any
    data: Any
    name: str
    memories: list[MemoryView] = field(default_factory=list)  # of the program; []: all are the host's
    dims: Records = field(init=False)
    regions: Records = field(init=False)
    storages: Records = field(init=False)
    values: Records = field(init=False)
    steps: Records = field(init=False)
    waits: Records = field(init=False)

    def __post_init__(self) -> None:
        for attr, struct in (("dims", "Dim"), ("regions", "Region"), ("storages", "Storage"), ("values", "Value"),
                             ("steps", "Step"), ("waits", "Wait")):  # fmt: skip
            setattr(self, attr, _records(self.table, attr.capitalize(), struct, self.data))

    @property
    def times(self) -> int:
        return int(self.table.Times())

    @property
    def lower_bound(self) -> int:
        return int(self.table.LowerBound())

    @cached_property
    def inputs(self) -> list[int]:
        return [int(self.table.Inputs(i)) for i in range(self.table.InputsLength())]

    @cached_property
    def outputs(self) -> list[int]:
        return [int(self.table.Outputs(i)) for i in range(self.table.OutputsLength())]

    @cached_property
    def value_names(self) -> list[str]:
        """By value id; "" where stripped."""
        n = 0 if self.debug is None else self.debug.ValueNamesLength()
        return [_text(self.debug.ValueNames(i)) if i < n else "" for i in range(len(self.values))]

    @cached_property
    def quants(self) -> dict[int, Stored]:
        """Quantised values by id: those with one scale."""
        rows = _records(self.table, "Quants", "Quant", self.data)
        return {int(r["value"]): Stored(float(r["scale"]), int(r["zero"]), int(r["bits"])) for r in rows}

    @cached_property
    def weight_bytes(self) -> dict[str, int]:
        """Bytes of constants by what they store: {"i8": .., "i4": .., "f32": ..}; each constant once."""
        narrow = {v for c in self.commands if c.bits == 4 for v in c.inputs[:2] if v is not None}
        out: dict[str, int] = {}
        seen: set[tuple[int, int]] = set()
        for v, row in enumerate(self.values):
            storage = self.storages[int(row["storage"])]
            region = self.regions[int(storage["region"])]
            key = (int(region["segment"]), int(storage["offset"]))  # regions of several memories may share a segment
            if region["kind"] == RegionKind.const_ and key not in seen:
                seen.add(key)
                name = (
                    "i4"
                    if v in narrow and DType(int(row["dtype"])) in (DType.u8, DType.i8)
                    else DType(int(row["dtype"])).name
                )
                out[name] = out.get(name, 0) + int(storage["size"])
        return dict(sorted(out.items(), key=lambda t: -t[1]))

    def place(self, time: int) -> Place:
        """Debug texts of a time, empty where stripped."""
        if self.debug is None or time >= self.debug.TimesLength():
            return Place()
        t = self.debug.Times(time)
        return Place(*(_text(x) for x in (t.Op(), t.Module(), t.Source(), t.Placement())))

    def parts(self, step: Any) -> list[Any]:
        """The alternatives of a run step, best first."""
        return [self.table.Parts(int(step["a"]) + i) for i in range(int(step["count"]))]

    @cached_property
    def commands(self) -> list[Command]:
        """Everything that runs, in file order. A step's best alternative counts: its nodes are known by an alternative for the CPU, else by the
        debug table, else it is one "part".
        """
        out: list[Command] = []
        ends = [*(int(s["time"]) for s in self.steps[1:]), self.times]
        for step, end in zip(self.steps, ends, strict=True):
            if step["kind"] == StepKind.run:
                out += self._part(step, end)
            elif step["kind"] == StepKind.copy:
                out.append(Command(int(step["time"]), "transfer", "", (int(step["a"]),), (int(step["b"]),)))
            else:
                value = (int(step["a"]),) if step["kind"] != StepKind.jump else ()
                out.append(Command(int(step["time"]), StepKind(int(step["kind"])).name, "", value))
        return out

    def _part(self, step: Any, end: int) -> Iterator[Command]:
        parts = self.parts(step)
        delegate = _text(parts[0].Delegate())
        for part in parts:
            if _text(part.Delegate()) == "cpu" and part.DataLength():
                yield from (replace(c, delegate=delegate) for c in _cpu_commands(_bytes_of(part, self.data)))
                return
        part, first = parts[0], int(step["time"])
        inputs = tuple(int(part.Inputs(i)) for i in range(part.InputsLength()))
        outputs = tuple(int(part.Outputs(i)) for i in range(part.OutputsLength()))
        if self.debug is None:
            yield Command(first, "part", delegate, inputs, outputs)
            return
        for t in range(first, end):
            op = re.split(r"[( ]", self.place(t).op)[0] or "part"
            yield Command(t, op, delegate, inputs if t == first else (), outputs if t == end - 1 else ())

    def memory_name(self, index: int) -> str:
        """Of a region: "vram of cuda", or "" where the file has host memory only."""
        return str(self.memories[index]) if index < len(self.memories) else ""

    def command_rows(self) -> list[Records]:
        """The Command structs of every CPU part, in place: writing to them changes the file's bytes, where these may be written."""
        parts = [self.table.Parts(i) for i in range(self.table.PartsLength())]
        data = [_bytes_of(p, self.data) for p in parts if _text(p.Delegate()) == "cpu" and p.DataLength()]
        return [_records(CpuPart.CpuPart.GetRootAs(d, 0), "Commands", "Command", d) for d in data]

    def shape(self, value: int) -> list[str]:
        """Sizes of a value as text: numbers, or ranges low..high."""
        v = self.values[value]
        rows = [self.dims[int(v["dim"][i])] for i in range(int(v["rank"]))]
        return [str(r["min"]) if r["min"] == r["max"] else f"{r['min']}..{r['max'] if r['max'] < 1 << 61 else ''}"
                for r in rows]  # fmt: skip

    def live(self) -> Iterator[Live]:
        """Use of every ARENA region over time (dynamic storages at their bound)."""
        for r, region in enumerate(self.regions):
            if region["kind"] != RegionKind.arena:
                continue
            delta = np.zeros(self.times + 1, np.int64)
            mine = self.storages[self.storages["region"] == r]
            np.add.at(delta, mine["first"], mine["size"].astype(np.int64))
            np.add.at(delta, np.minimum(mine["last"].astype(np.int64) + 1, self.times), -mine["size"].astype(np.int64))
            yield Live(r, "arena", int(region["size"]), np.cumsum(delta[:-1]).tolist())


@dataclass(frozen=True, slots=True)
class MemoryView:
    """A memory that regions lie in. delegate: who owns it, "" the host."""

    name: str
    delegate: str

    def __str__(self) -> str:
        return f"{self.name} of {self.delegate}" if self.delegate else self.name


class FileView:
    """A program file."""

    def __init__(self, data: Any) -> None:
        self.data = memoryview(data)
        self.program = Program.Program.GetRootAs(self.data, 0)
        self.segments = _records(self.program, "Segments", "Segment", self.data)
        debug = None
        self.quantization: dict[str, Any] | None = None  # as of quantize.report.Report.to_json; None: not there
        if (i := self.program.DebugSegment()) >= 0 and int(self.segments[i]["file"]) == 0:
            at, size = int(self.segments[i]["offset"]), int(self.segments[i]["size"])
            debug = Debug.Debug.GetRootAs(self.data[at : at + size], 0)
            if text := _text(debug.Quantization()):
                self.quantization = json.loads(text)
        rows = [self.program.Memories(i) for i in range(self.program.MemoriesLength())]
        self.memories = [MemoryView(_text(r.Name()), _text(r.Delegate())) for r in rows]
        self.entries = []
        for k in range(self.program.EntriesLength()):
            table = self.program.Entries(k)
            names = debug.Entries(k) if debug is not None and k < debug.EntriesLength() else None
            self.entries.append(EntryView(table, names, self.data, _text(table.Name()), self.memories))

    @property
    def size(self) -> int:
        return len(self.data)

    @property
    def name(self) -> str:
        return _text(self.program.Name())

    @property
    def producer(self) -> str:
        return _text(self.program.Producer())

    def entry(self, name: str) -> EntryView:
        """An entry by name; "" is `forward` or the only one."""
        for e in self.entries:
            if e.name == (name or "forward") or (not name and len(self.entries) == 1):
                return e
        raise Error(f"no entry {name or 'forward'!r}; the program has {', '.join(e.name for e in self.entries)}")


def view_file(path: str | os.PathLike[str]) -> FileView:
    """Maps a file. Open it with load() first: that verifies it."""
    with Path(path).open("rb") as f:
        return FileView(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ))


def _text(x: bytes | None) -> str:
    return "" if x is None else x.decode("utf-8", "replace")


def _records(table: Any, vector: str, struct: str, data: Any) -> Records:
    """A vector of structs as a numpy view of the file."""
    n = getattr(table, f"{vector}Length")()
    if not n:
        return np.zeros(0, STRUCTS[struct])
    return np.frombuffer(data, STRUCTS[struct], n, getattr(table, vector)(0)._tab.Pos)


def _bytes_of(part: Any, data: Any) -> Any:
    at = part._tab.Vector(part._tab.Offset(8))  # Part.data
    return data[at : at + part.DataLength()]


def _cpu_commands(data: Any) -> Iterator[Command]:
    part = CpuPart.CpuPart.GetRootAs(data, 0)
    args = part.ArgsAsNumpy() if part.ArgsLength() else np.zeros(0, np.uint32)
    attributes = {op: _attributes(part, op, data) for op in Op}
    for c in _records(part, "Commands", "Command", data):
        at, n_in, n_out, n_tmp = (int(c[k]) for k in ("args", "n_in", "n_out", "n_tmp"))
        ids = [int(a) for a in args[at : at + n_in + n_out + n_tmp]]
        op = Op(int(c["op"]))
        attrs = attributes[op][int(c["attrs"])]
        bits = int(attrs["bits"]) if op in (Op.qmatmul, Op.qgather) else 0
        count = int(attrs["count"]) if op == Op.map else 0
        yield Command(int(c["time"]), op.name, "cpu", tuple(None if a == NONE else a for a in ids[:n_in]),
                      tuple(ids[n_in : n_in + n_out]), tuple(ids[n_in + n_out :]), bits, attrs, count)  # fmt: skip


def _attributes(part: Any, op: Op, data: Any) -> Records:
    """The attributes of an op's commands."""
    struct = STRUCTS["".join(w.capitalize() for w in op.name.split("_")) + "Attrs"]
    slot = part._tab.Offset(4 + 2 * (3 + int(op)))  # commands, args, code, then a vector per op
    if not slot:
        return np.zeros(0, struct)
    return np.frombuffer(data, struct, part._tab.VectorLen(slot), part._tab.Vector(slot))
