"""Between torch's dtypes and ours. The only place that knows both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trivet.fbs.structs import DType

if TYPE_CHECKING:
    import torch

_NAMES = {"bool": DType.bool, "uint8": DType.u8, "int8": DType.i8, "int16": DType.i16, "int32": DType.i32,
          "int64": DType.i64, "float16": DType.f16, "bfloat16": DType.bf16, "float32": DType.f32,
          "float64": DType.f64}  # fmt: skip


def dtype_of(x: Any) -> DType:
    """Our dtype of a torch tensor or torch dtype; KeyError for one that trivet has not (complex, float8)."""
    return _NAMES[str(getattr(x, "dtype", x)).removeprefix("torch.")]


def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch dtype of ours."""
    import torch

    return {v: getattr(torch, k) for k, v in _NAMES.items()}[dtype]  # type: ignore[no-any-return]
