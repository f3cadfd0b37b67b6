"""Attention in the spellings of public models becomes one kernel, with the results of eager torch."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trivet.frontend import capture
from trivet.ir.evaluate import evaluate
from trivet.ir.graph import Graph
from trivet.pipeline import PASSES, Context, run_passes

MINE = PASSES[: PASSES.index("partition")]
B, S, D, H = 2, 6, 32, 4


class Net(nn.Module):
    """f(self, ...) with projections, a causal buffer and a table of relative positions."""

    def __init__(self, f: Callable[..., Tensor], groups: int = H) -> None:
        super().__init__()
        self.f, self.groups = f, groups
        self.q, self.o = nn.Linear(D, D), nn.Linear(D, D)
        self.k, self.v = nn.Linear(D, D // H * groups), nn.Linear(D, D // H * groups)
        self.qkv = nn.Linear(D, 3 * D)
        self.register_buffer("bias", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16))
        self.relative = nn.Embedding(8, H)

    def forward(self, *args: Tensor) -> Tensor:
        return self.f(self, *args)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(f(x).view(B, -1, g, D // H).transpose(1, 2)
                     for f, g in ((self.q, H), (self.k, self.groups), (self.v, self.groups)))  # type: ignore[return-value]  # fmt: skip

    def out(self, y: Tensor) -> Tensor:
        return self.o(y.transpose(1, 2).reshape(B, -1, D))


def lower(net: nn.Module, *args: Tensor, more: tuple[tuple[Tensor, ...], ...] = ()) -> Graph:
    module = capture({"forward": (net.eval(), args)}, None)
    run_passes(module, Context(), MINE)
    graph = module.entries["forward"]
    for xs in (args, *more):
        with torch.no_grad():
            want = net(*xs)
        got = evaluate(graph, list(xs))
        for g, w in zip(got, want if isinstance(want, tuple) else (want,), strict=True):
            torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5, equal_nan=True)
    return graph


def kernels(g: Graph) -> list[str]:
    views = ("permute", "reshape", "slice", "expand", "concat")
    return [n.op for n in g.nodes if n.op not in views]


X = torch.randn(B, S, D)
PADDING = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0]])
NO_ROW = (torch.randn(B, S, D), PADDING)


def bert(m: Net, x: Tensor, mask: Tensor) -> Tensor:
    q, k, v = m.heads(x)
    s = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(D // H)
    s = s + (1.0 - mask[:, None, None, :].float()) * torch.finfo(torch.float32).min
    return m.out(F.dropout(F.softmax(s, dim=-1), 0.1, m.training) @ v)


def distilbert(m: Net, x: Tensor, mask: Tensor) -> Tensor:
    q, k, v = m.heads(x)
    s = torch.matmul(q / math.sqrt(D // H), k.transpose(2, 3))
    dead = (mask == 0).view(B, 1, 1, S).expand_as(s)
    return m.out(torch.softmax(s.masked_fill(dead, torch.finfo(s.dtype).min), -1) @ v)


def any_mask(m: Net, x: Tensor, mask: Tensor) -> Tensor:
    q, k, v = m.heads(x)
    s = q @ k.transpose(-1, -2) + torch.where(mask[:, None, None] > 0, 0.0, -math.inf)
    return m.out(torch.softmax(s, -1) @ v)


def bool_mask(m: Net, x: Tensor, mask: Tensor) -> Tensor:
    q, k, v = m.heads(x)
    s = (q @ k.transpose(-1, -2) * 0.3).masked_fill(mask[:, None, None] == 0, -math.inf)
    return m.out(torch.softmax(s, -1, dtype=torch.float32).to(q.dtype) @ v)


def gpt2(m: Net, x: Tensor) -> Tensor:
    q, k, v = (t.view(B, S, H, D // H).transpose(1, 2) for t in m.qkv(x).split(D, dim=2))
    s = q @ k.transpose(-1, -2) / torch.full([], v.size(-1) ** 0.5)
    s = torch.where(m.bias[:, :, :S, :S].bool(), s, torch.full([], torch.finfo(s.dtype).min))
    return m.out(torch.softmax(s, -1).type(v.dtype) @ v)


def nanogpt(m: Net, x: Tensor) -> Tensor:
    q, k, v = (t.view(B, S, H, D // H).transpose(1, 2) for t in m.qkv(x).split(D, dim=2))
    s = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    return m.out(F.softmax(s.masked_fill(m.bias[:, :, :S, :S] == 0, float("-inf")), dim=-1) @ v)


def timm(m: Net, x: Tensor) -> Tensor:
    q, k, v = m.qkv(x).reshape(B, S, 3, H, D // H).permute(2, 0, 3, 1, 4).unbind(0)
    a = (q * (D // H) ** -0.5) @ k.transpose(-2, -1)
    return m.out(a.softmax(dim=-1) @ v)


def t5(m: Net, x: Tensor) -> Tensor:
    q, k, v = m.heads(x)
    i = torch.arange(S)
    bias = m.relative((i[None] - i[:, None]).abs()).permute(2, 0, 1).unsqueeze(0)
    s = torch.matmul(q, k.transpose(3, 2)) + bias
    return m.out(F.softmax(s.float(), -1).type_as(s) @ v)


def clip(m: Net, x: Tensor) -> Tensor:
    """Heads go into the batch; both operands are scaled."""
    q, k, v = (t.reshape(B * H, S, D // H) for t in m.heads(x))
    c = (D // H) ** -0.25
    return m.out((torch.bmm(q * c, (k * c).transpose(1, 2)).softmax(-1) @ v).view(B, H, S, D // H))


def einsum(m: Net, x: Tensor) -> Tensor:
    q, k, v = (f(x).view(B, S, H, D // H) for f in (m.q, m.k, m.v))
    a = torch.softmax(torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.25, -1)
    return m.o(torch.einsum("bhqk,bkhd->bqhd", a, v).reshape(B, S, D))


def baddbmm(m: Net, x: Tensor) -> Tensor:
    q, k, v = (t.reshape(B * H, S, D // H) for t in m.heads(x))
    mask = torch.zeros(S, S).masked_fill(torch.ones(S, S).triu(1).bool(), -math.inf).expand(B * H, S, S)
    s = torch.baddbmm(mask, q, k.transpose(-2, -1), beta=1.0, alpha=0.35)
    return m.out(torch.bmm(F.softmax(s, dim=-1), v).view(B, H, S, D // H))


def llama(m: Net, x: Tensor) -> Tensor:
    q, k, v = m.heads(x)
    r = H // m.groups
    k, v = (t[:, :, None].expand(B, m.groups, r, S, D // H).reshape(B, H, S, D // H) for t in (k, v))
    mask = torch.full((S, S), torch.finfo(x.dtype).min).triu(1)
    s = torch.matmul(q, k.transpose(2, 3)) * (D // H) ** -0.5 + mask
    return m.out(F.softmax(s, dim=-1, dtype=torch.float32).to(q.dtype) @ v)


def repeated(m: Net, x: Tensor) -> Tensor:
    q, k, v = m.heads(x)
    k, v = (t.repeat_interleave(H // m.groups, dim=1) for t in (k, v))
    return m.out(torch.softmax(q @ k.mT * 0.35, -1) @ v)


def sdpa(m: Net, x: Tensor) -> Tensor:
    q, k, v = m.heads(x)
    return m.out(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=m.groups != H))


MASKED = [bert, distilbert, any_mask, bool_mask]
OTHERS = [gpt2, nanogpt, timm, t5, clip, einsum, baddbmm, sdpa]


@pytest.mark.parametrize("f", MASKED)
def test_masks_that_may_leave_nothing(f: Callable[..., Tensor]) -> None:
    g = lower(Net(f), X, torch.ones(B, S, dtype=torch.int64), more=(NO_ROW,))
    assert "softmax" not in kernels(g) and kernels(g).count("attention") == 1
    assert kernels(g).count("matmul") == 2, "queries, keys and values are one product"


@pytest.mark.parametrize("f", OTHERS)
def test_spellings(f: Callable[..., Tensor]) -> None:
    g = lower(Net(f), X)
    most = ["matmul", "attention", "matmul"]
    found = kernels(g)
    assert found == most
    (a,) = (n for n in g.nodes if n.op == "attention")
    assert a.attrs.causal == (f in (gpt2, nanogpt, baddbmm, sdpa)) and not a.attrs.nan_rows


@pytest.mark.parametrize("f", [llama, repeated, sdpa])
def test_grouped_queries(f: Callable[..., Tensor]) -> None:
    g = lower(Net(f, groups=2), X)
    (a,) = (n for n in g.nodes if n.op == "attention")
    assert a.inputs[1].shape[1] == 2 and kernels(g) == ["matmul", "attention", "matmul"]


@pytest.mark.parametrize("weights", [False, True])
def test_multihead_attention(weights: bool) -> None:
    class Mha(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.MultiheadAttention(D, H, batch_first=True)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.a(x, x, x, key_padding_mask=mask == 0, need_weights=weights)[0]

    half = torch.ones(B, S, dtype=torch.int64).tril()
    g = lower(Mha(), X, torch.ones(B, S, dtype=torch.int64), more=((X, half),))
    assert "softmax" not in kernels(g) and kernels(g).count("matmul") == 2


@pytest.mark.parametrize("before", [False, True])
def test_cache(before: bool) -> None:
    """Keys and values behind a cache are read where they lie; only the cache's new row is written."""

    def step(m: Net, x: Tensor, past_k: Tensor, past_v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if before:  # the sequence in front of the heads
            q, k, v = (f(x).view(B, 1, g, D // H) for f, g in ((m.q, H), (m.k, 2), (m.v, 2)))
            kk, vv = torch.cat([past_k, k], 1).transpose(1, 2), torch.cat([past_v, v], 1).transpose(1, 2)
            q = q.transpose(1, 2)
        else:
            q, k, v = m.heads(x)
            kk, vv = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
        kk, vv = (t[:, :, None].expand(B, 2, H // 2, S, D // H).reshape(B, H, S, D // H) for t in (kk, vv))
        w = torch.softmax(q @ kk.transpose(2, 3) / math.sqrt(D // H) + mask, -1)
        return m.out(w @ vv), k, v

    shape = (B, S - 1, 2, D // H) if before else (B, 2, S - 1, D // H)
    args = (torch.randn(B, 1, D), torch.randn(shape), torch.randn(shape))
    mask = torch.zeros(B, 1, 1, S)
    dead = mask.clone()
    dead[0, ..., :3] = dead[1] = -math.inf
    g = lower(Net(step, groups=2), *args, mask, more=((*args, dead),))
    assert sorted(kernels(g)) == ["attention", "matmul", "matmul"] and "concat" not in [n.op for n in g.nodes]
    (a,) = (n for n in g.nodes if n.op == "attention")
    assert a.attrs.nan_rows and len(a.inputs) == 6


def test_cache_that_is_an_output_is_made() -> None:
    def step(m: Net, x: Tensor, past: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = m.heads(x)
        kk, vv = torch.cat([past, k], 2), torch.cat([past * 2, v], 2)
        return m.out(F.scaled_dot_product_attention(q, kk, vv)), kk, vv

    g = lower(Net(step), torch.randn(B, 1, D), torch.randn(B, H, 3, D // H))
    (a,) = (n for n in g.nodes if n.op == "attention")
    assert a.inputs[1].shape[-2] == 4 and a.inputs[4:] in ([], [None, None])
