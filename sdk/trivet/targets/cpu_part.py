"""Compiles nodes into a part of format "cpu.1": commands, their arguments, map code and attributes."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from trivet.error import Error
from trivet.fbs.structs import DType, MapOp, Op
from trivet.ir import ops
from trivet.ir.dim import Dim
from trivet.ir.graph import Node, Value
from trivet.ir.types import is_float
from trivet.writer import NONE, CpuPartSpec, attrs_struct, cpu_part, records

MAX_REGS = 32
MAX_ARGS = 32


class PartBuilder:
    """Collects commands. value: id of a value; dim: row of a dimension; data_row: row that a kernel writes."""

    def __init__(
        self, value: Callable[[Value], int], dim: Callable[[int | Dim], int], data_row: Callable[[str], int]
    ) -> None:
        self.value, self.dim, self.data_row = value, dim, data_row
        self.commands: list[dict[str, int]] = []
        self.args: list[int] = []
        self.code: list[dict[str, int]] = []
        self.attrs: dict[Op, list[dict[str, Any]]] = {}
        self._runs: dict[tuple[Any, ...], int] = {}
        self._args: dict[tuple[int, ...], int] = {}
        self._slots: dict[tuple[Op, str], int] = {}

    def add(self, node: Node, time: int) -> None:
        """Appends a node's command."""
        op = Op[node.op]
        ids = [NONE if v is None else self.value(v) for v in node.inputs]
        while ids and ids[-1] == NONE:
            ids.pop()
        n_in = len(ids)
        ids += [self.value(v) for v in (*node.outputs, *node.tmp)]
        if len(ids) > MAX_ARGS:
            raise Error(f"{node.op} has {len(ids)} operands, a command takes {MAX_ARGS}", node=str(node.loc),
                        remedy="this is a bug of trivet: report it with the model")  # fmt: skip
        key = tuple(ids)
        if key not in self._args:
            self._args[key] = len(self.args)
            self.args += ids
        row = self._attributes(node)
        table = self.attrs.setdefault(op, [])
        slot = (op, repr(sorted(row.items())))
        if slot not in self._slots:
            self._slots[slot] = len(table)
            table.append(row)
        self.commands.append({"op": int(op), "n_in": n_in, "n_out": len(node.outputs), "n_tmp": len(node.tmp),
                              "args": self._args[key], "attrs": self._slots[slot], "time": time})  # fmt: skip

    def build(self) -> bytes:
        """The part's data."""
        return cpu_part(CpuPartSpec(
            records("Command", self.commands), self.args, records("MapInstr", self.code),
            {op: records(attrs_struct(op), rows) for op, rows in sorted(self.attrs.items())}))  # fmt: skip

    def _attributes(self, node: Node) -> dict[str, Any]:
        if isinstance(node.attrs, ops.Map):
            return self._map(node, node.attrs)
        if isinstance(node.attrs, (ops.Nonzero, ops.Item)):
            return {"dim": self.data_row(node.attrs.symbol)}
        return attribute_row(node.attrs)

    def _map(self, node: Node, attrs: ops.Map) -> dict[str, Any]:
        rows, regs = registers(attrs.code, self.dim, str(node.loc))
        key = tuple(tuple(sorted(r.items())) for r in rows)
        if key not in self._runs:
            self._runs[key] = len(self.code)
            self.code += rows
        return {"code": self._runs[key], "count": len(rows), "regs": regs}


def attribute_row(a: Any) -> dict[str, Any]:
    """The struct's fields of an operator's attributes."""
    if isinstance(a, ops.Copy):
        return {"spare": 0}
    if isinstance(a, ops.Reduce):
        return {"kind": a.kind, "axes": sum(1 << i for i in a.axes), "correction": a.correction}
    if isinstance(a, ops.Scan):
        return {"kind": a.kind, "axis": a.axis, "exclusive": a.exclusive}
    if isinstance(a, ops.Matmul):
        return {"packed": a.packed, "act": a.act, "lo": a.lo, "hi": a.hi}
    if isinstance(a, ops.Conv):
        packed = (a.winograd or 1) if a.packed else 0
        return {"nd": a.nd, "transposed": a.transposed, "packed": packed, "act": a.act, "groups": a.groups,
                "stride": a.stride, "pad": a.pad, "dilation": a.dilation, "kernel": a.kernel, "lo": a.lo, "hi": a.hi}  # fmt: skip
    if isinstance(a, ops.Pool):
        return {"kind": a.kind, "nd": a.nd, "count_include_pad": a.count_include_pad, "adaptive": a.adaptive,
                "kernel": a.kernel, "stride": a.stride, "pad": a.pad, "dilation": a.dilation, "divisor": a.divisor}  # fmt: skip
    if isinstance(a, ops.Norm):
        return {"kind": a.kind, "axes": a.axes, "groups": a.groups, "eps": a.eps}
    if isinstance(a, ops.Softmax):
        return {"axis": a.axis, "log": a.log}
    if isinstance(a, ops.Attention):
        return {"causal": a.causal, "nan_rows": a.nan_rows, "scale": a.scale}
    if isinstance(a, ops.Gather):
        return {"kind": a.kind, "axis": a.axis}
    if isinstance(a, ops.Scatter):
        return {"kind": a.kind, "axis": a.axis, "reduce": a.reduce, "include_self": a.include_self}
    if isinstance(a, ops.Pad):
        return {"mode": a.mode, "lo": a.lo, "value": a.value}
    if isinstance(a, ops.Sort):
        return {"axis": a.axis, "descending": a.descending}
    if isinstance(a, ops.Rnn):
        return {"kind": a.kind, "reverse": a.reverse, "packed": bool(getattr(a, "packed", False))}
    if isinstance(a, ops.Resize):
        return {"mode": a.mode, "nd": a.nd, "align_corners": a.align_corners, "scale": a.scale, "cubic_a": a.cubic_a}
    if isinstance(a, ops.GridSample):
        return {"mode": a.mode, "pad": a.pad, "align_corners": a.align_corners}
    if type(a).__name__.lower() in _QUANTISED:
        row = {f.name: getattr(a, f.name) for f in fields(a) if f.name != "ceil_mode"}
        if isinstance(a, ops.Qreduce):
            row["axes"] = sum(1 << i for i in a.axes)
        return row or {"spare": 0}
    raise AssertionError(f"{type(a).__name__} has no struct")


_QUANTISED = frozenset(op.name for op in Op if op >= Op.requantize)


def registers(
    code: Sequence[ops.Instr], dim: Callable[[int | Dim], int], where: str = ""
) -> tuple[list[dict[str, int]], int]:
    """Gives the values of a map registers, each reused after its last reader; dead instructions are left out.

    Returns:
        Rows of MapInstr and the number of registers.
    """
    needed = [False] * len(code)
    needed[-1] = True
    for i in reversed(range(len(code))):
        if needed[i]:
            for a in code[i].args:
                needed[a] = True
    last = {a: i for i, instr in enumerate(code) if needed[i] for a in instr.args}
    free: list[int] = []
    at: dict[int, int] = {}
    count = 0
    rows = []
    for i, instr in enumerate(code):
        if not needed[i]:
            continue
        operands = [at[x] for x in instr.args]
        for x in sorted(set(instr.args)):
            if last[x] == i:
                free.append(at[x])
        if free:
            at[i] = min(free)
            free.remove(at[i])
        else:
            at[i] = count
            count += 1
        row = {"op": int(instr.op), "dtype": int(instr.dtype), "dst": at[i], "value": 0}
        row |= dict(zip(("a", "b", "c"), operands, strict=False))
        if instr.op == MapOp.load:
            row["a"] = int(instr.value)
        elif instr.op == MapOp.const_:
            row["value"] = number_bits(instr.value, instr.dtype)
        elif instr.op == MapOp.dim:
            row["value"] = dim(instr.value)
        elif instr.op == MapOp.iota:
            row["value"] = int(instr.value)
        rows.append({k: row.get(k, 0) for k in ("op", "dtype", "dst", "a", "b", "c", "value")})
    if count > MAX_REGS:
        raise Error(f"a fused expression needs {count} registers, the kernel has {MAX_REGS}", node=where,
                    remedy="this is a bug of trivet: report it with the model")  # fmt: skip
    return rows, count


def number_bits(value: float | int | bool, dtype: DType) -> int:
    """A constant of a map as it is stored: the bits of a double, or of a 64-bit integer."""
    if is_float(dtype):
        return int(struct.unpack("<Q", struct.pack("<d", float(value)))[0])
    if isinstance(value, float) and not math.isfinite(value):
        raise Error(f"{value} cannot be a constant of type {dtype.name}")
    return int(value) & 0xFFFFFFFFFFFFFFFF
