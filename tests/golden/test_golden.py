"""Programs written by earlier versions load and give eager's results (make.py wrote both)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import trivet

HERE = Path(__file__).resolve().parent


@pytest.mark.parametrize("path", sorted(HERE.glob("*.trv")), ids=lambda p: p.stem)
def test_golden(path: Path) -> None:
    data = np.load(path.with_suffix(".npz"))
    net = trivet.load(path)
    calls = 1 + max(int(k.split("_")[0][2:]) for k in data if k.startswith("in"))
    for i in range(calls):
        got = net(*(data[f"in{i}_{k}"] for k in range(9) if f"in{i}_{k}" in data))
        for k, g in enumerate(got if isinstance(got, tuple) else (got,)):
            want = data[f"out{i}_{k}"]
            assert g.dtype == want.dtype and g.shape == want.shape
            np.testing.assert_allclose(g, want, rtol=1e-4, atol=1e-6)


def test_there_are_some() -> None:
    assert len(list(HERE.glob("*.trv"))) >= 3
