"""SmolLM2-135M with weights of 4 bits: those of its GGUF file without requantising, and our own from float."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pretrained as P
import pytest
import torch
from torch.export import Dim
from torch.nn import functional as F

import trivet
from trivet import gguf

SENTENCES = ("The old lighthouse keeper climbed the stairs every evening to light the lamp.",
             "Plants use sunlight, water and carbon dioxide to make sugar and oxygen.")  # fmt: skip
TOKENS = torch.arange(5)[None] + 1
Logits = Callable[[list[int]], torch.Tensor]  # ids -> logits [len(ids), vocab], of what follows each


@pytest.fixture(scope="module")
def dequantised() -> P.Llama:
    """Weights as the gguf package dequantises them."""
    return P.smollm2()


def eager(model: P.Llama) -> Logits:
    """All positions in one pass."""

    def run(ids: list[int]) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        hook = model.layers[-1].register_forward_hook(lambda module, args, y: seen.append(y))
        model(torch.tensor([ids]), torch.arange(len(ids)))
        hook.remove()
        return F.linear(model.norm(seen[0][0]), model.tok.weight)

    return run


def stepwise(net: Any) -> Logits:
    """One token after the other, with the cache."""

    def run(ids: list[int]) -> torch.Tensor:
        net.reset()
        step = getattr(net, "decode", net)
        return torch.cat([step(torch.tensor([[t]]), torch.tensor([i])) for i, t in enumerate(ids)])

    return run


def perplexity(logits: Logits) -> float:
    """Of the sentences, each by itself."""
    tok = P.SmolTokenizer()
    loss, count = 0.0, 0
    for text in SENTENCES:
        ids = tok.encode(text)
        loss += float(F.cross_entropy(logits(ids[:-1]).double(), torch.tensor(ids[1:]), reduction="sum"))
        count += len(ids) - 1
    return math.exp(loss / count)


def decoder(model: P.Llama, path: Path, **more: Any) -> Any:
    """One token per call."""
    trivet.export(model, (TOKENS[:, :1], torch.arange(1)), **more).save(path)
    return trivet.load(path)


@pytest.fixture(scope="module")
def smol(tmp_path_factory: pytest.TempPathFactory) -> tuple[P.Llama, Any, Path]:
    with torch.no_grad():
        model = P.Llama(576, 30, 9, 3, 1536, 49152, 128, 1e5).eval()
        gguf.load(P.smollm2_gguf()).apply(model, P.smollm2_parameter)
        s = Dim("s", min=2, max=128)
        entries = {"prefill": (model, (TOKENS, torch.arange(5))), "decode": (model, (TOKENS[:, :1], torch.arange(1)))}
        path = tmp_path_factory.mktemp("smol") / "smol.trv"
        trivet.export(entries, dynamic_shapes={"prefill": ({1: s}, {0: s})}).save(path)
        return model, trivet.load(path), path


def test_the_model_holds_the_files_weights(smol: tuple[P.Llama, Any, Path], dequantised: P.Llama) -> None:
    model, _, _ = smol
    for name in ("tok", "layers.0.q", "layers.29.down", "layers.13.v"):
        assert torch.equal(model.get_submodule(name).weight, dequantised.get_submodule(name).weight)  # type: ignore[arg-type]
    assert {n.rsplit(".", 1)[0] for n, _ in model.named_parameters()} == {
        "norm", *(f"layers.{i}.norm{k}" for i in range(30) for k in (1, 2))}  # fmt: skip


def test_file_is_as_small_as_the_gguf(smol: tuple[P.Llama, Any, Path]) -> None:
    assert os.path.getsize(smol[2]) < 1.02 * P.smollm2_gguf().stat().st_size


def test_greedy(smol: tuple[P.Llama, Any, Path]) -> None:
    net, tok = smol[1], P.SmolTokenizer()
    for prompt, continuation in P.CONTINUATIONS.items():
        net.reset()
        ids, want = tok.encode(prompt), tok.encode(continuation)
        got = [int(net.prefill(torch.tensor([ids]), torch.arange(len(ids))).argmax())]
        for p in range(len(ids), len(ids) + len(want) - 1):
            got.append(int(net.decode(torch.tensor([[got[-1]]]), torch.tensor([p])).argmax()))
        assert tok.decode(got) == continuation


def test_perplexity_is_that_of_the_dequantised_model(smol: tuple[P.Llama, Any, Path], dequantised: P.Llama) -> None:
    want = perplexity(eager(dequantised))
    assert 10 < want < 100
    assert perplexity(stepwise(smol[1])) == pytest.approx(want, rel=0.02)


def test_own_groups_from_float(dequantised: P.Llama, tmp_path: Path) -> None:
    """w4g32 (w4g32a8 gives the same within 0.1 %)."""
    want = perplexity(eager(dequantised))
    path = tmp_path / "own.trv"
    assert perplexity(stepwise(decoder(dequantised, path, quantize="w4g32"))) < 1.10 * want
    assert path.stat().st_size < 1.02 * P.smollm2_gguf().stat().st_size
