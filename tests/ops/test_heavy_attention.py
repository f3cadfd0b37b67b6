"""attention on every ISA against torch's definition: masks, causal, grouped heads, layouts, extremes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from heavy import FLOATS, check, isa_levels, laid_out, place, run, struct
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet import native
from trivet.error import Error
from trivet.fbs.structs import Op

LAYOUTS = st.sampled_from(["dense", "gaps", "flip", "last"])


def reference(q: Any, k: Any, v: Any, mask: Any, scale: float, causal: bool, nan_rows: bool = False) -> torch.Tensor:
    q, k, v = q.double(), k.double(), v.double()
    if k.shape[-3] not in (1, q.shape[-3]):
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
        v = v.repeat_interleave(q.shape[-3] // v.shape[-3], -3)
    s = q @ k.transpose(-1, -2) * scale
    if causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), float("-inf"))
    if mask is not None:
        s = s.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else s + mask.double()
    p = torch.softmax(s, -1)
    return (p if nan_rows else torch.where((s == float("-inf")).all(-1, keepdim=True), 0.0, p)) @ v


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_attention(data: st.DataObject) -> None:
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 1000)))
    dtype = draw(st.sampled_from([*FLOATS, *[torch.float32] * 4]))
    batch, groups, per_group = (
        draw(st.sampled_from([1, 2])),
        draw(st.sampled_from([1, 2, 3])),
        draw(st.sampled_from([1, 1, 3])),
    )
    length, keys = draw(st.sampled_from([1, 1, 5, 17, 50, 100])), draw(st.sampled_from([1, 7, 16, 64, 65, 150]))
    size, values = draw(st.sampled_from([1, 8, 33, 64, 130])), draw(st.sampled_from([1, 16, 64, 80, 200]))
    heads = groups * per_group
    q = torch.randn(batch, heads, length, size).to(dtype)
    k, v = torch.randn(batch, groups, keys, size).to(dtype), torch.randn(batch, groups, keys, values).to(dtype)
    shape = draw(
        st.sampled_from([None, None, (length, keys), (1, keys), (batch, 1, length, keys), (heads, length, keys)])
    )
    mask = None
    if shape is not None:
        mask = torch.rand(shape) < 0.7
        if draw(st.booleans()):
            mask = torch.where(mask, torch.randn(shape), torch.tensor(float("-inf"))).to(dtype)
    causal = draw(st.booleans())
    scale = draw(st.sampled_from([size**-0.5, 1.0, 8.0]))
    want = reference(q, k, v, mask, float(torch.tensor(scale)), causal)
    nan_rows = draw(st.booleans())
    if nan_rows:
        want = want + reference(q, k, v, mask, float(torch.tensor(scale)), causal, nan_rows=True) * 0
    out = laid_out(want.shape, dtype, draw(LAYOUTS))
    first = draw(st.sampled_from([0, keys // 2, keys - 1])) if draw(st.booleans()) else keys
    pieces = [place(x, draw(LAYOUTS)) for p in (slice(first), slice(first, None)) for x in (k[:, :, p], v[:, :, p])]
    run(Op.attention, [place(q, draw(LAYOUTS)), *pieces[:2], mask, *(pieces[2:] if first < keys else [])], out,
        struct("AttentionAttrs", causal=causal, nan_rows=nan_rows, scale=scale), isa=draw(st.sampled_from(isa_levels(Op.attention))),
        tiles=draw(st.sampled_from([0, 1, 5])))  # fmt: skip
    sharp = 20.0 if dtype == torch.float64 and scale != 1.0 else 4.0  # the scale is a float32
    check(out, want.to(dtype), factor=sharp if dtype != torch.float64 else 1e6)


@pytest.mark.parametrize("isa", isa_levels(Op.attention))
def test_large_scores(isa: str) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 1, 9, 16) * 100, torch.randn(1, 1, 70, 16) * 100, torch.randn(1, 1, 70, 32)
    out = run(Op.attention, [q, k, v], torch.empty(1, 1, 9, 32), struct("AttentionAttrs", scale=1.0), isa=isa)
    check(out, reference(q, k, v, None, 1.0, False).float(), factor=100.0)


@pytest.mark.parametrize("isa", isa_levels(Op.attention))
def test_rows_without_keys(isa: str) -> None:
    q, k, v = torch.randn(1, 2, 60, 16), torch.randn(1, 2, 70, 16), torch.randn(1, 2, 70, 16)
    mask = torch.ones(60, 70, dtype=torch.bool)
    mask[3] = False
    mask[50, 65:] = False
    out = run(Op.attention, [q, k, v, mask], torch.empty(1, 2, 60, 16), struct("AttentionAttrs", scale=0.25), isa=isa)
    assert not out[:, :, 3].any()
    attrs = struct("AttentionAttrs", scale=0.25, nan_rows=True)
    nan = run(Op.attention, [q, k, v, mask], torch.empty(1, 2, 60, 16), attrs, isa=isa)
    assert nan[:, :, 3].isnan().all() and torch.equal(nan[:, :, 4:], out[:, :, 4:])
    check(out, reference(q, k, v, mask, 0.25, False).float())
    none = run(
        Op.attention, [q, k[:, :, :0], v[:, :, :0]], torch.full((1, 2, 60, 16), 7.0), struct("AttentionAttrs"), isa=isa
    )
    assert not none.any()


@pytest.mark.parametrize("isa", isa_levels(Op.attention))
def test_huge_values(isa: str) -> None:
    """More value columns than a block holds."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 1, 20, 300), torch.randn(1, 1, 90, 300), torch.randn(1, 1, 90, 1500)
    out = run(Op.attention, [q, k, v], torch.empty(1, 1, 20, 1500), struct("AttentionAttrs", scale=0.1), isa=isa)
    check(out, reference(q, k, v, None, 0.1, False).float())


def test_refusals() -> None:
    q, k, v, y = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 9), torch.empty(1, 4, 5, 9)
    attrs = struct("AttentionAttrs", scale=1.0)
    native.run_op(Op.attention, [q, k, v], [y], attrs)
    bad: list[tuple[list[Any], torch.Tensor]] = [
        ([q, k[..., :7], v], y),
        ([q, k, v[:, :, :5]], y),
        ([q[:, :3], k, v], y[:, :3]),
        ([q, k, v], torch.empty(1, 4, 5, 8)),
        ([q, k, v, torch.ones(5, 7, dtype=torch.bool)], y),
        ([q, k, v, torch.ones(3, 5, 6, dtype=torch.bool)], y),
        ([q, k, v, torch.ones(5, 6, dtype=torch.int32)], y),
        ([q, k.double(), v], y),
        ([q.int(), k.int(), v.int()], y.int()),
        ([q, k, v, None, k, None], y),
        ([q, k, v, None, k, v[:, :, :5]], y),
        ([q, k, v, None, k[:, :1], v[:, :1]], y),
        ([q, k, v, None, k[..., :7], v], y),
        ([q, k, v, None, k.double(), v.double()], y),
        ([q, k, v, torch.ones(5, 6, dtype=torch.bool), k, v], y),
    ]
    for inputs, out in bad:
        with pytest.raises(Error, match="attention"):
            native.run_op(Op.attention, inputs, [out], attrs)
