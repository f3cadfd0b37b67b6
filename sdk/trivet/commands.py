"""The commands of the command line: each takes the parsed options, prints, and returns the exit status."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trivet.error import Error

if TYPE_CHECKING:
    from rich.console import Console

OK, BAD = 0, 1  # exit status: done; an error, or the answer is no


# ---- output -------------------------------------------------------------------------------------------------------------
def make_console(stderr: bool = False) -> Console:
    from rich.console import Console

    wide = None if (sys.stderr if stderr else sys.stdout).isatty() else 160
    return Console(stderr=stderr, width=wide, soft_wrap=False)


def escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


@contextmanager
def working(options: Any, text: str) -> Iterator[Any]:
    """A spinner on stderr for long work; warnings of the model's own code stay visible, once each."""
    with warnings.catch_warnings():
        warnings.simplefilter("once")
        if options.json or not sys.stderr.isatty():
            yield None
            return
        with make_console(stderr=True).status(text) as status:
            yield status


def print_json(data: Any) -> None:
    print(json.dumps(data, indent=1, default=str))


def sizes_of(words: Sequence[str]) -> dict[str, tuple[int, ...]]:
    from trivet.factory import shape_of

    out = {}
    for word in words:
        name, equals, shape = word.partition("=")
        if not equals:
            raise Error(f"--shape {word}: NAME=SHAPE expected", remedy="e.g. --shape ids=1x128")
        out[name] = shape_of(shape)
    return out


# ---- commands -----------------------------------------------------------------------------------------------------------
def do_export(o: Any) -> int:
    from trivet.api import export
    from trivet.factory import find_model

    with working(o, "importing the model") as status:
        source = find_model(o.model, o.example, o.dynamic)
        if status:
            status.update("exporting")
        program = export(
            source.model, source.args, source.kwargs, dynamic_shapes=source.dynamic_shapes, target=o.target,
            place=dict(o.place), strict=o.strict, fallback=False if o.no_fallback else None, device_io=o.device_io,
            memories=o.memory or None, debug=not o.strip, dump_after=o.dump_after, skip=o.skip,
            **_quantisation(o, o.quantize, source),
        )  # fmt: skip
        path = o.output or f"{program.name.replace('+', '_')}.trv"
        if status:
            status.update(f"writing {path}")
        program.save(path)
    if o.json:
        from trivet.listing import file_data
        from trivet.reader import view_file

        data = file_data(view_file(path))
        for e in data["entries"]:
            del e["commands"], e["timeline"]
        print_json({"path": path, **data})
    else:
        console = make_console()
        console.print(escape(str(program)), highlight=False)
        console.print(f"wrote [bold]{escape(path)}[/]", highlight=False)
    return OK


def _quantisation(o: Any, recipe: str | None, source: Any) -> dict[str, Any]:
    """The arguments of export() for --quantize, --calibrate, --metric, --max-drop."""
    from trivet.factory import calibration, named

    given: dict[str, Any] = {"quantize": recipe} if recipe else {}
    if o.calibrate:
        given["calibrate"] = calibration(o.calibrate, source)
    if o.metric:
        given["metric"] = named(o.metric, "metric")
    if o.max_drop is not None:
        given["max_drop"] = o.max_drop
    return given


def do_quantize(o: Any) -> int:
    from trivet.api import export
    from trivet.factory import find_model

    with working(o, "importing the model") as status:
        source = find_model(o.model, o.example, o.dynamic)
        if status:
            status.update("quantising")
        program = export(source.model, source.args, source.kwargs, dynamic_shapes=source.dynamic_shapes, target=o.target,
                         **_quantisation(o, o.recipe, source))  # fmt: skip
        if o.output:
            program.save(o.output)
    report = program.quantization
    assert report is not None
    if o.json:
        print_json({"path": o.output, "bytes": program.view.size, **report.to_json()})
        return OK
    console = make_console()
    text = report.table() if o.worst is None else report.table(worst=True, count=o.worst)
    console.print(text, highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"program: {program.view.size:,} bytes" + (f", wrote {o.output}" if o.output else ""),
        highlight=False,
        markup=False,
    )
    return OK


def do_run(o: Any) -> int:
    import numpy as np

    from trivet import bench
    from trivet.runtime import load

    net = load(o.program, weights=o.weights, threads=o.threads, devices=o.devices, plugins=o.plugin)
    entry = bench.find_entry(net, o.entry)
    sizes = sizes_of(o.shape)
    values = bench.read_inputs(o.inputs, entry.inputs, sizes) if o.inputs else bench.random_inputs(entry.inputs, sizes)
    for _ in range(o.repeat):
        results = entry.run(values)
    names = [s.name or f"output{s.index}" for s in entry.outputs]
    arrays = {n: _numpy(r) for n, r in zip(names, results, strict=True)}
    if o.output:
        written = _save(o.output, arrays)
    if o.json:
        print_json({n: {"dtype": str(a.dtype), "shape": list(a.shape), "values": a.tolist() if a.size <= 4096 else None}
                     for n, a in arrays.items()})  # fmt: skip
        return OK
    console = make_console()
    for n, a in arrays.items():
        text = np.array2string(a, threshold=64, edgeitems=4, precision=6, max_line_width=120)
        console.print(f"[bold]{escape(n)}[/] {a.dtype}{list(a.shape)}", highlight=False)
        if not o.output:
            console.print(text, highlight=False, markup=False)
    if o.output:
        console.print(f"wrote {escape(', '.join(written))}", highlight=False)
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


def do_inspect(o: Any) -> int:
    from trivet.host import Host
    from trivet.listing import file_data, show_file
    from trivet.reader import view_file

    Host(o.program, o.weights, 1, True, "cpu")  # only a verified file is shown
    view = view_file(o.program)
    if o.entry:
        view.entries = [view.entry(o.entry)]
    if o.json:
        print_json(file_data(view))
    else:
        show_file(make_console(), view, steps=not o.no_steps)
    return OK


def do_compare(o: Any) -> int:
    import torch

    from trivet import bench
    from trivet.compare import compare
    from trivet.factory import find_model
    from trivet.runtime import load

    with working(o, "running model and program"):
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
            net = load(o.program, weights=o.weights, threads=o.threads, devices=o.devices, plugins=o.plugin)
        if o.data:
            if net is None:
                raise Error(
                    "--data needs a program beside the model", remedy="trivet compare MODEL FILE.trv --data x.npy"
                )
            slots = bench.find_entry(net, o.entry).inputs
            values = bench.read_inputs(o.data, slots, sizes_of(o.shape))
            args, kwargs = _arguments(net, o.entry, [torch.as_tensor(v) for v in values])
        if args is None:
            raise Error("no data to run on", remedy="add --example SHAPE, --data FILE, or return (module, args)")
        result = compare(model, args, kwargs, program=net, entry=o.entry, dynamic_shapes=shapes, tolerance=o.tolerance,
                         min_sqnr=o.min_sqnr, threads=o.threads, layers=not o.outputs_only)  # fmt: skip
    if o.json:
        print_json(result.to_json())
    else:
        _show_comparison(make_console(), result, o.all)
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

    console.print(escape(str(result)), style="green" if result.ok else "red", highlight=False)
    known = [x for x in result.layers if x.twin]
    by_noise = result.min_sqnr is not None
    rows = result.layers if every else sorted(known, key=lambda x: x.sqnr if by_noise else -x.error)[:8]
    if not rows:
        return
    table = Table(box=None, pad_edge=False, header_style="bold", title=None if every else "largest errors")
    for column in ("time", "op", "where in the model", "value", "compared with", "dB" if by_noise else "error"):
        table.add_column(column, overflow="fold")
    for x in rows:
        error = "" if x.error != x.error else f"{x.sqnr:.1f}" if by_noise else f"{x.error:.2g}"
        style = "red" if not x.harmless else ""
        table.add_row(str(x.time), escape(x.place.brief), escape(x.place.where), escape(x.value), escape(x.twin), error,
                      style=style)  # fmt: skip
    console.print(table)


def do_check(o: Any) -> int:
    from trivet.api import check
    from trivet.factory import find_model

    with working(o, "capturing"):
        source = find_model(o.model, o.example, o.dynamic)
        result = check(source.model, source.args, source.kwargs, dynamic_shapes=source.dynamic_shapes)
    if o.json:
        print_json(result.to_json())
    else:
        make_console().print(escape(str(result)), style="green" if result.ok else "red", highlight=False)
    return OK if result.ok else BAD
