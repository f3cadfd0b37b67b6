"""Real parameters of quantised operators turned into the integers that their kernels take (schema/ops.fbs has the arithmetic).

Scales are real numbers: stored = real / scale + zero. Everything is computed in float64 and rounded once, halves to even. What the
integers cannot hold is an Error, upon which fold_qdq leaves the operator in float.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from trivet.error import Error
from trivet.fbs.structs import BinaryKind
from trivet.ir.types import Quant

Reals = np.ndarray[Any, np.dtype[np.floating[Any]]]
Int16s = np.ndarray[Any, np.dtype[np.int16]]
Int32s = np.ndarray[Any, np.dtype[np.int32]]

RNN_GATE = 2.0**-12  # qrnn: real per stored number of the gates before their activation, ..
RNN_STATE = 2.0**-15  # .. of h, i16
RNN_CELL = 2.0**-11  # .. of c, i16: it saturates at +-16
RNN_OUT = 2.0**-7  # .. of y, i8
NORM_MOST = 32768  # qnorm: values per row
RNN_MOST = 32768  # qrnn: inputs and hidden values
_INT32 = 2**31 - 1


def fixed_point(x: float, bits: int = 31, most_shift: int = 62) -> tuple[int, int]:
    """(multiplier, shift) with x = multiplier / 2^shift, the multiplier in [2^(bits-1), 2^bits).

    An x that would need more than most_shift has a smaller multiplier at that shift: the product with a number below 2^32 is
    off by less than 2^-30 then (62 bits). 0 is (0, 0).

    Raises:
        Error: x is negative, not finite, or not below 2^bits.
    """
    if not (math.isfinite(x) and x >= 0):
        raise Error(f"a multiplier must be a number of at least 0, got {x}")
    fraction, exponent = math.frexp(x)  # x = fraction * 2^exponent, exactly
    shift = min(bits - exponent, most_shift)
    multiplier = round(math.ldexp(fraction, exponent + shift)) if shift >= 0 else 1 << bits
    if multiplier == 1 << bits:  # rounded up to the next power of two, or too large
        multiplier, shift = multiplier // 2, shift - 1
    if shift < 0:
        raise Error(f"the ratio of scales {x:.3g} is too large for a multiplier of {bits} bits",
                    remedy="calibrate with data that has the model's usual range")  # fmt: skip
    return (multiplier, shift) if multiplier else (0, 0)


def _ratio(*scales: float, over: float = 1.0) -> float:
    """Product of scales divided by one."""
    for s in (*scales, over):
        if not (math.isfinite(s) and s > 0):
            raise Error(f"a scale must be positive and finite, got {s}")
    return math.prod(float(s) for s in scales) / float(over)


def _columns(ratios: Reals) -> Int32s:
    """int32[2, O]: multipliers and shifts."""
    pairs = [fixed_point(float(r)) for r in ratios]
    return np.array([[m for m, _ in pairs], [s for _, s in pairs]], np.int32)


def _int32(x: Any, what: str) -> Int32s:
    """Rounded to int32."""
    v = np.rint(np.asarray(x, np.float64))
    if not bool(np.all(np.abs(v) <= _INT32)):  # NaN too
        raise Error(f"{what} does not fit in 32 bits")
    out: Int32s = v.astype(np.int32)
    return out


def conv_multipliers(sx: float, sw: Reals, sy: float) -> Int32s:
    """The `scale` operand of qconv and qmatmul with a stored output: int32[2, O], rows multiplier and shift, for sx * sw[o] / sy.

    sw: float [O], or [1] for all.
    """
    return _columns(np.array([_ratio(sx, float(s), over=sy) for s in np.asarray(sw).reshape(-1)]))


def pool_multiplier(sx: float, sy: float) -> tuple[int, int]:
    """(multiplier < 2^23, shift <= 40) of qpool and qreduce for sx / sy."""
    return fixed_point(_ratio(sx, over=sy), bits=23, most_shift=40)


def binary_multipliers(kind: BinaryKind, sa: float, sb: float, sy: float) -> tuple[int, int, int]:
    """(a_multiplier, b_multiplier, shift) of binary. add, sub: sa / sy and sb / sy over one shift; mul: sa * sb / sy and 0."""
    if kind == BinaryKind.mul:
        m, shift = fixed_point(_ratio(sa, sb, over=sy))
        return m, 0, shift
    a, b = _ratio(sa, over=sy), _ratio(sb, over=sy)
    shift = fixed_point(max(a, b))[1]
    return round(math.ldexp(a, shift)), round(math.ldexp(b, shift)), shift


def softmax_table(scale: float) -> Int32s:
    """int32[256] of qsoftmax: 2^23 * exp(-d * scale) at d; scale is that of x."""
    return _int32(2.0**23 * np.exp(-np.arange(256) * _ratio(float(scale))), "softmax table")


def norm_operands(
    x: Quant, y: Quant, weight: Reals | None, bias: Reals | None, eps: float, n: int
) -> tuple[Int32s | None, Int32s | None, dict[str, int]]:
    """Operands and numbers of qnorm.

    Args:
        x, y: quantisation per tensor of input and output, both i8.
        weight, bias: float, of the shape of the normalised axes; None: 1 and 0.
        eps: the model's.
        n: values per row.

    Returns:
        weight int32 (within +-2^15) or None, bias int32 or None, and x_zero, y_zero, multiplier, shift, lo, hi, eps.

    Raises:
        Error: rows too long, eps too large for x's scale, numbers that are not finite.
    """
    if not 1 <= n <= NORM_MOST:
        raise Error(f"rows of {n} values; the integer normalisation takes 1 to {NORM_MOST}")
    sx, sy = _scale(x), _scale(y)
    whole_eps = float(eps) / sx**2 * 2.0**16
    if not 0 <= whole_eps < 2.0**32 - 1:
        raise Error(f"eps {eps} does not fit an input of scale {sx:.3g}")
    w = np.ones(()) if weight is None else np.asarray(weight, np.float64)
    b = None if bias is None else np.asarray(bias, np.float64)
    if not (bool(np.isfinite(w).all()) and (b is None or bool(np.isfinite(b).all()))):
        raise Error("weight or bias of the normalisation is not finite")
    # A weight counts `unit` each, at 2^15 levels unless a bias far above the weights needs the 32 bits for itself.
    largest = 0.0 if b is None else float(np.abs(b).max(initial=0.0))
    bias_unit = largest / (_INT32 - 1)  # of t * weight; t has 4096 per unit
    unit = max(float(np.abs(w).max(initial=0.0)) / 2.0**15, bias_unit * 4096)
    stored: Int32s | None
    if weight is None and bias_unit * 4096 <= 1.0:
        unit, stored = 1.0, None
    else:
        unit = unit or 1.0  # all zeros
        stored = _int32(w / unit, "weight of the normalisation")
        if weight is None:
            assert b is not None
            stored = np.full(b.shape, stored, np.int32)
    multiplier, shift = fixed_point(unit / 4096 / sy, bits=23)
    lo, hi = _bounds(y)
    numbers = {"x_zero": x.zero, "y_zero": y.zero, "multiplier": multiplier, "shift": shift, "lo": lo, "hi": hi,
               "eps": round(whole_eps)}  # fmt: skip
    return stored, None if b is None else _int32(b / (unit / 4096), "bias of the normalisation"), numbers


def rnn_tables() -> Int16s:
    """int16[2, 513] of qrnn: sigmoid and tanh at -8 + k / 32, in 2^-15."""
    x = np.arange(513) / 32.0 - 8.0
    both = np.stack([1.0 / (1.0 + np.exp(-x)), np.tanh(x)])
    return np.clip(np.rint(both * 2.0**15), -32768, 32767).astype(np.int16)


def rnn_operands(
    x: Quant,
    w_ih: np.ndarray[Any, np.dtype[np.int8]],
    quant_ih: Quant,
    w_hh: np.ndarray[Any, np.dtype[np.int8]],
    quant_hh: Quant,
    b_ih: Reals | None,
    b_hh: Reals | None,
) -> tuple[Int32s, Int32s | None, Int32s | None, dict[str, int]]:
    """Operands and numbers of qrnn (the table apart).

    Args:
        x: quantisation of the input, i8.
        w_ih, w_hh: stored weights [G*H, I], [G*H, H].
        quant_ih, quant_hh: their quantisation, per tensor or per row, zero 0.
        b_ih, b_hh: float [G*H], or None.

    Returns:
        scale int32[4, G*H] (multiplier and shift of the x side, of the h side), b_ih and b_hh int32 or None, and x_zero.

    Raises:
        Error: asymmetric or too long weights, a bias that does not fit.
    """
    rows_x, bias_x = _rnn_side(w_ih, quant_ih, _scale(x), b_ih, "w_ih")
    rows_h, bias_h = _rnn_side(w_hh, quant_hh, RNN_OUT, b_hh, "w_hh")
    return np.concatenate([rows_x, rows_h]), bias_x, bias_h, {"x_zero": x.zero}


def _rnn_side(
    w: np.ndarray[Any, np.dtype[np.int8]], quant: Quant, sx: float, bias: Reals | None, name: str
) -> tuple[Int32s, Int32s | None]:
    rows = w.shape[0]
    if w.shape[1] > RNN_MOST:
        raise Error(f"{name}: {w.shape[1]} columns; an integer RNN takes {RNN_MOST}")
    if quant.zero != 0 or quant.offset is not None or quant.group or quant.axis not in (None, 0):
        raise Error(f"{name}: weights of an integer RNN are symmetric, with one scale per row or for all")
    sw = np.broadcast_to(np.asarray(quant.scale, np.float64), (rows,))
    # A row of zeros has any scale, even one too small for its bias; it takes one that suits the bias.
    unit = np.where(w.any(axis=1), sx * sw, 2.0**-20)
    stored = None if bias is None else _int32(np.asarray(bias, np.float64) / unit, f"bias beside {name}")
    return _columns(unit / RNN_GATE), stored


def _scale(q: Quant) -> float:
    """The scale of an activation."""
    if not q.per_tensor:
        raise Error("an activation has one scale and no offset")
    return _ratio(float(q.scale))


def _bounds(q: Quant) -> tuple[int, int]:
    """What an i8 output is clamped to."""
    return -128 if q.lo is None else q.lo, 127 if q.hi is None else q.hi
