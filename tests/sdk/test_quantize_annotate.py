"""What is stored as integers: exact expectations for small graphs, in the recipe "w8a8" unless a test says otherwise.

A graph is quantised, and what comes out is read as text: `q` marks values that are stored, w weights.
"""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.export import Dim

import trivet
from trivet.quantize.recipe import W8, Recipe, Spec
from trivet.quantize.stage import quantize
from trivet.targets.base import find

MINMAX = Recipe(W8, Spec("i8", symmetric=False))


class Fn(nn.Module):
    """A function as a module, with layers a, b, c."""

    def __init__(self, f, **layers):
        super().__init__()
        self.f = f
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *args, **kwargs):
        return self.f(self, *args, **kwargs)


def name(node):
    return (
        str(node.target).split(".")[1] if node.op == "call_function" and "." in str(node.target) else str(node.target)
    )


def stored(q):
    """{operator: [what it reads, "q" stored, "r" rows, "w8"/"w4" weights, "f" float], "-> q" when its result is stored}."""
    nodes = list(q.converted.graph.nodes)

    def how(a):
        if not isinstance(a, torch.fx.Node) or not isinstance(a.meta.get("val", torch.zeros(1)), torch.Tensor):
            return None
        t = str(a.target)
        if "dequantize" in t:
            source = a.args[0]
            if source.op == "get_attr":
                return "w4" if a.args[-1] == 4 else "w8"
            return "r" if "affine" in t else "q"
        return None if a.op == "get_attr" else "f"

    out = {}
    for n in nodes:
        if (
            n.op != "call_function"
            or "quantize" in str(n.target)
            or "getitem" in str(n.target)
            or "choose" in str(n.target)
        ):
            continue
        flat = torch.utils._pytree.tree_leaves(n.args)
        reads = "".join(h for h in map(how, flat) if h)
        users = [u for u in n.users if "getitem" not in str(u.target)] or [v for u in n.users for v in u.users]
        kept = any("quantize_per_tensor" in str(u.target) for u in users)
        key = n.name
        out[key] = reads + (" -> q" if kept else "")
    return out


def run(model, *args, recipe=MINMAX, calibrate=None, **kw):
    torch.manual_seed(0)
    return quantize(model.eval(), args, recipe=recipe, calibrate=calibrate or [args], **kw)


def scales(q):
    """Scale and zero of every static quantise operator, in order."""
    return [(round(n.args[1], 7), n.args[2]) for n in q.converted.graph.nodes
            if "quantized_decomposed.quantize_per_tensor" in str(n.target)]  # fmt: skip


# ---- products and what is fused to them -----------------------------------------------------------------------------------
def test_conv_relu_linear():
    m = Fn(lambda s, x: s.b(F.relu(s.a(x)).flatten(1)), a=nn.Conv2d(1, 2, 3), b=nn.Linear(32, 3))
    q = run(m, torch.randn(2, 1, 6, 6))
    # nothing between conv and relu; the logits stay float
    assert stored(q) == {"conv2d": "qw8", "relu": "f -> q", "view": "q -> q", "linear": "qw8"}
    assert q.why == {}


@pytest.mark.parametrize("act", [nn.ReLU(), nn.ReLU6(), nn.Hardtanh(), nn.ReLU(inplace=True)])
def test_batch_norm_and_clamps_are_inside(act):
    m = nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4, eps=1e-3), act, nn.Conv2d(4, 2, 1))
    m[1].running_var.uniform_(0.5, 2)
    q = run(m, torch.randn(2, 2, 6, 6))
    kinds = [v for v in stored(q).values()]
    assert kinds == ["qw8", "f -> q", "qw8"]


def test_range_behind_relu6_is_its_own():
    m = nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU6(), nn.Conv2d(1, 1, 1))
    m[0].weight.data.fill_(1.0)
    m[0].bias.data.zero_()
    x = torch.linspace(-50, 100, 64).reshape(1, 1, 8, 8)
    q = run(m, x)
    assert scales(q) == [(round(150 / 255, 7), -128 + 85), (round(6 / 255, 7), -128)]


def test_weights_are_symmetric_per_channel():
    m = nn.Conv2d(3, 4, 1)
    q = run(m, torch.randn(1, 3, 4, 4))
    dq = next(n for n in q.converted.graph.nodes if "dequantize_per_channel" in str(n.target))
    w, s, z = (getattr(q.converted, n.target) for n in dq.args[:3])
    assert dq.args[3] == 0 and bool((z == 0).all())
    want = m.weight.detach().abs().amax((1, 2, 3)) / 127
    torch.testing.assert_close(s, want)
    assert int(w.max()) <= 127 and int(w.min()) >= -127 and bool((w.abs().amax((1, 2, 3)) == 127).all())


@pytest.mark.parametrize("n", [1, 2, 3])
def test_transposed_convolutions(n):
    conv, back = (getattr(nn, f"{k}{n}d") for k in ("Conv", "ConvTranspose"))
    m = nn.Sequential(conv(2, 3, 1), back(3, 4, 2, stride=2), nn.ReLU(), conv(4, 1, 1))
    q = run(m, torch.randn(1, 2, *[4] * n))
    assert list(stored(q).values()) == ["qw8 -> q", "qw8", "f -> q", "qw8"]
    axes = [x.args[3] for x in q.converted.graph.nodes if "dequantize_per_channel" in str(x.target)]
    assert sorted(axes) == [0, 0, 1]


def test_matrix_products_of_all_forms():
    w = nn.Parameter(torch.randn(4, 5))

    def f(s, x):
        a = x @ s.a.w  # weight [K, N]
        b = torch.addmm(s.a.b, a, s.a.v.t())
        return torch.bmm(b[None], b[None].transpose(1, 2))  # two activations

    layer = nn.Module()
    layer.w, layer.v, layer.b = w, nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(6))
    q = run(Fn(f, a=layer), torch.randn(3, 4))
    got = stored(q)
    assert got["matmul"] == "qw8 -> q" and got["addmm"] == "qw8 -> q" and got["bmm"] == "qq"
    axes = [x.args[3] for x in q.converted.graph.nodes if "dequantize_per_channel" in str(x.target)]
    assert axes == [1, 1] or sorted(axes) == [1, 1]


def test_einsum_is_taken_apart():
    m = Fn(lambda s, x: torch.einsum("bij,bkj->bik", s.a(x), s.b(x)), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    q = run(m, torch.randn(2, 3, 4))
    assert any(k.startswith("bmm") and v == "qq" for k, v in stored(q).items())


# ---- elementwise work -------------------------------------------------------------------------------------------------------
def test_expressions_of_one_value_are_one_step():
    def f(s, x):
        y = s.a(x)
        y = y * torch.sigmoid(y)  # two nodes, one function of y
        y = y * F.relu6(y + 3) / 6
        return s.b(y)

    q = run(Fn(f, a=nn.Conv2d(2, 3, 1), b=nn.Conv2d(3, 1, 1)), torch.randn(1, 2, 4, 4))
    got = stored(q)
    inner = {k: v for k, v in got.items() if not k.startswith("conv")}
    assert sum(v.endswith("-> q") for v in inner.values()) == 1 + got["conv2d"].endswith("-> q") - 1
    assert got["conv2d"] == "qw8 -> q" and got["conv2d_1"] == "qw8" and got["div"] == "f -> q"


def test_lookups_on_both_sides_of_a_fork():
    def f(s, x):
        y = s.a(x)
        t = torch.tanh(y)
        return s.b(t) + s.c(F.gelu(t))

    q = run(Fn(f, a=nn.Linear(3, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 4)), torch.randn(2, 3))
    got = stored(q)
    assert got["linear"] == "qw8 -> q" and got["tanh"] == "q -> q" and got["gelu"] == "q -> q"
    assert got["linear_1"] == got["linear_2"] == "qw8" and got["add"] == "ff"


def test_what_stands_in_front_of_the_first_product_stays_float():
    m = Fn(lambda s, x: s.a((x / 255 - 0.5) * 2), a=nn.Conv2d(1, 1, 1))
    q = run(m, torch.rand(1, 1, 4, 4) * 255)
    assert [v for k, v in stored(q).items() if not k.startswith("conv")] == ["f", "f", "f -> q"]
    assert len(scales(q)) == 1 and all(w == "its input is float" for w in q.why.values())


def test_residual_blocks():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x):
            return F.relu(x + self.b(F.relu(self.a(x))))

    q = run(nn.Sequential(Block(), Block()), torch.randn(1, 4, 5, 5))
    got = stored(q)
    assert got["add"] == "qq" and got["relu_1"] == "f -> q"  # relu behind the sum, ranges behind relu
    assert got["conv2d_1"] == "qw8 -> q" and got["conv2d_3"] == "qw8"
    assert got["add_1"] == "qf" and q.why["add_1"] == "only float operators read its result"


def test_scalars_and_constants():
    c = torch.randn(4, 1, 1)
    m = Fn(lambda s, x: s.b(s.a(x) * 3 + 1) + 0.0, a=nn.Conv2d(2, 4, 1), b=nn.Conv2d(4, 4, 1))
    assert stored(run(m, torch.randn(1, 2, 4, 4)))["mul"] == "q"

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(2, 4, 1), nn.Conv2d(4, 4, 1)
            self.register_buffer("c", c)

        def forward(self, x):
            return self.b(self.a(x) * self.c)

    assert stored(run(Scaled(), torch.randn(1, 2, 4, 4)))["mul"] == "qw8 -> q"


def test_masks_are_not_added_in_integers():
    def f(s, x, mask):
        k = s.a(x)
        scores = k @ k.transpose(1, 2) + (1.0 - mask[:, None].float()) * -1e9
        return s.b(scores.softmax(-1) @ k)

    m = Fn(f, a=nn.Linear(4, 4), b=nn.Linear(4, 2))
    x, mask = torch.randn(2, 5, 4), torch.ones(2, 5, dtype=torch.bool)
    mask[:, -2:] = False
    q = run(m, x, mask)
    got = stored(q)
    assert got["add"] == "ff" and got["softmax"] == "f -> q" and got["matmul_1"] == "qq -> q"
    assert max(s for s, _ in scales(q)) < 1  # the mask has not widened any range
    want, have = m(x, mask), q.module(x, mask)
    assert 10 * torch.log10((want**2).sum() / ((want - have) ** 2).sum()) > 25


def low(q, x):
    """What counts of the inputs of softmax: 16 below the highest of each row."""
    seen = []

    class Watch(torch.fx.Interpreter):
        def run_node(self, n):
            out = super().run_node(n)
            if n.name == "div":
                seen.append(torch.maximum(out, out.amax(-1, keepdim=True) - 16).min())
            return out

    Watch(q.reference).run(x, enable_io_processing=False)
    return seen[0]


def test_attention_written_out():
    def f(s, x):
        k = s.a(x)
        return s.b(((k @ k.transpose(1, 2)) / 2).softmax(-1) @ k)

    x = torch.randn(2, 5, 4)
    x[0] *= 30  # scores of hundreds: softmax needs the highest only
    q = run(Fn(f, a=nn.Linear(4, 4), b=nn.Linear(4, 2)), x)
    got = stored(q)
    assert (
        got["matmul"] == "qq -> q"
        and got["div"] == "q -> q"
        and got["softmax"] == "q -> q"
        and got["matmul_1"] == "qq -> q"
    )
    assert scales(q)[-2] == (round(1 / 256, 7), -128)
    scale, zero = scales(q)[-3]
    assert -(zero + 128) * scale == pytest.approx(float(low(q, x)), abs=2 * scale)


def test_masks_of_minus_infinity():
    def f(s, x, mask):
        k = s.a(x)
        return s.b((k @ k.transpose(1, 2)).masked_fill(mask, float("-inf")).softmax(-1) @ k)

    m = Fn(f, a=nn.Linear(4, 4), b=nn.Linear(4, 2))
    x, mask = torch.randn(2, 5, 4), torch.zeros(2, 5, 5, dtype=torch.bool)
    mask[..., 3:] = True
    q = run(m, x, mask)
    assert torch.isfinite(q.module(x, mask)).all()


# ---- concat, pools, views ---------------------------------------------------------------------------------------------------
def test_each_input_of_concat_has_its_own_scale():
    m = Fn(
        lambda s, x: s.b(torch.cat([s.a(x), s.c(x) * 100], 1)),
        a=nn.Conv2d(2, 3, 1),
        b=nn.Conv2d(6, 1, 1),
        c=nn.Conv2d(2, 3, 1),
    )
    q = run(m, torch.randn(1, 2, 4, 4))
    assert stored(q)["cat"] == "qq -> q"
    (a, _), _, (wide, _), (both, _) = scales(q)[-4:]
    assert wide > 20 * a and both == wide  # concat's own range covers both


def test_concat_at_the_end_stays_float():
    m = Fn(lambda s, x: torch.cat([s.a(x), s.b(x)], 1), a=nn.Conv2d(2, 3, 1), b=nn.Conv2d(2, 3, 1))
    q = run(m, torch.randn(1, 2, 4, 4))
    assert stored(q) == {"conv2d": "qw8", "conv2d_1": "qw8", "cat": "ff"}


def test_views_and_max_pool_share_their_inputs_scale():
    def f(s, x):
        y = F.max_pool2d(F.pad(s.a(x), (1, 1, 1, 1)), 2)
        y = F.interpolate(y, scale_factor=2).permute(0, 2, 3, 1)[:, 1:, :, :].reshape(1, -1, 4)
        return s.b(y)

    q = run(Fn(f, a=nn.Conv2d(2, 4, 1), b=nn.Linear(4, 3)), torch.randn(1, 2, 6, 6))
    got = stored(q)
    assert all(v.endswith("q -> q") for k, v in got.items() if k not in ("conv2d", "linear"))
    assert len(set(scales(q)[1:])) == 1


def test_padding_with_other_values_stays_float():
    m = Fn(lambda s, x: s.b(F.pad(s.a(x), (1, 1), value=-1e4)), a=nn.Conv1d(2, 2, 1), b=nn.Conv1d(2, 1, 3))
    q = run(m, torch.randn(1, 2, 8))
    assert stored(q)["pad"] == "f -> q" and "pad" in q.why
    m = Fn(lambda s, x: s.b(F.pad(s.a(x), (1, 1), mode="reflect")), a=nn.Conv1d(2, 2, 1), b=nn.Conv1d(2, 1, 3))
    assert stored(run(m, torch.randn(1, 2, 8)))["pad"] == "q -> q"


def test_padded_max_pool_does_not_widen_the_range():
    m = nn.Sequential(nn.MaxPool2d(3, 2, 1), nn.Conv2d(4, 4, 1))
    x = torch.rand(1, 4, 9, 9) - 2.0  # all below zero
    q = run(m, x)
    (first, zero), second = scales(q)
    assert first == pytest.approx(-float(x.min()) / 255, rel=1e-5) and zero == 127 and second == (first, zero)


def test_average_pool_and_mean_have_their_own_scale():
    m = Fn(lambda s, x: s.b(F.avg_pool2d(s.a(x), 2).mean((2, 3))), a=nn.Conv2d(2, 4, 1), b=nn.Linear(4, 3))
    q = run(m, torch.randn(1, 2, 8, 8))
    assert stored(q) == {"conv2d": "qw8 -> q", "avg_pool2d": "q -> q", "mean": "q -> q", "linear": "qw8"}
    assert len(set(scales(q))) == 4


def test_split_and_several_results():
    def f(s, x):
        a, b = s.a(x).chunk(2, 1)
        v, _ = b.max(2)
        return s.b(a) + s.c(v[..., None])

    q = run(Fn(f, a=nn.Conv1d(2, 4, 1), b=nn.Conv1d(2, 1, 1), c=nn.Conv1d(2, 1, 1)), torch.randn(1, 2, 8))
    got = stored(q)
    assert got["split"].startswith("q") and got["conv1d_1"] == got["conv1d_2"] == "qw8" and got["max_1"].startswith("q")
    assert len(set(scales(q)[1:])) == 1


def test_light_work_only():
    """Without any product the light operators are what there is to quantise."""
    m = Fn(lambda s, x, y: torch.cat([F.avg_pool2d(x, 1), F.max_pool2d(y, 1)], 1))
    x, y = torch.rand(1, 2, 4, 4) * 14 - 10, torch.rand(1, 2, 4, 4) * 9 + 1
    q = run(m, x, y)
    assert stored(q) == {"avg_pool2d": "q -> q", "max_pool2d": "q -> q", "cat": "qq -> q"}


# ---- norms, recurrent layers, embeddings ----------------------------------------------------------------------------------
def test_layer_norm_softmax_embedding():
    def f(s, ids):
        y = s.n(s.a(s.e(ids)))
        return s.b(y), s.e(ids)

    q = run(
        Fn(f, e=nn.Embedding(10, 4), a=nn.Linear(4, 4), n=nn.LayerNorm(4), b=nn.Linear(4, 3)), torch.arange(6)[None]
    )
    got = stored(q)
    assert got["embedding"] == "w8f -> q" or got["embedding"].startswith("w8")
    assert got["linear"] == "qw8 -> q" and got["layer_norm"] == "q -> q" and got["linear_1"] == "qw8"


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers(kind):
    m = Fn(
        lambda s, x: s.b(s.r(s.a(x))[0]),
        a=nn.Linear(3, 4),
        r=getattr(nn, kind)(4, 5, 2, batch_first=True),
        b=nn.Linear(5, 2),
    )
    q = run(m, torch.randn(2, 6, 3))
    got = {k.split("_")[0]: v for k, v in stored(q).items() if "zeros" not in k}
    name = {"LSTM": "lstm", "GRU": "gru", "RNN": "rnn"}[kind]
    assert got[name].startswith("q") and got[name].count("w8") == 4 and got[name].endswith("-> q")
    assert (1 / 128, 0) in scales(q)


def test_operators_without_an_integer_form():
    m = nn.Sequential(nn.Conv2d(2, 4, 1), nn.GroupNorm(2, 4), nn.Conv2d(4, 1, 1))
    q = run(m, torch.randn(1, 2, 4, 4))
    assert stored(q) == {"conv2d": "qw8", "group_norm": "f -> q", "conv2d_1": "qw8"}
    assert q.why == {"group_norm": "group_norm has no integer form"}


def test_batch_norm_alone_becomes_a_convolution():
    m = nn.Sequential(nn.Conv2d(2, 4, 1), nn.ReLU(), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 1, 1))
    m[2].running_mean.uniform_(-1, 1)
    m[2].bias.data.uniform_(-1, 1)
    x = torch.randn(1, 2, 4, 4)
    q = run(m, x)
    assert sum(k.startswith("conv2d") for k in stored(q)) == 3 and not any("norm" in k for k in stored(q))
    torch.testing.assert_close(torch.fx.Interpreter(q.reference).run(x, enable_io_processing=False)[0], m(x))


def test_a_convolution_read_twice_keeps_its_batch_norm():
    """torchao's own folding would change what the other reader gets."""
    m = Fn(lambda s, x: s.n(y) + y if (y := s.a(x)) is not None else y, a=nn.Conv2d(2, 4, 1), n=nn.BatchNorm2d(4))
    m.eval()
    m.n.running_mean.uniform_(-1, 1)
    x = torch.randn(1, 2, 4, 4)
    q = run(m, x)
    torch.testing.assert_close(torch.fx.Interpreter(q.reference).run(x, enable_io_processing=False)[0], m(x))


def test_one_convolution_called_twice_with_two_batch_norms():
    m = Fn(lambda s, x: s.n(s.a(x)) + s.k(s.a(x * 2)), a=nn.Conv2d(2, 4, 1), n=nn.BatchNorm2d(4), k=nn.BatchNorm2d(4))
    m.eval()
    m.n.running_mean.uniform_(-1, 1)
    m.k.running_var.uniform_(1, 3)
    x = torch.randn(1, 2, 4, 4)
    w = m.a.weight.detach().clone()
    q = run(m, x)
    torch.testing.assert_close(torch.fx.Interpreter(q.reference).run(x, enable_io_processing=False)[0], m(x))
    assert torch.equal(m.a.weight, w)


def test_shared_weights_have_one_observer():
    m = Fn(lambda s, x: s.a(F.relu(s.a(x))), a=nn.Linear(4, 4))
    q = run(m, torch.randn(2, 4))
    names = {n.args[0].target for n in q.converted.graph.nodes if "dequantize_per_channel" in str(n.target)}
    assert names == {"a.weight"}


# ---- recipes --------------------------------------------------------------------------------------------------------------
def test_dynamic_rows():
    m = nn.Sequential(nn.Conv1d(2, 4, 1), nn.Linear(8, 3), nn.ReLU())
    q = run(m, torch.randn(2, 2, 8), recipe="w8a8-dynamic")
    assert stored(q) == {"conv1d": "fw8", "linear": "rw8", "relu": "f"}


def test_four_bits():
    m = Fn(
        lambda s, i: s.c(s.a(s.e(i)).transpose(1, 2)), e=nn.Embedding(9, 40), a=nn.Linear(40, 6), c=nn.Conv1d(6, 2, 1)
    )
    ids = torch.arange(8)[None]
    got = stored(run(m, ids, recipe="w4g16"))
    assert got["embedding"].startswith("w4") and got["linear"] == "fw4" and got["conv1d"] == "fw8"
    assert stored(run(m, ids, recipe="w4g16a8"))["linear"] == "rw4"


def test_sixteen_bits():
    m = nn.Sequential(
        nn.Conv2d(2, 4, 1), nn.ReLU6(), nn.Conv2d(4, 4, 1), nn.Hardswish(), nn.MaxPool2d(2), nn.Conv2d(4, 1, 1)
    )
    q = run(m, torch.randn(1, 2, 4, 4), recipe="w8a16")
    got = stored(q)
    # no tables of 65536 entries: hardswish is computed in float
    assert (
        got["hardswish"] == "f -> q"
        and got["conv2d_1"] == "qw8"
        and got["hardtanh"] == "f -> q"
        and got["max_pool2d"] == "q -> q"
    )
    kinds = {str(n.args[-1]) for n in q.converted.graph.nodes if "quantize_per_tensor" in str(n.target)}
    assert kinds == {"torch.int16"}


def test_rules():
    m = nn.Sequential(
        nn.Conv2d(2, 4, 1), nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 1, 1)
    )
    x = torch.randn(1, 2, 4, 4)
    q = run(m, x, recipe=MINMAX.keep({"1": None, "3": "w8a16"}))
    assert stored(q) == {"conv2d": "qw8", "conv2d_1": "f", "relu": "f -> q", "conv2d_2": "qw8 -> q", "conv2d_3": "qw8"}
    assert q.why == {"conv2d_1": "the recipe says so", "relu": "the recipe says so"} or q.why == {
        "conv2d_1": "the recipe says so"
    }
    kinds = [str(n.args[-1]) for n in q.converted.graph.nodes if "decomposed.quantize_per_tensor" in str(n.target)]
    assert kinds == ["torch.int8", "torch.int8", "torch.int16"]
    only = run(m, x, recipe=Recipe(W8, rules={"3": MINMAX}))
    assert stored(only)["conv2d_3"] == "qw8" and stored(only)["conv2d"] == "fw8"
    none = run(m, x, recipe=MINMAX.keep(["op:conv"]))
    assert set(stored(none).values()) == {"f"} and "nothing in this model is quantised by the recipe" in none.notes


def test_the_target_decides(monkeypatch):
    cpu = find("cpu").all[0]
    table = dict(cpu.integer())
    del table["map"], table["concat"]
    monkeypatch.setattr(type(cpu), "integer", lambda self: table)
    m = Fn(lambda s, x: s.b(torch.cat([F.silu(s.a(x)), s.a(x)], 1)), a=nn.Conv2d(2, 3, 1), b=nn.Conv2d(6, 1, 1))
    q = run(m, torch.randn(1, 2, 4, 4))
    assert stored(q)["silu"] == "f" and stored(q)["cat"] == "ff -> q"
    assert q.why == {"silu": "the target has no integer form of map", "cat": "the target has no integer form of concat"}


def test_quantized_results():
    m = nn.Sequential(nn.Conv2d(2, 4, 1), nn.ReLU())
    r = Recipe(W8, Spec("i8", symmetric=False), quantize_io=True)
    assert stored(run(m, torch.randn(1, 2, 4, 4), recipe=r)) == {"conv2d": "qw8", "relu": "f -> q"}


def test_dynamic_sizes_do_not_matter():
    m = nn.Sequential(nn.Conv1d(2, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(24, 2))
    q = run(m, torch.randn(3, 2, 8), dynamic_shapes=({0: Dim("n", min=1, max=64)},))
    assert stored(q)["linear"] == "qw8" and q.module(torch.randn(7, 2, 8)).shape == (7, 2)


def test_errors_name_the_recipe():
    with pytest.raises(trivet.Error, match="there is no recipe"):
        run(nn.Linear(2, 2), torch.randn(1, 2), recipe="w9")
