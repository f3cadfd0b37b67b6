"""Random graphs over pretend delegates: plans with several memories give the reference's results in every order that their waits allow."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trivet.emit import emit
from trivet.fbs.structs import StepKind
from trivet.ir.evaluate import evaluate
from trivet.ir.graph import Graph, Module, Node, Value
from trivet.ir.ops import OPS
from trivet.pieces import base_of
from trivet.pipeline import PASSES, Context, Options, run_passes
from trivet.program import Program
from trivet.schedule import all_graphs
from trivet.targets import Target, Targets

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "sdk")]
from ir_random import copy_module, random_module
from simulate import RecordingCpu, Simulator, parts, target

EARLY = PASSES[: PASSES.index("partition")]
LATE = tuple(p for p in PASSES[len(EARLY) :] if p not in ("pack_weights", "choose_winograd"))
SHAPES = {"own": (("vram", False),), "unified": (("", False),), "opaque": (("", True),), "two": (("vram", False), ("sram", False)),
          "mixed": (("vram", False), ("", True))}  # fmt: skip


def lottery(rng: Random) -> set[str]:
    """Operators that a delegate takes."""
    return {op for op in OPS if rng.random() < 0.7} | {"map"}


def lower(module: Module, targets: Targets, **options: object) -> Program:
    """The passes behind the optimising ones, but for those that the reference cannot follow."""
    parts.clear()
    context = Context(targets, Options(**options))  # type: ignore[arg-type]
    run_passes(module, context, LATE)
    return emit(module, context)


def states_of(graph: Graph) -> dict[str, torch.Tensor]:
    return {s.name: s.init for s, _ in graph.writes}


def needed(graph: Graph, targets: Targets) -> set[tuple[str, str]]:
    """(name of a base value, memory it is wanted in) for a graph that partition has gone through."""
    out = set()
    for g in all_graphs(graph):

        def memory(v: Value) -> str:
            n = base_of(v).node
            return "" if n is None or not n.delegate else targets.named(n.delegate).owns

        def want(v: Value, to: str) -> None:
            base = base_of(v)
            if base.const is None and base.state is None and memory(v) != to:
                out.add((base.name, to))
                if memory(v) and to:  # by way of the host
                    out.add((base.name, ""))

        for n in g.nodes:
            if not OPS[n.op].view:
                for v in n.inputs:
                    if v is not None:
                        want(v, targets.named(n.delegate).owns if n.delegate else "")
        for v in g.outputs:
            want(v, "")
    return out


def close(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        loose = 1e-3 if b.dtype == torch.float16 else 1e-5
        torch.testing.assert_close(a, b, rtol=loose, atol=loose, equal_nan=True)


def case(seed: int, kind: str, symbolic: bool) -> None:
    rng = Random(seed)
    module, inputs = random_module(rng, symbolic, steps=rng.choice([8, 14, 20]))
    run_passes(module, Context(), EARLY)
    reference = copy_module(module)
    taken = [lottery(rng) for _ in SHAPES[kind]]
    own: list[Target] = [
        target(f"p{i}", memory, opaque, lambda n, i=i: n.op in taken[i], handover=rng.choice([0.0, 1e-6]), link=rng.choice([1e6, 1e12]),
               overhead=0.0, rates={"f32": 1e13}, embeds=opaque and rng.random() < 0.5)
        for i, (memory, opaque) in enumerate(SHAPES[kind])]  # fmt: skip
    targets = Targets((*own, RecordingCpu()))
    pins = {f"m.{i}": rng.choice([*(t.name for t in own), "cpu"]) for i in range(4) if rng.random() < 0.3}
    pins = {
        p: name
        for p, name in pins.items()
        if all(takes(targets, name, n) for n in below(module, p)) and below(module, p)
    }
    fallback = rng.random() < 0.5
    program = lower(module, targets, place=pins, fallback=fallback, device_io=rng.random() < 0.2)
    for _ in range(2):
        lost = [t.name for t in own if fallback and rng.random() < 0.4]
        sim = Simulator(program, module.entries["main"], rng, lost, refuse=0.3 if fallback else 0.0)
        sim.opaque = frozenset(t.name for t in own if t.opaque)
        states: dict[object, torch.Tensor] = {}
        for _ in range(2):
            want = evaluate(reference.entries["main"], inputs, states=states)  # type: ignore[arg-type]
            close(sim.run(inputs), want)


def below(module: Module, path: str) -> list[Node]:
    return [n for g in module.entries.values() for h in all_graphs(g) for n in h.nodes
            if (OPS[n.op].kernel or n.op == "concat") and any(m == path for m in n.loc.module.split(" + "))]  # fmt: skip


def takes(targets: Targets, name: str, node: Node) -> bool:
    from trivet.passes.partition import refusal

    return not refusal(targets.named(name), node)


@pytest.mark.parametrize("kind", SHAPES)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**40), symbolic=st.booleans())
def test_any_order_gives_the_references_results(kind: str, seed: int, symbolic: bool) -> None:
    case(seed, kind, symbolic)


@pytest.mark.parametrize("kind", ["own", "two", "unified", "opaque"])
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**40))
def test_copies_are_the_needed_ones(kind: str, seed: int) -> None:
    rng = Random(seed)
    module, _ = random_module(rng)
    run_passes(module, Context(), EARLY)
    taken = [lottery(rng) for _ in SHAPES[kind]]
    own = [
        target(f"p{i}", m, o, lambda n, i=i: n.op in taken[i], rates={"f32": 1e13})
        for i, (m, o) in enumerate(SHAPES[kind])
    ]
    targets = Targets((*own, RecordingCpu()))
    placed = copy_module(module)
    run_passes(placed, Context(targets), ("partition",))
    program = lower(module, targets)
    copies = [s for s in program.view.entries[0].steps if s["kind"] == StepKind.copy]
    want = needed(placed.entries["main"], targets)
    nodes = [n for g in all_graphs(module.entries["main"]) for n in g.nodes if n.op == "transfer"]
    assert len(copies) == len(nodes) == len({(n.inputs[0], n.attrs.memory) for n in nodes})
    if kind in ("unified", "opaque"):
        assert not copies and not want
    states = sum(base_of(n.inputs[0]).state is not None for n in nodes)  # type: ignore[arg-type]
    assert len(copies) >= len(want)
    assert len(copies) - states <= len(want) + sum(n.op == "copy" and "this view" in n.reason
                                                   for g in all_graphs(module.entries["main"]) for n in g.nodes) + states  # fmt: skip
