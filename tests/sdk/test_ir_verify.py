"""The verifier finds what is wrong and says where."""

from __future__ import annotations

import pytest

from trivet.error import Error
from trivet.fbs.structs import DType, MapOp
from trivet.ir import ops
from trivet.ir.dim import Dim, floor_div
from trivet.ir.graph import Graph, Module, Sym, Value
from trivet.ir.infer import Mismatch, Sizes
from trivet.ir.parse import parse_module
from trivet.ir.types import Type
from trivet.ir.verify import verify


def bad(
    nodes: str,
    why: str,
    header: str = "%x: f32[n,4], %y: f32[4]",
    result: str = "%a",
    symbols: str = "symbol n: 1..9 = size(0, 0)",
) -> None:
    module = parse_module(
        f"module m\nconst @w: f32[4,5]\nstate @s: f32[4]\nentry f({header}) {{\n{symbols}\n{nodes}\nreturn {result}\n}}"
    )
    with pytest.raises(Error, match=why):
        verify(module, "some_pass")


def test_good_graph_passes() -> None:
    verify(
        parse_module(
            "module m\nentry f(%x: f32[n,4]) {\nsymbol n: 1..9 = size(0, 0)\n%a: f32[4*n] = reshape(%x)\nreturn %a\n}"
        )
    )


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        ("%a: f32[n,5] = reshape(%x)", "different numbers of elements"),
        ("%a: f32[4,n] = permute(%x) {axes=(0, 1)}", "declared f32.4,n., inputs give f32.n,4."),
        ("%a: f32[n,4] = permute(%x) {axes=(0, 0)}", "no order of 2 axes"),
        ("%a: f32[n,5] = matmul(%x, @w, %y)", "sizes 4 and 5 do not broadcast"),
        ("%a: f32[n,4] = matmul(%y, %x)", "inner sizes"),
        ("%a: f32[n,4] = matmul(%x)", "input b is missing"),
        ("%a: f32[n,4] = softmax(%x) {axis=2}", "axes .2,. of 2"),
        ("%a: f64[n,4] = softmax(%x) {axis=1}", "declared f64"),
        ("%a: f32[k,4] = copy(%x)", "uses k, not defined|declared f32.k,4."),
        ("%a: f32[n,4] = map(%x) {r0 = load.f64 0}", "loads f32 as f64"),
        ("%a: f32[n,4] = map(%x) {r0 = load.f32 1}", "there is no input 1"),
        ("%a: f32[n,4] = map(%x) {r0 = load.f32 0; r1 = add.f32 r0 r1}", "reads a later register"),
        ("%a: f32[n,4] = map(%x) {r0 = load.f32 0; r1 = add.f32 r0}", "1 operands, not 2"),
        ("%a: f32[n,4] = map(%x) {r0 = load.f32 0; r1 = gt.f32 r0 r0}", "gives f32, not bool"),
        ("%a: f32[n,4] = map(%x) {r0 = load.f32 0; r1 = const_.i32 1; r2 = add.f32 r0 r1}", "operands are f32 and i32"),
        ("%a: i32[n,4] = map(%x) {r0 = load.f32 0; r1 = cast.i32 r0; r2 = exp.i32 r1}", "not for i32"),
        ("%a: bool[n,4] = map(%x) {r0 = load.f32 0}", "declared bool"),
        ("%a: f32[n,4] = map(%x) {r0 = iota.f32 2}", "there is no axis 2"),
        ("%a: f32[4] = map(%x) {r0 = load.f32 0}", "has 2 axes, the output 1"),
        ("%a: f32[1,4] = slice(%y) {axis=0, start=4}", "positions|declared"),
        ("%a: f32[1] = slice(%y) {axis=0, start=4}", "positions 4..4 lie outside"),
        ("%a: f32[8] = concat(%y, %x) {axis=0}", "cannot be joined"),
        ("%a: f32[n,4] = conv(%x, @w) {nd=1, stride=(1), pad=(0), dilation=(1)}", "need 3 axes"),
        ("%a: f32[n,4] = norm(%x, @s, @w) {kind=layer, eps=1e-5}", "bias f32.4,5. has not the shape"),
        ("%a: f32[n,4], %b: f32[n,4] = softmax(%x) {axis=1}", "2 outputs"),
        ("%a: i64[u,2] = nonzero(%x) {symbol=\"u\"}", "not declared as data-dependent|uses u"),
    ],
)  # fmt: skip
def test_broken_nodes(nodes: str, why: str) -> None:
    bad(nodes, why)


def test_the_message_names_pass_and_place() -> None:
    text = (
        'module m\nentry f(%x: f32[4]) {\n%a: f32[5] = copy(%x) loc("net.head", "net.py:7", "aten.clone")\nreturn %a\n}'
    )
    with pytest.raises(Error) as e:
        verify(parse_module(text), "fuse_things")
    assert e.value.node == "net.head (net.py:7)"
    assert "after fuse_things" in str(e.value) and "%a: f32[5] = copy(%x)" in str(e.value)


def test_order_names_and_ownership() -> None:
    g = Graph("f")
    x = g.value(Type(DType.f32, (2,)), "x")
    g.inputs = [x]
    a = g.node("copy", [x], [x.type], ops.Copy())[0]
    b = g.node("copy", [a], [x.type], ops.Copy())[0]
    g.outputs = [b]
    m = Module("m", {"f": g})
    verify(m)
    g.nodes.reverse()
    with pytest.raises(Error, match="read before it is defined"):
        verify(m)
    g.nodes.reverse()
    b.name = "x"
    with pytest.raises(Error, match="two values are called %x"):
        verify(m)
    b.name = "b"
    b.index = 1
    with pytest.raises(Error, match="does not point back"):
        verify(m)
    b.index = 0
    g.outputs = [Value("y", x.type)]
    with pytest.raises(Error, match="%y is read before"):
        verify(m)


def test_control_flow() -> None:
    loop = """%a: f32[4] = while(%y)
      graph cond(%i: f32[4]) {{
        %p: {0} = map() {{r0 = const_.bool 0}}
        return %p
      }}
      graph body(%i: f32[4]) {{
        return %i
      }}"""
    ok = (
        "module m\nentry f(%y: f32[4]) {\n"
        + loop.format("bool[]").replace("while(%y)", "while(%y) {carried=1}")
        + "\nreturn %a\n}"
    )
    verify(parse_module(ok))
    with pytest.raises(Error, match=r"carried|gives"):
        verify(parse_module(ok.replace("carried=1", "carried=2")))
    with pytest.raises(Error, match="takes"):
        verify(parse_module(ok.replace("body(%i: f32[4])", "body(%i: f32[5])")))


def test_states() -> None:
    text = "module m\nstate @s: f32[4]\nentry f(%y: f32[n]) {\nsymbol n: 1..9 = size(0, 0)\nwrite @s = %y\nreturn %y\n}"
    with pytest.raises(Error, match=r"state s is f32\[4\], written with f32\[n\]"):
        verify(parse_module(text))


def test_sizes() -> None:
    n = Dim.symbol("n")
    sizes = Sizes({"n": Sym("n", 2, 64, (0, 0)), "m": Sym("m", solved=floor_div(n, 2)), "u": Sym("u", data=True)})
    assert sizes.same(n * 2, n + n) and not sizes.same(n, n + 1) and not sizes.same(n, 4)
    assert sizes.same(Dim.symbol("m"), floor_div(n, 2))
    assert sizes.same(floor_div(2 * n + 1, 2), n)
    assert sizes.same(Dim.symbol("u"), 7)
    assert sizes.broadcast([(n, 1), (1, 4), (4,)]) == (n, 4)
    with pytest.raises(Mismatch):
        sizes.broadcast([(n,), (n + 1,)])


def test_rank_limit() -> None:
    g = Graph("f", inputs=[Value("x", Type(DType.f32, (1,) * 9))])
    g.outputs = list(g.inputs)
    with pytest.raises(Error, match="at most 8"):
        verify(Module("m", {"f": g}))
    assert MapOp.load == 0
