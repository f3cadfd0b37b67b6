"""What a map expression means, in torch. Slow and plain on purpose: the truth that kernels and passes are tested against.

Every instruction is computed on whole tensors in its own dtype: f16 and bf16 in f32 and rounded, bool as the integers 0
and 1, integers wrapped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from trivet.fbs.structs import DType, MapOp
from trivet.ir import dim
from trivet.ir.interop import torch_dtype
from trivet.ir.ops import Instr
from trivet.ir.types import is_float

if TYPE_CHECKING:
    from torch import Tensor

COMPARES = frozenset({MapOp.eq, MapOp.ne, MapOp.lt, MapOp.le, MapOp.gt, MapOp.ge})
TESTS = frozenset({MapOp.is_nan, MapOp.is_inf, MapOp.logical_not})
LEAVES = frozenset({MapOp.load, MapOp.const_, MapOp.dim, MapOp.iota})
BINARY = frozenset(MapOp(i) for i in range(MapOp.add, MapOp.shr + 1)) | {MapOp.copysign, MapOp.hypot}
_BITS = frozenset({MapOp.and_, MapOp.or_, MapOp.xor_, MapOp.shl, MapOp.shr, MapOp.not_})


def arity(op: MapOp) -> int:
    """How many registers an instruction reads."""
    if op in LEAVES:
        return 0
    if op == MapOp.select:
        return 3
    return 2 if op in BINARY else 1


def run_map(code: Sequence[Instr], inputs: Sequence[Tensor], shape: tuple[int, ...], dims: Mapping[str, int]) -> Tensor:
    """The value of the expression, broadcast to shape."""
    import torch

    regs: list[Tensor] = []
    for i in code:
        if i.op == MapOp.load:
            r = inputs[i.value]
        elif i.op == MapOp.const_:
            r = _constant(i.value, i.dtype)
        elif i.op == MapOp.dim:
            r = _constant(dim.evaluate(i.value, dims), i.dtype)
        elif i.op == MapOp.iota:
            r = torch.arange(shape[i.value]).reshape([-1] + [1] * (len(shape) - i.value - 1)).to(torch_dtype(i.dtype))
        else:
            r = run_instr(i.op, i.dtype, [regs[a] for a in i.args])
        regs.append(r)
    return regs[-1].expand(shape).contiguous()


def _constant(value: float | int | bool, dtype: DType) -> Tensor:
    import torch

    if is_float(dtype):
        return torch.tensor(float(value), dtype=torch.float64).to(torch_dtype(dtype))
    if dtype == DType.bool:
        return torch.tensor(bool(value))
    wrapped = (int(value) + (1 << 63)) % (1 << 64) - (1 << 63)
    return torch.tensor(wrapped, dtype=torch.int64).to(torch_dtype(dtype))


def run_instr(op: MapOp, dtype: DType, args: Sequence[Tensor]) -> Tensor:
    """One instruction that reads registers."""
    import torch

    out = torch_dtype(dtype)
    if op == MapOp.cast:
        return args[0] != 0 if dtype == DType.bool else args[0].to(out)
    if op == MapOp.select:
        return torch.where(args[0] != 0, args[1], args[2])
    wide = [_widen(a, keep_bool=op in _BITS or op in COMPARES) for a in args]
    if op in COMPARES or op in TESTS:
        return _FUNCTIONS[op](*wide)
    if not wide[0].is_floating_point() and op in _INTEGER:
        y = _INTEGER[op](*wide)
    else:
        y = _FUNCTIONS[op](*wide)
    return y != 0 if dtype == DType.bool else y.to(out)


def _widen(x: Tensor, keep_bool: bool) -> Tensor:
    import torch

    if x.dtype in (torch.float16, torch.bfloat16):
        return x.float()
    return x.to(torch.int64) if x.dtype == torch.bool and not keep_bool else x


# ---- integers: no trap, division by zero gives 0, the most negative number divided by -1 wraps
def _divide(rounding: str) -> Callable[[Tensor, Tensor], Tensor]:
    def f(a: Tensor, b: Tensor) -> Tensor:
        import torch

        safe = torch.where((b == 0) | _minus_one(b), torch.ones_like(b), b)
        q = torch.div(a, safe, rounding_mode=rounding)
        q = torch.where(_minus_one(b), -a, q)
        return torch.where(b == 0, torch.zeros_like(q), q)

    return f


def _rest(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    def f(a: Tensor, b: Tensor) -> Tensor:
        import torch

        bad = (b == 0) | _minus_one(b)
        r = getattr(torch, name)(a, torch.where(bad, torch.ones_like(b), b))
        return torch.where(bad, torch.zeros_like(r), r)

    return f


def _minus_one(b: Tensor) -> Tensor:
    import torch

    return torch.zeros_like(b, dtype=torch.bool) if b.dtype == torch.uint8 else b == -1


def _shift_left(a: Tensor, b: Tensor) -> Tensor:
    return a << b


def _shift_right(a: Tensor, b: Tensor) -> Tensor:
    return a >> b


def _same(a: Tensor) -> Tensor:
    return a


def _bit_not(a: Tensor) -> Tensor:
    return ~a


def _torch(name: str) -> Callable[..., Tensor]:
    def f(*args: Tensor) -> Tensor:
        import torch

        y: Tensor = getattr(torch, name)(*args)
        return y

    return f


def _functional(name: str, approximate: str = "") -> Callable[[Tensor], Tensor]:
    def f(x: Tensor) -> Tensor:
        from torch.nn import functional

        fn = getattr(functional, name)
        y: Tensor = fn(x, approximate=approximate) if approximate else fn(x)
        return y

    return f


def _rounded(mode: str) -> Callable[[Tensor, Tensor], Tensor]:
    def f(a: Tensor, b: Tensor) -> Tensor:
        import torch

        return torch.div(a, b, rounding_mode=mode)

    return f


def _elu(x: Tensor) -> Tensor:
    import torch

    return torch.where(x > 0, x, torch.expm1(x))


_INTEGER: dict[MapOp, Callable[..., Tensor]] = {
    MapOp.floor_div: _divide("floor"), MapOp.trunc_div: _divide("trunc"), MapOp.mod: _rest("remainder"),
    MapOp.fmod: _rest("fmod"), MapOp.floor: _same, MapOp.ceil: _same, MapOp.round: _same, MapOp.trunc: _same,
    MapOp.fmin: _torch("minimum"), MapOp.fmax: _torch("maximum"),
}  # fmt: skip

_FUNCTIONS: dict[MapOp, Callable[..., Tensor]] = {
    MapOp.floor_div: _rounded("floor"), MapOp.trunc_div: _rounded("trunc"), MapOp.mod: _torch("remainder"),
    MapOp.min: _torch("minimum"), MapOp.max: _torch("maximum"), MapOp.is_nan: _torch("isnan"),
    MapOp.is_inf: _torch("isinf"), MapOp.and_: _torch("bitwise_and"), MapOp.or_: _torch("bitwise_or"),
    MapOp.xor_: _torch("bitwise_xor"), MapOp.shl: _shift_left, MapOp.shr: _shift_right, MapOp.not_: _bit_not,
    MapOp.recip: _torch("reciprocal"), MapOp.gelu: _functional("gelu", "none"),
    MapOp.gelu_tanh: _functional("gelu", "tanh"), MapOp.silu: _functional("silu"),
    MapOp.hard_swish: _functional("hardswish"), MapOp.hard_sigmoid: _functional("hardsigmoid"),
    MapOp.softplus: _functional("softplus"), MapOp.mish: _functional("mish"), MapOp.elu: _elu,
    **{op: _torch(op.name) for op in MapOp if op.name in (
        "add", "sub", "mul", "div", "fmod", "pow", "atan2", "fmin", "fmax", "eq", "ne", "lt", "le", "gt", "ge", "neg", "abs",
        "sign", "floor", "ceil", "round", "trunc", "exp", "expm1", "exp2", "log", "log2", "log10", "log1p", "sqrt", "rsqrt",
        "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc",
        "sigmoid", "relu", "lgamma", "copysign", "logical_not", "erfinv", "digamma", "hypot")},
}  # fmt: skip
