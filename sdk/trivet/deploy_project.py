"""The texts of a deployed project: the program as C, sizes, Makefile, CMakeLists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trivet.deploy_targets import Machine
from trivet.fbs.structs import RegionKind, StepKind
from trivet.reader import EntryView, FileView

WARNINGS = "-Wall -Wextra"
COMMON = "-std=c11 -ffunction-sections -fdata-sections -fno-common -ffp-contract=off -fno-trapping-math -fno-math-errno"


@dataclass(frozen=True)
class Memory:
    """A buffer of the image: a region, or several that are never in use at the same time."""

    name: str
    size: int
    align: int


@dataclass(frozen=True)
class Memories:
    """buffers: in order; of_region[entry][region]: index of a buffer, -1 for none; sessions: bytes by entry."""

    buffers: tuple[Memory, ...]
    of_region: tuple[tuple[int, ...], ...]
    sessions: tuple[int, ...]

    @property
    def arena(self) -> int:
        """Bytes of arenas and state."""
        return sum(b.size for b in self.buffers)


def memories(view: FileView, machine: Machine) -> Memories:
    """What the program needs in RAM. Entries share arenas (one runs at a time), and state by its id."""
    found: dict[tuple[int, int], list[int]] = {}
    for e in view.entries:
        for key, size, align in _regions(e):
            if key is not None:
                at = found.setdefault(key, [0, 16])
                at[0], at[1] = max(at[0], size), max(at[1], align)
    order = {key: i for i, key in enumerate(found)}
    names = {RegionKind.arena: "arena", RegionKind.state: "state"}
    buffers = tuple(Memory(f"{names[RegionKind(k[0])]}_{i}", *found[k]) for i, k in enumerate(found))  # fmt: skip
    return Memories(buffers, tuple(tuple(-1 if key is None else order[key] for key, _, _ in _regions(e)) for e in view.entries),
                    tuple(session_bytes(e, machine, rank_of(view)) for e in view.entries))  # fmt: skip


def _regions(e: EntryView) -> list[tuple[tuple[int, int] | None, int, int]]:
    """By region: what names its buffer, bytes, alignment. Arenas of one entry are apart; those of several meet by memory."""
    out: list[tuple[tuple[int, int] | None, int, int]] = []
    for r in e.regions:
        kind, size = RegionKind(int(r["kind"])), int(r["size"])
        if kind not in (RegionKind.arena, RegionKind.state) or size == 0:
            out.append((None, 0, 16))
        else:
            out.append(((int(kind), int(r["id"] if kind == RegionKind.state else r["memory"])), size, int(r["align"])))
    return out


def rank_of(view: FileView) -> int:
    """The highest rank of any value: TRV_MAX_RANK of the image."""
    return max([4, *(int(v["rank"]) for e in view.entries for v in e.values)])


def session_bytes(e: EntryView, machine: Machine, rank: int) -> int:
    """As trv_session_bytes on that machine."""
    a = machine.abi
    slots = len(e.inputs) + len(e.outputs)
    data = 2 if any(int(d["op"]) == 10 for d in e.dims) else 1
    at = a.session
    slot, tensor = a.slot[0] + a.slot[1] * rank, a.tensor[0] + a.tensor[1] * rank
    for count, size in ((len(e.regions), a.buf), (slots, slot), (slots, tensor), (len(e.dims) * data, a.word),
                        (len(e.steps), a.step)):  # fmt: skip
        at = _up(at, 8) + count * size
    at = _up(at, 4)
    for i, step in enumerate(e.steps):
        if step["kind"] == StepKind.run:
            mine = [c for c in e.commands if c.delegate == "cpu" and _within(e, i, c.time)]
            at = _up(at, 16) + _up(a.part, 16) + len(mine) * a.chosen
    return at


def _within(e: EntryView, step: int, time: int) -> bool:
    later = [int(s["time"]) for s in e.steps if int(s["time"]) > int(e.steps[step]["time"])]
    return int(e.steps[step]["time"]) <= time < min([e.times, *later])


def _up(n: int, to: int) -> int:
    return -(-n // to) * to


# ---- C ----------------------------------------------------------------------------------------------------------------------
def model_h(view: FileView, m: Memories, machine: Machine, crc: int, at: int | None) -> str:
    """Sizes and names as macros; what model.c defines."""
    lines = ["/* Written by trivet deploy. */", "#ifndef MODEL_H", "#define MODEL_H", "", '#include "trivet/trivet.h"', "",
             f'#define MODEL_NAME "{_word(view.name)}"', f'#define MODEL_TARGET "{machine.name}"',
             f"#define MODEL_PROGRAM_BYTES {view.size}u", f"#define MODEL_PROGRAM_CRC {crc:#010x}u", "#define MODEL_OPEN TRV_OPEN_NO_CRC /* the image vouches for its bytes; 0: check them at the start */",
             f"#define MODEL_ENTRIES {len(view.entries)}", f"#define MODEL_ARENA_BYTES {m.arena}u /* arenas and state */",
             f"#define MODEL_SESSION_BYTES {sum(m.sessions)}u /* of all entries */"]  # fmt: skip
    for b in m.buffers:
        lines.append(f"#define MODEL_{b.name.upper()}_BYTES {b.size}u")
    for e, size in zip(view.entries, m.sessions, strict=True):
        lines.append(f"#define MODEL_SESSION_{_word(e.name).upper()}_BYTES {size}u")
    place = (
        f"((const uint8_t*){at:#x}u) /* external flash: program.bin lies there */"
        if at is not None
        else "((const uint8_t*)model_words)"
    )
    lines += ["", f"#define MODEL_PROGRAM {place}"] + (
        [f"extern const uint32_t model_words[{-(-view.size // 4)}];"] if at is None else []
    )
    lines += ["", "typedef struct model_entry {", "  const char* name;", "  const trv_buf* regions; /* by region of the entry */",
              "  uint8_t* session;", "  size_t session_bytes;", "} model_entry;",
              "extern const model_entry model_entries[MODEL_ENTRIES];", "#endif", ""]  # fmt: skip
    return "\n".join(lines)


def model_c(view: FileView, m: Memories, data: bytes | None, machine: Machine) -> str:
    """The program's bytes (None: they lie elsewhere), and the memory that it runs in."""
    program, arena = ("", "") if machine.hosted else ('section(".program"), ', 'section(".arena"), ')
    lines = ["/* Written by trivet deploy. */", '#include "model.h"', ""]
    if data is not None:
        words = np.frombuffer(data + bytes(-len(data) % 4), "<u4")
        lines += ["/* little-endian words; the runtime reads bytes */",
                  f'const __attribute__(({program}aligned({_align(view)}))) uint32_t model_words[{len(words)}] = {{']  # fmt: skip
        for i in range(0, len(words), 10):
            lines.append(" " + ",".join(f"{int(w):#x}" for w in words[i : i + 10]) + ",")
        lines += ["};", ""]
    for b in m.buffers:
        lines.append(f"static __attribute__(({arena}aligned({b.align}))) uint8_t {b.name}[{b.size}];")
    for i, size in enumerate(m.sessions):
        lines.append(f"static _Alignas(16) uint8_t session_{i}[{size}];")
        rows = [
            "{NULL, 0, 0}" if k < 0 else f"{{{m.buffers[k].name}, 0, sizeof {m.buffers[k].name}}}"
            for k in m.of_region[i]
        ]
        lines.append(f"static const trv_buf regions_{i}[] = {{{', '.join(rows) or '{NULL, 0, 0}'}}};")
    lines += ["", "const model_entry model_entries[MODEL_ENTRIES] = {"]
    lines += [
        f'    {{"{_word(e.name)}", regions_{i}, session_{i}, sizeof session_{i}}},' for i, e in enumerate(view.entries)
    ]
    return "\n".join([*lines, "};", ""])


def _align(view: FileView) -> int:
    return max([16, *(min(int(s["align"]), 64) for s in view.segments)])


def _word(text: str) -> str:
    return "".join(c if c.isalnum() or c in "_-." else "_" for c in text)


# ---- building -----------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Build:
    """What the build files say. fast: units compiled for speed (kernels), small: the others; floats: mathematics is needed."""

    machine: Machine
    fast: Sequence[str]
    small: Sequence[str]
    defines: Sequence[str]
    floats: bool
    stack: int
    flash: int | None
    ram: int | None

    @property
    def places(self) -> dict[str, str]:
        """What the linker script asks for."""
        m = self.machine
        return {"FLASH_AT": f"{m.flash[0]:#x}", "FLASH_SIZE": f"{self.flash or m.flash[1]:#x}", "RAM_AT": f"{m.ram[0]:#x}",
                "RAM_SIZE": f"{self.ram or m.ram[1]:#x}", "STACK_SIZE": str(self.stack)}  # fmt: skip


LIBC = "-fno-builtin -fno-strict-aliasing -fno-tree-loop-distribute-patterns"


def makefile(b: Build) -> str:
    """For GNU make."""
    m = b.machine
    link = ["-Wl,--gc-sections"]
    lines = [f"# {m.name}, written by trivet deploy. make; make size; make run" + (" (QEMU)" if m.qemu else ""), f"CROSS ?= {m.compiler}",
             "ifeq ($(origin CC),default)", f"CC := $(CROSS){'gcc' if m.compiler else 'cc'}", "endif", ""]  # fmt: skip
    if not m.hosted:
        lines += ["# a C library, for its headers" + (" and mathematics" if b.floats else " alone") + ": picolibc or newlib, whichever is there",
                  "SPECS ?= $(firstword $(foreach s,picolibc nano,$(shell $(CC) --specs=$s.specs -E -x c /dev/null >/dev/null 2>&1 && echo --specs=$s.specs)))",
                  *(f"{k} ?= {v}" for k, v in b.places.items()),
                  "# 0 for a real board: its clock counts cycles, and there is no way out of main", "EMULATED ?= 1", ""]  # fmt: skip
        link += ["-nostartfiles", "-nostdlib", f"-Tport/{m.linker}", *(f"-Wl,--defsym={n}=$({n})" for n in b.places)]
    board = "".join(f" -D{d}" for d in m.board)
    lines += [f"FLAGS := {' '.join(m.flags)} $(SPECS) {COMMON} {WARNINGS}",
              f"FLAGS += -I. -Iport -Itrivet/include {' '.join('-D' + d for d in b.defines)}{board}",
              *([] if m.hosted else ["ifeq ($(EMULATED),1)", "FLAGS += -DBOARD_EMULATED", "endif"]),
              f"LINK := {' '.join(link)}", f"LIBS := {_libs(b)}", "# kernels; the rest", "FAST ?= -O2", "SMALL ?= -Os", ""]  # fmt: skip
    lines += ["KERNELS := " + " \\\n  ".join(b.fast), "REST := " + " \\\n  ".join(b.small), ""]
    lines += ["K := $(KERNELS:%.c=build/%.o)", "R := $(REST:%.c=build/%.o)", "", "build/model.elf: $(K) $(R) Makefile",
              "\t$(CC) $(FLAGS) $(LINK) $(K) $(R) $(LIBS) -Wl,-Map=build/model.map -o $@", "",
              "$(K): build/%.o: %.c Makefile", "\t@mkdir -p $(@D)", "\t$(CC) $(FLAGS) $(FAST) -MMD -c $< -o $@",
              "$(R): build/%.o: %.c Makefile", "\t@mkdir -p $(@D)", "\t$(CC) $(FLAGS) $(SMALL) -MMD -c $< -o $@",
              f"build/port/libc.o: FLAGS += {LIBC}", "-include $(K:.o=.d) $(R:.o=.d)", "", "size: build/model.elf", "\t$(CROSS)size -A $<"]  # fmt: skip
    if m.qemu or m.hosted:
        requests = (
            "about\\n" + ("selftest\\n" if "MODEL_GOLDEN" in b.defines else "") + "steps 0\\nrun 0 1\\nstack\\nquit\\n"
        )
        lines += ["", "run: build/model.elf", f"\tprintf '{requests}' | " + (emulator(m, "$<") if m.qemu else "$<")]
    return "\n".join([*lines, "", "clean:", "\trm -rf build", "", ".PHONY: size run clean", ""])


def _libs(b: Build) -> str:
    return "-lm" if b.machine.hosted else "-lm -lc -lgcc" if b.floats else "-lgcc"


def emulator(machine: Machine, image: str) -> str:
    """The command that runs an image, its serial line on standard input and output."""
    semihosting = "" if machine.name.startswith("riscv") else "-semihosting-config enable=on,target=native "
    return (
        f"{' '.join(machine.qemu)} -nographic -monitor none -serial stdio -icount shift=0 {semihosting}-kernel {image}"
    )


def cmake(b: Build) -> str:
    """The same for CMake: cmake -S . -B build && cmake --build build; no toolchain file is needed."""
    m = b.machine
    flags = [*m.flags, *COMMON.split(), *WARNINGS.split()]
    lines = [f"# {m.name}, written by trivet deploy.", "cmake_minimum_required(VERSION 3.18)"]
    if not m.hosted:
        lines += ["set(CMAKE_SYSTEM_NAME Generic)", "set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)"]
    if m.compiler:
        lines += ["if(NOT CMAKE_C_COMPILER)", f"  set(CMAKE_C_COMPILER {m.compiler}gcc)", "endif()"]
    lines += ["project(model C)", f"set(KERNELS\n  {chr(10).join('  ' + u for u in b.fast).strip()})",
              f"set(REST\n  {chr(10).join('  ' + u for u in b.small).strip()})", "add_executable(model.elf ${KERNELS} ${REST})",
              "target_include_directories(model.elf PRIVATE . port trivet/include)",
              f"target_compile_definitions(model.elf PRIVATE {' '.join([*b.defines, *m.board])})",
              f"target_compile_options(model.elf PRIVATE {' '.join(flags)})",
              "set_source_files_properties(${KERNELS} PROPERTIES COMPILE_OPTIONS -O2)",
              "set_source_files_properties(${REST} PROPERTIES COMPILE_OPTIONS -Os)"]  # fmt: skip
    if m.hosted:
        return "\n".join([*lines, "target_link_libraries(model.elf PRIVATE m)", ""])
    lines += [f'set_source_files_properties(port/libc.c PROPERTIES COMPILE_OPTIONS "-Os;{LIBC.replace(" ", ";")}")',
              'option(EMULATED "for QEMU; a real board counts cycles" ON)', "if(EMULATED)",
              "  target_compile_definitions(model.elf PRIVATE BOARD_EMULATED)", "endif()",
              "foreach(specs picolibc nano) # a C library for its headers, whichever is there",
              "  execute_process(COMMAND ${CMAKE_C_COMPILER} --specs=${specs}.specs -E -x c /dev/null OUTPUT_QUIET ERROR_QUIET RESULT_VARIABLE bad)",
              "  if(NOT bad)", "    target_compile_options(model.elf PRIVATE --specs=${specs}.specs)",
              "    target_link_options(model.elf PRIVATE --specs=${specs}.specs)", "    break()", "  endif()", "endforeach()",
              f"target_link_options(model.elf PRIVATE {' '.join(m.flags)} -nostartfiles -nostdlib -Wl,--gc-sections",
              f"  -T${{CMAKE_CURRENT_SOURCE_DIR}}/port/{m.linker}"]  # fmt: skip
    for name, value in b.places.items():
        lines.append(f"  -Wl,--defsym={name}={value}")
    return "\n".join([*lines, ")", f"target_link_libraries(model.elf PRIVATE {_libs(b).replace('-l', '')})", ""])
