"""A program file as tables and charts for people, and as plain data for tools."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from trivet.fbs.structs import DType, RegionKind, StepKind
from trivet.reader import Command, EntryView, FileView, Live

_BARS = " ▁▂▃▄▅▆▇█"
_KINDS = {RegionKind.const_: "const", RegionKind.arena: "arena", RegionKind.state: "state", RegionKind.io: "io"}


def size_text(n: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "KiB", "MiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" or n == int(n) else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.2f} GiB"


def chart(sums: list[int], width: int) -> str:
    """One line of bars; each column is the largest value of its stretch."""
    if not sums:
        return ""
    top = max(max(sums), 1)
    columns = np.array_split(np.array(sums), min(width, len(sums)))
    return "".join(_BARS[-(-int(c.max()) * (len(_BARS) - 1) // top)] for c in columns)


def type_text(entry: EntryView, value: int) -> str:
    """dtype[sizes] of a value; with scale and zero point of a quantised one: i8[1, 10] x 0.0235 from -128."""
    q = entry.quants.get(value)
    quant = "" if q is None else f" x {q.scale:.4g} from {q.zero}"
    return f"{DType(int(entry.values[value]['dtype'])).name}[{', '.join(entry.shape(value))}]{quant}"


def entry_data(entry: EntryView) -> dict[str, Any]:
    """Everything that inspect prints, for --json."""
    names = entry.value_names
    live = list(entry.live())
    return {
        "name": entry.name,
        "inputs": [{"name": _slot_name(entry, i, True), "type": type_text(entry, v)} for i, v in enumerate(entry.inputs)],
        "outputs": [{"name": _slot_name(entry, i, False), "type": type_text(entry, v)} for i, v in enumerate(entry.outputs)],
        "regions": [{"index": i, "kind": _KINDS[RegionKind(int(r["kind"]))], "id": int(r["id"]), "memory": int(r["memory"]),
                     "bytes": int(r["size"])} for i, r in enumerate(entry.regions)],
        "weights": entry.weight_bytes,
        "arena": {"bytes": sum(x.size for x in live), "peak_live_bytes": sum(x.bound for x in live),
                  "lower_bound_bytes": entry.lower_bound},
        "memories": [{"name": m.name, "delegate": m.delegate} for m in entry.memories],
        "waits": [[int(w["step"]), int(w["on"])] for w in entry.waits],
        "steps": [{"kind": StepKind(int(s["kind"])).name, "time": int(s["time"])} for s in entry.steps],
        "commands": [{"time": c.time, "op": c.op, "delegate": c.delegate, **_place(entry, c),
                      "inputs": [None if v is None else names[v] or v for v in c.inputs],
                      "outputs": [{"name": names[v] or v, "type": type_text(entry, v)} for v in c.outputs]}
                     for c in entry.commands],
        "timeline": [{"region": x.region, "bytes": x.sums} for x in live],
    }  # fmt: skip


def file_data(view: FileView) -> dict[str, Any]:
    """The whole file for --json."""
    return {"name": view.name, "producer": view.producer, "bytes": view.size, "abi": int(view.program.Abi()),
            "min_abi": int(view.program.MinAbi()),
            "segments": [{"bytes": int(s["size"]), "external": bool(s["file"])} for s in view.segments],
            "quantization": view.quantization, "entries": [entry_data(e) for e in view.entries]}  # fmt: skip


def show_file(console: Console, view: FileView, *, entry: str = "", steps: bool = True) -> None:
    """Prints the file: summary, then per entry inputs, memory with its timeline, steps with placement and reason."""
    weights = sum(int(s["size"]) for s in view.segments)
    console.print(f"[bold]{view.name}[/] · {size_text(view.size)} · segments {size_text(weights)} · abi "
                  f"{view.program.Abi()} (readers from {view.program.MinAbi()}) · by {view.producer}")  # fmt: skip
    _show_quantization(console, view, entry, steps)
    for e in view.entries:
        if not entry or e.name == entry:
            _show_entry(console, e, steps)


def _show_quantization(console: Console, view: FileView, entry: str, layers: bool) -> None:
    """Totals of the quantisation, then a row per layer."""
    from trivet.quantize.report import Report

    if view.quantization is None:
        return
    report = Report.from_json(view.quantization)
    if entry:
        report.layers = [x for x in report.layers if x.entry == entry]
    text = report.table() if layers else "\n".join(report.head())
    console.print(f"\n{text}", highlight=False, markup=False, soft_wrap=True)


def _show_entry(console: Console, e: EntryView, steps: bool) -> None:
    console.print(f"\n[bold]entry {e.name}[/]: {len(e.commands)} commands in {len(e.steps)} steps")
    for what, ids in (("in ", e.inputs), ("out", e.outputs)):
        for i, v in enumerate(ids):
            console.print(f"  {what} {_slot_name(e, i, what == 'in ')}: {type_text(e, v)}", highlight=False)
    _show_memory(console, e)
    if steps:
        console.print(_commands(e))


def _show_memory(console: Console, e: EntryView) -> None:
    totals: dict[str, int] = {}
    for r in e.regions:
        kind = _KINDS[RegionKind(int(r["kind"]))]
        totals[kind] = totals.get(kind, 0) + int(r["size"])
    kinds = (
        f" ({', '.join(f'{k} {size_text(v)}' for k, v in e.weight_bytes.items())})" if len(e.weight_bytes) > 1 else ""
    )
    console.print("  memory: " + " · ".join(f"{k} {size_text(v)}{kinds if k == 'const' else ''}" for k, v in totals.items()),
                  highlight=False)  # fmt: skip
    for i, memory in enumerate(e.memories):
        mine = [r for r in e.regions if r["memory"] == i]
        sizes = {_KINDS[k]: sum(int(r["size"]) for r in mine if r["kind"] == k) for k in _KINDS}
        console.print(
            f"    {memory}: " + " · ".join(f"{k} {size_text(n)}" for k, n in sizes.items() if n), highlight=False
        )
    for live in e.live():
        _show_live(console, e, live)


def _show_live(console: Console, e: EntryView, live: Live) -> None:
    if not live.size:
        return
    least = e.lower_bound
    over = f", {100 * (live.size / least - 1):.1f} % above the lower bound {size_text(least)}" if least else ""
    where = e.memory_name(int(e.regions[live.region]["memory"]))
    if where:
        over = ""
    console.print(
        f"  arena {live.region}{f' in {where}' if where else ''}: {size_text(live.size)}{over}", highlight=False
    )
    console.print(f"    {chart(live.sums, 64)}", highlight=False)
    peak = int(np.argmax(live.sums))
    rows = [s for s in e.storages if s["region"] == live.region and s["first"] <= peak <= s["last"]]
    rows.sort(key=lambda s: -int(s["size"]))
    names: dict[int, str] = {}
    for v, row in enumerate(e.values):
        names.setdefault(int(row["storage"]), e.value_names[v])
    index = {(int(s["offset"]), int(s["first"]), int(s["region"])): i for i, s in enumerate(e.storages)}
    top = ", ".join(f"{names.get(index[int(s['offset']), int(s['first']), int(s['region'])], '') or '?'} "
                    f"{size_text(int(s['size']))}" for s in rows[:4])  # fmt: skip
    place = e.place(peak)
    console.print(f"    peak at time {peak} of {e.times} ({place.brief or '?'} {place.where}): {top}",
                  highlight=False, markup=False)  # fmt: skip


def _commands(e: EntryView) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("time", "op", "output", "type", "where in the model", "placement"):
        table.add_column(column, overflow="fold", justify="right" if column == "time" else "left")
    for c in e.commands:
        place = e.place(c.time)
        outs = [e.value_names[v] or f"value {v}" for v in c.outputs]
        types = [type_text(e, v) for v in c.outputs]
        table.add_row(str(c.time), _escape(place.brief or c.op), _escape("\n".join(outs)), _escape("\n".join(types)), _escape(place.where),
                      _escape(place.placement or c.delegate))  # fmt: skip
    return table


def _place(e: EntryView, c: Command) -> dict[str, str]:
    p = e.place(c.time)
    return {"text": p.op, "module": p.module, "source": p.source, "placement": p.placement}


def _slot_name(e: EntryView, i: int, is_input: bool) -> str:
    count, get = ((e.table.InputNamesLength(), e.table.InputNames) if is_input else
                  (e.table.OutputNamesLength(), e.table.OutputNames))  # fmt: skip
    return get(i).decode() if i < count else str(i)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)
