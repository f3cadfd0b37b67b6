"""An open program: the mapped file with its devices and threads, what it says of its entries, its contexts and errors."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trivet import native
from trivet.arrays import Slot
from trivet.error import Error
from trivet.fbs.structs import DType, RegionKind, StepKind
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


class Life:
    """Closes a trv_host when it is forgotten and its last context gone. Destructors hold this alone: in a cycle of garbage the host may go
    before its contexts, which need its devices. keep: what the host has borrowed.
    """

    __slots__ = ("contexts", "forks", "keep", "lock", "pointer")

    def __init__(self, pointer: Any, keep: list[Any]) -> None:
        self.pointer, self.keep, self.forks = pointer, keep, _forks
        self.contexts, self.lock = 0, threading.RLock()  # re-entered when a destructor runs inside enter or leave

    def enter(self) -> None:
        """One more context."""
        with self.lock:
            self.contexts += 1

    def leave(self) -> None:
        """One context less; the last one closes the program."""
        with self.lock:
            self.contexts -= 1
            self._close()

    def forget(self, _: Any) -> None:
        """The host's object is gone."""
        with self.lock:
            self._close()

    def _close(self) -> None:
        pointer = self.pointer
        if self.contexts == 0 and pointer is not None:
            self.pointer = None
            if self.forks == _forks:
                native.library().lib.trv_host_close(pointer)
            self.keep.clear()


class Host:
    """A mapped program with its devices and threads, shared by all contexts; closed when the last one is gone."""

    __slots__ = ("devices", "entries", "forks", "keep", "life", "name", "one_at_a_time", "ptr", "warned")

    def __init__(
        self,
        source: Any,
        weights: Any,
        threads: int,
        defer_crc: bool,
        devices: str | Sequence[str] | None = None,
        plugins: Sequence[str | os.PathLike[str]] = (),
    ) -> None:
        n = native.library()
        check_threads(threads)
        out, diag = n.ffi.new("trv_host **"), n.ffi.new("trv_diag *")
        self.keep: list[Any] = []
        self.warned = False
        wish = n.ffi.new("trv_host_desc *", {"size": n.ffi.sizeof("trv_host_desc"), "threads": threads,
                                             "flags": native.OPEN_DEFER_CRC if defer_crc else 0})  # fmt: skip
        names = _device_names(devices)
        libraries = [native.plugin_path(p) for p in _listed_plugins(plugins)]
        texts = [n.ffi.new("char[]", os.fsencode(p)) for p in libraries]
        table = n.ffi.new("char *[]", [*texts, n.ffi.NULL])  # cffi: what is assigned does not keep it
        wish.plugins, wish.plugin_count = table, len(texts)
        listed = n.ffi.NULL if names is None else n.ffi.new("char[]", ",".join(names).encode())
        wish.devices = listed
        paths: list[Any] = []
        if isinstance(source, (str, os.PathLike)):
            self.name = os.fsdecode(source)
            _check_file(self.name)
            paths.append(n.ffi.new("char[]", os.fsencode(source)))
            wish.path = paths[0]
            if weights is not None:
                if not isinstance(weights, (str, os.PathLike)):
                    raise Error(f"weights: a path expected beside a path, got {type(weights).__name__}")
                _check_file(os.fsdecode(weights))
                paths.append(n.ffi.new("char[]", os.fsencode(weights)))
                wish.weights_path = paths[1]
        else:
            from trivet.program import Program

            self.name = "program"
            if isinstance(source, Program):
                self.name, source = source.name or "program", source.to_bytes()
            if isinstance(weights, (str, os.PathLike)):
                weights = Path(weights).read_bytes()
            wish.file, wish.weights = self._span(source), self._span(b"" if weights is None else weights)
        status = n.lib.trv_host_open_with(wish, out, diag)
        if status != native.OK:
            raise _open_error(diag, status, self.name, names, libraries)
        self.forks = _forks
        self.life = Life(out[0], self.keep)
        self.ptr = n.ffi.gc(out[0], self.life.forget)
        self.devices = _opened(self.ptr)
        threads_ok = all(d.flags & native.CAP_THREADS for d in self.devices)
        self.one_at_a_time = None if threads_ok else threading.RLock()
        self.entries = [describe(self.program, i) for i in range(self.program.entry_count)]

    @property
    def here(self) -> bool:
        """Whether this is still the process that opened it; a fork has the memory, but not the threads."""
        return self.forks == _forks

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


def _device_names(devices: str | Sequence[str] | None) -> list[str] | None:
    if devices is None:
        return None
    names = [w.strip() for w in devices.split(",")] if isinstance(devices, str) else list(devices)
    if not names or not all(isinstance(w, str) and w and "," not in w for w in names):
        raise Error(f"devices: names such as 'cpu' or 'npu_sim:delay=100' expected, got {devices!r}")
    return names


def _listed_plugins(plugins: Sequence[str | os.PathLike[str]]) -> list[str | os.PathLike[str]]:
    return [plugins] if isinstance(plugins, (str, os.PathLike)) else list(plugins)


def _open_error(diag: Any, status: int, name: str, devices: list[str] | None, libraries: list[str]) -> Error:
    """What the runtime says; where it is about a device or plug-in of the lists, with its name."""
    reason, at = native.diag_text(diag), int(diag.value)
    what = native.text(diag.what)
    if "plug-in" in what and "driver" not in what and at < len(libraries):
        return Error(f"{libraries[at]}: {what}", remedy="build it against this version of trivet's headers")
    if devices and ("driver" in what or "option" in what) and at < len(devices):
        return Error(f"device {devices[at]!r}: {what}",
                     remedy="name a delegate of this build, or give its library in plugins=")  # fmt: skip
    return Error(reason, node=name, remedy=REMEDIES.get(status, ""))


@dataclass(frozen=True, slots=True)
class Device:
    """An open device. flags: TRV_CAP_*. arch: its own words."""

    name: str
    arch: str
    flags: int


def _opened(host: Any) -> list[Device]:
    n = native.library()
    bound, caps = n.ffi.new("trv_bound_device *"), n.ffi.new("trv_caps *")
    out: list[Device] = []
    while n.lib.trv_host_device(host, len(out), bound) == native.OK:
        caps.size, caps.arch = n.ffi.sizeof("trv_caps"), n.ffi.NULL
        bound.driver.caps(bound.device, caps)
        out.append(Device(native.text(bound.driver.name), native.text(caps.arch), int(caps.flags)))
    return out


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

    __slots__ = ("host", "lock", "pending", "ptr")

    def __init__(self, host: Host, threads: int, affinity: Sequence[int]) -> None:
        n = native.library()
        self.host = host
        self.lock: Any = (
            host.one_at_a_time or threading.Lock()
        )  # a device for one thread: the host's contexts take turns
        out, diag = n.ffi.new("trv_context **"), n.ffi.new("trv_diag *")
        if not all(isinstance(c, int) and 0 <= c < 1 << 31 for c in affinity):
            raise Error(f"affinity: numbers of processors expected, got {affinity!r}")
        cpus = n.ffi.new("uint32_t[]", list(affinity))
        wish = n.ffi.new("trv_threads *", {"size": n.ffi.sizeof("trv_threads"), "count": threads, "cpus": cpus,
                                           "cpu_count": len(affinity)})  # fmt: skip
        status = n.lib.trv_context_open_on(host.ptr, native.SESSION_REPLAN, wish, out, diag)
        if status != native.OK:
            raise error_of(diag, host, None, status)
        close, life = n.lib.trv_context_close, host.life

        def free(pointer: Any) -> None:
            if life.forks == _forks:
                close(pointer)
            life.leave()

        life.enter()
        self.ptr: Any = n.ffi.gc(out[0], free)
        self.pending: Any = None  # a run that was submitted and not ended yet
        if not host.warned:
            host.warned = True
            _warn_of_fallbacks([p for info in host.entries for p in self.placement(info)], host.name)

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

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The context for one caller, and no run under way."""
        with self.lock:
            self.end()
            yield

    def end(self) -> None:
        """Under lock: ends a run that is under way."""
        if self.pending is not None and self.ptr is not None:
            self.pending._advance((1 << 64) - 1)

    def session(self, index: int) -> Any:
        """The trv_session of an entry."""
        return native.library().lib.trv_context_session(self.open(), index)

    def placement(self, info: EntryInfo) -> list[Placement]:
        """What does each step of an entry."""
        n = native.library()
        step, session, out = n.ffi.new("trv_step *"), self.session(info.index), []
        step.size = n.ffi.sizeof("trv_step")
        for i in range(info.steps):
            _must(n.lib.trv_session_step(session, i, step), self.host.program)
            op, module = (
                native.text(n.lib.trv_program_debug(self.host.program, info.index, step.time, k)) for k in (0, 1)
            )
            device = "" if step.device == native.NONE else self.host.devices[step.device].name
            out.append(Placement(info.name, i, int(step.time), StepKind(step.kind).name, device, native.text(step.wanted),
                                 int(step.alternative), native.text(step.why), op, module))  # fmt: skip
        return out

    def states(self) -> Iterator[tuple[int, Any, int, int]]:
        """(id, session, region, bytes) of every state, once."""
        found: dict[int, tuple[Any, int, int]] = {}
        for info in self.host.entries:
            session = self.session(info.index)
            view = native.library().lib.trv_session_view(session)
            for region, i in info.states:
                size = int(view.region_table[region].size)
                if size and size > found.get(i, (None, 0, 0))[2]:
                    found[i] = session, region, size
        yield from ((i, *where) for i, where in found.items())


@dataclass(frozen=True, slots=True)
class Placement:
    """Who does a step of the plan.

    Attributes:
        kind: "run", "copy" (between memories), "branch", "jump".
        device: name of its device; "" for what the runtime itself does.
        wanted: delegate that the file would rather have; alternative: which of the step's parts runs, 0 the wanted one.
        why: why it is not the wanted one.
        op, module: of the step's first operator.
    """

    entry: str
    step: int
    time: int
    kind: str
    device: str
    wanted: str
    alternative: int
    why: str
    op: str
    module: str


def _warn_of_fallbacks(steps: Sequence[Placement], name: str) -> None:
    other = [p for p in steps if p.alternative]
    if not other:
        return
    reasons: dict[tuple[str, str, str], int] = {}
    for p in other:
        key = p.wanted, p.device, p.why
        reasons[key] = reasons.get(key, 0) + 1
    text = "; ".join(
        f"{count} on {device} instead of {wanted} ({why})" for (wanted, device, why), count in reasons.items()
    )
    runs = sum(p.kind == "run" for p in steps)
    warnings.warn(f"{os.path.basename(name)}: of {runs} steps {text}", RuntimeWarning, stacklevel=6)
