"""The ahead-of-time half of a delegate: what it takes, how it compiles, what memories it has. One subclass per delegate."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from trivet.error import Error
from trivet.ir.dim import Dim
from trivet.ir.graph import Node


@dataclass(frozen=True, slots=True)
class Memory:
    """A memory of a device. index: its number in the plan (Region.memory). budget: bytes, 0: as many as it takes."""

    name: str
    index: int = 0
    budget: int = 0


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
    """A delegate at export time. name is that of its driver; variant what follows the dot ("sm87" of "cuda.sm87")."""

    name = ""

    def __init__(self, variant: str = "") -> None:
        self.variant = variant

    def refuses(self, node: Node) -> str:
        """Why the delegate does not take a node; "" when it takes it."""
        raise NotImplementedError

    def memories(self) -> tuple[Memory, ...]:
        """The memories that the planner may use, the usual one first."""
        return (Memory("ram"),)

    def scratch(self, node: Node) -> list[int | Dim]:
        """Bytes of each piece of scratch memory that the kernel of a node needs."""
        return []

    def inplace(self, node: Node) -> list[tuple[int, int]]:
        """(input, output) positions that may be the same memory: same shape, strides and element size."""
        return []

    def integer(self) -> Mapping[str, Integer]:
        """What it computes in integers, by kind of operator (see quantize/kinds.py); kinds that are missing stay float."""
        return {}

    def __str__(self) -> str:
        return f"{self.name}.{self.variant}" if self.variant else self.name


@dataclass(frozen=True, slots=True)
class Targets:
    """Delegates in order of preference. The last one that is "cpu" takes what no other one does."""

    all: tuple[Target, ...]

    def named(self, name: str) -> Target:
        """The delegate that a node was given to."""
        return next(t for t in self.all if t.name == name)

    def __str__(self) -> str:
        return " > ".join(str(t) for t in self.all)


def known() -> dict[str, type[Target]]:
    """Delegates of this package, by name."""
    from trivet.targets.cpu import Cpu

    return {"cpu": Cpu}


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
        out.append(have[name](variant))
    if out[-1].name != "cpu":
        out.append(have["cpu"]())
    return Targets(tuple(out))
