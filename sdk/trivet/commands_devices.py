"""Commands for other machines: build, doctor, bench --device."""

from __future__ import annotations

from typing import Any

from trivet.commands import OK, escape, make_console, print_json, working
from trivet.error import Error


def do_build(o: Any) -> int:
    from trivet.build import build

    with working(o, f"building for {o.target}"):
        built = build(o.target, o.to, compiler=o.compiler, ndk=o.ndk, options=o.option)
    if o.json:
        print_json({"target": built.platform, "folder": str(built.folder), "trv_run": str(built.trv_run),
                    "compiler": built.compiler, "bytes": built.trv_run.stat().st_size})  # fmt: skip
        return OK
    console = make_console()
    console.print(
        f"{built.trv_run}  {built.trv_run.stat().st_size:,} bytes, by {built.compiler}", highlight=False, markup=False
    )
    if built.emulator:
        console.print(f"here: {' '.join(built.emulator)} {built.trv_run} run net.trv", highlight=False, markup=False)
    return OK


def do_doctor(o: Any) -> int:
    from trivet.build import doctor

    found = doctor()
    if o.json:
        print_json([{"what": f.what, "there": f.there, "remedy": f.remedy} for f in found])
        return OK
    console = make_console()
    for f in found:
        mark = "[green]ok[/]     " if f.ok else "[yellow]missing[/]"
        console.print(f"{mark} {escape(f.what)}: {escape(f.there or f.remedy)}", highlight=False)
    return OK


def bench_devices(o: Any) -> int:
    """`trivet bench --device`: one row per device."""
    from rich.table import Table

    from trivet.devices import bench_on, open_device
    from trivet.listing import size_text

    inputs = [d for d in o.data if "=" not in d]
    if len(inputs) != len(o.data):
        raise Error("--data NAME=FILE does not reach devices", remedy="give .npy files in the order of the inputs")
    rows, failed = [], []
    for text in o.device:
        with working(o, f"{text}: building, copying, running"):
            try:
                with open_device(text) as device:
                    rows.append(bench_on(device, o.program, trv_run=o.trv_run, entry=o.entry, threads=o.threads, runs=o.runs,
                                         warmup=o.warmup, inputs=inputs, weights=o.weights))  # fmt: skip
            except Error as e:
                failed.append(e)
    if o.json:
        print_json([r.to_json() for r in rows])
    elif rows:
        table = Table("device", "platform", "load ms", "first ms", "p50 ms", "p90 ms", "p99 ms", "peak memory")
        for r in rows:
            table.add_row(r.device, r.platform, *(f"{x:.4g}" for x in (r.load_ms, r.first_ms, r.p50_ms, r.p90_ms, r.p99_ms)),
                          size_text(r.peak_bytes) if r.peak_bytes >= 0 else "?")  # fmt: skip
        make_console().print(table)
    if failed:
        raise failed[0] if len(failed) == 1 else Error("\n".join(str(e) for e in failed))
    slow = [r for r in rows if o.max_p50 is not None and r.p50_ms > o.max_p50]
    if slow:
        raise Error(f"the median on {slow[0].device} is {slow[0].p50_ms:.4g} ms, at most {o.max_p50:g} ms wanted")
    return OK
