"""What of hal/cpu a program needs on a machine: operators, one kernel for each command, and the source files that hold them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trivet import native
from trivet.error import Error
from trivet.fbs.structs import Op
from trivet.reader import Command, EntryView, FileView

ROW = re.compile(r"^K\((\w+), (\w+), (\w+), (\w+)\)$", re.M)
ANY = "!"  # name of definitions that come with their file
PACKED_ROWS = 2  # TRVK_PACKED_ROWS of hal/cpu/ops.h
ALWAYS = ("driver.c", "ops.c", "isa.c")


@dataclass(frozen=True)
class Needs:
    """ops: names, in the order of enum Op; kernels: functions; args: most arguments of a command; only_rows: weights of qconv and
    qmatmul are all in the form of microcontrollers (hal/cpu/README.md).
    """

    ops: tuple[str, ...]
    kernels: tuple[str, ...]
    args: int
    only_rows: bool


def needs(view: FileView, levels: Sequence[int]) -> Needs:
    """Operators and kernels of all commands of a program on a machine with one of those sets of instruction sets (TRVK_ISA_ bits).

    Raises:
        Error: a part for another delegate, or a command without a kernel.
    """
    ops: set[str] = set()
    kernels: set[str] = set()
    args, panels = 1, 0
    for entry in view.entries:
        for c in entry.commands:
            if c.delegate not in ("", "cpu"):
                raise Error(
                    f"the program has a part for {c.delegate!r}", remedy="export for target cpu or cpu.cortex_m"
                )
            if c.delegate == "":
                continue
            ops.add(c.op)
            kernels.update(kernel(entry, c, isa) for isa in levels)
            panels += c.op in ("qconv", "qmatmul") and int(c.attrs["packed"]) != PACKED_ROWS
            args = max(args, len(c.inputs) + len(c.outputs) + len(c.tmp))
    return Needs(tuple(o.name for o in Op if o.name in ops), tuple(sorted(kernels)), args, panels == 0)


def kernel(entry: EntryView, c: Command, isa: int) -> str:
    """The function that runs a command (trvk_select_name)."""
    n = native.library()
    ids = [*c.inputs, *c.outputs]
    tensors = n.ffi.new("trv_tensor[]", max(1, len(ids)))
    for t, i in zip(tensors, ids, strict=True):
        if i is not None:
            t.dtype, t.rank = int(entry.values[i]["dtype"]), int(entry.values[i]["rank"])
    attrs = native._bytes(c.attrs)
    name = n.lib.trvk_select_name(Op[c.op], tensors, len(c.inputs), len(c.outputs), attrs, n.ffi.NULL, 0, isa)
    if name == n.ffi.NULL:
        raise Error(f"no kernel for a {c.op}", node=entry.place(c.time).where)
    return native.text(name)


def filtered(text: str, need: Needs) -> str:
    """kernels.def with the rows of these operators and kernels alone."""
    ops = re.sub(r"^OP\((\w+),.*\)$", lambda m: m[0] if m[1] in need.ops else f"WITHOUT({m[1]})", text, flags=re.M)
    ops = re.sub(r"^#if (?!ndef).*\n((?:K\(.*\n)+)#endif\n", r"\1", ops, flags=re.M)
    return ROW.sub(lambda m: m[0] if m[4] in need.kernels else "", ops)


# ---- source files ---------------------------------------------------------------------------------------------------------
def sources(folder: Path, need: Needs, foreign: Iterable[str]) -> list[str]:
    """Files of hal/cpu (names, sorted) that these kernels stand on: the functions that they name, and what those name, and so on.

    Functions of a family for several instruction sets count as one name; files for `foreign` ones are left out. What is named
    without being needed costs nothing in the image: the linker drops it.
    """
    texts = {p.name: _bare(p.read_text()) for p in folder.iterdir() if p.suffix in (".c", ".h", ".inc")}
    usable = sorted(
        n
        for n in texts
        if not any(f"_{x}" in n.replace(".", "_").split("_") or f"_{x}_" in n.replace(".", "_") for x in foreign)
    )
    absent = {f"{op.name}_{what}" for op in Op for what in ("check", "tiles", "verify") if op.name not in need.ops}
    homes: dict[str, list[tuple[str, set[str]]]] = {}  # name: files that define it, and what it mentions there
    for file in usable:
        text = _whole(file, texts) if file.endswith(".c") else texts[file]
        for name, mentions in _chunks(text):
            homes.setdefault(_key(file, name), []).append((file, mentions))
    files = set(ALWAYS)
    todo = [f"{op}_{what}" for op in need.ops for what in ("check", "tiles")] + [_family(k) for k in need.kernels]
    todo += [f"{file}:{ANY}" for file in ALWAYS]
    todo += [k for file in ALWAYS for _, mentions in _chunks(texts[file]) for m in mentions for k in _keys(file, m)]
    seen: set[str] = set()
    while todo:
        key = todo.pop()
        if key in seen or key in absent:
            continue
        seen.add(key)
        for file, mentions in homes.get(key, ()):
            if file.endswith(".c"):
                files.add(file)
                todo.append(f"{file}:{ANY}")
            todo += [
                k
                for m in mentions
                for k in _keys(key.partition(":")[0] if ":" in key and not file.endswith(".c") else file, m)
            ]
    headers = list(files)
    while headers:  # and what they include
        for i in re.findall(r'#include "(\w+\.\w+)"', texts[headers.pop()]):
            if i in texts and i not in files:
                files.add(i)
                headers.append(i)
    return sorted(files)


def _family(name: str) -> str:
    """qconv_rows of trvk_qconv_rows__dsp."""
    return re.sub(r"__\w+$", "", name.removeprefix("trvk_"))


def _key(file: str, name: str) -> str:
    """Families (marked $) are one name everywhere; others belong to their file, those of headers to whoever includes them."""
    return name[1:] if name.startswith("$") else f"{file}:{name}" if file.endswith(".c") else f"*:{name}"


def _keys(file: str, name: str) -> list[str]:
    """What a name in a file may mean."""
    return [name[1:]] if name.startswith("$") else [f"{file}:{name}", f"*:{name}"]


def _bare(text: str) -> str:
    return re.sub(r"/\*.*?\*/", "", text, flags=re.S)


def _whole(name: str, texts: dict[str, str]) -> str:
    """A source with the sources and templates that it includes in place."""

    def put(m: re.Match[str]) -> str:
        if m[1] not in texts or m[1].endswith(".h"):
            return ""
        return re.sub(r'#include "(\w+\.\w+)"', put, texts[m[1]])

    return re.sub(r'#include "(\w+\.\w+)"', put, texts[name])


def _chunks(text: str) -> Iterator[tuple[str, set[str]]]:
    """Definitions of a C text: the name, and the names in it. Declarations define nothing."""
    text = re.sub(r"\\\n", " ", text)
    for m in re.finditer(r"^#define (\w+)(.*)$", text, re.M):
        yield _mark(m[1]), {_mark(w) for w in _WORD.findall(m[2])}
    text = re.sub(r"^#.*$", "", text, flags=re.M)
    depth, start = 0, 0
    for m in re.finditer(r"[{};]", text):
        depth += {"{": 1, "}": -1, ";": 0}[m[0]]
        if depth or (m[0] == "}" and re.match(r"\s*[\w\[;,=]", text[m.end() : m.end() + 8]) and text[m.end() : m.end() + 2] != "\n\n"
                     and re.match(r"\s*;|\s+\w+;", text[m.end() :])):  # fmt: skip
            continue
        chunk, start = text[start : m.end()], m.end()
        head = chunk.split("{")[0]
        if "{" not in chunk and "=" not in chunk:
            continue
        names = re.findall(
            r"TRVK_KERNEL\((\w+)\)\s*\(|\b(\w+)\s*(?:\(|\[[^\]]*\]\s*=|=)", head.replace("__attribute__", "")
        )
        mentions = {_mark(w) for w in _WORD.findall(chunk)} | {
            "$" + w for w in re.findall(r"TRVK_KERNEL\((\w+)\)", chunk)
        }
        for kernel_name, name in names[:1] + [n for n in names[1:] if n[0] or n[1].startswith("trvk_")]:
            # a name that a macro makes may be anything: such a definition goes with its file
            yield "$" + kernel_name if kernel_name else ANY if name.isupper() else _mark(name), mentions


_WORD = re.compile(r"\b[a-zA-Z_]\w+\b")


def _mark(word: str) -> str:
    return "$" + _family(word) if word.startswith("trvk_") else word
