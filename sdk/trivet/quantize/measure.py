"""Signal-to-quantisation-noise ratios, operator by operator: the float graph and the quantised graph side by side.

Both are torch.fx graphs of the same export, so that operators go by the same names; the quantised one has
quantize and dequantize operators in between. `sqnr` lets the noise of all layers run through the network; `alone` gives every
layer the float values as inputs (quantised as the graph says), so that it shows what this layer itself loses.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from trivet.importer import location
from trivet.quantize.fxgraph import set_state, state, target
from trivet.quantize.report import decibel, op_text

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node


CHEAP = 1 << 33  # elements of all values, times operators: some 20 s
ACTIVATIONS = frozenset(f"aten.{n}" for n in ("relu", "relu6", "hardtanh", "clamp", "clamp_min", "clamp_max", "leaky_relu", "sigmoid", "tanh",
                                              "silu", "gelu", "hardswish", "hardsigmoid", "mish", "elu"))  # fmt: skip


@dataclass(slots=True)
class Measured:
    """One operator. name, twin: of the node in the quantised graph and in the float one; module, source, op, why as of report.Layer;
    sqnr, alone: dB.
    """

    entry: str
    name: str
    module: str
    source: str
    op: str
    sqnr: float | None = None
    alone: float | None = None
    why: str = ""
    twin: str = ""


def _powers(wanted: torch.Tensor, got: torch.Tensor) -> tuple[float, float]:
    """Sums of squares of the signal and of the noise: products in f32, sums in f64."""
    a, d = wanted.detach().float().flatten(), (wanted.detach() - got.detach()).float().flatten()
    return float((a * a).sum(dtype=torch.float64)), float((d * d).sum(dtype=torch.float64))


def is_store(node: Node) -> bool:
    """A quantize, dequantize or choose_qparams operator."""
    return node.op == "call_function" and op_text(str(node.target)) == "quantize"


@torch.no_grad()
def measure(
    reference: GraphModule,
    quantised: GraphModule,
    batches: Iterable[tuple[tuple[Any, ...], Mapping[str, Any]]],
    *,
    names: Mapping[str, str] | None = None,
    why: Mapping[str, str] | None = None,
    entry: str = "forward",
    alone: bool = True,
) -> list[Measured]:
    """Runs both graphs on the batches.

    Args:
        reference: in float.
        quantised: after convert.
        batches: (args, kwargs) each.
        names: node of the quantised graph: node of the reference, where they differ.
        why: node of the reference: why it stays float.
        entry: for the rows.
        alone: measure single operators too (one more run of the quantised graph per batch).

    Returns:
        A row per float operator that both graphs have, in order of execution.
    """
    pairs = _pairs(reference, quantised, names)
    power: dict[str, list[list[float]]] = {}

    def add(which: int, name: str, wanted: Any, got: Any) -> None:
        if not isinstance(wanted, torch.Tensor) or not isinstance(got, torch.Tensor):
            return
        if not wanted.is_floating_point() or wanted.shape != got.shape:
            return
        sums = power.setdefault(name, [[0.0, 0.0, 0], [0.0, 0.0, 0]])[which]
        for i, p in enumerate(_powers(wanted, got)):
            sums[i] += p
        sums[2] += 1

    # Both graphs may write the same buffers of the model: each goes on from its own content, all have the first one back.
    states = [state(reference), state(quantised)]
    first = state(reference), state(quantised)
    for args, kwargs in batches:
        flat = pytree.tree_leaves((args, dict(kwargs)))
        set_state(reference, states[0])
        floats = _values(reference, flat, set(pairs.values()))
        after = state(reference)
        for replace in (False, True) if alone else (False,):
            set_state(quantised, states[0] if replace else states[1])
            run = _Compare(quantised, pairs, floats, partial(add, int(replace)), replace=replace)
            run.run(*flat, enable_io_processing=False)
            if not replace:
                states[1] = state(quantised)
        states[0] = after
    set_state(reference, first[0])
    set_state(quantised, first[1])
    rows = []
    for n in quantised.graph.nodes:
        if n.name in power or pairs.get(n.name) in (why or {}):
            loc = location(n.args[0] if n.target is operator.getitem else n)
            whole, single = [
                decibel(a, b) if count else None for a, b, count in power.get(n.name, ((0.0, 0.0, 0),) * 2)
            ]
            reason = (why or {}).get(pairs[n.name], "")
            rows.append(
                Measured(
                    entry, n.name, loc.module, loc.source, op_text(loc.origin), whole, single, reason, pairs[n.name]
                )
            )
    return rows


@torch.no_grad()
def effects(
    reference: GraphModule,
    quantised: GraphModule,
    batch: tuple[tuple[Any, ...], Mapping[str, Any]],
    *,
    names: Mapping[str, str] | None = None,
) -> dict[str, float]:
    """What the results of the program lose by each operator: dB of all results when only that one is quantised.

    The float graph runs again behind every operator, so that this is done only where it is cheap (see CHEAP). What one call leaves
    in buffers is not looked at.

    Args:
        reference, quantised, names: as of measure.
        batch: one call.

    Returns:
        {node of the reference: dB}; empty where it is not cheap.
    """
    pairs = _pairs(reference, quantised, names)
    nodes = list(reference.graph.nodes)
    first = state(reference), state(quantised)
    flat = pytree.tree_leaves((batch[0], dict(batch[1])))
    values = _values(reference, flat, {n.name for n in nodes})
    made = [values[n.name] for n in nodes if n.op == "call_function"]
    elements = sum(t.numel() for t in pytree.tree_leaves(made) if isinstance(t, torch.Tensor))
    out: dict[str, float] = {}
    if elements * len(pairs) <= CHEAP:
        run = torch.fx.Interpreter(reference, graph=reference.graph)

        def found(name: str, wanted: Any, got: Any) -> None:
            if isinstance(got, torch.Tensor) and got.is_floating_point():
                out[pairs[name]] = _behind(run, nodes, values, pairs[name], got)

        set_state(reference, first[0])
        _Compare(quantised, pairs, values, found, replace=True).run(*flat, enable_io_processing=False)
    set_state(reference, first[0])
    set_state(quantised, first[1])
    return out


def _behind(
    run: torch.fx.Interpreter, nodes: Sequence[Node], values: Mapping[str, Any], name: str, got: torch.Tensor
) -> float:
    """dB of the results with one node's value replaced."""
    changed: dict[str, Any] = {name: got}
    powers = [0.0, 0.0]
    for n in nodes:
        if n.name in changed or not any(a.name in changed for a in n.all_input_nodes):
            continue
        if n.op == "output":
            for a in dict.fromkeys(n.all_input_nodes):
                if a.name in changed and isinstance(changed[a.name], torch.Tensor):
                    powers = [x + y for x, y in zip(powers, _powers(values[a.name], changed[a.name]), strict=True)]
        elif target(n) == "aten.copy_":  # a buffer, which stays as it is
            changed[n.name] = values[n.name]
        else:
            args, kwargs = torch.fx.node.map_arg((n.args, n.kwargs), lambda a: changed.get(a.name, values[a.name]))
            changed[n.name] = getattr(run, n.op)(n.target, args, kwargs)
    return decibel(*powers)


def _pairs(reference: GraphModule, quantised: GraphModule, names: Mapping[str, str] | None) -> dict[str, str]:
    """{node of the quantised graph: the same operator's in the float one}."""
    known = {n.name for n in reference.graph.nodes if n.op == "call_function"}
    out = {}
    for n in quantised.graph.nodes:
        twin = (names or {}).get(n.name, n.name)
        if n.op == "call_function" and not is_store(n) and twin in known:
            out[n.name] = twin
    return out


def _values(module: GraphModule, flat: Sequence[Any], wanted: set[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}

    class Keep(torch.fx.Interpreter):
        def run_node(self, n: Node) -> Any:
            out = super().run_node(n)
            if n.name in wanted:
                values[n.name] = out
            return out

    Keep(module, graph=module.graph).run(*flat, enable_io_processing=False)
    return values


class _Compare(torch.fx.Interpreter):
    """Runs the quantised graph and shows found(name, float value, value as stored) for every paired operator.

    replace: afterwards the operator gives the float value, so that its readers start from what is right; but not in front of an
        activation function, which is part of the same layer.
    """

    def __init__(self, module: GraphModule, pairs: Mapping[str, str], floats: Mapping[str, Any],
                 found: Callable[[str, Any, Any], None], *, replace: bool) -> None:  # fmt: skip
        super().__init__(module, graph=module.graph)
        self.pairs, self.floats, self.found, self.replace = pairs, floats, found, replace

    def run_node(self, n: Node) -> Any:
        out = super().run_node(n)
        twin = self.pairs.get(n.name)
        if twin is None or twin not in self.floats:
            return out
        wanted = self.floats[twin]
        self.found(n.name, wanted, self._stored(n, out))
        return wanted if self.replace and not self._goes_on(n) else out

    @staticmethod
    def _goes_on(n: Node) -> bool:
        users = list(n.users)
        return len(users) == 1 and target(users[0]) in ACTIVATIONS and target(n) not in ACTIVATIONS

    def _stored(self, n: Node, out: Any) -> Any:
        """out as the readers see it: through quantize and dequantize, where all of them read it so."""
        readers = list(n.users)
        if not readers or not isinstance(out, torch.Tensor):
            return out
        store = readers[0]
        if not all(is_store(r) for r in readers) or "dequantize" in str(store.target) or store.args[0] is not n:
            return out
        load = next((r for r in store.users if is_store(r) and r.args[0] is store), None)
        if load is None or any(
            isinstance(a, torch.fx.Node) and a not in self.env for a in (*store.args, *load.args) if a not in (n, store)
        ):
            return out
        q = self._call(store, out)
        return self._call(load, q)

    def _call(self, node: Node, first: Any) -> Any:
        rest = torch.fx.node.map_arg(node.args[1:], lambda a: self.env[a])
        return node.target(first, *rest, **node.kwargs)  # type: ignore[operator]
