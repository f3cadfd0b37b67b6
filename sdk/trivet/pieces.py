"""What crosses the border of a part: found from readers and writers, with views looked through."""

from __future__ import annotations

from dataclasses import dataclass, field

from trivet.ir import ops
from trivet.ir.graph import Graph, Node, Value
from trivet.schedule import Run, all_graphs


@dataclass(slots=True)
class Border:
    """nodes: kernels of the part in order, with the concatenations that belong to it and the views between them; inputs, outputs: values that
    cross, constants not among them; constants: those that its kernels read; inner: results that nobody else sees.
    """

    nodes: list[Node] = field(default_factory=list)
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    constants: list[Value] = field(default_factory=list)
    inner: list[Value] = field(default_factory=list)


def base_of(v: Value) -> Value:
    """The value that v is a view of."""
    while v.node is not None and ops.OPS[v.node.op].view:
        x = v.node.inputs[0]
        assert x is not None
        v = x
    return v


class Borders:
    """Finds the borders of an entry's parts."""

    def __init__(self, entry: Graph) -> None:
        self.position: dict[Node, int] = {}
        self.readers: dict[Value, list[Node]] = {}  # of a base: kernels, concatenations, transfers, control flow
        self.ends: set[Value] = set()
        self.concats: dict[tuple[str, int], list[Node]] = {}
        for graph in all_graphs(entry):
            for node in graph.nodes:
                self.position[node] = len(self.position)
                if node.op == "concat":
                    self.concats.setdefault((node.delegate, node.piece), []).append(node)
                if ops.OPS[node.op].view:
                    continue
                for v in node.inputs:
                    if v is not None:
                        self.readers.setdefault(base_of(v), []).append(node)
            self.ends |= {base_of(v) for v in (*graph.outputs, *(v for _, v in graph.writes))}

    def of(self, run: Run) -> Border:
        """The border of a part."""
        inside: set[Node] = set(run.nodes)
        if run.delegate != "cpu":
            first, last = (self.position[run.nodes[i]] for i in (0, -1))
            near = self.concats.get((run.delegate, run.nodes[0].piece), ())
            inside |= {c for c in near if first <= self.position[c] <= last + 1 or self._fed(c, inside)}
        nodes = dict.fromkeys(inside)
        inputs: dict[Value, None] = {}
        constants: dict[Value, None] = {}
        for node in sorted(inside, key=self.position.__getitem__):
            for v in node.inputs:
                if v is None:
                    continue
                while v.node is not None and v.node not in inside and ops.OPS[v.node.op].view:
                    nodes[v.node] = None
                    x = v.node.inputs[0]
                    assert x is not None
                    v = x
                if v.const is not None:
                    constants[v] = None
                elif v.node is None or v.node not in inside:
                    inputs[v] = None
        out = Border(sorted(nodes, key=self.position.__getitem__), list(inputs), [], list(constants))
        for node in out.nodes:
            for v in node.outputs:
                if node not in inside:
                    out.inner.append(v)
                elif v in self.ends or any(r not in inside for r in self.readers.get(v, ())):
                    out.outputs.append(v)
                else:
                    out.inner.append(v)
        return out

    @staticmethod
    def _fed(concat: Node, inside: set[Node]) -> bool:
        """True if what the part's kernels make goes into the concatenation, all of it."""
        return all(v is not None and v.node in inside for v in concat.inputs)
