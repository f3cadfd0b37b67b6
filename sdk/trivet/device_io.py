"""Inputs and outputs that lie in a device's memory (export's device_io): arrays of the device are bound as they are, the host's are copied
to and from the planned place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trivet import arrays, native
from trivet.arrays import Buffer, Slot
from trivet.error import Error


def away(session: Any, slots: Sequence[Slot]) -> dict[int, int]:
    """Region by position of the slots in memory that the host does not reach."""
    view = native.library().lib.trv_session_view(session)
    out = {}
    for s in slots:
        region = int(view.storages[view.values[s.value].storage].region)
        if not view.memories >> int(view.region_table[region].memory) & 1:
            out[s.index] = region
    return out


def on_device(x: Any) -> bool:
    """Whether an array lies in the memory of a device: a torch tensor that is not the CPU's."""
    torch = arrays.torch_module()
    return torch is not None and isinstance(x, torch.Tensor) and x.is_cuda


def accept(x: Any, slot: Slot) -> Buffer:
    """A device's array for a slot in its memory, borrowed. Work that torch has under way for it is waited for.

    Raises:
        Error: another dtype, gaps.
    """
    torch = arrays.torch_module()
    if x.dtype != arrays.torch_dtype(slot.dtype) or x.dim() != slot.rank:
        raise Error(f"a {arrays.LONG[slot.dtype]} tensor of rank {slot.rank} expected, got {x.dtype} of rank {x.dim()}",
                    node=f"'{slot.name}'")  # fmt: skip
    if not x.is_contiguous():
        raise Error("a contiguous tensor expected on the device", node=f"'{slot.name}'", remedy="x.contiguous()")
    torch.cuda.current_stream(x.device).synchronize()
    return Buffer(int(x.data_ptr()), tuple(x.shape), int(x.nbytes), x, "torch")


def allocate(like: Any, slot: Slot, shape: tuple[int, ...]) -> Buffer:
    """Fresh memory for an output beside an input on the device."""
    torch = arrays.torch_module()
    return accept(torch.empty(shape, dtype=arrays.torch_dtype(slot.dtype), device=like.device), slot)


def move(session: Any, region: int, buffer: Buffer, write: bool) -> int:
    """Copies between a host buffer and the planned place of a slot. The C status."""
    n = native.library()
    if buffer.nbytes == 0:
        return native.OK
    at = n.ffi.cast("void *", buffer.address)
    call = n.lib.trv_session_write if write else n.lib.trv_session_read
    return int(call(session, region, at, buffer.nbytes))
