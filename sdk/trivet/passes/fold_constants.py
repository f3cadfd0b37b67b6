"""What depends on constants only is computed now, with the reference evaluator; equal constants become one.

A result much larger than its operands stays a node: it is cheaper to make than to store. So does the real form of a quantised
weight: fold_qdq reads the stored one. Views of a constant that others read
as well stay views, so that its bytes are in the file once.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from trivet.fbs.structs import DType
from trivet.ir.evaluate import evaluate_node
from trivet.ir.graph import Const, Graph, Module, Node, Value
from trivet.ir.ops import OPS
from trivet.ir.rewrite import Rewriter, attr_symbols, graphs_of
from trivet.ir.text import checksum, raw_bytes
from trivet.ir.types import SIZES

if TYPE_CHECKING:
    from trivet.pipeline import Context

SMALL = 1024  # bytes that a result may always have
_KEPT = frozenset({"if", "while", "item", "nonzero", "expand", "copy"})


def fold_constants(module: Module, context: Context) -> None:
    """The pass."""
    folder = _Folder(module, context.options.fold_limit)
    for graph, _ in graphs_of(module):
        folder.fold(graph)
    dedupe(module)


class _Folder:
    def __init__(self, module: Module, limit: int) -> None:
        self.limit = limit
        self.done: dict[object, list[Const]] = {}  # the same computation in several entries gives the same constants
        self.readers: dict[Const, set[object]] = {}
        self.names = {v.const.name for g, _ in graphs_of(module) for v in g.values() if v.const is not None}
        for graph, _ in graphs_of(module):
            for n in graph.nodes:
                for v in n.inputs:
                    if v is not None and v.const is not None:
                        self.readers.setdefault(v.const, set()).add(_key(n) if OPS[n.op].view else n)
            for v in [*graph.outputs, *(v for _, v in graph.writes)]:
                if v.const is not None:
                    self.readers.setdefault(v.const, set()).add(graph)

    def fold(self, graph: Graph) -> None:
        rw = Rewriter(graph)
        for n in graph.nodes:
            lazy = not n.inputs and all(u.op == "map" for v in n.outputs for u in rw.users(v))  # made in its consumers
            if self._can(n) and not lazy:
                for old, new in zip(n.outputs, self._values(n), strict=True):
                    rw.replace(old, new)
        rw.finish()

    def _can(self, n: Node) -> bool:
        if n.op in _KEPT or n.graphs or not n.outputs or _dequantizes(n):
            return False
        if not all(v is None or (v.const is not None and v.const.data is not None) for v in n.inputs):
            return False
        if not all(v.type.static for v in n.outputs) or attr_symbols(n) or getattr(n.attrs, "packed", False):
            return False
        consts = {v.const for v in n.inputs if v is not None and v.const is not None}
        if OPS[n.op].view and n.op != "concat":
            return all(len(self.readers.get(c, ())) <= 1 or _bytes(n) <= SMALL for c in consts)
        size = sum(_bytes_of(c.data) for c in consts)
        return _bytes(n) <= max(SMALL, min(2 * size, size + self.limit))

    def _values(self, n: Node) -> list[Value]:
        key = _key(n)
        if key not in self.done:
            data = evaluate_node(n, [None if v is None else _data(v) for v in n.inputs], {})
            self.done[key] = [Const(self._name(n, i), x) for i, x in enumerate(data)]
            for c in self.done[key]:
                self.readers[c] = set()
        consts = self.done[key]
        return [Value(c.name, v.type, const=c) for c, v in zip(consts, n.outputs, strict=True)]

    def _name(self, n: Node, i: int) -> str:
        """The name of the largest operand with the op behind it."""
        operands = sorted(
            (v for v in n.inputs if v is not None), key=lambda v: -prod(v.const.data.shape) if v.const else 0
        )
        base = (
            f"{operands[0].name if operands else n.op}.{n.op}"
            if not operands or i == 0
            else f"{operands[0].name}.{n.op}{i}"
        )
        name, k = base, 1
        while name in self.names:
            name, k = f"{base}_{k}", k + 1
        self.names.add(name)
        return name


def _data(v: Value) -> Any:
    assert v.const is not None
    return v.const.data.detach()


def _dequantizes(n: Node) -> bool:
    x = n.inputs[0] if n.op == "requantize" else None
    return x is not None and x.type.quant is not None and n.outputs[0].dtype == DType.f32


def _key(n: Node) -> object:
    return n.op, repr(n.attrs), tuple(v and v.const for v in n.inputs), tuple(v.type for v in n.outputs)


def _bytes(n: Node) -> int:
    return sum(prod(int(str(d)) for d in v.shape) * SIZES[v.dtype] for v in n.outputs)


def _bytes_of(data: Any) -> int:
    return int(data.numel() * data.element_size())


def dedupe(module: Module) -> None:
    """Constants of the same type and bytes become one."""
    import torch

    first: dict[object, list[Const]] = {}
    same: dict[Const, Const] = {}
    for graph, _ in graphs_of(module):
        for v in graph.values():
            c = v.const
            if c is None or c.data is None:
                continue
            if c not in same:
                where = (c.data.dtype, tuple(c.data.shape), v.type.quant)
                at = (c.data.data_ptr(), c.data.stride())
                group = first.setdefault((where, checksum(c.data)), [])
                found = next(
                    (o for o in group if (o.data.data_ptr(), o.data.stride()) == at or _equal(torch, o.data, c.data)),
                    None,
                )
                if found is None:
                    group.append(c)
                same[c] = found or c
            if same[c] is not c:
                v.const = same[c]
                v.name = v.const.name


def _equal(torch: Any, a: Any, b: Any) -> bool:
    """Bit for bit: 0.0 and -0.0 differ, NaN equals itself."""
    return bool(torch.equal(raw_bytes(a), raw_bytes(b)))
