"""qmatmul and qgather against their definitions: stored operands in exact integers, rows quantised while running bit for bit in
float32, weights of 8 and 4 bits plain and packed, groups, offsets, batches, layouts, tiles, every ISA."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from heavy import isa_levels, struct
from hypothesis import given, settings
from hypothesis import strategies as st
from quant_product import ENDS, F16, F32, I8, I16, I32, finish, multipliers, numbers, packed, result, tensor, wrap

from trivet import native
from trivet.error import Error
from trivet.fbs.structs import Act, Op

U8 = torch.uint8
LAYOUTS = ("dense", "dense", "gaps", "flip")
BIG = np.float32(np.finfo(np.float32).max)


def qmatmul_attrs(**fields: Any) -> Any:
    return struct("QmatmulAttrs", **{"bits": 8, **fields})


def forms(b: torch.Tensor, fields: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Attributes and right side: plain, and packed where it has one matrix."""
    found = [(qmatmul_attrs(**fields), b)]
    if b.dim() == 2 and b.numel():
        attrs = qmatmul_attrs(**fields, packed=1)
        found.append((attrs, packed(Op.qmatmul, attrs, b)))
    return found


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data())
def test_stored(data: st.DataObject) -> None:
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))

    def pick(*options: Any) -> Any:
        return draw(st.sampled_from(options))

    m, n = pick(0, 1, 1, 2, 5, 33, 70), pick(0, 1, 3, 16, 17, 33, 64, 65, 130)
    k = pick(0, 1, 2, 3, 5, 7, 8, 16, 31, 64, 130, 700)
    a_dtype, y_dtype, bits = pick(I8, I8, I16), pick(I8, I16, F32), pick(8, 8, 4)
    batch = pick((), (), (2,), (2, 3))
    a_batch, b_batch = pick(batch, (1,) * len(batch)), pick((), (), batch)
    vector = pick(0, 0, 0, 1)
    lo, hi = ENDS[a_dtype]
    a_zero, b_zero = pick(0, lo, hi, 7), pick(0, 15, 8) if bits == 4 else pick(0, -128, 127, 5)
    a = numbers(rng, (k,) if vector else (*a_batch, m, k), lo, hi)
    b = numbers(rng, (*b_batch, k, n), *((0, 15) if bits == 4 else (-128, 127)))
    sums = (a - a_zero) @ (b - b_zero)
    bias = rng.integers(-(1 << 31), 1 << 31, n) >> pick(0, 10, 20) if pick(0, 1) else None
    sums = sums if bias is None else sums + bias
    one = pick(0, 0, 1)
    fields: dict[str, Any] = {"bits": bits, "a_zero": a_zero, "b_zero": b_zero}
    if y_dtype in ENDS:
        scale = multipliers(rng, 1 if one else n, float(np.abs(wrap(sums, a_dtype)).mean()) if sums.size else 1.0)
        ends = ENDS[y_dtype]
        fields["y_zero"] = pick(0, *ends, 3)
        fields["lo"], fields["hi"] = pick(ends, ends, (fields["y_zero"], ends[1]), (5, 5))
    else:
        scale = (rng.random(1 if one else n) * 1e-3).astype(np.float32)
    want = finish(sums, a_dtype, y_dtype, scale, fields.get("y_zero", 0), fields.get("lo", 0), fields.get("hi", 0))
    xs = tensor(a, a_dtype, pick(*LAYOUTS))
    bs = tensor(b, U8 if bits == 4 else I8, pick(*LAYOUTS))
    sc, bi = tensor(scale, I32 if y_dtype in ENDS else F32), None if bias is None else tensor(bias, I32)
    isa, tiles, layout = pick(*isa_levels(Op.qmatmul)), pick(0, 1, 3, 8), pick(*LAYOUTS)
    for attrs, right in forms(bs, fields):
        got = result(Op.qmatmul, [xs, right, sc, bi], want.shape, y_dtype, attrs, layout, isa=isa, tiles=tiles)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [I8, I16])
def test_large(dtype: torch.dtype, bits: int) -> None:
    """Several passes along K, strips and blocks."""
    rng = np.random.default_rng(1)
    lo, hi = ENDS[dtype]
    for m, k, n in ((1, 20000, 70), (40, 3000, 200), (65, 530, 17)):
        a, b = rng.integers(lo, hi + 1, (m, k)), rng.integers(*((0, 16) if bits == 4 else (-128, 128)), (k, n))
        sums = (a - 3) @ (b - 8)
        scale = multipliers(rng, n, float(np.abs(sums).mean()))
        want = finish(sums, dtype, dtype, scale, -1, lo, hi)
        fields = {"bits": bits, "a_zero": 3, "b_zero": 8, "y_zero": -1, "lo": lo, "hi": hi}
        for attrs, right in forms(tensor(b, U8 if bits == 4 else I8), fields):
            for tiles in (1, 7):
                got = result(
                    Op.qmatmul, [tensor(a, dtype), right, tensor(scale, I32)], (m, n), dtype, attrs, tiles=tiles
                )
                np.testing.assert_array_equal(got, want)


def test_sums_of_bytes_wrap_and_sums_of_words_do_not() -> None:
    k = 70000
    for dtype, zero in ((I8, 127), (I16, 32767)):
        a, b = np.full((2, k), ENDS[dtype][0]), np.full((k, 3), -128)
        sums = (a - zero) @ (b - 127)
        assert abs(int(sums.max())) > 1 << 31
        for attrs, right in forms(tensor(b, I8), {"a_zero": zero, "b_zero": 127}):
            got = result(Op.qmatmul, [tensor(a, dtype), right, tensor(np.ones(1), F32)], (2, 3), F32, attrs)
            np.testing.assert_array_equal(got, wrap(sums, dtype).astype(np.float32))


# ---- real left side -----------------------------------------------------------------------------------------------------
def half_even(x: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(np.nan_to_num(x, nan=0.0)), -(1 << 30), 1 << 30).astype(np.int64)


def quantised_rows(a: np.ndarray, dynamic: int) -> tuple[np.ndarray, np.ndarray]:
    """(q - z)[M, K] and r[M, 1], in float32 step by step."""
    with np.errstate(all="ignore"):
        clean = np.nan_to_num(a, nan=0.0, posinf=np.inf, neginf=-np.inf).astype(np.float32)
        least = np.minimum(clean.min(-1, keepdims=True, initial=0), np.float32(0))
        most = np.maximum(clean.max(-1, keepdims=True, initial=0), np.float32(0))
        if dynamic == 1:
            amax = np.minimum(np.maximum(-least, most), BIG)
            q = np.clip(half_even(a * (np.float32(127) / amax)), -127, 127)
            return np.where(amax == 0, 0, q), amax / np.float32(127)
        r = np.maximum((most - least) / np.float32(255), np.float32(2.0**-23))
        z = np.clip(-128 - half_even(least / r), -128, 127)
        return np.clip(half_even(a * (np.float32(1) / r)) + z, -128, 127) - z, r


def grouped(x: np.ndarray, group: int, k: int) -> np.ndarray:
    return np.repeat(x, group, 0)[:k] if group else np.broadcast_to(x, (k, *x.shape))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.data())
def test_real(data: st.DataObject) -> None:
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))

    def pick(*options: Any) -> Any:
        return draw(st.sampled_from(options))

    m, n = pick(0, 1, 1, 2, 5, 33, 40), pick(1, 3, 16, 17, 33, 64, 65, 130)
    k = pick(0, 1, 2, 3, 7, 8, 9, 16, 31, 32, 64, 100, 130, 700)
    bits, dynamic, group = pick(8, 4, 4), pick(0, 1, 2), pick(0, 8, 16, 32, 64, 128)
    batch = pick((), (), (2,), (2, 3))
    lead = () if pick(0, 0, 0, 1) else (*batch, m)
    b_batch = pick((), (), batch) if lead else ()
    a = rng.standard_normal((*lead, k)).astype(np.float32) * np.float32(10.0 ** rng.integers(-6, 6))
    if dynamic and pick(0, 0, 1):
        odd = np.array([0.0, np.nan, 1e-40, 3e38, -0.0] + ([np.inf, -np.inf] if dynamic == 1 else []), np.float32)
        a = np.where(rng.random(a.shape) < 0.3, rng.choice(odd, a.shape), a)
    if dynamic and pick(0, 0, 1):  # onto ties
        with np.errstate(over="ignore"):
            a = (np.round(a * 4) / 2).astype(np.float32)
    b_zero = pick(0, 15, 8) if bits == 4 else pick(0, 0, -128, 127, 5)
    b = numbers(rng, (*b_batch, k, n), *((0, 15) if bits == 4 else (-128, 127)))
    real = pick(F32, F16)
    shape = (-(-k // group), n) if group else pick((n,), (1,))
    cast = np.float16 if real == F16 else np.float32
    scale = (rng.random(shape) * 0.1).astype(cast)
    offset = rng.standard_normal(shape).astype(cast) if pick(0, 0, 1) else None
    bias = rng.standard_normal(n).astype(np.float32) if pick(0, 1) else None
    fields: dict[str, Any] = {"bits": bits, "b_zero": b_zero, "dynamic": dynamic, "group": group}
    s, o = scale.astype(np.float32), None if offset is None else offset.astype(np.float32)
    if dynamic:
        q, r = quantised_rows(a, dynamic)
        total = np.zeros((*np.broadcast_shapes(lead[:-1], b_batch), *lead[-1:], n), np.float32)
        with np.errstate(all="ignore"):
            for g in range(-(-k // group) if group else min(k, 1)):
                at = slice(g * group, min((g + 1) * group, k)) if group else slice(None)
                sg, og = (s[g], None if o is None else o[g]) if group else (s, o)
                total = total + (q[..., at] @ (b[..., at, :] - b_zero)).astype(np.float32) * sg
                if og is not None:
                    total = total + q[..., at].sum(-1, keepdims=True).astype(np.float32) * og
            want = total * r
            want = want if bias is None else want + bias
        near = None
    else:
        w = (b - b_zero) * grouped(s.astype(np.float64), group, k)
        w = w if o is None else w + grouped(o.astype(np.float64), group, k)
        want, near = a.astype(np.float64) @ w, np.abs(a).astype(np.float64) @ np.abs(w)
        if bias is not None:
            want, near = want + bias, near + np.abs(bias)
    if pick(0, 0, 1):
        fields |= {"act": Act.clamp, "lo": -0.75, "hi": 3.0}
        want = np.clip(want, -0.75, 3.0)
    ins = [tensor(x, t) if x is not None else None for x, t in ((scale, real), (bias, F32), (offset, real))]
    xs = tensor(a, F32, pick(*LAYOUTS))
    bs = tensor(b, U8 if bits == 4 else I8, pick(*LAYOUTS))
    isa, tiles, layout = pick(*isa_levels(Op.qmatmul)), pick(0, 1, 3, 8), pick(*LAYOUTS)
    for attrs, right in forms(bs, fields):
        got = result(Op.qmatmul, [xs, right, *ins], want.shape, F32, attrs, layout, isa=isa, tiles=tiles)
        if near is None:
            np.testing.assert_array_equal(got, want.astype(np.float32))
        else:
            assert np.all(np.abs(got - want) <= near * 2e-6 + 1e-30)


@pytest.mark.parametrize("dynamic", [0, 1, 2])
@pytest.mark.parametrize("bits", [8, 4])
def test_large_real(bits: int, dynamic: int) -> None:
    rng = np.random.default_rng(2)
    for m, k, n, group in ((1, 20000, 70, 32), (40, 3000, 200, 0), (7, 1100, 33, 1024), (2, 17000, 5, 0)):
        a = rng.standard_normal((m, k)).astype(np.float32)
        b = rng.integers(*((0, 16) if bits == 4 else (-128, 128)), (k, n))
        scale = (rng.random((-(-k // group), n) if group else n) * 0.1).astype(np.float32)
        if dynamic:
            q, r = quantised_rows(a, dynamic)
            want = np.zeros((m, n), np.float32)
            for g in range(-(-k // group) if group else 1):
                at = slice(g * group, (g + 1) * group) if group else slice(None)
                want = want + (q[:, at] @ (b[at] - 3)).astype(np.float32) * (scale[g] if group else scale)
            want, near = want * r, 0.0
        else:
            w = (b - 3) * grouped(scale.astype(np.float64), group, k)
            want, near = a @ w, np.abs(a).astype(np.float64) @ np.abs(w)
        fields = {"bits": bits, "b_zero": 3, "dynamic": dynamic, "group": group}
        for attrs, right in forms(tensor(b, U8 if bits == 4 else I8), fields):
            for tiles, isa in ((1, "ref"), *((5, isa) for isa in isa_levels(Op.qmatmul))):
                got = result(
                    Op.qmatmul, [tensor(a, F32), right, tensor(scale, F32)], (m, n), F32, attrs, tiles=tiles, isa=isa
                )
                assert np.all(np.abs(got - want) <= near * 2e-6)


def test_infinite_rows() -> None:
    """Symmetric: infinity counts as the largest float32. Affine: what IEEE arithmetic gives, NaN."""
    a, b = torch.tensor([[float("inf"), 1.0, -2.0]]), torch.ones(3, 4, dtype=I8)
    one = torch.ones(1)
    y = result(Op.qmatmul, [a, b, one], (1, 4), F32, qmatmul_attrs(dynamic=1))
    with np.errstate(over="ignore"):
        assert np.all(y == np.float32(127) * (BIG / np.float32(127)))
    assert np.all(np.isnan(result(Op.qmatmul, [a, b, one], (1, 4), F32, qmatmul_attrs(dynamic=2))))


def test_activations() -> None:
    rng = np.random.default_rng(3)
    a, b = tensor(rng.standard_normal((3, 24)), F32), tensor(rng.integers(-128, 128, (24, 20)), I8)
    scale = torch.full((20,), 0.002)
    for dynamic in (0, 1, 2):
        plain = result(Op.qmatmul, [a, b, scale], (3, 20), F32, qmatmul_attrs(dynamic=dynamic))
        got = result(Op.qmatmul, [a, b, scale], (3, 20), F32, qmatmul_attrs(dynamic=dynamic, act=Act.silu))
        assert float((torch.from_numpy(got) - torch.nn.functional.silu(torch.from_numpy(plain))).abs().max()) < 2e-6


def test_packing() -> None:
    rng = np.random.default_rng(4)
    w = rng.integers(-128, 128, (10, 20))
    attrs = qmatmul_attrs(packed=1)
    blob = packed(Op.qmatmul, attrs, tensor(w, I8)).reshape(2, -1)
    back = blob[:, :-64].reshape(2, 3, 16, 4).transpose(1, 3, 0, 2).reshape(12, 32)
    assert np.array_equal(back[:10, :20], w) and not back[10:].any() and not back[:, 20:].any()
    sums = np.ascontiguousarray(blob[:, -64:]).view(np.int32).reshape(-1)
    assert np.array_equal(sums[:20], w.sum(0)) and not sums[20:].any()
    assert np.array_equal(packed(Op.qmatmul, attrs, tensor(w, I8, "flip")), blob.reshape(-1))
    w = rng.integers(0, 16, (10, 20))
    attrs = qmatmul_attrs(packed=1, bits=4, b_zero=9)
    blob = packed(Op.qmatmul, attrs, tensor(w, U8)).reshape(2, 2, 16, 4)
    back = np.stack([blob & 15, blob >> 4], 2).transpose(1, 2, 4, 0, 3).reshape(16, 32)
    assert np.array_equal(back[:10, :20], w) and np.all(back[10:] == 9) and np.all(back[:, 20:] == 9)
    table = struct("QgatherAttrs", packed=1, bits=4, zero=9)
    assert np.array_equal(packed(Op.qgather, table, tensor(w.T, U8)), blob.reshape(-1))
    assert native.pack_bytes(Op.qmatmul, attrs, 3, (10, 20)) == 0  # i8 with bits 4
    assert (
        native.pack_bytes(Op.qmatmul, attrs, 2, (0, 20)) == native.pack_bytes(Op.qmatmul, attrs, 2, (1 << 62, 20)) == 0
    )


def test_refusals() -> None:
    a, b, y = torch.zeros(2, 16, dtype=I8), torch.zeros(16, 8, dtype=I8), torch.zeros(2, 8, dtype=I8)
    scale, bias = torch.ones(2, 8, dtype=I32), torch.zeros(8, dtype=I32)
    ok: dict[str, Any] = {"lo": -128, "hi": 127}
    f, real, real_y = a.float(), torch.ones(8), y.float()
    native.run_op(Op.qmatmul, [a, b, scale, bias], [y], qmatmul_attrs(**ok))
    native.run_op(Op.qmatmul, [f, b, real, real, real], [real_y], qmatmul_attrs())
    pack = {**ok, "packed": 1}
    blob = packed(Op.qmatmul, qmatmul_attrs(**pack), b)
    native.run_op(Op.qmatmul, [a, blob, scale], [y], qmatmul_attrs(**pack))
    nibbles = packed(Op.qmatmul, qmatmul_attrs(bits=4), b.to(U8))
    native.run_op(Op.qmatmul, [f, nibbles, real], [real_y], qmatmul_attrs(bits=4, packed=1))
    two = torch.ones(2, 8)
    bad: list[tuple[list[Any], torch.Tensor, dict[str, Any]]] = [
        ([a, b, scale], y, {**ok, "bits": 5}),
        ([a, b, scale], y, {**ok, "bits": 4}),
        ([a, b.to(U8), scale], y, ok),
        ([a, b, scale], y, {**ok, "a_zero": -129}),
        ([a, b, scale], y, {**ok, "b_zero": 128}),
        ([f, b.to(U8), real], real_y, {"bits": 4, "b_zero": 16}),
        ([f, b.to(U8), real], real_y, {"bits": 4, "b_zero": -1}),
        ([a, b, scale], y, {**ok, "y_zero": 1 << 30}),
        ([a, b, scale], y, {**ok, "hi": 200}),
        ([a, b, scale], y, {**ok, "lo": float("nan")}),
        ([a, b, scale], y, {**ok, "act": 99}),
        ([a, b, scale], y, {**ok, "dynamic": 1}),
        ([a, b, scale], y, {**ok, "group": 8}),
        ([a, b, scale, None, real], y, ok),
        ([a, b, scale], y.to(I32), ok),
        ([a, b, scale], torch.zeros(3, 8, dtype=I8), ok),
        ([a, b, scale], torch.zeros(2, 9, dtype=I8), ok),
        ([a, b[:15], scale], y, ok),
        ([a, b[0], scale], y, ok),
        ([a, b, scale[:1]], y, ok),
        ([a, b, scale[:, :7]], y, ok),
        ([a, b, real], y, ok),
        ([a, b, scale, bias[:7]], y, ok),
        ([a, b, scale, bias.float()], y, ok),
        ([f, b, scale], y, ok),
        ([f, b, real, bias], real_y, {}),
        ([f, b, real], real_y, {"dynamic": 3}),
        ([f, b, two], real_y, {"group": 12}),
        ([f, b, two], real_y, {"group": 4}),
        ([f, b, two], real_y, {"group": 16}),
        ([f, b, two[:, :7]], real_y, {"group": 8}),
        ([f, b, two], real_y, {}),
        ([f, b, real.double()], real_y, {}),
        ([f, b, real, None, two], real_y, {}),
        ([f, b, two], real_y, {"group": (1 << 32) - 8}),
        ([a, blob[:-1], scale], y, pack),
        ([a, np.concatenate([blob, blob]), scale], y, pack),
        ([a, b, scale], y, pack),
        ([f, nibbles, real], real_y, {"packed": 1}),
        ([torch.zeros((), dtype=I8), b, scale], y, ok),
    ]
    for inputs, out, fields in bad:
        with pytest.raises(Error):
            native.run_op(Op.qmatmul, inputs, [out], qmatmul_attrs(**fields))


# ---- qgather ------------------------------------------------------------------------------------------------------------
@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_qgather(data: st.DataObject) -> None:
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))

    def pick(*options: Any) -> Any:
        return draw(st.sampled_from(options))

    v, d, bits, group = pick(1, 2, 15, 16, 17, 40), pick(0, 1, 3, 8, 33, 64, 100), pick(8, 4), pick(0, 0, 8, 16, 32)
    zero = pick(0, 8, 15) if bits == 4 else pick(0, 127, -128, 4)
    table = numbers(rng, (v, d), *((0, 15) if bits == 4 else (-128, 127)))
    index = rng.integers(-v, v, pick((), (0,), (3,), (2, 5), (2, 3, 2)))
    real = pick(np.float32, np.float16)
    shape = (-(-d // group), v) if group else pick((v,), (v,), (1,))
    scale = rng.standard_normal(shape).astype(real)
    offset = rng.standard_normal(shape).astype(real) if pick(0, 1) else None

    def of(x: np.ndarray) -> np.ndarray:
        wide = np.repeat(x, group, 0)[:d].T if group else np.broadcast_to(x.reshape(-1, 1), (v, d))
        return wide.astype(np.float32)

    want = (table - zero).astype(np.float32) * of(scale)
    want = (want if offset is None else want + of(offset))[index]
    rest = [torch.from_numpy(scale), None if offset is None else torch.from_numpy(offset)]
    idx = torch.from_numpy(np.asarray(index)).to(pick(torch.int64, I32, I16))
    t = tensor(table, U8 if bits == 4 else I8, pick(*LAYOUTS))
    fields = {"bits": bits, "zero": zero, "group": group}
    cases = [(struct("QgatherAttrs", **fields), t)]
    if d and shape[-1] == v:
        attrs = struct("QgatherAttrs", **fields, packed=1)
        cases.append((attrs, packed(Op.qgather, attrs, t)))
    layout = pick(*LAYOUTS)
    for attrs, rows in cases:
        for tiles in (1, 3):
            got = result(Op.qgather, [rows, idx, *rest], want.shape, F32, attrs, layout, tiles=tiles)
            np.testing.assert_array_equal(got, want)


def test_qgather_refusals_and_faults() -> None:
    table, index, y, scale = torch.zeros(20, 8, dtype=I8), torch.tensor([1, 19]), torch.zeros(2, 8), torch.ones(20)
    attrs = struct("QgatherAttrs", bits=8)
    blob = packed(Op.qgather, attrs, table)
    pack = {"packed": 1}
    native.run_op(Op.qgather, [table, index, scale], [y], attrs)
    native.run_op(Op.qgather, [blob, index, scale], [y], struct("QgatherAttrs", bits=8, packed=1))
    bad: list[tuple[list[Any], torch.Tensor, dict[str, Any]]] = [
        ([table, index + 1, scale], y, {}),
        ([table, index - 22, scale], y, {}),
        ([blob, index + 1, scale], y, pack),  # rows that only pad
        ([table, index.float(), scale], y, {}),
        ([table, index, scale[:19]], y, {}),
        ([table, index, scale], torch.zeros(2, 9), {}),
        ([table, index, scale], torch.zeros(3, 8), {}),
        ([table, index, scale], torch.zeros(8), {}),
        ([table, index, scale], y.double(), {}),
        ([table, index, scale], y, {"zero": 128}),
        ([table, index, scale], y, {"group": 8}),
        ([table, index, torch.ones(2, 20)], y, {"group": 4}),
        ([table, index, scale, scale[:2]], y, {}),
        ([table, index, scale], y, {"bits": 4}),
        ([table, index, scale], y, {"bits": 3}),
        ([table.to(U8), index, scale], y, {}),
        ([table[:0], index, scale[:0]], y, {}),
        ([blob[1:], index, scale], y, pack),
        ([blob, index, scale[:16]], y, pack),
        ([blob, index, torch.ones(1)], y, pack),
        ([blob, index, torch.ones(33)], y, pack),
        ([blob, index, torch.ones(())], y, pack),
    ]
    for inputs, out, fields in bad:
        with pytest.raises(Error):
            native.run_op(Op.qgather, inputs, [out], struct("QgatherAttrs", **{"bits": 8, **fields}))
