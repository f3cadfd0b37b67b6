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
    """`trivet bench --device`: one row per device; for firmware, a table of steps too."""
    from rich.table import Table

    from trivet.devices import Measured, bench_on, open_device
    from trivet.firmware import BARE, Figures
    from trivet.listing import size_text

    inputs = [d for d in o.data if "=" not in d]
    if len(inputs) != len(o.data):
        raise Error("--data NAME=FILE does not reach devices", remedy="give .npy files in the order of the inputs")
    rows: list[Measured | Figures] = []
    failed = []
    for text in o.device:
        with working(o, f"{text}: building, copying, running"):
            try:
                if text.startswith("serial:") or text.removeprefix("qemu:") in BARE:
                    rows.append(_firmware(o, text, inputs))
                    continue
                with open_device(text) as device:
                    rows.append(bench_on(device, o.program, trv_run=o.trv_run, entry=o.entry, threads=o.threads, runs=o.runs,
                                         warmup=o.warmup, inputs=inputs, weights=o.weights))  # fmt: skip
            except Error as e:
                failed.append(e)
    if o.json:
        print_json([r.to_json() for r in rows])
    elif rows:
        table = Table("device", "platform", "load", "first", "p50", "p90", "p99", "memory", "golden")
        for r in rows:
            if isinstance(r, Measured):
                table.add_row(r.device, r.platform, *(f"{x:.4g} ms" for x in (r.load_ms, r.first_ms, r.p50_ms, r.p90_ms, r.p99_ms)),
                              size_text(r.peak_bytes) if r.peak_bytes >= 0 else "?", "")  # fmt: skip
            else:
                table.add_row(r.device, r.target, *(_ticks(r, x) for x in (r.start, r.first, *(_rank(r.times, p) for p in (50, 90, 99)))),
                              size_text(r.arena + r.session + r.stack), _golden(r))  # fmt: skip
        console = make_console()
        console.print(table)
        for r in rows:
            if isinstance(r, Figures):
                console.print(_steps(o, r))
    if failed:
        raise failed[0] if len(failed) == 1 else Error("\n".join(str(e) for e in failed))
    wrong = [r for r in rows if isinstance(r, Figures) and r.failed]
    if wrong:
        raise Error(f"{wrong[0].device}: {wrong[0].failed} golden pairs differ")
    slow = [r for r in rows if isinstance(r, Measured) and o.max_p50 is not None and r.p50_ms > o.max_p50]
    if slow:
        raise Error(f"the median on {slow[0].device} is {slow[0].p50_ms:.4g} ms, at most {o.max_p50:g} ms wanted")
    return OK


def _firmware(o: Any, text: str, inputs: Any) -> Any:
    """What a firmware measures: one that runs behind a serial port, or one made now and run in QEMU."""
    from trivet.bench import read_inputs
    from trivet.firmware import emulated, open_port
    from trivet.program import Program
    from trivet.runtime import load

    net = load(o.program)
    names = [e.name for e in Program.read(o.program).view.entries]
    entry = names.index(o.entry) if o.entry in names else 0
    slots = net.entry(names[entry]).inputs
    data = [x.tobytes() for x in read_inputs(inputs, slots, {})] if inputs else []
    kind, _, where = text.partition(":")
    with open_port(where) if kind == "serial" else emulated(o.program, where) as firmware:
        return firmware.measure(text, min(o.runs, 5), entry, data)


def _rank(times: Any, p: float) -> int:
    from trivet.bench import percentile

    return int(percentile(sorted(times), p))


def _ticks(r: Any, ticks: int) -> str:
    """Time where the clock's rate is known, else thousands of ticks."""
    return f"{ticks / r.rate * 1e3:.4g} ms" if r.rate else f"{ticks / 1e3:,.1f} k"


def _golden(r: Any) -> str:
    return f"{r.passed} ok" + (f", {r.failed} wrong" if r.failed else "") if r.passed or r.failed else ""


def _steps(o: Any, r: Any) -> Any:
    """The table of a firmware's commands, with their places in the model where the program here has names."""
    from rich.table import Table

    from trivet.program import Program

    view = Program.read(o.program).view.entry(o.entry)
    table = Table("time", "operator", "in the model", r.unit if not r.rate else "ms", "%", title=f"{r.device}: steps")
    whole = max(1, sum(s.ticks for s in r.steps))
    ops = {c.time: c.op for c in view.commands}
    for s in r.steps:
        ticks = f"{s.ticks / r.rate * 1e3:.4g}" if r.rate else f"{s.ticks:,}"
        table.add_row(
            str(s.time),
            view.place(s.time).brief or ops.get(s.time, ""),
            escape(view.place(s.time).where),
            ticks,
            f"{100 * s.ticks / whole:.1f}",
        )
    return table


def do_deploy(o: Any) -> int:
    """`trivet deploy`."""
    from trivet.deploy import deploy
    from trivet.listing import size_text

    d = deploy(
        o.program,
        o.target,
        o.to or f"trivet-{o.target}",
        stack=o.stack,
        flash=o.flash,
        ram=o.ram,
        weights_at=o.weights_at,
        debug=o.debug,
    )
    u = d.usage
    if o.json:
        print_json({"folder": str(d.folder), "target": d.machine.name, "program_bytes": u.program, "code_bytes_estimate": u.code,
                    "arena_bytes": u.arena, "session_bytes": u.session, "stack_bytes": u.stack, "ram_bytes": u.ram, "kernels": list(d.kernels)})  # fmt: skip
        return OK
    console = make_console()
    console.print(f"{d.folder}: flash {size_text(u.program)} of program and about {size_text(u.code)} of code; RAM {size_text(u.ram)} "
                  f"(arena and state {size_text(u.arena)}, session {size_text(u.session)}, stack {size_text(u.stack)})", highlight=False, markup=False)  # fmt: skip
    console.print(f"kernels: {', '.join(k.removeprefix('trvk_') for k in d.kernels)}", highlight=False, markup=False)
    console.print(
        f"now: make -C {d.folder}" + (" run" if d.machine.qemu or d.machine.hosted else ""),
        highlight=False,
        markup=False,
    )
    return OK


def do_new_delegate(o: Any) -> int:
    from trivet.new_delegate import new_delegate

    files = new_delegate(o.name, o.to)
    if o.json:
        print_json({"files": [str(p) for p in files]})
    else:
        say = make_console().print
        for path in files:
            say(escape(str(path)), soft_wrap=True)
        say(f"now: cd {escape(str(files[0].parent))} && python -m pytest", soft_wrap=True)
    return OK


def do_paths(o: Any) -> int:
    from trivet import native
    from trivet.build import sources

    path = str(sources() if o.what == "sources" else native.library().path.resolve())
    if o.json:
        print_json({o.what: path})
    else:
        make_console().print(escape(path), soft_wrap=True)
    return OK
