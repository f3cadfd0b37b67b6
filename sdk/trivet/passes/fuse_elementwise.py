"""Chains and small graphs of maps become one map, so that values between them never reach memory.

A producer goes into its consumer when that is its only reader and the work does not grow, or when it is so cheap that making it
again costs less than storing it. Values that several nodes read stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trivet.fbs.structs import MapOp
from trivet.ir.graph import Graph, Module, Node, Value
from trivet.ir.infer import Sizes
from trivet.ir.rewrite import Rewriter, graphs_of
from trivet.ir.simplify import Code, Simplifier, cost, finish, live_registers, load, simplify, widens

if TYPE_CHECKING:
    from trivet.pipeline import Context

MAX_LIVE = 32  # registers that hold a value at one time
MAX_INPUTS = 12
MAX_CODE = 96
FREE = 2  # cost of an expression over a smaller shape that is repeated rather than stored
POSITIONS = 6  # the same for one that only depends on positions (masks, ranges)


def fuse_elementwise(module: Module, context: Context) -> None:
    """The pass."""
    for graph, sizes in graphs_of(module):
        _fuse_graph(graph, sizes)


def _fuse_graph(graph: Graph, sizes: Sizes) -> None:
    rw = Rewriter(graph)
    for n in graph.nodes:
        if n.op != "map" or rw.gone(n):
            continue
        tried: set[Value] = set()
        while True:
            v = next((v for v in n.inputs if v not in tried and v is not None and _wanted(v, n, rw, sizes)), None)
            if v is None:
                break
            tried.add(v)
            p = v.node
            assert p is not None
            code, inputs = inline(n, v)
            if len(inputs) > MAX_INPUTS or len(code) > MAX_CODE or live_registers(code) > MAX_LIVE:
                continue
            rw.set_map(n, code, inputs, p.loc)
            rw.prune(v)
            if n.op != "map" or rw.gone(n):
                break
            tried = {t for t in tried if t in inputs and t is not v}
    rw.finish()


def _wanted(v: Value, n: Node, rw: Rewriter, sizes: Sizes) -> bool:
    """True when the map that makes v should go into n."""
    p = v.node
    if p is None or p.op != "map":
        return False
    y = n.outputs[0]
    code: Code = p.attrs.code
    if any(i.op == MapOp.iota and not _same_axis(i.value, v, y) for i in code):
        return False
    work = cost(code)
    positions = not p.inputs
    if positions and work <= POSITIONS:
        return True
    if _is_widening(code):
        return True
    if rw.sole(v) is not n:
        return False
    if sizes.same_shape(v.shape, y.shape):
        return True
    # v is repeated along some axis of y: its work would be too
    return work <= FREE and len(p.inputs) <= 1


def _same_axis(axis: int, v: Value, y: Value) -> bool:
    """Positions along an axis of v are those along y's when v is not repeated along it."""
    return v.shape[axis] == y.shape[axis + y.type.rank - v.type.rank]


def _is_widening(code: Code) -> bool:
    """A cast that loses nothing: the narrow value is what should be stored."""
    last = code[-1]
    return len(code) == 2 and last.op == MapOp.cast and code[0].op == MapOp.load and widens(code[0].dtype, last.dtype)


def inline(n: Node, v: Value) -> tuple[Code, list[Value]]:
    """n's expression with v replaced by the expression of the map that makes it, simplified; and what it loads."""
    p = v.node
    assert p is not None
    s = Simplifier()
    values: list[Value] = []
    shift = n.outputs[0].type.rank - v.type.rank

    def build(code: Code, inputs: list[Value | None], inner: int | None, by: int) -> int:
        regs: list[int] = []
        for i in code:
            if i.op == MapOp.load:
                source = inputs[i.value]
                assert source is not None
                regs.append(inner if inner is not None and source is v else load(s, values, source))
            elif i.op == MapOp.iota:
                regs.append(s.add(i.op, i.dtype, (), i.value + by))
            else:
                regs.append(s.add(i.op, i.dtype, tuple(regs[a] for a in i.args), i.value))
        return regs[-1]

    made = build(p.attrs.code, p.inputs, None, shift)
    result = build(n.attrs.code, n.inputs, made, 0)
    code, used = finish(s.code, result, values)
    return simplify(code, used)
