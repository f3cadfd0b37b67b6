"""The delegate "cpu": takes every kernel of the IR, compiles to command lists of format "cpu.1"."""

from __future__ import annotations

from trivet.ir.dim import Dim
from trivet.ir.graph import Node
from trivet.ir.ops import OPS
from trivet.ir.types import SIZES
from trivet.targets.base import Target

VARIANTS = ("", "x86_64", "arm64", "cortex_m")


class Cpu(Target):
    """Portable kernels; the driver chooses the best ones that the machine has."""

    name = "cpu"

    def __init__(self, variant: str = "") -> None:
        from trivet.error import Error

        if variant not in VARIANTS:
            raise Error(f"target cpu.{variant}: unknown variant",
                        remedy=f"known: {', '.join(f'cpu.{v}' for v in VARIANTS if v)}, or plain cpu")  # fmt: skip
        super().__init__(variant)

    def refuses(self, node: Node) -> str:
        return "" if OPS[node.op].kernel else f"{node.op} is no kernel"

    def scratch(self, node: Node) -> list[int | Dim]:
        if node.op == "sort":
            x = node.inputs[0]
            assert x is not None
            n = x.shape[node.attrs.axis]
            return [] if n in (0, 1) else [n * (32 if SIZES[x.dtype] == 8 else 16)]
        return []

    def inplace(self, node: Node) -> list[tuple[int, int]]:
        if not node.outputs:
            return []
        out = node.outputs[0]

        def fits(i: int) -> bool:
            v = node.inputs[i] if i < len(node.inputs) else None
            return v is not None and v.shape == out.shape and SIZES[v.dtype] == SIZES[out.dtype]

        if node.op == "map":
            spots = list(range(len(node.inputs)))
        elif node.op in ("scatter", "softmax", "norm"):
            spots = [0]
        elif node.op in ("matmul", "conv"):
            spots = [3]  # the residual is read where the result is written
        else:
            spots = []
        return [(i, 0) for i in spots if fits(i)]
