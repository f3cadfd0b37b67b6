"""Costs of commands against torch's own counter, profiles, traces, tuning."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import trivet
from trivet import cost, native
from trivet.cli import main
from trivet.error import Error
from trivet.fbs.structs import Isa
from trivet.machine import Machine, cached, measure
from trivet.profile import profile
from trivet.program import Program
from trivet.reader import FileView
from trivet.tune import choices, sign, tune

PC = Machine(
    "made up", 1, {"f32": 100e9, "i8": 400e9, "bf16": 0.0}, ((32 << 10, 200e9), (1 << 20, 100e9), (1 << 62, 10e9))
)


class Net(nn.Module):
    """Convolutions of all kinds, a product, attention, and what costs bytes only."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3, padding=1)
        self.b = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.c = nn.ConvTranspose2d(8, 16, 2, stride=2, groups=2)
        self.d = nn.Linear(16, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.c(self.b(self.a(x).relu())).flatten(2).transpose(1, 2)
        q, k = self.d(y).view(1, -1, 2, 12).transpose(1, 2), self.d(y[:, :40]).view(1, 40, 2, 12).transpose(1, 2)
        return ((q @ k.transpose(-1, -2) * 0.3).softmax(-1) @ k).softmax(-1)  # torch does not count its own attention


@pytest.fixture(scope="module")
def program() -> Program:
    torch.manual_seed(0)
    return trivet.export(Net().eval(), (torch.randn(1, 3, 8, 8),))


def test_multiply_adds_are_those_of_torch(program: Program) -> None:
    x = torch.randn(1, 3, 8, 8)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        Net().eval()(x)
    entry = program.view.entry("")
    works = [cost.cost(entry, c, cost.static_dims(entry)) for c in entry.commands]
    assert sum(w.macs for w in works) == counter.get_total_flops() // 2
    assert {w.unit for w in works if w.macs} == {"f32"}
    weights = sum(w.weights for w in works)
    assert sum(entry.weight_bytes.values()) <= weights <= 2 * sum(entry.weight_bytes.values())  # d is read twice
    first = next(w for w in works if w.macs)
    assert first.read == x.nbytes and first.written == 8 * 8 * 8 * 4


def test_multiply_adds_of_quantised_and_recurrent() -> None:
    torch.manual_seed(0)
    linear, lstm = nn.Linear(64, 48).eval(), nn.LSTM(10, 16, 2, proj_size=4).eval()
    made = {
        "w8a8-dynamic": (linear, torch.randn(5, 64)),
        "w8": (linear, torch.randn(5, 64)),
        None: (lstm, torch.randn(7, 3, 10)),
    }
    for recipe, (model, x) in made.items():
        entry = trivet.export(model, (x,), quantize=recipe).view.entry("")
        works = [cost.cost(entry, c, cost.static_dims(entry)) for c in entry.commands]
        if recipe is None:
            want = 7 * 3 * sum(p.numel() for n, p in lstm.named_parameters() if "weight" in n)
            assert {w.unit for w in works if w.macs} == {"f32"}
        else:
            want = 5 * 64 * 48
            assert {w.unit for w in works if w.macs} == {"i8" if recipe == "w8a8-dynamic" else "f32"}
        assert sum(w.macs for w in works) == want


def test_causal_attention_and_rows_count_what_is_needed() -> None:
    shapes = [(2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 4)]
    attrs = {"causal": np.array([(1,)], [("causal", "u1")])[0], "full": np.array([(0,)], [("causal", "u1")])[0]}
    assert cost.macs("attention", attrs["full"], shapes, [(2, 3, 5, 4)]) == 6 * 5 * 7 * 12
    assert cost.macs("attention", attrs["causal"], shapes, [(2, 3, 5, 4)]) == 6 * (1 + 2 + 3 + 4 + 5) * 12
    model = nn.Embedding(1000, 32)
    entry = trivet.export(model, (torch.tensor([[1, 2, 3]]),)).view.entry("")
    work = cost.cost(entry, entry.commands[-1], cost.static_dims(entry))
    assert (work.macs, work.weights, work.written) == (0, 3 * 32 * 4, 3 * 32 * 4)


def test_limits() -> None:
    few = cost.limit(cost.Cost(1_000_000, "f32", 1000, 1000, 1000), PC, 1000)
    assert few == cost.Limit(2e6 / 100e9, "f32")
    assert cost.limit(cost.Cost(1_000_000, "bf16", 0, 0, 0), PC, 0).seconds == few.seconds  # no instructions of its own
    streamed = cost.limit(cost.Cost(1000, "i8", 1 << 20, 0, 0), PC, 8 << 20)
    assert streamed == cost.Limit((1 << 20) / 10e9, "memory")
    assert cost.limit(cost.Cost(0, "", 0, 0, 0), PC, 0).seconds == 0


def test_machine_is_measured_and_kept(tmp_path) -> None:
    m = measure(1, seconds=1e-4, repeats=1)
    assert m.ops["f32"] > 1e8 and all(r > 1e7 for _, r in m.reads) and str(m)
    assert [s for s, _ in m.reads] == sorted(s for s, _ in m.reads)
    file = tmp_path / "limits.json"
    file.write_text("[]")
    with pytest.raises(Error, match="does not hold limits"):
        cached(file, 1)
    key = f"{m.name}, 1"
    row = {"name": m.name, "threads": 1, "ops": m.ops, "reads": [list(r) for r in m.reads]}
    file.write_text(json.dumps({key: row}))
    assert cached(file, 1) == m


def test_profile_names_every_command(program: Program, tmp_path) -> None:
    p = profile(program, runs=3, machine=PC)
    commands = program.view.entry("").commands
    assert [r.time for r in p.rows] == [c.time for c in commands]
    assert sum(r.share for r in p.rows) == pytest.approx(1) and 0 < sum(r.seconds for r in p.rows) <= p.seconds
    for r, c in zip(p.rows, commands, strict=True):
        assert r.kernel.startswith(f"{c.op}_") and r.isa in Isa.__members__ and r.tiles >= 1 and r.calls == 1
        assert r.by in ("f32", "memory") and r.rate > 0 and r.limit > 0 and r.bytes > 0
        assert "test_profile.py" in r.source
    assert {r.module for r in p.rows if "conv" in r.kernel} == {"a", "b", "c"}
    assert {r.module: r.algorithm for r in p.rows if "conv" in r.kernel}["b"] == "depthwise"
    p.save_trace(tmp_path / "t.json")
    events = [e for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert [e["args"]["kernel"] for e in events] == [r.kernel for r in p.rows]
    assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in zip(events, events[1:]))
    assert json.loads(json.dumps(p.to_json()))["rows"][0]["kernel"] == p.rows[0].kernel


def test_profile_counts_loops() -> None:
    class Loop(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.while_loop(lambda i, y: i < 3000, lambda i, y: (i + 1, y * 1.5 - y), (torch.tensor(0), x))[1]

    p = profile(trivet.export(Loop(), (torch.randn(4),)), runs=1, machine=PC)
    assert 3000 in {r.calls for r in p.rows}  # more records than there was room for at first


def test_tune_keeps_results_and_runs_anywhere(program: Program, tmp_path) -> None:
    x = torch.randn(1, 3, 8, 8)
    want = trivet.load(program)(x)
    tuned = tune(program, threads=2, rounds=1, seconds=0.3)
    assert bytes(program) != b"" and not any(choices(program).values())
    torch.testing.assert_close(trivet.load(tuned.program)(x), want, rtol=1e-4, atol=1e-5)
    assert str(tuned) and tuned.after["forward"] <= tuned.before["forward"]
    assert set(choices(tuned.program)["forward"]) == {c.time for c in tuned.choices["forward"]}
    path = tmp_path / "net.trv"
    program.save(path)
    assert (
        main(
            [
                "tune",
                str(path),
                "--rounds",
                "1",
                "--seconds",
                "0.2",
                "--threads",
                "1",
                "-o",
                str(tmp_path / "t.trv"),
                "--json",
            ]
        )
        == 0
    )
    torch.testing.assert_close(trivet.load(tmp_path / "t.trv")(x), want, rtol=1e-4, atol=1e-5)


def chosen(program: Program, isa: int, workers: int) -> memoryview:
    """The program's bytes with one choice for all commands."""
    data = np.frombuffer(program.to_bytes(), np.uint8)
    room = np.empty(len(data) + 64, np.uint8)
    copy = room[-room.ctypes.data % 64 :][: len(data)]
    copy[:] = data
    view = FileView(copy.data)
    for rows in view.entry("").command_rows():
        rows["isa"], rows["workers"] = isa, workers
    if isa or workers:
        with pytest.raises(Error):
            trivet.load(copy.data)  # the checksum guards choices too
    sign(view)
    return copy.data


@pytest.mark.parametrize("isa", [0, 1, 2, 4, 64, 512, 0xFFFF, 0x8000])
@pytest.mark.parametrize("workers", [0, 1, 255])
def test_any_choice_is_harmless(program: Program, isa: int, workers: int) -> None:
    """Choices come from the file: what this machine has not is not taken, and nothing else changes."""
    x = torch.randn(1, 3, 8, 8)
    want = trivet.load(program, threads=2)(x)
    file = chosen(program, isa, workers)
    p = profile(file, [x.numpy()], threads=2, runs=1, machine=PC)
    have = int(native.library().lib.trvk_isa_mask(native.library().ffi.NULL))
    default = profile(program, [x.numpy()], threads=2, runs=1, machine=PC)
    for a, b in zip(p.rows, default.rows, strict=True):
        if isa in set(Isa) and isa & have:
            assert a.isa in (Isa(isa).name, b.isa)
        elif not isa & have:
            assert (a.kernel, a.isa) == (b.kernel, b.isa)
        assert a.tiles == (1 if workers == 1 else b.tiles)
    torch.testing.assert_close(trivet.load(file, threads=2)(x), want, rtol=1e-4, atol=1e-5)


def test_integers_do_not_depend_on_choices() -> None:
    torch.manual_seed(0)
    x = torch.randn(9, 96)
    program = trivet.export(nn.Linear(96, 70), (x,), quantize="w8a8-dynamic")
    want = trivet.load(program)(x)
    for isa in Isa:
        assert torch.equal(trivet.load(chosen(program, int(isa), 0))(x), want)
