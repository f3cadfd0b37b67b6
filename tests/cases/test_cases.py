"""Small cases modelled on public bug reports (cases.py), each in a process of its own: eager result or the stated refusal; those
of kind quant reach their signal-to-noise ratio."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import cases as C  # noqa: E402
from common import run_all  # noqa: E402

IDS = [c.id for c in C.CASES.values() if c.kind not in ("quant", "runtime")]
QUANT = [c.id for c in C.CASES.values() if c.kind == "quant"]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, object]:
    return dict(run_all("run_cases:one", IDS, 120))


@pytest.fixture(scope="module")
def quantized() -> dict[str, object]:
    return dict(run_all("run_quant:one", QUANT, 120))


@pytest.mark.parametrize("id", IDS)
def test_case(id: str, outcomes: dict[str, object]) -> None:
    outcome = outcomes[id]
    assert outcome.ok, outcome.text  # type: ignore[attr-defined]
    assert "does not outlive" not in outcome.text  # type: ignore[attr-defined]


@pytest.mark.parametrize("id", QUANT)
def test_quant_case(id: str, quantized: dict[str, object]) -> None:
    outcome = quantized[id]
    assert outcome.ok, outcome.text  # type: ignore[attr-defined]
