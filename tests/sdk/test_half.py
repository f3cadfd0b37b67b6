"""Half precision: what is stored in 16 bits, what stays float32, and that nothing finite becomes infinite."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import trivet
from trivet import native
from trivet.api import capture
from trivet.emit import emit
from trivet.fbs.structs import DType, Op, ReduceKind
from trivet.ir.evaluate import evaluate, evaluate_node
from trivet.ir.graph import Module
from trivet.ir.parse import parse_module
from trivet.ir.text import print_module
from trivet.ir.verify import verify
from trivet.passes import narrow_floats
from trivet.pipeline import Context, Options, name_values, run_passes
from trivet.quantize import half
from trivet.quantize.recipe import Recipe, recipe
from trivet.targets.base import find
from trivet.writer import attrs_struct, records

sys.path.insert(0, str(Path(__file__).parent))
from ir_random import copy_module, random_module

F16, BF16 = recipe("f16"), recipe("bf16")


def narrowed(text: str, how: Recipe = F16, consts: dict[str, torch.Tensor] | None = None) -> tuple[Module, list[str]]:
    module = parse_module(text, consts)
    verify(module)
    notes = narrow_floats.narrow(module, how)
    name_values(module)
    verify(module, "narrow_floats")
    return module, notes


def types(module: Module) -> dict[str, str]:
    return {v.name: v.dtype.name for g in module.entries.values() for v in g.values()}


def export(model: object, args: object, how: Recipe | None) -> tuple[Module, trivet.Program]:
    module = capture(model, args)
    context = Context(find("cpu"), Options(half=how))
    run_passes(module, context)
    return module, emit(module, context)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


# ---- what is stored how
def test_products_are_narrow_borders_are_not() -> None:
    w = {"w": torch.randn(128, 128), "b": torch.randn(128)}
    module, notes = narrowed("""
    module m
    const @w: f32[128,128] #00000000
    const @b: f32[128] #00000000
    entry f(%x: f32[4,128]) {
      %y: f32[4,128] = matmul(%x, @w, @b, none)
      %z: f32[4,128] = map(%y) {r0 = load.f32 0; r1 = tanh.f32 r0; r2 = mul.f32 r1 r1}
      %u: f32[4,128] = matmul(%z, @w, none, none)
      %v: f32[4,128] = map(%u) {r0 = load.f32 0; r1 = exp.f32 r0}
      return %v
    }
    """, consts=w)  # fmt: skip
    t = types(module)
    assert [t[n] for n in ("x", "y", "z", "u", "v")] == ["f32", "f16", "f16", "f16", "f32"]
    assert t["w.f16"] == t["b.f16"] == "f16" and "w" not in t
    z = next(n for n in module.entries["f"].nodes if n.outputs[0].name == "z")
    assert [(i.op.name, i.dtype.name) for i in z.attrs.code] == [
        ("load", "f16"), ("cast", "f32"), ("tanh", "f32"), ("mul", "f32"), ("cast", "f16")]  # fmt: skip
    assert notes == ["2 weights, 3 values and 0 states are f16"]


def test_io_changes_when_asked() -> None:
    text = """
    module m
    entry f(%x: f32[4,8], %w: f32[8,8]) {
      %y: f32[4,8] = matmul(%x, %w, none, none)
      return %y
    }
    """
    module, _ = narrowed(text, Recipe(half="bf16", quantize_io=True))
    assert set(types(module).values()) == {"bf16"} and len(module.entries["f"].nodes) == 1
    module, _ = narrowed(text, BF16)
    assert [n.op for n in module.entries["f"].nodes] == ["map", "map", "matmul", "map"]


def test_positions_and_statistics_stay_f32() -> None:
    module, _ = narrowed("""
    module m
    const @freq: f32[1,32] #00000000
    entry f(%x: f32[16,64], %p: i64[16,1], %q: f32[64,64], %t: f32[16,1]) {
      %a: f32[16,32] = map(%p, @freq) {r0 = load.i64 0; r1 = cast.f32 r0; r2 = load.f32 1; r3 = mul.f32 r1 r2}
      %c: f32[16,32] = map(%a) {r0 = load.f32 0; r1 = cos.f32 r0}
      %s: f32[16,32] = map(%t, @freq) {r0 = load.f32 0; r1 = load.f32 1; r2 = mul.f32 r0 r1}
      %e: f32[16,64] = concat(%s, %s) {axis=1}
      %s2: f32[16,64] = map(%e) {r0 = load.f32 0; r1 = sin.f32 r0}
      %y: f32[16,64] = matmul(%x, %q, none, none)
      %m: f32[16,1] = reduce(%y) {kind=mean, axes=(1)}
      %sq: f32[16,64] = map(%y) {r0 = load.f32 0; r1 = mul.f32 r0 r0}
      %v: f32[16,1] = reduce(%sq) {kind=mean, axes=(1)}
      %n: f32[16,64] = map(%y, %m, %v, %s2) {r0 = load.f32 0; r1 = load.f32 1; r2 = sub.f32 r0 r1; r3 = load.f32 2; r4 = rsqrt.f32 r3; r5 = mul.f32 r2 r4; r6 = load.f32 3; r7 = add.f32 r5 r6}
      %z: f32[16,64] = matmul(%n, %q, none, none)
      %h: f32[16,32] = slice(%z) {axis=1}
      %r: f32[16,32] = map(%h, %c) {r0 = load.f32 0; r1 = load.f32 1; r2 = mul.f32 r0 r1}
      %cs: f32[16,32] = scan(%r) {kind=sum, axis=0}
      return %cs
    }
    """)  # fmt: skip
    t = types(module)
    assert {n for n in t if t[n] == "f32"} == {"a", "c", "s", "e", "m", "sq", "v", "r", "cs", "x", "t", "q", "freq"}
    assert {n for n in t if t[n] == "f16"} == {"y", "s2", "n", "z", "h", "v1", "v2"}  # v1, v2: x and q, cast


def test_pooled_mean_is_narrow_and_keeps_hold() -> None:
    text = """
    module m
    const @w: f32[80,80] #00000000
    entry f(%x: f32[2,80,6,6]) {
      %c: f32[2,80,6,6] = conv(%x, @k, none, none) {nd=2, stride=(1, 1), pad=(0, 0), dilation=(1, 1)} loc("body.0", "", "")
      %m: f32[2,80,1,1] = reduce(%c) {kind=mean, axes=(2, 3)} loc("pool", "", "")
      %r: f32[2,80] = reshape(%m)
      %y: f32[2,80] = matmul(%r, @w, none, none) loc("head.fc", "", "")
      return %y
    }
    """.replace("const @w", "const @k: f32[80,80,1,1] #00000000\n    const @w")
    module, _ = narrowed(text)
    assert [types(module)[n] for n in "cmr"] == ["f16"] * 3
    module, notes = narrowed(text, F16.keep(["head"]))
    t = types(module)
    assert t["w"] == t["y"] == "f32" and t["k.f16"] == t["c"] == "f16" and "1 operations are kept" in notes[0]
    module, _ = narrowed(text, F16.keep(["op:linear"]))
    assert types(module)["y"] == "f32" and types(module)["c"] == "f16"
    module, _ = narrowed(text, F16.keep(["*"]))
    assert set(types(module).values()) == {"f32"}


def test_masks_and_large_numbers_stay_finite() -> None:
    text = """
    module m
    entry f(%q: f32[2,4,8], %k: f32[2,8,4], %m: f32[1,4,4]) {
      %s: f32[2,4,4] = matmul(%q, %k, none, none)
      %a: f32[2,4,4] = map(%s, %m) {r0 = load.f32 0; r1 = load.f32 1; r2 = const_.f32 -1e9; r3 = mul.f32 r1 r2; r4 = add.f32 r0 r3}
      %b: f32[2,4,4] = pad(%a) {mode=constant, lo=(0, 0, 0), hi=(0, 0, 0), value=-1e9}
      %p: f32[2,4,4] = softmax(%b) {axis=2}
      %y: f32[2,4,8] = matmul(%p, %q, none, none)
      return %y, %b
    }
    """
    q, k = torch.randn(2, 4, 8), torch.randn(2, 8, 4)
    mask = torch.ones(1, 4, 4).triu(1)
    mask[0, 0] = 1  # a row that nothing takes part in: eager averages
    for how in (F16, BF16):
        module, _ = narrowed(text, how)
        y, b = evaluate(module.entries["f"], [q, k, mask])
        want, _ = evaluate(parse_module(text).entries["f"], [q, k, mask])
        assert bool(b.isfinite().all())
        assert error(y, want) < (3e-3 if how is F16 else 3e-2)
        most = float(torch.finfo(torch.float16 if how is F16 else torch.bfloat16).max)
        x = torch.tensor([[[math.inf, -math.inf, math.nan, 3.4e38, -3.4e38, 1e30, 7e4, 1.0]]]).expand(2, 4, 8)
        g = parse_module("module m\nentry f(%x: f32[2,4,8]) {\n %y: f32[2,4,8] = softmax(%x) {axis=2}\n"
                         " %z: f32[2,4,8] = matmul(%y, %w, none, none)\n return %z\n}".replace("%x: f32[2,4,8]", "%x: f32[2,4,8], %w: f32[2,8,8]"))  # fmt: skip
        narrow_floats.narrow(g, how)
        cast = g.entries["f"].nodes[0]
        assert cast.op == "map"
        got = evaluate_node(cast, [x], {})[0][0, 0].float()
        assert got[:2].tolist() == [math.inf, -math.inf] and math.isnan(got[2])
        assert got[3:6].tolist() == [most, -most, min(most, float(torch.tensor(1e30).bfloat16()))]


def test_constants_that_do_not_fit_are_noted() -> None:
    text = """
    module m
    const @big: f32[80,80] #00000000
    const @tiny: f32[80,80] #00000000
    const @fine: f32[80,80] #00000000
    entry f(%x: f32[4,80]) {
      %a: f32[4,80] = matmul(%x, @big, none, none)
      %b: f32[4,80] = matmul(%a, @tiny, none, none)
      %c: f32[4,80] = matmul(%b, @fine, none, none)
      return %c
    }
    """
    big = torch.randn(80, 80)
    big[3, 3] = 1e5
    consts = {"big": big, "tiny": torch.randn(80, 80) * 1e-8, "fine": torch.randn(80, 80)}
    consts["fine"][0, 0] = math.inf  # infinite it was before
    module, notes = narrowed(text, consts=consts)
    t = types(module)
    assert t["big"] == t["tiny"] == t["a"] == t["b"] == "f32" and t["fine.f16"] == t["c"] == "f16"
    assert "@big stays float32: 1e+05 is beyond f16" in notes and any("@tiny" in n and "too small" in n for n in notes)
    module, notes = narrowed(text, BF16, consts)
    assert "big" not in types(module) and "tiny" not in types(module) and len(notes) == 1


# ---- through the runtime
class Cache(nn.Module):
    """A decoder step: rotary angles, cache of keys, a counter, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(300, 64)
        self.qkv = nn.Linear(64, 192)
        self.norm = nn.RMSNorm(64)
        self.register_buffer("k", torch.zeros(1, 4, 16, 16))
        self.register_buffer("v", torch.zeros(1, 4, 16, 16))
        self.register_buffer("count", torch.zeros(1))

    def forward(self, ids: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.emb(ids))
        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        angle = pos[:, None].float() * torch.tensor([1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 3e-4])
        c, s = angle.cos(), angle.sin()
        q, k = (torch.cat([t[..., :8] * c - t[..., 8:] * s, t[..., :8] * s + t[..., 8:] * c], -1) for t in (q, k))
        self.k.index_copy_(2, pos, k)
        self.v.index_copy_(2, pos, v)
        self.count += 1
        mask = torch.arange(16)[None, :] <= pos[:, None]
        y = F.scaled_dot_product_attention(q, self.k, self.v, attn_mask=mask).transpose(1, 2).flatten(2)
        return F.linear(x + y, self.emb.weight) * self.count


@pytest.mark.parametrize("how", [F16, BF16], ids=["f16", "bf16"])
def test_cache_states_and_tied_weights(how: Recipe, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Cache()
    ids, pos = torch.tensor([[5, 17, 250]]), torch.arange(3)
    entries = {"prefill": (model, (ids, pos)), "decode": (model, (ids[:, :1], pos[:1]))}
    module, program = export(entries, None, how)
    states = {s.name: s.type.dtype for g in module.entries.values() for s, _ in g.writes}
    assert states == {"k": DType[how.half], "v": DType[how.half], "count": DType.f32}
    weights = sum(s.bound for s in module.entries["decode"].plan.storages if s.kind.name == "const_")
    assert weights < 2 * (300 * 64 + 192 * 64 + 192) + 2048  # the tied weight once
    assert not any(n.op in ("cos", "sin") and n.outputs[0].dtype != DType.f32 for n in module.entries["decode"].nodes)
    net = trivet.load(program)
    with torch.no_grad():
        want = [model(ids, pos), model(torch.tensor([[9]]), torch.tensor([3]))]
    got = [net.prefill(ids, pos), net.decode(torch.tensor([[9]]), torch.tensor([3]))]
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.float32 and error(a, b) < (2e-3 if how is F16 else 2e-2)


class Net(nn.Module):
    """One of most operators."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 16, 3, padding=1)
        self.dw = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.bn = nn.BatchNorm2d(16)
        self.gru = nn.GRU(8, 12, batch_first=True)
        self.ln = nn.LayerNorm(12)
        self.fc = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn(self.conv(x)))
        y = F.avg_pool2d(y + F.hardswish(self.dw(y)), 2)
        y = self.up(F.max_pool2d(y, 2))
        y = F.interpolate(F.pad(y, (1, 1, 1, 1), mode="reflect"), scale_factor=2.0, mode="bilinear")
        y = torch.cat([y, y.flip(3)], 2).flatten(2).transpose(1, 2)
        y, _ = self.gru(y)
        y = self.ln(y).sort(1).values
        return F.log_softmax(self.fc(y[:, -20:].mean(1)), 1)


@pytest.mark.parametrize("how", [F16, BF16], ids=["f16", "bf16"])
def test_operators_through_the_runtime(how: Recipe) -> None:
    torch.manual_seed(1)
    model, x = Net().eval(), torch.randn(2, 8, 16, 16)
    module, program = export(model, (x,), how)
    assert sum(v.dtype == DType[how.half] for g in module.entries.values() for v in g.values()) > 20
    with torch.no_grad():
        want = model(x)
    assert error(trivet.load(program)(x), want) < (2e-3 if how is F16 else 2e-2)
    floats = export(model, (x,), None)[1]
    assert error(trivet.load(floats)(x), want) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["sum", "mean", "var", "prod"])
@pytest.mark.parametrize("axes", [(1,), (0,), (0, 1)])
def test_moments_of_halves_are_f32(kind: str, dtype: torch.dtype, axes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = (torch.randn(9, 37) * (1 if kind == "prod" else 300)).to(dtype)
    shape = tuple(1 if i in axes else d for i, d in enumerate(x.shape))
    got = torch.zeros(shape)
    row = {"kind": ReduceKind[kind], "axes": sum(1 << a for a in axes), "correction": 1.0}
    struct = records(attrs_struct(Op.reduce), [row])
    native.run_op(Op.reduce, [x], [got], struct)
    y = x.float()
    want = y.prod(dim=axes[0], keepdim=True) if kind == "prod" and len(axes) == 1 else (
        y.prod().reshape(1, 1) if kind == "prod" else getattr(y, kind)(dim=axes, keepdim=True))  # fmt: skip
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**40),
    symbolic=st.booleans(),
    bf16=st.booleans(),
    io=st.booleans(),
    small=st.sampled_from([0, 4096]),
)
def test_random_graphs_stay_whole(seed: int, symbolic: bool, bf16: bool, io: bool, small: int) -> None:
    module, inputs = random_module(Random(seed), symbolic)
    how = Recipe(half="bf16" if bf16 else "f16", rules={"m.1": None}, quantize_io=io)
    changed = copy_module(module)
    keep, half.SMALL = half.SMALL, small
    try:
        narrow_floats.narrow(changed, how)
    finally:
        half.SMALL = keep
    name_values(changed)
    try:
        verify(changed, "narrow_floats")
        want = torch.bfloat16 if bf16 else torch.float16
        given_ = [x.to(want) if io and x.dtype == torch.float32 else x for x in inputs]
        got = evaluate(changed.entries["main"], given_)
        first = evaluate(module.entries["main"], inputs)
    except Exception:
        print(print_module(module), print_module(changed))
        raise
    for a, b in zip(got, first, strict=True):
        assert a.shape == b.shape
        assert a.dtype == (want if io and b.dtype == torch.float32 else b.dtype)
