"""One entry of a model on its way through quantisation: folded, observed on calibration data, converted, corrected."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from trivet import tracing
from trivet.error import Error
from trivet.quantize import improve
from trivet.quantize.annotate import Annotator
from trivet.quantize.batches import batches as read_batches
from trivet.quantize.convert import Quantized, convert, copy_graph, refuse_stored
from trivet.quantize.fold import constant_of, fold_batch_norms
from trivet.quantize.fxgraph import Capture, inputs, where, written
from trivet.quantize.observe import LogitsObserver
from trivet.quantize.recipe import Recipe
from trivet.quantize.rounding import WIDEST, round_to_data

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

KEEP = 16  # calibration calls that are kept for bias correction and reports


class Calibration:
    """One entry on its way: start, prepare, calibrate, finish, in this order."""

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
        self.recurrent = {s.node.name for s in self.plan.steps if s.integer and s.kind == "rnn"}
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
                elif n.name in work.recurrent:
                    check_hidden(self.fetch_args_kwargs_from_env(n)[0], n, f"calibration batch {work.seen}")
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
            done, left = round_to_data(self.prepared, self.reference, self.kept, centred=self.recipe.bias_correction)
            rest = f", of {left} to the nearest number: shared, or more than {WIDEST} inputs" if left else ""
            self.notes.append(f"weights of {done} layers rounded to data{rest}")
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


def check_hidden(args: Sequence[Any], node: Node, what: str) -> None:
    """Raises for a state that a recurrent layer could not hold: stored ones go from -1 to 1, as those that it makes itself."""
    hidden = args[1][0] if isinstance(args[1], (list, tuple)) else args[1]
    if isinstance(hidden, torch.Tensor) and hidden.numel() and (most := float(hidden.detach().abs().max())) > 1.01:
        raise Error(f"{what}: the first hidden state of {node.name} reaches {most:.3g}, integer recurrent layers hold -1 to 1",
                    node=where(node), remedy="calibrate with states as the layer makes them, or keep it in float: "
                                             f"Recipe(rules={{'node:{node.name}': None}})")  # fmt: skip


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
