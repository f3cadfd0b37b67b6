"""The delegate "cpu": takes every kernel of the IR, compiles to command lists of format "cpu.1"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from trivet.fbs.structs import DType, ScatterReduce
from trivet.ir.dim import Dim
from trivet.ir.graph import Node
from trivet.ir.ops import OPS
from trivet.ir.types import SIZES
from trivet.passes.pack_rows import ROWS, conv_scratch, matmul_scratch
from trivet.targets.base import Compiled, Integer, Piece, Target
from trivet.views import count

_BOTH = Integer(("i8", "i16"))
_CONV = Integer(("i8", "i16"), ("i8",), weight_only=True, real=True)
INTEGER = {
    "conv": _CONV,
    "conv_transpose": _CONV,
    "linear": Integer(("i8", "i16"), ("i8", "i4"), groups=True, dynamic=True, weight_only=True, real=True),
    "matmul": Integer(("i8",), real=True),
    "embedding": Integer(("i8", "i16"), ("i8", "i4"), groups=True, weight_only=True, real=True),
    "rnn": Integer(("i8",), ("i8",)),
    "map": Integer(("i8",), real=True),
    "clamp": _BOTH,
    "binary": _BOTH,
    "average": _BOTH,
    "mean": _BOTH,
    "sum": _BOTH,
    "softmax": Integer(("i8",)),
    "norm": Integer(("i8",)),
    "resize": _BOTH,
    "concat": _BOTH,
    "move": _BOTH,
    "max": _BOTH,
}

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

    def integer(self) -> Mapping[str, Integer]:
        return INTEGER

    def scratch(self, node: Node) -> list[int | Dim]:
        if node.op == "sort":
            size = _sort_scratch(node)
        elif node.op == "rnn":
            size = _rnn_scratch(node)
        elif node.op == "qrnn":
            size = _qrnn_scratch(node)
        elif node.op == "conv" and node.attrs.winograd:
            size = _conv_scratch(node)
        elif node.op == "qconv" and node.attrs.packed == ROWS:
            x = node.inputs[0]
            assert x is not None
            size = conv_scratch(node.attrs, int(str(x.shape[1])))
        elif node.op == "qmatmul" and node.attrs.packed == ROWS:
            x = node.inputs[0]
            assert x is not None
            stored = node.outputs[0].dtype != DType.f32
            size = matmul_scratch(count(x.shape[:-1]), int(str(x.shape[-1]))) if stored else 0
        elif node.op == "scatter" and node.attrs.reduce == ScatterReduce.mean:
            size = node.outputs[0].type.count * 4
        else:
            return []
        return [size] if size != 0 else []

    def compile(self, piece: Piece) -> Compiled:
        from trivet.targets.cpu_part import PartBuilder

        part = PartBuilder(piece.value, piece.dim, piece.data)
        for node, time in piece.kernels:
            part.add(node, time)
        return Compiled("cpu.1", part.build())

    def inplace(self, node: Node) -> list[tuple[int, int]]:
        if not node.outputs:
            return []
        out = node.outputs[0]

        def fits(i: int) -> bool:
            v = node.inputs[i] if i < len(node.inputs) else None
            return v is not None and v.shape == out.shape and SIZES[v.dtype] == SIZES[out.dtype]

        if node.op in ("map", "binary"):
            spots = list(range(len(node.inputs)))
        elif node.op in ("scatter", "softmax", "norm", "requantize", "lookup", "qsoftmax", "qnorm"):
            spots = [0]
        elif node.op in ("matmul", "conv"):
            spots = [3]  # the residual is read where the result is written
        else:
            spots = []
        return [(i, 0) for i in spots if fits(i)]


def _sort_scratch(node: Node) -> int | Dim:
    """As trvk_sort_tmp_bytes in hal/cpu/sort.c, for one lane."""
    x = node.inputs[0]
    assert x is not None
    n = x.shape[node.attrs.axis] if x.shape else 1
    return 0 if n in (0, 1) else n * (32 if SIZES[x.dtype] == 8 else 16)


def _conv_scratch(node: Node) -> int:
    """trvk_conv_tmp_bytes in hal/cpu/conv_winograd.c."""
    from trivet import native
    from trivet.targets.cpu_part import attribute_row
    from trivet.writer import records

    x, y, m = node.inputs[0], node.outputs[0], node.attrs.winograd
    assert x is not None
    n, _, h, w = y.shape
    known = isinstance(n, int) and isinstance(h, int) and isinstance(w, int)
    tiles = n * -(-h // m) * -(-w // m) if known else 1 << 30
    struct = records("ConvAttrs", [attribute_row(replace(node.attrs, packed=True))])
    return native.conv_tmp_bytes(struct, int(str(x.shape[1])), int(str(tiles)))


def _rnn_scratch(node: Node) -> int | Dim:
    """trvk_rnn_tmp_bytes in hal/cpu/rnn.c; it grows by the same amount for each sequence of the batch."""
    from trivet import native
    from trivet.targets.cpu_part import attribute_row
    from trivet.writer import records

    x, w_hh = node.inputs[0], node.inputs[2]
    y, c = node.outputs[0], node.outputs[2] if len(node.outputs) > 2 else None
    assert x is not None and w_hh is not None
    wide = int(str(y.shape[2]))  # hidden size, or that of the projection
    proj = len(node.inputs) > 7 and node.inputs[7] is not None
    hidden = int(str(c.shape[1])) if c is not None else wide
    struct = records("RnnAttrs", [attribute_row(node.attrs)])

    def at(batch: int) -> int:
        return native.rnn_tmp_bytes(struct, int(x.dtype), batch, int(str(x.shape[2])), hidden, wide if proj else 0)

    return at(0) + (at(1) - at(0)) * x.shape[1]


def _qrnn_scratch(node: Node) -> int | Dim:
    """trvk_qrnn_tmp_bytes in hal/cpu/qrnn.c; it grows by the same amount for each sequence of the batch."""
    from trivet import native
    from trivet.targets.cpu_part import attribute_row
    from trivet.writer import records

    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    struct = records("QrnnAttrs", [attribute_row(node.attrs)])

    def at(batch: int) -> int:
        return native.qrnn_tmp_bytes(struct, batch, int(str(x.shape[2])), int(str(y.shape[2])))

    return at(0) + (at(1) - at(0)) * x.shape[1]
