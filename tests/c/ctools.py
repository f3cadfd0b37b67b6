"""What the C tests share: source lists, compilers, running commands."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

INCLUDES = [f"-I{ROOT / d}" for d in ("hal/include", "runtime_c/include", "schema/gen", "tests/c")]
CORE = sorted(p for p in (ROOT / "runtime_c/src").glob("*.c") if not p.name.startswith("host"))
HOST = sorted((ROOT / "runtime_c/src").glob("host*.c"))
CPU = sorted((ROOT / "hal/cpu").glob("*.c"))


def tool(name: str) -> str:
    """A program's path; skips the test where it is not installed."""
    path = shutil.which(name)
    if not path:
        pytest.skip(f"{name} is not installed")
    return path


def sh(*args: object, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Runs a command; its output. Fails with all that it printed."""
    done = subprocess.run([str(a) for a in args], capture_output=True, text=True, cwd=cwd, env=env)
    if done.returncode:
        pytest.fail(
            f"{' '.join(str(a) for a in args)[:500]}\nexit {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
        )
    return done.stdout


def generator() -> str:
    return "Ninja" if shutil.which("ninja") else "Unix Makefiles"
