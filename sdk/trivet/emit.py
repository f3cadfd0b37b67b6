"""Turns planned graphs into the description of a program file: the last stage of lowering."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from trivet.constants import Pool, layout, raw
from trivet.dimtable import DimTable
from trivet.error import Error
from trivet.fbs.structs import RegionKind, StepKind
from trivet.ir.dim import Dim
from trivet.ir.graph import Graph, Module, Node, State, Value
from trivet.ir.types import SIZES
from trivet.pipeline import Context
from trivet.program import Program
from trivet.schedule import Event, Storage, schedule
from trivet.targets.cpu_part import PartBuilder
from trivet.writer import (
    ALIGN,
    DebugSpec,
    DebugTimeSpec,
    EntrySpec,
    PartSpec,
    ProgramSpec,
    Records,
    SegmentSpec,
    records,
)

CONST_ID, STATE_ID, ARENA_ID, IO_ID = 0, 1, 2, 32
DATA_OPS = ("nonzero", "item")


def emit(module: Module, ctx: Context | None = None, *, debug: bool = True, quantization: str = "") -> Program:
    """The program of a module that has gone through all passes.

    Args:
        module: planned; its constants are referred to, not copied.
        ctx: its report goes with the program, for printing.
        debug: with the debug table.
        quantization: JSON of the quantisation's report, for the debug table.
    """
    shared = _Shared()
    for graph in module.entries.values():
        shared.collect(graph)
    entries, tables = [], []
    for name, graph in module.entries.items():
        e = _Entry(name, graph, shared)
        entries.append(e.spec())
        tables.append(e.debug())
    spec = ProgramSpec(module.name, entries, shared.segments(), tables if debug else (), quantization,
                       producer=_producer())  # fmt: skip
    return Program.of(spec, ctx.report if ctx is not None else None)


def _producer() -> str:
    from trivet import __version__

    return f"trivet {__version__}"


@dataclass(slots=True)
class _Shared:
    """What entries share: constants and states."""

    pool: Pool = field(default_factory=Pool)
    states: dict[State, int] = field(default_factory=dict)
    state_size: int = 0
    next_io: int = IO_ID

    def collect(self, graph: Graph) -> None:
        for s in graph.plan.storages:
            if s.const is not None:
                s.offset = self.pool.add(layout(s.const.data)[0])
            elif s.state is not None and s.state not in self.states:
                self.states[s.state] = self.state_size
                self.state_size = -(-(self.state_size + s.bound) // ALIGN) * ALIGN

    @property
    def has_init(self) -> bool:
        return any(s.init is not None and bool((s.init != 0).any()) for s in self.states)

    @property
    def const_segment(self) -> int:
        return 0

    @property
    def state_segment(self) -> int:
        return (1 if self.pool.size else 0) if self.has_init else -1

    def segments(self) -> list[SegmentSpec]:
        out = [self.pool.segment()] if self.pool.size else []
        if self.has_init:
            chunks: list[object] = []
            at = 0
            for s, offset in self.states.items():
                data = raw(s.init) if s.init is not None else b""
                chunks += [bytes(offset - at), data]
                at = offset + len(data)
            chunks.append(bytes(self.state_size - at))
            out.append(SegmentSpec(chunks))
        return out


class _Entry:
    def __init__(self, name: str, graph: Graph, shared: _Shared) -> None:
        self.name, self.graph, self.shared = name, graph, shared
        self.plan = graph.plan
        self.dims = DimTable(graph)
        self.regions: list[dict[str, int]] = []
        self.region_of: dict[Storage, int] = {}
        self.storages: list[Storage] = []
        self.storage_row: dict[Value, int] = {}
        self.values: list[dict[str, object]] = []
        self.value_list: list[Value] = []
        self.ids: dict[Value, int] = {}
        self.events: list[Event] = schedule(graph).events
        self.parts: list[PartSpec] = []
        self.steps: list[dict[str, int]] = []

    def spec(self) -> EntrySpec:
        self._regions()
        self._storages()
        inputs = [self._value(v) for v in self.graph.inputs]
        outputs = [self._value(v) for v in self.graph.outputs]
        self._steps()
        storages = self._storage_rows()
        return EntrySpec(
            self.name, self.dims.records(), records("Region", self.regions), storages, records("Value", self.values),
            inputs, outputs, *self._names(), records("Step", self.steps), self.parts, self.plan.times,
            self.plan.lower_bound, json.dumps(self.graph.signature, separators=(",", ":")) if self.graph.signature else "",
            self._quants(),
        )  # fmt: skip

    def _quants(self) -> Records:
        """What the stored integers of activations mean."""
        rows = []
        for i, v in enumerate(self.value_list):
            q = v.type.quant
            if q is not None and q.per_tensor:
                rows.append({"value": i, "zero": q.zero, "scale": float(q.scale), "bits": 8 * SIZES[v.dtype]})
        return records("Quant", rows)

    def _names(self) -> tuple[list[str], list[str]]:
        from trivet.signature import Signature

        names = [v.name for v in self.graph.inputs]
        if self.graph.signature:
            known = Signature.from_json(self.graph.signature).input_names()
            names = known if len(known) == len(names) else names
        return names, [v.name for v in self.graph.outputs]

    # -- memory
    def _regions(self) -> None:
        plan, shared = self.plan, self.shared

        def region(kind: RegionKind, id: int, size: int, **more: int) -> int:
            self.regions.append({"kind": kind, "id": id, "align": ALIGN, "size": size, "segment": -1, **more})
            return len(self.regions) - 1

        kinds = {s.kind for s in plan.storages}
        where: dict[RegionKind, int] = {}
        if RegionKind.const_ in kinds and shared.pool.size:
            where[RegionKind.const_] = region(
                RegionKind.const_, CONST_ID, shared.pool.size, segment=shared.const_segment
            )
        if RegionKind.state in kinds:
            where[RegionKind.state] = region(
                RegionKind.state, STATE_ID, shared.state_size, segment=shared.state_segment
            )
        arenas = {}
        if kinds & {RegionKind.arena, RegionKind.io} or not self.regions:
            for memory, size in plan.arena.items():
                arenas[memory] = region(RegionKind.arena, ARENA_ID + memory, size, memory=memory)
        for s in plan.storages:
            if s.kind == RegionKind.arena:
                self.region_of[s] = arenas[s.memory]
            elif s.kind in where:
                self.region_of[s] = where[s.kind]
        for s in sorted((s for s in plan.storages if s.kind == RegionKind.io), key=lambda s: s.slot):
            self.region_of[s] = region(RegionKind.io, shared.next_io, s.bound, slot=s.slot, home=arenas[s.memory],
                                       home_offset=s.offset, memory=s.memory)  # fmt: skip
            shared.next_io += 1

    def _offset(self, s: Storage) -> int:
        if s.kind == RegionKind.io:
            return 0
        return self.shared.states[s.state] if s.state is not None else s.offset

    def _storages(self) -> None:
        seen: dict[tuple[int, int, int], int] = {}
        order = {RegionKind.const_: 0, RegionKind.state: 1, RegionKind.io: 2, RegionKind.arena: 3}
        rows: list[Storage] = []
        for s in sorted(self.plan.storages, key=lambda s: (s.first, order[s.kind], s.slot, self._offset(s))):
            if s not in self.region_of:  # an empty constant: any place will do
                self.region_of[s] = 0
            key = (self.region_of[s], self._offset(s), s.bound)
            if s.kind == RegionKind.const_ and key in seen:
                self.storage_row[s.root] = seen[key]
                continue
            self.storage_row[s.root] = seen[key] = len(rows)
            rows.append(s)
        self.storages = rows

    def _storage_rows(self) -> Records:
        rows = []
        for s in self.storages:
            dynamic = isinstance(s.size, Dim)
            rows.append({"offset": self._offset(s), "size": s.bound, "first": s.first, "last": s.last,
                         "size_dim": self.dims.row(s.size) if dynamic else 0, "rank": s.rank, "region": self.region_of[s],
                         "align_log2": ALIGN.bit_length() - 1, "flags": int(s.unbounded)})  # fmt: skip
        return records("Storage", rows)

    def _value(self, v: Value) -> int:
        if v in self.ids:
            return self.ids[v]
        p = v.placement
        if p is None:
            raise Error(f"{v} has no place in memory", node=self.name, remedy="this is a bug of trivet: report it")
        element = SIZES[v.dtype]
        fixed = p.offset.terms.get((), 0) if isinstance(p.offset, Dim) else p.offset
        fixed = max(fixed, 0)
        self.ids[v] = len(self.values)
        self.value_list.append(v)
        self.values.append({
            "storage": self.storage_row[p.root], "dtype": int(v.dtype), "rank": len(v.shape), "offset": fixed * element,
            "shift": self.dims.row(p.offset - fixed), "dim": [self.dims.row(d) for d in v.shape],
            "stride": [self.dims.row(1 if d == 1 else s) for d, s in zip(v.shape, p.strides, strict=True)]})  # fmt: skip
        return self.ids[v]

    # -- steps
    def _steps(self) -> None:
        targets = {e.target for e in self.events if e.kind != "kernel"}
        step_at: dict[int, int] = {}
        part: PartBuilder | None = None

        def close() -> None:
            nonlocal part
            if part is not None:
                self.parts.append(PartSpec("cpu", "cpu.1", part.build()))
                part = None

        for t, event in enumerate(self.events):
            if t in targets:
                close()
            if event.kind == "kernel":
                if part is None:
                    part = PartBuilder(self._value, self.dims.row, self.dims.data)
                    self.steps.append({"kind": StepKind.run, "count": 1, "a": len(self.parts), "time": t})
                step_at.setdefault(t, len(self.steps) - 1)
                part.add(event.node, t)
                if event.node.op in DATA_OPS:
                    self.steps[-1]["flags"] = 1
                    close()
                continue
            close()
            step_at[t] = len(self.steps)
            kind = StepKind.branch if event.kind == "branch" else StepKind.jump
            a = self._value(event.value) if event.value is not None else 0
            self.steps.append({"kind": kind, "a": a, "b": event.target, "time": t})
        close()
        for s in self.steps:
            if s["kind"] != StepKind.run:
                s["b"] = step_at.get(s["b"], len(self.steps))

    # -- debug
    def debug(self) -> DebugSpec:
        """The debug table; after spec()."""
        times = []
        for e in self.events:
            n = e.node
            place = f"{n.delegate}: {n.reason}" if e.kind == "kernel" else "runtime"
            times.append(DebugTimeSpec(_op_text(n, e.kind), n.loc.module, n.loc.source, place))
        return DebugSpec([v.name for v in self.value_list], times)


def _op_text(node: Node, kind: str) -> str:
    text = node.op if kind == "kernel" else f"{node.op} {kind}"
    if node.op == "map":
        names = [i.op.name.rstrip("_") for i in node.attrs.code if i.op.name not in ("load", "const_", "dim", "iota")]
        text += f"({', '.join(names[:6])}{', ..' if len(names) > 6 else ''})"
    return f"{text} <- {node.loc.origin}" if node.loc.origin else text
