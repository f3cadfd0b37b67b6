"""Types of a node's outputs from its inputs and attributes, and when two sizes are the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from trivet.fbs.structs import DType, IndexKind, ReduceKind
from trivet.ir import ops
from trivet.ir.carry import Mismatch, carried, moves
from trivet.ir.dim import INF, Dim, Shape, dim_max, dim_min, floor_div, substitute, symbols
from trivet.ir.graph import Node, Sym
from trivet.ir.types import SIZES, Type

Inputs = Sequence[Type | None]


class Sizes:
    """Compares sizes under the symbols of a graph. Equal normal forms are equal; others are tried on sample values."""

    def __init__(self, symbols: Mapping[str, Sym]) -> None:
        self.symbols = symbols
        self._samples: list[dict[str, int]] | None = None

    def same(self, a: int | Dim, b: int | Dim) -> bool:
        """True when a and b are equal for all sizes in range (proved by form, else found equal on the samples). Sizes
        that depend on data are taken as promised by the model.
        """
        if a == b:
            return True
        names = symbols(a) | symbols(b)
        if not names:
            return False
        if any(n in self.symbols and self.symbols[n].data for n in names):
            return True
        return all(substitute(a, env) == substitute(b, env) for env in self.samples())

    def same_shape(self, a: Shape, b: Shape) -> bool:
        """Axis by axis."""
        return len(a) == len(b) and all(self.same(x, y) for x, y in zip(a, b, strict=True))

    def broadcast(self, shapes: Iterable[Shape]) -> Shape:
        """The common shape by numpy's rules."""
        out: list[int | Dim] = []
        for s in shapes:
            ones: list[int | Dim] = [1] * (len(s) - len(out))
            out = ones + out
            for i, d in enumerate(s, len(out) - len(s)):
                if out[i] == 1 or (isinstance(out[i], Dim) and isinstance(d, int) and d != 1):
                    out[i] = d if out[i] == 1 or self.same(out[i], d) else self._clash(out[i], d)
                elif d != 1 and not self.same(out[i], d):
                    self._clash(out[i], d)
        return tuple(out)

    def _clash(self, a: int | Dim, b: int | Dim) -> int:
        raise Mismatch(f"sizes {a} and {b} do not broadcast")

    def samples(self) -> list[dict[str, int]]:
        """Some values of the symbols that go together."""
        if self._samples is None:
            rng = random.Random(1)
            self._samples = [self._sample(rng) for _ in range(6)]
        return self._samples

    def at(self, size: int) -> dict[str, int]:
        """Values of the symbols that go together, all near size where their ranges allow it."""
        env: dict[str, int | Dim] = {}
        for i, s in enumerate(s for s in self.symbols.values() if s.solved is None):
            env[s.name] = max(s.min, min(s.max, size + i))
        return self._solve(env)

    def _sample(self, rng: random.Random) -> dict[str, int]:
        env: dict[str, int | Dim] = {}
        for s in self.symbols.values():
            if s.solved is None:
                low = max(s.min, 2) if s.max >= 2 else s.min
                env[s.name] = rng.randint(low, max(low, min(s.max, low + 4096 if s.max < INF else low + 997)))
        return self._solve(env)

    def _solve(self, env: dict[str, int | Dim]) -> dict[str, int]:
        for _ in self.symbols:
            for s in self.symbols.values():
                if s.solved is not None and s.name not in env and symbols(s.solved) <= env.keys():
                    env[s.name] = substitute(s.solved, env)
        return {name: n for name, n in env.items() if isinstance(n, int)}


def infer(node: Node, inputs: Inputs, sizes: Sizes) -> list[Type]:
    """Types of the outputs. What only the output's type says (target of a reshape, high side of a convolution's padding,
    dtype of a sum, quantisation of a computed result) is taken from it; everything else follows from inputs and attributes.

    Quantisation: operators that only move elements keep it; those on quantised values, maps of stored numbers, and bitcast have
    what they declare; others none.

    Raises:
        Mismatch: the inputs do not go together.
    """
    if node.op in _VARIADIC:
        types = _VARIADIC[node.op](node, [t for t in inputs if t is not None], sizes)
        if node.op != "concat":
            return types
    else:
        rule = _RULES.get(node.op)
        if rule is None:
            from trivet.ir.infer_quant import infer_quant

            return infer_quant(node, inputs, sizes)
        types = rule(node, inputs, sizes)
    if all(t is None or t.quant is None for t in inputs) or node.op == "bitcast":
        return types  # a bitcast says what stored integers mean
    plain = [replace(t, quant=None) for t in types]
    if plain and moves(node.op, node.attrs):
        plain[0] = replace(plain[0], quant=carried(node.op, node.attrs, inputs, plain[0].shape))
    return plain


def settle(node: Node) -> None:
    """Gives the output of a new node that only moves elements the quantisation of its inputs.

    Raises:
        Mismatch: the inputs do not go together.
    """
    inputs = [None if v is None else v.type for v in node.inputs]
    if any(t is not None and t.quant is not None for t in inputs) and moves(node.op, node.attrs):
        y = node.outputs[0]
        y.type = replace(y.type, quant=carried(node.op, node.attrs, inputs, y.shape))


def need(ok: bool, why: str, *parts: object) -> None:
    if not ok:
        raise Mismatch(why.format(*parts))


def first(inputs: Inputs) -> Type:
    t = inputs[0]
    if t is None:
        raise Mismatch("the first input is missing")
    return t


def opt(inputs: Inputs, i: int) -> Type | None:
    return inputs[i] if i < len(inputs) else None


def req(inputs: Inputs, i: int) -> Type:
    t = opt(inputs, i)
    if t is None:
        raise Mismatch(f"input {i} is missing")
    return t


def declared(node: Node, i: int = 0) -> Type:
    return node.outputs[i].type


def _replace(shape: Shape, axis: int, *dims: int | Dim) -> Shape:
    return (*shape[:axis], *dims, *shape[axis + 1 :])


def _same(node: Node, inputs: Inputs, sizes: Sizes) -> list[Type]:
    return [first(inputs)]


def _map(node: Node, inputs: Sequence[Type], sizes: Sizes) -> list[Type]:
    want = declared(node)
    for i, t in enumerate(inputs):
        need(t.rank <= want.rank, "input {} has {} axes, the output {}", i, t.rank, want.rank)
        for d, o in zip(t.shape, want.shape[want.rank - t.rank :], strict=True):
            need(d == 1 or sizes.same(d, o), "input {} {} does not broadcast to {}", i, t, want)
    dtype = node.attrs.code[-1].dtype
    return [Type(dtype, want.shape, want.quant if dtype in (DType.i8, DType.i16) else None)]  # stored numbers, computed


def _reduce(node: Node, inputs: Inputs, sizes: Sizes) -> list[Type]:
    a: ops.Reduce = node.attrs
    x = first(inputs)
    shape = tuple(1 if i in a.axes else d for i, d in enumerate(x.shape))
    dtype = declared(node).dtype
    if a.kind in (ReduceKind.any, ReduceKind.all):
        dtype = DType.bool
    elif a.kind in (ReduceKind.argmax, ReduceKind.argmin):
        dtype = DType.i64
    elif a.kind in (ReduceKind.mean, ReduceKind.var):
        dtype = dtype if dtype == DType.f32 and x.dtype in (DType.f16, DType.bf16) else x.dtype
    elif a.kind not in (ReduceKind.sum, ReduceKind.prod):
        dtype = x.dtype
    return [Type(dtype, shape)]


def _scan(node: Node, inputs: Inputs, sizes: Sizes) -> list[Type]:
    return [Type(declared(node).dtype, first(inputs).shape)]


def _epilogue(node: Node, inputs: Inputs, sizes: Sizes, out: Type) -> None:
    bias, residual = opt(inputs, 2), opt(inputs, 3)
    if bias is not None:
        need(bias.dtype == out.dtype or node.attrs.packed, "bias is {}, the result {}", bias.dtype.name, out.dtype.name)
    if residual is not None:
        need(residual.dtype == out.dtype, "residual is {}, the result {}", residual.dtype.name, out.dtype.name)
        need(sizes.same_shape(residual.shape, out.shape), "residual {} has not the result's shape {}", residual, out)


def _matmul(node: Node, inputs: Inputs, sizes: Sizes) -> list[Type]:
    a, b = first(inputs), req(inputs, 1)
    if node.attrs.packed:
        need(b.rank == 1, "a packed weight has one axis, not {}", b)
        return [declared(node)]
    need(a.dtype == b.dtype, "operands are {} and {}", a.dtype.name, b.dtype.name)
    need(a.rank >= 1 and b.rank >= 2, "operands {} and {} have too few axes", a, b)
    need(sizes.same(a.shape[-1], b.shape[-2]), "inner sizes of {} and {} differ", a, b)
    batch = sizes.broadcast([a.shape[:-2], b.shape[:-2]])
    shape = (*batch, a.shape[-2], b.shape[-1]) if a.rank > 1 else (*batch, b.shape[-1])
    out = Type(a.dtype, shape)
    _epilogue(node, inputs, sizes, out)
    bias = opt(inputs, 2)
    if bias is not None:
        full = sizes.broadcast([bias.shape, shape])
        need(sizes.same_shape(full, shape), "bias {} does not broadcast to {}", bias, out)
    return [out]


def _conv(node: Node, inputs: Inputs, sizes: Sizes) -> list[Type]:
    a: ops.Conv = node.attrs
    x, w, want = first(inputs), req(inputs, 1), declared(node)
    need(x.rank == a.nd + 2 and want.rank == x.rank, "x {} and y {} need {} axes", x, want, a.nd + 2)
    if a.packed:
        return [Type(x.dtype, (x.shape[0], *want.shape[1:]))]
    need(w.rank == a.nd + 2, "weight {} needs {} axes", w, a.nd + 2)
    need(x.dtype == w.dtype, "operands are {} and {}", x.dtype.name, w.dtype.name)
    taken = w.shape[0] if a.transposed else w.shape[1] * a.groups
    need(sizes.same(x.shape[1], taken), "x has {} channels, the weight takes {}", x.shape[1], taken)
    made = w.shape[1] * a.groups if a.transposed else w.shape[0]
    out = Type(x.dtype, (x.shape[0], made, *want.shape[2:]))
    _epilogue(node, inputs, sizes, out)
    bias = opt(inputs, 2)
    if bias is not None:
        need(bias.rank == 1 and sizes.same(bias.shape[0], made), "bias {} needs {} elements", bias, made)
    return [out]


def _pool(node: Node, inputs: Inputs, sizes: Sizes) -> list[Type]:
    a: ops.Pool = node.attrs
    x, want = first(inputs), declared(node)
    need(x.rank == a.nd + 2 and want.rank == x.rank, "x {} and y {} need {} axes", x, want, a.nd + 2)
    shape = (*x.shape[:2], *want.shape[2:])
    return [Type(x.dtype, shape), Type(DType.i64, shape)][: len(node.outputs)]


def _norm(node: Node, inputs: Inputs, sizes: Sizes) -> list[Type]:
    a: ops.Norm = node.attrs
    x = first(inputs)
    group = a.kind == a.kind.group
    shape = x.shape[1:2] if group else x.shape[x.rank - a.axes :]
    for name, t in (("weight", opt(inputs, 1)), ("bias", opt(inputs, 2))):
        if t is not None:
            need(sizes.same_shape(t.shape, shape), "{} {} has not the shape [{}]", name, t, ",".join(map(str, shape)))
    return [x]


def _attention(node: Node, inputs: Inputs, sizes: Sizes) -> list[Type]:
    q, k, v, mask = first(inputs), req(inputs, 1), req(inputs, 2), opt(inputs, 3)
    need(min(q.rank, k.rank, v.rank) >= 3, "q, k and v need at least 3 axes")
    need(q.dtype == k.dtype == v.dtype, "q, k and v have different dtypes")
    need(sizes.same(q.shape[-1], k.shape[-1]), "q {} and k {} have different last axes", q, k)
    need(sizes.same_shape(k.shape[-3:-1], v.shape[-3:-1]), "k {} and v {} do not go together", k, v)
    h, g = q.shape[-3], k.shape[-3]
    if isinstance(h, int) and isinstance(g, int):
        need(g > 0 and h % g == 0, "{} query heads are no multiple of {} key heads", h, g)
    batch = sizes.broadcast([q.shape[:-3], k.shape[:-3], v.shape[:-3]])
    keys = k.shape[-2]
    more_k, more_v = opt(inputs, 4), opt(inputs, 5)
    need((more_k is None) == (more_v is None), "more keys go with more values")
    if more_k is not None and more_v is not None:
        for x, more in ((k, more_k), (v, more_v)):
            same = (*more.shape[:-2], x.shape[-2], more.shape[-1])
            need(x.dtype == more.dtype and sizes.same_shape(x.shape, same), "{} does not continue {}", more, x)
        need(sizes.same(more_k.shape[-2], more_v.shape[-2]), "{} and {} do not go together", more_k, more_v)
        keys = keys + more_k.shape[-2]
    if mask is not None:
        full = (*batch, h, q.shape[-2], keys)
        need(
            sizes.same_shape(sizes.broadcast([mask.shape, full]), full),
            "mask {} does not broadcast to the scores",
            mask,
        )
    return [Type(q.dtype, (*batch, h, q.shape[-2], v.shape[-1]))]


def _gather(node: Node, inputs: Inputs, sizes: Sizes) -> list[Type]:
    a: ops.Gather = node.attrs
    x, i = first(inputs), req(inputs, 1)
    need(i.dtype in (DType.i64, DType.i32), "the index is {}", i.dtype.name)
    return [Type(x.dtype, i.shape if a.kind == IndexKind.elements else _replace(x.shape, a.axis, *i.shape))]


def _scatter(node: Node, inputs: Inputs, sizes: Sizes) -> list[Type]:
    a: ops.Scatter = node.attrs
    x, i, u = first(inputs), req(inputs, 1), req(inputs, 2)
    need(i.dtype in (DType.i64, DType.i32), "the index is {}", i.dtype.name)
    need(u.dtype == x.dtype, "updates are {}, x is {}", u.dtype.name, x.dtype.name)
    if a.kind == IndexKind.take:
        need(
            sizes.same_shape(u.shape, _replace(x.shape, a.axis, *i.shape)),
            "updates {} do not fit x {} and index {}",
            u,
            x,
            i,
        )
    return [x]


def _pad(node: Node, inputs: Inputs, sizes: Sizes) -> list[Type]:
    a: ops.Pad = node.attrs
    x = first(inputs)
    return [Type(x.dtype, tuple(d + lo + hi for d, lo, hi in zip(x.shape, a.lo, a.hi, strict=True)))]


def _sort(node: Node, inputs: Inputs, sizes: Sizes) -> list[Type]:
    a: ops.Sort = node.attrs
    x = first(inputs)
    shape = x.shape if a.k is None else _replace(x.shape, a.axis, a.k)
    return [Type(x.dtype, shape), Type(DType.i64, shape)]


def _rnn(node: Node, inputs: Inputs, sizes: Sizes) -> list[Type]:
    a: ops.Rnn = node.attrs
    x = first(inputs)
    need(x.rank == 3, "x {} needs 3 axes", x)
    if a.packed:
        hidden, cell = declared(node, 1).shape[-1], declared(node, len(node.outputs) - 1).shape[-1]
    else:
        gates = {a.kind.lstm: 4, a.kind.gru: 3}.get(a.kind, 1)
        hidden, cell = req(inputs, 2).shape[1], floor_div(req(inputs, 1).shape[0], gates)
    h, c = Type(x.dtype, (x.shape[1], hidden)), Type(x.dtype, (x.shape[1], cell))
    return [Type(x.dtype, (*x.shape[:2], hidden)), h, c][: len(node.outputs)]


def _resize(node: Node, inputs: Inputs, sizes: Sizes) -> list[Type]:
    x, want = first(inputs), declared(node)
    need(x.rank == node.attrs.nd + 2 and want.rank == x.rank, "x {} and y {} need {} axes", x, want, node.attrs.nd + 2)
    return [Type(x.dtype, (*x.shape[:2], *want.shape[2:]))]


def _grid_sample(node: Node, inputs: Inputs, sizes: Sizes) -> list[Type]:
    x, grid = first(inputs), req(inputs, 1)
    need(
        x.rank == 4 and grid.rank == 4 and grid.shape[3] == 2,
        "x {} and grid {} need 4 axes, the grid's last of 2",
        x,
        grid,
    )
    return [Type(x.dtype, (*x.shape[:2], *grid.shape[1:3]))]


def _nonzero(node: Node, inputs: Inputs, sizes: Sizes) -> list[Type]:
    return [Type(DType.i64, (Dim.symbol(node.attrs.symbol), first(inputs).rank))]


def _item(node: Node, inputs: Inputs, sizes: Sizes) -> list[Type]:
    x = first(inputs)
    need(x.count == 1, "item takes one element, not {}", x)
    return []


def _permute(node: Node, inputs: Inputs, sizes: Sizes) -> list[Type]:
    x = first(inputs)
    return [Type(x.dtype, tuple(x.shape[i] for i in node.attrs.axes))]


def _reshape(node: Node, inputs: Inputs, sizes: Sizes) -> list[Type]:
    x, want = first(inputs), declared(node)
    need(sizes.same(x.count, want.count), "{} and {} have different numbers of elements", x, want)
    return [Type(x.dtype, want.shape)]


def _expand(node: Node, inputs: Inputs, sizes: Sizes) -> list[Type]:
    x, want = first(inputs), declared(node)
    tail = want.shape[want.rank - x.rank :] if want.rank >= x.rank else ()
    fits = want.rank >= x.rank and all(d == 1 or sizes.same(d, o) for d, o in zip(x.shape, tail, strict=True))
    need(fits, "{} does not broadcast to {}", x, want)
    return [Type(x.dtype, want.shape)]


def _slice(node: Node, inputs: Inputs, sizes: Sizes) -> list[Type]:
    a: ops.Slice = node.attrs
    x, want = first(inputs), declared(node)
    n, size = x.shape[a.axis], want.shape[a.axis] if want.rank == x.rank else 0
    if isinstance(a.start, int) and isinstance(n, int) and isinstance(size, int) and size > 0:
        last = a.start + a.step * (size - 1)
        need(
            0 <= a.start < n and 0 <= last < n,
            "positions {}..{} lie outside of axis {} of {}",
            a.start,
            last,
            a.axis,
            x,
        )
    return [Type(x.dtype, _replace(x.shape, a.axis, size))]


def _window(node: Node, inputs: Inputs, sizes: Sizes) -> list[Type]:
    a: ops.Window = node.attrs
    x = first(inputs)
    return [Type(x.dtype, (*_replace(x.shape, a.axis, floor_div(x.shape[a.axis] - a.size, a.step) + 1), a.size))]


def _diagonal(node: Node, inputs: Inputs, sizes: Sizes) -> list[Type]:
    a: ops.Diagonal = node.attrs
    x = first(inputs)
    rows, columns = x.shape[a.a], x.shape[a.b]
    rows, columns = (rows, columns - a.offset) if a.offset >= 0 else (rows + a.offset, columns)
    rest = tuple(d for i, d in enumerate(x.shape) if i not in (a.a, a.b))
    return [Type(x.dtype, (*rest, dim_max(dim_min(rows, columns), 0)))]


def _bitcast(node: Node, inputs: Inputs, sizes: Sizes) -> list[Type]:
    x, want = first(inputs), declared(node)
    need(SIZES[x.dtype] == SIZES[want.dtype], "{} and {} have different sizes", x.dtype.name, want.dtype.name)
    return [Type(want.dtype, x.shape, want.quant)]


def _concat(node: Node, inputs: Sequence[Type], sizes: Sizes) -> list[Type]:
    axis = node.attrs.axis
    need(bool(inputs), "nothing to join")
    total: int | Dim = 0
    x = inputs[0]
    for t in inputs:
        need(t.dtype == x.dtype, "dtypes {} and {} differ", x.dtype.name, t.dtype.name)
        need(t.rank == x.rank and axis < x.rank, "{} and {} cannot be joined along axis {}", t, x, axis)
        same = all(i == axis or sizes.same(d, e) for i, (d, e) in enumerate(zip(t.shape, x.shape, strict=True)))
        need(same, "{} and {} cannot be joined along axis {}", t, x, axis)
        total = total + t.shape[axis]
    return [Type(x.dtype, _replace(x.shape, axis, total))]


def _control(node: Node, inputs: Sequence[Type], sizes: Sizes) -> list[Type]:
    if node.op == "while":
        return list(inputs[: node.attrs.carried])
    return [v.type for v in node.graphs[0].outputs]


Rule = Callable[[Node, Inputs, Sizes], list[Type]]
_VARIADIC: dict[str, Callable[[Node, Sequence[Type], Sizes], list[Type]]] = {
    "map": _map, "concat": _concat, "if": _control, "while": _control}  # fmt: skip
_RULES: dict[str, Rule] = {
    "copy": _same, "transfer": _same, "rowquant": _same, "softmax": _same, "reduce": _reduce, "scan": _scan, "matmul": _matmul, "conv": _conv, "pool": _pool,
    "norm": _norm, "attention": _attention, "gather": _gather, "scatter": _scatter, "pad": _pad, "sort": _sort, "rnn": _rnn,
    "resize": _resize, "grid_sample": _grid_sample, "nonzero": _nonzero, "item": _item, "permute": _permute,
    "reshape": _reshape, "expand": _expand, "slice": _slice, "window": _window, "diagonal": _diagonal, "bitcast": _bitcast,
}  # fmt: skip
