"""Weights by rows, the form that microcontrollers read (hal/cpu/README.md): which products can have it, and how it is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trivet.constants import layout
from trivet.fbs.structs import Act, DType
from trivet.ir import ops
from trivet.ir.dim import Shape
from trivet.ir.graph import Node, Value
from trivet.views import apply, dense

if TYPE_CHECKING:
    from torch import Tensor

ROWS = 2  # Qconv.packed, Qmatmul.packed
TAPS = 32  # TRVK_MCU_TAPS: most of a depthwise convolution
SHIFT = 33  # TRVK_MCU_SHIFT: least of a result


def takes_rows(node: Node) -> bool:
    """Can this qconv or qmatmul read its weight by rows? All is i8 (the result of a
    qmatmul may be f32), the operands are constants, and shifts are large enough.
    """
    a = node.attrs
    x, w, scale, bias = (*node.inputs, None)[:4]
    y = node.outputs[0]
    if x is None or w is None or scale is None or not (x.dtype == w.dtype == DType.i8):
        return False
    real = y.dtype == DType.f32 and isinstance(a, ops.Qmatmul) and a.act == Act.none and scale.dtype == DType.f32
    if y.dtype != DType.i8 and not real:
        return False
    if any(v is not None and v.const is None for v in (w, scale, bias)):
        return False
    assert scale.const is not None
    if not real:
        m, s = scale.const.data
        if bool(((s < SHIFT) & (m != 0)).any()):
            return False
    if isinstance(a, ops.Qmatmul):
        return a.bits == 8 and a.b_zero == 0 and len(w.shape) == 2 and x.type.rank >= 1 and _side_by_side(x, -1)
    assert isinstance(a, ops.Qconv)
    if a.transposed:
        return False
    taps = 1
    for n in w.shape[2:]:
        taps *= int(str(n))
    if not depthwise(a, w):
        return True
    assert w.const is not None  # 16 bits hold two products, unless both numbers are the least
    return taps <= TAPS and _side_by_side(x, 1) and bool((w.const.data > -128).all())


def _side_by_side(x: Value, axis: int) -> bool:
    """Do elements along the axis lie next to each other?"""
    return x.shape[axis] == 1 or _strides(x)[axis] == 1


def _strides(x: Value) -> Shape:
    """As far as they are known before storage is assigned, which keeps what is 1."""
    if x.node is not None and ops.OPS[x.node.op].view:
        source = x.node.inputs[0]
        assert source is not None
        window = apply(x.node, (0, _strides(source)))
        return window[1] if window is not None else dense(x.shape)
    return layout(x.const.data)[1] if x.const is not None else dense(x.shape, x.order)


def depthwise(a: ops.Qconv, w: Value) -> bool:
    """One channel in each group."""
    return a.groups > 1 and w.shape[1] == 1


def conv_rows(a: ops.Qconv, w: Tensor) -> Tensor:
    """w i8[O, C / groups, k..] as i8[O, taps * C / groups rounded up to 4], depthwise as i8[taps, O rounded up to 4]; flat."""
    lines = w.flatten(2).movedim(1, 2).flatten(1)
    return _padded(lines.t() if a.groups > 1 and w.shape[1] == 1 else lines)


def matmul_rows(b: Tensor) -> Tensor:
    """b i8[K, N] as i8[N, K rounded up to 4], flat."""
    return _padded(b.t())


def _padded(rows: Tensor) -> Tensor:
    import torch

    n = rows.shape[1]
    out = torch.zeros(rows.shape[0], -(-n // 4) * 4, dtype=torch.int8)
    out[:, :n] = rows
    return out.flatten()


def whole_bias(w: Tensor, axis: int, zero: int, bias: Tensor | None) -> Tensor:
    """i32[O]: the bias less zero * the sum of each output's weights, in 32 bits that wrap. axis: that of outputs in w."""
    import torch

    sums = w.long().sum([i for i in range(w.dim()) if i != axis])
    out = (0 if bias is None else bias.long()) - zero * sums
    return ((out + (1 << 31)) % (1 << 32) - (1 << 31)).to(torch.int32)


def whole_scale(scale: Tensor, n: int) -> Tensor:
    """scale i32[2, n or 1] for n outputs, shifts less SHIFT; or f32[n or 1] of real ones."""
    import torch

    if scale.is_floating_point():
        return scale.expand(n).contiguous()
    m, s = scale
    return torch.stack([m, torch.where(m == 0, torch.zeros_like(s), s - SHIFT)]).expand(2, n).contiguous()


def conv_scratch(a: ops.Qconv, channels: int) -> int:
    """trvk_mcu_conv_tmp_bytes in hal/cpu/mcu_conv.c."""
    from trivet import native
    from trivet.targets.cpu_part import attribute_row
    from trivet.writer import records

    return native.mcu_conv_tmp_bytes(records("QconvAttrs", [attribute_row(a)]), channels)


def matmul_scratch(rows: Any, k: int) -> int:
    """trvk_mcu_matmul_tmp_bytes in hal/cpu/mcu_matmul.c. rows: how many, or a Dim."""
    from trivet import native

    return native.mcu_matmul_tmp_bytes(rows if isinstance(rows, int) else 2, k)
