"""The command line: trivet export | run | inspect | bench | compare | check."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trivet.error import Error

if TYPE_CHECKING:
    from rich.console import Console

OK, BAD, USAGE = 0, 1, 2  # exit status: done; an error, or the answer is no; wrong words

MODEL = """\
MODEL is FILE.pt2 (torch.export.save), FILE.py:NAME or MODULE:NAME. NAME is a torch.nn.Module, a class that needs no
arguments, or a function without arguments that returns the module, (module, args[, kwargs[, dynamic_shapes]]) or
{entry: (module, args[, kwargs])}."""

EXAMPLES = {
    "export": """\
examples:
  trivet export net.py:build -o net.trv
  trivet export torchvision.models:resnet18 --example 1x3x224x224 -o resnet18.trv
  trivet export net.py:Encoder --example i64:1x16 --dynamic 0.1=n:1..512 -o encoder.trv
  trivet export exported.pt2 -o net.trv --dump-after fuse_elementwise""",
    "run": """\
examples:
  trivet run net.trv x.npy                     # prints the results
  trivet run net.trv x.npy mask=m.npy -o y.npz # keeps them
  trivet run net.trv frame.raw --shape x=1x3x480x640
  trivet run net.trv inputs.npz --entry decode""",
    "inspect": """\
examples:
  trivet inspect net.trv                # entries, memory over time, every step with its place in the model
  trivet inspect net.trv --no-steps
  trivet inspect net.trv --json | jq '.entries[0].arena'""",
    "bench": """\
examples:
  trivet bench net.trv                           # random inputs
  trivet bench net.trv --threads 1 --runs 1000 --json
  trivet bench encoder.trv --shape ids=1x128
  trivet bench net.trv --max-p50 4.0             # for CI: status 1 when slower""",
    "compare": """\
examples:
  trivet compare net.py:build                    # exports, runs both, compares every layer
  trivet compare net.py:build net.trv --data x.npy
  trivet compare net.py:build net.trv --tolerance 1e-3 --json""",
    "check": """\
examples:
  trivet check net.py:build                      # status 1 and a list when something cannot be exported
  trivet check torchvision.models:vit_b_16 --example 1x3x224x224 --json""",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.command is None:
        parser.print_help()
        return USAGE
    try:
        status: int = options.run(options)
        sys.stdout.flush()
        return status
    except Error as e:
        if getattr(options, "json", False):
            print(json.dumps({"error": {"reason": e.reason, "node": e.node, "remedy": e.remedy}}))
        else:
            _console(stderr=True).print(f"[bold red]error:[/] {_escape(str(e))}", highlight=False)
        return BAD
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


# ---- words --------------------------------------------------------------------------------------------------------------
def _parser() -> argparse.ArgumentParser:
    import trivet

    parser = argparse.ArgumentParser("trivet", description="PyTorch models in one file that a small C runtime runs.",
                                     epilog="`trivet COMMAND --help` explains a command, with examples.")  # fmt: skip
    parser.add_argument("--version", action="version", version=f"trivet {trivet.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def command(name: str, run: Callable[[Any], int], what: str, *, model: bool = False) -> argparse.ArgumentParser:
        p = commands.add_parser(name, help=what, description=what + "." + (f"\n\n{MODEL}" if model else ""),
                                epilog=EXAMPLES[name], formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
        p.set_defaults(run=run)
        p.add_argument("--json", action="store_true", help="print JSON for tools instead of text for people")
        if model:
            p.add_argument("model", metavar="MODEL")
            p.add_argument("--example", action="append", default=[], metavar="[DTYPE:]SHAPE",
                           help="an example argument, once per argument: 1x3x224x224, i64:1x16 (default: f32, or what "
                           "the function returns)")  # fmt: skip
            p.add_argument("--dynamic", action="append", default=[], metavar="ARG.AXIS=[NAME:]MIN..MAX",
                           help="a size that may change, e.g. 0.2=h:64..512; equal names are equal sizes")  # fmt: skip
        return p

    p = command("export", _export, "Make a program of a PyTorch model", model=True)
    p.add_argument("-o", "--output", metavar="FILE.trv", help="where to (default: the model's name)")
    p.add_argument("--target", default="cpu", help="delegates in order of preference (default: cpu)")
    p.add_argument("--memory", default="", metavar="NAME=SIZE[,..]", type=_memories,
                   help="budgets of the device's memories, fastest first: dtcm=64K,sram=512K")  # fmt: skip
    p.add_argument("--dump-after", default="", metavar="PASS[,PASS]", help="print the IR after passes to stderr")
    p.add_argument("--skip", default="", metavar="PASS[,PASS]", help="leave optimising passes out")
    p.add_argument("--strip", action="store_true", help="leave names and source lines out of the file")

    p = command("run", _run, "Run a program on data")
    _program(p)
    p.add_argument("inputs", nargs="*", metavar="[NAME=]FILE", help=".npy, .npz or raw little-endian files; random numbers "
                   "when there are none")  # fmt: skip
    p.add_argument(
        "-o", "--output", metavar="FILE", help=".npz for all results, .npy for the first, else a folder of .npy"
    )
    p.add_argument("--repeat", type=_positive, default=1, metavar="N", help="call it N times (state goes on)")

    p = command("inspect", _inspect, "Show entries, memory over time, steps, placement and its reason")
    p.add_argument("program", metavar="FILE.trv")
    p.add_argument("--weights", metavar="FILE", help="the external weights file, where the program has one")
    p.add_argument("--entry", default="", help="only this one")
    p.add_argument("--no-steps", action="store_true", help="without the list of commands")

    p = command("bench", _bench, "Measure load, first run, latency percentiles and memory")
    _program(p)
    p.add_argument(
        "--data", action="append", default=[], metavar="[NAME=]FILE", help="inputs as of run (default: random)"
    )
    p.add_argument("--warmup", type=_natural, default=5, metavar="N", help="runs that do not count (default: 5)")
    p.add_argument("--runs", type=_positive, default=100, metavar="N", help="runs that count (default: 100)")
    p.add_argument("--seconds", type=float, default=10.0, help="stop counting after that long (default: 10)")
    p.add_argument("--max-p50", type=float, metavar="MS", help="status 1 when the median is above")

    p = command("compare", _compare, "Run model and program side by side and find the first layer that differs",
                model=True)  # fmt: skip
    _program(p, optional=True)
    p.add_argument(
        "--data", action="append", default=[], metavar="FILE", help="inputs as of run (default: the examples)"
    )
    p.add_argument("--tolerance", type=float, default=1e-4, help="largest relative error (default: 1e-4)")
    p.add_argument("--outputs-only", action="store_true", help="do not look into the layers")
    p.add_argument("--all", action="store_true", help="list every layer, not only the worst")

    command("check", _check, "List everything of a model that cannot be exported, at once", model=True)
    return parser


def _program(p: argparse.ArgumentParser, optional: bool = False) -> None:
    if optional:
        p.add_argument("program", metavar="FILE.trv", nargs="?", help="default: export the model now")
    else:
        p.add_argument("program", metavar="FILE.trv")
    p.add_argument("--entry", default="", help="which entry (default: forward, or the only one)")
    p.add_argument("--threads", type=_natural, default=0, metavar="N", help="threads per run (default: one per core)")
    p.add_argument("--weights", metavar="FILE", help="the external weights file, where the program has one")
    p.add_argument(
        "--shape", action="append", default=[], metavar="NAME=SHAPE", help="size of a dynamic input: ids=1x128"
    )


def _natural(text: str) -> int:
    return _at_least(0, text)


def _positive(text: str) -> int:
    return _at_least(1, text)


def _at_least(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"a whole number from {least} on expected, got {text!r}")
    return int(text)


def _sizes(words: Sequence[str]) -> dict[str, tuple[int, ...]]:
    from trivet.factory import shape_of

    out = {}
    for word in words:
        name, equals, shape = word.partition("=")
        if not equals:
            raise Error(f"--shape {word}: NAME=SHAPE expected", remedy="e.g. --shape ids=1x128")
        out[name] = shape_of(shape)
    return out


# ---- output -------------------------------------------------------------------------------------------------------------
def _console(stderr: bool = False) -> Console:
    from rich.console import Console

    wide = None if (sys.stderr if stderr else sys.stdout).isatty() else 160
    return Console(stderr=stderr, width=wide, soft_wrap=False)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


@contextmanager
def _working(options: Any, text: str) -> Iterator[Any]:
    """A spinner on stderr for long work; warnings of the model's own code stay visible, once each."""
    with warnings.catch_warnings():
        warnings.simplefilter("once")
        if options.json or not sys.stderr.isatty():
            yield None
            return
        with _console(stderr=True).status(text) as status:
            yield status


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=1, default=str))


def _memories(text: str) -> dict[str, int]:
    """{"dtcm": 65536} of "dtcm=64K"."""
    out = {}
    for part in text.split(",") if text else ():
        m = re.fullmatch(r"(\w+)=(\d+)([KMG]?)", part)
        if m is None:
            raise argparse.ArgumentTypeError(f"NAME=SIZE expected, for example sram=512K; got {part!r}")
        out[m[1]] = int(m[2]) << {"": 0, "K": 10, "M": 20, "G": 30}[m[3]]
    return out


# ---- commands -----------------------------------------------------------------------------------------------------------
def _export(o: Any) -> int:
    from trivet.api import capture, lower
    from trivet.factory import find_model

    with _working(o, "importing the model") as status:
        source = find_model(o.model, o.example, o.dynamic)
        if status:
            status.update("capturing")
        module = capture(source.model, source.args, source.kwargs, dynamic_shapes=source.dynamic_shapes)
        if status:
            status.update(f"optimising {sum(len(g.nodes) for g in module.entries.values())} operations")
        program = lower(
            module, target=o.target, memories=o.memory or None, debug=not o.strip, dump_after=o.dump_after, skip=o.skip
        )
        path = o.output or f"{module.name.replace('+', '_')}.trv"
        if status:
            status.update(f"writing {path}")
        program.save(path)
    if o.json:
        from trivet.listing import file_data
        from trivet.reader import view_file

        data = file_data(view_file(path))
        for e in data["entries"]:
            del e["commands"], e["timeline"]
        _print_json({"path": path, **data})
    else:
        console = _console()
        console.print(_escape(str(program)), highlight=False)
        console.print(f"wrote [bold]{_escape(path)}[/]", highlight=False)
    return OK


def _run(o: Any) -> int:
    import numpy as np

    from trivet import bench
    from trivet.runtime import load

    net = load(o.program, weights=o.weights, threads=o.threads)
    entry = bench.find_entry(net, o.entry)
    sizes = _sizes(o.shape)
    values = bench.read_inputs(o.inputs, entry.inputs, sizes) if o.inputs else bench.random_inputs(entry.inputs, sizes)
    for _ in range(o.repeat):
        results = entry.run(values)
    names = [s.name or f"output{s.index}" for s in entry.outputs]
    arrays = {n: _numpy(r) for n, r in zip(names, results, strict=True)}
    if o.output:
        written = _save(o.output, arrays)
    if o.json:
        _print_json({n: {"dtype": str(a.dtype), "shape": list(a.shape), "values": a.tolist() if a.size <= 4096 else None}
                     for n, a in arrays.items()})  # fmt: skip
        return OK
    console = _console()
    for n, a in arrays.items():
        text = np.array2string(a, threshold=64, edgeitems=4, precision=6, max_line_width=120)
        console.print(f"[bold]{_escape(n)}[/] {a.dtype}{list(a.shape)}", highlight=False)
        if not o.output:
            console.print(text, highlight=False, markup=False)
    if o.output:
        console.print(f"wrote {_escape(', '.join(written))}", highlight=False)
    return OK


def _numpy(x: Any) -> Any:
    if hasattr(x, "detach"):
        x = x.detach()
        return (x.float() if str(x.dtype) == "torch.bfloat16" else x).numpy()
    return x


def _save(path: str, arrays: dict[str, Any]) -> list[str]:
    import numpy as np

    try:
        if path.endswith(".npz"):
            np.savez(path, **arrays)
            return [path]
        if path.endswith(".npy"):
            np.save(path, next(iter(arrays.values())))
            return [path]
        os.makedirs(path, exist_ok=True)
        files = [os.path.join(path, f"{n}.npy") for n in arrays]
        for f, a in zip(files, arrays.values(), strict=True):
            np.save(f, a)
        return files
    except OSError as e:
        raise Error(f"cannot write {path}: {e.strerror}") from None


def _inspect(o: Any) -> int:
    from trivet.listing import file_data, show_file
    from trivet.reader import view_file
    from trivet.runtime import load

    load(o.program, weights=o.weights, threads=1, defer_crc=True).close()  # only a verified file is shown
    view = view_file(o.program)
    if o.entry:
        view.entries = [view.entry(o.entry)]
    if o.json:
        _print_json(file_data(view))
    else:
        show_file(_console(), view, steps=not o.no_steps)
    return OK


def _bench(o: Any) -> int:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from trivet import bench
    from trivet.listing import size_text
    from trivet.runtime import load

    values = None
    sizes = _sizes(o.shape)
    if o.data:
        net = load(o.program, weights=o.weights, threads=1, defer_crc=True)
        values = bench.read_inputs(o.data, bench.find_entry(net, o.entry).inputs, sizes)
        net.close()
    quiet = o.json or not sys.stderr.isatty()
    with Progress(TextColumn("running"), BarColumn(), TextColumn("{task.completed} of {task.total}"), TimeRemainingColumn(),
                  console=_console(stderr=True), transient=True, disable=quiet) as bar:  # fmt: skip
        task = bar.add_task("runs", total=o.runs)
        result = bench.bench(o.program, values, entry=o.entry, sizes=sizes, weights=o.weights, threads=o.threads,
                             warmup=o.warmup, runs=o.runs, seconds=o.seconds,
                             progress=None if quiet else lambda done, _: bar.update(task, completed=done))  # fmt: skip
    if o.json:
        _print_json(result.to_json())
    else:
        r = result
        console = _console()
        console.print(f"[bold]{_escape(os.path.basename(o.program))}[/] entry {r.entry}, {r.threads} threads, "
                      f"inputs {_escape(', '.join(r.inputs)) or 'none'}", highlight=False)  # fmt: skip
        console.print(f"  load {r.load_ms:.3g} ms · first run {r.first_ms:.3g} ms", highlight=False)
        console.print(f"  {r.runs} runs: p50 [bold]{r.p50_ms:.4g} ms[/] · p90 {r.p90_ms:.4g} · p99 {r.p99_ms:.4g} · "
                      f"mean {r.mean_ms:.4g} · min {r.min_ms:.4g}", highlight=False)  # fmt: skip
        peak = f" · peak growth of the process {size_text(r.peak_bytes)}" if r.peak_bytes >= 0 else ""
        console.print(f"  memory: file {size_text(r.file_bytes)} · context {size_text(r.context_bytes)}{peak}",
                      highlight=False)  # fmt: skip
    if o.max_p50 is not None and result.p50_ms > o.max_p50:
        raise Error(f"the median is {result.p50_ms:.4g} ms, at most {o.max_p50:g} ms wanted")
    return OK


def _compare(o: Any) -> int:
    import torch

    from trivet import bench
    from trivet.compare import compare
    from trivet.factory import find_model
    from trivet.runtime import load

    with _working(o, "running model and program"):
        source = find_model(o.model, o.example, o.dynamic)
        model, args, kwargs, shapes = source.model, source.args, source.kwargs, source.dynamic_shapes
        if isinstance(model, dict):
            name = o.entry or ("forward" if "forward" in model else next(iter(model)))
            if name not in model:
                raise Error(f"the model has no entry {name!r}; it has {', '.join(model)}")
            model, args, kwargs = (*model[name], None, None)[:3]
        if not isinstance(model, torch.nn.Module):
            raise Error("compare needs the model itself, as a torch.nn.Module",
                        remedy="name a function that returns it: FILE.py:NAME")  # fmt: skip
        net = None
        if o.program is not None:
            net = load(o.program, weights=o.weights, threads=o.threads)
        if o.data:
            if net is None:
                raise Error(
                    "--data needs a program beside the model", remedy="trivet compare MODEL FILE.trv --data x.npy"
                )
            slots = bench.find_entry(net, o.entry).inputs
            values = bench.read_inputs(o.data, slots, _sizes(o.shape))
            args, kwargs = _arguments(net, o.entry, [torch.as_tensor(v) for v in values])
        if args is None:
            raise Error("no data to run on", remedy="add --example SHAPE, --data FILE, or return (module, args)")
        result = compare(model, args, kwargs, program=net, entry=o.entry, dynamic_shapes=shapes, tolerance=o.tolerance,
                         threads=o.threads, layers=not o.outputs_only)  # fmt: skip
    if o.json:
        _print_json(result.to_json())
    else:
        _show_comparison(_console(), result, o.all)
    return OK if result.ok else BAD


def _arguments(net: Any, entry: str, values: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Input slots back in the model's argument structure."""
    from trivet import bench
    from trivet.signature import Signature

    sig = bench.find_entry(net, entry).info.signature
    args, kwargs = (Signature(sig.args, sig.kwargs, tree).unflatten_outputs(values) for tree in (sig.args, sig.kwargs))
    return args, kwargs


def _show_comparison(console: Console, result: Any, every: bool) -> None:
    from rich.table import Table

    console.print(_escape(str(result)), style="green" if result.ok else "red", highlight=False)
    known = [x for x in result.layers if x.twin]
    rows = result.layers if every else sorted(known, key=lambda x: -x.error)[:8]
    if not rows:
        return
    table = Table(box=None, pad_edge=False, header_style="bold", title=None if every else "largest errors")
    for column in ("time", "op", "where in the model", "value", "compared with", "error"):
        table.add_column(column, overflow="fold")
    for x in rows:
        error = "" if x.error != x.error else f"{x.error:.2g}"
        style = "red" if not x.harmless else ""
        table.add_row(str(x.time), _escape(x.place.brief), _escape(x.place.where), _escape(x.value), _escape(x.twin), error,
                      style=style)  # fmt: skip
    console.print(table)


def _check(o: Any) -> int:
    from trivet.api import check
    from trivet.factory import find_model

    with _working(o, "capturing"):
        source = find_model(o.model, o.example, o.dynamic)
        result = check(source.model, source.args, source.kwargs, dynamic_shapes=source.dynamic_shapes)
    if o.json:
        _print_json(result.to_json())
    else:
        _console().print(_escape(str(result)), style="green" if result.ok else "red", highlight=False)
    return OK if result.ok else BAD


if __name__ == "__main__":
    sys.exit(main())
