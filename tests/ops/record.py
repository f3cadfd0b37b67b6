"""Commands as bytes: what native.run_op was asked and what it gave, for run_cases.c on machines that cannot run Python.

With TRIVET_RECORD_CASES=FILE in the environment the tests of this folder write the commands that they run at the plain level ("ref") or
at the best one, at most MOST of an operator, into FILE, and pickle what they gave into FILE.want.
"""

from __future__ import annotations

import pickle
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from trivet import native
from trivet.fbs.structs import STRUCTS

MOST = 400
LARGEST = 1 << 18  # bytes of one tensor


class Recorder:
    """Stands in for native.run_op. Commands whose tensors share memory, or that fail, are run and left out."""

    def __init__(self, path: Path) -> None:
        self.path, self.run_op = path, native.run_op
        self.file = path.open("wb")
        self.count: Counter[int] = Counter()
        self.want: list[dict[str, Any]] = []

    def __call__(self, op: int, inputs: Any, outputs: Any, attrs: Any, *, tmp: Any = (), code: Any = None, dims: Any = None,
                 dim_table: Any = None, tiles: int = 0, isa: str | None = None) -> None:  # fmt: skip
        args = [*inputs, *outputs, *tmp]
        begin = None
        if isa in (None, "ref") and self.count[op] < MOST:
            begin = self._case(int(op), inputs, outputs, tmp, attrs, code, dims, dim_table, tiles)
        self.run_op(
            op, inputs, outputs, attrs, tmp=tmp, code=code, dims=dims, dim_table=dim_table, tiles=tiles, isa=isa
        )
        if begin is not None:
            self.count[op] += 1
            self.file.write(begin)
            first = len(inputs)
            self.want.append({"op": int(op), "outputs": [_window(x) for x in args[first : first + len(outputs)]]})

    def close(self) -> None:
        self.file.close()
        Path(f"{self.path}.want").write_bytes(pickle.dumps(self.want))

    def _case(
        self, op: int, inputs: Any, outputs: Any, tmp: Any, attrs: Any, code: Any, dims: Any, table: Any, tiles: int
    ) -> bytes | None:
        windows = [_window(x) for x in (*inputs, *outputs, *tmp)]
        spans = sorted((w["address"], w["address"] + len(w["bytes"])) for w in windows if w is not None)
        if any(a[1] > b[0] for a, b in zip(spans, spans[1:], strict=False)) or any(
            w is not None and len(w["bytes"]) > LARGEST for w in windows
        ):
            return None
        a = attrs.tobytes() if hasattr(attrs, "tobytes") else bytes(attrs)
        instr = b"" if code is None else np.ascontiguousarray(code).astype(STRUCTS["MapInstr"]).tobytes()
        values = b"" if dims is None else np.asarray(dims, np.int64).tobytes()
        rows = (
            b"" if dims is None else (bytes(len(dims) * STRUCTS["Dim"].itemsize) if table is None else table.tobytes())
        )
        head = struct.pack("<8I", op, len(inputs), len(outputs), len(tmp), len(a), 0 if code is None else len(code),
                           0 if dims is None else len(dims), tiles)  # fmt: skip
        return b"".join([head, a, instr, values, rows, *map(_tensor_bytes, windows)])


def _window(x: Any) -> dict[str, Any] | None:
    """A tensor's description with the bytes from its first to its last element in memory."""
    if x is None:
        return None
    t = native.library().ffi.new("trv_tensor *")
    native.fill_tensor(t, x)
    rank = int(t.rank)
    dim, stride = [int(t.dim[i]) for i in range(rank)], [int(t.stride[i]) for i in range(rank)]
    size = x.itemsize if isinstance(x, np.ndarray) else x.element_size()
    low = sum(min(0, (d - 1) * s) for d, s in zip(dim, stride, strict=True))
    high = sum(max(0, (d - 1) * s) for d, s in zip(dim, stride, strict=True))
    empty = any(d == 0 for d in dim)
    address = int(native.library().ffi.cast("uintptr_t", t.data)) + (0 if empty else low * size)
    count = 0 if empty else (high - low + 1) * size
    return {"dtype": int(t.dtype), "flags": int(t.flags), "dim": dim, "stride": stride, "size": size, "address": address,
            "offset": 0 if empty else -low * size,
            "bytes": bytes(native.library().ffi.buffer(native.library().ffi.cast("char *", address), count)) if count else b""}  # fmt: skip


def _tensor_bytes(w: dict[str, Any] | None) -> bytes:
    if w is None:
        return struct.pack("<4I", 0, 0, 0, 0)
    rank = len(w["dim"])
    pad = [0] * (8 - rank)
    return struct.pack("<4I8q8q3Q", 1, w["dtype"], rank, w["flags"], *w["dim"], *pad, *w["stride"], *pad, w["offset"],
                       len(w["bytes"]), w["address"] % 64) + w["bytes"]  # fmt: skip
