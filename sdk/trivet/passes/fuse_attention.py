"""Attention written out, softmax(q @ k^T * scale + mask) @ v, becomes one attention node.

A row of a mask with -inf that nothing takes part in gives NaN when written out, as nan_rows says. Scale factors of queries and keys
go into the scale, repeated key and value heads (grouped queries) are not repeated, and keys and values that are put behind those
of a cache are read where they lie.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trivet.error import Error
from trivet.fbs.structs import Act, DType, MapOp
from trivet.ir import ops
from trivet.ir.dim import INF, evaluate
from trivet.ir.evaluate import evaluate_node
from trivet.ir.graph import Const, Module, Node, Value
from trivet.ir.infer import Sizes
from trivet.ir.match import Ranges, Term, either, extract, scaled, term
from trivet.ir.rewrite import Rewriter, graphs_of
from trivet.ir.types import Type, is_float

if TYPE_CHECKING:
    from trivet.pipeline import Context

FAR = -1e4  # a score below this has no weight beside any ordinary one
GONE = -1e30  # and one below this takes up any other when it is added
LARGEST = 8192  # largest side of a mask that is computed to see whether it is causal
VIEWS = ("permute", "reshape", "slice", "expand")
_LEAST = -3.5e38  # below every finite f32


def fuse_attention(module: Module, context: Context) -> None:
    """The pass."""
    for graph, sizes in graphs_of(module):
        rw = Rewriter(graph)
        for n in list(graph.nodes):
            if n.op == "matmul":
                _fuse(n, rw, sizes)
        rw.finish()
        rw = Rewriter(graph)
        for n in list(graph.nodes):
            if n.op == "attention":
                _take_factors(n, rw)
                _group(n, rw)
        rw.finish()
        rw = Rewriter(graph)  # what only repeated heads read it no longer counts
        for n in list(graph.nodes):
            if n.op == "attention":
                _continue(n, rw)
        rw.finish()


def _plain(n: Node, bias: bool = False) -> bool:
    """A matmul without anything behind it, but a bias where that may be."""
    a: ops.Matmul = n.attrs
    return not a.packed and a.act == Act.none and all(v is None for v in n.inputs[3 if bias else 2 :])


def _fuse(n: Node, rw: Rewriter, sizes: Sizes) -> None:
    weights, v = n.inputs[:2]
    if weights is None or v is None or not _plain(n) or not is_float(v.dtype) or v.type.rank < 3:
        return
    softmax = _softmax(weights, n, rw)
    if softmax is None or softmax.attrs.log or softmax.inputs[0] is None:
        return
    scores = softmax.inputs[0]
    if softmax.attrs.axis != scores.type.rank - 1 or scores.type.rank != v.type.rank or rw.sole(scores) is not softmax:
        return
    m = scores.node
    parts = _scores(term(scores), scores, rw, sizes)
    if m is None or parts is None:
        return
    product, scale, mask, keep = parts
    q, kt = product.inputs[:2]
    if q is None or kt is None or not _shapes_fit(q, kt, v, sizes):
        return
    bias: Value | None = None
    safe = True
    if mask is not None:
        bias, safe = _mask(mask, keep, scores, n, rw, sizes)
        if bias is None:
            return
    causal = bias is not None and _is_causal(bias, scores, sizes)
    k = _swapped(kt, n, rw)
    loc = [product.loc, *([m.loc] if m is not product else []), softmax.loc]
    attrs = ops.Attention(scale, causal, not causal and not safe)
    rw.become(n, "attention", [q, k, v, None if causal else bias], attrs, *loc)


def _softmax(weights: Value, n: Node, rw: Rewriter) -> Node | None:
    """The softmax that makes the weights, through a rounding of its result."""
    if rw.sole(weights) is not n:
        return None
    p = weights.node
    if p is not None and p.op == "map":
        t = term(weights)
        inner = t.args[0].value if t.op == MapOp.cast and len(p.attrs.code) == 2 else None
        if inner is None or rw.sole(inner) is not p or not is_float(inner.dtype):
            return None
        p = inner.node
    return p if p is not None and p.op == "softmax" else None


Kind = tuple[str, float]  # "" without; "add"; "keep" or "drop" where it holds, with the score of what is dropped
Scores = tuple[Node, float, Term | None, Kind]


def _scores(t: Term, scores: Value, rw: Rewriter, sizes: Sizes) -> Scores | None:
    """(product, scale, mask, kind of the mask)."""
    base = _product(t, scores, rw)
    if base is not None:
        n, scale = base
        added = n.inputs[2] if len(n.inputs) > 2 else None
        if added is not None:
            return (n, 1.0, term(added), ("add", 0.0)) if scale == 1 else None
        return n, scale, None, ("", 0.0)
    for s, mask in either(t, MapOp.add):
        base = _product(s, scores, rw)
        if base is not None and _plain(base[0]):
            return (*base, mask, ("add", 0.0))
    if t.op == MapOp.select:
        cond, yes, no = t.args
        for s, fill, kind in ((yes, no, "keep"), (no, yes, "drop")):
            base = _product(s, scores, rw)
            if base is not None and _plain(base[0]) and fill.number is not None and fill.number <= FAR:
                return (*base, cond, (kind, fill.number))
    return None


def _product(t: Term, scores: Value, rw: Rewriter) -> tuple[Node, float] | None:
    """The matmul and the factor when t is a scaled product of which nothing else is read."""
    t, scale = scaled(t)
    if t.op == MapOp.cast and t.args[0].made_by("matmul") is not None:
        t = t.args[0]
    n = t.made_by("matmul")
    if n is None or not _plain(n, bias=True) or n.outputs[0].shape != scores.shape:
        return None
    at: Value = n.outputs[0]
    while at is not scores:  # every map on the way is the only reader of the one before
        reader = rw.sole(at)
        if reader is None or reader.op != "map":
            return None
        at = reader.outputs[0]
    return n, scale


def _shapes_fit(q: Value, kt: Value, v: Value, sizes: Sizes) -> bool:
    if not q.type.rank == kt.type.rank == v.type.rank or not q.dtype == kt.dtype == v.dtype:
        return False
    heads, groups = q.shape[-3], kt.shape[-3]
    if not sizes.same(groups, v.shape[-3]) or not (groups == 1 or sizes.same(heads, groups)):
        return False
    return sizes.same_shape(sizes.broadcast([q.shape[:-3], kt.shape[:-3], v.shape[:-3]]), q.shape[:-3])


def _swapped(kt: Value, n: Node, rw: Rewriter) -> Value:
    """kt with its last two axes exchanged; a permute that did that goes."""
    rank = kt.type.rank
    axes = [*range(rank - 2), rank - 1, rank - 2]
    p = kt.node
    source, order = kt, axes
    if p is not None and p.op == "permute" and p.inputs[0] is not None:
        source, order = p.inputs[0], [p.attrs.axes[a] for a in axes]
    if order == list(range(rank)):
        return source
    shape = tuple(source.shape[a] for a in order)
    return rw.before(n, "permute", [source], Type(kt.dtype, shape), ops.Permute(tuple(order)), n.loc)


# ---- masks
def _mask(mask: Term, kind: Kind, scores: Value, n: Node, rw: Rewriter, sizes: Sizes) -> tuple[Value | None, bool]:
    """The mask as a value that attention takes, None when it is none; and whether every row is sure to have something."""
    if kind[0] == "add":
        if not is_float(mask.dtype):
            return None, True
        v = extract(mask, n, rw, sizes)
        fits = v.dtype == n.outputs[0].dtype and v.type.rank <= scores.type.rank
        return (v if fits else None), _adds_safely(mask, sizes)
    keep, fill = kind[0] == "keep", kind[1]
    safe = _every_row(mask, keep, sizes)
    if mask.dtype != DType.bool or not (safe or fill <= GONE):
        return None, safe
    v = extract(mask, n, rw, sizes)
    if v.type.rank > scores.type.rank:
        return None, safe
    if not safe and fill != -math.inf:  # a row of nothing has equal weights
        return _chosen(v, (0.0, fill) if keep else (fill, 0.0), n, rw), True
    if keep:
        return v, safe
    code = (ops.Instr(MapOp.load, DType.bool, (), 0), ops.Instr(MapOp.logical_not, DType.bool, (0,)))
    if v.const is not None and v.const.data is not None:
        c = Const(f"{v.const.name}.not", ~v.const.data)
        return Value(c.name, v.type, const=c), safe
    return rw.before(n, "map", [v], v.type, ops.Map(code), n.loc), safe


def _chosen(condition: Value, numbers: tuple[float, float], n: Node, rw: Rewriter) -> Value:
    """One number where a condition holds, another where not, in the dtype of an attention."""
    dtype = n.outputs[0].dtype
    code = (
        ops.Instr(MapOp.load, DType.bool, (), 0),
        *(ops.Instr(MapOp.const_, dtype, (), x) for x in numbers),
        ops.Instr(MapOp.select, dtype, (0, 1, 2)),
    )
    return rw.before(n, "map", [condition], Type(dtype, condition.shape), ops.Map(code), n.loc)


def _adds_safely(mask: Term, sizes: Sizes) -> bool:
    if any(Ranges(sizes, first, flags=True).of(mask)[0] > _LEAST for first in (False, True)):
        return True
    data = _data(mask)
    return data is not None and bool((data > _LEAST).any(-1).all())


def _every_row(mask: Term, keep: bool, sizes: Sizes) -> bool:
    """Every row of a condition has a place that takes part."""
    lo, hi = Ranges(sizes, True).of(mask)
    if (keep and lo > 0) or (not keep and hi == 0):
        return True
    data = _data(mask)
    return data is not None and bool((data == keep).any(-1).all())


def _data(mask: Term) -> Any:
    c = mask.source.const if mask.source is not None else None
    return c.data if c is not None and c.data is not None and c.data.dim() > 0 else None


def _is_causal(mask: Value, scores: Value, sizes: Sizes) -> bool:
    """A mask that says: not beyond the row's own position. Decided by computing it, at several sizes, when it depends on
    nothing but constants and positions. Every row has its first place, so that what takes up any score is as good as -inf.
    """
    import torch

    if mask.type.rank < 2 or any(d != 1 for d in mask.shape[:-2]) or mask.shape[-2:] != scores.shape[-2:]:
        return False
    for size in (1, 5, INF if _has_table(mask) else 130):  # a table is looked at whole
        env = sizes.at(size)
        try:
            if any(evaluate(d, env) > LARGEST for d in mask.shape):
                return False
            x = _compute(mask, env)
        except (Error, KeyError, IndexError, RuntimeError):
            return False
        if x is None:
            return False
        x = x.reshape(x.shape[-2:])
        want = torch.ones(x.shape, dtype=torch.bool).tril()
        kept = x if x.dtype == torch.bool else x == 0
        if not torch.equal(kept, want) or (x.dtype != torch.bool and not bool((x[~want] <= GONE).all())):
            return False
        if mask.type.static:
            break
    return True


def _has_table(v: Value) -> bool:
    """True when v depends on a constant with several elements."""
    if v.const is not None or v.node is None:
        return True
    return any(_has_table(x) for x in v.node.inputs if x is not None)


def _compute(v: Value, env: dict[str, int]) -> Any:
    """The content of a value made from constants and positions only, else None."""
    if v.const is not None:
        return v.const.data
    n = v.node
    if n is None or n.op not in ("map", "slice", "reshape", "expand", "permute"):
        return None
    inputs = [_compute(x, env) for x in n.inputs if x is not None]
    return None if any(x is None for x in inputs) else evaluate_node(n, inputs, dict(env))[0]


# ---- factors of queries and keys
def _take_factors(n: Node, rw: Rewriter) -> None:
    """q * c and k * c, c a number, become part of the scale."""
    for i in (0, 1):
        v, chain = n.inputs[i], n
        while v is not None and (p := v.node) is not None and p.op in VIEWS and rw.sole(v) is chain:
            v, chain = p.inputs[0], p
        if v is None or v.node is None or v.node.op != "map" or rw.sole(v) is not chain:
            continue
        t, c = scaled(term(v))
        x = t.value
        if c == 1 or x is None or x.type != v.type or len(v.node.inputs) != 1:
            continue
        rw.become(chain, chain.op, [x if w is v else w for w in chain.inputs], chain.attrs, v.node.loc)
        rw.become(n, "attention", list(n.inputs), replace(n.attrs, scale=n.attrs.scale * c))


# ---- grouped queries
def _group(n: Node, rw: Rewriter) -> None:
    """Keys and values whose heads are each repeated r times are used as they are."""
    q, k, v = n.inputs[:3]
    if q is None or k is None or v is None:
        return
    a, b = _repeated(k), _repeated(v)
    if a is None or b is None or a.shape[-3] != b.shape[-3] or a.type.rank != q.type.rank:
        return
    rw.become(n, "attention", [q, a, b, *n.inputs[3:]], n.attrs)


def _repeated(x: Value) -> Value | None:
    """[.., G, S, D] when x is reshape(expand(that as [.., G, 1, S, D])): heads repeated in place."""
    outer = x.node
    expand = (
        outer.inputs[0].node if outer is not None and outer.op == "reshape" and outer.inputs[0] is not None else None
    )
    inner = expand.inputs[0] if expand is not None and expand.op == "expand" else None
    if inner is None or inner.node is None or inner.node.op != "reshape" or expand is None:
        return None
    source, wide = inner.node.inputs[0], expand.outputs[0]
    if source is None or inner.type.rank != x.type.rank + 1 or wide.type.rank != inner.type.rank:
        return None
    if inner.shape[-3] != 1 or source.shape != (*inner.shape[:-3], *inner.shape[-2:]):
        return None
    if (*inner.shape[:-3], *inner.shape[-2:]) != (*wide.shape[:-3], *wide.shape[-2:]):
        return None
    return source if x.shape == (*source.shape[:-3], wide.shape[-4] * wide.shape[-3], *source.shape[-2:]) else None


# ---- caches
def _continue(n: Node, rw: Rewriter) -> None:
    """Keys and values behind those of a cache are not copied together with them."""
    if len(n.inputs) > 4:
        return
    k, v = (_pieces(x, n, rw) for x in n.inputs[1:3])
    if k is None or v is None or k[0].shape[-2] != v[0].shape[-2]:
        return
    rw.become(n, "attention", [*n.inputs[:1], k[0], v[0], *(*n.inputs[3:], None)[:1], k[1], v[1]], n.attrs)


def _pieces(x: Value | None, n: Node, rw: Rewriter) -> tuple[Value, Value] | None:
    """(a, b) when only n reads x, which is a with b behind it along the keys, and one of the two lies in memory already."""
    p = x.node if x is not None and rw.sole(x) is n else None
    order: tuple[int, ...] | None = None
    if p is not None and p.op == "permute" and p.inputs[0] is not None and rw.sole(p.inputs[0]) is p:
        order, p = p.attrs.axes, p.inputs[0].node
    if x is None or p is None or p.op != "concat" or len(p.inputs) != 2:
        return None
    at = x.type.rank - 2
    a, b = p.inputs
    if a is None or b is None or a is b or p.attrs.axis != (order[at] if order is not None else at):
        return None
    if not any(_lies(v) for v in (a, b)):
        return None
    if order is None:
        return a, b
    first, second = (rw.before(n, "permute", [v], Type(v.dtype, tuple(v.shape[i] for i in order)), ops.Permute(order), p.loc)
                     for v in (a, b))  # fmt: skip
    return first, second


def _lies(v: Value) -> bool:
    """True for what no kernel makes: an input, a state, a constant, or a view of one."""
    while v.node is not None and ops.OPS[v.node.op].view and v.node.inputs[0] is not None:
        v = v.node.inputs[0]
    return v.node is None
