"""Random graphs over npu_sim and the CPU in the C runtime give what the reference evaluator gives, with and without the device."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trivet
from trivet.emit import emit
from trivet.fbs.structs import RegionKind
from trivet.ir.evaluate import evaluate
from trivet.ir.graph import Node
from trivet.pipeline import PASSES, Context, Options, run_passes
from trivet.targets import Targets
from trivet.targets.cpu import Cpu
from trivet.targets.npu_sim import NpuSim

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "sdk")]
from ir_random import copy_module, random_module
from test_lowering_random import check_plan, close, finite
from test_place_random import lottery


class Picky(NpuSim):
    """Takes some operators, and is never too slow."""

    rates = {"f32": 1e14}
    bandwidth = link = 1e14
    overhead = handover = 0.0

    def __init__(self, variant: str, takes: set[str]) -> None:
        super().__init__(variant)
        self.takes = takes

    def refuses(self, node: Node) -> str:
        return super().refuses(node) or ("" if node.op == "copy" or node.op in self.takes else f"no {node.op}")


def case(seed: int, symbolic: bool, unified: bool) -> None:
    rng = Random(seed)
    module, inputs = random_module(rng, symbolic, steps=rng.choice([8, 14, 20]))
    inputs = finite(module, inputs)
    states: dict[object, torch.Tensor] = {}
    want = [x for _ in range(2) for x in evaluate(module.entries["main"], inputs, states=states)]  # type: ignore[arg-type]
    context = Context(Targets((Picky("unified" if unified else "", lottery(rng)), Cpu())), Options())
    changed = copy_module(module)
    run_passes(changed, context, PASSES)
    check_plan(changed)
    data = bytes(emit(changed, context))
    device = f"npu_sim:delay={rng.choice([0, 100])}" + ("+import" if unified else "")
    with trivet.load(data, devices=[device, "cpu"], plugins=["npu_sim"]) as net:
        close([x for _ in range(2) for x in net.entry("main").run(inputs)], want)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that it falls back
        with trivet.load(data, devices=["cpu"]) as net:
            close([x for _ in range(2) for x in net.entry("main").run(inputs)], want)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**40), symbolic=st.booleans(), unified=st.booleans())
def test_runs_as_evaluated(seed: int, symbolic: bool, unified: bool) -> None:
    case(seed, symbolic, unified)


class Counter(torch.nn.Module):
    """Two entries write one state, a third reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.arange(24.0).reshape(4, 6))
        self.step = torch.nn.Linear(6, 6)


class Push(torch.nn.Module):
    def __init__(self, of: Counter) -> None:
        super().__init__()
        self.of = of

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.of.seen.copy_(torch.cat([self.of.seen[1:], self.of.step(x)], 0))
        return self.of.seen.mean(0)


class Scale(Push):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.of.seen.mul_(x)
        return self.of.seen.sum()


class Peek(Push):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.of.seen @ x


@pytest.mark.parametrize(
    "pins", [{"": "npu_sim"}, {"": "npu_sim", "of.step": "cpu"}, {"": "cpu", "of.step": "npu_sim"}]
)
def test_entries_share_states_on_the_device(pins: dict[str, str]) -> None:
    counter = Counter()
    x, v = torch.randn(1, 6), torch.randn(6)
    entries = {"push": (Push(counter), (x,)), "scale": (Scale(counter), (v,)), "peek": (Peek(counter), (v,))}
    program = trivet.export(entries, target="npu_sim > cpu", place=pins)
    states = [
        {(int(r["memory"]), int(r["id"])) for r in e.regions if r["kind"] == RegionKind.state}
        for e in program.view.entries
    ]
    assert len(set.union(*states)) == 1, "one place for all entries"
    with trivet.load(bytes(program), devices=["npu_sim:delay=50", "cpu"], plugins=["npu_sim"]) as net, torch.no_grad():
        for n in range(4):
            a, b = torch.randn(1, 6), torch.rand(6) + 0.5
            for name, arg in (("push", a), ("peek", b), ("scale", b))[: 3 if n else 2]:
                torch.testing.assert_close(getattr(net, name)(arg), entries[name][0](arg), rtol=1e-5, atol=1e-5)
        kept = net.snapshot()
        want = net.peek(v)
        net.scale(v)
        net.restore(kept)
        torch.testing.assert_close(net.peek(v), want)
        net.reset()
        torch.testing.assert_close(net.peek(v), torch.arange(24.0).reshape(4, 6) @ v)


def test_sizes_that_the_data_gives() -> None:
    class Pick(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = (x[:, 0] > 0).nonzero()[:, 0]
            return self.b(torch.relu(self.a(x[rows])))

    net = Pick().eval()
    x = torch.randn(12, 8)
    shapes = ({0: torch.export.Dim("n", min=2)},)  # no bound: the arenas are planned again
    program = trivet.export(
        net, (x,), dynamic_shapes=shapes, target="npu_sim > cpu", place={"a": "npu_sim", "b": "npu_sim"}
    )
    with trivet.load(bytes(program), devices=["npu_sim", "cpu"], plugins=["npu_sim"]) as loaded, torch.no_grad():
        for n in (12, 300, 5):
            x = torch.randn(n, 8)
            torch.testing.assert_close(loaded(x), net(x), rtol=1e-5, atol=1e-5)
