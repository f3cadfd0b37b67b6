"""Matrix products of the same rows with several weights become one, whose result is cut into views: queries, keys and values,
the gate of a feed-forward layer with what it gates. The rows are read, quantised and packed once, and one command replaces several.

A product whose own activation would go into it stays by itself, except where one map reads several of the products: then the
activation is as good there. Weights that anything else reads are not stored twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trivet.fbs.structs import Act
from trivet.ir import ops
from trivet.ir.graph import Const, Graph, Module, Node, Value
from trivet.ir.infer import Sizes
from trivet.ir.interop import dtype_of
from trivet.ir.rewrite import Rewriter, graphs_of, join_locs
from trivet.ir.types import Type
from trivet.passes.fuse_epilogues import takes_more
from trivet.schedule import all_graphs

if TYPE_CHECKING:
    from trivet.pipeline import Context

COLUMNS = {"matmul": (1, 2), "qmatmul": (1, 2, 3, 4)}  # operands whose last axis is the result's
Group = tuple[Node, ...]


def merge_products(module: Module, context: Context) -> None:
    """The pass."""
    found = [(graph, group) for graph, sizes in graphs_of(module) for group in _groups(graph, sizes)]
    reads = Counter(v.const for entry in module.entries.values() for graph in all_graphs(entry)
                    for v in _operands(graph) if v is not None and v.const is not None)  # fmt: skip
    mine = Counter(c for _, group in found for c in _weights(group))
    alone = [(graph, tuple(n for n, c in zip(group, _weights(group), strict=True) if reads[c] == mine[c]))
             for graph, group in found]  # fmt: skip
    partners: dict[Const, set[tuple[Const, ...]]] = {}
    for _, group in alone:
        for c in _weights(group):
            partners.setdefault(c, set()).add(_weights(group))
    joined: dict[object, Const] = {}
    for graph, group in alone:
        if len(group) > 1 and all(len(partners[c]) == 1 for c in _weights(group)):
            _merge(graph, group, joined)


def _operands(graph: Graph) -> Iterator[Value | None]:
    for n in graph.nodes:
        yield from n.inputs
    yield from graph.outputs
    yield from (v for _, v in graph.writes)


def _weights(group: Group) -> tuple[Const, ...]:
    return tuple(n.inputs[1].const for n in group)  # type: ignore[union-attr,misc]


def _groups(graph: Graph, sizes: Sizes) -> list[Group]:
    """Products that can be one, in the order of the graph."""
    rw = Rewriter(graph)
    alike: dict[object, list[Node]] = {}
    for n in graph.nodes:
        key = _key(n, rw)
        if key is not None:
            alike.setdefault(key, []).append(n)
    out: list[Group] = []
    for nodes in alike.values():
        readers = Counter(rw.sole(n.outputs[0]) for n in nodes)
        group = tuple(n for n in nodes if readers[rw.sole(n.outputs[0])] > 1 or not takes_more(n, rw, sizes))
        if len(group) > 1 and len(set(_weights(group))) == len(group):
            out.append(group)
    return out


def _key(n: Node, rw: Rewriter) -> object:
    """What products that can be one have in common; None for a node that is none of them."""
    if n.op not in COLUMNS or n.attrs.packed or rw.kept(n.outputs[0]) or n.attrs.act != Act.none:
        return None
    a, w = n.inputs[:2]
    for i, v in enumerate(n.inputs[1:], 1):
        if v is None:
            continue
        if i not in COLUMNS[n.op] or v.const is None or v.const.data is None:
            return None
        if v.type.rank != 1 and (i == 2 and n.op == "matmul"):
            return None
    if w is None or a is None or w.type.rank != 2 or (a.type.quant is not None and n.outputs[0].type.quant is not None):
        return None
    if n.op == "qmatmul" and n.outputs[0].type.quant is not None:
        return None  # stored results have scales of their own
    present = tuple(v is not None for v in n.inputs[4:5])
    return (n.op, a, w.dtype, w.type.quant is None, n.outputs[0].type.dtype, repr(n.attrs), present)


def _merge(graph: Graph, group: Group, joined: dict[object, Const]) -> None:
    first = group[0]
    widths = [int(str(n.outputs[0].shape[-1])) for n in group]
    count = max(len(n.inputs) for n in group)
    inputs: list[Value | None] = [first.inputs[0]]
    for i in range(1, count):
        parts = [n.inputs[i] if i < len(n.inputs) else None for n in group]
        inputs.append(_joined([None if v is None else v.const for v in parts], widths, joined))
    y = first.outputs[0]
    loc = join_locs(*(n.loc for n in group))
    rw = Rewriter(graph)
    whole = rw.before(first, first.op, inputs, Type(y.dtype, (*y.shape[:-1], sum(widths))), replace(first.attrs), loc)
    start = 0
    for n, width in zip(group, widths, strict=True):
        rw.become(n, "slice", [whole], ops.Slice(y.type.rank - 1, start))
        start += width
    rw.finish()


def _joined(parts: list[Const | None], widths: list[int], joined: dict[object, Const]) -> Value | None:
    """Constants side by side along the last axis, made once; rows of zeros for those that are not there. A single number (a scale)
    is repeated.
    """
    import torch

    given = [c for c in parts if c is not None]
    if not given:
        return None
    key = tuple(c if c is not None else n for c, n in zip(parts, widths, strict=True))
    if key not in joined:
        data: list[Any] = []
        dtype = given[0].data.dtype if len({c.data.dtype for c in given}) == 1 else torch.float32
        for c, n in zip(parts, widths, strict=True):
            x = torch.zeros(n, dtype=dtype) if c is None else c.data.detach().to(dtype)
            data.append(x.expand(*x.shape[:-1], n) if x.shape[-1] == 1 else x)
        turned = data[0].dim() == 2 and data[0].stride(0) == 1  # as torch stores weights: columns are rows in memory
        whole = torch.cat([x.t() for x in data], 0).t() if turned else torch.cat(data, -1)
        joined[key] = Const(f"{given[0].name}.joined", whole)
    c = joined[key]
    return Value(c.name, Type(dtype_of(c.data), tuple(int(d) for d in c.data.shape)), const=c)
