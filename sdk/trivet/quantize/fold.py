"""Batch norm in a captured graph, before anything is observed: into the product in front of it, else as a convolution of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trivet.quantize.fxgraph import argument, assign, fetch, rank, target, vacant, value, written

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import GraphModule, Node

CONVS = ("aten.conv1d", "aten.conv2d", "aten.conv3d")
TRANSPOSED = ("aten.conv_transpose1d", "aten.conv_transpose2d", "aten.conv_transpose3d")
_NORMS = ("aten._native_batch_norm_legit_no_training", "aten.batch_norm")


def fold_batch_norms(module: GraphModule, *, alone: bool) -> None:
    """Takes batch norms with fixed statistics out of a graph.

    Weights are folded in float64 and rounded once. They become new tensors; the model keeps its own.

    Args:
        module: changed in place.
        alone: turn those that no product stands in front of into depthwise convolutions of one cell, which integer kernels compute.
    """
    state = written(module)
    for node in list(module.graph.nodes):
        norm = _Norm.of(module, node, state)
        if norm is None:
            continue
        product = norm.x
        if target(product) in (*CONVS, *TRANSPOSED, "aten.linear") and len(product.users) == 1:
            if target(product) == "aten.linear" and rank(product) != 2:
                continue  # batch norm scales axis 1, linear makes the last one
            if _into(module, product, norm):
                norm.result.replace_all_uses_with(product)
                continue
        if alone and 3 <= rank(norm.x) <= 5:
            _as_conv(module, norm)
    module.graph.eliminate_dead_code()
    module.recompile()


class _Norm:
    """A batch norm: result = x * scale + shift per channel (axis 1), float64."""

    def __init__(self, x: Node, result: Node, scale: Tensor, shift: Tensor, name: str) -> None:
        self.x, self.result, self.scale, self.shift, self.name = x, result, scale, shift, name

    @staticmethod
    def of(module: GraphModule, node: Node, state: set[str]) -> _Norm | None:
        if target(node) not in _NORMS or argument(node, "training", False):
            return None
        names = ("weight", "bias", "running_mean", "running_var")
        nodes = [argument(node, n) for n in names]
        fixed = [n is None or (n.op == "get_attr" and str(n.target) not in state) for n in nodes]
        if not all(fixed) or nodes[2] is None or nodes[3] is None:
            return None
        parts: list[Any] = [None if n is None else fetch(module, str(n.target)).detach().double() for n in nodes]
        weight, bias, mean, var = parts
        result = node
        if target(node) != "aten.batch_norm":
            reads = list(node.users)
            if len(reads) != 1 or reads[0].args[1] != 0:
                return None
            result = reads[0]
        scale = torch.rsqrt(var + float(argument(node, "eps")))
        scale = scale if weight is None else scale * weight
        shift = -mean * scale if bias is None else bias - mean * scale
        return _Norm(node.args[0], result, scale, shift, str(nodes[2].target).rpartition(".")[0])  # type: ignore[arg-type]


def _into(module: GraphModule, product: Node, norm: _Norm) -> bool:
    """Changes the weights of the product; False when they are not constants."""
    w_node, b_node = product.args[1], argument(product, "bias")
    if w_node.op != "get_attr" or (b_node is not None and b_node.op != "get_attr"):  # type: ignore[union-attr]
        return False
    name = str(w_node.target)  # type: ignore[union-attr]
    w = fetch(module, name).detach()
    b = None if b_node is None else fetch(module, str(b_node.target)).detach().double()
    if target(product) in TRANSPOSED:  # [in, out / groups, ..]
        groups = int(argument(product, "groups") or 1)
        wide = w.double().reshape(groups, w.shape[0] // groups, *w.shape[1:])
        per = norm.scale.reshape(groups, 1, -1, *[1] * (w.dim() - 2))
        folded = (wide * per).reshape(w.shape)
    else:
        folded = w.double() * norm.scale.reshape(-1, *[1] * (w.dim() - 1))
    shift = norm.shift if b is None else b * norm.scale + norm.shift
    weight = set_constant(module, product, name, folded.to(w.dtype), replaces=w_node)
    bias_name = str(b_node.target) if b_node is not None else f"{name.removesuffix('weight')}bias"
    bias = set_constant(module, product, bias_name, shift.to(w.dtype), replaces=b_node)
    arguments = list(product.args)
    arguments += [None] * (3 - len(arguments))
    arguments[1:3] = [weight, bias]
    product.args = tuple(arguments)
    product.kwargs = {k: v for k, v in product.kwargs.items() if k not in ("weight", "bias")}
    return True


def constant_of(model: torch.nn.Module, node: Any) -> tuple[Tensor, str]:
    """What a constant node is: the tensor, and the name of the parameter that it comes from."""
    if node.op == "get_attr":
        return fetch(model, str(node.target)), str(node.target)
    name = ""

    def made(a: Any) -> Any:
        nonlocal name
        t, name = constant_of(model, a)
        return t

    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), made)
    return node.target(*args, **kwargs), name


def set_constant(module: GraphModule, reader: Node, name: str, t: Tensor, *, replaces: Any = None) -> Node:
    """A constant node in front of reader, stored under name, or one like it while something else still reads that."""
    others = [n for n in module.graph.nodes if n.op == "get_attr" and str(n.target) == name and set(n.users) - {reader}]
    path = vacant(module, name) if others or replaces is None else name
    assign(module, path, t)
    with module.graph.inserting_before(reader):
        node = module.graph.get_attr(path)
    v = value(reader)
    node.meta["val"] = v.fake_mode.from_tensor(t, static_shapes=True)
    for key in ("nn_module_stack", "stack_trace"):
        if key in reader.meta:
            node.meta[key] = reader.meta[key]
    return node


def _as_conv(module: GraphModule, norm: _Norm) -> None:
    """x * scale + shift as a depthwise convolution with one cell."""
    n = rank(norm.x) - 2
    overload = getattr(torch.ops.aten, f"conv{n}d").default
    reader = norm.result
    weight = set_constant(module, reader, f"{norm.name}.scale", norm.scale.float().reshape(-1, 1, *[1] * n))
    bias = set_constant(module, reader, f"{norm.name}.shift", norm.shift.float())
    with module.graph.inserting_before(reader):
        conv = module.graph.call_function(
            overload, (norm.x, weight, bias, [1] * n, [0] * n, [1] * n, norm.scale.numel())
        )
    conv.meta.update(reader.meta)
    reader.replace_all_uses_with(conv)


__all__ = ["CONVS", "TRANSPOSED", "constant_of", "fold_batch_norms", "set_constant"]
