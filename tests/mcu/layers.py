"""Commands one by one on emulated microcontrollers: their results against the reference evaluator, and instructions.

    python tests/mcu/layers.py [cores..]     prints the table beside the figures of CMSIS-NN

Layers are those of the MLPerf-Tiny networks. PEERS holds what CMSIS-NN (snapshot 99f736a, GCC 12.2 -O3, on M55 the better of GCC
and clang 19) needs for the same layer, measured the same way: instructions for each product, or for each input element.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trivet import native
from trivet.fbs.structs import Act, BinaryKind, DType, Op, PoolKind, ReduceKind
from trivet.fixed_point import binary_multipliers, pool_multiplier, softmax_table
from trivet.ir import ops
from trivet.ir.evaluate import evaluate_node
from trivet.ir.graph import Node, Value
from trivet.ir.interop import dtype_of
from trivet.ir.types import Type
from trivet.passes.pack_rows import conv_rows, matmul_rows, whole_bias, whole_scale
from trivet.targets.cpu_part import attribute_row
from trivet.writer import attrs_struct, records

ROOT = Path(__file__).resolve().parents[2]
CPU = ROOT / "hal/cpu"
INCLUDES = [f"-I{ROOT / d}" for d in ("hal/include", "schema/gen", "hal/cpu")]
SOURCES = ["mcu_*.c", "qpool.c", "average.c", "pool.c", "qreduce.c", "qsoftmax.c", "binary.c", "blocks.c",
           "lookup.c", "requantize.c", "gemm.c", "convert.c", "reduce.c", "rows.c"]  # fmt: skip
FLOATS = [
    "matmul*.c",
    "conv*.c",
    "gemm_ref.c",
    "gemm_mve.c",
    "pack.c",
    "qpack.c",
    "qweight.c",
    "qconv.c",
]  # what matmul and conv need, too


@dataclass(frozen=True)
class Core:
    """How code for a core is built and where it runs. M0's runs on the M3's board: what it has not is never emitted."""

    flags: tuple[str, ...]
    machine: str
    flash: int = 0
    ram: int = 0x20000000
    size: int = 0x400000
    cases: int = 0  # a memory for the cases, where flash is too small


CORES = {
    "m0": Core(("-mcpu=cortex-m0", "-mfloat-abi=soft"), "mps2-an385"),
    "m3": Core(("-mcpu=cortex-m3", "-mfloat-abi=soft"), "mps2-an385"),
    "m4": Core(("-mcpu=cortex-m4", "-mfloat-abi=hard", "-mfpu=fpv4-sp-d16"), "mps2-an386"),
    "m7": Core(("-mcpu=cortex-m7", "-mfloat-abi=hard", "-mfpu=fpv5-d16"), "mps2-an500"),
    "m33": Core(("-mcpu=cortex-m33", "-mfloat-abi=hard"), "mps2-an505", 0x10000000, 0x38000000),
    "m55": Core(("-mcpu=cortex-m55", "-mfloat-abi=hard"), "mps3-an547", 0, 0x20000000, 0x80000, 0x60000000),
}


@dataclass
class Layer:
    """A command. work: products, or input elements. peers: what CMSIS-NN needs for each, by core."""

    name: str
    op: str
    attrs: Any
    inputs: list[torch.Tensor]
    want: torch.Tensor
    work: int
    peers: dict[str, float]
    tmp: int = 0


def reference(op: str, attrs: Any, inputs: Sequence[torch.Tensor | None], shape: Sequence[int],
              dtype: DType = DType.i8) -> torch.Tensor:  # fmt: skip
    """The reference evaluator's result."""
    ins = [None if x is None else Value(f"x{i}", Type(dtype_of(x), tuple(x.shape))) for i, x in enumerate(inputs)]
    out = Value("y", Type(dtype, tuple(shape)))
    node = Node(op, ins, [out], attrs)  # type: ignore[arg-type]
    out.node, out.index = node, 0
    return evaluate_node(node, list(inputs), {})[0]


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """The same values, channels innermost."""
    order = [0, *range(2, x.dim()), 1]
    back = [order.index(i) for i in range(x.dim())]
    return x.permute(order).contiguous().permute(back)


def bytes_of(rng: np.random.Generator, *shape: int, lo: int = -128) -> torch.Tensor:
    return torch.from_numpy(rng.integers(lo, 128, shape).astype(np.int8))


def scale_of(rng: np.random.Generator, n: int, terms: int) -> torch.Tensor:
    """Multipliers and shifts that bring sums of so many products to about +-100."""
    m = rng.integers(1 << 30, 1 << 31, n)
    s = np.full(n, round(31 + np.log2(np.sqrt(terms) * 5400 / 60)))
    return torch.from_numpy(np.stack([m, s]).astype(np.int32))


def conv(rng: np.random.Generator, name: str, x: Sequence[int], cout: int, kernel: Sequence[int], stride: int = 1,
         groups: int = 1, pad: Sequence[int] | None = None, out: Sequence[int] | None = None, *, lo: int = -128, hi: int = 127,
         dilation: int = 1, zero: int = -11, last: bool = True, batch: int = 1, peers: dict[str, float] | None = None) -> Layer:  # fmt: skip
    """x: channels and sizes. Padded as 'same' unless pad says otherwise; out: spatial sizes, where they do not follow."""
    c, *space = x
    pad = [(k - 1) * dilation // 2 for k in kernel] if pad is None else list(pad)
    if out is None:
        out = [(n + 2 * p - dilation * (k - 1) - 1) // stride + 1 for n, p, k in zip(space, pad, kernel, strict=True)]
    nd = len(kernel)
    data = bytes_of(rng, batch, c, *space)
    data = channels_last(data) if last else data
    w = bytes_of(rng, cout, c // groups, *kernel, lo=-127)
    taps = int(np.prod(kernel)) * c // groups
    scale = scale_of(rng, cout, taps)
    bias = torch.from_numpy(rng.integers(-(1 << 14), 1 << 14, cout).astype(np.int32))
    a = ops.Qconv(
        nd, (stride,) * nd, tuple(pad), (dilation,) * nd, groups, act=Act.none, lo=lo, hi=hi, x_zero=zero, y_zero=3
    )
    want = channels_last(reference("qconv", a, [data, w, scale, bias], (batch, cout, *out)))
    a = replace(a, packed=2, kernel=tuple(kernel))
    inputs = [data, conv_rows(a, w), whole_scale(scale, cout), whole_bias(w, 0, zero, bias)]
    tmp = native.mcu_conv_tmp_bytes(records("QconvAttrs", [attribute_row(a)]), c)
    return Layer(name, "qconv", a, inputs, want, batch * int(np.prod(out)) * cout * taps, peers or {}, tmp)


def fc(rng: np.random.Generator, name: str, k: int, n: int, rows: int = 1, *, one: bool = False, real: bool = False,
       peers: dict[str, float] | None = None) -> Layer:  # fmt: skip
    x, w = bytes_of(rng, rows, k), bytes_of(rng, k, n, lo=-127)
    scale = scale_of(rng, 1 if one else n, k)
    scale = torch.from_numpy(rng.uniform(1e-4, 2e-4, scale.shape[1]).astype(np.float32)) if real else scale
    bias = torch.from_numpy(rng.integers(-(1 << 14), 1 << 14, n).astype(np.int32))
    a = ops.Qmatmul(a_zero=-7, y_zero=-3, lo=-128, hi=127)
    want = reference("qmatmul", a, [x, w, scale, bias], (rows, n), DType.f32 if real else DType.i8)
    a = replace(a, packed=2)
    inputs = [x, matmul_rows(w), whole_scale(scale, n), whole_bias(w, 1, -7, bias)]
    return Layer(
        name, "qmatmul", a, inputs, want, rows * k * n, peers or {}, 0 if real else native.mcu_matmul_tmp_bytes(rows, k)
    )


def add(rng: np.random.Generator, name: str, size: int = 32, peers: dict[str, float] | None = None) -> Layer:
    a, b = (channels_last(bytes_of(rng, 1, 16, size, size)) for _ in range(2))
    am, bm, shift = binary_multipliers(BinaryKind.add, 0.043, 0.061, 0.07)
    attrs = ops.Binary(
        BinaryKind.add, a_zero=-5, b_zero=9, y_zero=-20, a_multiplier=am, b_multiplier=bm, shift=shift, lo=-128, hi=127
    )
    want = channels_last(reference("binary", attrs, [a, b], a.shape))
    return Layer(name, "binary", attrs, [a, b], want, a.numel(), peers or {})


def average(rng: np.random.Generator, name: str, space: Sequence[int], kernel: Sequence[int], stride: int = 1,
            pad: int = 0, channels: int = 64, peers: dict[str, float] | None = None) -> Layer:  # fmt: skip
    x = channels_last(bytes_of(rng, 1, channels, *space))
    m, s = pool_multiplier(0.05, 0.031)
    a = ops.Qpool(nd=2, kernel=tuple(kernel), stride=(stride,) * 2, pad=(pad,) * 2, dilation=(1, 1), count_include_pad=False,
                  x_zero=-128, y_zero=-100, multiplier=m, shift=s, lo=-128, hi=127)  # fmt: skip
    out = [(n + 2 * pad - k) // stride + 1 for n, k in zip(space, kernel, strict=True)]
    want = channels_last(reference("qpool", a, [x], (1, channels, *out)))
    return Layer(name, "qpool", a, [x], want, x.numel(), peers or {})


def largest(rng: np.random.Generator, name: str, space: Sequence[int], kernel: Sequence[int], stride: int = 1, pad: int = 0,
            channels: int = 64) -> Layer:  # fmt: skip
    x = channels_last(bytes_of(rng, 1, channels, *space))
    a = ops.Pool(kind=PoolKind.max, nd=2, kernel=tuple(kernel), stride=(stride,) * 2, pad=(pad,) * 2, dilation=(1, 1))
    out = [(n + 2 * pad - k) // stride + 1 for n, k in zip(space, kernel, strict=True)]
    want = channels_last(reference("pool", a, [x], (1, channels, *out)))
    return Layer(name, "pool", a, [x], want, x.numel(), {})


def mean(rng: np.random.Generator, name: str, space: Sequence[int], axes: Sequence[int] = (2, 3), channels: int = 64,
         kind: ReduceKind = ReduceKind.mean, peers: dict[str, float] | None = None) -> Layer:  # fmt: skip
    x = channels_last(bytes_of(rng, 1, channels, *space))
    m, s = pool_multiplier(0.05, 0.031 if kind == ReduceKind.mean else 2.0)
    a = ops.Qreduce(kind, axes=tuple(axes), x_zero=-128, y_zero=-100, multiplier=m, shift=s, lo=-128, hi=127)
    shape = [1 if i in axes else n for i, n in enumerate(x.shape)]
    return Layer(name, "qreduce", a, [x], channels_last(reference("qreduce", a, [x], shape)), x.numel(), peers or {})


def softmax(rng: np.random.Generator, name: str, n: int, rows: int = 1, peers: dict[str, float] | None = None) -> Layer:
    x, table = bytes_of(rng, rows, n), torch.from_numpy(softmax_table(0.07))
    a = ops.Qsoftmax(axis=1, y_zero=-128, lo=-128, hi=127)
    return Layer(name, "qsoftmax", a, [x, table], reference("qsoftmax", a, [x, table], x.shape), 1, peers or {})


def _p(m55: float, m4: float, m3: float, m0: float) -> dict[str, float]:
    return {"m55": m55, "m4": m4, "m3": m3, "m0": m0}


def tiny() -> list[Layer]:
    """The layers of the MLPerf-Tiny networks that MCU figures are known of."""
    g = np.random.default_rng(1)
    return [
        conv(g, "dscnn-conv", (1, 49, 10), 64, (10, 4), 2, pad=(4, 1), out=(25, 5), peers=_p(0.90, 3.37, 4.15, 9.33)),
        conv(g, "dscnn-dw", (64, 25, 5), 64, (3, 3), groups=64, peers=_p(2.32, 8.33, 9.37, 33.9)),
        conv(g, "dscnn-1x1", (64, 25, 5), 64, (1, 1), peers=_p(0.40, 2.09, 3.11, 7.57)),
        conv(g, "resnet-3-16", (3, 32, 32), 16, (3, 3), peers=_p(1.36, 4.80, 5.42, 11.6)),
        conv(g, "resnet-16", (16, 32, 32), 16, (3, 3), peers=_p(0.39, 2.50, 3.50, 7.76)),
        conv(g, "resnet-32", (32, 16, 16), 32, (3, 3), peers=_p(0.25, 2.02, 2.96, 6.83)),
        conv(g, "resnet-64", (64, 8, 8), 64, (3, 3), peers=_p(0.21, 1.81, 2.72, 6.40)),
        conv(g, "resnet-1x1-s2", (16, 32, 32), 32, (1, 1), 2, peers=_p(1.08, 4.29, 5.11, 12.6)),
        conv(g, "mobile-conv", (3, 96, 96), 8, (3, 3), 2, pad=(0, 0), out=(48, 48), peers=_p(1.99, 6.11, 6.81, 13.5)),
        conv(g, "mobile-dw-8", (8, 48, 48), 8, (3, 3), groups=8, peers=_p(5.21, 9.95, 10.8, 38.1)),
        conv(g, "mobile-1x1-8", (8, 48, 48), 16, (1, 1), peers=_p(2.18, 6.63, 7.08, 18.3)),
        conv(g, "mobile-1x1-128", (128, 6, 6), 128, (1, 1), peers=_p(0.28, 1.83, 2.88, 6.88)),
        conv(g, "mobile-dw-128", (128, 6, 6), 128, (3, 3), groups=128, peers=_p(2.32, 8.08, 8.98, 32.4)),
        fc(g, "fc-640", 640, 128, peers=_p(0.175, 1.95, 3.44, 6.18)),
        fc(g, "fc-128", 128, 128, peers=_p(0.58, 2.27, 3.67, 6.80)),
        add(g, "add", peers=_p(8.3, 81.2, 84.0, 237)),
        average(g, "average", (25, 5), (25, 5), peers=_p(1.17, 6.38, 13.4, 22.4)),
        mean(g, "mean", (25, 5), peers=_p(1.17, 6.38, 13.4, 22.4)),
        softmax(g, "softmax", 12, peers=_p(99, 530, 527, 1973)),
    ]  # fmt: skip


def odd(seed: int, count: int) -> list[Layer]:
    """Random commands: any sizes, strides, pads, dilations, groups, layouts, bounds."""
    g = np.random.default_rng(seed)

    def pick(*options: Any) -> Any:
        return options[int(g.integers(len(options)))]

    out: list[Layer] = []
    while len(out) < count:
        name = f"odd{seed}-{len(out)}"
        kind = pick(
            "conv", "conv", "conv", "depthwise", "depthwise", "matmul", "average", "max", "mean", "softmax", "add"
        )
        lo, hi = pick((-128, 127), (-128, 127), (-20, 127), (-128, 60), (3, 3))
        if kind in ("conv", "depthwise"):
            nd = pick(1, 2, 2, 2, 3)
            kernel = [pick(1, 1, 2, 3, 3, 5)] * nd if pick(0, 1) else [pick(1, 2, 3) for _ in range(nd)]
            stride, dilation = pick(1, 1, 2, 3), pick(1, 1, 2)
            groups = pick(1, 1, 2, 3) if kind == "conv" else pick(3, 8, 13)
            cin = groups * (pick(1, 2, 3, 4, 7, 8, 17) if kind == "conv" else 1)
            cout = groups * (pick(1, 2, 3, 5, 8) if kind == "conv" else pick(1, 1, 1, 2))
            space = [pick(1, 4, 5, 7, 9) for _ in range(nd)]
            pad = [pick(0, 0, 1, 2) for _ in range(nd)]
            if any(n + 2 * p < dilation * (k - 1) + 1 for n, p, k in zip(space, pad, kernel, strict=True)):
                continue
            out.append(conv(g, name, (cin, *space), cout, kernel, stride, groups, pad, lo=lo, hi=hi, dilation=dilation,
                            zero=int(g.integers(-128, 128)), last=cin == groups or bool(pick(0, 1, 1)), batch=pick(1, 1, 2)))  # fmt: skip
        elif kind == "matmul":
            out.append(
                fc(
                    g,
                    name,
                    pick(1, 3, 4, 8, 13, 40, 67),
                    pick(1, 2, 3, 4, 7, 9),
                    pick(1, 1, 2, 3, 5),
                    one=bool(pick(0, 1)),
                    real=pick(0, 0, 1) == 1,
                )
            )
        elif kind in ("average", "max"):
            k, pad = pick(1, 2, 3), pick(0, 0, 1)
            if pad > k // 2:
                continue
            make = average if kind == "average" else largest
            out.append(make(g, name, (pick(3, 5, 8), pick(3, 4, 6)), (k, k), pick(1, 2), pad, pick(1, 3, 4, 8, 10)))
        elif kind == "mean":
            out.append(mean(g, name, (pick(1, 5, 8), pick(3, 4)), pick((2, 3), (1,), (0, 2), (1, 2, 3)), pick(1, 3, 4, 10),
                            pick(ReduceKind.mean, ReduceKind.sum)))  # fmt: skip
        elif kind == "softmax":
            out.append(softmax(g, name, pick(1, 2, 10, 255, 300), pick(1, 3)))
        else:
            out.append(add(g, name, pick(3, 16)))
    return out


# ---- the file of cases -----------------------------------------------------------------------------------------------------
class _File:
    def __init__(self, words: int) -> None:
        self.data = bytearray(-(-words * 4 // 16) * 16)

    def put(self, raw: bytes) -> int:
        at = len(self.data)
        self.data += raw + bytes(-len(raw) % 16)
        return at


def _storage(x: torch.Tensor) -> bytes:
    """What lies in memory, first element first (strides are not negative)."""
    return bytes(x.untyped_storage())[x.storage_offset() * x.element_size() :]


def case_file(layers: Sequence[Layer]) -> bytes:
    """The cases as layers.c reads them."""
    words = 1 + sum(8 + 14 * (len(v.inputs) + 1 + bool(v.tmp)) for v in layers)
    file = _File(words)
    rows: list[int] = [len(layers)]
    for v in layers:
        attrs = records(attrs_struct(Op[v.op]), [attribute_row(v.attrs)]).tobytes()
        want = _storage(v.want)
        rows += [int(Op[v.op]), len(v.inputs), 1, int(bool(v.tmp)), file.put(attrs), file.put(v.name.encode() + b"\0"),
                 file.put(want), len(want)]  # fmt: skip
        for x, raw in [*((x, _storage(x)) for x in v.inputs), (v.want, b"")]:
            pad = [0] * (5 - x.dim())
            rows += [
                int(dtype_of(x)),
                x.dim(),
                *x.shape,
                *pad,
                *x.stride(),
                *pad,
                len(_storage(x)),
                file.put(raw) if raw else 0,
            ]
        if v.tmp:
            rows += [int(DType.u8), 1, v.tmp, 0, 0, 0, 0, 1, 0, 0, 0, 0, v.tmp, 0]
    assert len(rows) == words
    file.data[: 4 * words] = np.array(rows, np.int64).astype("<u4").tobytes()
    return bytes(file.data)


# ---- building and running --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Result:
    """ok: the result is the reference's. instructions: to one tick, of about 40. stack: bytes that the kernel used at most."""

    ok: bool
    instructions: float
    stack: int


def build(
    core: str, layers: Sequence[Layer], work: Path, opt: str = "-O2", compiler: str = "arm-none-eabi-gcc"
) -> Path:
    """An image with the cases, for one core."""
    c = CORES[core]
    work.mkdir(parents=True, exist_ok=True)
    (work / "cases.bin").write_bytes(case_file(layers))
    (work / "cases.S").write_text(
        f'.section {".cases" if c.cases else ".rodata"}, "a"\n.balign 16\n.global cases\ncases: .incbin "{work / "cases.bin"}"\n'
    )
    real = any(v.op in ("matmul", "conv") for v in layers)
    sources = sorted({p for pattern in SOURCES + (FLOATS if real else []) for p in CPU.glob(pattern)})
    where = [f"-Wl,--defsym=__{k}={v:#x}" for k, v in (("flash", c.flash), ("flash_size", c.size), ("ram", c.ram), ("ram_size", c.size),
                                                      ("stack_size", 0x4000))]  # fmt: skip
    if c.cases:
        where.append(f"-Wl,--section-start=.cases={c.cases:#x}")
    exe = work / f"{core}.elf"
    subprocess.run([compiler, "-mthumb", *c.flags, "-std=c11", opt, "-Wall", "-Wextra", "-Werror", "-ffunction-sections", "-fdata-sections",
                    "-DTRV_NO_TEXT", *(["-DLAYERS_FLOAT"] if real else []), "--specs=picolibc.specs", "--oslib=semihost", "--crt0=hosted", *INCLUDES,
                    ROOT / "tests/mcu/layers.c", work / "cases.S", *sources, "-Wl,--gc-sections", *where, "-lm", "-o", exe],
                   check=True)  # fmt: skip
    return exe


def run(core: str, exe: Path) -> dict[str, Result]:
    """Runs an image; by name of the layer."""
    done = subprocess.run(["qemu-system-arm", "-M", CORES[core].machine, "-nographic", "-monitor", "none", "-serial", "none",
                           "-icount", "shift=0", "-semihosting-config", "enable=on,target=native", "-kernel", exe],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False)  # fmt: skip
    first, *lines = done.stdout.splitlines() or [""]
    assert first.startswith("tick "), done.stdout
    tick = int(first.split()[1]) / 100
    out = {}
    for line in lines:
        name, *rest = line.split()
        if line.startswith(" ") or rest[0] == "refused":
            print(line)
            if not line.startswith(" "):
                out[name] = Result(False, 0, 0)
            continue
        out[name] = Result(rest[2] == "ok", int(rest[0]) * tick / 32, int(rest[1]))
    return out


def main() -> None:
    layers = tiny()
    cores = sys.argv[1:] or ["m0", "m3", "m4"]
    work = Path("/tmp") / "trivet-layers"
    results = {c: run(c, build(c, layers, work / c)) for c in cores}
    print(f"{'layer':16}{'products':>10}" + "".join(f"{c:>8}{'CMSIS':>7}{'ratio':>7}{'stack':>6}" for c in cores))
    for v in layers:
        row = f"{v.name:16}{v.work:10}"
        for c in cores:
            r, peer = results[c].get(v.name, Result(False, 0, 0)), v.peers.get(c, float("nan"))
            each = r.instructions / v.work
            row += f"{each:8.3g}{peer:7.3g}{each / peer:7.2f}{r.stack:6}" + ("" if r.ok else " WRONG")
        print(row)


if __name__ == "__main__":
    if shutil.which("qemu-system-arm") is None:
        sys.exit("qemu-system-arm is missing: apt-get install qemu-system-arm gcc-arm-none-eabi picolibc-arm-none-eabi")
    main()
