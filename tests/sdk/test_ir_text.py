"""The text form prints and parses to the same module."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.fbs.structs import DType, MapOp
from trivet.ir import ops
from trivet.ir.dim import Dim, dim_max, floor_div
from trivet.ir.graph import Graph, Loc, Module, Placement, State, Value
from trivet.ir.parse import parse_graph, parse_module
from trivet.ir.text import print_graph, print_module, print_node
from trivet.ir.types import Type

sys.path.insert(0, str(Path(__file__).parent))
from ir_random import copy_module, random_module

SAMPLE = """module net
const @w: f32[3,4] #f288b395
const @b: f32[4] = [1, -0.5, nan, -inf]
const @flags: bool[2] = [true, false]
const @half: f16[2] = [-0.0, 1.5]
state @s: f32[4]

entry forward(%x: f32[n,3], %p: bool[]) {
  symbol n: 1..512 = size(0, 0) hint 4
  symbol m: 0..inf = 2*n + 1
  symbol u: 0..512 data
  %v1: f32[n,4] = matmul(%x, @w, @b, none) {act=clamp, hi=inf} loc("a.b", "m.py:3", "aten.mm")
  %v2: f32[n,4] = map(%v1, @s) {r0 = load.f32 0; r1 = load.f32 1; r2 = add.f32 r0 r1; r3 = const_.f32 -1e-05; r4 = mul.f32 r2 r3; r5 = dim.i64 floor_div(n, 2) + 1; r6 = cast.f32 r5; r7 = add.f32 r4 r6}
  %v3: f32[n,4], %v4: i64[n,4] = sort(%v2) {axis=1, descending=true}
  %v5: f32[1,4] = slice(%v3) {axis=0, start=n - 1}
  %v6: f32[4] = reshape(%v5)
  %v8: i64[u,1] = nonzero(%v6) {symbol="u"}
  %v7: f32[4] = if(%p, %v6)
    graph then(%a: f32[4]) {
      return %a
    }
    graph other(%a: f32[4]) {
      %c: f32[4] = map(%a, @b) {r0 = load.f32 0; r1 = load.f32 1; r2 = sub.f32 r0 r1}
      return %c
    }
  write @s = %v7
  signature "{\\"inputs\\": [\\"x\\", \\"p\\"]}"
  return %v7, %v4, @b, @flags, @half
}
"""


def test_sample_round_trips() -> None:
    module = parse_module(SAMPLE, {"w": torch.zeros(3, 4)})
    text = print_module(module)
    assert text == SAMPLE.replace("#f288b395", text.split("#")[1][:8].join(["#", ""]))
    g = module.entries["forward"]
    assert g.symbols["m"].solved == 2 * Dim.symbol("n") + 1 and g.symbols["u"].data
    assert g.nodes[0].attrs.hi == math.inf and g.nodes[0].loc == Loc("a.b", "m.py:3", "aten.mm")
    assert g.nodes[1].inputs[1] is not None and isinstance(g.nodes[1].inputs[1].state, State)
    assert g.writes[0][0] is g.nodes[1].inputs[1].state
    assert g.nodes[6].graphs[1].nodes[0].inputs[1].const is g.outputs[2].const
    assert g.signature == {"inputs": ["x", "p"]}
    assert math.copysign(1, g.outputs[4].const.data[0].item()) == -1


def test_comments_and_errors_name_the_line() -> None:
    assert parse_graph("module m // text\nentry f(%x: f32[2]) {\n// nothing\nreturn %x\n}").name == "f"
    with pytest.raises(ValueError, match=r"line 3: there is no op frob"):
        parse_graph("module m\nentry f(%x: f32[2]) {\n%y: f32[2] = frob(%x)\nreturn %y\n}")
    with pytest.raises(ValueError, match=r"line 3: there is no %z here"):
        parse_graph("module m\nentry f(%x: f32[2]) {\n%y: f32[2] = copy(%z)\nreturn %y\n}")
    with pytest.raises(ValueError, match=r"pool has no attribute axis"):
        parse_graph("module m\nentry f(%x: f32[1,2,2]) {\n%y: f32[1,2,2] = pool(%x) {axis=1}\nreturn %y\n}")
    with pytest.raises(ValueError, match="expected more, got the end"):
        parse_graph("module m\nentry f(%x: f32[2]) {")


def test_what_later_passes_fill_in_is_written_too() -> None:
    g = Graph("f")
    x = g.value(Type(DType.f32, (1, 2, 4, 4)), "x")
    x.order = (0, 2, 3, 1)
    g.inputs = [x]
    y = g.node("slice", [x], [Type(DType.f32, (1, 1, 4, 4))], ops.Slice(1, 1))[0]
    y.placement = Placement(x, 1 + Dim.symbol("n"), (32, 1, 8, 2))
    n = g.nodes[0]
    n.delegate, n.reason = "cpu", 'everything "runs" here'
    n.tmp = [g.value(Type(DType.u8, (100,)))]
    g.outputs = [y]
    text = print_graph(g)
    assert "at %x + n + 1 strides(32, 1, 8, 2)" in text and "order(0, 2, 3, 1)" in text
    again = parse_graph(text)
    assert print_graph(again) == text
    assert again.nodes[0].outputs[0].placement.root is again.inputs[0]


def test_entries_share_constants() -> None:
    module = parse_module("module m\nconst @w: f32[2]\nentry a() {\nreturn @w\n}\nentry b() {\nreturn @w\n}")
    assert module.entries["a"].outputs[0].const is module.entries["b"].outputs[0].const


def test_every_operator_round_trips() -> None:
    """Attributes of every op, with other than the default values."""
    samples: dict[str, object] = {"int": 2, "float": 0.1, "bool": True, "str": "q", "int | Dim": Dim.symbol("n") + 1,
                                  "int | Dim | None": floor_div(dim_max(Dim.symbol("n"), 3), 2),
                                  "tuple[int, ...]": (1, -2), "tuple[float, ...]": (0.5, 2.0)}  # fmt: skip
    for op, info in ops.OPS.items():
        if op in ("map", "if", "while"):
            continue
        values = {}
        for f in dataclasses.fields(info.attrs):
            kind = str(f.type)
            values[f.name] = (
                samples[kind]
                if kind in samples
                else list(getattr(__import__("trivet.fbs.structs", fromlist=[kind]), kind))[-1]
            )
        g = Graph("f")
        ins: list[Value | None] = [g.value(Type(DType.f32, (2,))) for _ in range(3)]
        g.inputs = [v for v in ins if v is not None]
        g.outputs = g.node(op, [*ins, None], [Type(DType.f32, (Dim.symbol("n"),))], info.attrs(**values))
        again = parse_graph(print_graph(g))
        assert again.nodes[0].attrs == g.nodes[0].attrs and print_graph(again) == print_graph(g)
        assert print_node(again.nodes[0]) == print_node(g.nodes[0])


@given(st.sampled_from(list(MapOp)), st.floats(), st.integers(-(2**63), 2**63 - 1))
def test_every_instruction_round_trips(op: MapOp, x: float, k: int) -> None:
    first = (ops.Instr(MapOp.const_, DType.f32, (), x), ops.Instr(MapOp.const_, DType.i64, (), k))
    value = {MapOp.load: 0, MapOp.iota: 1, MapOp.dim: Dim.symbol("n") * 3 - 1, MapOp.const_: 0.5}.get(op)
    code = (*first, ops.Instr(op, DType.f32, () if value is not None else (0, 1), value))
    g = Graph("f", inputs=[Value("x", Type(DType.f32, ()))])
    g.outputs = g.node("map", list(g.inputs), [Type(DType.f32, ())], ops.Map(code))
    text = print_graph(g)
    assert print_graph(parse_graph(text)) == text
    assert repr(parse_graph(text).nodes[0].attrs) == repr(ops.Map(code))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**40), symbolic=st.booleans())
def test_random_modules_round_trip(seed: int, symbolic: bool) -> None:
    module, _ = random_module(Random(seed), symbolic)
    again = copy_module(module)
    assert print_module(again) == print_module(module)
    assert isinstance(again, Module)
