"""From torch's symbolic sizes to dimensions: every kind of expression, compared with sympy on numbers."""

from __future__ import annotations

import random

import pytest
import sympy
import torch
from capture_net import Net, check_like_eager
from torch import nn
from torch.export import Dim
from torch.utils._sympy import functions as F

from trivet.error import Error
from trivet.ir.dim import Dim as Size
from trivet.ir.dim import evaluate
from trivet.symbols import dim_of, dim_of_expr

A, B = sympy.Symbol("a", integer=True, positive=True), sympy.Symbol("b", integer=True, positive=True)
CASES = {
    "sum": A + 2 * B - 3,
    "product": (A + 1) * (B - A) * 2,
    "power": (A + 1) ** 2,
    "floor": F.FloorDiv(A + B, 3),
    "floor by a size": F.FloorDiv(A * B + 1, B),
    "ceil": F.CeilDiv(A, 4),
    "mod": F.Mod(A, 3),
    "python mod": F.PythonMod(A - 7, 3),
    "modular": F.ModularIndexing(A, 2, 5),
    "clean": F.CleanDiv(6 * A, 3),
    "extremes": F.Max(1, F.Min(A, B - 2, 5)),
    "floor of quotient": F.FloorToInt(F.IntTrueDiv(A + 3, 2)),
    "ceil of quotient": F.CeilToInt(F.IntTrueDiv(A - 1, 2)) + 1,
    "trunc of scale": F.TruncToInt(F.ToFloat(A) * sympy.Float(1.5)),
    "nested": F.FloorDiv(F.FloorDiv(A - 3, 2) - 3, 2) * B,
    "natural power": F.PowByNatural(A, sympy.Integer(2)),
}


@pytest.mark.parametrize("name", CASES)
def test_expression(name):
    expr, rng = CASES[name], random.Random(0)
    got = dim_of_expr(expr)
    for _ in range(50):
        a, b = rng.randint(1, 200), rng.randint(1, 50)
        want = int(expr.subs({A: a, B: b}))
        assert (evaluate(got, {"a": a, "b": b}) if isinstance(got, Size) else got) == want, (a, b, got)


@pytest.mark.parametrize("scale", [1.5, 0.25, 2.0, 1 / 3, 1.1, 0.7, 2.3, 3.3, 0.1, 1e-3, 1.7])
def test_scales_are_as_in_floating_point_or_refused(scale):
    try:
        scaled = dim_of_expr(F.FloorToInt(F.ToFloat(A) * sympy.Float(scale)))
    except Error as e:
        assert scale == 2.3 or not (scale * 8).is_integer(), e
        return
    for n in range(1, 5000):
        assert evaluate(scaled, {"a": n}) == int(float(n) * scale), n


def test_numbers_and_what_is_refused():
    assert dim_of(7) == 7 and dim_of_expr(sympy.Integer(4)) == 4
    with pytest.raises(Error, match="sizes of trivet cannot express"):
        dim_of_expr(F.OpaqueUnaryFn_sqrt(A))
    with pytest.raises(Error, match="rounds irregularly"):
        dim_of_expr(F.FloorToInt(F.ToFloat(A) * sympy.Float(2**0.5)))


class Fn(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, x):
        return self.f(x)


def test_squeeze_never_meets_a_one():
    shapes = ({0: Dim("n", min=1, max=8)},)
    net = check_like_eager(Fn(lambda x: x.squeeze()), (torch.randn(4, 3),), (torch.randn(2, 3),), shapes=shapes)
    with pytest.raises(Error, match=r"2\.\.8, got 1"):
        net(torch.randn(1, 3))
    net = check_like_eager(Fn(lambda x: x.unsqueeze(-1).squeeze(-1)), (torch.randn(4, 3),), (torch.randn(1, 3),),
                           shapes=shapes)  # fmt: skip


def test_nonzero_is_bounded_by_its_input():
    net = Net({"forward": (Fn(lambda x: x[x > 0]).eval(), (torch.randn(4, 3),))},
              {"forward": ({0: Dim("n", min=1, max=8)},)})  # fmt: skip
    (data,) = [s for s in net.graph.symbols.values() if s.data]
    assert data.max == 24
