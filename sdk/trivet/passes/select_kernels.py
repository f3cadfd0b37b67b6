"""Fits nodes to the kernels of their delegate: scratch memory, so that it is part of the plan."""

from __future__ import annotations

from trivet.fbs.structs import DType
from trivet.ir.graph import Graph, Module, Node, Value
from trivet.ir.types import Type
from trivet.pipeline import Context
from trivet.schedule import all_graphs, is_kernel
from trivet.targets.base import Target, Targets, find


def select_kernels(module: Module, ctx: Context) -> None:
    """Sets Node.tmp: one u8 value for each piece of scratch that the node's kernel asks for; Node.spare: the same for the CPU's kernel
    where it is an alternative.
    """
    targets = find(ctx.target if ctx.target is not None else "cpu")
    total = 0
    for entry in module.entries.values():
        for graph in all_graphs(entry):
            for node in graph.nodes:
                if is_kernel(node):
                    give_scratch(entry, node, targets)
                    if node.delegate not in ("", "cpu") and ctx.fallback:
                        node.spare = _scratch(entry, node, targets.named("cpu"))
                    total += len(node.tmp) + len(node.spare)
    if total:
        ctx.report.note("select_kernels", f"{total} pieces of scratch")


def give_scratch(entry: Graph, node: Node, targets: Targets) -> None:
    """Sets one node's scratch, anew if it had some."""
    node.tmp = _scratch(entry, node, targets.named(node.delegate or "cpu"))


def _scratch(entry: Graph, node: Node, target: Target) -> list[Value]:
    out = []
    for n in target.scratch(node):
        entry.counter += 1
        out.append(Value(f"tmp{entry.counter}", Type(DType.u8, (n,)), node, -1, memory=target.owns))
    return out
