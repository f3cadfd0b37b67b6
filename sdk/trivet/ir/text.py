"""The text form of the IR. What is printed here is read by parse.py to the same module; README.md in sdk/ explains it.

Small constants and arrays of scales are written out, larger ones appear by dtype, shape and checksum.
"""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import MISSING, fields
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from trivet.fbs.structs import MapOp
from trivet.ir.dim import INF, Dim
from trivet.ir.graph import Const, Graph, Loc, Module, Node, State, Sym, Value
from trivet.ir.ops import Instr, Map
from trivet.ir.types import INLINE, array_text, is_float

if TYPE_CHECKING:
    from torch import Tensor


def print_module(module: Module) -> str:
    """All constants, states and entries."""
    lines = [f"module {_word(module.name)}"]
    seen: set[Const | State] = set()
    for graph in module.entries.values():
        lines += _shared(graph, seen)
    for graph in module.entries.values():
        lines += ["", *_graph(graph, "entry", "")]
    return "\n".join(lines) + "\n"


def print_graph(graph: Graph) -> str:
    """One entry with the constants and states that it reads, as a module of its own."""
    return print_module(Module(graph.name, {graph.name: graph}))


def print_node(node: Node) -> str:
    """One node on one line, without its place and its graphs."""
    outs = ", ".join(_declare(v) for v in node.outputs)
    args = ", ".join("none" if v is None else _ref(v) for v in node.inputs)
    return f"{outs}{' = ' if outs else ''}{node.op}({args}){_attrs(node.attrs)}"


def _shared(graph: Graph, seen: set[Const | State]) -> list[str]:
    lines = []
    states = [s for s, _ in graph.writes]
    for v in graph.values():
        if v.const is not None and v.const not in seen:
            seen.add(v.const)
            lines.append(f"const @{v.const.name}: {v.type}{_data(v.const.data)}")
        elif v.state is not None:
            states.append(v.state)
    for s in states:
        if s not in seen:
            seen.add(s)
            lines.append(f"state @{s.name}: {s.type}{'' if s.init is None else _data(s.init)}")
    for n in graph.nodes:
        for sub in n.graphs:
            lines += _shared(sub, seen)
    return lines


def _data(data: Any) -> str:
    """The elements where they are few, else the checksum of the bytes."""
    if data is None:
        return ""
    if data.numel() <= INLINE:
        flat = data.detach().reshape(-1)
        if flat.is_floating_point() and flat.dtype.itemsize == 2:
            flat = flat.float()
        return f" = [{', '.join(_number(x) for x in flat.numpy())}]"
    return f" #{checksum(data):08x}"


def checksum(data: Tensor) -> int:
    """CRC-32 of the elements in row-major order."""
    return zlib.crc32(raw_bytes(data).numpy().data)


def raw_bytes(data: Tensor) -> Tensor:
    """The elements in row-major order as a vector of bytes; shares memory where it can."""
    import torch

    flat = data.detach().reshape(-1)
    if flat.numel() and flat.stride(0) != 1:
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def scale_arrays(module: Module) -> dict[str, Any]:
    """The arrays of scales and offsets that the text has only checksums of, by checksum ("#f288b395"), for parse_module."""
    out: dict[str, Any] = {}

    def add(graph: Graph) -> None:
        for v in graph.values():
            q = v.type.quant
            for x in (q.scale, q.offset) if q is not None else ():
                if x is not None and x.size > INLINE:
                    out[array_text(x)] = x
        for n in graph.nodes:
            for sub in n.graphs:
                add(sub)

    for entry in module.entries.values():
        add(entry)
    return out


def _number(x: Any) -> str:
    text = str(x).lower()
    return text.removesuffix(".0") if "e" not in text and text != "-0.0" else text


def _word(text: str) -> str:
    return text if re.fullmatch(r"[A-Za-z_][\w.]*", text) else json.dumps(text)


def _ref(v: Value) -> str:
    if v.const is not None:
        return f"@{v.const.name}"
    return f"@{v.state.name}" if v.state is not None else f"%{v.name}"


def _declare(v: Value) -> str:
    text = f"%{v.name}: {v.type}"
    if v.order is not None:
        text += f" order{_tuple(v.order)}"
    if v.placement is not None:
        text += f" at {_ref(v.placement.root)} + {v.placement.offset} strides{_tuple(v.placement.strides)}"
    return text


def _tuple(t: tuple[Any, ...]) -> str:
    return f"({', '.join(_value(x) for x in t)})"


def _value(x: Any) -> str:
    if x is None:
        return "none"
    if isinstance(x, IntEnum):
        return x.name
    if isinstance(x, bool):
        return "true" if x else "false"
    if isinstance(x, tuple):
        return _tuple(x)
    return json.dumps(x) if isinstance(x, str) else str(x)


def _attrs(attrs: Any) -> str:
    if isinstance(attrs, Map):
        return f" {{{'; '.join(f'r{k} = {_instr(i)}' for k, i in enumerate(attrs.code))}}}"
    parts = []
    for f in fields(attrs):
        x = getattr(attrs, f.name)
        if f.default is MISSING or x != f.default:
            parts.append(f"{f.name}={_value(x)}")
    return f" {{{', '.join(parts)}}}" if parts else ""


def _instr(i: Instr) -> str:
    args = [f"r{a}" for a in i.args]
    if i.value is not None:
        args.append(repr(float(i.value)) if i.op == MapOp.const_ and is_float(i.dtype) else str(_plain(i.value)))
    return " ".join([f"{i.op.name}.{i.dtype.name}", *args])


def _plain(x: Any) -> Any:
    return x if isinstance(x, Dim) else int(x)


def _graph(graph: Graph, keyword: str, indent: str) -> list[str]:
    inner = indent + "  "
    lines = [f"{indent}{keyword} {_word(graph.name)}({', '.join(_declare(v) for v in graph.inputs)}) {{"]
    for s in graph.symbols.values():
        lines.append(f"{inner}symbol {s.name}: {s.min}..{'inf' if s.max >= INF else s.max}{_source(s)}")
    for n in graph.nodes:
        text = print_node(n)
        if n.tmp:
            text += f" tmp({', '.join(_declare(v) for v in n.tmp)})"
        if n.spare:
            text += f" spare({', '.join(_declare(v) for v in n.spare)})"
        if n.delegate:
            text += f" on {_word(n.delegate)}" + (f" because {json.dumps(n.reason)}" if n.reason else "")
        if n.loc != Loc():
            text += f" loc({', '.join(json.dumps(t) for t in (n.loc.module, n.loc.source, n.loc.origin))})"
        lines.append(inner + text)
        for sub in n.graphs:
            lines += _graph(sub, "graph", inner + "  ")
    lines += [f"{inner}write @{s.name} = {_ref(v)}" for s, v in graph.writes]
    if graph.signature:
        lines.append(f"{inner}signature {json.dumps(json.dumps(graph.signature))}")
    lines.append(f"{inner}return {', '.join(_ref(v) for v in graph.outputs)}".rstrip())
    return [*lines, indent + "}"]


def _source(s: Sym) -> str:
    text = ""
    if s.source is not None:
        text = f" = size({s.source[0]}, {s.source[1]})"
    elif s.solved is not None:
        text = f" = {s.solved}"
    return text + (" data" if s.data else "") + ("" if s.hint is None else f" hint {s.hint}")
