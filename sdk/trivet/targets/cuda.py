"""The delegate "cuda": NVIDIA GPUs by kernels of our own (trivet.cuda), compiled when the model is lowered."""

from __future__ import annotations

from collections.abc import Mapping

from trivet.cuda import nodes
from trivet.cuda.nvrtc import LEAST, NEW, OLD
from trivet.cuda.part import cuda_part
from trivet.error import Error
from trivet.ir.dim import Dim
from trivet.ir.graph import Node
from trivet.ir.types import SIZES
from trivet.targets.base import Compiled, Integer, Piece, Target

USUAL = (87,)  # Jetson Orin
_CONV = Integer(("i8", "i16"), ("i8",), weight_only=True, real=True)
INTEGER = {  # as the CPU's, but for recurrent layers
    "conv": _CONV,
    "conv_transpose": _CONV,
    "linear": Integer(("i8", "i16"), ("i8", "i4"), groups=True, dynamic=True, weight_only=True, real=True),
    "matmul": Integer(("i8",), real=True),
    "embedding": Integer(("i8", "i16"), ("i8", "i4"), groups=True, weight_only=True, real=True),
    "map": Integer(("i8",), real=True),
    **{
        kind: Integer(("i8", "i16"))
        for kind in ("clamp", "binary", "average", "mean", "sum", "resize", "concat", "move", "max")
    },
    "softmax": Integer(("i8",)),
    "norm": Integer(("i8",)),
}


class Cuda(Target):
    """Variants are joined by "+": architectures ("sm87", "sm72+sm87"; none: sm87), "unified" where the GPU works in the host's memory
    (Jetson), "tf32" where products of float32 may round their operands to 10 bits. Newer GPUs than those named run from PTX.
    """

    name = "cuda"
    memory = "vram"
    rates: Mapping[str, float] = {"f32": 1e12, "f16": 10e12, "bf16": 10e12, "i8": 15e12}
    bandwidth = 100e9
    link = 10e9
    overhead = 3e-6
    handover = 20e-6

    def __init__(self, variant: str = "") -> None:
        super().__init__(variant)
        archs: list[int] = []
        self.tf32 = False
        for word in variant.split("+") if variant else ():
            if word == "unified":
                self.memory = ""
            elif word == "tf32":
                self.tf32 = True
            elif word.startswith("sm") and word[2:].isdigit() and int(word[2:]) in {a for a in OLD | NEW if a >= LEAST}:
                archs.append(int(word[2:]))
            else:
                raise Error(f"target cuda.{variant}: unknown variant {word!r}",
                            remedy=f"known: {', '.join(f'sm{a}' for a in sorted(OLD | NEW))}, unified, tf32")  # fmt: skip
        self.archs = tuple(sorted(set(archs))) or USUAL

    def refuses(self, node: Node) -> str:
        return nodes.refuses(node)

    def compile(self, piece: Piece) -> Compiled:
        return Compiled("cuda.1", cuda_part(piece, self.archs, self.tf32))

    def scratch(self, node: Node) -> list[int | Dim]:
        return [s for s in nodes.OPS[node.op].scratch(node) if s != 0]

    def integer(self) -> Mapping[str, Integer]:
        return INTEGER

    def inplace(self, node: Node) -> list[tuple[int, int]]:
        out = node.outputs[0] if node.outputs else None

        def fits(i: int) -> bool:
            v = node.inputs[i] if i < len(node.inputs) else None
            return v is not None and out is not None and v.shape == out.shape and SIZES[v.dtype] == SIZES[out.dtype]

        spots = {
            "map": range(len(node.inputs)),
            "scatter": (0,),
            "softmax": (0,),
            "norm": (0,),
            "matmul": (3,),
            "conv": (3,),
        }
        return [(i, 0) for i in spots.get(node.op, ()) if fits(i)]
