"""fuse_pad: borders go into convolutions, and only where that gives the same result."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trivet


@pytest.mark.parametrize(("border", "conv", "fused"), [
    (nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(3, 4, 3, stride=2), True),
    (nn.ZeroPad2d((2, 1, 0, 3)), nn.Conv2d(3, 4, 3, stride=2, padding=1), True),
    (nn.ZeroPad2d((1, 2, 3, 0)), nn.Conv2d(3, 6, 3, groups=3, dilation=2), True),
    (nn.ConstantPad2d(1, 0.5), nn.Conv2d(3, 4, 3), False),
    (nn.ReflectionPad2d(1), nn.Conv2d(3, 4, 3), False),
    (nn.ZeroPad2d((-1, 1, 0, 1)), nn.Conv2d(3, 4, 3), False),
    (nn.ZeroPad2d(1), nn.ConvTranspose2d(3, 4, 3), False),
])  # fmt: skip
def test_border(border: nn.Module, conv: nn.Module, fused: bool) -> None:
    model, x = nn.Sequential(border, conv).eval(), torch.randn(2, 3, 11, 10)
    program = trivet.export(model, (x,))
    assert ("pad" not in str(program)) == fused
    with torch.no_grad():
        torch.testing.assert_close(trivet.load(program)(x), model(x), rtol=1e-5, atol=1e-5)
