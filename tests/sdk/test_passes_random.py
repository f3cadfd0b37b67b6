"""Random graphs keep their meaning through every pass, alone and one after the other."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trivet.ir.evaluate import evaluate
from trivet.ir.graph import Module
from trivet.ir.text import print_module
from trivet.ir.verify import verify
from trivet.pipeline import PASSES, Context, find_pass, name_values

sys.path.insert(0, str(Path(__file__).parent))
from ir_random import copy_module, random_module

MINE = PASSES[: PASSES.index("partition")]
EXACT = ("canonicalize", "fold_constants", "fuse_elementwise")


def results(module: Module, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    states: dict[object, torch.Tensor] = {}
    out: list[torch.Tensor] = []
    for _ in range(2):
        out += evaluate(module.entries["main"], inputs, states=states)  # type: ignore[arg-type]
    return out + [x for _, x in sorted(states.items(), key=lambda t: t[0].name)]  # type: ignore[attr-defined]


def close(got: list[torch.Tensor], want: list[torch.Tensor], exact: bool) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        half = b.dtype == torch.float16
        rtol = 1e-2 if half else 1e-5 if exact else 2e-3
        torch.testing.assert_close(a, b, rtol=rtol, atol=2e-2 if half else 1e-5 if exact else 2e-3, equal_nan=True)


@pytest.mark.parametrize("name", [*MINE, "all"])
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**40), symbolic=st.booleans())
def test_pass_keeps_meaning(name: str, seed: int, symbolic: bool) -> None:
    module, inputs = random_module(Random(seed), symbolic)
    want = results(module, inputs)
    changed = copy_module(module)
    passes = MINE if name == "all" else (name,)
    for p in passes:
        find_pass(p)(changed, Context())
        name_values(changed)
        try:
            verify(changed, p)
        except Exception:
            print(print_module(module), print_module(changed))
            raise
    try:
        close(results(changed, inputs), want, name in EXACT)
    except Exception:
        print(print_module(module), print_module(changed))
        raise
