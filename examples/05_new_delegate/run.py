"""Builds the delegate, puts it through the conformance test, and runs a model with its linear layers on OpenBLAS."""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import trivet
from trivet.targets import register_target

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import blas  # noqa: E402

register_target(blas.Delegate)
build = HERE / "build"
subprocess.run(["cmake", "-S", HERE, "-B", build, f"-DPYTHON={sys.executable}"], check=True, stdout=subprocess.DEVNULL)
subprocess.run(["cmake", "--build", build, "-j", "2"], check=True, stdout=subprocess.DEVNULL)


class Mlp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(64, 256), torch.nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.softmax(self.a(x), -1)) + torch.sin(x[..., :10])


torch.manual_seed(0)
model, x = Mlp().eval(), torch.randn(5, 7, 64)
path = Path(tempfile.mkdtemp()) / "mlp.trv"
trivet.export(model, (x,), target="blas > cpu", place={"a": "blas", "b": "blas"}).save(path)

net = trivet.load(path, devices=[blas.device(), "cpu"], plugins=[blas.PLUGIN])
for step in net.placement():
    print(f"step {step.step}: {step.op} of {step.module or 'the model'} on {step.device}")
torch.testing.assert_close(net(x), model(x).detach())

# The file runs where there is no OpenBLAS, too, and says so.
elsewhere = trivet.load(path, devices=["blas:nowhere.so", "cpu"], plugins=[blas.PLUGIN])
torch.testing.assert_close(elsewhere(x), model(x).detach())
print("without OpenBLAS:", next(s.why for s in elsewhere.placement() if s.why))

options = blas.device().partition(":")[2]
done = subprocess.run(
    [build / "conformance", *(["--options", options] if options else []), path], capture_output=True, text=True
)
print(done.stdout, end="")
sys.exit(done.returncode)
