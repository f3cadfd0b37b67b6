"""Kernels of microcontrollers: results are the reference's on every core, instructions at most those of CMSIS-NN."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import layers
import numpy as np
import pytest
import torch

from trivet import native
from trivet.error import Error
from trivet.fbs.structs import Op
from trivet.targets.cpu_part import attribute_row
from trivet.writer import attrs_struct, records

CORES = ("m0", "m3", "m4", "m7", "m33")
STACK = 1280  # bytes of one kernel at most


@pytest.fixture(scope="module")
def cases() -> list[layers.Layer]:
    return [*layers.tiny(), *layers.odd(7, 90)]


@pytest.mark.parametrize("core", CORES)
def test_core(core: str, cases: list[layers.Layer], tmp_path: Path) -> None:
    for tool in ("arm-none-eabi-gcc", "qemu-system-arm"):
        assert shutil.which(tool), (
            f"{tool} is missing: apt-get install gcc-arm-none-eabi picolibc-arm-none-eabi qemu-system-arm"
        )
    results = layers.run(core, layers.build(core, cases, tmp_path))
    assert [v.name for v in cases if not results[v.name].ok] == []
    assert {n: r.stack for n, r in results.items() if r.stack > STACK} == {}
    most = 0.8 if core == "m4" else 1.0  # M4: also the bar of whole networks
    over = {
        v.name: (results[v.name].instructions / v.work, peer)
        for v in cases
        if (peer := v.peers.get(core)) is not None
        and results[v.name].instructions / v.work > (peer if v.name == "softmax" else most * peer)
    }
    assert over == {}


def _run(v: layers.Layer, inputs: list[torch.Tensor], tmp: int, **fields: Any) -> torch.Tensor:
    row = attribute_row(v.attrs) | fields
    out = torch.full_like(v.want, 85)
    native.run_op(int(Op[v.op]), inputs, [out], records(attrs_struct(Op[v.op]), [row]),
                  tmp=[torch.zeros(tmp, dtype=torch.uint8)] if tmp else [])  # fmt: skip
    return out


def test_refuses() -> None:
    """What does not fit is an error before anything is read or written."""
    g = np.random.default_rng(3)
    made = [layers.conv(g, "conv", (5, 6, 6), 7, (3, 3)), layers.conv(g, "dw", (8, 6, 6), 8, (3, 3), groups=8),
            layers.fc(g, "fc", 13, 6, 3), layers.fc(g, "real", 13, 6, 3, real=True)]  # fmt: skip
    for v in made:
        x, w, scale, bias = v.inputs
        assert torch.equal(_run(v, v.inputs, v.tmp), v.want)
        wrong: list[list[torch.Tensor]] = [[x, w[:-4], scale, bias], [x, torch.cat([w, w[:4]]), scale, bias], [x, w, scale, bias[:-1]],
                                           [x, w, scale, bias.float()], [x.to(torch.int16), w, scale, bias],
                                           [x, w, scale[..., :-1], bias], [x, w, scale.double(), bias]]  # fmt: skip
        if v.name != "real":
            for shift in (-1, 30, 1 << 30):
                bad = scale.clone()
                bad[1, 2] = shift
                wrong.append([x, w, bad, bias])
        for inputs in wrong:
            with pytest.raises(Error):
                _run(v, inputs, v.tmp)
        for fields in (
            {"a_zero" if v.op == "qmatmul" else "x_zero": 200},
            {"bits": 4} if v.op == "qmatmul" else {"transposed": 1},
        ):
            with pytest.raises(Error):
                _run(v, v.inputs, v.tmp, **fields)
        if v.tmp:
            with pytest.raises(Error):
                _run(v, v.inputs, v.tmp - 1)
    with pytest.raises(Error):
        _run(made[0], made[0].inputs, made[0].tmp, kernel=(3, 5))


def test_host(cases: list[layers.Layer]) -> None:
    """Programs for microcontrollers give the same on this machine."""
    for v in cases:
        assert torch.equal(_run(v, v.inputs, v.tmp), v.want), v.name
