"""Normalisation and attention written out are found, with the same results; look-alikes are left alone."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.export import Dim

from trivet.frontend import capture
from trivet.ir.evaluate import evaluate
from trivet.ir.graph import Graph
from trivet.pipeline import PASSES, Context, run_passes

MINE = PASSES[: PASSES.index("partition")]


class Net(nn.Module):
    def __init__(self, f: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.f = f
        self.w, self.b = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))
        self.register_buffer("tril", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16))
        self.register_buffer("hole", torch.ones(5, 5).tril(-1))

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.f(self, *args)


def lower(f: Callable[..., torch.Tensor], *args: torch.Tensor, dynamic: object = None, more: tuple = ()) -> Graph:
    net = Net(f).eval()
    shapes = None if dynamic is None else {"forward": {"args": dynamic}}
    module = capture({"forward": (net, args)}, shapes)
    run_passes(module, Context(), MINE)
    graph = module.entries["forward"]
    for xs in (args, *more):
        with torch.no_grad():
            want = net(*xs)
        half = want.dtype == torch.float16
        torch.testing.assert_close(
            evaluate(graph, list(xs))[0], want, rtol=4e-3 if half else 1e-4, atol=4e-3 if half else 1e-5, equal_nan=True
        )
    return graph


def ops_of(g: Graph) -> list[str]:
    return [n.op for n in g.nodes]


X = torch.randn(3, 5, 8)


def layer(m: Net, x: torch.Tensor) -> torch.Tensor:
    u = x.mean(-1, keepdim=True)
    s = (x - u).pow(2).mean(-1, keepdim=True)
    return m.w * ((x - u) / torch.sqrt(s + 1e-12)) + m.b


def layer_var(m: Net, x: torch.Tensor) -> torch.Tensor:
    return (x - x.mean(-1, True)) * torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-5) * m.w + m.b


def layer_two_axes(m: Net, x: torch.Tensor) -> torch.Tensor:
    d = x - x.mean((1, 2), keepdim=True)
    return d / ((d * d).mean((1, 2), keepdim=True) + 1e-5).sqrt()


def rms(m: Net, x: torch.Tensor) -> torch.Tensor:
    dtype = x.dtype
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return m.w.to(dtype) * h.to(dtype)


def rms_div(m: Net, x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1).unsqueeze(-1) + 1e-6).sqrt() * m.w


@pytest.mark.parametrize(("f", "inputs"), [(layer, 3), (layer_var, 3), (layer_two_axes, 1), (rms, 2), (rms_div, 2)])
def test_norms(f: Callable[..., torch.Tensor], inputs: int) -> None:
    g = lower(f, X)
    assert ops_of(g) == ["norm"]
    assert sum(v is not None for v in g.nodes[0].inputs) == inputs


def test_rms_of_halves_reads_the_half() -> None:
    g = lower(rms, (torch.randn(3, 8) * 900).half())
    assert g.nodes[0].op == "norm" and g.nodes[0].inputs[0] is g.inputs[0]


def test_norm_of_dynamic_length() -> None:
    s = Dim("s", min=2, max=64)
    assert ops_of(lower(layer, X, dynamic=({1: s},), more=((torch.randn(3, 9, 8),),))) == ["norm"]


def unbiased(m: Net, x: torch.Tensor) -> torch.Tensor:
    return (x - x.mean(-1, True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-5)


def eps_outside(m: Net, x: torch.Tensor) -> torch.Tensor:
    d = x - x.mean(-1, True)
    return d / ((d * d).mean(-1, True).sqrt() + 1e-5)


def other_axis(m: Net, x: torch.Tensor) -> torch.Tensor:
    d = x - x.mean(1, keepdim=True)
    return d / ((d * d).mean(1, keepdim=True) + 1e-5).sqrt()


@pytest.mark.parametrize("f", [unbiased, eps_outside, other_axis])
def test_what_only_looks_like_a_norm(f: Callable[..., torch.Tensor]) -> None:
    assert "norm" not in ops_of(lower(f, X))


# ---- attention
Q, K, V = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 6)


def plain(m: Net, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (q @ k.transpose(-2, -1) / math.sqrt(8)).softmax(-1) @ v


def causal(m: Net, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    t = q.shape[2]
    s = (q @ k.transpose(-2, -1)) * 0.5
    return torch.softmax(s.masked_fill(m.tril[:, :, :t, :t] == 0, float("-inf")), -1) @ v


def causal_positions(m: Net, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    t = q.shape[2]
    s = q @ k.transpose(-2, -1) + torch.triu(torch.full((t, t), float("-inf")), 1)
    return torch.softmax(s, -1) @ v


def padding(m: Net, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    extended = (1.0 - keep[:, None, None, :].float()) * torch.finfo(torch.float32).min
    return torch.softmax(q @ k.transpose(-2, -1) * 0.3 + extended, -1) @ v


def hole(m: Net, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax((q @ k.transpose(-2, -1)).masked_fill(m.hole == 0, float("-inf")), -1) @ v


def any_mask(m: Net, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) + mask, -1) @ v


def with_weights(m: Net, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    p = (q @ k.transpose(-2, -1)).softmax(-1)
    return p @ v + p.sum()


def test_plain_attention() -> None:
    g = lower(plain, Q, K, V)
    assert ops_of(g) == ["attention"] and math.isclose(g.nodes[0].attrs.scale, 8**-0.5, rel_tol=1e-6)
    assert g.nodes[0].inputs[:3] == g.inputs


@pytest.mark.parametrize("f", [causal, causal_positions])
@pytest.mark.parametrize("dynamic", [False, True])
def test_causal_attention(f: Callable[..., torch.Tensor], dynamic: bool) -> None:
    t = Dim("t", min=2, max=15)
    more = ((Q.repeat(1, 1, 2, 1), K.repeat(1, 1, 2, 1), V.repeat(1, 1, 2, 1)),) if dynamic else ()
    g = lower(f, Q, K, V, dynamic=({2: t},) * 3 if dynamic else None, more=more)
    assert ops_of(g) == ["attention"] and g.nodes[0].attrs.causal and g.nodes[0].inputs[3] is None


def test_finite_mask_is_taken_in() -> None:
    g = lower(padding, Q, K, V, torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0]]))
    assert ops_of(g) == ["reshape", "map", "attention"]


def test_a_row_of_nothing_gives_nan() -> None:
    mask = torch.zeros(5, 5)
    mask[2] = -math.inf
    for g in (lower(hole, Q, K, V), lower(any_mask, Q, K, V, mask)):
        (a,) = (n for n in g.nodes if n.op == "attention")
        assert a.attrs.nan_rows


def test_weights_that_others_read_stay() -> None:
    assert "attention" not in ops_of(lower(with_weights, Q, K, V))


def test_repeated_heads_are_not_repeated() -> None:
    def f(m: Net, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (x[:, :, None].expand(2, 2, 2, 5, 8).reshape(2, 4, 5, 8) for x in (k, v))
        return torch.softmax(q @ k.transpose(2, 3) * 0.25, -1) @ v

    g = lower(f, Q, K[:, :2], K[:, 2:])
    assert g.nodes[-1].op == "attention" and g.nodes[-1].inputs[1].shape[1] == 2
    assert "expand" not in ops_of(g)


def test_bias_and_scale_move_into_the_projection() -> None:
    class M(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x) * 0.125
            y = 0.5 * y * (1 + torch.tanh(0.7978845608028654 * (y + 0.044715 * y**3)))
            return x + self.b(y)

    module = capture({"forward": (M().eval(), (X,))})
    run_passes(module, Context(), MINE)
    g = module.entries["forward"]
    assert ops_of(g) == ["matmul", "matmul"]
    assert g.nodes[0].attrs.act.name == "gelu_tanh" and g.nodes[1].inputs[3] is g.inputs[0]
