"""Machines that a program is measured on: this one, one behind ssh or adb, or an emulated one.

A device takes files into a folder of its own and runs commands there; `trv_run` does the work, built for the device by
`trivet.build`. Nothing has to be installed on the other side.

| text | machine |
| --- | --- |
| local | this one |
| qemu:aarch64, qemu:armv7, qemu:riscv64 | an emulated one (times mean nothing; results and memory do) |
| qemu:cortex-m0 .. cortex-m55, qemu:riscv32 | firmware made by `trivet deploy`, in an emulator that counts instructions (trivet.firmware) |
| serial:PORT | such a firmware on a board (trivet.firmware) |
| wasm | WebAssembly, by wasmtime on this machine |
| wine | Windows on x86-64, by Wine on this machine |
| ssh://[user@]host[:port] | by the ssh client with its keys and its configuration ($TRIVET_SSH: another client, with options) |
| adb:SERIAL, adb: | an Android device, the only one where SERIAL is empty ($TRIVET_ADB: another adb) |
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trivet.build import build
from trivet.error import Error
from trivet.platforms import PLATFORMS, find_emulator

MACHINES = {  # uname -s -m: what is built for it
    "Linux x86_64": "x86_64-linux", "Linux aarch64": "aarch64-linux-gnu", "Linux armv7l": "armv7-linux-gnueabihf",
    "Linux armv8l": "armv7-linux-gnueabihf", "Linux riscv64": "riscv64-linux-gnu", "Darwin arm64": "aarch64-macos",
}  # fmt: skip
EMULATED = {
    "qemu:aarch64": "aarch64-linux-gnu", "qemu:armv7": "armv7-linux-gnueabihf", "qemu:riscv64": "riscv64-linux-gnu",
    "wasm": "wasm32-wasi", "wine": "x86_64-windows-gnu",
}  # fmt: skip
STATIC = {  # what needs no library of the system, where there is no GNU compiler, which links trv_run statically
    "aarch64-linux-gnu": "aarch64-linux-musl", "armv7-linux-gnueabihf": "armv7-linux-musleabihf",
    "riscv64-linux-gnu": "riscv64-linux-musl",
}  # fmt: skip
PHONE = "aarch64-linux-musl"  # static: needs nothing of the phone's system


@dataclass(frozen=True)
class Measured:
    """What trv_run measured on a device. Times in milliseconds, memory in bytes; peak_bytes: of the whole process, -1 where
    the system does not tell.
    """

    device: str
    platform: str
    entry: str
    runs: int
    load_ms: float
    first_ms: float
    min_ms: float
    mean_ms: float
    max_ms: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    peak_bytes: int

    def to_json(self) -> dict[str, Any]:
        """For tools."""
        return asdict(self)


class Device:
    """A machine with a shell, reached by a command line: `words(command)` runs `command` in its shell.

    Attributes:
        text: as the user named it.
        platform: a name of trivet.platforms.PLATFORMS.
        folder: on the device; made by the first push, removed by close.
    """

    def __init__(self, text: str, platform: str, folder: str) -> None:
        self.text, self.platform, self.folder = text, platform, folder
        self._made = False

    def words(self, command: str) -> list[str]:
        """The local command line that runs a shell command on the device."""
        return ["sh", "-c", command]

    def shell(self, command: str, data: bytes | None = None) -> str:
        """Runs a shell command on the device, data on its standard input; its output.

        Raises:
            Error: the device cannot be reached, or the command fails.
        """
        return self._run(self.words(command), data).decode(errors="replace")

    def _run(self, words: list[str], data: bytes | None = None) -> bytes:
        try:
            done = subprocess.run(words, input=data if data is not None else b"", capture_output=True)
        except FileNotFoundError as e:
            raise Error(
                f"{self.text}: {e.filename} is not on this machine", remedy="`trivet doctor` says how to get it"
            ) from None
        if done.returncode:
            said = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
            raise Error(f"{self.text}: {said[-1] if said else f'status {done.returncode}'}",
                        remedy=f"the command was: {words[-1][:200]}")  # fmt: skip
        return done.stdout

    def push(self, path: str | os.PathLike[str], name: str = "", executable: bool = False) -> str:
        """Copies a file into the device's folder; the place there."""
        source = Path(path)
        place = f"{self.folder}/{name or source.name}"
        if not self._made:
            self.shell(f"mkdir -p {shlex.quote(self.folder)}")
            self._made = True
        try:
            self._copy(source, place)
        except OSError as e:
            raise Error(f"cannot read {source}: {e.strerror}") from None
        if executable:
            self.shell(f"chmod 755 {shlex.quote(place)}")
        return place

    def _copy(self, source: Path, place: str) -> None:
        self.shell(f"cat > {shlex.quote(place)}", source.read_bytes())

    def pull(self, place: str) -> bytes:
        """A file of the device."""
        return self._run(self.words(f"cat {shlex.quote(place)}"))

    def program(self, place: str) -> str:
        """The words that start an executable of the device's platform."""
        return shlex.quote(place)

    def close(self) -> None:
        """Removes what was pushed."""
        if self._made:
            self.shell(f"rm -rf {shlex.quote(self.folder)}")
            self._made = False

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Emulated(Device):
    """Another kind of machine in software: qemu's user emulation, wasmtime, Wine."""

    def program(self, place: str) -> str:
        """The words that start an executable of the device's platform."""
        return shlex.join([*find_emulator(self.platform), place])


class Remote(Device):
    """A machine behind ssh. Files go through the shell's standard input, so the other side needs no sftp."""

    def __init__(self, text: str) -> None:
        m = re.fullmatch(r"ssh://(?:([\w.+-]+)@)?(\[[0-9a-fA-F:]+\]|[\w.-]+)(?::(\d+))?/?", text)
        if m is None:
            raise Error(f"device {text!r}: ssh://[user@]host[:port] expected")
        user, host, port = m.groups()
        self._ssh = [*shlex.split(os.environ.get("TRIVET_SSH", "ssh")), "-o", "BatchMode=yes", *(("-p", port) if port else ()),
                     f"{user}@{host.strip('[]')}" if user else host.strip("[]")]  # fmt: skip
        super().__init__(text, "", f"/tmp/trivet-{uuid.uuid4().hex[:12]}")
        self.platform = _platform_of(self)

    def words(self, command: str) -> list[str]:
        """The local command line that runs a shell command on the device."""
        return [*self._ssh, command]


class Phone(Device):
    """An Android device behind adb."""

    def __init__(self, text: str) -> None:
        serial = text[len("adb:") :]
        self._adb = [*shlex.split(os.environ.get("TRIVET_ADB", "adb")), *(("-s", serial) if serial else ())]
        super().__init__(text, PHONE, f"/data/local/tmp/trivet-{uuid.uuid4().hex[:12]}")

    def words(self, command: str) -> list[str]:
        """The local command line that runs a shell command on the device."""
        return [*self._adb, "shell", command]

    def _copy(self, source: Path, place: str) -> None:
        self._run([*self._adb, "push", str(source), place])

    def pull(self, place: str) -> bytes:
        """A file of the device."""
        with tempfile.TemporaryDirectory() as folder:
            self._run([*self._adb, "pull", place, f"{folder}/file"])
            return Path(folder, "file").read_bytes()


def _platform_of(device: Device) -> str:
    machine = device.shell("uname -s -m").strip()
    if machine not in MACHINES:
        raise Error(f"{device.text} is a {machine}", remedy=f"known: {', '.join(MACHINES)}")
    return MACHINES[machine]


def open_device(text: str) -> Device:
    """The device that a text names (the table above).

    Raises:
        Error: no such kind of device, or it does not answer.
    """
    if text.startswith("ssh:"):
        return Remote(text)
    if text.startswith("adb:"):
        return Phone(text)
    if text == "local" or text in EMULATED:
        folder = str(Path(tempfile.gettempdir()) / f"trivet-{uuid.uuid4().hex[:12]}")
        if text == "local":
            import platform

            return Device(text, MACHINES.get(f"{platform.system()} {platform.machine()}", "x86_64-linux"), folder)
        target = EMULATED[text]
        if target in STATIC and not shutil.which(f"{PLATFORMS[target].gnu}-gcc"):
            target = STATIC[target]
        return Emulated(text, target, folder)
    raise Error(f"unknown device {text!r}",
                remedy=f"local, {', '.join(EMULATED)}, ssh://[user@]host[:port], adb:SERIAL")  # fmt: skip


def runner(device: Device, cache: str | os.PathLike[str] | None = None) -> Path:
    """trv_run for the device's platform, built where it is not there yet.

    cache: folder of builds; default: what `trivet build` left in this folder, else trivet in the user's cache folder
    ($XDG_CACHE_HOME).
    """
    here = Path(f"trivet-{device.platform}")
    if cache is None and here.is_dir():
        return build(device.platform, here).trv_run
    root = Path(cache) if cache else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trivet"
    return build(device.platform, root / device.platform).trv_run


def bench_on(
    device: Device,
    program: str | os.PathLike[str],
    *,
    trv_run: str | os.PathLike[str] | None = None,
    entry: str = "",
    threads: int = 0,
    runs: int = 50,
    warmup: int = 5,
    inputs: Sequence[str | os.PathLike[str]] = (),
    weights: str | os.PathLike[str] | None = None,
) -> Measured:
    """Copies runtime and program to a device, runs, brings the figures back. The device is left as it was.

    Args:
        device: of open_device.
        program: a .trv file.
        trv_run: the runner for the device's platform; default: `runner(device)`.
        entry: name; "" is the first.
        threads: 0: all cores of the device.
        runs, warmup: runs that count, and do not.
        inputs: .npy files, one per input, in order; missing ones get random numbers.
        weights: the external weights file, where the program has one.

    Raises:
        Error: the device cannot be reached, or trv_run says what is wrong.
    """
    words = _command(device, "bench", program, trv_run, entry, threads, inputs, weights)
    said = device.shell(" ".join([*words, "--runs", str(runs), "--warmup", str(warmup), "--json"]))
    try:
        data = json.loads(said)
        return Measured(
            device.text,
            device.platform,
            *(data[f] for f in Measured.__dataclass_fields__ if f not in ("device", "platform")),
        )
    except (json.JSONDecodeError, KeyError):
        raise Error(f"{device.text}: trv_run gave no figures: {said[:200]!r}",
                    remedy="use the trv_run that `trivet build` of this version makes") from None  # fmt: skip


def run_on(
    device: Device,
    program: str | os.PathLike[str],
    *,
    trv_run: str | os.PathLike[str] | None = None,
    entry: str = "",
    threads: int = 0,
    inputs: Sequence[str | os.PathLike[str]] = (),
    weights: str | os.PathLike[str] | None = None,
) -> list[np.ndarray]:
    """Runs a program once on a device; its outputs. Arguments and errors as of `bench_on`; missing inputs are zeros."""
    words = _command(device, "run", program, trv_run, entry, threads, inputs, weights)
    place = f"{device.folder}/outputs"
    count = len(device.shell(" ".join([*words, "-o", shlex.quote(place)])).splitlines())
    return [np.load(io.BytesIO(device.pull(f"{place}/output_{i}.npy"))) for i in range(count)]


def _command(
    device: Device,
    verb: str,
    program: str | os.PathLike[str],
    trv_run: str | os.PathLike[str] | None,
    entry: str,
    threads: int,
    inputs: Sequence[str | os.PathLike[str]],
    weights: str | os.PathLike[str] | None,
) -> list[str]:
    """Copies what trv_run needs; the words of its command there."""
    exe = device.push(trv_run if trv_run is not None else runner(device), "trv_run", executable=True)
    words = [device.program(exe), verb, shlex.quote(device.push(program, "program.trv"))]
    words += [shlex.quote(device.push(p, f"input{i}{Path(p).suffix}")) for i, p in enumerate(inputs)]
    if weights is not None:
        words += ["--weights", shlex.quote(device.push(weights, "weights.bin"))]
    if entry:
        words += ["--entry", shlex.quote(entry)]
    return words + (["--threads", str(threads)] if threads else [])
