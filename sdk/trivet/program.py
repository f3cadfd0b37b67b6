"""A program as a value: made by export, saved to a file, printed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trivet.error import Error
from trivet.fbs.structs import RegionKind, StepKind
from trivet.reader import EntryView, FileView
from trivet.writer import ProgramSpec, write_file, write_memory

if TYPE_CHECKING:
    from trivet.quantize.report import Report


class Program:
    """What export returns. Immutable. `to_bytes` is the file; `save` writes it."""

    def __init__(self, spec: ProgramSpec | None, data: Any = None, report: Any = None) -> None:
        self._spec, self._data, self.report = spec, data, report
        self._view: FileView | None = None

    @staticmethod
    def of(spec: ProgramSpec, report: Any = None) -> Program:
        """A program fresh from the emitter. report: what the passes noted."""
        return Program(spec, None, report)

    @staticmethod
    def read(source: str | os.PathLike[str] | bytes) -> Program:
        """A program from a file or its bytes, for inspection. trivet.load runs it and verifies it."""
        data = _aligned(source if isinstance(source, bytes) else Path(source).read_bytes())
        if bytes(data[4:8]) != b"TRV1":
            raise Error(
                "this is no trivet program: its identifier is not TRV1",
                node="" if isinstance(source, bytes) else str(source),
            )
        return Program(None, data)

    @property
    def name(self) -> str:
        return self._spec.name if self._spec is not None else self.view.name

    def to_bytes(self) -> memoryview:
        """The whole file, read-only, aligned for running in place; made once."""
        if self._data is None:
            assert self._spec is not None
            self._data = write_memory(self._spec)
        return self._data  # type: ignore[no-any-return]

    def __bytes__(self) -> bytes:
        return bytes(self.to_bytes())

    @property
    def view(self) -> FileView:
        """The file's tables."""
        if self._view is None:
            self._view = FileView(self.to_bytes())
        return self._view

    def save(
        self, path: str | os.PathLike[str], *, weights: str | os.PathLike[str] | None = None, debug: bool = True
    ) -> Path:
        """Writes the program.

        Args:
            path: of the file, by custom ending in .trv.
            weights: None: weights in the same file. A path: weights in a file of their own there. "external": in
                <path>.weights.
            debug: with names and source lines; False: without them (smaller; messages name positions only).

        Returns:
            The path.

        Raises:
            Error: files that cannot be written.
        """
        target = Path(path)
        external = None if weights is None else Path(f"{target}.weights" if weights == "external" else weights)
        if self._spec is None:
            if external is not None or not debug:
                raise Error("a program read from a file can only be saved as it is",
                            remedy="choose weights= and debug= when saving what export returned")  # fmt: skip
            with _writing(target):
                target.write_bytes(self.to_bytes())
            return target
        spec = self._spec
        if not debug:
            spec = replace(spec, debug=(), quantization="")
        if external is not None:
            outside = {
                int(r["segment"]) for e in spec.entries for r in e.regions if r["kind"] == RegionKind.const_
            } or {0}
            spec = replace(spec, segments=[replace(s, external=i in outside) for i, s in enumerate(spec.segments)])
            if not spec.segments:
                external = None
        with _writing(target):
            write_file(spec, target, external)
        return target

    def summary(self) -> dict[str, Any]:
        """Figures of the program as plain data."""
        v = self.view
        return {
            "name": v.name,
            "producer": v.producer,
            "file_bytes": v.size,
            "segments": [{"bytes": int(s["size"]), "offset": int(s["offset"])} for s in v.segments],
            "entries": [entry_summary(e) for e in v.entries],
            **({"quantization": v.quantization} if v.quantization is not None else {}),
        }

    @property
    def quantization(self) -> Report | None:
        """How the model was quantised and how well, layer by layer; None where it was not, or where the file is stripped."""
        from trivet.quantize.report import Report

        data = self.view.quantization
        return None if data is None else Report.from_json(data)

    def with_quantization(self, report: Report) -> Program:
        """The same program with another report; only of one fresh from export."""
        assert self._spec is not None
        text = json.dumps(report.to_json(), separators=(",", ":"))
        return Program(replace(self._spec, quantization=text), None, self.report)

    def __str__(self) -> str:
        s = self.summary()
        lines = [f"program {s['name']} ({s['producer']}), {s['file_bytes']:,} bytes"]
        for e in s["entries"]:
            lines += _entry_lines(e)
        if (quantization := self.quantization) is not None:
            lines += quantization.head()
        if self.report is not None:
            for name in (
                "partition",
                "assign_layout",
                "choose_winograd",
                "select_kernels",
                "pack_weights",
                "order_nodes",
                "assign_storage",
            ):
                lines += [f"  {name}: {text}" for text in self.report.notes.get(name, ())]
        return "\n".join(lines)

    __repr__ = __str__


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise Error(f"cannot write {path}: {e.strerror or e}") from None


def entry_summary(e: EntryView) -> dict[str, Any]:
    """Figures of one entry."""
    memory = {}
    for kind in RegionKind:
        rows = [r for r in e.regions if r["kind"] == kind]
        memory[kind.name.rstrip("_")] = sum(int(r["size"]) for r in rows)
    ops: dict[str, int] = {}
    delegates: dict[str, int] = {}
    for c in e.commands:
        ops[c.op] = ops.get(c.op, 0) + 1
        if c.delegate:
            delegates[c.delegate] = delegates.get(c.delegate, 0) + 1

    def quant(v: int) -> dict[str, Any]:
        q = e.quants.get(v)
        return {} if q is None else {"scale": q.scale, "zero": q.zero, "bits": q.bits}

    def slots(ids: list[int], names: int, get: Any) -> list[dict[str, Any]]:
        from trivet.fbs.structs import DType

        return [{"name": (get(i) or b"").decode() if i < names else "", "dtype": DType(int(e.values[v]["dtype"])).name,
                 "shape": e.shape(v), **quant(v)} for i, v in enumerate(ids)]  # fmt: skip

    return {
        "name": e.name,
        "inputs": slots(e.inputs, e.table.InputNamesLength(), e.table.InputNames),
        "outputs": slots(e.outputs, e.table.OutputNamesLength(), e.table.OutputNames),
        "memory": memory,
        "weights": e.weight_bytes,
        "lower_bound": e.lower_bound,
        "dynamic_plan": bool(np.any(e.storages["flags"] & 1)),
        "memories": [_memory(e, i) for i in range(len(e.memories))],
        "transfers": ops.pop("transfer", 0),
        "waits": len(e.waits),
        "alternatives": sum(int(s["count"]) > 1 for s in e.steps if s["kind"] == StepKind.run),
        "commands": sum(ops.values()),
        "steps": len(e.steps),
        "ops": dict(sorted(ops.items(), key=lambda t: (-t[1], t[0]))),
        "delegates": delegates,
    }


def _memory(e: EntryView, index: int) -> dict[str, Any]:
    """What of an entry lies in one memory."""
    rows = [r for r in e.regions if r["memory"] == index]
    kinds = {k.name.rstrip("_"): sum(int(r["size"]) for r in rows if r["kind"] == k) for k in RegionKind}
    return {"name": e.memories[index].name, "delegate": e.memories[index].delegate, **kinds}


def _entry_lines(e: dict[str, Any]) -> list[str]:
    def slot(s: dict[str, Any]) -> str:
        quant = f" x {s['scale']:.6g} from {s['zero']}" if "scale" in s else ""
        return f"{s['name']}: {s['dtype']}[{', '.join(s['shape'])}]{quant}"

    m = e["memory"]
    arena, bound = m["arena"], e["lower_bound"]
    over = f"{100 * (arena / bound - 1):+.1f} %" if bound else ""
    kinds = f" ({', '.join(f'{k} {n:,}' for k, n in e['weights'].items())})" if len(e["weights"]) > 1 else ""
    return [
        f"entry {e['name']}({', '.join(map(slot, e['inputs']))}) -> {', '.join(map(slot, e['outputs'])) or 'nothing'}",
        f"  memory: weights {m['const']:,}{kinds}, state {m['state']:,}, arena {arena:,} bytes (lower bound {bound:,} {over})"
        + (", planned again for the sizes of a run" if e["dynamic_plan"] else ""),
        *(
            f"    {m['name']}{' of ' + m['delegate'] if m['delegate'] else ''}: weights {m['const']:,}, state {m['state']:,}, "
            f"arena {m['arena']:,} bytes"
            for m in e["memories"]
        ),
        f"  placement: {', '.join(f'{d} {n}' for d, n in e['delegates'].items()) or 'none'}; {e['steps']} steps, "
        f"{e['commands']} commands: {', '.join(f'{n} {op}' for op, n in e['ops'].items())}"
        + (f"; {e['transfers']} transfers" if e["transfers"] else ""),
    ]


def _aligned(data: Any) -> memoryview:
    """A copy of data that begins at a multiple of 64."""
    n = len(data)
    room = np.empty(n + 64, np.uint8)
    skip = -room.ctypes.data % 64
    out = room[skip : skip + n]
    out[:] = np.frombuffer(data, np.uint8)
    return out.data.toreadonly()
