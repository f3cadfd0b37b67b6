"""What this machine can do at most, measured: multiply-adds on registers and reads of every memory (hal/cpu/peak.c)."""

from __future__ import annotations

import json
import os
import platform
import re
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trivet import native
from trivet.error import Error

_WHAT = {"f32": 0, "i8": 1, "bf16": 2}  # TRVK_PEAK_ of hal/cpu/peak.h
_READ = 3
_CACHES = (32 << 10, 1 << 20, 32 << 20)  # where the system does not tell


@dataclass(frozen=True, slots=True)
class Machine:
    """Limits of a machine for a number of threads together.

    Attributes:
        name: of the processor.
        threads: that worked at the same time.
        ops: operations per second (a multiply-add is two) by "f32", "i8", "bf16"; 0: no instructions for it.
        reads: (bytes, bytes per second): the bandwidth of data up to that size, in all threads together; the last is memory.
    """

    name: str
    threads: int
    ops: dict[str, float]
    reads: tuple[tuple[int, float], ...]

    def rate(self, unit: str) -> float:
        """Operations per second; those of f32 where the machine has none of its own."""
        return max(self.ops.get(unit, 0.0), self.ops["f32"])

    def bandwidth(self, size: int) -> float:
        """Bytes per second at which a block of that size can be read again and again."""
        return next((rate for most, rate in self.reads if size <= most), self.reads[-1][1])

    def __str__(self) -> str:
        ops = ", ".join(f"{u} {r * 1e-9:.0f} {'GFLOP/s' if u != 'i8' else 'GOP/s'}" for u, r in self.ops.items() if r)
        names = [*("L1", "L2", "L3")[: len(self.reads) - 1], "memory"]
        reads = ", ".join(f"{n} {r * 1e-9:.1f}" for n, (_, r) in zip(names, self.reads, strict=True))
        return f"{self.name}, {self.threads} thread{'s' if self.threads > 1 else ''}: {ops}; reads GB/s: {reads}"


def measure(threads: int = 1, seconds: float = 0.02, repeats: int = 5) -> Machine:
    """Measures this machine; about a second. Operations are timed by the threads' CPU time, so that other processes do not count;
    reads by the clock, the best of the repeats: believe them only when the machine is quiet.

    Args:
        threads: how many work at the same time.
        seconds: of one repeat.
        repeats: of which the best counts.
    """
    ops = {unit: _best(partial(_work, what, seconds), threads, repeats) for unit, what in _WHAT.items()}
    reads, sizes = [], _cache_sizes()
    for i, most in enumerate((*sizes, 0)):
        size = min(most // 2, 8 << 20) if most else max(4 * sizes[-1], 128 << 20)
        rate = _best(partial(_read, size, seconds), threads, repeats)
        reads.append((most * (threads if i < 2 else 1) or 1 << 62, rate))  # the first two are each core's own
    return Machine(_name(), threads, ops, tuple(reads))


def cached(path: str | os.PathLike[str], threads: int) -> Machine:
    """The machine as the file has it, else measured now and added to the file.

    Raises:
        Error: the file is something else, or cannot be written.
    """
    file, key = Path(path), f"{_name()}, {threads}"
    try:
        known: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        if row := known.get(key):
            return Machine(row["name"], row["threads"], row["ops"], tuple((a, b) for a, b in row["reads"]))
        known[key] = asdict(measured := measure(threads))
        file.write_text(json.dumps(known, indent=1))
        return measured
    except OSError as e:
        raise Error(f"{path}: {e.strerror or e}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Error(f"{path} does not hold limits of machines", remedy="name another file; it will be made") from None


def _work(what: int, seconds: float) -> float:
    n = native.library()
    rounds = 1000
    while True:
        start = time.thread_time()
        done = n.lib.trvk_peak(what, n.ffi.NULL, 0, rounds)
        took = time.thread_time() - start
        if done == 0 or took >= seconds / 2:
            return float(done / took) if done else 0.0
        rounds = min(rounds * 100, int(rounds * seconds / max(took, 1e-7)) + 1)


def _read(size: int, seconds: float) -> float:
    n = native.library()
    room = np.ones(size + 64, np.uint8)
    at = n.ffi.cast("void *", room.ctypes.data + -room.ctypes.data % 64)
    rounds, best = max(1, (16 << 20) // size), 0.0
    end = time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        done = n.lib.trvk_peak(_READ, at, size, rounds)
        now = time.perf_counter()
        best = max(best, done / (now - start))
        if now > end:
            return float(best)


def _best(once: Callable[[], float], threads: int, repeats: int) -> float:
    """The best sum over threads that do it at the same time."""
    best = 0.0
    for _ in range(repeats):
        rates, gate = [0.0] * threads, threading.Barrier(threads)

        def run(i: int, rates: list[float] = rates, gate: threading.Barrier = gate) -> None:
            gate.wait()
            rates[i] = once()

        others = [threading.Thread(target=run, args=(i,)) for i in range(1, threads)]
        for t in others:
            t.start()
        run(0)
        for t in others:
            t.join()
        best = max(best, sum(rates))
    return best


def _cache_sizes() -> tuple[int, ...]:
    """Bytes of the data caches, smallest first."""
    sizes = []
    for cache in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            kind, text = (cache / "type").read_text().strip(), (cache / "size").read_text().strip()
        except OSError:
            continue
        if kind != "Instruction" and (m := re.fullmatch(r"(\d+)([KM]?)", text)):
            sizes.append(int(m[1]) << {"": 0, "K": 10, "M": 20}[m[2]])
    return tuple(sorted(sizes)) if len(sizes) >= 2 else _CACHES


def _name() -> str:
    try:
        found = re.search(r"^(?:model name|Model)\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()
