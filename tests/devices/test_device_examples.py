"""The examples of devices, as a person runs them: a network on other machines, a page in a real browser."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from browser import Browser
from ctools import sh, tool

from trivet import devices, native
from trivet.build import build, zig

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples"


def example(path: str) -> ModuleType:
    """An example's module."""
    file = EXAMPLES / path
    spec = importlib.util.spec_from_file_location(f"example_{file.parent.name}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_phone_or_pi(sshd: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Two programs over ssh: figures and the right answer from the other side. (Building for it is tested elsewhere.)"""
    beside = native.library().path.parent
    run = next(p for p in (beside / "trv_run", beside.parent / "bin" / "trv_run") if p.is_file())
    monkeypatch.setattr(devices, "runner", lambda device: run)
    bench = example("06_phone_or_pi/bench.py")
    monkeypatch.setattr(bench, "RECIPES", {"float32": None, "bfloat16": "bf16"})
    rows = bench.main([sshd])
    assert [r.device for r in rows] == [sshd, sshd] and all(
        0 < r.min_ms <= r.p50_ms <= r.p90_ms and r.runs == 20 for r in rows
    )
    said = capsys.readouterr().out
    assert said.count("espresso") == 2 and "x86_64-linux" in said


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ModuleType, Path]]:
    """The page of 07_wasm, made once."""
    if not zig():
        pytest.skip("zig is not installed")
    folder = tmp_path_factory.mktemp("page")
    make = example("07_wasm/make.py")
    runtime = build("wasm32-wasi", folder / "runtime", compiler="zig")
    yield make, make.make(folder / "page", runtime.folder)


@torch.no_grad()
def eager(make: ModuleType, name: str) -> dict[str, float]:
    """Eager PyTorch's probabilities of a picture, by label."""
    y = make.load_model()(make.load_picture(make.package_file("skimage", "data") / name))[0].softmax(0)
    return {label: float(p) for label, p in zip(make.labels(), y, strict=True)}


def test_page_in_node(page: tuple[ModuleType, Path], tmp_path: Path) -> None:
    """The page's own code on the pixels that Python cuts: the probabilities of eager PyTorch."""
    from PIL import Image

    make, folder = page
    for name in make.PICTURES[:2]:
        image = Image.open(folder / name).convert("RGBA")
        side = int(min(image.size) * 0.875)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        image = image.crop((left, top, left + side, top + side)).resize((224, 224), Image.Resampling.BICUBIC)
        (tmp_path / "rgba").write_bytes(np.asarray(image).tobytes())
        said = json.loads(sh(tool("node"), HERE / "page.mjs", folder, tmp_path / "rgba"))
        want = eager(make, name)
        assert [t["label"] for t in said["top"][:2]] == sorted(want, key=want.__getitem__, reverse=True)[:2]
        for t in said["top"]:
            assert abs(t["probability"] - want[t["label"]]) < 1e-4


def test_page_in_a_browser(page: tuple[ModuleType, Path], tmp_path: Path) -> None:
    """A real Chromium opens the page: a picture by its address, one by a button, one chosen as a file, and one that is none."""
    make, folder = page
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    wait = """(async () => {
        const text = () => document.getElementById("state")?.textContent ?? "";
        for (let i = 0; i < 600 && !/^(done|error)/.test(text()); i++) await new Promise((f) => setTimeout(f, 100));
        const said = text();
        document.getElementById("state").textContent = "asked";
        return [said, [...document.querySelectorAll("#result li")].map((x) => x.textContent)];
    })()"""
    with make.server(folder, 0) as server, Browser(tool("chromium"), tmp_path / "profile") as browser:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser.call(
            "Page.navigate", {"url": f"http://127.0.0.1:{server.server_address[1]}/?picture={make.PICTURES[0]}"}
        )
        shown = [browser.evaluate(wait)]
        browser.evaluate(f"document.querySelector(\"button[value='{make.PICTURES[1]}']\").click()")
        shown.append(browser.evaluate(wait))
        browser.choose_file("#file", folder / make.PICTURES[2])
        shown.append(browser.evaluate(wait))
        for name, (state, lines) in zip(make.PICTURES, shown, strict=True):
            want = eager(make, name)
            best = max(want, key=want.__getitem__)
            percent, _, label = lines[0].partition(" %  ")
            assert state.startswith("done in") and len(lines) == 5, (name, state)
            # the browser's own scaling of pictures, and its decoder, are not Pillow's
            assert label == best and abs(float(percent) / 100 - want[best]) < 0.1, (name, lines)
        browser.choose_file("#file", broken)
        assert browser.evaluate(wait)[0].startswith("error: ")
        server.shutdown()
