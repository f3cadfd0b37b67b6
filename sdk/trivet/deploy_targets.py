"""Machines that `trivet deploy` writes projects for: how to compile for them, what of hal/cpu they run, where memory lies."""

from __future__ import annotations

from dataclasses import dataclass

from trivet.error import Error

REF, DSP, MVE = 1, 1 << 10, 1 << 11  # enum Isa of schema/cpu.fbs
CORTEX_M = 1 << 15  # TRVK_ISA_M of hal/cpu/kernel.h: rows for every Cortex-M
_X86 = (1, 3, 7, 11, 23, 55)  # levels of isa.c: ref, avx2, avx512, avxvnni, vnni, bf16
_ARM64 = (1, 65, 193, 449)  # ref, dotprod, i8mm, bf16


@dataclass(frozen=True)
class Abi:
    """Sizes of C structs in bytes, from which the bytes of a session follow (runtime_c/src/session.c, hal/cpu/driver.c), built with
    TRV_ONE_MEMORY. slot and tensor: (bytes, and bytes more per dimension that a value may have).
    """

    session: int
    slot: tuple[int, int]
    tensor: tuple[int, int]
    word: int
    step: int
    part: int
    chosen: int
    buf: int = 24


ILP32 = Abi(session=280, slot=(20, 4), tensor=(8, 8), word=4, step=8, part=40, chosen=12)
LP64 = Abi(session=424, slot=(32, 8), tensor=(16, 16), word=8, step=16, part=64, chosen=24)


@dataclass(frozen=True)
class Machine:
    """A target of deploy.

    Attributes:
        name: as the user says it.
        compiler: prefix of the GNU tools, "" for the system's own cc.
        flags: that choose core, instruction set and ABI.
        isa: sets of TRVK_ISA_ bits: one where that is fixed when compiling, else those of all levels that it may turn out to have.
        files: of runtime_c/mcu that start it and talk for it.
        linker: linker script there, "" for a system's own.
        board: defines of the board file.
        flash, ram: (address, bytes) on that board.
        qemu: words of the emulator that runs the image, () for none.
        abi: sizes of structs.
        kind: "x86", "arm64": files of hal/cpu for other processors are left out.
    """

    name: str
    compiler: str
    flags: tuple[str, ...]
    isa: tuple[int, ...]
    files: tuple[str, ...]
    linker: str = ""
    board: tuple[str, ...] = ()
    flash: tuple[int, int] = (0, 0)
    ram: tuple[int, int] = (0, 0)
    qemu: tuple[str, ...] = ()
    abi: Abi = ILP32
    kind: str = ""

    @property
    def foreign(self) -> tuple[str, ...]:
        """Marks in the names of files that hold kernels of other processors."""
        marks = {"avx2": "x86", "avx512": "x86", "avxvnni": "x86", "vnni": "x86", "bf16": "x86", "armbf16": "arm64", "dotprod": "arm64",
                 "i8mm": "arm64"}  # fmt: skip
        bits = self.isa[0]
        return (
            *(m for m, kind in marks.items() if kind != self.kind),
            *(() if bits & DSP else ("dsp",)),
            *(() if bits & MVE else ("mve",)),
        )

    @property
    def hosted(self) -> bool:
        """Has an operating system: stack, clock and lines are its."""
        return not self.linker


def _arm(
    core: str, fpu: str, isa: int, board: str, uart: int, flash: tuple[int, int], ram: tuple[int, int], name: str = ""
) -> Machine:
    flags = [
        "-mthumb",
        f"-mcpu={core}",
        *(["-mfloat-abi=hard"] if fpu else []),
        *([f"-mfpu={fpu}"] if fpu and fpu != "auto" else []),
    ]
    return Machine(name or core, "arm-none-eabi-", tuple(flags), (isa | CORTEX_M,), ("cortex_m.c", "cortex_m.h", "board_mps2.c", "libc.c"), "bare.ld",
                   (f"BOARD_UART={uart:#x}u",), flash, ram, ("qemu-system-arm", "-M", board))  # fmt: skip


def _riscv(name: str, march: str, mabi: str, abi: Abi) -> Machine:
    return Machine(name, "riscv64-unknown-elf-", (march, mabi, "-mcmodel=medany"), (REF,), ("board_virt.c", "libc.c"), "bare.ld",
                   flash=(0x80000000, 4 * _M), ram=(0x80400000, 16 * _M), qemu=(f"qemu-system-{name}", "-M", "virt", "-bios", "none"),
                   abi=abi)  # fmt: skip


def _hosted(
    name: str, compiler: str, isa: tuple[int, ...], kind: str, abi: Abi = LP64, flags: tuple[str, ...] = ()
) -> Machine:
    return Machine(name, compiler, flags, isa, ("board_host.c",), abi=abi, kind=kind)


_M = 1 << 20
_LOW, _RAM = (0, 4 * _M), (0x20000000, 4 * _M)
MACHINES: dict[str, Machine] = {
    m.name: m
    for m in (
        _arm("cortex-m0", "", REF, "mps2-an385", 0x40004000, _LOW, _RAM),
        _arm("cortex-m3", "", REF, "mps2-an385", 0x40004000, _LOW, _RAM),
        _arm("cortex-m4", "fpv4-sp-d16", REF | DSP, "mps2-an386", 0x40004000, _LOW, _RAM),
        _arm("cortex-m7", "fpv5-d16", REF | DSP, "mps2-an500", 0x40004000, _LOW, _RAM),
        _arm("cortex-m33", "fpv5-sp-d16", REF | DSP, "mps2-an505", 0x50200000, (0x10000000, 4 * _M), (0x38000000, 4 * _M)),
        _arm("cortex-m55", "auto", REF | DSP | MVE, "mps3-an547", 0x59303000, (0, 512 << 10), (0x20000000, 512 << 10)),
        _arm("cortex-m55+nomve", "auto", REF | DSP, "mps3-an547", 0x59303000, (0, 512 << 10), (0x20000000, 512 << 10),
             name="cortex-m55-nomve"),
        _riscv("riscv32", "-march=rv32imac", "-mabi=ilp32", ILP32),
        _riscv("riscv64", "-march=rv64gc", "-mabi=lp64d", LP64),
        _hosted("x86_64-linux", "", _X86, "x86"),
        _hosted("aarch64-linux-gnu", "aarch64-linux-gnu-", _ARM64, "arm64"),
        _hosted("armv7-linux-gnueabihf", "arm-linux-gnueabihf-", (REF,), "", ILP32, ("-mfpu=neon-vfpv4",)),
        _hosted("riscv64-linux-gnu", "riscv64-linux-gnu-", (REF,), ""),
    )
}  # fmt: skip


def machine(name: str) -> Machine:
    """The machine of a name.

    Raises:
        Error: there is none.
    """
    if name not in MACHINES:
        raise Error(f"unknown target {name!r}", remedy=f"one of {', '.join(MACHINES)}")
    return MACHINES[name]
