"""Training with quantisation in the loop: a module to train as usual, which trivet.export takes afterwards."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from trivet import tracing
from trivet.error import Error
from trivet.quantize.annotate import Annotator
from trivet.quantize.convert import Quantized, convert, copy_graph, refuse_stored
from trivet.quantize.fold import fold_batch_norms
from trivet.quantize.fxgraph import DROPOUTS, NAME, Capture, Traced, argument, assign, fetch, flatten, target, value
from trivet.quantize.library import torchao
from trivet.quantize.patterns import needed
from trivet.quantize.recipe import Recipe
from trivet.quantize.recipe import recipe as read_recipe
from trivet.quantize.stage import check_operators

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

NORM = "trivet_norm"  # meta of a batch norm: its momentum and eps
EPS = 1e-5  # what torchao's rewriting of batch norm counts with


class Prepared(Traced):
    """A model whose weights and activations go through fake quantisation. Parameters have the model's names.

    train() and eval() switch batch norm, dropout and whether ranges follow the data; branches on self.training that the model itself
    has are fixed as they are in eval(). Export and copy.deepcopy leave it as it is.
    """

    def __init__(
        self, module: GraphModule, reference: GraphModule, capture: Capture, recipe: Recipe, why: dict[str, str]
    ) -> None:
        super().__init__(module, capture.call, capture.guards)
        adopt_missing(self, reference)
        self.reference = reference.graph
        self.example = (capture.args, capture.kwargs or None)
        self.recipe, self.why, self.call = recipe, why, capture.call
        self.meta = dict(module.meta)
        self.train()

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(flatten(self.in_spec, self._names, args, kwargs))

    def train(self, mode: bool = True) -> Prepared:
        """Sets the mode of batch norm, dropout and ranges; see the class."""
        for n in self.graph.nodes:
            i = _mode_index(n)
            if i is not None:
                n.args = (*n.args[:i], mode, *n.args[i + 1 :])
        for m in self.modules():
            m.training = mode
            if hasattr(m, "observer_enabled") and hasattr(m, "activation_post_process"):
                seen = getattr(m.activation_post_process, "min_val", None)
                known = seen is None or (seen.numel() > 0 and bool(torch.isfinite(seen).all()))
                m.observer_enabled[0] = int(mode or not known)  # type: ignore[operator]
        return self


def prepare_qat(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    recipe: str | Recipe = "w8a8",
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    *,
    target: str = "cpu",
) -> Prepared:
    """Makes a module for training with fake quantisation out of a float model.

        prepared = trivet.quantize.prepare_qat(model, (x,))
        optimiser = torch.optim.SGD(prepared.parameters(), 1e-3)
        ...                                                     # the usual loop; prepared.train(), prepared.eval()
        program = trivet.export(prepared, (x,))

    Args:
        model: best trained in float already. It is copied.
        args, kwargs, dynamic_shapes: as of trivet.export. Give the batch size a dynamic dimension when training uses another.
        recipe: with calibrated activations, "w8a8" or "w8a16", or with 8-bit weights only. Of its options only quantize_io counts.
        target: as of trivet.quantize.quantize.

    Raises:
        Error: a recipe that training cannot follow; what cannot be captured.
    """
    from trivet.targets.base import find

    chosen = read_recipe(recipe)
    if isinstance(recipe, str) and chosen.static:  # of the presets; training does better
        chosen = replace(chosen, bias_correction=False, data_rounding=False)
    chosen = _trainable(chosen)
    torchao()
    from torchao.quantization.pt2e.quantize_pt2e import prepare_qat_pt2e

    if not isinstance(model, torch.nn.Module):
        raise Error(f"prepare_qat trains a torch.nn.Module, got {type(model).__name__}")
    with dropouts():
        capture = Capture("forward", copy.deepcopy(model), tuple(args), kwargs, dynamic_shapes)
    module = capture.module
    refuse_stored(module, "forward")
    check_operators(chosen, [module])
    _training_form(module)
    _remember(module)
    reference = copy_graph(module)
    annotator = Annotator(chosen, find(target).integer(), qat=True)
    with tracing.quiet(), needed():
        prepared = prepare_qat_pt2e(module, annotator)
    _right_eps(prepared)
    for p in prepared.parameters():
        p.requires_grad_(p.is_floating_point())
    return Prepared(prepared, reference, capture, chosen, annotator.plan.why)


def _remember(module: GraphModule) -> None:
    """Notes on the nodes what torchao's rewriting of batch norms forgets."""
    for n in module.graph.nodes:
        n.meta[NAME] = n.name
        if target(n) == "aten.batch_norm":
            n.meta[NORM] = tuple(n.args[6:8])


def finish(prepared: Prepared, name: str = "forward") -> Quantized:
    """What training made, converted. prepared stays as it is."""
    trained = copy.deepcopy(prepared).eval()
    module = torch.fx.GraphModule(trained, trained.graph)
    module.meta.update(trained.meta)
    for n in list(module.graph.nodes):
        if target(n) in DROPOUTS:
            n.replace_all_uses_with(n.args[0])
            module.graph.erase_node(n)
    _shift_variance(module)
    with needed():
        converted = convert(module)
    names = {n.name: n.meta[NAME] for n in converted.graph.nodes if NAME in n.meta and n.name != n.meta[NAME]}
    reference = torch.fx.GraphModule(trained, trained.reference)
    fold_batch_norms(reference, alone=False)
    args, kwargs = prepared.example
    return Quantized(name, Traced(converted, prepared.call, prepared.guards), args, kwargs, None, prepared.recipe, reference, converted,
                     names, why=prepared.why)  # fmt: skip


def _trainable(r: Recipe) -> Recipe:
    for part in (r, *(x for _, x in r.rules if x is not None)):
        if part.half or part.weight is None or part.weight.dtype != "i8" or part.weight.group:
            raise Error(f"training goes with 8-bit weights per channel or tensor, not with {r.name or part.weight}",
                        remedy="recipe='w8a8' or 'w8a16'")  # fmt: skip
        if part.activation is not None and part.activation.dynamic:
            raise Error("training goes with activations of calibrated range", remedy="recipe='w8a8' or 'w8a16'")
    if r.equalize:
        raise Error("equalize has no meaning in training", remedy="leave it out")
    return r


# ---- graphs that can be trained -----------------------------------------------------------------------------------------
@cache
def _dropout() -> Any:
    """An operator that keeps dropout visible while a model is captured in eval mode."""

    @torch.library.custom_op("trivet::dropout", mutates_args=(), schema="(Tensor x, float p, str kind) -> Tensor")
    def dropout(x: torch.Tensor, p: float, kind: str) -> torch.Tensor:
        return x.clone()

    @dropout.register_fake
    def _(x: Any, p: float, kind: str) -> Any:
        return torch.empty_like(x)

    return dropout


_KINDS = {"dropout": "dropout", "dropout1d": "feature_dropout", "dropout2d": "feature_dropout", "dropout3d": "feature_dropout",
          "alpha_dropout": "alpha_dropout", "feature_alpha_dropout": "feature_alpha_dropout"}  # fmt: skip


@contextmanager
def dropouts() -> Iterator[None]:
    """While active, torch.nn.functional's dropouts become trivet::dropout."""
    functional = torch.nn.functional
    saved = {name: getattr(functional, name) for name in _KINDS}

    def replacement(name: str) -> Any:
        def call(input: Any, p: float = 0.5, training: bool = False, inplace: bool = False) -> Any:
            return _dropout()(input, float(p), _KINDS[name])

        return call

    for name in saved:
        setattr(functional, name, replacement(name))
    try:
        yield
    finally:
        for name, f in saved.items():
            setattr(functional, name, f)


def _training_form(module: GraphModule) -> None:
    """Batch norms and dropouts as operators with a training flag, off."""
    graph = module.graph
    for n in list(graph.nodes):
        if target(n) == "trivet.dropout":
            overload = getattr(torch.ops.aten, str(n.args[2])).default
            _replace(graph, n, n, overload, (n.args[0], n.args[1], False))
        elif target(n) == "aten._native_batch_norm_legit_no_training":
            result = next((u for u in n.users if u.args[1] == 0), None)
            if result is not None and len(n.users) == 1:
                momentum = argument(n, "momentum") or 0.1
                parts = [argument(n, k) for k in ("input", "weight", "bias", "running_mean", "running_var")]
                parts[1:3] = _affine(module, n, parts)
                _replace(
                    graph,
                    n,
                    result,
                    torch.ops.aten.batch_norm.default,
                    (*parts, False, momentum, argument(n, "eps"), False),
                )
    graph.eliminate_dead_code()
    module.recompile()


def _affine(module: GraphModule, n: Node, parts: list[Any]) -> list[Any]:
    """Weight and bias of a batch norm; torchao's patterns need both."""
    out = []
    for node, part, fill in ((parts[1], "ones", torch.ones_like), (parts[2], "zeros", torch.zeros_like)):
        if node is None:
            name = f"{str(parts[3].target).rpartition('.')[0]}.{part}"
            assign(module, name, fill(fetch(module, str(parts[3].target))))
            with module.graph.inserting_before(n):
                node = module.graph.get_attr(name)
            node.meta["val"] = value(parts[3])
        out.append(node)
    return out


def _replace(graph: torch.fx.Graph, old: Node, result: Node, overload: Any, args: tuple[Any, ...]) -> None:
    with graph.inserting_before(old):
        new = graph.call_function(overload, args)
    new.meta.update(result.meta)
    result.replace_all_uses_with(new)


def _mode_index(n: Node) -> int | None:
    """Position of the training flag among the arguments of a node."""
    name = target(n)
    if name == "aten.batch_norm":
        return 5
    return 2 if name in DROPOUTS else None


def _right_eps(prepared: GraphModule) -> None:
    """torchao's rewriting of convolution and batch norm counts with the default eps and momentum: puts the model's in."""
    for n in prepared.graph.nodes:
        if target(n) == "aten.batch_norm" and NORM in n.meta:
            momentum, eps = n.meta[NORM]
            n.args = (*n.args[:6], momentum, eps, *n.args[8:])
            for add in list(n.args[4].users):
                if target(add) == "aten.add" and add.args[0] is n.args[4]:
                    add.args = (add.args[0], eps)
    prepared.recompile()


def _shift_variance(module: GraphModule) -> None:
    """convert folds with torchao's eps: the variance makes up for the difference."""
    done = set()
    for n in module.graph.nodes:
        if target(n) == "aten.batch_norm" and NORM in n.meta and n.args[7] != EPS and str(n.args[4].target) not in done:
            done.add(str(n.args[4].target))
            var = fetch(module, str(n.args[4].target))
            assign(module, str(n.args[4].target), var.detach() + (n.args[7] - EPS))
            for add in list(n.args[4].users):
                if target(add) == "aten.add":
                    add.args = (add.args[0], EPS)
            n.args = (*n.args[:7], EPS, *n.args[8:])


def adopt_missing(owner: torch.nn.Module, module: GraphModule) -> None:
    """Tensors that only the other graph names."""
    for n in module.graph.nodes:
        if n.op == "get_attr":
            try:
                fetch(owner, str(n.target))
            except AttributeError:
                t = fetch(module, str(n.target))
                assign(owner, str(n.target), t, parameter=isinstance(t, torch.nn.Parameter))


__all__ = ["Prepared", "dropouts", "finish", "prepare_qat"]
