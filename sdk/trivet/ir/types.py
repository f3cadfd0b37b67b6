"""Element types and tensor types."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from trivet.fbs.structs import DType
from trivet.ir.dim import Dim, Shape

SIZES = {DType.bool: 1, DType.u8: 1, DType.i8: 1, DType.i16: 2, DType.i32: 4, DType.i64: 8, DType.f16: 2,
         DType.bf16: 2, DType.f32: 4, DType.f64: 8}  # fmt: skip
FLOATS = (DType.f16, DType.bf16, DType.f32, DType.f64)
INLINE = 8  # elements of an array that the text form writes out


def is_float(dtype: DType) -> bool:
    """True for f16, bf16, f32, f64."""
    return dtype in FLOATS


@dataclass(frozen=True, slots=True, eq=False)
class Quant:
    """How stored integers stand for real numbers: real = scale * (stored - zero) + offset.

    Attributes:
        scale: float32 array. axis None: 0-d, for all elements. group 0: 1-d along axis. group > 0: the value's shape with
            axis divided by group, rounded up: runs of `group` elements along axis share a scale (all other axes have
            one scale per element).
        zero: stored number that means 0, the same for all elements.
        axis: see scale.
        group: see scale.
        bits: width that the stored numbers need; 4: they fit in 4 bits, lie in 0..15 (u8), one per byte until packed.
        offset: float32 array of scale's shape, or None for 0 (formats with a minimum, zero points per channel).
        lo, hi: what quantising clamps the stored numbers to; None: the range of the dtype (or of 4 bits).
    """

    scale: np.ndarray[Any, np.dtype[np.float32]]
    zero: int = 0
    axis: int | None = None
    group: int = 0
    bits: int = 8
    offset: np.ndarray[Any, np.dtype[np.float32]] | None = None
    lo: int | None = None
    hi: int | None = None

    def _key(self) -> tuple[Any, ...]:
        offset = None if self.offset is None else (self.offset.shape, self.offset.tobytes())
        scale = (self.scale.shape, self.scale.tobytes())
        return (scale, offset, self.zero, self.axis, self.group, self.bits, self.lo, self.hi)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Quant) and self._key() == other._key())

    def __hash__(self) -> int:
        return hash(self._key())

    @property
    def per_tensor(self) -> bool:
        """One scale for all elements and no offset: what activations have."""
        return self.axis is None and self.offset is None

    def __str__(self) -> str:
        """As in the text form: {scale, zero}, then what is not the default. Many scales: {axis=.., scale=..}."""
        parts = [] if self.axis is None else [f"axis={self.axis}"]
        if self.group:
            parts.append(f"group={self.group}")
        parts.append(str(self.scale[()]) if self.axis is None else f"scale={array_text(self.scale)}")
        if self.zero:
            parts.append(str(self.zero) if self.axis is None else f"zero={self.zero}")
        if self.offset is not None:
            parts.append(f"offset={array_text(self.offset)}")
        if self.bits != 8:
            parts.append(f"bits={self.bits}")
        parts += [f"{name}={x}" for name, x in (("lo", self.lo), ("hi", self.hi)) if x is not None]
        return f"{{{', '.join(parts)}}}"


def array_text(x: np.ndarray[Any, Any]) -> str:
    """The elements in row-major order where they are few, else the CRC-32 of their bytes."""
    if x.size <= INLINE:
        return f"[{', '.join(str(e) for e in x.reshape(-1))}]"
    return f"#{zlib.crc32(np.ascontiguousarray(x).data):08x}"


def per_tensor(scale: float, zero: int = 0, *, bits: int = 8, lo: int | None = None, hi: int | None = None) -> Quant:
    """A Quant with one scale."""
    return Quant(np.float32(scale).reshape(()), zero, bits=bits, lo=lo, hi=hi)


@dataclass(frozen=True, slots=True)
class Type:
    """dtype, logical shape and quantisation of a value. The shape says nothing about memory order (see Value.order)."""

    dtype: DType
    shape: Shape
    quant: Quant | None = None

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def count(self) -> int | Dim:
        """Number of elements."""
        n: int | Dim = 1
        for d in self.shape:
            n = n * d
        return n

    @property
    def nbytes(self) -> int | Dim:
        """Bytes when dense."""
        return self.count * SIZES[self.dtype]

    @property
    def static(self) -> bool:
        return all(isinstance(d, int) for d in self.shape)

    def __str__(self) -> str:
        quant = "" if self.quant is None else str(self.quant)
        return f"{self.dtype.name}[{','.join(str(d) for d in self.shape)}]{quant}"
