"""Generated CUDA kernels: the logic on the CPU, against the reference kernels; and their compilation by NVRTC for every architecture."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from shimtools import Module

import trivet
from trivet.cuda import nvrtc
from trivet.cuda.code import Code
from trivet.cuda.nodes import OPS, compile_node
from trivet.fbs.structs import Act, DType, RnnKind
from trivet.ir import ops
from trivet.ir.graph import Node, Placement, Value
from trivet.ir.types import Type

TESTS = Path(__file__).resolve().parents[2]
ARCHS = (72, 87, 110, 121)  # one below and one above each change of the code, and both compilers


def value(name: str, t: torch.Tensor, dtype: DType) -> Value:
    v = Value(name, Type(dtype, tuple(t.shape)))
    v.placement = Placement(v, 0, t.stride())
    return v


def run_node(
    op: str, attrs: Any, inputs: list[torch.Tensor | None], out: torch.Tensor, tf32: bool = False
) -> torch.Tensor:
    """One node on the CPU; out gives shape and dtype."""
    from trivet.ir.interop import dtype_of

    values = [None if t is None else value(f"x{i}", t, dtype_of(t)) for i, t in enumerate(inputs)]
    node = Node(op, values, [value("y", out, dtype_of(out))], attrs)
    memory: dict[Any, torch.Tensor] = {
        v: t for v, t in zip(values, inputs, strict=True) if v is not None and t is not None
    }
    memory[node.outputs[0]] = out
    for i, size in enumerate(OPS[op].scratch(node)):
        tmp = torch.full((int(size),), 0xAA, dtype=torch.uint8)  # type: ignore[call-overload]
        v = value(f"t{i}", tmp, DType.u8)
        node.tmp.append(v)
        memory[v] = tmp
    code = Code({}, tf32=tf32)
    compile_node(code, node, 0)
    module = Module(code.source(), sanitize=False)
    for launch in code.launches:
        module.run(launch, lambda v: memory[v].data_ptr(), {})
    return out


SHAPES = [(1, 70, 40, 136), (2, 129, 130, 72), (1, 5, 33, 520), (3, 64, 64, 32), (1, 300, 300, 24), (1, 1, 96, 64)]


@pytest.mark.parametrize("kind", ["f16", "bf16", "tf32", "f32", "f64"])
def test_products(kind: str) -> None:
    """All tile shapes, both orders of each operand, batches, sums in pieces, against float64."""
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16, "f64": torch.float64}.get(kind, torch.float32)
    tolerance = {"f16": 2e-3, "bf16": 1.6e-2, "tf32": 2e-3, "f32": 1e-5, "f64": 1e-12}[kind]
    for n, (batch, M, N, K) in enumerate(SHAPES):
        g = torch.Generator().manual_seed(n)
        a, b = (torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in ((batch, M, K), (batch, K, N)))
        a = a.mT.contiguous().mT if n % 3 == 1 else a
        b = b.mT.contiguous().mT if n % 2 == 0 else b
        bias = torch.randn(N, generator=g, dtype=torch.float64).to(dtype)
        got = run_node(
            "matmul",
            ops.Matmul(act=Act.clamp, lo=-4.0, hi=float("inf")),
            [a, b, bias],
            torch.empty(batch, M, N, dtype=dtype),
            kind == "tf32",
        )
        want = (a.double() @ b.double() + bias.double()).clamp(min=-4.0)
        error = float((got.double() - want).abs().max() / want.abs().max())
        assert error < tolerance, (kind, batch, M, N, K, error)


@pytest.mark.parametrize("kind", ["f16", "f32"])
def test_convolutions(kind: str) -> None:
    """Implicit products: strides, padding, groups, transposed, 1x1 that reads whole vectors, many channels over few pixels."""
    dtype = torch.float16 if kind == "f16" else torch.float32
    cases = [(3, 40, 3, 2, 1, 1, 1, False, 17), (32, 64, 1, 1, 0, 1, 1, False, 8), (24, 48, 3, 1, 2, 2, 2, False, 9), (96, 40, 3, 1, 1, 1, 1, False, 5),
             (8, 24, 3, 2, 1, 1, 1, True, 6), (16, 16, 3, 1, 1, 1, 16, False, 7)]  # fmt: skip
    for n, (c, o, q, stride, pad, dilation, groups, transposed, size) in enumerate(cases):
        g = torch.Generator().manual_seed(n)
        x = torch.randn(2, c, size, size, generator=g).to(dtype)
        w = torch.randn((c, o // groups, q, q) if transposed else (o, c // groups, q, q), generator=g).to(dtype)
        bias = torch.randn(o, generator=g).to(dtype)
        f = torch.nn.functional.conv_transpose2d if transposed else torch.nn.functional.conv2d
        more = {"output_padding": stride - 1} if transposed else {}
        want = f(
            x.double(), w.double(), bias.double(), stride=stride, padding=pad, dilation=dilation, groups=groups, **more
        )
        attrs = ops.Conv(2, (stride,) * 2, (pad,) * 2, (dilation,) * 2, groups, transposed)
        got = run_node("conv", attrs, [x, w, bias], torch.empty(want.shape, dtype=dtype))
        error = float((got.double() - want).abs().max() / want.abs().max())
        assert error < (2e-3 if kind == "f16" else 1e-5), (n, error)


def test_misuse_is_seen() -> None:
    """The shim itself: a barrier that not all threads reach, and a read past shared memory, end the process with a reason."""
    wrong = {
        "barrier": "if (threadIdx.x < 7) __syncthreads();",
        "lanes": "if (threadIdx.x % 32 < 7) ((float*)w[0])[0] = __shfl_sync(0xFFFFFFFFu, 1.0f, 0);",
    }
    for name, body in wrong.items():
        source = f"{Code({}).source()}\nTRV_KERNEL(k0, 1, 64) {{ TRV_ARGS; (void)w; {body} }}"
        script = (f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from shimtools import Module; from trivet.cuda.code import Launch; "
                  f"Module({source!r}).run(Launch('k0', (1, 1, 1), 64, (('dim', 0),), 0), int, {{}})")  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": "sdk"},
            cwd=TESTS.parent,
        )
        assert done.returncode < 0 and "cuda shim: kernel k0" in done.stderr, (name, done.stderr[-500:])


# ---- NVRTC
@pytest.mark.parametrize("arch", ARCHS)
def test_compiles(arch: int) -> None:
    """One of each kind of kernel, as machine code."""
    if nvrtc.library(nvrtc.version_for(arch)) is None:
        assert not os.environ.get("CI"), "NVRTC is missing: pip install trivet[cuda]"
        pytest.skip("NVRTC is not installed")
    image = nvrtc.compile(every_kind().source(), arch, nvrtc.CUBIN)
    assert image.data[:4] == b"\x7fELF"


def every_kind() -> Code:
    """Kernels of all templates."""
    code = Code({})

    def add(op: str, attrs: Any, *shapes: Any, out: Any, outs: int = 1) -> None:
        def one(name: str, s: Any) -> Value:
            dtype, shape = s
            return value(name, torch.empty(shape, device="meta"), dtype)

        inputs = [None if s is None else one(f"x{i}", s) for i, s in enumerate(shapes)]
        node = Node(op, inputs, [one(f"y{i}", o) for i, o in enumerate(out if outs > 1 else [out])], attrs)
        node.tmp = [one(f"t{i}", (DType.u8, (int(s),))) for i, s in enumerate(OPS[op].scratch(node))]  # type: ignore[call-overload]
        compile_node(code, node, 0)

    for t in (DType.f16, DType.bf16, DType.f32):
        add("matmul", ops.Matmul(act=Act.gelu), (t, (512, 256)), (t, (256, 512)), (t, (512,)), out=(t, (512, 512)))
        add("matmul", ops.Matmul(), (t, (32, 1024)), (t, (1024, 64)), out=(t, (32, 64)))
        add(
            "conv",
            ops.Conv(2, (1, 1), (1, 1), (1, 1)),
            (t, (1, 16, 32, 32)),
            (t, (32, 16, 3, 3)),
            out=(t, (1, 32, 32, 32)),
        )
        add("attention", ops.Attention(0.125), *[(t, (1, 4, 64, 64))] * 3, out=(t, (1, 4, 64, 64)))
        add("softmax", ops.Softmax(1), (t, (64, 2000)), out=(t, (64, 2000)))
    q = ops.Qconv(2, (1, 1), (1, 1), (1, 1), x_zero=3, lo=-128, hi=127)
    add(
        "qconv",
        q,
        (DType.i8, (1, 32, 16, 16)),
        (DType.i8, (32, 32, 3, 3)),
        (DType.i32, (2, 32)),
        (DType.i32, (32,)),
        out=(DType.i8, (1, 32, 16, 16)),
    )
    add("rnn", ops.Rnn(RnnKind.lstm), (DType.f32, (5, 2, 16)), (DType.f32, (128, 16)), (DType.f32, (128, 32)), out=[(DType.f32, (5, 2, 32)),
        (DType.f32, (2, 32)), (DType.f32, (2, 32))], outs=3)  # fmt: skip
    add("sort", ops.Sort(0), (DType.f32, (500,)), out=[(DType.f32, (500,)), (DType.i64, (500,))], outs=2)
    return code


def test_missing_compiler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "library", lambda major: None)
    with pytest.raises(trivet.Error, match=r"needs NVRTC 1[23]") as e:
        nvrtc.compile("", 87, nvrtc.CUBIN)
    assert "trivet[cuda]" in str(e.value)
