"""Reads the text form of the IR (see text.py)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from enum import IntEnum
from functools import cache
from math import prod
from typing import Any, get_type_hints

import numpy as np

from trivet.fbs.structs import DType, MapOp
from trivet.ir.carry import scale_shape
from trivet.ir.dim import INF, Dim, Shape, parse_dim
from trivet.ir.graph import Const, Graph, Loc, Module, Node, Placement, State, Sym, Value
from trivet.ir.ops import OPS, Instr, Map
from trivet.ir.types import Quant, Type, is_float

_TOKEN = re.compile(r"""\s+ | //[^\n]* | ("(?:[^"\\]|\\.)*" | [%@][\w.]+ | \#[0-9a-f]{8} | -?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?
                        | [A-Za-z_][\w.]* | \.\. | .)""", re.VERBOSE)  # fmt: skip


def parse_module(text: str, consts: Mapping[str, Any] | None = None) -> Module:
    """Reads the text form.

    Args:
        text: as print_module writes it; // begins a comment.
        consts: what is not written out: torch tensors of constants and states by name, float32 numpy arrays of scales by
            checksum (text.scale_arrays); others are zeros.

    Raises:
        ValueError: the line and what was expected there.
    """
    return _Parser(text, consts or {}).module()


def parse_graph(text: str, consts: Mapping[str, Any] | None = None) -> Graph:
    """The only entry of a module."""
    (graph,) = parse_module(text, consts).entries.values()
    return graph


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


class _Parser:
    def __init__(self, text: str, data: Mapping[str, Any]) -> None:
        self.text, self.data = text, data
        self.tokens = [(m.group(1), m.start()) for m in _TOKEN.finditer(text) if m.group(1)]
        self.at = 0
        self.shared: dict[str, Const | State] = {}
        self.types: dict[str, Type] = {}

    # -- tokens
    def peek(self, ahead: int = 0) -> str:
        return self.tokens[self.at + ahead][0] if self.at + ahead < len(self.tokens) else ""

    def take(self, expected: str = "") -> str:
        t = self.peek()
        if not t or (expected and t != expected):
            raise self.error(f"expected {expected or 'more'}, got {t or 'the end'}")
        self.at += 1
        return t

    def accept(self, token: str) -> bool:
        if self.peek() == token:
            self.at += 1
            return True
        return False

    def error(self, why: str) -> ValueError:
        place = self.tokens[self.at][1] if self.at < len(self.tokens) else len(self.text)
        return ValueError(f"line {self.text.count(chr(10), 0, place) + 1}: {why}")

    def word(self) -> str:
        t = self.take()
        return str(json.loads(t)) if t.startswith('"') else t

    def until(self, *ends: str) -> str:
        """The text of the tokens up to one of ends, outside of parentheses and braces."""
        parts: list[str] = []
        depth = 0
        while depth or self.peek() not in ends:
            t = self.take()
            depth += {"(": 1, ")": -1, "{": 1, "}": -1}.get(t, 0)
            parts.append(t)
        return " ".join(parts)

    def dim(self, *ends: str) -> int | Dim:
        return parse_dim(self.until(*ends))

    def dims(self, begin: str, end: str) -> Shape:
        self.take(begin)
        out: list[int | Dim] = []
        while not self.accept(end):
            out.append(self.dim(",", end))
            self.accept(",")
        return tuple(out)

    def tensor_type(self) -> Type:
        name = self.take()
        if name not in DType.__members__:
            raise self.error(f"there is no dtype {name}")
        dtype, shape = DType[name], self.dims("[", "]")
        return Type(dtype, shape, self.quant(shape) if self.peek() == "{" else None)

    def quant(self, shape: Shape) -> Quant:
        """{scale, zero, ..} or {axis=.., scale=[..] or checksum, ..}."""
        self.take("{")
        given: dict[str, Any] = {}
        for name in ("scale", "zero"):
            if self.peek(1) != "=" and self.peek() != "}":
                given[name] = self.number(name == "zero")
                self.accept(",")
        while not self.accept("}"):
            name = self.take()
            if name not in _hints(Quant):
                raise self.error(f"quantisation has no {name}")
            self.take("=")
            given[name] = self.array() if name in ("scale", "offset") else int(self.number(True))
            self.accept(",")
        if "scale" not in given:
            raise self.error("quantisation needs a scale")
        arrays = {name: given.pop(name) for name in ("scale", "offset") if name in given}
        quant = Quant(np.zeros((), np.float32), **given)
        if quant.axis is not None and not 0 <= quant.axis < len(shape):
            raise self.error(f"there is no axis {quant.axis}")
        size = [int(str(d)) for d in scale_shape(quant, shape)]
        for name, x in arrays.items():
            if isinstance(x, str):
                x = self.data.get(x, np.zeros(size, np.float32))
            if np.size(x) != prod(size):
                raise self.error(f"{name} has {np.size(x)} elements, not {prod(size)}")
            arrays[name] = np.asarray(x, np.float32).reshape(size)
        return replace(quant, **arrays)

    def array(self) -> list[float] | str:
        """The elements, or the checksum of what was too long to write out."""
        if self.peek().startswith("#"):
            return self.take()
        self.take("[")
        return [self.scalar(DType.f32) for _ in iter(lambda: self.accept("]"), True)]

    # -- module
    def module(self) -> Module:
        self.take("module")
        module = Module(self.word())
        while self.peek() in ("const", "state"):
            self.constant(self.take())
        while self.peek() == "entry":
            graph = self.graph(None)
            module.entries[graph.name] = graph
        if self.peek():
            raise self.error(f"unexpected {self.peek()}")
        return module

    def constant(self, kind: str) -> None:
        import torch

        from trivet.ir.interop import torch_dtype

        name = self.take()[1:]
        self.take(":")
        t = self.tensor_type()
        given = self.data.get(name)
        if self.accept("="):
            self.take("[")
            numbers = [self.scalar(t.dtype) for _ in iter(lambda: self.accept("]"), True)]
            kind_ = torch.float64 if is_float(t.dtype) else torch.int64
            given = torch.tensor(numbers, dtype=kind_).to(torch_dtype(t.dtype)).reshape([int(str(d)) for d in t.shape])
        elif self.peek().startswith("#"):
            self.take()
        if given is None and kind == "const":
            given = torch.zeros([int(str(d)) for d in t.shape], dtype=torch_dtype(t.dtype))
        self.shared[name] = Const(name, given) if kind == "const" else State(name, t, given)
        self.types[name] = t

    def scalar(self, dtype: DType) -> float:
        x = float(self.take() == "true") if self.peek() in ("true", "false") else self.number(not is_float(dtype))
        self.accept(",")
        return x if is_float(dtype) else int(x)

    # -- graph
    def graph(self, outer: Graph | None) -> Graph:
        self.take()  # entry or graph
        graph = Graph(self.word())
        scope: dict[str, Value] = {}
        later: list[tuple[Value, str, int | Dim, Shape]] = []
        self.take("(")
        while not self.accept(")"):
            graph.inputs.append(self.declare(scope, later))
            self.accept(",")
        self.take("{")
        while self.accept("symbol"):
            s = self.symbol()
            graph.symbols[s.name] = s
        while self.peek() not in ("write", "signature", "return"):
            self.node(graph, scope, later)
        while self.accept("write"):
            target = self.shared[self.take()[1:]]
            assert isinstance(target, State)
            self.take("=")
            graph.writes.append((target, self.read(scope)))
        if self.accept("signature"):
            graph.signature = json.loads(self.word())
        self.take("return")
        while not self.accept("}"):
            graph.outputs.append(self.read(scope))
            self.accept(",")
        for v, root, offset, strides in later:
            v.placement = Placement(self.lookup(root, scope), offset, strides)
        numbers = [int(n[1:]) for n in scope if re.fullmatch(r"v\d+", n)]
        graph.counter = max(numbers, default=0)
        return graph

    def symbol(self) -> Sym:
        s = Sym(self.take())
        self.take(":")
        s.min = int(self.take())
        self.take("..")
        high = self.take()
        s.max = INF if high == "inf" else int(high)
        if self.accept("="):
            if self.peek() == "size":
                self.take()
                source = self.dims("(", ")")
                s.source = (int(str(source[0])), int(str(source[1])))
            else:
                start = self.at
                while self.line(self.at) == self.line(start) and self.peek() not in ("data", "hint"):
                    self.take()
                s.solved = parse_dim(" ".join(t for t, _ in self.tokens[start : self.at]))
        s.data = self.accept("data")
        s.hint = int(self.take()) if self.accept("hint") else None
        return s

    def line(self, at: int) -> int:
        return self.text.count("\n", 0, self.tokens[at][1])

    def declare(self, scope: dict[str, Value], later: list[tuple[Value, str, int | Dim, Shape]]) -> Value:
        name = self.take()
        if not name.startswith("%"):
            raise self.error(f"expected a value, got {name}")
        self.take(":")
        v = Value(name[1:], self.tensor_type())
        if self.accept("order"):
            v.order = tuple(int(str(d)) for d in self.dims("(", ")"))
        if self.accept("at"):
            root = self.take()
            self.take("+")
            offset = self.dim("strides")
            self.take("strides")
            later.append((v, root, offset, self.dims("(", ")")))
        if v.name in scope:
            raise self.error(f"%{v.name} is defined twice")
        scope[v.name] = v
        return v

    def read(self, scope: dict[str, Value]) -> Value:
        return self.lookup(self.take(), scope)

    def lookup(self, token: str, scope: dict[str, Value]) -> Value:
        if token.startswith("@") and token not in scope:
            if token[1:] not in self.shared:
                raise self.error(f"there is no {token}")
            owner = self.shared[token[1:]]
            const, state = (owner, None) if isinstance(owner, Const) else (None, owner)
            scope[token] = Value(token[1:], self.types[token[1:]], const=const, state=state)
        v = scope.get(token.removeprefix("%"))
        if v is None:
            raise self.error(f"there is no {token} here")
        return v

    def node(self, graph: Graph, scope: dict[str, Value], later: list[tuple[Value, str, int | Dim, Shape]]) -> None:
        outs: list[Value] = []
        start, after = self.at, self.skip_declarations()  # first the operands: outputs must not be visible in them
        op = self.take()
        if op not in OPS:
            raise self.error(f"there is no op {op}")
        self.take("(")
        args: list[Value | None] = []
        while not self.accept(")"):
            args.append(None if self.accept("none") else self.read(scope))
            self.accept(",")
        end = self.at
        self.at = start
        while self.at < after - 1:
            outs.append(self.declare(scope, later))
            self.accept(",")
        self.at = end
        node = Node(op, args, outs, self.attrs(op))
        for k, v in enumerate(outs):
            v.node, v.index = node, k
        for word, scratch in (("tmp", node.tmp), ("spare", node.spare)):
            if self.accept(word):
                self.take("(")
                while not self.accept(")"):
                    scratch.append(self.declare(scope, later))
                    self.accept(",")
        if self.accept("on"):
            node.delegate = self.word()
            node.reason = self.word() if self.accept("because") else ""
        if self.accept("loc"):
            self.take("(")
            parts = [self.word() for _ in iter(lambda: self.accept(")") or (self.accept(",") and False), True)]
            node.loc = Loc(*parts)
        while self.peek() == "graph":
            node.graphs.append(self.graph(graph))
        graph.nodes.append(node)

    def skip_declarations(self) -> int:
        """Moves behind the `=` of a node, if it has outputs."""
        if self.peek().startswith("%"):
            self.until("=")
            self.take("=")
        return self.at

    # -- attributes
    def attrs(self, op: str) -> Any:
        cls = OPS[op].attrs
        if cls is Map:
            return Map(self.code())
        given: dict[str, Any] = {}
        if self.accept("{"):
            while not self.accept("}"):
                name = self.take()
                if name not in _hints(cls):
                    raise self.error(f"{op} has no attribute {name}")
                self.take("=")
                given[name] = self.attr(_hints(cls)[name])
                self.accept(",")
        return cls(**given)

    def attr(self, kind: Any) -> Any:
        if self.accept("none"):
            return None
        if getattr(kind, "__origin__", None) is tuple:
            self.take("(")
            out = []
            while not self.accept(")"):
                out.append(self.attr(kind.__args__[0]))
                self.accept(",")
            return tuple(out)
        if kind is str:
            return self.word()
        if kind in (float, int):
            return self.number(kind is int)
        if kind is bool:
            return self.take() == "true"
        if isinstance(kind, type) and issubclass(kind, IntEnum):
            return kind[self.take()]
        return self.dim(",", "}")

    def number(self, whole: bool) -> float:
        sign = -1 if self.accept("-") else 1
        return sign * (int(self.take()) if whole else float(self.take()))

    def code(self) -> tuple[Instr, ...]:
        self.take("{")
        out: list[Instr] = []
        while not self.accept("}"):
            self.take(f"r{len(out)}")
            self.take("=")
            name, _, dtype = self.take().partition(".")
            if name not in MapOp.__members__ or dtype not in DType.__members__:
                raise self.error(f"there is no instruction {name}.{dtype}")
            op, kind = MapOp[name], DType[dtype]
            value: Any = None
            args: list[int] = []
            if op == MapOp.dim:
                value = self.dim(";", "}")
            elif op in (MapOp.load, MapOp.iota):
                value = int(self.take())
            elif op == MapOp.const_:
                value = self.number(not is_float(kind))
            else:
                while self.peek() not in (";", "}"):
                    args.append(int(self.take()[1:]))
            out.append(Instr(op, kind, tuple(args), value))
            self.accept(";")
        return tuple(out)
