"""Every recorded command of tests/ops through generated CUDA kernels on the CPU, against what the reference kernels gave:
`pytest tests/hal/cuda/replay_all.py`. It takes many minutes, most of them in the C++ compiler, and is no part of `make test`.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import replay
from shimtools import Module

from trivet.cuda.nodes import OPS

TESTS = Path(__file__).resolve().parents[2]
RECORDED = ("basic_map", "basic_move", "basic_norm", "basic_reduce", "heavy_attention", "heavy_conv", "heavy_matmul", "heavy_pool", "heavy_resize",
            "heavy_rnn", "quant_average", "quant_basic", "quant_conv", "quant_matmul", "quant_norm", "quant_resize")  # fmt: skip
MOST = 24  # recorded commands per operator, spread over all
SLOW = {"attention": 12}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[replay.Job]]:
    """What tests/ops run, by operator."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    file = base / "cuda-cases.bin"
    with (base / "cuda-cases.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")} | {
                "TRIVET_RECORD_CASES": str(base / "cuda-cases.tmp")
            }
            done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(TESTS / f"ops/test_{n}.py") for n in RECORDED)],
                                  env=env, capture_output=True, text=True, cwd=TESTS.parent)  # fmt: skip
            assert done.returncode == 0, done.stdout[-3000:]
            (base / "cuda-cases.tmp.want").rename(f"{file}.want")
            (base / "cuda-cases.tmp").rename(file)
    out: dict[str, list[replay.Job]] = {}
    for c in replay.commands(file):
        job = replay.prepare(c) if c.op.name in OPS else None
        if isinstance(job, replay.Job):
            out.setdefault(job.node.op, []).append(job)
    return out


@pytest.mark.parametrize("op", OPS)
def test_as_the_reference(op: str, jobs: dict[str, list[replay.Job]]) -> None:
    """A spread of all recorded commands, with sizes as literals for every other one."""
    have = jobs[op]
    some = have[:: max(1, len(have) // SLOW.get(op, MOST))]
    for literals in (False, True):
        picked = some[literals::2]
        module = Module(replay.compile_jobs(picked, literals))
        for job in picked:
            got, flag = replay.run(job, module)
            assert flag == 0
            for g, w in zip(got, replay.wanted(job), strict=True):
                assert replay.alike(g, w), (
                    job.node.attrs,
                    [(v.dtype.name, v.shape) for v in job.node.inputs if v is not None],
                )


# ---- tensor cores, tiles and split sums, which the recorded commands are too small for
def test_operators_are_covered(jobs: dict[str, list[replay.Job]]) -> None:
    count = Counter({op: len(j) for op, j in jobs.items()})
    assert set(OPS) <= set(count), set(OPS) - set(count)
