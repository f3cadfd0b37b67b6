"""Reads the commands that tests/ops recorded (tests/ops/record.py) and runs them through generated CUDA kernels on the CPU."""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trivet.cuda.code import Code
from trivet.cuda.nodes import OPS, compile_node, refuses
from trivet.fbs.structs import STRUCTS, DType, MapOp, Op
from trivet.ir import ops
from trivet.ir.dim import Dim, evaluate
from trivet.ir.graph import Node, Placement, Value
from trivet.ir.interop import torch_dtype
from trivet.ir.ops import OPS as IR
from trivet.ir.types import Type, is_float
from trivet.targets.cpu_part import attribute_row
from trivet.writer import attrs_struct


@dataclass
class Tensor:
    """Bytes from the first to the last element of a tensor in memory. offset: bytes of element 0, .., 0."""

    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    data: bytes

    def value(self, name: str) -> Value:
        v = Value(name, Type(self.dtype, self.shape))
        size = torch_dtype(self.dtype).itemsize
        v.placement = Placement(v, self.offset // size, self.strides)
        return v


@dataclass
class Command:
    op: Op
    attrs: np.ndarray
    code: np.ndarray
    dims: np.ndarray
    args: list[Tensor | None]
    counts: tuple[int, int, int]
    want: list[bytes] = field(default_factory=list)


def commands(path: Path) -> list[Command]:
    """All recorded commands with what they gave."""
    data, want, at, out = path.read_bytes(), pickle.loads(Path(f"{path}.want").read_bytes()), 0, []

    def take(n: int) -> bytes:
        nonlocal at
        at += n
        assert at <= len(data)
        return data[at - n : at]

    while at < len(data):
        op, n_in, n_out, n_tmp, n_attrs, n_code, n_dims, _ = struct.unpack("<8I", take(32))
        name = attrs_struct(Op(op))
        raw = take(n_attrs)
        attrs = np.frombuffer(raw[: STRUCTS[name].itemsize], STRUCTS[name])[0]
        code = np.frombuffer(take(n_code * STRUCTS["MapInstr"].itemsize), STRUCTS["MapInstr"])
        dims = np.frombuffer(take(8 * n_dims), np.int64)
        take(n_dims * STRUCTS["Dim"].itemsize)
        args: list[Tensor | None] = []
        for _ in range(n_in + n_out + n_tmp):
            there, dtype, rank, _flags = struct.unpack("<4I", take(16))
            if not there:
                args.append(None)
                continue
            q = struct.unpack("<8q8q3Q", take(152))
            args.append(Tensor(DType(dtype), q[:rank], q[8 : 8 + rank], q[16], take(q[17])))
        out.append(Command(Op(op), attrs, code, dims, args, (n_in, n_out, n_tmp)))
    for c, w in zip(out, want, strict=True):
        assert c.op == w["op"]
        c.want = [o["bytes"] for o in w["outputs"]]
    return out


def attributes(c: Command) -> Any:
    """The dataclass of an operator's struct."""
    cls, s = IR[c.op.name].attrs, c.attrs
    x = next((a for a in c.args[: c.counts[0]] if a is not None), None)
    out = c.args[c.counts[0]]
    rank = 0 if x is None else len(x.shape)
    if cls is ops.Map:
        return ops.Map(ssa(c))
    given: dict[str, Any] = {}
    names = set(s.dtype.names or ())
    for f in fields(cls):
        if f.name not in names:
            continue
        v = s[f.name]
        given[f.name] = tuple(v.tolist()) if v.ndim else v.item()
    if "axes" in given and cls in (ops.Reduce, ops.Qreduce):
        given["axes"] = tuple(i for i in range(16) if given["axes"] >> i & 1)
    nd = given.get("nd", 0)
    for name in ("stride", "pad", "dilation", "kernel", "scale"):
        if name in given and isinstance(given[name], tuple):
            given[name] = given[name][:nd] if any(given[name]) or name == "pad" else ()
    if "dilation" in given:
        given["dilation"] = tuple(d or 1 for d in given["dilation"])
    if cls is ops.Pad:
        assert out is not None and x is not None
        given["lo"] = given["lo"][:rank]
        given["hi"] = tuple(o - n - lo for o, n, lo in zip(out.shape, x.shape, given["lo"], strict=True))
    if cls is ops.Conv and given.get("packed", 0) > 1:
        given["winograd"] = given["packed"]
    for name in ("packed", "transposed", "count_include_pad", "adaptive", "align_corners", "log", "causal", "nan_rows", "descending",
                 "reverse", "include_self", "exclusive"):  # fmt: skip
        if name in given:
            given[name] = bool(given[name])
    kinds = {f.name: f.type for f in fields(cls)}
    for name, value in given.items():
        kind = getattr(ops, str(kinds[name]), None)
        if kind is not None and not isinstance(value, (tuple, bool)) and isinstance(kind, type):
            given[name] = kind(value)
    return cls(**given)


def ssa(c: Command) -> tuple[ops.Instr, ...]:
    """A map's register code as instructions that are named once."""
    at: dict[int, int] = {}
    out: list[ops.Instr] = []
    first, n = int(c.attrs["code"]), int(c.attrs["count"])
    for row in c.code[first : first + n]:
        op, dtype = MapOp(int(row["op"])), DType(int(row["dtype"]))
        value: Any = None
        args: tuple[int, ...] = ()
        if op == MapOp.load:
            value = int(row["a"])
        elif op == MapOp.const_:
            bits = int(row["value"])
            value = (
                struct.unpack("<d", struct.pack("<Q", bits))[0]
                if is_float(dtype)
                else struct.unpack("<q", struct.pack("<Q", bits))[0]
            )
        elif op == MapOp.dim:
            value = Dim.symbol(f"d{int(row['value'])}")
        elif op == MapOp.iota:
            value = int(row["value"])
        else:
            from trivet.ir.reference_map import arity

            args = tuple(at[int(row[k])] for k in ("a", "b", "c")[: arity(op)])
        at[int(row["dst"])] = len(out)
        out.append(ops.Instr(op, dtype, args, value))
    return tuple(out)


@dataclass
class Job:
    """A command as a node, with its launches."""

    command: Command
    node: Node
    values: dict[Value, Tensor]
    dims: dict[str, int]
    launches: list[Any] = field(default_factory=list)


def prepare(c: Command) -> Job | str:
    """The node of a command, or why the delegate does not take it."""
    n_in, n_out, _ = c.counts
    values: dict[Value, Tensor] = {}
    inputs: list[Value | None] = []
    for i, t in enumerate(c.args[:n_in]):
        if t is None:
            inputs.append(None)
            continue
        v = t.value(f"x{i}")
        values[v] = t
        inputs.append(v)
    outs = []
    for i, t in enumerate(c.args[n_in : n_in + n_out]):
        assert t is not None
        v = t.value(f"y{i}")
        values[v] = t
        outs.append(v)
    node = Node(c.op.name, inputs, outs, attributes(c))
    why = refuses(node)
    if why:
        return why
    for i, size in enumerate(OPS[node.op].scratch(node)):
        tmp = Value(f"t{i}", Type(DType.u8, (size,)), node, -1)
        tmp.placement = Placement(tmp, 0, (1,))
        values[tmp] = Tensor(DType.u8, (int(size),), (1,), 0, bytes([0xAA]) * int(size))  # type: ignore[call-overload]
        node.tmp.append(tmp)
    return Job(c, node, values, {f"d{i}": int(v) for i, v in enumerate(c.dims)})


def compile_jobs(jobs: list[Job], literals: bool, tf32: bool = False) -> str:
    """One source for all jobs."""
    ranges = {f"d{i}": (-(1 << 40), 1 << 40) for i in range(64)}
    code = Code(ranges, literals, tf32)
    for j in jobs:
        first = len(code.launches)
        compile_node(code, j.node, 0)
        j.launches = code.launches[first:]
    return code.source()


def run(job: Job, module: Any) -> tuple[list[torch.Tensor], int]:
    """Outputs and the error flag."""
    memory: dict[Value, np.ndarray] = {}
    base: dict[Any, int] = {}
    keep = []
    for v, t in job.values.items():
        raw = np.zeros(len(t.data) + 128, np.uint8)
        start = -raw.ctypes.data % 64
        memory[v] = raw[start : start + len(t.data)]
        memory[v][:] = np.frombuffer(t.data, np.uint8)
        base[v] = memory[v].ctypes.data + t.offset
        keep.append(raw)
    flag = np.zeros(1, np.int32)
    base[None] = flag.ctypes.data
    for launch in job.launches:
        module.run(launch, base.__getitem__, job.dims)
    return [window(memory[o].tobytes(), job.values[o]) for o in job.node.outputs], int(flag[0])


def window(data: bytes, t: Tensor) -> torch.Tensor:
    """A tensor over the bytes of a window."""
    if 0 in t.shape:
        return torch.zeros(t.shape, dtype=torch_dtype(t.dtype))
    flat = (
        torch.frombuffer(bytearray(data), dtype=torch_dtype(t.dtype))
        if t.dtype != DType.bool
        else torch.frombuffer(bytearray(data), dtype=torch.uint8)
    )
    return flat.as_strided(t.shape, t.strides, t.offset // flat.element_size()).clone()


def wanted(job: Job) -> list[torch.Tensor]:
    return [window(w, job.values[o]) for w, o in zip(job.command.want, job.node.outputs, strict=True)]


TOLERANCE = {
    torch.float32: 2e-5,
    torch.float64: 1e-11,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}  # of the largest value


def alike(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Integers alike; floats within TOLERANCE, NaN and infinities in the same places."""
    if not want.dtype.is_floating_point:
        return torch.equal(got, want)
    a, b = got.double(), want.double()
    if not torch.equal(a.isnan(), b.isnan()) or not torch.equal(a[b.isinf()], b[b.isinf()]):
        return False
    there = b.isfinite()
    if not bool(there.any()):
        return True
    size = max(float(b[there].abs().max()), 1e-3)
    return float((a - b)[there].abs().max()) <= TOLERANCE[want.dtype] * size


__all__ = [
    "Command",
    "Job",
    "attribute_row",
    "commands",
    "compile_jobs",
    "evaluate",
    "alike",
    "prepare",
    "run",
    "wanted",
    "window",
]
