"""The metric's gate: which layers it keeps in higher precision, and when it gives up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import trivet
from trivet import Error
from trivet.quantize import search as S
from trivet.quantize.recipe import W8
from trivet.quantize.report import Report, sqnr


@dataclass
class Fake:
    """Stands for quantisation: score 1 in float; each layer not kept costs its harm (half of it in i16)."""

    harm: list[float]
    tries: list[tuple[list[str], str]] = field(default_factory=list)
    order: list[float] | None = None
    bias: float = 0.0

    def build(self, names: Sequence[str], precision: str) -> S.Built:
        self.tries.append((list(names), precision))
        part = {"float": 0.0, "i16": 0.5, "": 1.0}[precision]
        loss = self.bias + sum(h * (part if str(i) in names else 1.0) for i, h in enumerate(self.harm))
        ranks = self.order or [-h for h in self.harm]
        layers = [S.Candidate(str(i), f"conv2d at block.{i}", r) for i, r in enumerate(ranks)]
        return S.Built(1 - loss, Report(), lambda: layers)  # type: ignore[arg-type]


class Net(float):
    def __enter__(self) -> Net:
        return self

    def __exit__(self, *e: object) -> None:
        pass


@pytest.fixture
def go(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("trivet.runtime.load", lambda program: Net(program))

    def run(fake: Fake, drop: float = 0.1, precisions: Sequence[str] = ("float",), **kw: Any) -> S.Built:
        reference = S.Reference({"forward": nn.Identity()})
        return S.search(
            fake.build,
            reference,
            lambda net: 1.0 if net is reference else float(net),
            drop,
            precisions=precisions,
            **kw,
        )

    return run


def test_nothing_to_do(go: Any) -> None:
    fake = Fake([0.01] * 8)
    built = go(fake)
    assert fake.tries == [([], "")] and built.report.score == pytest.approx(0.92) and built.report.reference == 1
    assert [s.holds for s in built.report.search] == [True]


def test_keeps_as_few_as_possible(go: Any) -> None:
    fake = Fake([0.001] * 13 + [0.3, 0.2, 0.15] + [0.0] * 16)
    built = go(fake, 0.1)
    last = next(s for s in reversed(built.report.search) if s.holds and s.score == built.report.score)
    assert last.kept == ["conv2d at block.13", "conv2d at block.14", "conv2d at block.15"] and last.precision == "float"
    sizes = [len(t[0]) for t in fake.tries]
    assert sizes == [0, 8, 1, 2, 4, 3]  # as it is; the most; growing; bisected
    assert built.report.score == pytest.approx(1 - 0.013)


def test_cheaper_precision_first(go: Any) -> None:
    fake = Fake([0.12] + [0.0] * 15)
    built = go(fake, 0.1, ("i16", "float"))
    assert built.report.search[-1].precision == "i16" and built.report.search[-1].kept == ["conv2d at block.0"]
    fake = Fake([0.3] + [0.0] * 15)  # half of it is still too much
    built = go(fake, 0.1, ("i16", "float"))
    assert [s.precision for s in built.report.search if s.holds][-1] == "float" and built.report.score == 1
    assert len(built.report.search[-1].kept) == 1


def test_gives_up_and_names_the_worst(go: Any) -> None:
    fake = Fake([0.05] * 32, order=[30.0 - i for i in range(32)])
    with pytest.raises(Error) as e:
        go(fake, 0.1)
    assert "falls from 1 to -0.6" in e.value.reason and "block.31 (-1.0 dB), conv2d at block.30" in e.value.reason
    assert "8 most harmful of 32 layers" in e.value.reason
    assert "w8a16" in e.value.remedy and "prepare_qat" in e.value.remedy
    assert len(fake.tries) == 2  # nothing between is tried when the most is not enough
    with pytest.raises(Error, match="no layer is quantised"):
        go(Fake([], bias=0.5))


@pytest.mark.parametrize(("value", "text"), [(math.nan, "nan"), (math.inf, "inf"), (None, "NoneType"), ("good", "str"),
                                             (torch.zeros(3), "Tensor")])  # fmt: skip
def test_metric_must_be_a_number(value: Any, text: str) -> None:
    with pytest.raises(Error, match=f"metric of the float model is {text}"):
        S.score(lambda net: value, None, "the float model")


def test_metric_may_be_a_tensor() -> None:
    assert S.score(lambda net: torch.tensor([0.5]), None, "") == 0.5
    assert S.score(lambda net: True, None, "") == 1


def test_metric_that_fails_is_named() -> None:
    with pytest.raises(Error, match="metric fails on the quantised program: ZeroDivisionError: division by zero") as e:
        S.score(lambda net: 1 / 0, None, "the quantised program")
    assert isinstance(e.value.__cause__, ZeroDivisionError)


def test_max_drop_must_be_a_number() -> None:
    for bad in (-1, math.nan, "0.1", None, 1j):
        with pytest.raises(Error, match="max_drop"):
            S.search(None, None, lambda n: 0.0, bad)  # type: ignore[arg-type]


def test_unlike_calibration_is_told(go: Any) -> None:
    seen = S.Ranges()
    assert list(seen.note("forward", [(torch.full((2,), 0.02),)])) and seen.seen[("forward", "[0]")][
        0
    ] == pytest.approx(0.02)
    reference = S.Reference({"forward": nn.Identity()})

    def metric(net: Any) -> float:
        return float(reference(torch.tensor([-2.0, 2.0])).sum()) + 1 if net is reference else 0.5

    fake = Fake([0.5])
    with pytest.raises(Error) as e:
        S.search(fake.build, reference, metric, 0.1, calibration=seen)
    assert "input [0] of forward goes from 0.02 to 0.02 in the calibration data, from -2 to 2" in e.value.reason
    assert "like those that the metric uses" in e.value.remedy


def test_batches() -> None:
    x, y = torch.zeros(1), torch.ones(1)
    assert S.split_batch(x) == ((x,), {}) and S.split_batch((x, y)) == ((x, y), {})
    assert S.split_batch([x]) == ((x,), {}) and S.split_batch(((x,), {"y": y})) == ((x,), {"y": y})


def test_reference_is_called_like_a_net() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("n", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.n += x
            return self.n.clone()

    model = Counter().train()
    reference = S.Reference({"step": model})
    assert float(reference(torch.ones(1))) == 1 and float(reference.step(torch.ones(1))) == 2
    reference.reset()
    assert float(reference.entry("step")(torch.ones(1))) == 1
    assert float(model.n) == 0 and model.training
    with pytest.raises(AttributeError, match="no entry 'other'"):
        reference.other  # noqa: B018
    assert reference.ranges.seen[("step", "[0]")] == (1.0, 1.0)


class Top(nn.Module):
    """Three products without modules of their own; the first reads one huge feature that it does not need."""

    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.a, self.b, self.c = (nn.Parameter(torch.randn(16, 16, generator=g)) for _ in range(3))
        with torch.no_grad():
            self.a[:, 0] = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(F.linear(x, self.a))
        y = F.relu(F.linear(y, self.b))
        return F.linear(y, self.c)


def test_layers_of_the_same_module_are_kept_one_by_one() -> None:
    model = Top().eval()
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    x[:, 0] *= 3000
    with torch.no_grad():
        want = model(x)
    program = trivet.export(model, (x,), quantize="w8a8", calibrate=[x], max_drop=10,
                            metric=lambda net: min(40.0, sqnr(want, net(x))))  # fmt: skip
    report = program.quantization
    assert report is not None
    assert [s.kept for s in report.search if s.kept and "linear + relu at (" in s.kept[0]] and report.score >= 30
    assert [x.form for x in report.layers if "linear_1" in x.nodes or "linear_2" in x.nodes] == ["integer"] * 2
    assert report.layers[0].nodes[0] == "linear" and report.layers[0].stored != "i8"
    again = trivet.export(model, (x,), quantize=trivet.quantize.Recipe(W8, rules={"node:linear_1": None})).quantization
    assert again is not None and [x.nodes for x in again.layers] == [
        ["linear", "relu"],
        ["linear_1", "relu_1"],
        ["linear_2"],
    ]
    assert [x.form for x in again.layers] == ["weights", "float", "weights"]
