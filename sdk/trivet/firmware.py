"""A deployed program at the other end of a serial line: the host's side of runtime_c/mcu/README.md."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trivet.deploy import deploy
from trivet.deploy_project import emulator
from trivet.deploy_targets import MACHINES, Machine
from trivet.error import Error
from trivet.native import DEVICE

CHUNK = 48  # bytes of data in one line


@dataclass(frozen=True)
class Step:
    """One command of the program: its time in the plan (key to names), ticks."""

    time: int
    ticks: int


@dataclass(frozen=True)
class Figures:
    """What a firmware measured. Times in ticks, of which `rate` make a second (0: not known); unit: what a tick is. Bytes; flash: code and
    tables without the program, where the image is known, else -1. golden: pairs that passed and failed.
    """

    device: str
    target: str
    program: str
    unit: str
    rate: int
    start: int
    first: int
    times: tuple[int, ...]
    steps: tuple[Step, ...]
    program_bytes: int
    arena: int
    session: int
    stack: int
    flash: int
    static: int
    passed: int
    failed: int

    def to_json(self) -> dict[str, Any]:
        """For tools."""
        return asdict(self)


class Line:
    """Requests and answers over two file descriptors."""

    def __init__(self, about: str, read: int, write: int, timeout: float = 60.0) -> None:
        self.about, self._read, self._write, self.timeout = about, read, write, timeout
        self._rest = b""

    def ask(self, request: str) -> list[list[str]]:
        """The lines of the answer, as words, without the closing "ok". A line damaged on the way to the device is sent again.

        Raises:
            Error: no answer in time, a damaged answer, or one that tells an error.
        """
        for _ in range(3):
            os.write(self._write, f"{request}*{_sum(request):02x}\n".encode())
            answer: list[list[str]] = []
            while True:
                words = self._line().split(" ")
                if words[0] == "ok":
                    return answer
                if words[0] == "again":
                    break
                if words[0] == "what":
                    raise Error(f"{self.about}: the firmware does not know {request.split()[0]!r}",
                                remedy="deploy again with this version of trivet")  # fmt: skip
                answer.append(words)
                if words[0] == "error" and request != "selftest":
                    raise Error(f"{self.about}: {_fault(words)}")
        raise Error(f"{self.about}: the line loses bytes", remedy="check rate and cable")

    def _line(self) -> str:
        end = time.monotonic() + self.timeout
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            data = os.read(self._read, 4096) if ready else b""
            if not data:
                raise Error(f"{self.about}: no answer" + ("" if ready else f" in {self.timeout:g} s"),
                            remedy="is the firmware of `trivet deploy` running there, and the line at 115200 baud?")  # fmt: skip
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        text = line.decode("ascii", "replace").strip()
        body, star, check = text.rpartition("*")
        if not star or f"{_sum(body):02x}" != check:
            raise Error(f"{self.about}: damaged answer {text[:80]!r}", remedy="check rate and cable")
        return body


def _sum(text: str) -> int:
    out = 0
    for byte in text.encode("ascii", "replace"):
        out ^= byte
    return out


def _fault(words: Sequence[str]) -> str:
    status, step, at, value, axis, expected, got = (int(w, 16) for w in words[1:8])
    where = "" if at == 0xFFFFFFFF else f" at time {at}"
    if -status == DEVICE and axis != 0xFFFFFFFF:
        return f"output {value} differs at element {axis}: expected bits {expected:#x}, got {got:#x}"
    return f"status {-status}{where} (step {step}, value {value}, expected {expected}, got {got})"


class Firmware:
    """A device that answers. Close it after use."""

    def __init__(self, line: Line, close: Any = None, flash: int = -1, static: int = -1) -> None:
        self.line, self._close, self.flash, self.static = line, close, flash, static
        self.facts: dict[str, Any] = {}
        self.slots: dict[tuple[str, int, int], int] = {}  # bytes of (input | output, entry, index)
        for words in line.ask("about"):
            if words[0] in ("input", "output"):
                e, i, _, size = (int(w, 16) for w in words[1:5])
                self.slots[words[0], e, i] = size
            elif words[0] != "entry":
                self.facts[words[0]] = int(words[1], 16)
                self.facts[words[0] + " text"] = " ".join(words[2:])

    def write(self, entry: int, index: int, data: bytes) -> None:
        """Fills an input's place on the device."""
        want = self.slots.get(("input", entry, index))
        if want != len(data):
            raise Error(f"{self.line.about}: input {index} takes {want} bytes, got {len(data)}")
        for at in range(0, len(data), CHUNK):
            self.line.ask(f"set {entry:x} {index:x} {at:x} {data[at : at + CHUNK].hex()}")

    def read(self, entry: int, index: int) -> bytes:
        """An output of the last run."""
        size = self.slots["output", entry, index]
        out = b""
        for at in range(0, size, CHUNK):
            out += bytes.fromhex(self.line.ask(f"get {entry:x} {index:x} {at:x} {min(CHUNK, size - at):x}")[0][1])
        return out

    def run(self, entry: int = 0, count: int = 1) -> list[int]:
        """Runs an entry; ticks of each run. Inputs that nobody binds share the arena: write them before each run."""
        return [int(w[1], 16) for w in self.line.ask(f"run {entry:x} {count:x}")]

    def steps(self, entry: int = 0) -> tuple[Step, ...]:
        """Runs an entry once; ticks of each command."""
        return tuple(Step(int(w[1], 16), int(w[2], 16)) for w in self.line.ask(f"steps {entry:x}"))

    def selftest(self) -> tuple[int, list[str]]:
        """Golden pairs that passed, and what is wrong with the others; (0, []) without pairs."""
        try:
            answer = self.line.ask("selftest")
        except Error as e:
            if "does not know" in e.reason:
                return 0, []
            raise
        return sum(w[0] == "pass" for w in answer), [_fault(w) for w in answer if w[0] == "error"]

    def measure(self, device: str, runs: int = 3, entry: int = 0, data: Sequence[bytes] = ()) -> Figures:
        """One run by steps, `runs` whole ones (zeros where no data are given), then the self-test."""
        mine = [(k[2], size) for k, size in self.slots.items() if k[:2] == ("input", entry)]

        def fill() -> None:
            for i, size in mine:
                self.write(entry, i, data[i] if i < len(data) else bytes(size))

        fill()
        steps = self.steps(entry)
        times = []
        for _ in range(max(1, runs)):
            fill()
            times += self.run(entry)
        f = self.facts
        stack = int(self.line.ask("stack")[0][1], 16)
        passed, failed = self.selftest()
        return Figures(device, f["trivet text"], f["program text"], f["rate text"], f["rate"], f["start"], sum(s.ticks for s in steps),
                       tuple(times), steps, f["program"], f["arena"], f["session"], stack, self.flash, self.static, passed, len(failed))  # fmt: skip

    def close(self) -> None:
        """Ends an emulator, gives a port back."""
        if self._close is not None:
            self._close()
            self._close = None

    def __enter__(self) -> Firmware:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ---- where it runs ----------------------------------------------------------------------------------------------------------
def open_port(port: str, baud: int = 115200, timeout: float = 60.0) -> Firmware:
    """A firmware behind a serial port: /dev/ttyACM0, or a pseudo terminal.

    Raises:
        Error: no such port, or nobody answers.
    """
    try:
        import termios
        import tty
    except ImportError:
        raise Error("serial ports need a POSIX system", remedy="use the Windows Subsystem for Linux") from None
    try:
        fd = os.open(port, os.O_RDWR | os.O_NOCTTY)
        tty.setraw(fd)
        mode = termios.tcgetattr(fd)
        rate = getattr(termios, f"B{baud}")
        mode[4] = mode[5] = rate
        mode[2] |= termios.CLOCAL | termios.CREAD
        termios.tcsetattr(fd, termios.TCSANOW, mode)
        termios.tcflush(fd, termios.TCIOFLUSH)
    except (OSError, termios.error) as e:
        raise Error(
            f"serial:{port}: {getattr(e, 'strerror', None) or e}",
            remedy="is the board connected, and the port yours to open?",
        ) from None
    try:
        return Firmware(Line(f"serial:{port}", fd, fd, timeout), lambda: os.close(fd))
    except Error:
        os.close(fd)
        raise


def boot(image: str | os.PathLike[str], machine: Machine, timeout: float = 300.0) -> Firmware:
    """Starts an image in QEMU (a hosted one as a process), which counts instructions.

    Raises:
        Error: no emulator, or the image does not answer.
    """
    words = emulator(machine, str(image)).split() if machine.qemu else [str(image)]
    if shutil.which(words[0]) is None:
        raise Error(f"{words[0]} is not here", remedy="apt-get install qemu-system-arm qemu-system-misc")
    p = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert p.stdin is not None and p.stdout is not None
    incoming, outgoing = p.stdout, p.stdin

    def close() -> None:
        with contextlib.suppress(OSError):
            outgoing.close()
        p.kill()
        p.wait()
        incoming.close()

    flash, static = image_bytes(image, machine)
    try:
        return Firmware(Line(machine.name, incoming.fileno(), outgoing.fileno(), timeout), close, flash, static)
    except Error:
        close()
        raise


def image_bytes(image: str | os.PathLike[str], machine: Machine) -> tuple[int, int]:
    """Bytes of an image's code and tables, and of its data beside arenas and stack; (-1, -1) without the tools."""
    size = shutil.which(f"{machine.compiler}size")
    if size is None or machine.hosted:
        return -1, -1
    text = subprocess.run([size, "-A", str(image)], capture_output=True, text=True).stdout
    sections = {
        w[0]: int(w[1]) for w in (line.split() for line in text.splitlines()) if len(w) >= 3 and w[1].isdecimal()
    }
    return sum(sections.get(s, 0) for s in (".text", ".ARM.exidx", ".data")), sections.get(".data", 0) + sections.get(
        ".bss", 0
    )


def make(folder: Path, *words: str) -> Path:
    """Builds a project; the image.

    Raises:
        Error: no make or compiler, or the compiler's own error.
    """
    if shutil.which("make") is None:
        raise Error("make is not here", remedy="apt-get install make")
    done = subprocess.run(
        ["make", "-C", str(folder), "-j2", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        lines = [x for x in done.stdout.splitlines() if "rror" in x or "undefined" in x or "not fit" in x]
        raise Error(
            "cannot build the firmware:\n  " + "\n  ".join(lines[:8]),
            remedy="`trivet doctor` says which compiler is missing",
        )
    return folder / "build" / "model.elf"


@contextlib.contextmanager
def emulated(program: Any, target: str, *words: str) -> Iterator[Firmware]:
    """Deploys a program into a folder for the moment, builds it and starts it in QEMU. words: for make, FAST=-O3.

    Raises:
        Error: unknown target, a missing compiler or emulator.
    """
    with tempfile.TemporaryDirectory(prefix="trivet-") as folder:
        made = deploy(program, target, folder)
        with boot(make(Path(folder), *words), made.machine) as firmware:
            yield firmware


BARE = tuple(name for name, m in MACHINES.items() if m.qemu)
