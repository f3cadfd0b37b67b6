"""Map expressions as values: simplification that is exact for every input, and joining of two expressions.

Exact means: the same result for all inputs, with NaN, infinities and signed zeros (the payload of a NaN aside).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trivet.fbs.structs import DType, MapOp
from trivet.ir.dim import Dim
from trivet.ir.graph import Value
from trivet.ir.ops import Instr
from trivet.ir.reference_map import LEAVES
from trivet.ir.types import SIZES, is_float

Code = tuple[Instr, ...]
COMMUTES = frozenset({MapOp.add, MapOp.mul, MapOp.min, MapOp.max, MapOp.fmin, MapOp.fmax, MapOp.eq, MapOp.ne, MapOp.and_,
                      MapOp.or_, MapOp.xor_, MapOp.hypot})  # fmt: skip
IDEMPOTENT = frozenset({MapOp.abs, MapOp.relu, MapOp.floor, MapOp.ceil, MapOp.round, MapOp.trunc, MapOp.sign})
CHEAP = LEAVES | COMMUTES - {MapOp.hypot} | frozenset({
    MapOp.cast, MapOp.sub, MapOp.lt, MapOp.le, MapOp.gt, MapOp.ge, MapOp.shl, MapOp.shr, MapOp.not_, MapOp.neg, MapOp.abs,
    MapOp.sign, MapOp.floor, MapOp.ceil, MapOp.round, MapOp.trunc, MapOp.relu, MapOp.select, MapOp.is_nan, MapOp.is_inf,
    MapOp.copysign, MapOp.logical_not})  # fmt: skip
UNIFORM = 4  # instructions of an expression without inputs that is made again rather than read
_MANTISSA = {DType.f16: 11, DType.bf16: 8, DType.f32: 24, DType.f64: 53}
_EXPONENT = {DType.f16: 5, DType.bf16: 8, DType.f32: 8, DType.f64: 11}


def cost(code: Code) -> float:
    """Work per element: 1 for a cheap instruction, 8 for a division or function; leaves are free."""
    return sum(0 if i.op in LEAVES else 1 if i.op in CHEAP else 8 for i in code)


def live_registers(code: Code) -> int:
    """Most registers that hold a needed value at one time when run in order."""
    last = list(range(len(code)))
    for k, i in enumerate(code):
        for a in i.args:
            last[a] = k
    last[-1] = len(code)
    most = 0
    for k in range(len(code)):
        most = max(most, sum(1 for j in range(k + 1) if last[j] >= k))
    return most


def widens(a: DType, b: DType) -> bool:
    """True when every value of a is a value of b."""
    if a == b or a == DType.bool:
        return True
    if is_float(a):
        return is_float(b) and _MANTISSA[b] >= _MANTISSA[a] and _EXPONENT[b] >= _EXPONENT[a]
    bits = 8 * SIZES[a] - (a != DType.u8)
    if is_float(b):
        return bits <= _MANTISSA[b] and not (b == DType.f16 and bits > 11)
    if b in (DType.bool, DType.u8):
        return False
    return SIZES[b] > SIZES[a] or (SIZES[b] == SIZES[a] and a != DType.u8)


class Simplifier:
    """Rebuilds an expression instruction by instruction; each is made once and in its simplest form."""

    def __init__(self) -> None:
        self.code: list[Instr] = []
        self.made: dict[object, int] = {}

    def add(self, op: MapOp, dtype: DType, args: tuple[int, ...] = (), value: Any = None) -> int:
        """The register that holds the instruction's result."""
        if op in COMMUTES:
            args = tuple(sorted(args))
        found = self._simple(op, dtype, args)
        if found is not None:
            return found
        key = (op, dtype, args, repr(value))  # repr: -0.0 is not 0.0, NaN is NaN
        if key not in self.made:
            self.made[key] = len(self.code)
            self.code.append(Instr(op, dtype, args, value))
        return self.made[key]

    def const(self, x: Any, dtype: DType) -> int:
        """A number as dtype holds it."""
        return self.add(MapOp.const_, dtype, (), float(x) if is_float(dtype) else int(x))

    def number(self, r: int) -> Any:
        """The number in a register, None when it is not constant."""
        i = self.code[r]
        return i.value if i.op == MapOp.const_ else None

    def _simple(self, op: MapOp, dtype: DType, args: tuple[int, ...]) -> int | None:
        if op in LEAVES:
            return None
        if all(self.number(a) is not None for a in args):
            return self._fold(op, dtype, args)
        a = args[0]
        first = self.code[a]
        if op == MapOp.cast:
            if first.dtype == dtype:
                return a
            if first.op == MapOp.cast and dtype != DType.bool and widens(self.code[first.args[0]].dtype, first.dtype):
                return self.add(MapOp.cast, dtype, first.args)
            return None
        if op == MapOp.select:
            c = self.number(a)
            if c is not None:
                return args[1] if c else args[2]
            return args[1] if args[1] == args[2] else None
        if op == first.op and op in IDEMPOTENT:
            return a
        if op in (MapOp.floor, MapOp.ceil, MapOp.round, MapOp.trunc) and not is_float(dtype):
            return a
        if op == MapOp.neg and first.op == MapOp.neg:
            return first.args[0]
        if op == MapOp.not_ and first.op == MapOp.not_:
            return first.args[0]
        if op == MapOp.logical_not and first.op == MapOp.logical_not and self.code[first.args[0]].dtype == DType.bool:
            return first.args[0]
        if len(args) == 2:
            return self._binary(op, dtype, a, args[1])
        return None

    def _binary(self, op: MapOp, dtype: DType, a: int, b: int) -> int | None:
        x, y = self.number(a), self.number(b)
        if op in COMMUTES and y is None:
            a, b, x, y = b, a, y, x
        if a == b and op in (MapOp.min, MapOp.max, MapOp.fmin, MapOp.fmax, MapOp.and_, MapOp.or_):
            return a
        if y is None:
            return None
        zero, one = y == 0, y == 1
        if op == MapOp.mul:
            if one and dtype != DType.bool:
                return a
            if y == -1 and is_float(dtype):
                return self.add(MapOp.neg, dtype, (a,))
            if zero and not is_float(dtype):
                return b
        elif (op == MapOp.add and zero and (not is_float(dtype) or math.copysign(1, y) < 0)) or (
            op == MapOp.sub and zero and dtype != DType.bool and (not is_float(dtype) or math.copysign(1, y) > 0)
        ):
            return a
        elif op == MapOp.div and is_float(dtype):
            if one:
                return a
            if _power_of_two(y) and _holds(1 / y, dtype):
                return self.add(MapOp.mul, dtype, (a, self.const(1 / y, dtype)))
        elif op in (MapOp.floor_div, MapOp.trunc_div) and one and not is_float(dtype):
            return a
        elif op == MapOp.pow:
            if one:
                return a
            if y == 2:
                return self.add(MapOp.mul, dtype, (a, a))
            if y == 3 and dtype in (DType.f32, DType.f64):
                return self.add(MapOp.mul, dtype, (self.add(MapOp.mul, dtype, (a, a)), a))
            if y == -1 and is_float(dtype):
                return self.add(MapOp.recip, dtype, (a,))
        elif dtype == DType.bool and op == MapOp.and_:
            return a if y else b
        elif dtype == DType.bool and op == MapOp.or_:
            return b if y else a
        elif op in (MapOp.shl, MapOp.shr) and zero:
            return a
        return None

    def _fold(self, op: MapOp, dtype: DType, args: tuple[int, ...]) -> int | None:
        import torch

        from trivet.ir.interop import torch_dtype
        from trivet.ir.reference_map import _constant, run_instr

        if op == MapOp.cast and dtype not in _MANTISSA and not math.isfinite(self.number(args[0])):
            return None  # any value may come out: leave it to the machine
        tensors = [_constant(self.number(a), self.code[a].dtype) for a in args]
        y = run_instr(op, dtype, tensors)
        assert y.dtype == torch_dtype(dtype) and isinstance(y, torch.Tensor)
        return self.const(y.item(), dtype)


def _power_of_two(x: float) -> bool:
    return math.isfinite(x) and x != 0 and abs(math.frexp(x)[0]) == 0.5


def _holds(x: float, dtype: DType) -> bool:
    """True when x, a power of two, is a normal number of dtype."""
    limit = 2 ** (_EXPONENT[dtype] - 1) - 2
    return math.isfinite(x) and x != 0 and abs(math.frexp(x)[1] - 1) <= limit


def simplify(code: Code, inputs: Sequence[Value]) -> tuple[Code, list[Value]]:
    """The expression in its simplest form and the inputs that it still loads. A constant of one element becomes a number."""
    s = Simplifier()
    regs: list[int] = []
    values: list[Value] = []
    for i in code:
        if i.op == MapOp.load:
            regs.append(load(s, values, inputs[i.value]))
        elif i.op == MapOp.const_ or (i.op == MapOp.dim and not isinstance(i.value, Dim)):
            regs.append(s.const(i.value, i.dtype))
        else:
            regs.append(s.add(i.op, i.dtype, tuple(regs[a] for a in i.args), i.value))
    return finish(s.code, regs[-1], values)


def load(s: Simplifier, values: list[Value], v: Value) -> int:
    """The register of a loaded value; values collects what is loaded. A value that is the same number everywhere is made
    in place.
    """
    if v.const is not None and v.const.data is not None and v.const.data.numel() == 1:
        return s.const(v.const.data.item(), v.dtype)
    if v.node is not None and v.node.op == "map" and not v.node.inputs:
        made: Code = v.node.attrs.code
        if len(made) <= UNIFORM and all(i.op != MapOp.iota for i in made):
            regs: list[int] = []
            for i in made:
                regs.append(s.add(i.op, i.dtype, tuple(regs[a] for a in i.args), i.value))
            return regs[-1]
    if v not in values:
        values.append(v)
    return s.add(MapOp.load, v.dtype, (), values.index(v))


def finish(code: Sequence[Instr], result: int, values: Sequence[Value]) -> tuple[Code, list[Value]]:
    """What result needs of code, in order, result last, and the values that it loads."""
    needed = {result}
    for k in range(result, -1, -1):
        if k in needed:
            needed.update(code[k].args)
    place: dict[int, int] = {}
    out: list[Instr] = []
    used: list[Value] = []
    for k in sorted(needed):
        i = code[k]
        value = i.value
        if i.op == MapOp.load:
            v = values[value]
            if v not in used:
                used.append(v)
            value = used.index(v)
        place[k] = len(out)
        out.append(Instr(i.op, i.dtype, tuple(place[a] for a in i.args), value))
    return tuple(out), used
