"""The importer's handlers for quantise and dequantise operators: types, values, and what stays a map."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchao.quantization  # noqa: F401  defines torchao's operators
from qdq_net import QD, Net, Weight, fq, lower, sqnr
from torch.nn import functional as F

import trivet
import trivet.quantize.blocks  # noqa: F401  defines trivet::dequantize
from trivet.error import Error
from trivet.fbs.structs import DType
from trivet.frontend import capture
from trivet.ir.evaluate import evaluate
from trivet.ir.graph import Graph

AO = torch.ops.torchao


def graph(net: torch.nn.Module, *xs: torch.Tensor) -> Graph:
    return capture({"forward": (net.eval(), xs)}).entries["forward"]


def same(net: torch.nn.Module, *xs: torch.Tensor, db: float = float("inf")) -> Graph:
    """The captured graph computes what torch does."""
    g = graph(net, *xs)
    want = net(*xs)
    got = evaluate(g, list(xs))
    for w, v in zip(want if isinstance(want, tuple) else (want,), got, strict=True):
        assert w.dtype == v.dtype and w.shape == v.shape
        assert sqnr(w, v) >= db
    return g


def kinds(g: Graph) -> list[str]:
    """Operators that results need."""
    need, todo = set(), list(g.outputs)
    while todo:
        n = todo.pop().node
        if n is not None and n not in need:
            need.add(n)
            todo += [v for v in n.inputs if v is not None]
    return [n.op for n in g.nodes if n in need]


# ---- per tensor
@pytest.mark.parametrize(("dtype", "lo", "hi", "zero"), [
    (torch.int8, -128, 127, 3), (torch.int8, -127, 127, 0), (torch.uint8, 0, 255, 140), (torch.uint8, 0, 127, 20),
    (torch.int16, -32768, 32767, 0)])  # fmt: skip
def test_static(dtype: torch.dtype, lo: int, hi: int, zero: int) -> None:
    x = torch.randn(3, 40)
    g = same(Net(lambda m, x: fq(x, 0.02, zero, lo, hi, dtype)), x)
    (q, dq) = (n for n in g.nodes if n.op == "requantize")
    kind = q.outputs[0].type
    assert kind.dtype == (DType.i16 if dtype == torch.int16 else DType.i8)
    assert kind.quant is not None and kind.quant.zero == (zero - 128 if dtype == torch.uint8 else zero)
    whole = hi - lo in (255, 65535)
    assert (kind.quant.lo is None and kind.quant.hi is None) == whole
    assert kinds(g) == ["requantize", "requantize"] and dq.inputs[0] is q.outputs[0]


def test_scales_in_tensors_and_halves() -> None:
    def net(m: Net, x: torch.Tensor) -> torch.Tensor:
        q = QD.quantize_per_tensor.tensor(x.half(), m.s.reshape(()), m.z, 0, 255, torch.uint8)
        return QD.dequantize_per_tensor.tensor(q, m.s.reshape(()), m.z, 0, 255, torch.uint8, out_dtype=torch.float16)

    g = same(Net(net, s=torch.tensor([0.03]), z=torch.tensor(7)), torch.randn(4, 9), db=60)
    assert "requantize" in kinds(g)

    def net2(m: Net, x: torch.Tensor) -> torch.Tensor:
        q = QD.quantize_per_tensor.tensor2(x, m.s, m.z, m.lo, m.hi, torch.int8)
        return QD.dequantize_per_tensor.tensor2(q, m.s, m.z, m.lo, m.hi, torch.int8)

    parts = {"s": torch.tensor(0.03), "z": torch.tensor(7), "lo": torch.tensor(-100), "hi": torch.tensor(90)}
    g = same(Net(net2, **parts), torch.randn(4, 9) * 3)
    (q, _) = (n for n in g.nodes if n.op == "requantize")
    assert q.outputs[0].type.quant is not None and (q.outputs[0].type.quant.lo, q.outputs[0].type.quant.hi) == (
        -100,
        90,
    )


def test_scales_that_are_known_only_while_running() -> None:
    def net(m: Net, x: torch.Tensor) -> torch.Tensor:
        s = x.abs().amax() / 100
        q = QD.quantize_per_tensor.tensor(x, s, m.z, -128, 127, torch.int8)
        return QD.dequantize_per_tensor.tensor(q, s, m.z, -128, 127, torch.int8)

    g = same(Net(net, z=torch.tensor(5)), torch.randn(4, 9), db=90)
    assert "requantize" not in kinds(g)


def test_stored_numbers_as_results_and_inputs() -> None:
    for dtype in (torch.int8, torch.uint8):
        zero, lo, hi = (0, -128, 127) if dtype == torch.int8 else (128, 0, 255)
        net = Net(
            lambda m, x, dtype=dtype, z=zero, lo=lo, hi=hi: QD.quantize_per_tensor.default(x, 0.02, z, lo, hi, dtype)
        )
        same(net, torch.randn(3, 40))
        back = Net(
            lambda m, q, dtype=dtype, z=zero, lo=lo, hi=hi: QD.dequantize_per_tensor.default(q, 0.02, z, lo, hi, dtype)
        )
        same(back, torch.randint(lo, hi, (3, 40)).to(dtype))


def test_constants_are_stored_at_import() -> None:
    g = same(Net(lambda m, x: x + fq(m.c, 0.1, 3), c=torch.randn(40)), torch.randn(3, 40))
    assert kinds(g).count("requantize") == 1
    g = same(Net(lambda m, x: x + QD.dequantize_per_tensor.default(m.b, 1e-4, 0, -(2**31), 2**31 - 1, torch.int32),
                 b=torch.randint(-9999, 9999, (40,), dtype=torch.int32)), torch.randn(3, 40), db=90)  # fmt: skip
    assert "requantize" not in kinds(g)  # a bias of 32 bits is a map of a constant, which folds


def test_scale_that_is_no_number_is_named() -> None:
    with pytest.raises(Error, match="not finite"):
        graph(Net(lambda m, x: fq(x, float("nan"))), torch.randn(3))


# ---- per channel, blocks
@pytest.mark.parametrize("zero", [0, 3, None])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_channels_of_weights(zero: int | None, dtype: torch.dtype) -> None:
    lo, hi = (-128, 127) if dtype == torch.int8 else (0, 255)
    z = torch.randint(-3, 4, (6,)) if zero is None else torch.full((6,), zero)
    z = z + (0 if dtype == torch.int8 else 128)
    net = Net(lambda m, x: F.linear(x, QD.dequantize_per_channel.default(m.q, m.s, m.z, 0, lo, hi, dtype)),
              q=torch.randint(lo, hi, (6, 10)).to(dtype), s=torch.rand(6) + 0.1, z=z)  # fmt: skip
    g = same(net, torch.randn(4, 10), db=110)
    (n,) = (n for n in g.nodes if n.op == "requantize")
    assert n.inputs[0] is not None and n.inputs[0].dtype == DType.i8 and n.inputs[0].type.quant is not None
    assert n.inputs[0].type.quant.axis == 0 and (n.inputs[0].type.quant.offset is None) == (zero is not None)


def test_weight_quantised_in_the_graph() -> None:
    def net(m: Net, x: torch.Tensor) -> torch.Tensor:
        q = QD.quantize_per_channel.default(m.w, m.s, m.z, 0, -127, 127, torch.int8)
        return F.linear(x, QD.dequantize_per_channel.default(q, m.s, m.z, 0, -127, 127, torch.int8))

    y = lower(Net(net, w=torch.randn(6, 10), s=torch.rand(6) + 0.1, z=torch.zeros(6, dtype=torch.int64)), torch.randn(4, 10),
              exact=False, db=100)  # fmt: skip
    assert y.kernels() == ["qmatmul"]


@pytest.mark.parametrize(("shape", "block"), [
    ((6, 32), [1, 8]), ((6, 32), [6, 32]), ((6, 32), [1, 32]), ((6, 32), [6, 1]), ((6, 32), [2, 8]), ((4, 8, 3, 3), [1, 4, 3, 3]),
    ((4, 8, 3, 3), [1, 8, 3, 3]), ((4, 8, 3, 3), [1, 1, 3, 3])])  # fmt: skip
@pytest.mark.parametrize("zeros", [False, True])
def test_blocks(shape: tuple[int, ...], block: list[int], zeros: bool) -> None:
    counts = [d // k for d, k in zip(shape, block, strict=True)]
    q = torch.randint(-8, 8, shape, dtype=torch.int8)
    s = torch.rand(counts) + 0.1
    z = torch.randint(-2, 3, counts).to(torch.int8) if zeros else torch.zeros(counts, dtype=torch.int8)
    net = Net(lambda m, x: x * AO.dequantize_affine(m.q, block, m.s, m.z, torch.int8, -8, 7), q=q, s=s, z=z)
    g = same(net, torch.randn(shape), db=110)
    (n,) = (n for n in g.nodes if n.op == "requantize")
    many = block != list(shape)
    assert n.inputs[0] is not None and n.inputs[0].dtype == (DType.u8 if many else DType.i8)


@pytest.mark.parametrize(
    ("group", "bits", "offset", "half"),
    [(8, 4, True, True), (0, 8, False, False), (16, 8, True, False), (32, 4, False, False)],
)
def test_our_own_operator(group: int, bits: int, offset: bool, half: bool) -> None:
    q = (
        torch.randint(0, 16, (6, 32), dtype=torch.uint8)
        if bits == 4
        else torch.randint(-128, 128, (6, 32), dtype=torch.int8)
    )
    shape = (6, -(-32 // group)) if group else (6,)
    scale = torch.rand(shape) + 0.1
    scale = scale.half() if half else scale
    parts = {"q": q, "s": scale, "o": torch.randn(shape).to(scale.dtype) if offset else None}
    zero = 8 if bits == 4 else 0
    axis = 1 if group else 0
    net = Net(lambda m, x: F.linear(x, torch.ops.trivet.dequantize(m.q, m.s, m.o, zero, axis, group, bits)), **parts)
    same(net, torch.randn(3, 32), db=110)
    y = lower(net, torch.randn(3, 32), exact=False, db=100)
    assert y.kernels() == ["qmatmul"]
    (n,) = (n for n in y.graph.nodes if n.op == "qmatmul")
    assert n.attrs.bits == bits and n.attrs.group == (0 if group == 32 else group)
    assert n.inputs[2] is not None and n.inputs[2].dtype == (DType.f16 if half else DType.f32)


def test_groups_that_no_kernel_takes_are_made_real() -> None:
    parts = {"q": torch.randint(0, 16, (6, 36), dtype=torch.uint8), "s": torch.rand(6, 3) + 0.1}
    net = Net(lambda m, x: F.linear(x, torch.ops.trivet.dequantize(m.q, m.s, None, 8, 1, 12, 4)), **parts)
    y = lower(net, torch.randn(3, 36), exact=False, db=100)
    assert y.kernels() == ["matmul"]
    assert "groups of 12" in y.context.report.quant[0].why


# ---- rows, while running
def rows(x: torch.Tensor, mapping: str, lo: int = -128, hi: int = 127) -> torch.Tensor:
    block = [1] * (x.dim() - 1) + [x.shape[-1]]
    s, z = AO.choose_qparams_affine(x, mapping, block, torch.int8, lo, hi, None, None, torch.int8)
    q = AO.quantize_affine(x, block, s, z, torch.int8, lo, hi)
    return AO.dequantize_affine(q, block, s, z, torch.int8, lo, hi)


@pytest.mark.parametrize(("mapping", "lo"), [("ASYMMETRIC", -128), ("SYMMETRIC", -127)])
@pytest.mark.parametrize("shape", [(4, 40), (2, 3, 40), (1, 40)])
def test_rows_quantised_while_running(mapping: str, lo: int, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape) * torch.rand(*shape[:-1], 1) * 9
    g = same(Net(lambda m, x: rows(x, mapping, lo)), x, db=80)
    assert kinds(g) == ["rowquant"]
    y = lower(
        Net(lambda m, x: F.linear(rows(x, mapping, lo), m.w(), m.b), w=Weight(torch.randn(24, 40)), b=torch.randn(24)),
        x,
        db=55,
    )
    assert y.kernels() == ["qmatmul"]
    (n,) = (n for n in y.graph.nodes if n.op == "qmatmul")
    assert n.attrs.dynamic == (2 if mapping == "ASYMMETRIC" else 1)
    assert [r.form for r in y.context.report.quant] == ["integer"]
    y = lower(Net(lambda m, x: torch.tanh(rows(x, mapping, lo))), x, exact=False, db=80)  # nothing to go into
    assert set(y.kernels()) == {"reduce", "map"}


@pytest.mark.parametrize("overload", ["choose_qparams", "choose_qparams_symmetric"])
@pytest.mark.parametrize("shape", [(1, 40), (3, 40)])
def test_one_range_for_all(overload: str, shape: tuple[int, ...]) -> None:
    choose = getattr(QD, overload).tensor

    def net(m: Net, x: torch.Tensor) -> torch.Tensor:
        s, z = choose(x, -128, 127, 1e-8, torch.int8)
        q = QD.quantize_per_tensor.tensor(x, s, z, -128, 127, torch.int8)
        return F.linear(QD.dequantize_per_tensor.tensor(q, s, z, -128, 127, torch.int8), m.w())

    y = lower(Net(net, w=Weight(torch.randn(24, 40))), torch.randn(shape), exact=False, db=40)
    (n,) = (n for n in y.graph.nodes if n.op == "qmatmul")
    assert (n.attrs.dynamic != 0) == (shape[0] == 1)


@pytest.mark.parametrize("symmetric", [False, True])
def test_rows_by_token_operators(symmetric: bool) -> None:
    def net(m: Net, x: torch.Tensor) -> torch.Tensor:
        s, z = (QD.choose_qparams_per_token if symmetric else QD._choose_qparams_per_token_asymmetric_impl)(
            x, torch.int8
        )
        q = QD.quantize_per_token(x, s, z, -128, 127, torch.int8)
        return F.linear(QD.dequantize_per_token(q, s, z, -128, 127, torch.int8, torch.float32), m.w())

    y = lower(Net(net, w=Weight(torch.randn(24, 40))), torch.randn(2, 5, 40), db=40)
    assert y.kernels() == ["qmatmul"]


@pytest.mark.parametrize("block", [[1, 8], [2, 1]])
def test_running_blocks_stay_maps(block: list[int]) -> None:
    def net(m: Net, x: torch.Tensor) -> torch.Tensor:
        s, z = AO.choose_qparams_affine(x, "ASYMMETRIC", block, torch.int8, -128, 127)
        q = AO.quantize_affine(x, block, s, z, torch.int8, -128, 127)
        return AO.dequantize_affine(q, block, s, z, torch.int8, -128, 127)

    assert "rowquant" not in kinds(same(Net(net), torch.randn(4, 32), db=70))


# ---- torchao's quantize_
def configs() -> list[Any]:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig as D8
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig as Dx
    from torchao.quantization import Int8WeightOnlyConfig as W8
    from torchao.quantization import IntxWeightOnlyConfig as Wx
    from torchao.quantization.granularity import PerAxis, PerGroup

    return [W8(version=2), D8(version=2), Wx(weight_dtype=torch.int4, granularity=PerGroup(16)),
            Wx(weight_dtype=torch.int8, granularity=PerAxis(0)),
            Dx(weight_dtype=torch.int4, weight_granularity=PerGroup(16))]  # fmt: skip


@pytest.mark.parametrize("i", range(5))
def test_models_quantised_by_torchao(i: int) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.ReLU(), torch.nn.Linear(48, 32, bias=False))
    torchao.quantization.quantize_(net.eval(), configs()[i])
    y = lower(net, torch.randn(4, 64), exact=False, db=(90, 35, 90, 90, 60)[i])
    assert y.kernels() == ["qmatmul", "qmatmul"] or y.kernels() == ["qmatmul", "map", "qmatmul"]
    assert [n.attrs.dynamic for n in y.graph.nodes if n.op == "qmatmul"] == [(0, 1, 0, 0, 2)[i]] * 2


def test_programs_that_torch_exported_multiply_bytes() -> None:
    """Exported without us, torchao's dynamic 8-bit tensors are products of integers written out."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.ReLU(), torch.nn.Linear(48, 32, bias=False)).eval()
    torchao.quantization.quantize_(net, configs()[1])
    x = torch.randn(20, 64)
    program = torch.export.export(net, (x,))
    assert "aten._int_mm" in str(program.graph)
    assert sqnr(net(x), trivet.load(trivet.export(program))(x)) > 100


def test_a_constant_with_several_meanings() -> None:
    """Read as it is and by two scales: a constant for each."""
    q, s = torch.randint(-9, 9, (8, 16), dtype=torch.int8), torch.rand(8) + 0.1

    def net(m: Net, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b = (torch.ops.trivet.dequantize(m.q, t, None, 0, 0, 0, 8) for t in (m.s, m.t))
        return F.linear(x, a), F.linear(x, b), m.q.float() + x[:1]

    lower(Net(net, q=q, s=s, t=2 * s), torch.randn(3, 16), exact=False, db=90)


@pytest.mark.parametrize("i", range(5))
def test_halves_with_stored_weights_compute_in_f32(i: int) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Embedding(50, 64), torch.nn.Linear(64, 48), torch.nn.ReLU(), torch.nn.Linear(48, 32)
    )
    net = net.to(torch.bfloat16).eval()
    torchao.quantization.quantize_(net, configs()[i])
    if i == 2:
        torchao.quantization.quantize_(net, configs()[i], filter_fn=lambda m, _: isinstance(m, torch.nn.Embedding))
    y = lower(net, torch.randint(0, 50, (3, 7)), exact=False, db=37)
    first = "qgather" if i == 2 else "gather"
    assert y.kernels() == [first, "map", "qmatmul", "map", "qmatmul", "map"]
