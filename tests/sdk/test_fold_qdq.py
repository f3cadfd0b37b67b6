"""fold_qdq: what becomes integer, and that it computes what torch's quantise and dequantise operators say."""

from __future__ import annotations

import math
import re

import pytest
import torch
from qdq_net import QD, Net, Weight, fq, fq16, lower, span
from torch.nn import functional as F

from trivet.ir.parse import parse_module
from trivet.ir.text import print_module
from trivet.ir.verify import verify
from trivet.pipeline import Context, find_pass, name_values


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


X = span(torch.tensor([-3.0, 3.0]))


# ---- products
@pytest.mark.parametrize(("nd", "groups", "stride", "act"), [
    (2, 1, 1, "none"), (2, 1, 2, "relu"), (2, 8, 1, "relu6"), (1, 2, 1, "relu"), (3, 1, 1, "none"), (2, 4, 2, "hardtanh")])  # fmt: skip
def test_conv(nd: int, groups: int, stride: int, act: str) -> None:
    w, b = rand(16, 8 // groups, *[3] * nd) * 0.3, rand(16, seed=1)
    conv = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[nd]
    acts = {"none": lambda t: t, "relu": F.relu, "relu6": F.relu6, "hardtanh": lambda t: F.hardtanh(t, -0.5, 1.5)}
    x = rand(2, 8, *[9] * nd, seed=2)
    out = span(acts[act](conv(x, w, b, stride=stride, padding=1, groups=groups)))

    def net(m: Net, x: torch.Tensor) -> torch.Tensor:
        return fq(acts[act](conv(fq(x, *X), m.w(), m.b, stride=stride, padding=1, groups=groups)), *out)

    y = lower(Net(net, w=Weight(w), b=b), x)
    assert y.kernels() == ["requantize", "qconv", "requantize"]


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("axis", [None, 1])
def test_transposed_conv(groups: int, axis: int | None) -> None:
    w, x = rand(8, 6, 3, 3) * 0.2, rand(2, 8, 7, 7, seed=2)
    out = span(F.conv_transpose2d(x, w, stride=2, padding=1, output_padding=1, groups=groups))

    def net(m: Net, x: torch.Tensor) -> torch.Tensor:
        y = F.conv_transpose2d(fq(x, *X), m.w(), stride=2, padding=1, output_padding=1, groups=groups)
        return fq(y, *out)

    assert "qconv" in lower(Net(net, w=Weight(w, axis)), x).ops


def test_conv_with_real_result_keeps_its_activation() -> None:
    w, b = rand(16, 8, 3, 3) * 0.3, rand(16, seed=1)

    def net(m: Net, x: torch.Tensor) -> torch.Tensor:
        return F.silu(F.conv2d(fq(x, *X), m.w(), m.b))

    y = lower(Net(net, w=Weight(w), b=b), rand(2, 8, 6, 6, seed=2), exact=False, db=90)
    assert y.kernels() == ["requantize", "qconv"]


def test_weights_only() -> None:
    w, b = rand(16, 8, 3, 3) * 0.3, rand(16, seed=1)
    x = rand(2, 8, 6, 6, seed=2)
    y = lower(Net(lambda m, x: F.relu(F.conv2d(x, m.w(), m.b)), w=Weight(w), b=b), x, exact=False, db=90)
    assert y.kernels() == ["qconv"] and y.context.report.quant[0].form == "weights"
    w = rand(24, 40)
    y = lower(
        Net(lambda m, x: F.gelu(F.linear(x, m.w(), m.b)), w=Weight(w), b=rand(24, seed=3)),
        rand(3, 5, 40),
        exact=False,
        db=90,
    )
    assert y.kernels() == ["qmatmul"]


@pytest.mark.parametrize("shape", [(4, 40), (2, 3, 40)])
@pytest.mark.parametrize("axis", [None, 0])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(shape: tuple[int, ...], axis: int | None, bias: bool) -> None:
    w, b = rand(24, 40) * 0.2, rand(24, seed=1) if bias else None
    x = rand(*shape, seed=2)

    def net(m: Net, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.linear(fq(x, *X), m.w(), m.b)
        return fq(F.relu(y), 0.05, -128), F.linear(fq(x, 0.03, 3), m.w())

    y = lower(Net(net, w=Weight(w, axis), b=b), x)
    assert sorted(y.kernels()) == ["qmatmul"] * 2 + ["requantize"] * 3


def test_bias_by_a_map_and_unsigned_activations() -> None:
    w, b, x = rand(24, 40) * 0.2, rand(24, seed=1), rand(4, 40, seed=2)

    def net(m: Net, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(fq(x, 0.03, 128, 0, 255, torch.uint8) @ m.w().t() + m.b)
        return fq(y, 0.04, 0, 0, 255, torch.uint8)

    assert lower(Net(net, w=Weight(w), b=b), x).kernels() == ["requantize", "qmatmul", "requantize"]


@pytest.mark.parametrize("heads", [1, 3])
def test_product_of_activations(heads: int) -> None:
    a, b = rand(2, heads, 5, 16), rand(2, heads, 16, 7, seed=1)

    def net(m: Net, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = fq(a, *X) @ fq(b, 0.02, 7)
        return fq(y, 0.1, 3), y

    y = lower(Net(net), a, b)
    assert y.kernels().count("qmatmul") == 1  # one real result, which is then quantised
    assert lower(Net(lambda m, a, b: net(m, a, b)[0]), a, b).kernels() == [
        "requantize",
        "requantize",
        "qmatmul",
        "requantize",
    ]


def test_sixteen_bit_activations() -> None:
    w, b, x = rand(24, 40) * 0.2, rand(24, seed=1), rand(4, 40, seed=2)

    def net(m: Net, x: torch.Tensor) -> torch.Tensor:
        x = fq16(x, 1e-4)
        return fq16(fq16(F.linear(x, m.w(), m.b), 4e-4) + fq16(F.linear(x, m.v()), 3e-4), 6e-4)

    y = lower(Net(net, w=Weight(w), v=Weight(w.flip(0)), b=b), x, db=80)
    assert y.kernels() == ["requantize", "qmatmul", "qmatmul", "binary", "requantize"]


def test_sums_that_could_pass_32_bits_stay_in_float() -> None:
    w = torch.full((2, 140000), 1.0)
    net = Net(lambda m, x: fq(F.linear(fq(x, *X), m.w()), 500.0), w=Weight(w))
    y = lower(net, rand(1, 140000), exact=False, db=30)
    assert y.kernels() == ["requantize", "requantize", "qmatmul", "requantize", "requantize"]
    assert y.context.report.quant[0].form == "weights"


def test_shared_weights_and_scales() -> None:
    w, x = rand(16, 16) * 0.2, rand(4, 16)

    def net(m: Net, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = fq(F.relu(F.linear(fq(x, *X), m.w())), 0.02, -128)
        return x

    y = lower(Net(net, w=Weight(w)), x)
    names = {n.inputs[1].const for n in y.graph.nodes if n.op == "qmatmul"}
    assert len(names) == 1


# ---- elementwise
@pytest.mark.parametrize("f", [torch.sigmoid, F.gelu, F.hardswish, lambda t: t * 0.7 + 0.1, lambda t: t * t, torch.exp])
def test_lookup(f: object) -> None:
    x = rand(3, 50)
    scale = span(f(x))  # type: ignore[operator]
    y = lower(Net(lambda m, x: fq(f(fq(x, *X)), *scale)), x)  # type: ignore[operator]
    assert y.kernels() == ["requantize", "lookup", "requantize"]


def test_lookup_to_real_numbers() -> None:
    y = lower(Net(lambda m, x: torch.tanh(fq(x, *X))), rand(3, 50), db=100)
    assert y.kernels() == ["requantize", "lookup"]


@pytest.mark.parametrize("same", [True, False])
def test_relu_is_a_change_of_scale(same: bool) -> None:
    s = (0.02, -10)
    y = lower(
        Net(lambda m, x: fq(F.relu(fq(x, *s)), *(s if same else (0.01, -128)))),
        rand(3, 50),
        db=math.inf if same else 40,
    )
    assert y.kernels() == ["requantize"] * (2 if same else 3)  # bounds of the first, or a change of scale


@pytest.mark.parametrize(
    ("f", "scale"), [(lambda a, b: a + b, 0.05), (lambda a, b: F.relu(a - b), 0.04), (lambda a, b: a * b, 0.06)]
)
def test_binary(f: object, scale: float) -> None:
    net = Net(lambda m, a, b: fq(f(fq(a, *X), fq(b, 0.015, -20)), scale, 9))  # type: ignore[operator]
    for shape in ((3, 5, 7), (1, 7), (3, 1, 1)):
        y = lower(net, rand(3, 5, 7), rand(*shape, seed=1))
        assert y.kernels() == ["requantize", "requantize", "binary", "requantize"]


def test_binary_with_a_constant() -> None:
    c = torch.linspace(-2, 2, 255)[None, :50] + 0  # in steps that 8 bits hold
    y = lower(Net(lambda m, x: fq(fq(x, *X) + m.c, 0.05), c=c), rand(3, 50))
    assert y.kernels() == ["requantize", "binary", "requantize"]
    y = lower(Net(lambda m, x: fq(fq(x, *X) * m.c, 0.004), c=rand(50)), rand(3, 50), exact=False)
    assert y.kernels() == ["requantize", "map", "requantize"]


def test_maps_of_several_values_convert_in_place() -> None:
    def net(m: Net, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return fq(torch.sigmoid(fq(a, *X)) * fq(b, *X) / (1 + fq(a, *X).abs()), 0.01)

    y = lower(Net(net), rand(3, 50), rand(3, 50, seed=1), exact=False)
    assert y.kernels() == ["requantize", "requantize", "map", "requantize"]
    kept = next(r for r in y.context.report.quant if r.op == "map")
    assert kept.form == "float"


def test_same_parameters_vanish_and_others_change_the_scale() -> None:
    y = lower(Net(lambda m, x: fq(fq(x, *X), *X)), rand(3, 50))
    assert y.kernels() == ["requantize", "requantize"]
    y = lower(Net(lambda m, x: fq(fq(x, *X), 0.05, 3)), rand(3, 50), db=25)
    assert y.kernels() == ["requantize", "requantize", "requantize"]


# ---- moves
def test_views_between_do_not_matter() -> None:
    w, x = rand(16, 8, 3, 3) * 0.2, rand(2, 6, 6, 8)

    def net(m: Net, x: torch.Tensor) -> torch.Tensor:
        y = F.conv2d(fq(x, *X).permute(0, 3, 1, 2), m.w())
        return fq(F.relu(y).flatten(2).transpose(1, 2)[:, 1:], 0.05, -128)

    y = lower(Net(net, w=Weight(w)), x)
    assert y.kernels() == ["requantize", "qconv", "requantize"]


@pytest.mark.parametrize("f", [
    lambda t: F.max_pool2d(t, 2), lambda t: F.pad(t, (1, 2, 0, 1)), lambda t: F.interpolate(t, scale_factor=2),
    lambda t: t.amax((2, 3)), lambda t: t.amin(1), lambda t: t[:, [2, 0, 1]], lambda t: t.flip(2), lambda t: torch.cat([t, t], 1),
    lambda t: t.sort(-1).values, lambda t: t.repeat(1, 2, 1, 1)])  # fmt: skip
def test_moves_keep_stored_integers(f: object) -> None:
    x = rand(2, 4, 6, 6)
    y = lower(Net(lambda m, x: fq(f(fq(x, *X)), *X)), x, db=math.inf)  # type: ignore[operator]
    assert y.kernels().count("requantize") == 2
    assert all(v.type.quant is not None for n in y.graph.nodes for v in n.outputs[:1] if n.op != "requantize")
    y = lower(Net(lambda m, x: f(fq(x, *X))), x, db=math.inf)  # type: ignore[operator]
    assert y.kernels()[-1] in ("requantize", "map") or y.ops[-1] == "reshape"


def test_positions_are_found_on_stored_integers() -> None:
    y = lower(Net(lambda m, x: (fq(x, *X).argmax(1), fq(x, *X).topk(3, 1).indices)), rand(5, 30), db=math.inf)
    assert y.kernels() == ["requantize", "reduce", "sort"]


def test_max_pool_behind_a_convolution() -> None:
    w, x = rand(16, 8, 3, 3) * 0.2, rand(2, 8, 8, 8)
    y = lower(Net(lambda m, x: fq(F.max_pool2d(F.relu(F.conv2d(fq(x, *X), m.w())), 2), 0.04, -128), w=Weight(w)), x)
    assert y.kernels() == ["requantize", "qconv", "pool", "requantize"]


def test_concat_keeps_the_scale_of_each_piece() -> None:
    def net(m: Net, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        c = torch.cat([fq(a, *X), fq(b, 0.01, 5)], 1)
        return fq(c[:, :3], *X), fq(c[:, 3:], 0.01, 5), fq(c, 0.03, 0)

    y = lower(Net(net), rand(2, 3, 4), rand(2, 5, 4, seed=1))
    assert y.db[:2] == [math.inf, math.inf]
    assert y.kernels().count("requantize") == 2 + 2 + 3


# ---- windows and rows
@pytest.mark.parametrize("f", [
    lambda t: F.avg_pool2d(t, 3, 2, 1), lambda t: F.avg_pool2d(t, 3, 2, 1, count_include_pad=False),
    lambda t: F.adaptive_avg_pool2d(t, 1), lambda t: F.adaptive_avg_pool2d(t, (4, 3)), lambda t: t.mean((2, 3)),
    lambda t: t.sum(1), lambda t: F.avg_pool2d(t, 2, ceil_mode=True)])  # fmt: skip
def test_averages(f: object) -> None:
    x = rand(2, 4, 9, 9)
    scale = span(f(x))  # type: ignore[operator]
    y = lower(Net(lambda m, x: fq(f(fq(x, *X)), *scale)), x)  # type: ignore[operator]
    assert y.kernels()[1] in ("qpool", "qreduce") and len(y.kernels()) == 3


def test_softmax() -> None:
    y = lower(Net(lambda m, x: fq(fq(x, 0.03, 4).softmax(1), 1 / 256, -128)), rand(2, 20, 3))
    assert y.kernels() == ["requantize", "qsoftmax", "requantize"]
    y = lower(Net(lambda m, x: fq(fq(x, 0.03, 4).softmax(1), 1 / 200, -128)), rand(2, 20, 3), exact=False)
    assert "softmax" in y.kernels()
    assert any("1/256" in r.why for r in y.context.report.quant)


@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm(affine: bool) -> None:
    w, b = (rand(32, seed=1) + 1, rand(32, seed=2)) if affine else (None, None)
    net = Net(lambda m, x: fq(F.layer_norm(fq(x, *X), (32,), m.w, m.b), 0.05, 3), w=w, b=b)
    y = lower(net, rand(5, 4, 32))
    assert y.kernels() == ["requantize", "qnorm", "requantize"]
    net = Net(lambda m, x: fq(F.rms_norm(fq(x, *X), (32,), m.w), 0.05, 3), w=w)
    assert lower(net, rand(5, 4, 32)).kernels() == ["requantize", "qnorm", "requantize"]


@pytest.mark.parametrize("corners", [True, False])
@pytest.mark.parametrize(("scale", "integer"), [(X, True), ((0.06, 2), True), ((0.03, 2), False)])
def test_linear_resize(corners: bool, scale: tuple[float, int], integer: bool) -> None:
    x = rand(1, 3, 7, 5)
    net = Net(lambda m, x: fq(F.interpolate(fq(x, *X), scale_factor=2, mode="bilinear", align_corners=corners), *scale))
    y = lower(net, x, db=40 if scale == X else 32, exact=integer)
    assert ("qresize" in y.kernels()) == integer


@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn"])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_recurrent_layers(kind: str, bidirectional: bool) -> None:
    torch.manual_seed(0)
    cls = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn": torch.nn.RNN}[kind]
    layer = cls(12, 16, bidirectional=bidirectional, batch_first=True)
    names = [n for n, _ in layer.named_parameters()]
    weights = {n: Weight(p.detach(), 0) for n, p in layer.named_parameters() if n.startswith("weight")}
    biases = {n: p.detach() for n, p in layer.named_parameters() if n.startswith("bias")}
    op = {"lstm": torch.lstm, "gru": torch.gru, "rnn": torch.rnn_tanh}[kind]
    directions = 2 if bidirectional else 1

    def net(m: Net, x: torch.Tensor) -> torch.Tensor:
        flat = [getattr(m, n)() if n in weights else getattr(m, n) for n in names]
        h = torch.zeros(directions, x.shape[0], 16)
        hx = (h, h) if kind == "lstm" else h
        y = op(fq(x, *X), hx, flat, True, 1, 0.0, False, bidirectional, True)
        return fq(y[0], 1 / 128)

    y = lower(Net(net, **weights, **biases), rand(3, 11, 12), db=22)
    assert y.kernels().count("qrnn") == directions


# ---- tables
def test_embedding() -> None:
    ids = torch.randint(0, 50, (3, 7))
    y = lower(Net(lambda m, i: F.embedding(i, m.w()), w=Weight(rand(50, 24))), ids, db=math.inf)
    assert y.kernels() == ["qgather"]
    y = lower(Net(lambda m, i: fq(F.embedding(i, m.w()), 0.03), w=Weight(rand(50, 24))), ids, db=math.inf)
    assert y.kernels() == ["gather", "requantize"]


def test_tied_table_and_head_are_one_block() -> None:
    ids = torch.randint(0, 64, (3, 7))
    net = Net(lambda m, i: F.linear(torch.tanh(F.embedding(i, m.w())), m.w()), w=Weight(rand(64, 48)))
    y = lower(net, ids, exact=False, db=90)
    assert y.kernels() == ["qgather", "map", "qmatmul"]
    packed = [n.inputs[0 if n.op == "qgather" else 1].const for n in y.graph.nodes if n.op in ("qgather", "qmatmul")]
    assert packed[0] is packed[1]


# ---- borders
def test_quantized_inputs_and_outputs() -> None:
    w, x = rand(16, 8, 3, 3) * 0.2, rand(2, 8, 6, 6)
    net = Net(lambda m, x: fq(F.conv2d(fq(x, *X), m.w()), 0.05, 2), w=Weight(w))
    y = lower(net, x, quantize_io=True)
    assert y.ops == ["qconv"]
    from trivet.runtime import load

    run = load(y.program)
    q = QD.quantize_per_tensor.default(x, *X, -128, 127, torch.int8)
    got = run(q)
    assert got.dtype == torch.int8
    want = QD.quantize_per_tensor.default(net(x), 0.05, 2, -128, 127, torch.int8)
    assert (got.int() - want.int()).abs().max() <= 1


def test_control_flow() -> None:
    w, x = rand(16, 16) * 0.2, rand(4, 16)

    def net(m: Net, x: torch.Tensor, flag: torch.Tensor) -> torch.Tensor:
        w = m.w()
        return torch.cond(
            flag, lambda x: fq(F.linear(fq(x, *X), w), 0.05), lambda x: fq(F.relu(fq(x, *X)), 0.05, -128), (x,)
        )

    y = lower(Net(net, w=Weight(w)), x, torch.tensor(True), other=(x, torch.tensor(False)))
    inner = [n.op for n in y.graph.nodes[-1].graphs[0].nodes]
    assert "qmatmul" in inner, y.module


def test_dynamic_sizes() -> None:
    w, x = rand(16, 8, 3, 3) * 0.2, rand(2, 8, 6, 6)
    n, h = torch.export.Dim("n", min=1, max=8), torch.export.Dim("h", min=4, max=40)
    net = Net(lambda m, x: fq(F.relu(F.conv2d(fq(x, *X), m.w())).mean((2, 3)), 0.01, -128), w=Weight(w))
    y = lower(net, x, dynamic_shapes=(({0: n, 2: h},),), other=(rand(5, 8, 12, 6, seed=4),))
    assert "qconv" in y.ops


# ---- text in, text out
def folded(nodes: str, header: str = "%x: f32[2,4]", consts: str = "") -> list[str]:
    """The nodes after the pass, without types of results and places."""
    module = parse_module(f"module m\n{consts}\nentry f({header}) {{\n{nodes}\n}}\n")
    verify(module)
    find_pass("fold_qdq")(module, Context())
    name_values(module)
    verify(module, "fold_qdq")
    lines = print_module(module).split("entry", 1)[1].splitlines()[1:-1]
    return [re.sub(r"(%\w+): [^=]*=", r"\1 =", re.sub(r" loc\(.*\)$", "", t.strip())) for t in lines]


def test_text_of_a_product() -> None:
    lines = folded("""
      %q: i8[2,4]{0.5, 2} = requantize(%x)
      %r: f32[2,4] = requantize(%q)
      %w: f32[2,4] = requantize(@w)
      %t: f32[4,2] = permute(%w) {axes=(1, 0)}
      %y: f32[2,2] = matmul(%r, %t, @b, none)
      %a: f32[2,2] = map(%y) {r0 = load.f32 0; r1 = relu.f32 r0}
      %p: i8[2,2]{0.25, -128} = requantize(%a)
      %z: f32[2,2] = requantize(%p)
      return %z
    """, consts="const @w: i8[2,4]{axis=0, scale=[0.5, 0.25]} = [1, 2, 3, 4, 5, 6, 7, 8]\nconst @b: f32[2] = [1, -2]")  # fmt: skip
    assert lines == [
        "%q = requantize(%x) {y_zero=2, scale=2.0}",
        "%p = qmatmul(%q, @w, @w.scale, @w.bias) {a_zero=2, y_zero=-128, lo=-128.0, hi=127.0}",
        "%z = requantize(%p) {x_zero=-128, scale=0.25}",
        "return %z",
    ]


def test_text_of_what_meets() -> None:
    lines = folded("""
      %q: i8[2,4]{0.5, 2} = requantize(%x)
      %r: f32[2,4] = requantize(%q)
      %t: f32[4,2] = permute(%r) {axes=(1, 0)}
      %s: i8[4,2]{0.5, 2} = requantize(%t)
      %u: i8[4,2]{1} = requantize(%t)
      %v: f32[4,2] = requantize(%s)
      %w: f32[4,2] = requantize(%u)
      return %v, %w
    """)  # fmt: skip
    assert lines == [
        "%q = requantize(%x) {y_zero=2, scale=2.0}",
        "%v1 = permute(%q) {axes=(1, 0)}",
        "%u = requantize(%v1) {x_zero=2, multiplier=1073741824, shift=31}",
        "%v = requantize(%v1) {x_zero=2, scale=0.5}",
        "%w = requantize(%u)",
        "return %v, %w",
    ]


def test_text_of_a_table_that_is_stored_again() -> None:
    lines = folded("""
      %t: f32[4,2] = requantize(@t)
      %y: f32[3,2] = gather(%t, %i) {kind=take, axis=0}
      %q: i8[3,2]{0.5} = requantize(%y)
      %z: f32[3,2] = requantize(%q)
      return %z
    """, "%i: i64[3]", "const @t: i8[4,2]{0.25} = [1, 2, 3, 4, 5, 6, 7, 8]")  # fmt: skip
    assert [t for t in lines if "gather" in t] == ["%q = gather(@t, %i) {kind=take, axis=0}"]


def test_nothing_happens_without_quantisation() -> None:
    lines = folded("""
      %a: f32[2,4] = map(%x) {r0 = load.f32 0; r1 = relu.f32 r0}
      return %a
    """)  # fmt: skip
    assert lines == ["%a = map(%x) {r0 = load.f32 0; r1 = relu.f32 r0}", "return %a"]


# ---- file
def test_file_says_what_stored_integers_mean() -> None:
    from trivet.reader import FileView

    net = Net(lambda m, x: fq(F.relu(F.linear(fq(x, *X), m.w())), 0.03, -128), w=Weight(rand(16, 16)))
    y = lower(net, rand(4, 16))
    view = FileView(y.program.to_bytes()).entries[0]
    found = {(round(q.scale, 6), q.zero, q.bits) for q in view.quants.values()}
    assert found == {(round(X[0], 6), X[1], 8), (0.03, -128, 8)}
    assert list(view.quants) == sorted(view.quants)


def test_cortex_m_reads_weights_by_rows() -> None:
    w, v = rand(16, 8, 3, 3) * 0.2, rand(10, 16)

    def net(m: Net, x: torch.Tensor) -> torch.Tensor:
        y = fq(fq(F.relu(F.conv2d(fq(x, *X), m.w())), 0.02, -128).mean((2, 3)), 0.01, -128)
        return fq(F.linear(y, m.v()), 0.05)

    def real(m: Net, x: torch.Tensor) -> torch.Tensor:
        return F.relu(F.conv2d(fq(x, *X), m.w()))

    (conv,) = (
        n for n in lower(Net(real, w=Weight(w)), rand(1, 8, 8, 8), target="cpu.cortex_m").graph.nodes if n.op == "qconv"
    )
    assert conv.attrs.packed == 0  # its results are real: as it is, channels innermost
    assert conv.inputs[1] is not None and conv.inputs[1].const is not None
    assert conv.inputs[1].const.data.permute(0, 2, 3, 1).is_contiguous()
    y = lower(Net(net, w=Weight(w), v=Weight(v)), rand(1, 8, 8, 8), target="cpu.cortex_m")
    (conv,) = (n for n in y.graph.nodes if n.op == "qconv")
    (product,) = (n for n in y.graph.nodes if n.op == "qmatmul")
    assert conv.attrs.packed == product.attrs.packed == 2
    for node, shape, plain in ((conv, (16, 3, 3, 8), w.permute(0, 2, 3, 1)), (product, (10, 16), v)):
        rows, scale, bias = (x.const.data for x in node.inputs[1:4] if x is not None and x.const is not None)
        rows = rows.reshape(shape)  # outputs first, what is summed innermost
        assert bool((rows.sign() * plain.sign() >= 0).all()) and int(rows.abs().amax()) == 127
        assert scale.shape == (2, shape[0]) and bool((scale[1] >= 0).all()) and int(scale[1].max()) < 30
        zero = node.attrs.x_zero if node is conv else node.attrs.a_zero
        assert torch.equal(bias.long(), -zero * rows.long().flatten(1).sum(1))  # there is no bias but this
    packed = lower(Net(net, w=Weight(w), v=Weight(v)), rand(1, 8, 8, 8))
    assert all(n.attrs.packed for n in packed.graph.nodes if n.op in ("qconv", "qmatmul"))


def test_models_quantised_by_pt2e() -> None:
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86
    from torchao.testing.pt2e import _xnnpack_quantizer as xnnpack

    class Small(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.n = torch.nn.Conv2d(3, 16, 3, 2, 1), torch.nn.BatchNorm2d(16)
            self.d, self.e = torch.nn.Conv2d(16, 16, 3, 1, 1, groups=16), torch.nn.Conv2d(16, 16, 1)
            self.l = torch.nn.Linear(16, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = F.relu6(self.n(self.a(x)))
            x = F.max_pool2d(x + self.e(F.hardswish(self.d(x))), 2)
            return self.l(x.mean((2, 3))).softmax(1)

    torch.manual_seed(0)
    first = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    second = xnnpack.XNNPACKQuantizer().set_global(xnnpack.get_symmetric_quantization_config(is_per_channel=True))
    x = rand(2, 3, 32, 32)
    for quantizer in (first, second):
        net = prepare_pt2e(torch.export.export(Small().eval(), (x,)).module(), quantizer)
        net(x)
        y = lower(convert_pt2e(net), x, exact=False, db=45)
        assert y.kernels().count("qconv") == 3 and y.kernels().count("qmatmul") == 1
