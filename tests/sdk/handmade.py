"""Programs written by hand with trivet.writer: the runtime's tests need neither torch nor the exporter."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import numpy as np

from trivet import writer
from trivet.fbs.structs import DimOp, DType, MapOp, Op, RegionKind, StepKind
from trivet.writer import records

NO = 0xFFFFFFFF
INF = 1 << 62
SIZES = {
    DType.bool: 1,
    DType.u8: 1,
    DType.i64: 8,
    DType.f32: 4,
    DType.f64: 8,
    DType.i32: 4,
    DType.bf16: 2,
    DType.f16: 2,
}


@dataclass
class Plan:
    """Collects the vectors of one entry. Values get storages of their own; arenas are packed one after the other."""

    name: str = "forward"
    dims: list = field(default_factory=list)
    regions: list = field(default_factory=list)
    storages: list = field(default_factory=list)
    values: list = field(default_factory=list)
    commands: list = field(default_factory=list)
    args: list = field(default_factory=list)
    code: list = field(default_factory=list)
    attrs: dict = field(default_factory=dict)
    inputs: list = field(default_factory=list)
    outputs: list = field(default_factory=list)
    input_names: list = field(default_factory=list)
    output_names: list = field(default_factory=list)
    value_names: list = field(default_factory=list)
    where: list = field(default_factory=list)
    splits: list = field(default_factory=list)  # commands that end a step (they write dimensions)
    arena: int = 0

    def __post_init__(self):
        self.number(0)
        self.number(1)
        self.regions.append({"kind": RegionKind.arena, "align": 64, "segment": -1, "id": 0})

    # -- dimensions
    def row(self, **kw):
        if kw not in self.dims:
            self.dims.append(kw)
        return self.dims.index(kw)

    def number(self, n):
        return self.row(op=DimOp.const_, min=n, max=n)

    def size(self, slot, axis, low, high):
        return self.row(op=DimOp.input, a=slot, b=axis, min=low, max=high)

    def data(self, low, high):
        return self.row(op=DimOp.data, min=low, max=high)

    def mul(self, a, b):
        low, high = (self.dims[a][k] * self.dims[b][k] for k in ("min", "max"))
        if low == high:
            return self.number(low)
        return a if b == 1 else b if a == 1 else self.row(op=DimOp.mul, a=a, b=b, min=low, max=min(high, INF))

    # -- memory
    def value(self, name, dtype, rows, region=None, home=True, first=0, last=None):
        """A dense value. rows: of the dimension table. region: None for the arena."""
        strides, step = [], 1
        for r in reversed(rows):
            strides.append(step)
            step = self.mul(step, r)
        total = self.mul(step, self.number(SIZES[dtype]))
        bound = self.dims[total]["max"]
        dynamic = self.dims[total]["min"] != bound
        offset = 0
        if region is None:
            region, offset = 0, self.arena
            self.arena += -(-bound // 64) * 64
        self.storages.append({"offset": offset, "size": bound, "first": first, "last": NO if last is None else last,
                              "size_dim": total if dynamic else 0, "region": region, "align_log2": 6,
                              "rank": len(self.storages)})  # fmt: skip
        self.values.append({"storage": len(self.storages) - 1, "dtype": dtype, "rank": len(rows), "dim": list(rows),
                            "stride": strides[::-1]})  # fmt: skip
        self.value_names.append(name)
        return len(self.values) - 1

    def io(self, name, dtype, rows, is_input):
        slot = len(self.inputs) if is_input else ~len(self.outputs)  # outputs count on after the inputs
        v = self.value(name, dtype, rows, region=len(self.regions))
        bound = self.storages[-1]["size"]
        self.storages[-1]["align_log2"] = SIZES[dtype].bit_length() - 1  # callers align to elements only
        self.regions.append({"kind": RegionKind.io, "align": SIZES[dtype], "segment": -1, "slot": slot, "size": bound, "home": 0,
                             "home_offset": self.arena, "id": len(self.regions)})  # fmt: skip
        self.arena += -(-bound // 64) * 64
        (self.inputs if is_input else self.outputs).append(v)
        (self.input_names if is_input else self.output_names).append(name)
        return v

    def input(self, name, dtype, rows):
        return self.io(name, dtype, rows, True)

    def output(self, name, dtype, rows):
        return self.io(name, dtype, rows, False)

    def state(self, name, dtype, rows, id=100):
        self.regions.append({"kind": RegionKind.state, "align": 64, "segment": -1, "id": id})
        v = self.value(name, dtype, rows, region=len(self.regions) - 1)
        self.regions[-1]["size"] = self.storages[-1]["size"]
        return v

    # -- work
    def command(self, op, ins, outs, attrs=None, where=("", "")):
        from trivet.writer import attrs_struct

        rows = self.attrs.setdefault(op, [])
        rows.append(attrs or {})
        self.commands.append({"op": op, "n_in": len(ins), "n_out": len(outs), "args": len(self.args),
                              "attrs": len(rows) - 1, "time": len(self.commands)})  # fmt: skip
        self.args += [*ins, *outs]
        self.where.append((op.name, *where))
        assert attrs_struct(op)
        if op in (Op.nonzero, Op.item):
            self.splits.append(len(self.commands))

    def map(self, ins, out, code, where=("", "")):
        """code: (op, dtype, a, b, value); each writes the next register."""
        at = len(self.code)
        for i, (op, dtype, a, b, value) in enumerate(code):
            self.code.append({"op": op, "dtype": dtype, "dst": i, "a": a, "b": b, "value": value})
        self.command(Op.map, ins, [out], {"code": at, "count": len(code), "regs": len(code)}, where)

    def binary(self, op, a, b, out, dtype=DType.f32, where=("", "")):
        self.map([a, b], out, [(MapOp.load, dtype, 0, 0, 0), (MapOp.load, dtype, 1, 0, 0), (op, dtype, 0, 1, 0)], where)

    def entry(self, signature=""):
        """EntrySpec and DebugSpec."""
        times = max(1, len(self.commands))
        storages = [dict(s, last=times - 1 if s["last"] == NO else s["last"]) for s in self.storages]
        order = sorted(range(len(storages)), key=lambda i: storages[i]["first"])
        new = {old: i for i, old in enumerate(order)}
        values = [dict(v, storage=new[v["storage"]]) for v in self.values]
        self.regions[0]["size"] = self.arena
        regions = [dict(r, slot=len(self.inputs) + ~r["slot"]) if r.get("slot", 0) < 0 else r for r in self.regions]
        bounds = [0, *self.splits]
        bounds = [b for b in bounds if b < len(self.commands)] + [len(self.commands)]
        steps, parts = [], []
        for first, last in zip(bounds, bounds[1:]):
            chunk = self.commands[first:last]
            flags = int(any(c["op"] in (Op.nonzero, Op.item) for c in chunk))
            steps.append({"kind": StepKind.run, "flags": flags, "count": 1, "a": len(parts), "time": first})
            attrs = {op: records(writer.attrs_struct(op), rows) for op, rows in self.attrs.items()}
            data = writer.cpu_part(
                writer.CpuPartSpec(records("Command", chunk), self.args, records("MapInstr", self.code), attrs)
            )
            parts.append(writer.PartSpec("cpu", "cpu.1", data))
        spec = writer.EntrySpec(
            self.name, records("Dim", self.dims), records("Region", regions),
            records("Storage", [storages[i] for i in order]), records("Value", values), self.inputs, self.outputs,
            self.input_names, self.output_names, records("Step", steps), parts, times, 0,
            json.dumps(signature) if signature else "")  # fmt: skip
        debug = writer.DebugSpec(self.value_names, [writer.DebugTimeSpec(op, m, s, "cpu") for op, m, s in self.where])
        return spec, debug


def program(*plans, name="handmade", debug=True):
    made = [p.entry() if isinstance(p, Plan) else p for p in plans]
    return writer.write_bytes(writer.ProgramSpec(name, [e for e, _ in made], (), [d for _, d in made] if debug else ()))


def add(dtype=DType.f32, rows=(2, 3), names=("a", "b"), low_high=None):
    """y = a + b. low_high: axis 0 dynamic."""
    p = Plan()
    dims = [p.number(n) for n in rows]
    if low_high:
        dims[0] = p.size(0, 0, *low_high)
    a = p.input(names[0], dtype, dims)
    b_dims = dims
    if low_high:
        b_dims = [p.size(1, 0, *low_high), *dims[1:]]
    b = p.input(names[1], dtype, b_dims)
    y = p.output("y", dtype, dims)
    p.binary(MapOp.add, a, b, y, dtype, ("block.add", "net.py:7"))
    return program(p)


def counter():
    """Two entries over one state: step(x): s += x, returns s; peek(): returns s."""
    p = Plan("step")
    two = [p.number(2)]
    x, s = p.input("x", DType.f32, two), p.state("s", DType.f32, two)
    y = p.output("y", DType.f32, two)
    p.binary(MapOp.add, s, x, s)
    p.command(Op.copy, [s], [y])
    q = Plan("peek")
    two = [q.number(2)]
    s = q.state("s", DType.f32, two)
    y = q.output("y", DType.f32, two)
    q.command(Op.copy, [s], [y])
    return program(p, q)


def picker():
    """positions of the non-zero elements: a size that the data decides."""
    p = Plan()
    six = [p.number(6)]
    x = p.input("x", DType.f32, six)
    n = p.data(0, 6)
    y = p.output("y", DType.i64, [n, p.number(1)])
    p.command(Op.nonzero, [x], [y], {"dim": n})
    return program(p)


def float_bits(x: float) -> int:
    return int(np.float64(x).view(np.uint64))
