"""Weights that torchao's `quantize_` has put into a model as tensors of its own, seen by torch.export as quantise and dequantise.

Its 8-bit tensor computes a linear layer by integer products and scales written out, from which the layer would have to be guessed
back. While a model is captured it says instead what it means: real activations (quantised and made real again where it quantises
them) times real weights.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def plain_linears() -> Iterator[None]:
    """While active, linear layers with torchao's Int8Tensor weights are plain ones behind dequantize_affine."""
    if "torchao.quantization" not in sys.modules:  # no model can have such weights
        yield
        return
    import torch
    from torchao.quantization import Int8Tensor

    tables: tuple[tuple[dict[Any, Any], Any], ...] = (
        (Int8Tensor._TORCH_FN_TABLE[Int8Tensor], torch.nn.functional.linear),
        (Int8Tensor._ATEN_OP_TABLE[Int8Tensor], torch.ops.aten.linear.default),
    )
    saved = [table[key] for table, key in tables]
    for table, key in tables:
        table[key] = _linear
    try:
        yield
    finally:
        for (table, key), f in zip(tables, saved, strict=True):
            table[key] = f


def _linear(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    import torch

    x, w = args[0], args[1]
    bias = args[2] if len(args) > 2 else (kwargs or {}).get("bias")
    if w.act_pre_scale is not None:
        x = x * w.act_pre_scale
    if w.act_quant_kwargs is not None:
        x = _through_int8(x, w)
    return torch.nn.functional.linear(x, w.dequantize(x.dtype), bias)


def _through_int8(x: Any, w: Any) -> Any:
    """x as the layer sees it: quantised by rows or as a whole, with given or its own scales."""
    import torch
    from torchao.quantization.utils import get_block_size

    how = w.act_quant_kwargs
    block = list(get_block_size(x.shape, how.granularity))
    lo, hi = (-64, 63) if how.reduce_range else (-128, 127)
    ao = torch.ops.torchao
    scale, zero = w.act_quant_scale, w.act_quant_zero_point
    if scale is None:
        eps = torch.finfo(torch.float32).eps
        scale, zero = ao.choose_qparams_affine(x, how.mapping_type.name, block, torch.int8, lo, hi, eps, torch.float32,
                                               torch.int8, True)  # fmt: skip
    elif zero is None:
        zero = torch.zeros_like(scale, dtype=torch.int8)
    q = ao.quantize_affine(x, block, scale, zero, torch.int8, lo, hi)
    return ao.dequantize_affine(q, block, scale, zero, torch.int8, lo, hi, x.dtype)
