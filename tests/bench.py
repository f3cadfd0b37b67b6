"""Prints the figures that trivet promises: memory plans, core size, dispatch, verification, load, import, export.

make bench        (or: python tests/bench.py [plan] [core] [import] [export])
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "e2e"), str(HERE / "c"), str(HERE / "ops")]


def plan() -> None:
    """Arena of each zoo model beside the lower bound and ExecuTorch's greedy plan."""
    import torch
    import zoo
    from test_zoo import GREEDY

    import trivet

    print(f"{'model':<20}{'arena':>12}{'bound':>12}{'ratio':>8}{'greedy':>12}")
    for name in zoo.ZOO:
        model, args, dynamic = zoo.make(name)
        with torch.no_grad():
            entry = trivet.export(model, args, dynamic_shapes=dynamic).summary()["entries"][0]
        arena, bound = entry["memory"]["arena"], entry["lower_bound"]
        print(f"{name:<20}{arena:>12,}{bound:>12,}{arena / max(bound, 1):>8.3f}{GREEDY.get(name, 0):>12,}")


def core() -> None:
    """Size of the core; times of the C runtime."""
    import numpy as np
    import programs as P
    from ctools import CORE, INCLUDES, sh

    from trivet.writer import SegmentSpec, write_file

    with tempfile.TemporaryDirectory() as folder:
        tmp = Path(folder)
        for cc in (["gcc"], ["arm-none-eabi-gcc", "-mcpu=cortex-m4", "-mthumb"]):
            for source in CORE:
                sh(
                    *cc,
                    "-std=c11",
                    "-Os",
                    "-fno-asynchronous-unwind-tables",
                    *INCLUDES,
                    "-c",
                    source,
                    "-o",
                    tmp / f"{source.stem}.o",
                )
            rows = [line.split() for line in sh("size", *tmp.glob("*.o")).splitlines()[1:]]
            print(
                f"core, {cc[0]} -Os: text + data {sum(int(r[0]) + int(r[1]) for r in rows):,}, bss {sum(int(r[2]) for r in rows)}"
            )
        P.make(tmp)
        spec = P.cpu_static()
        weights = np.zeros(100 * 1024 * 1024 // 4, np.float32)
        weights[:4] = P.WEIGHTS
        spec.segments = [SegmentSpec([weights])]
        write_file(spec, tmp / "huge.trv")
        sh("cmake", "-S", HERE.parent, "-B", tmp / "b", "-DCMAKE_BUILD_TYPE=Release")
        sh("cmake", "--build", tmp / "b", "-j2", "--target", "trivet_static")
        sh("gcc", "-std=gnu11", "-O2", *INCLUDES, HERE / "c/test_speed.c", HERE / "c/toy.c", tmp / "b/libtrivet.a", "-pthread", "-lm",
           "-o", tmp / "speed")  # fmt: skip
        best: dict[str, float] = {}
        for _ in range(5):
            for k, v in json.loads(sh(tmp / "speed", tmp)).items():
                best[k] = min(v, best.get(k, v))
        for k, v in best.items():
            print(f"{k:<24}{v:.4g}")


def import_time() -> None:
    """What `import trivet` adds to `import torch`, seconds, best of 5."""
    code = "import time, torch; t = time.perf_counter(); import trivet; trivet.export; trivet.load; print(time.perf_counter() - t)"
    times = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(5)
    ]
    print(f"import trivet: {min(times):.3f} s beyond import torch")


def export() -> None:
    """Time and peak memory of exporting ResNet-18."""
    import zoo

    import trivet

    model, args, _ = zoo.make("resnet18")
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    trivet.export(model.fc, (args[0].new_zeros(1, 512),))  # torch's export machinery is loaded
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        trivet.export(model, args).save(Path(folder) / "net.trv")
    seconds = time.perf_counter() - begin
    peak = int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024 - before  # type: ignore[index]
    print(
        f"export of ResNet-18: {seconds:.1f} s, {(peak + weights) / weights:.2f} x the weights (the model itself included)"
    )


PARTS: dict[str, Any] = {"plan": plan, "core": core, "import": import_time, "export": export}

if __name__ == "__main__":
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()
