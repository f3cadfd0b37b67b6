"""Says which values of a graph are stored as integers: our Quantizer for torchao's pt2e.

A value is stored when an integer operator reads it. Products (conv, linear, matmul, rnn) are integer wherever recipe and target
allow it; all other operators only where an integer operator reads their result, so that what leads to float operators and to results of
the program stays float. Ranges are observed behind batch norm and clamps, never between them and their product.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from trivet.quantize import kinds, observe
from trivet.quantize.fxgraph import DROPOUTS, argument, inputs, is_real, place, target, value, written
from trivet.quantize.kinds import ELEMENTWISE, Role
from trivet.quantize.recipe import W8, Recipe, Spec
from trivet.targets.base import Integer

from torchao.quantization.pt2e.quantizer import (  # isort: skip  # observe has imported torchao quietly
    QuantizationAnnotation,
    QuantizationSpecBase,
    Quantizer,
    SharedQuantizationSpec,
)

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

PRODUCTS = ("conv", "conv_transpose", "linear", "matmul", "rnn")
FUSED = ("conv", "conv_transpose", "linear", "matmul")  # they take a clamp as their epilogue
MOVED = ("move", "max", "resize")  # the result has the scale of the input
ANNOTATION = "quantization_annotation"


@dataclass(slots=True)
class Step:
    """An operator that may become integer, with what is fused to it.

    Attributes:
        role: what it is and reads.
        node: the operator; of a map: the last one of the expression.
        readers: (value, node that reads it), of stored inputs.
        tails: nodes whose results are the step's: behind a fused clamp, the results of a node with several.
        activation: Spec of stored inputs, None: they stay float (weight only, or rows while running).
        weight: Spec of the weights, None without.
        rows: Spec of rows, quantised while running.
        integer: decided.
        why: reason for not integer.
    """

    role: Role
    node: Node
    readers: list[tuple[Node, Node]]
    tails: list[Node]
    activation: Spec | None = None
    weight: Spec | None = None
    rows: Spec | None = None
    integer: bool = False
    why: str = ""

    @property
    def kind(self) -> str:
        return self.role.kind


@dataclass(slots=True)
class Plan:
    """Decisions for a graph.

    Attributes:
        steps: in order of execution.
        wants: stored values: (reader, how it wants the value stored), the reader None for a result of the program.
        why: for operators that stay float: node name -> reason.
    """

    steps: list[Step] = field(default_factory=list)
    wants: dict[Node, list[tuple[Node | None, QuantizationSpecBase]]] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        return not any(s.integer or s.rows or s.weight for s in self.steps)


class Annotator(Quantizer):  # type: ignore[misc]
    """Args:
    recipe: of the model.
    table: Target.integer().
    qat: fake quantisation for training in place of observers.
    """

    def __init__(self, recipe: Recipe, table: Mapping[str, Integer], *, qat: bool = False) -> None:
        super().__init__()
        self.recipe, self.table, self.qat = recipe, table, qat
        self.plan = Plan()

    def annotate(self, model: GraphModule) -> GraphModule:
        """Decides, and marks the nodes for torchao."""
        self.plan = Planner(model, self.recipe, self.table, qat=self.qat).plan(results=self.recipe.quantize_io)
        if self.recipe.static and not any(s.integer for s in self.plan.steps):
            # Nothing but light work: then that is what there is to quantise.
            self.plan = Planner(model, self.recipe, self.table, qat=self.qat).plan(results=True)
        _mark(self.plan, self.qat)
        return model

    def validate(self, model: GraphModule) -> None:
        """The plan is right by construction."""


class Planner:
    """Finds the steps of a graph and decides about them."""

    def __init__(self, module: GraphModule, recipe: Recipe, table: Mapping[str, Integer], *, qat: bool = False) -> None:
        self.module, self.recipe, self.table, self.qat = module, recipe, table, qat
        self.nodes: list[Node] = list(module.graph.nodes)
        self.state = written(module)
        self.constants = self._constants()
        self.fused: set[Node] = set()
        self.why: dict[str, str] = {}

    def plan(self, *, results: bool) -> Plan:
        """results: whether results of the program are stored too, where integer operators can make them."""
        roles = {
            n: r for n in self.nodes if n.op == "call_function" if (r := kinds.role(n, self.is_constant)) is not None
        }
        tails = {n: self._tail(n) for n, r in roles.items() if r.kind in FUSED}
        roots, inside = self._regions(roles)
        tails |= {n: self._tail(n) for n, r in roles.items() if r.kind == "binary" and n not in roots}
        steps = []
        for n in self.nodes:
            if n in roles and n not in self.fused and n not in inside:
                steps.append(self._step(n, roles[n], tails.get(n, n), roots))
        born = self._born(steps)
        plan = Plan(steps, {}, self.why)
        if results:
            for v in inputs(self.nodes[-1]):
                if is_real(v) and not self.is_constant(v) and v in born:
                    plan.wants.setdefault(v, []).append((None, self._spec(self.recipe.activation)))
        for step in reversed(steps):
            self._decide(step, plan)
        self._reasons(plan, roles, inside)
        return plan

    # -- constants
    def _constants(self) -> set[Node]:
        found: set[Node] = set()
        for n in self.nodes:
            if n.op == "get_attr":
                if str(n.target) not in self.state and isinstance(value(n), torch.Tensor):
                    found.add(n)
            elif n.op == "call_function":
                read = list(inputs(n))
                if read and all(x in found for x in read) and not target(n).endswith("_"):
                    found.add(n)
        return found

    def is_constant(self, n: Any) -> bool:
        """Whether a node's value is the same in every run."""
        return n in self.constants

    # -- fusing
    def _tail(self, n: Node) -> Node:
        """The node behind what becomes n's epilogue: batch norm while training, and one clamp."""
        last = n
        if self.qat:
            user = _only_user(last)
            if user is not None and target(user) == "aten.batch_norm" and user.args[0] is last:
                self.fused.add(user)
                last = user
        user = _only_user(last)
        if user is not None and kinds.bounds(user) is not None and self._recipe(user, "clamp") is not None:
            self.fused.add(user)
            last = user
        return last

    def _regions(self, roles: Mapping[Node, Role]) -> tuple[dict[Node, Node], set[Node]]:
        """Elementwise work that depends on one value only: {node: that value}, and the nodes whose results nothing outside reads."""
        members = [n for n, r in roles.items() if target(n) in ELEMENTWISE and r.kind in ("map", "clamp", "binary")
                   and n not in self.fused and self._maps(n)]  # fmt: skip
        borders: set[Node] = set()
        while True:
            roots: dict[Node, Node] = {}
            for n in members:
                sources = {roots[x] if x in roots and x not in borders else x for x in roles[n].activations}
                if len(sources) == 1 and not self.is_constant(source := sources.pop()):
                    roots[n] = source
            more = {n for n in roots if n not in borders and any(roots.get(u) is not roots[n] for u in n.users)}
            if not more:
                return roots, set(roots) - borders
            borders |= more

    def _maps(self, n: Node) -> bool:
        """Whether a table can stand for the node."""
        r = self._recipe(n, "map")
        dtypes = self.table.get("map", Integer()).activations
        return r is not None and r.static and r.activation is not None and r.activation.dtype in dtypes

    # -- steps
    def _recipe(self, n: Node, kind: str) -> Recipe | None:
        return self.recipe.at(place(n)[0], kind, n.name)

    def _step(self, n: Node, role: Role, tail: Node, roots: Mapping[Node, Node]) -> Step:
        if n in roots:
            role = Role("map", (roots[n],))
            step = Step(role, n, [_behind(roots[n], m) for m in self._members(n, roots)], [n])
        else:
            step = Step(role, n, [_behind(x, n) for x in dict.fromkeys(role.activations)], [tail])
        if isinstance(value(n), (list, tuple)):
            several = role.kind == "move"  # split; else the first result is the values
            step.tails = [u for u in n.users if target(u) == "getitem" and (several or u.args[1] == 0)]
        r = self._recipe(n, role.kind)
        cap = self.table.get(role.kind)
        if r is None or cap is None:
            step.why = "the recipe says so" if r is None else f"the target has no integer form of {role.kind}"
            return step
        if cap.weights and r.weight is not None:
            step.weight = self._weight(r.weight, role, cap)
        if r.static:
            assert r.activation is not None
            if r.activation.dtype == "i8" and _is_square(n):
                step.why = "a square has twice the range: in 8 bits its small values would be lost"
                return step
            if r.activation.dtype in cap.activations:
                step.activation = r.activation
                return step
            step.why = f"the target has no integer form of {role.kind} with {r.activation.dtype} activations"
        elif r.activation is not None and cap.dynamic and role.kind == "linear":
            step.rows = r.activation
        if not cap.weight_only:
            step.weight = None
        only = "weights only" if r.activation is None else "weights, and rows of linear layers"
        step.why = step.why or f"the recipe quantises {only}"
        return step

    def _members(self, n: Node, roots: Mapping[Node, Node]) -> list[Node]:
        """Nodes of the expression that ends in n which read its source."""
        seen, todo = {n}, [n]
        while todo:
            for x in inputs(todo.pop()):
                if x is not roots[n] and roots.get(x) is roots[n] and x not in seen:
                    seen.add(x)
                    todo.append(x)
        return [m for m in self.nodes if m in seen and any(x is roots[n] for x in inputs(m))]

    def _weight(self, s: Spec, role: Role, cap: Integer) -> Spec:
        """What the target has: 4 bits and groups only where it takes them."""
        groups = cap.groups and role.kind != "rnn"
        if s.dtype not in cap.weights or (s.group and not groups):
            return W8
        return s

    # -- decisions
    def _born(self, steps: Sequence[Step]) -> set[Node]:
        """Values that integer operators may make. Decides which steps are candidates (activation is not None)."""
        born: set[Node] = set()
        front = {n for n in self.nodes if n.op == "placeholder"}
        for s in steps:
            if s.activation is None:
                continue
            got = [x in born for x, _ in s.readers]
            if s.kind in ("mean", "sum", "softmax", "norm", "map"):
                good = all(got)
            elif s.kind == "binary":
                known = [x in born or x in front or self.is_constant(x) for x, _ in s.readers]
                good = all(known) and (any(got) or all(x in front for x, _ in s.readers))
            elif s.kind == "clamp":
                good = all(got)
            else:
                good = True
            if not good:
                s.activation, s.why = None, "its input is float"
            elif s.kind not in MOVED or any(got) or any(x in front for x, _ in s.readers):
                born.update(s.tails)
        return born

    def _spec(self, spec: Spec | None) -> QuantizationSpecBase:
        assert spec is not None
        return observe.activation(spec, qat=self.qat)

    def _decide(self, s: Step, plan: Plan) -> None:
        wanted = [w for t in s.tails for w in plan.wants.get(t, ())]
        if s.kind == "embedding":
            s.integer = s.activation is not None and bool(wanted)
            return
        if s.activation is None:
            return
        if s.kind not in PRODUCTS and not wanted:
            s.activation, s.why = None, "only float operators read its result"
            return
        s.integer = True
        base = self._spec(s.activation)
        for v, reader in s.readers:
            want: QuantizationSpecBase = base
            if self.is_constant(v):
                want = observe.constant(s.activation)
            elif s.kind in MOVED:
                want = _chosen(wanted)
            elif s.kind == "softmax":
                want = observe.logits(s.activation, int(argument(s.node, "dim")), qat=self.qat)
            plan.wants.setdefault(v, []).insert(0, (reader, want))
        if s.kind in ("softmax", "rnn"):  # the kernel says the scale of its result
            own = observe.SOFTMAX if s.kind == "softmax" else observe.HIDDEN
            for t in s.tails:
                if t in plan.wants:
                    plan.wants[t] = [(r, own if observe.width(w) == 1 else w) for r, w in plan.wants[t]]

    def _reasons(self, plan: Plan, roles: Mapping[Node, Role], inside: set[Node]) -> None:
        """Why operators on floats stay so."""
        for s in plan.steps:
            if not s.integer and (s.weight is None or s.kind == "rnn"):
                plan.why[s.node.name] = s.why
        for n in self.nodes:
            known = (
                n in roles
                or n in self.fused
                or n in inside
                or target(n) in ("", "getitem", *DROPOUTS)
                or self.is_constant(n)
            )
            if known or target(n).startswith("aten._assert"):
                continue
            v = value(n)
            first = v[0] if isinstance(v, (list, tuple)) and v else v
            if isinstance(first, torch.Tensor) and first.is_floating_point():
                real = first.dtype == torch.float32
                dtype = str(first.dtype).removeprefix("torch.")
                plan.why[n.name] = (
                    f"{target(n).rpartition('.')[2]} has no integer form"
                    if real
                    else f"it computes in {dtype}, not in float32"
                )


def _is_square(n: Node) -> bool:
    """x * x, x ** 2 and higher powers: magnitudes of spectra, variances."""
    name = target(n)
    if name == "aten.pow":
        return isinstance(n.args[1], (int, float)) and n.args[1] >= 2
    return name == "aten.square" or (name == "aten.mul" and n.args[0] is n.args[1])


def _behind(x: Node, reader: Node) -> tuple[Node, Node]:
    """A value and its reader; of a value that went through dropout the one before: ranges are those without it."""
    while target(x) in DROPOUTS:
        x, reader = x.args[0], x  # type: ignore[assignment]
    return x, reader


def _only_user(n: Node) -> Node | None:
    return next(iter(n.users)) if len(n.users) == 1 else None


def _chosen(wants: Sequence[tuple[Node | None, QuantizationSpecBase]]) -> QuantizationSpecBase:
    """How a value is stored that several read: with the most bits that one of them wants."""
    widest = max(observe.width(w) for _, w in wants)
    return next(w for _, w in wants if observe.width(w) == widest)


# ---- marks for torchao ----------------------------------------------------------------------------------------------------
def _mark(plan: Plan, qat: bool) -> None:
    """Annotations of all nodes. One value that is read in one way has one observer."""
    edges: dict[Node, dict[Node, QuantizationSpecBase | None]] = {}
    outputs: dict[Node, QuantizationSpecBase] = {}
    moved: dict[Node, tuple[Node, Node]] = {}
    stored: set[Node] = set()
    for s in plan.steps:
        if s.integer:
            stored.update(s.tails)
            if s.kind in MOVED and s.readers:
                moved.update(dict.fromkeys(s.tails, s.readers[0]))
    for v, wants in plan.wants.items():
        root: dict[int, Any] = {}
        if v in stored:
            chosen = _chosen(wants)
            outputs[v] = SharedQuantizationSpec(moved[v]) if v in moved else chosen
            root[id(chosen)] = v
        for reader, want in wants:
            if reader is None:
                continue
            known = root.get(id(want))
            edges.setdefault(reader, {})[v] = want if known is None else SharedQuantizationSpec(known)
            root.setdefault(id(want), (v, reader))
    shared: dict[tuple[Node, int], tuple[Node, Node]] = {}
    for s in plan.steps:
        for w, spec in _weights(s, qat):
            if qat and s.node not in edges:  # torchao goes by position here: activation, weight
                edges[s.node] = {s.node.args[0]: None}  # type: ignore[dict-item]
            known = shared.get((w, id(spec)))
            edges.setdefault(s.node, {})[w] = spec if known is None else SharedQuantizationSpec(known)
            shared.setdefault((w, id(spec)), (w, s.node))
        if s.rows is not None:
            edges.setdefault(s.node, {})[s.readers[0][0]] = observe.row(s.rows)
    for n in {**edges, **outputs}:
        n.meta[ANNOTATION] = QuantizationAnnotation(
            edges.get(n, {}), outputs.get(n), allow_implicit_sharing=False, _annotated=True
        )


def _weights(s: Step, qat: bool) -> Iterator[tuple[Node, QuantizationSpecBase]]:
    """The weights of a step and how they are stored."""
    if s.weight is None or (s.activation is None and s.kind == "rnn"):
        return
    for w in s.role.weights:
        axes = int(value(w).dim())
        inner = 1 - s.role.channel if axes == 2 else axes - 1
        yield w, observe.weight(s.weight, s.role.channel, inner, qat=qat)


__all__ = ["Annotator", "Plan", "Planner", "Step"]
