"""Real parameters to integers: exact rounding, ranges, and what a kernel makes of them."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.error import Error
from trivet.fbs.structs import BinaryKind
from trivet.fixed_point import (
    binary_multipliers,
    conv_multipliers,
    fixed_point,
    pool_multiplier,
    rnn_tables,
    softmax_table,
)

SCALES = st.floats(1e-12, 1e6)


@settings(max_examples=2000, deadline=None, derandomize=True)
@given(
    st.floats(0, 2.0**31, exclude_max=True) | st.floats(1e-30, 1e-9), st.sampled_from([(31, 62), (23, 62), (23, 40)])
)
def test_nearest(x: float, room: tuple[int, int]) -> None:
    bits, most = room
    if x >= 2.0**bits - 1:
        return
    m, s = fixed_point(x, bits, most)
    assert 0 <= m < 2**bits and 0 <= s <= most
    assert abs(Fraction(x) * 2**s - m) <= Fraction(1, 2)
    assert m >= 2 ** (bits - 1) or s == most or (m, s) == (0, 0)


def test_ends() -> None:
    assert fixed_point(0) == (0, 0) and fixed_point(5e-324) == (0, 0)
    assert fixed_point(1.0) == (2**30, 30) and fixed_point(0.75, bits=2) == (3, 2)
    assert fixed_point(math.nextafter(1.0, 0)) == (2**30, 30)  # rounded up to the next power of two
    assert fixed_point(2.0**31 - 1) == (2**31 - 1, 0)
    assert fixed_point(5 / 2**3, bits=2) == (2, 2)  # a tie goes to even
    assert fixed_point(2.0**-40) == (2**22, 62)
    for bad in (2.0**31, 2.0**31 - 0.25, math.inf, math.nan, -1e-9):
        with pytest.raises(Error):
            fixed_point(bad)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(SCALES, SCALES, SCALES)
def test_operands(a: float, b: float, y: float) -> None:
    """Each pair is within half a unit of its ratio, or refused for being too large."""

    def near(m: int, s: int, ratio: float) -> bool:
        return abs(math.ldexp(ratio, s) - m) <= 0.5 + 1e-6 and 0 <= m < 2**31 and 0 <= s <= 62

    try:
        table = conv_multipliers(a, np.array([b, a], np.float64), y)
        assert table.shape == (2, 2) and table.dtype == np.int32
        assert near(*map(int, table[:, 0]), a * b / y) and near(*map(int, table[:, 1]), a * a / y)
    except Error:
        assert max(a * b, a * a) / y > 2.0**31 - 1
    try:
        m, s = pool_multiplier(a, y)
        assert near(m, s, a / y) and m < 2**23 and s <= 40
    except Error:
        assert a / y > 2.0**23 - 1
    for kind in (BinaryKind.add, BinaryKind.sub):
        try:
            ma, mb, s = binary_multipliers(kind, a, b, y)
            assert near(ma, s, a / y) and near(mb, s, b / y)
            assert max(ma, mb) >= 2**30 or s == 62
        except Error:
            assert max(a, b) / y > 2.0**31 - 1
    try:
        m, zero, s = binary_multipliers(BinaryKind.mul, a, b, y)
        assert near(m, s, a * b / y) and zero == 0
    except Error:
        assert a * b / y > 2.0**31 - 1


def test_bad_scales() -> None:
    for bad in (0.0, -1.0, math.nan, math.inf):
        for call in (lambda: pool_multiplier(bad, 1.0), lambda: pool_multiplier(1.0, bad), lambda: softmax_table(bad),
                     lambda: conv_multipliers(1.0, np.array([1.0, bad]), 1.0),
                     lambda: binary_multipliers(BinaryKind.add, 1.0, bad, 1.0)):  # fmt: skip
            with pytest.raises(Error, match="scale"):
                call()


def test_tables() -> None:
    t = softmax_table(0.1)
    assert t.dtype == np.int32 and t.shape == (256,) and t[0] == 2**23 and t[10] == round(2**23 * math.exp(-1))
    assert softmax_table(100.0)[1:].max() == 0
    sigmoid, tanh = rnn_tables()
    assert rnn_tables().dtype == np.int16
    assert sigmoid[256] == 2**14 and tanh[256] == 0 and tanh[512] == 32767 and tanh[0] == -32768
    assert sigmoid[288] == round(2**15 / (1 + math.exp(-1))) and tanh[288] == round(2**15 * math.tanh(1))
