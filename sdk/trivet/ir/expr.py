"""Building map expressions: registers with Python operators that collect the instructions of one map node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trivet.fbs.structs import DType, MapOp
from trivet.ir.dim import Dim
from trivet.ir.graph import Value
from trivet.ir.ops import Instr
from trivet.ir.types import is_float

Number = bool | int | float
_COMPARE = (MapOp.eq, MapOp.ne, MapOp.lt, MapOp.le, MapOp.gt, MapOp.ge, MapOp.is_nan, MapOp.is_inf, MapOp.logical_not)


class Expr:
    """The instructions of one map, each made once, with the values that they load."""

    __slots__ = ("code", "inputs", "made")

    def __init__(self) -> None:
        self.code: list[Instr] = []
        self.inputs: list[Value] = []
        self.made: dict[object, int] = {}

    def _add(self, instr: Instr) -> Reg:
        key = (instr.op, instr.dtype, instr.args, repr(instr.value))  # repr: -0.0 is not 0.0, NaN is NaN
        if key not in self.made:
            self.made[key] = len(self.code)
            self.code.append(instr)
        return Reg(self, self.made[key], instr.dtype)

    def load(self, value: Value) -> Reg:
        """An input. A 0-d constant becomes a number in the code."""
        if value.const is not None and not value.shape:
            return self.const(value.const.data.item(), value.dtype)
        if value not in self.inputs:
            self.inputs.append(value)
        return self._add(Instr(MapOp.load, value.dtype, (), self.inputs.index(value)))

    def const(self, x: Number, dtype: DType) -> Reg:
        """A number, converted to dtype as C converts it."""
        if is_float(dtype):
            return self._add(Instr(MapOp.const_, dtype, (), _round_to(float(x), dtype)))
        if dtype == DType.bool:
            return self._add(Instr(MapOp.const_, dtype, (), int(x != 0)))
        return self._add(Instr(MapOp.const_, dtype, (), _wrap(int(x), dtype)))

    def dim(self, x: int | Dim, dtype: DType = DType.i64) -> Reg:
        """A size as a number."""
        if isinstance(x, int):
            return self.const(x, dtype)
        return self._add(Instr(MapOp.dim, DType.i64, (), x)).cast(dtype)

    def iota(self, axis: int, dtype: DType = DType.i64) -> Reg:
        """The position along an axis of the output."""
        return self._add(Instr(MapOp.iota, DType.i64, (), axis)).cast(dtype)

    def take(self, x: Value | Number | Dim, dtype: DType) -> Reg:
        """A value, number or size, converted to dtype."""
        if isinstance(x, Value):
            return self.load(x).cast(dtype)
        return self.dim(x, dtype) if isinstance(x, Dim) else self.const(x, dtype)

    def finish(self, result: Reg) -> tuple[tuple[Instr, ...], list[Value]]:
        """The instructions that result needs, result last, and the values that they load."""
        used: set[int] = set()
        todo = [result.index]
        while todo:
            i = todo.pop()
            if i not in used:
                used.add(i)
                todo += self.code[i].args
        place = {old: new for new, old in enumerate(sorted(used))}
        code: list[Instr] = []
        inputs: list[Value] = []
        for i in sorted(used):
            instr = self.code[i]
            value = instr.value
            if instr.op == MapOp.load:
                source = self.inputs[value]
                if source not in inputs:
                    inputs.append(source)
                value = inputs.index(source)
            code.append(Instr(instr.op, instr.dtype, tuple(place[a] for a in instr.args), value))
        return tuple(code), inputs


def _round_to(x: float, dtype: DType) -> float:
    """x rounded to a float dtype (through torch; float64 keeps it)."""
    if dtype == DType.f64:
        return x
    import torch

    from trivet.ir.interop import torch_dtype

    return float(torch.tensor(x, dtype=torch.float64).to(torch_dtype(dtype)).item())


_BITS = {DType.u8: 8, DType.i8: 8, DType.i16: 16, DType.i32: 32, DType.i64: 64}


def _wrap(x: int, dtype: DType) -> int:
    bits = _BITS[dtype]
    x &= (1 << bits) - 1
    return x - (1 << bits) if dtype != DType.u8 and x >> (bits - 1) else x


@dataclass(frozen=True, slots=True, eq=False)
class Reg:
    """The result of one instruction. Numbers in arithmetic take the register's dtype."""

    expr: Expr
    index: int
    dtype: DType

    def _of(self, x: Reg | Number | Dim) -> Reg:
        if isinstance(x, Reg):
            return x
        return self.expr.dim(x, self.dtype) if isinstance(x, Dim) else self.expr.const(x, self.dtype)

    def do(self, op: MapOp, *others: Reg | Number | Dim) -> Reg:
        """op of this and others; comparisons give bool, everything else this dtype."""
        regs = [self, *(self._of(o) for o in others)]
        dtype = DType.bool if op in _COMPARE else self.dtype
        return self.expr._add(Instr(op, dtype, tuple(r.index for r in regs)))

    def cast(self, dtype: DType) -> Reg:
        """This in another dtype."""
        if dtype == self.dtype:
            return self
        made = self.expr.code[self.index]
        if made.op == MapOp.const_ and made.value == made.value and abs(made.value) < 2**63:
            return self.expr.const(made.value, dtype)
        return self.expr._add(Instr(MapOp.cast, dtype, (self.index,)))

    def __add__(self, x: Reg | Number | Dim) -> Reg:
        return self.do(MapOp.or_ if self.dtype == DType.bool else MapOp.add, x)

    def __sub__(self, x: Reg | Number | Dim) -> Reg:
        return self.do(MapOp.sub, x)

    def __rsub__(self, x: Number | Dim) -> Reg:
        return self._of(x) - self

    def __mul__(self, x: Reg | Number | Dim) -> Reg:
        return self.do(MapOp.and_ if self.dtype == DType.bool else MapOp.mul, x)

    __radd__, __rmul__ = __add__, __mul__

    def __truediv__(self, x: Reg | Number | Dim) -> Reg:
        return self.do(MapOp.div, x)

    def __rtruediv__(self, x: Number | Dim) -> Reg:
        return self._of(x) / self

    def __neg__(self) -> Reg:
        return self.do(MapOp.neg)

    def __and__(self, x: Reg) -> Reg:
        return self.do(MapOp.and_, x)

    def __or__(self, x: Reg) -> Reg:
        return self.do(MapOp.or_, x)

    def __gt__(self, x: Reg | Number | Dim) -> Reg:
        return self.do(MapOp.gt, x)

    def __ge__(self, x: Reg | Number | Dim) -> Reg:
        return self.do(MapOp.ge, x)

    def __lt__(self, x: Reg | Number | Dim) -> Reg:
        return self.do(MapOp.lt, x)

    def __le__(self, x: Reg | Number | Dim) -> Reg:
        return self.do(MapOp.le, x)

    def equal(self, x: Reg | Number | Dim) -> Reg:
        """== (the Python operator stays identity)."""
        return self.do(MapOp.eq, x)

    def logical_not(self) -> Reg:
        """True where this is zero."""
        return self.do(MapOp.logical_not)

    def select(self, yes: Reg | Number, no: Reg | Number) -> Reg:
        """yes where this (bool) holds, else no. At least one of both is a register."""
        if not isinstance(yes, Reg):
            assert isinstance(no, Reg)
            yes = no._of(yes)
        no = yes._of(no)
        return self.expr._add(Instr(MapOp.select, yes.dtype, (self.index, yes.index, no.index)))


Formula = Callable[..., Reg]
