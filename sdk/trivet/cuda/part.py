"""Parts of format "cuda.1": the generated code compiled, with the launches that run it (schema/cuda.fbs)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import flatbuffers

from trivet.crc import crc32c
from trivet.cuda.code import Code, Launch, Size, Word
from trivet.cuda.nodes import compile_node
from trivet.cuda.nvrtc import Image, images
from trivet.error import Error
from trivet.fbs import CudaPart
from trivet.ir.graph import Value
from trivet.targets.base import Piece
from trivet.writer import flat_bytes, flat_records, records

MOST_WORDS = 512
KINDS = {"value": 0, "dim": 1, "flag": 2}
Compiler = Callable[[str, tuple[int, ...]], Sequence[Image]]
compiler: Compiler = images  # tests put another one in its place


def cuda_part(piece: Piece, archs: tuple[int, ...], tf32: bool = False) -> bytes:
    """Compiles a piece of a graph.

    Args:
        piece: its kernels must be ones that nodes.refuses takes.
        archs: compute capabilities, as 87 for 8.7.
        tf32: products of f32 may round their operands to 10 bits, on tensor cores.

    Raises:
        Error: no compiler is installed, or none for an architecture.
    """
    code = Code(piece.graph.ranges(), tf32=tf32)
    for node, time in piece.kernels:
        compile_node(code, node, time)
    for launch in code.launches:
        if len(launch.words) > MOST_WORDS:
            raise Error(f"a kernel needs {len(launch.words)} addresses and sizes, at most {MOST_WORDS} are possible",
                        remedy="this is a bug of trivet: report it with the model")  # fmt: skip
    return write(code, piece, compiler(code.source(), archs) if code.launches else ())


def write(code: Code, piece: Piece, made: Sequence[Image]) -> bytes:
    """The flatbuffer."""
    numbers = {name: i for i, name in enumerate(code.kernels.values())}
    words: list[dict[str, int]] = []
    runs: dict[tuple[Word, ...], int] = {}
    rows = []
    for launch in code.launches:
        if launch.words not in runs:
            runs[launch.words] = len(words)
            words += [{"kind": KINDS[kind], "index": _index(kind, what, piece)} for kind, what in launch.words]
        rows.append(_row(launch, numbers, runs, piece))
    blob = b""
    table = []
    for m in made:
        table.append({"kind": m.kind, "arch": m.arch, "offset": len(blob), "size": len(m.data)})
        blob += m.data + bytes(-len(m.data) % 16)
    b = flatbuffers.Builder(len(blob) + 4096)
    data = flat_bytes(b, blob, 1, 16)
    made_of = [records(name, r) for name, r in (("CudaImage", table), ("CudaLaunch", rows), ("CudaWord", words))]
    parts = [flat_records(b, r) for r in made_of]
    CudaPart.CudaPartStart(b)
    CudaPart.AddImages(b, parts[0])
    CudaPart.AddLaunches(b, parts[1])
    CudaPart.AddWords(b, parts[2])
    CudaPart.AddKernels(b, len(numbers))
    CudaPart.AddCode(b, data)
    CudaPart.AddCrc(b, crc32c(b"".join([*(r.tobytes() for r in made_of), blob])))
    b.Finish(CudaPart.CudaPartEnd(b), b"TRVU")
    return bytes(b.Output())


def _row(launch: Launch, numbers: dict[str, int], runs: dict[tuple[Word, ...], int], piece: Piece) -> dict[str, object]:
    return {"kernel": numbers[launch.kernel], "threads": launch.threads, "grid": [piece.dim(g) for g in launch.grid],
            "words": runs[launch.words], "count": len(launch.words), "time": launch.time}  # fmt: skip


def _index(kind: str, what: Value | Size | None, piece: Piece) -> int:
    if kind == "value":
        return piece.value(cast(Value, what))
    return piece.dim(cast(Size, what)) if kind == "dim" else 0
