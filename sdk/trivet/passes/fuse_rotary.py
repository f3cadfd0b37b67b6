"""Rotary position embedding of halves becomes one map over the two halves and the halves exchanged, which is a view.

Both spellings: concat(a cos - b sin, b cos + a sin) with a and b the halves of x, and x cos + concat(-b, a) sin with tables for the
whole. With x seen as [.., 2, h], y = x cos + x[.., ::-1, :] (sin * [-1, 1]): what is added and multiplied is the same, so are results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trivet.fbs.structs import DType, MapOp
from trivet.ir import ops
from trivet.ir.graph import Const, Module, Node, Value
from trivet.ir.infer import Sizes
from trivet.ir.match import Term, either, term
from trivet.ir.rewrite import Rewriter, graphs_of
from trivet.ir.types import Type

if TYPE_CHECKING:
    from trivet.pipeline import Context

MAX_RANK = 8


def fuse_rotary(module: Module, context: Context) -> None:
    """The pass."""
    for graph, sizes in graphs_of(module):
        rw = Rewriter(graph)
        for n in list(graph.nodes):
            y = n.outputs[0] if len(n.outputs) == 1 else None
            if y is None or y.dtype != DType.f32 or not 2 <= y.type.rank < MAX_RANK:
                continue
            found = _of_halves(n) if n.op == "concat" else _of_whole(n) if n.op == "map" else None
            if found is not None:
                _rotate(n, *found, rw, sizes)
        rw.finish()


def _halves(a: Term, b: Term) -> Value | None:
    """x when a and b are the first and the second half of its last axis."""
    p, q = a.made_by("slice"), b.made_by("slice")
    x = p.inputs[0] if p is not None else None
    if p is None or q is None or x is None or q.inputs[0] is not x:
        return None
    size, axis = x.shape[-1], x.type.rank - 1
    fits = p.attrs.axis == q.attrs.axis == axis and p.attrs.step == q.attrs.step == 1 and isinstance(size, int)
    half = p.outputs[0].shape[-1]
    whole = fits and half * 2 == size and q.outputs[0].shape[-1] == half
    return x if whole and p.attrs.start == 0 and q.attrs.start == half else None


def _parts(n: Node) -> tuple[Term, Term] | None:
    """The two operands of a concat along the last axis."""
    if n.op != "concat" or len(n.inputs) != 2 or n.attrs.axis != n.outputs[0].type.rank - 1:
        return None
    a, b = n.inputs
    return None if a is None or b is None else (term(a), term(b))


def _of_halves(n: Node) -> tuple[Value, Value, Value] | None:
    """(x, cos, sin) of concat(a cos - b sin, b cos + a sin); the tables are for a half."""
    parts = _parts(n)
    if parts is None or parts[0].op != MapOp.sub or parts[1].op != MapOp.add:
        return None
    left, right = parts[0].args
    for a, cos in either(left, MapOp.mul):
        for b, sin in either(right, MapOp.mul):
            x = _halves(a, b)
            if x is None or cos.value is None or sin.value is None:
                continue
            for p, q in either(parts[1], MapOp.add):
                if (b, cos) in either(p, MapOp.mul) and (a, sin) in either(q, MapOp.mul):
                    return x, cos.value, sin.value
    return None


def _of_whole(n: Node) -> tuple[Value, Value, Value] | None:
    """(x, cos, sin) of x cos + concat(-b, a) sin."""
    for left, right in either(term(n.outputs[0]), MapOp.add):
        for turned, sin in either(right, MapOp.mul):
            c = turned.made_by("concat")
            parts = _parts(c) if c is not None else None
            if parts is None or parts[0].op != MapOp.neg or sin.value is None:
                continue
            x = _halves(parts[1], parts[0].args[0])
            for whole, cos in either(left, MapOp.mul):
                if x is not None and whole.value is x and cos.value is not None:
                    return x, cos.value, sin.value
    return None


def _rotate(n: Node, x: Value, cos: Value, sin: Value, rw: Rewriter, sizes: Sizes) -> None:
    import torch

    y = n.outputs[0]
    half = int(str(x.shape[-1])) // 2
    widths = {v.shape[-1:] for v in (cos, sin)}
    broad = sizes.broadcast([v.shape[:-1] for v in (x, cos, sin)])
    if x.shape != y.shape or broad != x.shape[:-1] or not widths <= {(half,), (2 * half,)}:
        return
    if any(v.dtype != DType.f32 or v.type.quant is not None for v in (x, cos, sin)):
        return

    def parted(v: Value) -> Value:
        """[.., 2, h], or [.., 1, h] of what is the same for both halves."""
        shape = (*v.shape[:-1], int(str(v.shape[-1])) // half, half)
        return rw.before(n, "reshape", [v], Type(v.dtype, shape), ops.Reshape(), n.loc)

    sign = torch.tensor([[-1.0], [1.0]])
    both = parted(x)
    turned = rw.before(n, "slice", [both], both.type, ops.Slice(both.type.rank - 2, 1, -1), n.loc)
    load, mul = MapOp.load, MapOp.mul
    if sin.const is not None and sin.const.data is not None:
        data = sin.const.data
        data = data.reshape(*data.shape[:-1], -1, half) * sign
        c = Const(f"{sin.const.name}.signed", data)
        signed = [Value(c.name, Type(DType.f32, tuple(data.shape)), const=c)]
    else:
        c = Const("rotary.sign", sign)
        signed = [parted(sin), Value(c.name, Type(DType.f32, (2, 1)), const=c)]
    inputs = [both, parted(cos), turned, *signed]
    code = [ops.Instr(load, DType.f32, (), i) for i in range(len(inputs))]
    if len(signed) == 2:
        code.append(ops.Instr(mul, DType.f32, (3, 4)))
    s, k = len(code) - 1 if len(signed) == 2 else 3, len(code)
    code += [
        ops.Instr(mul, DType.f32, (0, 1)),
        ops.Instr(mul, DType.f32, (2, s)),
        ops.Instr(MapOp.add, DType.f32, (k, k + 1)),
    ]
    made = rw.before(n, "map", list(inputs), both.type, ops.Map(tuple(code)), n.loc)
    rw.become(n, "reshape", [made], ops.Reshape())
