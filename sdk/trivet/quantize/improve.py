"""Changes to a graph that make it lose less: equalised channels, corrected biases, and room for biases.

Equalisation and bias correction are those of Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias
Correction", ICCV 2019 (sections 4.1 and 4.2; the correction in its empirical form, on calibration data).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trivet.quantize.fold import CONVS, TRANSPOSED, set_constant
from trivet.quantize.fxgraph import argument, fetch, rank, set_state, state, target, written
from trivet.quantize.kinds import bounds
from trivet.tracing import key_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import GraphModule, Node

LAYERS = (*CONVS, *TRANSPOSED, "aten.linear")
_BETWEEN = ("aten.relu", "aten.leaky_relu", "aten.max_pool1d", "aten.max_pool2d", "aten.max_pool3d", "aten.avg_pool1d",
            "aten.avg_pool2d", "aten.avg_pool3d", "aten.adaptive_avg_pool1d", "aten.adaptive_avg_pool2d")  # fmt: skip
ROUNDS = 8
LIMIT = 1024.0  # a channel's scale changes by this factor at most
BIAS_BITS = 30

Flat = Sequence[Sequence[Any]]  # leaves of calls


# ---- equalisation -------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Pair:
    """Two layers with nothing but channelwise, positively homogeneous operators between them."""

    first: Node
    second: Node
    relu6: list[Node]


def equalize(module: GraphModule, batches: Flat, *, relu6: bool = False, keep: Collection[Any] = ()) -> int:
    """Shifts scale between neighbouring layers so that the weights of each channel have like ranges in both.

    Args:
        module: float graph, batch norms folded; changed in place. Weights become new tensors.
        batches: leaves of calls, to see what relu6 clips.
        relu6: also across relu6, where it clips nothing in the batches (it becomes relu then).
        keep: keys (tracing.key_of) of tensors that must stay as they are.

    Returns:
        How many pairs of layers were equalised.
    """
    pairs = [p for p in _pairs(module, relu6) if not _kept(module, p, keep)]
    if any(p.relu6 for p in pairs):
        highest = _highest(module, [n for p in pairs for n in p.relu6], batches)
        pairs = [p for p in pairs if all(highest.get(n, math.inf) < 6.0 for n in p.relu6)]
    for n in (n for p in pairs for n in p.relu6):
        n.target, n.args = torch.ops.aten.relu.default, n.args[:1]
    for _ in range(ROUNDS if pairs else 0):
        change = max(_equalize(module, p) for p in pairs)
        if change < 1.01:
            break
    module.recompile()
    return len(pairs)


def _pairs(module: GraphModule, relu6: bool) -> list[_Pair]:
    stateful = written(module)
    out = []
    for first in module.graph.nodes:
        if not _is_layer(first, stateful):
            continue
        node: Node = first
        clipped: list[Node] = []
        while len(node.users) == 1:
            user = next(iter(node.users))
            if user.args[:1] != (node,):
                break
            if _is_layer(user, stateful):
                if rank(user) == rank(first) and _inputs(module, user) == _outputs(module, first):
                    out.append(_Pair(first, user, clipped))
                break
            if relu6 and bounds(user) == (0.0, 6.0):
                clipped = [*clipped, user]
            elif target(user) not in _BETWEEN:
                break
            node = user
    return out


def _is_layer(node: Node, stateful: set[str]) -> bool:
    if target(node) not in (*CONVS, "aten.linear"):
        return False
    constants = [node.args[1], argument(node, "bias")]
    return all(
        c is None or (c.op == "get_attr" and str(c.target) not in stateful and len(c.users) == 1) for c in constants
    )


def _kept(module: GraphModule, p: _Pair, keep: Collection[Any]) -> bool:
    return any(key_of(fetch(module, str(n.args[1].target))) in keep for n in (p.first, p.second))  # type: ignore[union-attr]


def _weight(module: GraphModule, node: Node) -> Tensor:
    return fetch(module, str(node.args[1].target)).detach()  # type: ignore[no-any-return, union-attr]


def _outputs(module: GraphModule, node: Node) -> int:
    return int(_weight(module, node).shape[0])


def _inputs(module: GraphModule, node: Node) -> int:
    return int(_weight(module, node).shape[1]) * _groups(node)


def _groups(node: Node) -> int:
    return 1 if target(node) == "aten.linear" else int(argument(node, "groups") or 1)


def _equalize(module: GraphModule, p: _Pair) -> float:
    """One pair; returns the largest factor."""
    w1, w2, groups = _weight(module, p.first), _weight(module, p.second), _groups(p.second)
    ranges1 = w1.abs().flatten(1).amax(1)
    by_input = w2.reshape(groups, w2.shape[0] // groups, w2.shape[1], -1)  # [groups, out, in, cells]
    ranges2 = by_input.abs().amax((1, 3)).flatten()
    s = torch.sqrt(ranges1 / ranges2).clamp(1 / LIMIT, LIMIT)
    s = torch.where((ranges1 > 0) & (ranges2 > 0), s, 1.0)
    name1, name2 = (str(n.args[1].target) for n in (p.first, p.second))  # type: ignore[union-attr]
    _set(module, p.first, 1, name1, w1 / s.reshape(-1, *[1] * (w1.dim() - 1)))
    _set(module, p.second, 1, name2, (by_input * s.reshape(groups, 1, -1, 1)).reshape(w2.shape))
    bias = argument(p.first, "bias")
    if bias is not None:
        _set(module, p.first, 2, str(bias.target), fetch(module, str(bias.target)).detach() / s)
    return float(torch.maximum(s, 1 / s).max())


def _set(module: GraphModule, node: Node, index: int, name: str, t: Tensor) -> None:
    arguments = list(node.args)
    arguments[index] = set_constant(module, node, name, t, replaces=arguments[index])
    node.args = tuple(arguments)
    module.graph.eliminate_dead_code()


def _highest(module: GraphModule, nodes: Collection[Node], batches: Flat) -> dict[Node, float]:
    """Largest input of each node in the batches."""
    found: dict[Node, float] = {}
    sources = {n.args[0]: n for n in nodes}

    def see(node: Node, out: Any) -> Any:
        if node in sources:
            n = sources[node]
            found[n] = max(found.get(n, -math.inf), float(out.max()))
        return out

    for flat in batches:
        run(module, flat, see)
    return found


# ---- bias correction ----------------------------------------------------------------------------------------------------
def correct_bias(reference: GraphModule, converted: GraphModule, batches: Flat) -> int:
    """Adds to every layer's bias the mean, per channel, of what quantising everything up to its result has taken from it.

    Layers are corrected in order of execution, all batches side by side, so that each sees what those before it have been corrected to.

    Args:
        reference: float graph.
        converted: quantised graph with the same names; biases become new tensors.
        batches: leaves of calls. All are held in memory with the values that are alive.

    Returns:
        How many layers were corrected.
    """
    known = {n.name for n in reference.graph.nodes}
    layers = {n for n in converted.graph.nodes
              if target(n) in LAYERS and n.name in known and _stored(n) and _float_bias(n)}  # fmt: skip
    if not layers or not batches:
        return 0
    names = {n.name for n in layers}
    wanted: dict[str, list[tuple[Tensor, int]]] = {}

    def keep(node: Node, out: Any) -> Any:
        if node.name in names:
            wanted.setdefault(node.name, []).append(_channels(node, out))
        return out

    first = state(reference)  # both graphs write the same buffers; every call starts from the same content
    for flat in batches:
        set_state(reference, first)
        run(reference, flat, keep)
    set_state(converted, first)
    runs = [torch.fx.Interpreter(converted) for _ in batches]
    for r, flat in zip(runs, batches, strict=True):
        r.args_iter = iter(flat)
    changes: dict[Node, Tensor] = {}
    with torch.no_grad():
        for node in converted.graph.nodes:
            for r in runs:
                r.env[node] = r.run_node(node)
            if node in layers:
                got = [_channels(node, r.env[node]) for r in runs]
                changes[node] = _mean(wanted[node.name]) - _mean(got)
                shape = [-1 if i == _axis(node, runs[0].env[node]) else 1 for i in range(runs[0].env[node].dim())]
                for r in runs:
                    r.env[node] = r.env[node] + changes[node].float().reshape(shape)
            for r in runs:
                for dead in r.user_to_last_uses.get(node, ()):
                    del r.env[dead]
    for n, change in changes.items():
        old = argument(n, "bias")
        before = 0.0 if old is None else fetch(converted, str(old.target)).detach().double()
        name = f"{n.name}_bias" if old is None else str(old.target)
        arguments = list(n.args) + [None] * (3 - len(n.args))
        arguments[2] = set_constant(converted, n, name, (before + change).float(), replaces=old)
        n.args = tuple(arguments)
    converted.graph.eliminate_dead_code()
    converted.recompile()
    return len(changes)


def _axis(node: Node, out: Tensor) -> int:
    """Of the output channels in a layer's result."""
    if target(node) == "aten.linear":
        return out.dim() - 1
    return out.dim() - 1 - int(target(node)[-2])


def _channels(node: Node, out: Tensor) -> tuple[Tensor, int]:
    """Sums of a layer's result per channel in float64, and how many values each has."""
    axis = _axis(node, out)
    others = [i for i in range(out.dim()) if i != axis]
    sums = out.sum(others, dtype=torch.float64) if others else out.double()
    return sums, out.numel() // max(1, out.shape[axis])


def _mean(parts: Sequence[tuple[Tensor, int]]) -> Tensor:
    total = torch.stack([t for t, _ in parts]).sum(0)
    return total / max(1, sum(n for _, n in parts))


def _stored(node: Node) -> bool:
    return "dequantize" in target(node.args[1])


def _float_bias(node: Node) -> bool:
    bias = argument(node, "bias")
    return bias is None or bias.op == "get_attr"


def run(module: GraphModule, flat: Sequence[Any], see: Callable[[Node, Any], Any]) -> Any:
    """Runs a graph; see() gets every node's result and gives what its readers get."""

    class Runner(torch.fx.Interpreter):
        def run_node(self, n: Node) -> Any:
            return see(n, super().run_node(n))

    with torch.no_grad():
        return Runner(module).run(*flat, enable_io_processing=False)


# ---- room for biases ----------------------------------------------------------------------------------------------------
def room_for_biases(prepared: GraphModule) -> None:
    """Widens the ranges of weights that are tiny beside their bias.

    An integer kernel keeps the bias as int32 in units of scale(x) * scale(w): a channel of weights near zero (dead behind batch norm)
    would make that unit so small that the bias does not fit. Its weights round to zero anyway.
    """
    modules = dict(prepared.named_modules(remove_duplicate=False))
    for n in prepared.graph.nodes:
        if target(n) not in (*LAYERS, "aten.addmm"):
            continue
        x, w = (n.args[1], n.args[2]) if target(n) == "aten.addmm" else (n.args[0], n.args[1])
        bias = n.args[0] if target(n) == "aten.addmm" else argument(n, "bias")
        seen, weights = (modules.get(str(a.target)) if a.op == "call_module" else None for a in (x, w))
        weights = getattr(weights, "activation_post_process", weights)  # of a fake quantiser
        if seen is None or getattr(seen, "is_dynamic", False) or weights is None or not hasattr(weights, "min_val"):
            continue
        if bias is None or bias.op != "get_attr":
            continue
        scale, _ = seen.calculate_qparams()
        b = fetch(prepared, str(bias.target)).detach().abs()
        least = (b / (float(scale) * 2.0**BIAS_BITS)) * weights.quant_max
        if weights.min_val.dim() == 0:
            least = least.max()
        elif least.shape != weights.min_val.shape:
            continue
        weights.min_val.copy_(torch.minimum(weights.min_val, -least))
        weights.max_val.copy_(torch.maximum(weights.max_val, least))


__all__ = ["correct_bias", "equalize", "room_for_biases", "run"]
