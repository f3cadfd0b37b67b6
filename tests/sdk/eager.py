"""Compares what the importer makes of a function with what eager torch gives, by the reference evaluator."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree


class Wrap(torch.nn.Module):
    """A function as a module."""

    def __init__(self, f: Any) -> None:
        super().__init__()
        self.f = f

    def forward(self, *args: Any) -> Any:
        return self.f(*args)


def capture(f: Any, *args: Any, dynamic_shapes: Any = None) -> Any:
    """The IR graph of a function or module."""
    from trivet.frontend import capture as run

    module = f if isinstance(f, torch.nn.Module) else Wrap(f)
    shapes = dynamic_shapes
    if shapes is not None and not isinstance(f, torch.nn.Module):
        shapes = (tuple(dynamic_shapes),)
    return run({"forward": (module.eval(), args)}, {"forward": shapes} if shapes is not None else None).entries[
        "forward"
    ]


def evaluate(graph: Any, args: Any) -> list[Any]:
    """All results, tensors only."""
    from trivet.ir.evaluate import evaluate as run
    from trivet.ir.graph import Module
    from trivet.ir.verify import verify

    verify(Module("test", {graph.name: graph}))
    return run(graph, [a.clone() for a in pytree.tree_leaves(args) if isinstance(a, torch.Tensor)])


def check(
    f: Any, *args: Any, more: Any = (), dynamic_shapes: Any = None, rtol: float = 1e-4, atol: float = 1e-5
) -> Any:
    """Eager and IR agree on args and on every tuple of `more`. Returns the graph."""
    graph = capture(f, *args, dynamic_shapes=dynamic_shapes)
    for call in (args, *more):
        with torch.no_grad():
            want = pytree.tree_leaves(f(*[a.clone() if isinstance(a, torch.Tensor) else a for a in call]))
        got = evaluate(graph, call)
        slots = iter(_order(graph))
        for i, w in enumerate(want):
            if not isinstance(w, torch.Tensor):
                continue
            g = got[next(slots)]
            assert g.dtype == w.dtype, f"output {i}: {g.dtype}, want {w.dtype}"
            assert g.shape == w.shape, f"output {i}: {tuple(g.shape)}, want {tuple(w.shape)}"
            half = w.dtype in (torch.float16, torch.bfloat16)
            tol = {"rtol": max(rtol, 2e-2 if w.dtype == torch.bfloat16 else 2e-3), "atol": max(atol, 2e-3)} if half else {
                "rtol": rtol, "atol": atol}  # fmt: skip
            torch.testing.assert_close(g, w, equal_nan=True, msg=lambda m, i=i: f"output {i}: {m}", **tol)
    return graph


def _order(graph: Any) -> list[int]:
    """Slots of the tensor leaves of the result, in order."""
    out: list[int] = []

    def walk(t: Any) -> None:
        if isinstance(t, dict):
            if "index" in t:
                out.append(t["index"])
                return
            for v in t.values():
                walk(v)
        elif isinstance(t, (list, tuple)):
            for v in t:
                walk(v)

    walk(graph.signature["result"])
    return out
