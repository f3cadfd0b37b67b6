"""Normalisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trivet.aten.common import Handler, table, wide
from trivet.fbs.structs import DType, MapOp, NormKind, ReduceKind
from trivet.ir import ops
from trivet.ir.builder import Builder
from trivet.ir.expr import Reg
from trivet.ir.graph import Value


def _norm(b: Builder, x: Value, weight: Value | None, bias: Value | None, attrs: ops.Norm) -> Value:
    """In x's dtype; parameters of another dtype make it f32 inside."""
    dtype = x.dtype
    if any(p is not None and p.dtype != dtype for p in (weight, bias)):
        x, weight, bias = b.cast(x, DType.f32), _f32(b, weight), _f32(b, bias)
    return b.cast(b.one("norm", [x, weight, bias], x.dtype, x.shape, attrs), dtype)


def _f32(b: Builder, v: Value | None) -> Value | None:
    return None if v is None else b.cast(v, DType.f32)


def _layer_norm(b: Builder, meta: Any, x: Value, normalized_shape: Sequence[Any], weight: Value | None = None,
                bias: Value | None = None, eps: float = 1e-5, cudnn_enable: bool = True) -> Value:  # fmt: skip
    return _norm(b, x, weight, bias, ops.Norm(NormKind.layer, eps, axes=len(normalized_shape)))


def _native_layer_norm(b: Builder, meta: Any, x: Value, normalized_shape: Sequence[Any], weight: Value | None,
                       bias: Value | None, eps: float) -> tuple[Value | None, ...]:  # fmt: skip
    axes = range(len(x.shape) - len(normalized_shape), len(x.shape))
    return (_layer_norm(b, meta, x, normalized_shape, weight, bias, eps), *_moments(b, x, axes, eps, (1, 2)))


def _moments(b: Builder, x: Value, axes: Sequence[int], eps: float, outputs: tuple[int, int]) -> list[Value | None]:
    """(mean, 1 / standard deviation), axes kept; each only if it is read."""
    x = b.cast(x, wide(x.dtype))
    mean = b.reduce(ReduceKind.mean, x, axes, keep=True) if b.used(outputs[0]) else None
    rstd = None
    if b.used(outputs[1]):
        var = b.reduce(ReduceKind.var, x, axes, keep=True, correction=0.0)
        rstd = b.map(lambda v: (v + eps).do(MapOp.rsqrt), [var], var.dtype)
    return [mean, rstd]


def _rms_norm(b: Builder, meta: Any, x: Value, normalized_shape: Sequence[Any], weight: Value | None = None,
              eps: float | None = None) -> Value:  # fmt: skip
    if eps is None:
        import torch

        from trivet.ir.interop import torch_dtype

        eps = torch.finfo(torch_dtype(wide(x.dtype))).eps
    dtype = b.dtype(meta)
    y = _norm(b, x, weight, None, ops.Norm(NormKind.rms, eps, axes=len(normalized_shape)))
    return b.cast(y, dtype)


def _fused_rms_norm(b: Builder, meta: Any, x: Value, normalized_shape: Sequence[Any], weight: Value | None,
                    eps: float | None) -> tuple[Value, Value | None]:  # fmt: skip
    y = _rms_norm(b, meta[0], x, normalized_shape, weight, eps)
    rstd = None
    if b.used(1):
        axes = range(len(x.shape) - len(normalized_shape), len(x.shape))
        wide_x = b.cast(x, wide(x.dtype))
        square = b.map(lambda r: r * r, [wide_x], wide_x.dtype)
        mean = b.reduce(ReduceKind.mean, square, axes, keep=True)
        rstd = b.map(lambda v: (v + (1e-6 if eps is None else eps)).do(MapOp.rsqrt), [mean], mean.dtype)
    return y, rstd


def _group_norm(b: Builder, meta: Any, x: Value, groups: int, weight: Value | None = None, bias: Value | None = None,
                eps: float = 1e-5, cudnn_enabled: bool = True) -> Value:  # fmt: skip
    return _norm(b, x, weight, bias, ops.Norm(NormKind.group, eps, groups=groups))


def _native_group_norm(b: Builder, meta: Any, x: Value, weight: Value | None, bias: Value | None, n: Any, c: Any,
                       hw: Any, groups: int, eps: float) -> tuple[Value | None, ...]:  # fmt: skip
    y = _norm(b, x, weight, bias, ops.Norm(NormKind.group, eps, groups=groups))
    if not b.used(1) and not b.used(2):
        return y, None, None
    rows = b.reshape(x, (n, groups, c // groups * hw))
    return y, *(None if m is None else b.reshape(m, (n, groups)) for m in _moments(b, rows, [2], eps, (1, 2)))


# ---- batch norm ---------------------------------------------------------------------------------------------------------
def _data(v: Value | None) -> Any:
    """The tensor of a constant, in f64; None when it is not constant."""
    return None if v is None or v.const is None else v.const.data.detach().double()


def _per_channel(b: Builder, v: Value, rank: int) -> Value:
    return b.reshape(v, (v.shape[0], *(1 for _ in range(rank - 2))) if rank > 1 else v.shape)


def _affine(
    b: Builder, x: Value, mean: Value, var: Value, weight: Value | None, bias: Value | None, eps: float
) -> Value:
    """(x - mean) / sqrt(var + eps) * weight + bias per channel; constants become one scale and one shift."""
    rank = len(x.shape)
    m, v, w, c = _data(mean), _data(var), _data(weight), _data(bias)
    if m is None or v is None or (w is None) != (weight is None) or (c is None) != (bias is None):
        parts = [None if p is None else _per_channel(b, p, rank) for p in (mean, var, weight, bias)]
        return _normalize(b, x, parts[0], parts[1], parts[2], parts[3], eps)
    import torch

    from trivet.ir.interop import torch_dtype

    scale = torch.rsqrt(v + eps)
    if w is not None:
        scale = scale * w
    shift = -m * scale
    if c is not None:
        shift = shift + c
    form = (-1, *(1 for _ in range(rank - 2)))
    dtype = wide(x.dtype)
    p, q = (b.const(t.to(torch_dtype(dtype)).reshape(form)) for t in (scale, shift))
    return b.map(lambda r, p, q: r * p + q, [x, p, q], x.dtype, dtype)


def _normalize(b: Builder, x: Value, mean: Value | None, var: Value | None, weight: Value | None, bias: Value | None,
               eps: float) -> Value:  # fmt: skip
    """All shaped to broadcast."""

    def run(r: Reg, mean: Reg, var: Reg, *more: Reg) -> Reg:
        rest = iter(more)
        y = (r - mean) * (var + eps).do(MapOp.rsqrt)
        if weight is not None:
            y = y * next(rest)
        return y if bias is None else y + next(rest)

    return b.map(run, [p for p in (x, mean, var, weight, bias) if p is not None], x.dtype, wide(x.dtype), x.shape)


def _batch_stats(
    b: Builder, x: Value, weight: Value | None, bias: Value | None, eps: float
) -> tuple[Value, Value, Value]:
    """(result, mean, biased variance) with the statistics of the batch, per channel."""
    rank = len(x.shape)
    if x.shape[0] == 1 and rank > 2 and weight is None and bias is None and isinstance(x.shape[1], int):
        y = b.one("norm", [x, None, None], x.dtype, x.shape, ops.Norm(NormKind.group, eps, groups=x.shape[1]))
        if not b.used(1) and not b.used(2):
            return y, y, y
    axes = [i for i in range(rank) if i != 1]
    wide_x = b.cast(x, wide(x.dtype))
    mean = b.reduce(ReduceKind.mean, wide_x, axes, keep=True)
    var = b.reduce(ReduceKind.var, wide_x, axes, keep=True, correction=0.0)
    w, c = (None if p is None else _per_channel(b, p, rank) for p in (weight, bias))
    if not (x.shape[0] == 1 and rank > 2 and weight is None and bias is None and isinstance(x.shape[1], int)):
        y = _normalize(b, x, mean, var, w, c, eps)
    return y, b.reshape(mean, (x.shape[1],)), b.reshape(var, (x.shape[1],))


def _rstd(b: Builder, var: Value, eps: float) -> Value:
    return b.map(lambda v: (v + eps).do(MapOp.rsqrt), [var], var.dtype)


def _batch_norm(b: Builder, meta: Any, x: Value, weight: Value | None, bias: Value | None, mean: Value | None,
                var: Value | None, training: bool, momentum: float, eps: float, cudnn_enabled: bool = True) -> Value:  # fmt: skip
    if training or mean is None or var is None:
        if mean is not None:
            raise b.error("batch norm in training mode changes its running statistics in place",
                          "call .eval() on the model before the export")  # fmt: skip
        return _batch_stats(b, x, weight, bias, eps)[0]
    return _affine(b, x, mean, var, weight, bias, eps)


def _no_training(b: Builder, meta: Any, x: Value, weight: Value | None, bias: Value | None, mean: Value, var: Value,
                 momentum: float, eps: float) -> tuple[Value, Value, Value]:  # fmt: skip
    empty = b.full((0,), 0, mean.dtype) if b.used(1) or b.used(2) else x
    return _affine(b, x, mean, var, weight, bias, eps), empty, empty


def _no_stats(b: Builder, meta: Any, x: Value, weight: Value | None, bias: Value | None, training: bool,
              momentum: float, eps: float) -> tuple[Value, Value, Value]:  # fmt: skip
    y, mean, var = _batch_stats(b, x, weight, bias, eps)
    return y, mean, _rstd(b, var, eps) if b.used(2) else var


def _functional(b: Builder, meta: Any, x: Value, weight: Value | None, bias: Value | None, mean: Value, var: Value,
                training: bool, momentum: float, eps: float) -> tuple[Value, ...]:  # fmt: skip
    """Training mode: also the new running mean and variance."""
    if not training:
        return (*_no_training(b, meta, x, weight, bias, mean, var, momentum, eps), mean, var)
    y, m, v = _batch_stats(b, x, weight, bias, eps)
    axes = [i for i in range(len(x.shape)) if i != 1]
    unbiased = b.reduce(ReduceKind.var, b.cast(x, wide(x.dtype)), axes)

    def blend(old: Reg, new: Reg) -> Reg:
        return old * (1 - momentum) + new * momentum

    new_mean = b.map(blend, [mean, m], mean.dtype, wide(mean.dtype))
    new_var = b.map(blend, [var, unbiased], var.dtype, wide(var.dtype))
    return y, m, _rstd(b, v, eps), new_mean, new_var


def _with_update(b: Builder, meta: Any, x: Value, weight: Value | None, bias: Value | None, mean: Value, var: Value,
                 momentum: float, eps: float) -> tuple[Value, ...]:  # fmt: skip
    y, m, rstd, new_mean, new_var = _functional(b, meta, x, weight, bias, mean, var, True, momentum, eps)
    return y, m, rstd, b.full((0,), 0, DType.u8), new_mean, new_var


def _instance_norm(b: Builder, meta: Any, x: Value, weight: Value | None, bias: Value | None, mean: Value | None,
                   var: Value | None, use_input_stats: bool, momentum: float, eps: float,
                   cudnn_enabled: bool = True) -> Value:  # fmt: skip
    if not use_input_stats and mean is not None and var is not None:
        return _affine(b, x, mean, var, weight, bias, eps)
    if use_input_stats and mean is not None:
        raise b.error("instance norm in training mode changes its running statistics in place",
                      "call .eval() on the model before the export")  # fmt: skip
    channels = x.shape[1]
    if not isinstance(channels, int):
        raise b.error(f"instance norm needs a fixed number of channels, got {channels}", "make that dimension static")
    return _norm(b, x, weight, bias, ops.Norm(NormKind.group, eps, groups=channels))


HANDLERS: dict[str, Handler] = table({
    "layer_norm": _layer_norm,
    "native_layer_norm": _native_layer_norm,
    "rms_norm": _rms_norm,
    "_fused_rms_norm": _fused_rms_norm,
    "group_norm": _group_norm,
    "native_group_norm": _native_group_norm,
    "batch_norm": _batch_norm,
    "_native_batch_norm_legit_no_training": _no_training,
    "_native_batch_norm_legit.no_stats": _no_stats,
    "_native_batch_norm_legit_functional": _functional,
    "_batch_norm_with_update_functional": _with_update,
    "instance_norm": _instance_norm,
})  # fmt: skip
