"""The format "openvino.1": a network, and where its weights lie.

Little-endian: u32 magic, u32 sources, u32 own constants, u32 dims, u64 bytes of weights, u64 bytes of xml; per source u64 at, u64 offset,
u64 size, u32 region, u32 0; per own constant u64 at, u64 size; the dims' rows, u32 each; the xml; the own constants' bytes.
The network's inputs are those of the part; with dims, one more: i64[dims], rows of the dimension table. Outputs are those of the part.
"""

from __future__ import annotations

import struct
from math import prod
from typing import Any

import torch

from trivet.ir.dim import Dim
from trivet.ir.graph import Value
from trivet.ir.types import SIZES
from trivet.openvino.lower import Lowering
from trivet.openvino.net import NAMES, Net, Port
from trivet.targets.base import Piece

MAGIC = 0x314E564F  # "OVN1"


def openvino_part(piece: Piece) -> bytes:
    """A piece as a part."""
    net = Net()
    ports: dict[Value, Port] = {}
    rows: list[int] = []
    dims: list[Port] = []
    for v in piece.inputs:
        shape = tuple(d if isinstance(d, int) else -1 for d in v.shape)
        ports[v] = net.add("Parameter", (), shape=shape, element_type=NAMES[v.dtype])

    def size(d: Any) -> Port:
        if not isinstance(d, Dim):
            return net.const([int(d)])
        row = piece.dim(d)
        if not dims:  # after the inputs of the part
            dims.append(net.add("Parameter", (), shape=(-1,), element_type="i64"))
        if row not in rows:
            rows.append(row)
        return net.add("Gather", [dims[0], net.const([rows.index(row)]), net.const(0)], opset=8, batch_dims=0)

    def port(v: Value) -> Port:
        if v not in ports:
            ports[v] = _constant(net, piece, v)
        return ports[v]

    lowering = Lowering(net, size, port)
    for node in piece.nodes:
        for v, p in zip(node.outputs, lowering.node(node), strict=True):
            ports[v] = p
    for v in piece.outputs:
        net.add_result(ports[v])
    xml = net.xml()
    head = struct.pack("<4I2Q", MAGIC, len(net.sources), len(net.own), len(rows), net.size, len(xml))
    table = b"".join(struct.pack("<3Q2I", s.at, s.offset, s.size, s.region, 0) for s in net.sources)
    own = b"".join(struct.pack("<2Q", at, len(data)) for at, data in net.own)
    return b"".join([head, table, own, struct.pack(f"<{len(rows)}I", *rows), xml, *(data for _, data in net.own)])


def _constant(net: Net, piece: Piece, v: Value) -> Port:
    """A constant in place; where it does not lie in row-major order, its layout followed by a transposition, else a copy of its own."""
    assert v.const is not None
    shape = tuple(int(str(d)) for d in v.shape)
    strides = v.placement.strides if v.placement is not None else None
    at = piece.constant(v)
    if v.placement is not None and strides is not None and all(isinstance(s, int) for s in strides):
        order = sorted(range(len(shape)), key=lambda i: (-int(str(strides[i])), i))
        outer = [shape[i] for i in order]
        dense = all(shape[i] == 1 or strides[i] == prod(outer[k + 1 :]) for k, i in enumerate(order))
        if dense:
            p = net.shared(v.dtype, outer, at.region, at.offset + int(str(v.placement.offset)) * SIZES[v.dtype])
            back = sorted(range(len(order)), key=order.__getitem__)
            return p if order == list(range(len(order))) else net.add("Transpose", [p, net.const(back)])
    data = v.const.data.detach().contiguous()
    return net.embedded(v.dtype, shape, bytes(data.reshape(-1).view(torch.uint8).numpy()))
