"""`trivet new-delegate` as a new user takes it, and the example that came of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trivet.cli import main
from trivet.error import Error
from trivet.new_delegate import new_delegate

ROOT = Path(__file__).resolve().parents[2]


def python(*args: object, cwd: Path) -> str:
    done = subprocess.run([sys.executable, *(str(a) for a in args)], capture_output=True, text=True, cwd=cwd,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)})  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_project(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Builds, loads as a plug-in, passes conformance, runs a model with one operator on it: all by its own tests."""
    assert main(["new-delegate", "tinynpu", "--to", str(tmp_path / "project")]) == 0
    files = [Path(line) for line in capsys.readouterr().out.splitlines() if line.startswith(str(tmp_path))]
    assert {f.name for f in files} == {
        "driver.c",
        "tinynpu.py",
        "CMakeLists.txt",
        "test_tinynpu.py",
        "pyproject.toml",
        "README.md",
    }
    texts = [f.read_text() for f in files]
    assert sum(t.count("\n") for t in texts) < 400 and not any("@name@" in t for t in texts)
    assert " passed" in python("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=tmp_path / "project")


def test_names_and_folders(tmp_path: Path) -> None:
    for name in ("Npu", "cpu", "npu_sim", "9x", "a-b", "null", "class"):
        with pytest.raises(Error, match="name must be|is taken"):
            new_delegate(name, tmp_path / "x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(Error, match="is there already"):
        new_delegate("mydev", tmp_path / "full")


def test_example() -> None:
    out = python(ROOT / "examples/05_new_delegate/run.py", cwd=ROOT)
    assert "on blas" in out and "without OpenBLAS: OpenBLAS is not there" in out and out.endswith("ok\n")
