"""What lowering makes of typical models: copies that must not be there, memory that must be shared, files that must be equal."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import trivet
from trivet import native
from trivet.api import capture
from trivet.emit import emit
from trivet.error import Error
from trivet.fbs.structs import STRUCTS, DType, MapOp, Op, RegionKind, RnnKind
from trivet.ir import ops
from trivet.ir.graph import Graph, Module
from trivet.ir.types import Type
from trivet.passes.select_kernels import give_scratch
from trivet.pipeline import Context, Options, run_passes
from trivet.reader import FileView
from trivet.targets.base import Memory, find
from trivet.targets.cpu_part import number_bits, registers
from trivet.writer import records

SCHEMA = Path(__file__).resolve().parents[2] / "schema"


def lower(model: nn.Module, args: tuple, **more: object) -> tuple[Module, trivet.Program]:
    torch.manual_seed(0)
    module = capture(model.eval(), args, **more)
    context = Context("cpu")
    run_passes(module, context)
    return module, emit(module, context)


def agree(program: trivet.Program, model: nn.Module, *args: torch.Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(trivet.load(program, threads=1)(*args), model(*args), rtol=1e-4, atol=1e-5)


def copies(module: Module) -> int:
    return sum(g.plan.copies for g in module.entries.values())


class Cache(nn.Module):
    """Attention over a cache that is written in place; embedding and head are one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(50, 32)
        self.qkv = nn.Linear(32, 96)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("k", torch.zeros(1, 4, 16, 8))
        self.register_buffer("v", torch.zeros(1, 4, 16, 8))

    def forward(self, ids: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(self.emb(ids)).chunk(3, -1))
        self.k.index_copy_(2, pos, k)
        self.v.index_copy_(2, pos, v)
        mask = torch.arange(16)[None, :] <= pos[:, None]
        y = nn.functional.scaled_dot_product_attention(q, self.k, self.v, attn_mask=mask)
        return self.head(y.transpose(1, 2).flatten(2))


def test_cache_is_written_in_place() -> None:
    model = Cache()
    args = (torch.tensor([[1, 2, 3]]), torch.tensor([0, 1, 2]))
    module, program = lower(model, args)
    assert copies(module) == 0
    graph = module.entries["forward"]
    for state, value in graph.writes:
        assert value.placement is not None and value.placement.root.state is state
    weights = sum(s.bound for s in graph.plan.storages if s.kind == RegionKind.const_)
    assert weights < 4 * (50 * 32 + 32 * 96 + 96) + 2048  # the tied weight is there once
    agree(program, model, *args)


def test_tied_weights_are_stored_once() -> None:
    class Big(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(20000, 64)
            self.head = nn.Linear(64, 20000, bias=False)
            self.head.weight = self.emb.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.emb(ids))

    model = Big()
    args = (torch.tensor([[1, 19999]]),)
    _, program = lower(model, args)
    assert len(program.to_bytes()) < 20000 * 64 * 4 + 10000
    agree(program, model, *args)


def test_concat_is_written_in_place() -> None:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(24, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x).relu()
            z = self.b(y)
            return self.c(torch.cat([y, z, z + 1], 1)).mean((2, 3))

    model = Skip()
    args = (torch.randn(1, 4, 12, 12),)
    module, program = lower(model, args)
    graph = module.entries["forward"]
    assert copies(module) == 0
    whole = next(n for n in graph.nodes if n.op == "concat")
    assert all(v is not None and v.placement.root is whole.outputs[0].placement.root for v in whole.inputs)
    agree(program, model, *args)


def test_attention_heads_need_no_copy() -> None:
    model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
    args = (torch.randn(2, 10, 32),)
    module, program = lower(model, args)
    assert copies(module) == 0
    agree(program, model, *args)


def test_residual_chain_runs_in_place() -> None:
    model = nn.Sequential(
        *[nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.LayerNorm(64), nn.Softmax(-1)) for _ in range(4)]
    )
    module, program = lower(model, (torch.randn(8, 64),))
    size = 8 * 64 * 4
    assert module.entries["forward"].plan.arena[0] <= 3 * size
    agree(program, model, torch.randn(8, 64))


def test_states_that_swap() -> None:
    class Swap(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("a", torch.zeros(4))
            self.register_buffer("b", torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b = self.a.clone(), self.b.clone()
            self.a.copy_(b)
            self.b.copy_(a + x)
            return a - b

    model, args = Swap(), (torch.randn(4),)
    _, program = lower(model, args)
    net = trivet.load(program)
    fresh = Swap()
    for _ in range(4):
        torch.testing.assert_close(net(*args), fresh(*args))


def test_dynamic_sizes_are_rows_of_the_table() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.l(x), y], 1).flatten(0, 1)

    n, m = torch.export.Dim("n", min=1, max=8), torch.export.Dim("m", min=2, max=16)
    model, args = Net(), (torch.randn(3, 4, 8), torch.randn(3, 5, 8))
    module, program = lower(model, args, dynamic_shapes=({0: n, 1: m}, {0: n}))
    assert copies(module) <= 1
    view = FileView(program.to_bytes()).entries[0]
    assert not np.any(view.storages["flags"])  # bounded: planned at the bound
    net = trivet.load(program)
    for a, b in ((1, 2), (8, 16), (2, 7)):
        x, y = torch.randn(a, b, 8), torch.randn(a, 5, 8)
        torch.testing.assert_close(net(x, y), model(x, y), rtol=1e-4, atol=1e-5)


def test_entries_share_weights() -> None:
    base = nn.Linear(300, 300)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = base

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(self.base(x))

    one = trivet.export(base.eval(), (torch.randn(1, 300),))
    two = trivet.export({"a": (base.eval(), (torch.randn(1, 300),)), "b": (Twice().eval(), (torch.randn(2, 300),))})
    assert len(two.to_bytes()) < len(one.to_bytes()) + 10000
    net = trivet.load(two)
    x = torch.randn(2, 300)
    torch.testing.assert_close(net.entry("b")(x), Twice()(x), rtol=1e-4, atol=1e-5)


def test_two_memories_run(tmp_path: Path) -> None:
    model, x = (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(4 * 144, 5)),
        torch.randn(1, 3, 16, 16),
    )
    module = capture(model.eval(), (x,))
    context = Context("cpu", Options(memories=(Memory("dtcm", 0, 4096), Memory("sram", 1))))
    run_passes(module, context)
    arena = module.entries["forward"].plan.arena
    assert 0 < arena[0] <= 4096 < arena[1]
    agree(emit(module, context), model, x)
    with pytest.raises(Error, match=r"'sram' has 100 bytes.*the largest at time"):
        run_passes(capture(model.eval(), (x,)), Context("cpu", Options(memories=(Memory("sram", 0, 100),))))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.rnn, self.out = nn.Conv1d(3, 8, 3), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, _ = self.rnn(self.conv(x).relu().transpose(1, 2))
        z = torch.sort(self.out(y), -1)
        return z.values.softmax(-1), z.indices


def test_same_input_same_bytes() -> None:
    def make() -> bytes:
        torch.manual_seed(3)
        return bytes(lower(Small(), (torch.randn(1, 3, 20),))[1])

    assert make() == make()


@pytest.mark.skipif(shutil.which("flatc") is None, reason="flatc is not installed")
def test_flatc_reads_what_is_emitted(tmp_path: Path) -> None:
    _, program = lower(Small(), (torch.randn(1, 3, 20),))
    path = program.save(tmp_path / "net.trv")

    def flatc(file: Path, schema: str) -> dict:
        subprocess.run(["flatc", "--json", "--strict-json", "--raw-binary", "-o", str(tmp_path), str(SCHEMA / schema), "--",
                        str(file)], check=True, capture_output=True)  # fmt: skip
        text = (tmp_path / file.with_suffix(".json").name).read_text()
        return json.loads(re.sub(r": (-?)inf\b", r": \1Infinity", text))  # flatc's spelling of an infinite bound

    head = flatc(path, "program.fbs")
    entry = head["entries"][0]
    assert entry["name"] == "forward" and entry["input_names"] == ["x"]
    assert {r["kind"] for r in entry["regions"]} == {"const_", "arena", "io"}
    part = tmp_path / "part.bin"
    part.write_bytes(bytes(entry["parts"][0]["data"]))
    cpu = flatc(part, "cpu.fbs")
    assert {c["op"] for c in cpu["commands"]} >= {"conv", "rnn", "matmul", "sort", "softmax"}
    assert cpu["conv_"][0]["act"] == "clamp" and cpu["conv_"][0]["kernel"][0] == 3
    segment = head["segments"][head["debug_segment"]]
    debug = tmp_path / "debug.bin"
    debug.write_bytes(path.read_bytes()[segment["offset"] : segment["offset"] + segment["size"]])
    times = flatc(debug, "debug.fbs")["entries"][0]["times"]
    assert any(t.get("module") == "conv" and "test_lowering.py" in t.get("source", "") for t in times)


def test_save_external_and_stripped(tmp_path: Path) -> None:
    model, args = nn.Linear(200, 200).eval(), (torch.randn(1, 200),)
    _, program = lower(model, args)
    whole = program.save(tmp_path / "a.trv").stat().st_size
    head = program.save(tmp_path / "b.trv", weights="external", debug=False).stat().st_size
    assert head < 4000 < whole and (tmp_path / "b.trv.weights").stat().st_size > 160000
    net = trivet.load(tmp_path / "b.trv", weights=tmp_path / "b.trv.weights")
    torch.testing.assert_close(net(*args), model(*args), rtol=1e-4, atol=1e-5)
    again = trivet.Program.read(tmp_path / "a.trv")
    assert str(again).splitlines()[:4] == str(program).splitlines()[:4]
    assert "lower bound" in str(program) and "1 matmul" in str(program)


def test_scratch_is_what_the_kernels_ask_for() -> None:
    targets = find("cpu")
    lib = native.library()
    for kind in RnnKind:
        for packed in (False, True):
            for proj in (0, 3):
                if proj and kind != RnnKind.lstm:
                    continue
                g = Graph("g")
                gates = {RnnKind.lstm: 4, RnnKind.gru: 3}.get(kind, 1) * 7
                wide = proj or 7
                x = g.value(Type(DType.f32, (5, 9, 11)))
                inputs = [x, g.const(torch.zeros(gates, 11)), g.const(torch.zeros(gates, wide)), *[None] * 4,
                          g.const(torch.zeros(proj, 7)) if proj else None]  # fmt: skip
                types = [Type(DType.f32, (5, 9, wide)), Type(DType.f32, (9, wide)), Type(DType.f32, (9, 7))]
                g.node("rnn", inputs, types if kind == RnnKind.lstm else types[:2], ops.Rnn(kind, packed=packed))
                give_scratch(g, g.nodes[0], targets)
                attrs = records("RnnAttrs", [{"kind": kind, "packed": packed}])
                assert g.nodes[0].tmp[0].shape == (native.rnn_tmp_bytes(attrs, DType.f32, 9, 11, 7, proj),)
    for dtype in (DType.f32, DType.i64, DType.u8):
        for n in (0, 1, 2, 33):
            g = Graph("g")
            types = [Type(dtype, (4, n)), Type(DType.i64, (4, n))]
            g.node("sort", [g.value(Type(dtype, (4, n)))], types, ops.Sort(1))
            give_scratch(g, g.nodes[0], targets)
            want = lib.lib.trvk_sort_tmp_bytes(dtype, n) if hasattr(lib.lib, "trvk_sort_tmp_bytes") else None
            have = g.nodes[0].tmp[0].shape[0] if g.nodes[0].tmp else 0
            assert have == (want if want is not None else (0 if n <= 1 else n * (32 if dtype == DType.i64 else 16)))


def test_registers_are_reused() -> None:
    f = DType.f32
    code = [ops.Instr(MapOp.load, f, (), 0)]
    for i in range(100):
        code.append(ops.Instr(MapOp.sin, f, (i,)))
    rows, count = registers(code, lambda d: 0)
    assert count == 1 and len(rows) == 101
    wide = [ops.Instr(MapOp.load, f, (), i) for i in range(40)]
    total = 0
    for i in range(1, 40):
        wide.append(ops.Instr(MapOp.add, f, (total, i)))
        total = len(wide) - 1
    with pytest.raises(Error, match="registers"):
        registers(wide, lambda d: 0)
    assert number_bits(-1, DType.i32) == 0xFFFFFFFFFFFFFFFF
    assert number_bits(1.0, DType.f16) == 0x3FF0000000000000


def test_targets_are_read_with_clear_errors() -> None:
    assert str(find("cpu")) == "cpu" and str(find(" cpu.arm64 ")) == "cpu.arm64"
    for text, why in (("gpu", "no delegate 'gpu'"), ("cpu > cpu", "twice"), ("", "no name"), ("cpu > ", "no name"),
                      ("cpu.z80", "unknown variant"), ("CPU", "no name")):  # fmt: skip
        with pytest.raises(Error, match=why):
            find(text)


def test_readme_gives_the_structs_as_they_are() -> None:
    text = (SCHEMA / "README.md").read_text()
    for name, dtype in STRUCTS.items():
        row = re.search(rf"^\| {name} \| (\d+) \| (.*) \|$", text, re.M)
        assert row is not None, f"{name} is not described"
        assert int(row.group(1)) == dtype.itemsize
        described = {m[0]: (m[1], int(m[2])) for m in re.findall(r"(\w+) (\w+(?:\[\d\])?) @(\d+)", row.group(2))}
        for field, info in (dtype.fields or {}).items():
            base, shape = info[0].subdtype or (info[0], ())
            assert described[field] == (base.str.lstrip("<|") + (f"[{shape[0]}]" if shape else ""), info[1])


def in_place(op: Op, inputs: list, spot: int, attrs: object) -> None:
    """A kernel gives the same with its output over an input."""
    out = torch.empty_like(inputs[spot])
    native.run_op(op, inputs, [out], attrs, tiles=3)
    native.run_op(op, inputs, [inputs[spot]], attrs, tiles=3)
    assert torch.equal(out, inputs[spot])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_kernels_that_may_overwrite_an_input(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for shape in ((2, 5, 7, 33), (1, 64, 6, 6), (3, 1, 70, 17)):
        for order in ((0, 1, 2, 3), (0, 3, 1, 2), (3, 0, 1, 2)):

            def x() -> torch.Tensor:
                return torch.randn([shape[i] for i in np.argsort(order)]).to(dtype).permute(order)

            for axis in range(4):
                for log in (0, 1):
                    in_place(Op.softmax, [x().reshape(shape)], 0, records("SoftmaxAttrs", [{"axis": axis, "log": log}]))
            for kind, axes, groups in ((0, 1, 1), (0, 3, 1), (1, 2, 1), (2, 1, shape[1])):
                t = x().reshape(shape)
                w = torch.randn(shape[1:2] if kind == 2 else shape[4 - axes :]).to(dtype)
                attrs = records("NormAttrs", [{"kind": kind, "axes": axes, "groups": groups, "eps": 1e-5}])
                in_place(Op.norm, [t, w, w], 0, attrs)
    for m, k, n in ((1, 100, 40), (7, 33, 17), (65, 1600, 48)):
        for act in (0, 1, 6):
            a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
            for r in (torch.randn(m, n).to(dtype), torch.randn(n, m).to(dtype).t()):
                in_place(Op.matmul, [a, b, None, r], 3, records("MatmulAttrs", [{"act": act, "lo": 0.1, "hi": 2.0}]))
    for groups, kernel, stride in ((1, 3, 1), (2, 1, 1), (16, 3, 2), (1, 3, 2)):
        t = torch.randn(2, 13, 13, 16).to(dtype).permute(0, 3, 1, 2)
        w = torch.randn(16, 16 // groups, kernel, kernel).to(dtype)
        size = (13 + 2 * (kernel // 2) - kernel) // stride + 1
        r = torch.randn(2, size, size, 16).to(dtype).permute(0, 3, 1, 2)
        attrs = records("ConvAttrs", [{"nd": 2, "groups": groups, "stride": [stride] * 2, "pad": [kernel // 2] * 2,
                                       "dilation": [1, 1], "act": 1, "lo": 0.0, "hi": 6.0}])  # fmt: skip
        in_place(Op.conv, [t, w, None, r], 3, attrs)
