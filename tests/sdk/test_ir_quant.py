"""Quantisation as part of types: text form, verifier, what moving values and passes keep."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.error import Error
from trivet.fbs.structs import DType, IndexKind, ReduceKind
from trivet.ir import ops
from trivet.ir.builder import Builder
from trivet.ir.carry import Mismatch, carried
from trivet.ir.evaluate import evaluate, evaluate_node
from trivet.ir.graph import Graph, Module, Node, Value
from trivet.ir.interop import dtype_of
from trivet.ir.parse import parse_graph, parse_module
from trivet.ir.reference_quant import dequantize
from trivet.ir.rewrite import Rewriter
from trivet.ir.text import print_module, scale_arrays
from trivet.ir.types import Quant, Type, per_tensor
from trivet.ir.verify import verify
from trivet.passes.canonicalize import canonicalize
from trivet.passes.fold_constants import fold_constants
from trivet.pipeline import Context

SAMPLE = """module net
const @w: i8[2,4]{axis=0, scale=[0.5, 0.25]} = [1, 2, 3, 4, 5, 6, 7, 8]
const @q: u8[4,12]{axis=1, group=4, scale=#SCALE, zero=8, offset=#OFFSET, bits=4} #00112233
const @c: i8[2]{1e-05, -128, lo=-128, hi=100} = [1, -7]
state @s: i8[4]{0.5, -3}

entry f(%x: i8[n,4]{0.0235, -5}) {
  symbol n: 1..512 = size(0, 0)
  %v1: i8[4,n]{0.0235, -5} = permute(%x) {axes=(1, 0)}
  %v2: f32[2,4] = requantize(@w)
  %v3: i8[4,2]{axis=1, scale=[0.5, 0.25]} = permute(@w) {axes=(1, 0)}
  %v4: f32[4,12] = requantize(@q)
  %v5: i16[4]{0.001953125} = requantize(@s) {x_zero=-3, multiplier=1073741824, shift=22, lo=-32768, hi=32767}
  write @s = @s
  return %v1, %v2, %v3, %v4, @c, %v5
}
"""


# ---- text -----------------------------------------------------------------------------------------------------------------
def test_text_round_trip() -> None:
    scale = np.arange(12, dtype=np.float32).reshape(4, 3) + 1
    offset = scale / 8
    source = parse_module(SAMPLE.replace("#SCALE", "#00000001").replace("#OFFSET", "#00000002"),
                          {"#00000001": scale, "#00000002": offset})  # fmt: skip
    verify(source)
    text = print_module(source)
    module = parse_module(text, scale_arrays(source))
    assert print_module(module) == text
    (f,) = module.entries.values()
    quant = f.nodes[3].inputs[0].type.quant  # type: ignore[union-attr]
    assert quant is not None and np.array_equal(quant.scale, scale) and np.array_equal(quant.offset, offset)  # type: ignore[arg-type]
    assert (quant.axis, quant.group, quant.zero, quant.bits) == (1, 4, 8, 4)
    assert f.inputs[0].type == Type(DType.i8, f.inputs[0].shape, per_tensor(0.0235, -5))
    assert f.outputs[4].type.quant == per_tensor(1e-5, -128, lo=-128, hi=100)
    zeros = parse_module(text)  # what the text has only checksums of
    assert zeros.entries["f"].nodes[3].inputs[0].type.quant.scale.shape == (4, 3)  # type: ignore[union-attr]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_quant_round_trips(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    axis = data.draw(st.sampled_from([None, *range(len(shape))]))
    group = 0 if axis is None else data.draw(st.integers(0, 4))
    small: Any = st.integers(-128, 127)
    q = Quant(np.zeros((), np.float32), data.draw(small), axis, group, data.draw(st.sampled_from([4, 8])),
              lo=data.draw(st.none() | small), hi=data.draw(st.none() | small))  # fmt: skip
    from dataclasses import replace

    from trivet.ir.carry import scale_shape

    size = scale_shape(q, shape)
    numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)

    def array() -> Any:
        n = int(np.prod(size))
        return np.array(data.draw(st.lists(numbers, min_size=n, max_size=n)), np.float32).reshape(size)  # type: ignore[arg-type]

    q = replace(q, scale=array(), offset=array() if data.draw(st.booleans()) else None)
    g = Graph("f", inputs=[Value("x", Type(DType.i8, shape, q))])
    g.outputs = list(g.inputs)
    module = Module("m", {"f": g})
    again = parse_module(print_module(module), scale_arrays(module))
    assert again.entries["f"].inputs[0].type == g.inputs[0].type


@pytest.mark.parametrize(
    ("type_", "why"),
    [
        ("i8[2]{}", "quantisation needs a scale"),
        ("i8[2]{0.5, groups=2}", "quantisation has no groups"),
        ("i8[2]{axis=1, scale=[1, 2]}", "there is no axis 1"),
        ("i8[2]{axis=0, scale=[1, 2, 3]}", "scale has 3 elements, not 2"),
        ("i8[2]{axis=0, group=2, scale=[1], offset=[1, 2]}", "offset has 2 elements, not 1"),
    ],
)
def test_bad_text(type_: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"line 2: {why}"):
        parse_graph(f"module m\nentry f(%x: {type_}) {{\nreturn %x\n}}")


# ---- verifier -------------------------------------------------------------------------------------------------------------
GOOD = "multiplier=1073741824, shift=30"


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        ("%a: i8[2,4]{0.25, 3} = concat(%x, %y) {axis=0}",
         r"inputs 0 and 1 hold numbers of different quantisation: {0.5, 3} and {0.25}"),
        ("%a: i8[2,4]{0.5, 3} = concat(%x, %p) {axis=0}", r"different quantisation: {0.5, 3} and none"),
        ("%a: i8[4]{0.25} = reshape(%x)", r"declared i8\[4\]{0.25}, inputs give i8\[4\]{0.5, 3}"),
        ("%a: i8[4] = reshape(%x)", r"declared i8\[4\], inputs give i8\[4\]{0.5, 3}"),
        ("%a: i8[1,4]{0.5, 3} = reduce(%x) {kind=sum, axes=(0)}", r"inputs give i8\[1,4\]"),
        ("%a: i8[4,2]{axis=0, scale=[1, 2, 3, 4]} = reshape(@w)", "reshape cannot keep the quantisation along axis 0"),
        ("%a: f32[1,4]{0.5} = requantize(%x)", "f32 is no dtype of quantised values|declared f32"),
        ("%a: f32[1,4] = requantize(%p)", "says nothing of scale and zero point"),
        ("%a: f32[1,4] = requantize(%x) {x_zero=4, scale=0.5}", "x is .*, the attribute says zero point 4"),
        ("%a: f32[1,4] = requantize(%x) {x_zero=3, scale=0.25}", "the types say a factor of 0.5, the attributes 0.25"),
        ("%a: i8[1,4]{0.25} = requantize(%x) {x_zero=3, " + GOOD + "}", "a factor of 2, the attributes 1"),
        ("%a: i8[1,4]{0.5} = requantize(%x) {x_zero=3, y_zero=1, " + GOOD + "}", "y is .*, the attribute says zero point 1"),
        ("%a: i8[1,4] = requantize(%p) {multiplier=1, shift=63}", "shift 63"),
        ("%a: i8[1,4] = requantize(%p) {multiplier=-1}", "multiplier -1"),
        ("%a: i8[1,4] = requantize(%p) {multiplier=1, lo=5, hi=4}", "bounds 5..4"),
        ("%a: i8[1,4] = requantize(%p) {multiplier=1, hi=128}", "bounds -128..128 of a result of i8"),
        ("%a: i8[1,4] = requantize(%p) {multiplier=1, x_zero=200}", "zero point 200 of x is no i8"),
        ("%a: i32[1,4] = requantize(%p) {multiplier=1}", "from i8 to i32"),
        ("%a: i8[1,4] = binary(%x, %y) {kind=add, a_zero=3, b_zero=1, y_zero=0, a_multiplier=1, b_multiplier=1, shift=0}",
         "b is .*, the attribute says zero point 1"),
        ("%a: i8[1,4] = lookup(%x, %v)", "the table is .*, it needs 256 elements"),
        ("%a: f32[1,5] = qmatmul(%x, @w, %v) {a_zero=3}", "inner sizes"),
        ("%a: f32[1,5] = qmatmul(%f, @k, %v) {bits=4}", "b is i8, not u8"),
        ("%a: f32[1,2] = qmatmul(%x, @k, %v) {a_zero=3}", r"scale f32\[5\] has not the shape \[2\]"),
        ("%a: i8[1,2]{1} = qmatmul(%x, @k, %m) {a_zero=3}", "m is f32|scale is f32, not i32"),
        ("%a: f32[1,2] = qmatmul(%f, @k, %v) {group=8}", r"scale f32\[5\] has not the shape \[1,2\]"),
        ("%a: i8[1,4]{0.5} = qsoftmax(%x, %t) {axis=2}", "axis 2 of 2"),
        ("%a: i8[1,4] = qreduce(%p) {kind=max, axes=(0)}", "kind max"),
        ("%a: i8[1,4] = qreduce(%p) {kind=sum, axes=(0), multiplier=8388608}", "multiplier 8388608"),
        ("%a: i8[1,4] = qnorm(%p) {kind=group}", "kind group"),
    ],
)  # fmt: skip
def test_broken_nodes(nodes: str, why: str) -> None:
    text = ("module m\nconst @w: i8[2,4]{axis=0, scale=[0.5, 0.25]}\nconst @k: i8[4,2]\n"
            "entry f(%x: i8[1,4]{0.5, 3}, %y: i8[1,4]{0.25}, %p: i8[1,4], %f: f32[1,4], %v: f32[5], %m: f32[2], %t: i32[256]) {\n"
            f"{nodes}\nreturn %a\n}}")  # fmt: skip
    with pytest.raises(Error, match=why):
        verify(parse_module(text))


@pytest.mark.parametrize(
    ("type_", "why"),
    [
        ("f32[2]{0.5}", "f32 is no dtype of quantised values"),
        ("i8[2]{0}", "scale 0.0 is not positive"),
        ("i8[2]{axis=0, scale=[1, inf]}", "scale is not finite"),
        ("i8[2]{0.5, bits=3}", "3 bits"),
        ("i8[2]{0.5, group=2}", "groups of 2 along axis None"),
    ],
)
def test_broken_types(type_: str, why: str) -> None:
    with pytest.raises(Error, match=why):
        verify(parse_module(f"module m\nentry f(%x: {type_}) {{\nreturn %x\n}}"))


def test_a_constant_and_a_state_mean_one_thing() -> None:
    module = parse_module("module m\nconst @w: i8[2]{0.5}\nentry f() {\n%a: i8[2]{0.5} = copy(@w)\nreturn %a, @w\n}")
    verify(module)
    (f,) = module.entries.values()
    c = f.outputs[1].const
    f.outputs.append(Value("w", Type(DType.i8, (2,), per_tensor(0.25)), const=c))
    with pytest.raises(Error, match=r"@w is read as i8\[2\]{0.25} and as i8\[2\]{0.5}"):
        verify(module)
    with pytest.raises(Error, match=r"state s is i8\[2\]{0.5}, written with i8\[2\]{0.25}"):
        verify(parse_module("module m\nstate @s: i8[2]{0.5}\nentry f(%x: i8[2]{0.25}) {\nwrite @s = %x\nreturn %x\n}"))


# ---- what only moves --------------------------------------------------------------------------------------------------------
def real(x: torch.Tensor, q: Quant | None) -> torch.Tensor:
    assert q is not None
    return dequantize(x, q)


def run(op: str, attrs: Any, inputs: list[torch.Tensor | None], quants: list[Quant | None] = [],  # noqa: B006
        out: list[tuple[torch.dtype, tuple[int, ...]]] = [], y: Quant | None = None) -> list[torch.Tensor]:  # noqa: B006  # fmt: skip
    """One node in the evaluator."""
    kinds = [*quants, *[None] * len(inputs)]
    ins = [None if x is None else Value(f"x{i}", Type(dtype_of(x), tuple(x.shape), q))
           for i, (x, q) in enumerate(zip(inputs, kinds, strict=False))]  # fmt: skip
    outs = [Value(f"y{i}", Type(dtype_of(d), s, y if i == 0 else None)) for i, (d, s) in enumerate(out)]
    return evaluate_node(Node(op, list(ins), outs, attrs), list(inputs), {})


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_views_keep_the_real_numbers(data: st.DataObject) -> None:
    """Real numbers of a view are the view of the real numbers, for scales of any kind; or it says that it cannot."""
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=3)))
    axis, group = draw(st.integers(0, len(shape) - 1)), draw(st.sampled_from([0, 0, 2, 3]))
    size = [-(-n // group) if i == axis else n for i, n in enumerate(shape)] if group else [shape[axis]]
    both = [rng.standard_normal(size).astype(np.float32) for _ in range(2)]
    q = Quant(both[0], 3, axis, group, offset=both[1] if draw(st.booleans()) else None)
    x = torch.from_numpy(rng.integers(-128, 128, shape).astype(np.int8))
    op = draw(st.sampled_from(["permute", "reshape", "slice", "expand", "concat", "gather"]))
    inputs, quants, attrs, want = [x], [q], None, x.shape
    if op == "permute":
        attrs = ops.Permute(tuple(draw(st.permutations(range(len(shape))))))
        want = tuple(shape[a] for a in attrs.axes)
    elif op == "reshape":
        cut = draw(st.integers(0, len(shape)))
        want = draw(
            st.sampled_from(
                [(*shape[:cut], 1, *shape[cut:]), (x.numel(),), (1, *shape), (*shape[:-2], int(np.prod(shape[-2:])))]
            )
        )
        attrs = ops.Reshape()
    elif op == "slice":
        at = draw(st.integers(0, len(shape) - 1))
        start = draw(st.integers(0, shape[at] - 1))
        step = draw(st.sampled_from([1, 1, 2, -1]))
        n = draw(st.integers(1, 1 + (start // -step if step < 0 else (shape[at] - 1 - start) // step)))
        attrs, want = ops.Slice(at, start, step), (*shape[:at], n, *shape[at + 1 :])
    elif op == "expand":
        want = (2, *(3 if d == 1 and draw(st.booleans()) else d for d in shape))
        attrs = ops.Expand()
    elif op == "gather":
        at = draw(st.integers(0, len(shape) - 1))
        attrs, want = ops.Gather(IndexKind.take, at), (*shape[:at], 2, 2, *shape[at + 1 :])
        inputs, quants = [x, torch.zeros(2, 2, dtype=torch.int64)], [q, None]
    else:
        at = draw(st.integers(0, len(shape) - 1))
        attrs, want = ops.Concat(at), tuple(2 * d if i == at else d for i, d in enumerate(shape))
        other = (
            q if draw(st.booleans()) else Quant(both[1], 3, axis, group, offset=None if q.offset is None else both[0])
        )
        inputs, quants = [x, x.flip(0)], [q, other]
    types = [Type(dtype_of(t), tuple(t.shape), k) for t, k in zip(inputs, quants, strict=True)]
    try:
        made = carried(op, attrs, types, tuple(want))
    except Mismatch:
        assert op in ("gather", "slice", "concat", "expand", "reshape")
        assert group or (op == "concat" and axis != at) or op in ("gather", "reshape", "expand")
        return
    moved = run(op, attrs, inputs, quants, [(torch.int8, tuple(want))], made)[0]
    wide = [real(t, k) if k is not None else t for t, k in zip(inputs, quants, strict=True)]
    assert torch.equal(real(moved, made), run(op, attrs, wide, [], [(torch.float32, tuple(want))])[0])


def test_importers_and_passes_need_not_care() -> None:
    g = Graph("f")
    x = g.value(Type(DType.i8, (2, 6), per_tensor(0.5, 3)), "x")
    g.inputs = [x]
    b = Builder(g)
    y = b.concat([b.permute(b.reshape(x, (2, 3, 2)), (2, 0, 1))] * 2, 0)
    top = b.reduce(ReduceKind.max, y, [0])
    values, places = b.sort(top, 0)
    total = b.reduce(ReduceKind.sum, x, [0], dtype=DType.i64)
    assert {v.type.quant for v in (y, top, values)} == {x.type.quant} and places.type.quant is total.type.quant is None
    other = g.value(Type(DType.i8, (2, 6), per_tensor(0.25)), "z")
    with pytest.raises(Error, match="different quantisation"):
        b.concat([x, other], 0)
    g.nodes.pop()
    g.outputs = [values]
    rw = Rewriter(g)
    v = rw.before(g.nodes[0], "reshape", [x], Type(DType.i8, (12,)), ops.Reshape(), g.nodes[0].loc)
    assert v.type.quant == x.type.quant


# ---- passes ---------------------------------------------------------------------------------------------------------------
def test_dequantised_weights_stay_and_others_fold() -> None:
    text = """module m
const @w: i8[2,2]{axis=0, scale=[0.5, 0.25]} = [1, 2, 3, 4]
const @r: f32[2] = [0.3, -5]
entry f(%x: f32[2]) {
  %a: f32[2,2] = requantize(@w)
  %b: i8[2,2]{axis=1, scale=[0.5, 0.25]} = permute(@w) {axes=(1, 0)}
  %c: f32[2,2] = requantize(%b)
  %d: i8[2]{0.5, 1} = requantize(@r)
  return %a, %c, %d
}"""
    module = parse_module(text)
    want = evaluate(module.entries["f"], [torch.zeros(2)])
    canonicalize(module, Context())
    fold_constants(module, Context())
    verify(module, "fold_constants")
    (f,) = module.entries.values()
    assert [n.op for n in f.nodes] == ["requantize", "requantize"]
    assert f.nodes[1].inputs[0].const is not None  # type: ignore[union-attr]
    d = f.outputs[2]
    assert d.const is not None and d.type.quant == per_tensor(0.5, 1) and d.const.data.tolist() == [2, -9]
    for a, b in zip(evaluate(f, [torch.zeros(2)]), want, strict=True):
        assert torch.equal(a, b)


def test_equal_bytes_of_other_meaning_stay_apart() -> None:
    text = """module m
const @a: i8[2]{0.5} = [1, 2]
const @b: i8[2]{0.25} = [1, 2]
const @c: i8[2]{0.25} = [1, 2]
entry f() {
  %x: f32[2] = requantize(@a)
  %y: f32[2] = requantize(@b)
  %z: f32[2] = requantize(@c)
  return %x, %y, %z
}"""
    module = parse_module(text)
    for p in (fold_constants, canonicalize, fold_constants):
        p(module, Context())
        verify(module)
    (f,) = module.entries.values()
    assert len(f.nodes) == 2 and f.outputs[1] is f.outputs[2]
    assert [t.tolist() for t in evaluate(f, [])[:2]] == [[0.5, 1.0], [0.25, 0.5]]


def test_canonicalize_keeps_meanings() -> None:
    text = """module m
entry f(%x: i8[2,3]{0.5}) {
  %a: i8[2,3] = map(%x) {r0 = load.i8 0}
  %b: i8[2,3]{0.25} = bitcast(%x)
  %c: i8[2,3]{0.5} = bitcast(%b)
  %d: i8[3,2]{0.5} = permute(%x) {axes=(1, 0)}
  %e: i8[2,3]{0.5} = permute(%d) {axes=(1, 0)}
  return %a, %b, %c, %e
}"""
    module = parse_module(text)
    canonicalize(module, Context())
    verify(module, "canonicalize")
    (f,) = module.entries.values()
    assert [n.op for n in f.nodes] == ["map", "bitcast"] and f.outputs[2] is f.outputs[3] is f.inputs[0]
