"""The report of a quantisation: rows of the lowered program, dB of the graphs, text, JSON, the file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trivet
from trivet import Error
from trivet.fbs.structs import DType
from trivet.ir import ops
from trivet.ir.graph import Graph, Loc, Module
from trivet.ir.types import Type, per_tensor
from trivet.quantize.measure import Measured, effects, measure
from trivet.quantize.report import Layer, Report, Step, attach, decibel, op_text, read_layers, sqnr

REPORT = Report(
    "w8a8", 3,
    [Layer("forward", "a.conv", "conv2d + relu", "net.py:5", "integer", "i8", "i8", 900, 31.25, 40.0),
     Layer("forward", "b", "linear", "", "weights", "f32", "i4", 50, 22.0, None),
     Layer("forward", "c", "softmax", "net.py:9", "float", "f32", "", 50, None, None, "no integer form along axis 0")],
    4000, 1000, [Step([], "", 0.5, False), Step(["conv2d at a"], "i16", 0.9, True)], 0.9, 0.95, ["a note"],
)  # fmt: skip


def test_text() -> None:
    text = str(REPORT)
    for part in ("w8a8, 3 calibration batches: 3 kernels, 1 k multiply-adds", "in integers: 1 kernels (33 %), 90.0 %",
                 "4,000 bytes before, 1,000 after (0.250)", "metric: 0.9, in float 0.95 (-0.05)",
                 "search: 0.5 is too low, as the recipe says", "search: 0.9 holds, 1 layers in i16: conv2d at a",
                 "31.2   40.0  integer  i8", "conv2d + relu at a.conv", "softmax at c: no integer form", "a note"):  # fmt: skip
        assert part in text, part
    assert text.index("a.conv") < text.index("linear at b")
    worst = REPORT.table(worst=True)
    assert worst.index("linear at b") < worst.index("a.conv") < worst.index("softmax")
    assert "a.conv" not in REPORT.table(worst=True, count=1)
    assert Report().share("integer") == (0, 0) and "0 kernels" in str(Report())


def test_json_round_trip() -> None:
    data = json.loads(json.dumps(REPORT.to_json()))
    assert data["version"] == 1 and data["coverage"]["integer"] == {"macs": 0.9, "kernels": pytest.approx(1 / 3)}
    data["later"], data["layers"][0]["later"] = 1, 2
    assert Report.from_json(data) == REPORT
    for bad in ({}, {"layers": [1], "search": []}, {"layers": [{}], "search": []}):
        with pytest.raises(Error, match="no report"):
            Report.from_json(bad)


def test_decibel() -> None:
    assert decibel(100, 1) == pytest.approx(20) and decibel(1, 0) == 150 and decibel(0, 1) == -150
    assert decibel(math.nan, 1) == decibel(1, math.inf) == -150
    assert sqnr(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])) == pytest.approx(20)


def test_op_text() -> None:
    assert (
        op_text("aten.conv2d.default + aten.relu.default + quantized_decomposed.quantize_per_tensor.default")
        == "conv2d + relu"
    )
    assert op_text("quantized_decomposed.dequantize_per_tensor.default") == "quantize"
    assert op_text("torchao.choose_qparams_affine.default + aten.linear.default") == "linear"
    assert op_text("") == ""


# ---- the lowered program
def value(g: Graph, dtype: DType, *shape: Any, scale: float = 0.0) -> Any:
    return g.value(Type(dtype, shape, per_tensor(scale) if scale else None))


def test_rows_of_a_graph() -> None:
    g = Graph("forward")
    x = value(g, DType.f32, 1, 4, 6, 6)
    q = value(g, DType.i8, 1, 4, 6, 6, scale=0.1)
    w, scale = g.const(torch.zeros(8 * 4 * 9, dtype=torch.int8)), g.const(torch.zeros(2, 8, dtype=torch.int32))

    def node(op: str, inputs: list[Any], y: Any, attrs: Any, module: str = "m", origin: str = "aten.op.default") -> Any:
        (out,) = g.node(op, inputs, [y.type], attrs, Loc(module, "n.py:1", origin))
        return out

    a = node("requantize", [x], q, ops.Requantize())
    conv = ops.Qconv(2, (1, 1), (1, 1), (1, 1), kernel=(3, 3), packed=True)
    b = node(
        "qconv",
        [a, w, scale, None],
        value(g, DType.i8, 1, 8, 6, 6, scale=0.1),
        conv,
        "c",
        "aten.conv2d.default + aten.relu.default",
    )
    c = node("copy", [b], value(g, DType.i8, 1, 8, 6, 6, scale=0.1), ops.Copy(), "d", "aten.cat.default")
    d = node("requantize", [c], value(g, DType.f32, 1, 8, 6, 6), ops.Requantize())
    w4 = g.const(torch.zeros(6, 10, dtype=torch.uint8))
    half = g.const(torch.zeros(1, 10))
    e = node(
        "qmatmul",
        [d, w4, half, None, None],
        value(g, DType.f32, 1, 8, 6, 10),
        ops.Qmatmul(bits=4, group=6),
        "e",
        "aten.linear.default",
    )
    f = node(
        "qmatmul",
        [d, w4, half, None, None],
        value(g, DType.f32, 1, 8, 6, 10),
        ops.Qmatmul(dynamic=1),
        "f",
        "aten.linear.default",
    )
    s = node("softmax", [f], value(g, DType.f32, 1, 8, 6, 10), ops.Softmax(3), "s", "aten.softmax.int")
    i = g.const(torch.zeros(3, dtype=torch.int64))
    t = node("gather", [i, i], value(g, DType.i64, 3), ops.Gather(ops.IndexKind.take, 0))
    g.inputs, g.outputs = [x], [e, s, t]
    rows = read_layers(Module("m", {"forward": g}), {s.name: "no form"})
    assert [(r.module, r.form, r.stored, r.weights, r.macs, r.why) for r in rows] == [
        ("c", "integer", "i8", "i8", 8 * 36 * 4 * 9, ""),
        ("e", "weights", "f32", "i4", 8 * 6 * 10 * 6, ""), ("f", "integer", "f32", "u8", 8 * 6 * 10 * 6, ""),
        ("s", "float", "f32", "", 0, "no form")]  # fmt: skip
    assert rows[0].op == "conv2d + relu" and str(rows[0]) == "conv2d + relu at c (n.py:1)"


def test_several_kernels_of_one_operator_share_its_reason() -> None:
    layers = [Layer("forward", "r", "lstm", "n.py:1") for _ in range(3)]
    attach(layers, [Measured("forward", "n", "r", "n.py:1", "lstm", 30, 35, "weights only", "lstm")])
    assert [(x.why, x.nodes, x.sqnr) for x in layers] == [("weights only", ["lstm"], None)] * 3


def test_attach_by_place_and_order() -> None:
    def layer(module: str, op: str, source: str = "n.py:1", entry: str = "forward") -> Layer:
        return Layer(entry, module, op, source)

    layers = [
        layer("a", "conv2d + relu"),
        layer("twice", "linear"),
        layer("twice", "linear"),
        layer("b", "conv2d"),
        layer("a", "linear"),
    ]
    rows = [Measured("forward", "n0", "a", "n.py:1", "conv2d", 30, 35), Measured("forward", "n1", "a", "n.py:1", "relu", 31, 36),
            Measured("forward", "n2", "twice", "n.py:1", "linear", 20, None), Measured("forward", "n3", "twice", "n.py:1", "linear", 10, 12),
            Measured("other", "n4", "b", "n.py:1", "conv2d", 1, 1)]  # fmt: skip
    for i, row in enumerate(rows):
        row.twin = f"t{i}"
    attach(layers, rows)
    assert [x.nodes for x in layers] == [["t0", "t1"], ["t2"], ["t3"], [], []]
    assert [(x.sqnr, x.alone) for x in layers] == [(31, 36), (20, None), (10, 12), (None, None), (None, None)]


# ---- dB
class Stores(torch.fx.Tracer):
    def is_leaf_module(self, m: nn.Module, name: str) -> bool:
        return True


def pair(scale: float) -> tuple[Any, Any]:
    """x + 1, then times 3: in float, and with both results stored in 8 bits at one scale."""
    import torchao.quantization.pt2e  # noqa: F401, defines the operators

    q, dq = (
        torch.ops.quantized_decomposed.quantize_per_tensor.default,
        torch.ops.quantized_decomposed.dequantize_per_tensor.default,
    )
    out = []
    for stored in (False, True):
        g = torch.fx.Graph()
        v = g.placeholder("x")
        for op, by in ((torch.ops.aten.add.Tensor, 1.0), (torch.ops.aten.mul.Tensor, 3.0)):
            v = g.call_function(op, (v, by))
            if stored:
                how = (scale, 0, -128, 127, torch.int8)
                v = g.call_function(dq, (g.call_function(q, (v, *how)), *how))
        g.output((v,))
        out.append(torch.fx.GraphModule(nn.Module(), g))
    return out[0], out[1]


def test_measure() -> None:
    floating, quantised = pair(0.25)
    x = torch.tensor([0.1, 0.3, -0.7, 2.0])
    rows = measure(floating, quantised, [((x,), {}), ((x * 2,), {})])
    assert [r.op for r in rows] == ["add", "mul"]

    def rounded(v: torch.Tensor) -> torch.Tensor:
        return (v / 0.25).round().clamp(-128, 127) * 0.25

    both = torch.cat([x, x * 2])
    a = both + 1
    assert rows[0].sqnr == pytest.approx(sqnr(a, rounded(a))) and rows[0].alone == pytest.approx(rows[0].sqnr)
    assert rows[1].sqnr == pytest.approx(sqnr(a * 3, rounded(rounded(a) * 3)))  # the noise of both
    assert rows[1].alone == pytest.approx(sqnr(a * 3, rounded(rounded(a) * 3)))
    coarse = measure(*pair(4.0), [((x,), {})], alone=False)
    assert coarse[0].sqnr < rows[0].sqnr and coarse[0].alone is None


def test_effects_on_the_results() -> None:
    floating, quantised = pair(0.25)
    x = torch.tensor([0.1, 0.3, -0.7, 2.0])

    def rounded(v: torch.Tensor) -> torch.Tensor:
        return (v / 0.25).round().clamp(-128, 127) * 0.25

    want = (x + 1) * 3
    found = effects(floating, quantised, ((x,), {}))
    by_op = [sqnr(want, rounded(x + 1) * 3), sqnr(want, rounded(rounded(x + 1) * 3))]  # an operator reads stored inputs
    assert list(found) == ["add_tensor", "mul_tensor"] and list(found.values()) == pytest.approx(by_op)


# ---- the file
def test_file_keeps_the_report(tmp_path: Path) -> None:
    from dataclasses import replace

    program = trivet.export(nn.ReLU(), (torch.randn(4),))
    assert program.quantization is None and "quantization" not in program.summary()
    spec = replace(program._spec, quantization=json.dumps(REPORT.to_json()))  # type: ignore[type-var, arg-type]
    program = trivet.Program.of(spec)
    assert program.quantization == REPORT and "quantised by w8a8" in str(program)
    assert program.summary()["quantization"]["recipe"] == "w8a8"
    path = program.save(tmp_path / "net.trv")
    assert trivet.Program.read(path).quantization == REPORT
    assert torch.equal(trivet.load(path)(torch.ones(4)), torch.ones(4))
    stripped = program.save(tmp_path / "stripped.trv", debug=False)
    assert trivet.Program.read(stripped).quantization is None
    assert b"w8a8" not in stripped.read_bytes()
