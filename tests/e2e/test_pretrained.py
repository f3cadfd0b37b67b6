"""Real pretrained models through export, file and C runtime, against eager torch: largest relative error 1e-4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pretrained as P
import pytest
import torch
from torch.export import Dim

import trivet


def through_file(tmp_path: Path, model: Any, args: Any = None, **kw: Any) -> Any:
    path = tmp_path / "net.trv"
    program = trivet.export(model, args, **kw)
    for entry in program.summary()["entries"]:
        assert entry["memory"]["arena"] <= 1.02 * entry["lower_bound"]
    program.save(path)
    return trivet.load(path)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference relative to the largest magnitude."""
    assert got.shape == want.shape and got.dtype == want.dtype
    return float((got - want).abs().max() / want.abs().max())


def test_efficientnet_lite0(tmp_path: Path) -> None:
    model = P.efficientnet_lite0()
    pictures = {"chelsea.png": 285, "coffee.png": 967, "rocket.jpg": 657, "motorcycle_left.png": 665}
    inputs = {n: P.imagenet_input(P.picture(n)) for n in pictures}
    net = through_file(tmp_path, model, (inputs["coffee.png"],))
    for name, label in pictures.items():
        got, want = net(inputs[name]), model(inputs[name])
        assert error(got, want) < 1e-4
        assert int(got.argmax()) == label


def test_minilm_batch_and_length_dynamic(tmp_path: Path) -> None:
    model = P.minilm()
    texts = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
    ids, mask = P.minilm_tokens(texts)
    b, t = Dim("b", min=1, max=16), Dim("t", min=2, max=512)
    net = through_file(tmp_path, model, (ids, mask), dynamic_shapes=({0: b, 1: t}, {0: b, 1: t}))
    v = net(ids, mask)
    assert error(v, model(ids, mask)) < 1e-4
    cosines = [float(v[i] @ v[j]) for i, j in ((0, 1), (0, 2), (1, 2))]
    assert cosines == pytest.approx([0.6660, 0.1046, 0.1411], abs=6e-5)
    for i, text in enumerate(texts):  # another batch size and lengths: the same vectors
        assert error(net(*P.minilm_tokens([text])), v[i : i + 1]) < 1e-4
    longer = P.minilm_tokens([" ".join(texts * 8)] * 2)
    assert error(net(*longer), model(*longer)) < 1e-4
    with pytest.raises(trivet.Error, match="600"):
        net(torch.zeros(1, 600, dtype=torch.int64), torch.ones(1, 600, dtype=torch.int64))


def frames(sound: torch.Tensor) -> list[torch.Tensor]:
    """64 samples of context in front of each 512."""
    padded = torch.cat([torch.zeros(64), sound])
    return [padded[None, i : i + 576].contiguous() for i in range(0, len(sound) - 511, 512)]


def test_silero_vad_streams(tmp_path: Path) -> None:
    model, jit = P.silero_vad()
    sound = P.speech()
    net = through_file(tmp_path, model, (frames(sound)[0],))
    want = torch.tensor([float(jit(sound[i : i + 512][None], 16000)) for i in range(0, len(sound) - 511, 512)])
    got = torch.tensor([float(net(f)) for f in frames(sound)])
    assert float((got - want).abs().max()) < 1e-4
    assert 0.5 < float((got > 0.5).float().mean()) < 0.9
    other = net.session()  # a context of its own: its state is untouched by the other's
    net.reset()
    assert float(net(frames(sound)[0])) == pytest.approx(float(want[0]), abs=1e-5)
    assert float(other(frames(sound)[0])) == pytest.approx(float(want[0]), abs=1e-5)
    net.reset()
    noise = torch.randn(8192, generator=torch.Generator().manual_seed(0)) * 0.1
    assert max(float(net(f)) for f in frames(noise)[4:]) < 0.2


def test_crepe_tiny(tmp_path: Path) -> None:
    model = P.crepe_tiny()
    net = through_file(tmp_path, model, (P.tone(220.0).repeat(2, 1),), dynamic_shapes=({0: Dim("n", min=1, max=64)},))
    for n in (1, 5):
        x = torch.cat([P.tone(110.0 * (k + 1)) for k in range(n)])
        assert error(net(x), model(x)) < 1e-4


@pytest.mark.parametrize("which", [0, 1, 2], ids=["pnet", "rnet", "onet"])
def test_mtcnn(tmp_path: Path, which: int) -> None:
    model = P.mtcnn()[which]
    image = torch.from_numpy(P.picture("astronaut.png").copy()).permute(2, 0, 1)[None].float()
    image = (image - 127.5) / 128
    if which == 0:  # fully convolutional: every level of the picture pyramid has another size
        x = image[:, :, :97, :120].contiguous()
        net = through_file(tmp_path, model, (x,), dynamic_shapes={"x": {2: Dim.AUTO, 3: Dim.AUTO}})
        sizes = [(97, 120), (512, 512), (60, 33), (12, 12), (255, 130)]
        inputs = [image[:, :, :h, :w] for h, w in sizes]
    else:
        side = 24 if which == 1 else 48
        patches = image.unfold(2, side, 61).unfold(3, side, 61).permute(0, 2, 3, 1, 4, 5).reshape(-1, 3, side, side)
        net = through_file(tmp_path, model, (patches[:4],), dynamic_shapes=({0: Dim("n", min=1, max=512)},))
        inputs = [patches[:1], patches, patches[3:10]]
    for x in inputs:
        for got, want in zip(net(x), model(x), strict=True):
            assert error(got, want) < 1e-4


@pytest.fixture(scope="module")
def smol(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    model = P.smollm2()
    ids, pos = torch.tensor([[1, 2, 3, 4, 5]]), torch.arange(5)
    s = Dim("s", min=2, max=128)
    entries = {"prefill": (model, (ids, pos)), "decode": (model, (ids[:, :1], pos[:1]))}
    net = through_file(tmp_path_factory.mktemp("smol"), entries, dynamic_shapes={"prefill": ({1: s}, {0: s})})
    return model, net


def test_smollm2_greedy(smol: tuple[Any, Any]) -> None:
    _, net = smol
    tok = P.SmolTokenizer()
    for prompt, continuation in P.CONTINUATIONS.items():
        net.reset()
        ids, want = tok.encode(prompt), tok.encode(continuation)
        logits = net.prefill(torch.tensor([ids]), torch.arange(len(ids)))
        got = [int(logits.argmax())]
        for p in range(len(ids), len(ids) + len(want) - 1):
            got.append(int(net.decode(torch.tensor([[got[-1]]]), torch.tensor([p])).argmax()))
        assert tok.decode(got) == continuation


def test_smollm2_token_by_token_is_whole_prompt(smol: tuple[Any, Any]) -> None:
    model, net = smol
    ids = torch.tensor([P.SmolTokenizer().encode("Water boils at 100 degrees Celsius, which is approximately 212")])
    n = ids.shape[1]
    net.reset()
    whole = net.prefill(ids, torch.arange(n))
    net.reset()
    for p in range(n):
        last = net.decode(ids[:, p : p + 1], torch.tensor([p]))
    assert error(last, whole) < 1e-4
    for layer in model.layers:
        layer.k_cache.zero_()
        layer.v_cache.zero_()
    assert error(whole, model(ids, torch.arange(n))) < 1e-4
