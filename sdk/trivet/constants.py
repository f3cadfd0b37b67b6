"""How constants lie in the file: dense bytes, each stored once, and the strides with which a value reads them."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from trivet.views import dense, memory_order
from trivet.writer import ALIGN, SegmentSpec

if TYPE_CHECKING:
    from torch import Tensor

SMALL = 1 << 20  # constants up to this size are also compared by content


def layout(t: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """A constant as it is stored.

    Args:
        t: any strides.

    Returns:
        A dense tensor with the bytes to store, and strides that give t on them. Permuted and expanded tensors are stored
        as they lie in memory, so a weight and its transpose are one.
    """
    t = t.detach()
    shape, strides = tuple(int(d) for d in t.shape), tuple(int(s) for s in t.stride())
    if t.numel() == 0:
        return t.reshape(-1), tuple(int(str(s)) for s in dense(shape))
    core = t
    for axis, (d, s) in enumerate(zip(shape, strides, strict=True)):
        if d > 1 and s == 0:
            core = core.narrow(axis, 0, 1)
    order = memory_order(tuple(core.shape), tuple(core.stride()))
    if order is not None:
        return core.permute(order).reshape(-1), tuple(s if d > 1 else 1 for d, s in zip(shape, strides, strict=True))
    return t.contiguous().reshape(-1), tuple(int(str(s)) for s in dense(shape))


def raw(t: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of a dense tensor on the CPU, without a copy."""
    import torch

    flat = t.detach().cpu().contiguous()
    flat = flat.as_strided((flat.numel(),), (1,), flat.storage_offset())  # one element may have any stride
    out: np.ndarray[Any, np.dtype[np.uint8]] = flat.view(torch.uint8).numpy()
    return out


class Pool:
    """The bytes of one segment: blobs at aligned offsets, equal ones stored once."""

    def __init__(self) -> None:
        self.chunks: list[Any] = []
        self.sizes: list[int] = []
        self.size = 0
        self._places: dict[tuple[Any, ...], int] = {}
        self._keep: list[Any] = []

    @staticmethod
    def key(t: Tensor) -> tuple[Any, ...]:
        """The same for tensors of the same bytes in memory."""
        return "at", t.data_ptr(), t.numel() * t.element_size()

    def add(self, t: Tensor) -> int:
        """Offset of a dense tensor's bytes."""
        where = self.key(t)
        nbytes = where[2]
        if nbytes == 0:
            return 0
        if where in self._places:
            return self._places[where]
        data = raw(t)
        if nbytes <= SMALL:
            content = ("is", hashlib.sha256(data.data).digest(), nbytes)
            if content in self._places:
                return self._places[content]
        self._pad(ALIGN)
        offset = self.size
        self.chunks.append(data)
        self.sizes.append(nbytes)
        self.size += nbytes
        self._keep.append(t)  # so that its address stays its own
        self._places[where] = offset
        if nbytes <= SMALL:
            self._places[content] = offset
        return offset

    def _pad(self, align: int) -> None:
        gap = -self.size % align
        if gap:
            self.chunks.append(bytes(gap))
            self.sizes.append(gap)
            self.size += gap

    def segment(self, external: bool = False) -> SegmentSpec:
        """The segment with everything added."""
        return SegmentSpec(self.chunks, self.sizes, external=external)
