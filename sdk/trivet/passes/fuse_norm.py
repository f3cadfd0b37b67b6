"""Layer and RMS normalisation written out with mean, variance and square root become one norm node.

(x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) [* weight [+ bias]] and x * rsqrt(mean(x^2) + eps) [* weight], over the last
axes, in all the spellings with var, rsqrt, sqrt and division.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from trivet.fbs.structs import DType, MapOp, NormKind, ReduceKind
from trivet.ir import ops
from trivet.ir.dim import Shape
from trivet.ir.graph import Const, Loc, Module, Node, Value
from trivet.ir.match import Term, either, term, term_at
from trivet.ir.peel import HALVES, Peel
from trivet.ir.rewrite import Rewriter, graphs_of, join_locs
from trivet.ir.simplify import finish
from trivet.ir.types import Type

if TYPE_CHECKING:
    from trivet.pipeline import Context


def fuse_norm(module: Module, context: Context) -> None:
    """The pass."""
    for graph, _ in graphs_of(module):
        rw = Rewriter(graph)
        for n in list(graph.nodes):
            if n.op == "map" and not rw.gone(n):
                _try(n, rw)
        rw.finish()


def _try(n: Node, rw: Rewriter) -> None:
    for k, i in enumerate(n.attrs.code):
        if i.op not in (MapOp.mul, MapOp.div) or i.dtype not in (DType.f32, DType.f64):
            continue
        found = _match(term_at(n, k))
        if found is None:
            continue
        x, attrs, parts = found
        if x.shape != n.outputs[0].shape:
            continue
        loc = join_locs(*parts, n.loc)
        made = rw.before(n, "norm", [x, None, None], x.type, attrs, loc)
        _load_instead(n, k, made, rw)
        _narrow(made, x, rw)
        while _parameter(made, rw):
            pass
        return


def _load_instead(n: Node, k: int, made: Value, rw: Rewriter) -> None:
    """Instruction k of a map loads made."""
    inputs = [v for v in n.inputs if v is not None]
    code = list(n.attrs.code)
    code[k] = ops.Instr(MapOp.load, made.dtype, (), len(inputs))
    new, used = finish(code, len(code) - 1, [*inputs, made])
    rw.set_map(n, new, used)


Found = tuple[Value, ops.Norm, list[Loc]]


def _match(t: Term) -> Found | None:
    """(x, attributes, places) when t is a normalised x."""
    if t.op == MapOp.mul:
        for d, r in either(t, MapOp.mul):
            inverse = r.args[0] if r.op == MapOp.rsqrt else None
            if r.op == MapOp.recip and r.args[0].op == MapOp.sqrt:
                inverse = r.args[0].args[0]
            if r.op == MapOp.div and r.args[0].number == 1 and r.args[1].op == MapOp.sqrt:
                inverse = r.args[1].args[0]
            if inverse is not None and (found := _normal(d, inverse)) is not None:
                return found
    elif t.op == MapOp.div:
        d, r = t.args
        if r.op == MapOp.sqrt and (found := _normal(d, r.args[0])) is not None:
            return found
    return None


def _normal(d: Term, spread: Term) -> Found | None:
    """d / sqrt(spread) with spread = variance + eps."""
    for var, eps in either(spread, MapOp.add):
        e = eps.number
        reduce = var.made_by("reduce")
        if e is None or e < 0 or reduce is None:
            continue
        axes = _last_axes(reduce)
        x = _centred(d, reduce, axes) if axes else None
        if x is not None:
            return x, ops.Norm(NormKind.layer, _tidy(e, x.dtype), axes), [reduce.loc]
        if axes and reduce.attrs.kind == ReduceKind.mean and d.value is not None and _is_square(reduce, d):
            return d.value, ops.Norm(NormKind.rms, _tidy(e, d.value.dtype), axes), [reduce.loc]
    return None


def _tidy(e: float, dtype: DType) -> float:
    """The short decimal that an f32 number was written as."""
    import numpy

    return float(str(numpy.float32(e))) if dtype == DType.f32 else e


def _last_axes(reduce: Node) -> int:
    """How many last axes a reduction goes over; 0 when they are others."""
    x = reduce.inputs[0]
    axes: tuple[int, ...] = tuple(sorted(reduce.attrs.axes))
    rank = x.type.rank if x is not None else 0
    return len(axes) if axes == tuple(range(rank - len(axes), rank)) else 0


def _is_square(reduce: Node, d: Term) -> bool:
    """The reduction's operand is d * d."""
    x = reduce.inputs[0]
    t = term(x) if x is not None else d
    return t.op == MapOp.mul and t.args[0] == d and t.args[1] == d


def _centred(d: Term, reduce: Node, axes: int) -> Value | None:
    """x when d = x - mean(x) and the reduction is x's variance over the same axes."""
    if d.op != MapOp.sub:
        return None
    x, mean = d.args[0].value, d.args[1].made_by("reduce")
    if (
        x is None
        or mean is None
        or mean.attrs.kind != ReduceKind.mean
        or _last_axes(mean) != axes
        or mean.inputs[0] is not x
    ):
        return None
    if reduce.attrs.kind == ReduceKind.var:
        return x if reduce.inputs[0] is x and reduce.attrs.correction == 0 else None
    return x if reduce.attrs.kind == ReduceKind.mean and _same_square(reduce, d) else None


def _same_square(reduce: Node, d: Term) -> bool:
    """The reduction's operand is the square of d, or of the same difference made again."""
    x = reduce.inputs[0]
    t = term(x) if x is not None else d
    if t.op != MapOp.mul or t.args[0] != t.args[1]:
        return False
    other = t.args[0]
    return other == d or (other.op == MapOp.sub and other.args == d.args)


def _narrow(made: Value, x: Value, rw: Rewriter) -> None:
    """A half that is widened, normalised and rounded back: norm does that by itself."""
    t, m = term(x), rw.sole(made)
    inner = t.args[0].value if t.op == MapOp.cast else None
    if inner is None or inner.dtype not in HALVES or m is None or m.op != "map" or made.node is None:
        return
    p = Peel(m, made)
    k = p.next()
    if k is None or p.code[k].op != MapOp.cast or p.code[k].dtype != inner.dtype:
        return
    rw.become(made.node, "norm", [inner, None, None], made.node.attrs)
    made.type = Type(inner.dtype, made.shape)
    _load_instead(m, k, made, rw)


def _parameter(made: Value, rw: Rewriter) -> bool:
    """Takes a weight, then a bias, from the map that alone reads the norm."""
    norm, m = made.node, rw.sole(made)
    if norm is None or m is None or m.op != "map" or made.dtype in HALVES:
        return False
    p = Peel(m, made)
    k = p.next()
    if k is None:
        return False
    slot = {MapOp.mul: 1, MapOp.add: 2}.get(p.code[k].op)
    z = p.loaded(p.other(k)) if slot is not None else None
    if (
        slot is None
        or z is None
        or norm.inputs[slot] is not None
        or norm.inputs[2] is not None
        or z.dtype != made.dtype
    ):
        return False
    if slot == 2 and norm.attrs.kind == NormKind.rms:
        return False
    axes = norm.attrs.axes
    shape = made.shape[made.type.rank - axes :]
    if (
        z.type.rank < axes
        or z.shape[z.type.rank - axes :] != shape
        or any(d != 1 for d in z.shape[: z.type.rank - axes])
    ):
        return False
    if z.node is not None:  # it may be made behind the norm
        return False
    if z.type.rank != axes:
        z = _flat(z, shape, norm, rw)
    inputs = list(norm.inputs)
    inputs[slot] = z
    rw.become(norm, "norm", inputs, replace(norm.attrs), m.loc)
    if p.step(k):
        rw.set_map(m, *p.rest(made))
    return True


def _flat(z: Value, shape: Shape, norm: Node, rw: Rewriter) -> Value:
    """z without axes of size 1 in front."""
    if z.const is not None and z.const.data is not None:
        c = Const(f"{z.const.name}.flat", z.const.data.reshape([int(str(d)) for d in shape]))
        return Value(c.name, Type(z.dtype, shape), const=c)
    return rw.before(norm, "reshape", [z], Type(z.dtype, shape), ops.Reshape(), norm.loc)
