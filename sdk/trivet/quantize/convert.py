"""From observed graphs to quantised ones: torchao's convert, with the names and places of the model put back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from trivet import tracing
from trivet.error import Error
from trivet.quantize import improve
from trivet.quantize.fxgraph import NAME, Traced, assign, copy_of, fetch, target, vacant, where, written
from trivet.quantize.recipe import Recipe

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

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


def refuse_stored(module: GraphModule, entry: str) -> None:
    """Raises for a graph that has quantise and dequantise operators."""
    for n in module.graph.nodes:
        if n.op == "call_function" and str(n.target).startswith(_STORES):
            raise Error(f"entry {entry!r} is quantised already: {n.target}", node=where(n),
                        remedy="export it without quantize=, or quantise the float model")  # fmt: skip


def copy_graph(module: GraphModule) -> GraphModule:
    """The same graph again, names and places kept, on the same tensors."""
    return torch.fx.GraphModule(module, copy_of(module.graph))


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
