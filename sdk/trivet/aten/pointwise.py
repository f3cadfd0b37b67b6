"""Elementwise arithmetic, comparison, logic and conversion."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from trivet.aten.common import Handler, pointwise, result_type, table, wide
from trivet.fbs.structs import DType, MapOp
from trivet.ir.builder import Builder, Operand
from trivet.ir.expr import Formula, Reg
from trivet.ir.graph import Value
from trivet.ir.types import is_float

Function = Callable[..., Any]


# ---- forms --------------------------------------------------------------------------------------------------------------
def _formula(f: Formula, steps: int = 2) -> Function:
    """All arguments are operands of f, computed in the dtype of the result."""

    def run(b: Builder, meta: Any, *operands: Operand) -> Value:
        return pointwise(b, meta, f, *operands, steps=steps)

    return run


def _instr(op: MapOp) -> Function:
    """One instruction of all arguments."""
    return _formula(lambda x, *others: x.do(op, *others), steps=1)


def _keeps_integers(op: MapOp) -> Function:
    """One instruction that leaves integers as they are (floor and its kin)."""

    def run(b: Builder, meta: Any, x: Value) -> Value:
        return b.map1(op, x) if is_float(x.dtype) else x

    return run


def _compare(op: MapOp) -> Function:
    def run(b: Builder, meta: Any, x: Operand, y: Operand) -> Value:
        return b.map(lambda p, q: p.do(op, q), [x, y], b.dtype(meta), result_type(x, y), b.shape(meta))

    return run


def _logical(op: MapOp) -> Function:
    def run(b: Builder, meta: Any, x: Value, y: Value) -> Value:
        return b.map(lambda p, q: p.do(op, q), [x, y], b.dtype(meta), DType.bool, b.shape(meta))

    return run


def _test(f: Callable[[Reg], Reg], integers: bool) -> Function:
    """A property of floats that all integers have, or none."""

    def run(b: Builder, meta: Any, x: Value) -> Value:
        if not is_float(x.dtype):
            return b.full(x.shape, integers, DType.bool)
        return b.map(f, [x], DType.bool)

    return run


# ---- arithmetic ---------------------------------------------------------------------------------------------------------
def _sum(sign: int) -> Function:
    """x + alpha * y or x - alpha * y. Numbers are rounded to the dtype first here, unlike in products."""

    def run(b: Builder, meta: Any, x: Operand, y: Operand, alpha: Operand = 1) -> Value:
        dtype = b.dtype(meta)
        if isinstance(alpha, Value) or alpha != 1:
            inner = wide(dtype)

            def scaled(p: Reg, q: Reg, a: Reg) -> Reg:
                p, q = p.cast(inner), q.cast(inner) * a.cast(inner)
                return p + q if sign > 0 else p - q

            return b.map(scaled, [x, y, alpha], dtype, dtype, b.shape(meta))
        return b.map(lambda p, q: p + q if sign > 0 else p - q, [x, y], dtype, dtype, b.shape(meta))

    return run


_add, _sub = _sum(1), _sum(-1)


def _rsub(b: Builder, meta: Any, x: Operand, y: Operand, alpha: Operand = 1) -> Any:
    return _sub(b, meta, y, x, alpha)


def _div(b: Builder, meta: Any, x: Operand, y: Operand, rounding_mode: str | None = None) -> Value:
    if rounding_mode is None:
        return pointwise(b, meta, lambda p, q: p / q, x, y, steps=1)
    if rounding_mode == "floor":
        return pointwise(b, meta, lambda p, q: p.do(MapOp.floor_div, q), x, y, steps=1)
    if is_float(b.dtype(meta)):
        return pointwise(b, meta, lambda p, q: (p / q).do(MapOp.trunc), x, y)
    return pointwise(b, meta, lambda p, q: p.do(MapOp.trunc_div, q), x, y, steps=1)


def _floor_divide(b: Builder, meta: Any, x: Operand, y: Operand) -> Value:
    return _div(b, meta, x, y, "floor")


def _pow(b: Builder, meta: Any, x: Operand, y: Operand) -> Value:
    if isinstance(y, int | float) and not isinstance(y, bool):
        f = _fixed_power(y, is_float(b.dtype(meta)))
        if f is not None:
            return pointwise(b, meta, f, x, steps=1 if y in (0.5, -0.5, -1, 1, 2) else 2)
    if isinstance(x, int | float) and x == 2 and is_float(b.dtype(meta)):
        return pointwise(b, meta, lambda q: q.do(MapOp.exp2), y, steps=1)
    return pointwise(b, meta, lambda p, q: p.do(MapOp.pow, q), x, y, steps=1)


def _fixed_power(n: float, floats: bool) -> Formula | None:
    """x to a power that a few multiplications give, as torch does it."""
    if floats and n in (0.5, -0.5, -1, -2):
        return {0.5: lambda x: x.do(MapOp.sqrt), -0.5: lambda x: x.do(MapOp.rsqrt), -1: lambda x: x.do(MapOp.recip),
                -2: lambda x: (x * x).do(MapOp.recip)}[n]  # fmt: skip
    if n == 0:
        return lambda x: x.expr.const(1, x.dtype)
    if n != int(n) or not 1 <= n <= (4 if floats else 64):
        return None
    return lambda x: _power(x, int(n))


def _power(x: Reg, n: int) -> Reg:
    """x to the n-th by squaring."""
    half = x if n < 4 else _power(x, n // 2)
    if n < 4:
        return (x, x * x, x * x * x)[n - 1]
    return half * half * x if n % 2 else half * half


def _float_power(b: Builder, meta: Any, x: Operand, y: Operand) -> Value:
    return b.map(lambda p, q: p.do(MapOp.pow, q), [x, y], b.dtype(meta), DType.f64, b.shape(meta))


def _extreme(op: MapOp, on_bool: MapOp) -> Function:
    def run(b: Builder, meta: Any, x: Operand, y: Operand) -> Value:
        dtype = result_type(x, y)
        return b.map(lambda p, q: p.do(on_bool if dtype == DType.bool else op, q), [x, y], b.dtype(meta), dtype,
                     b.shape(meta))  # fmt: skip

    return run


def _clamp(b: Builder, meta: Any, x: Value, min: Operand | None = None, max: Operand | None = None) -> Value:
    def run(r: Reg, *limits: Reg) -> Reg:
        rest = iter(limits)
        if min is not None:
            r = r.do(MapOp.max, next(rest))
        return r if max is None else r.do(MapOp.min, next(rest))

    dtype = b.dtype(meta)
    return b.map(run, [v for v in (x, min, max) if v is not None], dtype, dtype, b.shape(meta))


def _clamp_max(b: Builder, meta: Any, x: Value, max: Operand) -> Value:
    return _clamp(b, meta, x, None, max)


def _addcmul(b: Builder, meta: Any, x: Value, p: Value, q: Value, value: Operand = 1) -> Value:
    if value == 1:
        return pointwise(b, meta, lambda x, p, q: x + p * q, x, p, q)
    return pointwise(b, meta, lambda x, p, q, v: x + v * p * q, x, p, q, value)


def _addcdiv(b: Builder, meta: Any, x: Value, p: Value, q: Value, value: Operand = 1) -> Value:
    if value == 1:
        return pointwise(b, meta, lambda x, p, q: x + p / q, x, p, q)
    return pointwise(b, meta, lambda x, p, q, v: x + v * p / q, x, p, q, value)


def _lerp(x: Reg, y: Reg, w: Reg) -> Reg:
    d = y - x
    return (w.do(MapOp.abs) < 0.5).select(x + w * d, y - d * (1 - w))


def _round(b: Builder, meta: Any, x: Value, decimals: int = 0) -> Value:
    if not is_float(x.dtype):
        return x
    if decimals == 0:
        return b.map1(MapOp.round, x)
    ten = 10.0 ** abs(decimals)
    if decimals > 0:
        return pointwise(b, meta, lambda r: (r * ten).do(MapOp.round) / ten, x)
    return pointwise(b, meta, lambda r: (r / ten).do(MapOp.round) * ten, x)


def _abs(b: Builder, meta: Any, x: Value) -> Value:
    return x if x.dtype in (DType.bool, DType.u8) else b.map1(MapOp.abs, x)


def _sign(b: Builder, meta: Any, x: Value) -> Value:
    return x if x.dtype == DType.bool else b.map1(MapOp.sign, x)


def _signbit(b: Builder, meta: Any, x: Value) -> Value:
    if not is_float(x.dtype):
        return b.map(lambda r: r < 0, [x], DType.bool)
    return b.map(lambda r: r.expr.const(1.0, r.dtype).do(MapOp.copysign, r) < 0, [x], DType.bool)


def _nan_to_num(b: Builder, meta: Any, x: Value, nan: float | None = None, posinf: float | None = None,
                neginf: float | None = None) -> Value:  # fmt: skip
    if not is_float(x.dtype):
        return x
    import torch

    from trivet.ir.interop import torch_dtype

    info = torch.finfo(torch_dtype(x.dtype))
    high = info.max if posinf is None else posinf
    low = info.min if neginf is None else neginf

    def run(r: Reg) -> Reg:
        y = r.do(MapOp.is_nan).select(0.0 if nan is None else nan, r)
        y = r.equal(math.inf).select(high, y)
        return r.equal(-math.inf).select(low, y)

    return b.map(run, [x], x.dtype)


def _logaddexp(x: Reg, y: Reg) -> Reg:
    far = x.do(MapOp.is_inf) & x.equal(y)
    return far.select(x, x.do(MapOp.max, y) + (-(x - y).do(MapOp.abs)).do(MapOp.exp).do(MapOp.log1p))


def _logaddexp2(x: Reg, y: Reg) -> Reg:
    far = x.do(MapOp.is_inf) & x.equal(y)
    small = (-(x - y).do(MapOp.abs)).do(MapOp.exp2).do(MapOp.log1p)
    return far.select(x, x.do(MapOp.max, y) + small * (1 / math.log(2)))


def _x_times(log: MapOp) -> Formula:
    """x * log(y), 0 where x is 0 unless y is NaN."""

    def run(x: Reg, y: Reg) -> Reg:
        z = x.equal(0).select(0, x * y.do(log))
        return y.do(MapOp.is_nan).select(y, z)

    return run


def _sinc(x: Reg) -> Reg:
    y = x * math.pi
    return x.equal(0).select(1, y.do(MapOp.sin) / y)


def _entr(x: Reg) -> Reg:
    y = x.equal(0).select(0, (x > 0).select(-x * x.do(MapOp.log), -math.inf))
    return x.do(MapOp.is_nan).select(x, y)


def _logit(b: Builder, meta: Any, x: Value, eps: float | None = None) -> Value:
    def run(r: Reg) -> Reg:
        if eps is not None:
            r = r.do(MapOp.max, eps).do(MapOp.min, 1 - eps)
        return (r / (1 - r)).do(MapOp.log)

    return pointwise(b, meta, run, x)


def _finite(x: Reg) -> Reg:
    return (x.do(MapOp.is_nan) | x.do(MapOp.is_inf)).logical_not()


def _heaviside(x: Reg, at_zero: Reg) -> Reg:
    return x.equal(0).select(at_zero, (x > 0).cast(x.dtype))


# ---- bits and choice ----------------------------------------------------------------------------------------------------
def _bitwise_not(b: Builder, meta: Any, x: Value) -> Value:
    if x.dtype == DType.bool:
        return b.map(lambda r: r.logical_not(), [x], DType.bool)
    return b.map1(MapOp.not_, x)


def _logical_not(b: Builder, meta: Any, x: Value) -> Value:
    return b.map(lambda r: r.logical_not(), [x], DType.bool)


def _where(b: Builder, meta: Any, cond: Value, x: Operand, y: Operand) -> Value:
    return b.where(cond, x, y, b.dtype(meta), b.shape(meta))


def _masked_fill(b: Builder, meta: Any, x: Value, mask: Value, value: Operand) -> Value:
    return b.where(mask, value, x, x.dtype, b.shape(meta))


# ---- conversion ---------------------------------------------------------------------------------------------------------
def _to(b: Builder, meta: Any, x: Value, *args: Any, dtype: Any = None) -> Value:
    return b.cast(x, b.dtype(meta))


def _same(b: Builder, meta: Any, x: Value, *args: Any) -> Value:
    return x


def _copy(b: Builder, meta: Any, x: Value, source: Value, *args: Any) -> Value:
    return b.expand(b.cast(source, b.dtype(meta)), b.shape(meta))


def _fill(b: Builder, meta: Any, x: Value, value: Operand) -> Value:
    return b.full(b.shape(meta), value, b.dtype(meta))


def _dropout(b: Builder, meta: Any, x: Value, p: float, train: bool | None = None) -> Value:
    _refuse_dropout(b, p, train)
    return x


def _native_dropout(b: Builder, meta: Any, x: Value, p: float, train: bool | None) -> tuple[Value, Value]:
    _refuse_dropout(b, p, train)
    return x, b.full(x.shape, True, DType.bool)


def _refuse_dropout(b: Builder, p: float, train: bool | None) -> None:
    if train and p > 0:
        raise b.error("dropout in training mode draws random numbers", "call .eval() on the model before the export")


def _threshold(b: Builder, meta: Any, x: Value, threshold: float, value: float) -> Value:
    return b.map(lambda r: (r <= threshold).select(value, r), [x], x.dtype)


_UNARY = {
    "exp": MapOp.exp, "expm1": MapOp.expm1, "exp2": MapOp.exp2, "log": MapOp.log, "log2": MapOp.log2,
    "log10": MapOp.log10, "log1p": MapOp.log1p, "sqrt": MapOp.sqrt, "rsqrt": MapOp.rsqrt, "reciprocal": MapOp.recip,
    "sin": MapOp.sin, "cos": MapOp.cos, "tan": MapOp.tan, "asin": MapOp.asin, "acos": MapOp.acos, "atan": MapOp.atan,
    "sinh": MapOp.sinh, "cosh": MapOp.cosh, "tanh": MapOp.tanh, "asinh": MapOp.asinh, "acosh": MapOp.acosh,
    "atanh": MapOp.atanh, "erf": MapOp.erf, "erfc": MapOp.erfc, "erfinv": MapOp.erfinv, "lgamma": MapOp.lgamma,
    "digamma": MapOp.digamma, "sigmoid": MapOp.sigmoid, "neg": MapOp.neg, "_neg_view": MapOp.neg, "special_expm1": MapOp.expm1,
    "special_exp2": MapOp.exp2, "special_log1p": MapOp.log1p, "special_erf": MapOp.erf, "special_erfc": MapOp.erfc,
    "special_erfinv": MapOp.erfinv, "special_gammaln": MapOp.lgamma, "special_digamma": MapOp.digamma,
    "special_psi": MapOp.digamma, "special_expit": MapOp.sigmoid}  # fmt: skip

_COMPARISONS = {"eq": MapOp.eq, "ne": MapOp.ne, "lt": MapOp.lt, "le": MapOp.le, "gt": MapOp.gt, "ge": MapOp.ge,
                "less": MapOp.lt, "less_equal": MapOp.le, "greater": MapOp.gt, "greater_equal": MapOp.ge,
                "not_equal": MapOp.ne}  # fmt: skip

HANDLERS: dict[str, Handler] = table({
    **{name: _instr(op) for name, op in _UNARY.items()},
    **{f"{name}.Tensor {name}.Scalar": _compare(op) for name, op in _COMPARISONS.items()},
    **{name: _keeps_integers(getattr(MapOp, name)) for name in ("floor", "ceil", "trunc")},
    **{f"bitwise_{n}.Tensor bitwise_{n}.Scalar bitwise_{n}.Scalar_Tensor __{n}__.Tensor __{n}__.Scalar":
       _instr(getattr(MapOp, f"{n}_")) for n in ("and", "or", "xor")},
    **{f"logical_{n}": _logical(getattr(MapOp, f"{n}_")) for n in ("and", "or", "xor")},
    "bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar bitwise_left_shift.Scalar_Tensor __lshift__.Tensor "
    "__lshift__.Scalar": _instr(MapOp.shl),
    "bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar bitwise_right_shift.Scalar_Tensor __rshift__.Tensor "
    "__rshift__.Scalar": _instr(MapOp.shr),
    "bitwise_not": _bitwise_not,
    "logical_not": _logical_not,
    "add.Tensor add.Scalar": _add,
    "sub.Tensor sub.Scalar subtract.Tensor subtract.Scalar": _sub,
    "rsub.Tensor rsub.Scalar": _rsub,
    "mul.Tensor mul.Scalar multiply.Tensor multiply.Scalar": _formula(lambda x, y: x * y, steps=1),
    "div.Tensor div.Scalar div.Tensor_mode div.Scalar_mode true_divide.Tensor true_divide.Scalar divide.Tensor "
    "divide.Scalar divide.Tensor_mode divide.Scalar_mode": _div,
    "floor_divide floor_divide.Scalar": _floor_divide,
    "remainder.Tensor remainder.Scalar remainder.Scalar_Tensor": _instr(MapOp.mod),
    "fmod.Tensor fmod.Scalar": _instr(MapOp.fmod),
    "pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar": _pow,
    "float_power.Tensor_Scalar float_power.Tensor_Tensor float_power.Scalar": _float_power,
    "square": _formula(lambda x: x * x, steps=1),
    "atan2 arctan2": _instr(MapOp.atan2),
    "hypot": _instr(MapOp.hypot),
    "copysign.Tensor copysign.Scalar": _instr(MapOp.copysign),
    "maximum max.other": _extreme(MapOp.max, MapOp.or_),
    "minimum min.other": _extreme(MapOp.min, MapOp.and_),
    "fmax": _extreme(MapOp.fmax, MapOp.or_),
    "fmin": _extreme(MapOp.fmin, MapOp.and_),
    "clamp clamp.Tensor clip clip.Tensor clamp_min clamp_min.Tensor": _clamp,
    "clamp_max clamp_max.Tensor": _clamp_max,
    "addcmul": _addcmul,
    "addcdiv": _addcdiv,
    "lerp.Scalar lerp.Tensor": _formula(_lerp),
    "abs absolute": _abs,
    "sign sgn": _sign,
    "signbit": _signbit,
    "round round.decimals special_round": _round,
    "frac": _formula(lambda x: x - x.do(MapOp.trunc)),
    "fix": _keeps_integers(MapOp.trunc),
    "deg2rad": _formula(lambda x: x * (math.pi / 180)),
    "rad2deg": _formula(lambda x: x * (180 / math.pi)),
    "logaddexp": _formula(_logaddexp),
    "logaddexp2": _formula(_logaddexp2),
    "xlogy.Tensor xlogy.Scalar_Other xlogy.Scalar_Self special_xlogy special_xlogy.other_scalar "
    "special_xlogy.self_scalar": _formula(_x_times(MapOp.log)),
    "special_xlog1py special_xlog1py.other_scalar special_xlog1py.self_scalar": _formula(_x_times(MapOp.log1p)),
    "sinc special_sinc": _formula(_sinc),
    "special_entr": _formula(_entr),
    "logit special_logit": _logit,
    "heaviside": _formula(_heaviside),
    "ldexp.Tensor": _formula(lambda x, n: x * n.do(MapOp.exp2)),
    "angle": _formula(lambda x: x.do(MapOp.is_nan).select(x, (x < 0).select(x.expr.const(math.pi, x.dtype), 0))),
    "nan_to_num": _nan_to_num,
    "isnan": _test(lambda x: x.do(MapOp.is_nan), False),
    "isinf": _test(lambda x: x.do(MapOp.is_inf), False),
    "isfinite": _test(_finite, True),
    "isposinf": _test(lambda x: x.equal(math.inf), False),
    "isneginf": _test(lambda x: x.equal(-math.inf), False),
    "where.self where.Scalar where.ScalarOther where.ScalarSelf": _where,
    "masked_fill.Scalar masked_fill.Tensor": _masked_fill,
    "to.dtype to.dtype_layout to.device to.other _to_copy type_as": _to,
    "clone contiguous alias detach lift lift_fresh lift_fresh_copy positive conj resolve_conj resolve_neg conj_physical "
    "real _conj data": _same,
    "copy": _copy,
    "fill.Scalar fill.Tensor": _fill,
    "dropout feature_dropout alpha_dropout feature_alpha_dropout": _dropout,
    "native_dropout": _native_dropout,
    "threshold": _threshold,
})  # fmt: skip

__all__ = ["HANDLERS", "wide"]
