"""The fake CUDA driver, in the place of a real one, for every test of this folder."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent, HERE.parents[1] / "e2e", HERE.parents[1] / "ops"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import shimtools

from trivet.cuda import part


@pytest.fixture(scope="session")
def fake_library() -> ctypes.CDLL:
    return shimtools.fake_driver()


@pytest.fixture
def fake(fake_library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    """The fake driver as a Jetson Orin with memory of its own; parts are compiled for it. Nothing may live on after the test."""
    monkeypatch.setattr(part, "compiler", shimtools.shim_images)
    monkeypatch.setenv("TRIVET_FAKE_CUDA", "arch=87")
    before = fake_library.trv_fake_live()
    yield fake_library
    fake_library.trv_fake_fail_at(-1)
    assert fake_library.trv_fake_live() == before, "the driver leaks objects"
