"""A keyword spotter on two microcontrollers: export in 8 bits, one C project each, run in QEMU (mps2-an386 and mps3-an547).

    python examples/03_cortex_m/keywords.py [FOLDER]

Needs gcc-arm-none-eabi, picolibc-arm-none-eabi (or newlib), make and qemu-system-arm. On a board: `make EMULATED=0`, its own addresses
(FLASH_AT, RAM_AT, ..) and a port/board file, then `trivet bench net.trv --device serial:/dev/ttyACM0`.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn as nn

import trivet
from trivet.deploy import deploy
from trivet.firmware import boot, make
from trivet.quantize.recipe import recipe


class Keywords(nn.Module):
    """49 frames of 10 cepstral coefficients -> 12 words (DS-CNN)."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(1, 64, (10, 4), 2, (5, 1)), nn.ReLU()]
        for _ in range(4):
            layers += [nn.Conv2d(64, 64, 3, padding=1, groups=64), nn.ReLU(), nn.Conv2d(64, 64, 1), nn.ReLU()]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(64, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))


def main() -> None:
    torch.manual_seed(0)
    spoken = [(torch.randn(1, 1, 49, 10),) for _ in range(4)]  # yours: a few dozen features of recordings
    program = trivet.export(Keywords().eval(), spoken[0], quantize=replace(recipe("w8a8"), quantize_io=True), calibrate=spoken,
                            target="cpu.cortex_m", golden=2)  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else temporary)
        for target in ("cortex-m4", "cortex-m55"):
            project = deploy(program, target, folder / target, flash=96 << 10, ram=32 << 10)
            with boot(make(project.folder), project.machine) as firmware:
                firmware.write(0, 0, bytes(490))
                f = firmware.measure(target, runs=1)
                scores = torch.frombuffer(bytearray(firmware.read(0, 0)), dtype=torch.int8)
            print(f"{target}: {f.times[0] / 1e6:.2f} M instructions, start {f.start / 1e3:.0f} k; flash {f.flash:,} + {f.program_bytes:,} bytes; "
                  f"RAM arena {f.arena:,}, session {f.session:,}, stack {f.stack:,}; golden pairs {f.passed} of {f.passed + f.failed}; "
                  f"scores {scores.tolist()}")  # fmt: skip


if __name__ == "__main__":
    main()
