"""The quantisation stage: a float model and a recipe become a module with quantise and dequantise operators that capture takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from trivet import tracing
from trivet.error import Error
from trivet.quantize import improve
from trivet.quantize.annotate import Annotator
from trivet.quantize.batches import batches as read_batches
from trivet.quantize.fold import constant_of, fold_batch_norms
from trivet.quantize.fxgraph import (
    NAME,
    Capture,
    Traced,
    assign,
    copy_of,
    fetch,
    inputs,
    target,
    vacant,
    where,
    written,
)
from trivet.quantize.library import torchao
from trivet.quantize.observe import LogitsObserver
from trivet.quantize.recipe import Recipe
from trivet.quantize.recipe import recipe as read_recipe
from trivet.quantize.rounding import round_to_data

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

KEEP = 16  # calibration calls that are kept for bias correction and reports
_STORES = ("quantized_decomposed.", "torchao.", "trivet.dequantize")
_PLACE = ("nn_module_stack", "stack_trace")


@dataclass(slots=True)
class Quantized:
    """One entry, quantised.

    Attributes:
        entry: its name.
        module: what capture takes, called like the model, with args, kwargs and dynamic_shapes.
        args, kwargs, dynamic_shapes: for capture.
        recipe: what was asked for.
        reference: float graph, batch norms folded; its nodes have the names of those of converted, see names.
        converted: the graph of module.
        names: node of converted: node of reference, where they differ.
        batches: leaves of calls, (leaves, {}) each: at most KEEP of the calibration, spread over it.
        seen: how many batches calibration had.
        why: node of reference: why it stays float.
        notes: lines for people.
    """

    entry: str
    module: Traced
    args: tuple[Any, ...]
    kwargs: dict[str, Any] | None
    dynamic_shapes: Any
    recipe: Recipe | None
    reference: GraphModule | None
    converted: GraphModule
    names: dict[str, str] = field(default_factory=dict)
    batches: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    seen: int = 0
    why: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


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

    table = find(target).all[0].integer()
    works = {}
    for name, (model, args, kwargs) in entries.items():
        shapes = None if dynamic_shapes is None else dynamic_shapes.get(name)
        works[name] = _Work(name, Capture(name, model, tuple(args or ()), kwargs, shapes), shapes, chosen)
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


class _Work:
    """One entry on its way."""

    def __init__(self, name: str, capture: Capture, shapes: Any, recipe: Recipe) -> None:
        self.name, self.capture, self.shapes, self.recipe = name, capture, shapes, recipe
        self.module = capture.module
        self.kept: list[list[Any]] = []
        self.notes: list[str] = []
        self.seen = self.calls = 0
        self.every = 1  # of how many calls one is kept
        refuse_stored(self.module, name)

    def start(self, data: Any, shared: set[Any]) -> None:
        """Folds, and equalises with the first batches."""
        self.data = self._batches(data) if data is not None else iter(())
        static = self.recipe.calibrated
        fold_batch_norms(self.module, alone=static)
        if self.recipe.equalize:
            self._take(KEEP)
            pairs = improve.equalize(self.module, self.kept, relu6=self.recipe.equalize_relu6, keep=shared)
            self.notes.append(f"{pairs} pairs of layers equalised")

    def prepare(self, annotator: Annotator) -> None:
        """Puts observers in."""
        from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e

        self.reference = copy_graph(self.module)
        with tracing.quiet():
            self.prepared = prepare_pt2e(self.module, annotator)
        self.plan = annotator.plan
        self.modules = dict(self.prepared.named_modules(remove_duplicate=False))
        self.fixed = observe_constants(self.prepared)

    def calibrate(self) -> None:
        """Runs the batches through."""
        needed = self.recipe.calibrated
        for leaves in self._calls(None if needed else KEEP):
            if needed:
                self._observe(leaves)
        if needed and not self.seen:
            raise Error(f"the calibration data of entry {self.name!r} is empty", remedy="give some typical inputs")

    def _calls(self, limit: int | None) -> Iterator[list[Any]]:
        """Leaves of calls: those kept so far, then the rest."""
        yield from list(self.kept)
        while limit is None or len(self.kept) < limit:
            if (leaves := self._next()) is None:
                return
            yield leaves

    def _take(self, count: int) -> None:
        while len(self.kept) < count and self._next() is not None:
            pass

    def _next(self) -> list[Any] | None:
        leaves = next(self.data, None)
        if leaves is not None:
            if self.calls % self.every == 0:
                if len(self.kept) == KEEP:  # spread over all of them: a recording may begin with silence
                    self.kept, self.every = self.kept[::2], 2 * self.every
                if self.calls % self.every == 0:
                    self.kept.append([t.clone() if isinstance(t, torch.Tensor) else t for t in leaves])
            self.calls += 1
        return leaves

    def _batches(self, data: Any) -> Iterator[list[Any]]:
        for number, leaves in read_batches(self.capture, data, self.name):
            self.seen = number
            yield leaves

    def _observe(self, leaves: Sequence[Any]) -> None:
        """One call of the prepared graph; weights have been seen already."""
        work = self

        class Observing(torch.fx.Interpreter):
            def run_node(self, n: Node) -> Any:
                if n.op == "call_module":
                    (x,) = self.fetch_args_kwargs_from_env(n)[0]
                    if n in work.fixed:
                        return x
                    check_finite(x, work.modules[str(n.target)], n, f"calibration batch {work.seen}")
                return super().run_node(n)

        try:
            with torch.no_grad():
                Observing(self.prepared).run(*leaves, enable_io_processing=False)
        except Error:
            raise
        except Exception as e:
            raise Error(f"calibration batch {self.seen} of entry {self.name!r}: the model fails on it: {tracing.first_line(e)}",
                        remedy="see whether model(*batch) works; sizes must be those of the example or dynamic") from e  # fmt: skip

    def finish(self) -> Quantized:
        """Converts, corrects."""
        if self.recipe.data_rounding:
            done = round_to_data(self.prepared, self.reference, self.kept, centred=self.recipe.bias_correction)
            self.notes.append(f"weights of {done} layers rounded to data")
        converted = convert(self.prepared)
        if self.recipe.bias_correction:
            done = improve.correct_bias(self.reference, converted, self.kept)
            self.notes.append(f"biases of {done} layers corrected")
            converted = torch.fx.GraphModule(converted, converted.graph)
        if self.plan.empty:
            self.notes.append("nothing in this model is quantised by the recipe")
        kwargs = self.capture.kwargs or None
        pairs = [(tuple(leaves), dict[str, Any]()) for leaves in self.kept]
        shapes = self.shapes if self.shapes is not None else self.capture.shapes()
        return Quantized(self.name, self.capture.traced(converted), self.capture.args, kwargs, shapes, self.recipe, self.reference,
                         converted, {}, pairs, self.seen, self.plan.why, self.notes)  # fmt: skip


# ---- pieces that training shares ----------------------------------------------------------------------------------------
def refuse_stored(module: GraphModule, entry: str) -> None:
    """Raises for a graph that has quantise and dequantise operators."""
    for n in module.graph.nodes:
        if n.op == "call_function" and str(n.target).startswith(_STORES):
            raise Error(f"entry {entry!r} is quantised already: {n.target}", node=where(n),
                        remedy="export it without quantize=, or quantise the float model")  # fmt: skip


def copy_graph(module: GraphModule) -> GraphModule:
    """The same graph again, names and places kept, on the same tensors."""
    return torch.fx.GraphModule(module, copy_of(module.graph))


def observe_constants(prepared: GraphModule) -> set[Node]:
    """Shows the weights to their observers; the nodes of these."""
    modules = dict(prepared.named_modules(remove_duplicate=False))
    constants: set[Node] = set()
    state = written(prepared)
    found = set()
    for n in prepared.graph.nodes:
        if (n.op == "get_attr" and str(n.target) not in state) or (
            n.op == "call_function" and (read := list(inputs(n))) and all(x in constants for x in read)
        ):
            constants.add(n)
        elif n.op == "call_module" and n.args[0] in constants:
            w, name = constant_of(prepared, n.args[0])
            observer = modules[str(n.target)]
            check_finite(w, observer, n, f"weight {name}")
            with torch.no_grad():
                observer(w)
            found.add(n)
    return found


def check_finite(x: Any, observer: Any, node: Node, what: str) -> None:
    """Raises for NaN and infinity, which have no place in a range."""
    if not isinstance(x, torch.Tensor) or not x.numel() or not x.is_floating_point():
        return
    low, high = torch.aminmax(x.detach())
    masks = isinstance(observer, LogitsObserver) and not torch.isnan(low)
    if not torch.isfinite(high) or not (torch.isfinite(low) or masks):
        n: Any = node.args[0]
        kind = "NaN" if torch.isnan(low) else "infinity"
        raise Error(f"{what}: {kind} in the values of {n.name}", node=where(n),
                    remedy="calibrate with inputs for which the float model gives finite numbers, or keep this module in float: "
                           "Recipe(rules={'its.path': None})")  # fmt: skip


def convert(prepared: GraphModule) -> GraphModule:
    """Observers become quantise and dequantise operators; weights become integers under the names of the model."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e

    _widen_empty(prepared)
    improve.room_for_biases(prepared)
    names = _weight_names(prepared)
    with torch.no_grad(), tracing.quiet():
        converted = convert_pt2e(prepared)
    _name_weights(converted, names)
    _places(converted)
    return torch.fx.GraphModule(converted, converted.graph)  # without tensors that nothing reads


def _widen_empty(prepared: GraphModule) -> None:
    """Values that were always 0 get the range of 1: any scale would do, a tiny one would not fit into multipliers."""
    for m in prepared.modules():
        low, high = getattr(m, "min_val", None), getattr(m, "max_val", None)
        if (
            isinstance(low, torch.Tensor)
            and isinstance(high, torch.Tensor)
            and low.dim() == 0
            and low == 0
            and high == 0
        ):
            high.fill_(1.0)


def _weight_names(prepared: GraphModule) -> dict[tuple[str, int], str]:
    """(reader, position among its arguments): name of the parameter behind the observer."""
    state = written(prepared)
    out = {}
    for n in prepared.graph.nodes:
        for i, a in enumerate(pytree.tree_leaves(n.args)) if n.op == "call_function" else ():
            source = a
            while isinstance(source, torch.fx.Node) and source.op in ("call_module", "call_function") and source.args:
                source = source.args[0]
            if (
                a is not source
                and isinstance(source, torch.fx.Node)
                and source.op == "get_attr"
                and str(source.target) not in state
            ):
                out[n.meta.get(NAME, n.name), i] = str(source.target)
    return out


def _name_weights(converted: GraphModule, names: Mapping[tuple[str, int], str]) -> None:
    """Gives stored weights the names of the parameters that they were."""
    done: dict[str, str] = {}
    for n in list(converted.graph.nodes):
        for i, a in enumerate(pytree.tree_leaves(n.args)):
            name = names.get((n.meta.get(NAME, n.name), i))
            if name is None or not isinstance(a, torch.fx.Node) or "dequantize" not in target(a):
                continue
            for part, x in zip(("", "_scale", "_zero"), a.args, strict=False):
                if isinstance(x, torch.fx.Node) and x.op == "get_attr" and str(x.target).startswith("_"):
                    old = str(x.target)
                    if old not in done:
                        t = fetch(converted, old)
                        used = any(o.op == "get_attr" and str(o.target) == name for o in converted.graph.nodes)
                        done[old] = name if not part and not used else vacant(converted, f"{name}{part or '_q'}")
                        assign(converted, done[old], t)
                    x.target = done[old]
    converted.recompile()


def _places(converted: GraphModule) -> None:
    """Quantise operators get the place of what makes the value, dequantise operators that of what reads it."""
    for n in converted.graph.nodes:
        if n.op == "call_function" and (
            str(n.target).startswith(_STORES) or (target(n) == "getitem" and n.meta.get("val") is None)
        ):
            near = _source(n) if "dequantize" not in target(n) else _reader(n)
            near = near or _reader(n) or _source(n)
            for key in _PLACE if near is not None else ():
                n.meta.pop(key, None)
                if key in near.meta:  # type: ignore[union-attr]
                    n.meta[key] = near.meta[key]  # type: ignore[union-attr]


def _source(n: Node) -> Node | None:
    while n.args and isinstance(n.args[0], torch.fx.Node):
        n = n.args[0]
        if n.op != "call_function":
            return None
        if not str(n.target).startswith(_STORES):
            return n if "stack_trace" in n.meta else None
    return None


def _reader(n: Node) -> Node | None:
    todo = list(n.users)
    while todo:
        user = todo.pop(0)
        if user.op == "call_function" and not str(user.target).startswith(_STORES) and "nn_module_stack" in user.meta:
            return user
        todo += list(user.users)
    return None


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
