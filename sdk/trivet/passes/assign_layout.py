"""Chooses the memory order of axes: images channels-last, everything else as it comes; copies only where orders meet.

Kernels take any strides, so this pass decides speed, never correctness.
"""

from __future__ import annotations

from math import prod

from trivet.constants import layout
from trivet.fbs.structs import NormKind
from trivet.ir import ops
from trivet.ir.dim import Shape
from trivet.ir.graph import Graph, Module, Node, Value
from trivet.pipeline import Context
from trivet.schedule import all_graphs
from trivet.views import apply, count, dense, memory_order, same_strides, unit_axis

FOLLOWS = ("reduce", "softmax", "pad", "scan", "norm", "scatter", "sort", "qreduce", "qsoftmax",
           "qnorm")  # the output lies as the input does  # fmt: skip
ELEMENTWISE = ("map", "binary", "requantize", "lookup")
CONVS = ("conv", "qconv")
IMAGES = ("pool", "resize", "grid_sample", "qpool", "qresize")
FEW_CHANNELS, FEW_TAPS = 4, 9
_PASS_ON = (*ELEMENTWISE, "pad", "concat", "pool", "resize", "qpool", "qresize")
DEPTH = 12  # how far a wish is passed on through elementwise nodes


def assign_layout(module: Module, ctx: Context) -> None:
    """Sets Value.order of kernel outputs, concatenations and results of control flow; puts copies before convolutions."""
    for name, graph in module.entries.items():
        work = _Layout()
        work.readers(graph)
        work.crossings(graph)
        work.graph(graph)
        ctx.report.note("assign_layout", f"{name}: {work.last} values channels-last, {work.copies} copies to get there")


def channels_last(rank: int) -> tuple[int, ...]:
    """N, spatial, C."""
    return (0, *range(2, rank), 1)


def foreign(node: Node) -> bool:
    """True for what another delegate than the CPU computes, and for transfers."""
    return node.delegate not in ("", "cpu") or node.op == "transfer"


def is_image_op(node: Node) -> bool:
    return node.op in (*CONVS, *IMAGES) or (node.op == "norm" and node.attrs.kind == NormKind.group)


class _Layout:
    def __init__(self) -> None:
        self.strides: dict[Value, Shape] = {}  # as far as known before storage is assigned
        self.uses: dict[Value, list[Node]] = {}
        self.wishes: dict[Value, bool] = {}
        self.plain: set[Value] = set()  # values that other delegates read: row-major
        self.copies = self.last = 0

    def readers(self, graph: Graph) -> None:
        for g in all_graphs(graph):
            for node in g.nodes:
                for v in node.inputs:
                    if v is not None:
                        self.uses.setdefault(v, []).append(node)

    def crossings(self, graph: Graph) -> None:
        """Finds what other delegates read, and what control flow around them carries: it stays row-major."""
        for g in all_graphs(graph):
            for node in g.nodes:
                if foreign(node):
                    for v in node.inputs:
                        while v is not None:
                            self.plain.add(v)
                            v = v.node.inputs[0] if v.node is not None and ops.OPS[v.node.op].view else None
                elif any(foreign(n) for sub in node.graphs for inner in all_graphs(sub) for n in inner.nodes):
                    self.plain |= {v for v in (*node.inputs, *node.outputs) if v is not None}
                    for sub in node.graphs:
                        self.plain |= {*sub.inputs, *sub.outputs}

    def of(self, v: Value) -> Shape:
        if v not in self.strides:
            self.strides[v] = layout(v.const.data)[1] if v.const is not None else dense(v.shape, v.order)
        return self.strides[v]

    def set(self, v: Value, order: tuple[int, ...] | None) -> None:
        if order is not None and same_strides(v.shape, dense(v.shape, order), dense(v.shape)):
            order = None
        v.order = order
        self.last += order is not None and len(order) > 2 and order == channels_last(len(order))
        self.strides[v] = dense(v.shape, order)

    def graph(self, graph: Graph) -> None:
        turned: dict[Value, Value] = {}
        for node in list(graph.nodes):
            if node.op in CONVS and not foreign(node):
                self._feed(graph, node, turned)
            if ops.OPS[node.op].view:
                x, y = node.inputs[0], node.outputs[0]
                assert x is not None
                window = apply(node, (0, self.of(x)))
                self.strides[y] = window[1] if window is not None else dense(y.shape)
            elif node.op in ("if", "while"):
                self._flow(node)
            else:
                for v in node.outputs:
                    self.set(v, None if foreign(node) or v in self.plain else self._order(node, v))

    def _feed(self, graph: Graph, node: Node, turned: dict[Value, Value]) -> None:
        """Puts a copy before a convolution whose input's channels do not lie side by side."""
        x, w = node.inputs[0], node.inputs[1]
        assert x is not None and w is not None
        if x.shape[1] == 1 or unit_axis(x.shape, self.of(x)) in (1, -1):
            return
        if isinstance(x.shape[1], int) and x.shape[1] <= FEW_CHANNELS and count(w.shape[2:]) in range(FEW_TAPS + 1):
            return  # the kernel gathers so few at no cost
        if x not in turned:
            at = next(i for i, n in enumerate(graph.nodes) if n is node)
            (y,) = graph.node("copy", [x], [x.type], ops.Copy(), node.loc, before=at)
            assert y.node is not None
            y.node.delegate, y.node.reason = node.delegate, "channels last for the convolution"
            self.set(y, channels_last(len(x.shape)))
            turned[x] = y
            self.copies += 1
        node.inputs[0] = turned[x]

    def _order(self, node: Node, out: Value) -> tuple[int, ...] | None:
        rank = len(out.shape)
        if rank < 3:
            return None
        if node.op in CONVS:
            return channels_last(rank)
        x = node.inputs[0] if node.inputs else None
        if is_image_op(node) and x is not None:
            if unit_axis(x.shape, self.of(x)) == 1 or self._wants(out, DEPTH):
                return channels_last(rank)
            return self._follow(x, out)
        if node.op in (*ELEMENTWISE, "concat"):
            return self._vote(node, out)
        if node.op in FOLLOWS and x is not None and len(x.shape) == rank:
            return self._follow(x, out)
        return None

    def _follow(self, x: Value, out: Value) -> tuple[int, ...] | None:
        if len(x.shape) != len(out.shape):
            return None
        strides = self.of(x)
        axes = [i for i, d in enumerate(x.shape) if d != 1]
        if any(not isinstance(strides[i], int) or strides[i] == 0 for i in axes):
            return memory_order(x.shape, strides)
        ranked = sorted(axes, key=lambda i: (-abs(int(str(strides[i]))), i))
        ones = [i for i, d in enumerate(x.shape) if d == 1]
        return tuple(ones + ranked)

    def _vote(self, node: Node, out: Value) -> tuple[int, ...] | None:
        votes: dict[tuple[int, ...] | None, int] = {}
        for v in node.inputs:
            if v is None or len(v.shape) != len(out.shape) or v.const is not None:
                continue
            if node.op in ELEMENTWISE and v.shape != out.shape:
                continue
            order = self._follow(v, out)
            if order is not None and same_strides(out.shape, dense(out.shape, order), dense(out.shape)):
                order = None
            votes[order] = votes.get(order, 0) + prod(d for d in v.shape if isinstance(d, int))
        last = channels_last(len(out.shape))
        if (not votes or None in votes) and self._wants(out, DEPTH):
            return last
        if not votes:
            return None
        return max(votes, key=lambda o: (votes[o], o is not None))

    def _wants(self, v: Value, depth: int) -> bool:
        """True if a convolution reads the value, maybe through elementwise nodes."""
        if v in self.wishes or depth == 0:
            return self.wishes.get(v, False)
        self.wishes[v] = False
        for node in self.uses.get(v, ()):
            if node.op in CONVS:
                wanted = node.inputs[0] is v and v.shape[1] != 1
            else:
                group = node.op == "norm" and node.attrs.kind == NormKind.group
                passes_on = group or node.op in _PASS_ON
                wanted = (
                    passes_on and node.outputs[0].type.rank == v.type.rank and self._wants(node.outputs[0], depth - 1)
                )
            self.wishes[v] = self.wishes[v] or wanted
        return self.wishes[v]

    def _flow(self, node: Node) -> None:
        skip = 1 if node.op == "if" else 0
        for g in node.graphs:
            for inner, outer in zip(g.inputs, node.inputs[skip:], strict=True):
                assert outer is not None
                self.strides[inner] = self.of(outer)
            self.graph(g)
        for i, v in enumerate(node.outputs):
            source = node.inputs[i] if node.op == "while" else node.graphs[0].outputs[i]
            assert source is not None
            self.set(v, None if v in self.plain else memory_order(source.shape, self.of(source)))
            if node.op == "while":
                for g in node.graphs:
                    self.strides[g.inputs[i]] = self.of(v)
