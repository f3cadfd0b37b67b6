"""Quantise and dequantise operators of torch (quantized_decomposed, torchao) and ours.

Static ones become `requantize` nodes between real values and stored integers whose Type.quant says what they mean; constants are
computed here. Rows that are quantised while running become `rowquant`, other scales that are known only then float maps.
Unsigned activations are kept as signed (stored - 128).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trivet.aten.common import Handler, handler
from trivet.aten.qparams import choose_affine, choose_tensor, choose_token, follow, single_row
from trivet.fbs.structs import DType, MapOp
from trivet.ir import ops
from trivet.ir.builder import Builder
from trivet.ir.dim import Dim
from trivet.ir.graph import Value
from trivet.ir.types import Quant, Type, is_float

_RANGES = {DType.u8: (0, 255), DType.i8: (-128, 127), DType.i16: (-32768, 32767)}
_DEPTH = 8  # nodes between a constant and its operator that are computed here
_VIEWS = ("permute", "reshape", "expand", "slice")


@dataclass(frozen=True, slots=True)
class _Params:
    """What an operator says. scale, zero: numbers or torch tensors where they are known, else None (values: see _Runtime).
    shape: of the blocks; block: elements along each axis that share a scale. lo, hi: of the stored numbers, None: all.
    """

    scale: Any
    zero: Any
    block: tuple[int | Dim, ...] | None  # None: all elements
    lo: int | None
    hi: int | None
    scale_value: Any = None
    zero_value: Any = None


def known(v: Any) -> Any:
    """The torch tensor that a value always is, computed through a few nodes; None when it depends on inputs."""
    if not isinstance(v, Value):
        return v
    return _compute(v) if _constant(v, _DEPTH) else None


def _constant(v: Value, depth: int) -> bool:
    if v.const is not None:
        return True
    n = v.node
    if depth == 0 or n is None or n.graphs or n.op in ("nonzero", "item") or not v.type.static or not n.inputs:
        return False
    return all(x is None or _constant(x, depth - 1) for x in n.inputs)


def _compute(v: Value) -> Any:
    from trivet.ir.evaluate import evaluate_node

    if v.const is not None:
        return v.const.data.detach()
    assert v.node is not None
    return evaluate_node(v.node, [None if x is None else _compute(x) for x in v.node.inputs], {})[v.index]


def _params(scale: Any, zero: Any, block: Any, lo: Any, hi: Any) -> _Params:
    s, z = known(scale), known(zero)
    dynamic = s is None or (zero is not None and z is None)
    lo, hi = (None if t is None else int(known(t)) for t in (lo, hi))
    blocks = None if block is None else tuple(block)
    return _Params(None if dynamic else s, None if dynamic else z, blocks, lo, hi, scale, zero)


# ---- static parameters --------------------------------------------------------------------------------------------------
def quant_of(b: Builder, shape: Sequence[int | Dim], dtype: DType, p: _Params) -> Quant:
    """The Quant of stored numbers in dtype (u8: as they are).

    Raises:
        Error: scales that are not positive and finite, zero points that no integer of the dtype reaches.
    """
    scale = np.asarray(p.scale, np.float32) if not hasattr(p.scale, "numpy") else p.scale.detach().float().cpu().numpy()
    given = p.zero.detach().cpu() if hasattr(p.zero, "cpu") else p.zero
    zero = np.zeros((), np.int64) if given is None else np.asarray(given)
    zero = np.zeros_like(scale, np.int64) if zero.size == 0 else zero
    if not bool(np.all(np.isfinite(scale) & (scale >= 0))):
        raise b.error("a scale is negative or not finite", "calibrate with data without NaN and infinity")
    scale = np.where(scale == 0, np.float32(2.0**-126), scale).astype(np.float32)
    low, high = _RANGES.get(dtype, (-(2**31), 2**31 - 1))
    lo = None if p.lo is None or p.lo <= low else p.lo
    hi = None if p.hi is None or p.hi >= high else p.hi
    if p.block is None or scale.size == 1:
        return Quant(scale.reshape(()), int(zero.reshape(-1)[0]), lo=lo, hi=hi)
    axis, group, scale, zero = _spread(b, tuple(shape), p.block, scale, zero)
    middle = int(np.rint(np.median(zero)))
    offset = None if bool((zero == middle).all()) else ((middle - zero) * scale.astype(np.float64)).astype(np.float32)
    return Quant(scale, middle, axis, group, offset=offset, lo=lo, hi=hi)


def _spread(b: Builder, shape: tuple[int | Dim, ...], block: tuple[int | Dim, ...], scale: Any,
            zero: Any) -> tuple[int, int, Any, Any]:  # fmt: skip
    """Blocks of any form as one axis with a scale per element or group: (axis, group, scale, zero)."""
    if not all(isinstance(d, int) for d in (*shape, *block)):
        raise b.error("blocks of quantisation parameters need fixed sizes", "give these dimensions a fixed size")
    counts = [int(str(d)) // int(str(k)) for d, k in zip(shape, block, strict=True)]
    zero = np.broadcast_to(zero.reshape(counts) if zero.size > 1 else zero.reshape(()), counts)
    scale = scale.reshape(counts)
    own = [i for i, n in enumerate(counts) if n > 1]
    if len(own) == 1 and block[own[0]] == 1:
        return own[0], 0, scale.reshape(-1), zero.reshape(-1)
    grouped = [i for i in own if block[i] != 1] or [i for i, k in enumerate(block) if k != 1] or [len(shape) - 1]
    axis = grouped[-1]
    for i, k in enumerate(block):
        if i != axis and k != 1:
            scale, zero = np.repeat(scale, int(str(k)), i), np.repeat(zero, int(str(k)), i)
    return axis, int(str(block[axis])), np.ascontiguousarray(scale), np.ascontiguousarray(zero)


def store(b: Builder, data: Any, quant: Quant, name: str = "") -> Value:
    """A constant of stored integers. Unsigned ones become signed; along an axis, those that fit in 4 bits become 0..15."""
    import torch

    least, most = (-128, 127) if data.dtype == torch.int8 else (0, 255)
    lo, hi = least if quant.lo is None else quant.lo, most if quant.hi is None else quant.hi
    quant = replace(quant, lo=None, hi=None)
    narrow = data.dtype in (torch.int8, torch.uint8) and quant.axis is not None and hi - lo < 16 and data.numel()
    if narrow and lo <= int(data.min()) and int(data.max()) <= hi:
        data = data if data.dtype == torch.uint8 and lo == 0 else (data.to(torch.int16) - lo).to(torch.uint8)
        return b.const(data, name, replace(quant, zero=quant.zero - lo, bits=4))
    if data.dtype == torch.uint8:
        data, quant = (data.to(torch.int16) - 128).to(torch.int8), _signed(quant)
    return b.const(data, name, quant)


def _signed(q: Quant) -> Quant:
    lo, hi = (None if t is None else t - 128 for t in (q.lo, q.hi))
    return Quant(q.scale, q.zero - 128, q.axis, q.group, q.bits, q.offset, lo, hi)


# ---- quantise -----------------------------------------------------------------------------------------------------------
def _quantize(b: Builder, meta: Any, x: Value, p: _Params, dtype: Any) -> Value:
    stored = b.dtype(meta)
    if is_float(x.dtype) and x.dtype != DType.f32:
        x = b.cast(x, DType.f32)
    rows = follow(b.node)
    if p.scale is None and rows is not None and x.type.rank and (not rows.whole or single_row(x)):
        return b.one("rowquant", [x], DType.f32, x.shape, ops.Rowquant(rows.affine))
    if p.scale is None or stored not in _RANGES:
        return _quantize_running(b, x, p, stored)
    quant = quant_of(b, x.shape, stored, p)
    data = known(x)
    if data is not None:
        return b.const(_quantize_data(data, p, meta.dtype))
    if not quant.per_tensor:
        return _quantize_running(b, x, p, stored)
    if stored == DType.u8:
        (y,) = b.add("requantize", [x], [Type(DType.i8, x.shape, _signed(quant))], ops.Requantize())
        return b.map(lambda r: (r.cast(DType.i16) + 128).cast(DType.u8), [y], DType.u8)
    return b.add("requantize", [x], [Type(stored, x.shape, quant)], ops.Requantize())[0]


def _quantize_data(data: Any, p: _Params, dtype: Any) -> Any:
    """A constant, as torch quantises it."""
    import torch

    scale, zero = _on_blocks(data, p.scale, p.block), _on_blocks(data, p.zero, p.block)
    lo, hi = p.lo, p.hi
    info = torch.iinfo(dtype)
    y = torch.round(data.detach().float() * (1.0 / scale)) + (0 if zero is None else zero)
    return torch.clamp(y, info.min if lo is None else lo, info.max if hi is None else hi).to(dtype)


def _on_blocks(data: Any, t: Any, block: Any) -> Any:
    """A scale or zero point per element of data."""
    if t is None or not hasattr(t, "numel") or t.numel() == 0:
        return None if t is None or hasattr(t, "numel") else t
    if block is None or t.numel() == 1:
        return t.reshape(()) if t.numel() == 1 else t
    t = t.reshape([n // int(k) for n, k in zip(data.shape, block, strict=True)])
    for i, k in enumerate(block):
        t = t.repeat_interleave(int(k), i)
    return t


def _quantize_running(b: Builder, x: Value, p: _Params, stored: DType) -> Value:
    """By float maps: scales that are known only while running, or more than one of them."""
    scale, zero, wide, back = _operands(b, x, p)
    lo, hi = _RANGES.get(stored, (-(2**31), 2**31 - 1))
    lo, hi = lo if p.lo is None else p.lo, hi if p.hi is None else p.hi

    def formula(v: Any, s: Any, *z: Any) -> Any:
        q = (v * s.do(MapOp.recip)).do(MapOp.round)
        q = q + z[0] if z else q
        return q.do(MapOp.fmax, float(lo)).do(MapOp.fmin, float(hi))

    operands = [wide, scale, *([] if zero is None else [zero])]
    result: Value = back(b.map(formula, operands, stored, DType.f32, wide.shape))
    return result


def _operands(b: Builder, x: Value, p: _Params) -> tuple[Any, Any, Value, Any]:
    """scale and zero that broadcast, x in the shape of the blocks, and the way back."""
    scale = p.scale_value if isinstance(p.scale_value, (Value, int, float)) else b.const(p.scale_value)
    zero = p.zero_value
    if isinstance(zero, Value) and 0 in zero.shape:
        zero = None
    if p.block is None:
        scale, zero = (b.reshape(t, ()) if isinstance(t, Value) and t.type.count == 1 else t for t in (scale, zero))
        return scale, zero, x, lambda v: v
    shape: list[int | Dim] = []
    per: list[int | Dim] = []
    for d, k in zip(x.shape, p.block, strict=True):
        if d == k or k == 1:
            shape.append(d)
            per.append(1 if d == k else d)
        else:
            if not isinstance(d, int) or not isinstance(k, int):
                raise b.error("blocks of quantisation parameters need fixed sizes", "give this dimension a fixed size")
            shape += [d // k, k]
            per += [d // k, 1]
    scale, zero = (b.reshape(t, per) if isinstance(t, Value) and t.type.count != 1 else b.reshape(t, ()) if isinstance(t, Value)
                   else t for t in (scale, zero))  # fmt: skip
    return scale, zero, b.reshape(x, shape), lambda v: b.reshape(v, x.shape)


# ---- dequantise ---------------------------------------------------------------------------------------------------------
def _dequantize(b: Builder, meta: Any, x: Value, p: _Params) -> Value:
    if x.dtype == DType.f32:  # rowquant did both
        return b.cast(x, b.dtype(meta))
    if p.scale is None or x.dtype not in _RANGES:
        return b.cast(_dequantize_running(b, x, p), b.dtype(meta))
    quant = quant_of(b, x.shape, x.dtype, p)
    data = known(x)
    if data is not None:
        v = _shared(b, x, quant) or store(b, data, quant, x.name)
    elif not quant.per_tensor:
        return b.cast(_dequantize_running(b, x, p), b.dtype(meta))
    else:
        v = _meaning(b, *_unsigned(b, x, quant))
    (y,) = b.add("requantize", [v], [Type(DType.f32, x.shape)], ops.Requantize())
    return b.cast(y, b.dtype(meta))


def _shared(b: Builder, x: Value, quant: Quant) -> Value | None:
    """The weight itself with a meaning, where nothing else reads it and it stays as it is."""
    lo, hi = -128 if quant.lo is None else quant.lo, 127 if quant.hi is None else quant.hi
    if x.const is None or x.dtype == DType.u8 or hi - lo < 16:
        return None
    source = b.node.args[0]
    if any(str(u.target) != str(b.node.target) or u.args != b.node.args for u in source.users):
        return None
    return Value(x.name, Type(x.dtype, x.shape, replace(quant, lo=None, hi=None)), const=x.const)


def _unsigned(b: Builder, x: Value, quant: Quant) -> tuple[Value, Quant]:
    """An unsigned activation as signed: what the quantiser made, or a map."""
    if x.dtype != DType.u8:
        return x, quant
    n = x.node
    inner = n.inputs[0] if n is not None and n.op == "map" and len(n.inputs) == 1 else None
    if inner is not None and inner.dtype == DType.i8 and inner.type.quant is not None:
        return inner, _signed(quant)
    return b.map(lambda r: (r.cast(DType.i16) - 128).cast(DType.i8), [x], DType.i8), _signed(quant)


def _meaning(b: Builder, x: Value, quant: Quant) -> Value:
    """Stored integers that stand for real numbers by quant: x itself when it says so."""
    have = x.type.quant
    if have is not None and have.per_tensor and have.scale == quant.scale and have.zero == quant.zero:
        return x
    return b.add("bitcast", [x], [Type(x.dtype, x.shape, quant)], ops.Bitcast())[0]


def _dequantize_running(b: Builder, x: Value, p: _Params) -> Value:
    scale, zero, wide, back = _operands(b, x, p)

    def formula(v: Any, s: Any, *z: Any) -> Any:
        return (v - z[0] if z else v) * s

    operands = [wide, scale, *([] if zero is None else [zero])]
    result: Value = back(b.map(formula, operands, DType.f32, DType.f32, wide.shape))
    return result


# ---- the operators ------------------------------------------------------------------------------------------------------
def _q_tensor(b: Builder, meta: Any, x: Value, scale: Any, zero: Any, lo: Any, hi: Any, dtype: Any) -> Value:
    return _quantize(b, meta, x, _params(scale, zero, None, lo, hi), dtype)


def _dq_tensor(b: Builder, meta: Any, x: Value, scale: Any, zero: Any, lo: Any, hi: Any, dtype: Any,
               out_dtype: Any = None) -> Value:  # fmt: skip
    return _dequantize(b, meta, x, _params(scale, zero, None, lo, hi))


def _channels(x: Value, axis: int) -> tuple[int | Dim, ...]:
    return tuple(1 if i == axis % len(x.shape) else d for i, d in enumerate(x.shape))


def _q_channel(b: Builder, meta: Any, x: Value, scale: Any, zero: Any, axis: int, lo: Any, hi: Any,
               dtype: Any) -> Value:  # fmt: skip
    return _quantize(b, meta, x, _params(scale, zero, _channels(x, axis), lo, hi), dtype)


def _dq_channel(b: Builder, meta: Any, x: Value, scale: Any, zero: Any, axis: int, lo: Any, hi: Any, dtype: Any,
                out_dtype: Any = None) -> Value:  # fmt: skip
    return _dequantize(b, meta, x, _params(scale, zero, _channels(x, axis), lo, hi))


def _tokens(x: Value) -> tuple[int | Dim, ...]:
    return (*(1 for _ in x.shape[:-1]), *x.shape[-1:])


def _q_token(b: Builder, meta: Any, x: Value, scale: Any, zero: Any, lo: Any, hi: Any, dtype: Any) -> Value:
    return _quantize(b, meta, x, _params(scale, zero, _tokens(x), lo, hi), dtype)


def _dq_token(b: Builder, meta: Any, x: Value, scale: Any, zero: Any, lo: Any, hi: Any, dtype: Any,
              output_dtype: Any = None) -> Value:  # fmt: skip
    return _dequantize(b, meta, x, _params(scale, zero, _tokens(x), lo, hi))


def _dq_groups(b: Builder, meta: Any, x: Value, scale: Any, zero: Any, lo: Any, hi: Any, dtype: Any, group: int = 128,
               output_dtype: Any = None) -> Value:  # fmt: skip
    return _dequantize(b, meta, x, _params(scale, zero, (1, min(group, int(str(x.shape[1])))), lo, hi))


def _q_affine(b: Builder, meta: Any, x: Value, block: Any, scale: Any, zero: Any, dtype: Any, lo: Any = None,
              hi: Any = None) -> Value:  # fmt: skip
    return _quantize(b, meta, x, _params(scale, zero, block, lo, hi), dtype)


def _dq_affine(b: Builder, meta: Any, x: Value, block: Any, scale: Any, zero: Any, dtype: Any, lo: Any = None, hi: Any = None,
               output_dtype: Any = None) -> Value:  # fmt: skip
    return _dequantize(b, meta, x, _params(scale, zero, block, lo, hi))


def _dq_ours(b: Builder, meta: Any, q: Value, scale: Any, offset: Any, zero: int, axis: int, group: int,
             bits: int) -> Value:  # fmt: skip
    """trivet::dequantize: real = scale * (q - zero) + offset."""
    data, s, o = known(q), known(scale), known(offset)
    if data is None or s is None or (offset is not None and o is None) or q.dtype not in (DType.i8, DType.u8):
        raise b.error("trivet::dequantize takes constant weights of 8 bits", "register the stored weight as a buffer")
    one = s.numel() == 1
    real, extra = (
        None if t is None else t.detach().float().reshape(() if one else t.shape).cpu().numpy() for t in (s, o)
    )
    assert real is not None
    quant = Quant(real, zero, None if one else axis % data.dim(), 0 if one else group, bits, extra)
    if q.const is not None and (q.dtype == DType.i8 or bits == 4):
        v = Value(q.name, Type(q.dtype, q.shape, quant), const=q.const)
    elif bits == 4:
        v = b.const(data, q.name, quant)
    else:
        v = store(b, data, quant, q.name)
    return b.add("requantize", [v], [Type(DType.f32, q.shape)], ops.Requantize())[0]


def _named(rows: dict[str, Any]) -> dict[str, Handler]:
    return {name: handler(function) for names, function in rows.items() for name in names.split()}


_QD = "quantized_decomposed"
HANDLERS: dict[str, Handler] = _named({
    " ".join(f"{_QD}.quantize_per_tensor.{o}" for o in ("default", "tensor", "tensor2")): _q_tensor,
    " ".join(f"{_QD}.dequantize_per_tensor.{o}" for o in ("default", "tensor", "tensor2")): _dq_tensor,
    f"{_QD}.quantize_per_channel.default": _q_channel,
    f"{_QD}.dequantize_per_channel.default": _dq_channel,
    f"{_QD}.quantize_per_token.default": _q_token,
    f"{_QD}.dequantize_per_token.default": _dq_token,
    f"{_QD}.dequantize_per_channel_group.default": _dq_groups,
    f"{_QD}.choose_qparams.tensor {_QD}.choose_qparams_symmetric.tensor": choose_tensor,
    f"{_QD}.choose_qparams_per_token.default {_QD}._choose_qparams_per_token_asymmetric_impl.default "
    f"{_QD}.choose_qparams_per_token_asymmetric.default": choose_token,
    "torchao.quantize_affine.default": _q_affine,
    "torchao.dequantize_affine.default": _dq_affine,
    "torchao.choose_qparams_affine.default": choose_affine,
    "trivet.dequantize.default": _dq_ours,
})  # fmt: skip


__all__ = ["HANDLERS", "known", "quant_of", "store"]
