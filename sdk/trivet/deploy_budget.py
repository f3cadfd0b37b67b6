"""Flash and RAM that a deployed program takes, and what to say when that is more than there is."""

from __future__ import annotations

from dataclasses import dataclass

from trivet.deploy_project import Memories
from trivet.deploy_select import Needs
from trivet.error import Error
from trivet.fbs.structs import RegionKind
from trivet.listing import size_text
from trivet.reader import EntryView, FileView

STATIC = 160  # bytes of RAM beside arenas, sessions and stack: the program's handle, devices, clock
# Code in bytes, roughly, as GCC makes it for Cortex-M4: the linker tells exactly, and fails where it does not fit.
CODE = 25 << 10  # runtime, driver, start, serial line
OF_OP = {"qconv": 5000, "qmatmul": 1500, "qreduce": 4000, "qpool": 4000, "qsoftmax": 1500, "binary": 3000, "requantize": 4000, "lookup": 2500,
         "copy": 2500, "map": 24000, "conv": 14000, "matmul": 12000, "reduce": 9000, "norm": 8000, "softmax": 6000, "attention": 10000,
         "rnn": 9000}  # fmt: skip
OTHER_OP = 5000


@dataclass(frozen=True)
class Usage:
    """Bytes. code is an estimate; ram: arenas, state, sessions, stack and the rest."""

    program: int
    code: int
    arena: int
    session: int
    stack: int

    @property
    def flash(self) -> int:
        return self.program + self.code

    @property
    def ram(self) -> int:
        return self.arena + self.session + self.stack + STATIC


def usage(view: FileView, need: Needs, memory: Memories, stack: int) -> Usage:
    """What a program takes."""
    code = CODE + sum(OF_OP.get(op, OTHER_OP) for op in need.ops)
    return Usage(view.size, code, memory.arena, sum(memory.sessions), stack)


def check(view: FileView, used: Usage, flash: int | None, ram: int | None, outside: bool) -> None:
    """Compares with budgets in bytes, None for no limit. outside: the program lies in another memory.

    Raises:
        Error: over a budget, with the largest consumers and what would help.
    """
    needed = used.code + (0 if outside else used.program)
    if flash is not None and needed > flash:
        parts = f"about {size_text(used.code)} of code" + (
            "" if outside else f" and {size_text(used.program)} of program"
        )
        helps = ["8-bit weights (quantize='w8a8')"] if _wide(view) else []
        helps += [
            "a smaller model",
            *([] if outside else ["--weights-at ADDRESS of a flash of its own for the program"]),
        ]
        if view.quantization is not None or any(e.debug is not None for e in view.entries):
            helps.insert(0, "save(debug=False)")
        raise Error(f"{size_text(needed)} of flash needed ({parts}), {size_text(flash)} there; the largest: {', '.join(_weights(view))}",
                    remedy=", or ".join(helps))  # fmt: skip
    if ram is not None and used.ram > ram:
        raise Error(f"{size_text(used.ram)} of RAM needed (arena and state {size_text(used.arena)}, session {size_text(used.session)}, stack "
                    f"{size_text(used.stack)}), {size_text(ram)} there; in use at the worst moment: {', '.join(_peak(view))}",
                    remedy="smaller inputs or fewer channels where the largest are, 8-bit activations (quantize='w8a8' with quantize_io), or --stack")  # fmt: skip


def _wide(view: FileView) -> bool:
    return any(k in ("f32", "f16") and n > 4096 for e in view.entries for k, n in e.weight_bytes.items())


def _name(e: EntryView, value: int) -> str:
    return e.value_names[value] or f"value {value}"


def _weights(view: FileView) -> list[str]:
    """The largest constants, by name."""
    found: dict[str, int] = {}
    for e in view.entries:
        for v, row in enumerate(e.values):
            s = e.storages[int(row["storage"])]
            if e.regions[int(s["region"])]["kind"] == RegionKind.const_:
                found[_name(e, v)] = int(s["size"])
    return [f"{n} {size_text(b)}" for n, b in sorted(found.items(), key=lambda t: -t[1])[:3]]


def _peak(view: FileView) -> list[str]:
    """The largest values that live when most of an arena is in use, with the operator of that moment."""
    best: tuple[int, list[str]] = (0, ["nothing"])
    for e in view.entries:
        for live in e.live():
            if not live.sums or max(live.sums) <= best[0]:
                continue
            time = live.sums.index(max(live.sums))
            names: dict[int, str] = {}
            for v, row in enumerate(e.values):
                names.setdefault(int(row["storage"]), f"{_name(e, v)} [{', '.join(e.shape(v))}]")
            alive = sorted((-int(s["size"]), names.get(i, "scratch")) for i, s in enumerate(e.storages)
                           if int(s["region"]) == live.region and s["first"] <= time <= s["last"])  # fmt: skip
            where = e.place(time).where
            best = max(live.sums), [f"{n} {size_text(-b)}" for b, n in alive[:3]] + ([f"at {where}"] if where else [])
    return best[1]
