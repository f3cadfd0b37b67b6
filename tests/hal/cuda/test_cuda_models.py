"""Whole models through the CUDA driver, on the fake libcuda: whole, split with the CPU, in shared memory, and without any CUDA."""

from __future__ import annotations

import ctypes

import pytest
from whole_models import MODELS, close, made

import trivet
from trivet.fbs.structs import StepKind

TARGET = "cuda.sm87 > cpu"
CUTS: dict[str, dict[str, str]] = {
    "minilm": {"": "cuda", "tok": "cpu"},
    "resnet18": {"": "cuda", "layer1": "cpu", "layer3": "cpu"},
    "unet": {"": "cuda", "mid": "cpu"},
    "lstm": {"": "cuda", "rnn": "cpu"},
}


@pytest.mark.parametrize("name", MODELS)
def test_whole(name: str, fake: ctypes.CDLL) -> None:
    (model, args, shapes), want = made(name)
    program = trivet.export(model, args, dynamic_shapes=shapes, target=TARGET, place={"": "cuda"})
    parts = sum(int(s["kind"] == StepKind.run) for s in program.view.entries[0].steps)
    with trivet.load(bytes(program), devices=["cuda", "cpu"]) as net:
        assert {p.device for p in net.placement()} == {"cuda"}
        graphs = fake.trv_fake_count(b"graphs")
        close(net(*args), want)
        close(net(*args), want)
        assert fake.trv_fake_count(b"graphs") == graphs + 2 * parts, "one graph per part and run"
        params = fake.trv_fake_count(b"params")
        close(net(*args), want)
        assert fake.trv_fake_count(b"params") == params, "nothing changed: the graph is launched as it is"
        if shapes is not None:
            less = tuple(a[:, :-3].contiguous() for a in args)
            close(net(*less), model(*less).detach())
            close(net(*args), want)
    with (
        pytest.warns(RuntimeWarning, match="on cpu instead of cuda"),
        trivet.load(bytes(program), devices=["cpu"]) as net,
    ):
        close(net(*args), want)


@pytest.mark.parametrize(("name", "cut"), CUTS.items(), ids=CUTS)
def test_split(name: str, cut: dict[str, str], fake: ctypes.CDLL) -> None:
    (model, args, shapes), want = made(name)
    program = trivet.export(model, args, dynamic_shapes=shapes, target=TARGET, place=cut)
    with trivet.load(bytes(program), devices=["cuda", "cpu"]) as net:
        assert {p.device for p in net.placement()} == {"cuda", "cpu"}
        close(net(*args), want)


def test_shared_memory_has_no_copies(fake: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    (model, args, _), want = made("unet")
    program = trivet.export(model, args, target="cuda.sm87+unified > cpu", place=CUTS["unet"])
    assert not any(s["kind"] == StepKind.copy for s in program.view.entries[0].steps)
    monkeypatch.setenv("TRIVET_FAKE_CUDA", "arch=87 integrated")
    copied = fake.trv_fake_count(b"bytes")
    with trivet.load(bytes(program), devices=["cuda", "cpu"]) as net:
        assert {p.device for p in net.placement()} == {"cuda", "cpu"}
        close(net(*args), want)
    assert fake.trv_fake_count(b"bytes") == copied
