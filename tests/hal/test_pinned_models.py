"""Whole models on npu_sim, split between it and the CPU at several points by pins, and through their alternatives where it is missing."""

from __future__ import annotations

import pytest
import torch
from whole_models import MODELS, close, made

import trivet
from trivet.fbs.structs import RegionKind, StepKind

N, C = "npu_sim", "cpu"
CUTS: dict[str, list[dict[str, str]]] = {
    "minilm": [{"": N, "tok": C}, {"": C, "layers.2": N, "layers.3": N, "layers.5.up": N}],
    "efficientnet_lite0": [{"": C, "_conv_stem": N}, {"": N, "_blocks.4": C, "_blocks.9": C}],
    "resnet18": [{"": N, "layer1": C, "layer3": C}, {"": C, "layer2.0": N, "layer4.1.conv2": N}],
    "unet": [{"": N, "mid": C}, {"": C, "down.1": N, "fuse.1": N}, {"": N, "up": C}],
    "lstm": [{"": N, "rnn": C}, {"": C, "rnn": N}],
}
CASES = [(name, {"": N}) for name in MODELS] + [(name, cut) for name, cuts in CUTS.items() for cut in cuts]


@pytest.mark.parametrize(("name", "cut"), CASES, ids=[f"{n}-{i}" for i, (n, _) in enumerate(CASES)])
def test_split(name: str, cut: dict[str, str]) -> None:
    (model, args, shapes), want = made(name)
    program = trivet.export(model, args, dynamic_shapes=shapes, target="npu_sim > cpu", place=cut)
    e = program.view.entries[0]
    parts = [[p.Delegate().decode() for p in e.parts(s)] for s in e.steps if s["kind"] == StepKind.run]
    copies = sum(int(s["kind"] == StepKind.copy) for s in e.steps)
    assert [N, C] in parts and copies
    if cut == {"": N}:
        assert all(p == [N, C] for p in parts)
        assert copies == len(e.inputs) + len(e.outputs), "whole on the device: in at the front, out at the end"
    data = bytes(program)
    with trivet.load(data, devices=[N, C], plugins=[N]) as net:
        assert [p.device for p in net.placement() if p.kind == "run"] == [p[0] for p in parts]
        for _ in range(2):
            close(net(*args), want)
        if shapes is not None:  # other sizes: planned at the bound
            less = tuple(a[:, :-3].contiguous() for a in args)
            with torch.no_grad():
                close(net(*less), model(*less))
    with pytest.warns(RuntimeWarning, match="on cpu instead of npu_sim"), trivet.load(data, devices=[C]) as net:
        assert {p.device for p in net.placement() if p.kind == "run"} == {C}
        close(net(*args), want)


@pytest.mark.parametrize("name", ["resnet18", "unet"])
def test_unified_memory_has_one_arena_and_no_copies(name: str) -> None:
    (model, args, _), want = made(name)
    program = trivet.export(model, args, target="npu_sim.unified > cpu", place=CUTS[name][0])
    e = program.view.entries[0]
    assert not any(s["kind"] == StepKind.copy for s in e.steps)
    assert sum(int(r["kind"] == RegionKind.arena) for r in e.regions) == 1
    with trivet.load(bytes(program), devices=["npu_sim:import", C], plugins=[N]) as net:
        assert {p.device for p in net.placement()} == {N, C}
        close(net(*args), want)
