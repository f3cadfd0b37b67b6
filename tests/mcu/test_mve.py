"""Kernels with Helium on an emulated Cortex-M55: results are the reference's for many shapes, instructions at most CMSIS-NN's."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import layers
import numpy as np
import pytest
import torch

from trivet import native
from trivet.fbs.structs import Act, BinaryKind, DType, Op, ReduceKind
from trivet.fixed_point import binary_multipliers, pool_multiplier
from trivet.ir import ops
from trivet.targets.cpu_part import attribute_row
from trivet.writer import attrs_struct, records

STACK = 2048  # bytes of one kernel at most
Pick = Callable[..., Any]

# Sums of the layers of MLPerf-Tiny networks with CMSIS-NN, of GCC and clang the better: instructions.
NETWORKS = {"dscnn": 1_780_000, "resnet": 4_810_000, "mobile": 6_420_000, "autoencoder": 61_500}


def binary(g: np.random.Generator, name: str, pick: Pick) -> layers.Layer:
    """Sums and differences of tensors that broadcast or not, of any layout; shifts that 32 bits hold and others."""
    shape = [pick(1, 2, 5), pick(1, 3, 16), pick(1, 7, 33)]
    x, y = (layers.bytes_of(g, *[n if k or pick(0, 1, 1, 1) else 1 for k, n in enumerate(shape)]) for _ in range(2))
    full = torch.broadcast_shapes(x.shape, y.shape)
    kind = pick(BinaryKind.add, BinaryKind.sub, BinaryKind.mul)
    am, bm, shift = binary_multipliers(kind, *(float(v) for v in 10 ** g.uniform(*pick((-1.5, -0.5), (-4, 2)), 3)))
    a = ops.Binary(kind, a_zero=int(g.integers(-128, 128)), b_zero=int(g.integers(-128, 128)), y_zero=int(g.integers(-128, 128)),
                   a_multiplier=am, b_multiplier=bm, shift=shift, lo=pick(-128, -20), hi=pick(127, 33))  # fmt: skip
    want = layers.reference("binary", a, [x, y], full)
    return layers.Layer(name, "binary", a, [x, y], want, want.numel(), {})


def table(g: np.random.Generator, name: str, pick: Pick) -> layers.Layer:
    x, entries = layers.bytes_of(g, pick(1, 3), pick(1, 15, 16, 17, 100)), layers.bytes_of(g, 256)
    if pick(0, 1):
        x = x.t()
    return layers.Layer(
        name,
        "lookup",
        ops.Lookup(),
        [x, entries],
        layers.reference("lookup", ops.Lookup(), [x, entries], x.shape),
        1,
        {},
    )


def mean(g: np.random.Generator, name: str, pick: Pick) -> layers.Layer:
    """Means and sums over any axes of tensors of any layout."""
    x = layers.bytes_of(g, pick(1, 2), pick(1, 5, 16, 33), pick(1, 3, 20), pick(1, 7, 17))
    x = pick(x, layers.channels_last(x), x.permute(3, 1, 0, 2))
    m, s = pool_multiplier(0.05, pick(0.05, 0.031))
    a = ops.Qreduce(pick(ReduceKind.mean, ReduceKind.sum), axes=pick((2, 3), (3,), (1,), (0, 2), (0, 1, 2, 3)), x_zero=int(g.integers(-128, 128)),
                    y_zero=-100, multiplier=m, shift=s, lo=-128, hi=pick(127, 40))  # fmt: skip
    shape = [1 if i in a.axes else n for i, n in enumerate(x.shape)]
    return layers.Layer(name, "qreduce", a, [x], layers.reference("qreduce", a, [x], shape), x.numel(), {})


def chunks(seed: int, count: int) -> list[layers.Layer]:
    """Random commands around the sizes at which these kernels change their ways: 16 channels, 48 and 132 sums, 64 numbers."""
    g = np.random.default_rng(seed)

    def pick(*options: Any) -> Any:
        return options[int(g.integers(len(options)))]

    out: list[layers.Layer] = []
    while len(out) < count:
        name, (lo, hi) = f"mve{len(out)}", pick((-128, 127), (-128, 127), (-30, 99))
        kind = pick(
            "conv", "conv", "depthwise", "depthwise", "wide", "matmul", "matmul", "average", "max", "binary", "table"
        )
        if kind == "conv":
            k, stride = pick(1, 1, 2, 3), pick(1, 1, 2)
            out.append(layers.conv(g, name, (pick(1, 3, 15, 16, 17, 32, 64), pick(1, 3, 6), pick(2, 5)), pick(2, 3, 16, 47, 48, 49, 50, 97), (k, k),
                                   stride, pad=[pick(0, k // 2)] * 2 if k < 3 else [1, 1], lo=lo, hi=hi, zero=int(g.integers(-128, 128)),
                                   batch=pick(1, 1, 2)))  # fmt: skip
        elif kind in ("depthwise", "wide"):
            c = pick(1, 2, 4, 8) if kind == "wide" else pick(5, 12, 15, 16, 17, 31, 48, 49, 63, 64, 100)
            k, stride = pick((3, 3), (3, 3), (1, 3), (5, 3), (2, 2)), 1 if kind == "wide" else pick(1, 2)
            if c == 1:
                continue  # not depthwise
            out.append(layers.conv(g, name, (c, pick(3, 6), pick(3, 5, 9, 17, 40) if kind == "wide" else pick(3, 5, 9)), c, k, stride, c,
                                   dilation=pick(1, 1, 1, 2), lo=lo, hi=hi, zero=int(g.integers(-128, 128))))  # fmt: skip
        elif kind == "matmul":
            k, n = (
                pick(1, 15, 16, 17, 63, 64, 65, 128, 192),
                pick(1, 2, 5, 6, 7, 47, 48, 50, 126, 131, 132, 133, 134, 260),
            )
            out.append(layers.fc(g, name, k, n, pick(1, 1, 2, 3), one=pick(False, True)))
        elif kind in ("average", "max"):
            make = layers.average if kind == "average" else layers.largest
            h, w = pick((3, 4), (20, 17), (7, 7))
            window = (h, w) if pick(0, 1) else (pick(1, 2, 3), pick(1, 2, 3))
            out.append(make(g, name, (h, w), window, pick(1, 2), channels=pick(1, 3, 15, 16, 17, 64)))
        else:
            out.append({"binary": binary, "table": table, "mean": mean}[kind](g, name, pick))
    return out


def real(seed: int, count: int) -> list[layers.Layer]:
    """Products of real numbers with packed weights and without, and the way between real and stored."""
    g = np.random.default_rng(seed)

    def pick(*options: Any) -> Any:
        return options[int(g.integers(len(options)))]

    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(g.standard_normal(shape).astype(np.float32))

    def product(op: str, a: Any, inputs: list[torch.Tensor | None], shape: tuple[int, ...]) -> None:
        name, w = f"real{len(out)}", inputs[1]
        assert w is not None
        want = layers.reference(op, a, inputs, shape, DType.f32)
        if op == "conv":
            a, want = replace(a, kernel=tuple(w.shape[2:])), layers.channels_last(want)
        if pick(0, 1, 1):
            packed = replace(a, packed=True)
            raw = records(attrs_struct(Op[op]), [attribute_row(packed)])
            if native.pack_bytes(int(Op[op]), raw, int(DType.f32), w.shape):
                a, inputs[1] = packed, torch.from_numpy(native.pack(int(Op[op]), raw, w).view(np.float32).copy())
        out.append(layers.Layer(name, op, a, [x for x in inputs if x is not None], want, want.numel(), {}))

    out: list[layers.Layer] = []
    while len(out) < count:
        act = pick({}, {"act": Act.clamp, "lo": 0.0, "hi": 6.0})
        kind = pick("matmul", "matmul", "conv", "conv", "quantize", "dequantize")
        if kind == "matmul":
            m, k, n = pick(1, 2, 3, 4, 7), pick(1, 5, 16, 70, 300), pick(3, 8, 16, 17, 33, 64)
            x = normal(k, m).t() if pick(0, 0, 1) else normal(m, k)
            product("matmul", ops.Matmul(**act), [x, normal(k, n), normal(n) if pick(0, 1) else None], (m, n))
        elif kind == "conv":
            c, o, k, groups = pick(1, 3, 8, 16), pick(1, 5, 16, 24), pick(1, 3), 1
            if pick(0, 0, 1):
                groups = o = c
            h, w, stride = pick(4, 7), pick(3, 9), pick(1, 2)
            size = tuple((v + 2 * (k // 2) - k) // stride + 1 for v in (h, w))
            a = ops.Conv(2, (stride,) * 2, (k // 2,) * 2, (1, 1), groups, **act)
            product(
                "conv",
                a,
                [layers.channels_last(normal(1, c, h, w)), normal(o, c // groups, k, k), normal(o)],
                (1, o, *size),
            )
        else:
            zero, scale = int(g.integers(-128, 128)), float(np.float32(pick(0.02, 1.0, 0.5, 1e-30)))
            a = ops.Requantize(x_zero=zero, y_zero=zero, scale=scale, lo=pick(-128, -20), hi=pick(127, 5))
            x, to = layers.bytes_of(g, 5, 33), DType.f32
            if kind == "quantize":
                x, to = normal(5, 33) * pick(1, 100, 1e30), DType.i8
                x[0, :6] = torch.tensor([np.nan, np.inf, -np.inf, 0.5, 1.5, -2.5])
            x = x.t() if pick(0, 1) else x
            out.append(
                layers.Layer(
                    f"real{len(out)}", "requantize", a, [x], layers.reference("requantize", a, [x], x.shape, to), 1, {}
                )
            )
    return out


def networks() -> dict[str, list[tuple[layers.Layer, float]]]:
    """Layers of the networks, and how often each occurs."""
    g = np.random.default_rng(3)
    made = 0

    def conv(
        c: int, size: int | tuple[int, int], cout: int, k: int | tuple[int, int], stride: int = 1, groups: int = 1
    ) -> layers.Layer:
        nonlocal made
        made += 1
        h, w = (size, size) if isinstance(size, int) else size
        kernel = (k, k) if isinstance(k, int) else k
        same: dict[str, Any] = (
            {} if stride == 1 else {"pad": [(n - 1) // 2 for n in kernel], "out": (-(-h // stride), -(-w // stride))}
        )
        if stride > 1 and isinstance(size, int):
            same["pad"] = (0, 0)  # as TensorFlow pads even sizes: behind
        return layers.conv(g, f"conv{made}", (c, h, w), cout, kernel, stride, groups, **same)

    def dw(c: int, size: int | tuple[int, int], stride: int = 1) -> layers.Layer:
        return conv(c, size, c, 3, stride, c)

    def pool(c: int, h: int, w: int) -> layers.Layer:
        return layers.average(g, f"average{c}-{h}", (h, w), (h, w), channels=c)

    mobile = [(conv(3, 96, 8, 3, 2), 1), (dw(8, 48), 1), (conv(8, 48, 16, 1), 1), (dw(16, 48, 2), 1), (conv(16, 24, 32, 1), 1),
              (dw(32, 24), 1), (conv(32, 24, 32, 1), 1), (dw(32, 24, 2), 1), (conv(32, 12, 64, 1), 1), (dw(64, 12), 1),
              (conv(64, 12, 64, 1), 1), (dw(64, 12, 2), 1), (conv(64, 6, 128, 1), 1), (dw(128, 6), 5), (conv(128, 6, 128, 1), 5),
              (dw(128, 6, 2), 1), (conv(128, 3, 256, 1), 1), (dw(256, 3), 1), (conv(256, 3, 256, 1), 1), (pool(256, 3, 3), 1),
              (layers.fc(g, "fc256", 256, 2), 1), (layers.softmax(g, "softmax2", 2), 1)]  # fmt: skip
    return {
        "dscnn": [(conv(1, (49, 10), 64, (10, 4), 2), 1), (dw(64, (25, 5)), 4), (conv(64, (25, 5), 64, 1), 4), (pool(64, 25, 5), 1),
                  (layers.fc(g, "fc64", 64, 12), 1), (layers.softmax(g, "softmax12", 12), 1)],
        "resnet": [(conv(3, 32, 16, 3), 1), (conv(16, 32, 16, 3), 2), (layers.add(g, "add"), 1.75), (conv(16, 32, 32, 3, 2), 1),
                   (conv(32, 16, 32, 3), 1), (conv(16, 32, 32, 1, 2), 1), (conv(32, 16, 64, 3, 2), 1), (conv(64, 8, 64, 3), 1),
                   (conv(32, 16, 64, 1, 2), 1), (pool(64, 8, 8), 1), (layers.fc(g, "fc64-10", 64, 10), 1),
                   (layers.softmax(g, "softmax10", 10), 1)],
        "mobile": mobile,
        "autoencoder": [(layers.fc(g, "fc640", 640, 128), 1), (layers.fc(g, "fc128", 128, 128), 6), (layers.fc(g, "fc128-8", 128, 8), 1),
                        (layers.fc(g, "fc8", 8, 128), 1), (layers.fc(g, "fc128-640", 128, 640), 1)],
    }  # fmt: skip


def measured(cases: list[layers.Layer], work: Path, opt: str) -> dict[str, layers.Result]:
    for tool in ("arm-none-eabi-gcc", "qemu-system-arm"):
        assert shutil.which(tool), (
            f"{tool} is missing: apt-get install gcc-arm-none-eabi picolibc-arm-none-eabi qemu-system-arm"
        )
    floats = {v.name for v in cases if v.op in ("matmul", "conv")}
    results = layers.run("m55", layers.build("m55", cases, work, opt))
    assert [v.name for v in cases if not results[v.name].ok] == []
    assert {n: r.stack for n, r in results.items() if r.stack > STACK and n not in floats} == {}
    return results


@dataclass
class Measured:
    single: list[layers.Layer]
    nets: dict[str, list[tuple[layers.Layer, float]]]
    results: dict[str, layers.Result]


@pytest.fixture(scope="module")
def m55(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """All cases in one image."""
    single, nets = layers.tiny(), networks()
    cases = [*real(8, 60), *single, *(v for net in nets.values() for v, _ in net), *chunks(5, 150), *layers.odd(11, 60)]
    return Measured(single, nets, measured(cases, tmp_path_factory.mktemp("m55"), "-O2"))


def test_instructions(m55: Measured) -> None:
    each = {v.name: m55.results[v.name].instructions / v.work for v in m55.single}
    bars = {v.name: v.peers["m55"] * (v.want.numel() if v.op == "qsoftmax" else 1) for v in m55.single}
    assert {n: (each[n], bars[n]) for n in each if each[n] > bars[n]} == {}


@pytest.mark.parametrize("name", NETWORKS)
def test_network(name: str, m55: Measured) -> None:
    total = sum(m55.results[v.name].instructions * times for v, times in m55.nets[name])
    print(f"{name}: {total:,.0f} instructions, {total / NETWORKS[name]:.2f} of CMSIS-NN's")
    assert total <= 0.8 * NETWORKS[name]


def test_small(tmp_path: Path) -> None:
    """Assembly fits into functions that are compiled for size, too."""
    measured(chunks(6, 60), tmp_path, "-Os")
