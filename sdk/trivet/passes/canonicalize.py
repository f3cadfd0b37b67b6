"""One spelling for each meaning: what does nothing goes, chains of views become one, equal nodes are made once.

Every rule is exact. Works on one graph until nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING

from trivet.fbs.structs import MapOp
from trivet.ir import ops
from trivet.ir.axes import through_permute
from trivet.ir.dim import Shape
from trivet.ir.graph import Graph, Module, Node, Value
from trivet.ir.infer import Sizes
from trivet.ir.ops import OPS
from trivet.ir.rewrite import Rewriter, graphs_of, join_locs
from trivet.ir.simplify import simplify
from trivet.ir.types import Type

if TYPE_CHECKING:
    from trivet.pipeline import Context

MAX_ROUNDS = 20
MAX_RANK = 8


def canonicalize(module: Module, context: Context) -> None:
    """The pass."""
    for graph, sizes in graphs_of(module):
        for _ in range(MAX_ROUNDS):
            if not _round(graph, sizes):
                break


def _round(graph: Graph, sizes: Sizes) -> bool:
    rw = Rewriter(graph)
    changed = False
    for n in list(graph.nodes):
        if n.outputs and all(rw.dead(v) for v in n.outputs):
            continue
        rule = _RULES.get(n.op)
        if OPS[n.op].view and _per_axis(n.outputs[0]):
            continue  # a view of a weight in which other views need not keep the scales; folding constants takes it away
        if rule is not None and rule(n, rw, sizes):
            changed = True
    changed = merge_equal(graph, rw) or changed
    return rw.finish() or changed


def _per_axis(v: Value) -> bool:
    return v.type.quant is not None and v.type.quant.axis is not None


def _source(v: Value | None, op: str) -> Node | None:
    """The node of kind op that makes v."""
    return v.node if v is not None and v.node is not None and v.node.op == op else None


def _in(n: Node, i: int = 0) -> Value:
    v = n.inputs[i]
    assert v is not None
    return v


# ---- views
def _reshape(n: Node, rw: Rewriter, sizes: Sizes) -> bool:
    x, y = _in(n), n.outputs[0]
    if x.shape == y.shape:
        rw.replace(y, x)
        return True
    p = _source(x, "reshape")
    if p is not None:
        rw.become(n, "reshape", [_in(p)], n.attrs, p.loc)
        return True
    return _around_permute(n, rw) or _product_of_rows(n, rw)


def _around_permute(n: Node, rw: Rewriter) -> bool:
    """reshape(permute(reshape(x))): where the inner reshape joins axes that the outer one parts again, they are not joined
    (joining may have to copy); where the outer one then does nothing, it goes.
    """
    y = n.outputs[0]
    p = _source(_in(n), "permute")
    r = _source(_in(p), "reshape") if p is not None else None
    if p is None or r is None:
        return False
    x = _in(r)
    found = through_permute(x.shape, r.outputs[0].shape, p.attrs.axes, y.shape)
    if found is None or len(found[0]) > MAX_RANK:
        return False
    shape, order, merges = found
    result = tuple(shape[i] for i in order)
    if not merges and result != y.shape:
        return False
    split = x if shape == x.shape else rw.before(n, "reshape", [x], Type(x.dtype, shape), ops.Reshape(), r.loc)
    if result == y.shape:
        rw.become(n, "permute", [split], ops.Permute(order), p.loc)
    else:
        turned = rw.before(n, "permute", [split], Type(x.dtype, result), ops.Permute(order), p.loc)
        rw.become(n, "reshape", [turned], n.attrs, p.loc)
    return True


def _product_of_rows(n: Node, rw: Rewriter) -> bool:
    """reshape(matmul(reshape(x), b)) that only parts the rows: the product is made with the rows parted."""
    y = n.outputs[0]
    m = _source(_in(n), "matmul")
    if m is None or m.attrs.packed or rw.sole(m.outputs[0]) is not n or len(y.shape) < 3:
        return False
    a, b, bias, residual = (*m.inputs, None, None)[:4]
    p = _source(a, "reshape")
    if p is None or a is None or b is None or len(a.shape) != 2 or len(b.shape) != 2 or y.shape[-1] != b.shape[1]:
        return False
    if residual is not None or (bias is not None and bias.type.rank > 1):
        return False
    rows = rw.before(n, "reshape", [_in(p)], Type(a.dtype, (*y.shape[:-1], a.shape[1])), ops.Reshape(), p.loc)
    rw.become(n, "matmul", [rows, b, bias, None], m.attrs, m.loc)
    return True


def _permute(n: Node, rw: Rewriter, sizes: Sizes) -> bool:
    x, y = _in(n), n.outputs[0]
    axes: tuple[int, ...] = n.attrs.axes
    if axes == tuple(range(len(axes))):
        rw.replace(y, x)
        return True
    p = _source(x, "permute")
    if p is not None:
        rw.become(n, "permute", [_in(p)], ops.Permute(tuple(p.attrs.axes[a] for a in axes)), p.loc)
        return True
    moved = [a for a in axes if x.shape[a] != 1]
    if moved == sorted(moved):  # only axes of size 1 change places
        rw.become(n, "reshape", [x], ops.Reshape())
        return True
    return False


def _expand(n: Node, rw: Rewriter, sizes: Sizes) -> bool:
    x, y = _in(n), n.outputs[0]
    if x.shape == y.shape:
        rw.replace(y, x)
        return True
    p = _source(x, "expand")
    if p is not None:
        rw.become(n, "expand", [_in(p)], n.attrs, p.loc)
        return True
    if _tail(y.shape, len(x.shape)) == x.shape and prod(_as_ints(y.shape[: len(y.shape) - len(x.shape)])) == 1:
        rw.become(n, "reshape", [x], ops.Reshape())
        return True
    return False


def _tail(shape: Shape, rank: int) -> Shape:
    return shape[len(shape) - rank :]


def _as_ints(shape: Shape) -> list[int]:
    return [d if isinstance(d, int) else 0 for d in shape]


def _slice(n: Node, rw: Rewriter, sizes: Sizes) -> bool:
    x, y, a = _in(n), n.outputs[0], n.attrs
    if x.shape == y.shape and a.start == 0 and (a.step == 1 or x.shape[a.axis] in (0, 1)):
        rw.replace(y, x)
        return True
    if y.shape[a.axis] == 1 and a.step != 1:  # one position: the step says nothing
        rw.become(n, "slice", [x], ops.Slice(a.axis, a.start, 1))
        return True
    p = _source(x, "slice")
    if p is not None and p.attrs.axis == a.axis:
        attrs = ops.Slice(a.axis, p.attrs.start + a.start * p.attrs.step, p.attrs.step * a.step)
        rw.become(n, "slice", [_in(p)], attrs, p.loc)
        return True
    return False


def _bitcast(n: Node, rw: Rewriter, sizes: Sizes) -> bool:
    x, y = _in(n), n.outputs[0]
    if x.type == y.type:
        rw.replace(y, x)
        return True
    p = _source(x, "bitcast")
    if p is not None:
        rw.become(n, "bitcast", [_in(p)], n.attrs, p.loc)
        return True
    return False


def _copy(n: Node, rw: Rewriter, sizes: Sizes) -> bool:
    rw.replace(n.outputs[0], _in(n))
    return True


def _concat(n: Node, rw: Rewriter, sizes: Sizes) -> bool:
    axis: int = n.attrs.axis
    parts = [v for v in n.inputs if v is not None and v.shape[axis] != 0] or n.inputs[:1]
    if len(parts) == 1:
        rw.replace(n.outputs[0], parts[0])  # type: ignore[arg-type]
        return True
    flat: list[Value | None] = []
    locs = []
    for v in parts:
        p = _source(v, "concat")
        if p is not None and v is not None and p.attrs.axis == axis and rw.sole(v) is n and parts.count(v) == 1:
            flat += p.inputs
            locs.append(p.loc)
        else:
            flat.append(v)
    if flat != n.inputs:
        rw.become(n, "concat", flat, n.attrs, *locs)
        return True
    return False


def _pad(n: Node, rw: Rewriter, sizes: Sizes) -> bool:
    if any(n.attrs.lo) or any(n.attrs.hi):
        return False
    rw.replace(n.outputs[0], _in(n))
    return True


# ---- map
def _map(n: Node, rw: Rewriter, sizes: Sizes) -> bool:
    y = n.outputs[0]
    changed = False
    inputs = [_broadcast_source(v, y) for v in n.inputs if v is not None]
    code, used = simplify(_known_iota(n.attrs.code, y.shape), inputs)
    if code != n.attrs.code or used != n.inputs or repr(code) != repr(n.attrs.code):
        rw.become(n, "map", list(used), ops.Map(code))
        changed = True
    if len(code) == 1 and code[0].op == MapOp.load and used[0].type.quant == y.type.quant:
        x = used[0]
        if x.shape == y.shape:
            rw.replace(y, x)
        else:
            rw.become(n, "expand", [x], ops.Expand())
        return True
    return _sink_view(n, rw) or changed


def _known_iota(code: tuple[ops.Instr, ...], shape: Shape) -> tuple[ops.Instr, ...]:
    """Positions along an axis of size 1 are 0."""
    return tuple(
        ops.Instr(MapOp.const_, i.dtype, (), 0) if i.op == MapOp.iota and shape[i.value] == 1 else i for i in code
    )


def _broadcast_source(v: Value, y: Value) -> Value:
    """v without the views that numpy's broadcasting to y makes by itself: expand, and axes of size 1 in front."""
    while v.node is not None:
        x = v.node.inputs[0] if v.node.op in ("expand", "reshape") else None
        if x is None:
            break
        if v.node.op == "reshape":
            k = len(v.shape) - len(x.shape)
            if not (k > 0 and v.shape[k:] == x.shape and all(d == 1 for d in v.shape[:k])):
                break
        elif not all(d == 1 or d == o for d, o in zip(x.shape, _tail(y.shape, len(x.shape)), strict=True)):
            break
        v = x
    return v


def _sink_view(n: Node, rw: Rewriter) -> bool:
    """map(view(x)) becomes view(map(x)) for a reshape or permute that nothing else reads, so that the map meets the node that
    makes x. Other inputs must be scalars.
    """
    y = n.outputs[0]
    views = [v for v in n.inputs if v is not None and v.type.rank > 0]
    if len(views) > 1:
        return _sink_permute(n, rw)
    if len(views) != 1 or views[0].shape != y.shape or any(i.op == MapOp.iota for i in n.attrs.code):
        return False
    p = views[0].node
    if p is None or p.op not in ("reshape", "permute") or rw.sole(views[0]) is not n or _in(p).node is None:
        return False
    x = _in(p)
    mapped = rw.before(
        n, "map", [x if v is views[0] else v for v in n.inputs], Type(y.dtype, x.shape, y.type.quant), n.attrs, n.loc
    )
    rw.become(n, p.op, [mapped], p.attrs, p.loc)
    return True


def _sink_permute(n: Node, rw: Rewriter) -> bool:
    """map(permute(product), z) becomes permute(map(product, z permuted back)), so that the product takes z as a residual."""
    y = n.outputs[0]
    rank = y.type.rank
    if any(i.op == MapOp.iota for i in n.attrs.code):
        return False
    for v in n.inputs:
        p = _source(v, "permute")
        if v is None or p is None or v.shape != y.shape or rw.sole(v) is not n or n.inputs.count(v) != 1:
            continue
        x = _in(p)
        if x.node is None or x.node.op not in ("matmul", "conv") or rw.sole(x) is not p:
            continue
        back = tuple(p.attrs.axes.index(i) for i in range(rank))
        inputs: list[Value | None] = []
        for z in n.inputs:
            assert z is not None
            if z is v:
                inputs.append(x)
            elif z.type.rank == 0:
                inputs.append(z)
            else:
                full = (1,) * (rank - z.type.rank) + z.shape
                if full != z.shape:
                    z = rw.before(n, "reshape", [z], Type(z.dtype, full), ops.Reshape(), n.loc)
                shape = tuple(full[i] for i in back)
                inputs.append(rw.before(n, "permute", [z], Type(z.dtype, shape), ops.Permute(back), n.loc))
        mapped = rw.before(n, "map", inputs, Type(y.dtype, x.shape, y.type.quant), n.attrs, n.loc)
        rw.become(n, "permute", [mapped], p.attrs, p.loc)
        return True
    return False


# ---- matmul
def _matmul(n: Node, rw: Rewriter, sizes: Sizes) -> bool:
    """A product of collapsed operands becomes the product of what they were, reshaped after: reshapes in front of a matmul
    may have to copy, one behind it never does.
    """
    a, b = _in(n, 0), _in(n, 1)
    if n.attrs.packed or any(v is not None for v in n.inputs[3:4]):
        return False
    bias = n.inputs[2] if len(n.inputs) > 2 else None
    if bias is not None and any(d != 1 for d in bias.shape[:-1]):
        return False
    if _broadcast_operands(n, rw, sizes):
        return True
    if _turned_rows(n, rw):
        return True
    p = _source(a, "reshape")
    if p is None or len(a.shape) < 2:
        return False
    wide = _in(p)
    if len(wide.shape) <= len(a.shape) or wide.shape[-1] != a.shape[-1] or len(wide.shape) > MAX_RANK:
        return False
    right = b
    locs = [p.loc]
    if len(b.shape) == 2:
        if len(a.shape) != 2:
            return False
    else:
        q = _source(b, "reshape")
        if q is None:
            return False
        right = _in(q)
        locs.append(q.loc)
        same_batch = right.shape[:-2] == wide.shape[:-2] and a.shape[:-2] == b.shape[:-2]
        if not same_batch or wide.shape[-2:] != a.shape[-2:] or right.shape[-2:] != b.shape[-2:]:
            return False
    y = n.outputs[0]
    shape = (*wide.shape[:-1], y.shape[-1])
    if bias is not None and bias.type.rank > 1:
        bias = rw.before(n, "reshape", [bias], Type(bias.dtype, bias.shape[-1:]), ops.Reshape(), n.loc)
    made = rw.before(n, "matmul", [wide, right, bias, None], Type(y.dtype, shape), n.attrs, join_locs(*locs, n.loc))
    rw.become(n, "reshape", [made], ops.Reshape())
    return True


def _turned_rows(n: Node, rw: Rewriter) -> bool:
    """A product of rows that change places becomes the product of the rows as they lie, whose rows change places."""
    b, bias, y = _in(n, 1), n.inputs[2] if len(n.inputs) > 2 else None, n.outputs[0]
    p = _source(_in(n), "permute")
    rank = y.type.rank
    if p is None or rank < 3 or b.type.rank != 2 or p.attrs.axes[-1] != rank - 1:
        return False
    if bias is not None and bias.type.rank > 1:
        return False
    x = _in(p)
    made = rw.before(n, "matmul", [x, b, bias, None], Type(y.dtype, (*x.shape[:-1], y.shape[-1])), n.attrs, n.loc)
    rw.become(n, "permute", [made], p.attrs, p.loc)
    return True


def _broadcast_operands(n: Node, rw: Rewriter, sizes: Sizes) -> bool:
    """An expand of batch axes in front of a matmul goes: matmul broadcasts them."""
    batch = n.outputs[0].shape[:-2]
    for i in (0, 1):
        v, other = _in(n, i), _in(n, 1 - i)
        p = _source(v, "expand")
        if p is None or len(v.shape) < 3 or len(other.shape) < 2:
            continue
        x = _in(p)
        if (
            len(x.shape) < 2
            or x.shape[-2:] != v.shape[-2:]
            or sizes.broadcast([x.shape[:-2], other.shape[:-2]]) != batch
        ):
            continue
        rw.become(n, "matmul", [x if k == i else w for k, w in enumerate(n.inputs)], n.attrs, p.loc)
        return True
    return False


def _attention(n: Node, rw: Rewriter, sizes: Sizes) -> bool:
    """The mask broadcasts by itself."""
    mask = n.inputs[3] if len(n.inputs) > 3 else None
    p = _source(mask, "expand")
    if p is None:
        return False
    rw.become(n, "attention", [*n.inputs[:3], _in(p)], n.attrs, p.loc)
    return True


def _control(n: Node, rw: Rewriter, sizes: Sizes) -> bool:
    """Operands of if that neither branch reads go; of while, those that stay and are not read."""
    keep = n.attrs.carried if n.op == "while" else 0
    skip = 1 if n.op == "if" else 0
    unused = [i for i in range(keep, len(n.inputs) - skip) if all(_unread(g, g.inputs[i]) for g in n.graphs)]
    if not unused:
        return False
    for g in n.graphs:
        g.inputs = [v for i, v in enumerate(g.inputs) if i not in unused]
    graphs = n.graphs
    rw.become(n, n.op, [v for i, v in enumerate(n.inputs) if i - skip not in unused], n.attrs)
    n.graphs = graphs
    return True


def _unread(g: Graph, v: Value) -> bool:
    return v not in g.outputs and all(v not in n.inputs for n in g.nodes)


# ---- equal nodes
def merge_equal(graph: Graph, rw: Rewriter) -> bool:
    """Nodes of the same op, attributes, operands and types are one."""
    made: dict[object, Node] = {}
    changed = False
    for n in graph.nodes:
        if not n.outputs or n.graphs or n.op == "nonzero":
            continue
        operands = tuple(v and (v.const or v.state or v) for v in n.inputs)
        key = (n.op, repr(n.attrs), operands, tuple(v.type for v in n.outputs))
        first = made.setdefault(key, n)
        if first is not n and first.op == n.op:
            for old, new in zip(n.outputs, first.outputs, strict=True):
                if not rw.dead(old):
                    rw.replace(old, new)
                    changed = True
    return changed


Rule = Callable[[Node, Rewriter, Sizes], bool]
_RULES: dict[str, Rule] = {
    "reshape": _reshape, "permute": _permute, "expand": _expand, "slice": _slice, "bitcast": _bitcast, "copy": _copy,
    "concat": _concat, "pad": _pad, "map": _map, "matmul": _matmul, "attention": _attention, "if": _control, "while": _control,
}  # fmt: skip
