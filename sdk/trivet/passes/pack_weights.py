"""Brings constant weights into the layout that kernels read fastest, once for all nodes and entries that share them."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trivet import native
from trivet.fbs.structs import DType, Op
from trivet.ir import ops
from trivet.ir.graph import Const, Graph, Module, Node, Value
from trivet.ir.interop import dtype_of
from trivet.ir.types import Type
from trivet.passes.pack_rows import ROWS, conv_rows, depthwise, matmul_rows, takes_rows, whole_bias, whole_scale
from trivet.passes.select_kernels import give_scratch
from trivet.pipeline import Context
from trivet.schedule import all_graphs
from trivet.targets.base import find
from trivet.targets.cpu_part import attribute_row
from trivet.writer import attrs_struct, records

Key = tuple[Any, ...]
BIG = 1 << 22  # bytes: a weight this large is not stored twice
_DTYPES: dict[str, tuple[DType, ...]] = dict.fromkeys(("qconv", "qmatmul", "qgather", "qrnn"), (DType.i8, DType.u8))
_STORED = frozenset(_DTYPES)
_DTYPES["matmul"] = _DTYPES["conv"] = (DType.f32, DType.f16, DType.bf16)
COLLECTED = 1 << 24  # bytes of weights that are worth a collection of garbage (a fraction of a second beside torch)


def pack_weights(module: Module, ctx: Context) -> None:
    """Packs constant weights of matmul, conv, rnn nodes and their quantised forms on the CPU. On Cortex-M stored weights of 8 bits
    lie by rows (pack_rows.py) or, where the product is not all i8, stay as they are with the channels that are summed innermost.
    """
    targets = find(ctx.target if ctx.target is not None else "cpu")
    work = _Packer(plain=next((t.variant for t in targets.all if t.name == "cpu"), "") == "cortex_m")
    graphs = [g for entry in module.entries.values() for g in all_graphs(entry)]
    for g in graphs:
        work.count(g)
    if (
        work.bytes >= COLLECTED
    ):  # nodes that passes took out are cycles that hold weights: without them each goes as it is packed
        gc.collect()
    for entry in module.entries.values():
        for g in all_graphs(entry):
            for node in g.nodes:
                if work.node(g, node) and (node.tmp or node.attrs.packed == ROWS):
                    give_scratch(entry, node, targets)
    ctx.report.note("pack_weights", f"{work.nodes} nodes read {len(work.packed)} packed weights, {work.kept} large ones "
                                    "are read as they are because they have other readers")  # fmt: skip


def weight_key(data: Any) -> Key:
    """What tells two constants apart: where their bytes are, and how they are read."""
    return data.data_ptr(), tuple(data.shape), tuple(data.stride()), str(data.dtype)


class _Packer:
    def __init__(self, plain: bool) -> None:
        self.stay = plain  # 8-bit weights are not packed
        self.packed: dict[Key, Const] = {}
        self.blocks: dict[bytes, Const] = {}  # of stored weights, by content
        self.plain: dict[int, int] = {}  # address of a weight's bytes: readers that need it as it is
        self.nodes = self.kept = self.bytes = 0

    def count(self, graph: Graph) -> None:
        for node in graph.nodes:
            weights = set(_weights(node))
            self.bytes += sum(
                v.const.data.nbytes for i in weights if (v := node.inputs[i]) is not None and v.const is not None
            )
            for i, v in enumerate(node.inputs):
                if v is not None and v.const is not None and i not in weights:
                    at = v.const.data.data_ptr()
                    self.plain[at] = self.plain.get(at, 0) + 1
        for v in [*graph.outputs, *(v for _, v in graph.writes)]:
            if v.const is not None:
                self.plain[v.const.data.data_ptr()] = 1

    def node(self, graph: Graph, node: Node) -> bool:
        """Packs a node's weights; False: it stays as it is."""
        spots = _weights(node)
        if not spots or node.delegate not in ("", "cpu") or node.attrs.packed:
            return False
        if self.stay and node.op in _STORED and getattr(node.attrs, "bits", 8) == 8:
            if node.op in ("qconv", "qmatmul") and takes_rows(node):
                return self._rows(node)
            return self._dense(node)
        new = replace(node.attrs, packed=True)
        if node.op in ("conv", "qconv"):
            w = node.inputs[1]
            assert w is not None
            new = replace(new, kernel=tuple(w.shape[2:]))
        op = Op[node.op]
        struct = records(attrs_struct(op), [attribute_row(new)])
        values = []
        for i in spots:
            v = node.inputs[i]
            if v is None:
                continue
            takes = v.const is not None and v.dtype in _DTYPES.get(node.op, (DType.f32,))
            if not takes or not native.pack_bytes(op, struct, int(v.dtype), v.shape):  # type: ignore[arg-type]
                return False
            assert v.const is not None
            data = v.const.data
            big = data.numel() * data.element_size() >= BIG
            if node.op in ("matmul", "qmatmul") and data.data_ptr() in self.plain and big:
                self.kept += 1
                return False
            values.append((i, v))
        for i, v in values:
            node.inputs[i] = self._pack(graph, op, node, struct, v)
        node.attrs = new
        self.nodes += 1
        return True

    def _pack(self, graph: Graph, op: Op, node: Node, struct: Any, v: Value) -> Value:
        assert v.const is not None
        data = v.const.data.detach()
        key = _key(op, node.attrs, struct, data)
        if key not in self.packed:
            self.packed[key] = self._made(op, struct, v.const)
        const = self.packed[key]
        out = Value(const.name, Type(dtype_of(const.data), (int(const.data.numel()),)))
        out.const = const
        return out

    def _made(self, op: Op, struct: Any, weight: Const) -> Const:
        import torch

        data = weight.data.detach()
        block = torch.from_numpy(native.pack(op, struct, data)).view(data.dtype)
        name = f"{weight.name}.packed{len(self.packed)}"
        if op.name not in _STORED:
            return Const(name, block)
        digest = hashlib.sha256(block.numpy().data).digest()
        return self.blocks.setdefault(digest, Const(name, block))

    def _rows(self, node: Node) -> bool:
        """Weight, bias and scale of a qconv or qmatmul as microcontrollers read them."""
        w, scale, bias = node.inputs[1], node.inputs[2], node.inputs[3] if len(node.inputs) > 3 else None
        assert w is not None and w.const is not None and scale is not None and scale.const is not None
        data, numbers, a = w.const.data, scale.const.data, node.attrs
        old = bias.const.data if bias is not None and bias.const is not None else None
        if node.op == "qconv":
            node.attrs = replace(a, packed=ROWS, kernel=tuple(w.shape[2:]))
            rows, zero, axis, form = conv_rows(a, data), a.x_zero, 0, str(depthwise(a, w))
        else:
            node.attrs = replace(a, packed=ROWS)
            rows, zero, axis, form = matmul_rows(data), a.a_zero, 1, ""
        n, key = int(str(w.shape[axis])), ("rows", node.op, form, *weight_key(data))
        name = bias.const.name if bias is not None and bias.const is not None else f"{w.const.name}.bias"
        made: list[tuple[Key, str, Callable[[], Any]]] = [
            (key, w.const.name, lambda: rows),
            (("rows scale", n, *weight_key(numbers)), scale.const.name, lambda: whole_scale(numbers, n)),
            (("rows bias", zero, *key, *(() if old is None else weight_key(old))), name,
             lambda: whole_bias(data, axis, zero, old)),
        ]  # fmt: skip
        node.inputs += [None] * (4 - len(node.inputs))
        for i, (own, title, make) in enumerate(made, 1):
            if own not in self.packed:
                self.packed[own] = Const(f"{title}.rows", make())
            const = self.packed[own]
            v = Value(const.name, Type(dtype_of(const.data), tuple(const.data.shape)))
            v.const = const
            node.inputs[i] = v
        self.nodes += 1
        return True

    def _dense(self, node: Node) -> bool:
        """Weights as they are, the axis that is summed innermost in memory: channels of a convolution, K of a matrix product."""
        for i in _weights(node):
            v = node.inputs[i]
            if v is None or v.const is None:
                continue
            data = v.const.data
            rank = data.dim()
            if node.op == "qconv":
                o, c = (1, 0) if node.attrs.transposed else (0, 1)
                order = [o, *range(2, rank), c]
            else:
                order = [1, 0] if node.op == "qmatmul" else [0, 1]
            back = [order.index(a) for a in range(rank)]
            key = ("dense", tuple(order), *weight_key(data))
            if key not in self.packed:
                self.packed[key] = Const(v.const.name, data.permute(order).contiguous().permute(back))
            out = Value(v.name, v.type)
            out.const = self.packed[key]
            node.inputs[i] = out
        return False


def _key(op: Op, attrs: Any, struct: Any, data: Any) -> Key:
    """What the packed form depends on."""
    if op in (Op.qmatmul, Op.qgather):  # a table's rows are a product's columns
        rows = data if op == Op.qgather else data.t()
        return "rows", attrs.bits, attrs.zero if op == Op.qgather else attrs.b_zero, *weight_key(rows)
    if op == Op.qconv:
        return op, attrs.nd, attrs.groups, attrs.transposed, *weight_key(data)
    return op, struct.tobytes() if op == Op.conv else b"", *weight_key(data)


def _weights(node: Node) -> list[int]:
    """Positions of the operands that this node could read packed."""
    if node.op in ("matmul", "qmatmul"):
        b = node.inputs[1]
        return [1] if b is not None and b.const is not None and len(b.shape) == 2 else []
    if node.op in ("conv", "qconv"):
        return [1]
    if node.op == "qgather":  # a packed table has as many rows as scales
        table, scale = node.inputs[0], node.inputs[2]
        return [0] if table is not None and scale is not None and scale.shape[-1] == table.shape[0] else []
    if isinstance(node.attrs, ops.Qrnn):
        return [1, 2]
    if isinstance(node.attrs, ops.Rnn):
        return [i for i in (1, 2, 7) if i < len(node.inputs) and node.inputs[i] is not None]
    return []
