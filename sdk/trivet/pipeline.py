"""The passes between capture and the file: one tuple, the verifier after each, --dump-after."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from time import perf_counter
from typing import Any

from trivet.error import Error
from trivet.ir.graph import Graph, Loc, Module
from trivet.ir.verify import verify

PASSES: tuple[str, ...] = (
    "canonicalize",
    "fold_constants",
    "fuse_pad",
    "fuse_norm",
    "fuse_attention",
    "fuse_rotary",
    "fold_batch_norm",
    "fuse_elementwise",
    "fuse_activation",
    "fold_qdq",
    "merge_products",
    "fuse_epilogues",
    "narrow_floats",
    "partition",
    "add_transfers",
    "assign_layout",
    "choose_winograd",
    "select_kernels",
    "pack_weights",
    "order_nodes",
    "assign_storage",
    "plan_memory",
)  # fmt: skip
Pass = Callable[[Module, "Context"], None]


@dataclass(slots=True)
class Options:
    """What the caller may choose. dump_after: passes whose result goes to stderr as text. skip: passes left out, to find the
    one that goes wrong (only those up to fuse_elementwise, and choose_winograd, can be).
    """

    dump_after: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    verify: bool = True
    memories: tuple[Any, ...] = ()  # trivet.targets.Memory with budgets, fastest first; (): those of the target
    fold_limit: int = 64 << 20  # bytes that a folded constant may have beyond its operands
    quantize_io: bool = False  # inputs and outputs that are only quantised or made real are stored integers themselves
    place: Mapping[str, str] = field(default_factory=dict)  # module path: delegate that its nodes go to
    strict: bool = False  # what the first target refuses is an error
    fallback: bool | None = None  # parts of other delegates have an alternative for the CPU; None: unless strict
    device_io: tuple[str, ...] | bool = (
        False  # inputs and outputs (all: True) that lie in the memory of who reads or writes them
    )
    half: Any = None  # trivet.Recipe with half set: what narrow_floats does; None: nothing


@dataclass(frozen=True, slots=True)
class Folded:
    """What one kernel of a quantised model computes on. name: of its value; form: "integer", "weights" (real activations times
    stored weights) or "float"; why: for "float", the reason.
    """

    name: str
    loc: Loc
    op: str
    form: str
    why: str = ""


@dataclass(slots=True)
class Report:
    """What the passes did, for inspection. notes: lines of text per pass; seconds: time per pass; quant: of a quantised model,
    its kernels in order.
    """

    notes: dict[str, list[str]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    quant: list[Folded] = field(default_factory=list)

    def note(self, name: str, text: str) -> None:
        """Adds a line under a pass."""
        self.notes.setdefault(name, []).append(text)


@dataclass(slots=True)
class Context:
    """What a pass may ask. target: the AOT half of the delegates (trivet.targets.base.Target), None in pass tests."""

    target: Any = None
    options: Options = field(default_factory=Options)
    report: Report = field(default_factory=Report)

    @property
    def fallback(self) -> bool:
        """Whether parts of other delegates than the CPU have an alternative for it."""
        o = self.options
        return not o.strict if o.fallback is None else o.fallback


def find_pass(name: str) -> Pass:
    """The function of a pass."""
    if name not in PASSES:
        raise Error(f"there is no pass {name!r}", remedy=f"the passes are: {', '.join(PASSES)}")
    run: Pass = getattr(import_module(f"trivet.passes.{name}"), name)
    return run


def run_passes(module: Module, context: Context, passes: tuple[str, ...] = PASSES) -> None:
    """Runs passes in order, in place; the module is verified before the first and after each."""
    options = context.options
    for name in (*options.dump_after, *options.skip):
        find_pass(name)
    name_values(module)
    if options.verify:
        verify(module, "capture")
    for name in passes:
        if name in options.skip:
            continue
        run = find_pass(name)
        begin = perf_counter()
        run(module, context)
        name_values(module)
        context.report.seconds[name] = context.report.seconds.get(name, 0.0) + perf_counter() - begin
        if options.verify:
            verify(module, name)
        if name in options.dump_after:
            sys.stderr.write(f"# after {name}\n{module}\n")


def name_values(module: Module) -> None:
    """Gives values, constants and states names of their own where two share one, or where it cannot be written."""
    shared: dict[str, object] = {}
    for graph in module.entries.values():
        _name_values(graph, shared)


def _name_values(graph: Graph, shared: dict[str, object]) -> None:
    taken: dict[str, object] = {}

    def free(name: str, owner: object, table: dict[str, object]) -> str:
        name = "".join(c if c.isalnum() or c in "._" else "_" for c in name) or "v"
        unique, n = name, 1
        while table.setdefault(unique, owner) is not owner:
            unique, n = f"{name}_{n}", n + 1
        return unique

    for v in graph.values():
        if v.const is not None:
            v.name = v.const.name = free(v.const.name, v.const, shared)
        elif v.state is not None:
            v.name = v.state.name = free(v.state.name, v.state, shared)
        else:
            v.name = free(v.name, v, taken)
    for s, _ in graph.writes:
        s.name = free(s.name, s, shared)
    for n in graph.nodes:
        for sub in n.graphs:
            _name_values(sub, shared)
