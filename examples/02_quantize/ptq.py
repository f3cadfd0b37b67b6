"""Post-training quantisation: EfficientNet-Lite0 in 8-bit integers, calibrated on pictures, held to its float answers by a metric.

python examples/02_quantize/ptq.py             (needs the packages of tests/e2e/requirements.txt)
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch

import trivet

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "01_hello"))
from hello import labels, load_model, load_picture, median_ms, package_file

PICTURES = {"chelsea.png": 285, "coffee.png": 967, "rocket.jpg": 657, "motorcycle_left.png": 665}  # with their classes
CALIBRATION = ("astronaut.png", "brick.png", "camera.png", "coins.png", "grass.png", "gravel.png", "horse.png", "hubble_deep_field.jpg",
               "motorcycle_right.png", "retina.jpg")  # fmt: skip


@torch.no_grad()
def main() -> None:
    pictures = package_file("skimage", "data")
    model = load_model()
    calibration = [(load_picture(pictures / name),) for name in CALIBRATION]
    test = torch.cat([load_picture(pictures / name) for name in PICTURES])
    wanted = torch.tensor(list(PICTURES.values()))

    def metric(net: object) -> float:
        """Mean probability of the right class: finer than counting right answers."""
        assert callable(net)
        return float(torch.stack([net(x[None])[0].softmax(0)[c] for x, c in zip(test, wanted, strict=True)]).mean())

    begin = time.perf_counter()
    program = trivet.export(model, (test[:1],), quantize="w8a8", calibrate=calibration, metric=metric, max_drop=0.05)
    print(f"exported in {time.perf_counter() - begin:.1f} s")
    with tempfile.TemporaryDirectory() as folder:
        path = program.save(Path(folder) / "efficientnet_lite0_w8a8.trv")
        net, size = trivet.load(path), path.stat().st_size
    report = program.quantization
    assert report is not None
    print(report.table(worst=True, count=8))

    names = labels()
    right = 0
    for name, x in zip(PICTURES, test, strict=True):
        ours, theirs = net(x[None])[0].softmax(0), model(x[None])[0].softmax(0)
        a, b = int(ours.argmax()), int(theirs.argmax())
        right += a == PICTURES[name]
        print(f"{name:<22}{float(ours[a]):7.2%}  {names[a]:<20} float: {float(theirs[b]):7.2%}  {names[b]}")
    floats = sum(p.numel() * 4 for p in model.parameters())
    print(f"file {size / 1e6:.2f} MB, the model's float weights {floats / 1e6:.2f} MB")
    print(f"latency {median_ms(lambda: net(test[:1]), 5):.1f} ms")
    assert right >= 3 and size < 0.30 * floats


if __name__ == "__main__":
    main()
