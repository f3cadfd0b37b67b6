"""Complex numbers and Fourier transforms. A complex tensor is a pair of real values while a graph is imported; the IR has
only real ones, so complex inputs and outputs of a program are turned down.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trivet.aten.common import Handler, handler
from trivet.fbs.structs import MapOp
from trivet.ir.builder import Builder
from trivet.ir.expr import Formula, Number
from trivet.ir.graph import Value


@dataclass(frozen=True, slots=True, eq=False)
class Complex:
    """Real and imaginary part, of one shape and dtype."""

    re: Value
    im: Value


@dataclass(frozen=True, slots=True)
class PartMeta:
    """What handlers read of a fake tensor: shape, and the dtype of one part."""

    shape: Any
    dtype: Any


Operand = Complex | Value | complex | Number


# ---- construction and parts ---------------------------------------------------------------------------------------------
def constant(b: Builder, t: Any) -> Complex:
    """A complex torch tensor as two constants."""
    t = t.detach().resolve_conj()
    return Complex(b.const(t.real), b.const(t.imag))


def _view_as_real(b: Builder, meta: Any, x: Complex) -> Value:
    return b.stack([x.re, x.im], len(x.re.shape))


def _view_as_complex(b: Builder, meta: Any, x: Value) -> Complex:
    return Complex(b.select(x, -1, 0), b.select(x, -1, 1))


def _complex(b: Builder, meta: Any, re: Value, im: Value) -> Complex:
    shape = b.shape(meta)
    return Complex(b.expand(re, shape), b.expand(im, shape))


def _polar(b: Builder, meta: Any, size: Value, angle: Value) -> Complex:
    def part(op: MapOp) -> Value:
        return b.map(lambda r, a: r * a.do(op), [size, angle], size.dtype, None, b.shape(meta))

    return Complex(part(MapOp.cos), part(MapOp.sin))


def _real(b: Builder, meta: Any, x: Complex) -> Value:
    return x.re


def _imag(b: Builder, meta: Any, x: Complex) -> Value:
    return x.im


def _conj(b: Builder, meta: Any, x: Complex) -> Complex:
    return Complex(x.re, b.map1(MapOp.neg, x.im))


def _abs(b: Builder, meta: Any, x: Complex) -> Value:
    return b.map(lambda p, q: p.do(MapOp.hypot, q), [x.re, x.im], x.re.dtype)


def _angle(b: Builder, meta: Any, x: Complex) -> Value:
    return b.map(lambda p, q: q.do(MapOp.atan2, p), [x.re, x.im], x.re.dtype)


def _to(b: Builder, meta: Any, x: Complex | Value, *args: Any, **kwargs: Any) -> Complex | Value:
    """Conversion among complex and real dtypes; complex to real drops the imaginary part."""
    if not meta.dtype.is_complex:
        return b.cast(x.re if isinstance(x, Complex) else x, b.dtype(meta))
    return _as_complex(b, x, b.dtype(_part(meta)))


def _as_complex(b: Builder, x: Operand, dtype: Any) -> Complex:
    if isinstance(x, Complex):
        return Complex(b.cast(x.re, dtype), b.cast(x.im, dtype))
    if isinstance(x, Value):
        return Complex(b.cast(x, dtype), b.full(x.shape, 0.0, dtype))
    number = complex(x)
    return Complex(b.full((), number.real, dtype), b.full((), number.imag, dtype))


# ---- arithmetic ---------------------------------------------------------------------------------------------------------
def _pair(b: Builder, meta: Any, re: Formula, im: Formula, *operands: Value) -> Complex:
    dtype, shape = b.dtype(_part(meta)), b.shape(meta)
    return Complex(b.map(re, operands, dtype, dtype, shape), b.map(im, operands, dtype, dtype, shape))


def _add(sign: int) -> Callable[..., Complex]:
    def run(b: Builder, meta: Any, x: Operand, y: Operand, alpha: Number = 1) -> Complex:
        p, q = (_as_complex(b, v, b.dtype(_part(meta))) for v in (x, y))
        k = sign * alpha
        return Complex(*(b.map(lambda r, s: r + s * k if k != 1 else r + s, [r, s], r.dtype, None, b.shape(meta))
                         for r, s in ((p.re, q.re), (p.im, q.im))))  # fmt: skip

    return run


def _mul(b: Builder, meta: Any, x: Operand, y: Operand) -> Complex:
    if isinstance(x, Complex) and isinstance(y, Complex):
        return _pair(
            b, meta, lambda p, q, r, s: p * r - q * s, lambda p, q, r, s: p * s + q * r, x.re, x.im, y.re, y.im
        )
    if not isinstance(x, Complex):
        x, y = y, x
    assert isinstance(x, Complex)
    if isinstance(y, complex):
        return _mul(b, meta, x, _as_complex(b, y, x.re.dtype))
    factor = y if isinstance(y, Value) else b.scalar(y, x.re.dtype)  # type: ignore[arg-type]
    return _pair(b, meta, lambda p, q, k: p * k, lambda p, q, k: q * k, x.re, x.im, factor)


def _div(b: Builder, meta: Any, x: Operand, y: Operand) -> Complex:
    if isinstance(x, Complex) and not isinstance(y, (Complex, complex)):
        divisor = y if isinstance(y, Value) else b.scalar(y, x.re.dtype)
        return _pair(b, meta, lambda p, q, k: p / k, lambda p, q, k: q / k, x.re, x.im, divisor)
    p, q = (_as_complex(b, v, b.dtype(_part(meta))) for v in (x, y))
    return _pair(b, meta, lambda p, q, r, s: (p * r + q * s) / (r * r + s * s),
                 lambda p, q, r, s: (q * r - p * s) / (r * r + s * s), p.re, p.im, q.re, q.im)  # fmt: skip


def _exp(b: Builder, meta: Any, x: Complex) -> Complex:
    return _pair(b, meta, lambda p, q: p.do(MapOp.exp) * q.do(MapOp.cos), lambda p, q: p.do(MapOp.exp) * q.do(MapOp.sin),
                 x.re, x.im)  # fmt: skip


def _reciprocal(b: Builder, meta: Any, x: Complex) -> Complex:
    y = _div(b, meta, 1.0, x)
    assert isinstance(y, Complex)
    return y


def _where(b: Builder, meta: Any, cond: Value, x: Operand, y: Operand) -> Complex:
    dtype, shape = b.dtype(_part(meta)), b.shape(meta)
    p, q = (_as_complex(b, v, dtype) for v in (x, y))
    return Complex(b.where(cond, p.re, q.re, dtype, shape), b.where(cond, p.im, q.im, dtype, shape))


def _bilinear(real: Handler, b: Builder, args: Sequence[Any], kwargs: Mapping[str, Any], meta: Any) -> Complex:
    """A product of two operands from those of their parts; einsum has its operands in a list."""
    part, dtype = _part(meta), b.dtype(_part(meta))
    listed = isinstance(args[1], (list, tuple))
    operands = args[1] if listed else args
    if len(operands) != 2:
        raise b.error(f"a product of {len(operands)} complex tensors is not supported", "multiply two at a time")
    p, q = (_as_complex(b, v, dtype) for v in operands)

    def product(x: Value, y: Value) -> Value:
        v: Value = real(b, [args[0], [x, y]] if listed else [x, y], kwargs, part)
        return v

    both, cross = (product(p.re, q.re), product(p.im, q.im)), (product(p.re, q.im), product(p.im, q.re))
    return Complex(b.map(lambda r, s: r - s, both, dtype), b.map(lambda r, s: r + s, cross, dtype))


# ---- Fourier transforms: products with fixed matrices -------------------------------------------------------------------
MAX_POINTS = 4096


def _waves(b: Builder, n: int, k: int, scale: float, dtype: Any) -> tuple[Any, Any]:
    """cos and sin of 2 pi j k / n, [n, k], times scale, as f64 tensors."""
    import torch

    if n > MAX_POINTS:
        raise b.error(f"a Fourier transform of {n} points", f"transform at most {MAX_POINTS} points at a time")
    turns = torch.outer(torch.arange(n), torch.arange(k)) % n
    angle = turns.double() * (2 * math.pi / n)
    return angle.cos() * scale, angle.sin() * scale


def _scale(b: Builder, sizes: Sequence[Any], normalization: int) -> float:
    """0: none, 1: 1 / sqrt(n), 2: 1 / n."""
    n = 1
    for s in sizes:
        if not isinstance(s, int):
            raise b.error(f"a Fourier transform over the dynamic size {s}", "make that dimension static")
        n *= s
    return (1.0, 1.0 / math.sqrt(n), 1.0 / n)[normalization]


def _times(b: Builder, x: Value, axis: int, matrix: Any) -> Value:
    """x with axis replaced by its product with matrix[n, k]."""
    from trivet.ir.interop import torch_dtype

    m = b.const(matrix.to(torch_dtype(x.dtype)))
    if len(x.shape) == 1:
        return b.squeeze(b.matmul(b.unsqueeze(x, 0), m), [0])
    return b.move(b.matmul(b.move(x, axis, -1), m), -1, axis)


def _halves(b: Builder, x: Value, axis: int) -> Complex:
    n = x.shape[axis] // 2
    return Complex(b.slice(x, axis, 0, n), b.slice(x, axis, n, n))


def _along(b: Builder, x: Complex, axis: int, scale: float, forward: bool) -> Complex:
    """Complex to complex along one axis: (re, im) side by side times one matrix."""
    import torch

    n = x.re.shape[axis]
    assert isinstance(n, int)
    cos, sin = _waves(b, n, n, scale, x.re.dtype)
    if not forward:
        sin = -sin
    matrix = torch.cat([torch.cat([cos, -sin], 1), torch.cat([sin, cos], 1)], 0)
    return _halves(b, _times(b, b.concat([x.re, x.im], axis), axis, matrix), axis)


def _c2c(b: Builder, meta: Any, x: Complex | Value, dim: Sequence[int], normalization: int, forward: bool) -> Complex:
    x = _as_complex(b, x, x.re.dtype if isinstance(x, Complex) else x.dtype)
    scale = _scale(b, [x.re.shape[d] for d in dim], normalization)
    for i, d in enumerate(dim):
        x = _along(b, x, d, scale if i == 0 else 1.0, forward)
    return x


def _r2c(b: Builder, meta: Any, x: Value, dim: Sequence[int], normalization: int, onesided: bool) -> Complex:
    import torch

    *others, last = dim
    scale = _scale(b, [x.shape[d] for d in dim], normalization)
    n = x.shape[last]
    assert isinstance(n, int)
    cos, sin = _waves(b, n, n // 2 + 1 if onesided else n, scale, x.dtype)
    y = _halves(b, _times(b, x, last, torch.cat([cos, -sin], 1)), last)
    for d in others:
        y = _along(b, y, d, 1.0, True)
    return y


def _c2r(b: Builder, meta: Any, x: Complex, dim: Sequence[int], normalization: int, n: Any) -> Value:
    """The missing half is the conjugate of the given one, so inner frequencies count twice."""
    import torch

    *others, last = dim
    scale = _scale(b, [*(x.re.shape[d] for d in others), n], normalization)
    for d in others:
        x = _along(b, x, d, 1.0, False)
    k = n // 2 + 1
    cos, sin = _waves(b, n, k, scale, x.re.dtype)
    weight = torch.full((k,), 2.0, dtype=torch.float64)
    weight[0] = 1
    if n % 2 == 0:
        weight[-1] = 1
    matrix = torch.cat([(cos * weight).T, (-sin * weight).T], 0)
    return _times(b, b.concat([x.re, x.im], last), last, matrix)


# ---- dispatch -----------------------------------------------------------------------------------------------------------
def _part(meta: Any) -> Any:
    """meta of one part."""
    import torch

    if isinstance(meta, (list, tuple)):
        return [_part(m) for m in meta]
    real = {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(meta.dtype, meta.dtype)
    return PartMeta(meta.shape, real)


def holds_complex(x: Any) -> bool:
    """True if a Complex is among the arguments."""
    if isinstance(x, (list, tuple)):
        return any(holds_complex(v) for v in x)
    return isinstance(x, Complex)


def _pick(x: Any, part: str) -> Any:
    if isinstance(x, (list, tuple)):
        return type(x)(_pick(v, part) for v in x)
    return getattr(x, part) if isinstance(x, Complex) else x


def _by_parts(real: Handler, b: Builder, args: Sequence[Any], kwargs: Mapping[str, Any], meta: Any) -> Any:
    """An operator that treats all elements alike (views, joins, sums) on each part."""
    re, im = (real(b, _pick(args, part), kwargs, _part(meta)) for part in ("re", "im"))
    if isinstance(re, (list, tuple)):
        return [Complex(p, q) for p, q in zip(re, im, strict=True)]
    return Complex(re, im)


_PARTWISE = (
    "view reshape _unsafe_view view_copy flatten unflatten view_as reshape_as squeeze unsqueeze ravel expand expand_as "
    "broadcast_to permute transpose swapaxes t mT movedim slice narrow select split split_with_sizes chunk unbind diagonal "
    "unfold flip cat concat stack repeat repeat_interleave roll slice_scatter select_scatter constant_pad_nd clone contiguous "
    "alias detach lift_fresh_copy sum mean neg index index_select gather copy resolve_conj resolve_neg tril triu cumsum "
    "as_strided index_put index_add col2im lift data"
)
_BY_PARTS = frozenset(_PARTWISE.split())

_BILINEAR = frozenset(("matmul", "mm", "bmm", "mv", "dot", "einsum"))

_COMPLEX: dict[str, Callable[..., Any]] = {
    "view_as_real": _view_as_real, "view_as_real_copy": _view_as_real, "real": _real, "imag": _imag, "_conj": _conj, "conj": _conj,
    "conj_physical": _conj, "abs": _abs, "angle": _angle, "_to_copy": _to, "to": _to, "add": _add(1), "sub": _add(-1),
    "mul": _mul, "div": _div, "true_divide": _div, "exp": _exp, "reciprocal": _reciprocal, "where": _where, "_fft_c2c": _c2c,
    "_fft_c2r": _c2r}  # fmt: skip

_FROM_REAL: dict[str, Callable[..., Any]] = {
    "view_as_complex.default": _view_as_complex, "complex.default": _complex, "polar.default": _polar,
    "_fft_r2c.default": _r2c, "_fft_c2c.default": _c2c, "_to_copy.default": _to, "to.dtype": _to}  # fmt: skip


def with_complex(handlers: Mapping[str, Handler]) -> dict[str, Handler]:
    """The handlers, each able to take complex operands where that has a meaning; and those that only complex ones need."""
    names = {*handlers, *(f"aten.{n}" for n in _FROM_REAL), *(f"aten.{n}.default" for n in _COMPLEX)}
    return {name: _dispatched(name, handlers.get(name)) for name in sorted(names) if _exists(name, handlers)}


def _exists(name: str, handlers: Mapping[str, Handler]) -> bool:
    return name in handlers or name.removeprefix("aten.") in _FROM_REAL or name.split(".")[1] in (
        "view_as_real", "imag", "angle", "_fft_c2r")  # fmt: skip


def _dispatched(name: str, real: Handler | None) -> Handler:
    op = name.split(".")[1]
    on_complex = handler(_COMPLEX[op]) if op in _COMPLEX else None
    from_real = _FROM_REAL.get(name.removeprefix("aten."))
    make = handler(from_real) if from_real is not None else None

    def run(b: Builder, args: Sequence[Any], kwargs: Mapping[str, Any], meta: Any) -> Any:
        if not holds_complex([*args, *kwargs.values()]):
            if make is not None and (real is None or meta.dtype.is_complex):
                return make(b, args, kwargs, meta)
            if real is not None:
                return real(b, args, kwargs, meta)
        elif on_complex is not None:
            return on_complex(b, args, kwargs, meta)
        elif op in _BY_PARTS and real is not None:
            return _by_parts(real, b, args, kwargs, meta)
        elif op in _BILINEAR and real is not None:
            return _bilinear(real, b, args, kwargs, meta)
        raise b.error("complex tensors are not supported here", "compute with real and imaginary parts")

    return run
