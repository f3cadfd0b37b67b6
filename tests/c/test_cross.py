"""The runtime core and all kernels compile for microcontrollers. tests/devices builds and runs for larger machines."""

from __future__ import annotations

from pathlib import Path

import pytest
from ctools import CORE, CPU, INCLUDES, sh, tool


@pytest.mark.parametrize("cpu", ["cortex-m0", "cortex-m4", "cortex-m55"])
def test_compiles_for_bare_metal(cpu: str, tmp_path: Path) -> None:
    """Core and kernels compile without a warning and need no more than a freestanding C library with libm."""
    for source in [*CORE, *CPU]:
        sh(tool("arm-none-eabi-gcc"), f"-mcpu={cpu}", "-mthumb", "-std=c11", "-Os", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion",
           "-Wshadow", "-Wstrict-prototypes", "-Wvla", "-Werror", "-DTRV_NO_HOST", *INCLUDES, "-c", source, "-o",
           tmp_path / f"{source.stem}.o")  # fmt: skip
    symbols = sh("arm-none-eabi-nm", "-u", *tmp_path.glob("*.o"))
    assert not {"malloc", "calloc", "realloc", "free", "abort", "printf", "fopen"} & set(symbols.split())
