"""The delegate "npu_sim": a pretend accelerator with memory of its own (hal/npu_sim). Parts are those of the CPU, format "npu_sim.1"."""

from __future__ import annotations

from collections.abc import Mapping

from trivet.ir.dim import Dim
from trivet.ir.graph import Node
from trivet.targets.base import Compiled, Integer, Piece, Target
from trivet.targets.cpu import Cpu

_HOST_ONLY = ("nonzero", "item")  # they write dimensions, which the host must know


class NpuSim(Target):
    """Takes what the CPU takes, apart from what writes sizes. The variant "unified" works in host memory, which the device imports."""

    name = "npu_sim"
    memory = "npu"
    rates: Mapping[str, float] = {"f32": 200e9}
    bandwidth = 50e9
    link = 8e9
    overhead = 2e-6
    handover = 10e-6

    def __init__(self, variant: str = "") -> None:
        from trivet.error import Error

        if variant not in ("", "unified"):
            raise Error(f"target npu_sim.{variant}: unknown variant", remedy="known: npu_sim, npu_sim.unified")
        super().__init__(variant)
        self._cpu = Cpu()
        if variant:
            self.memory = ""

    def refuses(self, node: Node) -> str:
        return f"{node.op} writes sizes" if node.op in _HOST_ONLY else self._cpu.refuses(node)

    def scratch(self, node: Node) -> list[int | Dim]:
        return self._cpu.scratch(node)

    def inplace(self, node: Node) -> list[tuple[int, int]]:
        return self._cpu.inplace(node)

    def integer(self) -> Mapping[str, Integer]:
        return self._cpu.integer()

    def compile(self, piece: Piece) -> Compiled:
        return Compiled("npu_sim.1", self._cpu.compile(piece).data)
