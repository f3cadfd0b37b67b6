"""Random graphs run in the C runtime as the reference evaluator says: lowering from partition to the file, end to end."""

from __future__ import annotations

import sys
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
from trivet.ir.graph import Module
from trivet.pipeline import PASSES, Context, run_passes
from trivet.planner import Item, overlaps
from trivet.schedule import all_graphs

sys.path.insert(0, str(Path(__file__).parent))
from ir_random import copy_module, random_module

LOWER = PASSES[PASSES.index("partition") :]


def run(module: Module, inputs: list[torch.Tensor], passes: tuple[str, ...]) -> tuple[list[torch.Tensor], Module]:
    """Results of two calls in the C runtime."""
    changed = copy_module(module)
    context = Context("cpu")
    run_passes(changed, context, passes)
    net = trivet.load(emit(changed, context), threads=1)
    out = [x for _ in range(2) for x in net.entry("main").run(inputs)]
    net.close()
    return out, changed


def finite(module: Module, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Takes NaN and infinity out of constants and inputs: what kernels make of them is not the subject here."""
    for entry in module.entries.values():
        for graph in all_graphs(entry):
            for v in graph.values():
                if v.const is not None and v.const.data.is_floating_point():
                    v.const.data = v.const.data.nan_to_num(0.5, 2.0, -2.0)
    return [x.nan_to_num(0.5, 2.0, -2.0) if x.is_floating_point() else x for x in inputs]


def check_plan(module: Module) -> None:
    """No two storages that live at one time in one memory share bytes."""
    for graph in module.entries.values():
        for memory, size in graph.plan.arena.items():
            live = [
                s for s in graph.plan.storages if s.kind in (RegionKind.arena, RegionKind.io) and s.memory == memory
            ]
            assert not overlaps([Item(s.bound, s.first, s.last) for s in live], [s.offset for s in live])
            assert all(s.offset + s.bound <= size for s in live)


def close(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        loose = b.dtype == torch.float16
        torch.testing.assert_close(a, b, rtol=1e-2 if loose else 2e-3, atol=2e-2 if loose else 2e-3, equal_nan=True)


@pytest.mark.parametrize("passes", [LOWER, PASSES], ids=["lower", "all"])
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**40), symbolic=st.booleans())
def test_runs_as_evaluated(passes: tuple[str, ...], seed: int, symbolic: bool) -> None:
    module, inputs = random_module(Random(seed), symbolic)
    inputs = finite(module, inputs)
    states: dict[object, torch.Tensor] = {}
    want = [x for _ in range(2) for x in evaluate(module.entries["main"], inputs, states=states)]  # type: ignore[arg-type]
    got, changed = run(module, inputs, passes)
    check_plan(changed)
    close(got, want)
