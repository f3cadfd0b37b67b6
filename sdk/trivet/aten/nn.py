"""Activations, softmax, attention, convolution and pooling."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from trivet.aten.common import Handler, pointwise, table, wide
from trivet.fbs.structs import DType, IndexKind, MapOp, PoolKind, ReduceKind
from trivet.ir import ops
from trivet.ir.builder import Builder
from trivet.ir.dim import Dim, Shape
from trivet.ir.expr import Expr, Formula, Reg
from trivet.ir.graph import Value
from trivet.ir.types import Type, is_float


# ---- activations --------------------------------------------------------------------------------------------------------
def _act(f: Formula, steps: int = 2) -> Callable[..., Value]:
    def run(b: Builder, meta: Any, x: Value) -> Value:
        return pointwise(b, meta, f, x, steps=steps)

    return run


def _one(op: MapOp) -> Callable[..., Value]:
    return _act(lambda x: x.do(op), steps=1)


def _relu(b: Builder, meta: Any, x: Value) -> Value:
    if x.dtype in (DType.bool, DType.u8):
        return x
    return b.map(lambda r: r.do(MapOp.relu) if is_float(r.dtype) else r.do(MapOp.max, 0), [x], x.dtype)


def _gelu(b: Builder, meta: Any, x: Value, approximate: str = "none") -> Value:
    return b.map1(MapOp.gelu_tanh if approximate == "tanh" else MapOp.gelu, x)


def _hardtanh(b: Builder, meta: Any, x: Value, lo: float = -1.0, hi: float = 1.0) -> Value:
    return b.map(lambda r: r.do(MapOp.max, lo).do(MapOp.min, hi), [x], x.dtype)


def _relu6(b: Builder, meta: Any, x: Value) -> Value:
    return _hardtanh(b, meta, x, 0, 6)


def _leaky_relu(b: Builder, meta: Any, x: Value, slope: float = 0.01) -> Value:
    return pointwise(b, meta, lambda r: (r > 0).select(r, r * slope), x)


def _rrelu(
    b: Builder, meta: Any, x: Value, lower: float = 0.125, upper: float = 1 / 3, training: bool = False
) -> Value:
    if training:
        raise b.error("rrelu in training mode draws random numbers", "call .eval() on the model before the export")
    return _leaky_relu(b, meta, x, (lower + upper) / 2)


def _prelu(b: Builder, meta: Any, x: Value, weight: Value) -> Value:
    if len(weight.shape) == 1 and len(x.shape) > 2:
        weight = b.reshape(weight, (weight.shape[0], *(1 for _ in x.shape[2:])))
    elif len(weight.shape) == 1 and len(x.shape) < 2:
        weight = b.reshape(weight, ())
    return pointwise(b, meta, lambda r, w: (r > 0).select(r, r * w), x, weight)


def _elu(b: Builder, meta: Any, x: Value, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Value:
    def run(r: Reg) -> Reg:
        y = (r if input_scale == 1 else r * input_scale).do(MapOp.expm1)
        return (r > 0).select(r if scale == 1 else r * scale, y * (alpha * scale))

    if alpha == 1 and scale == 1 and input_scale == 1:
        return b.map1(MapOp.elu, x)
    return pointwise(b, meta, run, x)


def _selu(b: Builder, meta: Any, x: Value) -> Value:
    return _elu(b, meta, x, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946)


def _celu(b: Builder, meta: Any, x: Value, alpha: float = 1.0) -> Value:
    return _elu(b, meta, x, alpha, 1.0, 1.0 / alpha)


def _softplus(b: Builder, meta: Any, x: Value, beta: float = 1, threshold: float = 20) -> Value:
    if beta == 1 and threshold == 20:
        return b.map1(MapOp.softplus, x)

    def run(r: Reg) -> Reg:
        y = r * beta
        return (y > threshold).select(r, y.do(MapOp.exp).do(MapOp.log1p) / beta)

    return pointwise(b, meta, run, x)


def _log_sigmoid(x: Reg) -> Reg:
    return x.do(MapOp.min, 0) - (-x.do(MapOp.abs)).do(MapOp.exp).do(MapOp.log1p)


def _log_sigmoid_forward(b: Builder, meta: Any, x: Value) -> tuple[Value, Value]:
    return pointwise(b, meta[0], _log_sigmoid, x), b.full((0,), 0, x.dtype)


def _hardshrink(b: Builder, meta: Any, x: Value, lambd: float = 0.5) -> Value:
    return b.map(lambda r: ((r >= -lambd) & (r <= lambd)).select(0, r), [x], x.dtype)


def _softshrink(b: Builder, meta: Any, x: Value, lambd: float = 0.5) -> Value:
    return pointwise(b, meta, lambda r: (r > lambd).select(r - lambd, (r < -lambd).select(r + lambd, r * 0)), x)


def _glu(b: Builder, meta: Any, x: Value, dim: int = -1) -> Value:
    half = b.shape(meta)[dim]
    p, q = b.slice(x, dim, 0, half), b.slice(x, dim, half, half)
    return pointwise(b, meta, lambda p, q: p * q.do(MapOp.sigmoid), p, q)


# ---- softmax and attention ----------------------------------------------------------------------------------------------
def _softmax(log: bool) -> Callable[..., Value]:
    def run(b: Builder, meta: Any, x: Value, dim: int, dtype: Any = None) -> Value:
        return b.softmax(b.cast(x, b.dtype(meta)), dim, log)

    return run


def _safe_softmax(b: Builder, meta: Any, x: Value, dim: int, dtype: Any = None) -> Value:
    """Rows of -inf give zeros."""
    x = b.cast(x, b.dtype(meta))
    top = b.reduce(ReduceKind.max, x, [dim], keep=True)
    return b.map(lambda r, t: t.equal(-math.inf).select(0, r), [b.softmax(x, dim), top], x.dtype)


def _attention(b: Builder, meta: Any, q: Value, k: Value, v: Value, attn_mask: Value | None = None,
               dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
               enable_gqa: bool = False) -> Value:  # fmt: skip
    if dropout_p > 0:
        raise b.error("attention with dropout draws random numbers", "call .eval(), or pass dropout_p=0")
    shape = b.shape(meta)
    depth = q.shape[-1]
    if scale is None and isinstance(depth, int):
        scale = depth**-0.5
    elif scale is None:
        e = Expr()
        size = e.dim(depth, wide(q.dtype)).do(MapOp.rsqrt)
        q, scale = b.expression(e, e.load(q).cast(size.dtype) * size, q.dtype, q.shape), 1.0
    if len(q.shape) == 2:
        q, k, v = (b.unsqueeze(t, 0) for t in (q, k, v))
    batch = shape[:-3]
    if len(shape) > 3:
        k = b.expand(k, (*batch, *k.shape[-3:]))
        v = b.expand(v, (*batch, *v.shape[-3:]))
        q = b.expand(q, (*batch, *q.shape[-3:]))
    if k.shape[-3] != v.shape[-3]:
        heads = q.shape[-3]
        k, v = (b.expand(t, (*t.shape[:-3], heads, *t.shape[-2:])) for t in (k, v))
    mask = attn_mask
    if mask is not None and mask.dtype != DType.bool:
        mask = b.cast(mask, q.dtype)
    out = (*q.shape[:-1], v.shape[-1])
    y = b.one("attention", [q, k, v, mask], q.dtype, out, ops.Attention(float(scale), is_causal))
    return b.reshape(y, shape)


def _flash_attention(b: Builder, meta: Any, q: Value, k: Value, v: Value, dropout_p: float = 0.0,
                     is_causal: bool = False, *, attn_mask: Value | None = None,
                     scale: float | None = None) -> tuple[Value, None]:  # fmt: skip
    return _attention(b, meta[0], q, k, v, attn_mask, dropout_p, is_causal, scale), None


# ---- convolution --------------------------------------------------------------------------------------------------------
def _n(x: int | Sequence[int], nd: int) -> tuple[int, ...]:
    """A number or list for nd axes."""
    if isinstance(x, int):
        return (x,) * nd
    return tuple(int(v) for v in x) * nd if len(x) == 1 else tuple(int(v) for v in x)


def _fixed(b: Builder, d: int | Dim) -> int:
    if isinstance(d, Dim):
        raise b.error(f"a kernel of size {d}", "convolve with weights of a fixed size")
    return d


def _conv(b: Builder, meta: Any, x: Value, w: Value, bias: Value | None, stride: int | Sequence[int],
          padding: int | Sequence[int], dilation: int | Sequence[int], transposed: bool, groups: int) -> Value:  # fmt: skip
    nd = len(w.shape) - 2
    batched = len(x.shape) == nd + 2
    shape = b.shape(meta)
    if not batched:
        x, shape = b.unsqueeze(x, 0), (1, *shape)
    attrs = ops.Conv(nd, _n(stride, nd), _n(padding, nd), _n(dilation, nd), groups, transposed,
                     kernel=tuple(_fixed(b, k) for k in w.shape[2:]))  # fmt: skip
    y = b.one("conv", [x, w, bias, None], x.dtype, shape, attrs)
    return y if batched else b.squeeze(y, [0])


def _convolution(b: Builder, meta: Any, x: Value, w: Value, bias: Value | None, stride: Sequence[int],
                 padding: Sequence[int], dilation: Sequence[int], transposed: bool, output_padding: Sequence[int],
                 groups: int, *flags: bool) -> Value:  # fmt: skip
    return _conv(b, meta, x, w, bias, stride, padding, dilation, transposed, groups)


def _conv_nd(b: Builder, meta: Any, x: Value, w: Value, bias: Value | None = None, stride: int | Sequence[int] = 1,
             padding: int | str | Sequence[int] = 0, dilation: int | Sequence[int] = 1, groups: int = 1) -> Value:  # fmt: skip
    if isinstance(padding, str):
        nd = len(w.shape) - 2
        sizes = zip(w.shape[2:], _n(dilation, nd), strict=True)
        padding = [d * (_fixed(b, k) - 1) // 2 if padding == "same" else 0 for k, d in sizes]
    return _conv(b, meta, x, w, bias, stride, padding, dilation, False, groups)


def _conv_transpose(b: Builder, meta: Any, x: Value, w: Value, bias: Value | None = None,
                    stride: int | Sequence[int] = 1, padding: int | Sequence[int] = 0,
                    output_padding: int | Sequence[int] = 0, groups: int = 1,
                    dilation: int | Sequence[int] = 1) -> Value:  # fmt: skip
    return _conv(b, meta, x, w, bias, stride, padding, dilation, True, groups)


# ---- pooling ------------------------------------------------------------------------------------------------------------
def _pool(b: Builder, shape: Shape, x: Value, attrs: ops.Pool, indices: bool = False) -> list[Value]:
    batched = len(x.shape) == attrs.nd + 2
    if not batched:
        x, shape = b.unsqueeze(x, 0), (1, *shape)
    types = [Type(x.dtype, shape), Type(DType.i64, shape)]
    out = b.add("pool", [x], types if indices else types[:1], attrs)
    return out if batched else [b.squeeze(y, [0]) for y in out]


def _max_pool(nd: int, indices: bool) -> Callable[..., Any]:
    def run(b: Builder, meta: Any, x: Value, kernel: int | Sequence[int], stride: int | Sequence[int] = (),
            padding: int | Sequence[int] = 0, dilation: int | Sequence[int] = 1, ceil_mode: bool = False) -> Any:  # fmt: skip
        attrs = ops.Pool(PoolKind.max, nd, _n(kernel, nd), _n(stride if stride != [] and stride != () else kernel, nd),
                         _n(padding, nd), _n(dilation, nd), ceil_mode=ceil_mode)  # fmt: skip
        if not indices:
            return _pool(b, b.shape(meta), x, attrs)[0]
        if not b.used(1):
            return _pool(b, b.shape(meta[0]), x, attrs)[0], None
        return tuple(_pool(b, b.shape(meta[0]), x, attrs, True))

    return run


def _avg_pool(nd: int) -> Callable[..., Value]:
    def run(b: Builder, meta: Any, x: Value, kernel: int | Sequence[int], stride: int | Sequence[int] = (),
            padding: int | Sequence[int] = 0, ceil_mode: bool = False, count_include_pad: bool = True,
            divisor_override: int | None = None) -> Value:  # fmt: skip
        attrs = ops.Pool(PoolKind.avg, nd, _n(kernel, nd), _n(stride if stride != [] and stride != () else kernel, nd),
                         _n(padding, nd), (1,) * nd, count_include_pad, divisor_override or 0, ceil_mode=ceil_mode)  # fmt: skip
        return _pool(b, b.shape(meta), x, attrs)[0]

    return run


def _adaptive_avg(nd: int) -> Callable[..., Value]:
    def run(b: Builder, meta: Any, x: Value, output_size: Any) -> Value:
        shape = b.shape(meta)
        if all(d == 1 for d in shape[-nd:]):
            return b.reduce(ReduceKind.mean, x, range(-nd, 0), keep=True)
        return _pool(b, shape, x, ops.Pool(PoolKind.avg, nd, adaptive=True))[0]

    return run


def _adaptive_max(nd: int) -> Callable[..., Any]:
    def run(b: Builder, meta: Any, x: Value, output_size: Any) -> tuple[Value | None, ...]:
        attrs = ops.Pool(PoolKind.max, nd, adaptive=True)
        if not b.used(1):
            return _pool(b, b.shape(meta[0]), x, attrs)[0], None
        return tuple(_pool(b, b.shape(meta[0]), x, attrs, True))

    return run


def _max_unpool(nd: int) -> Callable[..., Value]:
    def run(b: Builder, meta: Any, x: Value, indices: Value, output_size: Any, *geometry: Any) -> Value:
        shape = b.shape(meta)
        count: int | Any = 1
        for d in shape[-nd:]:
            count = count * d
        flat = [b.reshape(t, (*t.shape[:-nd], Type(t.dtype, t.shape[-nd:]).count)) for t in (x, indices)]
        zeros = b.full((*shape[:-nd], count), 0, x.dtype)
        return b.reshape(b.scatter(IndexKind.elements, zeros, -1, flat[1], flat[0]), shape)

    return run


HANDLERS: dict[str, Handler] = table({
    "relu": _relu,
    "relu6": _relu6,
    "gelu": _gelu,
    "silu": _one(MapOp.silu),
    "mish": _one(MapOp.mish),
    "hardswish": _one(MapOp.hard_swish),
    "hardsigmoid": _one(MapOp.hard_sigmoid),
    "hardtanh": _hardtanh,
    "leaky_relu": _leaky_relu,
    "rrelu": _rrelu,
    "prelu _prelu_kernel": _prelu,
    "elu": _elu,
    "selu": _selu,
    "celu": _celu,
    "softplus": _softplus,
    "log_sigmoid": _act(_log_sigmoid),
    "log_sigmoid_forward": _log_sigmoid_forward,
    "hardshrink": _hardshrink,
    "softshrink": _softshrink,
    "glu": _glu,
    "softmax.int _softmax special_softmax": _softmax(False),
    "_safe_softmax": _safe_softmax,
    "log_softmax.int _log_softmax special_log_softmax": _softmax(True),
    "scaled_dot_product_attention": _attention,
    "_scaled_dot_product_flash_attention_for_cpu": _flash_attention,
    "convolution": _convolution,
    "conv1d conv2d conv3d conv1d.padding conv2d.padding conv3d.padding": _conv_nd,
    "conv_transpose1d conv_transpose2d.input conv_transpose3d.input": _conv_transpose,
    **{f"max_pool{n}d": _max_pool(n, False) for n in (1, 2, 3)},
    **{f"max_pool{n}d_with_indices": _max_pool(n, True) for n in (1, 2, 3)},
    **{f"avg_pool{n}d": _avg_pool(n) for n in (1, 2, 3)},
    **{f"adaptive_avg_pool{n}d": _adaptive_avg(n) for n in (1, 2, 3)},
    **{f"_adaptive_avg_pool{n}d": _adaptive_avg(n) for n in (2, 3)},
    **{f"adaptive_max_pool{n}d": _adaptive_max(n) for n in (1, 2, 3)},
    **{f"max_unpool{n}d": _max_unpool(n) for n in (2, 3)},
})  # fmt: skip
