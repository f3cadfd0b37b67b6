"""Graphs of torch.fx on their way through quantisation: made of a model, and made a module again that torch.export takes."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from trivet import tracing
from trivet.error import Error
from trivet.importer import location

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

NAME = "trivet_name"  # meta: name that a node had before torchao rewrote the graph around it
DROPOUTS = ("aten.dropout", "aten.feature_dropout", "aten.alpha_dropout", "aten.feature_alpha_dropout")
GUARDS = "_guards_fn"  # torch's name of the module that checks sizes


class Traced(torch.nn.Module):
    """A graph as a module with the signature of the model that it was made of.

    Parameters and buffers have the model's names. Exporting it again gives every operator its place in the model (module path, source
    line), because the graph is interpreted with the nodes' own metadata.

    Attributes:
        graph: what it runs; parameters and modules that it names are this module's.
        in_spec, out_spec: pytrees of (args, kwargs) and of the result.
        guards: checks of sizes that tracing found, None without.
    """

    graph: torch.fx.Graph

    def __init__(self, module: GraphModule, call: Call, guards: Any = None) -> None:
        super().__init__()
        adopt(self, module)
        self.in_spec, self.out_spec, self._names = call.in_spec, call.out_spec, call.names
        self.guards = guards
        self.training = False
        # torch.export and callers ask for the signature of forward.
        self.forward = _with_signature(self._call, call.signature)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        flat = flatten(self.in_spec, self._names, args, kwargs)
        if self.guards is not None:
            self.guards(*flat)
        with torch.fx.traceback.preserve_node_meta():
            return self._run(flat)

    def _run(self, flat: Sequence[Any]) -> Any:
        out = torch.fx.Interpreter(self, graph=self.graph).run(*flat, enable_io_processing=False)
        return pytree.tree_unflatten(list(out), self.out_spec)

    def train(self, mode: bool = True) -> Traced:
        """A captured graph has one mode."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Traced:
        import copy

        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        for key, value in self.__dict__.items():
            if key in ("in_spec", "out_spec", "call", "meta"):  # these do not change
                new.__dict__[key] = value
            elif isinstance(value, torch.fx.Graph):
                new.__dict__[key] = copy_of(value)
            elif key != "forward":
                new.__dict__[key] = copy.deepcopy(value, memo)
        new.forward = _with_signature(new._call, inspect.signature(self.forward))
        return new


class Call:
    """How a captured model is called: pytrees, and names for its arguments."""

    def __init__(self, program: torch.export.ExportedProgram, forward: Any) -> None:
        assert program.call_spec.in_spec is not None and program.call_spec.out_spec is not None
        self.in_spec, self.out_spec = program.call_spec.in_spec, program.call_spec.out_spec
        self.signature = inspect.signature(forward)
        self.names = [p.name for p in self.signature.parameters.values()
                      if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]  # fmt: skip


def adopt(owner: torch.nn.Module, module: GraphModule) -> None:
    """Makes the graph, modules and tensors of a GraphModule those of owner."""
    for table in ("_modules", "_parameters", "_buffers"):
        getattr(owner, table).update(getattr(module, table))
    owner._non_persistent_buffers_set.update(module._non_persistent_buffers_set)
    for name, value in module.__dict__.items():  # constants that are no buffers
        if isinstance(value, torch.Tensor):
            owner.__dict__[name] = value
    owner.__dict__["graph"] = copy_of(module.graph)


def copy_of(graph: torch.fx.Graph) -> torch.fx.Graph:
    """The same nodes again, names and metadata kept, called with leaves."""
    new = torch.fx.Graph()
    new.output(new.graph_copy(graph, {}))
    return new


def _with_signature(call: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    forward.__signature__ = signature  # type: ignore[attr-defined]
    return forward


def flatten(spec: Any, names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The leaves of a call in the order of the graph's inputs. Arguments may come by name or by position, as in the model.

    Raises:
        Error: other arguments than those that the graph was captured with.
    """
    want_args, want_kwargs = spec.children()[0].num_children, list(spec.children()[1].context)
    args, kwargs = list(args), dict(kwargs)
    for name in names[len(args) : want_args]:
        if name in kwargs:
            args.append(kwargs.pop(name))
    for name, value in list(zip(names, args, strict=False))[want_args:]:
        if name in want_kwargs:
            kwargs[name] = value
            args.pop()
    try:
        leaves = spec.flatten_up_to((tuple(args), kwargs))
    except ValueError:
        leaves = [()]
    if any(not pytree.tree_is_leaf(x) for x in leaves):
        _, got = pytree.tree_flatten((tuple(args), kwargs))
        raise Error(f"arguments {_text(got)} do not have the structure {_text(spec)} that the model was captured with")
    return list(leaves)


def _text(spec: Any) -> str:
    tree = pytree.tree_unflatten(["*"] * spec.num_leaves, spec)
    return str(tree).replace("'*'", "*")


# ---- making graphs ------------------------------------------------------------------------------------------------------
class Capture:
    """A model as a graph of functional operators that quantisation works on.

    Attributes:
        module: the GraphModule; its tensors are the model's own.
        call: how the model is called.
        guards: checks of sizes, None without.
        args, kwargs: the example arguments.
    """

    def __init__(
        self, name: str, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, shapes: Any
    ) -> None:
        """Captures.

        Raises:
            Error: torch.export's, in short; a model that is no module.
        """
        if not isinstance(model, (torch.nn.Module, torch.export.ExportedProgram)) and not isinstance(model, str):
            model_type = model.__name__ if isinstance(model, type) else type(model).__name__
            raise Error(f"entry {name!r}: a torch.nn.Module or ExportedProgram is expected, got {model_type}")
        self.args, self.kwargs = tuple(args), dict(kwargs or {})
        program = tracing.trace(name, model, self.args, dict(kwargs) if kwargs else None, shapes)
        with torch.no_grad(), tracing.quiet():
            program = program.run_decompositions(_table())
        self.module: GraphModule = program.module()
        forward = model.forward if isinstance(model, torch.nn.Module) else self.module.forward
        self.call = Call(program, forward)
        if not isinstance(model, torch.nn.Module) and program.example_inputs is not None and not args and not kwargs:
            self.args, self.kwargs = tuple(program.example_inputs[0]), dict(program.example_inputs[1])
        self.guards = take_guards(self.module)
        tidy(self.module)

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Leaves of a call in the order of the inputs."""
        return flatten(self.call.in_spec, self.call.names, args, kwargs)

    def shapes(self) -> Any:
        """dynamic_shapes as the captured program has them: every size that is not fixed is found again; None: all are fixed."""
        vals = [n.meta.get("val") for n in self.module.graph.nodes if n.op == "placeholder"]
        axes: list[Any] = []
        for v in vals:
            free = [i for i, d in enumerate(getattr(v, "shape", ())) if not isinstance(d, int)]
            axes.append(dict.fromkeys(free, torch.export.Dim.AUTO) or None)
        if not any(axes):
            return None
        args, kwargs = pytree.tree_unflatten(axes, self.call.in_spec)
        return {**dict(zip(self.call.names, args, strict=False)), **kwargs}

    def traced(self, module: GraphModule) -> Traced:
        """A module of a graph that was derived from this one."""
        return Traced(module, self.call, self.guards)


def _table() -> Any:
    """Operators that are taken apart before quantising: those that hide matrix products."""
    whole: Any = torch.export.default_decompositions()
    return {op: f for op, f in whole.items() if str(op) == "aten.einsum.default"}


def take_guards(module: GraphModule) -> Any:
    """Takes the check of sizes out of the graph; None when there is none."""
    found = None
    for node in list(module.graph.nodes):
        if node.op == "call_module" and str(node.target) == GUARDS:
            found = getattr(module, GUARDS)
            module.graph.erase_node(node)
    if found is not None:
        delattr(module, GUARDS)
        module.recompile()
    return found


def tidy(module: GraphModule) -> None:
    """Removes copies that mean nothing without writes in place (dropout in eval leaves them), and what nothing reads."""
    for node in list(module.graph.nodes):
        copied = target(node) == "aten.clone" and not node.kwargs and isinstance(node.args[0], torch.fx.Node)
        if copied and node.args[0].op != "get_attr" and all(user.op != "output" for user in node.users):
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    module.recompile()


# ---- asking nodes -------------------------------------------------------------------------------------------------------
def target(node: Any) -> str:
    """Name of a node's operator without its overload ("aten.conv2d", "getitem"), "" for other nodes."""
    if not isinstance(node, torch.fx.Node) or node.op != "call_function":
        return ""
    if node.target is operator.getitem:
        return "getitem"
    name = str(node.target)
    return name.rpartition(".")[0] if isinstance(node.target, torch._ops.OpOverload) else name


def argument(node: Node, name: str, default: Any = None) -> Any:
    """An argument of an ATen operator by its name in the schema; default where it is left out and the schema has none."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    for i, a in enumerate(schema):
        if a.name == name:
            if a.name in node.kwargs:
                return node.kwargs[a.name]
            if i < len(node.args) and not a.kwarg_only:
                return node.args[i]
            return a.default_value if a.has_default_value() else default
    return default


def value(node: Any) -> Any:
    """What tracing saw as a node's result: a fake tensor, a tuple of them, a number."""
    return node.meta.get("val") if isinstance(node, torch.fx.Node) else node


def is_real(node: Any) -> bool:
    """True for a node that makes one float32 tensor."""
    v = value(node)
    return isinstance(node, torch.fx.Node) and isinstance(v, torch.Tensor) and v.dtype == torch.float32


def rank(node: Any) -> int:
    """Number of axes of a node's result."""
    return int(value(node).dim())


def inputs(node: Node) -> Iterator[Node]:
    """Nodes among the arguments, lists too, in order and as often as they occur."""
    flat: list[Any] = pytree.tree_leaves((node.args, node.kwargs))
    return (a for a in flat if isinstance(a, torch.fx.Node))


def written(module: GraphModule) -> set[str]:
    """Names of buffers that the graph writes."""
    out = set()
    for node in module.graph.nodes:
        if target(node) == "aten.copy_" and getattr(node.args[0], "op", "") == "get_attr":
            out.add(str(node.args[0].target))
    return out


def state(module: GraphModule) -> dict[str, torch.Tensor]:
    """Copies of the buffers that the graph writes."""
    return {name: fetch(module, name).detach().clone() for name in written(module)}


def set_state(module: GraphModule, state: Mapping[str, torch.Tensor]) -> None:
    """Writes buffers of those names, where the graph writes them too."""
    for name in written(module):
        if name in state:
            fetch(module, name).detach().copy_(state[name])


def fetch(module: torch.nn.Module, name: str) -> Any:
    """A tensor or submodule by its path."""
    owner: Any = module
    for part in name.split("."):
        owner = getattr(owner, part)
    return owner


def assign(module: torch.nn.Module, name: str, t: torch.Tensor, *, parameter: bool = False) -> None:
    """Puts a tensor at a path, in place of what is there; modules on the way are made."""
    *path, last = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, torch.nn.Module())
        module = module._modules[part]  # type: ignore[assignment]
    for table in (module._parameters, module._buffers, module.__dict__):
        table.pop(last, None)
    if parameter:
        module.register_parameter(
            last, t if isinstance(t, torch.nn.Parameter) else torch.nn.Parameter(t, requires_grad=False)
        )
    else:
        module.register_buffer(last, t)


def vacant(module: torch.nn.Module, name: str) -> str:
    """name, or name with a number where it is taken."""
    try:
        n, base = 2, name
        while True:
            fetch(module, name)
            name, n = f"{base}_{n}", n + 1
    except AttributeError:
        return name


def place(node: Node) -> tuple[str, str]:
    """Module path and source line of a node in the user's model."""
    loc = location(node)
    return loc.module, loc.source


def where(node: Node) -> str:
    """The same for messages: "encoder.0 (net.py:12)"."""
    return str(location(node))
