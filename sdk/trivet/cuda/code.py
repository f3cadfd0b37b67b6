"""CUDA C of one part: kernels, and the launches that run them.

A kernel's text is written for one node. It reads addresses and those sizes that are not known yet from numbered words; nodes whose texts
come out alike share a kernel. A launch gives the words their meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from trivet.fbs.structs import DType
from trivet.ir.dim import Dim, bounds, ceil_div, dim_min
from trivet.ir.graph import Node, Value
from trivet.ir.types import SIZES

KERNELS = Path(__file__).parent / "kernels"
CTYPE = {DType.bool: "u8", DType.u8: "u8", DType.i8: "i8", DType.i16: "i16", DType.i32: "i32", DType.i64: "i64",
         DType.f16: "f16", DType.bf16: "bf16", DType.f32: "f32", DType.f64: "f64"}  # fmt: skip
WORK = {DType.bool: "i32", DType.u8: "i32", DType.i8: "i32", DType.i16: "i32", DType.i32: "i32", DType.i64: "i64",
        DType.f16: "f32", DType.bf16: "f32", DType.f32: "f32", DType.f64: "f64"}  # fmt: skip
GRID_X, GRID_Z = (1 << 31) - 1, 65535  # most blocks of a grid; y as z
NARROW = (1 << 31) - 1  # indices below it are 32 bits wide
Size = int | Dim
Word = tuple[
    str, "Value | Size | None"
]  # ("value", its address), ("dim", a size), ("flag", address of the device's error flag)


@dataclass(frozen=True, slots=True)
class Launch:
    """One run of a kernel. grid: blocks in x, y, z; time: of the node, in the plan."""

    kernel: str
    grid: tuple[Size, Size, Size]
    threads: int
    words: tuple[Word, ...]
    time: int


@dataclass(slots=True)
class Code:
    """Kernels and launches of a part so far. literals: sizes known when compiling are literals in the code."""

    ranges: dict[str, tuple[int, int]]
    literals: bool = True
    tf32: bool = False
    kernels: dict[str, str] = field(default_factory=dict)  # text (with NAME for the name): name
    launches: list[Launch] = field(default_factory=list)
    headers: set[str] = field(default_factory=set)
    time: int = 0

    def source(self) -> str:
        """The whole text, for a compiler of CUDA C or (with TRV_SHIM defined) of C++."""
        order = [h for h in ("base", "gemm", "rows", "attention", "rnn", "sort") if h in self.headers or h == "base"]
        return "\n".join([*(header(h) for h in order), *(t.replace("@NAME@", n) for t, n in self.kernels.items())])

    def most(self, *sizes: Size) -> int:
        """A bound of the product of sizes."""
        n = 1
        for s in sizes:
            n *= max(abs(s) if isinstance(s, int) else bounds(s, self.ranges)[1], 1)
        return n


@cache
def header(name: str) -> str:
    """A file of kernels/."""
    return (KERNELS / f"{name}.cuh").read_text(encoding="utf-8")


class Kernel:
    """Writes one kernel of a node. index: C type of indices."""

    def __init__(self, code: Code, values: Sequence[Value | None], *headers: str, wide: bool = False) -> None:
        self.code = code
        self.words: list[Word] = []
        self.lines: list[str] = []
        self.before: list[str] = []
        code.headers.update(headers)
        narrow = not wide and all(span(code, v) <= NARROW for v in values if v is not None)
        self.index = "i32" if narrow else "i64"

    # -- words
    def word(self, word: Word) -> str:
        if word not in self.words:
            self.words.append(word)
        return f"w[{self.words.index(word)}]"

    def size(self, d: Size) -> str:
        """A size as a C expression."""
        if isinstance(d, int) and (self.code.literals or d in (0, 1)):
            return f"({d})" if abs(d) < 1 << 31 else f"({d}LL)"
        return f"({self.index}){self.word(('dim', d))}"

    def pointer(self, v: Value, ctype: str = "", out: bool = False) -> str:
        """The address of a value's element at index 0, .., 0."""
        return f"(({'' if out else 'const '}{ctype or CTYPE[v.dtype]}*){self.word(('value', v))})"

    @property
    def flag(self) -> str:
        return f"(i32*){self.word(('flag', None))}"

    # -- text
    def add(self, *lines: str) -> None:
        self.lines += lines

    def unravel(self, flat: str, shape: Sequence[Size], names: Sequence[str]) -> None:
        """Declares the index of each axis of a flat position."""
        index = self.index
        if not shape:
            return
        self.add(f"{index} r_{names[-1]} = {flat};")
        for d, name in reversed(list(zip(shape[1:], names[1:], strict=True))):
            self.add(f"const {index} {name} = r_{names[-1]} % {self.size(d)}; r_{names[-1]} /= {self.size(d)};")
        self.add(f"const {index} {names[0]} = r_{names[-1]};")

    def offset(self, names: Sequence[str], strides: Sequence[Size]) -> str:
        """Elements from the first one of a value."""
        terms = [
            n if s == 1 else f"{n} * {self.size(s)}" for n, s in zip(names, strides, strict=True) if s != 0 and n != "0"
        ]
        return " + ".join(terms) or "0"

    def launch(self, grid: tuple[Size, Size, Size], threads: int) -> None:
        """Ends the kernel and runs it. A grid with a 0 is not run."""
        text = "\n".join([*self.before, f"TRV_KERNEL(@NAME@, {max(len(self.words), 1)}, {threads}) {{", "TRV_ARGS; (void)w;",
                          f"typedef {self.index} I;", *self.lines, "}"])  # fmt: skip
        if self.before:  # names of types that come before belong to the kernel alone
            text = f"namespace @NAME@_space {{\n{text}\n}}"
        name = self.code.kernels.setdefault(text, f"k{len(self.code.kernels)}")
        self.code.launches.append(Launch(name, grid, threads, tuple(self.words), self.code.time))

    def each(self, count: Size, threads: int = 256) -> None:
        """Begins a kernel whose threads take one element each, of position i."""
        self.add(f"const I i = (I)blockIdx.x * {threads} + (I)threadIdx.x;", f"if (i >= {self.size(count)}) return;")

    def launch_each(self, count: Size, threads: int = 256) -> None:
        self.launch((ceil_div(count, threads), 1, 1), threads)


# ---- values
def strides(v: Value) -> tuple[Size, ...]:
    """Elements between neighbours along each axis."""
    if v.placement is not None:
        return tuple(1 if d == 1 else s for d, s in zip(v.shape, v.placement.strides, strict=True))
    return dense(v.shape)


def dense(shape: Sequence[Size]) -> tuple[Size, ...]:
    """Strides of a row-major tensor."""
    out: list[Size] = []
    step: Size = 1
    for d in reversed(shape):
        out.append(step)
        step = step * d
    return tuple(reversed(out))


def spread(v: Value, shape: Sequence[Size]) -> tuple[Size, ...]:
    """Strides of a value that is broadcast to a shape."""
    own, missing = strides(v), len(shape) - len(v.shape)
    return (0,) * missing + tuple(0 if d == 1 else s for d, s in zip(v.shape, own, strict=True))


def span(code: Code, v: Value) -> int:
    """A bound of the distance between elements of a value."""
    return max(1, code.most(*v.shape), sum(code.most(d, s) for d, s in zip(v.shape, strides(v), strict=True)))


def count(shape: Sequence[Size]) -> Size:
    """How many elements."""
    n: Size = 1
    for d in shape:
        n = n * d
    return n


def merged(shape: Sequence[Size], *tables: Sequence[Size]) -> tuple[list[Size], list[list[Size]]]:
    """The same elements with as few axes as all strides allow."""
    dims: list[Size] = []
    out: list[list[Size]] = [[] for _ in tables]
    for i, d in enumerate(shape):
        if d == 1:
            continue
        steps = [t[i] for t in tables]
        if dims and all(o[-1] == s * d for o, s in zip(out, steps, strict=True)):
            dims[-1] = dims[-1] * d
            for o, s in zip(out, steps, strict=True):
                o[-1] = s
            continue
        dims.append(d)
        for o, s in zip(out, steps, strict=True):
            o.append(s)
    return dims, out


def limited(n: Size, most: int = GRID_Z) -> Size:
    """Blocks in y or z for n pieces of work, over which kernels loop."""
    return min(n, most) if isinstance(n, int) else dim_min(n, most)


def up(expression: str, dtype: DType) -> str:
    """An element as its working type."""
    return f"({expression} != 0)" if dtype == DType.bool else f"up({expression})"


def down(expression: str, dtype: DType) -> str:
    """A number of the working type as an element."""
    return f"(u8)(({expression}) != 0)" if dtype == DType.bool else f"down<{CTYPE[dtype]}>({expression})"


def rounded(expression: str, dtype: DType) -> str:
    """A number of the working type as it reads back after it was an element."""
    if dtype in (DType.f16, DType.bf16, DType.u8, DType.i8, DType.i16):
        return f"up(down<{CTYPE[dtype]}>({expression}))"
    return f"(i32)(({expression}) != 0)" if dtype == DType.bool else f"({WORK[dtype]})({expression})"


def aligned(v: Value, elements: int) -> bool:
    """Do the rows of a value, along its last axis, begin at multiples of so many elements, and does it begin at one? Bases are aligned to
    64 bytes.
    """
    if v.placement is None:
        return False
    p = v.placement
    at = p.offset
    if not isinstance(at, int) or at * SIZES[v.dtype] % (elements * SIZES[v.dtype]):
        return False
    return all(
        isinstance(s, int) and s % elements == 0 for d, s in zip(v.shape, strides(v), strict=True) if s != 1 and d != 1
    )


def input_at(node: Node, i: int) -> Value | None:
    """An optional operand."""
    return node.inputs[i] if i < len(node.inputs) else None
