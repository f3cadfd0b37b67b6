"""Records the commands that the tests of this folder run, where the environment asks for it (record.py)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="session")
def recorded() -> Iterator[None]:
    if "TRIVET_RECORD_CASES" not in os.environ:
        yield
        return
    from record import Recorder

    from trivet import native

    recorder = Recorder(Path(os.environ["TRIVET_RECORD_CASES"]))
    native.run_op = recorder
    yield
    native.run_op = recorder.run_op
    recorder.close()
