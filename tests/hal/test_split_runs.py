"""Programs over two devices at run time: results, copies as planned and no others, overlap, fallbacks, state, several runs at a time."""

from __future__ import annotations

import json
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hal_nets import Chain, Fork, Memory, Unet, split
from torch import nn

import trivet
from trivet import native
from trivet.error import Error
from trivet.fbs.structs import StepKind
from trivet.profile import Recorder, profile

DEVICES: dict[str, Any] = {"devices": ["npu_sim", "cpu"], "plugins": ["npu_sim"]}
CUTS = [{"": "npu_sim"}, {"a": "npu_sim", "b": "cpu", "c": "cpu"}, {"a": "cpu", "b": "npu_sim", "c": "cpu"},
        {"a": "npu_sim", "b": "cpu", "c": "npu_sim"}]  # fmt: skip


def recorded(net: trivet.runtime.Net, args: list[Any]) -> list[Any]:
    """Records of one run."""
    with Recorder(net._default(), args) as r:
        r.run()
        return list(r.run()[1])


@pytest.mark.parametrize("place", CUTS)
def test_results_and_planned_copies(place: dict[str, str], tmp_path: Path) -> None:
    net, x = Chain().eval(), torch.randn(4, 16)
    path = split(net, (x,), tmp_path / "net.trv", place)
    loaded = trivet.load(path, **DEVICES)
    for _ in range(4):
        torch.testing.assert_close(loaded(x), net(x).detach())
        x = torch.randn(4, 16)
    planned = [p.time for p in loaded.placement() if p.kind == "copy"]
    done = recorded(loaded, [x])
    device = [d.name for d in loaded._context.host.devices].index("npu_sim")
    times = [int(r["time"]) for r in done if int(r["time"]) in planned]
    assert sorted(times) == sorted(planned) and planned  # from the trace: each planned copy once, by the device
    assert {int(r["track"]) for r in done if int(r["time"]) in planned} == {device}
    runs = {p.time for p in loaded.placement() if p.kind == "run" and p.device == "npu_sim"}
    assert {int(r["time"]) for r in done if int(r["track"]) == device} == runs | set(planned)
    assert all(int(r["end"]) >= int(r["begin"]) > 0 for r in done)


def test_no_copies_where_memory_is_one(tmp_path: Path) -> None:
    """On unified memory nothing is copied: no step, no call of the driver's copy, no other record."""
    net, x = Chain().eval(), torch.randn(4, 16)
    path = split(
        net, (x,), tmp_path / "net.trv", {"a": "npu_sim", "b": "cpu", "c": "npu_sim"}, target="npu_sim.unified > cpu"
    )
    loaded = trivet.load(path, devices=["npu_sim:import", "cpu"], plugins=["npu_sim"])
    assert [(p.kind, p.device) for p in loaded.placement()] == [("run", "npu_sim"), ("run", "cpu"), ("run", "npu_sim")]
    torch.testing.assert_close(loaded(x), net(x).detach())
    assert {int(r["time"]) for r in recorded(loaded, [x])} <= {
        c.time for c in trivet.reader.view_file(path).entries[0].commands
    } | {p.time for p in loaded.placement()}
    with pytest.warns(
        RuntimeWarning, match="on cpu instead of npu_sim"
    ):  # a device that cannot import refuses such parts
        other = trivet.load(path, **DEVICES)
    torch.testing.assert_close(other(x), net(x).detach())


def test_file_for_a_device_runs_without_it(tmp_path: Path) -> None:
    net, x = Unet().eval(), torch.randn(1, 3, 8, 8)
    path = split(net, (x,), tmp_path / "net.trv", {"": "npu_sim"})
    for devices, plugins, why in (
        (None, [], "there is no device for this delegate"),
        (["cpu"], [], "there is no device for this delegate"),
        (["npu_sim:refuse=all", "cpu"], ["npu_sim"], "told to refuse"),
    ):
        with pytest.warns(RuntimeWarning, match=why):
            loaded = trivet.load(path, devices=devices, plugins=plugins)
        torch.testing.assert_close(loaded(x), net(x).detach())
        assert all(
            why in p.why and p.device == "cpu" and p.wanted == "npu_sim" for p in loaded.placement() if p.kind == "run"
        )
        assert all(p.device == "" for p in loaded.placement() if p.kind == "copy")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trivet.load(path, **DEVICES)


def test_a_refused_part_takes_the_memory_along(tmp_path: Path) -> None:
    """One part that is refused: the memory is the host's then, and every step runs elsewhere."""
    from trivet.fbs.structs import Op

    net, x = Unet().eval(), torch.randn(1, 3, 8, 8)
    path = split(
        net,
        (x,),
        tmp_path / "net.trv",
        {"down": "npu_sim", "pool": "npu_sim", "mid": "cpu", "up": "cpu", "out": "npu_sim"},
    )
    with pytest.warns(RuntimeWarning):
        loaded = trivet.load(path, devices=[f"npu_sim:refuse={int(Op.pool)}", "cpu"], plugins=["npu_sim"])
    assert {p.device for p in loaded.placement()} == {"cpu", ""}
    torch.testing.assert_close(loaded(x), net(x).detach())


def test_without_alternatives_the_error_names_the_device(tmp_path: Path) -> None:
    path = split(Chain(), (torch.randn(4, 16),), tmp_path / "net.trv", {"": "npu_sim"}, fallback=False)
    with pytest.raises(Error, match="no device for this delegate"):
        trivet.load(path)
    with pytest.raises(Error, match="'nix': there is no such driver"):
        trivet.load(path, devices=["nix"])
    with pytest.raises(Error, match="options"):
        trivet.load(path, devices=["npu_sim:what"], plugins=["npu_sim"])
    with pytest.raises(Error, match="cannot be loaded"):
        trivet.load(path, plugins=["./nowhere.so"])
    with pytest.raises(Error, match="no trv_plugin"):
        trivet.load(path, plugins=[native.library().path])
    trivet.load(path, **DEVICES)


def test_state_in_the_devices_memory(tmp_path: Path) -> None:
    path = split(Memory(), (torch.ones(2, 3),), tmp_path / "net.trv", {"": "npu_sim"})
    first, x = torch.arange(6.0).reshape(2, 3), torch.ones(2, 3)
    net = trivet.load(path, **DEVICES)
    assert any(p.device == "npu_sim" and p.kind == "run" for p in net.placement())
    torch.testing.assert_close(net(x), 2 * (first + 1))
    snap = net.snapshot()
    torch.testing.assert_close(net(x), 2 * (first + 2))
    other = net.fork()
    net.restore(snap)
    torch.testing.assert_close(net(x), 2 * (first + 2))
    torch.testing.assert_close(other(x), 2 * (first + 3))
    net.reset()
    torch.testing.assert_close(net(x), 2 * (first + 1))
    torch.testing.assert_close(net.session()(x), 2 * (first + 1))
    with pytest.warns(RuntimeWarning):  # a snapshot is bytes, wherever they were
        cpu = trivet.load(path, devices="cpu")
    cpu.restore(snap)
    torch.testing.assert_close(cpu(x), 2 * (first + 2))


def test_dynamic_sizes(tmp_path: Path) -> None:
    """Arenas of both memories grow with the sizes."""
    net, n = Chain().eval(), torch.export.Dim("n", min=1, max=4096)
    path = split(net, (torch.randn(4, 16),), tmp_path / "net.trv", {"a": "cpu", "b": "npu_sim", "c": "cpu"},
                 dynamic_shapes=({0: n},))  # fmt: skip
    loaded = trivet.load(path, **DEVICES)
    for size in (1, 7, 300, 2, 4000, 300):
        x = torch.randn(size, 16)
        torch.testing.assert_close(loaded(x), net(x).detach())


def test_overlap_shows_in_the_trace(tmp_path: Path) -> None:
    """Branches without a common value: the CPU works while the device does. In order, it does not."""
    net, x = Fork(256).eval(), torch.randn(64, 256)
    path = split(net, (x,), tmp_path / "net.trv", {"left": "npu_sim", "right": "cpu"})
    loaded = trivet.load(path, devices=["npu_sim:delay=20000", "cpu"], plugins=["npu_sim"], threads=1)
    torch.testing.assert_close(loaded(x), tuple(t.detach() for t in net(x)))
    tracks = [d.name for d in loaded._context.host.devices]

    def overlaps(records: list[Any]) -> bool:
        npu = [(int(r["begin"]), int(r["end"])) for r in records if tracks[r["track"]] == "npu_sim"]
        cpu = [(int(r["begin"]), int(r["end"])) for r in records if tracks[r["track"]] == "cpu"]
        return any(a < d and c < b for a, b in npu for c, d in cpu)

    assert overlaps(recorded(loaded, [x]))
    result = profile(path, [x], devices=["npu_sim:delay=20000", "cpu"], plugins=["npu_sim"], runs=3)
    assert {r.device for r in result.rows} == {"npu_sim", "cpu"}
    result.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    assert len(set(names.values())) == 2 and "npu_sim" in names  # a track for each


def test_several_runs_under_way(tmp_path: Path) -> None:
    """Three sessions of one program, submitted one after another: none waits for another's device work."""
    net = Chain().eval()
    path = split(net, (torch.randn(4, 16),), tmp_path / "net.trv", {"a": "cpu", "b": "npu_sim", "c": "cpu"})
    first = trivet.load(path, devices=["npu_sim:delay=3000", "cpu"], plugins=["npu_sim"])
    sessions = [first, first.session(), first.session()]
    for _ in range(3):
        xs = [torch.randn(4, 16) for _ in sessions]
        runs = [s.forward.submit(x) for s, x in zip(sessions, xs, strict=True)]
        assert not all(r.done() for r in runs)
        for r, x in reversed(list(zip(runs, xs, strict=True))):
            torch.testing.assert_close(r.result(), net(x).detach())
            torch.testing.assert_close(r.result(), net(x).detach())
    x, y = torch.randn(4, 16), torch.randn(4, 16)
    pending = first.forward.submit(x)
    torch.testing.assert_close(first(y), net(y).detach())  # ends the other one first
    assert pending.done()
    torch.testing.assert_close(pending.result(), net(x).detach())
    first.forward.submit(x)
    first.close()


def test_failure_while_it_runs(tmp_path: Path) -> None:
    net, x = Chain().eval(), torch.randn(4, 16)
    path = split(net, (x,), tmp_path / "net.trv", {"b": "npu_sim", "a": "cpu", "c": "cpu"})
    clean = trivet.load(path, **DEVICES)
    before = 2  # copies of constants come first
    loaded = trivet.load(path, devices=[f"npu_sim:fail={before + 1}", "cpu"], plugins=["npu_sim"])
    failed = 0
    for _ in range(4):
        try:
            torch.testing.assert_close(loaded(x), net(x).detach())
        except Error as e:
            assert "told to fail" in str(e)
            failed += 1
    assert failed == 1
    with pytest.raises(Error, match="told to fail"):
        trivet.load(path, devices=["npu_sim:fail=1", "cpu"], plugins=["npu_sim"])
    slow = f"npu_sim:fail={before + 1}+delay=50000"
    pending = trivet.load(path, devices=[slow, "cpu"], plugins=["npu_sim"]).forward.submit(x)
    for _ in range(2):
        with pytest.raises(Error, match="told to fail"):
            pending.result()
    torch.testing.assert_close(clean(x), net(x).detach())


def test_threads(tmp_path: Path) -> None:
    net = Chain().eval()
    path = split(net, (torch.randn(4, 16),), tmp_path / "net.trv", {"a": "npu_sim", "b": "cpu", "c": "npu_sim"})
    first = trivet.load(path, **DEVICES)
    wrong: list[Exception] = []

    def call(s: trivet.runtime.Net) -> None:
        try:
            for _ in range(20):
                x = torch.randn(4, 16)
                torch.testing.assert_close(s(x), net(x).detach())
        except Exception as e:
            wrong.append(e)

    threads = [threading.Thread(target=call, args=(first.session(),)) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_inputs_and_outputs_on_the_device(tmp_path: Path) -> None:
    """Slots in the device's memory: host arrays are taken and given all the same, by way of their planned place."""
    net, x = Chain().eval(), torch.randn(4, 16)
    path = split(net, (x,), tmp_path / "net.trv", {"": "npu_sim"}, device_io=True)
    loaded = trivet.load(path, **DEVICES)
    assert all(p.kind != "copy" for p in loaded.placement())
    for _ in range(4):
        x = torch.randn(4, 16)
        torch.testing.assert_close(loaded(x), net(x).detach())
    y = np.zeros((4, 8), np.float32)
    loaded(x.numpy(), out=y)
    np.testing.assert_allclose(y, net(x).detach().numpy(), rtol=1e-4, atol=1e-5)


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)[0])


@pytest.mark.parametrize(
    "place", [{"": "npu_sim"}, {"body": "npu_sim", "head": "cpu"}, {"body": "cpu", "head": "npu_sim"}]
)
def test_lstm(place: dict[str, str], tmp_path: Path) -> None:
    net, x = Lstm().eval(), torch.randn(2, 5, 8)
    loaded = trivet.load(split(net, (x,), tmp_path / "net.trv", place), **DEVICES)
    assert sum(p.kind == "run" and p.device == "npu_sim" for p in loaded.placement()) > 0
    torch.testing.assert_close(loaded(x), net(x).detach())


def test_step_kinds_are_those_of_the_file() -> None:
    assert [k.name for k in StepKind] == ["run", "copy", "branch", "jump"]
