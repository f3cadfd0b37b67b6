"""Matrix products."""

from __future__ import annotations

from typing import Any

from trivet.aten.common import Handler, handler, pointwise, table
from trivet.fbs.structs import DType, IndexKind, MapOp, ReduceKind
from trivet.ir.builder import Builder, Operand, broadcast
from trivet.ir.expr import Expr
from trivet.ir.graph import Value
from trivet.ir.types import is_float


def _linear(b: Builder, meta: Any, x: Value, w: Value, bias: Value | None = None) -> Value:
    if len(w.shape) == 1:
        y = _matmul(b, meta, x, w)
        return y if bias is None else pointwise(b, meta, lambda p, q: p + q, y, bias)
    if len(x.shape) == 1:
        y = b.matmul(b.unsqueeze(x, 0), b.transpose(w, 0, 1), bias)
        return b.squeeze(y, [0])
    return b.matmul(x, b.transpose(w, 0, 1), bias)


def _matmul(b: Builder, meta: Any, x: Value, y: Value) -> Value:
    """torch.matmul: vectors are rows on the left, columns on the right."""
    row, column = len(x.shape) == 1, len(y.shape) == 1
    left = b.unsqueeze(x, 0) if row else x
    right = b.unsqueeze(y, 1) if column else y
    out = b.matmul(left, right)
    drop = ([-2] if row else []) + ([-1] if column else [])
    return b.squeeze(out, drop) if drop else out


def _int_mm(b: Builder, meta: Any, x: Value, y: Value) -> Value:
    """8-bit integers, summed in 32 bits."""
    return b.matmul(b.cast(x, DType.i32), b.cast(y, DType.i32))


def _scaled(b: Builder, meta: Any, bias: Value, product: Value, beta: Operand, alpha: Operand) -> Value:
    """beta * bias + alpha * product; bias does not count at all when beta is 0."""
    if beta == 0:
        return pointwise(b, meta, lambda p, a: p * a, product, alpha)
    return pointwise(b, meta, lambda p, q, c, a: q * c + p * a, product, bias, beta, alpha)


def _addmm(b: Builder, meta: Any, bias: Value, x: Value, y: Value, beta: Operand = 1, alpha: Operand = 1) -> Value:
    """addmm and baddbmm."""
    if beta == 1 and alpha == 1 and is_float(x.dtype):
        return b.matmul(x, y, bias)
    return _scaled(b, meta, bias, b.matmul(x, y), beta, alpha)


def _addbmm(b: Builder, meta: Any, bias: Value, x: Value, y: Value, beta: Operand = 1, alpha: Operand = 1) -> Value:
    """The sum over the batch is one product with the batch in the inner axis."""
    n, m, k = x.shape
    left = b.reshape(b.permute(x, (1, 0, 2)), (m, n * k))
    return _addmm(b, meta, bias, left, b.reshape(y, (n * k, y.shape[2])), beta, alpha)


def _addmv(b: Builder, meta: Any, bias: Value, x: Value, v: Value, beta: Operand = 1, alpha: Operand = 1) -> Value:
    product = _matmul(b, meta, x, v)
    if beta == 1 and alpha == 1:
        return pointwise(b, meta, lambda p, q: p + q, product, bias)
    return _scaled(b, meta, bias, product, beta, alpha)


def _addr(b: Builder, meta: Any, bias: Value, x: Value, y: Value, beta: Operand = 1, alpha: Operand = 1) -> Value:
    return _scaled(b, meta, bias, _outer(b, meta, x, y), beta, alpha)


def _outer(b: Builder, meta: Any, x: Value, y: Value) -> Value:
    return pointwise(b, meta, lambda p, q: p * q, b.unsqueeze(x, 1), y, steps=1)


def _bilinear(b: Builder, meta: Any, x: Value, y: Value, w: Value, bias: Value | None = None) -> Value:
    """y[.., o] = sum over i, j of x[.., i] w[o, i, j] y[.., j]."""
    o, i, j = w.shape
    lead = x.shape[:-1]
    flat = b.reshape(b.permute(w, (1, 0, 2)), (i, o * j))
    xw = b.reshape(b.matmul(x if len(x.shape) > 1 else b.unsqueeze(x, 0), flat), (*lead, o, j))
    out = b.squeeze(b.matmul(xw, b.unsqueeze(y, len(y.shape))), [-1])
    return out if bias is None else pointwise(b, meta, lambda p, q: p + q, out, bias)


def _einsum(b: Builder, meta: Any, equation: str, operands: list[Value], path: Any = None) -> Value:
    """Pair by pair from the left: axes that are shared and kept become batch axes, shared and dropped ones are summed."""
    left, _, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    letters = [_letters(t, len(v.shape)) for t, v in zip(terms, operands, strict=True)]
    if not right and "->" not in equation:
        flat = [c for t in letters for c in t]
        out = sorted({c for c in flat if isinstance(c, int)}) + sorted(
            c for c in set(flat) if isinstance(c, str) and flat.count(c) == 1)  # fmt: skip
    else:
        rank = max((sum(isinstance(c, int) for c in t) for t in letters), default=0)
        out = _letters(right, sum(c.isalpha() for c in right) + (rank if "..." in right else 0))
    value, names = _unrepeat(b, operands[0], letters[0])
    for i in range(1, len(operands)):
        other, others = _unrepeat(b, operands[i], letters[i])
        later = {c for t in letters[i + 1 :] for c in t} | set(out)
        value, names = _contract(b, value, names, other, others, later)
    drop = [i for i, c in enumerate(names) if c not in out]
    if drop:
        value = b.reduce(ReduceKind.sum, value, drop)
        names = [c for c in names if c in out]
    return b.permute(value, [names.index(c) for c in out])


Label = str | int  # a letter, or an axis of the ellipsis counted from the right (negative)


def _letters(term: str, rank: int) -> list[Label]:
    head, dots, tail = term.partition("...")
    if not dots:
        return list(head)
    n = rank - len(head) - len(tail)
    return [*head, *range(-n, 0), *tail]


def _unrepeat(b: Builder, x: Value, names: list[Label]) -> tuple[Value, list[Label]]:
    """A letter that stands twice in one operand takes the diagonal."""
    names = list(names)
    for c in list(dict.fromkeys(names)):
        while names.count(c) > 1:
            i = names.index(c)
            j = names.index(c, i + 1)
            x = b.diagonal(x, 0, i, j)
            names = [n for k, n in enumerate(names) if k not in (i, j)] + [c]
    return x, names


def _contract(b: Builder, x: Value, xs: list[Label], y: Value, ys: list[Label],
              later: set[Label]) -> tuple[Value, list[Label]]:  # fmt: skip
    def alone(v: Value, names: list[Label], others: list[Label]) -> tuple[Value, list[Label]]:
        drop = [i for i, c in enumerate(names) if c not in others and c not in later]
        v = b.reduce(ReduceKind.sum, v, drop) if drop else v
        return v, [c for c in names if c in others or c in later]

    x, xs = alone(x, xs, ys)
    y, ys = alone(y, ys, xs)
    both = [c for c in xs if c in ys]
    inner = [c for c in both if c not in later]
    # a size-1 axis on one side only broadcasts: it cannot be summed by the product
    batch = [c for c in both if c in later]
    xo, yo = [c for c in xs if c not in both], [c for c in ys if c not in both]
    for c in inner:
        p, q = x.shape[xs.index(c)], y.shape[ys.index(c)]
        if p != q:
            x = b.expand(x, [broadcast((d,), (q,))[0] if n == c else d for n, d in zip(xs, x.shape, strict=True)])
            y = b.expand(y, [broadcast((d,), (p,))[0] if n == c else d for n, d in zip(ys, y.shape, strict=True)])
    names: list[Label] = [*batch, *xo, *yo]
    if not inner:
        x = b.permute(x, [xs.index(c) for c in [*batch, *xo]])
        y = b.permute(y, [ys.index(c) for c in [*batch, *yo]])
        left = b.reshape(x, (*x.shape, *(1 for _ in yo)))
        right = b.reshape(y, (*y.shape[: len(batch)], *(1 for _ in xo), *y.shape[len(batch) :]))
        return b.map(lambda p, q: p * q, [left, right], x.dtype), names
    x = b.permute(x, [xs.index(c) for c in [*batch, *xo, *inner]])
    y = b.permute(y, [ys.index(c) for c in [*batch, *inner, *yo]])
    nb = len(batch)
    k = _product(x.shape[nb + len(xo) :])
    left = b.reshape(x, (*x.shape[:nb], _product(x.shape[nb : nb + len(xo)]), k))
    right = b.reshape(y, (*y.shape[:nb], k, _product(y.shape[nb + len(inner) :])))
    out = b.matmul(left, right)
    shape = (*out.shape[:nb], *x.shape[nb : nb + len(xo)], *y.shape[nb + len(inner) :])
    return b.reshape(out, shape), names


def _product(shape: Any) -> Any:
    n: Any = 1
    for d in shape:
        n = n * d
    return n


def _tensordot(b: Builder, meta: Any, x: Value, y: Value, dims_x: list[int], dims_y: list[int]) -> Value:
    xs: list[Label] = [f"x{i}" for i in range(len(x.shape))]
    ys: list[Label] = [f"y{i}" for i in range(len(y.shape))]
    for i, j in zip(dims_x, dims_y, strict=True):
        ys[j] = xs[i]
    shared = {xs[i] for i in dims_x}
    out, _ = _contract(b, x, xs, y, ys, {c for c in [*xs, *ys] if c not in shared})
    return out


# ---- mixture of experts -------------------------------------------------------------------------------------------------
def _grouped_mm(b: Builder, meta: Any, x: Value, w: Value, offs: Value | None = None, bias: Value | None = None,
                out_dtype: Any = None) -> Value:  # fmt: skip
    """Rows offs[e - 1] .. offs[e] of x[T, K] times w[e] of w[E, K, N]; rows past the last are zero.

    Few rows look their expert's weights up; many rows are multiplied by every expert and keep one of the results.
    """
    if offs is None or bias is not None or len(x.shape) != 2 or len(w.shape) != 3:
        raise b.error("only the product of rows [T, K] with experts [E, K, N] is supported", "use torch.bmm")
    rows, experts = x.shape[0], w.shape[0]
    e = Expr()
    done = e.load(b.reshape(offs, (1, experts))).cast(DType.i64) <= e.iota(0)
    expert = b.reduce(ReduceKind.sum, b.expression(e, done, DType.i64, (rows, experts)), [1])
    last = experts - 1
    index = b.map(lambda r: r.do(MapOp.min, last), [expert], DType.i64)
    if isinstance(rows, int) and isinstance(experts, int) and rows <= experts:
        y = b.squeeze(b.matmul(b.unsqueeze(x, 1), b.gather(IndexKind.take, w, 0, index)), [1])
    else:
        every = b.matmul(b.unsqueeze(x, 0), w)
        at = b.expand(b.reshape(index, (1, rows, 1)), (1, rows, w.shape[2]))
        y = b.squeeze(b.gather(IndexKind.elements, every, 0, at), [0])
    inside = b.unsqueeze(b.map(lambda r: r <= last, [expert], DType.bool), 1)
    return b.cast(b.where(inside, y, 0.0, y.dtype), b.dtype(meta))


HANDLERS: dict[str, Handler] = {**table({
    "linear": _linear,
    "matmul mm bmm mv dot vdot": _matmul,
    "_int_mm": _int_mm,
    "addmm baddbmm": _addmm,
    "addbmm": _addbmm,
    "addmv": _addmv,
    "addr": _addr,
    "outer ger": _outer,
    "bilinear": _bilinear,
    "einsum": _einsum,
    "tensordot": _tensordot,
    "_grouped_mm": _grouped_mm,
}), "transformers.grouped_mm_fallback.default": handler(_grouped_mm)}  # fmt: skip
