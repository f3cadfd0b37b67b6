"""A short run of the fuzzer over the seeds. Longer: compile as here, then `fuzz_open -max_total_time=3600 corpus seeds`."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "c"))

from ctools import CORE, CPU, INCLUDES, sh, tool

SECONDS = int(os.environ.get("TRIVET_FUZZ_SECONDS", "20"))
SANITIZE = "fuzzer,address,undefined"


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    clang = next((c for c in ("clang-14", "clang") if __import__("shutil").which(c)), None) or tool("clang")
    folder = tmp_path_factory.mktemp("fuzz")
    out = folder / "fuzz_open"

    def compiled(source: Path) -> Path:
        target = folder / f"{source.stem}.o"
        sh(clang, "-std=gnu11", "-gline-tables-only", "-O1", "-w", f"-fsanitize={SANITIZE}", "-fno-sanitize-recover=all", *INCLUDES,
           "-c", source, "-o", target)  # fmt: skip
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # the largest first
        sources = sorted(
            [HERE / "fuzz_open.c", *CORE, *CPU], key=lambda p: p.name.startswith(("gemm_", "simd_", "q")), reverse=True
        )
        objects = list(pool.map(compiled, sources))
    done = subprocess.run([clang, f"-fsanitize={SANITIZE}", *objects, "-lm", "-o", out], capture_output=True, text=True)
    if "libclang_rt.fuzzer" in done.stderr:
        pytest.skip("clang has no libFuzzer here")
    assert done.returncode == 0, done.stderr[-3000:]
    return out


def test_seeds_and_mutations(fuzzer: Path, tmp_path: Path) -> None:
    seeds = HERE / "seeds"
    assert len(list(seeds.glob("*.trv"))) >= 20
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    # Between pytest and the fuzzer stands a shell that forks: libFuzzer's limit looks at ru_maxrss, which a process that is
    # started by vfork and exec takes over from its parent, and pytest may well have held gigabytes. By itself the fuzzer
    # stays under 400 MB, of which 256 are ASan's quarantine.
    done = subprocess.run(
        ["sh", "-c", '"$@"; exit $?', "sh", fuzzer, f"-max_total_time={SECONDS}", "-timeout=10", "-max_len=8192",
         "-rss_limit_mb=1024", "-seed=1", f"-artifact_prefix={tmp_path}/", corpus, seeds], capture_output=True, text=True,
        env={**os.environ, "UBSAN_OPTIONS": "print_stacktrace=1"})  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    runs = int(done.stderr.rsplit("Done ", 1)[1].split()[0])
    print(f"{runs} mutated files")
    assert runs > 500


def test_seeds_are_current(tmp_path: Path) -> None:
    """Every seed opens: a change of the format needs new ones (make_seeds.py)."""
    sh("gcc", "-std=gnu11", *INCLUDES, HERE.parent / "c" / "test_open.c", *CORE, "-o", tmp_path / "test_open")
    sh(tmp_path / "test_open", *sorted((HERE / "seeds").glob("*.trv")))
