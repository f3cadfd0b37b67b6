"""Brings constant weights into the layout that kernels read fastest, once for all nodes and entries that share them."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

from trivet import native
from trivet.fbs.structs import DType, Op
from trivet.ir import ops
from trivet.ir.graph import Const, Graph, Module, Node, Value
from trivet.ir.types import Type
from trivet.passes.select_kernels import give_scratch
from trivet.pipeline import Context
from trivet.schedule import all_graphs
from trivet.targets.base import find
from trivet.targets.cpu_part import attribute_row
from trivet.writer import attrs_struct, records

Key = tuple[Any, ...]
BIG = 1 << 22  # bytes: a weight this large is not stored twice


def pack_weights(module: Module, ctx: Context) -> None:
    """Packs constant weights of matmul, conv and rnn nodes of the CPU."""
    gc.collect()  # nodes that passes took out are cycles that hold weights: without them each weight goes as it is packed
    work = _Packer()
    graphs = [g for entry in module.entries.values() for g in all_graphs(entry)]
    for g in graphs:
        work.count(g)
    targets = find(ctx.target if ctx.target is not None else "cpu")
    for entry in module.entries.values():
        for g in all_graphs(entry):
            for node in g.nodes:
                if work.node(g, node) and node.tmp:
                    give_scratch(entry, node, targets)
    ctx.report.note("pack_weights", f"{work.nodes} nodes read {len(work.packed)} packed weights, {work.kept} large ones "
                                    "are read as they are because they have other readers")  # fmt: skip


def weight_key(data: Any) -> Key:
    """What tells two constants apart: where their bytes are, and how they are read."""
    return data.data_ptr(), tuple(data.shape), tuple(data.stride()), str(data.dtype)


class _Packer:
    def __init__(self) -> None:
        self.packed: dict[Key, Const] = {}
        self.plain: dict[int, int] = {}  # address of a weight's bytes: readers that need it as it is
        self.nodes = self.kept = 0

    def count(self, graph: Graph) -> None:
        for node in graph.nodes:
            weights = set(_weights(node))
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
        new = replace(node.attrs, packed=True)
        if node.op == "conv":
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
            if v.const is None or v.dtype != DType.f32 or not native.pack_bytes(op, struct, int(v.dtype), v.shape):  # type: ignore[arg-type]
                return False
            data = v.const.data
            if node.op == "matmul" and data.data_ptr() in self.plain and data.numel() * 4 >= BIG:
                self.kept += 1
                return False
            values.append((i, v))
        for i, v in values:
            node.inputs[i] = self._pack(graph, op, struct, v)
        node.attrs = new
        self.nodes += 1
        return True

    def _pack(self, graph: Graph, op: Op, struct: Any, v: Value) -> Value:
        import torch

        assert v.const is not None
        data = v.const.data.detach()
        form = struct.tobytes() if op == Op.conv else b""
        key = (op if op != Op.rnn else Op.rnn, form, *weight_key(data))
        if key not in self.packed:
            block = torch.from_numpy(native.pack(op, struct, data)).view(torch.float32)
            self.packed[key] = Const(f"{v.const.name}.packed{len(self.packed)}", block)
        const = self.packed[key]
        out = Value(const.name, Type(DType.f32, (int(const.data.numel()),)))
        out.const = const
        return out


def _weights(node: Node) -> list[int]:
    """Positions of the operands that this node could read packed."""
    if node.op == "matmul":
        b = node.inputs[1]
        return [1] if b is not None and b.const is not None and len(b.shape) == 2 else []
    if node.op == "conv":
        return [1]
    if isinstance(node.attrs, ops.Rnn):
        return [i for i in (1, 2, 7) if i < len(node.inputs) and node.inputs[i] is not None]
    return []
