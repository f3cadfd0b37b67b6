"""The graph as a flat list of events, each with its time: kernels, and the branches and jumps of control flow.

Passes that think in lifetimes and the emitter share it, so they cannot disagree about time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from trivet.fbs.structs import RegionKind
from trivet.ir.dim import Dim
from trivet.ir.graph import Const, Graph, Node, State, Value
from trivet.ir.ops import OPS

DATA_OPS = ("nonzero", "item")  # they write dimensions


@dataclass(slots=True, eq=False)
class Event:
    """kernel: node runs. transfer: node copies between memories. branch: go on at `target` if value is false. jump: go on at
    `target`. target is a time.
    """

    kind: Literal["kernel", "transfer", "branch", "jump"]
    node: Node
    value: Value | None = None
    target: int = -1


@dataclass(slots=True)
class Loop:
    """Events first..last belong to a `while` node: its condition, branch, body, jump."""

    node: Node
    first: int
    last: int


@dataclass(slots=True)
class Choice:
    """An `if` node: branch at `branch`, then-part up to the jump at `jump`, else-part up to `last`."""

    node: Node
    branch: int
    jump: int
    last: int


@dataclass(slots=True)
class Schedule:
    events: list[Event] = field(default_factory=list)
    loops: list[Loop] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Storage:
    """A planned interval of memory. size: bytes, exact; bound: the bytes that are planned for; first, last: times."""

    root: Value
    kind: RegionKind
    size: int | Dim
    bound: int = 0
    unbounded: bool = False
    first: int = 0
    last: int = 0
    slot: int = -1  # IO: inputs, then outputs
    const: Const | None = None
    state: State | None = None
    owner: str = ""  # as Value.memory
    memory: int = 0  # row of the program's memories
    offset: int = 0
    rank: int = 0


@dataclass(slots=True)
class Plan:
    """What assign_storage and plan_memory decide for an entry."""

    storages: list[Storage] = field(default_factory=list)
    times: int = 0
    arena: dict[int, int] = field(default_factory=dict)  # memory: bytes
    lower_bound: int = 0
    memories: tuple[Any, ...] = ()  # targets.Memory by Storage.memory
    copies: int = 0  # copy commands that storage assignment had to leave in
    method: str = ""


@dataclass(slots=True)
class Run:
    """Kernels that one delegate does one after another: a part. first, last: their times. No branch or jump leads into it."""

    delegate: str
    first: int
    last: int
    nodes: list[Node] = field(default_factory=list)


def runs(events: list[Event]) -> list[Run]:
    """The parts of a schedule: neighbours of one delegate and, but on the CPU, one piece."""
    targets = {e.target for e in events if e.kind in ("branch", "jump")}
    out: list[Run] = []
    key: tuple[str, int] | None = None
    for t, e in enumerate(events):
        if e.kind != "kernel" or t in targets:
            key = None
        if e.kind != "kernel":
            continue
        delegate = e.node.delegate or "cpu"
        mine = (delegate, 0 if delegate == "cpu" else e.node.piece)
        if mine != key:
            out.append(Run(delegate, t, t))
        key = mine
        out[-1].nodes.append(e.node)
        out[-1].last = t
        if e.node.op in DATA_OPS:
            key = None
    return out


def is_kernel(node: Node) -> bool:
    """True for a node that becomes a command (views, concat and control flow do not)."""
    return OPS[node.op].kernel


def schedule(graph: Graph) -> Schedule:
    """Flattens a graph and the graphs in it. Nested graphs share no Value objects with each other."""
    out = Schedule()
    _flatten(graph, out)
    return out


def _flatten(graph: Graph, out: Schedule) -> None:
    events = out.events
    for node in graph.nodes:
        if node.op == "while":
            cond, body = node.graphs
            first = len(events)
            _flatten(cond, out)
            branch = Event("branch", node, cond.outputs[0])
            events.append(branch)
            _flatten(body, out)
            events.append(Event("jump", node, target=first))
            branch.target = len(events)
            out.loops.append(Loop(node, first, len(events) - 1))
        elif node.op == "if":
            then, other = node.graphs
            branch = Event("branch", node, node.inputs[0])
            at = len(events)
            events.append(branch)
            _flatten(then, out)
            jump = Event("jump", node)
            middle = len(events)
            events.append(jump)
            branch.target = len(events)
            _flatten(other, out)
            jump.target = len(events)
            out.choices.append(Choice(node, at, middle, len(events) - 1))
        elif is_kernel(node):
            events.append(Event("kernel", node))
        elif node.op == "transfer":
            events.append(Event("transfer", node))


def all_graphs(graph: Graph) -> list[Graph]:
    """The graph and all graphs nested in it, outer ones first."""
    out = [graph]
    for node in graph.nodes:
        for g in node.graphs:
            out += all_graphs(g)
    return out
