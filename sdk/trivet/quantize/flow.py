"""Quantised export from end to end: quantise, capture, lower, report; with a metric as often as its gate asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trivet.error import Error
from trivet.quantize.measure import Measured, effects, measure
from trivet.quantize.recipe import Recipe
from trivet.quantize.recipe import recipe as read_recipe
from trivet.quantize.report import Report, attach, read_layers
from trivet.quantize.search import Built, Candidate, Ranges, Reference, search

if TYPE_CHECKING:
    from trivet.ir.graph import Module
    from trivet.pipeline import Context
    from trivet.program import Program
    from trivet.quantize.convert import Quantized

BATCHES = 2  # that dB are measured on
Entries = Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Work:
    """What export was asked for.

    Attributes:
        entries: {entry: (model, args, kwargs)}.
        shapes: {entry: dynamic shapes}, or None.
        recipe: of all entries; None: only those prepared by prepare_qat are quantised.
        calibrate: as the user gave it.
        target: delegates in order of preference.
        finish: (entries, shapes, recipe, quantised) -> program: the stages behind.
    """

    entries: Entries
    shapes: Mapping[str, Any] | None
    recipe: Recipe | None
    calibrate: Any
    target: str
    finish: Callable[[Entries, Mapping[str, Any] | None, Recipe | None, Sequence[Quantized]], Program]

    def program(self, recipe: Recipe, calibrate: Any) -> Program:
        """One program."""
        return self.finished(self.quantised(recipe, calibrate), recipe)

    def quantised(self, recipe: Recipe, calibrate: Any) -> Mapping[str, Quantized]:
        """Entries after the quantisation stage; none for half precision, which comes later."""
        if recipe.half:
            if calibrate is not None:
                raise Error(f"calibrate goes with recipes of integers, not with {recipe.half}")
            return {}
        from trivet.quantize.stage import quantize_entries

        return quantize_entries(self.entries, self.shapes, recipe=recipe, calibrate=calibrate, target=self.target)

    def trained(self) -> Program:
        """The program of entries that were prepared for training; others stay as they are."""
        from trivet.quantize.qat import Prepared, finish

        made = {}
        for name, (model, args, kwargs) in self.entries.items():
            if isinstance(model, Prepared):
                q = made[name] = finish(model, name)
                q.dynamic_shapes = (self.shapes or {}).get(name)
                if args or kwargs:
                    q.args, q.kwargs = args, kwargs
        return self.finished(made, next(iter(made.values())).recipe)

    def finished(self, made: Mapping[str, Quantized], recipe: Recipe | None) -> Program:
        """The program of what the stage made."""
        entries, shapes = dict(self.entries), dict(self.shapes or {}) or None
        for name, q in made.items():
            entries[name] = q.module, q.args, q.kwargs
            shapes = {**(shapes or {}), name: q.dynamic_shapes}
        return self.finish(entries, shapes, recipe, list(made.values()))


def export_quantised(work: Work, metric: Any = None, max_drop: float = 0.01) -> Program:
    """The program, with its report in it.

    Raises:
        Error: as of quantize.stage and search.search; arguments that do not go together.
    """
    prepared = [name for name, e in work.entries.items() if type(e[0]).__name__ == "Prepared"]
    if prepared:
        for what, given in (("quantize", work.recipe), ("calibrate", work.calibrate), ("metric", metric)):
            if given is not None:
                raise Error(f"entry {prepared[0]!r} was prepared for training by a recipe, {what} cannot be given too",
                            remedy=f"leave {what} out")  # fmt: skip
        return work.trained()
    assert work.recipe is not None
    if metric is None:
        return work.program(work.recipe, work.calibrate)
    if not callable(metric):
        raise Error(f"metric is a {type(metric).__name__}; a function of a net that gives a number is expected")
    ranges = Ranges()
    base = work.recipe
    calibrate = _kept(work.calibrate, list(work.entries), ranges)
    chosen = precisions(base, work.target)

    def build(kept: Sequence[str], precision: str) -> Built:
        patterns = [p for name in kept for p in name.split(" + ")]
        recipe = base.keep(dict.fromkeys(patterns, chosen[precision])) if kept else base
        made = work.quantised(recipe, calibrate)
        program = work.finished(made, recipe)
        report = program.quantization or Report()
        return Built(program, report, lambda: candidates(report, harm(made.values())))

    reference = Reference({name: _module(name, e[0]) for name, e in work.entries.items()})
    found = search(build, reference, metric, max_drop, precisions=list(chosen), calibration=ranges)
    return found.program.with_quantization(found.report)


def precisions(recipe: Recipe, target: str) -> dict[str, Any]:
    """What layers may be kept in, the cheapest first: {name: recipe of a rule}."""
    from trivet.targets.base import find

    out: dict[str, Any] = {}
    if recipe.half:
        return {"float": None}
    table = find(target).integer()
    if recipe.static and recipe.activation is not None and recipe.activation.dtype == "i8":
        if any("i16" in row.activations for row in table.values()):
            out["i16"] = read_recipe("w8a16")
    elif recipe.weight is not None and recipe.weight.dtype == "i4":
        out["i8 weights"] = read_recipe("w8a8-dynamic" if recipe.activation is not None else "w8")
    return {**out, "float": None}


def candidates(report: Report, harm: Mapping[tuple[str, str], float] | None = None) -> list[Candidate]:
    """Quantised layers that rules of a recipe can name: by the names of their operators; where those are not known, by module paths
    that hold no other layer. What they lose: harm where it is measured, else what the layer's own result loses.
    """
    rows = [x for x in report.layers if x.form in ("integer", "weights", "half")]
    paths = {p for x in report.layers for p in x.module.split(" + ")}
    holds = {p for p in paths if not p or any(o != p and o.startswith(f"{p}.") for o in paths)}
    out: dict[str, Candidate] = {}
    for x in rows:
        name = " + ".join([f"node:{n}" for n in x.nodes] or [p for p in x.module.split(" + ") if p not in holds])
        known = [harm[x.entry, n] for n in x.nodes if (x.entry, n) in harm] if harm else []
        low = min(known) if known else x.low
        if name and (name not in out or low < out[name].db):
            out[name] = Candidate(name, str(x), low)
    return list(out.values())


def harm(quantised: Iterable[Quantized]) -> dict[tuple[str, str], float]:
    """{(entry, node): dB of the results when only that operator is quantised}, where measuring that is cheap."""
    import torch

    out: dict[tuple[str, str], float] = {}
    for q in quantised:
        if q.reference is not None and q.batches:
            with torch.no_grad():
                found = effects(q.reference, q.converted, q.batches[len(q.batches) // 2], names=q.names)
            out |= {(q.entry, n): db for n, db in found.items()}
    return out


def _kept(calibrate: Any, entries: Sequence[str], ranges: Ranges) -> Any:
    """The data as lists, since every try reads it; their ranges noted."""
    if calibrate is None:
        return None
    if isinstance(calibrate, Mapping):
        return {
            name: list(ranges.note(name, data)) if isinstance(data, Iterable) else data
            for name, data in calibrate.items()
        }
    if isinstance(calibrate, (str, bytes)) or hasattr(calibrate, "shape") or not isinstance(calibrate, Iterable):
        return calibrate  # the stage says what is wrong with it
    return list(ranges.note(entries[0], calibrate))


def _module(name: str, model: Any) -> Any:
    """The model as something to call."""
    import torch

    if isinstance(model, torch.nn.Module):
        return model
    if isinstance(model, torch.export.ExportedProgram):
        return model.module()
    raise Error(
        f"entry {name!r}: metric needs the model as a torch.nn.Module or ExportedProgram, got {type(model).__name__}"
    )


# ---- the report ---------------------------------------------------------------------------------------------------------
def conclude(module: Module, context: Context, quantised: Sequence[Quantized], recipe: Recipe | None) -> Report | None:
    """The report of a lowered module; None when nothing in it is quantised.

    Args:
        module: after all passes.
        context: of the passes.
        quantised: what the quantisation stage made, () when the model came quantised.
        recipe: None for that too.
    """
    if not context.report.quant and recipe is None:
        return None
    report = Report(recipe_text(recipe), max((q.seen for q in quantised), default=0))
    report.layers = read_layers(module, {row.name: row.why for row in context.report.quant if row.why})
    for q in quantised:
        attach(report.layers, measured(q))
        report.notes += [n if len(quantised) == 1 else f"{q.entry}: {n}" for n in q.notes]
    for x in report.layers:
        if x.form == "float" and not x.why:
            x.why = "it stays float32" if recipe is not None and recipe.half else "it has no integer form"
    report.notes += context.report.notes.get("narrow_floats", [])
    report.bytes_before = weight_bytes(quantised)
    report.bytes_after = sum(_const_bytes(module).values())
    return report


def recipe_text(recipe: Recipe | None) -> str:
    """One line. A recipe that training followed has the name of the one without training's options."""
    if recipe is None:
        return ""
    plain = replace(recipe, bias_correction=True, data_rounding=True) if recipe.static else recipe
    return recipe.name or plain.name or "; ".join(str(recipe).splitlines())


def measured(q: Quantized) -> list[Measured]:
    """dB of one entry on the first calibration batches; without any on its example arguments."""
    import torch
    from torch.utils import _pytree as pytree

    if q.reference is None:
        return []
    batches: list[Any] = list(q.batches[:BATCHES])
    if not batches:
        batches = [(tuple(pytree.tree_leaves((q.args, q.kwargs or {}))), {})]
        q.notes.append("dB on the example arguments, since there are no calibration data")
    with torch.no_grad():
        return measure(q.reference, q.converted, batches, names=q.names, why=q.why, entry=q.entry)


def weight_bytes(quantised: Sequence[Quantized]) -> int:
    """Bytes of the float models' parameters and of the buffers that their graphs read, shared ones once."""
    import torch

    from trivet.quantize.fxgraph import fetch

    seen: dict[tuple[int, int], int] = {}
    for q in quantised:
        for n in q.reference.graph.nodes if q.reference is not None else ():
            if n.op == "get_attr" and n.users:
                t: Any = fetch(q.reference, str(n.target))  # type: ignore[arg-type]
                if isinstance(t, torch.Tensor):
                    seen[t.data_ptr(), t.numel()] = t.numel() * t.element_size()
    return sum(seen.values())


def _const_bytes(module: Module) -> dict[int, int]:
    out: dict[int, int] = {}
    for graph in module.entries.values():
        for s in graph.plan.storages:
            if s.const is not None:
                out[id(s.const)] = s.const.data.numel() * s.const.data.element_size()
    return out
