"""What an adapter is, and those for trivet and torch itself.

prepare(work, precision, folder) writes the peer's files and returns their paths, the model first.
load(paths, threads)             returns run(list of arrays) -> list of arrays.

load must import nothing that the peer's own runtime does not need: it runs in a fresh process whose memory and load time are
measured.
"""

import os


class Adapter:
    name = ""
    precisions = ("fp32",)
    note = ""  # of the last prepare

    def takes(self, workload):
        return True

    def prepare(self, work, precision, folder):
        raise NotImplementedError

    def runtime_import(self):
        """Imports the runtime: timed apart from loading the model."""

    def load(self, paths, threads):
        raise NotImplementedError


def out(folder, work, precision, suffix):
    os.makedirs(folder, exist_ok=True)
    return os.path.join(folder, f"{work.name}.{precision}.{suffix}")


class Trivet(Adapter):
    """trivet.export -> .trv -> trivet.load, as its README says; nothing that the public API does not offer."""

    name = "trivet"
    recipes = {"fp32": None, "fp16": "f16", "bf16": "bf16", "int8": "w8a8", "int8dyn": "w8a8-dynamic", "w8": "w8a8-dynamic",
               "w4": "w4g32a8"}  # fmt: skip
    precisions = tuple(recipes)

    def prepare(self, work, precision, folder):
        import trivet

        recipe = self.recipes[precision]
        program = trivet.export(
            work.model, work.inputs, quantize=recipe, calibrate=work.calib if recipe == "w8a8" else None
        )
        return [str(program.save(out(folder, work, precision, "trv")))]

    def runtime_import(self):
        import trivet
        from trivet import native

        native.library()
        assert trivet.load

    def load(self, paths, threads):
        import trivet

        net = trivet.load(paths[0], threads=threads)

        def run(arrays):
            y = net(*arrays)
            return list(y) if isinstance(y, (tuple, list)) else [y]

        return run


class Eager(Adapter):
    """torch eager; the file is a torch.export archive, only so that a fresh process can load the model."""

    name = "torch-eager"

    def prepare(self, work, precision, folder):
        import torch

        path = out(folder, work, precision, "pt2")
        torch.export.save(torch.export.export(work.model, work.inputs), path)
        return [path]

    def runtime_import(self):
        import torch  # noqa: F401

    def load(self, paths, threads):
        import torch

        torch.set_num_threads(threads)
        module = torch.export.load(paths[0]).module()

        def run(arrays):
            with torch.inference_mode():
                y = module(*[torch.from_numpy(a) for a in arrays])
                return [t.numpy() for t in (y if isinstance(y, (tuple, list)) else (y,))]

        return run


def adapters():
    """All of them by name."""
    from adapter_executorch import ExecuTorch, ExecuTorchWritten
    from adapter_onnx import MNN, ONNXRuntime
    from adapter_others import NCNN, LiteRT, OpenVINO

    return {c.name: c for c in (Trivet, Eager, ExecuTorch, ExecuTorchWritten, ONNXRuntime, OpenVINO, LiteRT, NCNN, MNN)}
