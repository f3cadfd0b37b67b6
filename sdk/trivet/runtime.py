"""Runs programs in the C runtime: load() gives a Net, whose entries are called like the module that was exported."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trivet import arrays, device_io, native
from trivet.arrays import Buffer, Slot
from trivet.error import Error
from trivet.fbs.structs import DimOp
from trivet.host import Context, EntryInfo, Host, Placement, check_threads, error_of
from trivet.repeat import Repeat, repeatable


def load(
    source: Any,
    *,
    weights: Any = None,
    threads: int = 0,
    affinity: Sequence[int] = (),
    defer_crc: bool = False,
    devices: str | Sequence[str] | None = None,
    plugins: Sequence[str | os.PathLike[str]] = (),
) -> Net:
    """Opens a program, verifies it, and makes a first context.

    Args:
        source: path of a .trv file (mapped, not read), its bytes, or a Program fresh from export.
        weights: path or bytes of the external weights file, where the program has one.
        threads: how many threads run a call, the calling one among them; 0: as many as there are processors that this
            process may use, or numbers in affinity. The sessions of one load share them.
        affinity: numbers of the processors that the threads keep to, e.g. the fast ones of a phone; the calling thread
            stays where it is. Each session then has threads of its own.
        defer_crc: check the weights' checksums when they are first used instead of now (huge files).
        devices: names in order of preference, each with options where it takes some: ["cuda:0", "cpu"]. None: those that the
            program asks for, as far as this machine has them, then the CPU. A step whose device is not there, or refuses it, takes its
            alternative: a RuntimeWarning says so, and placement() shows it.
        plugins: libraries with more drivers: paths, or names of those that come with trivet ("npu_sim").

    Raises:
        Error: no such file, a damaged, foreign or newer file, too little memory, no such processor, no such device or plug-in, a
            step that no device takes.
    """
    return Net(Host(source, weights, threads, defer_crc, devices, plugins), threads if affinity else 0, affinity)


@dataclass(slots=True)
class Snapshot:
    """The content of a net's state at one moment; for the same program only. data: bytes by region id."""

    data: dict[int, bytes]

    @property
    def nbytes(self) -> int:
        return sum(len(d) for d in self.data.values())


class Net:
    """A context of a program: its own state and memory. Calls of one Net take turns; threads that want to run at the same
    time use one session() each. Made by load().
    """

    def __init__(self, host: Host, threads: int = 0, affinity: Sequence[int] = ()) -> None:
        self._threads, self._affinity = threads, tuple(affinity)
        self._context = Context(host, threads, self._affinity)
        self._entries = {info.name: Entry(self._context, info) for info in host.entries}

    # -- calling
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the entry `forward`, or the only one."""
        return self._default()(*args, **kwargs)

    def _default(self) -> Entry:
        entry = self._entries.get("forward")
        if entry is not None:
            return entry
        if len(self._entries) != 1:
            raise Error(f"the program has the entries {', '.join(self._entries)}: name the one to run",
                        remedy=f"net.{next(iter(self._entries))}(...), on the command line --entry")  # fmt: skip
        return next(iter(self._entries.values()))

    def entry(self, name: str) -> Entry:
        """An entry by name.

        Raises:
            Error: no such entry.
        """
        if name not in self._entries:
            raise Error(f"no entry {name!r}; the program has {', '.join(self._entries)}")
        return self._entries[name]

    def __getattr__(self, name: str) -> Entry:
        entries: dict[str, Entry] = self.__dict__.get("_entries", {})
        if name in entries:
            return entries[name]
        raise AttributeError(f"Net has no attribute or entry {name!r}; entries: {', '.join(entries)}")

    @property
    def entries(self) -> Mapping[str, Entry]:
        """Entries by name."""
        return dict(self._entries)

    def placement(self) -> list[Placement]:
        """Who does each step of each entry, and why it is not the device that the program would rather have."""
        return [p for e in self._entries.values() for p in self._context.placement(e.info)]

    # -- contexts and state
    def session(self, *, threads: int = 0, affinity: Sequence[int] = ()) -> Net:
        """Another context of the same program: weights shared, state and memory its own, state at its first values.

        threads, affinity: as of load, for threads of its own; without them as this one.
        """
        self._context.open()
        check_threads(threads)
        if threads == 0 and not affinity:
            threads, affinity = self._threads, self._affinity
        return Net(self._context.host, threads, affinity)

    def fork(self) -> Net:
        """Another context that goes on from this one's present state."""
        other = self.session()
        other.restore(self.snapshot())
        return other

    def reset(self) -> None:
        """State back to its first values."""
        lib = native.library().lib
        with self._context.turn():
            status = lib.trv_context_reset(self._context.open())
        self._must(status)

    def snapshot(self) -> Snapshot:
        """A copy of the state."""
        n = native.library()
        data: dict[int, bytes] = {}
        with self._context.turn():
            for i, session, region, size in self._context.states():
                room = n.ffi.new("uint8_t[]", size)
                self._must(n.lib.trv_session_read(session, region, room, size))
                data[i] = bytes(n.ffi.buffer(room))
        return Snapshot(data)

    def _must(self, status: int) -> None:
        if status != native.OK:
            raise Error(native.text(native.library().lib.trv_status_text(status)), node=self._context.host.name)

    def restore(self, snapshot: Snapshot) -> None:
        """The state as it was at a snapshot, also one of another context of this program.

        Raises:
            Error: a snapshot of another program.
        """
        lib = native.library().lib
        with self._context.turn():
            states = list(self._context.states())
            have, want = {i: len(d) for i, d in snapshot.data.items()}, {i: size for i, _, _, size in states}
            if have != want:
                raise Error(f"a snapshot of {sum(want.values())} bytes in {len(want)} regions expected, got "
                            f"{sum(have.values())} bytes in {len(have)}: it is of another program")  # fmt: skip
            for i, session, region, size in states:
                self._must(lib.trv_session_write(session, region, snapshot.data[i], size))

    @property
    def nbytes(self) -> int:
        """Bytes that this context holds: arenas, state, sessions; the weights are not in it."""
        return int(native.library().lib.trv_context_bytes(self._context.open()))

    # -- life
    def close(self) -> None:
        """Frees the context now instead of with the last reference, and the program with its last context. Results stay
        valid, and a run under way is ended. Again: does nothing.
        """
        with self._context.turn():
            pointer, self._context.ptr = self._context.ptr, None
            if pointer is not None:
                native.library().ffi.release(pointer)

    def __enter__(self) -> Net:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise Error("a Net cannot be pickled or copied: it holds memory of this process",
                    remedy="send the path and load() it there, or use net.session(), net.fork()")  # fmt: skip

    def __copy__(self) -> Any:
        return self.__reduce__()

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__reduce__()

    def __repr__(self) -> str:
        closed = " (closed)" if self._context.ptr is None else ""
        lines = [f"Net {os.path.basename(self._context.host.name)}{closed}"]
        return "\n".join([*lines, *(f"  {e}" for e in self._entries.values())])


class Entry:
    """One callable method of a net. inputs, outputs: its slots."""

    def __init__(self, context: Context, info: EntryInfo) -> None:
        ffi = native.library().ffi
        self._context, self.info = context, info
        self.name, self.inputs, self.outputs = info.name, tuple(info.inputs), tuple(info.outputs)
        self._session = context.session(info.index)
        self._codes = [int(s.dtype) for s in self.inputs]
        self._dims = [ffi.new("int64_t[8]") for _ in self.inputs]
        self._dims_of: list[tuple[int, ...] | None] = [None] * len(self.inputs)  # what _dims hold
        self._buf, self._bytes = ffi.new("trv_buf *"), ffi.typeof("uint8_t *")
        self._shapes: list[tuple[int, ...]] | None = None  # of the last inputs: sizes of outputs are known for them
        self._out_shapes: list[tuple[int, ...] | None] = [s.low if s.static else None for s in self.outputs]
        self._repeat: Repeat | None = None
        self._like: Any = None  # kind and sizes of the last call's inputs
        self._away_in = device_io.away(self._session, self.inputs)
        self._away_out = device_io.away(self._session, self.outputs)
        self._writes: list[tuple[int, Buffer]] = []  # inputs that go to the device with each run
        self._dynamic = [s.index for s in self.outputs if not s.static]
        self._late = {i for i in self._dynamic if self._data_dependent(i)}
        sig = info.signature
        self._takes_out = "out" in sig.kwargs["k"] or "out" in sig.names
        self._plain_args = sig.args["c"] == [{"kind": "tensor", "index": s.index} for s in self.inputs]
        self._plain_result = sig.result == {"kind": "tensor", "index": 0}
        self._numbers = {leaf["index"] for leaf in _leaves(sig.result) if leaf["kind"] in ("int", "float", "bool")}

    def __str__(self) -> str:
        given, made = ", ".join(str(s) for s in self.inputs), ", ".join(str(s) for s in self.outputs)
        return f"{self.name}({given}) -> ({made})"

    __repr__ = __str__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs it with the arguments of the exported module.

        out= (unless the module has an argument of that name): an array, or a list with one per output slot (None: fresh
        memory), that the results are written to.

        Raises:
            Error: arguments that do not fit, naming the argument, what was expected and what came.
        """
        out = kwargs.pop("out") if "out" in kwargs and not self._takes_out else None
        if self._plain_args and not kwargs and len(args) == len(self.inputs):
            values: Sequence[Any] = args
        else:
            values = self.info.signature.flatten_inputs(args, kwargs)
        return self._shape_results(self.run(values, out=out))

    def submit(self, *args: Any, **kwargs: Any) -> Pending:
        """Starts a run and returns as soon as the host would have to wait for a device. Arguments as of a call; they must stay as they
        are until the end. One run of a net is under way at a time: a call or submit of any of its entries ends it first; for several
        take several session()s.

        Raises:
            Error: as a call.
        """
        out = kwargs.pop("out") if "out" in kwargs and not self._takes_out else None
        values = self.info.signature.flatten_inputs(args, kwargs)
        n = native.library()
        with self._context.turn():
            bound = self.bind(values, out=out)
            self._send()
            event = n.ffi.new("trv_event *")
            status = n.lib.trv_context_submit(self._context.open(), self.info.index, event)
            if status != native.OK:
                self._fail(status)
            pending = Pending(self, bound, event)
            self._context.pending = pending
            return pending

    def _shape_results(self, results: list[Any]) -> Any:
        for i in self._numbers:
            results[i] = results[i].item()
        return results[0] if self._plain_result else self.info.signature.unflatten_outputs(results)

    def run(self, values: Sequence[Any], *, out: Any = None) -> list[Any]:
        """As a call, on flat lists: one value per input slot, one result per output slot."""
        with self._context.lock:
            if self._context.pending is not None:
                self._context.end()
            if out is None and self._repeat is not None:
                done = self._repeat(self._context.open(), values)
                if done is not None:
                    if done[0] != native.OK:
                        self._fail(done[0])
                    return done[1]
            bound = self.bind(values, out=out)
            self.execute()
            if out is None:
                self._learn(bound)
            return self.results(bound)

    def _learn(self, bound: Bound) -> None:
        """After the second call in a row with the same sizes, the next ones take the short way."""
        like = (bound.container, [b.shape for b in bound.inputs])
        here = not self._away_in and not self._away_out
        if here and like == self._like and repeatable(bound.inputs, bound.made):
            made = [b for b in bound.made if b is not None]
            self._repeat = Repeat(self.info.index, list(zip(self.inputs, bound.inputs, strict=True)),
                                  list(zip(self.outputs, made, strict=True)))  # fmt: skip
        self._like = like

    # -- pieces of a run, for tools that repeat one; the caller sees to it that nobody else runs this net meanwhile
    def bind(self, values: Sequence[Any], *, out: Any = None) -> Bound:
        """Checks and binds inputs and memory for the outputs. What it returns must live while execute() runs."""
        self._repeat = None
        if len(values) != len(self.inputs):
            raise Error(f"{len(self.inputs)} inputs expected, got {len(values)}", node=f"entry {self.name!r}")
        there = {
            s.index: x
            for x, s in zip(values, self.inputs, strict=True)
            if s.index in self._away_in and device_io.on_device(x)
        }
        inputs = [device_io.accept(x, s) if s.index in there else arrays.accept(x, s)
                  for x, s in zip(values, self.inputs, strict=True)]  # fmt: skip
        container = _container(inputs)
        outs = self._listed(out)
        arrays.check_outputs([s for s, o in zip(self.outputs, outs, strict=True) if o is None], container)
        context = self._context.open()
        self._bind_inputs(inputs, there)
        shapes = [b.shape for b in inputs]
        if self._dynamic and shapes != self._shapes:
            self._plan(context)
            self._shapes = shapes
        like = next(iter(there.values()), None)
        made = [None if shape is None else self._memory(slot, o, shape, container, like)
                for slot, o, shape in zip(self.outputs, outs, self._out_shapes, strict=True)]  # fmt: skip
        if out is not None:
            arrays.check_overlap(inputs, [(i, b) for i, b in enumerate(made) if b and outs[i] is not None])
        self._bind_outputs(made)
        return Bound(inputs, made, outs, container)

    def _memory(self, slot: Slot, out: Any, shape: tuple[int, ...], container: str, like: Any) -> Buffer:
        """Of an output: the caller's, or fresh; like: an input on the device, where the output then lies too."""
        if slot.index in self._away_out:
            if out is not None and device_io.on_device(out):
                return device_io.accept(out, slot)
            if out is None and like is not None:
                return device_io.allocate(like, slot, shape)
        return arrays.allocate(container, slot.dtype, shape) if out is None else arrays.accept_out(out, slot, shape)

    def execute(self) -> None:
        """Runs the entry on what is bound."""
        self._send()
        status = native.library().lib.trv_context_run(self._context.open(), self.info.index)
        if status != native.OK:
            self._fail(status)

    def results(self, bound: Bound) -> list[Any]:
        """The outputs of the last execute()."""
        for i, region in self._away_out.items():
            b = bound.made[i]
            if b is not None and not device_io.on_device(b.keep):
                status = device_io.move(self._session, region, b, write=False)
                if status != native.OK:
                    self._fail(status)
        return [self._late_output(i, bound.container, bound.outs[i]) if b is None else b.keep
                for i, b in enumerate(bound.made)]  # fmt: skip

    def _listed(self, out: Any) -> list[Any]:
        if out is None:
            return [None] * len(self.outputs)
        outs = list(out) if isinstance(out, (list, tuple)) else [out]
        if len(outs) != len(self.outputs):
            raise Error(f"out=: {len(self.outputs)} arrays expected, got {len(outs)}", node=f"entry {self.name!r}")
        return outs

    def _send(self) -> None:
        """Inputs of the host to their place in the device's memory, which a run may use for something else when it has read them."""
        if self._writes:
            status = native.library().lib.trv_context_plan(self._context.open(), self.info.index)
            for region, b in self._writes:
                status = status or device_io.move(self._session, region, b, write=True)
            if status != native.OK:
                self._fail(status)

    def _bind_inputs(self, inputs: Sequence[Buffer], there: Mapping[int, Any]) -> None:
        n, buf, pointer = native.library(), self._buf, self._bytes
        bind, cast = n.lib.trv_session_bind_input, n.ffi.cast
        for i, b in enumerate(inputs):
            dims = self._dims[i]
            if b.shape != self._dims_of[i]:
                arrays.check_shape(b.shape, self.inputs[i])
                for axis, size in enumerate(b.shape):
                    dims[axis] = size
                self._dims_of[i] = b.shape
            buf.host, buf.size = cast(pointer, b.address), b.nbytes
            if i in self._away_in:
                buf.host, buf.dev = n.ffi.NULL, b.address if i in there else 0
            status = bind(self._session, i, self._codes[i], len(b.shape), dims, buf[0])
            buf.dev = 0
            if status != native.OK:
                self._fail(status)
        self._writes = [(region, inputs[i]) for i, region in self._away_in.items() if i not in there]

    def _bind_outputs(self, results: Sequence[Buffer | None]) -> None:
        n, buf = native.library(), self._buf
        for i, b in enumerate(results):
            if b is not None:
                buf.host, buf.size = n.ffi.cast(self._bytes, b.address), b.nbytes
                if i in self._away_out:
                    buf.host, buf.dev = n.ffi.NULL, b.address if device_io.on_device(b.keep) else 0
                status = n.lib.trv_session_bind_output(self._session, i, buf[0])
                buf.dev = 0
                if status != native.OK:
                    self._fail(status)

    def _plan(self, context: Any) -> None:
        """Sizes of outputs for the inputs bound. Buffers of the last call may be too small for them: unbound first."""
        n, buf = native.library(), self._buf
        self._shapes = None
        buf.host, buf.size = n.ffi.NULL, 0
        for i in self._dynamic:
            status = n.lib.trv_session_bind_output(self._session, i, buf[0])
            if status != native.OK:
                self._fail(status)
        status = n.lib.trv_context_plan(context, self.info.index)
        if status != native.OK:
            self._fail(status)
        for i in self._dynamic:
            if i not in self._late:
                self._out_shapes[i] = self._shape(i)

    def _shape(self, i: int) -> tuple[int, ...]:
        t = native.library().lib.trv_session_output(self._session, i)
        return tuple(int(t.dim[d]) for d in range(t.rank))

    def _late_output(self, i: int, container: str, out: Any) -> Any:
        """An output whose size the run itself found: copied out of the arena."""
        ffi, lib = native.library().ffi, native.library().lib
        slot, t, shape = self.outputs[i], lib.trv_session_output(self._session, i), self._shape(i)
        made = arrays.allocate(container, slot.dtype, shape) if out is None else arrays.accept_out(out, slot, shape)
        if i in self._away_out:
            status = device_io.move(self._session, self._away_out[i], made, write=False)
            if status != native.OK:
                self._fail(status)
            return made.keep
        if made.nbytes:
            ffi.memmove(ffi.cast("uint8_t *", made.address), t.data, made.nbytes)
        return made.keep

    def _data_dependent(self, i: int) -> bool:
        """Whether a kernel writes a size of output i while the entry runs."""
        view = native.library().lib.trv_session_view(self._session)
        value = view.values[self.outputs[i].value]
        rows, seen = {int(value.dim[d]) for d in range(value.rank)}, set[int]()
        while rows:
            row = rows.pop()
            d = view.dim_table[row]
            if d.op == DimOp.data:
                return True
            if d.op not in (DimOp.const_, DimOp.input) and row not in seen:
                rows |= {int(d.a), int(d.b)}
            seen.add(row)
        return False

    def _fail(self, status: int) -> None:
        self._shapes = self._repeat = None
        diag = native.library().lib.trv_session_diag(self._session)
        raise error_of(diag, self._context.host, self.info, status)


class Pending:
    """A run that was submitted."""

    def __init__(self, entry: Entry, bound: Bound, event: Any) -> None:
        self._entry, self._bound, self._event = entry, bound, event
        self._results: list[Any] | None = None
        self._error: Error | None = None

    def done(self) -> bool:
        """Whether result() would return at once. Goes on with what the host has to do for the run."""
        with self._entry._context.lock:
            return self._advance(0)

    def result(self) -> Any:
        """Waits, and returns what the call would have.

        Raises:
            Error: what went wrong, each time it is asked.
        """
        with self._entry._context.lock:
            self._advance((1 << 64) - 1)
        if self._error is not None:
            raise self._error
        assert self._results is not None
        return self._entry._shape_results(list(self._results))

    def _advance(self, timeout_ns: int) -> bool:
        """Under the context's lock."""
        if self._results is None and self._error is None:
            self._entry._context.open()
            status = native.library().lib.trv_event_wait(self._event, timeout_ns)
            if status == native.PENDING:
                return False
            if self._entry._context.pending is self:
                self._entry._context.pending = None
            try:
                if status != native.OK:
                    self._entry._fail(status)
                self._results = self._entry.results(self._bound)
            except Error as e:
                self._error = e
        return True


@dataclass(slots=True)
class Bound:
    """Memory of one run. made: of the outputs, None where the run finds the size; outs: what the caller gave for them."""

    inputs: list[Buffer]
    made: list[Buffer | None]
    outs: list[Any]
    container: str


def _leaves(tree: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if "kind" in tree:
        yield tree
    else:
        for child in tree["c"]:
            yield from _leaves(child)


def _container(inputs: Sequence[Buffer]) -> str:
    """What the results are: as the inputs; without any, torch when the process uses it."""
    kinds = {b.container for b in inputs}
    for kind in ("torch", "numpy"):
        if kind in kinds:
            return kind
    return "torch" if arrays.torch_module() is not None else "numpy"
