"""The ahead-of-time half of the delegate "blas": linear layers for OpenBLAS. driver.c runs them."""

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from trivet.targets import Compiled, Piece, Target

PLUGIN = Path(__file__).resolve().parent / "build" / "libblas.so"
NONE = 0xFFFFFFFF


def device() -> str:
    """The device with the OpenBLAS that numpy brings; where numpy was built otherwise, the system's."""
    found = sorted((Path(np.__file__).parent.parent / "numpy.libs").glob("libscipy_openblas*"))
    return f"blas:{found[0]}" if found else "blas"


class Delegate(Target):
    """Products of float32 with a matrix, with or without a bias."""

    name = "blas"
    rates: Mapping[str, float] = {"f32": 60e9}

    def refuses(self, node) -> str:
        if node.op != "matmul":
            return f"blas has no {node.op}"
        a, b, *more = (*node.inputs, None, None)
        if a.dtype.name != "f32":
            return f"a product of {a.dtype.name}"
        if len(a.shape) < 2 or len(b.shape) != 2:
            return "only products with one matrix"
        if node.attrs.act.name != "none" or more[1] is not None:
            return "an activation or a sum in the product"
        if more[0] is not None and len(more[0].shape) != 1:
            return "only a bias for each column"
        return ""

    def compile(self, piece: Piece) -> Compiled:
        rows = []
        for node, time in piece.kernels:
            a, b, bias = (*node.inputs, None)[:3]
            ids = [piece.value(a), piece.value(b), NONE if bias is None else piece.value(bias)]
            rows.append(struct.pack("<5I", *ids, piece.value(node.outputs[0]), time))
        return Compiled("blas.1", b"".join(rows))
