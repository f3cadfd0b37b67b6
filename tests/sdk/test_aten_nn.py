"""Convolution, pooling, products, norms, attention, resampling, recurrent cells."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from eager import capture, check
from torch.export import Dim


def test_convolutions() -> None:
    def f(x: torch.Tensor, w: torch.Tensor, c: torch.Tensor, t: torch.Tensor) -> list[torch.Tensor]:
        return [F.conv2d(x, w), F.conv2d(x, w, c, stride=2, padding=1), F.conv2d(x, w, c, (1, 2), (2, 1), (2, 1)),
                F.conv2d(x, w, padding="same"), F.conv2d(x, w, c, padding="valid"), F.conv2d(x, w, padding="same", dilation=(1, 2)),
                F.conv2d(x[0], w, c), F.conv2d(x, w[:, :2], c, groups=2), F.conv1d(x[:, :, 0], w[:, :, 0], c, padding=1),
                F.conv_transpose2d(x, t, c[:3], stride=2, padding=1, output_padding=1), F.conv_transpose2d(x, t, dilation=(1, 2)),
                F.conv_transpose1d(x[:, :, 0], t[:, :, 0], stride=3), F.conv_transpose2d(x, t, groups=2), F.conv3d(x.unsqueeze(2), w.unsqueeze(2), c),
                F.conv_transpose3d(x.unsqueeze(2), t.unsqueeze(2), stride=2), F.conv_transpose2d(x[0], t)]  # fmt: skip

    check(f, torch.randn(2, 4, 7, 8), torch.randn(6, 4, 3, 2), torch.randn(6), torch.randn(4, 3, 2, 3))


def test_pools() -> None:
    def f(x: torch.Tensor) -> list[torch.Tensor]:
        return [F.max_pool2d(x, 2), F.max_pool2d(x, 3, 2, 1), F.max_pool2d(x, (2, 3), (1, 2), (1, 1)), F.max_pool2d(x, 2, ceil_mode=True),
                F.max_pool2d(x, 3, 1, 1, dilation=2), *F.max_pool2d(x, 2, return_indices=True), *F.max_pool1d(x[0], 2, return_indices=True),
                F.max_pool1d(x[0], 3, 2), F.max_pool3d(x, 2), *F.max_pool3d(x, 2, return_indices=True), F.avg_pool2d(x, 2), F.avg_pool2d(x, 3, 2, 1),
                F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), F.avg_pool2d(x, 3, 2, 1, True, False), F.avg_pool2d(x, 2, divisor_override=3),
                F.avg_pool1d(x[0], 3, 2, 1), F.avg_pool3d(x, 2), F.adaptive_avg_pool2d(x, 1), F.adaptive_avg_pool2d(x, (3, 5)), F.adaptive_avg_pool2d(x, (None, 2)),
                F.adaptive_avg_pool1d(x[0], 3), F.adaptive_avg_pool3d(x, (1, 2, 3)), *F.adaptive_max_pool2d(x, (3, 2), return_indices=True),
                F.adaptive_max_pool2d(x, 2), *F.adaptive_max_pool1d(x[0], 3, return_indices=True), F.adaptive_max_pool3d(x, 2), F.lp_pool2d(x.abs(), 2, 2),
                F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2, output_size=(9, 10)), F.max_pool2d(x[0], 2)]  # fmt: skip

    check(f, torch.randn(2, 3, 9, 10))


def test_products() -> None:
    def f(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        return [a @ b, v @ b, a @ b[:, 0], v @ v, a.mm(b), c @ b, a @ c.mT, c @ c.mT, torch.bmm(c, c.mT), c @ v, v @ c.mT, torch.outer(v, v), F.linear(a, b.t()),
                F.linear(v, b.t()), F.linear(c, b.t(), b[0]), F.linear(a, v), torch.addmm(b[0], a, b), torch.addmm(b[0], a, b, beta=0.5, alpha=2),
                torch.addmm(b[0], a, b, beta=0), torch.baddbmm(c[:, :, :2], c, c.mT, alpha=2), torch.baddbmm(a[:, :2], c, c.mT), torch.addbmm(a[:2, :2], c[:, :2], c[:, :2].mT),
                torch.addmv(a[:, 0], a, v), torch.mv(a, v), torch.dot(v, v), a.int() @ b.int(), torch.tensordot(c, b, 1), torch.chain_matmul(a, b, b.t()),
                torch.tensordot(c, c, ([0, 2], [0, 2])), torch.addr(torch.zeros(4, 4), v, v, alpha=3), torch.inner(a, a), torch.kron(a, b), torch.ger(v, v)]  # fmt: skip

    check(f, torch.randn(2, 4), torch.randn(4, 3), torch.randn(5, 2, 4), torch.randn(4))
    check(
        lambda x, y, w, c: [F.bilinear(x, y, w, c), F.bilinear(x[0], y[0], w)],
        torch.randn(5, 2),
        torch.randn(5, 3),
        torch.randn(4, 2, 3),
        torch.randn(4),
    )


@pytest.mark.parametrize("equation,shapes", [
    ("bij,bjk->bik", [(2, 3, 4), (2, 4, 5)]), ("bsd,cdhk->cbhsk", [(2, 5, 6), (3, 6, 2, 4)]), ("bhss->bh", [(2, 3, 4, 4)]),
    ("bhsk,bhtk->bhst", [(2, 3, 4, 5), (2, 3, 6, 5)]), ("i,j->ij", [(3,), (4,)]), ("ij->ji", [(3, 4)]), ("ij->", [(3, 4)]),
    ("ij,jk", [(3, 4), (4, 5)]), ("...ij,...jk->...ik", [(2, 3, 4), (2, 4, 5)]), ("bhwc,hkc->bhwk", [(2, 3, 4, 5), (3, 6, 5)]),
    ("ijk,ij,k->i", [(2, 3, 4), (2, 3), (4,)]), ("ii,i->i", [(3, 3), (3,)]), ("ij,ij->", [(3, 4), (3, 4)]),
    ("b...d,de->b...e", [(2, 3, 4, 5), (5, 6)]), ("ab,b->a", [(3, 4), (4,)]), ("abc,ad->bcd", [(1, 2, 3), (1, 4)]),
])  # fmt: skip
def test_einsum(equation: str, shapes: list[tuple[int, ...]]) -> None:
    check(lambda *xs: torch.einsum(equation, *xs), *(torch.randn(s) for s in shapes))


@pytest.mark.parametrize("rows", [3, 9])
def test_grouped_product(rows: int) -> None:
    """Against the definition: eager has the operator for bf16 only."""
    from trivet.aten import HANDLERS
    from trivet.ir.builder import Builder
    from trivet.ir.evaluate import evaluate
    from trivet.ir.graph import Graph
    from trivet.ir.types import Type

    x, w, offs = torch.randn(rows, 4), torch.randn(3, 4, 5), torch.tensor([1, 1, rows - 1], dtype=torch.int32)
    g = Graph("forward")
    b = Builder(g)
    g.inputs = [g.value(Type(b.dtype(t), tuple(t.shape))) for t in (x, w, offs)]
    want = torch.cat([x[:1] @ w[0], x[1 : rows - 1] @ w[2], torch.zeros(1, 5)])
    g.outputs = [HANDLERS["transformers.grouped_mm_fallback.default"](b, g.inputs, {}, want)]
    torch.testing.assert_close(evaluate(g, [x, w, offs])[0], want)


def test_norms() -> None:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.list = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4),
                                       nn.InstanceNorm2d(4, affine=True), nn.InstanceNorm2d(4, track_running_stats=True), nn.LayerNorm(6), nn.LayerNorm([5, 6]),
                                       nn.RMSNorm(6), nn.LayerNorm(6, elementwise_affine=False), nn.LocalResponseNorm(3)])  # fmt: skip
            for p in [*self.parameters(), *self.buffers()]:
                if p.is_floating_point():
                    nn.init.uniform_(p, 0.5, 2)

        def forward(self, x: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
            return [*(n(x) for n in self.list), F.batch_norm(x, m, v), F.batch_norm(x, m, v, v, m, eps=1e-3), F.batch_norm(x, None, None, training=True),
                    F.instance_norm(x), F.rms_norm(x, (6,), eps=1e-6), F.rms_norm(x.half(), (5, 6)), F.batch_norm(x[:, :, 0, 0], m, v),
                    F.layer_norm(x.half(), (6,)), F.group_norm(x, 4, v, m), self.list[0](x.double().float())]  # fmt: skip

    check(M(), torch.randn(2, 4, 5, 6), torch.randn(4), torch.rand(4) + 0.5)
    x = torch.randn(1, 4, 5, 6)
    check(lambda x: [F.instance_norm(x), F.batch_norm(x, None, None, training=True)], x)
    check(lambda x: torch.ops.aten.native_layer_norm(x, [6], None, None, 1e-5), x)
    check(lambda x: torch.ops.aten.native_group_norm(x, None, None, 1, 4, 30, 2, 1e-5), x)
    check(lambda x: torch.ops.aten._native_batch_norm_legit.no_stats(x, None, None, True, 0.1, 1e-5), x)


def test_softmax_and_attention() -> None:
    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> list[torch.Tensor]:
        s = F.scaled_dot_product_attention
        return [s(q, k, v), s(q, k, v, m > 0), s(q, k, v, m), s(q, k, v, is_causal=True), s(q, k, v, scale=0.3), s(q[0], k[0], v[0]),
                s(q[0, 0], k[0, 0], v[0, 0]), s(q, k[:, :2], v[:, :2], enable_gqa=True), q.softmax(-1), q.softmax(1), q.log_softmax(2), q.softmax(-1, dtype=torch.float64),
                F.softmin(q, -1), F.cross_entropy(q[0, 0], torch.zeros(5, dtype=torch.int64), reduction="none")]  # fmt: skip

    mask = torch.randn(2, 1, 5, 7)
    mask[0, 0, 2] = -1
    check(f, torch.randn(2, 4, 5, 8), torch.randn(2, 4, 7, 8), torch.randn(2, 4, 7, 8), mask)


def test_modules_of_attention() -> None:
    m = nn.MultiheadAttention(8, 2, batch_first=True)
    check(m, *(torch.randn(2, 5, 8) for _ in range(3)))
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    check(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(2, 5, 8))


def test_resampling() -> None:
    def f(x: torch.Tensor) -> list[torch.Tensor]:
        r = F.interpolate
        return [r(x, 9), r(x, scale_factor=2), r(x, scale_factor=(1.5, 2.3)), r(x, (3, 4), mode="nearest-exact"), r(x, scale_factor=1.7, mode="nearest-exact"), r(x, (9, 6), mode="bilinear"),
                r(x, (9, 6), mode="bilinear", align_corners=True), r(x, scale_factor=(1.5, 2.3), mode="bilinear"), r(x, scale_factor=1.3, mode="bilinear", recompute_scale_factor=True),
                r(x, (9, 6), mode="bicubic"), r(x, (3, 10), mode="bicubic", align_corners=True), r(x[0], 9, mode="linear"), r(x[0], 9), r(x.unsqueeze(2), (2, 7, 3), mode="trilinear"),
                r(x.unsqueeze(2), (2, 7, 3))]  # fmt: skip

    check(f, torch.randn(2, 3, 5, 7))

    def g(x: torch.Tensor, grid: torch.Tensor) -> list[torch.Tensor]:
        return [F.grid_sample(x, grid, mode=m, padding_mode=p, align_corners=a) for m in ("bilinear", "nearest", "bicubic")
                for p in ("zeros", "border", "reflection") for a in (False, True)]  # fmt: skip

    check(g, torch.randn(2, 3, 6, 5), torch.rand(2, 4, 7, 2) * 3 - 1.5)
    check(lambda t: F.affine_grid(t, [2, 3, 4, 5], align_corners=False), torch.randn(2, 2, 3))


def test_recurrent() -> None:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l, self.g, self.r = nn.LSTMCell(3, 4), nn.GRUCell(3, 4), nn.RNNCell(3, 4)
            self.relu = nn.RNNCell(3, 4, nonlinearity="relu", bias=False)

        def forward(self, x: torch.Tensor, h: torch.Tensor) -> list[torch.Tensor]:
            return [*self.l(x, (h, h)), self.g(x, h), self.r(x, h), self.relu(x, h), self.g(x[0], h[0]), *self.l(x)]

    check(M(), torch.randn(2, 3), torch.randn(2, 4))


def test_dynamic_convolution() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        return [F.conv2d(x, w, padding=1), F.max_pool2d(x, 2, ceil_mode=True), F.avg_pool2d(x, 3, 2, ceil_mode=True), F.interpolate(x, scale_factor=2, mode="bilinear"),
                F.adaptive_avg_pool2d(x, 3), x.mean((2, 3)), F.interpolate(x, (4, 4)), F.conv_transpose2d(x, w, stride=2)]  # fmt: skip

    h, b = Dim.AUTO, Dim("b", min=1, max=8)
    check(f, torch.randn(2, 3, 8, 9), torch.randn(3, 3, 3, 3), more=[(torch.randn(1, 3, 11, 9), torch.randn(3, 3, 3, 3))],
          dynamic_shapes=({0: b, 2: h}, None))  # fmt: skip


def test_batch_norm_is_one_scale_and_shift() -> None:
    graph = capture(nn.BatchNorm2d(3), torch.randn(1, 3, 4, 4))
    assert [n.op for n in graph.nodes] == ["map"]
    assert len(graph.nodes[0].inputs) == 3


def test_trivial_views_leave_nothing() -> None:
    graph = capture(
        lambda x: x.view(2, 3).expand(2, 3).contiguous().permute(0, 1).to(torch.float32)[:, 0:3] + 1, torch.randn(2, 3)
    )
    assert [n.op for n in graph.nodes] == ["map"]
