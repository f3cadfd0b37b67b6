"""trivet: exports PyTorch models to one file that a small C runtime runs in place.

    import trivet
    prog = trivet.export(model, (x,))      # capture, optimise, plan
    prog.save("net.trv"); print(prog)
    net = trivet.load("net.trv")
    y = net(x)                             # numpy, torch or DLPack in and out

Names are imported on first use, so that `import trivet` costs nothing and does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trivet.error import Error

if TYPE_CHECKING:
    from trivet.api import capture, check, export, load, lower
    from trivet.program import Program
    from trivet.quantize.recipe import Recipe
    from trivet.runtime import Net, Snapshot
    from trivet.targets.base import register_target

__version__ = "0.1.0"

__all__ = [
    "Error",
    "Net",
    "Program",
    "Recipe",
    "Snapshot",
    "__version__",
    "capture",
    "check",
    "export",
    "load",
    "lower",
    "register_target",
]

_HOMES = {"capture": "api", "check": "api", "export": "api", "load": "api", "lower": "api",
          "Program": "program", "Recipe": "quantize.recipe", "Net": "runtime", "Snapshot": "runtime",
          "register_target": "targets.base"}  # fmt: skip


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name in ("gguf", "quantize"):
        return import_module(f"trivet.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'trivet' has no attribute {name!r}")
    value = getattr(import_module(f"trivet.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
