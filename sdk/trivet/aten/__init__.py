"""ATen operators to IR. HANDLERS: {"aten.add.Tensor": handler}; an operator that is not in it is decomposed or reported."""

from __future__ import annotations

from trivet.aten import (
    block,
    complexes,
    create,
    index,
    nn,
    norm,
    pointwise,
    product,
    quantized,
    reduce,
    resample,
    rnn,
    shape,
)
from trivet.aten.common import Handler

HANDLERS: dict[str, Handler] = complexes.with_complex(
    {
        **pointwise.HANDLERS,
        **shape.HANDLERS,
        **block.HANDLERS,
        **create.HANDLERS,
        **reduce.HANDLERS,
        **product.HANDLERS,
        **nn.HANDLERS,
        **norm.HANDLERS,
        **resample.HANDLERS,
        **index.HANDLERS,
        **rnn.HANDLERS,
        **quantized.HANDLERS,
    }
)

__all__ = ["HANDLERS", "Handler"]
