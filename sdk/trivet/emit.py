"""Turns planned graphs into the description of a program file: the last stage of lowering."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from trivet.constants import Pool, layout, raw
from trivet.dimtable import DimTable
from trivet.error import Error
from trivet.fbs.structs import RegionKind, StepKind
from trivet.ir.dim import Dim
from trivet.ir.graph import Graph, Module, Node, State, Value
from trivet.ir.types import SIZES
from trivet.pieces import Border, Borders
from trivet.pipeline import Context
from trivet.program import Program
from trivet.schedule import DATA_OPS, Event, Run, Storage, runs, schedule
from trivet.targets.base import Bytes, Compiled, Piece, Targets, find
from trivet.waits import steps_of, waits
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

CONST_ID, STATE_ID, ARENA_ID, IO_ID, MORE_ID = 0, 1, 2, 32, 0x8000
MEMORIES = 1  # feature bit: memories of devices


def emit(module: Module, ctx: Context | None = None, *, debug: bool = True, quantization: str = "") -> Program:
    """The program of a module that has gone through all passes.

    Args:
        module: planned; its constants are referred to, not copied.
        ctx: its report goes with the program, for printing.
        debug: with the debug table.
        quantization: JSON of the quantisation's report, for the debug table.
    """
    targets = find(ctx.target if ctx is not None and ctx.target is not None else "cpu")
    shared = _Shared(targets=targets, fallback=ctx is None or ctx.fallback)
    shared.collect(list(module.entries.values()))
    entries, tables = [], []
    for name, graph in module.entries.items():
        e = _Entry(name, graph, shared)
        entries.append(e.spec())
        tables.append(e.debug())
    memories = next((g.plan.memories for g in module.entries.values()), ())
    owned = any(m.delegate for m in memories)
    spec = ProgramSpec(module.name, entries, shared.segments(), tables if debug else (), quantization, producer=_producer(),
                       features=MEMORIES if owned else 0,
                       memories=[(m.name, m.delegate) for m in memories] if owned else ())  # fmt: skip
    return Program.of(spec, ctx.report if ctx is not None else None)


def _producer() -> str:
    from trivet import __version__

    return f"trivet {__version__}"


@dataclass(frozen=True, slots=True)
class _Span:
    """A region over a segment that entries share."""

    kind: RegionKind
    id: int
    memory: int
    segment: int
    size: int


@dataclass(slots=True)
class _Shared:
    """What entries share: constants, in one pool per set of memories that read them, and states, laid out per memory."""

    targets: Targets
    fallback: bool
    pools: dict[tuple[int, ...], Pool] = field(default_factory=dict)
    states: dict[State, tuple[int, int]] = field(default_factory=dict)  # memory, offset
    state_size: dict[int, int] = field(default_factory=dict)
    next_io: int = IO_ID
    extra: list[SegmentSpec] = field(default_factory=list)  # data of large parts
    _where: dict[Storage, tuple[int, ...]] = field(default_factory=dict)

    def collect(self, graphs: list[Graph]) -> None:
        readers: dict[tuple[object, ...], set[int]] = {}
        constants: list[tuple[Storage, Any, tuple[object, ...]]] = []
        for graph in graphs:
            for s in graph.plan.storages:
                if s.const is not None:
                    data = layout(s.const.data)[0]
                    key = Pool.key(data)
                    readers.setdefault(key, set()).add(s.memory)
                    constants.append((s, data, key))
                elif s.state is not None and s.state not in self.states:
                    at = self.state_size.get(s.memory, 0)
                    self.states[s.state] = s.memory, at
                    self.state_size[s.memory] = -(-(at + s.bound) // ALIGN) * ALIGN
        for memories in sorted({tuple(sorted(m)) for m in readers.values()}):
            self.pools[memories] = Pool()
        for s, data, key in constants:
            self._where[s] = tuple(sorted(readers[key]))
            s.offset = self.pools[self._where[s]].add(data)
        self.pools = {m: p for m, p in self.pools.items() if p.size}

    def _inits(self) -> list[int]:
        """Memories with states that do not all begin as zeros."""
        have = {m for s, (m, _) in self.states.items() if s.init is not None and bool((s.init != 0).any())}
        return sorted(have)

    def spans(self) -> list[_Span]:
        """All shared regions, the same in every entry that has them."""
        out: list[_Span] = []
        ids = iter(range(MORE_ID, MORE_ID << 1))
        for segment, (memories, pool) in enumerate(self.pools.items()):
            out += [_Span(RegionKind.const_, CONST_ID if memories == (0,) else next(ids), m, segment, pool.size)
                    for m in memories]  # fmt: skip
        inits = self._inits()
        for m, size in sorted(self.state_size.items()):
            segment = len(self.pools) + inits.index(m) if m in inits else -1
            out.append(_Span(RegionKind.state, next(ids) if m else STATE_ID, m, segment, size))
        return out

    def span_of(self, s: Storage) -> tuple[RegionKind, int, int]:
        """What a constant's or state's region is found by: kind, memory, segment."""
        if s.kind == RegionKind.const_:
            where = list(self.pools)
            return s.kind, s.memory, where.index(self._where[s]) if self._where[s] in self.pools else -1
        inits = self._inits()
        return s.kind, s.memory, len(self.pools) + inits.index(s.memory) if s.memory in inits else -1

    def part(self, delegate: str, made: Compiled, inputs: list[int], outputs: list[int]) -> PartSpec:
        """A part as it goes into the file: large ones with their data in a segment."""
        if made.segment:
            at = len(self.pools) + len(self._inits()) + len(self.extra)
            self.extra.append(SegmentSpec(made.chunks))
            return PartSpec(delegate, made.format, b"", at, inputs, outputs)
        data = b"".join(bytes(memoryview(c).cast("B")) for c in made.chunks)
        return PartSpec(delegate, made.format, data, -1, inputs, outputs)

    def segments(self) -> list[SegmentSpec]:
        out = [pool.segment() for pool in self.pools.values()]
        for memory in self._inits():
            chunks: list[object] = []
            at = 0
            for s, (m, offset) in self.states.items():
                if m == memory:
                    data = raw(s.init) if s.init is not None else b""
                    chunks += [bytes(offset - at), data]
                    at = offset + len(data)
            chunks.append(bytes(self.state_size[memory] - at))
            out.append(SegmentSpec(chunks))
        return out + self.extra


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
            inputs, outputs, *slot_names(self.graph), records("Step", self.steps), self.parts, self.plan.times,
            self.plan.lower_bound, json.dumps(self.graph.signature, separators=(",", ":")) if self.graph.signature else "",
            self._quants(), self._waits(),
        )  # fmt: skip

    def _quants(self) -> Records:
        """What the stored integers of activations mean."""
        rows = []
        for i, v in enumerate(self.value_list):
            q = v.type.quant
            if q is not None and q.per_tensor:
                rows.append({"value": i, "zero": q.zero, "scale": float(q.scale), "bits": 8 * SIZES[v.dtype]})
        return records("Quant", rows)

    def _waits(self) -> Records:
        """What steps of several devices wait for."""
        steps = steps_of(self.graph, self.shared.targets, self.shared.fallback)
        if len({s.device for s in steps if not s.barrier}) < 2:
            return records("Wait")
        return records("Wait", ({"step": s, "on": on} for s, on in waits(steps, self.plan)))

    # -- memory
    def _regions(self) -> None:
        plan, shared = self.plan, self.shared

        def region(kind: RegionKind, id: int, size: int, **more: int) -> int:
            self.regions.append({"kind": kind, "id": id, "align": ALIGN, "size": size, "segment": -1, **more})
            return len(self.regions) - 1

        kinds = {s.kind for s in plan.storages}
        mine = {shared.span_of(s) for s in plan.storages if s.kind in (RegionKind.const_, RegionKind.state)}
        where: dict[tuple[RegionKind, int, int], int] = {}
        for p in shared.spans():
            if (p.kind, p.memory, p.segment) in mine:
                where[p.kind, p.memory, p.segment] = region(p.kind, p.id, p.size, segment=p.segment, memory=p.memory)
        arenas = {}
        if kinds & {RegionKind.arena, RegionKind.io} or not self.regions:
            for memory, size in plan.arena.items():
                arenas[memory] = region(RegionKind.arena, ARENA_ID + memory, size, memory=memory)
        for s in plan.storages:
            if s.kind == RegionKind.arena:
                self.region_of[s] = arenas[s.memory]
            elif s.kind != RegionKind.io and shared.span_of(s) in where:
                self.region_of[s] = where[shared.span_of(s)]
        for s in sorted((s for s in plan.storages if s.kind == RegionKind.io), key=lambda s: s.slot):
            self.region_of[s] = region(RegionKind.io, shared.next_io, s.bound, slot=s.slot, home=arenas[s.memory],
                                       home_offset=s.offset, memory=s.memory)  # fmt: skip
            shared.next_io += 1

    def _offset(self, s: Storage) -> int:
        if s.kind == RegionKind.io:
            return 0
        return self.shared.states[s.state][1] if s.state is not None else s.offset

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
        step_at: dict[int, int] = {}
        todo = {r.first: r for r in runs(self.events)}
        borders = Borders(self.graph) if any(r.delegate != "cpu" for r in todo.values()) else None
        for t, event in enumerate(self.events):
            if event.kind == "kernel" and t not in todo:
                continue
            step_at[t] = len(self.steps)
            if event.kind == "kernel":
                self._run(todo[t], borders)
            elif event.kind == "transfer":
                self._copy(event.node, t)
            else:
                kind = StepKind.branch if event.kind == "branch" else StepKind.jump
                a = self._value(event.value) if event.value is not None else 0
                self.steps.append({"kind": kind, "a": a, "b": event.target, "time": t})
        for s in self.steps:
            if s["kind"] in (StepKind.branch, StepKind.jump):
                s["b"] = step_at.get(s["b"], len(self.steps))

    def _run(self, run: Run, borders: Borders | None) -> None:
        """One part and its alternative for the CPU."""
        shared = self.shared
        target = shared.targets.named(run.delegate)
        times = list(range(run.first, run.last + 1))
        data = run.nodes[-1].op in DATA_OPS
        step = {
            "kind": StepKind.run,
            "count": 1,
            "a": len(self.parts),
            "time": run.first,
            **({"flags": 1} if data else {}),
        }
        self.steps.append(step)
        kernels = Piece(
            run.nodes, times, (), (), self.graph, self._value, self.dims.row, self.dims.data, self._constant
        )
        if run.delegate == "cpu":
            self.parts.append(shared.part("cpu", target.compile(kernels), [], []))
            return
        assert borders is not None
        border = borders.of(run)
        at = {id(n): t for n, t in zip(run.nodes, times, strict=True)}
        piece = replace(kernels, nodes=border.nodes, times=[at.get(id(n), -1) for n in border.nodes], inputs=border.inputs,
                        outputs=border.outputs, value=self._border(border) if target.opaque else self._value)  # fmt: skip
        ids = [[self._value(v) for v in side] for side in (border.inputs, border.outputs)]
        self.parts.append(shared.part(run.delegate, target.compile(piece), *ids))
        if shared.fallback:
            other = replace(kernels, nodes=[replace(n, tmp=n.spare) for n in run.nodes])
            self.parts.append(shared.part("cpu", shared.targets.named("cpu").compile(other), *ids))
            step["count"] = 2

    def _border(self, border: Border) -> Callable[[Value], int]:
        """Ids for an opaque delegate: of what crosses its border."""
        known = {*border.inputs, *border.outputs}

        def value(v: Value) -> int:
            if v not in known:
                raise Error(f"{v} does not cross the border of the part", node=self.name,
                            remedy="an opaque target may only ask for the piece's inputs and outputs")  # fmt: skip
            return self._value(v)

        return value

    def _constant(self, v: Value) -> Bytes:
        p = v.placement
        if v.const is None or p is None or p.root not in self.storage_row:
            raise Error(f"{v} is no constant of the file", node=self.name,
                        remedy="Piece.constant takes constants that kernels of the piece read; none with Target.embeds")  # fmt: skip
        s = self.storages[self.storage_row[p.root]]
        return Bytes(self.region_of[s], self._offset(s), s.bound)

    def _copy(self, node: Node, time: int) -> None:
        x, y = node.inputs[0], node.outputs[0]
        assert x is not None
        self.steps.append({"kind": StepKind.copy, "a": self._value(x), "b": self._value(y), "time": time})

    # -- debug
    def debug(self) -> DebugSpec:
        """The debug table; after spec()."""
        times = []
        for e in self.events:
            n = e.node
            place = f"{n.delegate}: {n.reason}" if e.kind == "kernel" else "runtime"
            if e.kind == "transfer":
                place = f"{n.inputs[0].memory or 'host'} to {n.outputs[0].memory or 'host'}"  # type: ignore[union-attr]
            times.append(DebugTimeSpec(_op_text(n, e.kind), n.loc.module, n.loc.source, place))
        return DebugSpec([v.name for v in self.value_list], times)


def slot_names(graph: Graph) -> tuple[list[str], list[str]]:
    """Names of an entry's inputs and outputs."""
    from trivet.signature import Signature

    names = [v.name for v in graph.inputs]
    if graph.signature:
        known = Signature.from_json(graph.signature).input_names()
        names = known if len(known) == len(names) else names
    return names, [v.name for v in graph.outputs]


def _op_text(node: Node, kind: str) -> str:
    text = node.op if kind in ("kernel", "transfer") else f"{node.op} {kind}"
    if node.op == "map":
        names = [i.op.name.rstrip("_") for i in node.attrs.code if i.op.name not in ("load", "const_", "dim", "iota")]
        text += f"({', '.join(names[:6])}{', ..' if len(names) > 6 else ''})"
    return f"{text} <- {node.loc.origin}" if node.loc.origin else text
