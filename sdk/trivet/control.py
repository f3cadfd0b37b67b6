"""Control flow of torch: cond and while_loop become `if` and `while` nodes; map, scan and associative_scan become loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from trivet.error import Error
from trivet.fbs.structs import DType, IndexKind
from trivet.ir.builder import Builder
from trivet.ir.dim import Dim
from trivet.ir.expr import Expr
from trivet.ir.graph import Graph, Value
from trivet.ir.ops import If, While
from trivet.ir.types import Type

if TYPE_CHECKING:
    import torch

    from trivet.importer import Importer


class Branch:
    """A graph inside a node: its own inputs for outer values, everything else shared with the outer graph."""

    def __init__(self, outer: Importer, name: str) -> None:
        self.outer = outer
        self.graph = Graph(name, symbols=outer.builder.graph.symbols)
        self.builder = Builder(self.graph, outer.builder.dim)
        self.builder.loc = outer.builder.loc

    def input(self, v: Value) -> Value:
        """The graph's own value for an outer one."""
        inner = self.graph.value(v.type)
        self.graph.inputs.append(inner)
        return inner

    def call(self, module: torch.fx.GraphModule, args: Sequence[Any]) -> list[Any]:
        """The results of a traced function on values of this graph."""
        from trivet.importer import Importer

        inner = Importer(self.builder, module, self.outer.table, self.outer)
        places = [n for n in module.graph.nodes if n.op == "placeholder"]
        inner.env.update(zip(places, args, strict=True))
        loc = self.builder.loc
        results = inner.run()
        self.builder.loc = loc
        return results

    def returns(self, results: Sequence[Any], types: Sequence[Type]) -> None:
        """Sets the outputs; numbers become values, and dtypes the wanted ones."""
        for r, t in zip(results, types, strict=True):
            v = r if isinstance(r, Value) else self.builder.full((), r, t.dtype)
            self.graph.outputs.append(self.builder.cast(v, t.dtype))


def _types(importer: Importer, val: Any) -> list[Type]:
    from trivet.importer import type_of

    vals = val if isinstance(val, (list, tuple)) else [val]
    types = []
    for v in vals:
        if not hasattr(v, "shape"):
            raise importer.builder.error("a branch that returns Python numbers is not supported", "return tensors")
        types.append(type_of(v, importer.table.dim))
    return types


def _split(args: Sequence[Any]) -> tuple[list[Value], list[int]]:
    """The values that differ from run to run, each once, with each argument's place among them.

    -1: a constant or number, used inside as it is.
    """
    moving: list[Value] = []
    places = []
    for a in args:
        if not isinstance(a, Value) or a.const is not None:
            places.append(-1)
            continue
        if a not in moving:
            moving.append(a)
        places.append(moving.index(a))
    return moving, places


def _result(val: Any, outs: Sequence[Any]) -> Any:
    return tuple(outs) if isinstance(val, (list, tuple)) else outs[0]


def _cond(importer: Importer, node: torch.fx.Node) -> Any:
    pred, yes, no, operands = (importer.arg(a) for a in node.args)
    b = importer.builder
    val = node.meta["val"]
    if isinstance(pred, (bool, int)):
        return _result(val, inline(importer, yes if pred else no, operands))
    types = _types(importer, val)
    for t in types:
        new = {s for d in t.shape if isinstance(d, Dim) for s in d.symbols()
               if b.graph.symbols[s].data and not _known(operands, s)}  # fmt: skip
        if new:
            raise b.error("the branches of this cond give tensors of different sizes", "give both the same size")
    flag = b.cast(b.reshape(pred, ()), DType.bool)
    moving, places = _split(operands)
    graphs = []
    for name, module in (("then", yes), ("else", no)):
        branch = Branch(importer, name)
        inner = [branch.input(v) for v in moving]
        results = branch.call(module, [inner[p] if p >= 0 else a for a, p in zip(operands, places, strict=True)])
        branch.returns(results, types)
        graphs.append(branch.graph)
    return _result(val, b.graph.node("if", [flag, *moving], types, If(), b.loc, graphs=graphs))


def _known(operands: Sequence[Any], symbol: str) -> bool:
    """Whether a data-dependent size comes from outside, with an operand."""
    dims = [d for o in operands for d in (o.shape if isinstance(o, Value) else (o,))]
    return any(isinstance(d, Dim) and symbol in d.symbols() for d in dims)


def inline(importer: Importer, module: torch.fx.GraphModule, args: Sequence[Any]) -> list[Any]:
    """A traced function in the present graph."""
    branch = Branch(importer, "")
    branch.graph, branch.builder = importer.builder.graph, importer.builder
    return branch.call(module, list(args))


def _while_loop(importer: Importer, node: torch.fx.Node) -> Any:
    cond, body, carried, more = (importer.arg(a) for a in node.args[:4])
    b = importer.builder
    val = node.meta["val"]
    if any(not isinstance(c, Value) for c in carried):
        raise b.error("while_loop carries a Python number", "carry a 0-d tensor")
    types = [c.type for c in carried]
    for t, out in zip(types, _types(importer, val), strict=True):
        if (t.dtype, t.shape) != (out.dtype, out.shape):
            raise b.error(f"while_loop carries {t}, and the body makes it {out}", "keep sizes and dtypes the same")

    def test(inner: Branch, args: list[Any]) -> list[Any]:
        return inner.call(cond, args)

    def step(inner: Branch, args: list[Any]) -> list[Any]:
        return inner.call(body, args)

    return _result(val, loop(importer, list(carried), list(more), test, step))


def loop(importer: Importer, carried: list[Value], more: list[Any], test: Callable[[Branch, list[Any]], list[Any]],
         step: Callable[[Branch, list[Any]], list[Any]]) -> list[Value]:  # fmt: skip
    """A `while` node. test and step get (graph, [carried.., more..]) and return results."""
    b = importer.builder
    moving, places = _split(more)
    types = [c.type for c in carried]
    graphs = []
    for name, make, wanted in (("cond", test, [Type(DType.bool, ())]), ("body", step, types)):
        branch = Branch(importer, name)
        inner = [branch.input(v) for v in carried]
        stays = [branch.input(v) for v in moving]
        rest = [stays[p] if p >= 0 else a for a, p in zip(more, places, strict=True)]
        results = make(branch, inner + rest)
        if name == "cond":
            results = [branch.builder.reshape(r, ()) if isinstance(r, Value) else r for r in results]
        branch.returns(results, wanted)
        graphs.append(branch.graph)
    return b.graph.node("while", [*carried, *moving], types, While(len(carried)), b.loc, graphs=graphs)


# ---- loops over slices --------------------------------------------------------------------------------------------------
def _row(b: Builder, x: Value, i: Value) -> Value:
    """x[i] along the first axis, i being a 0-d i64 value."""
    return b.squeeze(b.gather(IndexKind.take, x, 0, b.reshape(i, (1,))), [0])


def _put(b: Builder, ys: Value, i: Value, y: Value) -> Value:
    """ys with ys[i] = y."""
    return b.scatter(IndexKind.take, ys, 0, b.reshape(i, (1,)), b.unsqueeze(y, 0))


def _less(b: Builder, i: Value, n: int | Dim) -> Value:
    e = Expr()
    return b.expression(e, e.load(i) < e.dim(n), DType.bool, ())


def _next(b: Builder, i: Value) -> Value:
    return b.map(lambda r: r + 1, [i], DType.i64)


def _scan(importer: Importer, node: torch.fx.Node) -> Any:
    """scan(f, init, xs, additional): (carry, y) = f(carry, x) for each slice x of xs; the carry and all y stacked."""
    f, init, xs, more = (importer.arg(a) for a in node.args[:4])
    b = importer.builder
    types = _types(importer, node.meta["val"])
    if not xs or any(not isinstance(v, Value) for v in [*init, *xs]):
        raise b.error("scan without a tensor to run over is not supported", "pass xs as tensors")
    count, length, n = len(init), len(xs), xs[0].shape[0]
    stacked = [b.full(t.shape, 0, t.dtype) for t in types[count:]]
    start = b.full((), 0, DType.i64)

    def test(inner: Branch, args: list[Any]) -> list[Any]:
        return [_less(inner.builder, args[0], n)]

    def step(inner: Branch, args: list[Any]) -> list[Any]:
        p = inner.builder
        i, carry, ys = args[0], args[1 : 1 + count], args[1 + count : 1 + count + len(stacked)]
        rest = args[1 + count + len(stacked) :]
        rows = [_row(p, x, i) for x in rest[:length]]
        out = inner.call(f, [*carry, *rows, *rest[length:]])
        put = [_put(p, y, i, p.cast(v, y.dtype)) for y, v in zip(ys, out[count:], strict=True)]
        return [_next(p, i), *out[:count], *put]

    carried = [start, *(b.cast(v, t.dtype) for v, t in zip(init, types[:count], strict=True)), *stacked]
    return tuple(loop(importer, carried, [*xs, *more], test, step)[1:])


def _map(importer: Importer, node: torch.fx.Node) -> Any:
    """map(f, xs, additional): f of each slice of xs, stacked."""
    f, xs, more = (importer.arg(a) for a in node.args[:3])
    b = importer.builder
    types = _types(importer, node.meta["val"])
    n = xs[0].shape[0]
    stacked = [b.full(t.shape, 0, t.dtype) for t in types]

    def test(inner: Branch, args: list[Any]) -> list[Any]:
        return [_less(inner.builder, args[0], n)]

    def step(inner: Branch, args: list[Any]) -> list[Any]:
        p = inner.builder
        i, ys, rest = args[0], args[1 : 1 + len(stacked)], args[1 + len(stacked) :]
        out = inner.call(f, [*(_row(p, x, i) for x in rest[: len(xs)]), *rest[len(xs) :]])
        return [_next(p, i), *(_put(p, y, i, p.cast(v, y.dtype)) for y, v in zip(ys, out, strict=True))]

    outs = loop(importer, [b.full((), 0, DType.i64), *stacked], [*xs, *more], test, step)[1:]
    return _result(node.meta["val"], outs)


def _associative_scan(importer: Importer, node: torch.fx.Node) -> Any:
    """y[0] = x[0]; y[t] = f(y[t-1], x[t])."""
    f, xs, more = (importer.arg(a) for a in node.args[:3])
    b = importer.builder
    n, k = xs[0].shape[0], len(xs)

    def test(inner: Branch, args: list[Any]) -> list[Any]:
        return [_less(inner.builder, args[0], n)]

    def step(inner: Branch, args: list[Any]) -> list[Any]:
        p = inner.builder
        i, ys, rest = args[0], args[1 : 1 + k], args[1 + k :]
        before = p.map(lambda r: r - 1, [i], DType.i64)
        out = inner.call(f, [*(_row(p, y, before) for y in ys), *(_row(p, x, i) for x in rest[:k]), *rest[k:]])
        return [_next(p, i), *(_put(p, y, i, v) for y, v in zip(ys, out, strict=True))]

    return tuple(loop(importer, [b.full((), 1, DType.i64), *xs], [*xs, *more], test, step)[1:])


def _inlined(skip: int) -> Callable[[Importer, torch.fx.Node], Any]:
    """wrap_with_*(.., function, *args): the function's nodes in place. skip: arguments before the function."""

    def run(importer: Importer, node: torch.fx.Node) -> Any:
        args = importer.arg(node.args)
        return _result(node.meta.get("val", ()), inline(importer, args[skip], args[skip + 1 :]))

    return run


def _autocast(importer: Importer, node: torch.fx.Node) -> Any:
    """wrap_with_autocast(device, dtype, enabled, cache, function, *args)."""
    if node.args[2]:
        raise Error("torch.autocast inside the model is not supported", remedy="cast tensors with .to() instead")
    return _inlined(4)(importer, node)


def _subgraph(importer: Importer, node: torch.fx.Node) -> Any:
    """invoke_subgraph(function, identifier, *args)."""
    args = importer.arg(node.args)
    return _result(node.meta.get("val", ()), inline(importer, args[0], args[2:]))


HANDLERS: dict[str, Callable[[Importer, torch.fx.Node], Any]] = {
    "cond": _cond,
    "while_loop": _while_loop,
    "scan": _scan,
    "map_impl": _map,
    "associative_scan": _associative_scan,
    "wrap_with_set_grad_enabled": _inlined(1),
    "wrap_with_autocast": _autocast,
    "invoke_subgraph": _subgraph,
}
