"""Fixtures of the C tests: compilers, the programs that the tests open, one build and installation of the library."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from ctools import INCLUDES, ROOT, generator, sh, tool


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every program of programs.py."""
    import programs

    folder = tmp_path_factory.mktemp("programs")
    programs.make(folder)
    return folder


@pytest.fixture(scope="session")
def compile_c(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """compile_c(name, sources, flags, cc) -> the program."""

    def compile_one(name: str, sources: list[Path], flags: list[str], cc: str = "gcc") -> Path:
        out = tmp_path_factory.mktemp("c") / name
        sh(tool(cc), "-std=gnu11", "-g", *flags[:-1], *INCLUDES, *sources, *flags[-1:], "-o", out)
        return out

    return compile_one


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `cmake --install` has put the library, trv_run and their files."""
    base = tmp_path_factory.mktemp("install")
    sh(tool("cmake"), "-S", ROOT, "-B", base / "build", "-DCMAKE_BUILD_TYPE=Release", "-G", generator())
    sh("cmake", "--build", base / "build", "-j", "2")
    sh("cmake", "--install", base / "build", "--prefix", base / "prefix")
    return base / "prefix"


@pytest.fixture(scope="session")
def libdir(installed: Path) -> Path:
    return next(installed.glob("lib*/**/libtrivet.a")).parent
