"""Golden pairs: inputs and the outputs that they give, in the program's file, for a device to check itself with (trv_selftest)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trivet.arrays import Slot
from trivet.bench import random_inputs
from trivet.error import Error
from trivet.fbs.structs import DType
from trivet.program import Program
from trivet.runtime import load
from trivet.writer import SegmentSpec, records

TOLERANCE = 1e-5  # of the largest magnitude of an output, for real numbers; integers are equal
HALF = 2e-3  # the same for 16 bits


def add(program: Program, count: int) -> Program:
    """The program with `count` pairs for each entry, made by running it here on random inputs.

    Quantised inputs take any stored value, real ones are normal numbers, other integers 0 or 1. State is reset before each pair.

    Raises:
        Error: a program read from a file, or one whose weights lie elsewhere.
    """
    spec = program._spec
    if spec is None:
        raise Error(
            "golden pairs go into what export returns, not into a program read from a file",
            remedy="export(..., golden=N)",
        )
    net = load(bytes(program.to_bytes()), threads=1)
    rows: list[dict[str, Any]] = []
    chunks: list[bytes] = []
    cases = 0
    for e, view in enumerate(program.view.entries):
        entry = net.entry(view.name)
        for k in range(count):
            rng = np.random.default_rng(1000 * e + k)
            given = [_input(s, view.inputs[s.index] in view.quants, rng) for s in entry.inputs]
            net.reset()
            got = entry.run(given)
            for output, values in ((0, given), (1, got)):
                for slot, x in enumerate(values):
                    rows.append(_row(e, cases, slot, output, x))
                    chunks.append(_bytes(x))
            cases += 1
    at = 8 + len(rows) * 64
    for row, data in zip(rows, chunks, strict=True):
        row["offset"] = at = -(-at // 8) * 8
        at += len(data)
    room = bytearray(at)
    room[:8] = np.array([cases, len(rows)], "<u4").tobytes()
    table = records("GoldenTensor", rows).tobytes()
    room[8 : 8 + len(table)] = table
    for row, data in zip(rows, chunks, strict=True):
        room[row["offset"] : row["offset"] + len(data)] = data
    segments = [*spec.segments, SegmentSpec([bytes(room)])]
    return Program(replace(spec, segments=segments, golden_segment=len(segments) - 1), None, program.report)


def _input(slot: Slot, stored: bool, rng: np.random.Generator) -> Any:
    x = random_inputs([slot], {}, int(rng.integers(1 << 30)))[0]
    if isinstance(x, np.ndarray) and x.dtype.kind in "iub":
        info = np.iinfo(x.dtype) if x.dtype.kind in "iu" else None
        low, high = (info.min, info.max + 1) if stored and info is not None else (0, 2)
        return rng.integers(low, high, x.shape).astype(x.dtype)
    return x


def _bytes(x: Any) -> bytes:
    if hasattr(x, "detach"):  # bf16 has no numpy
        import torch

        return bytes(x.detach().contiguous().view(torch.int16).numpy().tobytes())
    return np.ascontiguousarray(x).tobytes()


def _row(entry: int, case: int, slot: int, output: int, x: Any) -> dict[str, Any]:
    from trivet import native

    dtype = DType(native.dtype_code(x))
    tolerance = 0.0
    if output and dtype in (DType.f16, DType.bf16, DType.f32, DType.f64):
        values = x.float().numpy() if hasattr(x, "detach") else x.astype(np.float64)
        finite = np.abs(values[np.isfinite(values)])
        tolerance = float(finite.max(initial=0.0)) * (TOLERANCE if dtype in (DType.f32, DType.f64) else HALF)
    shape: Sequence[int] = tuple(x.shape)
    return {"entry": entry, "case_": case, "slot": slot, "output": output, "dtype": int(dtype), "tolerance": tolerance, "rank": len(shape),
            "dim": [*shape, *[0] * (8 - len(shape))], "size": len(_bytes(x)), "offset": 0}  # fmt: skip
