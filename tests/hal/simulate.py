"""Runs a program file's plan with torch instead of drivers, in any order that the file allows, for tests of placement.

Nothing here shares code with what makes the plan: dimensions, places of values, waits and orders are read from the file as
schema/README.md has them. What a part computes comes from the nodes it was compiled from, one by one, by the reference evaluator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import torch

from trivet.fbs.structs import DimOp, DType, RegionKind, StepKind
from trivet.ir.evaluate import bind, evaluate_node
from trivet.ir.graph import Node, Value
from trivet.ir.interop import torch_dtype
from trivet.ir.ops import OPS
from trivet.ir.types import SIZES
from trivet.program import Program
from trivet.targets import Compiled, Piece, Target
from trivet.targets.cpu import Cpu

INTS = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
parts: list[Piece] = []  # in the order of the file, of the last program that was emitted with record()


class Recorder(Target):
    """A target that remembers what its parts are made of. takes: whether it has a node."""

    takes: Callable[[Node], bool] = staticmethod(lambda node: True)

    def refuses(self, node: Node) -> str:
        return "" if node.op == "copy" or self.takes(node) else f"no {node.op}"

    def inplace(self, node: Node) -> list[tuple[int, int]]:
        return Cpu().inplace(node)

    def scratch(self, node: Node) -> list[Any]:
        return [256] if node.op == "matmul" else []

    def compile(self, piece: Piece) -> Compiled:
        parts.append(piece)
        if not self.opaque:
            for n, _ in piece.kernels:
                for v in (*n.inputs, *n.outputs, *n.tmp):
                    if v is not None:
                        piece.value(v)
        return Compiled(f"{self.name}.1", b"pretend", segment=len(piece.nodes) > 4)


class RecordingCpu(Cpu):
    def compile(self, piece: Piece) -> Compiled:
        parts.append(piece)
        return super().compile(piece)


def target(
    name: str, memory: str = "", opaque: bool = False, takes: Callable[[Node], bool] | None = None, **more: Any
) -> Target:
    """A pretend delegate."""
    fields = {
        "name": name,
        "memory": memory,
        "opaque": opaque,
        "takes": staticmethod(takes or (lambda node: True)),
        **more,
    }
    return type(f"Pretend_{name}", (Recorder,), fields)()


@dataclass
class Touch:
    """Bytes of regions that a step reads and writes, as masks."""

    reads: dict[int, np.ndarray] = field(default_factory=dict)
    writes: dict[int, np.ndarray] = field(default_factory=dict)


class Simulator:
    """One session. lost: delegates that are not there; refused: parts of delegates in host memory that are not taken; both only where
    alternatives are.
    """

    def __init__(
        self, program: Program, graph: Any, rng: Random, lost: Sequence[str] = (), refuse: float = 0.0
    ) -> None:
        self.view = program.view
        self.e = self.view.entries[0]
        self.graph, self.rng, self.parts = graph, rng, list(parts)
        rows = [(self.view.program.Memories(i)) for i in range(self.view.program.MemoriesLength())]
        self.owner = [(r.Delegate() or b"").decode() for r in rows] or [""] * 256
        assert not rows or self.owner[0] == ""
        self.lost = set(lost)
        self.regions: list[np.ndarray] = []
        self.alias: list[tuple[int, int]] = []  # region and offset that a region's bytes are counted in
        homes = rng.random() < 0.5
        for i, r in enumerate(self.e.regions):
            at, data = (i, 0), np.full(int(r["size"]), 0xA5, np.uint8)
            if r["segment"] >= 0:
                s = self.view.segments[int(r["segment"])]
                data[: int(s["size"])] = np.frombuffer(self.view.data, np.uint8)[int(s["offset"]) :][: int(s["size"])]
                assert int(s["size"]) == len(data)
            elif r["kind"] == RegionKind.state:
                data[:] = 0
            elif r["kind"] == RegionKind.io and homes:
                at = int(r["home"]), int(r["home_offset"])
                assert self.e.regions[at[0]]["memory"] == r["memory"]
                data = self.regions[at[0]][at[1] : at[1] + len(data)]
                assert len(data) == int(r["size"])
            self.regions.append(data)
            self.alias.append(at)
        self.choice = [self._choose(s, refuse) for s in self.e.steps]
        self.waits: dict[int, list[int]] = {}
        self.ordered = self.e.table.WaitsLength() == 0
        for i in range(self.e.table.WaitsLength()):
            w = self.e.table.Waits(i)
            assert w.On() < w.Step() < len(self.e.steps)
            self.waits.setdefault(w.Step(), []).append(w.On())

    def _choose(self, step: Any, refuse: float) -> tuple[str, int]:
        """Lane and part of a step."""
        if step["kind"] == StepKind.copy:
            sides = [self.owner[int(self.e.regions[self._region(int(step[k]))]["memory"])] for k in "ab"]
            assert sides[0] != sides[1] and "" in sides, "a copy leaves or enters host memory"
            mine = sides[0] or sides[1]
            return ("cpu" if mine in self.lost else mine), -1
        if step["kind"] != StepKind.run:
            return "", -1
        delegates = [p.Delegate().decode() for p in self.e.parts(step)]
        owned = delegates[0] in self.owner
        gone = delegates[0] in self.lost or (not owned and delegates[0] != "cpu" and self.rng.random() < refuse)
        if gone and len(delegates) > 1:
            return delegates[1], int(step["a"]) + 1
        return delegates[0], int(step["a"])

    # -- memory
    def _region(self, value: int) -> int:
        return int(self.e.storages[int(self.e.values[value]["storage"])]["region"])

    def _window(self, value: int) -> tuple[np.ndarray, int, np.ndarray]:
        """A value's elements as integers of their size, its region, and byte offsets of the elements there."""
        row = self.e.values[value]
        store = self.e.storages[int(row["storage"])]
        size = SIZES[DType(int(row["dtype"]))]
        rank = int(row["rank"])
        shape = [self.dims[int(d)] for d in row["dim"][:rank]]
        strides = [self.dims[int(d)] for d in row["stride"][:rank]]
        start = int(store["offset"]) + int(row["offset"]) + size * self.dims[int(row["shift"])]
        at = np.full(shape, start, np.int64)
        for axis, (n, s) in enumerate(zip(shape, strides, strict=True)):
            at += (np.arange(n) * s * size).reshape([-1 if i == axis else 1 for i in range(rank)])
        r = int(store["region"])
        if at.size:
            assert at.min() >= int(store["offset"]) and at.max() + size <= len(self.regions[r])
            if self.e.regions[r]["kind"] != RegionKind.const_:
                assert at.max() + size <= int(store["offset"]) + int(store["size"]), "a value leaves its storage"
        return at, r, np.arange(size)

    def read(self, value: int) -> torch.Tensor:
        at, r, lanes = self._window(value)
        raw = self.regions[r][at[..., None] + lanes].copy()
        return torch.from_numpy(raw).view(torch_dtype(DType(int(self.e.values[value]["dtype"])))).reshape(at.shape)

    def write(self, value: int, x: torch.Tensor) -> None:
        at, r, lanes = self._window(value)
        raw = (
            x.detach().reshape(-1).clone(memory_format=torch.contiguous_format).reshape(-1, 1).view(torch.uint8).numpy()
            if x.numel()
            else np.zeros((0, 1), np.uint8)
        )
        self.regions[r][at.reshape(-1, 1) + lanes] = raw.reshape(-1, len(lanes))

    # -- steps
    def _values(self, i: int) -> tuple[list[int], list[int]]:
        """Values that a step reads and writes."""
        step, (_, k) = self.e.steps[i], self.choice[i]
        if k < 0:
            return [int(step["a"])], [int(step["b"])] if step["kind"] == StepKind.copy else []
        piece = self.parts[k]
        if self._opaque(k):
            return [piece.value(v) for v in piece.inputs], [piece.value(v) for v in piece.outputs]
        reads = [piece.value(v) for n, _ in piece.kernels for v in n.inputs if v is not None]
        return reads, [piece.value(v) for n, _ in piece.kernels for v in (*n.outputs, *n.tmp)]

    def _opaque(self, k: int) -> bool:
        return (self.e.table.Parts(k).Delegate() or b"").decode() in self.opaque

    def _do(self, i: int) -> None:
        step, (_, k) = self.e.steps[i], self.choice[i]
        if step["kind"] == StepKind.copy:
            a, b = int(step["a"]), int(step["b"])
            at, _, _ = self._window(a)
            to, _, _ = self._window(b)
            if at.size:  # one block of bytes: the same strides, no gaps
                assert np.array_equal(at - at.min(), to - to.min())
                assert at.max() - at.min() == (at.size - 1) * SIZES[DType(int(self.e.values[a]["dtype"]))]
            self.write(b, self.read(a))
        elif self._opaque(k):
            self._opaque_part(self.parts[k])
        else:
            piece = self.parts[k]
            for node, _ in piece.kernels:
                ins = [None if v is None else self.read(piece.value(v)) for v in node.inputs]
                for v in node.tmp:
                    self.write(
                        piece.value(v), torch.full((self._window(piece.value(v))[0].size,), 0x5A, dtype=torch.uint8)
                    )
                for v, x in zip(node.outputs, evaluate_node(node, ins, self.symbols, self.graph), strict=True):
                    self.write(piece.value(v), x)

    def _opaque_part(self, piece: Piece) -> None:
        env: dict[Value, Any] = {}
        for v in piece.outputs:  # written at any time
            at, _, _ = self._window(piece.value(v))
            self.write(piece.value(v), torch.full(at.shape, 77).to(torch_dtype(v.dtype)))
        for v in piece.inputs:
            at, _, _ = self._window(piece.value(v))
            if at.size:
                step = SIZES[v.dtype]
                assert np.array_equal(at.reshape(-1), at.min() + step * np.arange(at.size)), (
                    "an opaque part reads dense values"
                )
            env[v] = self.read(piece.value(v))
        for node in piece.nodes:
            ins = [None if v is None else v.const.data if v.const is not None else env[v] for v in node.inputs]
            env.update(zip(node.outputs, evaluate_node(node, ins, self.symbols, self.graph), strict=True))
            assert node.op in ("concat",) or OPS[node.op].view or OPS[node.op].kernel
        for v in piece.outputs:
            at, _, _ = self._window(piece.value(v))
            assert not at.size or np.array_equal(at.reshape(-1), at.min() + SIZES[v.dtype] * np.arange(at.size))
            self.write(piece.value(v), env[v])

    # -- running
    opaque: frozenset[str] = frozenset()

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """One run in a random order of what may come in any order."""
        self.symbols = bind(self.graph, inputs)
        self.dims = self._dims(inputs)
        for v, x in zip(self.e.inputs, inputs, strict=True):
            self.write(v, x)
        at, count = 0, len(self.e.steps)
        for _ in range(10_000):
            if at >= count:
                break
            end = at
            while end < count and self.e.steps[end]["kind"] in (StepKind.run, StepKind.copy):
                end += 1
            self._segment(at, end)
            if end == count:
                break
            step = self.e.steps[end]
            go = step["kind"] == StepKind.jump or not bool(self.read(int(step["a"])))
            at = int(step["b"]) if go else end + 1
        else:
            raise AssertionError("the program does not end")
        return [self.read(v) for v in self.e.outputs]

    def _order(self, first: int, end: int) -> list[int]:
        """For each step of a segment the steps that are done before it begins, as bits."""
        before: list[int] = []
        for i in range(first, end):
            have = 0
            for k in range(first, i):
                if self.ordered or k in self.waits.get(i, ()) or (self.choice[k][0] == self.choice[i][0]):
                    have |= before[k - first] | 1 << (k - first)
            before.append(have)
        return before

    def _segment(self, first: int, end: int) -> None:
        before = self._order(first, end)
        self._races(first, end, before)
        n, done, began = end - first, 0, 0
        running: list[int] = []
        late: set[int] = set()
        while done != (1 << n) - 1:
            ready = [i for i in range(n) if not began >> i & 1 and before[i] & ~done == 0]
            if ready and (not running or self.rng.random() < 0.6):
                i = self.rng.choice(ready)
                began |= 1 << i
                running.append(i)
                if self.rng.random() < 0.5:
                    late.add(i)
                else:
                    self._do(first + i)
            else:
                i = running.pop(self.rng.randrange(len(running)))
                if i in late:
                    self._do(first + i)
                done |= 1 << i

    def _races(self, first: int, end: int, before: list[int]) -> None:
        """No two steps that may run side by side touch a byte that one of them writes."""
        touch = [self._touch(i) for i in range(first, end)]
        for j in range(len(touch)):
            for i in range(j):
                if before[j] >> i & 1:
                    continue
                for a, b in (
                    (touch[i].writes, touch[j].writes),
                    (touch[i].writes, touch[j].reads),
                    (touch[i].reads, touch[j].writes),
                ):
                    for r in a.keys() & b.keys():
                        assert not (a[r] & b[r]).any(), f"steps {first + i} and {first + j} meet in region {r}"
        self.overlaps = sum(not before[j] >> i & 1 for j in range(len(touch)) for i in range(j))

    def _touch(self, i: int) -> Touch:
        out = Touch()
        for ids, side in zip(self._values(i), (out.reads, out.writes), strict=True):
            for v in ids:
                at, r, lanes = self._window(v)
                kind = self.e.regions[r]["kind"]
                if kind == RegionKind.const_:
                    continue
                root, shift = self.alias[r]
                mask = side.setdefault(root, np.zeros(len(self.regions[root]), bool))
                mask[(at[..., None] + lanes + shift).reshape(-1)] = True
        return out

    def _dims(self, inputs: list[torch.Tensor]) -> list[int]:
        out: list[int] = []
        for r in self.e.dims:
            a, b = int(r["a"]), int(r["b"])
            op = DimOp(int(r["op"]))
            if op == DimOp.const_:
                x = int(r["min"])
            elif op == DimOp.input:
                x = inputs[a].shape[b]
            else:
                p, q = out[a], out[b]
                x = {DimOp.add: lambda: p + q, DimOp.sub: lambda: p - q, DimOp.mul: lambda: p * q, DimOp.floor_div: lambda: p // q,
                     DimOp.ceil_div: lambda: -(-p // q), DimOp.mod: lambda: p % q, DimOp.min: lambda: min(p, q),
                     DimOp.max: lambda: max(p, q)}[op]()  # fmt: skip
            assert int(r["min"]) <= x <= int(r["max"])
            out.append(x)
        return out
