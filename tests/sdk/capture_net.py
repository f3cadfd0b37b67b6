"""Runs what capture() makes with the reference evaluator, called like the model."""

from __future__ import annotations

import copy
import json
from typing import Any

import torch

from trivet.frontend import capture
from trivet.ir.evaluate import evaluate
from trivet.ir.graph import Graph, Module
from trivet.ir.verify import verify
from trivet.signature import Signature


class Net:
    """A captured module whose entries are methods; states survive calls."""

    def __init__(self, entries: dict[str, Any], shapes: dict[str, Any] | None = None) -> None:
        self.module: Module = capture(entries, shapes)
        verify(self.module, "capture")
        self.states: dict[Any, Any] = {}

    @property
    def graph(self) -> Graph:
        return next(iter(self.module.entries.values()))

    def ops(self) -> list[str]:
        return [n.op for n in self.graph.nodes]

    def call(self, entry: str, *args: Any, **kwargs: Any) -> Any:
        graph = self.module.entries[entry]
        signature = Signature.from_json(json.dumps(graph.signature))
        inputs = [torch.as_tensor(x) for x in signature.flatten_inputs(args, kwargs)]
        outs = [x.clone() for x in evaluate(graph, inputs, states=self.states)]
        numbers = {leaf["index"] for leaf in leaves(signature.result) if leaf["kind"] in ("int", "float", "bool")}
        return signature.unflatten_outputs([x.item() if i in numbers else x for i, x in enumerate(outs)])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call("forward", *args, **kwargs)


def leaves(tree: dict[str, Any]) -> list[dict[str, Any]]:
    return [tree] if "kind" in tree else [leaf for c in tree["c"] for leaf in leaves(c)]


def same(want: Any, got: Any, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    from torch.utils import _pytree as pytree

    w, ws = pytree.tree_flatten(want)
    g, gs = pytree.tree_flatten(got)
    assert ws == gs
    for a, b in zip(w, g, strict=True):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(b, a, rtol=rtol, atol=atol, equal_nan=True)
        else:
            assert type(a) is type(b) and a == b


def check_like_eager(model: torch.nn.Module, *calls: tuple[Any, ...], shapes: Any = None,
                     kwargs: dict[str, Any] | None = None) -> Net:  # fmt: skip
    """Exports with the first call; every call must give what eager gives."""
    model = model.eval()
    net = Net({"forward": (model, calls[0], kwargs)}, {"forward": shapes})
    eager = copy.deepcopy(model)
    for args in calls:
        with torch.no_grad():
            want = eager(*copy.deepcopy(args), **copy.deepcopy(kwargs or {}))
        same(want, net(*args, **(kwargs or {})))
    return net
