"""The ahead-of-time half of a delegate: what it takes, how it compiles, what memories it has. One subclass per delegate."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from trivet.error import Error
from trivet.ir.dim import Dim
from trivet.ir.graph import Graph, Node, Value

PLUGINS = "trivet.targets"  # group of entry points: packages that bring a Target


@dataclass(frozen=True, slots=True)
class Memory:
    """A memory of a device. index: its number in the plan (Region.memory). budget: bytes, 0: as many as it takes. delegate: who
    owns it, "" the host.
    """

    name: str
    index: int = 0
    budget: int = 0
    delegate: str = ""


@dataclass(frozen=True, slots=True)
class Work:
    """What a node has to do for the sizes of the example call: multiply-adds, on which kind of number ("f32", "bf16", "i8"; "" without
    any), and bytes that it reads and writes.
    """

    macs: int
    unit: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Bytes:
    """Where a constant lies: size bytes from offset of the entry's region at position `region`."""

    region: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What one part is made of.

    Attributes:
        nodes: in order: kernels, and where they belong to the piece also the views, concatenations and copies between them. Delegates
            that bind values by id (Target.opaque false) compile the kernels only: views, and pieces of a concatenation, are values of
            their own with offset and strides in the file.
        times: of nodes: the time that the debug table names it by; -1 for nodes that are no kernels.
        inputs, outputs: values that cross the border, constants not among them; Part.inputs and Part.outputs in the file. For opaque
            delegates they are dense and row-major (offsets are multiples of the element).
        graph: the entry they are of, for ranges of its symbols.
        value: id of a value in the file. Opaque delegates may ask for inputs and outputs only.
        dim: row of the dimension table that holds a size.
        data: row that a kernel writes for a symbol (nonzero, item).
        constant: where the bytes of a constant lie. Value.const.data is the tensor itself; Value.placement has its strides.
    """

    nodes: Sequence[Node]
    times: Sequence[int]
    inputs: Sequence[Value]
    outputs: Sequence[Value]
    graph: Graph
    value: Callable[[Value], int]
    dim: Callable[[int | Dim], int]
    data: Callable[[str], int]
    constant: Callable[[Value], Bytes]

    @property
    def kernels(self) -> list[tuple[Node, int]]:
        """The kernels with their times."""
        return [(n, t) for n, t in zip(self.nodes, self.times, strict=True) if t >= 0]


@dataclass(frozen=True, slots=True)
class Compiled:
    """A part. format: versioned name that the driver knows ("cpu.1"). data: its bytes, or chunks of them (bytes, contiguous arrays),
    which go one after another. segment: put large data outside of the head, where it can be mapped and stays where it is.
    """

    format: str
    data: bytes | Sequence[Any]
    segment: bool = False

    @property
    def chunks(self) -> Sequence[Any]:
        return [self.data] if isinstance(self.data, bytes) else self.data


@dataclass(frozen=True, slots=True)
class Integer:
    """What a delegate computes on stored integers, for one kind of operator.

    Attributes:
        activations: dtypes of stored inputs, "i8", "i16"; all inputs have the same one.
        weights: dtypes of stored weights, "i8", "i4"; () for kinds without weights.
        groups: weights may have a scale per group of inputs, when activations are not stored or ranged at run time.
        dynamic: takes float inputs and quantises each row while it runs.
        weight_only: takes float inputs as they are, with stored weights.
        real: can give float32 results as well as stored ones.
    """

    activations: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    groups: bool = False
    dynamic: bool = False
    weight_only: bool = False
    real: bool = False


class Target:
    """A delegate at export time. name is that of its driver; variant what follows the dot ("sm87" of "cuda.sm87").

    Attributes:
        name: of the delegate.
        memory: name of the memory that it owns, where values that its nodes write lie; "": host memory, as with unified memory.
        opaque: it sees inputs and outputs of a part only and keeps what is between to itself. Such delegates work in host memory.
        embeds: its parts hold their constants, so the file need not.
        rates: multiply-adds per second, by unit; others as "f32". For estimates: fixed numbers of a typical machine, since the same
            export gives the same bytes everywhere.
        bandwidth: bytes per second of the memory its values lie in.
        link: bytes per second between host memory and its own.
        overhead: seconds of a node that does nothing.
        handover: seconds that a step takes to begin, and a copy.
    """

    name = ""
    memory = ""
    opaque = False
    embeds = False
    rates: Mapping[str, float] = {"f32": 20e9}
    bandwidth = 10e9
    link = 5e9
    overhead = 1e-6
    handover = 10e-6

    def __init__(self, variant: str = "") -> None:
        self.variant = variant

    def refuses(self, node: Node) -> str:
        """Why the delegate does not take a node; "" when it takes it. Asked for kernels; opaque delegates are also asked for views and
        concatenations, which they compile; a refused view is made by the CPU.
        """
        raise NotImplementedError

    def compile(self, piece: Piece) -> Compiled:
        """Makes a part of nodes that refuses takes, all of one entry.

        Raises:
            Error: only for what refuses could not see.
        """
        raise NotImplementedError

    def seconds(self, node: Node, work: Work) -> float:
        """Estimated time of a node once it runs."""
        rate = self.rates.get(work.unit, self.rates["f32"])
        return self.overhead + max(work.macs / rate, work.nbytes / self.bandwidth)

    def copy_seconds(self, nbytes: int) -> float:
        """Estimated time of a copy between host memory and its own."""
        return self.handover + nbytes / self.link

    def memories(self) -> tuple[Memory, ...]:
        """The memories that the planner may use, the usual one first."""
        return (Memory(self.memory or "ram"),)

    def scratch(self, node: Node) -> list[int | Dim]:
        """Bytes of each piece of scratch memory that the kernel of a node needs; in the memory of the delegate, as Node.tmp."""
        return []

    def inplace(self, node: Node) -> list[tuple[int, int]]:
        """(input, output) positions that may be the same memory: same shape, strides and element size."""
        return []

    def integer(self) -> Mapping[str, Integer]:
        """What it computes in integers, by kind of operator (see quantize/kinds.py); kinds that are missing stay float."""
        return {}

    @property
    def owns(self) -> str:
        """Its name where it has a memory of its own, else "": what Value.memory holds for values that its nodes write."""
        return self.name if self.memory else ""

    def __str__(self) -> str:
        return f"{self.name}.{self.variant}" if self.variant else self.name


@dataclass(frozen=True, slots=True)
class Targets:
    """Delegates in order of preference. The last one that is "cpu" takes what no other one does."""

    all: tuple[Target, ...]

    def named(self, name: str) -> Target:
        """The delegate that a node was given to."""
        return next(t for t in self.all if t.name == name)

    def inplace(self, node: Node, fallback: bool) -> list[tuple[int, int]]:
        """(input, output) positions of a node that may be the same memory: what its delegate allows, and the CPU where that is an alternative."""
        if node.op == "transfer":
            return []
        target = self.named(node.delegate or "cpu")
        pairs = target.inplace(node)
        if target.name == "cpu" or not fallback:
            return pairs
        other = self.named("cpu").inplace(node)
        return other if target.opaque else [p for p in pairs if p in other]

    def integer(self) -> Mapping[str, Integer]:
        """What is computed in integers, by kind of operator: as the first delegate that has the kind does."""
        out: dict[str, Integer] = {}
        for t in self.all:
            out = {**t.integer(), **out}
        return out

    def __str__(self) -> str:
        return " > ".join(str(t) for t in self.all)


_registered: dict[str, type[Target]] = {}
T = TypeVar("T", bound=type[Target])


def register_target(cls: T) -> T:
    """Makes a delegate of another package known by its name; may be used as a decorator. Packages that are installed can name the class
    as an entry point of the group "trivet.targets" instead.

    Raises:
        Error: a name that is no name, or that belongs to a delegate of this package.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", cls.name):
        raise Error(f"a target's name must be of lower case letters, digits and _, got {cls.name!r}")
    if cls.name in _own():
        raise Error(f"{cls.name!r} is a delegate of trivet itself", remedy="choose another name, for target and driver")
    _registered[cls.name] = cls
    return cls


def _own() -> dict[str, type[Target]]:
    """Delegates of this package: every module of trivet.targets that has a Target."""
    from trivet.targets.cpu import Cpu
    from trivet.targets.cuda import Cuda
    from trivet.targets.npu_sim import NpuSim
    from trivet.targets.openvino import Openvino

    return {cls.name: cls for cls in (Cpu, Cuda, NpuSim, Openvino)}


def known() -> dict[str, Callable[[], type[Target]]]:
    """All delegates by name, each as a function that loads it: of this package, of installed ones, registered ones."""
    out: dict[str, Callable[[], type[Target]]] = {p.name: partial(_load, p) for p in entry_points(group=PLUGINS)}
    for name, cls in {**_registered, **_own()}.items():
        out[name] = partial(_same, cls)
    return out


def _same(cls: type[Target]) -> type[Target]:
    return cls


def _load(point: EntryPoint) -> type[Target]:
    try:
        cls: type[Target] = point.load()
    except Exception as e:  # somebody else's package
        raise Error(f"the delegate {point.name!r} of {point.value} cannot be loaded: {e}",
                    remedy="repair or remove that package") from None  # fmt: skip
    return cls


def find(spec: str | Targets) -> Targets:
    """Reads a target: names in order of preference, e.g. "cpu" or "npu > cpu".

    Args:
        spec: the text, or what find returned.

    Raises:
        Error: an unknown or repeated name, or a text that is no list of names.
    """
    if isinstance(spec, Targets):
        return spec
    if not isinstance(spec, str):
        raise Error(f"target must be a text such as 'cpu', got {type(spec).__name__}")
    have = known()
    out: list[Target] = []
    for word in spec.split(">"):
        match = re.fullmatch(r"\s*([a-z][a-z0-9_]*)(?:\.([a-z0-9_+]+))?\s*", word)
        if match is None:
            raise Error(f"target {spec!r}: {word.strip()!r} is no name of a delegate",
                        remedy="write names in order of preference, e.g. target='cpu' or target='npu > cpu'")  # fmt: skip
        name, variant = match.group(1), match.group(2) or ""
        if name not in have:
            raise Error(f"target {spec!r}: there is no delegate {name!r}", remedy=f"known: {', '.join(sorted(have))}")
        if any(t.name == name for t in out):
            raise Error(f"target {spec!r} names {name!r} twice")
        out.append(have[name]()(variant))
    if all(t.name != "cpu" for t in out):
        out.append(have["cpu"]()())
    return Targets(tuple(out))
