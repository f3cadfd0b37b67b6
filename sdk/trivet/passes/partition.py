"""Gives every kernel node to a delegate, with the reason."""

from __future__ import annotations

from trivet.error import Error
from trivet.ir.graph import Module
from trivet.pipeline import Context
from trivet.schedule import all_graphs, is_kernel
from trivet.targets.base import find


def partition(module: Module, ctx: Context) -> None:
    """Sets delegate and reason of every kernel node: the first target of the list that takes it."""
    targets = find(ctx.target if ctx.target is not None else "cpu")
    ctx.target = targets
    count: dict[str, int] = {}
    for entry in module.entries.values():
        for graph in all_graphs(entry):
            for node in graph.nodes:
                if not is_kernel(node):
                    continue
                refusals: list[str] = []
                for target in targets.all:
                    why = target.refuses(node)
                    if not why:
                        node.delegate = target.name
                        said = [node.reason] if node.reason else []  # by fold_qdq: why it is in float
                        node.reason = "; ".join(said + refusals) or "first choice"
                        break
                    refusals.append(f"{target}: {why}")
                else:
                    raise Error(f"no delegate takes {node.op} ({'; '.join(refusals)})", node=str(node.loc),
                                remedy=f"the target was {targets}")  # fmt: skip
                count[node.delegate] = count.get(node.delegate, 0) + 1
    for name, n in sorted(count.items()):
        ctx.report.note("partition", f"{name}: {n} nodes")
