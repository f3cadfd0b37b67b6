"""What tests/device/cuda.sh runs on a machine with a GPU: kernels, driver, models, sample, times."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS / "hal" / "cuda"), str(TESTS / "hal"), str(TESTS / "e2e"), str(TESTS / "ops")]

import trivet
from trivet.cuda import nvrtc

ARCH = "".join(map(str, torch.cuda.get_device_capability())) if torch.cuda.is_available() else ""
BATCH = 60  # commands per compilation
MODELS = ("resnet18", "unet", "lstm", "minilm", "efficientnet_lite0")


class Gpu:
    """A module on the real GPU, in the place of shimtools.Module."""

    def __init__(self, source: str) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        torch.zeros(1, device="cuda")  # the primary context
        self.image = nvrtc.compile(source, int(ARCH), nvrtc.CUBIN).data
        self.module = ctypes.c_void_p()
        self._check(self.cuda.cuModuleLoadData(ctypes.byref(self.module), self.image))

    def _check(self, status: int) -> None:
        if status:
            raise RuntimeError(f"CUDA error {status}")

    def run(self, launch: Any, address: Callable[[object], int], dims: dict[str, int]) -> None:
        from trivet.ir.dim import evaluate

        grid = [evaluate(g, dims) for g in launch.grid]
        if 0 in grid:
            return
        words = [evaluate(w, dims) if kind == "dim" else address(w) for kind, w in launch.words]
        raw = (ctypes.c_longlong * max(len(words), 1))(*words)
        f = ctypes.c_void_p()
        self._check(self.cuda.cuModuleGetFunction(ctypes.byref(f), self.module, launch.kernel.encode()))
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(raw))
        self._check(self.cuda.cuLaunchKernel(f, *grid, launch.threads, 1, 1, 0, None, parameters, None))


def kernels() -> None:
    """Every recorded command of tests/ops, on the GPU, against the reference kernels."""
    import replay

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cases.bin"
        tests = sorted(
            str(p) for p in (TESTS / "ops").glob("test_*.py") if p.name.split("_")[1] in ("basic", "heavy", "quant")
        )
        subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests], env=os.environ | {"TRIVET_RECORD_CASES": str(file)},
                       check=False, timeout=100)  # fmt: skip
        commands = replay.commands(file)
    jobs = [j for c in commands if not isinstance(j := replay.prepare(c), str)]
    bad = done = 0
    for first in range(0, len(jobs), BATCH * 8):  # a sample where there are too many
        some = jobs[first : first + BATCH]
        module = Gpu(replay.compile_jobs(some, literals=False))
        for j in some:
            got = on_gpu(replay, j, module)
            done += 1
            for g, w in zip(got, replay.wanted(j), strict=True):
                if not replay.alike(g, w):
                    bad += 1
                    print(
                        "differs:",
                        j.node.op,
                        j.node.attrs,
                        [(v.dtype.name, v.shape) for v in j.node.inputs if v is not None],
                    )
    print(f"{done} commands of {len(jobs)}, {bad} differ")
    assert done and not bad


def on_gpu(replay: Any, job: Any, module: Gpu) -> list[torch.Tensor]:
    """As replay.run, in the GPU's memory."""
    memory = {
        v: torch.frombuffer(bytearray(t.data + bytes(64)), dtype=torch.uint8).cuda() for v, t in job.values.items()
    }
    flag = torch.zeros(16, dtype=torch.int32, device="cuda")
    base: dict[Any, int] = {v: m.data_ptr() + job.values[v].offset for v, m in memory.items()}
    base[None] = flag.data_ptr()
    torch.cuda.synchronize()
    for launch in job.launches:
        module.run(launch, base.__getitem__, job.dims)
    torch.cuda.synchronize()
    return [
        replay.window(bytes(memory[o].cpu().numpy())[: len(job.values[o].data)], job.values[o])
        for o in job.node.outputs
    ]


def exported(name: str, cuda: str = "") -> tuple[Any, Any, Any]:
    """A model of the tests, its arguments and result, lowered for this GPU."""
    import whole_models as split

    (model, args, shapes), want = split.made(name)
    program = trivet.export(model, args, dynamic_shapes=shapes, target=f"cuda.sm{ARCH}{cuda} > cpu", place={"": "cuda"})
    return (model, args), want, program


def models() -> None:
    """Whole models on the GPU, twice, with other sizes where they may change, and split with the CPU."""
    import whole_models as split

    for name in MODELS:
        (model, args), want, program = exported(name)
        with trivet.load(bytes(program), devices=["cuda", "cpu"]) as net:
            assert {p.device for p in net.placement()} == {"cuda"}, net.placement()
            for _ in range(3):
                split.close(net(*args), want)
        print(name, "ok")
    (model, args, _), want = split.made("unet")
    program = trivet.export(model, args, target=f"cuda.sm{ARCH} > cpu", place={"": "cuda", "mid": "cpu"})
    with trivet.load(bytes(program), devices=["cuda", "cpu"]) as net:
        split.close(net(*args), want)
    print("unet split ok")


def driver() -> None:
    """The driver alone: opens, says what it is; memory; a program's alternatives."""
    _, want, program = exported("lstm")
    with trivet.load(bytes(program), devices=["cuda", "cpu"]) as net:
        print(net.placement())
    with trivet.load(bytes(program), devices=["cuda:plain", "cpu"]) as net:
        assert {p.device for p in net.placement()} == {"cuda"}


def programs() -> None:
    """Files for the conformance suite, into the folder $out."""
    for name in ("unet", "lstm"):
        _, _, program = exported(name)
        program.save(str(Path(os.environ["out"]) / f"conformance-{name}.trv"))


def sample() -> None:
    """A few small models, for compute-sanitizer."""
    for name in ("unet", "lstm"):
        (_, args), _, program = exported(name)
        with trivet.load(bytes(program), devices=["cuda", "cpu"]) as net:
            net(*args)


def median(fn: Callable[[], Any], seconds: float = 3.0) -> float:
    """Milliseconds of a call, after five that are not counted."""
    for _ in range(5):
        fn()
    torch.cuda.synchronize()
    times, begin = [], time.perf_counter()
    while time.perf_counter() - begin < seconds and len(times) < 300:
        t = time.perf_counter()
        fn()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - t)
    return sorted(times)[len(times) // 2] * 1e3


def times() -> None:
    """Milliseconds per call, batch 1: this, torch eager, torch.compile, ONNX Runtime's CUDA provider where it is installed."""
    print(
        f"{'model':20} {'trivet':>9} {'eager':>9} {'compile':>9} {'ort':>9}   ms, inputs and outputs on the host (trivet, ort) or the GPU (torch)"
    )
    for name in MODELS:
        (model, args), _, program = exported(name)
        row: list[float | None] = []
        with trivet.load(bytes(program), devices=["cuda", "cpu"]) as net:
            row.append(median(lambda net=net, args=args: net(*args)))
        gpu, on = model.cuda(), tuple(a.cuda() for a in args)
        with torch.no_grad():
            row.append(median(lambda gpu=gpu, on=on: gpu(*on)))
            try:
                fast = torch.compile(gpu, mode="reduce-overhead")
                row.append(median(lambda fast=fast, on=on: fast(*on)))
            except Exception as e:
                print(f"{name}: torch.compile: {str(e)[:100]}")
                row.append(None)
        row.append(_ort(model.cpu(), args))
        print(f"{name:20}", *(f"{v:9.3f}" if v is not None else f"{'-':>9}" for v in row), flush=True)


def _ort(model: torch.nn.Module, args: tuple[Any, ...]) -> float | None:
    try:
        import onnxruntime as ort

        if "CUDAExecutionProvider" not in ort.get_available_providers():
            return None
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "net.onnx")
            torch.onnx.export(model, args, file, dynamo=True)
            session = ort.InferenceSession(file, providers=["CUDAExecutionProvider", "CPUExecutionProvider"])
            feed = {i.name: a.numpy() for i, a in zip(session.get_inputs(), args, strict=True)}
            return median(lambda: session.run(None, feed))
    except Exception as e:
        print(f"ONNX Runtime: {str(e)[:100]}")
        return None


if __name__ == "__main__":
    if not ARCH:
        sys.exit("torch finds no GPU")
    {f.__name__: f for f in (kernels, driver, programs, models, sample, times)}[sys.argv[1]]()
