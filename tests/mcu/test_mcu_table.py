"""Models of MLPerf-Tiny shape on Cortex-M4F and M55 in QEMU: results, flash, RAM, start, instructions, each within its budget."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from models import program

from trivet.deploy import deploy
from trivet.firmware import Figures, boot, make

# CMSIS-NN's sum over the layers, GCC -O3 (clang's where that is less), in instructions: at most 0.8 of it
PEER = {"dscnn": (7_810_000, 1_780_000), "resnet8": (31_200_000, 4_810_000), "mobilenet": (24_700_000, 6_420_000),
        "autoencoder": (579_000, 147_000)}  # fmt: skip
ARENA = {"dscnn": 16_500, "resnet8": 50_000, "mobilenet": 58_000, "autoencoder": 1_500}
START = {"dscnn": 52_000, "resnet8": 58_000, "mobilenet": 115_000, "autoencoder": 42_000}
FILE = {"dscnn": 1.75, "resnet8": 1.3, "mobilenet": 1.41, "autoencoder": 1.13}  # of the 8-bit weights


@dataclass(frozen=True)
class Row:
    figures: Figures
    code: int  # runtime and kernels
    file: float


@pytest.fixture(scope="module", params=list(PEER))
def rows(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, Row]]]:
    name = request.param
    p = program(name, golden=1)
    pairs = int(p.view.segments[p.view.program.GoldenSegment()]["size"])
    file = (p.view.size - pairs) / p.view.entries[0].weight_bytes["i8"]
    out = {}
    for target in ("cortex-m4", "cortex-m55"):
        folder = tmp_path_factory.mktemp(f"{name}-{target}")
        made = deploy(p, target, folder)
        with boot(make(folder), made.machine) as firmware:
            out[target] = Row(firmware.measure(target, 1), _code(folder), file)
    yield name, out


def _code(folder: Path) -> int:
    """Bytes of text and tables that the link took from trivet/ (the self-test apart) and from the compiler's library."""
    text = (folder / "build/model.map").read_text()
    text = text[text.index("Linker script and memory map") :]
    found = re.findall(r"^ \.(?:text|rodata)\S*\s+0x[0-9a-f]+\s+0x([0-9a-f]+) (\S+)", text, re.M)
    return sum(
        int(size, 16)
        for size, file in found
        if ("build/trivet/" in file and "selftest" not in file) or "libgcc" in file
    )


def test_within_budgets(rows: tuple[str, dict[str, Row]]) -> None:
    """Golden outputs are those of this machine, bit for bit."""
    name, table = rows
    for k, (target, row) in enumerate(table.items()):
        f = row.figures
        print(f"{name} {target}: {f.times[0]:,} instructions, start {f.start:,}, code {row.code:,}, file {row.file:.2f}, arena {f.arena:,}, "
              f"static {f.static:,}, stack {f.stack:,}")  # fmt: skip
        assert (f.passed, f.failed) == (1, 0)
        assert f.times[0] <= 0.8 * PEER[name][k]
        assert f.arena <= ARENA[name]
        assert f.static <= (1024 if name != "mobilenet" else 1280)
        assert f.stack <= (2048 if target == "cortex-m4" else 2560)
        assert f.start <= START[name]
        assert row.file <= FILE[name]
        assert row.code <= 36 * 1024 + (6 * 1024 if name == "resnet8" else 0)
