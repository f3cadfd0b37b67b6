"""The reference evaluator against torch's own operators."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as fn

from trivet.error import Error
from trivet.fbs.structs import (
    Act,
    DType,
    IndexKind,
    MapOp,
    NormKind,
    PadMode,
    PoolKind,
    ReduceKind,
    ResizeMode,
    RnnKind,
    ScanKind,
    ScatterReduce,
)
from trivet.ir import ops
from trivet.ir.dim import Dim
from trivet.ir.evaluate import evaluate
from trivet.ir.graph import Graph, State, Sym, Value
from trivet.ir.interop import dtype_of
from trivet.ir.types import Type

In = ops.Instr
F32 = DType.f32


def type_of(x: torch.Tensor) -> Type:
    return Type(dtype_of(x), tuple(x.shape))


def run(op: str, attrs: object, xs: list[torch.Tensor | None], *outs: torch.Tensor) -> None:
    """One node must give outs."""
    g = Graph("t")
    ins: list[Value | None] = []
    for x in xs:
        if x is None:
            ins.append(None)
            continue
        v = g.value(type_of(x))
        g.inputs.append(v)
        ins.append(v)
    g.outputs = g.node(op, ins, [type_of(o) for o in outs], attrs)
    got = evaluate(g, [x for x in xs if x is not None])
    for a, b in zip(got, outs, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


def run_map(code: tuple[ops.Instr, ...], xs: list[torch.Tensor], want: torch.Tensor) -> None:
    run("map", ops.Map(code), list(xs), want)


def unary(op: MapOp, dtype: DType, out: DType | None = None) -> tuple[ops.Instr, ...]:
    return (In(MapOp.load, dtype, value=0), In(op, out or dtype, (0,)))


def binary(op: MapOp, dtype: DType, out: DType | None = None) -> tuple[ops.Instr, ...]:
    return (In(MapOp.load, dtype, value=0), In(MapOp.load, dtype, value=1), In(op, out or dtype, (0, 1)))


def test_map_rounds_every_instruction_in_its_dtype() -> None:
    x = torch.tensor([60000.0, 1.0], dtype=torch.float16)
    code = (In(MapOp.load, DType.f16, value=0), In(MapOp.add, DType.f16, (0, 0)), In(MapOp.cast, F32, (1,)))
    run_map(code, [x], torch.tensor([math.inf, 2.0]))


def test_map_integers_wrap_and_do_not_trap() -> None:
    big = torch.iinfo(torch.int32)
    a = torch.tensor([big.max, big.min, big.min, 7, -7], dtype=torch.int32)
    b = torch.tensor([1, -1, 0, -2, 2], dtype=torch.int32)
    run_map(binary(MapOp.add, DType.i32), [a, b], a + b)
    run_map(binary(MapOp.trunc_div, DType.i32), [a, b], torch.tensor([big.max, big.min, 0, -3, -3], dtype=torch.int32))
    run_map(binary(MapOp.floor_div, DType.i32), [a, b], torch.tensor([big.max, big.min, 0, -4, -4], dtype=torch.int32))
    run_map(binary(MapOp.mod, DType.i32), [a, b], torch.tensor([0, 0, 0, -1, 1], dtype=torch.int32))
    run_map(binary(MapOp.fmod, DType.i32), [a, b], torch.tensor([0, 0, 0, 1, -1], dtype=torch.int32))


def test_map_nan() -> None:
    x, y = torch.tensor([math.nan, 1.0, -math.inf]), torch.tensor([0.0, math.nan, math.nan])
    run_map(binary(MapOp.max, F32), [x, y], torch.maximum(x, y))
    run_map(binary(MapOp.fmax, F32), [x, y], torch.fmax(x, y))
    run_map(unary(MapOp.relu, F32), [x], torch.relu(x))
    run_map(unary(MapOp.is_nan, F32, DType.bool), [x], x.isnan())
    run_map(unary(MapOp.hard_swish, F32), [x], fn.hardswish(x))


def test_map_bool_iota_const_dim_select() -> None:
    b, c = torch.tensor([[True], [False]]), torch.tensor([True, True, False])
    run_map(binary(MapOp.and_, DType.bool), [b, c], b & c)
    run_map(binary(MapOp.add, DType.bool), [b, c], b | c)
    run_map(binary(MapOp.lt, DType.bool, DType.bool), [b, c], b < c)
    code = (In(MapOp.iota, DType.i64, value=0), In(MapOp.iota, DType.i64, value=1), In(MapOp.ge, DType.bool, (0, 1)))
    run_map(code, [], torch.ones(4, 4, dtype=torch.bool).tril())
    code = (In(MapOp.load, DType.bool, value=0), In(MapOp.const_, F32, value=math.inf), In(MapOp.dim, F32, value=3),
            In(MapOp.select, F32, (0, 1, 2)))  # fmt: skip
    run_map(code, [c], torch.tensor([math.inf, math.inf, 3.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool])
def test_reduce(dtype: torch.dtype) -> None:
    x = (torch.randn(3, 4, 5) * 3).to(dtype)
    if dtype.is_floating_point:
        run("reduce", ops.Reduce(ReduceKind.mean, (0, 2)), [x], x.mean((0, 2), keepdim=True))
        run("reduce", ops.Reduce(ReduceKind.var, (1,), 1.0), [x], x.var(1, keepdim=True))
        run("reduce", ops.Reduce(ReduceKind.sum, ()), [x], x)
    run("reduce", ops.Reduce(ReduceKind.sum, (0, 1, 2)), [x], x.sum((0, 1, 2), keepdim=True))
    run("reduce", ops.Reduce(ReduceKind.max, (1, 2)), [x], x.amax((1, 2), keepdim=True))
    run("reduce", ops.Reduce(ReduceKind.any, (2,)), [x], x.any(2, keepdim=True))
    if dtype != torch.bool:
        run("reduce", ops.Reduce(ReduceKind.argmax, (0, 1, 2)), [x], x.argmax().reshape(1, 1, 1))
        run("reduce", ops.Reduce(ReduceKind.argmin, (1,)), [x], x.argmin(1, keepdim=True))


def test_reduce_of_nothing() -> None:
    x = torch.zeros(2, 0)
    run("reduce", ops.Reduce(ReduceKind.mean, (1,)), [x], x.mean(1, keepdim=True))
    run("reduce", ops.Reduce(ReduceKind.prod, (0, 1)), [x], torch.ones(1, 1))


def test_scan() -> None:
    x = torch.randn(3, 4)
    run("scan", ops.Scan(ScanKind.sum, 1), [x], x.cumsum(1))
    run("scan", ops.Scan(ScanKind.sum, 1, True), [x], x.cumsum(1) - x)
    run("scan", ops.Scan(ScanKind.sum, 0), [x > 0], (x > 0).cumsum(0))
    run("scan", ops.Scan(ScanKind.max, 0), [x], x.cummax(0).values)


def test_matmul_epilogue() -> None:
    a, b, bias, res = torch.randn(2, 3, 4), torch.randn(4, 5), torch.randn(5), torch.randn(2, 3, 5)
    run("matmul", ops.Matmul(act=Act.clamp, hi=6.0), [a, b, bias, res], (a @ b + bias + res).clamp(0, 6))
    run("matmul", ops.Matmul(act=Act.leaky, lo=0.1), [a, b, None, res], fn.leaky_relu(a @ b + res, 0.1))
    run("matmul", ops.Matmul(act=Act.elu, lo=2.0), [a, b], fn.elu(a @ b, 2.0))
    run("matmul", ops.Matmul(), [a[0, 0], b], a[0, 0] @ b)


def test_conv() -> None:
    x, w, b = torch.randn(2, 4, 9, 8), torch.randn(6, 2, 3, 2), torch.randn(6)
    want = fn.conv2d(x, w, b, (2, 1), (1, 2), (1, 2), 2)
    attrs = ops.Conv(2, (2, 1), (1, 2), (1, 2), 2)
    run("conv", attrs, [x, w, b], want)
    want = fn.conv2d(fn.pad(x, (0, 3, 1, 0)), w, b, 1, 0, 1, 2)
    run("conv", ops.Conv(2, (1, 1), (1, 0), (1, 1), 2), [x, w, b], want)
    w = torch.randn(4, 3, 3, 4)
    want = fn.conv_transpose2d(x, w, None, (2, 3), (1, 2), (1, 2), 1, (2, 1))
    run("conv", ops.Conv(2, (2, 3), (1, 2), (2, 1), transposed=True), [x, w], want)
    w = torch.randn(4, 3, 2)
    want = fn.conv_transpose1d(x[:, :, 0], w, torch.arange(6.0), 3, 0, 2, 2)
    run("conv", ops.Conv(1, (3,), (0,), (1,), 2, True), [x[:, :, 0], w, torch.arange(6.0)], want)


@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_pool(ceil: bool, include: bool) -> None:
    x = torch.randn(1, 2, 7, 9)
    x[0, 0, 2, 3] = math.nan
    want = fn.avg_pool2d(x, 3, 2, 1, ceil, include)
    run("pool", ops.Pool(PoolKind.avg, 2, (3, 3), (2, 2), (1, 1), count_include_pad=include, ceil_mode=ceil), [x], want)
    want, at = fn.max_pool2d(x, (3, 2), (2, 1), (1, 1), (2, 1), ceil, True)
    run("pool", ops.Pool(PoolKind.max, 2, (3, 2), (2, 1), (1, 1), (2, 1), ceil_mode=ceil), [x], want, at)
    x = torch.full((1, 1, 6), -math.inf)
    run("pool", ops.Pool(PoolKind.max, 1, (3,), (2,), (1,)), [x], *fn.max_pool1d(x, 3, 2, 1, return_indices=True))


def test_pool_adaptive() -> None:
    x = torch.randn(1, 3, 5, 6)
    run("pool", ops.Pool(PoolKind.avg, 2, adaptive=True), [x], fn.adaptive_avg_pool2d(x, (3, 4)))
    want, at = fn.adaptive_max_pool2d(x, (3, 4), return_indices=True)
    run("pool", ops.Pool(PoolKind.max, 2, adaptive=True), [x], want, at)


def test_norms_and_softmax() -> None:
    x, w, b = torch.randn(2, 4, 6) + 10, torch.randn(6), torch.randn(6)
    run("norm", ops.Norm(NormKind.layer, 1e-5), [x, w, b], fn.layer_norm(x, (6,), w, b))
    run("norm", ops.Norm(NormKind.layer, 1e-5, 2), [x], fn.layer_norm(x, (4, 6)))
    run("norm", ops.Norm(NormKind.rms, 1e-5), [x, w, None], fn.rms_norm(x, (6,), w, 1e-5))
    run("norm", ops.Norm(NormKind.group, 1e-5, groups=2), [x, w[:4], b[:4]], fn.group_norm(x, 2, w[:4], b[:4]))
    run("softmax", ops.Softmax(1), [x], x.softmax(1))
    run("softmax", ops.Softmax(2, True), [x], x.log_softmax(2))


def test_attention() -> None:
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 3)
    sdpa = fn.scaled_dot_product_attention
    run("attention", ops.Attention(0.3), [q, k, v, None], sdpa(q, k, v, scale=0.3, enable_gqa=True))
    mask = torch.rand(1, 4, 5, 7) > 0.3
    mask[0, :, 2] = False
    run("attention", ops.Attention(0.3), [q, k, v, mask], sdpa(q, k, v, mask, scale=0.3, enable_gqa=True))
    run("attention", ops.Attention(0.3, True), [q, k, v], sdpa(q, k, v, scale=0.3, is_causal=True, enable_gqa=True))


def test_indexing() -> None:
    x, i = torch.randn(3, 6, 4), torch.tensor([[-1, 2], [0, 2]])
    run("gather", ops.Gather(IndexKind.take, 1), [x, i], x[:, i])
    j = torch.randint(0, 6, (3, 2, 4))
    run("gather", ops.Gather(IndexKind.elements, 1), [x, j - 6], x.gather(1, j))
    u = torch.randn(3, 2, 2, 4)
    want = x.clone().index_put((torch.arange(3)[:, None, None], i), u, accumulate=True)
    run("scatter", ops.Scatter(IndexKind.take, 1, ScatterReduce.sum), [x, i, u], want)
    u = torch.randn(3, 2, 4)
    run("scatter", ops.Scatter(IndexKind.elements, 1), [x, j[:, :1], u], x.scatter(1, j[:, :1], u))
    with pytest.raises(Error, match="out of range"):
        run("gather", ops.Gather(IndexKind.take, 0), [x, torch.tensor([3])], x[:1])


def test_pad_and_sort() -> None:
    x = torch.randn(2, 5, 6)
    run("pad", ops.Pad(PadMode.constant, (0, 1, -2), (0, 0, 3), 7.0), [x], fn.pad(x, (-2, 3, 1, 0), value=7.0))
    for mode in ("reflect", "replicate", "circular"):
        run("pad", ops.Pad(PadMode[mode], (0, 1, 2), (0, 2, 3)), [x], fn.pad(x[None], (2, 3, 1, 2), mode)[0])
    x[0, 0, 0] = math.nan
    run("sort", ops.Sort(2, True), [x], *torch.sort(x, dim=2, descending=True, stable=True))
    run("sort", ops.Sort(1, True, 2), [x[1:]], *x[1:].topk(2, 1))


@pytest.mark.parametrize("kind", ["lstm", "gru", "tanh", "relu"])
def test_rnn(kind: str) -> None:
    t, n, size, hidden = 5, 2, 3, 4
    net: torch.nn.RNNBase
    if kind == "lstm":
        net = torch.nn.LSTM(size, hidden, bidirectional=True, proj_size=2)
    elif kind == "gru":
        net = torch.nn.GRU(size, hidden, bidirectional=True)
    else:
        net = torch.nn.RNN(size, hidden, nonlinearity=kind, bidirectional=True)
    x = torch.randn(t, n, size)
    with torch.no_grad():
        y, h = net(x)
        w = [p.detach() for p in net.parameters()]
    per = len(w) // 2
    for d in range(2):
        mine = [*w[d * per : d * per + 4], None, None, w[d * per + 4] if per == 5 else None]
        outs = [y.chunk(2, -1)[d], h[0][d] if kind == "lstm" else h[d], *([h[1][d]] if kind == "lstm" else [])]
        run("rnn", ops.Rnn(RnnKind[kind], bool(d)), [x, *mine], *outs)


def test_resize() -> None:
    x = torch.randn(1, 2, 5, 7)
    up = fn.interpolate(x, scale_factor=(1.5, 2.3), mode="bilinear")
    run("resize", ops.Resize(ResizeMode.linear, 2, scale=(1.5, 2.3)), [x], up)
    run(
        "resize",
        ops.Resize(ResizeMode.cubic, 2, True),
        [x],
        fn.interpolate(x, (9, 6), mode="bicubic", align_corners=True),
    )
    run("resize", ops.Resize(ResizeMode.nearest, 2), [x], fn.interpolate(x, (9, 6)))
    run("resize", ops.Resize(ResizeMode.nearest_exact, 1), [x[0]], fn.interpolate(x[0], 9, mode="nearest-exact"))


def test_views() -> None:
    x = torch.randn(3, 6, 4)
    run("slice", ops.Slice(1, 5, -2), [x], x.flip(1)[:, ::2])
    run("window", ops.Window(1, 3, 2), [x], x.unfold(1, 3, 2))
    run("diagonal", ops.Diagonal(1, 0, 2), [x], x.diagonal(1, 0, 2))
    run("expand", ops.Expand(), [x[0, 0]], x[0, 0].expand(2, 3, 4))
    run("bitcast", ops.Bitcast(), [x.permute(2, 0, 1)], x.permute(2, 0, 1).contiguous().view(torch.int32))
    run("concat", ops.Concat(1), [x, x[:, :0], x[:, :2]], torch.cat([x, x[:, :2]], 1))


def test_symbols_states_and_refusals() -> None:
    g = Graph("t")
    n = Dim.symbol("n")
    g.symbols["n"] = Sym("n", 1, 8, (0, 0))
    x = g.value(Type(F32, (n, 2)))
    g.inputs = [x]
    s = State("s", Type(F32, (2,)), None)
    sv = Value("s", s.type, state=s)
    total = g.node("reduce", [x], [Type(F32, (1, 2))], ops.Reduce(ReduceKind.sum, (0,)))[0]
    flat = g.node("reshape", [total], [Type(F32, (2,))], ops.Reshape())[0]
    new = g.node("map", [flat, sv], [Type(F32, (2,))], ops.Map(binary(MapOp.add, F32)))[0]
    g.writes = [(s, new)]
    g.outputs = [sv]
    states: dict[State, torch.Tensor] = {}
    assert evaluate(g, [torch.ones(3, 2)], states=states)[0].tolist() == [0, 0]
    assert evaluate(g, [torch.ones(5, 2)], states=states)[0].tolist() == [3, 3]
    assert states[s].tolist() == [8, 8]
    with pytest.raises(Error, match=r"n: expected 1\.\.8, got 9"):
        evaluate(g, [torch.ones(9, 2)])
    with pytest.raises(Error, match="input 0: expected f32, got f64"):
        evaluate(g, [torch.ones(9, 2).double()])
    with pytest.raises(Error, match="axis 1: expected 2"):
        evaluate(g, [torch.ones(3, 3)])


def test_if_while() -> None:
    g = Graph("t")
    x, limit = g.value(Type(F32, ())), g.value(Type(F32, ()))
    g.inputs = [x, limit]
    cond, body = Graph("cond"), Graph("body")
    for sub in (cond, body):
        sub.inputs = [sub.value(Type(F32, ())), sub.value(Type(F32, ()))]
    cond.outputs = cond.node(
        "map", list(cond.inputs), [Type(DType.bool, ())], ops.Map(binary(MapOp.lt, F32, DType.bool))
    )
    double = (In(MapOp.load, F32, value=0), In(MapOp.add, F32, (0, 0)))
    body.outputs = body.node("map", [body.inputs[0]], [Type(F32, ())], ops.Map(double))
    y = g.node("while", [x, limit], [Type(F32, ())], ops.While(1), graphs=[cond, body])[0]
    big = g.node("map", [y, limit], [Type(DType.bool, ())], ops.Map(binary(MapOp.gt, F32, DType.bool)))[0]
    then, other = Graph("then"), Graph("else")
    for sub in (then, other):
        sub.inputs = [sub.value(Type(F32, ()))]
    then.outputs = then.node("map", [then.inputs[0]], [Type(F32, ())], ops.Map(unary(MapOp.neg, F32)))
    other.outputs = [other.inputs[0]]
    g.outputs = g.node("if", [big, y], [Type(F32, ())], ops.If(), graphs=[then, other])
    assert evaluate(g, [torch.tensor(1.0), torch.tensor(10.0)])[0].item() == -16.0
    assert evaluate(g, [torch.tensor(1.0), torch.tensor(16.0)])[0].item() == 16.0
