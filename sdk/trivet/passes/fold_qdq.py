"""Quantise and dequantise nodes with the operators between them become operators on stored integers (schema/ops.fbs).

1. Quantising moves up and dequantising down over what only moves elements (qdq_move), so that they meet operators or each other.
2. Bias and activation behind a product go into it, then each operator between stored values becomes its integer form
   (qdq_product, qdq_pointwise, qdq_rows). Products keep stored weights where only these are quantised.
3. Maps that stay in float read and write stored integers themselves. Weights that nothing reads as integers are made real.

Never: integers for an operator that the model computes in float on values that it did not quantise; an integer form whose sums
could pass 32 bits. Why an operator stayed in float is in Node.reason and context.report.quant.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trivet.fbs.structs import DType
from trivet.ir.evaluate import evaluate_node
from trivet.ir.graph import Graph, Module, Node, Value
from trivet.ir.ops import OPS
from trivet.ir.rewrite import Rewriter, graphs_of
from trivet.ir.types import is_float
from trivet.passes.canonicalize import canonicalize
from trivet.passes.fold_constants import fold_constants
from trivet.passes.fuse_elementwise import fuse_elementwise
from trivet.passes.fuse_epilogues import fuse_products
from trivet.passes.qdq import Fold, is_dequantise, is_quantise
from trivet.passes.qdq_move import bring_together, fill
from trivet.passes.qdq_pointwise import elementwise, merge
from trivet.passes.qdq_product import product, table
from trivet.passes.qdq_rows import expand_rows, rows

if TYPE_CHECKING:
    from trivet.pipeline import Context

_RULES = {"conv": product, "matmul": product, "gather": table, "map": elementwise,
          **dict.fromkeys(("pool", "reduce", "softmax", "norm", "resize", "rnn"), rows)}  # fmt: skip
_INTEGER = frozenset(("requantize", "binary", "lookup", "qconv", "qmatmul", "qgather", "qpool", "qreduce", "qsoftmax", "qnorm",
                      "qresize", "qrnn"))  # fmt: skip


def fold_qdq(module: Module, context: Context) -> None:
    """The pass."""
    if not any(_quantised(n) for g, _ in graphs_of(module) for n in g.nodes):
        return
    for entry in module.entries.values():
        _into_branches(entry)
    weights: dict[object, object] = {}
    why: dict[Node, str] = {}
    for graph, sizes in graphs_of(module):
        f = Fold(graph, sizes, Rewriter(graph), weights, why)
        bring_together(f)
        for n in graph.nodes:
            if n.op in ("conv", "matmul") and any(f.stored(v) or f.weight(v) for v in n.inputs[:2]):
                fuse_products(f.rw, [n], sizes, residual=False)
        f.restart()
        for n in list(graph.nodes):
            if n.op in _RULES and not f.rw.gone(n) and any(not f.rw.dead(v) for v in n.outputs):
                _RULES[n.op](f, n)
        f.restart()
        bring_together(f)
        expand_rows(f)
        merge(f)
        _real_weights(f)
        f.restart()
        fill(f)
    if context.options.quantize_io:
        for graph in module.entries.values():
            _stored_ends(graph, context)
    fuse_elementwise(module, context)
    canonicalize(module, context)
    fold_constants(module, context)
    _report(module, context, why)


def _quantised(n: Node) -> bool:
    return n.op in ("requantize", "rowquant")


def _into_branches(graph: Graph) -> None:
    """Quantised weights that if and while hand to their graphs are read there."""
    for n in graph.nodes:
        skip = n.attrs.carried if n.op == "while" else 1
        for k, v in enumerate(n.inputs[skip:] if n.graphs else []):
            made = v.node if v is not None else None
            if made is None or not is_dequantise(made) or made.inputs[0] is None or made.inputs[0].const is None:
                continue
            for sub in n.graphs:
                inner = sub.inputs[k + skip if n.op == "while" else k]
                (real,) = sub.node("requantize", [made.inputs[0]], [inner.type], made.attrs, made.loc, before=0)
                sub.replace(inner, real)
        for sub in n.graphs:
            _into_branches(sub)


def _real_weights(f: Fold) -> None:
    """Quantised constants that are read as real numbers after all."""
    for n in f.graph.nodes:
        x = n.inputs[0] if is_dequantise(n) else None
        if x is None or x.const is None or f.rw.dead(n.outputs[0]):
            continue
        key = ("real", x.const, x.type.quant)
        if key not in f.weights:
            f.weights[key] = f.const(evaluate_node(n, [x.const.data.detach()], {})[0], f"{x.const.name}.real").const
        c = f.weights[key]
        for m in _through_views(f, n.outputs[0]):
            f.refuse(m, "its weights are not quantised in a form that it has integers for")
        f.rw.replace(n.outputs[0], Value(c.name, n.outputs[0].type, const=c))


def _through_views(f: Fold, v: Value) -> Iterator[Node]:
    for m in f.rw.users(v):
        if OPS[m.op].view:
            yield from _through_views(f, m.outputs[0])
        else:
            yield m


def _stored_ends(graph: Graph, context: Context) -> None:
    """Inputs and outputs of an entry that are only converted are stored integers."""
    rw = Rewriter(graph)
    for i, x in enumerate(graph.inputs):
        m = rw.sole(x)
        if m is not None and is_quantise(m):
            x.type = m.outputs[0].type
            rw.replace(m.outputs[0], x)
            context.report.note("fold_qdq", f"{graph.name}: input {i} is {x.type}")
    for i, y in enumerate(graph.outputs):
        n = y.node
        x0 = n.inputs[0] if n is not None and is_dequantise(n) else None
        if x0 is not None and x0.node is not None and graph.outputs.count(y) == 1:
            graph.outputs[i] = x0
            context.report.note("fold_qdq", f"{graph.name}: output {i} is {x0.type}")
    Rewriter(graph).finish()


# ---- report -----------------------------------------------------------------------------------------------------------------
def _report(module: Module, context: Context, why: dict[Node, str]) -> None:
    from trivet.pipeline import Folded

    rows: list[Folded] = []
    for graph, _ in graphs_of(module):
        for n in graph.nodes:
            form = form_of(n)
            if form:
                text = why.get(n, "") if form == "float" else ""
                if form == "float":
                    n.reason = text or "not quantised"
                rows.append(Folded(n.outputs[0].name, n.loc, n.op, form, n.reason if form == "float" else ""))
    context.report.quant += rows
    count = {form: sum(r.form == form for r in rows) for form in ("integer", "weights", "float")}
    context.report.note("fold_qdq", f"{count['integer']} nodes on integers, {count['weights']} in float on stored weights, "
                                    f"{count['float']} in float")  # fmt: skip
    for r in rows:
        if r.why and r.why != "not quantised":
            context.report.note("fold_qdq", f"{r.op} stays in float: {r.why}{f', at {r.loc}' if str(r.loc) else ''}")


def form_of(n: Node) -> str:
    """What a kernel computes on: "integer", "weights" (real activations times stored weights), "float"; "" for what only moves or
    converts.
    """
    if not n.outputs or not OPS[n.op].kernel:
        return ""
    x, y = n.inputs[0] if n.inputs else None, n.outputs[0]
    if n.op == "requantize":
        return "integer" if not is_quantise(n) and not is_dequantise(n) else ""
    if n.op in ("qconv", "qmatmul") and x is not None and x.dtype == DType.f32:
        return "integer" if getattr(n.attrs, "dynamic", 0) else "weights"
    if n.op == "qgather":
        return "weights"
    if n.op in _INTEGER:
        return "integer"
    if n.op == "map":
        return "float" if any(is_float(i.dtype) for i in n.attrs.code) else ""
    data = [v for v in (*n.inputs, y) if v is not None and v.const is None]
    if any(v.type.quant is not None for v in data):
        return "integer"
    return "float" if any(is_float(v.dtype) for v in data) else ""
