"""A pretrained network on other machines: exported once, the runtime built for each, pushed, measured; one table.

python examples/06_phone_or_pi/bench.py ssh://pi@raspberrypi.local adb: local

A Raspberry Pi (or anything with Linux) needs an ssh server that takes your key, a phone USB debugging; nothing is installed on
either, and nothing stays. Without arguments: this machine. (Needs trivet[cross], and the packages of tests/e2e/requirements.txt.)
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

import trivet
from trivet.devices import Measured, bench_on, open_device, run_on

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "01_hello"))
from hello import labels, load_model, load_picture, package_file

RECIPES = {"float32": None, "8-bit weights": "w8"}


@torch.no_grad()
def main(devices: list[str]) -> list[Measured]:
    """Measures every recipe on every device."""
    x = load_picture(package_file("skimage", "data/coffee.png"))
    model, names = load_model(), labels()
    want = model(x)[0].softmax(0)
    rows = []
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        np.save(folder / "x.npy", x.numpy())
        for recipe, quantize in RECIPES.items():
            trivet.export(model, (x,), quantize=quantize).save(folder / f"{recipe}.trv")
        print(
            f"{'device':<28}{'platform':<24}{'weights':<16}{'MB':>6}{'load':>9}{'p50':>9}{'p90':>9} ms  peak MB  answer"
        )
        for name in devices:
            with open_device(name) as device:
                for recipe in RECIPES:
                    file = folder / f"{recipe}.trv"
                    m = bench_on(device, file, runs=20, inputs=[folder / "x.npy"])
                    [y] = run_on(device, file, inputs=[folder / "x.npy"])
                    p = torch.from_numpy(y)[0].softmax(0)
                    best = int(p.argmax())
                    assert best == int(want.argmax()) and abs(float(p[best] - want[best])) < 0.05
                    print(f"{m.device:<28}{m.platform:<24}{recipe:<16}{file.stat().st_size / 1e6:>6.1f}{m.load_ms:>9.1f}{m.p50_ms:>9.1f}"
                          f"{m.p90_ms:>9.1f}     {m.peak_bytes / 1e6:>6.1f}  {float(p[best]):.1%} {names[best]}")  # fmt: skip
                    rows.append(m)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:] or ["local"])
