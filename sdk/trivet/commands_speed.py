"""The commands that measure: bench, profile, tune. As of commands.py: parsed options in, exit status out."""

from __future__ import annotations

import os
import sys
from typing import Any

from trivet.commands import OK, escape, make_console, print_json, sizes_of, working
from trivet.error import Error


def do_bench(o: Any) -> int:
    if o.device:
        from trivet.commands_devices import bench_devices

        return bench_devices(o)
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from trivet import bench
    from trivet.listing import size_text

    values, sizes = _values(o), sizes_of(o.shape)
    quiet = o.json or not sys.stderr.isatty()
    with Progress(TextColumn("running"), BarColumn(), TextColumn("{task.completed} of {task.total}"), TimeRemainingColumn(),
                  console=make_console(stderr=True), transient=True, disable=quiet) as bar:  # fmt: skip
        task = bar.add_task("runs", total=o.runs)
        result = bench.bench(o.program, values, entry=o.entry, sizes=sizes, weights=o.weights, threads=o.threads, devices=o.devices, plugins=o.plugin,
                             warmup=o.warmup, runs=o.runs, seconds=o.seconds,
                             progress=None if quiet else lambda done, _: bar.update(task, completed=done))  # fmt: skip
    if o.json:
        print_json(result.to_json())
    else:
        r = result
        console = make_console()
        console.print(f"[bold]{escape(os.path.basename(o.program))}[/] entry {r.entry}, {r.threads} threads, "
                      f"inputs {escape(', '.join(r.inputs)) or 'none'}", highlight=False)  # fmt: skip
        console.print(f"  load {r.load_ms:.3g} ms · first run {r.first_ms:.3g} ms", highlight=False)
        console.print(f"  {r.runs} runs: p50 [bold]{r.p50_ms:.4g} ms[/] · p90 {r.p90_ms:.4g} · p99 {r.p99_ms:.4g} · "
                      f"mean {r.mean_ms:.4g} · min {r.min_ms:.4g}", highlight=False)  # fmt: skip
        peak = f" · peak growth of the process {size_text(r.peak_bytes)}" if r.peak_bytes >= 0 else ""
        console.print(f"  memory: file {size_text(r.file_bytes)} · context {size_text(r.context_bytes)}{peak}",
                      highlight=False)  # fmt: skip
    if o.max_p50 is not None and result.p50_ms > o.max_p50:
        raise Error(f"the median is {result.p50_ms:.4g} ms, at most {o.max_p50:g} ms wanted")
    return OK


def do_profile(o: Any) -> int:
    from trivet.machine import cached, measure
    from trivet.profile import profile

    threads = o.threads or os.cpu_count() or 1
    with working(o, "measuring the machine") as status:
        machine = cached(o.machine, threads) if o.machine else measure(threads)
        if status:
            status.update("running")
        values = _values(o)
        result = profile(o.program, values, entry=o.entry, sizes=sizes_of(o.shape), weights=o.weights, threads=threads, runs=o.runs, devices=o.devices, plugins=o.plugin,
                         seconds=o.seconds, machine=machine)  # fmt: skip
    if o.trace:
        result.save_trace(o.trace)
    if o.json:
        print_json(result.to_json())
        return OK
    console = make_console()
    console.print(escape(str(machine)), highlight=False)
    console.print(_profile_table(result, o.top))
    spent = sum(r.seconds for r in result.rows)
    console.print(f"[bold]{result.seconds * 1e3:.4g} ms[/] a run, the fastest of {result.runs} · commands {spent * 1e3:.4g} ms · "
                  f"[bold]{100 * result.limit:.1f} %[/] of what this machine allows", highlight=False)  # fmt: skip
    if o.trace:
        console.print(f"wrote {escape(o.trace)}", highlight=False)
    return OK


def _values(o: Any) -> Any:
    """Inputs of --data; None: random ones."""
    from trivet import bench
    from trivet.runtime import load

    if not o.data:
        return None
    net = load(o.program, weights=o.weights, threads=1, defer_crc=True)
    values = bench.read_inputs(o.data, bench.find_entry(net, o.entry).inputs, sizes_of(o.shape))
    net.close()
    return values


def _profile_table(result: Any, top: int) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("time", "us", "share", "op", "where in the model", "kernel", "tiles", "rate", "limit", "by"):
        right = column in ("time", "us", "share", "tiles", "rate", "limit")
        table.add_column(column, overflow="fold", justify="right" if right else "left", no_wrap=right)
    rows = sorted(result.rows, key=lambda r: -r.seconds)[:top] if top else result.rows
    for r in rows:
        calls = f" x{r.calls}" if r.calls > 1 else ""
        table.add_row(str(r.time), f"{r.seconds * 1e6:.1f}{calls}", f"{100 * r.share:.1f} %", escape(r.op), escape(r.where), escape(" ".join((r.kernel, r.algorithm))),
                      str(r.tiles), r.rate_text, f"{100 * r.limit:.0f} %", r.by)  # fmt: skip
    return table


def do_tune(o: Any) -> int:
    from trivet.tune import tune

    with working(o, "measuring") as status:

        def progress(done: int, of: int) -> None:
            if status:
                status.update(f"measuring: round {done} of {of}")

        result = tune(o.program, threads=o.threads, entry=o.entry, sizes=sizes_of(o.shape), weights=o.weights, rounds=o.rounds,
                      seconds=o.seconds, progress=progress)  # fmt: skip
    path = o.output or o.program
    result.program.save(path)
    if o.json:
        print_json({"path": path, **result.to_json()})
        return OK
    console = make_console()
    console.print(str(result), highlight=False, markup=False)
    console.print(f"wrote [bold]{escape(path)}[/]", highlight=False)
    return OK
