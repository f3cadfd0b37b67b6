"""Files whose memories, waits or parts are made to deceive: refused, or run without harm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hal_nets import Chain

import trivet
from trivet.error import Error
from trivet.fbs.structs import RegionKind
from trivet.writer import ProgramSpec, records, write_bytes

DEVICES: dict[str, Any] = {"devices": ["npu_sim", "cpu"], "plugins": ["npu_sim"]}


@pytest.fixture(scope="module")
def spec() -> ProgramSpec:
    program = trivet.export(Chain().eval(), (torch.randn(4, 16),), target="npu_sim > cpu",
                            place={"a": "npu_sim", "b": "cpu", "c": "npu_sim"})  # fmt: skip
    assert program._spec is not None and len(program._spec.entries[0].waits)
    return program._spec


def with_entry(spec: ProgramSpec, **changes: Any) -> bytes:
    return write_bytes(replace(spec, entries=[replace(spec.entries[0], **changes)]))


def test_as_it_is(spec: ProgramSpec) -> None:
    trivet.load(write_bytes(spec), **DEVICES)(torch.randn(4, 16))


@pytest.mark.parametrize(
    "rows",
    [[(3, 3)], [(2, 3)], [(3, 1), (2, 1)], [(3, 1), (3, 1)], [(3, 2), (3, 1)], [(99, 1)], [(0xFFFFFFFF, 0)]],
    ids=str,
)
def test_waits(spec: ProgramSpec, rows: list[tuple[int, int]]) -> None:
    """Out of order, doubled, for later steps, for steps that are none."""
    with pytest.raises(Error, match="a step is malformed"):
        trivet.load(with_entry(spec, waits=records("Wait", [{"step": a, "on": b} for a, b in rows])), **DEVICES)


def test_without_waits_steps_run_one_after_another(spec: ProgramSpec) -> None:
    x = torch.randn(4, 16)
    want = trivet.load(write_bytes(spec), **DEVICES)(x)
    torch.testing.assert_close(trivet.load(with_entry(spec, waits=records("Wait")), **DEVICES)(x), want)


def test_regions_in_no_memory(spec: ProgramSpec) -> None:
    for memory in (2, 31, 32, 255):
        regions = spec.entries[0].regions.copy()
        regions["memory"][0] = memory
        with pytest.raises(Error, match="a region is malformed"):
            trivet.load(with_entry(spec, regions=regions), **DEVICES)


def test_inputs_at_home_in_another_memory(spec: ProgramSpec) -> None:
    regions = spec.entries[0].regions.copy()
    io = np.flatnonzero(regions["kind"] == RegionKind.io)
    regions["memory"][io[0]] ^= 1
    with pytest.raises(Error, match="a region is malformed"):
        trivet.load(with_entry(spec, regions=regions), **DEVICES)


def test_memory_of_the_host_that_a_device_owns(spec: ProgramSpec) -> None:
    memories = [("ram", "npu_sim"), *spec.memories[1:]]
    with pytest.raises(Error, match="head is damaged"):
        trivet.load(write_bytes(replace(spec, memories=memories)), **DEVICES)


def test_a_part_for_the_cpu_that_reads_the_devices_memory(spec: ProgramSpec) -> None:
    """Each part under the other's name: nobody follows an address that it cannot reach."""
    entry = spec.entries[0]
    for wanted in ("cpu", "npu_sim"):
        form = {"cpu": "cpu.1", "npu_sim": "npu_sim.1"}[wanted]
        parts = [replace(p, delegate=wanted, format=form) for p in entry.parts]
        with pytest.raises(Error, match="memory"):
            trivet.load(with_entry(spec, parts=parts), **DEVICES)
    for i, part in enumerate(entry.parts):
        if part.delegate != "cpu":
            continue
        parts = list(entry.parts)
        parts[i] = replace(part, delegate="npu_sim", format="npu_sim.1")
        try:
            trivet.load(with_entry(spec, parts=parts), **DEVICES)(torch.randn(4, 16))
        except Error as e:
            assert "memory" in str(e) or "alternative" in str(e)
