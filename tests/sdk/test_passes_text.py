"""Passes, text in and text out."""

from __future__ import annotations

import re

import pytest
import torch

from trivet.ir.evaluate import evaluate
from trivet.ir.graph import Module
from trivet.ir.parse import parse_module
from trivet.ir.text import print_module
from trivet.ir.verify import verify
from trivet.pipeline import Context, find_pass, name_values


def run(text: str, *passes: str, consts: dict[str, torch.Tensor] | None = None) -> Module:
    module = parse_module(text, consts)
    verify(module)
    for p in passes:
        find_pass(p)(module, Context())
        name_values(module)
        verify(module, p)
    return module


def body(module: Module) -> list[str]:
    """The nodes and results of the first entry, without types and places."""
    lines = print_module(module).split("entry", 1)[1].splitlines()[1:-1]
    keep = [re.sub(r" loc\(.*\)$", "", t.strip()) for t in lines if not t.strip().startswith("symbol")]
    return [re.sub(r": \w+\[[^\]]*\]", "", t) for t in keep]


def check(passes: str, before: str, after: str, header: str = "%x: f32[2,3,4], %y: f32[4]", consts: str = "") -> Module:
    module = run(f"module m\n{consts}\nentry f({header}) {{\n{before}\n}}\n", *passes.split())
    assert body(module) == [t.strip() for t in after.strip().splitlines()]
    return module


def test_views_become_one() -> None:
    check("canonicalize", """
      %a: f32[6,4] = reshape(%x)
      %b: f32[4,6] = permute(%a) {axes=(1, 0)}
      %c: f32[6,4] = permute(%b) {axes=(1, 0)}
      %d: f32[24] = reshape(%c)
      %e: f32[2,3,4] = copy(%x)
      %f: f32[2,3,3] = slice(%e) {axis=2, start=1}
      %g: f32[2,3,1] = slice(%f) {axis=2, start=1, step=3}
      return %d, %g
    """, """
      %d = reshape(%x)
      %g = slice(%x) {axis=2, start=2}
      return %d, %g
    """)  # fmt: skip


def test_expand_goes_into_map_and_equal_nodes_are_one() -> None:
    check("canonicalize", """
      %a: f32[1,1,4] = reshape(%y)
      %b: f32[2,3,4] = expand(%a)
      %c: f32[2,3,4] = map(%x, %b) {r0 = load.f32 0; r1 = load.f32 1; r2 = add.f32 r0 r1}
      %d: f32[2,3,4] = map(%y, %x) {r0 = load.f32 0; r1 = load.f32 1; r2 = add.f32 r1 r0}
      %e: f32[2,3,4] = map(%c, %d) {r0 = load.f32 0; r1 = load.f32 1; r2 = mul.f32 r0 r1}
      return %e
    """, """
      %c = map(%x, %y) {r0 = load.f32 0; r1 = load.f32 1; r2 = add.f32 r0 r1}
      %d = map(%y, %x) {r0 = load.f32 0; r1 = load.f32 1; r2 = add.f32 r0 r1}
      %e = map(%c, %d) {r0 = load.f32 0; r1 = load.f32 1; r2 = mul.f32 r0 r1}
      return %e
    """)  # fmt: skip


@pytest.mark.parametrize(
    ("instr", "want"),
    [
        ("add.f32 r0 r1", "-0.0"),  # x + -0 is x
        ("sub.f32 r0 r1", "0.0"),
        ("mul.f32 r0 r1", "1.0"),
        ("div.f32 r0 r1", "1.0"),
        ("pow.f32 r0 r1", "1.0"),
    ],
)
def test_exact_identities_go(instr: str, want: str) -> None:
    check("canonicalize", f"""
      %a: f32[2,3,4] = map(%x) {{r0 = load.f32 0; r1 = const_.f32 {want}; r2 = {instr}}}
      return %a
    """, "return %x")  # fmt: skip


@pytest.mark.parametrize(
    ("instr", "number"), [("add.f32 r0 r1", "0.0"), ("sub.f32 r0 r1", "-0.0"), ("mul.f32 r0 r1", "0.0")]
)
def test_others_stay(instr: str, number: str) -> None:
    line = f"%a = map(%x) {{r0 = load.f32 0; r1 = const_.f32 {number}; r2 = {instr}}}"
    check("canonicalize", f"{line.replace('%a', '%a: f32[2,3,4]')}\n return %a", f"{line}\n return %a")


def test_casts_that_lose_nothing_go() -> None:
    check("canonicalize", """
      %a: f32[2] = map(%h) {r0 = load.f16 0; r1 = cast.f32 r0}
      %b: f16[2] = map(%a) {r0 = load.f32 0; r1 = cast.f16 r0}
      %c: f16[2] = map(%h) {r0 = load.f16 0; r1 = cast.f32 r0; r2 = cast.f16 r1}
      %d: f16[2] = map(%i) {r0 = load.i64 0; r1 = cast.f32 r0; r2 = cast.f16 r1}
      return %b, %c, %d
    """, """
      %a = map(%h) {r0 = load.f16 0; r1 = cast.f32 r0}
      %b = map(%a) {r0 = load.f32 0; r1 = cast.f16 r0}
      %d = map(%i) {r0 = load.i64 0; r1 = cast.f32 r0; r2 = cast.f16 r1}
      return %b, %h, %d
    """, "%h: f16[2], %i: i64[2]")  # fmt: skip


def test_batched_product_keeps_its_axes() -> None:
    check("canonicalize", """
      %a: f32[6,4] = reshape(%x)
      %b: f32[6,5] = matmul(%a, @w, @b, none)
      %c: f32[2,3,5] = reshape(%b)
      return %c
    """, """
      %v1 = matmul(%x, @w, @b, none)
      return %v1
    """, consts="const @w: f32[4,5]\nconst @b: f32[5]")  # fmt: skip


def test_dead_branch_operands_go() -> None:
    check("canonicalize", """
      %z: f32[4] = if(%p, %x, %y)
        graph then(%a: f32[2,3,4], %b: f32[4]) {
          return %b
        }
        graph else(%a: f32[2,3,4], %b: f32[4]) {
          %c: f32[4] = copy(%b)
          %d: f32[4] = map(%c) {r0 = load.f32 0; r1 = neg.f32 r0}
          return %d
        }
      return %z
    """, """
      %z = if(%p, %y)
      graph then(%b) {
      return %b
      }
      graph else(%b) {
      %d = map(%b) {r0 = load.f32 0; r1 = neg.f32 r0}
      return %d
      }
      return %z
    """, "%x: f32[2,3,4], %y: f32[4], %p: bool[]")  # fmt: skip


def test_fold_constants() -> None:
    m = check("canonicalize fold_constants", """
      %a: f32[3] = map(@a) {r0 = load.f32 0; r1 = exp.f32 r0}
      %b: f32[3] = map(@b) {r0 = load.f32 0; r1 = exp.f32 r0}
      %c: f32[1024,3] = expand(%a)
      %d: f32[1024,3] = map(%z, %c, %b) {r0 = load.f32 0; r1 = load.f32 1; r2 = mul.f32 r0 r1; r3 = load.f32 2; r4 = add.f32 r2 r3}
      %e: f32[1000,1000] = map() {r0 = iota.i64 0; r1 = cast.f32 r0}
      return %d, %e
    """, """
      %d = map(%z, @a.map) {r0 = load.f32 0; r1 = load.f32 1; r2 = mul.f32 r0 r1; r3 = load.f32 1; r4 = add.f32 r2 r3}
      %e = map() {r0 = iota.i64 0; r1 = cast.f32 r0}
      return %d, %e
    """.replace("load.f32 1; r4 = add.f32 r2 r3", "load.f32 2; r4 = add.f32 r2 r3").replace("@a.map)", "@a.map, @a.map)"),
        "%z: f32[1024,3]", "const @a: f32[3] = [0, 1, 2]\nconst @b: f32[3] = [0, 1, 2]")  # fmt: skip
    x = torch.randn(1024, 3)
    want = x * torch.tensor([0.0, 1, 2]).exp() + torch.tensor([0.0, 1, 2]).exp()
    torch.testing.assert_close(evaluate(m.entries["f"], [x])[0], want)


def test_shared_weight_keeps_its_view() -> None:
    """A table that is read as it is and transposed is not stored twice."""
    text = """
      %r: f32[2,64] = gather(@t, %i) {kind=take, axis=0}
      %w: f32[64,110] = permute(@t) {axes=(1, 0)}
      %y: f32[2,110] = matmul(%r, %w)
      return %y
    """
    check(
        "canonicalize fold_constants", text, re.sub(r": f32\[[^\]]*\]", "", text), "%i: i64[2]", "const @t: f32[110,64]"
    )


def test_fold_batch_norm_grouped_transposed() -> None:
    consts = {"w": torch.randn(4, 3, 2), "s": torch.randn(6, 1), "t": torch.randn(6, 1), "b": torch.randn(6)}
    m = run("""module m
      const @w: f32[4,3,2]
      const @b: f32[6]
      const @s: f32[6,1]
      const @t: f32[6,1]
      entry f(%x: f32[2,4,5]) {
        %y: f32[2,6,10] = conv(%x, @w, @b) {nd=1, stride=(2), pad=(0), dilation=(1), groups=2, transposed=true}
        %z: f32[2,6,10] = map(%y, @s, @t) {r0 = load.f32 0; r1 = load.f32 1; r2 = mul.f32 r0 r1; r3 = load.f32 2; r4 = add.f32 r2 r3; r5 = tanh.f32 r4}
        return %z
      }""", "fold_batch_norm", consts=consts)  # fmt: skip
    g = m.entries["f"]
    assert [n.op for n in g.nodes] == ["conv", "map"] and len(g.nodes[1].attrs.code) == 2
    x = torch.randn(2, 4, 5)
    y = torch.conv_transpose1d(x, consts["w"], consts["b"], 2, groups=2)
    torch.testing.assert_close(evaluate(g, [x])[0], torch.tanh(y * consts["s"] + consts["t"]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("pad", "size", "folded"), [(0, 3, True), (1, 5, False)])
def test_shift_in_front_of_padding_stays(pad: int, size: int, folded: bool) -> None:
    m = run(f"""module m
      const @w: f32[2,4,3]
      const @s: f32[4,1] = [1, 2, 3, 4]
      entry f(%x: f32[2,4,5]) {{
        %y: f32[2,4,5] = map(%x, @s) {{r0 = load.f32 0; r1 = load.f32 1; r2 = add.f32 r0 r1}}
        %z: f32[2,2,{size}] = conv(%y, @w) {{nd=1, stride=(1), pad=({pad}), dilation=(1)}}
        return %z
      }}""", "fold_batch_norm", consts={"w": torch.randn(2, 4, 3)})  # fmt: skip
    assert [n.op for n in m.entries["f"].nodes] == (["conv"] if folded else ["map", "conv"])


def test_fuse_elementwise() -> None:
    check("fuse_elementwise", """
      %a: f32[2,3,4] = map(%x) {r0 = load.f32 0; r1 = exp.f32 r0}
      %b: f32[2,3,4] = map(%a, %y) {r0 = load.f32 0; r1 = load.f32 1; r2 = add.f32 r0 r1}
      %c: f32[2,3,4] = map(%a, %b) {r0 = load.f32 0; r1 = load.f32 1; r2 = mul.f32 r0 r1}
      %d: f32[4] = map(%y) {r0 = load.f32 0; r1 = tanh.f32 r0}
      %e: f32[2,3,4] = map(%c, %d) {r0 = load.f32 0; r1 = load.f32 1; r2 = sub.f32 r0 r1}
      return %e
    """, """
      %d = map(%y) {r0 = load.f32 0; r1 = tanh.f32 r0}
      %e = map(%x, %y, %d) {r0 = load.f32 0; r1 = exp.f32 r0; r2 = load.f32 1; r3 = add.f32 r1 r2; r4 = mul.f32 r1 r3; r5 = load.f32 2; r6 = sub.f32 r4 r5}
      return %e
    """)  # fmt: skip


def test_values_of_several_readers_stay_and_masks_are_repeated() -> None:
    check("fuse_elementwise", """
      %m: bool[3,4] = map() {r0 = iota.i64 0; r1 = iota.i64 1; r2 = ge.bool r0 r1}
      %a: f32[2,3,4] = map(%x) {r0 = load.f32 0; r1 = exp.f32 r0}
      %b: f32[2,3,4] = map(%a, %m) {r0 = load.f32 0; r1 = load.bool 1; r2 = cast.f32 r1; r3 = mul.f32 r0 r2}
      %c: f32[2,3,4] = map(%a) {r0 = load.f32 0; r1 = neg.f32 r0}
      return %b, %c
    """, """
      %a = map(%x) {r0 = load.f32 0; r1 = exp.f32 r0}
      %b = map(%a) {r0 = iota.i64 1; r1 = iota.i64 2; r2 = ge.bool r0 r1; r3 = load.f32 0; r4 = cast.f32 r2; r5 = mul.f32 r3 r4}
      %c = map(%a) {r0 = load.f32 0; r1 = neg.f32 r0}
      return %b, %c
    """)  # fmt: skip


MATMUL = "const @w: f32[4,5]\nconst @b: f32[5]"


def epilogue(map_line: str, want: str, header: str = "%x: f32[2,4], %r: f32[2,5]") -> None:
    check("fuse_epilogues", f"""
      %p: f32[2,5] = matmul(%x, @w)
      %q: f32[2,5] = {map_line}
      return %q
    """, f"{want}\nreturn %q", header, MATMUL)  # fmt: skip


def test_bias_residual_activation() -> None:
    epilogue("map(%p, @b, %r) {r0 = load.f32 0; r1 = load.f32 1; r2 = add.f32 r0 r1; r3 = load.f32 2; r4 = add.f32 r2 r3; r5 = relu.f32 r4}",
             "%q = matmul(%x, @w, @b, %r) {act=clamp, hi=inf}")  # fmt: skip


def test_residual_behind_the_activation_stays() -> None:
    epilogue("map(%p, %r) {r0 = load.f32 0; r1 = gelu.f32 r0; r2 = load.f32 1; r3 = add.f32 r1 r2}",
             """%v1 = matmul(%x, @w, none, none) {act=gelu}
             %q = map(%v1, %r) {r0 = load.f32 0; r1 = load.f32 1; r2 = add.f32 r0 r1}""")  # fmt: skip


@pytest.mark.parametrize(
    ("code", "want"),
    [
        ("r1 = const_.f32 0.0; r2 = max.f32 r0 r1; r3 = const_.f32 6.0; r4 = min.f32 r2 r3", "act=clamp, hi=6.0"),
        ("r1 = const_.f32 0.0; r2 = gt.bool r0 r1; r3 = const_.f32 0.25; r4 = mul.f32 r0 r3; r5 = select.f32 r2 r0 r4", "act=leaky, lo=0.25"),
        ("r1 = const_.f32 0.0; r2 = gt.bool r0 r1; r3 = expm1.f32 r0; r4 = const_.f32 2.0; r5 = mul.f32 r3 r4; r6 = select.f32 r2 r0 r5", "act=elu, lo=2.0"),
        ("r1 = hard_swish.f32 r0", "act=hard_swish"),
    ],
)  # fmt: skip
def test_activations(code: str, want: str) -> None:
    epilogue(f"map(%p) {{r0 = load.f32 0; {code}}}", f"%q = matmul(%x, @w, none, none) {{{want}}}")


def test_value_that_others_read_takes_no_epilogue() -> None:
    text = """
      %p = matmul(%x, @w)
      %q = map(%p) {r0 = load.f32 0; r1 = relu.f32 r0}
      return %q, %p
    """
    check(
        "fuse_epilogues",
        text.replace("%p =", "%p: f32[2,5] =").replace("%q =", "%q: f32[2,5] ="),
        text,
        "%x: f32[2,4]",
        MATMUL,
    )


def test_half_epilogue_takes_the_casts_along() -> None:
    check("fuse_epilogues", """
      %p: f16[2,5] = matmul(%x, %w)
      %q: f16[2,5] = map(%p) {r0 = load.f16 0; r1 = cast.f32 r0; r2 = sigmoid.f32 r1; r3 = cast.f16 r2}
      return %q
    """, "%q = matmul(%x, %w, none, none) {act=sigmoid}\nreturn %q", "%x: f16[2,4], %w: f16[4,5]")  # fmt: skip


@pytest.mark.parametrize(
    ("code", "want"),
    [
        ("r1 = sigmoid.f32 r0; r2 = mul.f32 r0 r1", "r1 = silu.f32 r0"),
        ("r1 = const_.f32 1.4142135381698608; r2 = div.f32 r0 r1; r3 = erf.f32 r2; r4 = const_.f32 1.0; r5 = add.f32 r3 r4; r6 = mul.f32 r0 r5; r7 = const_.f32 0.5; r8 = mul.f32 r6 r7", "r1 = gelu.f32 r0"),
        ("r1 = const_.f32 3.0; r2 = add.f32 r0 r1; r3 = const_.f32 0.0; r4 = max.f32 r2 r3; r5 = const_.f32 6.0; r6 = min.f32 r4 r5; r7 = mul.f32 r0 r6; r8 = div.f32 r7 r5", "r1 = hard_swish.f32 r0"),
        ("r1 = neg.f32 r0; r2 = exp.f32 r1; r3 = const_.f32 1.0; r4 = add.f32 r2 r3; r5 = recip.f32 r4", "r1 = sigmoid.f32 r0"),
        ("r1 = softplus.f32 r0; r2 = tanh.f32 r1; r3 = mul.f32 r0 r2", "r1 = mish.f32 r0"),
    ],
)  # fmt: skip
def test_fuse_activation(code: str, want: str) -> None:
    check(
        "fuse_activation",
        f"%a: f32[2,3,4] = map(%x) {{r0 = load.f32 0; {code}}}\nreturn %a",
        f"%a = map(%x) {{r0 = load.f32 0; {want}}}\nreturn %a",
    )


def test_entries_go_on_sharing_what_is_folded() -> None:
    consts = {"w": torch.randn(64, 40), "s": torch.randn(64)}
    line = """
        %p: f32[40,64] = permute(@w) {axes=(1, 0)}
        %y: f32[n,64] = matmul(%x, %p)
        %z: f32[n,64] = map(%y, @s) {r0 = load.f32 0; r1 = load.f32 1; r2 = mul.f32 r0 r1}
        return %z
      }"""
    head = "(%x: f32[n,40]) {\n symbol n: 1..8 = size(0, 0)"
    m = run(f"module m\nconst @w: f32[64,40]\nconst @s: f32[64]\nentry a{head}{line}\nentry b{head}{line}",
            "canonicalize", "fold_constants", "fold_batch_norm", consts=consts)  # fmt: skip
    (a,), (b,) = (g.nodes for g in m.entries.values())
    assert a.op == b.op == "matmul"
    assert a.inputs[1].const is b.inputs[1].const and a.inputs[2].const is b.inputs[2].const


def test_loop_and_branch_bodies_are_fused_too() -> None:
    m = run("""module m
      entry f(%x: f32[4], %i: i64[]) {
        %a: i64[], %b: f32[4] = while(%i, %x) {carried=2}
          graph cond(%i: i64[], %x: f32[4]) {
            %p: bool[] = map(%i) {r0 = load.i64 0; r1 = const_.i64 3; r2 = lt.bool r0 r1}
            return %p
          }
          graph body(%i: i64[], %x: f32[4]) {
            %j: i64[] = map(%i) {r0 = load.i64 0; r1 = const_.i64 1; r2 = add.i64 r0 r1}
            %y: f32[4] = map(%x) {r0 = load.f32 0; r1 = tanh.f32 r0}
            %z: f32[4] = map(%y) {r0 = load.f32 0; r1 = neg.f32 r0}
            return %j, %z
          }
        return %b
      }""", "canonicalize", "fuse_elementwise")  # fmt: skip
    body_graph = m.entries["f"].nodes[0].graphs[1]
    assert len(body_graph.nodes) == 2
    x = torch.randn(4)
    want = -torch.tanh(-torch.tanh(-torch.tanh(x)))
    torch.testing.assert_close(evaluate(m.entries["f"], [x, torch.tensor(0)])[0], want)


def test_dump_and_skip(capsys: pytest.CaptureFixture[str]) -> None:
    from trivet.error import Error
    from trivet.pipeline import Options, run_passes

    text = "module m\nentry f(%x: f32[4]) {\n%a: f32[4] = copy(%x)\n%b: f32[4] = copy(%a)\nreturn %b\n}"
    m = parse_module(text)
    run_passes(m, Context(options=Options(dump_after=("canonicalize",))), ("canonicalize", "fold_constants"))
    assert "# after canonicalize\nmodule m" in capsys.readouterr().err
    m = parse_module(text)
    run_passes(m, Context(options=Options(skip=("canonicalize",))), ("canonicalize",))
    assert len(m.entries["f"].nodes) == 2
    with pytest.raises(Error, match="there is no pass 'nothing'"):
        run_passes(m, Context(options=Options(skip=("nothing",))), ())


def test_names_are_made_unique() -> None:
    m = parse_module("module m\nconst @w: f32[2]\nentry f(%x: f32[2]) {\n%a: f32[2] = copy(%x)\nreturn %a, @w\n}")
    g = m.entries["f"]
    g.nodes[0].outputs[0].name = "x"
    g.inputs[0].name = "a b"
    name_values(m)
    assert [g.inputs[0].name, g.nodes[0].outputs[0].name] == ["a_b", "x"]
    g.nodes[0].outputs[0].name = "a_b"
    name_values(m)
    verify(m)
    assert g.nodes[0].outputs[0].name == "a_b_1"
