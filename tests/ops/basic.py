"""What the tests of the basic kernels share: cases, layouts, map code, comparison with torch.

A Case is one command with its truth. Tests make cases and call `verify`, which runs each one on every ISA of the machine,
with several memory layouts and tile counts; a new ISA variant needs no new test.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from heavy import isa_levels, laid_out, place, struct

from trivet import native
from trivet.fbs.structs import STRUCTS, DType, MapOp, Op
from trivet.ir.interop import dtype_of
from trivet.ir.types import is_float
from trivet.targets.cpu_part import number_bits

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
ALL = (torch.bool, *INTS, *FLOATS)
LAYOUTS = ("dense", "last", "gaps", "flip")
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-13, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclass
class Case:
    """One command. want: the outputs. inplace: also run with output 0 on the storage of this input."""

    op: Op
    attrs: Any
    inputs: Sequence[torch.Tensor | None]
    want: Sequence[torch.Tensor]
    code: Any = None
    tmp: int = 0
    relative: float | None = None  # tolerance; None: by dtype, 0: exact
    absolute: float = 0.0
    inplace: int | None = None
    dims: Any = None
    dim_table: Any = None
    tiles: Sequence[int] = (0, 3)
    layouts: Sequence[str] = field(default=LAYOUTS)


def verify(case: Case) -> None:
    """Runs the case in all ways and compares."""
    for isa in isa_levels(int(case.op)):
        for k, layout in enumerate(case.layouts):
            other = case.layouts[(k + 1) % len(case.layouts)]
            for tiles in case.tiles:
                run(case, isa, layout, other, tiles)
    if case.inplace is not None and case.inputs[case.inplace].dtype.itemsize == case.want[0].dtype.itemsize:
        x = place(case.inputs[case.inplace], "dense")
        inputs = list(case.inputs)
        inputs[case.inplace] = x
        call(case, "ref", inputs, [x.view(case.want[0].dtype)], 0)
        compare(case, x.view(case.want[0].dtype), case.want[0])


def run(case: Case, isa: str, layout: str, other: str, tiles: int) -> None:
    inputs = [None if x is None else place(x, layout if i % 2 == 0 else other) for i, x in enumerate(case.inputs)]
    outputs = [laid_out(w.shape, w.dtype, other if i % 2 == 0 else layout) for i, w in enumerate(case.want)]
    call(case, isa, inputs, outputs, tiles)
    for got, want in zip(outputs, case.want, strict=True):
        compare(case, got, want)


def call(
    case: Case, isa: str, inputs: Sequence[torch.Tensor | None], outputs: Sequence[torch.Tensor], tiles: int
) -> None:
    tmp = [np.full(case.tmp, 0xAA, np.uint8)] if case.tmp else []
    native.run_op(case.op, inputs, outputs, case.attrs, tmp=tmp, code=case.code, dims=case.dims, dim_table=case.dim_table,
                  tiles=tiles, isa=isa)  # fmt: skip


def compare(case: Case, got: torch.Tensor, want: torch.Tensor) -> None:
    if want.dtype.is_floating_point and case.relative != 0:
        r = TOLERANCE[want.dtype] if case.relative is None else case.relative
        torch.testing.assert_close(got, want, rtol=r, atol=case.absolute, equal_nan=True)
    else:
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def values(shape: Sequence[int], dtype: torch.dtype, seed: int = 0, low: float = -3, high: float = 3) -> torch.Tensor:
    """Seeded values in [low, high): integers whole, unsigned ones not negative."""
    g = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=g).bool()
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        lo, hi = max(info.min, int(low)), min(info.max, int(high))
        return torch.randint(lo, hi + 1, tuple(shape), generator=g).to(dtype)
    return (torch.rand(tuple(shape), generator=g, dtype=torch.float64) * (high - low) + low).to(dtype)


# ---- map ------------------------------------------------------------------------------------------------------------------
@dataclass
class Code:
    """Writes map code: each method adds an instruction and returns its register."""

    rows: list[tuple[int, ...]] = field(default_factory=list)
    regs: int = 0

    def emit(
        self, op: MapOp, dtype: torch.dtype, a: int = 0, b: int = 0, c: int = 0, value: int = 0, dst: int | None = None
    ) -> int:
        if dst is None:
            dst = self.regs
        self.regs = max(self.regs, dst + 1)
        self.rows.append((int(op), int(dtype_of(dtype)), dst, a, b, c, 0, value))
        return dst

    def load(self, i: int, dtype: torch.dtype, dst: int | None = None) -> int:
        return self.emit(MapOp.load, dtype, a=i, dst=dst)

    def const(self, x: float, dtype: torch.dtype, dst: int | None = None) -> int:
        return self.emit(MapOp.const_, dtype, value=number_bits(x, dtype_of(dtype)), dst=dst)

    def build(self) -> tuple[Any, Any]:
        """Attributes and code."""
        return struct("MapAttrs", code=0, count=len(self.rows), regs=self.regs), np.array(
            self.rows, STRUCTS["MapInstr"]
        )


def map_case(op: MapOp, inputs: Sequence[torch.Tensor], want: torch.Tensor, **more: Any) -> Case:
    """One instruction over its inputs."""
    c = Code()
    regs = [c.load(i, x.dtype) for i, x in enumerate(inputs)]
    c.emit(op, want.dtype, *regs)
    attrs, code = c.build()
    return Case(Op.map, attrs, inputs, [want], code=code, **more)


__all__ = ["ALL", "FLOATS", "INTS", "LAYOUTS", "Case", "Code", "DType", "MapOp", "Op", "call", "compare", "is_float",
           "map_case", "native", "place", "run", "struct", "values", "verify"]  # fmt: skip
