"""Where a program spends its time: every command with its kernel, its rate, and how near that is to what the machine can do.

The C runtime's hooks write down each command of ordinary runs (runtime_c/src/host_record.c); nothing has to be built or exported for it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trivet import native
from trivet.bench import find_entry, random_inputs
from trivet.cost import Cost, cost, limit
from trivet.error import Error
from trivet.fbs.structs import Isa
from trivet.machine import Machine, measure
from trivet.reader import Command, EntryView, Place
from trivet.runtime import Entry, load
from trivet.taps import file_view

RECORD = np.dtype([("begin", "<u8"), ("end", "<u8"), ("kernel", "<u8"), ("time", "<u4"), ("tiles", "<u4"), ("isa", "<u4"),
                   ("track", "<u4"), ("point", "<u8")])  # fmt: skip
Records = np.ndarray[Any, np.dtype[np.void]]


@dataclass(frozen=True, slots=True)
class Row:
    """One command.

    Attributes:
        time: of the plan.
        op, module, source: operator, module path and line of the model.
        kernel: the C function, without its prefix; "" for what another delegate did.
        algorithm: what the file tells of the way it is done: "winograd 4x4", "depthwise", "pointwise"; else "".
        isa: the instruction set that it is written for.
        tiles: pieces that threads share.
        calls: how often it ran in one run (loops).
        seconds: of all calls of a run, the fastest of the runs.
        share: of the sum of all commands.
        macs, bytes: of all calls.
        device: name of the device that did it; "" for the runtime itself (moves between memories).
        by: what bounds it on this machine: "f32", "bf16", "i8" (multiply-adds) or "memory"; "" unknown.
        rate: operations per second (a multiply-add is two), or bytes where memory bounds.
        limit: the least time over the time taken; 1 is the machine's limit. Beyond 1: caches held what was counted as memory, or an
            algorithm that multiplies less (Winograd).
    """

    time: int
    op: str
    module: str
    source: str
    kernel: str
    algorithm: str
    isa: str
    tiles: int
    calls: int
    seconds: float
    share: float
    macs: int
    bytes: int
    device: str
    by: str
    rate: float
    limit: float

    @property
    def where(self) -> str:
        """Module path and source line."""
        return Place(self.op, self.module, self.source).where

    @property
    def rate_text(self) -> str:
        unit = "GB/s" if self.by in ("memory", "") else "GOP/s" if self.by == "i8" else "GFLOP/s"
        return f"{self.rate * 1e-9:.1f} {unit}"


@dataclass(frozen=True, slots=True)
class Profile:
    """What profile() found.

    Attributes:
        rows: in order of the plan.
        seconds: of a whole run, the fastest.
        runs: how many were measured.
        events: (row, begin, end) of the fastest run in seconds from its start, for a trace.
    """

    name: str
    entry: str
    threads: int
    runs: int
    seconds: float
    machine: Machine
    rows: list[Row]
    events: list[tuple[int, float, float]]

    @property
    def limit(self) -> float:
        """The least time of all commands over the time of a run."""
        return sum(r.limit * r.seconds for r in self.rows) / self.seconds

    def to_json(self) -> dict[str, Any]:
        """For tools."""
        out = asdict(self)
        del out["events"]
        out["limit"] = self.limit
        return out

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes the fastest run as a Chrome trace (chrome://tracing, ui.perfetto.dev), a track for each device."""
        tracks = list(dict.fromkeys(self.rows[i].device for i, _, _ in self.events)) or ["cpu"]
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": 1, "tid": 1, "name": "process_name", "args": {"name": f"{self.name} {self.entry}"}}]  # fmt: skip
        for tid, device in enumerate(tracks, 1):
            name = f"cpu, {self.threads} threads" if device == "cpu" else device or "moves"
            events.append({"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": name}})
        for i, begin, end in self.events:
            r = self.rows[i]
            events.append({"ph": "X", "pid": 1, "tid": 1 + tracks.index(r.device), "cat": r.kernel or "delegate", "name": r.op, "ts": begin * 1e6,
                           "dur": (end - begin) * 1e6,
                           "args": {"module": r.module, "source": r.source, "kernel": r.kernel, "isa": r.isa, "tiles": r.tiles,
                                    "rate": r.rate_text, "limit": round(r.limit, 3), "time": r.time}})  # fmt: skip
        try:
            Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))
        except OSError as e:
            raise Error(f"cannot write {path}: {e.strerror or e}") from None


def profile(
    source: Any,
    values: Sequence[Any] | None = None,
    *,
    entry: str = "",
    sizes: Mapping[str, Sequence[int]] | None = None,
    weights: Any = None,
    threads: int = 1,
    runs: int = 50,
    seconds: float = 5.0,
    machine: Machine | None = None,
    devices: str | Sequence[str] | None = None,
    plugins: Sequence[str | os.PathLike[str]] = (),
) -> Profile:
    """Runs a program and measures each of its commands.

    Args:
        source: path of a .trv file, bytes, or a Program.
        values, entry, sizes, weights: as of bench.
        threads: per run; 0: one per core.
        runs: runs that are measured, fewer when `seconds` are over (but 3).
        seconds: time for the measured runs.
        machine: limits to compare with; None: measured now.
        devices, plugins: as of load.
    """
    net = load(source, weights=weights, threads=threads, devices=devices, plugins=plugins)
    method = find_entry(net, entry)
    if machine is None:
        machine = measure(threads or os.cpu_count() or 1)
    given = list(values) if values is not None else random_inputs(method.inputs, sizes or {})
    with Recorder(method, given) as recorder:
        all_runs = recorder.runs(runs, seconds)
    view = file_view(method)
    plan = view.entry(method.name)
    dims = recorder.dims
    wholes = [whole for whole, _ in all_runs]
    names = [d.name for d in net._context.host.devices]
    rows = _rows(plan, dims, [records for _, records in all_runs], machine, names)
    fastest = all_runs[int(np.argmin(wholes))][1]
    index = {r.time: i for i, r in enumerate(rows)}
    start = int(fastest["begin"].min()) if len(fastest) else 0
    events = [
        (index[int(r["time"])], (int(r["begin"]) - start) * 1e-9, (int(r["end"]) - start) * 1e-9) for r in fastest
    ]
    return Profile(view.name, method.name, machine.threads, len(all_runs), min(wholes), machine, rows, events)


class Recorder:
    """Runs of an entry with every command written down. A context: hooks are set within it. dims: sizes of the last run."""

    def __init__(self, method: Entry, values: Sequence[Any]) -> None:
        n = native.library()
        self.method, self._ffi, self._lib = method, n.ffi, n.lib
        self._recorder = n.ffi.new("trv_recorder *")
        self._room(1 << 12)
        self._bound = method.bind(list(values))
        self.dims: list[int] = []

    def _room(self, count: int) -> None:
        self._records = self._ffi.new("trv_record[]", count)
        self._lib.trv_recorder_init(self._recorder, self._records, count)

    def __enter__(self) -> Recorder:
        hooks = self._ffi.addressof(self._recorder, "hooks")
        self._lib.trv_session_hooks(self.method._session, hooks)
        return self

    def __exit__(self, *exc: object) -> None:
        self._lib.trv_session_hooks(self.method._session, self._ffi.NULL)

    def run(self) -> tuple[float, Records]:
        """One run: its seconds and what it did."""
        while True:
            self._recorder.count = 0
            start = time.perf_counter()
            self.method.execute()
            took = time.perf_counter() - start
            count = int(self._recorder.count)
            if count <= self._recorder.capacity:
                break
            self._room(2 * count)
        if not self.dims:
            view = self._lib.trv_session_view(self.method._session)
            self.dims = [int(view.dims[i]) for i in range(view.dim_count)]
        size = count * RECORD.itemsize
        return took, np.frombuffer(bytes(self._ffi.buffer(self._records, size)) if count else b"", RECORD)

    def runs(self, count: int, seconds: float) -> list[tuple[float, Records]]:
        """Runs after two to warm up, as many as fit in the seconds, but 3."""
        self.run()
        self.run()
        out: list[tuple[float, Records]] = []
        end = time.perf_counter() + seconds
        while len(out) < max(1, count) and (len(out) < 3 or time.perf_counter() < end):
            out.append(self.run())
        return out


def sums(records: Records) -> dict[int, tuple[float, int]]:
    """Seconds and calls of a run by time of the plan."""
    out: dict[int, tuple[float, int]] = {}
    for t, begin, end in zip(records["time"].tolist(), records["begin"].tolist(), records["end"].tolist(), strict=True):
        before = out.get(t, (0.0, 0))
        out[t] = before[0] + (end - begin) * 1e-9, before[1] + 1
    return out


def kernel_name(address: int) -> str:
    """A kernel's name without its prefix, from a record."""
    return native.text(native.library().ffi.cast("const char *", address)).removeprefix("trvk_") if address else ""


def _rows(
    plan: EntryView, dims: Sequence[int], runs: Sequence[Records], machine: Machine, devices: Sequence[str]
) -> list[Row]:
    best: dict[int, tuple[float, int]] = {}
    for records in runs:
        for t, (seconds, calls) in sums(records).items():
            if t not in best or seconds < best[t][0]:
                best[t] = seconds, calls
    how = {int(r["time"]): r for r in runs[-1]}
    commands = {c.time: c for c in plan.commands}
    total = sum(s for s, _ in best.values()) or 1.0
    weights = sum(plan.weight_bytes.values())
    out = []
    for t in sorted(best):
        seconds, calls = best[t]
        place, record = plan.place(t), how.get(t)
        command = commands.get(t)
        work = cost(plan, command, dims) if command is not None and command.attrs is not None else Cost(0, "", 0, 0, 0)
        least = limit(work, machine, weights)
        by = least.by if work.bytes else ""
        amount = 2 * work.macs if by not in ("memory", "") else work.bytes
        out.append(Row(t, place.brief or (command.op if command is not None else ""), place.module, place.source,
                       kernel_name(int(record["kernel"])) if record is not None else "",
                       _algorithm(plan, command, dims) if command is not None else "",
                       isa_name(int(record["isa"])) if record is not None else "",
                       int(record["tiles"]) if record is not None else 1, calls, seconds, seconds / total, work.macs * calls,
                       work.bytes * calls, device_name(devices, record), by, amount * calls / max(seconds, 1e-12),
                       least.seconds * calls / max(seconds, 1e-12)))  # fmt: skip
    return out


def _algorithm(plan: EntryView, command: Command, dims: Sequence[int]) -> str:
    if command.op not in ("conv", "qconv"):
        return ""
    a, x = command.attrs, plan.values[command.inputs[0]]
    if int(a["packed"]) > 1:
        return f"winograd {a['packed']}x{a['packed']}"
    if 1 < int(a["groups"]) == int(dims[int(x["dim"][1])]):
        return "depthwise"
    return "pointwise" if a["packed"] and all(k == 1 for k in a["kernel"][: int(a["nd"])]) else ""


def device_name(devices: Sequence[str], record: Any) -> str:
    """Who did what a record tells of."""
    track = len(devices) if record is None else int(record["track"])
    return devices[track] if track < len(devices) else ""


def isa_name(bit: int) -> str:
    """The name of an instruction set; "" for none."""
    return Isa(bit).name if bit in set(Isa) else ""
