"""One int8 program on every core: the golden outputs of this machine, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from models import program

from trivet.deploy import deploy
from trivet.deploy_targets import MACHINES
from trivet.firmware import boot, emulated, make


@pytest.fixture(scope="module")
def dscnn() -> Any:
    return program("dscnn", golden=2)


@pytest.mark.parametrize("target", [t for t, m in MACHINES.items() if m.qemu and t not in ("cortex-m4", "cortex-m55")])
def test_equal_on(target: str, dscnn: Any) -> None:
    with emulated(dscnn, target) as firmware:
        assert firmware.selftest() == (2, [])


def test_on_this_machine(dscnn: Any, tmp_path: Path) -> None:
    """A hosted project: clock and line are the system's."""
    d = deploy(dscnn, "x86_64-linux", tmp_path)
    with boot(make(tmp_path), d.machine) as firmware:
        assert firmware.selftest() == (2, [])
        assert firmware.facts["rate"] == 1_000_000_000


def test_a_wrong_output_is_told(dscnn: Any) -> None:
    """The last golden output is changed: the device says which element differs."""
    data = bytearray(bytes(dscnn))
    row = dscnn.view.segments[dscnn.view.program.GoldenSegment()]
    data[int(row["offset"]) + int(row["size"]) - 1] ^= 1
    with emulated(bytes(data), "cortex-m3") as firmware:
        passed, wrong = firmware.selftest()
    assert passed == 1
    assert len(wrong) == 1 and "output 0 differs at element 11" in wrong[0]
