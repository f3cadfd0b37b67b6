"""qconv, qmatmul, qgather with attributes and operands of hostile files: refused, or computed without leaving any storage (what
the sanitizers of tests/c watch when the library is built with them)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from heavy import struct
from quant_product import F16, F32, I8, I16, I32, packed

from trivet import native
from trivet.error import Error
from trivet.fbs.structs import STRUCTS, Op

U8 = torch.uint8
EDGES = (
    0,
    1,
    2,
    3,
    4,
    7,
    8,
    9,
    16,
    127,
    128,
    255,
    256,
    32767,
    32768,
    65535,
    1 << 16,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
)


def anything(rng: np.random.Generator, room: int = 4096) -> torch.Tensor:
    """A tensor of any dtype and shape, with any strides that stay inside its storage."""
    dtype = (I8, I8, I16, I32, U8, F32, F16, torch.int64, torch.float64)[rng.integers(9)]
    base = torch.from_numpy(rng.integers(0, 256, room * 8, dtype=np.uint8)).view(dtype)[:room]
    shape, strides, left = [], [], room - 1
    for _ in range(rng.integers(0, 6)):
        size = int(rng.choice([0, 1, 1, 2, 3, 8, 16, 17]))
        stride = int(rng.choice([0, 1, 1, 2, 17, 40]))
        if (size - 1) * stride > left:
            size = 1
        left -= max(size - 1, 0) * stride
        shape.append(size)
        strides.append(stride)
    return base.as_strided(shape, strides)


def huge() -> torch.Tensor:
    """Sizes that only a stride of 0 makes possible."""
    return torch.zeros(1, dtype=I8).as_strided((1, 1 << 40, 1, 1), (0, 0, 0, 0))


def valid(rng: np.random.Generator) -> list[tuple[Op, str, list[Any], torch.Tensor, dict[str, Any]]]:
    conv = {
        "nd": 2,
        "groups": 1,
        "stride": [1, 1],
        "pad": [1, 1],
        "dilation": [1, 1],
        "kernel": [3, 3],
        "lo": -128,
        "hi": 127,
    }
    x, w, scale = torch.ones(1, 8, 6, 6, dtype=I8), torch.ones(8, 8, 3, 3, dtype=I8), torch.ones(2, 8, dtype=I32)
    thin = torch.ones(8, 1, 3, 3, dtype=I8)
    blob = packed(Op.qconv, struct("QconvAttrs", **conv), w)
    dw = packed(Op.qconv, struct("QconvAttrs", **{**conv, "groups": 8}), thin)
    a, b = torch.ones(3, 16, dtype=I8), torch.ones(16, 8, dtype=I8)
    table, index = torch.ones(20, 16, dtype=I8), torch.tensor([0, 3, 19])
    mat, four = {"bits": 8, "lo": -128, "hi": 127}, {"bits": 4, "group": 8, "dynamic": 2}
    y, real, many = torch.zeros(1, 8, 6, 6, dtype=I8), torch.ones(8), torch.ones(2, 8)
    return [
        (Op.qconv, "QconvAttrs", [x, w, scale, scale[0]], y, conv),
        (Op.qconv, "QconvAttrs", [x, blob, scale, scale[0]], y, {**conv, "packed": 1}),
        (Op.qconv, "QconvAttrs", [x.to(I16), blob, scale], y, {**conv, "packed": 1, "x_zero": 9}),
        (Op.qconv, "QconvAttrs", [x.float(), blob, real], y.float(), {**conv, "packed": 1}),
        (Op.qconv, "QconvAttrs", [x, thin, scale], y, {**conv, "groups": 8}),
        (Op.qconv, "QconvAttrs", [x, dw, scale], y, {**conv, "groups": 8, "packed": 1}),
        (Op.qconv, "QconvAttrs", [x, blob, scale], y, {**conv, "packed": 1, "transposed": 1}),
        (Op.qmatmul, "QmatmulAttrs", [a, b, scale, scale[0]], torch.zeros(3, 8, dtype=I8), mat),
        (Op.qmatmul, "QmatmulAttrs", [a, packed(Op.qmatmul, struct("QmatmulAttrs", **mat), b), scale], torch.zeros(3, 8, dtype=I16),
         {**mat, "packed": 1}),
        (Op.qmatmul, "QmatmulAttrs", [a.float(), packed(Op.qmatmul, struct("QmatmulAttrs", **four), b.to(U8)), many, real, many],
         torch.zeros(3, 8), {**four, "packed": 1}),
        (Op.qmatmul, "QmatmulAttrs", [a.float(), b.to(U8), many, real, many], torch.zeros(3, 8), {**four, "dynamic": 0}),
        (Op.qgather, "QgatherAttrs", [table, index, torch.ones(20)], torch.zeros(3, 16), {"bits": 8}),
        (Op.qgather, "QgatherAttrs", [packed(Op.qgather, struct("QgatherAttrs", bits=8), table), index, torch.ones(20)],
         torch.zeros(3, 16), {"bits": 8, "packed": 1}),
    ]  # fmt: skip


def mutate(rng: np.random.Generator, attrs: Any, inputs: list[Any], out: torch.Tensor) -> torch.Tensor:
    """Changes one to three things in place; returns the output."""
    for _ in range(rng.integers(1, 4)):
        what = rng.integers(6)
        if what <= 2:  # a field
            name = rng.choice(list(attrs.dtype.names))
            field = attrs[name].reshape(-1)
            i = rng.integers(field.size)
            if field.dtype.kind == "f":
                field[i] = rng.choice([0.0, -1e30, 1e30, np.nan, np.inf, 3.5, 127, -128])
            else:
                field[i] = np.array(rng.choice(EDGES), np.uint64).astype(field.dtype)
            attrs[name] = field.reshape(attrs[name].shape)
        elif what == 3:
            inputs[rng.integers(len(inputs))] = anything(rng)
        elif what == 4:
            i = rng.integers(len(inputs))
            inputs[i] = None if rng.integers(2) else huge()
        else:
            out = anything(rng)
    return out


@pytest.mark.parametrize("seed", range(4))
def test_mutations(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ran = 0
    for op, name, inputs, out, fields in valid(rng):
        native.run_op(int(op), inputs, [out], struct(name, **fields))
        for _ in range(300):
            attrs, ins = struct(name, **fields), list(inputs)
            y = mutate(rng, attrs, ins, out.clone())
            try:
                native.run_op(int(op), ins, [y], attrs, tiles=int(rng.choice([0, 1, 5])))
                ran += 1
            except Error:
                pass
    assert ran > 300


@pytest.mark.parametrize("name", ["QconvAttrs", "QmatmulAttrs", "QgatherAttrs"])
def test_packing_of_anything(name: str) -> None:
    rng = np.random.default_rng(7)
    op = {"QconvAttrs": Op.qconv, "QmatmulAttrs": Op.qmatmul, "QgatherAttrs": Op.qgather}[name]
    for _ in range(500):
        attrs = np.frombuffer(
            rng.choice([0, 1, 2, 3, 4, 8], STRUCTS[name].itemsize).astype(np.uint8).tobytes(), STRUCTS[name]
        )[0].copy()
        if rng.integers(2):
            attrs = struct(name, **({"nd": 2, "groups": int(rng.choice([1, 8]))} if op == Op.qconv else {"bits": 8}))
        w = anything(rng)
        try:
            blob = native.pack(int(op), attrs, w)
        except Error:
            continue
        assert 0 < blob.nbytes < 1 << 24
        shape = [int(rng.choice([0, 1, 5, 1 << 31, 1 << 40, 1 << 62, (1 << 63) - 1])) for _ in range(w.ndim)]
        native.pack_bytes(int(op), attrs, 3, shape)
