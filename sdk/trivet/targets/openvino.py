"""The delegate "openvino": Intel's OpenVINO, on its CPU, GPU, NPU or AUTO device, which is an option of loading."""

from __future__ import annotations

from collections.abc import Mapping

from trivet.error import Error
from trivet.ir.graph import Node
from trivet.openvino import lower
from trivet.targets.base import Compiled, Piece, Target


class Openvino(Target):
    """Parts are networks in OpenVINO's IR that read their weights out of the program file. Floats only."""

    name = "openvino"
    opaque = True
    rates: Mapping[str, float] = {"f32": 60e9}
    bandwidth = 10e9
    overhead = 1e-6
    handover = 20e-6

    def __init__(self, variant: str = "") -> None:
        if variant:
            raise Error(
                f"target openvino.{variant}: unknown variant",
                remedy="the device is chosen when the file is loaded: devices=['openvino:GPU']",
            )
        super().__init__(variant)

    def refuses(self, node: Node) -> str:
        return lower.refuses(node)

    def compile(self, piece: Piece) -> Compiled:
        from trivet.openvino.part import openvino_part

        return Compiled("openvino.1", openvino_part(piece))
