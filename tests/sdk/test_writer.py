"""The writer: bytes are as schema/README.md says, deterministic, and the official flatc reads them."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trivet.crc import crc32c
from trivet.fbs.structs import STRUCTS, Op, RegionKind, StepKind
from trivet.reader import FileView
from trivet.writer import (
    ALIGN,
    PAGE,
    CpuPartSpec,
    DebugSpec,
    DebugTimeSpec,
    EntrySpec,
    PartSpec,
    ProgramSpec,
    SegmentSpec,
    attrs_struct,
    cpu_part,
    records,
    write_bytes,
    write_file,
)

SCHEMA = Path(__file__).resolve().parents[2] / "schema"


def sample(weights: np.ndarray | None = None) -> ProgramSpec:
    """A program of one copy command."""
    part = cpu_part(CpuPartSpec(
        records("Command", [{"op": Op.copy, "n_in": 1, "n_out": 1}]), [0, 1], records("MapInstr", [{"value": 7}]),
        {Op.copy: records("CopyAttrs", [{}]), Op.conv: records("ConvAttrs", [{"nd": 2, "stride": [1, 2], "lo": -1.5}])}))  # fmt: skip
    entry = EntrySpec(
        "forward",
        records("Dim", [{}, {"min": 1, "max": 1}, {"min": 4, "max": 4}]),
        records("Region", [{"kind": RegionKind.arena, "align": 64, "segment": -1, "size": 128},
                           {"kind": RegionKind.io, "id": 32, "align": 64, "segment": -1, "size": 16, "slot": 0},
                           {"kind": RegionKind.io, "id": 33, "align": 64, "segment": -1, "size": 16, "slot": 1,
                            "home_offset": 64}]),  # fmt: skip
        records("Storage", [{"size": 16, "region": 1, "align_log2": 6}, {"size": 16, "region": 2, "align_log2": 6}]),
        records("Value", [{"storage": 0, "dtype": 9, "rank": 1, "dim": [2], "stride": [1]},
                          {"storage": 1, "dtype": 9, "rank": 1, "dim": [2], "stride": [1]}]),  # fmt: skip
        [0], [1], ["x"], ["y"], records("Step", [{"kind": StepKind.run, "count": 1}]), [PartSpec("cpu", "cpu.1", part)], 1, 128,
        '{"a":1}',
    )  # fmt: skip
    data = np.arange(5000, dtype=np.float32) if weights is None else weights
    return ProgramSpec(
        "sample", [entry], [SegmentSpec([data])], [DebugSpec(["x", "y"], [DebugTimeSpec("copy", "m.a", "m.py:1")])]
    )


def flatc(path: Path, schema: str, out: Path) -> dict:
    """The file as the official compiler reads it."""
    subprocess.run(["flatc", "--json", "--strict-json", "--raw-binary", "-o", str(out), str(SCHEMA / schema), "--", str(path)],
                   check=True, capture_output=True)  # fmt: skip
    return json.loads((out / path.with_suffix(".json").name).read_text())


def slow_crc(data: bytes) -> int:
    reg = 0xFFFFFFFF
    for byte in data:
        reg ^= byte
        for _ in range(8):
            reg = (reg >> 1) ^ (0x82F63B78 if reg & 1 else 0)
    return reg ^ 0xFFFFFFFF


def test_crc() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    rng = np.random.default_rng(0)
    for n in (0, 1, 3, 100, 32767, 32768, 32769, 70001, 131072 + 5):
        data = rng.integers(0, 256, n, dtype=np.uint8).tobytes()
        assert crc32c(data) == slow_crc(data)
        cut = n // 3
        assert crc32c(data[cut:], crc32c(data[:cut])) == crc32c(data)


def test_head_and_segments() -> None:
    weights = np.arange(40000, dtype=np.float32)
    data = write_bytes(sample(weights))
    view = FileView(data)
    head = view.program.Head()
    assert 0 <= view.segments[0]["offset"] - head.Size() < PAGE
    blank = bytearray(data[: head.Size()])
    at = head._tab.Pos + 8
    blank[at : at + 4] = bytes(4)
    assert crc32c(blank) == head.Crc()
    first, debug = view.segments
    assert first["align"] == PAGE and first["offset"] % PAGE == 0 and debug["align"] == ALIGN
    stored = data[first["offset"] : first["offset"] + first["size"]]
    assert stored == weights.tobytes() and first["crc"] == crc32c(stored)
    assert len(data) == debug["offset"] + debug["size"]
    assert view.entries[0].place(0).module == "m.a"
    assert view.program.Abi() == 1 and view.program.MinAbi() == 1 and data[4:8] == b"TRV1"


def test_deterministic() -> None:
    assert write_bytes(sample()) == write_bytes(sample())


def test_chunks_may_be_functions(tmp_path: Path) -> None:
    data = np.arange(300, dtype=np.uint8)
    eager = SegmentSpec([data[:100], data[100:]])
    lazy = SegmentSpec([lambda: data[:100], lambda: data[100:]], [100, 200])
    spec = sample()
    a, b = write_bytes(replace(spec, segments=[eager])), write_bytes(replace(spec, segments=[lazy]))
    assert a == b
    write_file(replace(spec, segments=[lazy]), tmp_path / "p.trv")
    assert (tmp_path / "p.trv").read_bytes() == a
    with pytest.raises(ValueError, match="announced"):
        write_file(replace(spec, segments=[SegmentSpec([lambda: data], [7])]), tmp_path / "q.trv")
    assert [p.name for p in tmp_path.iterdir()] == ["p.trv"]  # nothing half written


def test_external_weights(tmp_path: Path) -> None:
    weights = np.arange(40000, dtype=np.float32)
    spec = sample()
    spec.segments = [SegmentSpec([weights], external=True), SegmentSpec([b"abc"])]
    write_file(spec, tmp_path / "p.trv", tmp_path / "p.weights")
    view = FileView((tmp_path / "p.trv").read_bytes())
    stored = (tmp_path / "p.weights").read_bytes()
    row = view.segments[0]
    assert row["file"] == 1 and stored[row["offset"] : row["offset"] + row["size"]] == weights.tobytes()
    sha = hashlib.sha256(stored).digest()
    ext = view.program.External()
    assert ext.Hash0() == int.from_bytes(sha[:8], "little") and ext.Hash1() == int.from_bytes(sha[8:16], "little")
    assert ext.Size() == len(stored)


def test_stripped() -> None:
    spec = sample()
    spec.debug = ()
    view = FileView(write_bytes(spec))
    assert view.program.DebugSegment() == -1 and len(view.segments) == 1


@pytest.mark.skipif(shutil.which("flatc") is None, reason="flatc is not installed")
def test_flatc_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "p.trv"
    write_file(sample(), path)
    seen = flatc(path, "program.fbs", tmp_path)
    assert seen["name"] == "sample" and seen["entries"][0]["storages"][1]["region"] == 2
    assert seen["entries"][0]["regions"][2]["home_offset"] == 64 and seen["entries"][0]["signature"] == '{"a":1}'
    assert seen["segments"][0]["size"] == 20000
    part = tmp_path / "part.bin"
    part.write_bytes(bytes(seen["entries"][0]["parts"][0]["data"]))
    cpu = flatc(part, "cpu.fbs", tmp_path)
    assert (
        cpu["commands"][0]["op"] == "copy" and cpu["conv_"][0]["stride"] == [1, 2, 0] and cpu["conv_"][0]["lo"] == -1.5
    )
    debug = tmp_path / "debug.bin"
    debug.write_bytes(path.read_bytes()[seen["segments"][1]["offset"] :])
    assert flatc(debug, "debug.fbs", tmp_path)["entries"][0]["times"][0]["source"] == "m.py:1"


def test_every_op_has_a_struct() -> None:
    assert all(attrs_struct(op) in STRUCTS for op in Op)
