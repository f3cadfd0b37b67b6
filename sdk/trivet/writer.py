"""Program file writer: plain descriptions in, bytes out. Knows the format (schema/README.md) and nothing of the IR.

Struct vectors are numpy records made by `records`. Segments are streamed: their chunks may be functions, called when their
bytes are due, so that writing a program never holds a second copy of the weights.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import flatbuffers
import numpy as np

from trivet.crc import crc32c
from trivet.fbs import CpuPart, Debug, DebugEntry, DebugTime, Entry, External, Head, Memory, Part, Program
from trivet.fbs.structs import STRUCTS, Op

ABI = 1
MIN_ABI = 1
ALIGN = 64  # of segments, and of what lies in them
PAGE = 4096  # of segments that are worth mapping on their own
BIG = 1 << 16
NONE = 0xFFFFFFFF
Records = np.ndarray[Any, np.dtype[np.void]]
Chunk = Any  # bytes, a contiguous numpy array, or a function that returns one


def records(struct: str, rows: Iterable[Mapping[str, Any]] = ()) -> Records:
    """A vector of a struct of the schema; fields that a row does not name are 0.

    Args:
        struct: name in program.fbs, cpu.fbs or ops.fbs.
        rows: one mapping of field to number (or sequence, shorter ones are filled up with 0) per record.
    """
    rows = list(rows)
    out = np.zeros(len(rows), STRUCTS[struct])
    for i, row in enumerate(rows):
        for key, value in row.items():
            cell = out[key]
            if cell.ndim == 1:
                cell[i] = value
            else:
                cell[i, : len(value)] = value
    return out


def _none(struct: str) -> Callable[[], Records]:
    return lambda: records(struct)


@dataclass(slots=True)
class SegmentSpec:
    """Raw bytes after the head: the concatenation of chunks. sizes: the chunks' sizes where they are functions."""

    chunks: Sequence[Chunk]
    sizes: Sequence[int] = ()
    align: int = 0  # 0: PAGE when big, else ALIGN
    external: bool = False
    flags: int = 0

    @property
    def lengths(self) -> list[int]:
        return list(self.sizes) or [memoryview(c).nbytes for c in self.chunks]

    @property
    def size(self) -> int:
        return sum(self.lengths)


@dataclass(slots=True)
class PartSpec:
    delegate: str
    format: str
    data: bytes = b""
    segment: int = -1
    inputs: Sequence[int] = ()
    outputs: Sequence[int] = ()


@dataclass(slots=True)
class EntrySpec:
    name: str
    dims: Records = field(default_factory=_none("Dim"))
    regions: Records = field(default_factory=_none("Region"))
    storages: Records = field(default_factory=_none("Storage"))
    values: Records = field(default_factory=_none("Value"))
    inputs: Sequence[int] = ()
    outputs: Sequence[int] = ()
    input_names: Sequence[str] = ()
    output_names: Sequence[str] = ()
    steps: Records = field(default_factory=_none("Step"))
    parts: Sequence[PartSpec] = ()
    times: int = 0
    lower_bound: int = 0
    signature: str = ""
    quants: Records = field(default_factory=_none("Quant"))  # sorted by value
    waits: Records = field(default_factory=_none("Wait"))  # sorted by step, then on


@dataclass(slots=True)
class DebugTimeSpec:
    op: str = ""
    module: str = ""
    source: str = ""
    placement: str = ""


@dataclass(slots=True)
class DebugSpec:
    """Debug table of one entry."""

    value_names: Sequence[str] = ()
    times: Sequence[DebugTimeSpec] = ()


@dataclass(slots=True)
class ProgramSpec:
    name: str
    entries: Sequence[EntrySpec]
    segments: Sequence[SegmentSpec] = ()
    debug: Sequence[DebugSpec] = ()  # one per entry, or none at all
    quantization: str = ""  # JSON of quantize.report.Report; part of the debug table
    producer: str = "trivet"
    features: int = 0
    abi: int = ABI
    min_abi: int = MIN_ABI
    golden_segment: int = -1
    memories: Sequence[tuple[str, str]] = ()  # name, delegate; the host's first. None: all are the host's


@dataclass(slots=True)
class CpuPartSpec:
    """Content of a part of the delegate "cpu". attrs: records of the struct of each op."""

    commands: Records = field(default_factory=_none("Command"))
    args: Sequence[int] = ()
    code: Records = field(default_factory=_none("MapInstr"))
    attrs: Mapping[Op, Records] = field(default_factory=dict)


def attrs_struct(op: Op) -> str:
    """Name of the struct with an op's attributes: grid_sample -> GridSampleAttrs."""
    return "".join(w.capitalize() for w in op.name.split("_")) + "Attrs"


# ---- flatbuffers ------------------------------------------------------------------------------------------------------------
def flat_bytes(b: flatbuffers.Builder, data: bytes, item: int, align: int) -> int:
    """A vector whose elements are given as raw bytes."""
    b.StartVector(item, len(data) // item, align)
    b.head -= len(data)
    b.Bytes[b.head : b.head + len(data)] = data
    return int(b.EndVector())


def _struct_align(dtype: np.dtype[Any]) -> int:
    fields = (dtype.fields or {}).values()
    return max((f[0].base.itemsize for f in fields), default=1)


def flat_records(b: flatbuffers.Builder, a: Records) -> int:
    return flat_bytes(b, a.tobytes(), a.dtype.itemsize, _struct_align(a.dtype))


def _ids(b: flatbuffers.Builder, ids: Sequence[int]) -> int:
    return flat_bytes(b, np.asarray(ids, "<u4").tobytes(), 4, 4)


def _offsets(b: flatbuffers.Builder, offsets: Sequence[int]) -> int:
    b.StartVector(4, len(offsets), 4)
    for o in reversed(offsets):
        b.PrependUOffsetTRelative(o)
    return int(b.EndVector())


def _strings(b: flatbuffers.Builder, texts: Sequence[str]) -> int:
    return _offsets(b, [b.CreateSharedString(t) for t in texts])


def cpu_part(spec: CpuPartSpec) -> bytes:
    """The data of a part of format "cpu.1"."""
    b = flatbuffers.Builder(4096)
    code = flat_records(b, spec.code)
    args = _ids(b, spec.args)
    commands = flat_records(b, spec.commands)
    attrs = [(op, flat_records(b, spec.attrs[op])) for op in Op if op in spec.attrs and len(spec.attrs[op])]
    CpuPart.CpuPartStart(b)
    CpuPart.AddCommands(b, commands)
    CpuPart.AddArgs(b, args)
    CpuPart.AddCode(b, code)
    for op, offset in attrs:
        b.PrependUOffsetTRelativeSlot(3 + int(op), offset, 0)
    b.Finish(CpuPart.CpuPartEnd(b), b"TRVC")
    return bytes(b.Output())


def _part(b: flatbuffers.Builder, p: PartSpec) -> int:
    delegate, form = b.CreateSharedString(p.delegate), b.CreateSharedString(p.format)
    data = flat_bytes(b, p.data, 1, 16) if p.segment < 0 else 0
    inputs, outputs = _ids(b, p.inputs), _ids(b, p.outputs)
    Part.PartStart(b)
    Part.AddDelegate(b, delegate)
    Part.AddFormat(b, form)
    if p.segment < 0:
        Part.AddData(b, data)
    Part.AddSegment(b, p.segment)
    Part.AddInputs(b, inputs)
    Part.AddOutputs(b, outputs)
    return int(Part.PartEnd(b))


def _entry(b: flatbuffers.Builder, e: EntrySpec) -> int:
    parts = _offsets(b, [_part(b, p) for p in e.parts])
    name = b.CreateString(e.name)
    dims, regions, storages, values = (flat_records(b, a) for a in (e.dims, e.regions, e.storages, e.values))
    quants = flat_records(b, e.quants) if len(e.quants) else 0
    waits = flat_records(b, e.waits) if len(e.waits) else 0
    inputs, outputs, steps = _ids(b, e.inputs), _ids(b, e.outputs), flat_records(b, e.steps)
    input_names, output_names = _strings(b, e.input_names), _strings(b, e.output_names)
    signature = b.CreateString(e.signature)
    Entry.EntryStart(b)
    Entry.AddName(b, name)
    Entry.AddDims(b, dims)
    Entry.AddRegions(b, regions)
    Entry.AddStorages(b, storages)
    Entry.AddValues(b, values)
    Entry.AddInputs(b, inputs)
    Entry.AddOutputs(b, outputs)
    Entry.AddInputNames(b, input_names)
    Entry.AddOutputNames(b, output_names)
    Entry.AddSteps(b, steps)
    Entry.AddParts(b, parts)
    Entry.AddTimes(b, e.times)
    Entry.AddLowerBound(b, e.lower_bound)
    if e.signature:
        Entry.AddSignature(b, signature)
    if len(e.quants):
        Entry.AddQuants(b, quants)
    if len(e.waits):
        Entry.AddWaits(b, waits)
    return int(Entry.EntryEnd(b))


def _memories(b: flatbuffers.Builder, rows: Sequence[tuple[str, str]]) -> int:
    tables = []
    for texts in rows:
        offsets = [b.CreateSharedString(t) for t in texts]
        Memory.MemoryStart(b)
        for slot, text in enumerate(offsets):
            b.PrependUOffsetTRelativeSlot(slot, text, 0)
        tables.append(int(Memory.MemoryEnd(b)))
    return _offsets(b, tables)


def _debug(entries: Sequence[DebugSpec], quantization: str) -> bytes:
    b = flatbuffers.Builder(4096)
    tables = []
    for e in entries:
        times = []
        for t in e.times:
            texts = [b.CreateSharedString(s) for s in (t.op, t.module, t.source, t.placement)]
            DebugTime.DebugTimeStart(b)
            for slot, text in enumerate(texts):
                b.PrependUOffsetTRelativeSlot(slot, text, 0)
            times.append(int(DebugTime.DebugTimeEnd(b)))
        names, rows = _strings(b, e.value_names), _offsets(b, times)
        DebugEntry.DebugEntryStart(b)
        DebugEntry.AddValueNames(b, names)
        DebugEntry.AddTimes(b, rows)
        tables.append(int(DebugEntry.DebugEntryEnd(b)))
    rows = _offsets(b, tables)
    text = b.CreateString(quantization) if quantization else 0
    Debug.DebugStart(b)
    Debug.AddEntries(b, rows)
    if quantization:
        Debug.AddQuantization(b, text)
    b.Finish(Debug.DebugEnd(b), b"TRVD")
    return bytes(b.Output())


def _head(p: ProgramSpec, segments: Records, debug: int, external: tuple[int, int, int] | None) -> bytes:
    """The flatbuffer, with its own size and CRC in it. Its size does not depend on what the segments' rows hold."""
    b = flatbuffers.Builder(1 << 16)
    entries = _offsets(b, [_entry(b, e) for e in p.entries])
    memories = _memories(b, p.memories) if p.memories else 0
    rows = flat_records(b, segments)
    name, producer = b.CreateString(p.name), b.CreateString(p.producer)
    Program.ProgramStart(b)
    Program.AddAbi(b, p.abi)
    Program.AddMinAbi(b, p.min_abi)
    Program.AddFeatures(b, p.features)
    Program.AddHead(b, Head.CreateHead(b, 0, 0, 0))
    Program.AddName(b, name)
    Program.AddProducer(b, producer)
    Program.AddEntries(b, entries)
    Program.AddSegments(b, rows)
    if external is not None:
        Program.AddExternal(b, External.CreateExternal(b, *external))
    Program.AddDebugSegment(b, debug)
    Program.AddGoldenSegment(b, p.golden_segment)
    if p.memories:
        Program.AddMemories(b, memories)
    b.Finish(Program.ProgramEnd(b), b"TRV1")
    out = bytearray(b.Output())
    at = Program.Program.GetRootAs(out, 0).Head()._tab.Pos
    out[at : at + 8] = len(out).to_bytes(8, "little")
    out[at + 8 : at + 12] = crc32c(out).to_bytes(4, "little")
    return bytes(out)


# ---- files ------------------------------------------------------------------------------------------------------------------
def _align(n: int, to: int) -> int:
    return -(-n // to) * to


def _stream(f: BinaryIO, segment: SegmentSpec, at: int, digest: Any) -> int:
    """Writes one segment at offset `at`; returns its CRC."""
    gap = at - f.tell()
    f.write(bytes(gap))
    if digest is not None:
        digest.update(bytes(gap))
    crc = 0
    for chunk, size in zip(segment.chunks, segment.lengths, strict=True):
        data = memoryview(chunk() if callable(chunk) else chunk).cast("B")
        if data.nbytes != size:
            raise ValueError(f"a chunk of a segment has {data.nbytes} bytes, {size} were announced")
        crc = crc32c(data, crc)
        f.write(data)
        if digest is not None:
            digest.update(data)
    return crc


@dataclass(slots=True)
class _Layout:
    """Where everything goes. sizes: of the program and of the external file."""

    specs: list[SegmentSpec]
    rows: Records
    debug: int
    hashed: bool
    head: int
    sizes: list[int]


def _layout(p: ProgramSpec) -> _Layout:
    specs = list(p.segments)
    if p.debug:
        specs.append(SegmentSpec([_debug(p.debug, p.quantization)]))
    rows = records(
        "Segment",
        (
            {
                "size": s.size,
                "align": s.align or (PAGE if s.size >= BIG else ALIGN),
                "file": int(s.external),
                "flags": s.flags,
            }
            for s in specs
        ),
    )
    debug = len(specs) - 1 if p.debug else -1
    hashed = any(s.external for s in specs)
    head = len(_head(p, rows, debug, (0, 0, 0) if hashed else None))
    sizes = [head, 0]
    for i, s in enumerate(specs):
        k = int(s.external)
        rows["offset"][i] = _align(sizes[k], int(rows["align"][i]))
        sizes[k] = int(rows["offset"][i]) + s.size
    return _Layout(specs, rows, debug, hashed, head, sizes)


def write(p: ProgramSpec, out: BinaryIO, external: BinaryIO | None = None) -> None:
    """Writes a program to a seekable stream, and its external segments to another.

    Args:
        p: what to write. The same description always gives the same bytes.
        out: at its start; gets the program.
        external: gets segments marked external; needed when there are any.
    """
    at = _layout(p)
    if at.hashed and external is None:
        raise ValueError("a segment is external, but there is no stream for it")
    _write(p, at, out, external)


def _write(p: ProgramSpec, at: _Layout, out: BinaryIO, external: BinaryIO | None) -> None:
    digest = hashlib.sha256()
    out.write(bytes(at.head))
    for i, s in enumerate(at.specs):
        f = external if s.external and external is not None else out
        at.rows["crc"][i] = _stream(f, s, int(at.rows["offset"][i]), digest if s.external else None)
    sha = digest.digest()
    identity = (int.from_bytes(sha[:8], "little"), int.from_bytes(sha[8:16], "little"), at.sizes[1])
    head = _head(p, at.rows, at.debug, identity if at.hashed else None)
    if len(head) != at.head:
        raise AssertionError("the head's size depends on the segments' positions")
    out.seek(0)
    out.write(head)
    out.seek(0, os.SEEK_END)


class _Room(io.RawIOBase):
    """A stream over memory of a fixed size that begins at a multiple of 64."""

    def __init__(self, size: int) -> None:
        room = np.zeros(size + ALIGN, np.uint8)
        skip = -room.ctypes.data % ALIGN
        self.view = room[skip : skip + size].data
        self.at = 0

    def write(self, data: Any) -> int:
        n = memoryview(data).nbytes
        self.view[self.at : self.at + n] = memoryview(data).cast("B")
        self.at += n
        return n

    def seek(self, at: int, whence: int = os.SEEK_SET) -> int:
        self.at = at if whence == os.SEEK_SET else len(self.view) + at
        return self.at

    def tell(self) -> int:
        return self.at


def write_memory(p: ProgramSpec) -> memoryview:
    """The file in memory, read-only, aligned for running in place (no external segments)."""
    at = _layout(p)
    if at.hashed:
        raise ValueError("a segment is external, but there is no stream for it")
    room = _Room(at.sizes[0])
    _write(p, at, room, None)  # type: ignore[arg-type]
    return room.view.toreadonly()


def write_bytes(p: ProgramSpec) -> bytes:
    """The file as bytes (no external segments)."""
    return bytes(write_memory(p))


def write_file(p: ProgramSpec, path: str | os.PathLike[str], weights: str | os.PathLike[str] | None = None) -> None:
    """Writes the file, and the external weights file if some segment is external. Neither exists half written.

    Args:
        p: what to write.
        path: of the program.
        weights: of the external weights file.
    """
    targets = [Path(path), *([Path(weights)] if weights is not None else [])]
    drafts = [t.with_name(f".{t.name}.{os.getpid()}.part") for t in targets]
    files: list[BinaryIO] = []
    try:
        files = [d.open("w+b") for d in drafts]
        write(p, files[0], files[1] if len(files) > 1 else None)
        for f in files:
            f.close()
        for d, t in zip(reversed(drafts), reversed(targets), strict=True):
            d.replace(t)
    finally:
        for f in files:
            f.close()
        for d in drafts:
            d.unlink(missing_ok=True)
