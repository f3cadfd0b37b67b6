"""The importer's loop: every node of an fx graph becomes nodes of the IR through a handler of trivet.aten."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from trivet.aten.complexes import constant
from trivet.aten.shape import MAX_RANK
from trivet.error import Error
from trivet.fbs.structs import DType
from trivet.ir.builder import Builder
from trivet.ir.dim import Dim
from trivet.ir.graph import Loc, Value
from trivet.ir.interop import dtype_of
from trivet.ir.ops import Item
from trivet.ir.types import Type
from trivet.scalars import is_number_only
from trivet.symbols import SymbolTable, dim_of
from trivet.tracing import first_line, user_line

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Problem:
    """A node that cannot be imported."""

    op: str
    module: str
    source: str
    reason: str
    remedy: str = ""

    @property
    def where(self) -> str:
        """For example "encoder.layers.0 (model.py:12)"."""
        return str(Loc(self.module, self.source, self.op))


# Checks that torch.export writes into the graph: sizes are checked against their ranges when inputs are bound.
ASSERTIONS = frozenset(("aten._assert_scalar.default", "aten._assert_async.msg", "aten._assert_async.default",
                        "aten._assert_tensor_metadata.default", "aten.sym_constrain_range_for_size.default",
                        "aten.sym_constrain_range.default", "aten._functional_assert_async.msg",
                        "aten._functional_assert_scalar.default", "aten._functional_sym_constrain_range.default",
                        "aten._functional_sym_constrain_range_for_size.default"))  # fmt: skip

AUTOMATIC = re.compile(r"v\d+")  # the names that Graph.value gives

RANDOM = re.compile(r"aten\.(rand|bernoulli|multinomial|normal|uniform|exponential|geometric|poisson|native_dropout|"
                    r"dropout|feature_dropout|alpha_dropout|cauchy|log_normal|rrelu_with_noise)")  # fmt: skip


@cache
def handlers() -> Mapping[str, Callable[..., Any]]:
    """All operators that stay whole in the decomposition, with their handlers."""
    from trivet import rnn_capture
    from trivet.aten import HANDLERS

    return {**HANDLERS, **rnn_capture.HANDLERS}


def type_of(t: Any, dim: Callable[[Any], int | Dim] = dim_of) -> Type:
    """dtype and shape of a (fake) tensor. Raises Error for kinds of tensors that trivet has not."""
    import torch

    if t.layout != torch.strided:
        raise Error(
            f"{str(t.layout).removeprefix('torch.')} tensors are not supported", remedy="call .to_dense() first"
        )
    try:
        dtype = dtype_of(t)
    except KeyError:
        name = str(t.dtype).removeprefix("torch.")
        remedy = (
            "keep real and imaginary parts as two tensors (torch.view_as_real)"
            if t.is_complex()
            else "convert it first"
        )
        raise Error(f"{name} tensors are not supported", remedy=remedy) from None
    _check_rank(t)
    return Type(dtype, tuple(dim(d) for d in t.shape))


def _check_rank(t: Any) -> None:
    if len(getattr(t, "shape", ())) > MAX_RANK:
        raise Error(f"a tensor of {len(t.shape)} axes, at most {MAX_RANK} are possible", remedy="join axes first")


class Importer:
    """One fx graph (an entry, or a branch of one) into builder.graph.

    Attributes:
        env: fx node -> Value, Dim, number, tuple of these, or None.
        problems: nodes that could not be imported; the import goes on with a value of the right type.
        numbers: 0-d values that stand for a Python number in the model ("float", "bool").
    """

    def __init__(self, builder: Builder, module: torch.fx.GraphModule, table: SymbolTable,
                 parent: Importer | None = None) -> None:  # fmt: skip
        self.builder, self.module, self.table = builder, module, table
        inline = parent is not None and parent.builder is builder
        self.names: set[str] = parent.names if parent is not None and inline else set()
        self.env: dict[torch.fx.Node, Any] = {}
        self.problems: list[Problem] = parent.problems if parent else []
        self.numbers: dict[Value, str] = parent.numbers if parent else {}

    def run(self) -> list[Any]:
        """Imports all nodes after the placeholders (already in env); the results in order."""
        for node in self.module.graph.nodes:
            if node.op == "get_attr":
                self.env[node] = self._attribute(node)
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                out = self.arg(node.args[0])
                return list(out) if isinstance(out, (list, tuple)) else [out]
        return []

    # -- one node
    def _call(self, node: torch.fx.Node) -> None:
        loc = location(node)
        self.builder.loc, self.builder.node = loc, node
        for size in _sizes(node.meta.get("val")):
            self.table.add(size)
        done = len(self.builder.graph.nodes)
        try:
            self.env[node] = self._import(node)
            self._bound(done)
        except Error as e:
            self.problem(loc, e.reason, e.remedy)
            self.env[node] = self._dummy(node.meta.get("val"))
        except Exception as e:
            raise Error(f"{loc.origin} could not be imported: {first_line(e)}", node=str(loc),
                        remedy="this is a defect of trivet; please report it with the operator's arguments") from e  # fmt: skip
        self._name(node)

    def _import(self, node: torch.fx.Node) -> Any:
        import torch

        from trivet import control, scalars

        target = str(node.target)
        if node.target is operator.getitem:
            container, index = self.arg(node.args[0]), node.args[1]
            return container[index]
        if target in ASSERTIONS:
            if target == "aten._assert_scalar.default" and isinstance(node.args[0], torch.fx.Node):
                self.table.assertion(node.args[0].meta.get("val"))
            return None
        val = node.meta.get("val")
        if target in ("aten._local_scalar_dense.default", "aten.item.default"):
            return self._item(node, val)
        if scalars.is_scalar(val):
            return scalars.scalar(self, node, val)
        if target in control.HANDLERS:
            return control.HANDLERS[target](self, node)
        handler = handlers().get(target)
        if handler is None:
            raise self._unknown(target)
        for v in val if isinstance(val, (list, tuple)) else (val,):
            _check_rank(v)
        args, kwargs = self.arg(node.args), {k: self.arg(v) for k, v in node.kwargs.items()}
        if target.startswith("aten.squeeze."):
            self._squeezed(args[0], args[1] if len(args) > 1 else None)
        return handler(self.builder, args, kwargs, val)

    def _bound(self, done: int) -> None:
        """A nonzero finds at most as many places as its input has elements."""
        for n in self.builder.graph.nodes[done:]:
            if n.op == "nonzero" and n.inputs[0] is not None:
                self.table.limit(n.attrs.symbol, n.inputs[0].type.count)

    def _squeezed(self, x: Any, dims: Any) -> None:
        """A size that was not 1 at export must not be 1 later: squeeze would drop its axis then."""
        if isinstance(x, Value):
            axes = range(x.type.rank) if dims is None else [dims] if isinstance(dims, int) else dims
            for axis in axes:
                self.table.not_one(x.shape[axis])

    def _unknown(self, target: str) -> Error:
        if RANDOM.match(target):
            return Error(f"{target} draws random numbers, which a program has not",
                         remedy="draw them outside and pass them as an input; call eval() for dropout")  # fmt: skip
        return Error(
            f"{target} is not supported", remedy="write it with other operators, or export the parts around it"
        )

    def _item(self, node: torch.fx.Node, val: Any) -> Any:
        """.item(): an integer becomes a symbol; any other number stays a 0-d value."""
        import torch

        x = self.arg(node.args[0])
        b = self.builder
        if isinstance(val, (bool, int, float)):
            return val
        if isinstance(val, torch.SymInt):
            if self._may_be_negative(val) and is_number_only(node):
                self.table.numbers.update(s.name for s in val.node.expr.free_symbols)
                for name in self.table.numbers:
                    self.builder.graph.symbols.pop(name, None)
                v = b.cast(b.reshape(x, ()), DType.i64)
                self.numbers[v] = "int"
                return v
            d = self.table.dim(val)
            symbol = self.builder.graph.symbols.get(str(d))
            if symbol is not None and symbol.data:
                b.add("item", [b.cast(b.reshape(x, ()), DType.i64)], [], Item(symbol.name))
            return d  # else the model has promised, by torch._check, that it is this size
        v = b.reshape(x, ())
        if isinstance(val, torch.SymFloat):
            v = b.cast(v, DType.f64)
            self.numbers[v] = "float"
        elif isinstance(val, torch.SymBool):
            self.numbers[v] = "bool"
        return v

    def _may_be_negative(self, val: Any) -> bool:
        """True for a symbol of its own without a lower bound of zero: .item() before anything makes it a size."""
        expr = val.node.expr
        return bool(expr.is_Symbol) and self.table.least(val) < 0

    def arg(self, a: Any) -> Any:
        """An fx argument (nodes, containers of them, constants) as IR values."""
        import torch

        if isinstance(a, torch.fx.Node):
            return self.env[a]
        if isinstance(a, (list, tuple)):
            return type(a)(self.arg(x) for x in a) if type(a) in (list, tuple) else [self.arg(x) for x in a]
        if isinstance(a, dict):
            return {k: self.arg(v) for k, v in a.items()}
        if isinstance(a, slice):
            return slice(self.arg(a.start), self.arg(a.stop), self.arg(a.step))
        return a

    def _attribute(self, node: torch.fx.Node) -> Any:
        """A submodule of a control-flow operator, or a tensor kept as an attribute."""
        import torch

        owner: Any = self.module
        for part in str(node.target).split("."):
            owner = getattr(owner, part)
        if isinstance(owner, torch.Tensor):
            make = (
                (lambda: constant(self.builder, owner)) if owner.is_complex() else (lambda: self.builder.const(owner))
            )
            return self.guarded(make, str(node.target), node)
        return owner

    # -- problems
    def guarded(self, make: Callable[[], Any], origin: str, node: torch.fx.Node) -> Any:
        """make(), or after an Error a problem noted and a value that stands in."""
        try:
            return make()
        except Error as e:
            self.problem(Loc("", "", origin), f"{origin}: {e.reason}", e.remedy)
            return self._dummy(node.meta.get("val"))

    def problem(self, loc: Loc, reason: str, remedy: str) -> None:
        """Notes one, once."""
        p = Problem(loc.origin, loc.module, loc.source, reason, remedy)
        if p not in self.problems:
            self.problems.append(p)

    def _dummy(self, val: Any) -> Any:
        """Something of the right type so that the import can go on after a problem."""
        if isinstance(val, (list, tuple)):
            return tuple(self._dummy(v) for v in val)
        if val is None or isinstance(val, (bool, int, float, str)):
            return val
        try:
            return self.builder.graph.value(type_of(val, self.table.dim))
        except (Error, AttributeError):
            shape = tuple(self.table.dim(d) for d in getattr(val, "shape", ()))
            return self.builder.graph.value(Type(DType.f32, shape))

    def _name(self, node: torch.fx.Node) -> None:
        """Values that a handler made take the fx node's name: it is what torch.export prints."""
        v = self.env[node]
        fresh = node.name not in self.names and not AUTOMATIC.fullmatch(node.name)
        if isinstance(v, Value) and v.node is not None and fresh and AUTOMATIC.fullmatch(v.name):
            v.name = node.name
            self.names.add(v.name)


def _sizes(val: Any) -> list[Any]:
    """The symbolic sizes in a node's meta value."""
    if isinstance(val, (list, tuple)):
        return [s for v in val for s in _sizes(v)]
    if hasattr(val, "shape"):
        return [s for s in val.shape if not isinstance(s, int)]
    return [val] if hasattr(val, "node") else []


def location(node: torch.fx.Node) -> Loc:
    """Module path, user's source line and operator of an fx node."""
    module = ""
    stack = node.meta.get("nn_module_stack")
    if stack:
        module = re.sub(r"@\d+", "", str(list(stack.values())[-1][0]))
        module = re.sub(r"^L\['self'\]\.?", "", module)
    return Loc(module, user_line(node.meta.get("stack_trace")), str(node.target))
