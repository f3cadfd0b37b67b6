"""Runs a WebAssembly program of the command line here: `python -m trivet.wasm trv_run.wasm bench net.trv`.

The machine is wasmtime's (pip install 'trivet[cross]'). The program sees the files of this folder, and of those that its
arguments name.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trivet.error import Error


def run(program: str | os.PathLike[str], arguments: Sequence[str]) -> int:
    """Runs a WASI command with this process's input, output, files and environment; its exit status.

    Raises:
        Error: wasmtime is not here, or the file is no WebAssembly.
    """
    try:
        wasmtime: Any = importlib.import_module("wasmtime")
    except ImportError:
        raise Error("no machine for WebAssembly: wasmtime is not here", remedy="pip install 'trivet[cross]'") from None
    engine = wasmtime.Engine()
    try:
        module = wasmtime.Module.from_file(engine, os.fspath(program))
    except wasmtime.WasmtimeError as e:
        raise Error(f"{program}: {e}", remedy="a file of `trivet build --target wasm32-wasi`") from None
    linker = wasmtime.Linker(engine)
    linker.define_wasi()
    store = wasmtime.Store(engine)
    config = wasmtime.WasiConfig()
    config.argv = [os.fspath(program), *arguments]
    config.inherit_stdin()
    config.inherit_stdout()
    config.inherit_stderr()
    config.inherit_env()
    # a program tells names by the first folder alone; of "/" and "." it would see the same
    for folder in {str(Path(*Path(a).parts[:2])) for a in arguments if os.path.isabs(a)}:
        if os.path.isdir(folder):
            config.preopen_dir(folder, folder)
    config.preopen_dir(".", ".")
    store.set_wasi(config)
    try:
        linker.instantiate(store, module).exports(store)["_start"](store)
    except wasmtime.ExitTrap as e:
        return int(e.code)
    return 0


if __name__ == "__main__":
    try:
        status = run(sys.argv[1], sys.argv[2:])
    except Error as e:
        sys.exit(f"trivet.wasm: {e}")
    sys.exit(status)
