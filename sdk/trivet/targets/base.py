"""The ahead-of-time half of a delegate: what it takes, how it compiles, what memories it has. One subclass per delegate."""

from __future__ import annotations

import re
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
