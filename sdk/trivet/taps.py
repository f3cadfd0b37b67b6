"""Reads the values of a running program: a hook on the C runtime copies what each command has written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trivet import arrays, native
from trivet.fbs.structs import DType
from trivet.reader import Command, EntryView, FileView
from trivet.runtime import Entry


@dataclass(slots=True)
class Tap:
    """One output of one command, as it was when the command had run. data: a copy (bfloat16 as float32)."""

    command: Command
    value: int
    name: str
    data: np.ndarray[Any, Any]


class _Memory:
    """Memory of a value as numpy reads it."""

    def __init__(self, address: int, dtype: np.dtype[Any], shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.__array_interface__ = {"data": (address, True), "typestr": dtype.str, "shape": shape, "strides": strides,
                                    "version": 3}  # fmt: skip


def file_view(entry: Entry) -> FileView:
    """The file behind an entry, read where the runtime has mapped it."""
    file = entry._context.host.program.file
    return FileView(native.library().ffi.buffer(file.data, file.size))


def run_tapped(entry: Entry, values: Sequence[Any]) -> tuple[list[Any], list[Tap]]:
    """Runs an entry as Entry.run and copies every command's outputs; a command in a loop counts with its last turn."""
    n = native.library()
    plan = file_view(entry).entry(entry.name)
    by_time = {c.time: c for c in plan.commands if c.outputs}
    view = n.lib.trv_session_view(entry._session)
    taps: dict[tuple[int, int], Tap] = {}
    failed: list[Exception] = []

    def end(_: Any, time: int) -> None:
        command = by_time.get(time)
        if command is None or failed:
            return
        try:
            for v in command.outputs:
                if not view.regions[view.storages[view.values[v].storage].region].host:
                    continue  # in the memory of a device
                taps.pop((time, v), None)
                taps[time, v] = Tap(command, v, plan.value_names[v], read_value(view, plan, v))
        except Exception as e:  # an exception cannot cross the C frames
            failed.append(e)

    callback = n.ffi.callback("void(void *, uint32_t)", end)
    hooks = n.ffi.new("trv_hooks *")
    hooks.size, hooks.end = n.ffi.sizeof("trv_hooks"), callback
    n.lib.trv_session_hooks(entry._session, hooks)
    try:
        results = entry.run(values)
    finally:
        n.lib.trv_session_hooks(entry._session, n.ffi.NULL)
    if failed:
        raise failed[0]
    return results, list(taps.values())


def read_value(view: Any, plan: EntryView, value: int) -> np.ndarray[Any, Any]:
    """A copy of a value of a session's plan, resolved as trv_view_tensor does. Only inside a hook."""
    ffi = native.library().ffi
    v = view.values[value]
    storage = view.storages[v.storage]
    offset = ffi.cast("uint64_t *", view.offsets + v.storage * view.offset_stride)[0]
    dtype = DType(v.dtype)
    size = arrays.ITEMSIZE[dtype]
    base = int(ffi.cast("uintptr_t", view.regions[storage.region].host))
    address = base + offset + v.offset + view.dims[v.shift] * size
    shape = tuple(int(view.dims[v.dim[i]]) for i in range(v.rank))
    strides = tuple(int(view.dims[v.stride[i]]) * size for i in range(v.rank))
    if 0 in shape:
        return np.zeros(shape, np.float32 if dtype == DType.bf16 else arrays.NUMPY[dtype])
    if dtype == DType.bf16:
        bits = np.array(_Memory(address, np.dtype(np.uint16), shape, strides))
        wide: np.ndarray[Any, Any] = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return wide
    out: np.ndarray[Any, Any] = np.array(_Memory(address, arrays.NUMPY[dtype], shape, strides))
    return out
