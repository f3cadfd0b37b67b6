"""Measures a program: load, first run, latency percentiles, memory. Needs no torch."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trivet import arrays
from trivet.arrays import Slot
from trivet.error import Error
from trivet.fbs.structs import DType
from trivet.runtime import Entry, Net, load


@dataclass(frozen=True, slots=True)
class Bench:
    """What was measured. Times in milliseconds: of the C runtime on bound buffers, call_p50_ms of whole Python calls with
    fresh outputs. Memory in bytes; peak_bytes: growth of the process over loading and all runs, -1 where the system
    does not tell.
    """

    entry: str
    threads: int
    runs: int
    warmup: int
    load_ms: float
    first_ms: float
    min_ms: float
    mean_ms: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    call_p50_ms: float
    file_bytes: int
    context_bytes: int
    peak_bytes: int
    inputs: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """For tools."""
        return asdict(self)


def bench(
    source: Any,
    values: Sequence[Any] | None = None,
    *,
    entry: str = "",
    sizes: Mapping[str, Sequence[int]] | None = None,
    weights: Any = None,
    threads: int = 0,
    warmup: int = 5,
    runs: int = 100,
    seconds: float = 10.0,
    defer_crc: bool = False,
    progress: Callable[[int, int], None] | None = None,
    devices: str | Sequence[str] | None = None,
    plugins: Sequence[str | os.PathLike[str]] = (),
) -> Bench:
    """Loads a program and times calls of one entry.

    Args:
        source: path of a .trv file, or bytes.
        values: one array per input slot; None: random numbers (zeros for integers, which are often indices).
        entry: name; "" is `forward` or the only one.
        sizes: shapes of inputs by name, for dynamic ones; else the smallest size of the range that is not 0.
        weights: as for load.
        threads: as for load.
        warmup: runs that are not counted, after the first.
        runs: runs that are counted, fewer when `seconds` are over (but 3).
        seconds: time for the counted runs.
        defer_crc: as for load.
        progress: called with (runs done, runs).
        devices, plugins: as for load.
    """
    before = _peak(reset=True)
    start = time.perf_counter()
    net = load(source, weights=weights, threads=threads, defer_crc=defer_crc, devices=devices, plugins=plugins)
    load_s = time.perf_counter() - start
    method = find_entry(net, entry)
    given = list(values) if values is not None else random_inputs(method.inputs, sizes or {})
    first_s = _time(lambda: method.run(given))
    bound = method.bind(given)  # held while it is used
    for _ in range(warmup):
        method.execute()
    times: list[float] = []
    end = time.perf_counter() + seconds
    for i in range(max(1, runs)):
        times.append(_time(method.execute))
        if progress is not None:
            progress(i + 1, runs)
        if time.perf_counter() > end and i >= 2:
            break
    calls = sorted(_time(lambda: method.run(given)) for _ in range(min(10, max(1, runs))))
    del bound
    peak = _peak()
    size = os.path.getsize(source) if isinstance(source, (str, os.PathLike)) else len(source)
    shapes = tuple(f"{s.name or s.index}: {arrays.LONG[s.dtype]}{list(np.shape(v))}"
                   for s, v in zip(method.inputs, given, strict=True))  # fmt: skip
    ms = sorted(t * 1e3 for t in times)
    return Bench(method.name, threads or os.cpu_count() or 1, len(ms), warmup, load_s * 1e3, first_s * 1e3, ms[0],
                 sum(ms) / len(ms), percentile(ms, 50), percentile(ms, 90), percentile(ms, 99),
                 percentile(calls, 50) * 1e3, size, net.nbytes,
                 peak - before if peak >= 0 and before >= 0 else -1, shapes)  # fmt: skip


def find_entry(net: Net, name: str) -> Entry:
    """An entry by name; "" is `forward` or the only one."""
    return net.entry(name) if name else net._default()


def percentile(ordered: Sequence[float], p: float) -> float:
    """The smallest value that p percent do not exceed."""
    return ordered[max(0, math.ceil(len(ordered) * p / 100) - 1)]


def random_inputs(slots: Sequence[Slot], sizes: Mapping[str, Sequence[int]], seed: int = 0) -> list[Any]:
    """Arrays that fit: normal numbers for floats, zeros for integers and bool.

    Raises:
        Error: sizes that name no input, or that do not fit.
    """
    if unknown := set(sizes) - {s.name for s in slots} - {str(s.index) for s in slots}:
        raise Error(f"no input {', '.join(sorted(unknown))}; inputs: {', '.join(str(s) for s in slots)}")
    rng = np.random.default_rng(seed)
    out: list[Any] = []
    for s in slots:
        shape = tuple(sizes.get(s.name, sizes.get(str(s.index), [smallest(a) for a in s.low])))
        arrays.check_shape(shape, s)
        if s.dtype == DType.bf16:
            import torch

            arrays.torch_module()
            out.append(torch.from_numpy(rng.standard_normal(shape, np.float32)).to(torch.bfloat16))
        elif s.dtype in (DType.f16, DType.f32, DType.f64):
            out.append(rng.standard_normal(shape).astype(arrays.NUMPY[s.dtype]))
        else:
            out.append(np.zeros(shape, arrays.NUMPY[s.dtype]))
    return out


def smallest(low: int) -> int:
    """The size that stands for a dynamic dimension when nobody names one."""
    return max(low, 1)


def read_inputs(paths: Sequence[str], slots: Sequence[Slot], sizes: Mapping[str, Sequence[int]]) -> list[Any]:
    """Arrays from files: one .npz with an array per input (by name, else in order), or .npy and raw files in order,
    each plain ("x.npy") or for a named input ("mask=m.npy"). Raw files are little-endian, dense; a dynamic shape comes
    from sizes.

    Raises:
        Error: files that cannot be read, or that do not match the inputs.
    """
    if len(paths) == 1 and paths[0].endswith(".npz"):
        return _npz(paths[0], slots)
    chosen: dict[int, str] = {}
    for path in paths:
        name, _, file = path.rpartition("=") if re.match(r"[^=/\\.]+=", path) else ("", "", path)
        free = [s for s in slots if s.index not in chosen]
        slot = next((s for s in slots if name in (s.name, str(s.index))), None) if name else free[0] if free else None
        if slot is None:
            raise Error(f"{path}: no input for it; inputs: {', '.join(str(s) for s in slots)}")
        chosen[slot.index] = file
    if missing := [str(s) for s in slots if s.index not in chosen]:
        raise Error(f"{len(slots)} inputs expected, got {len(paths)} files; missing: {', '.join(missing)}")
    return [_array(chosen[s.index], s, sizes) for s in slots]


def _npz(path: str, slots: Sequence[Slot]) -> list[Any]:
    try:
        with np.load(path, allow_pickle=False) as z:
            data = {k: z[k] for k in z.files}
    except (OSError, ValueError) as e:
        raise Error(f"{path}: {_why(e)}") from None
    if all(s.name in data for s in slots):
        return [data[s.name] for s in slots]
    if len(data) != len(slots):
        raise Error(f"{path}: {len(slots)} arrays expected ({', '.join(s.name for s in slots)}), got {', '.join(data)}")
    return list(data.values())


def _array(path: str, slot: Slot, sizes: Mapping[str, Sequence[int]]) -> Any:
    try:
        if path.endswith(".npy"):
            return np.load(path, allow_pickle=False)
        data = Path(path).read_bytes()
    except (OSError, ValueError) as e:
        raise Error(f"{path}: {_why(e)}") from None
    shape = tuple(sizes.get(slot.name, sizes.get(str(slot.index), ())))
    if not shape and not slot.static:
        raise Error(f"{path}: a raw file does not tell its shape",
                    remedy=f"add --shape {slot.name or slot.index}=1x16")  # fmt: skip
    shape = shape or slot.low
    want = int(np.prod(shape, dtype=np.int64)) * arrays.ITEMSIZE[slot.dtype]
    if len(data) != want:
        raise Error(f"{path}: {want} bytes expected ({arrays.LONG[slot.dtype]}{list(shape)}), got {len(data)}")
    if slot.dtype == DType.bf16:
        import torch

        arrays.torch_module()
        return torch.frombuffer(bytearray(data), dtype=torch.bfloat16).reshape(shape)
    return np.frombuffer(data, arrays.NUMPY[slot.dtype].newbyteorder("<")).reshape(shape)


def _why(e: Exception) -> str:
    return e.strerror if isinstance(e, OSError) and e.strerror else str(e)


def _time(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _peak(reset: bool = False) -> int:
    """Largest resident size of this process in bytes (since the last reset, where Linux lets us), -1 unknown."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) << 10  # type: ignore[index]
    except (OSError, TypeError):
        return -1
