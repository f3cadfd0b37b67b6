"""GGUF files: every block type against gguf's own dequantisation bit for bit, hostile files, weights put into a model."""

from __future__ import annotations

import copy
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import trivet
from trivet import gguf
from trivet.api import capture
from trivet.pipeline import PASSES, Context, run_passes
from trivet.quantize.blocks import BlockTensor, attach, dequantize

ref = pytest.importorskip("gguf")
Kind = ref.GGMLQuantizationType
INTS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
SCALES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2],
          "Q6_K": [208]}  # fmt: skip


def random_blocks(kind: str, rows: int, blocks: int, seed: int = 0) -> np.ndarray:
    """Any bits but for the scales, which are finite numbers."""
    rng = np.random.default_rng(seed)
    size = ref.GGML_QUANT_SIZES[Kind[kind]][1]
    raw = rng.integers(0, 256, (rows * blocks, size), dtype=np.uint8)
    for at in SCALES[kind]:
        raw[:, at : at + 2] = (
            (rng.normal(size=(len(raw), 1)) * 10.0 ** rng.integers(-6, 4)).astype(np.float16).view(np.uint8)
        )
    return raw.reshape(rows, blocks * size)


def write(path: Path, tensors: dict[str, tuple[str, np.ndarray]], **metadata: object) -> Path:
    w = ref.GGUFWriter(path, "test")
    for key, value in metadata.items():
        if isinstance(value, (list, tuple)):
            w.add_array(key, value)
        elif isinstance(value, str):
            w.add_string(key, value)
        else:
            w.add_float32(key, value)
    for name, (kind, data) in tensors.items():
        if kind in ("F32", "F16"):
            w.add_tensor(name, data)
        else:
            w.add_tensor(name, data, raw_dtype=Kind[kind])
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(4, 32)).astype(np.float32)
    tensors = {"a.weight": ("F32", x), "b.weight": ("Q4_1", ref.quantize(x, Kind.Q4_1)),
               "c.weight": ("F16", x.astype(np.float16))}  # fmt: skip
    return write(tmp_path / "small.gguf", tensors, words=["one", "zwei", "три"], numbers=[1, 2, 3], scale=0.5)


# ---- values
@pytest.mark.parametrize("kind", INTS)
def test_blocks_are_exact(kind: str, tmp_path: Path) -> None:
    raw = random_blocks(kind, 5, 3)
    f = gguf.load(write(tmp_path / "x.gguf", {"w": (kind, raw)}))
    got = f.tensors["w"]
    assert isinstance(got, BlockTensor) and got.kind == kind and got.name == "w"
    want = torch.from_numpy(ref.dequantize(raw, Kind[kind]))
    assert got.shape == tuple(want.shape) == f.tensors.entries["w"].shape
    assert torch.equal(got.dequantize(), want)
    low, high = {"Q4_0": (0, 15), "Q4_1": (0, 15), "Q4_K": (0, 15), "Q8_0": (-128, 127), "Q6_K": (-32, 31), "Q5_0": (-16, 15)}.get(kind, (0, 31))  # fmt: skip
    assert low <= int(got.q.min()) and int(got.q.max()) <= high
    assert (got.q.dtype == torch.uint8) == (got.bits == 4) == ("Q4" in kind)
    assert got.scale.dtype == (torch.float32 if "_K" in kind else torch.float16)  # f16 where that is exact
    assert got.scale.shape == (5, want.shape[1] // got.group)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), size=st.sampled_from([1e-6, 1e-2, 1.0, 1e3]))
def test_quantised_by_gguf(kind: str, seed: int, size: float) -> None:
    x = (np.random.default_rng(seed).normal(size=(3, 64)) * size).astype(np.float32)
    x[1] = 0  # a scale of 0
    raw = ref.quantize(x, Kind[kind])
    entry = gguf.Entry("w", kind, (3, 64), 0, raw.nbytes)
    got = gguf.Tensors(raw.reshape(-1), {"w": entry})["w"]
    assert isinstance(got, BlockTensor)
    assert torch.equal(got.dequantize(), torch.from_numpy(ref.dequantize(raw, Kind[kind])))


def test_floats_lie_in_the_file(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    bf16 = torch.from_numpy(x).bfloat16()
    tensors = {
        "f32": ("F32", x),
        "f16": ("F16", x.astype(np.float16)),
        "bf16": ("BF16", bf16.view(torch.uint8).numpy()),
    }
    f = gguf.load(write(tmp_path / "x.gguf", tensors))
    assert torch.equal(f.tensors["f32"], torch.from_numpy(x))  # type: ignore[arg-type]
    assert torch.equal(f.tensors["f16"], torch.from_numpy(x).half())  # type: ignore[arg-type]
    assert torch.equal(f.tensors["bf16"], bf16)  # type: ignore[arg-type]
    assert list(f.tensors) == ["f32", "f16", "bf16"] and len(f.tensors) == 3


def test_metadata(small: Path) -> None:
    f = gguf.load(small)
    assert f.metadata["general.architecture"] == "test" and f.version == 3
    assert f.metadata["words"] == ["one", "zwei", "три"] and f.metadata["numbers"] == [1, 2, 3]
    assert f.metadata["scale"] == 0.5


def test_other_types_are_named(tmp_path: Path) -> None:
    size = ref.GGML_QUANT_SIZES[Kind.Q2_K][1]
    path = write(tmp_path / "x.gguf", {"blk.0.w": ("Q2_K", np.zeros((2, size), np.uint8)), "y": ("F32", np.ones((2, 2), np.float32))})  # fmt: skip
    f = gguf.load(path)
    assert f.tensors.entries["blk.0.w"].kind == "Q2_K"
    with pytest.raises(trivet.Error, match=r"blk\.0\.w is stored as Q2_K"):
        f.tensors["blk.0.w"]
    assert f.tensors["y"].shape == (2, 2)


# ---- hostile files
def test_truncated_files(small: Path, tmp_path: Path) -> None:
    data = small.read_bytes()
    path = tmp_path / "cut.gguf"
    for n in range(0, len(data) - 1):
        path.write_bytes(data[:n])
        with pytest.raises(trivet.Error):
            f = gguf.load(path)
            [f.tensors[name] for name in f.tensors]
    with pytest.raises(trivet.Error, match="no such|cannot be read"):
        gguf.load(tmp_path / "none.gguf")


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damaged_files(small: Path, tmp_path: Path, data: st.DataObject) -> None:
    raw = bytearray(small.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(4, len(raw) - 1))
        raw[at : at + 1] = bytes([data.draw(st.integers(0, 255))])
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw)
    try:
        f = gguf.load(path)
        for name in f.tensors:
            f.tensors[name]
    except trivet.Error:
        pass


def head(*parts: bytes, tensors: int = 0, keys: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + b"".join(parts)


def text(s: str) -> bytes:
    return struct.pack("<Q", len(s)) + s.encode()


@pytest.mark.parametrize(("data", "why"), [
    (b"", "no GGUF"),
    (b"GGML0000", "no GGUF"),
    (b"GGUF" + struct.pack("<I", 1) + bytes(64), "version 1"),
    (head(tensors=1 << 60), "do not fit"),
    (head(keys=1 << 60), "do not fit"),
    (head(text("a"), struct.pack("<IIQ", 9, 0, 1 << 60), bytes(64), keys=1), "an array of"),
    (head(text("a"), struct.pack("<IIQ", 9, 8, 1 << 60), bytes(64), keys=1), "an array of"),
    (head(text("a"), struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 40, bytes(64), keys=1), "unknown type"),
    (head(text("a"), struct.pack("<IQ", 8, 1 << 62), bytes(64), keys=1), "ends at byte"),
    (head(text("a"), struct.pack("<I", 99), bytes(64), keys=1), "unknown type 99"),
    (head(text("a"), struct.pack("<IB", 0, 1), text("a"), struct.pack("<IB", 0, 1), bytes(64), keys=2), "twice"),
    (head(text("general.alignment"), struct.pack("<II", 4, 3), bytes(64), keys=1), "alignment"),
    (head(text("w"), struct.pack("<IQIQ", 1, 8, 0, 1 << 63), bytes(64), tensors=1), "ends at byte"),
    (head(text("w"), struct.pack("<IQQIQ", 2, 1 << 63, 1 << 63, 0, 0), bytes(64), tensors=1), "no tensor has"),
    (head(text("w"), struct.pack("<IQIQ", 1, 33, 2, 0), bytes(64), tensors=1), "whole blocks of Q4_0"),
    (head(text("w"), struct.pack("<IIQ", 0, 2, 0), bytes(64), tensors=1), "whole blocks"),
    (head(text("w"), struct.pack("<I", 1 << 30), bytes(64), tensors=1), "axes"),
    (head(*[text("w") + struct.pack("<IQIQ", 1, 2, 0, 0)] * 2, bytes(64), tensors=2), "twice"),
    (head(struct.pack("<Q", 2) + b"\xff\xfe", struct.pack("<IQIQ", 1, 2, 0, 0), bytes(64), tensors=1), "damaged"),
])  # fmt: skip
def test_heads_that_lie(data: bytes, why: str, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(trivet.Error, match=why):
        gguf.load(path)


def test_scales_that_are_no_numbers(tmp_path: Path) -> None:
    raw = random_blocks("Q4_1", 2, 1)
    raw[1, :2] = np.array([np.nan], np.float16).view(np.uint8)
    f = gguf.load(write(tmp_path / "x.gguf", {"w": ("Q4_1", raw)}))
    with pytest.raises(trivet.Error, match="w .Q4_1. has scales"):
        f.tensors["w"]


# ---- in a model
class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(20, 64)
        self.q = nn.Linear(64, 64, bias=False)
        self.norm = nn.RMSNorm(64)
        self.head = nn.Linear(64, 20, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(F.silu(self.q(self.emb(ids)))))


@pytest.fixture
def file(tmp_path: Path) -> gguf.File:
    rng = np.random.default_rng(3)
    emb, q = (rng.normal(size=s).astype(np.float32) for s in ((20, 64), (64, 64)))
    return gguf.load(write(tmp_path / "net.gguf", {
        "token_embd.weight": ("Q8_0", ref.quantize(emb, Kind.Q8_0)), "blk.0.attn_q.weight": ("Q4_1", ref.quantize(q, Kind.Q4_1)),
        "output_norm.weight": ("F32", np.ones(64, np.float32) * 2), "rope_freqs.weight": ("F32", np.ones(4, np.float32))}))  # fmt: skip


NAMES = {"token_embd.weight": "emb.weight", "blk.0.attn_q.weight": "q.weight", "output_norm.weight": "norm.weight"}


def test_apply_is_the_dequantised_model(file: gguf.File) -> None:
    torch.manual_seed(0)
    plain, model = Net(), Net()
    assert file.apply(model, NAMES) is model
    with torch.no_grad():
        for name, target in NAMES.items():
            t = file.tensors[name]
            plain.get_parameter(target).copy_(t.dequantize() if isinstance(t, BlockTensor) else t)
    ids = torch.tensor([[1, 5, 19]])
    assert torch.equal(model(ids), plain(ids))
    assert model.head.weight_q is model.emb.weight_q  # still tied
    assert [n for n, _ in model.named_parameters()] == ["norm.weight"]
    assert isinstance(model.q, nn.Linear) and "Linear" in repr(model)
    other = copy.deepcopy(model)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(ids), plain(ids))
    for strict in (False, True):
        program = torch.export.export(model, (ids,), strict=strict)
        assert sum("trivet.dequantize" in str(n.target) for n in program.graph.nodes) == 3
        assert torch.equal(program.module()(ids), plain(ids))


def test_names_by_function_and_rows_in_another_order(file: gguf.File) -> None:
    index = gguf.halves(64, 4)
    # what converters of Hugging Face models do to a weight of 4 heads
    w = torch.arange(64.0)[:, None].expand(64, 3)
    stored = w.reshape(4, 2, 8, 3).transpose(1, 2).reshape(64, 3)
    assert torch.equal(stored[index], w)
    model = Net()
    file.apply(model, lambda n: "q.weight" if "attn_q" in n else None,
               order=lambda n, shape: gguf.halves(shape[0], 4) if "attn_q" in n else None)  # fmt: skip
    want = file.tensors["blk.0.attn_q.weight"]
    assert isinstance(want, BlockTensor)
    assert torch.equal(model.q.weight, want.dequantize()[index])
    with pytest.raises(trivet.Error, match="63 rows"):
        gguf.halves(63, 4)


@pytest.mark.parametrize(("names", "why"), [
    ({"token_embd.weight": "emb.bias"}, "emb.bias, which is no parameter"),
    ({"token_embd.weight": "nowhere.weight"}, "nowhere.weight, which is no parameter"),
    ({"token_embd.weight": "q.weight"}, r"token_embd.weight is \[20, 64\], the parameter q.weight \[64, 64\]"),
    ({"other": "q.weight"}, "none of the 4 tensors"),
    ({"token_embd.weight": "emb.weight", "blk.0.attn_q.weight": "head.weight"}, "both go to head.weight"),
])  # fmt: skip
def test_apply_says_what_is_wrong(names: dict[str, str], why: str, file: gguf.File) -> None:
    model = Net()
    with pytest.raises(trivet.Error, match=why):
        file.apply(model, names)
    assert len(list(model.parameters())) == 3  # nothing has changed


def test_exported_weights_are_the_files_integers(file: gguf.File, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = file.apply(Net().eval(), NAMES)
    ids = torch.tensor([[1, 5, 19]])
    module = capture(model, (ids,))
    run_passes(module, Context(), PASSES[: PASSES.index("partition")])
    nodes = {
        n.op: n for n in module.entries["forward"].nodes if n.op in ("qgather", "qmatmul") and n.loc.module != "head"
    }
    q, table = file.tensors["blk.0.attn_q.weight"], file.tensors["token_embd.weight"]
    assert isinstance(q, BlockTensor) and isinstance(table, BlockTensor)
    weight, scale, offset = (nodes["qmatmul"].inputs[i].const.data for i in (1, 2, 4))  # type: ignore[union-attr]
    assert torch.equal(weight, q.q.t()) and torch.equal(scale.float(), q.scale.t().float())
    assert torch.equal(offset.float(), q.offset.t().float())  # type: ignore[union-attr]
    assert torch.equal(nodes["qgather"].inputs[0].const.data, table.q)  # type: ignore[union-attr]


@pytest.mark.parametrize(("more", "bound"), [({}, 1e-5), ({"quantize": "f16"}, 2e-3), ({"quantize": "bf16"}, 2e-2)])
def test_through_the_runtime(more: dict[str, str], bound: float, file: gguf.File, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = file.apply(Net().eval(), NAMES)
    ids = torch.tensor([[1, 5, 19]])
    trivet.export(model, (ids,), **more).save(tmp_path / "net.trv")  # type: ignore[arg-type]
    with torch.no_grad():
        want = model(ids)
    got = trivet.load(tmp_path / "net.trv")(ids)
    assert float((got - want).abs().max() / want.abs().max()) < bound


# ---- the operator
@settings(max_examples=50, deadline=None)
@given(shape=st.lists(st.integers(0, 9), min_size=1, max_size=3), axis=st.integers(0, 2), group=st.integers(0, 5),
       offset=st.booleans(), zero=st.integers(-128, 127), half=st.booleans())  # fmt: skip
def test_dequantize(shape: list[int], axis: int, group: int, offset: bool, zero: int, half: bool) -> None:
    gen = torch.Generator().manual_seed(sum(shape) + group)
    axis %= len(shape)
    q = torch.randint(-128, 128, shape, generator=gen, dtype=torch.int8)
    n = -(-shape[axis] // group) if group else shape[axis]
    size = [*shape[:axis], n, *shape[axis + 1 :]] if group else [n]
    s, o = (torch.rand(size, generator=gen).to(torch.float16 if half else torch.float32) for _ in range(2))
    got = dequantize(q, s, o if offset else None, zero, axis, group, 8)
    for at in np.ndindex(*shape):
        g = [*at[:axis], at[axis] // group, *at[axis + 1 :]] if group else [at[axis]]
        want = np.float32(float(s[tuple(g)])) * np.float32(int(q[at]) - zero)
        want = want + np.float32(float(o[tuple(g)])) if offset else want
        assert got[at] == want


def test_dequantize_checks_shapes() -> None:
    q = torch.zeros(4, 6, dtype=torch.int8)
    with pytest.raises(ValueError, match="does not fit"):
        dequantize(q.float(), torch.ones(6), None, 0, 1, 0, 8)
    with pytest.raises(ValueError, match="does not fit"):
        dequantize(q, torch.ones(4, 3), None, 0, 1, 4, 8)
    with pytest.raises(ValueError, match="offset"):
        dequantize(q, torch.ones(4, 2), torch.ones(4, 1), 0, 1, 4, 8)
    with pytest.raises(trivet.Error, match="no parameter 'bias'"):
        attach([(nn.Linear(6, 4, bias=False), "bias")], BlockTensor("w", q, torch.ones(())))
