"""Takes instructions off the front of a map, so that the node that makes one of its inputs can do them."""

from __future__ import annotations

from typing import Any

from trivet.fbs.structs import DType, MapOp
from trivet.ir.graph import Node, Value
from trivet.ir.ops import Instr
from trivet.ir.simplify import Code, finish

HALVES = (DType.f16, DType.bf16)


class Peel:
    """The instructions of a map that read one input, followed from its load. `at` is the register reached so far.

    Halves: importers compute in f32 between a cast and a cast back. The walk starts behind the first cast; what was walked
    can be taken off once the cast back is reached, because producers also compute in f32 and round at the end.
    """

    def __init__(self, node: Node, value: Value) -> None:
        self.node, self.value = node, value
        self.code: Code = node.attrs.code
        self.readers: list[list[int]] = [[] for _ in self.code]
        for k, i in enumerate(self.code):
            for a in dict.fromkeys(i.args):
                self.readers[a].append(k)
        loads = [k for k, i in enumerate(self.code) if i.op == MapOp.load and node.inputs[i.value] is value]
        self.at = loads[0] if len(loads) == 1 else -1
        self.taken = self.at  # up to here may be taken off
        self._open = self._enter()

    def _enter(self) -> bool:
        """Steps over a widening cast; True when a cast back must follow."""
        if self.at < 0 or self.value.dtype not in HALVES:
            return False
        k = self.next()
        if k is None or self.code[k].op != MapOp.cast or self.code[k].dtype not in (DType.f32, DType.f64):
            return False
        self.at = k
        return True

    def next(self) -> int | None:
        """The only instruction that reads the register reached; None when there are several or none."""
        if self.at < 0:
            return None
        readers = self.readers[self.at]
        return readers[0] if len(readers) == 1 else None

    def other(self, k: int) -> int:
        """The other operand of binary instruction k; -1 when it is the same register twice."""
        a, b = self.code[k].args
        return -1 if a == b else b if a == self.at else a

    def first(self, k: int) -> bool:
        """True when the register reached is the left operand of instruction k."""
        return self.code[k].args[0] == self.at

    def number(self, r: int) -> Any:
        """The number in a register, None when it is not constant."""
        return self.code[r].value if r >= 0 and self.code[r].op == MapOp.const_ else None

    def loaded(self, r: int) -> Value | None:
        """The value that a register loads (a half may be widened on the way), None when it is something else."""
        if r < 0:
            return None
        i = self.code[r]
        if i.op == MapOp.cast and self._open and self.code[i.args[0]].dtype == self.value.dtype:
            i = self.code[i.args[0]]
        return self.node.inputs[i.value] if i.op == MapOp.load else None

    def step(self, k: int) -> bool:
        """Goes on to register k. True when everything up to here may be taken off."""
        self.at = k
        if self._open:
            back = self.next()
            if back is None or self.code[back].op != MapOp.cast or self.code[back].dtype != self.value.dtype:
                return False
            self.at = back
            self.taken = back
            self._open = self._enter()
            return True
        self.taken = k
        return True

    @property
    def whole(self) -> bool:
        """True when nothing of the map is left."""
        return self.taken == len(self.code) - 1

    def rest(self, made: Value) -> tuple[Code, list[Value]]:
        """What is left of the map when made holds the result of what was taken, and its inputs."""
        inputs = [v for v in self.node.inputs if v is not None]
        code = list(self.code)
        code[self.taken] = Instr(MapOp.load, made.dtype, (), len(inputs))
        return finish(code, len(code) - 1, [*inputs, made])
