"""The CPU driver by itself: accepts, opens and runs a part against a hand-made view; refuses hostile ones."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest
import torch
from basic import Code, MapOp

from trivet import native
from trivet.fbs.structs import STRUCTS, DimOp, DType, Op, RegionKind
from trivet.writer import CpuPartSpec, attrs_struct, cpu_part, records

NONE = 0xFFFFFFFF
INF = (1 << 63) - 1


class Plan:
    """A view of values in one arena (region 0), one input (1) and constants (2), and a CPU device."""

    def __init__(self) -> None:
        self.n = native.library()
        self.ffi = self.n.ffi
        self.dims: list[tuple[int, int, int]] = []  # op, min, max
        self.present: list[int] = []
        self.values: list[dict[str, Any]] = []
        self.storages: list[dict[str, Any]] = []
        self.memory = [np.zeros(1 << 16, np.uint8) for _ in range(3)]
        self.used = [0, 0, 0]
        self.row(0), self.row(1)
        self.commands: list[dict[str, int]] = []
        self.args: list[int] = []
        self.code: list[Any] = []
        self.attrs: dict[Op, list[dict[str, Any]]] = {}

    def row(self, n: int, op: DimOp = DimOp.const_, low: int | None = None, high: int | None = None) -> int:
        self.dims.append((op, n if low is None else low, n if high is None else high))
        self.present.append(n)
        return len(self.dims) - 1

    def value(self, shape: list[int], dtype: DType = DType.f32, region: int = 0, rows: list[int] | None = None) -> int:
        size = int(np.prod(shape)) * 8
        self.storages.append({"offset": self.used[region], "size": size, "region": region})
        self.used[region] += -(-size // 64) * 64
        strides = [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]
        self.values.append({"storage": len(self.storages) - 1, "dtype": dtype, "rank": len(shape),
                            "dim": rows or [self.row(s) for s in shape], "stride": [self.row(s) for s in strides]})  # fmt: skip
        return len(self.values) - 1

    def array(self, value: int, dtype: type, count: int) -> np.ndarray:
        s = self.storages[self.values[value]["storage"]]
        return self.memory[s["region"]][s["offset"] :][: count * np.dtype(dtype).itemsize].view(dtype)

    def command(self, op: Op, inputs: list[int], outputs: list[int], tmp: list[int] = (), **attrs: Any) -> None:  # type: ignore[assignment]
        rows = self.attrs.setdefault(op, [])
        rows.append(attrs)
        self.commands.append({"op": op, "n_in": len(inputs), "n_out": len(outputs), "n_tmp": len(tmp),
                              "args": len(self.args), "attrs": len(rows) - 1, "time": 10 + len(self.commands)})  # fmt: skip
        self.args += [*inputs, *outputs, *tmp]

    def add(self, a: int, b: int, y: int) -> None:
        """y = a + b"""
        c = Code()
        c.emit(MapOp.add, torch.float32, c.load(0, torch.float32), c.load(1, torch.float32))
        at = len(self.code)
        self.code += c.rows
        self.command(Op.map, [a, b], [y], code=at, count=3, regs=3)

    def data(self) -> bytes:
        return cpu_part(CpuPartSpec(records("Command", self.commands), self.args, np.array(self.code, STRUCTS["MapInstr"]),
                                    {op: records(attrs_struct(op), rows) for op, rows in self.attrs.items()}))  # fmt: skip

    def view(self) -> Any:
        ffi = self.ffi
        self.keep = [records("Value", self.values), records("Storage", self.storages),
                     records("Dim", [{"op": o, "min": a, "max": b} for o, a, b in self.dims]),
                     np.array(self.present, np.intp),
                     records("Region", [{"kind": RegionKind.arena}, {"kind": RegionKind.io, "slot": 0}, {"kind": RegionKind.const_}])]  # fmt: skip
        values, storages, dims, present, regions = self.keep
        self.bufs = ffi.new("trv_buf[3]")
        for k in range(3):
            self.bufs[k].host = ffi.cast("uint8_t *", self.memory[k].ctypes.data)
            self.bufs[k].size = len(self.memory[k])
        v = ffi.new("trv_view *")
        v.size = ffi.sizeof("trv_view")
        v.region_count, v.value_count, v.storage_count, v.dim_count = 3, len(values), len(storages), len(dims)
        v.regions, v.input_count, v.memories = self.bufs, 1, 1
        v.values = ffi.cast("trvf_value *", values.ctypes.data)
        v.storages = ffi.cast("trvf_storage *", storages.ctypes.data)
        v.offsets = ffi.cast("uint8_t *", storages.ctypes.data)
        v.offset_stride = STRUCTS["Storage"].itemsize
        v.dims = ffi.cast("trv_dim *", present.ctypes.data)
        v.dim_table = ffi.cast("trvf_dim *", dims.ctypes.data)
        v.region_table = ffi.cast("trvf_region *", regions.ctypes.data)
        self.dims_now = present
        return v


class Part:
    """A part that the driver took. status: part_need's; what: its text."""

    def __init__(self, plan: Plan, data: bytes | None = None, fmt: bytes = b"cpu.1") -> None:
        self.plan, ffi = plan, plan.ffi
        self.driver = plan.n.lib.trv_cpu_driver
        self.device_memory = ffi.new("uint64_t[]", 8)
        out = ffi.new("trv_device **")
        assert self.driver.open(self.device_memory, ffi.NULL, out) == 0
        self.device = out[0]
        self.v = plan.view()
        raw = plan.data() if data is None else data
        self.raw = np.zeros(len(raw) + 32, np.uint8)
        start = -self.raw.ctypes.data % 16
        self.raw[start : start + len(raw)] = np.frombuffer(raw, np.uint8)
        d = self.desc = ffi.new("trv_part_desc *")
        self.format = ffi.new("char[]", fmt)
        d.size, d.format, d.view = ffi.sizeof("trv_part_desc"), self.format, self.v
        d.data.data, d.data.size = ffi.cast("uint8_t *", self.raw.ctypes.data + start), len(raw)
        self.diag = ffi.new("trv_diag *")
        need = ffi.new("size_t *")
        self.status = self.driver.part_need(self.device, d, need, self.diag)
        self.what = native.text(self.diag.what) if self.status else ""
        if self.status:
            return
        self.memory = ffi.new("uint64_t[]", need[0] // 8 + 1)
        part = ffi.new("trv_part **")
        assert self.driver.part_open(self.device, d, self.memory, part) == 0
        self.part = part[0]
        r = self.r = ffi.new("trv_run *")
        r.size, r.epoch, r.shape_epoch, r.view, r.diag = ffi.sizeof("trv_run"), 1, 1, self.v, self.diag
        self.point = ffi.new("uint64_t *")

    def run(self) -> int:
        return int(self.driver.run(self.device, self.part, self.r, self.point))


def two_adds() -> Plan:
    p = Plan()
    a, b, c, y = (p.value([8]) for _ in range(4))
    p.add(a, b, c)
    p.add(c, b, y)
    p.array(a, np.float32, 8)[:] = np.arange(8)
    p.array(b, np.float32, 8)[:] = 10
    return p


def test_runs_with_hooks() -> None:
    p = two_adds()
    part = Part(p)
    assert part.status == 0, part.what
    seen: list[tuple[str, int]] = []
    begin = p.ffi.callback("void(void *, uint32_t)", lambda _, t: seen.append(("begin", t)))
    end = p.ffi.callback("void(void *, uint32_t)", lambda _, t: seen.append(("end", t)))
    hooks = p.ffi.new("trv_hooks *", {"size": p.ffi.sizeof("trv_hooks"), "begin": begin, "end": end})
    part.r.hooks = hooks
    assert part.run() == 0
    np.testing.assert_array_equal(p.array(3, np.float32, 8), np.arange(8) + 20)
    assert seen == [("begin", 10), ("end", 10), ("begin", 11), ("end", 11)]
    part.driver.part_close(part.device, part.part)
    part.driver.close(part.device)


def test_tiles_go_to_the_runner() -> None:
    p = Plan()
    p.memory[0] = np.zeros(8 << 20, np.uint8)
    n = 200_000
    a, b, y = (p.value([n]) for _ in range(3))
    p.add(a, b, y)
    p.array(a, np.float32, n)[:] = np.arange(n)
    part = Part(p)
    counts: list[int] = []

    def run(_: Any, fn: Any, ctx: Any, count: int) -> None:
        counts.append(count)
        for i in reversed(range(count)):
            fn(ctx, i)

    callback = p.ffi.callback("void(void *, void (*)(void *, uint32_t), void *, uint32_t)", run)
    runner = p.ffi.new("trv_runner *", {"run": callback, "workers": 4})
    part.r.runner = runner
    assert part.run() == 0
    np.testing.assert_array_equal(p.array(y, np.float32, n), np.arange(n))
    assert len(counts) == 1 and 2 <= counts[0] <= 16


def test_checks_run_when_a_shape_changes() -> None:
    p = Plan()
    n = p.row(8, DimOp.input, 1, 100)
    a = p.value([8], rows=[n])
    b, y = p.value([8]), p.value([8], rows=[n])
    p.add(a, b, y)
    part = Part(p)
    assert part.run() == 0
    p.dims_now[n] = 7
    part.r.epoch, part.r.shape_epoch = 2, 2
    assert part.run() == native.ARGUMENT and part.diag.time == 10
    assert "broadcast" in native.text(part.diag.what)
    p.dims_now[n] = 8
    part.r.shape_epoch = 3
    assert part.run() == 0


def test_a_bad_index_is_an_error_with_its_time() -> None:
    p = Plan()
    x, i, y = p.value([8]), p.value([2], DType.i64), p.value([2])
    p.command(Op.gather, [x, i], [y], kind=0, axis=0)
    part = Part(p)
    p.array(i, np.int64, 2)[:] = [1, 9]
    assert part.run() == native.ARGUMENT
    assert part.diag.time == 10 and "index" in native.text(part.diag.what)


def test_nonzero_writes_its_dimension_and_no_further() -> None:
    p = Plan()
    n = p.row(0, DimOp.data, 0, 100)
    x, y = p.value([8]), p.value([8, 1], DType.i64, rows=[n, 1])
    p.command(Op.nonzero, [x], [y], dim=n)
    part = Part(p)
    assert part.status == 0, part.what
    p.array(x, np.float32, 8)[:] = [0, 1, 0, 2, 3, 0, 0, 4]
    assert part.run() == 0 and p.dims_now[n] == 4
    assert p.array(y, np.int64, 8)[:4].tolist() == [1, 3, 4, 7]
    p.bufs[0].size = p.storages[1]["offset"] + 3 * 8
    p.array(y, np.int64, 8)[3] = -1
    assert part.run() == native.ARGUMENT and p.array(y, np.int64, 8)[3] == -1


# ---- refused ------------------------------------------------------------------------------------------------------------------
def refused(p: Plan, status: int, text: str, **more: Any) -> None:
    part = Part(p, **more)
    assert part.status == status and text in part.what, (part.status, part.what)


def test_hostile_parts() -> None:
    refused(two_adds(), native.VERSION, "format", fmt=b"cpu.2")
    refused(two_adds(), native.FORMAT, "damaged", data=b"")
    refused(two_adds(), native.FORMAT, "damaged", data=b"\0" * 64)
    for field, value, status, text in (
        ("op", len(Op), native.VERSION, "unknown operator"), ("op", 65535, native.VERSION, "unknown operator"),
        ("attrs", 2, native.FORMAT, "attributes"), ("args", 5, native.FORMAT, "arguments"),
        ("args", NONE, native.FORMAT, "arguments"), ("n_in", 255, native.FORMAT, "arguments"),
        ("n_out", 0, native.FORMAT, "outputs"), ("n_tmp", 1, native.FORMAT, ""),
    ):  # fmt: skip
        p = two_adds()
        p.commands[1][field] = value
        refused(p, status, text)
    for position, value, text in (
        (2, 4, "no such value"),
        (2, NONE, "no such value"),
        (0, 99, "no such value"),
        (0, NONE, "not there"),
    ):
        p = two_adds()
        p.args[position] = value
        refused(p, native.FORMAT, text)
    p = two_adds()
    p.attrs[Op.map][1]["count"] = 4
    refused(p, native.FORMAT, "map code")
    p = two_adds()
    p.values[2]["dtype"] = DType.f64
    refused(p, native.FORMAT, "another dtype")
    p = two_adds()
    p.commands[0]["op"] = Op.softmax
    refused(p, native.FORMAT, "")
    for region in (1, 2):
        p = Plan()
        a, y = p.value([8]), p.value([8], region=region)
        p.add(a, a, y)
        refused(p, native.FORMAT, "writes a constant or an input")


def test_dimensions_that_must_not_be_written() -> None:
    p = Plan()
    n = p.row(0, DimOp.data, 0, 100)
    x, y = p.value([8]), p.value([8, 1], DType.i64, rows=[n, 1])
    p.command(Op.nonzero, [x], [y], dim=0)
    refused(p, native.FORMAT, "dimension")
    p.attrs[Op.nonzero][0]["dim"] = 10_000
    refused(p, native.FORMAT, "dimension")
    p.attrs[Op.nonzero][0]["dim"] = p.row(0, DimOp.data, 0, 100)
    refused(p, native.FORMAT, "not the one written")
    p.attrs[Op.nonzero][0]["dim"] = n
    p.add(x, x, p.value([8]))
    refused(p, native.FORMAT, "must be the last")


def every_op() -> Plan:
    """One command of each basic op, for mutation."""
    p = Plan()
    f = lambda *s: p.value(list(s))  # noqa: E731
    x, i = f(4, 6), p.value([4, 6], DType.i64)
    p.add(x, x, f(4, 6))
    p.command(Op.copy, [x], [f(4, 6)])
    p.command(Op.reduce, [x], [f(4, 1)], kind=0, axes=2)
    p.command(Op.scan, [x], [f(4, 6)], kind=0, axis=1)
    p.command(Op.softmax, [x], [f(4, 6)], axis=1)
    p.command(Op.norm, [x, f(6), f(6)], [f(4, 6)], kind=0, axes=1, eps=1e-5, groups=1)
    p.command(Op.gather, [x, i], [f(4, 6)], kind=1, axis=1)
    p.command(Op.scatter, [x, i, x], [f(4, 6)], [p.value([96], DType.u8)], kind=1, axis=1, reduce=5)
    p.command(Op.pad, [x], [f(6, 8)], mode=1, lo=(1, 1))
    p.command(Op.sort, [x], [f(4, 6), p.value([4, 6], DType.i64)], [p.value([200], DType.u8)], axis=1)
    n = p.row(0, DimOp.data, 0, 100)
    p.command(Op.nonzero, [x], [p.value([24, 2], DType.i64, rows=[n, p.row(2)])], dim=n)
    return p


def test_mutated_parts_do_no_harm() -> None:
    """Random damage is refused, or runs inside its memory (run this under AddressSanitizer to see more)."""
    good = every_op()
    part = Part(good)
    assert part.status == 0, part.what
    assert part.run() == 0, native.text(part.diag.what)
    data, rng = good.data(), random.Random(7)
    taken = 0
    for _ in range(3000):
        bad = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 5))):
            bad[rng.randrange(len(bad))] = rng.choice((0, 1, 2, 8, 127, 128, 255, rng.randrange(256)))
        mutant = Part(good, bytes(bad[: rng.choice((len(bad), len(bad), rng.randrange(len(bad))))]))
        if mutant.status == 0:
            taken += 1
            mutant.run()
    assert taken > 100


def test_dispatch_is_cheap() -> None:
    """An empty command costs less than 100 ns (here a generous multiple: machines of tests are busy)."""
    p = Plan()
    x = p.value([0, 4])
    for _ in range(1000):
        p.command(Op.copy, [x], [x])
    part = Part(p)
    assert part.status == 0, part.what
    best = INF
    for _ in range(20):
        t = time.perf_counter_ns()
        assert part.run() == 0
        best = min(best, time.perf_counter_ns() - t)
    print(f"{best / 1000:.0f} ns per empty command")
    assert best / 1000 < 1000


@pytest.mark.parametrize("isa", ("ref", "none-such"))
def test_isa_by_name(isa: str) -> None:
    n = native.library()
    memory, out, name = n.ffi.new("uint64_t[]", 8), n.ffi.new("trv_device **"), n.ffi.new("char[]", isa.encode())
    config = n.ffi.new("trv_cpu_config *", {"size": n.ffi.sizeof("trv_cpu_config"), "isa": name})
    assert n.lib.trv_cpu_driver.open(memory, config, out) == (0 if isa == "ref" else native.UNSUPPORTED)
