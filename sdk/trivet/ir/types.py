"""Element types and tensor types."""

from __future__ import annotations

from dataclasses import dataclass

from trivet.fbs.structs import DType
from trivet.ir.dim import Dim, Shape

SIZES = {DType.bool: 1, DType.u8: 1, DType.i8: 1, DType.i16: 2, DType.i32: 4, DType.i64: 8, DType.f16: 2,
         DType.bf16: 2, DType.f32: 4, DType.f64: 8}  # fmt: skip
FLOATS = (DType.f16, DType.bf16, DType.f32, DType.f64)


def is_float(dtype: DType) -> bool:
    """True for f16, bf16, f32, f64."""
    return dtype in FLOATS


@dataclass(frozen=True, slots=True)
class Type:
    """dtype and logical shape of a value. The shape says nothing about memory order (see Value.order)."""

    dtype: DType
    shape: Shape

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
        return f"{self.dtype.name}[{','.join(str(d) for d in self.shape)}]"
