"""The CUDA driver's host code on the fake libcuda: conformance, failures of every call, refusals, errors of kernels, graphs per size."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import shimtools
import torch

import trivet
from trivet import native

ROOT = Path(__file__).resolve().parents[3]
TARGET = "cuda.sm87 > cpu"


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 16, 3, padding=1)
        self.out = torch.nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.out(torch.relu(self.conv(x)).mean((2, 3))), -1)


class Rows(torch.nn.Module):
    def forward(self, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return x[i] * 2


X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def lowered(net: Net, target: str = TARGET, **options: object) -> bytes:
    return bytes(trivet.export(net, (X,), target=target, place={"": "cuda"}, **options))  # type: ignore[arg-type]


def batches() -> tuple[dict[int, object]]:
    return ({0: torch.export.Dim("b", min=1, max=8)},)


def test_conformance(net: Net, fake: ctypes.CDLL, tmp_path: Path) -> None:
    files = [tmp_path / "whole.trv", tmp_path / "split.trv"]
    files[0].write_bytes(lowered(net))
    files[1].write_bytes(bytes(trivet.export(net, (X,), target=TARGET, place={"": "cuda", "out": "cpu"})))
    program = tmp_path / "conformance"
    sources = [ROOT / "tests/hal/conformance.c", ROOT / "tests/hal/faulty.c"]
    library = Path(native.library().path).parent
    done = subprocess.run([shutil.which("cc") or "gcc", "-std=gnu11", "-O1", "-DDRIVER=trv_cuda_driver", *(f"-I{ROOT / f}" for f in (
        "hal/include", "runtime_c/include", "schema/gen", "tests/hal")), *map(str, sources), "-o", str(program), f"-L{library}", "-ltrivet",
        f"-Wl,-rpath,{library}", "-lm", "-ldl", "-lpthread"], capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr[:3000]
    folder = shimtools.fake_folder()
    for machine, options in (("arch=87", ["--memory"]), ("arch=87 integrated", [])):
        env = os.environ | {"LD_LIBRARY_PATH": str(folder), "TRIVET_FAKE_CUDA": machine}
        done = subprocess.run([program, *options, *map(str, files)], env=env, capture_output=True, text=True)
        assert done.stdout.endswith("ok\n"), (machine, done.stdout[-2000:], done.stderr[-500:])


def test_every_failing_call(net: Net, fake: ctypes.CDLL) -> None:
    """A call of libcuda that fails, each in turn, over opening, three runs and closing: an error or the CPU, never a wrong result, no leak."""
    data = lowered(net)
    want = net(X).detach()
    live = fake.trv_fake_live()

    def life() -> None:
        with trivet.load(data, devices=["cuda", "cpu"]) as loaded:
            for _ in range(3):
                torch.testing.assert_close(loaded(X), want, rtol=1e-4, atol=1e-5)

    fake.trv_fake_fail_at(-1)
    life()
    calls = fake.trv_fake_count(b"calls")
    errors = 0
    with pytest.warns(RuntimeWarning):  # on the CPU
        for k in range(1, calls + 1):
            fake.trv_fake_fail_at(k)
            try:
                life()
            except trivet.Error:
                errors += 1
            fake.trv_fake_fail_at(-1)
            assert fake.trv_fake_live() == live, f"call {k} of {calls} leaks"
    assert errors > 10


def test_refusals(net: Net, fake: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines that the part is not for: older, without a GPU, of other memory. The CPU's alternative runs, and says why."""
    data, unified = lowered(net), lowered(net, "cuda.sm87+unified > cpu")
    for machine, file, why in (
        ("arch=72", data, "no machine code"),
        ("none", data, "no GPU"),
        ("arch=87", unified, "memory"),
    ):
        monkeypatch.setenv("TRIVET_FAKE_CUDA", machine)
        with (
            pytest.warns(RuntimeWarning, match="on cpu instead of cuda"),
            trivet.load(file, devices=["cuda", "cpu"]) as loaded,
        ):
            run = [p for p in loaded.placement() if p.kind == "run"]
            assert {p.device for p in run} == {"cpu"} and why in run[0].why, run
            torch.testing.assert_close(loaded(X), net(X).detach(), rtol=1e-4, atol=1e-5)


def test_sizes_that_take_turns_cost_nothing(net: Net, fake: ctypes.CDLL) -> None:
    data = lowered(net, dynamic_shapes=batches())
    xs = [torch.randn(n, 3, 8, 8) for n in (1, 2, 5)]
    with trivet.load(data, devices=["cuda", "cpu"]) as loaded:
        for x in xs * 2:  # memory grows with the first round
            torch.testing.assert_close(loaded(x), net(x).detach(), rtol=1e-4, atol=1e-5)
        out = [torch.empty(len(x), 10) for x in xs]
        params = fake.trv_fake_count(b"params")
        for x, y in zip(xs * 3, out * 3, strict=True):
            torch.testing.assert_close(loaded(x, out=y), net(x).detach(), rtol=1e-4, atol=1e-5)
        assert fake.trv_fake_count(b"params") == params


def test_index_out_of_range_is_an_error(fake: ctypes.CDLL) -> None:
    x, i = torch.randn(5, 3), torch.tensor([0, 4, -5])
    data = bytes(trivet.export(Rows(), (x, i), target=TARGET, place={"": "cuda"}))
    with trivet.load(data, devices=["cuda", "cpu"]) as loaded:
        torch.testing.assert_close(loaded(x, i), x[i] * 2)
        with pytest.raises(trivet.Error):
            loaded(x, torch.tensor([0, 5, 1]))
        torch.testing.assert_close(loaded(x, i), x[i] * 2)


def test_kernels_one_by_one(net: Net, fake: ctypes.CDLL) -> None:
    with trivet.load(lowered(net), devices=["cuda:plain", "cpu"]) as loaded:
        graphs = fake.trv_fake_count(b"graphs")
        torch.testing.assert_close(loaded(X), net(X).detach(), rtol=1e-4, atol=1e-5)
        assert fake.trv_fake_count(b"graphs") == graphs
    with pytest.raises(trivet.Error):
        trivet.load(lowered(net), devices=["cuda:nonsense", "cpu"])


@pytest.mark.parametrize("variant", ["sm99", "sm60", "fast", "sm87+sm"])
def test_unknown_variants(variant: str) -> None:
    with pytest.raises(trivet.Error, match="unknown variant"):
        trivet.export(Rows(), (torch.ones(2), torch.zeros(1, dtype=torch.int64)), target=f"cuda.{variant}")
