"""The code of README.md runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def blocks(language: str) -> str:
    """All code of a language, in order: later blocks go on from earlier ones."""
    found = re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert found
    return "\n".join(found)


def test_python_then_c(tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text(blocks("python"))
    subprocess.run([sys.executable, "hello.py"], cwd=tmp_path, check=True)
    (tmp_path / "hello.c").write_text(blocks("c"))
    build = tmp_path / "build"
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.18)\nproject(hello C)\n"
        f'add_subdirectory("{ROOT}" trivet)\nadd_executable(hello hello.c)\ntarget_link_libraries(hello PRIVATE trivet_static)\n'
    )
    subprocess.run(["cmake", "-S", ".", "-B", str(build)], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", str(build), "-j2", "--target", "hello"], check=True, stdout=subprocess.DEVNULL)
    out = subprocess.run([build / "hello"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    values = [float(v) for v in out.split(":")[1].split()]
    assert len(values) == 4 and abs(sum(values) - 1) < 1e-5


def test_length() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
