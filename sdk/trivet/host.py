"""An open program: the mapped file with its devices and threads, what it says of its entries, its contexts and errors."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trivet import native
from trivet.arrays import Slot
from trivet.error import Error
from trivet.fbs.structs import DType, RegionKind
from trivet.signature import Signature

REMEDIES = {
    native.FORMAT: "get a good copy of the file, or export the model again",
    native.VERSION: "update trivet, or export the model again with this version",
    native.MEMORY: "free memory, or run with smaller inputs",
    native.UNSUPPORTED: "export for a target that this build has",
}


_forks = 0


def _forked() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


class Host:
    """A mapped program with its devices and threads, shared by all contexts; closed when the last one is gone."""

    __slots__ = ("contexts", "entries", "forks", "keep", "lock", "name", "ptr")

    def __init__(self, source: Any, weights: Any, threads: int, defer_crc: bool) -> None:
        n = native.library()
        check_threads(threads)
        flags = native.OPEN_DEFER_CRC if defer_crc else 0
        out, diag = n.ffi.new("trv_host **"), n.ffi.new("trv_diag *")
        self.keep: list[Any] = []
        if isinstance(source, (str, os.PathLike)):
            self.name = os.fsdecode(source)
            _check_file(self.name)
            path = n.ffi.NULL
            if weights is not None:
                if not isinstance(weights, (str, os.PathLike)):
                    raise Error(f"weights: a path expected beside a path, got {type(weights).__name__}")
                _check_file(os.fsdecode(weights))
                path = n.ffi.new("char[]", os.fsencode(weights))
            status = n.lib.trv_host_open(os.fsencode(source), path, flags, threads, out, diag)
        else:
            from trivet.program import Program

            self.name = "program"
            if isinstance(source, Program):
                self.name, source = source.name or "program", source.to_bytes()
            if isinstance(weights, (str, os.PathLike)):
                weights = Path(weights).read_bytes()
            span, more = self._span(source), self._span(b"" if weights is None else weights)
            status = n.lib.trv_host_open_span(span, more, flags, threads, out, diag)
        if status != native.OK:
            raise Error(native.diag_text(diag), node=self.name, remedy=REMEDIES.get(status, ""))
        close, keep = n.lib.trv_host_close, self.keep

        self.forks = _forks

        def free(pointer: Any, forks: int = _forks) -> None:  # before the bytes go that it has borrowed
            if forks == _forks:
                close(pointer)
            keep.clear()

        self.ptr = n.ffi.gc(out[0], free)
        self.entries = [describe(self.program, i) for i in range(self.program.entry_count)]
        self.contexts, self.lock = 0, threading.RLock()  # re-entered when a destructor runs inside enter or leave

    @property
    def here(self) -> bool:
        """Whether this is still the process that opened it; a fork has the memory, but not the threads."""
        return self.forks == _forks

    def enter(self) -> None:
        """One more context."""
        with self.lock:
            self.contexts += 1

    def leave(self) -> None:
        """One context less; the last one closes the program."""
        with self.lock:
            self.contexts -= 1
            if self.contexts == 0:
                native.library().ffi.release(self.ptr)

    @property
    def program(self) -> Any:
        return native.library().lib.trv_host_program(self.ptr)

    def _span(self, data: Any) -> Any:
        """Borrowed bytes, 16-byte aligned; copied when they are not, or when somebody could change them."""
        ffi = native.library().ffi
        try:
            view = memoryview(data)
        except TypeError:
            raise Error(f"a path, bytes or a Program expected, got {type(data).__name__}") from None
        span = ffi.new("trv_span *")
        span.size = view.nbytes
        if view.nbytes:
            borrowed = ffi.from_buffer(view) if view.readonly and view.contiguous else None
            if borrowed is None or int(ffi.cast("uintptr_t", borrowed)) % 64:
                room = ffi.new("uint8_t[]", view.nbytes + 64)
                skip = -int(ffi.cast("uintptr_t", room)) % 64
                ffi.memmove(room + skip, view.tobytes() if not view.contiguous else view, view.nbytes)
                self.keep.append(room)
                span.data = room + skip
            else:
                self.keep.append(borrowed)
                span.data = borrowed
        self.keep.append(span)
        return span[0]


def check_threads(threads: int) -> None:
    """Raises Error for what is no number of threads."""
    if not isinstance(threads, int) or not 0 <= threads < 1 << 31:
        raise Error(f"threads: 0 (all cores) or a positive number expected, got {threads!r}")


def _check_file(path: str) -> None:
    if os.path.isdir(path):
        raise Error(f"a file expected, got a directory: {path}")
    if not os.path.exists(path):
        raise Error(f"no such file: {path}")


@dataclass(slots=True)
class EntryInfo:
    """What a file says of an entry."""

    index: int
    name: str
    inputs: list[Slot]
    outputs: list[Slot]
    signature: Signature
    steps: int
    times: int
    lower_bound: int
    states: list[tuple[int, int]] = field(default_factory=list)  # (region, id)


def describe(program: Any, index: int) -> EntryInfo:
    n = native.library()
    entry, slot, region = n.ffi.new("trv_entry *"), n.ffi.new("trv_slot *"), n.ffi.new("trv_region *")
    _must(n.lib.trv_program_entry(program, index, entry), program)

    def slots(read: Any, count: int) -> list[Slot]:
        out = []
        for i in range(count):
            _must(read(program, index, i, slot), program)
            dims = range(slot.rank)
            out.append(Slot(i, native.text(slot.name), DType(slot.dtype), int(slot.value), tuple(slot.min[d] for d in dims),
                            tuple(slot.max[d] for d in dims)))  # fmt: skip
        return out

    inputs = slots(n.lib.trv_program_input, entry.input_count)
    outputs = slots(n.lib.trv_program_output, entry.output_count)
    states = []
    for r in range(entry.region_count):
        _must(n.lib.trv_program_region(program, index, r, region), program)
        if region.kind == RegionKind.state:
            states.append((r, int(region.id)))
    signature = _signature(native.text(entry.signature), inputs, outputs)
    return EntryInfo(index, native.text(entry.name), inputs, outputs, signature, entry.step_count, entry.times,
                     entry.lower_bound, states)  # fmt: skip


def _signature(text: str, inputs: Sequence[Slot], outputs: Sequence[Slot]) -> Signature:
    """The file's, or plain tensors by position for a file without one."""
    if text:
        try:
            return Signature.from_json(text)
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise Error(f"the file's signature cannot be read: {e}", remedy=REMEDIES[native.FORMAT]) from None

    def leaves(slots: Sequence[Slot]) -> list[dict[str, Any]]:
        return [{"kind": "tensor", "index": s.index} for s in slots]

    result = {"t": "tuple", "c": leaves(outputs)} if len(outputs) != 1 else leaves(outputs)[0]
    return Signature({"t": "tuple", "c": leaves(inputs)}, {"t": "dict", "k": [], "c": []}, result,
                     [s.name for s in inputs])  # fmt: skip


def _must(status: int, program: Any) -> None:
    if status != native.OK:
        raise Error(native.diag_text(program.diag) if program.diag.status else native.text(
            native.library().lib.trv_status_text(status)))  # fmt: skip


def error_of(diag: Any, host: Host, info: EntryInfo | None, status: int) -> Error:
    """What the runtime says, with the place in the user's model."""
    n = native.library()
    reason = (
        native.diag_text(diag) if diag != n.ffi.NULL and diag.status else native.text(n.lib.trv_status_text(status))
    )
    where = ""
    if info is not None:
        where = f"entry {info.name!r}"
        if diag != n.ffi.NULL and diag.time != native.NONE and diag.time < info.times:
            op, module, source = (native.text(n.lib.trv_program_debug(host.program, info.index, diag.time, k))
                                  for k in range(3))  # fmt: skip
            place = " ".join(t for t in (module, f"({source})" if source else "") if t)
            where = f"{where}, {op} {place}".rstrip() if op or place else where
    return Error(reason, node=where or os.fsdecode(host.name), remedy=REMEDIES.get(status, ""))


class Context:
    """The C side of a Net: sessions of all entries over one state and arena. Held by the Net and its entries."""

    __slots__ = ("host", "lock", "ptr")

    def __init__(self, host: Host, threads: int, affinity: Sequence[int]) -> None:
        n = native.library()
        self.host, self.lock = host, threading.Lock()
        out, diag = n.ffi.new("trv_context **"), n.ffi.new("trv_diag *")
        if not all(isinstance(c, int) and 0 <= c < 1 << 31 for c in affinity):
            raise Error(f"affinity: numbers of processors expected, got {affinity!r}")
        cpus = n.ffi.new("uint32_t[]", list(affinity))
        wish = n.ffi.new("trv_threads *", {"size": n.ffi.sizeof("trv_threads"), "count": threads, "cpus": cpus,
                                           "cpu_count": len(affinity)})  # fmt: skip
        status = n.lib.trv_context_open_on(host.ptr, native.SESSION_REPLAN, wish, out, diag)
        if status != native.OK:
            raise error_of(diag, host, None, status)
        close = n.lib.trv_context_close

        def free(pointer: Any) -> None:
            if host.here:
                close(pointer)
            host.leave()

        host.enter()
        self.ptr: Any = n.ffi.gc(out[0], free)

    def open(self) -> Any:
        """The trv_context.

        Raises:
            Error: closed.
        """
        if self.ptr is None:
            raise Error("the net is closed", remedy="load the program again")
        if not self.host.here:
            raise Error("the net belongs to the process that this one was forked from: its threads are not here",
                        remedy="load the program in each process")  # fmt: skip
        return self.ptr

    def session(self, index: int) -> Any:
        """The trv_session of an entry."""
        return native.library().lib.trv_context_session(self.open(), index)

    def states(self) -> Iterator[tuple[int, Any]]:
        """(id, trv_buf) of every state region, once."""
        seen: set[int] = set()
        for info in self.host.entries:
            view = native.library().lib.trv_session_view(self.session(info.index))
            for region, i in info.states:
                if i not in seen and view.regions[region].size:
                    seen.add(i)
                    yield i, view.regions[region]
