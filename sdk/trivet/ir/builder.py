"""Appends nodes to a graph: one method per operator of the IR, with the shapes worked out and trivial ones left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trivet.error import Error
from trivet.fbs.structs import Act, DType, IndexKind, MapOp, PadMode, ReduceKind, ScanKind, ScatterReduce
from trivet.ir import ops
from trivet.ir.carry import Mismatch
from trivet.ir.dim import Dim, Shape, bounds, dim_max, dim_min, floor_div, substitute, symbols
from trivet.ir.expr import Expr, Formula, Number, Reg
from trivet.ir.graph import Graph, Loc, Value
from trivet.ir.infer import settle
from trivet.ir.types import Quant, Type

Axes = Sequence[int]
Scalar = Number | Dim
Operand = Value | Scalar


def broadcast(*shapes: Shape) -> Shape:
    """The common shape by numpy's rules. Where two sizes differ and neither is 1, a fixed one wins over a symbol."""
    rank = max((len(s) for s in shapes), default=0)
    out: list[int | Dim] = [1] * rank
    for s in shapes:
        for i, d in enumerate(s, rank - len(s)):
            if out[i] == 1 or (isinstance(out[i], Dim) and isinstance(d, int) and d != 1):
                out[i] = d
    return tuple(out)


class Builder:
    """Where the importer's handlers put their nodes. Set loc (and node, the fx node) before each handler."""

    def __init__(self, graph: Graph, dim_of: Callable[[Any], int | Dim] | None = None) -> None:
        """dim_of: converts a SymInt to a dimension (default: trivet.symbols.dim_of)."""
        from trivet.symbols import dim_of as usual

        self.graph = graph
        self._dim_of: Callable[[Any], int | Dim] = dim_of or usual
        self._known: dict[str, int | Dim] = {}  # symbols of torch that turned out to be something simpler
        self.loc = Loc()
        self.node: Any = None  # torch.fx.Node that is being imported

    # -- meta
    def dim(self, x: Any) -> int | Dim:
        """A size (int, SymInt) as a dimension."""
        return substitute(self._dim_of(x), self._known) if self._known else self._dim_of(x)

    def fresh(self, d: int | Dim) -> bool:
        """True for a symbol that torch made up for the node being imported: nothing defines it yet."""
        name = str(d)
        if not isinstance(d, Dim) or name not in d.symbols():
            return False
        sym = self.graph.symbols.get(name)
        made = any(n.attrs.symbol == name for n in self.graph.nodes if n.op in ("nonzero", "item"))
        return not made and (sym is None or (sym.data and sym.source is None and sym.solved is None))

    def define(self, symbol: int | Dim, value: int | Dim) -> None:
        """From here on the fresh symbol is read as value."""
        self._known[str(symbol)] = value

    def shape(self, meta: Any) -> Shape:
        """Shape of a (fake) tensor."""
        return tuple(self.dim(d) for d in meta.shape)

    def dtype(self, meta: Any) -> DType:
        """Our dtype of a (fake) tensor or torch dtype."""
        from trivet.ir.interop import dtype_of

        try:
            return dtype_of(meta)
        except KeyError:
            kind = getattr(meta, "dtype", meta)
            raise self.error(
                f"{kind} is not supported", "use a real dtype of bool, (u)int8..64 or float16..64"
            ) from None

    def used(self, output: int) -> bool:
        """False when the fx node that is being imported has several outputs and nobody reads this one."""
        if self.node is None:
            return True
        reads = [u for u in self.node.users if "getitem" in str(u.target)]
        if len(reads) != len(self.node.users):
            return True
        return any(u.args[1] == output and u.users for u in reads)

    def error(self, reason: str, remedy: str = "") -> Error:
        """An error at the present place of the model."""
        return Error(f"{self.loc.origin}: {reason}" if self.loc.origin else reason, node=str(self.loc), remedy=remedy)

    def least(self, x: int | Dim) -> int:
        """A lower bound of a size."""
        return bounds(x, self._ranges(x))[0]

    def _ranges(self, x: int | Dim) -> dict[str, tuple[int, int]]:
        known = self.graph.ranges()
        return {s: known.get(s, (0, 1 << 62)) for s in symbols(x)}

    # -- nodes
    def add(self, op: str, inputs: Sequence[Value | None], types: Sequence[Type], attrs: Any) -> list[Value]:
        """Any node, as it is. One that only moves elements of a quantised value passes the quantisation on."""
        outputs = self.graph.node(op, list(inputs), list(types), attrs, self.loc)
        if outputs:
            try:
                settle(self.graph.nodes[-1])
            except Mismatch as e:
                raise self.error(str(e)) from None
        return outputs

    def one(self, op: str, inputs: Sequence[Value | None], dtype: DType, shape: Shape, attrs: Any,
            quant: Quant | None = None) -> Value:  # fmt: skip
        """Any node with one output. quant: of a result that is computed."""
        return self.add(op, inputs, [Type(dtype, shape, quant)], attrs)[0]

    def const(self, data: Any, name: str = "", quant: Quant | None = None) -> Value:
        """A constant from a torch tensor; quant: what its numbers stand for."""
        return self.graph.const(data.detach(), name, quant)

    def ints(self, numbers: Sequence[int]) -> Value:
        """A constant vector of i64."""
        import torch

        return self.const(torch.tensor(list(numbers), dtype=torch.int64))

    # -- map
    def map(self, formula: Formula, operands: Sequence[Operand], dtype: DType, compute: DType | None = None,
            shape: Shape | None = None) -> Value:  # fmt: skip
        """formula(registers of the operands, each converted to `compute`) in dtype, as one map node.

        compute None: every operand keeps its dtype (numbers take `dtype`). shape None: the operands' common shape.
        """
        e = Expr()
        regs = [
            e.take(x, compute if compute is not None else x.dtype if isinstance(x, Value) else dtype) for x in operands
        ]
        if shape is None:
            shape = broadcast(*(x.shape for x in operands if isinstance(x, Value)))
        return self.expression(e, formula(*regs), dtype, shape)

    def expression(self, e: Expr, result: Reg, dtype: DType, shape: Shape) -> Value:
        """The value of a register, converted to dtype and expanded to shape."""
        code, inputs = e.finish(result.cast(dtype))
        if len(code) == 1 and code[0].op == MapOp.load:
            return self.expand(inputs[0], shape)
        return self.one("map", inputs, dtype, shape, ops.Map(code))

    def map1(self, op: MapOp, x: Value) -> Value:
        """One unary operation in x's dtype."""
        return self.map(lambda r: r.do(op), [x], x.dtype)

    def cast(self, x: Value, dtype: DType) -> Value:
        """x in another dtype."""
        if x.dtype == dtype:
            return x
        return self.map(lambda r: r, [x], dtype)

    def where(self, cond: Value, a: Operand, b: Operand, dtype: DType, shape: Shape | None = None) -> Value:
        """a where cond holds, else b, in dtype."""
        e = Expr()
        r = e.load(cond).cast(DType.bool).select(e.take(a, dtype), e.take(b, dtype))
        if shape is None:
            shape = broadcast(*(x.shape for x in (cond, a, b) if isinstance(x, Value)))
        return self.expression(e, r, dtype, shape)

    def full(self, shape: Shape, x: Operand, dtype: DType) -> Value:
        """A tensor of one number (or of a 0-d value)."""
        e = Expr()
        return self.expression(e, e.take(x, dtype), dtype, shape)

    def iota(self, shape: Shape, axis: int, dtype: DType = DType.i64) -> Value:
        """Positions along axis."""
        e = Expr()
        return self.expression(e, e.iota(axis, dtype), dtype, shape)

    def scalar(self, x: Operand, dtype: DType) -> Value:
        """A number or size as a 0-d value; a value in dtype."""
        return self.cast(x, dtype) if isinstance(x, Value) else self.full((), x, dtype)

    # -- views
    def reshape(self, x: Value, shape: Sequence[int | Dim]) -> Value:
        """Row-major reshape."""
        shape = tuple(shape)
        return x if shape == x.shape else self.one("reshape", [x], x.dtype, shape, ops.Reshape())

    def permute(self, x: Value, axes: Axes) -> Value:
        """Axes in another order."""
        axes = tuple(a % len(x.shape) for a in axes)
        if axes == tuple(range(len(axes))):
            return x
        return self.one("permute", [x], x.dtype, tuple(x.shape[a] for a in axes), ops.Permute(axes))

    def transpose(self, x: Value, a: int, b: int) -> Value:
        """Two axes exchanged."""
        rank = len(x.shape)
        if rank == 0:
            return x
        axes = list(range(rank))
        axes[a], axes[b] = axes[b], axes[a]
        return self.permute(x, axes)

    def move(self, x: Value, source: int, target: int) -> Value:
        """One axis moved to another position, the others in order."""
        axes = list(range(len(x.shape)))
        axes.insert(target % len(axes), axes.pop(source % len(axes)))
        return self.permute(x, axes)

    def expand(self, x: Value, shape: Sequence[int | Dim]) -> Value:
        """Broadcast to shape."""
        shape = tuple(shape)
        if shape == x.shape:
            return x
        more = len(shape) - len(x.shape)
        if shape == (1,) * more + x.shape:
            return self.reshape(x, shape)
        return self.one("expand", [x], x.dtype, shape, ops.Expand())

    def slice(self, x: Value, axis: int, start: int | Dim, size: int | Dim, step: int = 1) -> Value:
        """size elements along axis from start (>= 0), every step-th; step < 0 runs backwards."""
        axis %= len(x.shape)
        if start == 0 and size == x.shape[axis] and (step == 1 or size == 1):
            return x
        shape = (*x.shape[:axis], size, *x.shape[axis + 1 :])
        return self.one("slice", [x], x.dtype, shape, ops.Slice(axis, start, step))

    def select(self, x: Value, axis: int, i: int | Dim) -> Value:
        """Position i along axis; the axis goes."""
        axis %= len(x.shape)
        if isinstance(i, int) and i < 0:
            i = x.shape[axis] + i
        return self.squeeze(self.slice(x, axis, i, 1), [axis])

    def squeeze(self, x: Value, axes: Axes) -> Value:
        """Drops axes (of size 1)."""
        drop = {a % len(x.shape) for a in axes}
        return self.reshape(x, [d for i, d in enumerate(x.shape) if i not in drop])

    def unsqueeze(self, x: Value, *axes: int) -> Value:
        """Puts in axes of size 1, at these positions of the result."""
        rank = len(x.shape) + len(axes)
        at = {a % rank for a in axes}
        rest = iter(x.shape)
        return self.reshape(x, [1 if i in at else next(rest) for i in range(rank)])

    def flip(self, x: Value, axes: Axes) -> Value:
        """Reversed along axes."""
        for a in axes:
            size = x.shape[a]
            if size != 1 and size != 0:
                x = self.slice(x, a, size - 1, size, -1)
        return x

    def window(self, x: Value, axis: int, size: int, step: int) -> Value:
        """torch.Tensor.unfold."""
        axis %= len(x.shape)
        count = floor_div(x.shape[axis] - size, step) + 1
        shape = (*x.shape[:axis], count, *x.shape[axis + 1 :], size)
        return self.one("window", [x], x.dtype, shape, ops.Window(axis, size, step))

    def diagonal(self, x: Value, offset: int, a: int, b: int) -> Value:
        """torch.diagonal."""
        rank = len(x.shape)
        a, b = a % rank, b % rank
        rows, columns = (x.shape[a], x.shape[b] - offset) if offset >= 0 else (x.shape[a] + offset, x.shape[b])
        size = dim_max(dim_min(rows, columns), 0)
        shape = (*(d for i, d in enumerate(x.shape) if i not in (a, b)), size)
        return self.one("diagonal", [x], x.dtype, shape, ops.Diagonal(offset, a, b))

    def concat(self, xs: Sequence[Value], axis: int) -> Value:
        """Joined along axis; all of one dtype."""
        axis %= len(xs[0].shape)
        if len(xs) == 1:
            return xs[0]
        total: int | Dim = 0
        for x in xs:
            total = total + x.shape[axis]
        shape = [broadcast(*((x.shape[i],) for x in xs))[0] for i in range(len(xs[0].shape))]
        shape[axis] = total
        return self.one("concat", xs, xs[0].dtype, tuple(shape), ops.Concat(axis))

    def stack(self, xs: Sequence[Value], axis: int) -> Value:
        """Joined along a new axis."""
        return self.concat([self.unsqueeze(x, axis) for x in xs], axis)

    # -- kernels
    def reduce(self, kind: ReduceKind, x: Value, axes: Axes | None = None, *, keep: bool = False,
               dtype: DType | None = None, correction: float = 1.0) -> Value:  # fmt: skip
        """Reduction over axes (None: all); dtype of the result: x's, bool for any and all, i64 for arg*."""
        rank = len(x.shape)
        over = tuple(range(rank)) if axes is None else tuple(sorted({a % rank for a in axes} if rank else ()))
        if kind in (ReduceKind.argmax, ReduceKind.argmin):
            dtype = DType.i64
        elif kind in (ReduceKind.any, ReduceKind.all):
            dtype = DType.bool
        if rank == 0:
            return self.squeeze(self.reduce(kind, self.reshape(x, (1,)), [0], keep=True, dtype=dtype,
                                            correction=correction), [0])  # fmt: skip
        shape = tuple(1 if i in over else d for i, d in enumerate(x.shape))
        y = self.one("reduce", [x], dtype or x.dtype, shape, ops.Reduce(kind, over, correction))
        return y if keep else self.squeeze(y, over)

    def scan(self, kind: ScanKind, x: Value, axis: int) -> Value:
        """Running reduction."""
        if not x.shape:
            return x
        return self.one("scan", [x], x.dtype, x.shape, ops.Scan(kind, axis % len(x.shape)))

    def matmul(self, a: Value, b: Value, bias: Value | None = None) -> Value:
        """a[.., M, K] @ b[.., K, N] (+ bias, broadcast to the result). Integers go through map and reduce."""
        batch = broadcast(a.shape[:-2], b.shape[:-2])
        shape = (*batch, a.shape[-2], b.shape[-1])
        if a.dtype < DType.f16:
            left, right = self.unsqueeze(a, len(a.shape)), self.unsqueeze(b, len(b.shape) - 2)
            y = self.map(lambda p, q: p * q, [left, right], a.dtype)
            y = self.reduce(ReduceKind.sum, y, [-2], dtype=DType.i64)
            y = self.cast(y, a.dtype)
            return y if bias is None else self.map(lambda p, q: p + q, [y, bias], a.dtype)
        return self.one("matmul", [a, b, bias, None], a.dtype, shape, ops.Matmul(act=Act.none))

    def softmax(self, x: Value, axis: int, log: bool = False) -> Value:
        """Along one axis."""
        if not x.shape:
            return self.full((), 0.0 if log else 1.0, x.dtype)
        return self.one("softmax", [x], x.dtype, x.shape, ops.Softmax(axis % len(x.shape), log))

    def gather(self, kind: IndexKind, x: Value, axis: int, index: Value) -> Value:
        """take: rows of axis; elements: torch.gather."""
        axis %= len(x.shape)
        shape = index.shape if kind == IndexKind.elements else (*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])
        return self.one("gather", [x, index], x.dtype, shape, ops.Gather(kind, axis))

    def scatter(self, kind: IndexKind, x: Value, axis: int, index: Value, updates: Value,
                reduce: ScatterReduce = ScatterReduce.none, include_self: bool = True) -> Value:  # fmt: skip
        """x with the elements named by index written, or combined."""
        attrs = ops.Scatter(kind, axis % len(x.shape), reduce, include_self)
        return self.one("scatter", [x, index, updates], x.dtype, x.shape, attrs)

    def pad(self, x: Value, lo: Axes, hi: Axes, mode: PadMode = PadMode.constant, value: float = 0.0) -> Value:
        """A border on every axis; negative amounts crop (constant mode)."""
        if not any(lo) and not any(hi):
            return x
        shape = tuple(d + a + c for d, a, c in zip(x.shape, lo, hi, strict=True))
        return self.one("pad", [x], x.dtype, shape, ops.Pad(mode, tuple(lo), tuple(hi), value))

    def sort(self, x: Value, axis: int, descending: bool = False, k: int | Dim | None = None) -> tuple[Value, Value]:
        """(values, positions) along axis; with k only the first k."""
        if not x.shape:
            return x, self.full((), 0, DType.i64)
        axis %= len(x.shape)
        shape = x.shape if k is None else (*x.shape[:axis], k, *x.shape[axis + 1 :])
        types = [Type(x.dtype, shape), Type(DType.i64, shape)]
        values, places = self.add("sort", [x], types, ops.Sort(axis, descending, k))
        return values, places
