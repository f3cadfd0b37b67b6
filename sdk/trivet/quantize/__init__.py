"""Quantisation: recipes, the stage that carries them out on torch graphs, training, reports.

    trivet.export(model, args, quantize="w8a8", calibrate=batches)
    prepared = trivet.quantize.prepare_qat(model, args)      # train it, then trivet.export(prepared, args)

Names are imported on first use; torch and torchao come with the first that needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trivet.quantize.convert import Quantized
    from trivet.quantize.qat import prepare_qat
    from trivet.quantize.recipe import Recipe, Spec
    from trivet.quantize.report import Report
    from trivet.quantize.stage import quantize

__all__ = ["Quantized", "Recipe", "Report", "Spec", "prepare_qat", "quantize"]

_HOMES = {"Quantized": "convert", "Recipe": "recipe", "Report": "report", "Spec": "recipe", "prepare_qat": "qat",
          "quantize": "stage"}  # fmt: skip


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'trivet.quantize' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"trivet.quantize.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
