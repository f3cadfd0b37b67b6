"""Case rt_over_two_gib: offsets past 31 and 32 bits. The other runtime cases are in tests/sdk/test_runtime_scenarios.py and tests/c."""

from __future__ import annotations

from pathlib import Path

import torch

import trivet


def test_over_four_gib(tmp_path: Path) -> None:
    rows = int(4.3 * 2**30) // 256

    class Table(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = torch.zeros(rows, 64)
            weight[:, 0] = torch.arange(rows)
            self.e = torch.nn.Embedding.from_pretrained(weight)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.e(ids)

    model = Table().eval()
    ids = torch.tensor([0, 2**31 // 256, rows // 2, rows - 1])
    path = tmp_path / "big.trv"
    try:
        trivet.export(model, (ids,)).save(path)
        assert path.stat().st_size > 2**32
        with trivet.load(path, defer_crc=True) as net, torch.no_grad():
            assert torch.equal(net(ids), model(ids))
    finally:
        path.unlink(missing_ok=True)
