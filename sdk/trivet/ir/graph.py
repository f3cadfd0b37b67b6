"""The one IR: an SSA graph of values and nodes, from import to emit. Passes fill in fields; nothing changes dialect.

A Graph is one entry of a program. A Module is all entries with the constants and states that they share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from trivet.fbs.structs import DType
from trivet.ir.dim import INF, Dim, Shape
from trivet.ir.types import Quant, Type


@dataclass(frozen=True, slots=True)
class Loc:
    """Where a node comes from in the user's model: module path ("encoder.layers.0"), source ("model.py:12"), the original
    operator ("aten.conv2d.default").
    """

    module: str = ""
    source: str = ""
    origin: str = ""

    def __str__(self) -> str:
        return " ".join(t for t in (self.module, f"({self.source})" if self.source else "") if t)


@dataclass(slots=True, eq=False)
class Const:
    """Bytes of a weight or folded constant. data is a torch tensor of any strides; packed ones are 1-d."""

    name: str
    data: Any  # torch.Tensor; Any keeps torch out of the import


@dataclass(slots=True, eq=False)
class State:
    """A mutable buffer that survives runs; entries of a Module that name the same State share it."""

    name: str
    type: Type
    init: Any  # torch.Tensor, or None for zeros
    memory: str = ""  # as Value.memory


@dataclass(slots=True)
class Placement:
    """Where a value lies, filled by passes/assign_storage: a strided window of a root value's storage."""

    root: Value  # the value that owns the storage (itself when it is no view)
    offset: int | Dim  # elements from the root's first
    strides: Shape  # elements


@dataclass(slots=True, eq=False)
class Value:
    """One tensor. Exactly one of these holds: node is set (a node's output), it is a graph input, const, or state."""

    name: str
    type: Type
    node: Node | None = None
    index: int = 0  # which output of node
    const: Const | None = None
    state: State | None = None  # the state's content as the run begins
    order: tuple[int, ...] | None = None  # memory order of the axes, outermost first; None: row-major. Set by layout.
    placement: Placement | None = None
    memory: str = ""  # the delegate in whose own memory it lies, "" in the host's. Set by add_transfers.

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    @property
    def shape(self) -> Shape:
        return self.type.shape

    def __str__(self) -> str:
        return f"@{self.name}" if self.const is not None or self.state is not None else f"%{self.name}"

    __repr__ = __str__


@dataclass(slots=True, eq=False)
class Node:
    """One operation. op is a key of ir.ops.OPS, attrs the dataclass named there. An optional input that is not given is
    None. `if` and `while` carry graphs; their inputs are what the graphs' inputs are bound to.
    """

    op: str
    inputs: list[Value | None]
    outputs: list[Value]
    attrs: Any
    loc: Loc = Loc()
    graphs: list[Graph] = field(default_factory=list)
    delegate: str = ""  # set by partition
    reason: str = ""  # why it went there
    tmp: list[Value] = field(default_factory=list)  # scratch, set by select_kernels
    spare: list[Value] = field(default_factory=list)  # scratch of the CPU's alternative, for nodes of other delegates
    piece: int = (
        0  # nodes of one delegate and number are one part, set by order_nodes; the CPU's follow from the order alone
    )

    def __str__(self) -> str:
        from trivet.ir.text import print_node

        return print_node(self)


@dataclass(slots=True)
class Sym:
    """A dimension symbol. source: (input position, axis) whose size it is, or None: derived (solved: an expression over
    other symbols of inputs), or written by a node (nonzero, item).
    """

    name: str
    min: int = 0
    max: int = INF
    source: tuple[int, int] | None = None
    data: bool = False  # written while running
    solved: int | Dim | None = None  # e.g. floor_div(raw, 2), raw being a Sym with a source
    hint: int | None = None  # size in the example call


@dataclass(slots=True, eq=False)
class Graph:
    """One entry: nodes in execution order."""

    name: str
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    symbols: dict[str, Sym] = field(default_factory=dict)
    writes: list[tuple[State, Value]] = field(default_factory=list)  # at the end of a run, state := value
    signature: dict[str, Any] = field(
        default_factory=dict
    )  # argument structure and constants, see sdk/trivet/signature.py
    counter: int = 0
    plan: Any = None  # schedule.Plan: storages with times and offsets, set by assign_storage and plan_memory

    # -- building
    def value(self, type: Type, name: str = "") -> Value:
        """A new value with a free name."""
        self.counter += 1
        return Value(name or f"v{self.counter}", type)

    def node(self, op: str, inputs: list[Value | None], types: list[Type], attrs: Any, loc: Loc = Loc(), *,
             before: int | None = None, graphs: list[Graph] | None = None) -> list[Value]:  # fmt: skip
        """Makes a node at the end (or at position `before`); returns its outputs."""
        outs = [self.value(t) for t in types]
        n = Node(op, list(inputs), outs, attrs, loc, graphs or [])
        for i, o in enumerate(outs):
            o.node, o.index = n, i
        if before is None:
            self.nodes.append(n)
        else:
            self.nodes.insert(before, n)
        return outs

    def const(self, data: Any, name: str = "", quant: Quant | None = None) -> Value:
        """A constant from a torch tensor; quant: what its numbers stand for."""
        from trivet.ir.interop import dtype_of

        v = self.value(Type(dtype_of(data), tuple(int(d) for d in data.shape), quant), name)
        v.const = Const(v.name, data)
        return v

    # -- reading
    def uses(self) -> dict[Value, list[tuple[Node, int]]]:
        """For each value the nodes that read it, with the position. Graphs' outputs and writes are not in it."""
        out: dict[Value, list[tuple[Node, int]]] = {}
        for n in self.nodes:
            for i, v in enumerate(n.inputs):
                if v is not None:
                    out.setdefault(v, []).append((n, i))
        return out

    def values(self) -> Iterator[Value]:
        """Every value once: inputs, then in order of nodes (constants and states where first read)."""
        seen: set[Value] = set()
        for v in [*self.inputs, *(v for n in self.nodes for v in [*n.inputs, *n.outputs, *n.tmp, *n.spare]),
                  *self.outputs, *(v for _, v in self.writes)]:  # fmt: skip
            if v is not None and v not in seen:
                seen.add(v)
                yield v

    def replace(self, old: Value, new: Value) -> None:
        """Every reader of old reads new instead (nodes, outputs, state writes)."""
        for n in self.nodes:
            n.inputs = [new if v is old else v for v in n.inputs]
        self.outputs = [new if v is old else v for v in self.outputs]
        self.writes = [(s, new if v is old else v) for s, v in self.writes]

    def ranges(self) -> dict[str, tuple[int, int]]:
        """{symbol: (min, max)}, for ir.dim.bounds."""
        return {s.name: (s.min, s.max) for s in self.symbols.values()}


@dataclass(slots=True, eq=False)
class Module:
    """All entries of a program."""

    name: str
    entries: dict[str, Graph] = field(default_factory=dict)

    def __str__(self) -> str:
        from trivet.ir.text import print_module

        return print_module(self)
