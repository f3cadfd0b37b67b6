"""Measures on this machine which of its kernels, and how many threads, each command is best run with, and stores that in the file.

What may be chosen is what a driver may do anyway: the kernel of one instruction set (a row of hal/cpu/kernels.def) and the most
threads that share a command. Results stay those of the operator: integers to the bit, floats within rounding. A machine that has
not what was chosen takes its own choice (schema/cpu.fbs, Command.isa and workers), so a tuned file runs everywhere.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trivet import native
from trivet.bench import random_inputs
from trivet.crc import crc32c
from trivet.fbs.structs import STRUCTS, Isa
from trivet.profile import Recorder, kernel_name, sums
from trivet.program import Program
from trivet.reader import FileView
from trivet.runtime import load

GAIN = 0.03  # a choice must be that much faster than the driver's own, or the driver's stays


@dataclass(frozen=True, slots=True)
class Choice:
    """What was found for one command. isa, workers: 0 where the driver's own choice stays. before, after: seconds."""

    time: int
    op: str
    where: str
    kernel: str
    isa: int
    workers: int
    before: float
    after: float


@dataclass(slots=True)
class Tuned:
    """What tune() made.

    Attributes:
        program: with the choices; the very same as before where nothing was better.
        threads: that it was measured with.
        choices: by entry: the commands that something better was found for.
        before, after: by entry: seconds of the fastest run without and with all of them.
    """

    program: Program
    threads: int
    choices: dict[str, list[Choice]] = field(default_factory=dict)
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = []
        for entry, found in self.choices.items():
            a, b = self.before[entry], self.after[entry]
            lines.append(f"entry {entry}, {self.threads} threads: {a * 1e3:.4g} ms before, {b * 1e3:.4g} ms after "
                         f"({len(found)} commands changed)")  # fmt: skip
            for c in found:
                how = ", ".join(t for t in (c.kernel, f"at most {c.workers} threads" if c.workers else "") if t)
                lines.append(f"  {c.op} {c.where}: {how}, {c.before * 1e6:.3g} -> {c.after * 1e6:.3g} us")
        return "\n".join(lines)

    __repr__ = __str__

    def to_json(self) -> dict[str, Any]:
        """For tools."""
        from dataclasses import asdict

        return {"threads": self.threads, "before": self.before, "after": self.after,
                "choices": {e: [asdict(c) for c in found] for e, found in self.choices.items()}}  # fmt: skip


def tune(
    source: str | os.PathLike[str] | bytes | Program,
    *,
    threads: int = 0,
    entry: str = "",
    values: Mapping[str, Sequence[Any]] | None = None,
    sizes: Mapping[str, Sequence[int]] | None = None,
    weights: Any = None,
    rounds: int = 5,
    seconds: float = 20.0,
    progress: Callable[[int, int], None] | None = None,
) -> Tuned:
    """Measures the alternatives of every command, interleaved, and keeps those that are faster by 3 % at least.

    Args:
        source: path of a .trv file, its bytes, or a Program. The file itself is not changed.
        threads: that the program will run with; 0: one per core.
        entry: only this one; "": all.
        values: by entry, one array per input slot; others get random numbers.
        sizes: shapes of inputs by name, for dynamic ones.
        weights: the external weights file, where the program has one.
        rounds: how often every alternative is loaded and measured.
        seconds: for each entry, all alternatives together.
        progress: called with (rounds done, rounds), per entry.

    Raises:
        Error: as load.
    """
    work = _Work(source, weights, threads or os.cpu_count() or 1)
    result = Tuned(Program(None, work.data), work.threads)
    names = [entry] if entry else [e.name for e in work.view.entries]
    for name in names:
        given = (values or {}).get(name)
        result.choices[name], result.before[name], result.after[name] = work.entry(
            name, given, sizes or {}, rounds, seconds, progress
        )
    result.program = Program(None, work.data.toreadonly())
    return result


class _Work:
    """A copy of the file whose choices are changed between measurements."""

    def __init__(self, source: Any, weights: Any, threads: int) -> None:
        self.threads, self.weights = threads, weights
        data = source.to_bytes() if isinstance(source, Program) else source
        if not isinstance(data, (bytes, memoryview)):
            load(data, weights=weights, threads=1, defer_crc=True).close()  # what is wrong with the file is said there
            data = Path(data).read_bytes()
        room = np.empty(len(data) + 64, np.uint8)
        skip = -room.ctypes.data % 64
        copy = room[skip : skip + len(data)]
        copy[:] = np.frombuffer(data, np.uint8)
        self.data = copy.data
        load(self.data, weights=weights, threads=1).close()  # verified before it is taken apart
        self.view = FileView(self.data)

    def entry(self, name: str, given: Sequence[Any] | None, sizes: Mapping[str, Sequence[int]], rounds: int, seconds: float,
              progress: Callable[[int, int], None] | None) -> tuple[list[Choice], float, float]:  # fmt: skip
        plan = self.view.entry(name)
        rows = [r for part in plan.command_rows() for r in part]
        kept = {int(r["time"]): (int(r["isa"]), int(r["workers"])) for r in rows}

        def write(choices: Mapping[int, tuple[int, int]]) -> None:
            for r in rows:
                r["isa"], r["workers"] = choices.get(int(r["time"]), (0, 0))
            sign(self.view)

        def measure(choices: Mapping[int, tuple[int, int]], share: float) -> _Measured:
            write(choices)
            net = load(self.data, weights=self.weights, threads=self.threads, defer_crc=True)
            method = net.entry(name)
            inputs = list(given) if given is not None else random_inputs(method.inputs, sizes)
            with Recorder(method, inputs) as recorder:
                runs = recorder.runs(200, share)
            net.close()
            return _Measured.of(runs)

        variants = self._variants(rows)
        share = seconds / rounds / (len(variants) + 1)
        best = [_Measured() for _ in variants]
        for i in range(rounds):
            for k, (masks, workers) in enumerate(variants):
                best[k].merge(measure({int(r["time"]): (masks, workers) for r in rows}, share))
            if progress is not None:
                progress(i + 1, rounds)
        chosen = _choose(variants, best)
        if not chosen:
            write(kept)
            return [], best[0].whole, best[0].whole
        before, after = _Measured(), _Measured()
        for _ in range(rounds):
            before.merge(measure({}, share))
            after.merge(measure(chosen, share))
        if after.whole >= before.whole:  # alone each was faster, together they are not
            write(kept)
            return [], before.whole, before.whole
        write(chosen)
        found = []
        for t, (isa, workers) in sorted(chosen.items()):
            place = plan.place(t)
            found.append(Choice(t, place.brief, place.where, after.kernels.get(t, ("", 0))[0] if isa else "", isa, workers,
                                before.times[t], after.times[t]))  # fmt: skip
        return found, before.whole, after.whole

    def _variants(self, rows: Sequence[Any]) -> list[tuple[int, int]]:
        """(instruction sets, workers) to run everything with; the driver's own choice first."""
        n = native.library()
        names = {name for op in {int(r["op"]) for r in rows} for name in native.isa_levels(op)} - {"ref"}
        masks = {int(n.lib.trvk_isa_mask(name.encode())) for name in names} - {int(n.lib.trvk_isa_mask(n.ffi.NULL))}
        return [(m, w) for w in (0, *_halves(self.threads)) for m in (0, *sorted(masks, reverse=True))]


@dataclass(slots=True)
class _Measured:
    """The least seconds of a run and of its commands; kernel and instruction set of each."""

    whole: float = math.inf
    times: dict[int, float] = field(default_factory=dict)
    kernels: dict[int, tuple[str, int]] = field(default_factory=dict)

    @staticmethod
    def of(runs: Sequence[tuple[float, Any]]) -> _Measured:
        out = _Measured(min(w for w, _ in runs))
        for _, records in runs:
            for t, (s, _) in sums(records).items():
                out.times[t] = min(s, out.times.get(t, math.inf))
        out.kernels = {int(r["time"]): (kernel_name(int(r["kernel"])), int(r["isa"])) for r in runs[-1][1]}
        return out

    def merge(self, other: _Measured) -> None:
        self.whole = min(self.whole, other.whole)
        for t, s in other.times.items():
            self.times[t] = min(s, self.times.get(t, math.inf))
        self.kernels.update(other.kernels)


def _choose(variants: Sequence[tuple[int, int]], best: Sequence[_Measured]) -> dict[int, tuple[int, int]]:
    """(isa, workers) by time, for commands that another variant than the first runs faster."""
    chosen = {}
    own = best[0]
    for t, base in own.times.items():
        k = min(range(len(variants)), key=lambda k: best[k].times.get(t, math.inf))
        if best[k].times[t] > base * (1 - GAIN):
            continue
        isa = best[k].kernels[t][1]
        if isa == Isa.ref and own.kernels[t][1] != Isa.ref:
            continue  # a file tuned here would be slow elsewhere
        isa = 0 if isa == own.kernels[t][1] else isa
        if isa or variants[k][1]:
            chosen[t] = isa, variants[k][1]
    return chosen


def _halves(threads: int) -> list[int]:
    """Fewer workers worth trying: half, a quarter, .., one."""
    out = []
    while threads > 1:
        threads //= 2
        out.append(threads)
    return out


def sign(view: FileView) -> None:
    """Makes the head's checksum true after its bytes have changed."""
    head = view.program.Head()
    row = np.frombuffer(view.data, STRUCTS["Head"], 1, head._tab.Pos)[0]
    row["crc"] = 0
    row["crc"] = crc32c(view.data[: int(row["size"])])


def choices(source: Program | FileView) -> dict[str, dict[int, tuple[str, int]]]:
    """What a file has chosen: by entry and time, (instruction set, workers); "" and 0 where nothing."""
    view = source.view if isinstance(source, Program) else source
    return {e.name: {int(r["time"]): (Isa(int(r["isa"])).name if int(r["isa"]) in set(Isa) else "", int(r["workers"]))
                     for part in e.command_rows() for r in part if r["isa"] or r["workers"]} for e in view.entries}  # fmt: skip
