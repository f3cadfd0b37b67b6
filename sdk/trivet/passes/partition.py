"""Gives every kernel node, and every concatenation, to a delegate, with the reason."""

from __future__ import annotations

from trivet.error import Error
from trivet.ir import ops
from trivet.ir.graph import Module, Node
from trivet.passes.assign_storage import hints
from trivet.pipeline import Context
from trivet.placement import Islands, Unit, work_of
from trivet.schedule import all_graphs, is_kernel
from trivet.targets.base import Target, Targets, find

ON_HOST = ("nonzero", "item")  # they give sizes, which the host needs
SHOWN = 8  # nodes that an error names


def partition(module: Module, ctx: Context) -> None:
    """Sets delegate and reason: of a pinned node the one it is pinned to; else the first target of the list that takes it, unless copies
    and handovers would cost more there than it saves (trivet.placement).
    """
    targets = find(ctx.target if ctx.target is not None else "cpu")
    ctx.target = targets
    pins = _Pins(ctx, targets)
    refused: list[str] = []
    count: dict[str, int] = {}
    for entry in module.entries.values():
        graphs = all_graphs(entry)
        env = hints(entry)
        for graph in graphs:
            units = [u for n in graph.nodes if (u := _unit(n, targets, pins, env)) is not None]
            refused += [f"{u.node.loc or u.node.op}: {u.refusals[0]}" for u in units if u.refusals and not u.pinned]
            if len(targets.all) > 1 and not ctx.options.strict:
                Islands(graph, units, targets, env).settle()
            for u in units:
                u.node.delegate = u.target.name
                said = [u.node.reason] if u.node.reason and is_kernel(u.node) else []  # by fold_qdq: why it is in float
                u.node.reason = "; ".join([*said, u.reason] if u.reason else [*said, *u.refusals]) or "first choice"
                if is_kernel(u.node):
                    count[u.target.name] = count.get(u.target.name, 0) + 1
    pins.check_used()
    if ctx.options.strict and refused:
        more = f", and {len(refused) - SHOWN} more" if len(refused) > SHOWN else ""
        raise Error(f"strict: {targets.all[0]} does not take {len(refused)} nodes: {', '.join(refused[:SHOWN])}{more}",
                    remedy="leave out strict, or pin them to another delegate with place=")  # fmt: skip
    for name, n in sorted(count.items()):
        ctx.report.note("partition", f"{name}: {n} nodes")


def _unit(node: Node, targets: Targets, pins: _Pins, env: dict[str, int]) -> Unit | None:
    if not is_kernel(node) and node.op != "concat":
        return None
    work = work_of(node, env)
    takes: list[Target] = []
    refusals: list[str] = []
    for target in targets.all:
        why = refusal(target, node)
        if why:
            refusals.append(f"{target}: {why}")
        else:
            takes.append(target)
    pin, path = pins.of(node)
    if pin is not None:
        if pin not in takes:
            why = next((r for r in refusals if r.startswith(f"{pin}:")), "it is refused")
            raise Error(f"{node.op} is pinned to {pin.name!r} by place={{{path!r}: {pin.name!r}}}, but {why}",
                        node=str(node.loc), remedy="pin a smaller part of the model, or another delegate")  # fmt: skip
        return Unit(node, work, [pin], refusals, pin, f"pinned by {path!r}", pinned=True)
    if not takes:
        raise Error(f"no delegate takes {node.op} ({'; '.join(refusals)})", node=str(node.loc),
                    remedy=f"the target was {targets}")  # fmt: skip
    first = targets.all.index(takes[0])
    return Unit(node, work, takes, refusals[:first], takes[0])


def refusal(target: Target, node: Node) -> str:
    """Why a target does not take a kernel or a concatenation."""
    if target.name == "cpu":
        return target.refuses(node) if is_kernel(node) else ""
    if node.op in ON_HOST:
        return f"{node.op} gives a size, which the host needs"
    if node.op == "concat" and not target.opaque:  # it becomes copies
        x = node.inputs[0]
        assert x is not None
        return target.refuses(Node("copy", [x], [node.outputs[0]], ops.Copy(), node.loc))
    return target.refuses(node)


class _Pins:
    """Manual placement by module path: the longest path that a node lies in wins."""

    def __init__(self, ctx: Context, targets: Targets) -> None:
        self.paths: dict[str, Target] = {}
        self.used: set[str] = set()
        names = [t.name for t in targets.all]
        for path, name in ctx.options.place.items():
            if name not in names:
                raise Error(f"place={{{path!r}: {name!r}}}: the target is {targets}, without {name!r}",
                            remedy=f"add it, for example target={f'{targets} > {name}'!r}")  # fmt: skip
            self.paths[path] = targets.named(name)

    def of(self, node: Node) -> tuple[Target | None, str]:
        """The delegate that a node is pinned to, and the path that says so."""
        best = None
        for module in node.loc.module.split(" + "):
            for path in self.paths:
                if path == "" or module == path or module.startswith(f"{path}."):
                    self.used.add(path)
                    if best is None or len(path) > len(best):
                        best = path
        return (None, "") if best is None else (self.paths[best], best)

    def check_used(self) -> None:
        left = [p for p in self.paths if p not in self.used]
        if left:
            raise Error(f"place= names {', '.join(map(repr, left))}, where no node of the model lies",
                        remedy="use module paths as print(trivet.capture(..)) or inspect shows them")  # fmt: skip
