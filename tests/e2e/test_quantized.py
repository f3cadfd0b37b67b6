"""Real models through quantisation, file and C runtime: what may be lost, and what may not."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pretrained as P
import pytest
import torch
from torch.export import Dim

import trivet
from trivet.quantize.report import sqnr

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "02_quantize"


def through_file(tmp_path: Path, model: Any, args: Any, **kw: Any) -> tuple[Any, Any, Path]:
    """(loaded net, program, path)."""
    program = trivet.export(model, args, **kw)
    path = program.save(tmp_path / "net.trv")
    return trivet.load(path), program, path


# ---- EfficientNet-Lite0 -------------------------------------------------------------------------------------------------
LABELS = {"chelsea.png": 285, "coffee.png": 967, "rocket.jpg": 657, "motorcycle_left.png": 665}
OTHER = ("astronaut.png", "brick.png", "camera.png", "coins.png", "grass.png", "gravel.png", "horse.png", "hubble_deep_field.jpg",
         "moon.png", "motorcycle_right.png", "retina.jpg", "page.png")  # fmt: skip


def crops() -> list[tuple[torch.Tensor, int]]:
    """Ten labelled inputs: each picture, each mirrored, and two narrower."""
    pictures = {n: P.picture(n) for n in LABELS}
    out = [(v, LABELS[n]) for n, p in pictures.items() for v in (p, p[:, ::-1])]
    out += [(pictures[n][:, : int(0.8 * pictures[n].shape[1])], LABELS[n]) for n in ("chelsea.png", "coffee.png")]
    return [(P.imagenet_input(np.ascontiguousarray(v)), label) for v, label in out]


@pytest.fixture(scope="module")
def efficientnet() -> tuple[Any, list[tuple[torch.Tensor, int]], list[tuple[torch.Tensor]]]:
    return P.efficientnet_lite0(), crops(), [(P.imagenet_input(P.picture(n)),) for n in OTHER]


def test_efficientnet_lite0_w8a8(tmp_path: Path, efficientnet: Any) -> None:
    model, labelled, calibration = efficientnet
    net, program, path = through_file(tmp_path, model, calibration[0], quantize="w8a8", calibrate=calibration)
    want, got = (torch.cat([f(x) for x, _ in labelled]) for f in (model, net))
    labels = torch.tensor([label for _, label in labelled])
    assert bool((want.argmax(1) == labels).all())
    assert int((got.argmax(1) == want.argmax(1)).sum()) >= 9
    assert sqnr(want, got) >= 20
    floating = trivet.export(model, calibration[0]).save(tmp_path / "float.trv")
    assert path.stat().st_size <= 0.30 * floating.stat().st_size
    report = program.quantization
    assert report.share("integer")[0] > 0.999 and report.batches == len(calibration)
    convs = [x for x in report.layers if "conv2d" in x.op]
    assert len(convs) == 49 and all(x.form == "integer" and x.sqnr is not None and x.sqnr > 5 for x in convs)


def test_efficientnet_wrong_calibration_is_caught(efficientnet: Any) -> None:
    model, labelled, calibration = efficientnet

    def metric(net: Callable[..., torch.Tensor]) -> float:
        return sum(float(net(x).softmax(1)[0, label]) for x, label in labelled[:4]) / 4

    faint = [(x / 100,) for (x,) in calibration[:2]]
    with pytest.raises(trivet.Error, match=r"Worst layers: .*(conv2d|linear).* at .* dB.*in the calibration data") as e:
        trivet.export(model, calibration[0], quantize="w8a8", calibrate=faint, metric=metric, max_drop=0.05)
    assert "calibrate with data like" in e.value.remedy


# ---- digits -------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def digits() -> tuple[Any, Any, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(the example's module, trained net, x, y, which are for testing)."""
    qat = P.load_file(EXAMPLES / "qat.py", "example_qat")
    torch.manual_seed(0)
    x, y = qat.digits()
    test = torch.arange(len(x)) % 4 == 0
    net = qat.make_net()
    with torch.enable_grad():
        qat.train(net, x[~test], y[~test], epochs=16, rate=1e-2)
    return qat, net.eval(), x, y, test


@pytest.mark.parametrize("recipe", ["w8a8", "w8a16", "w8a8-dynamic", "w8"])
def test_digits_ptq(tmp_path: Path, digits: Any, recipe: str) -> None:
    qat, net, x, y, test = digits
    batch = ({0: Dim("n", min=1, max=512)},)
    calibration = [(x[~test][i : i + 64],) for i in range(0, 512, 64)]
    small, program, _ = through_file(
        tmp_path, net, (x[:64],), dynamic_shapes=batch, quantize=recipe, calibrate=calibration
    )
    want = qat.accuracy(net, x[test], y[test])
    assert want > 0.97
    assert qat.accuracy(small, x[test], y[test]) >= want - 0.01
    assert program.quantization.layers


def test_digits_qat(tmp_path: Path, digits: Any) -> None:
    qat, net, x, y, test = digits
    batch = ({0: Dim("n", min=1, max=512)},)
    ready = trivet.quantize.prepare_qat(net, (x[:64],), "w8a8", dynamic_shapes=batch)
    with torch.enable_grad():
        qat.train(ready, x[~test], y[~test], epochs=2, rate=1e-3)
    small, program, _ = through_file(tmp_path, ready, (x[:64],), dynamic_shapes=batch)
    assert qat.accuracy(small, x[test], y[test]) >= qat.accuracy(net, x[test], y[test]) - 0.005
    assert program.quantization.share("integer")[0] > 0.99


@pytest.mark.parametrize("wrong", ["faint", "zero"])
def test_digits_wrong_calibration_is_caught(digits: Any, wrong: str) -> None:
    qat, net, x, y, test = digits
    batch = ({0: Dim("n", min=1, max=512)},)
    calibration = [(x[:64] * (0.01 if wrong == "faint" else 0.0),)]
    with pytest.raises(
        trivet.Error, match=r"the metric falls from 0.98.*Worst layers.*input .* in the calibration data"
    ) as e:
        trivet.export(net, (x[:64],), dynamic_shapes=batch, quantize="w8a8", calibrate=calibration,
                      metric=lambda f: qat.accuracy(f, x[test], y[test]))  # fmt: skip
    assert "calibrate with data like those that the metric uses" in e.value.remedy


# ---- MiniLM, CREPE, VAD -------------------------------------------------------------------------------------------------
def test_minilm_w8a8_dynamic(tmp_path: Path) -> None:
    model = P.minilm()
    ids, mask = P.minilm_tokens(["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."])
    b, t = Dim("b", min=1, max=16), Dim("t", min=2, max=512)
    net, program, path = through_file(
        tmp_path, model, (ids, mask), dynamic_shapes=({0: b, 1: t}, {0: b, 1: t}), quantize="w8a8-dynamic"
    )
    v = net(ids, mask)
    cosines = [float(v[i] @ v[j]) for i, j in ((0, 1), (0, 2), (1, 2))]
    assert cosines == pytest.approx([0.6660, 0.1046, 0.1411], abs=0.01)
    floats = sum(p.numel() * 4 for p in model.parameters())
    assert path.stat().st_size < 0.30 * floats
    # six layers of four products: query, key and value are one
    assert sum(x.form == "integer" for x in program.quantization.layers if x.op.startswith("linear")) == 24


def cents(y: torch.Tensor) -> torch.Tensor:
    """Pitch in cents above 10 Hz of activations [N, 360]: mean of the bins around the largest."""
    out = []
    for row in y:
        i = int(row.argmax())
        a, b = max(0, i - 4), min(360, i + 5)
        out.append((row[a:b] * (torch.arange(a, b) * 20 + 1997.3794084376191)).sum() / row[a:b].sum())
    return torch.stack(out)


def test_crepe_tiny_w8a8(tmp_path: Path) -> None:
    model = P.crepe_tiny()
    calibration = [
        (torch.cat([P.tone(f * 1.03), P.tone(f * 1.21)]),) for f in (110.0, 165.0, 220.0, 330.0, 440.0, 620.0, 830.0)
    ]
    net, program, _ = through_file(tmp_path, model, calibration[0], quantize="w8a8", calibrate=calibration)
    tones = [110.0, 147.0, 196.0, 220.0, 262.0, 330.0, 440.0, 523.0, 660.0, 880.0]
    x = torch.cat([P.tone(f) for f in tones])
    got = torch.cat([net(x[i : i + 2]) for i in range(0, len(x), 2)])
    right = torch.tensor([1200 * math.log2(f / 10) for f in tones])
    assert float((cents(got) - cents(model(x))).abs().max()) < 10
    assert float((cents(got) - right).abs().max()) < 10
    assert program.quantization.share("integer")[0] > 0.999


def test_silero_vad_w8a8(tmp_path: Path) -> None:
    model, _ = P.silero_vad()

    def frames(name: str) -> list[torch.Tensor]:
        padded = torch.cat([torch.zeros(64), P.speech(name=name)])
        return [padded[None, i : i + 576].contiguous() for i in range(0, len(padded) - 575, 512)]

    def probabilities(net: Any, name: str) -> torch.Tensor:
        net.reset()
        return torch.tensor([float(net(f)) for f in frames(name)])

    calibration = [(f,) for name in ("Rear_Center", "Side_Left", "Noise") for f in frames(name)]
    net, _, _ = through_file(tmp_path, model, calibration[0], quantize="w8a8", calibrate=calibration)
    floating = trivet.load(trivet.export(model, calibration[0]))
    same, error, total = 0, 0.0, 0
    for name in P.RECORDINGS:
        want, got = probabilities(floating, name), probabilities(net, name)
        speech = [float((p > 0.5).float().mean()) > 0.25 for p in (want, got)]
        assert speech[0] == speech[1] == (name != "Noise"), name
        same += int(((got > 0.5) == (want > 0.5)).sum())
        error += float((got - want).abs().sum())
        total += len(want)
    assert same >= 0.93 * total and error / total < 0.06  # of frames; those near 0.5 may fall on either side


# ---- tools --------------------------------------------------------------------------------------------------------------
def test_compare_names_a_bad_layer(digits: Any) -> None:
    from trivet.compare import compare

    _, net, x, _, test = digits
    program = trivet.export(net, (x[:64],), quantize="w8a8", calibrate=[(x[:64],)])
    result = compare(net, (x[:64],), program=program)
    assert result.ok and result.min_sqnr == 20 and result.first is None
    assert sum(bool(layer.twin) for layer in result.layers) >= 0.8 * len(result.layers)
    assert not compare(net, (x[:64],), program=program, min_sqnr=60).ok
    changed = copy.deepcopy(net)
    changed[5][0].weight *= 1.7
    found = compare(changed, (x[:64],), program=program)
    assert not found.ok and found.first is not None and "5.0" in found.first.place.module and "5.0" in str(found)


@pytest.mark.parametrize("name", ["ptq", "qat"])
def test_example(name: str, tmp_path: Path) -> None:
    import subprocess

    done = subprocess.run([sys.executable, EXAMPLES / f"{name}.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "in integers" in done.stdout
