"""Import: exported PyTorch programs become one Module of IR graphs that share weights and states."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from trivet import signature as sig
from trivet.aten.complexes import Complex
from trivet.aten.complexes import constant as complex_constant
from trivet.error import Error
from trivet.fbs.structs import DType
from trivet.guards import add_guards, add_relations, multiple_in, multiple_of
from trivet.importer import AUTOMATIC, Importer, Problem, handlers, type_of
from trivet.ir.builder import Builder
from trivet.ir.dim import Dim
from trivet.ir.graph import Const, Graph, Loc, Module, State, Value
from trivet.ir.ops import Item
from trivet.ir.types import Type
from trivet.symbols import SymbolTable
from trivet.tracing import Captured, Key, export_program, key_of, refuse_views

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram
    from torch.export.graph_signature import InputSpec


def capture(entries: Mapping[str, tuple[Any, ...]], dynamic_shapes: Mapping[str, Any] | None = None, *,
            name: str = "program") -> Module:  # fmt: skip
    """Captures all entries.

    Args:
        entries: {entry: (model, args[, kwargs])}; model is a torch.nn.Module, an ExportedProgram or the path of a .pt2 file
            (args are not used for the latter two and may be missing). Tensors that entries have in common are stored
            once; a buffer that any entry writes is a state of all.
        dynamic_shapes: {entry: what torch.export.export takes}.
        name: of the module.

    Raises:
        Error: naming every unsupported node of every entry.
    """
    module, problems = attempt(entries, dynamic_shapes, name=name)
    if problems:
        raise unsupported(problems)
    return module


def attempt(entries: Mapping[str, tuple[Any, ...]], dynamic_shapes: Mapping[str, Any] | None = None, *,
            name: str = "program") -> tuple[Module, list[Problem]]:  # fmt: skip
    """As capture(), but the unsupported nodes come back as a list (the module is not complete then)."""
    if not entries:
        raise Error("there is no entry to export")
    captured = []
    for entry, given in entries.items():
        if not entry.isidentifier():
            raise Error(f"{entry!r} cannot name an entry", remedy="use a name such as forward, encode, decode")
        if not isinstance(given, tuple) or not 1 <= len(given) <= 3:
            raise Error(f"entry {entry!r}: expected (model, args) or (model, args, kwargs), got {type(given).__name__}")
        model, args, kwargs = given[0], given[1] if len(given) > 1 else (), given[2] if len(given) > 2 else None
        shapes = None if dynamic_shapes is None else dynamic_shapes.get(entry)
        captured.append(export_program(entry, model, args, kwargs, shapes, handlers()))
    if dynamic_shapes is not None and (extra := set(dynamic_shapes) - set(entries)):
        raise Error(f"dynamic_shapes names {sorted(extra)}, but the entries are {sorted(entries)}",
                    remedy="write dynamic_shapes={entry: ...} when there are several entries")  # fmt: skip
    weights = Weights()
    for c in captured:
        weights.find_states(c.program)
    for c in captured:
        refuse_views(c.program, written=weights.states)
    module = Module(name)
    problems: list[Problem] = []
    for c in captured:
        importer = EntryImporter(c, weights)
        module.entries[c.name] = importer.run()
        problems += importer.importer.problems
    for graph in module.entries.values():
        weights.name_constants(graph)
    return module, problems


def unsupported(problems: list[Problem]) -> Error:
    """One error that names all nodes."""
    first = problems[0]
    if len(problems) == 1:
        return Error(first.reason, node=first.where, remedy=first.remedy)
    lines = [f"{len(problems)} operations cannot be exported:"]
    lines += [f"  {p.where}: {p.reason}" if p.where else f"  {p.reason}" for p in problems]
    remedies = list(dict.fromkeys(p.remedy for p in problems if p.remedy))
    return Error("\n".join(lines), remedy="; ".join(remedies))


# ---- weights and states -------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class Weights:
    """Constants and states of all entries, found by the identity of their tensors."""

    states: dict[Key, State] = field(default_factory=dict)
    consts: dict[Key, Const] = field(default_factory=dict)
    alive: list[Any] = field(default_factory=list)  # keeps ids and addresses valid
    read: dict[Const, list[tuple[Type, Const]]] = field(
        default_factory=dict
    )  # with which types, each a constant of its own
    names: set[str] = field(default_factory=set)

    def find_states(self, program: ExportedProgram) -> None:
        """A State for every tensor that the program writes."""
        mutated = set(program.graph_signature.buffers_to_mutate.values())
        mutated |= set(getattr(program.graph_signature, "parameters_to_mutate", {}).values())
        for spec in program.graph_signature.input_specs:
            if spec.target in mutated and spec.target is not None:
                t = self.tensor(program, spec)
                key = key_of(t)
                if key not in self.states:
                    if t.is_complex():
                        raise Error(f"the state {spec.target!r} is complex",
                                    remedy="keep it as real and imaginary parts (torch.view_as_real)")  # fmt: skip
                    name = self._free(spec.target)
                    self.states[key] = State(name, type_of(t), t.detach().clone())

    def tensor(self, program: ExportedProgram, spec: InputSpec) -> torch.Tensor:
        """The tensor behind a parameter, buffer or lifted constant."""
        name = spec.target
        assert name is not None
        t = program.state_dict.get(name)
        if t is None:
            t = program.constants.get(name)
        if t is None:
            raise Error(f"the exported program has no tensor {name!r}")
        self.alive.append(t)
        return t  # type: ignore[no-any-return]

    def value(self, graph: Graph, name: str, t: torch.Tensor) -> Value:
        """A graph's value of a weight or state."""
        key = key_of(t)
        v = graph.value(type_of(t), "")
        if key in self.states:
            v.state = self.states[key]
            v.name = v.state.name
            return v
        const = self.consts.get(key)
        if const is None:
            if t.device.type == "meta":
                raise Error(f"{name!r} has no data: it is on the meta device", remedy="load the weights first")
            const = self.consts[key] = Const(self._free(name), t.detach().cpu())
        v.const = const
        v.name = const.name
        return v

    def name_constants(self, graph: Graph) -> None:
        """Gives the constants that handlers made names that are free in the whole module.

        One that is read with several meanings (as stored integers of a weight, and as bare numbers) becomes one for each.
        """
        mine = {id(c) for c in self.consts.values()}
        for v in list(graph.values()):
            if v.const is not None:
                v.const = self._as_read(v.const, v.type)
                if id(v.const) not in mine:
                    mine.add(id(v.const))
                    self.consts[("made", len(self.consts))] = v.const
                    v.const.name = self._free("c" if AUTOMATIC.fullmatch(v.const.name) else v.const.name)
                v.name = v.const.name
        for n in graph.nodes:
            for inner in n.graphs:
                self.name_constants(inner)

    def _as_read(self, const: Const, as_type: Type) -> Const:
        """The constant, or its twin where another type has taken it."""
        rows = self.read.setdefault(const, [])
        for known, c in rows:
            if known == as_type:
                return c
        rows.append((as_type, const if not rows else Const(const.name, const.data)))
        return rows[-1][1]

    def _free(self, name: str) -> str:
        base, n = name, 1
        while name in self.names:
            n += 1
            name = f"{base}.{n}"
        self.names.add(name)
        return name


def _is_tensor_spec(spec: InputSpec) -> bool:
    return spec.kind.name in ("PARAMETER", "BUFFER", "CONSTANT_TENSOR")


# ---- one entry ----------------------------------------------------------------------------------------------------------
class EntryImporter:
    """Placeholders, outputs, state writes and signature of one exported program."""

    def __init__(self, captured: Captured, weights: Weights) -> None:
        self.program, self.captured, self.weights = captured.program, captured, weights
        self.graph = Graph(captured.name)
        self.table = SymbolTable(self.graph, self.program.range_constraints)
        self.builder = Builder(self.graph, self.table.dim)
        self.importer = Importer(self.builder, self.program.graph_module, self.table)
        self.leaves: list[sig.Tree] = []  # of the user's inputs

    def run(self) -> Graph:
        """The graph of the entry."""
        self._placeholders()
        self._guards()
        results = self.importer.run()
        self.table.check()
        self._outputs(results)
        return self.graph

    def _placeholders(self) -> None:
        env = self.importer.env
        nodes = [n for n in self.program.graph.nodes if n.op == "placeholder"]
        specs = self.program.graph_signature.input_specs
        sizes = []
        for node, spec in zip(nodes, specs, strict=True):
            kind = spec.kind.name
            if kind == "USER_INPUT":
                env[node] = self._input(node, spec)
                if isinstance(env[node], Value) and hasattr(node.meta["val"], "shape"):
                    i = len(self.graph.inputs) - 1
                    sizes += [(i, axis, size) for axis, size in enumerate(node.meta["val"].shape)]
            elif _is_tensor_spec(spec):
                env[node] = self._weight(node, spec)
            elif kind == "TOKEN":
                env[node] = None
            else:
                raise Error(f"input {spec.arg.name!r} of entry {self.graph.name!r} is a {kind.lower()}",
                            remedy="inputs are tensors, numbers and containers of them")  # fmt: skip
        self.table.inputs(sizes)

    def _guards(self) -> None:
        """torch.export's conditions on sizes."""
        for expr in self.captured.guards:
            if (found := multiple_in(expr)) is not None:
                self._divide(self.table.dim(found[0]), found[1])
        add_relations(self.graph, self.captured.guards, self.table.dim)
        if not self.captured.texts:
            return

        def sources() -> dict[str, Any]:
            found: dict[str, Any] = {}
            for leaf, paths in self._paths():
                if leaf["kind"] != "value":
                    v = self.graph.inputs[leaf["index"]]
                    size: Any = v.shape if leaf["kind"] == "tensor" else self.table.integers.get(leaf["index"])
                    found.update((path, size) for path in paths)
            return found

        for text in self.captured.texts:
            if (multiple := multiple_of(text, sources())) is not None:
                self._divide(*multiple)
        add_guards(self.graph, self.captured.texts, sources())

    def _divide(self, size: int | Dim, divisor: int) -> None:
        if self.table.divide(size, divisor):
            for v in self.graph.inputs:
                v.type = replace(v.type, shape=tuple(self.table.renew(d) for d in v.shape))

    def _paths(self) -> Iterator[tuple[sig.Tree, tuple[str, str]]]:
        """Every input leaf with the two ways in which torch may write it: L['xs'][0] and L['xs_0']."""
        args, kwargs = sig.tree_of(self.program.call_spec.in_spec, iter(self.leaves))["c"]
        names = self._names(len(args["c"]))
        for i, tree in enumerate(args["c"]):
            name = names[i] if i < len(names) else ""
            base, _, number = name.rpartition("_")
            spread = f"L[{base!r}][{number}]" if number.isdigit() else f"L[{name!r}]"
            for leaf, path in sig.leaves_of(tree, ""):
                yield leaf, (f"L[{name!r}]{path}", f"{spread}{path}")
        for key, tree in zip(kwargs["k"], kwargs["c"], strict=True):
            for leaf, path in sig.leaves_of(tree, f"L[{key!r}]"):
                yield leaf, (path, path)

    def _names(self, count: int) -> list[str]:
        """torch's names of the positional arguments; those of *xs are xs_0, xs_1."""
        calls = self.program.module_call_graph
        names = calls[0].signature.forward_arg_names if calls and calls[0].signature is not None else None
        return list(names or [])[:count]

    def _weight(self, node: torch.fx.Node, spec: InputSpec) -> Any:
        t = self.weights.tensor(self.program, spec)
        if not node.users and not self._written(spec.target):
            return None  # e.g. num_batches_tracked

        def make() -> Any:
            if t.is_complex() and key_of(t) not in self.weights.states:
                return complex_constant(self.builder, t)
            return self.weights.value(self.graph, str(spec.target), t)

        return self.importer.guarded(make, str(spec.target), node)

    def _written(self, target: str | None) -> bool:
        s = self.program.graph_signature
        return target in s.buffers_to_mutate.values() or target in getattr(s, "parameters_to_mutate", {}).values()

    def _input(self, node: torch.fx.Node, spec: InputSpec) -> Any:
        import torch

        val = node.meta.get("val")
        if isinstance(val, torch.Tensor):
            type_ = self.importer.guarded(lambda: type_of(val, self.table.dim), f"input {node.name}", node)
            if not isinstance(type_, Type):
                self.leaves.append(sig.constant(None))
                return type_
            v = self._new_input(type_, node.name)
            self.leaves.append({"kind": "tensor", "index": len(self.graph.inputs) - 1})
            return v
        if isinstance(val, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self._number(node, val)
        value = getattr(spec.arg, "value", val)
        self.leaves.append(sig.constant(value))
        return value

    def _new_input(self, type_: Type, name: str) -> Value:
        v = self.graph.value(type_, f"{name}_" if AUTOMATIC.fullmatch(name) else name)
        self.importer.names.add(v.name)
        self.graph.inputs.append(v)
        return v

    def _number(self, node: torch.fx.Node, val: Any) -> Any:
        """A number that differs from call to call: a 0-d input, read into a symbol when it is an integer."""
        kind = {"SymInt": "int", "SymFloat": "float", "SymBool": "bool"}[type(val).__name__]
        dtype = {"int": DType.i64, "float": DType.f64, "bool": DType.bool}[kind]
        v = self._new_input(Type(dtype, ()), node.name)
        self.leaves.append({"kind": kind, "index": len(self.graph.inputs) - 1})
        if kind != "int":
            return v
        self.table.add(val)
        name = str(val.node.expr)
        self.graph.symbols[name].data = True
        self.graph.node("item", [v], [], Item(name))
        size = self.table.dim(val)
        self.table.integers[len(self.graph.inputs) - 1] = size
        return size

    def _outputs(self, results: list[Any]) -> None:
        specs = self.program.graph_signature.output_specs
        leaves: list[sig.Tree] = []
        for spec, result in zip(specs, results, strict=True):
            kind = spec.kind.name
            if kind == "USER_OUTPUT":
                leaves.append(self._output(result))
            elif kind in ("BUFFER_MUTATION", "PARAMETER_MUTATION"):
                self._write(str(spec.target), result)
            elif kind not in ("USER_INPUT_MUTATION", "TOKEN"):
                raise Error(f"entry {self.graph.name!r} returns a {kind.lower()}",
                            remedy="export a model that only runs forward")  # fmt: skip
        self.graph.signature = self._signature(leaves).to_json()

    def _write(self, target: str, result: Any) -> None:
        spec = next(s for s in self.program.graph_signature.input_specs if s.target == target)
        t = self.weights.tensor(self.program, spec)
        state = self.weights.states[key_of(t)]
        if isinstance(result, Value) and result.state is not state:
            self.graph.writes.append((state, result))

    def _output(self, result: Any) -> sig.Tree:
        if isinstance(result, Dim):
            slot = self._slot(self.builder.full((), result, DType.i64))
            return {"kind": "int", "index": slot}
        if isinstance(result, Value):
            kind = self.importer.numbers.get(result, "tensor")
            return {"kind": kind, "index": self._slot(result)}
        if isinstance(result, Complex):
            self.importer.problem(Loc(), "a complex tensor is returned", "return torch.view_as_real(y)")
            return sig.constant(None)
        return sig.constant(result)

    def _slot(self, v: Value) -> int:
        if v not in self.graph.outputs:
            self.graph.outputs.append(v)
        return self.graph.outputs.index(v)

    def _signature(self, outputs: list[sig.Tree]) -> sig.Signature:
        spec = self.program.call_spec.in_spec
        args, kwargs = sig.tree_of(spec, iter(self.leaves))["c"]
        out_spec = self.program.call_spec.out_spec
        result = sig.tree_of(out_spec, iter(outputs))
        names, defaults = argument_names(self.captured.forward)
        if self.captured.forward is None:
            names = self._names(len(args["c"]))
        return sig.Signature(args, kwargs, result, names, defaults)


def argument_names(forward: Any) -> tuple[list[str], dict[str, Any]]:
    """Positional parameter names of forward() and its default values; a function of *args has no names."""
    if forward is None:
        return [], {}
    try:
        parameters: Iterable[inspect.Parameter] = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return [], {}
    names, defaults = [], {}
    for p in parameters:
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            names.append(p.name if p.kind is p.POSITIONAL_OR_KEYWORD else "")
        if p.default is not p.empty and (p.default is None or isinstance(p.default, (bool, int, float, str))):
            defaults[p.name] = p.default
    return names, defaults
