"""Training with fake quantisation: what the prepared module is, what it becomes, and that it is the same numbers."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.export import Dim

import trivet
from trivet import frontend
from trivet.quantize.qat import finish, prepare_qat
from trivet.quantize.recipe import W8, Recipe, Spec
from trivet.quantize.report import sqnr

BATCH = {"dynamic_shapes": ({0: Dim("n", min=1, max=256)},)}


class Net(nn.Module):
    def __init__(self, eps=1e-3, momentum=0.2, affine=True):
        super().__init__()
        self.a = nn.Conv2d(1, 8, 3, bias=False)
        self.n = nn.BatchNorm2d(8, eps=eps, momentum=momentum, affine=affine)
        self.b = nn.Conv2d(8, 8, 3, groups=8)
        self.m = nn.BatchNorm2d(8, eps=eps, momentum=momentum)
        self.d, self.c = nn.Dropout(0.4), nn.Linear(8, 3)

    def forward(self, x):
        x = F.relu6(self.n(self.a(x)))
        x = F.relu(self.m(self.b(x)), inplace=True).mean((2, 3))
        return self.c(self.d(x))


def task(n=64, seed=0):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    x = (
        torch.randn(n, 1, 8, 8, generator=g) * 0.3
        + torch.sin(torch.arange(64).reshape(8, 8) * (y[:, None, None] + 1) / 3)[:, None]
    )
    return x, y


def train(net, steps=20, rate=0.02):
    optimiser = torch.optim.SGD(net.parameters(), rate, momentum=0.9)
    x, y = task()
    net.train()
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimiser.step()
        losses.append(float(loss))
    net.eval()
    return losses


@pytest.fixture
def net():
    torch.manual_seed(0)
    m = Net()
    train(m, 10)
    return m


def test_train_convert_export(net):
    x, _ = task()
    before = copy.deepcopy(net.state_dict())
    p = prepare_qat(net, (x,), "w8a8", **BATCH)
    assert p.training
    losses = train(p, 15)
    assert losses[-1] < losses[0]
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())  # the float model is a copy
    with torch.no_grad():
        fake = p(x)
        q = finish(p)
        assert (
            sqnr(fake, q.module(x)) > 35
            and sqnr(fake, torch.fx.Interpreter(q.reference).run(x, enable_io_processing=False)[0]) > 15
        )
        assert torch.equal(p(x), fake)  # prepared is as it was
    ops = [str(n.target) for n in q.converted.graph.nodes if n.op == "call_function"]
    assert not any("batch_norm" in o or "dropout" in o for o in ops)
    assert sum("quantize_per_tensor" in o for o in ops) == 2 * 4
    module = frontend.capture({"forward": (q.module, (x,), None)}, {"forward": BATCH["dynamic_shapes"]})
    names = {v.const.name for v in module.entries["forward"].values() if v.const is not None}
    assert {"a.weight", "b.weight", "c.weight"} <= names
    assert {n.loc.module for n in module.entries["forward"].nodes} == {"a", "b", "c", ""}
    assert all(n.loc.source for n in module.entries["forward"].nodes)
    twins = {n.name for n in q.reference.graph.nodes}
    assert {q.names.get(n.name, n.name) for n in q.converted.graph.nodes if "aten.conv2d" in str(n.target)} <= twins


@pytest.mark.parametrize("eps, affine", [(1e-3, True), (1e-5, True), (0.1, False), (1e-7, True)])
def test_statistics_of_batch_norm_are_the_models(eps, affine):
    """torchao's rewriting loses eps and momentum; fake quantisation off, the module computes what the float model does."""
    torch.manual_seed(0)
    m = Net(eps, 0.3, affine)
    m.d.p = 0.0
    m.n.running_var.mul_(0.01)
    x, _ = task()
    p = prepare_qat(m, (x,), **BATCH)
    for part in p.modules():
        if hasattr(part, "disable_fake_quant"):
            part.disable_fake_quant()
    for mode in (True, False, True):
        p.train(mode)
        m.train(mode)
        with torch.no_grad():
            torch.testing.assert_close(p(x), m(x), atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(p.get_buffer("n.running_mean"), m.n.running_mean)
    torch.testing.assert_close(p.get_buffer("n.running_var"), m.n.running_var)
    p.eval()
    m.eval()
    with torch.no_grad():
        for part in p.modules():
            if hasattr(part, "enable_fake_quant"):
                part.enable_fake_quant()
        assert sqnr(m(x), finish(p).module(x)) > 25
        assert sqnr(p(x), finish(p).module(x)) > 30


def test_modes(net):
    x, _ = task()
    p = prepare_qat(net, (x,), **BATCH)
    p.eval()
    with torch.no_grad():
        assert (
            torch.equal(p(x), p(x)) and sqnr(net(x), p(x)) > 15
        )  # the first eval finds ranges when nothing has been seen
    p.train()
    assert not torch.equal(p(x), p(x))  # dropout
    p.eval()
    seen = {k: v.clone() for k, v in p.state_dict().items() if "min_val" in k or "max_val" in k}
    with torch.no_grad():
        p(x * 100)
    assert seen and all(torch.equal(v, p.state_dict()[k]) for k, v in seen.items())  # ranges stand still
    assert p.train() is p and p.eval() is p


@pytest.mark.parametrize(
    "layer", [nn.Dropout(0.5), nn.Dropout1d(0.5), nn.AlphaDropout(0.5), nn.FeatureAlphaDropout(0.5)]
)
def test_dropouts_of_all_kinds(layer):
    m = nn.Sequential(nn.Conv1d(2, 3, 1), layer, nn.Conv1d(3, 1, 1)).eval()
    x = torch.randn(4, 2, 16)
    p = prepare_qat(m, (x,))
    with torch.no_grad():
        assert not torch.equal(p(x), p(x))
        p.eval()
        assert torch.equal(p(x), p(x)) and sqnr(m(x), p(x)) > 20
    assert torch.nn.functional.dropout.__module__ == "torch.nn.functional"


def test_state_dict_and_copies(net):
    x, _ = task()
    a = prepare_qat(net, (x,), **BATCH)
    train(a, 3)
    b = prepare_qat(Net(), (x,), **BATCH)
    b.load_state_dict(a.state_dict())
    c = copy.deepcopy(a)
    b.eval()
    with torch.no_grad():
        want = a(x)
        assert torch.equal(b(x), want) and torch.equal(c(x), want)
        assert torch.equal(finish(b).module(x), finish(a).module(x))
    train(c, 1)
    with torch.no_grad():
        assert torch.equal(a(x), want) and not torch.equal(c(x), want)
    floating = {k for k in net.state_dict() if "num_batches" not in k}
    assert floating <= set(a.state_dict())
    assert {n for n, _ in net.named_parameters()} <= {n for n, _ in a.named_parameters()}
    assert all(p.requires_grad for n, p in a.named_parameters())


def test_sixteen_bits_and_rules(net):
    x, _ = task()
    p = prepare_qat(net, (x,), Recipe(W8, Spec("i16"), rules={"c": None, "b": "w8"}), **BATCH)
    train(p, 2)
    q = finish(p)
    kinds = {str(n.args[-1]) for n in q.converted.graph.nodes if "quantize_per_tensor" in str(n.target)}
    assert kinds == {"torch.int16"}
    weights = [n.args[0].target for n in q.converted.graph.nodes if "dequantize_per_channel" in str(n.target)]
    assert weights == ["a.weight", "b.weight"]
    with torch.no_grad():
        assert sqnr(p(x), q.module(x)) > 35


@pytest.mark.parametrize("recipe, what", [("w4g32", "8-bit weights"), ("w8a8-dynamic", "calibrated range"), ("f16", "8-bit weights"),
                                          (Recipe(W8, Spec(), equalize=True), "equalize")])  # fmt: skip
def test_recipes_that_cannot_be_trained(net, recipe, what):
    with pytest.raises(trivet.Error, match=what):
        prepare_qat(net, (task()[0],), recipe)


def test_transposed_and_one_dimensional_convolutions():
    torch.manual_seed(0)
    m = nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.ConvTranspose1d(4, 4, 2, stride=2), nn.BatchNorm1d(4), nn.ReLU(),
                      nn.Conv1d(4, 2, 1))  # fmt: skip
    x = torch.randn(6, 2, 12)
    p = prepare_qat(m, (x,))
    for _ in range(3):
        p(x).pow(2).mean().backward()
    p.eval()
    with torch.no_grad():
        q = finish(p)
        assert sqnr(p(x), q.module(x)) > 30 and not any("batch_norm" in str(n.target) for n in q.converted.graph.nodes)


def test_call_through_the_package(net):
    x, _ = task()
    assert isinstance(trivet.quantize.prepare_qat(net, (x,), **BATCH), torch.nn.Module)
    with pytest.raises(trivet.Error, match="trains a torch.nn.Module"):
        trivet.quantize.prepare_qat(lambda x: x, (x,))
