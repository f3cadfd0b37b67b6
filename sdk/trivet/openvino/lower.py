"""Nodes of the IR as OpenVINO layers: what is taken, and how. Arithmetic is that of OpenVINO's layers in f32 or f16."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trivet.fbs.structs import (
    Act,
    DType,
    GridPad,
    IndexKind,
    MapOp,
    NormKind,
    PadMode,
    PoolKind,
    ReduceKind,
    ResizeMode,
    RnnKind,
    ScanKind,
    ScatterReduce,
)
from trivet.ir import ops
from trivet.ir.dim import Dim
from trivet.ir.graph import Node, Value
from trivet.openvino import maps
from trivet.openvino.net import NAMES, Net, Port

FLOAT = (DType.f32, DType.f16)
DTYPES = (*FLOAT, DType.bool, DType.u8, DType.i8, DType.i32, DType.i64)
_REDUCE = {ReduceKind.sum: "ReduceSum", ReduceKind.mean: "ReduceMean", ReduceKind.prod: "ReduceProd", ReduceKind.max: "ReduceMax",
           ReduceKind.min: "ReduceMin", ReduceKind.any: "ReduceLogicalOr", ReduceKind.all: "ReduceLogicalAnd"}  # fmt: skip
_GATES = {RnnKind.lstm: ("LSTMSequence", 5, (1, 0, 2, 3)), RnnKind.gru: ("GRUSequence", 5, (1, 0, 2)),
          RnnKind.tanh: ("RNNSequence", 5, (0,)), RnnKind.relu: ("RNNSequence", 5, (0,))}  # fmt: skip
_ACTS = {Act.sigmoid: MapOp.sigmoid, Act.tanh: MapOp.tanh, Act.gelu: MapOp.gelu, Act.gelu_tanh: MapOp.gelu_tanh,
         Act.silu: MapOp.silu, Act.hard_swish: MapOp.hard_swish, Act.hard_sigmoid: MapOp.hard_sigmoid}  # fmt: skip


class Lowering:
    """One network under way. ports: values that it has; size: an int or Dim as i64[1]."""

    def __init__(self, net: Net, size: Callable[[Any], Port], port: Callable[[Value], Port]) -> None:
        self.net, self.size, self.port = net, size, port

    def node(self, node: Node) -> list[Port]:
        """The outputs of a node that refuses takes."""
        got = [None if v is None else self.port(v) for v in node.inputs]
        y = _LOWER[node.op](self, node, got)
        return y if isinstance(y, list) else [y]

    def f(self, kind: str, *inputs: Port, opset: int = 1, outputs: int = 1, **attrs: Any) -> Port:
        return self.net.add(kind, inputs, opset, outputs, **attrs)

    def k(self, x: Any, dtype: DType = DType.i64) -> Port:
        return self.net.const(x, dtype)

    def shape(self, shape: Sequence[int | Dim]) -> Port:
        """A shape as i64[rank]."""
        if all(isinstance(d, int) for d in shape):
            return self.k([int(str(d)) for d in shape])
        return self.f("Concat", *[self.size(d) for d in shape], axis=0)

    def reshape(self, x: Port, shape: Sequence[int | Dim]) -> Port:
        return self.f("Reshape", x, self.shape(shape), special_zero=False)

    def convert(self, x: Port, dtype: DType) -> Port:
        return self.f("Convert", x, destination_type=NAMES[dtype])

    def epilogue(self, node: Node, y: Port, more: Sequence[Port | None]) -> Port:
        a, dtype = node.attrs, node.outputs[0].dtype
        for x in more:
            y = y if x is None else self.f("Add", y, x)
        if a.act == Act.none:
            return y
        if a.act == Act.clamp:
            if a.lo == 0 and a.hi == float("inf"):
                return self.f("ReLU", y)
            return self.f("Clamp", y, min=max(a.lo, -3.4028234663852886e38), max=min(a.hi, 3.4028234663852886e38))
        if a.act == Act.leaky:
            return self.f("PRelu", y, self.k([a.lo], dtype))
        if a.act == Act.elu:
            return self.f("Elu", y, alpha=a.lo)
        return maps.instr(self.net, _ACTS[a.act], dtype, [y], [dtype])

    def wrapped(self, index: Port, dtype: DType, axis: int | Dim) -> Port:
        """Negative indices counted from the end."""
        n = self.f("Convert", self.f("Squeeze", self.size(axis), self.k([0])), destination_type=NAMES[dtype])
        return self.f("Select", self.f("Less", index, self.k(0, dtype)), self.f("Add", index, n), index)


def refuses(node: Node) -> str:
    """Why a node is not taken, "" when it is."""
    if node.op not in _LOWER:
        return f"{node.op} is not lowered to OpenVINO"
    for v in (*node.inputs, *node.outputs):
        if v is None:
            continue
        if v.dtype not in DTYPES:
            return f"{v.dtype.name} is not lowered to OpenVINO"
        if any(d == 0 for d in v.shape):
            return "an empty value"
    why = _REFUSES.get(node.op)
    return why(node) if why else ""


def _float_only(node: Node) -> str:
    dtype = node.outputs[0].dtype
    if dtype not in FLOAT or any(v is not None and v.dtype in FLOAT and v.dtype != dtype for v in node.inputs):
        return f"{node.op} of {dtype.name}, or of mixed dtypes"
    return ""


# ---- products
def _matmul(c: Lowering, node: Node, x: list[Any]) -> Port:
    a, b, bias, residual = (*x, None, None)[:4]
    return c.epilogue(node, c.f("MatMul", a, b, transpose_a=False, transpose_b=False), (bias, residual))


def _matmul_refuses(node: Node) -> str:
    return _float_only(node) or ("packed weights" if node.attrs.packed else "")


def pads_end(n: Any, o: Any, stride: int, low: int, span: int) -> int | None:
    """A padding at the high side that gives o outputs, None where there is none."""
    return next((p for p in range(low + stride + span) if o == (n + low + p - span) // stride + 1), None)


def _conv_ends(node: Node) -> list[int | None]:
    a: ops.Conv = node.attrs
    x, w = node.inputs[0], node.inputs[1]
    assert x is not None and w is not None
    return [pads_end(n, o, s, p, d * (int(str(k)) - 1) + 1)
            for n, o, s, p, d, k in zip(x.shape[2:], node.outputs[0].shape[2:], a.stride, a.pad, a.dilation, w.shape[2:],
                                        strict=True)]  # fmt: skip


def _conv(c: Lowering, node: Node, x: list[Any]) -> Port:
    a: ops.Conv = node.attrs
    data, w, bias, residual = (*x, None, None)[:4]
    shape = node.inputs[1].shape  # type: ignore[union-attr]
    if a.groups > 1:
        w = c.reshape(w, (a.groups, shape[0] // a.groups, *shape[1:]))
    prefix = "Group" if a.groups > 1 else ""
    if a.transposed:
        want, have = node.outputs[0].shape[2:], node.inputs[0].shape[2:]  # type: ignore[union-attr]
        more = [int(str(o - ((n - 1) * s - 2 * p + d * (k - 1) + 1)))
                for o, n, s, p, d, k in zip(want, have, a.stride, a.pad, a.dilation, shape[2:], strict=True)]  # fmt: skip
        y = c.f(f"{prefix}ConvolutionBackpropData", data, w, strides=a.stride, dilations=a.dilation, pads_begin=a.pad,
                pads_end=tuple(p - min(m, 0) for p, m in zip(a.pad, more, strict=True)), auto_pad="explicit",
                output_padding=tuple(max(m, 0) for m in more))  # fmt: skip
    else:
        y = c.f(f"{prefix}Convolution", data, w, strides=a.stride, dilations=a.dilation, pads_begin=a.pad,
                pads_end=tuple(_conv_ends(node)), auto_pad="explicit")  # fmt: skip
    if bias is not None:
        bias = c.reshape(bias, (1, -1, *[1] * a.nd))
    return c.epilogue(node, y, (bias, residual))


def _conv_refuses(node: Node) -> str:
    a: ops.Conv = node.attrs
    x, w = node.inputs[0], node.inputs[1]
    assert x is not None and w is not None
    if a.packed or not w.type.static:
        return "packed weights, or of unknown size"
    if a.transposed:
        exact = all(
            isinstance(o - n * s, int) for o, n, s in zip(node.outputs[0].shape[2:], x.shape[2:], a.stride, strict=True)
        )
        return _float_only(node) or ("" if exact else "an output size that does not follow from the input's")
    return _float_only(node) or ("no padding gives this output size" if None in _conv_ends(node) else "")


# ---- windows
def _pool_ends(node: Node) -> list[int | None]:
    a: ops.Pool = node.attrs
    x = node.inputs[0]
    assert x is not None
    one = (1,) * a.nd
    return [pads_end(n, o, s, p, d * (k - 1) + 1)
            for n, o, s, p, d, k in zip(x.shape[2:], node.outputs[0].shape[2:], a.stride or a.kernel, a.pad or (0,) * a.nd,
                                        a.dilation or one, a.kernel, strict=True)]  # fmt: skip


def _pool(c: Lowering, node: Node, x: list[Any]) -> Port:
    a: ops.Pool = node.attrs
    if a.adaptive:
        return c.f("AdaptiveAvgPool", x[0], c.shape(node.outputs[0].shape[2:]), opset=8)
    pad = a.pad or (0,) * a.nd
    same: dict[str, Any] = {"strides": a.stride or a.kernel, "kernel": a.kernel, "pads_begin": pad,
                            "pads_end": tuple(_pool_ends(node)), "rounding_type": "floor", "auto_pad": "explicit"}  # fmt: skip
    if a.kind == PoolKind.avg:
        if a.count_include_pad and any(pad):
            same["pads_end"] = pad
        return c.f("AvgPool", x[0], exclude__pad=not (a.count_include_pad and any(pad)), **same)
    return c.f(
        "MaxPool",
        x[0],
        opset=8,
        outputs=2,
        dilations=a.dilation or (1,) * a.nd,
        index_element_type="i64",
        axis=0,
        **same,
    )


def _pool_refuses(node: Node) -> str:
    a: ops.Pool = node.attrs
    if len(node.outputs) > 1 or (a.adaptive and a.kind == PoolKind.max):
        return "indices of a maximum, or adaptive maximum"
    if a.kind == PoolKind.avg and (a.divisor or any(d != 1 for d in a.dilation)):
        return "an average with a divisor or dilation"
    if not a.adaptive and None in _pool_ends(node):
        return "no padding gives this output size"
    if a.kind == PoolKind.avg and not a.adaptive and a.count_include_pad and a.ceil_mode:
        return "an average that counts padding and rounds its size up"
    return _float_only(node)


def _resize(c: Lowering, node: Node, x: list[Any]) -> Port:
    a: ops.Resize = node.attrs
    mode = {ResizeMode.linear: "linear_onnx", ResizeMode.cubic: "cubic"}.get(a.mode, "nearest")
    where = ("asymmetric" if a.mode == ResizeMode.nearest else "align_corners" if a.align_corners else
             "pytorch_half_pixel" if a.mode == ResizeMode.cubic else "half_pixel")  # fmt: skip
    return c.f("Interpolate", x[0], c.shape(node.outputs[0].shape[2:]), c.k(list(range(2, 2 + a.nd))), opset=11, mode=mode,
               shape_calculation_mode="sizes", coordinate_transformation_mode=where, cube_coeff=a.cubic_a, antialias=False,
               nearest_mode="floor" if a.mode == ResizeMode.nearest else "round_prefer_ceil", pads_begin=(0,) * (2 + a.nd),
               pads_end=(0,) * (2 + a.nd))  # fmt: skip


def _resize_refuses(node: Node) -> str:
    a: ops.Resize = node.attrs
    x = node.inputs[0]
    assert x is not None
    for s, n, o in zip(a.scale, x.shape[2:], node.outputs[0].shape[2:], strict=False):
        if s and not (isinstance(n, int) and isinstance(o, int) and o == n * s):
            return "a scale that is not that of the sizes"
    if a.mode == ResizeMode.cubic and a.nd != 2:
        return "cubic resize of other than two axes"
    return _float_only(node)


def _grid_sample(c: Lowering, node: Node, x: list[Any]) -> Port:
    a: ops.GridSample = node.attrs
    mode = {ResizeMode.nearest: "nearest", ResizeMode.linear: "bilinear", ResizeMode.cubic: "bicubic"}[a.mode]
    pad = {GridPad.zeros: "zeros", GridPad.border: "border", GridPad.reflection: "reflection"}[a.pad]
    return c.f("GridSample", *x, opset=9, align_corners=a.align_corners, mode=mode, padding_mode=pad)


# ---- rows
def _reduce(c: Lowering, node: Node, x: list[Any]) -> Port:
    a: ops.Reduce = node.attrs
    axes = c.k(list(a.axes))
    if a.kind != ReduceKind.var:
        return c.f(_REDUCE[a.kind], x[0], axes, keep_dims=True)
    d = c.f("Subtract", x[0], c.f("ReduceMean", x[0], axes, keep_dims=True))
    total, n = c.f("ReduceSum", c.f("Multiply", d, d), axes, keep_dims=True), 1
    for i in a.axes:
        n *= int(str(node.inputs[0].shape[i]))  # type: ignore[union-attr]
    return c.f("Divide", total, c.k(max(n - a.correction, 0), node.outputs[0].dtype))


def _reduce_refuses(node: Node) -> str:
    a: ops.Reduce = node.attrs
    x = node.inputs[0]
    assert x is not None
    if a.kind in (ReduceKind.any, ReduceKind.all):
        return "" if x.dtype == DType.bool else f"{a.kind.name} of {x.dtype.name}"
    if a.kind not in _REDUCE and a.kind != ReduceKind.var:
        return f"{a.kind.name} is not lowered to OpenVINO"
    if a.kind == ReduceKind.var and not all(isinstance(x.shape[i], int) for i in a.axes):
        return "the variance of a number of elements that is not known"
    return _float_only(node)


def _scan(c: Lowering, node: Node, x: list[Any]) -> Port:
    return c.f("CumSum", x[0], c.k(node.attrs.axis), opset=3, exclusive=node.attrs.exclusive, reverse=False)


def _softmax(c: Lowering, node: Node, x: list[Any]) -> Port:
    a: ops.Softmax = node.attrs
    return c.f("LogSoftmax" if a.log else "Softmax", x[0], opset=5 if a.log else 8, axis=a.axis)


def _norm(c: Lowering, node: Node, inputs: list[Any]) -> Port:
    a: ops.Norm = node.attrs
    x, weight, bias = (*inputs, None, None)[:3]
    v, dtype = node.outputs[0], node.outputs[0].dtype
    if a.kind == NormKind.group:
        n = int(str(v.shape[1]))
        weight = c.k([1.0] * n, dtype) if weight is None else weight
        bias = c.k([0.0] * n, dtype) if bias is None else bias
        return c.f("GroupNormalization", x, weight, bias, opset=12, num_groups=a.groups, epsilon=a.eps)
    axes = c.k(list(range(v.type.rank - a.axes, v.type.rank)))
    if a.kind == NormKind.layer:
        y = c.f("MVN", x, axes, opset=6, eps=a.eps, normalize_variance=True, eps_mode="inside_sqrt")
    else:
        mean = c.f("ReduceMean", c.f("Multiply", x, x), axes, keep_dims=True)
        y = c.f("Divide", x, c.f("Sqrt", c.f("Add", mean, c.k(a.eps, dtype))))
    y = y if weight is None else c.f("Multiply", y, weight)
    return y if bias is None else c.f("Add", y, bias)


def _attention(c: Lowering, node: Node, inputs: list[Any]) -> Port:
    a: ops.Attention = node.attrs
    q, k, v, mask = (*inputs, None)[:4]
    dtype = node.outputs[0].dtype
    s = c.f("MatMul", c.f("Multiply", q, c.k(a.scale, dtype)), k, transpose_a=False, transpose_b=True)
    if mask is None:
        return c.f("MatMul", c.f("Softmax", s, opset=8, axis=-1), v, transpose_a=False, transpose_b=False)
    ninf = c.k(float("-inf"), dtype)
    s = c.f("Select", mask, s, ninf) if node.inputs[3].dtype == DType.bool else c.f("Add", s, mask)  # type: ignore[union-attr]
    p = c.f("Softmax", s, opset=8, axis=-1)
    if not a.nan_rows:
        nothing = c.f("Equal", c.f("ReduceMax", s, c.k([-1]), keep_dims=True), ninf)
        p = c.f("Select", nothing, c.k(0, dtype), p)
    return c.f("MatMul", p, v, transpose_a=False, transpose_b=False)


def _attention_refuses(node: Node) -> str:
    q, k = node.inputs[0], node.inputs[1]
    assert q is not None and k is not None
    if node.attrs.causal or any(v is not None for v in node.inputs[4:]):
        return "causal attention, or more keys"
    return _float_only(node) or ("grouped heads" if q.shape[-3] != k.shape[-3] else "")


# ---- moves
def _gather(c: Lowering, node: Node, x: list[Any]) -> Port:
    a: ops.Gather = node.attrs
    data, index = node.inputs[0], node.inputs[1]
    assert data is not None and index is not None
    if a.kind == IndexKind.take:
        return c.f("Gather", x[0], x[1], c.k(a.axis), opset=8, batch_dims=0)
    return c.f("GatherElements", x[0], c.wrapped(x[1], index.dtype, data.shape[a.axis]), opset=6, axis=a.axis)


def _scatter(c: Lowering, node: Node, x: list[Any]) -> Port:
    a: ops.Scatter = node.attrs
    data, index = node.inputs[0], node.inputs[1]
    assert data is not None and index is not None
    at = c.wrapped(x[1], index.dtype, data.shape[a.axis])
    if a.kind == IndexKind.take:
        return c.f("ScatterUpdate", x[0], at, x[2], c.k(a.axis), opset=3)
    return c.f("ScatterElementsUpdate", x[0], at, x[2], c.k(a.axis), opset=12, reduction="none", use_init_val=True)


def _pad(c: Lowering, node: Node, x: list[Any]) -> Port:
    a: ops.Pad = node.attrs
    mode = {PadMode.constant: "constant", PadMode.reflect: "reflect", PadMode.replicate: "edge"}[a.mode]
    more = (c.k(a.value, node.outputs[0].dtype),) if a.mode == PadMode.constant else ()
    return c.f("Pad", x[0], c.k(list(a.lo)), c.k(list(a.hi)), *more, opset=12, pad_mode=mode)


def _sort(c: Lowering, node: Node, x: list[Any]) -> list[Port]:
    a: ops.Sort = node.attrs
    n = c.f("Squeeze", c.size(node.outputs[0].shape[a.axis]), c.k([0]))
    y = c.f("TopK", x[0], n, opset=11, outputs=2, axis=a.axis, mode="max" if a.descending else "min", sort="value",
            index_element_type="i64", stable=True)  # fmt: skip
    return [y, Port(y.layer, 1)]


def _rnn(c: Lowering, node: Node, inputs: list[Any]) -> list[Port]:
    a: ops.Rnn = node.attrs
    x, w, r, b_ih, b_hh, h, cell = (*inputs, *[None] * 5)[:7]
    vx, vr = node.inputs[0], node.inputs[2]
    assert vx is not None and vr is not None
    dtype, steps, n, hidden = vx.dtype, vx.shape[0], vx.shape[1], int(str(vr.shape[1]))
    kind, opset, order = _GATES[a.kind]

    def gates(t: Port, keep: Sequence[int] = order) -> Port:
        parts = c.f("Split", t, c.k(0), outputs=len(order), num_splits=len(order))
        return c.f("Concat", *[Port(parts.layer, g) for g in keep], axis=0)

    def lead(t: Port, axis: int = 0) -> Port:
        return c.f("Unsqueeze", t, c.k([axis]))

    zeros = c.k([0.0] * (len(order) * hidden), dtype)
    p, q = gates(b_ih or zeros), gates(b_hh or zeros)
    bias = c.f("Add", p, q)
    if a.kind == RnnKind.gru:  # z and r are added up, n has one each
        first = c.f("StridedSlice", bias, c.k([0]), c.k([2 * hidden]), c.k([1]), begin_mask=(0,), end_mask=(0,))
        rest = [c.f("StridedSlice", t, c.k([2 * hidden]), c.k([3 * hidden]), c.k([1]), begin_mask=(0,), end_mask=(0,))
                for t in (p, q)]  # fmt: skip
        bias = c.f("Concat", first, *rest, axis=0)
    start = c.f("Broadcast", c.k(0.0, dtype), c.shape((n, 1, hidden)), opset=3, mode="numpy")
    lengths = c.f("Broadcast", c.f("Squeeze", c.size(steps), c.k([0])), c.shape((n,)), opset=3, mode="numpy")
    states = [start if h is None else lead(h, 1)]
    if a.kind == RnnKind.lstm:
        states.append(start if cell is None else lead(cell, 1))
    acts = {RnnKind.lstm: ("sigmoid", "tanh", "tanh"), RnnKind.gru: ("sigmoid", "tanh")}.get(a.kind, (a.kind.name,))
    more: dict[str, Any] = {"linear_before_reset": True} if a.kind == RnnKind.gru else {}
    y = c.f(kind, c.f("Transpose", x, c.k([1, 0, 2])), *states, lengths, lead(gates(w)), lead(gates(r)), lead(bias), opset=opset,
            outputs=1 + len(states), hidden_size=hidden, direction="reverse" if a.reverse else "forward", activations=acts,
            **more)  # fmt: skip
    out = [c.f("Transpose", c.f("Squeeze", y, c.k([1])), c.k([1, 0, 2]))]
    return out + [c.f("Squeeze", Port(y.layer, 1 + i), c.k([1])) for i in range(len(node.outputs) - 1)]


def _rnn_refuses(node: Node) -> str:
    if node.attrs.packed or (len(node.inputs) > 7 and node.inputs[7] is not None):
        return "packed weights, or a projection"
    return _float_only(node)


def _slice(c: Lowering, node: Node, x: list[Any]) -> Port:
    a: ops.Slice = node.attrs
    n = node.outputs[0].shape[a.axis]
    stop = a.start + a.step * (n - 1) + (1 if a.step > 0 else -1)
    below = (
        isinstance(stop, int) and stop < 0
    )  # before the first element: the lowest number, since -1 is the last element
    end = c.k([-(1 << 31)]) if below else c.size(stop)
    return c.f("Slice", x[0], c.size(a.start), end, c.k([a.step]), c.k([a.axis]), opset=8)


_LOWER: dict[str, Callable[[Lowering, Node, list[Any]], Any]] = {
    "map": lambda c, n, x: maps.lower(c.net, n, x, c.size), "copy": lambda c, n, x: x[0], "reduce": _reduce, "scan": _scan,
    "matmul": _matmul, "conv": _conv, "pool": _pool, "norm": _norm, "softmax": _softmax, "attention": _attention,
    "gather": _gather, "scatter": _scatter, "pad": _pad, "sort": _sort, "rnn": _rnn, "resize": _resize,
    "grid_sample": _grid_sample, "slice": _slice,
    "permute": lambda c, n, x: c.f("Transpose", x[0], c.k(list(n.attrs.axes))),
    "reshape": lambda c, n, x: c.reshape(x[0], n.outputs[0].shape),
    "expand": lambda c, n, x: c.f("Broadcast", x[0], c.shape(n.outputs[0].shape), opset=3, mode="numpy"),
    "concat": lambda c, n, x: c.f("Concat", *x, axis=n.attrs.axis),
}  # fmt: skip
_REFUSES: dict[str, Callable[[Node], str]] = {
    "map": maps.refuses, "matmul": _matmul_refuses, "conv": _conv_refuses, "pool": _pool_refuses, "resize": _resize_refuses,
    "grid_sample": _float_only, "reduce": _reduce_refuses, "softmax": _float_only, "norm": _float_only,
    "attention": _attention_refuses, "rnn": _rnn_refuses,
    "scan": lambda n: _float_only(n) or ("" if n.attrs.kind == ScanKind.sum else f"scan {n.attrs.kind.name}"),
    "scatter": lambda n: "" if n.attrs.reduce == ScatterReduce.none else "scatter with a reduction",
    "pad": lambda n: "circular padding" if n.attrs.mode == PadMode.circular else "",
    "sort": lambda n: "" if n.inputs[0] is not None and n.inputs[0].dtype in FLOAT else "sort of integers",
}  # fmt: skip
