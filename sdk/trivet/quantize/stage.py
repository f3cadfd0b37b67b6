"""The quantisation stage: a float model and a recipe become a module with quantise and dequantise operators that capture takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from trivet import tracing
from trivet.error import Error
from trivet.quantize.annotate import Annotator
from trivet.quantize.calibrate import Calibration
from trivet.quantize.convert import Quantized
from trivet.quantize.fxgraph import Capture, assign, fetch, place, written
from trivet.quantize.kinds import KINDS
from trivet.quantize.library import torchao
from trivet.quantize.recipe import Recipe, check_rules
from trivet.quantize.recipe import recipe as read_recipe

if TYPE_CHECKING:
    from torch.fx import GraphModule


def quantize(
    model: Any,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    recipe: str | Recipe = "w8a8",
    calibrate: Iterable[Any] | None = None,
    target: str = "cpu",
    name: str = "forward",
) -> Quantized:
    """Quantises a model. It is not changed; buffers that it writes have their content back afterwards.

    Args:
        model: torch.nn.Module, ExportedProgram or path of a .pt2 file, in float.
        args, kwargs, dynamic_shapes: as of trivet.export.
        recipe: a Recipe, or the name of one.
        calibrate: batches of typical inputs, for recipes with calibrated activations: argument tuples, (args, kwargs), or
            tensors for a model of one argument. Buffers that the model writes go on from batch to batch.
        target: delegates in order of preference; the first one says what is computed in integers.
        name: of the entry.

    Raises:
        Error: what cannot be captured, calibration data that is missing, empty, not finite or of the wrong form, a model that is
            quantised already.
    """
    given = {name: (model, args, kwargs)}
    data = calibrate if calibrate is None or isinstance(calibrate, Mapping) else {name: calibrate}
    return quantize_entries(given, {name: dynamic_shapes}, recipe=recipe, calibrate=data, target=target)[name]


def quantize_entries(
    entries: Mapping[str, tuple[Any, ...]],
    dynamic_shapes: Mapping[str, Any] | None = None,
    *,
    recipe: str | Recipe,
    calibrate: Any = None,
    target: str = "cpu",
) -> dict[str, Quantized]:
    """The same for several entries that share weights and state.

    Args:
        entries: {entry: (model, args, kwargs)}.
        dynamic_shapes: {entry: its dynamic shapes}.
        recipe: of all.
        calibrate: {entry: batches}; run in the order of the entries, so that state goes from one to the next.
        target: as of quantize.
    """
    chosen = read_recipe(recipe)
    if chosen.half:
        raise Error(
            f"{chosen.half} is no matter of integers", remedy=f"export(quantize={chosen.half!r}) converts after capture"
        )
    torchao()
    data = _calibration(entries, chosen, calibrate)
    from trivet.targets.base import find

    table = find(target).integer()
    works = {}
    for name, (model, args, kwargs) in entries.items():
        shapes = None if dynamic_shapes is None else dynamic_shapes.get(name)
        works[name] = Calibration(name, Capture(name, model, tuple(args or ()), kwargs, shapes), shapes, chosen)
    check_operators(chosen, [w.module for w in works.values()])
    with _state_kept(w.module for w in works.values()):
        shared = _several({name: w.module for name, w in works.items()})
        for name, w in works.items():
            w.start(data.get(name), shared)
        for w in works.values():
            w.prepare(Annotator(chosen, table))
        for w in works.values():
            w.calibrate()
        out = {name: w.finish() for name, w in works.items()}
    if len(out) > 1:
        _share([q.converted for q in out.values()])
        for q in out.values():
            q.module = works[q.entry].capture.traced(q.converted)
    return out


def check_operators(recipe: Recipe, modules: Iterable[GraphModule]) -> None:
    """Refuses rules that mean no operator of these graphs."""
    if recipe.rules:
        nodes = [n for m in modules for n in m.graph.nodes if n.op == "call_function"]
        check_rules(recipe, {place(n)[0] for n in nodes}, KINDS, {n.name for n in nodes})


def _calibration(entries: Mapping[str, Any], recipe: Recipe, calibrate: Any) -> Mapping[str, Any]:
    """{entry: batches}, checked for what is missing."""
    if calibrate is None:
        calibrate = {}
    elif not isinstance(calibrate, Mapping):
        if len(entries) > 1:
            raise Error("several entries: calibrate={entry: batches} expected", remedy="give each entry its own data")
        calibrate = {next(iter(entries)): calibrate}
    if extra := sorted(set(calibrate) - set(entries)):
        raise Error(
            f"calibrate names {extra}, but the entries are {sorted(entries)}", remedy="calibrate={entry: batches}"
        )
    missing = [n for n in entries if calibrate.get(n) is None]
    if recipe.calibrated and missing:
        of = "" if len(entries) == 1 else f" of {', '.join(missing)}"
        raise Error(f"the recipe {recipe.name or 'with calibrated activations'} needs calibration data{of}",
                    remedy="calibrate=[(x,), ..] with some typical inputs, or quantize='w8a8-dynamic', which needs none")  # fmt: skip
    return calibrate  # type: ignore[no-any-return]


# ---- several entries ----------------------------------------------------------------------------------------------------
def _several(modules: Mapping[str, torch.nn.Module]) -> set[Any]:
    """Keys of tensors that more than one entry has."""
    seen: set[Any] = set()
    twice: set[Any] = set()
    for m in modules.values():
        mine = {tracing.key_of(t) for t in (*m.parameters(), *m.buffers())}
        twice |= seen & mine
        seen |= mine
    return twice


def _share(modules: Sequence[GraphModule]) -> None:
    """Stored weights that came out equal in several entries become one tensor."""
    known: dict[Any, torch.Tensor] = {}
    for m in modules:
        state = written(m)
        for n in m.graph.nodes:
            if n.op == "get_attr" and str(n.target) not in state:
                t = fetch(m, str(n.target))
                if isinstance(t, torch.Tensor) and not isinstance(t, torch.nn.Parameter) and t.numel():
                    key = (
                        t.dtype,
                        tuple(t.shape),
                        t.contiguous().view(torch.uint8).numpy().tobytes() if t.dim() else t.item(),
                    )
                    same = known.setdefault(hash(key), t)
                    if same is not t and same.dtype == t.dtype and torch.equal(same, t):
                        assign(m, str(n.target), same)


@contextmanager
def _state_kept(modules: Iterable[GraphModule]) -> Iterator[None]:
    """Buffers that the graphs write have their content back afterwards."""
    saved = {}
    for m in modules:
        for name in written(m):
            t = fetch(m, name)
            saved[tracing.key_of(t)] = (t, t.detach().clone())
    try:
        yield
    finally:
        with torch.no_grad():
            for t, before in saved.values():
                t.copy_(before)
