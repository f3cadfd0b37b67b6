"""The short way through a call whose arguments are like those of the call before: the same kind of array, dtypes, sizes.

Dtypes and sizes are bound already, so only addresses change: they go into two C arrays that stay, and one C call does the
rest. What does not fit, down to an array that would have to be copied, takes the long way (runtime.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trivet import arrays, native
from trivet.arrays import NUMPY, Buffer, Slot


def repeatable(inputs: Sequence[Buffer], made: Sequence[Buffer | None]) -> bool:
    """Whether a call's buffers, inputs and outputs, can be given this way: one kind of array, none empty, all sizes known."""
    kinds = {b.container for b in inputs}
    return kinds in ({"numpy"}, {"torch"}) and all(b is not None and b.nbytes for b in [*inputs, *made])


class Repeat:
    """Runs entry `index` of a trv_context as it was bound last. inputs, outputs: slots and the buffers of that call."""

    __slots__ = ("at", "call", "index", "inputs", "kept", "outputs", "pointer", "torch")

    def __init__(
        self, index: int, inputs: Sequence[tuple[Slot, Buffer]], outputs: Sequence[tuple[Slot, Buffer]]
    ) -> None:
        n = native.library()
        self.index, self.call = index, n.lib.trv_context_call
        self.pointer = n.ffi.typeof("uint8_t *")
        self.torch = inputs[0][1].container == "torch"
        self.at = n.ffi.cast if self.torch else n.ffi.from_buffer
        self.kept: list[Any] = []
        self.inputs, self.outputs = self._rows(inputs), self._rows(outputs)

    def _rows(self, slots: Sequence[tuple[Slot, Buffer]]) -> list[tuple[Any, Any, tuple[int, ...], int]]:
        """(its trv_buf, dtype, sizes, bits of an address that must be 0) of each, over one C array in `kept`."""
        bufs = native.library().ffi.new("trv_buf[]", max(1, len(slots)))
        self.kept += [bufs, len(slots)]
        rows = []
        for i, (slot, b) in enumerate(slots):
            bufs[i].size = b.nbytes
            dtype = arrays.torch_dtype(slot.dtype) if self.torch else NUMPY[slot.dtype]
            rows.append((bufs[i], dtype, b.shape, arrays.ITEMSIZE[slot.dtype] - 1))
        return rows

    def __call__(self, context: Any, values: Sequence[Any]) -> tuple[int, list[Any]] | None:
        """The status and the outputs in fresh memory; None where the values do not fit, and nothing was done."""
        if len(values) != len(self.inputs):
            return None
        results = self._torch(values) if self.torch else self._numpy(values)
        if results is None:
            return None
        status: int = self.call(context, self.index, *self.kept)
        return status, results

    def _numpy(self, values: Sequence[Any]) -> list[Any] | None:
        at, pointer = self.at, self.pointer
        for x, (buf, dtype, shape, _) in zip(values, self.inputs, strict=True):
            if type(x) is not np.ndarray or (x.dtype is not dtype and x.dtype != dtype) or x.shape != shape:
                return None
            flags = x.flags
            if not flags.c_contiguous or not flags.aligned:
                return None
            buf.host = at(pointer, x)
        results = []
        for buf, dtype, shape, _ in self.outputs:
            y = np.empty(shape, dtype)
            buf.host = at(pointer, y)
            results.append(y)
        return results

    def _torch(self, values: Sequence[Any]) -> list[Any] | None:
        at, pointer, torch = self.at, self.pointer, arrays.torch_module()
        tensor, strided = torch.Tensor, torch.strided
        for x, (buf, dtype, shape, mask) in zip(values, self.inputs, strict=True):
            if (
                type(x) is not tensor
                or x.is_nested
                or x.dtype is not dtype
                or x.shape != shape
                or x.layout is not strided
            ):
                return None
            if not x.is_cpu or not x.is_contiguous() or x.is_neg():
                return None
            address = x.data_ptr()
            if address & mask:
                return None
            buf.host = at(pointer, address)
        results = []
        for buf, dtype, shape, _ in self.outputs:
            y = torch.empty(shape, dtype=dtype)
            buf.host = at(pointer, y.data_ptr())
            results.append(y)
        return results
