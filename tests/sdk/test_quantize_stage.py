"""The quantisation stage as a whole: what goes in (calibration, entries, programs), what comes out (places, names, sharing)."""

import copy
import math
from collections import namedtuple

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.export import Dim

import trivet
from trivet import frontend
from trivet.quantize import improve, observe
from trivet.quantize.batches import batches
from trivet.quantize.fxgraph import Capture
from trivet.quantize.recipe import W8, Recipe, Spec
from trivet.quantize.report import sqnr
from trivet.quantize.stage import quantize, quantize_entries

MINMAX = Recipe(W8, Spec("i8", symmetric=False))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        y = self.features(x).mean((2, 3))
        return self.head(y)


@pytest.fixture
def net():
    torch.manual_seed(0)
    m = Net().eval()
    m.features[1].running_mean.uniform_(-0.5, 0.5)
    return m


def data(n=4, *shape, seed=1):
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(*(shape or (1, 3, 8, 8)), generator=g),) for _ in range(n)]


# ---- places and names -------------------------------------------------------------------------------------------------------
def places(module):
    return {(n.loc.module, n.loc.source, n.loc.origin) for g in module.entries.values() for n in g.nodes}


@pytest.mark.parametrize("recipe", ["w8a8", "w8a8-dynamic", "w4g16"])
def test_places_survive(net, recipe):
    batches = data()
    q = quantize(net, batches[0], recipe=recipe, calibrate=batches)
    want = places(frontend.capture({"forward": (net, batches[0])}))
    got = frontend.capture({"forward": (q.module, q.args, q.kwargs)}, {"forward": q.dynamic_shapes})
    pure = {p for p in places(got) if p[2].startswith("aten.")}
    assert pure <= want and len(want - pure) <= 2  # batch norm and its relatives are gone
    modules = {m for m, _, _ in want}
    for node in got.entries["forward"].nodes:  # quantise operators too are somewhere in the model
        assert node.loc.module in modules and node.loc.source.startswith(
            ("test_quantize_stage.py", "tests/sdk/test_quantize_stage.py")
        )
    names = {v.const.name for v in got.entries["forward"].values() if v.const is not None}
    assert {"features.0.weight", "head.weight", "features.0.bias"} & names == {
        "features.0.weight",
        "head.weight",
        "features.0.bias",
    } or {"head.weight"} <= {n.removesuffix("_q") for n in names}


def test_the_model_is_not_changed(net):
    before = copy.deepcopy(net.state_dict())
    modes = {n: m.training for n, m in net.named_modules()}
    quantize(
        net,
        data(1)[0],
        recipe=Recipe(W8, Spec("i8", symmetric=False), bias_correction=True, equalize=True),
        calibrate=data(),
    )
    after = net.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)
    assert modes == {n: m.training for n, m in net.named_modules()}


def test_results(net):
    batches = data(8, 2, 3, 8, 8)
    for recipe, least in (("w8a8", 30), ("w8a16", 38), ("w8", 38), ("w8a8-dynamic", 35), ("w4g8", 17), ("w4g8a8", 17)):
        q = quantize(net, batches[0], recipe=recipe, calibrate=batches)
        want, got = (torch.cat([f(*b) for b in batches]) for f in (net, q.module))
        assert least < sqnr(want, got) < 70, recipe
        assert q.seen == 8 and len(q.batches) == 8
        assert {n.name for n in q.reference.graph.nodes if n.op == "call_function"} <= {
            n.name for n in q.converted.graph.nodes
        }


def test_training_mode_is_left_alone(net):
    net.train()
    with pytest.warns(UserWarning, match="training mode"):
        q = quantize(net, data(1)[0], recipe="w8a8", calibrate=data())
    assert net.training and net.features[1].training
    assert sqnr(net.eval()(*data(1)[0]), q.module(*data(1)[0])) > 25


def test_same_input_same_result(net):
    a, b = (quantize(net, data(1)[0], recipe="w8a8", calibrate=data()) for _ in range(2))
    assert torch.equal(a.module(*data(1)[0]), b.module(*data(1)[0])) and a.converted.code == b.converted.code


def test_traced_modules_can_be_copied(net):
    q = quantize(net, data(1)[0], recipe="w8a8", calibrate=data())
    again = copy.deepcopy(q.module)
    assert torch.equal(again(*data(1)[0]), q.module(*data(1)[0]))


# ---- arguments ------------------------------------------------------------------------------------------------------------
Pair = namedtuple("Pair", "a b")


class Trees(nn.Module):
    def __init__(self):
        super().__init__()
        self.l, self.k = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x, parts, scale=None, *, extra=None):
        y = F.relu(self.l(x)) + self.l(parts["b"]) - self.l(parts["a"][0])
        if extra is not None:
            y = y + extra
        return Pair(self.k(y), {"y": y, "n": [scale]})


def test_trees_and_keywords():
    torch.manual_seed(0)
    m = Trees().eval()
    r = torch.randn
    args, kwargs = (r(2, 4), {"a": (r(2, 4),), "b": r(2, 4)}), {"extra": r(2, 4)}
    more = (r(2, 4), {"b": r(2, 4), "a": (r(2, 4),)})
    q = quantize(m, args, kwargs, recipe=MINMAX, calibrate=[(args, kwargs), (more, {"extra": r(2, 4)})])
    want, got = m(*args, **kwargs), q.module(*args, **kwargs)
    assert (
        type(got) is Pair and got.b["n"] == [None] and sqnr(want.a, got.a) > 25 and sqnr(want.b["y"], got.b["y"]) > 25
    )
    named = q.module(parts=args[1], x=args[0], **kwargs)
    assert torch.equal(named.a, got.a)
    module = frontend.capture({"forward": (q.module, q.args, q.kwargs)})
    float_module = frontend.capture({"forward": (m, args, kwargs)})
    assert module.entries["forward"].signature == float_module.entries["forward"].signature
    with pytest.raises(trivet.Error, match="do not have the structure"):
        q.module(args[0], args[1])


def test_calibration_in_all_forms():
    xs = [x for (x,) in data(4)]
    capture = Capture("forward", nn.Identity(), (xs[0],), None, None)
    for form in (xs, [(x,) for x in xs], [[x] for x in xs], [((x,), {}) for x in xs], iter(xs), [x.numpy() for x in xs], [torch.cat(xs)],
                 [((), {"input": x}) for x in xs]):  # fmt: skip
        for (_, (got,)), want in zip(batches(capture, form, "forward"), xs, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize(
    "calibrate, what",
    [
        (None, "needs calibration data"),
        ([], "is empty"),
        (iter(()), "is empty"),
        (torch.zeros(1, 3, 8, 8), "is a Tensor"),
        ("data", "is a str"),
        (5, "is a int"),
        ({"forward": []}, "is empty"),
        ({"other": []}, r"names \['other'\]"),
        ([(torch.zeros(1, 3, 8, 8), torch.zeros(1))], "batch 1 does not fit the model.*2 values"),
        ([(torch.zeros(1, 3, 8, 8),), ()], "batch 2 does not fit"),
        ([torch.zeros(1, 3, 8, 8).double()], r"float64 \[1, 3, 8, 8\], the model was captured with float32"),
        ([torch.zeros(1, 3, 9, 8)], r"float32 \[1, 3, 9, 8\], the model was captured"),
        ([torch.zeros(3, 8, 8)], r"float32 \[3, 8, 8\]"),
        ([(3,)], "is int"),
        ([torch.full((1, 3, 8, 8), float("nan"))], "batch 1: NaN"),
        ([torch.zeros(1, 3, 8, 8), torch.full((1, 3, 8, 8), float("inf"))], "batch 2: infinity"),
        ([torch.zeros(1, 3, 8, 8).to_sparse()], "is sparse_coo float32"),
        ([torch.zeros(1, 3, 8, 8, device="meta")], "float32 .* on meta"),
        ((torch.zeros(1, 3, 8 // n, 8) for n in (1, 0)), "fails behind batch 1: ZeroDivisionError"),
    ],
)
def test_calibration_that_cannot_be_used(calibrate, what):
    with pytest.raises(trivet.Error, match=what) as e:
        quantize(nn.Conv2d(3, 4, 3).eval(), (torch.zeros(1, 3, 8, 8),), recipe="w8a8", calibrate=calibrate)
    assert e.value.remedy


def test_not_finite_inside():
    m = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.Conv2d(2, 1, 1)).eval()
    m[0].weight.data.fill_(1e30)
    with pytest.raises(trivet.Error, match="batch 2: infinity in the values of relu") as e:
        quantize(
            m,
            (torch.zeros(1, 1, 2, 2),),
            recipe="w8a8",
            calibrate=[torch.ones(1, 1, 2, 2), torch.full((1, 1, 2, 2), 1e30)],
        )
    assert "1" in e.value.node
    m[2].weight.data[0, 0] = float("nan")
    with pytest.raises(trivet.Error, match=r"weight 2\.weight: NaN"):
        quantize(m, (torch.zeros(1, 1, 2, 2),), recipe="w8")


def test_hidden_states_that_do_not_fit():
    """Integer recurrent layers hold states of -1 to 1, as those that they make."""

    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.g = nn.GRU(4, 4)

        def forward(self, x, h):
            return self.g(x, h)[0]

    m, x, h = Cell().eval(), torch.randn(3, 1, 4), torch.full((1, 1, 4), 0.5)
    assert sqnr(m(x, h), quantize(m, (x, h), recipe=MINMAX, calibrate=[(x, h)]).module(x, h)) > 20
    with pytest.raises(trivet.Error, match="batch 2: the first hidden state of gru reaches 2") as e:
        quantize(m, (x, h), recipe=MINMAX, calibrate=[(x, h), (x, 4 * h)])
    assert "'node:gru': None" in e.value.remedy
    kept = MINMAX.keep(["node:gru"])
    assert torch.equal(m(x, 4 * h), quantize(m, (x, h), recipe=kept, calibrate=[(x, 4 * h)]).module(x, 4 * h))


def test_data_without_elements():
    m = nn.Sequential(nn.Conv1d(2, 2, 1), nn.ReLU(), nn.Linear(8, 3)).eval()
    x = torch.zeros(0, 2, 8)
    assert quantize(m, (x,), recipe="w8a8", calibrate=[x]).module(x).shape == (0, 2, 3)


def test_values_that_are_always_the_same():
    m = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.Conv2d(2, 1, 1)).eval()
    m[0].bias.data.fill_(-9.0)  # relu gives zeros only
    for recipe in (
        "w8a8",
        MINMAX,
        Recipe(W8, Spec(observer="percentile")),
        Recipe(W8, Spec(observer="histogram")),
        "w8a16",
    ):
        for x in (torch.zeros(1, 1, 4, 4), torch.full((1, 1, 4, 4), 5.0)):
            q = quantize(m, (x,), recipe=recipe, calibrate=[x])
            for n in q.converted.graph.nodes:
                if "quantize_per_tensor" in str(n.target):
                    assert n.args[1] >= 2.0**-40 and math.isfinite(n.args[1])
            torch.testing.assert_close(q.module(x), m(x), atol=0.02, rtol=0.02)


def test_tiny_weights_leave_room_for_the_bias():
    """A dead channel behind batch norm: weights of 1e-12 beside a bias of 0.7, which must fit into int32 steps of scale(x) * scale(w)."""
    m = nn.Conv2d(2, 3, 1).eval()
    m.weight.data[1] = 1e-12
    m.weight.data[2] = 0.0
    m.bias.data = torch.tensor([0.1, 0.7, -0.9])
    x = torch.rand(1, 2, 4, 4)
    q = quantize(m, (x,), recipe=MINMAX, calibrate=[x])
    dq = next(n for n in q.converted.graph.nodes if "dequantize_per_channel" in str(n.target))
    scale = getattr(q.converted, dq.args[1].target)
    sx = next(n.args[1] for n in q.converted.graph.nodes if "quantize_per_tensor" in str(n.target))
    assert bool((m.bias.abs() / (scale * sx) <= 2.0**31).all()) and sqnr(m(x), q.module(x)) > 40


# ---- states and entries ---------------------------------------------------------------------------------------------------
class Cache(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.register_buffer("sum", torch.zeros(1, 4))

    def forward(self, x):
        self.sum.add_(F.relu(self.l(x)))
        return self.l(self.sum)


def test_states_have_their_content_back():
    m = Cache().eval()
    q = quantize(m, (torch.ones(1, 4),), recipe=MINMAX, calibrate=[torch.ones(1, 4)] * 5)
    assert bool((m.sum == 0).all())
    module = frontend.capture({"forward": (q.module, q.args)})
    (state,) = {id(w): w for w in module.entries["forward"].writes}.values() if isinstance(
        module.entries["forward"].writes, list) else module.entries["forward"].writes  # fmt: skip
    assert "sum" in str(module)
    # the state went on from batch to batch: its range is that of five steps
    steps = float(5 * F.relu(m.l(torch.ones(1, 4))).max())
    top = max(n.args[1] * (127 - n.args[2]) for n in q.converted.graph.nodes if "quantize_per_tensor" in str(n.target))
    assert top >= steps * 0.95 or top >= 1.0


class Ends(nn.Module):
    def __init__(self, body, which):
        super().__init__()
        self.body, self.which = body, which

    def forward(self, x):
        return self.body(x) if self.which else self.body(x * 2 + 1)


def test_entries_share_weights_and_states():
    body = Cache().eval()
    a, b = Ends(body, True).eval(), Ends(body, False).eval()
    x = torch.randn(1, 4)
    made = quantize_entries(
        {"a": (a, (x,), None), "b": (b, (x,), None)}, None, recipe="w8a8", calibrate={"a": [x], "b": [x]}
    )
    module = frontend.capture({n: (q.module, q.args, q.kwargs) for n, q in made.items()})
    weights = {id(v.const) for g in module.entries.values() for v in g.values()
               if v.const is not None and v.const.data.dtype == torch.int8}  # fmt: skip
    states = {id(v.state) for g in module.entries.values() for v in g.values() if v.state is not None}
    assert len(weights) == 1 and len(states) == 1
    with pytest.raises(trivet.Error, match="calibrate={entry: batches}"):
        quantize_entries({"a": (a, (x,), None), "b": (b, (x,), None)}, None, recipe="w8a8", calibrate=[x])
    with pytest.raises(trivet.Error, match="needs calibration data of b"):
        quantize_entries({"a": (a, (x,), None), "b": (b, (x,), None)}, None, recipe="w8a8", calibrate={"a": [x]})


# ---- programs -------------------------------------------------------------------------------------------------------------
def test_exported_programs_and_their_sizes(net, tmp_path):
    class Grow(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(8, 8)

        def forward(self, x):
            return self.l(torch.cat([x, x])) if x.shape[0] > 2 else self.l(x)

    m = Grow().eval()
    program = torch.export.export(m, (torch.randn(5, 8),), dynamic_shapes=({0: Dim.AUTO},), strict=False)
    q = quantize(program, recipe="w8a8", calibrate=[torch.randn(4, 8), torch.randn(7, 8)])
    module = frontend.capture({"forward": (q.module, q.args, q.kwargs)}, {"forward": q.dynamic_shapes})
    (symbol,) = module.entries["forward"].symbols.values()
    assert symbol.min == 3  # the guard of the branch is still there
    torch.export.save(torch.export.export(net, data(1)[0], strict=False), tmp_path / "net.pt2")
    q = quantize(str(tmp_path / "net.pt2"), recipe="w8a8", calibrate=data())
    assert sqnr(net(*data(1)[0]), q.module(*data(1)[0])) > 25


def test_dynamic_sizes(net):
    shapes = ({0: Dim("n", min=1, max=32)},)
    q = quantize(
        net,
        (torch.randn(2, 3, 8, 8),),
        dynamic_shapes=shapes,
        recipe="w8a8",
        calibrate=[torch.randn(n, 3, 8, 8) for n in (1, 5)],
    )
    module = frontend.capture({"forward": (q.module, q.args)}, {"forward": q.dynamic_shapes})
    (symbol,) = module.entries["forward"].symbols.values()
    assert (symbol.min, symbol.max) == (1, 32) and q.module(torch.randn(9, 3, 8, 8)).shape == (9, 4)


def test_quantised_models_are_refused(net):
    q = quantize(net, data(1)[0], recipe="w8a8", calibrate=data())
    for model in (q.module, q.converted):
        with pytest.raises(trivet.Error, match="quantised already"):
            quantize(model, data(1)[0], recipe="w8a8", calibrate=data())
    program = torch.export.export(q.module, data(1)[0], strict=False)
    with pytest.raises(trivet.Error, match="quantised already"):
        quantize(program, recipe="w8")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    m = copy.deepcopy(net)
    quantize_(m, Int8WeightOnlyConfig())
    with pytest.raises(trivet.Error, match="quantised already"):
        quantize(m, data(1)[0], recipe="w8")


def test_what_is_no_model():
    for model in (3, lambda x: x, nn.Linear):
        with pytest.raises(trivet.Error):
            quantize(model, (torch.zeros(1),), recipe="w8")
    with pytest.raises(trivet.Error, match="no matter of integers"):
        quantize(nn.Linear(2, 2), (torch.zeros(1, 2),), recipe="f16")


def test_missing_torchao(monkeypatch):
    import builtins

    from trivet.quantize import library

    real = builtins.__import__

    def fake(name, *args, **kwargs):
        if name.startswith("torchao"):
            raise ModuleNotFoundError("No module named 'torchao'")
        return real(name, *args, **kwargs)

    library.torchao.cache_clear()
    monkeypatch.setattr(builtins, "__import__", fake)
    with pytest.raises(trivet.Error, match="needs the package torchao") as e:
        library.torchao()
    assert "pip install" in e.value.remedy


# ---- observers ------------------------------------------------------------------------------------------------------------
def chosen(values, spec, pieces=1):
    """(scale, zero) that an observer finds for values."""
    how = observe.activation(spec)
    observer = how.observer_or_fake_quant_ctr(
        dtype=how.dtype, qscheme=how.qscheme, quant_min=how.quant_min, quant_max=how.quant_max
    )
    for t in values.chunk(pieces):
        observer(t)
    scale, zero = observer.calculate_qparams()
    return float(scale), int(zero)


def error(x, scale, zero, lo=-128, hi=127):
    return float((((torch.round(x / scale) + zero).clamp(lo, hi) - zero) * scale - x).pow(2).mean())


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("make", ["normal", "laplace", "uniform", "outlier", "positive", "far"])
def test_the_least_squared_error(make, symmetric):
    g = torch.Generator().manual_seed(3)
    n = torch.randn(20000, generator=g)
    x = {"normal": n, "laplace": n.sign() * -torch.log(torch.rand(20000, generator=g) + 1e-6), "uniform": torch.rand(20000, generator=g),
         "outlier": torch.cat([n, torch.tensor([60.0])]), "positive": F.relu(n), "far": n * 0.01 + 5}[make]  # fmt: skip
    lo, hi = (-127, 127) if symmetric else (-128, 127)
    scale, zero = chosen(x, Spec("i8", symmetric=symmetric, observer="mse"), pieces=4)
    low, high = min(0.0, float(x.min())), max(0.0, float(x.max()))
    tries = []
    for a in np.linspace(0.05, 1, 60):
        for b in np.linspace(0.05, 1, 60) if not symmetric and low else (1.0,):
            if symmetric:
                s, z = max(-low, high) * a / 127, 0
            else:
                s = (high * a - low * b) / 255
                z = max(-128, min(127, -128 - round(low * b / s)))
            tries.append(error(x, s, z, lo, hi))
    assert error(x, scale, zero, lo, hi) <= min(tries) * 1.05


def test_percentile_minmax_histogram():
    x = torch.cat([torch.linspace(-1, 3, 10001), torch.tensor([100.0, -100.0])])
    scale, zero = chosen(x, Spec("i8", symmetric=False), pieces=3)
    assert scale == pytest.approx(200 / 255, rel=1e-6) and zero == 0 or zero == -1
    scale, zero = chosen(x, Spec("i8", symmetric=False, observer="percentile", percentile=99.9), pieces=3)
    low, high = (-128 - zero) * scale, (127 - zero) * scale
    assert low == pytest.approx(-1, abs=0.1) and high == pytest.approx(3, abs=0.1)
    assert chosen(x, Spec("i8", symmetric=False, observer="percentile", percentile=100))[0] == pytest.approx(
        200 / 255, rel=1e-3
    )
    scale, zero = chosen(x, Spec("i8", symmetric=False, observer="histogram"))
    assert error(x, scale, zero) <= error(x, 200 / 255, 0)
    assert chosen(x, Spec("i16"))[0] == pytest.approx(100 / 32767, rel=1e-6)


def test_histograms_grow_without_loss():
    from trivet.quantize.observe import RangeObserver

    g = torch.Generator().manual_seed(0)
    o = RangeObserver(dtype=torch.int8, qscheme=torch.per_tensor_affine, quant_min=-128, quant_max=127)
    total = 0
    for i, scale in enumerate((1e-3, 1e-3, 5.0, 0.1, 1e4, 1.0)):
        x = torch.randn(1000, generator=g) * scale + (i - 2) * scale
        o(x)
        total += x.numel()
        assert float(o.counts.sum()) == total
        assert o.first * o.width <= float(o.min_val) and float(o.max_val) < (o.first + len(o.counts)) * o.width
    inside = (o.counts.cumsum(0) / total * 1000).round()
    assert inside[-1] == 1000


def test_groups_need_not_divide():
    m = nn.Linear(50, 7).eval()
    x = torch.randn(3, 50)
    for recipe, least in (("w4g16", 17), ("w4g64", 15), ("w4g16a8", 17)):
        q = quantize(m, (x,), recipe=recipe)
        assert sqnr(m(x), q.module(x)) > least
        dq = next(n for n in q.converted.graph.nodes if "trivet.dequantize" in str(n.target))
        w, scale = (getattr(q.converted, dq.args[i].target) if "." not in dq.args[i].target else None for i in (0, 1))
        assert w is None or (w.dtype == torch.uint8 and int(w.max()) <= 15 and scale.shape[0] == 7)
    affine = Recipe(Spec("i4", symmetric=False, granularity="group", group=16, observer="mse"))
    m.weight.data += 0.3
    assert sqnr(m(x), quantize(m, (x,), recipe=affine).module(x)) > sqnr(
        m(x), quantize(m, (x,), recipe="w4g16").module(x)
    )


# ---- improvements -----------------------------------------------------------------------------------------------------------
def test_equalisation_changes_no_result():
    torch.manual_seed(0)
    s = torch.logspace(-2, 2, 8)
    for act, relu6 in ((nn.ReLU(), False), (nn.ReLU6(), True), (nn.LeakyReLU(0.1), False)):
        m = nn.Sequential(
            nn.Conv2d(3, 8, 3), act, nn.Conv2d(8, 8, 3, groups=8), act, nn.MaxPool2d(2), nn.Conv2d(8, 4, 1)
        ).eval()
        m[0].weight.data *= s.reshape(-1, 1, 1, 1)
        m[2].weight.data /= s.reshape(-1, 1, 1, 1)
        if relu6:
            m[0].weight.data /= 100
        x = torch.randn(2, 3, 10, 10)
        c = Capture("forward", m, (x,), None, None)
        pairs = improve.equalize(c.module, [[x]], relu6=relu6)
        assert pairs == 2
        torch.testing.assert_close(c.traced(c.module)(x), m(x), atol=1e-4, rtol=1e-4)
        first, second = (dict(c.module.named_parameters()) | dict(c.module.named_buffers()))["0.weight"], None
        spread = first.abs().flatten(1).amax(1)
        assert second is None and float(spread.max() / spread.min()) < 10
    plain = Recipe(Spec("i8"), Spec("i8", symmetric=False))  # one scale per weight tensor
    m = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    m[0].weight.data *= s.reshape(-1, 1, 1, 1)
    m[2].weight.data /= s.reshape(1, -1, 1, 1)
    got = [sqnr(m(x), quantize(m, (x,), recipe=r, calibrate=[x]).module(x))
           for r in (plain, Recipe(plain.weight, plain.activation, equalize=True))]  # fmt: skip
    assert got[1] > got[0] + 10


def test_relu6_that_clips_is_not_equalised():
    m = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU6(), nn.Conv2d(2, 1, 1)).eval()
    x = torch.randn(1, 1, 4, 4) * 100
    c = Capture("forward", m, (x,), None, None)
    assert improve.equalize(c.module, [[x]], relu6=True) == 0 and improve.equalize(c.module, [[x]]) == 0


def test_bias_correction_and_rounding(net):
    torch.manual_seed(0)
    m = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.ReLU6(), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU6(), nn.Conv2d(8, 8, 1)
    ).eval()
    xs = [(torch.rand(1, 3, 16, 16) + 1,) for _ in range(8)]
    base = Spec("i8", symmetric=False)

    def bias(r):
        q = quantize(m, xs[0], recipe=r, calibrate=xs)
        want, got = (torch.cat([f(*x) for x in xs]) for f in (m, q.module))
        return float((want - got).mean((0, 2, 3)).abs().max()), sqnr(want, got), q.notes

    plain, corrected = bias(Recipe(W8, base)), bias(Recipe(W8, base, bias_correction=True))
    assert corrected[0] < plain[0] / 3 and corrected[1] > plain[1] and "biases of 3 layers corrected" in corrected[2]
    rounded = bias(Recipe(W8, base, data_rounding=True))
    assert rounded[1] > plain[1]
    assert bias(Recipe(W8, base, bias_correction=True, data_rounding=True))[1] > plain[1]
