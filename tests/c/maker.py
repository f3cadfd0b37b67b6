"""Small programs for the runtime's tests, made by hand with the file writer: the core needs no exporter and no kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trivet.fbs.structs import DimOp, DType, RegionKind, StepKind
from trivet.writer import EntrySpec, PartSpec, records

INF = (1 << 63) - 1
SIZES = {DType.bool: 1, DType.u8: 1, DType.i32: 4, DType.i64: 8, DType.f32: 4, DType.f64: 8}


@dataclass
class Maker:
    """Builds one entry row by row. Places are naive: each storage has its own bytes unless told otherwise."""

    name: str = "forward"
    times: int = 1
    dims: list[dict[str, Any]] = field(default_factory=list)
    regions: list[dict[str, Any]] = field(default_factory=list)
    storages: list[dict[str, Any]] = field(default_factory=list)
    values: list[dict[str, Any]] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    parts: list[PartSpec] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.const(0)
        self.const(1)
        self.arena = self.region(RegionKind.arena)

    # ---- rows
    def dim(self, op: DimOp, a: int = 0, b: int = 0, low: int = 0, high: int = INF) -> int:
        self.dims.append({"op": op, "a": a, "b": b, "min": low, "max": high})
        return len(self.dims) - 1

    def const(self, n: int) -> int:
        for i, d in enumerate(self.dims):
            if d["op"] == DimOp.const_ and d["min"] == n:
                return i
        return self.dim(DimOp.const_, low=n, high=n)

    def region(self, kind: RegionKind, size: int = 0, segment: int = -1, **more: Any) -> int:
        self.regions.append(
            {"kind": kind, "id": len(self.regions), "align": 64, "segment": segment, "size": size, **more}
        )
        return len(self.regions) - 1

    def storage(
        self, size: int, region: int | None = None, first: int = 0, last: int | None = None, **more: Any
    ) -> int:
        """A storage at the end of its region (default: the arena)."""
        region = self.arena if region is None else region
        r = self.regions[region]
        last = self.times - 1 if last is None else last
        offset = 0
        if r["kind"] != RegionKind.io:
            offset = -(-r.get("used", 0) // 64) * 64
            r["used"] = offset + size
            if r["kind"] == RegionKind.arena:
                r["size"] = r["used"]
        self.storages.append({"offset": offset, "size": size, "first": first, "last": last, "region": region,
                              "align_log2": 6, "rank": len(self.storages), **more})  # fmt: skip
        return len(self.storages) - 1

    def value(self, storage: int, dtype: DType, shape: list[int], rows: list[int] | None = None, **more: Any) -> int:
        """A dense value. rows: the dimension rows where the shape is not constant (shape then gives the strides)."""
        strides = [1] * len(shape)
        for i in reversed(range(len(shape) - 1)):
            strides[i] = strides[i + 1] * shape[i + 1]
        self.values.append({"storage": storage, "dtype": dtype, "rank": len(shape),
                            "dim": rows or [self.const(n) for n in shape],
                            "stride": [self.const(s) for s in strides], **more})  # fmt: skip
        return len(self.values) - 1

    def tensor(self, dtype: DType, shape: list[int], region: int | None = None, rows: list[int] | None = None,
               **more: Any) -> int:  # fmt: skip
        size = int(np.prod(shape, dtype=np.int64)) * SIZES[dtype]
        return self.value(self.storage(size, region, **more), dtype, shape, rows)

    def slot(
        self, dtype: DType, shape: list[int], output: bool = False, rows: list[int] | None = None, **more: Any
    ) -> int:
        """An input (or output) of its own IO region, at home in the arena."""
        size = int(np.prod(shape, dtype=np.int64)) * SIZES[dtype]
        a = self.regions[self.arena]
        home = -(-a.get("used", 0) // 64) * 64
        a["used"] = a["size"] = home + size
        region = self.region(RegionKind.io, size, home=self.arena, home_offset=home, slot=0)
        value = self.value(self.storage(size, region, **more), dtype, shape, rows)
        (self.outputs if output else self.inputs).append(value)
        return value

    # ---- steps
    def run(self, code: bytes, inputs: list[int] = [], outputs: list[int] = [], delegate: str = "toy",  # noqa: B006
            form: str = "toy.1", time: int = 0, alternatives: int = 1) -> None:  # fmt: skip
        for _i in range(alternatives):
            self.parts.append(PartSpec(delegate, form, code, inputs=inputs, outputs=outputs))
        self.steps.append(
            {"kind": StepKind.run, "count": alternatives, "a": len(self.parts) - alternatives, "time": time}
        )

    def step(self, kind: StepKind, a: int = 0, b: int = 0, time: int = 0) -> int:
        self.steps.append({"kind": kind, "a": a, "b": b, "time": time})
        return len(self.steps) - 1

    def entry(self) -> EntrySpec:
        for position, value in enumerate(self.inputs + self.outputs):
            self.regions[self.storages[self.values[value]["storage"]]["region"]]["slot"] = position
        order = sorted(range(len(self.storages)), key=lambda i: self.storages[i]["first"])
        new = {old: i for i, old in enumerate(order)}
        values = [{**v, "storage": new[v["storage"]]} for v in self.values]
        regions = [{k: v for k, v in r.items() if k != "used"} for r in self.regions]
        return EntrySpec(
            self.name, records("Dim", self.dims), records("Region", regions),
            records("Storage", [self.storages[i] for i in order]), records("Value", values), self.inputs, self.outputs,
            [f"x{i}" for i in range(len(self.inputs))], [f"y{i}" for i in range(len(self.outputs))],
            records("Step", self.steps), self.parts, self.times, self.regions[self.arena]["size"],
        )  # fmt: skip
