"""A network in OpenVINO's IR, version 11: layers and edges as xml, and where the bytes of its constants come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import quoteattr

import numpy as np

from trivet.fbs.structs import DType
from trivet.ir.types import SIZES

NAMES = {DType.bool: "boolean", DType.u8: "u8", DType.i8: "i8", DType.i16: "i16", DType.i32: "i32", DType.i64: "i64",
         DType.f16: "f16", DType.bf16: "bf16", DType.f32: "f32", DType.f64: "f64"}  # fmt: skip
ALIGN = 64  # of constants in the weights


@dataclass(frozen=True, slots=True)
class Port:
    """An output of a layer."""

    layer: int
    index: int = 0


@dataclass(frozen=True, slots=True)
class Source:
    """Bytes of the weights that the file's CONST regions hold."""

    at: int  # in the weights
    region: int
    offset: int
    size: int


class Net:
    """Grows layer by layer. own: the weights that only this network has, (at, bytes); sources: those of the program file."""

    def __init__(self) -> None:
        self._layers: list[str] = []
        self._edges: list[tuple[Port, int, int]] = []
        self._ins: list[int] = []
        self._small: dict[tuple[str, tuple[int, ...], bytes], Port] = {}
        self._end = 0
        self.own: list[tuple[int, bytes]] = []
        self.sources: list[Source] = []

    def add(self, kind: str, inputs: Sequence[Port], opset: int = 1, outputs: int = 1, **attrs: Any) -> Port:
        """A layer; its first output (the reader finds dtypes itself, and still wants a word for them). Attributes: numbers, texts, bool, tuples of numbers; "__" in a name stands for "-"."""
        i = len(self._layers)
        data = " ".join(f"{k.replace('__', '-')}={quoteattr(_text(v))}" for k, v in attrs.items())
        ports = "".join(f'<port id="{p}"/>' for p in range(len(inputs)))
        outs = "".join(f'<port id="{len(inputs) + p}" precision="FP32"/>' for p in range(outputs))
        self._layers.append(
            f'<layer id="{i}" name="n{i}" type="{kind}" version="opset{opset}">' + (f"<data {data}/>" if data else "")
            + (f"<input>{ports}</input>" if ports else "") + (f"<output>{outs}</output>" if outs else "") + "</layer>"
        )  # fmt: skip
        for p, x in enumerate(inputs):
            self._edges.append((x, i, p))
        self._ins.append(len(inputs))
        return Port(i)

    def const(self, data: Any, dtype: DType = DType.i64) -> Port:
        """A constant of its own, from numbers."""
        kind = {DType.i64: np.int64, DType.i32: np.int32, DType.f32: np.float32, DType.f16: np.float16, DType.bool: np.bool_,
                DType.u8: np.uint8, DType.i8: np.int8}[dtype]  # fmt: skip
        x: np.ndarray[Any, Any] = np.asarray(data, kind)
        key = (dtype.name, x.shape, x.tobytes())
        if key not in self._small:
            at = self._room(max(len(key[2]), 1))
            self.own.append((at, key[2]))
            self._small[key] = self._const(dtype, x.shape, at, len(key[2]))
        return self._small[key]

    def shared(self, dtype: DType, shape: Sequence[int], region: int, offset: int) -> Port:
        """A constant whose bytes, row-major, lie in a CONST region of the program."""
        size = int(np.prod(shape, dtype=np.int64)) * SIZES[dtype]
        at = self._room(max(size, 1))
        self.sources.append(Source(at, region, offset, size))
        return self._const(dtype, shape, at, size)

    def embedded(self, dtype: DType, shape: Sequence[int], data: bytes) -> Port:
        """A constant of its own, from row-major bytes."""
        at = self._room(max(len(data), 1))
        self.own.append((at, data))
        return self._const(dtype, shape, at, len(data))

    def add_result(self, x: Port) -> None:
        """An output of the network."""
        self.add("Result", [x], outputs=0)

    def _room(self, size: int) -> int:
        at = self._end
        self._end = -(-(at + size) // ALIGN) * ALIGN
        return at

    def _const(self, dtype: DType, shape: Sequence[int], at: int, size: int) -> Port:
        return self.add("Const", (), element_type=NAMES[dtype], shape=tuple(shape), offset=at, size=size)

    @property
    def size(self) -> int:
        """Bytes of the weights."""
        return self._end

    def xml(self) -> bytes:
        """The network as text."""
        edges = "".join(
            f'<edge from-layer="{x.layer}" from-port="{self._ins[x.layer] + x.index}" to-layer="{i}" to-port="{p}"/>'
            for x, i, p in self._edges
        )
        return (f'<?xml version="1.0"?><net name="trivet" version="11"><layers>{"".join(self._layers)}</layers>'
                f"<edges>{edges}</edges></net>").encode()  # fmt: skip


def _text(v: Any) -> str:
    if isinstance(v, bool):
        return "true" if v else "false"
    return ",".join(str(e) for e in v) if isinstance(v, tuple) else str(v)
