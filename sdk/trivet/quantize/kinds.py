"""Kinds of operators, as quantisation sees them: the keys of Target.integer() and of rules "op:..." in recipes.

conv, conv_transpose, linear      products with constant weights        embedding   rows of a constant table
matmul                            products of two activations           rnn         LSTM, GRU, tanh RNN, whole
map                               any function of one value             clamp       relu, relu6, clamp, on its own
binary                            sum, difference, product              concat      concat and stack
average, mean, sum                pooling and reductions                max         max pooling and reductions
softmax, norm, resize             resize: linear                        move        what only moves elements
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trivet.quantize.fxgraph import argument, inputs, is_real, rank, target, value

if TYPE_CHECKING:
    from torch.fx import Node

_KINDS: dict[str, str] = {}


def _put(kind: str, names: str) -> None:
    _KINDS.update((f"aten.{n}", kind) for n in names.split())


_put("conv", "conv1d conv2d conv3d")
_put("conv_transpose", "conv_transpose1d conv_transpose2d conv_transpose3d")
_put("linear", "linear")
_put("product", "matmul mm bmm addmm")
_put("embedding", "embedding")
_put("average", "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d")
_put("mean", "mean")
_put("sum", "sum")
_put("max", "max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d amax amin "
            "max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices max min")  # fmt: skip
_put("softmax", "softmax _softmax")
_put("norm", "layer_norm rms_norm native_layer_norm")
_put("resize", "upsample_linear1d upsample_bilinear2d upsample_trilinear3d")
_put("concat", "cat stack")
_put("move", "view reshape _unsafe_view flatten unflatten transpose permute t numpy_T movedim moveaxis squeeze unsqueeze expand "
             "slice select narrow split split_with_sizes chunk unbind flip roll repeat tile clone contiguous alias pixel_shuffle "
             "pixel_unshuffle channel_shuffle pad constant_pad_nd reflection_pad1d reflection_pad2d replication_pad1d "
             "replication_pad2d upsample_nearest1d upsample_nearest2d upsample_nearest3d index_select gather index unfold im2col "
             "diagonal swapaxes ravel view_as expand_as broadcast_to squeeze_copy detach")  # fmt: skip
_put("clamp", "relu relu6 hardtanh clamp clamp_min clamp_max")
_put("map", "sigmoid tanh hardsigmoid hardswish silu gelu mish elu celu selu leaky_relu softplus softsign logsigmoid log_sigmoid exp "
            "exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal abs neg sin cos tan asin acos atan sinh cosh asinh acosh atanh "
            "erf erfc square pow sign round floor ceil trunc frac threshold hardshrink softshrink tanhshrink sgn rsub div "
            "nan_to_num")  # fmt: skip
_put("binary", "add sub mul")
_KINDS.update({"trivet.lstm": "rnn", "trivet.gru": "rnn", "trivet.rnn_tanh": "rnn"})

KINDS = frozenset(_KINDS.values()) - {"product"} | {"matmul"}
ELEMENTWISE = frozenset(name for name, kind in _KINDS.items() if kind in ("map", "clamp", "binary"))


@dataclass(frozen=True, slots=True)
class Role:
    """What an operator reads. activations, weights: nodes among its arguments; channel: axis of output channels of the weights."""

    kind: str
    activations: tuple[Node, ...] = ()
    weights: tuple[Node, ...] = ()
    channel: int = 0


def role(node: Node, constant: Callable[[Node], bool]) -> Role | None:
    """What a node is for quantisation, None for operators without an integer form.

    Args:
        node: of a captured graph.
        constant: whether a node's value is the same in every run.
    """
    name = target(node)
    kind = _KINDS.get(name)
    if kind is None or (kind not in ("rnn",) and not _makes_real(node)):
        return None
    a = [x for x in inputs(node) if is_real(x)]
    if kind in ("conv", "conv_transpose"):
        return _weighted(node, kind, 1 if kind == "conv_transpose" else 0, constant)
    if kind == "linear":
        found = _weighted(node, kind, 0, constant)
        return found or _product(node, node.args[0], node.args[1], constant, plain=False)  # type: ignore[arg-type]
    if kind == "product":
        x, w = (node.args[1], node.args[2]) if name == "aten.addmm" else (node.args[0], node.args[1])
        if name == "aten.addmm" and (argument(node, "alpha") != 1 or argument(node, "beta") != 1):
            return None
        return _product(node, x, w, constant, plain=name != "aten.addmm")  # type: ignore[arg-type]
    if kind == "embedding":
        table = node.args[0]
        good = constant(table) and is_real(table)  # type: ignore[arg-type]
        return Role(kind, (), (table,)) if good else None  # type: ignore[arg-type]
    if kind == "rnn":
        return _rnn(node, constant)
    if kind == "binary":
        return _binary(node, constant)
    if kind == "map":
        return _map(node)
    if kind == "concat":
        return Role(kind, tuple(a)) if all(map(is_real, inputs(node))) and a else None
    if not a or a[0] is not node.args[0] or constant(a[0]):
        return None
    if kind == "norm":
        parameters = list(inputs(node))[1:]
        last = argument(node, "normalized_shape")
        return Role(kind, (a[0],)) if len(last or ()) == 1 and all(map(constant, parameters)) else None
    if kind in ("mean", "sum") and argument(node, "dtype") is not None:
        return None
    if name in ("aten.max", "aten.min") and str(node.target).endswith(".other"):
        return None
    if kind == "move" and name in ("aten.pad", "aten.constant_pad_nd") and not _pads_with_zeros(node):
        return None
    return Role(kind, (a[0],))


def _makes_real(node: Node) -> bool:
    import torch

    v = value(node)
    first = v[0] if isinstance(v, (list, tuple)) and v else v
    return isinstance(first, torch.Tensor) and first.dtype == torch.float32


def _weighted(node: Node, kind: str, channel: int, constant: Callable[[Node], bool]) -> Role | None:
    x, w = node.args[0], node.args[1]
    bias = argument(node, "bias")
    if not constant(w) or constant(x) or not is_real(x) or (bias is not None and not constant(bias)):  # type: ignore[arg-type]
        return None
    return Role(kind, (x,), (w,), channel)  # type: ignore[arg-type]


def _product(node: Node, x: Node, w: Node, constant: Callable[[Node], bool], *, plain: bool) -> Role | None:
    if not is_real(x) or not is_real(w) or (constant(x) and constant(w)):
        return None
    if constant(w) and rank(w) == 2 and (plain or constant(node.args[0])):  # type: ignore[arg-type]
        return Role("linear", (x,), (w,), 1)
    if plain and rank(x) >= 2 and rank(w) >= 2:
        return Role("matmul", (x, w))
    return None


def _rnn(node: Node, constant: Callable[[Node], bool]) -> Role | None:
    at = 3 if target(node) == "trivet.lstm" else 2
    given: Any = node.args[at : at + 4]
    params, biases, layers, bidirectional = given
    each = 4 if biases else 2
    count = int(layers) * (1 + int(bool(bidirectional)))
    plain = len(params) == each * count  # not a projection
    if not plain or not is_real(node.args[0]) or not all(map(constant, params)):
        return None
    weights = tuple(p for i in range(count) for p in params[i * each : i * each + 2])
    return Role("rnn", (node.args[0],), weights, 0)  # type: ignore[arg-type]


def _binary(node: Node, constant: Callable[[Node], bool]) -> Role | None:
    a, b = node.args[0], node.args[1]
    if argument(node, "alpha", 1) not in (1, None) or not is_real(a):
        return None
    if not hasattr(b, "op"):
        return Role("map", (a,))  # type: ignore[arg-type]
    if not is_real(b) or (constant(a) and constant(b)):  # type: ignore[arg-type]
        return None
    if a is b:
        return Role("map", (a,))  # type: ignore[arg-type]
    for x, y in ((a, b), (b, a)):
        if constant(y) and math.prod(value(y).shape) == 1 and rank(y) <= rank(x):  # type: ignore[arg-type]
            return Role("map", (x,))  # type: ignore[arg-type]
    return Role("binary", (a, b))  # type: ignore[arg-type]


def _map(node: Node) -> Role | None:
    """A function of one value: all other arguments are numbers."""
    nodes = list(inputs(node))
    if not nodes or any(n is not nodes[0] for n in nodes) or not is_real(nodes[0]) or not is_real(node):
        return None
    return Role("map", (nodes[0],))


def bounds(node: Node) -> tuple[float, float] | None:
    """What a clamping operator clamps to; None for others, and where a bound is no number."""
    name = target(node)
    if name == "aten.relu":
        return 0.0, math.inf
    if name == "aten.relu6":
        return 0.0, 6.0
    names = {"aten.hardtanh": ("min_val", "max_val"), "aten.clamp": ("min", "max"), "aten.clamp_min": ("min", ""),
             "aten.clamp_max": ("", "max")}.get(name)  # fmt: skip
    if names is None:
        return None
    lo, hi = (argument(node, n) if n else None for n in names)
    if not all(t is None or isinstance(t, (int, float)) for t in (lo, hi)):
        return None
    return -math.inf if lo is None else float(lo), math.inf if hi is None else float(hi)


def _pads_with_zeros(node: Node) -> bool:
    """Zero is always a stored number; other values might widen the range."""
    if target(node) == "aten.pad" and argument(node, "mode", "constant") != "constant":
        return True
    return argument(node, "value") in (None, 0, 0.0)
