"""Faults found by running odd models through the C runtime against eager torch; each case once failed."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.export import Dim

import trivet


class Net(nn.Module):
    """A function as a module with buffers."""

    def __init__(self, f: Callable[..., Any], buffers: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.f = f
        for name, t in buffers.items():
            self.register_buffer(name, t)

    def forward(self, *args: torch.Tensor) -> Any:
        return self.f(self, *args)


def run(f: Callable[..., Any], calls: Sequence[tuple[torch.Tensor, ...]], shapes: Any = None,
        **buffers: torch.Tensor) -> None:  # fmt: skip
    """Exports f with the first call's arguments; all calls, twice with a reset between, must give eager's results."""
    model = Net(f, buffers).eval()
    eager = copy.deepcopy(model)
    program = trivet.export(model, calls[0], dynamic_shapes=None if shapes is None else (shapes,))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.trv"
        program.save(path)
        net = trivet.load(path)
    for _ in range(2):
        twin = copy.deepcopy(eager)
        for args in calls:
            torch.testing.assert_close(net(*args), twin(*args), atol=1e-5, rtol=1e-5, equal_nan=True)
        net.reset()


def refused(f: Callable[..., Any], *args: torch.Tensor, match: str, **buffers: torch.Tensor) -> None:
    with pytest.raises(trivet.Error, match=match):
        trivet.export(Net(f, buffers), args)


# ---- complex numbers ----------------------------------------------------------------------------------------------------
def test_rope_table_of_complex_numbers() -> None:
    def f(m: Any, x: torch.Tensor) -> Any:
        c = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(c * m.table[: x.shape[1], None]).flatten(-2)

    table = torch.polar(torch.ones(16, 4), torch.randn(16, 4))
    sizes = (5, 2, 16)
    run(f, [(torch.randn(2, n, 3, 8),) for n in sizes], ({1: Dim("t", min=2, max=16)},), table=table)


def test_complex_constant_in_a_branch_and_as_an_attribute() -> None:
    table = torch.randn(3, dtype=torch.complex64)

    def f(m: Any, x: torch.Tensor) -> Any:
        y = torch.cond(x.sum() > 0, lambda t: torch.view_as_real(torch.view_as_complex(t) * m.c), lambda t: t * 2, (x,))
        return y, torch.view_as_real(m.attribute * x[:, 0])

    model = Net(f, {"c": table})
    model.attribute = table.conj() * 2
    x = torch.randn(3, 2).abs()
    net = trivet.load(trivet.export(model, (x,)))
    for args in (x, -x):
        torch.testing.assert_close(net(args), model(args))


def test_products_of_complex_numbers() -> None:
    def f(m: Any, x: torch.Tensor) -> Any:
        c = m.c
        zs = (c[None] @ c[:, None], c @ c, torch.einsum("i,i->i", c, c), 1 / c, torch.where(x > 0, c, 0j), m.d @ c)
        return [torch.view_as_real(z) for z in zs]

    run(f, [(torch.randn(3),)], c=torch.randn(3, dtype=torch.complex64), d=torch.randn(2, 3, dtype=torch.complex64))


def test_complex_outputs_and_states_are_refused() -> None:
    refused(lambda m, x: torch.view_as_complex(x), torch.randn(3, 2), match="a complex tensor is returned")
    refused(lambda m, x: m.c.mul_(1j).abs() * x, torch.randn(3), match="the state 'c' is complex",
            c=torch.randn(3, dtype=torch.complex64))  # fmt: skip


# ---- numbers and data-dependent sizes -----------------------------------------------------------------------------------
def test_item_that_is_negative() -> None:
    def f(m: Any, x: torch.Tensor) -> Any:
        n = x.sum().item()
        return (
            n,
            n * 2,
            -n,
            abs(n),
            n // 2,
            n % 3,
            max(n, 3),
            x + n,
            x.float() * n,
            torch.full((2,), n),
            x == n,
            x.clamp(max=n),
        )

    run(f, [(torch.tensor([1, -5]),), (torch.tensor([-(2**40), 3]),), (torch.tensor([2**40, 3]),)])


def test_item_of_a_bool() -> None:
    run(lambda m, x: (x[0] > 0).item(), [(torch.tensor([1, -5]),), (torch.tensor([-1, 5]),)])


def test_slices_around_a_number_of_the_data() -> None:
    def f(m: Any, x: torch.Tensor, at: torch.Tensor) -> Any:
        k = at.item()
        return x[:k], x[k:] * 2, k

    x = torch.randn(5, 2)
    run(f, [(x, torch.tensor(k)) for k in (3, 0, 5)])


def test_positions_found_in_an_input_without_bound() -> None:
    calls = [(x,) for x in (torch.randn(5), torch.ones(3000), torch.randn(33))]
    run(lambda m, x: (x[x > 0] * 2, (x > 0).nonzero() + 1), calls, ({0: Dim.DYNAMIC},))


def test_sizes_of_the_data_need_a_bound() -> None:
    def f(m: Any, n: torch.Tensor) -> Any:
        k: Any = n.item()
        torch._check(k <= 100)  # type: ignore[no-untyped-call]
        return torch.arange(k), torch.zeros(k, 2)

    run(f, [(torch.tensor(3),), (torch.tensor(0),), (torch.tensor(50),)])
    refused(lambda m, n: torch.arange(n.item()), torch.tensor(3), match="no upper bound")


def test_attention_without_queries() -> None:
    n, k = Dim("n", min=0, max=5), Dim("k", min=1, max=5)
    calls = [(torch.randn(1, 2, a, 4), torch.randn(1, 2, b, 4)) for a, b in ((3, 5), (0, 5), (2, 1))]
    run(lambda m, q, k: F.scaled_dot_product_attention(q, k, k), calls, ({2: n}, {2: k}))


def test_attention_over_a_dynamic_depth() -> None:
    calls = [(torch.randn(1, 2, 3, d),) for d in (4, 2, 9)]
    run(lambda m, x: F.scaled_dot_product_attention(x, x, x), calls, ({3: Dim("d", min=2, max=9)},))


# ---- operators ----------------------------------------------------------------------------------------------------------
def test_writes_into_diagonals() -> None:
    def f(m: Any, x: torch.Tensor, v: torch.Tensor) -> Any:
        y = x.clone()
        y.diagonal(1).mul_(2)
        y.fill_diagonal_(3)
        batch = torch.stack([x, x + 1], 1)
        return (y, x.diagonal_scatter(v), x.diagonal_scatter(v[:2], -1), x.t().diagonal_scatter(v, -1),
                batch.diagonal_scatter(torch.stack([v, v + 1]), 0, 0, 2))  # fmt: skip

    run(f, [(torch.randn(3, 4), torch.randn(3))] * 2)


def test_logcumsumexp() -> None:
    def f(m: Any, x: torch.Tensor) -> Any:
        return x.logcumsumexp(0), x.logcumsumexp(1), (x * 100).logcumsumexp(1), (x - torch.inf).logcumsumexp(1)

    run(f, [(torch.randn(4, n),) for n in (6, 2, 33)], ({1: Dim("n", min=2, max=33)},))


def test_antialiased_resizing() -> None:
    def f(m: Any, x: torch.Tensor) -> Any:
        return (F.interpolate(x, (3, 9), mode="bilinear", antialias=True),
                F.interpolate(x, (13, 4), mode="bilinear", antialias=True, align_corners=True),
                F.interpolate(x, (3, 2), mode="bicubic", antialias=True),
                F.interpolate(x, scale_factor=0.4, mode="bilinear", antialias=True))  # fmt: skip

    run(f, [(torch.randn(2, 3, 8, 7),)])


def test_more_than_eight_axes_are_refused() -> None:
    refused(lambda m, x: x.reshape(1, 2, 1, 2, 1, 2, 1, 2, 1).transpose(1, 7).flatten(), torch.randn(16),
            match="9 axes, at most 8")  # fmt: skip


def test_convolutions_that_share_a_bias_in_front_of_batch_norms() -> None:
    convs = nn.Sequential(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)).eval()
    with torch.no_grad():
        for name, t in convs.state_dict().items():
            if name in ("0.bias", "2.bias"):
                t.zero_()
            elif name.endswith("running_mean"):
                t.normal_()
    x = torch.randn(1, 2, 3, 3)
    torch.testing.assert_close(trivet.load(trivet.export(convs, (x,)))(x), convs(x), atol=1e-5, rtol=1e-5)
