"""Several memories with budgets, from export to the run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trivet
from trivet.cli import main
from trivet.fbs.structs import RegionKind


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.Flatten(), nn.Linear(392, 4)
    ).eval()


def test_two_memories() -> None:
    model, x = net(), torch.randn(1, 3, 16, 16)
    whole = trivet.export(model, (x,)).summary()["entries"][0]["memory"]["arena"]
    program = trivet.export(model, (x,), memories={"fast": 4096, "slow": 0})
    regions = program.view.entries[0].regions
    sizes = {int(r["memory"]): int(r["size"]) for r in regions if r["kind"] == RegionKind.arena}
    assert 0 < sizes[0] <= 4096 and 0 < sizes[1] < whole
    with torch.no_grad():
        torch.testing.assert_close(trivet.load(program)(x), model(x), rtol=1e-5, atol=1e-5)


def test_budget_exceeded() -> None:
    with pytest.raises(trivet.Error, match=r"memory 'sram' has 8,000 bytes.*lower bound.*f32\[1,8,16,16\]"):
        trivet.export(net(), (torch.randn(1, 3, 16, 16),), memories={"sram": 8000})


def test_command_line(tmp_path, capsys) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "m.py").write_text("from torch import nn\ndef make():\n    return nn.Linear(8, 4).eval()\n")
    out = tmp_path / "n.trv"
    line = ["export", f"{tmp_path / 'm.py'}:make", "--example", "1x8", "-o", str(out)]
    assert main([*line, "--memory", "dtcm=16,sram=1K"]) == 0 and out.exists()
    assert main([*line, "--memory", "sram=16"]) != 0
    assert "sram" in capsys.readouterr().err
