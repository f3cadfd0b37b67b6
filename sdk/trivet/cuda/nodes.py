"""Every operator that the delegate takes: how it is compiled, the scratch memory that it needs, and what it does not take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trivet.cuda import pointwise, product, quantized, rows, sequence
from trivet.cuda.code import Code, Size
from trivet.fbs.structs import DType
from trivet.ir.graph import Node
from trivet.ir.infer_quant import plain
from trivet.ir.types import is_float


def _nothing(node: Node) -> list[Size]:
    return []


def _anything(node: Node) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Entry:
    """compile writes the kernels of a node; scratch: bytes per piece; refuses: why not, "" if taken."""

    compile: Callable[[Code, Node], None]
    scratch: Callable[[Node], list[Size]] = _nothing
    refuses: Callable[[Node], str] = _anything


def _same_floats(node: Node) -> str:
    dtypes = {v.dtype for v in node.inputs if v is not None and v.dtype != DType.bool}
    return "" if len(dtypes) == 1 else f"{node.op}: operands of {', '.join(sorted(d.name for d in dtypes))}"


def _attention(node: Node) -> str:
    width = node.outputs[0].shape[-1]
    if not isinstance(width, int) or width > sequence.WIDEST:
        return f"attention: values of {width} numbers, at most {sequence.WIDEST}"
    return ""


def _product(node: Node) -> str:
    if node.attrs.packed:
        return f"{node.op}: weights packed for another delegate"
    x = node.inputs[0]
    assert x is not None
    if node.op == "matmul" and (x.shape[-1] == 0 or any(v is None or len(v.shape) < 2 for v in node.inputs[:2])):
        return "matmul over nothing or of a vector"
    if not is_float(x.dtype) and node.attrs.act:
        return f"{node.op}: an activation of integers"
    return ""


def _packed(node: Node) -> str:
    return f"{node.op}: weights packed for another delegate" if getattr(node.attrs, "packed", False) else ""


def _quantized(node: Node) -> str:
    return "requantize: not one scale for all" if plain(node.attrs) else ""


def _qmatmul(node: Node) -> str:
    if any(v is None or len(v.shape) < 2 for v in node.inputs[:2]):
        return "qmatmul of a vector"
    return _packed(node)


OPS: Mapping[str, Entry] = {
    "map": Entry(pointwise.map, refuses=pointwise.takes_map),
    "copy": Entry(pointwise.copy),
    "pad": Entry(pointwise.pad),
    "gather": Entry(pointwise.gather),
    "pool": Entry(pointwise.pool),
    "resize": Entry(pointwise.resize),
    "grid_sample": Entry(pointwise.grid_sample),
    "reduce": Entry(rows.reduce),
    "scan": Entry(rows.scan),
    "softmax": Entry(rows.softmax),
    "norm": Entry(rows.norm),
    "matmul": Entry(product.matmul, product.matmul_scratch, _product),
    "conv": Entry(product.conv, product.conv_scratch, _product),
    "attention": Entry(sequence.attention, refuses=_attention),
    "rnn": Entry(sequence.rnn, sequence.rnn_scratch, lambda n: _packed(n) or sequence.takes_rnn(n)),
    "sort": Entry(sequence.sort, sequence.sort_scratch),
    "scatter": Entry(sequence.scatter, sequence.scatter_scratch),
    "requantize": Entry(quantized.requantize, refuses=_quantized),
    "binary": Entry(quantized.binary),
    "lookup": Entry(quantized.lookup),
    "qconv": Entry(quantized.qconv, quantized.qconv_scratch, _packed),
    "qmatmul": Entry(quantized.qmatmul, quantized.qmatmul_scratch, _qmatmul),
    "qgather": Entry(quantized.qgather, refuses=_packed),
    "qpool": Entry(quantized.qpool),
    "qreduce": Entry(quantized.qreduce),
    "qsoftmax": Entry(quantized.qsoftmax),
    "qnorm": Entry(quantized.qnorm),
    "qresize": Entry(quantized.qresize),
}


def refuses(node: Node) -> str:
    """Why a node is not taken."""
    entry = OPS.get(node.op)
    return f"no kernel for {node.op}" if entry is None else entry.refuses(node)


def compile_node(code: Code, node: Node, time: int) -> None:
    """Adds a node's kernels and launches."""
    code.time = time
    if all(d != 0 for v in node.outputs for d in v.shape) or node.op == "scan":
        OPS[node.op].compile(code, node)


__all__ = ["OPS", "Entry", "compile_node", "refuses"]
