"""What users call: export = quantize -> capture -> lower, check, load. Each stage's value can be printed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trivet.error import Error
from trivet.runtime import load

if TYPE_CHECKING:
    from trivet.importer import Problem
    from trivet.ir.graph import Module
    from trivet.program import Program
    from trivet.quantize.convert import Quantized
    from trivet.quantize.recipe import Recipe

MAX_DROP = 0.01

__all__ = ["Check", "capture", "check", "export", "load", "lower"]


def export(
    model: Any,
    args: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    quantize: str | Recipe | None = None,
    calibrate: Any = None,
    metric: Callable[[Any], Any] | None = None,
    max_drop: float = MAX_DROP,
    target: str = "cpu",
    name: str = "",
    place: Mapping[str, str] | None = None,
    strict: bool = False,
    fallback: bool | None = None,
    device_io: Iterable[str] | str | bool = False,
    memories: Mapping[str, int] | None = None,
    golden: int = 0,
    debug: bool = True,
    dump_after: Iterable[str] | str = (),
    skip: Iterable[str] | str = (),
) -> Program:
    """Makes a program of a PyTorch model: captures it, optimises, places, plans all memory.

    Args:
        model: a torch.nn.Module, a torch.export.ExportedProgram, the path of a .pt2 file; or several entries that share
            weights and state: {name: (module, args)} or {name: (module, args, kwargs)}.
        args: example positional arguments, a tuple. Only their types and sizes matter.
        kwargs: example keyword arguments.
        dynamic_shapes: as for torch.export.export; for several entries {name: dynamic_shapes}.
        quantize: None: as the model is. "w8a8", "w8a8-dynamic", "w8a16", "w8", "w4g32" (any group), "w4g32a8", "f16", "bf16", or a
            trivet.Recipe. Program.quantization tells what every layer became.
        calibrate: for recipes with stored activations: an iterable of argument tuples, of (args, kwargs), or of tensors for a model of
            one argument; for several entries {name: iterable}. A few dozen typical ones.
        metric: function of a net, which it calls as the model is called (several entries: net.encode(x); net.reset()); gives a
            number, higher is better. It runs on the float model and on the program.
        max_drop: what the metric may lose, in its own units. The layers that hurt most are kept in higher precision until that
            holds.
        target: delegates in order of preference, e.g. "cpu" or "cuda.sm87 > cpu". A node goes to the first one that takes it, unless
            copies would cost more than it saves.
        place: pins: {module path: delegate}. All nodes below a path go there, the longest path wins; "" is the whole model.
        strict: what the first delegate does not take is an error that names it; pinned nodes are no part of that.
        fallback: parts of other delegates carry an alternative for the CPU, which runs where the delegate is missing or refuses. Default:
            unless strict. Without it the delegate's inner values need no memory of the plan.
        device_io: inputs and outputs by name (True: all) that lie in the memory of the delegate which reads or writes them, where that is
            not the host's: the caller binds device buffers then.
        name: of the program, for people; default: the class of the model.
        memories: budgets in bytes of the device's memories, fastest first: {"dtcm": 65536, "sram": 524288}; 0: as much as
            it takes. Short-lived small values go to the fast ones; what does not fit is an error that names the largest. The name
            of a delegate's own memory ("vram") gives that one a budget.
        golden: how many pairs of random inputs and their outputs to put into the file for each entry, for a device to check itself
            with (`trv_run selftest`, a deployed firmware's self-test, trv_selftest in C).
        debug: keep names, module paths and source lines in the file (messages and tools show them; a strip away).
        dump_after: passes whose result is printed to stderr as text.
        skip: optimising passes to leave out, to find one that goes wrong.

    Returns:
        The program: print it, save(path) it, load() it.

    Raises:
        Error: naming every operation that cannot be exported, with module path, source line and remedy; the layers that lose most
            when max_drop cannot be held.
    """
    from trivet import frontend

    entries, shapes = _entries(model, args, kwargs, dynamic_shapes)
    title = name or _name(model)
    trained = any(type(e[0]).__module__ == "trivet.quantize.qat" for e in entries.values())

    def finish(entries: Any, shapes: Any, recipe: Recipe | None, quantised: Sequence[Quantized]) -> Program:
        module = frontend.capture(entries, shapes, name=title)
        return lower(module, quantize=recipe, quantized=quantised, target=target, place=place, strict=strict, fallback=fallback,
                     device_io=device_io, memories=memories, debug=debug, dump_after=dump_after, skip=skip)  # fmt: skip

    if quantize is None and not trained:
        for what, given in (("calibrate", calibrate), ("metric", metric)):
            if given is not None:
                raise Error(f"{what} goes with quantize", remedy="for example quantize='w8a8'")
    if metric is None and max_drop != MAX_DROP:
        raise Error(
            f"max_drop={max_drop!r} goes with metric", remedy="give a function of a net that tells how good it is"
        )
    if quantize is None and not trained:
        program = finish(entries, shapes, None, ())
    else:
        from trivet.quantize.flow import Work, export_quantised
        from trivet.quantize.recipe import recipe

        work = Work(entries, shapes, None if quantize is None else recipe(quantize), calibrate, target, finish)
        program = export_quantised(work, metric, max_drop)
    if golden:
        from trivet import golden as pairs

        program = pairs.add(program, golden)
    return program


def capture(
    model: Any,
    args: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    name: str = "",
) -> Module:
    """The model as IR, nothing optimised yet. print() shows its text form. Arguments as of export."""
    from trivet import frontend

    entries, shapes = _entries(model, args, kwargs, dynamic_shapes)
    return frontend.capture(entries, shapes, name=name or _name(model))


def lower(
    module: Module,
    *,
    quantize: str | Recipe | None = None,
    quantized: Iterable[Quantized] = (),
    target: str = "cpu",
    place: Mapping[str, str] | None = None,
    strict: bool = False,
    fallback: bool | None = None,
    device_io: Iterable[str] | str | bool = False,
    memories: Mapping[str, int] | None = None,
    debug: bool = True,
    dump_after: Iterable[str] | str = (),
    skip: Iterable[str] | str = (),
) -> Program:
    """Last stage: runs the passes on a captured module (in place) and emits the program. Arguments as of export, and

    Args:
        quantize: the recipe that the module was quantised by; "f16" and "bf16" are done here.
        quantized: what trivet.quantize.quantize returned for the module's entries, for the report.
    """
    from trivet import emit, pipeline
    from trivet.targets.base import Memory, find

    budgets = tuple(Memory(n, i, b) for i, (n, b) in enumerate((memories or {}).items()))
    slots = device_io if isinstance(device_io, bool) else _names(device_io)
    options = pipeline.Options(dump_after=_names(dump_after), skip=_names(skip), memories=budgets, place=dict(place or {}),
                               strict=strict, fallback=fallback, device_io=slots)  # fmt: skip
    recipe = None
    if quantize is not None:
        from trivet.quantize.recipe import recipe as read

        recipe = read(quantize)
        options.quantize_io, options.half = recipe.quantize_io, recipe if recipe.half else None
        if recipe.half and recipe.rules:
            from trivet.ir.ops import OPS
            from trivet.ir.rewrite import graphs_of
            from trivet.quantize.kinds import KINDS
            from trivet.quantize.recipe import check_rules

            paths = {n.loc.module for graph, _ in graphs_of(module) for n in graph.nodes}
            check_rules(recipe, paths, KINDS | set(OPS))
    context = pipeline.Context(find(target), options)
    pipeline.run_passes(module, context)
    text = ""
    if recipe is not None or context.report.quant:
        from trivet.quantize.flow import conclude

        report = conclude(module, context, list(quantized), recipe)
        text = json.dumps(report.to_json(), separators=(",", ":")) if report is not None else ""
    return emit.emit(module, context, debug=debug, quantization=text)


@dataclass(frozen=True, slots=True)
class Check:
    """What check() found; true when nothing stands in the way.

    Attributes:
        problems: operations that cannot be exported, in order of execution.
        operations: how many operations the model has.
    """

    problems: tuple[Problem, ...]
    operations: int

    @property
    def ok(self) -> bool:
        return not self.problems

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        if self.ok:
            return f"ok: all {self.operations} operations can be exported"
        lines = [f"{len(self.problems)} operations cannot be exported:"]
        for p in self.problems:
            lines.append(f"  {p.where}: {p.reason}" if p.where else f"  {p.reason}")
            if p.remedy:
                lines.append(f"    to do: {p.remedy}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """For tools."""
        fields = ("op", "module", "source", "reason", "remedy")
        return {"ok": self.ok, "operations": self.operations,
                "problems": [{f: getattr(p, f) for f in fields} for p in self.problems]}  # fmt: skip


def check(
    model: Any, args: Any = None, kwargs: Mapping[str, Any] | None = None, *, dynamic_shapes: Any = None
) -> Check:
    """Finds everything that stands in the way of export, at once. Arguments as of export."""
    from trivet import frontend
    from trivet.importer import Problem

    entries, shapes = _entries(model, args, kwargs, dynamic_shapes)
    try:
        module, problems = frontend.attempt(entries, shapes, name=_name(model))
    except Error as e:  # torch.export itself cannot capture it
        return Check((Problem("", "", e.node, e.reason, e.remedy),), 0)
    return Check(tuple(problems), sum(len(g.nodes) for g in module.entries.values()))


def _entries(model: Any, args: Any, kwargs: Mapping[str, Any] | None,
             dynamic_shapes: Any) -> tuple[dict[str, tuple[Any, ...]], Mapping[str, Any] | None]:  # fmt: skip
    """All ways to name what is exported, as {entry: (model, args, kwargs)}."""
    if isinstance(model, Mapping):
        if args is not None or kwargs is not None:
            raise Error("args and kwargs belong to one model; with several entries each brings its own",
                        remedy='export({"encode": (encoder, args), "decode": (decoder, args, kwargs)})')  # fmt: skip
        entries = {}
        for name, given in model.items():
            if not isinstance(given, (tuple, list)):
                given = (given, (), None)
            if not 1 <= len(given) <= 3:
                raise Error(
                    f"entry {name!r}: (module, args) or (module, args, kwargs) expected, got {len(given)} values"
                )
            entries[name] = (given[0], *_arguments(name, given[1] if len(given) > 1 else (),
                                                   given[2] if len(given) > 2 else None))  # fmt: skip
        if dynamic_shapes is not None and not isinstance(dynamic_shapes, Mapping):
            raise Error("several entries: dynamic_shapes={entry: its dynamic shapes} expected, "
                        f"got {type(dynamic_shapes).__name__}")  # fmt: skip
        return entries, dynamic_shapes
    shapes = None if dynamic_shapes is None else {"forward": dynamic_shapes}
    return {"forward": (model, *_arguments("forward", args, kwargs))}, shapes


def _arguments(
    entry: str, args: Any, kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any] | None]:
    if args is not None and not isinstance(args, (tuple, list)):
        raise Error(f"entry {entry!r}: the example arguments must be a tuple, got {type(args).__name__}",
                    remedy="write (x,) for one argument")  # fmt: skip
    return tuple(args or ()), dict(kwargs) if kwargs else None


def _name(model: Any) -> str:
    if isinstance(model, Mapping):
        return "+".join(str(k) for k in model)
    if isinstance(model, (str, os.PathLike)):
        return Path(os.fsdecode(model)).stem
    return type(model).__name__


def _names(passes: Iterable[str] | str) -> tuple[str, ...]:
    return tuple(p.strip() for p in passes.split(",") if p.strip()) if isinstance(passes, str) else tuple(passes)
