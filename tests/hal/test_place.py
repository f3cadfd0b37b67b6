"""Placement as callers see it: preference, pins, strict, islands, alternatives, memories and their budgets, device I/O, inspect."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

import trivet
from trivet.cli import main
from trivet.fbs.structs import RegionKind, StepKind
from trivet.lanes import Task, pieces
from trivet.reader import EntryView
from trivet.targets import base
from trivet.targets.cpu import Cpu

sys.path.insert(0, str(Path(__file__).parent))
from simulate import Recorder

TAKES = ("conv", "matmul", "map", "softmax", "norm", "scatter", "pool")


class Npu(Recorder):
    """Fast, with a memory of its own."""

    name = "pretend"
    memory = "vram"
    rates = {"f32": 1e12}
    bandwidth = 1e12
    takes = staticmethod(lambda node: node.op in TAKES)


class Unified(Npu):
    name = "unified"
    memory = ""


class Opaque(Npu):
    name = "opaque"
    memory = ""
    opaque = True
    embeds = True
    takes = staticmethod(lambda node: node.op in (*TAKES, "concat", "reshape", "permute"))


@pytest.fixture(autouse=True)
def targets() -> Iterator[None]:
    """The pretend delegates are known for one test."""
    saved = dict(base._registered)
    for cls in (Npu, Unified, Opaque):
        base.register_target(cls)
    yield
    base._registered.clear()
    base._registered.update(saved)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1))
        self.back = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.back(self.front(x))
        return torch.softmax(self.head(x.mean((2, 3))), -1)


X = (torch.randn(1, 3, 32, 32),)


def export(model: nn.Module, args: tuple[Any, ...] = X, **more: Any) -> trivet.Program:
    return trivet.export(model.eval(), args, **more)


def entry(program: trivet.Program) -> EntryView:
    return program.view.entries[0]


def placed(program: trivet.Program) -> dict[str, set[str]]:
    """Module path: delegates of its nodes."""
    out: dict[str, set[str]] = {}
    e = entry(program)
    for c in e.commands:
        if c.delegate:
            for path in e.place(c.time).module.split(" + "):
                out.setdefault(path.partition(".")[0], set()).add(c.delegate)
    return out


def copies(program: trivet.Program) -> list[tuple[str, str]]:
    """Names of what is copied from and to."""
    e = entry(program)
    return [(e.value_names[int(s["a"])], e.value_names[int(s["b"])]) for s in e.steps if s["kind"] == StepKind.copy]


def test_files_for_the_cpu_have_no_memories_waits_or_alternatives() -> None:
    v = export(Net()).view
    assert not v.memories and not v.program.Features() and not len(v.entries[0].waits)
    assert all(s["count"] == 1 for s in v.entries[0].steps)


def test_the_first_target_that_takes_a_node_gets_it() -> None:
    p = export(Net(), target="pretend > cpu")
    assert [str(m) for m in p.view.memories] == ["ram", "vram of pretend"]
    assert placed(p) == {"front": {"pretend"}, "back": {"pretend"}, "head": {"cpu"}, "": {"cpu"}}
    assert len(copies(p)) == 2, "one in front of the first convolution, one behind the last"
    reasons = {entry(p).place(c.time).placement for c in entry(p).commands if c.delegate}
    assert "pretend: first choice" in reasons
    assert any(r.startswith("cpu: pretend: no reduce") for r in reasons)


def test_small_work_between_two_copies_stays_where_its_neighbours_are() -> None:
    p = export(Net(), target="pretend > cpu")
    why = [entry(p).place(c.time).placement for c in entry(p).commands if c.op == "matmul"]
    assert len(why) == 1
    assert why[0].startswith("cpu: an island of 2 nodes would take")
    assert "with copies and handovers" in why[0]


def test_unified_memory_has_no_copies() -> None:
    for target in ("unified > cpu", "opaque > cpu"):
        p = export(Net(), target=target)
        assert not copies(p)
        assert not p.view.memories and not p.view.program.Features()


def test_pins_win_and_the_longest_path_decides() -> None:
    p = export(Net(), target="pretend > cpu", place={"": "cpu", "back": "pretend", "head": "pretend"})
    assert placed(p) == {"front": {"cpu"}, "back": {"pretend"}, "head": {"pretend"}, "": {"cpu"}}
    e = entry(p)
    assert {e.place(c.time).placement for c in e.commands if c.delegate == "pretend"} == {
        "pretend: pinned by 'back'", "pretend: pinned by 'head'"}  # fmt: skip
    q = export(Net(), target="pretend > cpu", place={"front": "cpu", "front.2": "pretend"})
    assert placed(q)["front"] == {"cpu", "pretend"}


@pytest.mark.parametrize(("options", "match"), [
    ({"place": {"": "pretend"}}, r"pinned to 'pretend' by place={'': 'pretend'}, but pretend: no reduce"),
    ({"place": {"body": "cpu"}}, "place= names 'body', where no node"),
    ({"place": {"head": "gpu"}}, "the target is pretend > cpu, without 'gpu'"),
    ({"strict": True}, r"strict: pretend does not take 1 nodes: .*no reduce"),
    ({"device_io": ["y"]}, "device_io names 'y', which is no input or output"),
    ({"memories": {"vram": 1000}}, r"memory 'vram' has 1,000 bytes, entry 'forward' needs"),
])  # fmt: skip
def test_what_cannot_be_is_named(options: dict[str, Any], match: str) -> None:
    with pytest.raises(trivet.Error, match=match):
        export(Net(), target="pretend > cpu", **options)


def test_strict_takes_what_the_first_target_takes() -> None:
    p = export(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), target="pretend > cpu", strict=True)
    assert placed(p) == {"0": {"pretend"}, "1": {"pretend"}}
    assert all(s["count"] < 2 for s in entry(p).steps), "strict leaves no fallback"


def test_parts_carry_an_alternative_unless_told_not_to() -> None:
    e = entry(export(Net(), target="pretend > cpu"))
    parts = [[p.Delegate().decode() for p in e.parts(s)] for s in e.steps if s["kind"] == StepKind.run]
    assert parts == [["pretend", "cpu"], ["cpu"]]
    both = e.parts(next(s for s in e.steps if s["count"] == 2))
    assert [both[0].Inputs(i) for i in range(both[0].InputsLength())] == [
        both[1].Inputs(i) for i in range(both[1].InputsLength())
    ]
    e = entry(export(Net(), target="pretend > cpu", fallback=False))
    assert all(s["count"] < 2 for s in e.steps)


def test_an_opaque_part_without_an_alternative_keeps_its_values_and_constants_to_itself() -> None:
    with_, without = (export(Net(), target="opaque > cpu", fallback=f) for f in (True, False))
    arena = [sum(int(r["size"]) for r in entry(p).regions if r["kind"] == RegionKind.arena) for p in (with_, without)]
    assert arena[1] < arena[0]
    weights = [
        sum(int(r["size"]) for r in entry(p).regions if r["kind"] == RegionKind.const_) for p in (with_, without)
    ]
    assert weights[0] > 4 * 3 * 9 * 32 and weights[1] < 4 * 600, "only the head's are left"


def test_constants_of_several_memories_are_stored_once() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.sort(self.a(x), 0)[0] * self.a.weight.sum())

    p = export(
        Shared(),
        (torch.randn(4, 16),),
        target="pretend > cpu",
        place={"a": "pretend", "b": "cpu"},
        skip="fold_constants",
    )
    e = entry(p)
    const = [r for r in e.regions if r["kind"] == RegionKind.const_]
    assert len({(int(r["memory"]), int(r["segment"])) for r in const}) == len(const)
    assert {int(r["memory"]) for r in const} == {0, 1}
    assert sum(int(s["size"]) for s in p.view.segments[:-1]) < 3 * 16 * 16 * 4


def test_states_lie_where_they_are_written() -> None:
    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(64, 256))
            self.conv = nn.Conv1d(64, 64, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.cache.copy_(torch.relu(self.cache * 0.5 + self.conv(x)))
            return self.cache * 2

    p = export(Cache(), (torch.randn(64, 256),), target="pretend > cpu", place={"": "pretend"})
    e = entry(p)
    states = [r for r in e.regions if r["kind"] == RegionKind.state]
    assert [(int(r["memory"]), int(r["id"]) >= 0x8000) for r in states] == [(1, True)]
    assert len(copies(p)) == 2, "the input and the output; the state stays"


def test_inputs_and_outputs_on_the_device() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    host = export(net, target="pretend > cpu", place={"": "pretend"})
    assert len(copies(host)) == 2
    for asked, left, memories in ((True, 0, [1, 1]), (["input"], 1, [1, 0])):
        p = export(net, target="pretend > cpu", place={"": "pretend"}, device_io=asked)
        assert len(copies(p)) == left
        assert [int(r["memory"]) for r in entry(p).regions if r["kind"] == RegionKind.io] == memories


def test_a_budget_per_memory() -> None:
    p = export(Net(), target="pretend > cpu", memories={"vram": 1 << 20, "sram": 4096, "dram": 0})
    e = entry(p)
    assert [m.name for m in p.view.memories] == ["sram", "dram", "vram"]
    sizes = {int(r["memory"]): int(r["size"]) for r in e.regions if r["kind"] == RegionKind.arena}
    assert sizes[0] <= 4096 and sizes[2] <= 1 << 20


def test_work_of_two_devices_may_overlap() -> None:
    class Twin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.Sequential(*(nn.Conv2d(16, 16, 3, padding=1) for _ in range(3)))
            self.right = nn.Sequential(*(nn.Conv2d(16, 16, 3, padding=1) for _ in range(3)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.left(x) + self.right(x)

    x = (torch.randn(1, 16, 32, 32),)
    for target in ("pretend > cpu", "unified > cpu", "opaque > cpu"):
        name = target.split()[0]
        p = export(Twin(), x, target=target, place={"left": name, "right": "cpu", "": "cpu"})
        e = entry(p)
        first: dict[str, int] = {}
        for i, s in enumerate(e.steps):
            if s["kind"] == StepKind.run:
                first.setdefault(e.parts(s)[0].Delegate().decode(), i)
        done: dict[int, set[int]] = {}
        for i in range(
            len(e.steps)
        ):  # what each step waits for, itself or by way of others; a device is in order by itself
            mine = {int(w["on"]) for w in e.waits if w["step"] == i}
            done[i] = mine | {k for m in mine for k in done[m]}
        assert first[name] < first["cpu"], f"{target}: the device gets its branch before the CPU begins"
        assert first[name] not in done[first["cpu"]], f"{target}: the CPU's branch waits for the device"


def test_pieces_end_where_another_device_goes_on() -> None:
    """b needs the first result of a, then the second one."""
    tasks = [Task("a", 1.0), Task("a", 1.0), Task("b", 5.0), Task("b", 1.0)]
    assert pieces(tasks, [set(), set(), {0}, {1, 2}]) == [0, 1, 2, 3]
    dear = [
        Task("a", 1.0, handover=50.0),
        Task("a", 1.0, handover=50.0),
        Task("b", 5.0, handover=50.0),
        Task("b", 1.0, handover=50.0),
    ]
    assert pieces(dear, [set(), set(), {0}, {1, 2}]) == [0, 0, 1, 1]


def test_devices_are_given_their_work_before_the_host_begins_with_its_own() -> None:
    tasks = [Task("cpu", 1.0), Task("a", 2.0), Task("a", 3.0), Task("cpu", 1.0)]
    assert pieces(tasks, [set(), set(), {0}, {1}]) == [1, 0, 2, 3]


def test_pieces_can_run_one_after_another() -> None:
    for seed in range(200):
        rng = Random(seed)
        n = rng.randint(1, 40)
        before: list[set[int]] = [set(rng.sample(range(i), min(i, rng.randint(0, 3)))) for i in range(n)]
        tasks = [
            Task(rng.choice(["", "a", "b", "c"]), rng.random(), rng.random() < 0.2, rng.choice([0.0, 0.1, 3.0]))
            for _ in range(n)
        ]
        of = pieces(tasks, before)
        for i in range(n):
            assert all(of[k] <= of[i] for k in before[i])
            if tasks[i].alone and tasks[i].lane:
                assert not any(of[k] == of[i] for k in range(n) if k != i and tasks[k].lane)
        for i in range(n):
            assert not any(
                of[i] == of[k] and tasks[i].lane and tasks[k].lane and tasks[i].lane != tasks[k].lane for k in range(i)
            )


def test_inspect_says_where_every_node_went_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    p = export(Net(), target="pretend > cpu")
    text = str(p)
    assert "vram of pretend: weights" in text and "2 transfers" in text and "pretend 3, cpu" in text
    path = p.save(tmp_path / "net.trv")
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["inspect", str(path)]) == 0
    out = capsys.readouterr().out
    for want in (
        "vram of pretend",
        "pretend: first choice",
        "cpu: pretend: no reduce",
        "host to pretend",
        "pretend to host",
    ):
        assert want in out, want
    assert main(["inspect", str(path), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)["entries"][0]
    assert data["memories"] == [{"name": "ram", "delegate": ""}, {"name": "vram", "delegate": "pretend"}]
    assert [c["op"] for c in data["commands"]].count("transfer") == 2 and data["waits"]


def test_the_command_line_places(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    (tmp_path / "netfile.py").write_text(
        "import torch\ndef net():\n    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    common = ["export", "netfile:net", "--example", "1x3x16x16", "-o", "n.trv", "--json", "--target", "pretend > cpu"]
    assert main([*common, "--place", "0=pretend", "--no-fallback", "--device-io", "input"]) == 0
    capsys.readouterr()
    e = entry(trivet.Program.read("n.trv"))
    assert [int(r["memory"]) for r in e.regions if r["kind"] == RegionKind.io] == [1, 0]
    assert all(s["count"] < 2 for s in e.steps)
    assert main([*common, "--strict", "--place", "0=cpu"]) == 0
    assert main([*common, "--place", "0=gpu"]) != 0
    assert "without 'gpu'" in capsys.readouterr().out


def test_targets_of_other_packages(monkeypatch: Any) -> None:
    class Theirs(Cpu):
        name = "theirs"

    class Point:
        name, value = "theirs", "their.module:Theirs"

        def __init__(self, load: Any) -> None:
            self.load = load

    monkeypatch.setattr(
        base, "entry_points", lambda group: [Point(lambda: Theirs)] if group == "trivet.targets" else []
    )
    assert str(base.find("theirs > cpu")) == "theirs > cpu"

    def broken() -> None:
        raise ImportError("no such thing")

    monkeypatch.setattr(base, "entry_points", lambda group: [Point(broken)])
    with pytest.raises(
        trivet.Error, match="the delegate 'theirs' of their.module:Theirs cannot be loaded: no such thing"
    ):
        base.find("theirs > cpu")
    assert str(base.find("cpu")) == "cpu", "a broken package is in nobody else's way"
    monkeypatch.setattr(base, "entry_points", lambda group: [])
    with pytest.raises(trivet.Error, match="a target's name"):
        base.register_target(type("X", (Cpu,), {"name": "Bad Name"}))
    with pytest.raises(trivet.Error, match="is a delegate of trivet itself"):
        base.register_target(Cpu)
