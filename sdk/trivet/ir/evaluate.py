"""The reference evaluator: runs a graph with torch, node by node. Slow and plain; kernels and passes are tested against it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trivet.error import Error
from trivet.ir import dim
from trivet.ir.graph import Graph, Node, State, Sym, Value
from trivet.ir.interop import dtype_of, torch_dtype
from trivet.ir.reference_map import run_map
from trivet.ir.reference_ops import KERNELS
from trivet.ir.reference_quant import KERNELS_QUANT

if TYPE_CHECKING:
    from torch import Tensor

Dims = dict[str, int]
States = dict[State, Any]


def evaluate(graph: Graph, inputs: Sequence[Tensor], *, states: States | None = None) -> list[Tensor]:
    """Runs one entry.

    Args:
        graph: the entry, before pack_weights.
        inputs: one tensor per graph input; their sizes give the symbols.
        states: contents of the states, updated by the graph's writes; those not in it start from State.init.

    Raises:
        Error: an input that does not fit, a size out of range, an index out of range, or a node whose result has not
            the type that the graph says (a bug of the importer or of a pass).
    """
    states = {} if states is None else states
    dims = bind(graph, inputs)
    return _run(graph, list(inputs), dims, states)


def bind(graph: Graph, inputs: Sequence[Tensor]) -> Dims:
    """Values of the symbols, from the inputs' sizes; checks the inputs against their types."""
    if len(inputs) != len(graph.inputs):
        raise Error(f"expected {len(graph.inputs)} inputs, got {len(inputs)}", node=graph.name)
    for i, (v, x) in enumerate(zip(graph.inputs, inputs, strict=True)):
        if dtype_of(x) != v.dtype:
            raise Error(f"input {i}: expected {v.dtype.name}, got {dtype_of(x).name}", node=graph.name)
        if x.dim() != v.type.rank:
            raise Error(f"input {i}: expected {v.type.rank} axes, got {x.dim()}", node=graph.name)
    dims: Dims = {}
    for s in graph.symbols.values():
        if s.source is not None:
            i, axis = s.source
            _set(graph, s, dims, int(inputs[i].shape[axis]))
    waiting = [s for s in graph.symbols.values() if s.solved is not None]
    while waiting:
        ready = [s for s in waiting if dim.symbols(s.solved or 0) <= dims.keys()]
        if not ready:
            raise Error(f"symbols {', '.join(s.name for s in waiting)} cannot be computed", node=graph.name)
        for s in ready:
            _set(graph, s, dims, dim.evaluate(s.solved or 0, dims))
        waiting = [s for s in waiting if s.name not in dims]
    for i, (v, x) in enumerate(zip(graph.inputs, inputs, strict=True)):
        want = _shape(v, dims)
        for axis, (p, q) in enumerate(zip(want, x.shape, strict=True)):
            if p != q:
                raise Error(f"input {i} axis {axis}: expected {v.shape[axis]} = {p}, got {q}", node=graph.name)
    return dims


def _set(graph: Graph, s: Sym, dims: Dims, n: int) -> None:
    if not s.min <= n <= s.max:
        raise Error(f"{s.name}: expected {s.min}..{s.max}, got {n}", node=graph.name)
    dims[s.name] = n


def _shape(v: Value, dims: Dims) -> tuple[int, ...]:
    return tuple(dim.evaluate(d, dims) for d in v.shape)


def _run(graph: Graph, inputs: Sequence[Any], dims: Dims, states: States) -> list[Any]:
    env: dict[Value, Any] = dict(zip(graph.inputs, inputs, strict=True))

    def read(v: Value | None) -> Any:
        if v is None:
            return None
        if v.const is not None:
            return v.const.data
        if v.state is not None:
            return state_of(v.state, states)
        return env[v]

    for n in graph.nodes:
        env.update(zip(n.outputs, evaluate_node(n, [read(v) for v in n.inputs], dims, graph, states), strict=True))
    out = [read(v) for v in graph.outputs]
    for state, content in [(s, read(v).clone()) for s, v in graph.writes]:
        states[state] = content
    return out


def state_of(state: State, states: States) -> Any:
    """The present content of a state; its first value when it has not been touched."""
    import torch

    if state not in states:
        shape = tuple(int(d) for d in state.type.shape)  # type: ignore[arg-type]
        fresh = torch.zeros(shape, dtype=torch_dtype(state.type.dtype)) if state.init is None else state.init.clone()
        states[state] = fresh
    return states[state]


def evaluate_node(
    node: Node, inputs: list[Any], dims: Dims, graph: Graph | None = None, states: States | None = None
) -> list[Any]:
    """The outputs of one node, checked against their types. nonzero and item set their symbol in dims."""
    if node.op == "nonzero" or node.op == "item":
        n = int(inputs[0].count_nonzero()) if node.op == "nonzero" else int(inputs[0])
        sym = graph.symbols.get(node.attrs.symbol) if graph is not None else None
        if sym is not None and graph is not None:
            _set(graph, sym, dims, n)
        dims[node.attrs.symbol] = n
    out = _compute(node, inputs, dims, {} if states is None else states)
    for v, x in zip(node.outputs, out, strict=True):
        if dtype_of(x) != v.dtype or tuple(x.shape) != _shape(v, dims):
            shape = ",".join(str(d) for d in x.shape)
            raise Error(
                f"{node.op} gives {dtype_of(x).name}[{shape}], its output {v} is declared {v.type}", node=str(node.loc)
            )
    return out


def _compute(node: Node, x: list[Any], dims: Dims, states: States) -> list[Any]:
    import torch

    a = node.attrs
    shapes = [_shape(v, dims) for v in node.outputs]
    if node.op == "map":
        return [run_map(a.code, x, shapes[0], dims)]
    kernel = KERNELS.get(node.op) or KERNELS_QUANT.get(node.op)
    if kernel is not None:
        return kernel(node, x, shapes)
    if node.op == "nonzero":
        return [torch.nonzero(x[0])]
    if node.op == "item":
        return []
    if node.op == "transfer":
        return [x[0].clone()]
    if node.op == "permute":
        return [x[0].permute(a.axes)]
    if node.op == "reshape":
        return [x[0].reshape(shapes[0])]
    if node.op == "expand":
        return [x[0].expand(shapes[0])]
    if node.op == "slice":
        at = dim.evaluate(a.start, dims) + a.step * torch.arange(shapes[0][a.axis])
        return [x[0].index_select(a.axis, at)]
    if node.op == "window":
        return [x[0].unfold(a.axis, a.size, a.step)]
    if node.op == "diagonal":
        return [torch.diagonal(x[0], a.offset, a.a, a.b)]
    if node.op == "bitcast":
        return [x[0].contiguous().view(torch_dtype(node.outputs[0].dtype))]
    if node.op == "concat":
        return [torch.cat(x, a.axis)]
    if node.op == "if":
        return _run(node.graphs[0 if bool(x[0]) else 1], x[1:], dims, states)
    if node.op == "while":
        carried, stay = x[: a.carried], x[a.carried :]
        cond, body = node.graphs
        while bool(_run(cond, carried + stay, dims, states)[0]):
            carried = _run(body, carried + stay, dims, states)
        return carried
    raise Error(f"no reference for {node.op}", node=str(node.loc))
